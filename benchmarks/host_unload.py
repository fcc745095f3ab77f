#!/usr/bin/env python3
"""How quickly a machine without a cluster is freed once the last holder of a GPU has ended, on a real kernel in a virtual machine.

    scripts/bench host_unload [--json] [--rounds 5] [--real-clock]

The guest's processor is emulated and some ten times slower than a real one. Its clock goes by the instructions it has done (250 million a
second, about what a quiet machine emulates), so that a busy machine does not change the figures; with --real-clock it is the machine's.
Figures, all in the guest:
    reaction_ms     last holder's end to the first delete_module (median)
    unload_ms       first delete_module to the end of the last (median)
    bare_ms         the four calls alone, in the same process (median)
    unload_ratio    unload_ms divided by bare_ms (median of the rounds' ratios)
    polls           looks for holders while one holds for 10 s, the first of the wait included
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.vm.boot import prepared_parts, project_initrd, saved_guest
from tests.vm.machine import Guest

HOLD_SECONDS = 2.0
LONG_HOLD_SECONDS = 10.0


def measured(rounds: int, *, is_clock_counted: bool) -> dict[str, Any]:
    parts = prepared_parts()
    with tempfile.TemporaryDirectory() as folder:
        state = saved_guest(parts, project_initrd(parts, Path(folder)), is_clock_counted=is_clock_counted)
        try:
            with Guest.of(state) as guest:
                limit = 60 + 15 * rounds
                found: dict[str, Any] = guest.call(
                    "tests.vm.measure", "measure", limit, rounds=rounds, hold_seconds=HOLD_SECONDS, long_hold_seconds=LONG_HOLD_SECONDS
                )
                return found
        finally:
            state.forget()


def figures(found: dict[str, Any]) -> dict[str, float]:
    runs = found["runs"]

    def median(name: str) -> float:
        return round(float(statistics.median(run[name] for run in runs)), 1)

    ratio = statistics.median(run["unload_ms"] / run["bare_ms"] for run in runs)
    return {
        **{name: median(name) for name in ("reaction_ms", "unload_ms", "bare_ms")},
        "unload_ratio": round(ratio, 2),
        "polls": found["polls"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one object of figures")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--real-clock", action="store_true", help="time as it passes on this machine, with all that others do on it")
    arguments = parser.parse_args()
    result = figures(measured(arguments.rounds, is_clock_counted=not arguments.real_clock))
    if arguments.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:14} {value}")


if __name__ == "__main__":
    main()
