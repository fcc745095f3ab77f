"""For code in a guest that is a node of a cluster: the command as the driver's pod runs it, and a container that holds a GPU.

Imported before a guest is saved, with all that a run against an API server imports, so that a run is a fork and takes no seconds to start.
"""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import mkdtemp

import driver_manager.cli.live
import driver_manager.cli.render
import driver_manager.kube.connection  # noqa: F401 - see above
from tests.vm.command import become, driver_in_use
from tests.vm.inside import child, left, opened, read, targets, write

RUNS = Path("/tmp/runs")
RNDADDENTROPY, RNDRESEEDCRNG = 0x40085203, 0x5207
SERVICE_ACCOUNT = Path("/run/secrets/kubernetes.io/serviceaccount")
STATE_FILES = (
    "nvidia-driver.state",
    "nvidia-driver.pid",
    "validations/driver-ready",
    "validations/toolkit-ready",
    "validations/.driver-ctr-ready",
    "validations/somebody-elses",
)
"""What a driver container and its validator leave below /run/nvidia."""
LOCK = "driver-manager.lock"
"""Stays on purpose: a lock file that goes can be locked twice."""


def be_a_node(now: float, entropy: str, ca: str) -> dict[str, str]:
    """Makes this guest a machine of a cluster; gives what a kubelet would tell of it.

    Args:
        now: the time of day: a saved guest goes on with the time at which it was saved.
        entropy: 32 bytes in hex that no other guest has: those from one saved state would all draw the same boot id.
        ca: the certificate that the API server has to show.
    """
    time.clock_settime(time.CLOCK_REALTIME, now)
    with open("/dev/urandom", "wb") as random:  # noqa: PTH123 - for ioctl
        fcntl.ioctl(random, RNDADDENTROPY, struct.pack("ii32s", 256, 32, bytes.fromhex(entropy)))
        fcntl.ioctl(random, RNDRESEEDCRNG)
    SERVICE_ACCOUNT.mkdir(parents=True)
    (SERVICE_ACCOUNT / "ca.crt").write_text(ca)
    return {"bootID": read("/proc/sys/kernel/random/boot_id"), "kernelVersion": os.uname().release}


def install_driver() -> None:
    """Leaves the guest as a driver container does."""
    driver_in_use()
    for name in STATE_FILES:
        file = Path("/run/nvidia", name)
        file.parent.mkdir(exist_ok=True)
        file.write_text("old\n")


def hold_a_gpu(cgroup: str) -> int:
    """A process of a container, in its cgroup, that has a GPU open and outlives this call; gives its number."""
    folder = Path(f"/sys/fs/cgroup{cgroup}")
    folder.mkdir(parents=True)

    def hold() -> int:
        os.setsid()
        assert write(str(folder / "cgroup.procs"), str(os.getpid())) == 0
        return opened()()

    return child(hold)


def kill(pid: int) -> None:
    """SIGKILL, as the kernel does it: the process may still be on its way out when this returns."""
    os.kill(pid, signal.SIGKILL)


def begin(words: Sequence[str], settings: Mapping[str, str], token: str, is_program: bool) -> tuple[int, str]:
    """Starts the command; it outlives this call. Gives its number, and the folder for what it prints and its exit code.

    Args:
        words: the command line.
        settings: its environment.
        token: of the service account; without one it has no service account.
        is_program: the program as it is installed, which takes seconds to start, instead of a fork with the same code.
    """
    (SERVICE_ACCOUNT / "token").write_text(token)
    RUNS.mkdir(exist_ok=True)
    folder = Path(mkdtemp(dir=RUNS))
    reading, writing = os.pipe()
    if not os.fork():
        os.setsid()
        _keep(words, settings, folder, is_program, writing)
    os.close(writing)
    with os.fdopen(reading) as said:
        return int(said.readline()), str(folder)


def _keep(words: Sequence[str], settings: Mapping[str, str], folder: Path, is_program: bool, writing: int) -> None:
    """Runs the command in a child and writes down how it ended."""
    pid = os.fork()
    if not pid:
        out, err = (os.open(folder / name, os.O_CREAT | os.O_WRONLY) for name in ("out", "err"))
        if not is_program:
            become(words, settings, out, err)
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.execvpe("driver-manager", ["driver-manager", *words], {**os.environ, **settings, "LOG_FORMAT": "json"})
    os.write(writing, b"%d\n" % pid)
    os.close(writing)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    (folder / "code.new").write_text(str(code))
    (folder / "code.new").rename(folder / "code")
    os._exit(0)


def so_far(folder: str) -> tuple[int | None, str, str]:
    """The exit code of a run, None while it lives, and what it has printed."""
    code, out, err = (Path(folder, name) for name in ("code", "out", "err"))
    ended = int(code.read_text()) if code.exists() else None
    return ended, out.read_text() if out.exists() else "", err.read_text() if err.exists() else ""


def remains() -> dict[str, list[str]]:
    """What is there of the driver: modules by the kernel's own folder of them, mounts, files."""
    modules, _ = left()
    shown = [path.name for path in Path("/sys/module").iterdir() if path.name.startswith("nvidia")]
    assert sorted(shown) == modules
    files = [str(path.relative_to("/run/nvidia")) for path in Path("/run/nvidia").rglob("*") if path.is_file()]
    return {"modules": modules, "mounts": targets(), "files": sorted(set(files) - {LOCK})}
