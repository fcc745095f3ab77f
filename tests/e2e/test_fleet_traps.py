"""States that a node could be caught in, on the real control plane: each has its exit, and says why it waits."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import pytest

from tests.e2e.conftest import FleetMaker
from tests.e2e.fleet import ACCEPT, DRIVER_SET, POLICY, SIM, STATE, GpuFleet
from tests.e2e.fleetwatch import watched
from tests.e2e.world import Object
from tests.kube import crds
from tests.kube.controlplane import ControlPlane
from tests.kube.proxy import ApiProxy

pytestmark = [pytest.mark.kube, pytest.mark.timeout(300)]
DONE, REQUIRED, FAILED = "upgrade-done", "upgrade-required", "upgrade-failed"
RESTART, DELETION, WAITING = "pod-restart-required", "pod-deletion-required", "wait-for-jobs-required"
VALIDATION = "validation-required"
SKIP = "nvidia.com/gpu-driver-upgrade.skip"
REQUESTED = "nvidia.com/gpu-driver-upgrade-requested"
INITIAL = "nvidia.com/gpu-driver-upgrade.node-initial-state.unschedulable"
ENABLED = "nvidia.com/gpu-driver-upgrade-enabled"
WAITING_FOR = "nvidia.com/gpu-driver-manager.waiting"
CONDITION = "DriverManagerPolicyAccepted"


@pytest.fixture
def two(fleet: FleetMaker) -> GpuFleet:
    """Two nodes of quick lives, one GPU pod on each."""
    made = fleet(2, start_after="200ms", stop_after="200ms")
    for number, name in enumerate(made.names):
        made.add_training(1, name=f"train-{number}", node=name)
    return made


@pytest.fixture
def cluster_policies(control_plane: ControlPlane) -> Iterator[None]:
    """The custom resource ClusterPolicy, as long as the test."""
    control_plane.create(crds.CRDS, crds.crd("ClusterPolicy"))
    control_plane.wait_for(lambda: control_plane.request("GET", crds.path("ClusterPolicy")).status == 200, "ClusterPolicy to be served")
    yield
    control_plane.delete(f"{crds.CRDS}/{crds.KINDS['ClusterPolicy'][1]}.{crds.GROUP}")
    control_plane.wait_for(lambda: control_plane.request("GET", crds.path("ClusterPolicy")).status == 404, "ClusterPolicy to be gone")


def led(fleet: GpuFleet, *, by_file: bool = True, **settings: str) -> dict[str, Object]:
    """Starts a replica, waits until all nodes are done, and gives how they are."""
    fleet.start(by_file=by_file, settings=settings)
    fleet.wait_states(DONE)
    return fleet.surface()


def condition(fleet: GpuFleet, path: str) -> Object:
    """Our condition on a custom resource; empty where there is none."""
    found = fleet.cp.get(path).get("status", {}).get("conditions", [])
    return next((dict(each) for each in found if each["type"] == CONDITION), {})


def hold_pods(fleet: GpuFleet, app: str) -> str:
    """A disruption budget that lets no pod of an app go; gives its path."""
    path = f"/apis/policy/v1/namespaces/{fleet.namespace}/poddisruptionbudgets"
    fleet.cp.create(path, {"metadata": {"name": "held"}, "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": app}}}})
    return f"{path}/held"


def is_cordoned(fleet: GpuFleet, name: str) -> bool:
    """Whether a node is closed."""
    return bool(fleet.nodes()[name]["spec"].get("unschedulable"))


def test_driver_never_ready(two: GpuFleet) -> None:
    """N51, N43: its time over, the node is failed with a reason and closed; another template takes it up again, the others go on."""
    bad, good = two.names
    before = led(two, DRIVER_TIMEOUT="3s")
    two.change(bad, annotations={f"{SIM}ready": "never"})
    two.set_driver("2")
    two.wait_states({bad: FAILED, good: DONE})
    record = two.rollout(bad)
    assert record["reason"] == "DriverTimedOut"
    assert record["failures"][-1]["sentence"].startswith(f"the driver pod {two.namespace}/{DRIVER_SET}-")
    assert is_cordoned(two, bad)
    wait_told(two, bad, ("DriverTimedOut",), kind="Warning")
    with watched(two) as story:
        two.set_driver("3")
        story.nodes.wait_for(lambda event: event.name == bad and two.is_in(event, RESTART), "another try", timeout=60)
    two.change(bad, annotations={f"{SIM}ready": None})
    two.wait_states(DONE)
    two.wait(lambda: two.surface() == before, "the nodes to be as before")
    assert two.rollout(bad)["failures"][-1]["reason"] == "DriverTimedOut", "the last failure stays readable"


def wait_told(fleet: GpuFleet, node: str, reasons: Collection[str], part: str = "", kind: str = "") -> None:
    """Waits for an Event about a node: it follows the write that it tells of."""

    def is_told() -> bool:
        return any(reason in reasons and part in text and kind in ("", each) for each, reason, text in fleet.events(node))

    fleet.wait(is_told, f"an Event {'/'.join(reasons)} {part}")


def test_driver_crashes_and_comes_back(two: GpuFleet) -> None:
    """N43, N51: a driver that becomes healthy after the node was given up ends it, over validation, with the reason kept."""
    bad, good = two.names
    before = led(two, DRIVER_TIMEOUT="2s")
    two.change(bad, annotations={f"{SIM}ready": "never"})
    two.set_driver("2")
    two.wait_states({bad: FAILED, good: DONE})
    two.change(bad, annotations={f"{SIM}ready": None})
    two.wait_states(DONE)
    two.wait(lambda: two.surface() == before, "the nodes to be as before")
    for part in (f"from {FAILED} to ", f" to {DONE}"):  # in one write, or in two where the validator is slow
        wait_told(two, bad, ("Recovered", "Opened"), part)


def test_fewer_devices_than_before(fleet: FleetMaker) -> None:
    """N35, N51: fewer devices than were recorded: the node stays closed, fails when its time is over, and a person may accept it."""
    one = fleet(1, gpus=2, start_after="200ms", stop_after="200ms")
    (name,) = one.names
    led(one, VALIDATION_TIMEOUT="2s")
    with watched(one) as story:
        one.set_driver("2")
        story.nodes.wait_for(lambda event: one.is_in(event, RESTART), "the driver to go", timeout=60)
        one.change(name, annotations={f"{SIM}devices": "1"})
        one.wait_states(FAILED)
    record = one.rollout(name)
    assert record["reason"] == "ValidationTimedOut"
    assert "2 nvidia.com/gpu, of which 1" in record["failures"][-1]["sentence"]
    assert is_cordoned(one, name)
    one.change(name, annotations={ACCEPT: "true"})
    one.wait_states(DONE)
    assert not is_cordoned(one, name)
    assert ACCEPT not in one.nodes()[name]["metadata"]["annotations"]


def test_devices_come_late(fleet: FleetMaker) -> None:
    """N35: the node is opened only when its devices are back, not when the driver is up."""
    one = fleet(1, start_after="200ms", stop_after="200ms", devices_after="2s")
    (name,) = one.names
    led(one)
    with watched(one) as story:
        one.set_driver("2")
        story.nodes.wait_for(lambda event: one.is_in(event, VALIDATION), "the validation", timeout=60)
        one.wait_states(DONE)
    for event in story.nodes.of(name):
        is_open = not event.object["spec"].get("unschedulable")
        assert not is_open or one.is_in(event, DONE) or one.is_in(event, REQUIRED)
        assert not (is_open and event.object["status"]["allocatable"]["nvidia.com/gpu"] == "0")


def test_switched_off_before_and_after(two: GpuFleet, cluster_policies: None) -> None:
    """N50: with the policy off a node whose driver still runs is put back at once, one whose driver is gone is finished."""
    first, second = two.names
    policy = two.add_custom(POLICY | {"maxParallelUpgrades": 2})
    before = led(two, by_file=False)
    hold_pods(two, "train-0")
    two.change(second, annotations={f"{SIM}ready": "never"})
    uids = two.drivers()
    two.set_driver("2")
    two.wait_states({first: DELETION, second: RESTART})
    two.wait(lambda: two.drivers().get(second, uids[second]) != uids[second], "the second driver to be replaced")
    two.cp.patch(policy, {"spec": {"driver": {"upgradePolicy": {"autoUpgrade": False}}}})
    two.wait_states({first: "", second: RESTART})
    assert not is_cordoned(two, first)
    assert is_cordoned(two, second)
    assert two.drivers()[first] == uids[first]
    two.change(second, annotations={f"{SIM}ready": None})
    two.wait_states("")
    two.wait_whole()
    for each in before.values():
        del each["labels"][STATE]
        each["annotations"].remove(ENABLED)
    two.wait(lambda: two.surface() == before, "the nodes to be as before, without a state and the mark of a policy")


def test_policy_that_is_not_valid(two: GpuFleet, cluster_policies: None) -> None:
    """N44, R6: such a policy starts nothing and writes to no node; the resource itself says what is wrong, and when it is right again."""
    path = two.add_custom(POLICY | {"maxUnavailable": "130%", "maxParalel": 3})
    mark = two.cp.audit_mark()
    two.start(by_file=False)
    ours = two.wait(lambda: condition(two, path), "a condition")
    assert (ours["status"], ours["reason"]) == ("False", "Invalid")
    assert "maxUnavailable" in ours["message"]
    assert "maxParalel" in ours["message"]
    two.set_driver("2")
    two.wait(lambda: "is not valid" in two.logs(), "the log to say so")
    assert [event for event in two.audit(mark) if event["verb"] == "patch" and event["objectRef"]["resource"] == "nodes"] == []
    two.cp.patch(path, {"spec": {"driver": {"upgradePolicy": {"maxUnavailable": "50%", "maxParalel": None}}}})
    two.wait_states(DONE)
    two.wait(lambda: condition(two, path)["status"] == "True", "the condition to say so")


@pytest.mark.parametrize("state", [DELETION, RESTART])
def test_node_deleted_and_made_again(two: GpuFleet, state: str) -> None:
    """N53: a node that goes in mid-flow frees its slot at once; made again under its name it begins clean."""
    first, second = two.names
    led(two)
    if state == DELETION:
        hold_pods(two, "train-0")
    else:
        two.change(first, annotations={f"{SIM}ready": "never"})
    two.set_driver("2")
    two.wait_states({first: state, second: REQUIRED})
    two.cp.delete(f"/api/v1/nodes/{first}")
    two.wait_states({second: DONE})
    two.cp.delete(f"/apis/policy/v1/namespaces/{two.namespace}/poddisruptionbudgets/held")
    two.add_node(first)
    two.wait_states(DONE)
    assert not is_cordoned(two, first)
    assert two.rollout(first).get("failures") is None
    assert two.rollout(first).get("node", two.nodes()[first]["metadata"]["uid"]) == two.nodes()[first]["metadata"]["uid"]


def test_orphaned_drivers(two: GpuFleet) -> None:
    """Driver pods whose DaemonSet went (Orphan) stay until an upgrade is asked for; then each is replaced by the new DaemonSet's, once."""
    asked, left = two.names
    led(two)
    uids = two.drivers()
    two.cp.delete(f"{two.sets}/{DRIVER_SET}", {"propagationPolicy": "Orphan"})
    two.wait(lambda: not two.cp.exists(f"{two.sets}/{DRIVER_SET}"), "the DaemonSet to be gone")
    assert two.drivers() == uids
    assert set(two.states().values()) == {DONE}
    made = two.driver_set("2")
    made["metadata"]["name"] = "nvidia-driver-new"
    made["spec"]["selector"] = {"matchLabels": {"set": "new"}}
    made["spec"]["template"]["metadata"]["labels"] |= {"set": "new"}
    term = {"labelSelector": {"matchLabels": {"app": DRIVER_SET}}, "topologyKey": "kubernetes.io/hostname"}
    made["spec"]["template"]["spec"]["affinity"] = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    two.cp.create(two.sets, made)
    two.change(asked, annotations={REQUESTED: "true"})
    two.wait(lambda: uids[asked][0] not in two.drivers().get(asked, ()), "the orphan to go")
    two.wait_states(DONE)
    two.wait(lambda: len(two.drivers().get(asked, ())) == 1, "the new driver")
    assert uids[left][0] in two.drivers()[left], "nobody asked for the other"
    assert REQUESTED not in two.nodes()[asked]["metadata"]["annotations"]


