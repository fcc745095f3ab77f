"""One replica of the controller from start to end: it waits for the Lease, leads, and ends when it has lost it."""

import asyncio
import logging

from driver_manager.controller.conditions import Conditions
from driver_manager.controller.election import Election, LostLease
from driver_manager.controller.loop import Controller
from driver_manager.controller.settings import ControllerSettings
from driver_manager.controller.telling import Telling
from driver_manager.errors import ClusterError, TakenOver
from driver_manager.ports import Clock, Fleet
from driver_manager.together import first_error

logger = logging.getLogger(__name__)


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
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.election.keep())
                tasks.create_task(self.telling.run())
                tasks.create_task(self.controller.lead())
                tasks.create_task(self.conditions.run())
        except BaseExceptionGroup as errors:
            error = first_error(errors)
            if isinstance(error, LostLease):
                raise TakenOver(f"the Lease is lost: {error}", hint="another replica leads") from None
            raise error from None

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
