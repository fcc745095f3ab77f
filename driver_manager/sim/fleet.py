"""The Fleet port on the simulated server, as one account sees it in one life."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Final

from driver_manager.core.fleet import (
    Changed,
    EventNote,
    FleetEvent,
    FleetSet,
    Item,
    Kind,
    LeaseView,
    Listed,
    MaintenanceOrder,
    MaintenanceView,
    NotServed,
    PolicySource,
)
from driver_manager.core.parking import Tried
from driver_manager.core.snapshot import ChangeKind
from driver_manager.errors import ClusterError, Conflict, Forbidden, NotFound, Unreachable
from driver_manager.names import PARKING_TERM
from driver_manager.sim import access, maintenances
from driver_manager.sim.cluster import SimCluster
from driver_manager.sim.faults import Life
from driver_manager.sim.feeds import Channel, Feeds, Scope
from driver_manager.sim.objects import Account
from driver_manager.sim.server import Server

SERVED_AGAIN: Final = 60.0
"""Seconds until a kind that is not served is looked for again."""
LONGEST_SENTENCE: Final = 1024
"""Bytes of an Event's sentence."""
LIST_AGAIN: Final = 0.5
"""Seconds until a failed list is tried again."""
RESOURCES: Final = {
    Kind.NODES: ("", "nodes"),
    Kind.DAEMON_SETS: ("apps", "daemonsets"),
    Kind.REVISIONS: ("apps", "controllerrevisions"),
    Kind.DRIVER_PODS: ("", "pods"),
    Kind.VALIDATOR_PODS: ("", "pods"),
    Kind.PARKABLE_SETS: ("apps", "daemonsets"),
    Kind.GATED_PODS: ("", "pods"),
    Kind.CLUSTER_POLICIES: ("nvidia.com", "clusterpolicies"),
    Kind.NVIDIA_DRIVERS: ("nvidia.com", "nvidiadrivers"),
    Kind.BUDGETS: ("policy", "poddisruptionbudgets"),
    Kind.MAINTENANCES: ("maintenance.nvidia.com", "nodemaintenances"),
    Kind.SLICES: ("resource.k8s.io", "resourceslices"),
}
IN_A_NAMESPACE: Final = frozenset({Kind.DAEMON_SETS, Kind.REVISIONS, Kind.DRIVER_PODS, Kind.VALIDATOR_PODS, Kind.MAINTENANCES})
POLICY_RESOURCES: Final = {"ClusterPolicy": "clusterpolicies", "NVIDIADriver": "nvidiadrivers"}


