"""The look at a node's pods before its start: nobody is evicted, and nothing is written, where one of them may not go (R5)."""

import logging
from collections.abc import Callable

from driver_manager.config import Settings
from driver_manager.controller.cache import Cache
from driver_manager.controller.parking import Parking
from driver_manager.controller.telling import Telling
from driver_manager.controller.work import Handlers, what_to_free
from driver_manager.core.disruption import never_evicted
from driver_manager.core.rollout import may_only_restart
from driver_manager.core.rollout_record import MAX_DEVICES, MAX_PAUSED, TOO_MANY_DEVICES, TOO_MANY_PAUSED
from driver_manager.core.situation import Situation, Work
from driver_manager.core.snapshot import NodeView
from driver_manager.errors import ClusterError
from driver_manager.ports import Fleet

logger = logging.getLogger(__name__)


class Looks:
    """All of them.

    Args:
        fleet: the API.
        handlers: of runtime classes.
        settings: what uses the driver.
        cache: what is known.
        parking: what keeps DaemonSets off.
        telling: hears of errors of the program.
        situation: what a decision about a node is made from.
    """

    def __init__(
        self,
        fleet: Fleet,
        handlers: Handlers,
        settings: Settings,
        cache: Cache,
        parking: Parking,
        telling: Telling,
        situation: Callable[[NodeView], Situation],
    ) -> None:
        self._fleet, self._handlers, self._settings, self._cache = fleet, handlers, settings, cache
        self._parking, self._telling, self._situation = parking, telling, situation

    async def at(self, name: str) -> str | None:
        """Why a node cannot be begun; None where nothing stands in the way. An error of the program keeps no other from its start (R9)."""
        try:
            return await self._look(name)
        except Exception:
            logger.exception("looking at a node broke off: a bug", extra={"node": name})
            self._telling.bug(name)
            return "looking at its pods ended in an error of this program, which its log tells: report it"

    async def _look(self, name: str) -> str | None:
        """Why a node cannot be begun; None where nothing stands in the way."""
        node = self._cache.nodes.get(name)
        if node is None:
            return "it is gone"
        situation = self._situation(node)
        self._parking.holds.pop(name, None)
        if len(situation.devices) > MAX_DEVICES:
            return TOO_MANY_DEVICES
        if situation.policy is None or (may_only_restart(situation) and not situation.has_maintenance):
            return None
        try:
            pods = await self._fleet.pods_on(name)
            policy, settings = situation.policy, self._settings
            means = await self._parking.means(node, policy)
            todo = await what_to_free(self._fleet, self._handlers, settings, node, pods.items, policy, Work.FREE, means)
            never = never_evicted(todo.evict, self._cache.budgets(pod.namespace for pod in todo.evict))
        except ClusterError as error:
            return f"its pods cannot be looked at: {error.message}"
        if len(todo.hold.paused) > MAX_PAUSED:
            return TOO_MANY_PAUSED
        if why := self._parking.plan(name, todo.hold, has_maintenance=situation.has_maintenance):
            return why
        refusals = () if situation.policy.drain.enable else todo.refusals  # the drain has other rules, and comes after
        return "; ".join((*refusals, *never)) or None
