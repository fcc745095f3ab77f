"""Keeps our conditions on the custom resources up to date: written only where they change, and no more often than now and then."""

import logging
from typing import Final

from driver_manager.controller.election import Election
from driver_manager.controller.loop import Controller
from driver_manager.core.conditions import Condition, reasons_by_group, wanted_conditions
from driver_manager.core.fleet import PolicySource
from driver_manager.errors import ClusterError
from driver_manager.ports import Clock, Fleet

logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 5.0
"""Between two looks."""
REWORD_SECONDS: Final = 60.0
"""Between two writes of one condition that change its words alone: the numbers of a roll-out change with every node."""
AGAIN_SECONDS: Final = 30.0
"""After a write that failed."""


class Conditions:
    """Writes them, one after the other."""

    def __init__(self, fleet: Fleet, clock: Clock, controller: Controller, election: Election) -> None:
        self._fleet, self._clock, self._controller, self._election = fleet, clock, controller, election
        self._said: dict[tuple[str, str], tuple[Condition, float]] = {}
        """(uid of the resource, type) -> what was written last, and when."""
        self._not_before: dict[str, float] = {}
        """Uid of a resource -> when it is tried again."""

    async def run(self) -> None:
        """Works without end."""
        while True:
            await self._clock.sleep(LOOK_SECONDS)
            await self._look()

    async def _look(self) -> None:
        controller = self._controller
        if not controller.is_settled or controller.role.standing is None:
            return
        counts = controller.tally.all()
        reasons = reasons_by_group(controller.stays, {name: each.group for name, each in counts.items()})
        for source in list(controller.cache.policies.values()):
            if source.is_deleting or self._not_before.get(source.uid, 0.0) > self._clock.now():
                continue
            wanted = wanted_conditions(source, controller.groups, controller.tally.groups(), reasons, controller.role.standing)
            for condition in wanted:
                if self._is_due(source, condition) and self._election.still_leading():
                    await self._write(source, condition)

    def _is_due(self, source: PolicySource, wanted: Condition) -> bool:
        said, at = self._said.get((source.uid, wanted.type), (None, 0.0))
        if said == wanted and source.conditions.get(wanted.type) == _shown(wanted):
            return False
        is_new = said is None or _shown(said) != _shown(wanted)
        return is_new or self._clock.now() - at >= REWORD_SECONDS  # other words, or somebody else's hand

    async def _write(self, source: PolicySource, condition: Condition) -> None:
        try:
            await self._fleet.set_condition(
                source, condition.type, is_true=condition.is_true, reason=condition.reason, sentence=condition.sentence
            )
        except ClusterError as error:
            self._not_before[source.uid] = self._clock.now() + AGAIN_SECONDS
            logger.warning("a condition could not be written", extra={"source": f"{source.kind}/{source.name}", "error": error.message})
        else:
            self._said[source.uid, condition.type] = condition, self._clock.now()


def _shown(condition: Condition) -> tuple[str, str]:
    """Status and reason, as a view has them."""
    return "True" if condition.is_true else "False", condition.reason
