"""What keeps the controller quick beside thousands of nodes, and holds it to a bound."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver_manager.controller import loop
from driver_manager.controller.cache import Cache
from driver_manager.controller.loop import WRITES_AT_ONCE
from driver_manager.controller.reminders import Reminders
from driver_manager.controller.run import Replica
from driver_manager.controller.settings import ControllerSettings
from driver_manager.controller.work import FREED_AT_ONCE
from driver_manager.core.fleet import Kind
from driver_manager.core.rollout_states import BEFORE_RESTART, State
from driver_manager.core.snapshot import NodeView
from driver_manager.kube.fleet import CONNECTIONS
from driver_manager.names import UPGRADE_STATE
from driver_manager.sim.clock import run_virtual
from driver_manager.sim.fleetworld import FleetWorld

NODE = NodeView(name="n", uid="u", resource_version="5", labels={"a": "b"}, allocatable={"nvidia.com/gpu": 8})

steps = st.tuples(st.sampled_from("abc"), st.integers(1, 9) | st.none() | st.just("due"))


@given(st.lists(steps, max_size=40))
def test_a_node_is_reminded_of_once_at_its_earliest_moment(told: list[tuple[str, int | str | None]]) -> None:
    """Against a plain table: of each node the earliest moment counts, once, and those that are due come in order."""
    reminders, plain, now = Reminders(), dict[str, float](), 0.0
    for name, what in told:
        if what is None:
            reminders.drop(name)
            plain.pop(name, None)
        elif isinstance(what, int):
            is_first = what < plain.get(name, math.inf)
            plain[name] = min(what, plain.get(name, math.inf))
            assert not reminders.put(name, what) or is_first
        else:
            now += 1
            assert reminders.due(now) == sorted((each for each in plain if plain[each] <= now), key=lambda each: (plain[each], each))
            plain = {each: at for each, at in plain.items() if at > now}
        assert reminders.first <= min(plain.values(), default=math.inf)


def test_reminders_do_not_grow() -> None:
    """A node that is decided about again and again, always with an earlier moment, has few entries."""
    reminders = Reminders()
    for at in range(10_000, 0, -1):
        reminders.put("n", at)
    assert len(reminders._heap) < 200
    assert reminders.due(1) == ["n"]
    assert reminders.due(20_000) == []


def test_a_report_that_changes_nothing_concerns_nobody() -> None:
    """A kubelet's report with another version alone is taken in for the next guard, and starts no decision; any other change does."""
    cache = Cache()
    assert cache.put_node(NODE) == {"n"}
    assert cache.put_node(replace(NODE, resource_version="6")) == set()
    assert cache.nodes["n"].resource_version == "6"
    assert cache.put_node(replace(NODE, resource_version="7", allocatable={"nvidia.com/gpu": 7})) == {"n"}
    assert cache.put_node(replace(NODE, resource_version="8", uid="another")) == {"n"}
    assert cache.put_node(replace(NODE, resource_version="7", unschedulable=True)) == set(), "a late answer of the node that was before"
    assert cache.nodes["n"].uid == "another"


def test_connections_are_left_for_requests() -> None:
    """Watches of kinds and of nodes, and the writes that go out at once, do not use up the connections."""
    assert len(Kind) + 1 + FREED_AT_ONCE + WRITES_AT_ONCE <= CONNECTIONS


def test_so_many_nodes_are_freed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a policy without limits a bounded number of nodes is between cordon and restart, and the fleet comes to its end."""
    monkeypatch.setattr(loop, "FREED_AT_ONCE", 3)
    world = FleetWorld(1, nodes=9, policy={"autoUpgrade": True, "maxParallelUpgrades": 0, "maxUnavailable": "100%"})
    most = 0

    def look(*_: object) -> None:
        nonlocal most
        most = max(most, sum(node.labels.get(UPGRADE_STATE) in BEFORE_RESTART for node in world.store.nodes.values()))

    async def story() -> None:
        life = world.controller()
        task = asyncio.create_task(Replica(life.fleet, life.clock, ControllerSettings()).run())
        await asyncio.sleep(5)
        world.on_change(look)
        world.new_driver("two")
        await asyncio.sleep(1800)
        task.cancel()
        await asyncio.wait({task})

    run_virtual(story())
    assert most == 3
    assert {node.labels[UPGRADE_STATE] for node in world.store.nodes.values()} == {State.DONE}
    assert all(pod.is_ready for pod in world.driver_pods())


def test_few_writes_at_once_hold_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for one write at a time, every node still comes to its end."""
    monkeypatch.setattr(loop, "WRITES_AT_ONCE", 1)
    world = FleetWorld(2, nodes=5, policy={"autoUpgrade": True, "maxParallelUpgrades": 0, "maxUnavailable": "100%"})

    async def story() -> None:
        life = world.controller()
        task = asyncio.create_task(Replica(life.fleet, life.clock, ControllerSettings()).run())
        await asyncio.sleep(5)
        world.new_driver("two")
        await asyncio.sleep(1800)
        task.cancel()
        await asyncio.wait({task})

    run_virtual(story())
    assert {node.labels[UPGRADE_STATE] for node in world.store.nodes.values()} == {State.DONE}
