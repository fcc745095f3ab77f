"""The agent parks by itself a DaemonSet that nothing else keeps off its node, and lets it in again (decisions 19, 32, 44, 45, 46)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from driver_manager import names
from driver_manager.core.hold import parked_on
from driver_manager.core.record import find_record
from driver_manager.core.rollout_record import Progress, encode
from driver_manager.errors import Forbidden
from driver_manager.sim.access import STOCK_ROLE
from driver_manager.sim.faults import Call, Do, Fail, Kill, When
from driver_manager.sim.objects import Pod
from driver_manager.sim.parking import DENY, GATE
from driver_manager.sim.scenarios import NODE, SPARE_NODE, Scenario
from tests.agent.stage import Stage, play, small_world
from tests.agent.worlds import add_parkable, parked

OWNER = "monitoring/exporter"


def exporters(stage: Stage, node: str = NODE) -> list[Pod]:
    """Pods of the exporter on a node, or made for it."""
    pods = stage.world.store.pods.values()
    return [pod for pod in pods if pod.owner is not None and pod.owner.name == "exporter" and node in (pod.node_name, pod.target)]


async def assert_back(stage: Stage, before: Pod) -> None:
    """A successor of the exporter's pod runs, without a gate; everything else is as before."""
    await stage.assert_put_back()
    (after,) = exporters(stage)
    assert (after.is_ready, after.gates) == (True, ())
    assert after.uid != before.uid


@pytest.mark.parametrize("ways", [GATE, DENY])
def test_parked_until_the_node_is_put_back(ways: str) -> None:
    """Proposal C, N02: kept off from the pause to the restore, in those two patches, nothing of the DaemonSet or of neighbours touched."""

    async def story(stage: Stage) -> None:
        (before,), (neighbour,) = exporters(stage), exporters(stage, SPARE_NODE)
        running: list[str] = []
        machine = stage.world.machine(NODE)
        stage.world.faults.on(
            "unload_module", Do(lambda: running.extend(pod.ref for pod in exporters(stage) if pod.node_name)), when=When.BEFORE, times=None
        )
        run = await stage.run()
        assert run.code == 0, run.sentence
        assert [call.call for call in machine.calls].count("delete_module") > 1
        assert running == []
        await assert_back(stage, before)
        stage.assert_free()
        assert exporters(stage, SPARE_NODE) == [neighbour]
        pause, *_, put_back, _ = stage.node_writes()
        assert "parked=true +gpu-driver-manager.parked +gpu-driver-manager.record" in pause
        assert " cordon" in pause
        assert "parked=None" in put_back
        assert "uncordon" in put_back

    play(story, with_parkable(ways=ways))


def with_parkable(**given: Any) -> Scenario:
    """A small node with an exporter that has to be parked."""
    scenario = small_world(gpu_pods=1, operands=1)
    add_parkable(scenario, **given)
    return scenario


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"is_marked": False}, f"cannot be parked: the node has no annotation {names.PARKING}"),
        ({"is_opted_in": False}, f'label DaemonSet {OWNER} {names.PARK}="true" to have it parked'),
        ({"labels": {"app": names.VALIDATOR_APP}}, "is not parked though its label"),
    ],
)
def test_refused_before_any_write(given: dict[str, Any], words: str) -> None:
    """R5, decision 19: without the controller's mark or the opt-in nothing is changed, nobody is evicted, and it says what is missing."""

    async def story(stage: Stage) -> None:
        run = await stage.run()
        assert run.code == 65
        assert words in run.sentence
        assert f"DaemonSet {OWNER}" in run.sentence
        assert stage.node_writes() == []
        assert stage.evicted == []
        stage.assert_host_untouched()
        await stage.assert_put_back()

    play(story, with_parkable(**given))


def test_a_daemon_set_that_may_not_be_read() -> None:
    """The vfio-manager's role: what cannot be read has not opted in; it says so."""

    async def story(stage: Stage) -> None:
        stage.scenario.account.rules = tuple(rule for rule in STOCK_ROLE if "daemonsets" not in rule.resources)
        run = await stage.run()
        assert run.code == 65
        assert f"DaemonSet {OWNER} cannot be parked: the account may not get it" in run.sentence
        assert stage.node_writes() == []

    play(story, parked())


