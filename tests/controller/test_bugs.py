"""R9: an error of the program in the work about one node ends neither the replica nor the work about others. On the simulator."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from driver_manager.controller.loop import AFTER_BUG
from driver_manager.controller.run import Replica
from driver_manager.controller.settings import ControllerSettings
from driver_manager.core.rollout_states import State
from driver_manager.errors import DriverManagerError
from driver_manager.names import GRANTS
from driver_manager.sim.clock import run_virtual
from driver_manager.sim.fleet import SimFleet
from driver_manager.sim.fleetworld import OWN_NAMESPACE, FleetWorld
from tests.controller.stories import state, until, until_done

POLICY = {"autoUpgrade": True, "maxParallelUpgrades": 2, "maxUnavailable": 2}


class Broken:
    """A request that ends in an error nobody has thought of where it is about one node."""

    def __init__(self, fleet: SimFleet, request: str, is_meant: Callable[[Any], bool]) -> None:
        self._asks, self._is_meant = getattr(fleet, request), is_meant
        self.is_broken = True
        self.asked: list[float] = []
        """When, in virtual time."""
        setattr(fleet, request, self)

    async def __call__(self, *about: Any, **more: Any) -> Any:
        if self.is_broken and self._is_meant(about):
            self.asked.append(asyncio.get_running_loop().time())
            raise ZeroDivisionError("a bug")
        return await self._asks(*about, **more)


def of_gpu_1(about: Any) -> bool:
    """Whether a request is about that node, or a pod of it."""
    return any("gpu-1" in each for each in (about[0] if isinstance(about[0], str) else about[0].name, *about[1:]))


@pytest.mark.parametrize("request_name", ["pods_on", "patch_node", "evict", "delete_pod"])
def test_a_bug_in_the_work_about_a_node_is_its_own(request_name: str) -> None:
    """Looking, writing, evicting, restarting: the others are upgraded meanwhile, it is tried now and then, and goes on when it can."""
    world = FleetWorld(1, nodes=3, gpu_pods=1, policy=POLICY)

    async def story() -> None:
        life = world.controller()
        replica = Replica(life.fleet, life.clock, ControllerSettings(identity="one", lease_namespace=OWN_NAMESPACE))
        task = asyncio.create_task(replica.run())
        await asyncio.sleep(5)
        pods = {pod.name for pod in world.driver_pods("gpu-1")}

        def is_meant(about: Any) -> bool:
            return about[1] in pods if request_name == "delete_pod" else of_gpu_1(about)

        broken = Broken(life.fleet, request_name, is_meant)
        world.new_driver("two")
        others = ("gpu-2", "gpu-3")
        await until(lambda: all(state(world, name) == State.DONE and _is_new(world, name) for name in others), "the others are done")
        await asyncio.sleep(10 * AFTER_BUG)
        assert not task.done()
        pauses = [later - sooner for sooner, later in zip(broken.asked, broken.asked[1:], strict=False)]
        assert 2 <= len(broken.asked) <= 15, "it is tried again, but not without a pause"
        assert len([pause for pause in pauses if pause < AFTER_BUG - 1]) <= 2, pauses
        assert replica.telling.bugs >= 2
        assert not _is_new(world, "gpu-1")
        broken.is_broken = False
        await until_done(world, 1800)
        assert not task.done()
        assert not world.cordoned
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, DriverManagerError):
            await task

    run_virtual(story())


def test_a_bug_while_starts_are_granted_holds_them_up_for_a_moment() -> None:
    """Those whose turn it was keep it, and begin when it is tried again, one by one."""
    world = FleetWorld(1, nodes=3, gpu_pods=1, policy=POLICY)

    async def story() -> None:
        life = world.controller()
        replica = Replica(life.fleet, life.clock, ControllerSettings(identity="one", lease_namespace=OWN_NAMESPACE))
        task = asyncio.create_task(replica.run())
        await asyncio.sleep(5)
        broken = Broken(life.fleet, "write_lease", lambda about: GRANTS in about[0].annotations and not broken.asked)
        world.new_driver("two")
        await asyncio.sleep(AFTER_BUG - 10)
        assert (len(broken.asked), replica.telling.bugs, world.cordoned) == (1, 2, set())
        await until_done(world)
        assert not task.done()
        assert not world.cordoned
        await asyncio.sleep(5)
        assert GRANTS not in world.store.leases[f"{OWN_NAMESPACE}/driver-manager-controller"].annotations
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, DriverManagerError):
            await task

    run_virtual(story())


def _is_new(world: FleetWorld, name: str) -> bool:
    return all(pod.spec.digest == "two" and pod.is_ready for pod in world.driver_pods(name))
