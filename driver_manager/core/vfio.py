"""Moving GPUs to vfio and back, decided on values: who goes along, what forbids it, and which writes in which order.

A GPU is moved together with its companions (audio, USB, UCSI of its slot or IOMMU group) and with every other GPU of its IOMMU group that
is wanted too: a group can be given to a virtual machine only as a whole (Documentation/driver-api/vfio.rst). Only functions of NVIDIA are
ever touched. What forbids a move is found before its first write, and every move can be taken back.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from driver_manager.core.modalias import Alias, is_same_driver, is_vfio, vfio_driver
from driver_manager.core.snapshot import Holder, HolderScan, PciDevice
from driver_manager.errors import Exit
from driver_manager.names import NVIDIA

_ADDRESS: Final = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([01][0-9a-f])\.([0-7])", re.IGNORECASE)
_GPU_CLASSES: Final = ("0x0300", "0x0302")
_SWITCH_CLASS: Final = "0x0680"
_COMPANION_CLASSES: Final = ("0x0403", "0x0c03", "0x0c80")
_BRIDGE_CLASS: Final = "0x06"
_HARMLESS_DRIVERS: Final = ("pci-stub", "pci_stub")
"""Drivers that leave a group usable (drivers/vfio, vfio_dev_driver_allowed), besides those of bridges."""
_VFIO_NODE: Final = re.compile(r"(?:.*)?/dev/vfio/(.+)")
_NVIDIA_NODE: Final = re.compile(r"(?:.*)?/dev/nvidia(\d+)")
_DRI_NODE: Final = re.compile(r"(?:.*)?/dev/dri/(.+)")


class Role(StrEnum):
    """What a function is, as far as moving it goes."""

    GPU = "gpu"
    NVSWITCH = "nvswitch"
    COMPANION = "companion"
    """Part of a graphics card besides the GPU: audio, USB, UCSI."""
    OTHER = "other"


class Result(StrEnum):
    """What becomes of a device."""

    ALREADY = "already"
    PLANNED = "planned"
    DONE = "done"
    REFUSED = "refused"
    """Before anything was written."""
    FAILED = "failed"
    """And put back, unless the sentence says otherwise."""
    STUCK = "stuck"
    """A write has not come back; the device is as that write left it."""


def _role(vendor: str, device_class: str) -> Role:
    if vendor != NVIDIA:
        return Role.OTHER
    if device_class.startswith(_GPU_CLASSES):
        return Role.GPU
    if device_class.startswith(_SWITCH_CLASS):
        return Role.NVSWITCH
    return Role.COMPANION if device_class.startswith(_COMPANION_CLASSES) else Role.OTHER


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """One PCI function, as sysfs showed it."""

    address: str
    vendor: str
    device_class: str
    driver: str | None = None
    override: str = ""
    """Empty where none is set."""
    group: str | None = None
    """IOMMU group; None without one."""
    modalias: str = ""
    is_virtual: bool = False
    """Whether it is an SR-IOV virtual function."""
    nodes: frozenset[str] = frozenset()
    """Names of its device nodes below /dev that are its own: `vfio/devices/vfio0`, `dri/card1`, `nvidia0`."""
    is_enabled: bool = False
    """Whether a driver has it switched on. On vfio that is while a user has the device open, not the group alone (measured in the VM)."""

    is_locked: bool = False
    """Whether a write to it has not come back: nothing more can be read of it or written to it meanwhile."""

    @property
    def role(self) -> Role:
        """What it is."""
        return _role(self.vendor, self.device_class)

    @property
    def slot(self) -> str:
        """The address without the function's number."""
        return self.address.rpartition(".")[0]

    @property
    def spoils_its_group(self) -> bool:
        """Whether no virtual machine can have a function of its group because of it."""
        is_free = self.driver is None or is_vfio(self.driver) or self.driver in _HARMLESS_DRIVERS
        return not is_free and not self.device_class.startswith(_BRIDGE_CLASS + "04")

    @property
    def words(self) -> str:
        """Itself and its driver, for people."""
        return f"{self.address} ({self.driver or 'no driver'})"


