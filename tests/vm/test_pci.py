"""What sysfs shows and answers about two emulated cards, one of them with two functions: the facts that binding rests on."""

from __future__ import annotations

import time
from pathlib import Path

from driver_manager.core.snapshot import PciDevice
from tests.vm.guest import runs_in
from tests.vm.inside import AUDIO, GPU, OTHER_GPU, after, driver_of, here, read, refcount, write

in_pci_guest = runs_in("pci_guest")
DEVICES = Path("/sys/bus/pci/devices")
DRIVERS = "/sys/bus/pci/drivers"


def group_of(address: str) -> str:
    """The IOMMU group of a function."""
    return (DEVICES / address / "iommu_group").readlink().name


@in_pci_guest
async def test_the_cards_are_as_sysfs_shows_them() -> None:
    """Vendor, class and driver of each function; both functions of the first card are in one IOMMU group."""
    assert (await here().look()).pci == (
        PciDevice(address=GPU, vendor="0x10de", device_class="0x030200", driver="nvidia"),
        PciDevice(address=AUDIO, vendor="0x10de", device_class="0x040300", driver=None),
        PciDevice(address=OTHER_GPU, vendor="0x10de", device_class="0x030200", driver="nvidia"),
    )
    assert group_of(GPU) == group_of(AUDIO) != group_of(OTHER_GPU)


@in_pci_guest
def test_a_function_moves_to_vfio_and_back() -> None:
    """Each answer on the way: what is refused without an override, and that a probe's 0 has to be read back."""
    assert write(f"{DEVICES}/{GPU}/driver/unbind", GPU) == 0
    assert driver_of(GPU) is None
    assert write(f"{DRIVERS}/nvidia/unbind", GPU) == "ENODEV"
    assert write(f"{DRIVERS}/vfio-pci/bind", GPU) == "ENODEV"
    for address in (GPU, AUDIO):
        assert write(f"{DEVICES}/{address}/driver_override", "vfio-pci") == 0
    assert write(f"{DRIVERS}/vfio-pci/bind", GPU) == 0
    assert write(f"{DRIVERS}/vfio-pci/bind", GPU) in ("EBUSY", "ENODEV")
    assert write("/sys/bus/pci/drivers_probe", AUDIO) == 0
    assert (driver_of(GPU), driver_of(AUDIO)) == ("vfio-pci", "vfio-pci")
    assert Path(f"/dev/vfio/{group_of(GPU)}").exists()
    for address in (GPU, AUDIO):
        assert write(f"{DRIVERS}/vfio-pci/unbind", address) == 0
        assert write(f"{DEVICES}/{address}/driver_override", "\n") == 0
    assert read(f"{DEVICES}/{GPU}/driver_override") == "(null)"
    assert write("/sys/bus/pci/drivers_probe", GPU) == 0
    assert (driver_of(GPU), driver_of(AUDIO)) == ("nvidia", None)


@in_pci_guest
def test_an_unbind_takes_as_long_as_the_driver_likes() -> None:
    """The write is stuck meanwhile, and so is everybody who writes there."""
    assert write("/sys/module/nvidia/parameters/remove_ms", "800") == 0
    begun = time.monotonic()
    assert write(f"{DEVICES}/{GPU}/driver/unbind", GPU) == 0
    assert time.monotonic() - begun > 0.7
    assert driver_of(GPU) is None
    assert refcount("nvidia") == 0


@in_pci_guest
def test_a_card_goes_and_comes_back() -> None:
    """Removal and rescan, as some resets do: the driver is bound again."""
    assert write(f"{DEVICES}/{OTHER_GPU}/remove", "1") == 0
    assert not (DEVICES / OTHER_GPU).exists()
    rescan = after(0, lambda: write("/sys/bus/pci/rescan", "1"))
    deadline = time.monotonic() + 30
    while driver_of(OTHER_GPU) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert (rescan > 0, driver_of(OTHER_GPU)) == (True, "nvidia")
