"""The record: what it holds comes back exactly, and what it does not hold is left alone."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver_manager import names
from driver_manager.core.labels import labels_to_pause
from driver_manager.core.record import (
    MAX_BYTES,
    BadRecord,
    NodeChange,
    Phase,
    Record,
    apply_record,
    decode,
    encode,
    find_record,
    leftovers,
    merged,
    rebased,
    taken_off,
    undo_record,
)
from driver_manager.core.snapshot import NodeView, Taint
from driver_manager.errors import InvariantBroken
from tests.core.given import nodes, records

LABEL = names.DEPLOY_PREFIX + "dcgm"


def changed(node: NodeView, change: NodeChange) -> NodeView:
    """The node after a change, as the API server makes it."""
    labels = {**node.labels, **change.labels}
    annotations = {**node.annotations, **change.annotations}
    return replace(
        node,
        labels={key: value for key, value in labels.items() if value is not None},
        annotations={key: value for key, value in annotations.items() if value is not None},
        unschedulable=node.unschedulable if change.unschedulable is None else change.unschedulable,
        taints=node.taints if change.taints is None else change.taints,
    )


def planned(node: NodeView, taint: Taint | None = None) -> Record:
    """A record as the planner makes it for a node."""
    labels = labels_to_pause(node.labels, "example.com/gpu", {}).all
    return Record(run="run", node_uid=node.uid, boot_id="b", started="t", labels=labels, is_cordoned=not node.unschedulable, taint=taint)


def free_taint(node: NodeView) -> Taint | None:
    """A taint of this run under a key that is free."""
    taken = {one.key for one in node.taints if one.effect == "NoSchedule"}
    return next((Taint(key, "dm-run") for key in (names.KEEP_OFF_TAINT, names.GPU_TAINT) if key not in taken), None)


def without_guesses(node: NodeView) -> NodeView:
    """The node without values that some program has paused: those do not come back as they were, by design (table 1.3)."""
    return replace(node, labels={key: value for key, value in node.labels.items() if names.PAUSED not in value})


@given(record=records)
def test_round_trip(record: Record) -> None:
    """What is written is read again, every field."""
    assert decode(encode(record)) == record


KEYS = ["version", "run", "nodeUID", "bootID", "started", "phase", "labels", "cordoned", "pod", "taint", "key"]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(KEYS), inner),
)


@given(json_values)
def test_malformed_records_are_reported(body: object) -> None:
    """No JSON value crashes the reader: it is a record or a complaint that names the annotation."""
    if isinstance(body, dict):
        body["version"] = 1
    node = NodeView(name="n", uid="u", resource_version="1", annotations={names.RECORD: json.dumps(body)})
    found = find_record(node)
    assert found.record is None
    assert found.is_unreadable
    assert names.RECORD in found.complaint


@given(st.data(), records)
def test_one_bad_field_is_enough(data: st.DataObject, record: Record) -> None:
    """A record with one field of the wrong kind, or missing, is unreadable, and the complaint names the field."""
    body = json.loads(encode(record))
    field = data.draw(st.sampled_from(["run", "nodeUID", "bootID", "started", "phase", "labels", "cordoned"]))
    body[field] = data.draw(st.sampled_from([None, 7, [], {"a": 1}]))
    with pytest.raises(BadRecord, match=field):
        decode(json.dumps(body))


@pytest.mark.parametrize("text", ["", "{", "null", "[]", '"x"', "[" * 100_000, '{"version":2}', "{}", "\x00", "1e999"])
def test_what_is_no_record(text: str) -> None:
    """Text that is no record of this version is a complaint, not a crash."""
    with pytest.raises(BadRecord):
        decode(text)


def test_the_size_is_bounded() -> None:
    """A record larger than its bound is a bug that is found before it is written."""
    record = Record(run="r", node_uid="u", boot_id="b", started="t", labels={f"k{n}": "v" * 60 for n in range(400)})
    with pytest.raises(InvariantBroken, match=str(MAX_BYTES)):
        encode(record)


@given(node=nodes())
def test_r03_undo_of_apply_is_the_node(node: NodeView) -> None:
    """R3: pausing and putting back gives the node exactly as it was, whatever was on it."""
    node = without_guesses(node)
    node = replace(node, annotations={key: value for key, value in node.annotations.items() if key != names.KEEP_CORDON})
    record = planned(node, free_taint(node))
    paused = changed(node, apply_record(record, node))
    assert find_record(paused).record == record
    assert not taken_off(record, paused)
    undo = undo_record(record, paused)
    assert changed(paused, undo.change) == node
    assert undo.left_alone == ()


@given(node=nodes())
def test_undo_twice_is_undo(node: NodeView) -> None:
    """Undoing again changes nothing, and nothing is left over after it."""
    record = planned(node, free_taint(node))
    once = changed(node, apply_record(record, node))
    once = changed(once, undo_record(record, once).change)
    assert changed(once, undo_record(record, once).change) == once
    assert leftovers(record, once) == ()


@given(node=nodes(), others=nodes())
def test_r03_what_others_changed_meanwhile_is_theirs(node: NodeView, others: NodeView) -> None:
    """R3: only values that still are what we wrote are put back; everything else is as the others left it."""
    record = planned(node, free_taint(node))
    paused = changed(node, apply_record(record, node))
    edited = replace(paused, labels={**paused.labels, **others.labels}, annotations={**paused.annotations, **others.annotations})
    after = changed(edited, undo_record(record, edited).change)
    for key, value in edited.labels.items():
        ours = key in record.labels and value == names.PAUSED
        assert after.labels[key] == (record.labels[key] if ours else value)
    assert {key: value for key, value in after.annotations.items()} == {
        key: value for key, value in edited.annotations.items() if key != names.RECORD
    }
    assert set(after.taints) == {one for one in edited.taints if one != record.taint}


@given(node=nodes())
def test_n23_a_foreign_taint_is_never_replaced(node: NodeView) -> None:
    """N23: a taint that is not ours, under a key that we want, stays at apply and at undo."""
    taint = Taint(names.KEEP_OFF_TAINT, "dm-run")
    record = planned(node, taint)
    paused = changed(node, apply_record(record, node))
    foreign = {one for one in node.taints if not one.value.startswith(names.TAINT_VALUE_PREFIX)}
    assert foreign <= set(paused.taints)
    assert len({(one.key, one.effect) for one in paused.taints}) == len(paused.taints)
    assert foreign <= set(changed(paused, undo_record(record, paused).change).taints)


def test_a_left_taint_of_an_earlier_run_is_taken_over() -> None:
    """A taint of an earlier run of ours becomes this run's, in place, and goes with it."""
    node = NodeView(name="n", uid="u", resource_version="1", taints=(Taint(names.GPU_TAINT, "dm-old"),))
    record = planned(node, Taint(names.GPU_TAINT, "dm-run"))
    paused = changed(node, apply_record(record, node))
    assert paused.taints == (Taint(names.GPU_TAINT, "dm-run"),)
    assert changed(paused, undo_record(record, paused).change).taints == ()


