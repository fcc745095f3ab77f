"""What to do next about one node: a plain function of what was seen, the policy and the time.

`decide` passes as many book-keeping states as can be passed at once and gives the sum as one change of the Node object; with
`one_at_a_time` it passes one. Every state has an exit for every input, and every wait in it has a deadline that stands on the node.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec

from driver_manager.core.rollout_record import MAX_FAILURES, MAX_SENTENCE, Failure, Progress, encode
from driver_manager.core.rollout_states import BEFORE_RESTART, WORKING, Because, State
from driver_manager.core.situation import Decision, Move, NodeChange, Situation, Stay, Turn, Work
from driver_manager.core.snapshot import NodeView
from driver_manager.core.upgrade_policy import written_policy
from driver_manager.names import (
    ACCEPT,
    INITIAL_UNSCHEDULABLE,
    REQUESTOR_MODE,
    ROLLOUT,
    SAFE_LOAD,
    UPGRADE_REQUESTED,
    UPGRADE_SKIP,
    UPGRADE_STATE,
    VALIDATION_STARTED,
    WAIT_STARTED,
)

MAX_PASSED: Final = 12
"""More states than a node can pass in one decision."""


@dataclass(frozen=True, slots=True)
class _Go:
    """A step: to which state, why, and what is written with it."""

    to: State
    because: Because
    sentence: str
    progress: Progress | None
    change: NodeChange = field(default_factory=NodeChange)


_Step = _Go | Stay


def decide(situation: Situation) -> Decision:
    """What to do about a node now."""
    before = situation
    moves: list[Move] = []
    change = NodeChange()
    while True:
        step = _step(situation)
        if isinstance(step, Stay) or len(moves) == MAX_PASSED:
            rest = step if isinstance(step, Stay) else None
            break
        assert situation.state is not None
        moves.append(Move(situation.state, step.to, step.because, step.sentence))
        written = _written(situation, step)
        change = change.and_then(written)
        situation = replace(
            situation,
            node=written.on(situation.node),
            state=step.to,
            progress=step.progress,
            freeing=None,
            jobs=None,
            turn=Turn(),
        )
        if situation.settings.one_at_a_time:
            rest = None
            break
    return Decision(tuple(moves), change.needed_on(before.node), rest, situation.progress)


def _written(situation: Situation, step: _Go) -> NodeChange:
    """The change of a step: its own, the label, and the record with the new state's time and reason."""
    label = NodeChange(labels={UPGRADE_STATE: step.to.value or None})
    if step.progress is None:
        return step.change.and_then(label).and_then(NodeChange(annotations={ROLLOUT: None}))
    return step.change.and_then(label).and_then(NodeChange(annotations={ROLLOUT: encode(step.progress)}))


def _step(situation: Situation) -> _Step:
    """The next step of a node, by its state."""
    state = situation.state
    if state is None:
        label = situation.node.labels.get(UPGRADE_STATE, "")
        sentence = f"the label {UPGRADE_STATE} is {label!r}, which is no state: set it to {State.REQUIRED} or take it off"
        return Stay(because=Because.UNKNOWN_STATE, sentence=sentence)
    if situation.bad_progress:
        sentence = f"the annotation {ROLLOUT} cannot be used ({situation.bad_progress}): take it off"
        return Stay(because=Because.BAD_RECORD, sentence=sentence)
    if state in WORKING and situation.progress is None:
        return _adopt(situation, state)
    if situation.policy is None and state in BEFORE_RESTART:
        return _give_up(situation)
    if state in BEFORE_RESTART - {State.CORDON, State.MAINTENANCE} and not situation.node.unschedulable:
        closed = NodeChange(unschedulable=True)
        return _same(situation, Because.STARTED, "somebody took its cordon off, and it is made again", closed, is_cordoned=True)
    return _STEPS[state](situation)


# Records ------------------------------------------------------------------------------------------------------------


def _progress(situation: Situation, because: Because, seconds: float = 0.0, **changes: Any) -> Progress:
    """The record of a node that comes to a state now; `seconds` is how long it may stay there, 0 without limit."""
    progress = situation.progress or Progress(node=situation.node.uid)
    deadline = situation.now + seconds if seconds else 0.0
    return msgspec.structs.replace(progress, since=situation.now, deadline=deadline, reason=because.value, **changes)


