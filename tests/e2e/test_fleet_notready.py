"""Nodes whose kubelet falls silent in the middle of an upgrade, on the real control plane: each wait has its bound, and its way on."""

from __future__ import annotations

import os

import pytest

from tests.e2e.command import start
from tests.e2e.conftest import FleetMaker
from tests.e2e.fleet import DRIVER_SET, SIM, GpuFleet
from tests.e2e.fleetwatch import watched
from tests.e2e.test_fleet_kills import to_state
from tests.kube.controlplane import STRATEGIC
from tests.kube.kubelet import node_conditions
from tests.kube.proxy import ApiProxy
from tests.kube.space import is_marked, node_of

pytestmark = [pytest.mark.kube, pytest.mark.timeout(300)]
DONE, REQUIRED, DELETION, FAILED = "upgrade-done", "upgrade-required", "pod-deletion-required", "upgrade-failed"


def fall_silent(fleet: GpuFleet, name: str, status: str) -> None:
    """No pod of a node moves any more, and its condition Ready is False, as its kubelet says, or Unknown, as is said of a silent one."""
    fleet.change(name, annotations={f"{SIM}down": "true"})
    set_ready(fleet, name, status)


def come_back(fleet: GpuFleet, name: str) -> None:
    """The end of that."""
    fleet.change(name, annotations={f"{SIM}down": None, f"{SIM}ready": None})
    set_ready(fleet, name, "True")


def set_ready(fleet: GpuFleet, name: str, status: str) -> None:
    """Writes the condition."""
    (ready,) = [each for each in node_conditions() if each["type"] == "Ready"]
    body = {"status": {"conditions": [ready | {"status": status, "reason": "KubeletReady" if status == "True" else "NodeStatusUnknown"}]}}
    fleet.cp.patch(f"/api/v1/nodes/{name}/status", body, kind=STRATEGIC)


def reasons(fleet: GpuFleet) -> dict[str, str]:
    """Node -> why it is where it is, as `status --all` says."""
    env = {"PATH": os.environ["PATH"], "KUBECONFIG": str(fleet.cp.kubeconfig()), "LOG_FORMAT": "json"}
    env |= {"OPERATOR_NAMESPACE": fleet.namespace, "POD_NAMESPACE": fleet.namespace, "NODE_SELECTOR": f"fleet={fleet.namespace}"}
    env |= {"POLICY_FILE": str(fleet.folder / "policy.yaml")}
    folder = fleet.folder / f"status-{len(list(fleet.folder.glob('status-*')))}"
    said = start(("status", "--all", "--output", "json"), env, folder).wait().require(0).document()
    return {row["node"]: row["reason"] for row in said["nodes"]}


def test_nodes_that_fall_silent_in_mid_flow(fleet: FleetMaker, api_proxy: ApiProxy) -> None:
    """N52, decision 39: before the driver pod is deleted a node is opened and waits until it is Ready; after it, it fails, and recovers."""
    three = fleet(3, start_after="200ms", stop_after="200ms")
    users, free, gone = three.names
    three.policy |= {"maxParallelUpgrades": 3, "podDeletion": {"timeoutSeconds": 2}}
    three.add_training(1, node=users)
    three.start(proxy=api_proxy, settings={"DRIVER_TIMEOUT": "3s", "RETRY_PAUSE": "1s"})
    three.wait_states(DONE)
    before, mark, uids, training = three.surface(), three.cp.audit_mark(), three.drivers(), three.training()
    three.change(users, annotations={f"{SIM}down": "true"})
    three.change(gone, annotations={f"{SIM}ready": "never"})
    held = to_state("pod-restart-required")(api_proxy, free).hold_request()  # what it rests on changes meanwhile: 409
    with watched(three) as story:
        three.set_driver("2")
        held.wait_hit()
        fall_silent(three, free, "Unknown")
        held.release()
        story.nodes.wait_for(lambda event: event.name == users and three.is_in(event, DELETION), "the users to be evicted")
        set_ready(three, users, "False")
        three.wait(lambda: three.drivers().get(gone, uids[gone]) != uids[gone], "another driver pod")
        fall_silent(three, gone, "Unknown")
        three.wait_states({users: REQUIRED, free: REQUIRED, gone: FAILED})
        closed = {name for name, node in three.nodes().items() if node["spec"].get("unschedulable")}
        assert closed == {gone}
        failures = [three.rollout(name)["failures"][-1]["reason"] for name in three.names]
        assert failures == ["NotFreed", "NodeNotReady", "DriverTimedOut"]
        wanted = {users: "NodeNotReady", free: "NodeNotReady"}
        three.wait(lambda: reasons(three).items() >= wanted.items(), "both to wait until they are Ready")
        assert not [pod for pod in three.pods(DRIVER_SET) if node_of(pod) != gone and is_marked(pod)], "a silent node keeps its driver"
        for name in three.names:
            come_back(three, name)
        three.wait(lambda: three.digests() == {"2"} and set(three.states().values()) == {DONE}, "all nodes to be done")
        three.wait_whole()
        three.wait(lambda: three.surface() == before, "the nodes to be as before")
        story.assert_replaced_once()
    evicted = three.evicted(mark)
    assert training <= set(evicted)
    assert len(evicted) == len(set(evicted))
    assert len(three.deleted(mark)) == 3
