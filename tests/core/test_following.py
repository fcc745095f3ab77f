"""What a follower decides about a node, the mark that a leader puts on it, and the conditions that both write."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from driver_manager.core.budget import Sums
from driver_manager.core.conditions import ACCEPTED, LEADS, PACED, ROLLED_OUT, reasons_by_group, wanted_conditions
from driver_manager.core.enabledmark import with_mark
from driver_manager.core.fleet import PolicySource
from driver_manager.core.following import FREED_IN, follow
from driver_manager.core.hold import OUR_TAINT_VALUE, Hold, parked_on
from driver_manager.core.parking import adopted, is_held
from driver_manager.core.policy_groups import policy_groups
from driver_manager.core.role import Role, Standing
from driver_manager.core.rollout import decide
from driver_manager.core.rollout_states import IDLE, WORKING, Because, State
from driver_manager.core.rollout_steps import remembered
from driver_manager.core.situation import Freeing, Situation, Stay, Work
from driver_manager.core.snapshot import Taint
from driver_manager.core.upgrade_policy import UpgradePolicy
from driver_manager.names import PARKED, PAUSED, POLICY, REQUESTOR_MODE, ROLLOUT, UPGRADE_ENABLED, UPGRADE_STATE
from tests.core.rollouts import driver, in_work, node, record, situation
from tests.core.test_rollout_properties import situations

# A follower --------------------------------------------------------------------------------------------------------


@given(situations())
def test_a_follower_never_moves_a_node(seen: Situation) -> None:
    """Whatever is seen: no state label, no cordon; it writes once, and only what keeps DaemonSets off and its record."""
    decision = follow(seen)
    assert not decision.moves
    assert UPGRADE_STATE not in decision.change.labels
    assert decision.change.unschedulable is not True
    assert set(decision.change.annotations) <= {ROLLOUT, PARKED, REQUESTOR_MODE}
    if not decision.change:
        assert decision.rest is not None
        assert decision.rest.sentence
    after = replace(seen, node=decision.change.on(seen.node), progress=decision.progress)
    assert not follow(after).change


@given(situations())
def test_a_follower_opens_a_node_only_of_its_own_cordon_out_of_the_flow_with_a_driver(seen: Situation) -> None:
    """In the flow gpu-operator does it; a foreign cordon stays; a node without a driver stays closed."""
    if follow(seen).change.unschedulable is False:
        assert seen.state in (State.UNKNOWN, State.DONE)
        assert seen.has_own_cordon
        assert seen.driver is not None
        assert seen.driver.is_ready


@pytest.mark.parametrize("state", sorted(IDLE))
def test_a_follower_gives_a_maintenance_back_that_nothing_goes_on_in(state: State) -> None:
    """With the driver away the node stays closed; then it is given back, and the mark of it goes last."""
    marked = replace(node(state), annotations={REQUESTOR_MODE: "true"})
    held = situation(marked, has_maintenance=True, maintenance="ready")
    rest = follow(held).rest
    assert rest is not None
    assert rest.work is Work.RELEASE_MAINTENANCE
    rest = follow(replace(held, drivers=())).rest
    assert rest is not None
    assert (rest.because, rest.work) == (Because.NEEDS_A_LOOK, Work.NOTHING)
    rest = follow(replace(held, drivers=(), daemon_set=None)).rest
    assert rest is not None
    assert rest.work is Work.RELEASE_MAINTENANCE
    given_back = follow(replace(held, maintenance="missing"))
    assert given_back.change.annotations[REQUESTOR_MODE] is None
    assert not given_back.moves


@given(situations())
def test_a_follower_leaves_a_record_in_the_flow_alone(seen: Situation) -> None:
    """If gpu-operator dies, ours goes on with what it had written; what keeps DaemonSets off is added, or recorded anew."""
    seen = replace(seen, freeing=None)
    is_lost = seen.progress is None and any(adopted(seen.node).values())
    if is_lost and seen.state in FREED_IN and seen.node.unschedulable and not seen.bad_progress:
        change = follow(seen).change
        assert change.annotations.keys() == {ROLLOUT}
        assert change.on(seen.node).labels == seen.node.labels
    elif seen.state in WORKING or seen.state in (State.FAILED, None):
        assert not follow(seen).change


@given(situations())
def test_nothing_is_kept_off_a_node_that_gpu_operator_is_through_with(seen: Situation) -> None:
    """Parks, paused labels and the taint go as soon as the node is out of the flow, if it has its driver and no maintenance."""
    after = follow(seen)
    is_closed = seen.has_own_cordon and (seen.driver is None or not seen.driver.is_ready)
    if seen.state in IDLE and not seen.bad_progress and not is_closed and not seen.holds_maintenance:
        left = after.change.on(seen.node)
        assert PARKED not in left.labels
        assert not is_held(after.progress)


def test_daemon_sets_are_kept_off_in_the_flow_and_come_back_after_it() -> None:
    """What has to keep them off is put on a cordoned node with the record of it, and taken off with the end of the upgrade."""
    hold = Hold(parked=frozenset({"a/b"}), paused={"example.com/x": "true"}, taint=Taint("nvidia.com/gpu-driver-update", OUR_TAINT_VALUE))
    before = node(State.POD_DELETION, unschedulable=True, labels={"example.com/x": "true"})
    seen = situation(before, freeing=Freeing(hold=hold))
    put = follow(seen)
    closed = put.change.on(before)
    assert parked_on(closed) == {"a/b"}
    assert closed.labels["example.com/x"] == PAUSED
    assert closed.taints
    assert not follow(situation(closed, freeing=Freeing(hold=hold))).change
    lost = replace(closed, annotations={key: value for key, value in closed.annotations.items() if key != ROLLOUT})
    again = follow(situation(lost, freeing=Freeing())).progress
    assert again is not None
    assert (again.parked, again.taint) == (["a/b"], "nvidia.com/gpu-driver-update"), "what a lost record held has to go at the end"
    opened = replace(closed, labels={**closed.labels, UPGRADE_STATE: "upgrade-done"}, unschedulable=False)
    off = follow(situation(opened)).change.on(opened)
    assert off.labels == {"example.com/x": "true", UPGRADE_STATE: "upgrade-done"}
    assert (off.taints, ROLLOUT in off.annotations, PARKED in off.annotations) == ((), False, False)
    led = decide(situation(closed, freeing=None))
    assert led.progress is not None
    assert (led.progress.parked, led.progress.paused) == (["a/b"], {"example.com/x": "true"}), "a leader goes on with it"


@pytest.mark.parametrize("state", sorted(State))
def test_it_frees_a_cordoned_node_before_its_driver_goes_and_at_no_other_time(state: State) -> None:
    """From the cordon to the pod's deletion; a node that is not cordoned yet would get its pods back."""
    closed, still_open = situation(node(state, unschedulable=True)), situation(node(state))
    for seen, is_due in ((closed, state in FREED_IN), (still_open, False)):
        rest = follow(seen).rest
        assert rest is not None
        assert (rest.work is Work.FREE_UNKNOWN) == is_due


