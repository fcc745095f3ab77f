"""Fleets: nodes with a driver's DaemonSet, validators and GPU pods, and what goes wrong with them.

world = FleetWorld(seed=1, nodes=8)
life = world.controller(kill_at=40)
world.new_driver("two")
await life.run(program(life.fleet, life.clock))
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from driver_manager import names
from driver_manager.core.fleet import Kind, PolicySource
from driver_manager.core.snapshot import ChangeKind, Owner, Rule
from driver_manager.sim.access import CONTROLLER_NAMESPACE_ROLE, CONTROLLER_ROLE, MAINTENANCE_ROLE
from driver_manager.sim.feeds import POLICY_KINDS
from driver_manager.sim.fleet import SimFleet
from driver_manager.sim.gpunodes import Conduct, GpuNodes
from driver_manager.sim.maintenances import MaintenanceOperator
from driver_manager.sim.objects import HOSTNAME, Account, Cascade, DaemonSet, Node, Phase, Pod, PodSpec, Slice
from driver_manager.sim.store import Deed, Latencies, Object
from driver_manager.sim.world import AgentLife, World

NAMESPACE: Final = "gpu-operator"
OWN_NAMESPACE: Final = "driver-manager"
"""The controller's: its Lease is there."""
MAINTENANCE_NAMESPACE: Final = "maintenance"
"""Where NodeMaintenances are, in a world with an operator for them."""
POLICY: Final = "cluster-policy"
PRESENT: Final = "nvidia.com/gpu.present"
VALIDATOR_LABEL: Final = "nvidia.com/gpu.deploy.operator-validator"
WORKLOAD: Final = {"job": "training"}
"""Labels of all GPU pods of the fleet."""
CONTROLLER: Final = "system:serviceaccount:driver-manager:driver-manager-controller"


