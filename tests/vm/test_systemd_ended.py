"""A run of the installed unit that is ended in the middle: by systemd, by SIGKILL, or while it is stuck in the kernel."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from driver_manager.cli.systemd import run_install
from driver_manager.errors import LockHeld
from tests.vm.command import LOCAL_NODE, driver_in_use
from tests.vm.inside import CAP_SYS_ADMIN, CAP_SYS_MODULE, CAP_SYS_PTRACE, DRIVER, holding, load, opened, state_of
from tests.vm.systemd import (
    PERSISTENCED,
    UNIT,
    active,
    assert_put_back,
    how_it_ended,
    in_systemd,
    journal,
    main_pid,
    persistenced,
    run_that_waits,
    settle,
    systemctl,
    until,
)

CAP_NET_RAW = 13


def install_is_refused() -> bool:
    """Whether the command says that a run is under way."""
    try:
        run_install(is_remove=True, root="/", command="")
    except LockHeld:
        return True
    return False


@in_systemd
def test_a_killed_run_is_put_back_at_once() -> None:
    """SIGKILL while the daemon is stopped: nobody of the run is left to start it, so systemd's ExecStopPost does."""
    driver_in_use()
    persistenced()
    with holding(opened()):
        os.kill(run_that_waits(), signal.SIGKILL)
        settle()
        assert how_it_ended() == ("failed", "signal", str(int(signal.SIGKILL)))
        assert_put_back()
        assert not LOCAL_NODE.exists()


@in_systemd
def test_a_stop_puts_all_back() -> None:
    """`systemctl stop` in the middle of a wait: the run itself puts all back and ends with 75.

    Until then it sees the host's own mounts, has the rights that it needs and no others, and its unit cannot be taken away.
    """
    driver_in_use()
    persistenced()
    with holding(opened()):
        pid = run_that_waits()
        assert Path(f"/proc/{pid}/ns/mnt").readlink() == Path("/proc/1/ns/mnt").readlink()
        confined = dict(line.split(":\t") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        assert (confined["NoNewPrivs"], confined["Seccomp"]) == ("1", "2")
        rights = int(confined["CapBnd"], 16)
        assert all(rights >> each & 1 for each in (CAP_SYS_ADMIN, CAP_SYS_MODULE, CAP_SYS_PTRACE)), confined["CapBnd"]
        assert not rights >> CAP_NET_RAW & 1
        assert install_is_refused()
        assert systemctl("stop", UNIT).returncode == 0
        assert how_it_ended() == ("failed", "exit-code", "75")
        assert_put_back()
        assert "nothing to put back" in journal(), journal()


@in_systemd
def test_a_run_stuck_in_the_kernel_keeps_nothing_waiting() -> None:
    """Killed while the kernel removes a module: the child that is stuck there stays behind, and the unit has ended long before it."""
    load("nvidia", exit_ms=100000)
    load(*DRIVER[1:])
    persistenced()
    assert systemctl("start", "--no-block", UNIT).returncode == 0
    until(lambda: "Unloading" in state_of("nvidia"))
    os.kill(main_pid(), signal.SIGKILL)
    settle()
    assert how_it_ended() == ("failed", "signal", str(int(signal.SIGKILL)))
    assert active(PERSISTENCED) == "active"
    assert "Unloading" in state_of("nvidia")