@pytest.mark.parametrize(
    ("fields", "because", "words"),
    [
        ({}, Because.FREEING, "are taken off"),
        ({"freeing": Freeing(blockers=("pod a/b (budget x)",))}, Because.FREEING, "pod a/b (budget x)"),
        ({"freeing": Freeing(is_done=True)}, Because.FOLLOWING, "nobody is left"),
        ({"freeing": Freeing(failure="pod a/b is a static pod")}, Because.NOT_FREED, "pod a/b is a static pod"),
    ],
)
def test_it_says_how_far_it_is(fields: dict[str, Any], because: Because, words: str) -> None:
    """Who is taken off, who cannot go, or that nobody is left."""
    rest = follow(situation(node(State.POD_DELETION, unschedulable=True), **fields)).rest
    assert rest is not None
    assert rest.because is because
    assert words in rest.sentence


def test_a_cordon_of_ours_that_was_left_behind_goes_when_the_driver_runs() -> None:
    """gpu-operator has taken the label off in mid-flow."""
    left = in_work(State.POD_DELETION, labels={})
    gone = replace(left, labels={})
    assert follow(situation(gone, drivers=(driver(is_ready=True),))).change.unschedulable is False
    closed = follow(situation(gone, drivers=(driver(is_ready=False),)))
    assert not closed.change
    assert closed.rest is not None
    assert "broken off" in closed.rest.sentence


