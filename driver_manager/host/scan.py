"""Who has a GPU device open or mapped: a walk over /proc that looks at device numbers, not at names.

On a real /proc each descriptor is asked for its number through its link, which works whatever the node is called now and in whichever mount
namespace it was opened. Filesystems are never asked (AT_STATX_DONT_SYNC), so a dead file server cannot hold the scan up. A mapping keeps a
device without a descriptor; its line in `maps` has a name only, so candidates are looked up in `map_files`. What may not be looked at is
reported and never counts as free. A descriptor on its way through a socket shows nowhere: the module's use count is the only sign of it.
A device that vfio has given out has no number at all; where a card is on vfio it is known by the name of its link.
"""

import contextlib
import ctypes
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from driver_manager.core.snapshot import Holder, HolderScan
from driver_manager.host.devices import GpuDevices, Number, gpu_devices, number_by_name
from driver_manager.host.look import own_pid
from driver_manager.host.parsing import DELETED, is_at_or_below, pod_uid, process_state, systemd_unit
from driver_manager.host.paths import Roots, raise_if_short, resolve_in, text_if_allowed, text_of

_MAPPING = re.compile(rb"([0-9a-f]+-[0-9a-f]+) ...([ps]) \S+ (\S+ \d+) +(/.+)")
_CANDIDATE_MARKS = (b"s ", b"/dev/")
"""What each line of `maps` that may be a device's holds: it is shared (the last of four flags), or of something in a dev folder."""
_NO_DEVICES = (b"/dev/shm/", b"/memfd:", b"/SYSV")
VFIO_DEVICE: Final = "anon_inode:[vfio-device]"
"""The link of a device that vfio has given out by its group: vfio_device_open_file of the kernel."""
_LONGEST_NAME = 64
_KTHREADD = 2
"""The process that starts all threads of the kernel; in another process namespace than the first this number is anybody's."""


class Probe(Protocol):
    """Tells whether a link of /proc leads to a GPU device."""

    def device(self, link: bytes) -> str | None:
        """The name to show for it, None if it is something else.

        Raises:
            OSError: it went away, or may not be looked at.
        """
        ...


def scan(
    roots: Roots, probe: Probe | None = None, watch: Callable[[int], None] = lambda _pid: None, pids: Sequence[int] | None = None
) -> HolderScan:
    """Looks at processes.

    Args:
        roots: whose /proc.
        probe: what counts as a device; by default the host's GPUs.
        watch: told the number of each process before it is looked at.
        pids: which ones; by default all of others.

    Raises:
        OSError: out of descriptors or memory: nobody knows who was not looked at.
    """
    probe = probe or gpu_probe(roots)
    holders: list[Holder] = []
    by_device_alone: list[Holder] = []
    unreadable: list[int] = []
    proc = os.fsencode(roots.proc)
    for pid in others(roots) if pids is None else pids:
        watch(pid)
        try:
            found = _devices_of(b"%b/%d" % (proc, pid), probe)
        except PermissionError:
            if _is_alive(roots.proc / str(pid)):
                unreadable.append(pid)
            continue
        except OSError as error:
            raise_if_short(error)
            continue  # it has ended
        if found == {VFIO_DEVICE}:
            if not _has_a_group(b"%b/%d/fd" % (proc, pid)) and (holder := _holder(roots.proc, pid, found)) is not None:
                by_device_alone.append(holder)
        elif found and (holder := _holder(roots.proc, pid, found - {VFIO_DEVICE})) is not None:
            holders.append(holder)
    return HolderScan(tuple(holders), tuple(unreadable), tuple(by_device_alone))


def gpu_probe(roots: Roots) -> Probe:
    """What finds the host's GPUs as they are now."""
    devices = gpu_devices(roots)
    return TreeProbe(roots, devices) if roots.is_tree else KernelProbe(devices)


