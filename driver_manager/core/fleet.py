"""The fleet as the controller sees it, as frozen values: nodes, driver DaemonSets, driver and validator pods, policies, and what stands by.

Only what a decision needs. Adapters build these from the API's objects; `controller/cache.py` holds the newest of each.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from driver_manager.core.snapshot import ChangeKind, LabelExpression, NodeView, Owner, Toleration
from driver_manager.names import COMPONENT_LABEL, DRIVER_APP, DRIVER_COMPONENTS, VALIDATOR_APP


class Kind(StrEnum):
    """What is followed."""

    NODES = "nodes"
    """Those that the controller's node selector selects."""
    DAEMON_SETS = "daemonsets"
    """All of the operator's namespace: drivers and validators are told apart by their pod labels."""
    REVISIONS = "controllerrevisions"
    """Of the operator's namespace."""
    DRIVER_PODS = "driver-pods"
    """Pods of the operator's namespace with a driver's component label, or with the `app` label of ClusterPolicy's driver."""
    VALIDATOR_PODS = "validator-pods"
    """Pods of the operator's namespace that the validator selector selects."""
    PARKABLE_SETS = "parkable-daemonsets"
    """Those of all namespaces whose label asks that they are kept off nodes in work. Their status counts too."""
    GATED_PODS = "gated-pods"
    """Pods of all namespaces that the admission policy has kept off a node, told by its label."""
    CLUSTER_POLICIES = "clusterpolicies"
    NVIDIA_DRIVERS = "nvidiadrivers"
    BUDGETS = "poddisruptionbudgets"
    """Of all namespaces."""
    MAINTENANCES = "nodemaintenances"
    """Of the namespace that the settings name; not served where they name none."""
    SLICES = "resourceslices"
    """Those of NVIDIA's DRA driver for GPUs; not served where the API has no dynamic resource allocation."""


def is_driver(labels: Mapping[str, str]) -> bool:
    """Whether pod labels are a driver's; older operators give ClusterPolicy's no component label."""
    return labels.get(COMPONENT_LABEL) in DRIVER_COMPONENTS or labels.get("app") == DRIVER_APP


