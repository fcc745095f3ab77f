"""What becomes of each pod on the node: one verdict for every pod, each with its reason and the setting that would change it.

The rules stand in one order in `RULES`; the first that has something to say decides. A verdict depends on its own pod and the policy alone,
so adding a pod never changes what happens to another.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from driver_manager.config import Settings
from driver_manager.core.snapshot import Identity, PodView, Taint
from driver_manager.names import COMPONENT_LABEL, DRAIN_SKIP, DRIVER_COMPONENTS, GPU_RESOURCE_PREFIXES, MIRROR


class Action(StrEnum):
    """What is done about a pod."""

    KEEP = "keep"
    """It stays: the driver's own, over, or no user of the driver."""
    AWAIT = "await"
    """It goes by itself: its label is paused, or it is on its way out. The driver waits for it."""
    EVICT = "evict"
    LEAVE = "leave"
    """An upgrade controller evicts it; the agent waits for that."""
    PARK = "park"
    """Its DaemonSet has to be kept off the node by an admission policy."""
    REFUSE = "refuse"
    """It uses the driver and may not be moved: nothing is done to the node at all."""


class Reason(StrEnum):
    """Why, for machines."""

    OWN_POD = "own-pod"
    DRIVER_POD = "driver-pod"
    OPTED_OUT = "opted-out"
    OVER = "over"
    NO_GPU = "no-gpu"
    OPERAND = "operand"
    TERMINATING = "terminating"
    GPU_RESOURCE = "gpu-resource"
    MIRROR_POD = "mirror-pod"
    POLICY_OWNED = "policy-owned"
    EVICTION_OFF = "eviction-off"
    DAEMON_SET = "daemon-set"
    UNMANAGED = "unmanaged"
    EMPTY_DIR = "empty-dir"
    NOT_SELECTED = "not-selected"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of one pod, and why."""

    pod: PodView
    action: Action
    reason: Reason
    sentence: str
    setting: str = ""
    """What a person can set or do to change it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodPolicy:
    """All that verdicts depend on besides the pod."""

    settings: Settings
    identity: Identity = field(default_factory=Identity)
    paused: Mapping[str, str] = field(default_factory=dict)
    """Node labels that this run pauses -> their value before."""
    operand_apps: frozenset[str] = frozenset()
    """`app` labels of the operands whose label is paused."""
    keep_off: Taint | None = None
    is_policy_owned: bool = False


Rule = Callable[[PodView, PodPolicy], Verdict | None]


def gpu_resources(pod: PodView) -> list[str]:
    """The GPU resources that any of its containers, or the pod itself, asks for."""
    return sorted(name for name in pod.resources if name.startswith(GPU_RESOURCE_PREFIXES))


def verdicts(pods: Iterable[PodView], policy: PodPolicy) -> tuple[Verdict, ...]:
    """One verdict for each pod, in the order of the pods."""
    return tuple(verdict(pod, policy) for pod in pods)


def verdict(pod: PodView, policy: PodPolicy) -> Verdict:
    """What becomes of a pod."""
    for rule in RULES:
        if (decided := rule(pod, policy)) is not None:
            return decided
    return Verdict(pod, Action.EVICT, Reason.GPU_RESOURCE, _uses(pod))


def _uses(pod: PodView) -> str:
    return f"asks for {', '.join(gpu_resources(pod))}"


def _own(pod: PodView, policy: PodPolicy) -> Verdict | None:
    if policy.identity.pod_uid and pod.uid == policy.identity.pod_uid:
        return Verdict(pod, Action.KEEP, Reason.OWN_POD, "is the pod this program runs in")
    if pod.labels.get(COMPONENT_LABEL) in DRIVER_COMPONENTS:
        return Verdict(pod, Action.KEEP, Reason.DRIVER_POD, "belongs to the driver")
    if pod.labels.get(DRAIN_SKIP) == "true":
        return Verdict(pod, Action.KEEP, Reason.OPTED_OUT, f"has the label {DRAIN_SKIP}=true", f"remove its label {DRAIN_SKIP}")
    return None


def _over(pod: PodView, policy: PodPolicy) -> Verdict | None:
    if pod.is_over and not pod.is_terminating:
        return Verdict(pod, Action.KEEP, Reason.OVER, f"has ended ({pod.phase})")
    return None


def _operand(pod: PodView, policy: PodPolicy) -> Verdict | None:
    """A pod that the DaemonSet controller takes off the node when a label is paused."""
    if pod.owner is None or pod.owner.kind != "DaemonSet":
        return None
    paused = [key for key, value in policy.paused.items() if pod.node_selector.get(key) == value]
    if paused:
        return Verdict(pod, Action.AWAIT, Reason.OPERAND, f"goes when the node label {paused[0]} is paused")
    if pod.namespace == policy.settings.operator_namespace and pod.labels.get("app") in policy.operand_apps:
        return Verdict(pod, Action.AWAIT, Reason.OPERAND, f"is the operand {pod.labels['app']}, whose node label is paused")
    return None


def _no_gpu(pod: PodView, policy: PodPolicy) -> Verdict | None:
    if not gpu_resources(pod):
        return Verdict(pod, Action.KEEP, Reason.NO_GPU, "uses no GPU that it declares")
    return None


