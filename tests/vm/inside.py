"""For code in the guest: modules, mounts, processes that hold things.

Raw calls give 0 or the errno's name, so that a test can say what it saw.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import stat
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from driver_manager.clock import SystemClock
from driver_manager.core.snapshot import HostView, MountView
from driver_manager.host import LinuxHost, open_host

Answer = int | str
"""0, or the name of an errno."""

DRIVER = ("nvidia", "nvidia-uvm", "nvidia-modeset", "nvidia-drm")
VFIO = ("irqbypass", "vfio_virqfd", "vfio", "vfio_iommu_type1", "vfio-pci-core", "vfio-pci")
NETWORK = (
    "virtio_ring",
    "virtio",
    "virtio_pci_modern_dev",
    "virtio_pci_legacy_dev",
    "virtio_pci",
    "failover",
    "net_failover",
    "virtio_net",
)
ADDRESS = "10.0.0.15/24"
"""Of the guest with a network. It has no way out but to that network."""
GPU, AUDIO, OTHER_GPU = "0000:00:05.0", "0000:00:05.1", "0000:00:06.0"
NVIDIA0 = os.makedev(195, 0)
DRIVER_ROOT = "/run/nvidia/driver"

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWPID, CLONE_NEWUSER, CLONE_NEWNET = 0x20000, 0x2000000, 0x20000000, 0x10000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE, MS_SLAVE, MS_SHARED = 0x1000, 0x4000, 1 << 18, 1 << 19, 1 << 20
MNT_DETACH, UMOUNT_NOFOLLOW = 2, 8
CAP_SYS_MODULE, CAP_SYS_PTRACE, CAP_SYS_ADMIN = 16, 19, 21

_PR_CAPBSET_DROP = 24
_CAPABILITY_VERSION_3 = 0x20080522
_NR_DELETE_MODULE = 176  # x86-64
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p


def here() -> LinuxHost:
    """The guest as the agent sees its host."""
    return open_host(None, SystemClock())


def answer(result: int) -> Answer:
    """What a C function gave."""
    return 0 if result == 0 else errno.errorcode[ctypes.get_errno()]


# Modules -------------------------------------------------------------------------------------------------------------


def load(*modules: str, **parameters: object) -> None:
    """Loads modules, one after the other, with these parameters."""
    for module in modules:
        path = f"/modules/{module}.ko"
        if module in VFIO + NETWORK and not Path(path).exists():
            continue  # part of another one, or built in, on some kernels
        subprocess.run(["insmod", path, *(f"{name}={value}" for name, value in parameters.items())], check=True)


def delete(module: str, flags: int = os.O_NONBLOCK) -> Answer:
    """delete_module(2)."""
    return answer(libc.syscall(_NR_DELETE_MODULE, module.encode(), flags))


def loaded() -> set[str]:
    """Those of the stand-ins that are loaded, less nvspoof, which always is."""
    names = {line.split()[0] for line in Path("/proc/modules").read_text().splitlines()}
    return names & {name.replace("-", "_") for name in (*DRIVER, "acme-monitor", "slowmod")}


def left() -> tuple[list[str], list[str]]:
    """The modules and mounts of the driver that are there now."""
    return sorted(loaded()), targets()


def refcount(module: str) -> int:
    """The module's use count."""
    return int(read(f"/sys/module/{module}/refcnt"))


def state_of(module: str) -> str:
    """The module's line of /proc/modules, from the use count to the state."""
    lines = (line.split() for line in Path("/proc/modules").read_text().splitlines())
    return next((" ".join(fields[2:5]) for fields in lines if fields[0] == module), "")


# Files ---------------------------------------------------------------------------------------------------------------


def read(path: str) -> str:
    """A file's text without the space around it."""
    return Path(path).read_text().strip()


def write(path: str, text: str) -> Answer:
    """Writes to a file of the kernel."""
    try:
        Path(path).write_text(text)
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return 0


