from __future__ import annotations

import pytest

from driver_manager.core.snapshot import ModuleState, Unloading
from driver_manager.errors import HostError, ModuleInUse
from driver_manager.host import LinuxHost

from .trees import Tree


async def test_the_modules_go_dependents_first(loaded: Tree, host: LinuxHost) -> None:
    """Unloaded in the right order all modules go, and each one's share of the counts with it."""
    for name in ("nvidia_drm", "nvidia_modeset", "nvidia_uvm"):
        await host.unload_module(name, 5)
    assert (loaded.root / "proc/modules").read_text() == "nvidia 16384 0 - Live 0xffffffffc0218000 (OE)\n"
    await host.unload_module("nvidia", 5)
    view = await host.look()
    assert not view.modules
    assert (loaded.root / "proc/modules").read_text() == ""
    assert loaded.results() == [("delete_module", name, 0) for name in ("nvidia_drm", "nvidia_modeset", "nvidia_uvm", "nvidia")]


async def test_a_module_with_dependents_stays(loaded: Tree, host: LinuxHost) -> None:
    """The kernel's EAGAIN names the count and the modules that depend on it."""
    with pytest.raises(ModuleInUse, match=r"use count 2, of that modules: nvidia_modeset, nvidia_uvm") as caught:
        await host.unload_module("nvidia", 5)
    assert caught.value.errno_name == "EAGAIN"
    assert caught.value.transient
    assert loaded.results() == [("delete_module", "nvidia", "EAGAIN")]
    assert (await host.look()).is_loaded


async def test_a_module_with_users_of_its_own_stays(tree: Tree, host: LinuxHost) -> None:
    """An open device shows in the use count alone, and the view says so."""
    tree.module("nvidia", users=2)
    with pytest.raises(ModuleInUse, match="use count 2"):
        await host.unload_module("nvidia", 5)
    assert (await host.look()).modules["nvidia"].has_own_users


@pytest.mark.parametrize(
    ("state", "transient", "words"), [("going", False, "already being removed"), ("coming", True, "still being loaded")]
)
async def test_a_module_between_states_is_told_apart(tree: Tree, host: LinuxHost, state: str, transient: bool, words: str) -> None:
    """EBUSY means wait for a module that is coming and reboot for one that is going."""
    tree.module("nvidia", state=state)
    assert (await host.look()).modules["nvidia"].state is ModuleState(state)
    with pytest.raises(HostError, match=words) as caught:
        await host.unload_module("nvidia", 5)
    assert caught.value.transient is transient
    assert ("eboot" in caught.value.hint) is not transient


async def test_a_permanent_module_needs_a_reboot(tree: Tree, host: LinuxHost) -> None:
    """A module without an exit function is EBUSY for good."""
    tree.module("nvidia")
    tree.file("proc/modules", "nvidia 16384 0 [permanent], Live 0x0 (OE)\n")
    with pytest.raises(HostError, match="no exit function") as caught:
        await host.unload_module("nvidia", 5)
    assert not caught.value.transient
    assert "Reboot" in caught.value.hint


async def test_modules_disabled_is_seen_before_and_after(tree: Tree, host: LinuxHost) -> None:
    """The sysctl shows in the view, and EPERM is explained by it."""
    tree.module("nvidia")
    tree.file("proc/sys/kernel/modules_disabled", "1\n")
    assert (await host.look()).unloading is Unloading.DISABLED
    with pytest.raises(HostError, match="modules_disabled"):
        await host.unload_module("nvidia", 5)


async def test_a_kernel_without_unloading_is_seen_before_and_after(tree: Tree, host: LinuxHost) -> None:
    """Without a refcnt file modules cannot be unloaded: UNSUPPORTED in the view, ENOSYS from the call."""
    tree.file("sys/module/nvidia/initstate", "live\n")
    view = await host.look()
    assert view.unloading is Unloading.UNSUPPORTED
    assert view.modules["nvidia"].refcount is None
    with pytest.raises(HostError, match="without module unloading") as caught:
        await host.unload_module("nvidia", 5)
    assert caught.value.errno_name == "ENOSYS"


async def test_a_missing_capability_is_seen(tree: Tree, host: LinuxHost) -> None:
    """CapEff without CAP_SYS_MODULE shows as NOT_PERMITTED."""
    tree.module("nvidia")
    tree.file("proc/self/status", "Name:\tx\nCapEff:\t000001fffefeffff\n")
    assert (await host.look()).unloading is Unloading.NOT_PERMITTED


async def test_a_module_that_is_gone_is_fine(loaded: Tree, host: LinuxHost) -> None:
    """Unloading what is not loaded succeeds, with a dash in its name too."""
    await host.unload_module("nvidia_fs", 5)
    await host.unload_module("nvidia-drm", 5)
    assert loaded.results() == [("delete_module", "nvidia_fs", "ENOENT"), ("delete_module", "nvidia_drm", 0)]


async def test_its_devices_are_free_when_a_driver_goes(tree: Tree, host: LinuxHost) -> None:
    """Unloading a PCI driver's module unbinds its devices and removes the driver."""
    tree.module("nvidia")
    tree.gpu()
    assert (await host.look()).pci[0].driver == "nvidia"
    await host.unload_module("nvidia", 5)
    assert (await host.look()).pci[0].driver is None
    assert not (tree.root / "sys/bus/pci/drivers/nvidia").exists()
