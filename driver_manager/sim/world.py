"""The simulated world: what tests, rehearsals and the demo build, and the lives that act in it.

    world = World(seed=1)
    world.add_node("gpu-1", gpus=8, labels={"nvidia.com/gpu.deploy.driver": "true"}, with_machine=True)
    world.machine("gpu-1").install()
    world.add_pod("train-0", node="gpu-1", spec=PodSpec(gpus=1, stop_seconds=2.0))
    life = world.life("gpu-1", kill_at=7)
    await life.run(program(life.cluster, life.host, life.clock))

Builders act at once, as if all had been there for long; from then on things take their time. They work before there is an event loop.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from driver_manager import names
from driver_manager.core.snapshot import ChangeKind, ClaimView, Identity, NodeView, Owner, PodView, Rule, Taint
from driver_manager.ports import NodePatch
from driver_manager.sim.access import STOCK_ROLE
from driver_manager.sim.clock import SimClock
from driver_manager.sim.cluster import SimCluster
from driver_manager.sim.controllers import Controllers
from driver_manager.sim.faults import Faults, Life
from driver_manager.sim.feeds import Feeds, Scope
from driver_manager.sim.fleet import SimFleet
from driver_manager.sim.host import SimHost
from driver_manager.sim.kubelet import Kubelets
from driver_manager.sim.machine import Machine
from driver_manager.sim.objects import (
    Account,
    Budget,
    DaemonSet,
    Deployment,
    Node,
    Phase,
    Pod,
    PodSpec,
    UnhealthyPolicy,
)
from driver_manager.sim.server import Server
from driver_manager.sim.store import Latencies, Store


@dataclass(frozen=True, slots=True)
class NodeSurface:
    """What of a node must be as it was: all but our status and the lifecycle controller's taint."""

    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    unschedulable: bool
    taints: tuple[Taint, ...]


class LifeClock(SimClock):
    """The clock of one life: a dead program does not even sleep."""

    def __init__(self, seed: int, life: Life) -> None:
        super().__init__(seed)
        self._life = life

    async def sleep(self, seconds: float) -> None:
        """Lets virtual time pass."""
        await self._life.sleep(seconds)


class AgentLife(Life):
    """One life of a program on a node, with the three ports it sees the world through."""

    def __init__(self, world: "World", node: str | None, account: Account, number: int, kill_at: int | None) -> None:
        super().__init__(world.faults, number, kill_at)
        self.cluster = SimCluster(world.server, account, self)
        self.fleet = SimFleet(world.server, world.feeds, account, self, world.scope)
        self.clock = LifeClock(world.store.rng.getrandbits(32), self)
        self._machine = world.kubelets.machines.get(node) if node else None
        self._host = SimHost(self._machine, self) if self._machine is not None else None

    @property
    def host(self) -> SimHost:
        """The machine of its node, if it has one."""
        if self._host is None:
            raise LookupError("this life has no machine")
        return self._host


