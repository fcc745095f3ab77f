"""DaemonSets that use the driver, led off a node and back by the controller: parked, by a paused label, by a taint."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

import pytest

from driver_manager import names
from driver_manager.controller.metrics import exposition
from driver_manager.controller.run import Replica
from driver_manager.controller.settings import ControllerSettings
from driver_manager.core.fleet import EventNote
from driver_manager.core.parking import MOST_PARKED_NODES
from driver_manager.core.parking_notices import Matter
from driver_manager.core.rollout_states import State
from driver_manager.core.snapshot import Taint, Toleration
from driver_manager.ports import NodePatch
from driver_manager.sim.clock import run_virtual
from driver_manager.sim.fleetworld import NAMESPACE, OWN_NAMESPACE, FleetWorld
from driver_manager.sim.objects import Cascade, DaemonSet, Pod, PodSpec
from driver_manager.sim.parking import DENY, GATE
from tests.controller.rollouts import EXPORTER, add_exporter
from tests.controller.test_overview import look

CLIENT = {names.DEPLOY_CLIENT: "true"}
GPU_TOLERATION = Toleration(key="nvidia.com/gpu", operator="Exists", effect="NoSchedule")


@dataclass(slots=True)
class Fleet:
    """A world with one replica that leads."""

    world: FleetWorld
    replica: Replica

    def states(self) -> set[str]:
        return {node.labels.get(names.UPGRADE_STATE, "") for node in self.world.store.nodes.values()}

    def exporters(self, name: str = EXPORTER) -> list[Pod]:
        return [pod for pod in self.world.store.pods.values() if pod.owner is not None and pod.owner.name == name]

    def on(self, node: str, name: str = EXPORTER) -> list[Pod]:
        return [pod for pod in self.exporters(name) if pod.node_name == node]

    async def until(self, is_so: Callable[[], Any], seconds: float = 300.0) -> None:
        deadline = asyncio.get_running_loop().time() + seconds
        while not is_so():
            stays = {name: stay.sentence for name, stay in self.replica.controller.stays.items()}
            assert asyncio.get_running_loop().time() < deadline, (self.states(), stays)
            await asyncio.sleep(0.05)

    async def all_done(self, digest: str = "two") -> None:
        def is_so() -> bool:
            drivers = self.world.driver_pods()
            is_new = len(drivers) == len(self.world.store.nodes) and all(pod.spec.digest == digest and pod.is_ready for pod in drivers)
            return is_new and self.states() == {State.DONE}

        await self.until(is_so)

    async def everywhere(self, name: str = EXPORTER) -> None:
        """Waits until it runs on each node and none of its pods is gated."""

        def is_so() -> bool:
            pods = self.exporters(name)
            runs = sorted(pod.node_name or "" for pod in pods if pod.is_ready)
            return runs == sorted(self.world.store.nodes) and not any(pod.gates for pod in pods)

        await self.until(is_so)

    async def replaced(self, pod: Pod, seconds: float) -> None:
        """Waits until a successor of a pod is ready on its node."""
        node_name = pod.node_name or ""
        await self.until(lambda: any(one.is_ready and one.uid != pod.uid for one in self.on(node_name)), seconds)

    def told(self, matter: Matter) -> list[EventNote]:
        """The Events with a reason."""
        return [note for _, _, note in self.world.store.notes if note.reason == matter]

    def sentences(self) -> str:
        return " ".join(stay.sentence for stay in self.replica.controller.stays.values())

    def surfaces(self) -> dict[str, Any]:
        """What has to be as before."""
        return {
            name: ({**node.labels, names.UPGRADE_STATE: ""}, node.unschedulable, node.taints)
            for name, node in self.world.store.nodes.items()
        }


@contextlib.asynccontextmanager
async def led(world: FleetWorld, *, state: State = State.DONE, **settings: Any) -> AsyncIterator[Fleet]:
    """A controller that lives while this is entered, on a fleet that is done, or all of it in another state."""
    life = world.controller()
    replica = Replica(life.fleet, life.clock, ControllerSettings(lease_namespace=OWN_NAMESPACE, **settings))
    task = asyncio.ensure_future(life.run(replica.run()))
    fleet = Fleet(world, replica)
    await fleet.until(lambda: fleet.states() == {state})
    try:
        yield fleet
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def play(story: Coroutine[Any, Any, None]) -> None:
    run_virtual(story)


@pytest.mark.parametrize("ways", [GATE, DENY])
def test_neighbours_keep_theirs(ways: str) -> None:
    """A neighbour's pod that goes while a node is parked comes back in seconds, though refusals make its controller pause."""

    async def story() -> None:
        world = FleetWorld(3, nodes=4, driver_start=600.0)
        add_exporter(world, ways)
        async with led(world) as fleet:
            world.new_driver("two")
            await fleet.until(lambda: any(names.PARKED in node.labels for node in world.store.nodes.values()))
            (parked,) = [name for name, node in world.store.nodes.items() if names.PARKED in node.labels]
            await fleet.until(lambda: not fleet.on(parked))
            await asyncio.sleep(120)  # its back-off has grown
            for other in [name for name in world.store.nodes if name != parked] * 3:
                (pod,) = fleet.on(other)
                world.delete_pod(pod)
                await fleet.replaced(pod, 60)
                assert not fleet.on(parked)

    play(story())


