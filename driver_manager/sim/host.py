"""The Host port on a simulated machine, in one life."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

from driver_manager import names
from driver_manager.core.snapshot import HolderScan, HostView, MountCopy, MountView
from driver_manager.errors import HostError, InvariantBroken, LockHeld, ServiceFailed
from driver_manager.sim.faults import Hung, Life, When
from driver_manager.sim.machine import DRIVER_ROOT, Machine

T = TypeVar("T")


class SimHost:
    """The machine, as one life of the program reaches it."""

    def __init__(self, machine: Machine, life: Life) -> None:
        self.machine = machine
        self._life = life

    async def look(self) -> HostView:
        """Reads the host."""
        await self._read("look")
        return self.machine.view()

    async def holders(self) -> HolderScan:
        """Finds who has a GPU device open."""
        await self._read("holders")
        return self.machine.scan()

    async def host_driver_version(self, timeout: float) -> str | None:
        """What the host's own nvidia-smi says."""
        try:
            await self._life.gate("host", "host_driver_version", {"timeout": timeout})
        except Hung:
            await self._life.sleep(timeout)
            return None
        await self._life.sleep(min(timeout, self.machine.smi_seconds))
        return self.machine.smi_version if self.machine.smi_seconds < timeout else None

    def lock(self, timeout: float) -> AbstractAsyncContextManager[None]:
        """Holds the node's lock."""
        return self._locked(timeout)

    @contextlib.asynccontextmanager
    async def _locked(self, timeout: float) -> AsyncIterator[None]:
        await self._life.gate("host", "lock", {"timeout": timeout})
        me = f"process {10_000 + self._life.number} (driver-manager)"
        deadline = asyncio.get_running_loop().time() + (timeout or float("inf"))
        while self.machine.lock_holder is not None:
            rest = deadline - asyncio.get_running_loop().time()
            if rest <= 0:
                raise LockHeld(
                    f"another run works on this node: {self.machine.lock_holder} holds /{names.LOCK_FILE}", errno_name="EWOULDBLOCK"
                )
            await self._life.sleep(min(rest, 0.1))
        self.machine.lock_holder = me

        def free() -> None:
            if self.machine.lock_holder == me:
                self.machine.lock_holder = None

        self._life.on_death(free)
        try:
            yield
        finally:
            free()

    async def unload_module(self, name: str, timeout: float) -> None:
        """Unloads one module."""
        name = name.replace("-", "_")

        def stuck() -> HostError:
            return self.machine.stuck("delete_module", name, timeout)

        module = self.machine.modules.get(name)
        is_stuck = module is not None and module.is_stuck and self.machine.refcount(name) == 0
        seconds = self.machine.unload_seconds if module is not None else 0.0
        await self._write(
            "unload_module",
            {"name": name},
            lambda: self.machine.unload(name),
            seconds=seconds,
            timeout=timeout,
            stuck=stuck,
            hangs=is_stuck,
        )

    async def unmount(self, mount: MountView, *, detach: bool, timeout: float) -> None:
        """Takes one mount away: the top one of its target, if the target still has this one."""
        if mount.target != DRIVER_ROOT and not mount.target.startswith(DRIVER_ROOT + "/"):
            raise InvariantBroken(f"{mount.target} is not below the driver root and never unmounted")

        def stuck() -> HostError:
            return self.machine.stuck("umount2", mount.target, timeout)

        top = self.machine.top_mount(mount.target)
        await self._write(
            "unmount",
            {"target": mount.target, "detach": detach},
            lambda: self.machine.unmount(mount.target, mount.mount_id, detach=detach),
            timeout=timeout,
            stuck=stuck,
            hangs=top is not None and top.is_stuck,
        )

    async def mount_copies(self, mounts: Sequence[MountView]) -> tuple[MountCopy, ...]:
        """Who has copies of mounts that were unmounted."""
        await self._read("mount_copies")
        return tuple(self.machine.mount_copies) if mounts else ()

    async def unbind_vfio(self, address: str, timeout: float) -> None:
        """Takes one PCI function off vfio."""
        await self._write("unbind_vfio", {"address": address}, lambda: self.machine.unbind_vfio(address), timeout=timeout)

    async def remove_file(self, path: str) -> bool:
        """Removes a file below /run."""
        where = "/" + path.lstrip("/")
        if not where.startswith("/run/") or ".." in where.split("/"):
            raise InvariantBroken(f"{path} is not below /run and never removed")
        return await self._write("remove_file", {"path": where}, lambda: self.machine.remove_file(where))

    async def remove_pid_file(self) -> bool:
        """Removes the driver container's pid file unless its lock is held."""

        def remove() -> bool:
            return not self.machine.has_pid_lock and self.machine.remove_file("/" + names.PID_FILE)

        return await self._write("remove_pid_file", {}, remove)

    async def services(self, units: Sequence[str]) -> Mapping[str, bool]:
        """Which systemd units are active."""
        await self._read("services")
        self._need_systemd()
        return {unit: self.machine.is_unit_active(unit) for unit in units}

    async def stop_service(self, unit: str, timeout: float) -> None:
        """Stops a unit."""
        await self._service("stop", unit, timeout)

    async def start_service(self, unit: str, timeout: float) -> None:
        """Starts a unit."""
        await self._service("start", unit, timeout)

    async def _service(self, verb: str, unit: str, timeout: float) -> None:
        self._need_systemd()
        known = self.machine.units.get(unit)
        seconds = 0.0 if known is None else known.stop_seconds if verb == "stop" else known.start_seconds
        done = "stopped" if verb == "stop" else "started"

        def late() -> HostError:
            return ServiceFailed(f"the unit {unit} was not {done}: not within {timeout:g} s")

        act = self.machine.stop_unit if verb == "stop" else self.machine.start_unit
        await self._write(
            f"{verb}_service",
            {"unit": unit},
            lambda: act(unit),
            seconds=seconds,
            timeout=timeout,
            stuck=late,
            hangs=seconds > timeout,
        )

    def _need_systemd(self) -> None:
        if not self.machine.has_systemd:
            raise HostError("the host's systemd cannot be asked: there is no systemctl")

    async def terminate(self, pid: int) -> None:
        """Asks a process to end."""
        await self._write("terminate", {"pid": pid}, lambda: self.machine.terminate(pid))

    async def wait_for_change(self, pids: Sequence[int], timeout: float) -> bool:
        """Returns when one of the processes has ended, else after the timeout."""
        await self._read("wait_for_change")
        wanted = list(pids)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while not wanted or all(pid in self.machine.processes for pid in wanted):
                    await self.machine.changed.wait()
        self._life.check()
        return not any(pid in self.machine.processes for pid in wanted)

    async def _read(self, name: str) -> None:
        try:
            await self._life.gate("host", name)
        except Hung:
            await asyncio.get_running_loop().create_future()

    async def _write(
        self,
        name: str,
        args: Mapping[str, object],
        effect: Callable[[], T],
        *,
        seconds: float = 0.0,
        timeout: float = 10.0,
        stuck: Callable[[], HostError] | None = None,
        hangs: bool = False,
    ) -> T:
        """One call into the kernel: a boundary, the effect, another boundary."""
        try:
            await self._life.gate("host", name, args, is_write=True)
        except Hung:
            hangs = True
        if hangs:
            await self._life.sleep(timeout)
            raise stuck() if stuck else HostError(f"{name} did not come back", errno_name="EIO")
        await self._life.sleep(seconds)
        result = effect()
        await self._life.gate("host", name, args, when=When.AFTER, is_write=True)
        return result
