"""What others do while a run is under way: newcomers, edits of the node, another run, a node that goes."""

import json
from collections.abc import Callable

import pytest

from driver_manager import names
from driver_manager.core.record import decode, encode
from driver_manager.core.snapshot import Taint
from driver_manager.sim.faults import Do, When
from driver_manager.sim.objects import PodSpec
from driver_manager.sim.scenarios import NODE
from tests.agent.stage import Stage, gpu_pod, play, small_world

PAUSED_LABEL = names.DEPLOY_PREFIX + "device-plugin"


def when_evictions_are_over(stage: Stage, what: Callable[[], object]) -> None:
    """Does something at the first look for holders after the pods are gone."""

    def do() -> None:
        what()

    stage.world.faults.on("holders", Do(do), skip=1)


# Newcomers ----------------------------------------------------------------------------------------------------------


def test_n22_r01_somebody_uncordons_and_a_pod_comes() -> None:
    """N22, R1: our cordon is made again once, the newcomer is another round, and no module goes while it lives."""

    async def story(stage: Stage) -> None:
        world = stage.world

        def intrude() -> None:
            world.edit_node(NODE, unschedulable=False, taints=())
            gpu_pod(world, "new-0")

        when_evictions_are_over(stage, intrude)
        run = await stage.run()
        assert run.code == 0
        assert "default/new-0" in stage.evicted
        gone = max(one.at for one in world.store.diary if one.what == "gone" and one.target == "default/new-0")
        assert gone < stage.unloads()[0][0]
        assert sum("cordon" in one.split() for one in stage.node_writes()) == 2
        stage.assert_free()
        await stage.assert_put_back()

    play(story)


def test_n22_r01_a_pod_is_bound_past_the_scheduler() -> None:
    """N22, R1: a pod with `spec.nodeName` needs no scheduler: it is found by the look before the first unload, and evicted."""

    async def story(stage: Stage) -> None:
        when_evictions_are_over(stage, lambda: gpu_pod(stage.world, "sneaky-0"))
        run = await stage.run()
        assert run.code == 0
        assert stage.evicted.count("default/sneaky-0") == 1
        gone = max(one.at for one in stage.world.store.diary if one.what == "gone" and one.target == "default/sneaky-0")
        assert gone < stage.unloads()[0][0]
        await stage.assert_put_back()

    play(story)


def test_n22_newcomers_without_end() -> None:
    """N22, R8: when new users come in every round the run gives up after a bounded number, and nothing was unloaded."""

    async def story(stage: Stage) -> None:
        made: list[int] = []

        def another() -> None:
            made.append(1)
            gpu_pod(stage.world, f"new-{len(made)}", PodSpec(gpus=1, stop_seconds=0.2))

        stage.world.faults.on("node", Do(another), skip=1, times=None)
        run = await stage.run()
        assert run.code == 75
        assert stage.unloads() == []
        assert 3 <= len(made) <= 5
        stage.assert_evicted_once()

    play(story)


def test_a_newcomer_that_may_not_be_moved() -> None:
    """R1: a new user that no rule lets go ends the run by name, with the node put back and nothing unloaded."""

    async def story(stage: Stage) -> None:
        when_evictions_are_over(stage, lambda: stage.world.add_pod("bare", PodSpec(gpus=1), node=NODE))
        run = await stage.run()
        assert run.code == 65
        assert "default/bare" in run.sentence
        assert stage.unloads() == []
        await stage.assert_put_back()

    play(story)


def test_a_pod_that_leaves_during_the_look_is_no_ghost() -> None:
    """A list that is older than what the watch told since does not bring a pod back that nobody would see leaving again."""

    async def story(stage: Stage) -> None:
        world = stage.world
        ghost: list[float] = []

        def leave() -> None:
            gpu_pod(world, "brief-0", PodSpec(gpus=1, stop_seconds=0.05, lag_seconds=0.0))
            stage.later(0.01, lambda: world.delete_pod(world.pod("default", "brief-0")))
            ghost.append(stage.now)

        when_evictions_are_over(stage, leave)
        world.faults.on("holders", Do(lambda: None), skip=2)
        run = await stage.run(operand_timeout=60.0)
        assert run.code == 0
        assert ghost
        assert stage.now < 20
        await stage.assert_put_back()

    play(story)


