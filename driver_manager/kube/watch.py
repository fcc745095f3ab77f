"""Follows a collection without end, over all that can happen to a list and a watch: one machine for every kind.

The contract: whoever takes each list as all that there is, and applies every change after it, has the truth, a moment
late. A gap that the server can no longer fill (410) is closed by listing again.
https://kubernetes.io/docs/reference/using-api/api-concepts/#efficient-detection-of-changes

Lists are made without a resourceVersion: their answer is never older than the request, so that a controller that has just
become the leader does not act on what another has already changed. All pages of a list are of one version, and the
watch goes on from it.
https://kubernetes.io/docs/reference/using-api/api-concepts/#the-resourceversion-parameter
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import msgspec

from driver_manager.core.snapshot import ChangeKind, PodChange, PodList, PodView
from driver_manager.errors import ClusterError, Forbidden, Unreachable
from driver_manager.kube.calls import Call
from driver_manager.kube.refusals import Expired, Unserved, event_refusal, unreadable
from driver_manager.kube.wire import WatchEvent
from driver_manager.ports import Clock

if TYPE_CHECKING:
    from driver_manager.kube.connection import Connection

logger = logging.getLogger(__name__)

Item = TypeVar("Item")

WATCH_SECONDS: Final = 60
"""How long the server keeps one watch open. A connection that died without a word is noticed at the end of it."""
OVERTIME_SECONDS: Final = 10.0
"""How much longer we wait for that end."""
CALM_SECONDS: Final = 5.0
"""A watch that lived so long is followed by the next one at once."""
FIRST_PAUSE: Final = 0.5
LONGEST_PAUSE: Final = 5.0
LONGEST_RETRY_AFTER: Final = 30.0
WAITING_EVENTS: Final = 100
"""Events of joined watches that wait to be taken: taken together, they cost one turn of the event loop and not three each."""
LOOK_AGAIN_SECONDS: Final = 60.0
"""How often a kind that is not served is looked for again."""


@dataclass(frozen=True, slots=True)
class Listing(Generic[Item]):
    """All of a collection, as it was at a version."""

    items: tuple[Item, ...]
    resource_version: str = ""


@dataclass(frozen=True, slots=True)
class Change(Generic[Item]):
    """One object is there, or is gone."""

    kind: ChangeKind
    item: Item


@dataclass(frozen=True, slots=True)
class Absent:
    """The API does not serve the kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source(Generic[Item]):
    """A collection, as its requests and answers are made and read."""

    about: Mapping[str, str]
    """What it is, for the log."""
    list: Callable[[], Awaitable[Listing[Item]]]
    watch: Callable[[str, int], Call]
    """The watch from a version on, for some seconds."""
    event: Callable[[bytes], WatchEvent[Item]]
    is_served: Callable[[], Awaitable[bool]] | None = None
    """Asks the API server whether it has the kind: a proxy's 404 is not believed. Only for kinds that may be missing."""


class Watch(Generic[Item]):
    """A collection, kept up to date."""

    def __init__(self, connection: "Connection", clock: Clock, source: Source[Item], since: str = "") -> None:
        self._connection = connection
        self._clock = clock
        self._source = source
        self._version = since
        """Where the next watch begins; empty: only a list can tell."""
        self._pause = 0.0
        self._is_absent = False

    async def events(self) -> AsyncGenerator[Listing[Item] | Change[Item] | Absent, None]:
        """Gives lists and changes, without end; first a list, unless it goes on from a version.

        Raises (while iterating):
            Forbidden: it may not watch or list, or not any more. Every other error is tried again, after a pause.
        """
        while True:
            started, asked = self._clock.now(), 0.0
            try:
                if not self._version:
                    yield await self._listing()
                async with aclosing(self._one_watch()) as changes:
                    async for change in changes:
                        yield change
            except Forbidden:
                raise
            except Expired:
                self._version = ""
                logger.info("the watch has a gap, listing again", extra={**self._source.about})
            except Unserved as error:
                self._version = ""
                was_absent, self._is_absent = self._is_absent, await self._is_missing(error)
                if self._is_absent:
                    if not was_absent:
                        yield Absent()
                    asked = LOOK_AGAIN_SECONDS
            except ClusterError as error:
                asked = min(error.retry_after, LONGEST_RETRY_AFTER) if isinstance(error, Unreachable) else 0.0
                self._tell(error)
            await self._rest(self._clock.now() - started, asked)

    async def _listing(self) -> Listing[Item]:
        """All that there is. Whoever takes it is not to be kept from letting go of it while the watch goes on."""
        listing = await self._source.list()
        self._version, self._is_absent = listing.resource_version, False
        return listing

    async def _is_missing(self, error: Unserved) -> bool:
        """Whether the API server itself says that it does not have the kind."""
        try:
            if self._source.is_served is None or await self._source.is_served():
                self._tell(error)
                return False
        except Forbidden:
            return True  # who may not ask has to believe
        except ClusterError as unanswered:
            self._tell(unanswered)
            return self._is_absent
        return True

    def _tell(self, error: ClusterError) -> None:
        logger.warning("the watch broke off", extra={**self._source.about, "error": error.message})

    async def _rest(self, lived: float, asked: float) -> None:
        """Pauses before the next watch, longer each time while they end early: no hot loop, whatever the server does."""
        grown = min(2 * self._pause or FIRST_PAUSE, LONGEST_PAUSE)
        self._pause = 0.0 if lived >= CALM_SECONDS else grown
        pause = max(self._pause, asked)
        if pause:
            await self._clock.sleep(pause)

    async def _one_watch(self) -> AsyncGenerator[Change[Item], None]:
        """Gives the changes of one watch, until it ends."""
        call = self._source.watch(self._version, WATCH_SECONDS)
        async with self._connection.lines(call, WATCH_SECONDS + OVERTIME_SECONDS) as lines, aclosing(lines):
            async for line in lines:
                if not line.strip():
                    continue
                try:
                    event = self._source.event(line)
                except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                    raise unreadable(call, 200, line) from error
                if event.type == "ERROR":
                    raise event_refusal(call, event.error)
                self._version = event.resource_version or self._version
                if event.item is not None:
                    yield Change(ChangeKind.GONE if event.type == "DELETED" else ChangeKind.SEEN, event.item)


