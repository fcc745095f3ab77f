"""The controller's loop: what changed, what to do about it, one guarded write per node; starts are granted in the Lease first.

Everything between two awaits sees one state. A node with a write under way is not decided about again before its answer is there.
"""

import asyncio
import logging
from collections.abc import Collection, Coroutine, Iterable
from dataclasses import replace
from typing import Any, Final

import msgspec

from driver_manager.controller.cache import Cache
from driver_manager.controller.election import Election, is_paused, written_waiting
from driver_manager.controller.grants import Grants
from driver_manager.controller.healing import Healer
from driver_manager.controller.leaving import Leaving
from driver_manager.controller.looks import Looks
from driver_manager.controller.maintenance import Maintenance
from driver_manager.controller.parking import Parking
from driver_manager.controller.parkmarks import Loop
from driver_manager.controller.reminders import Reminders
from driver_manager.controller.restarts import Restarts
from driver_manager.controller.role import RoleWatch
from driver_manager.controller.settings import ControllerSettings
from driver_manager.controller.sight import situation_of
from driver_manager.controller.tasks import Tasks
from driver_manager.controller.telling import Telling
from driver_manager.controller.work import FREED_AT_ONCE, Handlers, Job, Worker
from driver_manager.controller.workers import Workers
from driver_manager.core.agentreport import with_report
from driver_manager.core.budget import Tally, count
from driver_manager.core.enabledmark import with_mark
from driver_manager.core.fleet import FleetPod, Kind
from driver_manager.core.following import follow
from driver_manager.core.policy_groups import Groups, policy_groups
from driver_manager.core.role import Standing
from driver_manager.core.rollout import decide
from driver_manager.core.rollout_record import Progress, encode, progress_of
from driver_manager.core.rollout_states import BEFORE_RESTART, Because, State, state_of
from driver_manager.core.selectors import parse_selector
from driver_manager.core.situation import Decision, Situation, Stay, Turn, Work
from driver_manager.core.snapshot import NodeView
from driver_manager.errors import ClusterError, Conflict, NotFound
from driver_manager.names import PAUSED_ROLLOUT, ROLE, ROLLOUT, UPGRADE_STATE, WAITING
from driver_manager.ports import Clock, Fleet, NodePatch

logger = logging.getLogger(__name__)

WRITES_AT_ONCE: Final = 16
"""While so many have no answer, nothing is decided that might have to wait for its write and be old by then."""
AFTER_ERROR: Final = 2.0
"""Seconds until a node is tried again whose write got no answer."""
AFTER_BUG: Final = 30.0
"""Seconds until a node is tried again about which a decision failed."""
PAUSED: Final = Turn(because=Because.PAUSED, sentence=f"the roll-out is paused by the annotation {PAUSED_ROLLOUT} of the Lease")
OF_TURNS: Final = frozenset({Because.NO_SLOT, Because.PAUSED, Because.GANG_BUSY})
"""Reasons that only another turn can change."""
DECISIONS_AT_ONCE: Final = 100
HEARTBEAT: Final = 10.0
"""The loop comes round so often though nothing changes: `/healthz` asks when it last did."""


