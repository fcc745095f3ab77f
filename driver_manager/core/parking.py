"""What keeps DaemonSets off one node while its driver is away: parking, paused labels, a taint; how each is put on and taken back.

Parking touches no DaemonSet: the node's label and annotation `parked` are parameters of an admission policy (deploy/parking). All of it is
part of the guarded node patches that the roll-out makes anyway, and the record says what is ours: nothing else is taken back (R3). Where
the controller has marked the node the agent parks too (`core.record`): what stands in the annotation is the union of both.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from driver_manager.core.fleet import FleetPod, FleetSet, is_driver, is_validator
from driver_manager.core.hold import MAX_PARKED, OUR_TAINT_VALUE, ROLLOUT_RUN, Hold, parked_by_rollout, parked_on, parking
from driver_manager.core.keepoff import choose_keep_off
from driver_manager.core.optin import PARK_FIELD, asker, never_parked, opt_in_problem
from driver_manager.core.parking_term import leaves_parked_nodes
from driver_manager.core.record import parked_by_agent
from driver_manager.core.rollout_record import Progress
from driver_manager.core.situation import NodeChange
from driver_manager.core.snapshot import DaemonSetView, NodeView, Taint
from driver_manager.names import PARK, PARKED, PARKING, PARKING_ENFORCED, PAUSED
from driver_manager.operands import OPERANDS

MOST_PARKED_NODES: Final = 100
"""A pod's creation costs the API server 4 ms with none, 33 ms with 100 and 439 ms with 1,000 parked nodes (decision 44, measured)."""
NOT_MARKED: Final = (
    f"the node has no annotation {PARKING}={PARKING_ENFORCED}, by which the controller says that admission policies keep parked DaemonSets "
    "off (kubectl apply -f deploy/parking, and a controller that leads)"
)
TOO_MANY_PARKED: Final = f"more than {MAX_PARKED} DaemonSets would have to be parked on it"
OPERAND_APPS: Final = frozenset(operand.app for operand in OPERANDS if operand.app)


class Tried(StrEnum):
    """What becomes of a pod that a DaemonSet would have made for a node now."""

    LET_IN = "let-in"
    GATED = "gated"
    DENIED = "denied"


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What there is to keep a DaemonSet off a node."""

    taint: Taint | None = None
    """None: none that the driver and its operands tolerate."""
    parkable: frozenset[str] = frozenset()
    """`namespace/name` of DaemonSets that may be parked."""
    not_now: Mapping[str, str] = field(default_factory=dict)
    """DaemonSets that ask for it and cannot be, with the reason."""
    rolling: frozenset[str] = frozenset()
    """DaemonSets that may be parked once their rolling update is finished."""


def means_for(
    node: NodeView,
    *,
    opted_in: Collection[FleetSet],
    named: Collection[str] = (),
    operator_sets: Iterable[FleetSet],
    own_namespace: str,
    why_not: str,
    is_full: bool,
    unchanged: Mapping[str, str] | None = None,
) -> Means:
    """What there is for a node.

    Args:
        node: the node.
        opted_in: DaemonSets that ask to be parked, or that its policy names.
        named: the names in its policy, `namespace/name`.
        operator_sets: DaemonSets of the operator's namespace.
        own_namespace: the controller's.
        why_not: why no admission policy can be relied on; empty where one can.
        is_full: whether no other node may be parked now.
        unchanged: `namespace/name` -> why a DaemonSet's template does not have it leave parked nodes, where templates are changed for that.
    """
    unread = dict.fromkeys(named, f"is named by {PARK_FIELD} of the policy, and could not be read yet")
    parkable, not_now, there = set[str](), unread, parked_on(node)
    for each in opted_in:
        not_now.pop(each.ref, None)
        if problem := opt_in_problem(each, own_namespace):
            not_now[each.ref] = f"is not parked though {asker(each, named)}: {problem}"
        elif each.ref in there:
            parkable.add(each.ref)
        elif why_not and not leaves_parked_nodes(each):
            not_now[each.ref] = f"cannot be parked: {(unchanged or {}).get(each.ref, why_not)}"
        elif each.is_rolling:
            not_now[each.ref] = "is in a rolling update, which could not go on if it were parked: it is waited for"
        elif is_full and not there:
            not_now[each.ref] = f"cannot be parked now: {MOST_PARKED_NODES} nodes are, and more would slow the API server down"
        else:
            parkable.add(each.ref)
    return Means(taint=_taint(node, operator_sets), parkable=frozenset(parkable), not_now=not_now)


def agents_means(node: NodeView, found: Mapping[str, DaemonSetView | None]) -> Means:
    """What the agent may park on its own node. A taint it chooses by itself.

    Args:
        node: its node.
        found: the DaemonSets that nothing else keeps off, `namespace/name`; None: one that may not be read.
    """
    ours = parked_by_agent(node)
    there = ours | parked_by_rollout(node) & parked_on(node)  # what is parked already goes on
    parkable, rolling, not_now = set[str](), set[str](), dict[str, str]()
    for ref, daemon_set in sorted(found.items()):
        if ref in there:
            parkable.add(ref)
        elif daemon_set is None:
            not_now[ref] = "cannot be parked: the account may not get it, so whether it asks for that is not known"
        elif not daemon_set.asks_to_be_parked:
            continue
        elif problem := never_parked(daemon_set.pod_labels, daemon_set.namespace, ""):
            not_now[ref] = f"is not parked though its label {PARK} asks for it: {problem}"
        elif node.annotations.get(PARKING) != PARKING_ENFORCED:
            not_now[ref] = f"cannot be parked: {NOT_MARKED}"
        elif len(ours | parkable) >= MAX_PARKED:
            not_now[ref] = f"cannot be parked: {TOO_MANY_PARKED}"
        else:
            parkable.add(ref)
            if daemon_set.is_rolling:
                rolling.add(ref)
    return Means(parkable=frozenset(parkable), not_now=not_now, rolling=frozenset(rolling))


def _taint(node: NodeView, operator_sets: Iterable[FleetSet]) -> Taint | None:
    """A taint that driver, validators and operands tolerate, or they would never come back; one that is on already is kept."""
    needed = [each for each in operator_sets if each.fits(node.labels) and _is_operands(each.pod_labels)]
    held = next((each for each in node.taints if each.value == OUR_TAINT_VALUE), None)
    found = held
    if found is None and needed:
        chosen = [choose_keep_off(node, each.tolerations, ROLLOUT_RUN).taint for each in needed]
        found = next((each for each in chosen if each is not None and all(_tolerates(one, each) for one in needed)), None)
    return found


def _tolerates(daemon_set: FleetSet, taint: Taint) -> bool:
    return any(each.tolerates(taint) for each in daemon_set.tolerations)


def _is_operands(labels: Mapping[str, str]) -> bool:
    return is_driver(labels) or is_validator(labels) or labels.get("app") in OPERAND_APPS


# On the node --------------------------------------------------------------------------------------------------------


def is_parked_for(pod: FleetPod, node: NodeView | None) -> bool:
    """Whether a DaemonSet's pod is rightly kept off its node."""
    return node is not None and pod.owner_ref in parked_on(node)


