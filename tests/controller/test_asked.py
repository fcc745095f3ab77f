"""An agent that asks for an upgrade of its node, and whoever leads that node: the real agent beside the real controller."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from driver_manager import names
from driver_manager.core.upgrade_policy import read_policy
from driver_manager.ports import NodePatch
from driver_manager.sim.access import EVERYTHING
from driver_manager.sim.objects import Phase
from driver_manager.sim.scenarios import NAMESPACE, NODE
from driver_manager.sim.world import World
from tests.agent.stage import Stage, play, small_world
from tests.controller.besides import OPERATOR
from tests.controller.gpuoperator import GpuOperator
from tests.controller.stories import until
from tests.controller.wards import CONTROLLER, led

POLICY = read_policy({"autoUpgrade": True, "maxUnavailable": "100%"})


@contextlib.asynccontextmanager
async def operated(world: World) -> AsyncIterator[None]:
    """While it is entered gpu-operator leads."""
    life = world.life(account=world.add_account(OPERATOR, EVERYTHING))
    task = asyncio.create_task(GpuOperator(life.fleet, life.clock, policy=POLICY).run())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def patches(world: World, who: str) -> list[NodePatch]:
    """Node patches of an account, in order."""
    found = [deed.detail for deed in world.store.deeds if (deed.who, deed.what) == (who, "patch")]
    return [each for each in found if isinstance(each, NodePatch) and each.name == NODE]


@pytest.mark.parametrize("leader", [CONTROLLER, OPERATOR])
def test_n47_the_request_leads_to_the_upgrade(leader: str) -> None:
    """N47, decision 40: its driver pod made anew by hand, the agent asks once; the node is freed by who leads it, and nobody asks again.

    The request goes when the node is taken up, by ours in the patch of the cordon. The driver pod, which is the newest, is not replaced.
    """

    async def story(stage: Stage) -> None:
        world = stage.world
        driver = world.pod(NAMESPACE, "nvidia-driver-daemonset")
        async with contextlib.AsyncExitStack() as stack:
            if leader == OPERATOR:
                await stack.enter_async_context(operated(world))
                await asyncio.sleep(20)
            await stack.enter_async_context(led(world, policy=POLICY))
            node = world.store.nodes[NODE]
            await until(lambda: names.UPGRADE_ENABLED in node.annotations and names.UPGRADE_STATE in node.labels, "a policy-owned node")
            run = await stage.run()
            assert run.code == 0, run.sentence
            assert node.labels[names.UPGRADE_STATE] == "pod-restart-required"
            assert node.unschedulable
            driver.phase = Phase.RUNNING
            world.set_ready(driver, True)
            await until(lambda: node.labels[names.UPGRADE_STATE] == "upgrade-done" and not node.unschedulable, "the end of the upgrade")
            await asyncio.sleep(120)
        assert len([write for write in stage.node_writes() if "+gpu-driver-upgrade-requested" in write]) == 1
        taken = [patch for patch in patches(world, leader) if names.UPGRADE_REQUESTED in patch.annotations]
        assert [patch.annotations[names.UPGRADE_REQUESTED] for patch in taken] == [None]
        assert leader == OPERATOR or taken[0].unschedulable, "in the patch of the cordon"
        assert leader == CONTROLLER or not [each for each in patches(world, CONTROLLER) if each.labels or each.annotations]
        assert Counter(deed.who for deed in world.store.deeds if deed.what == "evict") == {leader: 2}
        stage.assert_evicted_once()
        assert world.pod(NAMESPACE, "nvidia-driver-daemonset").uid == driver.uid
        assert {**node.labels, names.UPGRADE_STATE: ""} == {**stage.before.labels, names.UPGRADE_STATE: ""}
        assert not {names.UPGRADE_REQUESTED, names.RECORD} & node.annotations.keys()
        stage.assert_free()

    play(story, small_world())
