"""What the controller tells people and machines: log lines, Events, and counters for metrics. Nothing waits for it."""

import asyncio
import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from driver_manager.core.fleet import EventNote, FleetPod, Subject
from driver_manager.core.healing import Treatment, Why
from driver_manager.core.parking_notices import Matter, Notice
from driver_manager.core.policy_groups import Groups
from driver_manager.core.role import Standing
from driver_manager.core.rollout_states import Because, State
from driver_manager.core.situation import Decision, Move, Situation, Stay
from driver_manager.core.snapshot import NodeView
from driver_manager.core.upgrade_policy import written_policy
from driver_manager.errors import ClusterError
from driver_manager.ports import Clock, Fleet

logger = logging.getLogger(__name__)

WAITING_EVENTS: Final = 10_000
"""Events that may wait to be sent; more are dropped, oldest first."""
WORTH_AN_EVENT: Final = frozenset(
    {Because.BLOCKED_BY_POD, Because.NOT_FREED, Because.BAD_RECORD, Because.UNKNOWN_STATE, Because.TWO_DRIVERS}
)
"""Reasons for staying that a person should hear of; every change of state has an Event anyway."""
ONE_EVENT: Final = frozenset({Because.BLOCKED_BY_BUDGET, Because.MAINTENANCE_OFF})
"""Such reasons whose sentence changes while they last: it is told once."""
MAX_PODS: Final = 10
BUCKETS: Final = (1.0, 5.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0, 7200.0, 21600.0)
"""Upper bounds, in seconds."""


