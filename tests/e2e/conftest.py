"""Where the installed command is driven: the real control plane, and a node of its own for each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.e2e.exporters import Exporter
from tests.e2e.fleet import GpuFleet
from tests.e2e.gpu_users import GpuUsers
from tests.e2e.world import StockNode
from tests.kube.controlplane import ControlPlane
from tests.kube.fixtures import make_namespace


class FleetMaker(Protocol):
    """Makes a fleet of so many nodes, with drivers that are up; it goes with the test, and so do its replicas."""

    def __call__(self, nodes: int, **options: Any) -> GpuFleet: ...


ExporterMaker = Callable[[int], Exporter]
"""Makes a fleet of so many nodes with quick lives, and a namespace for an exporter on them, which the test makes."""


@pytest.fixture
def fleet(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> Iterator[FleetMaker]:
    """Makes the test's fleet."""
    made: list[GpuFleet] = []

    def make(nodes: int, **options: Any) -> GpuFleet:
        made.append(GpuFleet(control_plane, namespace, tmp_path, nodes, **options))
        return made[-1]

    yield make
    for each in made:
        each.remove()
        text = each.logs()
        assert not any(word in text for word in ("Traceback", "never retrieved", "never awaited")), text[-4000:]


@pytest.fixture
def exporter_on(fleet: FleetMaker) -> Iterator[ExporterMaker]:
    """Makes the test's fleet, and an exporter that goes before it."""
    made: list[Exporter] = []

    def make(nodes: int) -> Exporter:
        there = fleet(nodes, gpus=2, start_after="200ms", stop_after="200ms")
        made.append(Exporter(there, f"{there.namespace}-mon"))
        make_namespace(there.cp, made[-1].namespace)
        return made[-1]

    yield make
    for each in made:
        each.remove()


@pytest.fixture
def node(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> Iterator[StockNode]:
    """A node with a loaded driver and nothing on it yet; it goes with the test, and so do its runs."""
    made = StockNode(control_plane, namespace, tmp_path)
    yield made
    made.remove()
    for run in made.running:
        text = run.error_text()
        assert not any(word in text for word in ("Traceback", "never retrieved", "never awaited")), text[-4000:]


@pytest.fixture
def busy_node(node: StockNode) -> StockNode:
    """That node with the driver's DaemonSet, two operands and three GPU pods of short lives."""
    node.add_driver(digest="new")
    node.add_operands(only=("device-plugin", "dcgm"))
    node.add_training(3, grace_seconds=1)
    return node


@pytest.fixture
def users(node: StockNode) -> Iterator[GpuUsers]:
    """What uses the driver on that node besides; made by the test."""
    made = GpuUsers(node)
    yield made
    made.remove()