def test_a_rolling_update_is_waited_for() -> None:
    """Decision 45: a parked DaemonSet could not finish its update, so nothing is changed before it has."""

    async def story(stage: Stage) -> None:
        world = stage.world
        daemon_set = world.store.daemon_sets[OWNER]
        world.controllers.daemon_sets.set_template(daemon_set, replace(daemon_set.spec, start_seconds=5.0))
        updated: list[bool] = []
        world.faults.on(
            "patch_node", Do(lambda: updated.append(daemon_set.is_in_update)), where=lambda call: names.PARKED in str(call.args), times=None
        )
        run = await stage.run()
        assert run.code == 0, run.sentence
        assert "AwaitRollingUpdate" in run.steps
        assert updated
        assert not any(updated)
        await stage.assert_put_back()

    play(story, parked())


def test_a_rolling_update_that_does_not_end() -> None:
    """R8: at the limit the run ends with the DaemonSet's name; nothing was changed."""

    async def story(stage: Stage) -> None:
        world = stage.world
        daemon_set = world.store.daemon_sets[OWNER]
        world.controllers.daemon_sets.set_template(daemon_set, replace(daemon_set.spec, is_ready=False))
        run = await stage.run(operand_timeout=20.0)
        assert run.code == 75
        assert f"the rolling update of DaemonSet {OWNER} to finish" in run.sentence
        assert stage.node_writes() == []
        assert not [ref for ref in stage.evicted if ref.startswith("monitoring/")]

    play(story, parked())


def test_a_policy_that_does_nothing() -> None:
    """R1: the mark is out of date and the policy lets the pod in: nothing is unloaded under it; its owner is named, and what to look at."""

    async def story(stage: Stage) -> None:
        stage.world.server.parking.is_broken = True
        run = await stage.run()
        assert run.code == 65
        assert f"pods of DaemonSet {OWNER} come to the node though it is parked" in run.sentence
        assert "deploy/parking" in run.sentence
        assert stage.unloads() == []
        await stage.assert_put_back()

    play(story, parked())


def slow_to_forget(stage: Stage, seconds: float) -> None:
    """Lets the admission policy know of the un-park so late."""
    store = stage.world.store
    stage.world.faults.on("unload_module", Do(lambda: setattr(store, "latencies", replace(store.latencies, admission=seconds))))


def test_a_policy_that_is_slow_to_forget() -> None:
    """Decision 44: a successor that is gated once more is evicted too, at most three times, before the run ends well."""

    async def story(stage: Stage) -> None:
        (before,) = exporters(stage)
        slow_to_forget(stage, 0.6)
        run = await stage.run()
        assert run.code == 0, run.sentence
        assert 2 <= len(stage.world.server.let_in) <= 3
        await assert_back(stage, before)

    play(story, parked())


def test_a_gate_that_stays() -> None:
    """R4: while a pod still waits the record stays and the run does not end well; the next one lets it in and takes the record off."""

    async def story(stage: Stage) -> None:
        (before,) = exporters(stage)
        slow_to_forget(stage, 60.0)
        run = await stage.run()
        assert run.code == 75
        assert "waits with the gate" in run.sentence
        record = find_record(stage.world.node(NODE)).record
        assert record is not None
        assert (record.let_in, record.parked, record.labels, record.is_cordoned) == ((OWNER,), (), {}, False)
        assert not stage.world.node(NODE).unschedulable
        assert names.PARKED not in stage.world.node(NODE).labels
        await asyncio.sleep(60.0)
        assert (await stage.restore()).code == 0
        await assert_back(stage, before)

    play(story, parked())


# Beside the controller ----------------------------------------------------------------------------------------------


def held_by_controller(stage: Stage, *owners: str) -> None:
    """The controller parks these on the node, beside what is parked there."""
    node = stage.world.node(NODE)
    everybody = ",".join(sorted(parked_on(node) | set(owners)))
    record = encode(Progress(node=node.uid, parked=sorted(owners)))
    stage.world.edit_node(NODE, labels={names.PARKED: "true"}, annotations={names.PARKED: everybody, names.ROLLOUT: record})


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_each_takes_back_only_its_own(when: str) -> None:
    """Decision 32: the list is the union of both; the agent's restore leaves what the controller parks, though both park the same."""

    async def story(stage: Stage) -> None:
        both: list[frozenset[str]] = []
        stage.world.faults.on("unload_module", Do(lambda: both.append(parked_on(stage.world.node(NODE)))))
        if when == "before":
            held_by_controller(stage, OWNER, "mon/other")
        else:
            stage.world.faults.on("unload_module", Do(lambda: held_by_controller(stage, OWNER, "mon/other")))
        run = await stage.run()
        assert run.code == 0, run.sentence
        assert both == [{OWNER, "mon/other"} if when == "before" else {OWNER}]
        node = stage.world.node(NODE)
        assert parked_on(node) == {OWNER, "mon/other"}
        assert names.RECORD not in node.annotations
        await asyncio.sleep(5.0)
        assert [pod.gates for pod in exporters(stage)] == [(names.PARKED,)], "the controller keeps it off still"

    play(story, parked())


