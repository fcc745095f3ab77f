"""The ready-made worlds are what they say."""

import asyncio

import pytest

from driver_manager import names
from driver_manager.errors import EvictionBlocked
from driver_manager.sim.clock import run_virtual
from driver_manager.sim.objects import GPU
from driver_manager.sim.scenarios import FREES_UP_AFTER, NODE, SPARE_NODE, demo_world


def test_the_demo_world() -> None:
    """Twelve operands, six GPU pods that hold devices, a loaded and mounted driver, and a driver pod that is ours."""

    async def story() -> None:
        scenario = demo_world()
        world, life = scenario.world, scenario.life()
        pods = (await life.cluster.pods_on(NODE)).items
        assert sum(pod.owner is not None and pod.owner.kind == "DaemonSet" for pod in pods) == 13
        assert sum(GPU in pod.resources for pod in pods) == 6
        own = next(pod for pod in pods if pod.uid == life.cluster.identity.pod_uid)
        assert own.phase == "Pending"
        assert own.labels[names.COMPONENT_LABEL] == "nvidia-driver"
        view = await life.host.look()
        assert view.is_loaded
        assert len(view.mounts) == 1
        assert view.markers == names.READY_MARKERS
        held = {holder.pod_uid for holder in (await life.host.holders()).holders}
        assert held >= {pod.uid for pod in pods if GPU in pod.resources}
        assert len(world.pods(SPARE_NODE)) == 1

    run_virtual(story())


def test_the_budget_frees_up_late() -> None:
    """The guarded pod may not go at first, and may as soon as its sister is ready."""

    async def story() -> float:
        scenario = demo_world()
        life = scenario.life()
        pod = next(pod for pod in (await life.cluster.pods_on(NODE)).items if pod.labels.get("app") == "inference")
        with pytest.raises(EvictionBlocked, match="needs 1 healthy pods and has 1 currently"):
            await life.cluster.evict(pod, dry_run=True)
        while True:
            try:
                await life.cluster.evict(pod)
            except EvictionBlocked:
                await life.clock.sleep(1)
            else:
                break
        ended = asyncio.get_running_loop().time()
        await life.clock.sleep(60)
        apps = [pod.labels.get("app") for pod in scenario.world.pods(SPARE_NODE)]
        assert apps == ["inference", "inference"]
        return ended

    assert FREES_UP_AFTER < run_virtual(story()) < FREES_UP_AFTER + 2
