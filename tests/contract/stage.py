"""What the Cluster contract needs of a world: one small builder, played by the simulator and by the real control plane."""

from __future__ import annotations

import abc
import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from driver_manager.core.snapshot import NodeView, PodView, Rule, Taint, Toleration
from driver_manager.ports import Cluster

T = TypeVar("T")

READ_ONLY = (
    Rule(frozenset({"get"}), frozenset({""}), frozenset({"nodes"})),
    Rule(frozenset({"list"}), frozenset({""}), frozenset({"pods"})),
)
"""An account that may look at nodes and list pods, no more."""


class Stage(abc.ABC):
    """A namespace and nodes of a test's own."""

    namespace: str
    cluster: Cluster
    """As an account that may do everything."""

    @abc.abstractmethod
    async def add_node(self, labels: Mapping[str, str] | None = None, *, gpus: int = 8) -> str:
        """A Ready node without taints; gives its name."""

    @abc.abstractmethod
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
        """A pod, running on its node; without one it stays Pending and unscheduled."""

    @abc.abstractmethod
    async def add_daemon_set(
        self, name: str, selector: Mapping[str, str], *, tolerations: tuple[Toleration, ...] = (), stop_seconds: float = 0.0
    ) -> None:
        """A DaemonSet, whose pods have the label `app`; returns before they are there."""

    @abc.abstractmethod
    async def add_deployment(self, name: str, replicas: int, *, selector: Mapping[str, str]) -> None:
        """A Deployment with Ready pods on the nodes with these labels; the pods have the label `app`."""

    @abc.abstractmethod
    async def add_budget(
        self,
        name: str,
        app: str,
        *,
        min_available: int | str | None = None,
        max_unavailable: int | str | None = None,
        always_unready: bool = False,
    ) -> None:
        """A budget for the pods with that `app`, with a status that is up to date."""

    @abc.abstractmethod
    async def delete_pod(self, pod: PodView) -> None:
        """Somebody deletes a pod."""

    @abc.abstractmethod
    async def drop_finalizers(self, pod: PodView) -> None:
        """Somebody takes the finalizers off."""

    @abc.abstractmethod
    async def add_namespace(self) -> str:
        """Another namespace."""

    @abc.abstractmethod
    async def delete_namespace(self, name: str) -> None:
        """Somebody deletes a namespace."""

    @abc.abstractmethod
    async def edit_node(
        self, name: str, *, labels: Mapping[str, str | None] | None = None, taints: tuple[Taint, ...] | None = None
    ) -> None:
        """Somebody else patches a node, without a guard."""

    @abc.abstractmethod
    async def account(self, rules: tuple[Rule, ...], *, pod: PodView | None = None) -> Cluster:
        """The cluster as another account sees it: a service account of the namespace, its token bound to a pod if one is given."""

    # Looking, by the port alone ---------------------------------------------------------------------------------------

    async def pods(self, node: str, app: str = "") -> list[PodView]:
        """The pods of a node in the test's namespace."""
        found = (await self.cluster.pods_on(node)).items
        return [pod for pod in found if pod.namespace == self.namespace and app in ("", pod.labels.get("app"))]

    async def running(self, node: str, app: str) -> PodView:
        """The one pod of an app, once it runs there."""

        async def look() -> PodView | None:
            pods = [pod for pod in await self.pods(node, app) if pod.phase == "Running" and not pod.is_terminating and pod.is_ready]
            return pods[0] if len(pods) == 1 else None

        return await until(look, f"a running pod of {app} on {node}")

    async def gone(self, node: str, uid: str) -> None:
        """Returns when a pod is out of the API."""

        async def look() -> bool:
            return all(pod.uid != uid for pod in (await self.cluster.pods_on(node)).items)

        await until(look, f"pod {uid} to be gone")

    async def node_when(self, name: str, holds: Callable[[NodeView], bool]) -> NodeView:
        """A node, once something holds of it."""

        async def look() -> NodeView | None:
            node = await self.cluster.node(name)
            return node if holds(node) else None

        return await until(look, f"node {name} to be as wanted")


async def until(probe: Callable[[], Awaitable[T | None]], what: str, timeout: float = 15.0) -> T:
    """Asks until the answer is true, and gives it."""
    deadline = time.monotonic() + timeout
    while True:
        if found := await probe():
            return found
        assert time.monotonic() < deadline, f"waited {timeout} s for {what}"
        await asyncio.sleep(0.02)
