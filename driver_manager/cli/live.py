"""Views of a run: live on a terminal, or as plain lines; the steps so far, and what the current one waits for."""

import logging
import sys
from collections.abc import Callable
from textwrap import wrap
from typing import Any, Final

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


PLAIN_WIDTH: Final = 120


class PlainView:
    """The same as plain lines, each kept once: every step when it has ended, every wait when it begins."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._ended = 0
        self._told: set[str] = set()
        """Reasons of the waits that are told of the step that runs."""

    def draw(self, progress: Progress) -> None:
        """Takes in what is new."""
        for state in progress.steps[self._ended :]:
            what = describe(state.step)
            if state.outcome:
                self._ended, self._told = self._ended + 1, set()
                self._add(f"{SIGNS[state.outcome]} {what}  {state.took:.1f} s")
            elif progress.waits and not self._told:
                self._add(f"{SIGNS['']} {what}")
        for reason, wait in progress.waits.items():
            if reason not in self._told:
                self._told.add(reason)
                self._add(f"… {wait.waiting.with_blockers(1)}", "    ")

    def _add(self, text: str, indent: str = "") -> None:
        more = f"{indent}  "
        self.lines += wrap(text, PLAIN_WIDTH, initial_indent=indent, subsequent_indent=more, break_long_words=False, break_on_hyphens=False)


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
