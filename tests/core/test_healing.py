"""When a node is healed, swept or left alone: tables, and what holds for every node."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver_manager import names
from driver_manager.core.cleanup import clean, unpark
from driver_manager.core.fleet import FleetSet
from driver_manager.core.healing import Patient, Why, driver_sets, put_back, treat
from driver_manager.core.hold import parked_on
from driver_manager.core.record import Record, apply_record, decode, encode, find_record
from driver_manager.core.remains import OF_AN_UPGRADE, OURS, applied, is_nothing, remains_of
from driver_manager.core.rollout_record import Progress
from driver_manager.core.rollout_record import encode as written
from driver_manager.core.rollout_states import State
from driver_manager.core.snapshot import Identity, NodeView, Taint, Toleration
from tests.core.given import nodes, records

LABEL = names.DEPLOY_PREFIX + "dcgm"
RUN, TAINT = "abcde12345", Taint(names.KEEP_OFF_TAINT, "dm-abcde12345")
CLEAN = NodeView(name="n", uid="uid-n", resource_version="7", labels={LABEL: "true", "team": "a"}, boot_id="boot-1")
RECORD = Record(
    run=RUN, node_uid="uid-n", boot_id="boot-1", started="t", labels={LABEL: "true"}, is_cordoned=True, taint=TAINT,
    pod=Identity("gpu-operator", "driver-x", "uid-author"),
)  # fmt: skip
LEFT = applied(CLEAN, apply_record(RECORD, CLEAN))
DRIVER = FleetSet(
    namespace="gpu-operator", name="driver", uid="uid-ds", pod_labels={names.COMPONENT_LABEL: "nvidia-driver"},
    node_selector={"team": "a"}, tolerations=(Toleration(names.KEEP_OFF_TAINT, "Exists"),),
)  # fmt: skip
SETTLE, PAUSE = 300.0, 30.0
PATIENT = Patient(node=LEFT, alone_for=SETTLE)


def with_record(**changes: Any) -> NodeView:
    return replace(LEFT, annotations={names.RECORD: encode(replace(RECORD, **changes))})


WITH_STATE = replace(CLEAN, labels={names.UPGRADE_STATE: "upgrade-done"})
BY_HAND = with_record(pod=Identity())
SERVICES = applied(with_record(services=("dcgm.service",)), put_back(replace(RECORD, services=("dcgm.service",)), LEFT).change)
CASES: list[tuple[str, Patient, Why]] = [
    ("nothing of ours", replace(PATIENT, node=CLEAN), Why.CLEAN),
    ("a driver pod", replace(PATIENT, drivers=("gpu-operator/driver-y",)), Why.DRIVER_HERE),
    ("the author", replace(PATIENT, pods=frozenset({"uid-author"})), Why.AUTHOR_LIVES),
    ("another pod", replace(PATIENT, pods=frozenset({"uid-train"})), Why.CLAIMED),
    ("a driver is due", replace(PATIENT, sets=(DRIVER,)), Why.DRIVER_DUE),
    ("our taint keeps it off", replace(PATIENT, sets=(replace(DRIVER, tolerations=()),)), Why.CLAIMED),
    ("not looked for yet", replace(PATIENT, alone_for=None), Why.SETTLING),
    ("not for long", replace(PATIENT, alone_for=SETTLE - 0.1), Why.SETTLING),
    ("long enough", PATIENT, Why.CLAIMED),
    ("claimed by a predecessor", replace(PATIENT, claim="other12345", claimed_for=PAUSE), Why.CLAIMED),
    ("just claimed", replace(PATIENT, claim=RUN, claimed_for=PAUSE - 0.1), Why.SETTLING),
    ("claimed", replace(PATIENT, claim=RUN, claimed_for=PAUSE), Why.HEALED),
    ("claimed, and the driver is back", replace(PATIENT, claim=RUN, claimed_for=PAUSE, drivers=("a/b",)), Why.DRIVER_HERE),
    ("not Ready", replace(PATIENT, node=replace(LEFT, is_ready=False)), Why.NODE_NOT_READY),
    ("not Ready, another boot", replace(PATIENT, node=replace(LEFT, is_ready=False, boot_id="boot-2")), Why.CLAIMED),
    ("by hand", replace(PATIENT, node=BY_HAND), Why.RUN_BY_HAND),
    ("by hand, another boot", replace(PATIENT, node=replace(BY_HAND, boot_id="boot-2")), Why.CLAIMED),
    ("by hand, boot not known", replace(PATIENT, node=replace(BY_HAND, boot_id="")), Why.RUN_BY_HAND),
    ("by hand, without its boot", replace(PATIENT, node=with_record(pod=Identity(), boot_id="")), Why.RUN_BY_HAND),
    ("services alone", replace(PATIENT, node=SERVICES), Why.SERVICES_STOPPED),
    ("services, another boot", replace(PATIENT, node=replace(SERVICES, boot_id="boot-2")), Why.CLAIMED),
    ("unreadable", replace(PATIENT, node=replace(LEFT, annotations={names.RECORD: "{"})), Why.BAD_RECORD),
    ("of another node", replace(PATIENT, node=replace(LEFT, uid="uid-m")), Why.SWEPT),
    ("of another node, a driver is due", replace(PATIENT, node=replace(LEFT, uid="uid-m"), sets=(DRIVER,)), Why.DRIVER_DUE),
    ("a state", replace(PATIENT, node=WITH_STATE), Why.SWEPT),
    ("gpu-operator's state", Patient(node=WITH_STATE, alone_for=SETTLE, is_state_ours=False), Why.CLEAN),
    ("no state at all", replace(PATIENT, node=replace(CLEAN, labels={names.UPGRADE_STATE: "x"})), Why.CLEAN),
    ("a taint without a record", replace(PATIENT, node=replace(CLEAN, taints=(TAINT,))), Why.SWEPT),
    ("somebody's taint", replace(PATIENT, node=replace(CLEAN, taints=(Taint("team", "dm-team"),))), Why.CLEAN),
    ("a cordon without a record", replace(PATIENT, node=replace(CLEAN, unschedulable=True)), Why.CLEAN),
]  # fmt: skip


@pytest.mark.parametrize(("patient", "why"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_what_is_done(patient: Patient, why: Why) -> None:
    """Decision 36, N49: the table of who is left alone, and why."""
    assert treat(patient, SETTLE, PAUSE, "newrun1234").why is why


def test_the_claim_changes_nothing_but_the_run() -> None:
    """The first write: another run id, all else of the record as it was."""
    change = treat(PATIENT, SETTLE, PAUSE, "newrun1234").change
    assert change is not None
    text = change.annotations[names.RECORD]
    assert text is not None
    assert decode(text) == replace(RECORD, run="newrun1234")
    assert is_nothing(replace(change, annotations={}))


def test_the_undo_is_exact() -> None:
    """The second write: the node as before, the record gone with it, the dead run's status too."""
    node = replace(LEFT, annotations={**LEFT.annotations, names.STATUS: "{}"})
    change = treat(replace(PATIENT, node=node, claim=RUN, claimed_for=PAUSE), SETTLE, PAUSE, "x").change
    assert change is not None
    assert applied(node, change) == CLEAN


