"""Who may start: the sums agree with a recount, and the limits hold at every start (decision 37, R7)."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver_manager import names
from driver_manager.core.budget import MAX_NAMED, Count, Tally, count
from driver_manager.core.rollout_record import Failure, Progress
from driver_manager.core.rollout_states import WORKING, Because, State
from driver_manager.core.snapshot import NodeView
from driver_manager.core.upgrade_policy import UpgradePolicy
from tests.core.rollouts import NEW, NOW, OLD, node, record

GANG, ORDER = "example.com/gang", "example.com/order"
NAMES = [f"n{number}" for number in range(8)]
FAILED = Failure(NOW, NEW, "DriverFailing", "it fails", is_driver_gone=True)


def counted(name: str, state: State | None, progress: Progress | None = None, group: str = "g", **fields: Any) -> Count:
    """What a node adds; `is_granted` and `wanted` go to the count, the rest to the node."""
    asked = {key: fields.pop(key) for key in ("is_granted", "wanted") if key in fields}
    made = node(state or "no-state", name=name, uid=f"uid-{name}", **fields)
    return count(made, state, progress, group, gang_label=GANG, order_label=ORDER, **asked)


@st.composite
def counts(draw: st.DrawFn, name: str) -> Count:
    """What a node may add."""
    state = draw(st.none() | st.sampled_from(list(State)))
    progress = draw(
        st.none()
        | st.builds(
            record,
            st.just(state or ""),
            is_cordoned=st.booleans(),
            target=st.sampled_from([OLD, NEW]),
            failures=st.lists(st.builds(replace_failure, st.sampled_from([NOW, NOW + 5]), st.booleans()), max_size=1),
            done=st.sampled_from([0.0, NOW + 1, NOW + 2]),
        )
    )
    places = st.sampled_from(["1", "-2", "nan", "inf", "x", ""])
    labels = draw(st.fixed_dictionaries({}, optional={GANG: st.sampled_from("ab"), ORDER: places}))
    return counted(
        name,
        state,
        progress,
        draw(st.sampled_from(["g", "h"])),
        labels=labels,
        unschedulable=draw(st.booleans()),
        is_ready=draw(st.sampled_from([True, True, False])),
        is_granted=state is State.REQUIRED and draw(st.booleans()),
    )


def replace_failure(at: float, is_driver_gone: bool) -> Failure:
    """A failure at a time."""
    return Failure(at, NEW, "DriverFailing", "it fails", is_driver_gone=is_driver_gone)


fleets = st.fixed_dictionaries({}, optional={name: counts(name) for name in NAMES})
changes = st.lists(st.sampled_from(NAMES).flatmap(lambda name: st.tuples(st.just(name), st.none() | counts(name))), max_size=25)


@given(changes)
def test_the_sums_agree_with_a_recount(changes: list[tuple[str, Count | None]]) -> None:
    """Kept as nodes change, or counted anew over all of them: the same."""
    tally, known = Tally(), dict[str, Count]()
    for name, new in changes:
        tally.put(name, new)
        known.pop(name, None)
        if new is not None:
            known[name] = new
        anew = Tally.of(known)
        assert tally.groups() == anew.groups()
        assert tally._gangs == anew._gangs
        for group, target in (("g", NEW), ("g", OLD), ("h", NEW)):
            assert sorted(tally.failures_in_a_row(group, target)) == sorted(anew.failures_in_a_row(group, target))
            assert list(tally.pending(group)) == list(anew.pending(group))
            assert list(tally.pending_unavailable(group)) == list(anew.pending_unavailable(group))


def simple_limit(limit: int | str, total: int) -> int:
    """What a number or a share comes to."""
    return limit if isinstance(limit, int) else math.ceil(total * int(limit[:-1]) / 100)


LIMITS = [0, 1, 2, 5, "0%", "20%", "34%", "100%"]


@given(fleets, st.sampled_from([0, 1, 3]), st.sampled_from(LIMITS), st.sampled_from([None, *LIMITS]), st.sampled_from([0, 1, 2]))
def test_the_limits_hold_at_every_start(
    fleet: dict[str, Count], parallel: int, limit: int | str, cap: int | str | None, most_failures: int
) -> None:
    """Starting nodes as long as one may start, no limit is passed at any start, and nobody waits without one that is full."""
    policy = UpgradePolicy(max_parallel_upgrades=parallel, max_unavailable=limit)
    tally = Tally.of(fleet)
    for group in ("g", "h"):
        for name in tally.pending(group):
            mine, turn = fleet[name], tally.turn(name, policy, cap, most_failures)
            everybody = [each for each in fleet.values() if each.group == group]
            if not turn.is_granted:
                assert turn.sentence
                assert turn.because in (Because.NO_SLOT, Because.PAUSED, Because.GANG_BUSY, Because.NODE_NOT_READY)
                continue
            fleet[name] = replace(mine, is_working=True, is_ours=mine.is_ours or not mine.is_foreign)
            tally.put(name, fleet[name])
            now = [each for each in fleet.values() if each.group == group]
            assert mine.is_ready
            assert not parallel or sum(each.is_working for each in now) <= parallel
            if not (mine.is_ours or mine.is_foreign):
                assert sum(each.is_ours or each.is_foreign for each in now) <= simple_limit(limit, len(now))
                if cap is not None:
                    assert sum(each.is_ours or each.is_foreign for each in fleet.values()) <= simple_limit(cap, len(fleet))
            gang = [each for each in fleet.values() if mine.gang and each.gang == mine.gang]
            assert sum(each.is_working for each in gang) <= 1
            assert mine.is_ours or sum(each.is_ours for each in gang) <= 1
            failed = [each for each in everybody if each.state is State.FAILED and each.target == mine.target]
            since = max((each.done_at for each in everybody if each.target == mine.target), default=0.0)
            assert not most_failures or sum(each.failed_at > since for each in failed) < most_failures


def started(states: list[tuple[State, bool]], parallel: int, unavailable: int | str) -> int:
    """How many nodes of a fleet of (state, whether somebody else cordoned it) are started."""
    fleet = {}
    for number, (state, is_cordoned) in enumerate(states):
        name = f"n{number}"
        is_ours = state in WORKING
        fleet[name] = counted(name, state, record(state) if is_ours else None, unschedulable=is_cordoned or is_ours)
    policy = UpgradePolicy(max_parallel_upgrades=parallel, max_unavailable=unavailable)
    tally, granted = Tally.of(fleet), 0
    for name in tally.pending("g"):
        if tally.turn(name, policy).is_granted:
            granted += 1
            tally.put(name, replace(fleet[name], is_working=True, is_ours=not fleet[name].is_foreign))
    return granted


WAITS, CORDONED, WORKS, DONE_CORDONED = (
    (State.REQUIRED, False),
    (State.REQUIRED, True),
    (State.CORDON, False),
    (State.DONE, True),
)
THROTTLE: dict[str, tuple[list[tuple[State, bool]], int, int | str, int]] = {
    "maxParallel 0: all 5": ([WAITS] * 5, 0, "100%", 5),
    "maxParallel 3 of 5: 3": ([WAITS] * 5, 3, "100%", 3),
    "maxParallel 4 with 3 in cordon: 1 more": ([WORKS] * 3 + [WAITS] * 2, 4, "100%", 1),
    "0 and 100 % with 2 cordoned: all 5": ([WAITS] * 3 + [CORDONED] * 2, 0, "100%", 5),
    "0 and 50 % with 2 cordoned last: 3": ([WAITS] * 3 + [CORDONED] * 2, 0, "50%", 3),
    "0 and 50 % with 2 cordoned and done: 1": ([WAITS] * 3 + [DONE_CORDONED] * 2, 0, "50%", 1),
    "maxParallel 3 and maxUnavailable 2: 2": ([WAITS] * 5, 3, 2, 2),
    "maxParallel 4 and maxUnavailable 4 with 3 in cordon: 1 more": ([WORKS] * 3 + [WAITS] * 2, 4, 4, 1),
}


@pytest.mark.parametrize("case", THROTTLE.values(), ids=THROTTLE)
def test_the_throttle_cases_of_nvidias_controller(case: tuple[list[tuple[State, bool]], int, int | str, int]) -> None:
    """Its eight cases give the same number of starts here."""
    states, parallel, unavailable, expected = case
    assert started(states, parallel, unavailable) == expected


def test_the_order_of_nodes_changes_no_count() -> None:
    """Cordoned ones first give as many starts as cordoned ones last; in NVIDIA's controller they take the slots of others (decision 37)."""
    assert started([CORDONED] * 2 + [WAITS] * 3, 0, "50%") == started([WAITS] * 3 + [CORDONED] * 2, 0, "50%") == 3


