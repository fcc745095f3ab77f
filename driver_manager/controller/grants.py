"""Whose turn it is: nodes that are being looked at, that were granted a start, that were refused one. Grants stand in the Lease too (R7).

A grant counts from the moment it is said until its node shows a write: two leaders a moment apart never begin more than is allowed.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from driver_manager.controller.election import Election, read_grants, written_grants
from driver_manager.core.rollout_states import Because
from driver_manager.core.situation import Turn
from driver_manager.names import GRANTS
from driver_manager.ports import Clock

FIRST_LOOK_AGAIN: Final = 30.0
LONGEST_LOOK_AGAIN: Final = 300.0
"""Seconds until a node with a pod that may not go is looked at again; doubling."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a node was not begun when it was its turn."""

    sentence: str
    again_at: float
    pause: float


class Grants:
    """The turns of one life of a leader."""

    def __init__(self, clock: Clock, election: Election) -> None:
        self._clock, self._election = clock, election
        self.starting: set[str] = set()
        """Nodes whose turn it is and that do not show it yet: their pods are looked at, then it is granted."""
        self._said: set[str] = set()
        """Those of them that the next write of the Lease names; none is begun before that is written."""
        self.granted: set[str] = set()
        """Nodes that the Lease names, and that may be begun."""
        self.inherited: set[str] = set()
        """Nodes that a predecessor was granted and that do not show it: a late write of it may still come."""
        self.refused: dict[str, Refusal] = {}
        self.held: dict[str, Turn] = {}
        """Nodes that wait for something else than room, as it was when turns were last given."""

    def is_counted(self, name: str) -> bool:
        """Whether a node counts as in work though it does not show it."""
        return name in self.granted or name in self.starting

    def turn(self, name: str) -> Turn:
        """Whether a node may start, as far as that has been settled."""
        if name in self.granted:
            return Turn(is_granted=True)
        refusal = self.refused.get(name)
        if refusal is not None and refusal.again_at > self._clock.epoch():
            return Turn(because=Because.BLOCKED_BY_POD, sentence=refusal.sentence, again_at=refusal.again_at)
        return self.held.get(name, Turn())

    def say(self, names: Iterable[str]) -> None:
        """The next write of the Lease names these, too. One that was let go meanwhile has lost its turn, perhaps to another node."""
        self._said.update(name for name in names if name in self.starting)
        self._say()

    def grant(self, names: Iterable[str]) -> None:
        """The Lease has been written: those of these that it names may be begun."""
        granted = self._said.intersection(names)
        self._said -= granted
        self.granted |= granted

    def let_go(self, name: str) -> None:
        """A grant has been used, or is not going to be."""
        self.starting.discard(name)
        if name in self._said or name in self.granted or name in self.inherited:
            for names in (self._said, self.granted, self.inherited):
                names.discard(name)
            self._say()

    def refuse(self, name: str, sentence: str) -> float:
        """Nothing is done to the node; gives when it is looked at again, in Unix seconds."""
        before = self.refused.get(name)
        pause = min(2 * before.pause, LONGEST_LOOK_AGAIN) if before is not None else FIRST_LOOK_AGAIN
        again_at = self._clock.epoch() + pause
        self.refused[name] = Refusal(sentence, again_at, pause)
        return again_at

    def take_over(self, waiting: Iterable[str]) -> list[str]:
        """What a predecessor granted may be written at any moment; gives those that still wait, in order: each has to be begun or voided.

        Args:
            waiting: names of the nodes that are to be upgraded and not begun.
        """
        inherited = sorted(read_grants(self._election.lease) & set(waiting))
        self.starting.update(inherited)
        self.inherited.update(inherited)
        self._say()
        return inherited

    def _say(self) -> None:
        self._election.say(GRANTS, written_grants(self._said | self.granted | self.inherited))
