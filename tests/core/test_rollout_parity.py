"""The cases of the tests of NVIDIA's upgrade controller, as cases of ours.

Each is named as a reader finds it there: library (`pkg/upgrade`) or operator, the group, the case. What differs, and what only a cluster
shows, is in docs/upgrade-states.md; together they are all of `UPSTREAM`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from driver_manager import names
from driver_manager.config import Settings
from driver_manager.core.fleet import PolicySource
from driver_manager.core.freeing import Users, pods_to_free
from driver_manager.core.policy_groups import Groups, policy_groups
from driver_manager.core.rollout import decide
from driver_manager.core.rollout_states import Because, State
from driver_manager.core.situation import Decision, Freeing, Situation, Turn, Work
from driver_manager.core.snapshot import Owner, PodView
from tests.core.rollout_cases import UPSTREAM
from tests.core.rollouts import DEVICES, NEW, NOW, OLD, driver, ends, in_work, node, orphan, policy, record, situation, validator
from tests.core.test_rollout_budget import THROTTLE

ROOT = Path(__file__).resolve().parents[2]
GRANTED = Turn(is_granted=True)
INITIAL = {names.INITIAL_UNSCHEDULABLE: "true"}
ASKED = {names.UPGRADE_REQUESTED: "true"}
SAFE = {names.SAFE_LOAD: "true"}
MODE = {names.REQUESTOR_MODE: "true"}
READY = (driver(NEW),)
FOREIGN = {"is_cordoned": False}
JOBS = policy(waitForCompletion={"podSelector": "app=job", "timeoutSeconds": 60})
DRAIN = policy(drain={"enable": True, "force": True, "podSelector": "tier=web", "timeoutSeconds": 7})
ANY: dict[str, Any] = {"rules": {}}


def freeing(state: State, outcome: Freeing, **fields: Any) -> Situation:
    """A node whose pods are taken off, with how that went."""
    return situation(in_work(state, {**ANY, "attempt": 3}), freeing=outcome, **fields)


MOVES: dict[str, tuple[Situation, State]] = {
    "ApplyState: up to date, from unknown: done": (situation(node(), drivers=READY), State.DONE),
    "ApplyState: outdated, from unknown: upgrade-required": (situation(node()), State.REQUIRED),
    "ApplyState: outdated, from done: upgrade-required": (situation(node(State.DONE)), State.REQUIRED),
    "ApplyState: safe load, synced, from unknown: upgrade-required": (situation(node(annotations=SAFE), drivers=READY), State.REQUIRED),
    "ApplyState: safe load, synced, from done: upgrade-required": (
        situation(node(State.DONE, annotations=SAFE), drivers=READY),
        State.REQUIRED,
    ),
    "Pod deletion: used with a filter: pod-deletion-required": (situation(in_work(State.WAIT_FOR_JOBS)), State.POD_DELETION),
    "Pod restart: pod-restart-required and ready: uncordon-required": (
        situation(in_work(State.POD_RESTART), drivers=READY),
        State.UNCORDON,
    ),
    "Pod restart: upgrade-failed and ready: uncordon-required": (situation(in_work(State.FAILED), drivers=READY), State.UNCORDON),
    "Pod restart: repeated restarts: upgrade-failed": (
        situation(in_work(State.POD_RESTART), drivers=(driver(NEW, is_ready=False, restarts=11),)),
        State.FAILED,
    ),
    "Pod restart: validation enabled: validation-required": (
        situation(in_work(State.POD_RESTART), drivers=READY, needs_validator=True),
        State.VALIDATION,
    ),
    "Validation: complete: uncordon-required": (
        situation(in_work(State.VALIDATION), drivers=READY, needs_validator=True, validators=(validator(),)),
        State.UNCORDON,
    ),
    "Orphans: moved to upgrade-required if requested": (
        situation(node(State.DONE, annotations=ASKED), drivers=(orphan(),)),
        State.REQUIRED,
    ),
    "Orphans: upgrade-required and requested: cordon-required": (
        situation(node(State.REQUIRED, annotations=ASKED), drivers=(orphan(),), turn=GRANTED),
        State.CORDON,
    ),
    "Requestor: upgrade-required: node-maintenance-required": (
        situation(node(State.REQUIRED), turn=GRANTED, has_maintenance=True),
        State.MAINTENANCE,
    ),
    "Requestor: condition Ready: next state": (
        situation(in_work(State.MAINTENANCE, annotations=MODE), has_maintenance=True, maintenance="ready"),
        State.POD_RESTART,
    ),
    "Requestor: object missing: upgrade-required": (
        situation(in_work(State.MAINTENANCE, annotations=MODE), has_maintenance=True, maintenance="missing"),
        State.REQUIRED,
    ),
    "Requestor: cordon-required continues in place": (
        situation(in_work(State.CORDON), has_maintenance=True, maintenance="missing"),
        State.WAIT_FOR_JOBS,
    ),
    "Requestor: uncordon-required: done": (
        situation(in_work(State.UNCORDON, FOREIGN, annotations=MODE), has_maintenance=True, maintenance="missing"),
        State.DONE,
    ),
    "Requestor: orphan, requested": (
        situation(node(State.REQUIRED, annotations=ASKED), drivers=(orphan(),), turn=GRANTED, has_maintenance=True),
        State.MAINTENANCE,
    ),
    "Requestor: safe load": (
        situation(node(State.REQUIRED, annotations=SAFE), drivers=READY, turn=GRANTED, has_maintenance=True),
        State.MAINTENANCE,
    ),
    "Requestor: validation complete, initially cordoned": (
        situation(in_work(State.VALIDATION, FOREIGN, annotations={**MODE, **INITIAL}), drivers=READY, has_maintenance=True),
        State.UNCORDON,
    ),
    "PodManager: moves only after completion": (
        situation(in_work(State.WAIT_FOR_JOBS, ANY), policy=JOBS, jobs=()),
        State.POD_DELETION,
    ),
    "PodManager: moves on timeout": (
        situation(in_work(State.WAIT_FOR_JOBS, {**ANY, "deadline": NOW}), policy=JOBS, jobs=("a/job",)),
        State.POD_DELETION,
    ),
    "PodManager: eviction done: pod-restart-required": (freeing(State.POD_DELETION, Freeing(is_done=True)), State.POD_RESTART),
    "PodManager: eviction failed, drain off: upgrade-failed": (freeing(State.POD_DELETION, Freeing(failure="no")), State.FAILED),
    "PodManager: eviction failed, drain on: drain-required": (
        freeing(State.POD_DELETION, Freeing(failure="no"), policy=DRAIN),
        State.DRAIN,
    ),
    "ValidationManager: empty selector: validated": (situation(in_work(State.VALIDATION), drivers=READY), State.UNCORDON),
    "ValidationManager: timeout: upgrade-failed": (
        situation(
            in_work(State.VALIDATION, {"deadline": NOW}), drivers=READY, needs_validator=True, validators=(validator(is_ready=False),)
        ),
        State.FAILED,
    ),
    "Restart only: equal digest: pod-restart-required": (
        situation(node(State.REQUIRED), drivers=(driver(OLD, digest="digest-new"),), turn=GRANTED),
        State.POD_RESTART,
    ),
    "Restart only: other digest: cordon-required": (situation(node(State.REQUIRED), turn=GRANTED), State.CORDON),
    "Restart only: no digest: cordon-required": (
        situation(node(State.REQUIRED), drivers=(driver(OLD, digest=""),), turn=GRANTED),
        State.CORDON,
    ),
}


def step(seen: Situation) -> Decision:
    """One state is left, as NVIDIA's controller does it."""
    return decide(situation(seen.node, **fields_of(seen), settings=one_at_a_time(seen)))


