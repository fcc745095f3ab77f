"""What the simulated fleet does beyond the contract of its port: time spans, misbehaving drivers, and watches that lag, break and lie."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from driver_manager.core.fleet import Changed, FleetEvent, FleetPod, Kind, LeaseView, Listed, NotServed
from driver_manager.core.snapshot import ChangeKind, NodeView
from driver_manager.errors import Conflict, Forbidden, Unreachable
from driver_manager.ports import NodePatch
from driver_manager.sim.clock import run_virtual
from driver_manager.sim.faults import Fail
from driver_manager.sim.fleetworld import NAMESPACE, FleetWorld
from driver_manager.sim.gpunodes import Fate
from driver_manager.sim.objects import Cascade, DaemonSet, Node, Pod
from driver_manager.sim.store import Object
from driver_manager.sim.world import AgentLife

NODE = "gpu-1"


def play(story: Coroutine[Any, Any, None]) -> None:
    run_virtual(story)


def now() -> float:
    return asyncio.get_running_loop().time()


def small(nodes: int = 1, **options: Any) -> FleetWorld:
    world = FleetWorld(7, nodes=nodes, **options)
    world.store.timers.bind()
    return world


def driver(world: FleetWorld, node: str = NODE) -> Pod:
    """The one driver pod of a node that is not on its way out."""
    (found,) = [pod for pod in world.driver_pods(node) if pod.marked_at is None]
    return found


async def replace_driver(world: FleetWorld, node: str = NODE, **conduct: Any) -> Pod:
    """Deletes the driver pod of a node and gives its successor, which behaves so."""
    old = driver(world, node)
    if conduct:
        world.behave(node, **conduct)
    await world.client().delete_pod(old.namespace, old.name, old.uid)
    while not old.is_gone or not [pod for pod in world.driver_pods(node) if pod.marked_at is None]:
        await asyncio.sleep(0.01)
    return driver(world, node)


class Follower:
    """Follows a kind for as long as the test runs."""

    def __init__(self, world: FleetWorld, kind: Kind, life: AgentLife | None = None) -> None:
        self.events: list[tuple[float, FleetEvent]] = []
        self.items: dict[str, Any] = {}
        self._fleet = (life or world.controller()).fleet
        self.task = asyncio.create_task(self._follow(kind))

    async def _follow(self, kind: Kind) -> None:
        async for event in self._fleet.follow(kind):
            self.events.append((now(), event))
            match event:
                case Listed(_, items):
                    self.items = {item.uid: item for item in items}
                case Changed(_, ChangeKind.GONE, item):
                    self.items.pop(item.uid, None)
                case Changed(_, _, item):
                    self.items[item.uid] = item
                case NotServed():
                    self.items = {}

    @property
    def lists(self) -> int:
        """How often it was given a list."""
        return sum(isinstance(event, Listed) for _, event in self.events)


# Nodes --------------------------------------------------------------------------------------------------------------


def test_gpus_go_and_come_back_with_the_driver() -> None:
    """None while there is no Ready driver; back after driver, validator and plugin, one after the other; one fewer where one is lost."""

    async def story() -> None:
        world = small(2, gpu_pods=0, driver_stop=2, driver_start=5, validator=1, devices=1)
        seen: list[tuple[float, int, int]] = []
        view = world.store.nodes[NODE].view

        def watch(one: Object, change: ChangeKind) -> None:
            if isinstance(one, Node) and one.name == NODE:
                seen.append((round(now(), 1), view().allocatable["nvidia.com/gpu"], view().capacity["nvidia.com/gpu"]))

        world.on_change(watch)
        await replace_driver(world)
        await asyncio.sleep(20)
        assert seen == [(2.0, 0, 8), (9.0, 8, 8)]
        world.behave("gpu-2", lost_gpus=1)
        await replace_driver(world, "gpu-2")
        await asyncio.sleep(20)
        assert world.node("gpu-2").allocatable == world.node("gpu-2").capacity == {"nvidia.com/gpu": 7}

    play(story())


def test_a_driver_that_stays_away_takes_the_capacity_too() -> None:
    """After five minutes without a device plugin the kubelet forgets that there were GPUs."""

    async def story() -> None:
        world = small(gpu_pods=0)
        await replace_driver(world, driver=Fate.NEVER_READY)
        await asyncio.sleep(250)
        assert world.node(NODE).capacity == {"nvidia.com/gpu": 8}
        await asyncio.sleep(60)
        assert world.node(NODE).capacity == {"nvidia.com/gpu": 0}

    play(story())


def test_gpu_pods_come_back_with_the_gpus() -> None:
    """An evicted one waits until its node has GPUs again."""

    async def story() -> None:
        world = small(gpu_pods=2)
        fleet = world.client()
        await fleet.patch_node(NodePatch(name=NODE, unschedulable=True))
        for pod in (await fleet.pods_on(NODE)).items:
            if pod.resources:
                await fleet.evict(pod)
        await replace_driver(world)
        await fleet.patch_node(NodePatch(name=NODE, unschedulable=False))
        await asyncio.sleep(4)
        assert not [pod for pod in world.pods(NODE) if pod.resources]
        await asyncio.sleep(4)
        assert len([pod for pod in world.pods(NODE) if pod.resources and pod.is_ready]) == 2
        assert [deed.uid for deed in world.deeds("delete", NODE) if deed.who == world.account.name][-1]
        assert len(world.deeds("evict", NODE)) == 2
        assert not world.unavailable

    play(story())


def test_a_node_that_is_not_ready() -> None:
    """Its pods are not Ready and nothing moves on it; afterwards all goes on."""

    async def story() -> None:
        world = small()
        world.set_node_ready(NODE, False)
        assert not world.node(NODE).is_ready
        assert world.not_ready == world.driverless == {NODE}
        old = driver(world)
        await world.client().delete_pod(old.namespace, old.name, old.uid)
        await asyncio.sleep(600)
        assert old.ref in world.store.pods
        world.set_node_ready(NODE, True)
        await asyncio.sleep(20)
        assert old.ref not in world.store.pods
        assert world.unavailable == set()

    play(story())


def test_a_node_made_anew() -> None:
    """Followers see the old one go and the new one come, with another uid; its pods and GPUs come in their time."""

    async def story() -> None:
        world = small()
        nodes = Follower(world, Kind.NODES)
        await asyncio.sleep(1)
        (old,) = nodes.items.values()
        world.make_node_anew(NODE)
        await asyncio.sleep(0.5)
        (new,) = nodes.items.values()
        assert (new.name, new.uid != old.uid, new.allocatable["nvidia.com/gpu"]) == (NODE, True, 0)
        await asyncio.sleep(20)
        assert world.node(NODE).allocatable["nvidia.com/gpu"] == 8
        assert all(pod.is_ready for pod in world.pods(NODE))
        assert len(world.pods(NODE)) == 4

    play(story())


# Drivers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fate", "phase", "trouble"),
    [
        (Fate.READY, "Running", ""),
        (Fate.NEVER_READY, "Running", ""),
        (Fate.CRASHES, "Running", "CrashLoopBackOff"),
        (Fate.NO_IMAGE, "Pending", "ImagePullBackOff"),
    ],
)
def test_fates_of_a_driver_pod(fate: Fate, phase: str, trouble: str) -> None:
    """What a follower sees after a minute; those that do badly become Ready when they recover, and the validator follows."""

    async def story() -> None:
        world = small()
        new = await replace_driver(world, driver=fate, recovers_after=600)
        await asyncio.sleep(60)
        seen = new.fleet_view()
        assert (seen.phase, seen.is_ready, seen.trouble) == (phase, fate is Fate.READY, trouble)
        assert (seen.restarts > 1) == (fate is Fate.CRASHES)
        await asyncio.sleep(600)
        assert new.fleet_view().is_ready
        assert new.fleet_view().trouble == ""
        assert all(pod.is_ready for pod in world.pods(NODE) if pod.labels.get("app") == "nvidia-operator-validator")

    play(story())


def test_restarts_pass_ten() -> None:
    """A driver that crashes for ever is restarted with growing pauses, and more than ten times within an hour."""

    async def story() -> None:
        world = small()
        new = await replace_driver(world, driver=Fate.CRASHES)
        await asyncio.sleep(3600)
        assert 10 < new.restarts < 30

    play(story())


@pytest.mark.parametrize("goes", [True, False])
def test_validators(goes: bool) -> None:
    """One that goes with the driver is Ready only after the new driver; one that stays is Ready all the time; one that never is, is not."""

    async def story() -> None:
        world = small(validator=3, validator_goes=goes)
        pods = Follower(world, Kind.VALIDATOR_PODS)
        await asyncio.sleep(1)
        (old,) = pods.items.values()
        await replace_driver(world)
        await asyncio.sleep(7)
        assert [pod.is_ready for pod in pods.items.values()] == [not goes]
        await asyncio.sleep(3)
        assert [(pod.uid == old.uid, pod.is_ready) for pod in pods.items.values()] == [(not goes, True)]
        world.behave(validator_seconds=float("inf"))
        await replace_driver(world)
        await asyncio.sleep(1000)
        assert [pod.is_ready for pod in pods.items.values()] == [not goes]

    play(story())


# DaemonSets ---------------------------------------------------------------------------------------------------------


def test_a_new_template_touches_no_pod() -> None:
    """Its revision comes a moment after; pods keep their hash until they are deleted; a roll-back renumbers the first revision."""

    async def story() -> None:
        world = small(2)
        sets, revisions = Follower(world, Kind.DAEMON_SETS), Follower(world, Kind.REVISIONS)
        await asyncio.sleep(1)
        name = world.driver_set().name
        (first,) = [one for one in revisions.items.values() if one.name.startswith(name)]
        world.new_driver("two")
        await asyncio.sleep(0.005)
        assert [one.is_settled for one in sets.items.values() if one.name == name] == [False]
        await asyncio.sleep(1)
        assert [one.is_settled for one in sets.items.values() if one.name == name] == [True]
        assert [one.digest for one in revisions.items.values() if one.name.startswith(name)] == ["one", "two"]
        assert {pod.fleet_view().revision for pod in world.driver_pods()} == {first.hash}
        new = await replace_driver(world)
        assert (new.fleet_view().digest, new.fleet_view().revision != first.hash) == ("two", True)
        world.new_driver("one")
        await asyncio.sleep(1)
        newest = max((one for one in revisions.items.values() if one.name.startswith(name)), key=lambda one: one.number)
        assert (newest.uid, newest.hash, newest.number) == (first.uid, first.hash, 3)

    play(story())


def test_a_rolling_update() -> None:
    """With that strategy one pod after another is replaced, never two at once."""

    async def story() -> None:
        world = small(3, on_delete=False, gpu_pods=0, validator=None)
        worst = 0

        def watch(one: Object, change: ChangeKind) -> None:
            nonlocal worst
            worst = max(worst, len(world.driverless))

        world.on_change(watch)
        world.new_driver("two")
        await asyncio.sleep(60)
        assert [pod.spec.digest for pod in world.driver_pods()] == ["two"] * 3
        assert worst == 1

    play(story())


def test_orphans_are_adopted_and_relabelled_pods_let_go() -> None:
    """Orphan deletion leaves pods and revisions; the same selector takes both; a pod whose labels go gets a sister beside it."""

    async def story() -> None:
        world = small(2)
        pods, sets, revisions = (Follower(world, kind) for kind in (Kind.DRIVER_PODS, Kind.DAEMON_SETS, Kind.REVISIONS))
        await asyncio.sleep(1)
        old, uids = world.driver_set(), {pod.uid for pod in world.driver_pods()}
        world.delete_daemon_set(old, Cascade.ORPHAN)
        await asyncio.sleep(1)
        assert [pod.is_orphan for pod in pods.items.values()] == [True, True]
        assert old.uid not in sets.items
        assert [one.owner_uid for one in revisions.items.values() if one.name.startswith(old.name)] == [""]
        new = DaemonSet(namespace=NAMESPACE, name="other", uid=world.store.uid(), spec=old.spec)
        world.put_daemon_set(new)
        await asyncio.sleep(1)
        assert {pod.uid for pod in pods.items.values() if pod.owner == new.owner} == uids
        assert [one.owner_uid for one in revisions.items.values() if one.name.startswith(old.name)] == [new.uid]
        world.relabel_pod(driver(world), {"app": "something-else"})
        await asyncio.sleep(10)
        assert sorted(pod.is_orphan for pod in pods.items.values() if pod.node_name == NODE) == [False, True]

    play(story())


@pytest.mark.parametrize("cascade", [Cascade.BACKGROUND, Cascade.FOREGROUND])
def test_a_deleted_daemon_set_takes_its_pods(cascade: Cascade) -> None:
    """Before it goes, or after."""

    async def story() -> None:
        world = small(2)
        gone_with: list[int] = []

        def watch(one: Object, change: ChangeKind) -> None:
            if isinstance(one, DaemonSet) and change is ChangeKind.GONE:
                gone_with.append(len(world.driver_pods()))

        world.on_change(watch)
        world.delete_daemon_set(world.driver_set(), cascade)
        await asyncio.sleep(10)
        assert gone_with == [2 if cascade is Cascade.BACKGROUND else 0]
        assert world.driver_pods() == []

    play(story())


def test_pools_have_drivers_of_their_own() -> None:
    """One NVIDIADriver and one DaemonSet each; a new driver for one leaves the other alone."""

    async def story() -> None:
        world = small(4, pools=("a", "b"))
        drivers = Follower(world, Kind.NVIDIA_DRIVERS)
        await asyncio.sleep(1)
        assert {one.name for one in drivers.items.values()} == {"a", "b"}
        world.new_driver("two", pool="b")
        await asyncio.sleep(1)
        assert [world.driver_set(pool).spec.digest for pool in ("a", "b")] == ["one", "two"]
        owners = sorted(pod.owner.name for pod in world.driver_pods() if pod.owner)
        assert owners == ["nvidia-gpu-driver-a"] * 2 + ["nvidia-gpu-driver-b"] * 2

    play(story())


# Watches ------------------------------------------------------------------------------------------------------------


def test_a_break_is_closed_by_a_list() -> None:
    """What happens while there is no watch is in the next list; an outage is lived through; 410 lists again at once."""

    async def story() -> None:
        world = small(2)
        nodes = Follower(world, Kind.NODES)
        await asyncio.sleep(1)
        world.server.break_watches(10)
        world.edit_node(NODE, labels={"a": "1"})
        await asyncio.sleep(5)
        assert nodes.lists == 1
        await asyncio.sleep(6)
        assert [one.labels.get("a") for one in nodes.items.values()] == ["1", None]
        world.server.outage(30)
        world.remove_node("gpu-2")
        await asyncio.sleep(31)
        assert (nodes.lists, [one.name for one in nodes.items.values()]) == (3, [NODE])
        world.feeds.expire(Kind.NODES)
        await asyncio.sleep(0.1)
        assert nodes.lists == 4
        assert not [event for _, event in nodes.events if isinstance(event, Changed)]

    play(story())


def test_lagging_events_keep_their_order() -> None:
    """They come late, none overtakes another, and nothing is lost."""

    async def story() -> None:
        world = small()
        world.faults.watches.longest_lag = 3.0
        nodes = Follower(world, Kind.NODES)
        await asyncio.sleep(1)
        for number in range(20):
            world.edit_node(NODE, labels={"a": str(number)})
            await asyncio.sleep(0.5)
        await asyncio.sleep(5)
        changes = [(at, event.item.labels["a"]) for at, event in nodes.events if isinstance(event, Changed)]  # type: ignore[union-attr]
        assert [value for _, value in changes] == [str(number) for number in range(20)]
        late = [at - 1 - 0.5 * int(value) for at, value in changes]
        assert max(late) > 1
        assert min(late) > 0

    play(story())


def test_a_stale_list_is_caught_up_with() -> None:
    """It answers with an older state, in which a gone pod is still there; what it missed follows, and the end is the truth."""

    async def story() -> None:
        world = small(4)
        world.faults.watches.longest_stale, world.faults.watches.stale_rate = 20.0, 1.0
        followers = {kind: Follower(world, kind) for kind in (Kind.DRIVER_PODS, Kind.NODES)}
        await asyncio.sleep(1)
        old_ones = 0
        for node in [f"gpu-{number}" for number in (1, 2, 3, 4)] * 3:
            gone = driver(world, node).uid
            await replace_driver(world, node)
            for kind in followers:
                world.feeds.expire(kind)
            await asyncio.sleep(1)
            last = [event for _, event in followers[Kind.DRIVER_PODS].events if isinstance(event, Listed)][-1]
            old_ones += any(item.uid == gone for item in last.items)
        await asyncio.sleep(30)
        assert old_ones > 2
        assert followers[Kind.DRIVER_PODS].items == {pod.uid: pod.fleet_view() for pod in world.driver_pods()}
        assert followers[Kind.NODES].items == {node.uid: node.view() for node in world.store.nodes.values()}

    play(story())


def test_a_list_that_fails_is_tried_again() -> None:
    """Whatever the error, but for a missing permission."""

    async def story() -> None:
        world = small()
        world.faults.on("follow", Fail(lambda: Unreachable("Too many requests, please try again later.", retry_after=1.0)), times=3)
        nodes = Follower(world, Kind.NODES)
        await asyncio.sleep(5)
        assert nodes.lists == 1
        world.account.rules = ()
        world.server.break_watches()
        with pytest.raises(Forbidden, match="nodes"):
            await asyncio.wait_for(nodes.task, 5)

    play(story())


def test_a_custom_resource_is_looked_for_each_minute() -> None:
    """One word that it is not served, then a list within a minute of its coming."""

    async def story() -> None:
        world = small()
        drivers = Follower(world, Kind.NVIDIA_DRIVERS)
        await asyncio.sleep(150)
        assert [event for _, event in drivers.events] == [NotServed(Kind.NVIDIA_DRIVERS)]
        world.serve("NVIDIADriver")
        world.set_policy("NVIDIADriver", "one", is_default=True)
        await asyncio.sleep(60)
        assert [one.name for one in drivers.items.values()] == ["one"]

    play(story())


# Lives and trouble --------------------------------------------------------------------------------------------------


def test_a_dead_controller_hears_and_writes_nothing() -> None:
    """Its watches end with it; the next life lists the world as it is."""

    async def story() -> None:
        world = small()
        life = world.controller()
        nodes = Follower(world, Kind.NODES, life)
        running = asyncio.create_task(life.run(asyncio.wait_for(nodes.task, None)))
        await asyncio.sleep(1)
        life.kill()
        await running
        heard = len(nodes.events)
        world.edit_node(NODE, labels={"a": "1"})
        await asyncio.sleep(1)
        assert len(nodes.events) == heard
        assert [one.labels["a"] for one in (await _listed(world)).items if isinstance(one, NodeView)] == ["1"]

    play(story())


async def _listed(world: FleetWorld) -> Listed:
    event = await anext(world.client().follow(Kind.NODES))
    assert isinstance(event, Listed)
    return event


def test_random_trouble_is_the_same_for_the_same_seed() -> None:
    """All of it at once, twice: the same diary; another seed, another one."""

    async def story(seed: int) -> str:
        world = FleetWorld(seed, nodes=3)
        world.faults.randomly(world.store.rng, 0.2)
        watches = world.faults.watches
        watches.longest_lag, watches.expire_rate, watches.stale_rate, watches.longest_stale = 2.0, 0.1, 0.5, 10.0
        pods, fleet = Follower(world, Kind.DRIVER_PODS), world.client()
        world.new_driver("two")
        for number in range(60):
            await asyncio.sleep(1)
            for pod in list(pods.items.values()):
                if isinstance(pod, FleetPod) and pod.digest == "one" and number % 3 == 0:
                    await _try(fleet.delete_pod(pod.namespace, pod.name, pod.uid))
            await _try(fleet.write_lease(await _lease(world)))
        world.faults.stop()
        await asyncio.sleep(60)
        assert {pod.spec.digest for pod in world.driver_pods()} == {"two"}
        assert world.unavailable == set()
        return world.diary() + str([(at, type(event)) for at, event in pods.events])

    assert run_virtual(story(1)) == run_virtual(story(1))
    assert run_virtual(story(1)) != run_virtual(story(2))


async def _lease(world: FleetWorld) -> LeaseView:
    return world.store.leases.get("driver-manager/x", LeaseView(namespace="driver-manager", name="x"))


async def _try(work: Coroutine[Any, Any, Any]) -> None:
    try:
        await work
    except Exception as error:
        assert isinstance(error, (Conflict, Unreachable)) or "not found" in str(error)  # noqa: PT017


def test_an_observer_that_objects_fails_the_run() -> None:
    """A budget can be checked at every moment; the world itself goes on."""

    async def story() -> None:
        world = small(2)

        def check(one: Object, change: ChangeKind) -> None:
            assert len(world.unavailable) <= 1, "too many"

        world.on_change(check)
        fleet = world.client()
        await fleet.patch_node(NodePatch(name=NODE, unschedulable=True))
        await replace_driver(world, "gpu-2")

    with pytest.raises(AssertionError, match="too many"):
        play(story())
