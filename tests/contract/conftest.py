"""Where the contracts are tested: on the simulator, and on the real thing."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.contract.fleetreal import KubeFleetStage
from tests.contract.fleetsim import SimFleetStage
from tests.contract.fleetstage import FleetStage
from tests.contract.real import KubeStage
from tests.contract.simulated import SimStage
from tests.contract.stage import Stage


@pytest.fixture(params=["sim", pytest.param("kube", marks=pytest.mark.kube)])
async def stage(request: pytest.FixtureRequest) -> AsyncIterator[Stage]:
    """A world to act in."""
    if request.param == "sim":
        yield SimStage()
        return
    made = KubeStage(*(request.getfixturevalue(name) for name in ("control_plane", "namespace", "gpu_node")))
    await made.open()
    try:
        yield made
    finally:
        await made.close()


@pytest.fixture(params=["sim", pytest.param("kube", marks=pytest.mark.kube)])
async def fleet_stage(request: pytest.FixtureRequest) -> AsyncIterator[FleetStage]:
    """A fleet to act in."""
    if request.param == "sim":
        yield SimFleetStage()
        return
    made = KubeFleetStage(*(request.getfixturevalue(name) for name in ("control_plane", "namespace", "gpu_node")))
    await made.open()
    try:
        yield made
    finally:
        await made.close()
