"""What the policies' resources say of a roll-out. On the simulator."""

from __future__ import annotations

import asyncio

from driver_manager.core.conditions import PACED
from driver_manager.sim.objects import PodSpec
from tests.controller.besides import Stage, play


def test_conditions_are_written_on_change_and_now_and_then() -> None:
    """A roll-out of many nodes costs few writes, others' conditions stay, and at rest nothing is written."""

    async def story(stage: Stage) -> None:
        world = stage.world
        foreign = {"Ready": ("True", "Reconciled")}
        there = world.store.policies["ClusterPolicy", "cluster-policy"]
        world.set_policy("ClusterPolicy", "cluster-policy", conditions={**there.conditions, **foreign})
        await asyncio.sleep(70)
        said = len(world.deeds("condition"))
        await asyncio.sleep(600)
        assert len(world.deeds("condition")) == said, "nothing has changed"
        began = asyncio.get_running_loop().time()
        world.new_driver("two")
        await stage.until_done()
        await asyncio.sleep(10)
        minutes = (asyncio.get_running_loop().time() - began) / 60
        assert len(world.deeds("condition")) - said <= 2 + minutes
        there = world.store.policies["ClusterPolicy", "cluster-policy"]
        assert there.conditions.items() >= foreign.items()
        assert there.conditions["DriverManagerRolledOut"] == ("True", "Complete")

    play(story, operator=False, nodes=8)


def test_a_node_that_waits_is_counted_with_its_reason() -> None:
    """The condition says why nodes are not begun, not only that."""

    async def story(stage: Stage) -> None:
        world = stage.world
        for name in ("gpu-1", "gpu-2"):
            world.add_pod(f"by-hand-{name}", PodSpec(gpus=1), node=name)
        await asyncio.sleep(5)
        world.new_driver("two")
        await stage.until(lambda: list(stage.states().values()).count("upgrade-done") == 2, "two are done")
        await asyncio.sleep(130)
        uid = world.store.policies["ClusterPolicy", "cluster-policy"].uid
        sentence = world.store.sentences[uid, "DriverManagerRolledOut"]
        assert sentence == "2 of 4 nodes are done, 2 waiting (BlockedByPod 2)"

    play(story, operator=False)


def test_no_node_is_begun_while_kubernetes_replaces_the_drivers_by_itself() -> None:
    """RollingUpdate on the driver's DaemonSet: nobody is evicted or cordoned, the policy's resource says why, and OnDelete ends it."""

    async def story(stage: Stage) -> None:
        world = stage.world
        await stage.until(lambda: set(stage.states().values()) == {"upgrade-done"}, "all are known")
        found = world.driver_set()
        found.is_on_delete = False
        world.controllers.daemon_sets.written(found)
        uid = world.store.policies["ClusterPolicy", "cluster-policy"].uid
        await stage.until(lambda: world.store.sentences.get((uid, PACED), "").startswith("the driver DaemonSets of 4 of 4"), "it is said")
        world.new_driver("two")
        await stage.until(lambda: all(pod.spec.digest == "two" and pod.is_ready for pod in world.driver_pods()), "Kubernetes did it")
        assert not world.deeds("evict")
        assert not any(node.unschedulable for node in world.store.nodes.values())
        found.is_on_delete = True
        world.controllers.daemon_sets.written(found)

        def is_taken_back() -> bool:
            return world.store.policies["ClusterPolicy", "cluster-policy"].conditions.get(PACED) == ("True", "OnDelete")

        await stage.until(is_taken_back, "it is taken back")

    play(story, operator=False)
