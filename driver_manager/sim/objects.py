"""The objects of the simulated cluster, as they change; views of them are `core.snapshot`'s."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from driver_manager.core.fleet import BudgetView, FleetPod, FleetSet, MaintenanceView, Revision, SliceView
from driver_manager.core.snapshot import (
    DaemonSetView,
    Identity,
    LabelExpression,
    NodeView,
    Owner,
    PodView,
    Rule,
    Taint,
    Toleration,
)
from driver_manager.names import GPU_DRA_DRIVER, PARK, PARKED, REVISION_HASH

ALL_OF_GRACE: Final = math.inf
"""A stop time: the pod uses all of its grace period and is killed then."""
NEVER: Final = None
"""A stop time: the pod hangs in Terminating."""
GPU: Final = "nvidia.com/gpu"
HOSTNAME: Final = "kubernetes.io/hostname"
GENERATION: Final = "pod-template-generation"
"""Label that the DaemonSet controller puts on its pods, beside the hash."""
REPLICA_SET: Final = "-5d4f8c7b9"
"""The end of the name of a Deployment's one ReplicaSet."""

POD_TOLERATIONS: Final = (
    Toleration("node.kubernetes.io/not-ready", "Exists", "", "NoExecute"),
    Toleration("node.kubernetes.io/unreachable", "Exists", "", "NoExecute"),
)
"""What the server adds to every pod."""
DAEMON_TOLERATIONS: Final = (
    *POD_TOLERATIONS,
    Toleration("node.kubernetes.io/disk-pressure", "Exists", "", "NoSchedule"),
    Toleration("node.kubernetes.io/memory-pressure", "Exists", "", "NoSchedule"),
    Toleration("node.kubernetes.io/pid-pressure", "Exists", "", "NoSchedule"),
    Toleration("node.kubernetes.io/unschedulable", "Exists", "", "NoSchedule"),
)
"""What the DaemonSet controller adds to its pods."""


class Phase(StrEnum):
    """Of a pod."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSpec:
    """What a pod is made of, and how it will behave."""

    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = ()
    node_selector: Mapping[str, str] = field(default_factory=dict)
    affinity: tuple[tuple[LabelExpression, ...], ...] = ()
    container_names: frozenset[str] = frozenset({"main"})
    gpus: int = 0
    """Requests of `nvidia.com/gpu`, which a node has only so many of."""
    resources: frozenset[str] = frozenset()
    """Names of other requests, of which every node has enough."""
    grace_seconds: int = 30
    runtime_class: str | None = None
    host_paths: tuple[str, ...] = ()
    avoids_drivers: bool = False
    """Whether it goes to no node that has another pod with a driver's component label (required anti-affinity)."""
    claims: tuple[str, ...] = ()
    has_pending_claims: bool = False
    has_empty_dir: bool = False
    finalizers: tuple[str, ...] = ()
    priority: int = 0
    digest: str = ""
    """DRIVER_CONFIG_DIGEST of a driver."""
    image: str = ""
    """Only so that two templates can differ."""
    # How it behaves
    start_seconds: float = 0.0
    """Bound -> running; `math.inf` stays in its init container."""
    stop_seconds: float | None = 0.0
    """SIGTERM -> containers down, cut off by the grace period; ALL_OF_GRACE or NEVER."""
    is_ready: bool = True
    """Whether it becomes Ready."""
    devices: tuple[str, ...] = ()
    """Device paths that its process holds while it runs, besides those of its GPUs."""
    lag_seconds: float = 0.0
    """How long its process outlives its containers."""
    command: str = "python3"
    """Name of its process on the host."""

    def fits(self, labels: Mapping[str, str]) -> bool:
        """Whether a node with these labels may have such a pod."""
        shape = PodView(namespace="", name="", uid="", node_selector=self.node_selector, affinity=self.affinity)
        return shape.fits(labels)

    @property
    def all_resources(self) -> frozenset[str]:
        """Names of all requests and limits."""
        return self.resources | ({GPU} if self.gpus else frozenset())


