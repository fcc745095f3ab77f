#!/usr/bin/env python3
"""The controller beside large fleets: a scripted API server in one process, the controller with its real cache and decoding in another.

    scripts/bench controller_scale [--json] [--sizes 500,1000,2000,5000]

Two phases at each size. 50 nodes are in work, and driver pods become Ready at 20 a second. Then a quarter of the fleet, at most 1,250
nodes, is in work, and all of their driver pods become Ready at once. All the while each kubelet reports its status once in 5 minutes.

Figures:
    p99_ms             from the bytes given to the watch (driver or validator Ready) to that node's next write, in the first phase
    p50_ms             the median of the same
    waited_percent     of that phase the controller could have run and had no processor: what other work on the machine adds to it
    burst_seconds      from the first of the burst to the last write that answers a driver's becoming Ready
    peak_mb            peak resident memory of the controller's process
    requests_per_node  all but evictions, Events, the Lease, and the lists and watches of the fleet
    cpu_ms_per_node    of the controller's process: its start and the marking of all nodes by their number, and both phases by theirs
    cost_growth        cpu_ms_per_node at the largest size, by that at the smallest
    start_seconds      until everything is listed and watched
    mark_seconds       from a new driver template until all nodes are marked for an upgrade
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil

from benchmarks.scale.world import World
from driver_manager.core.rollout_states import State

SIZES: Final = (500, 1000, 2000, 5000)
IN_WORK: Final = 50
READY_PER_SECOND: Final = 20
STEADY_SECONDS: Final = 12
BURST: Final = 1250
HEARTBEAT_SECONDS: Final = 300
TABLE: Final = ("nodes", "p50_ms", "p99_ms", "waited_percent", "burst_nodes", "burst_seconds", "peak_mb", "requests_per_node")
MORE: Final = ("cpu_ms_per_node", "start_seconds", "mark_seconds")
APART: Final = ("events", "leases", "eviction", "clusterpolicies", "nvidiadrivers", "daemonsets", "controllerrevisions")


@dataclass(slots=True)
class Measured:
    """What one size costs, as it goes on."""

    world: World
    process: psutil.Process
    figures: dict[str, Any] = field(default_factory=dict)
    cpu: dict[str, float] = field(default_factory=dict)
    _last: float = 0.0

    def waited(self) -> float:
        """Seconds that the controller could have run and had no processor: other people's work on this machine."""
        return int(Path(f"/proc/{self.process.pid}/schedstat").read_text().split()[1]) / 1e9

    def lap(self, phase: str) -> None:
        """A phase ends here."""
        times = self.process.cpu_times()
        now = times.user + times.system
        self.cpu[phase], self._last = now - self._last, now


