"""A stand-in for gpu-operator's upgrade controller, by what is known of it: its Lease, its passes, its unguarded label writes.

It is written against the ports, so that it leads a simulated fleet and one on the real control plane alike:

    KUBECONFIG=... python -m tests.controller.gpuoperator NAMESPACE NODE_SELECTOR POLICY_AS_JSON
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Final

from driver_manager.controller.cache import Cache
from driver_manager.controller.overview import read_all
from driver_manager.core.fleet import FleetPod
from driver_manager.core.snapshot import NodeView, PodView
from driver_manager.core.upgrade_policy import UpgradePolicy, read_policy
from driver_manager.errors import ClusterError
from driver_manager.names import (
    INITIAL_UNSCHEDULABLE,
    OPERATOR_LEASE,
    REQUESTOR_MODE,
    UPGRADE_CONTROLLER_PREFIXES,
    UPGRADE_ENABLED,
    UPGRADE_REQUESTED,
    UPGRADE_STATE,
)
from driver_manager.ports import Clock, Fleet, NodePatch

RENEW_SECONDS: Final = 2.0
NOT_IN_PROGRESS: Final = ("", "upgrade-done", "upgrade-required", "node-maintenance-required")


class GpuOperator:
    """One life of it. A node moves one state in a pass; nothing it writes is guarded by a version.

    Its requestor mode is never on: it passes over nodes in a maintenance, and opens none that has the annotation of one.
    """

    def __init__(
        self,
        fleet: Fleet,
        clock: Clock,
        *,
        namespace: str = "gpu-operator",
        pass_seconds: float = 1.0,
        duration: int = 15,
        identity: str = "op-1",
        policy: UpgradePolicy | None = None,
    ) -> None:
        self._fleet, self._clock, self._namespace = fleet, clock, namespace
        self._pass_seconds, self._duration, self._identity = pass_seconds, duration, identity
        self._policy = policy
        """In place of a ClusterPolicy's."""

    async def run(self) -> None:
        """Renews its Lease and makes passes, without end."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._renew())
            tasks.create_task(self._pass_again_and_again())

    async def _renew(self) -> None:
        while True:
            with suppress(ClusterError):
                lease = await self._fleet.lease(self._namespace, OPERATOR_LEASE)
                now = self._clock.wall().removesuffix("Z") + ".000000Z"
                held = replace(lease, holder=self._identity, duration_seconds=self._duration, acquired=lease.acquired or now, renewed=now)
                await self._fleet.write_lease(held)
            await self._clock.sleep(min(RENEW_SECONDS, self._duration / 4))

    async def _pass_again_and_again(self) -> None:
        await self._clock.sleep(min(3 * RENEW_SECONDS, self._duration))  # until its caches are filled
        while True:
            with suppress(ClusterError):
                await self._pass(await read_all(self._fleet))
            await self._clock.sleep(self._pass_seconds)

    async def _pass(self, cache: Cache) -> None:
        source = next((each for each in cache.policies.values() if each.kind == "ClusterPolicy"), None)
        policy = self._policy or (read_policy(source.upgrade_policy) if source is not None else UpgradePolicy())
        for node in cache.nodes.values():
            wanted = "true" if policy.auto_upgrade else None
            if node.annotations.get(UPGRADE_ENABLED) != wanted:
                await self._write(node, annotations={UPGRADE_ENABLED: wanted})
        if not policy.auto_upgrade:
            for node in cache.nodes.values():
                if UPGRADE_STATE in node.labels:
                    await self._write(node, labels={UPGRADE_STATE: None})
            return
        busy = sum(state_of(node) not in NOT_IN_PROGRESS for node in cache.nodes.values())
        slots = policy.max_parallel_upgrades - busy if policy.max_parallel_upgrades else len(cache.nodes)
        for node in sorted(cache.nodes.values(), key=lambda each: each.name):
            driver = next(iter(cache.drivers_on(node.name)), None)
            if driver is None:
                continue
            if state_of(node) == "upgrade-required":
                if UPGRADE_REQUESTED in node.annotations:
                    await self._write(node, annotations={UPGRADE_REQUESTED: None})
                if slots > 0:
                    slots -= 1
                    await self._move(node, "cordon-required")
                continue
            await self._step(cache, node, driver, policy)

    async def _step(self, cache: Cache, node: NodeView, driver: FleetPod, policy: UpgradePolicy) -> None:
        daemon_set = cache.driver_set_for(node)
        wanted = cache.wanted(daemon_set, node.name)
        is_synced = wanted is not None and driver.revision == wanted.hash
        match state_of(node):
            case "" | "upgrade-done" as state:
                if wanted is not None and (not is_synced or node.annotations.get(UPGRADE_REQUESTED) == "true"):
                    if node.unschedulable:
                        await self._write(node, annotations={INITIAL_UNSCHEDULABLE: "true"})
                    await self._move(node, "upgrade-required")
                elif not state:
                    await self._move(node, "upgrade-done")
            case "cordon-required":
                await self._write(node, unschedulable=True)
                await self._move(node, "wait-for-jobs-required")
            case "wait-for-jobs-required":
                selector = policy.wait_for_completion.pod_selector
                pods = (await self._fleet.pods_on(node.name)).items
                if not selector.requirements or not any(selector.matches(pod.labels) and not pod.is_over for pod in pods):
                    await self._move(node, "pod-deletion-required")
            case "pod-deletion-required":
                await self._free(node)
            case "pod-restart-required":
                if not is_synced and not driver.is_terminating:
                    await self._fleet.delete_pod(driver.namespace, driver.name, driver.uid)
                elif is_synced and driver.is_ready:
                    await self._move(node, "validation-required")
            case "validation-required":
                if any(pod.is_ready and not pod.is_terminating for pod in cache.validators_on(node.name)):
                    await self._end(node)
            case "uncordon-required" if REQUESTOR_MODE not in node.annotations:
                await self._write(node, unschedulable=False)
                await self._move(node, "upgrade-done")

    async def _free(self, node: NodeView) -> None:
        pods = [pod for pod in (await self._fleet.pods_on(node.name)).items if is_gpu_pod(pod)]
        if not pods:
            await self._move(node, "pod-restart-required")
        for pod in pods:
            if not pod.is_terminating:
                with suppress(ClusterError):
                    await self._fleet.evict(pod)

    async def _end(self, node: NodeView) -> None:
        if INITIAL_UNSCHEDULABLE in node.annotations and REQUESTOR_MODE not in node.annotations:
            await self._move(node, "upgrade-done")
            await self._write(node, annotations={INITIAL_UNSCHEDULABLE: None})
        else:
            await self._move(node, "uncordon-required")

    async def _move(self, node: NodeView, state: str) -> None:
        await self._write(node, labels={UPGRADE_STATE: state})

    async def _write(
        self,
        node: NodeView,
        *,
        labels: Mapping[str, str | None] | None = None,
        annotations: Mapping[str, str | None] | None = None,
        unschedulable: bool | None = None,
    ) -> None:
        patch = NodePatch(name=node.name, labels=labels or {}, annotations=annotations or {}, unschedulable=unschedulable)
        await self._fleet.patch_node(patch)


def state_of(node: NodeView) -> str:
    """Its label; empty without one."""
    return node.labels.get(UPGRADE_STATE, "")


def is_gpu_pod(pod: PodView) -> bool:
    """What it knows of those who use a GPU, without claims."""
    is_daemon = pod.owner is not None and pod.owner.kind == "DaemonSet"
    return not pod.is_over and not is_daemon and any(name.startswith(UPGRADE_CONTROLLER_PREFIXES) for name in pod.resources)


async def _main(namespace: str, nodes: str, policy: str) -> None:
    from driver_manager.clock import SystemClock
    from driver_manager.kube.fleet import connect_fleet
    from driver_manager.kube.fleetcalls import Selection

    fleet = await connect_fleet(os.environ["KUBECONFIG"], SystemClock(), Selection(namespace=namespace, nodes=nodes))
    rules, name = read_policy(json.loads(policy)), f"op-{os.getpid()}"
    await GpuOperator(fleet, SystemClock(), namespace=namespace, pass_seconds=0.5, duration=4, policy=rules, identity=name).run()


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