def one_at_a_time(seen: Situation) -> Any:
    """Its settings, with that one on."""
    return type(seen.settings)(one_at_a_time=True)


def fields_of(seen: Situation) -> dict[str, Any]:
    """What was given to `situation` beside the node."""
    unread = ("node", "state", "progress", "bad_progress", "settings")
    return {name: getattr(seen, name) for name in seen.__dataclass_fields__ if name not in unread}


def through(seen: Situation, passed: int = 4) -> list[State]:
    """The states that are come to in so many writes, one at a time."""
    states = []
    for _ in range(passed):
        decision = step(seen)
        if not decision.moves:
            break
        states.append(decision.moves[-1].after)
        seen = situation(decision.change.on(seen.node), **fields_of(seen))
    return states


@pytest.mark.parametrize("case", MOVES)
def test_a_case_that_moves_a_node(case: str) -> None:
    """The node comes to the state that NVIDIA's controller writes; where ours has a state between, through it."""
    seen, state = MOVES[case]
    assert state in through(seen), (case, through(seen))


STAYS: dict[str, tuple[Situation, Because, Work]] = {
    "BuildState: no pods: empty": (situation(node(), drivers=()), Because.NO_DRIVER, Work.NOTHING),
    "ApplyState: nil policy ok": (situation(node(), policy=None), Because.POLICY_OFF, Work.NOTHING),
    "ApplyState: up to date, from done: done": (situation(node(State.DONE), drivers=READY), Because.UP_TO_DATE, Work.NOTHING),
    "Pod restart: only outdated pods are restarted": (situation(in_work(State.POD_RESTART)), Because.DRIVER_OUTDATED, Work.RESTART_DRIVER),
    "Pod restart: a terminating pod is not restarted": (
        situation(in_work(State.POD_RESTART, {"deadline": NOW + 1}), drivers=(driver(OLD, is_terminating=True),)),
        Because.DRIVER_STOPPING,
        Work.NOTHING,
    ),
    "Orphans: not moved to upgrade-required": (
        situation(node(State.DONE), drivers=(orphan(),)),
        Because.UP_TO_DATE,
        Work.NOTHING,
    ),
    "Orphans: restarted in pod-restart-required": (
        situation(in_work(State.POD_RESTART), drivers=(orphan(),)),
        Because.DRIVER_OUTDATED,
        Work.RESTART_DRIVER,
    ),
    "Orphans: upgrade-failed stays so": (situation(in_work(State.FAILED), drivers=(orphan(),)), Because.NEEDS_A_LOOK, Work.NOTHING),
    "Drain: scheduled with the policy's settings": (situation(in_work(State.DRAIN, ANY), policy=DRAIN), Because.FREEING, Work.DRAIN),
    "PodManager: does not move while running": (
        situation(in_work(State.WAIT_FOR_JOBS, ANY), policy=JOBS, jobs=("a/job",)),
        Because.WAITING_FOR_JOBS,
        Work.LOOK_FOR_JOBS,
    ),
    "ValidationManager: no pods: not validated": (
        situation(in_work(State.VALIDATION), drivers=READY, needs_validator=True),
        Because.VALIDATING,
        Work.NOTHING,
    ),
    "ValidationManager: not ready: not validated": (
        situation(in_work(State.VALIDATION), drivers=READY, needs_validator=True, validators=(validator(is_ready=False),)),
        Because.VALIDATING,
        Work.NOTHING,
    ),
    "ValidationManager: not running: not validated": (
        situation(in_work(State.VALIDATION), drivers=READY, needs_validator=True, validators=(validator(is_ready=False, phase="Pending"),)),
        Because.VALIDATING,
        Work.NOTHING,
    ),
    "Requestor: condition not Ready": (
        situation(in_work(State.MAINTENANCE, annotations=MODE), has_maintenance=True, maintenance="pending"),
        Because.MAINTENANCE,
        Work.NOTHING,
    ),
    "Requestor: object made": (situation(in_work(State.MAINTENANCE), has_maintenance=True), Because.MAINTENANCE, Work.ASK_MAINTENANCE),
    "Requestor: object released": (
        situation(in_work(State.UNCORDON, FOREIGN, annotations=MODE), has_maintenance=True, maintenance="ready"),
        Because.MAINTENANCE,
        Work.RELEASE_MAINTENANCE,
    ),
}


