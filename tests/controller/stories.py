"""A replica that leads a simulated fleet, and a story beside it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

from driver_manager.controller.run import Replica
from driver_manager.controller.settings import ControllerSettings
from driver_manager.core.rollout_states import State
from driver_manager.errors import DriverManagerError
from driver_manager.names import UPGRADE_STATE
from driver_manager.sim.clock import run_virtual
from driver_manager.sim.fleetworld import OWN_NAMESPACE, FleetWorld

Story = Callable[[FleetWorld, Replica], Coroutine[Any, Any, None]]


def play(world: FleetWorld, story: Story, **settings: Any) -> FleetWorld:
    """Plays a story beside a replica that has the fleet at rest."""

    async def whole() -> None:
        life = world.controller()
        replica = Replica(life.fleet, life.clock, ControllerSettings(identity="one", lease_namespace=OWN_NAMESPACE, **settings))
        task = asyncio.create_task(replica.run())
        await asyncio.sleep(5)
        await story(world, replica)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, DriverManagerError):
            await task

    run_virtual(whole())
    return world


def state(world: FleetWorld, name: str = "gpu-1") -> str:
    """The label of a node."""
    return world.store.nodes[name].labels.get(UPGRADE_STATE, "")


def is_open(world: FleetWorld, name: str = "gpu-1") -> bool:
    """Whether a node takes pods."""
    return not world.store.nodes[name].unschedulable


async def until(holds: Callable[[], bool], what: str, seconds: float = 600.0) -> None:
    """Returns when it is so.

    Raises:
        AssertionError: it was not, in so many virtual seconds.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while not holds():
        assert loop.time() < deadline, f"not in {seconds:.0f} s: {what}"
        await asyncio.sleep(0.25)


async def until_done(world: FleetWorld, seconds: float = 600.0) -> None:
    """Returns when every node has the new driver and is done."""

    def is_done() -> bool:
        pods = world.driver_pods()
        fresh = len(pods) == len(world.store.nodes) and all(pod.spec.digest == "two" and pod.is_ready for pod in pods)
        return fresh and all(state(world, name) == State.DONE for name in world.store.nodes)

    await until(is_done, f"all done: { {name: state(world, name) for name in world.store.nodes} }", seconds)