def is_validator(labels: Mapping[str, str]) -> bool:
    """Whether pod labels are a validator's."""
    return labels.get("app") == VALIDATOR_APP


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPod:
    """A driver's or a validator's pod, or one that is kept off its node."""

    namespace: str
    name: str
    uid: str
    node_name: str
    """Of a pod of a DaemonSet that is not bound yet: the node that it is meant for, from its required node affinity (`matchFields`)."""
    is_bound: bool = True
    labels: Mapping[str, str] = field(default_factory=dict)
    owner: Owner | None = None
    """Its controller; None for an orphan."""
    revision: str = ""
    """Its label `controller-revision-hash`."""
    digest: str = ""
    """Its DRIVER_CONFIG_DIGEST: the first that is not empty, over init containers, then containers."""
    phase: str = "Running"
    is_ready: bool = False
    """Whether it is Running, has a container status, and all of its containers are ready."""
    is_terminating: bool = False
    restarts: int = 0
    """The most restarts of one container, init containers included, that is not ready."""
    trouble: str = ""
    """Why a container that is not ready waits (`ImagePullBackOff`, `CrashLoopBackOff`, ...), empty where that is normal."""
    is_gated: bool = False
    """Whether it has the scheduling gate of a parked DaemonSet's pod."""
    created: str = ""

    @property
    def ref(self) -> str:
        """`namespace/name`."""
        return f"{self.namespace}/{self.name}"

    @property
    def owner_ref(self) -> str:
        """`namespace/name` of its controller; empty for an orphan."""
        return f"{self.namespace}/{self.owner.name}" if self.owner is not None else ""

    @property
    def is_orphan(self) -> bool:
        """Whether no controller owns it."""
        return self.owner is None


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSet:
    """A DaemonSet of the operator's namespace, or one that may be parked."""

    namespace: str
    name: str
    uid: str
    labels: Mapping[str, str] = field(default_factory=dict)
    owner: Owner | None = None
    """The custom resource it was made for."""
    pod_labels: Mapping[str, str] = field(default_factory=dict)
    """Of its pod template."""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    affinity: tuple[tuple[LabelExpression, ...], ...] = ()
    """Terms of its required node affinity: one of them has to match, all of its expressions."""
    tolerations: tuple[Toleration, ...] = ()
    is_settled: bool = True
    """Whether its controller has seen its newest template (observedGeneration): before that the newest revision may not be made yet."""
    is_on_delete: bool = True
    """Whether it replaces a pod only when somebody deletes it."""
    is_deleting: bool = False
    is_rolling: bool = False
    """Whether a rolling update of it is not finished. Only of a parkable one."""
    missing: int = 0
    """Nodes that should have a pod of it and have none. Only of a parkable one."""

    @property
    def ref(self) -> str:
        """`namespace/name`."""
        return f"{self.namespace}/{self.name}"

    def fits(self, labels: Mapping[str, str]) -> bool:
        """Whether its node selector and required node affinity match a node with these labels."""
        is_selected = all(labels.get(key) == value for key, value in self.node_selector.items())
        return is_selected and (not self.affinity or any(all(each.matches(labels) for each in term) for term in self.affinity))


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """A ControllerRevision: one template that a DaemonSet has had."""

    namespace: str
    name: str
    uid: str
    owner_uid: str
    """Of its DaemonSet."""
    number: int
    """The highest one is the newest template, also after a roll-back."""
    hash: str
    """Its label `controller-revision-hash`."""
    digest: str = ""
    """DRIVER_CONFIG_DIGEST of the template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySource:
    """A ClusterPolicy or an NVIDIADriver, as far as it says how drivers are upgraded. Nothing in it is checked yet."""

    kind: str
    """`ClusterPolicy` or `NVIDIADriver`."""
    name: str
    uid: str
    resource_version: str
    created: str = ""
    annotations: Mapping[str, str] = field(default_factory=dict)
    is_deleting: bool = False
    generation: int = 0
    upgrade_policy: Mapping[str, Any] | None = None
    """`spec.driver.upgradePolicy` or `spec.upgradePolicy`, as it is written."""
    applied_policy: Mapping[str, Any] | None = None
    """The same as kubectl noted it at the last `apply`, before the API server dropped what the CRD does not have; None where it did not."""
    has_driver: bool = True
    """`spec.driver.enabled` of a ClusterPolicy."""
    uses_nvidia_driver_crd: bool = False
    """`spec.driver.useNvidiaDriverCRD` of a ClusterPolicy."""
    has_sandbox_workloads: bool = False
    """`spec.sandboxWorkloads.enabled` of a ClusterPolicy."""
    node_selector: Mapping[str, str] | None = None
    """Of an NVIDIADriver."""
    is_default: bool = False
    """`spec.default` of an NVIDIADriver."""
    conditions: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Type -> (status, reason)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetView:
    """A PodDisruptionBudget."""

    namespace: str
    name: str
    uid: str
    selector: tuple[LabelExpression, ...] | None = None
    """All of it has to match, so an empty one matches every pod of the namespace; None matches no pod."""
    allowed: int = 0
    """How many of its pods may be evicted now."""
    is_observed: bool = True
    """Whether `allowed` was counted for its newest spec."""

    @property
    def ref(self) -> str:
        """`namespace/name`."""
        return f"{self.namespace}/{self.name}"

    def covers(self, namespace: str, labels: Mapping[str, str]) -> bool:
        """Whether it speaks of a pod with these labels."""
        return namespace == self.namespace and self.selector is not None and all(each.matches(labels) for each in self.selector)


@dataclass(frozen=True, slots=True, kw_only=True)
class MaintenanceView:
    """A NodeMaintenance: what a maintenance operator is asked to do to a node, and by whom.

    https://github.com/Mellanox/maintenance-operator
    """

    namespace: str
    name: str
    uid: str
    resource_version: str
    node_name: str
    requestor: str
    """Who made it, and deletes it."""
    others: tuple[str, ...] = ()
    """Who use it too (`additionalRequestors`): as long as there are any, it outlives its deletion."""
    is_ready: bool = False
    """Whether the node is free: its condition `Ready` has the reason `Ready`."""
    is_deleting: bool = False

    @property
    def ref(self) -> str:
        """`namespace/name`."""
        return f"{self.namespace}/{self.name}"

    def is_used_by(self, requestor: str) -> bool:
        """Whether it is there for one requestor: what its maker has deleted is not the maker's any more."""
        return requestor in self.others or (requestor == self.requestor and not self.is_deleting)


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceView:
    """A ResourceSlice: devices of one node that claims can have.

    https://kubernetes.io/docs/concepts/scheduling-eviction/dynamic-resource-allocation/
    """

    name: str
    uid: str
    node_name: str
    """Empty: its devices are not those of a single node."""
    driver: str
    pool: str
    generation: int
    """Of the pool: only the slices of its highest one count."""
    devices: int
    """How many it holds."""


