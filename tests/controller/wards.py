"""A node that an agent left half-way, and a controller beside it: what tests of healing tell their stories with."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from driver_manager import names
from driver_manager.controller.run import Replica
from driver_manager.controller.settings import ControllerSettings
from driver_manager.core.healing import Why
from driver_manager.core.upgrade_policy import UpgradePolicy
from driver_manager.errors import DriverManagerError
from driver_manager.sim.access import CONTROLLER_NAMESPACE_ROLE, CONTROLLER_ROLE
from driver_manager.sim.objects import Account, Cascade
from driver_manager.sim.scenarios import NAMESPACE, NODE
from driver_manager.sim.world import World
from tests.agent.stage import Stage

SETTLE, PAUSE = 20.0, 30.0
CONTROLLER = "system:serviceaccount:driver-manager:driver-manager-controller"
OWN_NAMESPACE = "driver-manager"
LEASE = ControllerSettings().lease_duration


def account_of(world: World) -> Account:
    """The controller's account, with the rights of its manifests."""
    known = world.store.accounts.get(CONTROLLER)
    spaces = dict.fromkeys((NAMESPACE, OWN_NAMESPACE), CONTROLLER_NAMESPACE_ROLE)
    return known or world.add_account(CONTROLLER, CONTROLLER_ROLE, namespace_rules=spaces)


async def lead(
    world: World, *, kill_at: int | None = None, settle_time: float = SETTLE, heal_pause: float = PAUSE, policy: UpgradePolicy | None = None
) -> bool:
    """One life of the controller, to its end; gives whether it was killed."""
    life = world.life(account=account_of(world), kill_at=kill_at)
    settings = ControllerSettings(
        identity=f"life-{life.number}", lease_namespace=OWN_NAMESPACE, settle_time=settle_time, heal_pause=heal_pause, policy=policy
    )
    with contextlib.suppress(DriverManagerError):
        await life.run(Replica(life.fleet, life.clock, settings).run())
    return life.was_killed


@contextlib.asynccontextmanager
async def led(
    world: World, *, settle_time: float = SETTLE, heal_pause: float = PAUSE, policy: UpgradePolicy | None = None
) -> AsyncIterator[None]:
    """While it is entered a controller leads, by the policy of a file if there is one."""
    task = asyncio.create_task(lead(world, settle_time=settle_time, heal_pause=heal_pause, policy=policy))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def no_driver_any_more(world: World) -> None:
    """Somebody takes the driver's DaemonSet away, and its pod is out of the API."""
    for daemon_set in [one for one in world.store.daemon_sets.values() if one.spec.labels.get(names.COMPONENT_LABEL)]:
        world.controllers.daemon_sets.delete(daemon_set, Cascade.BACKGROUND)
    for pod in [one for one in world.store.pods.values() if one.spec.labels.get(names.COMPONENT_LABEL)]:
        world.store.pod_removed(pod)


def told(world: World, *reasons: Why) -> list[float]:
    """When Events with these reasons were made."""
    return [at for at, _, note in world.store.notes if note.reason in reasons]


async def healed(stage: Stage, within: float) -> None:
    """Waits until nothing of ours is on the node."""
    async with asyncio.timeout(within):
        while names.RECORD in stage.world.node(NODE).annotations:
            await asyncio.sleep(0.5)