@dataclass(frozen=True, slots=True)
class Original:
    """How a function was before it was first moved."""

    driver: str | None
    override: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bus:
    """The PCI bus at one moment, and what decides about moves on it."""

    functions: Mapping[str, Function]
    """By address."""
    aliases: tuple[Alias, ...] = ()
    """Of vfio drivers, from the host's modules.alias."""
    has_groups: bool | None = None
    """Whether the kernel makes IOMMU groups; None where that cannot be seen."""
    drivers: frozenset[str] = frozenset()
    """Names of the PCI drivers that are there."""
    originals: Mapping[str, Original] = field(default_factory=dict)
    """By address: what earlier moves of this boot had found."""
    holders: HolderScan = field(default_factory=HolderScan)
    sees_all_processes: bool = True
    notes: tuple[str, ...] = ()
    """What could not be read, in sentences."""

    def members(self, group: str | None) -> tuple[Function, ...]:
        """The functions of an IOMMU group."""
        return tuple(each for each in self.functions.values() if group is not None and each.group == group)


@dataclass(frozen=True, slots=True)
class Unit:
    """What is moved together or not at all."""

    mains: tuple[Function, ...]
    """The GPUs and NVSwitches that are wanted."""
    companions: tuple[Function, ...] = ()

    @property
    def functions(self) -> tuple[Function, ...]:
        """All of them, those wanted first."""
        return (*self.mains, *self.companions)


@dataclass(frozen=True, slots=True)
class Move:
    """One function to another driver."""

    function: Function
    """As it was."""
    override: str
    driver: str | None = None
    """To bind it to; None: none."""
    is_probed: bool = False
    """Whether the kernel is asked to find it a driver, where `driver` says none."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What is done about a unit, and why."""

    unit: Unit
    result: Result
    because: str
    hint: str = ""
    code: Exit = Exit.DONE
    moves: tuple[Move, ...] = ()


# The writes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SetOverride:
    """Say which driver alone may have a function; empty takes that back."""

    address: str
    driver: str


@dataclass(frozen=True, slots=True)
class Unbind:
    """Take a function from its driver."""

    address: str


