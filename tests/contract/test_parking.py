"""The Fleet contract, parking: what the admission policies of deploy/parking do to pods, and how that is seen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from driver_manager import names
from driver_manager.core.fleet import FleetSet, Kind
from driver_manager.core.parking import Tried
from driver_manager.core.parking_term import leaves_parked_nodes
from driver_manager.core.snapshot import PodView
from driver_manager.errors import Conflict, Forbidden
from driver_manager.kube.fleetcalls import CLUSTER_RULES, NAMESPACE_RULES, TEMPLATE_RULES
from driver_manager.ports import NodePatch
from tests.contract.fleetstage import FleetStage, Followed, following
from tests.contract.stage import until

EXPORTER = {"app": "exporter"}


@pytest.mark.parametrize(("way", "tried"), [("gate", Tried.GATED), ("deny", Tried.DENIED)])
async def test_a_parked_daemon_set(fleet_stage: FleetStage, way: str, tried: Tried) -> None:
    """Off a parked node and on all others, by a patch of the node alone; a gated pod is followed, and after its eviction comes another."""
    label = {"park-test": fleet_stage.namespace}
    node, other = await fleet_stage.add_node(label), await fleet_stage.add_node(label)
    await fleet_stage.add_set("exporter", label, EXPORTER, is_parkable=True)
    fleet = await fleet_stage.account(CLUSTER_RULES, NAMESPACE_RULES)
    owner = f"{fleet_stage.namespace}/exporter"
    assert await fleet.has_parking_policy() is False
    assert await fleet.try_pod(fleet_stage.namespace, owner, node) is Tried.LET_IN
    await fleet_stage.install_parking(way)
    assert await fleet.has_parking_policy()

    async def is_tried(wanted: Tried) -> bool:
        return await fleet.try_pod(fleet_stage.namespace, owner, node) is wanted

    async with following(fleet, Kind.PARKABLE_SETS) as sets, following(fleet, Kind.GATED_PODS) as gated:
        await sets.when(lambda now: (found := now.sets_by_ref.get(owner)) and not found.is_rolling and not found.missing, "the DaemonSet")
        view = await fleet_stage.fleet.daemon_set(fleet_stage.namespace, "exporter")
        assert (view.asks_to_be_parked, view.is_rolling, view.pod_labels["app"]) == (True, False, "exporter")
        await fleet.patch_node(NodePatch(name=node, labels={names.PARKED: "true"}, annotations={names.PARKED: f"x/y,{owner}"}))
        await until(lambda: is_tried(tried), "the policy to work")
        assert await fleet.try_pod(fleet_stage.namespace, owner, other) is Tried.LET_IN
        assert await fleet.try_pod(fleet_stage.namespace, "x/z", node) is Tried.LET_IN
        await fleet.evict(await pod_on(fleet_stage, node))
        if way == "gate":
            pod = await gated.when(lambda now: next((each for each in now.pods if each.is_gated), None), "the gated pod")
            assert (pod.node_name, pod.is_bound, pod.is_ready) == (node, False, False)
            assert pod.owner is not None
            assert f"{pod.namespace}/{pod.owner.name}" == owner
            assert [(each.uid, each.owner_ref) for each in await fleet.gated_for(node)] == [(pod.uid, owner)]
            assert await fleet.gated_for(other) == ()
        else:
            await sets.when(lambda now: now.sets_by_ref[owner].missing == 1, "a pod to be missing")
        await fleet.patch_node(NodePatch(name=node, labels={names.PARKED: None}, annotations={names.PARKED: None}))
        await until(lambda: is_tried(Tried.LET_IN), "the end of it")
        if way == "gate":
            await fleet.evict(PodView(namespace=pod.namespace, name=pod.name, uid=pod.uid))
        await gated.when(lambda now: not now.pods, "nobody to be gated")
        assert await fleet.gated_for(node) == ()
        await sets.when(lambda now: not now.sets_by_ref[owner].missing, "nobody to be missing")
        await pod_on(fleet_stage, node)


async def test_one_daemon_set_by_name(fleet_stage: FleetStage) -> None:
    """Told of from before it is made until it is gone, label or not, and of no other one of its namespace; with its status."""
    label = {"park-test": fleet_stage.namespace}
    await fleet_stage.add_node(label)
    fleet = await fleet_stage.account(CLUSTER_RULES, NAMESPACE_RULES)
    told = list[FleetSet | None]()

    async def follow() -> None:
        async for found in fleet.follow_set(f"{fleet_stage.namespace}/agent"):
            told.append(found)

    async def last(is_so: Callable[[FleetSet | None], bool]) -> bool:
        return bool(told) and is_so(told[-1])

    task = asyncio.create_task(follow())
    try:
        await until(lambda: last(lambda found: found is None), "nobody")
        await fleet_stage.add_set("exporter", label, EXPORTER, is_parkable=True)
        await fleet_stage.add_set("agent", label, {"app": "agent"})
        await until(lambda: last(lambda found: found is not None and not found.missing), "the DaemonSet")
        await fleet_stage.delete_set("agent", orphans=False)
        await until(lambda: last(lambda found: found is None), "its end")
        assert {found.name for found in told if found is not None} == {"agent"}
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_a_template_that_leaves_parked_nodes(fleet_stage: FleetStage) -> None:
    """The term goes in and marks the DaemonSet; a parked node's label takes the pod away and back; out again it is the old template."""
    label, ref = {"park-test": fleet_stage.namespace}, f"{fleet_stage.namespace}/exporter"
    node = await fleet_stage.add_node(label)
    await fleet_stage.add_set("exporter", label, EXPORTER, is_parkable=True)
    fleet = await fleet_stage.account((*CLUSTER_RULES, *TEMPLATE_RULES), NAMESPACE_RULES)
    stranger = await fleet_stage.account(CLUSTER_RULES, NAMESPACE_RULES)

    def there(now: Followed) -> FleetSet | None:  # those of other tests may be in other namespaces
        found = now.sets_by_ref.get(ref)
        return found if found is not None and not found.is_rolling else None

    async def marked() -> list[str]:
        return [each.ref for each in await fleet.sets_with_parking_term() if each.ref == ref]

    async def is_away() -> bool:
        return not [pod for pod in (await fleet.pods_on(node)).items if pod.labels.get("app") == EXPORTER["app"]]

    async with following(fleet, Kind.PARKABLE_SETS) as sets, following(fleet, Kind.REVISIONS) as revisions:
        before = await sets.when(there, "the DaemonSet")
        await pod_on(fleet_stage, node)
        with pytest.raises(Forbidden):
            await stranger.set_parking_term(before, is_in=True)
        with pytest.raises(Conflict):
            await fleet.set_parking_term(replace(before, uid="another"), is_in=True)
        assert await marked() == []
        await fleet.set_parking_term(before, is_in=True)
        await sets.when(lambda now: (found := there(now)) and leaves_parked_nodes(found), "the term")
        assert await marked() == [ref]
        await pod_on(fleet_stage, node)
        await fleet.patch_node(NodePatch(name=node, labels={names.PARKED: "true"}))
        await until(is_away, "the pod to be gone")
        await fleet.patch_node(NodePatch(name=node, labels={names.PARKED: None}))
        await pod_on(fleet_stage, node)
        await fleet.set_parking_term(before, is_in=False)
        await sets.when(lambda now: (found := there(now)) and found.is_settled and not found.affinity, "the old template")
        assert await marked() == []
        await revisions.when(lambda now: [each.number for each in now.revisions] == [2, 3], "the first revision to be the newest again")


async def pod_on(stage: FleetStage, node: str) -> PodView:
    """The exporter's pod on a node, as soon as it is ready."""

    async def look() -> PodView | None:
        pods = (await stage.fleet.pods_on(node)).items
        return next((pod for pod in pods if pod.labels.get("app") == "exporter" and pod.is_ready and not pod.is_terminating), None)

    found: PodView = await until(look, "the exporter's pod")
    return found
