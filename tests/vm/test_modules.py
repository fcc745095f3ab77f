"""What the kernel answers when a module is to go, and what the host makes of it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

from driver_manager.core.modules import stuck_modules, unload_order, used_modules
from driver_manager.core.snapshot import ModuleState, Unloading
from driver_manager.errors import DeviceStuck, HostError, ModuleInUse
from tests.vm.guest import in_guest
from tests.vm.inside import (
    CAP_SYS_MODULE,
    DRIVER,
    after,
    delete,
    here,
    holding,
    load,
    loaded,
    opened,
    refcount,
    state_of,
    without_capabilities,
    write,
)


async def refusal(name: str, timeout: float = 10) -> HostError:
    """The error that the unloading of a module ends in."""
    try:
        await here().unload_module(name, timeout)
    except HostError as error:
        return error
    raise AssertionError(f"{name} was unloaded")


@in_guest
async def test_the_driver_goes_in_the_order_of_its_graph() -> None:
    """The order comes from the kernel's own graph, and each module goes at the first try."""
    load(*DRIVER)
    host = here()
    order = unload_order((await host.look()).modules).modules
    assert order[-1] == "nvidia"
    for name in order:
        await host.unload_module(name, 10)
    assert not loaded()
    assert not (await host.look()).modules


@in_guest
async def test_a_look_shows_what_the_kernel_has() -> None:
    """Modules, versions, holders, cards and their drivers, of a driver that is really there."""
    load(*DRIVER)
    view = await here().look()
    assert view.modules["nvidia"].holders == {"nvidia_modeset", "nvidia_uvm"}
    assert view.modules["nvidia"].version == "550.54.15"
    assert (view.unloading, view.sees_all_processes, view.kernel_release) == (Unloading.POSSIBLE, True, os.uname().release)
    drivers = [(device.address, device.driver) for device in view.pci]
    assert drivers == [("0000:00:05.0", "nvidia"), ("0000:00:05.1", None), ("0000:00:06.0", "nvidia")]
    assert not view.notes


@in_guest
async def test_a_module_that_others_use_is_in_use() -> None:
    """EAGAIN, whatever the flags; the error names the modules and nothing has gone."""
    load(*DRIVER)
    assert (delete("nvidia"), delete("nvidia", 0)) == ("EAGAIN", "EAGAIN")
    error = await refusal("nvidia")
    assert isinstance(error, ModuleInUse)
    assert "nvidia_modeset, nvidia_uvm" in error.message
    assert loaded() == {"nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm"}


@in_guest
async def test_a_module_whose_device_is_open_is_in_use() -> None:
    """EAGAIN at once; one open can count twice, so the count is a sign of use and no number of users."""
    load("nvidia")
    with holding(opened()):
        assert refcount("nvidia") == 2
        error = await refusal("nvidia")
        assert (type(error), error.errno_name) == (ModuleInUse, "EAGAIN")
        assert used_modules((await here().look()).modules, ["nvidia"]) == ("nvidia",)
    await here().unload_module("nvidia", 10)
    assert not loaded()


@in_guest
async def test_a_module_of_somebody_else_is_found() -> None:
    """A third party's module that depends on the driver is named before anything goes, and goes first where that is allowed."""
    load(*DRIVER, "acme-monitor")
    host = here()
    modules = (await host.look()).modules
    assert unload_order(modules).unknown_holders == ("acme_monitor",)
    allowed = unload_order(modules, also=["acme_monitor"])
    assert allowed.unknown_holders == ()
    for name in allowed.modules:
        await host.unload_module(name, 10)
    assert not loaded()


@in_guest
async def test_gone_and_dashed_names_are_fine() -> None:
    """The kernel knows only the form with underscores; what is not loaded counts as unloaded."""
    load("nvidia", "nvidia-uvm")
    assert (delete("nvidia-uvm"), delete("nothing")) == ("ENOENT", "ENOENT")
    await here().unload_module("nvidia-uvm", 10)
    await here().unload_module("nvidia_uvm", 10)
    assert loaded() == {"nvidia"}


@in_guest
async def test_a_module_without_an_exit_never_goes() -> None:
    """EBUSY, and the hint is a reboot; nobody should try again."""
    assert (state_of("nvspoof"), delete("nvspoof")) == ("0 [permanent], Live", "EBUSY")
    error = await refusal("nvspoof")
    assert not isinstance(error, ModuleInUse)
    assert "no exit function" in error.message