def _adopt(situation: Situation, state: State) -> _Go:
    """A node in mid-flow that another controller began, or whose record was taken off: its waits begin anew, its cordon is ours.

    Only the annotation of its initial state says that the cordon was there before.
    """
    is_cordoned = situation.node.unschedulable and INITIAL_UNSCHEDULABLE not in situation.node.annotations
    devices = dict(situation.node.allocatable) if state in BEFORE_RESTART else {}
    progress = _progress(
        situation,
        Because.TAKEN_OVER,
        _limit(situation, state),
        target=situation.wanted,
        policy=situation.group,
        rules=written_policy(situation.policy) if situation.policy else {},
        is_cordoned=is_cordoned,
        devices=devices,
        attempt=1,
    )
    return _Go(state, Because.TAKEN_OVER, f"it is in {state} without a record: the work goes on from there", progress)


def _limit(situation: Situation, state: State) -> float:
    """How long a node may stay in a state, in seconds; 0 without limit."""
    policy, settings = situation.in_force, situation.settings
    match state:
        case State.WAIT_FOR_JOBS:
            return float(policy.wait_for_completion.timeout_seconds)
        case State.POD_DELETION:
            return float(policy.pod_deletion.timeout_seconds)
        case State.DRAIN:
            return float(policy.drain.timeout_seconds)
        case State.POD_RESTART:
            return settings.driver_timeout
        case State.VALIDATION:
            return settings.validation_timeout
        case _:
            return 0.0


def _go(situation: Situation, to: State, because: Because, sentence: str, change: NodeChange | None = None, **changes: Any) -> _Go:
    progress = _progress(situation, because, _limit(situation, to), **changes)
    return _Go(to, because, sentence, progress, change or NodeChange())


def _same(situation: Situation, because: Because, sentence: str, change: NodeChange, **changes: Any) -> _Go:
    """A write that leaves the state, and the end of its wait, as they are."""
    assert situation.state is not None
    assert situation.progress is not None
    progress = msgspec.structs.replace(situation.progress, reason=because.value, **changes)
    return _Go(situation.state, because, sentence, progress, change)


def _is_late(situation: Situation) -> bool:
    return bool(situation.progress and 0 < situation.progress.deadline <= situation.now)


def _deadline(situation: Situation) -> float:
    return situation.progress.deadline if situation.progress else 0.0


# Not in work --------------------------------------------------------------------------------------------------------


def _idle(situation: Situation) -> _Step:
    """A node in `upgrade-done`, or without a state."""
    state = situation.state
    if situation.policy is None:
        if state is State.UNKNOWN:
            return Stay(because=Because.POLICY_OFF, sentence="no policy upgrades this node")
        return _Go(State.UNKNOWN, Because.POLICY_OFF, "no policy upgrades this node any more", _remembered(situation))
    driver = situation.driver
    if situation.is_requested and situation.has_good_driver:
        asked_off = NodeChange(annotations={UPGRADE_REQUESTED: None})
        return _done(situation, Because.UP_TO_DATE, "an upgrade was asked for, and the driver is the wanted one", asked_off)
    if situation.waits_for_safe_load:
        return _require(situation, Because.SAFE_LOAD, "the driver's init container waits until the node is free")
    if driver is None:
        return Stay(because=Because.NO_DRIVER, sentence="no driver pod is here")
    if situation.is_requested:
        return _require(situation, Because.ORDERED, f"the annotation {UPGRADE_REQUESTED} asks for it")
    if driver.is_orphan:
        sentence = f"the driver pod {driver.ref} has no owner; it stays until an upgrade is asked for"
        return (
            Stay(because=Because.UP_TO_DATE, sentence=sentence) if state is State.DONE else _done(situation, Because.UP_TO_DATE, sentence)
        )
    if not situation.wanted or situation.daemon_set is None:
        return Stay(because=Because.NO_REVISION, sentence="the newest template of the driver DaemonSet is not known yet")
    if not situation.is_synced(driver):
        return _require(situation, Because.OUTDATED, f"the driver pod {driver.ref} is not made from the newest template")
    if state is State.DONE:
        return Stay(because=Because.UP_TO_DATE, sentence="the driver is the wanted one")
    return _done(situation, Because.UP_TO_DATE, "the driver is the wanted one")


def _remembered(situation: Situation) -> Progress | None:
    """What is kept of the record where nothing is going on: what ended well, and what failed."""
    progress = situation.progress
    if progress is None or not (progress.done or progress.failures):
        return None
    return Progress(node=progress.node, target=progress.target, failures=progress.failures, done=progress.done)


