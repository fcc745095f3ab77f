"""The DaemonSets that ask to be parked, as they are now: those with the label, which one watch tells of, and those that policies name.

Each named one has a small watch of its own from when it is first asked for: a selector cannot say "one of these", and a watch of all
DaemonSets of a cluster tells of every pod of every one of them. A policy names few.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from typing import Any, Final

from driver_manager.controller.cache import Cache
from driver_manager.core.fleet import FleetSet
from driver_manager.core.hold import parked_on
from driver_manager.core.optin import asks_by_label
from driver_manager.ports import Fleet

FIRST_LOOK: Final = 10.0
"""Seconds for which a node that is looked at waits to hear of a named DaemonSet for the first time."""


class OptIns:
    """The leader's.

    Args:
        fleet: of the controller.
        cache: what is known of the fleet.
        spawn: has something run beside the loop.
        on_change: called when a named one has changed.
    """

    def __init__(
        self,
        fleet: Fleet,
        cache: Cache,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        on_change: Callable[[], None],
    ) -> None:
        self._fleet, self._cache, self._spawn, self._on_change = fleet, cache, spawn, on_change
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._heard: dict[str, asyncio.Event] = {}
        self._there: dict[str, FleetSet] = {}
        self._named: frozenset[str] = frozenset()
        """In policies now."""
        self._asked: Counter[str] = Counter()
        """How many wait to hear of a name, which a policy of before may have named."""

    def all(self) -> list[FleetSet]:
        """Everyone that asks, or that some policy names or named when a node was parked for it, by `namespace/name`."""
        named = {each.uid: each for each in self._there.values()}
        return sorted({**named, **self._cache.parkable}.values(), key=lambda each: each.ref)

    def asking(self) -> list[FleetSet]:
        """Everyone that asks, or that some policy names now."""
        return [each for each in self.all() if each.ref in self._named or asks_by_label(each)]

    @property
    def named(self) -> Collection[str]:
        """Those that are named in policies, `namespace/name`."""
        return self._named

    @property
    def names(self) -> Collection[str]:
        """Those that are watched by name, `namespace/name`."""
        return self._watches

    @property
    def missing(self) -> list[str]:
        """Names in policies that no DaemonSet has."""
        return sorted(ref for ref, heard in self._heard.items() if heard.is_set() and ref not in self._there and ref in self._named)

    async def of(self, named: Collection[str]) -> list[FleetSet]:
        """Those that ask by themselves, and those of these names; one of which nothing was heard in time is not among them."""
        self._asked.update(named)
        try:
            self._follow(named)
            heard = [self._heard[ref] for ref in named]
            with suppress(TimeoutError):
                async with asyncio.timeout(FIRST_LOOK):
                    for each in heard:
                        await each.wait()
        finally:
            self._asked.subtract(named)
        return [each for each in self.all() if each.ref in named or asks_by_label(each)]

    def keep(self, named: Collection[str]) -> None:
        """These are in policies now."""
        self._named = frozenset(named)
        self.let_go()
        self._follow(named)

    def let_go(self) -> None:
        """Of those that no policy names any more and no node is parked for any more."""
        unnamed = [ref for ref in self._watches if ref not in self._named and not self._asked[ref]]
        parked = {ref for node in self._cache.nodes.values() for ref in parked_on(node)} if unnamed else set()
        for ref in [ref for ref in unnamed if ref not in parked]:
            self._watches.pop(ref).cancel()
            self._there.pop(ref, None)
            del self._heard[ref]

    def _follow(self, named: Collection[str]) -> None:
        for ref in named:
            if ref not in self._watches:
                self._heard[ref] = asyncio.Event()
                self._watches[ref] = self._spawn(self._watch(ref, self._heard[ref]))

    async def _watch(self, ref: str, heard: asyncio.Event) -> None:
        async for found in self._fleet.follow_set(ref):
            if found is None:
                self._there.pop(ref, None)
            else:
                self._there[ref] = found
            heard.set()
            self._on_change()
