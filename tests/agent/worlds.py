"""The worlds in which runs are killed and stopped at every boundary."""

from collections.abc import Callable

from driver_manager import names
from driver_manager.core.snapshot import Taint
from driver_manager.sim.objects import PodSpec
from driver_manager.sim.scenarios import NODE, Scenario, stock_world
from tests.agent.stage import small_world, with_dra


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


QUICK: list[Callable[[], Scenario]] = [dra, cordoned, guarded, nothing_loaded]
DEEP: list[Callable[[], Scenario]] = [*QUICK, plain, stock]
