"""The Fleet contract: what the controller follows, and the few things that it writes beside node patches."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest

from driver_manager.core.fleet import Changed, EventNote, Kind, LeaseView, Listed, MaintenanceOrder, NotServed, PolicySource, Subject
from driver_manager.core.snapshot import ChangeKind, NodeView, Rule
from driver_manager.errors import Conflict, Forbidden, NotFound
from driver_manager.kube.fleetcalls import CLUSTER_RULES, MAINTENANCE_RULES, NAMESPACE_RULES
from driver_manager.ports import NodePatch
from tests.contract.fleetstage import COMPONENT, FleetStage, Followed, following
from tests.contract.stage import until

DRIVER = {"app": "nvidia-driver-daemonset", COMPONENT: "nvidia-driver"}
VALIDATOR = {"app": "nvidia-operator-validator"}
THEN = "2026-01-31T09:00:00.000000Z"


def ours(*nodes: str) -> dict[str, str]:
    """A node selector for a single node."""
    return {"kubernetes.io/hostname": nodes[0]}


# Following ----------------------------------------------------------------------------------------------------------


async def test_nodes_come_and_go_with_their_label(fleet_stage: FleetStage) -> None:
    """A list first, then each change; a node whose label goes is gone, one that gets it is there, all others are never seen."""
    there, other = await fleet_stage.add_node({"a": "1"}, gpus=4), await fleet_stage.add_node(is_selected=False)
    async with following(fleet_stage.fleet, Kind.NODES) as seen:
        await seen.listed()
        assert set(seen.nodes) == {there}
        node = seen.nodes[there]
        assert (node.labels["a"], node.is_ready, node.unschedulable) == ("1", True, False)
        assert node.allocatable == node.capacity == {"nvidia.com/gpu": 4}
        written = await fleet_stage.fleet.patch_node(NodePatch(name=there, labels={"a": "2"}, annotations={"b": "3"}))
        assert written == await seen.when(lambda now: written if written in now.nodes.values() else None, "the write")
        await fleet_stage.select_node(there, False)
        await fleet_stage.select_node(other, True)
        await seen.when(lambda now: set(now.nodes) == {other}, "the two to change places")
    changes = [event for event in seen.events if isinstance(event, Changed)]
    assert [event.item.name for event in changes if event.change is ChangeKind.GONE] == [there]
    versions = [int(event.item.resource_version) for event in changes if isinstance(event.item, NodeView)]
    assert versions == sorted(versions)


async def test_a_daemon_set_and_its_revisions(fleet_stage: FleetStage) -> None:
    """Each template makes a revision of its own; a roll-back makes the first one the newest, by its number."""
    node = await fleet_stage.add_node()
    await fleet_stage.add_set("drv", ours(node), DRIVER, digest="one")
    async with following(fleet_stage.fleet, Kind.DAEMON_SETS) as sets, following(fleet_stage.fleet, Kind.REVISIONS) as revisions:
        await sets.when(lambda now: "drv" in now.sets and now.sets["drv"].is_settled, "the DaemonSet")
        drv = sets.sets["drv"]
        assert (drv.ref, drv.is_on_delete, drv.is_deleting) == (f"{fleet_stage.namespace}/drv", True, False)
        assert (drv.pod_labels, drv.node_selector, drv.owner) == (DRIVER, ours(node), None)
        assert drv.fits(ours(node))
        assert not drv.fits({})
        (first,) = await revisions.when(lambda now: now.revisions, "the first revision")
        assert (first.owner_uid, first.number, first.digest) == (drv.uid, 1, "one")
        await fleet_stage.set_digest("drv", "two")
        _, second = await revisions.when(lambda now: len(now.revisions) == 2 and now.revisions, "the second revision")
        assert (second.owner_uid, second.number, second.digest) == (drv.uid, 2, "two")
        assert second.hash != first.hash
        await sets.when(lambda now: now.sets["drv"].is_settled, "the new template to be seen")
        await fleet_stage.set_digest("drv", "one")
        newest = await revisions.when(lambda now: now.revisions[-1].number == 3 and now.revisions[-1], "the roll-back")
        assert (newest.uid, newest.hash) == (first.uid, first.hash)
        await fleet_stage.delete_set("drv", orphans=False)
        await sets.when(lambda now: not now.sets, "the DaemonSet to go")
        await revisions.when(lambda now: not now.revisions, "its revisions to go")


async def test_a_driver_pod_is_replaced_when_it_is_deleted(fleet_stage: FleetStage) -> None:
    """A new template changes nothing; the pod deleted by its uid, the next one is of the newest revision."""
    node = await fleet_stage.add_node()
    await fleet_stage.add_set("drv", ours(node), DRIVER, digest="one")
    async with following(fleet_stage.fleet, Kind.DRIVER_PODS) as seen, following(fleet_stage.fleet, Kind.REVISIONS) as revisions:
        (old,) = await seen.when(lambda now: now.running(DRIVER["app"]), "the driver pod to run")
        assert (old.node_name, old.is_bound, old.digest, old.phase, old.restarts, old.trouble) == (node, True, "one", "Running", 0, "")
        assert old.owner is not None
        assert (old.owner.kind, old.owner.name) == ("DaemonSet", "drv")
        assert old.created
        assert old.revision == revisions.revisions[0].hash
        await fleet_stage.set_digest("drv", "two")
        await revisions.when(lambda now: len(now.revisions) == 2, "the second revision")
        with pytest.raises(Conflict):
            await fleet_stage.fleet.delete_pod(old.namespace, old.name, "not-its-uid")
        await fleet_stage.fleet.delete_pod(old.namespace, old.name, old.uid)
        (new,) = await seen.when(lambda now: old.uid not in now.items and now.running(DRIVER["app"]), "its successor to run")
        assert (new.node_name, new.digest, new.revision) == (node, "two", revisions.revisions[-1].hash)
        with pytest.raises(NotFound):
            await fleet_stage.fleet.delete_pod(old.namespace, old.name, old.uid)
    kinds = [event.change for event in seen.events if isinstance(event, Changed) and event.item.uid == old.uid]
    assert kinds[-1] is ChangeKind.GONE
    assert kinds.count(ChangeKind.GONE) == 1


async def test_which_pods_are_followed(fleet_stage: FleetStage) -> None:
    """Drivers by their component or by ClusterPolicy's `app` label, in one list; validators by their selector; operands by neither."""
    node = await fleet_stage.add_node()
    kinds: dict[str, dict[str, str]] = {
        "by-app": {"app": "nvidia-driver-daemonset"},
        "by-component": {"app": "nvidia-gpu-driver-x", COMPONENT: "nvidia-driver"},
        "vgpu": {"app": "vgpu", COMPONENT: "nvidia-vgpu-host-manager"},
        "validator": VALIDATOR,
        "operand": {"app": "nvidia-dcgm", COMPONENT: "dcgm"},
    }
    async with following(fleet_stage.fleet, Kind.DRIVER_PODS) as before:
        await before.listed()
        for name, labels in kinds.items():
            await fleet_stage.add_set(name, ours(node), labels)
        await before.when(lambda now: len(now.pods) == 3 and all(pod.is_ready for pod in now.pods), "three drivers")
        async with following(fleet_stage.fleet, Kind.VALIDATOR_PODS) as validators, following(fleet_stage.fleet, Kind.DRIVER_PODS) as after:
            (validator,) = await validators.when(lambda now: now.running(VALIDATOR["app"]), "the validator")
            await after.listed()
            assert {pod.uid for pod in after.pods} == {pod.uid for pod in before.pods}
            assert {pod.labels["app"] for pod in after.pods} == {kinds[name]["app"] for name in ("by-app", "by-component", "vgpu")}
            assert validator.owner is not None
            assert validator.owner.name == "validator"


