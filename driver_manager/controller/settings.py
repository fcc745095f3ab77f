"""The controller's settings, with units, defaults and reasons. `cli` fills them from flags and environment."""

from dataclasses import dataclass, field

from driver_manager.config import Settings
from driver_manager.core.role import Choice
from driver_manager.core.situation import RolloutSettings
from driver_manager.core.upgrade_policy import UpgradePolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class MaintenanceSettings:
    """NVIDIA's requestor mode: a maintenance operator cordons and frees the nodes, asked by NodeMaintenance objects."""

    is_on: bool = False
    """MAINTENANCE_OPERATOR_ENABLED. Before it is turned off the roll-outs should have ended: what is left then is deleted by hand."""
    namespace: str = "default"
    """MAINTENANCE_OPERATOR_REQUESTOR_NAMESPACE: where the objects are."""
    requestor: str = "nvidia.operator.com"
    """MAINTENANCE_OPERATOR_REQUESTOR_ID: who we are in them. Two programs must not have the same."""
    prefix: str = "nvidia-operator"
    """MAINTENANCE_OPERATOR_NODE_MAINTENANCE_PREFIX: programs that share their objects have the same."""

    def name(self, node_name: str) -> str:
        """Of the object of a node."""
        return f"{self.prefix}-{node_name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSettings:
    """Everything that can be set. Times in seconds."""

    operator_namespace: str = "gpu-operator"
    """Where driver DaemonSets, their pods and the validators are."""
    node_selector: str = "nvidia.com/gpu.present=true"
    """Which nodes are the fleet's, as kubectl takes it."""
    identity: str = "controller"
    """Who this replica is, in the Lease: its pod's name."""
    role: Choice = Choice.AUTO
    """Whether it leads beside a gpu-operator or follows it: as that one's Lease tells, or as a person has set it."""
    policy: UpgradePolicy | None = None
    """From a file; None: custom resources tell."""
    lease_namespace: str = "driver-manager"
    lease_name: str = "driver-manager-controller"
    lease_duration: float = 15.0
    """Another replica takes over when the Lease was not renewed for so long."""
    renew_deadline: float = 10.0
    """A leader that could not renew for so long stops writing."""
    retry_period: float = 2.0
    """Between two tries to get or renew the Lease."""
    request_timeout: float = 4.0
    """Less than lease_duration - renew_deadline: a write of a lost leader ends before the next leader begins (decision 34)."""
    cluster_max_unavailable: int | str | None = None
    """Nodes of the whole cluster that may be unavailable, a number or a share, beside the limits of the groups."""
    most_failures: int = 5
    """So many nodes in a row may fail with one driver before no other is begun with it; 0 is no limit."""
    gang_label: str = ""
    """Node label: no two nodes with the same value are in work at once."""
    order_key: str = ""
    """Node label or annotation with a number: smaller ones come first."""
    template_parking: bool = False
    """Where there is no admission policy, the templates of DaemonSets that ask for it are changed: that restarts all of their pods once."""
    maintenance: MaintenanceSettings = field(default_factory=MaintenanceSettings)
    settle_time: float = 300.0
    """A node that an agent left half-way is healed when nobody has worked on it, and no driver pod was due there, for so long; so is one
    with what is left of an upgrade taken care of. Longer than an operator takes to make a DaemonSet anew."""
    heal_pause: float = 30.0
    """Between the new run id in such a record and its undo: an agent that lives after all reads the node again within 7 s, before its next
    step."""
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    agent: Settings = field(default_factory=Settings)
    """How users of the driver are told: the agent's settings."""
    listen: str = "0.0.0.0:8080"
    """Address of /healthz, /readyz and /metrics; empty for none."""
