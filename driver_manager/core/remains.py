"""What of ours is still on a node on which nobody works any more, and how it comes off (N49).

Only what is ours beyond doubt: keys of our own, a state that this program or NVIDIA's controller wrote, taints with our value, and a cordon
of which a record of this node says that we made it. Everything else is left alone and named (R3).
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from driver_manager.core.hold import ROLLOUT_RUN
from driver_manager.core.parking import taken_off
from driver_manager.core.record import BadRecord, NodeChange, Record, Undo, decode, undo_record
from driver_manager.core.rollout_record import BadProgress, Progress
from driver_manager.core.rollout_record import decode as decode_progress
from driver_manager.core.rollout_states import state_of
from driver_manager.core.rollout_steps import NVIDIAS
from driver_manager.core.snapshot import NodeView, Taint
from driver_manager.names import (
    ACCEPT,
    KEEP_CORDON,
    PAUSED,
    RECORD,
    ROLLOUT,
    SAFE_LOAD,
    STATUS,
    TAINT_VALUE_PREFIX,
    UPGRADE_ENABLED,
    UPGRADE_REQUESTED,
    UPGRADE_STATE,
)

OUR_TAINT: Final = re.compile(re.escape(TAINT_VALUE_PREFIX) + f"([a-z0-9]{{10}}|{ROLLOUT_RUN})")
"""A run id, or the controller's word, and nothing else: what is left of a run whose record is gone is known by its value alone."""
OURS: Final = (STATUS, ACCEPT)
"""Annotations of ours that mean nothing where no driver is wanted."""
OF_AN_UPGRADE: Final = (*NVIDIAS, UPGRADE_REQUESTED, UPGRADE_ENABLED, SAFE_LOAD)
"""Those of NVIDIA's names; they go together with the state label."""


def foreign_record(node: NodeView) -> Record | None:
    """The agent's record, if it is of another Node object: one of this name that was deleted, or one whose annotations were copied."""
    try:
        record = decode(node.annotations.get(RECORD, ""))
    except BadRecord:
        return None
    return record if record.node_uid != node.uid else None


def is_of_this_boot(record: Record, node: NodeView) -> bool:
    """Whether a record is of this machine and of its present boot for sure: no two boots of any machines have the same id."""
    return bool(node.boot_id) and record.boot_id == node.boot_id


def is_of_another_boot(record: Record, node: NodeView) -> bool:
    """Whether what a record tells of was in another boot for sure, so that no process of it lives."""
    return bool(node.boot_id and record.boot_id) and record.boot_id != node.boot_id


def remains_of(node: NodeView, *, is_state_ours: bool = True, kept_taint: Taint | None = None) -> Undo:
    """How everything of ours comes off a node, the agent's record of this node aside.

    Args:
        node: as it is.
        is_state_ours: whether the upgrade's state is ours to take off; beside a live gpu-operator it is not (decision 31).
        kept_taint: one that belongs to a record that stays.
    """
    undo = _without_foreign_record(node)
    undo = and_then(undo, _without_rollout(applied(node, undo.change), is_state_ours=is_state_ours))
    rest = applied(node, undo.change)
    ours = [taint for taint in rest.taints if OUR_TAINT.fullmatch(taint.value) and not _is_same(taint, kept_taint)]
    change = NodeChange(
        annotations={key: None for key in OURS if key in rest.annotations},
        taints=tuple(taint for taint in rest.taints if taint not in ours) if ours else None,
    )
    return and_then(undo, Undo(change))


def is_nothing(change: NodeChange) -> bool:
    """Whether a change changes nothing."""
    return not (change.labels or change.annotations or change.unschedulable is not None or change.taints is not None)


def _is_same(taint: Taint, other: Taint | None) -> bool:
    return other is not None and (taint.key, taint.value, taint.effect) == (other.key, other.value, other.effect)


