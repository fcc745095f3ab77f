"""The files of a machine whose runs systemd starts: what the unit says, and how the installed command puts them in place."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from driver_manager import names
from driver_manager.config import OPTIONS, effective_settings
from driver_manager.core.services import SERVICES
from driver_manager.errors import ConfigError, Forbidden, Refused
from driver_manager.host.unitfiles import install, remove, shipped

COMMAND = "/opt/driver-manager/bin/driver-manager"
UNIT, SETTINGS = names.SYSTEMD_UNIT, names.SYSTEMD_SETTINGS
NEVER = re.compile(
    r"ProtectKernel(Modules|Tunables|Logs)|ProtectControlGroups|ProtectSystem|ProtectHome|ProtectProc|ProtectHostname|ProtectClock|ProcSubset"
    r"|Private\w+|RestrictNamespaces|\w*Paths|\w+Directory|RootImage|TemporaryFileSystem|MountFlags|MountAPIVFS|DynamicUser|User|Group|Device\w+"
    r"|LoadCredential\w*|SetCredential\w*|NetworkNamespacePath|LogNamespace|WantedBy|RequiredBy|Before|RemainAfterExit|SuccessExitStatus"
)
"""Takes CAP_SYS_MODULE away, gives mounts of its own, hides devices or processes; or lets a boot or another unit start or wait for it."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with the program."""
    program = tmp_path / COMMAND.lstrip("/")
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/true\n")
    program.chmod(0o755)
    return tmp_path


def everything(root: Path) -> dict[str, str]:
    """All files below a folder, with their text; links with their target."""
    return {
        str(path.relative_to(root)): f"-> {path.readlink()}" if path.is_symlink() else path.read_text()
        for path in root.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def entries(text: str) -> list[tuple[str, str]]:
    """The settings of a unit."""
    return [(name, value) for name, _, value in (line.partition("=") for line in text.splitlines() if re.match(r"\w+=", line))]


# What the files say -------------------------------------------------------------------------------------------------


def test_the_unit_keeps_what_a_run_needs() -> None:
    """Decision 26: nothing takes CAP_SYS_MODULE away or gives mounts of its own; /run/nvidia outlives a run; no boot starts it."""
    given = entries(shipped(UNIT))
    assert [name for name, _ in given if NEVER.fullmatch(name)] == []
    rights = {right for name, value in given if name == "CapabilityBoundingSet" for right in value.split()}
    assert {"CAP_SYS_MODULE", "CAP_SYS_ADMIN", "CAP_SYS_PTRACE", "CAP_KILL"} <= rights
    assert dict(given)["SystemCallFilter"].startswith("~")
    assert "[Install]" not in shipped(UNIT).splitlines()


def test_the_unit_waits_for_no_service_that_it_stops() -> None:
    """A service ordered after the unit that starts it again would wait for ever."""
    ordered = {value for name, value in entries(shipped(UNIT)) if name in ("After", "Requires", "Wants", "Conflicts", "PartOf", "BindsTo")}
    assert ordered == {"network-online.target"}
    assert not any(unit in value for value in ordered for row in SERVICES for unit in row.units)


def test_the_settings_file_shows_the_defaults() -> None:
    """Every commented line is a setting that exists, with its default; as it is shipped the file sets nothing."""
    lines = shipped(SETTINGS).splitlines()
    assert [line for line in lines if line and not line.startswith("#")] == []
    shown = dict(line[1:].split("=", 1) for line in lines if re.match(r"#[A-Z_]+=", line))
    assert shown["HOST_DRIVER"] == "keep"
    effective = effective_settings({}, shown).settings
    default = effective_settings({}, {}).settings
    fields = {option.env: option.field for option in OPTIONS}
    assert {name for name in shown if getattr(effective, fields[name]) != getattr(default, fields[name])} == set()


# In place and away --------------------------------------------------------------------------------------------------


def test_installed(root: Path) -> None:
    """Unit and settings are there, for all to read; the unit names the program and nothing is left to fill in."""
    assert {done.path: done.what for done in install(root, COMMAND)} == {f"/{UNIT}": "written", f"/{SETTINGS}": "written"}
    unit = (root / UNIT).read_text()
    given = dict(entries(unit))
    assert given["ExecStart"] == f"{COMMAND} uninstall_driver"
    assert given["ExecStopPost"] == f"{COMMAND} restore --keep-status"
    assert given["EnvironmentFile"] == f"/{SETTINGS}"
    assert "@" not in unit.replace("@clock @cpu-emulation @debug @obsolete @raw-io @reboot @swap", "")
    assert {(root / path).stat().st_mode & 0o777 for path in (UNIT, SETTINGS)} == {0o644}


def test_installed_twice(root: Path) -> None:
    """The second time changes nothing; an older unit of ours is brought up to date."""
    install(root, COMMAND)
    before = everything(root)
    assert [done.what.partition(":")[0] for done in install(root, COMMAND)] == ["kept", "unchanged"]
    (root / UNIT).write_text(f"{(root / UNIT).read_text()}Nice=5\n")
    install(root, COMMAND)
    assert everything(root) == before


def test_removed_without_a_trace(root: Path) -> None:
    """What was installed goes, with the folder that was made for it; a second time says that nothing is there."""
    before = everything(root)
    install(root, COMMAND)
    assert [done.what for done in remove(root)] == ["removed", "removed"]
    assert everything(root) == before
    assert not (root / SETTINGS).parent.exists()
    assert [done.what for done in remove(root)] == ["not there", "not there"]


def test_a_persons_settings_stay(root: Path) -> None:
    """They are never written over and never removed, nor are changes of the unit beside it."""
    (root / SETTINGS).parent.mkdir(parents=True)
    (root / SETTINGS).write_text("HOST_DRIVER=unload\n")
    drop_in = root / f"{UNIT}.d/override.conf"
    drop_in.parent.mkdir(parents=True)
    drop_in.write_text("[Service]\nNice=5\n")
    before = everything(root)
    install(root, COMMAND)
    done = {each.path: each.what for each in remove(root)}
    assert everything(root) == before
    assert done[f"/{SETTINGS}"].startswith("kept")
    assert done[f"/{UNIT}.d"].startswith("kept")


@pytest.mark.parametrize("link", ["etc/systemd", "etc/driver-manager", "etc"])
def test_links_stay_in_the_tree(root: Path, link: str) -> None:
    """An absolute link leads to where it leads on that machine."""
    (root / link).parent.mkdir(parents=True, exist_ok=True)
    (root / link).symlink_to("/elsewhere")
    (root / "elsewhere").mkdir()
    install(root, COMMAND)
    assert len([path for path in everything(root) if path.startswith("elsewhere")]) in (1, 2)
    assert [done.what for done in remove(root)] == ["removed", "removed"]


# Refusals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    ["", "driver-manager", "/opt/nowhere", "/opt", "/opt/a b", "/opt/%h/x", f"/opt/..{COMMAND}", "/opt/x\nUser=y"],
)
def test_a_bad_command_is_refused(root: Path, command: str) -> None:
    """A unit that could not run, or not as it is written, is not written."""
    before = everything(root)
    with pytest.raises(ConfigError):
        install(root, command)
    assert everything(root) == before