@dataclass(slots=True, kw_only=True)
class Node:
    """A node."""

    name: str
    uid: str
    resource_version: int = 0
    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    unschedulable: bool = False
    taints: tuple[Taint, ...] = ()
    gpus: int = 0
    offered: int | None = None
    """GPUs that pods can have (allocatable); None: all of them."""
    counted: int | None = None
    """GPUs that the kubelet knows of (capacity); None: all of them."""
    has_dra: bool = False
    """Whether its GPUs are in a ResourceSlice, and not what a device plugin offers."""
    is_ready: bool = True
    is_down: bool = False
    """Its kubelet does nothing."""
    boot_id: str = ""
    """Of its machine, as its kubelet reports it."""

    @property
    def allocatable(self) -> int:
        """GPUs that pods can have."""
        if self.has_dra:
            return 0
        return self.gpus if self.offered is None else self.offered

    def view(self) -> NodeView:
        """As a reader sees it now."""
        has_plugin = bool(self.gpus) and not self.has_dra
        return NodeView(
            name=self.name,
            uid=self.uid,
            resource_version=str(self.resource_version),
            labels=dict(self.labels),
            annotations=dict(self.annotations),
            unschedulable=self.unschedulable,
            taints=self.taints,
            is_ready=self.is_ready,
            boot_id=self.boot_id,
            allocatable={GPU: self.allocatable} if has_plugin else {},
            capacity={GPU: self.gpus if self.counted is None else self.counted} if has_plugin else {},
        )


@dataclass(slots=True, kw_only=True)
class Pod:
    """A pod."""

    namespace: str
    name: str
    uid: str
    spec: PodSpec
    owner: Owner | None = None
    tolerations: tuple[Toleration, ...] = ()
    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    finalizers: tuple[str, ...] = ()
    resource_version: int = 0
    node_name: str | None = None
    target: str | None = None
    """The node that a DaemonSet's pod is for."""
    gates: tuple[str, ...] = ()
    """Scheduling gates."""
    phase: Phase = Phase.PENDING
    is_ready: bool = False
    marked_at: float | None = None
    """When its deletion was asked for."""
    ends_at: float = math.inf
    """When its grace is over."""
    deletion_grace: int | None = None
    """`deletionGracePeriodSeconds`."""
    is_gone: bool = False
    restarts: int = 0
    """Of a container that is not ready."""
    trouble: str = ""
    """Why a container waits (`CrashLoopBackOff`)."""
    created: str = ""

    @property
    def ref(self) -> str:
        """`namespace/name`."""
        return f"{self.namespace}/{self.name}"

    @property
    def only_node(self) -> str:
        """The one node that it can be bound to; empty: not just one."""
        return self.target or self.spec.node_selector.get(HOSTNAME, "")

    @property
    def is_over(self) -> bool:
        """Whether its containers have ended for good."""
        return self.phase in (Phase.SUCCEEDED, Phase.FAILED)

    @property
    def is_active(self) -> bool:
        """Whether its controller counts it."""
        return self.marked_at is None and not self.is_over

    def view(self) -> PodView:
        """As a reader sees it now."""
        return PodView(
            namespace=self.namespace,
            name=self.name,
            uid=self.uid,
            phase=self.phase.value,
            labels=dict(self.labels),
            annotations=dict(self.annotations),
            owner=self.owner,
            is_terminating=self.marked_at is not None,
            grace_seconds=self.spec.grace_seconds if self.deletion_grace is None else self.deletion_grace,
            node_selector=dict(self.spec.node_selector),
            affinity=self.spec.affinity,
            tolerations=self.tolerations,
            resources=self.spec.all_resources,
            runtime_class=self.spec.runtime_class,
            host_paths=self.spec.host_paths,
            claims=self.spec.claims,
            has_pending_claims=self.spec.has_pending_claims,
            has_empty_dir=self.spec.has_empty_dir,
            finalizers=self.finalizers,
            priority=self.spec.priority,
            is_ready=self.is_ready,
            container_names=self.spec.container_names,
        )

    def fleet_view(self) -> FleetPod:
        """As one who follows drivers and validators sees it."""
        return FleetPod(
            namespace=self.namespace,
            name=self.name,
            uid=self.uid,
            node_name=self.node_name or self.target or "",
            is_bound=self.node_name is not None,
            labels=dict(self.labels),
            owner=self.owner,
            revision=self.labels.get(REVISION_HASH, ""),
            digest=self.spec.digest,
            phase=self.phase.value,
            is_ready=self.is_ready and self.phase is Phase.RUNNING,
            is_terminating=self.marked_at is not None,
            restarts=0 if self.is_ready else self.restarts,
            trouble=self.trouble,
            is_gated=PARKED in self.gates,
            created=self.created,
        )


