"""Plays the kubelets of any number of nodes against a real apiserver, and misbehaves on request.

It owns every node that carries the label `kubelet.sim`: those it registers itself (--nodes), and those a test
creates (`node_manifest`). It posts their status, renews their leases, and takes each pod bound to them through its
life with the writes a real kubelet makes: status patches, then DELETE with grace 0 and the pod's uid once the
containers are down. It runs nothing and looks at no image.

A pod's life is steered by annotations, read from the pod first, then from its node (so one node can be bad), at the
moment they matter:

    kubelet.sim/start-after    duration   bound -> running                                            (default 0)
    kubelet.sim/init-after     duration   each init container takes this long; "never" hangs in it    (default 0)
    kubelet.sim/image          "missing"  ImagePullBackOff, stays Pending
    kubelet.sim/ready          "never"    Running, never Ready
    kubelet.sim/ready-after    duration   running -> Ready                                            (default 0)
    kubelet.sim/restarts       number     after Ready (never Ready: instead) the containers crash and come back so often
    kubelet.sim/restart-every  duration   pause before each crash and before each come-back           (default 100ms)
    kubelet.sim/finish         "succeeded" or "failed"
    kubelet.sim/finish-after   duration   Ready -> finished                                           (default 0)
    kubelet.sim/stop-after     duration   SIGTERM -> containers down, cut off by the pod's grace period (default 0);
                                          "grace" takes all of the grace period, "never" hangs in Terminating
    kubelet.sim/down           "true"     on a node: no heartbeat, no pod moves, until the annotation goes
    kubelet.sim/needs          component  Ready only while a pod with this component label is Ready on the node, deleted when that goes
    kubelet.sim/devices        number     on a node: allocatable nvidia.com/gpu while a driver pod is Ready there, else 0
    kubelet.sim/devices-after  duration   driver Ready -> devices advertised                          (default 0)

A change of an annotation is seen at once by a pod that waits. Durations: 250ms, 2s, 1m, or plain seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import logging
import random
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import aiohttp

logger = logging.getLogger(__name__)
Object = dict[str, Any]

PREFIX = "kubelet.sim"
COMPONENT, DRIVER, GPU = "app.kubernetes.io/component", "nvidia-driver", "nvidia.com/gpu"
UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0}
FOREVER = float("inf")


def now() -> str:
    """The time as the API writes it."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds(text: str) -> float:
    """A duration in seconds; "never" is without end."""
    if text == "never":
        return FOREVER
    for unit, factor in UNITS.items():
        if text.endswith(unit):
            return float(text.removesuffix(unit)) * factor
    return float(text)


def node_manifest(
    name: str, *, gpus: int = 8, pods: int = 250, labels: dict[str, str] | None = None, annotations: dict[str, str] | None = None
) -> Object:
    """A Node to create, Ready at once (the apiserver still adds the not-ready taint, which goes in a moment)."""
    size = {
        "cpu": "64",
        "memory": "512Gi",
        "pods": str(pods),
        "ephemeral-storage": "1Ti",
        **({"nvidia.com/gpu": str(gpus)} if gpus else {}),
    }
    built_in = {
        "kubernetes.io/hostname": name,
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": "amd64",
        PREFIX: "true",
    }
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": built_in | (labels or {}), "annotations": annotations or {}},
        "status": {
            "capacity": size,
            "allocatable": size,
            "conditions": node_conditions(),
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}, {"type": "Hostname", "address": name}],
            "nodeInfo": {
                "architecture": "amd64",
                "operatingSystem": "linux",
                "osImage": "Simulated Linux",
                "kernelVersion": "6.1.0-sim",
                "containerRuntimeVersion": "containerd://2.1.0",
                "kubeletVersion": "v1.37.2",
                "kubeProxyVersion": "",
                "machineID": f"machine-{name}",
                "systemUUID": f"system-{name}",
                "bootID": f"boot-{name}-1",
            },
        },
    }


