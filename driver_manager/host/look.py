"""One look at the host: files of sysfs, procfs, /run and the host's library folders, read into a HostView. Changes nothing, keeps nothing.

It reads no folder that it does not need: on a node with nothing loaded it takes a few milliseconds.
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from driver_manager import names
from driver_manager.core.modules import DRIVER_MODULES, NOUVEAU
from driver_manager.core.snapshot import (
    DriverFiles,
    HostView,
    ModuleState,
    ModuleView,
    MountView,
    PciDevice,
    Unloading,
)
from driver_manager.host.parsing import effective_capabilities, is_at_or_below, lines_of, mount_line, mounts_at
from driver_manager.host.paths import Roots, names_in, raise_if_short, resolve_in, text_of
from driver_manager.names import MELLANOX, NVIDIA

DRIVER_ROOT: Final = f"/{names.DRIVER_ROOT}"
_CAP_SYS_MODULE = 16
_MODULE_FILE = re.compile(r"nvidia(?:-(?:current|open|server|tesla|legacy|\d+(?:xx)?))*\.ko(?:\.(?:gz|xz|zst))?")
"""NVIDIA's own name, and those of Debian's packages, which keep several side by side."""
_LIBRARY = re.compile(r"libnvidia-ml\.so\.(\d+(?:\.\d+)+)")
_TRIPLET = re.compile(r".+-linux-gnu\w*")
_FIRST_PID_NAMESPACE = "pid:[4026531836]"
_USUAL_MODULE_FOLDERS = ("updates", "extra", "misc", "weak-updates", "kernel/drivers/video", "kernel/drivers/char")


def look(roots: Roots) -> HostView:
    """Reads the host as it is now."""
    notes: list[str] = []
    modules = _modules(roots, notes)
    _note_half_a_tree(roots, modules, notes)
    release = kernel_release(roots)
    run_nvidia = roots.own / names.RUN_NVIDIA
    return HostView(
        boot_id=_word(roots.proc / "sys/kernel/random/boot_id", notes) or "",
        kernel_release=release,
        modules=modules,
        mounts=mounts(roots, notes),
        unloading=_unloading(roots, modules),
        state_digest=_word(roots.own / names.STATE_FILE, notes, is_optional=True),
        markers=tuple(name for name in names.READY_MARKERS if (run_nvidia / "validations" / name).exists()),
        has_pid_file=(roots.own / names.PID_FILE).exists(),
        driver_files=DriverFiles(
            module_files=module_files(roots, release, everywhere="nvidia" in modules),
            library_versions=library_versions(roots),
        ),
        pci=pci_devices(roots),
        is_mofed_ready=any((root / names.MOFED_READY).exists() for root in (roots.own, roots.host)),
        has_mlx5_core=(roots.sys / "module/mlx5_core").exists(),
        sees_all_processes=sees_all_processes(roots),
        is_run_shared=is_run_shared(roots),
        notes=tuple(notes),
    )


def _word(path: Path, notes: list[str], *, is_optional: bool = False) -> str | None:
    """A file's text without the space around it; what keeps it from being read is noted."""
    try:
        text = text_of(path)
    except PermissionError:
        notes.append(f"{path} may not be read")
        return None
    if text is None and not is_optional:
        notes.append(f"{path} is not there")
    return None if text is None else text.strip()


def kernel_release(roots: Roots) -> str:
    """The running kernel's release; on a tree that does not say so, the only one that it has modules of."""
    if text := text_of(roots.proc / "sys/kernel/osrelease"):
        return text.strip()
    found = names_in(roots.host / "lib/modules")
    return found[0] if len(found) == 1 else ""


def sees_all_processes(roots: Roots) -> bool:
    """Whether /proc shows the processes of the whole host.

    In the agent's container the host's /proc is below another root: it knows this process by the number that it has for itself only if both
    count the same processes. Without such a root only the number of the first process namespace tells (PROC_PID_INIT_INO of the kernel).
    """
    if roots.is_tree:
        return True
    if roots.host == roots.own:
        try:
            return (roots.proc / "self/ns/pid").readlink().name == _FIRST_PID_NAMESPACE
        except OSError:
            return False
    return own_pid(roots) == os.getpid()


