"""A DaemonSet that tolerates everything is parked through a roll-out, by the shipped admission policies on the real control plane."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import pytest

from tests.e2e.conftest import FleetMaker
from tests.e2e.fleet import DRIVER_SET, STATE, GpuFleet, shipped_account
from tests.e2e.fleetwatch import IN_WORK, watched
from tests.kube.fixtures import make_namespace
from tests.kube.manifests import PARKING, TEMPLATES, Applied
from tests.kube.proxy import ApiProxy
from tests.kube.recorder import Event, Object, Recorder
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

    @property
    def pods_path(self) -> str:
        """Of its pods."""
        return f"/api/v1/namespaces/{self.namespace}/pods"

    @property
    def path(self) -> str:
        """Of itself."""
        return f"/apis/apps/v1/namespaces/{self.namespace}/daemonsets/exporter"

    def make(self, *, is_opted_in: bool = True) -> None:
        """Makes it, and waits until it runs everywhere."""
        where = {"nodeSelector": {"fleet": self.fleet.namespace}, "tolerations": [{"operator": "Exists"}]}
        spec = {**where, "terminationGracePeriodSeconds": 1}
        body = daemon_set("exporter", spec=spec)
        body["spec"]["template"]["metadata"]["annotations"] = {"nvidia.com/gpu.client": "true", "kubelet.sim/stop-after": "200ms"}
        body["metadata"]["labels"] = {PARK: "true"} if is_opted_in else {}
        self.fleet.cp.create(self.path.rpartition("/")[0], body)
        self.wait_everywhere()

    def pods(self) -> list[Object]:
        """Its pods."""
        found: list[Object] = self.fleet.cp.get(self.pods_path)["items"]
        return found

    def wait_everywhere(self, timeout: float = 30.0) -> None:
        """Waits until it runs on every node, and no pod of it is gated or on its way out."""

        def is_so() -> bool:
            pods = self.pods()
            fine = [pod for pod in pods if is_ready(pod) and not is_marked(pod) and not pod["spec"].get("schedulingGates")]
            return len(pods) == len(fine) and sorted(map(node_of, fine)) == self.fleet.names

        self.fleet.cp.wait_for(is_so, "the exporter on every node", timeout, 0.05)


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


def assert_off_while_in_work(nodes: Recorder, pods: Recorder, names: Sequence[str]) -> None:
    """On no node does a pod of it become ready between the cordon and the opening, and none runs once the driver goes."""
    events: list[Event] = sorted([*nodes.events, *pods.events], key=lambda event: int(event.object["metadata"]["resourceVersion"]))
    states = dict.fromkeys(names, "")
    runs: dict[str, str] = {}
    seen = set[str]()
    for event in events:
        if event.name in states:
            states[event.name] = event.object["metadata"]["labels"].get(STATE, "")
        elif event.kind == "DELETED" or not is_ready(event.object):
            runs.pop(event.uid, None)
        else:
            assert event.uid in runs or states[node_of(event.object)] not in IN_WORK, f"{event.name} comes to a node in work"
            runs[event.uid] = node_of(event.object)
        for name in names:
            if states[name] in ("pod-restart-required", "validation-required", "uncordon-required"):
                seen.add(name)
                assert name not in runs.values(), f"{name} has no driver, and the exporter runs there"
    assert seen == set(names)


@pytest.mark.parametrize("way", list(WAYS))
def test_parked_from_the_cordon_to_the_opening(exporter: Exporter, way: str) -> None:
    """Proposal C: it runs on every node before and after, on none in work; its neighbours keep theirs; nothing of it is changed."""
    fleet = exporter.fleet
    exporter.make()
    with shipped(fleet, way):
        fleet.start()
        fleet.wait_states(DONE)
        fleet.cp.wait_for(lambda: marked(fleet) == fleet.names, "the policies to be proven, and every node marked", 20)
        before, uids = fleet.surface(), {node_of(pod): pod["metadata"]["uid"] for pod in exporter.pods()}
        generation, mark = fleet.cp.get(exporter.path)["metadata"]["generation"], fleet.cp.audit_mark()
        with watched(fleet) as story, fleet.cp.record(exporter.pods_path, "") as pods:
            fleet.set_driver("2")
            story.nodes.wait_for(lambda event: fleet.is_in(event, "upgrade-required"), "the roll-out to begin")
            fleet.wait_states(DONE, 60)
            exporter.wait_everywhere(30)
            story.assert_budget(parallel=1, unavailable=1)
            story.assert_replaced_once()
            assert_off_while_in_work(story.nodes, pods, fleet.names)
        fleet.cp.wait_for(lambda: fleet.surface() == before, "the nodes to be as before")
    assert fleet.cp.get(exporter.path)["metadata"]["generation"] == generation
    assert not {pod["metadata"]["uid"] for pod in exporter.pods()} & set(uids.values()), "each node's was replaced"
    refused = {key for key in fleet.counts(mark) if key[2] >= 400 and key[:2] != ("create", "pods")}
    missing = {("get", "mutatingadmissionpolicies", 404), ("get", "leases", 404)}
    assert refused <= {("patch", "nodes", 409)} | missing, refused


def test_killed_between_unpark_and_ungate(exporter: Exporter, api_proxy: ApiProxy) -> None:
    """The gated pod that a dead controller left is let go by the next one, who knows nothing of it (decision 44)."""
    fleet = exporter.fleet
    exporter.make()
    with shipped(fleet, "gate"):
        replica = fleet.start(proxy=api_proxy)
        fleet.wait_states(DONE)
        ungate = api_proxy.on("create", f"/namespaces/{exporter.namespace}/pods/[^/]+/eviction", nth=2).hold_request()
        fleet.set_driver("2")
        ungate.wait_hit(40)
        replica.kill()
        api_proxy.cut()
        api_proxy.clear()
        gated = [pod for pod in exporter.pods() if pod["spec"].get("schedulingGates")]
        assert [PARKED in fleet.nodes()[node_of(pod)]["metadata"]["labels"] for pod in gated] == [False]
        fleet.start()
        fleet.wait_states(DONE, 60)
        exporter.wait_everywhere(20)
        fleet.wait_whole()
        assert fleet.digests() == {"2"}


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
    uids = {pod["metadata"]["uid"] for pod in exporter.pods()}
    fleet.start(settings={"TEMPLATE_PARKING": "true"})
    fleet.wait_states(DONE)
    fleet.cp.wait_for(lambda: fleet.cp.get(exporter.path)["status"]["observedGeneration"] == 2, "the new template")
    assert {pod["metadata"]["uid"] for pod in exporter.pods()} == uids
    before, mark = fleet.surface(), fleet.cp.audit_mark()
    with watched(fleet) as story, fleet.cp.record(exporter.pods_path, "") as pods:
        fleet.set_driver("2")
        story.nodes.wait_for(lambda event: fleet.is_in(event, "upgrade-required"), "the roll-out to begin")
        fleet.wait_states(DONE, 60)
        exporter.wait_everywhere(30)
        story.assert_budget(parallel=1, unavailable=1)
        story.assert_replaced_once()
        assert_off_while_in_work(story.nodes, pods, fleet.names)
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
