"""The Fleet contract, parking: what the admission policies of deploy/parking do to pods, and how that is seen."""

from __future__ import annotations

import pytest

from driver_manager import names
from driver_manager.core.fleet import Kind
from driver_manager.core.parking import Tried
from driver_manager.core.snapshot import PodView
from driver_manager.kube.fleetcalls import CLUSTER_RULES, NAMESPACE_RULES
from driver_manager.ports import NodePatch
from tests.contract.fleetstage import FleetStage, following
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
        await sets.when(
            lambda now: "exporter" in now.sets and not now.sets["exporter"].is_rolling and not now.sets["exporter"].missing, "the DaemonSet"
        )
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
            await sets.when(lambda now: now.sets["exporter"].missing == 1, "a pod to be missing")
        await fleet.patch_node(NodePatch(name=node, labels={names.PARKED: None}, annotations={names.PARKED: None}))
        await until(lambda: is_tried(Tried.LET_IN), "the end of it")
        if way == "gate":
            await fleet.evict(PodView(namespace=pod.namespace, name=pod.name, uid=pod.uid))
        await gated.when(lambda now: not now.pods, "nobody to be gated")
        assert await fleet.gated_for(node) == ()
        await sets.when(lambda now: not now.sets["exporter"].missing, "nobody to be missing")
        await pod_on(fleet_stage, node)


async def pod_on(stage: FleetStage, node: str) -> PodView:
    """The exporter's pod on a node, as soon as it is ready."""

    async def look() -> PodView | None:
        pods = (await stage.fleet.pods_on(node)).items
        return next((pod for pod in pods if pod.labels.get("app") == "exporter" and pod.is_ready and not pod.is_terminating), None)

    found: PodView = await until(look, "the exporter's pod")
    return found
