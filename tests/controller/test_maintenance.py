"""Requestor mode: a maintenance operator frees the nodes, asked and told by NodeMaintenance objects that none of ours outlives."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import Any

import pytest

from driver_manager import names
from driver_manager.config import Settings
from driver_manager.controller.cache import Cache
from driver_manager.controller.maintenance import Maintenance, drain_spec, wait_spec
from driver_manager.controller.overview import overview, read_all, read_leader
from driver_manager.controller.run import Replica
from driver_manager.controller.settings import ControllerSettings, MaintenanceSettings
from driver_manager.core.fleet import MaintenanceOrder
from driver_manager.core.rollout_states import Because, State
from driver_manager.core.upgrade_policy import read_policy
from driver_manager.errors import ClusterError, Conflict, DriverManagerError
from driver_manager.sim.clock import run_virtual
from driver_manager.sim.faults import Fail
from driver_manager.sim.fleetworld import MAINTENANCE_NAMESPACE, OWN_NAMESPACE, FleetWorld
from driver_manager.sim.maintenances import WHO, delete, make, set_requestors
from driver_manager.sim.objects import Maintenance as NodeMaintenance
from tests.controller.stories import is_open, play, state, until, until_done

ON = MaintenanceSettings(is_on=True, namespace=MAINTENANCE_NAMESPACE)
THEIRS = "network.operator.com"


def fleet_of(nodes: int = 1, *, maintenance: float | None = 2.0, **policy: Any) -> FleetWorld:
    return FleetWorld(1, nodes=nodes, maintenance=maintenance, policy={"autoUpgrade": True, "maxUnavailable": "100%", **policy})


def there(world: FleetWorld, name: str = "gpu-1") -> NodeMaintenance | None:
    """The node's object."""
    return world.store.maintenances.get(f"{MAINTENANCE_NAMESPACE}/{ON.name(name)}")


def theirs(world: FleetWorld, name: str = "gpu-1", requestor: str = THEIRS) -> NodeMaintenance:
    """Another program makes the node's object."""
    order = MaintenanceOrder(namespace=MAINTENANCE_NAMESPACE, name=ON.name(name), node_name=name, requestor=requestor, drain={})
    return make(world.store, "them", order)


def said(world: FleetWorld) -> dict[str, list[str]]:
    """Node -> what was done to its object by the controller."""
    done: dict[str, list[str]] = {}
    for deed in world.deeds("maintenance"):
        if deed.who == world.account.name:
            done.setdefault(deed.node_name, []).append(str(deed.detail))
    return done


def test_a_rollout_in_requestor_mode() -> None:
    """Each node's object is made once and deleted once; the operator alone cordons and evicts; all end open, done and without a trace.

    One node may be unavailable (R7): the next one waits until the operator has opened the one before.
    """
    world = FleetWorld(1, nodes=3, maintenance=2.0, policy={"autoUpgrade": True, "maxUnavailable": 1})

    async def story(world: FleetWorld, replica: Replica) -> None:
        most = 0

        def look(*_: object) -> None:
            nonlocal most
            most = max(most, len(world.cordoned | world.driverless))

        world.on_change(look)
        world.new_driver("two")
        await until_done(world)
        await until(lambda: not world.cordoned, "all open")
        assert most == 1

    play(world, story, maintenance=ON)
    assert said(world) == {name: ["made", "deleted"] for name in world.store.nodes}
    assert Counter(deed.who for deed in world.deeds("evict")) == {WHO: 6}
    assert not world.store.maintenances
    for node in world.store.nodes.values():
        assert names.REQUESTOR_MODE not in node.annotations
    cordons = [deed for deed in world.deeds("patch") if getattr(deed.detail, "unschedulable", None) is not None]
    assert not cordons