# Edits of the node --------------------------------------------------------------------------------------------------


def test_r03_what_others_change_is_theirs() -> None:
    """R3: labels, taints and annotations that others write meanwhile stay as they are after the run."""

    async def story(stage: Stage) -> None:
        def edit() -> None:
            node = stage.world.node(NODE)
            others = (*node.taints, Taint("example.com/repair", "yes", "NoExecute"))
            stage.world.edit_node(NODE, labels={"team": "ml"}, annotations={"note": "x"}, taints=others)

        stage.later(1.0, edit)
        assert (await stage.run()).code == 0
        node = stage.world.surface(NODE)
        assert node.labels == {**stage.before.labels, "team": "ml"}
        assert node.annotations == {**stage.before.annotations, "note": "x"}
        assert node.taints == (Taint("example.com/repair", "yes", "NoExecute"),)
        assert not node.unschedulable

    play(story)


def test_a_label_that_somebody_switched_off_stays_off() -> None:
    """Decision 10: an operand that a person switches off while the node is put back is not switched on again."""

    async def story(stage: Stage) -> None:
        off = {PAUSED_LABEL: "false"}
        stage.world.faults.on("remove_pid_file", Do(lambda: stage.world.edit_node(NODE, labels=off)))
        assert (await stage.run()).code == 0
        assert stage.world.node(NODE).labels == {**stage.before.labels, **off}

    play(story)


def test_taken_off_twice() -> None:
    """Decision 10: what somebody takes off is put on again once; the second time the run ends, without any unload."""

    async def story(stage: Stage) -> None:
        stage.world.faults.on("node", Do(lambda: stage.world.edit_node(NODE, unschedulable=False)), skip=1, times=2)
        run = await stage.run()
        assert run.code == 75
        assert "cordon" in run.sentence
        assert stage.unloads() == []
        await stage.assert_put_back()

    play(story)


@pytest.mark.parametrize("keeps", [True, False])
def test_a_person_may_keep_the_cordon(keeps: bool) -> None:
    """Decision 10: with the annotation `keep-cordon` our cordon stays when the run ends; everything else is put back."""

    async def story(stage: Stage) -> None:
        wish = {names.KEEP_CORDON: "true" if keeps else "false"}
        stage.later(1.0, lambda: stage.world.edit_node(NODE, annotations=wish))
        assert (await stage.run()).code == 0
        node = stage.world.node(NODE)
        assert node.unschedulable == keeps
        assert names.RECORD not in node.annotations
        assert node.labels == stage.before.labels

    play(story)


def test_an_admins_cordon_stays() -> None:
    """R3: a node that was cordoned before is cordoned after, on success, on failure and on the quiet ways."""

    async def story(stage: Stage) -> None:
        stage.world.edit_node(NODE, unschedulable=True)
        assert (await stage.run(driver_config_digest="digest-1")).code == 0
        assert (await stage.run()).code == 0
        assert (await stage.run()).code == 0
        assert stage.world.node(NODE).unschedulable

    play(story)


@pytest.mark.parametrize("tolerates_us", [True, False])
def test_n23_an_admins_taint_is_never_replaced(tolerates_us: bool) -> None:
    """N23: a taint of somebody else under a key that we could use stays as it is at every moment."""

    async def story(stage: Stage) -> None:
        theirs = tuple(Taint(key, "present", "NoSchedule") for key in (names.GPU_TAINT, names.KEEP_OFF_TAINT))
        stage.world.edit_node(NODE, taints=theirs)
        seen: list[bool] = []
        stage.world.faults.on(
            "patch_node", Do(lambda: seen.append(set(theirs) <= set(stage.world.node(NODE).taints))), when=When.AFTER, times=None
        )
        assert (await stage.run()).code == 0
        assert len(seen) >= 3
        assert all(seen)
        assert stage.world.surface(NODE).taints == theirs

    play(story, small_world(tolerates_us=tolerates_us))


