"""Virtual time for asyncio: a loop that jumps to the next timer instead of waiting for it.

The code under test uses plain asyncio (`asyncio.timeout`, `TaskGroup`, `sleep`) and need not know. A minute of waiting costs microseconds,
and the same seed gives the same run. `PacedLoop` is the same for people who want to watch: time goes by, faster than on the wall.
"""

import asyncio
import random
import selectors
import string
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

START: Final = datetime(2026, 1, 31, 9, 0, 0, tzinfo=UTC)
IDLE_LIMIT: Final = 2.0
"""Real seconds that a loop with nothing to do waits for a thread or a signal before it calls that a deadlock."""
ALPHABET: Final = string.ascii_lowercase + string.digits


class Stuck(AssertionError):
    """Nothing is left that could ever happen: every task waits for something that nobody will do."""


class _JumpingSelector(selectors.DefaultSelector):
    """Hands the waiting time to the loop instead of spending it."""

    def __init__(self) -> None:
        super().__init__()
        self.spend: Callable[[float | None], float | None] = lambda timeout: timeout

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Looks for real input, and lets `spend` decide what the rest of the time is worth."""
        ready: list[tuple[selectors.SelectorKey, int]] = super().select(0)
        if ready or timeout == 0:
            return ready
        rest = self.spend(timeout)
        return ready if rest == 0 else super().select(rest)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time stands still while something runs, and jumps when nothing does."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self._in_threads = 0
        selector = _JumpingSelector()
        selector.spend = self._jump
        super().__init__(selector)

    def time(self) -> float:
        """Virtual seconds since the start."""
        return self._now

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """As ever; virtual time stands still until the thread is done."""
        self._in_threads += 1
        future: asyncio.Future[T] = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self._left_thread)
        return future

    def _left_thread(self, _: asyncio.Future[Any]) -> None:
        self._in_threads -= 1

    def _jump(self, timeout: float | None) -> float | None:
        if self._in_threads:
            return 0.05
        if timeout is not None:
            self._now += timeout
            return 0
        began = time.monotonic()
        while time.monotonic() - began < IDLE_LIMIT:
            if selectors.DefaultSelector.select(self._selector, 0.05):
                return 0
        waiting = sorted(task.get_name() for task in asyncio.all_tasks(self))
        raise Stuck(f"nothing is left that could happen at {self._now:.3f} s; waiting: {', '.join(waiting)}")

    _selector: _JumpingSelector


class PacedLoop(asyncio.SelectorEventLoop):
    """An event loop in which `speed` seconds pass in each real one."""

    def __init__(self, speed: float = 1.0) -> None:
        self.speed = speed
        self._began = time.monotonic()
        selector = _JumpingSelector()
        selector.spend = lambda timeout: None if timeout is None else timeout / speed
        super().__init__(selector)

    def time(self) -> float:
        """Scaled seconds since the start."""
        return (time.monotonic() - self._began) * self.speed


def run_virtual(coro: Coroutine[Any, Any, T], *, start: float = 0.0) -> T:
    """Runs a coroutine in virtual time and gives its result.

    Raises:
        Stuck: every task waits for something that nobody will do. Also whatever failed in a timer of the simulated world.
    """
    return _run(coro, lambda: VirtualLoop(start))


def run_paced(coro: Coroutine[Any, Any, T], *, speed: float = 1.0) -> T:
    """Runs a coroutine so that a person can watch: `speed` simulated seconds in each real one."""
    return _run(coro, lambda: PacedLoop(speed))


def _run(coro: Coroutine[Any, Any, T], factory: Callable[[], asyncio.AbstractEventLoop]) -> T:
    failures: list[BaseException] = []

    def note(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        problem = context.get("exception")
        if isinstance(problem, Exception) and "handle" in context:
            failures.append(problem)
        elif isinstance(problem, Exception):
            loop.default_exception_handler(context)

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.get_loop().set_exception_handler(note)
        result = runner.run(coro)
    if failures:
        raise failures[0]
    return result


class SimClock:
    """The Clock port on any event loop; chance comes from the seed."""

    def __init__(self, seed: int = 0, start: datetime = START) -> None:
        self.random = random.Random(seed)
        self._start = start

    def now(self) -> float:
        """The loop's time."""
        return asyncio.get_running_loop().time()

    def wall(self) -> str:
        """The start's date plus the loop's time."""
        return wall_at(self.now(), self._start)

    def epoch(self) -> float:
        """The same as Unix time."""
        return self._start.timestamp() + self.now()

    async def sleep(self, seconds: float) -> None:
        """Lets virtual time pass."""
        await asyncio.sleep(max(0.0, seconds))

    def run_id(self) -> str:
        """A name made from the seed."""
        return "".join(self.random.choices(ALPHABET, k=10))


def wall_at(seconds: float, start: datetime = START) -> str:
    """The time of day so many virtual seconds after the start, as the API writes it."""
    return (start + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")
