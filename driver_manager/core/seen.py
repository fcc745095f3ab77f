"""One look as a whole, and what follows from it for labels, taint and verdicts."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from driver_manager.config import Settings
from driver_manager.core.consumers import PodPolicy, labels_of_consumers, labels_of_plugins
from driver_manager.core.hold import paused_by_rollout
from driver_manager.core.keepoff import KeepOff, choose_keep_off
from driver_manager.core.labels import LabelsToPause, labels_to_pause
from driver_manager.core.parking import Means
from driver_manager.core.record import Record
from driver_manager.core.services import HostUse, host_uses
from driver_manager.core.snapshot import (
    ClaimView,
    DaemonSetView,
    Holder,
    HolderScan,
    HostView,
    Identity,
    NodeView,
    Permissions,
    PodView,
    Toleration,
)
from driver_manager.core.uses import UseContext
from driver_manager.names import COMPONENT_LABEL, DEPLOY_VFIO_MANAGER, DRIVER_COMPONENTS, UPGRADE_ENABLED
from driver_manager.operands import OPERANDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All that was seen at one moment."""

    node: NodeView
    host: HostView
    pods: tuple[PodView, ...] = ()
    holders: HolderScan = field(default_factory=HolderScan)
    identity: Identity = field(default_factory=Identity)
    daemon_set: DaemonSetView | None = None
    """The DaemonSet that owns our own pod, where it can be read."""
    permissions: Permissions | None = None
    claims: Mapping[tuple[str, str], ClaimView] = field(default_factory=dict)
    """(namespace, name) -> every claim that a pod on the node names and that exists."""
    runtime_handlers: Mapping[str, str] | None = None
    """RuntimeClass name -> handler; None where they may not be listed."""
    host_smi_version: str | None = None
    """What the host's own nvidia-smi said, where it had to be asked."""
    means: Means = field(default_factory=Means)
    """What may be parked, of the DaemonSets that nothing else keeps off."""
    services: Mapping[str, bool] = field(default_factory=dict)
    """Unit -> whether it is active, of the units that are to be stopped."""
    services_trouble: str = ""
    """Why the units could not be asked for."""
    run: str = ""
    started: str = ""

    @property
    def own_pod(self) -> PodView | None:
        """The pod this program runs in."""
        return next((pod for pod in self.pods if self.identity.pod_uid and pod.uid == self.identity.pod_uid), None)

    @property
    def wanted_claims(self) -> frozenset[tuple[str, str]]:
        """(namespace, name) of every claim that a pod on the node names."""
        return frozenset((pod.namespace, name) for pod in self.pods for name in pod.claims)

    @property
    def holders_by_pod(self) -> dict[str, tuple[Holder, ...]]:
        """Pod uid, as in cgroup paths -> its processes that hold a GPU."""
        found: dict[str, tuple[Holder, ...]] = {}
        for holder in self.holders.holders:
            if holder.pod_uid:
                found[holder.pod_uid] = (*found.get(holder.pod_uid, ()), holder)
        return found

    @property
    def is_policy_owned(self) -> bool:
        """Whether an upgrade controller cordons this node and evicts its GPU pods (decision 1)."""
        return self.node.annotations.get(UPGRADE_ENABLED) == "true"

    @property
    def wants_vfio(self) -> bool:
        """Whether our own DaemonSet is the one that gives GPUs to virtual machines (decision 3); outside a pod the node's label says it."""
        if self.own_pod is not None:
            return DEPLOY_VFIO_MANAGER in self.own_pod.node_selector
        return self.node.labels.get(DEPLOY_VFIO_MANAGER) == "true"


def keeps_vfio(seen: Snapshot, settings: Settings) -> bool:
    """Whether GPUs on vfio stay there: they are wanted so, or nobody says how, as without a cluster (N37, N39)."""
    return seen.wants_vfio or settings.no_cluster


def use_context(seen: Snapshot, settings: Settings) -> UseContext:
    """What shows whether the pods of a look use the driver."""
    return UseContext(settings=settings, runtime_handlers=seen.runtime_handlers, claims=seen.claims, holders=seen.holders_by_pod)


def host_uses_of(seen: Snapshot, settings: Settings) -> tuple[HostUse, ...]:
    """What is done about the host's own processes that hold a GPU."""
    return host_uses(seen.holders.holders, settings.host_services, settings.host_processes)


def labels_of(seen: Snapshot, settings: Settings, record: Record | None) -> LabelsToPause:
    """The labels to pause: of operands, the client key, the user's own, and every other deploy label that a user of the driver selects."""
    return labels_to_pause(
        seen.node.labels,
        settings.custom_label,
        record.labels if record is not None else {},
        more=labels_of_consumers(seen.pods, use_context(seen, settings)),
        last=labels_of_plugins(seen.pods, settings),
        others=paused_by_rollout(seen.node),
    )


def other_drivers(seen: Snapshot) -> tuple[PodView, ...]:
    """Pods of other drivers that still live on this node (R2). Without a pod of our own nobody is another."""
    own = seen.identity.pod_uid
    drivers = [pod for pod in seen.pods if pod.labels.get(COMPONENT_LABEL) in DRIVER_COMPONENTS]
    return tuple(pod for pod in drivers if own and pod.uid != own and not pod.is_over)


def choose_keep_off_of(seen: Snapshot, settings: Settings, record: Record | None) -> KeepOff:
    """The taint for a run on this node: what the owner of our pod tolerates decides, read from its DaemonSet or from our pod."""
    if settings.no_cluster:
        return KeepOff(None, "there is no cluster, so nothing but this machine is changed")
    tolerations: tuple[Toleration, ...] | None = None
    if seen.daemon_set is not None:
        tolerations = seen.daemon_set.tolerations
    elif seen.own_pod is not None:
        tolerations = seen.own_pod.tolerations
    held = record.taint if record is not None else None
    return choose_keep_off(seen.node, tolerations, seen.run, unowned_key=settings.keep_off_taint_key, held=held)


def pod_policy(seen: Snapshot, settings: Settings, labels: LabelsToPause, keep_off: KeepOff) -> PodPolicy:
    """What the verdicts of this snapshot's pods depend on."""
    apps = {operand.app for operand in OPERANDS if operand.app and operand.label in labels.all}
    return PodPolicy(
        settings=settings,
        identity=seen.identity,
        runtime_handlers=seen.runtime_handlers,
        claims=seen.claims,
        holders=seen.holders_by_pod,
        node_labels=seen.node.labels,
        paused=labels.all,
        paused_last=frozenset(labels.last),
        operand_apps=frozenset(apps),
        keep_off=keep_off.taint,
        parkable=seen.means.parkable,
        not_parkable=seen.means.not_now,
        is_policy_owned=seen.is_policy_owned,
    )
