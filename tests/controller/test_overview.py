"""`status --all` on a simulated fleet: what it says about each node, in every kind of trouble, and that it changes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from driver_manager import names
from driver_manager.cli import fleetstatus
from driver_manager.config import Settings
from driver_manager.controller.cache import Cache
from driver_manager.controller.overview import Overview, Row, keep_up, overview, read_all, read_leader
from driver_manager.controller.run import Replica
from driver_manager.controller.settings import ControllerSettings
from driver_manager.core.upgrade_policy import UpgradePolicy, read_policy
from driver_manager.errors import TakenOver, Unreachable
from driver_manager.sim.clock import run_virtual
from driver_manager.sim.faults import Fail
from driver_manager.sim.fleetworld import CONTROLLER, OWN_NAMESPACE, FleetWorld
from driver_manager.sim.objects import PodSpec

LEASE_NAME = "driver-manager-controller"
POLICY = {"autoUpgrade": True, "maxParallelUpgrades": 1, "maxUnavailable": "50%"}
Story = Callable[[FleetWorld, "asyncio.Task[None]"], Coroutine[Any, Any, None]]


def play(story: Story, *, policy_file: dict[str, Any] | None = None, **world_args: Any) -> None:
    """Runs a story beside a controller that leads a fleet of four."""
    world = FleetWorld(1, **{"nodes": 4, "policy": POLICY, **world_args})

    async def whole() -> None:
        life = world.controller()
        policy = read_policy(policy_file) if policy_file else None
        task = asyncio.create_task(Replica(life.fleet, life.clock, ControllerSettings(identity="one", policy=policy)).run())
        await asyncio.sleep(5)
        await story(world, task)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, TakenOver):
            await task

    run_virtual(whole())


async def look(world: FleetWorld, policy: UpgradePolicy | None = None) -> Overview:
    """One look, by an account that may read and nothing else."""
    cluster, spaces = world.account.rules, world.account.namespace_rules
    reads = frozenset({"get", "list", "watch"})
    account = replace(
        world.account,
        name=f"{CONTROLLER}-reader",
        rules=tuple(replace(rule, verbs=rule.verbs & reads) for rule in cluster),
        namespace_rules={space: tuple(replace(rule, verbs=rule.verbs & reads) for rule in rules) for space, rules in spaces.items()},
    )
    life = world.controller(account=account)
    cache = await read_all(life.fleet)
    leader = await read_leader(life.fleet, OWN_NAMESPACE, LEASE_NAME)
    return await overview(life.fleet, cache, leader, life.clock.epoch(), Settings(), policy)


def test_who_may_not_list_budgets_can_watch_the_fleet() -> None:
    """What is shown again and again needs no more rights than what is shown once, and shows the same."""

    async def story(world: FleetWorld, _: asyncio.Task[None]) -> None:
        rules = tuple(rule for rule in world.account.rules if "poddisruptionbudgets" not in rule.resources)
        account = replace(world.account, name=f"{CONTROLLER}-looker", rules=rules)
        cache = Cache()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(10):
                await keep_up(world.client(account), cache)
        assert cache.is_synced
        assert cache.nodes == (await read_all(world.client(account))).nodes

    play(story)


def row(seen: Overview, node: str) -> Row:
    return next(each for each in seen.rows if each.node == node)


def test_a_fleet_at_rest() -> None:
    """Every node is done, says why, and the leader is named."""

    async def story(world: FleetWorld, _: asyncio.Task[None]) -> None:
        seen = await look(world)
        assert [(each.node, each.state, each.reason, each.cordoned_by) for each in seen.rows] == [
            (f"gpu-{number}", "upgrade-done", "UpToDate", "") for number in (1, 2, 3, 4)
        ]
        assert seen.leader.holder == "one"
        assert seen.leader.grants == ()
        (group,) = seen.groups
        assert (group.name, group.nodes, group.limit, group.working) == ("ClusterPolicy/cluster-policy", 4, 2, ())

    play(story)


def test_a_roll_out_under_way() -> None:
    """The node in work says what it waits for, by name; the others say whom they wait for; the group says why no more are begun."""

    async def story(world: FleetWorld, _: asyncio.Task[None]) -> None:
        world.behave(start_seconds=60.0)
        world.new_driver("two")
        await asyncio.sleep(20)
        seen = await look(world)
        first, second = row(seen, "gpu-1"), row(seen, "gpu-2")
        assert (first.state, first.reason, first.cordoned_by, first.attempt) == ("pod-restart-required", "DriverStarting", "upgrade", 1)
        assert first.since > 0
        assert first.target
        assert (second.state, second.reason, second.cordoned_by) == ("upgrade-required", "NoSlot", "")
        assert second.sentence == "maxParallelUpgrades is 1, and in work are gpu-1"
        assert seen.groups[0].waiting == second.sentence
        assert seen.groups[0].working == seen.groups[0].unavailable_ours == ("gpu-1",)

    play(story)


def test_pods_that_hold_a_node_up_are_named() -> None:
    """A node whose pods are on their way names them, from the objects alone."""

    async def story(world: FleetWorld, _: asyncio.Task[None]) -> None:
        world.new_driver("two")
        await asyncio.sleep(20)
        first = row(await look(world), "gpu-1")
        assert (first.state, first.reason) == ("pod-deletion-required", "Freeing")
        assert first.sentence.count("pod default/train-gpu-1") == 2

    play(story, budget=0, policy={**POLICY, "podDeletion": {"timeoutSeconds": 600}})


def test_pods_that_may_not_go_are_named_before_a_node_is_begun() -> None:
    """A node that is not begun because of a pod names it, and the setting that would let it go."""

    async def story(world: FleetWorld, _: asyncio.Task[None]) -> None:
        for node in world.store.nodes:
            world.add_pod(f"by-hand-{node}", PodSpec(gpus=1), node=node)
        await asyncio.sleep(5)
        world.new_driver("two")
        await asyncio.sleep(10)
        first = row(await look(world), "gpu-1")
        assert (first.state, first.reason) == ("upgrade-required", "BlockedByPod")
        assert "by-hand" in first.sentence

    play(story)


def test_a_failed_node() -> None:
    """The last failure, with its reason and sentence, and that the cordon is ours."""

    async def story(world: FleetWorld, _: asyncio.Task[None]) -> None:
        world.behave(start_seconds=1e9)
        world.new_driver("two")
        await asyncio.sleep(2000)
        first = row(await look(world), "gpu-1")
        assert (first.state, first.cordoned_by) == ("upgrade-failed", "upgrade")
        assert first.last_failure is not None
        assert first.last_failure.reason == "DriverTimedOut"

    play(story)


def test_a_node_that_others_have_cordoned() -> None:
    """It does not look like ours."""

    async def story(world: FleetWorld, _: asyncio.Task[None]) -> None:
        node = world.store.nodes["gpu-2"]
        node.unschedulable = True
        world.store.node_written(node)
        seen = await look(world)
        assert row(seen, "gpu-2").cordoned_by == "others"
        assert seen.groups[0].unavailable_others == ("gpu-2",)

    play(story)


@pytest.mark.parametrize(
    ("label", "record", "words"),
    [
        ("on-holiday", None, "'on-holiday', which is no state"),
        ("upgrade-done", "{}", "cannot be used"),
        ("upgrade-done", "[" * 5000, "cannot be used"),
    ],
)
def test_what_people_wrote(label: str, record: str | None, words: str) -> None:
    """A label that is no state, and a record that does not decode, are said as they are and break nothing."""

    async def story(world: FleetWorld, _: asyncio.Task[None]) -> None:
        node = world.store.nodes["gpu-3"]
        node.labels[names.UPGRADE_STATE] = label
        if record is not None:
            node.annotations[names.ROLLOUT] = record
        world.store.node_written(node)
        seen = await look(world)
        assert row(seen, "gpu-3").state == label
        assert words in row(seen, "gpu-3").sentence

    play(story)


def printed(seen: Overview) -> str:
    """The table, as a file gets it."""
    with contextlib.redirect_stdout(io.StringIO()) as written:
        fleetstatus.show(seen, "text")
    return written.getvalue().encode().decode()


def test_what_people_wrote_into_records_and_lease() -> None:
    """Times that are none, and annotations of the Lease that are none of ours: the table and the document show the rest."""

    async def story(world: FleetWorld, task: asyncio.Task[None]) -> None:
        task.cancel()
        await asyncio.wait({task})
        far = {"at": 9.9e11, "target": "x", "reason": "y"}
        node = world.store.nodes["gpu-1"]
        record = {"node": node.uid, "state": "upgrade-failed", "target": "x", "since": 9.9e11, "failures": [far]}
        node.labels = {**node.labels, names.UPGRADE_STATE: "upgrade-failed"}
        node.annotations = {**node.annotations, names.ROLLOUT: json.dumps(record)}
        world.store.node_written(node)
        client = world.client()
        lease = await client.lease(OWN_NAMESPACE, LEASE_NAME)
        for text in ("[" * 10_000, "nonsense", '["\\ud800"]', '{"a": 1}', "7"):
            said = {names.GRANTS: text, names.WAITING: text}
            lease = await client.write_lease(replace(lease, annotations={**lease.annotations, **said}))
            seen = await look(world)
            assert (seen.leader.grants, dict(seen.leader.waiting)) == ((), {})
            assert row(seen, "gpu-1").since == 9.9e11
            assert fleetstatus.document(seen)["nodes"][0]["since"] is None
            assert "gpu-1" in printed(seen)

    play(story)


def test_paused() -> None:
    """The pause, and who is kept waiting by it."""

    async def story(world: FleetWorld, _: asyncio.Task[None]) -> None:
        client = world.client()
        lease = await client.lease(OWN_NAMESPACE, LEASE_NAME)
        await client.write_lease(replace(lease, annotations={**lease.annotations, names.PAUSED_ROLLOUT: "true"}))
        await asyncio.sleep(5)
        world.new_driver("two")
        await asyncio.sleep(10)
        seen = await look(world)
        assert seen.leader.paused == "true"
        assert "PAUSED: no node is begun" in printed(seen)
        assert row(seen, "gpu-1").reason == "Paused"
        assert "paused" in row(seen, "gpu-1").sentence
        world.add_pod("by-hand", PodSpec(runtime_class="nvidia"), node="gpu-1")
        await asyncio.sleep(5)
        seen = await look(world)
        assert (row(seen, "gpu-1").reason, row(seen, "gpu-2").reason) == ("BlockedByPod", "Paused")
        assert "pod default/by-hand" in row(seen, "gpu-1").sentence

    play(story)


@pytest.mark.parametrize("value", ["false", "yes", ""])
def test_only_true_pauses(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As with all annotations of ours. Who wrote something else is told that nothing is paused."""

    async def story(world: FleetWorld, _: asyncio.Task[None]) -> None:
        client = world.client()
        lease = await client.lease(OWN_NAMESPACE, LEASE_NAME)
        await client.write_lease(replace(lease, annotations={**lease.annotations, names.PAUSED_ROLLOUT: value}))
        await asyncio.sleep(5)
        world.new_driver("two")
        await asyncio.sleep(10)
        seen = await look(world)
        assert not seen.leader.paused
        assert row(seen, "gpu-1").cordoned_by == "upgrade"
        fleetstatus.show(seen, "table")
        out = capsys.readouterr().out
        assert "PAUSED" not in out
        words = f"the annotation {names.PAUSED_ROLLOUT} of the Lease is {value!r}, which pauses nothing: set it to true, or take it off"
        assert words in " ".join(out.split())

    play(story)