# The mark ----------------------------------------------------------------------------------------------------------


@given(situations())
def test_the_mark_says_whether_a_policy_upgrades_the_node(seen: Situation) -> None:
    """Where it is written it is right, nothing else of the decision changes, and a node in the flow keeps it."""
    plain, marked = decide(seen), with_mark(seen, decide(seen))
    assert marked.moves == plain.moves
    assert marked.change.labels == plain.change.labels
    assert marked.change.unschedulable == plain.change.unschedulable
    added = {key: value for key, value in marked.change.annotations.items() if key not in plain.change.annotations}
    assert set(added) <= {UPGRADE_ENABLED}
    if added:
        assert added == {UPGRADE_ENABLED: "true" if seen.policy is not None else None}
    if seen.state in WORKING and not marked.moves:
        assert added.get(UPGRADE_ENABLED, "true") == "true"
    again = replace(seen, node=marked.change.on(seen.node), state=marked.moves[-1].after if marked.moves else seen.state)
    again = replace(again, progress=marked.progress if marked.moves else seen.progress)
    assert not with_mark(again, replace(plain, moves=(), change=type(plain.change)())).change.annotations.get(UPGRADE_ENABLED)


@pytest.mark.parametrize(
    ("state", "policy", "has_mark", "written"),
    [
        (State.DONE, UpgradePolicy(auto_upgrade=True), False, {UPGRADE_ENABLED: "true"}),
        (State.DONE, UpgradePolicy(auto_upgrade=True), True, {}),
        (State.REQUIRED, UpgradePolicy(auto_upgrade=True), False, {}),
        (State.UNKNOWN, None, True, {UPGRADE_ENABLED: None}),
        (State.UNKNOWN, None, False, {}),
    ],
)
def test_a_node_at_rest_is_written_only_where_the_mark_is_wrong(
    state: State, policy: UpgradePolicy | None, has_mark: bool, written: dict[str, str | None]
) -> None:
    """One patch, once; a node that waits for its turn gets it with its start."""
    annotations = {UPGRADE_ENABLED: "true"} if has_mark else {}
    kept = remembered(record(State.DONE, done=5.0))
    seen = situation(node(state, kept if state is State.DONE else None, annotations=annotations), policy=policy, drivers=(driver(),))
    if state is State.REQUIRED:
        seen = situation(node(state, record(state, is_cordoned=False), annotations=annotations), policy=policy)
    decision = with_mark(seen, decide(seen))
    assert not decision.moves
    assert dict(decision.change.annotations) == written


@pytest.mark.parametrize("bad", ["maxUnavailable is 'x'"])
def test_a_broken_policy_changes_no_mark(bad: str) -> None:
    """Nodes that are not in work are left as they are."""
    seen = situation(node(State.DONE, annotations={UPGRADE_ENABLED: "true"}), policy=None, bad_policy=bad)
    assert not with_mark(seen, decide(seen)).change


# Conditions --------------------------------------------------------------------------------------------------------

LEADING, FOLLOWS = Standing(Role.LEAD, "no gpu-operator lives"), Standing(Role.FOLLOW, "gpu-operator lives")
NAME = "ClusterPolicy/x"


def source(policy: dict[str, Any] | None = None, **fields: Any) -> PolicySource:
    defaults: dict[str, Any] = {"kind": "ClusterPolicy", "name": "x", "uid": "1", "resource_version": "1"}
    return PolicySource(**{**defaults, **fields}, upgrade_policy={"autoUpgrade": True} if policy is None else policy)


def said(
    about: PolicySource, states: dict[State | None, int], reasons: dict[Because, int] | None = None, standing: Standing = LEADING
) -> dict[str, tuple[bool, str, str]]:
    sums = {NAME: Sums(total=sum(states.values()), states=states)}
    found = wanted_conditions(about, policy_groups([about], []), sums, {NAME: Counter(reasons or {})}, standing)
    return {each.type: (each.is_true, each.reason, each.sentence) for each in found}


