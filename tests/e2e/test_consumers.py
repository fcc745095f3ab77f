"""Who uses the driver, and who comes while it is away."""

from __future__ import annotations

import shutil

import pytest

from tests.e2e.moments import after_unload
from tests.e2e.world import STATUS, Object, StockNode
from tests.kube import stock
from tests.kube.proxy import ApiProxy

pytestmark = pytest.mark.kube
MIRROR: Object = {"kubernetes.io/config.mirror": "abc", "kubernetes.io/config.hash": "abc", "kubernetes.io/config.source": "file"}


def assert_refused_untouched(node: StockNode, before: Object, mark: int) -> None:
    """Nothing was evicted, and nothing written but the status, which says why."""
    assert node.evicted(mark) == []
    assert node.surface() == before
    assert node.writes(mark) in ([], ["patch nodes"])
    assert node.tree.calls() == []
    assert node.annotation(STATUS)["reason"] == "refused"


def add_mirror(node: StockNode, name: str, gpus: int) -> None:
    """A static pod's mirror, as a kubelet makes it; the apiserver takes such pods from the node's own account alone."""
    meta = node.node()["metadata"]
    owner = {"apiVersion": "v1", "kind": "Node", "name": node.name, "uid": meta["uid"], "controller": True}
    container: Object = {"name": "main", "image": "none"} | ({"resources": {"limits": {"nvidia.com/gpu": str(gpus)}}} if gpus else {})
    body = {
        "metadata": {"name": name, "labels": {"app": name}, "annotations": MIRROR, "ownerReferences": [owner]},
        "spec": {"nodeName": node.name, "containers": [container], "tolerations": [{"operator": "Exists", "effect": "NoExecute"}]},
    }
    node.cp.create(f"{node.space}/pods", body)
    node.cp.wait_for(lambda: node.ready_pods([name]), f"the mirror pod {name}")


@pytest.mark.deep
def test_static_pod_with_a_gpu(busy_node: StockNode) -> None:
    """N11, R5: a GPU-using mirror pod is refused with 65 before any write, and its manifest is named."""
    add_mirror(busy_node, "static", 1)
    before, mark = busy_node.surface(), busy_node.cp.audit_mark()
    ended = busy_node.run().require(65)
    assert ended.said("static", "cannot be removed through the API", "remove the manifest")
    assert_refused_untouched(busy_node, before, mark)


@pytest.mark.deep
def test_static_pod_without_a_gpu(busy_node: StockNode) -> None:
    """N11: a mirror pod that uses no GPU is left, without a word of error."""
    add_mirror(busy_node, "static", 0)
    before, uid = busy_node.surface(), busy_node.uids("static")
    busy_node.run().require(0)
    busy_node.wait_surface(before)
    assert busy_node.uids("static") == uid


def test_all_refusals_at_once(busy_node: StockNode) -> None:
    """N06, R5: every pod that may not be moved is named with the option that would allow it, before any eviction."""
    busy_node.add_pod("bare", gpus=1)
    made = stock.training(1, name="scratch", node_selector={"space": busy_node.namespace})
    made["spec"]["template"]["spec"]["volumes"] = [{"name": "data", "emptyDir": {}}]
    busy_node.cp.create(f"/apis/apps/v1/namespaces/{busy_node.namespace}/deployments", made)
    busy_node.cp.wait_for(lambda: busy_node.ready_pods(["scratch"]), "the pod with an emptyDir")
    before, mark = busy_node.surface(), busy_node.cp.audit_mark()
    ended = busy_node.run().require(65)
    assert ended.said(f"{busy_node.namespace}/bare", "DRAIN_USE_FORCE", "scratch-", "DRAIN_DELETE_EMPTYDIR_DATA")
    assert_refused_untouched(busy_node, before, mark)
    allowed = busy_node.run(DRAIN_USE_FORCE="true", DRAIN_DELETE_EMPTYDIR_DATA="true")
    allowed.require(0)
    busy_node.wait_surface(before)


def test_pods_that_are_never_evicted(busy_node: StockNode) -> None:
    """N11: the driver's own pod and a pod with the skip label stay."""
    skip = {"metadata": {"labels": {"nvidia.com/gpu-driver-upgrade-drain.skip": "true"}}}
    busy_node.add_pod("monitor", gpus=1)
    busy_node.cp.patch(f"{busy_node.space}/pods/monitor", skip)
    mine, kept = busy_node.driver_pods()[0]["metadata"]["uid"], busy_node.uids("monitor")
    busy_node.run().require(0)
    assert busy_node.uids("monitor") == kept
    assert busy_node.driver_pods()[0]["metadata"]["uid"] == mine