def _terminating(pod: PodView, policy: PodPolicy) -> Verdict | None:
    """No eviction is sent to a pod that is on its way: for such a pod the server would ask no budget (decision 13)."""
    if pod.is_terminating:
        return Verdict(pod, Action.AWAIT, Reason.TERMINATING, f"{_uses(pod)} and is already terminating")
    return None


def _mirror(pod: PodView, policy: PodPolicy) -> Verdict | None:
    if MIRROR in pod.annotations:
        sentence = f"{_uses(pod)}, but is a static pod, which cannot be removed through the API"
        return Verdict(pod, Action.REFUSE, Reason.MIRROR_POD, sentence, f"remove the manifest of {pod.name} from the node")
    return None


def _policy_owned(pod: PodView, policy: PodPolicy) -> Verdict | None:
    if policy.is_policy_owned:
        return Verdict(pod, Action.LEAVE, Reason.POLICY_OWNED, f"{_uses(pod)}; an upgrade controller owns its eviction here")
    return None


def _eviction_off(pod: PodView, policy: PodPolicy) -> Verdict | None:
    if not policy.settings.enable_gpu_pod_eviction:
        sentence = f"{_uses(pod)}, and evicting GPU pods is switched off"
        return Verdict(pod, Action.REFUSE, Reason.EVICTION_OFF, sentence, "ENABLE_GPU_POD_EVICTION=true, or delete the pod")
    return None


def _daemon_set(pod: PodView, policy: PodPolicy) -> Verdict | None:
    """A DaemonSet's pod comes back at once unless a taint keeps it off; the controller makes it tolerate the cordon."""
    if pod.owner is None or pod.owner.kind != "DaemonSet":
        return None
    owner = f"DaemonSet {pod.namespace}/{pod.owner.name}"
    if policy.keep_off is None:
        sentence = f"{_uses(pod)}; {owner} would make it again at once, and no taint can keep it off"
    elif any(each.tolerates(policy.keep_off) for each in pod.tolerations):
        sentence = f"{_uses(pod)}; {owner} would make it again at once, as it tolerates the taint {policy.keep_off.key}"
    else:
        return Verdict(pod, Action.EVICT, Reason.GPU_RESOURCE, f"{_uses(pod)}; the taint {policy.keep_off.key} keeps it off")
    setting = f"give {owner} a nodeSelector on nvidia.com/gpu.deploy.client=true, or narrow its tolerations"
    return Verdict(pod, Action.REFUSE, Reason.DAEMON_SET, sentence, setting)


def _unmanaged(pod: PodView, policy: PodPolicy) -> Verdict | None:
    if pod.owner is None and not policy.settings.drain_use_force:
        sentence = f"{_uses(pod)}, and no controller would make it again"
        return Verdict(pod, Action.REFUSE, Reason.UNMANAGED, sentence, "DRAIN_USE_FORCE=true, or delete the pod")
    return None


def _empty_dir(pod: PodView, policy: PodPolicy) -> Verdict | None:
    if pod.has_empty_dir and not policy.settings.drain_delete_emptydir_data:
        sentence = f"{_uses(pod)}, and would lose the data in its emptyDir volume"
        return Verdict(pod, Action.REFUSE, Reason.EMPTY_DIR, sentence, "DRAIN_DELETE_EMPTYDIR_DATA=true, or delete the pod")
    return None


RULES: Final[tuple[Rule, ...]] = (
    _own, _over, _operand, _no_gpu, _terminating, _mirror, _policy_owned, _eviction_off, _daemon_set, _unmanaged, _empty_dir,
)  # fmt: skip
"""In this order; a GPU pod that no rule decides on is evicted."""


# Draining the whole node --------------------------------------------------------------------------------------------


def drain_verdict(pod: PodView, policy: PodPolicy) -> Verdict:
    """What a drain of the whole node does with a pod, by kubectl drain's rules.

    Differences to a GPU pod's verdict: DaemonSets' pods stay, and so does what the drain's selector does not select. The rules:
    https://kubernetes.io/docs/reference/kubectl/generated/kubectl_drain/
    """
    for rule in (_own, _over, _operand):
        if (decided := rule(pod, policy)) is not None:
            return decided
    settings = policy.settings
    if MIRROR in pod.annotations:
        return Verdict(pod, Action.KEEP, Reason.MIRROR_POD, "is a static pod, which a drain leaves")
    if pod.owner is not None and pod.owner.kind == "DaemonSet":
        return Verdict(pod, Action.KEEP, Reason.DAEMON_SET, "belongs to a DaemonSet, which a drain leaves")
    if not settings.drain_pod_selector.matches(pod.labels):
        sentence = f"is not selected by {settings.drain_pod_selector.text}"
        return Verdict(pod, Action.KEEP, Reason.NOT_SELECTED, sentence, "DRAIN_POD_SELECTOR_LABEL")
    if pod.is_terminating:
        return Verdict(pod, Action.AWAIT, Reason.TERMINATING, "is already terminating")
    if pod.owner is None and not settings.drain_use_force:
        return Verdict(pod, Action.REFUSE, Reason.UNMANAGED, "has no controller to make it again", "DRAIN_USE_FORCE=true")
    if pod.has_empty_dir and not settings.drain_delete_emptydir_data:
        sentence = "would lose the data in its emptyDir volume"
        return Verdict(pod, Action.REFUSE, Reason.EMPTY_DIR, sentence, "DRAIN_DELETE_EMPTYDIR_DATA=true")
    return Verdict(pod, Action.EVICT, Reason.NO_GPU, "is on the node that is drained")
