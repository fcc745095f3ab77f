"""What keeps DaemonSets off a node: who may be parked, what is put on a node and taken off, what the agent leaves alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver_manager import names
from driver_manager.core.fleet import FleetPod, FleetSet
from driver_manager.core.hold import MAX_PARKED, OUR_TAINT_VALUE, Hold, parked_on, paused_by_rollout, read_owners
from driver_manager.core.labels import labels_to_pause
from driver_manager.core.optin import asker, name_problem, opt_in_problem
from driver_manager.core.parking import (
    MOST_PARKED_NODES,
    agents_means,
    held_up,
    is_left_over,
    is_parked_for,
    means_for,
    put_on,
    strangers_on,
    taken_off,
)
from driver_manager.core.record import Record, apply_record, find_record, leftovers, undo_record
from driver_manager.core.record import encode as encode_record
from driver_manager.core.remains import applied
from driver_manager.core.rollout_record import Progress, decode, encode
from driver_manager.core.situation import NodeChange
from driver_manager.core.snapshot import DaemonSetView, NodeView, Owner, Taint, Toleration

OWN = "driver-manager"
GPU = Toleration(key="nvidia.com/gpu", operator="Exists")
BARE = NodeView(name="n", uid="uid-n", resource_version="1", labels={names.DEPLOY_CLIENT: "true"}, taints=(Taint("rack", "7"),))
EXPORTER = FleetSet(namespace="mon", name="exporter", uid="u", tolerations=(Toleration(operator="Exists"),))
ASKING = DaemonSetView(namespace="mon", name="exporter", uid="u", asks_to_be_parked=True)
DRIVER = FleetSet(namespace="gpu-operator", name="driver", uid="d", pod_labels={"app": names.DRIVER_APP}, tolerations=(GPU,))


@pytest.mark.parametrize(
    ("namespace", "labels", "why"),
    [
        ("mon", {"app": "exporter"}, ""),
        ("gpu-operator", {"app": "exporter"}, ""),
        ("gpu-operator", {"app": names.DRIVER_APP}, "driver"),
        ("elsewhere", {names.COMPONENT_LABEL: "nvidia-vgpu-manager"}, "driver"),
        ("gpu-operator", {"app": names.VALIDATOR_APP}, "validates"),
        ("mon", {names.NAME_LABEL: names.OWN_NAME}, "this program"),
        (OWN, {}, "this program"),
        ("kube-system", {"k8s-app": "cilium"}, "the cluster itself"),
        ("openshift-dns", {}, "the cluster itself"),
    ],
)
def test_who_may_be_parked(namespace: str, labels: dict[str, str], why: str) -> None:
    """Line 7: opt-ins of the driver, of this program and of the cluster's own pods are refused."""
    problem = opt_in_problem(replace(EXPORTER, namespace=namespace, pod_labels=labels), OWN)
    assert bool(problem) == bool(why)
    assert why in problem


@pytest.mark.parametrize(
    ("label", "named", "asks", "problem"),
    [
        (None, [], "", ""),
        ("true", [], "its label", ""),
        (None, ["mon/exporter"], "podDeletion.park", ""),
        (None, ["mon/other"], "", ""),
        ("true", ["mon/exporter"], "its label", ""),
        ("false", ["mon/exporter"], "podDeletion.park", "=false is against it"),
        ("no", ["mon/exporter"], "podDeletion.park", "=no is against it"),
    ],
)
def test_who_asks(label: str | None, named: list[str], asks: str, problem: str) -> None:
    """A label or a policy's name, and the DaemonSet's own opt-out wins over the name."""
    exporter = replace(EXPORTER, labels={names.PARK: label} if label else {})
    assert bool(asker(exporter, named)) == bool(asks)
    assert asks in asker(exporter, named)
    means = means_for(BARE, opted_in=[exporter], named=named, operator_sets=[], own_namespace=OWN, why_not="", is_full=False)
    if asks:
        assert (exporter.ref in means.parkable) is not bool(problem)
        assert problem in means.not_now.get(exporter.ref, "")


