"""Who has the device: all ways to hold it that the kernel knows, and what a scan makes of each."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from driver_manager.core.modules import used_modules
from driver_manager.core.snapshot import Holder
from driver_manager.errors import LockHeld
from tests.vm.guest import in_guest
from tests.vm.inside import (
    CAP_SYS_ADMIN,
    CAP_SYS_PTRACE,
    CLONE_NEWNS,
    CLONE_NEWPID,
    DRIVER,
    MS_PRIVATE,
    answer,
    child,
    delete,
    end,
    here,
    holding,
    libc,
    load,
    loaded,
    mapped,
    mount,
    node,
    opened,
    propagate,
    without_capabilities,
    write,
)

CAP_CHECKPOINT_RESTORE = 40
UID = "3f1c2f6e-8a3b-4a55-9a3c-0d6d3c1a9f10"


async def holders() -> dict[int, Holder]:
    """What a scan finds, by process; nothing may have been out of its sight."""
    scan = await here().holders()
    assert scan.unreadable == ()
    return {holder.pid: holder for holder in scan.holders}


async def goes_soon(name: str) -> None:
    """A module that nobody uses any more: the kernel may take a moment to close the last descriptor."""
    async with asyncio.timeout(20):
        while (got := delete(name)) == "EAGAIN":
            await asyncio.sleep(0.02)
    assert got == 0


@in_guest
async def test_who_has_a_device_open_is_named() -> None:
    """With process, command and device, and only those; while they hold it nothing goes."""
    load(*DRIVER)
    with holding(opened()) as one, holding(opened("/dev/nvidia-uvm")) as two, holding(lambda: os.open("/dev/null", os.O_RDONLY)):
        found = await holders()
        assert {pid: holder.devices for pid, holder in found.items()} == {one: ("/dev/nvidia0",), two: ("/dev/nvidia-uvm",)}
        assert found[one].command == Path("/proc/self/comm").read_text().strip()
        assert used_modules((await here().look()).modules, list((await here().look()).modules)) == ("nvidia", "nvidia_uvm")
        assert len(loaded()) == 4
    assert await holders() == {}


@in_guest
async def test_a_mapping_without_a_descriptor_is_found() -> None:
    """It holds the module and shows in the maps alone, also when its node has gone."""
    load("nvidia")
    with holding(mapped()) as pid:
        links = [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()]
        assert not [link for link in links if "nvidia" in link]
        assert delete("nvidia") == "EAGAIN"
        assert (await holders())[pid].devices == ("/dev/nvidia0",)
        Path("/dev/nvidia0").unlink()
        assert (await holders())[pid].devices == ("/dev/nvidia0",)
    assert delete("nvidia") == 0


@in_guest
async def test_a_descriptor_in_flight_is_use_without_a_holder() -> None:
    """On its way through a socket a descriptor shows nowhere, even when its sender is dead; the module's use count alone knows."""
    load("nvidia")
    sending, receiving = socket.socketpair()

    def send() -> None:
        descriptor = os.open("/dev/nvidia0", os.O_RDWR)
        socket.send_fds(sending, [b"x"], [descriptor])
        os.close(descriptor)

    with holding(send):
        assert await holders() == {}
        assert used_modules((await here().look()).modules, ["nvidia"]) == ("nvidia",)
    assert delete("nvidia") == "EAGAIN"
    sending.close()
    receiving.close()
    await goes_soon("nvidia")


@in_guest
async def test_a_node_is_known_by_its_number() -> None:
    """Renamed, unlinked after the open, or made elsewhere under another name: the number tells."""
    load("nvidia")
    with holding(opened()) as renamed, holding(opened(node("/tmp/gpu"))) as elsewhere:
        Path("/dev/nvidia0").rename("/dev/x")
        assert set(await holders()) == {renamed, elsewhere}
        Path("/dev/x").unlink()
        Path("/tmp/gpu").unlink()
        assert set(await holders()) == {renamed, elsewhere}


@in_guest
async def test_a_holder_in_other_namespaces_is_found() -> None:
    """A container's process shows under the host's number for it."""
    load("nvidia")

    def contained() -> None:
        assert answer(libc.unshare(CLONE_NEWNS | CLONE_NEWPID)) == 0
        reading, writing = os.pipe()
        if os.fork():
            os.read(reading, 1)
            return
        propagate("/", MS_PRIVATE)
        mount("tmpfs", "/dev", "tmpfs")
        descriptor = os.open(node("/dev/nvidia0"), os.O_RDWR)
        Path("/dev/nvidia0").unlink()
        os.write(writing, b".")
        while descriptor:
            signal.pause()

    with holding(contained) as parent:
        ((pid, holder),) = (await holders()).items()
        assert pid not in (1, parent)
        assert holder.devices == ("/dev/nvidia0",)
        os.kill(pid, signal.SIGKILL)
    await goes_soon("nvidia")