def node_conditions() -> list[Object]:
    """The conditions of a healthy node."""
    healthy = [
        ("MemoryPressure", "False", "KubeletHasSufficientMemory"),
        ("DiskPressure", "False", "KubeletHasNoDiskPressure"),
        ("PIDPressure", "False", "KubeletHasSufficientPID"),
        ("Ready", "True", "KubeletReady"),
    ]
    at = now()
    return [
        {
            "type": kind,
            "status": status,
            "reason": reason,
            "message": "",
            "lastHeartbeatTime": at,
            "lastTransitionTime": at,
        }
        for kind, status, reason in healthy
    ]


class Api:
    """The few calls a kubelet makes, in plain JSON: typed models would cost more CPU than all the rest."""

    def __init__(self, url: str, token: str, ca: Path) -> None:
        self.url = url
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=64, ssl=ssl.create_default_context(cafile=str(ca))),
            headers={"Authorization": f"Bearer {token}", "User-Agent": "kubelet-sim"},
            timeout=aiohttp.ClientTimeout(total=30),
        )

    async def close(self) -> None:
        await self._session.close()

    async def call(self, method: str, path: str, body: Object | None = None, kind: str = "application/json") -> tuple[int, Object]:
        """One request, tried again while the apiserver is away or sheds load."""
        for pause in (0.05, 0.2, 0.5, 1, 2, 5, 5, 5, 5):
            try:
                data = None if body is None else json.dumps(body)
                async with self._session.request(method, self.url + path, data=data, headers={"Content-Type": kind}) as answer:
                    if answer.status not in (429, 500, 503, 504):
                        return answer.status, await answer.json()
            except (aiohttp.ClientError, TimeoutError) as error:
                logger.warning("%s %s: %s", method, path, error)
            await asyncio.sleep(pause)
        raise ConnectionError(f"{method} {path}: no answer")

    async def patch(self, path: str, body: Object, kind: str = "strategic-merge-patch") -> int:
        status, answer = await self.call("PATCH", path, body, f"application/{kind}+json")
        if status >= 400 and status not in (404, 409):
            logger.error("patch %s: %s", path, answer)
        return status

    async def follow(self, path: str, query: str) -> AsyncIterator[tuple[str, Object]]:
        """ADDED, MODIFIED and DELETED without end; after a gap all is listed again, and what went is DELETED."""
        known: dict[str, Object] = {}
        while True:
            status, listed = await self.call("GET", f"{path}?{query}")
            if status != 200:
                raise RuntimeError(f"list {path}: {listed}")
            items = {item["metadata"]["uid"]: item for item in listed["items"]}
            for gone in known.keys() - items.keys():
                yield "DELETED", known[gone]
            known = items
            for item in items.values():
                yield "ADDED", item
            version = listed["metadata"]["resourceVersion"]
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, StopAsyncIteration):
                while True:
                    options = f"{query}&watch=true&allowWatchBookmarks=true&resourceVersion={version}"
                    no_limit = aiohttp.ClientTimeout(total=None, sock_read=None)
                    async with self._session.get(f"{self.url}{path}?{options}", timeout=no_limit) as answer:
                        if answer.status != 200:
                            break
                        waiting = b""
                        async for chunk in answer.content.iter_any():
                            *lines, waiting = (waiting + chunk).split(b"\n")
                            for event in map(json.loads, lines):
                                if event["type"] == "ERROR":  # 410: the version is compacted
                                    raise StopAsyncIteration
                                version = event["object"]["metadata"]["resourceVersion"]
                                if event["type"] == "BOOKMARK":
                                    continue
                                uid = event["object"]["metadata"]["uid"]
                                known.pop(uid, None) if event["type"] == "DELETED" else known.update({uid: event["object"]})
                                yield event["type"], event["object"]
            await asyncio.sleep(0.1)


