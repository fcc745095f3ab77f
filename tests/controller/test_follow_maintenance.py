"""gpu-operator comes back while nodes are in a maintenance operator's hands, which it knows nothing of: no NodeMaintenance stays."""

from __future__ import annotations

import asyncio

import pytest

from driver_manager import names
from driver_manager.core.role import Role
from driver_manager.core.rollout_states import State
from tests.controller.besides import Stage, play


@pytest.mark.parametrize("moment", range(0, 44, 4))
def test_gpu_operator_comes_back_in_the_middle_of_a_maintenance(moment: int) -> None:
    """Decision 31: it knows no maintenance, so ours ends those that it has asked for; no NodeMaintenance, mark or cordon stays."""
    broken: list[str] = []

    async def story(stage: Stage) -> None:
        stage.world.on_change(lambda *_: broken.extend(name for name in stage.world.driverless if name not in stage.world.cordoned))
        stage.world.new_driver("two")
        await asyncio.sleep(moment)
        stage.start_operator()
        await stage.until_done()
        await stage.until(lambda: not stage.world.store.maintenances and not stage.world.cordoned, "nothing to be left")
        await stage.until(lambda: stage.role is Role.FOLLOW, "ours to follow", 10)

    stage = play(story, operator=False, requestor=True, maintenance=3.0)
    assert not broken
    stage.assert_nothing_twice()
    for node in stage.world.store.nodes.values():
        assert names.REQUESTOR_MODE not in node.annotations
    made = [deed for deed in stage.world.deeds("maintenance") if deed.detail == "made"]
    assert len(made) == len({deed.node_name for deed in made})


@pytest.mark.parametrize("driver_start", [1.0, 200.0])
@pytest.mark.parametrize("at", [State.MAINTENANCE, State.POD_RESTART])
def test_gpu_operator_comes_back_with_auto_upgrade_off_in_a_maintenance(at: State, driver_start: float) -> None:
    """It takes the labels off: the NodeMaintenance is given back, where the driver is away not before it runs again."""
    early: list[str] = []

    async def story(stage: Stage) -> None:
        def look(*_: object) -> None:
            early.extend(name for name in stage.world.driverless if name not in stage.world.cordoned)

        stage.world.on_change(look)
        stage.world.new_driver("two")
        await stage.until(lambda: at in stage.states().values() and (at is State.MAINTENANCE or bool(stage.world.driverless)), at)
        stage.world.set_policy("ClusterPolicy", "cluster-policy", upgrade_policy={"autoUpgrade": False})
        stage.start_operator()
        await stage.until(lambda: stage.role is Role.FOLLOW, "ours to follow")
        await stage.until(lambda: not stage.world.store.maintenances and not stage.world.cordoned, "nothing to be left")
        assert set(stage.states().values()) == {""}
        assert not stage.world.driverless
        nodes = stage.world.store.nodes.values()
        await stage.until(lambda: not any(names.REQUESTOR_MODE in node.annotations for node in nodes), "no mark to be left", 5)

    play(story, operator=False, requestor=True, maintenance=3.0, nodes=2, driver_start=driver_start)
    assert not early
