from __future__ import annotations

import asyncio
import ctypes
import errno
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from driver_manager.errors import DeviceStuck
from driver_manager.host.calls import KernelCalls, in_child

pytestmark = pytest.mark.real_processes


def sleeping(seconds: float) -> int:
    """A call that takes its time."""
    time.sleep(seconds)
    return 0


async def test_a_call_that_works_gives_nothing() -> None:
    """A child that succeeds ends without an error."""
    await in_child(lambda: 0, "nothing()", "x", 5)


async def test_the_childs_errno_comes_back() -> None:
    """An errno set by the C library and one raised by Python both arrive, with the subject as file name."""
    rmdir = ctypes.CDLL(None, use_errno=True).rmdir

    def raising() -> int:
        raise OSError(errno.EXDEV, "no")

    calls: list[tuple[Callable[[], int], int]] = [(lambda: int(rmdir(b"/nope")), errno.ENOENT), (raising, errno.EXDEV)]
    for call, number in calls:
        with pytest.raises(OSError, match="subject") as caught:
            await in_child(call, "rmdir()", "subject", 5)
        assert caught.value.errno == number


async def test_a_call_that_hangs_is_given_up_at_its_limit() -> None:
    """The limit holds, other tasks go on meanwhile, and the child is gone where it can be killed."""
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.01)

    async with asyncio.TaskGroup() as group:
        ticking = group.create_task(tick())
        began = time.monotonic()
        with pytest.raises(DeviceStuck, match=r"umount2\(x\) has not come back in 0\.3 s; it was broken off"):
            await in_child(lambda: sleeping(60), "umount2(x)", "x", 0.3)
        assert time.monotonic() - began < 2
        ticking.cancel()
    assert ticks > 5


async def test_a_child_keeps_no_file_of_ours(tmp_path: Path) -> None:
    """A lock that we let go is free although a child from before is still in its call."""
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        task = asyncio.create_task(in_child(lambda: sleeping(1), "slow()", "x", 5))
        await asyncio.sleep(0.3)
    with (tmp_path / "lock").open() as again:
        fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    await task


async def test_a_call_costs_little() -> None:
    """A child per call is a matter of milliseconds."""
    began = time.monotonic()
    for _ in range(10):
        await in_child(lambda: 0, "nothing()", "x", 5)
    assert (time.monotonic() - began) / 10 < 0.1


async def test_the_kernel_refuses_what_is_not_there(tmp_path: Path) -> None:
    """Harmless real calls: a module nobody has, a folder that is no mount, a file that is not there."""
    calls = KernelCalls()
    with pytest.raises(OSError, match="no_such_module_at_all") as caught:
        await calls.delete_module("no_such_module_at_all", os.O_NONBLOCK, 5)
    assert caught.value.errno in (errno.ENOENT, errno.EPERM, errno.ENOSYS)
    with pytest.raises(OSError, match=str(tmp_path)) as caught:
        await calls.umount2(str(tmp_path), 8, 5)
    assert caught.value.errno in (errno.EINVAL, errno.EPERM)
    with pytest.raises(FileNotFoundError):
        await calls.unlink(str(tmp_path / "nope"), 5)
    with pytest.raises(FileNotFoundError):
        await calls.write(str(tmp_path / "nope"), "1", 5)


async def test_a_file_is_written_in_place(tmp_path: Path) -> None:
    """A write goes to a file that is there."""
    path = tmp_path / "bind"
    path.touch()
    await KernelCalls().write(str(path), "0000:3b:00.0", 5)
    assert path.read_text() == "0000:3b:00.0"


async def test_a_foreign_program_is_run_and_bounded() -> None:
    """Output and code come back; a missing program is None; a slow one is killed at its limit."""
    calls = KernelCalls()
    finished = await calls.run(["echo", "550.54.15"], 5)
    assert finished is not None
    assert (finished.code, finished.output) == (0, "550.54.15\n")
    assert await calls.run(["no-such-program-at-all"], 5) is None
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        await calls.run(["sleep", "60"], 0.2)
    assert time.monotonic() - began < 5
