from __future__ import annotations

import asyncio
import errno
import mmap
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from driver_manager.core.snapshot import Holder, HolderScan
from driver_manager.errors import DeviceStuck, HostError
from driver_manager.host import LinuxHost, linux
from driver_manager.host.calls import KernelCalls
from driver_manager.host.devices import GpuDevices, gpu_devices
from driver_manager.host.paths import Roots, machine_roots
from driver_manager.host.scan import KernelProbe, Probe, TreeProbe, scan
from driver_manager.ports import Clock

from .trees import Tree

UID = "3f1c2f6e-8a3b-4a55-9a3c-0d6d3c1a9f10"


async def devices_held(host: LinuxHost) -> dict[int, tuple[str, ...]]:
    return {holder.pid: holder.devices for holder in (await host.holders()).holders}


def roots_of(tree: Tree) -> Roots:
    return Roots(host=tree.root, own=tree.root, is_tree=True)


# Trees --------------------------------------------------------------------------------------------------------------


async def test_a_holder_is_known_by_pod_or_unit(tree: Tree, host: LinuxHost) -> None:
    """A process with a GPU open shows its devices, its name and whose it is; others do not show."""
    tree.process(100, fds=["/dev/null", "/dev/nvidia0", "/dev/nvidiactl"], cgroup=f"0::/../pod{UID}/x\n")
    tree.process(200, fds=["/dev/nvidia-uvm"], comm="dcgm", cgroup="0::/system.slice/dcgm.service\n")
    tree.process(300, fds=["socket:[1]", "/dev/nvidiafoo", "/home/nvidia0"])
    found = await host.holders()
    assert found.holders == (
        Holder(pid=100, command="train", devices=("/dev/nvidia0", "/dev/nvidiactl"), pod_uid=UID),
        Holder(pid=200, command="dcgm", devices=("/dev/nvidia-uvm",), unit="dcgm.service"),
    )
    assert found.unreadable == ()


async def test_n29_every_kind_of_holder_on_one_host(tree: Tree, host: LinuxHost) -> None:
    """N29: daemons by their units, a display server by its DRM node, a container's process by its pod, one of nobody; no zombie."""
    tree.gpu()
    tree.file("sys/bus/pci/devices/0000:3b:00.0/drm/card0/dev", "226:0\n")
    pod = f"0::/kubepods.slice/kubepods-pod{UID.replace('-', '_')}.slice/cri-containerd-{'b' * 64}.scope\n"
    tree.process(11, fds=["/dev/nvidiactl"], comm="nv-fabricmanager", cgroup="0::/system.slice/nvidia-fabricmanager.service\n")
    tree.process(12, fds=["/dev/nvidia0"], comm="nvidia-persiste", cgroup="0::/system.slice/nvidia-persistenced.service\n")
    tree.process(13, fds=["/dev/dri/card0"], comm="Xorg", cgroup="0::/user.slice/user-1000.slice/session-3.scope\n")
    tree.process(14, fds=["/dev/nvidia0"], comm="python3", cgroup=pod)
    tree.process(15, fds=["/dev/nvidia0"], comm="python3")
    tree.process(16, fds=["/dev/nvidia0"], comm="defunct", state="Z")
    found = await host.holders()
    assert [(each.pid, each.command, each.devices, each.pod_uid or each.unit) for each in found.holders] == [
        (11, "nv-fabricmanager", ("/dev/nvidiactl",), "nvidia-fabricmanager.service"),
        (12, "nvidia-persiste", ("/dev/nvidia0",), "nvidia-persistenced.service"),
        (13, "Xorg", ("/dev/dri/card0",), "session-3.scope"),
        (14, "python3", ("/dev/nvidia0",), UID),
        (15, "python3", ("/dev/nvidia0",), None),
    ]
    assert found.unreadable == ()


@pytest.mark.parametrize(
    "target",
    [
        "/dev/nvidia0",
        "/dev/nvidia3 (deleted)",
        "/dev/nvidia-caps/nvidia-cap1",
        "/dev/nvidia-caps-imex-channels/channel0",
        "/dev/nvidia-modeset",
        "/dev/nvidia-uvm-tools",
        "/run/nvidia/driver/dev/nvidia0",
        "/dev/gdrdrv",
        "../../../dev/nvidia0",
    ],
)
async def test_gpu_nodes_are_known_by_name(tree: Tree, host: LinuxHost, target: str) -> None:
    """Where a tree gives no number the name counts, below the driver root and deleted too."""
    tree.process(7, fds=[target])
    assert list(await devices_held(host)) == [7]


