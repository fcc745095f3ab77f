#!/usr/bin/env python3
"""One run of the agent on a real control plane: 12 operands of 1 s grace and 20 GPU pods of 2 s grace, as upstream was measured.

    scripts/bench agent_flow [--json] [--runs 3]

Figures (the median run by own_seconds):
    own_seconds    wall time less the longest termination of one pod, accepted to DELETED
    tail_seconds   from the last awaited DELETED to the end of the process
    requests       all but evictions and their dry runs, from the API server's audit log
    evictions      accepted ones, without dry runs
    peak_mb        peak resident memory of the process
    wall_seconds   from exec to exit
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.e2e.world import Object, StockNode
from tests.kube.controlplane import ControlPlane
from tests.kube.fixtures import make_namespace

FIGURES = ("own_seconds", "tail_seconds", "requests", "evictions", "peak_mb", "wall_seconds", "first_request_seconds")


def measured(control_plane: ControlPlane, namespace: str, folder: Path) -> dict[str, Any]:
    make_namespace(control_plane, namespace)
    node = StockNode(control_plane, namespace, folder)
    node.add_driver(digest="new")
    node.add_operands()
    node.add_training(20)
    env = node.environment()
    time.sleep(2.0)  # let the controllers come to rest
    with control_plane.record(f"/api/v1/namespaces/{namespace}/pods") as pods:
        time.sleep(0.3)
        mark, began = control_plane.audit_mark(), time.time()
        run = node.start("uninstall_driver", env=env)
        _, status, usage = os.wait4(run.process.pid, 0)
        ended = time.time()
        time.sleep(0.3)
        removed = {event.uid: event.at for event in pods.events if event.kind == "DELETED"}
        now_mono, now_wall = time.monotonic(), time.time()
    if os.waitstatus_to_exitcode(status) != 0:
        raise SystemExit(f"the run failed:\n{run.error_text()}")
    gone = {uid: at - now_mono + now_wall for uid, at in removed.items()}
    result = figures(node, mark, began, ended, gone) | {"peak_mb": round(usage.ru_maxrss / 1024, 1)}
    node.remove()
    control_plane.delete(f"/api/v1/namespaces/{namespace}")
    return result


def figures(node: StockNode, mark: int, began: float, ended: float, gone: dict[str, float]) -> dict[str, Any]:
    evictions = node.evictions(mark)
    account = f"system:serviceaccount:{node.namespace}:nvidia-driver"
    requests = list(node.cp.audit(mark, account))
    first = min(stamp(event["requestReceivedTimestamp"]) for event in requests)
    terminations = termination_seconds(evictions, node.cp.audit(mark), gone, node.namespace)
    counted = node.requests(mark)
    return {
        "own_seconds": round(ended - began - max(terminations), 3),
        "tail_seconds": round(ended - max(at for at in gone.values()), 3),
        "requests": sum(counted.values()),
        "evictions": len(evictions),
        "wall_seconds": round(ended - began, 3),
        "longest_termination_seconds": round(max(terminations), 3),
        "first_request_seconds": round(first - began, 3),
        "by_request": {" ".join(map(str, key)): number for key, number in sorted(counted.items())},
    }


def termination_seconds(evictions: list[Object], audit: Any, gone: dict[str, float], namespace: str) -> list[float]:
    """From the accepted eviction, or the DaemonSet controller's delete, of each pod to its DELETED event."""
    accepted: dict[str, float] = {}
    for event in evictions:
        accepted[event["objectRef"]["name"]] = stamp(event["stageTimestamp"])
    for event in audit:
        ref = event.get("objectRef", {})
        if event["verb"] == "delete" and ref.get("resource") == "pods" and ref.get("namespace") == namespace:
            if "daemon-set-controller" in event["user"]["username"]:
                accepted.setdefault(ref["name"], stamp(event["stageTimestamp"]))
            elif event["user"]["username"] == "kubelet":
                gone.setdefault(ref["name"], stamp(event["stageTimestamp"]))
    return [gone[name] - at for name, at in accepted.items() if name in gone]


def stamp(text: str) -> float:
    import datetime

    return datetime.datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--runs", type=int, default=3, help="how many runs, the median one is shown")
    options = parser.parse_args()
    with ControlPlane() as control_plane, tempfile.TemporaryDirectory() as folder:
        control_plane.spawn_kubelet()
        results = []
        for number in range(options.runs):
            where = Path(folder) / str(number)
            where.mkdir()
            results.append(measured(control_plane, f"bench-{number}", where))
    middle = sorted(results, key=lambda each: each["own_seconds"])[len(results) // 2]
    if options.json:
        print(json.dumps({**middle, "all_own_seconds": [each["own_seconds"] for each in results]}))
        return
    for name in FIGURES:
        values = [each[name] for each in results]
        print(f"{name:24} {middle[name]:>8}   all: {', '.join(map(str, values))}   median: {statistics.median(values)}")
    print("requests:", middle["by_request"])


if __name__ == "__main__":
    main()