class SimFleet(SimCluster):
    """The API server, as the controller sees it.

    Args:
        server: of the world.
        feeds: the watches of the world.
        account: whose.
        life: of the program.
        scope: what the controller is set to look at.
        request_timeout: seconds after which a request without an answer ends.
        served_again: seconds until a kind that is not served is looked for again.
    """

    def __init__(
        self,
        server: Server,
        feeds: Feeds,
        account: Account,
        life: Life,
        scope: Scope | None = None,
        *,
        request_timeout: float = 10.0,
        served_again: float = SERVED_AGAIN,
    ) -> None:
        super().__init__(server, account, life, request_timeout)
        self._served_again = served_again
        self.scope = scope or Scope()
        self._feeds = feeds

    async def follow(self, kind: Kind) -> AsyncGenerator[FleetEvent, None]:
        """Follows all objects of a kind without end."""
        if kind is Kind.MAINTENANCES and not self.scope.maintenances:
            yield NotServed(kind)
            await asyncio.get_running_loop().create_future()  # nothing changes that
        async with aclosing(self._follow(kind, self.scope)) as events:
            async for event in events:
                yield event

    async def follow_set(self, ref: str) -> AsyncGenerator[FleetSet | None, None]:
        """Follows one DaemonSet without end."""
        self._store.reported_sets.add(ref)
        async with aclosing(self._follow(Kind.PARKABLE_SETS, replace(self.scope, named_set=ref))) as events:
            async for event in events:
                match event:
                    case Listed(_, items):
                        found = next(iter(items), None)
                    case Changed(_, change, item):
                        found = item if change is ChangeKind.SEEN else None
                    case NotServed():
                        found = None
                assert found is None or isinstance(found, FleetSet)
                yield found

    async def _follow(self, kind: Kind, scope: Scope) -> AsyncGenerator[FleetEvent, None]:
        was_served = True
        while True:
            opened = await self._open(kind, scope)
            if opened is None:
                if was_served:
                    yield NotServed(kind)
                was_served = False
                await self._life.sleep(self._served_again)
                continue
            was_served = True
            channel, items = opened
            self._life.on_death(partial(self._feeds.close, channel))
            try:
                yield Listed(kind, items)
                while not channel.is_broken:
                    while (event := channel.arrived()) is not None:
                        await self._gate("follow.next", {"kind": kind})
                        yield event
                    await channel.wait()
                    await self._life.sleep(channel.pause or 0.0)
            finally:
                self._feeds.close(channel)

    async def _open(self, kind: Kind, scope: Scope) -> tuple[Channel, tuple[Item, ...]] | None:
        """Lists, as often as it takes; None where the kind is not served.

        Raises:
            Forbidden.
        """
        while True:
            try:
                return await self._list_and_watch(kind, scope)
            except Forbidden:
                raise
            except ClusterError as error:
                pause = error.retry_after if isinstance(error, Unreachable) else 0.0
                await self._life.sleep(pause or LIST_AGAIN)

    async def _list_and_watch(self, kind: Kind, scope: Scope) -> tuple[Channel, tuple[Item, ...]] | None:
        pause = self._server.watches_back - self._store.timers.now()
        if pause > 0:
            await self._life.sleep(pause)
        await self._gate("follow", {"kind": kind})
        await self._life.sleep(self._store.latencies.request / 2)
        self._server.reach()
        group, resource = RESOURCES[kind]
        namespace = scope.maintenances if kind is Kind.MAINTENANCES else scope.namespace
        namespace = namespace if kind in IN_A_NAMESPACE else ""
        if kind in self._feeds.not_served:
            return None
        access.demand(self.account, "list", group, resource, namespace)
        access.demand(self.account, "watch", group, resource, namespace)
        opened = self._feeds.open(kind, scope)
        await self._life.sleep(self._store.latencies.request / 2)
        return opened

    async def delete_pod(self, namespace: str, name: str, uid: str) -> None:
        """Deletes exactly this pod with its own grace."""

        def write() -> None:
            self._server.delete_exactly(self.account, namespace, name, uid)

        await self._call("delete_pod", {"pod": f"{namespace}/{name}"}, write, is_write=True)

    async def has_parking_policy(self) -> bool:
        """Whether an admission policy is there."""

        def read() -> bool:
            access.demand(self.account, "get", "admissionregistration.k8s.io", "mutatingadmissionpolicies")
            return bool(self._server.parking.ways)

        return await self._call("has_parking_policy", {}, read)

    async def set_parking_term(self, daemon_set: FleetSet, *, is_in: bool) -> None:
        """Puts the term by which its pods leave parked nodes into a DaemonSet's template, or takes it out."""

        def write() -> None:
            for verb in ("get", "patch"):
                access.demand(self.account, verb, "apps", "daemonsets", daemon_set.namespace, daemon_set.name)
            there = self._store.daemon_sets.get(daemon_set.ref)
            if there is None:
                raise NotFound(f'daemonsets.apps "{daemon_set.name}" not found')
            if there.uid != daemon_set.uid:
                raise Conflict(f"DaemonSet {daemon_set.ref}: it was made anew meanwhile, under another uid")
            self._store.did(self.account.name, "term", there.ref, uid=there.uid, detail=is_in)
            self._server.set_parking_term(there, is_in)

        await self._call("set_parking_term", {"set": daemon_set.ref, "in": is_in}, write, is_write=True)

    async def sets_with_parking_term(self) -> tuple[FleetSet, ...]:
        """The DaemonSets that have it from us."""

        def read() -> tuple[FleetSet, ...]:
            access.demand(self.account, "list", "apps", "daemonsets")
            found = [each for each in self._store.daemon_sets.values() if each.labels.get(PARKING_TERM) == "true"]
            return tuple(each.fleet_view() for each in found)

        return await self._call("sets_with_parking_term", {}, read)

    async def try_pod(self, namespace: str, owner: str, node_name: str) -> Tried:
        """What would become of a pod of a DaemonSet."""

        def read() -> Tried:
            access.demand(self.account, "create", "", "pods", namespace)
            return self._server.parking.tried(owner, node_name)

        return await self._call("try_pod", {"owner": owner, "node": node_name}, read)

    async def lease(self, namespace: str, name: str) -> LeaseView:
        """Reads a Lease."""

        def read() -> LeaseView:
            access.demand(self.account, "get", "coordination.k8s.io", "leases", namespace, name)
            return self._store.leases.get(f"{namespace}/{name}", LeaseView(namespace=namespace, name=name))

        return await self._call("lease", {"namespace": namespace, "name": name}, read)

    async def write_lease(self, lease: LeaseView) -> LeaseView:
        """Makes or replaces a Lease, guarded by its version."""
        ref = f"{lease.namespace}/{lease.name}"

        def write() -> LeaseView:
            verb = "update" if lease.resource_version else "create"
            access.demand(self.account, verb, "coordination.k8s.io", "leases", lease.namespace, lease.name)
            there = self._store.leases.get(ref)
            if lease.resource_version != (there.resource_version if there else ""):
                raise Conflict(f'Operation cannot be fulfilled on leases.coordination.k8s.io "{lease.name}": the object has been modified')
            if lease.duration_seconds <= 0:
                raise ClusterError(f'Lease "{lease.name}" is invalid: spec.leaseDurationSeconds: must be greater than 0')
            self._store.version += 1
            made = replace(lease, resource_version=str(self._store.version), annotations=dict(lease.annotations))
            self._store.leases[ref] = made
            self._store.did(self.account.name, "lease", ref, detail=made)
            return made

        return await self._call("write_lease", {"lease": ref, "holder": lease.holder}, write, is_write=True)

    async def note_event(self, note: EventNote) -> None:
        """Makes an Event."""

        def write() -> None:
            access.demand(self.account, "create", "", "events", note.subject.namespace or "default")
            self._store.notes.append((self._store.timers.now(), self.account.name, replace(note, sentence=_cut(note.sentence))))
            node_name = "" if note.subject.namespace else note.subject.name
            self._store.did(self.account.name, "event", note.subject.name, node_name=node_name, detail=note)

        await self._call("note_event", {"about": note.subject.name, "reason": note.reason}, write, is_write=True)

    async def set_condition(self, source: PolicySource, condition: str, *, is_true: bool, reason: str, sentence: str) -> None:
        """Writes one condition of a custom resource; one that says the same is left alone."""

        def write() -> None:
            resource = POLICY_RESOURCES[source.kind]
            access.demand(self.account, "patch", "nvidia.com", f"{resource}/status", name=source.name)
            there = self._store.policies.get((source.kind, source.name))
            if there is None:
                raise NotFound(f'{resource}.nvidia.com "{source.name}" not found')
            if there.uid != source.uid:
                raise Conflict(f"{source.kind} {source.name}: it was made anew meanwhile, under another uid")
            said, key = ("True" if is_true else "False", reason), (there.uid, condition)
            if there.conditions.get(condition) == said and self._store.sentences.get(key) == sentence:
                return
            self._store.sentences[key] = sentence
            self._store.version += 1
            changed = replace(there, conditions={**there.conditions, condition: said}, resource_version=str(self._store.version))
            self._store.policies[source.kind, source.name] = changed
            self._store.did(self.account.name, "condition", f"{source.kind} {source.name}", detail=(condition, *said, sentence))
            self._store.tell(changed)

        await self._call("set_condition", {"source": f"{source.kind} {source.name}", "condition": condition}, write, is_write=True)

    async def maintenance(self, namespace: str, name: str) -> MaintenanceView:
        """Reads a NodeMaintenance."""

        def read() -> MaintenanceView:
            self._demand_maintenance("get", namespace, name)
            return maintenances.find(self._store, namespace, name).fleet_view()

        return await self._call("maintenance", {"name": name}, read)

    async def make_maintenance(self, order: MaintenanceOrder) -> MaintenanceView:
        """Makes a NodeMaintenance."""

        def write() -> MaintenanceView:
            self._demand_maintenance("create", order.namespace)
            return maintenances.make(self._store, self.account.name, order).fleet_view()

        return await self._call("make_maintenance", {"name": order.name}, write, is_write=True)

    async def set_requestors(self, maintenance: MaintenanceView, others: Sequence[str]) -> MaintenanceView:
        """Replaces the additional requestors of a NodeMaintenance, guarded by its version."""

        def write() -> MaintenanceView:
            self._demand_maintenance("patch", maintenance.namespace, maintenance.name)
            return maintenances.set_requestors(self._store, self.account.name, maintenance, others).fleet_view()

        return await self._call("set_requestors", {"name": maintenance.name, "others": others}, write, is_write=True)

    async def delete_maintenance(self, maintenance: MaintenanceView) -> None:
        """Deletes exactly this NodeMaintenance."""

        def write() -> None:
            self._demand_maintenance("delete", maintenance.namespace, maintenance.name)
            maintenances.delete(self._store, self.account.name, maintenance)

        await self._call("delete_maintenance", {"name": maintenance.name}, write, is_write=True)

    def _demand_maintenance(self, verb: str, namespace: str, name: str = "") -> None:
        access.demand(self.account, verb, *RESOURCES[Kind.MAINTENANCES], namespace, name)
        if Kind.MAINTENANCES in self._feeds.not_served:
            raise Unreachable("the server could not find the requested resource")


def _cut(sentence: str) -> str:
    whole = sentence.encode()
    return sentence if len(whole) <= LONGEST_SENTENCE else whole[: LONGEST_SENTENCE - 3].decode(errors="ignore") + "..."