def test_a_policy_that_does_nothing_costs_nobody() -> None:
    """The policies are there and let pods in: nobody is evicted, the node is opened and un-parked, and it says why."""

    async def story() -> None:
        world = FleetWorld(3, nodes=2)
        add_exporter(world, GATE)
        world.server.parking.is_broken = True
        async with led(world) as fleet:
            before, uids = fleet.surfaces(), {pod.uid for pod in fleet.exporters()}
            world.new_driver("two")
            await fleet.until(lambda: "though it was parked" in fleet.sentences())
            await asyncio.sleep(30)
            assert fleet.surfaces() == before
            assert {pod.uid for pod in fleet.exporters()} == uids
            world.server.parking.is_broken = False
            await fleet.all_done()
            await fleet.everywhere()

    play(story())


def test_none_is_parked_in_a_rolling_update() -> None:
    """Decision 45: a DaemonSet whose update has not come to its end is waited for; then the node is begun."""

    async def story() -> None:
        world = FleetWorld(3, nodes=2)
        exporter = add_exporter(world, GATE)
        async with led(world) as fleet:
            stuck = replace(exporter.spec, is_ready=False, image="broken")
            world.controllers.daemon_sets.set_template(exporter, stuck)
            await asyncio.sleep(5)
            world.new_driver("two")
            await fleet.until(lambda: "rolling update" in fleet.sentences())
            assert not world.cordoned
            world.controllers.daemon_sets.set_template(exporter, replace(stuck, is_ready=True))
            await fleet.all_done()
            await fleet.everywhere()

    play(story())


@pytest.mark.parametrize("what", ["policy", "set", "label", "update"])
def test_what_goes_while_a_node_is_parked(what: str) -> None:
    """Line 5: policy or DaemonSet deleted, opt-in taken back, update begun while parked: no pod stays gated, nothing is parked for ever."""

    async def story() -> None:
        world = FleetWorld(3, nodes=2)
        exporter = add_exporter(world, GATE)
        async with led(world) as fleet:
            world.new_driver("two")
            await fleet.until(lambda: any(pod.gates for pod in fleet.exporters()))
            if what == "policy":
                world.server.parking.ways = set()
            elif what == "set":
                world.delete_daemon_set(exporter, Cascade.ORPHAN)
            elif what == "label":
                exporter.labels = {}
                world.controllers.daemon_sets.written(exporter)
            else:
                world.controllers.daemon_sets.set_template(exporter, replace(exporter.spec, image="exporter:2"))
            parked = next(name for name, node in world.store.nodes.items() if names.PARKED in node.labels)
            await fleet.until(lambda: names.PARKED not in world.store.nodes[parked].labels)
            await fleet.until(lambda: not any(pod.gates for pod in world.store.pods.values()))
            if what == "update":
                await fleet.all_done()
                await fleet.everywhere()
                assert {pod.spec.image for pod in fleet.exporters()} == {"exporter:2"}
                assert [note.subject.uid for note in fleet.told(Matter.UPDATE_WAITS)] == [exporter.uid]
            assert names.PARKED not in world.store.nodes[parked].annotations

    play(story())


