"""Makes and boots guests, for the fixtures and for benchmarks."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.vm.layer import ROOT, project_layer
from tests.vm.machine import COUNTED_CLOCK, GPUS, IOMMU, NETWORK, Guest, Hardware, State, joined

IMPORTS = ("tests.vm.inside", "driver_manager.cli.commands")
"""What a guest imports before it is saved. Nothing of it knows Kubernetes: that would take seconds."""
NETWORK_IMPORTS = (*IMPORTS, "tests.vm.cluster")
SYSTEMD_IMPORTS = (*IMPORTS, "tests.vm.systemd")
_SPOOFED = ("insmod", "/modules/nvspoof.ko", "slots=00:05.0,00:05.1,00:06.0")


class NoGuests(Exception):
    """No virtual machine can be made on this machine; the message says what is missing."""


def prepared_parts() -> Path:
    """The folder with what scripts/prepare-vm makes.

    Raises:
        NoGuests: it could not.
    """
    prepared = subprocess.run([ROOT / "scripts/prepare-vm"], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if prepared.returncode:
        raise NoGuests(f"no virtual machine can be made here: {prepared.stderr.strip()}")
    return Path(prepared.stdout.strip())


def project_initrd(parts: Path, folder: Path) -> Path:
    """The guest's root with this tree's wheel installed."""
    initrd = folder / "initrd.cpio"
    joined([parts / "root.cpio", parts / "modules.cpio", project_layer(folder)], initrd)
    return initrd


def systemd_initrd(parts: Path, folder: Path) -> Path:
    """The same with systemd."""
    initrd = folder / "systemd.cpio"
    joined([parts / "root.cpio", parts / "modules.cpio", parts / "systemd.cpio", project_layer(folder)], initrd)
    return initrd


def saved_guest(parts: Path, initrd: Path, *, is_clock_counted: bool = False) -> State:
    """Boots a guest whose emulated cards look like NVIDIA's, and saves it.

    Args:
        parts: what scripts/prepare-vm makes.
        initrd: its root.
        is_clock_counted: whether its clock goes by the instructions it has done, so that a busy machine changes no times.
    """
    devices = (*IOMMU, *GPUS, *(COUNTED_CLOCK if is_clock_counted else ()))
    hardware = Hardware(parts / "vmlinux", initrd, devices, options=f"intel_iommu=on vmtest.import={','.join(IMPORTS)}")
    with Guest(hardware) as guest:
        _spoof(guest)
        return guest.save()


def saved_guest_with_network(parts: Path, initrd: Path) -> State:
    """The same for tests with a cluster: without an IOMMU, with a network card that is up, and with all that the command needs there."""
    hardware = Hardware(parts / "vmlinux", initrd, devices=(*GPUS, *NETWORK), options=f"vmtest.import={','.join(NETWORK_IMPORTS)}")
    with Guest(hardware) as guest:
        _spoof(guest)
        guest.call("tests.vm.inside", "join_network")
        return guest.save()


def saved_guest_with_systemd(parts: Path, initrd: Path) -> State:
    """The same with systemd as the first process, and the unit installed by the project's own command."""
    options = f"intel_iommu=on rdinit=/usr/lib/systemd/systemd vmtest.import={','.join(SYSTEMD_IMPORTS)}"
    with Guest(Hardware(parts / "vmlinux", initrd, options=options)) as guest:
        _spoof(guest)
        installed = guest.run("driver-manager", "install-systemd")
        assert installed.code == 0, installed.err
        return guest.save()


def _spoof(guest: Guest) -> None:
    spoofed = guest.run(*_SPOOFED)
    assert spoofed.code == 0, spoofed.err