class Pod:
    """One pod on one node: what the API last said about it, and the task that lives its life."""

    def __init__(self, kubelet: Kubelet, body: Object) -> None:
        self.kubelet, self.body = kubelet, body
        self.uid = body["metadata"]["uid"]
        self.changed = asyncio.Event()
        status = body.get("status", {})
        self.restarts = max((c["restartCount"] for c in status.get("containerStatuses", [])), default=0)
        self.started_at = status.get("startTime") or now()
        self.is_dying = False
        self.is_up = False
        """Whether it was last said to be Ready."""
        self.task: asyncio.Task[None] | None = None

    @property
    def path(self) -> str:
        meta = self.body["metadata"]
        return f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"

    @property
    def node(self) -> str:
        return str(self.body["spec"]["nodeName"])

    @property
    def component(self) -> str:
        return str((self.body["metadata"].get("labels") or {}).get(COMPONENT, ""))

    @property
    def is_frozen(self) -> bool:
        return self.kubelet.is_down(self.node)

    @property
    def is_kept_from_ready(self) -> bool:
        needs = self.wish("needs")
        return self.wish("ready") == "never" or bool(needs and not self.kubelet.has_up(self.node, needs))

    def wish(self, key: str, default: str = "") -> str:
        """What the pod, else its node, asks for."""
        name = f"{PREFIX}/{key}"
        of_node = self.kubelet.nodes.get(self.node, {}).get("metadata", {}).get("annotations", {})
        return str((self.body["metadata"].get("annotations") or {}).get(name) or of_node.get(name) or default)

    def update(self, body: Object) -> None:
        """Takes in a new version of the pod; a deletion mark ends its normal life and begins its end."""
        self.body = body
        self.changed.set()
        if "deletionTimestamp" in body["metadata"] and not self.is_dying:
            self.is_dying = True
            self.run(self.die)
        elif self.task is None:
            self.run(self.live)

    def run(self, life: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if self.task:
            self.task.cancel()
        self.task = self.kubelet.tasks.create_task(self.guarded(life))

    async def guarded(self, life: Callable[[], Awaitable[None]]) -> None:
        try:
            await life()
        except (ConnectionError, RuntimeError):  # one pod's trouble stays its own
            logger.exception("pod %s", self.path)

    async def wait(self, key: str, default: str = "0", at_most: Callable[[], float] = lambda: FOREVER) -> None:
        """Waits as long as the annotation says, counted from now, read again when the pod or its node changes."""
        clock = asyncio.get_running_loop().time
        begun = clock()
        while True:
            self.changed.clear()
            wished = self.wish(key, default)
            length = FOREVER if wished == "never" else at_most() if wished == "grace" else min(seconds(wished), at_most())
            left = begun + length - clock()
            if left <= 0 and not self.is_frozen:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait(), None if self.is_frozen or left == FOREVER else left)

    async def live(self) -> None:
        if self.body.get("status", {}).get("phase") in ("Succeeded", "Failed"):
            return
        inits = self.body["spec"].get("initContainers", [])
        has_to_wait = inits or self.wish("image") or seconds(self.wish("start-after", "0")) or self.is_frozen
        if has_to_wait:
            await self.wait_while_down()
            await self.post("Pending", "PodInitializing" if inits else "ContainerCreating")
        while self.wish("image") == "missing":
            await self.post("Pending", "ImagePullBackOff")
            await self.next_change()
        await self.wait("start-after")
        for done in range(len(inits)):
            await self.post("Pending", "PodInitializing", init_running=done)
            await self.wait("init-after")
        if self.is_kept_from_ready or seconds(self.wish("ready-after", "0")):
            await self.post("Running")
            await self.wait("ready-after")
            while self.is_kept_from_ready:
                await (self.crash() if self.has_to_crash else self.next_change())
        await self.post("Running", ready=True)
        while self.has_to_crash:
            await self.crash()
            await self.post("Running", ready=True)
        if finish := self.wish("finish"):
            await self.wait("finish-after")
            await self.post(finish.capitalize())

    @property
    def has_to_crash(self) -> bool:
        return self.restarts < int(self.wish("restarts", "0"))

    async def crash(self) -> None:
        await self.wait("restart-every", "100ms")
        self.restarts += 1
        await self.post("Running", "CrashLoopBackOff")
        await self.wait("restart-every", "100ms")

    async def die(self) -> None:
        """SIGTERM, wait, report the containers down, then take the pod out of the API."""
        self.say_up(False)
        await self.wait("stop-after", at_most=lambda: float(self.body["metadata"].get("deletionGracePeriodSeconds") or 0))
        if self.body.get("status", {}).get("containerStatuses"):
            code = 0 if self.body["spec"].get("restartPolicy") != "Always" else 137
            await self.post("Failed" if code else "Succeeded", code=code)
        options = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "gracePeriodSeconds": 0,
            "preconditions": {"uid": self.uid},
        }
        await self.kubelet.api.call("DELETE", self.path, options)  # with finalizers it stays, and goes with the last of them

    def say_up(self, is_up: bool) -> None:
        """Those that need it, and the node's devices, follow."""
        if self.is_up != is_up:
            self.is_up = is_up
            self.kubelet.component_changed(self.node, self.component, is_up)

    async def wait_while_down(self) -> None:
        while self.is_frozen:
            await self.next_change()

    async def next_change(self) -> None:
        self.changed.clear()
        await self.changed.wait()

    async def post(
        self,
        phase: str,
        waiting: str = "",
        *,
        ready: bool = False,
        code: int | None = None,
        init_running: int | None = None,
    ) -> None:
        """Writes the pod's status as a kubelet would for this phase."""
        spec, at = self.body["spec"], now()
        is_over = phase in ("Succeeded", "Failed")
        if is_over:
            state = self.ended((0 if phase == "Succeeded" else 1) if code is None else code, at)
        else:
            state = {"waiting": {"reason": waiting}} if waiting else {"running": {"startedAt": self.started_at}}
        last = self.ended(1, at) if self.restarts else {}
        inits = spec.get("initContainers", [])
        status: Object = {
            "phase": phase,
            "hostIP": "127.0.0.1",
            "hostIPs": [{"ip": "127.0.0.1"}],
            "startTime": self.started_at,
            "podIP": f"10.{int(self.uid[:2], 16)}.{int(self.uid[2:4], 16)}.{int(self.uid[4:6], 16)}",
            "conditions": pod_conditions(is_over=is_over, ready=ready, initialized=phase != "Pending" or not inits, at=at),
            "containerStatuses": [container_status(each, state, ready, self.restarts, last) for each in spec["containers"]],
        }
        if inits:
            states = [self.init_state(number, phase, init_running, at) for number in range(len(inits))]
            status["initContainerStatuses"] = [container_status(c, s, "terminated" in s) for c, s in zip(inits, states, strict=True)]
        await self.kubelet.api.patch(f"{self.path}/status", {"metadata": {"uid": self.uid}, "status": status})
        self.say_up(ready)

    def ended(self, code: int, at: str) -> Object:
        """The state of a container that has ended."""
        reason = "Completed" if code == 0 else "Error"
        return {"terminated": {"exitCode": code, "reason": reason, "startedAt": self.started_at, "finishedAt": at}}

    def init_state(self, number: int, phase: str, running: int | None, at: str) -> Object:
        """The state of one init container: those before the one that runs are done, those after it wait."""
        if phase != "Pending" or (running is not None and number < running):
            return self.ended(0, at)
        return {"running": {"startedAt": at}} if number == running else {"waiting": {"reason": "PodInitializing"}}