@pytest.mark.parametrize("change", [install, lambda root, _: remove(root)])
def test_a_unit_that_is_not_ours_is_left_alone(root: Path, change: object) -> None:
    """Somebody's own unit of that name, or a masked one: refused, and nothing else is written either."""
    assert callable(change)
    unit = root / UNIT
    unit.parent.mkdir(parents=True)
    unit.write_text("[Service]\nExecStart=/bin/true\n")
    before = everything(root)
    with pytest.raises(Refused, match="somebody else"):
        change(root, COMMAND)
    assert everything(root) == before
    unit.unlink()
    unit.symlink_to("/dev/null")
    with pytest.raises(Refused, match="/dev/null"):
        change(root, COMMAND)
    assert unit.is_symlink()


def test_a_file_in_the_way_is_refused(root: Path) -> None:
    """Found before the settings are written."""
    (root / "etc").mkdir()
    (root / "etc/systemd").write_text("")
    before = everything(root)
    with pytest.raises(Refused, match="no folder"):
        install(root, COMMAND)
    assert everything(root) == before


def test_no_machine_is_refused(root: Path) -> None:
    """A root that is not there, or a file."""
    for bad in (root / "nowhere", root / COMMAND.lstrip("/")):
        with pytest.raises(ConfigError, match="no folder"):
            install(bad, COMMAND)


def test_a_full_disk_leaves_nothing_half(root: Path) -> None:
    """No room for the settings: a refusal, and neither of the files nor a part of one is there."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = everything(root)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(Forbidden, match="cannot be written"):
            install(root, COMMAND)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert everything(root) == before


# The command --------------------------------------------------------------------------------------------------------


@pytest.mark.real_processes
def test_the_installed_command(root: Path) -> None:
    """On a tree: says what it did to which file, and its exit codes are the program's."""
    program = Path(sys.executable).with_name("driver-manager")

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([program, "install-systemd", *words], capture_output=True, text=True, check=False, timeout=60)

    done = run("--root", str(root), "--command", COMMAND)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"/{UNIT}  written" in done.stdout
    assert run("--root", str(root), "--remove").returncode == 0
    assert [path for path in everything(root) if path.startswith("etc")] == []
    own = run("--root", str(root))
    assert own.returncode == 78
    assert str(program.resolve()) in own.stderr
    assert run("--root", str(root / "nowhere"), "--command", COMMAND).returncode == 78
    assert run("--root", "", "--remove").returncode == 78  # a variable that is not set is not the folder we are in
    assert run("--nothing").returncode == 64
