"""What to do next about one node: a plain function of what was seen, the policy and the time.

`decide` passes as many book-keeping states as can be passed at once and gives the sum as one change of the Node object; with
`one_at_a_time` it passes one. Every state has an exit for every input, and every wait in it has a deadline that stands on the node.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import msgspec

from driver_manager.core.fleet import FleetPod
from driver_manager.core.parking import TOO_MANY_PARKED, adopted, is_left_over, is_recorded, put_on, taken_off
from driver_manager.core.rollout_record import MAX_DEVICES, MAX_NAME, MAX_PAUSED, MAX_TRIES, TOO_MANY_PAUSED, Progress
from driver_manager.core.rollout_states import BEFORE_RESTART, IDLE, WORKING, Because, State
from driver_manager.core.rollout_steps import (
    NO_POLICY,
    Go,
    Step,
    anew,
    done,
    fail,
    give_back_maintenance,
    go,
    is_late,
    opened,
    remembered,
    require,
    same,
    take_back,
    try_again,
    wait,
    wait_or_fail,
)
from driver_manager.core.situation import Decision, Move, NodeChange, Situation, Stay, Turn, Work
from driver_manager.core.upgrade_policy import written_policy
from driver_manager.names import (
    ACCEPT,
    GPU_DRA_DRIVER,
    INITIAL_UNSCHEDULABLE,
    REQUESTOR_MODE,
    ROLLOUT,
    SAFE_LOAD,
    UPGRADE_REQUESTED,
    UPGRADE_SKIP,
    UPGRADE_STATE,
)

MAX_PASSED: Final = 12
"""More states than a node can pass in one decision."""


def decide(situation: Situation) -> Decision:
    """What to do about a node now."""
    before = situation
    moves: list[Move] = []
    change = NodeChange()
    rest: Stay | None = None
    while len(moves) < MAX_PASSED:
        step = _step(situation)
        if isinstance(step, Stay):
            rest = step
            break
        assert situation.state is not None
        moves.append(Move(situation.state, step.to, step.because, step.sentence))
        change = change.and_then(step.written)
        is_new_state = step.to is not situation.state
        situation = replace(situation, node=step.written.on(situation.node), state=step.to, progress=step.progress)
        if is_new_state:  # what was seen was seen in the old one
            situation = replace(situation, freeing=None, jobs=None, turn=Turn())
        if situation.settings.one_at_a_time:
            break
    return Decision(tuple(moves), change.needed_on(before.node), rest, situation.progress)


def _step(situation: Situation) -> Step:
    """The next step of a node, by its state."""
    state = situation.state
    if state is None:
        label = situation.node.labels.get(UPGRADE_STATE, "")
        sentence = f"the label {UPGRADE_STATE} is {label!r}, which is no state: set it to {State.REQUIRED} or take it off"
        return Stay(because=Because.UNKNOWN_STATE, sentence=sentence)
    if situation.bad_progress:
        sentence = f"the annotation {ROLLOUT} cannot be used ({situation.bad_progress}): take it off"
        return Stay(because=Because.BAD_RECORD, sentence=sentence)
    if (state in WORKING and _is_moved(situation)) or (state is State.FAILED and situation.progress is None):
        return _adopt(situation, state)
    if situation.policy is None and state in BEFORE_RESTART:
        return take_back(situation)
    if state in IDLE and not situation.bad_policy and is_left_over(situation.node, situation.progress):
        words = "it was parked though nothing goes on there, and is not any more"
        return Go(state, Because.LEFT_OVER, words, situation.progress, taken_off(situation.node, situation.progress))
    if state in BEFORE_RESTART - {State.CORDON, State.MAINTENANCE} and not situation.node.unschedulable:
        closed = NodeChange(unschedulable=True)
        return same(situation, Because.STARTED, "somebody took its cordon off, and it is made again", closed, is_cordoned=True)
    return _STEPS[state](situation)


def _is_moved(situation: Situation) -> bool:
    """Whether its label is not what our record was written with."""
    return situation.progress is None or situation.progress.state != situation.state


def _adopt(situation: Situation, state: State) -> Step:
    """A node in mid-flow that another controller began or moved, or whose record was taken off: its wait begins anew, its cordon is ours.

    Only the annotation of its initial state says that the cordon was there before, or that of the maintenance operator that it is theirs.
    """
    if state is State.FAILED and situation.daemon_set is not None and not situation.wanted:
        return Stay(because=Because.NO_REVISION, sentence=_UNKNOWN_TEMPLATE)  # which template failed has to be on the record
    node, progress = situation.node, situation.progress
    if progress is not None and progress.state in {*WORKING, State.FAILED}:
        return go(situation, state, Because.TAKEN_OVER, f"somebody moved it to {state}: the time for that begins anew")
    is_foreign = INITIAL_UNSCHEDULABLE in node.annotations or REQUESTOR_MODE in node.annotations
    return go(
        situation,
        state,
        Because.TAKEN_OVER,
        f"it is in {state} without a record: the work goes on from there",
        target=situation.wanted,
        policy=situation.group[:MAX_NAME],
        rules=written_policy(situation.policy) if situation.policy else {},
        is_cordoned=node.unschedulable and not is_foreign,
        devices=_devices(situation) if state in BEFORE_RESTART else {},
        attempt=1,
        **adopted(node),
    )


_UNKNOWN_TEMPLATE: Final = "the newest template of the driver DaemonSet is not known yet"


def _is_accepted(situation: Situation) -> bool:
    return situation.node.annotations.get(ACCEPT) == "true"


# Not in work --------------------------------------------------------------------------------------------------------


def _idle(situation: Situation) -> Step:
    """A node in `upgrade-done`, or without a state."""
    state, driver = situation.state, situation.driver
    is_stale = situation.progress != remembered(situation.progress)
    if situation.policy is None:
        if situation.bad_policy or (state is State.UNKNOWN and not is_stale and not situation.holds_maintenance):
            return _no_policy(situation)
        return take_back(situation)
    if state is State.DONE and is_stale:
        return done(situation, Because.ORDERED, "somebody ended its upgrade: what was ours is taken back")
    is_held = situation.has_own_cordon or situation.holds_maintenance
    if state is State.UNKNOWN and is_held and not (situation.has_good_driver and _not_valid(situation) is None):
        return require(situation, Because.ORDERED, "its label was taken off in mid-flow: it is begun again")
    if (stay := give_back_maintenance(situation)) is not None:  # a predecessor ended before it could
        return stay
    if situation.is_requested and situation.has_good_driver and not situation.waits_for_safe_load:
        asked_off = NodeChange(annotations={UPGRADE_REQUESTED: None})
        return done(situation, Because.UP_TO_DATE, "an upgrade was asked for, and the driver is the wanted one", asked_off)
    if situation.waits_for_safe_load:
        return require(situation, Because.SAFE_LOAD, "the driver's init container waits until the node is free")
    if driver is None:
        return Stay(because=Because.NO_DRIVER, sentence="no driver pod is here")
    if situation.rivals:
        return Stay(because=Because.TWO_DRIVERS, sentence=_two_drivers(situation))
    if situation.is_requested:
        return require(situation, Because.ORDERED, f"the annotation {UPGRADE_REQUESTED} asks for it")
    if driver.is_orphan:
        return _up_to_date(situation, f"the driver pod {driver.ref} has no owner; it stays until an upgrade is asked for")
    if not situation.wanted or situation.daemon_set is None:
        return Stay(because=Because.NO_REVISION, sentence=_UNKNOWN_TEMPLATE)
    if not situation.is_synced(driver):
        return require(situation, Because.OUTDATED, f"the driver pod {driver.ref} is not made from the newest template")
    return _up_to_date(situation, "the driver is the wanted one")


def _two_drivers(situation: Situation) -> str:
    """Which of them is the wanted one cannot be told, and who deletes the pod of either gets another one of it (R2)."""
    return f"more than one driver DaemonSet makes its pods here: {', '.join(situation.rivals)}; delete one, or let it select other nodes"


def _up_to_date(situation: Situation, sentence: str) -> Step:
    if situation.state is State.DONE:
        return _not_on_delete(situation) or Stay(because=Because.UP_TO_DATE, sentence=sentence)
    return done(situation, Because.UP_TO_DATE, sentence)


def _not_on_delete(situation: Situation) -> Stay | None:
    """That the next driver will not ask for anybody's turn; a person hears of it before there is one. None where it will."""
    daemon_set = situation.daemon_set
    if daemon_set is None or daemon_set.is_on_delete:
        return None
    sentence = f"Kubernetes itself replaces the pods of {daemon_set.ref}, past every budget: no node is begun"
    return Stay(because=Because.NOT_ON_DELETE, sentence=f"{sentence} until its updateStrategy has the type OnDelete")