def strangers_on(node: NodeView, progress: Progress | None) -> tuple[str, ...]:
    """What stands in the parked annotation and is none of ours, nor of the agent: it goes with the next write of ours."""
    ours = {*(progress.parked if progress else ()), *parked_by_agent(node)}
    listed = node.annotations.get(PARKED, "")
    return tuple(each for each in listed.split(",") if each and each not in ours)


def put_on(node: NodeView, progress: Progress | None, hold: Hold) -> tuple[NodeChange, dict[str, Any]]:
    """The change that puts a hold on a node, beside what is on it of ours, and the fields of the record that say so."""
    before = progress or Progress(node=node.uid)
    parked = sorted({*before.parked, *hold.parked})[:MAX_PARKED]
    paused = {**{key: value for key, value in hold.paused.items() if node.labels.get(key) != PAUSED}, **before.paused}
    labels: dict[str, str | None] = {key: PAUSED for key in hold.paused}
    ours = {each.key for each in node.taints if each.value == OUR_TAINT_VALUE}
    added = (hold.taint,) if hold.taint is not None and hold.taint.key not in ours else ()
    parks = parking(node, {*parked, *parked_by_agent(node)}) if parked else ({}, {})
    change = NodeChange(
        labels={**labels, **parks[0]},
        annotations=parks[1],
        taints=(*node.taints, *added) if added else None,
    )
    return change, {"parked": parked, "paused": paused, "taint": hold.taint.key if hold.taint is not None else before.taint}


def taken_off(node: NodeView, progress: Progress | None) -> NodeChange:
    """The change that takes all of ours off again. A label that has another value by now was changed by somebody else, and stays."""
    labels, annotations = parking(node, parked_by_agent(node) & parked_on(node))
    if progress is not None:
        labels |= {key: value for key, value in progress.paused.items() if node.labels.get(key) == PAUSED}
    left = tuple(each for each in node.taints if not (progress is not None and _is_ours(each, progress)))
    return NodeChange(labels=labels, annotations=annotations, taints=None if left == node.taints else left)


NOTHING_HELD: Final[Mapping[str, Any]] = {"parked": [], "paused": {}, "taint": ""}
"""The fields of a record after that."""


def is_held(progress: Progress | None) -> bool:
    """Whether a record says that something of ours keeps DaemonSets off."""
    return progress is not None and bool(progress.parked or progress.paused or progress.taint)


def is_recorded(progress: Progress | None, fields: Mapping[str, Any]) -> bool:
    """Whether a record has these fields of a hold already."""
    return progress is not None and all(getattr(progress, name) == value for name, value in fields.items())


def _is_ours(taint: Taint, progress: Progress) -> bool:
    return (taint.key, taint.value) == (progress.taint, OUR_TAINT_VALUE)


def adopted(node: NodeView) -> dict[str, Any]:
    """What a node in mid-flow whose record was lost shows of a hold: the fields of the new record.

    What a paused label was before is not known any more; it can only have been `true` (upstream's own guess).
    """
    tainted = next((each.key for each in node.taints if each.value == OUR_TAINT_VALUE), "")
    return {"parked": sorted(parked_on(node) - parked_by_agent(node))[:MAX_PARKED], "taint": tainted}


def is_left_over(node: NodeView, progress: Progress | None) -> bool:
    """Whether a node that is not in work is still parked, and not by its agent."""
    return (PARKED in node.labels or PARKED in node.annotations) and not is_held(progress) and not parked_by_agent(node)


# Neighbours ---------------------------------------------------------------------------------------------------------


def held_up(daemon_set: FleetSet, nodes: Iterable[NodeView]) -> int:
    """How many pods a DaemonSet lacks on nodes where it is not parked: after a refusal its controller pauses for all nodes alike."""
    parked = sum(1 for node in nodes if daemon_set.ref in parked_on(node) and daemon_set.fits(node.labels))
    return max(0, daemon_set.missing - parked)


def woken(node: NodeView) -> NodeChange:
    """A change of a node's labels that means nothing and has the DaemonSet controller look at once (measured)."""
    return NodeChange(labels={PARKED: "again" if node.labels.get(PARKED) == "true" else "true"})
