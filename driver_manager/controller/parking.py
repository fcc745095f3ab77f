"""Parking, as far as it needs the API: which DaemonSets may be parked, the proof that they are kept off, and nobody stays gated or held up.

Putting a park on a node and taking it off is part of the roll-out's own node patches (`core.parking`). What is done here needs no memory:
a pod with our gate whose node is not parked for its DaemonSet is let go by whoever leads and sees it (decision 44).
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine
from typing import Any, Final

from driver_manager.controller.cache import Cache
from driver_manager.controller.election import Election
from driver_manager.controller.optins import OptIns
from driver_manager.controller.parkmarks import Loop, ParkMarks
from driver_manager.controller.settings import ControllerSettings
from driver_manager.controller.telling import Telling
from driver_manager.controller.templates import Templates
from driver_manager.core.fleet import FleetPod, FleetSet
from driver_manager.core.hold import MAX_PARKED, Hold, parked_on
from driver_manager.core.parking import (
    MOST_PARKED_NODES,
    TOO_MANY_PARKED,
    Means,
    Tried,
    held_up,
    is_parked_for,
    means_for,
    woken,
)
from driver_manager.core.parking_notices import Notice, node_notice, parked_owners, set_notices, still_told
from driver_manager.core.parking_term import leaves_parked_nodes
from driver_manager.core.rollout_record import progress_of
from driver_manager.core.snapshot import NodeView, PodView
from driver_manager.core.upgrade_policy import UpgradePolicy
from driver_manager.errors import ClusterError, Conflict, NotFound, Refused
from driver_manager.names import PARKED
from driver_manager.ports import Clock, Fleet, NodePatch

logger = logging.getLogger(__name__)

ASK_AGAIN: Final = 60.0
"""Seconds for which it is believed that the admission policies are there, or that they do not work."""
ASK_SOON: Final = 10.0
"""Seconds for which it is believed that they are not there."""
PROOF_SECONDS: Final = 10.0
"""For so long a probe may still be let in after a park: it takes about 25 ms, and a second for a new policy (measured)."""
NO_POLICY: Final = "no admission policy for that is in the cluster (kubectl apply -f deploy/parking)"
TEMPLATES_OFF: Final = "without one TEMPLATE_PARKING=true has the DaemonSet's own template changed, which restarts all of its pods once"
FIRST_PAUSE: Final = 0.05
LONGEST_PAUSE: Final = 1.0
HELD_UP_SECONDS: Final = 2.0
"""A pod that a neighbour lacks for longer has its DaemonSet controller woken, and again after as long."""
IDLE: Final = 3600.0
AT_ONCE: Final = 8

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
"""Has something run beside the loop."""


class Parking:
    """The leader's."""

    def __init__(
        self,
        fleet: Fleet,
        clock: Clock,
        settings: ControllerSettings,
        election: Election,
        telling: Telling,
        cache: Cache,
        spawn: Spawn,
        loop: Loop,
    ) -> None:
        self._fleet, self._clock, self._settings = fleet, clock, settings
        self._election, self._telling, self._cache = election, telling, cache
        self.opt_ins = OptIns(fleet, cache, spawn, self.wake)
        self._templates = Templates(fleet, clock, election, settings.lease_namespace)
        self._wake = asyncio.Event()
        self._is_served, self._believed_until = False, 0.0
        self._refuted, self._refuted_until = "", 0.0
        self._lacking: dict[str, float] = {}
        """DaemonSet -> since when pods of it are held up, or when it was woken last."""
        self._told: set[Notice] = set()
        self.holds: dict[str, Hold] = {}
        """Node that may be begun -> what has to keep DaemonSets off it from its cordon on."""
        self.ungated = self.woken = 0
        """Gated pods that were let go, and DaemonSet controllers that were woken for neighbours."""
        self._slots = asyncio.Semaphore(AT_ONCE)
        self.marks = ParkMarks(fleet, clock, settings, election, cache, self._policies, loop)

    # Before ---------------------------------------------------------------------------------------------------------

    async def means(self, node: NodeView, policy: UpgradePolicy) -> Means:
        """What there is to keep a DaemonSet off a node that is upgraded under a policy."""
        named = policy.pod_deletion.park
        opted_in = await self.opt_ins.of(named)
        return means_for(
            node,
            opted_in=opted_in,
            named=named,
            operator_sets=self._cache.sets.values(),
            own_namespace=self._settings.lease_namespace,
            why_not=await self._policies() if opted_in else "",
            unchanged=self._templates.why_not,
            is_full=bool(opted_in) and len(self.parked_nodes()) >= MOST_PARKED_NODES,
        )

    def plan(self, name: str, hold: Hold, *, has_maintenance: bool) -> str:
        """Remembers a hold for the node's cordon; gives why the node cannot be begun where that is too much, else nothing."""
        parked = self.parked_nodes() | {other for other, held in self.holds.items() if held.parked}
        if hold.parked and has_maintenance:
            return f"{', '.join(sorted(hold.parked))} cannot be parked where a maintenance operator frees the nodes"
        if len(hold.parked) > MAX_PARKED:
            return TOO_MANY_PARKED
        if hold.parked and len(parked - {name}) >= MOST_PARKED_NODES:
            return f"{MOST_PARKED_NODES} nodes are parked, and it needs that too: it waits for one of them"
        self.holds[name] = hold
        return ""

    def parked_nodes(self) -> set[str]:
        """Names of the nodes that are parked for somebody."""
        return {name for name, node in self._cache.nodes.items() if PARKED in node.labels}

    async def _policies(self) -> str:
        """Why no admission policy can be relied on; empty where one is there, and no proof has failed of late."""
        if not await self._has_policy():
            return NO_POLICY if self._settings.template_parking else f"{NO_POLICY}; {TEMPLATES_OFF}"
        return self._refuted if self._clock.now() < self._refuted_until else ""

    async def _has_policy(self) -> bool:
        now = self._clock.now()
        if now >= self._believed_until:
            self._is_served = await self._fleet.has_parking_policy()
            self._believed_until = now + (ASK_AGAIN if self._is_served else ASK_SOON)
        return self._is_served

    async def prove(self, node_name: str, owners: Collection[str]) -> None:
        """Returns when pods of these DaemonSets would be kept off the node, by a dry run: nobody is evicted before that.

        Those whose template leaves parked nodes need no proof.

        Raises:
            Refused: they would be let in.
        """
        deadline, pause = self._clock.now() + PROOF_SECONDS, FIRST_PAUSE
        leaving = {each.ref for each in self.opt_ins.all() if leaves_parked_nodes(each)}
        for owner in sorted({*owners} - leaving):
            while await self._fleet.try_pod(self._settings.lease_namespace, owner, node_name) is Tried.LET_IN:
                if self._clock.now() > deadline:
                    if owner not in parked_on(await self._fleet.node(node_name)):
                        raise Refused(f"somebody took off {node_name} that it is parked for {owner}: that says nothing of the policies")
                    self._refuted = f"the admission policy let a pod of {owner} onto {node_name} though it was parked"
                    self._refuted_until = self._clock.now() + ASK_AGAIN
                    raise Refused(self._refuted)
                await self._clock.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)

    # Meanwhile and after --------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Something has changed that may concern parked pods, or the marks."""
        self.marks.wake()
        if self._cache.gated or self._cache.parkable or self.opt_ins.names:
            self._wake.set()

    async def run(self) -> None:
        """Works without end."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.marks.run())
            tasks.create_task(self._let_in_and_heal())

    async def _let_in_and_heal(self) -> None:
        pause = IDLE
        while True:
            await self._rest(pause)
            self._wake.clear()
            self._tell()
            await self._change_templates()
            stuck = [pod for pod in self._cache.gated.values() if self._is_stuck(pod)]
            await asyncio.gather(*(self._let_go(pod) for pod in stuck))
            self.opt_ins.let_go()
            sets = {each.ref: each for each in self.opt_ins.all()}
            self._lacking = {ref: since for ref, since in self._lacking.items() if ref in sets}
            for daemon_set in sets.values():
                await self._heal(daemon_set)
            pause = self._pause(pause, is_busy=bool(stuck))

    async def _change_templates(self) -> None:
        """Where there is no admission policy and the settings allow it. One that does not work is to be mended."""
        sets = self.opt_ins.asking() if self._settings.template_parking else []
        try:
            await self._templates.prepare([] if sets and await self._has_policy() else sets)
        except ClusterError as error:
            logger.warning("whether there are admission policies is not known, trying again", extra={"error": error.message})

    def _pause(self, before: float, *, is_busy: bool) -> float:
        if is_busy:
            return min(2 * before, LONGEST_PAUSE) if before < IDLE else FIRST_PAUSE
        if self._lacking:
            return LONGEST_PAUSE
        return ASK_SOON if self._settings.template_parking else IDLE

    async def _rest(self, pause: float) -> None:
        waiting = [asyncio.ensure_future(self._wake.wait()), asyncio.ensure_future(self._clock.sleep(pause))]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waiting:
                each.cancel()

    def _is_stuck(self, pod: FleetPod) -> bool:
        return pod.is_gated and not pod.is_terminating and not is_parked_for(pod, self._cache.nodes.get(pod.node_name))

    async def _let_go(self, pod: FleetPod) -> None:
        """Evicts a gated pod (no budget is asked for one) once its successor would come without the gate."""
        try:
            async with self._slots:
                if pod.owner is not None:
                    owner = f"{pod.namespace}/{pod.owner.name}"
                    if await self._fleet.try_pod(self._settings.lease_namespace, owner, pod.node_name) is Tried.GATED:
                        return  # the policy does not know yet: looked at again
                if not self._election.still_leading():
                    return
                await self._fleet.evict(PodView(namespace=pod.namespace, name=pod.name, uid=pod.uid))
                self.ungated += 1
                logger.info("a gated pod is let go", extra={"pod": pod.ref, "node": pod.node_name})
        except (NotFound, Conflict):
            pass  # it is gone: the watch tells
        except ClusterError as error:
            logger.warning("a gated pod could not be let go, trying again", extra={"pod": pod.ref, "error": error.message})

    async def _heal(self, daemon_set: FleetSet) -> None:
        """Wakes the DaemonSet controller where it pauses after refusals and pods on nodes that are not parked are missing for that."""
        ref, now = daemon_set.ref, self._clock.now()
        parked = [node for node in self._cache.nodes.values() if ref in parked_on(node)] if daemon_set.missing else []
        if not parked or not held_up(daemon_set, parked):
            self._lacking.pop(ref, None)
            return
        if now - self._lacking.setdefault(ref, now) < HELD_UP_SECONDS or not self._election.still_leading():
            return
        self._lacking[ref] = now
        node = parked[0]
        try:
            patch = NodePatch(name=node.name, resource_version=node.resource_version, labels=woken(node).labels)
            self._cache.put_node(await self._fleet.patch_node(patch))
            self.woken += 1
            logger.info("pods of a parked DaemonSet are held up on other nodes: its controller is woken", extra={"daemonset": ref})
        except ClusterError as error:
            logger.debug("a DaemonSet's controller could not be woken", extra={"daemonset": ref, "error": error.message})

    def _tell(self) -> None:
        """Tells once what a person should know of: opt-ins that are refused, updates that wait, foreign entries."""
        nodes, sets = self._cache.nodes.values(), self.opt_ins.all()
        now = {found for node in nodes if (found := node_notice(node, progress_of(node)[0], self.marks.probe)) is not None}
        now |= set_notices(
            sets,
            named=self.opt_ins.named,
            missing=self.opt_ins.missing,
            parked=parked_owners(nodes),
            own_namespace=self._settings.lease_namespace,
        )
        for notice in sorted(now - self._told, key=lambda each: (each.about, each.sentence)):
            self._telling.parking(notice)
        self._told = now | still_told(self._told, sets)
