"""The Host contract: what a machine shows and what its kernel refuses, on the simulator and on a directory tree."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

import pytest

from driver_manager import names
from driver_manager.core.snapshot import MountView, Unloading
from driver_manager.errors import DeviceInUse, DeviceStuck, HostError, InvariantBroken, LockHeld, ModuleInUse, MountBusy, ServiceFailed
from tests.contract.hosts import POD_UID, ROOT, HostStage, SimHostStage, TreeHostStage


@pytest.fixture(params=["sim", "tree"])
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> HostStage:
    """A machine with nothing on it."""
    return SimHostStage() if request.param == "sim" else TreeHostStage(tmp_path / "host")


async def test_an_empty_machine(machine: HostStage) -> None:
    """Nothing loaded, nothing mounted, no files, and a boot id."""
    view = await machine.host.look()
    assert view.boot_id
    assert not view.is_loaded
    assert (dict(view.modules), view.mounts, view.markers, view.state_digest, view.has_pid_file) == ({}, (), (), None, False)
    assert view.unloading is Unloading.POSSIBLE
    assert (await machine.host.holders()).holders == ()


async def test_a_loaded_driver(machine: HostStage) -> None:
    """Modules with their counts, holders and version; mounts below the driver root alone; digest, markers and pid file."""
    machine.load(users_of_nvidia=2)
    machine.mount(ROOT, f"{ROOT}/dev", "/run/other")
    machine.file(f"/{names.STATE_FILE}", " digest-1\n")
    machine.file(f"/{names.PID_FILE}", "12\n")
    machine.file(f"/{names.VALIDATIONS}/toolkit-ready")
    view = await machine.host.look()
    assert view.driver_version == "550.54.15"
    assert view.modules["nvidia"].holders == {"nvidia_uvm", "nvidia_modeset"}
    assert view.modules["nvidia"].refcount == 4
    assert [view.modules[name].has_own_users for name in ("nvidia", "nvidia_uvm")] == [True, False]
    assert [mount.target for mount in view.mounts] == [ROOT, f"{ROOT}/dev"]
    assert all(mount.is_shared and mount.fs_type == "overlay" for mount in view.mounts)
    assert (view.state_digest, view.markers, view.has_pid_file) == ("digest-1", ("toolkit-ready",), True)


# Modules ------------------------------------------------------------------------------------------------------------


async def test_modules_go_dependents_first(machine: HostStage) -> None:
    """In the right order all go; one that is gone already is fine."""
    machine.load()
    for name in ("nvidia_modeset", "nvidia_uvm", "nvidia", "nvidia"):
        await machine.host.unload_module(name, 5)
    assert not (await machine.host.look()).modules
    assert [call[2] for call in machine.calls()] == ["0", "0", "0", "ENOENT"]


async def test_a_module_with_dependents_stays(machine: HostStage) -> None:
    """EAGAIN, and the message names them."""
    machine.load()
    with pytest.raises(ModuleInUse, match="nvidia_modeset, nvidia_uvm") as caught:
        await machine.host.unload_module("nvidia", 5)
    assert (caught.value.errno_name, caught.value.transient) == ("EAGAIN", True)
    assert len((await machine.host.look()).modules) == 3


async def test_a_module_with_users_stays(machine: HostStage) -> None:
    """EAGAIN, and the message has the count; the dependents can go all the same."""
    machine.load(users_of_nvidia=1)
    await machine.host.unload_module("nvidia_uvm", 5)
    await machine.host.unload_module("nvidia-modeset", 5)
    with pytest.raises(ModuleInUse, match="use count 1"):
        await machine.host.unload_module("nvidia", 5)


async def test_a_kernel_that_unloads_nothing(machine: HostStage) -> None:
    """It shows before the first try, and the refusal is no ModuleInUse: waiting does not help."""
    machine.load()
    machine.disable_unloading()
    assert (await machine.host.look()).unloading is Unloading.DISABLED
    with pytest.raises(HostError) as caught:
        await machine.host.unload_module("nvidia_uvm", 5)
    assert type(caught.value) is HostError
    assert (caught.value.errno_name, caught.value.transient) == ("EPERM", False)


async def test_an_unload_that_does_not_come_back(machine: HostStage) -> None:
    """It is given up when its time is over."""
    machine.load()
    machine.stick("nvidia_uvm")
    began = time.monotonic()
    with pytest.raises(DeviceStuck, match="nvidia_uvm"):
        await machine.host.unload_module("nvidia_uvm", 0.3)
    assert 0.25 < time.monotonic() - began < 3


# Mounts -------------------------------------------------------------------------------------------------------------


async def mounts_of(machine: HostStage) -> tuple[MountView, ...]:
    return (await machine.host.look()).mounts


async def test_mounts_go_deepest_first(machine: HostStage) -> None:
    """A mount with another one on it is busy; from the deepest on all go; one that is gone is fine."""
    machine.mount(ROOT, f"{ROOT}/dev")
    root, dev = await mounts_of(machine)
    with pytest.raises(MountBusy) as caught:
        await machine.host.unmount(root, detach=False, timeout=5)
    assert caught.value.errno_name == "EBUSY"
    for mount in (dev, root, root):
        await machine.host.unmount(mount, detach=False, timeout=5)
    assert await mounts_of(machine) == ()


async def test_a_busy_mount(machine: HostStage) -> None:
    """Somebody works below it: refused without detaching, taken with it."""
    machine.mount(ROOT)
    machine.work_in(ROOT)
    (mount,) = await mounts_of(machine)
    with pytest.raises(MountBusy):
        await machine.host.unmount(mount, detach=False, timeout=5)
    assert await mounts_of(machine) == (mount,)
    await machine.host.unmount(mount, detach=True, timeout=5)
    assert await mounts_of(machine) == ()


async def test_detaching_takes_all_that_lies_on_it(machine: HostStage) -> None:
    """The whole tree of mounts goes in one call."""
    machine.mount(ROOT, f"{ROOT}/dev", f"{ROOT}/dev/shm")
    await machine.host.unmount((await mounts_of(machine))[0], detach=True, timeout=5)
    assert await mounts_of(machine) == ()


async def test_stacked_mounts(machine: HostStage) -> None:
    """Each unmount takes the top layer of the target and shows the one under it."""
    machine.mount(ROOT, ROOT)
    lower, upper = await mounts_of(machine)
    await machine.host.unmount(upper, detach=False, timeout=5)
    assert await mounts_of(machine) == (lower,)
    await machine.host.unmount(upper, detach=False, timeout=5)
    assert await mounts_of(machine) == (lower,)
    await machine.host.unmount(lower, detach=False, timeout=5)
    assert await mounts_of(machine) == ()


async def test_only_the_driver_root_is_unmounted(machine: HostStage) -> None:
    """Anything else would be a bug of ours, and is one loudly."""
    machine.mount("/run/other")
    with pytest.raises(InvariantBroken):
        await machine.host.unmount(MountView(mount_id=30, target="/run/other"), detach=True, timeout=5)


# Files --------------------------------------------------------------------------------------------------------------


async def test_files_are_removed(machine: HostStage) -> None:
    """True if it was there; only below /run."""
    machine.file(f"/{names.STATE_FILE}", "x")
    assert await machine.host.remove_file(f"/{names.STATE_FILE}")
    assert not await machine.host.remove_file(f"/{names.STATE_FILE}")
    assert (await machine.host.look()).state_digest is None
    for path in ("/etc/passwd", "/run/../etc/passwd"):
        with pytest.raises(InvariantBroken):
            await machine.host.remove_file(path)


async def test_the_pid_file(machine: HostStage) -> None:
    """It stays while somebody has its lock."""
    assert not await machine.host.remove_pid_file()
    machine.file(f"/{names.PID_FILE}", "12\n")
    with machine.pid_lock():
        assert not await machine.host.remove_pid_file()
    assert (await machine.host.look()).has_pid_file
    assert await machine.host.remove_pid_file()
    assert not (await machine.host.look()).has_pid_file


# Virtual machines ---------------------------------------------------------------------------------------------------


async def test_n37_a_gpu_comes_off_vfio_when_nobody_uses_it(machine: HostStage) -> None:
    """N37: while a process has its group open it stays and the process is named; off already, or no such device, is fine."""
    gpu = "0000:3b:00.0"
    machine.gpu_on_vfio(gpu)
    user = machine.hold("/dev/vfio/7")
    assert [one.pid for one in (await machine.host.holders()).holders] == [user]
    with pytest.raises(DeviceInUse, match=rf"{gpu} is in use by train \(process {user}") as caught:
        await machine.host.unbind_vfio(gpu, 5)
    assert caught.value.errno_name == "EBUSY"
    assert machine.calls() == []
    machine.end(user)
    for address in (gpu, gpu, "0000:ff:00.0"):
        await machine.host.unbind_vfio(address, 5)
    assert [device.driver for device in (await machine.host.look()).pci] == [None]
    assert machine.calls() == [("write", f"/sys/bus/pci/devices/{gpu}/driver/unbind", "0")]


# Processes, the lock, nvidia-smi -------------------------------------------------------------------------------------


async def test_holders(machine: HostStage) -> None:
    """Processes with an open GPU device, with the pod or unit they belong to; no others."""
    machine.load()
    of_pod = machine.hold("/dev/nvidia0", pod_uid=POD_UID)
    of_unit = machine.hold("/dev/nvidia-uvm", unit="dcgm.service")
    machine.hold("/dev/null")
    scan = await machine.host.holders()
    found = {one.pid: (one.command, one.devices, one.pod_uid, one.unit) for one in scan.holders}
    assert found == {
        of_pod: ("train", ("/dev/nvidia0",), POD_UID, None),
        of_unit: ("train", ("/dev/nvidia-uvm",), None, "dcgm.service"),
    }
    machine.end(of_pod)
    assert [one.pid for one in (await machine.host.holders()).holders] == [of_unit]


async def test_waiting_for_a_process(machine: HostStage) -> None:
    """It returns soon after the first of them has ended, or when time is up, and at once for one that is not there."""
    first, second = machine.hold("/dev/nvidia0"), machine.hold("/dev/nvidia1")
    began = time.monotonic()
    await machine.host.wait_for_change([first, second], 0.2)
    assert 0.15 < time.monotonic() - began < 2
    asyncio.get_running_loop().call_later(0.1, lambda: machine.end(second))
    began = time.monotonic()
    await machine.host.wait_for_change([first, second], 20)
    assert time.monotonic() - began < 2
    await machine.host.wait_for_change([first, second], 20)
    assert time.monotonic() - began < 2
    began = time.monotonic()
    await machine.host.wait_for_change([], 0.2)
    assert 0.15 < time.monotonic() - began < 2


async def test_the_lock(machine: HostStage) -> None:
    """One run at a time; the other is told who has it; it gets it when it is free."""
    async with machine.host.lock(1):
        with pytest.raises(LockHeld, match="another run works on this node"):
            async with machine.other.lock(0.3):
                pass

        async def wait_for_it() -> None:
            async with machine.other.lock(5):
                pass

        waiting = asyncio.create_task(wait_for_it())
        await asyncio.sleep(0.1)
    await asyncio.wait_for(waiting, 3)


async def test_the_lock_is_freed_by_an_error(machine: HostStage) -> None:
    """However the block ends."""
    with contextlib.suppress(ZeroDivisionError):
        async with machine.host.lock(1):
            raise ZeroDivisionError
    async with machine.other.lock(0.1):
        pass


async def test_the_hosts_own_driver(machine: HostStage) -> None:
    """N25: what nvidia-smi says; nothing where it is not there, fails, or hangs."""
    assert await machine.host.host_driver_version(1) is None
    machine.smi("550.54.15")
    assert await machine.host.host_driver_version(1) == "550.54.15"
    machine.smi(None)
    assert await machine.host.host_driver_version(1) is None
    machine.smi("550.54.15", hangs=True)
    assert await machine.host.host_driver_version(0.2) is None
    machine.smi("550.54.15")


# Services -----------------------------------------------------------------------------------------------------------

UNIT = "nvidia-persistenced.service"


async def active(machine: HostStage, *units: str) -> list[bool]:
    """Which of the units are active, in their order."""
    states = await machine.host.services(units)
    assert list(states) == list(units)
    return [states[unit] for unit in units]


async def test_n29_the_states_of_units(machine: HostStage) -> None:
    """N29: only an active unit is active: not one that is inactive, has failed, or is not there; no question has no answers."""
    for state in ("active", "inactive", "failed"):
        machine.unit(f"{state}.service", state=state)
    units = ("failed.service", "active.service", "missing.service", "inactive.service")
    assert await active(machine, *units) == [False, True, False, False]
    assert await active(machine) == []


async def test_n29_a_unit_is_stopped_and_started(machine: HostStage) -> None:
    """N29: it is so when the call returns; the same call once more is fine; other units are left alone."""
    machine.unit(UNIT)
    machine.unit("other.service")
    for _ in range(2):
        await machine.host.stop_service(UNIT, 5)
        assert await active(machine, UNIT, "other.service") == [False, True]
    for _ in range(2):
        await machine.host.start_service(UNIT, 5)
        assert await active(machine, UNIT, "other.service") == [True, True]


@pytest.mark.parametrize("state", ["inactive", "failed"])
async def test_a_unit_that_does_not_run(machine: HostStage, state: str) -> None:
    """A stop has nothing to do and is fine, a start starts it."""
    machine.unit(UNIT, state=state)
    await machine.host.stop_service(UNIT, 5)
    assert await active(machine, UNIT) == [False]
    await machine.host.start_service(UNIT, 5)
    assert await active(machine, UNIT) == [True]


async def test_a_unit_of_a_process_stops_with_it(machine: HostStage) -> None:
    """A unit known by its process alone is active; its stop ends the process; it can be started again."""
    pid = machine.hold("/dev/nvidia0", unit=UNIT)
    assert await active(machine, UNIT) == [True]
    await machine.host.stop_service(UNIT, 5)
    assert await active(machine, UNIT) == [False]
    assert pid not in [one.pid for one in (await machine.host.holders()).holders]
    await machine.host.start_service(UNIT, 5)
    assert await active(machine, UNIT) == [True]


@pytest.mark.parametrize(("verb", "stays"), [("stop", True), ("start", False)])
async def test_a_unit_that_refuses(machine: HostStage, verb: str, stays: bool) -> None:
    """ServiceFailed with the unit's name; it is as it was."""
    machine.unit(UNIT, state="active" if stays else "failed", fails=verb)
    call = machine.host.stop_service if verb == "stop" else machine.host.start_service
    with pytest.raises(ServiceFailed, match=rf"{UNIT} was not {'stopped' if stays else 'started'}") as caught:
        await call(UNIT, 5)
    assert caught.value.exit_code == 75
    assert await active(machine, UNIT) == [stays]


