from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import fcntl
import gc
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from driver_manager.errors import DeviceStuck
from driver_manager.host.caller import Caller
from driver_manager.host.calls import KernelCalls

pytestmark = pytest.mark.real_processes


def sleeping(seconds: float) -> int:
    """A call that takes its time."""
    time.sleep(seconds)
    return 0


def raising() -> int:
    raise OSError(errno.EXDEV, "no")


def dying() -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def append(path: str) -> int:
    """A call whose effect shows who made it."""
    with Path(path).open("a") as file:
        file.write(f"{os.getpid()}\n")
    return 0


rmdir = ctypes.CDLL(None, use_errno=True).rmdir
TABLE: dict[str, Callable[..., int]] = {"sleep": sleeping, "rmdir": rmdir, "raise": raising, "die": dying, "append": append}


@pytest.fixture(autouse=True)
def without_children() -> None:
    """Those of earlier tests end when their callers are collected, and an error that was caught may keep one."""
    gc.collect()
    assert psutil.Process().children() == []


async def make(caller: Caller, name: str, *arguments: str | bytes | int, timeout: float = 5) -> None:
    """One call."""
    await caller.call(name, *arguments, what=f"{name}(x)", subject="subject", timeout=timeout)


def makers(path: Path) -> list[int]:
    """The processes that made the calls to `append`."""
    return [int(line) for line in path.read_text().splitlines()]


async def test_one_child_makes_all_calls(tmp_path: Path) -> None:
    """It is none of ours, is made before the first call where there is time, and ends when nobody wants it any more."""
    path, caller = tmp_path / "pids", Caller(TABLE)
    caller.make_ready()
    (ready,) = psutil.Process().children()
    for _ in range(3):
        await make(caller, "append", str(path))
    assert makers(path) == [ready.pid] * 3
    del caller
    gc.collect()
    assert not ready.is_running()


async def test_the_childs_errno_comes_back() -> None:
    """An errno set by the C library and one raised by Python both arrive, with the subject as file name; the child goes on."""
    caller = Caller(TABLE)
    for name, arguments, number in (("rmdir", (b"/nope",), errno.ENOENT), ("raise", (), errno.EXDEV)):
        with pytest.raises(OSError, match="subject") as caught:
            await make(caller, name, *arguments)
        assert caught.value.errno == number
    assert len(psutil.Process().children()) == 1


async def test_a_call_that_hangs_is_given_up_at_its_limit(tmp_path: Path) -> None:
    """The limit holds, other tasks go on meanwhile, the child is gone where it can be killed, and the next call gets another one."""
    ticks, caller = 0, Caller(TABLE)

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.01)

    async with asyncio.TaskGroup() as group:
        ticking = group.create_task(tick())
        began = time.monotonic()
        with pytest.raises(DeviceStuck, match=r"sleep\(x\) has not come back in 0\.3 s; it was broken off"):
            await make(caller, "sleep", 60, timeout=0.3)
        assert time.monotonic() - began < 2
        ticking.cancel()
    assert ticks > 5
    assert psutil.Process().children() == []
    await make(caller, "append", str(tmp_path / "pids"))


async def test_a_child_that_is_killed_is_replaced(tmp_path: Path) -> None:
    """In the middle of a call that is an error, as nobody knows what came of it; before one it is nothing."""
    path, caller = tmp_path / "pids", Caller(TABLE)
    with pytest.raises(InterruptedError, match="subject"):
        await make(caller, "die")
    await make(caller, "append", str(path))
    psutil.Process(makers(path)[0]).kill()
    await asyncio.sleep(0.1)
    await make(caller, "append", str(path))
    assert len(set(makers(path))) == 2


async def test_two_free_descriptors_are_enough(tmp_path: Path) -> None:
    """A child needs none of those that its parent has used up."""
    path, caller = tmp_path / "pids", Caller(TABLE)
    lowest = os.open("/dev/null", os.O_RDONLY)
    os.close(lowest)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    kept = []
    with contextlib.suppress(OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 10, limits[1]))
        while True:
            kept.append(os.open("/dev/null", os.O_RDONLY))
    for descriptor in kept[-2:]:
        os.close(descriptor)
    try:
        await make(caller, "append", str(path))
    finally:
        for descriptor in kept[:-2]:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(makers(path)) == 1


async def test_calls_at_the_same_time_get_a_child_each(tmp_path: Path) -> None:
    """One that takes long holds up no other."""
    path, caller = tmp_path / "pids", Caller(TABLE)
    slow = asyncio.create_task(make(caller, "sleep", 1))
    await asyncio.sleep(0.1)
    await make(caller, "append", str(path))
    assert not slow.done()
    await slow


async def test_a_child_keeps_no_file_of_ours(tmp_path: Path) -> None:
    """A lock that we let go is free although a child from before is still in its call."""
    caller = Caller(TABLE)
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        task = asyncio.create_task(make(caller, "sleep", 1))
        await asyncio.sleep(0.3)
    with (tmp_path / "lock").open() as again:
        fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    await task


@pytest.mark.parametrize("module", ["main", "vfio"])
def test_whoever_starts_us_ignores_the_end_of_children(module: str) -> None:
    """SIGCHLD comes ignored from some shells and supervisors; then a child that hangs could not be told from one that was never there."""
    code = (
        f"import signal, driver_manager.cli.{module} as cli\n"
        "cli.run = lambda words: int(signal.getsignal(signal.SIGCHLD) is not signal.SIG_DFL)\n"
        "cli.main()"
    )
    ignoring = f"import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.executable, ['py', '-c', {code!r}])"
    assert subprocess.run([sys.executable, "-c", ignoring], check=False, timeout=60).returncode == 0


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