def test_refused_opt_ins() -> None:
    """Line 7: whoever asks for the driver, this program or the cluster's own pods to be parked is refused by name."""

    async def story() -> None:
        world = FleetWorld(3, nodes=1)
        add_exporter(world, GATE)
        spec = PodSpec(tolerations=(Toleration(operator="Exists"),), annotations={names.GPU_CLIENT: "true"})
        made = DaemonSet(
            namespace="kube-system", name="proxy", uid=world.store.uid(), spec=spec, labels={names.PARK: "true"}, is_on_delete=False
        )
        world.settle(made)
        async with led(world) as fleet:
            world.new_driver("two")
            await fleet.until(lambda: "kube-system/proxy" in fleet.sentences())
            assert "is not parked though its label" in fleet.sentences()
            await asyncio.sleep(60)
            assert not world.cordoned
            (told,) = fleet.told(Matter.REFUSED)
            assert (told.subject.kind, told.subject.namespace, told.subject.uid) == ("DaemonSet", "kube-system", made.uid)
            assert "the cluster itself needs" in told.sentence
            assert len(fleet.on("gpu-1")) == 1

    play(story())


def named(world: FleetWorld, *refs: str) -> None:
    """The ClusterPolicy has these names in the annotation that the CRD cannot drop."""
    world.set_policy("ClusterPolicy", "cluster-policy", annotations={names.POLICY: f"podDeletion: {{park: [{', '.join(refs)}]}}"})


@pytest.mark.parametrize("ways", [GATE, DENY])
def test_parked_by_name(ways: str) -> None:
    """N02 variant 3: named by a policy it is parked as by its label, neighbours healed too; a name nobody has is told, no more."""

    async def story() -> None:
        world = FleetWorld(3, nodes=3, driver_start=60.0)
        add_exporter(world, ways, is_opted_in=False)
        named(world, f"monitoring/{EXPORTER}", "monitoring/none")
        async with led(world) as fleet:
            before = fleet.surfaces()
            world.on_change(lambda one, change: _never_with(world, EXPORTER))
            world.new_driver("two")
            await fleet.until(lambda: any(names.PARKED in node.labels for node in world.store.nodes.values()))
            (parked,) = [name for name, node in world.store.nodes.items() if names.PARKED in node.labels]
            await fleet.until(lambda: not any(pod.is_active and not pod.gates for pod in fleet.on(parked)))
            (pod,) = fleet.on(next(name for name in world.store.nodes if name != parked))
            world.delete_pod(pod)
            await fleet.replaced(pod, 30)
            await fleet.all_done()
            await fleet.everywhere()
            await fleet.until(lambda: fleet.surfaces() == before, 10)
            assert fleet.replica.controller.parking.opt_ins.missing == ["monitoring/none"]

    play(story())


def test_status_knows_named_ones() -> None:
    """`status --all` asks who a policy names, and calls no DaemonSet in the way that is parked by name; one with an opt-out is."""

    async def story() -> None:
        world = FleetWorld(3, nodes=2, policy={"autoUpgrade": True, "maxUnavailable": 0})  # nobody is begun
        exporter = add_exporter(world, GATE, is_opted_in=False)
        async with led(world) as fleet:
            world.new_driver("two")
            await fleet.until(lambda: fleet.states() == {State.REQUIRED})
            no = {names.PARK: "no"}
            for labels, refs, said in ({}, [], "make it again"), ({}, [exporter.ref], ""), (no, [exporter.ref], "=no is against"):
                exporter.labels = labels
                world.controllers.daemon_sets.written(exporter)
                named(world, *refs)
                rows = (await look(world)).rows
                assert all((said in each.sentence) and (EXPORTER in each.sentence) is bool(said) for each in rows), rows

    play(story())