async def test_a_renamed_node_is_known_by_its_number(tree: Tree, host: LinuxHost) -> None:
    """Sysfs names the node's number, /proc/devices whose number that is."""
    tree.file("proc/devices", "Character devices:\n195 nvidia-frontend\n510 nvidia-uvm\n")
    tree.file("sys/dev/char/510:0/uevent", "MAJOR=510\nMINOR=0\nDEVNAME=renamed\n")
    tree.file("sys/dev/char/1:3/uevent", "DEVNAME=nvidia7\n")
    tree.link("dev/by-name", "renamed")
    tree.process(7, fds=["/dev/renamed (deleted)"])
    tree.process(8, fds=["/dev/by-name"])
    tree.process(9, fds=["/dev/nvidia7"])
    assert await devices_held(host) == {7: ("/dev/renamed",), 8: ("/dev/renamed",)}


async def test_a_mapping_without_a_descriptor_holds(tree: Tree, host: LinuxHost) -> None:
    """A mapped device counts, by map_files where it is there and by the name in maps where not."""
    tree.process(7, maps="7f00-7f01 rw-s 00000000 00:05 300 /dev/nvidia0\n")
    tree.process(8, maps="7f00-7f01 rw-s 00000000 00:05 300 /tmp/x\n")
    tree.link("proc/8/map_files/7f00-7f01", "/dev/nvidia1 (deleted)")
    tree.process(9, maps="7f00-7f01 rw-s 00000000 00:01 7 /dev/shm/nvidia0\n7f02-7f03 rw-s 0 00:01 8 /memfd:x (deleted)\n")
    assert await devices_held(host) == {7: ("/dev/nvidia0",), 8: ("/dev/nvidia1",)}


async def test_shared_drivers_nodes_count_only_for_nvidia(tree: Tree, host: LinuxHost) -> None:
    """Of DRM and VFIO nodes only those of NVIDIA's functions are GPUs'."""
    tree.gpu("0000:3b:00.0")
    tree.file("sys/bus/pci/devices/0000:3b:00.0/drm/card1/dev", "226:1\n")
    tree.link("sys/bus/pci/devices/0000:3b:00.0/iommu_group", "../../../../kernel/iommu_groups/12")
    tree.gpu("0000:00:02.0", driver=None, vendor="0x8086")
    tree.file("sys/bus/pci/devices/0000:00:02.0/drm/card0/dev", "226:0\n")
    tree.process(1, fds=["/dev/dri/card0", "/dev/vfio/3", "/dev/vfio/vfio"])
    tree.process(2, fds=["/dev/dri/card1"])
    tree.process(3, fds=["/dev/vfio/12", "/dev/vfio/vfio"])
    assert await devices_held(host) == {2: ("/dev/dri/card1",), 3: ("/dev/vfio/12",)}


async def test_every_vfio_group_counts_where_nothing_tells_them_apart(tree: Tree, host: LinuxHost) -> None:
    """Without a PCI bus to ask, a VFIO group may be a GPU's."""
    tree.process(3, fds=["/dev/vfio/12", "/dev/vfio/vfio"])
    assert await devices_held(host) == {3: ("/dev/vfio/12",)}


@pytest.mark.parametrize("driver", ["vfio-pci", None, "nvidia"])
async def test_n37_a_device_of_vfio_without_its_group(tree: Tree, host: LinuxHost, driver: str | None) -> None:
    """N37: such a process is kept apart, as nobody can say whose device it has; with a group open it is that group's."""
    tree.gpu(driver=driver, group="12")
    device = "anon_inode:[vfio-device]"
    tree.process(3, fds=[device, "anon_inode:[eventpoll]"])
    tree.process(4, fds=[device, "/dev/vfio/9", "/dev/vfio/vfio"])
    tree.process(5, fds=[device, "/dev/vfio/12"])
    tree.process(6, fds=["anon_inode:[eventpoll]", "/dev/vfio/vfio"])
    scan = await host.holders()
    assert [(holder.pid, holder.devices) for holder in scan.holders] == [(5, ("/dev/vfio/12",))]
    assert [holder.pid for holder in scan.by_device_alone] == ([] if driver == "nvidia" else [3])


