"""The scripted API server: objects, lists in pages, watches that can be resumed, guarded writes; and a script that reacts to the writes.

It is no simulator: the DaemonSet's controller, the kubelets and the users of the GPUs do what they do on a good day, at the script's pace.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from benchmarks.scale import objects
from benchmarks.scale.link import Request, read_request, write_answer
from benchmarks.scale.objects import Node, Pod
from driver_manager import names
from driver_manager.core.rollout_states import State

HISTORY: Final = 3_000
"""Events of a collection that a watch can go on from."""
USER_STOP: Final = 0.2
"""Seconds from the eviction of the GPU pod until it is gone."""
DRIVER_STOP: Final = 0.1
"""Seconds from the deletion of the driver pod until it is gone, and from there until the new one runs."""
VALIDATOR_START: Final = 0.3
"""Seconds from a ready driver until the validator is ready."""


@dataclass(slots=True)
class Collection:
    """One kind, as it is listed and watched."""

    bodies: Callable[[], list[bytes]]
    events: deque[tuple[int, bytes]] = field(default_factory=lambda: deque(maxlen=HISTORY))
    watchers: list[asyncio.StreamWriter] = field(default_factory=list)
    first: int = 0
    """The oldest version from which a watch can go on."""


class World:
    """A fleet and its API server."""

    def __init__(self, size: int, policy: dict[str, Any]) -> None:
        self.version, self.template = 10, 1
        self.nodes = {name: Node(name, labels={names.UPGRADE_STATE: State.DONE}) for name in (f"gpu-{n:05}" for n in range(size))}
        self.pods = {(kind, name): Pod(kind, name, 1, 1) for name in self.nodes for kind in ("driver", "validator")}
        self.policy = policy
        self.ready = size
        self.leases: dict[str, Any] = {}
        """By name: gpu-operator's is not there, so the controller leads."""
        self.requests: Counter[str] = Counter()
        self.waiting: deque[str] = deque()
        """Nodes whose new driver pod runs and is not ready: the script says when it is."""
        self.told: dict[str, float] = {}
        """Node -> when the watch was given what its next write answers to."""
        self.latencies: list[float] = []
        self.last_write = 0.0
        self.finished = 0
        self.changed = asyncio.Event()
        self.users: dict[str, asyncio.StreamWriter] = {}
        """Node -> the watch of its pods."""
        self._pages: dict[str, list[bytes]] = {}
        self._later: set[asyncio.TimerHandle] = set()
        self.kinds = {
            "nodes": Collection(lambda: [node.body() for node in self.nodes.values()]),
            "daemonsets.apps": Collection(lambda: [self._set_body(kind) for kind in ("driver", "validator")]),
            "controllerrevisions.apps": Collection(self._revisions),
            "driver pods": Collection(lambda: self._pod_bodies("driver")),
            "validator pods": Collection(lambda: self._pod_bodies("validator")),
            "other pods": Collection(list),
            "other daemonsets": Collection(list),
            "poddisruptionbudgets.policy": Collection(list),
            "resourceslices.resource.k8s.io": Collection(list),
            "clusterpolicies.nvidia.com": Collection(lambda: [objects.cluster_policy(self.policy, self.version)]),
            "nvidiadrivers.nvidia.com": Collection(list),
        }

    # Answers --------------------------------------------------------------------------------------------------------

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, from its beginning to its end."""
        try:
            while True:
                request = await read_request(reader)
                self.requests[self._name_of(request)] += 1
                if request.verb == "watch":
                    await self._watch(request, reader, writer)
                    return
                status, body = self._answer(request)
                write_answer(writer, status, body)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    @staticmethod
    def _name_of(request: Request) -> str:
        """As the figures count it; what follows one node apart from what follows the fleet."""
        return f"{request.verb} {request.resource}" + (" of a node" if "fieldSelector" in request.query else "")

    def _answer(self, request: Request) -> tuple[int, bytes]:
        name = request.path.rpartition("/")[2]
        match request.verb, request.resource:
            case "list", "pods" if "fieldSelector" in request.query:
                return 200, self._pods_on(request.query["fieldSelector"].partition("=")[2])
            case "list", "runtimeclasses.node.k8s.io":
                return 200, b'{"items":[]}'
            case "get", "apigroups":
                return 200, b'{"versions":[{"groupVersion":"resource.k8s.io/v1","version":"v1"}]}'
            case "list", _:
                return 200, self._page(request)
            case "patch", "nodes":
                return self._patch(self.nodes[name], request)
            case "get", "nodes":
                return 200, self.nodes[name].body()
            case "create", "pods/eviction":
                self._later_on(USER_STOP, self._user_gone, request.path.split("/")[-2].removeprefix("training-"))
                return 201, b"{}"
            case "delete", "pods":
                self._driver_deleted(name)
                return 200, b"{}"
            case "get", "leases.coordination.k8s.io":
                return (200, json.dumps(self.leases[name]).encode()) if name in self.leases else (404, b'{"kind":"Status"}')
            case "create" | "update", "leases.coordination.k8s.io":
                lease = json.loads(request.body)
                lease["metadata"] |= {"uid": "lease", "resourceVersion": str(self._next())}
                self.leases[lease["metadata"]["name"]] = lease
                return 200, json.dumps(lease).encode()
            case "get" | "patch", "clusterpolicies.nvidia.com" | "clusterpolicies/status.nvidia.com":
                return 200, objects.cluster_policy(self.policy, self.version)
            case "create", "events":
                return 201, b"{}"
        return 404, b'{"kind":"Status","message":"not in the script"}'

    def _next(self) -> int:
        self.version += 1
        return self.version

    def _page(self, request: Request) -> bytes:
        token = request.query.get("continue", "")
        version, place = token.split(":")[:2] if token else (str(self.version), "0")
        bodies = self._pages.pop(token, None) or self.kinds[self._kind(request)].bodies()
        size = int(request.query.get("limit", "500"))
        here, rest = bodies[:size], bodies[size:]
        following = f"{version}:{int(place) + size}:{request.path}:{request.query.get('labelSelector', '')}" if rest else ""
        if rest:
            self._pages[following] = rest
        meta = objects.encode({"resourceVersion": version, "continue": following})
        return b"".join((b'{"metadata":', meta, b',"items":[', b",".join(here), b"]}"))

    def _kind(self, request: Request) -> str:
        selector = request.query.get("labelSelector", "")
        if request.resource == "daemonsets.apps" and selector:
            return "other daemonsets"
        if request.resource != "pods":
            return request.resource
        if names.VALIDATOR_APP in selector:
            return "validator pods"
        return "driver pods" if selector.startswith(names.COMPONENT_LABEL) else "other pods"

    async def _watch(self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        since = int(request.query["resourceVersion"])
        if request.resource == "pods" and "fieldSelector" in request.query:
            await self._watch_node(request, since, reader, writer)
            return
        kind = self.kinds[self._kind(request)]
        if since < kind.first:
            write_answer(writer, 410, b'{"kind":"Status","code":410,"reason":"Expired"}')
            await writer.drain()
            return
        write_answer(writer, 200, b"")
        for version, line in kind.events:
            if version > since:
                writer.write(line)
        kind.watchers.append(writer)
        await self._until_left(request, reader)
        kind.watchers.remove(writer)

    async def _watch_node(self, request: Request, since: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        node = self.nodes[request.query["fieldSelector"].partition("=")[2]]
        write_answer(writer, 200, b"")
        self.users[node.name] = writer
        if node.user_gone > since:
            self._tell_user_gone(node, writer)
        await self._until_left(request, reader)
        if self.users.get(node.name) is writer:
            del self.users[node.name]

    @staticmethod
    async def _until_left(request: Request, reader: asyncio.StreamReader) -> None:
        """Until the other end has closed the watch, or its time is over."""
        try:
            async with asyncio.timeout(float(request.query["timeoutSeconds"])):
                await reader.read(1)
        except TimeoutError:
            pass

    def _tell(self, kind: str, word: str, body: bytes) -> None:
        """Gives all watches of a kind an event; `body` is of the newest version."""
        collection = self.kinds[kind]
        line = b"".join((b'{"type":"', word.encode(), b'","object":', body, b"}\n"))
        if len(collection.events) == HISTORY:
            collection.first = collection.events[0][0]
        collection.events.append((self.version, line))
        for writer in collection.watchers:
            writer.write(line)

    # Bodies ---------------------------------------------------------------------------------------------------------

    def _set_body(self, kind: str) -> bytes:
        return objects.daemon_set(kind, self.template if kind == "driver" else 1, self.version, self.ready)

    def _revisions(self) -> list[bytes]:
        drivers = [objects.revision("driver", number + 1, self.version) for number in range(self.template)]
        return [*drivers, objects.revision("validator", 1, self.version)]

    def _pod_bodies(self, kind: str) -> list[bytes]:
        return [pod.body() for (each, _), pod in self.pods.items() if each == kind]

    def _pods_on(self, node_name: str) -> bytes:
        users = [] if self.nodes[node_name].user_gone else [objects.user_of(node_name, self.version)]
        items = b",".join([*objects.others_on(node_name), *users])
        return b"".join((b'{"metadata":{"resourceVersion":"', str(self.version).encode(), b'"},"items":[', items, b"]}"))

    # What happens ---------------------------------------------------------------------------------------------------

    def _later_on(self, seconds: float, action: Callable[..., None], *what: Any) -> None:
        asyncio.get_running_loop().call_later(seconds, action, *what)

    def _patch(self, node: Node, request: Request) -> tuple[int, bytes]:
        body = json.loads(request.body)
        guard = body.get("metadata", {}).get("resourceVersion")
        if guard is not None and guard != str(node.version):
            return 409, b'{"kind":"Status","code":409,"reason":"Conflict"}'
        self.last_write = request.made
        if (told := self.told.pop(node.name, None)) is not None:
            self.latencies.append(request.made - told)
        before = node.state
        node.patch(body)
        node.version = self._next()
        written = node.body()
        self._tell("nodes", "MODIFIED", written)
        if node.state == State.DONE != before:
            self.finished += 1
        self.changed.set()
        return 200, written

    def heartbeat(self, node: Node) -> None:
        """Its kubelet reports its status, as it does every five minutes when nothing changes."""
        node.version = self._next()
        self._tell("nodes", "MODIFIED", node.body())

    def _user_gone(self, node_name: str) -> None:
        node = self.nodes[node_name]
        node.user_gone = self._next()
        if (writer := self.users.get(node_name)) is not None:
            self._tell_user_gone(node, writer)

    @staticmethod
    def _tell_user_gone(node: Node, writer: asyncio.StreamWriter) -> None:
        body = objects.user_of(node.name, node.user_gone)
        writer.write(b"".join((b'{"type":"DELETED","object":', body, b"}\n")))

    def _tell_pod(self, pod: Pod, word: str = "MODIFIED") -> None:
        pod.version = self._next()
        self._tell(f"{pod.kind} pods", word, pod.body())

    def _tell_set(self, more: int) -> None:
        """Its status changes with every pod."""
        self.ready += more
        self._next()
        self._tell("daemonsets.apps", "MODIFIED", self._set_body("driver"))

    def _driver_deleted(self, pod_name: str) -> None:
        name = pod_name.removeprefix("driver-").rpartition("-")[0]
        pod = self.pods["driver", name]
        if pod.name != pod_name or pod.is_terminating:
            return
        pod.is_terminating = True
        self._tell_pod(pod)
        self._later_on(DRIVER_STOP, self._driver_gone, pod)

    def _driver_gone(self, old: Pod) -> None:
        """The old pods are gone, new ones are made."""
        for kind in ("driver", "validator"):
            self._tell_pod(self.pods[kind, old.node_name], "DELETED")
            template = self.template if kind == "driver" else 1
            new = Pod(kind, old.node_name, old.number + 1, template, phase="Pending", is_ready=False)
            self.pods[kind, old.node_name] = new
            self._tell_pod(new, "ADDED")
        self._tell_set(-1)
        self._later_on(DRIVER_STOP, self._driver_runs, self.pods["driver", old.node_name])

    def _driver_runs(self, pod: Pod) -> None:
        pod.phase = "Running"
        self._tell_pod(pod)
        self.waiting.append(pod.node_name)
        self.changed.set()

    def driver_ready(self, name: str) -> None:
        """The new driver of a node is up, and a moment later its validator says so."""
        pod = self.pods["driver", name]
        pod.is_ready = True
        self.told[name] = time.monotonic()
        self._tell_pod(pod)
        self._tell_set(1)
        self._later_on(VALIDATOR_START, self._validator_ready, name)

    def _validator_ready(self, name: str) -> None:
        pod = self.pods["validator", name]
        pod.phase, pod.is_ready = "Running", True
        self.told[name] = time.monotonic()
        self._tell_pod(pod)

    def new_driver(self) -> None:
        """The driver's DaemonSet gets another template."""
        self.template += 1
        self._next()
        self._tell("controllerrevisions.apps", "ADDED", objects.revision("driver", self.template, self.version))
        self._tell_set(0)

    def new_policy(self, **changes: Any) -> None:
        """The ClusterPolicy says something else."""
        self.policy |= changes
        self._next()
        self._tell("clusterpolicies.nvidia.com", "MODIFIED", objects.cluster_policy(self.policy, self.version))

    async def until(self, is_so: Callable[[], bool], seconds: float, what: str) -> None:
        """Waits for the world to be so.

        Raises:
            SystemExit: it was not in time.
        """
        try:
            async with asyncio.timeout(seconds):
                while not is_so():
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            raise SystemExit(f"{what}: not within {seconds:.0f} s") from None
