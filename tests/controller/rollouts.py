"""Whole roll-outs in virtual time, each from one seed: a fleet, a policy, trouble, replicas that die and come back; and what must hold.

python -m tests.controller.rollouts SEED [SEED...]      plays seeds again and prints their story
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from driver_manager import names
from driver_manager.controller.run import Replica
from driver_manager.controller.settings import ControllerSettings, MaintenanceSettings
from driver_manager.core.rollout_states import AFTER_RESTART, State
from driver_manager.core.situation import RolloutSettings
from driver_manager.core.snapshot import ChangeKind, Toleration
from driver_manager.core.upgrade_policy import read_policy
from driver_manager.errors import DriverManagerError
from driver_manager.sim.clock import run_virtual
from driver_manager.sim.fleetworld import MAINTENANCE_NAMESPACE, OWN_NAMESPACE, FleetWorld
from driver_manager.sim.objects import DaemonSet, Node, Pod, PodSpec
from driver_manager.sim.parking import DENY, GATE
from driver_manager.sim.store import Object
from driver_manager.sim.world import AgentLife

LONGEST = 4 * 3600.0
"""Virtual seconds that a roll-out may take with all its trouble."""
CALM_AFTER = 400.0
"""Virtual seconds after which all trouble ends."""


EXPORTER = "exporter"
"""Name, and label `app`, of a DaemonSet that uses the driver and tolerates everything."""


def add_exporter(world: FleetWorld, ways: str, *, is_opted_in: bool = True, **spec: Any) -> DaemonSet:
    """An exporter on every node, and the admission policies that can park it."""
    world.server.parking.ways = set(ways.split())
    wanted = {"tolerations": (Toleration(operator="Exists"),), "annotations": {names.GPU_CLIENT: "true"}, **spec}
    made = PodSpec(labels={"app": EXPORTER}, stop_seconds=0.5, start_seconds=0.2, **wanted)
    labels = {names.PARK: "true"} if is_opted_in else {}
    exporter = DaemonSet(namespace="monitoring", name=EXPORTER, uid=world.store.uid(), spec=made, is_on_delete=False, labels=labels)
    return world.settle(exporter)


@dataclass(slots=True)
class Script:
    """What happens in one roll-out, all of it drawn from the seed."""

    seed: int
    nodes: int
    policy: dict[str, Any]
    cordoned: frozenset[str]
    """Nodes that an admin has cordoned."""
    replicas: int
    kills: int
    fault_rate: float
    lag: float
    expire_rate: float
    stale_rate: float
    one_at_a_time: bool
    blocked: float | None
    """Seconds for which a budget lets no GPU pod go; None: there is no budget."""
    maintenance: float | None
    """Seconds that a maintenance operator takes; None: there is none."""
    parking: str = ""
    """`gate`, `deny` or both: an exporter that tolerates everything is parked so."""

    def _as_possible(self) -> Script:
        return self if self.maintenance is None else replace(self, parking="")  # a maintenance operator parks nobody

    @classmethod
    def of(cls, seed: int) -> Script:
        """The script of a seed."""
        rng = random.Random(seed)
        nodes = rng.randint(2, 8)
        cordoned = {f"gpu-{number + 1}" for number in range(nodes) if rng.random() < 0.1}
        policy = {
            "autoUpgrade": True,
            "maxParallelUpgrades": rng.choice((0, 1, 2, 3)),
            "maxUnavailable": rng.choice(("25%", "50%", "100%", 1, 2)),
            "podDeletion": {"timeoutSeconds": 300},
        }
        if read_policy(policy).most_unavailable(nodes) <= len(cordoned):
            cordoned = set()  # else nothing would ever be begun, and rightly
        return cls(
            seed=seed,
            nodes=nodes,
            policy=policy,
            cordoned=frozenset(cordoned),
            replicas=rng.choice((1, 2)),
            kills=rng.choice((0, 1, 2, 4, 8)),
            fault_rate=rng.choice((0.0, 0.0, 0.02, 0.1)),
            lag=rng.choice((0.0, 0.0, 0.5, 3.0)),
            expire_rate=rng.choice((0.0, 0.0, 0.05)),
            stale_rate=rng.choice((0.0, 0.0, 0.3)),
            one_at_a_time=rng.random() < 0.2,
            blocked=rng.choice((None, None, 0.0, 30.0, 500.0)),
            maintenance=rng.choice((None, None, None, 0.5, 20.0)),
            parking=rng.choice(("", "", GATE, GATE, DENY, f"{GATE} {DENY}")),
        )._as_possible()


@dataclass(slots=True)
class Watched:
    """Holds the rules at every change of the world."""

    world: FleetWorld
    script: Script
    broken: list[str] = field(default_factory=list)
    most: int = 0

    def look(self, one: Object, change: ChangeKind) -> None:
        """Called at every change (R7): nodes that are unavailable through us are never more than the policy allows."""
        if not isinstance(one, Node | Pod):
            return
        world = self.world
        unavailable = (world.cordoned | world.driverless) - self.script.cordoned
        limit = read_policy(self.script.policy).most_unavailable(self.script.nodes)
        self.most = max(self.most, len(unavailable))
        if len(unavailable) > max(0, limit):
            self.broken.append(f"{asyncio.get_running_loop().time():.1f}: {sorted(unavailable)} are unavailable, and {limit} may be")
        for name in world.driverless - self.script.cordoned:
            if name in world.store.nodes and not world.store.nodes[name].unschedulable:
                self.broken.append(f"{name} has no driver and is open")
        if self.script.parking:
            self._look_at_exporters()

    def _look_at_exporters(self) -> None:
        """From the end of its old driver to its opening no exporter runs on a node."""
        for name, node in self.world.store.nodes.items():
            if node.labels.get(names.UPGRADE_STATE) in AFTER_RESTART or name in self.world.driverless:
                runs = [pod.ref for pod in self.world.store.pods_bound_to(name) if pod.labels.get("app") == EXPORTER]
                if runs:
                    self.broken.append(f"{name} is in work, and {runs} are there")


async def play(script: Script) -> FleetWorld:
    """Plays it to its end and checks the end.

    Raises:
        AssertionError: a rule was broken; it begins with the seed.
    """
    rng = random.Random(script.seed + 1)
    budget = None if script.blocked is None else 0
    world = FleetWorld(script.seed, nodes=script.nodes, policy=script.policy, budget=budget, maintenance=script.maintenance)
    if script.parking:
        add_exporter(world, script.parking)
    for name in script.cordoned:
        node = world.store.nodes[name]
        node.unschedulable = True
        world.store.node_written(node)
    before = {name: (dict(node.labels), node.unschedulable) for name, node in world.store.nodes.items()}
    stop = asyncio.Event()
    replicas = [asyncio.create_task(_replica(world, script, f"replica-{number}", rng, stop)) for number in range(script.replicas)]
    await _until(world, lambda: all(node.labels.get(names.UPGRADE_STATE) == State.DONE for node in world.store.nodes.values()), script)
    watched = Watched(world, script)
    world.on_change(watched.look)
    old = {pod.uid for pod in world.driver_pods()}
    _begin_trouble(world, script, rng)
    world.new_driver("two")
    if script.blocked is not None:
        asyncio.get_running_loop().call_later(script.blocked, _make_room, world)
    calm = asyncio.get_running_loop().call_later(CALM_AFTER, lambda: _end_trouble(world, stop))
    await _until(world, lambda: _is_rolled_out(world, old), script)
    calm.cancel()
    _end_trouble(world, stop)
    await asyncio.sleep(60)
    await _until(world, lambda: not _is_parked(world), script)  # for a moment one is, where the policies are proven
    _check_end(world, script, watched, before, old)
    for task in replicas:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    return world


def _is_parked(world: FleetWorld) -> bool:
    return any(names.PARKED in node.labels for node in world.store.nodes.values())


def _begin_trouble(world: FleetWorld, script: Script, rng: random.Random) -> None:
    if script.fault_rate:
        world.faults.randomly(random.Random(rng.getrandbits(32)), script.fault_rate)
    world.faults.watches.longest_lag = script.lag
    world.faults.watches.expire_rate = script.expire_rate
    if script.stale_rate:
        world.faults.watches.stale_rate, world.faults.watches.longest_stale = script.stale_rate, 2.0


def _make_room(world: FleetWorld) -> None:
    for budget in world.store.budgets.values():
        world.set_budget(budget, max_unavailable="100%")


def _end_trouble(world: FleetWorld, stop: asyncio.Event) -> None:
    world.faults.stop()
    stop.set()


async def _replica(world: FleetWorld, script: Script, name: str, rng: random.Random, calm: asyncio.Event) -> None:
    """One replica, begun anew whenever it ends; so many of its lives are killed at a boundary by chance."""
    kills = script.kills
    while True:
        is_doomed = kills > 0 and not calm.is_set()
        life = world.controller(kill_at=rng.randint(1, 120) if is_doomed else None)
        kills -= is_doomed
        settings = ControllerSettings(
            identity=f"{name}-{life.number}",
            lease_namespace=OWN_NAMESPACE,
            rollout=RolloutSettings(one_at_a_time=script.one_at_a_time),
            maintenance=MaintenanceSettings(is_on=script.maintenance is not None, namespace=MAINTENANCE_NAMESPACE),
        )
        with contextlib.suppress(DriverManagerError):
            await _one_life(life, settings)
        await asyncio.sleep(1 + 5 * rng.random())


async def _one_life(life: AgentLife, settings: ControllerSettings) -> None:
    await life.run(Replica(life.fleet, life.clock, settings).run())


async def _until(world: FleetWorld, is_so: Any, script: Script) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + LONGEST
    while not is_so():
        if loop.time() > deadline:
            states = {
                name: dict(labels=node.labels.get(names.UPGRADE_STATE), closed=node.unschedulable)
                for name, node in world.store.nodes.items()
            }
            raise AssertionError(f"seed {script.seed}: not done in {LONGEST:.0f} s: {states}")
        await asyncio.sleep(1)


def _is_rolled_out(world: FleetWorld, old: set[str]) -> bool:
    drivers = world.driver_pods()
    is_new = len(drivers) == len(world.store.nodes) and all(pod.uid not in old and pod.is_ready for pod in drivers)
    return is_new and all(node.labels.get(names.UPGRADE_STATE) == State.DONE for node in world.store.nodes.values())


def _check_end(world: FleetWorld, script: Script, watched: Watched, before: dict[str, Any], old: set[str]) -> None:
    """Everybody is done, everything is as before, and nothing was done twice."""
    seed = f"seed {script.seed}"
    assert not watched.broken, f"{seed}: {watched.broken[:3]}"
    for name, node in world.store.nodes.items():
        labels, was_closed = before[name]
        assert node.unschedulable == was_closed, f"{seed}: {name} is {'closed' if node.unschedulable else 'open'}"
        assert {**node.labels, names.UPGRADE_STATE: ""} == {**labels, names.UPGRADE_STATE: ""}, f"{seed}: labels of {name}"
        assert node.labels.get(names.UPGRADE_STATE) == State.DONE, f"{seed}: {name} is {node.labels}"
        ours = {key for key in node.annotations if key.startswith("nvidia.com/")}
        mark = {names.PARKING} if script.parking else set()
        assert ours - mark == {names.ROLLOUT, names.UPGRADE_ENABLED}, f"{seed}: {name} has {ours}"
        progress = json.loads(node.annotations[names.ROLLOUT])
        assert not progress.get("cordoned"), f"{seed}: {progress}"
    evicted = Counter(uid for _, _, uid in world.server.evictions)
    assert not [uid for uid, times in evicted.items() if times > 1], f"{seed}: evicted twice"
    deleted = Counter(deed.node_name for deed in world.deeds("delete") if deed.target.endswith(tuple(old)) or _is_driver(deed.target))
    assert all(times == 1 for times in deleted.values()), f"{seed}: driver pods deleted {deleted}"
    if script.parking:
        exporters = [pod for pod in world.store.pods.values() if pod.labels.get("app") == EXPORTER]
        assert sorted(pod.node_name or "" for pod in exporters if pod.is_ready) == sorted(world.store.nodes), f"{seed}: {exporters}"
        assert not [pod for pod in exporters if pod.gates], f"{seed}: gated"
    lease = world.store.leases[f"{OWN_NAMESPACE}/driver-manager-controller"]
    assert names.GRANTS not in lease.annotations, f"{seed}: {lease.annotations}"
    assert not world.store.maintenances, f"{seed}: {world.store.maintenances}"


def _is_driver(target: str) -> bool:
    return "nvidia-driver" in target


def main() -> None:
    """Plays seeds from the command line."""
    for seed in map(int, sys.argv[1:]):
        script = Script.of(seed)
        print(script)
        world = run_virtual(play(script))
        print(f"seed {seed}: fine after {len(world.store.deeds)} deeds")


if __name__ == "__main__":
    main()