def test_a_mark_that_goes_meanwhile() -> None:
    """What was parked goes on parked, and is let in at the end, though the controller takes its mark off in the middle."""

    async def story(stage: Stage) -> None:
        (before,) = exporters(stage)
        stage.world.faults.on("unload_module", Do(lambda: stage.world.edit_node(NODE, annotations={names.PARKING: None})))
        run = await stage.run()
        assert run.code == 0, run.sentence
        stage.before = replace(stage.before, annotations={})
        await assert_back(stage, before)

    play(story, parked())


def test_a_park_that_somebody_takes_off() -> None:
    """Decision 10: it is put on once more before the unload, and reported."""

    async def story(stage: Stage) -> None:
        (before,) = exporters(stage)
        stage.later(0.4, lambda: stage.world.edit_node(NODE, labels={names.PARKED: None}, annotations={names.PARKED: None}))
        run = await stage.run()
        assert run.code == 0, run.sentence
        assert sum("parked=true" in write for write in stage.node_writes()) == 2
        await assert_back(stage, before)

    play(story, parked())


# Dying --------------------------------------------------------------------------------------------------------------


def test_stopped_by_a_signal() -> None:
    """A run that is told to stop in the middle un-parks and lets in, within its time."""

    async def story(stage: Stage) -> None:
        (before,) = exporters(stage)
        stop = asyncio.Event()
        stage.world.faults.on("unload_module", Do(stop.set))
        run = await stage.run(stop=stop)
        assert run.code == 75
        assert run.outcome is not None
        assert run.outcome.is_put_back
        await assert_back(stage, before)

    play(story, parked())


def test_a_run_whose_pause_is_refused() -> None:
    """The record of a run that was killed is undone by a later one whose own pause never came to the node; nobody is left gated."""

    def is_of_exporter(call: Call) -> bool:
        return not call.args["dry_run"] and str(call.args["pod"]).startswith("monitoring/")

    async def story(stage: Stage) -> None:
        (before,) = exporters(stage)
        stage.world.faults.on("evict", Kill(), where=is_of_exporter, when=When.AFTER)
        first = await stage.run()
        assert first.life.was_killed
        await asyncio.sleep(3.0)
        assert [pod.gates for pod in exporters(stage)] == [(names.PARKED,)]
        assert parked_on(stage.world.node(NODE)) == {OWNER}
        stage.world.faults.on("patch_node", Fail(lambda: Forbidden("no")))
        second = await stage.run()
        assert second.code == 77
        assert second.outcome is not None
        assert second.outcome.is_put_back
        await assert_back(stage, before)

    play(story, parked())


def test_what_somebody_changed_meanwhile_is_proven_too(caplog: pytest.LogCaptureFixture) -> None:
    """R4: with a park as without one the last look is held to all that the record held, not only to the names in it."""

    async def story(stage: Stage) -> None:
        changed: list[bool] = []

        def cordon() -> None:
            changed.append(stage.world.node(NODE).unschedulable)
            stage.world.edit_node(NODE, unschedulable=True)

        stage.world.faults.on("gated_for", Do(cordon))
        run = await stage.run()
        assert run.code == 0, run.sentence
        assert changed == [False]
        assert "somebody has changed the node since it was put back" in caplog.messages
        stage.before = replace(stage.before, unschedulable=True)
        await stage.assert_put_back()

    play(story, parked())


def test_an_outage_while_it_is_let_in() -> None:
    """An API server that is away after the un-park is waited for; the record goes when it is back and the pod is let in."""

    async def story(stage: Stage) -> None:
        (before,) = exporters(stage)
        stage.world.faults.on("gated_for", Do(lambda: stage.world.server.outage(20.0)))
        run = await stage.run()
        assert run.code == 0, run.sentence
        await assert_back(stage, before)

    play(story, parked())