async def test_an_orphan_and_the_pod_that_waits_for_its_place(fleet_stage: FleetStage) -> None:
    """An orphan keeps its labels and has no owner; a pod that cannot be bound tells the node it is meant for, and gets it in the end."""
    node = await fleet_stage.add_node()
    await fleet_stage.add_set("old", ours(node), DRIVER, digest="one")
    async with following(fleet_stage.fleet, Kind.DRIVER_PODS) as seen:
        (pod,) = await seen.when(lambda now: now.running(DRIVER["app"]), "the driver pod to run")
        await fleet_stage.delete_set("old", orphans=True)
        (orphan,) = await seen.when(lambda now: [each for each in now.pods if each.is_orphan], "the pod to be an orphan")
        assert orphan == replace(pod, owner=None)
        await fleet_stage.add_set("new", ours(node), {"app": "new", COMPONENT: "nvidia-driver"}, digest="one", avoids_drivers=True)
        (waiting,) = await seen.when(lambda now: [each for each in now.pods if each.labels["app"] == "new"], "the new pod")
        assert (waiting.node_name, waiting.is_bound, waiting.phase, waiting.is_ready) == (node, False, "Pending", False)
        await fleet_stage.fleet.delete_pod(orphan.namespace, orphan.name, orphan.uid)
        (bound,) = await seen.when(lambda now: now.running("new"), "the new pod to run")
        assert (bound.uid, bound.node_name, bound.is_bound) == (waiting.uid, node, True)
        await seen.when(lambda now: orphan.uid not in now.items, "the orphan to be gone")  # another watch tells it