@pytest.mark.deep
def test_idle_pod_with_a_gpu(node: StockNode) -> None:
    """N03: a pod that was given a GPU goes before the first unload, though no process holds one and no module is in use."""
    node.add_driver(digest="new")
    node.add_training(1, name="notebook", grace_seconds=1)
    (name,) = node.uids("notebook")
    mark = node.cp.audit_mark()
    node.run().require(0)
    first = next(call["time"] for call in node.tree.calls() if call["call"] == "delete_module")
    assert node.last_deleted(mark, {name}) <= first
    assert node.evicted(mark) == [name]


@pytest.mark.deep
def test_second_client_uncordons(busy_node: StockNode) -> None:
    """N22, R1: a cordon taken off after the evictions is put on once more, newcomers go in another round, and then the driver goes."""
    busy_node.tree.process(4242, fds=["/dev/nvidia0"])
    before, mark, pods = busy_node.surface(), busy_node.cp.audit_mark(), busy_node.uids("train")
    run = busy_node.start("uninstall_driver")
    run.wait_for_line(lambda line: line.get("reason") == "held-by-process", "the wait for a process")
    busy_node.change({"spec": {"unschedulable": None, "taints": None}})
    busy_node.cp.wait_for(lambda: busy_node.ready_pods(["train"]), "newcomers on the node")
    newcomers = {pod["metadata"]["name"] for pod in busy_node.pods("app=train")}
    end_process(busy_node, 4242)
    ended = run.wait().require(0)
    busy_node.wait_surface(before)
    evicted = busy_node.evicted(mark)
    assert len(evicted) == len(set(evicted))
    assert set(pods) | newcomers == set(evicted)
    assert ended.said("somebody took off what this run put on the node", "the cordon", "somebody uses the driver again")
    assert_nobody_was_there(busy_node)


def end_process(node: StockNode, pid: int) -> None:
    """A process of the host ends."""
    shutil.rmtree(node.tree.root / f"proc/{pid}")


def assert_nobody_was_there(node: StockNode) -> None:
    """All modules went at the first try: nobody held one."""
    results = [(call, result) for call, _, result in node.tree.results() if call == "delete_module"]
    assert results == [("delete_module", 0)] * 3


@pytest.mark.deep
def test_pod_bound_by_name(busy_node: StockNode) -> None:
    """N22: a GPU pod put on the node with spec.nodeName, past the scheduler, is found right before the unload and goes too."""
    busy_node.tree.process(4242, fds=["/dev/nvidia0"])
    before, mark, pods = busy_node.surface(), busy_node.cp.audit_mark(), busy_node.uids("train")
    run = busy_node.start("uninstall_driver", DRAIN_USE_FORCE="true")
    run.wait_for_line(lambda line: line.get("reason") == "held-by-process", "the wait for a process")
    busy_node.add_pod("late", gpus=1, nodeName=busy_node.name)
    end_process(busy_node, 4242)
    ended = run.wait().require(0)
    busy_node.wait_surface(before)
    assert busy_node.evicted(mark) == sorted([*pods, "late"])
    assert ended.said("somebody uses the driver again", f"{busy_node.namespace}/late")


@pytest.mark.deep
def test_newcomer_that_may_not_go(busy_node: StockNode) -> None:
    """N22, R1: a newcomer that may not be moved stops the run before the unload, and everything is put back."""
    busy_node.tree.process(4242, fds=["/dev/nvidia0"])
    before = busy_node.surface()
    run = busy_node.start("uninstall_driver")
    run.wait_for_line(lambda line: line.get("reason") == "held-by-process", "the wait for a process")
    busy_node.add_pod("late", gpus=1, nodeName=busy_node.name)
    end_process(busy_node, 4242)
    ended = run.wait().require(65)
    assert ended.said(f"{busy_node.namespace}/late", "DRAIN_USE_FORCE")
    busy_node.wait_surface(before)
    assert busy_node.tree.calls() == []
    assert busy_node.uids("late")


@pytest.mark.deep
def test_admin_has_the_taint(busy_node: StockNode) -> None:
    """N23, R3: an admin's nvidia.com/gpu taint is never replaced nor removed; there is the cordon alone then, and the plan says so."""
    taint = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
    busy_node.change({"spec": {"taints": [taint]}})
    before = busy_node.surface()
    plan = busy_node.run("plan", "--output", "json").require(0).document()
    assert any("no taint, only the cordon" in note for note in plan["notes"])
    with busy_node.cp.record("/api/v1/nodes", f"fieldSelector=metadata.name%3D{busy_node.name}") as nodes:
        busy_node.run().require(0)
        busy_node.wait_surface(before)
        assert all(taint in event.object["spec"]["taints"] for event in nodes.until_now())
        assert any(event.object["spec"].get("unschedulable") for event in nodes.until_now())


