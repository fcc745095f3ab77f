"""An API server that is away, slow, or loses answers."""

import asyncio
import random
from itertools import pairwise

import pytest

from driver_manager import names
from driver_manager.agent.node import NodeWriter
from driver_manager.core.record import NodeChange
from driver_manager.core.snapshot import NodeView
from driver_manager.errors import Conflict, Unreachable
from driver_manager.evictions import PodTracker
from driver_manager.sim.faults import Call, Delay, Do, Fail, Hang, When
from driver_manager.sim.objects import PodSpec
from driver_manager.sim.scenarios import NODE
from tests.agent.stage import Stage, gpu_pod, play, small_world, with_dra


def is_restore(call: Call) -> bool:
    """Whether a call is the patch that puts the node back."""
    patch = call.args.get("patch")
    return patch is not None and getattr(patch, "annotations", {}).get(names.RECORD, "") is None


def test_n15_an_outage_at_the_restore() -> None:
    """N15: refused for 60 s, then 409, then 503, exactly at the restore patch: tried with growing pauses until every value is back."""

    async def story(stage: Stage) -> None:
        faults, began = stage.world.faults, [0.0]

        def down() -> None:
            began[0] = stage.now
            stage.world.server.outage(60.0)

        faults.on("patch_node", Do(down), where=is_restore)

        def is_after(call: Call) -> bool:
            return is_restore(call) and began[0] + 60 < call.at

        faults.on("patch_node", Fail(lambda: Conflict("modified")), where=is_after)
        faults.on("patch_node", Fail(lambda: Unreachable("503", retry_after=3.0)), where=is_after)
        run = await stage.run()
        assert run.code == 0
        assert 60 <= stage.now - began[0] <= 90
        made = [call for call in faults.calls if call.name in ("node", "patch_node") and call.when is When.BEFORE]
        tries = [call.at for call in made if call.at > began[0]]
        pauses = [later - earlier for earlier, later in pairwise(tries)]
        assert len(tries) < 25
        assert max(pauses) > 5 * min(pauses[:4])
        stage.assert_free()
        await stage.assert_put_back()
        assert names.STATUS not in stage.world.node(NODE).annotations

    play(story)


def test_n15_an_outage_that_is_longer_than_the_limit() -> None:
    """N15, R4: the end is not 0, the record stays, and the next run finishes the undo without evicting or unloading anybody again."""

    async def story(stage: Stage) -> None:
        stage.world.faults.on("patch_node", Do(lambda: stage.world.server.outage(500.0)), where=is_restore)
        run = await stage.run(restore_timeout=120.0)
        assert run.code != 0
        assert run.outcome is not None
        assert not run.outcome.is_put_back
        assert 115 <= stage.now <= 140, "the limit counts once"
        assert names.RECORD in stage.world.node(NODE).annotations
        stage.assert_free()
        evicted, unloads = stage.evicted, stage.unloads()
        stage.later(500.0, lambda: None)
        await run.agent.clock.sleep(500.0)
        second = await stage.run()
        assert second.code == 0
        assert (stage.evicted, stage.unloads()) == (evicted, unloads)
        await stage.assert_put_back()

    play(story)


def test_n15_a_conflict_touches_only_what_is_ours() -> None:
    """N15: after a 409 the node is read again and only our own keys are written."""

    async def story(stage: Stage) -> None:
        stage.world.faults.on("patch_node", Do(lambda: stage.world.edit_node(NODE, labels={"team": "ml"})), where=is_restore)
        assert (await stage.run()).code == 0
        assert stage.world.node(NODE).labels == {**stage.before.labels, "team": "ml"}
        last = stage.node_writes()[-1]
        assert "team" not in last

    play(story)


@pytest.mark.parametrize("action", [Fail(lambda: Unreachable("connection reset")), Hang(), Delay(8.0)], ids=["reset", "hang", "slow"])
@pytest.mark.parametrize("when", list(When))
@pytest.mark.parametrize("which", range(3))
def test_a_lost_write_of_the_node(action: Fail | Hang | Delay, when: When, which: int) -> None:
    """A patch whose request or answer is lost, whichever of the three it is, is made good, and the run succeeds without evicting twice."""

    async def story(stage: Stage) -> None:
        rule = stage.world.faults.on("patch_node", action, when=when, skip=which)
        run = await stage.run()
        assert rule.acted == 1
        assert run.code == 0, run.sentence
        stage.assert_free()
        await stage.assert_put_back()

    play(story)


