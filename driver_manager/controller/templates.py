"""Where there is no admission policy and a setting allows it: the term of `core.parking_term` is put into the templates of DaemonSets.

Once for each: where somebody takes it out again, that is said, and left so. `cleanup` takes out what was put in here, which a label of the
DaemonSet tells.
"""

import logging
from collections.abc import Iterable
from typing import Final

from driver_manager.controller.election import Election
from driver_manager.core.fleet import FleetSet
from driver_manager.core.optin import opt_in_problem
from driver_manager.core.parking_term import leaves_parked_nodes
from driver_manager.errors import ClusterError, Conflict, Forbidden, NotFound
from driver_manager.names import PARKED, PARKING_TERM
from driver_manager.ports import Clock, Fleet

logger = logging.getLogger(__name__)

SEEN_IN: Final = 10.0
"""Seconds after which a change of ours is seen, or is there no more."""
UNDER_WAY: Final = "its template is being changed for that, which rolls it once: that is waited for"
UNDONE: Final = (
    f"the term {PARKED} DoesNotExist was put into its template, and somebody has taken it out: put it into what the DaemonSet is made from"
)
MAY_NOT: Final = "the account may not change its template (kubectl apply -f deploy/controller-templates)"


class Templates:
    """The leader's.

    Args:
        fleet: of the controller.
        clock: ours.
        election: says whether anything may be written.
        own_namespace: the controller's.
    """

    def __init__(self, fleet: Fleet, clock: Clock, election: Election, own_namespace: str) -> None:
        self._fleet, self._clock, self._election, self._own_namespace = fleet, clock, election, own_namespace
        self._changed: dict[str, float] = {}
        """Uid -> when the term was put in."""
        self.why_not: dict[str, str] = {}
        """DaemonSet -> why its template does not keep its pods off parked nodes, or not yet."""

    async def prepare(self, sets: Iterable[FleetSet]) -> None:
        """Puts the term into the templates that need it."""
        wanted = [each for each in sets if not (each.is_deleting or opt_in_problem(each, self._own_namespace) or leaves_parked_nodes(each))]
        self.why_not = {each.ref: await self._prepare(each) for each in wanted}

    async def _prepare(self, daemon_set: FleetSet) -> str:
        changed = self._changed.get(daemon_set.uid)
        if not daemon_set.is_settled or (changed is not None and self._clock.now() - changed < SEEN_IN):
            return UNDER_WAY
        if changed is not None or PARKING_TERM in daemon_set.labels:
            return UNDONE
        if not self._election.still_leading():
            return UNDER_WAY
        try:
            await self._fleet.set_parking_term(daemon_set, is_in=True)
        except (Conflict, NotFound):
            return UNDER_WAY  # the watch tells what is so
        except Forbidden:
            return MAY_NOT
        except ClusterError as error:
            return f"its template could not be changed: {error.message}"
        self._changed[daemon_set.uid] = self._clock.now()
        logger.warning("the template of a DaemonSet was changed for parking: it rolls once", extra={"daemonset": daemon_set.ref})
        return UNDER_WAY