@pytest.mark.deep
def test_own_key_is_tolerated(node: StockNode) -> None:
    """N23: where the driver's DaemonSet tolerates our own key, that key keeps pods off."""
    keys = ("nvidia.com/gpu", "nvidia.com/gpu-driver-update")
    node.add_driver(digest="new", tolerations=[{"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in keys])
    before = node.surface()
    node.tree.faults({"call": "umount2", "hold": True})
    run = node.start("uninstall_driver")
    node.wait_held("umount2")
    (taint,) = node.surface()["taints"]
    assert (taint["key"], taint["effect"], taint["value"][:3]) == ("nvidia.com/gpu-driver-update", "NoSchedule", "dm-")
    node.tree.faults()
    run.wait().require(0)
    node.wait_surface(before)


def test_driver_pod_comes_back_under_the_taint(node: StockNode, api_proxy: ApiProxy) -> None:
    """N23, R2: the keep-off never keeps the driver off: deleted in mid-run, its DaemonSet makes another that takes the record over."""
    node.add_driver(digest="new", grace_seconds=1)
    before, first = node.surface(), node.driver_pods()[0]["metadata"]
    after_unload(node, api_proxy).kill()
    api_proxy.clear()
    node.tree.faults()
    node.cp.delete(f"{node.space}/pods/{first['name']}")
    node.cp.wait_for(lambda: [pod for pod in node.driver_pods() if pod["metadata"]["uid"] != first["uid"]], "another driver pod")
    node.cp.wait_for(lambda: len(node.driver_pods()) == 1, "the old one to be gone")
    node.run().require(0)
    node.wait_surface(before)


@pytest.mark.deep
def test_admin_has_cordoned(busy_node: StockNode) -> None:
    """R3: an admin's cordon is not ours: it stays, through a whole run and through one that has nothing to do."""
    busy_node.change({"spec": {"unschedulable": True}})
    before = busy_node.surface()
    busy_node.run().require(0)
    assert busy_node.surface() == before
    busy_node.run().require(0)
    assert busy_node.surface() == before


@pytest.mark.deep
def test_person_wants_the_cordon_kept(busy_node: StockNode) -> None:
    """Decision 10: with the keep-cordon annotation the run's own cordon stays at its end, and that is said."""
    busy_node.annotate(**{"nvidia.com/gpu-driver-manager.keep-cordon": "true"})
    ended = busy_node.run().require(0)
    assert busy_node.surface()["unschedulable"] is True
    assert ended.said("keep-cordon")


def test_auto_drain(busy_node: StockNode) -> None:
    """Decision 20, N06: where something still holds the driver after the GPU pods, a drain by kubectl's rules takes the rest."""
    made = stock.training(1, name="hidden", node_selector={"space": busy_node.namespace})
    made["spec"]["template"]["spec"]["containers"][0].pop("resources")
    busy_node.cp.create(f"/apis/apps/v1/namespaces/{busy_node.namespace}/deployments", made)
    busy_node.cp.wait_for(lambda: busy_node.ready_pods(["hidden"]), "a pod that hides its use")
    ((name, uid),) = busy_node.uids("hidden").items()
    busy_node.tree.process(4242, fds=["/dev/nvidia0"], cgroup=f"0::/kubepods.slice/kubepods-pod{uid.replace('-', '_')}.slice/cri-1.scope\n")
    before, mark, pods = busy_node.surface(), busy_node.cp.audit_mark(), busy_node.uids("train")
    run = busy_node.start("uninstall_driver", ENABLE_AUTO_DRAIN="true", HIDDEN_CONSUMERS="ignore")
    busy_node.cp.wait_for(lambda: name in busy_node.evicted(mark), "the drain")
    end_process(busy_node, 4242)
    ended = run.wait().require(0)
    busy_node.wait_surface(before)
    assert busy_node.evicted(mark) == sorted([*pods, name])
    assert ended.said(f"{busy_node.namespace}/{name}", "draining the whole node")


def test_process_that_never_lets_go(busy_node: StockNode) -> None:
    """R1, R8: a process that keeps a GPU is named with its unit, the wait ends at its limit with 75, nothing is unloaded."""
    busy_node.tree.process(4242, fds=["/dev/nvidia0"], cgroup="0::/system.slice/train.service\n", comm="train")
    before = busy_node.surface()
    ended = busy_node.run(HOLDER_TIMEOUT="3s").require(75)
    assert ended.said("4242", "train", "train.service")
    busy_node.wait_surface(before)
    assert busy_node.tree.calls() == []
