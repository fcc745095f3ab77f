"""Puts the systemd unit of a bare machine and its settings file in place, and takes them away again.

All refusals come before the first write. The unit is ours and is written anew each time; the settings are a person's from the moment they
are there, so an existing file is never written over, and taken away only if nobody has changed it. Links in the machine's tree are followed
as that machine would follow them, so nothing outside it is touched.
"""

import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Final

from driver_manager import names
from driver_manager.errors import ConfigError, Forbidden, Refused
from driver_manager.host.faults import replace_text
from driver_manager.host.paths import resolve_in, text_of

_COMMAND: Final = "@COMMAND@"
_PLAIN_PATH: Final = re.compile(r"(?:/[-A-Za-z0-9_.+@:~]+)+")
"""What systemd takes as one word, and as it stands."""
_MODE: Final = 0o644
ROOT_HINT: Final = "--root names the root folder of a machine or of an image"
_NOT_WRITABLE: Final = "Run as root, on a file system that can be written."


@dataclass(frozen=True, slots=True)
class Done:
    """What became of one file."""

    path: str
    """As the machine knows it."""
    what: str
    """`written`, `unchanged`, `kept: ...`, `removed` or `not there`."""


def shipped(path: str) -> str:
    """The text that this package has for one of the two files."""
    return (resources.files("driver_manager") / "systemd" / Path(path).name).read_text(encoding="utf-8")


def install(root: Path, command: str) -> tuple[Done, ...]:
    """Writes the unit, and the settings if there are none.

    Args:
        root: of the machine.
        command: path of the installed program there.

    Raises:
        ConfigError: no such folder, or no such program in it. Refused: what is there is not ours. Forbidden: it may not be written.
    """
    machine = _Machine(root)
    machine.check_command(command)
    unit = shipped(names.SYSTEMD_UNIT).replace(_COMMAND, command)
    machine.check_unit()
    for path in (names.SYSTEMD_SETTINGS, names.SYSTEMD_UNIT):
        machine.check_writable(path)
    return (
        machine.write(names.SYSTEMD_SETTINGS, shipped(names.SYSTEMD_SETTINGS), keep="it was there already"),  # first: no unit without it
        machine.write(names.SYSTEMD_UNIT, unit),
    )


def remove(root: Path) -> tuple[Done, ...]:
    """Takes away the unit, and the settings if nobody has changed them.

    Raises:
        ConfigError: no such folder. Refused: the unit is not ours. Forbidden: it may not be removed.
    """
    machine = _Machine(root)
    machine.check_unit()
    for path in (names.SYSTEMD_UNIT, names.SYSTEMD_SETTINGS):
        machine.check_writable(path)
    return tuple(machine.remove_all())


class _Machine:
    """The files of one machine."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise ConfigError(f"{root} is no folder", hint=ROOT_HINT)
        self._root = root

    def _file(self, path: str) -> Path:
        """Where a path of the machine is; the last part is not followed if it is a link."""
        folder, _, name = f"/{path.lstrip('/')}".rpartition("/")
        return self._root / resolve_in(str(self._root), folder).lstrip("/") / name

    def check_command(self, command: str) -> None:
        hint = "--command names the installed program by its whole path, as the machine knows it"
        if not _PLAIN_PATH.fullmatch(command) or ".." in command.split("/"):
            raise ConfigError(f"{command!r} cannot be the command of a unit: it is no whole, plain path", hint=hint)
        program = self._root / resolve_in(str(self._root), command).lstrip("/")
        with suppress(OSError):
            status = program.stat()
            if stat.S_ISREG(status.st_mode) and status.st_mode & 0o111:
                return
        raise ConfigError(f"{command} is no program in {self._root}", hint=f"install it there first; {hint}")

    def check_unit(self) -> None:
        """What is in the unit's place is either nothing or ours."""
        file = self._file(names.SYSTEMD_UNIT)
        if not os.path.lexists(file):
            return
        first = shipped(names.SYSTEMD_UNIT).partition("\n")[0]
        if file.is_symlink() or self._text(names.SYSTEMD_UNIT).partition("\n")[0] != first:
            what = f"a link to {file.readlink()}" if file.is_symlink() else "somebody else's file"
            hint = "remove it yourself; `systemctl unmask driver-manager` if it was masked"
            raise Refused(f"/{names.SYSTEMD_UNIT} is {what}, and left alone", hint=hint)

    def check_writable(self, path: str) -> None:
        folder = self._file(path).parent
        while not os.path.lexists(folder):
            folder = folder.parent
        if not folder.is_dir():
            raise Refused(f"{folder} is no folder, so /{path} cannot be there", hint="move it away")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise Forbidden(f"{folder} may not be written", hint=_NOT_WRITABLE)

    def _text(self, path: str) -> str:
        try:
            return text_of(self._file(path)) or ""
        except OSError as error:
            raise Forbidden(f"/{path} cannot be read: {error.strerror}", hint="Run as root.") from error

    def write(self, path: str, text: str, keep: str = "") -> Done:
        """Writes a file; one that is there stays as it is where `keep` says why."""
        file = self._file(path)
        if os.path.lexists(file) and keep:
            return Done(f"/{path}", f"kept: {keep}")
        if self._text(path) == text:
            return Done(f"/{path}", "unchanged")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_text(file, text)
            file.chmod(_MODE)
        except OSError as error:
            raise Forbidden(f"{file} cannot be written: {error.strerror}", hint=_NOT_WRITABLE) from error
        return Done(f"/{path}", "written")

    def remove_all(self) -> Iterator[Done]:
        settings = self._file(names.SYSTEMD_SETTINGS)
        yield self._removed(names.SYSTEMD_UNIT)
        if os.path.lexists(settings) and self._text(names.SYSTEMD_SETTINGS) != shipped(names.SYSTEMD_SETTINGS):
            yield Done(f"/{names.SYSTEMD_SETTINGS}", "kept: somebody has changed it")
        else:
            yield self._removed(names.SYSTEMD_SETTINGS)
            with suppress(OSError):  # there is more in it
                settings.parent.rmdir()
        if (changes := self._file(f"{names.SYSTEMD_UNIT}.d")).is_dir():
            yield Done(f"/{names.SYSTEMD_UNIT}.d", f"kept: changes of the unit ({len(list(changes.iterdir()))} files)")

    def _removed(self, path: str) -> Done:
        file = self._file(path)
        try:
            file.unlink()
        except FileNotFoundError:
            return Done(f"/{path}", "not there")
        except OSError as error:
            raise Forbidden(f"{file} cannot be removed: {error.strerror}", hint="Run as root.") from error
        return Done(f"/{path}", "removed")
