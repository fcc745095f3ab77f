"""What holds for every test: no unplanned process or socket, and two hypothesis profiles."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest

pytest_plugins = ["tests.kube.fixtures"]

PROCESSES = {
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.spawn",
    "os.system",
    "pty.spawn",
    "subprocess.Popen",
}
SOCKETS = {"socket.bind", "socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"}
ALLOWED = {
    "kube": PROCESSES | SOCKETS,
    "image": PROCESSES | SOCKETS,
    "vm": PROCESSES | SOCKETS,
    "real_processes": PROCESSES,
    "real_sockets": SOCKETS,
}
"""What each marker allows."""


class UnplannedError(BaseException):
    """A test did something that only tests with a marker for it may do; no `except Exception` hides it."""


class _Guard:
    """Hears of every process and socket of this Python by the interpreter's own audit events."""

    def __init__(self) -> None:
        self.forbidden: frozenset[str] = frozenset()
        self.caught: list[str] = []

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if event in self.forbidden:
            self.caught.append(f"{event} {args[-2:] if event.startswith('socket') else args[:2]}")
            raise UnplannedError(self.caught[-1])


_guard = _Guard()
sys.addaudithook(_guard)

hypothesis.settings.register_profile("quick", max_examples=30, deadline=None)
hypothesis.settings.register_profile("deep", max_examples=2000, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --deep; tests with seeds of their own ask config.getoption("deep")."""
    parser.addoption("--deep", action="store_true", help="many more examples and seeds, as scripts/test deep does")


def pytest_configure(config: pytest.Config) -> None:
    """Registers the markers that open the guard, chooses the hypothesis profile, and hears Ctrl-C."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a shell's background job, and so for every command that a test starts
        signal.signal(signal.SIGINT, signal.default_int_handler)
    hypothesis.settings.load_profile("deep" if config.getoption("deep") else "quick")
    config.addinivalue_line("markers", "real_processes: starts real processes, on purpose")
    config.addinivalue_line("markers", "real_sockets: opens real sockets, on purpose")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is only for --deep."""
    if not config.getoption("deep"):
        left_out = [each for each in items if each.get_closest_marker("deep")]
        items[:] = [each for each in items if each not in left_out]
        config.hook.pytest_deselected(items=left_out)


@pytest.fixture(autouse=True)
def no_unplanned_processes_or_sockets(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails any process or socket of a test without a marker that allows it: plain tests touch nothing real."""
    allowed: set[str] = set()
    for marker, events in ALLOWED.items():
        if request.node.get_closest_marker(marker):
            allowed |= events
    _guard.caught.clear()
    _guard.forbidden = frozenset((PROCESSES | SOCKETS) - allowed)
    yield
    _guard.forbidden = frozenset()
    if _guard.caught:
        which = " or ".join(f"@pytest.mark.{marker}" for marker in ALLOWED)
        pytest.fail(f"unplanned: {'; '.join(_guard.caught)} (allow with {which})", pytrace=False)
