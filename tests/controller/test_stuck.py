"""Pods that do not end, and pods that come back: named by the controller, never forced; the node is opened, and nothing is lost."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import pytest

from driver_manager import names
from driver_manager.controller.run import Replica
from driver_manager.core.rollout_states import Because, State
from driver_manager.core.snapshot import Owner
from driver_manager.sim.fleetworld import FleetWorld
from driver_manager.sim.objects import HOSTNAME, NEVER, Pod, PodSpec
from driver_manager.sim.parking import GATE
from tests.controller.rollouts import EXPORTER, add_exporter
from tests.controller.stories import is_open, play, state, until, until_done

STATEFUL_SET = Owner("StatefulSet", "db", "uid-db")
GUARDED = {"tier": "guarded"}


def failures(world: FleetWorld, name: str = "gpu-1") -> list[str]:
    """The sentences of the failures that a node's record tells."""
    record = json.loads(world.store.nodes[name].annotations.get(names.ROLLOUT, "{}"))
    return [each["sentence"] for each in record.get("failures", [])]


def policy(**deletion: object) -> dict[str, object]:
    """A policy under which a node has a minute to be freed."""
    return {"autoUpgrade": True, "maxUnavailable": "100%", "podDeletion": {"timeoutSeconds": 60, **deletion}}


@pytest.mark.parametrize("force", [False, True], ids=["", "force"])
@pytest.mark.parametrize("is_ending", [False, True], ids=["when-evicted", "before"])
def test_n10_pods_that_stay_terminating(is_ending: bool, force: bool) -> None:
    """N10, decision 39: pods past their grace, or behind a finalizer or a budget, are named, and nobody is forced.

    The policy's podDeletion.force is about pods that nobody makes again. The node is opened after each try; its driver stays; the last try
    fails it.
    """
    world = FleetWorld(1, nodes=1, gpu_pods=0, policy=policy(force=force))
    stuck = [
        world.add_pod(name, PodSpec(gpus=1, grace_seconds=5, stop_seconds=NEVER, finalizers=keys), node="gpu-1", owner=STATEFUL_SET)
        for name, keys in (("dead-0", ()), ("kept-0", ("example.com/keep",)))
    ]
    spec = PodSpec(labels=GUARDED, gpus=1, stop_seconds=1.0)
    guarded = world.add_pod("guarded-0", spec, node="gpu-1", owner=Owner("StatefulSet", "guarded"))
    budget = world.add_budget("guard", GUARDED, max_unavailable=0)
    driver = world.driver_pods()[0].uid

    async def story(world: FleetWorld, replica: Replica) -> None:
        for pod in stuck if is_ending else ():
            world.delete_pod(pod)
        await asyncio.sleep(30)
        world.new_driver("two")
        await until(lambda: len(failures(world)) == 1, "the first failure")
        assert (state(world), is_open(world), guarded.marked_at) == (State.REQUIRED, True, None)
        assert "guard" in failures(world)[0]
        world.set_budget(budget, max_unavailable=1)
        await until(lambda: all(pod.ref in replica.controller.stays["gpu-1"].sentence for pod in stuck), "a sentence that names both")
        assert replica.controller.stays["gpu-1"].because is Because.FREEING
        await until(lambda: state(world) == State.FAILED, "the last try")
        assert is_open(world)
        assert all(pod.ref in failures(world)[-1] for pod in stuck)
        assert [pod.uid for pod in world.driver_pods()] == [driver]
        assert guarded.is_gone
        assert [(pod.is_gone, pod.deletion_grace) for pod in stuck] == [(False, 5)] * 2, "no grace is shortened"
        evicted = Counter(deed.uid for deed in world.deeds("evict"))
        assert evicted == dict.fromkeys([guarded.uid, *(() if is_ending else (pod.uid for pod in stuck))], 1)
        for pod in stuck:  # a person has seen to them
            world.store.pod_removed(pod)
        world.edit_node("gpu-1", annotations={names.UPGRADE_REQUESTED: "true"})
        await until_done(world)
        assert is_open(world)

    play(world, story)


def test_n02_what_nothing_keeps_off_keeps_its_node_from_being_begun() -> None:
    """N02 variant 3: neither label nor taint nor park: its node waits, untouched, and names who would be back; opted in it is parked.

    The other node, where it does not run, is upgraded meanwhile.
    """
    world = FleetWorld(1, nodes=2, policy=policy())
    exporter = add_exporter(world, GATE, is_opted_in=False, node_selector={HOSTNAME: "gpu-1"})

    async def story(world: FleetWorld, replica: Replica) -> None:
        (pod,) = [pod for pod in world.store.pods.values() if pod.labels.get("app") == EXPORTER]
        world.new_driver("two")
        await until(lambda: state(world, "gpu-2") == State.DONE and world.driver_pods("gpu-2")[0].spec.digest == "two", "the other node")
        await asyncio.sleep(60)
        stay = replica.controller.stays["gpu-1"]
        assert stay.because is Because.BLOCKED_BY_POD
        assert pod.ref in stay.sentence
        assert exporter.ref in stay.sentence
        assert (state(world), is_open(world), pod.is_gone) == (State.REQUIRED, True, False)
        assert {deed.node_name for deed in world.deeds("evict")} == {"gpu-2"}
        exporter.labels = {names.PARK: "true"}
        world.controllers.daemon_sets.written(exporter)
        await until_done(world)
        back = [pod for pod in world.store.pods.values() if pod.labels.get("app") == EXPORTER]
        assert [(one.node_name, bool(one.gates)) for one in back] == [("gpu-1", False)]
        assert pod.is_gone

    play(world, story)


def test_n02_pods_that_come_past_every_taint() -> None:
    """N02: what a controller of another kind binds past the scheduler is given up after a few rounds, its owner named, the node opened."""
    world = FleetWorld(1, nodes=1, gpu_pods=0, policy=policy())
    driver = world.driver_pods()[0].uid
    spec = PodSpec(annotations={names.GPU_CLIENT: "true"}, stop_seconds=0.5)

    def come(pod: Pod) -> None:
        if pod.is_gone and pod.name.startswith("agent-"):
            world.add_pod(f"agent-{len(world.deeds('evict'))}", pod.spec, node="gpu-1", owner=pod.owner)

    async def story(world: FleetWorld, replica: Replica) -> None:
        world.new_driver("two")
        await until(lambda: bool(failures(world)), "the first failure")
        assert "of AgentSet agents" in failures(world)[0]
        assert (state(world), is_open(world)) == (State.REQUIRED, True)
        assert [pod.uid for pod in world.driver_pods()] == [driver]
        assert 2 <= len(world.deeds("evict")) <= 5
        world.store.pod_listeners.remove(come)
        await until_done(world)

    world.store.pod_listeners.append(come)
    world.add_pod("agent-x", spec, node="gpu-1", owner=Owner("AgentSet", "agents", "uid-agents"))
    play(world, story)