async def test_a_card_is_known_by_its_class_too(tree: Tree, host: LinuxHost) -> None:
    """The class folder's device says whose a DRM node is."""
    tree.file("sys/class/drm/card0/device/vendor", "0x10de\n")
    tree.process(3, fds=["/dev/dri/card0"])
    assert await devices_held(host) == {3: ("/dev/dri/card0",)}


async def test_zombies_and_kernel_threads_hold_nothing(tree: Tree, host: LinuxHost) -> None:
    """What has ended and what is the kernel's own is passed over."""
    tree.process(7, fds=["/dev/nvidia0"], state="Z")
    tree.process(8, fds=["/dev/nvidia0"])
    tree.file("proc/8/stat", "8 (kworker) I 2 0 0 0 -1 2129984 0 0 0 0 0 0 0 0 20 0 1 0 1 1 1\n")
    assert await devices_held(host) == {}


async def test_threads_outlive_the_first_of_their_process(tree: Tree, host: LinuxHost) -> None:
    """A process whose first thread has ended shows no descriptors; its other threads do."""
    tree.process(7)
    tree.file("proc/7/maps").write_text("")
    tree.file("proc/7/stat", "7 (train) Z 1 1 1 0 -1 4194304 0 0 0 0 0 0 0 0 20 0 2 0 1 1 1\n")
    tree.link("proc/7/task/9/fd/3", "/dev/nvidia0")
    assert await devices_held(host) == {7: ("/dev/nvidia0",)}


async def test_half_a_process_is_no_crash(tree: Tree, host: LinuxHost) -> None:
    """A process folder with next to nothing in it works, with a name that says so."""
    tree.link("proc/7/fd/3", "/dev/nvidia0")
    (tree.root / "proc/8").mkdir()
    assert (await host.holders()).holders == (Holder(pid=7, command="?", devices=("/dev/nvidia0",)),)


