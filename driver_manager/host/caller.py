"""Calls that may hang for as long as a device or a virtual machine likes (delete_module, umount2, writes to sysfs), each with a deadline.

They are made in a forked child. A thread would not do: a process does not end before a thread of it that is stuck in the kernel. One child
makes one call after the other, since making a child takes as long as most of these calls do; it is made before it is needed where there is
time for that. A child that does not come back in time is killed, or left behind where it cannot be, and the next call gets a new one. A
child holds none of our files, so one that stays behind keeps neither the node's lock nor our output open; and it ends when we do.
"""

import contextlib
import ctypes
import errno
import marshal
import os
import signal
import socket
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final

from driver_manager.errors import DeviceStuck
from driver_manager.host.waiting import KILL_PATIENCE, ended, readable

_LONGEST: Final = 1 << 16


class Caller:
    """Makes calls in children.

    Args:
        table: what can be called, by name: each gives 0, or -1 with the errno set as ctypes does, or raises OSError. It takes no lock that
            another thread may have held when the child was made, so it must not import or log.
    """

    def __init__(self, table: Mapping[str, Callable[..., int]]) -> None:
        self._table = table
        self._idle: list[_Child] = []

    def make_ready(self) -> None:
        """Has a child wait for the next call."""
        if not self._idle:
            with contextlib.suppress(OSError):
                self._idle.append(_Child(self._table))

    async def call(self, name: str, *arguments: str | bytes | int, what: str, subject: str, timeout: float) -> None:
        """Makes one call and waits for it, at most `timeout` seconds.

        Args:
            name: in the table.
            arguments: of the call.
            what: the call as people read it.
            subject: path or name for the OSError.
            timeout: seconds.

        Raises:
            OSError: the call failed, or no child is to be had. DeviceStuck: it has not come back.
        """
        child = self._send(marshal.dumps((name, arguments)))
        if not await readable(child.line, timeout):
            await child.give_up(what, timeout)
        if not (answer := child.answer()):
            raise OSError(errno.EINTR, f"the child that made the call has ended: {await child.fate()}", subject)  # somebody killed it
        child.rest()
        self._idle.append(child)
        if (code := int(answer)) != 0:
            raise OSError(code, os.strerror(code), subject)

    def _send(self, request: bytes) -> "_Child":
        """Gives a request to a child that waits, or to a new one."""
        while self._idle:
            child = self._idle.pop()
            with contextlib.suppress(OSError):  # it was killed while it waited
                child.send(request)
                return child
        child = _Child(self._table)
        child.send(request)
        return child


class _Child:
    """A child, and the line to it."""

    def __init__(self, table: Mapping[str, Callable[..., int]]) -> None:
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            try:
                self._pid = fork(lambda: _serve(table, its.fileno()), keep=its.fileno())
            except OSError:
                ours.close()
                raise
        self.line = ours.detach()
        self.rest()

    def rest(self) -> None:
        """It has nothing to do: when nobody knows it any more it ends."""
        self._end = weakref.finalize(self, _end, self.line, self._pid)

    def send(self, request: bytes) -> None:
        """Gives it a call to make, which is not broken off where nobody waits for it any more.

        Raises:
            OSError: it has ended; it was never asked.
        """
        os.write(self.line, request)
        self._end.detach()

    def answer(self) -> bytes:
        """What it said; nothing if it has ended."""
        with contextlib.suppress(OSError):
            return os.read(self.line, _LONGEST)
        return b""

    async def fate(self) -> str:
        """How a child that was to go on has ended."""
        status = await self._ended()
        return "nobody knows how" if status is None else f"exit code {os.waitstatus_to_exitcode(status)}"

    async def give_up(self, what: str, timeout: float) -> None:
        """Kills it, and tells what became of it.

        Raises:
            DeviceStuck: always.
        """
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        status = await self._ended()
        fate = f"process {self._pid} is stuck in it and stays behind" if status is None else "it was broken off"
        raise DeviceStuck(
            f"{what} has not come back in {timeout:g} s; {fate}",
            hint="A user of the device, or the driver itself, holds it up: see /proc/PID/stack and dmesg. If it stays, reboot the node.",
            errno_name="ETIMEDOUT",
        )

    async def _ended(self) -> int | None:
        """Its wait status, and no end to make any more; None if it lives on."""
        os.close(self.line)
        return await ended(self._pid, KILL_PATIENCE)


def _end(line: int, pid: int) -> None:
    """Ends a child that has nothing to do."""
    os.close(line)
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _serve(table: Mapping[str, Callable[..., int]], line: int) -> int:
    """The life of a child: call after call, until nobody is there to ask for one."""
    while request := os.read(line, _LONGEST):
        name, arguments = marshal.loads(request)
        os.write(line, b"%d" % _errno_of(table[name], arguments))
    return 0


def _errno_of(call: Callable[..., int], arguments: tuple[Any, ...]) -> int:
    try:
        return 0 if call(*arguments) == 0 else ctypes.get_errno()
    except OSError as error:
        return error.errno or 255


def fork(work: Callable[[], int], keep: int) -> int:
    """Starts a child that does some work and ends with what it gives, or with the errno of its OSError; gives its number.

    Args:
        work: takes no lock that another thread may have held at this moment.
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
        os.closerange(3, keep)
        os.closerange(max(3, keep + 1), 65536)
        null = os.open("/dev/null", os.O_RDWR)  # only now is there sure to be a free descriptor
        for descriptor in {0, 1, 2} - {keep}:
            os.dup2(null, descriptor)
        code = work()
    except OSError as error:
        code = error.errno or 255
    finally:
        os._exit(code)
