"""The stock init container: its environment, its account, its role, and nothing more."""

from __future__ import annotations

import pytest

from tests.e2e.world import REVIEWS, STATUS, StockNode, empty_host, resource_of
from tests.kube import stock

pytestmark = pytest.mark.kube


def assert_only_stock_permissions(node: StockNode, mark: int) -> None:
    """Nothing was refused, and every verb that was used is one that the stock role gives."""
    rules = {(verb, resource) for rule in stock.RULES[node.kind] for resource in rule["resources"] for verb in rule["verbs"]}
    used = {(event["verb"], resource_of(event)) for event in node.audit(mark)}
    assert used
    assert [event["requestURI"] for event in node.audit(mark) if event["responseStatus"]["code"] in (401, 403)] == []
    assert {(verb, resource) for verb, resource in used if resource not in REVIEWS} <= rules


def test_full_flow_as_the_stock_init_container(busy_node: StockNode) -> None:
    """R12: the stock env, token and ClusterRole of the driver DaemonSet are enough for the whole flow."""
    before, mark = busy_node.surface(), busy_node.cp.audit_mark()
    pods = busy_node.uids("train")
    busy_node.run().require(0)
    busy_node.wait_surface(before)
    assert busy_node.evicted(mark) == sorted(pods)
    assert_only_stock_permissions(busy_node, mark)
    assert busy_node.annotation(STATUS) is None


@pytest.mark.parametrize("kind", ["vgpu-manager", "vfio-manager"])
def test_other_managers_on_a_node_without_a_driver(node: StockNode, kind: stock.Kind) -> None:
    """R11, R12: the vgpu-manager's and vfio-manager's accounts are enough where nothing is loaded, and nobody is disturbed."""
    node.add_driver(kind)
    node.add_operands(only=("sandbox-validator",))
    node.tree = empty_host(node.folder / "empty")
    before, mark = node.surface(), node.cp.audit_mark()
    operands = node.uids(stock.OPERANDS["sandbox-validator"])
    node.run().require(0)
    assert node.surface() == before
    assert node.writes(mark) == []
    assert node.uids(stock.OPERANDS["sandbox-validator"]) == operands
    assert_only_stock_permissions(node, mark)


def test_vgpu_manager_on_a_loaded_node(node: StockNode) -> None:
    """R12: the vgpu-manager's role, which names no claims, is enough for the full flow with eviction off and no GPU pod there."""
    node.add_driver("vgpu-manager")
    node.add_operands(only=("sandbox-validator", "vgpu-device-manager"))
    before, mark = node.surface(), node.cp.audit_mark()
    node.run().require(0)
    node.wait_surface(before)
    assert_only_stock_permissions(node, mark)
    assert node.evicted(mark) == []
