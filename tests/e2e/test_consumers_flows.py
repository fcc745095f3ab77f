"""Proposals B and C: clients that mark themselves, runtime classes, and exporters that somebody installed by hand."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.gpu_users import TOLERATES_ALL, GpuUsers, asks, host_paths, verdicts_by_app
from tests.e2e.world import RECORD, STATUS, UPGRADE_ENABLED, Object, StockNode
from tests.kube.recorder import Recorder

pytestmark = pytest.mark.kube
CLIENT = "nvidia.com/gpu.client"
DEPLOY_CLIENT = "nvidia.com/gpu.deploy.client"
GPU_TAINT: Object = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
OWN_TAINT: Object = {**GPU_TAINT, "key": "nvidia.com/gpu-driver-update"}
EXPORTER: Object = {"volumes": host_paths("/dev/nvidia0", "/dev/nvidiactl")}
RUNTIME: Object = {"runtimeClassName": "nvidia"}


def plan_of(node: StockNode, **settings: Any) -> dict[str, Object]:
    """App -> what the plan has in mind for its pod."""
    return verdicts_by_app(node, node.run("plan", "--output", "json", **settings).document())


def wait_kept_off(node: StockNode, daemon_set: str) -> None:
    """Waits until the DaemonSet's controller has looked at the node as it is now and found that no pod of it belongs there."""
    path = f"/apis/apps/v1/namespaces/{node.namespace}/daemonsets/{daemon_set}"
    node.cp.wait_for(lambda: node.cp.get(path)["status"]["desiredNumberScheduled"] == 0, f"{daemon_set} to be kept off")


def record_node(node: StockNode) -> Recorder:
    """A record of what happens to the node."""
    return node.cp.record("/api/v1/nodes", f"fieldSelector=metadata.name%3D{node.name}")


def assert_none_meanwhile(pods: Recorder, nodes: Recorder, app: str) -> None:
    """No pod of an app came between the end of the first one and the patch that puts the node back."""
    mine = [event for event in pods.until_now() if event.object["metadata"]["labels"].get("app") == app]
    gone = next(event.version for event in mine if event.kind == "DELETED")
    changes = nodes.until_now()
    paused = [RECORD in event.object["metadata"].get("annotations", {}) for event in changes]
    restored = next(event.version for number, event in enumerate(changes) if number > paused.index(True) and not paused[number])
    first = mine[0].uid
    bound = [event.version for event in mine if event.uid != first and event.object["spec"].get("nodeName")]
    assert bound, "nobody came back"
    assert gone < restored < min(bound)


@pytest.fixture
def with_driver(node: StockNode) -> None:
    """The driver's pod on the node, with another digest than what is loaded."""
    node.add_driver(digest="new")


# Proposal B -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("with_driver")
def test_clients_that_mark_themselves(node: StockNode, users: GpuUsers) -> None:
    """Proposal B: marked pods are evicted under a taint, none comes while the driver is away, and they are back when it goes."""
    users.deployment("by-annotation", annotations={CLIENT: "true"})
    users.daemon_set("by-label", labels={CLIENT: "true"})
    users.deployment("says-no", annotations={CLIENT: "false"}, labels={CLIENT: "no"})
    users.wait()
    before, mark, kept = node.surface(), node.cp.audit_mark(), node.uids("says-no")
    marked = sorted([*node.uids("by-annotation"), *node.uids("by-label")])
    with (
        node.cp.record(f"{node.space}/pods") as pods,
        node.cp.record("/api/v1/nodes", f"fieldSelector=metadata.name%3D{node.name}") as nodes,
    ):
        node.tree.faults({"call": "umount2", "hold": True})
        run = node.start("uninstall_driver")
        node.wait_held("umount2")
        (taint,) = node.surface()["taints"]
        assert (taint["key"], taint["value"][:3], taint["effect"]) == ("nvidia.com/gpu", "dm-", "NoSchedule")
        wait_kept_off(node, "by-label")
        node.tree.faults()
        run.wait().require(0)
        node.wait_surface(before)
        users.wait()
        assert_none_meanwhile(pods, nodes, "by-annotation")
        assert_none_meanwhile(pods, nodes, "by-label")
    assert node.evicted(mark) == marked
    assert node.uids("says-no") == kept


@pytest.mark.usefixtures("with_driver")
def test_client_that_its_budget_keeps(node: StockNode, users: GpuUsers) -> None:
    """Proposal B, R6: a client that may not go stops the run at its limit, named with its budget, and no taint is left behind."""
    users.deployment("client", annotations={CLIENT: "true"})
    users.wait()
    node.add_budget("client", 1)
    before, kept = node.surface(), node.uids("client")
    ended = node.run(DRAIN_TIMEOUT_SECONDS="3s").require(75)
    node.wait_surface(before)
    assert ended.said("client-budget", *kept)
    assert node.uids("client") == kept
    assert node.tree.calls() == []


@pytest.mark.usefixtures("with_driver")
def test_client_on_a_policy_owned_node(node: StockNode, users: GpuUsers) -> None:
    """Decision 1: where an upgrade controller evicts GPU pods, the kinds that it does not know are freed, refused or left."""
    users.deployment("client", annotations={CLIENT: "true"})
    users.wait()
    node.annotate(**{UPGRADE_ENABLED: "true"})
    before, mark, pods = node.surface(), node.cp.audit_mark(), node.uids("client")
    assert node.run(POLICY_OWNED_CONSUMERS="refuse").require(65).said("POLICY_OWNED_CONSUMERS=free", *pods)
    assert node.run(POLICY_OWNED_CONSUMERS="wait", POLICY_OWNER_TIMEOUT="1s").require(75).said(*pods)
    assert node.evicted(mark) == []
    node.change({"metadata": {"annotations": {"nvidia.com/gpu-driver-upgrade-requested": None}}})
    node.run().require(0)
    node.wait_surface(before)
    assert node.evicted(mark) == sorted(pods)


