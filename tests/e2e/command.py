"""The installed command as a process of its own, and how it ended."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Object = dict[str, Any]
COMMAND = Path(sys.executable).with_name("driver-manager")
ENDS = 75.0
"""Seconds after which a run that has not ended counts as hanging."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str
    wall: float

    @property
    def lines(self) -> list[Object]:
        """Its log lines, where they are JSON."""
        return [json.loads(line) for line in self.err.splitlines() if line.startswith("{")]

    def document(self) -> Any:
        """What it printed, as JSON."""
        return json.loads(self.out)

    def require(self, code: int) -> Ended:
        """Itself, if it ended with this code."""
        assert self.code == code, f"exit {self.code}, not {code}:\n{self.err[-6000:]}"
        return self

    def said(self, *words: str) -> bool:
        """Whether all these words occur in what it wrote to standard error."""
        return all(word in self.err for word in words)

    def steps(self) -> list[str]:
        """The names of the steps that it began, in order."""
        return [line["step"] for line in self.lines if line["message"] == "step begins"]


@dataclass(slots=True)
class Running:
    """A command that was started."""

    process: subprocess.Popen[bytes]
    folder: Path
    began: float = field(default_factory=time.monotonic)

    def kill(self) -> None:
        """SIGKILL, and waits for the end."""
        self.process.kill()
        self.process.wait(10)

    def terminate(self) -> None:
        """SIGTERM."""
        self.process.send_signal(signal.SIGTERM)

    def interrupt(self) -> None:
        """SIGINT, as Ctrl-C does."""
        self.process.send_signal(signal.SIGINT)

    def wait(self, timeout: float = ENDS) -> Ended:
        """Its end.

        Raises:
            AssertionError: it did not end in time; it is killed then.
        """
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the command did not end within {timeout} s:\n{self.error_text()[-4000:]}") from None
        wall = time.monotonic() - self.began
        return Ended(code, (self.folder / "out").read_text(), self.error_text(), wall)

    def error_text(self) -> str:
        """What it has written to standard error so far."""
        return (self.folder / "err").read_text()

    def wait_for_line(self, is_it: Callable[[Object], bool], what: str, timeout: float = 30.0) -> Object:
        """The first log line for which the condition holds.

        Raises:
            AssertionError: there was none in time, or the command has ended without one.
        """
        deadline = time.monotonic() + timeout
        while True:
            has_ended = self.process.poll() is not None
            for line in self.error_text().splitlines():
                if line.startswith("{") and line.endswith("}") and is_it(parsed := json.loads(line)):
                    return dict(parsed)
            if has_ended or time.monotonic() > deadline:
                raise AssertionError(f"no line: {what}\n{self.error_text()[-4000:]}")
            time.sleep(0.02)


def start(words: tuple[str, ...], env: Mapping[str, str], folder: Path) -> Running:
    """Starts the installed command with exactly this environment; what it prints goes into the folder."""
    folder.mkdir()
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        process = subprocess.Popen([COMMAND, *words], env=dict(env), stdin=subprocess.DEVNULL, stdout=out, stderr=err)
    return Running(process, folder)
