"""The installed unit on a real systemd, on a real kernel: from `systemctl start` to what is left."""

from __future__ import annotations

import subprocess

from tests.vm.command import ALL, LOCAL_NODE, driver_in_use
from tests.vm.guest import vm
from tests.vm.inside import holding, left, opened, targets
from tests.vm.machine import Guest
from tests.vm.systemd import (
    PERSISTENCED,
    SETTINGS,
    UNIT,
    active,
    assert_put_back,
    how_it_ended,
    in_systemd,
    journal,
    persistenced,
    shown,
    status,
    systemctl,
)


@in_systemd
def test_a_start_frees_the_machine() -> None:
    """Modules and mounts go, for the whole host; the daemon that held them was stopped and runs again; the unit ended well."""
    driver_in_use()
    persistenced()
    begun = shown(PERSISTENCED, "InvocationID")
    assert systemctl("start", UNIT).returncode == 0, journal()
    assert how_it_ended() == ("inactive", "success", "0")
    assert left() == ([], [])
    assert targets(1) == []
    assert not LOCAL_NODE.exists()
    assert active(PERSISTENCED) == "active"
    assert shown(PERSISTENCED, "InvocationID") != begun
    assert "exit=0" in journal(), journal()


@in_systemd
def test_a_deadline_is_the_units_exit_status() -> None:
    """A held device and a short limit in the settings file: 75, all is back, and the reason stays for `status`."""
    SETTINGS.write_text(f"{SETTINGS.read_text()}\nHOLDER_TIMEOUT=1s\n")
    driver_in_use()
    persistenced()
    with holding(opened()) as pid:
        assert systemctl("start", UNIT).returncode == 1
        assert how_it_ended() == ("failed", "exit-code", "75")
        assert_put_back()
        assert status()["reason"] == "held-by-process"
        assert str(pid) in journal()


@in_systemd
def test_the_settings_file_wins_over_the_unit() -> None:
    """A node of a cluster without its name: 78 before anything is looked at, and the daemon was never stopped."""
    SETTINGS.write_text(f"{SETTINGS.read_text()}\nNO_CLUSTER=false\n")
    driver_in_use()
    persistenced()
    begun = shown(PERSISTENCED, "InvocationID")
    assert systemctl("start", UNIT).returncode == 1
    assert how_it_ended() == ("failed", "exit-code", "78")
    assert "NODE_NAME" in journal()
    assert_put_back()
    assert shown(PERSISTENCED, "InvocationID") == begun


@in_systemd
def test_without_its_settings_there_is_no_run() -> None:
    """They might have named a cluster, or what has to stay: systemd says which file is missing."""
    SETTINGS.unlink()
    driver_in_use()
    assert systemctl("start", UNIT).returncode == 1
    assert how_it_ended() == ("failed", "resources", "0")
    assert "environment files" in journal()
    assert left()[0] == sorted(ALL)


@in_systemd
def test_the_unit_is_what_systemd_takes() -> None:
    """`systemd-analyze verify` has nothing to say, and nobody can enable it for each boot by accident."""
    said = subprocess.run(["systemd-analyze", "verify", UNIT], capture_output=True, text=True, check=False)
    assert (said.returncode, said.stdout, said.stderr) == (0, "", "")
    assert shown(UNIT, "UnitFileState", "ExecMainPID") == {"UnitFileState": "static", "ExecMainPID": "0"}


@vm
def test_the_unit_is_installed_and_removed(systemd_guest: Guest) -> None:
    """A second time changes nothing; edited settings stay; then systemd knows the unit no more."""
    guest = systemd_guest
    again = guest.run("driver-manager", "install-systemd")
    assert (again.code, again.out.count("unchanged"), again.out.count("kept")) == (0, 1, 1), again
    guest.run("sh", "-c", f"echo HOST_DRIVER=unload >> {SETTINGS}")
    removed = guest.run("driver-manager", "install-systemd", "--remove")
    assert removed.code == 0, removed.err
    assert f"{SETTINGS}  kept" in removed.out
    assert guest.run("systemctl", "show", "--property", "LoadState", UNIT).out.strip() == "LoadState=not-found"
