"""Watches on whole kinds: what followers of the fleet are told, how late, and what breaks a watch.

A follower lists and has a channel from then on. Events come in order, never before the watch's latency is over; a broken channel gives
nothing more, and its follower has to list again.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from driver_manager import names
from driver_manager.core.fleet import Changed, Item, Kind, PolicySource, is_driver
from driver_manager.core.snapshot import ChangeKind
from driver_manager.sim.faults import WatchTrouble
from driver_manager.sim.objects import Budget, DaemonSet, Maintenance, Node, Pod, Slice, Template, matches
from driver_manager.sim.store import Object, Store

POLICY_KINDS: Final = {Kind.CLUSTER_POLICIES: "ClusterPolicy", Kind.NVIDIA_DRIVERS: "NVIDIADriver"}
RECENT: Final = 30.0
"""Seconds of the past that are remembered for stale lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What a controller is set to look at."""

    namespace: str = "gpu-operator"
    node_selector: Mapping[str, str] = field(default_factory=lambda: {"nvidia.com/gpu.present": "true"})
    validator_selector: Mapping[str, str] = field(default_factory=lambda: {"app": names.VALIDATOR_APP})
    maintenances: str = ""
    """The namespace of NodeMaintenances; empty: they are not followed."""
    named_set: str = ""
    """The one DaemonSet that a watch of parkable ones is about, `namespace/name`; empty: those whose label asks."""

    def selects(self, kind: Kind, one: Object) -> bool:
        """Whether a list of that kind has this object."""
        match one:
            case Node():
                return kind is Kind.NODES and matches(self.node_selector, one.labels)
            case Pod():
                if kind is Kind.GATED_PODS:
                    return names.PARKED in one.labels
                return one.namespace == self.namespace and self._selects_pod(kind, one.labels)
            case DaemonSet() if kind is Kind.PARKABLE_SETS and self.named_set:
                return one.ref == self.named_set
            case DaemonSet() if kind is Kind.PARKABLE_SETS:
                return one.labels.get(names.PARK) == "true"
            case DaemonSet():
                return kind is Kind.DAEMON_SETS and one.namespace == self.namespace
            case Template():
                return kind is Kind.REVISIONS and one.namespace == self.namespace
            case PolicySource():
                return POLICY_KINDS.get(kind) == one.kind
            case Budget():
                return kind is Kind.BUDGETS
            case Maintenance():
                return kind is Kind.MAINTENANCES and one.namespace == self.maintenances
            case Slice():
                return kind is Kind.SLICES and one.driver == names.GPU_DRA_DRIVER

    def _selects_pod(self, kind: Kind, labels: Mapping[str, str]) -> bool:
        if kind is Kind.VALIDATOR_PODS:
            return matches(self.validator_selector, labels)
        return kind is Kind.DRIVER_PODS and is_driver(labels)


class Channel:
    """One open watch."""

    def __init__(self, kind: Kind, scope: Scope, store: Store, items: dict[str, Item]) -> None:
        self.kind = kind
        self.scope = scope
        self.known = items
        """What the follower has been told of, or will have been, by uid."""
        self.is_broken = False
        self._store = store
        self._queue: deque[tuple[float, Changed]] = deque()
        self._last = 0.0
        self._waiting: asyncio.Future[None] | None = None

    def hear(self, one: Object, change: ChangeKind, item: Callable[[], Item], lag: float) -> None:
        """Something has happened in the store."""
        if change is ChangeKind.SEEN and self.scope.selects(self.kind, one):
            self.known[one.uid] = item()
            self.push(Changed(self.kind, ChangeKind.SEEN, self.known[one.uid]), lag)
        elif one.uid in self.known:
            del self.known[one.uid]
            self.push(Changed(self.kind, ChangeKind.GONE, item()), lag)

    def push(self, event: Changed, lag: float = 0.0) -> None:
        """Sends an event on its way; none overtakes another."""
        self._last = max(self._last, self._store.timers.now() + self._store.latencies.watch + lag)
        self._queue.append((self._last, event))
        self._wake()

    def break_off(self) -> None:
        """Ends the watch: what is on its way is lost."""
        self.is_broken = True
        self._queue.clear()
        self._wake()

    def arrived(self) -> Changed | None:
        """The next event, if one is there by now."""
        if self._queue and self._queue[0][0] <= self._store.timers.now() + 1e-9:
            return self._queue.popleft()[1]
        return None

    @property
    def pause(self) -> float | None:
        """Seconds until the next event is there; None while there is none on its way."""
        return max(0.0, self._queue[0][0] - self._store.timers.now()) if self._queue else None

    async def wait(self) -> None:
        """Returns when an event is on its way or the watch is broken."""
        if self._queue or self.is_broken:
            return
        self._waiting = asyncio.get_running_loop().create_future()
        await self._waiting

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


@dataclass(frozen=True, slots=True)
class _Past:
    at: float
    one: Object
    change: ChangeKind
    item: Item
    before: Item | None
    """As it was before; None: it was not there."""


class Feeds:
    """All watches on kinds of one cluster."""

    def __init__(self, store: Store, trouble: WatchTrouble, seed: int) -> None:
        self.trouble = trouble
        self.not_served: dict[Kind, bool] = {}
        """Custom resources that are not installed."""
        self._store = store
        self._channels: dict[Kind, list[Channel]] = {kind: [] for kind in Kind}
        self._past: dict[Kind, deque[_Past]] = {kind: deque() for kind in Kind}
        self._newest: dict[Kind, dict[str, Item]] = {kind: {} for kind in Kind}
        self._noting: dict[Kind, bool] = {}
        self._rng = random.Random(seed)
        store.watchers.append(self.changed)

    def open(self, kind: Kind, scope: Scope) -> tuple[Channel, tuple[Item, ...]]:
        """Lists, and watches from there on; a stale list is followed by all that it missed."""
        items = {one.uid: view(one) for one in self._objects(kind) if scope.selects(kind, one)}
        channel = Channel(kind, scope, self._store, items)
        listed = self._as_of(kind, channel) if self.trouble.has_stale_list(self._rng) else tuple(items.values())
        self._channels[kind].append(channel)
        return channel, listed

    def close(self, channel: Channel) -> None:
        """Nobody listens any more."""
        channel.break_off()
        if channel in self._channels[channel.kind]:
            self._channels[channel.kind].remove(channel)

    def break_all(self) -> None:
        """Cuts all watches."""
        for kind in Kind:
            self.expire(kind)

    def expire(self, kind: Kind) -> None:
        """The server no longer knows the versions that the watches of a kind are at (410): their followers list again."""
        for channel in self._channels[kind]:
            channel.break_off()

    def serve(self, kind: Kind, is_served: bool = True) -> None:
        """Installs a custom resource, or takes it away with its objects."""
        if is_served:
            self.not_served.pop(kind, None)
            return
        self.not_served[kind] = True
        if kind is Kind.MAINTENANCES:
            self._store.maintenances.clear()
        for key in [key for key in self._store.policies if key[0] == POLICY_KINDS.get(kind)]:
            del self._store.policies[key]
        self.expire(kind)

    def changed(self, one: Object, change: ChangeKind) -> None:
        """Something has happened in the store."""
        made: list[Item] = []

        def item() -> Item:
            if not made:
                made.append(view(one))
            return made[0]

        for kind in kinds_of(one):
            if self.trouble.longest_stale:
                self._note(kind, one, change, item())
            else:
                self._noting.pop(kind, None)
            for channel in self._channels[kind]:
                channel.hear(one, change, item, self.trouble.lag(self._rng))
                if self.trouble.has_expired(self._rng):
                    channel.break_off()

    # Stale lists --------------------------------------------------------------------------------------------------

    def _note(self, kind: Kind, one: Object, change: ChangeKind, item: Item) -> None:
        newest, past, now = self._newest[kind], self._past[kind], self._store.timers.now()
        if kind not in self._noting:
            self._noting[kind] = True
            past.clear()
            newest.clear()
            newest.update((each.uid, view(each)) for each in self._objects(kind))
        before = newest.get(one.uid)
        if change is ChangeKind.SEEN:
            newest[one.uid] = item
        else:
            newest.pop(one.uid, None)
        past.append(_Past(now, one, change, item, before))
        while past and past[0].at < now - RECENT:
            past.popleft()

    def _as_of(self, kind: Kind, channel: Channel) -> tuple[Item, ...]:
        """The list as it was some time ago; what happened since is sent after it.

        Whether an object is selected is asked of its labels now.
        """
        since = self._store.timers.now() - self.trouble.staleness(self._rng)
        items, missed = dict(channel.known), list[_Past]()
        for past in reversed(self._past[kind]):
            if past.at < since:
                break
            if not channel.scope.selects(kind, past.one):
                continue
            missed.append(past)
            if past.before is None:
                items.pop(past.one.uid, None)
            else:
                items[past.one.uid] = past.before
        for past in reversed(missed):
            channel.push(Changed(kind, past.change, past.item))
        return tuple(items.values())

    def _objects(self, kind: Kind) -> list[Object]:
        store = self._store
        match kind:
            case Kind.NODES:
                return list(store.nodes.values())
            case Kind.DAEMON_SETS | Kind.PARKABLE_SETS:
                return list(store.daemon_sets.values())
            case Kind.REVISIONS:
                return list(store.revisions.values())
            case Kind.DRIVER_PODS | Kind.VALIDATOR_PODS | Kind.GATED_PODS:
                return list(store.pods.values())
            case Kind.CLUSTER_POLICIES | Kind.NVIDIA_DRIVERS:
                return list(store.policies.values())
            case Kind.BUDGETS:
                return list(store.budgets.values())
            case Kind.MAINTENANCES:
                return list(store.maintenances.values())
            case Kind.SLICES:
                return list(store.slices.values())


def kinds_of(one: Object) -> tuple[Kind, ...]:
    """The kinds whose watches may tell of an object."""
    match one:
        case Node():
            return (Kind.NODES,)
        case Pod():
            return (Kind.DRIVER_PODS, Kind.VALIDATOR_PODS, Kind.GATED_PODS)
        case DaemonSet():
            return (Kind.DAEMON_SETS, Kind.PARKABLE_SETS)
        case Template():
            return (Kind.REVISIONS,)
        case PolicySource():
            return tuple(kind for kind, name in POLICY_KINDS.items() if name == one.kind)
        case Budget():
            return (Kind.BUDGETS,)
        case Maintenance():
            return (Kind.MAINTENANCES,)
        case Slice():
            return (Kind.SLICES,)


def view(one: Object) -> Item:
    """An object as a follower sees it now."""
    match one:
        case Node():
            return one.view()
        case PolicySource():
            return one
        case Pod() | DaemonSet() | Template() | Budget() | Maintenance() | Slice():
            return one.fleet_view()
