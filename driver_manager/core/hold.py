"""What keeps DaemonSets off a node, as a value, and how much of it a node shows. How it is put on and taken off is `core.parking`.

Two programs park on one node: the controller, whose parks stand in `.rollout`, and the agent, whose parks stand in `.record`. What the
admission policy reads is the union of both, computed anew in every guarded patch (decision 32): each takes back only its own.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from driver_manager.core.snapshot import NodeView, Taint
from driver_manager.names import PARKED, PAUSED, ROLLOUT, TAINT_VALUE_PREFIX

MAX_PARKED: Final = 16
"""DaemonSets that one program can keep off one node."""

ROLLOUT_RUN: Final = "rollout"
"""What stands in the value of the controller's taint in place of a run's id."""
OUR_TAINT_VALUE: Final = TAINT_VALUE_PREFIX + ROLLOUT_RUN
_REF: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?/[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class Hold:
    """What keeps DaemonSets off a node, or has to."""

    parked: frozenset[str] = frozenset()
    """`namespace/name` of DaemonSets."""
    paused: Mapping[str, str] = field(default_factory=dict)
    """Node label -> value before."""
    taint: Taint | None = None

    def __bool__(self) -> bool:
        return bool(self.parked or self.paused or self.taint)

    def missing_on(self, node: NodeView) -> "Hold":
        """What of it the node does not show yet as the controller's: what the agent alone parks goes when the agent ends."""
        paused = {key: value for key, value in self.paused.items() if node.labels.get(key) != PAUSED}
        is_tainted = self.taint is None or any((each.key, each.value) == (self.taint.key, self.taint.value) for each in node.taints)
        return Hold(self.parked - (parked_on(node) & parked_by_rollout(node)), paused, None if is_tainted else self.taint)


def parked_on(node: NodeView) -> frozenset[str]:
    """The DaemonSets that the admission policy keeps off a node. It asks for both, the label and the annotation."""
    return frozenset(read_owners(node.annotations.get(PARKED, ""))) if PARKED in node.labels else frozenset()


def read_owners(text: str) -> tuple[str, ...]:
    """The DaemonSets that an annotation names; what is no `namespace/name` is passed over, as the policy does."""
    return tuple(each for each in text.split(",") if is_ref(each))


def is_ref(text: str) -> bool:
    """Whether it can be the `namespace/name` of a DaemonSet."""
    return _REF.fullmatch(text) is not None


def parking(node: NodeView, owners: Collection[str]) -> tuple[dict[str, str | None], dict[str, str | None]]:
    """The label and the annotation that keep exactly these DaemonSets off a node."""
    label = (node.labels.get(PARKED) or "true") if owners else None  # its value means nothing, and a change of it wakes controllers
    return {PARKED: label}, {PARKED: ",".join(sorted(owners)) or None}


class _Held(msgspec.Struct, frozen=True):
    """As much of the controller's record as the agent has to know."""

    node: str = ""
    paused: dict[str, str] = {}
    parked: list[str] = []


_held = msgspec.json.Decoder(_Held)


def paused_by_rollout(node: NodeView) -> frozenset[str]:
    """Labels of a node that the controller has paused and will put back when it opens the node: no other program does it before."""
    return frozenset(_held_by_rollout(node).paused)


def parked_by_rollout(node: NodeView) -> frozenset[str]:
    """The DaemonSets that the controller keeps off a node, by its record."""
    return frozenset(_held_by_rollout(node).parked)


def _held_by_rollout(node: NodeView) -> _Held:
    try:
        found = _held.decode(node.annotations.get(ROLLOUT, "{}"))
    except (msgspec.MsgspecError, RecursionError):
        return _Held()
    return found if found.node == node.uid else _Held()
