"""What was seen, as frozen values: all that a decision needs, and nothing that can change under it.

Adapters build these; nothing else parses Kubernetes objects or kernel text. Times that come from the API stay text: the clocks of two
machines are never compared.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

# Cluster ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Taint:
    """A taint of a node."""

    key: str
    value: str = ""
    effect: str = "NoSchedule"
    time_added: str | None = None


@dataclass(frozen=True, slots=True)
class Toleration:
    """A toleration of a pod, as the API has it: empty fields match everything."""

    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""

    def tolerates(self, taint: Taint) -> bool:
        """Whether a pod with this toleration may be scheduled in spite of the taint.

        The rule: https://kubernetes.io/docs/concepts/scheduling-eviction/taint-and-toleration/
        """
        if self.effect and self.effect != taint.effect:
            return False
        if self.operator == "Exists":
            return not self.key or self.key == taint.key
        return self.key == taint.key and self.value == taint.value


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """A Node."""

    name: str
    uid: str
    resource_version: str
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    unschedulable: bool = False
    taints: tuple[Taint, ...] = ()
    boot_id: str = ""
    """Of the machine that its kubelet runs on."""
    is_ready: bool = True
    """Whether its kubelet reports it Ready; a node without that condition counts as ready."""
    allocatable: Mapping[str, int] = field(default_factory=dict)
    """How many of each `nvidia.com/` resource pods can have."""
    capacity: Mapping[str, int] = field(default_factory=dict)
    """How many of each there are, healthy or not."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The controller of an object."""

    kind: str
    name: str
    uid: str = ""


@dataclass(frozen=True, slots=True)
class LabelExpression:
    """One condition on a node's label, of a node selector term."""

    key: str
    operator: str
    """`In`, `NotIn`, `Exists`, `DoesNotExist`, `Gt` or `Lt`."""
    values: tuple[str, ...] = ()

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether a node with these labels meets it.

        The rule: https://kubernetes.io/docs/concepts/scheduling-eviction/assign-pod-node/#operators
        """
        value = labels.get(self.key)
        match self.operator:
            case "In":
                return value in self.values
            case "NotIn":
                return value not in self.values
            case "Exists":
                return value is not None
            case "DoesNotExist":
                return value is None
            case "Gt" | "Lt":
                return self._compares(value)
            case _:
                return False

    def _compares(self, value: str | None) -> bool:
        try:
            have, want = int(value or ""), int(self.values[0])
        except (ValueError, IndexError):
            return False
        return have > want if self.operator == "Gt" else have < want


@dataclass(frozen=True, slots=True, kw_only=True)
class PodView:
    """A Pod on the node."""

    namespace: str
    name: str
    uid: str
    phase: str = "Running"
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    owner: Owner | None = None
    is_terminating: bool = False
    grace_seconds: int = 30
    node_selector: Mapping[str, str] = field(default_factory=dict)
    affinity: tuple[tuple[LabelExpression, ...], ...] = ()
    """Terms of its required node affinity: one of them has to match, all of its expressions."""
    tolerations: tuple[Toleration, ...] = ()
    resources: frozenset[str] = frozenset()
    """Names of all requests and limits, of every container kind and of the pod itself."""
    runtime_class: str | None = None
    host_paths: tuple[str, ...] = ()
    """Paths of its hostPath volumes."""
    claims: tuple[str, ...] = ()
    """Names of its resource claims, in its namespace, those in its status included."""
    has_pending_claims: bool = False
    """Whether it has a claim whose name is not known yet."""
    has_empty_dir: bool = False
    finalizers: tuple[str, ...] = ()
    priority: int = 0
    is_ready: bool = False
    container_names: frozenset[str] = frozenset()

    @property
    def affinity_keys(self) -> frozenset[str]:
        """Keys of node labels that its required node affinity wants to be there; what it avoids is not among them."""
        return frozenset(each.key for term in self.affinity for each in term if each.operator not in ("NotIn", "DoesNotExist"))

    @property
    def selecting_keys(self) -> frozenset[str]:
        """Keys of node labels of which it wants a certain value, so that another value may take it off the node."""
        return frozenset(self.node_selector) | {each.key for term in self.affinity for each in term if each.operator == "In"}

    def fits(self, labels: Mapping[str, str]) -> bool:
        """Whether its node selector and required node affinity match a node with these labels."""
        is_selected = all(labels.get(key) == value for key, value in self.node_selector.items())
        return is_selected and (not self.affinity or any(all(each.matches(labels) for each in term) for term in self.affinity))

    @property
    def ref(self) -> str:
        """`namespace/name`, as people write it."""
        return f"{self.namespace}/{self.name}"

    @property
    def with_owner(self) -> str:
        """The same with who makes it, if anybody: whoever makes it makes it again."""
        return self.ref + (f" of {self.owner.kind} {self.owner.name}" if self.owner is not None else "")

    @property
    def owner_ref(self) -> str:
        """`namespace/name` of its controller; empty where it has none."""
        return f"{self.namespace}/{self.owner.name}" if self.owner is not None else ""

    @property
    def is_over(self) -> bool:
        """Whether its containers have ended for good."""
        return self.phase in ("Succeeded", "Failed")


@dataclass(frozen=True, slots=True)
class PodList:
    """The pods of a node, and the version from which a watch goes on."""

    items: tuple[PodView, ...]
    resource_version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimView:
    """A ResourceClaim, as far as it says who has which driver's devices."""

    namespace: str
    name: str
    drivers: frozenset[str] = frozenset()
    """DRA drivers whose devices are allocated to it; none while it is not allocated."""
    is_admin: bool = False
    """Whether all of its devices are there for administration only."""