def _without_foreign_record(node: NodeView) -> Undo:
    """A record of another Node object: what it says of values that are unmistakably ours is believed, and of the cordon only with proof."""
    record = foreign_record(node)
    if record is None:
        return Undo(NodeChange())
    if is_of_this_boot(record, node):
        return undo_record(record, node)
    undo = undo_record(replace(record, is_cordoned=False), node)
    if not (record.is_cordoned and node.unschedulable):
        return undo
    return Undo(undo.change, (*undo.left_alone, "the cordon stays: the record that tells of one is of another node, or of an earlier boot"))


def _without_rollout(node: NodeView, *, is_state_ours: bool) -> Undo:
    """The controller's half: record, own cordon, state, and what goes with the state."""
    label, text = node.labels.get(UPGRADE_STATE), node.annotations.get(ROLLOUT)
    left: list[str] = []
    labels: dict[str, str | None] = {}
    gone: dict[str, str | None] = {}
    progress, bad = _progress(text)
    if bad:
        left.append(f"the annotation {ROLLOUT} cannot be used ({bad}): take it off")
    elif text is not None:
        gone[ROLLOUT] = None
    if label is not None and state_of(label) is None:
        left.append(f"the label {UPGRADE_STATE} is {label!r}, which is no state: take it off, and run cleanup again")
    elif is_state_ours:
        labels = {UPGRADE_STATE: None} if label is not None else {}
        gone |= {key: None for key in OF_AN_UPGRADE if key in node.annotations}
    elif label is not None:
        left.append(f"the label {UPGRADE_STATE}={label} stays: it is the gpu-operator's")
    unschedulable = None
    if node.unschedulable and progress is not None and progress.is_cordoned:
        if progress.node != node.uid:
            left.append("the cordon stays: the controller's record that tells of one is of another node")
        elif node.annotations.get(KEEP_CORDON) == "true":
            left.append(f"the cordon stays: the annotation {KEEP_CORDON} asks for it")
        else:
            unschedulable = False
    held = taken_off(node, progress)
    return Undo(
        NodeChange(
            labels={**_there(held.labels, node.labels), **labels},
            annotations={**_there(held.annotations, node.annotations), **gone},
            unschedulable=unschedulable,
            taints=held.taints,
        ),
        (*left, *_changed(progress, node)),
    )


def _there(change: Mapping[str, str | None], now: Mapping[str, str]) -> dict[str, str | None]:
    """What of a change is none yet."""
    return {key: value for key, value in change.items() if now.get(key) != value}


def _changed(progress: Progress | None, node: NodeView) -> list[str]:
    """Labels that the controller had paused and somebody else has changed since."""
    paused = progress.paused if progress is not None else {}
    values = ((key, before, node.labels.get(key)) for key, before in paused.items())
    return [
        f"label {key} is {now!r} now, it was {before!r} before: somebody else changed it"
        for key, before, now in values
        if now not in (PAUSED, before)
    ]


def _progress(text: str | None) -> tuple[Progress | None, str]:
    try:
        return (None if text is None else decode_progress(text)), ""
    except BadProgress as error:
        return None, str(error)


def and_then(first: Undo, later: Undo) -> Undo:
    """Both as one; where they speak of the same the later one counts."""
    change = NodeChange(
        labels={**first.change.labels, **later.change.labels},
        annotations={**first.change.annotations, **later.change.annotations},
        unschedulable=first.change.unschedulable if later.change.unschedulable is None else later.change.unschedulable,
        taints=first.change.taints if later.change.taints is None else later.change.taints,
    )
    return Undo(change, tuple(dict.fromkeys((*first.left_alone, *later.left_alone))))


def applied(node: NodeView, change: NodeChange) -> NodeView:
    """The node with a change."""
    return replace(
        node,
        labels=_merged(node.labels, change.labels),
        annotations=_merged(node.annotations, change.annotations),
        unschedulable=node.unschedulable if change.unschedulable is None else change.unschedulable,
        taints=node.taints if change.taints is None else change.taints,
    )


def _merged(old: Mapping[str, str], new: Mapping[str, str | None]) -> dict[str, str]:
    return {key: value for key, value in {**old, **new}.items() if value is not None}
