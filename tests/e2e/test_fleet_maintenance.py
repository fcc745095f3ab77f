"""Requestor mode and budgets on the real control plane: the installed command, its shipped roles, and an operator that the test plays."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.conftest import FleetMaker
from tests.e2e.fleet import POLICY, GpuFleet
from tests.e2e.world import Object, resource_of
from tests.kube import crds
from tests.kube.controlplane import ControlPlane
from tests.kube.manifests import MAINTENANCE, documents, path

pytestmark = pytest.mark.kube
DONE, DELETION, RESTART = "upgrade-done", "pod-deletion-required", "pod-restart-required"
KIND = "NodeMaintenance"
MODE = "nvidia.com/gpu-driver-upgrade-requestor-mode"
US = "nvidia.operator.com"


class Operator(threading.Thread):
    """A small maintenance operator: finalizer, cordon, no GPU pods, Ready; and the way back when the object is deleted."""

    def __init__(self, fleet: GpuFleet) -> None:
        super().__init__(daemon=True)
        self.fleet, self.cp, self.over = fleet, fleet.cp, threading.Event()
        self.log: list[tuple[str, str]] = []
        """What was done, and for which node."""
        self.error: Exception | None = None

    def objects(self) -> list[Object]:
        """All that there are."""
        found: list[Object] = self.cp.get(crds.path(KIND, namespace=self.fleet.namespace))["items"]
        return found

    def run(self) -> None:
        """Looks at all objects, again and again."""
        while not self.over.wait(0.1):
            try:
                for each in self.objects():
                    self._look(each)
            except Exception as error:  # for the test to see
                self.error = error
                return

    def _look(self, each: Object) -> None:
        meta, node = each["metadata"], each["spec"]["nodeName"]
        where = crds.path(KIND, meta["name"], namespace=self.fleet.namespace)
        if "deletionTimestamp" in meta:
            if not each["spec"].get("additionalRequestors"):
                self.log.append(("open", node))
                self.fleet.change(node, cordon=False)
                self.cp.patch(where, {"metadata": {"finalizers": None}})
        elif not meta.get("finalizers"):
            self.log.append(("close", node))
            self.cp.patch(where, {"metadata": {"finalizers": ["maintenance.nvidia.com/finalizer"]}})
            self.fleet.change(node, cordon=True)
        elif not each.get("status", {}).get("conditions"):
            self._free(where, node)

    def _free(self, where: str, node: str) -> None:
        query = f"labelSelector=job%3Dtrain&fieldSelector=spec.nodeName%3D{node}"
        pods = self.cp.get(f"{self.fleet.space}/pods?{query}")["items"]
        for pod in pods:
            self.cp.delete(f"{self.fleet.space}/pods/{pod['metadata']['name']}")
        if not pods:
            free = {"type": "Ready", "status": "True", "reason": "Ready", "message": "", "lastTransitionTime": "2026-01-31T09:00:00Z"}
            self.cp.patch(f"{where}/status", {"status": {"conditions": [free]}})
            self.log.append(("free", node))


@pytest.fixture
def maintenances(control_plane: ControlPlane) -> Iterator[None]:
    """The custom resource NodeMaintenance, as long as the test."""
    control_plane.create(crds.CRDS, crds.crd(KIND))
    control_plane.wait_for(lambda: control_plane.request("GET", crds.path(KIND)).status == 200, "NodeMaintenance to be served")
    yield
    control_plane.delete(f"{crds.CRDS}/{crds.name(KIND)}")
    control_plane.wait_for(lambda: control_plane.request("GET", crds.path(KIND)).status == 404, "NodeMaintenance to be gone")


@pytest.fixture
def two(fleet: FleetMaker, maintenances: None) -> Iterator[tuple[GpuFleet, Operator]]:
    """Two nodes with a GPU pod each, the shipped role for maintenance, and an operator."""
    made = fleet(2, start_after="200ms", stop_after="200ms")
    for number, name in enumerate(made.names):
        made.add_training(1, name=f"train-{number}", node=name)
    for shipped in documents(MAINTENANCE):
        body: Object = json.loads(json.dumps(shipped).replace('"driver-manager"', f'"{made.namespace}"'))
        body["metadata"]["namespace"] = made.namespace
        body["metadata"]["labels"] = {}
        made.cp.apply(path(body), body)
    operator = Operator(made)
    operator.start()
    yield made, operator
    operator.over.set()
    operator.join(10)
    for each in operator.objects():
        made.cp.patch(crds.path(KIND, each["metadata"]["name"], namespace=made.namespace), {"metadata": {"finalizers": None}})
    assert operator.error is None


def led(fleet: GpuFleet) -> dict[str, Any]:
    """Starts a replica in requestor mode, waits until all nodes are done, and gives how they are."""
    settings = {"MAINTENANCE_OPERATOR_ENABLED": "true", "MAINTENANCE_OPERATOR_REQUESTOR_NAMESPACE": fleet.namespace}
    fleet.start(settings=settings)
    fleet.wait_states(DONE)
    return fleet.surface()


def test_requestor_mode(two: tuple[GpuFleet, Operator]) -> None:
    """Each node is closed, freed and opened by the operator, once and one after the other; ours evicts nobody and leaves nothing behind."""
    fleet, operator = two
    before = led(fleet)
    since = fleet.cp.audit_mark()
    fleet.set_driver("2")
    fleet.cp.wait_for(lambda: fleet.digests() == {"2"}, "the new drivers")
    fleet.wait_states(DONE)
    fleet.cp.wait_for(lambda: not operator.objects() and fleet.surface() == before, "the nodes to be as before")
    first, second = (node for what, node in operator.log if what == "close")
    assert operator.log == [(what, node) for node in (first, second) for what in ("close", "free", "open")]
    assert fleet.evicted(since) == []
    written = [(each["verb"], resource_of(each)) for each in fleet.audit(since) if resource_of(each).startswith("nodemaintenances")]
    assert sorted(verb for verb, _ in written if verb != "watch") == ["create", "create", "delete", "delete"]


def test_requestor_mode_killed_and_shared(two: tuple[GpuFleet, Operator]) -> None:
    """Another program joins, and ours is killed as it releases: the next replica ends it, and the object stays for the other one."""
    fleet, operator = two
    led(fleet)
    first = min(fleet.names)
    where = crds.path(KIND, f"nvidia-operator-{first}", namespace=fleet.namespace)
    fleet.set_driver("2")
    fleet.wait_states({first: RESTART})
    fleet.cp.patch(where, {"spec": {"additionalRequestors": ["network.operator.com"]}})
    fleet.cp.wait_for(lambda: "deletionTimestamp" in fleet.cp.get(where)["metadata"], "the release", 60, 0.01)
    fleet.running[-1].kill()
    fleet.cp.delete(f"/apis/coordination.k8s.io/v1/namespaces/{fleet.namespace}/leases/driver-manager-controller")
    fleet.start(name="two", settings={"MAINTENANCE_OPERATOR_ENABLED": "true", "MAINTENANCE_OPERATOR_REQUESTOR_NAMESPACE": fleet.namespace})
    fleet.wait_states(DONE)
    fleet.cp.wait_for(lambda: fleet.digests() == {"2"}, "the new drivers")
    kept = fleet.cp.get(where)
    assert kept["spec"]["requestorID"] == US
    assert kept["spec"]["additionalRequestors"] == ["network.operator.com"]
    assert fleet.nodes()[first]["spec"].get("unschedulable")
    assert all(MODE not in node["metadata"].get("annotations", {}) for node in fleet.nodes().values())
    fleet.cp.patch(where, {"spec": {"additionalRequestors": None}})
    fleet.cp.wait_for(lambda: not operator.objects(), "the object to go with the other one")


def test_a_budget_keeps_the_others_in_their_place(fleet: FleetMaker) -> None:
    """R5, N07: a pod may not go now: nobody else of its node goes, an Event names the budget, and all go when there is room, once."""
    one = fleet(1, gpus=3, start_after="200ms", stop_after="200ms")
    (name,) = one.names
    one.policy = POLICY | {"podDeletion": {"timeoutSeconds": 120}}
    for app in ("train-held", "train-free", "train-too"):
        one.add_training(1, name=app, node=name)
    budgets = f"/apis/policy/v1/namespaces/{one.namespace}/poddisruptionbudgets"
    spec = {"minAvailable": 1, "selector": {"matchLabels": {"app": "train-held"}}}
    one.cp.create(budgets, {"metadata": {"name": "held"}, "spec": spec})
    one.start()
    one.wait_states(DONE)
    since = one.cp.audit_mark()
    one.set_driver("2")
    one.wait_states({name: DELETION})

    def told() -> list[str]:
        return [text for _, reason, text in one.events(name) if reason == "BlockedByBudget"]

    one.cp.wait_for(told, "the Event", 10)
    assert "held" in told()[0]
    one.cp.wait_for(lambda: one.counts(since)["create", "pods/eviction", 429] >= 3, "two tries more", 30)
    assert one.evicted(since) == []
    one.cp.delete(f"{budgets}/held")
    one.wait_states(DONE)
    evicted = one.evicted(since)
    assert [name.rsplit("-", 2)[0] for name in evicted] == ["train-free", "train-held", "train-too"]
    dry = [each for each in one.audit(since) if resource_of(each) == "pods/eviction" and "dryRun" in each["requestURI"]]
    assert len(dry) == 1, "only the pod of the budget is asked for beforehand"
    assert len(told()) == 1