@pytest.mark.parametrize("case", STAYS)
def test_a_case_that_leaves_a_node_where_it_is(case: str) -> None:
    """The node stays, with a reason, and what is to be done meanwhile is named."""
    seen, because, work = STAYS[case]
    decision = decide(seen)
    assert not decision.moves, decision.moves
    assert decision.rest is not None
    assert (decision.rest.because, decision.rest.work) == (because, work)
    if work is Work.RESTART_DRIVER:
        assert decision.rest.pod == seen.drivers[0]


Left = Mapping[str, str | None]
WRITES: dict[str, tuple[Situation, Left, bool | None]] = {
    "ApplyState: cordoned nodes are annotated": (situation(node(State.DONE, unschedulable=True)), INITIAL, None),
    "Pod restart: safe load is unblocked instead": (
        situation(in_work(State.POD_RESTART, annotations=SAFE), drivers=(driver(NEW, is_ready=False),)),
        {names.SAFE_LOAD: None},
        None,
    ),
    "Pod restart: initially cordoned: done, annotation removed": (
        situation(in_work(State.POD_RESTART, FOREIGN, annotations=INITIAL), drivers=READY),
        {names.INITIAL_UNSCHEDULABLE: None},
        None,
    ),
    "Pod restart: failed, initially cordoned: done, annotation removed": (
        situation(in_work(State.FAILED, FOREIGN, annotations=INITIAL), drivers=READY),
        {names.INITIAL_UNSCHEDULABLE: None},
        None,
    ),
    "Validation: complete, initially cordoned: done": (
        situation(in_work(State.VALIDATION, FOREIGN, annotations=INITIAL), drivers=READY),
        {names.INITIAL_UNSCHEDULABLE: None},
        None,
    ),
    "Uncordon: uncordoned and done": (situation(in_work(State.UNCORDON), drivers=READY), {}, False),
    "Orphans: the request is taken off": (
        situation(node(State.REQUIRED, annotations=ASKED), drivers=(orphan(),), turn=GRANTED),
        {names.UPGRADE_REQUESTED: None},
        True,
    ),
    "CordonManager: cordon": (situation(node(State.REQUIRED), turn=GRANTED), {}, True),
    "CordonManager: uncordon": (situation(in_work(State.UNCORDON), drivers=READY), {}, False),
    "NodeUpgradeStateProvider: annotation set": (situation(node(State.DONE, unschedulable=True)), INITIAL, None),
    "NodeUpgradeStateProvider: annotation deleted": (
        situation(in_work(State.UNCORDON, FOREIGN, annotations=INITIAL), drivers=READY),
        {names.INITIAL_UNSCHEDULABLE: None},
        None,
    ),
    "SafeDriverLoadManager: unblock": (
        situation(in_work(State.VALIDATION, annotations=SAFE), drivers=READY),
        {names.SAFE_LOAD: None},
        False,
    ),
    "ValidationManager: completion removes the annotation": (
        situation(in_work(State.VALIDATION, annotations={names.VALIDATION_STARTED: "1"}), drivers=READY),
        {names.VALIDATION_STARTED: None},
        False,
    ),
}


