"""What becomes of each pod on the node: one verdict for every pod, each with its reason and the setting that would change it.

The rules stand in one order in `RULES`; the first that has something to say decides. How it is known that a pod uses the driver is another
table, `core.uses`. A verdict depends on its own pod and the policy alone, so adding a pod never changes what happens to another.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from driver_manager.config import Settings
from driver_manager.core.snapshot import ClaimView, Holder, Identity, PodView, Taint
from driver_manager.core.uses import Evidence, Use, UseContext, driver_claims, is_dra_plugin, uses
from driver_manager.names import (
    COMPONENT_LABEL,
    COMPUTE_DOMAIN_LABEL,
    DEPLOY_CLIENT,
    DEPLOY_PREFIX,
    DRAIN_SKIP,
    DRIVER_COMPONENTS,
    GPU_CLIENT,
    GPU_DRA_DRIVER,
    MIRROR,
    NAME_LABEL,
    NEVER_PAUSED,
    OWN_NAME,
    PARK,
    PAUSED,
    UPGRADE_CONTROLLER_PREFIXES,
    VM_LABEL,
    VM_NAME_LABEL,
)
from driver_manager.operands import OPERANDS, Turn


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
    """It is evicted, and its DaemonSet kept off the node meanwhile by an admission policy."""
    REFUSE = "refuse"
    """It uses the driver and may not be moved: nothing is done to the node at all."""


class Reason(StrEnum):
    """Why, for machines, where it is not the evidence of its use."""

    OWN_POD = "own-pod"
    DRIVER_POD = "driver-pod"
    OPTED_OUT = "opted-out"
    OVER = "over"
    NO_GPU = "no-gpu"
    OPERAND = "operand"
    TERMINATING = "terminating"
    COMPUTE_DOMAIN = "compute-domain"
    MIRROR_POD = "mirror-pod"
    POLICY_OWNED = "policy-owned"
    EVICTION_OFF = "eviction-off"
    HIDDEN = "hidden"
    DAEMON_SET = "daemon-set"
    UNMANAGED = "unmanaged"
    EMPTY_DIR = "empty-dir"
    NOT_SELECTED = "not-selected"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of one pod, and why."""

    pod: PodView
    action: Action
    reason: Reason | Evidence
    sentence: str
    setting: str = ""
    """What a person can set or do to change it."""
    uses: tuple[Use, ...] = ()
    """All evidence of its use of the driver."""
    is_last: bool = False
    """Whether it goes after all others: their clean-up needs it."""


@dataclass(frozen=True, slots=True)
class Allowing:
    """What lets pods go that are refused, in the words of who decides: the agent's variables, or the fields of an upgrade policy."""

    unmanaged: str = "DRAIN_USE_FORCE=true"
    empty_dir: str = "DRAIN_DELETE_EMPTYDIR_DATA=true"


@dataclass(frozen=True, slots=True, kw_only=True)
class PodPolicy:
    """All that verdicts depend on besides the pod."""

    settings: Settings
    allowing: Allowing = Allowing()
    identity: Identity = field(default_factory=Identity)
    runtime_handlers: Mapping[str, str] | None = None
    claims: Mapping[tuple[str, str], ClaimView] = field(default_factory=dict)
    holders: Mapping[str, tuple[Holder, ...]] = field(default_factory=dict)
    reported: Mapping[str, str] = field(default_factory=dict)
    node_labels: Mapping[str, str] = field(default_factory=dict)
    paused: Mapping[str, str] = field(default_factory=dict)
    """Node labels that this run pauses -> their value before."""
    paused_last: frozenset[str] = frozenset()
    """Those of them that are paused after all others."""
    operand_apps: frozenset[str] = frozenset()
    """`app` labels of the operands whose label is paused."""
    keep_off: Taint | None = None
    is_policy_owned: bool = False
    parkable: frozenset[str] | None = None
    """`namespace/name` of DaemonSets that are kept off by an admission policy; None where nobody parks any."""
    not_parkable: Mapping[str, str] = field(default_factory=dict)
    """Those that ask for it and cannot be, with why not, which goes on from the DaemonSet's name."""

    @property
    def context(self) -> UseContext:
        """What shows whether a pod uses the driver."""
        return UseContext(
            settings=self.settings,
            runtime_handlers=self.runtime_handlers,
            claims=self.claims,
            holders=self.holders,
            reported=self.reported,
        )