async def test_a_process_that_holds_the_look_up_is_named(tree: Tree, host: LinuxHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look that hangs in one process's files ends at its limit with that process's number."""
    tree.process(7)
    tree.process(9)
    (tree.root / "proc/9/maps").unlink()
    os.mkfifo(tree.root / "proc/9/maps")  # opening it waits for a writer for ever
    monkeypatch.setattr(linux, "READ_SECONDS", 0.3)
    with pytest.raises(DeviceStuck, match="process 9"):
        await host.holders()
    os.close(os.open(tree.root / "proc/9/maps", os.O_WRONLY | os.O_NONBLOCK))


class Failing(Probe):
    """Fails for one process, in one way."""

    def __init__(self, inner: Probe, pid: int, number: int) -> None:
        self.inner, self.pid, self.number = inner, pid, number

    def device(self, link: bytes) -> str | None:
        if b"/%d/" % self.pid in link:
            raise OSError(self.number, os.strerror(self.number))
        return self.inner.device(link)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.ENOENT, errno.ESRCH])
def test_what_may_not_be_looked_at_is_no_free_process(tree: Tree, number: int) -> None:
    """A refusal makes a process unreadable; one that vanishes is nothing at all."""
    tree.process(7, fds=["/dev/nvidia0"])
    tree.process(8, fds=["/dev/nvidia0"])
    roots = roots_of(tree)
    found = scan(roots, Failing(TreeProbe(roots, gpu_devices(roots)), 7, number))
    assert [holder.pid for holder in found.holders] == [8]
    assert found.unreadable == ((7,) if number in (errno.EACCES, errno.EPERM) else ())


@contextmanager
def without_descriptors() -> Iterator[None]:
    """No file can be opened meanwhile."""
    lowest = os.open("/dev/null", os.O_RDONLY)
    os.close(lowest)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_r1_without_open_files_to_spare_nothing_counts_as_not_there(loaded: Tree, host: LinuxHost) -> None:
    """R1: neither a free GPU nor an unloaded driver is made of an answer that there are too many open files."""
    loaded.process(100, fds=["/dev/nvidia0"])
    for look in (host.holders, host.look):
        with pytest.raises(HostError, match="Too many open files") as caught, without_descriptors():
            await look()
        assert caught.value.errno_name == "EMFILE"
        assert "LimitNOFILE" in caught.value.hint


def test_a_kernel_thread_that_may_not_be_looked_at_is_passed_over(tree: Tree) -> None:
    """Only what can hold a device counts as unreadable."""
    tree.process(7, fds=["/dev/nvidia0"])
    tree.file("proc/7/stat", "7 (kworker) I 2 0 0 0 -1 2129984 0 0 0 0 0 0 0 0 20 0 1 0 1 1 1\n")
    roots = roots_of(tree)
    assert scan(roots, Failing(TreeProbe(roots, gpu_devices(roots)), 7, errno.EACCES)).unreadable == ()


def test_a_big_host_is_scanned_quickly(tree: Tree) -> None:
    """100 processes with 40 descriptors and 200 mappings each; about 0.03 s, so that 2,000 take well under a second."""
    maps = "".join(f"7f{index:04x}000-7f{index:04x}fff r-xp 00000000 08:01 {index} /usr/lib/lib{index}.so\n" for index in range(200))
    for pid in range(1, 101):
        tree.process(pid, fds=[f"/var/lib/x/{pid}-{number}" for number in range(20)] + ["socket:[1]"] * 20, maps=maps)
    tree.process(3000, fds=["/dev/nvidia0"])
    began = time.monotonic()
    found = scan(roots_of(tree))
    assert time.monotonic() - began < 2
    assert [holder.pid for holder in found.holders] == [3000]


class Counting(Probe):
    """Answers by the name in maps, counts the questions, and finds nothing behind some links."""

    def __init__(self, devices: Sequence[bytes], gone: Collection[bytes] = ()) -> None:
        self.devices, self.gone, self.asked = devices, set(gone), list[bytes]()

    def device(self, link: bytes) -> str | None:
        where, _, name = link.partition(b"\0")
        self.asked.append(where)
        if (address := where.rpartition(b"/")[2]) in self.gone:
            raise FileNotFoundError(errno.ENOENT, "no", address)
        return os.fsdecode(name) if name in self.devices or address in self.devices else None


def shared(number: int, file: str) -> str:
    return f"{number:06x}000-{number:06x}fff rw-s {number:08x} {file}\n"


def test_a_file_mapped_thousands_of_times_is_asked_for_once(tree: Tree) -> None:
    """Each process's mappings of one file cost one question, and the one of a device among them is found all the same."""
    many = "".join(shared(number, "08:01 77                 /var/lib/db") for number in range(3000))
    tree.process(7, maps=many + shared(5000, "00:05 9 /dev/x") + many)
    tree.process(8, maps=many)
    probe = Counting([b"/dev/x"])
    assert [(holder.pid, holder.devices) for holder in scan(roots_of(tree), probe).holders] == [(7, ("/dev/x",))]
    assert len(probe.asked) == 3


@pytest.mark.parametrize("file", ["08:01 78 /srv/x", "08:02 77 /srv/x", "08:01 77 /srv/x (deleted)", "08:01 77 /other/x"])
def test_what_differs_in_any_way_is_asked_for_itself(tree: Tree, file: str) -> None:
    """The same name with another inode, or on another filesystem, or the same inode with another name may be another node."""
    device = b"abcdef000-abcdeffff"
    tree.process(7, maps=shared(1, "08:01 77 /srv/x") + shared(0xABCDEF, file) + shared(3, "08:01 77 /srv/x"))
    found = scan(roots_of(tree), Counting([device]))
    assert [holder.devices for holder in found.holders] == [(file.split(" ", 2)[2],)]


def test_the_same_line_in_two_processes_is_asked_for_twice(tree: Tree) -> None:
    """In two containers one device number, inode and name can be two nodes."""
    for pid in (7, 8):
        tree.process(pid, maps=shared(pid, "00:2a 300 /srv/x"))
    found = scan(roots_of(tree), Counting([b"000008000-000008fff"]))
    assert [holder.pid for holder in found.holders] == [8]


def test_a_mapping_that_went_away_answers_for_no_other(tree: Tree) -> None:
    """Where one mapping of a file is gone when it is looked at, the next one is asked."""
    lines = [shared(number, "00:05 9 /dev/x") for number in range(5)]
    tree.process(7, maps="".join(lines))
    gone = [line.encode().split()[0] for line in lines]
    for left in gone:
        probe = Counting([b"/dev/x"], gone=set(gone) - {left})
        assert [holder.pid for holder in scan(roots_of(tree), probe).holders] == [7]


# This machine's /proc -------------------------------------------------------------------------------------------------

ZERO = GpuDevices(frozenset(), frozenset({(1, 5)}), frozenset({"/dev/zero"}))
"""/dev/zero in the place of a GPU: any process may open and map it."""


@contextmanager
def child(code: str) -> Iterator[subprocess.Popen[bytes]]:
    """A Python process that has run `code` and waits."""
    code = f"{code}\nprint('ready', flush=True)\nimport time; time.sleep(60)"
    with subprocess.Popen([sys.executable, "-I", "-c", code], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield process
        finally:
            process.kill()


def held(pid: int) -> tuple[str, ...] | None:
    found = scan(machine_roots(), KernelProbe(ZERO))
    return next((holder.devices for holder in found.holders if holder.pid == pid), None)


@pytest.mark.real_processes
def test_a_real_descriptor_is_found() -> None:
    """An open device of another process is found by its number."""
    with child("f = open('/dev/zero')") as process:
        assert held(process.pid) == ("/dev/zero",)


@pytest.mark.real_processes
def test_a_node_made_elsewhere_is_found(tmp_path: Path) -> None:
    """Only the number tells what /tmp/x is, and it is enough, unlinked too."""
    node = tmp_path / "x"
    try:
        os.mknod(node, 0o600 | 0o020000, os.makedev(1, 5))
        node.open("rb").close()
    except PermissionError:
        pytest.skip("needs the right to make device nodes")
    with child(f"import os; f = open({str(node)!r}); os.unlink({str(node)!r})") as process:
        assert held(process.pid) == (f"{node} (device 1:5)",)


@pytest.mark.real_processes
def test_other_files_are_not_found() -> None:
    """A process with other devices and files open is no holder."""
    with child("f = open('/dev/null'); g = open('/etc/passwd')") as process:
        assert held(process.pid) is None


@pytest.mark.real_processes
def test_a_real_mapping_of_a_node_is_found(tmp_path: Path) -> None:
    """A mapping that outlives its descriptor is found through map_files, whatever its name says.

    No device that everyone may map keeps its number in a mapping (/dev/zero turns into shared memory), so a plain file stands for it.
    """
    path = tmp_path / "gpu"
    path.write_bytes(b"x" * mmap.PAGESIZE)

    class Named(Probe):
        def device(self, link: bytes) -> str | None:
            where = os.fsdecode(link.partition(b"\0")[0])
            return "found" if "map_files" in where and Path(where).samefile(path) else None

    code = (
        "import ctypes, os\n"
        f"f = os.open({str(path)!r}, os.O_RDWR)\n"
        "mmap = ctypes.CDLL(None).mmap; mmap.restype = ctypes.c_void_p\n"
        "mmap(None, 4096, 3, 1, f, ctypes.c_long(0)); os.close(f)\n"
    )
    with child(code) as process:
        found = scan(machine_roots(), Named())
        assert process.pid in [holder.pid for holder in found.holders]


class Watching(Probe):
    """KernelProbe of ZERO that does something first for one process."""

    def __init__(self, pid: int = 0, then: Callable[[], None] = lambda: None) -> None:
        self.inner, self.pid, self.then = KernelProbe(ZERO), pid, then

    def device(self, link: bytes) -> str | None:
        if b"/%d/" % self.pid in link:
            self.then()
        return self.inner.device(link)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> LinuxHost:
    """This machine as a host."""
    monkeypatch.setattr(linux, "gpu_probe", lambda _roots: KernelProbe(ZERO))
    monkeypatch.setattr(linux, "MANY_PROCESSES", 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: range(2))
    return LinuxHost(machine_roots(), KernelCalls(), clock)


@pytest.mark.real_processes
@pytest.mark.parametrize("cores", [2, 64])
async def test_children_find_what_one_walk_finds(machine: LinuxHost, monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    """However many share the work, each process is looked at once, by a child, and all come back in order."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: range(cores))
    monkeypatch.setattr(linux, "scan", only_in_children(os.getpid()))
    with child("f = open('/dev/zero')") as one, child("f = open('/dev/zero')") as other, child("") as bystander:
        found = await machine.holders()
        pids = [holder.pid for holder in found.holders]
        assert pids == sorted(set(pids))
        assert {one.pid, other.pid} <= set(pids)
        assert bystander.pid not in pids
        assert os.getpid() not in pids


@pytest.mark.real_processes
@pytest.mark.parametrize(("cores", "many"), [(1, 1), (2, 1_000_000)])
async def test_a_walk_that_is_short_makes_no_children(machine: LinuxHost, monkeypatch: pytest.MonkeyPatch, cores: int, many: int) -> None:
    """With one core they would gain nothing, and with few processes they cost more than they save."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: range(cores))
    monkeypatch.setattr(linux, "MANY_PROCESSES", many)
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("a child was made"))
    with child("f = open('/dev/zero')") as process:
        assert process.pid in await devices_held(machine)


def only_in_children(parent: int) -> Callable[..., HolderScan]:
    def in_child_only(*args: Any, **options: Any) -> HolderScan:
        assert os.getpid() != parent
        return scan(*args, **options)

    return in_child_only


@pytest.mark.real_processes
@pytest.mark.parametrize("way", ["killed", "refused"])
async def test_without_children_it_is_done_here(machine: LinuxHost, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """A container's limit of processes, or of memory, makes the scan slower and not wrong."""
    parent = os.getpid()

    def die() -> None:
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)

    def refused() -> int:
        raise BlockingIOError(errno.EAGAIN, "no")

    with child("f = open('/dev/zero')") as process:
        monkeypatch.setattr(linux, "gpu_probe", lambda _roots: Watching(process.pid, die))
        monkeypatch.setattr("driver_manager.host.scan.gpu_probe", lambda _roots: KernelProbe(ZERO))
        if way == "refused":
            monkeypatch.setattr(os, "fork", refused)
        assert process.pid in await devices_held(machine)


@pytest.mark.real_processes
async def test_a_child_that_hangs_names_the_process(machine: LinuxHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its limit the scan says where it stood, once, and leaves no child behind."""
    with child("f = open('/dev/zero')") as process:
        monkeypatch.setattr(linux, "gpu_probe", lambda _roots: Watching(process.pid, lambda: time.sleep(60)))
        monkeypatch.setattr(linux, "READ_SECONDS", 1.5)
        with pytest.raises(DeviceStuck, match=rf"process (\d+, )*{process.pid}\b.* in 1\.5 s"):
            await machine.holders()
        assert [each.pid for each in psutil.Process().children()] == [process.pid]


@pytest.mark.real_processes
async def test_the_end_of_a_real_process_is_noticed(clock: object) -> None:
    """A wait for a process ends when it ends, or at the limit."""
    from driver_manager.host import open_host

    host = open_host(None, clock)  # type: ignore[arg-type]  # the fixture's type is in conftest
    with child("") as process:
        began = time.monotonic()
        await host.wait_for_change([process.pid], 0.2)
        assert 0.15 < time.monotonic() - began < 2
        asyncio.get_running_loop().call_later(0.2, process.kill)
        began = time.monotonic()
        await host.wait_for_change([os.getpid(), process.pid], 20)
        assert time.monotonic() - began < 5
        process.wait()
        await host.wait_for_change([process.pid], 20)
    assert time.monotonic() - began < 5


async def test_the_end_of_a_trees_process_is_noticed(tree: Tree, host: LinuxHost) -> None:
    """On a tree a process ends when its folder goes."""
    tree.file("proc/7/comm", "x")
    asyncio.get_running_loop().call_later(0.2, lambda: (tree.root / "proc/7").rename(tree.root / "proc/gone"))
    began = time.monotonic()
    await host.wait_for_change([7], 20)
    assert time.monotonic() - began < 5
    await host.wait_for_change([], 0.05)
