#!/usr/bin/env python3
"""How long the command takes to say its first word, and to make its first API request.

    scripts/bench agent_start [--json] [--runs 7]

Figures (medians):
    help_seconds            `driver-manager --help`, exec to exit
    first_request_seconds   exec to the first request of a `uninstall_driver` on a node with nothing loaded, by the audit log
    peak_mb                 peak resident memory of that run
    own_seconds             exec to exit of that run: nobody has to go, so all of it is the program's own
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.agent_flow import stamp
from tests.e2e.command import COMMAND
from tests.e2e.world import StockNode, empty_host
from tests.kube.controlplane import ControlPlane
from tests.kube.fixtures import make_namespace


def help_seconds() -> float:
    began = time.monotonic()
    subprocess.run([COMMAND, "--help"], stdout=subprocess.DEVNULL, check=True)
    return time.monotonic() - began


def start_figures(node: StockNode, env: dict[str, str]) -> dict[str, float]:
    mark, began = node.cp.audit_mark(), time.time()
    run = node.start("uninstall_driver", env=env)
    _, status, usage = os.wait4(run.process.pid, 0)
    ended = time.time()
    if os.waitstatus_to_exitcode(status) != 0:
        raise SystemExit(f"the run failed:\n{run.error_text()}")
    account = f"system:serviceaccount:{node.namespace}:nvidia-driver"
    first = min(stamp(event["requestReceivedTimestamp"]) for event in node.cp.audit(mark, account))
    return {"first_request_seconds": first - began, "peak_mb": usage.ru_maxrss / 1024, "own_seconds": ended - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--runs", type=int, default=7, help="how many runs of each")
    options = parser.parse_args()
    helps = [help_seconds() for _ in range(options.runs)]
    with ControlPlane() as control_plane, tempfile.TemporaryDirectory() as folder:
        control_plane.spawn_kubelet()
        make_namespace(control_plane, "bench-start")
        node = StockNode(control_plane, "bench-start", Path(folder))
        node.add_driver(digest="new")
        node.tree = empty_host(Path(folder) / "empty")
        env = node.environment()
        starts = [start_figures(node, env) for _ in range(options.runs)]
    result = {"help_seconds": round(statistics.median(helps), 3)}
    result |= {name: round(statistics.median(each[name] for each in starts), 3) for name in starts[0]}
    if options.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:24} {value:>8}")


if __name__ == "__main__":
    main()
