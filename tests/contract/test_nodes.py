"""The Cluster contract, part 1: nodes, permissions, identity."""

from __future__ import annotations

import dataclasses

import pytest

from driver_manager import names
from driver_manager.core.snapshot import Identity, Rule, Taint
from driver_manager.errors import ClusterError, Conflict, Forbidden, NotFound
from driver_manager.ports import NodePatch
from driver_manager.sim.access import STOCK_ROLE
from tests.contract.stage import READ_ONLY, Stage

OURS = Taint("nvidia.com/gpu-driver-update", "dm-abc", "NoSchedule")
THEIRS = Taint("example.com/theirs", "x", "NoSchedule")


async def test_a_node_that_is_not_there(stage: Stage) -> None:
    """Reading and patching it say NotFound and name it."""
    with pytest.raises(NotFound, match="no-such-node"):
        await stage.cluster.node("no-such-node")
    with pytest.raises(NotFound, match="no-such-node"):
        await stage.cluster.patch_node(NodePatch(name="no-such-node", labels={"a": "b"}))


async def test_one_patch_changes_everything(stage: Stage) -> None:
    """Labels, annotations, taints and the cordon go together, and the answer is the node as it is then."""
    name = await stage.add_node({"keep": "1", "change": "1", "drop": "1"})
    before = await stage.cluster.node(name)
    patch = NodePatch(
        name=name,
        resource_version=before.resource_version,
        labels={"change": "2", "drop": None, "new": ""},
        annotations={"note": "a=b, {c}"},
        unschedulable=True,
        taints=(*before.taints, OURS),
    )
    after = await stage.cluster.patch_node(patch)
    assert after.resource_version != before.resource_version
    assert after.uid == before.uid
    assert (after.labels["keep"], after.labels["change"], after.labels["new"]) == ("1", "2", "")
    assert "drop" not in after.labels
    assert after.annotations["note"] == "a=b, {c}"
    assert after.unschedulable
    assert OURS in after.taints


async def test_the_guard(stage: Stage) -> None:
    """A patch for an older version is refused and changes nothing."""
    name = await stage.add_node()
    old = await stage.cluster.node(name)
    await stage.edit_node(name, labels={"somebody": "was-here"})
    with pytest.raises(Conflict, match="the object has been modified") as caught:
        await stage.cluster.patch_node(NodePatch(name=name, resource_version=old.resource_version, labels={"a": "b"}))
    assert caught.value.transient
    assert "a" not in (await stage.cluster.node(name)).labels


async def test_a_patch_without_guard_is_not_refused(stage: Stage) -> None:
    """Without a version only what is named changes, whoever wrote in between."""
    name = await stage.add_node()
    await stage.edit_node(name, labels={"somebody": "was-here"})
    after = await stage.cluster.patch_node(NodePatch(name=name, labels={"a": "b"}))
    assert (after.labels["somebody"], after.labels["a"]) == ("was-here", "b")


async def test_a_patch_that_changes_nothing(stage: Stage) -> None:
    """The version stays."""
    name = await stage.add_node({"a": "b"})
    before = await stage.cluster.node(name)
    after = await stage.cluster.patch_node(NodePatch(name=name, labels={"a": "b", "not-there": None}, unschedulable=False))
    assert after == before


async def test_taints_are_replaced_as_a_whole(stage: Stage) -> None:
    """Whoever writes the list writes all of it; None leaves it and an empty list clears it."""
    name = await stage.add_node()
    await stage.edit_node(name, taints=(THEIRS,))
    assert (await stage.cluster.patch_node(NodePatch(name=name, taints=(OURS,)))).taints == (OURS,)
    assert (await stage.cluster.patch_node(NodePatch(name=name, labels={"a": "b"}))).taints == (OURS,)
    assert (await stage.cluster.patch_node(NodePatch(name=name, taints=()))).taints == ()


async def test_two_taints_of_one_key_and_effect(stage: Stage) -> None:
    """A node holds one of them; the patch is refused as a whole."""
    name = await stage.add_node()
    twice = (OURS, dataclasses.replace(OURS, value="dm-other"))
    with pytest.raises(ClusterError, match="unique by key and effect"):
        await stage.cluster.patch_node(NodePatch(name=name, taints=twice, labels={"a": "b"}))
    assert "a" not in (await stage.cluster.node(name)).labels