@pytest.mark.parametrize("seconds", [2.0, 20.0, 45.0])
@pytest.mark.parametrize("at", ["evict", "pods_on", "node", "holders"])
def test_a_short_outage_in_the_middle(seconds: float, at: str) -> None:
    """An outage of less than a minute after the node was paused does not waste the evictions: the run goes on when it is over."""

    async def story(stage: Stage) -> None:
        skip = 2 if at == "evict" else 1
        stage.world.faults.on(at, Do(lambda: stage.world.server.outage(seconds)), skip=skip)
        run = await stage.run()
        assert run.code == 0, run.sentence
        stage.assert_free()
        await stage.assert_put_back()

    play(story)


def test_unreachable_from_the_start() -> None:
    """Nothing is changed where the API server cannot be reached: exit 69."""

    async def story(stage: Stage) -> None:
        stage.world.server.outage(1000.0)
        run = await stage.run()
        assert run.code == 69
        stage.assert_host_untouched()
        assert stage.node_writes() == []

    play(story)


def test_a_lost_answer_of_an_eviction() -> None:
    """An eviction whose answer is lost while the watch is away too is looked up before it is asked again: never twice."""

    async def story(stage: Stage) -> None:
        gpu_pod(stage.world, "db-0", PodSpec(gpus=1, stop_seconds=20.0))
        for name in ("default/db-0", "default/training"):
            stage.world.faults.on(
                "evict",
                Fail(lambda: Unreachable("reset")),
                when=When.AFTER,
                where=lambda call, name=name: str(call.args["pod"]).startswith(name),  # type: ignore[misc]
            )
        stage.world.faults.on("evict", Do(lambda: stage.world.server.break_watches(15.0)), where=lambda call: not call.args["dry_run"])
        run = await stage.run()
        assert run.code == 0
        await stage.assert_put_back()

    play(story)


def test_a_gap_in_the_watch() -> None:
    """Pods that leave while no watch is open are seen to be gone when there is one again."""

    async def story(stage: Stage) -> None:
        stage.later(1.0, lambda: stage.world.server.break_watches(30.0))
        run = await stage.run()
        assert run.code == 0
        assert stage.now < 40
        await stage.assert_put_back()

    play(story)


def test_a_failed_pause_of_labels_that_were_paused_already() -> None:
    """Decision 9: labels that upstream left paused are not taken for ours when the pause patch never came through."""

    async def story(stage: Stage) -> None:
        left = {names.DEPLOY_PREFIX + "device-plugin": names.PAUSED}
        stage.world.edit_node(NODE, labels=left)
        surface = stage.world.surface(NODE)
        stage.world.faults.on("patch_node", Fail(lambda: Unreachable("connection refused")), times=8, where=lambda call: call.at < 200)
        run = await stage.run()
        assert run.code in (0, 75), run.sentence
        if run.code == 75:
            assert run.outcome is not None
            assert run.outcome.is_put_back
            assert stage.world.surface(NODE) == surface

    play(story)


def chaotic(stage: Stage, seed: int) -> None:
    """Trouble of every kind, by chance."""
    world, rng = stage.world, random.Random(seed)
    world.store.latencies.jitter = 0.5
    world.faults.randomly(rng, rng.choice([0.05, 0.15, 0.3]))
    for _ in range(rng.randrange(3)):
        stage.later(rng.random() * 6, lambda: world.server.break_watches(rng.random() * 10))
    if rng.random() < 0.5:
        stage.later(rng.random() * 4, lambda: world.server.outage(rng.random() * 30))
    if rng.random() < 0.3:
        stage.later(rng.random() * 4, lambda: world.edit_node(NODE, annotations={"note": None}))


def test_trouble_by_chance(seed: int) -> None:
    """Whatever goes wrong on the way, a run ends with success or a clean undo; the run after the trouble succeeds."""

    async def story(stage: Stage) -> None:
        gpu_pod(stage.world, "db-0", PodSpec(gpus=1, stop_seconds=3.0, lag_seconds=1.0))
        chaotic(stage, seed)
        first = await stage.run(drain_timeout=120.0)
        assert first.outcome is not None
        assert first.outcome.is_put_back, first.sentence
        assert first.code in (0, 69, 75), first.sentence
        if first.code == 0:
            stage.assert_free()
        await stage.assert_put_back()
        stage.world.faults.stop()
        await first.agent.clock.sleep(40.0)
        assert (await stage.run()).code == 0
        stage.assert_free()
        await stage.assert_put_back()

    play(story, with_dra(small_world(seed)) if seed % 2 else small_world(seed))


