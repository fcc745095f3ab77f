"""How a replica ends: by a signal, with everything said and done, or because it has lost the Lease."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from driver_manager.controller.run import Replica
from driver_manager.controller.settings import ControllerSettings
from driver_manager.errors import Exit, TakenOver, Unreachable
from driver_manager.names import UPGRADE_STATE
from driver_manager.sim.clock import run_virtual
from driver_manager.sim.faults import Delay, Fail, Hang
from driver_manager.sim.fleetworld import OWN_NAMESPACE, FleetWorld

LEASE = f"{OWN_NAMESPACE}/driver-manager-controller"
POLICY = {"autoUpgrade": True, "maxParallelUpgrades": 0, "maxUnavailable": "100%"}


async def led(world: FleetWorld) -> tuple[Replica, asyncio.Task[None]]:
    life = world.controller()
    replica = Replica(life.fleet, life.clock, ControllerSettings())
    task = asyncio.create_task(replica.run())
    await asyncio.sleep(5)
    return replica, task


async def end(task: asyncio.Task[None]) -> float:
    """Cancels it; gives the seconds that it took to end."""
    began = asyncio.get_running_loop().time()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return asyncio.get_running_loop().time() - began


def test_it_finishes_its_writes_and_gives_the_lease_up() -> None:
    """Writes under way get their answers, none is begun after the signal, the Lease has no holder, and nothing goes on."""
    world = FleetWorld(1, nodes=6, policy=POLICY)

    async def story() -> None:
        _, task = await led(world)
        world.faults.on("patch_node", Delay(1.0), times=None)
        before = len(world.deeds("patch"))
        world.new_driver("two")
        await asyncio.sleep(0.5)  # all six are being written
        took = await end(task)
        assert 0.4 < took < 3
        written = len(world.deeds("patch"))
        assert written == before + 6
        assert {node.labels[UPGRADE_STATE] for node in world.store.nodes.values()} == {"upgrade-required"}
        assert world.store.leases[LEASE].holder == ""
        await asyncio.sleep(600)
        assert len(world.deeds("patch")) == written

    run_virtual(story())


def test_the_next_replica_leads_at_once() -> None:
    """A Lease that was given up is not waited for."""
    world = FleetWorld(1, nodes=2, policy=POLICY)

    async def story() -> None:
        _, task = await led(world)
        life = world.controller()
        other = Replica(life.fleet, life.clock, ControllerSettings(identity="two"))
        waiting = asyncio.create_task(other.run())
        await asyncio.sleep(5)
        assert not other.election.is_leading
        await end(task)
        await asyncio.sleep(2.5)
        assert other.election.still_leading()
        await end(waiting)

    run_virtual(story())


def test_a_write_that_gets_no_answer_does_not_keep_it() -> None:
    """It ends within two request timeouts, whatever hangs."""
    world = FleetWorld(1, nodes=1, policy=POLICY)

    async def story() -> None:
        _, task = await led(world)
        world.faults.on("patch_node", Hang(), times=None)
        world.new_driver("two")
        await asyncio.sleep(1)
        assert await end(task) <= 2 * ControllerSettings().request_timeout + 1
        assert world.store.leases[LEASE].holder == ""

    run_virtual(story())


def test_a_second_signal_ends_it_there() -> None:
    """Being cancelled again while it finishes leaves no task behind."""
    world = FleetWorld(1, nodes=1, policy=POLICY)

    async def story() -> None:
        _, task = await led(world)
        world.faults.on("patch_node", Hang(), times=None)
        world.new_driver("two")
        await asyncio.sleep(1)
        task.cancel()
        await asyncio.sleep(0.1)
        assert await end(task) < 0.1
        await asyncio.sleep(30)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(story())


def test_one_that_waits_for_the_lease_just_ends() -> None:
    """A standby has nothing to finish and nothing to give up."""
    world = FleetWorld(1, nodes=1, policy=POLICY)

    async def story() -> None:
        _, task = await led(world)
        life = world.controller()
        waiting = asyncio.create_task(Replica(life.fleet, life.clock, ControllerSettings(identity="two")).run())
        await asyncio.sleep(3)
        assert await end(waiting) == 0
        assert world.store.leases[LEASE].holder == "controller"
        await end(task)

    run_virtual(story())


def test_a_leader_that_may_not_write_any_more_does_not_spin() -> None:
    """Between the end of its deadline and the moment that it notices, decisions that it may not write are not made again and again."""
    world = FleetWorld(1, nodes=4, policy=POLICY)

    async def story() -> None:
        life = world.controller()
        replica = Replica(life.fleet, life.clock, ControllerSettings(retry_period=3.0))
        task = asyncio.create_task(replica.run())
        await asyncio.sleep(5)
        world.faults.on("write_lease", Fail(lambda: Unreachable("no answer")), times=None)
        await asyncio.sleep(8.5)
        assert replica.election.is_leading
        assert not replica.election.still_leading()
        passes, patches = replica.telling.passes, len(world.deeds("patch"))
        world.new_driver("two")
        with pytest.raises(TakenOver):
            await task
        assert replica.telling.passes - passes < 20
        assert len(world.deeds("patch")) == patches

    run_virtual(story())


def test_a_lost_lease_is_an_error_with_its_own_code() -> None:
    """A leader that cannot renew ends with 75, so that whoever runs it begins it anew."""
    world = FleetWorld(1, nodes=1, policy=POLICY)

    async def story() -> None:
        _, task = await led(world)
        world.faults.on("write_lease", Fail(lambda: Unreachable("no answer")), times=None)
        with pytest.raises(TakenOver, match="the Lease is lost") as caught:
            await task
        assert caught.value.exit_code is Exit.AGAIN

    run_virtual(story())


def test_a_part_that_does_not_end_is_named_and_left(caplog: pytest.LogCaptureFixture) -> None:
    """R9, R10: a replica that has lost the Lease ends in its time, even where something of it does not hear that it should."""
    world = FleetWorld(1, nodes=1, policy=POLICY)

    async def hears_nothing() -> None:
        for _ in range(2):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    async def story() -> None:
        life = world.controller()
        replica = Replica(life.fleet, life.clock, ControllerSettings())
        replica.conditions.run = hears_nothing  # type: ignore[method-assign]
        task = asyncio.create_task(replica.run())
        await asyncio.sleep(5)
        world.faults.on("write_lease", Fail(lambda: Unreachable("no answer")), times=None)
        with pytest.raises(TakenOver):
            await asyncio.wait_for(task, 60)
        (left,) = [each for each in asyncio.all_tasks() if each.get_name() == "conditions"]
        left.cancel()

    run_virtual(story())
    (told,) = [each for each in caplog.records if "do not end" in each.getMessage()]
    assert vars(told)["parts"] == ["conditions"]
    assert any("hears_nothing" in place for place in vars(told)["at"])