@dataclass(frozen=True, slots=True)
class BindTo:
    """Give a function to a driver."""

    address: str
    driver: str


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask the kernel to find a driver for a function."""

    address: str


Write = SetOverride | Unbind | BindTo | Probe


def writes_of(move: Move) -> tuple[Write, ...]:
    """The writes that make a move. The override comes first, so that no other driver takes the function in between."""
    now = move.function
    writes: list[Write] = []
    if now.override != move.override:
        writes.append(SetOverride(now.address, move.override))
    if is_same_driver(now.driver, move.driver):
        return tuple(writes)
    if now.driver is not None and (move.driver is not None or is_vfio(now.driver)):
        writes.append(Unbind(now.address))
    if move.driver is not None:
        writes.append(BindTo(now.address, move.driver))
    elif move.is_probed and (now.driver is None or is_vfio(now.driver)):
        writes.append(Probe(now.address))
    return tuple(writes)


def undo_writes(before: Function, now: Function) -> tuple[Write, ...]:
    """The writes that bring a function back to what it was, from wherever a move has stopped."""
    writes: list[Write] = []
    if now.override != before.override:
        writes.append(SetOverride(now.address, before.override))
    if now.driver == before.driver:
        return tuple(writes)
    if now.driver is not None:
        writes.append(Unbind(now.address))
    if before.driver is not None:
        writes.append(BindTo(now.address, before.driver))
    return tuple(writes)


# Whom it concerns ---------------------------------------------------------------------------------------------------


def full_address(text: str) -> str | None:
    """A PCI address as sysfs writes it, from any of the usual ways to write one; None if it is none."""
    match = _ADDRESS.fullmatch(text.strip())
    if match is None:
        return None
    domain = (match[1] or "0").lstrip("0").rjust(4, "0")
    return f"{domain}:{match[2]}:{match[3]}.{match[4]}".lower()


def wanted_of_all(bus: Bus, *, switches: bool) -> tuple[Function, ...]:
    """Every GPU of NVIDIA that is no virtual function, and the NVSwitches where they are asked for."""
    roles = (Role.GPU, Role.NVSWITCH) if switches else (Role.GPU,)
    return tuple(each for _, each in sorted(bus.functions.items()) if each.role in roles and not each.is_virtual)


def units_of(bus: Bus, wanted: Sequence[Function]) -> tuple[Unit, ...]:
    """The wanted functions, those of one IOMMU group or with a common companion together; no function is in two units."""
    by_group: dict[str, list[Function]] = {}
    for each in wanted:
        by_group.setdefault(f"group {each.group}" if each.group is not None else each.address, []).append(each)
    units: list[Unit] = []
    for mains in by_group.values():
        companions = set(_companions(bus, mains))
        joined = [unit for unit in units if companions & set(unit.companions)]
        together = (*(main for unit in joined for main in unit.mains), *mains)
        units = [*(unit for unit in units if unit not in joined), Unit(together, _companions(bus, together))]
    return tuple(units)


def _companions(bus: Bus, mains: Sequence[Function]) -> tuple[Function, ...]:
    gpus = [main for main in mains if main.role is Role.GPU and not main.is_virtual]
    slots, groups = {gpu.slot for gpu in gpus}, {gpu.group for gpu in gpus} - {None}
    return tuple(
        each
        for _, each in sorted(bus.functions.items())
        if each.role is Role.COMPANION and not each.is_virtual and (each.slot in slots or each.group in groups)
    )


def refresh(bus: Bus, unit: Unit) -> Unit:
    """The same unit as a later look shows it; what has gone from the bus is left out."""
    mains = tuple(bus.functions[each.address] for each in unit.mains if each.address in bus.functions)
    return Unit(mains, _companions(bus, mains))


def on_vfio(devices: Iterable[PciDevice], *, switches: bool) -> tuple[str, ...]:
    """Addresses of the GPUs and companions that are on vfio, and of the NVSwitches where they are asked for."""
    roles = {Role.GPU, Role.COMPANION} | ({Role.NVSWITCH} if switches else set())
    there = [each for each in devices if is_vfio(each.driver) and not each.is_virtual]
    return tuple(each.address for each in there if _role(each.vendor, each.device_class) in roles)


def vfio_holders(scan: HolderScan) -> tuple[Holder, ...]:
    """The processes that have a GPU open through vfio: virtual machines."""
    return tuple(each for each in scan.holders if any(_VFIO_NODE.fullmatch(path) for path in each.devices))


def without_vfio(scan: HolderScan) -> HolderScan:
    """A scan without what is held through vfio: for a node whose GPUs on vfio stay there, whoever uses them."""
    native = (replace(each, devices=tuple(path for path in each.devices if not _VFIO_NODE.fullmatch(path))) for each in scan.holders)
    return replace(scan, holders=tuple(each for each in native if each.devices))


# Deciding -----------------------------------------------------------------------------------------------------------


def decide_bind(bus: Bus, unit: Unit) -> Decision:
    """What has to be done so that a unit is on vfio."""
    if locked := _locked(bus, unit):
        return locked
    moves = []
    for each in unit.functions:
        driver = _registered(bus, vfio_driver(each.modalias, bus.aliases))
        if not is_same_driver(each.driver, driver):
            moves.append(Move(each, driver, driver))
    if not moves:
        return Decision(unit, Result.ALREADY, f"{_names(unit)} is on {_drivers(unit.functions)} already")
    forbidden = _spoiled(bus, unit) or _held(bus, unit, moves)
    words = ", ".join(f"{move.function.words} to {move.driver}" for move in moves)
    return forbidden or Decision(unit, Result.PLANNED, words, moves=tuple(moves))


def decide_unbind(bus: Bus, unit: Unit, *, probe: bool) -> Decision:
    """What has to be done so that a unit is as it was before vfio; a native driver keeps what it has.

    Args:
        bus: as it is now.
        unit: of the bus.
        probe: whether the kernel looks for a driver for functions whose former driver is not known.
    """
    if locked := _locked(bus, unit):
        return locked
    moves = [move for each in unit.functions if (move := _way_back(bus, each, probe=probe)) is not None]
    if not moves:
        return Decision(unit, Result.ALREADY, f"{_names(unit)} is not on vfio ({_drivers(unit.functions)})")
    if forbidden := _held(bus, unit, moves):
        return forbidden
    return Decision(unit, Result.PLANNED, ", ".join(_back_words(bus, move) for move in moves), moves=tuple(moves))


def decide_release(bus: Bus, unit: Unit) -> Decision:
    """What has to be done so that a unit is free for a driver that is going to be loaded: off vfio, and nothing else."""
    if locked := _locked(bus, unit):
        return locked
    there = [each for each in unit.functions if is_vfio(each.driver) or is_vfio(each.override)]
    moves = [Move(each, "", None if is_vfio(each.driver) else each.driver) for each in there]
    if not moves:
        return Decision(unit, Result.ALREADY, f"{_names(unit)} is not on vfio ({_drivers(unit.functions)})")
    words = ", ".join(f"{move.function.words} to no driver" for move in moves)
    return _held(bus, unit, moves) or Decision(unit, Result.PLANNED, words, moves=tuple(moves))


def is_as_wanted(move: Move, now: Function) -> bool:
    """Whether a function reads back as a move wants it."""
    if move.driver is not None:
        return is_same_driver(now.driver, move.driver)
    return not is_vfio(now.driver)


def originals_with(bus: Bus, moves: Iterable[Move]) -> dict[str, Original]:
    """What to note before moves are made: a native driver as it is now, else what was noted before, else the state now."""
    noted = dict(bus.originals)
    for move in moves:
        now = move.function
        if now.address not in noted or (now.driver is not None and not is_vfio(now.driver)):
            noted[now.address] = Original(now.driver, now.override)
    return noted


def _way_back(bus: Bus, now: Function, *, probe: bool) -> Move | None:
    original = bus.originals.get(now.address)
    is_native = now.driver is not None and not is_vfio(now.driver)
    if is_native:
        return Move(now, original.override if original else "", now.driver) if is_vfio(now.override) else None
    if original is not None:
        driver = original.driver if original.driver and _is_there(bus, original.driver) else None
        if is_same_driver(now.driver, driver) and now.override == original.override:
            return None
        if now.driver is None and driver is None and now.override == original.override:
            return None
        return Move(now, original.override, driver)
    if is_vfio(now.driver) or is_vfio(now.override):
        return Move(now, "", None, is_probed=probe)
    return None


def _back_words(bus: Bus, move: Move) -> str:
    words = f"{move.function.words} to {move.driver or ('the driver that the kernel finds' if move.is_probed else 'no driver')}"
    original = bus.originals.get(move.function.address)
    if original is not None and is_vfio(original.driver):
        return f"{words}, which it had before it was bound; unbind it once more to take it off that too"
    if original is not None and original.driver and move.driver is None:
        return f"{words}: its former driver {original.driver} is not loaded"
    return words


def _registered(bus: Bus, module: str) -> str:
    """The name under which a module's driver is known, as far as it is there."""
    return next((name for name in sorted(bus.drivers) if is_same_driver(name, module)), module)


