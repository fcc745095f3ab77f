#!/usr/bin/env python3
"""How long it takes to know who uses the driver on a full node: 500 pods, and 2,000 real processes.

    scripts/bench consumers_scan [--json] [--pods 500] [--processes 2000] [--files 40] [--mappings 200]

Figures:
    snapshot_seconds    a look at a node with that many pods, half of them with a GPU: first request to the plan (median of 5)
    proc_scan_seconds   the host's look for holders on a real /proc with that many processes, each with open files and private file
                        mappings, as libraries are (median of 5)
    first_scan_seconds  the one before those, when the kernel has made nothing of that /proc yet
    single_scan_seconds the same without children, as where none is to be had (once)
    shared_scan_seconds the same as the first with shared mappings of one file, each of which may be a device (median of 5)
    psutil_seconds      psutil's own walk over descriptors and mappings of the same processes, once
    psutil_ratio        that divided by proc_scan_seconds
    verdicts            pods that the plan has a verdict for
    evictions           pods that it would evict
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from driver_manager.agent.observe import Observer
from driver_manager.clock import SystemClock
from driver_manager.config import Settings
from driver_manager.host import open_host
from driver_manager.host.paths import machine_roots
from driver_manager.host.scan import scan
from driver_manager.kube import connect
from tests.e2e.world import StockNode
from tests.kube.controlplane import ControlPlane
from tests.kube.fixtures import make_namespace

CROWD = """
import ctypes, json, os, signal, sys, tempfile
processes, files, mappings, flags = map(int, sys.argv[1:])
mmap = ctypes.CDLL(None).mmap  # Python's own keeps a descriptor for each
mmap.restype = ctypes.c_void_p
with tempfile.TemporaryFile() as file:
    file.truncate(8192 * mappings)
    for number in range(mappings):
        assert mmap(None, ctypes.c_size_t(4096), 1, flags, file.fileno(), ctypes.c_long(8192 * number)) != ctypes.c_void_p(-1).value
kept = [os.open("/etc/passwd", os.O_RDONLY) for _ in range(files - 3)]
born = []
for _ in range(processes):
    if (pid := os.fork()) == 0:
        os.dup2(0, 1)
        signal.pause()
        os._exit(0)
    born.append(pid)
print(json.dumps(born), flush=True)
signal.pause()
"""


@contextmanager
def crowd(processes: int, files: int, mappings: int, flags: int) -> Iterator[list[int]]:
    """Real processes that sleep with so many files open and so many file mappings besides their libraries', gone at the end."""
    argv = [sys.executable, "-I", "-S", "-c", CROWD, *map(str, (processes, files, mappings, flags))]
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, start_new_session=True) as leader:
        try:
            assert leader.stdout is not None
            pids = json.loads(leader.stdout.readline())
            time.sleep(0.5)  # the last of them come to rest
            yield pids
        finally:
            os.killpg(leader.pid, signal.SIGKILL)


async def walks(times: int) -> list[float]:
    """How long the host's own look for holders takes, each time."""
    host = open_host(None, SystemClock())
    took = []
    for _ in range(times):
        began = time.monotonic()
        await host.holders()
        took.append(time.monotonic() - began)
    return took


def psutil_walk(pids: list[int]) -> float:
    began = time.monotonic()
    for pid in pids:
        process = psutil.Process(pid)
        process.open_files()
        process.memory_maps(grouped=False)
    return time.monotonic() - began


def scan_figures(processes: int, files: int, mappings: int) -> dict[str, float]:
    with crowd(processes, files, mappings, mmap.MAP_PRIVATE) as pids:
        took = asyncio.run(walks(6))
        began = time.monotonic()
        scan(machine_roots())
        single = time.monotonic() - began
        walk = psutil_walk(pids)
    with crowd(processes, files, mappings, mmap.MAP_SHARED):
        shared = statistics.median(asyncio.run(walks(5)))
    ours = statistics.median(took[1:])
    return {
        "proc_scan_seconds": round(ours, 3),
        "first_scan_seconds": round(took[0], 3),
        "single_scan_seconds": round(single, 3),
        "shared_scan_seconds": round(shared, 3),
        "psutil_seconds": round(walk, 3),
        "psutil_ratio": round(walk / ours, 1),
    }


async def look(node: StockNode) -> tuple[float, Any]:
    env = node.environment()
    clock = SystemClock()
    settings = Settings(node_name=node.name, operator_namespace=node.namespace)
    cluster = await connect(env["KUBECONFIG"], clock)
    try:
        await cluster.node(node.name)  # the connection is made
        times = []
        for _ in range(5):
            began = time.monotonic()
            _, plan = await Observer(cluster, open_host(node.tree.root, clock), clock, settings).plan()
            times.append(time.monotonic() - began)
    finally:
        await cluster.close()
    return statistics.median(times), plan


def snapshot_figures(pods: int) -> dict[str, float]:
    with ControlPlane() as control_plane, tempfile.TemporaryDirectory() as folder:
        control_plane.spawn_kubelet()
        make_namespace(control_plane, "bench-scan")
        node = StockNode(control_plane, "bench-scan", Path(folder), gpus=pods, pods=pods + 50)
        node.add_driver(digest="new")
        node.add_training(pods // 2, timeout=120)
        node.add_training(pods - pods // 2, name="plain", gpus=0, timeout=120)
        seconds, plan = asyncio.run(look(node))
    evictions = sum(each.action == "evict" for each in plan.verdicts)
    return {"snapshot_seconds": round(seconds, 3), "verdicts": len(plan.verdicts), "evictions": evictions}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--pods", type=int, default=500, help="on the node")
    parser.add_argument("--processes", type=int, default=2000, help="real ones")
    parser.add_argument("--files", type=int, default=40, help="open in each")
    parser.add_argument("--mappings", type=int, default=200, help="file mappings in each")
    options = parser.parse_args()
    result = scan_figures(options.processes, options.files, options.mappings) | snapshot_figures(options.pods)
    if options.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:24} {value:>8}")


if __name__ == "__main__":
    main()
