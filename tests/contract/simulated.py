"""The Cluster contract's stage on the simulator."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from driver_manager.core.snapshot import PodView, Rule, Taint, Toleration
from driver_manager.ports import Cluster
from driver_manager.sim.access import EVERYTHING
from driver_manager.sim.objects import DaemonSet, Pod, PodSpec, UnhealthyPolicy
from driver_manager.sim.world import World
from tests.contract.stage import Stage

NUMBERS = itertools.count(1)


class SimStage(Stage):
    """A world of its own, on the test's ordinary event loop: real time, but little of it."""

    def __init__(self, seed: int = 0) -> None:
        self.world = World(seed)
        self.namespace = "contract"
        self.cluster: Cluster = self.world.cluster(self.world.add_account("admin", EVERYTHING))

    async def add_node(self, labels: Mapping[str, str] | None = None, *, gpus: int = 8) -> str:
        return self.world.add_node(f"node-{next(NUMBERS)}", labels=labels, gpus=gpus).name

    async def add_pod(
        self,
        name: str,
        *,
        node: str | None,
        labels: Mapping[str, str] | None = None,
        gpus: int = 0,
        grace_seconds: int = 5,
        stop_seconds: float = 0.0,
        is_ready: bool = True,
        finalizers: tuple[str, ...] = (),
        namespace: str = "",
    ) -> PodView:
        spec = PodSpec(
            labels=labels or {},
            gpus=gpus,
            grace_seconds=grace_seconds,
            stop_seconds=stop_seconds,
            is_ready=is_ready,
            finalizers=finalizers,
            node_selector={} if node else {"nowhere": "true"},
        )
        return self.world.add_pod(name, spec, node=node, namespace=namespace or self.namespace, is_running=node is not None).view()

    async def add_daemon_set(
        self, name: str, selector: Mapping[str, str], *, tolerations: tuple[Toleration, ...] = (), stop_seconds: float = 0.0
    ) -> None:
        spec = PodSpec(labels={"app": name}, node_selector=selector, tolerations=tolerations, stop_seconds=stop_seconds, grace_seconds=5)
        made = DaemonSet(namespace=self.namespace, name=name, uid=self.world.store.uid(), spec=spec)
        self.world.store.daemon_sets[f"{self.namespace}/{name}"] = made
        self.world.controllers.wake_daemon_set(made)

    async def add_deployment(self, name: str, replicas: int, *, selector: Mapping[str, str]) -> None:
        spec = PodSpec(labels={"app": name}, node_selector=selector, grace_seconds=5)
        self.world.add_deployment(name, spec, replicas=replicas, namespace=self.namespace)

    async def add_budget(
        self,
        name: str,
        app: str,
        *,
        min_available: int | str | None = None,
        max_unavailable: int | str | None = None,
        always_unready: bool = False,
    ) -> None:
        unhealthy = UnhealthyPolicy.ALWAYS_ALLOW if always_unready else UnhealthyPolicy.IF_HEALTHY_BUDGET
        self.world.add_budget(
            name, {"app": app}, namespace=self.namespace, min_available=min_available, max_unavailable=max_unavailable, unhealthy=unhealthy
        )

    async def delete_pod(self, pod: PodView) -> None:
        self.world.delete_pod(self._pod(pod))

    async def drop_finalizers(self, pod: PodView) -> None:
        self.world.server.drop_finalizers(self._pod(pod))

    async def add_namespace(self) -> str:
        return f"contract-{next(NUMBERS)}"

    async def delete_namespace(self, name: str) -> None:
        self.world.delete_namespace(name)

    async def edit_node(
        self, name: str, *, labels: Mapping[str, str | None] | None = None, taints: tuple[Taint, ...] | None = None
    ) -> None:
        self.world.edit_node(name, labels=labels, taints=taints)

    async def account(self, rules: tuple[Rule, ...], *, pod: PodView | None = None) -> Cluster:
        identity = self.world.identity_of(self._pod(pod)) if pod else None
        name = f"system:serviceaccount:{self.namespace}:other"
        return self.world.cluster(self.world.add_account(name, rules, identity=identity))

    def _pod(self, pod: PodView) -> Pod:
        return self.world.store.pods[pod.ref]
