"""Finds out whether gpu-operator lives, again and again, and says when the role changes. What the role means is not known here."""

import asyncio
from collections.abc import Callable

from driver_manager.controller.settings import ControllerSettings
from driver_manager.core.role import Choice, Rival, Role, Standing, leads_alone, standing
from driver_manager.core.situation import Situation
from driver_manager.errors import ClusterError
from driver_manager.names import OPERATOR_LEASE
from driver_manager.ports import Clock, Fleet


class RoleWatch:
    """The role of the replica that holds our own Lease.

    Args:
        fleet: the API.
        clock: this replica's.
        settings: with what a person has set.
        on_change: hears of each new standing, and whether its role is another one or only the words are.
    """

    def __init__(self, fleet: Fleet, clock: Clock, settings: ControllerSettings, on_change: Callable[[Standing, bool], None]) -> None:
        self._fleet, self._clock, self._settings, self._on_change = fleet, clock, settings, on_change
        self.standing: Standing | None = None
        """None while it is not known."""

    @property
    def is_leading(self) -> bool:
        """Whether state labels may be written."""
        return self.standing is not None and self.standing.role is Role.LEAD

    def leads(self, situation: Situation) -> bool:
        """Whether that of this node may."""
        return self.is_leading or (self.standing is not None and leads_alone(situation))

    async def run(self) -> None:
        """Looks without end; where a person has set the role, once."""
        rival = Rival(began=self._clock.now())
        while True:
            if self._settings.role is Choice.AUTO:
                rival = await self._look(rival)
            found = standing(self._settings.role, rival, self._clock.now())
            if found is not None and found != self.standing:
                is_other_role = self.standing is None or found.role is not self.standing.role
                self.standing = found
                self._on_change(found, is_other_role)
            if self._settings.role is not Choice.AUTO:
                return
            await self._clock.sleep(self._settings.retry_period)

    async def _look(self, rival: Rival) -> Rival:
        try:
            async with asyncio.timeout(self._settings.request_timeout):
                lease = await self._fleet.lease(self._settings.operator_namespace, OPERATOR_LEASE)
        except TimeoutError:
            return rival.unread("the API server does not answer")
        except ClusterError as error:
            return rival.unread(error.message)
        return rival.seen(lease, self._clock.now())
