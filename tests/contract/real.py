"""The Cluster contract's stage on a real control plane, seen through the project's own adapter."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from typing import Any

from driver_manager.core.snapshot import PodView, Rule, Taint, Toleration
from driver_manager.kube import connect
from driver_manager.ports import Cluster
from driver_manager.sim.clock import SimClock
from tests.contract.stage import Stage, until
from tests.kube import space
from tests.kube.controlplane import ControlPlane

Object = dict[str, Any]
RBAC = "/apis/rbac.authorization.k8s.io/v1"
NUMBERS = itertools.count(1)


class KubeStage(Stage):
    """A namespace and nodes on the worker's control plane. Open it with `open`, and close it."""

    def __init__(self, control_plane: ControlPlane, namespace: str, make_node: Callable[..., str]) -> None:
        self.cp = control_plane
        self.namespace = namespace
        self._make_node = make_node
        self._opened: list[Cluster] = []
        self._cluster_wide: list[str] = []
        self._namespaces: list[str] = []

    async def open(self) -> None:
        """Connects as admin."""
        self.cluster = await self._connect("admin", None)

    async def close(self) -> None:
        """Closes what was opened and leaves nothing cluster-wide behind."""
        for cluster in self._opened:
            await cluster.close()
        for path in [*self._cluster_wide, *(f"/api/v1/namespaces/{name}" for name in self._namespaces)]:
            await self._do(self.cp.delete, path)

    async def add_node(self, labels: Mapping[str, str] | None = None, *, gpus: int = 8) -> str:
        made: str = await asyncio.to_thread(self._make_node, labels=labels, gpus=gpus)
        return made

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
        annotations = {"kubelet.sim/stop-after": f"{stop_seconds}s"} | ({} if is_ready else {"kubelet.sim/ready": "never"})
        spec = space.pod_spec(terminationGracePeriodSeconds=grace_seconds)
        spec |= {"nodeName": node} if node else {"nodeSelector": {"nowhere": "true"}}
        if gpus:
            spec["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": str(gpus)}}
        meta = {"name": name, "labels": dict(labels or {}), "annotations": annotations, "finalizers": list(finalizers)}
        where = namespace or self.namespace
        made = await self._do(self.cp.create, f"/api/v1/namespaces/{where}/pods", {"metadata": meta, "spec": spec})
        uid = made["metadata"]["uid"]
        if node is None:
            return PodView(namespace=where, name=name, uid=uid, phase="Pending")

        async def look() -> PodView | None:
            found = [pod for pod in (await self.cluster.pods_on(node)).items if pod.uid == uid]
            return found[0] if found and found[0].phase == "Running" and found[0].is_ready is is_ready else None

        return await until(look, f"pod {name} to run")

    async def add_daemon_set(
        self, name: str, selector: Mapping[str, str], *, tolerations: tuple[Toleration, ...] = (), stop_seconds: float = 0.0
    ) -> None:
        spec = {"nodeSelector": dict(selector), "tolerations": [_toleration(one) for one in tolerations]}
        body = space.daemon_set(name, spec=spec, annotations={"kubelet.sim/stop-after": f"{stop_seconds}s"})
        await self._do(self.cp.create, f"/apis/apps/v1/namespaces/{self.namespace}/daemonsets", body)

    async def add_deployment(self, name: str, replicas: int, *, selector: Mapping[str, str]) -> None:
        body = space.deployment(name, replicas, spec={"nodeSelector": dict(selector)})
        path = f"/apis/apps/v1/namespaces/{self.namespace}/deployments"
        await self._do(self.cp.create, path, body)

        async def are_ready() -> bool:
            return bool((await self._do(self.cp.get, f"{path}/{name}"))["status"].get("readyReplicas") == replicas)

        await until(are_ready, f"deployment {name} to be ready")

    async def add_budget(
        self,
        name: str,
        app: str,
        *,
        min_available: int | str | None = None,
        max_unavailable: int | str | None = None,
        always_unready: bool = False,
    ) -> None:
        spec: Object = {"selector": {"matchLabels": {"app": app}}}
        limits = {"minAvailable": min_available, "maxUnavailable": max_unavailable}
        spec |= {key: value for key, value in limits.items() if value is not None}
        if always_unready:
            spec["unhealthyPodEvictionPolicy"] = "AlwaysAllow"
        path = f"/apis/policy/v1/namespaces/{self.namespace}/poddisruptionbudgets"
        await self._do(self.cp.create, path, {"metadata": {"name": name}, "spec": spec})

        async def is_counted() -> bool:
            got = await self._do(self.cp.get, f"{path}/{name}")
            return bool(got.get("status", {}).get("observedGeneration") == got["metadata"]["generation"])

        await until(is_counted, f"budget {name} to be counted")

    async def delete_pod(self, pod: PodView) -> None:
        await self._do(self.cp.delete, _path(pod))

    async def drop_finalizers(self, pod: PodView) -> None:
        await self._do(self.cp.patch, _path(pod), {"metadata": {"finalizers": None}})

    async def add_namespace(self) -> str:
        name = f"{self.namespace}-{next(NUMBERS)}"
        await self._do(self.cp.create, "/api/v1/namespaces", {"metadata": {"name": name}})
        self._namespaces.append(name)

        async def has_account() -> bool:
            return bool(await self._do(self.cp.exists, f"/api/v1/namespaces/{name}/serviceaccounts/default"))

        await until(has_account, f"the default account of {name}")
        return name

    async def delete_namespace(self, name: str) -> None:
        await self._do(self.cp.delete, f"/api/v1/namespaces/{name}")

    async def edit_node(
        self, name: str, *, labels: Mapping[str, str | None] | None = None, taints: tuple[Taint, ...] | None = None
    ) -> None:
        body: Object = {"metadata": {"labels": dict(labels or {})}}
        if taints is not None:
            body["spec"] = {"taints": [{"key": one.key, "value": one.value, "effect": one.effect} for one in taints]}
        await self._do(self.cp.patch, f"/api/v1/nodes/{name}", body)

    async def account(self, rules: tuple[Rule, ...], *, pod: PodView | None = None) -> Cluster:
        name, full = f"other-{next(NUMBERS)}", f"{self.namespace}-{next(NUMBERS)}"
        if pod is None:
            await self._do(self.cp.create, f"/api/v1/namespaces/{self.namespace}/serviceaccounts", {"metadata": {"name": name}})
        else:
            name = "default"  # a token can only be bound to a pod that runs under its account
        await self._do(self.cp.create, f"{RBAC}/clusterroles", {"metadata": {"name": full}, "rules": [_rule(one) for one in rules]})
        binding = {
            "metadata": {"name": full},
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": self.namespace}],
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": full},
        }
        await self._do(self.cp.create, f"{RBAC}/clusterrolebindings", binding)
        self._cluster_wide += [f"{RBAC}/clusterrolebindings/{full}", f"{RBAC}/clusterroles/{full}"]
        body = await self._do(self.cp.get, _path(pod)) if pod else None
        token = await asyncio.to_thread(self.cp.service_account_token, self.namespace, name, pod=body)
        cluster = await self._connect(full, token)

        async def works() -> bool:
            granted = (await cluster.permissions(self.namespace)).rules
            return all(any(rule.verbs >= one.verbs and rule.resources >= one.resources for rule in granted) for one in rules)

        await until(works, "the new role to work")
        return cluster

    async def _connect(self, user: str, token: str | None) -> Cluster:
        path = await asyncio.to_thread(self.cp.kubeconfig, user, token)
        cluster = await connect(str(path), SimClock())
        self._opened.append(cluster)
        return cluster

    async def _do(self, call: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.to_thread(call, *args)


def _path(pod: PodView) -> str:
    return f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}"


def _toleration(one: Toleration) -> Object:
    wire = {"key": one.key, "operator": one.operator, "value": one.value, "effect": one.effect}
    return {key: value for key, value in wire.items() if value}


def _rule(one: Rule) -> Object:
    return {"verbs": sorted(one.verbs), "apiGroups": sorted(one.groups), "resources": sorted(one.resources)}