async def test_slices_of_the_gpu_driver_are_followed(fleet_stage: FleetStage) -> None:
    """Each with its node and number of devices, as they come, change and go; those of other DRA drivers are never seen."""
    node = await fleet_stage.add_node()
    one, other = f"{fleet_stage.namespace}-gpus", f"{fleet_stage.namespace}-others"
    await fleet_stage.publish("others", node, 3, driver="nic.example.com")
    await fleet_stage.publish("gpus", node, 2)
    async with following(fleet_stage.fleet, Kind.SLICES) as seen:
        await seen.listed()
        there = seen.slices[one]
        assert (there.node_name, there.driver, there.pool, there.generation, there.devices) == (node, "gpu.nvidia.com", node, 1, 2)
        await fleet_stage.publish("gpus", node, 1, generation=2)
        changed = await seen.when(lambda now: now.slices[one] if now.slices[one].generation == 2 else None, "the new generation")
        assert (changed.uid, changed.devices) == (there.uid, 1)
        await fleet_stage.unpublish("gpus")
        await seen.when(lambda now: one not in now.slices, "the slice to go")
    assert not [event for event in seen.events if isinstance(event, Changed) and event.item.uid != there.uid and event.item.name == other]
    assert other not in seen.slices


CUSTOM = [(Kind.CLUSTER_POLICIES, "ClusterPolicy"), (Kind.NVIDIA_DRIVERS, "NVIDIADriver")]


@pytest.mark.parametrize(("kind", "custom"), [*CUSTOM, (Kind.MAINTENANCES, "NodeMaintenance")])
async def test_a_custom_resource_is_not_there_and_comes(fleet_stage: FleetStage, kind: Kind, custom: str) -> None:
    """NotServed in place of the first list; a list as soon as there is one, changes, and NotServed again when it is taken away."""
    async with following(fleet_stage.fleet, kind) as seen:
        await seen.when(lambda now: now.events, "the first event")
        assert seen.events == [NotServed(kind)]
        await fleet_stage.serve(custom)
        await seen.listed()
        assert seen.events == [NotServed(kind), Listed(kind, ())]
        if custom == "NodeMaintenance":
            await fleet_stage.fleet.make_maintenance(order_for(fleet_stage, await fleet_stage.add_node()))
        else:
            await fleet_stage.add_custom(custom, "one", {})
        await seen.when(lambda now: now.items, "the object")
        await fleet_stage.serve(custom, is_served=False)
        await seen.when(lambda now: now.events[-1] == NotServed(kind), "the kind to be away again")
        assert not seen.items


