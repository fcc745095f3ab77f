"""Runs that end in the middle: by SIGKILL and another run, by SIGTERM and none."""

from __future__ import annotations

import pytest

from tests.e2e.moments import MOMENTS, Moment, after_pause, after_unload, before_unload, bury, in_mid_eviction, let_go
from tests.e2e.world import RECORD, STATUS, StockNode, empty_host
from tests.kube.proxy import ApiProxy

pytestmark = pytest.mark.kube
GRACE = 30.0
"""Of the stock driver pod."""


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: moment.name.replace(" ", "-"))
def test_killed_and_run_again(busy_node: StockNode, api_proxy: ApiProxy, moment: Moment) -> None:
    """R3, R4, N15: after a SIGKILL the next run finishes: node as at the start, no pod evicted twice, no record left."""
    before, mark, training = busy_node.surface(), busy_node.cp.audit_mark(), busy_node.uids("train")
    moment.arrive(busy_node, api_proxy).kill()
    bury(busy_node, api_proxy)
    is_held = moment.name != "after the restore"
    assert (busy_node.annotation(RECORD) is not None) == is_held
    if is_held:
        assert busy_node.surface() != before
    busy_node.run().require(0)
    busy_node.wait_surface(before)
    assert busy_node.annotation(RECORD) is None
    assert busy_node.annotation(STATUS) is None
    evicted = busy_node.evicted(mark)
    assert len(evicted) == len(set(evicted)), "no pod is evicted twice"
    assert set(evicted) >= set(training)
    assert not (busy_node.tree.root / "sys/module/nvidia").exists()
    if is_held:
        assert evicted == sorted(training), "and nobody came to the node in between"


@pytest.mark.parametrize("arrive", [in_mid_eviction, after_unload], ids=["in-mid-eviction", "after-the-unload"])
def test_killed_and_restored(busy_node: StockNode, api_proxy: ApiProxy, arrive: object) -> None:
    """R3: `restore` puts back what a killed run left, evicts nobody and touches nothing of the host; twice is as good as once."""
    assert callable(arrive)
    before = busy_node.surface()
    arrive(busy_node, api_proxy).kill()
    bury(busy_node, api_proxy)
    mark, calls = busy_node.cp.audit_mark(), busy_node.tree.calls()
    busy_node.run("restore").require(0)
    busy_node.wait_surface(before)
    assert busy_node.writes(mark) == ["patch nodes"]
    assert busy_node.tree.calls() == calls
    busy_node.run("restore").require(0)
    assert busy_node.writes(mark) == ["patch nodes"]


def test_killed_and_rebooted(busy_node: StockNode, api_proxy: ApiProxy) -> None:
    """N54: of a record of another boot only the API half counts: cordon, taint and labels go back, nobody is evicted."""
    before = busy_node.surface()
    after_unload(busy_node, api_proxy).kill()
    bury(busy_node, api_proxy)
    busy_node.tree = empty_host(busy_node.folder / "rebooted", boot_id="99999999-2222-3333-4444-555555555555")
    mark = busy_node.cp.audit_mark()
    ended = busy_node.run().require(0)
    busy_node.wait_surface(before)
    assert busy_node.evicted(mark) == []
    assert busy_node.writes(mark) == ["patch nodes"]
    assert busy_node.tree.calls() == []
    assert ended.said("another boot")


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: moment.name.replace(" ", "-"))
def test_told_to_end(busy_node: StockNode, api_proxy: ApiProxy, moment: Moment) -> None:
    """R4, decision 23: after a SIGTERM the run itself puts everything back within the pod's grace and ends with 75."""
    before = busy_node.surface()
    run = moment.arrive(busy_node, api_proxy)
    run.terminate()
    let_go(busy_node, api_proxy)
    ended = run.wait(GRACE).require(75)
    busy_node.wait_surface(before)
    assert busy_node.annotation(RECORD) is None
    assert ended.lines[-1]["put_back"] is True
    assert (busy_node.tree.root / "sys/module/nvidia").exists() != moment.is_unloaded or moment.name == "before the unload"


@pytest.mark.slow
@pytest.mark.parametrize("arrive", [before_unload, after_pause], ids=["a-module-hangs", "the-api-hangs"])
def test_told_to_end_while_something_hangs(busy_node: StockNode, api_proxy: ApiProxy, arrive: object) -> None:
    """R8, decision 23: a call that never comes back does not keep the run from putting the node back within the grace."""
    assert callable(arrive)
    before = busy_node.surface()
    run = arrive(busy_node, api_proxy)
    run.terminate()
    run.wait(GRACE - 5).require(75)
    busy_node.wait_surface(before)
    assert busy_node.annotation(RECORD) is None


def test_interrupted_by_an_impatient_person(busy_node: StockNode, api_proxy: ApiProxy) -> None:
    """R4: Ctrl-C, and again and a SIGTERM while the node is being put back: it is put back all the same, once."""
    before = busy_node.surface()
    run = after_unload(busy_node, api_proxy)
    restore = api_proxy.on("patch", r"/nodes/").hold_request()
    run.interrupt()
    busy_node.tree.faults()
    restore.wait_hit()
    run.interrupt()
    run.terminate()
    api_proxy.clear()
    run.wait(GRACE).require(75)
    busy_node.wait_surface(before)
    assert busy_node.annotation(RECORD) is None


def test_told_to_end_while_waiting_for_a_budget(busy_node: StockNode) -> None:
    """R4: SIGTERM in a long wait ends it at once, the node is as before, and its status says so."""
    busy_node.add_budget("train", 3)
    before = busy_node.surface()
    run = busy_node.start("uninstall_driver")
    run.wait_for_line(lambda line: line.get("reason") == "blocked-by-budget", "the wait for the budget")
    run.terminate()
    ended = run.wait(10).require(75)
    busy_node.wait_surface(before)
    assert busy_node.annotation(STATUS)["reason"] == "stopped"
    assert ended.wall < 60


def test_told_to_end_while_the_api_is_away(node: StockNode, api_proxy: ApiProxy) -> None:
    """Decision 23: with the API away the record stays, the log says so, all within the pod's grace; the next run finishes."""
    node.add_driver(digest="new", grace_seconds=8)
    before = node.surface()
    run = after_unload(node, api_proxy)
    with api_proxy.outage():
        run.terminate()
        node.tree.faults()
        ended = run.wait(8).require(75)
    assert ended.lines[-1]["put_back"] is False
    assert ended.said("its record stays")
    assert node.annotation(RECORD) is not None
    node.run().require(0)
    node.wait_surface(before)
