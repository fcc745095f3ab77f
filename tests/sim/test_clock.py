"""Virtual time: it jumps, it is exact, and it notices when nothing can happen any more."""

import asyncio
import time

import pytest

from driver_manager.sim.clock import SimClock, Stuck, run_paced, run_virtual


def test_a_long_sleep_takes_no_time() -> None:
    """An hour of virtual time passes in no real time and is exact."""

    async def story() -> float:
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    began = time.monotonic()
    assert run_virtual(story()) == pytest.approx(3600)
    assert time.monotonic() - began < 1


def test_timeouts_are_virtual() -> None:
    """`asyncio.timeout` ends at its virtual moment, and tasks interleave by virtual time."""

    async def story() -> list[str]:
        seen: list[str] = []

        async def note(after: float, what: str) -> None:
            await asyncio.sleep(after)
            seen.append(what)

        async with asyncio.TaskGroup() as group:
            group.create_task(note(20, "late"))
            group.create_task(note(5, "early"))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(10):
                    await asyncio.sleep(11)
            seen.append("timeout")
        return seen

    assert run_virtual(story()) == ["early", "timeout", "late"]


def test_a_deadlock_is_an_error() -> None:
    """A wait that nobody will ever end is reported instead of hanging the test run."""

    async def story() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Stuck, match="nothing is left"):
        run_virtual(story())


def test_threads_stop_virtual_time() -> None:
    """While a thread works no virtual time passes."""

    async def story() -> float:
        asyncio.get_running_loop().call_later(1000, lambda: None)
        await asyncio.to_thread(time.sleep, 0.1)
        return asyncio.get_running_loop().time()

    assert run_virtual(story()) == 0


def test_paced_time_is_scaled() -> None:
    """At a speed of 100 ten seconds take a tenth of one."""
    began = time.monotonic()
    run_paced(asyncio.sleep(10), speed=100)
    assert 0.09 < time.monotonic() - began < 1.0


def test_the_clock_is_seeded() -> None:
    """Run ids depend on the seed alone, and the time of day on virtual time alone."""

    async def story(seed: int) -> tuple[str, str]:
        clock = SimClock(seed)
        await clock.sleep(61)
        return clock.run_id(), clock.wall()

    assert run_virtual(story(1)) == run_virtual(story(1))
    assert run_virtual(story(1)) != run_virtual(story(2))
    assert run_virtual(story(1))[1] == "2026-01-31T09:01:01Z"


def test_a_failing_timer_fails_the_run() -> None:
    """What goes wrong in a timer of the world is not swallowed by the loop."""

    async def story() -> None:
        asyncio.get_running_loop().call_later(1, lambda: 1 // 0)
        await asyncio.sleep(2)

    with pytest.raises(ZeroDivisionError):
        run_virtual(story())