def test_a_name_comes_and_goes() -> None:
    """Without it no node is begun; with it the roll-out goes on; taken off again, its watch ends as soon as no node is parked for it."""

    async def story() -> None:
        world = FleetWorld(3, nodes=2, driver_start=30.0)
        exporter = add_exporter(world, GATE, is_opted_in=False)
        async with led(world) as fleet:
            opt_ins = fleet.replica.controller.parking.opt_ins
            world.new_driver("two")
            await fleet.until(lambda: "would make it again" in fleet.sentences())
            assert not world.cordoned
            named(world, exporter.ref)
            await fleet.until(lambda: any(names.PARKED in node.labels for node in world.store.nodes.values()))
            named(world)
            await asyncio.sleep(1)
            assert list(opt_ins.names) == [exporter.ref]
            assert opt_ins.all()
            await fleet.until(lambda: not any(names.PARKED in node.labels for node in world.store.nodes.values()))
            await fleet.everywhere()
            named(world, "monitoring/other")
            await asyncio.sleep(1)
            assert list(opt_ins.names) == ["monitoring/other"]

    play(story())


def test_an_opt_out_wins_over_a_name() -> None:
    """Its own label says no, so the policy's name does not count, and the node is not begun; the label gone, it is."""

    async def story() -> None:
        world = FleetWorld(3, nodes=1)
        exporter = add_exporter(world, GATE, is_opted_in=False)
        exporter.labels = {names.PARK: "false"}
        named(world, exporter.ref)
        async with led(world) as fleet:
            world.new_driver("two")
            await fleet.until(lambda: f"{names.PARK}=false is against it" in fleet.sentences())
            await asyncio.sleep(60)
            assert not world.cordoned
            exporter.labels = {}
            world.controllers.daemon_sets.written(exporter)
            await fleet.all_done()
            await fleet.everywhere()

    play(story())


@pytest.mark.parametrize("ref", ["gpu-operator/nvidia-driver-daemonset", "kube-system/proxy"])
def test_names_that_are_refused(ref: str) -> None:
    """The driver's own DaemonSet is refused when it is seen, a namespace of the cluster's with the policy: nothing is begun."""

    async def story() -> None:
        world = FleetWorld(3, nodes=1)
        add_exporter(world, GATE)
        driver = world.driver_set().ref
        async with led(world) as fleet:
            named(world, ref.replace("gpu-operator/nvidia-driver-daemonset", driver))
            world.new_driver("two")
            if ref.startswith("kube-"):
                await fleet.until(lambda: "the cluster itself needs" in " ".join(fleet.replica.controller.groups.problems.values()))
                await asyncio.sleep(30)
                assert not world.cordoned
            else:
                await fleet.all_done()
                assert [f"{note.subject.namespace}/{note.subject.name}" for note in fleet.told(Matter.REFUSED)] == [driver]
                parked = [deed for deed in world.deeds("patch") if driver in str(getattr(deed.detail, "annotations", {}).get(names.PARKED))]
                assert not parked
                await fleet.everywhere()

    play(story())


def test_left_parked_without_a_record() -> None:
    """A node at rest that is parked for somebody, with a gated pod, is un-parked, and the pod comes."""

    async def story() -> None:
        world = FleetWorld(3, nodes=2)
        add_exporter(world, GATE)
        async with led(world):
            pass
        patch = NodePatch(name="gpu-1", labels={names.PARKED: "true"}, annotations={names.PARKED: f"monitoring/{EXPORTER}"})
        await world.client().patch_node(patch)
        await asyncio.sleep(1)
        (pod,) = [pod for pod in world.store.pods_bound_to("gpu-1") if pod.owner is not None and pod.owner.name == EXPORTER]
        world.delete_pod(pod)
        await asyncio.sleep(5)
        assert [pod.gates for pod in world.store.pods.values() if pod.target == "gpu-1" and pod.gates]
        async with led(world) as fleet:
            await fleet.everywhere()
            assert names.PARKED not in world.store.nodes["gpu-1"].labels
            assert names.PARKED not in world.store.nodes["gpu-1"].annotations

    play(story())


