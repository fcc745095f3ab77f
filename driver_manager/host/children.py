"""Work divided between forked children that each give a value back.

Threads would gain little where the work is many system calls of a microsecond each: they would hand Python's lock to and fro for every one.
And a child that waits for a lock of another process can be killed. The work runs in a copy of a program that may have other threads, whose
locks nobody will ever give back there: it may read files and compute, but not log, import, start threads or load libraries.
"""

import asyncio
import contextlib
import errno
import gc
import os
import pickle
import select
import signal
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

from driver_manager.host.caller import fork
from driver_manager.host.waiting import KILL_PATIENCE, ended, readable

T = TypeVar("T")

_LONG: Final = 3600.0
"""Seconds: no limit, where another one holds."""
_CHUNK: Final = 1 << 16


async def in_children(works: Sequence[Callable[[], T]], timeout: float) -> list[T]:
    """Does each work in a child of its own, all at the same time, and gives the values in the order of the works.

    Raises:
        TimeoutError: they took longer than `timeout` seconds together, and were killed. OSError: there are no more children to be had, or
            one ended without a value: of the work's own OSError, or killed by somebody.
    """
    children: list[_Child[T]] = []
    try:
        for work in works:
            children.append(_Child(work))
        async with asyncio.timeout(timeout):
            return [await child.value() for child in children]
    finally:
        for child in children:
            child.kill()
        for child in children:
            await child.end(KILL_PATIENCE)


def text_in_child(path: str, timeout: float) -> str:
    """What a file says, read in a child, for files whose reading may wait in the kernel for as long as a device likes.

    Raises:
        TimeoutError: nothing came in `timeout` seconds; the child is left if it cannot be killed. OSError: it cannot be read.
    """
    reading, writing = os.pipe()
    try:
        pid = fork(lambda: _copy(path, writing), keep=writing)
        os.close(writing)
        ready, _, _ = select.select([reading], [], [], timeout)
        if not ready:
            os.kill(pid, signal.SIGKILL)
            raise TimeoutError(f"reading {path} has not ended in {timeout:g} s")
        text = os.read(reading, _CHUNK)
        if code := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
            raise OSError(code if code > 0 else errno.ECHILD, "it cannot be read", path)
        return text.decode(errors="surrogateescape")
    finally:
        os.close(reading)


def _copy(path: str, writing: int) -> int:
    os.write(writing, os.read(os.open(path, os.O_RDONLY | os.O_CLOEXEC), _CHUNK))
    return 0


class _Child(Generic[T]):
    """A child at work."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._reading, writing = os.pipe()
        try:
            self._pid = fork(lambda: _tell(work, writing), keep=writing)
        except OSError:
            os.close(self._reading)
            raise
        finally:
            os.close(writing)
        self._status: int | None = None

    async def value(self) -> T:
        """What the work gave; waits for it as long as it takes."""
        said = bytearray()
        while await readable(self._reading, _LONG) and (chunk := os.read(self._reading, _CHUNK)):
            said += chunk
        code = os.waitstatus_to_exitcode(await self.end(_LONG) or 0)
        if code != 0:
            raise OSError(code if 0 < code < 255 else errno.ECHILD, f"a child of this program ended with {code} instead of a value")
        value: T = pickle.loads(said)
        return value

    def kill(self) -> None:
        """Breaks the work off if it has not ended, and listens no more."""
        os.close(self._reading)
        if self._status is None:  # so the number is still its own
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)

    async def end(self, timeout: float) -> int | None:
        """The wait status; None if it lives on after `timeout` seconds."""
        if self._status is None:
            self._status = await ended(self._pid, timeout)
        return self._status


def _tell(work: Callable[[], object], writing: int) -> int:
    gc.disable()  # it would write to every page that is shared with the parent
    rest = memoryview(pickle.dumps(work()))
    while rest:
        rest = rest[os.write(writing, rest) :]
    return 0
