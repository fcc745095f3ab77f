"""Agents that die for good, at every boundary, and the controller that heals what they left; and live ones, which it lets live."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from driver_manager import names
from driver_manager.core.healing import Why
from driver_manager.core.record import decode, encode
from driver_manager.core.snapshot import Taint
from driver_manager.sim.objects import PodSpec
from driver_manager.sim.scenarios import NAMESPACE, NODE, Scenario
from tests.agent.stage import Run, Stage, at_boundary, play, small_world
from tests.agent.test_killed import at_every_boundary
from tests.agent.worlds import cordoned, dra, exporters, guarded, parked
from tests.controller.wards import LEASE, PAUSE, SETTLE, healed, lead, led, no_driver_any_more, told

pytestmark = pytest.mark.slow

SOON = SETTLE + PAUSE + 2 * LEASE
OFTEN_ENOUGH = pytest.param(dra, marks=pytest.mark.deep)
WORLDS = pytest.mark.parametrize("make", [OFTEN_ENOUGH, cordoned, exporters, parked], ids=lambda each: each.__name__)


@WORLDS
def test_the_agent_and_its_pod_are_gone_for_good(make: Callable[[], Scenario]) -> None:
    """Decision 36: killed anywhere, pod gone and none due: the node comes back exactly, not before the settle time, in two writes."""

    async def then(stage: Stage, _: Run) -> None:
        had_record = names.RECORD in stage.world.node(NODE).annotations
        no_driver_any_more(stage.world)
        gone_at, calls = stage.now, len(stage.world.machine(NODE).calls)
        async with led(stage.world):
            await healed(stage, SOON)
            await asyncio.sleep(SETTLE + PAUSE)
        await stage.assert_put_back()
        assert names.STATUS not in stage.world.node(NODE).annotations
        assert len(stage.world.machine(NODE).calls) == calls
        claims, undone = told(stage.world, Why.CLAIMED), told(stage.world, Why.HEALED)
        assert (len(claims), len(undone)) == ((1, 1) if had_record else (0, 0))
        assert not claims or (claims[0] >= gone_at + SETTLE and undone[0] >= claims[0] + PAUSE)

    assert at_every_boundary(make, then) > 20


@WORLDS
def test_then_the_node_is_rebooted(make: Callable[[], Scenario]) -> None:
    """The same with a reboot before or after the pod is gone, or in the middle of the healing."""

    async def then(stage: Stage, first: Run) -> None:
        machine = stage.world.machine(NODE)
        delay = (0.0, SETTLE / 2, SETTLE + PAUSE / 2)[first.life.boundaries % 3]
        stage.later(delay, machine.reboot)
        no_driver_any_more(stage.world)
        async with led(stage.world):
            await asyncio.sleep(SOON)
            await healed(stage, SOON)
        await stage.assert_put_back()

    assert at_every_boundary(make, then) > 20


@pytest.mark.parametrize("is_rebooted", [False, True], ids=["same-boot", "rebooted"])
def test_then_the_node_object_is_made_anew_as_it_was(is_rebooted: bool) -> None:
    """N49: the Node deleted and put back from a copy, another uid: as before; only after a reboot its cordon is left, and named."""

    async def then(stage: Stage, _: Run) -> None:
        world = stage.world
        node = world.store.nodes[NODE]
        no_driver_any_more(world)
        was_cordoned_by_us = node.unschedulable and not stage.before.unschedulable
        world.store.node_removed(node)
        anew = replace(node, uid=world.store.uid())
        world.store.nodes[NODE] = anew
        world.store.node_written(anew)
        if is_rebooted:
            world.machine(NODE).reboot()
        async with led(world):
            await asyncio.sleep(2 * SETTLE + PAUSE)
        await asyncio.sleep(2.0)
        expected = replace(stage.before, unschedulable=stage.before.unschedulable or (is_rebooted and was_cordoned_by_us))
        assert world.surface(NODE) == expected
        left = [note.sentence for _, _, note in world.store.notes if note.reason == Why.SWEPT]
        assert any("the cordon stays" in each for each in left) == (is_rebooted and was_cordoned_by_us)

    assert at_every_boundary(dra, then) > 20


def test_the_healer_dies_too() -> None:
    """Killed at every boundary of its own, the controller is followed by another, which counts anew and ends the same."""
    boundary = 0
    while True:
        done: list[bool] = []

        async def story(stage: Stage, boundary: int = boundary, done: list[bool] = done) -> None:
            await stage.run(kill_at=30)
            assert names.RECORD in stage.world.node(NODE).annotations
            no_driver_any_more(stage.world)
            try:
                async with asyncio.timeout(SOON + SETTLE):
                    await lead(stage.world, kill_at=boundary)
            except TimeoutError:
                done.append(True)
            async with led(stage.world):
                await healed(stage, SOON)
                await asyncio.sleep(1.0)
            await stage.assert_put_back()

        play(story, small_world())
        if done:
            break
        boundary += 1
    assert boundary > 20


# Live agents --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [dra, guarded, exporters, parked], ids=lambda each: each.__name__)
def test_a_live_agent_without_a_pod_is_stopped_and_not_healed_over(make: Callable[[], Scenario]) -> None:
    """R1, R3: its pod vanishes from the API at any boundary and it lives on: no host is touched and nobody evicted after the undo."""
    boundary, claimed = 0, 0
    while True:
        ended: list[bool] = []

        async def story(stage: Stage, boundary: int = boundary, ended: list[bool] = ended) -> None:
            nonlocal claimed
            world = stage.world
            run = stage.start()
            orders: list[float] = []

            def vanish() -> None:
                orders.append(stage.now)
                no_driver_any_more(world)

            came = at_boundary(stage, boundary, vanish)
            async with led(world, settle_time=0.2):
                await asyncio.sleep(1.0)  # it leads before the agent begins
                life = asyncio.create_task(run.life.run(run.agent.uninstall(asyncio.Event())))
                run.outcome = await life
                if not orders:
                    no_driver_any_more(world)
                    ended.append(not came())
                await healed(stage, SOON)
                await asyncio.sleep(2 * PAUSE)
            undone, claims = told(world, Why.HEALED), told(world, Why.CLAIMED)
            claimed += len(claims)
            late = [call for call in world.machine(NODE).calls if undone and call.at > undone[0]]
            assert late == []
            assert [one for one in world.evictions if undone and one[0] > undone[0] and one[2] not in world.server.let_in] == []
            if claims:
                assert run.code == 75, run.sentence
            await stage.assert_put_back()

        play(story, make())
        if ended and ended[0]:
            break
        boundary += 1
    assert boundary > 20
    assert claimed > 5, "it has come to that"


@WORLDS
def test_a_node_with_a_driver_pod_is_left_alone(make: Callable[[], Scenario]) -> None:
    """Killed anywhere while its pod is there: for however long nothing is healed; the next start goes on with the record."""

    async def then(stage: Stage, _: Run) -> None:
        before = stage.world.node(NODE)
        async with led(stage.world, settle_time=0.1, heal_pause=0.1):
            await asyncio.sleep(60.0)
            assert stage.world.node(NODE).annotations == before.annotations
            second = await stage.run()
            assert second.code == 0, second.sentence
        assert told(stage.world, Why.CLAIMED, Why.HEALED) == []
        stage.assert_free()
        await stage.assert_put_back()

    assert at_every_boundary(make, then) > 20


def test_the_pod_comes_back_in_the_pause() -> None:
    """A driver pod that comes between the two writes: its agent takes the record over, whoever's run id it has, and nothing is healed."""

    async def story(stage: Stage) -> None:
        world = stage.world
        await stage.run(kill_at=30)
        driver = next(one for one in world.store.daemon_sets.values() if one.spec.labels.get(names.COMPONENT_LABEL))
        no_driver_any_more(world)
        async with led(world):
            while not told(world, Why.CLAIMED):
                await asyncio.sleep(0.5)
            world.settle(replace(driver, uid=world.store.uid(), is_deleting=False))
            pod = world.pod(NAMESPACE, "nvidia-driver-daemonset")
            world.hold_in_init(pod)
            stage.scenario = replace(stage.scenario, account=world.add_account("driver", identity=world.identity_of(pod)))
            await asyncio.sleep(3 * PAUSE)
            assert names.RECORD in world.node(NODE).annotations
            second = await stage.run()
            assert second.code == 0, second.sentence
        assert told(world, Why.HEALED) == []
        stage.assert_free()
        await stage.assert_put_back()

    play(story, small_world())