class ChangeKind(StrEnum):
    """What happened to an object."""

    SEEN = "seen"
    """It is there: new, changed, or found again after a gap in the watch."""
    GONE = "gone"
    """It is out of the API."""


@dataclass(frozen=True, slots=True)
class PodChange:
    """One event of a watch on pods."""

    kind: ChangeKind
    pod: PodView


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonSetView:
    """A DaemonSet: what decides whether its pods come back."""

    namespace: str
    name: str
    uid: str
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = ()
    pod_labels: Mapping[str, str] = field(default_factory=dict)
    """Of its template."""
    asks_to_be_parked: bool = False
    """Whether its label lets an admission policy keep it off a node (names.PARK)."""
    is_rolling: bool = False
    """Whether a rolling update of it is not finished."""

    @property
    def ref(self) -> str:
        """`namespace/name`."""
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Identity:
    """Which pod this program runs in, from the claims of its own token. Empty where the token does not say."""

    namespace: str = ""
    pod_name: str = ""
    pod_uid: str = ""
    node_name: str = ""


@dataclass(frozen=True, slots=True)
class Rule:
    """One permission: every verb with every resource (`resource` or `resource/subresource`) of every group; `*` is all."""

    verbs: frozenset[str]
    groups: frozenset[str]
    resources: frozenset[str]
    names: frozenset[str] = frozenset()
    """Object names it is limited to; empty is all."""


@dataclass(frozen=True, slots=True)
class Permissions:
    """What the account may do in one namespace and cluster-wide, as far as the server can tell."""

    rules: tuple[Rule, ...]
    is_incomplete: bool = False
    """Whether there may be more than `rules` says."""

    def allow(self, verb: str, group: str, resource: str) -> bool:
        """Whether the rules let the account do `verb` on any object of `resource`."""
        return any(
            {verb, "*"} & rule.verbs and {group, "*"} & rule.groups and {resource, "*"} & rule.resources and not rule.names
            for rule in self.rules
        )


# Host ---------------------------------------------------------------------------------------------------------------


class ModuleState(StrEnum):
    """`initstate` of a module in sysfs."""

    LIVE = "live"
    COMING = "coming"
    GOING = "going"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleView:
    """One loaded module."""

    name: str
    refcount: int | None = 0
    """None where the kernel keeps no count: it cannot unload modules."""
    holders: frozenset[str] = frozenset()
    """Modules that depend on it."""
    state: ModuleState = ModuleState.LIVE
    version: str | None = None

    @property
    def has_own_users(self) -> bool:
        """Whether something else than modules uses it. A sign, not a count: one open device can add two."""
        return self.refcount is not None and self.refcount > len(self.holders)


