"""For code in a guest with systemd: stand-in services, the unit of driver-manager, and what systemd says of them."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.vm.command import ALL, LOCAL_NODE
from tests.vm.guest import runs_in
from tests.vm.inside import loaded, targets

in_systemd = runs_in("systemd_guest", limit=150)
"""A test in a guest whose first process is systemd, with the unit installed. Each start of the program takes seconds there."""

UNIT = "driver-manager.service"
SETTINGS = Path("/etc/driver-manager/driver-manager.env")
PERSISTENCED = "nvidia-persistenced.service"
KEEPS_A_GPU_OPEN = """
ExecStart=/usr/bin/sh -c 'if (: <>/dev/nvidia0); then exec 9<>/dev/nvidia0; fi; exec sleep 1000'
"""
"""Like the daemon of that name, but it does not load a driver that is gone."""


def systemctl(*words: str, timeout: float = 100) -> subprocess.CompletedProcess[str]:
    """Runs systemctl to its end."""
    return subprocess.run(["systemctl", "--no-pager", *words], capture_output=True, text=True, check=False, timeout=timeout)


def service(name: str, text: str) -> None:
    """Makes a service; its lines go below [Service]."""
    Path(f"/run/systemd/system/{name}").write_text(f"[Service]\n{text}")
    assert systemctl("daemon-reload").returncode == 0


def active(unit: str) -> str:
    """What systemd calls a unit's state."""
    return systemctl("is-active", unit).stdout.strip()


def shown(unit: str, *names: str) -> dict[str, str]:
    """Properties of a unit."""
    said = systemctl("show", "--property", ",".join(names), unit).stdout
    return dict(line.partition("=")[::2] for line in said.splitlines())


def how_it_ended() -> tuple[str, str, str]:
    """State, result and exit status of the last run."""
    about = shown(UNIT, "ActiveState", "Result", "ExecMainStatus")
    return about["ActiveState"], about["Result"], about["ExecMainStatus"]


def main_pid() -> int:
    """The process of the run, 0 where there is none."""
    return int(shown(UNIT, "MainPID")["MainPID"])


def journal(unit: str = UNIT) -> str:
    """What a unit has said."""
    return subprocess.run(["journalctl", "-q", "-o", "cat", "-u", unit], capture_output=True, text=True, check=True).stdout


def until(what: Callable[[], object], timeout: float = 60) -> None:
    """Waits until something is so."""
    deadline = time.monotonic() + timeout
    while not what():
        assert time.monotonic() < deadline, f"{what} is not so:\n{systemctl('status', UNIT).stdout}\n{journal()}"
        time.sleep(0.1)


def persistenced() -> None:
    """Starts the stand-in that holds a GPU."""
    service(PERSISTENCED, KEEPS_A_GPU_OPEN)
    assert systemctl("start", PERSISTENCED).returncode == 0
    until(lambda: "/dev/nvidia0" in open_files(PERSISTENCED))


def open_files(unit: str) -> set[str]:
    """What a service's process has open."""
    folder = Path(f"/proc/{shown(unit, 'MainPID')['MainPID']}/fd")
    return {str(link.readlink()) for link in folder.iterdir()}


def run_that_waits(reason: str = "held-by-process") -> int:
    """Starts a run and returns once it waits for a holder, with the stand-in service stopped; gives its process."""
    assert systemctl("start", "--no-block", UNIT).returncode == 0
    until(lambda: LOCAL_NODE.exists() and PERSISTENCED in LOCAL_NODE.read_text() and active(PERSISTENCED) == "inactive")
    until(lambda: reason in journal())
    return main_pid()


def settle() -> None:
    """Waits until the run has ended and all that follows it."""
    until(lambda: active(UNIT) in ("inactive", "failed"))


def status() -> dict[str, str]:
    """The last word of a run that failed, as the node's file holds it."""
    annotations = json.loads(LOCAL_NODE.read_text())["annotations"]
    assert len(annotations) == 1, annotations  # no record
    found: dict[str, str] = json.loads(next(iter(annotations.values())))
    return found


def assert_put_back() -> None:
    """Everything of the host is as it was before the run."""
    assert (active(PERSISTENCED), loaded(), len(targets())) == ("active", ALL, 2), journal()
    assert not LOCAL_NODE.exists() or "driver-manager.record" not in LOCAL_NODE.read_text()