def _done(situation: Situation, because: Because, sentence: str, change: NodeChange | None = None) -> _Go:
    kept = dict.fromkeys((INITIAL_UNSCHEDULABLE, WAIT_STARTED, VALIDATION_STARTED, REQUESTOR_MODE))
    return _Go(State.DONE, because, sentence, _remembered(situation), NodeChange(annotations=kept).and_then(change or NodeChange()))


def _require(situation: Situation, because: Because, sentence: str) -> _Go:
    """A node that has to wait for its turn. Whether it is cordoned now is noted where NVIDIA's controller looks for it."""
    is_ours = bool(situation.progress and situation.progress.is_cordoned)
    change = NodeChange(annotations={INITIAL_UNSCHEDULABLE: "true" if situation.node.unschedulable and not is_ours else None})
    is_ordered = because is Because.ORDERED
    return _go(
        situation, State.REQUIRED, because, sentence, change, target=situation.wanted, attempt=0, not_before=0.0, is_ordered=is_ordered
    )


def _required(situation: Situation) -> _Step:
    """A node that waits for its turn."""
    progress, driver = situation.progress, situation.driver
    if situation.policy is None:
        return _strip(situation)
    is_asked_for = situation.is_requested or situation.waits_for_safe_load
    if progress and not (progress.is_ordered or progress.is_cordoned or is_asked_for) and situation.has_good_driver:
        return _done(situation, Because.UP_TO_DATE, "the driver is the wanted one after all")
    if progress and progress.attempt and progress.target != situation.wanted != "":
        sentence = "the driver DaemonSet has a new template: its tries count anew"
        return _go(situation, State.REQUIRED, Because.NEW_TARGET, sentence, target=situation.wanted, attempt=0, not_before=0.0)
    if situation.node.labels.get(UPGRADE_SKIP) == "true":
        return Stay(because=Because.SKIPPED, sentence=f"the node has the label {UPGRADE_SKIP}=true")
    if driver is not None and not driver.is_orphan and not situation.wanted:
        return Stay(because=Because.NO_REVISION, sentence="the newest template of the driver DaemonSet is not known yet")
    if not situation.node.is_ready:
        return Stay(because=Because.NODE_NOT_READY, sentence="the node is not Ready: it is begun when it is")
    if situation.settings.skip_cordoned and situation.node.unschedulable and not (progress and progress.is_cordoned):
        return Stay(because=Because.PRE_CORDONED, sentence="somebody else has cordoned the node, and such nodes are skipped")
    if progress and progress.not_before > situation.now:
        return Stay(because=Because.BACKING_OFF, sentence=_failed_words(progress), again_at=progress.not_before)
    if not situation.turn.is_granted:
        return Stay(because=situation.turn.because, sentence=situation.turn.sentence, again_at=situation.turn.again_at)
    return _start(situation)


def _strip(situation: Situation) -> _Go:
    """Upgrades are off for a node that waits: nothing of ours stays, an own cordon of an earlier try included."""
    change = NodeChange(annotations={INITIAL_UNSCHEDULABLE: None}, unschedulable=_opened(situation))
    return _Go(State.UNKNOWN, Because.POLICY_OFF, "no policy upgrades this node any more", _remembered(situation), change)


def _failed_words(progress: Progress) -> str:
    failure = progress.last_failure
    return f"try {progress.attempt} failed: {failure.sentence}" if failure else "it is tried again later"


def _start(situation: Situation) -> _Go:
    """The node's turn has come: cordon, record and state in one write."""
    progress, node, policy = situation.progress, situation.node, situation.policy
    assert policy is not None
    is_ours = bool(progress and progress.is_cordoned and node.unschedulable)
    was_closed = node.unschedulable and not is_ours
    is_same_target = progress is not None and progress.target == situation.wanted and bool(progress.devices)
    changes: dict[str, Any] = {
        "target": situation.wanted,
        "policy": situation.group,
        "rules": written_policy(policy),
        "is_cordoned": not was_closed,
        "devices": dict(progress.devices) if progress and is_same_target else _devices(node),
        "attempt": (progress.attempt if progress else 0) + 1,
        "not_before": 0.0,
    }
    annotations = {UPGRADE_REQUESTED: None, ACCEPT: None, INITIAL_UNSCHEDULABLE: "true" if was_closed else None}
    change = NodeChange(annotations=annotations, unschedulable=True)
    started = replace(situation, progress=msgspec.structs.replace(_progress(situation, Because.STARTED), rules=changes["rules"]))
    if situation.has_maintenance:
        change = change.and_then(NodeChange(annotations={REQUESTOR_MODE: "true"}, unschedulable=node.unschedulable))
        changes["is_cordoned"] = False
        return _go(started, State.MAINTENANCE, Because.STARTED, "a maintenance operator is asked to free the node", change, **changes)
    if may_only_restart(situation):
        sentence = "nothing that the driver is built from has changed: the pod alone is restarted, nobody is evicted"
        return _go(started, State.POD_RESTART, Because.RESTART_ONLY, sentence, change, **changes)
    return _go(started, State.CORDON, Because.STARTED, "it is cordoned", change, **changes)