def test_jobs_are_waited_for(two: GpuFleet) -> None:
    """N13: a node with matching pods stays in wait-for-jobs, says for whom, and goes on when they are over; others are not waited for."""
    first, second = two.names
    two.policy |= {"maxParallelUpgrades": 2, "waitForCompletion": {"podSelector": "job-kind=gang", "timeoutSeconds": 60}}
    two.cp.create(
        f"{two.space}/pods",
        {
            "metadata": {"name": "gang-0", "labels": {"job-kind": "gang"}},
            "spec": {
                "nodeName": first,
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": 1,
                "containers": [{"name": "main", "image": "none"}],
            },
        },
    )
    led(two)
    mark = two.cp.audit_mark()
    two.set_driver("2")
    two.wait_states({first: WAITING, second: DONE})
    assert is_cordoned(two, first)
    assert two.rollout(first)["deadline"] - two.rollout(first)["since"] == 60
    assert not any(name.startswith(("train-0", "gang")) for name in two.evicted(mark))
    two.cp.patch(f"{two.space}/pods/gang-0", {"metadata": {"annotations": {f"{SIM}finish": "succeeded"}}})
    two.cp.delete(f"{two.space}/pods/gang-0")
    two.wait_states(DONE)
    assert not any(name.startswith("gang") for name in two.evicted(mark))


