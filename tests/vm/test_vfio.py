"""A user of a card through vfio, as the monitor of a virtual machine is one, and our commands while it has the card.

The user is real: group, container and device by ioctl (include/uapi/linux/vfio.h). What the kernel does then is a test of its own, since
the refusals of `core.vfio` rest on it.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

from driver_manager.errors import DeviceInUse
from driver_manager.host import calls, linux
from tests.vm.command import Command, command, vfio_manage
from tests.vm.guest import runs_in
from tests.vm.inside import AUDIO, GPU, OTHER_GPU, after, child, driver_of, here, holding, libc, load, loaded, read, write

in_pci_guest = runs_in("pci_guest")
DEVICES = Path("/sys/bus/pci/devices")
_SET_IOMMU, _GROUP_GET_STATUS, _GROUP_SET_CONTAINER, _GROUP_GET_DEVICE_FD = 0x3B66, 0x3B67, 0x3B68, 0x3B6A
_TYPE1 = 1
_VIABLE = 1


def group_node(address: str = GPU) -> str:
    """The node of a function's IOMMU group."""
    return f"/dev/vfio/{(DEVICES / address / 'iommu_group').readlink().name}"


def group_in_use() -> tuple[int, int]:
    """A container and, in it, the first card's group, ready for its devices."""
    container, group = os.open("/dev/vfio/vfio", os.O_RDWR), os.open(group_node(), os.O_RDWR)
    status = bytearray(struct.pack("II", 8, 0))
    fcntl.ioctl(group, _GROUP_GET_STATUS, status)
    assert struct.unpack("II", status)[1] & _VIABLE
    fcntl.ioctl(group, _GROUP_SET_CONTAINER, struct.pack("i", container))
    fcntl.ioctl(container, _SET_IOMMU, _TYPE1)
    return container, group


def machine(address: str = GPU, *, closes_group: bool = False) -> Callable[[], int]:
    """Work that opens a function as QEMU does; gives the device's descriptor."""

    def work() -> int:
        container, group = group_in_use()
        device = int(libc.ioctl(group, ctypes.c_ulong(_GROUP_GET_DEVICE_FD), ctypes.c_char_p(address.encode())))
        assert device >= 0
        if closes_group:
            os.close(group)
            os.close(container)
        return device

    return work


def on_vfio() -> None:
    """All cards are moved to vfio by our own command."""
    done = vfio_manage("bind", "--all")
    assert done.code() == 0, done.said
    assert drivers() == ["vfio-pci"] * 3


def drivers() -> list[str | None]:
    """The drivers of the three functions."""
    return [driver_of(address) for address in (GPU, AUDIO, OTHER_GPU)]


def enabled() -> tuple[str, str]:
    """How often the first card's functions are switched on."""
    return read(f"{DEVICES}/{GPU}/enable"), read(f"{DEVICES}/{AUDIO}/enable")


def assert_refused(done: Command, *words: str, first_card: str | None = "vfio-pci") -> None:
    """75, all words were said, the first card is as it was, and no child of the command is stuck in the kernel."""
    assert done.code() == 75, done.said
    for word in words:
        assert word in done.said, done.said
    assert (driver_of(GPU), driver_of(AUDIO)) == (first_card, "vfio-pci")
    assert stuck_writers() == []