def test_a_name_that_nothing_is_known_of() -> None:
    """Nobody is parked by name alone: until it is seen, the DaemonSet may be the driver's."""
    means = means_for(BARE, opted_in=[], named=["mon/exporter"], operator_sets=[], own_namespace=OWN, why_not="", is_full=False)
    assert not means.parkable
    assert "could not be read yet" in means.not_now["mon/exporter"]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("mon/exporter", ""),
        ("mon/exporter.v2", ""),
        ("mon/*", "no single DaemonSet"),
        ("mon/", "no single DaemonSet"),
        ("mon", "no single DaemonSet"),
        ("*/exporter", "no single DaemonSet"),
        ("*", "no single DaemonSet"),
        ("", "no single DaemonSet"),
        ("mon/Exporter", "no namespace/name"),
        ("mon/a/b", "no namespace/name"),
        ("mon/a,b", "no namespace/name"),
        ("kube-system/cilium", "the cluster itself"),
        ("openshift-dns/x", "the cluster itself"),
    ],
)
def test_names_that_a_policy_may_not_have(name: str, why: str) -> None:
    """Whole namespaces and those of the cluster itself are refused by what they are."""
    assert bool(name_problem(name)) == bool(why)
    assert why in name_problem(name)


@pytest.mark.parametrize(
    ("changes", "why_not", "is_full", "said"),
    [
        ({}, "", False, ""),
        ({}, "no policy", False, "no policy"),
        ({"is_rolling": True}, "", False, "rolling update"),
        ({}, "", True, f"{MOST_PARKED_NODES} nodes"),
    ],
)
def test_what_there_is_for_a_node(changes: dict[str, bool], why_not: str, is_full: bool, said: str) -> None:
    """Who cannot be parked now is named with the reason, unless it is on this very node already."""
    asked = replace(EXPORTER, labels={names.PARK: "true"}, **changes)  # type: ignore[arg-type]
    for node in (BARE, parked(BARE)):
        means = means_for(node, opted_in=[asked], operator_sets=[DRIVER], own_namespace=OWN, why_not=why_not, is_full=is_full)
        is_fine = not said or node is not BARE
        assert means.parkable == ({asked.ref} if is_fine else set())
        assert (asked.ref in means.not_now) is not is_fine
        assert is_fine or said in means.not_now[asked.ref]


@pytest.mark.parametrize(
    ("sets", "taints", "key"),
    [
        ([DRIVER], (), "nvidia.com/gpu"),
        ([DRIVER, replace(DRIVER, name="other", tolerations=())], (), ""),
        ([DRIVER, replace(DRIVER, name="theirs", pod_labels={"app": "x"}, tolerations=())], (), "nvidia.com/gpu"),
        ([DRIVER, replace(DRIVER, name="elsewhere", node_selector={"a": "b"}, tolerations=())], (), "nvidia.com/gpu"),
        ([DRIVER], (Taint("nvidia.com/gpu", "admin"),), ""),
        ([DRIVER], (Taint("some/key", OUR_TAINT_VALUE),), "some/key"),
        ([replace(DRIVER, tolerations=(Toleration(operator="Exists"),))], (), names.KEEP_OFF_TAINT),
        ([], (), ""),
    ],
)
def test_which_taint(sets: list[FleetSet], taints: tuple[Taint, ...], key: str) -> None:
    """One that all of driver, validators and operands on the node tolerate, that nobody else has put there; the one we have on is kept."""
    means = means_for(replace(BARE, taints=taints), opted_in=[], operator_sets=sets, own_namespace=OWN, why_not="", is_full=False)
    assert (means.taint.key if means.taint else "") == key


@pytest.mark.parametrize(
    ("changes", "annotations", "said"),
    [
        ({}, {names.PARKING: names.PARKING_ENFORCED}, ""),
        ({}, {}, f"the node has no annotation {names.PARKING}"),
        ({}, {names.PARKING: "true"}, f"the node has no annotation {names.PARKING}"),
        ({"namespace": "kube-system"}, {names.PARKING: names.PARKING_ENFORCED}, "the cluster itself"),
        ({"pod_labels": {"app": names.DRIVER_APP}}, {names.PARKING: names.PARKING_ENFORCED}, "the driver's own"),
        (None, {names.PARKING: names.PARKING_ENFORCED}, "may not get it"),
    ],
)
def test_what_the_agent_may_park(changes: dict[str, Any] | None, annotations: dict[str, str], said: str) -> None:
    """Decision 19: only with the controller's mark, and what asks for it; what is parked there already, by either, goes on."""
    asked = None if changes is None else replace(ASKING, **changes)
    ref = asked.ref if asked is not None else ASKING.ref
    node = replace(BARE, annotations=annotations)
    means = agents_means(node, {ref: asked})
    assert means.parkable == (set() if said else {ref})
    assert said in means.not_now.get(ref, "")
    assert bool(said) == bool(means.not_now)
    record = Record(run="r", node_uid=node.uid, boot_id="b", started="t", parked=(ref,))
    by_agent = replace(node, annotations={**annotations, names.RECORD: encode_record(record)})
    by_controller = parked(replace(node, annotations={**annotations, names.ROLLOUT: encode(Progress(node="uid-n", parked=[ref]))}), ref)
    for held in (by_agent, by_controller):
        assert agents_means(held, {ref: asked}).parkable == {ref}


