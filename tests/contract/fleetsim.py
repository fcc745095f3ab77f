"""The Fleet contract's stage on the simulator."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from driver_manager import names
from driver_manager.core.fleet import Kind
from driver_manager.core.snapshot import Rule
from driver_manager.ports import Fleet
from driver_manager.sim.access import EVERYTHING
from driver_manager.sim.feeds import POLICY_KINDS
from driver_manager.sim.fleet import SimFleet
from driver_manager.sim.fleetworld import PRESENT, FleetWorld
from driver_manager.sim.objects import Account, Cascade, DaemonSet, PodSpec
from tests.contract.fleetstage import FleetStage

NUMBERS = itertools.count(1)
KINDS = {**{name: kind for kind, name in POLICY_KINDS.items()}, "NodeMaintenance": Kind.MAINTENANCES}


class SimFleetStage(FleetStage):
    """A world of its own without nodes, on the test's ordinary event loop: real time, but little of it."""

    def __init__(self, seed: int = 0) -> None:
        self.world = FleetWorld(seed, nodes=0, validator=None)
        for daemon_set in list(self.world.store.daemon_sets.values()):
            del self.world.store.daemon_sets[daemon_set.ref]
        self.world.store.revisions.clear()
        for kind in KINDS.values():
            self.world.feeds.serve(kind, False)
        self.world.gpu_nodes.conduct = replace(self.world.gpu_nodes.conduct, start_seconds=0.01, stop_seconds=0.01, validator_seconds=0.01)
        self.namespace = "gpu-operator"
        self.world.scope = replace(self.world.scope, maintenances=self.namespace)
        self.fleet = self._fleet(self.world.add_account("admin", EVERYTHING))

    def _fleet(self, account: Account) -> Fleet:
        world = self.world
        return SimFleet(world.server, world.feeds, account, world.life(account=account), world.scope, served_again=0.1)

    async def add_node(self, labels: Mapping[str, str] | None = None, *, gpus: int = 8, is_selected: bool = True) -> str:
        mark = {PRESENT: "true"} if is_selected else {}
        return self.world.add_node(f"node-{next(NUMBERS)}", labels={**(labels or {}), **mark}, gpus=gpus).name

    async def select_node(self, name: str, is_selected: bool) -> None:
        self.world.edit_node(name, labels={PRESENT: "true" if is_selected else None})

    async def add_set(
        self,
        name: str,
        selector: Mapping[str, str],
        labels: Mapping[str, str],
        *,
        digest: str = "",
        avoids_drivers: bool = False,
        is_parkable: bool = False,
    ) -> None:
        spec = PodSpec(labels=labels, node_selector=selector, digest=digest, avoids_drivers=avoids_drivers, stop_seconds=0.01)
        made = DaemonSet(namespace=self.namespace, name=name, uid=self.world.store.uid(), spec=spec, is_on_delete=not is_parkable)
        made.labels = {names.PARK: "true"} if is_parkable else {}
        self.world.put_daemon_set(made)

    async def set_digest(self, name: str, digest: str) -> None:
        daemon_set = self.world.store.daemon_sets[f"{self.namespace}/{name}"]
        self.world.controllers.daemon_sets.set_template(daemon_set, replace(daemon_set.spec, digest=digest))

    async def delete_set(self, name: str, *, orphans: bool) -> None:
        daemon_set = self.world.store.daemon_sets[f"{self.namespace}/{name}"]
        self.world.delete_daemon_set(daemon_set, Cascade.ORPHAN if orphans else Cascade.BACKGROUND)

    async def install_parking(self, way: str) -> None:
        self.world.server.parking.ways.add(way)

    async def serve(self, kind: str, *, is_served: bool = True) -> None:
        self.world.serve(kind, is_served)

    async def add_custom(self, kind: str, name: str, spec: Mapping[str, Any], *, condition: str = "") -> None:
        conditions = {condition: ("True", "Theirs")} if condition else {}
        self.world.set_policy(kind, name, conditions=conditions, **_fields(kind, spec))

    async def edit_custom(self, kind: str, name: str, spec: Mapping[str, Any]) -> None:
        self.world.set_policy(kind, name, **_fields(kind, spec))

    async def add_budget(self, name: str, labels: Mapping[str, str], min_available: int) -> None:
        self.world.add_budget(name, labels, namespace=self.namespace, min_available=min_available)

    async def set_budget(self, name: str, min_available: int) -> None:
        self.world.set_budget(self.world.store.budgets[f"{self.namespace}/{name}"], min_available=min_available)

    async def remove_budget(self, name: str) -> None:
        self.world.remove_budget(self.world.store.budgets[f"{self.namespace}/{name}"])

    async def publish(self, name: str, node: str, devices: int, *, driver: str = names.GPU_DRA_DRIVER, generation: int = 1) -> None:
        self.world.publish(f"{self.namespace}-{name}", node, devices, driver=driver, generation=generation)

    async def unpublish(self, name: str) -> None:
        self.world.unpublish(f"{self.namespace}-{name}")

    async def work_on(self, name: str, *, ready: bool = False, finalizer: bool | None = None) -> None:
        store = self.world.store
        there = store.maintenances[f"{self.namespace}/{name}"]
        there.is_ready = there.is_ready or ready
        there.has_finalizer = there.has_finalizer if finalizer is None else finalizer
        if there.is_deleting and not there.has_finalizer:
            store.maintenance_removed(there)
        else:
            store.maintenance_written(there)

    async def maintenance_spec(self, name: str) -> dict[str, Any]:
        there = self.world.store.maintenances[f"{self.namespace}/{name}"]
        waits = {"waitForPodCompletion": dict(there.wait)} if there.wait is not None else {}
        return {"requestorID": there.requestor, "nodeName": there.node_name, "drainSpec": dict(there.drain), **waits}

    async def events(self, name: str, namespace: str = "default") -> list[tuple[bool, str, str]]:
        notes = [note for _, _, note in self.world.store.notes]
        about = [note for note in notes if (note.subject.name, note.subject.namespace or "default") == (name, namespace)]
        return [(note.is_warning, note.reason, note.sentence) for note in about]

    async def account(self, cluster: tuple[Rule, ...], namespace: tuple[Rule, ...] = ()) -> Fleet:
        name = f"system:serviceaccount:{self.namespace}:other-{next(NUMBERS)}"
        return self._fleet(self.world.add_account(name, cluster, namespace_rules={self.namespace: namespace}))


def _fields(kind: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a PolicySource, as far as the spec has them."""
    paths: dict[str, dict[str, tuple[str, ...]]] = {
        "ClusterPolicy": {
            "upgrade_policy": ("driver", "upgradePolicy"),
            "has_driver": ("driver", "enabled"),
            "uses_nvidia_driver_crd": ("driver", "useNvidiaDriverCRD"),
            "has_sandbox_workloads": ("sandboxWorkloads", "enabled"),
        },
        "NVIDIADriver": {"upgrade_policy": ("upgradePolicy",), "node_selector": ("nodeSelector",), "is_default": ("default",)},
    }
    found: dict[str, Any] = {}
    for field, path in paths[kind].items():
        value: Any = spec
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None:
            found[field] = value
    return found
