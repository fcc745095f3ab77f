"""A fleet beside a gpu-operator that can die and come back, for stories of who leads."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from driver_manager import names
from driver_manager.controller.run import Replica
from driver_manager.controller.settings import ControllerSettings, MaintenanceSettings
from driver_manager.core.role import Choice, Role
from driver_manager.core.upgrade_policy import read_policy
from driver_manager.errors import DriverManagerError
from driver_manager.ports import NodePatch
from driver_manager.sim.access import EVERYTHING
from driver_manager.sim.clock import run_virtual
from driver_manager.sim.fleetworld import MAINTENANCE_NAMESPACE, OWN_NAMESPACE, FleetWorld
from driver_manager.sim.objects import HOSTNAME, PodSpec
from tests.controller.gpuoperator import GpuOperator

OPERATOR = "system:serviceaccount:gpu-operator:gpu-operator"
POLICY = {"autoUpgrade": True, "maxParallelUpgrades": 2, "maxUnavailable": "50%"}
PACE = 4.0
"""Seconds between the stand-in's passes: in life each of its writes begins the next one, but a fleet gives it more to do than this one."""


class Stage:
    """A fleet, a gpu-operator that can die and come back, and a replica of ours."""

    def __init__(
        self, *, nodes: int = 4, choice: Choice = Choice.AUTO, policy_file: dict[str, Any] | None = None, **world_args: Any
    ) -> None:
        self.world = FleetWorld(1, nodes=nodes, **{"policy": POLICY, "gpu_pods": 1, **world_args})
        self.account = self.world.add_account(OPERATOR, EVERYTHING)
        self.choice, self.policy_file = choice, policy_file
        self.operator_task: asyncio.Task[None] | None = None
        self.replica: Replica | None = None
        for name in list(self.world.store.nodes):
            spec = PodSpec(labels={"kind": "hidden"}, runtime_class="nvidia", node_selector={HOSTNAME: name}, stop_seconds=1.0)
            self.world.add_deployment(f"render-{name}", spec, node=name)

    def start_operator(self) -> None:
        """gpu-operator comes up."""
        life = self.world.controller(account=self.account)
        operator = GpuOperator(life.fleet, life.clock, pass_seconds=PACE)
        self.operator_task = asyncio.create_task(operator.run())

    async def kill_operator(self) -> None:
        """It dies, and gives nothing up."""
        assert self.operator_task is not None
        self.operator_task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.operator_task

    @property
    def controller(self) -> Any:
        assert self.replica is not None
        return self.replica.controller

    @property
    def role(self) -> Role:
        """Ours, as it is now."""
        role: Role = self.controller.role.standing.role
        return role

    def patches(self, who: str) -> list[NodePatch]:
        """Node patches of one account, in order."""
        return [deed.detail for deed in self.world.deeds("patch") if deed.who == who and isinstance(deed.detail, NodePatch)]

    def states(self) -> dict[str, str]:
        """Node -> its state."""
        return {name: node.labels.get(names.UPGRADE_STATE, "") for name, node in self.world.store.nodes.items()}

    async def until(self, is_so: Callable[[], bool], what: str, seconds: float = 900.0) -> None:
        """Waits in virtual time."""
        for _ in range(int(seconds * 2)):
            if is_so():
                return
            await asyncio.sleep(0.5)
        raise AssertionError(f"not in {seconds:.0f} s: {what}; {self.states()}; {self.controller.stays}")

    async def until_done(self) -> None:
        """Waits for the end of a roll-out."""
        old = "driver:two"

        def is_over() -> bool:
            drivers = self.world.driver_pods()
            is_new = len(drivers) == len(self.world.store.nodes) and all(pod.spec.image == old and pod.is_ready for pod in drivers)
            return is_new and set(self.states().values()) == {"upgrade-done"}

        await self.until(is_over, "the roll-out is over")

    def evicted(self) -> Counter[tuple[str, str]]:
        """(who, kind of pod) -> how many were evicted."""
        kinds = {True: "hidden", False: "gpu"}
        return Counter((deed.who, kinds["render" in deed.target]) for deed in self.world.deeds("evict"))

    def assert_nothing_twice(self) -> None:
        """No pod was evicted twice, no driver pod deleted twice, and every node is as it was."""
        evicted = Counter(deed.uid for deed in self.world.deeds("evict"))
        assert not [uid for uid, times in evicted.items() if times > 1]
        deleted = Counter(deed.node_name for deed in self.world.deeds("delete") if "nvidia-driver" in deed.target)
        assert set(deleted.values()) == {1}, deleted
        assert len(deleted) == len(self.world.store.nodes)
        assert not self.world.cordoned
        for name, node in self.world.store.nodes.items():
            record = json.loads(node.annotations.get(names.ROLLOUT, "{}"))
            assert not record.get("cordoned"), f"{name}: {record}"
            assert names.INITIAL_UNSCHEDULABLE not in node.annotations
        lease = self.world.store.leases[f"{OWN_NAMESPACE}/driver-manager-controller"]
        assert names.GRANTS not in lease.annotations


Story = Callable[[Stage], Coroutine[Any, Any, None]]


def play(story: Story, *, operator: bool = True, requestor: bool = False, **stage_args: Any) -> Stage:
    """Runs a story beside our replica; gpu-operator is there first unless it is said otherwise."""
    stage = Stage(**stage_args)

    async def whole() -> None:
        if operator:
            stage.start_operator()
            await asyncio.sleep(20)
        life = stage.world.controller()
        policy = read_policy(stage.policy_file) if stage.policy_file else None
        asks = MaintenanceSettings(is_on=requestor, namespace=MAINTENANCE_NAMESPACE)
        settings = ControllerSettings(identity="one", lease_namespace=OWN_NAMESPACE, role=stage.choice, policy=policy, maintenance=asks)
        stage.replica = Replica(life.fleet, life.clock, settings)
        task = asyncio.create_task(stage.replica.run())
        await asyncio.sleep(25)
        await story(stage)
        for each in (task, stage.operator_task):
            if each is not None:
                each.cancel()
                with contextlib.suppress(asyncio.CancelledError, DriverManagerError):
                    await each

    run_virtual(whole())
    return stage
