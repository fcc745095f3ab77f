"""One replica of the controller from start to end: it waits for the Lease, leads, and ends when it has lost it."""

import asyncio
import logging
from collections.abc import Collection
from typing import Any, Final

from driver_manager.controller.conditions import Conditions
from driver_manager.controller.election import Election, LostLease
from driver_manager.controller.loop import Controller
from driver_manager.controller.settings import ControllerSettings
from driver_manager.controller.telling import Telling
from driver_manager.errors import ClusterError, TakenOver
from driver_manager.ports import Clock, Fleet
from driver_manager.together import first_error

logger = logging.getLogger(__name__)

MOST_PLACES: Final = 40
"""Of what still runs, told in one line of the log."""


class Replica:
    """What a replica is made of; `health` and `metrics` look at it while it runs."""

    def __init__(self, fleet: Fleet, clock: Clock, settings: ControllerSettings) -> None:
        self.settings = settings
        self.clock = clock
        self.election = Election(fleet, clock, settings)
        self.telling = Telling(fleet, clock)
        self.controller = Controller(fleet, clock, settings, self.election, self.telling)
        self.conditions = Conditions(fleet, clock, self.controller, self.election)

    async def run(self) -> None:
        """Leads when it is its turn; ends by being cancelled (then it resigns), or by an error.

        Raises:
            TakenOver: the Lease was lost: the process should end and begin anew, as nothing that it knows is certain.
            ClusterError: it may not do its work.
        """
        await self.election.win()
        leading = asyncio.ensure_future(self._lead())
        try:
            await asyncio.shield(leading)
        except asyncio.CancelledError:
            try:
                if not leading.done():
                    await self._finish()
            finally:  # a second cancel does not wait for anything
                leading.cancel()
                await asyncio.wait({leading})
            await self._resign()
            raise

    async def _lead(self) -> None:
        """All parts side by side; none of them ends but by an error."""
        works = {"lease": self.election.keep(), "events": self.telling.run(), "nodes": self.controller.lead()}
        works["conditions"] = self.conditions.run()
        parts = [asyncio.create_task(work, name=name) for name, work in works.items()]
        try:
            (ended, *_), _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await self._end(parts)
        error = ended.exception() or RuntimeError(f"{ended.get_name()} ended by itself")
        if isinstance(error, BaseExceptionGroup):
            error = first_error(error)
        if isinstance(error, LostLease):
            raise TakenOver(f"the Lease is lost: {error}", hint="another replica leads") from None
        raise error from None

    async def _end(self, parts: Collection[asyncio.Task[None]]) -> None:
        """Cancels all parts. One that does not end is named and left: a replica that leads no more has to make room for a new life."""
        for part in parts:
            part.cancel()
        ended, left = await asyncio.wait(parts, timeout=2 * self.settings.request_timeout)
        for part in ended:
            if not part.cancelled():
                part.exception()  # it was looked at
        if left:
            names = sorted(part.get_name() for part in left)
            at = sorted(_place(task) for task in asyncio.all_tasks() - {asyncio.current_task()})
            logger.error("parts of this replica do not end, and are left", extra={"parts": names, "at": at[:MOST_PLACES]})

    async def _finish(self) -> None:
        """Lets what is under way come to its answer: what the next leader then reads is all that this one did."""
        try:
            async with asyncio.timeout(2 * self.settings.request_timeout):
                await self.controller.finish()
        except TimeoutError:
            logger.warning("a write is still without an answer; the next leader finds out what came of it")

    async def _resign(self) -> None:
        try:
            await asyncio.shield(self.election.resign())
        except ClusterError as error:
            logger.warning("the Lease could not be given up: another replica leads when it is over", extra={"error": error.message})


def _place(task: asyncio.Task[Any]) -> str:
    """Where a task waits, coroutine by coroutine from the outside in."""
    places = list[str]()
    each: Any = task.get_coro()
    while (frame := getattr(each, "cr_frame", None)) is not None:
        places.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
        each = getattr(each, "cr_await", None)
    return " > ".join(places)