@pytest.mark.parametrize("verb", ["stop", "start"])
async def test_a_unit_that_takes_too_long(machine: HostStage, verb: str) -> None:
    """ServiceFailed with its name and the limit, at the limit."""
    machine.unit(UNIT, state="active" if verb == "stop" else "inactive", hangs=verb)
    call = machine.host.stop_service if verb == "stop" else machine.host.start_service
    began = time.monotonic()
    with pytest.raises(ServiceFailed, match=rf"{UNIT} was not .*not within 0.3 s"):
        await call(UNIT, 0.3)
    assert time.monotonic() - began < 5
    machine.unit(UNIT)


async def test_a_unit_that_is_not_there(machine: HostStage) -> None:
    """To stop it is fine, as nothing runs; to start it is ServiceFailed; it does not come to be by either."""
    await machine.host.stop_service("missing.service", 5)
    with pytest.raises(ServiceFailed, match=r"missing\.service was not started"):
        await machine.host.start_service("missing.service", 5)
    assert await active(machine, "missing.service") == [False]


async def test_without_systemd(machine: HostStage) -> None:
    """Each question and change is a HostError that says so, and no ServiceFailed: the unit is not to blame."""
    machine.unit(UNIT)
    machine.no_systemd()
    for call in (machine.host.services([UNIT]), machine.host.stop_service(UNIT, 5), machine.host.start_service(UNIT, 5)):
        with pytest.raises(HostError, match="systemd cannot be asked") as caught:
            await call
        assert type(caught.value) is HostError