def _no_policy(situation: Situation) -> Stay:
    if situation.bad_policy:
        return Stay(because=Because.BAD_POLICY, sentence=f"its policy cannot be used, so nothing is begun: {situation.bad_policy}")
    return Stay(because=Because.POLICY_OFF, sentence="no policy upgrades this node")


def _required(situation: Situation) -> Step:
    """A node that waits for its turn."""
    progress, turn = situation.progress, situation.turn
    if situation.policy is None:
        return _required_without_policy(situation)
    if _is_fine_after_all(situation):
        asked_off = NodeChange(annotations={UPGRADE_REQUESTED: None})
        return done(situation, Because.UP_TO_DATE, "the driver is the wanted one after all", asked_off)
    if progress and progress.attempt and progress.target != situation.wanted != "":
        sentence = "the driver DaemonSet has a new template: its tries count anew"
        return go(situation, State.REQUIRED, Because.NEW_TARGET, sentence, **anew(situation))
    has_driver = situation.driver is not None and situation.driver.is_ready  # without one it stays closed until it has its turn
    if has_driver and not turn.is_granted and (stay := give_back_maintenance(situation)) is not None:
        return stay
    if (stay := _not_yet(situation)) is not None:
        return stay
    if not turn.is_granted:
        return Stay(because=turn.because, sentence=turn.sentence, again_at=turn.again_at)
    return _start(situation)


