"""An API server that goes away, conflicts or changes its mind under a run."""

from __future__ import annotations

import json
import time

import pytest

from tests.e2e.command import Running
from tests.e2e.moments import after_unload
from tests.e2e.world import RECORD, Object, StockNode, stamp
from tests.kube.proxy import ApiProxy

pytestmark = pytest.mark.kube


def at_the_restore(node: StockNode, proxy: ApiProxy) -> Running:
    """A run whose next request is the restore patch, its host work held."""
    return after_unload(node, proxy)


def test_outage_at_the_restore(busy_node: StockNode, api_proxy: ApiProxy) -> None:
    """N15: refused connections for ten seconds, then 409, then 503, exactly at the restore patch: it is put back all the same."""
    before, mark, pods = busy_node.surface(), busy_node.cp.audit_mark(), busy_node.uids("train")
    run = at_the_restore(busy_node, api_proxy)
    conflict = api_proxy.on("patch", r"/nodes/").answer(409)
    shed = api_proxy.on("patch", r"/nodes/").answer(503, headers={"Retry-After": "1"})
    with api_proxy.outage():
        busy_node.tree.faults()
        began = run.wait_for_line(is_about_the_outage, "the outage in the log")
        lines = busy_node.cp.wait_for(lambda: outage_lines(run, began), "ten seconds of growing pauses", 15)
    ended = run.wait().require(0)
    assert 2 <= len(lines) < 6, "the outage is told when it begins and now and then, not with every try"
    assert ended.code == 0
    assert conflict.obeyed
    assert shed.obeyed
    busy_node.wait_surface(before)
    assert busy_node.annotation(RECORD) is None
    assert busy_node.evicted(mark) == sorted(pods)
    assert ended.wall > 10


def outage_lines(run: Running, began: Object) -> list[str]:
    """The lines about the outage, once it has lasted ten seconds."""
    if time.time() - stamp(began["time"]) < 10:
        return []
    return [line for line in run.error_text().splitlines() if line.startswith("{") and is_about_the_outage(json.loads(line))]


def is_about_the_outage(line: Object) -> bool:
    return "from the API server" in line["message"] or "the API server does not answer" in line["message"]


def test_outage_longer_than_the_limit(busy_node: StockNode, api_proxy: ApiProxy) -> None:
    """N15: if the restore fails the run ends non-zero, and the next start finishes it from the record without evicting again."""
    before, pods = busy_node.surface(), busy_node.uids("train")
    mark = busy_node.cp.audit_mark()
    run = busy_node_with_limit(busy_node, api_proxy)
    with api_proxy.outage():
        busy_node.tree.faults()
        ended = run.wait()
    assert ended.code != 0
    assert ended.lines[-1]["put_back"] is False
    assert ended.wall < 30, "two seconds are two seconds"
    assert busy_node.annotation(RECORD) is not None
    busy_node.run().require(0)
    busy_node.wait_surface(before)
    assert busy_node.evicted(mark) == sorted(pods)


def busy_node_with_limit(node: StockNode, proxy: ApiProxy) -> Running:
    node.tree.faults({"call": "umount2", "hold": True})
    run = node.start("uninstall_driver", proxy=proxy, RESTORE_TIMEOUT="2s")
    node.wait_held("umount2")
    return run


def test_answer_of_the_restore_is_lost(busy_node: StockNode, api_proxy: ApiProxy) -> None:
    """N15: a restore that was done though nobody said so is found done, and nothing is written twice."""
    before = busy_node.surface()
    run = at_the_restore(busy_node, api_proxy)
    lost = api_proxy.on("patch", r"/nodes/").lose_answer()
    busy_node.tree.faults()
    run.wait().require(0)
    assert len(api_proxy.requests("patch", r"/nodes/")) == len(lost.obeyed) + 2, "pause, note of the unload, restore: no more"
    busy_node.wait_surface(before)


def test_watch_that_breaks(busy_node: StockNode, api_proxy: ApiProxy) -> None:
    """N15: cut connections in mid-wait cost a moment, not the run, and no pod is evicted twice."""
    before, mark, pods = busy_node.surface(), busy_node.cp.audit_mark(), busy_node.uids("train")
    last = api_proxy.on("create", r"/eviction$", nth=3).hold_answer()
    run = busy_node.start("uninstall_driver", proxy=api_proxy)
    last.wait_hit()
    api_proxy.cut()
    api_proxy.clear()
    run.wait().require(0)
    busy_node.wait_surface(before)
    evicted = busy_node.evicted(mark)  # without the one whose connection broke before the server had answered
    assert len(evicted) == len(set(evicted))
    assert set(evicted) <= set(pods)
    assert not set(pods.values()) & set(busy_node.uids("train").values())


