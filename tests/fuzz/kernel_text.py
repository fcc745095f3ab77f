"""What has to hold for each parser of kernel text, whatever the text: shared by the hypothesis tests and by the coverage-guided fuzzing.

A property takes any text. It fails where a parser falls over, where it differs from a second, slow and obvious reading, and where the
values, written again as the kernel writes them, do not come back.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple
from typing import Final

from driver_manager.core.modalias import PLAIN_VFIO, Alias, Modalias, parse_aliases, parse_modalias, vfio_driver
from driver_manager.core.vfio import full_address
from driver_manager.host import parsing, scan

FOLDER: Final = "/run/nvidia/driver"
_DIGITS: Final = "0123456789"
_HEX: Final = _DIGITS + "abcdef"

# Writers: the kernel's own formats ----------------------------------------------------------------------------------


def escaped(text: str) -> str:
    """As `mangle` of fs/seq_file.c writes a name into mountinfo."""
    return "".join(f"\\{ord(sign):03o}" if sign in " \t\\#\n" else sign for sign in text)


def mountinfo_line(line: parsing.MountLine, root: str = "/") -> str:
    """fs/proc_namespace.c, show_mountinfo."""
    view, tags = line.view, "shared:1 " if line.view.is_shared else ""
    names = f"{escaped(view.fs_type)} {escaped(view.source)}"
    where = f"{view.filesystem} {escaped(root)} {escaped(view.target)}"
    return f"{view.mount_id} {line.parent_id} {where} rw,relatime {tags}- {names} rw\n"


def devices(majors: dict[int, str]) -> str:
    """fs/char_dev.c, chrdev_show."""
    return "Character devices:\n" + "".join(f"{major:3d} {name}\n" for major, name in majors.items()) + "\nBlock devices:\n  8 sd\n"


def stat(state: parsing.ProcessState, command: str = "x) Z 1 (") -> str:
    """fs/proc/array.c, do_task_stat."""
    return f"7 ({command}) {state.letter} 1 1 1 0 -1 {state.flags} 0 0 0 0 0 0 0 0 20 0 {state.threads} 0 100 1 1\n"


def modalias(value: Modalias, bus: str = "pci") -> str:
    """scripts/mod/file2alias.c, do_pci_entry."""
    return bus + ":" + "".join(mark + part for mark, part in zip(("v", "d", "sv", "sd", "bc", "sc", "i"), astuple(value), strict=True))


def aliases(values: tuple[Alias, ...]) -> str:
    """modules.alias of depmod(8)."""
    return "".join(f"alias {modalias(alias.pattern, 'vfio_pci')} {alias.module}\n" for alias in values)


# Properties ---------------------------------------------------------------------------------------------------------


def slow_octal(text: str) -> str:
    """Each backslash with three digits is one sign, and what comes out is not looked at again."""
    slow, at = "", 0
    while at < len(text):
        digits = text[at + 1 : at + 4]
        is_escape = text[at] == "\\" and len(digits) == 3 and all(digit in "01234567" for digit in digits)
        slow += chr(int(digits, 8)) if is_escape else text[at]
        at += 4 if is_escape else 1
    return slow


def octal(text: str) -> None:
    """The slow reading, and names come back."""
    assert parsing.decode_octal(text) == slow_octal(text)
    assert parsing.decode_octal(escaped(text)) == text


def mountinfo(text: str) -> None:
    """Every line is read or told; what is read is in its line, and comes back; a folder has its own mounts and no others."""
    found, bad = parsing.mounts_at(text, "/")
    lines = [line for line in text.split("\n") if line.strip()]
    read = [(line, parsed) for line in lines if (parsed := parsing.mount_line(line)) is not None]
    assert len(read) + len(bad) == len(lines)
    for line, parsed in read:
        fields = line.split(" ")
        assert (str(parsed.view.mount_id), str(parsed.parent_id)) == (fields[0].lstrip("0") or "0", fields[1].lstrip("0") or "0")
        assert parsed.view.target == slow_octal(fields[4])
        assert parsing.mount_line(mountinfo_line(parsed)[:-1]) == parsed
    inside = [view for view in found if view.target == FOLDER or view.target.startswith(FOLDER + "/")]
    assert list(parsing.mounts_at(text, FOLDER)[0]) == inside


def char_majors(text: str) -> None:
    """Numbers stand in lines of their own section, and come back."""
    slow: dict[int, str] = {}
    is_inside = False
    for line in text.split("\n"):
        if line in ("Character devices:", "Block devices:"):
            is_inside = line == "Character devices:"
            continue
        digits, _, name = line.lstrip(" ").partition(" ")
        if is_inside and name and digits and len(digits) <= 10 and not digits.strip(_DIGITS):
            slow[int(digits)] = name
    assert parsing.char_majors(text) == slow
    assert parsing.char_majors(devices(slow)) == slow


def slow_uid(path: str) -> str | None:
    """The first uid of a pod in one path of a cgroup."""
    for at in range(len(path)):
        if not path.startswith("pod", at) or (at and path[at - 1] not in "/-"):
            continue
        for length in (36, 32):
            uid, after = path[at + 3 : at + 3 + length], path[at + 3 + length : at + 4 + length]
            if len(uid) != length or after not in ("", ".", "/", ":"):
                continue
            groups = uid.replace("_", "-").split("-") if "-" not in uid or "_" not in uid else []
            if [len(group) for group in groups] in ([8, 4, 4, 4, 12], [32]) and not "".join(groups).strip(_HEX):
                return "-".join(groups)
    return None


def cgroup(text: str) -> None:
    """The pod's uid and the unit are those of the first path that has one, systemd's own hierarchy first."""
    parts = [line.split(":", 2) for line in text.split("\n") if line.count(":") >= 2]
    paths = [path for wanted in (1, 2, 3) for _, kind, path in parts if wanted == (1 if kind == "name=systemd" else 3 if kind else 2)]
    uid = next((found for path in paths if (found := slow_uid(path))), None)
    assert parsing.pod_uid(text) == uid
    assert uid is None or parsing.pod_uid(f"0::/kubepods/burstable/pod{uid}\n3:memory:/\n") == uid
    words = (part for path in paths for part in path.split("/"))
    unit = next((word for word in words if word.endswith((".service", ".scope")) and not word.startswith((".service", ".scope"))), None)
    if unit is not None and parsing.systemd_unit(text) != unit:  # such as `.service.scope`, which is one too
        assert (parsing.systemd_unit(text) or "") in text
    assert (parsing.systemd_unit(text) is None) <= (unit is None)


def process_state(text: str) -> None:
    """The state is behind the last parenthesis, and comes back with any command."""
    state = parsing.process_state(text)
    at = text.rfind(") ")
    fields = text[at + 2 :].split(" ")
    numbers = [fields[place] if len(fields) > place else "" for place in (6, 17)]
    is_one = at >= 0 and len(fields[0]) == 1 and fields[0].isascii() and fields[0].isalpha()
    is_one = is_one and all(0 < len(each) <= 20 and not each.strip(_DIGITS) for each in numbers)
    assert (state is not None) == is_one
    if state is not None:
        assert (state.letter, state.flags, state.threads) == (fields[0], int(numbers[0]), int(numbers[1]))
        assert parsing.process_state(stat(state)) == state


def capabilities(text: str) -> None:
    """They are those of the first line that is called so."""
    line = next((line for line in text.split("\n") if line.startswith("CapEff:")), "")
    digits = line.removeprefix("CapEff:\t")
    is_one = line.startswith("CapEff:\t") and 0 < len(digits) <= 16 and not digits.strip(_HEX)
    value = parsing.effective_capabilities(text)
    assert value == (int(digits, 16) if is_one else None)
    assert value is None or parsing.effective_capabilities(f"Name:\tCapEff:\r\x85CapEff:\nCapEff:\t{value:016x}\n") == value


def modules(text: str) -> None:
    """A module that goes leaves no line and no mention, what speaks of others stays as it is; permanent is what the kernel marks so."""
    lines = text.split("\n")
    for name in {"nvidia", *(line.split(" ")[0] for line in lines[:8])} - {""}:
        after = parsing.without_module(text, name)
        kept = [line for line in lines if line.split(" ")[0] != name]
        assert parsing.without_module(after, name) == after
        assert len(after.split("\n")) in (len(kept), len(kept) + 1)
        rest = after.split("\n")
        for line in rest:
            assert line.split(" ")[0] != name
            assert len(line.split(" ")) < 4 or name not in line.split(" ")[3].split(",")
        assert [line for line in kept if name not in line and line] == [line for line in rest if line in kept and name not in line and line]
        marked = [fields for line in lines if len(fields := line.split()) >= 4 and fields[0] == name and "[permanent]" in fields[3]]
        assert parsing.is_permanent(text, name) == bool(marked)


class _Recorder:
    """Notes the names that a look at the mappings asks for."""

    def __init__(self) -> None:
        self.names: set[bytes] = set()

    def device(self, link: bytes) -> str | None:
        self.names.add(link.partition(b"\0")[2])
        return None


def maps(text: str) -> None:
    """Each mapping that may be a device's is asked for, and no other."""
    recorder = _Recorder()
    data = os.fsencode(text).replace(b"\0", b"?")
    scan._add_mapped(set(), b"/proc/7", data, recorder)
    found = [match for line in data.split(b"\n") if (match := scan._MAPPING.fullmatch(line))]
    named = [match for match in found if not match[4].startswith((b"/dev/shm/", b"/memfd:", b"/SYSV"))]
    assert recorder.names == {match[4] for match in named if match[2] == b"s" or b"/dev/" in match[4]}


