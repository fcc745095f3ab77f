"""The installed command, ended in the middle or met by another run."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from tests.vm.command import ALL, Command, assert_free, assert_untouched, command, driver_in_use
from tests.vm.guest import in_guest
from tests.vm.inside import DRIVER, DRIVER_ROOT, holding, load, loaded, opened, tmpfs, write


@in_guest
def test_sigterm_puts_all_back() -> None:
    """In the middle of a wait: 75, nothing changed, no record."""
    driver_in_use()
    with holding(opened()) as pid:
        done = command("uninstall_driver")
        done.hear(str(pid))
        done.kill(signal.SIGTERM)
        assert_untouched(done, 75)


@in_guest
def test_a_killed_run_is_taken_up_by_the_next() -> None:
    """SIGKILL in the middle: the lock is free, restore has something to put back or not, and the next run finishes."""
    driver_in_use()
    with holding(opened()) as pid:
        done = command("uninstall_driver")
        done.hear(str(pid))
        done.kill()
        assert done.code() == -signal.SIGKILL
        restored = command("restore")
        assert restored.code() == 0, restored.said
        assert loaded() == ALL
    assert_free(command("uninstall_driver"))


@in_guest
def test_two_runs_do_not_meet() -> None:
    """The second waits for the lock and names who holds it."""
    driver_in_use()
    with holding(opened()) as pid:
        first = command("uninstall_driver")
        first.hear(str(pid))
        second = command("uninstall_driver", LOCK_TIMEOUT="1s")
        assert second.code() == 75
        assert f"pid {first.pid}" in second.said, second.said
    assert_free(first)


@in_guest
def test_a_killed_removal_in_the_kernel_is_taken_up() -> None:
    """SIGKILL while the kernel removes a module: it goes on there, and the next run ends well."""
    load("nvidia", exit_ms=60_000)
    load(*DRIVER[1:])
    tmpfs(DRIVER_ROOT)
    done = command("uninstall_driver")
    while not (loaded() == {"nvidia"} and "Unloading" in read_modules()):
        time.sleep(0.01)
    done.kill()
    assert done.code() == -signal.SIGKILL
    meanwhile = command("uninstall_driver")
    assert meanwhile.code() in (71, 75), meanwhile.said
    assert write("/sys/module/nvidia/parameters/exit_ms", "0") == 0
    while loaded():
        time.sleep(0.05)
    assert_free(command("uninstall_driver"))


def child_of(done: Command) -> int:
    """The child that a run has for calls into the kernel."""
    deadline = time.monotonic() + 20
    while len(pids := Path(f"/proc/{done.pid}/task/{done.pid}/children").read_text().split()) != 1:
        assert time.monotonic() < deadline, (pids, done.said)
        time.sleep(0.02)
    return int(pids[0])


@in_guest
def test_a_child_that_is_killed_while_it_waits_is_replaced() -> None:
    """As by the OOM killer, before it was asked for anything: the run goes on with another one."""
    driver_in_use()
    with holding(opened()) as pid:
        done = command("uninstall_driver")
        done.hear(str(pid))
        os.kill(child_of(done), signal.SIGKILL)
    assert_free(done)


@in_guest
def test_a_child_that_is_killed_in_the_middle_of_a_removal() -> None:
    """The kernel ends what it has begun, and the run finds it done at the next try: it does not fail with half the modules gone."""
    load("nvidia", exit_ms=60_000)
    load(*DRIVER[1:])
    tmpfs(DRIVER_ROOT)
    done = command("uninstall_driver")
    while not (loaded() == {"nvidia"} and "Unloading" in read_modules()):
        time.sleep(0.01)
    os.kill(child_of(done), signal.SIGKILL)
    assert write("/sys/module/nvidia/parameters/exit_ms", "0") == 0
    assert_free(done)
    assert "was broken off" in done.said


@in_guest
def test_the_child_ends_with_the_run() -> None:
    """A run that is killed leaves none behind that waits for calls."""
    driver_in_use()
    with holding(opened()) as pid:
        done = command("uninstall_driver")
        done.hear(str(pid))
        waiting = child_of(done)
        done.kill()
        done.code()
        deadline = time.monotonic() + 20
        while Path(f"/proc/{waiting}").exists() and "Z" not in Path(f"/proc/{waiting}/stat").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert loaded() == ALL


def read_modules() -> str:
    """The text of /proc/modules."""
    with open("/proc/modules") as file:  # noqa: PTH123 - read in a tight loop
        return file.read()
