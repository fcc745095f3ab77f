"""The driver model of a directory tree: writes to `bind`, `unbind`, `driver_override` and `drivers_probe` change its `driver` links.

The rules were seen on kernels 6.1 and 6.12: a bound device refuses a second bind with EBUSY, a driver that does not know a device with
ENODEV, and `drivers_probe` says yes even where nothing was bound. A vfio driver takes a device without an IOMMU group nowhere (EINVAL);
that is held to on trees that show IOMMU groups. A FIFO as file of a driver makes the write wait, as one to a device in use does.
"""

import contextlib
import errno
import os
import shutil
from pathlib import Path
from typing import Final

from driver_manager.host.faults import replace_text
from driver_manager.host.paths import names_in, resolve_in, text_of

_BUS: Final = "/sys/bus/pci"


class TreePci:
    """PCI devices and drivers of a tree."""

    def __init__(self, tree: Path) -> None:
        self._tree = tree

    def write(self, path: str, text: str) -> None:
        """Writes to a file of the tree.

        Raises:
            OSError: as the kernel refuses it.
        """
        where = resolve_in(str(self._tree), path)
        if not (self._tree / where.lstrip("/")).exists() and (driver_file := self._through_driver_link(path)):
            where = driver_file
        file = self._tree / where.lstrip("/")
        parts = where.split("/")
        if file.is_fifo():
            with file.open("w") as pipe:  # comes back when somebody reads, as a kernel's write does when the last user has gone
                pipe.write(text)
        elif not file.is_file():
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        match parts[-3:]:
            case ["drivers", driver, "bind"]:
                self._bind(text.strip(), driver)
            case ["drivers", driver, "unbind"]:
                self._unbind(text.strip(), driver)
            case [_, _, "driver_override"]:
                replace_text(file, f"{text.strip() or '(null)'}\n")
            case [_, "pci", "drivers_probe"]:
                self._probe(text.strip())
            case _:
                replace_text(file, text)

    def driver_of(self, device: str) -> str | None:
        """Name of the driver that a device is bound to."""
        try:
            return (self._device(device) / "driver").readlink().name
        except OSError:
            return None

    def add_driver(self, driver: str) -> None:
        """A driver that has come with a module."""
        folder = self._driver(driver)
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("bind", "unbind"):
            (folder / name).touch()

    def forget_drivers_of(self, module: str) -> None:
        """Removes the drivers of a module that has gone; their devices become free."""
        for driver in names_in(self._tree / "sys/bus/pci/drivers"):
            folder = self._driver(driver)
            owner = folder / "module"
            name = owner.readlink().name if owner.is_symlink() else driver.replace("-", "_")
            if name != module:
                continue
            for device in names_in(self._tree / "sys/bus/pci/devices"):
                if self.driver_of(device) == driver:
                    self._unbind(device, driver)
            shutil.rmtree(folder)

    def _device(self, device: str) -> Path:
        return self._tree / resolve_in(str(self._tree), f"{_BUS}/devices/{device}").lstrip("/")

    def _driver(self, driver: str) -> Path:
        return self._tree / "sys/bus/pci/drivers" / driver

    def _through_driver_link(self, path: str) -> str | None:
        """For `devices/X/driver/unbind`: the driver's own file, whatever the link's text leads to."""
        match path.split("/")[-3:]:
            case [device, "driver", file] if driver := self.driver_of(device):
                return f"{_BUS}/drivers/{driver}/{file}"
        return None

    def _override(self, device: str) -> str:
        text = (text_of(self._device(device) / "driver_override") or "").strip()
        return "" if text == "(null)" else text

    def _bind(self, device: str, driver: str) -> None:
        override = self._override(device)
        if not self._device(device).is_dir() or (override or driver) != driver:
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV), device)
        if "vfio" in driver and not override:  # knows no device by itself
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV), device)
        if self.driver_of(device) is not None:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), device)
        if "vfio" in driver and (self._tree / "sys/kernel/iommu_groups").is_dir() and not self._has_group(device):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), device)
        (self._device(device) / "driver").symlink_to(f"../../drivers/{driver}")
        mark = self._driver(driver) / device
        if not os.path.lexists(mark):
            mark.symlink_to(f"../../devices/{device}")

    def _has_group(self, device: str) -> bool:
        return os.path.lexists(self._device(device) / "iommu_group")

    def _unbind(self, device: str, driver: str) -> None:
        if self.driver_of(device) != driver:
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV), device)
        (self._device(device) / "driver").unlink()
        (self._driver(driver) / device).unlink(missing_ok=True)

    def _probe(self, device: str) -> None:
        if not self._device(device).is_dir():
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV), device)
        driver = self._override(device)
        if driver and self.driver_of(device) is None and self._driver(driver).is_dir():
            with contextlib.suppress(OSError):  # the kernel says yes here whatever came of it
                self._bind(device, driver)