LAST_APPS: Final = frozenset(operand.app for operand in OPERANDS if operand.app and operand.turn is Turn.LAST)
Rule = Callable[[PodView, PodPolicy, tuple[Use, ...]], Verdict | None]


def verdicts(pods: Iterable[PodView], policy: PodPolicy) -> tuple[Verdict, ...]:
    """One verdict for each pod, in the order of the pods."""
    return tuple(verdict(pod, policy) for pod in pods)


def verdict(pod: PodView, policy: PodPolicy) -> Verdict:
    """What becomes of a pod."""
    found = uses(pod, policy.context)
    for rule in RULES:
        if (decided := rule(pod, policy, found)) is not None:
            return replace(decided, uses=found)
    return Verdict(pod, Action.EVICT, found[0].evidence, _words(found), found[0].setting, found, is_last=is_dra_plugin(pod))


def _words(found: tuple[Use, ...]) -> str:
    return "; ".join(use.sentence for use in found)


def _owner(pod: PodView) -> str:
    return f"{pod.owner.kind} {pod.namespace}/{pod.owner.name}" if pod.owner is not None else "no owner"


def _is_daemon(pod: PodView) -> bool:
    return pod.owner is not None and pod.owner.kind == "DaemonSet"


def _own(pod: PodView, policy: PodPolicy, found: tuple[Use, ...]) -> Verdict | None:
    """The driver's pod, the agent and the controller are never moved (N11)."""
    if policy.identity.pod_uid and pod.uid == policy.identity.pod_uid:
        return Verdict(pod, Action.KEEP, Reason.OWN_POD, "is the pod this program runs in")
    if pod.labels.get(COMPONENT_LABEL) in DRIVER_COMPONENTS:
        return Verdict(pod, Action.KEEP, Reason.DRIVER_POD, "belongs to the driver")
    if pod.labels.get(NAME_LABEL) == OWN_NAME:
        return Verdict(pod, Action.KEEP, Reason.OWN_POD, "belongs to this program")
    return None


def _opted_out(pod: PodView, policy: PodPolicy, found: tuple[Use, ...]) -> Verdict | None:
    """An opt-out wins over every evidence but a process or a claim: a GPU that is held cannot be freed around its holder."""
    if pod.labels.get(DRAIN_SKIP) != "true":
        return None
    setting = f"remove its label {DRAIN_SKIP}"
    ignored = Evidence.PROCESS if policy.settings.hidden_consumers == "ignore" else None
    held = [use for use in found if use.evidence in (Evidence.PROCESS, Evidence.CLAIM) and use.evidence is not ignored]
    if held:
        return Verdict(pod, Action.REFUSE, Reason.OPTED_OUT, f"has the label {DRAIN_SKIP}=true, but {held[0].sentence}", setting)
    return Verdict(pod, Action.KEEP, Reason.OPTED_OUT, f"has the label {DRAIN_SKIP}=true", setting)


def _over(pod: PodView, policy: PodPolicy, found: tuple[Use, ...]) -> Verdict | None:
    if pod.is_over and not pod.is_terminating:
        return Verdict(pod, Action.KEEP, Reason.OVER, f"has ended ({pod.phase})")
    return None


