from __future__ import annotations

import errno
import os

import pytest

from driver_manager.host.tree import TreeCalls
from driver_manager.host.treepci import TreePci

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


async def test_a_killed_process_is_gone(tree: Tree) -> None:
    """SIGKILL ends a process of the tree; a process that is not there is ESRCH."""
    tree.process(77)
    calls = TreeCalls(tree.root)
    await calls.kill(77, 9)
    assert not (tree.root / "proc/77").exists()
    with pytest.raises(ProcessLookupError):
        await calls.kill(77, 9)
    assert [(call["call"], call["result"]) for call in tree.calls()] == [("kill", 0), ("kill", "ESRCH")]