def others(roots: Roots) -> list[int]:
    """All processes but this one and the kernel's own threads, in order."""
    left_out = {own_pid(roots), *_kernel_threads(roots)}
    return [pid for pid in _pids(os.fsencode(roots.proc)) if pid not in left_out]


def _kernel_threads(roots: Roots) -> list[int]:
    """Threads of the kernel, as far as it lists them: they have no descriptors, and are most of an idle machine's processes.

    Only the kernel's own thread has such children. A list that is short, or missing (CONFIG_PROC_CHILDREN), costs time and nothing else.
    """
    parent = roots.proc / str(_KTHREADD)
    state = process_state(text_if_allowed(parent / "stat"))
    if state is None or not state.is_kernel_thread:
        return []
    return [_KTHREADD, *map(int, text_if_allowed(parent / f"task/{_KTHREADD}/children").split())]


def _pids(proc: bytes) -> list[int]:
    try:
        return sorted(int(name) for name in os.listdir(proc) if name.isdigit())  # noqa: PTH208 - bytes
    except OSError as error:
        raise_if_short(error)
        return []


def _devices_of(process: bytes, probe: Probe) -> set[str]:
    """GPU devices that a process has open or mapped.

    Raises:
        PermissionError: none was found, and not all could be looked at. OSError: it has ended.
    """
    found: set[str] = set()
    denied: PermissionError | None = None
    descriptors, maps = -1, b"?"
    try:
        descriptors = _add_opened(found, process, probe)
        maps = _bytes_of(process + b"/maps")
        _add_mapped(found, process, maps, probe)
        if not descriptors and not maps:
            _add_orphan_threads(found, process, probe)
    except PermissionError as error:
        denied = error
    if denied is not None and not found:
        raise denied
    return found


def _add_opened(found: set[str], folder: bytes, probe: Probe) -> int:
    """Adds the GPU devices among the descriptors of a process or thread; gives how many descriptors there are."""
    base = folder + b"/fd"
    try:
        numbers = os.listdir(base)  # noqa: PTH208 - bytes, and many of them
    except FileNotFoundError:
        return 0
    for number in numbers:
        _add(found, probe, b"%b/%b" % (base, number))
    return len(numbers)


def _has_a_group(folder: bytes) -> bool:
    """Whether a process has a group or a node of vfio open: then the device that it has is of that."""
    return any(link.startswith(b"/dev/vfio/") and link != b"/dev/vfio/vfio" for link in _links_in(folder))


def _links_in(folder: bytes) -> Iterator[bytes]:
    try:
        names = os.listdir(folder)  # noqa: PTH208 - bytes
    except OSError:
        return
    for name in names:
        with contextlib.suppress(OSError):
            yield os.readlink(b"%b/%b" % (folder, name))  # noqa: PTH115 - bytes


def _add(found: set[str], probe: Probe, link: bytes) -> bool:
    """Adds what a link leads to if it is a GPU device; False if the link went away."""
    try:
        device = probe.device(link)
    except PermissionError:
        raise
    except OSError as error:
        raise_if_short(error)
        return False  # closed meanwhile
    if device is not None:
        found.add(device)
    return True


def _add_mapped(found: set[str], process: bytes, maps: bytes, probe: Probe) -> None:
    """Adds the GPU devices among the mappings of a process.

    Each file is asked for once, since a look into map_files costs the kernel ten times as much as one at a descriptor and a database or a
    JVM maps one file hundreds of times. Only within one process do device, inode and name together mean one file: numbers of inodes
    repeat in the subvolumes of btrfs, and names in the roots of containers.
    """
    asked: set[tuple[bytes, bytes]] = set()
    for line in _candidates(maps):
        match = _MAPPING.fullmatch(line)
        if match is None or match[4].startswith(_NO_DEVICES) or (file := (match[3], match[4])) in asked:
            continue
        # The probe is told the name too, behind a zero byte.
        if (match[2] == b"s" or b"/dev/" in match[4]) and _add(found, probe, b"%b/map_files/%b\0%b" % (process, match[1], match[4])):
            asked.add(file)