def test_a_record_of_another_node_is_no_record() -> None:
    """Decision 6: another uid means another node, also of the same name; it is reported and not unreadable."""
    record = Record(run="r", node_uid="old", boot_id="b", started="t")
    node = NodeView(name="n", uid="new", resource_version="1", annotations={names.RECORD: encode(record)})
    found = find_record(node)
    assert found.record is None
    assert not found.is_unreadable
    assert "another node" in found.complaint


@pytest.mark.parametrize(
    ("now", "after", "is_reported"),
    [(names.PAUSED, "true", False), ("true", "true", False), ("false", "false", True), (None, None, True)],
)
def test_labels_at_undo(now: str | None, after: str | None, is_reported: bool) -> None:
    """A label still paused is put back, one put back already is fine, any other value stays and is reported."""
    record = Record(run="r", node_uid="u", boot_id="b", started="t", labels={LABEL: "true"})
    node = NodeView(name="n", uid="u", resource_version="1", labels={} if now is None else {LABEL: now})
    undo = undo_record(record, node)
    assert changed(node, undo.change).labels.get(LABEL) == after
    assert bool(undo.left_alone) == is_reported


@pytest.mark.parametrize("is_kept", [True, False])
def test_the_cordon_at_undo(is_kept: bool) -> None:
    """Our cordon ends unless a person asks to keep it, which is reported."""
    record = Record(run="r", node_uid="u", boot_id="b", started="t", is_cordoned=True)
    annotations = {names.KEEP_CORDON: "true"} if is_kept else {}
    node = NodeView(name="n", uid="u", resource_version="1", unschedulable=True, annotations=annotations)
    undo = undo_record(record, node)
    assert undo.change.unschedulable is (None if is_kept else False)
    assert bool(undo.left_alone) == is_kept
    assert leftovers(record, changed(node, undo.change)) == ()