@pytest.mark.parametrize("case", WRITES)
def test_a_case_that_writes_annotations_or_the_cordon(case: str) -> None:
    """In one write with the label: what is set, what is taken off, and whether the node is opened."""
    seen, annotations, unschedulable = WRITES[case]
    change = decide(seen).change
    assert {key: change.annotations.get(key, "unchanged") for key in annotations} == annotations
    assert change.unschedulable is unschedulable


def test_state_provider_changes_the_state() -> None:
    """NodeUpgradeStateProvider: state changed: the label is in the write."""
    assert decide(situation(node())).change.labels == {names.UPGRADE_STATE: State.REQUIRED.value}


def test_safe_load_is_detected() -> None:
    """SafeDriverLoadManager: detect: any value that is not empty."""
    assert situation(node(annotations={names.SAFE_LOAD: "x"})).waits_for_safe_load
    assert not situation(node(annotations={names.SAFE_LOAD: ""})).waits_for_safe_load


def test_the_drain_has_the_policys_settings() -> None:
    """Drain: scheduled with the policy's settings: those of the policy in force."""
    drain = situation(in_work(State.DRAIN, ANY), policy=DRAIN).in_force.drain
    assert (drain.force, drain.pod_selector.text, drain.timeout_seconds) == (True, "tier=web", 7)