# Who wrote it -------------------------------------------------------------------------------------------------------


def left_by_hand(stage: Stage) -> None:
    """The record on the node is of a command that a person ran, or of the systemd unit: no pod's."""
    node = stage.world.node(NODE)
    record = decode(node.annotations[names.RECORD])
    stage.world.edit_node(NODE, annotations={names.RECORD: encode(replace(record, pod=type(record.pod)()))})


def test_a_run_by_hand_is_reported_and_healed_after_a_reboot() -> None:
    """Decision 36: whether it lives cannot be seen from afar as long as the boot lasts."""

    async def story(stage: Stage) -> None:
        await stage.run(kill_at=30)
        left_by_hand(stage)
        no_driver_any_more(stage.world)
        async with led(stage.world):
            await asyncio.sleep(10 * SETTLE)
            assert names.RECORD in stage.world.node(NODE).annotations
            assert len(told(stage.world, Why.RUN_BY_HAND)) == 1, "said once"
            stage.world.machine(NODE).reboot()
            await healed(stage, SOON)
        await stage.assert_put_back()

    play(story, small_world())


def test_a_job_that_lives_is_waited_for() -> None:
    """The author may be a pod that no watch tells of (docs/on-node.yaml): it is looked for, and its end counts."""

    async def story(stage: Stage) -> None:
        world = stage.world
        await stage.run(kill_at=30)
        pod = world.add_pod("driver-manager-x7", PodSpec(labels={"app": "driver-manager-on-node"}), node=NODE, namespace="ops")
        record = decode(world.node(NODE).annotations[names.RECORD])
        text = encode(replace(record, pod=replace(record.pod, namespace="ops", pod_name=pod.name, pod_uid=pod.uid)))
        world.edit_node(NODE, annotations={names.RECORD: text})
        no_driver_any_more(world)
        async with led(world):
            await asyncio.sleep(10 * SETTLE)
            assert told(world, Why.CLAIMED) == []
            world.store.pod_removed(pod)
            gone = stage.now
            await healed(stage, SOON + SETTLE)
            assert told(world, Why.CLAIMED)[0] >= gone + SETTLE
        await stage.assert_put_back()

    play(story, small_world())