def test_a_shared_object_is_joined_and_left() -> None:
    """Another program has made it: ours joins, and leaves it with that program and the node closed."""
    world = fleet_of()

    async def story(world: FleetWorld, replica: Replica) -> None:
        made = theirs(world)
        set_requestors(world.store, "third", made.fleet_view(), ("third.example",))
        world.new_driver("two")
        await until_done(world)
        assert (made.requestor, made.others, made.is_deleting) == (THEIRS, ("third.example",), False)
        assert there(world) is made
        assert not is_open(world)

    play(world, story, maintenance=ON)
    assert said(world) == {"gpu-1": [f"requestors third.example {ON.requestor}", "requestors third.example"]}


def test_its_maker_leaves_while_another_one_uses_it() -> None:
    """We are done when our deletion is taken; the object, and the node's cordon, stay until the other one has left."""
    world = fleet_of()

    async def story(world: FleetWorld, replica: Replica) -> None:
        world.new_driver("two")
        await until(lambda: state(world) == State.POD_RESTART, "the restart")
        ours = there(world)
        assert ours is not None
        set_requestors(world.store, "them", ours.fleet_view(), (THEIRS,))
        await until_done(world)
        assert ours.is_deleting
        assert not is_open(world)
        await asyncio.sleep(30)
        assert there(world) is ours
        set_requestors(world.store, "them", ours.fleet_view(), ())
        await until(lambda: is_open(world) and there(world) is None, "its end")

    play(world, story, maintenance=ON)
    assert said(world) == {"gpu-1": ["made", "deleted"]}


def test_one_that_its_maker_has_deleted_is_used_to_our_end() -> None:
    """We have joined it, so the operator keeps the node for us; it goes when we leave."""
    world = fleet_of()

    async def story(world: FleetWorld, replica: Replica) -> None:
        made = theirs(world)
        world.new_driver("two")
        await until(lambda: state(world) == State.POD_RESTART, "the restart")
        delete(world.store, "them", made.fleet_view())
        await until_done(world)
        await until(lambda: is_open(world) and there(world) is None, "its end")
        assert not world.driverless

    play(world, story, maintenance=ON)


def test_an_object_on_its_way_out_is_not_joined() -> None:
    """It is waited for, and one of our own is made."""
    world = fleet_of()

    async def story(world: FleetWorld, replica: Replica) -> None:
        made = theirs(world)
        made.has_finalizer, made.is_ready, made.is_deleting, made.others = True, True, True, ("third.example",)
        world.store.maintenance_written(made)
        world.new_driver("two")
        await asyncio.sleep(60)
        assert state(world) == State.MAINTENANCE
        assert [note.sentence for _, _, note in world.store.notes if "is being deleted" in note.sentence]
        set_requestors(world.store, "third", made.fleet_view(), ())
        await until_done(world)

    play(world, story, maintenance=ON)
    assert said(world) == {"gpu-1": ["made", "deleted"]}


def test_a_person_deletes_the_object() -> None:
    """In the middle of the maintenance: the node waits for its turn again, and gets a new one."""
    world = fleet_of(maintenance=20.0)

    async def story(world: FleetWorld, replica: Replica) -> None:
        world.new_driver("two")
        await until(lambda: names.REQUESTOR_MODE in world.store.nodes["gpu-1"].annotations, "the annotation")
        made = there(world)
        assert made is not None
        delete(world.store, "somebody", made.fleet_view())
        await until_done(world)

    play(world, story, maintenance=ON)
    moves = [note for _, _, note in world.store.notes if note.reason == Because.MAINTENANCE_OFF]
    assert [note.sentence.split(":")[0] for note in moves] == [f"from {State.MAINTENANCE} to {State.REQUIRED}"]
    assert said(world) == {"gpu-1": ["made", "made", "deleted"]}


def test_decision_39_the_kind_goes_and_comes() -> None:
    """Without it nodes are not freed in another way: they wait, and say for what; they go on when it is back."""
    world = fleet_of(maintenance=20.0)

    async def story(world: FleetWorld, replica: Replica) -> None:
        world.new_driver("two")
        await until(lambda: there(world) is not None, "the object")
        world.serve("NodeMaintenance", False)
        await until(lambda: state(world) == State.REQUIRED, "it to wait again")
        await asyncio.sleep(120)
        assert (state(world), is_open(world), world.deeds("evict")) == (State.REQUIRED, True, [])
        stay = replica.controller.stays["gpu-1"]
        assert stay.because is Because.MAINTENANCE_OFF
        assert "MAINTENANCE_OPERATOR_ENABLED" in stay.sentence
        world.serve("NodeMaintenance")
        await until_done(world)

    play(world, story, maintenance=ON)


