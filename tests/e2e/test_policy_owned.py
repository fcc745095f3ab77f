"""Nodes on which an upgrade controller owns cordon and eviction, and nodes on which nobody evicts."""

from __future__ import annotations

import pytest

from tests.e2e.world import RECORD, STATUS, UPGRADE_ENABLED, UPGRADE_REQUESTED, StockNode
from tests.kube.proxy import ApiProxy

pytestmark = pytest.mark.kube
UPGRADE_STATE = "nvidia.com/gpu-driver-upgrade-state"
WAITS = "policy-owned"


@pytest.fixture
def owned_node(busy_node: StockNode) -> StockNode:
    """The busy node as the stock chart has it: the upgrade controller is switched on."""
    busy_node.annotate(**{UPGRADE_ENABLED: "true"})
    busy_node.change({"metadata": {"labels": {UPGRADE_STATE: "upgrade-done"}}})
    return busy_node


def free_as_the_controller_does(node: StockNode) -> None:
    """Cordons and evicts, and takes the request away, as the upgrade controller does when it takes the node up."""
    labels, annotations = {UPGRADE_STATE: "pod-deletion-required"}, {UPGRADE_REQUESTED: None}
    node.change({"metadata": {"labels": labels, "annotations": annotations}, "spec": {"unschedulable": True}})
    for name in node.uids("train"):
        assert node.evict(name).status == 201


def test_agent_asks_and_waits(owned_node: StockNode) -> None:
    """N47 case 1: it asks the controller once, says who owns eviction, evicts and pauses nobody itself, and goes on when it is free."""
    mark = owned_node.cp.audit_mark()
    pods = owned_node.uids("train")
    run = owned_node.start("uninstall_driver")
    line = run.wait_for_line(lambda line: line.get("reason") == WAITS, "the wait for the controller")
    assert "upgrade controller" in line["for"]
    assert all(name in line["for"] for name in pods)
    owned_node.cp.wait_for(lambda: (owned_node.annotation(STATUS) or {}).get("reason") == WAITS, "the wait in the status", 10)
    node = owned_node.node()
    assert node["metadata"]["annotations"][UPGRADE_REQUESTED] == "true"
    assert not node["spec"].get("unschedulable")
    assert owned_node.annotation(RECORD) is None
    assert node["metadata"]["labels"]["nvidia.com/gpu.deploy.device-plugin"] == "true"
    free_as_the_controller_does(owned_node)
    during = owned_node.surface()
    run.wait().require(0)
    owned_node.wait_surface(during)
    assert owned_node.evictions(mark) == []
    assert owned_node.eviction_tries(mark, dry=True) == []
    assert not (owned_node.tree.root / "sys/module/nvidia").exists()
    assert UPGRADE_REQUESTED not in during["annotations"], "asked for once, and never again"


OTHERS = [pytest.param(state, marks=pytest.mark.deep) for state in ("cordon-required", "drain-required", "pod-restart-required")]


@pytest.mark.parametrize("state", ["upgrade-required", *OTHERS])
def test_controller_is_at_it_already(owned_node: StockNode, state: str) -> None:
    """N47: a node that the controller has taken up, or has in its queue, is not asked for again."""
    owned_node.change({"metadata": {"labels": {UPGRADE_STATE: state}}})
    run = owned_node.start("uninstall_driver")
    run.wait_for_line(lambda line: line.get("reason") == WAITS, "the wait for the controller")
    assert UPGRADE_REQUESTED not in owned_node.surface()["annotations"]
    free_as_the_controller_does(owned_node)
    run.wait().require(0)


def test_controller_that_never_comes(owned_node: StockNode) -> None:
    """N47, R8: the wait for the controller ends at its limit with 75, naming pods and owner; nothing was paused."""
    before, pods = owned_node.surface(), owned_node.uids("train")
    ended = owned_node.run(POLICY_OWNER_TIMEOUT="3s").require(75)
    assert ended.said("upgrade controller", *pods)
    after = owned_node.surface()
    assert after["annotations"].pop(UPGRADE_REQUESTED) == "true"
    assert after == before
    assert owned_node.uids("train") == pods


