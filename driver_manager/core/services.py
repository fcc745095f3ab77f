"""What is done about processes of the host itself, and its services, that hold a GPU: one table, and the settings that change it.

A service that is known to come back by itself is stopped and started again; a display server is never touched without being asked for, as
that ends somebody's session; any other process may be in the middle of somebody's work and is waited for.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Final

from driver_manager.core.snapshot import Holder

COMM_LENGTH: Final = 15
"""The kernel cuts the name of a command to this length (TASK_COMM_LEN, proc(5))."""


class HostAction(StrEnum):
    """What is done about a process of the host."""

    STOP = "stop"
    """Its unit is stopped, and started again at the end."""
    REPORT = "report"
    """It is never touched: the run is refused before anything is changed."""
    WAIT = "wait"
    """It is waited for."""
    TERMINATE = "terminate"
    """It gets SIGTERM, once, and is waited for."""


@dataclass(frozen=True, slots=True)
class Service:
    """One known user of the driver on hosts. Names are patterns, of units without `.service`."""

    units: tuple[str, ...]
    commands: tuple[str, ...]
    action: HostAction
    what: str
    stand_in: str = ""
    """The unit to stop where its processes run in a session's scope instead."""


SERVICES: Final = (
    Service(
        ("display-manager", "gdm", "gdm3", "sddm", "lightdm", "xdm", "lxdm", "slim", "greetd", "ly"),
        (
            "Xorg",
            "X",
            "Xwayland",
            "gnome-shell",
            "kwin_wayland",
            "kwin_x11",
            "mutter",
            "sway",
            "weston",
            "gdm*",
            "sddm*",
            "lightdm*",
            "xdm",
        ),
        HostAction.REPORT,
        "a display server: stopping it ends the sessions on it",
        "display-manager.service",
    ),
    Service(
        ("nvidia-suspend", "nvidia-resume", "nvidia-hibernate", "nvidia-suspend-then-hibernate"), (), HostAction.WAIT, "ends by itself"
    ),
    Service(
        ("nvidia-dcgm", "dcgm", "nvidia-dcgm-exporter", "dcgm-exporter"),
        ("nv-hostengine", "dcgm-exporter"),
        HostAction.STOP,
        "watches GPUs",
    ),
    Service(("nvsm", "nvsm-*", "nvsm.*"), ("nvsm", "nvsm-*", "nvsm_*"), HostAction.STOP, "watches the system"),
    Service(("nvidia-powerd",), ("nvidia-powerd",), HostAction.STOP, "sets power limits"),
    Service(("nvidia-fabricmanager",), ("nv-fabricmanager", "nvidia-fabricmanager", "nvlsm"), HostAction.STOP, "runs the NVSwitch fabric"),
    Service(("nvidia-persistenced",), ("nvidia-persistenced",), HostAction.STOP, "keeps the driver initialised"),
)
"""In the order to stop them; they are started the other way round."""

HostServices = tuple[tuple[str, HostAction], ...]
"""Patterns of units, as people write them, and what to do about them; the first that fits counts."""


@dataclass(frozen=True, slots=True)
class HostUse:
    """A process of the host that holds a GPU, and what is done about it."""

    holder: Holder
    action: HostAction
    unit: str
    """The unit to stop; empty where it belongs to none that could be."""
    sentence: str
    setting: str
    """What a person can set to change it."""

    @property
    def words(self) -> str:
        """The process with its unit and devices, for people."""
        unit = f"unit {self.unit}" if self.unit else f"unit {self.holder.unit}" if self.holder.unit else "of no unit"
        return f"process {self.holder.pid} {self.holder.command} ({unit}) holds {', '.join(self.holder.devices[:3])}"


def host_uses(holders: Iterable[Holder], chosen: HostServices, processes: str) -> tuple[HostUse, ...]:
    """What is done about each holder that is no pod's.

    Args:
        holders: of a scan.
        chosen: the setting HOST_SERVICES.
        processes: the setting HOST_PROCESSES, for those of no known unit: `wait`, `refuse` or `terminate`.
    """
    return tuple(_host_use(holder, chosen, processes) for holder in holders if not holder.pod_uid)


def _host_use(holder: Holder, chosen: HostServices, processes: str) -> HostUse:
    row = _row_of(holder)
    own = holder.unit if holder.unit and holder.unit.endswith(".service") and not holder.unit.startswith("user@") else ""
    unit = own or (row.stand_in if row is not None and holder.unit else "")
    for pattern, action in chosen:
        if (own and _fits(own, pattern)) or (unit and row is not None and any(_fits(name, pattern) for name in row.units)):
            return HostUse(holder, action, unit, _sentence(action, row), f"HOST_SERVICES={pattern}={action}")
    if unit and row is not None:
        return HostUse(holder, row.action, unit, _sentence(row.action, row), f"HOST_SERVICES={_short(unit)}=stop|wait|report")
    action = {"refuse": HostAction.REPORT, "terminate": HostAction.TERMINATE}.get(processes, HostAction.WAIT)
    setting = f"HOST_SERVICES={_short(own)}=stop" if own else "HOST_PROCESSES=wait|refuse|terminate"
    return HostUse(holder, action, own, _sentence(action, None), setting)


def _sentence(action: HostAction, row: Service | None) -> str:
    what = f" ({row.what})" if row is not None else ""
    return {
        HostAction.STOP: f"its unit is stopped, and started again at the end{what}",
        HostAction.REPORT: f"it is not touched{what}",
        HostAction.WAIT: f"it is waited for{what}",
        HostAction.TERMINATE: f"it gets SIGTERM{what}",
    }[action]


def _row_of(holder: Holder) -> Service | None:
    """The row of a holder: by its unit, else by its command."""
    unit = holder.unit or ""
    by_unit = (row for row in SERVICES if any(_fits(unit, name) for name in row.units))
    by_command = (row for row in SERVICES if any(_is_command(holder.command, name) for name in row.commands))
    return next(by_unit, None) or next(by_command, None)


def _fits(unit: str, pattern: str) -> bool:
    return bool(unit) and fnmatchcase(_short(unit), _short(pattern))


def _short(unit: str) -> str:
    return unit.removesuffix(".service")


def _is_command(command: str, name: str) -> bool:
    return fnmatchcase(command, name) or (len(command) == COMM_LENGTH and name.startswith(command))


def units_to_stop(uses: Iterable[HostUse]) -> tuple[str, ...]:
    """The units to stop, each once, in order."""
    found = {use.unit for use in uses if use.action is HostAction.STOP and use.unit}
    return tuple(sorted(found, key=lambda unit: (_rank(unit), unit)))


def start_order(units: Iterable[str]) -> tuple[str, ...]:
    """Units that were stopped, in the order to start them."""
    return tuple(sorted(units, key=lambda unit: (_rank(unit), unit), reverse=True))


def _rank(unit: str) -> int:
    return next((number for number, row in enumerate(SERVICES) if any(_fits(unit, name) for name in row.units)), -1)


def pids_to_terminate(uses: Sequence[HostUse]) -> tuple[int, ...]:
    """Processes that get a SIGTERM."""
    return tuple(use.holder.pid for use in uses if use.action is HostAction.TERMINATE)