def peak_mb(pid: int) -> float:
    """Of a process that still runs; what wait4 tells of one that has ended has the memory of the parent in it."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) / 1024


async def measure(size: int, folder: Path, controller: tuple[str, ...]) -> dict[str, Any]:
    world = World(size, {"autoUpgrade": True, "maxParallelUpgrades": IN_WORK, "maxUnavailable": "100%"})
    path = str(folder / f"{size}.sock")
    server = await asyncio.start_unix_server(world.serve, path)
    began = time.monotonic()
    child = subprocess.Popen([*controller, path], stderr=subprocess.DEVNULL)
    beats = asyncio.create_task(heartbeats(world))
    try:
        told = Measured(world, psutil.Process(child.pid))
        await play(told, began)
        told.figures["peak_mb"] = round(peak_mb(child.pid), 1)
    finally:
        beats.cancel()
        child.terminate()
        await asyncio.to_thread(child.wait, 30)
        server.close()
        await asyncio.sleep(0.2)  # the connections see their end
    return {"nodes": size, **told.figures}


async def heartbeats(world: World) -> None:
    nodes = list(world.nodes.values())
    for number in range(10**9):
        await asyncio.sleep(HEARTBEAT_SECONDS / len(nodes))
        world.heartbeat(nodes[number % len(nodes)])


async def play(told: Measured, began: float) -> None:
    world, figures, size = told.world, told.figures, len(told.world.nodes)
    await until_watched(world)
    figures["start_seconds"] = round(time.monotonic() - began, 1)
    await asyncio.sleep(1.0)
    before, began = Counter(world.requests), time.monotonic()
    world.new_driver()
    await world.until(lambda: all(node.state != State.DONE for node in world.nodes.values()), 120, "all nodes are marked")
    figures["mark_seconds"] = round(world.last_write - began, 1)
    await world.until(lambda: len(world.waiting) >= IN_WORK, 60, f"{IN_WORK} nodes are in work")
    told.lap("start")
    await steady(told)
    burst = min(BURST, size // 4)
    world.new_policy(maxParallelUpgrades=burst)
    await world.until(lambda: len(world.waiting) >= burst, 120, f"{burst} nodes are in work")
    world.new_policy(maxParallelUpgrades=1)  # no other is begun
    await asyncio.sleep(1.0)
    figures["burst_nodes"] = burst
    figures["burst_seconds"] = await all_at_once(world)
    told.lap("work")
    asked = {key: number - before[key] for key, number in sorted(world.requests.items()) if number > before[key]}
    counted = {key: number for key, number in asked.items() if not any(word in key for word in APART) and key != "watch nodes"}
    figures["requests_per_node"] = round((sum(counted.values()) - size) / world.finished + 1, 2)  # one of them marks a node
    figures["cpu_ms_per_node"] = round(1000 * (told.cpu["start"] / size + told.cpu["work"] / world.finished), 2)
    figures["cpu_seconds"] = {phase: round(seconds, 2) for phase, seconds in told.cpu.items()}
    figures["finished"] = world.finished
    figures["by_request"] = asked


async def until_watched(world: World) -> None:
    """Raises TimeoutError naming what nobody watches."""
    deadline = time.monotonic() + 120
    while missing := [name for name, kind in world.kinds.items() if not kind.watchers]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"not watched: {', '.join(missing)}")
        await asyncio.sleep(0.05)


async def steady(told: Measured) -> None:
    """Driver pods become Ready one after another."""
    world = told.world
    world.latencies.clear()
    began, waited = time.monotonic(), told.waited()
    for number in range(READY_PER_SECOND * STEADY_SECONDS):
        await asyncio.sleep(max(0.0, began + number / READY_PER_SECOND - time.monotonic()))
        await world.until(lambda: bool(world.waiting), 30, "a node waits for its driver")
        world.driver_ready(world.waiting.popleft())
    took = time.monotonic() - began
    await world.until(lambda: not world.told, 30, "all are answered")
    cuts = statistics.quantiles(world.latencies, n=100)
    told.figures["p50_ms"], told.figures["p99_ms"] = round(1000 * cuts[49], 1), round(1000 * cuts[98], 1)
    told.figures["waited_percent"] = round(100 * (told.waited() - waited) / took)
    told.figures["ready_per_second"] = round(READY_PER_SECOND * STEADY_SECONDS / took, 1)


async def all_at_once(world: World) -> float:
    """All driver pods that can become Ready do so now."""
    names, finished = list(world.waiting), world.finished
    began = time.monotonic()
    for name in names:
        world.driver_ready(name)
    await world.until(lambda: all(world.nodes[name].state != State.POD_RESTART for name in names), 60, "all are answered")
    took = world.last_write - began
    await world.until(lambda: world.finished >= finished + len(names), 60, "all are done")
    return round(took, 2)


async def be_controller(path: str, folder: str) -> None:
    """The other process."""
    from benchmarks.scale.link import Link
    from benchmarks.scale.objects import NAMESPACE
    from driver_manager.clock import SystemClock
    from driver_manager.controller.run import Replica
    from driver_manager.controller.settings import ControllerSettings
    from driver_manager.core.snapshot import Identity
    from driver_manager.kube.fleet import CONNECTIONS, KubeFleet
    from driver_manager.kube.fleetcalls import Selection
    from driver_manager.logs import set_up

    set_up("json", "info")
    settings, clock = ControllerSettings(operator_namespace=NAMESPACE), SystemClock()
    link: Any = Link(path, CONNECTIONS, settings.request_timeout)
    replica = Replica(KubeFleet(link, clock, Identity(), Selection(namespace=NAMESPACE)), clock, settings)
    if not folder:
        await replica.run()
        return
    import cProfile

    profile = cProfile.Profile()
    running = asyncio.create_task(replica.run())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    profile.enable()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    profile.disable()
    profile.dump_stats(f"{folder}/controller_scale.{os.getpid()}.prof")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="how many nodes, one fleet after another")
    parser.add_argument("--profile", default="", help="a folder that gets a cProfile file for each fleet; figures are worth nothing then")
    parser.add_argument("--controller", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.controller:
        asyncio.run(be_controller(options.controller, options.profile))
        return
    controller = (sys.executable, __file__, "--profile", options.profile, "--controller")
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for size in map(int, options.sizes.split(",")):
            results.append(asyncio.run(measure(size, Path(folder), controller)))
            if not options.json:
                show(results[-1], is_first=len(results) == 1)
    growth = round(results[-1]["cpu_ms_per_node"] / results[0]["cpu_ms_per_node"], 2)
    if options.json:
        print(json.dumps({"cost_growth": growth, "sizes": results}))
    else:
        print(f"cost_growth {growth}")


def show(result: dict[str, Any], *, is_first: bool) -> None:
    columns = (*TABLE, *MORE)
    if is_first:
        print("  ".join(columns))
    print("  ".join(f"{result[name]:>{len(name)}}" for name in columns), flush=True)


if __name__ == "__main__":
    main()
