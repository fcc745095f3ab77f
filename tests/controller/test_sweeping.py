"""N49: nodes that no driver is wanted on any more, in a whole fleet with a controller that leads."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from driver_manager import names
from driver_manager.controller.run import Replica
from driver_manager.controller.settings import ControllerSettings
from driver_manager.core.fleet import Kind
from driver_manager.core.healing import Why
from driver_manager.core.rollout_states import WORKING, State, state_of
from driver_manager.errors import Unreachable
from driver_manager.sim.clock import run_virtual
from driver_manager.sim.faults import Delay, Fail
from driver_manager.sim.fleetworld import OWN_NAMESPACE, PRESENT, FleetWorld
from driver_manager.sim.objects import Cascade

SETTLE = 30.0
HELPERS = (names.ROLLOUT, names.STATUS, names.INITIAL_UNSCHEDULABLE, names.UPGRADE_REQUESTED)


@contextlib.asynccontextmanager
async def led(world: FleetWorld) -> AsyncIterator[Replica]:
    """While it is entered a controller leads, and has brought all nodes to their first rest."""
    life = world.controller()
    replica = Replica(life.fleet, life.clock, ControllerSettings(lease_namespace=OWN_NAMESPACE, settle_time=SETTLE))
    task = asyncio.create_task(life.run(replica.run()))
    await asyncio.sleep(30.0)
    yield replica
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def ours(world: FleetWorld, name: str) -> set[str]:
    node = world.store.nodes[name]
    return {key for key in {**node.labels, **node.annotations} if key in (*HELPERS, names.UPGRADE_STATE)}


def total(replica: Replica) -> int:
    return sum(sums.total for sums in replica.controller.tally.groups().values())


def test_n49_a_selector_is_narrowed() -> None:
    """A node in `upgrade-done` loses its driver: after the settle time, not before, nothing is left, and it counts no more."""

    async def story() -> None:
        world = FleetWorld(1, nodes=3)
        async with led(world) as replica:
            assert world.store.nodes["gpu-1"].labels[names.UPGRADE_STATE] == State.DONE
            world.edit_node("gpu-1", labels={names.DEPLOY_DRIVER: "pre-installed"}, annotations={names.INITIAL_UNSCHEDULABLE: "true"})
            while world.driver_pods("gpu-1"):
                await asyncio.sleep(0.1)
            await asyncio.sleep(SETTLE - 1.0)
            assert names.UPGRADE_STATE in ours(world, "gpu-1")
            assert total(replica) == 2
            await asyncio.sleep(5.0)
            assert ours(world, "gpu-1") == set()
            writes = len(world.deeds("patch", "gpu-1"))
            await asyncio.sleep(10 * SETTLE)
            assert len(world.deeds("patch", "gpu-1")) == writes, "and that was all"
            assert replica.telling.healing_steps[Why.SWEPT] == 1
            world.edit_node("gpu-1", labels={names.DEPLOY_DRIVER: "true"})
            await asyncio.sleep(SETTLE)
            assert world.store.nodes["gpu-1"].labels[names.UPGRADE_STATE] == State.DONE
            assert total(replica) == 3

    run_virtual(story())


@pytest.mark.parametrize("after", [1.0, 3.0, 6.0, 9.0])
def test_n49_in_mid_upgrade(after: float) -> None:
    """A node in the middle of an upgrade loses its driver DaemonSet: our cordon goes with all the rest; an admin's stays."""

    async def story() -> None:
        world = FleetWorld(2, nodes=2, policy={"autoUpgrade": True, "maxParallelUpgrades": 0, "maxUnavailable": "100%"})
        world.edit_node("gpu-2", unschedulable=True)
        async with led(world):
            world.new_driver("two")
            await asyncio.sleep(after)
            states = {state_of(node.labels.get(names.UPGRADE_STATE)) for node in world.store.nodes.values()}
            assert states & WORKING
            world.delete_daemon_set(world.driver_set(), Cascade.BACKGROUND)
            await asyncio.sleep(3 * SETTLE)
            assert [ours(world, name) for name in world.store.nodes] == [set(), set()]
            assert [node.unschedulable for node in world.store.nodes.values()] == [False, True]

    run_virtual(story())


