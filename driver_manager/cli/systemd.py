"""The command `install-systemd`: the unit of a bare machine in place, or away again, and systemd told of it."""

import asyncio
import sys
from pathlib import Path
from typing import Final

import click

from driver_manager import names
from driver_manager.errors import ConfigError, Exit, HostError, LockHeld
from driver_manager.host.calls import Finished, KernelCalls
from driver_manager.host.unitfiles import ROOT_HINT, install, remove

_UNIT: Final = Path(names.SYSTEMD_UNIT).name
_BOOTED: Final = Path("/run/systemd/system")
"""There where systemd runs: sd_booted(3)."""
_SECONDS: Final = 60.0


def run_install(*, is_remove: bool, root: str, command: str) -> int:
    """Puts the files in place or takes them away."""
    if not root:  # as of a variable that is not set; for pathlib that is the folder we are in
        raise ConfigError("--root is empty", hint=ROOT_HINT)
    machine = Path(root).absolute()
    is_here = machine.resolve() == Path("/")
    if is_here:
        _check_idle()
    done = remove(machine) if is_remove else install(machine, command or own_command())
    for each in done:
        click.echo(f"{each.path}  {each.what}")
    if not is_here or not _BOOTED.is_dir():
        click.echo("no systemd was told: it reads these files when it starts")
        return int(Exit.DONE)
    if (told := _systemctl("daemon-reload")) is None or told.code:
        raise HostError("systemd did not read its units again", hint="systemctl daemon-reload")
    if not is_remove:
        click.echo("a run: systemctl start driver-manager    what it would do: driver-manager plan --no-cluster")
    return int(Exit.DONE)


def own_command() -> str:
    """The path of this program, links followed."""
    called = Path(sys.argv[0])
    name = "driver-manager"
    return str((called if called.name == name and called.is_file() else Path(sys.executable).with_name(name)).resolve())


def _check_idle() -> None:
    """No run is under way.

    Raises:
        LockHeld: one is.
    """
    if _BOOTED.is_dir() and (said := _systemctl("is-active", _UNIT)) is not None:
        state = said.output.strip()
        if state in ("activating", "deactivating"):
            raise LockHeld(f"{_UNIT} is {state}: a run is under way", hint=f"wait for it, or end it: systemctl stop {_UNIT}")


def _systemctl(*words: str) -> Finished | None:
    try:
        return asyncio.run(KernelCalls().run(("systemctl", *words), _SECONDS))
    except TimeoutError as error:
        raise HostError(f"systemd gave no answer in {_SECONDS:g} s", hint="systemctl status") from error