def test_who_has_not_asked_is_neither() -> None:
    """Without the label nothing is said but what the verdict says of itself; a rolling update is waited for (decision 45)."""
    node = replace(BARE, annotations={names.PARKING: names.PARKING_ENFORCED})
    silent = agents_means(node, {ASKING.ref: replace(ASKING, asks_to_be_parked=False)})
    assert (silent.parkable, dict(silent.not_now)) == (frozenset(), {})
    rolling = agents_means(node, {ASKING.ref: replace(ASKING, is_rolling=True)})
    assert rolling.parkable == rolling.rolling == {ASKING.ref}


def test_the_agent_parks_so_many() -> None:
    """What a record has no room for is refused by name."""
    node = replace(BARE, annotations={names.PARKING: names.PARKING_ENFORCED})
    asked = [replace(ASKING, name=f"e{number:02}") for number in range(MAX_PARKED + 2)]
    means = agents_means(node, {each.ref: each for each in asked})
    assert len(means.parkable) == MAX_PARKED
    assert list(means.not_now) == [each.ref for each in asked[MAX_PARKED:]]


OWNERS = st.frozensets(st.sampled_from(["mon/a", "mon/b", "mon/c"]))
TURNS = st.lists(st.tuples(st.sampled_from(["agent", "controller"]), OWNERS), max_size=8)


@given(TURNS)
def test_each_takes_back_only_its_own(turns: list[tuple[str, frozenset[str]]]) -> None:
    """Decision 32: in any order of parks and un-parks by two programs, parked is the union of both records, and all ends as it began."""
    node, ours, theirs = BARE, frozenset[str](), frozenset[str]()
    for who, owners in [*turns, ("agent", frozenset()), ("controller", frozenset())]:
        if who == "agent" and owners:
            record = Record(run="r", node_uid=node.uid, boot_id="b", started="t", parked=tuple(sorted(owners | ours)))
            node, ours = applied(node, apply_record(record, node)), owners | ours
        elif who == "agent" and ours:
            found = find_record(node).record
            assert found is not None
            node, ours = applied(node, undo_record(found, node).change), frozenset()
            assert not leftovers(found, node)
        elif owners:
            change, fields = put_on(node, Progress(node=node.uid, parked=sorted(theirs)), Hold(owners))
            node, theirs = recorded(change, node, fields), theirs | owners
            assert not Hold(owners).missing_on(node)
        elif who == "controller":
            change = taken_off(node, Progress(node=node.uid, parked=sorted(theirs)))
            node, theirs = change.and_then(NodeChange(annotations={names.ROLLOUT: None})).on(node), frozenset()
        assert parked_on(node) == ours | theirs
        assert not strangers_on(node, Progress(node=node.uid, parked=sorted(theirs)))
        assert is_left_over(node, Progress(node=node.uid, parked=sorted(theirs))) is False
    assert node == BARE


def parked(node: NodeView, owners: str = "mon/exporter") -> NodeView:
    """A node that is parked for these."""
    return replace(node, labels={**node.labels, names.PARKED: "true"}, annotations={**node.annotations, names.PARKED: owners})


def recorded(change: NodeChange, node: NodeView, fields: dict[str, Any]) -> NodeView:
    """A node with a change of the controller's, its record among it."""
    record = encode(Progress(node=node.uid, **fields))
    return change.and_then(NodeChange(annotations={names.ROLLOUT: record})).on(node)


def test_on_and_off_again() -> None:
    """What is put on a node is recorded with what was there, a second hold adds to it, and all of it comes off as it was."""
    hold = Hold(frozenset({"mon/exporter"}), {names.DEPLOY_CLIENT: "true"}, Taint("nvidia.com/gpu", OUR_TAINT_VALUE))
    change, fields = put_on(BARE, None, hold)
    held, record = recorded(change, BARE, fields), Progress(node="uid-n", **fields)
    assert not hold.missing_on(held)
    assert hold.missing_on(BARE) == hold
    assert parked_on(held) == {"mon/exporter"}
    assert held.labels[names.DEPLOY_CLIENT] == names.PAUSED
    change, fields = put_on(held, record, Hold(frozenset({"mon/other"}), {names.DEPLOY_CLIENT: "true"}, hold.taint))
    both, record = recorded(change, held, fields), Progress(node="uid-n", **fields)
    assert decode(encode(record)) == record
    assert parked_on(both) == {"mon/exporter", "mon/other"}
    assert both.taints == held.taints
    opened = taken_off(both, record).and_then(NodeChange(annotations={names.ROLLOUT: None}))
    assert opened.on(both) == BARE


