"""The agent's status as the controller reads it: what it names counts as evidence, the table decides, and nothing in it can do harm."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver_manager.config import Settings
from driver_manager.core.agentreport import AgentReport, read_report, with_report
from driver_manager.core.fleet import FleetPod
from driver_manager.core.freeing import Users, pods_to_free
from driver_manager.core.report import MAX_STATUS_BYTES, Blocker, Waiting, status_text
from driver_manager.core.rollout_states import Because, State
from driver_manager.core.situation import Situation, Stay, Work
from driver_manager.core.snapshot import NodeView, Owner, PodView
from driver_manager.core.upgrade_policy import UpgradePolicy
from driver_manager.names import COMPONENT_LABEL, DRAIN_SKIP, MIRROR, NAME_LABEL, OWN_NAME, STATUS

WAITING = Waiting(
    "held-by-process",
    "waiting for 2 processes",
    (
        Blocker("process", "123 python3", "holds /dev/nvidia0, of pod default/a", "uid-a"),
        Blocker("process", "77 sshd", "holds /dev/nvidia0"),
    ),
)
REPLICAS = Owner("ReplicaSet", "a", "uid-rs")


def node(status: str | None = None) -> NodeView:
    return NodeView(name="n", uid="u", resource_version="1", annotations={} if status is None else {STATUS: status})


def situation(status: str | None, state: State = State.POD_RESTART, **driver: Any) -> Situation:
    pod = FleetPod(namespace="gpu-operator", name="d", uid="d", node_name="n", owner=Owner("DaemonSet", "d", "s"), **driver)
    return Situation(node=node(status), state=state, now=0.0, drivers=(pod,))


STAY = Stay(because=Because.DRIVER_STARTING, sentence="the driver pod is not ready")
SAID = status_text(phase="freeing", run="r", since="s", waiting=WAITING)


def test_what_the_agent_writes_is_read_back() -> None:
    """Pods by uid, the rest in words."""
    report = read_report(SAID)
    assert report.pods == {"uid-a": "process 123 python3 (holds /dev/nvidia0, of pod default/a)"}
    assert report.others == ("process 77 sshd (holds /dev/nvidia0)",)
    assert not report.problem


@pytest.mark.parametrize("reason", ["evicting", "blocked-by-budget"])
def test_whom_the_agent_evicts_itself_is_left_to_it(reason: str) -> None:
    """Such a pod is shown and not evicted by the controller too (nothing is done twice)."""
    waiting = Waiting(reason, "waiting for 1 pod to be gone", (Blocker("pod", "default/a", "is to be evicted", "uid-a"),))
    report = read_report(status_text(phase="freeing", run="r", since="s", waiting=waiting))
    assert (report.pods, report.others) == ({}, ("pod default/a (is to be evicted)",))


def test_words_that_no_terminal_can_show_are_replaced() -> None:
    """JSON can name half of a character; `status --all` ended at one."""
    lone = '"a\\ud800b"'
    report = read_report(f'{{"message": {lone}, "blockers": [{{"kind": "pod", "name": {lone}, "why": {lone}, "uid": {lone}}}]}}')
    assert report == AgentReport("a?b", {"a?b": "pod a?b (a?b)"})


def test_a_wait_for_the_driver_says_what_its_agent_waits_for() -> None:
    """All of it in the sentence; the pods that it names are seen to."""
    stay = with_report(situation(SAID), STAY)
    assert stay is not None
    assert stay.work is Work.FREE_REPORTED
    assert all(words in stay.sentence for words in ("123 python3", "77 sshd", "waiting for 2 processes"))


@pytest.mark.parametrize(
    ("state", "driver"),
    [
        (State.POD_RESTART, {"is_ready": True}),
        (State.DONE, {}),
        (State.POD_RESTART, {"is_bound": False}),
        (State.POD_RESTART, {"is_terminating": True}),
    ],
)
def test_a_status_without_a_waiting_agent_is_nothing(state: State, driver: dict[str, Any]) -> None:
    """It stays on the node after a failed run; only a driver pod that is not ready has an agent."""
    assert with_report(situation(SAID, state, **driver), STAY) == STAY
    assert with_report(situation(None), STAY) == STAY


@pytest.mark.parametrize("text", ["{", "[]", "null", "[" * 2000, "x" * (MAX_STATUS_BYTES + 1), '"' + "é" * 1500 + '"'])
def test_a_status_that_cannot_be_read_is_said(text: str) -> None:
    """And nothing is done."""
    stay = with_report(situation(text), STAY)
    assert stay is not None
    assert stay.work is Work.NOTHING
    assert "its agent's status cannot be read" in stay.sentence


PLAIN = st.none() | st.booleans() | st.integers() | st.text()


@given(st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_whatever_is_in_it_is_bounded(raw: Any) -> None:
    """No value of it breaks the reader, or is longer than a few lines."""
    report = read_report(json.dumps({"blockers": raw, "message": raw, "reason": raw}))
    assert len(report.pods) + len(report.others) <= 5
    assert all(len(each) < 1000 for each in (*report.pods.values(), *report.others))


def freed(pods: list[PodView], uids: set[str], *, is_led_by_others: bool = False) -> tuple[list[str], tuple[str, ...]]:
    users = Users(settings=Settings(), claims={}, reported=dict.fromkeys(uids, "process 1 x (holds it)"), is_led_by_others=is_led_by_others)
    todo = pods_to_free(node(), pods, UpgradePolicy(), users)
    return sorted(pod.name for pod in todo.evict), todo.refusals


def pod(name: str, **fields: Any) -> PodView:
    return PodView(**{"namespace": "default", "name": name, "uid": f"uid-{name}", "owner": REPLICAS, "phase": "Running", **fields})


def test_only_pods_that_are_named_and_are_on_the_node_go() -> None:
    """Decision 35: a hidden holder that the agent found is evicted; a bystander, and a uid that is nowhere, are not."""
    pods = [pod("a"), pod("b"), pod("c", runtime_class="nvidia")]
    assert freed(pods, {"uid-a", "uid-of-another-node"}) == (["a"], ())


@pytest.mark.parametrize(
    "fields",
    [
        {"labels": {COMPONENT_LABEL: "nvidia-driver"}},
        {"labels": {NAME_LABEL: OWN_NAME}},
        {"phase": "Succeeded"},
        {"owner": Owner("DaemonSet", "x", "y")},
    ],
)
def test_the_table_keeps_what_it_always_keeps(fields: dict[str, Any]) -> None:
    """Named or not: the driver, ourselves and who has ended stay; a DaemonSet's pod is the agent's to free."""
    assert freed([pod("a", **fields)], {"uid-a"}) == ([], ())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"labels": {DRAIN_SKIP: "true"}}, DRAIN_SKIP),
        ({"annotations": {MIRROR: "x"}}, "static pod"),
        ({"owner": None}, "podDeletion.force: true"),
        ({"has_empty_dir": True}, "podDeletion.deleteEmptyDir: true"),
    ],
)
def test_the_table_refuses_what_it_always_refuses(fields: dict[str, Any], words: str) -> None:
    """By name, with what would change it."""
    evicted, refusals = freed([pod("a", **fields)], {"uid-a"})
    assert evicted == []
    assert words in refusals[0]


def test_an_opt_out_wins_over_the_policys_selector() -> None:
    """A pod that is selected and opted out stays."""
    from driver_manager.core.upgrade_policy import read_policy

    policy = read_policy({"podDeletion": {"podSelector": "app=render"}})
    pods = [pod("a", labels={"app": "render"}), pod("b", labels={"app": "render", DRAIN_SKIP: "true"})]
    todo = pods_to_free(node(), pods, policy, Users(settings=Settings(), claims={}))
    assert [each.name for each in todo.evict] == ["a"]
    assert todo.refusals == ()


def test_beside_gpu_operator_its_own_pods_are_left_to_it() -> None:
    """Those that ask for GPUs it evicts itself; all others are ours."""
    pods = [pod("gpu", resources=frozenset({"nvidia.com/gpu"})), pod("render", runtime_class="nvidia")]
    users = Users(settings=Settings(), claims={}, is_led_by_others=True)
    todo = pods_to_free(node(), pods, UpgradePolicy(), users)
    assert [each.name for each in todo.evict] == ["render"]
    assert [each.name for each in todo.gone] == ["render"]


def test_an_empty_report_is_nothing() -> None:
    """No blockers, no words: the wait stays as it is."""
    assert read_report(None) == read_report("") == AgentReport()
    assert with_report(situation('{"blockers": []}'), STAY) == STAY
