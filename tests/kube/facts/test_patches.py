from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from tests.kube.controlplane import APPLY, JSON_PATCH, MERGE, STRATEGIC, Response
from tests.kube.facts.conftest import Note
from tests.kube.recorder import Object
from tests.kube.space import Space, until

pytestmark = [pytest.mark.kube, pytest.mark.deep]
TAINT = {"key": "nvidia.com/gpu-driver-update", "value": "run-1", "effect": "NoSchedule"}
UNSCHEDULABLE = "node.kubernetes.io/unschedulable"


class Node:
    """One node, patched with the stock account."""

    def __init__(self, space: Space, token: str) -> None:
        self.space, self.token = space, token

    async def patch(self, body: Any, kind: str = MERGE, query: str = "") -> Response:
        """One patch; the answer, whatever it is."""
        return await self.space.ask("PATCH", f"{self.space.node_path(0)}{query}", body, token=self.token, content_type=kind)

    async def now(self) -> Object:
        """The node as it is."""
        return await self.space.node()

    async def with_cordon_taint(self) -> list[Object]:
        """The node's taints, once the lifecycle controller's is among them."""

        async def found() -> Any:
            taints = (await self.now())["spec"].get("taints", [])
            return taints if UNSCHEDULABLE in keys(taints) else None

        taints: list[Object] = await until(found, "the lifecycle controller's taint", 30, every=0.002)
        return taints


def keys(taints: list[Object]) -> set[str]:
    """The keys of some taints."""
    return {taint["key"] for taint in taints}


@pytest.fixture
async def node(space: Space, stock_account: str) -> Node:
    """The first node of the space."""
    return Node(space, await asyncio.to_thread(space.cp.service_account_token, space.name, stock_account))


async def test_one_guarded_patch(node: Node, note: Note) -> None:
    """One merge patch changes labels, annotations, taints and unschedulable together, or nothing when the node has moved on."""
    before = await node.now()
    whole = {
        "metadata": {
            "resourceVersion": before["metadata"]["resourceVersion"],
            "labels": {"nvidia.com/gpu.deploy.device-plugin": "paused-for-driver-upgrade"},
            "annotations": {"nvidia.com/gpu-driver-manager.record": "{}"},
        },
        "spec": {"unschedulable": True, "taints": [TAINT]},
    }
    done = await node.patch(whole)
    assert done.status == 200
    assert done.body["spec"]["unschedulable"]
    assert done.body["metadata"]["annotations"]["nvidia.com/gpu-driver-manager.record"] == "{}"
    note("taints_right_after_one_patch", done.body["spec"]["taints"])
    stale = await node.patch(whole)
    assert (stale.status, stale.body["reason"]) == (409, "Conflict")
    assert stale.body["message"] == (
        f'Operation cannot be fulfilled on nodes "{before["metadata"]["name"]}": the object has been modified; '
        "please apply your changes to the latest version and try again"
    )
    assert keys(await node.with_cordon_taint()) == {TAINT["key"], UNSCHEDULABLE}
    after = (await node.now())["metadata"]["resourceVersion"]
    assert after != done.body["metadata"]["resourceVersion"]  # the controller's write made our own answer stale


async def test_the_guard_works_in_every_kind_of_patch(node: Node) -> None:
    """A resourceVersion guards a strategic merge too; another uid is 422; a patch that changes nothing keeps the version."""
    guarded = await node.patch({"metadata": {"resourceVersion": "1"}, "spec": {"taints": []}}, STRATEGIC)
    assert guarded.status == 409
    other = await node.patch({"metadata": {"uid": "11111111-2222-3333-4444-555555555555", "labels": {"x": "y"}}})
    assert other.status == 422
    same = await node.patch({})
    assert same.status == 200
    assert same.body["metadata"]["resourceVersion"] == (await node.now())["metadata"]["resourceVersion"]


@pytest.mark.parametrize("kind", [MERGE, STRATEGIC])
async def test_taints_are_an_atomic_list(node: Node, kind: str, note: Note) -> None:
    """Both merges replace all taints: an unguarded patch loses what others wrote, until they write it again."""
    await node.patch({"spec": {"unschedulable": True, "taints": [TAINT]}})
    await node.with_cordon_taint()
    lost = await node.patch({"spec": {"taints": [TAINT]}}, kind)
    assert keys(lost.body["spec"]["taints"]) == {TAINT["key"]}
    begun = time.monotonic()
    await node.with_cordon_taint()
    note("lost_cordon_taint_back_after_ms", round((time.monotonic() - begun) * 1000))


async def test_other_kinds_of_patch_do_not_help_with_taints(node: Node, note: Note) -> None:
    """Element deletion is refused, a failed JSON Patch test is 422, and server-side apply conflicts once others wrote taints."""
    await node.patch({"spec": {"unschedulable": True, "taints": [TAINT]}})
    await node.with_cordon_taint()
    element = await node.patch({"spec": {"taints": [{"$patch": "delete", "key": TAINT["key"]}]}}, STRATEGIC)
    assert element.status == 422
    test = {"op": "test", "path": "/spec/taints/0/key", "value": "other"}
    failed = await node.patch([test, {"op": "remove", "path": "/spec/taints/0"}], JSON_PATCH)
    assert failed.status == 422
    note("json_patch_test_failed", failed.body)
    name = node.space.nodes[0]
    mine = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name},
        "spec": {"taints": [{"key": "example.com/ssa", "effect": "NoSchedule"}]},
    }
    conflict = await node.patch(json.dumps(mine).encode(), APPLY, "?fieldManager=driver-manager")
    assert conflict.status == 409
    assert {cause["reason"] for cause in conflict.body["details"]["causes"]} == {"FieldManagerConflict"}
    assert ".spec.taints" in {cause["field"] for cause in conflict.body["details"]["causes"]}
    note("apply_conflict_409", conflict.body["message"])


async def test_limits(node: Node) -> None:
    """Annotations over 256 KiB together and invalid labels are 422 with causes."""
    too_big = await node.patch({"metadata": {"annotations": {"big": "x" * 300_000}}})
    assert too_big.status == 422
    assert "may not be more than 262144 bytes" in too_big.body["message"]
    bad_label = await node.patch({"metadata": {"labels": {"x": "not valid!"}}})
    assert bad_label.status == 422
    assert bad_label.body["details"]["causes"]
