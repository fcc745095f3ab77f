from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from tests.kube.controlplane import STRATEGIC
from tests.kube.facts.conftest import Note
from tests.kube.recorder import Object
from tests.kube.space import Space, is_marked, is_ready, node_of, until

pytestmark = [pytest.mark.kube, pytest.mark.deep]


async def test_a_daemonset_follows_a_node_label(space: Space, note: Note) -> None:
    """A node label decides whether the pod is there, in both directions, within milliseconds."""
    await space.daemon_set("op", spec={"nodeSelector": {"deploy": "true"}})
    await space.ready("app=op", 3)
    node = space.nodes[0]
    marked, gone, born, up = list[float](), list[float](), list[float](), list[float]()
    for _ in range(8):
        begun = time.monotonic()
        await space.patch_node(0, {"metadata": {"labels": {"deploy": "paused-for-driver-upgrade"}}})
        at, pod = await space.when(lambda kind, p: is_marked(p) and node_of(p) == node, begun)
        assert pod["metadata"]["deletionGracePeriodSeconds"] == 5
        marked.append(at - begun)
        at, pod = await space.when(lambda kind, p: kind == "DELETED" and node_of(p) == node, begun)
        assert pod["status"]["phase"] == "Failed"  # the kubelet reports the containers down before it takes the pod away
        gone.append(at - begun)
        await asyncio.sleep(0.05)
        begun = time.monotonic()
        await space.patch_node(0, {"metadata": {"labels": {"deploy": "true"}}})
        at, pod = await space.when(lambda kind, p: kind == "ADDED" and node_of(p) == node, begun)
        assert "nodeName" not in pod["spec"]  # bound by the scheduler, through metadata.name affinity
        born.append(at - begun)
        at, _ = await space.when(lambda kind, p: is_ready(p) and node_of(p) == node, begun)
        up.append(at - begun)
    note("label_patch_to_pod_marked", marked)
    note("label_patch_to_pod_gone", gone)
    note("label_patch_to_pod_created", born)
    note("label_patch_to_pod_ready", up)


async def revisions(space: Space) -> list[Object]:
    """All ControllerRevisions of the namespace."""
    items: list[Object] = (await space.get(f"{space.apps}/controllerrevisions"))["items"]
    return items


async def set_image(space: Space, name: str, image: str) -> None:
    """Changes the template of a DaemonSet."""
    change = {"spec": {"template": {"spec": {"containers": [{"name": "main", "image": image}]}}}}
    await space.patch(f"{space.apps}/daemonsets/{name}", change, STRATEGIC)


def hash_of(thing: Object) -> str:
    """The label that tells which template a pod or revision is of."""
    return str(thing["metadata"]["labels"]["controller-revision-hash"])


async def test_on_delete_and_revisions(space: Space, note: Note) -> None:
    """OnDelete leaves old pods alone; the hash label tells old from new and names the ControllerRevision."""
    await space.daemon_set("drv")
    old = await space.ready("app=drv", 3)
    (first,) = await revisions(space)
    assert first["metadata"]["name"] == f"drv-{hash_of(first)}"
    assert first["revision"] == 1
    assert {hash_of(pod) for pod in old} == {hash_of(first)}
    assert all(p["metadata"]["labels"]["pod-template-generation"] == "1" for p in old)
    await set_image(space, "drv", "new")

    async def second_revision() -> Any:
        return [r for r in await revisions(space) if r["revision"] == 2]

    (second,) = await until(second_revision, "the second ControllerRevision")
    await asyncio.sleep(0.5)
    assert {p["metadata"]["uid"] for p in await space.pods("app=drv")} == {p["metadata"]["uid"] for p in old}
    status = (await space.get(f"{space.apps}/daemonsets/drv"))["status"]
    note("ondelete_status_after_template_change", status)
    assert status.get("updatedNumberScheduled", 0) == 0
    assert status["numberReady"] == 3
    assert status["observedGeneration"] == 2
    begun = time.monotonic()
    await space.delete_pod(old[0]["metadata"]["name"])
    _, new = await space.when(lambda kind, p: kind == "ADDED" and node_of(p) == old[0]["spec"]["nodeName"], begun)
    assert hash_of(new) == hash_of(second)
    await set_image(space, "drv", "none")

    async def first_is_newest() -> Any:
        return {r["metadata"]["name"]: r["revision"] for r in await revisions(space)}.get(first["metadata"]["name"]) == 3

    await until(first_is_newest, "the first revision to be renumbered, not copied")


