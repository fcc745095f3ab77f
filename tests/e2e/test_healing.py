"""Healing and cleanup on the real control plane: the real agent killed for good, the real controller, the installed command."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from driver_manager.names import UPGRADE_STATE
from tests.e2e.command import Running, start
from tests.e2e.moments import after_unload, bury
from tests.e2e.world import RECORD, STATUS, StockNode
from tests.kube.proxy import ApiProxy

pytestmark = pytest.mark.kube
TIMES = ("--lease-duration", "3s", "--renew-deadline", "1500ms", "--retry-period", "500ms", "--request-timeout", "1s")
SETTLE = ("--settle-time", "2s", "--heal-pause", "1s")


class Beside:
    """Commands of an admin beside the node."""

    def __init__(self, node: StockNode) -> None:
        self.node = node
        self.running: list[Running] = []

    def run(self, *words: str) -> Running:
        """Starts a command that knows where the fleet is."""
        env = {"PATH": os.environ["PATH"], "KUBECONFIG": str(self.node.cp.kubeconfig()), "LOG_FORMAT": "json"}
        env |= {"OPERATOR_NAMESPACE": self.node.namespace, "POD_NAMESPACE": self.node.namespace}
        made = start(words, env, self.node.folder / f"beside-{len(self.running)}")
        self.running.append(made)
        return made

    def lead(self) -> Running:
        """Starts a controller of this node."""
        made = self.run("controller", "--node-selector", f"space={self.node.namespace}", "--listen", "", *TIMES, *SETTLE)
        made.wait_for_line(lambda line: line.get("message") == "the fleet is known", "the controller to lead")
        return made


@pytest.fixture
def beside(node: StockNode) -> Iterator[Beside]:
    """Ends what it has started."""
    made = Beside(node)
    yield made
    for run in made.running:
        if run.process.poll() is None:
            run.kill()


def killed_half_way(node: StockNode, proxy: ApiProxy) -> None:
    """The agent is killed when the driver is unloaded. The boot of the simulated kubelet is the tree's."""
    boot = node.node()["status"]["nodeInfo"]["bootID"]
    node.tree.file("proc/sys/kernel/random/boot_id", f"{boot}\n")
    after_unload(node, proxy).kill()
    bury(node, proxy)
    assert node.annotation(RECORD) is not None
    assert node.node()["spec"]["unschedulable"]


def driver_is_gone(node: StockNode) -> None:
    """The driver's DaemonSet is deleted, and its pod is gone."""
    path = f"/apis/apps/v1/namespaces/{node.namespace}/daemonsets/{node.driver['metadata']['name']}"
    node.cp.delete(path)
    for pod in node.driver_pods():
        node.cp.delete(f"{node.space}/pods/{pod['metadata']['name']}?gracePeriodSeconds=0")
    node.cp.wait_for(lambda: not node.driver_pods(), "the driver's pod to be gone")


def events(node: StockNode) -> list[Any]:
    found: list[Any] = node.cp.get("/api/v1/namespaces/default/events")["items"]
    return [each for each in found if each.get("involvedObject", each.get("regarding", {})).get("name") == node.name]


def test_an_agent_that_is_gone_for_good(busy_node: StockNode, beside: Beside, api_proxy: ApiProxy) -> None:
    """Decision 36, N49: the agent SIGKILLed in the unload, its pod gone, no driver due: the controller puts the node back exactly."""
    before = busy_node.surface()
    killed_half_way(busy_node, api_proxy)
    record = busy_node.annotation(RECORD)
    beside.lead()
    time.sleep(4.0)  # twice the settle time
    assert busy_node.annotation(RECORD) == record, "its pod is there"
    driver_is_gone(busy_node)
    with busy_node.cp.record("/api/v1/nodes", f"fieldSelector=metadata.name%3D{busy_node.name}") as nodes:
        busy_node.cp.wait_for(lambda: busy_node.annotation(RECORD) is None, "the node to be healed", 30, every=0.1)
        texts = [event.object["metadata"].get("annotations", {}).get(RECORD) for event in nodes.until_now()]
    busy_node.wait_surface(before)
    assert STATUS not in busy_node.node()["metadata"].get("annotations", {})
    assert len({text for text in texts if text}) <= 2, "one new run id, then nothing"
    busy_node.cp.wait_for(lambda: {"Claimed", "Healed"} <= {each.get("reason") for each in events(busy_node)}, "the Events", 10)


def test_cleanup(busy_node: StockNode, beside: Beside, api_proxy: ApiProxy) -> None:
    """Issue 7: refused while a controller leads; then a dry run tells, and the command takes everything off and names the rest."""
    before = busy_node.surface()
    killed_half_way(busy_node, api_proxy)
    busy_node.change({"metadata": {"labels": {UPGRADE_STATE: "upgrade-done"}}})
    beside.run("cleanup").wait(60).require(75).said(busy_node.name, "is there")
    leader = beside.lead()
    beside.run("cleanup").wait(60).require(65).said("a controller leads", "scale")
    assert busy_node.annotation(RECORD) is not None
    leader.terminate()
    leader.wait(20).require(0)
    driver_is_gone(busy_node)
    neighbour = busy_node.add_neighbour()
    busy_node.cp.patch(f"/api/v1/nodes/{neighbour}", {"spec": {"unschedulable": True}})
    told = beside.run("cleanup", "--dry-run", "--output", "json").wait(60).require(0).document()
    assert told["dryRun"]
    assert busy_node.annotation(RECORD) is not None
    done = beside.run("cleanup", "--heal-pause", "1s", "--output", "json").wait(90).require(0).document()
    assert done["nodes"] == told["nodes"]
    (theirs,) = [each for each in done["nodes"] if each["node"] == neighbour]
    assert (theirs["done"], "cordon" in theirs["left"][0]) == ([], True)
    busy_node.wait_surface(before)
    assert busy_node.cp.get(f"/api/v1/nodes/{neighbour}")["spec"]["unschedulable"]
    assert "no node has anything of ours" in beside.run("cleanup", "--heal-pause", "1s").wait(60).require(0).out
