"""Pods that come back by themselves, and pods that never go."""

from __future__ import annotations

import pytest

from tests.e2e.world import STATUS, Object, StockNode
from tests.kube.space import daemon_set

pytestmark = pytest.mark.kube
EXPORTER_GPU: Object = {"name": "main", "image": "none", "resources": {"limits": {"nvidia.com/gpu": "1"}}}


def add_exporter(node: StockNode, **spec: object) -> None:
    """A DaemonSet of somebody else's that uses a GPU of the node."""
    selector = {"space": node.namespace}
    wanted: Object = {"nodeSelector": selector, "containers": [EXPORTER_GPU], "terminationGracePeriodSeconds": 1, **spec}
    node.cp.create(f"/apis/apps/v1/namespaces/{node.namespace}/daemonsets", daemon_set("exporter", spec=wanted))
    node.cp.wait_for(lambda: node.ready_pods(["exporter"]), "the exporter")


def test_daemon_set_that_the_taint_keeps_off(busy_node: StockNode) -> None:
    """N02 variant 1: a DaemonSet's GPU pod is evicted, no replacement comes before the node is opened, and then it is back."""
    add_exporter(busy_node)
    before, first = busy_node.surface(), busy_node.uids("exporter")
    with busy_node.cp.record(f"{busy_node.space}/pods") as pods:
        busy_node.tree.faults({"call": "umount2", "hold": True})
        run = busy_node.start("uninstall_driver")
        busy_node.wait_held("umount2")
        assert [event.name for event in pods.until_now() if event.name.startswith("exporter") and event.uid not in first.values()] == []
        busy_node.tree.faults()
        run.wait().require(0)
    busy_node.wait_surface(before)
    busy_node.cp.wait_for(lambda: busy_node.ready_pods(["exporter"]), "the exporter to be back")
    assert set(first.values()).isdisjoint(busy_node.uids("exporter").values())


def test_daemon_set_with_a_deploy_label(busy_node: StockNode) -> None:
    """N02 variant 2: a DaemonSet that selects a deploy label goes with the label, without an eviction, and comes back with it."""
    client = {"space": busy_node.namespace, "nvidia.com/gpu.deploy.client": "true"}
    busy_node.change({"metadata": {"labels": {"nvidia.com/gpu.deploy.client": "true"}}})
    add_exporter(busy_node, nodeSelector=client, tolerations=[{"operator": "Exists"}])
    before, mark, first = busy_node.surface(), busy_node.cp.audit_mark(), busy_node.uids("exporter")
    busy_node.run().require(0)
    busy_node.wait_surface(before)
    assert not set(first) & set(busy_node.evicted(mark))
    busy_node.cp.wait_for(lambda: busy_node.ready_pods(["exporter"]), "the exporter to be back")
    assert set(first.values()).isdisjoint(busy_node.uids("exporter").values())


@pytest.mark.deep
def test_daemon_set_that_tolerates_everything(busy_node: StockNode) -> None:
    """N02 variant 3, R5: what nothing keeps off is refused by its owner's name before the first write."""
    add_exporter(busy_node, tolerations=[{"operator": "Exists"}])
    before, mark, first = busy_node.surface(), busy_node.cp.audit_mark(), busy_node.uids("exporter")
    ended = busy_node.run().require(65)
    assert ended.said(f"DaemonSet {busy_node.namespace}/exporter", "nvidia.com/gpu.deploy.client")
    assert busy_node.evictions(mark) == []
    assert busy_node.surface() == before
    assert busy_node.uids("exporter") == first


def test_pod_that_never_ends(node: StockNode) -> None:
    """N59, R8: a pod that hangs in Terminating is named, and the wait for it ends at DRAIN_TIMEOUT_SECONDS with 75."""
    node.add_driver(digest="new")
    node.add_training(1, grace_seconds=1, stop_after="never")
    before, (name,) = node.surface(), node.uids("train")
    ended = node.run(DRAIN_TIMEOUT_SECONDS="3s").require(75)
    assert ended.said(f"{node.namespace}/{name}")
    assert "budget" not in ended.lines[-1]["result"]
    node.wait_surface(before)
    assert node.tree.calls() == []
    assert name in str(node.annotation(STATUS))


@pytest.mark.deep
def test_operand_that_never_ends(node: StockNode) -> None:
    """R8: an operand that hangs in Terminating is named, and the wait for it ends at its own limit with 75."""
    node.add_driver(digest="new")
    node.add_operands(only=("dcgm",), stop_after="never")
    before, (name,) = node.surface(), node.uids("nvidia-dcgm")
    ended = node.run(OPERAND_TIMEOUT="3s").require(75)
    assert ended.said(f"{node.namespace}/{name}")
    node.wait_surface(before)
    assert node.tree.calls() == []
    assert name in str(node.annotation(STATUS))


@pytest.mark.deep
def test_pod_that_is_terminating_already(node: StockNode) -> None:
    """Decision 13: a pod on its way out is waited for and never sent an eviction, which would ask no budget."""
    node.add_driver(digest="new")
    node.add_training(1, grace_seconds=4)
    (name,) = node.uids("train")
    mark = node.cp.audit_mark()
    node.cp.delete(f"{node.space}/pods/{name}")
    node.run().require(0)
    assert name not in [event["objectRef"]["name"] for event in node.eviction_tries(mark)]
    assert name not in node.uids("train")


@pytest.mark.deep
def test_pod_that_is_over(busy_node: StockNode) -> None:
    """R6: a pod that has ended uses no GPU any more: it stays, with its logs."""
    busy_node.add_pod("job", gpus=1, is_ready=False, annotations={"kubelet.sim/finish": "succeeded"}, restartPolicy="Never")
    path = f"{busy_node.space}/pods/job"
    busy_node.cp.wait_for(lambda: busy_node.cp.get(path)["status"].get("phase") == "Succeeded", "the job to end")
    uid = busy_node.uids("job")
    busy_node.run().require(0)
    assert busy_node.uids("job") == uid


def test_gpus_in_every_kind_of_container(busy_node: StockNode) -> None:
    """Issue 3: a GPU asked for by an init container, or a MIG slice, makes a GPU pod as well."""
    plain: Object = {"name": "main", "image": "none"}
    mig: Object = {"name": "main", "image": "none", "resources": {"limits": {"nvidia.com/mig-1g.5gb": "1"}}}
    busy_node.cp.patch(f"{busy_node.path}/status", {"status": {"capacity": MIG, "allocatable": MIG}})
    busy_node.add_pod("first", initContainers=[{**EXPORTER_GPU, "name": "init"}], containers=[plain])
    busy_node.add_pod("slice", containers=[mig])
    mark = busy_node.cp.audit_mark()
    busy_node.run(DRAIN_USE_FORCE="true").require(0)
    assert {"first", "slice"} <= set(busy_node.evicted(mark))


MIG = {"nvidia.com/mig-1g.5gb": "4"}


def test_grace_is_never_shortened(busy_node: StockNode) -> None:
    """R6: no eviction carries a grace below the pod's own, and nothing is deleted."""
    mark = busy_node.cp.audit_mark()
    with busy_node.cp.record(f"{busy_node.space}/pods") as pods:
        busy_node.run(DRAIN_USE_FORCE="true").require(0)
    metas = [event.object["metadata"] for event in pods.until_now()]
    graces = [meta.get("deletionGracePeriodSeconds") for meta in metas if meta["labels"].get("app") == "train"]
    assert {grace for grace in graces if grace} == {1}
    assert not [line for line in busy_node.writes(mark) if line.startswith("delete")]