class Controller:
    """One life of a leader."""

    def __init__(self, fleet: Fleet, clock: Clock, settings: ControllerSettings, election: Election, telling: Telling) -> None:
        self._fleet, self._clock, self._settings = fleet, clock, settings
        self._election, self._telling = election, telling
        self._handlers = Handlers(fleet, clock.now)
        self.cache = Cache(self._policies_changed)
        self._writing: set[str] = set()
        self._tasks = Tasks(self._broke)
        beside = Loop(self._writing, self._mark, self._tasks.request)
        self.parking = Parking(fleet, clock, settings, election, telling, self.cache, self._tasks.spawn, beside)
        self.role = RoleWatch(fleet, clock, settings, self._role_changed)
        self.healer = Healer(fleet, clock, settings, election, telling, self.cache, self.role, self._remind_in)
        self.tally = Tally()
        self.groups = Groups()
        self.stays: dict[str, Stay] = {}
        """Node -> why it is where it is, as last decided."""
        self.waiting: dict[str, str] = {}
        """Policy group -> why no more of its nodes are begun now."""
        self._dirty: dict[str, None] = {}
        """Nodes to decide about, in order: the same events give the same run."""
        self._reminders = Reminders()
        self._wake = asyncio.Event()
        election.on_edit = self._wake.set
        self._marking: set[str] = set()
        """Nodes that are being written to be in upgrade-required: nobody is begun before they are in the queue too."""
        self._grants = Grants(clock, election)
        self._maintenance = Maintenance(fleet, self.cache, settings.maintenance)
        self._looks = Looks(fleet, self._handlers, settings.agent, self.cache, self.parking, telling, self.situation)
        self._workers = Workers(self._worker, self._tasks.spawn)
        self._leaving = Leaving(
            *(fleet, clock, self.cache, parse_selector(settings.node_selector)),
            is_in_flow=self._is_in_flow,
            stray=self.healer.stray,
            mark=self._mark,
            spawn=self._tasks.spawn,
        )
        may, told, remind = self._may_restart, self._restarted, self._remind
        self._restarts = Restarts(fleet, clock, may=may, told=told, remind=remind, request=self._tasks.request)
        self._asked = 0
        """Writes of nodes that have no answer yet."""
        self._broken: dict[str, float] = {}
        """Node -> when it is touched again, in Unix seconds: something about it ended in an error of the program."""
        self._is_stopping = False
        self._are_policies_new = True

    @property
    def is_settled(self) -> bool:
        """Whether every change that is known of has been decided about."""
        return self._telling.is_synced and not self._dirty and not self._are_policies_new

    # Running --------------------------------------------------------------------------------------------------------

    async def lead(self) -> None:
        """Works without end.

        Raises:
            Forbidden: something may not be followed.
        """
        async with asyncio.TaskGroup() as tasks:
            self._tasks.begin(tasks)
            for kind in Kind:
                tasks.create_task(self._follow(kind))
            tasks.create_task(self.role.run())
            tasks.create_task(self._work())
            tasks.create_task(self.parking.run())

    async def finish(self) -> None:
        """Begins nothing more, and returns when everything under way has its answer."""
        self._is_stopping = True
        self._workers.stop_all()
        await self._tasks.finish()

    async def _follow(self, kind: Kind) -> None:
        async for event in self._fleet.follow(kind):
            if (change := self._leaving.take_in(event)) is not None:
                self._mark(self.cache.apply(change))
                self.parking.wake()

    def _is_in_flow(self, name: str) -> bool:
        known = self.tally.get(name)
        return known is not None and (known.is_working or known.is_ours)

    def _mark(self, names: Iterable[str]) -> None:
        """These nodes are to be decided about."""
        self._dirty.update(dict.fromkeys(sorted(names)))
        self._wake.set()

    def _policies_changed(self) -> None:
        self._are_policies_new = True
        self._wake.set()

    def _role_changed(self, standing: Standing, is_other_role: bool) -> None:
        """What goes on under one role is not for the other: it is begun anew, from what the nodes show."""
        self._telling.role(standing)
        self._election.say(ROLE, standing.text)
        if not is_other_role:
            return
        self._workers.stop_all()
        if self._telling.is_synced:
            self._begin_role()

    def _begin_role(self) -> None:
        """Every node is decided about. Of a leader's memory all stands in the Lease and on the nodes; a follower grants nothing."""
        if self.role.is_leading:
            self._take_over_grants()
        self._mark(self.cache.nodes)

    async def _work(self) -> None:
        """Decides about what has changed, as soon as everything has been listed once and it is known who leads."""
        while not self.cache.is_synced or self.role.standing is None:
            await self._next_change()
        self._begin_role()
        self._telling.synced()
        while not self._is_stopping:
            self._take_policies()
            self._dirty.update(dict.fromkeys(self._reminders.due(self._clock.epoch())))
            await self._decide()
            self._start_nodes()
            self._telling.passed()
            if not self._dirty or not self._has_room:
                await self._next_change()

    async def _next_change(self) -> None:
        pause = min(HEARTBEAT, self._reminders.first - self._clock.epoch())
        waiting = [asyncio.ensure_future(self._wake.wait()), asyncio.ensure_future(self._clock.sleep(max(0.001, pause)))]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waiting:
                each.cancel()
        self._wake.clear()

    def _remind(self, name: str, at: float) -> None:
        if at and self._reminders.put(name, at):
            self._wake.set()

    def _remind_in(self, name: str, seconds: float) -> None:
        self._remind(name, self._clock.epoch() + seconds)

    def _take_policies(self) -> None:
        if not self._are_policies_new:
            return
        self._are_policies_new = False
        sources = self.cache.policies.values()
        cluster_policies = [each for each in sources if each.kind == "ClusterPolicy"]
        drivers = [each for each in sources if each.kind == "NVIDIADriver"]
        groups = policy_groups(cluster_policies, drivers, self._settings.policy)
        if groups != self.groups:
            self.groups = groups
            self._telling.policies(groups)
            self.parking.opt_ins.keep(groups.parked)
            self._dirty.update(dict.fromkeys(self.cache.nodes))

    # Deciding -------------------------------------------------------------------------------------------------------

    @property
    def _has_room(self) -> bool:
        """Whether a write could be made at once."""
        return self._asked < WRITES_AT_ONCE

    async def _decide(self) -> None:
        """Decides about all that has changed. The Lease, probes and answers are not kept waiting by a whole fleet."""
        decided = 0
        while self._dirty and self._has_room and not self._is_stopping:
            self._consider_safely(next(iter(self._dirty)))
            decided += 1
            if decided % DECISIONS_AT_ONCE == 0:
                await asyncio.sleep(0)

    def _consider_safely(self, name: str) -> None:
        """One node's trouble stays its own (R9)."""
        del self._dirty[name]
        try:
            self._consider(name)
        except Exception:
            logger.exception("a decision failed: a bug", extra={"node": name})
            self._broke((name,))

    def _broke(self, names: Collection[str]) -> None:
        """Something about these nodes ended in an error of the program: they are left alone for a while."""
        for name in names:
            self._telling.bug(name)
            self._workers.stop(name)
            self._broken[name] = self._clock.epoch() + AFTER_BUG
            self._remind(name, self._broken[name])

    def _is_left_alone(self, name: str) -> bool:
        """Whether something about the node broke off a moment ago; what was on the way to its start is done again after that."""
        until = self._broken.get(name, 0.0)
        if until > self._clock.epoch():
            self._remind(name, until)
            return True
        if self._broken.pop(name, None) is not None and name in self._grants.starting:
            self._tasks.spawn(self._begin([name]), name)
        return False

    def _consider(self, name: str) -> None:
        node = self.cache.nodes.get(name)
        if node is None:
            self._forget(name)
            self._heal(name)
            return
        situation = self.situation(node)
        self._count(node, situation)  # first of all: a node that is written, or left alone, takes its place too (R7)
        if name in self._writing or self._is_left_alone(name):
            return  # the end of that marks the node again
        decision = self._decided(situation)
        if decision.change:
            patch = NodePatch.guarded(node, decision.change)
            self._writing.add(name)
            if decision.moves and decision.moves[-1].after is State.REQUIRED:
                self._marking.add(name)
            self._asked += 1
            self._tasks.request(self._write(node, patch, situation, decision), name)
            return
        if name in self._grants.granted:  # it cannot be begun after all, and no write of ours is under way
            self._let_go(name)
            self._mark((name,))
        elif decision.rest is not None:
            self._rest(situation, decision.rest)
        self._heal(name)

    def _heal(self, name: str) -> None:
        """Does what is due about what dead agents and ended upgrades left on a node (`controller.healing`)."""
        if name not in self._writing and (step := self.healer.step(name)) is not None:
            self._writing.add(name)
            self._tasks.request(self._healed(name, step), name)

    async def _healed(self, name: str, step: Coroutine[Any, Any, None]) -> None:
        try:
            await step
        finally:
            self._writing.discard(name)
            self._mark((name,))

    def _decided(self, situation: Situation) -> Decision:
        """By the rules of upgrades where ours leads, else by a follower's; a wait for a driver with what its agent says."""
        decision = decide(situation) if self.role.leads(situation) else follow(situation)
        if self.role.is_leading:
            decision = with_mark(situation, decision)
        return replace(decision, rest=with_report(situation, decision.rest))

    def _forget(self, name: str) -> None:
        self._workers.stop(name)
        self.tally.put(name, None)
        for names in (self.stays, self._grants.refused, self._broken):
            names.pop(name, None)
        self._restarts.forget(name)
        self._reminders.drop(name)
        self._let_go(name)
        if self._maintenance.is_served and self._maintenance.of(name) != "missing" and name not in self._writing:
            self._writing.add(name)
            self._tasks.request(self._maintain(name, None, Work.RELEASE_MAINTENANCE), name)

    def situation(self, node: NodeView) -> Situation:
        """All that a decision about a node needs."""
        turn = self._turn(node.name)
        seen = situation_of(node, self.cache, self.groups, self._settings.rollout, self._clock.epoch(), turn)
        if self._maintenance.is_served:
            seen = replace(seen, has_maintenance=True, maintenance=self._maintenance.of(node.name))
        told = self._workers.told(seen, is_following=not self.role.leads(seen))
        return replace(seen, freeing=told.freeing, jobs=told.jobs) if told else seen

    def _turn(self, name: str) -> Turn:
        if self._settings.maintenance.is_on and not self._maintenance.is_served:
            sentence = "the API has no NodeMaintenances: install the maintenance operator, or set MAINTENANCE_OPERATOR_ENABLED=false"
            return Turn(because=Because.MAINTENANCE_OFF, sentence=sentence)
        turn = self._grants.turn(name)
        return replace(turn, hold=self.parking.holds.get(name)) if turn.is_granted else turn

    def _count(self, node: NodeView, situation: Situation) -> None:
        new = count(
            node,
            situation.state,
            situation.progress,
            situation.group,
            wanted=situation.wanted,
            is_granted=self._grants.is_counted(node.name),
            gang_label=self._settings.gang_label,
            order_label=self._settings.order_key,
        )
        self.tally.put(node.name, new if situation.counts else None)

    def _rest(self, situation: Situation, stay: Stay) -> None:
        """The node waits: remember why, wake up in time, and have done what has to be done meanwhile."""
        name = situation.node.name
        if (before := self.stays.get(name)) != stay:
            self.stays[name] = stay
            self._telling.stays(situation.node, stay, before)
        self._remind(name, stay.again_at)
        match stay.work:
            case Work.NOTHING:
                self._workers.stop(name)
            case Work.ASK_MAINTENANCE | Work.RELEASE_MAINTENANCE:
                self._workers.stop(name)
                self._writing.add(name)
                self._tasks.request(self._maintain(name, situation, stay.work), name)
            case Work.RESTART_DRIVER:
                assert stay.pod is not None
                self._workers.stop(name)
                self._restarts.restart(name, stay.pod)
            case _:
                self._workers.have_done(situation, stay.work, is_following=not self.role.leads(situation))

    # Working --------------------------------------------------------------------------------------------------------

    def _worker(self, job: Job) -> Worker:
        budgets, tell, freed = self.cache.budgets, lambda: self._mark((job.node.name,)), self._telling.freed
        settings, may_write = self._settings.agent, self._election.still_leading
        return Worker(self._fleet, self._clock, settings, self._handlers, budgets, job, tell, freed, self.parking, may_write)

    def _restarted(self, name: str, pod: FleetPod) -> None:
        self._telling.restarted(self.cache.nodes.get(name), pod)

    def _may_restart(self, name: str) -> bool:
        node = self.cache.nodes.get(name)
        return node is not None and self._election.still_leading() and self.role.leads(self.situation(node))

    async def _maintain(self, name: str, situation: Situation | None, work: Work) -> None:
        """Asks a maintenance operator for a node, or gives it back; whatever comes of it, the node is decided about again."""
        try:
            if not self._election.still_leading():
                await self._clock.sleep(AFTER_ERROR)
                return
            if work is Work.ASK_MAINTENANCE and situation is not None:
                await self._maintenance.ask(name, situation.in_force)
            else:
                await self._maintenance.give_back(name)
        except ClusterError as error:
            logger.warning("its NodeMaintenance, trying again", extra={"node": name, "work": work, "error": error.message})
            if situation is not None:
                self._telling.maintenance_failed(situation.node, error)
            await self._clock.sleep(AFTER_ERROR)
            await self._maintenance.look_again(name)
        finally:
            self._writing.discard(name)
            self._mark((name,))

    # Writing --------------------------------------------------------------------------------------------------------

    async def _write(self, node: NodeView, patch: NodePatch, situation: Situation, decision: Decision) -> None:
        """One guarded patch; whatever comes of it, the node is decided about again."""
        name = node.name
        try:
            written = await self._patch(patch, is_ours=not decision.moves or self.role.leads(situation))
            if written is None:
                return
            self.cache.put_node(written)
            self.parking.wake()
            self._let_go(name)
            self._grants.refused.pop(name, None)
            self._telling.moved(written, decision, situation, self._workers.evicted(name))
        except Conflict as error:
            await self._after_conflict(node, error)
        except ClusterError as error:  # of a node that is gone the watch tells: an answer alone is not believed
            logger.warning("a node could not be written, trying again", extra={"node": name, "error": error.message})
            await self._clock.sleep(AFTER_ERROR)
            await self._read_again(name)
        finally:
            self._writing.discard(name)
            self._marking.discard(name)
            self._mark((name,))

    async def _patch(self, patch: NodePatch, *, is_ours: bool) -> NodeView | None:
        """The node as it is written; None where nothing may be written any more."""
        try:
            if is_ours and self._election.still_leading():
                return await self._fleet.patch_node(patch)
            await self._clock.sleep(AFTER_ERROR)  # until that is noticed: the node is decided about again after this
            return None
        finally:
            self._asked -= 1
            self._wake.set()

    async def _read_again(self, name: str) -> None:
        try:
            self.cache.put_node(await self._fleet.node(name))
        except ClusterError:
            await self._clock.sleep(AFTER_ERROR)

    async def _after_conflict(self, node: NodeView, error: ClusterError) -> None:
        """Reads what others have written; where nobody has, somebody else refuses (an admission webhook can), and time has to pass."""
        await self._read_again(node.name)
        there = self.cache.nodes.get(node.name)
        if there is not None and there.resource_version == node.resource_version:
            logger.warning("a write is refused as if somebody had written", extra={"node": node.name, "error": error.message})
            await self._clock.sleep(AFTER_ERROR)

    def _let_go(self, name: str) -> None:
        self.parking.holds.pop(name, None)
        self._grants.let_go(name)

    # Starting -------------------------------------------------------------------------------------------------------

    def _take_over_grants(self) -> None:
        """Each node that a predecessor was granted is begun, or written to, so that an old write fails."""
        nodes = self.cache.nodes.items()
        waiting = [name for name, node in nodes if state_of(node.labels.get(UPGRADE_STATE)) is State.REQUIRED]
        if inherited := self._grants.take_over(waiting):
            self._tasks.spawn(self._begin(inherited), *inherited)

    def _start_nodes(self) -> None:
        """Finds out whose turn it is, once all that have to wait are in the queue: the first written need not be the first in order."""
        if self._marking:
            return
        chosen: list[str] = []
        waiting: dict[str, str] = {}
        held: dict[str, Turn] = {}
        for group, sums in list(self.tally.groups().items()):
            if not sums.pending or not self.role.is_leading:
                continue
            if self.is_paused:
                waiting[group] = PAUSED.sentence
                held.update(dict.fromkeys(self.tally.pending(group), PAUSED))
                continue
            if why := self._choose(group, chosen, held):
                waiting[group] = why
        if (before := self._grants.held) != held:
            self._grants.held = held
            self._mark(name for name in {*before, *held} if before.get(name) != held.get(name))
        if waiting != self.waiting:
            self.waiting = waiting
            self._election.say(WAITING, written_waiting(waiting))
            self._telling.waiting(waiting)
        if chosen:
            self._tasks.spawn(self._begin(chosen), *chosen)

    @property
    def is_paused(self) -> bool:
        """Whether a person wants no node to be begun."""
        return is_paused(self._election.lease)

    def _choose(self, group: str, chosen: list[str], held: dict[str, Turn]) -> str:
        """Takes nodes of a group in their order as long as there is room; gives why no more, empty where all have their turn."""
        why = paused = busy = ""
        for name in self.tally.pending(group):
            match self._ask_turn(name, chosen, held):
                case Turn(because=Because.PAUSED, sentence=sentence):  # others may wait for another template
                    paused = sentence
                case Turn(because=Because.GANG_BUSY, sentence=sentence):  # others may be of another gang
                    busy = busy or f"{name} waits: {sentence}"
                case Turn(because=Because.NO_SLOT, sentence=why):
                    break
        if why:
            for name in self.tally.pending_unavailable(group):  # these need less room
                self._ask_turn(name, chosen, held)
        return why or paused or busy

    def _ask_turn(self, name: str, chosen: list[str], held: dict[str, Turn]) -> Turn | None:
        """Takes the node if it is its turn; gives why not, None where that is no question of turns."""
        stay = self.stays.get(name)
        node = self.cache.nodes.get(name)
        if node is None or name in self._grants.starting or name in self._writing or stay is None or stay.because not in OF_TURNS:
            return None
        policy = self.groups.of(node.labels).policy
        if policy is None or self.tally.get(name) is None:
            return None
        if len(self._grants.starting) + self.tally.in_states(BEFORE_RESTART) >= FREED_AT_ONCE:
            return Turn(sentence=f"{FREED_AT_ONCE} nodes are being freed, and no more than that are at once")
        turn = self.tally.turn(name, policy, self._settings.cluster_max_unavailable, self._settings.most_failures)
        if not turn.is_granted:
            if turn.because is not Because.NO_SLOT:
                held[name] = turn
            return turn
        chosen.append(name)
        self._grants.starting.add(name)
        self._count(node, self.situation(node))
        return None

    async def _begin(self, names: list[str]) -> None:
        """Looks at the pods of nodes whose turn it is, and grants those that nothing stands in the way of, in one write."""
        if not self.role.is_leading:
            self._grants.starting.difference_update(names)  # what a predecessor granted stays said until ours leads again
            self._mark(names)
            return
        refusals = await asyncio.gather(*(self._looks.at(name) for name in names))
        fine = [name for name, refusal in zip(names, refusals, strict=True) if refusal is None]
        for name, refusal in zip(names, refusals, strict=True):
            if refusal is not None:
                self._refuse(name, refusal)
        try:
            if fine:
                self._grants.say(fine)
                await self._election.write()
                self._grants.grant(fine)
        except ClusterError as error:
            logger.warning("starts could not be granted, trying again", extra={"nodes": fine, "error": error.message})
            # The write may have been taken, so what it says stays said until the nodes show something else.
            await self._clock.sleep(AFTER_ERROR)
            self._tasks.spawn(self._begin(fine), *fine)
            return
        self._mark(names)

    def _refuse(self, name: str, sentence: str) -> None:
        """Nothing is done to the node; it is looked at again later."""
        self._remind(name, self._grants.refuse(name, sentence))
        if name in self._grants.inherited and name in self.cache.nodes:
            self._tasks.request(self._void(self.cache.nodes[name]), name)
        else:
            self._let_go(name)
            self._mark((name,))

    async def _void(self, node: NodeView) -> None:
        """Writes to a node that a predecessor was granted and that is not begun: a late write of that one fails by its version."""
        while not self._election.still_leading():  # until that is noticed, and the next leader inherits the grant
            await self._clock.sleep(AFTER_ERROR)
        if not self.role.is_leading:
            return
        name = node.name
        progress = progress_of(node)[0] or Progress(node=node.uid)
        said = msgspec.structs.replace(progress, since=self._clock.epoch(), reason=Because.BLOCKED_BY_POD.value)
        patch = NodePatch(name=name, resource_version=node.resource_version, annotations={ROLLOUT: encode(said)})
        try:
            self.cache.put_node(await self._fleet.patch_node(patch))
        except (Conflict, NotFound) as error:  # the late write has come, or somebody else's: what is there now decides
            await self._after_conflict(node, error)
        except ClusterError:
            await self._clock.sleep(AFTER_ERROR)
            await self._read_again(name)
        else:
            self._let_go(name)
        still = self.cache.nodes.get(name)
        if still is None or state_of(still.labels.get(UPGRADE_STATE)) is not State.REQUIRED:
            self._let_go(name)
        elif name in self._grants.inherited:
            self._tasks.request(self._void(still), name)
        self._mark((name,))
