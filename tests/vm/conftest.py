"""Boots one guest for all tests of a session, and gives each test a fresh one from its saved state."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vm.layer import ROOT, project_layer
from tests.vm.machine import Guest, Hardware, State, joined

SPOOFED = ("insmod", "/modules/nvspoof.ko", "slots=00:05.0,00:05.1,00:06.0")


@pytest.fixture(scope="session")
def vm_parts() -> Path:
    """The folder with what scripts/prepare-vm made. Where it cannot: skipped, or an error when CI=true."""
    prepared = subprocess.run([ROOT / "scripts/prepare-vm"], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if prepared.returncode:
        reason = f"no virtual machine can be made here: {prepared.stderr.strip()}"
        if os.environ.get("CI") == "true":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    return Path(prepared.stdout.strip())


@pytest.fixture(scope="session")
def vm_initrd(vm_parts: Path) -> Iterator[Path]:
    """The guest's root with this tree's wheel installed."""
    with tempfile.TemporaryDirectory(prefix="dm-vm-initrd-") as folder:
        initrd = Path(folder) / "initrd.cpio"
        joined([vm_parts / "root.cpio", vm_parts / "modules.cpio", project_layer(Path(folder))], initrd)
        yield initrd


def booted(parts: Path, initrd: Path, imports: str, **hardware: object) -> State:
    """Boots a guest with the emulated cards spoofed, and saves it."""
    made = Hardware(parts / "vmlinux", initrd, options=f"intel_iommu=on vmtest.import={imports}", **hardware)  # type: ignore[arg-type]
    with Guest(made) as guest:
        spoofed = guest.run(*SPOOFED)
        assert spoofed.code == 0, spoofed.err
        return guest.save()


@pytest.fixture(scope="session")
def plain_state(vm_parts: Path, vm_initrd: Path) -> Iterator[State]:
    """The state that most tests start from. Nothing in it knows of Kubernetes: that would take seconds to import."""
    state = booted(vm_parts, vm_initrd, "tests.vm.inside")
    yield state
    state.forget()


@pytest.fixture
def guest(plain_state: State) -> Iterator[Guest]:
    """A fresh guest."""
    with Guest.of(plain_state) as guest:
        yield guest


@pytest.fixture
def pci_guest(guest: Guest) -> Guest:
    """A fresh guest with the driver and vfio loaded: two cards, the first with two functions, all in IOMMU groups.

    `inside.GPU` and `inside.OTHER_GPU` are bound to nvidia, `inside.AUDIO` to nothing.
    """
    guest.call("tests.vm.inside", "load_for_pci")
    return guest