def test_a_policy_file_shows_from_the_records() -> None:
    """Whose policy is a file that only the controller has: nodes in work are still told rightly, and nothing is called switched off."""

    async def story(world: FleetWorld, _: asyncio.Task[None]) -> None:
        world.behave(start_seconds=60.0)
        world.new_driver("two")
        await asyncio.sleep(20)
        seen = await look(world)
        assert {each.group for each in seen.rows} == {"file"}
        assert row(seen, "gpu-1").reason == "DriverStarting"
        assert row(seen, "gpu-2").reason == "NoSlot"

    play(story, policy_file=POLICY, policy={"autoUpgrade": False})


def test_a_policy_file_that_nothing_shows() -> None:
    """Before the first node is begun under it: that there is none is not claimed, and how it is seen is said."""

    async def story(world: FleetWorld, _: asyncio.Task[None]) -> None:
        world.remove_policy("ClusterPolicy", "cluster-policy")
        (group,) = (await look(world)).groups
        assert "no policy file" not in group.why_not
        assert "--policy-file" in group.why_not
        (group,) = (await look(world, read_policy(POLICY))).groups
        assert (group.name, group.why_not) == ("file", "")

    play(story, policy_file=POLICY)


def test_the_target_of_a_node_at_rest() -> None:
    """A driver that is wanted again after all: a node that never got the other one shows the one that it has."""

    async def story(world: FleetWorld, _: asyncio.Task[None]) -> None:
        world.new_driver("two")
        await asyncio.sleep(600)
        before = row(await look(world), "gpu-4").target
        world.behave(start_seconds=60.0)
        world.new_driver("three")
        await asyncio.sleep(20)
        assert row(await look(world), "gpu-4").target != before
        world.new_driver("two")
        await asyncio.sleep(5)
        last = row(await look(world), "gpu-4")
        assert (last.state, last.reason) == ("upgrade-done", "UpToDate")
        assert last.target == before

    play(story)