@dataclass(slots=True, kw_only=True)
class Template:
    """A ControllerRevision: a template that a DaemonSet has, or had."""

    namespace: str
    name: str
    uid: str
    labels: dict[str, str]
    owner_uid: str
    number: int
    hash: str
    spec: PodSpec

    def fleet_view(self) -> Revision:
        """As a follower sees it."""
        return Revision(
            namespace=self.namespace,
            name=self.name,
            uid=self.uid,
            owner_uid=self.owner_uid,
            number=self.number,
            hash=self.hash,
            digest=self.spec.digest,
        )


class Cascade(StrEnum):
    """What becomes of the pods of a DaemonSet that is deleted."""

    BACKGROUND = "Background"
    FOREGROUND = "Foreground"
    ORPHAN = "Orphan"


@dataclass(slots=True, kw_only=True)
class DaemonSet:
    """A DaemonSet."""

    namespace: str
    name: str
    uid: str
    spec: PodSpec
    """Its newest template."""
    labels: dict[str, str] = field(default_factory=dict)
    made_for: Owner | None = None
    """The custom resource that owns it."""
    is_on_delete: bool = True
    max_unavailable: int = 1
    """Of a rolling update."""
    selector: Mapping[str, str] | None = None
    """None: the labels of its template."""
    generation: int = 1
    is_deleting: bool = False
    # What its controller knows
    observed: int = 0
    """The generation that it has seen."""
    observes_at: float = 0.0
    """When it sees the newest one."""
    template: Template | None = None
    """The newest one that it has seen: what new pods are made from."""
    is_rolling: bool = False
    dirty: dict[str, bool] = field(default_factory=dict)
    """Names of nodes that it has to look at."""
    claims: dict[str, Pod] = field(default_factory=dict)
    """Pods to adopt or to let go, by uid."""
    refusals: int = 0
    """Creates refused in a row."""
    missing: int = 0
    """Of its status, which only that of a parkable one has: nodes that should have a pod of it and have none."""

    @property
    def ref(self) -> str:
        """`namespace/name`."""
        return f"{self.namespace}/{self.name}"

    @property
    def owner(self) -> Owner:
        """What its pods say of it."""
        return Owner("DaemonSet", self.name, self.uid)

    @property
    def is_parkable(self) -> bool:
        """Whether its label asks to be parked."""
        return self.labels.get(PARK) == "true"

    @property
    def is_in_update(self) -> bool:
        """Whether a rolling update is not finished."""
        return not self.is_on_delete and (self.is_rolling or self.observed != self.generation)

    def selects(self, labels: Mapping[str, str]) -> bool:
        """Whether a pod with these labels is one of its own, or could be. Without any label it takes nothing over."""
        wanted = self.spec.labels if self.selector is None else self.selector
        return bool(wanted) and matches(wanted, labels)

    def fleet_view(self) -> FleetSet:
        """As a follower sees it."""
        return FleetSet(
            namespace=self.namespace,
            name=self.name,
            uid=self.uid,
            labels=dict(self.labels),
            owner=self.made_for,
            pod_labels=dict(self.spec.labels),
            node_selector=dict(self.spec.node_selector),
            affinity=self.spec.affinity,
            tolerations=self.spec.tolerations,
            is_settled=self.observed == self.generation,
            is_on_delete=self.is_on_delete,
            is_deleting=self.is_deleting,
            is_rolling=self.is_in_update,
            missing=self.missing,
        )

    def view(self) -> DaemonSetView:
        """As a reader sees it: the template's own tolerations, without those added to the pods."""
        return DaemonSetView(
            namespace=self.namespace,
            name=self.name,
            uid=self.uid,
            node_selector=dict(self.spec.node_selector),
            tolerations=self.spec.tolerations,
            pod_labels=dict(self.spec.labels),
            asks_to_be_parked=self.is_parkable,
            is_rolling=self.is_in_update,
        )


@dataclass(slots=True, kw_only=True)
class Deployment:
    """A Deployment together with its one ReplicaSet."""

    namespace: str
    name: str
    uid: str
    spec: PodSpec
    replicas: int = 1

    @property
    def owner(self) -> Owner:
        """What its pods say of it."""
        return Owner("ReplicaSet", f"{self.name}{REPLICA_SET}", self.uid)


