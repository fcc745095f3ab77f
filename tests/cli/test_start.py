"""What a start of the agent does not load."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.real_processes
def test_the_agent_starts_without_the_controller() -> None:
    """The agent's start is part of a node's downtime: nothing of the controller and none of its libraries is loaded for it."""
    code = "import sys, driver_manager.cli.main, driver_manager.cli.commands, driver_manager.agent.run; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60).stdout.split()
    assert [name for name in loaded if name.startswith(("driver_manager.controller", "prometheus_client", "aiohttp", "yaml"))] == []
