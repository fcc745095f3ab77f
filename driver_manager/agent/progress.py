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
CHANGED_SECONDS: Final = 5.0
"""Seconds at least between two lines about one wait whose details change."""


@dataclass(slots=True)
class StepState:
    """One step as it went."""

    step: Step
    began: float
    outcome: str = ""
    """Empty while it runs; `done`, `failed` or `stopped` then."""
    took: float = 0.0


@dataclass(slots=True)
class WaitState:
    """One wait that goes on."""

    waiting: Waiting
    began: float
    began_wall: str
    told: float


@dataclass(slots=True)
class Progress:
    """The story of one run. `on_change` is called after each change, for a live view."""

    clock: Clock
    on_change: Callable[["Progress"], None] = lambda _: None
    steps: list[StepState] = field(default_factory=list)
    waits: dict[str, WaitState] = field(default_factory=dict)
    """By reason: several things can be waited for at once."""
    last_reason: str = ""
    """Reason of the last wait that was told, also when it is over."""

    @contextmanager
    def step(self, step: Step) -> Iterator[StepState]:
        """Tells the begin and the end of a step, and how long it took."""
        state = StepState(step, self.clock.now())
        self.steps.append(state)
        self.last_reason = ""
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
            bound.reset(token)

    def _end(self, state: StepState, outcome: str, error: str) -> None:
        state.outcome, state.took = outcome, self.clock.now() - state.began
        extra = {"outcome": outcome, "took": round(state.took, 3)} | ({"error": error} if error else {})
        logger.info("step ended", extra=extra)  # whoever handles the error tells it as one
        self.waits.clear()
        self.on_change(self)

    def wait(self, waiting: Waiting) -> None:
        """Tells what the current step waits for: at once when its reason is new, at intervals while it goes on."""
        now = self.clock.now()
        state = self.waits.get(waiting.reason)
        if state is None:
            state = self.waits[waiting.reason] = WaitState(waiting, now, self.clock.wall(), float("-inf"))
        pause = REPEAT_SECONDS if state.waiting == waiting else CHANGED_SECONDS
        is_changed = state.waiting != waiting
        state.waiting = waiting
        self.last_reason = (self.worst_wait or state).waiting.reason
        if now - state.told >= pause:
            state.told = now
            logger.info("waiting", extra={"reason": waiting.reason, "for": waiting.text, "since": state.began_wall})
            self.on_change(self)
        elif is_changed:
            self.on_change(self)

    def over(self, reason: str) -> None:
        """A wait has come to its end."""
        if self.waits.pop(reason, None) is not None:
            self.on_change(self)

    @property
    def worst_wait(self) -> WaitState | None:
        """The wait to tell where there is room for one: a budget's before others, else the oldest."""
        return self.waits.get("blocked-by-budget") or next(iter(self.waits.values()), None)

    def repeat(self) -> None:
        """Tells again what has been waited for long enough, and lets a live view show how time passes."""
        for state in list(self.waits.values()):
            self.wait(state.waiting)
        self.on_change(self)

    def tell(self, message: str, **fields: object) -> None:
        """One line of the story that is neither a step nor a wait."""
        logger.info(message, extra=fields)

    def warn(self, message: str, **fields: object) -> None:
        """Something that a person should look at, though the run goes on."""
        logger.warning(message, extra=fields)
