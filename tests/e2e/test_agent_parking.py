"""The agent parks a DaemonSet by itself, with the stock role and the shipped admission policies on the real control plane."""

from __future__ import annotations

import json

import pytest

from driver_manager.kube.fleetcalls import try_pod
from tests.e2e.gpu_users import TOLERATES_ALL, GpuUsers, host_paths
from tests.e2e.world import RECORD, Object, StockNode
from tests.kube.manifests import PARKING, Applied

pytestmark = pytest.mark.kube
PARK, PARKED = "nvidia.com/gpu-driver-manager.park", "nvidia.com/gpu-driver-manager.parked"
MARK = "nvidia.com/gpu-driver-manager.parking"


def gated(node: StockNode) -> list[Object]:
    """Pods of the namespace that wait with a scheduling gate."""
    found = node.cp.get(f"{node.space}/pods?labelSelector={PARKED}")["items"]
    return [pod for pod in found if pod["spec"].get("schedulingGates")]


def wait_enforced(node: StockNode) -> None:
    """Waits until the policies work, as the controller proves it, and marks the node as it does."""
    probe = try_pod(node.namespace, "nowhere/probe", node.name)
    node.change({"metadata": {"labels": {PARKED: "true"}, "annotations": {PARKED: "nowhere/probe"}}})

    def is_gated() -> bool:
        answer = node.cp.request("POST", probe.target, dict(probe.body or {}))
        return "schedulingGates" in json.dumps(answer.body)

    node.cp.wait_for(is_gated, "the policies to work", 10)
    node.change({"metadata": {"labels": {PARKED: None}, "annotations": {PARKED: None, MARK: "enforced"}}})


def test_parked_by_the_agent(node: StockNode, users: GpuUsers) -> None:
    """Decision 19: refused without the controller's mark; with it kept off by the gate until the node is put back, then let in again."""
    node.add_driver(digest="new")
    users.daemon_set("exporter", volumes=host_paths("/dev/nvidia0", "/dev/nvidiactl"), tolerations=TOLERATES_ALL)
    path = f"/apis/apps/v1/namespaces/{node.namespace}/daemonsets/exporter"
    node.cp.patch(path, {"metadata": {"labels": {PARK: "true"}}})
    users.wait()
    mark, first, owner = node.cp.audit_mark(), node.uids("exporter"), f"{node.namespace}/exporter"
    assert node.run().require(65).said(MARK, owner)
    assert node.eviction_tries(mark) == []
    with Applied(node.cp, PARKING):
        wait_enforced(node)
        before = node.surface()
        node.tree.faults({"call": "umount2", "hold": True})
        run = node.start("uninstall_driver")
        node.wait_held("umount2")
        assert node.annotation(RECORD)["parked"] == [owner]
        assert node.node()["metadata"]["annotations"][PARKED] == owner
        node.cp.wait_for(lambda: len(gated(node)) == 1, "a pod to wait with the gate")
        assert not node.ready_pods(["exporter"])
        node.tree.faults()
        run.wait().require(0)
        node.wait_surface(before)
        users.wait()
        assert gated(node) == []
    assert not set(node.uids("exporter")) & set(first)
    assert node.cp.get(path)["metadata"]["generation"] == 1
    refused = {key for key in node.requests(mark) if key[2] >= 400}
    assert refused <= {("patch", "nodes", 409)}, refused
