"""The Host port on Linux, or on a directory tree laid out like one.

All reading goes through explicit roots (`paths`), all changing through `Calls`; what is left here is the order of things and what an answer
means. Nothing that was seen is kept between calls, but the number of the kernel's last event.
"""

import asyncio
import contextlib
import errno
import mmap
import os
import re
import select
import signal
import struct
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from driver_manager import names
from driver_manager.core.snapshot import HolderScan, HostView, ModuleState, ModuleView, MountCopy, MountView
from driver_manager.errors import DeviceStuck, HostError, InvariantBroken
from driver_manager.host import lock as node_lock
from driver_manager.host.calls import MNT_DETACH, O_NONBLOCK, UMOUNT_NOFOLLOW, Calls, KernelCalls
from driver_manager.host.children import in_children
from driver_manager.host.copies import copies_of
from driver_manager.host.errnos import error_of
from driver_manager.host.look import look, module_view, mounts, own_pid, unloading_disabled
from driver_manager.host.parsing import is_at_or_below
from driver_manager.host.paths import Roots, machine_roots, tree_roots
from driver_manager.host.scan import Probe, gpu_probe, others, scan, users_below
from driver_manager.host.services import Services
from driver_manager.host.threads import in_thread
from driver_manager.host.tree import TreeCalls
from driver_manager.host.uevents import next_event, sequence_number
from driver_manager.host.vfio import Vfio, module_root
from driver_manager.host.waiting import readable
from driver_manager.ports import Clock

T = TypeVar("T")

READ_SECONDS: Final = 60.0
"""Limit of a look; it takes milliseconds, or a second or two with thousands of processes."""
LISTEN_AFTER: Final = 0.5
"""Seconds into a wait after which it listens to the kernel's events: those that end sooner need not pay for it."""
QUICK_SECONDS: Final = 10.0
"""Limit of calls that only touch memory."""
_VERSION = re.compile(r"\d+(?:\.\d+)+")
_NVIDIA_SMI = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
_MOST_NAMED = 5
_MOST_CHILDREN = 4
"""That look for holders; one for each core up to these, since the other cores are the workloads'."""
MANY_PROCESSES: Final = 100
"""From so many on children are worth the making; each costs as much as a look at some twenty processes."""
_PID = struct.Struct("q")


def open_host(tree: Path | None, clock: Clock) -> "LinuxHost":
    """The machine this runs on, or a directory tree in its place.

    Raises:
        ConfigError: the tree is no folder.
    """
    if tree is None:
        return LinuxHost(machine_roots(), KernelCalls(), clock)
    roots = tree_roots(tree)
    return LinuxHost(roots, TreeCalls(roots.host), clock)


def open_vfio(tree: Path | None, clock: Clock, *, host_root: str, timeout: float) -> "tuple[LinuxHost, Vfio, str]":
    """What moves PCI functions on the machine this runs on, or on a directory tree, with its host and a warning, if any.

    Args:
        tree: the tree, if it is one.
        clock: time for waits.
        host_root: the root in which modprobe is to run; the host's own where it is empty or not there.
        timeout: seconds for one write.
    """
    roots, calls = (machine_roots(), KernelCalls()) if tree is None else (tree_roots(tree), TreeCalls(tree_roots(tree).host))
    host = LinuxHost(roots, calls, clock)
    root, warning = module_root(roots, host_root)
    return host, Vfio(roots, calls, host.holders, module_root=root, timeout=timeout), warning