@dataclass(slots=True)
class Durations:
    """How long something took, many times: counts per bucket, so that it does not grow."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))
    """For each of BUCKETS, and for what is longer."""
    total: float = 0.0

    def add(self, seconds: float) -> None:
        """One more; the clock of the day may have been turned back meanwhile."""
        seconds = max(0.0, seconds)
        self.counts[bisect_left(BUCKETS, seconds)] += 1
        self.total += seconds


class Telling:
    """Tells; `run` sends Events one after the other."""

    def __init__(self, fleet: Fleet, clock: Clock) -> None:
        self._fleet, self._clock = fleet, clock
        self._events: asyncio.Queue[EventNote] = asyncio.Queue(WAITING_EVENTS)
        self.is_synced = False
        self.passed_at = clock.now()
        """When the loop last came round."""
        self.moves: Counter[tuple[State, State, Because]] = Counter()
        self.healing_steps: Counter[Why] = Counter()
        self.driver_restarts = 0
        self.evictions = 0
        self.bugs = 0
        self.dropped_events = 0
        self.passes = 0
        self.state_seconds: dict[State, Durations] = {}
        """State -> how long nodes stayed in it."""
        self._failures: dict[str, str] = {}
        """Node -> what was last told of its NodeMaintenance."""

    async def run(self) -> None:
        """Sends Events without end. One that is lost is lost."""
        while True:
            note = await self._events.get()
            try:
                await self._fleet.note_event(note)
            except ClusterError as error:
                logger.debug("an Event was lost", extra={"about": note.subject.name, "error": error.message})

    def synced(self) -> None:
        """Everything has been listed once."""
        self.is_synced = True
        logger.info("the fleet is known")

    def passed(self) -> None:
        """The loop came round."""
        self.passed_at = self._clock.now()
        self.passes += 1

    def moved(self, node: NodeView, decision: Decision, situation: Situation, evicted: Sequence[str]) -> None:
        """A node has other states now: one Event for the write."""
        for move in decision.moves:
            self.moves[move.before, move.after, move.because] += 1
            logger.info(
                "node moves",
                extra={
                    "node": node.name,
                    "from": move.before or "none",
                    "to": move.after or "none",
                    "reason": move.because,
                    "why": move.sentence,
                },
            )
        if not decision.moves:
            return
        self._failures.pop(node.name, None)
        if situation.progress is not None and situation.state is not None and situation.progress.since:
            self.state_seconds.setdefault(situation.state, Durations()).add(situation.now - situation.progress.since)
        self.evictions += len(evicted)
        self._note(node, decision.moves, evicted)

    def _note(self, node: NodeView, moves: Sequence[Move], evicted: Sequence[str]) -> None:
        first, last = moves[0], moves[-1]
        pods = f"; evicted {_some(evicted)}" if evicted else ""
        sentence = f"from {first.before or 'none'} to {last.after or 'none'}: {last.sentence}{pods}"
        self._event(Subject.node(node), last.because, sentence, is_warning=last.after is State.FAILED or last.because is Because.NOT_FREED)

    def stays(self, node: NodeView, stay: Stay, before: Stay | None) -> None:
        """A node waits for something else than before."""
        is_new = before is None or before.because is not stay.because
        is_news = stay.because in WORTH_AN_EVENT or (is_new and stay.because in ONE_EVENT)
        level = logging.INFO if is_news else logging.DEBUG
        logger.log(level, "node stays", extra={"node": node.name, "reason": stay.because, "why": stay.sentence})
        if is_news:
            self._event(Subject.node(node), stay.because, stay.sentence, is_warning=True)

    def healing(self, node: NodeView, treatment: Treatment) -> None:
        """Something was done about what was left on a node, or only a person can do it."""
        self.healing_steps[treatment.why] += 1
        left = "; ".join(treatment.left_alone)
        words = f"{treatment.sentence}; left as it is: {left}" if left else treatment.sentence
        is_warning = treatment.is_for_a_person or bool(left)
        level = logging.WARNING if is_warning else logging.INFO
        logger.log(level, "healing", extra={"node": node.name, "reason": treatment.why, "why": words})
        self._event(Subject.node(node), treatment.why, words, is_warning=is_warning)

    def parking(self, notice: Notice) -> None:
        """Something about parking that a person should know of."""
        logger.warning("parking", extra={"about": notice.about, "reason": notice.matter, "what": notice.sentence})
        if notice.subject is not None:
            self._event(notice.subject, notice.matter, notice.sentence, is_warning=True)

    def _event(self, subject: Subject, because: Because | Why | Matter, sentence: str, *, is_warning: bool) -> None:
        if self._events.full():
            self.dropped_events += 1
            self._events.get_nowait()
        note = EventNote(subject=subject, is_warning=is_warning, reason=because.value, sentence=sentence[:1000])
        self._events.put_nowait(note)

    def maintenance_failed(self, node: NodeView, error: ClusterError) -> None:
        """A maintenance operator could not be asked for a node, or not be told that it is needed no more: one Event for each error."""
        if self._failures.get(node.name) != error.message:
            self._failures[node.name] = error.message
            sentence = f"its NodeMaintenance: {error.message}{f' ({error.hint})' if error.hint else ''}; it is tried again"
            self._event(Subject.node(node), Because.MAINTENANCE, sentence, is_warning=True)

    def restarted(self, node: NodeView | None, pod: FleetPod) -> None:
        """A driver pod was deleted."""
        self.driver_restarts += 1
        logger.info("driver pod deleted", extra={"node": node.name if node else pod.node_name, "pod": pod.ref, "uid": pod.uid})

    def waiting(self, groups: Mapping[str, str]) -> None:
        """Why no more nodes are begun."""
        for group, why in groups.items():
            logger.info("no more nodes are begun", extra={"group": group, "why": why})

    def policies(self, groups: Groups) -> None:
        """Other policies count now."""
        every = [groups.everybody] if groups.everybody else list(groups.by_owner.values())
        for group in every:
            policy = group.policy
            said = {"why": group.why_not} if policy is None else written_policy(policy)
            logger.info("policy", extra={"group": group.name or "nodes of no policy", "upgrades": policy is not None, **said})
        for source, problem in groups.problems.items():
            logger.warning("a policy is not valid: it starts nothing", extra={"source": source, "problem": problem})
        for source, note in groups.notes.items():
            logger.warning("a policy is not taken as it was given", extra={"source": source, "note": note})

    def role(self, standing: Standing) -> None:
        """It leads now, or follows."""
        logger.info("the role", extra={"role": standing.role, "why": standing.sentence})

    def freed(self, node: NodeView, evicted: Sequence[str]) -> None:
        """Pods were evicted that no state of the node waits for."""
        if not evicted:
            return
        self.evictions += len(evicted)
        logger.info("pods evicted", extra={"node": node.name, "pods": ", ".join(evicted)})
        self._event(Subject.node(node), Because.FREED, f"evicted {_some(evicted)}", is_warning=False)

    def bug(self, node_name: str) -> None:
        """A decision, or work about a node, ended in an error of the program."""
        self.bugs += 1


def _some(pods: Sequence[str]) -> str:
    more = f" and {len(pods) - MAX_PODS} more" if len(pods) > MAX_PODS else ""
    return ", ".join(pods[:MAX_PODS]) + more
