"""Which kernel modules make up the driver, and the order in which the kernel lets go of them.

A module can be removed when no other module depends on it and nothing else uses it (delete_module(2)); so the order is that of the
dependency graph, dependents first.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from driver_manager.core.snapshot import ModuleState, ModuleView

DRIVER_MODULES: Final = (
    "nvidia_drm",
    "nvidia_modeset",
    "nvidia_uvm",
    "nvidia_peermem",
    "nvidia_fs",
    "nvidia_vgpu_vfio",
    "gdrdrv",
    "nvidia",
)
"""The driver and what NVIDIA ships on top of it. Only these are ever removed, unless a setting names more."""

NOUVEAU: Final = "nouveau"
"""The kernel's own driver for the same devices: in the way of a new one."""


@dataclass(frozen=True, slots=True)
class UnloadOrder:
    """What to unload, in order, and what forbids it."""

    modules: tuple[str, ...]
    """Dependents first, `nvidia` last."""
    unknown_holders: tuple[str, ...] = ()
    """Modules that depend on the driver and that nobody allowed to be removed."""


def unload_order(modules: Mapping[str, ModuleView], also: Collection[str] = ()) -> UnloadOrder:
    """The loaded driver modules, each after everything that depends on it.

    Args:
        modules: all that is loaded and concerns the driver, by name.
        also: modules that may be removed as well when they hold the driver.
    """
    wanted = [name for name in DRIVER_MODULES if name in modules]
    order: list[str] = []
    unknown: list[str] = []

    visited: set[str] = set()

    def visit(name: str) -> None:
        if name in visited:
            return
        visited.add(name)
        if name not in DRIVER_MODULES and name not in also:
            unknown.append(name)
            return
        for holder in sorted(modules[name].holders if name in modules else ()):
            visit(holder)
        order.append(name)

    for name in wanted:
        visit(name)
    return UnloadOrder(tuple(order), tuple(sorted(unknown)))


def stuck_modules(modules: Mapping[str, ModuleView]) -> tuple[str, ...]:
    """Modules that are half-way out of the kernel: it never finishes that, only a reboot helps."""
    return tuple(sorted(name for name, module in modules.items() if module.state is ModuleState.GOING))


def used_modules(modules: Mapping[str, ModuleView], names: Collection[str]) -> tuple[str, ...]:
    """Those of `names` that something else than a module uses now."""
    return tuple(sorted(name for name in names if name in modules and modules[name].has_own_users))
