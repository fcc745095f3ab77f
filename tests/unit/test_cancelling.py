"""Who is asked to end ends, whatever else happens at that moment: an asking that is lost is not repeated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, cast

import pytest

from driver_manager.core.snapshot import PodChange, PodList
from driver_manager.errors import DeadlineExceeded, Unreachable
from driver_manager.evictions import PodTracker
from driver_manager.ports import Cluster
from driver_manager.sim.clock import run_virtual
from driver_manager.together import together


class SlowToClose:
    """A cluster whose watch takes a second to let go of its connection, as one of a server that does not answer may."""

    async def pod_changes(self, node_name: str, since: PodList) -> AsyncGenerator[PodChange, None]:
        """Tells of nothing."""
        try:
            await asyncio.Event().wait()
            yield cast(Any, None)
        finally:
            await asyncio.sleep(1)


async def failing() -> None:
    """Answers its end with an error, as a request does whose own time is over just then."""
    try:
        await asyncio.Event().wait()
    finally:
        raise Unreachable("no answer")


async def cancelled_after(seconds: float, task: asyncio.Task[Any]) -> None:
    """Asks a task once to end."""
    await asyncio.sleep(seconds)
    task.cancel()
    await asyncio.wait({task}, timeout=60)


@pytest.mark.parametrize("has_failed", [False, True])
def test_an_end_while_the_watch_is_let_go(has_failed: bool) -> None:
    """R10: also where what was done with the pods has failed just before, and would be tried again."""

    async def follow() -> None:
        async with PodTracker(cast(Cluster, SlowToClose()), "gpu-1", PodList((), "1")):
            await asyncio.sleep(1)
            if has_failed:
                raise DeadlineExceeded("pods", 1.0)

    async def story() -> None:
        task = asyncio.create_task(follow())
        await cancelled_after(1.5, task)
        assert task.cancelled()

    run_virtual(story())


def test_an_end_that_a_part_answers_with_an_error() -> None:
    """R10: the error of a part that is ended is none of the whole."""

    async def story() -> None:
        task = asyncio.create_task(together(failing(), asyncio.Event().wait()))
        await cancelled_after(1.0, task)
        assert task.cancelled()

    run_virtual(story())


def test_an_error_after_an_end_that_was_not_obeyed_is_an_error() -> None:
    """Who goes on after an asking, to put things back, hears of what goes wrong then."""

    async def put_back() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await together(asyncio.sleep(1), failing_at_once())

    async def failing_at_once() -> None:
        raise Unreachable("no answer")

    async def story() -> None:
        task = asyncio.create_task(put_back())
        await cancelled_after(1.0, task)
        with pytest.raises(Unreachable):
            task.result()

    run_virtual(story())