def stuck_writers() -> list[int]:
    """Processes that wait in the kernel for a device of vfio to be given back."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if "vfio_unregister_group_dev" in (process / "stack").read_text():
                found.append(int(process.name))
        except OSError:
            continue
    return found


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    """Waits, but not for ever."""
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


# What the kernel does -----------------------------------------------------------------------------------------------


@in_pci_guest
def test_a_device_on_vfio_is_switched_on_while_it_is_open() -> None:
    """`enable` counts open devices: not a bound one, not an open group with its container; each function counts for itself."""
    on_vfio()
    assert enabled() == ("0", "0")
    with holding(group_in_use):
        assert enabled() == ("0", "0")
    with holding(machine()):
        assert enabled() == ("1", "0")
    with holding(machine(AUDIO)):
        assert enabled() == ("0", "1")
    with holding(machine(closes_group=True)):
        assert enabled() == ("1", "0")
    wait_until(lambda: enabled() == ("0", "0"), "it is switched off by the last close")


@in_pci_guest
def test_enable_may_count_more_than_users() -> None:
    """What somebody else has switched on stays so on vfio without a user: the file alone is no proof of one."""
    assert write(f"{DEVICES}/{GPU}/driver/unbind", GPU) == 0
    assert write(f"{DEVICES}/{GPU}/enable", "1") == 0
    on_vfio()
    assert enabled() == ("1", "0")
    with holding(machine()):
        assert enabled() == ("2", "0")
    done = vfio_manage("unbind", "--all")
    assert done.code() == 0, done.said


@in_pci_guest
def test_n39_an_unbind_waits_for_the_open_device_and_for_nothing_else() -> None:
    """N39: an open group does not hold a write to `unbind` up; an open device does, through SIGKILL, until it is closed."""
    on_vfio()
    with holding(group_in_use):
        assert write(f"{DEVICES}/{AUDIO}/driver/unbind", AUDIO) == 0
    assert write("/sys/bus/pci/drivers/vfio-pci/bind", AUDIO) == 0
    with holding(machine()):
        writer = after(0, lambda: write(f"{DEVICES}/{GPU}/driver/unbind", GPU))
        wait_until(lambda: stuck_writers() == [writer], "the write is stuck")
        os.kill(writer, 9)
        time.sleep(0.5)
        assert stuck_writers() == [writer]
        assert driver_of(GPU) is None  # the link goes before the driver is asked
    os.waitpid(writer, 0)
    assert stuck_writers() == []


# The holder is named, nothing is unbound ----------------------------------------------------------------------------


@in_pci_guest
def test_n37_a_machine_keeps_its_gpu() -> None:
    """N37, N39: it is named, nothing is written, 75; the other card comes off; when it has ended all comes off; a bind is content."""
    on_vfio()
    with holding(machine()) as user:
        assert_refused(vfio_manage("unbind", "--device-id", GPU), f"process {user}", group_node())
        done = vfio_manage("bind", "--all")
        assert done.code() == 0, done.said
        assert_refused(vfio_manage("unbind", "--all"), f"process {user}", group_node())
        assert driver_of(OTHER_GPU) == "nvidia"
    done = vfio_manage("unbind", "--all")
    assert done.code() == 0, done.said
    assert drivers() == ["nvidia", None, "nvidia"]


@in_pci_guest
def test_n37_an_open_group_is_use() -> None:
    """N37: a machine that is being started, with its group and no device yet, is named and kept too."""
    on_vfio()
    with holding(group_in_use) as user:
        assert_refused(vfio_manage("unbind", "--all"), f"process {user}")


@in_pci_guest
def test_n37_a_companion_in_use_keeps_its_card() -> None:
    """N37: a GPU whose audio alone is open stays, as its group is in use."""
    on_vfio()
    with holding(machine(AUDIO)) as user:
        assert_refused(vfio_manage("unbind", "--all"), f"process {user}")


@in_pci_guest
def test_n37_a_user_that_shows_the_device_alone_is_named() -> None:
    """N37, N39: after the group is closed only a file without name or number is left; its process is found and named all the same."""
    on_vfio()
    with holding(machine(closes_group=True)) as user:
        assert_refused(vfio_manage("unbind", "--device-id", GPU), f"process {user}", "vfio-device")
    done = vfio_manage("unbind", "--all")
    assert done.code() == 0, done.said


@in_pci_guest
async def test_n37_the_agents_own_step_names_the_user() -> None:
    """N37: the step by which a run frees a GPU refuses by name, in each of the ways to have it open."""
    on_vfio()
    for work in (machine(), machine(closes_group=True), group_in_use):
        with holding(work) as user:
            refusal = ""
            try:
                await here().unbind_vfio(GPU, 3)
            except DeviceInUse as error:
                refusal = error.message
            assert f"process {user}" in refusal
            assert driver_of(GPU) == "vfio-pci"
    await here().unbind_vfio(GPU, 3)
    assert driver_of(GPU) is None


@in_pci_guest
def test_n39_a_run_without_a_cluster_leaves_gpus_on_vfio() -> None:
    """N39: nobody says that they are wanted for the driver: modules go, the card and its user are not touched, 0."""
    done = vfio_manage("bind", "--device-id", GPU)
    assert done.code() == 0, done.said
    load("nvidia-uvm")
    with holding(machine()):
        done = command("uninstall_driver", HOLDER_TIMEOUT="2s")
        assert done.code() == 0, done.said
        assert (driver_of(GPU), driver_of(AUDIO)) == ("vfio-pci", "vfio-pci")
        assert loaded() == set()
        assert enabled() == ("1", "0")


# The race -----------------------------------------------------------------------------------------------------------


class Late(calls.KernelCalls):
    """The kernel's calls, with a user that comes between the last look and the write."""

    user = 0

    async def write(self, path: str, text: str, timeout: float) -> None:
        if path.endswith(f"{GPU}/driver/unbind") and not Late.user:
            Late.user = child(machine())
            Path("/tmp/late").write_text(str(Late.user))
        await super().write(path, text, timeout)


@in_pci_guest
def test_n39_a_user_that_comes_after_the_look() -> None:
    """N39: the write is given up in its time, its child named, 71; a second run names the user; when that has gone all is well again."""
    on_vfio()
    linux.__dict__["KernelCalls"] = Late
    done = vfio_manage("unbind", "--device-id", GPU, "--device-timeout", "2s")
    assert done.code() == 71, done.said
    assert "in 2 s" in done.said
    linux.__dict__["KernelCalls"] = calls.KernelCalls
    (writer,) = stuck_writers()
    assert f"process {writer} is stuck in it and stays behind" in done.said
    user = int(Path("/tmp/late").read_text())
    assert driver_of(OTHER_GPU) == "vfio-pci"
    again = vfio_manage("unbind", "--device-id", GPU, "--device-timeout", "2s")
    assert again.code() == 75, again.said
    assert f"process {user}" in again.said
    assert stuck_writers() == [writer]
    os.kill(user, 9)
    wait_until(lambda: stuck_writers() == [], "the write comes back")
    done = vfio_manage("unbind", "--all")
    assert done.code() == 0, done.said
    assert drivers() == ["nvidia", None, "nvidia"]