class UnhealthyPolicy(StrEnum):
    """`unhealthyPodEvictionPolicy` of a budget."""

    IF_HEALTHY_BUDGET = "IfHealthyBudget"
    ALWAYS_ALLOW = "AlwaysAllow"


@dataclass(slots=True, kw_only=True)
class Budget:
    """A PodDisruptionBudget: exactly one of the two limits is set, a number or a share such as `50%`."""

    namespace: str
    name: str
    selector: Mapping[str, str]
    min_available: int | str | None = None
    max_unavailable: int | str | None = None
    unhealthy: UnhealthyPolicy = UnhealthyPolicy.IF_HEALTHY_BUDGET
    # Its status
    current: int = 0
    desired: int = 0
    allowed: int = 0
    disrupted: dict[str, float] = field(default_factory=dict)
    """Names of pods that the server let go and the controller has not seen marked yet, with the time."""
    is_observed: bool = True
    """Whether the status speaks of the newest spec."""
    members: dict[str, Pod] | None = None
    """The pods that it covers, by uid; None: not counted yet."""

    @property
    def uid(self) -> str:
        """Of its own kind of uid, so that a budget more changes no other."""
        return f"budget-{self.namespace}-{self.name}"

    def covers(self, pod: Pod) -> bool:
        """Whether it speaks of this pod."""
        return pod.namespace == self.namespace and matches(self.selector, pod.labels)

    def fleet_view(self) -> BudgetView:
        """As a follower sees it now."""
        return BudgetView(
            namespace=self.namespace,
            name=self.name,
            uid=self.uid,
            selector=tuple(LabelExpression(key, "In", (value,)) for key, value in self.selector.items()),
            allowed=self.allowed,
            is_observed=self.is_observed,
        )


@dataclass(slots=True, kw_only=True)
class Slice:
    """A ResourceSlice of a node."""

    name: str
    uid: str
    node_name: str
    devices: int
    driver: str = GPU_DRA_DRIVER
    generation: int = 1

    def fleet_view(self) -> SliceView:
        """As a follower sees it now."""
        return SliceView(
            name=self.name,
            uid=self.uid,
            node_name=self.node_name,
            driver=self.driver,
            pool=self.node_name,
            generation=self.generation,
            devices=self.devices,
        )


@dataclass(slots=True, kw_only=True)
class Maintenance:
    """A NodeMaintenance."""

    namespace: str
    name: str
    uid: str
    node_name: str
    requestor: str
    others: tuple[str, ...] = ()
    drain: Mapping[str, Any] = field(default_factory=dict)
    """Its `drainSpec`."""
    wait: Mapping[str, Any] | None = None
    resource_version: int = 0
    has_finalizer: bool = False
    """Whether the operator has begun with it."""
    is_ready: bool = False
    is_deleting: bool = False
    has_cordoned: bool = False
    """Whether the operator's cordon is the node's only one."""

    @property
    def ref(self) -> str:
        """`namespace/name`."""
        return f"{self.namespace}/{self.name}"

    def fleet_view(self) -> MaintenanceView:
        """As a follower sees it now."""
        return MaintenanceView(
            namespace=self.namespace,
            name=self.name,
            uid=self.uid,
            resource_version=str(self.resource_version),
            node_name=self.node_name,
            requestor=self.requestor,
            others=self.others,
            is_ready=self.is_ready,
            is_deleting=self.is_deleting,
        )


@dataclass(slots=True, kw_only=True)
class Account:
    """Who talks to the server, and what it may do."""

    name: str
    rules: tuple[Rule, ...] = ()
    """In the whole cluster."""
    namespace_rules: dict[str, tuple[Rule, ...]] = field(default_factory=dict)
    identity: Identity = field(default_factory=Identity)
    is_incomplete: bool = False
    """Whether the server says that it cannot list all rules."""


def matches(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Whether the labels have all that the selector asks for."""
    return all(labels.get(key) == value for key, value in selector.items())


def tolerates(tolerations: tuple[Toleration, ...], taints: tuple[Taint, ...], *effects: str) -> bool:
    """Whether all taints of these effects are tolerated."""
    return all(any(one.tolerates(taint) for one in tolerations) for taint in taints if taint.effect in effects)