class World:
    """A cluster, the machines of its nodes, and time.

    Args:
        seed: of all chance in it.
        latencies: how long the parts of the cluster take.
    """

    def __init__(self, seed: int = 0, latencies: Latencies | None = None) -> None:
        self.store = Store(seed, latencies)
        self.server = Server(self.store)
        self.controllers = Controllers(self.store, self.server)
        self.kubelets = Kubelets(self.store)
        self.faults = Faults()
        self.feeds = Feeds(self.store, self.faults.watches, seed)
        self.server.on_break.append(self.feeds.break_all)
        self.scope = Scope()
        """What a controller is set to look at."""
        self.lives: list[AgentLife] = []
        self.default_account = self.add_account("system:serviceaccount:gpu-operator:nvidia-driver", STOCK_ROLE)

    # Builders -----------------------------------------------------------------------------------------------------

    def add_node(
        self,
        name: str,
        *,
        gpus: int = 8,
        labels: Mapping[str, str] | None = None,
        annotations: Mapping[str, str] | None = None,
        unschedulable: bool = False,
        taints: tuple[Taint, ...] = (),
        with_machine: bool = False,
    ) -> Node:
        """A node, with the pods of the DaemonSets that select it."""
        node = Node(
            name=name,
            uid=self.store.uid(),
            labels={"kubernetes.io/hostname": name, **(labels or {})},
            annotations=dict(annotations or {}),
            unschedulable=unschedulable,
            taints=taints,
            gpus=gpus,
        )
        if with_machine:
            machine = Machine(name, self.store.rng, self.store.timers.now)
            machine.gpus = gpus
            node.boot_id = machine.boot_id
            machine.on_boot.append(lambda: self._booted(name))
            self.kubelets.machines[name] = machine
        self.store.nodes[name] = node
        self.controllers.mark_cordon(node)
        self.store.node_written(node)
        for daemon_set in self.store.daemon_sets.values():
            self._settle_daemon_set(daemon_set)
        return node

    def remove_node(self, name: str) -> None:
        """Deletes a Node and, as the garbage collector would, its pods."""
        node = self.store.nodes[name]
        self.store.node_removed(node)
        for pod in self.store.pods_bound_to(node.name):
            self.store.pod_removed(pod)

    def add_daemon_set(self, name: str, spec: PodSpec | None = None, *, namespace: str = "gpu-operator") -> DaemonSet:
        """A DaemonSet with running pods on all nodes it selects."""
        made = DaemonSet(namespace=namespace, name=name, uid=self.store.uid(), spec=spec or PodSpec())
        return self.settle(made)

    def settle(self, daemon_set: DaemonSet) -> DaemonSet:
        """Puts a DaemonSet into the cluster, with running pods on all nodes it selects; orphans that it selects are taken over."""
        self.store.daemon_sets[daemon_set.ref] = daemon_set
        self.controllers.daemon_sets.take_over(daemon_set)
        daemon_set.dirty = dict.fromkeys(self.store.nodes, True)
        self._settle_daemon_set(daemon_set)
        return daemon_set

    def add_deployment(
        self, name: str, spec: PodSpec | None = None, *, replicas: int = 1, namespace: str = "default", node: str | None = None
    ) -> Deployment:
        """A Deployment with running pods, on one node or where the scheduler likes. Its pods have the label `app`."""
        wanted = spec or PodSpec()
        wanted = replace(wanted, labels={"app": name, **wanted.labels})
        made = Deployment(namespace=namespace, name=name, uid=self.store.uid(), spec=wanted, replicas=replicas)
        self.store.deployments[f"{namespace}/{name}"] = made
        for _ in range(replicas):
            pod = self.controllers.make_pod(namespace, self.store.pod_name(namespace, made.owner.name), wanted, made.owner)
            self._run_now(pod, node)
        return made

    def add_pod(
        self,
        name: str,
        spec: PodSpec | None = None,
        *,
        node: str | None = None,
        namespace: str = "default",
        owner: Owner | None = None,
        is_running: bool = True,
    ) -> Pod:
        """A pod of its own; not running it goes through the scheduler and its start like any new one."""
        pod = self.controllers.make_pod(namespace, name, spec or PodSpec(), owner)
        if is_running:
            self._run_now(pod, node)
        else:
            pod.node_name = node
            self.store.pod_written(pod)
        return pod

    def add_mirror_pod(self, name: str, spec: PodSpec | None = None, *, node: str, namespace: str = "kube-system") -> Pod:
        """The mirror of a static pod."""
        wanted = spec or PodSpec()
        wanted = replace(wanted, annotations={**wanted.annotations, names.MIRROR: "sim"})
        return self.add_pod(f"{name}-{node}", wanted, node=node, namespace=namespace, owner=Owner("Node", node, self.store.nodes[node].uid))

    def add_budget(
        self,
        name: str,
        selector: Mapping[str, str],
        *,
        namespace: str = "default",
        min_available: int | str | None = None,
        max_unavailable: int | str | None = None,
        unhealthy: UnhealthyPolicy = UnhealthyPolicy.IF_HEALTHY_BUDGET,
    ) -> Budget:
        """A PodDisruptionBudget, with its status."""
        made = Budget(
            namespace=namespace,
            name=name,
            selector=dict(selector),
            min_available=min_available,
            max_unavailable=max_unavailable,
            unhealthy=unhealthy,
        )
        self.store.budgets[f"{namespace}/{name}"] = made
        self.controllers.sync_budget(made)
        self.store.tell(made)
        return made

    def add_claim(
        self, name: str, *, namespace: str = "default", drivers: frozenset[str] = frozenset({"gpu.nvidia.com"}), is_admin: bool = False
    ) -> ClaimView:
        """A ResourceClaim with devices of these drivers; pods name it in `PodSpec.claims`."""
        made = ClaimView(namespace=namespace, name=name, drivers=drivers, is_admin=is_admin)
        self.store.claims[namespace, name] = made
        return made

    def add_account(
        self,
        name: str,
        rules: tuple[Rule, ...] = STOCK_ROLE,
        *,
        identity: Identity | None = None,
        namespace_rules: Mapping[str, tuple[Rule, ...]] | None = None,
    ) -> Account:
        """Somebody who may do something."""
        made = Account(name=name, rules=rules, identity=identity or Identity(), namespace_rules=dict(namespace_rules or {}))
        self.store.accounts[name] = made
        return made

    def identity_of(self, pod: Pod) -> Identity:
        """What the token of a pod says."""
        return Identity(namespace=pod.namespace, pod_name=pod.name, pod_uid=pod.uid, node_name=pod.node_name or "")

    def put_daemon_set(self, daemon_set: DaemonSet) -> None:
        """Somebody makes a DaemonSet: its pods come in their time."""
        self.store.daemon_sets[daemon_set.ref] = daemon_set
        self.controllers.daemon_sets.take_over(daemon_set)
        self.controllers.daemon_sets.written(daemon_set)
        self.controllers.wake_daemon_set(daemon_set)

    # Ports --------------------------------------------------------------------------------------------------------

    def life(self, node: str | None = None, *, account: Account | None = None, kill_at: int | None = None) -> AgentLife:
        """A new life of a program, with `cluster`, `host` and `clock`; killed at that boundary if one is given."""
        self.store.timers.bind()
        life = AgentLife(self, node, account or self.default_account, len(self.lives) + 1, kill_at)
        self.lives.append(life)
        return life

    def cluster(self, account: Account | None = None) -> SimCluster:
        """A Cluster for one account, in a life of its own."""
        return self.life(account=account).cluster

    def host(self, node: str) -> SimHost:
        """The Host of a node, in a life of its own."""
        return self.life(node).host

    # Looking ------------------------------------------------------------------------------------------------------

    def machine(self, node: str) -> Machine:
        """The machine of a node."""
        return self.kubelets.machines[node]

    def node(self, name: str) -> NodeView:
        """A node as it is."""
        return self.store.nodes[name].view()

    def pods(self, node: str | None = None) -> list[PodView]:
        """The pods of a node, or all."""
        return [pod.view() for pod in self.store.pods.values() if node in (None, pod.node_name)]

    def pod(self, namespace: str, start: str) -> Pod:
        """The first pod whose name begins so."""
        return next(pod for pod in self.store.pods.values() if pod.namespace == namespace and pod.name.startswith(start))

    def surface(self, name: str) -> NodeSurface:
        """What of a node must be as it was."""
        node = self.store.nodes[name]
        return NodeSurface(
            labels=dict(node.labels),
            annotations={key: value for key, value in node.annotations.items() if key != names.STATUS},
            unschedulable=node.unschedulable,
            taints=tuple(taint for taint in node.taints if taint.key != names.UNSCHEDULABLE_TAINT),
        )

    @property
    def evictions(self) -> list[tuple[float, str, str]]:
        """Accepted evictions: time, `namespace/name`, uid."""
        return self.server.evictions

    def diary(self) -> str:
        """Everything that was written or removed, in order."""
        return "\n".join(str(entry) for entry in self.store.diary)

    # What others do meanwhile -------------------------------------------------------------------------------------

    def edit_node(
        self,
        name: str,
        *,
        labels: Mapping[str, str | None] | None = None,
        annotations: Mapping[str, str | None] | None = None,
        unschedulable: bool | None = None,
        taints: tuple[Taint, ...] | None = None,
    ) -> None:
        """Somebody else changes a node."""
        patch = NodePatch(name=name, labels=labels or {}, annotations=annotations or {}, unschedulable=unschedulable, taints=taints)
        self.server.patch_node(patch, "somebody")

    def delete_pod(self, pod: Pod, grace_seconds: int | None = None) -> None:
        """Somebody deletes a pod."""
        self.server.delete_pod(pod, grace_seconds, who="somebody")

    def set_ready(self, pod: Pod, is_ready: bool) -> None:
        """A pod becomes Ready or not."""
        pod.is_ready = is_ready
        self.store.pod_written(pod)

    def hold_in_init(self, pod: Pod) -> None:
        """A pod's init container works, for as long as the test likes."""
        pod.phase, pod.is_ready = Phase.PENDING, False
        self.store.pod_written(pod)

    def set_budget(self, budget: Budget, *, min_available: int | str | None = None, max_unavailable: int | str | None = None) -> None:
        """Somebody edits a budget; until its controller has seen it evictions are refused."""
        budget.min_available, budget.max_unavailable = min_available, max_unavailable
        budget.is_observed = False
        self.store.tell(budget)
        self.controllers.wake_budget(budget)

    def remove_budget(self, budget: Budget) -> None:
        """Somebody deletes a budget."""
        del self.store.budgets[f"{budget.namespace}/{budget.name}"]
        self.store.tell(budget, ChangeKind.GONE)

    def delete_namespace(self, namespace: str) -> None:
        """Somebody deletes a namespace: no new content, and its pods go a moment later."""
        self.store.terminating[namespace] = True

        def sweep() -> None:
            for pod in [one for one in self.store.pods.values() if one.namespace == namespace]:
                self.server.delete_pod(pod, who="namespace-controller")

        self.store.timers.later(self.store.latencies.daemon_set, sweep)

    def refuse_creates(self, owner: DaemonSet, reason: str | None) -> None:
        """Admission refuses the pods of a DaemonSet; None ends that."""
        if reason is None:
            self.controllers.daemon_sets.refused_creates.pop(owner.ref, None)
        else:
            self.controllers.daemon_sets.refused_creates[owner.ref] = reason

    # ---------------------------------------------------------------------------------------------------------------

    def _booted(self, name: str) -> None:
        """The kubelet reports the new boot."""
        if (node := self.store.nodes.get(name)) is not None:
            node.boot_id = self.machine(name).boot_id
            self.store.node_written(node)

    def _settle_daemon_set(self, daemon_set: DaemonSet) -> None:
        for pod in self.controllers.daemon_sets.sync(daemon_set):
            self._run_now(pod, pod.target)

    def _run_now(self, pod: Pod, node: str | None) -> None:
        """Binds and starts without taking time; what fits nowhere stays Pending."""
        chosen = self.store.nodes[node] if node is not None else self.controllers.choose_node(pod)
        if chosen is None:
            self.store.pod_written(pod)
            return
        pod.node_name = chosen.name
        self.kubelets.start(pod)
