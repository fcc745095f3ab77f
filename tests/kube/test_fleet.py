"""The Fleet adapter in what only a real control plane has: restarts, relabelled and failing pods, a hundred watches at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import pytest

from driver_manager.core.fleet import Changed, Kind, Listed
from driver_manager.core.snapshot import ChangeKind, PodList
from driver_manager.kube.fleet import connect_fleet
from driver_manager.kube.fleetcalls import Selection
from tests.contract.fleetreal import HastyClock, KubeFleetStage
from tests.contract.fleetstage import COMPONENT, Followed, following
from tests.kube.controlplane import ControlPlane
from tests.kube.fixtures import NodeFactory
from tests.kube.kubelet import node_manifest

pytestmark = pytest.mark.kube
DRIVER = {"app": "nvidia-driver-daemonset", COMPONENT: "nvidia-driver"}


@pytest.fixture
async def stage(control_plane: ControlPlane, namespace: str, gpu_node: NodeFactory) -> AsyncIterator[KubeFleetStage]:
    """A fleet of the test's own."""
    made = KubeFleetStage(control_plane, namespace, gpu_node)
    await made.open()
    yield made
    await made.close()


async def relabel(stage: KubeFleetStage, name: str, **labels: str | None) -> None:
    """Somebody changes a pod's component or its app."""
    changes = {COMPONENT if key == "component" else key: value for key, value in labels.items()}
    path = f"/api/v1/namespaces/{stage.namespace}/pods/{name}"
    await asyncio.to_thread(stage.cp.patch, path, {"metadata": {"labels": changes}})


def has_component(uid: str, value: str | None) -> Callable[[Followed], bool]:
    """Whether a pod is there with that component."""
    return lambda now: [each.labels.get(COMPONENT) for each in now.pods if each.uid == uid] == [value]


async def test_a_pod_that_is_relabelled(stage: KubeFleetStage) -> None:
    """Between the two ways to be a driver pod it stays one; as something else it is gone, though it runs; and it can come back."""
    node = await stage.add_node()
    await stage.add_set("drv", {"kubernetes.io/hostname": node}, DRIVER)
    async with following(stage.fleet, Kind.DRIVER_PODS) as seen:
        (pod,) = await seen.when(lambda now: now.running(DRIVER["app"]), "the driver pod to run")
        for value in (None, "nvidia-driver", None):
            await relabel(stage, pod.name, component=value)
            await seen.when(has_component(pod.uid, value), f"the component {value}")
            await asyncio.sleep(0.3)
            assert [each.uid for each in seen.pods] == [pod.uid]
        await relabel(stage, pod.name, component="something", app="something")
        await seen.when(lambda now: pod.uid not in now.items, "it to be none of ours")
        await relabel(stage, pod.name, component="nvidia-driver")
        await seen.when(lambda now: pod.uid in now.items, "it to be back")


@pytest.mark.parametrize(
    ("fault", "trouble"), [({"kubelet.sim/image": "missing"}, "ImagePullBackOff"), ({"kubelet.sim/ready": "never"}, "")]
)
async def test_a_pod_in_trouble(control_plane: ControlPlane, stage: KubeFleetStage, fault: dict[str, str], trouble: str) -> None:
    """An image that cannot be pulled is named; a pod that only never becomes ready has no trouble that the API knows of."""
    node = await stage.add_node()
    await asyncio.to_thread(control_plane.patch, f"/api/v1/nodes/{node}", {"metadata": {"annotations": fault}})
    await stage.add_set("drv", {"kubernetes.io/hostname": node}, DRIVER)
    phase = "Pending" if trouble else "Running"
    async with following(stage.fleet, Kind.DRIVER_PODS) as seen:
        (pod,) = await seen.when(lambda now: [each for each in now.pods if (each.phase, each.trouble) == (phase, trouble)], "the trouble")
        assert (pod.is_bound, pod.is_ready, pod.node_name) == (True, False, node)


@pytest.mark.slow
async def test_a_restart_of_the_api_server(own_control_plane: ControlPlane) -> None:
    """Versions from before are too old for it then: the follower lists again, by itself, and misses nothing."""
    cp = own_control_plane
    cp.create("/api/v1/nodes", node_manifest("n1", labels={"fleet": "x"}))
    fleet = await connect_fleet(str(cp.kubeconfig()), HastyClock(), Selection(namespace="default", nodes="fleet=x"))
    try:
        async with following(fleet, Kind.NODES) as seen, following(fleet, Kind.CLUSTER_POLICIES) as policies:
            await seen.listed()
            await policies.when(lambda now: now.events, "the first look")
            for number in range(3):  # of another kind, so the cluster's version grows and the follower's does not
                await asyncio.to_thread(cp.create, "/api/v1/namespaces/default/configmaps", {"metadata": {"name": f"m{number}"}})
            await asyncio.to_thread(cp.kill, "kube-apiserver")
            await asyncio.sleep(1)
            await asyncio.to_thread(cp.restart, "kube-apiserver")
            await asyncio.to_thread(cp.create, "/api/v1/nodes", node_manifest("n2", labels={"fleet": "x"}))
            await asyncio.to_thread(cp.patch, "/api/v1/nodes/n1", {"metadata": {"labels": {"a": "b"}}})
            await seen.when(lambda now: "n2" in now.nodes and now.nodes["n1"].labels.get("a") == "b", "the changes", timeout=40)
        assert sum(isinstance(event, Listed) for event in seen.events) == 2
        assert not [event for event in seen.events if isinstance(event, Changed) and event.change is ChangeKind.GONE]
        assert len(policies.events) == 1
    finally:
        await fleet.close()


async def test_a_hundred_watches_leave_room(stage: KubeFleetStage) -> None:
    """With all kinds and a hundred nodes followed, a request still finds a connection at once."""
    since = PodList((), (await stage.fleet.pods_on("nowhere")).resource_version)

    async def drain(name: str) -> None:
        async for _ in stage.fleet.pod_changes(name, since):
            pass

    async with AsyncExitStack() as stack:
        for kind in Kind:
            await stack.enter_async_context(following(stage.fleet, kind))
        tasks = [asyncio.create_task(drain(f"n{number}")) for number in range(100)]
        await asyncio.sleep(2)
        begun = time.monotonic()
        await asyncio.gather(*(stage.fleet.lease(stage.namespace, f"l{number}") for number in range(10)))
        assert time.monotonic() - begun < 5
        assert not any(task.done() for task in tasks)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