def own_pid(roots: Roots) -> int | None:
    """This process's number in the host's /proc; None on a tree, where it does not appear."""
    if roots.is_tree:
        return None
    try:
        return int((roots.proc / "self").readlink().name)
    except (OSError, ValueError):
        return None


# Modules ------------------------------------------------------------------------------------------------------------


def _modules(roots: Roots, notes: list[str]) -> dict[str, ModuleView]:
    """The driver's modules, nouveau, and everything that depends on them."""
    found: dict[str, ModuleView] = {}
    todo = [NOUVEAU, *DRIVER_MODULES]
    while todo:
        name = todo.pop()
        if name not in found and (module := module_view(roots, name, notes)) is not None:
            found[name] = module
            todo += module.holders
    return found


def module_view(roots: Roots, name: str, notes: list[str] | None = None) -> ModuleView | None:
    """One module as sysfs shows it; None if it is not loaded."""
    folder = roots.sys / "module" / name
    if not folder.is_dir():
        return None
    state = (text_of(folder / "initstate") or "").strip()
    refcount = text_of(folder / "refcnt")
    holders = frozenset(names_in(folder / "holders"))
    version = text_of(folder / "version")
    if refcount is None and not folder.is_dir():
        return None  # it went while we looked
    count: int | None = None
    try:
        count = None if refcount is None else int(refcount)
    except ValueError:
        count = len(holders)
        if notes is not None:
            notes.append(f"the use count of module {name} is no number: {refcount!r}")
    return ModuleView(
        name=name,
        refcount=count,
        holders=holders,
        state=ModuleState(state) if state in list(ModuleState) else ModuleState.LIVE,
        version=version.strip() if version else None,
    )


def _note_half_a_tree(roots: Roots, modules: Mapping[str, ModuleView], notes: list[str]) -> None:
    """A kernel shows a module in both places; who lays out a tree may know only one of them."""
    if not roots.is_tree or modules:
        return
    listed = {line.partition(" ")[0] for line in lines_of(text_of(roots.proc / "modules") or "")}
    if named := sorted(listed.intersection(DRIVER_MODULES)):
        what = "but on a host tree a loaded module is a folder sys/module/NAME: docs/host-tree.md"
        notes.append(f"proc/modules names {', '.join(named)}, {what}")


def unloading_disabled(roots: Roots) -> bool:
    """Whether kernel.modules_disabled is set."""
    return (text_of(roots.proc / "sys/kernel/modules_disabled") or "").strip() == "1"


def _unloading(roots: Roots, modules: dict[str, ModuleView]) -> Unloading:
    if any(module.refcount is None for name, module in modules.items() if name != NOUVEAU):  # that may be built in
        return Unloading.UNSUPPORTED
    if not roots.is_tree and not any((root / "proc/modules").exists() for root in (roots.host, roots.own)):
        return Unloading.UNSUPPORTED  # a kernel without modules
    if unloading_disabled(roots):
        return Unloading.DISABLED
    capabilities = effective_capabilities(text_of(roots.own / "proc/self/status") or "")
    if capabilities is not None and not capabilities >> _CAP_SYS_MODULE & 1:
        return Unloading.NOT_PERMITTED
    return Unloading.POSSIBLE


# Mounts -------------------------------------------------------------------------------------------------------------


def mounts(roots: Roots, notes: list[str] | None = None) -> tuple[MountView, ...]:
    """What is mounted at and below the driver root, as the host's first process sees it."""
    text: str | None = None
    try:
        text = text_of(roots.proc / "1/mountinfo")
    except PermissionError:
        if notes is not None:
            notes.append(f"{roots.proc / '1/mountinfo'} may not be read: mounts are those that this process sees")
    if text is None:
        text = text_of(roots.proc / "self/mountinfo")
    if text is None:
        if not roots.is_tree and notes is not None:
            notes.append(f"{roots.proc} shows no mounts")
        return ()
    found, bad = mounts_at(text, DRIVER_ROOT)
    if bad and notes is not None:
        notes.append(f"{len(bad)} lines of mountinfo could not be understood, the first: {bad[0]!r}")
    return found