# Proposal C -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("with_driver")
def test_runtime_classes(node: StockNode, users: GpuUsers) -> None:
    """Proposal C case 1, N01: pods under a runtime class go: by its name with the stock role, by its handler where that can be listed."""
    for name, handler in (("nvidia", "nvidia"), ("gold", "nvidia-cdi"), ("nvidia-legacy", "runc")):
        users.runtime_class(name, handler)
        users.deployment(name, runtimeClassName=name)
    users.wait()
    before, mark = node.surface(), node.cp.audit_mark()
    by_name = plan_of(node)
    assert {app: by_name[app]["action"] for app in ("nvidia", "gold", "nvidia-legacy")} == {
        "nvidia": "evict", "gold": "keep", "nvidia-legacy": "evict",
    }  # fmt: skip
    assert plan_of(node, GPU_RUNTIME_HANDLERS="gold")["gold"]["reason"] == "runtime-class"
    assert not any(event["objectRef"]["resource"] == "runtimeclasses" for event in node.audit(mark))
    users.permit("node.k8s.io", "runtimeclasses", "list")
    by_handler = plan_of(node)
    assert {app: by_handler[app]["action"] for app in ("nvidia", "gold", "nvidia-legacy")} == {
        "nvidia": "evict", "gold": "evict", "nvidia-legacy": "keep",
    }  # fmt: skip
    assert by_handler["gold"]["reason"] == "runtime-class"
    pods, kept = [*node.uids("nvidia"), *node.uids("gold")], node.uids("nvidia-legacy")
    node.run().require(0)
    node.wait_surface(before)
    assert node.evicted(mark) == sorted(pods)
    assert node.uids("nvidia-legacy") == kept


@pytest.mark.parametrize("driver_tolerates", [[GPU_TAINT], [GPU_TAINT, OWN_TAINT]], ids=["stock-driver", "driver-tolerates-our-key"])
def test_exporter_of_somebody(node: StockNode, users: GpuUsers, driver_tolerates: list[Object]) -> None:
    """Proposal C case 2, N02 variants 1 and 2: an exporter with host devices alone is kept off by taint or label until the node is back."""
    node.add_driver(digest="new", tolerations=driver_tolerates)
    users.label_node(**{DEPLOY_CLIENT: "true"})
    users.daemon_set("exporter", **EXPORTER, tolerations=driver_tolerates[1:] and [GPU_TAINT])
    users.daemon_set("labelled", **EXPORTER, nodeSelector={DEPLOY_CLIENT: "true"}, tolerations=TOLERATES_ALL)
    users.daemon_set("cpu-agent", tolerations=TOLERATES_ALL)
    users.wait()
    before, mark, kept, exporter = node.surface(), node.cp.audit_mark(), node.uids("cpu-agent"), node.uids("exporter")
    plan = plan_of(node)
    assert [plan[app]["action"] for app in ("exporter", "labelled", "cpu-agent")] == ["evict", "await", "keep"]
    with (
        node.cp.record(f"{node.space}/pods") as pods,
        node.cp.record("/api/v1/nodes", f"fieldSelector=metadata.name%3D{node.name}") as nodes,
    ):
        node.tree.faults({"call": "umount2", "hold": True})
        run = node.start("uninstall_driver")
        node.wait_held("umount2")
        wait_kept_off(node, "exporter")
        wait_kept_off(node, "labelled")
        node.tree.faults()
        run.wait().require(0)
        node.wait_surface(before)
        users.wait()
        assert_none_meanwhile(pods, nodes, "exporter")
        assert_none_meanwhile(pods, nodes, "labelled")
    assert node.evicted(mark) == sorted(exporter)
    assert node.uids("cpu-agent") == kept


@pytest.mark.parametrize("tolerations", [TOLERATES_ALL, [GPU_TAINT]], ids=["everything", "the-only-key-there-is"])
@pytest.mark.parametrize("use", [EXPORTER, RUNTIME], ids=["device", "runtime-class"])
def test_exporter_that_nothing_keeps_off(node: StockNode, users: GpuUsers, tolerations: list[Object], use: Object) -> None:
    """Proposal C case 2, N02 variant 3, decision 46: refused before any write, its owner named with what would help; all others stay."""
    node.add_driver(digest="new")
    users.runtime_class("nvidia", "nvidia")
    users.daemon_set("exporter", **use, tolerations=tolerations)
    users.deployment("train", containers=[asks()])
    users.wait()
    before, mark = node.surface(), node.cp.audit_mark()
    kept = node.uids("exporter") | node.uids("train")
    ended = node.run().require(65)
    assert ended.said(f"DaemonSet {node.namespace}/exporter", "tolerat", DEPLOY_CLIENT)
    assert node.eviction_tries(mark) == node.eviction_tries(mark, dry=True) == []
    assert node.writes(mark) in ([], ["patch nodes"])
    assert node.surface() == before
    assert node.annotation(STATUS)["reason"] == "refused"
    assert node.uids("exporter") | node.uids("train") == kept
    assert node.tree.calls() == []
