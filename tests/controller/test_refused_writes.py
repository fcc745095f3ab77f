"""Requests that are refused again and again, though nothing has changed: by an admission webhook, or by a proxy."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from driver_manager.controller.run import Replica
from driver_manager.controller.settings import ControllerSettings
from driver_manager.errors import Conflict, NotFound
from driver_manager.names import GRANTS, UPGRADE_STATE
from driver_manager.sim.clock import run_virtual
from driver_manager.sim.faults import Fail
from driver_manager.sim.fleetworld import OWN_NAMESPACE, FleetWorld
from driver_manager.sim.objects import PodSpec
from tests.controller.stories import play, until, until_done


def conflict() -> Conflict:
    """As an admission webhook can answer."""
    return Conflict('admission webhook "x" denied the request: come back later')


def test_a_conflict_with_nobody() -> None:
    """A write that is refused with 409 though nobody has written to the node is tried every two seconds, and not all the time."""
    world = FleetWorld(1, nodes=1)

    async def story(world: FleetWorld, _: Replica) -> None:
        refused = world.faults.on("patch_node", Fail(conflict), times=1000)
        world.new_driver("two")
        await asyncio.sleep(60)
        assert 20 < refused.acted < 40
        refused.times = refused.acted
        await until_done(world)

    play(world, story)


def test_a_conflict_with_nobody_about_an_inherited_grant() -> None:
    """R7: where a predecessor's grant is taken back by a write to the node, the same holds."""
    world = FleetWorld(1, nodes=1)

    async def story() -> None:
        life = world.controller()
        task = asyncio.create_task(Replica(life.fleet, life.clock, ControllerSettings(lease_namespace=OWN_NAMESPACE)).run())
        await asyncio.sleep(5)
        task.cancel()
        await asyncio.wait({task})
        node = world.store.nodes["gpu-1"]
        node.labels = {**node.labels, UPGRADE_STATE: "upgrade-required"}
        world.store.node_written(node)
        world.add_pod("by-hand", PodSpec(runtime_class="nvidia"), node="gpu-1")
        world.new_driver("two")
        lease = await world.client().lease(OWN_NAMESPACE, "driver-manager-controller")
        await world.client().write_lease(replace(lease, annotations={GRANTS: '["gpu-1"]'}))
        refused = world.faults.on("patch_node", Fail(conflict), times=1000)
        life = world.controller()
        task = asyncio.create_task(Replica(life.fleet, life.clock, ControllerSettings(lease_namespace=OWN_NAMESPACE)).run())
        await asyncio.sleep(60)
        assert 10 < refused.acted < 40
        refused.times = refused.acted
        await until(lambda: GRANTS not in world.store.leases[f"{OWN_NAMESPACE}/driver-manager-controller"].annotations, "no grant any more")
        task.cancel()
        await asyncio.wait({task})

    run_virtual(story())


def test_a_node_that_is_only_said_to_be_gone() -> None:
    """R7: while answers say that a node is not there, and the watch does not, it keeps its slot; then it is done like all others."""
    world = FleetWorld(1, nodes=2, policy={"autoUpgrade": True, "maxParallelUpgrades": 1, "maxUnavailable": "100%"})

    async def story(world: FleetWorld, replica: Replica) -> None:
        world.new_driver("two")
        await until(lambda: world.cordoned == {"gpu-1"}, "the first node is begun")
        rules = [world.faults.on(call, Fail(lambda: NotFound('nodes "gpu-1" not found')), times=1000) for call in ("patch_node", "node")]
        await asyncio.sleep(60)
        assert "gpu-1" in replica.controller.cache.nodes
        assert world.cordoned == {"gpu-1"}
        assert 10 < rules[0].acted < 40
        for rule in rules:
            rule.times = rule.acted
        await until_done(world)

    play(world, story)