def container_status(of: Object, state: Object, ready: bool, restarts: int = 0, last: Object | None = None) -> Object:
    """One entry of `containerStatuses`."""
    return {
        "name": of["name"],
        "image": of.get("image", ""),
        "imageID": "",
        "ready": ready,
        "started": "running" in state,
        "restartCount": restarts,
        "state": state,
        "lastState": last or {},
    }


def pod_conditions(*, is_over: bool, ready: bool, initialized: bool, at: str) -> list[Object]:
    """The conditions of a pod."""
    is_true = {
        "PodReadyToStartContainers": not is_over,
        "Initialized": initialized,
        "Ready": ready,
        "ContainersReady": ready,
    }
    why = {} if ready else {"reason": "PodCompleted" if is_over else "ContainersNotReady"}
    return [
        {"type": kind, "status": str(value), "lastTransitionTime": at, "lastProbeTime": None, **({} if value else why)}
        for kind, value in is_true.items()
    ]


class Kubelet:
    """All simulated nodes of one cluster."""

    def __init__(self, api: Api, *, lease_seconds: float = 10.0) -> None:
        self.api, self.lease_seconds = api, lease_seconds
        self.nodes: dict[str, Object] = {}
        self.pods: dict[str, Pod] = {}
        self.orphans: dict[str, Object] = {}
        """Pods seen before their node was."""
        self.devices: dict[str, asyncio.Lock] = {}
        """Nodes whose devices come and go; one status patch at a time each."""

    async def register(self, manifests: list[Object]) -> None:
        """Creates nodes; one that exists already is left as it is."""
        limit = asyncio.Semaphore(32)

        async def create(manifest: Object) -> None:
            async with limit:
                status, answer = await self.api.call("POST", "/api/v1/nodes", manifest)
            if status not in (201, 409):
                raise RuntimeError(f"create node: {answer}")

        async with asyncio.TaskGroup() as group:
            for manifest in manifests:
                group.create_task(create(manifest))

    async def run(self) -> None:
        """Works until cancelled."""
        async with asyncio.TaskGroup() as self.tasks:
            self.tasks.create_task(self.watch_nodes())
            self.tasks.create_task(self.watch_pods())

    def node_wish(self, node: str, key: str) -> str:
        """What a node asks for itself."""
        annotations = self.nodes.get(node, {}).get("metadata", {}).get("annotations") or {}
        return str(annotations.get(f"{PREFIX}/{key}", ""))

    def is_down(self, node: str) -> bool:
        return self.node_wish(node, "down") == "true"

    def on(self, node: str) -> list[Pod]:
        return [pod for pod in self.pods.values() if pod.node == node]

    def has_up(self, node: str, component: str) -> bool:
        return any(pod.is_up and pod.component == component for pod in self.on(node))

    def component_changed(self, node: str, component: str, is_up: bool) -> None:
        """A pod came up or goes: who needs it becomes Ready, or is deleted."""
        for pod in self.on(node) if component else ():
            if pod.wish("needs") == component:
                pod.changed.set()
                if not is_up and not pod.is_dying:
                    self.tasks.create_task(self.api.call("DELETE", pod.path, {"preconditions": {"uid": pod.uid}}))
        if component == DRIVER and self.node_wish(node, "devices"):
            self.tasks.create_task(self.advertise(node))

    async def advertise(self, node: str) -> None:
        """Says how many devices there are now."""
        if self.has_up(node, DRIVER):
            await asyncio.sleep(seconds(self.node_wish(node, "devices-after") or "0"))
        async with self.devices.setdefault(node, asyncio.Lock()):
            count = self.node_wish(node, "devices") if self.has_up(node, DRIVER) else "0"
            await self.api.patch(f"/api/v1/nodes/{node}/status", {"status": {"allocatable": {GPU: count}}})

    async def watch_nodes(self) -> None:
        heartbeats: dict[str, asyncio.Task[None]] = {}
        async for kind, node in self.api.follow("/api/v1/nodes", f"labelSelector={PREFIX}"):
            name = node["metadata"]["name"]
            if kind == "DELETED":
                self.nodes.pop(name, None)
                if task := heartbeats.pop(name, None):
                    task.cancel()
                continue
            node["metadata"].setdefault("annotations", {})
            wishes = {k: v for k, v in node["metadata"]["annotations"].items() if k.startswith(PREFIX)}
            before = self.nodes.get(name)
            self.nodes[name] = {"metadata": {"name": name, "uid": node["metadata"]["uid"], "annotations": wishes}}
            if before is None:
                heartbeats[name] = self.tasks.create_task(self.heartbeat(name, node))
                for uid in [uid for uid, pod in self.orphans.items() if pod["spec"]["nodeName"] == name]:
                    self.see_pod("ADDED", self.orphans.pop(uid))
            elif before["metadata"]["annotations"] != wishes:
                for pod in self.on(name):
                    pod.changed.set()
                if self.node_wish(name, "devices"):
                    self.tasks.create_task(self.advertise(name))

    async def heartbeat(self, name: str, node: Object) -> None:
        """Ready at once, then a lease renewed at intervals."""
        leases = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
        owner = {"apiVersion": "v1", "kind": "Node", "name": name, "uid": node["metadata"]["uid"]}

        def renewed() -> Object:
            stamp = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
            return {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": stamp}

        is_ready = any(c["type"] == "Ready" and c["status"] == "True" for c in node.get("status", {}).get("conditions", []))
        if not is_ready and not self.is_down(name):
            fresh = node_manifest(name)["status"]
            kept = {k: v for k, v in node.get("status", {}).items() if v and k not in ("conditions", "daemonEndpoints", "nodeInfo")}
            await self.api.patch(f"/api/v1/nodes/{name}/status", {"status": {**fresh, **kept}})
        await self.api.call("POST", leases, {"metadata": {"name": name, "ownerReferences": [owner]}, "spec": renewed()})
        await asyncio.sleep(random.uniform(0, self.lease_seconds))
        was_down = False
        while True:
            if not self.is_down(name):
                await self.api.patch(f"{leases}/{name}", {"spec": renewed()}, "merge-patch")
                if was_down:
                    await self.api.patch(f"/api/v1/nodes/{name}/status", {"status": {"conditions": node_conditions()}})
            was_down = self.is_down(name)
            await asyncio.sleep(self.lease_seconds)

    async def watch_pods(self) -> None:
        async for kind, pod in self.api.follow("/api/v1/pods", "fieldSelector=spec.nodeName!="):
            self.see_pod(kind, pod)

    def see_pod(self, kind: str, body: Object) -> None:
        uid, node = body["metadata"]["uid"], body["spec"]["nodeName"]
        if kind == "DELETED":
            self.orphans.pop(uid, None)
            if (gone := self.pods.pop(uid, None)) and gone.task:
                gone.task.cancel()
        elif uid in self.pods:
            self.pods[uid].update(body)
        elif node in self.nodes:
            self.pods[uid] = Pod(self, body)
            self.pods[uid].update(body)
        else:
            self.orphans[uid] = body


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kubeconfig", required=True, type=Path, help="JSON kubeconfig with a token, as controlplane.py writes it")
    parser.add_argument("--nodes", type=int, default=0, help="register so many nodes, node-0 onwards")
    parser.add_argument("--gpus", type=int, default=8, help="nvidia.com/gpu of each")
    parser.add_argument("--label", action="append", default=[], metavar="KEY=VALUE", help="label of each registered node")
    parser.add_argument("--lease-seconds", type=float, default=10.0, help="time between two heartbeats of a node")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    config = json.loads(options.kubeconfig.read_text())
    cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
    api = Api(cluster["server"], user["token"], Path(cluster["certificate-authority"]))
    try:
        kubelet = Kubelet(api, lease_seconds=options.lease_seconds)
        labels = dict(pair.split("=", 1) for pair in options.label)
        await kubelet.register([node_manifest(f"node-{n}", gpus=options.gpus, labels=labels) for n in range(options.nodes)])
        await kubelet.run()
    finally:
        await api.close()


if __name__ == "__main__":
    asyncio.run(main())
