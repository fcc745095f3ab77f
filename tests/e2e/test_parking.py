"""A DaemonSet that tolerates everything is parked through a roll-out, by the shipped admission policies on the real control plane."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import pytest

from tests.e2e.conftest import FleetMaker
from tests.e2e.fleet import DRIVER_SET, GpuFleet, shipped_account
from tests.e2e.fleetwatch import watched
from tests.e2e.parkwatch import OtherUsers, assert_parked_through
from tests.kube.fixtures import make_namespace
from tests.kube.manifests import PARKING, TEMPLATES, Applied
from tests.kube.recorder import Object
from tests.kube.space import daemon_set, is_marked, is_ready, node_of

pytestmark = pytest.mark.kube
DONE = "upgrade-done"
PARK, PARKED = "nvidia.com/gpu-driver-manager.park", "nvidia.com/gpu-driver-manager.parked"
MARK = "nvidia.com/gpu-driver-manager.parking"
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


def marked(fleet: GpuFleet) -> list[str]:
    """The nodes on which the agent may park by itself, and on which nobody is parked."""
    metas = {name: node["metadata"] for name, node in fleet.nodes().items()}
    fine = {name for name, meta in metas.items() if meta["annotations"].get(MARK) == "enforced" and PARKED not in meta["labels"]}
    return sorted(fine)


@pytest.mark.parametrize("way", list(WAYS))
def test_parked_from_the_cordon_to_the_opening(exporter: Exporter, way: str) -> None:
    """Proposal C: it runs on every node before and after, on none in work; its neighbours keep theirs; nothing of it is changed."""
    fleet = exporter.fleet
    exporter.make()
    others = OtherUsers(fleet, 3)
    with shipped(fleet, way):
        fleet.start()
        fleet.wait_states(DONE)
        fleet.cp.wait_for(lambda: marked(fleet) == fleet.names, "the policies to be proven, and every node marked", 20)
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
    assert marked(fleet) == []


def test_parked_by_its_template(exporter: Exporter) -> None:
    """No policy is there and the setting is on: its template is changed once, then the label of a node takes its pod away and back.

    It is OnDelete, so the change restarts nobody: its controller asks the newest template where pods belong.
    """
    fleet = exporter.fleet
    fleet.cluster_wide += shipped_account(fleet.cp, fleet.namespace, TEMPLATES)
    exporter.make()
    others = OtherUsers(fleet, 3)
    uids = {pod["metadata"]["uid"] for pod in exporter.pods()}
    fleet.start(settings={"TEMPLATE_PARKING": "true"})
    fleet.wait_states(DONE)
    fleet.cp.wait_for(lambda: fleet.cp.get(exporter.path)["status"]["observedGeneration"] == 2, "the new template")
    assert {pod["metadata"]["uid"] for pod in exporter.pods()} == uids
    before, mark = fleet.surface(), fleet.cp.audit_mark()
    with watched(fleet) as story, fleet.cp.record(exporter.pods_path, "") as pods, others.record() as users:
        fleet.set_driver("2")
        story.nodes.wait_for(lambda event: fleet.is_in(event, "upgrade-required"), "the roll-out to begin")
        fleet.wait_states(DONE, 60)
        exporter.wait_everywhere(30)
        story.assert_budget(parallel=1, unavailable=1)
        story.assert_replaced_once()
        assert_parked_through(story, pods, exporter.owner, users)
    fleet.cp.wait_for(lambda: fleet.surface() == before, "the nodes to be as before")
    assert fleet.cp.get(exporter.path)["metadata"]["generation"] == 2
    missing = {("get", f"{kind}admissionpolicies", 404) for kind in ("mutating", "validating")} | {("get", "leases", 404)}
    refused = {key for key in fleet.counts(mark) if key[2] >= 400}
    assert refused <= {("patch", "nodes", 409), ("create", "pods/eviction", 404), ("create", "pods/eviction", 409)} | missing, refused


DAEMONS = "system:serviceaccount:kube-system:daemon-set-controller"
REFUSALS = 14
"""In a row: the DaemonSet controller then pauses for more than a minute (5 ms, doubled with each; measured up to 11)."""


def _is_more(count: Callable[[], int], before: int) -> bool:
    return count() > before


def test_neighbours_are_healed_where_pods_are_denied(exporter: Exporter) -> None:
    """While refusals for a parked node make its controller pause, a neighbour's pod that is gone comes back: ours wakes the controller."""
    fleet = exporter.fleet
    exporter.make()
    with shipped(fleet, "deny"):
        fleet.start()
        fleet.wait_states(DONE)
        mark = fleet.cp.audit_mark()
        sick = fleet.driver_set("2")["spec"]["template"]
        sick["metadata"]["annotations"] |= {"kubelet.sim/ready": "never"}
        fleet.cp.patch(f"{fleet.sets}/{DRIVER_SET}", {"spec": {"template": sick}})

        def parked_and_free() -> str:
            there = [name for name, node in fleet.nodes().items() if PARKED in node["metadata"]["labels"]]
            return there[0] if there and fleet.states()[there[0]] == "pod-restart-required" else ""

        parked = fleet.cp.wait_for(parked_and_free, "a parked node without its driver", 30)

        def refusals() -> int:
            creates = [event for event in fleet.cp.audit(mark, DAEMONS) if event["verb"] == "create"]
            asked = [event for event in creates if event["objectRef"].get("namespace") == exporter.namespace]
            return sum(event["responseStatus"]["code"] == 403 for event in asked)

        while (before := refusals()) < REFUSALS:
            fleet.change(parked, labels={"looked-at": str(before)})  # has the controller look at once
            fleet.cp.wait_for(partial(_is_more, refusals, before), "another refusal")
        with fleet.cp.record("/api/v1/nodes", f"fieldSelector=metadata.name%3D{parked}") as seen:
            deadline = time.monotonic() + 60
            while not any(event.object["metadata"]["labels"].get(PARKED) == "again" for event in seen.events):
                assert time.monotonic() < deadline, "no round in which the controller tried the parked node first"
                gone = {pod["metadata"]["uid"] for pod in exporter.pods()}
                fleet.cp.delete(f"{exporter.pods_path}?gracePeriodSeconds=0")

                def all_back(gone: set[str] = gone) -> bool:
                    fresh = [pod for pod in exporter.pods() if is_ready(pod) and pod["metadata"]["uid"] not in gone]
                    return sorted(map(node_of, fresh)) == sorted({*fleet.names} - {parked})

                fleet.cp.wait_for(all_back, "the neighbours' pods to be back", 30, 0.05)
