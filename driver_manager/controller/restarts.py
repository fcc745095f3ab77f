"""Deleting driver pods, by uid, once each; again only where one that should be on its way does not show it."""

import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final

from driver_manager.core.fleet import FleetPod
from driver_manager.errors import ClusterError, Conflict, NotFound
from driver_manager.ports import Clock, Fleet

logger = logging.getLogger(__name__)

DELETE_AGAIN: Final = 10.0
"""Seconds after which a driver pod that should be on its way, and does not show it, is deleted again."""
AFTER_ERROR: Final = 2.0
"""Seconds until it is tried again where there was no answer."""


class Restarts:
    """All of them.

    Args:
        fleet: the API.
        clock: time.
        may: whether the driver pod of a node may be deleted now.
        told: hears of each deletion.
        remind: has a node decided about at a time, in Unix seconds.
        request: has something about a node done beside the loop.
    """

    def __init__(
        self,
        fleet: Fleet,
        clock: Clock,
        *,
        may: Callable[[str], bool],
        told: Callable[[str, FleetPod], None],
        remind: Callable[[str, float], None],
        request: Callable[[Coroutine[Any, Any, None], str], None],
    ) -> None:
        self._fleet, self._clock = fleet, clock
        self._may, self._told, self._remind, self._request = may, told, remind, request
        self._asked: dict[str, tuple[str, float]] = {}
        """Node -> uid of the pod whose deletion was asked for, and when it is asked for again."""

    def restart(self, name: str, pod: FleetPod) -> None:
        """Has the driver pod of a node deleted, unless that was asked for a moment ago."""
        now = self._clock.epoch()
        uid, again_at = self._asked.get(name, ("", 0.0))
        if uid != pod.uid or again_at <= now:
            again_at = now + DELETE_AGAIN
            self._asked[name] = (pod.uid, again_at)
            self._request(self._delete(name, pod), name)
        self._remind(name, again_at)

    async def _delete(self, name: str, pod: FleetPod) -> None:
        try:
            if self._may(name):
                await self._fleet.delete_pod(pod.namespace, pod.name, pod.uid)
                self._told(name, pod)
        except (NotFound, Conflict):
            pass  # it is gone: the watch tells
        except ClusterError as error:
            logger.warning("a driver pod could not be deleted, trying again", extra={"node": name, "pod": pod.ref, "error": error.message})
            self._asked.pop(name, None)
            self._remind(name, self._clock.epoch() + AFTER_ERROR)

    def forget(self, name: str) -> None:
        """A node is gone."""
        self._asked.pop(name, None)