Item = NodeView | FleetPod | FleetSet | Revision | PolicySource | BudgetView | MaintenanceView | SliceView


@dataclass(frozen=True, slots=True)
class Listed:
    """All objects of a kind, as they are now: what is not in it is gone. Comes first, and again after a gap in the watch."""

    kind: Kind
    items: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class Changed:
    """One object is there, new or changed, or is not selected any more."""

    kind: Kind
    change: ChangeKind
    item: Item
    """GONE: as it was last. For a watch with a label selector that may only mean that the label went."""


@dataclass(frozen=True, slots=True)
class NotServed:
    """The API does not have this kind (no such custom resource), for now."""

    kind: Kind


FleetEvent = Listed | Changed | NotServed


USUAL_DURATION: Final = 15
"""Seconds of a Lease that does not say."""
LONGEST_DURATION: Final = 600
"""Seconds; more than any program asks for. A person can write 68 years, and whoever held such a Lease last would never be followed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseView:
    """A Lease, as https://kubernetes.io/docs/concepts/architecture/leases/ tells.

    Times are the API's text and are never compared with our clock.
    """

    namespace: str
    name: str
    resource_version: str = ""
    """Empty: it does not exist, a write makes it."""
    holder: str = ""
    duration_seconds: int = 15
    acquired: str = ""
    renewed: str = ""
    """MicroTime: `2026-01-31T09:00:00.000000Z`."""
    transitions: int = 0
    annotations: Mapping[str, str] = field(default_factory=dict)

    @property
    def lasts(self) -> int:
        """Seconds for which it is believed that its holder lives, from the last change on."""
        return min(self.duration_seconds or USUAL_DURATION, LONGEST_DURATION)


@dataclass(frozen=True, slots=True, kw_only=True)
class MaintenanceOrder:
    """A NodeMaintenance that is to be made."""

    namespace: str
    name: str
    node_name: str
    requestor: str
    drain: Mapping[str, Any]
    """Its `drainSpec`."""
    wait: Mapping[str, Any] | None = None
    """Its `waitForPodCompletion`; None: nobody is waited for."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What an Event is about."""

    kind: str
    """`Node` or `DaemonSet`."""
    name: str
    uid: str
    namespace: str = ""
    """Empty for a node."""

    @classmethod
    def node(cls, node: NodeView) -> "Subject":
        """A node."""
        return cls("Node", node.name, node.uid)

    @classmethod
    def daemon_set(cls, daemon_set: FleetSet) -> "Subject":
        """A DaemonSet."""
        return cls("DaemonSet", daemon_set.name, daemon_set.uid, daemon_set.namespace)


@dataclass(frozen=True, slots=True, kw_only=True)
class EventNote:
    """An Event about a node or a DaemonSet."""

    subject: Subject
    is_warning: bool = False
    reason: str
    """CamelCase, for machines."""
    sentence: str
    action: str = "DriverUpgrade"
