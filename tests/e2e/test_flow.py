"""The whole way once, on a node as full as a real one."""

from __future__ import annotations

import pytest

from tests.e2e.world import PAUSED, RECORD, Object, StockNode
from tests.kube import stock
from tests.kube.recorder import Event, Recorder

pytestmark = pytest.mark.kube


def add_bystanders(node: StockNode) -> dict[str, str]:
    """Pods that use no GPU: a Deployment's, one with an emptyDir, a bare one. Gives name -> uid."""
    made = stock.training(2, name="web", node_selector={"space": node.namespace})
    made["spec"]["template"]["spec"]["containers"][0].pop("resources")
    node.cp.create(f"/apis/apps/v1/namespaces/{node.namespace}/deployments", made)
    node.add_pod("scratch", volumes=[{"name": "data", "emptyDir": {}}])
    node.add_pod("bare")
    node.cp.wait_for(lambda: len(node.ready_pods(["web"])) == 2, "the web pods")
    return bystanders(node)


def bystanders(node: StockNode) -> dict[str, str]:
    return {**node.uids("web"), **node.uids("scratch"), **node.uids("bare")}


def is_freed_by_us(event: Event) -> bool:
    """Whether the node's event shows cordon, taint, paused labels and record all together."""
    meta, spec = event.object["metadata"], event.object["spec"]
    taints = [(taint["key"], taint["effect"]) for taint in spec.get("taints", []) if taint.get("value", "").startswith("dm-")]
    return (
        RECORD in meta.get("annotations", {})
        and spec.get("unschedulable") is True
        and taints == [("nvidia.com/gpu", "NoSchedule")]
        and all(meta["labels"][key] == PAUSED for key in stock.OPERAND_LABELS)
    )


def test_full_flow_on_a_full_node(node: StockNode) -> None:
    """R1, R3, R4: twelve operands and eight GPU pods go, each once, in order; all else stays; the node ends exactly as it was."""
    node.add_driver(digest="new")
    node.add_operands()
    node.add_training(8, grace_seconds=1)
    untouched = add_bystanders(node)
    operands = {app: node.uids(app) for app in stock.OPERANDS.values()}
    training, before = node.uids("train"), node.surface()
    planned = node.run("plan", "--output", "json").require(0).document()
    mark = node.cp.audit_mark()
    with (
        node.cp.record(f"{node.space}/pods") as pods,
        node.cp.record("/api/v1/nodes", f"fieldSelector=metadata.name%3D{node.name}") as nodes,
    ):
        node.run().require(0)
        node.wait_surface(before)
        held = nodes.wait_for(is_freed_by_us, "the pause")
        opened = nodes.wait_for(lambda event: event.version > held.version and nodes_is_open(event), "the restore")
        assert_nobody_came(node, pods, training, opened.version)
    assert node.evicted(mark) == sorted(training)
    assert planned["evictions"] == len(node.evictions(mark))
    assert bystanders(node) == untouched
    first_written = next(event for event in nodes.until_now() if RECORD in event.object["metadata"].get("annotations", {}))
    assert is_freed_by_us(first_written), "pause, cordon, taint and record are one write"
    consumers = {*training, *(name for uids in operands.values() for name in uids)}
    assert {event.name for event in pods.until_now() if event.kind == "DELETED"} >= consumers
    assert_host_order(node, node.last_deleted(mark, consumers))
    node.cp.wait_for(lambda: len(node.ready_pods(list(operands))) == len(operands), "the operands to be back")
    assert all(not set(uids.values()) & set(node.uids(app).values()) for app, uids in operands.items())


def nodes_is_open(event: Event) -> bool:
    """Whether the node's event is one of a node that nobody holds."""
    return RECORD not in event.object["metadata"].get("annotations", {}) and not event.object["spec"].get("unschedulable")


def assert_nobody_came(node: StockNode, pods: Recorder, training: dict[str, str], opened: int) -> None:
    """The Deployment made others at once, and none of them was bound to the node before it was opened."""
    came = [event for event in pods.until_now() if event.object["metadata"]["labels"].get("app") == "train" and event.name not in training]
    assert came, "the Deployment makes others at once"
    early = [event.name for event in came if event.object["spec"].get("nodeName") == node.name and event.version < opened]
    assert early == []


def assert_host_order(node: StockNode, last_deleted: float) -> None:
    """Files, modules with dependents first, mounts, pid file; nothing of it while a pod was there."""
    calls: list[Object] = node.tree.calls()
    assert [(call["call"], call["arguments"][0].rpartition("/")[2]) for call in calls] == [
        ("unlink", "nvidia-driver.state"),
        ("unlink", "driver-ready"),
        ("unlink", "toolkit-ready"),
        ("unlink", ".driver-ctr-ready"),
        ("delete_module", "nvidia_modeset"),
        ("delete_module", "nvidia_uvm"),
        ("delete_module", "nvidia"),
        ("umount2", "driver"),
        ("unlink", "nvidia-driver.pid"),
    ]
    assert {call["result"] for call in calls} == {0}
    assert calls[0]["time"] >= last_deleted