def test_n49_not_while_the_daemon_set_is_made_anew() -> None:
    """An operator that deletes and makes the DaemonSet within the settle time finds every node as it was; orphans count as a driver."""

    async def story() -> None:
        world = FleetWorld(3, nodes=2)
        async with led(world) as replica:
            driver = world.driver_set()
            world.delete_daemon_set(driver, Cascade.ORPHAN)
            await asyncio.sleep(5 * SETTLE)
            assert all(names.UPGRADE_STATE in ours(world, name) for name in world.store.nodes)
            for pod in world.driver_pods():
                world.delete_pod(pod, 0)
            await asyncio.sleep(SETTLE / 2)
            driver.is_deleting = False
            world.put_daemon_set(driver)
            await asyncio.sleep(5 * SETTLE)
            assert all(node.labels[names.UPGRADE_STATE] == State.DONE for node in world.store.nodes.values())
            assert replica.telling.healing_steps[Why.SWEPT] == 0

    run_virtual(story())


def test_n49_a_node_leaves_the_fleet() -> None:
    """A node loses the label that the controller selects by, and its driver: what is ours on it goes all the same."""

    async def story() -> None:
        world = FleetWorld(4, nodes=2)
        async with led(world) as replica:
            world.edit_node("gpu-1", labels={PRESENT: None, names.DEPLOY_DRIVER: None})
            await asyncio.sleep(10.0)
            assert "gpu-1" not in replica.controller.cache.nodes
            await asyncio.sleep(4 * SETTLE)
            assert ours(world, "gpu-1") == set()
            writes = len(world.deeds("patch", "gpu-1"))
            world.edit_node("gpu-2", labels={PRESENT: None})
            await asyncio.sleep(10 * SETTLE)
            assert names.UPGRADE_STATE in ours(world, "gpu-2"), "a driver is there"
            assert len(world.deeds("patch", "gpu-1")) == writes

    run_virtual(story())


def closed(world: FleetWorld) -> list[str]:
    return [name for name, node in world.store.nodes.items() if node.unschedulable]


async def begun(world: FleetWorld) -> str:
    """A new driver, until the first node is cordoned for it; gives its name."""
    world.new_driver("two")
    while not closed(world):
        await asyncio.sleep(0.1)
    return closed(world)[0]


async def is_left_in_order(world: FleetWorld, replica: Replica, name: str) -> None:
    """A node that left in mid-flow is brought to its end, is none of the fleet's after that, and a next driver is not its affair."""
    await asyncio.sleep(120.0)
    assert closed(world) == []
    assert [pod.spec.digest for pod in world.driver_pods(name)] == ["two"]
    assert name not in replica.controller.cache.nodes
    assert total(replica) == len(world.store.nodes) - 1
    writes = len(world.deeds("patch", name))
    world.new_driver("three")
    await asyncio.sleep(120.0)
    assert len(world.deeds("patch", name)) == writes


def test_n49_a_node_leaves_in_mid_upgrade() -> None:
    """A node loses the label that the controller selects by while it is upgraded: it is opened with its new driver, and then let go."""

    async def story() -> None:
        world = FleetWorld(5, nodes=2)
        async with led(world) as replica:
            name = await begun(world)
            world.edit_node(name, labels={PRESENT: None})
            await is_left_in_order(world, replica, name)

    run_virtual(story())


def test_n49_a_node_leaves_in_a_gap_of_the_watch() -> None:
    """As above where no watch tells of it, and only the next list does not have the node any more."""

    async def story() -> None:
        world = FleetWorld(6, nodes=2)
        async with led(world) as replica:
            name = await begun(world)
            world.feeds.expire(Kind.NODES)
            world.edit_node(name, labels={PRESENT: None})
            await is_left_in_order(world, replica, name)

    run_virtual(story())


def test_n49_a_node_leaves_while_the_server_does_not_answer() -> None:
    """As above where it cannot be asked at first whether the node is gone: that is asked again."""

    async def story() -> None:
        world = FleetWorld(7, nodes=2)
        async with led(world) as replica:
            name = await begun(world)
            asked = world.faults.on("node", Fail(lambda: Unreachable("no answer")), times=2)
            world.edit_node(name, labels={PRESENT: None})
            await is_left_in_order(world, replica, name)
            assert asked.acted == 2

    run_virtual(story())


def test_n49_a_node_that_comes_back_at_once_stays() -> None:
    """The label is taken off and put on again before it has been found out whether the node is gone."""

    async def story() -> None:
        world = FleetWorld(8, nodes=2)
        async with led(world) as replica:
            slow = world.faults.on("node", Delay(1.0))
            world.edit_node("gpu-1", labels={PRESENT: None})
            await asyncio.sleep(0.5)
            world.edit_node("gpu-1", labels={PRESENT: "true"})
            await asyncio.sleep(5.0)
            assert slow.acted == 1
            assert "gpu-1" in replica.controller.cache.nodes
            assert total(replica) == 2

    run_virtual(story())
