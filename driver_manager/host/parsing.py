"""Text of the kernel, turned into values. Nothing is read here; a line that cannot be understood is left out and said, never guessed at."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from driver_manager.core.snapshot import MountView

_ESCAPE = re.compile(r"\\([0-7]{3})")
_POD = re.compile(
    r"(?:\A|[/-])pod(?P<uid>[0-9a-f]{8}(?P<sep>[-_])[0-9a-f]{4}(?P=sep)[0-9a-f]{4}(?P=sep)[0-9a-f]{4}(?P=sep)[0-9a-f]{12}"
    r"|[0-9a-f]{32})(?=[./:]|\Z)"
)
_UNIT = re.compile(r"[^/]+\.(?:service|scope)")
_NUMBER = re.compile(r"[0-9]{1,20}")
_LETTER = re.compile(r"[A-Za-z]")
_MAJOR = re.compile(r" *([0-9]{1,10}) (.+)")
_MINOR = re.compile(r"^Device Minor:[ \t]*([0-9]{1,10})[ \t]*$", re.MULTILINE)
_CAPABILITIES = re.compile(r"CapEff:\t([0-9a-f]{1,16})")
DELETED: Final = " (deleted)"


@dataclass(frozen=True, slots=True)
class MountLine:
    """One line of mountinfo: https://www.kernel.org/doc/html/latest/filesystems/proc.html (3.5)."""

    view: MountView
    parent_id: int


def lines_of(text: str) -> list[str]:
    """The lines of a kernel text. A newline alone ends one: names may hold all the other signs that Python takes for the end of a line."""
    return text.split("\n")


def number(text: str) -> int:
    """A number as the kernel writes it; Python's own reading takes underscores, signs and digits of other scripts too.

    Raises:
        ValueError: it is none.
    """
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"{text!r} is no number")
    return int(text)


def decode_octal(text: str) -> str:
    """Undoes the octal escapes of mountinfo (space, tab, newline, backslash, and `#` on newer kernels)."""
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)


def mount_line(line: str) -> MountLine | None:
    """Reads one line of mountinfo; None if it is none."""
    fields = line.split(" ")
    try:
        dash = fields.index("-", 6)
        view = MountView(
            mount_id=number(fields[0]),
            target=decode_octal(fields[4]),
            fs_type=decode_octal(fields[dash + 1]),
            source=decode_octal(fields[dash + 2]) if len(fields) > dash + 2 else "",
            is_shared=any(field.startswith("shared:") for field in fields[6:dash]),
            filesystem=fields[2],
        )
        return MountLine(view, number(fields[1]))
    except (ValueError, IndexError):
        return None


def is_at_or_below(path: str, folder: str) -> bool:
    """Whether a path is a folder or lies in it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def mounts_at(text: str, folder: str) -> tuple[tuple[MountView, ...], tuple[str, ...]]:
    """The mounts at and below a folder in mountinfo's order, and the lines that could not be read."""
    found, bad = [], []
    for line in lines_of(text):
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
    for line in lines_of(text):
        if line in ("Character devices:", "Block devices:"):
            in_characters = line.startswith("Character")
        elif in_characters and (match := _MAJOR.fullmatch(line)):
            majors[int(match[1])] = match[2]
    return majors


def device_name(uevent: str) -> str | None:
    """The path of a device's node, from its uevent file; the kernel gives names below /dev."""
    for line in lines_of(uevent):
        if line.startswith("DEVNAME=") and len(line) > len("DEVNAME="):
            return f"/dev/{line.removeprefix('DEVNAME=').removeprefix('/dev/')}"
    return None


def gpu_minor(information: str) -> int | None:
    """The minor number of a GPU's node, from /proc/driver/nvidia/gpus/ADDRESS/information."""
    match = _MINOR.search(information)
    return int(match[1]) if match else None


def pod_uid(cgroup: str) -> str | None:
    """The uid of the pod that a /proc/PID/cgroup text speaks of.

    In a pod's own cgroup namespace the common prefix is cut off and `..` stands for it, so `kubepods` may be missing; the uid has `_` for
    `-` under the systemd driver. A static pod's uid is a hash of 32 digits (its mirror in the API has it as annotation
    `kubernetes.io/config.hash`).
    """
    match = next((match for path in _paths(cgroup) if (match := _POD.search(path))), None)
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
    for line in lines_of(cgroup):
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
    _, is_there, rest = stat.rpartition(") ")
    fields = rest.split(" ")
    if not is_there or not _LETTER.fullmatch(fields[0]):
        return None
    try:
        return ProcessState(fields[0], number(fields[6]), number(fields[17]))
    except (IndexError, ValueError):
        return None


def effective_capabilities(status: str) -> int | None:
    """CapEff of a /proc/PID/status text."""
    for line in lines_of(status):
        if line.startswith("CapEff:"):
            match = _CAPABILITIES.fullmatch(line)
            return int(match[1], 16) if match else None
    return None


def without_module(modules: str, name: str) -> str:
    """The text of /proc/modules after a module has gone: its line, and its name and its count in the lines of others."""
    return "".join(_without(line, name) for line in with_newlines(modules))


def with_newlines(text: str) -> list[str]:
    """The lines with their newlines; together they are the text."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def _without(line: str, name: str) -> str:
    fields = line.removesuffix("\n").split(" ")
    if fields[0] == name:
        return ""
    if len(fields) < 4 or name not in (users := fields[3].split(",")):
        return line
    rest = ",".join(user for user in users if user != name)
    fields[3] = rest or "-"
    if _NUMBER.fullmatch(fields[2]):
        fields[2] = str(max(0, int(fields[2]) - 1))
    return " ".join(fields) + ("\n" if line.endswith("\n") else "")


def is_permanent(modules: str, name: str) -> bool:
    """Whether /proc/modules shows a module without an exit function."""
    return any(fields[0] == name and "[permanent]" in fields[3] for fields in _module_fields(modules))


def _module_fields(modules: str) -> Iterable[list[str]]:
    return (fields for fields in (line.split() for line in lines_of(modules)) if len(fields) >= 4)
