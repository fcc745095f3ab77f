"""The steps that change the host, and the wait until nobody holds it."""

from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from typing import Final, assert_never

from driver_manager.agent.node import finished
from driver_manager.agent.progress import Progress
from driver_manager.config import Settings, limit_words
from driver_manager.core.modules import unload_order, used_modules
from driver_manager.core.plan import AwaitNetworkDriver, ProveFree, RemoveFiles, RemovePidFile, UnbindVfio, UnloadModule, Unmount
from driver_manager.core.report import Blocker, Waiting, holder_blockers
from driver_manager.core.services import host_uses, pids_to_terminate, start_order
from driver_manager.core.snapshot import HolderScan, HostView, MountView
from driver_manager.core.vfio import without_vfio
from driver_manager.errors import DeadlineExceeded, DeviceInUse, HostError, ModuleInUse, MountBusy, StartOver
from driver_manager.ports import Clock, Host
from driver_manager.together import together

CALL_TIMEOUT: Final = 30.0
"""Seconds after which a call into the kernel counts as stuck."""
HOLDER_POLL: Final = 5.0
"""Seconds between two looks for holders: one can let go and live on."""
UNSEEN_POLL: Final = 0.5
"""The same at first while a module is in use by nobody that shows: that is nearly always a last close still under way."""
DRAIN_AFTER: Final = 2.0
"""Seconds that processes of evicted pods get to end before a drain of the whole node is thought of."""
SERVICE_TIMEOUT: Final = 120.0
"""Seconds for a unit to stop or start: more than systemd's own limit, which is 90 s by default."""
HOLDER_HINT: Final = (
    "end these processes, or the units or pods they belong to; HOST_SERVICES=UNIT=stop stops a unit and starts it again at the end"
)
UNSEEN_HINT: Final = (
    "no process shows that uses it: another maker's module may (its name is in the last columns of /proc/modules), "
    "or a process that this container cannot see"
)
FIRST_RETRY: Final = 0.05
LONGEST_RETRY: Final = 1.0
"""Seconds between two tries to unload a busy module, doubling."""


