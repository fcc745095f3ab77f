"""Which pods the controller takes off a node before its driver goes, what keeps them off, which stand in the way, and which it waits for.

The verdicts are the agent's (`core.consumers`), with the policy's settings in place of the environment's. Operands are the agent's to free:
it runs in the new driver pod. All else that the API can do is the controller's: evictions, and for DaemonSets a paused label, a taint, or
parking.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from driver_manager.config import Settings
from driver_manager.core.consumers import Action, Allowing, PodPolicy, Reason, Verdict, drain_verdict, labels_of_consumers, verdicts
from driver_manager.core.hold import Hold
from driver_manager.core.labels import labels_to_pause
from driver_manager.core.parking import Means
from driver_manager.core.snapshot import ClaimView, NodeView, PodView
from driver_manager.core.upgrade_policy import UpgradePolicy
from driver_manager.core.uses import is_dra_plugin
from driver_manager.names import PAUSED
from driver_manager.operands import OPERANDS

OPERAND_LABELS = frozenset(operand.label for operand in OPERANDS)
BY_DELETION = Allowing("podDeletion.force: true in the upgrade policy", "podDeletion.deleteEmptyDir: true in the upgrade policy")
BY_DRAIN = Allowing("drain.force: true in the upgrade policy", "drain.deleteEmptyDir: true in the upgrade policy")


@dataclass(frozen=True, slots=True)
class ToFree:
    """What has to happen to the pods of a node."""

    evict: tuple[PodView, ...] = ()
    gone: tuple[PodView, ...] = ()
    """Pods that have to be gone: those to evict, those that a paused label takes away, and those already on their way."""
    refusals: tuple[str, ...] = ()
    """Sentences: who cannot go, why, and what would change that."""
    hold: Hold = field(default_factory=Hold)
    """What has to be on the node before they go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Users:
    """What shows who uses the driver on a node, besides its pods."""

    settings: Settings
    """The controller's own; the policy's fields win."""
    claims: Mapping[tuple[str, str], ClaimView]
    runtime_handlers: Mapping[str, str] | None = None
    means: Means = field(default_factory=Means)
    is_led_by_others: bool = False
    """Whether gpu-operator leads the node, which evicts what it knows."""
    reported: Mapping[str, str] = field(default_factory=dict)
    """Pod uid -> why it stands in the way, of those that the agent on the node names."""


def pods_to_free(node: NodeView, pods: Iterable[PodView], policy: UpgradePolicy, users: Users) -> ToFree:
    """What has to happen before the driver of a node is replaced."""
    deletion = policy.pod_deletion
    settings = replace(
        users.settings,
        node_name=node.name,
        drain_use_force=deletion.force,
        drain_delete_emptydir_data=deletion.delete_empty_dir,
        consumer_selector=deletion.pod_selector,
    )
    pods = tuple(pods)
    known = _pod_policy(node, pods, settings, users, BY_DELETION)
    found = [each for each in verdicts(pods, known) if not _is_the_agents(each, known)]
    return _sorted([each for each in found if _is_reported(each, users)] if users.reported else found, known)


def pods_to_drain(node: NodeView, pods: Iterable[PodView], policy: UpgradePolicy, users: Users) -> ToFree:
    """What has to happen when the whole node is drained."""
    drain = policy.drain
    settings = replace(
        users.settings,
        node_name=node.name,
        drain_use_force=drain.force,
        drain_delete_emptydir_data=drain.delete_empty_dir,
        drain_pod_selector=drain.pod_selector,
    )
    pods = tuple(pods)
    known = _pod_policy(node, pods, settings, users, BY_DRAIN)
    found = [drain_verdict(pod, known) for pod in pods]
    return _sorted([each for each in found if not _is_the_agents(each, known)], known)


def _pod_policy(node: NodeView, pods: tuple[PodView, ...], settings: Settings, users: Users, allowing: Allowing) -> PodPolicy:
    known = PodPolicy(
        settings=settings,
        allowing=allowing,
        claims=users.claims,
        runtime_handlers=users.runtime_handlers,
        node_labels=node.labels,
        keep_off=users.means.taint,
        parkable=users.means.parkable,
        not_parkable=users.means.not_now,
        is_policy_owned=users.is_led_by_others,
        reported=users.reported,
    )
    labels = labels_to_pause(node.labels, settings.custom_label, {}, more=labels_of_consumers(pods, known.context)).all
    apps = frozenset(operand.app for operand in OPERANDS if operand.app and operand.label in labels)
    return replace(known, paused=labels, operand_apps=apps)


def _is_the_agents(verdict: Verdict, known: PodPolicy) -> bool:
    """Whether the agent frees it, or it goes by itself in the agent's time."""
    if verdict.action is Action.AWAIT and verdict.reason is not Reason.TERMINATING:
        return verdict.reason is not Reason.OPERAND or not _own_labels(verdict, known)
    owner = verdict.pod.owner
    return verdict.action is Action.EVICT and owner is not None and owner.kind == "DaemonSet" and is_dra_plugin(verdict.pod)


def _is_reported(verdict: Verdict, users: Users) -> bool:
    """Whether the agent names it; what keeps a DaemonSet off is not put on a node for that."""
    return verdict.pod.uid in users.reported and (verdict.pod.owner is None or verdict.pod.owner.kind != "DaemonSet")


def _own_labels(verdict: Verdict, known: PodPolicy) -> dict[str, str]:
    """Labels, no operand's, that take a user's pod off the node when they are paused, with what they are now; none for an operand."""
    pod = verdict.pod
    if not verdict.uses or is_dra_plugin(pod) or pod.selecting_keys & OPERAND_LABELS:
        return {}
    found = {key: value for key, value in known.paused.items() if key in pod.selecting_keys}
    return {} if pod.fits({**known.node_labels, **known.paused, **dict.fromkeys(found, PAUSED)}) else found


def _sorted(found: list[Verdict], known: PodPolicy) -> ToFree:
    taken = [each for each in found if each.action in (Action.EVICT, Action.PARK)]
    daemons = [each for each in taken if each.pod.owner is not None and each.pod.owner.kind == "DaemonSet"]
    going = tuple(each.pod for each in found if each.action is Action.AWAIT)
    paused = {key: value for each in found if each.reason is Reason.OPERAND for key, value in _own_labels(each, known).items()}
    parked = frozenset(each.pod.owner_ref for each in daemons if each.action is Action.PARK)
    is_tainted = any(each.action is Action.EVICT for each in daemons)
    refusals = tuple(
        f"pod {each.pod.ref} {each.sentence}{f' (what would change that: {each.setting})' if each.setting else ''}"
        for each in found
        if each.action is Action.REFUSE
    )
    hold = Hold(parked, paused, known.keep_off if is_tainted else None)
    evict = tuple(each.pod for each in taken)
    return ToFree(evict, (*evict, *going), refusals, hold)
