"""The node's lock: one run at a time changes a node. It is an flock, so any end of the process frees it, SIGKILL included."""

import contextlib
import errno
import fcntl
import logging
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path

from driver_manager.errors import HostError, LockHeld
from driver_manager.ports import Clock

logger = logging.getLogger(__name__)

_LOOK_EVERY = 0.2
_TELL_EVERY = 30.0


@contextlib.asynccontextmanager
async def held(path: Path, timeout: float, clock: Clock) -> AsyncIterator[None]:
    """Holds the lock file for as long as the block lasts.

    Raises:
        LockHeld: another process had it for `timeout` seconds (0: without limit). HostError: the file cannot be made.
    """
    descriptor = await _take(path, timeout, clock)
    try:
        with contextlib.suppress(OSError):  # the name is for people; a full /run must not stop a run
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"pid {os.getpid()} since {clock.wall()}\n".encode(), 0)
        yield
    finally:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # by name: a forked child may still have the descriptor
        os.close(descriptor)


async def _take(path: Path, timeout: float, clock: Clock) -> int:
    began, told = clock.now(), float("-inf")
    while True:
        descriptor = _open(path)
        try:
            if _lock(descriptor) and _is_still(path, descriptor):
                taken, descriptor = descriptor, -1
                return taken
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        now = clock.now()
        if timeout and now - began >= timeout:
            raise LockHeld(
                f"another run works on this node: {_holder(path)} holds {path}",
                hint="Wait for it to end. It is freed when that process ends, however it ends.",
                errno_name="EWOULDBLOCK",
            )
        if now - told >= _TELL_EVERY:
            told = now
            logger.info("waiting", extra={"reason": "another-run", "for": f"another run works on this node: {_holder(path)}"})
        await clock.sleep(min(_LOOK_EVERY, began + timeout - now) if timeout else _LOOK_EVERY)


def _open(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no ordinary file")
    except OSError as error:
        raise HostError(
            f"the lock file {path} cannot be opened: {error.strerror}",
            hint="Run as root, with the host's /run/nvidia mounted writable.",
        ) from error


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_still(path: Path, descriptor: int) -> bool:
    """Whether the file that we locked is the one that others will find."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except OSError:
        return False


def _holder(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip() or "a process"
    except OSError:
        return "a process"


def is_locked(descriptor: int) -> bool:
    """Whether another process holds an flock on an open file; if not, we hold it from now on."""
    return not _lock(descriptor)
