"""Healing nodes that an agent left half-way for good, and taking off what is left of an upgrade where no driver is wanted any more.

What is to be done is `core.healing`'s affair. Here is who is watched since when, by this replica's own clock: a new leader counts anew. The
cache says at once why a node is left alone; before each step everything is read afresh, pods in all namespaces among it.
"""

import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

from driver_manager.controller.cache import Cache
from driver_manager.controller.election import Election
from driver_manager.controller.role import RoleWatch
from driver_manager.controller.settings import ControllerSettings
from driver_manager.controller.telling import Telling
from driver_manager.core.healing import Patient, Treatment, Why, driver_pods, driver_sets, holds, living, treat
from driver_manager.core.record import find_record
from driver_manager.core.snapshot import NodeView
from driver_manager.errors import ClusterError, InvariantBroken, NotFound
from driver_manager.ports import Clock, Fleet, NodePatch

logger = logging.getLogger(__name__)

AFTER_ERROR: Final = 5.0
"""Seconds until a node is looked at again of which the API server told nothing."""
SLACK: Final = 0.01
"""Seconds by which a look may come early: reminders go by the time of day, which has not the same grain."""


@dataclass(slots=True)
class _Watched:
    """A node on which nobody seems to work any more."""

    uid: str
    run: str
    """Of the record that it has; another one counts anew."""
    due_at: float
    """When it is looked at again."""
    alone_since: float | None = None
    claim: str = ""
    claimed_at: float = 0.0


