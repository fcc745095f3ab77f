"""Doing the steps of a plan, one after the other: each has one function here, and none decides what comes next."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, assert_never

from driver_manager.agent.hostwork import HostWork
from driver_manager.agent.node import FIRST_PAUSE, LONGEST_PAUSE, NodeWriter
from driver_manager.agent.observe import Observer
from driver_manager.agent.parking import await_rolling_update, check_kept_off, let_in
from driver_manager.agent.progress import Progress
from driver_manager.config import Settings, limit_words
from driver_manager.core.consumers import Action, drain_verdict
from driver_manager.core.hostdriver import mark, unmarked
from driver_manager.core.keepoff import KeepOff
from driver_manager.core.labels import LabelsToPause, is_paused_by_another
from driver_manager.core.plan import (
    AwaitForeignPause,
    AwaitNetworkDriver,
    AwaitOtherDriver,
    AwaitPolicyOwner,
    AwaitReleased,
    AwaitRollingUpdate,
    BeginUnload,
    FreePods,
    LookAgain,
    MarkHostDriver,
    PauseLast,
    PauseNode,
    ProveFree,
    ProveNoClaims,
    RemoveFiles,
    RemovePidFile,
    RestoreNode,
    StartServices,
    Step,
    StopServices,
    TryEvictions,
    UnbindVfio,
    UnloadModule,
    UnmarkHostDriver,
    Unmount,
    counted,
    named,
)
from driver_manager.core.planner import unload_steps
from driver_manager.core.record import (
    NodeChange,
    Phase,
    Record,
    apply_record,
    encode,
    find_record,
    leftovers,
    let_in_next,
    rebased,
    taken_off,
    undo_record,
)
from driver_manager.core.report import Waiting, pod_blockers, status_text
from driver_manager.core.rounds import Round, plan_claim_round, plan_round, pods_ending, pods_to
from driver_manager.core.seen import Snapshot, keeps_vfio, pod_policy, use_context
from driver_manager.core.services import host_uses, units_to_stop
from driver_manager.core.snapshot import HolderScan, HostView, NodeView, PodView
from driver_manager.core.uses import driver_claims
from driver_manager.errors import Conflict, DeadlineExceeded, InvariantBroken, NotFound, Refused, TakenOver, Unreachable, Unsettled
from driver_manager.evictions import Evictor, PodTracker, Reaper, wait_until_gone
from driver_manager.names import (
    DEPLOY_DRIVER,
    HOST_DRIVER,
    MIRROR_HASH,
    PRE_INSTALLED,
    RECORD,
    STATUS,
    UPGRADE_ENABLED,
    UPGRADE_REQUESTED,
    UPGRADE_STATE,
)
from driver_manager.ports import Clock, Cluster, Host
from driver_manager.together import together

MAX_ROUNDS: Final = 3
"""How often newcomers are freed again before the run gives up."""
FRESH_LOOK: Final = 2.0
"""Seconds after its begin for which a look that ended the wait for holders counts as the one right before the unload."""
WRITE_TIMEOUT: Final = 60.0
"""Seconds for one change of the node while the API server does not answer; the restore has its own limit."""
NEWCOMERS_HINT: Final = "find out who starts pods on this node although it is cordoned, and keep that off it"
QUEUED_STATES: Final = frozenset({"", "upgrade-done", "upgrade-failed"})
"""Upgrade states in which the controller has not taken the node up, so that asking for it makes sense."""


class Executor:
    """The state of one run while its steps are done."""

    def __init__(
        self,
        cluster: Cluster,
        host: Host,
        clock: Clock,
        settings: Settings,
        observer: Observer,
        writer: NodeWriter,
        progress: Progress,
        seen: Snapshot,
    ) -> None:
        self.cluster, self.clock, self.settings = cluster, clock, settings
        self.observer, self.writer, self.progress = observer, writer, progress
        self.seen = seen
        """The newest snapshot."""
        self.host_work = HostWork(host, clock, settings, progress, keeps_vfio=keeps_vfio(seen, settings))
        self.tracker = PodTracker(cluster, settings.node_name, observer.pods)
        self.evictor = Evictor(cluster, clock, self.tracker, progress, settings.drain_timeout)
        self.record: Record | None = None
        """The record that is, or may be, on the node."""
        self.adopted: Record | None = None
        """The record that an earlier run had left there."""
        self.paused: dict[str, str] = {}
        """Labels paused so far."""
        self.has_paused_last = False
        """Whether the DRA plugin has been told to go: from then on no claim can be given back."""
        self.has_put_on_again = False
        self.is_marking = False
        """Whether this run says on the node that the host owns the driver, or is about to."""
        self.told_at = float("-inf")
        """When the status was written last with another change."""
        self._stopped_units: set[str] = set()
        """Units that this run has stopped: they are not stopped again, whoever starts them."""
        self._came_though_parked: set[str] = set()
        self._has_started_services = False
        self._last_look: tuple[Snapshot, float] | None = None
        """The whole look by which the wait for holders ended, and when it began."""
        self.status_on_restore: str | None = None
        """What the status annotation becomes when the node is put back; None removes it."""

    async def do(self, step: Step) -> None:
        """Does one step."""
        match step:
            case MarkHostDriver() | UnmarkHostDriver():
                await self._host_driver_mark(step)
            case AwaitForeignPause(labels):
                await self._await_foreign_pause(labels)
            case AwaitPolicyOwner(pods):
                await self._await_policy_owner(pods)
            case AwaitOtherDriver(pods):
                await self._await_other_driver(pods)
            case AwaitRollingUpdate(owners):
                for owner in owners:
                    await await_rolling_update(self.cluster, self.clock, self.progress, owner, self.settings.operand_timeout)
            case TryEvictions(pods):
                await self.evictor.try_all(pods)
            case PauseNode(record, labels):
                await self._pause(record, dict(labels))
            case FreePods(evict, leaving):
                await self._free(evict, leaving)
            case ProveNoClaims():
                await self._prove_no_claims()
            case PauseLast(labels, pods, evict):
                await self._pause_last(dict(labels), pods, evict)
            case StopServices(units):
                await self._stop_services(units)
            case StartServices():
                await self._start_services(0.0)
            case AwaitReleased(modules):
                await self._await_released(modules)
            case LookAgain():
                await self._look_again()
            case BeginUnload():
                await self._begin_unload()
            case RestoreNode():
                await self.restore(self.settings.restore_timeout)
            case RemoveFiles() | UnloadModule() | Unmount() | UnbindVfio() | RemovePidFile() | AwaitNetworkDriver() | ProveFree():
                if self.record is not None:
                    await self.writer.still_ours()
                await self.host_work.do(step)
            case _:
                assert_never(step)

    # Waiting for others ---------------------------------------------------------------------------------------------

    async def _await_foreign_pause(self, labels: tuple[str, ...]) -> None:
        limit, began = self.settings.operand_timeout, self.clock.now()
        while left := [key for key in labels if is_paused_by_another(self.writer.node.labels.get(key, ""))]:
            values = ", ".join(f"{key}={self.writer.node.labels[key]}" for key in left)
            waited = self.clock.now() - began
            if limit and waited >= limit:
                raise DeadlineExceeded(f"another tool to end its pause ({values})", waited, hint="look at the tool that set this value")
            self.progress.wait(Waiting("paused-by-another", f"another tool has paused {values} ({limit_words(limit)})"))
            await self.clock.sleep(2.0)
            await self.writer.read(WRITE_TIMEOUT)

    async def _await_policy_owner(self, pods: tuple[PodView, ...]) -> None:
        """Decision 1: on such a node the upgrade controller evicts; it is asked once, unless it is at it."""

        def request(node: NodeView) -> NodeChange | None:
            if UPGRADE_REQUESTED in node.annotations or node.labels.get(UPGRADE_STATE, "") not in QUEUED_STATES:
                return None
            return NodeChange(annotations={UPGRADE_REQUESTED: "true"})

        await self.writer.write(request, "asking for an upgrade", WRITE_TIMEOUT)
        limit = self.settings.policy_owner_timeout
        sentence = f"an upgrade controller owns GPU pod eviction here ({limit_words(limit)})"
        await self._until_gone(pods, limit, "policy-owned", sentence, "has to be evicted by the upgrade controller")

    async def _await_other_driver(self, pods: tuple[PodView, ...]) -> None:
        limit = self.settings.holder_timeout
        sentence = f"another driver's pod is on this node ({limit_words(limit)})"
        await self._until_gone(pods, limit, "other-driver", sentence, "owns a driver on this node")

    async def _until_gone(self, pods: Sequence[PodView], limit: float, reason: str, sentence: str, why: str) -> None:
        def tell(left: tuple[PodView, ...]) -> None:
            self.progress.wait(Waiting(reason, sentence, pod_blockers(left, why)))

        await wait_until_gone(self.tracker, self.clock, pods, limit, tell)

    # The node -------------------------------------------------------------------------------------------------------

    async def _host_driver_mark(self, step: MarkHostDriver | UnmarkHostDriver) -> None:
        def build(node: NodeView) -> NodeChange | None:
            if isinstance(step, MarkHostDriver):
                if node.labels.get(DEPLOY_DRIVER) == PRE_INSTALLED:
                    return None
                return NodeChange(labels={DEPLOY_DRIVER: PRE_INSTALLED}, annotations=mark(step.previous, step.version))
            return NodeChange(labels=unmarked(node, step.previous), annotations={HOST_DRIVER: None})

        self.is_marking = isinstance(step, MarkHostDriver)
        await self.writer.write(build, "the host driver mark", WRITE_TIMEOUT)

    async def _pause(self, record: Record, labels: dict[str, str]) -> None:
        self.adopted = find_record(self.writer.node).record
        self.record = record
        waiting = self.evictor.waiting(self.tracker.among(self._blocked_pods() or self.evictor.asked))
        status = status_text(phase="freeing", run=record.run, since=self.clock.wall(), waiting=waiting)

        def build(node: NodeView) -> NodeChange | None:
            found = find_record(node).record
            if found is not None and found.run == record.run:
                return None
            if found is not None and (self.adopted is None or found.run != self.adopted.run):
                raise TakenOver(f"run {found.run} has taken over the node {node.name}")
            self.record = rebased(record, node, self.adopted)
            self.paused = {key: value for key, value in self.record.labels.items() if key in labels}
            former = self.adopted.taint if self.adopted is not None else None
            change = apply_record(self.record, node, labels=self.paused, former=former)
            return replace(change, annotations={**change.annotations, STATUS: status})

        await self.writer.write(build, "pausing the node", WRITE_TIMEOUT)
        self.told_at = self.clock.now()

    def _blocked_pods(self) -> tuple[PodView, ...]:
        return tuple(pod for pod in self.tracker.present.values() if pod.uid in self.evictor.blocked)

    async def _pause_last(self, labels: dict[str, str], pods: tuple[PodView, ...], evict: tuple[PodView, ...]) -> None:
        assert self.record is not None
        self.has_paused_last = True
        self.paused |= {key: value for key, value in self.record.labels.items() if key in labels}
        await self.writer.write(self._as_recorded, "pausing what goes last", WRITE_TIMEOUT)
        await self._free(evict, pods)

    def _as_recorded(self, node: NodeView) -> NodeChange | None:
        """What brings the node to what this run wants it to be; None where it is so."""
        self.writer.check_ours(node)
        assert self.record is not None
        change = apply_record(self.record, node, labels=self.paused)
        is_written = find_record(node).record == self.record
        if is_written and not change.labels and change.unschedulable is None and change.taints is None:
            return None
        return change

    # Pods -----------------------------------------------------------------------------------------------------------

    async def _free(self, evict: Sequence[PodView], leaving: Sequence[PodView]) -> None:
        """Evictions and the waits for operands go on together."""
        await together(self._evict(evict), self._await_operands(leaving), self._reap((*evict, *leaving)))

    async def _reap(self, pods: Sequence[PodView]) -> None:
        """Ends pods that do not end by themselves, only where a setting asks for it."""
        if not self.settings.force_delete_stuck_pods:
            return
        reaper = Reaper(self.cluster, self.clock, self.progress)
        while left := self.tracker.among(pods):
            await reaper.reap(left)
            await self.tracker.next_change(self.clock, 1.0)

    async def _evict(self, pods: Sequence[PodView]) -> None:
        work = asyncio.ensure_future(self.evictor.evict_all(pods))
        try:
            while left := self.tracker.among(pods):
                waiting = self.evictor.waiting(left)
                self.progress.over("evicting" if self.evictor.blocked else "blocked-by-budget")
                self.progress.wait(waiting)
                if work.done():
                    work.result()
                self.evictor.check_limit()
                await self.tracker.next_change(self.clock, min(1.0, self.evictor.time_left() + 0.001))
            await work
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)  # no eviction is on its way when the node is put back, and no error unheard

    async def _await_operands(self, pods: Sequence[PodView]) -> None:
        limit = self.settings.operand_timeout

        def tell(left: tuple[PodView, ...]) -> None:
            sentence = f"waiting for {counted(left)} whose label is paused to be gone ({limit_words(limit)})"
            self.progress.wait(Waiting("operands-leaving", sentence, pod_blockers(left, "is leaving")))

        await wait_until_gone(self.tracker, self.clock, pods, limit, tell)
        self.progress.over("operands-leaving")

    async def _await_released(self, modules: tuple[str, ...]) -> None:
        drain = self._drain if self._may_drain() else None
        self._last_look = None
        seen_by_all = await self.host_work.await_released(modules, self._pod_names(), drain, self._has_newcomers, self._look_at_all)
        if not seen_by_all:
            self._last_look = None

    async def _stop_services(self, units: Sequence[str]) -> None:
        """Stops units of the host; what the record does not hold yet is written down first (decision 8)."""
        assert self.record is not None
        if new := tuple(unit for unit in units if unit not in self.record.services and self.seen.services.get(unit, True)):
            self.record = replace(self.record, services=(*self.record.services, *new))
            await self.writer.write(self._as_recorded, "writing down which services are stopped", WRITE_TIMEOUT)
        await self.writer.still_ours()
        self._stopped_units |= set(units)
        await self.host_work.stop_services(units)

    def _units_to_stop(self, scan: HolderScan) -> tuple[str, ...]:
        """Units that came, or came back, and hold a GPU; each is stopped once in a run."""
        uses = host_uses(scan.holders, self.settings.host_services, self.settings.host_processes)
        return tuple(unit for unit in units_to_stop(uses) if unit not in self._stopped_units)

    async def _start_services(self, limit: float) -> None:
        """Starts the units that the record says were active, unless it is of another boot: that has started them itself."""
        record = self.record or find_record(self.writer.node).record
        if record is None or not record.services or record.boot_id != self.seen.host.boot_id or self._has_started_services:
            return
        await self.host_work.start_services(record.services, limit)
        self._has_started_services = True

    def _has_newcomers(self, scan: HolderScan) -> bool:
        """Whether a pod has come that must go first, or a unit holds a GPU that is to be stopped: waiting would be in vain."""
        assert self.record is not None
        if self._units_to_stop(scan):
            return True
        seen = replace(self.seen, node=self.writer.node, pods=tuple(self.tracker.present.values()), holders=scan)
        return plan_round(seen, self.settings, self.record).needs_action

    def _may_drain(self) -> bool:
        return self.settings.enable_auto_drain and self.writer.node.annotations.get(UPGRADE_ENABLED) != "true"

    def _pod_names(self) -> dict[str, str]:
        there = {pod.annotations.get(MIRROR_HASH, uid) for uid, pod in self.tracker.present.items()}
        return {uid: name if uid in there else f"{name}, which is gone from the API" for uid, name in self.tracker.names.items()}

    async def _drain(self, scan: HolderScan) -> None:
        """Evicts what a drain of the whole node takes, if that can help: the fallback that ENABLE_AUTO_DRAIN asks for.

        Raises:
            Unsettled: one of them holds a claim, and the plugin that it needs to end has gone (specification 8).
        """
        assert self.record is not None
        self.seen = seen = await self._look()
        self.tracker.update(self.observer.pods)
        self._accept(seen.node)
        policy = pod_policy(seen, self.settings, LabelsToPause(first=self.record.labels), KeepOff(self.record.taint, ""))
        decided = [drain_verdict(pod, policy) for pod in seen.pods]
        for each in decided:
            if each.action is Action.REFUSE:
                self.progress.warn("a drain leaves a pod", pod=each.pod.ref, why=each.sentence, setting=each.setting)
        evict = pods_to(Action.EVICT, decided)
        movable = {pod.uid for pod in evict}
        if not any(each.pod_uid in movable or (each.pod_uid is None and each.unit is None) for each in scan.holders):
            self.progress.tell("no drain: nobody who holds a GPU would go")
            return
        self._demand_plugin_for(evict)
        self.progress.tell("draining the whole node", pods=len(evict))
        await self.evictor.try_all(evict)
        await self._free((*evict, *pods_ending(decided)), pods_to(Action.AWAIT, decided))

    async def _prove_no_claims(self) -> None:
        """Goes on only when no pod needs the DRA plugin any more, by a fresh list (specification 8)."""
        assert self.record is not None
        last = {key: value for key, value in self.record.labels.items() if key not in self.paused}
        labels = LabelsToPause(first=self.paused, last=last)
        found = Round()
        for number in range(1, MAX_ROUNDS + 2):
            self.seen = await self._look()
            self.tracker.update(self.observer.pods)
            self._accept(self.seen.node)
            found = plan_claim_round(self.seen, self.settings, self.record, labels)
            if found.is_clear:
                return
            self.progress.tell("pods still hold claims", pods=named(found.pods))
            if number > MAX_ROUNDS:
                break
            await self._free_round(found)
        raise Unsettled(f"claims on this node do not end: {_with_owners(found)} came again and again", hint=NEWCOMERS_HINT)

    # Looking again --------------------------------------------------------------------------------------------------

    async def _look_again(self) -> None:
        """Goes on only when nobody uses the driver, by a fresh look; newcomers are another round, a bounded number of times (R1)."""
        assert self.record is not None
        found = Round()
        rounds = 0
        while True:
            self.seen = seen = self._look_of_the_wait() or await self._look()
            self.tracker.update(self.observer.pods)
            self._accept(seen.node)
            if off := taken_off(self.record, seen.node, paused=self.paused):
                await self._put_on_again(off)
                continue
            found = plan_round(seen, self.settings, self.record)
            modules = self.host_work.modules_to_unload(seen.host)
            unload_steps(seen, self.settings)  # refuses where somebody else's module holds the driver by now
            if found.is_clear and self.host_work.is_released(seen.host, seen.holders, modules):
                return
            self.progress.tell("somebody uses the driver again", round=rounds + 1, pods=_round_words(found))
            rounds += 1
            if rounds > MAX_ROUNDS:
                break
            await self._another_round(found, modules)
        raise Unsettled(
            f"the node does not stay free: users came {MAX_ROUNDS + 1} times, the last: {_with_owners(found)}", hint=NEWCOMERS_HINT
        )

    async def _look_at_all(self) -> tuple[HolderScan, HostView]:
        began = self.clock.now()
        seen = await self._look()
        self._last_look = seen, began
        return seen.holders, seen.host

    def _look_of_the_wait(self) -> Snapshot | None:
        """The look by which the wait for holders ended, once, if it has only just been: then it is the look right before the unload (R1).

        It was as whole as any other, began when all evictions were done and all holders had ended, and nothing was done since; and the
        watch has told of no pod that it lacks. What comes after it meets the same guards: the version of the node in the next patch, and
        the kernel, which keeps a module in use.
        """
        last, self._last_look = self._last_look, None
        if last is None or self.clock.now() - last[1] > FRESH_LOOK:
            return None
        return None if self._lacks_pods(last[0]) else last[0]

    def _lacks_pods(self, seen: Snapshot) -> bool:
        """Whether the watch has told of a pod that a look does not have."""
        return not self.tracker.present.keys() <= {pod.uid for pod in seen.pods}

    async def _look(self) -> Snapshot:
        """A fresh look, through outages as long as any other call may take: too much has been done to give up at one lost answer."""
        began, pause = self.clock.now(), FIRST_PAUSE
        while True:
            try:
                return await self.observer.look(with_claims=True)
            except NotFound as error:
                raise TakenOver(f"the node {self.writer.node.name} is gone from the cluster") from error
            except Unreachable as error:
                if self.clock.now() - began >= WRITE_TIMEOUT:
                    raise
                pause = min(2 * pause, LONGEST_PAUSE)
                await self.clock.sleep(max(pause, error.retry_after))

    def _accept(self, node: NodeView) -> None:
        if node.uid != self.writer.node.uid:
            raise TakenOver(f"the node {node.name} was made anew while this run worked on it")
        self.writer.check_ours(node)
        self.writer.node = node

    async def _put_on_again(self, off: tuple[str, ...]) -> None:
        """Decision 10: once, and reported."""
        what = ", ".join(off)
        if self.has_put_on_again:
            raise Unsettled(
                f"the node does not stay as this run needs it: somebody took off {what} again", hint="find out who changes the node"
            )
        self.has_put_on_again = True
        self.progress.warn("somebody took off what this run put on the node; it is put on once more", what=what)
        await self.writer.write(self._as_recorded, "putting on again what was taken off", WRITE_TIMEOUT)

    async def _another_round(self, found: Round, modules: tuple[str, ...]) -> None:
        self._demand_plugin_for(found.pods)
        await self._free_round(found)
        if units := self._units_to_stop(self.seen.holders):
            await self._stop_services(units)
        await self._await_released(modules)

    def _demand_plugin_for(self, pods: Sequence[PodView]) -> None:
        """Sees to it that none of these pods needs a DRA plugin that has gone already: it would never end."""
        stuck = tuple(pod for pod in pods if driver_claims(pod, use_context(self.seen, self.settings)))
        if self.has_paused_last and stuck:
            raise Unsettled(f"{named(stuck)} came with a claim after the DRA plugin had gone, and needs it to end", hint=NEWCOMERS_HINT)

    async def _free_round(self, found: Round) -> None:
        """Frees the node of those that a look in mid-run found."""
        if found.refused:
            lines = "; ".join(f"pod {each.pod.ref} {each.sentence} ({each.setting})" for each in found.refused)
            raise Refused(f"a new user of the driver may not be moved: {lines}", hint=found.refused[0].setting)
        if self.record is not None:
            check_kept_off(found.evict, self.record.parked, self._came_though_parked)
        if found.left_to_owner:
            await self._await_policy_owner(found.left_to_owner)
        if found.other_drivers:
            await self._await_other_driver(found.other_drivers)
        await self._free((*found.evict, *found.ending), found.leaving)

    async def _begin_unload(self) -> None:
        """The guard of this patch is the version of the look before, so a node that changed since is looked at again.

        A pod changes nothing on the node, and an answer may take its time: of one that came meanwhile the watch tells (R1).
        """
        assert self.record is not None
        self.record = replace(self.record, phase=Phase.UNLOADING)
        for _ in range(MAX_ROUNDS):
            change = self._as_recorded(self.writer.node)
            if change is None:
                return
            try:
                await self.writer.write_once(change)
            except NotFound as error:
                raise TakenOver(f"the node {self.writer.node.name} is gone from the cluster") from error
            except (Conflict, Unreachable):  # of a lost answer the look shows what came of it
                await self._look_again()
            else:
                if self._lacks_pods(self.seen):
                    await self._look_again()
                return
        raise Unsettled("the node does not stand still for one write", hint="find out who writes this node all the time")

    # Putting back ---------------------------------------------------------------------------------------------------

    async def restore(self, limit: float) -> None:
        """Takes back what the node's record holds, and proves it by a fresh read (R4).

        Raises:
            DeadlineExceeded: the API server did not take it within `limit` seconds; the record stays. TakenOver.
        """
        began, ours = self.clock.now(), self.record
        reported: tuple[str, ...] = ()
        undone = ours
        whole: Record | None = None
        is_sent = is_let_in = False
        self.writer.may_tell = False
        await self._start_services(limit / 2)  # what is left of the time is the API's

        def build(node: NodeView) -> NodeChange | None:
            nonlocal reported, undone, whole, is_sent
            found = find_record(node).record
            if found is not None and ours is not None and found.run != ours.run and found != self.adopted:
                raise TakenOver(f"run {found.run} has taken over the node {node.name}")
            undone = found or ours
            whole = whole or undone
            # The record goes in the patch that takes everything back: once that was sent and the record is gone, what is there came later.
            if undone is None or (found is None and (is_sent or not leftovers(undone, node))):
                is_told = node.annotations.get(STATUS) == self.status_on_restore
                return None if is_told else NodeChange(annotations={STATUS: self.status_on_restore})
            undo, waits = undo_record(undone, node), None if is_let_in else let_in_next(undone)
            reported, is_sent = reported if is_let_in else undo.left_alone, True
            if waits is None:
                return replace(undo.change, annotations={**undo.change.annotations, STATUS: self.status_on_restore})
            return None if found == waits else replace(undo.change, annotations={**undo.change.annotations, RECORD: encode(waits)})

        def left() -> float:
            return max(1.0, began + limit - self.clock.now()) if limit else 0.0

        node = await self.writer.write(build, "putting the node back", left())
        if (record := find_record(node).record) is not None and record.let_in:
            self.adopted = record
            await let_in(self.cluster, self.clock, self.writer, self.progress, record.let_in, left())
            is_let_in = True
            await self.writer.write(build, "taking the record off", left())
        for sentence in reported:
            self.progress.warn("left as it is", what=sentence)
        node = await self.writer.read(left())
        still = leftovers(whole, node) if whole is not None else ()
        if still and is_sent and find_record(node).record is None:
            self.progress.warn("somebody has changed the node since it was put back", what=", ".join(still))
        elif still:
            raise InvariantBroken(f"after putting it back the node still has {', '.join(still)}", hint="run `driver-manager restore`")
        self.record, self.adopted, self.paused = None, None, {}


def _round_words(found: Round) -> str:
    return named(found.pods) or "none, but a process holds a GPU"


def _with_owners(found: Round) -> str:
    """The pods with who makes them: a DaemonSet's come back as often as they are evicted."""
    words = [f"pod {pod.with_owner}" for pod in found.pods[:5]]
    return ", ".join(words) or "processes that hold a GPU"