def _candidates(maps: bytes) -> set[bytes]:
    """Lines that hold one of the marks. Searching for them costs a tenth of looking at every line, and there are hundreds a process."""
    lines: set[bytes] = set()
    for mark in _CANDIDATE_MARKS:
        at = maps.find(mark)
        while at >= 0:
            end = maps.find(b"\n", at)
            end = end if end >= 0 else len(maps)
            lines.add(maps[maps.rfind(b"\n", 0, at) + 1 : end])
            at = maps.find(mark, end)
    return lines


def _add_orphan_threads(found: set[str], process: bytes, probe: Probe) -> None:
    """Adds the GPU devices of threads that outlive the first thread of their process: it shows no descriptors any more."""
    state = process_state(_bytes_of(process + b"/stat").decode(errors="replace"))
    if state is None or not state.is_zombie or state.threads < 2:
        return
    for thread in os.listdir(process + b"/task"):  # noqa: PTH208 - bytes
        _add_opened(found, b"%b/task/%b" % (process, thread), probe)


def _bytes_of(path: bytes) -> bytes:
    try:
        with open(path, "rb", 0) as file:  # noqa: PTH123 - bytes, unbuffered: one read for most
            return file.read()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def _is_alive(process: Path) -> bool:
    """Whether a process that could not be looked at can hold anything: kernel threads and zombies cannot."""
    try:
        state = process_state(text_of(process / "stat") or "")
    except PermissionError:
        return True
    if state is None:
        return process.is_dir()
    return not state.is_kernel_thread and not (state.is_zombie and state.threads < 2)


def _holder(proc: Path, pid: int, devices: set[str]) -> Holder | None:
    process = proc / str(pid)
    state = process_state(text_of(process / "stat") or "")
    if state is not None and (state.is_kernel_thread or (state.is_zombie and state.threads < 2)):
        return None
    cgroup = text_if_allowed(process / "cgroup")
    uid = pod_uid(cgroup)
    return Holder(
        pid=pid,
        command=command_of(process),
        devices=tuple(sorted(devices)),
        pod_uid=uid,
        unit=None if uid else systemd_unit(cgroup),
    )


def command_of(process: Path) -> str:
    """The name of a process; its arguments may hold secrets and are not shown."""
    name = text_if_allowed(process / "comm").strip() or text_if_allowed(process / "cmdline").partition("\0")[0].rpartition("/")[2]
    return "".join(char if char.isprintable() else "?" for char in name[:_LONGEST_NAME]) or "?"


def users_below(roots: Roots, folder: str, most: int) -> tuple[str, ...]:
    """Processes that work below a folder or have files of it open or mapped, as `command (pid)`; at most `most` of them."""
    found: list[str] = []
    proc = os.fsencode(roots.proc)
    for pid in _pids(proc):
        if len(found) >= most:
            break
        if _works_below(b"%b/%d" % (proc, pid), os.fsencode(folder)):
            found.append(f"{command_of(roots.proc / str(pid))} ({pid})")
    return tuple(found)


def _works_below(process: bytes, folder: bytes) -> bool:
    try:
        links = [process + name for name in (b"/cwd", b"/root", b"/exe")]
        links += [b"%b/fd/%b" % (process, name) for name in os.listdir(process + b"/fd")]  # noqa: PTH208 - bytes
    except OSError:
        links = links[:3]
    for link in links:
        try:
            if is_at_or_below(os.fsdecode(os.readlink(link)), os.fsdecode(folder)):  # noqa: PTH115 - bytes
                return True
        except OSError:
            continue
    try:
        return b" " + folder + b"/" in _bytes_of(process + b"/maps")
    except OSError:
        return False


