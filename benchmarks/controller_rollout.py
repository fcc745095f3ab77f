#!/usr/bin/env python3
"""One whole roll-out of new drivers by the controller on a real control plane, on the same fleet that upstream was measured on.

    scripts/bench controller_rollout [--json] [--nodes 20 50] [--device-gaps]

Each node has two GPUs that two pods of 2 s grace use (the cluster is full), a driver pod that takes 2 s to stop and 5 s to start, and a
validator pod that goes with it; at most 5 nodes in work, at most 25 % unavailable. With --device-gaps no devices are allocatable while
no driver is Ready, as on real nodes; upstream's fleet had them all the time. Figures, the worst of all sizes first, then each size:
    requests_per_node        from the API server's audit log, from the new template to the end: all but one eviction per GPU pod and one
                             Event per state write; the Lease's and those of the start are told apart
    ready_to_next_write_ms   from a driver pod's being Ready to the next state of its node, both as a watch sees them; the median
    ideal_ratio              wall time from the first state written to the end, by ceil(nodes / 5) x (2 + 2 + 5) s
    peak_mb                  peak resident memory of the controller
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.e2e.fleet import STATE, GpuFleet
from tests.e2e.fleetwatch import Story, watched
from tests.kube import crds
from tests.kube.controlplane import ControlPlane
from tests.kube.fixtures import make_namespace
from tests.kube.recorder import Event
from tests.kube.space import is_ready, node_of

FIGURES = ("requests_per_node", "ready_to_next_write_ms", "ideal_ratio", "peak_mb")
PARALLEL, POD_GRACE, DRIVER_STOP, DRIVER_START = 5, 2, 2, 5
POLICY = {
    "autoUpgrade": True,
    "maxParallelUpgrades": PARALLEL,
    "maxUnavailable": "25%",
    "podDeletion": {"force": False, "timeoutSeconds": 300, "deleteEmptyDir": False},
}
Requests = Counter[tuple[str, str, int]]


def measured(count: int, folder: Path, *, gaps: bool) -> dict[str, Any]:
    with ControlPlane(crds=[crds.crd("ClusterPolicy")]) as control_plane:
        control_plane.spawn_kubelet()
        make_namespace(control_plane, "fleet")
        lives = {"gpus": 2, "grace": DRIVER_STOP, "start_after": f"{DRIVER_START}s", "have_devices_gaps": gaps}
        fleet = GpuFleet(control_plane, "fleet", folder, count, **lives)
        fleet.add_training(2 * count, grace=POD_GRACE)
        fleet.add_custom(POLICY)
        began = control_plane.audit_mark()
        replica = fleet.start(by_file=False)
        fleet.wait_states("upgrade-done", 120)
        time.sleep(3.0)  # let everything come to rest
        start = fleet.counts(began)
        with watched(fleet) as story:
            mark = control_plane.audit_mark()
            fleet.set_driver("2")
            wait_end(fleet, story, 20.0 * count)
            requests = fleet.counts(mark)
        peak = peak_mb(replica.process.pid)
        fleet.stop(replica).require(0)
        return figures(count, story, requests, fleet.evicted(mark)) | {"peak_mb": peak, "start_requests": sum(start.values())}


def wait_end(fleet: GpuFleet, story: Story, timeout: float) -> None:
    """Waits without a request: the API server is measured too."""

    def is_over() -> bool:
        newest = {event.name: event.object for event in list(story.nodes.events)}
        states = {node["metadata"]["labels"].get(STATE) for node in newest.values()}
        return states == {"upgrade-done"} and all(len(uids) == 2 for uids in story.driver_uids().values())

    fleet.cp.wait_for(is_over, "the end of the roll-out", timeout, 0.5)


def figures(count: int, story: Story, requests: Requests, evicted: list[str]) -> dict[str, Any]:
    writes = state_writes(story)
    times = [event.at for events in writes.values() for event in events]
    wall = max(times) - min(times)
    waits = ready_to_next_write(story, writes)
    by_resource: Counter[str] = Counter()
    for (_, what, _), number in requests.items():
        by_resource[what] += number
    excused = len(evicted) + min(by_resource["events"], requests["patch", "nodes", 200]) + by_resource["leases"]
    ideal = math.ceil(count / PARALLEL) * (POD_GRACE + DRIVER_STOP + DRIVER_START)
    return {
        "requests_per_node": round((sum(requests.values()) - excused) / count, 2),
        "ready_to_next_write_ms": round(statistics.median(waits) * 1000),
        "longest_ready_to_next_write_ms": round(max(waits) * 1000),
        "ideal_ratio": round(wall / ideal, 3),
        "wall_seconds": round(wall, 1),
        "evictions": len(evicted),
        "lease_requests": by_resource["leases"],
        "by_request": {" ".join(map(str, key)): number for key, number in sorted(requests.items())},
    }


def state_writes(story: Story) -> dict[str, list[Event]]:
    """Node -> the events that brought another state."""
    found: dict[str, list[Event]] = {}
    labels: dict[str, str] = {}
    for event in story.nodes.events:
        label = event.object["metadata"]["labels"].get(STATE, "")
        if labels.get(event.name, label) != label:
            found.setdefault(event.name, []).append(event)
        labels[event.name] = label
    return found


def ready_to_next_write(story: Story, writes: dict[str, list[Event]]) -> list[float]:
    """Seconds for each node. What came first is told by the API server's versions: the two watches are not in step to the millisecond."""
    old = {uids[0] for uids in story.driver_uids().values()}
    ready: dict[str, Event] = {}
    for event in story.drivers.events:
        if event.uid not in old and is_ready(event.object):
            ready.setdefault(node_of(event.object), event)
    nexts = {name: next(write for write in writes[name] if version(write) > version(event)) for name, event in ready.items()}
    return [max(0.0, nexts[name].at - event.at) for name, event in ready.items()]


def version(event: Event) -> int:
    return int(event.object["metadata"]["resourceVersion"])


def peak_mb(pid: int) -> float:
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM")]
    return round(int(line.split()[1]) / 1024, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--nodes", type=int, nargs="+", default=[20, 50], help="sizes of the fleets")
    parser.add_argument("--device-gaps", action="store_true", help="devices are away while no driver is Ready")
    options = parser.parse_args()
    results: dict[int, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for count in options.nodes:
            where = Path(folder) / str(count)
            where.mkdir()
            results[count] = measured(count, where, gaps=options.device_gaps)
    if options.json:
        worst = {name: max(each[name] for each in results.values()) for name in FIGURES}
        print(json.dumps({**worst, "nodes": results}))
        return
    print(f"{'':32}" + "".join(f"{count:>8} nodes" for count in results))
    for name in (*FIGURES, "longest_ready_to_next_write_ms", "wall_seconds", "evictions", "lease_requests", "start_requests"):
        print(f"{name:32}" + "".join(f"{each[name]:>14}" for each in results.values()))
    for count, each in results.items():
        print(f"requests at {count} nodes:", each["by_request"])


if __name__ == "__main__":
    main()
