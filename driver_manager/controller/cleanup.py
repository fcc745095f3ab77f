"""Taking everything of ours off a cluster: `driver-manager cleanup`. What is done to a node is `core.cleanup`'s affair; here is the order.

Un-park, let in who was kept off, take the term for parking out of templates, take the records of dead agents over, wait, then one guarded
change for each node. It may be killed anywhere and begun again. While it works it holds the controllers' Lease, so that none begins to
lead. What is not on nodes (admission policies, the controller itself) is made by manifests and goes with them: it is named at the end,
when nobody needs it any more.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

from driver_manager.controller.election import Election, LostLease
from driver_manager.controller.settings import ControllerSettings
from driver_manager.core.cleanup import NodeCleanup, clean, has_to_be_claimed, keeps_parked, may_live, unpark
from driver_manager.core.fleet import FleetPod, Kind, Listed
from driver_manager.core.record import NodeChange, encode, find_record
from driver_manager.core.remains import applied
from driver_manager.core.snapshot import NodeView, PodView
from driver_manager.errors import ClusterError, Conflict, NotFound, Refused, TakenOver, Unsettled
from driver_manager.names import OPERATOR_LEASE, RECORD
from driver_manager.ports import Clock, Fleet, NodePatch
from driver_manager.together import each_of

TRIES: Final = 5
"""How often a node that others write meanwhile is looked at again."""
AT_ONCE: Final = 8
LOOK_EVERY: Final = 1.0
MAX_NAMED: Final = 5
LET_IN_SECONDS: Final = 60.0
"""For so long gated pods of nodes that are parked no more are evicted, until none is left."""


@dataclass(slots=True)
class Cleaned:
    """What was done, or would be."""

    done: dict[str, list[str]] = field(default_factory=dict)
    """Node -> in words."""
    left: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Node, or empty for the cluster -> what stays, and why."""
    templates: tuple[str, ...] = ()
    """DaemonSets whose template loses the term for parking, `namespace/name`."""