def test_stopped_services_stay_on_the_record() -> None:
    """Units of the host cannot be started from afar: the record keeps them, and says so, until a reboot has started them."""
    treatment = treat(replace(PATIENT, node=with_record(services=("dcgm.service",)), claim=RUN, claimed_for=PAUSE), SETTLE, PAUSE, "x")
    assert treatment.change is not None
    after = applied(LEFT, treatment.change)
    record = find_record(after).record
    assert record is not None
    assert (record.services, dict(record.labels), record.is_cordoned, record.taint) == (("dcgm.service",), {}, False, None)
    assert replace(after, annotations={}) == replace(CLEAN, annotations={})
    assert "dcgm.service" in " ".join(treatment.left_alone)
    rebooted = replace(after, boot_id="boot-2")
    healed = treat(replace(PATIENT, node=rebooted, claim=RUN, claimed_for=PAUSE), SETTLE, PAUSE, "x").change
    assert healed is not None
    assert names.RECORD not in applied(rebooted, healed).annotations


def in_flow(state: State, *, is_cordoned: bool = True, uid: str = "uid-n") -> NodeView:
    """A node of a roll-out that was begun."""
    held: dict[str, Any] = {"parked": ["monitoring/exporter"], "paused": {LABEL: "true"}, "taint": names.KEEP_OFF_TAINT}
    annotations = {names.ROLLOUT: written(Progress(node=uid, state=state.value, is_cordoned=is_cordoned, **held))}
    annotations[names.PARKED] = "monitoring/exporter"
    annotations |= dict.fromkeys((*OF_AN_UPGRADE, *OURS), "true")
    labels = {**CLEAN.labels, LABEL: names.PAUSED, names.PARKED: "true", names.UPGRADE_STATE: state.value}
    return replace(CLEAN, labels=labels, annotations=annotations, unschedulable=True, taints=(Taint(names.KEEP_OFF_TAINT, "dm-rollout"),))


@pytest.mark.parametrize("state", [state for state in State if state is not State.UNKNOWN])
def test_n49_what_is_left_of_an_upgrade_goes(state: State) -> None:
    """N49: from every state, where no driver DaemonSet matches any more: everything of ours goes in one write."""
    node = in_flow(state)
    change = treat(Patient(node=node, alone_for=SETTLE), SETTLE, PAUSE, "x").change
    assert change is not None
    assert applied(node, change) == CLEAN


def test_n49_not_while_the_pod_is_only_made_anew() -> None:
    """N49: as long as a DaemonSet's selector matches nothing is taken off, whatever taint keeps its pods away."""
    kept_off = replace(DRIVER, tolerations=())
    node = replace(in_flow(State.POD_RESTART), taints=(Taint("example.com/repair"),))
    assert treat(Patient(node=node, alone_for=9e9, sets=(kept_off,)), SETTLE, PAUSE, "x").why is Why.DRIVER_DUE


