"""What a decision about a node's upgrade is made from, and what it says: values only.

`rollout.decide` is the function between them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from driver_manager.core.fleet import FleetPod, FleetSet
from driver_manager.core.hold import Hold
from driver_manager.core.rollout_record import Progress
from driver_manager.core.rollout_states import IDLE, Because, State
from driver_manager.core.snapshot import NodeView, Taint
from driver_manager.core.upgrade_policy import UpgradePolicy, recorded_policy
from driver_manager.names import GPU_DRA_DRIVER, SAFE_LOAD, UPGRADE_REQUESTED


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    """Limits of the state machine. Times in seconds; 0 is no limit."""

    driver_timeout: float = 1800.0
    """From the deletion of the old driver pod until the new one is ready."""
    validation_timeout: float = 600.0
    """As NVIDIA's."""
    attempts: int = 3
    """Tries for one target that may fail before the old driver pod is deleted; 0 is no limit."""
    retry_pause: float = 60.0
    """After the first such failure; doubles."""
    failing_restarts: int = 10
    """A container that restarted more often than this fails its node, as NVIDIA's."""
    one_at_a_time: bool = False
    """Each state is written by itself, as NVIDIA's does."""
    skip_cordoned: bool = False
    """Nodes that are cordoned by others are not begun."""


class Work(StrEnum):
    """What has to be done about the node besides changing the Node object."""

    NOTHING = ""
    FREE = "free"
    """Evict the pods that use the driver."""
    FREE_UNKNOWN = "free-unknown"
    """Evict those that use the driver and that gpu-operator, which leads the node, does not know."""
    FREE_REPORTED = "free-reported"
    """Evict those that the agent on the node names."""
    DRAIN = "drain"
    LOOK_FOR_JOBS = "look-for-jobs"
    RESTART_DRIVER = "restart-driver"
    """Delete the driver pod that `Stay.pod` names."""
    ASK_MAINTENANCE = "ask-maintenance"
    """Make the NodeMaintenance of the node, or join the one that is there."""
    RELEASE_MAINTENANCE = "release-maintenance"
    """Delete it, or leave it to the others in it."""


