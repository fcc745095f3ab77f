"""Starts are granted in the Lease before they are written, and only who has the Lease writes (R7, R10, decision 34)."""

from __future__ import annotations

import asyncio
import itertools
import json
from dataclasses import replace

import pytest

from driver_manager.controller.election import read_waiting, written_waiting
from driver_manager.controller.run import Replica
from driver_manager.controller.settings import ControllerSettings
from driver_manager.core.fleet import LeaseView
from driver_manager.core.rollout_states import Because, State
from driver_manager.core.snapshot import ChangeKind
from driver_manager.errors import TakenOver, Unreachable
from driver_manager.names import DRIVER_APP, GRANTS, PARKED, UPGRADE_STATE, WAITING
from driver_manager.sim.clock import run_virtual
from driver_manager.sim.faults import Delay, Fail, Hang
from driver_manager.sim.fleetworld import OWN_NAMESPACE, POLICY, FleetWorld
from driver_manager.sim.gpunodes import Fate
from driver_manager.sim.objects import Node
from driver_manager.sim.store import Object
from tests.controller.stories import play, until, until_done

LEASE = f"{OWN_NAMESPACE}/driver-manager-controller"


def granted(world: FleetWorld) -> list[str]:
    """The nodes that the Lease names."""
    text = world.store.leases[LEASE].annotations.get(GRANTS)
    return json.loads(text) if text else []


def relabel(world: FleetWorld, name: str, **labels: str) -> None:
    """Somebody changes labels of a node."""
    node = world.store.nodes[name]
    node.labels = {**node.labels, **labels}
    world.store.node_written(node)


async def touch(world: FleetWorld) -> None:
    """Somebody changes a label of the node again and again, as feature discovery does."""
    for number in itertools.count():
        relabel(world, "gpu-1", touched=str(number))
        await asyncio.sleep(0.1)


def test_no_node_is_begun_before_the_lease_says_so() -> None:
    """R7: while the write of a grant is slow, or fails, nothing else that happens to the node has it cordoned."""
    world = FleetWorld(1, nodes=1)
    open_until_granted: list[bool] = []

    def look(one: Object, change: ChangeKind) -> None:
        if isinstance(one, Node) and one.unschedulable and not open_until_granted:
            open_until_granted.append("gpu-1" in granted(world))

    async def story(world: FleetWorld, _: Replica) -> None:
        world.on_change(look)
        touching = asyncio.create_task(touch(world))
        world.faults.on("write_lease", Delay(2.0), times=2)
        world.faults.on("write_lease", Fail(lambda: Unreachable("no answer")), times=1)
        world.new_driver("two")
        await asyncio.sleep(20)
        touching.cancel()
        await until_done(world)

    play(world, story)
    assert open_until_granted == [True]


def test_a_node_that_has_lost_its_turn_meanwhile_is_not_begun() -> None:
    """R7: while the pods of a node are looked at, it is written and another one comes first: it waits for that one's end."""
    world = FleetWorld(1, nodes=2, policy={"autoUpgrade": True, "maxParallelUpgrades": 1, "maxUnavailable": "100%"})
    most: list[int] = []

    async def story(world: FleetWorld, _: Replica) -> None:
        world.on_change(lambda one, change: most.append(len(world.cordoned)))
        relabel(world, "gpu-1", order="1")
        relabel(world, "gpu-2", order="2")
        slow = world.faults.on("pods_on", Delay(3.0), where=lambda call: call.args["node"] == "gpu-1")
        world.new_driver("two")
        await until(lambda: bool(slow.acted), "the look at the pods")
        relabel(world, "gpu-1", order="3", **{PARKED: "true"})  # which is left over, and taken off
        await until_done(world)

    play(world, story, order_key="order")
    assert max(most) == 1
    assert [deed.node_name for deed in world.deeds("delete") if DRIVER_APP in deed.target] == ["gpu-2", "gpu-1"]


def test_who_could_not_renew_evicts_nobody_and_says_nothing() -> None:
    """R10: a leader whose deadline is over and that has not noticed yet makes no write of any kind, though there is cause for some."""
    world = FleetWorld(1, nodes=2, policy={"autoUpgrade": True, "maxUnavailable": "100%"})

    async def story() -> None:
        life = world.controller()
        replica = Replica(life.fleet, life.clock, ControllerSettings(lease_namespace=OWN_NAMESPACE, retry_period=9.9))
        task = asyncio.create_task(replica.run())
        await asyncio.sleep(3)
        world.new_driver("two")
        unseen = world.faults.on("pods_on", Fail(lambda: Unreachable("no answer")), skip=1, times=3)  # every five seconds
        await until(lambda: "gpu-1" in world.cordoned, "the first node is begun")
        world.faults.on("write_lease", Fail(lambda: Unreachable("no answer")), times=None)
        await until(lambda: not replica.election.still_leading(), "the end of its deadline")
        assert replica.election.is_leading
        assert unseen.acted == 3, "whom to evict is known next time"
        world.set_policy("ClusterPolicy", POLICY, conditions={})
        made, over = len(world.store.deeds), asyncio.get_running_loop().time()
        with pytest.raises(TakenOver):
            await task
        assert asyncio.get_running_loop().time() - over > 5, "time enough for both"
        assert [deed for deed in world.store.deeds[made:] if deed.what != "event"] == []

    run_virtual(story())


