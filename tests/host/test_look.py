from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from driver_manager.core.snapshot import ModuleState, Unloading
from driver_manager.errors import HostError
from driver_manager.host import LinuxHost, open_host
from driver_manager.host.calls import KernelCalls
from driver_manager.host.look import library_versions, look, module_files
from driver_manager.host.paths import Roots, machine_roots, resolve_in
from driver_manager.ports import Clock, Host

from .trees import Tree

RELEASE = "6.1.0-57-amd64"


async def test_the_smallest_tree_works(tree: Tree, host: LinuxHost) -> None:
    """One refcnt file is a host with the driver loaded; what is absent has sensible values."""
    tree.file("sys/module/nvidia/refcnt", "0\n")
    view = await host.look()
    assert view.is_loaded
    assert view.modules["nvidia"].holders == frozenset()
    assert view.modules["nvidia"].state is ModuleState.LIVE
    assert view.unloading is Unloading.POSSIBLE
    assert view.boot_id == ""
    assert view.notes == (f"{tree.root}/proc/sys/kernel/random/boot_id is not there",)
    await host.unload_module("nvidia", 5)
    assert not (await host.look()).is_loaded


async def test_an_empty_tree_is_a_host_without_anything(host: LinuxHost) -> None:
    """Nothing loaded, nothing mounted, nobody there."""
    view = await host.look()
    assert not view.modules
    assert not view.mounts
    assert not view.pci
    assert view.state_digest is None
    assert view.driver_version is None
    assert view.sees_all_processes
    assert (await host.holders()).holders == ()


async def test_all_that_matters_is_seen(loaded: Tree, host: LinuxHost) -> None:
    """Each part of the view comes from its file."""
    loaded.file("proc/sys/kernel/random/boot_id", "b0071d\n")
    loaded.file("proc/sys/kernel/osrelease", f"{RELEASE}\n")
    loaded.file("run/nvidia/nvidia-driver.state", " 123456\n")
    loaded.file("run/nvidia/validations/toolkit-ready")
    loaded.file("run/nvidia/validations/.driver-ctr-ready")
    loaded.file("run/nvidia/validations/cuda-ready")
    loaded.file("run/mellanox/drivers/.driver-ready")
    loaded.file("sys/module/mlx5_core/refcnt", "3")
    loaded.gpu("0000:3b:00.0")
    loaded.gpu("0000:5e:00.0", driver="mlx5_core", vendor="0x15b3")
    loaded.gpu("0000:00:1f.0", driver=None, vendor="0x8086")
    view = await host.look()
    assert (view.boot_id, view.kernel_release, view.state_digest) == ("b0071d", RELEASE, "123456")
    assert view.markers == ("toolkit-ready", ".driver-ctr-ready")
    assert view.is_mofed_ready
    assert view.has_mlx5_core
    assert [(device.address, device.vendor, device.driver) for device in view.pci] == [
        ("0000:3b:00.0", "0x10de", "nvidia"),
        ("0000:5e:00.0", "0x15b3", "mlx5_core"),
    ]
    assert view.pci[0].device_class == "0x030200"
    assert view.driver_version == "550.54.15"
    assert view.notes == ()


async def test_holders_of_holders_are_seen(tree: Tree, host: LinuxHost) -> None:
    """A module that nobody knows is in the view if it depends on the driver, however far up; others are not."""
    tree.module("nvidia", holders=["nvidia_uvm"])
    tree.module("nvidia_uvm", holders=["acme"])
    tree.module("acme", holders=["acme_top"])
    tree.module("acme_top")
    tree.module("ext4")
    assert set((await host.look()).modules) == {"nvidia", "nvidia_uvm", "acme", "acme_top"}


async def test_a_use_count_that_is_no_number_counts_as_used(tree: Tree, host: LinuxHost) -> None:
    """Garbage in refcnt is said in a note."""
    tree.file("sys/module/nvidia/refcnt", "many\n")
    view = await host.look()
    assert any("use count" in note for note in view.notes)


async def test_a_built_in_nouveau_says_nothing_about_the_kernel(tree: Tree, host: LinuxHost) -> None:
    """What is no module has no use count; the kernel may unload others all the same."""
    tree.file("sys/module/nouveau/parameters/modeset", "1")
    tree.module("nvidia")
    view = await host.look()
    assert view.modules["nouveau"].refcount is None
    assert view.unloading is Unloading.POSSIBLE


