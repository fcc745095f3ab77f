"""Trouble on demand for a host that is a directory tree: `faults.json` makes any call fail, slow or stop.

The file is a list of `{"call", "argument", "errno" | "delay" | "hold"}` and is read again at each call, so that it can be changed while a
run is under way. Without `argument` every call of that name is meant; an `argument` is one of the call's arguments, or all of them
with spaces between. `errno` is a name such as `EBUSY`, `delay` is in seconds. A call that meets `hold` stops until that entry has gone from
the file; `held.json` says meanwhile which call it is, so that a test knows when to kill.
"""

import contextlib
import errno
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from driver_manager.errors import ConfigError

_LOOK_EVERY = 0.02
_TRIES = 10
"""A file that somebody is just writing may be half there; read again this often before calling it broken."""


@dataclass(frozen=True, slots=True)
class Faults:
    """The faults of one tree."""

    tree: Path

    def meet(self, call: str, arguments: Sequence[object]) -> None:
        """Does to a call what the file says, in this thread: holds it, slows it, fails it.

        Raises:
            OSError: with the errno asked for. ConfigError: the file is not understood.
        """
        self._hold(call, arguments)
        entries = self._meant(call, arguments)
        time.sleep(sum(float(entry["delay"]) for entry in entries if "delay" in entry))
        for entry in entries:
            if "errno" in entry:
                number = getattr(errno, str(entry["errno"]), None)
                if not isinstance(number, int):
                    raise ConfigError(f"{self.file}: there is no errno {entry['errno']!r}")
                raise OSError(number, os.strerror(number), str(arguments[0]) if arguments else call)

    @property
    def file(self) -> Path:
        """Where the faults are."""
        return self.tree / "faults.json"

    def _hold(self, call: str, arguments: Sequence[object]) -> None:
        mark = self.tree / "held.json"
        is_marked = False
        try:
            while any(entry.get("hold") for entry in self._meant(call, arguments)):
                if not is_marked:
                    replace_text(mark, json.dumps({"call": call, "arguments": list(arguments)}))
                    is_marked = True
                time.sleep(_LOOK_EVERY)
        finally:
            if is_marked:
                with contextlib.suppress(OSError):
                    mark.unlink()

    def _meant(self, call: str, arguments: Sequence[object]) -> list[Mapping[str, Any]]:
        words = {str(argument) for argument in arguments} | {" ".join(map(str, arguments))}
        return [
            entry for entry in self._entries() if entry.get("call") == call and ("argument" not in entry or str(entry["argument"]) in words)
        ]

    def _entries(self) -> list[Mapping[str, Any]]:
        problem = ""
        for _ in range(_TRIES):
            try:
                entries = json.loads(self.file.read_text(encoding="utf-8"))
            except FileNotFoundError:
                return []
            except ValueError as error:
                problem = str(error)
                time.sleep(_LOOK_EVERY)
                continue
            if isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries):
                return entries
            problem = "not a list of objects"
            break
        raise ConfigError(f"{self.file} is not understood: {problem}")


def replace_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all; of one that does not fit nothing stays."""
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        new.write_text(text, encoding="utf-8", errors="surrogateescape")
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise
