"""Moments of a run at which it can be stopped: each brings a run that was started to a place, and keeps it there."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from tests.e2e.command import Running
from tests.e2e.world import StockNode
from tests.kube.proxy import ApiProxy

STILL_SECONDS = 0.5

Arrive = Callable[[StockNode, ApiProxy], Running]


@dataclass(frozen=True, slots=True)
class Moment:
    """One place to stop a run at."""

    name: str
    arrive: Arrive
    """Starts a run, and returns when it is there."""
    is_unloaded: bool = False
    """Whether the driver is out of the kernel by then."""


def after_pause(node: StockNode, proxy: ApiProxy) -> Running:
    """The pause patch is done, and the run does not know it yet."""
    rule = proxy.on("patch", rf"/nodes/{node.name}$").hold_answer()
    run = node.start("uninstall_driver", proxy=proxy)
    rule.wait_hit()
    return run


def in_mid_eviction(node: StockNode, proxy: ApiProxy) -> Running:
    """One pod is evicted and its eviction's answer held; another's eviction has not reached the server."""
    accepted = proxy.on("create", r"/eviction$", nth=1).hold_answer()
    asked = proxy.on("create", r"/eviction$", nth=1).hold_request()
    run = node.start("uninstall_driver", proxy=proxy)
    accepted.wait_hit()
    asked.wait_hit()
    return run


def before_unload(node: StockNode, proxy: ApiProxy) -> Running:
    """The first module is about to go: the record says unloading, state file and markers are removed."""
    node.tree.faults({"call": "delete_module", "hold": True})
    run = node.start("uninstall_driver", proxy=proxy)
    node.wait_held("delete_module")
    return run


def after_unload(node: StockNode, proxy: ApiProxy) -> Running:
    """All modules are out, the driver root is still mounted."""
    node.tree.faults({"call": "umount2", "hold": True})
    run = node.start("uninstall_driver", proxy=proxy)
    node.wait_held("umount2")
    return run


def before_restore(node: StockNode, proxy: ApiProxy) -> Running:
    """All of the host's work is done, and the restore patch is on its way."""
    run = after_unload(node, proxy)
    rule = proxy.on("patch", rf"/nodes/{node.name}$").hold_request()
    node.tree.faults()
    rule.wait_hit()
    return run


def after_restore(node: StockNode, proxy: ApiProxy) -> Running:
    """The restore patch is done, and the run does not know it yet."""
    run = after_unload(node, proxy)
    rule = proxy.on("patch", rf"/nodes/{node.name}$").hold_answer()
    node.tree.faults()
    rule.wait_hit()
    return run


MOMENTS = (
    Moment("after the pause patch", after_pause),
    Moment("in mid-eviction", in_mid_eviction),
    Moment("before the unload", before_unload),
    Moment("after the unload", after_unload, is_unloaded=True),
    Moment("before the restore", before_restore, is_unloaded=True),
    Moment("after the restore", after_restore, is_unloaded=True),
)


def let_go(node: StockNode, proxy: ApiProxy) -> None:
    """Takes all obstacles out of the way of a run that lives."""
    node.tree.faults()
    proxy.clear()


def wait_still(node: StockNode) -> None:
    """Waits until the server is through with what had reached it: its log tells of a request at that one's end only."""
    mark, seen, until = node.cp.audit_mark(), 0, time.monotonic() + STILL_SECONDS
    while time.monotonic() < until:
        if (now := len(node.audit(mark))) != seen:
            seen, until = now, time.monotonic() + STILL_SECONDS
        time.sleep(0.05)


def bury(node: StockNode, proxy: ApiProxy) -> None:
    """Takes all obstacles away after a run was killed; what it had sent and the proxy holds never reaches the server."""
    node.tree.faults()
    proxy.cut()
    proxy.clear()
    wait_still(node)