def test_no_controller_at_all() -> None:
    """Without a Lease it says so, and tells the nodes all the same."""
    world = FleetWorld(1, nodes=2, policy=POLICY)

    async def whole() -> None:
        seen = await look(world)
        assert "there is no Lease driver-manager/driver-manager-controller" in seen.leader.problem
        assert [(each.state, each.reason) for each in seen.rows] == [("", ""), ("", "")]
        assert "nobody leads" in seen.rows[0].sentence

    run_virtual(whole())


def test_a_leader_that_renews_no_more_leads_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    """A Lease still names who was killed: that nothing goes on is said on its nodes too, and not in the first line alone."""

    async def story(world: FleetWorld, task: asyncio.Task[None]) -> None:
        world.behave(start_seconds=30.0)
        world.new_driver("two")
        await asyncio.sleep(10)
        world.faults.on("write_lease", Fail(lambda: Unreachable("no answer")), times=None)
        with pytest.raises(TakenOver):
            await task
        await asyncio.sleep(60)
        seen = await look(world)
        assert seen.leader.holder == "one"
        there = row(seen, "gpu-1")
        assert there.state == "pod-restart-required"
        assert there.sentence.startswith("would go on, but nobody leads, to"), there.sentence
        fleetstatus.show(seen, "table")
        assert "nobody leads: one has not renewed the Lease for" in capsys.readouterr().out

    play(story)


