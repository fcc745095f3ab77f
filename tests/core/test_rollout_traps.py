"""No state is a trap: whatever the state and whatever holds, a node comes to rest in time with a named reason, and a cure opens it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from driver_manager import names
from driver_manager.core.fleet import FleetPod
from driver_manager.core.rollout import decide
from driver_manager.core.rollout_record import MAX_TRIES, decode, encode
from driver_manager.core.rollout_states import IDLE, TRANSITIONS, Because, State
from driver_manager.core.rollout_steps import NVIDIAS, remembered
from driver_manager.core.situation import Freeing, NodeChange, RolloutSettings, Turn, Work
from driver_manager.core.snapshot import NodeView
from tests.core.rollouts import DAEMON_SET, NEW, NOW, OLD, World, driver, ends, in_work, node, orphan, policy, record, situation, validator

pytestmark = pytest.mark.slow

WAITING_POLICY = policy(waitForCompletion={"podSelector": "app=training", "timeoutSeconds": 600})
DRAINING_POLICY = policy(drain={"enable": True})
ROLLING = replace(DAEMON_SET, is_on_delete=False)
INPUTS: dict[str, dict[str, Any]] = {
    "driver pod missing": {"drivers": ()},
    "driver pod failing": {"drivers": (driver(NEW, is_ready=False, restarts=11, trouble="CrashLoopBackOff"),)},
    "driver pod never starts": {"drivers": (driver(NEW, is_ready=False, trouble="ImagePullBackOff"),)},
    "driver pod pending": {"drivers": (driver(NEW, is_ready=False, is_bound=False, phase="Pending"),)},
    "driver pod terminating": {"drivers": (driver(OLD, is_terminating=True),)},
    "driver pod terminating, the next one pending": {
        "drivers": (driver(OLD, is_terminating=True), driver(NEW, is_ready=False, is_bound=False, phase="Pending"))
    },
    "orphan": {"drivers": (orphan(),)},
    "orphan, not ready": {"drivers": (orphan(is_ready=False),)},
    "orphan, and a pending pod behind it": {"drivers": (orphan(), driver(NEW, is_ready=False, is_bound=False, phase="Pending"))},
    "orphan without a successor": {"drivers": (orphan(),), "daemon_set": None, "wanted": ""},
    "driver outdated, and stays so": {"drivers": (driver(OLD),)},
    "driver outdated and broken": {"drivers": (driver(OLD, is_ready=False, restarts=30),)},
    "driver ready": {"drivers": (driver(NEW),)},
    "newest template not known": {"wanted": ""},
    "DaemonSet replaces its pods by itself": {"daemon_set": ROLLING},
    "DaemonSet gone, its pod left": {"daemon_set": None, "wanted": ""},
    "DaemonSet and pod gone": {"daemon_set": None, "wanted": "", "drivers": ()},
    "no validator pod": {"drivers": (driver(NEW),), "needs_validator": True},
    "validator not ready": {"drivers": (driver(NEW),), "needs_validator": True, "validators": (validator(is_ready=False),)},
    "validator ready": {"drivers": (driver(NEW),), "needs_validator": True, "validators": (validator(),)},
    "policy off": {"policy": None},
    "policy off, driver gone": {"policy": None, "drivers": ()},
    "policy broken": {"policy": None, "bad_policy": "maxUnavailable is 'x'"},
    "eviction fails": {"freeing": Freeing(failure="a pod may not go")},
    "eviction fails, then the drain": {"freeing": Freeing(failure="a pod may not go"), "policy": DRAINING_POLICY},
    "pods do not go": {"freeing": Freeing(blockers=("default/pod",))},
    "node free": {"freeing": Freeing(is_done=True)},
    "controller restarted, nothing known": {"freeing": None, "jobs": None},
    "jobs run on": {"policy": WAITING_POLICY, "jobs": ("default/job",)},
    "no turn": {"turn": Turn()},
    "maintenance missing": {"has_maintenance": True, "maintenance": "missing"},
    "maintenance pending": {"has_maintenance": True, "maintenance": "pending"},
    "maintenance ready": {"has_maintenance": True, "maintenance": "ready"},
}
NODES: dict[str, dict[str, Any]] = {
    "node NotReady": {"is_ready": False},
    "devices missing": {"allocatable": {"nvidia.com/gpu": 7}},
    "cordon taken off": {"unschedulable": False},
    "kept cordoned": {"annotations": {names.KEEP_CORDON: "true"}},
    "safe load": {"annotations": {names.SAFE_LOAD: "true"}},
    "upgrade asked for": {"annotations": {names.UPGRADE_REQUESTED: "true"}},
    "skipped": {"labels": {names.UPGRADE_SKIP: "true"}},
}
RECORDS = ("none", "fresh", "late", "another state's", "another node's", "undecodable")
UNKNOWN_LABEL = "upgrade-paused"
STATES = (*State, UNKNOWN_LABEL)

ENDED_BY: dict[Because, str] = {
    Because.UP_TO_DATE: "the end",
    Because.NO_DRIVER: "a driver DaemonSet that makes a pod here",
    Because.NO_REVISION: "the DaemonSet's controller, in milliseconds",
    Because.NOT_ON_DELETE: "a person who sets the DaemonSet's update strategy to OnDelete",
    Because.POLICY_OFF: "a policy",
    Because.BAD_POLICY: "a person who mends the policy",
    Because.UNKNOWN_STATE: "a person who takes the label off",
    Because.BAD_RECORD: "a person who takes the annotation off",
    Because.SKIPPED: "a person who takes the skip label off",
    Because.NO_SLOT: "another node that is done",
    Because.NODE_NOT_READY: "the node's kubelet",
    Because.NEEDS_A_LOOK: "a person, a new template, a driver that becomes healthy",
    Because.MAINTENANCE: "the maintenance operator, or a person who deletes its object",
}
"""Where a node may be for good as long as nothing changes, and what ends it."""
REST = {*IDLE, State.FAILED, None}


def world_of(state: str, kind: str, has_foreign_cordon: bool, about: dict[str, Any], held: dict[str, Any]) -> World:
    """A node in a state, with a record of a kind, as the flow leaves it or as others do."""
    is_idle = state in IDLE or state == UNKNOWN_LABEL
    has_record = kind in ("fresh", "late", "another state's")
    known = {"is_cordoned": not has_foreign_cordon, "rules": {}, "deadline": NOW - 1 if kind in ("late", "another state's") else NOW + 100}
    records: dict[str, Any] = {
        "none": None,
        "fresh": record(state, **known),
        "late": record(state, **known),
        "another state's": record(State.VALIDATION, **known),
        "another node's": record(state, node="uid-of-another"),
        "undecodable": '{"version": 2}',
    }
    annotations = dict(about.get("annotations", {}))
    if has_foreign_cordon and not is_idle:
        annotations[names.INITIAL_UNSCHEDULABLE] = "true"
    is_cordoned = has_foreign_cordon or has_record or not is_idle
    made = node(state, records[kind], **{"unschedulable": is_cordoned, **about, "annotations": annotations})
    return World(made, **held)


def check_rest(world: World, what: str) -> None:
    """It comes to rest where it may stay, with a sentence."""
    stay = world.run()
    assert stay.because in ENDED_BY, f"{what}: rests with {stay}"
    assert stay.sentence
    if world.state not in REST:
        assert stay.because in (Because.MAINTENANCE, Because.BAD_RECORD), f"{what}: stays in {world.state}: {stay}"
    for move in world.moves:
        assert move.after is move.before or move.after in TRANSITIONS[move.before], f"{what}: {move} is in no table"
    if world.state is State.FAILED and stay.because is Because.NEEDS_A_LOOK:
        assert names.ACCEPT in stay.sentence


def cure(world: World, template: str) -> None:
    """A person takes off what only a person can, and all is well: with the template there was, or a new one."""
    keys = (names.ROLLOUT,) if world.situation().bad_progress else ()
    labels = {names.UPGRADE_SKIP: None, **({names.UPGRADE_STATE: None} if world.state is None else {})}
    world.change(NodeChange(labels, dict.fromkeys(keys)))
    world.wanted = world.wanted or NEW
    world.run()
    world.wanted = template
    old = tuple(driver(pod.revision, owner=pod.owner, is_ready=True) for pod in world.drivers[:1])
    world.heal(drivers=old if template != NEW and old else (driver(template),))


def check_opened(world: World, is_closed: bool, what: str) -> None:
    """It is done, open or closed as it was before, and nothing of ours is left but the memory."""
    assert world.state is State.DONE, f"{what}: ended in {world.state}: {world.act()}, after {world.moves[-4:]}"
    assert world.node.unschedulable is is_closed, f"{what}: unschedulable is {world.node.unschedulable} after {world.moves}"
    left = {*NVIDIAS, names.ACCEPT, names.UPGRADE_REQUESTED, names.SAFE_LOAD} & {*world.node.annotations}
    assert not left, f"{what}: {left} are left"
    if names.ROLLOUT in world.node.annotations:
        progress = decode(world.node.annotations[names.ROLLOUT])
        assert progress.node != "uid-n" or progress == remembered(progress)


def check(state: str, about: dict[str, Any], held: dict[str, Any]) -> None:
    """From one state, with each kind of record and cordon, to rest, and then by a cure to the end."""
    for number, (kind, has_foreign_cordon) in enumerate(itertools.product(RECORDS, (False, True))):
        template = (NEW, "newer")[(number + number // 2) % 2]
        what = f"{state or 'no label'}, record {kind}, cordon {'foreign' if has_foreign_cordon else 'ours'}, cured with {template}"
        world = world_of(state, kind, has_foreign_cordon, about, held)
        check_rest(world, what)
        cure(world, template)
        world.run()
        is_kept = names.KEEP_CORDON in about.get("annotations", {})
        is_closed = world.node.unschedulable if is_kept else has_foreign_cordon and "unschedulable" not in about
        check_opened(world, is_closed, what)


@pytest.mark.parametrize("held", INPUTS.values(), ids=INPUTS)
@pytest.mark.parametrize("state", STATES, ids=lambda state: str(state) or "no label")
def test_no_state_is_a_trap_whatever_is_seen(state: str, held: dict[str, Any]) -> None:
    """With any input held fixed a node comes to rest in time with a reason that somebody can end, and then a cure opens it."""
    check(state, {}, held)


@pytest.mark.parametrize("about", NODES.values(), ids=NODES)
@pytest.mark.parametrize("state", STATES, ids=lambda state: str(state) or "no label")
def test_no_state_is_a_trap_whatever_the_node(state: str, about: dict[str, Any]) -> None:
    """And so does one that is NotReady, has lost a device, was opened by somebody, or is marked by a person."""
    check(state, about, {})


# Traps that were there ----------------------------------------------------------------------------------------------


def walked(about: NodeView, **seen: Any) -> World:
    """A node, run in a held world until it rests."""
    world = World(about, **seen)
    world.run()
    return world


def test_a_label_taken_off_in_mid_flow_leaves_no_cordon() -> None:
    """Our cordon is in the record: the upgrade begins again, or is taken back where no policy is."""
    made = node(State.UNKNOWN, record(State.POD_DELETION), unschedulable=True)
    begun = walked(made, drivers=(driver(NEW, is_ready=False),), turn=Turn())
    assert (begun.state, begun.node.unschedulable) == (State.REQUIRED, True)
    opened = walked(made, policy=None)
    assert (opened.state, opened.node.unschedulable) == (State.UNKNOWN, False)


def test_a_label_set_to_done_in_mid_flow_leaves_no_cordon() -> None:
    """A person, or another controller, has ended it: what was ours is taken back."""
    world = walked(node(State.DONE, record(State.VALIDATION), unschedulable=True), drivers=(driver(),))
    assert (world.state, world.node.unschedulable) == (State.DONE, False)


def test_cordon_required_taken_over_before_its_cordon_is_opened_in_the_end() -> None:
    """Another controller wrote the state and died before it cordoned the node: the cordon is ours."""
    world = World(node(State.CORDON))
    world.heal(drivers=(driver(OLD),))
    world.run()
    assert (world.state, world.node.unschedulable) == (State.DONE, False)


def test_a_node_taken_over_again_has_its_time_anew() -> None:
    """Ours, then another controller, then ours: the deadline on the record is of a state that the node left long ago."""
    stale = record(State.POD_DELETION, deadline=NOW - 9000)
    decision = decide(situation(node(State.POD_RESTART, stale, unschedulable=True), drivers=()))
    assert [move.because for move in decision.moves] == [Because.TAKEN_OVER]
    assert decision.rest is not None
    assert decision.rest.again_at > NOW


def test_a_controller_that_was_away_fails_no_node_whose_driver_runs() -> None:
    """The time to delete the old driver pod went by without a controller: the node is opened and waits for its turn again."""
    world = World(in_work(State.POD_RESTART, {"deadline": NOW - 1}))
    world.act()
    assert (world.state, world.node.unschedulable) == (State.REQUIRED, False)


@pytest.mark.parametrize("is_ready", [True, False])
def test_no_driver_of_a_node_that_fell_silent_is_deleted(is_ready: bool) -> None:
    """Decision 39: nobody would end it. The node waits to be Ready, and in the end is opened, whatever its pod said last."""
    about = replace(in_work(State.POD_RESTART), is_ready=False)
    decision = decide(situation(about, drivers=(driver(OLD, is_ready=is_ready),)))
    assert decision.rest is not None
    assert (decision.rest.because, decision.rest.work) == (Because.NODE_NOT_READY, Work.NOTHING)
    world = World(replace(in_work(State.POD_RESTART, {"deadline": NOW - 1}), is_ready=False), drivers=(driver(OLD, is_ready=is_ready),))
    world.act()
    assert (world.state, world.node.unschedulable) == (State.REQUIRED, False)


def test_a_template_that_changes_in_mid_flow_is_the_one_that_counts() -> None:
    """The node that fails has failed for the template that it ran, so that it is not begun again at once with the same one."""
    world = World(in_work(State.POD_RESTART), wanted="newer", drivers=(driver("newer", is_ready=False, restarts=11),))
    stay = world.run()
    assert (world.state, stay.because) == (State.FAILED, Because.NEEDS_A_LOOK)
    progress = world.situation().progress
    assert progress is not None
    assert (progress.target, progress.last_failure is not None) == ("newer", True)


def test_no_node_is_opened_without_a_driver_because_its_policy_goes() -> None:
    """It failed, waits for another try, and its driver is gone: it stays closed, and says so."""
    world = walked(node(State.REQUIRED, record(State.REQUIRED), unschedulable=True), policy=None, drivers=())
    assert (world.state, world.node.unschedulable) == (State.FAILED, True)


@pytest.mark.parametrize("state", [State.DONE, State.FAILED])
def test_n43_a_label_set_by_hand_evicts_nobody_for_a_healthy_driver(state: State) -> None:
    """N43, R11: back in upgrade-required by hand a node with the wanted driver is done at once; with another it is taken up, tries anew."""
    before = record(state, attempt=3, is_cordoned=False, done=NOW - 5)
    for known in (before, remembered(before), None):
        made, turn = node(State.REQUIRED, known), Turn(is_granted=True)
        assert [move.after for move in decide(situation(made, drivers=(driver(),), turn=turn)).moves] == [State.DONE]
        decision = decide(situation(made, drivers=(driver(OLD),), turn=turn))
        assert decision.moves[0].after is State.CORDON
        assert decision.progress is not None
        assert decision.progress.attempt == 1


def test_the_pause_between_two_tries_is_bounded() -> None:
    """Without a limit of tries the pause doubles to an hour, and the record stays one that decodes."""
    settings = RolloutSettings(attempts=0)
    for attempt in (1, 2, 40, MAX_TRIES):
        made = in_work(State.POD_DELETION, {"attempt": attempt})
        decision = decide(situation(made, freeing=Freeing(failure="no"), settings=settings))
        assert decision.progress is not None
        assert NOW < decision.progress.not_before <= NOW + 3600
        assert decode(encode(decision.progress)) == decision.progress
    last = decide(situation(node(State.REQUIRED, record(State.REQUIRED, attempt=MAX_TRIES)), turn=Turn(is_granted=True)))
    assert last.progress is not None
    assert decode(encode(last.progress)).attempt == MAX_TRIES


def test_the_cordon_is_kept_where_a_person_wants_it() -> None:
    """The annotation that keeps a cordon keeps ours too when the upgrade ends."""
    world = World(in_work(State.UNCORDON, annotations={names.KEEP_CORDON: "true"}), drivers=(driver(),))
    world.run()
    assert (world.state, world.node.unschedulable) == (State.DONE, True)


def test_an_upgrade_in_maintenance_asks_once_and_gives_back() -> None:
    """The object is made, waited for, and given back before the node is done (weakness 33); the operator's cordon stays the operator's."""
    world = World(node(State.REQUIRED), has_maintenance=True, maintenance="missing")
    world.heal(drivers=(driver(OLD),))
    world.run()
    assert (world.state, world.maintenance) == (State.DONE, "missing")
    assert [move.after for move in world.moves].count(State.MAINTENANCE) == 2  # begun, and marked as asked
    assert names.REQUESTOR_MODE not in world.node.annotations


HELD: dict[str, Any] = {"has_maintenance": True, "maintenance": "ready"}
CLOSED_FOR_US: dict[str, Any] = {"annotations": {names.REQUESTOR_MODE: "true"}, "unschedulable": True}


@pytest.mark.parametrize(
    ("state", "seen", "work"),
    [
        (State.DONE, {"drivers": (driver(),)}, Work.RELEASE_MAINTENANCE),
        (State.UNKNOWN, {"drivers": (driver(),)}, Work.RELEASE_MAINTENANCE),
        (State.UNKNOWN, {"policy": None}, Work.RELEASE_MAINTENANCE),
        (State.REQUIRED, {"drivers": (driver(OLD),)}, Work.RELEASE_MAINTENANCE),
        (State.REQUIRED, {"drivers": (driver(OLD, is_ready=False),)}, Work.NOTHING),
        (State.DONE, {"policy": None, "bad_policy": "x"}, Work.NOTHING),
    ],
)
def test_weakness_33_a_maintenance_at_rest_is_given_back(state: State, seen: dict[str, Any], work: Work) -> None:
    """Whoever left it behind; only a node whose driver does not run keeps it until its turn, so that it is not opened without one."""
    decision = decide(situation(node(state, **CLOSED_FOR_US), **HELD, **seen))
    assert not decision.moves
    assert decision.rest is not None
    assert decision.rest.work is work


def test_a_label_taken_off_in_maintenance() -> None:
    """The driver does not run, so the node is begun again in place of being opened; the maintenance that is there is used."""
    sick = (driver(NEW, is_ready=False),)
    asked = decide(situation(node(State.UNKNOWN, **CLOSED_FOR_US), drivers=sick, **HELD))
    assert ends(asked) is State.REQUIRED
    assert names.INITIAL_UNSCHEDULABLE not in asked.change.annotations
    begun = decide(situation(node(State.REQUIRED, **CLOSED_FOR_US), drivers=sick, turn=Turn(is_granted=True), **HELD))
    assert [move.after for move in begun.moves] == [State.MAINTENANCE, State.POD_RESTART]
    skips = RolloutSettings(skip_cordoned=True)
    assert decide(situation(node(State.REQUIRED, **CLOSED_FOR_US), drivers=sick, turn=Turn(is_granted=True), settings=skips, **HELD)).moves


@pytest.mark.parametrize("state", [State.POD_DELETION, State.DRAIN])
def test_a_budget_is_a_reason_of_its_own(state: State) -> None:
    """While one does not let a pod go, the node says so and not only that it is being freed."""
    held = Freeing(blockers=("pod a/b (budget c)",), is_blocked=True)
    decision = decide(situation(in_work(state), freeing=held))
    assert decision.rest is not None
    assert decision.rest.because is Because.BLOCKED_BY_BUDGET
    assert "budget c" in decision.rest.sentence


def test_an_acceptance_does_not_end_a_row_of_failures() -> None:
    """A node that a person takes as it is proves nothing about the driver."""
    decision = decide(situation(in_work(State.FAILED, annotations={names.ACCEPT: "true"}), drivers=(driver(NEW, is_ready=False),)))
    assert decision.moves[-1].after is State.DONE
    assert decision.progress is None or decision.progress.done == 0


@pytest.mark.parametrize(
    ("reason", "is_proven"),
    [(Because.VALIDATED, True), (Because.RECOVERED, True), (Because.TAKEN_OVER, False), (Because.ACCEPTED, False)],
)
def test_only_what_ours_has_seen_well_ends_a_row_of_failures(reason: Because, is_proven: bool) -> None:
    """A node that somebody else moved to uncordon-required is opened, and proves nothing about the driver."""
    decision = decide(situation(in_work(State.UNCORDON, {"reason": reason.value, "done": NOW - 500}), drivers=(driver(NEW),)))
    assert ends(decision) is State.DONE
    assert decision.progress is not None
    assert decision.progress.done == (NOW if is_proven else NOW - 500)


def test_a_node_taken_over_at_its_end_proves_nothing() -> None:
    """Without a record, or with one of another state: from the label alone nobody knows that it was validated."""
    for about in (node(State.UNCORDON, unschedulable=True), node(State.UNCORDON, record(State.VALIDATION), unschedulable=True)):
        decision = decide(situation(about, drivers=(driver(NEW),)))
        assert ends(decision) is State.DONE
        assert decision.progress is None or not decision.progress.done


@pytest.mark.parametrize("drivers", [(driver(OLD),), (driver(NEW),)], ids=["outdated", "up to date"])
def test_no_node_is_begun_whose_daemon_set_replaces_its_pods_by_itself(drivers: tuple[FleetPod, ...]) -> None:
    """R7: with RollingUpdate Kubernetes replaces drivers past every budget. It is said while all is well, too, and needs a person."""
    for state in (State.UNKNOWN, State.DONE, State.REQUIRED):
        world = World(node(state), daemon_set=ROLLING, drivers=drivers)
        stay = world.run()
        assert stay.because is Because.NOT_ON_DELETE
        assert "gpu-operator/driver" in stay.sentence
        assert "OnDelete" in stay.sentence
        assert not world.node.unschedulable
        assert world.state is (State.REQUIRED if drivers[0].revision == OLD else State.DONE)


def test_a_node_in_work_goes_on_whatever_becomes_of_its_daemon_sets_strategy() -> None:
    """Closed nodes are no better off for waiting: what was begun is ended, and then it is said."""
    world = World(in_work(State.POD_RESTART), daemon_set=ROLLING, is_held=False)
    assert world.run().because is Because.NOT_ON_DELETE
    assert (world.state, world.node.unschedulable) == (State.DONE, False)