def test_jobs_that_take_too_long(two: GpuFleet) -> None:
    """N13: when the time for it is over the node goes on without them."""
    first, _ = two.names
    two.policy |= {"maxParallelUpgrades": 2, "waitForCompletion": {"podSelector": "app=train-0", "timeoutSeconds": 2}}
    led(two)
    two.set_driver("2")
    two.wait_states({first: WAITING})
    two.wait_states(DONE)
    wait_told(two, first, ("JobsTimedOut",))


def test_budget_that_never_allows_it(two: GpuFleet) -> None:
    """N21: pods that a disruption budget keeps: the node is opened when its time is over, comes back later, and the others go on."""
    first, second = two.names
    two.policy |= {"podDeletion": {"timeoutSeconds": 3}}
    before = led(two, RETRY_PAUSE="5s")
    budget = hold_pods(two, "train-0")
    uids = two.drivers()
    two.set_driver("2")
    with watched(two) as story:
        two.wait_states({first: DELETION})
        two.wait_states({first: REQUIRED})
        assert not is_cordoned(two, first)
        record = two.rollout(first)
        assert "held" in record["failures"][-1]["sentence"]
        assert not record["failures"][-1].get("driverGone")
        two.wait_states({second: DONE})
        assert two.drivers()[first] == uids[first], "its driver was never touched"
        two.cp.delete(budget)
        two.wait_states(DONE)
        story.assert_budget(parallel=1, unavailable=1)
    two.wait_whole()
    two.wait(lambda: two.surface() == before, "the nodes to be as before")


