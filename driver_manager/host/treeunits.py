"""The systemd of a directory tree: `run/systemd-units.json` says what each unit is like, and its processes are those of the tree.

The file is `{"UNIT": {"active": true, "failed": true, "fails": "stop" | "start", "hang": "stop" | "start"}}`, each part optional. A unit
that it does not name is active as long as a process of the tree is in its cgroup, and else there is none of that name.
"""

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from driver_manager.host.calls import Finished
from driver_manager.host.faults import replace_text
from driver_manager.host.parsing import systemd_unit
from driver_manager.host.paths import names_in, text_of

UNITS: Final = "run/systemd-units.json"
_LOOK_EVERY = 0.05


class TreeUnits:
    """systemctl on one tree."""

    def __init__(self, tree: Path) -> None:
        self._tree = tree

    def systemctl(self, words: Sequence[str]) -> Finished:
        """Answers one command line, without its first word; only `is-active`, `stop` and `start` exist."""
        verb, units = words[0], [word for word in words[1:] if not word.startswith("-")]
        if verb == "is-active":
            states = [self._state(unit) for unit in units]
            return Finished(0 if set(states) == {"active"} else 3, "".join(f"{state}\n" for state in states))
        code = 0
        for unit in units:
            while self._about(unit).get("hang") == verb:
                time.sleep(_LOOK_EVERY)
            if self._about(unit).get("fails") == verb or verb not in ("stop", "start"):
                code = 1
                continue
            if unit not in self._all() and not self._is_active(unit):
                code = 5  # "Unit ... not loaded"
                continue
            if verb == "stop":
                for process in self._processes(unit):
                    shutil.rmtree(process)
            self._write(unit, is_active=verb == "start")
        return Finished(code, "")

    def _state(self, unit: str) -> str:
        if self._is_active(unit):
            return "active"
        return "failed" if self._about(unit).get("failed") else "inactive"

    def _is_active(self, unit: str) -> bool:
        about = self._about(unit)
        return bool(about["active"]) if "active" in about else any(True for _ in self._processes(unit))

    def _processes(self, unit: str) -> Iterator[Path]:
        for name in names_in(self._tree / "proc"):
            process = self._tree / "proc" / name
            if name.isdigit() and systemd_unit(text_of(process / "cgroup") or "") == unit:
                yield process

    def _about(self, unit: str) -> dict[str, Any]:
        return dict(self._all().get(unit, {}))

    def _all(self) -> dict[str, Any]:
        try:
            return dict(json.loads(text_of(self._tree / UNITS) or "{}"))
        except ValueError:
            return {}

    def _write(self, unit: str, *, is_active: bool) -> None:
        everything = self._all()
        everything[unit] = {**everything.get(unit, {}), "active": is_active}
        (self._tree / UNITS).parent.mkdir(parents=True, exist_ok=True)
        replace_text(self._tree / UNITS, json.dumps(everything, indent=1) + "\n")