def source(kind: str, name: str = "p", **fields: Any) -> PolicySource:
    """A ClusterPolicy or an NVIDIADriver."""
    return PolicySource(kind=kind, name=name, uid=f"uid-{name}", resource_version="1", **fields)


BARE = PodView(namespace="a", name="bare", uid="uid-bare", resources=frozenset({"nvidia.com/gpu"}))
SCRATCH = replace(BARE, name="scratch", owner=Owner("ReplicaSet", "web"), has_empty_dir=True)
EVICTIONS: dict[str, tuple[PodView, dict[str, Any], bool]] = {
    "PodManager: eviction with force: pod-restart-required": (BARE, {"force": True}, True),
    "PodManager: eviction without force fails": (BARE, {}, False),
    "PodManager: eviction of emptyDir with the flag": (SCRATCH, {"deleteEmptyDir": True}, True),
    "PodManager: eviction of emptyDir without the flag fails": (SCRATCH, {}, False),
}


@pytest.mark.parametrize("case", EVICTIONS)
def test_a_case_of_who_may_be_evicted(case: str) -> None:
    """Pods that nobody would make again, or whose files would be lost, go only where the policy says so; else they are named."""
    pod, deletion, may_go = EVICTIONS[case]
    found = pods_to_free(node(), [pod], policy(podDeletion=deletion), Users(settings=Settings(node_name="n"), claims={}))
    assert (found.evict == (pod,)) is may_go
    assert bool(found.refusals) is not may_go
    assert may_go or pod.ref in found.refusals[0]


ON = {"autoUpgrade": True}
OWNED = {names.DRIVER_OWNER: "p"}
ROUTES: dict[str, tuple[Groups, bool]] = {
    "upgrade_controller: no ClusterPolicy, no GPUCluster": (policy_groups([], []), False),
    "upgrade_controller: NVIDIADriver without a ClusterPolicy": (
        policy_groups([], [source("NVIDIADriver", upgrade_policy=ON)]),
        True,
    ),
    "upgrade_controller: NVIDIADriver without a policy: autoUpgrade": (policy_groups([], [source("NVIDIADriver")]), True),
    "upgrade_controller: an NVIDIADriver that is off cleans up its own nodes": (
        policy_groups([], [source("NVIDIADriver", upgrade_policy={"autoUpgrade": False}), source("NVIDIADriver", "other")]),
        False,
    ),
    "upgrade_controller: ClusterPolicy": (policy_groups([source("ClusterPolicy", "c", upgrade_policy=ON)], []), True),
    "upgrade_controller: sandbox workloads: cleanup": (
        policy_groups([source("ClusterPolicy", "c", upgrade_policy=ON, has_sandbox_workloads=True)], []),
        False,
    ),
    "upgrade_controller: a ClusterPolicy that delegates: NVIDIADriver's policy": (
        policy_groups(
            [source("ClusterPolicy", "c", uses_nvidia_driver_crd=True, has_sandbox_workloads=True)],
            [source("NVIDIADriver", upgrade_policy=ON)],
        ),
        True,
    ),
    "active_config: oldest, then the name": (
        policy_groups(
            [
                source("ClusterPolicy", "b", created="2026-01-02", upgrade_policy={}),
                source("ClusterPolicy", "c", created="2026-01-01", upgrade_policy={}),
                source("ClusterPolicy", "a", created="2026-01-01", upgrade_policy=ON),
            ],
            [],
        ),
        True,
    ),
}


@pytest.mark.parametrize("case", ROUTES)
def test_a_case_of_whose_policy_counts(case: str) -> None:
    """A node under a policy stays upgrade-done; where none upgrades it, its label goes."""
    groups, is_on = ROUTES[case]
    found = groups.of(OWNED)
    decision = decide(situation(node(State.DONE), policy=found.policy, drivers=READY))
    assert (ends(decision) is State.UNKNOWN) is not is_on, found


