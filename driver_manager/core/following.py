"""What a follower does about a node: it frees what gpu-operator does not know, and says what the node waits for. It moves nothing.

gpu-operator deletes the driver pod when it is through with its own pods, and nobody can make it wait. So all that only we know is taken off
as soon as the node is cordoned; what is left then is the agent's, which runs in the new driver pod and knows the same table.
"""

from typing import Final

import msgspec

from driver_manager.core.parking import NOTHING_HELD, TOO_MANY_PARKED, adopted, is_left_over, is_recorded, put_on, taken_off
from driver_manager.core.parking import is_held as held
from driver_manager.core.rollout_record import MAX_PAUSED, TOO_MANY_PAUSED, Progress, encode
from driver_manager.core.rollout_states import BEFORE_RESTART, IDLE, Because, State
from driver_manager.core.rollout_steps import give_back_maintenance, opened, remembered
from driver_manager.core.situation import Decision, NodeChange, Situation, Stay, Work
from driver_manager.names import REQUESTOR_MODE, ROLLOUT, UPGRADE_STATE

FREED_IN: Final = BEFORE_RESTART - {State.MAINTENANCE}
"""States in which the old driver runs and gpu-operator, not a maintenance operator, frees the node."""


def follow(situation: Situation) -> Decision:
    """What to do about a node that gpu-operator leads."""
    written = _left_over(situation) or _held_off(situation)
    if written is None:
        return Decision((), NodeChange(), _stay(situation), situation.progress)
    progress, change = written
    record = encode(progress) if progress is not None else None
    return Decision((), change.and_then(NodeChange(annotations={ROLLOUT: record})).needed_on(situation.node), None, progress)


def _left_over(situation: Situation) -> tuple[Progress | None, NodeChange] | None:
    """What is to be taken back, and the record after that: of a time when ours led, and of what has kept DaemonSets off.

    gpu-operator ends what ours has begun, the cordon too. Only where it is through with the node, or has taken its label off, is our record
    shortened to what is remembered: else a cordon that an admin makes later would be taken for ours. A cordon of ours that is still there
    goes with it, but no node is opened without its driver.
    """
    node, progress, state = situation.node, situation.progress, situation.state
    if state not in IDLE or situation.bad_progress or _is_closed_without_driver(situation) or situation.holds_maintenance:
        return None
    is_held = is_left_over(node, progress) or held(progress) or REQUESTOR_MODE in node.annotations
    unmarked = taken_off(node, progress).and_then(NodeChange(annotations={REQUESTOR_MODE: None}))
    if state is State.REQUIRED:
        kept = msgspec.structs.replace(progress, **NOTHING_HELD) if progress is not None else None
        return (kept, unmarked) if is_held else None
    kept = remembered(progress)
    if progress == kept and not is_held:
        return None
    return kept, NodeChange(unschedulable=opened(situation)).and_then(unmarked)


def _held_off(situation: Situation) -> tuple[Progress, NodeChange] | None:
    """What keeps DaemonSets off is put on the node before a pod of theirs goes, which would come back at once."""
    node, hold = situation.node, situation.freeing.hold if situation.freeing else None
    if situation.state not in FREED_IN or situation.bad_progress or not node.unschedulable:
        return None
    if situation.progress is None and any((shown := adopted(node)).values()):
        return Progress(node=node.uid, **shown), NodeChange()  # its record was lost: what is on it has to go at the end
    if not hold or not hold.missing_on(node):
        return None
    change, fields = put_on(node, situation.progress, hold)
    is_done = not change.needed_on(node) and is_recorded(situation.progress, fields)
    if is_done or len(fields["paused"]) > MAX_PAUSED:
        return None
    return msgspec.structs.replace(situation.progress or Progress(node=node.uid), **fields), change


def _is_closed_without_driver(situation: Situation) -> bool:
    driver = situation.driver
    return situation.has_own_cordon and (driver is None or not driver.is_ready)


def _stay(situation: Situation) -> Stay:
    state = situation.state
    if state is None:
        label = situation.node.labels.get(UPGRADE_STATE, "")
        return Stay(because=Because.UNKNOWN_STATE, sentence=f"the label {UPGRADE_STATE} is {label!r}, which is no state")
    if state in FREED_IN:
        return _freeing(situation)
    if state in IDLE and (stay := _maintenance_left(situation)) is not None:
        return stay
    if state in (State.UNKNOWN, State.DONE) and _is_closed_without_driver(situation):
        sentence = "an upgrade of ours was broken off, and the driver does not run: the node is opened when it does"
        return Stay(because=Because.NEEDS_A_LOOK, sentence=sentence)
    match state:
        case State.DONE if situation.has_good_driver:
            return Stay(because=Because.UP_TO_DATE, sentence="the driver is the wanted one")
        case State.REQUIRED:
            return Stay(because=Because.FOLLOWING, sentence="gpu-operator begins it when it is its turn")
        case State.FAILED:
            return Stay(because=Because.NEEDS_A_LOOK, sentence="gpu-operator has given it up")
        case _:
            return Stay(because=Because.FOLLOWING, sentence="gpu-operator leads it")


def _maintenance_left(situation: Situation) -> Stay | None:
    """What was asked of a maintenance operator is given back where nothing goes on, but no node is opened without its driver."""
    driver = situation.driver
    if situation.holds_maintenance and situation.daemon_set is not None and (driver is None or not driver.is_ready):
        sentence = "a maintenance of ours was broken off, and the driver does not run: its NodeMaintenance is given back when it does"
        return Stay(because=Because.NEEDS_A_LOOK, sentence=sentence)
    return give_back_maintenance(situation)


def _freeing(situation: Situation) -> Stay:
    """A node that gpu-operator has begun and whose driver still runs."""
    if not situation.node.unschedulable:
        return Stay(because=Because.FOLLOWING, sentence="gpu-operator is about to cordon it")
    freeing = situation.freeing
    if freeing is None:
        because, sentence = Because.FREEING, "pods that gpu-operator does not know are taken off"
        if situation.state is State.WAIT_FOR_JOBS and situation.jobs:
            because, sentence = Because.WAITING_FOR_JOBS, f"gpu-operator and ours wait for pods to finish: {', '.join(situation.jobs[:5])}"
    elif freeing.hold and freeing.hold.missing_on(situation.node):
        because, sentence = Because.NOT_FREED, TOO_MANY_PAUSED if len(freeing.hold.paused) > MAX_PAUSED else TOO_MANY_PARKED
    elif freeing.is_done or not (freeing.failure or freeing.blockers):
        because, sentence = Because.FOLLOWING, "nobody is left on it that gpu-operator does not know"
    elif freeing.failure:
        because, sentence = Because.NOT_FREED, f"gpu-operator does not know that this cannot go: {freeing.failure}"
    else:
        because, sentence = Because.FREEING, f"gpu-operator does not know, so ours takes off: {'; '.join(freeing.blockers[:5])}"
    return Stay(because=because, sentence=sentence, work=Work.FREE_UNKNOWN)