def test_weakness_41_nothing_is_left_when_the_mode_is_off() -> None:
    """A node that was in maintenance is upgraded in place, and its annotation goes."""
    world = fleet_of(maintenance=None)
    world.edit_node("gpu-1", labels={names.UPGRADE_STATE: State.MAINTENANCE}, annotations={names.REQUESTOR_MODE: "true"})
    world.new_driver("two")

    async def story(world: FleetWorld, replica: Replica) -> None:
        await until_done(world)
        assert names.REQUESTOR_MODE not in world.store.nodes["gpu-1"].annotations

    play(world, story)


@pytest.mark.parametrize("label", [State.DONE, ""])
def test_weakness_33_an_object_that_was_left_behind(label: str) -> None:
    """A predecessor ended after the done and before the release: the object is given back, also that of a node that is gone."""
    world = fleet_of(2)
    for name in ("gpu-1", "gpu-2"):
        world.edit_node(name, labels={names.UPGRADE_STATE: label or None})
        theirs(world, name, ON.requestor)
    world.remove_node("gpu-2")

    async def story(world: FleetWorld, replica: Replica) -> None:
        await until(lambda: not world.store.maintenances, "both to be gone")
        await until(lambda: state(world) == State.DONE and is_open(world), "the node to be done")

    play(world, story, maintenance=ON)


def test_the_policy_is_turned_off_in_the_middle() -> None:
    """The object is given back first, then the label goes."""
    world = fleet_of(maintenance=20.0)

    async def story(world: FleetWorld, replica: Replica) -> None:
        world.new_driver("two")
        await until(lambda: there(world) is not None, "the object")
        world.set_policy("ClusterPolicy", "cluster-policy", upgrade_policy={"autoUpgrade": False})
        await until(lambda: there(world) is None and state(world) == "", "all taken back")
        assert is_open(world)
        assert not world.deeds("evict")

    play(world, story, maintenance=ON)


def test_a_failed_node_keeps_its_object_until_it_is_well() -> None:
    """Nobody opens a node without a driver; when the driver recovers the object is given back."""
    world = fleet_of()
    world.behave("gpu-1", driver="never-ready", recovers_after=3000.0)

    async def story(world: FleetWorld, replica: Replica) -> None:
        world.new_driver("two")
        await until(lambda: state(world) == State.FAILED, "the failure", 2500)
        assert there(world) is not None
        assert not is_open(world)
        await until_done(world, 2000)
        await until(lambda: is_open(world) and there(world) is None, "its end")

    play(world, story, maintenance=ON)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1, 121, 10))
def test_weakness_33_killed_at_any_moment(first: int) -> None:
    """Whenever a controller dies, the next one brings node and object to their end: none is left, and none is made twice."""
    for kill_at in range(first, first + 10):
        run_virtual(_killed(kill_at))


async def _killed(kill_at: int) -> None:
    world = fleet_of()
    await _live(world, None, 5.0)
    world.new_driver("two")
    await _live(world, kill_at, 120.0)
    await _live(world, None, 120.0)
    assert state(world) == State.DONE, kill_at
    assert is_open(world), kill_at
    assert there(world) is None, kill_at
    assert said(world)["gpu-1"].count("made") == 1, kill_at
    assert all(pod.spec.digest == "two" for pod in world.driver_pods()), kill_at


async def _live(world: FleetWorld, kill_at: int | None, seconds: float) -> None:
    life = world.controller(kill_at=kill_at)
    settings = ControllerSettings(identity=f"life-{life.number}", lease_namespace=OWN_NAMESPACE, maintenance=ON)
    task = asyncio.create_task(life.run(Replica(life.fleet, life.clock, settings).run()))
    await asyncio.wait([task], timeout=seconds)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, DriverManagerError):
        await task


