"""The Fleet contract's stage on a real control plane, seen through the project's own adapter."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from typing import Any

from driver_manager import names
from driver_manager.core.snapshot import Rule
from driver_manager.kube.fleet import KubeFleet, connect_fleet
from driver_manager.kube.fleetcalls import Selection
from driver_manager.ports import Fleet
from driver_manager.sim.clock import SimClock
from tests.contract.fleetstage import COMPONENT, FleetStage
from tests.contract.stage import until
from tests.kube import crds, manifests, space
from tests.kube.controlplane import STRATEGIC, ControlPlane

Object = dict[str, Any]
SLICES = "/apis/resource.k8s.io/v1/resourceslices"
RBAC = "/apis/rbac.authorization.k8s.io/v1"
NUMBERS = itertools.count(1)
DRIVERS = {"key": COMPONENT, "operator": "In", "values": ["nvidia-driver", "nvidia-vgpu-manager"]}


class HastyClock(SimClock):
    """Real time, but no pause is longer than a fifth of a second."""

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(min(seconds, 0.2))


class KubeFleetStage(FleetStage):
    """A namespace and nodes on the worker's control plane. Open it with `open`, and close it."""

    def __init__(self, control_plane: ControlPlane, namespace: str, make_node: Callable[..., str]) -> None:
        self.cp = control_plane
        self.namespace = namespace
        self.selection = Selection(namespace=namespace, nodes=f"fleet={namespace}", maintenances=namespace)
        self._make_node = make_node
        self._opened: list[KubeFleet] = []
        self._served: set[str] = set()
        self._cluster_wide: list[str] = []

    async def open(self) -> None:
        """Connects as admin."""
        self.fleet = await self._connect("admin", None)

    async def close(self) -> None:
        """Closes what was opened and leaves nothing cluster-wide behind."""
        for fleet in self._opened:
            await fleet.close()
        for path in self._cluster_wide:
            await self._do(self.cp.delete, path)
        for kind in sorted(self._served):
            await self.serve(kind, is_served=False)

    async def add_node(self, labels: Mapping[str, str] | None = None, *, gpus: int = 8, is_selected: bool = True) -> str:
        mark = {"fleet": self.namespace} if is_selected else {}
        made: str = await asyncio.to_thread(self._make_node, labels={**(labels or {}), **mark}, gpus=gpus)
        return made

    async def select_node(self, name: str, is_selected: bool) -> None:
        value = self.namespace if is_selected else None
        await self._do(self.cp.patch, f"/api/v1/nodes/{name}", {"metadata": {"labels": {"fleet": value}}})

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
        spec: Object = {"nodeSelector": dict(selector), "containers": [_container(digest)]}
        if avoids_drivers:
            term = {"labelSelector": {"matchExpressions": [DRIVERS]}, "topologyKey": "kubernetes.io/hostname"}
            spec["affinity"] = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
        body = space.daemon_set(name, selector={"app": labels["app"]}, labels=dict(labels), spec=spec)
        if is_parkable:
            body["metadata"]["labels"] = {names.PARK: "true"}
            body["spec"]["updateStrategy"] = {"type": "RollingUpdate"}
        await self._do(self.cp.create, self._sets(), body)

    async def set_digest(self, name: str, digest: str) -> None:
        body = {"spec": {"template": {"spec": {"containers": [_container(digest)]}}}}
        await asyncio.to_thread(self.cp.patch, self._sets(name), body, kind=STRATEGIC)

    async def delete_set(self, name: str, *, orphans: bool) -> None:
        await self._do(self.cp.delete, f"{self._sets(name)}?propagationPolicy={'Orphan' if orphans else 'Background'}")

    async def install_parking(self, way: str) -> None:
        for body in manifests.documents(manifests.PARKING):
            if body["metadata"]["name"] == f"driver-manager-park-{way}":
                await self._do(self.cp.apply, manifests.path(body), body)
                self._cluster_wide.append(manifests.path(body))

    async def serve(self, kind: str, *, is_served: bool = True) -> None:
        if is_served:
            self._served.add(kind)
            await self._do(self.cp.create, crds.CRDS, crds.crd(kind))
        else:
            await self._do(self.cp.delete, f"{crds.CRDS}/{crds.name(kind)}")
            self._served.discard(kind)

        async def is_so() -> bool:
            answer = await self._do(self.cp.request, "GET", crds.path(kind))
            return bool(answer.status == (200 if is_served else 404))  # 429 for a moment: "storage is (re)initializing"

        await until(is_so, f"{kind} to be served: {is_served}")

    async def add_custom(self, kind: str, name: str, spec: Mapping[str, Any], *, condition: str = "") -> None:
        await self._do(self.cp.create, crds.path(kind), crds.custom(kind, name, dict(spec)))
        if condition:
            theirs = {"type": condition, "status": "True", "reason": "Theirs", "message": "", "lastTransitionTime": "2026-01-31T09:00:00Z"}
            await self._do(self.cp.patch, f"{crds.path(kind, name)}/status", {"status": {"state": "ready", "conditions": [theirs]}})

    async def edit_custom(self, kind: str, name: str, spec: Mapping[str, Any]) -> None:
        await self._do(self.cp.patch, crds.path(kind, name), {"spec": dict(spec)})

    async def add_budget(self, name: str, labels: Mapping[str, str], min_available: int) -> None:
        spec = {"selector": {"matchLabels": dict(labels)}, "minAvailable": min_available}
        await self._do(self.cp.create, self._budgets(), {"metadata": {"name": name}, "spec": spec})

    async def set_budget(self, name: str, min_available: int) -> None:
        await self._do(self.cp.patch, self._budgets(name), {"spec": {"minAvailable": min_available}})

    async def remove_budget(self, name: str) -> None:
        await self._do(self.cp.delete, self._budgets(name))

    def _budgets(self, name: str = "") -> str:
        return f"/apis/policy/v1/namespaces/{self.namespace}/poddisruptionbudgets" + (f"/{name}" if name else "")

    async def publish(self, name: str, node: str, devices: int, *, driver: str = names.GPU_DRA_DRIVER, generation: int = 1) -> None:
        pool = {"name": node, "generation": generation, "resourceSliceCount": 1}
        spec = {"pool": pool, "devices": [{"name": f"gpu-{number}"} for number in range(devices)]}
        path = f"{SLICES}/{self.namespace}-{name}"
        if path in self._cluster_wide:
            await self._do(self.cp.patch, path, {"spec": spec})
            return
        self._cluster_wide.append(path)
        meta = {"name": f"{self.namespace}-{name}"}
        await self._do(self.cp.create, SLICES, {"metadata": meta, "spec": {**spec, "driver": driver, "nodeName": node}})

    async def unpublish(self, name: str) -> None:
        path = f"{SLICES}/{self.namespace}-{name}"
        self._cluster_wide.remove(path)
        await self._do(self.cp.delete, path)

    async def work_on(self, name: str, *, ready: bool = False, finalizer: bool | None = None) -> None:
        path = crds.path("NodeMaintenance", name, namespace=self.namespace)
        if ready:
            free = {"type": "Ready", "status": "True", "reason": "Ready", "message": "", "lastTransitionTime": "2026-01-31T09:00:00Z"}
            await self._do(self.cp.patch, f"{path}/status", {"status": {"conditions": [free]}})
        if finalizer is not None:
            held = ["maintenance.nvidia.com/finalizer"] if finalizer else None
            await self._do(self.cp.patch, path, {"metadata": {"finalizers": held}})

    async def maintenance_spec(self, name: str) -> dict[str, Any]:
        spec = (await self._do(self.cp.get, crds.path("NodeMaintenance", name, namespace=self.namespace)))["spec"]
        return {key: spec[key] for key in ("requestorID", "nodeName", "drainSpec", "waitForPodCompletion") if key in spec}

    async def events(self, name: str, namespace: str = "default") -> list[tuple[bool, str, str]]:
        path = f"/api/v1/namespaces/{namespace}/events?fieldSelector=involvedObject.name%3D{name},source%3Ddriver-manager"
        found = (await self._do(self.cp.get, path))["items"]
        return [(item["type"] == "Warning", item["reason"], item["message"]) for item in found]

    async def account(self, cluster: tuple[Rule, ...], namespace: tuple[Rule, ...] = ()) -> Fleet:
        name, full = f"other-{next(NUMBERS)}", f"{self.namespace}-fleet-{next(NUMBERS)}"
        await self._do(self.cp.create, f"/api/v1/namespaces/{self.namespace}/serviceaccounts", {"metadata": {"name": name}})
        self._cluster_wide += [f"{RBAC}/clusterrolebindings/{full}", f"{RBAC}/clusterroles/{full}"]
        for kind, where, rules in (("ClusterRole", RBAC, cluster), ("Role", f"{RBAC}/namespaces/{self.namespace}", namespace)):
            role = f"{where}/{kind.lower()}s"
            await self._do(self.cp.create, role, {"metadata": {"name": full}, "rules": [_rule(one) for one in rules]})
            binding = {
                "metadata": {"name": full},
                "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": self.namespace}],
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": full},
            }
            await self._do(self.cp.create, f"{where}/{kind.lower()}bindings", binding)
        token = await asyncio.to_thread(self.cp.service_account_token, self.namespace, name)
        fleet = await self._connect(full, token)

        async def works() -> bool:
            granted = await fleet.permissions(self.namespace)
            asked = (
                (verb, group, kind)
                for one in (*cluster, *namespace)
                for verb in one.verbs
                for group in one.groups
                for kind in one.resources
            )
            return all(granted.allow(*one) for one in asked)

        await until(works, "the new roles to work")
        return fleet

    async def _connect(self, user: str, token: str | None) -> KubeFleet:
        path = await asyncio.to_thread(self.cp.kubeconfig, user, token)
        fleet = await connect_fleet(str(path), HastyClock(), self.selection)
        self._opened.append(fleet)
        return fleet

    async def _do(self, call: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.to_thread(call, *args)

    def _sets(self, name: str = "") -> str:
        return f"/apis/apps/v1/namespaces/{self.namespace}/daemonsets" + (f"/{name}" if name else "")


def _container(digest: str) -> Object:
    return {"name": "main", "image": "none", "env": [{"name": "DRIVER_CONFIG_DIGEST", "value": digest}]}


def _rule(one: Rule) -> Object:
    return {"verbs": sorted(one.verbs), "apiGroups": sorted(one.groups), "resources": sorted(one.resources)}
