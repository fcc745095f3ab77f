"""The installed command in the guest, and what has to be so when it has ended."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tests.vm.inside import DRIVER, DRIVER_ROOT, load, loaded, targets, tmpfs

LOCAL_NODE = Path("/run/nvidia/driver-manager.node.json")
"""What a run without a cluster leaves while it works, or when it could not finish."""


@dataclass(frozen=True, slots=True)
class Command:
    """A run of `driver-manager --no-cluster`, in a fork: the installed code without the seconds that its start takes."""

    pid: int
    log: Path

    @property
    def said(self) -> str:
        """What it has printed so far."""
        return self.log.read_text()

    def hear(self, word: str, timeout: float = 20) -> None:
        """Waits until it has printed something."""
        deadline = time.monotonic() + timeout
        while word not in self.said:
            assert time.monotonic() < deadline, f"{word!r} is not in: {self.said}"
            time.sleep(0.02)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends it a signal."""
        os.kill(self.pid, number)

    def code(self, timeout: float = 40) -> int:
        """Waits for its end; gives its exit code, that of a signal negative."""
        deadline = time.monotonic() + timeout
        while not (done := os.waitpid(self.pid, os.WNOHANG))[0]:
            assert time.monotonic() < deadline, f"it has not ended: {self.said}"
            time.sleep(0.02)
        return os.waitstatus_to_exitcode(done[1])


def command(*words: str, **settings: str) -> Command:
    """Starts the command; settings are its environment."""
    return _started(words, {"NO_CLUSTER": "true", **settings}, "driver-manager")


def vfio_manage(*words: str) -> Command:
    """Starts the other command."""
    return _started(words, {}, "vfio-manage")


def _started(words: Sequence[str], settings: Mapping[str, str], program: str) -> Command:
    number, path = tempfile.mkstemp(prefix="command-", dir="/tmp")
    pid = os.fork()
    if not pid:
        become(words, settings, number, number, program)
    os.close(number)
    return Command(pid, Path(path))


def become(words: Sequence[str], settings: Mapping[str, str], out: int, err: int, program: str = "driver-manager") -> NoReturn:
    """Makes this process a run of a command; what it prints goes to two descriptors."""
    from driver_manager.cli import main, vfio

    code = 1
    try:
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.environ.update(LOG_FORMAT="json", **settings)
        sys.argv = [program, *words]
        (vfio if program == "vfio-manage" else main).main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


ALL = {"nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm"}


def driver_in_use() -> None:
    """The driver as a driver container leaves it: modules, and a root that is mounted."""
    load(*DRIVER)
    tmpfs(DRIVER_ROOT)
    tmpfs(f"{DRIVER_ROOT}/sub dir")


def assert_free(done: Command) -> None:
    """It succeeded, nothing of the driver is left, and no record."""
    assert done.code() == 0, done.said
    assert (loaded(), targets(), LOCAL_NODE.exists()) == (set(), [], False), done.said


def assert_untouched(done: Command, code: int, *words: str) -> None:
    """It ended with a code, said some words, and all is as before."""
    assert done.code() == code, done.said
    assert loaded() >= ALL
    assert len(targets()) == 2
    for word in words:
        assert word in done.said, done.said
    record = LOCAL_NODE.read_text() if LOCAL_NODE.exists() else ""
    assert "driver-manager.record" not in record, record