async def test_a_successor_can_come_before_the_old_pod_is_gone(space: Space, note: Note) -> None:
    """Once the old pod is terminal (Failed) and marked, the controller makes its successor, though the old object is still there."""
    await space.daemon_set("drv", spec={"nodeSelector": {"kubernetes.io/hostname": space.nodes[0]}})
    (old,) = await space.ready("app=drv", 1)
    path = f"{space.path}/pods/{old['metadata']['name']}"
    await space.patch(path, {"metadata": {"finalizers": ["example.com/hold"]}})
    await space.do("DELETE", path)
    await space.when(lambda kind, p: kind == "ADDED" and p["metadata"]["uid"] != old["metadata"]["uid"])

    async def two() -> Any:
        pods = await space.pods("app=drv")
        return pods if len(pods) == 2 and any(is_ready(p) for p in pods) else None

    both = await until(two, "two pods of one DaemonSet on one node")
    note("two_pods_on_one_node", [(p["status"]["phase"], is_marked(p)) for p in both])
    await space.patch(path, {"metadata": {"finalizers": None}})
    await space.ready("app=drv", 1)


async def test_a_hanging_pod_gets_no_successor(space: Space) -> None:
    """While the old pod is Terminating but Running, its DaemonSet makes no other."""
    await space.daemon_set(
        "drv", spec={"nodeSelector": {"kubernetes.io/hostname": space.nodes[0]}}, annotations={"kubelet.sim/stop-after": "never"}
    )
    (old,) = await space.ready("app=drv", 1)
    await space.delete_pod(old["metadata"]["name"])
    await asyncio.sleep(1.5)
    assert [p["metadata"]["uid"] for p in await space.pods("app=drv")] == [old["metadata"]["uid"]]
    await space.delete_pod(old["metadata"]["name"], "?gracePeriodSeconds=0")


async def test_a_cordon_is_tolerated(space: Space, note: Note) -> None:
    """A cordon brings a taint of its own, which the pods of DaemonSets tolerate: an evicted one comes back."""
    await space.daemon_set("plain")
    await space.ready("app=plain", 3)
    begun = time.monotonic()
    await space.patch_node(0, {"spec": {"unschedulable": True}})

    async def tainted() -> Any:
        return (await space.node())["spec"].get("taints")

    taints = await until(tainted, "the unschedulable taint")
    note("cordon_to_taint_ms", round((time.monotonic() - begun) * 1000))
    assert [(t["key"], t["effect"]) for t in taints] == [("node.kubernetes.io/unschedulable", "NoSchedule")]
    assert taints[0]["timeAdded"]
    pod = await space.pod_on(0, "app=plain")
    added = {f"{t['key'].removeprefix('node.kubernetes.io/')}:{t['effect']}" for t in pod["spec"]["tolerations"]}
    assert added == {
        "not-ready:NoExecute",
        "unreachable:NoExecute",
        "disk-pressure:NoSchedule",
        "memory-pressure:NoSchedule",
        "pid-pressure:NoSchedule",
        "unschedulable:NoSchedule",
    }
    begun, uid = time.monotonic(), pod["metadata"]["uid"]
    await space.delete_pod(pod["metadata"]["name"])
    await space.when(lambda kind, p: is_ready(p) and node_of(p) == space.nodes[0] and p["metadata"]["uid"] != uid, begun)


async def test_our_taint_keeps_new_pods_off(space: Space, note: Note) -> None:
    """A NoSchedule taint leaves a running DaemonSet pod alone, keeps a new one away, and the node is not even desired."""
    await space.daemon_set("plain")
    await space.ready("app=plain", 3)
    node, ours = space.nodes[1], [{"key": "nvidia.com/gpu-driver-update", "value": "run-1", "effect": "NoSchedule"}]
    begun = time.monotonic()
    await space.patch_node(1, {"spec": {"taints": ours}})
    await asyncio.sleep(0.7)
    pod = await space.pod_on(1, "app=plain")
    assert not is_marked(pod)
    await space.delete_pod(pod["metadata"]["name"])
    await space.when(lambda kind, p: kind == "DELETED" and node_of(p) == node, begun)
    await asyncio.sleep(0.5)
    assert not [p for p in await space.pods("app=plain") if node_of(p) == node]
    assert (await space.get(f"{space.apps}/daemonsets/plain"))["status"]["desiredNumberScheduled"] == 2
    begun = time.monotonic()
    await space.patch_node(1, {"spec": {"taints": None}})
    at, _ = await space.when(lambda kind, p: is_ready(p) and node_of(p) == node, begun)
    note("taint_removed_to_pod_ready_ms", round((at - begun) * 1000))