def test_who_waits_for_another_one_of_its_gang_is_told() -> None:
    """A node that cannot be begun because of its gang alone is named, with the one that it waits for, as long as that is so."""
    world = FleetWorld(1, nodes=2, policy={"autoUpgrade": True, "maxParallelUpgrades": 0, "maxUnavailable": "100%"})

    async def story(world: FleetWorld, replica: Replica) -> None:
        for name in world.store.nodes:
            relabel(world, name, gang="a")
        world.new_driver("two")
        await until(lambda: "gpu-1" in world.cordoned, "the first node is begun")
        await asyncio.sleep(1)
        told = json.loads(world.store.leases[LEASE].annotations.get(WAITING, "{}"))
        assert told == {"ClusterPolicy/cluster-policy": "gpu-2 waits: nodes of its gang a are in work, or closed: gpu-1"}
        stay = replica.controller.stays["gpu-2"]
        assert (stay.because, stay.sentence) == (Because.GANG_BUSY, "nodes of its gang a are in work, or closed: gpu-1")
        await until_done(world)
        await asyncio.sleep(5)
        assert WAITING not in world.store.leases[LEASE].annotations

    play(world, story, gang_label="gang")


def test_who_waits_for_a_driver_that_fails_says_so() -> None:
    """After too many failures with one driver each node that waits for it has that as its reason; another driver ends the wait."""
    world = FleetWorld(1, nodes=4, policy={"autoUpgrade": True, "maxParallelUpgrades": 1, "maxUnavailable": "100%"})

    async def story(world: FleetWorld, replica: Replica) -> None:
        world.behave(driver=Fate.CRASHES)
        world.new_driver("bad")
        await until(lambda: world.store.nodes["gpu-1"].labels.get(UPGRADE_STATE) == State.FAILED, "the first has failed", 4000)
        await asyncio.sleep(5)
        waiting = {name: stay for name, stay in replica.controller.stays.items() if name != "gpu-1"}
        assert {stay.because for stay in waiting.values()} == {Because.PAUSED}
        assert all("1 nodes in a row have failed with this driver (gpu-1)" in stay.sentence for stay in waiting.values())
        world.behave(driver=Fate.READY)
        world.new_driver("two")
        await until_done(world)

    play(world, story, most_failures=1)


@pytest.mark.parametrize("text", ["[" * 100_000, "nonsense", "{}", '[1, null, "gpu-9", "gpu-1"]', '["\\ud800"]'])
def test_a_lease_that_a_person_has_written_into(text: str) -> None:
    """Issue 6, 7: grants that are none, of no node or of one that needs none, and the most transitions that a Lease can have."""
    world = FleetWorld(1, nodes=2)

    async def story() -> None:
        lease = LeaseView(namespace=OWN_NAMESPACE, name="driver-manager-controller", annotations={GRANTS: text}, transitions=2**31 - 1)
        await world.client().write_lease(lease)
        life = world.controller()
        task = asyncio.create_task(Replica(life.fleet, life.clock, ControllerSettings(lease_namespace=OWN_NAMESPACE)).run())
        await asyncio.sleep(5)
        world.new_driver("two")
        await until_done(world)
        await asyncio.sleep(5)
        assert world.store.leases[LEASE].transitions == 2**31 - 1
        assert GRANTS not in world.store.leases[LEASE].annotations
        task.cancel()
        await asyncio.wait({task})

    run_virtual(story())


def test_many_groups_that_wait() -> None:
    """What is said of groups stays JSON when there are too many of them for the annotation."""
    waiting = {f"NVIDIADriver/pool-{number:03}": "maxParallelUpgrades is 1, and in work are gpu-1" for number in range(100)}
    text = written_waiting(waiting)
    assert text is not None
    assert len(text) <= 2000
    said = read_waiting(LeaseView(namespace="n", name="l", annotations={WAITING: text}))
    assert len(said) > 20
    assert said.items() <= waiting.items()
    assert written_waiting({}) is None


@pytest.mark.parametrize("seconds", [1, 2**31 - 1])
def test_a_lease_whose_duration_a_person_has_written(seconds: int) -> None:
    """R10: beside a leader that lives nobody begins to lead for it; one that is gone is followed in ten minutes at most."""
    world = FleetWorld(1, nodes=1)

    async def story() -> None:
        lives = [world.controller() for _ in range(2)]
        slow, quick = ControllerSettings(identity="one", retry_period=4.0), ControllerSettings(identity="two", retry_period=0.5)
        one, two = (Replica(life.fleet, life.clock, each) for life, each in zip(lives, (slow, quick), strict=True))
        tasks = [asyncio.create_task(one.run())]
        await asyncio.sleep(5)
        tasks.append(asyncio.create_task(two.run()))
        for _ in range(10):
            lease = await world.client().lease(OWN_NAMESPACE, "driver-manager-controller")
            await world.client().write_lease(replace(lease, duration_seconds=seconds))
            await asyncio.sleep(4)
            assert one.election.still_leading()
            assert not two.election.is_leading
        lease = await world.client().lease(OWN_NAMESPACE, "driver-manager-controller")
        await world.client().write_lease(replace(lease, duration_seconds=seconds))
        world.faults.on("write_lease", Hang(), where=lambda call: call.args["holder"] == "one", times=None)
        await until(lambda: two.election.is_leading, "the other one leads", 620)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run_virtual(story())