def test_what_others_see_of_it() -> None:
    """`status --all`, which reads no NodeMaintenances, says that the operator has the node."""
    world = fleet_of(maintenance=20.0)

    async def story(world: FleetWorld, replica: Replica) -> None:
        world.new_driver("two")
        await until(lambda: names.REQUESTOR_MODE in world.store.nodes["gpu-1"].annotations, "the annotation")
        fleet = world.client()
        leader = await read_leader(fleet, OWN_NAMESPACE, "driver-manager-controller")
        (row,) = (await overview(fleet, await read_all(fleet), leader, replica.clock.epoch(), Settings(), None)).rows
        assert row.reason == Because.MAINTENANCE
        assert row.sentence.startswith("the maintenance operator frees the node")

    play(world, story, maintenance=ON)


# One object -----------------------------------------------------------------------------------------------------------


def test_a_lost_answer_makes_no_second_object() -> None:
    """The object was made and the answer lost: it is found, and kept."""
    world = fleet_of()

    async def story() -> None:
        fleet, policy = world.client(), read_policy({})
        await Maintenance(fleet, Cache(), ON).ask("gpu-1", policy)
        first, again = there(world), Maintenance(fleet, Cache(), ON)
        await again.ask("gpu-1", policy)
        assert there(world) is first
        await again.give_back("gpu-1")
        await again.give_back("gpu-1")
        await Maintenance(fleet, Cache(), ON).give_back("gpu-1")
        assert there(world) is None

    run_virtual(story())


def test_a_name_that_is_another_nodes() -> None:
    """Nothing is joined that frees another node; the error names both."""
    world = fleet_of(2)

    async def story() -> None:
        maintenance = Maintenance(world.client(), Cache(), ON)
        order = MaintenanceOrder(namespace=MAINTENANCE_NAMESPACE, name=ON.name("gpu-1"), node_name="gpu-2", requestor=THEIRS, drain={})
        make(world.store, "them", order)
        with pytest.raises(Conflict, match="is for the node gpu-2, not for gpu-1"):
            await maintenance.ask("gpu-1", read_policy({}))
        assert maintenance.of("gpu-1") == "missing"

    run_virtual(story())


def test_an_operator_that_refuses_is_told_once() -> None:
    """Its webhook says no: one Event with its words, and it is tried again until it says yes."""
    world = fleet_of()

    async def story(world: FleetWorld, replica: Replica) -> None:
        def no() -> ClusterError:
            return ClusterError("admission webhook denied the request: the node is being provisioned")

        world.faults.on("make_maintenance", Fail(no), times=5)
        world.new_driver("two")
        await until_done(world)
        told = [note.sentence for _, _, note in world.store.notes if "webhook" in note.sentence]
        assert len(told) == 1

    play(world, story, maintenance=ON)


@pytest.mark.parametrize(
    ("policy", "drain", "waits"),
    [
        ({}, {"force": False, "timeoutSeconds": 300, "deleteEmptyDir": False}, None),
        (
            {"podDeletion": {"force": True, "timeoutSeconds": 9, "deleteEmptyDir": True}, "waitForCompletion": {"podSelector": "a=b"}},
            {"force": True, "timeoutSeconds": 9, "deleteEmptyDir": True},
            {"podSelector": "a=b", "timeoutSeconds": 0},
        ),
        (
            {"drain": {"enable": True, "force": True, "podSelector": "x!=y", "timeoutSeconds": 7}},
            {"force": True, "podSelector": "x!=y", "timeoutSeconds": 7, "deleteEmptyDir": False},
            None,
        ),
    ],
)
def test_what_the_operator_is_told(policy: dict[str, Any], drain: dict[str, Any], waits: dict[str, Any] | None) -> None:
    """A drain is a drain of everybody; without one only pods with GPUs are evicted, by the limits of the pod deletion."""
    read = read_policy(policy)
    spec = drain_spec(read)
    assert {key: value for key, value in spec.items() if key != "podEvictionFilters"} == drain
    assert ("podEvictionFilters" in spec) is not read.drain.enable
    assert wait_spec(read) == waits
