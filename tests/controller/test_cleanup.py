"""`cleanup` in virtual time: fleets that were left anywhere in a roll-out, with everything of ours on them, and what is left afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from dataclasses import dataclass, field, replace

import pytest

from driver_manager import names
from driver_manager.controller.cleanup import Cleaned, Cleanup
from driver_manager.controller.run import Replica
from driver_manager.controller.settings import ControllerSettings
from driver_manager.core.fleet import LeaseView
from driver_manager.core.record import Record, apply_record, encode, parked_by_agent
from driver_manager.core.remains import OF_AN_UPGRADE
from driver_manager.core.rollout_states import State
from driver_manager.core.snapshot import Identity, Taint
from driver_manager.errors import DriverManagerError, Forbidden, Refused, TakenOver
from driver_manager.ports import NodePatch
from driver_manager.sim.access import EVERYTHING
from driver_manager.sim.clock import run_virtual
from driver_manager.sim.faults import Delay, Fail
from driver_manager.sim.feeds import Scope
from driver_manager.sim.fleetworld import NAMESPACE, OWN_NAMESPACE, VALIDATOR_LABEL, FleetWorld
from driver_manager.sim.objects import PodSpec
from driver_manager.sim.world import AgentLife
from tests.controller.rollouts import add_exporter

STATES, SHARDS = 200, 20
SETTINGS = ControllerSettings(identity="cleanup", lease_namespace=OWN_NAMESPACE, operator_namespace=NAMESPACE)
OURS = "nvidia.com/gpu-driver-manager"
LABEL = VALIDATOR_LABEL
LEASE = f"{OWN_NAMESPACE}/{SETTINGS.lease_name}"


@dataclass(slots=True)
class Left:
    """A fleet as it was left, and how its nodes were before."""

    world: FleetWorld
    by_hand: set[str] = field(default_factory=set)
    """Nodes with a record of a run that may live."""
    cordoned: set[str] = field(default_factory=set)
    """By an admin."""
    labels: dict[str, dict[str, str]] = field(default_factory=dict)


async def left_somewhere(seed: int) -> Left:
    """A controller dies at some boundary of a roll-out; agents have died on some nodes; admins have done what they do."""
    rng = random.Random(seed)
    world = FleetWorld(seed, nodes=rng.randint(2, 5), policy={"autoUpgrade": True, "maxParallelUpgrades": 2, "maxUnavailable": "100%"})
    left = Left(world)
    if rng.random() < 0.5:
        add_exporter(world, rng.choice(("gate", "deny", "gate deny")))
    for name, node in world.store.nodes.items():
        node.boot_id = f"boot-{name}"
        if rng.random() < 0.15:
            node.unschedulable = True
            left.cordoned.add(name)
        left.labels[name] = dict(node.labels)
        world.store.node_written(node)
    life = world.controller(kill_at=rng.randint(1, 250))
    leading = asyncio.create_task(_lead(life))
    asyncio.get_running_loop().call_later(rng.random() * 20, lambda: world.new_driver("two"))
    await asyncio.wait({leading}, timeout=rng.random() * 90)
    life.kill()
    await leading
    await asyncio.sleep(120)
    for name in world.store.nodes:
        _leave_more(left, name, rng)
    return left


async def _lead(life: AgentLife) -> None:
    with contextlib.suppress(DriverManagerError):
        await life.run(Replica(life.fleet, life.clock, ControllerSettings(lease_namespace=OWN_NAMESPACE)).run())


def _leave_more(left: Left, name: str, rng: random.Random) -> None:
    """What dead agents, parking and people have left on a node."""
    world = left.world
    node = world.node(name)
    if rng.random() < 0.5:
        is_by_hand, run = rng.random() < 0.3, "".join(rng.choices("abcdefgh0123", k=10))
        record = Record(
            run=run,
            node_uid=node.uid if rng.random() < 0.8 else "uid-of-another",
            boot_id=node.boot_id if rng.random() < 0.8 else "boot-before",
            started="t",
            labels={LABEL: "true"},
            is_cordoned=not node.unschedulable,
            taint=Taint(names.KEEP_OFF_TAINT, f"dm-{run}") if rng.random() < 0.7 else None,
            parked=("monitoring/exporter",) if rng.random() < 0.3 else (),
            let_in=("monitoring/exporter",) if rng.random() < 0.1 else (),
            pod=Identity() if is_by_hand else Identity(NAMESPACE, "gone", f"uid-gone-{name}"),
        )
        if is_by_hand and record.node_uid == node.uid and record.boot_id == node.boot_id:
            left.by_hand.add(name)
        change = apply_record(record, node)
        patch = NodePatch(
            name=name,
            resource_version=node.resource_version,
            labels=change.labels,
            annotations=change.annotations,
            unschedulable=change.unschedulable,
            taints=change.taints,
        )
        world.server.patch_node(patch, "agent")
    if rng.random() < 0.3:
        world.edit_node(name, labels={names.PARKED: "true"}, annotations={names.PARKED: "monitoring/exporter"})
    for key in (names.STATUS, names.ACCEPT, *OF_AN_UPGRADE):
        if rng.random() < 0.1:
            world.edit_node(name, annotations={key: "true"})
    if rng.random() < 0.1:
        world.edit_node(name, annotations={names.KEEP_CORDON: "true"})


def cleanup_of(world: FleetWorld, *, kill_at: int | None = None) -> tuple[AgentLife, Cleanup]:
    """A cleanup by an admin, who sees all nodes."""
    life = world.controller(account=world.add_account("admin", EVERYTHING), kill_at=kill_at)
    life.fleet.scope = Scope(node_selector={})
    return life, Cleanup(life.fleet, life.clock, SETTINGS)


async def cleaned(world: FleetWorld) -> Cleaned:
    life, cleanup = cleanup_of(world)
    got = await life.run(cleanup.run())
    assert got is not None
    return got


def check_clean(left: Left, got: Cleaned, seed: int) -> None:
    """Nothing of ours is there but what is named; all else is as before."""
    for name, node in left.world.store.nodes.items():
        said = " ".join(got.left.get(name, ()))
        where = f"seed {seed}: {name} ({said})"
        ours = {key for key in {**node.annotations, **node.labels} if key.startswith(OURS)}
        kept = {names.PARKED} if name in left.by_hand and parked_by_agent(node.view()) else set()
        assert not (ours - {names.RECORD, names.KEEP_CORDON} - kept), f"{where}: {ours}"
        assert names.RECORD not in node.annotations or (name in left.by_hand and "record of run" in said), where
        assert names.KEEP_CORDON not in ours or names.KEEP_CORDON in said, where
        assert names.UPGRADE_STATE not in node.labels, where
        assert not set(OF_AN_UPGRADE) & set(node.annotations), where
        if name in left.by_hand:
            continue
        assert not [taint for taint in node.taints if taint.value.startswith("dm-")], where
        assert node.labels == {key: value for key, value in left.labels[name].items() if key != names.UPGRADE_STATE}, where
        assert node.unschedulable >= (name in left.cordoned), where
        assert not node.unschedulable or "cordon" in said, where
    gated = [pod.name for pod in left.world.store.pods.values() if pod.gates and pod.target not in left.by_hand]
    assert gated == [], f"seed {seed}: {gated}"


@pytest.mark.parametrize("shard", range(SHARDS))
def test_from_anywhere_to_nothing_of_ours(shard: int) -> None:
    """Issue 7: from 200 states in mid-flow a cleanup ends with nothing of ours but what is named, and a second one has nothing to do."""

    async def story(seed: int) -> None:
        left = await left_somewhere(seed)
        before = {name: (node.labels, node.annotations) for name, node in left.world.store.nodes.items()}
        life, dry = cleanup_of(left.world)
        told = await life.run(dry.plan())
        assert told is not None
        assert {name: (node.labels, node.annotations) for name, node in left.world.store.nodes.items()} == before, "a dry run"
        got = await cleaned(left.world)
        assert got.done == told.done
        check_clean(left, got, seed)
        again = await cleaned(left.world)
        assert again.done == {}
        assert again.left == got.left

    for seed in range(shard, STATES, SHARDS):
        run_virtual(story(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3, 7])
def test_killed_anywhere_and_begun_again(seed: int) -> None:
    """A cleanup that is killed at any of its boundaries is finished by the next one."""
    boundary = 0
    while True:
        done: list[bool] = []

        async def story(boundary: int = boundary, done: list[bool] = done) -> None:
            left = await left_somewhere(seed)
            life, cleanup = cleanup_of(left.world, kill_at=boundary)
            await life.run(cleanup.run())
            done.append(not life.was_killed)
            check_clean(left, await cleaned(left.world), seed)

        run_virtual(story())
        if done[0]:
            break
        boundary += 1
    assert boundary > 10


def test_a_controller_that_leads() -> None:
    """It is refused by name, and nothing is written; when the controller has ended it goes through, and no other leads meanwhile."""

    async def story() -> None:
        world = FleetWorld(1, nodes=2)
        life = world.controller()
        leading = asyncio.create_task(_lead(life))
        await asyncio.sleep(60)
        writes = len(world.deeds("patch"))
        with pytest.raises(Refused) as caught:
            await cleaned(world)
        assert "controller leads" in caught.value.message
        assert "scale" in caught.value.hint
        assert len(world.deeds("patch")) == writes
        life.kill()
        await leading
        next_life = world.controller()
        _, cleanup = cleanup_of(world)
        work = asyncio.create_task(cleanup.run())
        await asyncio.sleep(17)
        late = asyncio.create_task(_lead(next_life))
        await work
        assert all(names.UPGRADE_STATE not in node.labels for node in world.store.nodes.values())
        late.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await late

    run_virtual(story())


@pytest.mark.parametrize("who", ["author", "heir"])
def test_an_agent_that_lives(who: str) -> None:
    """Its pod, or a driver pod that is starting where a record is: 75, by name, before anything is written."""

    async def story() -> None:
        world = FleetWorld(1, nodes=2)
        node = world.node("gpu-1")
        pod = world.add_pod("driver-manager-x", PodSpec(), node="gpu-1", namespace="ops")
        uid = pod.uid if who == "author" else "gone"
        record = Record(run="abcdefgh12", node_uid=node.uid, boot_id="b", started="t", pod=Identity("ops", pod.name, uid))
        world.edit_node("gpu-1", annotations={names.RECORD: encode(record)})
        if who == "heir":
            world.set_ready(world.driver_pods("gpu-1")[0], False)
        with pytest.raises(TakenOver) as caught:
            await cleaned(world)
        assert "gpu-1" in caught.value.message
        assert names.RECORD in world.node("gpu-1").annotations
        assert {deed.who for deed in world.deeds("patch")} == {"somebody"}

    run_virtual(story())


def test_beside_a_gpu_operator() -> None:
    """Decision 31: while gpu-operator renews its Lease the state labels are its own; they stay, and are named."""

    async def story() -> None:
        world = FleetWorld(1, nodes=1)
        world.edit_node("gpu-1", labels={names.UPGRADE_STATE: State.DONE.value}, annotations={names.STATUS: json.dumps({})})
        fleet = world.client(world.add_account("gpu-operator", EVERYTHING))

        async def renew() -> None:
            lease = LeaseView(namespace=NAMESPACE, name=names.OPERATOR_LEASE, holder="gpu-operator-1")
            while True:
                lease = await fleet.write_lease(replace(lease, renewed=f"{asyncio.get_running_loop().time():.6f}"))
                await asyncio.sleep(2)

        renewing = asyncio.create_task(renew())
        await asyncio.sleep(1)
        got = await cleaned(world)
        renewing.cancel()
        node = world.node("gpu-1")
        assert node.labels[names.UPGRADE_STATE] == State.DONE
        assert names.STATUS not in node.annotations
        assert "gpu-operator" in " ".join(got.left["gpu-1"])

    run_virtual(story())


def test_nothing_is_written_after_it_has_failed() -> None:
    """One node may not be written: the writes of others that are under way are broken off before the Lease is given back (R10)."""

    async def story() -> None:
        world = FleetWorld(1, nodes=2)
        leading = asyncio.create_task(_lead(world.controller()))
        await asyncio.sleep(30)
        leading.cancel()
        await asyncio.wait({leading})
        assert all(names.UPGRADE_STATE in node.labels for node in world.store.nodes.values())
        world.faults.on("patch_node", Delay(3.0))
        world.faults.on("patch_node", Fail(lambda: Forbidden("not this one")))
        _, cleanup = cleanup_of(world)
        made = len(world.deeds("patch"))
        with pytest.raises(Forbidden):
            await cleanup.run()
        assert world.store.leases[LEASE].holder == ""
        await asyncio.sleep(10)
        assert len(world.deeds("patch")) == made

    run_virtual(story())