async def test_what_a_cluster_policy_says(fleet_stage: FleetStage) -> None:
    """The upgrade policy as it is written, and what decides whether it counts."""
    policy: dict[str, Any] = {"autoUpgrade": True, "maxUnavailable": "25%", "drain": {"enable": False, "timeoutSeconds": 300}}
    await fleet_stage.serve("ClusterPolicy")
    await fleet_stage.add_custom("ClusterPolicy", "a", {"driver": {"enabled": True, "upgradePolicy": policy}})
    async with following(fleet_stage.fleet, Kind.CLUSTER_POLICIES) as seen:
        await seen.listed()
        before = seen.policies["a"]
        assert (before.kind, before.upgrade_policy, before.generation) == ("ClusterPolicy", policy, 1)
        assert (before.has_driver, before.uses_nvidia_driver_crd, before.has_sandbox_workloads) == (True, False, False)
        assert before.created
        change = {"driver": {"enabled": False, "useNvidiaDriverCRD": True}, "sandboxWorkloads": {"enabled": True}}
        await fleet_stage.edit_custom("ClusterPolicy", "a", change)
        after = await seen.when(lambda now: now.policies["a"].generation == 2 and now.policies["a"], "the change")
        assert (after.has_driver, after.uses_nvidia_driver_crd, after.has_sandbox_workloads) == (False, True, True)
        assert after.upgrade_policy == policy


async def test_what_an_nvidia_driver_says(fleet_stage: FleetStage) -> None:
    """Its policy, its nodes, and whether it is the default one; without a policy there is none."""
    await fleet_stage.serve("NVIDIADriver")
    await fleet_stage.add_custom("NVIDIADriver", "a", {"upgradePolicy": {"autoUpgrade": False}, "nodeSelector": {"pool": "a"}})
    await fleet_stage.add_custom("NVIDIADriver", "b", {"default": True})
    async with following(fleet_stage.fleet, Kind.NVIDIA_DRIVERS) as seen:
        await seen.listed()
        one, other = seen.policies["a"], seen.policies["b"]
        assert (one.kind, one.upgrade_policy, one.node_selector, one.is_default) == (
            "NVIDIADriver",
            {"autoUpgrade": False},
            {"pool": "a"},
            False,
        )
        assert (other.upgrade_policy, other.node_selector, other.is_default) == (None, None, True)


async def test_who_may_not_follow(fleet_stage: FleetStage) -> None:
    """It says so at once, also for one of the lists that make up the driver pods, and when the list may be made but not be watched."""
    reader = await fleet_stage.account((Rule(frozenset({"list"}), frozenset({""}), frozenset({"nodes"})),))
    for kind, missing in ((Kind.DRIVER_PODS, 'cannot list resource "pods"'), (Kind.NODES, 'cannot watch resource "nodes"')):
        with pytest.raises(Forbidden, match=missing):
            async with following(reader, kind) as seen:
                await seen.when(lambda _: False, "nothing", timeout=5)


async def test_the_rules_are_enough(fleet_stage: FleetStage) -> None:
    """An account with the controller's rules, and no more, follows every kind and writes all that there is to write."""
    node = await fleet_stage.add_node()
    await fleet_stage.serve("ClusterPolicy")
    await fleet_stage.add_custom("ClusterPolicy", "a", {}, condition="Ready")
    await fleet_stage.add_set("drv", ours(node), DRIVER)
    await fleet_stage.serve("NodeMaintenance")
    fleet = await fleet_stage.account(CLUSTER_RULES, (*NAMESPACE_RULES, *MAINTENANCE_RULES))
    async with AsyncExitStack() as stack:
        seen = {kind: await stack.enter_async_context(following(fleet, kind)) for kind in Kind}
        for kind in set(Kind) - {Kind.NVIDIA_DRIVERS}:
            await seen[kind].listed()
        await seen[Kind.NVIDIA_DRIVERS].when(lambda now: now.events == [NotServed(Kind.NVIDIA_DRIVERS)], "what is not served")
        (pod,) = await seen[Kind.DRIVER_PODS].when(lambda now: now.running(DRIVER["app"]), "the driver pod to run")
        await fleet.patch_node(NodePatch(name=node, labels={"a": "b"}))
        await fleet.evict((await fleet.pods_on(node)).items[0], dry_run=True)
        await fleet.delete_pod(pod.namespace, pod.name, pod.uid)
        await fleet.write_lease(await fleet.write_lease(replace(await fleet.lease(fleet_stage.namespace, "l"), holder="a")))
        await fleet.note_event(EventNote(subject=Subject("Node", node, "u"), reason="R", sentence="s"))
        source = seen[Kind.CLUSTER_POLICIES].policies["a"]
        await fleet.set_condition(source, "UpgradePolicyValid", is_true=True, reason="Valid", sentence="")
        assert await fleet.runtime_handlers() == {}
        made = await fleet.make_maintenance(order_for(fleet_stage, node))
        await fleet.set_requestors(await fleet.maintenance(made.namespace, made.name), ("other.example",))
        await fleet.delete_maintenance(made)
        with pytest.raises(Forbidden):
            await fleet.delete_pod("default", "somebodys", "u")


