"""What a step of a node's upgrade is made of: the state it leads to, the record it leaves, the bound of the next wait.

`rollout` decides which step is taken; here is what all steps share.
"""

from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from driver_manager.core.parking import NOTHING_HELD, taken_off
from driver_manager.core.rollout_record import MAX_FAILURES, MAX_NAME, MAX_SENTENCE, Failure, Progress, encode
from driver_manager.core.rollout_states import Because, State
from driver_manager.core.situation import NodeChange, Situation, Stay, Work
from driver_manager.names import (
    INITIAL_UNSCHEDULABLE,
    KEEP_CORDON,
    REQUESTOR_MODE,
    ROLLOUT,
    UPGRADE_STATE,
    VALIDATION_STARTED,
    WAIT_STARTED,
)

NVIDIAS: Final = (INITIAL_UNSCHEDULABLE, WAIT_STARTED, VALIDATION_STARTED, REQUESTOR_MODE)
"""Annotations of NVIDIA's controller that mean nothing on a node that is not in work."""
LONGEST_PAUSE: Final = 3600.0
"""Between two tries, in seconds."""
NO_POLICY: Final = "no policy upgrades this node any more"


@dataclass(frozen=True, slots=True)
class Go:
    """A step: to which state, why, and what is written with it."""

    to: State
    because: Because
    sentence: str
    progress: Progress | None
    change: NodeChange = field(default_factory=NodeChange)

    @property
    def written(self) -> NodeChange:
        """The whole change: its own, the label, and the record."""
        record = None if self.progress is None else encode(self.progress)
        return self.change.and_then(NodeChange({UPGRADE_STATE: self.to.value or None}, {ROLLOUT: record}))


Step = Go | Stay

# Times --------------------------------------------------------------------------------------------------------------


def limit(situation: Situation, state: State) -> float:
    """How long a node may stay in a state, in seconds; 0 without limit."""
    settings = situation.settings
    match state:
        case State.WAIT_FOR_JOBS:
            return float(situation.in_force.wait_for_completion.timeout_seconds)
        case State.DRAIN if situation.in_force.drain.enable:
            return float(situation.in_force.drain.timeout_seconds)
        case State.POD_DELETION | State.DRAIN:
            return float(situation.in_force.pod_deletion.timeout_seconds)
        case State.POD_RESTART:
            return settings.driver_timeout
        case State.VALIDATION:
            return settings.validation_timeout
        case _:
            return 0.0


def is_late(situation: Situation) -> bool:
    """Whether the time of its state is over."""
    return bool(situation.progress and 0 < situation.progress.deadline <= situation.now)


def wait(situation: Situation, because: Because, sentence: str, work: Work = Work.NOTHING) -> Stay:
    """A wait until the deadline on the record; where there is none, it says so (R8)."""
    deadline = situation.progress.deadline if situation.progress else 0.0
    words = sentence if deadline else f"{sentence}, without a limit"
    return Stay(because=because, sentence=words, again_at=deadline if deadline > situation.now else 0.0, work=work)


def wait_or_fail(situation: Situation, because: Because, sentence: str, too_late: Because = Because.DRIVER_TIMED_OUT) -> Step:
    """A wait for the new driver, which fails the node when its time is over."""
    return fail(situation, too_late, f"{sentence}, and its time is over") if is_late(situation) else wait(situation, because, sentence)


# Steps --------------------------------------------------------------------------------------------------------------


def go(situation: Situation, to: State, because: Because, sentence: str, change: NodeChange | None = None, **changes: Any) -> Go:
    """To a state, whose time begins now; `changes` are fields of the record."""
    progress = situation.progress or Progress(node=situation.node.uid)
    seconds = limit(situation, to)
    deadline = situation.now + seconds if seconds else 0.0
    times = {"since": situation.now, "deadline": deadline}
    progress = msgspec.structs.replace(progress, state=to.value, reason=because.value, **times, **changes)
    return Go(to, because, sentence, progress, change or NodeChange())


def same(situation: Situation, because: Because, sentence: str, change: NodeChange, **changes: Any) -> Go:
    """A write that leaves the state, and the end of its wait, as they are."""
    assert situation.state is not None
    assert situation.progress is not None
    progress = msgspec.structs.replace(situation.progress, reason=because.value, **changes)
    return Go(situation.state, because, sentence, progress, change)


