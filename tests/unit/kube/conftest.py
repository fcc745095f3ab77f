from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import driver_manager.kube.connection  # noqa: F401 - here, because urllib3 binds a socket when it is imported, which no guarded test may
from driver_manager import kube
from tests.unit.kube.server import Api, QuickClock, write_kubeconfig


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    """An API server that answers as told."""
    api = Api()
    await api.listen()
    yield api
    api.over.set()
    for runner in api.runners:
        await runner.cleanup()


@pytest.fixture
def clock() -> QuickClock:
    """A clock whose sleeps take no time."""
    return QuickClock()


@pytest.fixture
async def cluster(api: Api, clock: QuickClock, tmp_path: Path) -> AsyncIterator[kube.KubeCluster]:
    """The adapter, connected to the server."""
    cluster = await kube.connect(write_kubeconfig(tmp_path / "config", api.url, "secret"), clock)
    yield cluster
    await cluster.close()


@pytest.fixture
async def hasty(api: Api, clock: QuickClock, tmp_path: Path) -> AsyncIterator[kube.KubeCluster]:
    """The same, but a request may take half a second only."""
    cluster = await kube.connect(write_kubeconfig(tmp_path / "config", api.url), clock, request_timeout=0.5)
    yield cluster
    await cluster.close()