# Writing ------------------------------------------------------------------------------------------------------------


async def test_a_lease_has_one_writer(fleet_stage: FleetStage) -> None:
    """Of two that found none, or read the same, one wins; what is written is what is read."""
    fleet, name = fleet_stage.fleet, "leader"
    none = await fleet.lease(fleet_stage.namespace, name)
    assert none == LeaseView(namespace=fleet_stage.namespace, name=name)
    made = await fleet.write_lease(replace(none, holder="a", acquired=THEN, renewed=THEN, annotations={"grants": '["n1"]'}))
    with pytest.raises(Conflict):
        await fleet.write_lease(replace(none, holder="b", acquired=THEN, renewed=THEN))
    assert await fleet.lease(fleet_stage.namespace, name) == made
    assert (made.holder, made.duration_seconds, made.acquired, made.renewed, made.transitions) == ("a", 15, THEN, THEN, 0)
    assert made.annotations == {"grants": '["n1"]'}
    later = THEN.replace("000000", "000007")
    taken = await fleet.write_lease(replace(made, holder="b", renewed=later, transitions=1, duration_seconds=2, annotations={}))
    assert (taken.holder, taken.renewed, taken.transitions, taken.duration_seconds, taken.annotations) == ("b", later, 1, 2, {})
    with pytest.raises(Conflict):
        await fleet.write_lease(replace(made, renewed=later))
    assert await fleet.lease(fleet_stage.namespace, name) == taken
    free = await fleet.write_lease(replace(taken, holder=""))
    assert (await fleet.lease(fleet_stage.namespace, name)).holder == free.holder == ""


async def test_an_event_about_a_daemon_set(fleet_stage: FleetStage) -> None:
    """It is in the DaemonSet's namespace, where `kubectl describe` looks for it."""
    await fleet_stage.add_set("exporter", {}, {"app": "exporter"})
    fleet = await fleet_stage.account(CLUSTER_RULES)
    async with following(fleet_stage.fleet, Kind.DAEMON_SETS) as seen:
        found = await seen.when(lambda now: now.sets.get("exporter"), "the DaemonSet")
    await fleet.note_event(EventNote(subject=Subject.daemon_set(found), is_warning=True, reason="UpdateWaits", sentence="s"))

    async def all_there() -> bool:
        return await fleet_stage.events("exporter", fleet_stage.namespace) == [(True, "UpdateWaits", "s")]

    await until(all_there, "the event")