class Healer:
    """Heals nodes, one look after the other. Whoever has it lets nobody else write a node meanwhile.

    Args:
        fleet: the API.
        clock: this replica's.
        settings: with the times.
        election: nothing is written without the Lease.
        telling: tells people.
        cache: what is known.
        role: whether the state labels are ours to take off (decision 31).
        remind: has a node considered again, so many seconds from now.
    """

    def __init__(
        self,
        fleet: Fleet,
        clock: Clock,
        settings: ControllerSettings,
        election: Election,
        telling: Telling,
        cache: Cache,
        role: RoleWatch,
        remind: Callable[[str, float], None],
    ) -> None:
        self._fleet, self._clock, self._settings = fleet, clock, settings
        self._election, self._telling, self._cache, self._role, self._remind = election, telling, cache, role, remind
        self.reported: dict[str, Treatment] = {}
        """Node -> what only a person can mend there."""
        self._watched: dict[str, _Watched] = {}
        self._strays: dict[str, NodeView] = {}
        """Nodes that are none of the fleet's any more, and still have something of ours."""

    def step(self, name: str) -> Coroutine[Any, Any, None] | None:
        """What is to be done about a node now, as work that takes its time; None where there is nothing, or not yet."""
        node = self._cache.nodes.get(name) or self._strays.get(name)
        if node is None:
            self._watched.pop(name, None)
            self.reported.pop(name, None)
            return None
        held = holds(self._patient(node))
        if held is not None:
            self._leave(node, held)
            return None
        watched = self._watched.get(name)
        if watched is not None and watched.uid == node.uid:
            rest = watched.due_at - self._clock.now()
            if rest > SLACK:
                self._remind(name, rest)
                return None
        return self._look(node)

    def stray(self, node: NodeView) -> None:
        """A node has left the fleet: its selector or its labels have changed. What is ours on it is taken off all the same."""
        held = holds(self._patient(node))
        if held is None or held.why is not Why.CLEAN:
            self._strays[node.name] = node
            self._remind(node.name, self._settings.settle_time)

    def _leave(self, node: NodeView, held: Treatment) -> None:
        """Nothing is done, and the time that nobody was there is counted anew."""
        self._watched.pop(node.name, None)
        self._told(node, held)
        if node.name not in self._strays:
            return
        if held.why is Why.CLEAN:
            del self._strays[node.name]
        else:  # no watch tells of it
            self._watched[node.name] = _Watched(node.uid, "", self._clock.now() + self._settings.settle_time)
            self._remind(node.name, self._settings.settle_time)

    def _told(self, node: NodeView, treatment: Treatment) -> None:
        before = self.reported.pop(node.name, None)
        if treatment.is_for_a_person:
            self.reported[node.name] = treatment
            if treatment != before:
                self._telling.healing(node, treatment)

    def _patient(self, node: NodeView, **seen: Any) -> Patient:
        """A node as the cache has it, with what was seen besides."""
        sets, drivers = driver_sets(node, self._cache.sets.values()), tuple(pod.ref for pod in self._cache.drivers_on(node.name))
        return Patient(node=node, sets=sets, is_state_ours=self._role.is_leading, **{"drivers": drivers, **seen})

    # Looking --------------------------------------------------------------------------------------------------------

    async def _look(self, known: NodeView) -> None:
        """Reads everything afresh, and does what that says."""
        name = known.name
        try:
            node = await self._fleet.node(name)
            pods = (await self._fleet.pods_on(name)).items
            await self._treat(node, driver_pods(pods), living(pods))
        except (ClusterError, InvariantBroken) as error:
            if isinstance(error, NotFound):  # of a node of the fleet the watch tells: an answer alone is not believed
                self._strays.pop(name, None)
            logger.warning("a node could not be healed, trying again", extra={"node": name, "error": error.message})
            watched = self._watched.setdefault(name, _Watched(known.uid, _run(known), 0.0))
            watched.due_at = self._clock.now() + AFTER_ERROR
            self._remind(name, AFTER_ERROR)

    async def _treat(self, node: NodeView, drivers: tuple[str, ...], living_pods: frozenset[str]) -> None:
        name, now = node.name, self._clock.now()
        self._keep(node)
        cached = self._patient(node)
        patient = self._patient(node, drivers=(*cached.drivers, *drivers), pods=living_pods)
        if (held := holds(patient)) is not None:
            self._leave(node, held)
            if name in self._cache.nodes:  # the cache may not know why: this is not asked at every turn
                self._watched[name] = _Watched(node.uid, _run(node), now + self._settings.settle_time)
                self._remind(name, self._settings.settle_time)
            return
        watched = self._watch(node)
        if watched.alone_since is None:
            watched.alone_since = now
        alone_for, claimed_for = now - watched.alone_since, now - watched.claimed_at
        patient = self._patient(node, drivers=drivers, pods=living_pods, alone_for=alone_for, claim=watched.claim, claimed_for=claimed_for)
        new_run = self._clock.run_id()
        treatment = treat(patient, self._settings.settle_time, self._settings.heal_pause, new_run)
        if treatment.change is None:
            wait = max(treatment.again_in, 2 * SLACK)
            watched.due_at = now + wait
            self._remind(name, wait)
            return
        await self._write(node, treatment, watched, new_run)

    def _watch(self, node: NodeView) -> _Watched:
        """The count of a node; another record, or another node of its name, is counted anew."""
        watched, run = self._watched.get(node.name), _run(node)
        if watched is None or watched.uid != node.uid or run not in (watched.run, watched.claim or watched.run):
            watched = self._watched[node.name] = _Watched(node.uid, run, 0.0)
        return watched

    async def _write(self, node: NodeView, treatment: Treatment, watched: _Watched, new_run: str) -> None:
        change = treatment.change
        assert change is not None
        now = self._clock.now()
        if not self._election.still_leading():
            watched.due_at = now + AFTER_ERROR
            return
        self._keep(await self._fleet.patch_node(NodePatch.guarded(node, change)))
        self._telling.healing(node, treatment)
        watched.due_at = now = self._clock.now()
        if treatment.why is Why.CLAIMED:
            watched.claim, watched.claimed_at, watched.due_at = new_run, now, now + self._settings.heal_pause
            self._remind(node.name, self._settings.heal_pause)
        elif treatment.why is Why.HEALED:  # nobody has been there all the time: what else is left may go at once
            watched.run, watched.claim = "", ""

    def _keep(self, node: NodeView) -> None:
        """The newest of a node, wherever it is kept."""
        if node.name in self._cache.nodes:
            self._cache.put_node(node)
        elif node.name in self._strays:
            self._strays[node.name] = node


def _run(node: NodeView) -> str:
    record = find_record(node).record
    return record.run if record is not None else ""
