"""What the simulated cluster does beyond the contract: time spans that nobody waits for on a real one, and trouble on demand."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from driver_manager import names
from driver_manager.core.snapshot import ChangeKind, PodChange, PodList, Taint, Toleration
from driver_manager.errors import Conflict, EvictionBlocked, Forbidden, NotFound, Unreachable
from driver_manager.ports import NodePatch
from driver_manager.sim.clock import run_virtual
from driver_manager.sim.objects import ALL_OF_GRACE, NEVER, PodSpec
from driver_manager.sim.world import World

NODE = "gpu-1"


def world_with_node(seed: int = 0, **options: Any) -> World:
    world = World(seed)
    world.add_node(NODE, **options)
    return world


def play(story: Coroutine[Any, Any, None]) -> None:
    run_virtual(story)


def now() -> float:
    return asyncio.get_running_loop().time()


async def gone_after(world: World, namespace: str, start: str) -> float:
    """Seconds until a pod is out of the API."""
    pod, began = world.pod(namespace, start), now()
    while not pod.is_gone:
        await asyncio.sleep(0.01)
        assert now() - began < 10_000
    return now() - began


@pytest.mark.parametrize(("stop", "grace", "expected"), [(2.0, 30, 2.0), (ALL_OF_GRACE, 30, 30.0), (60.0, 5, 5.0), (0.0, 30, 0.0)])
def test_pods_stop_in_their_time(stop: float, grace: int, expected: float) -> None:
    """The stop time, cut off by the grace period."""

    async def story() -> None:
        world = world_with_node()
        pod = world.add_pod("p", PodSpec(stop_seconds=stop, grace_seconds=grace), node=NODE)
        await world.cluster().evict(pod.view())
        assert await gone_after(world, "default", "p") == pytest.approx(expected, abs=0.1)

    play(story())


def test_a_pod_that_never_stops() -> None:
    """It hangs in Terminating, has no successor, and goes by force alone; its process stays on the machine even then."""

    async def story() -> None:
        world = world_with_node(labels={"a": "b"}, with_machine=True)
        world.machine(NODE).install()
        world.add_daemon_set("ds", PodSpec(stop_seconds=NEVER, node_selector={"a": "b"}, devices=("/dev/nvidiactl",)))
        pod = world.pod("gpu-operator", "ds")
        world.delete_pod(pod)
        await asyncio.sleep(3600)
        assert [one.uid for one in world.pods(NODE)] == [pod.uid]
        world.delete_pod(pod, 0)
        await asyncio.sleep(1)
        assert [one.uid for one in world.pods(NODE)] != [pod.uid]
        assert pod.uid in {one.pod_uid for one in world.machine(NODE).scan().holders}

    play(story())


def test_processes_outlive_pods() -> None:
    """The device is held some seconds longer than the pod's containers ran, and the module's count shows it."""

    async def story() -> None:
        world = world_with_node(gpus=2, with_machine=True)
        machine = world.machine(NODE)
        machine.install()
        pod = world.add_pod("p", PodSpec(gpus=2, stop_seconds=1.0, lag_seconds=3.0), node=NODE)
        (holder,) = machine.scan().holders
        assert holder.devices == ("/dev/nvidia-uvm", "/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl")
        assert (holder.pod_uid, machine.refcount("nvidia"), machine.refcount("nvidia_uvm")) == (pod.uid, 5, 1)
        life = world.life(NODE)
        await life.cluster.evict(pod.view())
        await gone_after(world, "default", "p")
        assert machine.refcount("nvidia_uvm") == 1
        await life.host.wait_for_change([holder.pid], 60)
        assert now() == pytest.approx(4, abs=0.1)
        assert machine.refcount("nvidia") == 2

    play(story())


@pytest.mark.parametrize(
    ("limits", "may_go"),
    [({"min_available": "50%"}, 2), ({"max_unavailable": "25%"}, 1), ({"min_available": 4}, 0), ({"max_unavailable": 0}, 0)],
)
def test_budgets_in_shares(limits: dict[str, int | str], may_go: int) -> None:
    """Of four replicas; shares are rounded up."""

    async def story() -> None:
        world = world_with_node()
        world.add_deployment("web", PodSpec(stop_seconds=100.0, grace_seconds=100, start_seconds=1000.0), replicas=4, node=NODE)
        world.add_budget("budget", {"app": "web"}, **limits)  # type: ignore[arg-type]  # a table of keywords
        cluster, accepted = world.cluster(), 0
        for pod in (await cluster.pods_on(NODE)).items:
            try:
                await cluster.evict(pod)
            except EvictionBlocked:
                continue
            accepted += 1
        assert accepted == may_go

    play(story())


def test_an_edited_budget_is_not_counted_yet() -> None:
    """Until its controller has looked evictions are refused with ten seconds to wait, then by its numbers."""

    async def story() -> None:
        world = world_with_node()
        pod = world.add_pod("p", PodSpec(labels={"app": "web"}), node=NODE).view()
        budget = world.add_budget("budget", {"app": "web"}, min_available=1)
        cluster = world.cluster()
        world.set_budget(budget, min_available=0)
        with pytest.raises(EvictionBlocked, match="still being processed") as caught:
            await cluster.evict(pod)
        assert caught.value.retry_after == 10
        await asyncio.sleep(1)
        await cluster.evict(pod)

    play(story())


def test_replacements_go_elsewhere() -> None:
    """A cordoned node gets no replacement; where there is no room it stays Pending, and goes when there is."""

    async def story() -> None:
        world = world_with_node(gpus=2)
        world.add_deployment("train", PodSpec(gpus=1), replicas=2, node=NODE)
        cluster = world.cluster()
        await cluster.patch_node(NodePatch(name=NODE, unschedulable=True))
        for pod in (await cluster.pods_on(NODE)).items:
            await cluster.evict(pod)
        await asyncio.sleep(5)
        assert world.pods(NODE) == []
        assert [pod.phase for pod in world.pods()] == ["Pending", "Pending"]
        world.add_node("gpu-2", gpus=1)
        await asyncio.sleep(5)
        assert [pod.phase for pod in world.pods("gpu-2")] == ["Running"]
        await cluster.patch_node(NodePatch(name=NODE, unschedulable=False))
        await asyncio.sleep(5)
        assert [pod.phase for pod in world.pods(NODE)] == ["Running"]

    play(story())


def test_refused_creates_back_off() -> None:
    """About eleven tries in twelve seconds, each noted; the pod comes soon after the refusals end."""

    async def story() -> None:
        world = world_with_node(labels={"a": "b"})
        daemon_set = world.add_daemon_set("ds", PodSpec(node_selector={"a": "b"}))
        world.refuse_creates(daemon_set, "parked")
        world.delete_pod(world.pod("gpu-operator", "ds"))
        await asyncio.sleep(12)
        tries = [entry for entry in world.store.diary if entry.what == "FailedCreate"]
        assert 9 <= len(tries) <= 14
        world.refuse_creates(daemon_set, None)
        await asyncio.sleep(20)
        assert len(world.pods(NODE)) == 1

    play(story())


def test_mirror_pods_come_back() -> None:
    """The API lets them be evicted; the kubelet makes the mirror again, with another uid."""

    async def story() -> None:
        world = world_with_node()
        pod = world.add_mirror_pod("etcd", node=NODE).view()
        assert pod.owner is not None
        assert pod.owner.kind == "Node"
        await world.cluster().evict(pod)
        await asyncio.sleep(5)
        (again,) = world.pods(NODE)
        assert (again.name, again.uid != pod.uid, names.MIRROR in again.annotations) == (pod.name, True, True)

    play(story())


def test_no_execute_throws_out() -> None:
    """Pods go that do not tolerate the taint."""

    async def story() -> None:
        world = world_with_node()
        world.add_pod("weak", node=NODE)
        strong = world.add_pod("strong", PodSpec(tolerations=(Toleration("", "Exists"),)), node=NODE)
        world.edit_node(NODE, taints=(Taint("bad", "", "NoExecute"),))
        await asyncio.sleep(1)
        assert [pod.uid for pod in world.pods(NODE)] == [strong.uid]

    play(story())


def test_a_dead_kubelet_moves_nothing() -> None:
    """A pod that is deleted on a dead node hangs until the kubelet is back."""

    async def story() -> None:
        world = world_with_node()
        world.delete_pod(world.add_pod("p", node=NODE))
        world.kubelets.set_down(world.store.nodes[NODE], True)
        await asyncio.sleep(600)
        assert len(world.pods(NODE)) == 1
        world.kubelets.set_down(world.store.nodes[NODE], False)
        await asyncio.sleep(1)
        assert world.pods(NODE) == []

    play(story())


def test_a_gap_in_a_watch_is_closed() -> None:
    """What happened while there was no watch is told by a new list: gone pods as gone, all others as seen."""

    async def story() -> None:
        world = world_with_node()
        for name in ("stays", "goes"):
            world.add_pod(name, node=NODE)
        cluster = world.cluster()
        since = await cluster.pods_on(NODE)
        seen: list[PodChange] = []
        task = asyncio.create_task(_follow(world, since, seen))
        await asyncio.sleep(1)
        world.server.break_watches(10)
        world.delete_pod(world.pod("default", "goes"))
        world.add_pod("comes", node=NODE)
        await asyncio.sleep(9)
        assert seen == []
        await asyncio.sleep(2)
        task.cancel()
        told = {(change.kind, change.pod.name) for change in seen}
        assert told == {(ChangeKind.GONE, "goes"), (ChangeKind.SEEN, "stays"), (ChangeKind.SEEN, "comes")}

    play(story())


def test_an_outage() -> None:
    """Requests fail while the server is away; a watch lives through it."""

    async def story() -> None:
        world = world_with_node()
        pod = world.add_pod("p", node=NODE)
        cluster = world.cluster()
        seen: list[PodChange] = []
        task = asyncio.create_task(_follow(world, await cluster.pods_on(NODE), seen))
        await asyncio.sleep(1)
        world.server.outage(30)
        with pytest.raises(Unreachable):
            await cluster.node(NODE)
        world.delete_pod(pod)
        await asyncio.sleep(31)
        assert (await cluster.node(NODE)).name == NODE
        assert [change.kind for change in seen] == [ChangeKind.GONE]
        task.cancel()

    play(story())


def test_a_revoked_watch() -> None:
    """An account that loses its permission is told when the watch has to begin anew."""

    async def story() -> None:
        world = world_with_node()
        seen: list[PodChange] = []
        task = asyncio.create_task(_follow(world, await world.cluster().pods_on(NODE), seen))
        await asyncio.sleep(1)
        world.default_account.rules = ()
        world.server.break_watches()
        with pytest.raises(Forbidden, match="pods"):
            await asyncio.wait_for(task, 5)

    play(story())


def test_a_node_made_anew() -> None:
    """A deleted node is not found; one of the same name has another uid and older versions are conflicts."""

    async def story() -> None:
        world = world_with_node()
        world.add_pod("p", node=NODE)
        cluster = world.cluster()
        old = await cluster.node(NODE)
        world.remove_node(NODE)
        with pytest.raises(NotFound):
            await cluster.node(NODE)
        assert world.pods() == []
        world.add_node(NODE)
        assert (await cluster.node(NODE)).uid != old.uid
        with pytest.raises(Conflict):
            await cluster.patch_node(NodePatch(name=NODE, resource_version=old.resource_version, labels={"a": "b"}))

    play(story())


def test_a_reboot() -> None:
    """Modules, mounts, /run and processes are gone, and the boot id is another one."""
    world = world_with_node(with_machine=True)
    machine = world.machine(NODE)
    machine.install()
    machine.add_process("x", ("/dev/nvidia0",))
    before = machine.view()
    machine.reboot()
    after = machine.view()
    assert before.is_loaded
    assert not after.is_loaded
    assert (after.mounts, after.markers, after.state_digest, machine.scan().holders) == ((), (), None, ())
    assert after.boot_id != before.boot_id


async def _follow(world: World, since: PodList, seen: list[PodChange]) -> None:
    async for change in world.cluster().pod_changes(NODE, since):
        seen.append(change)
