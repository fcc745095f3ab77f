"""Replicas of the controller that are killed, stopped, or lose their Lease, between and in the middle of writes ."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.e2e.command import Running
from tests.e2e.conftest import FleetMaker
from tests.e2e.fleet import GRANTS, LEASE, STATE, GpuFleet
from tests.e2e.fleetwatch import Story, watched
from tests.kube.proxy import ApiProxy, Rule

pytestmark = [pytest.mark.kube, pytest.mark.timeout(300)]
DONE = "upgrade-done"
QUICK = {"LEASE_DURATION": "5", "RENEW_DEADLINE": "3500ms", "RETRY_PERIOD": "500ms", "REQUEST_TIMEOUT": "1400ms"}


def to_state(state: str) -> Callable[[ApiProxy, str], Rule]:
    """The first write that brings a node to a state."""
    return lambda proxy, node: proxy.on("patch", f"/nodes/{node}$", body=f'{STATE}": ?"{state}"')


@dataclass(frozen=True, slots=True)
class Write:
    """One kind of write of a roll-out."""

    name: str
    rule: Callable[[ApiProxy, str], Rule]


WRITES = (
    Write("the driver is outdated", to_state("upgrade-required")),
    Write("the grant", lambda proxy, node: proxy.on("update", f"/leases/{LEASE}$", body=f"{GRANTS}[^}}]*{node}")),
    Write("the cordon", to_state("pod-deletion-required")),
    Write("an eviction", lambda proxy, node: proxy.on("create", "/eviction$")),
    Write("the node is free", to_state("pod-restart-required")),
    Write("the driver pod's deletion", lambda proxy, node: proxy.on("delete", "/pods/")),
    Write("the new driver is up", to_state("validation-required")),
    Write("the end", to_state(DONE)),
)
"""In the order in which they come."""


def play_rounds(fleet: GpuFleet, proxy: ApiProxy, hold: Callable[[Rule], Rule]) -> None:
    """One roll-out for each kind of write, with a SIGKILL at it, and what has to be so after each."""
    before = fleet.surface()
    replica = fleet.start(proxy=proxy)
    for number, write in enumerate(WRITES):
        mark, training, rule = fleet.cp.audit_mark(), fleet.training(), write.rule
        with watched(fleet) as story:
            held = hold(rule(proxy, fleet.names[0]))
            fleet.set_driver(f"round-{number}")
            held.wait_hit(60)
            bury(replica, proxy)
            replica = fleet.start(proxy=proxy)
            wait_all_new(fleet, story, write.name)
            fleet.wait(lambda: fleet.surface() == before, f"the nodes to be as before after a kill at {write.name}")
            story.assert_budget(parallel=1, unavailable=1)
            story.assert_replaced_once()
        assert set(fleet.evicted(mark)) == training, write.name
        assert len(fleet.evicted(mark)) == len(training), f"no pod is evicted twice: {write.name}"
        assert len(fleet.deleted(mark)) == len(fleet.names), write.name
        for index in range(len(fleet.names)):
            fleet.wait_pods(f"train-{index}", 2)


def bury(replica: Running, proxy: ApiProxy) -> None:
    """SIGKILL; what the proxy holds never reaches the server, nor the replica."""
    replica.kill()
    proxy.cut()
    proxy.clear()


def wait_all_new(fleet: GpuFleet, story: Story, what: str) -> None:
    """Waits until every node has had its new driver and is done."""

    def is_so() -> bool:
        uids = story.driver_uids()
        return all(len(uids.get(name, ())) == 2 for name in fleet.names) and set(fleet.states().values()) == {DONE}

    fleet.wait(is_so, f"the end of the roll-out with a kill at: {what}; {fleet.states()}")
    fleet.wait_whole()


@pytest.fixture
def two(fleet: FleetMaker) -> GpuFleet:
    """Two nodes of quick lives with two GPU pods each, of which one is done about at a time."""
    made = fleet(2, gpus=2, start_after="200ms", stop_after="200ms", devices_after="300ms")
    for number, name in enumerate(made.names):
        made.add_training(2, name=f"train-{number}", node=name)
    replica = made.start()
    made.wait_states(DONE)
    made.stop(replica).require(0)
    return made


@pytest.mark.parametrize(
    "hold", [pytest.param(Rule.hold_answer, id="done"), pytest.param(Rule.hold_request, id="not-done", marks=pytest.mark.deep)]
)
def test_killed_at_every_kind_of_write(two: GpuFleet, api_proxy: ApiProxy, hold: Callable[[Rule], Rule]) -> None:
    """N50, R7: whether the write was done or not, the next life ends the roll-out and repeats nothing."""
    play_rounds(two, api_proxy, hold)


def test_another_driver_while_nobody_leads(two: GpuFleet, api_proxy: ApiProxy) -> None:
    """N50: wanted driver and limits change between kill and restart: both nodes get the newest, within the new limits."""
    replica = two.start(proxy=api_proxy)
    with watched(two) as story:
        held = to_state("validation-required")(api_proxy, two.names[0]).hold_request()
        two.set_driver("2")
        held.wait_hit(60)
        bury(replica, api_proxy)
        two.set_driver("3")
        two.policy |= {"maxParallelUpgrades": 2}
        two.start()
        two.wait(lambda: two.digests() == {"3"}, "the newest driver on both nodes")
        two.wait_states(DONE)
        story.assert_budget(parallel=2, unavailable=2)
        assert sorted(len(uids) for uids in story.driver_uids().values()) == [2, 3]


def test_lease_lost_in_the_middle(two: GpuFleet, api_proxy: ApiProxy) -> None:
    """N50, R10: a leader that cannot renew stops writing and ends with 75, the other one finishes; nothing is done twice."""
    first = two.start(proxy=api_proxy, name="first", settings=QUICK)
    two.wait_leader("first")
    mark, training = two.cp.audit_mark(), two.training()
    with watched(two) as story:
        freed = to_state("pod-restart-required")(api_proxy, two.names[0]).hold_answer()
        two.set_driver("2")
        freed.wait_hit(60)
        second = two.start(name="second", settings=QUICK)
        api_proxy.on("update", "/leases/", times=None).refuse()
        first.wait(40).require(75)
        wait_all_new(two, story, "a lost Lease")
        story.assert_budget(parallel=1, unavailable=1)
        story.assert_replaced_once()
    assert two.leader() == "second"
    assert sorted(two.evicted(mark)) == sorted(training)
    two.stop(second).require(0)
    assert two.leader() == "", "a leader that is told to end gives the Lease up"


@pytest.mark.parametrize("is_sent", [True, False], ids=["the-write-is-under-way", "the-write-is-not-sent-yet"])
def test_stopped_between_grant_and_write(two: GpuFleet, api_proxy: ApiProxy, is_sent: bool) -> None:
    """N50, R7, R10: a leader is stopped between grant and cordon; its late write is refused or never sent, the budget holds."""
    first = two.start(proxy=api_proxy, name="first", settings=QUICK)
    two.wait_leader("first")
    with watched(two) as story:
        cordon = to_state("pod-deletion-required")(api_proxy, two.names[0])
        grant = WRITES[1].rule(api_proxy, two.names[0])
        held = cordon.hold_request() if is_sent else grant.hold_answer()
        two.set_driver("2")
        held.wait_hit(60)
        first.process.send_signal(signal.SIGSTOP)
        two.start(name="second", settings=QUICK)
        assert two.names[0] in two.lease()["metadata"]["annotations"][GRANTS]
        two.wait_leader("second")
        two.wait(lambda: two.states()[two.names[0]] != "upgrade-required", "the second to begin the node")
        writes = len(api_proxy.requests("patch", "/nodes/"))
        held.release()
        two.wait(lambda: held.obeyed[0].answered_at, "the late answer")
        first.process.send_signal(signal.SIGCONT)
        first.wait(40).require(75)
        wait_all_new(two, story, "a stopped leader")
        story.assert_budget(parallel=1, unavailable=1)
        story.assert_replaced_once()
    if is_sent:
        assert held.obeyed[0].status == 409
    assert len(api_proxy.requests("patch", "/nodes/")) == writes, "who has lost the Lease begins no write"