def modalias_text(text: str) -> None:
    """A modalias is none, or comes back; so do the lines of the table; the driver is one of the table or plain."""
    with suppress(ValueError):
        value = parse_modalias(text)
        assert parse_modalias(modalias(value)) == value
        assert modalias(value).removeprefix("pci") in text
    found = parse_aliases(text)
    assert parse_aliases(aliases(found)) == found
    for alias in found:
        assert f" {alias.module}" in text
        assert vfio_driver(modalias(alias.pattern), found) in {PLAIN_VFIO, *(each.module for each in found)}


def uevent(text: str) -> None:
    """The name is that of the first line that gives one."""
    names = [line[len("DEVNAME=") :] for line in text.split("\n") if line.startswith("DEVNAME=") and line != "DEVNAME="]
    assert parsing.device_name(text) == (f"/dev/{names[0].removeprefix('/dev/')}" if names else None)


def information(text: str) -> None:
    """The minor is that of the first line that gives a number."""
    found = [line.removeprefix("Device Minor:").strip(" \t") for line in text.split("\n") if line.startswith("Device Minor:")]
    numbers = [each for each in found if 0 < len(each) <= 10 and not each.strip(_DIGITS)]
    assert parsing.gpu_minor(text) == (int(numbers[0]) if numbers else None)