def test_a_cordoned_node_needs_a_parallel_slot_too() -> None:
    """A node that others have cordoned counts in maxParallelUpgrades: in NVIDIA's controller it passes both limits (decision 37)."""
    assert started([CORDONED] * 3, 1, "100%") == 1


def test_a_failed_node_frees_its_parallel_slot() -> None:
    """One failure does not stop a fleet with maxParallelUpgrades 1, where NVIDIA's stops for good (weakness 17)."""
    fleet = {
        "bad": counted("bad", State.FAILED, record(State.FAILED, failures=[FAILED]), unschedulable=True),
        "next": counted("next", State.REQUIRED),
        "other": counted("other", State.DONE),
    }
    assert Tally.of(fleet).turn("next", UpgradePolicy(max_unavailable=2)).is_granted


@pytest.mark.parametrize("is_cordoned", [True, False])
def test_a_failed_node_counts_while_it_is_closed_or_driverless(is_cordoned: bool) -> None:
    """And when that fills maxUnavailable nobody starts, with a reason that names it."""
    fleet = {
        "bad": counted("bad", State.FAILED, record(State.FAILED, failures=[FAILED]), unschedulable=is_cordoned),
        "next": counted("next", State.REQUIRED),
    }
    turn = Tally.of(fleet).turn("next", UpgradePolicy(max_unavailable=1))
    assert not turn.is_granted
    assert turn.because is Because.NO_SLOT
    assert "bad" in turn.sentence