class FleetWorld(World):
    """A world with a fleet in it, rolled out and at rest.

    Args:
        seed: of all chance.
        nodes: how many.
        gpus: of each node.
        gpu_pods: on each node, of one Deployment per node that can run nowhere else.
        pod_grace: seconds that a GPU pod takes to stop.
        driver_stop: seconds that a driver pod takes to stop.
        driver_start: seconds until it is Ready.
        validator: seconds from there until its validator is; None: there are no validators.
        validator_goes: whether the validator's pod is replaced together with the driver's.
        devices: seconds from there until the GPUs are back.
        pools: names of NVIDIADrivers, which the nodes are dealt out to in turn; none: one ClusterPolicy's driver.
        policy: the upgrade policy, as it is written.
        on_delete: whether the driver's DaemonSets have that strategy.
        budget: how many GPU pods of the whole fleet may be away; None: no budget.
        maintenance: seconds until a maintenance operator cordons a node that it is asked for; None: there is none.
        has_dra: whether the GPUs of nodes are in ResourceSlices, and not what a device plugin offers.
        latencies: how long the parts of the cluster take.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        nodes: int = 8,
        gpus: int = 8,
        gpu_pods: int = 2,
        pod_grace: float = 2.0,
        driver_stop: float = 2.0,
        driver_start: float = 5.0,
        validator: float | None = 1.0,
        validator_goes: bool = True,
        devices: float = 1.0,
        pools: Sequence[str] = (),
        policy: Mapping[str, Any] | None = None,
        on_delete: bool = True,
        budget: int | None = None,
        maintenance: float | None = None,
        has_dra: bool = False,
        latencies: Latencies | None = None,
    ) -> None:
        super().__init__(seed, latencies)
        conduct = Conduct(
            start_seconds=driver_start,
            stop_seconds=driver_stop,
            validator_seconds=math.inf if validator is None else validator,
            devices_seconds=devices,
        )
        self.gpu_nodes = GpuNodes(self.store, self.server, self.kubelets, self.scope, conduct, validator_goes=validator_goes)
        self.controllers.daemon_sets.shapers.append(self.gpu_nodes.shape)
        self.cordoned: set[str] = set()
        self.driverless: set[str] = set()
        """Nodes without a Ready driver pod."""
        self.not_ready: set[str] = set()
        self.store.watchers.append(self._count)
        spaces: dict[str, tuple[Rule, ...]] = dict.fromkeys((NAMESPACE, OWN_NAMESPACE), CONTROLLER_NAMESPACE_ROLE)
        self.operator: MaintenanceOperator | None = None
        if maintenance is not None:
            self.operator = MaintenanceOperator(self.store, self.server, maintenance)
            self.scope = replace(self.scope, maintenances=MAINTENANCE_NAMESPACE)
            spaces[MAINTENANCE_NAMESPACE] = MAINTENANCE_ROLE
        self.account = self.add_account(CONTROLLER, CONTROLLER_ROLE, namespace_rules=spaces)
        self.policy = {"autoUpgrade": True, "maxParallelUpgrades": 1} if policy is None else dict(policy)
        self._gpus, self._gpu_pods, self._pod_grace, self._has_dra = gpus, gpu_pods, pod_grace, has_dra
        self._pools = tuple(pools)
        self._add_policies(self._pools)
        for pool in self._pools or ("",):
            self._add_driver(pool, on_delete)
        if validator is not None:
            spec = PodSpec(labels={"app": names.VALIDATOR_APP}, node_selector={VALIDATOR_LABEL: "true"}, stop_seconds=0.1)
            made = DaemonSet(namespace=NAMESPACE, name=names.VALIDATOR_APP, uid=self.store.uid(), spec=spec, is_on_delete=False)
            self.settle(made)
        for number in range(nodes):
            self.add_gpu_node(f"gpu-{number + 1}")
        if budget is not None:
            self.add_budget("training", WORKLOAD, max_unavailable=budget)

    # Builders -----------------------------------------------------------------------------------------------------

    def add_gpu_node(
        self, name: str, *, pool: str | None = None, labels: Mapping[str, str] | None = None, gpu_pods: int | None = None
    ) -> Node:
        """A node with its driver, its validator and its GPU pods."""
        if pool is None and self._pools:
            pool = self._pools[len(self.store.nodes) % len(self._pools)]
        owner = {names.DRIVER_OWNER: pool} if pool else {}
        all_labels = {PRESENT: "true", names.DEPLOY_DRIVER: "true", VALIDATOR_LABEL: "true", **owner, **(labels or {})}
        node = self.add_node(name, gpus=self._gpus, labels=all_labels)
        if self._has_dra:
            node.has_dra = True
            self.gpu_nodes.publish(node, self._gpus)
        replicas = self._gpu_pods if gpu_pods is None else gpu_pods
        if replicas:
            spec = PodSpec(
                labels=WORKLOAD,
                gpus=1,
                node_selector={HOSTNAME: name},
                stop_seconds=self._pod_grace,
                grace_seconds=max(1, math.ceil(self._pod_grace)),
            )
            self.add_deployment(f"train-{name}", spec, replicas=replicas, node=name)
        return node

    def _add_policies(self, pools: Sequence[str]) -> None:
        if not pools:
            self.feeds.serve(Kind.NVIDIA_DRIVERS, False)
        self.set_policy("ClusterPolicy", POLICY, upgrade_policy=None if pools else self.policy, uses_nvidia_driver_crd=bool(pools))
        for pool in pools:
            self.set_policy("NVIDIADriver", pool, upgrade_policy=self.policy, node_selector={"pool": pool})

    def _add_driver(self, pool: str, on_delete: bool) -> None:
        selector = {names.DEPLOY_DRIVER: "true"} | ({names.DRIVER_OWNER: pool} if pool else {})
        name = f"nvidia-gpu-driver-{pool}" if pool else names.DRIVER_APP
        owner = self.store.policies["NVIDIADriver", pool] if pool else self.store.policies["ClusterPolicy", POLICY]
        spec = PodSpec(
            labels={"app": name, names.COMPONENT_LABEL: "nvidia-driver"},
            node_selector=selector,
            host_paths=("/run/nvidia", "/", "/sys"),
            digest="one",
            image="driver:one",
            priority=2_000_001_000,
            grace_seconds=60,
        )
        made = DaemonSet(
            namespace=NAMESPACE,
            name=name,
            uid=self.store.uid(),
            spec=spec,
            made_for=Owner(owner.kind, owner.name, owner.uid),
            is_on_delete=on_delete,
        )
        self.settle(made)

    # Lives --------------------------------------------------------------------------------------------------------

    def controller(self, *, account: Account | None = None, kill_at: int | None = None) -> AgentLife:
        """A new life of the controller, with `fleet` and `clock`; killed at that boundary if one is given."""
        return self.life(account=account or self.account, kill_at=kill_at)

    def client(self, account: Account | None = None) -> SimFleet:
        """A Fleet for one account, in a life of its own."""
        return self.controller(account=account).fleet

    # What others do meanwhile -------------------------------------------------------------------------------------

    def driver_set(self, pool: str = "") -> DaemonSet:
        """The driver's DaemonSet, of a pool or of all."""
        pool = pool or (self._pools[0] if self._pools else "")
        return self.store.daemon_sets[f"{NAMESPACE}/{f'nvidia-gpu-driver-{pool}' if pool else names.DRIVER_APP}"]

    def new_driver(self, digest: str | None = None, *, image: str | None = None, pool: str | None = None) -> None:
        """The operator changes the template of the driver's DaemonSets, or of one pool's; without a digest only the image changes."""
        for name in [pool] if pool is not None else self._pools or ("",):
            driver = self.driver_set(name)
            wanted = driver.spec.digest if digest is None else digest
            self.controllers.daemon_sets.set_template(driver, replace(driver.spec, digest=wanted, image=image or f"driver:{digest}"))

    def publish(self, name: str, node_name: str, devices: int, *, driver: str = names.GPU_DRA_DRIVER, generation: int = 1) -> None:
        """A DRA driver makes or changes a ResourceSlice of a node's pool."""
        there = self.store.slices.get(name)
        uid = there.uid if there is not None else self.store.uid()
        made = Slice(name=name, uid=uid, node_name=node_name, devices=devices, driver=driver, generation=generation)
        self.store.slice_written(made)

    def unpublish(self, name: str) -> None:
        """A DRA driver deletes a ResourceSlice."""
        self.store.slice_removed(self.store.slices[name])

    def delete_daemon_set(self, daemon_set: DaemonSet, cascade: Cascade = Cascade.BACKGROUND) -> None:
        """Somebody deletes a DaemonSet."""
        self.controllers.daemon_sets.delete(daemon_set, cascade)

    def relabel_pod(self, pod: Pod, labels: Mapping[str, str | None]) -> None:
        """Somebody changes labels of a pod."""
        changed = {**pod.labels, **labels}
        pod.labels = {key: value for key, value in changed.items() if value is not None}
        self.store.pod_written(pod)

    def behave(self, *node_names: str, **changes: Any) -> None:
        """From now on new pods on these nodes (none named: on all without a conduct of their own) do otherwise: fields of `Conduct`."""
        for name in node_names:
            self.gpu_nodes.change(name, **changes)
        if not node_names:
            self.gpu_nodes.conduct = replace(self.gpu_nodes.conduct, **changes)

    def set_node_ready(self, name: str, is_ready: bool) -> None:
        """The kubelet of a node dies, or comes back; what its pods say of themselves goes with it."""
        node = self.store.nodes[name]
        self.kubelets.set_down(node, not is_ready)
        node.is_ready = is_ready
        self.store.node_written(node)
        for pod in self.store.pods_bound_to(name):
            wanted = is_ready and pod.phase is Phase.RUNNING and pod.spec.is_ready
            if pod.is_ready != wanted:
                self.set_ready(pod, wanted)

    def make_node_anew(self, name: str) -> Node:
        """Deletes a node and makes one of the same name: another uid, only the operator's labels, no pods and no GPUs yet."""
        old = self.store.nodes[name]
        self.remove_node(name)
        kept = (HOSTNAME, PRESENT, names.DEPLOY_DRIVER, VALIDATOR_LABEL, names.DRIVER_OWNER)
        labels = {key: value for key, value in old.labels.items() if key in kept}
        node = Node(name=name, uid=self.store.uid(), labels=labels, gpus=old.gpus, offered=0, counted=0)
        self.store.nodes[name] = node
        self.store.node_written(node)
        return node

    def set_policy(self, kind: str, name: str, **changes: Any) -> PolicySource:
        """Somebody makes or edits a ClusterPolicy or an NVIDIADriver: fields of `PolicySource`."""
        there = self.store.policies.get((kind, name))
        if there is None:
            there = PolicySource(kind=kind, name=name, uid=self.store.uid(), resource_version="", created=self.store.wall())
        self.store.version += 1
        version = str(self.store.version)
        made = replace(there, resource_version=version, generation=there.generation + 1, **changes)
        self.store.policies[kind, name] = made
        self.store.tell(made)
        return made

    def remove_policy(self, kind: str, name: str) -> None:
        """Somebody deletes a custom resource."""
        self.store.version += 1
        self.store.tell(self.store.policies.pop((kind, name)), ChangeKind.GONE)

    def serve(self, kind: str, is_served: bool = True) -> None:
        """Installs a custom resource, or takes it away."""
        (found,) = [one for one, name in {**POLICY_KINDS, Kind.MAINTENANCES: "NodeMaintenance"}.items() if name == kind]
        self.feeds.serve(found, is_served)

    # Looking ------------------------------------------------------------------------------------------------------

    def on_change(self, what: Callable[[Object, ChangeKind], None]) -> None:
        """Has something done at every change of the world, for example a budget checked.

        The world goes on after an error in it; `run_virtual` raises the first one at the end.
        """

        def hear(one: Object, change: ChangeKind) -> None:
            try:
                what(one, change)
            except Exception as error:  # of whatever kind: it is the test's
                asyncio.get_running_loop().call_soon(_raise, error)

        self.store.watchers.append(hear)

    @property
    def unavailable(self) -> set[str]:
        """Nodes that cannot work: cordoned, not Ready, or without a Ready driver."""
        return self.cordoned | self.driverless | self.not_ready

    def deeds(self, what: str, node_name: str | None = None) -> list[Deed]:
        """What was done by requests (`patch`, `evict`, `delete`, `lease`, `event`, `condition`), in order."""
        return [deed for deed in self.store.deeds if deed.what == what and node_name in (None, deed.node_name)]

    def driver_pods(self, node_name: str | None = None) -> list[Pod]:
        """The driver pods of a node, or all."""
        pods = self.store.pods.values() if node_name is None else self.store.pods_bound_to(node_name)
        return [pod for pod in pods if self.gpu_nodes.is_driver(pod)]

    def _count(self, one: Object, change: ChangeKind) -> None:
        if isinstance(one, Node):
            is_there = change is ChangeKind.SEEN
            _put(self.cordoned, one.name, is_there and one.unschedulable)
            _put(self.not_ready, one.name, is_there and not one.is_ready)
            _put(self.driverless, one.name, is_there and not self._has_driver(one.name))
        elif isinstance(one, Pod) and one.node_name in self.store.nodes and self.gpu_nodes.is_driver(one):
            _put(self.driverless, one.node_name, not self._has_driver(one.node_name))

    def _has_driver(self, node_name: str) -> bool:
        return any(pod.is_ready and self.gpu_nodes.is_driver(pod) for pod in self.store.pods_bound_to(node_name))


def _raise(error: Exception) -> None:
    raise error


def _put(names_of: set[str], name: str, is_in: bool) -> None:
    if is_in:
        names_of.add(name)
    else:
        names_of.discard(name)