@pytest.mark.deep
def test_someone_changes_the_node_meanwhile(busy_node: StockNode, api_proxy: ApiProxy) -> None:
    """N15, R3: a conflict leads to a new read and a patch of our own keys only; what a person wrote meanwhile stays."""
    run = at_the_restore(busy_node, api_proxy)
    held = api_proxy.on("patch", r"/nodes/").hold_request()
    busy_node.tree.faults()
    held.wait_hit()
    labels = {"team": "blue", "nvidia.com/gpu.deploy.dcgm": "false"}
    busy_node.change({"metadata": {"labels": labels, "annotations": {"note": "mine"}}})
    api_proxy.clear()
    ended = run.wait().require(0)
    node = busy_node.node()["metadata"]
    assert {key: node["labels"][key] for key in labels} == labels
    assert node["annotations"]["note"] == "mine"
    assert node["labels"]["nvidia.com/gpu.deploy.device-plugin"] == "true"
    assert ended.said("left as it is", "nvidia.com/gpu.deploy.dcgm")


def test_namespace_that_is_being_deleted(busy_node: StockNode, api_proxy: ApiProxy) -> None:
    """N08: a 403 because the namespace is being deleted is no lack of permission: the run waits until the pod is gone."""
    before = busy_node.surface()
    name = f"{busy_node.namespace}-x"
    busy_node.cp.create("/api/v1/namespaces", {"metadata": {"name": name}})
    busy_node.cp.wait_for(lambda: busy_node.cp.exists(f"/api/v1/namespaces/{name}/serviceaccounts/default"), "the default account")
    path = f"/api/v1/namespaces/{name}/pods"
    busy_node.cp.create(path, gpu_pod(busy_node))
    busy_node.cp.wait_for(lambda: busy_node.cp.get(f"{path}/lone")["spec"].get("nodeName"), "the pod to be bound")
    cause = {"reason": "NamespaceTerminating", "message": f"namespace {name} is being terminated", "field": "metadata.namespace"}
    body = {
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "reason": "Forbidden", "code": 403,
        "message": f'pods "lone" is forbidden: unable to evict in namespace {name} because it is being terminated',
        "details": {"name": "lone", "kind": "pods", "causes": [cause]},
    }  # fmt: skip
    rule = api_proxy.on("create", rf"/{name}/pods/lone/eviction$").answer(403, body)
    run = busy_node.start("uninstall_driver", proxy=api_proxy, DRAIN_USE_FORCE="true")
    rule.wait_hit()
    assert run.process.poll() is None
    busy_node.cp.delete(f"/api/v1/namespaces/{name}")
    run.wait().require(0)
    assert len(rule.obeyed) == 1
    busy_node.wait_surface(before)


def gpu_pod(node: StockNode, name: str = "lone") -> Object:
    container = {"name": "main", "image": "none", "resources": {"limits": {"nvidia.com/gpu": "1"}}}
    selector = {"kubernetes.io/hostname": node.name}
    return {
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {"nodeSelector": selector, "terminationGracePeriodSeconds": 1, "containers": [container]},
    }


@pytest.mark.deep
def test_pod_that_vanishes(busy_node: StockNode, api_proxy: ApiProxy) -> None:
    """N08: a pod that goes between the list and its eviction is a pod less."""
    before = busy_node.surface()
    busy_node.add_pod("lone", gpus=1)
    rule = api_proxy.on("create", r"/pods/lone/eviction$").hold_request()
    run = busy_node.start("uninstall_driver", proxy=api_proxy, DRAIN_USE_FORCE="true")
    rule.wait_hit()
    busy_node.cp.delete(f"{busy_node.space}/pods/lone?gracePeriodSeconds=0")
    api_proxy.clear()
    run.wait().require(0)
    busy_node.wait_surface(before)


@pytest.mark.deep
def test_stateful_pod_that_moves(node: StockNode) -> None:
    """N08: web-0 recreated on another node under its old name is somebody else: it is never evicted again."""
    node.add_driver(digest="new")
    node.add_neighbour()
    template = gpu_pod(node, "web")
    template["spec"]["nodeSelector"] = {"pool": node.namespace}
    prefer = {"weight": 1, "preference": {"matchExpressions": [{"key": "space", "operator": "Exists"}]}}
    template["spec"]["affinity"] = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [prefer]}}
    spec = {"serviceName": "web", "replicas": 1, "selector": {"matchLabels": {"app": "web"}}, "template": template}
    node.cp.create(f"/apis/apps/v1/namespaces/{node.namespace}/statefulsets", {"metadata": {"name": "web"}, "spec": spec})
    node.cp.wait_for(lambda: node.ready_pods(["web"]), "web-0 on the node")
    budget = node.add_budget("web", 1)
    before, mark, uid = node.surface(), node.cp.audit_mark(), node.uids("web")["web-0"]
    run = node.start("uninstall_driver")
    run.wait_for_line(lambda line: "web-budget" in line.get("for", ""), "the budget in the log")
    node.cp.patch(budget, {"spec": {"minAvailable": 0}})
    node.cp.delete(f"{node.space}/pods/web-0")
    run.wait().require(0)
    node.wait_surface(before)
    assert node.uids("web")["web-0"] != uid
    node.cp.wait_for(lambda: node.cp.get(f"{node.space}/pods/web-0")["spec"].get("nodeName") in node.neighbours, "web-0 elsewhere")
    accepted = [event for event in node.eviction_tries(mark) if event["responseStatus"]["code"] == 201]
    assert len(accepted) <= 1
    again = node.uids("web")["web-0"]
    assert "deletionTimestamp" not in node.cp.get(f"{node.space}/pods/web-0")["metadata"]
    assert again == node.uids("web")["web-0"]