def _devices(node: NodeView) -> dict[str, int]:
    """How many of each resource the node has to have again; where none is allocatable now, what there is at all."""
    return {name: count or node.capacity.get(name, 0) for name, count in node.allocatable.items()}


def may_only_restart(situation: Situation) -> bool:
    """Whether the new driver is the old one (equal digests), so that its pod can be restarted under its users."""
    driver = situation.driver
    if driver is None or driver.is_orphan or situation.is_synced(driver):
        return False
    if situation.is_requested or situation.waits_for_safe_load:
        return False
    return driver.digest == situation.wanted_digest != ""


# Before the old driver goes -----------------------------------------------------------------------------------------


def _cordon(situation: Situation) -> _Step:
    return _go(situation, State.WAIT_FOR_JOBS, Because.STARTED, "it is cordoned", NodeChange(unschedulable=True))


def _wait_for_jobs(situation: Situation) -> _Step:
    selector = situation.in_force.wait_for_completion.pod_selector
    if not selector.requirements:
        return _go(situation, State.POD_DELETION, Because.JOBS_DONE, "the policy waits for nobody")
    if situation.jobs == ():
        return _go(situation, State.POD_DELETION, Because.JOBS_DONE, f"no pod of {selector.text} runs any more")
    if _is_late(situation):
        return _go(situation, State.POD_DELETION, Because.JOBS_TIMED_OUT, f"pods of {selector.text} did not finish in time")
    sentence = f"waits for pods of {selector.text}: {_some(situation.jobs or ())}"
    return Stay(because=Because.WAITING_FOR_JOBS, sentence=sentence, again_at=_deadline(situation), work=Work.LOOK_FOR_JOBS)


