"""Which pods the controller takes off a node before its driver goes, which stand in the way, and which it waits for.

The verdicts are the agent's (`core.consumers`), with the policy's settings in place of the environment's. Operands, and DaemonSets that a
label or the agent's taint takes away, are the agent's to free: it runs in the new driver pod.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from driver_manager.config import Settings
from driver_manager.core.consumers import Action, PodPolicy, Reason, Verdict, drain_verdict, labels_of_consumers, verdicts
from driver_manager.core.labels import labels_to_pause
from driver_manager.core.snapshot import ClaimView, NodeView, PodView, Taint
from driver_manager.core.upgrade_policy import UpgradePolicy
from driver_manager.names import KEEP_OFF_TAINT
from driver_manager.operands import OPERANDS


@dataclass(frozen=True, slots=True)
class ToFree:
    """What has to happen to the pods of a node."""

    evict: tuple[PodView, ...] = ()
    gone: tuple[PodView, ...] = ()
    """Pods that have to be gone: those to evict, and those already on their way."""
    refusals: tuple[str, ...] = ()
    """Sentences: who cannot go, why, and what would change that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Users:
    """What shows who uses the driver on a node, besides its pods."""

    settings: Settings
    """The controller's own; the policy's fields win."""
    claims: Mapping[tuple[str, str], ClaimView]
    runtime_handlers: Mapping[str, str] | None = None


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
    known = _pod_policy(node, pods, settings, users)
    found = [each for each in verdicts(pods, known) if not _is_the_agents(each)]
    return _sorted(found)


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
    known = _pod_policy(node, pods, settings, users)
    return _sorted([each for pod in pods if not _is_the_agents(each := drain_verdict(pod, known))])


def _pod_policy(node: NodeView, pods: tuple[PodView, ...], settings: Settings, users: Users) -> PodPolicy:
    known = PodPolicy(
        settings=settings,
        claims=users.claims,
        runtime_handlers=users.runtime_handlers,
        node_labels=node.labels,
        keep_off=Taint(KEEP_OFF_TAINT),
    )
    labels = labels_to_pause(node.labels, settings.custom_label, {}, more=labels_of_consumers(pods, known.context)).all
    apps = frozenset(operand.app for operand in OPERANDS if operand.app and operand.label in labels)
    return replace(known, paused=labels, operand_apps=apps)


def _is_the_agents(verdict: Verdict) -> bool:
    """Whether the agent frees it, or it goes by itself in the agent's time."""
    if verdict.action is Action.AWAIT:
        return verdict.reason is not Reason.TERMINATING
    owner = verdict.pod.owner
    return verdict.action is Action.EVICT and owner is not None and owner.kind == "DaemonSet"


def _sorted(found: list[Verdict]) -> ToFree:
    evict = tuple(each.pod for each in found if each.action is Action.EVICT)
    going = tuple(each.pod for each in found if each.action is Action.AWAIT)
    refusals = tuple(
        f"pod {each.pod.ref} {each.sentence}{f' ({each.setting} would change that)' if each.setting else ''}"
        for each in found
        if each.action in (Action.REFUSE, Action.PARK)
    )
    return ToFree(evict, (*evict, *going), refusals)