def test_cordoned_by_an_admin(two: GpuFleet) -> None:
    """N52: a node that was cordoned before ends cordoned, uses nothing of maxUnavailable, and NVIDIA's mark of it goes."""
    first, second = two.names
    two.policy |= {"maxUnavailable": 1}
    led(two)
    two.change(first, cordon=True)
    two.set_driver("2")
    with watched(two) as story:
        two.wait(lambda: len(story.driver_uids().get(first, ())) == 2, "the new driver")
        two.wait_states({first: DONE})
    assert is_cordoned(two, first)
    assert INITIAL not in two.nodes()[first]["metadata"]["annotations"]
    assert two.states()[second] == REQUIRED, "the cordoned one fills maxUnavailable, so no other is begun"
    two.wait(lambda: first in two.lease()["metadata"]["annotations"].get(WAITING_FOR, ""), "the Lease to say why")
    two.change(first, cordon=False)
    two.wait_states(DONE)
    assert not is_cordoned(two, first)
    assert not is_cordoned(two, second)


def test_skipped(two: GpuFleet) -> None:
    """N44: a node with the skip label stays in upgrade-required, untouched, as long as it has it."""
    first, second = two.names
    led(two)
    two.change(first, labels={SKIP: "true"})
    uids = two.drivers()
    two.set_driver("2")
    two.wait_states({first: REQUIRED, second: DONE})
    assert two.drivers()[first] == uids[first]
    assert not is_cordoned(two, first)
    two.change(first, labels={SKIP: None})
    two.wait_states(DONE)
    two.wait_whole()
    assert two.drivers()[first] != uids[first]