def test_what_was_taken_off_is_named() -> None:
    """Each thing that somebody took off the node is named; a label that is paused later is not missed."""
    record = Record(
        run="r", node_uid="u", boot_id="b", started="t", labels={LABEL: "true", "late": "true"}, is_cordoned=True,
        taint=Taint(names.GPU_TAINT, "dm-r"),
    )  # fmt: skip
    node = NodeView(name="n", uid="u", resource_version="1", labels={LABEL: "true"})
    assert taken_off(record, node, paused={LABEL: "true"}) == (f"label {LABEL}", "the cordon", f"the taint {names.GPU_TAINT}")


def test_adoption_keeps_the_first_originals() -> None:
    """Decision 7: a new run keeps the originals of the earlier one and its cordon; the taint is the one chosen anew."""
    old = Record(
        run="1", node_uid="u", boot_id="b", started="t", labels={LABEL: "true", "x": "y"}, is_cordoned=True, taint=Taint("k", "dm-1")
    )
    new = merged(
        old, Record(run="2", node_uid="u", boot_id="b", started="t", labels={"z": "true"}, phase=Phase.PAUSED, taint=Taint("l", "dm-2"))
    )
    assert new.run == "2"
    assert dict(new.labels) == {LABEL: "true", "x": "y", "z": "true"}
    assert new.is_cordoned
    assert new.taint == Taint("l", "dm-2")


def test_a_taint_that_is_not_tolerated_any_more_is_dropped() -> None:
    """Design 3: the earlier run's taint goes in the patch that puts on another one, or none; somebody else's stay."""
    other = Taint("k", "somebody's", "NoExecute")
    node = NodeView(name="n", uid="u", resource_version="1", taints=(other, Taint("k", "dm-1")))
    for taint, wanted in ((Taint("l", "dm-2"), (other, Taint("l", "dm-2"))), (None, (other,))):
        record = Record(run="2", node_uid="u", boot_id="b", started="t", taint=taint)
        assert apply_record(record, node, former=Taint("k", "dm-1")).taints == wanted


def test_a_record_is_made_anew_for_a_changed_node() -> None:
    """What somebody cordoned or switched off between plan and patch is theirs, and is not taken for ours."""
    node = NodeView(name="n", uid="u", resource_version="2", labels={LABEL: "false", "a": "true"}, unschedulable=True)
    record = Record(run="r", node_uid="u", boot_id="b", started="t", labels={LABEL: "true", "a": "true", "gone": "true"}, is_cordoned=True)
    now = rebased(record, node, None)
    assert dict(now.labels) == {"a": "true"}
    assert not now.is_cordoned
    held = rebased(record, node, replace(record, run="old"))
    assert dict(held.labels) == dict(record.labels)
    assert held.is_cordoned
