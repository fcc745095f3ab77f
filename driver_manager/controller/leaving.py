"""Nodes that lists and watches do not show any more: these select by label, so a node may be there and have lost that alone (decision 41).

So each is asked for. One that is gone is dropped; one that is upgraded is brought to its end first, read again and again meanwhile, as no
watch tells of it; any other is dropped too, and healed where something of ours is on it.
"""

import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final

from driver_manager.controller.cache import Cache
from driver_manager.core.fleet import Changed, FleetEvent, Kind, Listed
from driver_manager.core.selectors import Selector
from driver_manager.core.snapshot import ChangeKind, NodeView
from driver_manager.errors import ClusterError, NotFound
from driver_manager.ports import Clock, Fleet

logger = logging.getLogger(__name__)

LOOK_AGAIN: Final = 5.0
"""Seconds between two looks at a node that is upgraded, or of which the API server told nothing."""


class Leaving:
    """All of them.

    Args:
        fleet: the API.
        clock: time.
        cache: what is known.
        selector: which nodes are the fleet's.
        is_in_flow: whether a node is upgraded, or closed by us.
        stray: hears of each node that is there and none of the fleet's any more.
        mark: has nodes decided about.
        spawn: has something about a node run beside the loop.
    """

    def __init__(
        self,
        fleet: Fleet,
        clock: Clock,
        cache: Cache,
        selector: Selector,
        *,
        is_in_flow: Callable[[str], bool],
        stray: Callable[[NodeView], None],
        mark: Callable[[Iterable[str]], None],
        spawn: Callable[[Coroutine[Any, Any, None], str], object],
    ) -> None:
        self._fleet, self._clock, self._cache, self._selector = fleet, clock, cache, selector
        self._is_in_flow, self._stray, self._mark, self._spawn = is_in_flow, stray, mark, spawn
        self._looked_for: set[str] = set()

    def take_in(self, event: FleetEvent) -> FleetEvent | None:
        """An event of nodes as the cache is to have it: nobody is gone before that has been found out."""
        match event:
            case Changed(change=ChangeKind.GONE, item=NodeView() as node):
                self._look_for(node)
                return None
            case Listed(Kind.NODES, items):
                there = {item.name for item in items if isinstance(item, NodeView)}
                lost = [node for node in self._cache.nodes.values() if node.name not in there]
                for node in lost:
                    self._look_for(node)
                return Listed(Kind.NODES, (*items, *lost))
            case _:
                return event

    def _look_for(self, node: NodeView) -> None:
        if node.name not in self._looked_for:
            self._looked_for.add(node.name)
            self._spawn(self._find_out(node), node.name)

    async def _find_out(self, node: NodeView) -> None:
        try:
            while await self._stays(node):
                await self._clock.sleep(LOOK_AGAIN)
        finally:
            self._looked_for.discard(node.name)

    async def _stays(self, node: NodeView) -> bool:
        """Whether it has to be looked at again; else what has become of it is known, and in the cache."""
        name = node.name
        try:
            still = await self._fleet.node(name)
        except NotFound:
            self._mark(self._cache.drop_node(name, node.uid))
            return False
        except ClusterError as error:
            logger.warning("whether a node is gone is not known, asking again", extra={"node": name, "error": error.message})
            return True
        is_selected = self._selector.matches(still.labels)
        is_in_flow = still.uid == node.uid and self._is_in_flow(name)
        if is_selected or is_in_flow:
            self._mark(self._cache.put_node(still))
            return not is_selected
        self._stray(still)
        self._mark(self._cache.drop_node(name, node.uid))
        return False
