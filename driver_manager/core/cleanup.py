"""Taking everything of ours off a cluster, as values: what is done to each node, what is left on it, and why.

What belongs to a run that may live stays, and so does what a person has to decide. Everything that stays is named.
"""

from dataclasses import dataclass, field

from driver_manager.core.fleet import is_driver
from driver_manager.core.healing import put_back
from driver_manager.core.hold import parked_on, parking
from driver_manager.core.labels import is_paused
from driver_manager.core.record import NodeChange, Record, Undo, find_record
from driver_manager.core.remains import and_then, applied, is_nothing, is_of_another_boot, remains_of
from driver_manager.core.snapshot import NodeView, PodView
from driver_manager.names import DEPLOY_DRIVER, DEPLOY_PREFIX, HOST_DRIVER, KEEP_CORDON, PARKING, RECORD


@dataclass(frozen=True, slots=True)
class NodeCleanup:
    """What is done to one node in one write."""

    change: NodeChange = field(default_factory=NodeChange)
    done: tuple[str, ...] = ()
    """In words."""
    left: tuple[str, ...] = ()
    """What stays, and why."""

    @property
    def is_nothing(self) -> bool:
        """Whether nothing is written."""
        return is_nothing(self.change)


def may_live(node: NodeView, pods: tuple[PodView, ...]) -> str:
    """Why a run may be at work on a node, or go on with what one left; empty where nobody does."""
    record = find_record(node).record
    if record is None:
        return ""
    author = next((pod for pod in pods if pod.uid == record.pod.pod_uid and not pod.is_over), None)
    if author is not None and not (author.is_ready and is_driver(author.labels)):
        return f"the pod {author.ref} of run {record.run} is there"
    heir = next((pod for pod in pods if is_driver(pod.labels) and not pod.is_over and not pod.is_ready), None)
    return f"the driver pod {heir.ref} is starting, and goes on with what run {record.run} left" if heir is not None else ""


def has_to_be_claimed(node: NodeView) -> Record | None:
    """The record whose run id is replaced before it is undone; None where there is none, or it stays."""
    record = find_record(node).record
    return None if record is None or _stays(record, node) else record


def _stays(record: Record, node: NodeView) -> bool:
    return not record.pod.pod_uid and not is_of_another_boot(record, node)


def unpark(node: NodeView) -> NodeCleanup:
    """Lets the parked DaemonSets of a node in again, but for those of a run whose record stays, and lets no agent park any more."""
    park, owners = parking(node, keeps_parked(node) & parked_on(node))
    labels = {key: value for key, value in park.items() if node.labels.get(key) != value}
    annotations = {key: value for key, value in owners.items() if node.annotations.get(key) != value}
    done = ("un-park what was kept off it",) if labels or annotations else ()
    if PARKING in node.annotations:
        annotations, done = {**annotations, PARKING: None}, (*done, f"take off the annotation {PARKING}")
    return NodeCleanup(NodeChange(labels=labels, annotations=annotations), done)


def keeps_parked(node: NodeView) -> frozenset[str]:
    """The DaemonSets that a run keeps off a node whose record stays."""
    record = find_record(node).record
    return frozenset(record.parked) if record is not None and _stays(record, node) else frozenset()


def clean(node: NodeView, *, is_state_ours: bool) -> NodeCleanup:
    """Takes everything else off a node: the record undone, taints, own cordons, annotations and labels, in one change."""
    found = find_record(node)
    undo, kept = Undo(NodeChange()), None
    if found.is_unreadable:
        undo = Undo(NodeChange(), (f"{found.complaint}; put the node back by hand, then take it off",))
    elif (record := found.record) is not None and _stays(record, node):
        kept = record
        words = f"the record of run {record.run} and what it holds: it was no pod's, and may live; run `driver-manager restore` on the node"
        undo = Undo(NodeChange(), (words,))
    elif record is not None:
        undo = put_back(record, node)
    kept_taint = kept.taint if kept is not None else None
    undo = and_then(undo, remains_of(applied(node, undo.change), is_state_ours=is_state_ours, kept_taint=kept_taint))
    left = (*undo.left_alone, *_theirs(applied(node, undo.change), kept))
    return NodeCleanup(undo.change, _words(node, undo.change), left)


def _theirs(node: NodeView, kept: Record | None) -> list[str]:
    """What looks like ours on a node that is as clean as it can be, and is not, or is not to be taken off."""
    left = []
    held = kept.labels if kept is not None else {}
    left += [
        f"label {key}={value}: paused, and no record says what it was before"
        for key, value in sorted(node.labels.items())
        if key.startswith(DEPLOY_PREFIX) and is_paused(value) and key not in held and RECORD not in node.annotations
    ]
    if KEEP_CORDON in node.annotations:
        left.append(f"the annotation {KEEP_CORDON}: a person's")
    if HOST_DRIVER in node.annotations:
        left.append(f"the annotation {HOST_DRIVER}, and the label {DEPLOY_DRIVER}: the driver here is the host's own, and needs no other")
    if node.unschedulable and not (kept is not None and kept.is_cordoned):
        left.append("the cordon: no record says that it is ours")
    return left


def _words(node: NodeView, change: NodeChange) -> tuple[str, ...]:
    """A change in words, in the order in which a person would do it."""
    words = []
    if change.taints is not None:
        gone = [taint for taint in node.taints if taint not in change.taints]
        words.append(f"take off the taint {', '.join(f'{taint.key}={taint.value}' for taint in gone)}")
    if change.unschedulable is False:
        words.append("uncordon it")
    words += [f"take off the annotation {key}" for key, value in change.annotations.items() if value is None]
    words += [f"keep of the annotation {key} what only the node can undo" for key, value in change.annotations.items() if value is not None]
    words += [f"{key} = {value}" if value is not None else f"take off the label {key}" for key, value in change.labels.items()]
    return tuple(words)