class TreeProbe:
    """Links of a tree are texts: each is followed inside the tree to a number, or known by its name."""

    def __init__(self, roots: Roots, devices: GpuDevices) -> None:
        self._roots = roots
        self._devices = devices
        self._known: dict[str, str | None] = {}
        self._root = str(roots.host)

    def device(self, link: bytes) -> str | None:
        """Reads a link; where map_files lacks it, the name in `maps` is behind a zero byte."""
        where, _, mapped = link.partition(b"\0")
        try:
            text = os.fsdecode(os.readlink(where))  # noqa: PTH115 - bytes
        except OSError:
            if not mapped:
                raise
            text = os.fsdecode(mapped)
        if not text.startswith("/"):
            if not text.startswith("."):
                return text if text == VFIO_DEVICE and self._devices.may_be_on_vfio else None  # else socket:[1], pipe:[2], anon_inode:x
            text = os.path.normpath(os.path.join(os.path.dirname(os.fsdecode(where)), text))  # noqa: PTH118, PTH120
        text = text.removesuffix(DELETED)
        if is_at_or_below(text, self._root):
            text = text.removeprefix(self._root)
        if text not in self._known:
            self._known[text] = self._look_up(text)
        return self._known[text]

    def _look_up(self, path: str) -> str | None:
        try:
            is_link = stat.S_ISLNK(os.lstat(self._root + path).st_mode)
        except OSError:
            is_link = False
        resolved = resolve_in(self._root, path) if is_link else path
        number = number_by_name(self._roots, self._devices, resolved)
        if number is None:
            named = next((name for name in (path, resolved) if self._devices.has_path(name)), None)
            return named
        return self._devices.shown(path, number) if self._devices.has_number(number) else None


class KernelProbe:
    """Links of a real /proc lead to the open file itself."""

    def __init__(self, devices: GpuDevices) -> None:
        self._devices = devices
        self._number = _number_reader()

    def device(self, link: bytes) -> str | None:
        """Asks the kernel for the number behind a link."""
        where, _, mapped = link.partition(b"\0")
        try:
            number = self._number(where)
        except OSError:
            # Without CAP_SYS_ADMIN or CAP_CHECKPOINT_RESTORE only the name of a mapping is to be seen: enough for a yes, never for a no.
            if self._devices.has_path(name := os.fsdecode(mapped).removesuffix(DELETED)):
                return name
            raise
        if number is _ANONYMOUS and self._devices.may_be_on_vfio and os.readlink(where) == os.fsencode(VFIO_DEVICE):  # noqa: PTH115 - bytes
            return VFIO_DEVICE
        if number is None or not self._devices.has_number(number):
            return None
        return self._devices.shown(os.fsdecode(os.readlink(where)).removesuffix(DELETED), number)  # noqa: PTH115


_ANONYMOUS: Final[Number] = (-1, -1)
"""In place of a number: a file of no kind, made by the kernel itself (fs/anon_inodes.c)."""


def _number_reader() -> Any:
    """A function that gives the device number behind a link, None for what is no character device, and never waits for a server."""
    statx = getattr(ctypes.CDLL(None, use_errno=True), "statx", None)
    if statx is None:  # a C library before 2018
        return _number_by_stat
    statx.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_char_p)
    at_fdcwd, no_automount_dont_sync, want_type = -100, 0x800 | 0x4000, 0x1
    buffer = ctypes.create_string_buffer(256)
    mode = ctypes.c_uint16.from_buffer(buffer, 28)
    major, minor = ctypes.c_uint32.from_buffer(buffer, 128), ctypes.c_uint32.from_buffer(buffer, 132)

    def number(link: bytes) -> Number | None:
        if statx(at_fdcwd, link, no_automount_dont_sync, want_type, buffer) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), link)
        kind = mode.value & 0o170000
        return (major.value, minor.value) if kind == stat.S_IFCHR else None if kind else _ANONYMOUS

    return number


def _number_by_stat(link: bytes) -> Number | None:
    status = os.stat(link)  # noqa: PTH116 - bytes
    kind = stat.S_IFMT(status.st_mode)
    return (os.major(status.st_rdev), os.minor(status.st_rdev)) if kind == stat.S_IFCHR else None if kind else _ANONYMOUS