def test_an_nvidia_driver_that_is_off_touches_no_node_of_others() -> None:
    """An NVIDIADriver that is off cleans up its own nodes: those of another keep their policy."""
    groups, _ = ROUTES["upgrade_controller: an NVIDIADriver that is off cleans up its own nodes"]
    assert groups.of({names.DRIVER_OWNER: "other"}).policy is not None


def test_a_broken_policy_is_no_absent_one() -> None:
    """It is told by name, and it is known that it is broken, so that nodes keep their labels."""
    groups = policy_groups([source("ClusterPolicy", "c", upgrade_policy={"maxUnavailable": "300%"})], [])
    assert groups.of({}).is_broken
    assert "maxUnavailable is '300%'" in groups.problems["ClusterPolicy/c"]


# Where ours differs -------------------------------------------------------------------------------------------------


def test_a_drain_that_is_off_frees_the_node_all_the_same() -> None:
    """A node in drain-required that may not be drained is not restarted under its users: they are taken off first."""
    decision = decide(situation(in_work(State.DRAIN)))
    assert decision.rest is not None
    assert decision.rest.work is Work.FREE


def test_a_failed_orphan_has_an_exit() -> None:
    """A new template, a person's acceptance or request takes a failed node with an orphan on (weakness 34)."""
    for fields, marks in (({"wanted": "newer"}, {}), ({}, {names.ACCEPT: "true"}), ({}, ASKED)):
        assert decide(situation(in_work(State.FAILED, annotations=marks), drivers=(orphan(),), **fields)).moves


def test_a_failed_validation_is_not_accepted_because_the_driver_runs() -> None:
    """The driver is ready, and still the node stays closed as long as its validator is not (weakness 38)."""
    seen = situation(in_work(State.FAILED), drivers=READY, needs_validator=True, validators=(validator(is_ready=False),))
    assert not decide(seen).moves


def test_decision_40_a_request_for_a_driver_that_is_well_evicts_nobody() -> None:
    """The request is taken off, and the node stays done."""
    decision = decide(situation(node(State.DONE, annotations=ASKED), drivers=READY))
    assert ends(decision) is State.DONE
    assert decision.change.annotations == {names.UPGRADE_REQUESTED: None}


def test_decision_40_a_request_survives_until_the_start() -> None:
    """It goes in the same write as the cordon, so that it is not lost while the node waits (weakness 26)."""
    waiting = decide(situation(node(State.DONE, annotations=ASKED)))
    assert names.UPGRADE_REQUESTED not in waiting.change.annotations
    sick = (driver(NEW, is_ready=False),)
    begun = decide(situation(node(State.REQUIRED, record(State.REQUIRED), annotations=ASKED), drivers=sick, turn=GRANTED))
    assert begun.moves[0].after is State.CORDON
    assert begun.change.annotations[names.UPGRADE_REQUESTED] is None


def test_decision_39_devices_open_the_node() -> None:
    """Fewer devices than before keep it closed to the limit, then it fails; more is fine; a person's annotation opens it."""
    few, more = {"nvidia.com/gpu": 7}, {"nvidia.com/gpu": 9}
    assert not decide(situation(in_work(State.VALIDATION, allocatable=few), drivers=READY)).moves
    late = {"deadline": NOW}
    assert ends(decide(situation(in_work(State.VALIDATION, late, allocatable=few), drivers=READY))) is State.FAILED
    assert ends(decide(situation(in_work(State.VALIDATION, allocatable=more), drivers=READY))) is State.DONE
    accepted = in_work(State.FAILED, allocatable=few, annotations={names.ACCEPT: "true"})
    decision = decide(situation(accepted, drivers=READY))
    assert ends(decision) is State.DONE
    assert (decision.change.unschedulable, decision.change.annotations[names.ACCEPT]) == (False, None)


