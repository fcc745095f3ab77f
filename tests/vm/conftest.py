"""Boots one guest for all tests of a session, and gives each test a fresh one from its saved state."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.world import StockNode
from tests.kube.controlplane import ControlPlane
from tests.vm.boot import (
    NoGuests,
    prepared_parts,
    project_initrd,
    saved_guest,
    saved_guest_with_network,
    saved_guest_with_systemd,
    systemd_initrd,
)
from tests.vm.machine import Guest, State
from tests.vm.world import GuestNode


@pytest.fixture(scope="session")
def vm_parts() -> Path:
    """What scripts/prepare-vm makes. Where it cannot: skipped, or an error when CI=true."""
    try:
        return prepared_parts()
    except NoGuests as error:
        if os.environ.get("CI") == "true":
            pytest.fail(str(error), pytrace=False)
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def guest_state(vm_parts: Path) -> Iterator[State]:
    """The state that tests start from."""
    with tempfile.TemporaryDirectory(prefix="dm-vm-initrd-") as folder:
        state = saved_guest(vm_parts, project_initrd(vm_parts, Path(folder)))
        yield state
        state.forget()


@pytest.fixture
def guest(guest_state: State) -> Iterator[Guest]:
    """A fresh guest: nothing of the driver loaded."""
    with Guest.of(guest_state) as guest:
        yield guest


@pytest.fixture
def pci_guest(guest: Guest) -> Guest:
    """A fresh guest with the driver and vfio loaded: two cards, the first with two functions, all in IOMMU groups.

    `inside.GPU` and `inside.OTHER_GPU` are bound to nvidia, `inside.AUDIO` to nothing.
    """
    guest.call("tests.vm.inside", "load_for_pci")
    return guest


@pytest.fixture(scope="module")
def networked_state(vm_parts: Path) -> Iterator[State]:
    """The state that tests with a cluster start from; of other hardware than the rest, so it is saved for itself."""
    with tempfile.TemporaryDirectory(prefix="dm-vm-initrd-") as folder:
        state = saved_guest_with_network(vm_parts, project_initrd(vm_parts, Path(folder)))
        yield state
        state.forget()


@pytest.fixture
def guest_node(control_plane: ControlPlane, namespace: str, networked_state: State, tmp_path: Path) -> Iterator[GuestNode]:
    """A busy node of the cluster, and a fresh guest that is its machine."""
    with contextlib.ExitStack() as stack:
        node = StockNode(control_plane, namespace, tmp_path)
        stack.callback(node.remove)
        yield GuestNode(node, lambda: stack.enter_context(Guest.of(networked_state)))


@pytest.fixture(scope="session")
def systemd_state(vm_parts: Path) -> Iterator[State]:
    """The state that tests with systemd start from."""
    with tempfile.TemporaryDirectory(prefix="dm-vm-systemd-") as folder:
        state = saved_guest_with_systemd(vm_parts, systemd_initrd(vm_parts, Path(folder)))
        yield state
        state.forget()


@pytest.fixture
def systemd_guest(systemd_state: State) -> Iterator[Guest]:
    """A fresh guest with systemd and the installed unit: nothing of the driver loaded."""
    with Guest.of(systemd_state) as guest:
        yield guest