@pytest.mark.parametrize("tolerates_us", [True, False])
def test_n23_the_driver_tolerates_our_taint(tolerates_us: bool) -> None:
    """N23: the key is one that the driver's own DaemonSet tolerates, so that its pod could come again under the taint."""

    async def story(stage: Stage) -> None:
        taints: list[tuple[Taint, ...]] = []
        stage.later(1.0, lambda: taints.append(stage.world.surface(NODE).taints))
        assert (await stage.run()).code == 0
        key = names.KEEP_OFF_TAINT if tolerates_us else names.GPU_TAINT
        assert [(one.key, one.effect) for one in taints[0]] == [(key, "NoSchedule")]
        assert taints[0][0].value.startswith(names.TAINT_VALUE_PREFIX)
        await stage.assert_put_back()

    play(story, small_world(tolerates_us=tolerates_us))


# The node goes, another run comes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_made_anew", [True, False])
@pytest.mark.parametrize("at", ["evict", "holders"])
def test_a_node_that_goes(is_made_anew: bool, at: str) -> None:
    """Decision 6: the node is gone, or another one has its name: exit 75 before the next step on the host, and nothing is undone."""

    async def story(stage: Stage) -> None:
        world = stage.world

        def go() -> None:
            machine = world.machine(NODE)
            world.remove_node(NODE)
            if is_made_anew:
                world.add_node(NODE, labels={PAUSED_LABEL: "mine"})
            world.kubelets.machines[NODE] = machine

        world.faults.on(at, Do(go), skip=1, where=lambda call: call.args.get("dry_run") is not True)
        run = await stage.run()
        assert run.code == 75
        assert ("anew" if is_made_anew else "gone") in run.sentence
        assert stage.unloads() == []
        assert [call for call in world.machine(NODE).calls if call.call == "unlink"] == []
        if is_made_anew:
            assert world.node(NODE).labels[PAUSED_LABEL] == "mine"
            assert not world.node(NODE).unschedulable

    play(story)


@pytest.mark.parametrize("at", ["holders", "remove_pid_file"])
def test_another_run_takes_over(at: str) -> None:
    """Decision 36: another run's id in the record ends this one with 75 before its next write, and it undoes nothing."""

    async def story(stage: Stage) -> None:
        taken: list[object] = []

        def take() -> None:
            record = decode(stage.world.node(NODE).annotations[names.RECORD])
            body = json.loads(encode(record)) | {"run": "healer0001"}
            stage.world.edit_node(NODE, annotations={names.RECORD: json.dumps(body)})
            taken.append(stage.world.surface(NODE))

        stage.world.faults.on(at, Do(take), skip=1 if at == "holders" else 0)
        run = await stage.run()
        assert run.code == 75
        assert "healer0001" in run.sentence
        assert stage.world.surface(NODE) == taken[0]
        if at == "holders":
            assert stage.unloads() == []

    play(story)


def test_a_record_of_another_node_is_ignored() -> None:
    """Decision 6: a record that was copied from another node pauses and undoes nothing here, and is reported."""

    async def story(stage: Stage) -> None:
        record = {"version": 1, "run": "other00001", "nodeUID": "uid-of-another", "bootID": "x", "started": "", "phase": "paused",
                  "labels": {"team": "false"}, "cordoned": True}  # fmt: skip
        stage.world.edit_node(NODE, unschedulable=True, annotations={names.RECORD: json.dumps(record)}, labels={"team": names.PAUSED})
        restored = await stage.restore()
        assert restored.code == 0
        assert stage.world.node(NODE).unschedulable
        assert stage.world.node(NODE).labels["team"] == names.PAUSED
        assert (await stage.run()).code == 0
        assert stage.world.node(NODE).unschedulable
        assert stage.world.node(NODE).labels["team"] == names.PAUSED

    play(story)


