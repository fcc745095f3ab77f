"""What a run is doing and waiting for, told as it happens: to the log, to a live view, to the node's status."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from driver_manager.core.plan import Step, describe
from driver_manager.core.report import Waiting
from driver_manager.errors import DriverManagerError
from driver_manager.logs import bound
from driver_manager.ports import Clock

logger = logging.getLogger(__name__)

REPEAT_SECONDS: Final = 30.0
"""A wait that goes on is told again this often."""


@dataclass(slots=True)
class StepState:
    """One step as it went."""

    step: Step
    began: float
    outcome: str = ""
    """Empty while it runs; `done`, `failed` or `stopped` then."""
    took: float = 0.0


@dataclass(slots=True)
class Progress:
    """The story of one run. `on_change` is called after each change, for a live view."""

    clock: Clock
    on_change: Callable[["Progress"], None] = lambda _: None
    steps: list[StepState] = field(default_factory=list)
    waiting: Waiting | None = None
    waiting_since: float = 0.0
    waiting_since_wall: str = ""
    _told: float = 0.0

    @contextmanager
    def step(self, step: Step) -> Iterator[StepState]:
        """Tells the begin and the end of a step, and how long it took."""
        state = StepState(step, self.clock.now())
        self.steps.append(state)
        token = bound.set(bound.get() | {"step": type(step).__name__})
        logger.info("step begins", extra={"what": describe(step)})
        self.on_change(self)
        try:
            yield state
        except DriverManagerError as error:
            self._end(state, "failed", error.message)
            raise
        except BaseException:
            self._end(state, "stopped", "")
            raise
        else:
            self._end(state, "done", "")
        finally:
            self.waiting = None
            bound.reset(token)

    def _end(self, state: StepState, outcome: str, error: str) -> None:
        state.outcome, state.took = outcome, self.clock.now() - state.began
        extra = {"outcome": outcome, "took": round(state.took, 3)} | ({"error": error} if error else {})
        logger.log(logging.WARNING if error else logging.INFO, "step ended", extra=extra)
        self.on_change(self)

    def wait(self, waiting: Waiting) -> None:
        """Tells what the current step waits for: at once when it is new, and again at intervals while it stays the same."""
        now = self.clock.now()
        if self.waiting is None or self.waiting.reason != waiting.reason:
            self.waiting_since, self.waiting_since_wall = now, self.clock.wall()
        is_new = waiting != self.waiting
        self.waiting = waiting
        if is_new or now - self._told >= REPEAT_SECONDS:
            self._told = now
            logger.info("waiting", extra={"reason": waiting.reason, "for": waiting.text, "since": self.waiting_since_wall})
        if is_new:
            self.on_change(self)

    def tell(self, message: str, **fields: object) -> None:
        """One line of the story that is neither a step nor a wait."""
        logger.info(message, extra=fields)

    def warn(self, message: str, **fields: object) -> None:
        """Something that a person should look at, though the run goes on."""
        logger.warning(message, extra=fields)
