from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from driver_manager.errors import ConfigError, DriverManagerError, HostError, InvariantBroken, LockHeld
from driver_manager.host import LinuxHost, open_host
from driver_manager.ports import Clock

from .trees import Tree

LOCK = "run/nvidia/driver-manager.lock"
PID = "run/nvidia/nvidia-driver.pid"


async def test_a_file_below_run_is_removed_once(tree: Tree, host: LinuxHost) -> None:
    """True for what was there, False for what was not, and only the first is a call."""
    tree.file("run/nvidia/nvidia-driver.state", "1")
    assert await host.remove_file("/run/nvidia/nvidia-driver.state")
    assert not await host.remove_file("run/nvidia/nvidia-driver.state")
    assert tree.results() == [("unlink", "/run/nvidia/nvidia-driver.state", 0)]


@pytest.mark.parametrize("path", ["/etc/passwd", "/run/../etc/passwd", "etc/passwd"])
async def test_a_file_elsewhere_is_never_removed(tree: Tree, host: LinuxHost, path: str) -> None:
    """Only files below /run may be removed."""
    tree.file("etc/passwd")
    with pytest.raises(InvariantBroken):
        await host.remove_file(path)
    assert (tree.root / "etc/passwd").exists()


async def test_a_refused_removal_is_an_error(tree: Tree, host: LinuxHost) -> None:
    """A read-only /run is said with what to do about it."""
    tree.file("run/x")
    tree.faults({"call": "unlink", "errno": "EROFS"})
    with pytest.raises(HostError, match="read-only") as caught:
        await host.remove_file("/run/x")
    assert caught.value.errno_name == "EROFS"


async def test_the_pid_file_goes_when_nobody_locks_it(tree: Tree, host: LinuxHost) -> None:
    """A pid file of a driver container that has ended is removed; none is fine."""
    assert not await host.remove_pid_file()
    tree.file(PID, "77")
    assert (await host.look()).has_pid_file
    assert await host.remove_pid_file()
    assert not (await host.look()).has_pid_file


async def test_a_locked_pid_file_stays(tree: Tree, host: LinuxHost) -> None:
    """The lock of a driver container that lives is respected."""
    with tree.file(PID, "77").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert not await host.remove_pid_file()
        assert (tree.root / PID).exists()
    assert await host.remove_pid_file()


async def test_the_lock_keeps_a_second_run_out(tree: Tree, host: LinuxHost) -> None:
    """While one run holds the lock another is refused with the holder's number and start, and comes in afterwards."""
    async with host.lock(0):
        with pytest.raises(LockHeld, match=rf"pid {os.getpid()} since 2026-01-31T09:00:00Z holds .*{LOCK}"):
            async with host.lock(0.3):
                pytest.fail("two runs at once")
    async with host.lock(0):
        pass
    assert (tree.root / LOCK).read_text() == ""


async def test_the_lock_is_waited_for(host: LinuxHost) -> None:
    """A run that waits goes on soon after the other has ended."""

    async def first() -> None:
        async with host.lock(0):
            await asyncio.sleep(0.3)

    task = asyncio.create_task(first())
    await asyncio.sleep(0.05)
    async with host.lock(5):
        assert task.done()
    await task


async def test_the_lock_is_freed_when_its_block_fails(host: LinuxHost) -> None:
    """An error inside frees the lock and comes out as it is."""
    with pytest.raises(RuntimeError, match="inside"):
        async with host.lock(0):
            raise RuntimeError("inside")
    async with host.lock(0):
        pass


@pytest.mark.real_processes
async def test_a_killed_run_frees_the_lock(tree: Tree, host: LinuxHost) -> None:
    """SIGKILL leaves no lock behind."""
    lock = tree.file(LOCK, "pid 1 since long ago\n")
    code = f"import fcntl, time; f = open({str(lock)!r}); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(LockHeld, match="pid 1 since long ago"):
            async with host.lock(0.1):
                pass
        process.send_signal(signal.SIGKILL)
        async with host.lock(5):
            pass


async def test_a_lock_that_cannot_be_made_is_an_error(tree: Tree, host: LinuxHost) -> None:
    """A lock file that is a link is not followed."""
    tree.link(LOCK, "/etc/passwd")
    with pytest.raises(HostError, match="lock file"):
        async with host.lock(0):
            pass


@pytest.mark.parametrize("name", ["nothing", "file"])
async def test_a_tree_that_is_no_folder_is_a_bad_setting(tmp_path: Path, clock: Clock, name: str) -> None:
    """A mistyped path is refused at once."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError):
        open_host(tmp_path / name, clock)


async def test_nvidia_smi_answers_from_its_file(tree: Tree, host: LinuxHost) -> None:
    """The version is what the host's program prints, if it is one and the program succeeds."""
    assert await host.host_driver_version(5) is None
    assert tree.calls() == []
    tree.file("run/nvidia-smi.json", '{"stdout": "550.54.15\\n550.54.15\\n", "rc": 0}')
    assert await host.host_driver_version(5) == "550.54.15"
    tree.file("run/nvidia-smi.json", '{"stdout": "550.54.15\\n", "rc": 9}')
    assert await host.host_driver_version(5) is None
    tree.file("run/nvidia-smi.json", '{"stdout": "No devices were found\\n", "rc": 0}')
    assert await host.host_driver_version(5) is None
    assert [call["call"] for call in tree.calls()] == ["execve"] * 3


async def test_a_hanging_nvidia_smi_is_given_up(tree: Tree, host: LinuxHost) -> None:
    """No answer in time is no answer."""
    tree.file("run/nvidia-smi.json", '{"stdout": "550.54.15", "hang": true}')
    began = time.monotonic()
    assert await host.host_driver_version(0.2) is None
    assert time.monotonic() - began < 2


async def test_every_error_is_one_of_ours(tree: Tree, host: LinuxHost) -> None:
    """Whatever errno a call gives, the port raises its own errors, with the errno's name."""
    tree.module("nvidia")
    for name in ("EIO", "EPERM", "EAGAIN", "EBUSY", "EINTR", "ENOSYS", "EINVAL"):
        tree.faults({"call": "delete_module", "errno": name})
        with pytest.raises(DriverManagerError, match=name) as caught:
            await host.unload_module("nvidia", 5)
        assert isinstance(caught.value, HostError)
        assert caught.value.errno_name == name
        assert caught.value.hint
