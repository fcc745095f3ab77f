"""Which device nodes are GPUs', by number wherever there is one, since names lie: a node can be renamed, unlinked or made elsewhere.

NVIDIA's numbers come from /proc/devices. DRM and VFIO nodes are shared by all makers, so of those only the ones that sysfs ties to an
NVIDIA function count. Where a tree gives no number, the name decides.
"""

import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from driver_manager.core.modalias import is_vfio
from driver_manager.host.look import pci_devices
from driver_manager.host.parsing import char_majors, device_name
from driver_manager.host.paths import Roots, names_in, resolve_in, text_of
from driver_manager.names import NVIDIA

Number = tuple[int, int]

_NVIDIA_MAJOR = 195
"""Registered for NVIDIA in Documentation/admin-guide/devices.txt."""
_NEVER_GPUS = frozenset({1, 2, 3, 4, 5, 7, 10, 13, 21, 29, 89, 116, 180, 188, 189, 202, 203})
"""Memory, terminals, input, sound, USB and the like, by the same list: most of a machine's nodes, and looked at before every unload."""
_OWN_DRIVER = re.compile(r"nvidia.*|gdrdrv")
_OWN_PATH = re.compile(
    r"(?:/.*)?/dev/(?:nvidia(?:\d+|ctl|-uvm|-uvm-tools|-modeset|-nvlink|-nvswitch\w*|-vgpu\w*|-fs\w*)"
    r"|nvidia-caps(?:-imex-channels)?/[^/]+|gdrdrv)"
)
_SHARED_PATH = re.compile(r"(?:/.*)?(/dev/(?:dri|vfio)/.+)")


@dataclass(frozen=True, slots=True)
class GpuDevices:
    """What makes an open file a GPU's."""

    majors: frozenset[int]
    """Numbers that belong to NVIDIA's drivers altogether."""
    numbers: frozenset[Number] = frozenset()
    """Single nodes of drivers shared with others."""
    paths: frozenset[str] = frozenset()
    """Names of such nodes, as in the host's /dev."""
    names: dict[Number, str] = field(default_factory=dict)
    """The kernel's own names of nodes."""
    is_any_vfio: bool = False
    """Whether every VFIO group counts, because nothing tells whose they are."""
    may_be_on_vfio: bool = False
    """Whether a function of NVIDIA's is on vfio, or on its way from it: then it has no driver and may have a user all the same."""

    def has_number(self, number: Number) -> bool:
        """Whether a character device is a GPU's."""
        return number[0] in self.majors or number in self.numbers

    def has_path(self, path: str) -> bool:
        """Whether a name is a GPU's node, on the host or below another root such as the driver's."""
        if _OWN_PATH.fullmatch(path):
            return True
        if match := _SHARED_PATH.fullmatch(path):
            is_group = match[1].startswith("/dev/vfio/") and match[1] != "/dev/vfio/vfio"
            return match[1] in self.paths or (self.is_any_vfio and is_group)
        return False

    def shown(self, path: str, number: Number | None) -> str:
        """The name to show for an open GPU device: the one it was opened by if that says what it is, else the kernel's."""
        if number is None or path in self.paths or self.has_path(path):
            return path
        if number in self.names:
            return self.names[number]
        major, minor = number
        if major == _NVIDIA_MAJOR:
            return {255: "/dev/nvidiactl", 254: "/dev/nvidia-modeset"}.get(minor, f"/dev/nvidia{minor}")
        return f"{path} (device {major}:{minor})"


def gpu_devices(roots: Roots) -> GpuDevices:
    """Reads which nodes are GPUs' now."""
    by_major = char_majors(text_of(roots.proc / "devices") or "")
    majors = {major for major, name in by_major.items() if _OWN_DRIVER.fullmatch(name)}
    if _NVIDIA_MAJOR not in by_major:
        majors.add(_NVIDIA_MAJOR)
    devices = [device for device in pci_devices(roots) if device.vendor == NVIDIA]
    functions = [roots.sys / "bus/pci/devices" / device.address for device in devices]
    paths = set(_drm_paths(roots, functions))
    groups, is_any_vfio = _vfio_paths(roots, functions)
    paths |= groups
    names = _kernel_names(roots)
    numbers = {number for number, name in names.items() if name in paths}
    for path in paths:
        if (number := _node_number(f"{roots.host}{path}")) is not None:
            numbers.add(number)
    may_be_on_vfio = any(device.driver is None or is_vfio(device.driver) for device in devices)
    return GpuDevices(frozenset(majors), frozenset(numbers), frozenset(paths), names, is_any_vfio, may_be_on_vfio)


def number_by_name(roots: Roots, devices: GpuDevices, path: str) -> Number | None:
    """The device number behind a path of a tree: of the node that is there, or that sysfs names so."""
    number = _node_number(f"{roots.host}{path}")
    if number is not None:
        return number
    return next((number for number, name in devices.names.items() if name == path), None)


def _node_number(path: str) -> Number | None:
    try:
        status = os.stat(path)  # noqa: PTH116 - many of them
    except (OSError, ValueError):
        return None
    return (os.major(status.st_rdev), os.minor(status.st_rdev)) if stat.S_ISCHR(status.st_mode) else None


def _kernel_names(roots: Roots) -> dict[Number, str]:
    """DEVNAME of each character device in sysfs that may be a GPU's."""
    found: dict[Number, str] = {}
    for name in names_in(roots.sys / "dev/char"):
        major, _, minor = name.partition(":")
        if not (major.isdecimal() and minor.isdecimal()) or (int(major) in _NEVER_GPUS and not roots.is_tree):
            continue
        # Links of a tree are followed inside it; the kernel follows its own, which costs a fifth. A tree's names decide its numbers.
        link = resolve_in(str(roots.own), f"/sys/dev/char/{name}") if roots.is_tree else f"/sys/dev/char/{name}"
        if node := device_name(text_of(roots.own / f"{link}/uevent".lstrip("/")) or ""):
            found[int(major), int(minor)] = node
    return found


def _drm_paths(roots: Roots, functions: Iterable[Path]) -> Iterator[str]:
    """DRM nodes of NVIDIA's cards."""
    for function in functions:
        for name in names_in(function / "drm"):
            yield f"/dev/dri/{name}"
    for name in names_in(roots.sys / "class/drm"):
        device = resolve_in(str(roots.own), f"/sys/class/drm/{name}/device")
        if (text_of(roots.own / f"{device}/vendor".lstrip("/")) or "").strip() == NVIDIA:
            yield f"/dev/dri/{name}"


def _vfio_paths(roots: Roots, functions: Iterable[Path]) -> tuple[set[str], bool]:
    """VFIO nodes of NVIDIA's functions, and whether all groups have to count since nothing tells them apart."""
    if not (roots.sys / "bus/pci/devices").is_dir():
        return set(), True
    paths: set[str] = set()
    is_any = False
    for function in functions:
        paths.update(f"/dev/vfio/devices/{name}" for name in names_in(function / "vfio-dev"))
        try:
            group = (function / "iommu_group").readlink().name
        except OSError:
            driver = function / "driver"
            is_any = is_any or (driver.is_symlink() and "vfio" in driver.readlink().name)
        else:
            paths |= {f"/dev/vfio/{group}", f"/dev/vfio/noiommu-{group}"}
    return paths, is_any
