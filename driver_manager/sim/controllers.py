"""The controllers of the control plane: DaemonSets, ReplicaSets, the scheduler, budgets, and the node lifecycle.

Each looks at the state a moment after a change and does one round of what the real one does; the facts are measured (section 5 of the
control plane's notes, held by the contract tests).
"""

from dataclasses import replace
from typing import Final

from driver_manager.core.snapshot import Owner, Taint
from driver_manager.names import COMPONENT_LABEL, DRIVER_COMPONENTS, REVISION_HASH, UNSCHEDULABLE_TAINT
from driver_manager.sim.daemonsets import DaemonSets
from driver_manager.sim.objects import (
    DAEMON_TOLERATIONS,
    GENERATION,
    POD_TOLERATIONS,
    Budget,
    DaemonSet,
    Deployment,
    Node,
    Pod,
    PodSpec,
    tolerates,
)
from driver_manager.sim.parking import is_schedulable
from driver_manager.sim.server import Server
from driver_manager.sim.store import Store

DISRUPTED_FOR: Final = 120.0
"""How long a budget remembers a pod that was let go and does not go."""


class Controllers:
    """All controllers of one cluster."""

    def __init__(self, store: Store, server: Server) -> None:
        self.store = store
        self.server = server
        self._touched: dict[str, bool] = {}
        """Nodes that the scheduler has to look at."""
        self.daemon_sets = DaemonSets(store, server, self._make_daemon)
        store.node_listeners.append(self.node_changed)
        store.pod_listeners.append(self.pod_changed)

    # What wakes whom ----------------------------------------------------------------------------------------------

    def node_changed(self, node: Node) -> None:
        """A node was written."""
        timers, latencies = self.store.timers, self.store.latencies
        timers.wake("lifecycle", node.name, latencies.lifecycle, lambda: self.mark_cordon(node))
        self.daemon_sets.node_changed(node)
        self._wake_scheduler(node.name)
        if any(taint.effect == "NoExecute" for taint in node.taints):
            timers.wake("taints", node.name, latencies.lifecycle, lambda: self.throw_out(node))

    def pod_changed(self, pod: Pod) -> None:
        """A pod was written or removed."""
        self.daemon_sets.pod_changed(pod)
        owner = self.store.owner_of(pod)
        if isinstance(owner, Deployment):
            self.wake_deployment(owner)
        for budget in self.store.budgets.values():
            self._count(budget, pod)
        self._wake_scheduler(pod.node_name or pod.only_node)

    def _wake_scheduler(self, node_name: str) -> None:
        self._touched[node_name] = True
        self.store.timers.wake("scheduler", "", self.store.latencies.scheduler, self.schedule)

    def _count(self, budget: Budget, pod: Pod) -> None:
        """Keeps the members of a budget; a pod that it covers wakes its controller."""
        if not budget.covers(pod):
            if budget.members is not None:
                budget.members.pop(pod.uid, None)
            return
        if budget.members is not None:
            if pod.is_gone:
                budget.members.pop(pod.uid, None)
            else:
                budget.members[pod.uid] = pod
        self.wake_budget(budget)

    def wake_daemon_set(self, daemon_set: DaemonSet) -> None:
        """Has the DaemonSet controller look at all nodes for one of them."""
        self.daemon_sets.wake(daemon_set)

    def wake_deployment(self, deployment: Deployment) -> None:
        """Has the ReplicaSet controller look at one of them."""
        delay = self.store.latencies.replica_set
        self.store.timers.wake("replicaset", deployment.uid, delay, lambda: self.sync_deployment(deployment))

    def wake_budget(self, budget: Budget) -> None:
        """Has the disruption controller look at one budget."""
        delay = self.store.latencies.budget
        self.store.timers.wake("budget", f"{budget.namespace}/{budget.name}", delay, lambda: self.sync_budget(budget))

    # DaemonSets ---------------------------------------------------------------------------------------------------

    def _make_daemon(self, daemon_set: DaemonSet, node_name: str) -> Pod:
        """A new pod of the newest template that the DaemonSet controller has seen."""
        template = daemon_set.template
        assert template is not None
        spec = daemon_set.spec if daemon_set.observed == daemon_set.generation else template.spec
        pod = self.make_pod(daemon_set.namespace, self.store.pod_name(daemon_set.namespace, daemon_set.name), spec, daemon_set.owner)
        pod.labels.update({REVISION_HASH: template.hash, GENERATION: str(daemon_set.observed)})
        pod.tolerations = spec.tolerations + DAEMON_TOLERATIONS
        pod.target = node_name
        return pod

    # ReplicaSets --------------------------------------------------------------------------------------------------

    def sync_deployment(self, deployment: Deployment) -> None:
        """Keeps the number of pods that are neither marked nor over."""
        if self.store.deployments.get(f"{deployment.namespace}/{deployment.name}") is not deployment:
            return
        active = [pod for pod in self.store.pods_of(deployment.uid) if pod.is_active]
        for pod in active[deployment.replicas :]:
            self.server.delete_pod(pod, who="replicaset-controller")
        if deployment.namespace in self.store.terminating:
            return
        for _ in range(deployment.replicas - len(active)):
            owner = deployment.owner
            pod = self.make_pod(deployment.namespace, self.store.pod_name(deployment.namespace, owner.name), deployment.spec, owner)
            self.store.write("replicaset-controller", "create", pod.ref)
            self.store.pod_written(pod)

    def make_pod(self, namespace: str, name: str, spec: PodSpec, owner: Owner | None) -> Pod:
        """A new pod, not yet written."""
        return Pod(
            namespace=namespace,
            name=name,
            uid=self.store.uid(),
            spec=spec,
            owner=owner,
            tolerations=spec.tolerations + POD_TOLERATIONS,
            labels=dict(spec.labels),
            annotations=dict(spec.annotations),
            finalizers=spec.finalizers,
        )

    # The scheduler ------------------------------------------------------------------------------------------------

    def schedule(self) -> None:
        """Binds what can be bound, on the nodes that something has happened on."""
        touched, self._touched = self._touched, {}
        for pod in self.store.unbound_for(name for name in touched if name):
            if pod.marked_at is not None or not is_schedulable(pod):
                continue
            node = self.choose_node(pod)
            if node is not None:
                pod.node_name = node.name
                self.store.pod_written(pod)

    def choose_node(self, pod: Pod) -> Node | None:
        """The fitting node with the most free GPUs; of equal ones the first made."""
        if pod.only_node:
            node = self.store.nodes.get(pod.only_node)
            return node if node is not None and self.fits(pod, node) else None
        fitting = [node for node in self.store.nodes.values() if self.fits(pod, node)]
        return max(fitting, key=self.store.free_gpus, default=None)

    def fits(self, pod: Pod, node: Node) -> bool:
        """Whether the scheduler may put it there."""
        taints = node.taints
        if node.unschedulable and all(taint.key != UNSCHEDULABLE_TAINT for taint in taints):
            taints = (*taints, Taint(UNSCHEDULABLE_TAINT))
        return (
            not node.is_down
            and node.is_ready
            and tolerates(pod.tolerations, taints, "NoSchedule", "NoExecute")
            and pod.spec.fits(node.labels)
            and not (pod.spec.avoids_drivers and self._has_driver(node))
            and (not pod.spec.gpus or self.store.free_gpus(node) >= pod.spec.gpus)
        )

    def _has_driver(self, node: Node) -> bool:
        there = self.store.pods_bound_to(node.name)
        return any(not pod.is_over and pod.labels.get(COMPONENT_LABEL) in DRIVER_COMPONENTS for pod in there)

    # Nodes --------------------------------------------------------------------------------------------------------

    def mark_cordon(self, node: Node) -> None:
        """Keeps the taint `unschedulable` in step with the field, as a write of its own."""
        has = any(taint.key == UNSCHEDULABLE_TAINT for taint in node.taints)
        if has == node.unschedulable or self.store.nodes.get(node.name) is not node:
            return
        if node.unschedulable:
            node.taints = (*node.taints, Taint(UNSCHEDULABLE_TAINT, time_added=self.store.wall()))
        else:
            node.taints = tuple(taint for taint in node.taints if taint.key != UNSCHEDULABLE_TAINT)
        self.store.node_written(node)

    def throw_out(self, node: Node) -> None:
        """Deletes the pods that do not tolerate a NoExecute taint."""
        for pod in self.store.pods_bound_to(node.name):
            if pod.marked_at is None and not tolerates(pod.tolerations, node.taints, "NoExecute"):
                self.server.delete_pod(pod, who="taint-eviction-controller")

    # Budgets ------------------------------------------------------------------------------------------------------

    def sync_budget(self, budget: Budget) -> None:
        """Counts anew."""
        if budget.members is None:
            budget.members = {pod.uid: pod for pod in self.store.pods.values() if budget.covers(pod)}
        pods = list(budget.members.values())
        now = self.store.timers.now()
        let_go = {
            name: at
            for name, at in budget.disrupted.items()
            if now - at < DISRUPTED_FOR and any(pod.name == name and pod.marked_at is None for pod in pods)
        }
        budget.disrupted = let_go
        expected, scale = len(pods), self._scale(pods)
        if budget.max_unavailable is not None:
            expected = scale
            budget.desired = max(0, scale - _number(budget.max_unavailable, scale))
        elif isinstance(budget.min_available, str):
            expected = scale
            budget.desired = _number(budget.min_available, scale)
        else:
            budget.desired = budget.min_available or 0
        before = budget.fleet_view()
        budget.current = sum(pod.is_ready and pod.marked_at is None and pod.name not in let_go for pod in pods)
        budget.allowed = max(0, budget.current - budget.desired) if expected else 0
        budget.is_observed = True
        if budget.fleet_view() != before:
            self.store.tell(budget)

    def _scale(self, pods: list[Pod]) -> int:
        total, owners = 0, dict[str, bool]()
        for pod in pods:
            if pod.owner is None or pod.owner.uid in owners:
                continue
            owners[pod.owner.uid] = True
            owner = self.store.owner_of(pod)
            total += owner.replicas if isinstance(owner, Deployment) else len(self.store.pods_of(pod.owner.uid))
        return total


def _number(value: int | str, whole: int) -> int:
    """A number, or a share of the whole, rounded up as the controller does."""
    if isinstance(value, int):
        return value
    return -(-whole * int(value.rstrip("%")) // 100)


def with_labels(spec: PodSpec, labels: dict[str, str]) -> PodSpec:
    """The same with more labels."""
    return replace(spec, labels={**spec.labels, **labels})
