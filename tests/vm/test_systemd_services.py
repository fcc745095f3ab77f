"""The Host port's service methods on a real systemd, and what a run makes of the services that hold a GPU."""

from __future__ import annotations

from collections.abc import Awaitable
from pathlib import Path

from driver_manager.errors import ServiceFailed
from tests.vm.command import assert_free, assert_untouched, command, driver_in_use
from tests.vm.inside import MS_BIND, MS_REC, here, mount
from tests.vm.systemd import KEEPS_A_GPU_OPEN, PERSISTENCED, active, in_systemd, open_files, persistenced, service, systemctl, until

SLEEPS = "ExecStart=/usr/bin/sleep 1000\n"


async def assert_refused(work: Awaitable[None], *words: str) -> None:
    """It raises ServiceFailed, with these words."""
    said = ""
    try:
        await work
    except ServiceFailed as error:
        said = error.message
    assert said, "it was not refused"
    assert all(word in said for word in words), said


@in_systemd
async def test_states() -> None:
    """Active is what runs or is on its way; what has ended, has failed or does not exist is not."""
    service("runs.service", SLEEPS)
    service("ended.service", SLEEPS)
    service("failed.service", "Type=oneshot\nExecStart=/usr/bin/sh -c 'exit 3'\n")
    service("starting.service", "Type=oneshot\nExecStart=/usr/bin/sleep 1000\n")
    systemctl("start", "runs.service")
    systemctl("start", "failed.service")
    systemctl("start", "--no-block", "starting.service")
    units = ("runs.service", "ended.service", "failed.service", "starting.service", "nowhere.service")
    assert await here().services(units) == dict(zip(units, (True, False, False, True, False), strict=True))


@in_systemd
async def test_stopped_and_started() -> None:
    """Its processes have ended when the call returns, also of one that systemd would restart; a second stop or start is fine."""
    service("a.service", f"{SLEEPS}Restart=always\nRestartSec=0\n")
    host = here()
    for _ in range(2):
        await host.start_service("a.service", 10)
        assert active("a.service") == "active"
    for _ in range(2):
        await host.stop_service("a.service", 10)
        assert active("a.service") == "inactive"


@in_systemd
async def test_one_that_ignores_the_signal_is_stopped_all_the_same() -> None:
    """Systemd kills it after its own limit and calls it failed: it has ended, and that is what counts."""
    service("deaf.service", "ExecStart=/usr/bin/sh -c 'trap \"\" TERM; while :; do sleep 1; done'\nTimeoutStopSec=1\n")
    systemctl("start", "deaf.service")
    await here().stop_service("deaf.service", 20)
    assert active("deaf.service") == "failed"


@in_systemd
async def test_a_stop_that_takes_too_long_is_said() -> None:
    """Within its limit, with the unit's name; systemd goes on with it."""
    service("slow.service", f"{SLEEPS}ExecStop=/usr/bin/sleep 1000\n")
    systemctl("start", "slow.service")
    await assert_refused(here().stop_service("slow.service", 1), "slow.service", "not within 1 s")
    assert active("slow.service") == "deactivating"


@in_systemd
async def test_a_start_that_fails_is_said() -> None:
    """A program that fails, one that is not there, a masked unit, a unit that is not there."""
    service("bad.service", "Type=oneshot\nExecStart=/usr/bin/sh -c 'exit 3'\n")
    service("missing.service", "Type=exec\nExecStart=/usr/bin/missing\n")
    Path("/run/systemd/system/masked.service").symlink_to("/dev/null")
    systemctl("daemon-reload")
    for name in ("bad", "missing", "masked", "nowhere"):
        await assert_refused(here().start_service(f"{name}.service", 20), f"{name}.service", "was not started")


@in_systemd
async def test_a_start_that_waits_for_its_own_run_is_said() -> None:
    """A service ordered after the unit that starts it waits for that unit: said within the limit. So the unit has no such order."""
    Path("/run/systemd/system/ordered.service").write_text(f"[Unit]\nAfter=working.service\n[Service]\n{SLEEPS}")
    service("working.service", "Type=oneshot\nExecStart=/usr/bin/sleep 1000\n")
    systemctl("start", "--no-block", "working.service")
    await assert_refused(here().start_service("ordered.service", 1), "ordered.service", "not within 1 s")


@in_systemd
async def test_from_a_container_with_the_hosts_root() -> None:
    """Systemctl runs in the host's root at /host, and its answers are believed only where the state says the same."""
    service("a.service", SLEEPS)
    assert mount("/", "/host", flags=MS_BIND | MS_REC) == 0
    host = here()
    await host.start_service("a.service", 10)
    assert await host.services(["a.service"]) == {"a.service": True}
    await host.stop_service("a.service", 10)
    assert active("a.service") == "inactive"


@in_systemd
def test_n29_a_daemon_is_stopped_and_started_again() -> None:
    """N29: the unit of the process that holds the GPU is found by its cgroup; it runs again when all is done."""
    driver_in_use()
    persistenced()
    assert_untouched(command("plan"), 0, PERSISTENCED, "/dev/nvidia0")
    assert_free(command("uninstall_driver"))
    assert active(PERSISTENCED) == "active"


@in_systemd
def test_n29_a_display_server_is_not_touched() -> None:
    """N29: refused with its name before anything is changed; stopped only where a setting says so."""
    driver_in_use()
    service("gdm.service", KEEPS_A_GPU_OPEN)
    systemctl("start", "gdm.service")
    until(lambda: "/dev/nvidia0" in open_files("gdm.service"))
    assert_untouched(command("uninstall_driver"), 65, "gdm.service")
    assert active("gdm.service") == "active"
    assert_free(command("uninstall_driver", HOST_SERVICES="gdm=stop"))
    assert active("gdm.service") == "active"
