"""The calls that change the host, as a small Protocol, and the kernel's own: typed wrappers that raise OSError with errno and path.

Calls that may hang for as long as a device or a virtual machine likes (delete_module, umount2, writes to sysfs) are made in a forked child
with a deadline. A thread would not do: a process does not end before a thread of it that is stuck in the kernel. The child makes the one
system call and leaves through `_exit` with the errno as its code; it holds none of our files, so a child that stays behind keeps neither
the node's lock nor our output open.
"""

import asyncio
import contextlib
import ctypes
import errno
import os
import signal
import subprocess
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, Protocol

from driver_manager.errors import DeviceStuck

O_NONBLOCK: Final = os.O_NONBLOCK
MNT_DETACH: Final = 2
UMOUNT_NOFOLLOW: Final = 8
_KILL_PATIENCE = 0.2
"""Seconds that a killed child gets to end before it counts as stuck."""
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

    async def delete_module(self, name: str, flags: int, timeout: float) -> None:
        """Unloads a module."""
        libc, argument = _libc(), name.encode()
        await in_child(lambda: libc.delete_module(argument, flags), f"delete_module({name})", name, timeout)

    async def umount2(self, path: str, flags: int, timeout: float) -> None:
        """Takes the top mount of a path away."""
        libc, argument = _libc(), os.fsencode(path)
        await in_child(lambda: libc.umount2(argument, flags), f"umount2({path})", path, timeout)

    async def unlink(self, path: str, timeout: float) -> None:
        """Removes a file; in /run, that is in memory, so it cannot hang."""
        Path(path).unlink()

    async def write(self, path: str, text: str, timeout: float) -> None:
        """Writes to a file of sysfs."""

        def write() -> int:
            descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            os.write(descriptor, text.encode())
            return 0

        await in_child(write, f"write({path})", path, timeout)

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


async def in_child(call: Callable[[], int], what: str, subject: str, timeout: float) -> None:
    """Makes one system call in a child and waits for it, at most `timeout` seconds.

    Args:
        call: gives 0, or -1 with the errno set as ctypes does, or raises OSError.
        what: the call as people read it.
        subject: path or name for the OSError.
        timeout: seconds.

    Raises:
        OSError: the call failed. DeviceStuck: it has not come back.
    """
    pid = fork(call)
    status = await ended(pid, timeout)
    if status is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        status = await ended(pid, _KILL_PATIENCE)
        fate = f"process {pid} is stuck in it and stays behind" if status is None else "it was broken off"
        raise DeviceStuck(
            f"{what} has not come back in {timeout:g} s; {fate}",
            hint="A user of the device, or the driver itself, holds it up: see /proc/PID/stack and dmesg. If it stays, reboot the node.",
            errno_name="ETIMEDOUT",
        )
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        raise OSError(errno.EINTR, f"ended by signal {-code}", subject)  # somebody killed the child
    if code > 0:
        raise OSError(code, os.strerror(code), subject)


def fork(call: Callable[[], int], keep: int = -1) -> int:
    """Starts a child that does one thing and ends with 0, or with the errno; gives its number.

    Args:
        call: as for `in_child`. It takes no lock that another thread may have held at this moment.
        keep: the one descriptor that stays open there.
    """
    with warnings.catch_warnings():
        # Python 3.12 warns that a child of a threaded process may deadlock; ours takes no lock, then _exit.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid
    code = 255
    try:
        null = os.open("/dev/null", os.O_RDWR)
        for descriptor in {0, 1, 2} - {keep}:
            os.dup2(null, descriptor)
        os.closerange(3, keep)
        os.closerange(max(3, keep + 1), 65536)
        code = 0 if call() == 0 else ctypes.get_errno()
    except OSError as error:
        code = error.errno or 255
    finally:
        os._exit(code)


async def ended(pid: int, timeout: float) -> int | None:
    """The wait status of a child; None if it lives on after `timeout` seconds."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:  # kernels before 5.3, and sandboxes
        descriptor = -1
    try:
        while True:
            done, status = os.waitpid(pid, os.WNOHANG)
            left = deadline - loop.time()
            if done:
                return status
            if left <= 0:
                return None
            if descriptor < 0:
                await asyncio.sleep(min(0.005, left))
            else:
                await readable(descriptor, left)
    finally:
        if descriptor >= 0:
            os.close(descriptor)


async def readable(descriptor: int, timeout: float) -> bool:
    """Waits until a descriptor can be read; False if that takes longer than `timeout` seconds."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        async with asyncio.timeout(timeout):
            await ready.wait()
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(descriptor)
    return True


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
            process.communicate(timeout=_KILL_PATIENCE)
        raise TimeoutError(f"{argv[0]} has not ended in {timeout:g} s") from None
    return Finished(process.returncode, output.decode(errors="replace"))
