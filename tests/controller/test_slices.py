"""Nodes of the DRA stack: their devices are in ResourceSlices, and no node is opened before they are back. On the simulator."""

from __future__ import annotations

import asyncio

import pytest

from driver_manager import names
from driver_manager.controller.cache import Cache
from driver_manager.controller.run import Replica
from driver_manager.core.fleet import Changed, Kind, Listed, NotServed, SliceView
from driver_manager.core.rollout_states import Because, State
from driver_manager.core.snapshot import ChangeKind
from driver_manager.sim.fleetworld import FleetWorld
from tests.controller.stories import is_open, play, state, until, until_done


def of(node: str, devices: int, **fields: object) -> SliceView:
    """A slice of a node, of its only pool unless told otherwise."""
    made = {"name": f"{node}-slice", "uid": f"uid-{node}", "driver": names.GPU_DRA_DRIVER, "pool": node, "generation": 1, **fields}
    return SliceView(node_name=node, devices=devices, **made)  # type: ignore[arg-type]


def test_only_the_newest_generation_of_a_pool_counts() -> None:
    """A driver that publishes anew makes the slices of a higher generation first and then deletes the old ones."""
    cache = Cache()
    assert cache.apply(Listed(Kind.SLICES, (of("a", 4), of("a", 4, uid="2"), of("b", 1), of("", 9, uid="3")))) == {"a", "b"}
    assert (cache.published_on("a"), cache.published_on("b"), cache.published_on("")) == (8, 1, 0)
    assert cache.apply(Changed(Kind.SLICES, ChangeKind.SEEN, of("a", 7, uid="4", generation=2))) == {"a"}
    assert cache.published_on("a") == 7
    assert cache.apply(Changed(Kind.SLICES, ChangeKind.SEEN, of("a", 3, uid="5", pool="other"))) == {"a"}
    assert cache.published_on("a") == 10
    assert cache.apply(Changed(Kind.SLICES, ChangeKind.SEEN, of("a", 3, uid="5", pool="other"))) == set()
    assert cache.apply(Changed(Kind.SLICES, ChangeKind.GONE, of("a", 7, uid="4", generation=2))) == {"a"}
    assert cache.apply(NotServed(Kind.SLICES)) == {"a", "b"}
    assert cache.published_on("a") == 0
    assert Kind.SLICES in cache.synced


@pytest.mark.parametrize("is_late", [False, True])
def test_a_node_of_the_dra_stack_stays_closed_until_its_devices_are_published(is_late: bool) -> None:
    """Its driver and validator are well, and nothing was ever allocatable: only the slices say that claims find their devices again."""
    world = FleetWorld(1, nodes=2, gpu_pods=0, has_dra=True, policy={"autoUpgrade": True, "maxParallelUpgrades": 2, "maxUnavailable": 2})

    async def story(world: FleetWorld, replica: Replica) -> None:
        assert not any(node.view().allocatable.get("nvidia.com/gpu") for node in world.store.nodes.values())
        world.behave("gpu-1", devices_seconds=float("inf"))
        world.new_driver("two")
        await until(lambda: state(world, "gpu-2") == State.DONE and is_open(world, "gpu-2"), "the other one is done")
        await until(lambda: state(world) == State.VALIDATION, "it is validated")
        await asyncio.sleep(60)
        stay = replica.controller.stays["gpu-1"]
        assert (stay.because, is_open(world)) == (Because.DEVICES_MISSING, False)
        assert "8 devices of gpu.nvidia.com, of which 0 are in its ResourceSlices" in stay.sentence
        if is_late:
            await until(lambda: state(world) == State.FAILED, "its time is over", 700)
            assert not is_open(world)
        world.publish("gpu-1-anew", "gpu-1", 8)
        await until_done(world)
        assert is_open(world)

    play(world, story)