def test_foreign_entries_are_told_once() -> None:
    """Somebody adds a name to the annotation of a parked node: one Event of the node, however long it stays, and it goes with ours."""

    async def story() -> None:
        world = FleetWorld(3, nodes=1, driver_start=120.0)
        add_exporter(world, GATE)
        async with led(world) as fleet:
            world.new_driver("two")
            await fleet.until(lambda: any(pod.gates for pod in fleet.exporters()))
            node = world.store.nodes["gpu-1"]
            for other in ("tools/theirs", "tools/theirs,tools/more"):
                both = f"{node.annotations[names.PARKED]},{other}"
                await world.client().patch_node(NodePatch(name="gpu-1", annotations={names.PARKED: both}))
                await asyncio.sleep(20)
            told = fleet.told(Matter.FOREIGN_ENTRY)
            assert [note.subject.name for note in told] == ["gpu-1"] * 2
            assert "tools/more" in told[1].sentence
            await fleet.all_done()
            await fleet.everywhere()
            assert names.PARKED not in world.store.nodes["gpu-1"].annotations

    play(story())


def test_metrics_of_parking() -> None:
    """How many gated pods were let go, how often a DaemonSet's controller was woken, and how many nodes are parked now."""

    async def story(ways: str) -> None:
        world = FleetWorld(3, nodes=3, driver_start=60.0)
        add_exporter(world, ways)
        async with led(world) as fleet:
            assert metrics(fleet) == (0, 0, 0)
            world.new_driver("two")
            await fleet.until(lambda: any(names.PARKED in node.labels for node in world.store.nodes.values()))
            (parked,) = [name for name, node in world.store.nodes.items() if names.PARKED in node.labels]
            await fleet.until(lambda: metrics(fleet)[0] == 1)
            if ways == DENY:
                await fleet.until(lambda: not fleet.on(parked))
                await asyncio.sleep(20)  # its pauses have grown
                (pod,) = fleet.on(next(name for name in world.store.nodes if name != parked))
                world.delete_pod(pod)
                await fleet.replaced(pod, 30)
            await fleet.all_done()
            await fleet.everywhere()
            now, let_go, woken = metrics(fleet)
            assert (now, let_go) == (0, 3 if ways == GATE else 0)
            assert (woken > 0) is (ways == DENY)

    for ways in (GATE, DENY):
        play(story(ways))


def metrics(fleet: Fleet) -> tuple[float, float, float]:
    """Nodes that are parked, pods that were let go, controllers that were woken: as Prometheus reads them."""
    lines = dict(line.rsplit(" ", 1) for line in exposition(fleet.replica).decode().splitlines() if line[0] != "#")
    wanted = ("parked_nodes", "gated_pods_let_go_total", "held_up_daemonsets_woken_total")
    now, let_go, woken = (float(lines[f"driver_manager_controller_{name}"]) for name in wanted)
    return now, let_go, woken


def test_a_record_lost_in_mid_flow() -> None:
    """A person takes our annotation off a parked node: it is finished, un-parked and opened all the same."""

    async def story() -> None:
        world = FleetWorld(3, nodes=2)
        add_exporter(world, GATE)
        async with led(world) as fleet:
            world.new_driver("two")
            await fleet.until(lambda: any(pod.gates for pod in fleet.exporters()))
            name = next(name for name, node in world.store.nodes.items() if names.PARKED in node.labels)
            await world.client().patch_node(NodePatch(name=name, annotations={names.ROLLOUT: None}))
            await fleet.all_done()
            await fleet.everywhere()
            assert not any(names.PARKED in {**node.labels, **node.annotations} for node in world.store.nodes.values())

    play(story())