def test_a_taint_whose_record_was_lost_is_not_put_on_again() -> None:
    """The API server takes no key and effect twice: it is recorded anew, and comes off with the rest."""
    hold = Hold(taint=Taint("nvidia.com/gpu", OUR_TAINT_VALUE))
    change, fields = put_on(BARE, None, hold)
    held = change.on(BARE)
    again, same = put_on(held, None, hold)
    assert again.on(held) == held
    assert same == fields
    assert taken_off(held, Progress(node="uid-n", **same)).on(held) == BARE


def test_what_others_changed_meanwhile_stays() -> None:
    """R3: a paused label with another value by now, another taint of the same key, a label that we did not pause."""
    record = Progress(node="uid-n", paused={names.DEPLOY_CLIENT: "true"}, taint="nvidia.com/gpu")
    labels = {names.DEPLOY_CLIENT: "false", "nvidia.com/gpu.deploy.x": names.PAUSED}
    theirs = replace(BARE, labels=labels, taints=(Taint("nvidia.com/gpu", "dm-x"),))
    assert not taken_off(theirs, record).needed_on(theirs)


@pytest.mark.parametrize(
    ("text", "owners"),
    [("", ()), ("a/b", ("a/b",)), ("a/b,c/d", ("a/b", "c/d")), ("a/b, c/d,,x,/y,z/,A/b,a/b/c", ("a/b",)), ("a" * 70 + "/b", ())],
)
def test_an_annotation_of_anybody(text: str, owners: tuple[str, ...]) -> None:
    """Line 7: of a malformed list only what names a DaemonSet counts, and what we did not write is named as a stranger."""
    assert read_owners(text) == owners
    node = parked(BARE, text)
    assert set(strangers_on(node, Progress(node="uid-n", parked=["a/b"]))) == {each for each in text.split(",") if each not in ("", "a/b")}


def test_a_node_needs_label_and_annotation() -> None:
    """The policy's parameters are nodes with the label, so a bare annotation parks nobody."""
    assert parked_on(replace(BARE, annotations={names.PARKED: "mon/exporter"})) == frozenset()
    pod = FleetPod(namespace="mon", name="p", uid="p", node_name="n", owner=Owner("DaemonSet", "exporter"), is_gated=True)
    assert is_parked_for(pod, parked(BARE))
    for node in (None, BARE, parked(BARE, "mon/other")):
        assert not is_parked_for(pod, node)
    assert not is_parked_for(replace(pod, owner=None), parked(BARE))


def test_who_is_held_up() -> None:
    """Pods that are missing beyond those of parked nodes."""
    assert held_up(replace(EXPORTER, missing=3), [parked(BARE), parked(BARE, "mon/other"), BARE]) == 2
    assert held_up(replace(EXPORTER, missing=1), [parked(BARE)]) == 0


def test_a_record_names_so_many() -> None:
    """More DaemonSets on one node than a record has room for are not parked: the rest is missing, and told."""
    owners = frozenset(f"mon/e{number:02}" for number in range(MAX_PARKED + 1))
    change, fields = put_on(BARE, None, Hold(owners))
    assert len(fields["parked"]) == MAX_PARKED
    assert len(Hold(owners).missing_on(recorded(change, BARE, fields)).parked) == 1


def test_the_agent_leaves_what_the_controller_paused() -> None:
    """Else its restore would put the label back before the node is open; a label paused by others is adopted as ever."""
    labels = {names.DEPLOY_CLIENT: names.PAUSED, "nvidia.com/gpu.deploy.dcgm": names.PAUSED}
    record = encode(Progress(node="uid-n", paused={names.DEPLOY_CLIENT: "true"}))
    for text, uid, ours in ((record, "uid-n", {names.DEPLOY_CLIENT}), (record, "other", set()), ("{", "uid-n", set()), ("{}", "", set())):
        node = replace(BARE, uid=uid, labels=labels, annotations={names.ROLLOUT: text})
        assert paused_by_rollout(node) == ours
        found = labels_to_pause(labels, "", {}, others=paused_by_rollout(node)).all
        assert set(found) == set(labels) - ours
