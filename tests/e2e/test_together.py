"""Two runs on one node, another driver on it, and a node that goes away under a run."""

from __future__ import annotations

import json

import pytest

from tests.e2e.moments import in_mid_eviction, let_go
from tests.e2e.world import RECORD, StockNode
from tests.kube.kubelet import node_manifest
from tests.kube.proxy import ApiProxy

pytestmark = pytest.mark.kube


def test_second_run_waits_for_the_first(busy_node: StockNode) -> None:
    """Decision 4: a second run waits for the first one's end, then finds nothing to do, and nobody is evicted twice."""
    before, mark, pods = busy_node.surface(), busy_node.cp.audit_mark(), busy_node.uids("train")
    busy_node.tree.faults({"call": "umount2", "hold": True})
    first = busy_node.start("uninstall_driver")
    busy_node.wait_held("umount2")
    second = busy_node.start("uninstall_driver")
    named = busy_node.start("uninstall_driver", LOCK_TIMEOUT="1s").wait().require(75)
    assert named.said(f"pid {first.process.pid}")
    assert second.process.poll() is None
    busy_node.tree.faults()
    first.wait().require(0)
    second.wait().require(0)
    busy_node.wait_surface(before)
    assert busy_node.evicted(mark) == sorted(pods)


def test_restore_waits_for_a_run(busy_node: StockNode) -> None:
    """Decision 4: `restore` never takes the record from under a run that lives."""
    busy_node.tree.faults({"call": "umount2", "hold": True})
    run = busy_node.start("uninstall_driver")
    busy_node.wait_held("umount2")
    during = busy_node.surface()
    busy_node.run("restore", LOCK_TIMEOUT="1s").require(75)
    assert busy_node.surface() == during
    busy_node.tree.faults()
    run.wait().require(0)


def test_lock_of_a_killed_run(busy_node: StockNode) -> None:
    """Decision 4: the lock of a killed run is free at once."""
    busy_node.tree.faults({"call": "umount2", "hold": True})
    run = busy_node.start("uninstall_driver")
    busy_node.wait_held("umount2")
    run.kill()
    busy_node.tree.faults()
    busy_node.run(LOCK_TIMEOUT="1s").require(0)


@pytest.mark.deep
def test_other_driver_on_the_node(busy_node: StockNode) -> None:
    """R2: another live driver pod on the node is waited for by uid, before anything is changed, then named with 75."""
    busy_node.add_pod("old-driver")
    busy_node.cp.patch(f"{busy_node.space}/pods/old-driver", {"metadata": {"labels": {"app.kubernetes.io/component": "nvidia-driver"}}})
    before = busy_node.surface()
    ended = busy_node.run(HOLDER_TIMEOUT="2s").require(75)
    assert ended.said(f"{busy_node.namespace}/old-driver")
    assert busy_node.surface() == before
    assert busy_node.tree.calls() == []
    run = busy_node.start("uninstall_driver")
    run.wait_for_line(lambda line: line.get("reason") == "other-driver", "the wait for the other driver")
    busy_node.cp.delete(f"{busy_node.space}/pods/old-driver")
    run.wait().require(0)
    busy_node.wait_surface(before)


@pytest.mark.parametrize("is_made_anew", [False, True], ids=["gone", "made-anew"])
def test_node_goes_in_mid_run(busy_node: StockNode, api_proxy: ApiProxy, is_made_anew: bool) -> None:
    """Decision 6: a node that is deleted, or made anew under its name, ends the run with 75 before the next step on the host."""
    run = in_mid_eviction(busy_node, api_proxy)
    labels = busy_node.node()["metadata"]["labels"]
    busy_node.cp.delete(busy_node.path)
    if is_made_anew:
        busy_node.cp.create("/api/v1/nodes", node_manifest(busy_node.name, gpus=64, labels=labels))
    for name in busy_node.uids("train"):
        busy_node.cp.delete(f"{busy_node.space}/pods/{name}?gracePeriodSeconds=0")
    let_go(busy_node, api_proxy)
    ended = run.wait(40).require(75)
    assert ended.said(busy_node.name, "made anew" if is_made_anew else "gone")
    assert busy_node.tree.calls() == []
    if is_made_anew:
        assert busy_node.annotation(RECORD) is None


@pytest.mark.deep
def test_node_goes_while_the_driver_is_unloaded(busy_node: StockNode) -> None:
    """Decision 6: a node that goes in the middle of the unload ends the run with 75, and nothing is written on another of its name."""
    busy_node.tree.faults({"call": "delete_module", "hold": True})
    run = busy_node.start("uninstall_driver")
    busy_node.wait_held("delete_module")
    labels = busy_node.node()["metadata"]["labels"]
    busy_node.cp.delete(busy_node.path)
    busy_node.cp.create("/api/v1/nodes", node_manifest(busy_node.name, gpus=64, labels=labels))
    before = busy_node.surface()
    busy_node.tree.faults()
    run.wait(40).require(75)
    assert busy_node.surface()["labels"] == before["labels"]
    assert busy_node.annotation(RECORD) is None


@pytest.mark.deep
def test_record_of_another_node(busy_node: StockNode) -> None:
    """Decision 6: a record that was copied from another node does not count; it is reported and replaced."""
    record = {
        "version": 1, "run": "elsewhere1", "nodeUID": "another", "bootID": "b", "started": "2026-01-01T00:00:00Z", "phase": "paused",
        "labels": {"nvidia.com/gpu.deploy.dcgm": "surprise"}, "cordoned": True,
    }  # fmt: skip

    busy_node.annotate(**{RECORD: json.dumps(record)})
    ended = busy_node.run().require(0)
    assert ended.said("belongs to another node")
    surface = busy_node.surface()
    assert surface["labels"]["nvidia.com/gpu.deploy.dcgm"] == "true"
    assert not surface["unschedulable"]
    assert RECORD not in surface["annotations"]


@pytest.mark.deep
def test_record_that_cannot_be_read(busy_node: StockNode) -> None:
    """R3, R5: a record that cannot be read is nobody's guess: 65 by run and restore, and it stays."""
    busy_node.annotate(**{RECORD: "{not json"})
    before = busy_node.surface()
    for command in ("uninstall_driver", "restore"):
        busy_node.run(command).require(65)
        assert busy_node.surface() == before
