"""Writes that are refused again and again, though nothing has changed: by an admission webhook, a proxy, a label that cannot be."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from driver_manager.controller.run import Replica
from driver_manager.controller.settings import ControllerSettings
from driver_manager.errors import Conflict
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