async def test_a_cordon_brings_its_taint(stage: Stage) -> None:
    """The lifecycle controller follows with a write of its own, so the version of our answer is soon an old one."""
    name = await stage.add_node()
    cordoned = await stage.cluster.patch_node(NodePatch(name=name, unschedulable=True))
    tainted = await stage.node_when(name, lambda node: any(taint.key == names.UNSCHEDULABLE_TAINT for taint in node.taints))
    assert tainted.resource_version != cordoned.resource_version
    with pytest.raises(Conflict):
        await stage.cluster.patch_node(NodePatch(name=name, resource_version=cordoned.resource_version, labels={"a": "b"}))
    await stage.cluster.patch_node(NodePatch(name=name, unschedulable=False))
    await stage.node_when(name, lambda node: not node.taints)


async def test_a_lost_cordon_taint_comes_back(stage: Stage) -> None:
    """A patch that forgets the controller's taint loses it only for a moment."""
    name = await stage.add_node()
    await stage.cluster.patch_node(NodePatch(name=name, unschedulable=True))
    await stage.node_when(name, lambda node: bool(node.taints))
    await stage.cluster.patch_node(NodePatch(name=name, taints=(OURS,)))
    await stage.node_when(name, lambda node: len(node.taints) == 2)


@pytest.mark.parametrize("value", ["with space", "-dash-first", "x" * 64])
async def test_a_label_value_that_is_none(stage: Stage, value: str) -> None:
    """It is refused by the server, and it is no conflict that would be tried again."""
    name = await stage.add_node()
    with pytest.raises(ClusterError, match="label") as caught:
        await stage.cluster.patch_node(NodePatch(name=name, labels={"a": value}))
    assert not caught.value.transient


async def test_annotations_have_a_limit(stage: Stage) -> None:
    """256 KiB together."""
    name = await stage.add_node()
    with pytest.raises(ClusterError, match="262144"):
        await stage.cluster.patch_node(NodePatch(name=name, annotations={"a": "x" * 262_145}))


async def test_what_is_not_allowed(stage: Stage) -> None:
    """Each refusal names the verb and the resource; it comes before NotFound."""
    name = await stage.add_node()
    pod = await stage.add_pod("p", node=name)
    other = await stage.account(READ_ONLY)
    assert (await other.node(name)).name == name
    with pytest.raises(Forbidden, match=r'cannot patch resource "nodes"'):
        await other.patch_node(NodePatch(name="no-such-node", labels={"a": "b"}))
    with pytest.raises(Forbidden, match=r'cannot get resource "daemonsets" in API group "apps" in the namespace'):
        await other.daemon_set(stage.namespace, "no-such-daemon-set")
    with pytest.raises(Forbidden, match=r'cannot create resource "pods/eviction"'):
        await other.evict(pod)
    with pytest.raises(Forbidden, match=r'cannot watch resource "pods"'):
        async for _ in other.pod_changes(name, await other.pods_on(name)):
            pass


async def test_permissions(stage: Stage) -> None:
    """The rules say what the account may do; single questions agree with them."""
    other = await stage.account(STOCK_ROLE)
    permissions = await other.permissions(stage.namespace)
    assert not permissions.is_incomplete
    questions = [("patch", "", "nodes"), ("create", "", "pods/eviction"), ("get", "apps", "daemonsets"), ("list", "", "pods")]
    questions += [("create", "", "events"), ("delete", "", "pods"), ("patch", "", "nodes/status"), ("list", "apps", "daemonsets")]
    for verb, group, resource in questions:
        allowed = permissions.allow(verb, group, resource)
        assert allowed == (await other.may(verb, group, resource, stage.namespace)), (verb, resource)
        assert allowed == ((verb, group, resource) in questions[:4])


async def test_an_admin_may_everything(stage: Stage) -> None:
    """A rule with stars covers whatever is asked."""
    assert (await stage.cluster.permissions(stage.namespace)).allow("patch", "", "nodes")
    assert await stage.cluster.may("delete", "example.com", "things", stage.namespace)


async def test_identity(stage: Stage) -> None:
    """A token bound to a pod says which pod and node; an unbound one says nothing of a pod."""
    node = await stage.add_node()
    pod = await stage.add_pod("me", node=node)
    bound = await stage.account(READ_ONLY, pod=pod)
    assert bound.identity == Identity(pod.namespace, pod.name, pod.uid, node)
    unbound = await stage.account((Rule(frozenset({"get"}), frozenset({""}), frozenset({"nodes"})),))
    assert (unbound.identity.pod_name, unbound.identity.pod_uid, unbound.identity.node_name) == ("", "", "")
