"""N49: nodes that no driver is wanted on any more, in a whole fleet with a controller that leads."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from driver_manager import names
from driver_manager.controller.run import Replica
from driver_manager.controller.settings import ControllerSettings
from driver_manager.core.healing import Why
from driver_manager.core.rollout_states import WORKING, State, state_of
from driver_manager.sim.clock import run_virtual
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