def test_told_to_end_while_the_controller_works(owned_node: StockNode) -> None:
    """N47, decision 23: SIGTERM in that wait ends it at once; only the request stays, for the controller."""
    before = owned_node.surface()
    run = owned_node.start("uninstall_driver")
    run.wait_for_line(lambda line: line.get("reason") == WAITS, "the wait for the controller")
    run.terminate()
    run.wait(10).require(75)
    after = owned_node.surface()
    assert after["annotations"].pop(UPGRADE_REQUESTED) == "true"
    assert after == before


@pytest.mark.deep
def test_owned_node_without_gpu_pods(node: StockNode) -> None:
    """Decision 1: with no GPU pod left the agent goes ahead at once: it pauses, never cordons, and asks for nothing."""
    node.add_driver(digest="new")
    node.add_operands(only=("device-plugin",))
    node.annotate(**{UPGRADE_ENABLED: "true"})
    before = node.surface()
    with node.cp.record("/api/v1/nodes", f"fieldSelector=metadata.name%3D{node.name}") as nodes:
        node.run().require(0)
        node.wait_surface(before)
        assert any(RECORD in event.object["metadata"]["annotations"] for event in nodes.until_now())
        assert not any(event.object["spec"].get("unschedulable") for event in nodes.until_now())
        assert not any(UPGRADE_REQUESTED in event.object["metadata"]["annotations"] for event in nodes.until_now())


@pytest.mark.deep
def test_eviction_is_off(busy_node: StockNode) -> None:
    """N47 case 2, R5: with eviction off and no controller it stops with 65, naming the pods and what to do; only the status is written."""
    before, mark, pods = busy_node.surface(), busy_node.cp.audit_mark(), busy_node.uids("train")
    ended = busy_node.run(ENABLE_GPU_POD_EVICTION="false").require(65)
    assert ended.said("ENABLE_GPU_POD_EVICTION=true", "delete the pod", *pods)
    assert busy_node.surface() == before
    assert busy_node.writes(mark) == ["patch nodes"]
    assert busy_node.uids("train") == pods
    assert busy_node.annotation(STATUS)["reason"] == "refused"


def test_other_tool_has_paused(busy_node: StockNode, api_proxy: ApiProxy) -> None:
    """Decision 9: another tool's pause is waited for, never taken for an original value, and named when the wait is over."""
    key = "nvidia.com/gpu.deploy.dcgm"
    busy_node.change({"metadata": {"labels": {key: "paused-for-mig-change"}}})
    busy_node.run(OPERAND_TIMEOUT="1s").require(75).said(key, "paused-for-mig-change")
    assert busy_node.surface()["labels"][key] == "paused-for-mig-change"
    run = busy_node.start("uninstall_driver")
    run.wait_for_line(lambda line: line.get("reason") == "paused-by-another", "the wait for the other tool")
    busy_node.change({"metadata": {"labels": {key: "true"}}})
    run.wait().require(0)
    assert busy_node.surface()["labels"][key] == "true"


@pytest.mark.deep
def test_upstream_left_its_pause(busy_node: StockNode) -> None:
    """Decision 9: labels that upstream's program left paused are taken over by its own rules, put back, and the guess is said."""
    pause = {"nvidia.com/gpu.deploy.dcgm": "paused-for-driver-upgrade", "nvidia.com/gpu.deploy.mig-manager": "paused-for-driver-upgrade"}
    busy_node.change({"metadata": {"labels": pause}})
    ended = busy_node.run().require(0)
    labels = busy_node.surface()["labels"]
    assert {labels[key] for key in pause} == {"true"}
    assert ended.said("a guess of its value")