@in_guest
async def test_a_module_that_is_still_coming_is_in_use() -> None:
    """EBUSY while it loads; a moment later it goes."""
    loader = after(0, lambda: load("slowmod", init_ms=60_000))
    while not Path("/sys/module/slowmod/initstate").exists():
        await asyncio.sleep(0.02)
    error = await refusal("slowmod")
    assert (type(error), error.errno_name) == (ModuleInUse, "EBUSY")
    assert "being loaded" in error.message
    assert write("/sys/module/slowmod/parameters/init_ms", "0") == 0
    os.waitpid(loader, 0)
    await here().unload_module("slowmod", 10)
    assert not loaded()


@in_guest
async def test_a_module_that_is_going_is_told_apart() -> None:
    """EBUSY too, with a use count of -1 in /proc/modules; the view says `going` and that it is stuck."""
    load("nvidia", exit_ms=60_000)
    remover = after(0, lambda: delete("nvidia"))
    while not state_of("nvidia").endswith("Unloading"):
        await asyncio.sleep(0.05)
    assert state_of("nvidia") == "-1 - Unloading"
    module = (await here().look()).modules["nvidia"]
    assert module.state is ModuleState.GOING
    assert stuck_modules({"nvidia": module}) == ("nvidia",)
    error = await refusal("nvidia")
    assert "already being removed" in error.message
    assert write("/sys/module/nvidia/parameters/exit_ms", "0") == 0
    os.waitpid(remover, 0)
    assert not loaded()


@in_guest
async def test_a_switched_off_unloading_is_not_a_missing_right() -> None:
    """kernel.modules_disabled gives EPERM for any name and cannot be taken back; only the sysctl tells it from a missing capability."""
    load("nvidia")
    assert write("/proc/sys/kernel/modules_disabled", "1") == 0
    assert (delete("nvidia"), delete("nothing")) == ("EPERM", "EPERM")
    assert write("/proc/sys/kernel/modules_disabled", "0") == "EINVAL"
    assert (await here().look()).unloading is Unloading.DISABLED
    assert "modules_disabled" in (await refusal("nvidia")).message


@in_guest
async def test_a_missing_capability_is_seen_before_anything() -> None:
    """EPERM without CAP_SYS_MODULE; the look knows it without a try."""
    load("nvidia")
    without_capabilities(CAP_SYS_MODULE)
    assert (delete("nvidia"), delete("nothing")) == ("EPERM", "EPERM")
    assert (await here().look()).unloading is Unloading.NOT_PERMITTED
    assert "CAP_SYS_MODULE" in (await refusal("nvidia")).message


@in_guest
async def test_a_module_that_refuses_for_three_seconds_then_goes() -> None:
    """A driver lets go of itself a while after the last close: in use with no holder to be seen, then free."""
    load("nvidia", linger_ms=3000)
    host = here()
    with holding(opened()) as pid:
        assert [each.pid for each in (await host.holders()).holders] == [pid]
        begun = time.monotonic()
    assert (await host.holders()).holders == ()
    refused = 0
    while loaded():
        try:
            await host.unload_module("nvidia", 10)
        except ModuleInUse:
            refused += 1
            await asyncio.sleep(0.1)
    assert refused
    assert time.monotonic() - begun > 3


def letter_of(pid: int) -> str:
    """The kernel's letter for what a process does (proc(5))."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@in_guest
async def test_a_removal_that_hangs_is_left_and_named() -> None:
    """A kill does not end a process inside delete_module: it is left behind and named, and this process goes on."""
    load("nvidia", exit_ms=60_000)
    error = await refusal("nvidia", timeout=0.5)
    assert isinstance(error, DeviceStuck)
    pid = int(error.message.partition("process ")[2].split()[0])
    deadline = time.monotonic() + 10
    while letter_of(pid) != "D":  # in the kernel's sleep that no signal ends, from which this stand-in wakes every 10 ms
        assert time.monotonic() < deadline, f"process {pid} is in {letter_of(pid)}"
        time.sleep(0.003)
    assert write("/sys/module/nvidia/parameters/exit_ms", "0") == 0
    os.waitpid(pid, 0)  # it ends with the exit function, and the module is gone then
    assert not loaded()


@in_guest
def test_a_kill_in_the_middle_of_a_removal_does_not_stop_it() -> None:
    """The process ends only when the exit function is done, and the module is gone."""
    load("nvidia", exit_ms=60_000)
    pid = after(0, lambda: delete("nvidia"))
    while not state_of("nvidia").endswith("Unloading"):
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    time.sleep(0.3)
    assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    assert state_of("nvidia") == "-1 - Unloading"
    assert write("/sys/module/nvidia/parameters/exit_ms", "0") == 0
    os.waitpid(pid, 0)
    assert not loaded()