def _operand(pod: PodView, policy: PodPolicy, found: tuple[Use, ...]) -> Verdict | None:
    """A pod that the DaemonSet controller takes off the node when a label is paused."""
    if not _is_daemon(pod):
        return None
    first = {key: value for key, value in policy.paused.items() if key not in policy.paused_last}
    goes_first = not _fits_when_paused(pod, policy, first)
    if goes_first and not is_dra_plugin(pod):
        return Verdict(pod, Action.AWAIT, Reason.OPERAND, f"goes when the node label {_paused_key(pod, first)} is paused")
    if not _fits_when_paused(pod, policy, policy.paused) and (is_dra_plugin(pod) or not driver_claims(pod, policy.context)):
        key = _paused_key(pod, policy.paused)
        return Verdict(pod, Action.AWAIT, Reason.OPERAND, f"goes last, when the node label {key} is paused", is_last=True)
    app = pod.labels.get("app")
    if pod.namespace == policy.settings.operator_namespace and app in policy.operand_apps:
        is_last = is_dra_plugin(pod) or app in LAST_APPS
        return Verdict(pod, Action.AWAIT, Reason.OPERAND, f"is the operand {app}, whose node label is paused", is_last=is_last)
    return None


def _fits_when_paused(pod: PodView, policy: PodPolicy, paused: Mapping[str, str]) -> bool:
    """Whether the pod still belongs on the node with these labels paused; one that does not fit even before is no operand of them."""
    before = {**policy.node_labels, **policy.paused}
    return not pod.fits(before) or pod.fits({**before, **dict.fromkeys(paused, PAUSED)})


def _paused_key(pod: PodView, paused: Mapping[str, str]) -> str:
    return next((key for key in paused if key in pod.selecting_keys), "of its selector")


def _compute_domain(pod: PodView, policy: PodPolicy, found: tuple[Use, ...]) -> Verdict | None:
    """The daemon of a compute domain leaves when the domain's last user has left: its plugin takes the label off that it selects."""
    if _is_daemon(pod) and COMPUTE_DOMAIN_LABEL in pod.node_selector:
        sentence = "goes with the last user of its compute domain"
        return Verdict(pod, Action.AWAIT, Reason.COMPUTE_DOMAIN, sentence, is_last=is_dra_plugin(pod))
    return None


def _no_use(pod: PodView, policy: PodPolicy, found: tuple[Use, ...]) -> Verdict | None:
    if found:
        return None
    hints = ["it mounts all of /dev, which alone is no sign"] if any(path.rstrip("/") == "/dev" for path in pod.host_paths) else []
    marks = (values[GPU_CLIENT] for values in (pod.annotations, pod.labels) if GPU_CLIENT in values)
    hints += [f"{GPU_CLIENT} is {mark[:63]!r}, and only 'true' would count" for mark in marks if mark != "false"]
    return Verdict(pod, Action.KEEP, Reason.NO_GPU, "; ".join(["uses no GPU that it declares or the kernel shows", *hints]))


def _hidden(pod: PodView, policy: PodPolicy, found: tuple[Use, ...]) -> Verdict | None:
    """A pod whose processes alone show its use."""
    if any(use.evidence is not Evidence.PROCESS for use in found):
        return None
    match policy.settings.hidden_consumers:
        case "ignore":
            return Verdict(pod, Action.KEEP, Reason.HIDDEN, f"{_words(found)}; that is ignored", "HIDDEN_CONSUMERS")
        case "refuse":
            return Verdict(pod, Action.REFUSE, Reason.HIDDEN, f"{_words(found)}, and declares none of it", "HIDDEN_CONSUMERS=evict")
        case _:
            return None


def _terminating(pod: PodView, policy: PodPolicy, found: tuple[Use, ...]) -> Verdict | None:
    """No eviction is sent to a pod that is on its way: for such a pod the server would ask no budget (decision 13)."""
    if pod.is_terminating:
        return Verdict(pod, Action.AWAIT, Reason.TERMINATING, f"{_words(found)}, and is already terminating", is_last=is_dra_plugin(pod))
    return None


def _mirror(pod: PodView, policy: PodPolicy, found: tuple[Use, ...]) -> Verdict | None:
    if MIRROR in pod.annotations:
        sentence = f"{_words(found)}, but is a static pod, which cannot be removed through the API"
        manifest = pod.name.removesuffix(f"-{policy.settings.node_name}")
        return Verdict(pod, Action.REFUSE, Reason.MIRROR_POD, sentence, f"remove the manifest of {manifest} from the node")
    return None