@in_guest
async def test_the_pod_or_unit_of_a_holder_is_named() -> None:
    """From real cgroups, in both layouts of pods and for a service."""
    load("nvidia")
    root = Path("/sys/fs/cgroup")
    pod = f"kubepods-burstable-pod{UID.replace('-', '_')}.slice"
    for path, expected in (
        (f"kubepods.slice/kubepods-burstable.slice/{pod}/cri-containerd-{'b' * 64}.scope", (UID, None)),
        (f"kubepods/besteffort/pod{UID}/{'b' * 64}", (UID, None)),
        ("system.slice/nvidia-persistenced.service", (None, "nvidia-persistenced.service")),
    ):
        (root / path).mkdir(parents=True)

        def hold(path: str = path) -> int:
            assert write(f"{root}/{path}/cgroup.procs", str(os.getpid())) == 0
            return opened()()

        with holding(hold) as pid:
            found = (await holders())[pid]
            assert (found.pod_uid, found.unit) == expected, path


async def seen_without(*dropped: int, work: Callable[[], Any]) -> tuple[bool, bool]:
    """Whether a scan with fewer capabilities finds a holder, and whether it says that it could not look."""
    load("nvidia")
    with holding(work) as pid:
        without_capabilities(*dropped)
        scan = await here().holders()
        return pid in [holder.pid for holder in scan.holders], pid in scan.unreadable


@in_guest
async def test_without_ptrace_a_scan_says_that_it_could_not_look() -> None:
    """The kernel refuses to show descriptors; that never reads as nobody."""
    assert await seen_without(CAP_SYS_PTRACE, work=opened()) == (False, True)


@in_guest
async def test_without_ptrace_a_mapping_is_not_nobody() -> None:
    """The same for mappings."""
    assert await seen_without(CAP_SYS_PTRACE, work=mapped()) == (False, True)


@in_guest
async def test_with_ptrace_alone_a_descriptor_is_found() -> None:
    """The right to trace is enough for descriptors."""
    assert await seen_without(CAP_SYS_ADMIN, CAP_CHECKPOINT_RESTORE, work=opened()) == (True, False)


@in_guest
async def test_with_ptrace_alone_a_mapping_is_found_by_its_name() -> None:
    """Its number may not be looked up then, but its line names the device."""
    assert await seen_without(CAP_SYS_ADMIN, CAP_CHECKPOINT_RESTORE, work=mapped()) == (True, False)


@in_guest
async def test_with_ptrace_alone_an_unknown_mapping_is_not_nobody() -> None:
    """A mapping of a node of another name, whose number may not be looked up, is told as not seen."""
    load("nvidia")
    path = node("/dev/other")
    with holding(mapped(path)) as pid:
        without_capabilities(CAP_SYS_ADMIN, CAP_CHECKPOINT_RESTORE)
        scan = await here().holders()
        assert (scan.holders, pid in scan.unreadable) == ((), True)


@in_guest
async def test_the_end_of_a_holder_is_heard() -> None:
    """No poll: the wait ends with the process."""
    load("nvidia")
    pid = child(opened())
    asyncio.get_running_loop().call_later(0.5, end, pid)
    begun = time.monotonic()
    await here().wait_for_change([pid], 20)
    assert 0.3 < time.monotonic() - begun < 10
    assert delete("nvidia") == 0


def hold_the_lock() -> Any:
    """Takes the node's lock for good, in an event loop of its own."""
    asyncio.events._set_running_loop(None)  # that of the parent, which was copied with it
    loop = asyncio.new_event_loop()
    lock = here().lock(5)
    loop.run_until_complete(lock.__aenter__())
    return lock, loop


@in_guest
async def test_a_killed_run_frees_the_lock() -> None:
    """The node's lock is held while its process lives, names it, and ends with it, however that ends."""
    pid = child(hold_the_lock)
    holder = ""
    try:
        async with here().lock(0.3):
            pass
    except LockHeld as error:
        holder = error.message
    assert f"pid {pid}" in holder
    end(pid)
    async with here().lock(0.3):
        pass
