from __future__ import annotations

import errno
import os

import pytest

from driver_manager import names
from driver_manager.core.vfio import Original, Result, units_of, wanted_of_all
from driver_manager.host import LinuxHost
from driver_manager.host.paths import tree_roots
from driver_manager.host.pci import read_originals, write_originals
from driver_manager.host.tree import TreeCalls
from driver_manager.host.treepci import TreePci
from driver_manager.host.vfio import Vfio

from .trees import Tree

GPU = "0000:3b:00.0"
DEVICE = f"/sys/bus/pci/devices/{GPU}"
DRIVERS = "/sys/bus/pci/drivers"


@pytest.fixture
def pci(tree: Tree) -> TreePci:
    """The PCI bus of the tree, with one GPU on nvidia."""
    tree.gpu(GPU)
    return TreePci(tree.root)


async def test_a_gpu_moves_to_vfio_and_back(tree: Tree, pci: TreePci) -> None:
    """Unbind, override, bind and the way back change the links as sysfs shows them, and are on the record."""
    calls = TreeCalls(tree.root)
    await calls.write(f"{DEVICE}/driver/unbind", GPU, 5)
    assert pci.driver_of(GPU) is None
    await calls.write(f"{DEVICE}/driver_override", "vfio-pci", 5)
    await calls.write(f"{DRIVERS}/vfio-pci/bind", GPU, 5)
    assert pci.driver_of(GPU) == "vfio-pci"
    assert (tree.root / f"sys/bus/pci/drivers/vfio-pci/{GPU}").is_symlink()
    await calls.write(f"{DRIVERS}/vfio-pci/unbind", GPU, 5)
    await calls.write(f"{DEVICE}/driver_override", "\n", 5)
    assert (tree.root / DEVICE.lstrip("/") / "driver_override").read_text() == "(null)\n"
    await calls.write(f"{DRIVERS}/nvidia/bind", GPU, 5)
    assert pci.driver_of(GPU) == "nvidia"
    assert [call["call"] for call in tree.calls()] == ["write"] * 6
    assert tree.calls()[0]["arguments"] == [f"{DEVICE}/driver/unbind", GPU]


@pytest.mark.parametrize(
    ("path", "text", "number"),
    [
        (f"{DRIVERS}/nvidia/bind", GPU, errno.EBUSY),
        (f"{DRIVERS}/vfio-pci/bind", GPU, errno.ENODEV),
        (f"{DRIVERS}/vfio-pci/unbind", GPU, errno.ENODEV),
        (f"{DRIVERS}/nvidia/bind", "0000:ff:00.0", errno.ENODEV),
        (f"{DRIVERS}/nope/bind", GPU, errno.ENOENT),
        (f"{DEVICE}/nope", "1", errno.ENOENT),
    ],
)
def test_what_the_kernel_refuses_is_refused(pci: TreePci, path: str, text: str, number: int) -> None:
    """Each refusal has the kernel's errno."""
    with pytest.raises(OSError, match=os.strerror(number)):
        pci.write(path, text)


def test_a_probe_follows_the_override(pci: TreePci) -> None:
    """drivers_probe binds a free device to the driver that its override names, and says yes to anything else."""
    pci.write("/sys/bus/pci/drivers_probe", GPU)
    assert pci.driver_of(GPU) == "nvidia"
    pci.write(f"{DRIVERS}/nvidia/unbind", GPU)
    pci.write("/sys/bus/pci/drivers_probe", GPU)
    assert pci.driver_of(GPU) is None
    pci.write(f"{DEVICE}/driver_override", "vfio-pci")
    pci.write("/sys/bus/pci/drivers_probe", GPU)
    assert pci.driver_of(GPU) == "vfio-pci"


def test_a_device_without_a_group_is_refused_by_vfio(tree: Tree, pci: TreePci) -> None:
    """Where the kernel shows groups: EINVAL by `bind`, and a yes that binds nothing by `drivers_probe`."""
    (tree.root / "sys/kernel/iommu_groups").mkdir(parents=True)
    pci.write(f"{DEVICE}/driver/unbind", GPU)
    pci.write(f"{DEVICE}/driver_override", "vfio-pci")
    with pytest.raises(OSError, match=os.strerror(errno.EINVAL)):
        pci.write(f"{DRIVERS}/vfio-pci/bind", GPU)
    pci.write("/sys/bus/pci/drivers_probe", GPU)
    assert pci.driver_of(GPU) is None


class DeafCalls(TreeCalls):
    """A kernel that says yes to a bind and does nothing."""

    async def write(self, path: str, text: str, timeout: float) -> None:
        if path != f"{DRIVERS}/vfio-pci/bind":
            await super().write(path, text, timeout)


async def test_n36_only_what_reads_back_is_a_success(tree: Tree, pci: TreePci, host: LinuxHost) -> None:
    """N36: a bind that the kernel takes without binding is a failure, and the GPU gets its former driver back."""
    vfio = Vfio(tree_roots(tree.root), DeafCalls(tree.root), host.holders)
    (unit,) = units_of(bus := await vfio.look(), wanted_of_all(bus, switches=False))
    outcome = await vfio.bind(unit)
    assert outcome.decision.result is Result.FAILED
    assert "has no driver" in outcome.decision.because
    assert (pci.driver_of(GPU), tree.override_of(GPU)) == ("nvidia", "(null)")
    assert not (tree.root / names.VFIO_ORIGINALS).exists()


async def test_n39_a_gpu_that_cannot_be_put_back_is_said(tree: Tree, pci: TreePci, host: LinuxHost) -> None:
    """N39: where the former driver does not take it back, the message says both."""
    faults = [{"call": "write", "argument": f"{DRIVERS}/{name}/bind", "errno": "EIO"} for name in ("vfio-pci", "nvidia")]
    tree.faults(*faults)
    vfio = Vfio(tree_roots(tree.root), TreeCalls(tree.root), host.holders)
    (unit,) = units_of(bus := await vfio.look(), wanted_of_all(bus, switches=False))
    outcome = await vfio.bind(unit)
    assert outcome.decision.result is Result.FAILED
    assert "could not be put back to nvidia" in outcome.decision.because


async def test_notes_of_another_boot_do_not_count(tree: Tree) -> None:
    """N54: what was noted before a reboot says nothing about now; a file that is no such note neither."""
    roots = tree_roots(tree.root)
    tree.file("proc/sys/kernel/random/boot_id", "one\n")
    write_originals(roots, {GPU: Original("nvidia", ""), "0000:01:00.0": Original(None, "x")})
    assert read_originals(roots) == {GPU: Original("nvidia", ""), "0000:01:00.0": Original(None, "x")}
    tree.file("proc/sys/kernel/random/boot_id", "two\n")
    assert read_originals(roots) == {}
    for text in ("", "{", "[]", '{"boot": "two", "functions": {"a": 1, "b": {"driver": 2}}}'):
        tree.file(names.VFIO_ORIGINALS, text)
        assert read_originals(roots) == {}


async def test_a_killed_process_is_gone(tree: Tree) -> None:
    """SIGKILL ends a process of the tree; a process that is not there is ESRCH."""
    tree.process(77)
    calls = TreeCalls(tree.root)
    await calls.kill(77, 9)
    assert not (tree.root / "proc/77").exists()
    with pytest.raises(ProcessLookupError):
        await calls.kill(77, 9)
    assert [(call["call"], call["result"]) for call in tree.calls()] == [("kill", 0), ("kill", "ESRCH")]
