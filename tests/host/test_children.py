from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest

from driver_manager.host.children import in_children

pytestmark = pytest.mark.real_processes


def pair(number: int, size: int) -> tuple[int, str]:
    return number, "x" * size


def ours() -> list[int]:
    """Children of this process, those that nobody asked for their end among them."""
    return [process.pid for process in psutil.Process().children()]


async def test_values_come_back_in_order() -> None:
    """Each child's value arrives whole, larger than a pipe too, and strange names with it."""
    before = ours()
    sizes = [3, 1_000_000, 0, 200_000]
    values = await in_children([partial(pair, number, size) for number, size in enumerate(sizes)], 20)
    assert values == [pair(number, size) for number, size in enumerate(sizes)]
    assert await in_children([lambda: os.fsdecode(b"/dev/\xff")], 20) == [os.fsdecode(b"/dev/\xff")]
    assert ours() == before


async def test_children_work_at_the_same_time(tmp_path: Path) -> None:
    """Each of two opens a FIFO that only the other one's opening lets it open."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    def meet(mode: str) -> str:
        with fifo.open(mode):
            return mode

    assert await in_children([partial(meet, "r"), partial(meet, "w")], 20) == ["r", "w"]


async def test_a_work_that_fails_gives_its_errno() -> None:
    """The OSError of a work comes back as that; any other error, and a child's sudden death, as a child that is no more."""

    def raising(error: Exception) -> None:
        raise error

    def dying() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    before = ours()
    works: list[tuple[Callable[[], None], int]] = [
        (partial(raising, OSError(errno.EXDEV, "no")), errno.EXDEV),
        (partial(raising, ValueError("no")), errno.ECHILD),
        (dying, errno.ECHILD),
    ]
    for work, number in works:
        three: list[Callable[[], None]] = [partial(time.sleep, 0), work, partial(time.sleep, 60)]
        with pytest.raises(OSError, match="instead of a value") as caught:
            await in_children(three, 20)
        assert caught.value.errno == number
    assert ours() == before


async def test_what_hangs_is_killed_at_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is for all together; nothing stays behind, and no file of ours was kept meanwhile; a stop is the same."""
    monkeypatch.setattr("driver_manager.host.children.KILL_PATIENCE", 20.0)  # a busy machine is slow to end what is killed
    before = ours()
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        task = asyncio.create_task(in_children([partial(time.sleep, 60)] * 2, 2.0))
        await asyncio.sleep(0.2)
        assert len(ours()) == len(before) + 2
    with (tmp_path / "lock").open() as again:
        while not task.done():  # until the children have had their turn to close it
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            await asyncio.sleep(0.02)
        assert not task.done(), "the lock was kept as long as the children lived"
    with pytest.raises(TimeoutError):
        await task
    assert ours() == before
    task = asyncio.create_task(in_children([partial(time.sleep, 60)], 60))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ours() == before


async def test_no_descriptor_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many are open as before, also where no child is to be had."""
    count = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - only their number
    await in_children([partial(pair, 1, 2)] * 3, 20)

    def refused() -> int:
        raise BlockingIOError(errno.EAGAIN, "no")

    monkeypatch.setattr(os, "fork", refused)
    with pytest.raises(BlockingIOError):
        await in_children([partial(pair, 1, 2)] * 3, 20)
    assert len(os.listdir("/proc/self/fd")) == count  # noqa: PTH208 - only their number