def remembered(progress: Progress | None) -> Progress | None:
    """What is kept of a record where nothing is going on: what ended well, and what failed."""
    if progress is None or not (progress.done or progress.failures):
        return None
    return Progress(node=progress.node, target=progress.target, failures=progress.failures, done=progress.done)


def opened(situation: Situation) -> bool | None:
    """What `unschedulable` becomes when the node is let go: our own cordon goes, any other stays."""
    is_kept = situation.node.annotations.get(KEEP_CORDON) == "true"
    return False if situation.has_own_cordon and not is_kept else None


def done(situation: Situation, because: Because, sentence: str, change: NodeChange | None = None) -> Go:
    """To the end: nothing of ours stays but the memory."""
    clean = NodeChange(annotations=dict.fromkeys(NVIDIAS), unschedulable=opened(situation))
    clean = clean.and_then(taken_off(situation.node, situation.progress))
    return Go(State.DONE, because, sentence, remembered(situation.progress), clean.and_then(change or NodeChange()))


def take_back(situation: Situation) -> Step:
    """No policy upgrades the node any more: all that was done to it is undone."""
    if (stay := give_back_maintenance(situation)) is not None:
        return stay
    change = NodeChange(annotations=dict.fromkeys(NVIDIAS), unschedulable=opened(situation))
    change = change.and_then(taken_off(situation.node, situation.progress))
    return Go(State.UNKNOWN, Because.POLICY_OFF, f"{NO_POLICY}: all is taken back", remembered(situation.progress), change)


def give_back_maintenance(situation: Situation) -> Stay | None:
    """The wait until the maintenance operator's object is gone or given back; None where there is nothing to give back."""
    if not situation.holds_maintenance:
        return None
    sentence = "its NodeMaintenance is given back, without a limit; deleting it ends this"
    return Stay(because=Because.MAINTENANCE, sentence=sentence, work=Work.RELEASE_MAINTENANCE)


def require(situation: Situation, because: Because, sentence: str) -> Go:
    """A node that has to wait for its turn. Whether it is cordoned now is noted where NVIDIA's controller looks for it."""
    change = NodeChange(annotations={INITIAL_UNSCHEDULABLE: "true" if situation.has_foreign_cordon else None})
    return go(situation, State.REQUIRED, because, sentence, change, **anew(situation), is_cordoned=situation.has_own_cordon)


def anew(situation: Situation) -> dict[str, Any]:
    """Fields of the record for another target: its tries count anew.

    What devices the node had is forgotten only if the old driver still runs, so that they can be counted again.
    """
    progress = situation.progress
    is_untouched = bool(progress and progress.failures and not progress.failures[-1].is_driver_gone)
    devices = dict(progress.devices) if progress and not is_untouched else {}
    return {"target": situation.wanted, "attempt": 0, "not_before": 0.0, "devices": devices}


# Failures -----------------------------------------------------------------------------------------------------------


def fail(situation: Situation, because: Because, why: str) -> Go:
    """The new driver is not well: the node stays closed."""
    return go(situation, State.FAILED, because, why, failures=_failures(situation, because, why, is_driver_gone=True))


def try_again(situation: Situation, because: Because, why: str) -> Go:
    """A try that failed while the old driver still runs: nothing is lost, so the node is opened and comes back later."""
    progress, settings = situation.progress, situation.settings
    assert progress is not None
    change = NodeChange(unschedulable=opened(situation)).and_then(taken_off(situation.node, progress))
    failures = _failures(situation, because, why, is_driver_gone=False)
    changes: dict[str, Any] = {"failures": failures, "is_cordoned": False, **NOTHING_HELD}
    if 0 < settings.attempts <= progress.attempt:
        return go(situation, State.FAILED, because, f"{why} (try {progress.attempt}, the last one for this driver)", change, **changes)
    pause = min(settings.retry_pause * 2 ** min(max(progress.attempt - 1, 0), 16), LONGEST_PAUSE)
    sentence = f"{why}; it is tried again in {pause:.0f} s"
    return go(situation, State.REQUIRED, because, sentence, change, not_before=situation.now + pause, **changes)


def _failures(situation: Situation, because: Because, why: str, *, is_driver_gone: bool) -> list[Failure]:
    progress = situation.progress
    assert progress is not None
    failure = Failure(situation.now, progress.target[:MAX_NAME], because.value, why[:MAX_SENTENCE], is_driver_gone=is_driver_gone)
    return [*progress.failures, failure][-MAX_FAILURES:]