def _required_without_policy(situation: Situation) -> Step:
    """All is taken back, unless that would open a node without a driver."""
    driver = situation.driver
    if situation.bad_policy:
        return _no_policy(situation)
    if situation.has_own_cordon and (driver is None or not driver.is_ready):
        return fail(situation, Because.POLICY_OFF, f"{NO_POLICY}, and its driver does not run: it stays cordoned")
    return take_back(situation)


def _is_fine_after_all(situation: Situation) -> bool:
    """Whether there is nothing left to upgrade, whoever wrote the label: then nobody is evicted for it (R11, N43)."""
    if situation.waits_for_safe_load or not situation.has_good_driver:
        return False
    return not situation.has_own_cordon or _not_valid(situation) is None


def _not_yet(situation: Situation) -> Stay | None:
    """Why the node is not begun even if it were its turn; None where nothing speaks against it."""
    progress, driver, node = situation.progress, situation.driver, situation.node
    if node.labels.get(UPGRADE_SKIP) == "true":
        return Stay(because=Because.SKIPPED, sentence=f"the node has the label {UPGRADE_SKIP}=true")
    if not situation.has_own_cordon and (driver is None or situation.daemon_set is None):  # nobody is evicted for nothing
        what = "no driver pod is here" if driver is None else f"no driver DaemonSet would replace the driver pod {driver.ref}"
        return Stay(because=Because.NO_DRIVER, sentence=f"{what}: there is nothing to upgrade")
    if (stay := _not_on_delete(situation)) is not None:
        return stay
    if situation.rivals:
        return Stay(because=Because.TWO_DRIVERS, sentence=_two_drivers(situation))
    if situation.daemon_set is not None and not situation.wanted:
        return Stay(because=Because.NO_REVISION, sentence=_UNKNOWN_TEMPLATE)
    if not node.is_ready:
        return Stay(because=Because.NODE_NOT_READY, sentence="the node is not Ready: it is begun when it is")
    if situation.settings.skip_cordoned and situation.has_foreign_cordon:
        return Stay(because=Because.PRE_CORDONED, sentence="somebody else has cordoned the node, and such nodes are skipped")
    if progress and progress.not_before > situation.now:
        return Stay(because=Because.BACKING_OFF, sentence=_failed_words(progress), again_at=progress.not_before)
    return None


