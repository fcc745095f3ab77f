"""Lives: numbered boundaries, deaths that are like SIGKILL, planned and random trouble, and the same run from the same seed."""

import asyncio
import contextlib
import random
from collections.abc import Callable

import pytest

from driver_manager import names
from driver_manager.errors import Conflict, DriverManagerError, LockHeld, Unreachable
from driver_manager.ports import NodePatch
from driver_manager.sim.clock import run_virtual
from driver_manager.sim.faults import Delay, Do, Fail, Hang, When
from driver_manager.sim.objects import PodSpec
from driver_manager.sim.world import AgentLife, NodeSurface, World

NODE = "gpu-1"


def small_world(seed: int = 0) -> World:
    world = World(seed)
    world.add_node(NODE, gpus=2, with_machine=True)
    world.add_node("gpu-2", gpus=2)
    world.machine(NODE).install()
    world.add_deployment("train", PodSpec(gpus=1, stop_seconds=2.0), node=NODE)
    return world


async def careless(life: AgentLife) -> None:
    """A program that cordons, evicts and uncordons, and tries to tidy up whatever happens."""
    async with life.host.lock(1.0):
        try:
            await life.cluster.patch_node(NodePatch(name=NODE, unschedulable=True))
            pods = await life.cluster.pods_on(NODE)
            async with asyncio.TaskGroup() as group:
                for pod in pods.items:
                    group.create_task(life.cluster.evict(pod))
            async for change in life.cluster.pod_changes(NODE, pods):
                if change.kind == "gone":
                    break
            await life.host.remove_file("/" + names.STATE_FILE)
        finally:
            with contextlib.suppress(Exception):
                await life.cluster.patch_node(NodePatch(name=NODE, unschedulable=False))


def test_a_program_runs_to_its_end() -> None:
    """Without trouble the program changes the world and puts back what it should."""

    async def story() -> World:
        world = small_world()
        life = world.life(NODE)
        await life.run(careless(life))
        assert not life.was_killed
        return world

    world = run_virtual(story())
    assert not world.node(NODE).unschedulable
    assert len(world.evictions) == 1
    assert "/" + names.STATE_FILE not in world.machine(NODE).files


def test_killed_at_every_boundary() -> None:
    """At each boundary a kill leaves exactly what was written until then; `finally` clauses write nothing; a second life gets the lock."""
    endings: list[tuple[bool, int]] = []
    for boundary in range(100):

        async def story(boundary: int = boundary) -> tuple[bool, World]:
            world = small_world()
            life = world.life(NODE, kill_at=boundary)
            await life.run(careless(life))
            if life.was_killed:
                before, evictions = world.surface(NODE), list(world.evictions)
                await asyncio.sleep(30)
                assert (world.surface(NODE), world.evictions) == (before, evictions)
                endings.append((world.node(NODE).unschedulable, len(world.evictions)))
                second = world.life(NODE)
                async with second.host.lock(0.1):
                    pass
            return life.was_killed, world

        was_killed, world = run_virtual(story())
        if not was_killed:
            break
    assert not world.node(NODE).unschedulable
    assert boundary > 8
    assert (False, 0) in endings
    assert (True, 0) in endings
    assert (True, 1) in endings


def test_a_kill_from_outside_ends_a_sleeping_program() -> None:
    """A program can be killed while it waits for nothing but time."""

    async def story() -> float:
        world = small_world()
        life = world.life(NODE)
        asyncio.get_running_loop().call_later(5, life.kill)
        await life.run(life.clock.sleep(1000))
        assert life.was_killed
        return asyncio.get_running_loop().time()

    assert run_virtual(story()) == pytest.approx(5)


def test_a_lost_answer() -> None:
    """An error after the effect: the write is there and its caller sees an error."""

    async def story() -> None:
        world = small_world()
        world.faults.on("patch_node", Fail(lambda: Unreachable("reset")), when=When.AFTER)
        with pytest.raises(Unreachable):
            await world.cluster().patch_node(NodePatch(name=NODE, unschedulable=True))
        assert world.node(NODE).unschedulable

    run_virtual(story())


def test_planned_trouble() -> None:
    """Delays, hangs that end with the request's limit, and things done to the world between two calls."""

    async def story() -> None:
        world = small_world()
        cluster, loop = world.cluster(), asyncio.get_running_loop()
        world.faults.on("node", Delay(3.0))
        rule = world.faults.on("pods_on", Hang(), skip=1)
        world.faults.on("patch_node", Do(lambda: world.edit_node(NODE, labels={"a": "b"})))
        node = await cluster.node(NODE)
        assert loop.time() > 3
        await cluster.pods_on(NODE)
        before = loop.time()
        with pytest.raises(Unreachable):
            await cluster.pods_on(NODE)
        assert loop.time() - before == pytest.approx(10)
        assert rule.acted == 1
        with pytest.raises(Conflict):
            await cluster.patch_node(NodePatch(name=NODE, resource_version=node.resource_version, labels={"c": "d"}))

    run_virtual(story())


def test_the_lock_is_kept_from_others() -> None:
    """A second run waits its limit and names the holder."""

    async def story() -> None:
        world = small_world()
        first, second = world.life(NODE), world.life(NODE)
        async with first.host.lock(1.0):
            with pytest.raises(LockHeld, match="process 10001"):
                async with second.host.lock(60.0):
                    pass
        assert asyncio.get_running_loop().time() == pytest.approx(60)

    run_virtual(story())


def chaotic(seed: int) -> Callable[[], tuple[str, NodeSurface]]:
    async def story() -> tuple[str, NodeSurface]:
        world = small_world(seed)
        world.store.latencies.jitter = 0.5
        world.faults.randomly(random.Random(seed), 0.2)
        life = world.life(NODE)
        with contextlib.suppress(DriverManagerError, ExceptionGroup):
            async with asyncio.timeout(60):
                await life.run(careless(life))
        calls = "\n".join(str(call) for call in world.faults.calls)
        return world.diary() + calls, world.surface(NODE)

    return lambda: run_virtual(story())


@pytest.mark.parametrize("seed", range(10))
def test_the_same_seed_is_the_same_run(seed: int) -> None:
    """All chance comes from the seed: the diaries and the calls of two runs are equal to the last digit."""
    assert chaotic(seed)() == chaotic(seed)()


def test_other_seeds_are_other_runs() -> None:
    """Seeds make a difference."""
    assert len({chaotic(seed)()[0] for seed in range(5)}) == 5