async def test_events_are_about_a_node(fleet_stage: FleetStage) -> None:
    """Warning or not, reason and sentence; a sentence too long is cut, and each note is an Event of its own."""
    node = await fleet_stage.add_node()
    subject = Subject.node(await fleet_stage.fleet.node(node))
    await fleet_stage.fleet.note_event(EventNote(subject=subject, reason="Cordoned", sentence="for driver 2"))
    await fleet_stage.fleet.note_event(EventNote(subject=subject, reason="Cordoned", sentence="for driver 2"))
    await fleet_stage.fleet.note_event(EventNote(subject=subject, is_warning=True, reason="Failed", sentence="é" * 2000))

    async def all_there() -> bool:
        return len(await fleet_stage.events(node)) == 3

    await until(all_there, "the events")
    *plain, failed = sorted(await fleet_stage.events(node))
    assert plain == [(False, "Cordoned", "for driver 2")] * 2
    assert failed[:2] == (True, "Failed")
    assert failed[2].startswith("é" * 500)
    assert failed[2].endswith("...")


@pytest.mark.parametrize(("kind", "custom"), CUSTOM)
async def test_conditions(fleet_stage: FleetStage, kind: Kind, custom: str) -> None:
    """One is added or changed and those of others stay; one that says the same is not written again."""
    await fleet_stage.serve(custom)
    await fleet_stage.add_custom(custom, "a", {}, condition="Ready")
    async with following(fleet_stage.fleet, kind) as seen:
        await seen.listed()
        theirs, source = {"Ready": ("True", "Theirs")}, seen.policies["a"]
        assert source.conditions == theirs

        async def write(is_true: bool, reason: str, sentence: str = "x") -> None:
            await fleet_stage.fleet.set_condition(source, "UpgradePolicyValid", is_true=is_true, reason=reason, sentence=sentence)

        await write(True, "Valid")
        first = await seen.when(lambda now: said(now, theirs, "True", "Valid"), "the condition")
        await write(True, "Valid")
        await write(False, "BadValue", "maxUnavailable is no number")
        second = await seen.when(lambda now: said(now, theirs, "False", "BadValue"), "the change")
        assert second.generation == source.generation
    told = [event.item for event in seen.events if isinstance(event, Changed)]
    assert {item.resource_version for item in told if isinstance(item, PolicySource)} == {
        first.resource_version,
        second.resource_version,
    }


def said(now: Followed, theirs: dict[str, tuple[str, str]], status: str, reason: str) -> Any:
    """The object, if its conditions are theirs and ours."""
    return now.policies["a"] if now.policies["a"].conditions == {**theirs, "UpgradePolicyValid": (status, reason)} else None


async def test_a_condition_of_a_status_that_nobody_has_written(fleet_stage: FleetStage) -> None:
    """It can be written although gpu-operator, which owns the status, is not there."""
    await fleet_stage.serve("NVIDIADriver")
    await fleet_stage.add_custom("NVIDIADriver", "a", {})
    async with following(fleet_stage.fleet, Kind.NVIDIA_DRIVERS) as seen:
        await seen.listed()
        source = seen.policies["a"]
        await fleet_stage.fleet.set_condition(source, "UpgradePolicyValid", is_true=True, reason="Valid", sentence="")
        await seen.when(lambda now: said(now, {}, "True", "Valid"), "the condition")
    gone, other = replace(source, name="not-there"), replace(source, uid="of-one-that-was-before")
    for stale, error in ((gone, NotFound), (other, Conflict)):
        with pytest.raises(error):
            await fleet_stage.fleet.set_condition(stale, "UpgradePolicyValid", is_true=True, reason="Valid", sentence="")


# Budgets and maintenance --------------------------------------------------------------------------------------------


async def test_budgets(fleet_stage: FleetStage) -> None:
    """How many pods may go now, which follows pods and edits; whose pods are meant; and none when it is gone."""
    node = await fleet_stage.add_node()
    async with following(fleet_stage.fleet, Kind.BUDGETS) as seen, following(fleet_stage.fleet, Kind.DRIVER_PODS) as pods:
        await seen.listed()
        await fleet_stage.add_set("drv", ours(node), DRIVER)
        await pods.when(lambda now: now.running(DRIVER["app"]), "the pod to run")
        await fleet_stage.add_budget("b", {"app": DRIVER["app"]}, min_available=1)
        await seen.when(lambda now: "b" in now.budgets and now.budgets["b"].is_observed, "the budget to be counted")
        assert (seen.budgets["b"].namespace, seen.budgets["b"].allowed) == (fleet_stage.namespace, 0)
        assert seen.budgets["b"].covers(fleet_stage.namespace, DRIVER)
        assert not seen.budgets["b"].covers("elsewhere", DRIVER)
        assert not seen.budgets["b"].covers(fleet_stage.namespace, VALIDATOR)
        await fleet_stage.set_budget("b", min_available=0)
        await seen.when(lambda now: now.budgets["b"].is_observed and now.budgets["b"].allowed == 1, "room")
        await fleet_stage.remove_budget("b")
        await seen.when(lambda now: "b" not in now.budgets, "it to be gone")