def _failed_words(progress: Progress) -> str:
    failure = progress.last_failure
    return f"try {progress.attempt} failed: {failure.sentence}" if failure else "it is tried again later"


def _start(situation: Situation) -> Go:
    """The node's turn has come: cordon, record and state in one write."""
    progress, node, policy = situation.progress, situation.node, situation.policy
    assert policy is not None
    was_closed = situation.has_foreign_cordon
    tries = progress.attempt if progress and not _is_moved(situation) else 0
    changes: dict[str, Any] = {
        "target": situation.wanted,
        "policy": situation.group[:MAX_NAME],
        "rules": written_policy(policy),
        "is_cordoned": not was_closed,
        "devices": dict(progress.devices) if progress and progress.devices else _devices(situation),
        "attempt": min(tries + 1, MAX_TRIES),
        "not_before": 0.0,
    }
    annotations = {UPGRADE_REQUESTED: None, ACCEPT: None, INITIAL_UNSCHEDULABLE: "true" if was_closed else None}
    if not situation.holds_maintenance:
        annotations[REQUESTOR_MODE] = None
    change = NodeChange(annotations=annotations, unschedulable=True)
    ruled = msgspec.structs.replace(progress or Progress(node=node.uid), rules=changes["rules"])
    started = replace(situation, progress=ruled)
    if situation.has_maintenance:
        change = NodeChange(annotations=annotations)
        changes["is_cordoned"] = situation.has_own_cordon
        return go(started, State.MAINTENANCE, Because.STARTED, "a maintenance operator is asked to free the node", change, **changes)
    if may_only_restart(situation):
        sentence = "nothing that the driver is built from has changed: the pod alone is restarted, nobody is evicted"
        return go(started, State.POD_RESTART, Because.RESTART_ONLY, sentence, change, **changes)
    if turn_hold := situation.turn.hold:
        held, fields = put_on(node, progress, turn_hold)
        change, changes = change.and_then(held), {**changes, **fields}
    return go(started, State.CORDON, Because.STARTED, "it is cordoned", change, **changes)


def _devices(situation: Situation) -> dict[str, int]:
    """How many of each resource the node has to have again; where none is allocatable now, what there is at all.

    A node with too many kinds is not begun (`Looks`); one that others have begun is held to the first of them.
    """
    return {name: count or situation.node.capacity.get(name, 0) for name, count in sorted(situation.devices.items())[:MAX_DEVICES]}


def may_only_restart(situation: Situation) -> bool:
    """Whether the new driver is the old one (equal digests), so that its pod can be restarted under its users."""
    driver = situation.driver
    if driver is None or driver.is_orphan or situation.is_synced(driver):
        return False
    if situation.is_requested or situation.waits_for_safe_load:
        return False
    return driver.digest == situation.wanted_digest != ""


# Before the old driver goes -----------------------------------------------------------------------------------------


def _cordon(situation: Situation) -> Step:
    is_ours = situation.has_own_cordon or not situation.node.unschedulable
    closed = NodeChange(unschedulable=True)
    return go(situation, State.WAIT_FOR_JOBS, Because.STARTED, "it is cordoned", closed, is_cordoned=is_ours)


