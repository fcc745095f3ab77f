"""The newest of everything that is followed, and which nodes a change concerns. It decides nothing.

An event that is older than what is known already (a watch that lags behind our own write) is passed over: resourceVersions of one kind are
ordered, https://kubernetes.io/docs/reference/using-api/api-concepts/#resource-versions
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from driver_manager.core.fleet import (
    BudgetView,
    Changed,
    FleetEvent,
    FleetPod,
    FleetSet,
    Item,
    Kind,
    Listed,
    MaintenanceView,
    NotServed,
    PolicySource,
    Revision,
    SliceView,
    is_driver,
    is_validator,
)
from driver_manager.core.snapshot import ChangeKind, NodeView
from driver_manager.names import GPU_DRA_DRIVER

OnNode = TypeVar("OnNode", FleetPod, SliceView)


@dataclass(slots=True)
class _PerNode(Generic[OnNode]):
    """Objects of one kind, by uid and by node."""

    by_uid: dict[str, OnNode] = field(default_factory=dict)
    by_node: dict[str, dict[str, OnNode]] = field(default_factory=dict)

    def put(self, one: OnNode) -> set[str]:
        old = self.by_uid.get(one.uid)
        if old == one:
            return set()
        touched = self.take(one.uid) if old is not None and old.node_name != one.node_name else set()
        self.by_uid[one.uid] = one
        self.by_node.setdefault(one.node_name, {})[one.uid] = one
        return touched | {one.node_name}

    def take(self, uid: str) -> set[str]:
        old = self.by_uid.pop(uid, None)
        if old is None:
            return set()
        there = self.by_node[old.node_name]
        del there[uid]
        if not there:
            del self.by_node[old.node_name]
        return {old.node_name}

    def on(self, node_name: str) -> Collection[OnNode]:
        return self.by_node.get(node_name, {}).values()


def _in_order(pods: Iterable[FleetPod]) -> tuple[FleetPod, ...]:
    return tuple(sorted(pods, key=lambda pod: (pod.created, pod.uid)))


class Cache:
    """What is known of the fleet."""

    def __init__(self, on_policies: Callable[[], None] = lambda: None) -> None:
        self.nodes: dict[str, NodeView] = {}
        self.sets: dict[str, FleetSet] = {}
        """By uid."""
        self.policies: dict[str, PolicySource] = {}
        """By uid."""
        self._revisions: dict[str, dict[str, Revision]] = {}
        """DaemonSet uid -> revision uid -> revision."""
        self._newest: dict[str, Revision] = {}
        """DaemonSet uid -> its newest revision."""
        self._drivers, self._validators = _PerNode[FleetPod](), _PerNode[FleetPod]()
        self._slices = _PerNode[SliceView]()
        self._budgets: dict[str, dict[str, BudgetView]] = {}
        """Namespace -> uid -> budget."""
        self.maintenances: dict[str, MaintenanceView] = {}
        """By name."""
        self.is_maintenance_served = False
        """Whether the API has NodeMaintenances, and the settings name a namespace of theirs."""
        self.parkable: dict[str, FleetSet] = {}
        """DaemonSets that ask to be parked, by uid."""
        self.gated: dict[str, FleetPod] = {}
        """Pods that were kept off their node, by uid."""
        self._on_policies = on_policies
        self.synced: set[Kind] = set()
        """Kinds that have been listed, or are not served."""

    @property
    def is_synced(self) -> bool:
        """Whether everything has been listed once."""
        return len(self.synced) == len(Kind)

    @property
    def missing(self) -> list[str]:
        """What has not been listed yet."""
        return [kind.value for kind in Kind if kind not in self.synced]

    # Reading ------------------------------------------------------------------------------------------------------

    def drivers_on(self, node_name: str) -> tuple[FleetPod, ...]:
        """Driver pods of a node, in the order of their making."""
        return _in_order(self._drivers.on(node_name))

    def validators_on(self, node_name: str) -> tuple[FleetPod, ...]:
        """Validator pods of a node."""
        return _in_order(self._validators.on(node_name))

    def published_on(self, node_name: str) -> int:
        """How many devices NVIDIA's DRA driver offers on a node: of each pool those of its newest generation."""
        slices = self._slices.on(node_name)
        newest: dict[str, int] = {}
        for each in slices:
            newest[each.pool] = max(each.generation, newest.get(each.pool, 0))
        return sum(each.devices for each in slices if each.generation == newest[each.pool])

    def driver_set_for(self, node: NodeView) -> FleetSet | None:
        """The DaemonSet of the node's newest driver pod; where that has none any more, the one that would make a pod there."""
        for pod in reversed(self.drivers_on(node.name)):
            if pod.owner is not None and (owner := self.sets.get(pod.owner.uid)) is not None:
                return owner
        return next(
            (each for each in self.sets.values() if not each.is_deleting and is_driver(each.pod_labels) and each.fits(node.labels)), None
        )

    def rival_sets(self, node: NodeView) -> tuple[str, ...]:
        """The driver DaemonSets, `namespace/name`, whose pods are on a node to stay; empty where it is one alone."""
        uids = {pod.owner.uid for pod in self.drivers_on(node.name) if pod.owner is not None and pod.is_bound and not pod.is_terminating}
        found = [each for uid in uids if (each := self.sets.get(uid)) is not None and not each.is_deleting and each.fits(node.labels)]
        return tuple(sorted(each.ref for each in found)) if len(found) > 1 else ()

    def wanted(self, daemon_set: FleetSet | None, node_name: str) -> Revision | None:
        """A DaemonSet's newest revision, as a node should have it; None while that is not known for sure.

        The watches are not in step with each other: where the DaemonSet's controller has not seen its newest template, or a pod is of a
        revision that has not been heard of yet, a newer one may be on its way.
        """
        if daemon_set is None or not daemon_set.is_settled:
            return None
        known = {each.hash for each in self._revisions.get(daemon_set.uid, {}).values()}
        own = (pod for pod in self.drivers_on(node_name) if pod.owner is not None and pod.owner.uid == daemon_set.uid)
        return self._newest.get(daemon_set.uid) if all(pod.revision in known for pod in own) else None

    def needs_validator(self, node: NodeView) -> bool:
        """Whether a validator's DaemonSet matches the node."""
        return any(is_validator(each.pod_labels) and not each.is_deleting and each.fits(node.labels) for each in self.sets.values())

    def budgets(self, namespaces: Iterable[str]) -> tuple[BudgetView, ...]:
        """The budgets of some namespaces, by name."""
        found = [each for namespace in {*namespaces} for each in self._budgets.get(namespace, {}).values()]
        return tuple(sorted(found, key=lambda each: each.ref))

    # Events -------------------------------------------------------------------------------------------------------

    def apply(self, event: FleetEvent) -> set[str]:
        """Takes in an event; gives the names of the nodes that it concerns."""
        match event:
            case Listed(kind, items):
                self.synced.add(kind)
                return self._serves(kind, True) | self._listed(kind, items)
            case Changed(kind, change, item):
                return self._gone(kind, item) if change is ChangeKind.GONE else self._put(kind, item)
            case NotServed(kind):
                self.synced.add(kind)
                return self._serves(kind, False) | self._listed(kind, ())

    def _serves(self, kind: Kind, is_served: bool) -> set[str]:
        """Where a maintenance operator comes or goes, that concerns every node."""
        if kind is not Kind.MAINTENANCES or self.is_maintenance_served == is_served:
            return set()
        self.is_maintenance_served = is_served
        return {*self.nodes}

    def put_node(self, node: NodeView) -> set[str]:
        """Takes in a node, from a watch or as the answer to a write."""
        old = self.nodes.get(node.name)
        if old is not None and int(node.resource_version) <= int(old.resource_version):
            return set()
        self.nodes[node.name] = node
        if old is not None and replace(old, resource_version=node.resource_version) == node:
            return set()  # its kubelet's report, of which nothing is read here
        return {node.name}

    def drop_node(self, name: str, uid: str) -> set[str]:
        """A node is gone, or is none of the fleet's any more."""
        if name in self.nodes and self.nodes[name].uid == uid:
            del self.nodes[name]
            return {name}
        return set()

    def put_maintenance(self, new: MaintenanceView) -> set[str]:
        """Takes in a NodeMaintenance, from a watch or as the answer to a write."""
        old = self.maintenances.get(new.name)
        if old is not None and int(new.resource_version) <= int(old.resource_version):
            return set()
        self.maintenances[new.name] = new
        return {new.node_name} | ({old.node_name} if old is not None else set())

    def deleted_maintenance(self, read: MaintenanceView) -> None:
        """Its deletion has been accepted: it is on its way out, or gone, before the watch tells."""
        old = self.maintenances.get(read.name)
        if old is not None and old.uid == read.uid:
            self.maintenances[read.name] = replace(old, is_deleting=True)

    def drop_maintenance(self, name: str, uid: str) -> set[str]:
        """A NodeMaintenance is gone."""
        old = self.maintenances.get(name)
        if old is None or old.uid != uid:
            return set()
        del self.maintenances[name]
        return {old.node_name}

    def _put(self, kind: Kind, item: Item) -> set[str]:
        match item:
            case NodeView():
                return self.put_node(item)
            case FleetPod() if kind is Kind.GATED_PODS:
                self.gated[item.uid] = item
                return set()
            case FleetPod():
                return (self._drivers if kind is Kind.DRIVER_PODS else self._validators).put(item)
            case FleetSet() if kind is Kind.PARKABLE_SETS:
                self.parkable[item.uid] = item
                return set()
            case FleetSet():
                return self._put_set(item)
            case Revision():
                self._revisions.setdefault(item.owner_uid, {})[item.uid] = item
                return self._count_revisions(item.owner_uid)
            case PolicySource():
                self.policies[item.uid] = item
                self._on_policies()
                return set()
            case BudgetView():
                self._budgets.setdefault(item.namespace, {})[item.uid] = item
                return set()
            case MaintenanceView():
                return self.put_maintenance(item)
            case SliceView():
                return self._slices.put(item) if item.node_name and item.driver == GPU_DRA_DRIVER else self._slices.take(item.uid)

    def _gone(self, kind: Kind, item: Item) -> set[str]:
        match item:
            case NodeView():
                return self.drop_node(item.name, item.uid)
            case FleetPod() if kind is Kind.GATED_PODS:
                self.gated.pop(item.uid, None)
                return set()
            case FleetPod():
                return (self._drivers if kind is Kind.DRIVER_PODS else self._validators).take(item.uid)
            case FleetSet() if kind is Kind.PARKABLE_SETS:
                self.parkable.pop(item.uid, None)
                return set()
            case FleetSet():
                return self._drop_set(item.uid)
            case Revision():
                self._revisions.get(item.owner_uid, {}).pop(item.uid, None)
                return self._count_revisions(item.owner_uid)
            case PolicySource():
                self.policies.pop(item.uid, None)
                self._on_policies()
                return set()
            case BudgetView():
                self._budgets.get(item.namespace, {}).pop(item.uid, None)
                return set()
            case MaintenanceView():
                return self.drop_maintenance(item.name, item.uid)
            case SliceView():
                return self._slices.take(item.uid)

    def _listed(self, kind: Kind, items: Collection[Item]) -> set[str]:
        """Everything of a kind: what is not in it is gone."""
        there = {item.uid for item in items}
        touched = set[str]()
        for old in self._all(kind):
            if old.uid not in there:
                touched |= self._gone(kind, old)
        for item in items:
            touched |= self._put(kind, item)
        return touched

    def _all(self, kind: Kind) -> Collection[Item]:
        match kind:
            case Kind.NODES:
                return list(self.nodes.values())
            case Kind.DRIVER_PODS:
                return list(self._drivers.by_uid.values())
            case Kind.VALIDATOR_PODS:
                return list(self._validators.by_uid.values())
            case Kind.DAEMON_SETS:
                return list(self.sets.values())
            case Kind.PARKABLE_SETS:
                return list(self.parkable.values())
            case Kind.GATED_PODS:
                return list(self.gated.values())
            case Kind.REVISIONS:
                return [each for some in self._revisions.values() for each in some.values()]
            case Kind.CLUSTER_POLICIES | Kind.NVIDIA_DRIVERS:
                word = "ClusterPolicy" if kind is Kind.CLUSTER_POLICIES else "NVIDIADriver"
                return [each for each in self.policies.values() if each.kind == word]
            case Kind.BUDGETS:
                return [each for some in self._budgets.values() for each in some.values()]
            case Kind.MAINTENANCES:
                return list(self.maintenances.values())
            case Kind.SLICES:
                return list(self._slices.by_uid.values())

    # DaemonSets ---------------------------------------------------------------------------------------------------

    def _put_set(self, new: FleetSet) -> set[str]:
        """Its status changes with every pod: only a change of what is read here concerns anybody."""
        old = self.sets.get(new.uid)
        if old == new:
            return set()
        self.sets[new.uid] = new
        if old is not None and (old.node_selector, old.affinity) == (new.node_selector, new.affinity):
            return self._nodes_of(new) if is_driver(new.pod_labels) else set()
        return self._fitting(new) | (self._fitting(old) if old else set()) | self._nodes_of(new)

    def _drop_set(self, uid: str) -> set[str]:
        old = self.sets.pop(uid, None)
        self._revisions.pop(uid, None)
        self._newest.pop(uid, None)
        return self._fitting(old) | self._nodes_of(old) if old is not None else set()

    def _fitting(self, daemon_set: FleetSet) -> set[str]:
        if not (is_driver(daemon_set.pod_labels) or is_validator(daemon_set.pod_labels)):
            return set()
        return {name for name, node in self.nodes.items() if daemon_set.fits(node.labels)}

    def _nodes_of(self, daemon_set: FleetSet) -> set[str]:
        return _nodes(pod for pod in self._drivers.by_uid.values() if pod.owner is not None and pod.owner.uid == daemon_set.uid)

    def _count_revisions(self, owner_uid: str) -> set[str]:
        newest = max(self._revisions.get(owner_uid, {}).values(), key=lambda each: each.number, default=None)
        if self._newest.get(owner_uid) == newest:
            return set()
        if newest is None:
            del self._newest[owner_uid]
        else:
            self._newest[owner_uid] = newest
        daemon_set = self.sets.get(owner_uid)
        return self._nodes_of(daemon_set) | self._fitting(daemon_set) if daemon_set is not None else set()


def _nodes(pods: Iterable[FleetPod]) -> set[str]:
    return {pod.node_name for pod in pods}
