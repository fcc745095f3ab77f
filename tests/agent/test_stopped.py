"""SIGTERM at every boundary: everything is put back without a second run (decisions 23 and 24)."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from driver_manager import names
from driver_manager.sim.faults import Do
from driver_manager.sim.objects import PodSpec
from driver_manager.sim.scenarios import NAMESPACE, NODE, Scenario
from tests.agent.stage import Stage, at_boundary, play, small_world

LIMIT = 1000


def stopped_at_every_boundary(make: Callable[[], Scenario], lowest: int, **given: Any) -> set[int]:
    """Stops a run at each boundary in turn; gives the exit codes."""
    codes: set[int] = set()
    for boundary in range(LIMIT):
        reached: list[bool] = []

        async def story(stage: Stage, boundary: int = boundary, reached: list[bool] = reached) -> None:
            stop = asyncio.Event()
            was_reached = at_boundary(stage, boundary, stop.set)
            run = await stage.run(stop=stop)
            if was_reached():
                reached.append(True)
                codes.add(run.code)
                assert run.outcome is not None
                assert run.outcome.is_put_back
            await stage.assert_put_back()

        play(story, make(), **given)
        if not reached:
            assert boundary > lowest
            return codes
    raise AssertionError("it never came to its end")


def test_stopped_anywhere(make: Callable[[], Scenario]) -> None:
    """A signal at any boundary ends with the node exactly as before and exit code 75, or 0 where all was done already."""
    codes = stopped_at_every_boundary(make, 20)
    assert 75 in codes
    assert codes <= {0, 75}


def test_stopped_while_a_failed_run_puts_the_node_back() -> None:
    """A signal that comes when the run has failed and undoes its changes lets that go on: nothing is left half undone."""

    def blocked() -> Scenario:
        scenario = small_world(gpu_pods=0)
        scenario.world.add_deployment("web", PodSpec(gpus=1), node=NODE)
        scenario.world.add_budget("web", {"app": "web"}, min_available=1)
        return scenario

    assert stopped_at_every_boundary(blocked, 20, drain_timeout=5.0) == {75}


def stuck_in_termination() -> Scenario:
    """A run in this world waits until it is stopped."""
    scenario = small_world(gpu_pods=0)
    scenario.world.add_deployment("slow", PodSpec(gpus=1, stop_seconds=None, grace_seconds=3600), node=NODE)
    return scenario


def with_grace(scenario: Scenario, seconds: int) -> Scenario:
    """The same, where our own pod has another grace period."""
    pod = scenario.world.pod(NAMESPACE, "nvidia-driver-daemonset")
    pod.spec = replace(pod.spec, grace_seconds=seconds)
    return scenario


@pytest.mark.parametrize("grace", [12, 30, 300])
def test_stopped_while_the_api_is_away(grace: int) -> None:
    """Decision 23: the undo is tried for the pod's grace less five seconds; then the record stays, and the exit says so."""

    async def story(stage: Stage) -> None:
        stop = asyncio.Event()
        stage.later(10.0, lambda: stage.world.server.outage(10_000))
        stage.later(10.5, stop.set)
        run = await stage.run(stop=stop)
        assert run.code == 75
        assert run.outcome is not None
        assert not run.outcome.is_put_back
        assert "restore" in run.sentence
        assert grace - 6 <= stage.now - 10.5 <= grace - 4
        assert names.RECORD in stage.world.node(NODE).annotations

    play(story, with_grace(stuck_in_termination(), grace))


def test_the_deletion_says_how_long(caplog: pytest.LogCaptureFixture) -> None:
    """A pod that is deleted with less grace than its own has that much: the watch tells it."""

    async def story(stage: Stage) -> None:
        stop = asyncio.Event()
        own = stage.world.pod(NAMESPACE, "nvidia-driver-daemonset")
        stage.later(9.0, lambda: stage.world.delete_pod(own, 8))
        stage.later(9.5, lambda: stage.world.server.outage(10_000))
        stage.later(9.6, stop.set)
        run = await stage.run(stop=stop)
        assert run.code == 75
        assert 2.0 <= stage.now - 9.6 <= 3.5

    scenario = stuck_in_termination()
    own = scenario.world.pod(NAMESPACE, "nvidia-driver-daemonset")
    own.phase = type(own.phase).RUNNING  # a pending one would be gone at once
    own.spec = replace(own.spec, stop_seconds=600.0, grace_seconds=600)
    play(story, scenario)


def test_stopped_while_the_kernel_does_not_answer() -> None:
    """Decision 22: a call into the kernel that is stuck does not hold up the end; the node is put back within the grace period."""

    async def story(stage: Stage) -> None:
        stop = asyncio.Event()
        stage.world.machine(NODE).modules["nvidia_uvm"].is_stuck = True
        stage.world.faults.on("unload_module", Do(lambda: stage.later(1.0, stop.set)), where=lambda call: call.args["name"] == "nvidia_uvm")
        began = stage.now
        run = await stage.run(stop=stop)
        assert run.code == 75
        assert stage.now - began < 25
        await stage.assert_put_back()

    play(story)


def test_a_second_run_after_a_stopped_one_is_not_needed() -> None:
    """What a stopped run leaves is what a run finds that never was: the next one does the whole way once more."""

    async def story(stage: Stage) -> None:
        stop = asyncio.Event()
        stage.later(0.5, stop.set)
        assert (await stage.run(stop=stop)).code == 75
        await stage.assert_put_back()
        assert stage.status["reason"] == "stopped"
        second = await stage.run()
        assert second.code == 0
        stage.assert_free()
        await stage.assert_put_back()
        assert names.STATUS not in stage.world.node(NODE).annotations

    play(story)
