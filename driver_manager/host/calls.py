"""The calls that change the host, as a small Protocol, and the kernel's own: typed wrappers that raise OSError with errno and path.

What may hang in the kernel is made in a child with a deadline (`caller`).
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, Protocol

from driver_manager.host.caller import Caller
from driver_manager.host.waiting import KILL_PATIENCE

O_NONBLOCK: Final = os.O_NONBLOCK
MNT_DETACH: Final = 2
UMOUNT_NOFOLLOW: Final = 8
_FOREIGN_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/opt/bin:/busybox"


@dataclass(frozen=True, slots=True)
class Finished:
    """A foreign command that has ended."""

    code: int
    output: str


class Calls(Protocol):
    """What changes the host, each method named as its system call. Paths are the host's own; `timeout` is in seconds.

    All raise OSError when the call is refused, and DeviceStuck when it does not come back in time.
    """

    def make_ready(self) -> None:
        """Does now what the next call would otherwise have to begin with."""
        ...

    async def delete_module(self, name: str, flags: int, timeout: float) -> None:
        """Unloads a module."""
        ...

    async def umount2(self, path: str, flags: int, timeout: float) -> None:
        """Takes the top mount of a path away."""
        ...

    async def unlink(self, path: str, timeout: float) -> None:
        """Removes a file."""
        ...

    async def write(self, path: str, text: str, timeout: float) -> None:
        """Writes to an existing file of sysfs, in one piece."""
        ...

    async def kill(self, pid: int, number: int) -> None:
        """Sends a signal."""
        ...

    async def run(self, argv: Sequence[str], timeout: float) -> Finished | None:
        """Runs a foreign command; None where there is no such program.

        Raises:
            TimeoutError: it took longer than `timeout` and was killed.
        """
        ...


class KernelCalls:
    """The calls of the machine this runs on."""

    def __init__(self) -> None:
        self._caller = Caller({"delete_module": _delete_module, "umount2": _umount2, "write": _write})

    def make_ready(self) -> None:
        """Makes the child for the next call."""
        _libc()
        self._caller.make_ready()

    async def delete_module(self, name: str, flags: int, timeout: float) -> None:
        """Unloads a module."""
        _libc()  # loaded here, as a child must not load libraries
        await self._caller.call("delete_module", name.encode(), flags, what=f"delete_module({name})", subject=name, timeout=timeout)

    async def umount2(self, path: str, flags: int, timeout: float) -> None:
        """Takes the top mount of a path away."""
        _libc()
        await self._caller.call("umount2", os.fsencode(path), flags, what=f"umount2({path})", subject=path, timeout=timeout)

    async def unlink(self, path: str, timeout: float) -> None:
        """Removes a file; in /run, that is in memory, so it cannot hang."""
        Path(path).unlink()

    async def write(self, path: str, text: str, timeout: float) -> None:
        """Writes to a file of sysfs."""
        _libc()
        await self._caller.call("write", path, text.encode(), what=f"write({path})", subject=path, timeout=timeout)

    async def kill(self, pid: int, number: int) -> None:
        """Sends a signal."""
        os.kill(pid, number)

    async def run(self, argv: Sequence[str], timeout: float) -> Finished | None:
        """Runs a program in a session of its own and kills that session when time is up."""
        return await asyncio.to_thread(_run, argv, timeout)


@cache
def _libc() -> Any:
    """The C library: Debian's and Alpine's both have these two calls."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.delete_module.argtypes = (ctypes.c_char_p, ctypes.c_uint)
    libc.umount2.argtypes = (ctypes.c_char_p, ctypes.c_int)
    return libc


def _delete_module(name: bytes, flags: int) -> int:
    return int(_libc().delete_module(name, flags))


def _umount2(path: bytes, flags: int) -> int:
    return int(_libc().umount2(path, flags))


def _write(path: str, text: bytes) -> int:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text)
    finally:
        os.close(descriptor)
    return 0


def _run(argv: Sequence[str], timeout: float) -> Finished | None:
    environment = {"PATH": f"{_FOREIGN_PATH}:{os.environ.get('PATH', '')}", "LC_ALL": "C", "SYSTEMD_IGNORE_CHROOT": "1"}
    try:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=KILL_PATIENCE)
        raise TimeoutError(f"{argv[0]} has not ended in {timeout:g} s") from None
    return Finished(process.returncode, output.decode(errors="replace"))
