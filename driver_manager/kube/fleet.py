"""The Fleet port on the real API server: what the controller needs beyond one node.

Never imported by `kube` itself, so that the agent does not load it.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final

from driver_manager.core.fleet import (
    Changed,
    EventNote,
    FleetEvent,
    FleetSet,
    Kind,
    LeaseView,
    Listed,
    MaintenanceOrder,
    MaintenanceView,
    NotServed,
    PolicySource,
    SliceView,
)
from driver_manager.core.parking import Tried
from driver_manager.core.snapshot import ChangeKind, Identity
from driver_manager.errors import Conflict, Forbidden, NotFound
from driver_manager.kube import calls, fleetcalls, fleetviews, views
from driver_manager.kube.client import RETRY_SECONDS, KubeCluster, open_connection
from driver_manager.kube.fleetcalls import CUSTOM_KINDS, MAINTENANCE, CustomKind, Selection
from driver_manager.kube.watch import Absent, Change, Listing, Source, Watch, joined
from driver_manager.kube.wire import Reader, View
from driver_manager.ports import Clock

if TYPE_CHECKING:
    from driver_manager.kube.connection import Connection

CONNECTIONS: Final = 136
"""Each watch occupies one: thirteen of the kinds followed, up to a hundred of nodes, and what is left is for requests."""


async def connect_fleet(
    kubeconfig: str | None,
    clock: Clock,
    selection: Selection,
    *,
    connections: int = CONNECTIONS,
    request_timeout: float = 10.0,
    retry_seconds: float = RETRY_SECONDS,
) -> "KubeFleet":
    """Gets ready to talk to the API server, without a request.

    Args:
        kubeconfig: paths as in $KUBECONFIG; None for the service account of the pod we run in.
        clock: for the pauses between tries.
        selection: which objects are the fleet's.
        connections: how many may be open at once; a request that finds none waits in its own time.
        request_timeout: seconds that one request may take.
        retry_seconds: how long a read that gets no answer is tried again.

    Raises:
        ConfigError: the configuration is missing or cannot be used.
    """
    connection, identity = await open_connection(kubeconfig, request_timeout, connections)
    return KubeFleet(connection, clock, identity, selection, retry_seconds)


class KubeFleet(KubeCluster):
    """A Fleet (`ports.Fleet`) behind a real API server."""

    def __init__(
        self, connection: "Connection", clock: Clock, identity: Identity, selection: Selection, retry_seconds: float = RETRY_SECONDS
    ) -> None:
        super().__init__(connection, clock, identity, retry_seconds)
        self._selection = selection

    async def follow(self, kind: Kind) -> AsyncGenerator[FleetEvent, None]:
        """Follows all objects of a kind without end."""
        if kind is Kind.MAINTENANCES and not self._selection.maintenances:
            yield NotServed(kind)
            await asyncio.get_running_loop().create_future()  # nothing changes that
        async with aclosing(self._events(kind)) as events:
            async for event in events:
                match event:
                    case Listing():
                        yield Listed(kind, event.items)
                    case Change(change, item):
                        yield Changed(kind, change, item)
                    case Absent():
                        yield NotServed(kind)

    def _events(self, kind: Kind) -> AsyncGenerator[Listing[Any] | Change[Any] | Absent, None]:
        """The watch of a kind."""
        match kind:
            case Kind.NODES:
                return self._watch(fleetcalls.list_nodes(self._selection), views.NODES).events()
            case Kind.DAEMON_SETS:
                return self._watch(fleetcalls.list_daemon_sets(self._selection), fleetviews.SETS).events()
            case Kind.REVISIONS:
                return self._watch(fleetcalls.list_revisions(self._selection), fleetviews.REVISIONS).events()
            case Kind.DRIVER_PODS:
                watches = [self._watch(call, fleetviews.PODS) for call in fleetcalls.list_driver_pods(self._selection)]
                return joined(watches, lambda pod: pod.uid)
            case Kind.VALIDATOR_PODS:
                return self._watch(fleetcalls.list_validator_pods(self._selection), fleetviews.PODS).events()
            case Kind.PARKABLE_SETS:
                return self._watch(fleetcalls.list_parkable_sets(), fleetviews.PARKABLE_SETS).events()
            case Kind.GATED_PODS:
                return self._watch(fleetcalls.list_gated_pods(), fleetviews.PODS).events()
            case Kind.CLUSTER_POLICIES:
                return self._watch_custom(CUSTOM_KINDS["ClusterPolicy"], fleetviews.CLUSTER_POLICIES).events()
            case Kind.NVIDIA_DRIVERS:
                return self._watch_custom(CUSTOM_KINDS["NVIDIADriver"], fleetviews.DRIVERS).events()
            case Kind.BUDGETS:
                return self._watch(fleetcalls.list_budgets(), fleetviews.BUDGETS).events()
            case Kind.MAINTENANCES:
                return self._watch_custom(MAINTENANCE, fleetviews.MAINTENANCES, self._selection.maintenances).events()
            case Kind.SLICES:
                return self._watch_slices().events()

    def _watch_slices(self) -> Watch[SliceView]:
        """In the newest version that the server has, asked for at each list: an upgrade of the server may take one away."""
        version = calls.DRA_VERSIONS[0]

        async def listing() -> Listing[SliceView]:
            nonlocal version
            version = await self._dra_version() or calls.DRA_VERSIONS[0]
            return await self._list(fleetcalls.list_slices(version), fleetviews.SLICES)

        async def is_served() -> bool:
            return await self._dra_version() is not None

        source = Source(
            about={"collection": fleetcalls.list_slices(version).resource},
            list=listing,
            watch=lambda since, seconds: calls.watch(fleetcalls.list_slices(version), since, seconds),
            event=fleetviews.SLICES.event,
            is_served=is_served,
        )
        return Watch(self._connection, self._clock, source)

    async def follow_set(self, ref: str) -> AsyncGenerator[FleetSet | None, None]:
        """Follows one DaemonSet without end."""
        async with aclosing(self._watch(fleetcalls.list_named_set(ref), fleetviews.PARKABLE_SETS).events()) as events:
            async for event in events:
                match event:
                    case Listing():
                        yield next(iter(event.items), None)
                    case Change(change, item):
                        yield None if change is ChangeKind.GONE else item
                    case Absent():
                        yield None

    def _watch_custom(self, kind: CustomKind, reader: Reader[View], namespace: str = "") -> Watch[View]:
        return self._watch(fleetcalls.list_custom(kind, namespace), reader, is_served=lambda: self._is_served(kind))

    async def _is_served(self, kind: CustomKind) -> bool:
        """Whether the API server says that it has a custom resource."""
        if kind.group_version not in await self._read(fleetcalls.get_api_groups(), fleetviews.group_versions):
            return False
        return kind.plural in await self._read(fleetcalls.get_api_version(kind), fleetviews.resources)

    async def delete_pod(self, namespace: str, name: str, uid: str) -> None:
        """Deletes exactly this pod with its own grace."""
        await self._connection.answer(fleetcalls.delete_pod(namespace, name, uid))

    async def has_parking_policy(self) -> bool:
        """Whether one of the two admission policies is there with its binding."""
        for way in fleetcalls.PARKING_WAYS:
            try:
                for call in fleetcalls.get_parking(way):
                    await self._read(call, bytes)
            except NotFound:
                continue
            return True
        return False

    async def set_parking_term(self, daemon_set: FleetSet, *, is_in: bool) -> None:
        """Puts the term by which its pods leave parked nodes into a DaemonSet's template, or takes it out."""
        found = await self._read(calls.get_daemon_set(daemon_set.namespace, daemon_set.name), fleetviews.AFFINITIES.one)
        if found.uid != daemon_set.uid:
            raise Conflict(f"DaemonSet {daemon_set.ref}: it was made anew meanwhile, under another uid")
        await self._connection.answer(fleetcalls.patch_affinity(daemon_set, found, is_in=is_in))

    async def sets_with_parking_term(self) -> tuple[FleetSet, ...]:
        """The DaemonSets that have it from us."""
        return (await self._list(fleetcalls.list_sets_with_term(), fleetviews.PARKABLE_SETS)).items

    async def try_pod(self, namespace: str, owner: str, node_name: str) -> Tried:
        """What would become of a pod that a DaemonSet made for a node now. The request makes nothing, so it is a read."""
        try:
            return await self._read(fleetcalls.try_pod(namespace, owner, node_name), fleetviews.tried)
        except Forbidden as error:
            if fleetcalls.PARKING_DENIAL in error.message:
                return Tried.DENIED
            raise

    async def lease(self, namespace: str, name: str) -> LeaseView:
        """Reads a Lease; one that does not exist has no resource version."""
        try:
            return await self._read(fleetcalls.get_lease(namespace, name), fleetviews.LEASES.one)
        except NotFound:
            return LeaseView(namespace=namespace, name=name)

    async def write_lease(self, lease: LeaseView) -> LeaseView:
        """Makes or replaces a Lease, guarded by its resource version; gives it as it is then."""
        return await self._write(fleetcalls.write_lease(lease), fleetviews.LEASES.one)

    async def note_event(self, note: EventNote) -> None:
        """Makes an Event."""
        await self._connection.answer(fleetcalls.create_event(note, self._clock.wall(), self.identity.pod_name))

    async def set_condition(self, source: PolicySource, condition: str, *, is_true: bool, reason: str, sentence: str) -> None:
        """Writes one condition into the status of a custom resource and leaves those of others.

        It is read first: the view has not all of what is there, and a list of conditions is written as a whole.
        """
        found = await self._read(fleetcalls.get_custom(source), fleetviews.CONDITIONS.one)
        if found.uid != source.uid:
            raise Conflict(f"{source.kind} {source.name}: it was made anew meanwhile, under another uid")
        wanted = {"status": "True" if is_true else "False", "reason": reason, "message": sentence}
        before = next((each for each in found.items if each.get("type") == condition), {})
        if all(before.get(key) == value for key, value in wanted.items()):
            return
        since = before.get("lastTransitionTime") if before.get("status") == wanted["status"] else None
        ours = {"type": condition, **wanted, "lastTransitionTime": since or self._clock.wall(), "observedGeneration": found.generation}
        items = [ours if each is before else each for each in found.items] if before else [*found.items, ours]
        await self._connection.answer(fleetcalls.patch_conditions(source, found, items))

    async def maintenance(self, namespace: str, name: str) -> MaintenanceView:
        """Reads a NodeMaintenance."""
        return await self._read(fleetcalls.get_maintenance(namespace, name), fleetviews.MAINTENANCES.one)

    async def make_maintenance(self, order: MaintenanceOrder) -> MaintenanceView:
        """Makes a NodeMaintenance."""
        return await self._write(fleetcalls.create_maintenance(order), fleetviews.MAINTENANCES.one)

    async def set_requestors(self, maintenance: MaintenanceView, others: Sequence[str]) -> MaintenanceView:
        """Replaces the additional requestors of a NodeMaintenance, guarded by its resource version."""
        return await self._write(fleetcalls.patch_requestors(maintenance, others), fleetviews.MAINTENANCES.one)

    async def delete_maintenance(self, maintenance: MaintenanceView) -> None:
        """Deletes exactly this NodeMaintenance."""
        await self._connection.answer(fleetcalls.delete_maintenance(maintenance))
