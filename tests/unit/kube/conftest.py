from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

import driver_manager.kube.connection  # noqa: F401 - here, because urllib3 binds a socket when it is imported, which no guarded test may
from driver_manager import kube
from tests.unit.kube.server import Api, QuickClock, write_kubeconfig


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    """An API server that answers as told."""
    api = Api()
    app = web.Application(client_max_size=2**26)
    app.router.add_route("*", "/{path:.*}", api.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    api.url = f"http://{host}:{port}"
    yield api
    api.over.set()
    await runner.cleanup()


@pytest.fixture
def clock() -> QuickClock:
    """A clock whose sleeps take no time."""
    return QuickClock()


@pytest.fixture
async def cluster(api: Api, clock: QuickClock, tmp_path: Path) -> AsyncIterator[kube.KubeCluster]:
    """The adapter, connected to the server; one request may take 0.3 s."""
    cluster = await kube.connect(write_kubeconfig(tmp_path / "config", api.url, "secret"), clock, request_timeout=0.3)
    yield cluster
    await cluster.close()
