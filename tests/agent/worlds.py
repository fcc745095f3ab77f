"""The worlds in which runs are killed and stopped at every boundary."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from driver_manager import names
from driver_manager.core.snapshot import Taint, Toleration
from driver_manager.sim.objects import DaemonSet, PodSpec
from driver_manager.sim.parking import DENY, GATE
from driver_manager.sim.scenarios import NODE, Scenario, stock_world
from tests.agent.stage import DRA_NAMESPACE, PLUGIN, claim_holder, small_world, with_dra


def plain() -> Scenario:
    """Three operands and two GPU pods."""
    return small_world()


def dra() -> Scenario:
    """A DRA plugin too, which goes last."""
    return with_dra(small_world())


def stock() -> Scenario:
    """Twelve operands and six GPU pods."""
    return stock_world()


def cordoned() -> Scenario:
    """A person's cordon, an admin's taint, a client label with a value of its own, and our own taint key tolerated."""
    scenario = small_world(tolerates_us=True)
    taints = (Taint("example.com/team", "ml", "PreferNoSchedule"),)
    scenario.world.edit_node(NODE, unschedulable=True, labels={names.DEPLOY_CLIENT: "yes"}, taints=taints)
    return scenario


def guarded() -> Scenario:
    """One pod whose budget lets it go after five seconds."""
    scenario = small_world()
    world = scenario.world
    world.add_deployment("web", PodSpec(gpus=1, stop_seconds=1.0), node=NODE)
    made = world.add_budget("web", {"app": "web"}, min_available=1)
    world.store.timers.later(5.0, lambda: world.set_budget(made, min_available=0))
    return scenario


def nothing_loaded() -> Scenario:
    """No module, but a DRA plugin that looks into a mounted driver root."""
    scenario = with_dra(small_world())
    scenario.world.machine(NODE).modules.clear()
    return scenario


def claims() -> Scenario:
    """A DRA plugin that is installed standalone, and holders of claims: for use, and for administration by a DaemonSet."""
    scenario = small_world(gpu_pods=1, operands=1)
    world = scenario.world
    world.add_daemon_set("dra-plugin", PLUGIN, namespace=DRA_NAMESPACE)
    claim_holder(world, "user-0")
    world.add_claim("watch", namespace="monitoring", is_admin=True)
    world.add_daemon_set("watcher", PodSpec(claims=("watch",), stop_seconds=0.3), namespace="monitoring")
    return scenario


def exporters() -> Scenario:
    """Two DaemonSets that use the driver: one is kept off by the taint, one leaves with a label of its own."""
    scenario = small_world(gpu_pods=1, operands=1, tolerates_us=True)
    world, label = scenario.world, names.DEPLOY_PREFIX + "my-exporter"
    world.edit_node(NODE, labels={label: "yes"})
    spec = PodSpec(annotations={names.GPU_CLIENT: "true"}, devices=("/dev/nvidiactl",), stop_seconds=0.5)
    world.add_daemon_set("exporter", spec, namespace="monitoring")
    world.add_daemon_set("labelled", replace(spec, node_selector={label: "yes"}), namespace="monitoring")
    return scenario


def parked() -> Scenario:
    """A DaemonSet that uses the driver and tolerates everything, opted in to parking, where the policy's gate keeps it off."""
    scenario = small_world(gpu_pods=1, operands=1)
    add_parkable(scenario)
    return scenario


def denied() -> Scenario:
    """The same where the policy that refuses its pods keeps it off."""
    scenario = small_world(gpu_pods=1, operands=1)
    add_parkable(scenario, ways=DENY)
    return scenario


def add_parkable(scenario: Scenario, *, is_marked: bool = True, is_opted_in: bool = True, ways: str = GATE, **spec: Any) -> DaemonSet:
    """An exporter on every node that nothing but an admission policy keeps off."""
    world = scenario.world
    world.server.parking.ways = set(ways.split())
    if is_marked:
        world.edit_node(NODE, annotations={names.PARKING: names.PARKING_ENFORCED})
    fields = {"labels": {"app": "exporter"}, "annotations": {names.GPU_CLIENT: "true"}, "devices": ("/dev/nvidiactl",), **spec}
    made = DaemonSet(
        namespace="monitoring",
        name="exporter",
        uid=world.store.uid(),
        spec=PodSpec(tolerations=(Toleration(operator="Exists"),), stop_seconds=0.5, **{"start_seconds": 0.2, **fields}),
        labels={names.PARK: "true"} if is_opted_in else {},
        is_on_delete=False,
    )
    return world.settle(made)


QUICK: list[Callable[[], Scenario]] = [dra, cordoned, guarded, nothing_loaded, claims, exporters, parked]
DEEP: list[Callable[[], Scenario]] = [*QUICK, denied, plain, stock]