async def orphan(space: Space, name: str, uid: str) -> None:
    """Deletes a DaemonSet and leaves its pods; returns when it is gone."""
    options = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Orphan", "preconditions": {"uid": uid}}
    answer = await space.do("DELETE", f"{space.apps}/daemonsets/{name}", options)
    assert answer["metadata"]["finalizers"] == ["orphan"]
    assert "deletionTimestamp" in answer["metadata"]
    await until(lambda: space.has_status(f"{space.apps}/daemonsets/{name}", 404), "the DaemonSet to go", every=0.002)


def successor(space: Space, name: str, labels: Object) -> Object:
    """A DaemonSet whose selector is these labels."""
    spec: Object = {"containers": [{"name": "main", "image": "new"}]}
    return space.daemon_set_manifest(name, selector=labels, labels=labels, spec=spec)


async def test_orphan_deletion(space: Space, note: Note) -> None:
    """Orphan deletion takes the owner off pods and revisions before the DaemonSet goes, and touches nothing else."""
    made = await space.daemon_set("drv")
    pods = await space.ready("app=drv", 3)
    begun = time.monotonic()
    await orphan(space, "drv", made["metadata"]["uid"])
    note("orphan_delete_to_daemonset_gone_ms", round((time.monotonic() - begun) * 1000))
    left = await space.pods("app=drv")
    assert {p["metadata"]["uid"] for p in left} == {p["metadata"]["uid"] for p in pods}
    assert not any("ownerReferences" in p["metadata"] for p in left)
    (revision,) = await revisions(space)
    assert "ownerReferences" not in revision["metadata"]
    await space.do("POST", f"{space.apps}/daemonsets", successor(space, "other", {"app": "drv", "generation": "2"}), 201)
    await space.ready("generation=2", 3)  # a narrower selector adopts nothing and puts a second pod beside each orphan
    assert len(await space.pods("app=drv")) == 6


async def test_adoption(space: Space, note: Note) -> None:
    """A DaemonSet with the same selector adopts orphans, whatever hash they carry, restarts none, and counts them as updated."""
    made = await space.daemon_set("drv")
    pods = await space.ready("app=drv", 3)
    await orphan(space, "drv", made["metadata"]["uid"])
    begun = time.monotonic()
    new = await space.do("POST", f"{space.apps}/daemonsets", successor(space, "drv-new", {"app": "drv"}), 201)

    async def adopted() -> bool:
        owners = [p["metadata"].get("ownerReferences", [{}])[0].get("uid") for p in await space.pods("app=drv")]
        return owners == [new["metadata"]["uid"]] * 3

    await until(adopted, "adoption", every=0.002)
    note("create_to_adopted_ms", round((time.monotonic() - begun) * 1000))
    await asyncio.sleep(0.5)
    now = await space.pods("app=drv")
    assert {p["metadata"]["uid"] for p in now} == {p["metadata"]["uid"] for p in pods}
    assert {hash_of(p) for p in now} == {hash_of(pods[0])}
    status = (await space.get(f"{space.apps}/daemonsets/drv-new"))["status"]
    # "Updated" also means: label pod-template-generation equals the DaemonSet's annotation, and both are 1 after a migration.
    assert (status["numberReady"], status["updatedNumberScheduled"]) == (3, 3)
    assert new["metadata"]["annotations"]["deprecated.daemonset.template.generation"] == "1"
    assert now[0]["metadata"]["ownerReferences"] == [
        {
            "apiVersion": "apps/v1",
            "kind": "DaemonSet",
            "name": "drv-new",
            "uid": new["metadata"]["uid"],
            "controller": True,
            "blockOwnerDeletion": True,
        }
    ]
    owners = [(r["revision"], r["metadata"].get("ownerReferences", [{}])[0].get("name")) for r in await revisions(space)]
    assert {owner for _, owner in owners} == {"drv-new"}  # the old revision is adopted too
    note("revisions_after_adoption", owners)
