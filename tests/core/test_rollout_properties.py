"""What holds for every decision about a node, whatever is seen of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver_manager import names
from driver_manager.core.hold import MAX_PARKED, OUR_TAINT_VALUE, Hold
from driver_manager.core.parking import is_held
from driver_manager.core.rollout import MAX_PASSED, decide
from driver_manager.core.rollout_record import MAX_BYTES, Failure, Progress, decode, encode
from driver_manager.core.rollout_states import TRANSITIONS, Because, State, state_of
from driver_manager.core.rollout_steps import NVIDIAS, remembered
from driver_manager.core.situation import Decision, Freeing, RolloutSettings, Situation, Turn
from driver_manager.core.snapshot import Taint
from tests.core.rollouts import (
    DAEMON_SET,
    DEVICES,
    NEW,
    NOW,
    OLD,
    ON,
    World,
    driver,
    ends,
    in_work,
    node,
    orphan,
    policy,
    record,
    situation,
    validator,
)

POLICIES = [
    ON,
    None,
    policy(drain={"enable": True}),
    policy(waitForCompletion={"podSelector": "app=job", "timeoutSeconds": 60}),
    policy(waitForCompletion={"podSelector": "app=job"}, podDeletion={"timeoutSeconds": 0}),
]
PODS = [
    driver(NEW),
    driver(OLD),
    driver(NEW, is_ready=False),
    driver(NEW, is_ready=False, restarts=12),
    driver(NEW, is_ready=False, is_bound=False, phase="Pending"),
    driver(OLD, is_ready=False, is_terminating=True),
    driver(OLD, digest="digest-new"),
    orphan(),
]
HOLDS = [
    Hold(frozenset({"mon/exporter"})),
    Hold(frozenset({"mon/other"}), {names.DEPLOY_CLIENT: "true"}),
    Hold(taint=Taint("nvidia.com/gpu", OUR_TAINT_VALUE)),
    Hold(frozenset(f"mon/e{number}" for number in range(MAX_PARKED + 1))),
]
FOREIGN_TAINT = Taint("nvidia.com/gpu-driver-update", "dm-agent")
FREEINGS = [
    *(Freeing(hold=hold) for hold in HOLDS),
    *(None, Freeing(), Freeing(is_done=True), Freeing(failure="refused"), Freeing(blockers=("a/b", "a/c"))),
]
TURNS = [
    *(Turn(is_granted=True, hold=hold) for hold in HOLDS),
    *(Turn(is_granted=True), Turn(), Turn(because=Because.BLOCKED_BY_POD, again_at=NOW + 5)),
]
FAILURES = [Failure(NOW - 50, NEW, "NotFreed", "no"), Failure(NOW - 60, OLD, "DriverFailing", "no", is_driver_gone=True)]
ANNOTATIONS = [names.SAFE_LOAD, names.UPGRADE_REQUESTED, names.ACCEPT, names.KEEP_CORDON, *NVIDIAS]

flags = st.booleans()
records = st.builds(
    record,
    st.sampled_from(list(State)),
    is_cordoned=flags,
    attempt=st.sampled_from([0, 1, 2, 3, 1000]),
    target=st.sampled_from([OLD, NEW, ""]),
    deadline=st.sampled_from([0.0, NOW - 1, NOW, NOW + 1]),
    not_before=st.sampled_from([0.0, NOW + 1]),
    devices=st.sampled_from([{}, DEVICES, {"nvidia.com/gpu": 9}]),
    done=st.sampled_from([0.0, NOW - 99]),
    failures=st.lists(st.sampled_from(FAILURES), max_size=3),
    parked=st.sampled_from([[], [], ["mon/exporter"], ["mon/exporter", "mon/third"]]),
    paused=st.sampled_from([{}, {}, {names.DEPLOY_CLIENT: "true"}]),
    taint=st.sampled_from(["", "", "nvidia.com/gpu"]),
)
inputs: dict[str, st.SearchStrategy[Any]] = {
    "policy": st.sampled_from(POLICIES),
    "daemon_set": st.sampled_from([DAEMON_SET, DAEMON_SET, None]),
    "wanted": st.sampled_from([NEW, NEW, "newer", ""]),
    "drivers": st.lists(st.sampled_from(PODS), max_size=2, unique_by=lambda pod: pod.uid).map(tuple),
    "validators": st.sampled_from([(), (validator(),), (validator(is_ready=False),)]),
    "needs_validator": flags,
    "has_maintenance": st.sampled_from([False, False, True]),
    "maintenance": st.sampled_from(["", "missing", "pending", "ready"]),
    "freeing": st.sampled_from(FREEINGS),
    "jobs": st.sampled_from([None, (), ("a/job",)]),
    "turn": st.sampled_from(TURNS),
    "bad_policy": st.sampled_from(["", "broken"]),
}


@st.composite
def nodes(draw: st.DrawFn) -> Any:
    """A node in any state with any record."""
    label = draw(st.sampled_from([*State, "no-state"]))
    text = draw(st.none() | records | st.just("{") | st.just('{"node":"uid-of-another"}'))
    annotations = draw(st.dictionaries(st.sampled_from(ANNOTATIONS), st.just("true"), max_size=3))
    labels = draw(st.sampled_from([{}, {names.UPGRADE_SKIP: "true"}]))
    labels |= draw(st.sampled_from([{}, {names.PARKED: "true"}, {names.DEPLOY_CLIENT: names.PAUSED}, {names.DEPLOY_CLIENT: "true"}]))
    annotations |= draw(st.sampled_from([{}, {names.PARKED: "mon/exporter"}, {names.PARKED: "a,,/x"}]))
    allocatable = draw(st.sampled_from([DEVICES, {"nvidia.com/gpu": 0}]))
    taints = draw(st.sampled_from([(), (FOREIGN_TAINT,), (Taint("nvidia.com/gpu", OUR_TAINT_VALUE), FOREIGN_TAINT)]))
    more: dict[str, Any] = {"taints": taints, "unschedulable": draw(flags), "is_ready": draw(st.sampled_from([True, True, False]))}
    return node(label, text, labels=labels, annotations=annotations, allocatable=allocatable, **more)


@st.composite
def situations(draw: st.DrawFn, *, one_at_a_time: bool = False) -> Situation:
    """Anything that can be seen of a node."""
    settings = RolloutSettings(skip_cordoned=draw(flags), attempts=draw(st.sampled_from([3, 3, 0])), one_at_a_time=one_at_a_time)
    return situation(draw(nodes()), settings=settings, **{name: draw(each) for name, each in inputs.items()})


def after(before: Situation, decision: Decision) -> Situation:
    """What is seen once a decision is written; what was found out in the old state does not count in the new one."""
    changed = decision.change.on(before.node)
    seen = {name: getattr(before, name) for name in (*inputs, "settings", "now", "group")}
    if any(move.after is not move.before for move in decision.moves):
        seen |= {"freeing": None, "jobs": None, "turn": Turn()}
    return situation(changed, **seen)


@given(situations())
def test_a_decision_is_total_deterministic_and_in_the_tables(seen: Situation) -> None:
    """Every situation has one answer: moves that are in TRANSITIONS, or a wait that says why and until when."""
    decision = decide(seen)
    assert decision == decide(seen)
    assert len(decision.moves) < MAX_PASSED
    assert decision.rest is not None
    assert decision.rest.sentence
    assert decision.rest.again_at == 0 or decision.rest.again_at > seen.now
    assert bool(decision.moves) == bool(decision.change)
    for move in decision.moves:
        assert move.sentence
        assert move.after is move.before or move.after in TRANSITIONS[move.before], move


@given(situations())
def test_what_is_written_says_the_same(seen: Situation) -> None:
    """The label is the last state, and the record decodes to what was decided."""
    decision = decide(seen)
    written = decision.change.on(seen.node)
    if not decision.moves:
        return
    assert state_of(written.labels.get(names.UPGRADE_STATE)) is decision.moves[-1].after
    text = written.annotations.get(names.ROLLOUT)
    assert (decode(text) if text is not None else None) == decision.progress


@given(situations())
def test_a_decision_that_is_written_is_not_taken_again(seen: Situation) -> None:
    """With nothing new to see, nothing more is written: no write is undone, repeated, or made to refresh a time."""
    decision = decide(seen)
    again = decide(after(seen, decision))
    assert not again.moves, (decision.moves, again.moves)
    assert again.rest == decision.rest


@given(situations())
def test_no_write_only_refreshes_a_time(seen: Situation) -> None:
    """A write that leaves the label changes something else than when."""
    decision = decide(seen)
    change = decision.change
    if set(change.annotations) == {names.ROLLOUT} and not change.labels and change.unschedulable is None and change.taints is None:
        times = {"since": 0.0, "deadline": 0.0, "reason": ""}
        before, now = (each and msgspec.structs.replace(each, **times) for each in (seen.progress, decision.progress))
        assert before != now, decision.moves


@given(situations())
def test_states_passed_one_at_a_time_end_as_in_one_write(seen: Situation) -> None:
    """Passing several states in one write leaves the same node as a write for each of them."""
    at_once = decide(seen)
    slowly = replace(seen, settings=replace(seen.settings, one_at_a_time=True))
    moves: list[Any] = []
    for _ in range(MAX_PASSED):
        decision = decide(slowly)
        assert len(decision.moves) <= 1
        if not decision.moves:
            break
        moves.extend(decision.moves)
        slowly = after(slowly, decision)
    assert tuple(moves) == at_once.moves
    assert slowly.node == at_once.change.on(seen.node)


@given(situations())
def test_nobody_is_touched_without_knowing(seen: Situation) -> None:
    """A label that is no state, or a record that does not decode, is told by name, and nothing is written."""
    decision = decide(seen)
    if seen.state is None or seen.bad_progress:
        assert not decision.change
        assert decision.rest is not None
        assert (names.UPGRADE_STATE if seen.state is None else names.ROLLOUT) in decision.rest.sentence


@given(situations())
def test_a_broken_policy_begins_nothing(seen: Situation) -> None:
    """Nodes that are not in work are left as they are, whatever else is seen."""
    broken = replace(seen, policy=None, bad_policy="maxUnavailable is 'x'")
    if broken.state in (State.UNKNOWN, State.DONE, State.REQUIRED):
        assert not decide(broken).change


@given(situations())
def test_only_a_cordon_of_ours_is_taken_off(seen: Situation) -> None:
    """A node is opened only if the cordon was ours, made or taken over, and never against the annotation that keeps it."""
    decision = decide(seen)
    if decision.change.unschedulable is False:
        assert seen.node.annotations.get(names.KEEP_CORDON) != "true"
        own = seen.progress is not None and seen.progress.is_cordoned
        assert own or Because.TAKEN_OVER in {move.because for move in decision.moves}


@given(st.data(), flags, flags)
def test_whatever_happens_on_the_way_the_end_is_the_same(data: st.DataObject, is_foreign: bool, one_at_a_time: bool) -> None:
    """Pods, policies and objects come and go at any time; when all is well again the node is done, as open as it was, and clean."""
    world = World(node(unschedulable=is_foreign), settings=RolloutSettings(one_at_a_time=one_at_a_time))
    for _ in range(data.draw(st.integers(0, 10))):
        name = data.draw(st.sampled_from(sorted(inputs)))
        setattr(world, name, data.draw(inputs[name]))
        if world.maintenance == "ready" and not world.has_maintenance:
            world.maintenance = ""
        for _ in range(data.draw(st.integers(0, 4))):
            world.act()
        world.now += data.draw(st.sampled_from([0.0, 1.0, 100.0, 2000.0]))
    world.has_maintenance = False
    world.heal(wanted="newest", drivers=(driver(OLD),))
    world.run()
    assert world.state is State.DONE, world.moves
    assert world.node.unschedulable is is_foreign, world.moves
    assert not {*NVIDIAS, names.ACCEPT, names.UPGRADE_REQUESTED} & {*world.node.annotations}
    progress = decode(world.node.annotations[names.ROLLOUT])
    assert progress == remembered(progress)
    assert progress.target == "newest"
    assert names.PARKED not in {**world.node.labels, **world.node.annotations}
    assert names.PAUSED not in world.node.labels.values()
    assert not world.node.taints


@given(situations())
def test_only_what_is_ours_is_taken_off(seen: Situation) -> None:
    """R3: a taint goes if the record has it, a label is put back if it still says what we wrote, and nobody else's is touched."""
    decision = decide(seen)
    after_it, record_before = decision.change.on(seen.node), seen.progress
    assert (FOREIGN_TAINT in seen.node.taints) == (FOREIGN_TAINT in after_it.taints)
    was_taken_over = Because.TAKEN_OVER in {move.because for move in decision.moves}
    if len(after_it.taints) < len(seen.node.taints):
        assert was_taken_over or (record_before is not None and record_before.taint)
    before, now = seen.node.labels.get(names.DEPLOY_CLIENT), after_it.labels.get(names.DEPLOY_CLIENT)
    if before != now:
        assert now == names.PAUSED or (before == names.PAUSED and record_before is not None and names.DEPLOY_CLIENT in record_before.paused)


