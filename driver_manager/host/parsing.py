"""Text of the kernel, turned into values. Nothing is read here; a line that cannot be understood is left out and said, never guessed at."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from driver_manager.core.snapshot import MountView

_ESCAPE = re.compile(r"\\([0-7]{3})")
_POD = re.compile(
    r"(?:^|[/-])pod(?P<uid>[0-9a-f]{8}(?P<sep>[-_])[0-9a-f]{4}(?P=sep)[0-9a-f]{4}(?P=sep)[0-9a-f]{4}(?P=sep)[0-9a-f]{12}"
    r"|[0-9a-f]{32})(?=[./:]|$)"
)
_UNIT = re.compile(r"[^/]+\.(?:service|scope)")
DELETED: Final = " (deleted)"


@dataclass(frozen=True, slots=True)
class MountLine:
    """One line of mountinfo: https://www.kernel.org/doc/html/latest/filesystems/proc.html (3.5)."""

    view: MountView
    parent_id: int


def decode_octal(text: str) -> str:
    """Undoes the octal escapes of mountinfo (space, tab, newline, backslash, and `#` on newer kernels)."""
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)


def mount_line(line: str) -> MountLine | None:
    """Reads one line of mountinfo; None if it is none."""
    fields = line.split(" ")
    try:
        dash = fields.index("-", 6)
        view = MountView(
            mount_id=int(fields[0]),
            target=decode_octal(fields[4]),
            fs_type=decode_octal(fields[dash + 1]),
            source=decode_octal(fields[dash + 2]) if len(fields) > dash + 2 else "",
            is_shared=any(field.startswith("shared:") for field in fields[6:dash]),
        )
        return MountLine(view, int(fields[1]))
    except (ValueError, IndexError):
        return None


def is_at_or_below(path: str, folder: str) -> bool:
    """Whether a path is a folder or lies in it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def mounts_at(text: str, folder: str) -> tuple[tuple[MountView, ...], tuple[str, ...]]:
    """The mounts at and below a folder in mountinfo's order, and the lines that could not be read."""
    found, bad = [], []
    for line in text.split("\n"):
        if not line.strip():
            continue
        parsed = mount_line(line)
        if parsed is None:
            bad.append(line)
        elif is_at_or_below(parsed.view.target, folder):
            found.append(parsed.view)
    return tuple(found), tuple(bad)


def char_majors(text: str) -> dict[int, str]:
    """Major numbers of character devices by driver name, from /proc/devices; the last name given for a number stands."""
    majors: dict[int, str] = {}
    in_characters = False
    for line in text.splitlines():
        if line.endswith(":"):
            in_characters = line.startswith("Character")
            continue
        number, _, name = line.strip().partition(" ")
        if in_characters and number.isascii() and number.isdigit() and name:
            majors[int(number)] = name.strip()
    return majors


def pod_uid(cgroup: str) -> str | None:
    """The uid of the pod that a /proc/PID/cgroup text speaks of.

    In a pod's own cgroup namespace the common prefix is cut off and `..` stands for it, so `kubepods` may be missing; the uid has `_` for
    `-` under the systemd driver. A static pod's uid is a hash of 32 digits (its mirror in the API has it as annotation
    `kubernetes.io/config.hash`).
    """
    match = _POD.search("\n".join(_paths(cgroup)))
    return match["uid"].replace("_", "-") if match else None


def systemd_unit(cgroup: str) -> str | None:
    """The service or scope of the system's manager in a /proc/PID/cgroup text; of nested ones the outermost."""
    for path in _paths(cgroup):
        for part in path.split("/"):
            if _UNIT.fullmatch(part):
                return part
    return None


def _paths(cgroup: str) -> list[str]:
    """The cgroup paths, systemd's own hierarchy first."""
    ranked: list[tuple[int, str]] = []
    for line in cgroup.splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3:
            ranked.append((0 if parts[1] == "name=systemd" else 1 if not parts[1] else 2, parts[2]))
    return [path for _, path in sorted(ranked, key=lambda entry: entry[0])]


@dataclass(frozen=True, slots=True)
class ProcessState:
    """What /proc/PID/stat says that matters here."""

    letter: str
    flags: int
    threads: int

    @property
    def is_zombie(self) -> bool:
        """Whether it has ended and only its parent has not asked for it yet."""
        return self.letter in ("Z", "X", "x")

    @property
    def is_kernel_thread(self) -> bool:
        """PF_KTHREAD of include/linux/sched.h."""
        return bool(self.flags & 0x00200000)


def process_state(stat: str) -> ProcessState | None:
    """Reads /proc/PID/stat; the command in it may hold spaces and parentheses. None if it is unreadable."""
    fields = stat.rpartition(")")[2].split()
    try:
        return ProcessState(fields[0], int(fields[6]), int(fields[17]))
    except (IndexError, ValueError):
        return None


def effective_capabilities(status: str) -> int | None:
    """CapEff of a /proc/PID/status text."""
    for line in status.splitlines():
        if line.startswith("CapEff:"):
            try:
                return int(line.split()[1], 16)
            except (IndexError, ValueError):
                return None
    return None


def without_module(modules: str, name: str) -> str:
    """The text of /proc/modules after a module has gone: its line, and its name and its count in the lines of others."""
    return "".join(_without(line, name) for line in modules.splitlines(keepends=True))


def _without(line: str, name: str) -> str:
    fields = line.split(" ")
    if fields[0] == name:
        return ""
    if len(fields) < 4 or name not in (users := fields[3].split(",")):
        return line
    rest = ",".join(user for user in users if user != name)
    fields[3] = rest or "-"
    if fields[2].isdigit():
        fields[2] = str(max(0, int(fields[2]) - 1))
    return " ".join(fields)


def is_permanent(modules: str, name: str) -> bool:
    """Whether /proc/modules shows a module without an exit function."""
    return any(fields[0] == name and "[permanent]" in fields[3] for fields in _module_fields(modules))


def _module_fields(modules: str) -> Iterable[list[str]]:
    return (fields for fields in (line.split() for line in modules.splitlines()) if len(fields) >= 4)
