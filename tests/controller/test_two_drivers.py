"""Two driver DaemonSets that make their pods on one node (R2): nothing is deleted back and forth, and both are named."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from driver_manager.controller.run import Replica
from driver_manager.core.rollout_states import Because
from driver_manager.sim.fleetworld import FleetWorld
from driver_manager.sim.objects import DaemonSet
from tests.controller.stories import is_open, play, state, until, until_done

BOTH = "gpu-operator/nvidia-driver-daemonset, gpu-operator/second-driver"


def add_second(world: FleetWorld) -> DaemonSet:
    """A driver DaemonSet that selects the same nodes."""
    one = world.driver_set()
    spec = replace(one.spec, labels={**one.spec.labels, "app": "second-driver"})
    return world.settle(DaemonSet(namespace=one.namespace, name="second-driver", uid=world.store.uid(), spec=spec, made_for=one.made_for))


def change(world: FleetWorld, daemon_set: DaemonSet) -> None:
    """Another template of a DaemonSet."""
    world.controllers.daemon_sets.set_template(daemon_set, replace(daemon_set.spec, digest="two", image="driver:two"))


def driver_ends(world: FleetWorld) -> list[str]:
    """Driver pods that were deleted by request."""
    return [deed.target for deed in world.deeds("delete") if "driver" in deed.target]


def told(replica: Replica) -> tuple[Because, str]:
    """Why the node is where it is."""
    stay = replica.controller.stays["gpu-1"]
    return stay.because, stay.sentence


def test_a_second_driver_at_rest() -> None:
    """No node is begun, whichever of both has a new template; when one is gone the other's is rolled out."""
    world = FleetWorld(1, nodes=1)

    async def story(world: FleetWorld, replica: Replica) -> None:
        second = add_second(world)
        await asyncio.sleep(30)
        change(world, second)
        world.new_driver("two")
        await asyncio.sleep(3600)
        because, sentence = told(replica)
        assert because is Because.TWO_DRIVERS
        assert BOTH in sentence
        assert is_open(world)
        assert (driver_ends(world), world.server.evictions) == ([], [])
        world.delete_daemon_set(second)
        await until_done(world)

    play(world, story)


def test_a_second_driver_in_mid_flow() -> None:
    """It is waited for as long as for a driver; then the node fails, closed, and goes on when one of both is gone."""
    world = FleetWorld(1, nodes=1)

    async def story(world: FleetWorld, replica: Replica) -> None:
        world.behave(start_seconds=60.0)
        world.new_driver("two")
        await until(lambda: len(driver_ends(world)) == 1, "the old driver is deleted")
        second = add_second(world)
        await until(lambda: told(replica)[0] is Because.TWO_DRIVERS, "that is told")
        assert BOTH in told(replica)[1]
        await until(lambda: state(world) != "pod-restart-required", "the end of its time", 2 * 1800)
        await asyncio.sleep(3600)
        assert not is_open(world)
        assert len(driver_ends(world)) == 1
        world.delete_daemon_set(second)
        await until_done(world)
        assert is_open(world)

    play(world, story)
