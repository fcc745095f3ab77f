from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from driver_manager.host import LinuxHost, open_host
from driver_manager.ports import Clock

from .trees import Tree


class RealClock:
    """The time of this machine; tests of the host wait for real things."""

    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> str:
        return "2026-01-31T09:00:00Z"

    def epoch(self) -> float:
        return 1_769_850_000.0

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def run_id(self) -> str:
        return "abcdefghij"


@pytest.fixture
def clock() -> Clock:
    """Real time."""
    return RealClock()


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """An empty host tree."""
    root = tmp_path / "host"
    root.mkdir()
    return Tree(root)


@pytest.fixture
def host(tree: Tree, clock: Clock) -> LinuxHost:
    """The host that is the tree."""
    return open_host(tree.root, clock)


@pytest.fixture
def loaded(tree: Tree) -> Tree:
    """A tree with the driver loaded as on a common node: uvm, modeset and drm on top of nvidia."""
    _load(tree, [("nvidia", ["nvidia_uvm", "nvidia_modeset"]), ("nvidia_uvm", []), ("nvidia_modeset", ["nvidia_drm"]), ("nvidia_drm", [])])
    return tree


def _load(tree: Tree, modules: Sequence[tuple[str, Sequence[str]]]) -> None:
    for name, holders in modules:
        tree.module(name, holders=holders)