class Cleanup:
    """One cleaning of a cluster.

    Args:
        fleet: sees every node, whatever its labels.
        clock: ours.
        settings: where the Lease is, and the pause before an undo.
    """

    def __init__(self, fleet: Fleet, clock: Clock, settings: ControllerSettings) -> None:
        self._fleet, self._clock, self._settings = fleet, clock, settings
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._is_state_ours = True
        self._election: Election | None = None

    async def plan(self) -> Cleaned:
        """What would be done. Changes nothing.

        Raises:
            Refused: a controller leads. TakenOver: an agent lives. ClusterError.
        """
        where = self._settings
        if leads := await self._holder(where.lease_namespace, where.lease_name):
            raise self._refused(leads)
        return await self._planned()

    def _refused(self, leads: str) -> Refused:
        where = self._settings
        hint = f"end it first: kubectl scale -n {where.lease_namespace} deploy/driver-manager-controller --replicas=0"
        return Refused(f"a controller leads: {leads} renews the Lease {where.lease_namespace}/{where.lease_name}", hint=hint)

    async def _planned(self) -> Cleaned:
        self._is_state_ours = not await self._holder(self._settings.operator_namespace, OPERATOR_LEASE)
        nodes = await self._nodes()
        await self._nobody_lives(nodes)
        cleaned = Cleaned(templates=tuple(sorted(each.ref for each in await self._fleet.sets_with_parking_term())))
        if cluster := tuple(await self._cluster(nodes)):
            cleaned.left[""] = cluster
        for node in nodes:
            first = unpark(node)
            parts = (first, clean(applied(node, first.change), is_state_ours=self._is_state_ours))
            self._note(cleaned, node.name, parts)
        return cleaned

    async def run(self) -> Cleaned:
        """Does it.

        Raises:
            Refused, TakenOver, ClusterError: as `plan`; nothing has been changed. Unsettled: others undo it as often as it is done.
        """
        await self._take_lease()
        keeping = asyncio.ensure_future(self._keep_lease())
        work = asyncio.ensure_future(self._work())
        try:
            await asyncio.wait({keeping, work}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                keeping.result()
            return work.result()
        finally:
            for task in (work, keeping):
                task.cancel()
            await asyncio.wait({work, keeping})
            await self._give_lease_back()

    async def _work(self) -> Cleaned:
        planned = await self._planned()
        return replace(planned, left=await self._stages())

    async def _stages(self) -> dict[str, tuple[str, ...]]:
        nodes = [node.name for node in await self._nodes()]
        await self._each(nodes, lambda node: unpark(node).change)
        await self._let_in()
        await self._take_terms_out()
        claims: dict[str, str] = {}
        await self._each(nodes, lambda node: self._claim(node, claims))
        if claims:
            await self._clock.sleep(self._settings.heal_pause)
        await self._each(nodes, lambda node: self._cleaned(node, claims))
        return await self._look()

    async def _let_in(self) -> None:
        """Evicts the pods that were kept off, now that no node is parked: their successors are let in (decision 44).

        Raises:
            Unsettled: some are still there.
        """
        until = self._clock.now() + LET_IN_SECONDS
        kept = {(node.name, owner) for node in await self._nodes() for owner in keeps_parked(node)}
        while pods := await self._gated(kept):
            if self._clock.now() > until:
                hint = "look why they are not let in: the admission policies of deploy/parking, and who parks"
                raise Unsettled(f"pods are still kept off: {_some([pod.ref for pod in pods])}", hint=hint)
            for pod in pods:
                self._still_alone()
                with suppress(NotFound, Conflict):
                    await self._fleet.evict(PodView(namespace=pod.namespace, name=pod.name, uid=pod.uid))
            await self._clock.sleep(LOOK_EVERY)

    async def _take_terms_out(self) -> None:
        """Takes the term for parking out of the templates that the controller has put it into; each then rolls once."""
        for _ in range(TRIES):
            for each in await self._fleet.sets_with_parking_term():
                self._still_alone()
                with suppress(NotFound, Conflict):
                    await self._fleet.set_parking_term(each, is_in=False)
        if left := [each.ref for each in await self._fleet.sets_with_parking_term()]:
            what = f"the templates of {_some(left)} do not stand still for one write"
            raise Unsettled(what, hint="find out who writes them all the time")

    async def _gated(self, kept: Collection[tuple[str, str]]) -> list[FleetPod]:
        """The pods that are kept off, but for those of (node, DaemonSet) that a run keeps off whose record stays."""
        pods = [pod for pod in await self._listed(Kind.GATED_PODS) if isinstance(pod, FleetPod)]
        return [pod for pod in pods if pod.is_gated and not pod.is_terminating and (pod.node_name, pod.owner_ref) not in kept]

    async def _cluster(self, nodes: Iterable[NodeView]) -> list[str]:
        """What is ours and not on nodes."""
        left = []
        if await self._fleet.has_parking_policy():
            parked = [node.name for node in nodes if keeps_parked(node)]
            need = f"which runs on {_some(parked)} still need, then" if parked else "which now keep nobody off:"
            left.append(f"the admission policies of deploy/parking, {need} kubectl delete -f deploy/parking")
        lease = await self._fleet.lease(self._settings.lease_namespace, self._settings.lease_name)
        if lease.resource_version:
            left.append(f"the Lease {lease.namespace}/{lease.name}, and all of deploy/controller: kubectl delete -f deploy/controller")
        return left

    def _claim(self, node: NodeView, claims: dict[str, str]) -> NodeChange:
        """Takes a record over, so that an agent that lives after all stops before its next step (decision 36)."""
        record = has_to_be_claimed(node)
        if record is None or record.run == claims.get(node.name):
            return NodeChange()
        claims[node.name] = self._clock.run_id()
        return NodeChange(annotations={RECORD: encode(replace(record, run=claims[node.name]))})

    def _cleaned(self, node: NodeView, claims: dict[str, str]) -> NodeChange:
        record = has_to_be_claimed(node)
        if record is not None and record.run != claims.get(node.name):
            raise TakenOver(f"node {node.name}: run {record.run} has begun there meanwhile", hint="begin again when it has ended")
        return clean(node, is_state_ours=self._is_state_ours).change

    async def _look(self) -> dict[str, tuple[str, ...]]:
        """What is left, by a fresh read (R4)."""
        nodes = await self._nodes()
        cluster = tuple(await self._cluster(nodes))
        left = {"": cluster} if cluster else {}
        again = []
        for node in nodes:
            rest = clean(node, is_state_ours=self._is_state_ours)
            if not (rest.is_nothing and unpark(node).is_nothing) and not _is_only_rest(node, rest):
                again.append(node.name)
            if rest.left:
                left[node.name] = rest.left
        if again:
            raise Unsettled(f"somebody has written again to {_some(again)}", hint="find out who works there, and begin again")
        return left

    # Looking --------------------------------------------------------------------------------------------------------

    async def _nodes(self) -> list[NodeView]:
        """All nodes of the cluster."""
        items = await self._listed(Kind.NODES)
        return sorted((item for item in items if isinstance(item, NodeView)), key=lambda node: node.name)

    async def _listed(self, kind: Kind) -> Sequence[object]:
        events = self._fleet.follow(kind)
        event = await anext(aiter(events))
        if isinstance(events, AsyncGenerator):
            await events.aclose()
        return event.items if isinstance(event, Listed) else ()

    async def _nobody_lives(self, nodes: Iterable[NodeView]) -> None:
        async def why(node: NodeView) -> str:
            async with self._slots:
                return may_live(node, (await self._fleet.pods_on(node.name)).items)

        with_record = [node for node in nodes if find_record(node).record is not None]
        reasons = await each_of(why(node) for node in with_record)
        alive = [f"{node.name}: {reason}" for node, reason in zip(with_record, reasons, strict=True) if reason]
        if alive:
            raise TakenOver(f"an agent may be at work on {_some(alive)}", hint="let it end, or delete its pod for good, and begin again")

    async def _holder(self, namespace: str, name: str) -> str:
        """Who renews a Lease; empty for nobody. Clocks of two machines are not compared, so this takes the Lease's duration."""
        lease = await self._fleet.lease(namespace, name)
        if not lease.holder:
            return ""
        until = self._clock.now() + lease.lasts + LOOK_EVERY
        while self._clock.now() < until:
            await self._clock.sleep(LOOK_EVERY)
            again = await self._fleet.lease(namespace, name)
            if (again.holder, again.renewed) != (lease.holder, lease.renewed):
                return again.holder
        return ""

    def _note(self, cleaned: Cleaned, name: str, parts: Sequence[NodeCleanup]) -> None:
        if done := [word for part in parts for word in part.done]:
            cleaned.done[name] = done
        if left := tuple(word for part in parts for word in part.left):
            cleaned.left[name] = left

    # Writing --------------------------------------------------------------------------------------------------------

    async def _each(self, names: Sequence[str], change: Callable[[NodeView], NodeChange]) -> None:
        await each_of(self._write(name, change) for name in names)

    async def _write(self, name: str, change: Callable[[NodeView], NodeChange]) -> None:
        """One guarded write of a node; nothing where nothing is to be changed."""
        for _ in range(TRIES):
            try:
                async with self._slots:
                    node = await self._fleet.node(name)
                    wanted = change(node)
                    if NodeCleanup(wanted).is_nothing or _is_only_rest(node, NodeCleanup(wanted)):
                        return
                    self._still_alone()
                    await self._fleet.patch_node(NodePatch.guarded(node, wanted))
                    return
            except Conflict:
                continue
            except NotFound:
                return
        raise Unsettled(f"the node {name} does not stand still for one write", hint="find out who writes this node all the time")

    # The Lease ------------------------------------------------------------------------------------------------------

    async def _take_lease(self) -> None:
        where = self._settings
        lease = await self._fleet.lease(where.lease_namespace, where.lease_name)
        if not lease.resource_version:
            return  # no controller has ever led from there, and none is made for this
        election = Election(self._fleet, self._clock, where)
        try:
            async with asyncio.timeout(max(lease.lasts, where.lease_duration) + 3 * where.retry_period):
                await election.win()
        except TimeoutError as error:
            again = await self._fleet.lease(where.lease_namespace, where.lease_name)
            if (again.holder, again.renewed) != (lease.holder, lease.renewed):
                raise self._refused(again.holder) from error
            hint = "the account has to be allowed to update it"
            raise Refused(f"the Lease {where.lease_namespace}/{where.lease_name} could not be taken", hint=hint) from error
        self._election = election

    async def _keep_lease(self) -> None:
        if self._election is None:
            await asyncio.Event().wait()
            return
        try:
            await self._election.keep()
        except LostLease as error:
            raise TakenOver(f"the Lease is lost: {error}", hint="end the controller, and begin again") from error

    def _still_alone(self) -> None:
        if self._election is not None and not self._election.still_leading():
            raise TakenOver("the Lease could not be renewed", hint="begin again")

    async def _give_lease_back(self) -> None:
        if self._election is not None:
            with suppress(ClusterError):
                await self._election.resign()


def _is_only_rest(node: NodeView, cleanup: NodeCleanup) -> bool:
    """Whether a record is already down to what only the node itself can undo."""
    change = cleanup.change
    is_more = change.labels or change.unschedulable is not None or change.taints is not None or set(change.annotations) - {RECORD}
    return not is_more and change.annotations.get(RECORD) == node.annotations.get(RECORD)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return "; ".join(names[:MAX_NAMED]) + more
