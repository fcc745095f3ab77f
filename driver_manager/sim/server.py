"""What the API server does with a request: node patches, deletions, evictions with their budgets."""

import re
from collections.abc import Callable
from typing import Final

from driver_manager.core.snapshot import NodeView, Taint
from driver_manager.errors import ClusterError, Conflict, EvictionBlocked, NotFound, Terminating, Unreachable
from driver_manager.ports import NodePatch
from driver_manager.sim import access
from driver_manager.sim.objects import Account, Budget, DaemonSet, Node, Phase, Pod, UnhealthyPolicy
from driver_manager.sim.parking import ParkingPolicies
from driver_manager.sim.store import Signal, Store

MOST_ANNOTATIONS: Final = 262_144
LABEL_VALUE: Final = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")
LONGEST_LABEL: Final = 63
BLOCKED: Final = "Cannot evict pod as it would violate the pod's disruption budget."
TWO_BUDGETS: Final = "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support."


class Server:
    """Requests that write, on one store."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.is_up = True
        self.watch_breaks = 0
        """Watches opened before the last break have to list again."""
        self.watches_back = 0.0
        self.evictions: list[tuple[float, str, str]] = []
        """Accepted ones: time, `namespace/name`, uid."""
        self.let_in: set[str] = set()
        """Uids of those that waited with a gate."""
        self.parking = ParkingPolicies(store)
        self.set_parking_term: Callable[[DaemonSet, bool], None] = lambda _, __: None
        """Puts the term for parking into a DaemonSet's template, or takes it out; its controller does it."""
        self.back = Signal()
        self.on_break: list[Callable[[], None]] = []
        """What else to do when all watches are cut."""

    # Trouble ------------------------------------------------------------------------------------------------------

    def reach(self) -> None:
        """Lets a request in.

        Raises:
            Unreachable: the server is down.
        """
        self.store.timers.bind()
        if not self.is_up:
            raise Unreachable("Cannot connect to host 127.0.0.1:6443: connection refused")

    def break_watches(self, seconds: float = 0.0) -> None:
        """Cuts all watches; nobody gets one again for so long, and what happens meanwhile is seen by listing alone."""
        self.watch_breaks += 1
        self.watches_back = self.store.timers.now() + seconds
        for stream in self.store.streams.values():
            stream.changed.set()
        for break_off in self.on_break:
            break_off()

    def outage(self, seconds: float) -> None:
        """The server is away for so long; the controllers, strangely, work on."""
        self.is_up = False
        self.break_watches(seconds)

        def up() -> None:
            self.is_up = True
            self.back.set()

        self.store.timers.later(seconds, up)

    # Nodes --------------------------------------------------------------------------------------------------------

    def find_node(self, name: str) -> Node:
        """A node.

        Raises:
            NotFound.
        """
        if name not in self.store.nodes:
            raise NotFound(f'nodes "{name}" not found')
        return self.store.nodes[name]

    def patch_node(self, patch: NodePatch, who: str) -> NodeView:
        """Merges a change into a node, all or nothing; one that changes nothing leaves the version.

        Raises:
            NotFound, Conflict. ClusterError: it is not valid.
        """
        node = self.find_node(patch.name)
        if patch.resource_version not in (None, str(node.resource_version)):
            raise Conflict(
                f'Operation cannot be fulfilled on nodes "{patch.name}": the object has been modified; '
                "please apply your changes to the latest version and try again"
            )
        _validate(patch)
        labels = {**node.labels, **patch.labels}
        annotations = {**node.annotations, **patch.annotations}
        new_labels = {key: value for key, value in labels.items() if value is not None}
        new_annotations = {key: value for key, value in annotations.items() if value is not None}
        size = sum(len(key.encode()) + len(value.encode()) for key, value in new_annotations.items())
        if size > MOST_ANNOTATIONS:
            raise _invalid(patch.name, f"metadata.annotations: Too long: may not be more than {MOST_ANNOTATIONS} bytes")
        unschedulable = node.unschedulable if patch.unschedulable is None else patch.unschedulable
        taints = node.taints if patch.taints is None else patch.taints
        if (new_labels, new_annotations, unschedulable, taints) != (node.labels, node.annotations, node.unschedulable, node.taints):
            node.labels, node.annotations = new_labels, new_annotations
            node.unschedulable, node.taints = unschedulable, taints
            self.store.write(who, "patch", f"node {node.name}", _shown(patch))
            self.store.did(who, "patch", node.name, node_name=node.name, detail=patch)
            self.store.node_written(node)
        return node.view()

    # Pods ---------------------------------------------------------------------------------------------------------

    def delete_exactly(self, account: Account, namespace: str, name: str, uid: str) -> None:
        """Deletes the pod of this uid, with its own grace.

        Raises:
            Forbidden, NotFound, Conflict.
        """
        access.demand(account, "delete", "", "pods", namespace, name)
        pod = self.store.pods.get(f"{namespace}/{name}")
        if pod is None:
            raise NotFound(f'pods "{name}" not found')
        _demand_uid(pod, uid)
        self.delete_pod(pod, who=account.name)

    def find_daemon_set(self, namespace: str, name: str) -> DaemonSet:
        """A DaemonSet.

        Raises:
            NotFound.
        """
        found = self.store.daemon_sets.get(f"{namespace}/{name}")
        if found is None:
            raise NotFound(f'daemonsets.apps "{name}" not found')
        return found

    def delete_pod(self, pod: Pod, grace_seconds: int | None = None, who: str = "server") -> None:
        """Marks a pod, or removes it at once where nothing has to be stopped. A second call can only make it sooner."""
        if pod.is_gone:
            return
        grace = pod.spec.grace_seconds if grace_seconds is None else grace_seconds
        if pod.is_over:
            grace = 0
        if pod.deletion_grace is not None and grace >= pod.deletion_grace:
            return
        if pod.marked_at is None:
            pod.marked_at = self.store.timers.now()
            self.store.write(who, "delete", pod.ref, f"grace {grace} s")
            self.store.did(who, "delete", pod.ref, node_name=pod.node_name or pod.target or "", uid=pod.uid)
        pod.ends_at, pod.deletion_grace = pod.marked_at + grace, grace
        if (grace == 0 or pod.node_name is None) and not pod.finalizers:
            self.store.pod_removed(pod)
        else:
            self.store.pod_written(pod)

    def drop_finalizers(self, pod: Pod) -> None:
        """Somebody takes the finalizers off."""
        pod.finalizers = ()
        if pod.marked_at is not None and (pod.is_over or pod.node_name is None):
            self.store.pod_removed(pod)
        elif not pod.is_gone:
            self.store.pod_written(pod)

    def evict(self, account: Account, namespace: str, name: str, uid: str, *, dry_run: bool, grace_seconds: int | None) -> None:
        """The eviction subresource.

        Raises:
            Forbidden, NotFound, Conflict, Terminating, EvictionBlocked.
        """
        access.demand(account, "create", "", "pods/eviction", namespace, name)
        if namespace in self.store.terminating:
            raise Terminating(
                f'pods "{name}" is forbidden: unable to create new content in namespace {namespace} because it is being terminated'
            )
        pod = self.store.pods.get(f"{namespace}/{name}")
        if pod is None:
            raise NotFound(f'pods "{name}" not found')
        budget = None if _needs_no_budget(pod) else self._budget_for(pod)
        counts = budget is not None and not _may_ignore(budget, pod)
        if budget is not None and counts:
            _ask(budget)
        if counts and budget is not None and not dry_run:
            budget.allowed -= 1
            budget.disrupted[pod.name] = self.store.timers.now()
            self.store.tell(budget)
        _demand_uid(pod, uid)
        if dry_run:
            return
        self.evictions.append((self.store.timers.now(), pod.ref, pod.uid))
        if pod.gates:
            self.let_in.add(pod.uid)
        self.store.write(account.name, "evict", pod.ref, pod.uid)
        self.store.did(account.name, "evict", pod.ref, node_name=pod.node_name or "", uid=pod.uid)
        self.delete_pod(pod, grace_seconds, who=account.name)

    def _budget_for(self, pod: Pod) -> Budget | None:
        found = [budget for budget in self.store.budgets.values() if budget.covers(pod)]
        if len(found) > 1:
            raise EvictionBlocked(
                TWO_BUDGETS, hint="take the pod out of all but one of: " + ", ".join(one.name for one in found), final=True
            )
        return found[0] if found else None


