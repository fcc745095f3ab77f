"""Who is begun and who is not, on the real control plane: gangs, order, failures in a row, a pause, and what people write on nodes."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import FleetMaker
from tests.e2e.fleet import GpuFleet
from tests.e2e.fleetwatch import Moment, watched

pytestmark = [pytest.mark.kube, pytest.mark.timeout(300)]
DONE, REQUIRED, FAILED = "upgrade-done", "upgrade-required", "upgrade-failed"
STATE = "nvidia.com/gpu-driver-upgrade-state"
PAUSED = "nvidia.com/gpu-driver-manager.paused"
WAITING_FOR = "nvidia.com/gpu-driver-manager.waiting"
QUICK = {"start_after": "200ms", "stop_after": "200ms"}


def waiting_for(fleet: GpuFleet) -> str:
    """Why no more nodes are begun, as the Lease says."""
    return str(fleet.lease()["metadata"].get("annotations", {}).get(WAITING_FOR, ""))


def test_gangs_and_order(fleet: FleetMaker) -> None:
    """N13: no two nodes of one gang are in work at once, the others are not held up by that, and a label tells who comes first."""
    four = fleet(4, **QUICK)
    first, second, third, fourth = four.names
    four.policy |= {"maxParallelUpgrades": 3}
    for name, labels in ((first, {"gang": "a"}), (second, {"gang": "a"}), (fourth, {"order": "1"})):
        four.change(name, labels=labels)
    four.start(settings={"GANG_LABEL": "gang", "ORDER_KEY": "order"})
    four.wait_states(DONE)
    with watched(four) as story:
        four.set_driver("2")
        story.nodes.wait_for(lambda event: four.is_in(event, REQUIRED), "the roll-out to begin", timeout=60)
        four.wait(lambda: all(len(uids) == 2 for uids in story.driver_uids().values()), "all drivers to be replaced")
        four.wait_states(DONE)
        story.assert_budget(parallel=3, unavailable=3)
        now = Moment()
        for event in story.events():
            now.take(event)
            assert not {first, second} <= now.in_work
    begun = [event.name for event in story.nodes.until_now() if event.object["spec"].get("unschedulable")]
    assert begun.index(second) > begun.index(fourth)
    assert third in begun


def test_failures_in_a_row(fleet: FleetMaker) -> None:
    """N21: nodes whose pods may not go fail and are opened; after two in a row no other is begun until there is another driver."""
    four = fleet(4, **QUICK)
    four.policy |= {"podDeletion": {"timeoutSeconds": 4}, "maxUnavailable": 2}
    four.add_training(4)
    budget = {"metadata": {"name": "held"}, "spec": {"minAvailable": 4, "selector": {"matchLabels": {"app": "train"}}}}
    path = f"/apis/policy/v1/namespaces/{four.namespace}/poddisruptionbudgets"
    four.cp.create(path, budget)
    four.start(settings={"ATTEMPTS": "1", "MOST_FAILURES": "2"})
    four.wait_states(DONE)
    before, uids = four.surface(), four.drivers()
    with watched(four) as story:
        four.set_driver("2")
        four.wait(lambda: sorted(four.states().values()) == [FAILED, FAILED, REQUIRED, REQUIRED], "two to fail")
        four.wait(lambda: "in a row" in waiting_for(four), "the Lease to say why")
        assert not any(node["spec"].get("unschedulable") for node in four.nodes().values()), "their drivers run, so they are open"
        assert four.drivers() == uids
        four.cp.delete(f"{path}/held")
        four.set_driver("3")
        four.wait(lambda: four.digests() == {"3"}, "the newest driver everywhere")
        four.wait_states(DONE)
        four.wait_whole()
        story.assert_budget(parallel=1, unavailable=1)
        story.assert_replaced_once()
    four.wait(lambda: four.surface() == before, "the nodes to be as before")


def test_paused(fleet: FleetMaker) -> None:
    """N44: with the pause annotation on the Lease no node is begun, those in work are ended, and the Lease says so."""
    two = fleet(2, **QUICK)
    two.start(settings={"RETRY_PERIOD": "500ms"})
    two.wait_states(DONE)
    uids = two.drivers()
    lease = f"/apis/coordination.k8s.io/v1/namespaces/{two.namespace}/leases/driver-manager-controller"
    two.cp.patch(lease, {"metadata": {"annotations": {PAUSED: "true"}}})
    two.wait(lambda: two.lease()["spec"]["renewTime"] and PAUSED in two.lease()["metadata"]["annotations"], "the annotation")
    renewed = two.lease()["spec"]["renewTime"]
    two.wait(lambda: two.lease()["spec"]["renewTime"] != renewed, "the leader to have seen it")
    two.set_driver("2")
    two.wait_states(REQUIRED)
    two.wait(lambda: "paused" in waiting_for(two), "the Lease to say so")
    assert two.drivers() == uids
    two.cp.patch(lease, {"metadata": {"annotations": {PAUSED: None}}})
    two.wait(lambda: two.digests() == {"2"}, "the new driver")
    two.wait_states(DONE)


def test_state_written_by_a_person(fleet: FleetMaker) -> None:
    """N43: set back to upgrade-required with a healthy driver a node is done at once, never cordoned; what is no state is left alone."""
    two = fleet(2, **QUICK)
    first, second = two.names
    two.start()
    two.wait_states(DONE)
    uids = two.drivers()
    with watched(two) as story:
        two.change(first, labels={STATE: REQUIRED})
        story.nodes.wait_for(lambda event: event.name == first and two.is_in(event, REQUIRED), "the label", timeout=60)
        two.wait_states({first: DONE})
    assert story.states_of(first)[-2:] == [REQUIRED, DONE]
    two.change(second, labels={STATE: "upgrade-mostly-done"})
    two.wait(lambda: any(reason == "UnknownState" for _, reason, _ in two.events(second)), "an Event about it")
    assert two.states()[second] == "upgrade-mostly-done"
    two.change(second, labels={STATE: None})
    two.wait_states(DONE)
    assert two.drivers() == uids


def test_driver_that_crashes(fleet: FleetMaker) -> None:
    """N51: a container that restarts more often than allowed fails its node long before the time is over, with the count."""
    one = fleet(1, **QUICK)
    (name,) = one.names
    one.start(settings={"FAILING_RESTARTS": "3"})
    one.wait_states(DONE)
    one.change(name, annotations={"kubelet.sim/ready": "never", "kubelet.sim/restarts": "5", "kubelet.sim/restart-every": "100ms"})
    one.set_driver("2")
    one.wait_states(FAILED)
    failure = one.rollout(name)["failures"][-1]
    assert failure["reason"] == "DriverFailing"
    assert "CrashLoopBackOff" in failure["sentence"]
    assert "restarted 4 times" in failure["sentence"]