@pytest.mark.parametrize("command", ["uninstall", "restore"])
def test_a_record_that_cannot_be_read_is_a_refusal(command: str) -> None:
    """R5: nobody guesses what an unreadable record meant: exit 65, nothing is changed."""

    async def story(stage: Stage) -> None:
        stage.world.edit_node(NODE, annotations={names.RECORD: '{"version":99}'})
        surface = stage.world.surface(NODE)
        run = await (stage.run() if command == "uninstall" else stage.restore())
        assert run.code == 65
        assert names.RECORD in run.sentence
        assert stage.world.surface(NODE) == surface
        stage.assert_host_untouched()

    play(story)


def test_restore_without_a_record() -> None:
    """`restore` on a node that nobody paused says so and changes nothing."""

    async def story(stage: Stage) -> None:
        run = await stage.restore()
        assert run.code == 0
        assert "nothing to put back" in run.sentence
        assert [call.name for call in stage.world.faults.calls if call.is_write] == []
        await stage.assert_put_back()

    play(story)


def test_restore_after_a_run_that_put_all_back() -> None:
    """Decision 11: what a failed run said on the node stays when `restore` follows it by itself, and goes when a person calls it."""

    async def story(stage: Stage) -> None:
        said = '{"phase":"failed","reason":"held-by-process"}'
        stage.world.edit_node(NODE, annotations={names.STATUS: said})
        kept = await stage.restore(keep_status=True)
        assert (kept.code, stage.world.node(NODE).annotations.get(names.STATUS)) == (0, said)
        assert (await stage.restore()).code == 0
        assert names.STATUS not in stage.world.node(NODE).annotations

    play(story)


def test_the_lock_is_held() -> None:
    """Decision 4: while another run holds the node's lock this one waits its limit, then ends with 75 naming the holder."""

    async def story(stage: Stage) -> None:
        other = stage.scenario.life()
        async with other.host.lock(1.0):
            run = await stage.run()
            assert run.code == 75
            assert "process 1" in run.sentence
            assert 59 <= stage.now <= 61
            assert stage.node_writes() == []
            stage.assert_host_untouched()
        assert (await stage.run()).code == 0

    play(story)


@pytest.mark.parametrize("is_made_anew", [True, False])
def test_a_node_that_goes_in_the_middle_of_the_unload(is_made_anew: bool) -> None:
    """Decision 6: while a busy module is tried again the node goes: no further change of the host is made."""

    async def story(stage: Stage) -> None:
        world = stage.world
        machine = world.machine(NODE)

        def go() -> None:
            world.remove_node(NODE)
            if is_made_anew:
                world.add_node(NODE, labels={PAUSED_LABEL: "mine"})
            world.kubelets.machines[NODE] = machine
            machine.modules["nvidia_uvm"].users = 0

        def busy() -> None:
            machine.modules["nvidia_uvm"].users = 1

        world.faults.on("unload_module", Do(busy), where=lambda call: call.args.get("name") == "nvidia_uvm")
        world.faults.on("unload_module", Do(lambda: stage.later(5.0, go)), where=lambda call: call.args.get("name") == "nvidia_uvm", skip=1)
        run = await stage.run()
        assert run.code == 75
        assert ("anew" if is_made_anew else "gone") in run.sentence
        assert "nvidia" not in [name for _, name in stage.unloads()]
        assert [call for call in machine.calls if call.call == "umount2"] == []
        if is_made_anew:
            assert world.node(NODE).labels[PAUSED_LABEL] == "mine"

    play(story)
