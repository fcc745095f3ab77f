"""Roll-outs from many seeds: killed, doubled and troubled, none gets stuck, none repeats a step, and the budget holds at every moment."""

from __future__ import annotations

import pytest

from driver_manager.sim.clock import run_virtual
from tests.controller.rollouts import Script, play

SEEDS = 40
DEEP_SEEDS = 10_000
SHARDS = 20
"""So that several workers share them."""


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SHARDS))
def test_interrupted_rollouts_end_well(shard: int, pytestconfig: pytest.Config) -> None:
    """R3, R4, R6, R7, N50: whatever dies and fails on the way, every node ends with the new driver and otherwise as it was."""
    count = DEEP_SEEDS if pytestconfig.getoption("deep") else SEEDS
    for seed in range(shard, count, SHARDS):
        run_virtual(play(Script.of(seed)))


@pytest.mark.parametrize("seed", [1769, 9867])
def test_what_once_went_wrong(seed: int) -> None:
    """R7: a node was begun before the Lease named it; one that was written while a new leader came was not counted."""
    run_virtual(play(Script.of(seed)))