def address(text: str) -> None:
    """A PCI address is none, or one in the kernel's spelling, which is read as itself."""
    found = full_address(text)
    assert found is None or full_address(found) == found
    assert found is None or text.strip().lower().endswith(found.partition(":")[2])


PROPERTIES: Final[dict[str, Callable[[str], None]]] = {
    "octal": octal,
    "mountinfo": mountinfo,
    "devices": char_majors,
    "cgroup": cgroup,
    "stat": process_state,
    "status": capabilities,
    "modules": modules,
    "maps": maps,
    "modalias": modalias_text,
    "uevent": uevent,
    "information": information,
    "address": address,
}
"""By the name of the text."""

_UID: Final = "3f1c2f6e-8a3b-4a55-9a3c-0d6d3c1a9f10"
SEEDS: Final[dict[str, tuple[str, ...]]] = {
    "octal": ("a\\040b\\134c", "\\0401", "\\", "\\08"),
    "mountinfo": (
        "30 21 0:40 / /run/nvidia/driver rw,relatime shared:3 master:1 - overlay overlay rw\n"
        "31 30 0:5 / /run/nvidia/driver/a\\040b rw - tmpfs tmpfs rw\n",
        "32 1 0:4 / /run/nvidia/driver/x\ry rw - tmpfs \\043 rw\n",
        "33 1 0:4 / /run/nvidia/driver/\x85\u2028 rw - tmpfs  rw\n",
        "1_0 1 0:4 / / rw - x y z\n",
    ),
    "devices": (
        "Character devices:\n  1 mem\n195 nvidia-frontend\n510 nvidia-uvm\n\nBlock devices:\n510 mdp\n",
        f"Character devices:\n{'9' * 5000} x\n",
    ),
    "cgroup": (
        f"0::/kubepods.slice/kubepods-pod{_UID.replace('-', '_')}.slice/cri-containerd-{'b' * 64}.scope\n",
        f"12:memory:/kubepods/pod{_UID}\n1:name=systemd:/kubepods/pod{_UID}\n0::/\n",
        f"0::/kubepods/pod{'ab' * 16}/x\n",
        "0::/system.slice/a\x0b0::b.service/x.scope\n",
    ),
    "stat": (stat(parsing.ProcessState("S", 4194304, 3)), "7 (a) Z (b) S 1", "S 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1"),
    "status": ("Name:\tx\nCapPrm:\t0\nCapEff:\t000001ffffffffff\n", "Name:\tx\x0bCapEff:\t0\nCapEff:\t1\n", "CapEff:\t-1\n"),
    "modules": (
        "nvidia_uvm 1 0 - Live 0x0 (OE)\nnvidia 1 2 nvidia_uvm,nvidia_drm, Live 0x0\n",
        "nvidia\nx 1 1 nvidia\n",
        "x 1 ² nvidia, Live 0x0\nnvidia 16 0 [permanent], Live 0x0",
    ),
    "maps": (
        "7f00-7f01 rw-s 00000000 00:05 9 /dev/nvidia0\n7f01-7f02 r-xp 0 08:01 7 /usr/lib/libc.so\n",
        "7f00-7f01 rw-p 0 00:05 9 /dev/x (deleted)\n7f02-7f03 r--s 0 00:01 3 /dev/shm/a\n",
    ),
    "modalias": (
        "pci:v000010DEd00002941sv000010DEsd00002046bc03sc02i00",
        "alias vfio_pci:v000010DEd00002941sv*sd*bc*sc*i* nvgrace_gpu_vfio_pci\nalias vfio_pci:v*d*sv*sd*bc*sc*i* vfio_pci\n",
    ),
    "uevent": ("MAJOR=195\nMINOR=0\nDEVNAME=nvidia0\n", "DEVNAME=/dev/vfio/1\n", "DEVNAME=\nDEVNAME=a\rb\n"),
    "information": ("Model:\tX\nDevice Minor: \t 3\nGPU UUID: x\n", "Device Minor:\n3\n", "Device Minor: ٣\n"),
    "address": ("0000:3b:00.0", "3B:00.0", "00000001:3b:1f.7", " 0000:3b:00.0\n"),
}
"""Texts to start from: whole ones, and those that a parser had once read wrongly."""