async def pod_changes(watch: Watch[PodView], since: PodList) -> AsyncGenerator[PodChange, None]:
    """The events of a watch as changes alone: of a new list, pods that are not there any more are gone, all others are seen."""
    known = {pod.uid: pod for pod in since.items}
    async with aclosing(watch.events()) as events:
        async for event in events:
            match event:
                case Listing(items):
                    there = {pod.uid: pod for pod in items}
                    gone = [pod for uid, pod in known.items() if uid not in there]
                    known = there
                    for pod in gone:
                        yield PodChange(ChangeKind.GONE, pod)
                    for pod in items:
                        yield PodChange(ChangeKind.SEEN, pod)
                case Change(kind, pod):
                    if kind is ChangeKind.GONE:
                        known.pop(pod.uid, None)
                    else:
                        known[pod.uid] = pod
                    yield PodChange(kind, pod)


@dataclass(slots=True)
class _Part(Generic[Item]):
    """What one of several watches has said so far."""

    items: dict[Hashable, Item] = field(default_factory=dict)
    is_listed: bool = False


async def joined(
    watches: Sequence[Watch[Item]], key: Callable[[Item], Hashable]
) -> AsyncGenerator[Listing[Item] | Change[Item] | Absent, None]:
    """Several watches as one, for a choice that one selector cannot say: an object belongs to one of them at a time.

    A list of one of them becomes a list of all. An object that moves from one to another is not gone.
    """
    parts = [_Part[Item]() for _ in watches]
    told: asyncio.Queue[tuple[int, Listing[Item] | Change[Item] | Absent | Exception]] = asyncio.Queue(WAITING_EVENTS)

    async def follow(number: int, watch: Watch[Item]) -> None:
        try:
            async with aclosing(watch.events()) as events:
                async for event in events:
                    await told.put((number, event))
        except Exception as error:
            await told.put((number, error))

    following = [asyncio.create_task(follow(number, watch)) for number, watch in enumerate(watches)]
    try:
        while True:
            number, event = await told.get()
            if isinstance(event, Exception):
                raise event
            if (joint := _join(parts, number, event, key)) is not None:
                yield joint
            del event
    finally:
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)


def _join(
    parts: Sequence[_Part[Item]], number: int, event: Listing[Item] | Change[Item] | Absent, key: Callable[[Item], Hashable]
) -> Listing[Item] | Change[Item] | Absent | None:
    """What an event of one of the watches means for all of them; None: nothing, or nothing yet."""
    part, others = parts[number], [part for index, part in enumerate(parts) if index != number]
    match event:
        case Absent():
            part.is_listed = False
            return event
        case Listing(items):
            part.items, part.is_listed = {key(item): item for item in items}, True
            for other in others:
                for item in part.items:
                    other.items.pop(item, None)
            if all(each.is_listed for each in parts):
                return Listing(tuple(item for each in parts for item in each.items.values()))
            return None
        case Change(ChangeKind.GONE, item):
            part.items.pop(key(item), None)
            is_elsewhere = any(key(item) in other.items for other in others)
        case Change(_, item):
            part.items[key(item)] = item
            for other in others:
                other.items.pop(key(item), None)
            is_elsewhere = False
    return event if all(each.is_listed for each in parts) and not is_elsewhere else None
