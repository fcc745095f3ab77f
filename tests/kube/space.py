"""A test's own corner of the cluster, with the calls and manifests of the fact tests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from tests.kube.controlplane import MERGE, ControlPlane, Response
from tests.kube.recorder import Event, Object, Recorder


class Space:
    """A namespace, some nodes, and a record of what happened to the namespace's pods and when."""

    def __init__(self, control_plane: ControlPlane, name: str, nodes: list[str], recorder: Recorder) -> None:
        self.cp, self.name, self.nodes, self.recorder = control_plane, name, nodes, recorder
        self.path = f"/api/v1/namespaces/{name}"
        self.apps = f"/apis/apps/v1/namespaces/{name}"

    async def ask(self, method: str, path: str, body: Any = None, **more: Any) -> Response:
        """One request, whatever its answer."""
        return await asyncio.to_thread(self.cp.request, method, path, body, **more)

    async def do(self, method: str, path: str, body: Any = None, want: int = 200, **more: Any) -> Any:
        """One request that has to be answered with one status; gives the body."""
        answer = await self.ask(method, path, body, **more)
        assert answer.status == want, answer
        return answer.body

    async def get(self, path: str) -> Any:
        """The object or list at a path."""
        return await self.do("GET", path)

    async def patch(self, path: str, body: Any, kind: str = MERGE) -> Any:
        """Patches an object, by JSON merge unless another kind is given."""
        return await self.do("PATCH", path, body, content_type=kind)

    async def has_status(self, path: str, wanted: int) -> bool:
        """Whether a GET is answered with this status."""
        return (await self.ask("GET", path)).status == wanted

    async def create_pod(self, name: str, spec: Object, **meta: Any) -> Object:
        """Creates a pod in the namespace."""
        body = {"metadata": {"name": name, **meta}, "spec": spec}
        made: Object = await self.do("POST", f"{self.path}/pods", body, 201)
        return made

    async def delete_pod(self, name: str, query: str = "") -> None:
        """Deletes a pod of the namespace."""
        await self.do("DELETE", f"{self.path}/pods/{name}{query}")

    def node_path(self, number: int) -> str:
        """The path of one of the nodes."""
        return f"/api/v1/nodes/{self.nodes[number]}"

    async def patch_node(self, number: int, body: Object) -> Object:
        """Patches one of the nodes by JSON merge."""
        got: Object = await self.patch(self.node_path(number), body)
        return got

    async def node(self, number: int = 0) -> Object:
        """One of the nodes as it is now."""
        got: Object = await self.get(self.node_path(number))
        return got

    async def when(self, is_it: Callable[[str, Object], bool], since: float = 0.0, timeout: float = 20.0) -> tuple[float, Object]:
        """The first pod event after `since` for which is_it(kind, pod) holds: its time and the pod."""

        def holds(event: Event) -> bool:
            return is_it(event.kind, event.object)

        event = await self.recorder.when(holds, since=since, timeout=timeout)
        return event.at, event.object

    async def pods(self, selector: str = "") -> list[Object]:
        """The pods of the namespace that a label selector chooses."""
        items: list[Object] = (await self.get(f"{self.path}/pods?labelSelector={selector}"))["items"]
        return items

    async def pod_on(self, number: int, selector: str) -> Object:
        """The only pod that a selector chooses on one of the nodes, bound to it or meant for it."""
        (pod,) = [p for p in await self.pods(selector) if node_of(p) == self.nodes[number]]
        return pod

    async def daemon_set(self, name: str, **options: Any) -> Object:
        """Creates a DaemonSet that runs on the space's nodes only."""
        made: Object = await self.do("POST", f"{self.apps}/daemonsets", self.daemon_set_manifest(name, **options), 201)
        return made

    def daemon_set_manifest(self, name: str, *, spec: Object | None = None, **options: Any) -> Object:
        """What `daemon_set` creates."""
        wanted = dict(spec or {})
        wanted["nodeSelector"] = {"space": self.name, **wanted.get("nodeSelector", {})}
        return daemon_set(name, spec=wanted, **options)

    async def ready(self, selector: str, count: int, timeout: float = 20.0) -> list[Object]:
        """The pods that a selector chooses, once they are so many and all Ready."""

        async def are_ready() -> list[Object] | None:
            pods = await self.pods(selector)
            return pods if len(pods) == count and all(is_ready(p) for p in pods) else None

        found: list[Object] = await until(are_ready, f"{count} ready {selector}", timeout)
        return found


async def until(probe: Callable[[], Awaitable[Any]], what: str, timeout: float = 20.0, every: float = 0.01) -> Any:
    """Asks until the answer is true, and gives that answer."""
    deadline = time.monotonic() + timeout
    while not (found := await probe()):
        assert time.monotonic() < deadline, f"waited {timeout} s for {what}"
        await asyncio.sleep(every)
    return found


def is_ready(pod: Mapping[str, Any]) -> bool:
    """Whether a pod's Ready condition is True."""
    conditions = pod.get("status", {}).get("conditions", [])
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def is_marked(pod: Mapping[str, Any]) -> bool:
    """Whether a pod is marked for deletion."""
    return "deletionTimestamp" in pod["metadata"]


def node_of(pod: Mapping[str, Any]) -> str:
    """Where a DaemonSet's pod belongs: bound, or by the affinity that its controller gave it."""
    if node := pod["spec"].get("nodeName"):
        return str(node)
    affinity = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    return str(affinity["nodeSelectorTerms"][0]["matchFields"][0]["values"][0])


def pod_spec(**options: Any) -> Object:
    """The spec of a pod that does nothing and stops within five seconds."""
    return {"terminationGracePeriodSeconds": 5, "containers": [{"name": "main", "image": "none"}], **options}


def daemon_set(
    name: str,
    *,
    selector: Object | None = None,
    labels: Object | None = None,
    annotations: Object | None = None,
    spec: Object | None = None,
    **more: Any,
) -> Object:
    """A DaemonSet of such pods, OnDelete, whose label `app` is its name."""
    meta = {"labels": labels or {"app": name}, "annotations": annotations or {}}
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": name},
        "spec": {
            "selector": {"matchLabels": selector or {"app": name}},
            "updateStrategy": {"type": "OnDelete"},
            "template": {"metadata": meta, "spec": pod_spec(**(spec or {}))},
            **more,
        },
    }


def deployment(name: str, replicas: int, **options: Any) -> Object:
    """A Deployment of such pods."""
    made = daemon_set(name, **options)
    made["spec"].pop("updateStrategy")
    return made | {"kind": "Deployment", "spec": made["spec"] | {"replicas": replicas}}


def eviction(pod: Mapping[str, Any], **options: Any) -> Object:
    """The Eviction of a pod, with these deleteOptions."""
    meta = {"name": pod["metadata"]["name"], "namespace": pod["metadata"]["namespace"]}
    asked = {"deleteOptions": options} if options else {}
    return {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": meta, **asked}
