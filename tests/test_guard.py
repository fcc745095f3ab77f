from __future__ import annotations

import asyncio
import socket
import subprocess
import sys

import pytest

from tests import conftest


@pytest.fixture
def caught() -> list[str]:
    """What the guard caught in this test, forgotten when it ends."""
    return conftest._guard.caught


def test_an_unplanned_process_is_stopped(caught: list[str]) -> None:
    """A test without a marker cannot start a process, not even from code that catches every Exception."""
    with pytest.raises(conftest.UnplannedError):
        subprocess.Popen([sys.executable, "-c", ""])
    assert caught
    caught.clear()


def test_an_unplanned_socket_is_stopped(caught: list[str]) -> None:
    """A test without a marker cannot open a socket."""
    with socket.socket() as link, pytest.raises(conftest.UnplannedError):
        link.connect(("127.0.0.1", 9))
    assert caught
    caught.clear()


async def test_an_event_loop_is_no_socket() -> None:
    """Coroutines run without a marker."""
    await asyncio.sleep(0)


@pytest.mark.real_processes
def test_a_planned_process_runs() -> None:
    """The marker allows processes."""
    assert subprocess.run([sys.executable, "-c", ""], check=True, timeout=30).returncode == 0