def _wait_for_jobs(situation: Situation) -> Step:
    selector = situation.in_force.wait_for_completion.pod_selector
    if not selector.requirements:
        return go(situation, State.POD_DELETION, Because.JOBS_DONE, "the policy waits for nobody")
    if situation.jobs == ():
        return go(situation, State.POD_DELETION, Because.JOBS_DONE, f"no pod of {selector.text} runs any more")
    if is_late(situation):
        return go(situation, State.POD_DELETION, Because.JOBS_TIMED_OUT, f"pods of {selector.text} did not finish in time")
    failure = situation.freeing.failure if situation.freeing and situation.jobs is None else ""
    sentence = f"waits for pods of {selector.text}: {failure or _some(situation.jobs or ())}"
    return wait(situation, Because.WAITING_FOR_JOBS, sentence, Work.LOOK_FOR_JOBS)


def _some(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return (", ".join(names[:5]) or "being looked for") + more


def _held_off(situation: Situation) -> Step | None:
    """What keeps DaemonSets off is put on the node before a pod of theirs goes, which would come back at once."""
    hold = situation.freeing.hold if situation.freeing else None
    if not hold or not hold.missing_on(situation.node):
        return None
    change, fields = put_on(situation.node, situation.progress, hold)
    if not change.needed_on(situation.node) and is_recorded(situation.progress, fields):
        return try_again(situation, Because.NOT_FREED, TOO_MANY_PARKED)
    if len(fields["paused"]) > MAX_PAUSED:
        return try_again(situation, Because.NOT_FREED, TOO_MANY_PAUSED)
    words = "DaemonSets that use the driver are kept off"
    return same(situation, Because.HELD_OFF, words, change, since=situation.now, **fields)


def _pod_deletion(situation: Situation) -> Step:
    if (step := _held_off(situation)) is not None:
        return step
    failure = situation.freeing.failure if situation.freeing else ""
    if situation.freeing is not None and situation.freeing.is_done:
        return go(situation, State.POD_RESTART, Because.FREED, "nobody uses the driver any more")
    if not failure and not is_late(situation):
        return wait(situation, _freeing_because(situation), _freeing_words(situation), Work.FREE)
    why = failure or _late_words(situation)
    if situation.in_force.drain.enable:
        return go(situation, State.DRAIN, Because.NOT_FREED, why)
    return try_again(situation, Because.NOT_FREED, why)


def _drain(situation: Situation) -> Step:
    """The whole node is drained; where the policy does not drain, what uses the driver still has to go."""
    failure = situation.freeing.failure if situation.freeing else ""
    if situation.freeing is not None and situation.freeing.is_done:
        return go(situation, State.POD_RESTART, Because.FREED, "nobody uses the driver any more")
    if failure or is_late(situation):
        return try_again(situation, Because.NOT_FREED, failure or _late_words(situation))
    work = Work.DRAIN if situation.in_force.drain.enable else Work.FREE
    return wait(situation, _freeing_because(situation), _freeing_words(situation), work)


def _freeing_because(situation: Situation) -> Because:
    return Because.BLOCKED_BY_BUDGET if situation.freeing is not None and situation.freeing.is_blocked else Because.FREEING


def _freeing_words(situation: Situation) -> str:
    blockers = situation.freeing.blockers if situation.freeing else ()
    return f"waits for {_some(blockers)}" if blockers else "pods that use the driver are taken off"


def _late_words(situation: Situation) -> str:
    blockers = situation.freeing.blockers if situation.freeing else ()
    return f"the time for it is over, and still there: {_some(blockers)}" if blockers else "the time for it is over"


def _maintenance(situation: Situation) -> Step:
    """NVIDIA's requestor mode: an object asks a maintenance operator to free the node. The annotation says that it has been there."""
    is_asked = REQUESTOR_MODE in situation.node.annotations
    is_missing = situation.maintenance in ("", "missing")
    if not situation.has_maintenance or (is_asked and is_missing):
        why = "its NodeMaintenance is gone" if situation.has_maintenance else "no maintenance operator is there"
        change = NodeChange(annotations={REQUESTOR_MODE: None})
        return go(situation, State.REQUIRED, Because.MAINTENANCE_OFF, f"{why}: it waits for its turn again", change)
    if is_missing:
        sentence = "a maintenance operator is asked to free the node"
        return Stay(because=Because.MAINTENANCE, sentence=sentence, work=Work.ASK_MAINTENANCE)
    if not is_asked:
        asked = NodeChange(annotations={REQUESTOR_MODE: "true"})
        return same(situation, Because.MAINTENANCE, "a maintenance operator has been asked", asked)
    if situation.maintenance == "ready":
        return go(situation, State.POD_RESTART, Because.MAINTENANCE, "the maintenance operator has freed the node")
    sentence = "the maintenance operator frees the node, without a limit; deleting its NodeMaintenance takes this back"
    return Stay(because=Because.MAINTENANCE, sentence=sentence)


# From the old driver to the new one ---------------------------------------------------------------------------------


def _after_maintenance(situation: Situation) -> Step:
    return go(situation, State.POD_RESTART, Because.MAINTENANCE, "nobody writes this state: it goes on as after a maintenance")


def _pod_restart(situation: Situation) -> Step:
    driver, outdated = situation.driver, situation.outdated
    going = next((pod for pod in situation.drivers if pod.is_terminating), None)
    if situation.rivals:
        return wait_or_fail(situation, Because.TWO_DRIVERS, _two_drivers(situation))
    if situation.progress is not None and situation.progress.target != situation.wanted != "":
        sentence = "the driver DaemonSet has a new template: its time begins anew"
        return go(situation, State.POD_RESTART, Because.NEW_TARGET, sentence, target=situation.wanted)
    if going is not None:
        return wait_or_fail(situation, Because.DRIVER_STOPPING, f"waits for the driver pod {going.ref} to be gone")
    if outdated is not None:
        return _restart(situation, outdated)
    if driver is None:
        daemon_set = situation.daemon_set
        what = f"waits for {daemon_set.ref} to make a driver pod" if daemon_set else "no driver DaemonSet matches the node"
        return wait_or_fail(situation, Because.NO_DRIVER, what)
    if situation.waits_for_safe_load:
        return _let_load(situation)
    if driver.is_ready:
        return go(situation, State.VALIDATION, Because.DRIVER_READY, f"the driver pod {driver.ref} is ready")
    words = f"the driver pod {driver.ref} is not ready{f' ({driver.trouble})' if driver.trouble else ''}"
    if driver.restarts > situation.settings.failing_restarts:
        return fail(situation, Because.DRIVER_FAILING, f"{words}: a container has restarted {driver.restarts} times")
    return wait_or_fail(situation, Because.DRIVER_STARTING, words)


def _restart(situation: Situation, outdated: FleetPod) -> Step:
    """The old driver pod goes, as soon as it is known that another one takes its place, and somebody is there to end it and begin that."""
    if situation.daemon_set is None:
        stay = wait(situation, Because.NO_DRIVER, f"no driver DaemonSet would replace the driver pod {outdated.ref}")
    elif not situation.wanted:
        stay = wait(situation, Because.NO_REVISION, _UNKNOWN_TEMPLATE)
    elif not situation.node.is_ready:
        stay = wait(situation, Because.NODE_NOT_READY, f"waits for the node to be Ready before the driver pod {outdated.ref} is deleted")
    else:
        stay = wait(situation, Because.DRIVER_OUTDATED, f"the driver pod {outdated.ref} is deleted", Work.RESTART_DRIVER)
        stay = replace(stay, pod=outdated)
    if not is_late(situation):
        return stay
    if stay.because is Because.NODE_NOT_READY:  # what its pods say of themselves is what they said last
        return try_again(situation, Because.NODE_NOT_READY, f"{stay.sentence}, and its time is over")
    if outdated.is_ready:  # nothing is lost yet
        return try_again(situation, Because.DRIVER_TIMED_OUT, f"{stay.sentence}, and its time is over")
    return fail(situation, Because.DRIVER_TIMED_OUT, f"{stay.sentence}, and its time is over")


def _let_load(situation: Situation) -> Go:
    safe = NodeChange(annotations={SAFE_LOAD: None})
    return same(situation, Because.SAFE_LOAD, "the node is free: the driver may load", safe)


def _validation(situation: Situation) -> Step:
    outdated = situation.outdated
    if outdated is not None and situation.wanted:
        sentence = f"the driver pod {outdated.ref} is not made from the newest template"
        return go(situation, State.POD_RESTART, Because.NEW_TARGET, sentence, target=situation.wanted)
    if situation.waits_for_safe_load:
        return _let_load(situation)
    if _is_accepted(situation):
        return go(situation, State.UNCORDON, Because.ACCEPTED, "a person accepts the node as it is")
    missing = _not_valid(situation)
    if missing is None:
        return go(situation, State.UNCORDON, Because.VALIDATED, "driver, validators and devices are well", target=situation.wanted)
    return wait_or_fail(situation, *missing, Because.VALIDATION_TIMED_OUT)


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
    for name, count in (situation.progress.devices if situation.progress else {}).items():
        if (there := situation.devices.get(name, 0)) < count:
            is_dra = name == GPU_DRA_DRIVER
            what, where = (f"devices of {name}", "in its ResourceSlices") if is_dra else (name, "allocatable")
            return Because.DEVICES_MISSING, f"waits for {count} {what}, of which {there} are {where}"
    return None


def _uncordon(situation: Situation) -> Step:
    progress = situation.progress
    assert progress is not None
    if (stay := give_back_maintenance(situation)) is not None:
        return stay
    is_proven = progress.reason in (Because.VALIDATED, Because.RECOVERED)  # not where a person or another controller moved it here
    ended = msgspec.structs.replace(progress, done=situation.now if is_proven else progress.done)
    change = NodeChange(annotations={ACCEPT: None})
    if opened(situation) is False:
        because, sentence = Because.OPENED, "it is opened"
    elif REQUESTOR_MODE in situation.node.annotations:
        because, sentence = Because.MAINTENANCE, "the maintenance operator opens it"
    else:
        because, sentence = Because.STAYS_CORDONED, "no cordon of ours is taken off it"
    return done(replace(situation, progress=ended), because, sentence, change)


def _failed(situation: Situation) -> Step:
    progress = situation.progress
    assert progress is not None
    if _is_accepted(situation):
        return go(situation, State.UNCORDON, Because.ACCEPTED, "a person accepts the node as it is")
    if situation.policy is not None and situation.is_requested and not situation.has_good_driver:
        return require(situation, Because.ORDERED, f"the annotation {UPGRADE_REQUESTED} asks for it")
    if situation.policy is not None and progress.target != situation.wanted != "":
        return require(situation, Because.NEW_TARGET, "the driver DaemonSet has a new template")
    if situation.has_good_driver and _not_valid(situation) is None:
        return go(situation, State.UNCORDON, Because.RECOVERED, "driver, validators and devices are well after all")
    failure = progress.last_failure
    why = failure.sentence if failure else "another controller gave it up"
    cures = f"a new driver template, a driver that becomes healthy, or the annotation {ACCEPT}=true or {UPGRADE_REQUESTED}=true ends this"
    return Stay(because=Because.NEEDS_A_LOOK, sentence=f"{why}; {cures}")


_STEPS: Final[Mapping[State, Callable[[Situation], Step]]] = {
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
