"""Follows the pods of a node without end, over all that can happen to a watch.

The contract: whoever holds the list it began with and applies every change has the truth, a moment late. A gap that the
server can no longer fill (410) is closed by listing again: pods that are not there any more are reported gone, all
others as seen.
https://kubernetes.io/docs/reference/using-api/api-concepts/#efficient-detection-of-changes
"""

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Final

import msgspec

from driver_manager.core.snapshot import ChangeKind, PodChange, PodList, PodView
from driver_manager.errors import ClusterError, Forbidden, Unreachable
from driver_manager.kube import calls, views
from driver_manager.kube.refusals import Expired, event_refusal, unreadable
from driver_manager.ports import Clock

if TYPE_CHECKING:
    from driver_manager.kube.connection import Connection

logger = logging.getLogger(__name__)

WATCH_SECONDS: Final = 60
"""How long the server keeps one watch open. A connection that died without a word is noticed at the end of it."""
OVERTIME_SECONDS: Final = 10.0
"""How much longer we wait for that end."""
CALM_SECONDS: Final = 5.0
"""A watch that lived so long is followed by the next one at once."""
FIRST_PAUSE: Final = 0.5
LONGEST_PAUSE: Final = 5.0
LONGEST_RETRY_AFTER: Final = 30.0


class PodWatch:
    """The pods of one node, kept up to date."""

    def __init__(
        self,
        connection: "Connection",
        clock: Clock,
        node_name: str,
        since: PodList,
        relist: Callable[[], Awaitable[PodList]],
    ) -> None:
        self._connection = connection
        self._clock = clock
        self._node_name = node_name
        self._relist = relist
        self._known = {pod.uid: pod for pod in since.items}
        self._version = since.resource_version
        self._pause = 0.0

    async def changes(self) -> AsyncGenerator[PodChange, None]:
        """Gives the changes, without end.

        Raises (while iterating):
            Forbidden: it may not watch or list, or not any more. Every other error is tried again, after a pause.
        """
        has_gap = False
        while True:
            started, asked = self._clock.now(), 0.0
            try:
                if has_gap:
                    for change in self._catch_up(await self._relist()):
                        yield change
                    has_gap = False
                async with aclosing(self._one_watch()) as changes:
                    async for change in changes:
                        yield change
            except Forbidden:
                raise
            except Expired:
                has_gap = True
                logger.info("the watch on pods has a gap, listing again", extra={"node": self._node_name})
            except ClusterError as error:
                asked = error.retry_after if isinstance(error, Unreachable) else 0.0
                logger.warning("the watch on pods broke off", extra={"node": self._node_name, "error": error.message})
            await self._rest(self._clock.now() - started, asked)

    async def _rest(self, lived: float, asked: float) -> None:
        """Pauses before the next watch, longer each time while they end early: no hot loop, whatever the server does."""
        grown = min(2 * self._pause or FIRST_PAUSE, LONGEST_PAUSE)
        self._pause = 0.0 if lived >= CALM_SECONDS else grown
        pause = max(self._pause, min(asked, LONGEST_RETRY_AFTER))
        if pause:
            await self._clock.sleep(pause)

    async def _one_watch(self) -> AsyncGenerator[PodChange, None]:
        """Gives the changes of one watch, until it ends."""
        call = calls.watch_pods(self._node_name, self._version, WATCH_SECONDS)
        async with self._connection.lines(call, WATCH_SECONDS + OVERTIME_SECONDS) as lines, aclosing(lines):
            async for line in lines:
                if not line.strip():
                    continue
                try:
                    event = views.watch_event(line)
                except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                    raise unreadable(call, 200, line) from error
                if event.type == "ERROR":
                    raise event_refusal(call, event.error)
                self._version = event.resource_version or self._version
                if event.pod:
                    yield self._note(event.type, event.pod)

    def _note(self, event_type: str, pod: PodView) -> PodChange:
        if event_type == "DELETED":
            self._known.pop(pod.uid, None)
            return PodChange(ChangeKind.GONE, pod)
        self._known[pod.uid] = pod
        return PodChange(ChangeKind.SEEN, pod)

    def _catch_up(self, found: PodList) -> list[PodChange]:
        """What a new list says about the pods known so far."""
        there = {pod.uid: pod for pod in found.items}
        gone = [PodChange(ChangeKind.GONE, pod) for uid, pod in self._known.items() if uid not in there]
        self._known = there
        self._version = found.resource_version
        return gone + [PodChange(ChangeKind.SEEN, pod) for pod in found.items]