def _demand_uid(pod: Pod, uid: str) -> None:
    if uid and pod.uid != uid:
        raise Conflict(
            f'Operation cannot be fulfilled on Pod "{pod.name}": the UID in the precondition ({uid}) does not match the UID in '
            f"record ({pod.uid}). The object might have been deleted and then recreated"
        )


def _needs_no_budget(pod: Pod) -> bool:
    return pod.marked_at is not None or pod.is_over or pod.phase is Phase.PENDING


def _may_ignore(budget: Budget, pod: Pod) -> bool:
    if pod.is_ready:
        return False
    return budget.unhealthy is UnhealthyPolicy.ALWAYS_ALLOW or (0 < budget.desired <= budget.current)


def _ask(budget: Budget) -> None:
    if not budget.is_observed:
        raise EvictionBlocked(
            f"{BLOCKED} The disruption budget {budget.name} is still being processed by the server.", budget=budget.name, retry_after=10.0
        )
    if budget.allowed > 0:
        return
    if budget.current <= budget.desired:
        why = f"The disruption budget {budget.name} needs {budget.desired} healthy pods and has {budget.current} currently"
    else:
        why = f"The disruption budget {budget.name} does not allow evicting pods currently"
    raise EvictionBlocked(f"{BLOCKED} {why}", budget=budget.name)


def _invalid(name: str, why: str) -> ClusterError:
    return ClusterError(f'Node "{name}" is invalid: {why}')


def _validate(patch: NodePatch) -> None:
    for key, value in patch.labels.items():
        if value is not None and (len(value) > LONGEST_LABEL or not LABEL_VALUE.fullmatch(value)):
            raise _invalid(patch.name, f'metadata.labels: Invalid value: "{value}": a valid label must be ... (of {key})')
    seen: list[tuple[str, str]] = []
    for taint in patch.taints or ():
        if len(taint.value) > LONGEST_LABEL or not LABEL_VALUE.fullmatch(taint.value):
            raise _invalid(patch.name, f'spec.taints: Invalid value: "{taint.value}"')
        if (taint.key, taint.effect) in seen:
            raise _invalid(patch.name, f'spec.taints: Duplicate value: taints must be unique by key and effect pair: "{taint.key}"')
        seen.append((taint.key, taint.effect))


def _shown(patch: NodePatch) -> str:
    parts = [f"{key.rpartition('/')[2]}={value}" for key, value in patch.labels.items()]
    parts += [f"{'-' if value is None else '+'}{key.rpartition('/')[2]}" for key, value in patch.annotations.items()]
    if patch.unschedulable is not None:
        parts.append("cordon" if patch.unschedulable else "uncordon")
    if patch.taints is not None:
        parts.append("taints=" + ",".join(_named(taint) for taint in patch.taints))
    return " ".join(parts)


def _named(taint: Taint) -> str:
    return f"{taint.key}={taint.value}:{taint.effect}"
