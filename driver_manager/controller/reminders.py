"""When a node is decided about again though nothing has changed.

For each node the earliest moment alone: whoever decides about it then says when the next one is. So there are never more than nodes.
"""

import heapq
import math


class Reminders:
    """Node -> when, in Unix seconds."""

    def __init__(self) -> None:
        self._at: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []
        """Has entries that do not count any more, too."""

    def put(self, name: str, at: float) -> bool:
        """Reminds of a node, unless it is reminded of earlier; gives whether no other one is due before it."""
        if at >= self._at.get(name, math.inf):
            return False
        self._at[name] = at
        heapq.heappush(self._heap, (at, name))
        if len(self._heap) > 2 * len(self._at) + 100:
            self._heap = [(when, who) for who, when in self._at.items()]
            heapq.heapify(self._heap)
        return self.first == at

    def drop(self, name: str) -> None:
        """The node is gone."""
        self._at.pop(name, None)

    @property
    def first(self) -> float:
        """When the next one may be due; infinity where there is none."""
        return self._heap[0][0] if self._heap else math.inf

    def due(self, now: float) -> list[str]:
        """Names of nodes whose moment has come, once."""
        names = []
        while self._heap and self._heap[0][0] <= now:
            at, name = heapq.heappop(self._heap)
            if self._at.get(name) == at:
                del self._at[name]
                names.append(name)
        return names
