"""The mark that lets agents park by themselves: on nodes while the admission policies are proven to work, and off (decision 19)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Any

import pytest

from driver_manager import names
from driver_manager.controller.parkmarks import LOOK_EVERY, PROVE_EVERY
from driver_manager.controller.run import Replica
from driver_manager.controller.settings import ControllerSettings
from driver_manager.core.parking import MOST_PARKED_NODES
from driver_manager.core.parking_term import EXPRESSION
from driver_manager.core.record import Record, apply_record
from driver_manager.errors import DriverManagerError, Forbidden
from driver_manager.sim.clock import run_virtual
from driver_manager.sim.faults import Do, Fail
from driver_manager.sim.fleetworld import OWN_NAMESPACE, FleetWorld
from driver_manager.sim.objects import Cascade
from driver_manager.sim.parking import DENY, GATE
from driver_manager.sim.scenarios import NODE
from tests.agent.stage import Stage, play, small_world
from tests.agent.worlds import add_parkable
from tests.controller import wards
from tests.controller.rollouts import add_exporter


def told(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run_virtual(story())


async def lead(world: FleetWorld, *, kill_at: int | None = None) -> bool:
    """One life of the controller; gives whether it was killed."""
    life = world.controller(kill_at=kill_at)
    with contextlib.suppress(DriverManagerError):
        await life.run(Replica(life.fleet, life.clock, ControllerSettings(lease_namespace=OWN_NAMESPACE)).run())
    return life.was_killed


@contextlib.asynccontextmanager
async def led(world: FleetWorld) -> AsyncIterator[None]:
    """While it is entered a controller leads."""
    task = asyncio.create_task(lead(world))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def marked(world: FleetWorld) -> set[str]:
    """Names of the nodes with the mark."""
    return {name for name, node in world.store.nodes.items() if node.annotations.get(names.PARKING) == names.PARKING_ENFORCED}


async def until(is_so: Callable[[], object], seconds: float = 30.0) -> None:
    """Waits for something."""
    async with asyncio.timeout(seconds):
        while not is_so():
            await asyncio.sleep(0.1)


def is_unparked(world: FleetWorld) -> bool:
    """Whether no node is parked for anybody."""
    return not any(names.PARKED in node.labels or names.PARKED in node.annotations for node in world.store.nodes.values())


@pytest.mark.parametrize("ways", [GATE, DENY])
def test_marked_while_the_policies_work(ways: str) -> None:
    """Every node, after a proof that disturbs nobody; off all of them when the policies go, and on again when they are back."""

    async def story() -> None:
        world = FleetWorld(1, nodes=4)
        add_exporter(world, ways)
        pods = set(world.store.pods)
        async with led(world):
            await until(lambda: len(marked(world)) == 4)
            assert is_unparked(world)
            assert set(world.store.pods) == pods
            world.server.parking.ways = set()
            await until(lambda: not marked(world), 3 * LOOK_EVERY)
            world.server.parking.ways = {ways}
            await until(lambda: len(marked(world)) == 4, 3 * LOOK_EVERY)
            world.add_gpu_node("gpu-new")
            await until(lambda: "gpu-new" in marked(world))
            world.edit_node("gpu-1", annotations={names.PARKING: None})
            await until(lambda: "gpu-1" in marked(world))

    told(story)


def test_policies_that_do_nothing() -> None:
    """They are there and let everybody in: no node is marked; a mark that is there goes when they stop working."""

    async def story() -> None:
        world = FleetWorld(1, nodes=3)
        add_exporter(world, GATE)
        world.server.parking.is_broken = True
        async with led(world):
            await asyncio.sleep(5 * LOOK_EVERY)
            assert not marked(world)
            await until(lambda: is_unparked(world))
            world.server.parking.is_broken = False
            await until(lambda: len(marked(world)) == 3, 3 * LOOK_EVERY)
            world.server.parking.is_broken = True
            await until(lambda: not marked(world), PROVE_EVERY + 3 * LOOK_EVERY)
            await until(lambda: is_unparked(world))

    told(story)


def at_work(world: FleetWorld, name: str, *, parked: tuple[str, ...] = ()) -> None:
    """An agent begins its work on a node."""
    node = world.node(name)
    change = apply_record(Record(run="r", node_uid=node.uid, boot_id=node.boot_id, started="t", parked=parked), node)
    world.edit_node(name, labels=change.labels, annotations=change.annotations)


def test_policies_that_stop_working_while_no_node_is_at_rest() -> None:
    """A node that is parked refutes the proof; where none is, the proof goes out of date."""

    async def story(parked: tuple[str, ...]) -> None:
        world = FleetWorld(1, nodes=2, policy={"autoUpgrade": False})
        add_exporter(world, GATE)
        async with led(world):
            await until(lambda: len(marked(world)) == 2)
            for name in sorted(world.store.nodes):
                at_work(world, name, parked=parked)
            world.server.parking.is_broken = True
            await until(lambda: not marked(world), (1 if parked else 2) * PROVE_EVERY + 3 * LOOK_EVERY)
            assert not any(names.RECORD not in node.annotations for node in world.store.nodes.values())

    told(partial(story, ("monitoring/exporter",)))
    told(partial(story, ()))


def test_refusals_that_last_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """The dry run is forbidden: no node keeps its mark for longer than two proofs count, and the log is not filled with it."""

    async def story() -> None:
        world = FleetWorld(1, nodes=2)
        add_exporter(world, GATE)
        async with led(world):
            await until(lambda: len(marked(world)) == 2)
            world.faults.on("try_pod", Fail(lambda: Forbidden("pods is forbidden")), times=None)
            await until(lambda: not marked(world), 2 * PROVE_EVERY + 3 * LOOK_EVERY)
            await asyncio.sleep(2 * LOOK_EVERY)
            began = asyncio.get_running_loop().time()
            await asyncio.sleep(10 * LOOK_EVERY)
            await until(lambda: is_unparked(world))
            written = [entry for entry in world.store.diary if entry.at > began and entry.target.startswith("node ")]
            assert len(written) <= 2 * 11, "a node is parked and let go once a minute, and no more often"

    with caplog.at_level(logging.WARNING, "driver_manager.controller.parkmarks"):
        told(story)
    warnings = [record for record in caplog.records if record.name == "driver_manager.controller.parkmarks"]
    assert 1 <= len(warnings) <= 3, [record.getMessage() for record in warnings]


def test_the_marks_of_an_earlier_leader_go_out_of_date_too() -> None:
    """The dry run is forbidden when a new leader comes: what it finds marked stays for as long as a proof counts, and no longer."""

    async def story() -> None:
        world = FleetWorld(1, nodes=2)
        add_exporter(world, GATE)
        async with led(world):
            await until(lambda: len(marked(world)) == 2)
        world.faults.on("try_pod", Fail(lambda: Forbidden("pods is forbidden")), times=None)
        async with led(world):
            await asyncio.sleep(2 * PROVE_EVERY - LOOK_EVERY)
            assert len(marked(world)) == 2
            await until(lambda: not marked(world), 3 * LOOK_EVERY)

    told(story)


def test_a_node_that_cannot_be_tried_on_does_not_keep_the_others_from_it() -> None:
    """Half of a park is on the node that would be first, with a record that nobody can read: no leader touches it."""

    async def story() -> None:
        world = FleetWorld(1, nodes=3)
        add_exporter(world, GATE)
        first = next(iter(world.store.nodes))
        world.edit_node(first, annotations={names.PARKED: "monitoring/nobody", names.ROLLOUT: "?"})
        async with led(world):
            await until(lambda: len(marked(world)) == 3, 3 * LOOK_EVERY)

    told(story)


def test_no_pod_leaves_a_node_for_a_proof() -> None:
    """A DaemonSet whose template keeps it off parked nodes: its nodes are not tried on, and its pods stay."""

    async def story() -> None:
        world = FleetWorld(1, nodes=3)
        add_exporter(world, GATE, affinity=((EXPRESSION,),))
        async with led(world):
            await asyncio.sleep(60)
            pods = set(world.store.pods)
            await asyncio.sleep(2 * PROVE_EVERY)
            assert set(world.store.pods) == pods
            assert not marked(world)

    told(story)


def test_only_where_somebody_wants_to_be_parked() -> None:
    """Without an opted-in DaemonSet nothing is asked or written for it; when the last one goes the marks go."""

    async def story() -> None:
        world = FleetWorld(1, nodes=3)
        exporter = add_exporter(world, GATE)
        async with led(world):
            await until(lambda: len(marked(world)) == 3)
            world.controllers.daemon_sets.delete(exporter, Cascade.BACKGROUND)
            await until(lambda: not marked(world), 3 * LOOK_EVERY)
            asked: list[str] = []
            for name in ("has_parking_policy", "try_pod"):
                world.faults.on(name, Do(lambda: asked.append("")), times=None)
            await asyncio.sleep(2 * PROVE_EVERY)
            assert not asked

    told(story)


def test_no_more_than_the_api_server_bears() -> None:
    """Decision 44: while so many nodes are parked as may be, no other node is marked; the parked ones go on."""

    async def story() -> None:
        world = FleetWorld(1, nodes=MOST_PARKED_NODES + 2, gpu_pods=0, policy={"autoUpgrade": False})
        add_exporter(world, GATE)
        async with led(world):
            await until(lambda: len(marked(world)) == MOST_PARKED_NODES + 2, 120)
            parked = sorted(world.store.nodes)[:MOST_PARKED_NODES]
            for name in parked:
                at_work(world, name, parked=("monitoring/exporter",))
            await until(lambda: marked(world) == set(parked))
            for name in parked[: MOST_PARKED_NODES // 2 + 1]:
                world.edit_node(name, labels={names.PARKED: None}, annotations={names.PARKED: None, names.RECORD: None})
            await until(lambda: len(marked(world)) == MOST_PARKED_NODES + 2)

    told(story)


def test_agent_and_controller_together() -> None:
    """Decision 19: refused before the controller has proven it; then the agent parks, and neither has to put right what the other did."""

    async def story(stage: Stage) -> None:
        world = stage.world
        assert (await stage.run()).code == 65
        async with wards.led(world):
            async with asyncio.timeout(60.0):
                while names.PARKING not in world.node(NODE).annotations:
                    await asyncio.sleep(0.5)
            stage.before, began = world.surface(NODE), stage.now
            run = await stage.run()
            assert run.code == 0, run.sentence
            await stage.assert_put_back()
            assert [pod.is_ready for pod in world.store.pods_bound_to(NODE) if pod.namespace == "monitoring"] == [True]
        written = [entry for entry in world.store.diary if entry.at > began and entry.target == f"node {NODE}"]
        assert stage.scenario.account.name in {entry.who for entry in written}
        assert wards.CONTROLLER not in {entry.who for entry in written}, written

    scenario = small_world(gpu_pods=1, operands=1)
    add_parkable(scenario, is_marked=False)
    play(story, scenario)


def test_a_leader_that_dies_in_the_proof() -> None:
    """Killed at any boundary, it is followed by one that leaves every node marked and none parked."""
    boundary, died_parked = 0, 0
    while True:
        ended: list[bool] = []

        async def story(boundary: int = boundary, ended: list[bool] = ended) -> None:
            nonlocal died_parked
            world = FleetWorld(1, nodes=2, gpu_pods=0)
            add_exporter(world, GATE)
            task = asyncio.create_task(lead(world, kill_at=boundary))
            await asyncio.wait({task}, timeout=30.0)
            if not task.done():
                ended.append(True)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            died_parked += not is_unparked(world)
            async with led(world):
                await until(lambda: len(marked(world)) == 2 and is_unparked(world), 120)

        told(story)
        if ended:
            break
        boundary += 1
    assert died_parked >= 2
