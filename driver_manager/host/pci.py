"""The PCI bus as sysfs shows it, with what decides about moving a function to vfio. Changes nothing.

Each function is read by itself: one that cannot be read is left out and said, and keeps no other from being seen.
"""

import json
from pathlib import Path
from typing import Any, Final

from driver_manager import names
from driver_manager.core.modalias import Alias, parse_aliases
from driver_manager.core.snapshot import HolderScan
from driver_manager.core.vfio import Bus, Function, Original
from driver_manager.host.children import text_in_child
from driver_manager.host.faults import replace_text
from driver_manager.host.look import kernel_release, sees_all_processes
from driver_manager.host.parsing import gpu_minor
from driver_manager.host.paths import Roots, names_in, resolve_in, text_of
from driver_manager.names import NVIDIA

BUS: Final = "/sys/bus/pci"
LOCK_SECONDS: Final = 2.0
"""Limit of a read that waits for the device's lock: a microsecond of work."""


def read_bus(roots: Roots, holders: HolderScan | None = None) -> Bus:
    """Reads the bus.

    Args:
        roots: where.
        holders: who has devices open, where somebody has looked.
    """
    notes: list[str] = []
    functions: dict[str, Function] = {}
    for address in names_in(roots.sys / "bus/pci/devices"):
        try:
            functions[address] = read_function(roots, address)
        except (OSError, ValueError) as error:
            notes.append(f"{address} cannot be read and is left out: {error}")
    return Bus(
        functions=functions,
        aliases=_aliases(roots, notes) if any(each.vendor == NVIDIA for each in functions.values()) else (),
        has_groups=_has_groups(roots),
        drivers=frozenset(names_in(roots.sys / "bus/pci/drivers")),
        originals=read_originals(roots),
        holders=holders or HolderScan(),
        sees_all_processes=sees_all_processes(roots),
        notes=tuple(notes),
    )


def read_function(roots: Roots, address: str) -> Function:
    """Reads one function.

    Raises:
        OSError, ValueError: it cannot be read.
    """
    folder = roots.sys / "bus/pci/devices" / address
    vendor = (text_of(folder / "vendor") or "").strip().lower()
    if not vendor:
        raise ValueError("it shows no vendor")
    device_class = (text_of(folder / "class") or "").strip().lower()
    driver, group = _link(folder / "driver"), _link(folder / "iommu_group")
    if vendor != NVIDIA:
        return Function(address=address, vendor=vendor, device_class=device_class, driver=driver, group=group)
    is_enabled = (text_of(folder / "enable") or "0").strip() != "0"
    override, is_locked = _override(roots, folder, is_suspicious=driver is None and is_enabled)
    return Function(
        address=address,
        vendor=vendor,
        device_class=device_class,
        driver=driver,
        override="" if override == "(null)" else override,
        group=group,
        modalias=(text_of(folder / "modalias") or "").strip(),
        is_virtual=(folder / "physfn").is_symlink() or (folder / "physfn").exists(),
        nodes=_nodes(roots, folder, address),
        is_enabled=is_enabled,
        is_locked=is_locked,
    )


def _override(roots: Roots, folder: Path, *, is_suspicious: bool) -> tuple[str, bool]:
    """The driver override, and whether the device is locked, so that it cannot be read.

    The kernel takes the device's lock for this read, and a write to `unbind` that waits for the device's user has it. The link to the
    driver is gone by then and the device still switched on: where it looks so, the read is made in a child.
    """
    path = folder / "driver_override"
    if not is_suspicious or roots.is_tree:
        return (text_of(path) or "").strip(), False
    try:
        return text_in_child(str(path), LOCK_SECONDS).strip(), False
    except TimeoutError:
        return "", True


def _link(path: Path) -> str | None:
    try:
        return path.readlink().name
    except OSError:
        return None


def _nodes(roots: Roots, folder: Path, address: str) -> frozenset[str]:
    found = {f"vfio/devices/{name}" for name in names_in(folder / "vfio-dev")}
    found |= {f"dri/{name}" for name in names_in(folder / "drm")}
    information = text_of(roots.proc / "driver/nvidia/gpus" / address / "information") or ""
    if (minor := gpu_minor(information)) is not None:
        found.add(f"nvidia{minor}")
    return frozenset(found)


def _has_groups(roots: Roots) -> bool | None:
    """Whether the kernel makes IOMMU groups: not known where it has no such folder, or hands functions out without."""
    folder = roots.sys / "kernel/iommu_groups"
    is_unsafe = (text_of(roots.sys / "module/vfio/parameters/enable_unsafe_noiommu_mode") or "").strip().upper() in ("Y", "1")
    if not folder.is_dir() or is_unsafe:
        return None
    return bool(names_in(folder))


def _aliases(roots: Roots, notes: list[str]) -> tuple[Alias, ...]:
    """The vfio drivers of the running kernel, from the host's own files: the container's may be of another kernel, or none."""
    path = resolve_in(str(roots.host), f"/lib/modules/{kernel_release(roots)}/modules.alias")
    where = roots.host / path.lstrip("/")
    try:
        text = text_of(where)
    except PermissionError:
        text = None
    if text is None:
        notes.append(f"{where} cannot be read: a bind gives every function plain vfio-pci, also one that would need a driver of its own")
        return ()
    return parse_aliases(text)


# What was there before ----------------------------------------------------------------------------------------------


def read_originals(roots: Roots) -> dict[str, Original]:
    """How functions were before they were first moved in this boot; nothing where there is no such file, or none of this boot."""
    try:
        body: Any = json.loads(text_of(roots.own / names.VFIO_ORIGINALS) or "{}")
    except ValueError:
        return {}
    if not isinstance(body, dict) or body.get("boot") != _boot(roots) or not isinstance(functions := body.get("functions"), dict):
        return {}
    return {
        address: Original(entry["driver"] or None, entry["override"])
        for address, entry in functions.items()
        if isinstance(entry, dict) and isinstance(entry.get("driver"), str) and isinstance(entry.get("override"), str)
    }


def write_originals(roots: Roots, originals: dict[str, Original]) -> None:
    """Notes them, in a file that goes with the boot; without any the file goes.

    Raises:
        OSError: it cannot be written.
    """
    path = roots.own / names.VFIO_ORIGINALS
    if not originals:
        path.unlink(missing_ok=True)
        return
    functions = {address: {"driver": each.driver or "", "override": each.override} for address, each in sorted(originals.items())}
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps({"boot": _boot(roots), "functions": functions}) + "\n")


def _boot(roots: Roots) -> str:
    return (text_of(roots.proc / "sys/kernel/random/boot_id") or "").strip()