def mount(source: str, target: str, kind: str | None = None, flags: int = 0) -> Answer:
    """Makes the target and mounts there, by the system call."""
    Path(target).mkdir(parents=True, exist_ok=True)
    return answer(libc.mount(source.encode(), target.encode(), kind.encode() if kind else None, ctypes.c_ulong(flags), None))


def tmpfs(target: str) -> str:
    """Mounts a new filesystem on a folder that is made if need be; gives the folder."""
    assert mount("tmpfs", target, "tmpfs") == 0
    return target


def propagate(target: str, flags: int) -> Answer:
    """Changes how mounts at and below a target spread."""
    return answer(libc.mount(None, target.encode(), None, ctypes.c_ulong(flags | MS_REC), None))


def umount(target: str, flags: int = 0) -> Answer:
    """umount2(2)."""
    return answer(libc.umount2(target.encode(), flags))


def targets(pid: int | str = "self") -> list[str]:
    """What is mounted at and below the driver root for a process, as mountinfo writes it."""
    lines = Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
    return [line.split()[4] for line in lines if line.split()[4].startswith(DRIVER_ROOT)]


def mounts_of(view: HostView) -> tuple[MountView, ...]:
    """The mounts of a look, in the order in which they can go."""
    return tuple(reversed(view.mounts))


def driver_of(address: str) -> str | None:
    """The driver that a PCI function is bound to."""
    link = Path(f"/sys/bus/pci/devices/{address}/driver")
    return link.readlink().name if link.is_symlink() else None


# Processes -----------------------------------------------------------------------------------------------------------


def child(work: Callable[[], Any]) -> int:
    """Does work in a child, which then stays as it is; returns when the work is done.

    What the work gives is kept alive with it.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            kept = work()  # noqa: F841 - for as long as this child lives
            os.write(writing, b".")
            while True:
                signal.pause()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(writing)
    done = os.read(reading, 1)
    os.close(reading)
    assert done, "the child failed: see standard error"
    return pid


def end(pid: int) -> None:
    """Kills a child and waits until it is gone."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@contextlib.contextmanager
def holding(work: Callable[[], Any]) -> Iterator[int]:
    """A child that has done some work and holds the result for as long as the block lasts; gives its number."""
    pid = child(work)
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            end(pid)


def opened(path: str = "/dev/nvidia0") -> Callable[[], int]:
    """Work that opens a device."""
    return lambda: os.open(path, os.O_RDWR)


def mapped(path: str = "/dev/nvidia0") -> Callable[[], int]:
    """Work that maps a page of a device and closes its descriptor. Python's own mmap would keep one."""

    def work() -> int:
        descriptor = os.open(path, os.O_RDWR)
        address = int(libc.mmap(None, ctypes.c_size_t(4096), 1, 1, descriptor, ctypes.c_long(0)))
        os.close(descriptor)
        assert address > 0
        return address

    return work


def after(seconds: float, work: Callable[[], Any]) -> int:
    """Does work in a child when some time has passed, then ends it; gives its number at once."""
    pid = os.fork()
    if not pid:
        try:
            time.sleep(seconds)
            work()
        finally:
            os._exit(0)
    return pid


def node(path: str, number: int = NVIDIA0) -> str:
    """Makes a device node; gives its path."""
    os.mknod(path, 0o600 | stat.S_IFCHR, number)
    return path


def without_capabilities(*dropped: int) -> None:
    """Takes capabilities from this process for good."""
    for capability in dropped:
        assert libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) == 0
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    data = (ctypes.c_uint32 * 6)()
    assert libc.capget(header, data) == 0
    for capability in dropped:
        for field in range(3):  # effective, permitted, inheritable
            data[3 * (capability // 32) + field] &= ~(1 << capability % 32)
    assert libc.capset(header, data) == 0


def load_for_pci() -> None:
    """Loads the driver and vfio."""
    load("nvidia")
    load(*VFIO)


def join_network() -> None:
    """Brings the network card up; there is no route to anything but its own network."""
    load(*NETWORK)
    for words in (("addr", "add", ADDRESS, "dev", "eth0"), ("link", "set", "eth0", "up")):
        subprocess.run(["ip", *words], check=True)