@pytest.mark.parametrize(
    ("node", "is_left"),
    [
        (in_flow(State.DONE, is_cordoned=False), True),
        (in_flow(State.DONE, uid="uid-m"), True),
        (replace(in_flow(State.DONE), annotations={**in_flow(State.DONE).annotations, names.KEEP_CORDON: "true"}), True),
        (in_flow(State.DONE), False),
    ],
    ids=["somebody's", "of another node", "kept", "ours"],
)
def test_r3_whose_cordon(node: NodeView, is_left: bool) -> None:
    """R3: only a cordon of which a record of this very node says that it is ours is taken off."""
    assert (remains_of(node).change.unschedulable is None) is is_left


def test_beside_a_gpu_operator_the_state_stays() -> None:
    """Decision 31: its labels and annotations are left to it; ours and our cordon go."""
    node = in_flow(State.POD_DELETION)
    after = applied(node, remains_of(node, is_state_ours=False).change)
    assert after.labels[names.UPGRADE_STATE] == State.POD_DELETION
    assert set(after.annotations) == set(OF_AN_UPGRADE)
    assert not after.unschedulable


@given(nodes(), records, st.booleans(), st.booleans())
def test_nothing_of_others_is_touched(node: NodeView, record: Record, is_same_uid: bool, is_same_boot: bool) -> None:
    """R3: whatever is on a node, an undo writes only keys of the record and our own, and doing it again does nothing."""
    record = replace(record, node_uid=node.uid if is_same_uid else "uid-m", services=())
    annotations = {**node.annotations, names.RECORD: encode(record)}
    node = replace(node, boot_id=record.boot_id if is_same_boot else "other", annotations=annotations)
    undo = put_back(record, node) if is_same_uid else remains_of(node)
    after = applied(node, undo.change)
    assert set(undo.change.labels) <= set(record.labels)
    assert set(undo.change.annotations) <= {names.RECORD, names.STATUS}
    assert all(node.labels[key] == names.PAUSED for key in undo.change.labels)
    ours = {(record.taint.key, record.taint.value)} if record.taint else set()
    assert {(t.key, t.value) for t in set(node.taints) - set(after.taints)} <= ours
    assert undo.change.unschedulable is None or (record.is_cordoned and (is_same_uid or is_same_boot))
    assert is_nothing(remains_of(after).change)


@given(nodes(), records, st.sampled_from(State), st.booleans(), st.booleans())
def test_a_cleaned_node_is_clean(node: NodeView, record: Record, state: State, is_parked: bool, is_by_hand: bool) -> None:
    """Issue 7: what is left of ours on a cleaned node is named, and cleaning it again changes nothing."""
    pod = Identity() if is_by_hand else Identity("a", "b", "c")
    record = replace(record, node_uid=node.uid, pod=pod, services=())
    labels = {**node.labels, **({names.UPGRADE_STATE: state.value} if state else {}), **({names.PARKED: "true"} if is_parked else {})}
    progress = written(Progress(node=node.uid, state=state.value, is_cordoned=True))
    annotations = {**node.annotations, names.RECORD: encode(record), names.ROLLOUT: progress, names.STATUS: "{}"}
    node = replace(node, labels=labels, annotations=annotations, boot_id=record.boot_id)
    after = applied(node, unpark(node).change)
    done = clean(after, is_state_ours=True)
    after = applied(after, done.change)
    again = clean(after, is_state_ours=True)
    assert again.is_nothing
    assert unpark(after).is_nothing
    for key in (names.PARKED, names.UPGRADE_STATE, names.ROLLOUT, names.STATUS):
        assert key not in after.annotations
        assert key not in after.labels
    assert (names.RECORD in after.annotations) is is_by_hand
    assert names.RECORD not in after.annotations or any("restore" in each for each in again.left)
    assert not after.unschedulable or any("cordon" in each or record.run in each for each in again.left)


def test_a_run_by_hand_keeps_its_park() -> None:
    """A run that may live keeps off what it has parked, and nobody else is kept off any more; the mark for agents goes."""
    record = Record(run="r", node_uid=CLEAN.uid, boot_id=CLEAN.boot_id, started="t", parked=("mon/a",))
    annotations = {names.PARKED: "mon/a,mon/b", names.RECORD: encode(record), names.PARKING: names.PARKING_ENFORCED}
    node = replace(CLEAN, labels={**CLEAN.labels, names.PARKED: "true"}, annotations=annotations)
    after = applied(node, unpark(node).change)
    assert parked_on(after) == {"mon/a"}
    assert names.PARKING not in after.annotations
    assert unpark(after).is_nothing
    dead = replace(node, annotations={**annotations, names.RECORD: encode(replace(record, pod=Identity("a", "b", "c")))})
    assert parked_on(applied(dead, unpark(dead).change)) == frozenset()


def test_which_sets_matter() -> None:
    """Only a driver's DaemonSet that stays and whose selector matches is due."""
    others = [replace(DRIVER, is_deleting=True), replace(DRIVER, node_selector={"team": "b"}), replace(DRIVER, pod_labels={"app": "dcgm"})]
    assert driver_sets(CLEAN, [*others, DRIVER]) == (DRIVER,)
