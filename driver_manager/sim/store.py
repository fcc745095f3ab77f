"""The state of the simulated cluster: objects, their versions, the events of watches, and timers.

It decides nothing: `server` answers requests, `controllers` and `kubelet` react to changes.
"""

import asyncio
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from driver_manager.core.fleet import EventNote, LeaseView, PolicySource
from driver_manager.core.snapshot import ChangeKind, ClaimView, PodView
from driver_manager.sim.clock import wall_at
from driver_manager.sim.objects import REPLICA_SET, Account, Budget, DaemonSet, Deployment, Maintenance, Node, Pod, Slice, Template

NAME_LETTERS: Final = "bcdfghjklmnpqrstvwxz2456789"
"""Kubernetes' alphabet of generated names."""


@dataclass(slots=True, kw_only=True)
class Latencies:
    """Seconds that things take, as measured on a real control plane on loopback (medians)."""

    request: float = 0.003
    watch: float = 0.001
    daemon_set: float = 0.013
    replica_set: float = 0.013
    scheduler: float = 0.004
    start: float = 0.009
    remove: float = 0.012
    lifecycle: float = 0.020
    budget: float = 0.040
    observe: float = 0.013
    """New template of a DaemonSet -> its controller has made the revision."""
    admission: float = 0.018
    """Node written -> admission policies with nodes as parameters know."""
    collect: float = 0.030
    """Owner deleted -> its pods are dealt with."""
    jitter: float = 0.0
    """Share by which each of them varies, by chance."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the world's diary."""

    at: float
    who: str
    what: str
    target: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.at:9.3f} {self.who:22} {self.what:12} {self.target} {self.detail}".rstrip()


@dataclass(frozen=True, slots=True)
class Event:
    """A change of a pod, as watches carry it."""

    version: int
    kind: ChangeKind
    pod: PodView


class Signal:
    """Wakes everybody who waits for the next change."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    def set(self) -> None:
        """Something has changed."""
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def wait(self) -> None:
        """Returns at the next change."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future


@dataclass(slots=True)
class Stream:
    """The changes of one node's pods since somebody first listed them."""

    since: int
    """The version of that list."""
    events: list[Event] = field(default_factory=list)
    changed: Signal = field(default_factory=Signal)


Object = Node | Pod | DaemonSet | Template | PolicySource | Budget | Maintenance | Slice


@dataclass(frozen=True, slots=True, kw_only=True)
class Deed:
    """A request that changed something, for checks."""

    at: float
    who: str
    what: str
    """`patch`, `evict`, `delete`, `lease`, `event`, `condition` or `maintenance`."""
    target: str
    """Name of the node, or `namespace/name`."""
    node_name: str = ""
    uid: str = ""
    """Of a pod."""
    detail: object = None
    """The patch, the lease, or the note."""


@dataclass(slots=True)
class Timers:
    """Does things later, in the running loop; what is asked for before there is one waits for it."""

    rng: random.Random
    latencies: Latencies
    _loop: asyncio.AbstractEventLoop | None = None
    _early: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    _due: dict[tuple[str, str], bool] = field(default_factory=dict)

    def now(self) -> float:
        """The loop's time, 0 before there is one."""
        return self._loop.time() if self._loop else 0.0

    def bind(self) -> None:
        """Takes the running loop, if there is one and none was taken."""
        if self._loop is not None:
            return
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        early, self._early = self._early, []
        for seconds, what in early:
            self._loop.call_later(seconds, what)

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        """Has something done in so many seconds, give or take the jitter."""
        self.bind()
        if self.latencies.jitter:
            seconds *= 1 + self.latencies.jitter * (2 * self.rng.random() - 1)
        if self._loop is None:
            self._early.append((seconds, what))
        else:
            self._loop.call_later(seconds, what)

    def wake(self, kind: str, name: str, seconds: float, what: Callable[[], None]) -> None:
        """Has a controller look at one object; many changes until then are one look."""
        key = (kind, name)
        if key in self._due:
            return
        self._due[key] = True

        def look() -> None:
            del self._due[key]
            what()

        self.later(seconds, look)