def test_decision_39_devices_are_those_before_the_first_cordon() -> None:
    """A retry does not overwrite them; where none is allocatable, what there is at all counts."""
    started = decide(situation(node(State.REQUIRED), turn=GRANTED)).progress
    assert started is not None
    assert started.devices == DEVICES
    none: dict[str, Any] = {"allocatable": {"nvidia.com/gpu": 0}}
    again = decide(situation(node(State.REQUIRED, record(State.REQUIRED, is_cordoned=False), **none), turn=GRANTED)).progress
    assert again is not None
    assert again.devices == DEVICES
    first = decide(situation(node(State.REQUIRED, **none), turn=GRANTED)).progress
    assert first is not None
    assert first.devices == DEVICES


def test_decision_39_devices_in_resource_slices_open_the_node_too() -> None:
    """A node of the DRA stack has nothing allocatable: what its slices hold is recorded, and kept by a retry, and has to be back."""
    bare: dict[str, Any] = {"allocatable": {}, "capacity": {}}
    started = decide(situation(node(State.REQUIRED, **bare), published=8, turn=GRANTED)).progress
    assert started is not None
    assert started.devices == {names.GPU_DRA_DRIVER: 8}
    known = {"devices": dict(started.devices)}
    retried = record(State.REQUIRED, is_cordoned=False, **known)
    again = decide(situation(node(State.REQUIRED, retried, **bare), published=0, turn=GRANTED)).progress
    assert again is not None
    assert again.devices == started.devices
    few = decide(situation(in_work(State.VALIDATION, known, **bare), drivers=READY, published=7))
    assert few.rest is not None
    assert (few.rest.because, few.moves) == (Because.DEVICES_MISSING, ())
    assert "8 devices of gpu.nvidia.com, of which 7 are in its ResourceSlices" in few.rest.sentence
    for there in (8, 9):
        assert ends(decide(situation(in_work(State.VALIDATION, known, **bare), drivers=READY, published=there))) is State.DONE
    without = decide(situation(node(State.REQUIRED), turn=GRANTED)).progress
    assert without is not None
    assert names.GPU_DRA_DRIVER not in without.devices


def test_a_pending_pod_does_not_hide_the_orphan_before_it() -> None:
    """The new pod waits for the place of the orphan: the orphan is the one that goes."""
    pending = driver(NEW, is_ready=False, is_bound=False, phase="Pending")
    decision = decide(situation(in_work(State.POD_RESTART), drivers=(orphan(), pending)))
    assert decision.rest is not None
    assert decision.rest.pod == orphan()


# All of them --------------------------------------------------------------------------------------------------------


def rows(title: str) -> dict[str, str]:
    """First column -> the rest, of the table below a title of the page."""
    page = (ROOT / "docs/upgrade-states.md").read_text()
    part = page.split(f"## {title}\n")[1].split("\n## ")[0]
    lines = [line.strip("| ").split(" | ", 1) for line in part.splitlines() if line.startswith("| ")]
    return dict(lines[2:])


def test_every_case_is_shown_or_told() -> None:
    """Each case of NVIDIA's tests is a case here, or a row of the page that says how ours differs or what shows it."""
    here = {*MOVES, *STAYS, *WRITES, *ROUTES, *EVICTIONS, *(f"Throttle: {case}" for case in THROTTLE), *NAMED}
    told = {**rows("Where ours differs, and why"), **rows("Shown on a cluster")}
    assert not here & {*told}, "shown and told"
    assert here | {*told} >= {*UPSTREAM}, {*UPSTREAM} - here - {*told}
    assert {*told} <= {*UPSTREAM}, {*told} - {*UPSTREAM}


NAMED = {
    "NodeUpgradeStateProvider: state changed": test_state_provider_changes_the_state,
    "SafeDriverLoadManager: detect": test_safe_load_is_detected,
}
"""Cases with a test of their own."""


@pytest.mark.parametrize("row", [*rows("Where ours differs, and why").items(), *rows("Shown on a cluster").items()], ids=lambda row: row[0])
def test_a_row_names_a_test_that_is_there(row: tuple[str, str]) -> None:
    """Tests that the page names exist."""
    _, rest = row
    assert "TODO" not in rest
    named = re.findall(r"`(test_\w+)`", rest)
    known = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert all(f"def {name}(" in known for name in named), named
