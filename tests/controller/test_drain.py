"""A drain of the whole node, where taking the users of the driver off did not do."""

from __future__ import annotations

from driver_manager.controller.run import Replica
from driver_manager.core.rollout_states import State
from driver_manager.sim.fleetworld import FleetWorld
from driver_manager.sim.objects import HOSTNAME, PodSpec
from tests.controller.stories import play, until_done

DRAINING = {
    "autoUpgrade": True,
    "maxUnavailable": "100%",
    "maxParallelUpgrades": 0,
    "drain": {"enable": True, "force": True, "podSelector": "tier=web"},
}


def drained(world: FleetWorld) -> set[str]:
    """Nodes that were in drain-required."""
    return {deed.node_name for deed in world.deeds("patch") if State.DRAIN in str(deed.detail)}


def evicted(world: FleetWorld) -> set[str]:
    """Names of the pods that were evicted."""
    return {deed.target.split("/")[1] for deed in world.deeds("evict")}


def test_nodes_are_drained_where_pods_may_not_simply_go() -> None:
    """A pod without a controller keeps a node from being freed; the drain's force and selector say what goes, on each node by itself."""
    world = FleetWorld(1, nodes=3, gpu_pods=0, policy=DRAINING)
    for name in ("gpu-1", "gpu-2"):
        world.add_pod(f"alone-{name}", PodSpec(labels={"tier": "web"}, gpus=1), node=name)
        world.add_deployment(f"web-{name}", PodSpec(labels={"tier": "web"}, node_selector={HOSTNAME: name}), node=name)
        world.add_deployment(f"other-{name}", PodSpec(labels={"tier": "db"}, node_selector={HOSTNAME: name}), node=name)

    async def story(world: FleetWorld, replica: Replica) -> None:
        world.new_driver("two")
        await until_done(world)
        assert drained(world) == {"gpu-1", "gpu-2"}
        gone = evicted(world)
        assert {"alone-gpu-1", "alone-gpu-2"} <= gone
        assert sorted(name.rsplit("-", 2)[0] for name in gone if name.startswith("web")) == ["web-gpu-1", "web-gpu-2"]
        assert not [name for name in gone if name.startswith("other")]

    play(world, story)


def test_a_drain_of_nobody_is_none() -> None:
    """A node without users of the driver is not drained, though drains are on."""
    world = FleetWorld(1, nodes=1, gpu_pods=0, policy=DRAINING)
    world.add_deployment("web", PodSpec(labels={"tier": "web"}, node_selector={HOSTNAME: "gpu-1"}), node="gpu-1")

    async def story(world: FleetWorld, replica: Replica) -> None:
        world.new_driver("two")
        await until_done(world)
        assert drained(world) == set()
        assert evicted(world) == set()

    play(world, story)