class Store:
    """All objects, in the order of their making."""

    def __init__(self, seed: int, latencies: Latencies | None = None) -> None:
        self.rng = random.Random(seed)
        self.latencies = latencies or Latencies()
        self.timers = Timers(self.rng, self.latencies)
        self.version = 100
        self.nodes: dict[str, Node] = {}
        self.pods: dict[str, Pod] = {}
        """By `namespace/name`."""
        self.daemon_sets: dict[str, DaemonSet] = {}
        self.deployments: dict[str, Deployment] = {}
        self.budgets: dict[str, Budget] = {}
        self.accounts: dict[str, Account] = {}
        self.claims: dict[tuple[str, str], ClaimView] = {}
        self.has_claims_api = True
        self.slices: dict[str, Slice] = {}
        """By name."""
        self.runtime_classes: dict[str, str] = {}
        """Name -> handler."""
        self.terminating: dict[str, bool] = {}
        """Namespaces that are being deleted."""
        self.reported_sets: set[str] = set()
        """`namespace/name` of DaemonSets whose status somebody reads though no label of theirs asks for that."""
        self.revisions: dict[str, Template] = {}
        """By `namespace/name`."""
        self.policies: dict[tuple[str, str], PolicySource] = {}
        """By kind and name."""
        self.sentences: dict[tuple[str, str], str] = {}
        """Of conditions, by uid of the custom resource and type."""
        self.maintenances: dict[str, Maintenance] = {}
        """By `namespace/name`."""
        self.leases: dict[str, LeaseView] = {}
        """By `namespace/name`."""
        self.notes: list[tuple[float, str, EventNote]] = []
        """Events: time, account, note."""
        self.streams: dict[str, Stream] = {}
        """By node."""
        self.pod_listeners: list[Callable[[Pod], None]] = []
        self.node_listeners: list[Callable[[Node], None]] = []
        self.watchers: list[Callable[[Object, ChangeKind], None]] = []
        """Those who hear of every change, after the controllers."""
        self.diary: list[Entry] = []
        self.deeds: list[Deed] = []
        self._unbound: dict[str, dict[str, Pod]] = {}
        """Pods that the scheduler has to find a node for, by the only node that they fit (empty: any) and uid."""
        self._births: dict[str, int] = {}
        self._places: dict[str, tuple[str, str]] = {}
        self._by_owner: dict[str, dict[str, Pod]] = {}
        self._by_node: dict[str, dict[str, Pod]] = {}

    def write(self, who: str, what: str, target: str, detail: str = "") -> None:
        """Notes something in the diary."""
        self.diary.append(Entry(self.timers.now(), who, what, target, detail))

    def wall(self) -> str:
        """The time of day."""
        return wall_at(self.timers.now())

    def uid(self) -> str:
        """A new uid, from the seed."""
        digits = "".join(self.rng.choices("0123456789abcdef", k=32))
        return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))

    def suffix(self) -> str:
        """The end of a generated name."""
        return "".join(self.rng.choices(NAME_LETTERS, k=5))

    def pod_name(self, namespace: str, start: str) -> str:
        """A generated name that no pod has."""
        while (name := f"{start}-{self.suffix()}") and f"{namespace}/{name}" in self.pods:
            pass
        return name

    def did(self, who: str, what: str, target: str, *, node_name: str = "", uid: str = "", detail: object = None) -> None:
        """Notes a request that changed something."""
        at = self.timers.now()
        self.deeds.append(Deed(at=at, who=who, what=what, target=target, node_name=node_name, uid=uid, detail=detail))

    def node_written(self, node: Node) -> None:
        """A node has changed."""
        self.version += 1
        node.resource_version = self.version
        for listen in self.node_listeners:
            listen(node)
        self.tell(node)

    def node_removed(self, node: Node) -> None:
        """A node leaves the API."""
        self.version += 1
        node.resource_version = self.version
        self.nodes.pop(node.name, None)
        self.tell(node, ChangeKind.GONE)

    def maintenance_written(self, maintenance: Maintenance) -> None:
        """A NodeMaintenance is new or has changed."""
        self.version += 1
        maintenance.resource_version = self.version
        self.maintenances[maintenance.ref] = maintenance
        self.tell(maintenance)

    def maintenance_removed(self, maintenance: Maintenance) -> None:
        """A NodeMaintenance leaves the API."""
        self.version += 1
        maintenance.resource_version = self.version
        del self.maintenances[maintenance.ref]
        self.tell(maintenance, ChangeKind.GONE)

    def slice_written(self, one: Slice) -> None:
        """A ResourceSlice is new or has changed."""
        self.version += 1
        self.slices[one.name] = one
        self.tell(one)

    def slice_removed(self, one: Slice) -> None:
        """A ResourceSlice leaves the API."""
        self.version += 1
        del self.slices[one.name]
        self.tell(one, ChangeKind.GONE)

    def tell(self, one: Object, change: ChangeKind = ChangeKind.SEEN) -> None:
        """Lets those know who hear of everything."""
        for hear in self.watchers:
            hear(one, change)

    def pod_written(self, pod: Pod) -> None:
        """A pod is new or has changed."""
        self.version += 1
        pod.resource_version = self.version
        if not pod.created:
            pod.created = self.wall()
        self.pods[pod.ref] = pod
        self._place(pod)
        self._tell(pod, ChangeKind.SEEN)

    def pod_removed(self, pod: Pod) -> None:
        """A pod leaves the API."""
        self.version += 1
        pod.is_gone = True
        if self.pods.get(pod.ref) is pod:
            del self.pods[pod.ref]
        self.write("server", "gone", pod.ref, pod.uid)
        self._displace(pod)
        self._tell(pod, ChangeKind.GONE)

    def _tell(self, pod: Pod, kind: ChangeKind) -> None:
        stream = self.streams.get(pod.node_name or "")
        if stream is not None:
            stream.events.append(Event(self.version, kind, pod.view()))
            stream.changed.set()
        for listen in self.pod_listeners:
            listen(pod)
        self.tell(pod, kind)

    def stream(self, node_name: str) -> Stream:
        """The changes of a node's pods, noted from the first call on."""
        if node_name not in self.streams:
            self.streams[node_name] = Stream(self.version)
        return self.streams[node_name]

    # Who is where -------------------------------------------------------------------------------------------------

    def _place(self, pod: Pod) -> None:
        place = (pod.owner.uid if pod.owner else "", pod.node_name or pod.target or "")
        if pod.node_name is None:
            self._unbound.setdefault(pod.only_node, {})[pod.uid] = pod
        else:
            self._unbound.get(pod.only_node, {}).pop(pod.uid, None)
        if self._places.get(pod.uid) == place:
            return
        self._displace(pod, is_gone=False)
        self._places[pod.uid] = place
        self._births.setdefault(pod.uid, len(self._births))
        self._by_owner.setdefault(place[0], {})[pod.uid] = pod
        self._by_node.setdefault(place[1], {})[pod.uid] = pod

    def _displace(self, pod: Pod, *, is_gone: bool = True) -> None:
        if is_gone:
            self._unbound.get(pod.only_node, {}).pop(pod.uid, None)
        owner, node = self._places.pop(pod.uid, ("", ""))
        self._by_owner.get(owner, {}).pop(pod.uid, None)
        self._by_node.get(node, {}).pop(pod.uid, None)

    def _in_order(self, pods: list[Pod]) -> list[Pod]:
        return sorted(pods, key=lambda pod: self._births[pod.uid]) if len(pods) > 1 else pods

    def unbound_for(self, node_names: Iterable[str]) -> list[Pod]:
        """The pods that wait for one of these nodes, or for any, in the order of their making."""
        found = [pod for name in ("", *node_names) for pod in self._unbound.get(name, {}).values()]
        return self._in_order(found)

    def pods_of(self, uid: str) -> list[Pod]:
        """The pods of one owner; of none with an empty uid."""
        return self._in_order(list(self._by_owner.get(uid, {}).values()))

    def pods_bound_to(self, node_name: str) -> list[Pod]:
        """The pods of one node."""
        return self._in_order([pod for pod in self._by_node.get(node_name, {}).values() if pod.node_name == node_name])

    def pods_of_on(self, uid: str, node_name: str) -> list[Pod]:
        """The pods of one owner that are on one node, or are meant for it."""
        return self._in_order([pod for pod in self._by_node.get(node_name, {}).values() if pod.owner and pod.owner.uid == uid])

    def owner_of(self, pod: Pod) -> DaemonSet | Deployment | None:
        """What looks after a pod, if it is still there."""
        if pod.owner is None:
            return None
        found: DaemonSet | Deployment | None
        if pod.owner.kind == "DaemonSet":
            found = self.daemon_sets.get(f"{pod.namespace}/{pod.owner.name}")
        else:
            found = self.deployments.get(f"{pod.namespace}/{pod.owner.name.removesuffix(REPLICA_SET)}")
        return found if found is not None and found.uid == pod.owner.uid else None

    def free_gpus(self, node: Node) -> int:
        """GPUs that nobody there has asked for."""
        return node.allocatable - sum(pod.spec.gpus for pod in self.pods_bound_to(node.name) if not pod.is_over)
