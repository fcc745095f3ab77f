"""NodeMaintenances: what the server does with them, and a small maintenance operator that frees nodes as they ask."""

import re
from collections.abc import Mapping, Sequence
from typing import Final

from driver_manager.core.fleet import MaintenanceOrder, MaintenanceView
from driver_manager.core.selectors import parse_selector
from driver_manager.core.snapshot import ChangeKind
from driver_manager.errors import ClusterError, Conflict, NotFound
from driver_manager.sim.access import EVERYTHING
from driver_manager.sim.objects import Account, Maintenance, Pod
from driver_manager.sim.server import Server
from driver_manager.sim.store import Object, Store

WHO: Final = "maintenance-operator"
LOOKS_EVERY: Final = 1.0
"""Seconds between two looks at a node that is not free yet."""
KIND: Final = "nodemaintenances.maintenance.nvidia.com"

# The server ---------------------------------------------------------------------------------------------------------


def find(store: Store, namespace: str, name: str, uid: str = "") -> Maintenance:
    """One that is there.

    Raises:
        NotFound. Conflict: another one has the name now.
    """
    there = store.maintenances.get(f"{namespace}/{name}")
    if there is None:
        raise NotFound(f'{KIND} "{name}" not found')
    if uid and there.uid != uid:
        raise Conflict(f'Operation cannot be fulfilled on {KIND} "{name}": the UID in the precondition does not match')
    return there


def make(store: Store, who: str, order: MaintenanceOrder) -> Maintenance:
    """Makes one."""
    if f"{order.namespace}/{order.name}" in store.maintenances:
        raise Conflict(f'{KIND} "{order.name}" already exists')
    if order.node_name not in store.nodes:
        raise ClusterError(f"invalid spec.nodeName, failed to get node {order.node_name} for NodeMaintenance")
    made = Maintenance(
        namespace=order.namespace,
        name=order.name,
        uid=store.uid(),
        node_name=order.node_name,
        requestor=order.requestor,
        drain=dict(order.drain),
        wait=order.wait,
    )
    store.did(who, "maintenance", made.ref, node_name=made.node_name, uid=made.uid, detail="made")
    store.maintenance_written(made)
    return made


def set_requestors(store: Store, who: str, read: MaintenanceView, others: Sequence[str]) -> Maintenance:
    """Replaces the additional requestors."""
    there = find(store, read.namespace, read.name, read.uid)
    if str(there.resource_version) != read.resource_version:
        raise Conflict(f'Operation cannot be fulfilled on {KIND} "{read.name}": the object has been modified')
    there.others = tuple(others)
    store.did(who, "maintenance", there.ref, node_name=there.node_name, uid=there.uid, detail=f"requestors {' '.join(others)}")
    store.maintenance_written(there)
    return there


def delete(store: Store, who: str, read: MaintenanceView) -> None:
    """Deletes one; with a finalizer it goes when the operator lets it."""
    there = find(store, read.namespace, read.name, read.uid)
    store.did(who, "maintenance", there.ref, node_name=there.node_name, uid=there.uid, detail="deleted")
    if there.has_finalizer:
        there.is_deleting = True
        store.maintenance_written(there)
    else:
        store.maintenance_removed(there)


# The operator -------------------------------------------------------------------------------------------------------


class MaintenanceOperator:
    """Cordons, evicts as the drainSpec says, says Ready; a deleted one is uncordoned when nobody else uses it.

    Args:
        store: of the world.
        server: evicts.
        seconds: from the making of an object to the cordon.
    """

    def __init__(self, store: Store, server: Server, seconds: float = 2.0) -> None:
        self.seconds = seconds
        self.is_up = True
        self._store, self._server = store, server
        self._account = Account(name=WHO, rules=EVERYTHING)
        store.watchers.append(self._changed)

    def _changed(self, one: Object, change: ChangeKind) -> None:
        if isinstance(one, Maintenance) and change is ChangeKind.SEEN:
            self._wake(one, self.seconds)

    def _wake(self, one: Maintenance, seconds: float) -> None:
        self._store.timers.wake("maintenance", one.uid, seconds, lambda: self._look(one))

    def _look(self, one: Maintenance) -> None:
        if self._store.maintenances.get(one.ref) is not one:
            return
        if not self.is_up:
            self._wake(one, LOOKS_EVERY)
        elif one.is_deleting:
            self._end(one)
        elif not one.has_finalizer:
            one.has_finalizer = True
            node = self._store.nodes.get(one.node_name)
            if node is not None and not node.unschedulable:
                one.has_cordoned = node.unschedulable = True
                self._store.node_written(node)
            self._store.maintenance_written(one)
        elif not one.is_ready:
            self._free(one)

    def _free(self, one: Maintenance) -> None:
        bound = [pod for pod in self._store.pods_bound_to(one.node_name) if not pod.is_over]
        pods = [pod for pod in bound if _is_waited_for(one.wait, pod)] or [pod for pod in bound if _has_to_go(one.drain, pod)]
        if not pods:
            one.is_ready = True
            self._store.maintenance_written(one)
            return
        for pod in pods:
            if pod.marked_at is None and not _is_waited_for(one.wait, pod):
                self._evict(pod)
        self._wake(one, LOOKS_EVERY)

    def _evict(self, pod: Pod) -> None:
        try:
            self._server.evict(self._account, pod.namespace, pod.name, pod.uid, dry_run=False, grace_seconds=None)
        except ClusterError as error:  # tried again at the next look
            self._store.write(WHO, "refused", pod.ref, error.message)

    def _end(self, one: Maintenance) -> None:
        """Others keep only what is Ready, as with the real one."""
        if one.is_ready and one.others:
            return  # the next change wakes
        node = self._store.nodes.get(one.node_name)
        if one.has_cordoned and node is not None:
            node.unschedulable = False
            self._store.node_written(node)
        self._store.maintenance_removed(one)


def _is_waited_for(wait: Mapping[str, object] | None, pod: Pod) -> bool:
    selector = str(wait.get("podSelector", "")) if wait else ""
    return bool(selector) and parse_selector(selector).matches(pod.labels)


def _has_to_go(drain: Mapping[str, object], pod: Pod) -> bool:
    """Whether the drainSpec speaks of a pod. DaemonSets' pods stay."""
    if pod.owner is not None and pod.owner.kind == "DaemonSet":
        return False
    if not parse_selector(str(drain.get("podSelector", ""))).matches(pod.labels):
        return False
    filters = drain.get("podEvictionFilters")
    if not isinstance(filters, list):
        return True
    return any(re.search(each["byResourceNameRegex"], name) for each in filters for name in pod.spec.all_resources)
