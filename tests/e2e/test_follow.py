"""Beside a gpu-operator that lives, dies in mid-flow and comes back: the installed command on the real control plane."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import ExporterMaker, FleetMaker
from tests.e2e.exporters import Exporter, marked, shipped
from tests.e2e.fleet import LEASE, ROLLOUT, STATE, GpuFleet
from tests.e2e.fleetwatch import watched
from tests.e2e.parkwatch import ENFORCED, PARKED, assert_parked_through, is_parked, surface
from tests.e2e.world import resource_of
from tests.kube.proxy import ApiProxy

pytestmark = pytest.mark.kube
DONE, DELETION = "upgrade-done", "pod-deletion-required"
ROLE = "nvidia.com/gpu-driver-manager.role"
QUICK = {"RETRY_PERIOD": "500ms"}
"""How often ours looks whether gpu-operator lives."""
ROOT = Path(__file__).resolve().parents[2]
Operator = Callable[[GpuFleet], "subprocess.Popen[bytes]"]


@pytest.fixture
def gpu_operator() -> Iterator[Operator]:
    """Starts the stand-in for gpu-operator on a fleet, under an account that is not ours."""
    running: list[subprocess.Popen[bytes]] = []

    def start(fleet: GpuFleet) -> subprocess.Popen[bytes]:
        words = (fleet.namespace, f"fleet={fleet.namespace}", json.dumps(fleet.policy))
        env = {"KUBECONFIG": str(fleet.cp.kubeconfig()), "HOME": str(fleet.folder)}
        command = [sys.executable, "-m", "tests.controller.gpuoperator", *words]
        running.append(subprocess.Popen(command, env=env, cwd=ROOT, stdin=subprocess.DEVNULL))
        return running[-1]

    yield start
    for each in running:
        each.kill()
        each.wait(10)


def add_hidden(fleet: GpuFleet, node: str, name: str) -> None:
    """A Deployment on a node that uses the driver and asks for no GPU: gpu-operator does not know it."""
    fleet.add_deployment(name, node=node, labels={"job": "hidden", "nvidia.com/gpu.client": "true"})


def role(fleet: GpuFleet) -> str:
    """What our Lease says of the role; empty before there is one."""
    every = fleet.cp.get(f"/apis/coordination.k8s.io/v1/namespaces/{fleet.namespace}/leases")["items"]
    if LEASE not in {each["metadata"]["name"] for each in every}:
        return ""
    return str(fleet.lease()["metadata"].get("annotations", {}).get(ROLE, ""))


def node_writes(fleet: GpuFleet, since: int) -> int:
    """How many times ours has written to a node."""
    return sum(number for (verb, what, status), number in fleet.counts(since).items() if (verb, what, status) == ("patch", "nodes", 200))


@pytest.mark.timeout(240)
def test_it_follows_leads_on_and_follows_again(fleet: FleetMaker, gpu_operator: Operator) -> None:
    """Decision 31: while gpu-operator lives ours evicts what that does not know, and writes to no node; when it dies ours leads on."""
    two = fleet(2, start_after="200ms", stop_after="200ms")
    for number, name in enumerate(two.names):
        two.add_training(1, name=f"train-{number}", node=name, grace=4)
        add_hidden(two, name, f"hidden-{number}")
    living = gpu_operator(two)
    two.wait_states(DONE)
    two.start(settings=QUICK)
    two.cp.wait_for(lambda: role(two).startswith("follow: gpu-operator lives"), "ours to follow", 30)
    before, mark = two.surface(), two.cp.audit_mark()
    with watched(two) as story:
        two.set_driver("2")
        first, second = two.names
        two.wait_states({first: DONE, second: DELETION}, 90)
        living.kill()
        assert node_writes(two, mark) == 0
        assert [name.rpartition("-")[0].rpartition("-")[0] for name in two.evicted(mark)][:1] == ["hidden-0"]
        two.cp.wait_for(lambda: role(two).startswith("lead: no gpu-operator lives"), "ours to lead", 30)
        two.wait_states(DONE, 90)
        two.wait_whole()
        story.assert_replaced_once()
        story.assert_budget(parallel=1, unavailable=2)
    evicted = two.evicted(mark)
    assert len(evicted) == len(set(evicted)), "nothing is repeated"
    two.cp.wait_for(lambda: two.surface() == before, "the nodes to be as before")

    gpu_operator(two)
    two.cp.wait_for(lambda: role(two).startswith("follow: gpu-operator lives"), "ours to follow again", 30)
    mark = two.cp.audit_mark()
    with watched(two) as story:
        two.set_driver("3", "driver:3")
        two.cp.wait_for(lambda: two.digests() == {"3"} and set(two.states().values()) == {DONE}, "gpu-operator to roll out", 120, 0.1)
        two.wait_whole()
        story.assert_replaced_once()
    assert node_writes(two, mark) == 0
    assert sorted(name.partition("-")[0] for name in two.evicted(mark)) == ["hidden", "hidden"]
    assert not [key for key in two.counts(mark) if key[2] in (401, 403)], "all that it asks is allowed"
    assert all(node["metadata"]["labels"][STATE] == DONE for node in two.nodes().values())


# With a DaemonSet that has to be parked ---------------------------------------------------------------------------------


class Held:
    """On every node a GPU pod that a budget of its own holds, until it is let go, and a pod that gpu-operator does not know."""

    def __init__(self, exporter: Exporter) -> None:
        self.exporter, self.fleet = exporter, exporter.fleet
        self.budgets = f"/apis/policy/v1/namespaces/{self.fleet.namespace}/poddisruptionbudgets"
        for number, name in enumerate(self.fleet.names):
            self.fleet.add_training(1, name=f"train-{number}", node=name)
            add_hidden(self.fleet, name, f"hidden-{number}")
            spec = {"minAvailable": 1, "selector": {"matchLabels": {"app": f"train-{number}"}}}
            self.fleet.cp.create(self.budgets, {"metadata": {"name": name}, "spec": spec})

    def wait_all_but_it_gone(self, name: str) -> None:
        """Waits until a node is parked, and nobody is there whom gpu-operator does not know."""

        def is_so() -> bool:
            hidden = self.fleet.cp.get(f"{self.fleet.space}/pods?labelSelector=job%3Dhidden")["items"]
            there = [pod for pod in (*self.exporter.pods(), *hidden) if pod["spec"].get("nodeName") == name]
            return is_parked(self.fleet.nodes()[name], self.exporter.owner) and not there

        self.fleet.wait(is_so, f"{name} to be parked and freed; {self.fleet.states()}")

    def let_go(self, name: str) -> None:
        """Takes the budget of a node's GPU pod away."""
        self.fleet.cp.delete(f"{self.budgets}/{name}")