def _is_there(bus: Bus, driver: str) -> bool:
    return any(is_same_driver(name, driver) for name in bus.drivers)


def _spoiled(bus: Bus, unit: Unit) -> Decision | None:
    """The refusal of an IOMMU group that no virtual machine could have afterwards."""
    ours = {each.address for each in unit.functions}
    for each in unit.functions:
        if each.group is None and bus.has_groups is False:
            return Decision(
                unit, Result.REFUSED, f"{each.address} has no IOMMU group",
                "switch the IOMMU on: in the firmware, and with intel_iommu=on where the kernel needs it", Exit.REFUSED,
            )  # fmt: skip
        native = [other for other in bus.members(each.group) if other.address not in ours and other.spoils_its_group]
        if native:
            names = ", ".join(f"{other.words}{_kind(other)}" for other in native)
            return Decision(
                unit, Result.REFUSED, f"the IOMMU group {each.group} of {each.address} also holds {names}, not to be moved by this command",
                _spoiled_hint(native), Exit.REFUSED,
            )  # fmt: skip
    return None


def _kind(function: Function) -> str:
    return "" if function.role is Role.OTHER else f", a {function.role} of NVIDIA"


def _spoiled_hint(native: Sequence[Function]) -> str:
    if all(each.role is Role.NVSWITCH for each in native):
        return "move the NVSwitches too: --bind-nvswitches with --all"
    if all(each.role is Role.GPU for each in native):
        return "move all GPUs of the group at once: --all"
    return "unbind that device by hand if nothing needs it, or separate the group (PCIe ACS, another slot)"


# Who uses it --------------------------------------------------------------------------------------------------------


def _locked(bus: Bus, unit: Unit) -> Decision | None:
    """The refusal of a unit to which a write has not come back yet (N39), with who it waits for where that shows."""
    locked = [each for each in unit.functions if each.is_locked]
    if not locked:
        return None
    users = {holder.pid: holder for each in locked for holder in _users_of_group(bus, each)}.values() or bus.holders.by_device_alone
    words = f"a write to {', '.join(each.address for each in locked)} has not come back"
    if users:
        sentence = f"{words}: in use by {', '.join(holder_words(each) for each in users)}"
        return Decision(unit, Result.REFUSED, sentence, "end the virtual machine or process that is named, then run again", Exit.AGAIN)
    return Decision(unit, Result.STUCK, words, "see dmesg, and /proc/PID/stack of who writes; else reboot the node", Exit.CANNOT_UNLOAD)