def test_a_failed_node_whose_driver_was_never_touched_does_not_count() -> None:
    """It was opened again, and its old driver runs."""
    failure = Failure(NOW, NEW, "NotFreed", "a pod may not go")
    fleet = {
        "bad": counted("bad", State.FAILED, record(State.FAILED, failures=[failure], is_cordoned=False)),
        "next": counted("next", State.REQUIRED),
    }
    assert Tally.of(fleet).turn("next", UpgradePolicy(max_unavailable=1)).is_granted


def test_a_grant_counts_before_its_cordon_shows() -> None:
    """A node that was granted a start holds its slots though the node does not show it yet (decision 34)."""
    fleet = {"first": counted("first", State.REQUIRED, is_granted=True), "next": counted("next", State.REQUIRED)}
    tally = Tally.of(fleet)
    assert list(tally.pending("g")) == ["next"]
    assert not tally.turn("next", UpgradePolicy(max_unavailable=2)).is_granted
    assert not tally.turn("next", UpgradePolicy(max_parallel_upgrades=0, max_unavailable=1)).is_granted


def test_two_closed_nodes_of_one_gang_do_not_wait_for_each_other() -> None:
    """Both failed, both closed, and a new template makes both wait: one of them starts."""
    fleet = {name: counted(name, State.REQUIRED, record(State.REQUIRED), labels={GANG: "a"}, unschedulable=True) for name in ("one", "two")}
    tally = Tally.of(fleet)
    assert tally.turn("one", UpgradePolicy()).is_granted
    tally.put("one", replace(fleet["one"], is_working=True))
    turn = tally.turn("two", UpgradePolicy(max_parallel_upgrades=0))
    assert turn.because is Because.GANG_BUSY
    assert "one" in turn.sentence


