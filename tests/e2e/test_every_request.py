"""Ended at every request of a whole run: the place where a run is stopped is never one that somebody thought of."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from tests.e2e.command import Running
from tests.e2e.world import RECORD, StockNode
from tests.kube.proxy import ApiProxy, Rule

pytestmark = [pytest.mark.kube, pytest.mark.deep, pytest.mark.timeout(600)]
MOST = 40
"""Requests of one run; it makes about 16."""


def small_node(node: StockNode) -> StockNode:
    """A driver, an operand and two GPU pods that end at once."""
    node.add_driver(digest="new")
    node.add_operands(only=("device-plugin",), stop_after="0")
    node.add_training(2, grace_seconds=1, stop_after="0")
    return node


def rest(node: StockNode) -> None:
    """A loaded host again, and all pods back."""
    node.reload_host()
    node.cp.wait_for(lambda: len(node.ready_pods(["train"])) == 2, "the pods to be back")
    node.cp.wait_for(lambda: node.ready_pods(["nvidia-device-plugin-daemonset"]), "the operand to be back")


def stop_at_each(node: StockNode, proxy: ApiProxy, end: Callable[[Running], None], first_done: int) -> int:
    """Ends a run at its first request, another at its second and so on; gives how many requests there were.

    Args:
        node: the node.
        proxy: where the requests are held.
        end: how a run is ended.
        first_done: 0 or 1; every other request, from this one on, is done by the server and its answer held, the rest never gets there.
    """
    before = node.surface()
    for number in range(1, MOST):
        rule = proxy.on("*", "", nth=number)
        rule = rule.hold_answer() if number % 2 == first_done else rule.hold_request()
        mark, pods = node.cp.audit_mark(), node.uids("train")
        run = node.start("uninstall_driver", proxy=proxy)
        if not is_reached(node, rule, run):
            run.wait().require(0)
            proxy.clear()
            rest(node)
            return number - 1
        end(run)
        if run.process.poll() is not None:
            proxy.cut()  # what it had sent and the proxy holds never reaches the server
        proxy.clear()
        finish(node, run)
        node.wait_surface(before)
        assert node.annotation(RECORD) is None
        evicted = node.evicted(mark)
        assert len(evicted) == len(set(evicted)), f"request {number}"
        assert set(evicted) <= set(pods), f"request {number}"
        rest(node)
    raise AssertionError("a run of so many requests?")


def is_reached(node: StockNode, rule: Rule, run: Running) -> bool:
    """Waits until the rule has met its request, or the run is over without it."""
    node.cp.wait_for(lambda: rule.obeyed or run.process.poll() is not None, "the request or the end", 60)
    return bool(rule.obeyed)


def finish(node: StockNode, run: Running) -> None:
    """A run that was killed is followed by another; one that was told to end has put everything back, or was done."""
    code = run.wait(30).code
    if code == -signal.SIGKILL:
        node.run().require(0)
    else:
        assert code in (75, 0), run.error_text()[-3000:]


def test_told_to_end_at_every_request(node: StockNode, api_proxy: ApiProxy) -> None:
    """R3, R4: a SIGTERM at any request, before or after it is done, ends with the node exactly as it was and nobody evicted twice."""
    small_node(node)
    for first_done in (0, 1):  # so that each request is met in both of its ways
        assert stop_at_each(node, api_proxy, Running.terminate, first_done) >= 10


def test_killed_at_every_request(node: StockNode, api_proxy: ApiProxy) -> None:
    """R3, R4: a SIGKILL at any request, and another run: the node is exactly as it was, and nobody is evicted twice."""
    small_node(node)
    for first_done in (0, 1):
        assert stop_at_each(node, api_proxy, Running.kill, first_done) >= 10