@pytest.mark.parametrize(
    ("states", "reasons", "expected"),
    [
        ({State.DONE: 3}, {}, (True, "Complete", "3 of 3 nodes are done")),
        (
            {State.DONE: 1, State.POD_DELETION: 1, State.REQUIRED: 3},
            {Because.NO_SLOT: 2, Because.FREEING: 1, Because.BLOCKED_BY_POD: 1},
            (False, "InProgress", "1 of 5 nodes are done, 1 in work, 3 waiting (NoSlot 2, BlockedByPod 1, Freeing 1)"),
        ),
        ({State.DONE: 1, State.REQUIRED: 2}, {Because.SKIPPED: 2}, (False, "NodesWait", "1 of 3 nodes are done, 2 waiting (Skipped 2)")),
        (
            {State.DONE: 1, State.FAILED: 1},
            {Because.NEEDS_A_LOOK: 1},
            (False, "NodesFailed", "1 of 2 nodes are done, 1 failed (NeedsALook 1)"),
        ),
        ({None: 1}, {Because.UNKNOWN_STATE: 1}, (False, "NodesWait", "0 of 1 nodes are done, 1 waiting (UnknownState 1)")),
        ({}, {}, (True, "Complete", "0 of 0 nodes are done")),
    ],
)
def test_the_roll_out_in_numbers(states: dict[State | None, int], reasons: dict[Because, int], expected: tuple[bool, str, str]) -> None:
    """How many are done, in work, waiting and failed, and each reason counted."""
    assert said(source(), states, reasons)[ROLLED_OUT] == expected


def test_a_policy_that_is_off_or_broken_or_was_cut_is_said() -> None:
    """Each in its condition, with the words of who found it."""
    off = said(source({"autoUpgrade": False}), {State.UNKNOWN: 2})
    assert off[ROLLED_OUT][:2] == (False, "PolicyOff")
    assert "autoUpgrade of ClusterPolicy/x is false" in off[ROLLED_OUT][2]
    broken = said(source({"autoUpgrade": "x"}), {State.DONE: 2})
    assert broken[ACCEPTED][:2] == (False, "Invalid")
    cut = said(source(applied_policy={"podDeletion": {"podSelector": "app=x"}}), {State.DONE: 2})
    assert cut[ACCEPTED][:2] == (True, "FieldsDropped")
    assert POLICY in cut[ACCEPTED][2]


def test_a_driver_that_kubernetes_replaces_by_itself_is_said_until_it_does_not() -> None:
    """Nobody hears of it where all is well; once said it is taken back."""
    seen = said(source(), {State.DONE: 2, State.REQUIRED: 1}, {Because.NOT_ON_DELETE: 3})
    assert seen[PACED][:2] == (False, "NotOnDelete")
    assert seen[PACED][2].startswith("the driver DaemonSets of 3 of 3 nodes have another update strategy than OnDelete")
    assert PACED not in said(source(), {State.DONE: 3})
    before = source(conditions={PACED: ("False", "NotOnDelete")})
    assert said(before, {State.DONE: 3})[PACED][:2] == (True, "OnDelete")
    assert said(before, {State.DONE: 3}, standing=FOLLOWS)[PACED][:2] == (False, "NotInUse")


def test_the_role_is_said() -> None:
    """True while it leads."""
    assert said(source(), {State.DONE: 1})[LEADS] == (True, "Leads", "no gpu-operator lives")
    assert said(source(), {State.DONE: 1}, standing=FOLLOWS)[LEADS] == (False, "Follows", "gpu-operator lives")


def test_a_resource_that_is_not_in_use_says_nothing_unless_it_did() -> None:
    """A ClusterPolicy that leaves the driver to NVIDIADrivers: what it said before is taken back."""
    assert set(said(source(uses_nvidia_driver_crd=True), {})) == {LEADS}
    before = source(uses_nvidia_driver_crd=True, conditions={ROLLED_OUT: ("True", "Complete")})
    assert said(before, {})[ROLLED_OUT][:2] == (False, "NotInUse")


def test_reasons_are_counted_by_group_without_those_that_are_done() -> None:
    """A node that is up to date is no news."""
    stays = {
        "a": Stay(because=Because.NO_SLOT, sentence=""),
        "b": Stay(because=Because.UP_TO_DATE, sentence=""),
        "c": Stay(because=Because.NO_SLOT, sentence=""),
    }
    one = Counter({Because.NO_SLOT: 1})
    assert reasons_by_group(stays, {"a": "x", "b": "x", "c": "y"}) == {"x": one, "y": one}
