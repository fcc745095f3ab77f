"""What a person sees on a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Mapping

import pytest

from tests.e2e.command import COMMAND, ENDS
from tests.e2e.world import StockNode

pytestmark = pytest.mark.kube
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
LOG_LINE = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z (?:WARNING|ERROR) ")


def on_terminal(env: Mapping[str, str], *words: str, columns: int = 80) -> tuple[int, str]:
    """Runs the command on a terminal of its own; gives its exit code and all that was drawn, without colours and cursor moves."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    process = subprocess.Popen([COMMAND, *words], env={**env, "TERM": "xterm"}, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    drawn = bytearray()
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the terminal's other end is closed
            break
        if not part:
            break
        drawn += part
    os.close(ours)
    code = process.wait(ENDS)
    return code, ESCAPE.sub("", drawn.decode()).replace("\r\n", "\n")


def test_live_view_of_a_failing_run(busy_node: StockNode) -> None:
    """Issue 3, N07: the live view shows each step and what it waits for; log lines stand above it; the end is said once."""
    busy_node.add_budget("train", 3)
    env = busy_node.environment(LOG_FORMAT=None, DRAIN_TIMEOUT_SECONDS="3s")
    code, drawn = on_terminal(env, "uninstall_driver", columns=200)
    assert code == 75
    assert "✔ pause 12 operands, cordon, taint" in drawn
    assert "✘ evict 3 pods" in drawn
    assert "✔ put the node back" in drawn
    assert "train-budget" in drawn
    for found in LOG_LINE.finditer(drawn):
        assert drawn[found.start() - 1] in "\n\r", drawn[found.start() - 200 : found.end()]
    assert len(re.findall(r"^error: ", drawn, re.MULTILINE)) == 1
    assert len(re.findall(r"waited \d+ s for", drawn)) == 1, "a failure is told once"
    assert drawn.rstrip().rpartition("\n")[2].startswith("hint: ")


def test_live_view_of_a_good_run(busy_node: StockNode) -> None:
    """Issue 3: a good run on a terminal ends with every step ticked, and with 0."""
    code, drawn = on_terminal(busy_node.environment(LOG_FORMAT=None), "uninstall_driver")
    assert code == 0
    assert "✔ unload nvidia\n" in re.sub(r"  [\d.]+ s *", "", drawn)
    assert "✘" not in drawn


def test_tables_on_a_narrow_terminal(busy_node: StockNode) -> None:
    """Design section 1: what blocks or goes is named in full and in one piece, also on 80 columns."""
    env = busy_node.environment(LOG_FORMAT=None)
    for command in ("plan", "status", "preflight_check"):
        code, drawn = on_terminal(env, command)
        assert code == 0
        assert "…" not in drawn, drawn
        assert command == "preflight_check" or all(f"{busy_node.namespace}/{name}\n" in drawn for name in busy_node.uids("train"))


def test_the_demo_on_a_terminal() -> None:
    """Issue 3: the demo draws the live view: each step, what it waits for, and nothing that does not belong there."""
    code, drawn = on_terminal({"PATH": "/usr/bin:/bin"}, "demo", "--speed", "5", columns=160)
    assert code == 0
    assert "▶ evict 6 pods" in drawn
    assert "The disruption budget inference needs 1 healthy pods" in drawn
    assert "✔ put the node back" in drawn
    assert "Traceback" not in drawn
    assert " after: node gpu-1, schedulable" in drawn