def test_a_paused_label_takes_a_daemon_set_away() -> None:
    """N02 variant 2, decision 35: one that selects a deploy label goes before the driver; the label is as before when the node opens."""

    async def story() -> None:
        world = FleetWorld(3, nodes=2)
        for node in world.store.nodes.values():
            node.labels |= CLIENT
            world.store.node_written(node)
        world.add_daemon_set("viewer", PodSpec(node_selector=CLIENT, stop_seconds=0.5), namespace="tools")
        async with led(world) as fleet:
            before = fleet.surfaces()
            world.on_change(lambda one, change: _never_with(world, "viewer"))
            world.new_driver("two")
            await fleet.all_done()
            await fleet.everywhere("viewer")
            assert fleet.surfaces() == before

    play(story())


def test_a_taint_keeps_a_daemon_set_off() -> None:
    """N02 variant 1, decision 35: one that does not tolerate the taint, as driver and validator do, is kept off; another taint stays."""

    async def story() -> None:
        world = FleetWorld(3, nodes=2)
        for daemon_set in world.store.daemon_sets.values():
            daemon_set.spec = replace(daemon_set.spec, tolerations=(GPU_TOLERATION,))
        world.edit_node("gpu-1", taints=(Taint("rack", "7", "PreferNoSchedule"),))
        spec = PodSpec(annotations={names.GPU_CLIENT: "true"}, stop_seconds=0.5)
        world.add_daemon_set("viewer", spec, namespace="tools")
        async with led(world) as fleet:
            before = fleet.surfaces()
            world.on_change(lambda one, change: _never_with(world, "viewer"))
            world.controllers.daemon_sets.set_template(world.driver_set(), replace(world.driver_set().spec, digest="two"))
            await fleet.all_done()
            await fleet.everywhere("viewer")
            await fleet.until(lambda: fleet.surfaces() == before, 10)

    play(story())


def _never_with(world: FleetWorld, name: str) -> None:
    for node_name in world.driverless:
        there = [pod.ref for pod in world.store.pods_bound_to(node_name) if pod.owner is not None and pod.owner.name == name]
        assert not there, (node_name, there)


def test_at_most_so_many_nodes_are_parked() -> None:
    """Decision 44: however many may be in work, no more than a hundred are parked at once."""

    async def story() -> None:
        everybody = {"autoUpgrade": True, "maxParallelUpgrades": 0, "maxUnavailable": "100%"}
        world = FleetWorld(3, nodes=MOST_PARKED_NODES + 6, gpu_pods=0, policy=everybody)
        add_exporter(world, GATE)
        most = 0

        def look(one: Any, change: Any) -> None:
            nonlocal most
            most = max(most, sum(names.PARKED in node.labels for node in world.store.nodes.values()))

        async with led(world) as fleet:
            world.on_change(look)
            world.new_driver("two")
            await fleet.all_done()
            await fleet.everywhere()
        assert most == MOST_PARKED_NODES

    play(story())


def test_no_namespace_is_special_but_the_systems() -> None:
    """The exporter may be in the operator's own namespace: only what it is counts there."""

    async def story() -> None:
        world = FleetWorld(3, nodes=1)
        add_exporter(world, GATE)
        spec = PodSpec(tolerations=(Toleration(operator="Exists"),), annotations={names.GPU_CLIENT: "true"}, labels={"app": "dcgm-own"})
        made = DaemonSet(namespace=NAMESPACE, name="own", uid=world.store.uid(), spec=spec, labels={names.PARK: "true"}, is_on_delete=False)
        world.settle(made)
        async with led(world) as fleet:
            world.new_driver("two")
            await fleet.all_done()
            await fleet.everywhere()
            await fleet.everywhere("own")

    play(story())
