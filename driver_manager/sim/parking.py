"""The admission policies of deploy/parking in the simulated server: switches, and parks as the server knows them a moment later."""

from typing import Final

from driver_manager.core.hold import parked_on
from driver_manager.core.parking import Tried
from driver_manager.sim.objects import Node, Pod
from driver_manager.sim.store import Store

GATE: Final = "gate"
DENY: Final = "deny"


class ParkingPolicies:
    """Which policies there are, and what they do to a new pod of a DaemonSet.

    Args:
        store: of the world.
    """

    def __init__(self, store: Store) -> None:
        self.ways: set[str] = set()
        """GATE, DENY, both or none: what is installed."""
        self.is_broken = False
        """Whether they are there and do nothing."""
        self._store = store
        self._known: dict[str, frozenset[str]] = {}
        store.node_listeners.append(self._node_changed)

    def _node_changed(self, node: Node) -> None:
        there = parked_on(node.view())
        if there != self._known.get(node.name, frozenset()) or node.name in self._known:
            self._store.timers.later(self._store.latencies.admission, lambda: self._take(node.name, there))

    def _take(self, name: str, there: frozenset[str]) -> None:
        self._known[name] = there

    def tried(self, owner: str, node_name: str) -> Tried:
        """What becomes of a pod of a DaemonSet (`namespace/name`) for a node."""
        if self.is_broken or not self.ways or owner not in self._known.get(node_name, frozenset()):
            return Tried.LET_IN
        return Tried.GATED if GATE in self.ways else Tried.DENIED


def is_schedulable(pod: Pod) -> bool:
    """Whether no gate keeps it from being bound."""
    return not pod.gates