def is_run_shared(roots: Roots) -> bool | None:
    """Whether the mount that holds /run/nvidia, as this process sees it, passes unmounts on; None where that cannot be seen.

    A yes proves little (Documentation/filesystems/sharedsubtree.rst): the result of an unmount is read back from the host. A no is certain.
    """
    text = text_of(roots.own / "proc/self/mountinfo") or ""
    lines = [line.view for line in map(mount_line, lines_of(text)) if line is not None]
    covering = [view for view in lines if is_at_or_below(f"/{names.RUN_NVIDIA}", view.target)]
    return max(covering, key=lambda view: len(view.target)).is_shared if covering else None


# Files of a driver that belongs to the host ---------------------------------------------------------------------------


def module_files(roots: Roots, release: str, *, everywhere: bool) -> tuple[str, ...]:
    """Host paths of the driver's main module file below lib/modules/<release>.

    Args:
        roots: where to look.
        release: the kernel's.
        everywhere: look in all folders (tens of milliseconds), not only in those where packages put it.
    """
    if not release:
        return ()
    base = resolve_in(str(roots.host), f"/lib/modules/{release}")
    starts = [base] if everywhere else [f"{base}/{folder}" for folder in _usual_folders(roots, base)]
    found = (path for start in starts for path in _walk(f"{roots.host}{start}" if roots.host != Path("/") else start))
    cut = len(str(roots.host)) if roots.host != Path("/") else 0
    return tuple(sorted({path[cut:] for path in found}))


def _usual_folders(roots: Roots, base: str) -> list[str]:
    kernel = names_in(roots.host / f"{base}/kernel".lstrip("/"))
    return [*_USUAL_MODULE_FOLDERS, *(f"kernel/{name}" for name in kernel if name.startswith("nvidia"))]


def _walk(folder: str) -> Iterator[str]:
    """Files below a folder that are named as the driver's module; links to folders are not followed."""
    try:
        with os.scandir(folder) as entries:
            below = list(entries)
    except OSError as error:
        raise_if_short(error)
        return
    for entry in below:
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(entry.path)
        elif _MODULE_FILE.fullmatch(entry.name):
            yield entry.path


def library_versions(roots: Roots) -> frozenset[str]:
    """Versions of the management library in the host's own library folders."""
    root = str(roots.host)
    folders: set[str] = set()
    for top in ("/usr/lib", "/usr/lib64", "/lib", "/lib64"):
        folder = resolve_in(root, top)
        folders.add(folder)
        for name in names_in(roots.host / folder.lstrip("/")):
            if _TRIPLET.fullmatch(name):
                triplet = resolve_in(root, f"{folder}/{name}")
                folders.add(triplet)
                nvidia = f"{triplet}/nvidia"
                folders.update(f"{nvidia}/{kind}" for kind in names_in(roots.host / nvidia.lstrip("/")))
    versions: set[str] = set()
    for folder in folders:
        for name in names_in(roots.host / folder.lstrip("/")):
            if match := _LIBRARY.fullmatch(name):
                versions.add(match[1])
    return frozenset(versions)


# PCI ----------------------------------------------------------------------------------------------------------------


def pci_devices(roots: Roots) -> tuple[PciDevice, ...]:
    """All functions of NVIDIA and Mellanox, by address."""
    found = []
    for address in names_in(roots.sys / "bus/pci/devices"):
        folder = roots.sys / "bus/pci/devices" / address
        vendor = (text_of(folder / "vendor") or "").strip().lower()
        if vendor not in (NVIDIA, MELLANOX):
            continue
        device_class = (text_of(folder / "class") or "").strip().lower()
        try:
            driver: str | None = (folder / "driver").readlink().name
        except OSError:
            driver = None
        is_virtual = os.path.lexists(folder / "physfn")
        found.append(PciDevice(address=address, vendor=vendor, device_class=device_class, driver=driver, is_virtual=is_virtual))
    return tuple(found)