def _some(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return (", ".join(names[:5]) or "being looked for") + more


def _pod_deletion(situation: Situation) -> _Step:
    freeing = situation.freeing
    if freeing is not None and freeing.is_done:
        return _go(situation, State.POD_RESTART, Because.FREED, "nobody uses the driver any more")
    failure = freeing.failure if freeing else ""
    if failure or _is_late(situation):
        why = failure or _late_words(situation)
        if situation.in_force.drain.enable:
            return _go(situation, State.DRAIN, Because.NOT_FREED, why)
        return _try_again(situation, why)
    return _freeing(situation, Work.FREE)


def _late_words(situation: Situation) -> str:
    blockers = situation.freeing.blockers if situation.freeing else ()
    return f"the time for it is over, and still there are {_some(blockers)}" if blockers else "the time for it is over"


def _drain(situation: Situation) -> _Step:
    freeing = situation.freeing
    if not situation.in_force.drain.enable or (freeing is not None and freeing.is_done):
        return _go(situation, State.POD_RESTART, Because.FREED, "nobody uses the driver any more")
    if (freeing is not None and freeing.failure) or _is_late(situation):
        return _try_again(situation, (freeing.failure if freeing else "") or _late_words(situation))
    return _freeing(situation, Work.DRAIN)


def _freeing(situation: Situation, work: Work) -> Stay:
    blockers = situation.freeing.blockers if situation.freeing else ()
    sentence = f"waits for {_some(blockers)}" if blockers else "pods that use the driver are taken off"
    return Stay(because=Because.FREEING, sentence=sentence, again_at=_deadline(situation), work=work)


def _opened(situation: Situation) -> bool | None:
    """What `unschedulable` becomes when the node is let go: our own cordon goes, any other stays."""
    return False if situation.progress and situation.progress.is_cordoned else None


def _try_again(situation: Situation, why: str) -> _Go:
    """A try that failed while the old driver still runs: nothing is lost, so the node is opened and comes back later."""
    progress, settings = situation.progress, situation.settings
    assert progress is not None
    failures = _failures(situation, Because.NOT_FREED, why, is_driver_gone=False)
    change = NodeChange(unschedulable=_opened(situation))
    if progress.attempt >= settings.attempts:
        sentence = f"{why} (try {progress.attempt}, the last one for this driver)"
        return _go(situation, State.FAILED, Because.NOT_FREED, sentence, change, failures=failures, is_cordoned=False)
    pause = settings.retry_pause * 2 ** (progress.attempt - 1)
    not_before = situation.now + pause
    sentence = f"{why}; it is tried again in {pause:.0f} s"
    return _go(situation, State.REQUIRED, Because.NOT_FREED, sentence, change, failures=failures, not_before=not_before, is_cordoned=False)


def _failures(situation: Situation, because: Because, why: str, *, is_driver_gone: bool) -> list[Failure]:
    progress = situation.progress
    assert progress is not None
    failure = Failure(situation.now, progress.target, because.value, why[:MAX_SENTENCE], is_driver_gone=is_driver_gone)
    return [*progress.failures, failure][-MAX_FAILURES:]


def _give_up(situation: Situation) -> _Go:
    """The policy went while the old driver still runs: all is taken back."""
    annotations = dict.fromkeys((INITIAL_UNSCHEDULABLE, WAIT_STARTED, REQUESTOR_MODE))
    change = NodeChange(annotations=annotations, unschedulable=_opened(situation))
    sentence = "no policy upgrades this node any more, and its driver has not been touched: all is taken back"
    return _Go(State.UNKNOWN, Because.POLICY_OFF, sentence, _remembered(situation), change)


def _maintenance(situation: Situation) -> _Step:
    """NVIDIA's requestor mode: an object asks a maintenance operator to free the node."""
    if not situation.has_maintenance or situation.maintenance == "missing":
        why = "no maintenance operator is there" if not situation.has_maintenance else "its NodeMaintenance is gone"
        change = NodeChange(annotations={REQUESTOR_MODE: None})
        return _go(situation, State.REQUIRED, Because.MAINTENANCE_OFF, f"{why}: it waits for its turn again", change)
    if situation.maintenance == "ready":
        return _go(situation, State.POD_RESTART, Because.MAINTENANCE, "the maintenance operator has freed the node")
    return Stay(because=Because.MAINTENANCE, sentence="the maintenance operator frees the node")


# From the old driver to the new one ---------------------------------------------------------------------------------


def _after_maintenance(situation: Situation) -> _Step:
    return _go(situation, State.POD_RESTART, Because.MAINTENANCE, "nobody writes this state: it goes on as after a maintenance")


def _pod_restart(situation: Situation) -> _Step:
    driver = situation.driver
    going = next((pod for pod in situation.drivers if pod.is_terminating), None)
    deadline = _deadline(situation)
    if driver is not None and going is None and not situation.is_synced(driver):
        if not driver.is_orphan and not situation.wanted:
            return _late_or(
                situation, Stay(because=Because.NO_REVISION, sentence="its newest template is not known yet", again_at=deadline)
            )
        sentence = f"the driver pod {driver.ref} is deleted"
        return Stay(because=Because.DRIVER_OUTDATED, sentence=sentence, work=Work.RESTART_DRIVER, pod=driver)
    if going is not None:
        sentence = f"waits for the driver pod {going.ref} to be gone"
        return _late_or(situation, Stay(because=Because.DRIVER_STOPPING, sentence=sentence, again_at=deadline))
    if driver is None:
        what = (
            f"waits for {situation.daemon_set.ref} to make a driver pod" if situation.daemon_set else "no driver DaemonSet matches the node"
        )
        return _late_or(situation, Stay(because=Because.NO_DRIVER, sentence=what, again_at=deadline))
    if situation.waits_for_safe_load:
        safe = NodeChange(annotations={SAFE_LOAD: None})
        return _same(situation, Because.SAFE_LOAD, "the node is free: the driver may load", safe)
    if driver.is_ready:
        return _go(situation, State.VALIDATION, Because.DRIVER_READY, f"the driver pod {driver.ref} is ready")
    words = f"the driver pod {driver.ref} is not ready{f' ({driver.trouble})' if driver.trouble else ''}"
    if driver.restarts > situation.settings.failing_restarts:
        return _fail(situation, Because.DRIVER_FAILING, f"{words}: a container has restarted {driver.restarts} times")
    return _late_or(situation, Stay(because=Because.DRIVER_STARTING, sentence=words, again_at=deadline))


def _late_or(situation: Situation, stay: Stay, because: Because = Because.DRIVER_TIMED_OUT) -> _Step:
    return _fail(situation, because, f"{stay.sentence}, and its time is over") if _is_late(situation) else stay


def _fail(situation: Situation, because: Because, why: str) -> _Go:
    """The new driver is not well: the node stays closed."""
    return _go(situation, State.FAILED, because, why, failures=_failures(situation, because, why, is_driver_gone=True))


def _validation(situation: Situation) -> _Step:
    driver = situation.driver
    if driver is not None and situation.wanted and not situation.is_synced(driver):
        return _go(
            situation, State.POD_RESTART, Because.NEW_TARGET, f"the driver pod {driver.ref} is outdated again", target=situation.wanted
        )
    if situation.waits_for_safe_load:
        safe = NodeChange(annotations={SAFE_LOAD: None})
        return _same(situation, Because.SAFE_LOAD, "the node is free: the driver may load", safe)
    if situation.node.annotations.get(ACCEPT) == "true":
        return _go(situation, State.UNCORDON, Because.ACCEPTED, "a person accepts the node as it is")
    missing = _not_valid(situation)
    if missing is None:
        return _go(situation, State.UNCORDON, Because.VALIDATED, "driver, validators and devices are well")
    because, sentence = missing
    return _late_or(situation, Stay(because=because, sentence=sentence, again_at=_deadline(situation)), Because.VALIDATION_TIMED_OUT)


def _not_valid(situation: Situation) -> tuple[Because, str] | None:
    """What is still missing before the node may be opened; None where nothing is."""
    if not situation.has_good_driver:
        return Because.DRIVER_STARTING, "waits for the driver pod to be ready"
    if situation.needs_validator:
        if not situation.validators:
            return Because.VALIDATING, "waits for a validator pod"
        sick = next((pod for pod in situation.validators if not pod.is_ready or pod.is_terminating), None)
        if sick is not None:
            return Because.VALIDATING, f"waits for the validator pod {sick.ref} to be ready"
    if not situation.node.is_ready:
        return Because.NODE_NOT_READY, "waits for the node to be Ready"
    wanted = situation.progress.devices if situation.progress else {}
    for name, count in wanted.items():
        there = situation.node.allocatable.get(name, 0)
        if there < count:
            return Because.DEVICES_MISSING, f"waits for {count} {name}, of which {there} are allocatable"
    return None


def _uncordon(situation: Situation) -> _Step:
    progress = situation.progress
    assert progress is not None
    has_opened = progress.is_cordoned
    ended = Progress(node=progress.node, target=progress.target, failures=progress.failures, done=situation.now)
    change = NodeChange(annotations={ACCEPT: None}, unschedulable=_opened(situation))
    sentence = "it is opened" if has_opened else "it stays cordoned, as it was before"
    because = Because.OPENED if has_opened else Because.STAYS_CORDONED
    return _done(replace(situation, progress=ended), because, sentence, change)


def _failed(situation: Situation) -> _Step:
    progress = situation.progress
    if progress is None:
        return _adopt(situation, State.FAILED)
    if situation.node.annotations.get(ACCEPT) == "true":
        return _go(situation, State.UNCORDON, Because.ACCEPTED, "a person accepts the node as it is")
    if situation.policy is not None and situation.is_requested and not situation.has_good_driver:
        return _require(situation, Because.ORDERED, f"the annotation {UPGRADE_REQUESTED} asks for it")
    if situation.policy is not None and situation.wanted and progress.target and situation.wanted != progress.target:
        return _require(situation, Because.NEW_TARGET, "the driver DaemonSet has a new template")
    if situation.has_good_driver and _not_valid(situation) is None:
        return _go(situation, State.UNCORDON, Because.RECOVERED, "driver, validators and devices are well after all")
    failure = progress.last_failure
    why = failure.sentence if failure else "another controller gave it up"
    sentence = f"{why}; a new driver template, a driver that becomes healthy, or the annotation {ACCEPT}=true ends this"
    return Stay(because=Because.NEEDS_A_LOOK, sentence=sentence)


_STEPS: Final[Mapping[State, Callable[[Situation], _Step]]] = {
    State.UNKNOWN: _idle,
    State.DONE: _idle,
    State.REQUIRED: _required,
    State.CORDON: _cordon,
    State.WAIT_FOR_JOBS: _wait_for_jobs,
    State.POD_DELETION: _pod_deletion,
    State.DRAIN: _drain,
    State.MAINTENANCE: _maintenance,
    State.AFTER_MAINTENANCE: _after_maintenance,
    State.POD_RESTART: _pod_restart,
    State.VALIDATION: _validation,
    State.UNCORDON: _uncordon,
    State.FAILED: _failed,
}
