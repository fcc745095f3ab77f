"""Accounts that may less than the stock one: what is missing is named before anything is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.world import RECORD, StockNode
from tests.kube import stock

pytestmark = pytest.mark.kube


def take_permission(node: StockNode, verb: str, resource: str) -> None:
    """Takes one verb from the driver's role, and waits until the server knows."""
    path = f"{stock.RBAC}/clusterroles/nvidia-{node.kind}-{node.namespace}"
    rules: list[dict[str, Any]] = []
    for rule in stock.RULES[node.kind]:
        others = [each for each in rule["resources"] if each != resource]
        verbs = [each for each in rule["verbs"] if each != verb]
        rules += [{**rule, "resources": others}] if others else []
        rules += [{**rule, "resources": [resource], "verbs": verbs}] if resource in rule["resources"] and verbs else []
    node.cp.patch(path, {"rules": rules})
    token = node.cp.service_account_token(node.namespace, f"nvidia-{node.kind}")
    kind, _, subresource = resource.partition("/")
    group = "apps" if kind == "daemonsets" else ""
    attributes = {"verb": verb, "group": group, "resource": kind, "subresource": subresource, "namespace": node.namespace}
    review = {"spec": {"resourceAttributes": attributes}}
    where = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    node.cp.wait_for(lambda: not node.cp.create(where, review, token=token)["status"]["allowed"], f"{verb} {resource} to be taken")


@pytest.mark.parametrize(
    ("verb", "resource"),
    [("create", "pods/eviction"), ("patch", "nodes"), ("watch", "pods"), ("list", "pods"), ("get", "nodes")],
    ids=lambda word: word.replace("/", "-"),
)
def test_what_a_run_needs(busy_node: StockNode, verb: str, resource: str) -> None:
    """N60: without a permission that the run needs it ends with 77, names verb and resource, and has changed nothing."""
    take_permission(busy_node, verb, resource)
    before, mark = busy_node.surface(), busy_node.cp.audit_mark()
    pods = busy_node.uids("train")
    ended = busy_node.run().require(77)
    assert ended.said(verb, resource)
    assert busy_node.surface() == before
    assert busy_node.annotation(RECORD) is None
    assert busy_node.evicted(mark) == []
    assert busy_node.uids("train") == pods
    assert [line for line in busy_node.writes(mark) if line != "patch nodes"] == []
    assert busy_node.tree.calls() == []


def test_what_preflight_says(busy_node: StockNode) -> None:
    """N60: the preflight check finds the missing verb before any run does."""
    take_permission(busy_node, "create", "pods/eviction")
    mark = busy_node.cp.audit_mark()
    ended = busy_node.run("preflight_check", "--output", "json").require(77)
    (check,) = [each for each in ended.document() if each["check"] == "permissions"]
    assert check["result"] == "fail"
    assert "create pods/eviction" in check["sentence"]
    assert busy_node.writes(mark) == []


SPARED = [
    pytest.param("get", "daemonsets", marks=pytest.mark.deep),
    pytest.param("list", "resourceclaims", marks=pytest.mark.deep),
    ("get", "clusterversions"),
]


@pytest.mark.parametrize(("verb", "resource"), SPARED)
def test_what_a_run_can_do_without(busy_node: StockNode, verb: str, resource: str) -> None:
    """N60: what is only useful is done without: the tolerations come from the own pod, and the run succeeds."""
    take_permission(busy_node, verb, resource)
    before = busy_node.surface()
    busy_node.run().require(0)
    busy_node.wait_surface(before)


def test_permission_lost_in_mid_run(busy_node: StockNode, api_proxy: Any) -> None:
    """N60, R4: an eviction that is forbidden all of a sudden ends the run with 77, everything put back."""
    before = busy_node.surface()
    forbidden: Callable[..., object] = api_proxy.on("create", r"/eviction$").answer
    forbidden(403)
    ended = busy_node.run(proxy=api_proxy).require(77)
    assert ended.said("pods/eviction")
    busy_node.wait_surface(before)