def test_trouble_and_death_by_chance(seed: int) -> None:
    """The same with the program killed somewhere: the next life succeeds or undoes, the one after the trouble succeeds."""

    async def story(stage: Stage) -> None:
        chaotic(stage, seed)
        rng = random.Random(~seed)
        for _ in range(3):
            await stage.run(kill_at=rng.randrange(90), drain_timeout=120.0)
        stage.world.faults.stop()
        await stage.start().agent.clock.sleep(60.0)
        last = await stage.run()
        assert last.code == 0, last.sentence
        stage.assert_free()
        await stage.assert_put_back()

    play(story, with_dra(small_world(seed)) if seed % 2 else small_world(seed))


# The status never outlives its reason -------------------------------------------------------------------------------


def test_a_late_status_does_not_survive_the_end() -> None:
    """R4: a status that is on its way when the node is put back comes before, or not at all."""

    async def story(stage: Stage) -> None:
        def is_status(call: Call) -> bool:
            return set(getattr(call.args.get("patch"), "annotations", {})) == {names.STATUS}

        process = stage.world.machine(NODE).add_process("train", ("/dev/nvidia0",))
        machine = stage.world.machine(NODE)
        stage.world.faults.on("patch_node", Do(lambda: stage.later(0.01, lambda: machine.end_process(process.pid))), where=is_status)
        stage.world.faults.on("patch_node", Delay(6.0), where=is_status)
        assert (await stage.run()).code == 0
        await stage.assert_put_back()
        assert names.STATUS not in stage.world.node(NODE).annotations

    play(story)


def test_a_status_write_vouches_for_nothing() -> None:
    """The status is written without a guard, so its answer does not make an unseen change of the node look seen."""

    async def story(stage: Stage) -> None:
        life = stage.scenario.life()
        node = await life.cluster.node(NODE)
        writer = NodeWriter(life.cluster, life.clock, node, "run")
        await writer.write_status("one")
        await writer.write_once(NodeChange(annotations={"ours": "1"}))
        stage.world.edit_node(NODE, unschedulable=True)
        await writer.write_status("two")
        with pytest.raises(Conflict):
            await writer.write_once(NodeChange(annotations={"ours": "2"}))

        def build(fresh: NodeView) -> NodeChange:
            assert fresh.unschedulable or fresh is writer.node
            return NodeChange(annotations={"ours": "3"})

        await writer.write(build, "test", 10.0)
        assert stage.world.node(NODE).annotations["ours"] == "3"

    play(story)


def test_a_status_that_waits_its_turn_comes_too_late() -> None:
    """R4: a status that waited for another write of the node is dropped when the node is being put back by then."""

    async def story(stage: Stage) -> None:
        life = stage.scenario.life()
        writer = NodeWriter(life.cluster, life.clock, await life.cluster.node(NODE), "run")
        stage.world.faults.on("patch_node", Delay(3.0))
        async with asyncio.TaskGroup() as group:
            group.create_task(writer.write_once(NodeChange(annotations={"ours": "1"})))
            await life.clock.sleep(1.0)
            group.create_task(writer.write_status("late"))
            await life.clock.sleep(1.0)
            writer.may_tell = False
        assert stage.world.node(NODE).annotations == {"ours": "1"}

    play(story)


def test_an_old_list_brings_nobody_back() -> None:
    """A list that was made before the watch told of a pod's end does not make the pod present again."""

    async def story(stage: Stage) -> None:
        life = stage.scenario.life()
        pod = gpu_pod(stage.world, "brief-0")
        old = await life.cluster.pods_on(NODE)
        async with PodTracker(life.cluster, NODE, old) as tracker:
            assert pod.uid in tracker.present
            stage.world.delete_pod(pod, 0)
            await tracker.next_change(life.clock, 5.0)
            assert pod.uid not in tracker.present
            tracker.update(old)
            assert pod.uid not in tracker.present
            assert tracker.present

    play(story)