def _policy_owned(pod: PodView, policy: PodPolicy, found: tuple[Use, ...]) -> Verdict | None:
    """Decision 1: what the upgrade controller selects is its own; every other kind only we know, and a setting says what to do with it."""
    if not policy.is_policy_owned:
        return None
    if not _is_daemon(pod) and _is_known_to_upgrade_controllers(pod, policy):
        return Verdict(pod, Action.LEAVE, Reason.POLICY_OWNED, f"{_words(found)}; an upgrade controller owns its eviction here")
    match policy.settings.policy_owned_consumers:
        case "wait":
            return Verdict(pod, Action.LEAVE, Reason.POLICY_OWNED, f"{_words(found)}; it is left to others", "POLICY_OWNED_CONSUMERS=free")
        case "refuse":
            sentence = f"{_words(found)}, and no upgrade controller knows that"
            return Verdict(pod, Action.REFUSE, Reason.POLICY_OWNED, sentence, "POLICY_OWNED_CONSUMERS=free")
        case _:
            return None


def _is_known_to_upgrade_controllers(pod: PodView, policy: PodPolicy) -> bool:
    """Whether upstream's controller selects it: `nvidia.com/gpu*`, `nvidia.com/mig-*`, claims of gpu.nvidia.com not for administration."""
    if any(name.startswith(UPGRADE_CONTROLLER_PREFIXES) for name in pod.resources):
        return True
    return any(GPU_DRA_DRIVER in claim.drivers and not claim.is_admin for claim in driver_claims(pod, policy.context))


def _eviction_off(pod: PodView, policy: PodPolicy, found: tuple[Use, ...]) -> Verdict | None:
    if not policy.settings.enable_gpu_pod_eviction:
        sentence = f"{_words(found)}, and evicting GPU pods is switched off"
        return Verdict(pod, Action.REFUSE, Reason.EVICTION_OFF, sentence, "ENABLE_GPU_POD_EVICTION=true, or delete the pod")
    return None


def _daemon_set(pod: PodView, policy: PodPolicy, found: tuple[Use, ...]) -> Verdict | None:
    """A DaemonSet's pod comes back at once unless a taint keeps it off; the controller makes it tolerate the cordon."""
    if not _is_daemon(pod):
        return None
    if policy.keep_off is None or any(each.tolerates(policy.keep_off) for each in pod.tolerations):
        return _stubborn(pod, policy, found)
    sentence = f"{_words(found)}; the taint {policy.keep_off.key} keeps it off meanwhile"
    return Verdict(pod, Action.EVICT, found[0].evidence, sentence, found[0].setting, is_last=is_dra_plugin(pod))


def _stubborn(pod: PodView, policy: PodPolicy, found: tuple[Use, ...]) -> Verdict:
    """A DaemonSet's pod that no taint keeps off."""
    setting = f'give {_owner(pod)} the nodeSelector {DEPLOY_CLIENT}: "true", or narrow its tolerations'
    ref = pod.owner_ref
    if ref in (policy.parkable or ()):
        sentence = f"{_words(found)}; {_owner(pod)} is parked meanwhile"
        return Verdict(pod, Action.PARK, Reason.DAEMON_SET, sentence, setting, is_last=is_dra_plugin(pod))
    if ref in policy.not_parkable:
        return Verdict(pod, Action.REFUSE, Reason.DAEMON_SET, f"{_words(found)}; {_owner(pod)} {policy.not_parkable[ref]}", setting)
    if policy.parkable is not None:
        setting = f'label {_owner(pod)} {PARK}="true" to have it parked, {setting}'
    if policy.keep_off is None:
        sentence = f"{_words(found)}; {_owner(pod)} would make it again at once, and no taint can keep it off"
        return Verdict(pod, Action.REFUSE, Reason.DAEMON_SET, sentence, setting)
    sentence = f"{_words(found)}; {_owner(pod)} would make it again at once, as it tolerates the taint {policy.keep_off.key}"
    return Verdict(pod, Action.REFUSE, Reason.DAEMON_SET, sentence, setting)


