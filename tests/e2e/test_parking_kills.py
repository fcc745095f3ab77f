"""Parking through deaths of the controller, and through what others do to DaemonSets and policies while a node is parked."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from tests.e2e.conftest import ExporterMaker
from tests.e2e.exporters import Exporter, shipped
from tests.e2e.fleet import SIM, GpuFleet
from tests.e2e.fleetwatch import watched
from tests.e2e.parkwatch import PARKED, OtherUsers, assert_parked_through, is_parked, surface
from tests.e2e.test_fleet_kills import WRITES, Write, bury
from tests.kube.controlplane import STRATEGIC
from tests.kube.manifests import path
from tests.kube.proxy import ApiProxy, Rule

pytestmark = [pytest.mark.kube, pytest.mark.timeout(300)]
DONE = "upgrade-done"


# Killed at writes ---------------------------------------------------------------------------------------------------


def let_go(exporter: Exporter) -> Write:
    """The eviction of a pod that has waited on its gate, when its node is open."""

    def rule(proxy: ApiProxy, node: str) -> Rule:
        pod = exporter.fleet.wait(exporter.gated, "a gated pod")[0]
        return proxy.on("create", f"/namespaces/{exporter.namespace}/pods/{pod['metadata']['name']}/eviction$")

    return Write("a gated pod is let go", rule)


def roll_out_with_kills(exporter: Exporter, proxy: ApiProxy, writes: Sequence[Write], hold: Sequence[Callable[[Rule], Rule]]) -> int:
    """One roll-out in which the controller is killed at each of these writes, one after another; gives how many events were held to it."""
    fleet, others = exporter.fleet, OtherUsers(exporter.fleet, len(exporter.fleet.names))
    replica = fleet.start(proxy=proxy)
    fleet.wait_states(DONE)
    before, mark = surface(fleet), fleet.cp.audit_mark()
    there = others.uids()
    with watched(fleet) as story, fleet.cp.record(exporter.pods_path) as pods, others.record() as users:
        for number, write in enumerate(writes):
            held = hold[number % len(hold)](write.rule(proxy, f"{fleet.namespace}-n[0-9]+"))
            if number == 0:
                fleet.set_driver("2")
            held.wait_hit(60)
            bury(replica, proxy)
            replica = fleet.start(proxy=proxy)
        exporter.wait_rolled_out("2", 120)
        fleet.wait(lambda: surface(fleet) == before, "the nodes to be as before")
        story.assert_budget(parallel=1, unavailable=1)
        story.assert_replaced_once()
        events = assert_parked_through(story, pods, exporter.owner, users)
    evicted = fleet.evicted(mark)
    assert len(evicted) == len(set(evicted)), "nobody is evicted twice"
    assert not there & others.uids(), "all had to go once"
    assert not any(is_parked(node, exporter.owner) for node in fleet.nodes().values())
    return events


@dataclass(frozen=True, slots=True)
class Size:
    """Of a roll-out with kills."""

    nodes: int
    way: str
    writes: tuple[str, ...]
    """Names; a pod that is let go always is the last one, where there are gates."""
    hold: tuple[Callable[[Rule], Rule], ...]
    """Whether the write that is killed at was done; taken in turn."""


EVERY = tuple(write.name for write in WRITES)
FULL = {
    f"ten-nodes-{way}-{name}": Size(10, way, EVERY, (hold,))
    for way in ("gate", "deny")
    for name, hold in (("done", Rule.hold_answer), ("not-done", Rule.hold_request))
}
SMALL = Size(3, "gate", ("the cordon", "an eviction"), (Rule.hold_answer, Rule.hold_request, Rule.hold_request))
SIZES = [pytest.param(SMALL, id="three-nodes"), *(pytest.param(size, id=name, marks=pytest.mark.deep) for name, size in FULL.items())]


@pytest.mark.parametrize("size", SIZES)
def test_killed_while_parked(exporter_on: ExporterMaker, api_proxy: ApiProxy, size: Size) -> None:
    """Decision 44, N50: killed at writes, also between un-park and ungate: the next one repeats nothing, and keeps all promises."""
    exporter = exporter_on(size.nodes)
    exporter.make()
    writes = [write for write in WRITES if write.name in size.writes] + ([let_go(exporter)] if size.way == "gate" else [])
    with shipped(exporter.fleet, size.way):
        began = time.monotonic()
        events = roll_out_with_kills(exporter, api_proxy, writes, size.hold)
    print(f"{size.nodes} nodes, {size.way}: {len(writes)} kills, {events} events, {time.monotonic() - began:.1f} s")


# What goes meanwhile ------------------------------------------------------------------------------------------------


def test_what_goes_while_a_node_is_parked(exporter_on: ExporterMaker) -> None:
    """Decisions 44, 45: DaemonSets deleted or updated, policies deleted while parked: nobody stays gated, nothing is parked for ever."""
    exporter = exporter_on(1)
    fleet, (name,) = exporter.fleet, exporter.fleet.names
    updated, deleted, left = (Exporter(fleet, exporter.namespace, each) for each in ("updated", "deleted", "left"))
    for each in (exporter, updated, deleted, left):
        each.make(is_rolling=each is updated)
    policies = shipped(fleet, "gate")
    with policies:
        fleet.start()
        fleet.wait_states(DONE)
        before = surface(fleet)
        park_all(fleet, "2", [exporter, updated, deleted, left])
        fleet.cp.delete(deleted.path)
        fleet.cp.delete(left.path, {"propagationPolicy": "Orphan"})
        fleet.cp.patch(updated.path, {"spec": {"template": {"spec": {"containers": [{"name": "main", "image": "2"}]}}}}, kind=STRATEGIC)
        fleet.wait(lambda: not fleet.cp.exists(left.path) and not deleted.pods(), "both to be gone")
        fleet.wait(lambda: not left.pods(), "the gated pod that nobody owns to be let go")
        open_again(fleet, "2")
        for each in (exporter, updated):
            each.wait_everywhere()
        assert {pod["spec"]["containers"][0]["image"] for pod in updated.pods()} == {"2"}
        fleet.wait(lambda: surface(fleet) == before, "the node to be as before")
        park_all(fleet, "3", [exporter, updated])
    assert not any(fleet.cp.exists(where) for where in map(path, policies.objects))
    open_again(fleet, "3")
    for each in (exporter, updated):
        each.wait_everywhere()
    fleet.wait(lambda: surface(fleet) == before, "the node to be as before")
    assert PARKED not in fleet.nodes()[name]["metadata"]["labels"]


def park_all(fleet: GpuFleet, digest: str, exporters: Sequence[Exporter]) -> None:
    """Brings the only node of a fleet to where it waits for its new driver, with all exporters parked."""
    fleet.change(fleet.names[0], annotations={f"{SIM}ready": "never"})
    fleet.set_driver(digest)
    fleet.wait(lambda: fleet.digests() == {digest} and all(each.gated() for each in exporters), "the node to be parked for all")
    assert fleet.nodes()[fleet.names[0]]["metadata"]["annotations"][PARKED].count("/") == len(exporters)


def open_again(fleet: GpuFleet, digest: str) -> None:
    """Lets the new driver come up, and waits until the node is opened."""
    fleet.change(fleet.names[0], annotations={f"{SIM}ready": None})
    fleet.wait_states(DONE)
    fleet.wait_whole()
    assert fleet.digests() == {digest}