class LinuxHost:
    """A host whose state is in files.

    Args:
        roots: where they are.
        calls: what changes it.
        clock: time for waits.
    """

    def __init__(self, roots: Roots, calls: Calls, clock: Clock) -> None:
        self._roots = roots
        self._calls = calls
        self._clock = clock
        self._services = Services(calls, self._into_host())
        self._sequence: int | None = None

    async def look(self) -> HostView:
        """Reads modules, mounts, files and PCI devices."""
        if not self._roots.is_tree:
            self._sequence = sequence_number(self._roots.sys)
        return await self._read(lambda: look(self._roots), lambda: "the look at the host's files")

    async def holders(self) -> HolderScan:
        """Finds the processes that have a GPU device open or mapped."""
        probe, pids = await self._read(lambda: (gpu_probe(self._roots), others(self._roots)), lambda: "the look at the GPUs' devices")
        count = min(_MOST_CHILDREN, len(os.sched_getaffinity(0)))
        if not self._roots.is_tree and count > 1 and len(pids) >= MANY_PROCESSES:
            with contextlib.suppress(OSError):  # no child is to be had, or one was killed: then all of it here
                return await self._holders_divided(probe, pids, count)
        at: list[int] = []
        return await self._read(lambda: scan(self._roots, probe, at.append, pids), lambda: _look_at(at[-1:]))

    async def _holders_divided(self, probe: Probe, pids: list[int], count: int) -> HolderScan:
        """The same by a child for each core, since nearly all of the work is the kernel's, for one process after the other.

        Raises:
            OSError: a child could not be made, or ended early.
        """
        with mmap.mmap(-1, count * _PID.size) as at:  # shared: where each child is; 0 at its end

            def share(number: int) -> HolderScan:
                def mark(pid: int) -> None:
                    _PID.pack_into(at, number * _PID.size, pid)

                found = scan(self._roots, probe, mark, pids[number::count])
                mark(0)
                return found

            try:
                parts = await in_children([partial(share, number) for number in range(count)], READ_SECONDS)
            except TimeoutError as error:
                raise _stuck(_look_at([pid for (pid,) in _PID.iter_unpack(at[:]) if pid])) from error
        return HolderScan(
            tuple(sorted((holder for part in parts for holder in part.holders), key=lambda holder: holder.pid)),
            tuple(sorted(pid for part in parts for pid in part.unreadable)),
            tuple(sorted((holder for part in parts for holder in part.by_device_alone), key=lambda holder: holder.pid)),
        )

    async def _read(self, work: Callable[[], T], what: Callable[[], str]) -> T:
        """Reads in a thread, within a limit far above what it takes: some files of /proc wait for a lock of their process."""
        try:
            return await in_thread(work, "look", READ_SECONDS)
        except TimeoutError as error:
            raise _stuck(what()) from error
        except OSError as error:
            raise _unreadable(error) from error

    async def host_driver_version(self, timeout: float) -> str | None:
        """What the host's own nvidia-smi says, run in the host's root."""
        argv = (*self._into_host(), *_NVIDIA_SMI)
        try:
            finished = await self._calls.run(argv, timeout)
        except (TimeoutError, OSError):
            return None
        if finished is None or finished.code != 0:
            return None
        first = finished.output.strip().partition("\n")[0].strip()
        return first if _VERSION.fullmatch(first) else None

    def _into_host(self) -> tuple[str, ...]:
        """The words that run a command in the host's root."""
        is_inside = self._roots.is_tree or self._roots.host == Path("/")
        return () if is_inside else ("chroot", str(self._roots.host))

    def lock(self, timeout: float) -> AbstractAsyncContextManager[None]:
        """Holds the node's lock."""
        return node_lock.held(self._roots.own / names.LOCK_FILE, timeout, self._clock)

    # Changes ---------------------------------------------------------------------------------------------------------

    async def unload_module(self, name: str, timeout: float) -> None:
        """Unloads one module; already gone is fine."""
        name = name.replace("-", "_")
        try:
            await self._calls.delete_module(name, O_NONBLOCK, timeout)
        except OSError as error:
            if error.errno == errno.ENOENT:
                return
            raise self._module_error(name, error) from error

    def _module_error(self, name: str, error: OSError) -> HostError:
        """What the kernel's refusal means, with what sysfs says about the module now."""
        number = error.errno or 0
        module = module_view(self._roots, name)
        if number == errno.EPERM:
            return error_of("delete_module", number, name, state="disabled" if unloading_disabled(self._roots) else "")
        if number == errno.EBUSY and module is not None and module.state is not ModuleState.LIVE:
            return error_of("delete_module", number, name, state=module.state.value)
        return error_of("delete_module", number, name, more=_use_of(module) if number == errno.EAGAIN else "")

    async def unmount(self, mount: MountView, *, detach: bool, timeout: float) -> None:
        """Takes one mount away (the top one of its target); already gone is fine."""
        if not is_at_or_below(mount.target, f"/{names.DRIVER_ROOT}"):
            raise InvariantBroken(f"{mount.target} is not below the driver root and never unmounted")
        before = self._mounts_on(mount.target)
        if mount.mount_id not in before:
            return
        flags = UMOUNT_NOFOLLOW | (MNT_DETACH if detach else 0)
        try:
            await self._calls.umount2(mount.target, flags, timeout)
        except OSError as error:
            if len(self._mounts_on(mount.target)) < len(before):
                return  # somebody else was quicker
            raise await self._mount_error(mount.target, error) from error
        after = self._mounts_on(mount.target)
        if after and after[-1] == before[-1] and len(after) >= len(before):
            raise error_of("umount2", errno.EINVAL, mount.target, more="the host still has it after an unmount here")

    def _mounts_on(self, target: str) -> list[int]:
        return [mount.mount_id for mount in mounts(self._roots) if mount.target == target]

    async def _mount_error(self, target: str, error: OSError) -> HostError:
        number = error.errno or 0
        if number != errno.EBUSY:
            return error_of("umount2", number, target)
        below = [mount.target for mount in mounts(self._roots) if mount.target != target and is_at_or_below(mount.target, target)]
        if below:
            return error_of("umount2", number, target, state="children", more=", ".join(below[:_MOST_NAMED]))
        users = await self._read(lambda: users_below(self._roots, target, _MOST_NAMED), lambda: f"the look for users of {target}")
        return error_of("umount2", number, target, more=", ".join(users) or "no process was found there")

    async def mount_copies(self, mounts: Sequence[MountView]) -> tuple[MountCopy, ...]:
        """Who has copies of mounts that were unmounted."""
        return await self._read(lambda: copies_of(self._roots, mounts, _MOST_NAMED), lambda: "the look for copies of the driver's mounts")

    async def unbind_vfio(self, address: str, timeout: float) -> None:
        """Takes one PCI function off vfio and leaves it without a driver; not there, or not on vfio, is fine."""
        await Vfio(self._roots, self._calls, self.holders, timeout=timeout).release(address)

    async def remove_file(self, path: str) -> bool:
        """Removes a file below /run; False where there is none."""
        path = "/" + path.lstrip("/")
        if not path.startswith("/run/") or ".." in path.split("/"):
            raise InvariantBroken(f"{path} is not below /run and never removed")
        if not os.path.lexists(self._own(path)):
            return False
        try:
            await self._calls.unlink(path, QUICK_SECONDS)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise error_of("unlink", error.errno or 0, path) from error
        return True

    async def remove_pid_file(self) -> bool:
        """Removes the driver container's pid file unless a process holds its lock."""
        try:
            descriptor = os.open(self._own(f"/{names.PID_FILE}"), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise error_of("open", error.errno or 0, f"/{names.PID_FILE}") from error
        try:
            if node_lock.is_locked(descriptor):
                return False
            return await self.remove_file(names.PID_FILE)
        finally:
            os.close(descriptor)

    def _own(self, path: str) -> Path:
        return self._roots.own / path.lstrip("/")

    async def services(self, units: Sequence[str]) -> Mapping[str, bool]:
        """Which systemd units are active."""
        return await self._services.active(units)

    async def stop_service(self, unit: str, timeout: float) -> None:
        """Stops a unit and returns when it has ended."""
        await self._services.stop(unit, timeout)

    async def start_service(self, unit: str, timeout: float) -> None:
        """Starts a unit and returns when systemd calls it started."""
        await self._services.start(unit, timeout)

    async def terminate(self, pid: int) -> None:
        """Asks a process to end; one that has ended is fine."""
        try:
            await self._calls.kill(pid, signal.SIGTERM)
        except ProcessLookupError:
            return
        except OSError as error:
            raise error_of("kill", error.errno or 0, str(pid)) from error

    # Waiting ---------------------------------------------------------------------------------------------------------

    async def wait_for_change(self, pids: Sequence[int], timeout: float) -> bool:
        """Returns when one of the processes has ended, a module or device came or went, or after `timeout` seconds."""
        self._calls.make_ready()  # when the wait is over every moment counts
        if not pids:
            await self._hear(timeout)
            return True
        if not self._roots.is_tree and own_pid(self._roots) == os.getpid():
            with contextlib.suppress(OSError):
                async with _ends_of(pids) as ends:
                    return await self._first_of(ends, timeout)
        await self._poll(pids, timeout)
        return not any(self._is_there(pid) for pid in pids)

    async def _hear(self, timeout: float) -> None:
        """Waits for an event of the kernel's; time is up at the limit, whatever becomes of that."""
        pause = asyncio.ensure_future(self._clock.sleep(timeout))
        hearing = asyncio.ensure_future(self._event())
        try:
            await asyncio.wait({pause, hearing}, return_when=asyncio.FIRST_COMPLETED)
            if hearing.done() and hearing.exception() is not None:  # there are none to be had
                await pause
        finally:
            for task in (pause, hearing):
                task.cancel()
            await asyncio.gather(pause, hearing, return_exceptions=True)

    async def _event(self) -> None:
        """Returns when a module or device came or went since the last look.

        What happened before this listens shows in the number of the kernel's last event. The pause before bounds how often the events of
        others, which count there too, can end a wait.

        Raises:
            OSError: the kernel tells nothing here.
        """
        if self._roots.is_tree:
            raise OSError(errno.ENOTSUP, "a tree has no events")
        await self._clock.sleep(LISTEN_AFTER)
        await next_event(lambda: self._sequence not in (None, sequence_number(self._roots.sys)))

    def _is_there(self, pid: int) -> bool:
        return (self._roots.proc / str(pid)).exists()

    async def _first_of(self, ends: Sequence[int], timeout: float) -> bool:
        """Waits until one of the descriptors can be read, or time is up; gives whether all of them can be read."""
        all_of_them = select.poll()
        for descriptor in ends:
            all_of_them.register(descriptor, select.POLLIN)
        waits = [asyncio.ensure_future(readable(descriptor, timeout + 60)) for descriptor in ends]
        pause = asyncio.ensure_future(self._clock.sleep(timeout))
        try:
            await asyncio.wait([*waits, pause], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (*waits, pause):
                task.cancel()
            await asyncio.gather(*waits, pause, return_exceptions=True)
        return len(all_of_them.poll(0)) == len(ends)

    async def _poll(self, pids: Sequence[int], timeout: float) -> None:
        deadline = self._clock.now() + timeout
        pause = 0.1 if self._roots.is_tree else 0.2
        while all(self._is_there(pid) for pid in pids):
            if (left := deadline - self._clock.now()) <= 0:
                return
            await self._clock.sleep(min(pause, left))
            if not self._roots.is_tree:
                pause = min(1.0, pause * 1.5)


@contextlib.asynccontextmanager
async def _ends_of(pids: Sequence[int]) -> AsyncIterator[list[int]]:
    """Descriptors that become readable when a process ends; of one that has ended already, one that is readable now.

    Raises:
        OSError: this kernel has none, or there are too many.
    """
    descriptors: list[int] = []
    try:
        for pid in pids:
            try:
                descriptors.append(os.pidfd_open(pid))
            except ProcessLookupError:
                reading, writing = os.pipe()
                os.close(writing)  # its end can be read at once
                descriptors.append(reading)
        yield descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _use_of(module: ModuleView | None) -> str:
    """What sysfs says about who uses a module."""
    if module is None or module.refcount is None:
        return ""
    users = f"use count {module.refcount}"
    return f"{users}, of that modules: {', '.join(sorted(module.holders))}" if module.holders else users


def _look_at(pids: Sequence[int]) -> str:
    return f"the look at process {', '.join(map(str, pids)) or '0'}, whose memory map may be locked by a call that hangs,"


def _stuck(what: str) -> DeviceStuck:
    return DeviceStuck(
        f"{what} has not ended in {READ_SECONDS:g} s",
        hint="See /proc/PID/stack of that process and dmesg; a process that cannot be killed needs a reboot.",
    )


def _unreadable(error: OSError) -> HostError:
    what = error.filename or "the host"
    return HostError(
        f"{what} cannot be read: {error.strerror}",
        hint="Run as root, privileged, with memory and open files to spare (LimitNOFILE).",
        errno_name=errno.errorcode.get(error.errno or 0, ""),
    )