class HostWork:
    """What one run does to the host.

    Args:
        host: the machine.
        clock: time for waits.
        settings: what was asked for.
        progress: where it is told.
        keeps_vfio: whether GPUs on vfio stay there, so that their users hold nothing up.
    """

    def __init__(self, host: Host, clock: Clock, settings: Settings, progress: Progress, *, keeps_vfio: bool) -> None:
        self._host, self._clock, self._settings, self._progress = host, clock, settings, progress
        self._keeps_vfio = keeps_vfio
        self._terminated: set[int] = set()
        self._unmounted: list[MountView] = []

    async def do(self, step: RemoveFiles | UnloadModule | Unmount | UnbindVfio | RemovePidFile | AwaitNetworkDriver | ProveFree) -> None:
        """Does one step."""
        match step:
            case RemoveFiles(paths):
                for path in paths:
                    await finished(self._host.remove_file(path))
            case UnloadModule(name):
                await self._unload(name)
            case Unmount(mount, is_detach_at_once):
                await self._unmount(mount, is_detach_at_once)
            case UnbindVfio(addresses):
                await self._unbind_vfio(addresses)
            case RemovePidFile():
                if not await finished(self._host.remove_pid_file()):
                    self._progress.warn("the driver's pid file stays: a process holds its lock, or it is gone already")
            case AwaitNetworkDriver(is_host):
                await self._await_network_driver(is_host)
            case ProveFree(with_modules, is_closed):
                await self._prove_free(with_modules, is_closed)
            case _:
                assert_never(step)

    # Holders --------------------------------------------------------------------------------------------------------

    async def _holders(self) -> HolderScan:
        scan = await self._host.holders()
        return without_vfio(scan) if self._keeps_vfio else scan

    def modules_to_unload(self, host: HostView) -> tuple[str, ...]:
        """The driver's modules that are loaded now, in the order to unload them."""
        return unload_order(host.modules, self._settings.unload_also).modules

    def is_released(self, host: HostView, scan: HolderScan, modules: Collection[str]) -> bool:
        """Whether nothing holds a GPU: no process, and no module with users of its own."""
        return not scan.holders and not used_modules(host.modules, modules)

    async def await_released(
        self,
        modules: tuple[str, ...],
        pod_names: dict[str, str],
        drain: Callable[[HolderScan], Awaitable[None]] | None,
        has_newcomers: Callable[[HolderScan], bool],
        look_at_all: Callable[[], Awaitable[tuple[HolderScan, HostView]]],
    ) -> bool:
        """Waits until nothing holds a GPU, or somebody has come who has to be freed of it first; gives whether `look_at_all` saw that.

        Args:
            modules: to be unloaded.
            pod_names: pod uid -> `namespace/name`, of pods that are or were there.
            drain: what to do, once, when something still holds a GPU after a while; None to only wait.
            has_newcomers: whether new pods use the driver, or services that can be stopped hold it; then this ends, and the look that
                follows makes them another round.
            look_at_all: looks at the cluster too, as is done right before the unload. This look is taken when all who held a GPU have
                ended, so that nobody has to look twice then.

        Raises:
            DeadlineExceeded: naming who holds it.
        """
        limit, began, is_over = self._settings.holder_timeout, self._clock.now(), False
        while True:
            scan, host = await (look_at_all() if is_over else together(self._holders(), self._host.look()))
            if self.is_released(host, scan, modules) or has_newcomers(scan):
                return is_over
            await self._terminate(scan)
            waited = self._clock.now() - began
            blockers = holder_blockers(scan, used_modules(host.modules, modules), pod_names)
            sentence = f"waiting until nothing holds a GPU ({limit_words(limit)})"
            self._progress.wait(Waiting("held-by-process", sentence, blockers))
            if drain is not None and waited >= DRAIN_AFTER:
                await drain(scan)
                drain, began, is_over = None, self._clock.now(), False
                continue
            if limit and waited >= limit:
                raise DeadlineExceeded(_names(blockers), waited, hint=HOLDER_HINT if scan.holders else UNSEEN_HINT)
            pause = HOLDER_POLL if scan.holders else min(HOLDER_POLL, max(UNSEEN_POLL, waited))
            if drain is not None:
                pause = min(pause, DRAIN_AFTER)
            pids = [each.pid for each in scan.holders]
            are_gone = await self._host.wait_for_change(pids, max(0.001, min(pause, limit - waited)) if limit else pause)
            is_over = are_gone and bool(pids)

    async def _terminate(self, scan: HolderScan) -> None:
        """Asks processes of the host to end, each once, where HOST_PROCESSES says so."""
        uses = host_uses(scan.holders, self._settings.host_services, self._settings.host_processes)
        for pid in pids_to_terminate(uses):
            if pid not in self._terminated:
                self._terminated.add(pid)
                words = next(use.words for use in uses if use.holder.pid == pid)
                self._progress.warn("a process of the host is asked to end", what=words, setting="HOST_PROCESSES")
                await finished(self._host.terminate(pid))

    # Services -------------------------------------------------------------------------------------------------------

    async def stop_services(self, units: Collection[str]) -> None:
        """Stops units, one after the other.

        Raises:
            ServiceFailed: naming the one that was not stopped.
        """
        for unit in units:
            self._progress.tell("stopping a service of the host", unit=unit)
            await finished(self._host.stop_service(unit, SERVICE_TIMEOUT))

    async def start_services(self, units: Collection[str], limit: float) -> None:
        """Starts those of the units that are not active. One that does not start is told and left: the driver it needs may be gone.

        Args:
            units: that were active before.
            limit: seconds for all together; 0 is no limit.
        """
        until = self._clock.now() + (limit or SERVICE_TIMEOUT * len(units))
        active: Mapping[str, bool] = {}
        with suppress(HostError):
            active = await self._host.services(tuple(units))
        for unit in start_order(unit for unit in units if not active.get(unit)):
            self._progress.tell("starting a service of the host again", unit=unit)
            try:
                await finished(self._host.start_service(unit, max(1.0, min(SERVICE_TIMEOUT, until - self._clock.now()))))
            except HostError as error:
                self._progress.warn("a service that was stopped does not start", unit=unit, error=error.message, hint=error.hint)

    # Modules and mounts ---------------------------------------------------------------------------------------------

    async def _unload(self, name: str) -> None:
        """Unloads one module; busy ones are tried again for a while, as users end a moment after their process."""
        limit, began, pause = self._settings.unload_timeout, self._clock.now(), FIRST_RETRY
        while True:
            try:
                await finished(self._host.unload_module(name, CALL_TIMEOUT))
                return
            except ModuleInUse as error:
                waited = self._clock.now() - began
                if limit and waited >= limit:
                    raise await self._still_in_use(name, waited) from error
                self._progress.wait(Waiting("module-in-use", f"{error.message} ({limit_words(limit)})"))
            await self._unload_holders(name)
            await self._clock.sleep(pause)
            pause = min(2 * pause, LONGEST_RETRY)

    async def _unload_holders(self, name: str) -> None:
        """Driver modules that were loaded on top of this one since the plan was made: the kernel loads some on demand."""
        host = await self._host.look()
        holders = host.modules[name].holders if name in host.modules else frozenset()
        for holder in self.modules_to_unload(host):
            if holder in holders:
                with suppress(ModuleInUse):
                    await finished(self._host.unload_module(holder, CALL_TIMEOUT))

    async def _still_in_use(self, name: str, waited: float) -> DeadlineExceeded:
        scan, host = await together(self._holders(), self._host.look())
        holders = host.modules[name].holders if name in host.modules else frozenset()
        blockers = holder_blockers(scan, used_modules(host.modules, (name,)), {})
        what = f"the modules {', '.join(sorted(holders))}" if holders else _names(blockers)
        return DeadlineExceeded(f"{what} to let go of the module {name}", waited, hint="end what uses the module, then run again")

    async def _unmount(self, mount: MountView, is_detach_at_once: bool) -> None:
        self._unmounted.append(mount)
        if not is_detach_at_once:
            try:
                await finished(self._host.unmount(mount, detach=False, timeout=CALL_TIMEOUT))
                return
            except MountBusy as error:
                if self._settings.busy_mounts == "refuse":
                    raise
                self._progress.warn("busy mount is detached", mount=mount.target, error=error.message)
        await finished(self._host.unmount(mount, detach=True, timeout=CALL_TIMEOUT))

    async def _unbind_vfio(self, addresses: Collection[str]) -> None:
        """Takes each function off vfio; one that stays keeps no other from going (R9).

        Raises:
            HostError: naming every function that stays, and why.
        """
        failures: list[HostError] = []
        for address in addresses:
            try:
                await finished(self._host.unbind_vfio(address, CALL_TIMEOUT))
            except HostError as error:
                failures.append(error)
        if failures:
            first = min(failures, key=lambda error: isinstance(error, DeviceInUse))  # what waiting does not help comes first
            raise type(first)("; ".join(error.message for error in failures), hint=first.hint, errno_name=first.errno_name)

    async def _prove_free(self, with_modules: bool, is_closed: bool) -> None:
        """Looks whether the host is free for a new driver; modules that came back are unloaded once more (R4, N26).

        Raises:
            HostError: naming what is still there. StartOver: a driver came up on a node that is open to its users.
        """
        host = await self._host.look()
        if with_modules and not is_closed and host.is_loaded:
            raise StartOver("a driver was loaded meanwhile", hint="another pod on this node installs one")
        if with_modules and (back := self.modules_to_unload(host)):
            self._progress.warn("modules came back and are unloaded once more", modules=", ".join(back))
            for name in back:
                await self._unload(name)
            host = await self._host.look()
        left = [f"the module {name}" for name in self.modules_to_unload(host) if with_modules]
        left += [f"a mount at {mount.target}" for mount in host.mounts]
        if left:
            raise HostError(f"the host is not free: {', '.join(left)} is still there", hint="find out what brings it back")
        await self._tell_copies()

    async def _tell_copies(self) -> None:
        """Names who keeps files of the old driver alive by a copy of its mounts, which is nothing for a new driver to mind.

        What cannot be looked at is no reason to fail now: the host itself is free.
        """
        with suppress(HostError):
            for copy in await self._host.mount_copies(self._unmounted) if self._unmounted else ():
                owner = f"pod with uid {copy.pod_uid}" if copy.pod_uid else f"unit {copy.unit}" if copy.unit else "unknown owner"
                what = f"{copy.target} in the mount namespace of {copy.command} (process {copy.pid}, {owner})"
                self._progress.warn("a copy of the old driver's mounts stays until its process ends", what=what)

    async def _await_network_driver(self, is_host: bool) -> None:
        """After the unload, as the network driver may wait for the GPU driver's peer memory module to go (N26)."""
        limit, began = self._settings.network_driver_timeout, self._clock.now()
        which = "the host's mlx5_core module" if is_host else "the containerised network driver"
        while True:
            host = await self._host.look()
            if host.has_mlx5_core if is_host else host.is_mofed_ready:
                return
            waited = self._clock.now() - began
            if limit and waited >= limit:
                raise DeadlineExceeded(f"{which} to be up", waited, hint="look at the network operator's driver pod on this node")
            blockers = (Blocker("network-driver", which, "is not up"),)
            self._progress.wait(Waiting("network-driver", f"waiting for the network driver ({limit_words(limit)})", blockers))
            await self._host.wait_for_change((), max(0.001, min(2.0, limit - waited)) if limit else 2.0)


def _names(blockers: Collection[Blocker]) -> str:
    return "; ".join(f"{each.kind} {each.name} ({each.why})" for each in blockers) or "the last users"