def test_a_new_template_ends_the_pause_for_nodes_that_were_never_tried() -> None:
    """Nodes wait for the newest template, whatever was newest when they began to wait."""
    waiting = record(State.REQUIRED, target=NEW, attempt=0, is_cordoned=False)
    failed = counted("bad", State.FAILED, record(State.FAILED, failures=[FAILED]))
    policy = UpgradePolicy(max_unavailable="100%")
    before = Tally.of({"bad": failed, "next": counted("next", State.REQUIRED, waiting, wanted=NEW)})
    turn = before.turn("next", policy, most_failures=1)
    assert turn.because is Because.PAUSED
    assert "bad" in turn.sentence
    after = Tally.of({"bad": failed, "next": counted("next", State.REQUIRED, waiting, wanted="newer")})
    assert after.turn("next", policy, most_failures=1).is_granted


def test_a_node_that_came_to_the_target_ends_a_row_of_failures() -> None:
    """Failures count in a row: a success in between ends the row."""
    good = Progress(node="uid-good", target=NEW, done=NOW + 1)
    fleet = {
        "bad": counted("bad", State.FAILED, record(State.FAILED, failures=[FAILED])),
        "good": counted("good", State.DONE, good),
        "next": counted("next", State.REQUIRED, wanted=NEW),
    }
    tally = Tally.of(fleet)
    assert tally.failures_in_a_row("g", NEW) == []
    tally.put("good", None)
    assert tally.failures_in_a_row("g", NEW) == ["bad"]


def test_the_whole_clusters_limit_counts_all_groups() -> None:
    """Two groups with limits of their own share the cluster's; the sentence names those of both."""
    fleet = {
        "busy": counted("busy", State.CORDON, record(State.CORDON), "h", unschedulable=True),
        "broken": counted("broken", State.DONE, None, "h", is_ready=False),
        "next": counted("next", State.REQUIRED),
    }
    turn = Tally.of(fleet).turn("next", UpgradePolicy(max_unavailable=1), cap=2)
    assert not turn.is_granted
    assert "busy through upgrades" in turn.sentence
    assert "broken for other reasons" in turn.sentence


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "x", "1e999"])
def test_a_place_in_the_queue_that_is_no_number_is_the_last(value: str) -> None:
    """A label that orders nothing puts the node at the end, and it is found again there."""
    odd = counted("a", State.REQUIRED, labels={ORDER: value})
    tally = Tally.of({"a": odd, "b": counted("b", State.REQUIRED, labels={ORDER: "7"}), "c": counted("c", State.REQUIRED)})
    assert list(tally.pending("g")) == ["b", "a", "c"]
    tally.put("a", None)
    assert list(tally.pending("g")) == ["b", "c"]


def test_a_sentence_stays_short() -> None:
    """Of many nodes the first are named, and how many more there are."""
    fleet = {f"busy{number}": counted(f"busy{number}", State.CORDON, record(State.CORDON), unschedulable=True) for number in range(40)}
    fleet["next"] = counted("next", State.REQUIRED)
    sentence = Tally.of(fleet).turn("next", UpgradePolicy()).sentence
    assert sentence.count("busy") == MAX_NAMED
    assert f"and {40 - MAX_NAMED} more" in sentence


@given(fleets)
def test_every_node_is_counted_once(fleet: dict[str, Count]) -> None:
    """A node is unavailable through us or for other reasons, not both, and the states add up."""
    for group, sums in Tally.of(fleet).groups().items():
        mine = [each for each in fleet.values() if each.group == group]
        assert not sums.ours & sums.foreign
        assert sums.total == len(mine) == sum(sums.states.values())
        assert sums.states == dict(Counter(each.state for each in mine))


def test_a_node_in_maintenance_is_unavailable_through_us() -> None:
    """The maintenance operator's cordon was asked for by us."""
    about: NodeView = node(State.MAINTENANCE, annotations={names.REQUESTOR_MODE: "true"}, unschedulable=True)
    assert count(about, State.MAINTENANCE, record(State.MAINTENANCE, is_cordoned=False), "g").is_ours
