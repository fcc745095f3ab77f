"""The benchmarks' scripted API server knows what the controller asks for: where it did not, waits would be measured."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from benchmarks.scale.link import Link
from benchmarks.scale.objects import NAMESPACE
from benchmarks.scale.world import World
from driver_manager.clock import SystemClock
from driver_manager.core.fleet import Kind, Listed, NotServed
from driver_manager.core.snapshot import Identity
from driver_manager.kube.fleet import KubeFleet
from driver_manager.kube.fleetcalls import Selection


@pytest.mark.real_sockets
@pytest.mark.parametrize("kind", Kind)
async def test_every_kind_is_listed_and_watched(kind: Kind, tmp_path: Path) -> None:
    """Nodes, their pods and the policy are there; of all else there is none."""
    world = World(3, {"autoUpgrade": True})
    server = await asyncio.start_unix_server(world.serve, tmp_path / "api")
    link: Any = Link(str(tmp_path / "api"), 2, 5.0)
    fleet = KubeFleet(link, SystemClock(), Identity(), Selection(namespace=NAMESPACE))
    try:
        async with asyncio.timeout(5), aclosing(fleet.follow(kind)) as events:
            first = await anext(events)
            watching = asyncio.ensure_future(anext(events))
            while isinstance(first, Listed) and not any(each.watchers for each in world.kinds.values()):
                await asyncio.sleep(0.01)
            watching.cancel()
            await asyncio.wait([watching])
    finally:
        await link.close()
        server.close()
    there = {Kind.NODES: 3, Kind.DRIVER_PODS: 3, Kind.VALIDATOR_PODS: 3, Kind.DAEMON_SETS: 2, Kind.REVISIONS: 2, Kind.CLUSTER_POLICIES: 1}
    if kind is Kind.MAINTENANCES:
        assert first == NotServed(kind)
    else:
        assert isinstance(first, Listed)
        assert len(first.items) == there.get(kind, 0)
