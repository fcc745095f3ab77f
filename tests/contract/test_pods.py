"""The Cluster contract, part 2: lists and watches of pods, and what DaemonSets do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from driver_manager.core.snapshot import ChangeKind, PodChange, PodList, Taint, Toleration
from driver_manager.ports import NodePatch
from tests.contract.stage import Stage, until

OURS = Taint("nvidia.com/gpu-driver-update", "dm-abc", "NoSchedule")
LABEL = "nvidia.com/gpu.deploy.dcgm"


@asynccontextmanager
async def watching(stage: Stage, node: str, since: PodList) -> AsyncIterator[list[PodChange]]:
    """The changes that a watch has seen so far, in a list that grows."""
    seen: list[PodChange] = []

    async def follow() -> None:
        async for change in stage.cluster.pod_changes(node, since):
            seen.append(change)

    task = asyncio.create_task(follow())
    try:
        yield seen
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_a_list_has_the_pods_of_one_node(stage: Stage) -> None:
    """All pods bound to the node, and no others."""
    here, there = await stage.add_node(), await stage.add_node()
    pod = await stage.add_pod("here", node=here, labels={"app": "x"}, gpus=2, grace_seconds=7)
    await stage.add_pod("there", node=there)
    await stage.add_pod("nowhere", node=None)
    (found,) = (await stage.cluster.pods_on(here)).items
    assert (found.uid, found.ref, found.phase) == (pod.uid, f"{stage.namespace}/here", "Running")
    assert found.labels == {"app": "x"}
    assert found.resources == {"nvidia.com/gpu"}
    assert found.grace_seconds == 7
    assert found.owner is None
    assert found.is_ready
    assert {one.key for one in found.tolerations} == {"node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"}


async def test_a_watch_goes_on_from_a_list(stage: Stage) -> None:
    """It tells what happened since the list, also before it was opened, and nothing of other nodes."""
    node, other = await stage.add_node(), await stage.add_node()
    first = await stage.add_pod("first", node=node)
    since = await stage.cluster.pods_on(node)
    second = await stage.add_pod("second", node=node)
    await stage.add_pod("elsewhere", node=other)
    async with watching(stage, node, since) as seen:
        await stage.delete_pod(first)
        await until(lambda: _has(seen, ChangeKind.GONE, first.uid), "the pod to be gone")
    assert any(change.pod.uid == second.uid for change in seen)
    assert {change.pod.uid for change in seen} == {first.uid, second.uid}
    marks = [change.pod.is_terminating for change in seen if change.pod.uid == first.uid]
    assert marks[0]
    gone = [change for change in seen if change.kind is ChangeKind.GONE]
    assert [change.pod.uid for change in gone] == [first.uid]


async def test_a_pod_shows_when_it_is_bound(stage: Stage) -> None:
    """A pod of a DaemonSet is seen Pending or later, and Running in the end."""
    node = await stage.add_node({LABEL: "true"})
    since = await stage.cluster.pods_on(node)
    async with watching(stage, node, since) as seen:
        await stage.add_daemon_set("dcgm", {LABEL: "true", "kubernetes.io/hostname": node})
        pod = await stage.running(node, "dcgm")
        await until(lambda: _runs(seen, pod.uid), "the watch to see it run")
    assert all(change.kind is ChangeKind.SEEN for change in seen)


async def test_a_daemon_set_follows_a_label_both_ways(stage: Stage) -> None:
    """Another value takes the pod off the node, with its stop time; the old value brings a new pod."""
    node = await stage.add_node({LABEL: "true"})
    await stage.add_daemon_set("dcgm", {LABEL: "true", "kubernetes.io/hostname": node}, stop_seconds=0.3)
    pod = await stage.running(node, "dcgm")
    view = await stage.cluster.daemon_set(stage.namespace, "dcgm")
    assert view.node_selector == {LABEL: "true", "kubernetes.io/hostname": node}
    assert pod.owner is not None
    assert (pod.owner.kind, pod.owner.name, pod.owner.uid) == ("DaemonSet", "dcgm", view.uid)
    await stage.cluster.patch_node(NodePatch(name=node, labels={LABEL: "paused-for-driver-upgrade"}))
    await until(lambda: _marked(stage, node, pod.uid), "the pod to be marked")
    await stage.gone(node, pod.uid)
    await asyncio.sleep(0.3)
    assert await stage.pods(node, "dcgm") == []
    await stage.cluster.patch_node(NodePatch(name=node, labels={LABEL: "true"}))
    assert (await stage.running(node, "dcgm")).uid != pod.uid


async def test_a_taint_keeps_the_successor_off(stage: Stage) -> None:
    """A running pod stays under a NoSchedule taint; deleted, it comes back only when the taint is gone."""
    node = await stage.add_node({LABEL: "true"})
    await stage.add_daemon_set("dcgm", {LABEL: "true", "kubernetes.io/hostname": node})
    pod = await stage.running(node, "dcgm")
    before = await stage.cluster.node(node)
    await stage.cluster.patch_node(NodePatch(name=node, resource_version=before.resource_version, taints=(*before.taints, OURS)))
    await asyncio.sleep(0.3)
    assert [one.uid for one in await stage.pods(node, "dcgm")] == [pod.uid]
    await stage.delete_pod(pod)
    await stage.gone(node, pod.uid)
    await asyncio.sleep(0.3)
    assert await stage.pods(node, "dcgm") == []
    await stage.cluster.patch_node(NodePatch(name=node, taints=()))
    assert (await stage.running(node, "dcgm")).uid != pod.uid


async def test_a_tolerated_taint_keeps_nobody_off(stage: Stage) -> None:
    """The pod comes back at once, and a cordon does not hinder it either; its DaemonSet shows what it tolerates itself."""
    toleration = Toleration(OURS.key, "Exists", "", "NoSchedule")
    node = await stage.add_node({LABEL: "true"})
    await stage.add_daemon_set("dcgm", {LABEL: "true", "kubernetes.io/hostname": node}, tolerations=(toleration,))
    pod = await stage.running(node, "dcgm")
    assert (await stage.cluster.daemon_set(stage.namespace, "dcgm")).tolerations == (toleration,)
    assert {one.key for one in pod.tolerations} >= {OURS.key, "node.kubernetes.io/unschedulable", "node.kubernetes.io/not-ready"}
    await stage.cluster.patch_node(NodePatch(name=node, taints=(OURS,), unschedulable=True))
    await stage.delete_pod(pod)
    await stage.gone(node, pod.uid)
    assert (await stage.running(node, "dcgm")).uid != pod.uid


async def test_the_successor_waits_for_the_old_pod(stage: Stage) -> None:
    """While the old pod stops there is no new one: two never run at a time."""
    node = await stage.add_node({LABEL: "true"})
    await stage.add_daemon_set("dcgm", {LABEL: "true", "kubernetes.io/hostname": node}, stop_seconds=0.6)
    pod = await stage.running(node, "dcgm")
    since = await stage.cluster.pods_on(node)
    async with watching(stage, node, since) as seen:
        await stage.delete_pod(pod)
        successor = await stage.running(node, "dcgm")
        await until(lambda: _runs(seen, successor.uid), "the watch to see the successor")
    order = [change.pod.uid for change in seen if change.pod.phase == "Running"]
    assert order.index(successor.uid) > max(index for index, uid in enumerate(order) if uid == pod.uid)


async def test_a_finalizer_holds_the_object_but_not_the_successor(stage: Stage) -> None:
    """A terminal pod that a finalizer keeps has a successor beside it: the old one must be waited for by uid."""
    node = await stage.add_node()
    pod = await stage.add_pod("held", node=node, finalizers=("example.com/hold",))
    await stage.delete_pod(pod)
    await until(lambda: _over(stage, node, pod.uid), "the pod to be over")
    await asyncio.sleep(0.2)
    (found,) = await stage.pods(node)
    assert (found.uid, found.is_terminating, found.finalizers) == (pod.uid, True, ("example.com/hold",))
    await stage.drop_finalizers(pod)
    await stage.gone(node, pod.uid)


async def _has(seen: list[PodChange], kind: ChangeKind, uid: str) -> bool:
    return any(change.kind is kind and change.pod.uid == uid for change in seen)


async def _runs(seen: list[PodChange], uid: str) -> bool:
    return any(change.pod.uid == uid and change.pod.phase == "Running" for change in seen)


async def _marked(stage: Stage, node: str, uid: str) -> bool:
    return any(pod.uid == uid and pod.is_terminating for pod in await stage.pods(node))


async def _over(stage: Stage, node: str, uid: str) -> bool:
    return any(pod.uid == uid and pod.is_over for pod in await stage.pods(node))