def _held(bus: Bus, unit: Unit, moves: Sequence[Move]) -> Decision | None:
    """The refusal of a unit that somebody uses: the write would wait for the last user, or pull the device from under him (N37, N39)."""
    moved = [move.function for move in moves if not is_same_driver(move.function.driver, move.driver)]
    found = {holder.pid: holder for function in moved for holder in users_of(bus, function)}
    if not found:  # a move away from a group that is in use, though this function of it has no driver (any more)
        freed = [move.function for move in moves if move.function.driver is None and not is_vfio(move.driver)]
        found = {holder.pid: holder for function in freed for holder in _users_of_group(bus, function)}
    if found:
        sentence = f"{_names(unit)} is in use by {', '.join(holder_words(each) for each in found.values())}"
        return Decision(unit, Result.REFUSED, sentence, "end the virtual machine or process that is named, then run again", Exit.AGAIN)
    unseen = [each.address for each in moved if is_vfio(each.driver) and each.is_enabled]
    if unseen and (some := bus.holders.by_device_alone):
        sentence = f"{', '.join(unseen)} is in use, by one of: {', '.join(holder_words(each) for each in some)}"
        return Decision(unit, Result.REFUSED, sentence, "end the virtual machine or process that has it, then run again", Exit.AGAIN)
    if unseen and not bus.sees_all_processes:
        sentence = f"{', '.join(unseen)} is in use, and its user cannot be seen from here"
        return Decision(unit, Result.REFUSED, sentence, "run with the host's processes visible (hostPID: true)", Exit.AGAIN)
    return None


def users_of(bus: Bus, function: Function) -> tuple[Holder, ...]:
    """The processes that have a function open through the driver it is on."""
    if function.driver is None:
        return ()
    return tuple(each for each in bus.holders.holders if any(_is_node_of(bus, function, path) for path in each.devices))


def _users_of_group(bus: Bus, function: Function) -> tuple[Holder, ...]:
    """The processes that have the IOMMU group of a function open."""
    names = {function.group, f"noiommu-{function.group}"} if function.group is not None else set()

    def holds(path: str) -> bool:
        return (match := _VFIO_NODE.fullmatch(path.partition(" ")[0])) is not None and match[1] in names

    return tuple(each for each in bus.holders.holders if any(map(holds, each.devices)))


def _is_node_of(bus: Bus, function: Function, path: str) -> bool:
    path = path.partition(" ")[0]
    if is_vfio(function.driver):
        return (match := _VFIO_NODE.fullmatch(path)) is not None and _is_vfio_node(function, match[1])
    if match := _NVIDIA_NODE.fullmatch(path):
        known = {node for each in bus.functions.values() for node in each.nodes if node.startswith("nvidia")}
        return f"nvidia{match[1]}" in function.nodes or (function.role is Role.GPU and f"nvidia{match[1]}" not in known)
    return (match := _DRI_NODE.fullmatch(path)) is not None and f"dri/{match[1]}" in function.nodes


def _is_vfio_node(function: Function, name: str) -> bool:
    if name == "vfio":
        return False
    if name.startswith("devices/"):
        return f"vfio/{name}" in function.nodes
    return function.group is None or name in (function.group, f"noiommu-{function.group}")


def holder_words(holder: Holder) -> str:
    """A process for people: what it is, whose it is, what it holds."""
    owner = f" of the pod with uid {holder.pod_uid}" if holder.pod_uid else f" of the unit {holder.unit}" if holder.unit else ""
    return f"{holder.command} (process {holder.pid}{owner}, holds {', '.join(holder.devices[:3])})"


def _names(unit: Unit) -> str:
    return ", ".join(each.address for each in unit.mains)


def _drivers(functions: Sequence[Function]) -> str:
    return ", ".join(dict.fromkeys(each.driver or "no driver" for each in functions))


def worst(codes: Iterable[Exit]) -> Exit:
    """The exit code of several devices: what needs a person most."""
    order = (Exit.BUG, Exit.CANNOT_UNLOAD, Exit.FORBIDDEN, Exit.CONFIG, Exit.REFUSED, Exit.AGAIN)
    found = set(codes)
    return next((code for code in order if code in found), Exit.DONE)