def order_for(fleet_stage: FleetStage, node: str, **more: Any) -> MaintenanceOrder:
    """A NodeMaintenance of ours."""
    drain = {"force": True, "timeoutSeconds": 30, "podEvictionFilters": [{"byResourceNameRegex": "^nvidia"}]}
    return MaintenanceOrder(namespace=fleet_stage.namespace, name=f"p-{node}", node_name=node, requestor="us.example", drain=drain, **more)


async def test_a_maintenance_from_its_making_to_its_end(fleet_stage: FleetStage) -> None:
    """Made once, as it was ordered; Ready when the operator says so; deleted it stays as long as the operator holds it."""
    node, fleet = await fleet_stage.add_node(), fleet_stage.fleet
    await fleet_stage.serve("NodeMaintenance")
    async with following(fleet, Kind.MAINTENANCES) as seen:
        await seen.listed()
        order = order_for(fleet_stage, node, wait={"podSelector": "app=job", "timeoutSeconds": 5})
        made = await fleet.make_maintenance(order)
        assert (made.node_name, made.requestor, made.others, made.is_ready, made.is_deleting) == (node, "us.example", (), False, False)
        spec = {"requestorID": "us.example", "nodeName": node, "drainSpec": order.drain, "waitForPodCompletion": order.wait}
        assert await fleet_stage.maintenance_spec(order.name) == spec
        with pytest.raises(Conflict):
            await fleet.make_maintenance(order)
        assert await fleet.maintenance(order.namespace, order.name) == made
        await seen.when(lambda now: now.maintenances.get(order.name) == made, "it")
        await fleet_stage.work_on(order.name, ready=True, finalizer=True)
        ready = await seen.when(lambda now: now.maintenances[order.name].is_ready and now.maintenances[order.name], "it to be ready")
        with pytest.raises(Conflict):
            await fleet.delete_maintenance(replace(ready, uid="of-one-before"))
        await fleet.delete_maintenance(ready)
        going = await seen.when(lambda now: now.maintenances[order.name].is_deleting and now.maintenances[order.name], "its end")
        assert not going.is_used_by("us.example")
        await fleet_stage.work_on(order.name, finalizer=False)
        await seen.when(lambda now: not now.maintenances, "it to be gone")
        with pytest.raises(NotFound):
            await fleet.delete_maintenance(ready)
        with pytest.raises(NotFound):
            await fleet.maintenance(order.namespace, order.name)


async def test_requestors_of_a_shared_maintenance(fleet_stage: FleetStage) -> None:
    """One joins and leaves the newest version only, and the others in it stay."""
    node, fleet = await fleet_stage.add_node(), fleet_stage.fleet
    await fleet_stage.serve("NodeMaintenance")
    made = await fleet.make_maintenance(order_for(fleet_stage, node))
    one = await fleet.set_requestors(made, ("a.example",))
    with pytest.raises(Conflict):
        await fleet.set_requestors(made, ("b.example",))
    both = await fleet.set_requestors(one, (*one.others, "b.example"))
    assert (both.requestor, both.others) == ("us.example", ("a.example", "b.example"))
    left = await fleet.set_requestors(both, ("b.example",))
    assert left.others == ("b.example",)
    assert (await fleet.set_requestors(left, ())).others == ()
    with pytest.raises(NotFound):
        await fleet.set_requestors(replace(left, name="p-nobody"), ())
