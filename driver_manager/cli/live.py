"""The live view of a run on a terminal: the steps so far, and what the current one waits for."""

import logging
import sys
from collections.abc import Callable
from typing import Any

from driver_manager.agent.progress import Progress, StepState
from driver_manager.core.plan import describe

SIGNS = {"": "▶", "done": "✔", "failed": "✘", "stopped": "■"}
STYLES = {"": "bold cyan", "done": "green", "failed": "bold red", "stopped": "yellow"}


class LiveView:
    """Draws while it is entered; not switched on it does nothing, and the log tells the story.

    It draws when the progress says that something has changed, and a run says so every second while it waits: no thread of its own reads a
    clock that belongs to the loop.
    """

    def __init__(self, *, is_on: bool) -> None:
        self._is_on = is_on
        self._live: Any = None
        self._level = logging.INFO
        self._progress: Progress | None = None

    def __enter__(self) -> Callable[[Progress], None]:
        if not self._is_on:
            return lambda _: None
        from rich.console import Console
        from rich.live import Live

        self._live = Live(console=Console(stderr=True), auto_refresh=False, get_renderable=self._picture)
        self._live.__enter__()
        self._level = logging.getLogger().level
        logging.getLogger().setLevel(max(self._level, logging.WARNING))
        _log_to_standard_error()
        return self._draw

    def __exit__(self, *error: Any) -> None:
        if self._live is not None:
            logging.getLogger().setLevel(self._level)
            self._live.__exit__(*error)
            _log_to_standard_error()

    def _draw(self, progress: Progress) -> None:
        self._progress = progress
        self._live.refresh()

    def _picture(self) -> Any:
        from rich.table import Table

        table = Table.grid(padding=(0, 1))
        if self._progress is None:
            return table
        now = self._progress.clock.now()
        for state in self._progress.steps:
            table.add_row(_line(state, now))
        for wait in self._progress.waits.values():
            table.add_row(_wait_line(wait.waiting.text, now - wait.began))
        return table


def _log_to_standard_error() -> None:
    """Points the log at what standard error is now: while the view is on it is a stand-in that prints above the view, not into it."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(sys.stderr)


def _line(state: StepState, now: float) -> Any:
    from rich.text import Text

    took = state.took if state.outcome else now - state.began
    text = Text(f"{SIGNS[state.outcome]} ", style=STYLES[state.outcome])
    text.append(describe(state.step), style="" if state.outcome else "bold")
    text.append(f"  {took:.1f} s", style="dim")
    return text


def _wait_line(sentence: str, seconds: float) -> Any:
    from rich.text import Text

    text = Text("    … ", style="yellow")
    text.append(sentence, style="yellow")
    text.append(f"  {seconds:.0f} s", style="dim")
    return text
