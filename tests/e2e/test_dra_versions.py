"""Older versions of the DRA API, and a server without it.

Such a server's scheduler and claim controller do not work (they read v1 alone), so the test binds pods and allocates claims itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.gpu_users import GPU_DRIVER, claiming
from tests.e2e.world import Object, StockNode
from tests.kube import stock
from tests.kube.components import Options
from tests.kube.controlplane import ControlPlane
from tests.kube.fixtures import make_namespace, require_programs

pytestmark = pytest.mark.kube
PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager")


@contextlib.contextmanager
def old_node(version: str, folder: Path) -> Iterator[StockNode]:
    """A node of a server that has this version of the API alone, or none, with the stock account."""
    require_programs()
    served = ("resource.k8s.io/v1=false", *([f"resource.k8s.io/{version}=true"] if version else []))
    with ControlPlane(options=Options(runtime_config=served), components=PROGRAMS) as cp:
        cp.spawn_kubelet()
        make_namespace(cp, "old")
        node = StockNode(cp, "old", folder)
        stock.account(cp, "driver", "old")
        yield node
        node.remove()


def run(node: StockNode, *words: str) -> Object:
    """A run of the command with the stock account; gives the plan, where it printed one."""
    token = node.cp.service_account_token(node.namespace, "nvidia-driver")
    ended = node.run(*words, token=token, DRAIN_USE_FORCE="true").require(0)
    return dict(ended.document()) if words else {}


def add_claim(node: StockNode, version: str, name: str, driver: str) -> None:
    """A claim that is allocated to a driver's device, and a pod that uses it."""
    path = f"/apis/resource.k8s.io/{version}/namespaces/{node.namespace}/resourceclaims"
    asked: Object = {"deviceClassName": "gpus"} if version == "v1beta1" else {"exactly": {"deviceClassName": "gpus"}}
    made = node.cp.create(path, {"metadata": {"name": name}, "spec": {"devices": {"requests": [{"name": "device", **asked}]}}})
    result = {"request": "device", "driver": driver, "pool": node.name, "device": "gpu-0"}
    pod = node.add_pod(name, is_ready=False, nodeName=node.name, **claiming(resourceClaimName=name))
    users = [{"resource": "pods", "name": name, "uid": pod["metadata"]["uid"]}]
    made["status"] = {"allocation": {"devices": {"results": [result]}}, "reservedFor": users}
    answer = node.cp.request("PUT", f"{path}/{name}/status", made)
    assert answer.status == 200, answer
    node.cp.wait_for(lambda: node.ready_pods([name]), f"the pod {name}")


@pytest.mark.parametrize("version", [pytest.param("v1beta2", marks=pytest.mark.deep), "v1beta1"])
def test_older_api(version: str, tmp_path: Path) -> None:
    """N04: where the server has a beta of the API alone, claims are read in it: the GPU's holder goes, the other driver's stays."""
    with old_node(version, tmp_path) as node:
        add_claim(node, version, "train", GPU_DRIVER)
        add_claim(node, version, "tpu", "tpu.example.com")
        before, mark, kept = node.surface(), node.cp.audit_mark(), node.uids("tpu")
        plan = run(node, "plan", "--output", "json")
        assert {each["name"]: each["reason"] for each in plan["verdicts"]} == {"train": "dra", "tpu": "no-gpu"}
        run(node)
        node.wait_surface(before)
        assert node.evicted(mark) == ["train"]
        assert node.uids("tpu") == kept


def test_no_api(tmp_path: Path) -> None:
    """N04: a server without the API needs nobody to read claims: the run goes its way."""
    with old_node("", tmp_path) as node:
        node.add_pod("train", gpus=1, nodeName=node.name)
        before, mark = node.surface(), node.cp.audit_mark()
        run(node)
        node.wait_surface(before)
        assert node.evicted(mark) == ["train"]
        assert not (node.tree.root / "sys/module/nvidia").exists()