def parked(fleet: GpuFleet) -> list[str]:
    """Names of the nodes that are parked."""
    return [name for name, node in sorted(fleet.nodes().items()) if PARKED in node["metadata"]["labels"]]


def evicted_by_anybody(exporter: Exporter, since: int) -> list[str]:
    """Names of the pods of fleet and exporter whose eviction was accepted, whoever asked, twice where that was so twice."""
    spaces = {exporter.namespace, exporter.fleet.namespace}
    asked = [each for each in exporter.fleet.cp.audit(since) if resource_of(each) == "pods/eviction" and "dryRun" not in each["requestURI"]]
    done = [each["objectRef"] for each in asked if each["responseStatus"]["code"] == 201]
    return [each["name"] for each in done if each["namespace"] in spaces]


def assert_follows(proxy: ApiProxy) -> int:
    """All that ours has asked to change on nodes so far is what parks, its record, and its marks; gives how many requests there were."""
    patches = [seen.json() for seen in proxy.requests("patch", "/nodes/")]
    for patch in patches:
        meta = patch["metadata"]
        assert patch.keys() == {"metadata"}, f"no cordon and no taint: {patch}"
        assert meta.get("labels", {}).keys() <= {PARKED}, patch
        assert meta.get("annotations", {}).keys() <= {PARKED, ROLLOUT, ENFORCED}, patch
    return len(patches)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("nodes", [2, pytest.param(10, marks=pytest.mark.deep)])
def test_it_parks_as_a_follower_and_leads_on(exporter_on: ExporterMaker, gpu_operator: Operator, api_proxy: ApiProxy, nodes: int) -> None:
    """Decisions 31, 44: while gpu-operator leads ours frees and parks and writes no state; that dies in mid-flow: ours ends it all, once.

    It dies when the first node of the second half is parked and freed, and its GPU pod not yet evicted.
    """
    exporter = exporter_on(nodes)
    fleet = exporter.fleet
    living = gpu_operator(fleet)
    exporter.make()
    held = Held(exporter)
    fleet.wait_states(DONE)
    with shipped(fleet, "gate"):
        fleet.start(proxy=api_proxy, settings=QUICK)
        fleet.wait(lambda: role(fleet).startswith("follow: gpu-operator lives"), "ours to follow")
        fleet.wait(lambda: marked(fleet) == fleet.names, "the policies to be proven")
        before, mark, proven = surface(fleet), fleet.cp.audit_mark(), assert_follows(api_proxy)
        there = {pod["metadata"]["name"] for pod in exporter.pods()}
        users = fleet.cp.record(f"{fleet.space}/pods", "labelSelector=job%3Dhidden")
        with watched(fleet) as story, fleet.cp.record(exporter.pods_path) as pods, users:
            fleet.set_driver("2")
            led, left = fleet.names[: nodes // 2], fleet.names[nodes // 2 :]
            for name in led:
                held.wait_all_but_it_gone(name)
                held.let_go(name)
            held.wait_all_but_it_gone(left[0])
            fleet.wait_states({left[0]: DELETION})
            fleet.wait(lambda: parked(fleet) == left[:1], "those before it to be un-parked")
            living.kill()
            living.wait(10)
            assert assert_follows(api_proxy) >= proven + 2 * len(led) + 1, "each was parked and un-parked by ours"
            for name in left:
                held.let_go(name)
            fleet.wait(lambda: role(fleet).startswith("lead: no gpu-operator lives"), "ours to lead")
            exporter.wait_rolled_out("2", 120)
            story.assert_replaced_once()
            story.assert_budget(parallel=1, unavailable=1)
            assert_parked_through(story, pods, exporter.owner, users, is_led_by_others=True)
        fleet.wait(lambda: surface(fleet) == before, "the nodes to be as before, and nothing parked")
    evicted = evicted_by_anybody(exporter, mark)
    assert len(evicted) == len(set(evicted)), "nobody is evicted twice"
    assert there <= set(evicted)
    apps = Counter(name.rsplit("-", 2)[0] for name in evicted if not name.startswith(exporter.name))
    assert apps == {f"{kind}-{number}": 1 for kind in ("train", "hidden") for number in range(nodes)}
    refused = {key for key in fleet.counts(mark) if key[2] in (401, 403) and key[:2] != ("create", "pods")}
    assert not refused, "all that it asks is allowed"
