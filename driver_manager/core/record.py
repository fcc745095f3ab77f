"""The record on the node: what this program changed there, with the original values, in one annotation.

It is written in the same patch that makes the changes, and goes in the same patch that takes them back. What it does not hold is not ours
(R3). A value that somebody else changed meanwhile is theirs: it is left alone and reported.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final

from driver_manager.core.hold import MAX_PARKED, parked_by_rollout, parked_on, parking, read_owners
from driver_manager.core.labels import is_label_value
from driver_manager.core.snapshot import Identity, NodeView, Taint
from driver_manager.errors import InvariantBroken
from driver_manager.names import KEEP_CORDON, PARKED, PAUSED, RECORD, TAINT_VALUE_PREFIX

VERSION: Final = 1
MAX_BYTES: Final = 16 * 1024
UNIT: Final = re.compile(r"[A-Za-z0-9:_.@\\][-A-Za-z0-9:_.@\\]{0,246}\.service")
"""What may be a unit's name: https://www.freedesktop.org/software/systemd/man/systemd.unit.html"""


class Phase(StrEnum):
    """How far the run that wrote the record had come."""

    PAUSED = "paused"
    """The node is paused; the driver is still whole."""
    UNLOADING = "unloading"
    """Something of the driver may be gone, so what the state file says may be untrue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What one run changed on one node."""

    run: str
    node_uid: str
    boot_id: str
    started: str
    """Time of day by this machine's clock; shown to people, never compared."""
    phase: Phase = Phase.PAUSED
    pod: Identity = field(default_factory=Identity)
    labels: Mapping[str, str] = field(default_factory=dict)
    """Label -> value before it was paused."""
    is_cordoned: bool = False
    """Whether this run made the node unschedulable."""
    taint: Taint | None = None
    services: tuple[str, ...] = ()
    """Units of the host that were active and are stopped, or are going to be: written down before that (decision 8)."""
    parked: tuple[str, ...] = ()
    """`namespace/name` of DaemonSets that this run keeps off the node."""
    let_in: tuple[str, ...] = ()
    """Those that are kept off no more, and of which a pod may still wait with the policy's gate until somebody evicts it (decision 44)."""


class BadRecord(ValueError):
    """The annotation is there and cannot be read."""


def encode(record: Record) -> str:
    """The annotation's value.

    Raises:
        InvariantBroken: it would be larger than MAX_BYTES.
    """
    body: dict[str, Any] = {
        "version": VERSION,
        "run": record.run,
        "nodeUID": record.node_uid,
        "bootID": record.boot_id,
        "started": record.started,
        "phase": str(record.phase),
        "labels": dict(sorted(record.labels.items())),
        "cordoned": record.is_cordoned,
    }
    if record.pod.pod_uid:
        body["pod"] = {"namespace": record.pod.namespace, "name": record.pod.pod_name, "uid": record.pod.pod_uid}
    if record.taint is not None:
        body["taint"] = {"key": record.taint.key, "value": record.taint.value, "effect": record.taint.effect}
    if record.services:
        body["services"] = list(record.services)
    if record.parked:
        body["parked"] = list(record.parked)
    if record.let_in:
        body["letIn"] = list(record.let_in)
    text = json.dumps(body, separators=(",", ":"))
    if len(text.encode()) > MAX_BYTES:
        raise InvariantBroken(f"the record of the node would be {len(text.encode())} bytes, more than {MAX_BYTES}")
    return text