def test_label_gap(two: GpuFleet) -> None:
    """N18: the discovery's labels vanish and come back: the new driver pod of the same template moves no state and evicts nobody."""
    first, _ = two.names
    led(two)
    uids, mark = two.drivers(), two.cp.audit_mark()
    two.change(first, labels={"nvidia.com/gpu.present": None, "nvidia.com/gpu.deploy.driver": None})
    two.wait(lambda: first not in two.drivers(), "the driver pod to go")
    two.change(first, labels={"nvidia.com/gpu.present": "true", "nvidia.com/gpu.deploy.driver": "true"})
    two.wait(lambda: first in two.drivers(), "another driver pod")
    two.wait_whole()
    two.wait_states(DONE)
    assert two.drivers()[first] != uids[first]
    assert two.evicted(mark) == []
    assert two.deleted(mark) == []


def test_same_digest_restarts_only(two: GpuFleet) -> None:
    """Equal digests: driver pods are restarted under their users, one node at a time, and nobody is evicted."""
    before = led(two)
    mark, training = two.cp.audit_mark(), two.training()
    with watched(two) as story:
        two.set_driver("1", image="driver:with-another-name")
        two.wait(lambda: [len(uids) for uids in story.driver_uids().values()] == [2, 2], "both drivers to be replaced")
        two.wait_states(DONE)
        two.wait_whole()
        two.wait(lambda: two.surface() == before, "the nodes to be as before")
        story.assert_budget(parallel=1, unavailable=1)
    assert two.evicted(mark) == []
    assert two.training() == training


def test_api_that_comes_and_goes(two: GpuFleet, api_proxy: ApiProxy) -> None:
    """N50, R9: watches that break and an API that is away for a moment cost a moment, and no step is done twice."""
    two.start(proxy=api_proxy)
    two.wait_states(DONE)
    mark, training = two.cp.audit_mark(), two.training()
    with watched(two) as story:
        two.set_driver("2")
        story.nodes.wait_for(lambda event: event.name == two.names[0] and two.is_in(event, RESTART), "the driver to go", timeout=60)
        with api_proxy.outage():
            two.wait(lambda: two.drivers().get(two.names[0]), "a driver pod")
        api_proxy.cut()
        two.wait(lambda: [len(uids) for uids in story.driver_uids().values()] == [2, 2], "both drivers to be replaced")
        two.wait_states(DONE)
        story.assert_budget(parallel=1, unavailable=1)
        story.assert_replaced_once()
    assert sorted(two.evicted(mark)) == sorted(training)
