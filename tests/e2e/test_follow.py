"""Beside a gpu-operator that lives, dies in mid-flow and comes back: the installed command on the real control plane."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import FleetMaker
from tests.e2e.fleet import LEASE, STATE, GpuFleet
from tests.e2e.fleetwatch import watched

pytestmark = pytest.mark.kube
DONE, DELETION = "upgrade-done", "pod-deletion-required"
ROLE = "nvidia.com/gpu-driver-manager.role"
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
    two.start(by_file=True)
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
