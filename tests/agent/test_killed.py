"""SIGKILL at every boundary of every call, and what the next life makes of it (R3, R4, N54; design section 3)."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from driver_manager import names
from driver_manager.sim.scenarios import NODE, Scenario
from tests.agent.stage import DRA_LABEL, Run, Stage, play

LIMIT = 1000


def at_every_boundary(make: Callable[[], Scenario], then: Callable[[Stage, Run], Coroutine[Any, Any, None]]) -> int:
    """Kills a run at each of its boundaries in turn, and tells the story on from there; gives how many there were."""
    for boundary in range(LIMIT):
        alive: list[bool] = []

        async def story(stage: Stage, boundary: int = boundary, alive: list[bool] = alive) -> None:
            first = await stage.run(kill_at=boundary)
            if not first.life.was_killed:
                alive.append(True)
                return
            await then(stage, first)

        play(story, make())
        if alive:
            return boundary
    raise AssertionError("it never came to its end")


def test_then_run_again(make: Callable[[], Scenario]) -> None:
    """Killed anywhere and run again on the same boot: free, put back, no pod evicted twice, no record."""

    async def then(stage: Stage, _: Run) -> None:
        await asyncio.sleep(1.0)
        second = await stage.run()
        assert second.code == 0, second.sentence
        stage.assert_free()
        await stage.assert_put_back()
        assert names.STATUS not in stage.world.node(NODE).annotations

    assert at_every_boundary(make, then) > 20


@pytest.mark.slow
def test_then_run_again_at_once(make: Callable[[], Scenario]) -> None:
    """As above without a pause: pods that were just evicted are still there, and are not evicted again."""

    async def then(stage: Stage, _: Run) -> None:
        second = await stage.run()
        assert second.code == 0, second.sentence
        stage.assert_free()
        await stage.assert_put_back()

    assert at_every_boundary(make, then) > 20


@pytest.mark.slow
def test_then_reboot_and_run(make: Callable[[], Scenario]) -> None:
    """N54: killed anywhere, then a reboot: only the API half is undone, nobody else is evicted, nothing on the host is unloaded."""

    async def then(stage: Stage, _: Run) -> None:
        stage.world.machine(NODE).reboot()
        calls = len(stage.world.machine(NODE).calls)
        evicted = stage.evicted
        second = await stage.run()
        assert second.code == 0, second.sentence
        assert stage.evicted == evicted
        assert [call for call in stage.world.machine(NODE).calls[calls:] if call.call == "delete_module"] == []
        await stage.assert_put_back()

    assert at_every_boundary(make, then) > 20


@pytest.mark.slow
def test_then_restore(make: Callable[[], Scenario]) -> None:
    """Killed anywhere, then `restore`: the node is exactly as before, nobody is evicted by it, the host is left alone."""

    async def then(stage: Stage, _: Run) -> None:
        calls, evicted = len(stage.world.machine(NODE).calls), stage.evicted
        second = await stage.restore()
        assert second.code == 0, second.sentence
        assert (len(stage.world.machine(NODE).calls), stage.evicted) == (calls, evicted)
        await stage.assert_put_back()
        assert DRA_LABEL not in stage.before.labels or stage.world.node(NODE).labels[DRA_LABEL] == "true"

    assert at_every_boundary(make, then) > 20


@pytest.mark.slow
def test_killed_twice(make: Callable[[], Scenario]) -> None:
    """Killed anywhere, and again somewhere in the next life: the third one finishes with the first one's originals."""

    async def then(stage: Stage, first: Run) -> None:
        at = (7 * first.life.boundaries) % 41
        await stage.run(kill_at=at)
        third = await stage.run()
        assert third.code == 0, third.sentence
        stage.assert_free()
        await stage.assert_put_back()

    assert at_every_boundary(make, then) > 20


@pytest.mark.slow
def test_restore_killed_then_restored(make: Callable[[], Scenario]) -> None:
    """`restore` itself may be killed anywhere: doing it again ends the same."""

    async def then(stage: Stage, first: Run) -> None:
        await stage.restore(kill_at=first.life.boundaries % 9)
        assert (await stage.restore()).code == 0
        await stage.assert_put_back()

    assert at_every_boundary(make, then) > 20