def _unmanaged(pod: PodView, policy: PodPolicy, found: tuple[Use, ...]) -> Verdict | None:
    if pod.owner is None and not policy.settings.drain_use_force:
        sentence = f"{_words(found)}, and no controller would make it again"
        return Verdict(pod, Action.REFUSE, Reason.UNMANAGED, sentence, f"{policy.allowing.unmanaged}, or delete the pod")
    return None


def _empty_dir(pod: PodView, policy: PodPolicy, found: tuple[Use, ...]) -> Verdict | None:
    """The launcher of a virtual machine keeps nothing of worth in such a volume: whether it may go is the machine's affair."""
    if pod.has_empty_dir and not policy.settings.drain_delete_emptydir_data and virtual_machine(pod) is None:
        sentence = f"{_words(found)}, and would lose the data in its emptyDir volume"
        return Verdict(pod, Action.REFUSE, Reason.EMPTY_DIR, sentence, f"{policy.allowing.empty_dir}, or delete the pod")
    return None


RULES: Final[tuple[Rule, ...]] = (
    _own, _over, _operand, _opted_out, _no_use, _terminating, _mirror, _hidden, _compute_domain, _policy_owned, _eviction_off, _daemon_set,
    _unmanaged, _empty_dir,
)  # fmt: skip
"""In this order; a user of the driver that no rule decides on is evicted."""


def labels_of_consumers(pods: Iterable[PodView], context: UseContext) -> frozenset[str]:
    """Deploy labels that DaemonSets of users of the driver select, whoever made them up: a change of the label takes their pod away."""
    found = set()
    for pod in pods:
        if _is_daemon(pod) and pod.labels.get(COMPONENT_LABEL) not in DRIVER_COMPONENTS and uses(pod, context):
            found |= {key for key in pod.selecting_keys if key.startswith(DEPLOY_PREFIX)}
    return frozenset(found - NEVER_PAUSED)


def labels_of_plugins(pods: Iterable[PodView], settings: Settings) -> frozenset[str]:
    """Labels to pause that a DRA plugin selects."""
    keys = {key for pod in pods if is_dra_plugin(pod) for key in pod.selecting_keys}
    return frozenset(key for key in keys if key.startswith(DEPLOY_PREFIX) or key == settings.custom_label) - NEVER_PAUSED


def virtual_machine(pod: PodView) -> str | None:
    """Name of the virtual machine whose launcher a pod is (KubeVirt), None for others."""
    if pod.owner is not None and pod.owner.kind == "VirtualMachineInstance":
        return pod.owner.name
    return pod.labels.get(VM_NAME_LABEL, pod.name) if pod.labels.get(VM_LABEL) == "virt-launcher" else None


# Draining the whole node --------------------------------------------------------------------------------------------


def drain_verdict(pod: PodView, policy: PodPolicy) -> Verdict:
    """What a drain of the whole node does with a pod, by kubectl drain's rules.

    Differences to a GPU pod's verdict: DaemonSets' pods stay, and so does what the drain's selector does not select. The rules:
    https://kubernetes.io/docs/reference/kubectl/generated/kubectl_drain/
    """
    for rule in (_own, _over, _operand, _opted_out):
        if (decided := rule(pod, policy, ())) is not None:
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
        return Verdict(pod, Action.REFUSE, Reason.UNMANAGED, "has no controller to make it again", policy.allowing.unmanaged)
    if pod.has_empty_dir and not settings.drain_delete_emptydir_data and virtual_machine(pod) is None:
        sentence = "would lose the data in its emptyDir volume"
        return Verdict(pod, Action.REFUSE, Reason.EMPTY_DIR, sentence, policy.allowing.empty_dir)
    return Verdict(pod, Action.EVICT, Reason.NO_GPU, "is on the node that is drained")