async def test_mounts_fall_back_to_our_own(tree: Tree, host: LinuxHost) -> None:
    """Without process 1 the mounts are those that this process sees; a broken line is said."""
    tree.file("proc/self/mountinfo", "36 21 0:40 / /run/nvidia/driver rw master:1 - overlay overlay rw\nnonsense\n")
    view = await host.look()
    assert [(mount.mount_id, mount.fs_type, mount.is_shared) for mount in view.mounts] == [(36, "overlay", False)]
    assert any("nonsense" in note for note in view.notes)


@pytest.mark.parametrize(
    "path",
    [
        "updates/dkms/nvidia.ko",
        "kernel/drivers/video/nvidia.ko.xz",
        "kernel/nvidia-550/nvidia.ko.zst",
        "updates/dkms/nvidia-current.ko",
        "somewhere/else/nvidia.ko.gz",
    ],
)
async def test_a_driver_of_the_host_is_found(loaded: Tree, host: LinuxHost, path: str) -> None:
    """The module's file counts wherever packages put it; its side modules and the framebuffer do not."""
    loaded.file(f"lib/modules/{RELEASE}/{path}")
    for other in ("updates/nvidia-uvm.ko", "updates/nvidia-current-drm.ko", "kernel/drivers/video/fbdev/nvidia/nvidiafb.ko"):
        loaded.file(f"lib/modules/{RELEASE}/{other}")
    view = await host.look()
    assert view.kernel_release == RELEASE
    assert view.driver_files.module_files == (f"/lib/modules/{RELEASE}/{path}",)


def roots_of(tree: Tree) -> Roots:
    return Roots(host=tree.root, own=tree.root, is_tree=True)


def test_without_a_driver_only_the_usual_folders_are_walked(tree: Tree) -> None:
    """With nothing loaded the walk is limited, for speed."""
    tree.file(f"lib/modules/{RELEASE}/updates/dkms/nvidia.ko")
    tree.file(f"lib/modules/{RELEASE}/kernel/nvidia-550/nvidia.ko")
    tree.file(f"lib/modules/{RELEASE}/elsewhere/nvidia.ko")
    base = f"/lib/modules/{RELEASE}"
    usual = module_files(roots_of(tree), RELEASE, everywhere=False)
    assert usual == (f"{base}/kernel/nvidia-550/nvidia.ko", f"{base}/updates/dkms/nvidia.ko")
    assert len(module_files(roots_of(tree), RELEASE, everywhere=True)) == 3


@pytest.mark.parametrize(
    "folder", ["usr/lib64", "usr/lib", "lib64", "usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu/nvidia/current"]
)
def test_the_hosts_library_is_found(tree: Tree, folder: str) -> None:
    """The version in the library's name counts in each library folder; names without one say nothing."""
    tree.file(f"{folder}/libnvidia-ml.so.550.54.15")
    tree.file(f"{folder}/libnvidia-ml.so.1")
    assert library_versions(roots_of(tree)) == {"550.54.15"}


def test_merged_library_folders_are_followed_inside_the_host(tree: Tree) -> None:
    """A link to an absolute folder leads to the host's folder, not to ours."""
    tree.file("usr/lib/libnvidia-ml.so.550.54.15")
    tree.link("lib", "/usr/lib")
    assert library_versions(roots_of(tree)) == {"550.54.15"}


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/a/b", "/real/b"),
        ("/up/x", "/x"),
        ("/none/./x/../y", "/none/y"),
        ("/loop/x", "/loop/x"),
        ("/rel", "/real/deep"),
    ],
)
def test_links_stay_inside_the_root(tree: Tree, path: str, expected: str) -> None:
    """Absolute links start at the root again, `..` ends there, and a loop ends."""
    tree.file("real/b")
    tree.link("a", "/real")
    tree.link("up", "../../../..")
    tree.link("loop", "loop")
    tree.link("rel", "real/../real/deep")
    assert resolve_in(str(tree.root), path) == expected