@given(situations())
def test_an_opened_node_is_held_off_by_nothing(seen: Situation) -> None:
    """Whichever way a node comes to its end, is given back or is opened for another try: what we put on it goes in the same write."""
    decision = decide(seen)
    if not decision.change or seen.state is None:
        return
    is_let_go = ends(decision) in (State.DONE, State.UNKNOWN) or decision.change.unschedulable is False
    if is_let_go:
        node_after = decision.change.on(seen.node)
        assert names.PARKED not in {**node_after.labels, **node_after.annotations}
        assert not is_held(decision.progress)


@given(records)
def test_a_record_says_the_same_when_read_again(progress: Progress) -> None:
    """Written and read, it is the same, and short enough for an annotation."""
    text = encode(progress)
    assert len(text) <= MAX_BYTES
    assert decode(text) == progress


JOBS = policy(waitForCompletion={"podSelector": "app=job", "timeoutSeconds": 60})
DRAIN = policy(drain={"enable": True})
LAST = {"attempt": 3}
REFUSED = Freeing(failure="refused")
GRANTED = Turn(is_granted=True)
GONE: dict[str, Any] = {"policy": None}
EDGES: dict[tuple[State, State], Situation] = {
    (State.UNKNOWN, State.DONE): situation(node(), drivers=(driver(),)),
    (State.UNKNOWN, State.REQUIRED): situation(node()),
    (State.DONE, State.REQUIRED): situation(node(State.DONE)),
    (State.DONE, State.UNKNOWN): situation(node(State.DONE), **GONE),
    (State.REQUIRED, State.CORDON): situation(node(State.REQUIRED), turn=GRANTED),
    (State.REQUIRED, State.MAINTENANCE): situation(node(State.REQUIRED), turn=GRANTED, has_maintenance=True),
    (State.REQUIRED, State.POD_RESTART): situation(node(State.REQUIRED), turn=GRANTED, drivers=(driver(OLD, digest="digest-new"),)),
    (State.REQUIRED, State.DONE): situation(node(State.REQUIRED, record(State.REQUIRED)), drivers=(driver(),)),
    (State.REQUIRED, State.FAILED): situation(in_work(State.REQUIRED), drivers=(), **GONE),
    (State.REQUIRED, State.UNKNOWN): situation(node(State.REQUIRED), **GONE),
    (State.CORDON, State.WAIT_FOR_JOBS): situation(in_work(State.CORDON)),
    (State.CORDON, State.UNKNOWN): situation(in_work(State.CORDON), **GONE),
    (State.WAIT_FOR_JOBS, State.POD_DELETION): situation(in_work(State.WAIT_FOR_JOBS)),
    (State.WAIT_FOR_JOBS, State.UNKNOWN): situation(in_work(State.WAIT_FOR_JOBS), **GONE),
    (State.POD_DELETION, State.POD_RESTART): situation(in_work(State.POD_DELETION), freeing=Freeing(is_done=True)),
    (State.POD_DELETION, State.DRAIN): situation(in_work(State.POD_DELETION, {"rules": {}}), policy=DRAIN, freeing=REFUSED),
    (State.POD_DELETION, State.REQUIRED): situation(in_work(State.POD_DELETION), freeing=REFUSED),
    (State.POD_DELETION, State.FAILED): situation(in_work(State.POD_DELETION, LAST), freeing=REFUSED),
    (State.POD_DELETION, State.UNKNOWN): situation(in_work(State.POD_DELETION), **GONE),
    (State.DRAIN, State.POD_RESTART): situation(in_work(State.DRAIN), freeing=Freeing(is_done=True)),
    (State.DRAIN, State.REQUIRED): situation(in_work(State.DRAIN), freeing=REFUSED),
    (State.DRAIN, State.FAILED): situation(in_work(State.DRAIN, LAST), freeing=REFUSED),
    (State.DRAIN, State.UNKNOWN): situation(in_work(State.DRAIN), **GONE),
    (State.MAINTENANCE, State.POD_RESTART): situation(
        in_work(State.MAINTENANCE, annotations={names.REQUESTOR_MODE: "true"}), has_maintenance=True, maintenance="ready"
    ),
    (State.MAINTENANCE, State.REQUIRED): situation(in_work(State.MAINTENANCE)),
    (State.MAINTENANCE, State.UNKNOWN): situation(in_work(State.MAINTENANCE), **GONE),
    (State.AFTER_MAINTENANCE, State.POD_RESTART): situation(in_work(State.AFTER_MAINTENANCE)),
    (State.POD_RESTART, State.VALIDATION): situation(in_work(State.POD_RESTART), drivers=(driver(),)),
    (State.POD_RESTART, State.REQUIRED): situation(in_work(State.POD_RESTART, {"deadline": NOW})),
    (State.POD_RESTART, State.FAILED): situation(in_work(State.POD_RESTART, {"deadline": NOW}), drivers=()),
    (State.VALIDATION, State.UNCORDON): situation(in_work(State.VALIDATION), drivers=(driver(),)),
    (State.VALIDATION, State.POD_RESTART): situation(in_work(State.VALIDATION)),
    (State.VALIDATION, State.FAILED): situation(in_work(State.VALIDATION, {"deadline": NOW}), drivers=()),
    (State.UNCORDON, State.DONE): situation(in_work(State.UNCORDON)),
    (State.FAILED, State.UNCORDON): situation(in_work(State.FAILED), drivers=(driver(),)),
    (State.FAILED, State.REQUIRED): situation(in_work(State.FAILED), wanted="newer"),
}


def test_the_table_of_transitions_says_no_lie() -> None:
    """Every edge of the table is taken in some situation, and the cases below are all of them."""
    assert {*EDGES} == {(before, each) for before, afters in TRANSITIONS.items() for each in afters}


@pytest.mark.parametrize("edge", EDGES, ids=lambda edge: f"{edge[0] or 'unknown'} to {edge[1] or 'unknown'}")
def test_every_transition_is_taken(edge: tuple[State, State]) -> None:
    """Each edge of the table, by a situation that leads over it."""
    seen = EDGES[edge]
    decision = decide(replace(seen, settings=replace(seen.settings, one_at_a_time=True)))
    assert seen.state is edge[0]
    assert ends(decision) is edge[1], decision