@dataclass(frozen=True, slots=True)
class Freeing:
    """How far freeing a node is, in this state of it."""

    is_done: bool = False
    failure: str = ""
    """Why it ended without success; empty as long as it goes on."""
    blockers: tuple[str, ...] = ()
    is_blocked: bool = False
    """Whether a budget, or whoever else answers evictions, does not let a pod go now."""
    hold: Hold | None = None
    """What has to be put on the node before it can go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Whether it is the node's turn."""

    is_granted: bool = False
    because: Because = Because.NO_SLOT
    sentence: str = "waits for its turn"
    again_at: float = 0.0
    """0: at the next change."""
    hold: Hold | None = None
    """What has to keep DaemonSets off the node from its cordon on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """One node at one moment, with all that a decision needs."""

    node: NodeView
    state: State | None
    """None: the label holds a value that is no state."""
    now: float
    """Unix seconds."""
    group: str = ""
    policy: UpgradePolicy | None = None
    """For new starts; None where upgrades are off for this node, or its policy cannot be used."""
    bad_policy: str = ""
    """What is wrong with its policy, where that is why there is none: nodes that are not in work are left as they are."""
    progress: Progress | None = None
    bad_progress: str = ""
    """What is wrong with the annotation, where it does not decode. (Another node's is no record at all.)"""
    daemon_set: FleetSet | None = None
    """The driver DaemonSet of its driver pod, else the one that would make one here."""
    rivals: tuple[str, ...] = ()
    """`namespace/name` of the driver DaemonSets whose pods are on the node to stay, where they are more than one."""
    wanted: str = ""
    """Hash of that DaemonSet's newest template; empty while that is not known."""
    wanted_digest: str = ""
    """DRIVER_CONFIG_DIGEST of that template."""
    drivers: tuple[FleetPod, ...] = ()
    """In the order of their making."""
    validators: tuple[FleetPod, ...] = ()
    needs_validator: bool = False
    """Whether a validator's DaemonSet matches the node."""
    published: int = 0
    """Devices of the node that NVIDIA's DRA driver offers in ResourceSlices."""
    has_maintenance: bool = False
    """Whether a maintenance operator frees the nodes."""
    maintenance: str = ""
    """`missing` (also where we are not in it, or are its maker and it is being deleted), `pending` or `ready`."""
    freeing: Freeing | None = None
    """None: not begun in this life of the controller."""
    jobs: tuple[str, ...] | None = None
    """Pods that the policy waits for; None while that is not known."""
    turn: Turn = field(default_factory=Turn)
    settings: RolloutSettings = field(default_factory=RolloutSettings)

    @property
    def in_force(self) -> UpgradePolicy:
        """The policy that the node was started under, else the one of now."""
        if self.progress and self.progress.rules:
            return recorded_policy(self.progress.rules)
        return self.policy or UpgradePolicy()

    @property
    def devices(self) -> dict[str, int]:
        """Resource -> how many of it pods can have now; what claims can have goes by the name of its DRA driver."""
        return {**self.node.allocatable, **({GPU_DRA_DRIVER: self.published} if self.published else {})}

    @property
    def driver(self) -> FleetPod | None:
        """Its newest driver pod that is not on its way out; one that waits for the node only where no other is there."""
        staying = [pod for pod in self.drivers if not pod.is_terminating]
        return next((pod for pod in reversed(staying) if pod.is_bound), staying[-1] if staying else None)

    @property
    def outdated(self) -> FleetPod | None:
        """A driver pod that is not the wanted one and not on its way out."""
        return next((pod for pod in self.drivers if not pod.is_terminating and not self.is_synced(pod)), None)

    @property
    def counts(self) -> bool:
        """Whether the node counts in totals and budgets (N49): a driver is there, or wanted there, or an upgrade of it has begun."""
        return self.daemon_set is not None or bool(self.drivers) or self.state not in IDLE

    @property
    def has_own_cordon(self) -> bool:
        """Whether it is cordoned, and that by us."""
        return bool(self.progress and self.progress.is_cordoned and self.node.unschedulable)

    def is_synced(self, pod: FleetPod) -> bool:
        """Whether a driver pod is made from the newest template of its DaemonSet. An orphan never is."""
        owner = self.daemon_set.uid if self.daemon_set else None
        return pod.owner is not None and pod.owner.uid == owner and pod.revision == self.wanted != ""

    @property
    def has_good_driver(self) -> bool:
        """Whether the wanted driver runs and is ready, and no other is still there."""
        return self.driver is not None and len(self.drivers) == 1 and self.is_synced(self.driver) and self.driver.is_ready

    @property
    def has_foreign_cordon(self) -> bool:
        """Whether it is cordoned, and that by others: neither by us nor by a maintenance operator for us."""
        return self.node.unschedulable and not self.has_own_cordon and not self.holds_maintenance

    @property
    def holds_maintenance(self) -> bool:
        """Whether a maintenance operator has been asked for the node, and not been told yet that it is needed no more."""
        return self.has_maintenance and self.maintenance in ("pending", "ready")

    @property
    def is_requested(self) -> bool:
        """Whether somebody asks for an upgrade by annotation."""
        return self.node.annotations.get(UPGRADE_REQUESTED) == "true"

    @property
    def waits_for_safe_load(self) -> bool:
        """Whether the driver's own init container asks for a free node."""
        return bool(self.node.annotations.get(SAFE_LOAD))


@dataclass(frozen=True, slots=True)
class NodeChange:
    """What changes on the Node object."""

    labels: Mapping[str, str | None] = field(default_factory=dict)
    annotations: Mapping[str, str | None] = field(default_factory=dict)
    unschedulable: bool | None = None
    taints: tuple[Taint, ...] | None = None
    """The whole new list."""

    def and_then(self, later: "NodeChange") -> "NodeChange":
        """Both; the later one wins."""
        return NodeChange(
            {**self.labels, **later.labels},
            {**self.annotations, **later.annotations},
            self.unschedulable if later.unschedulable is None else later.unschedulable,
            self.taints if later.taints is None else later.taints,
        )

    def needed_on(self, node: NodeView) -> "NodeChange":
        """What of it the node does not have yet."""
        return NodeChange(
            {key: value for key, value in self.labels.items() if node.labels.get(key) != value},
            {key: value for key, value in self.annotations.items() if node.annotations.get(key) != value},
            None if self.unschedulable == node.unschedulable else self.unschedulable,
            None if self.taints == node.taints else self.taints,
        )

    def on(self, node: NodeView) -> NodeView:
        """The node with it."""
        return replace(
            node,
            labels=_merged(node.labels, self.labels),
            annotations=_merged(node.annotations, self.annotations),
            unschedulable=node.unschedulable if self.unschedulable is None else self.unschedulable,
            taints=node.taints if self.taints is None else self.taints,
        )

    def __bool__(self) -> bool:
        return bool(self.labels or self.annotations or self.unschedulable is not None or self.taints is not None)


def _merged(old: Mapping[str, str], new: Mapping[str, str | None]) -> dict[str, str]:
    return {key: value for key, value in {**old, **new}.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Move:
    """One state is left for another one."""

    before: State
    after: State
    because: Because
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stay:
    """The node stays where it is."""

    because: Because
    sentence: str
    again_at: float = 0.0
    """Unix seconds at which time alone changes the answer; 0 is never."""
    work: Work = Work.NOTHING
    pod: FleetPod | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """What to write about a node, and what it waits for after that."""

    moves: tuple[Move, ...]
    change: NodeChange
    rest: Stay | None
    """None where it is to be decided again after the write."""
    progress: Progress | None = None
    """As the change leaves it."""