def test_a_look_is_quick(loaded: Tree) -> None:
    """A look at a big host stays far below what a person notices."""
    for index in range(100):
        loaded.gpu(f"0000:{index:02x}:00.0", driver="nvidia" if index < 8 else None, vendor="0x10de" if index < 8 else "0x8086")
    for index in range(3000):
        loaded.file(f"usr/lib/x86_64-linux-gnu/lib{index}.so.1")
    began = time.monotonic()
    look(roots_of(loaded))
    assert time.monotonic() - began < 2


def test_in_the_container_the_host_is_read_below_its_mount(tree: Tree) -> None:
    """Processes, mounts and files of the host come from /host; sysfs and /run are our own."""
    inside = Tree(tree.root / "host")
    inside.root.mkdir()
    inside.file("proc/1/mountinfo", "36 21 0:40 / /run/nvidia/driver rw shared:1 - overlay overlay rw\n")
    inside.file("proc/modules")
    inside.link("proc/self", "4711")
    inside.file("proc/sys/kernel/random/boot_id", "b0071d")
    inside.file("proc/sys/kernel/osrelease", RELEASE)
    inside.file("usr/lib/libnvidia-ml.so.550.54.15")
    inside.file("run/nvidia/nvidia-driver.state", "not ours")
    inside.file("sys/module/nouveau/refcnt", "0")
    tree.module("nvidia")
    tree.file("run/nvidia/nvidia-driver.state", "7")
    view = look(Roots(host=inside.root, own=tree.root, is_tree=False))
    assert set(view.modules) == {"nvidia"}
    assert [mount.target for mount in view.mounts] == ["/run/nvidia/driver"]
    assert (view.boot_id, view.state_digest) == ("b0071d", "7")
    assert view.driver_files.library_versions == {"550.54.15"}
    assert not view.sees_all_processes
    assert view.notes == ()


def test_a_kernel_without_modules_unloads_none(tree: Tree) -> None:
    """On a machine without /proc/modules nothing can be unloaded."""
    view = look(Roots(host=tree.root, own=tree.root, is_tree=False))
    assert view.unloading is Unloading.UNSUPPORTED
    assert any("mounts" in note for note in view.notes)


def test_this_machine_can_be_looked_at() -> None:
    """The real files of this machine are read without an error; this changes nothing."""
    view = look(machine_roots())
    assert view.kernel_release
    assert view.boot_id


@pytest.mark.parametrize(("namespace", "sees_all"), [("pid:[4026531836]", True), ("pid:[4026532777]", False)])
def test_without_a_host_root_the_process_namespace_tells(tree: Tree, namespace: str, sees_all: bool) -> None:
    """A container without hostPID and without /host sees its own processes alone, and must not take them for all."""
    tree.link("proc/self/ns/pid", namespace)
    assert look(Roots(host=tree.root, own=tree.root, is_tree=False)).sees_all_processes is sees_all


def test_without_a_tree_the_machine_is_the_host(clock: Clock) -> None:
    """No tree means the kernel's own calls."""
    host = open_host(None, clock)
    assert isinstance(host._calls, KernelCalls)


def test_the_host_has_all_that_the_port_asks_for(host: LinuxHost) -> None:
    """The type checker holds the class to the Protocol."""
    port: Host = host
    assert port is host


async def test_a_file_that_may_not_be_read_is_an_error(tree: Tree, host: LinuxHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a look cannot do without is an error of ours, not a guess."""
    tree.module("nvidia")

    real_open = os.open

    def refuse(path: str | Path, *arguments: int, **more: int) -> int:
        if str(path).endswith("sys/module/nvidia/refcnt"):
            raise PermissionError(13, "Permission denied", str(path))
        return real_open(path, *arguments, **more)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(HostError, match="cannot be read"):
        await host.look()


@pytest.mark.parametrize(("options", "is_shared"), [("shared:9", True), ("master:9", False), ("", False)])
async def test_whether_unmounts_are_passed_on(tree: Tree, host: LinuxHost, options: str, is_shared: bool) -> None:
    """The mount nearest to /run/nvidia decides, as this process sees it."""
    line = f"30 21 0:40 / /run/nvidia rw,relatime {options} - tmpfs tmpfs rw\n".replace("  ", " ")
    tree.file("proc/self/mountinfo", "21 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n" + line)
    assert (await host.look()).is_run_shared is is_shared
