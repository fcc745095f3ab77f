"""What parking promises, held against every event of a roll-out; and Deployments that use the driver without a GPU of their own."""

from __future__ import annotations

from tests.e2e.fleet import STATE, GpuFleet
from tests.e2e.fleetwatch import Story
from tests.kube.recorder import Event, Object, Recorder
from tests.kube.space import is_ready, node_of

PARKED = "nvidia.com/gpu-driver-manager.parked"
ENFORCED = "nvidia.com/gpu-driver-manager.parking"
SIGN = {"uses": "driver"}
RUNTIME_CLASSES = "/apis/node.k8s.io/v1/runtimeclasses"
DRIVERLESS = ("pod-restart-required", "validation-required", "uncordon-required")


def surface(fleet: GpuFleet) -> dict[str, Object]:
    """What of the nodes must be as before, without what is said on them of the policies: that comes and goes with those."""
    return {name: {**each, "annotations": each["annotations"] - {ENFORCED}} for name, each in fleet.surface().items()}


def is_parked(node: Object, owner: str) -> bool:
    """Whether the admission policies keep a DaemonSet, `namespace/name`, off a node."""
    meta = node["metadata"]
    return PARKED in meta["labels"] and owner in meta.get("annotations", {}).get(PARKED, "").split(",")


def assert_parked_through(story: Story, pods: Recorder, owner: str, users: Recorder, *, is_led_by_others: bool = False) -> int:
    """Holds every event to what parking promises; gives how many events there were.

    The exporter runs on each node from the beginning to that node's cordon, and again at the end. Each node is parked for it exactly as
    long as it is cordoned: in that time no pod of the exporter becomes ready on it, and none is there once the driver goes, nor any other
    user. No node that is open loses its exporter. Where others cordon, a node is parked a moment after its cordon and un-parked after it.

    Args:
        story: of a roll-out that is over.
        pods: of the exporter.
        owner: `namespace/name` of the exporter.
        users: pods of other users of the driver.
        is_led_by_others: whether gpu-operator cordons and opens nodes, all or some.
    """
    names = story.fleet.names
    of_users = users.until_now()
    events = sorted([*story.nodes.until_now(), *pods.until_now(), *of_users], key=lambda event: event.version)
    closed, seen, runs, uses = set[str](), set[str](), dict[str, str](), dict[str, str]()
    others = {event.uid for event in of_users}
    for event in events:
        if event.uid in others:
            uses.pop(event.uid, None)
            if event.kind != "DELETED":
                uses[event.uid] = event.object["spec"].get("nodeName", "")
            continue
        if event.name not in names:
            _take_pod(event, closed, runs)
            continue
        is_closed = event.object["spec"].get("unschedulable", False)
        is_off = is_parked(event.object, owner)
        assert is_closed == is_off or is_led_by_others, f"{event.name} is parked exactly while it is cordoned"
        if is_closed and event.name not in closed:
            assert event.name in runs.values(), f"{event.name} is cordoned, and the exporter was not there before"
        (closed.add if is_closed else closed.discard)(event.name)
        if is_closed and event.object["metadata"]["labels"].get(STATE) in DRIVERLESS:
            seen.add(event.name)
            assert is_off, f"{event.name} has no driver, and is not parked"
            assert event.name not in {*runs.values(), *uses.values()}, f"{event.name} has no driver, and somebody uses it there"
    assert seen == set(names), "every node has been without its driver"
    assert sorted(runs.values()) == names, "it runs on every node again"
    return len(events)


def _take_pod(event: Event, closed: set[str], runs: dict[str, str]) -> None:
    """Goes on by one event of an exporter's pod; `runs` is uid -> node of those that are ready."""
    if event.kind == "DELETED" or not is_ready(event.object):
        if (node := runs.pop(event.uid, "")) and node not in closed:
            raise AssertionError(f"{event.name} goes from {node}, which is open")
        return
    node = node_of(event.object)
    assert event.uid in runs or node not in closed, f"{event.name} comes to {node}, which is cordoned"
    assert event.uid in runs or node not in runs.values(), f"{event.name} is the second one on {node}"
    runs[event.uid] = node


class OtherUsers:
    """Deployments that use the driver and ask for no GPU: one by its runtime class, one that only the policy's selector tells of."""

    def __init__(self, fleet: GpuFleet, replicas: int) -> None:
        self.fleet, self.replicas = fleet, replicas
        self.apps = ("by-class", "by-selector")
        runtime_class = f"nvidia-{fleet.namespace}"
        fleet.cp.create(RUNTIME_CLASSES, {"metadata": {"name": runtime_class}, "handler": "nvidia"})
        fleet.cluster_wide.append(f"{RUNTIME_CLASSES}/{runtime_class}")
        fleet.policy |= {"podDeletion": {"podSelector": "renders=yes"}}
        fleet.add_deployment("by-class", replicas, labels=SIGN, spec={"runtimeClassName": runtime_class})
        fleet.add_deployment("by-selector", replicas, labels={**SIGN, "renders": "yes"})

    def record(self) -> Recorder:
        """What becomes of their pods."""
        return self.fleet.cp.record(f"{self.fleet.space}/pods", "labelSelector=uses%3Ddriver")

    def uids(self) -> set[str]:
        """Of their pods."""
        return {pod["metadata"]["uid"] for app in self.apps for pod in self.fleet.pods(app)}

    def wait(self) -> None:
        """Waits until all are there."""
        for app in self.apps:
            self.fleet.wait_pods(app, self.replicas)