def decode(text: str) -> Record:
    """Reads an annotation's value.

    Raises:
        BadRecord: with what is wrong.
    """
    if len(text) > MAX_BYTES:
        raise BadRecord(f"it is {len(text)} characters long, more than {MAX_BYTES}")
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRecord(f"it is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRecord("it is not a JSON object")
    if body.get("version") != VERSION:
        raise BadRecord(f"its version is {body.get('version')!r}, and this program reads {VERSION}")
    pod = _optional(body, "pod", dict) or {}
    taint = _optional(body, "taint", dict)
    labels = _required(body, "labels", dict)
    if not all(isinstance(value, str) and is_label_value(value) and PAUSED not in value for value in labels.values()):
        raise BadRecord("its labels are not all values that a label can have had before it was paused")
    services = _optional(body, "services", list) or []
    if not all(isinstance(unit, str) and UNIT.fullmatch(unit) for unit in services):
        raise BadRecord(f"its services are {services!r}"[:200])
    phase = _required(body, "phase", str)
    if phase not in list(Phase):
        raise BadRecord(f"its phase is {phase!r}")
    return Record(
        run=_required(body, "run", str),
        node_uid=_required(body, "nodeUID", str),
        boot_id=_required(body, "bootID", str),
        started=_required(body, "started", str),
        phase=Phase(phase),
        pod=Identity(*(_required(pod, key, str) for key in ("namespace", "name", "uid"))) if pod else Identity(),
        labels=labels,
        is_cordoned=_required(body, "cordoned", bool),
        taint=Taint(*(_required(taint, key, str) for key in ("key", "value", "effect"))) if taint else None,
        services=tuple(services),
        parked=_owners(body, "parked"),
        let_in=_owners(body, "letIn"),
    )


def _owners(body: Mapping[str, Any], key: str) -> tuple[str, ...]:
    found = _optional(body, key, list) or []
    if len(found) > 2 * MAX_PARKED or not all(isinstance(each, str) and read_owners(each) == (each,) for each in found):
        raise BadRecord(f"its {key} is {found!r}"[:200])
    return tuple(found)


def _required(body: Mapping[str, Any], key: str, kind: type[Any]) -> Any:
    value = body.get(key)
    if not isinstance(value, kind):
        raise BadRecord(f"its {key} is {value!r}")
    return value


def _optional(body: Mapping[str, Any], key: str, kind: type[Any]) -> Any:
    return _required(body, key, kind) if body.get(key) is not None else None


@dataclass(frozen=True, slots=True)
class Found:
    """The record that a node carries, if it is one of this node."""

    record: Record | None = None
    complaint: str = ""
    """Why the annotation that is there does not count."""
    is_unreadable: bool = False


def find_record(node: NodeView) -> Found:
    """The record on a node. One that was copied from another node, or from an earlier node of that name, is none."""
    text = node.annotations.get(RECORD)
    if text is None:
        return Found()
    try:
        record = decode(text)
    except BadRecord as error:
        return Found(None, f"the annotation {RECORD} of node {node.name} cannot be read: {error}", is_unreadable=True)
    if record.node_uid != node.uid:
        return Found(None, f"the annotation {RECORD} of node {node.name} belongs to another node (uid {record.node_uid})")
    return Found(record)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeChange:
    """What to write on a node; shaped like ports.NodePatch, without name and version."""

    labels: Mapping[str, str | None] = field(default_factory=dict)
    annotations: Mapping[str, str | None] = field(default_factory=dict)
    unschedulable: bool | None = None
    taints: tuple[Taint, ...] | None = None


@dataclass(frozen=True, slots=True)
class Undo:
    """How a record is taken back, and what is not, with the reason."""

    change: NodeChange
    left_alone: tuple[str, ...] = ()


def apply_record(record: Record, node: NodeView, *, labels: Mapping[str, str] | None = None, former: Taint | None = None) -> NodeChange:
    """What makes the node as the record says it is: paused, cordoned, tainted, with the record on it.

    Args:
        record: the record to write.
        node: the node as it is now.
        labels: the labels to pause, of those in the record; all by default.
        former: the taint of an earlier run, which this one drops.
    """
    paused = record.labels if labels is None else labels
    park, owners = parking(node, {*record.parked, *parked_by_rollout(node)}) if set(record.parked) - parked_on(node) else ({}, {})
    return NodeChange(
        labels={**{key: PAUSED for key in paused if node.labels.get(key) != PAUSED}, **park},
        annotations={**owners, RECORD: encode(record)},
        unschedulable=True if record.is_cordoned and not node.unschedulable else None,
        taints=_with_taint(node, record.taint, former),
    )


def _with_taint(node: NodeView, taint: Taint | None, former: Taint | None = None) -> tuple[Taint, ...] | None:
    """The node's taints with ours in place of one of an earlier run of ours; None where nothing changes or the key is not free.

    A node holds one taint for each key and effect, and one that is not ours is never replaced.
    """
    if former is not None:
        kept = tuple(t for t in node.taints if (t.key, t.value, t.effect) != (former.key, former.value, former.effect))
        if len(kept) < len(node.taints):
            return _with_taint(replace(node, taints=kept), taint) or kept
    if taint is None:
        return None
    same = [t for t in node.taints if (t.key, t.effect) == (taint.key, taint.effect)]
    if any(t.value == taint.value or not t.value.startswith(TAINT_VALUE_PREFIX) for t in same):
        return None
    return (*(t for t in node.taints if t not in same), taint)


def undo_record(record: Record, node: NodeView) -> Undo:
    """What puts the node back, each value only where it is still what this program wrote."""
    left = []
    labels: dict[str, str | None] = {}
    for key, original in record.labels.items():
        value = node.labels.get(key)
        if value == PAUSED:
            labels[key] = original
        elif value != original:
            left.append(f"label {key} is {_shown(value)} now, it was {original!r} before: somebody else changed it")
    unschedulable = None
    if record.is_cordoned and node.unschedulable:
        if node.annotations.get(KEEP_CORDON) == "true":
            left.append(f"the cordon stays: the annotation {KEEP_CORDON} asks for it")
        else:
            unschedulable = False
    taints = None
    if record.taint is not None:
        ours = (record.taint.key, record.taint.value, record.taint.effect)
        others = tuple(t for t in node.taints if (t.key, t.value, t.effect) != ours)
        taints = others if len(others) < len(node.taints) else None
    annotations: dict[str, str | None] = {RECORD: None}
    if record.parked:
        park, owners = parking(node, parked_by_rollout(node) & parked_on(node))
        labels |= {key: value for key, value in park.items() if node.labels.get(key) != value}
        annotations |= {key: value for key, value in owners.items() if node.annotations.get(key) != value}
    change = NodeChange(labels=labels, annotations=annotations, unschedulable=unschedulable, taints=taints)
    return Undo(change, tuple(left))


def let_in_next(record: Record) -> Record | None:
    """What stays of a record while the DaemonSets that were kept off are let in; None where nobody was.

    It goes when no pod of theirs waits any more: un-parked alone a pod with the gate would wait for ever (decision 44, measured).
    """
    owners = tuple(dict.fromkeys((*record.parked, *record.let_in)))
    return replace(record, labels={}, is_cordoned=False, taint=None, services=(), parked=(), let_in=owners) if owners else None


def parked_by_agent(node: NodeView) -> frozenset[str]:
    """The DaemonSets that the agent keeps off a node, by its record."""
    record = find_record(node).record
    return frozenset(record.parked) if record is not None else frozenset()


def _shown(value: str | None) -> str:
    return "gone" if value is None else repr(value)


def taken_off(record: Record, node: NodeView, *, paused: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """What this run put on the node and somebody took off since, in words.

    Args:
        record: of this run.
        node: as it is now.
        paused: labels paused so far; all of the record by default.
    """
    wanted = record.labels if paused is None else paused
    gone = [f"label {key}" for key in wanted if node.labels.get(key) != PAUSED]
    if record.is_cordoned and not node.unschedulable:
        gone.append("the cordon")
    if record.taint is not None and _with_taint(node, record.taint) is not None:
        gone.append(f"the taint {record.taint.key}")
    gone += [f"the park of {owner}" for owner in sorted(set(record.parked) - parked_on(node))]
    return tuple(gone)


def leftovers(record: Record, node: NodeView) -> tuple[str, ...]:
    """What of the record is still on the node after it was taken back; R4 is held by this being empty."""
    undo = undo_record(record, node)
    still = [f"label {key}" for key in undo.change.labels if key in record.labels]
    still += ["the cordon"] if undo.change.unschedulable is False else []
    still += ["the taint"] if undo.change.taints is not None else []
    still += [f"the park of {owner}" for owner in sorted(_still_parked(record, node))]
    still += ["the record"] if (found := find_record(node).record) is not None and found.run == record.run else []
    return tuple(still)


def _still_parked(record: Record, node: NodeView) -> set[str]:
    listed = read_owners(node.annotations.get(PARKED, ""))
    return {*record.parked}.intersection(listed) - parked_by_rollout(node)


def merged(old: Record | None, new: Record) -> Record:
    """A new run's record that keeps what an earlier run of the same boot had changed (decision 7)."""
    if old is None:
        return new
    return replace(
        new,
        labels={**old.labels, **new.labels},
        is_cordoned=old.is_cordoned or new.is_cordoned,
        taint=new.taint,
        services=tuple(dict.fromkeys((*old.services, *new.services))),
        parked=tuple(dict.fromkeys((*old.parked, *new.parked))),
        let_in=old.let_in,
    )


def rebased(record: Record, node: NodeView, adopted: Record | None) -> Record:
    """The record to write on a node that may have changed since the plan was made.

    What somebody paused, cordoned or switched off meanwhile is theirs: only what is still to be changed becomes ours.

    Args:
        record: as planned.
        node: as it is now.
        adopted: the record of the earlier run that this one takes over.
    """
    held = adopted.labels if adopted is not None else {}
    labels = {}
    for key, original in record.labels.items():
        value = node.labels.get(key)
        if key in held or value == original or (value is not None and PAUSED in value):
            labels[key] = original
    is_held = adopted is not None and adopted.is_cordoned
    return replace(record, labels=labels, is_cordoned=is_held or (record.is_cordoned and not node.unschedulable))
