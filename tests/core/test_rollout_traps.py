"""No state is a trap: whatever the state and whatever holds, a node comes to rest in time with a named reason, and a cure opens it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from driver_manager import names
from driver_manager.core.rollout_record import decode
from driver_manager.core.rollout_states import IDLE, TRANSITIONS, Because, State
from driver_manager.core.rollout_steps import NVIDIAS, remembered
from driver_manager.core.situation import Freeing, NodeChange, Turn
from tests.core.rollouts import NEW, NOW, OLD, World, driver, node, orphan, policy, record, validator

WAITING_POLICY = policy(waitForCompletion={"podSelector": "app=training", "timeoutSeconds": 600})
DRAINING_POLICY = policy(drain={"enable": True})
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
