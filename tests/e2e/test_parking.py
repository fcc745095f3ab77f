"""A DaemonSet that tolerates everything is parked through a roll-out, by the shipped admission policies on the real control plane."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.e2e.conftest import FleetMaker
from tests.e2e.fleet import GpuFleet
from tests.e2e.fleetwatch import watched
from tests.e2e.parkwatch import OtherUsers, assert_parked_through
from tests.kube.fixtures import make_namespace
from tests.kube.manifests import PARKING, Applied
from tests.kube.recorder import Object
from tests.kube.space import daemon_set, is_marked, is_ready, node_of

pytestmark = pytest.mark.kube
DONE = "upgrade-done"
PARK, PARKED = "nvidia.com/gpu-driver-manager.park", "nvidia.com/gpu-driver-manager.parked"
GATE, DENY = "MutatingAdmissionPolicy", "ValidatingAdmissionPolicy"
WAYS = {"gate": DENY, "deny": GATE, "both": ""}
"""What is shipped and left out."""


@dataclass(slots=True)
class Exporter:
    """A DaemonSet of another namespace that uses the driver on every node of a fleet, and tolerates every taint."""

    fleet: GpuFleet
    namespace: str
    name: str = "exporter"

    @property
    def owner(self) -> str:
        """As nodes name it that it is parked on."""
        return f"{self.namespace}/{self.name}"

    @property
    def pods_path(self) -> str:
        """Of all pods of the namespace."""
        return f"/api/v1/namespaces/{self.namespace}/pods"

    @property
    def path(self) -> str:
        """Of itself."""
        return f"/apis/apps/v1/namespaces/{self.namespace}/daemonsets/{self.name}"

    def make(self, *, is_opted_in: bool = True, is_rolling: bool = False) -> None:
        """Makes it, and waits until it runs everywhere."""
        where = {"nodeSelector": {"fleet": self.fleet.namespace}, "tolerations": [{"operator": "Exists"}]}
        spec = {**where, "terminationGracePeriodSeconds": 1}
        body = daemon_set(self.name, spec=spec)
        body["spec"]["template"]["metadata"]["annotations"] = {"nvidia.com/gpu.client": "true", "kubelet.sim/stop-after": "200ms"}
        body["metadata"]["labels"] = {PARK: "true"} if is_opted_in else {}
        if is_rolling:
            body["spec"]["updateStrategy"] = {"type": "RollingUpdate"}
        self.fleet.cp.create(self.path.rpartition("/")[0], body)
        self.wait_everywhere()

    def pods(self) -> list[Object]:
        """Its pods, also those that it has left behind."""
        found: list[Object] = self.fleet.cp.get(f"{self.pods_path}?labelSelector=app%3D{self.name}")["items"]
        return found

    def gated(self) -> list[Object]:
        """Those that wait on a scheduling gate."""
        return [pod for pod in self.pods() if pod["spec"].get("schedulingGates")]

    def wait_everywhere(self, timeout: float = 30.0) -> None:
        """Waits until it runs on every node, and no pod of it is gated or on its way out."""

        def is_so() -> bool:
            pods = self.pods()
            fine = [pod for pod in pods if is_ready(pod) and not is_marked(pod) and not pod["spec"].get("schedulingGates")]
            return len(pods) == len(fine) and sorted(map(node_of, fine)) == self.fleet.names

        self.fleet.cp.wait_for(is_so, f"{self.name} on every node", timeout, 0.05)


@pytest.fixture
def exporter(fleet: FleetMaker) -> Iterator[Exporter]:
    """A fleet of three nodes with two GPU pods each, done and at rest, and a namespace for the exporter."""
    made = fleet(3, gpus=2, start_after="200ms", stop_after="200ms")
    namespace = f"{made.namespace}-mon"
    make_namespace(made.cp, namespace)
    found = Exporter(made, namespace)
    yield found
    made.cp.delete(found.path)
    made.cp.delete(f"{found.pods_path}?gracePeriodSeconds=0")
    made.cp.delete(f"/api/v1/namespaces/{namespace}")


def shipped(fleet: GpuFleet, way: str) -> Applied:
    """The admission policies of deploy/parking, as many as the way has."""
    left_out = [WAYS[way], f"{WAYS[way]}Binding"] if WAYS[way] else []
    return Applied(fleet.cp, PARKING, left_out)


@pytest.mark.parametrize("way", list(WAYS))
def test_parked_from_the_cordon_to_the_opening(exporter: Exporter, way: str) -> None:
    """Proposal C: it runs on every node before and after, on none in work; its neighbours keep theirs; nothing of it is changed."""
    fleet = exporter.fleet
    exporter.make()
    others = OtherUsers(fleet, 3)
    with shipped(fleet, way):
        fleet.start()
        fleet.wait_states(DONE)
        before, uids = fleet.surface(), {node_of(pod): pod["metadata"]["uid"] for pod in exporter.pods()}
        there = {pod["metadata"]["name"] for pod in exporter.pods()}
        generation, mark = fleet.cp.get(exporter.path)["metadata"]["generation"], fleet.cp.audit_mark()
        with watched(fleet) as story, fleet.cp.record(exporter.pods_path, "") as pods, others.record() as users:
            fleet.set_driver("2")
            story.nodes.wait_for(lambda event: fleet.is_in(event, "upgrade-required"), "the roll-out to begin")
            fleet.wait_states(DONE, 60)
            exporter.wait_everywhere(30)
            story.assert_budget(parallel=1, unavailable=1)
            story.assert_replaced_once()
            assert_parked_through(story, pods, exporter.owner, users)
        fleet.cp.wait_for(lambda: fleet.surface() == before, "the nodes to be as before")
    evicted = fleet.evicted(mark)
    assert there <= set(evicted)
    assert len(evicted) == len(set(evicted)), "nobody is evicted twice"
    others.wait()
    assert fleet.cp.get(exporter.path)["metadata"]["generation"] == generation
    assert not {pod["metadata"]["uid"] for pod in exporter.pods()} & set(uids.values()), "each node's was replaced"
    refused = {key for key in fleet.counts(mark) if key[2] >= 400 and key[:2] != ("create", "pods")}
    missing = {("get", "mutatingadmissionpolicies", 404), ("get", "leases", 404)}
    assert refused <= {("patch", "nodes", 409)} | missing, refused


def test_nothing_is_begun_without_a_policy(exporter: Exporter) -> None:
    """No admission policy is installed: no node is cordoned, nobody is evicted, and it says what to apply; once it is there, it goes on."""
    fleet = exporter.fleet
    exporter.make()
    fleet.start()
    fleet.wait_states(DONE)
    mark = fleet.cp.audit_mark()
    fleet.set_driver("2")

    def says() -> list[str]:
        return [said for name in fleet.names for _, reason, said in fleet.events(name) if reason == "BlockedByPod"]

    fleet.cp.wait_for(says, "the nodes to be blocked", 30)
    assert all("kubectl apply -f deploy/parking" in said and f"{exporter.namespace}/exporter" in said for said in says())
    assert not fleet.evicted(mark)
    assert not any(node["spec"].get("unschedulable") for node in fleet.nodes().values())