def test_a_bad_policy_is_named() -> None:
    """A resource whose policy cannot be used is named with its fault, and its nodes say so."""

    async def story(world: FleetWorld, _: asyncio.Task[None]) -> None:
        world.set_policy("ClusterPolicy", "cluster-policy", upgrade_policy={"autoUpgrade": True, "maxUnavailable": "200%"})
        await asyncio.sleep(5)
        seen = await look(world)
        assert "maxUnavailable is '200%'" in seen.problems["ClusterPolicy/cluster-policy"]
        assert "is not valid" in seen.groups[0].why_not

    play(story)


def test_as_json_and_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    """Programs get one document, people a table; both name every node and its state."""

    async def story(world: FleetWorld, _: asyncio.Task[None]) -> None:
        world.behave(start_seconds=60.0)
        world.new_driver("two")
        await asyncio.sleep(20)
        seen = await look(world)
        fleetstatus.show(seen, "json")
        said = json.loads(capsys.readouterr().out)
        assert [each["node"] for each in said["nodes"]] == ["gpu-1", "gpu-2", "gpu-3", "gpu-4"]
        assert said["nodes"][0]["state"] == "pod-restart-required"
        assert said["nodes"][0]["cordonedBy"] == "upgrade"
        assert said["leader"]["identity"] == "one"
        assert said["groups"][0]["unavailable"] == {"limit": 2, "upgrade": ["gpu-1"], "other": []}
        fleetstatus.show(seen, "table")
        table = capsys.readouterr().out
        words = ("gpu-1", "gpu-4", "upgrade", "1 in work (limit 1)", "no more are begun: maxParallelUpgrades is 1")
        assert all(word in table for word in words)

    play(story)
