"""A DaemonSet that tolerates everything is parked through a roll-out, by the shipped admission policies on the real control plane."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import pytest

from tests.e2e.conftest import ExporterMaker
from tests.e2e.exporters import PARKED, WAYS, Exporter, marked, shipped
from tests.e2e.fleet import DRIVER_SET, shipped_account
from tests.e2e.fleetwatch import watched
from tests.e2e.parkwatch import OtherUsers, assert_parked_through
from tests.kube.manifests import TEMPLATES
from tests.kube.space import is_ready, node_of

pytestmark = pytest.mark.kube
DONE = "upgrade-done"


@pytest.fixture
def exporter(exporter_on: ExporterMaker) -> Exporter:
    """One on a fleet of three nodes with two GPU pods each, done and at rest; made by the test."""
    return exporter_on(3)


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