def test_what_somebody_changed_meanwhile_is_left_and_named() -> None:
    """R3: a label that was changed and a cordon that is to stay are left as they are, and an Event names them."""

    async def story(stage: Stage) -> None:
        world = stage.world
        await stage.run(kill_at=30)
        record = decode(world.node(NODE).annotations[names.RECORD])
        label = sorted(record.labels)[0]
        world.edit_node(NODE, labels={label: "false"}, annotations={names.KEEP_CORDON: "true"})
        no_driver_any_more(world)
        async with led(world):
            await healed(stage, SOON)
            await asyncio.sleep(1.0)
        node = world.node(NODE)
        assert node.labels[label] == "false"
        assert node.unschedulable
        (note,) = [note for _, _, note in world.store.notes if note.reason == Why.HEALED]
        assert label in note.sentence
        assert names.KEEP_CORDON in note.sentence
        assert note.is_warning

    play(story, small_world())


def test_a_taint_of_ours_must_not_keep_the_driver_off_for_ever() -> None:
    """A driver DaemonSet that matches but does not tolerate our taint makes no pod: it is healed, and the driver comes."""

    async def story(stage: Stage) -> None:
        world = stage.world
        await stage.run(kill_at=30)
        record = decode(world.node(NODE).annotations[names.RECORD])
        taint = Taint("example.com/keep-off", f"dm-{record.run}")
        world.edit_node(NODE, taints=(taint,), annotations={names.RECORD: encode(replace(record, taint=taint))})
        pod = world.pod(NAMESPACE, "nvidia-driver-daemonset")
        world.delete_pod(pod, 0)
        async with led(world):
            await asyncio.sleep(5.0)
            assert not [one for one in world.pods(NODE) if one.name.startswith("nvidia-driver-daemonset")]
            await healed(stage, SOON)
            await asyncio.sleep(5.0)
            assert [one for one in world.pods(NODE) if one.name.startswith("nvidia-driver-daemonset")]
        await stage.assert_put_back()

    play(story, small_world())


def test_a_record_that_cannot_be_read_is_reported() -> None:
    """It is never acted on, and said once."""

    async def story(stage: Stage) -> None:
        await stage.run(kill_at=30)
        stage.world.edit_node(NODE, annotations={names.RECORD: json.dumps({"version": 99})})
        no_driver_any_more(stage.world)
        before = stage.world.node(NODE).annotations
        async with led(stage.world):
            await asyncio.sleep(10 * SETTLE)
        assert stage.world.node(NODE).annotations == before
        assert len(told(stage.world, Why.BAD_RECORD)) == 1

    play(story, small_world())