@dataclass(frozen=True, slots=True, kw_only=True)
class MountView:
    """One line of mountinfo, octal escapes decoded."""

    mount_id: int
    target: str
    """As in the namespace of the host's first process."""
    fs_type: str = ""
    source: str = ""
    is_shared: bool = False
    filesystem: str = ""
    """`major:minor` of what is mounted: the same in every mount namespace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MountCopy:
    """A mount in another mount namespace than the host's, of a filesystem that the host has unmounted."""

    pid: int
    """A process of that namespace."""
    command: str
    target: str
    """As that process sees it."""
    pod_uid: str | None = None
    unit: str | None = None


class Unloading(StrEnum):
    """Whether this kernel lets this process unload modules."""

    POSSIBLE = "possible"
    DISABLED = "disabled"
    """The sysctl kernel.modules_disabled is 1; only a reboot takes it back."""
    UNSUPPORTED = "unsupported"
    """The kernel is built without module unloading, or without modules."""
    NOT_PERMITTED = "not-permitted"
    """This process lacks CAP_SYS_MODULE."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverFiles:
    """What speaks for or against a driver that belongs to the host itself."""

    module_files: tuple[str, ...] = ()
    """`nvidia.ko*` below lib/modules/<release> of the host's root."""
    library_versions: frozenset[str] = frozenset()
    """Versions of libnvidia-ml.so in the host's own library folders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PciDevice:
    """A PCI function of NVIDIA (0x10de) or Mellanox (0x15b3)."""

    address: str
    vendor: str
    device_class: str
    driver: str | None = None
    is_virtual: bool = False
    """Whether it is an SR-IOV virtual function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostView:
    """The host, as far as freeing the driver is concerned."""

    boot_id: str
    kernel_release: str = ""
    modules: Mapping[str, ModuleView] = field(default_factory=dict)
    """By name: the driver's modules (names in `core.modules`), nouveau, and everything that holds one of them."""
    mounts: tuple[MountView, ...] = ()
    """At and below the driver root, in mountinfo's order: a later line lies on top of an earlier one."""
    unloading: Unloading = Unloading.POSSIBLE
    state_digest: str | None = None
    """What the state file says is loaded, trimmed. None without the file."""
    markers: tuple[str, ...] = ()
    """Names of the ready markers that are there."""
    has_pid_file: bool = False
    driver_files: DriverFiles = field(default_factory=DriverFiles)
    pci: tuple[PciDevice, ...] = ()
    is_mofed_ready: bool = False
    """Whether the containerised network driver says that it is up."""
    has_mlx5_core: bool = False
    sees_all_processes: bool = True
    """Whether the processes of the whole host are visible (hostPID)."""
    is_run_shared: bool | None = None
    """Whether /run/nvidia, as this process sees it, is a shared mount; None where that cannot be seen."""
    notes: tuple[str, ...] = ()
    """What could not be looked at, in sentences."""

    @property
    def is_loaded(self) -> bool:
        """Whether the NVIDIA driver is loaded."""
        return "nvidia" in self.modules

    @property
    def driver_version(self) -> str | None:
        """Version of the loaded driver."""
        return self.modules["nvidia"].version if self.is_loaded else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process that has a GPU device open or mapped."""

    pid: int
    command: str
    devices: tuple[str, ...]
    """Device paths, sorted."""
    pod_uid: str | None = None
    unit: str | None = None
    """The systemd unit it belongs to, where it is no pod's."""


@dataclass(frozen=True, slots=True)
class HolderScan:
    """Who holds a GPU device."""

    holders: tuple[Holder, ...] = ()
    unreadable: tuple[int, ...] = ()
    """Processes that could not be looked at: they do not count as free."""
    by_device_alone: tuple[Holder, ...] = ()
    """Processes with a device of vfio open and no group: whose device it is, the kernel does not say."""
