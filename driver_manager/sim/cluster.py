"""The Cluster port on the simulated server, as one account sees it in one life."""

from collections.abc import AsyncIterator, Callable, Collection, Mapping
from typing import Final, TypeVar

from driver_manager.core.snapshot import (
    ChangeKind,
    ClaimView,
    DaemonSetView,
    Identity,
    NodeView,
    Permissions,
    PodChange,
    PodList,
    PodView,
)
from driver_manager.errors import Unreachable
from driver_manager.names import PARKED
from driver_manager.ports import NodePatch
from driver_manager.sim import access
from driver_manager.sim.faults import Hung, Life, When
from driver_manager.sim.objects import Account
from driver_manager.sim.server import Server

T = TypeVar("T")
BASIC: Final = (access.rule("create", "authorization.k8s.io", "selfsubjectaccessreviews selfsubjectrulesreviews"),)
"""What every account may do."""


class SimCluster:
    """The API server, as one account sees it."""

    def __init__(self, server: Server, account: Account, life: Life, request_timeout: float = 10.0) -> None:
        self._server = server
        self._store = server.store
        self.account = account
        self._life = life
        self._timeout = request_timeout
        self.is_closed = False

    @property
    def identity(self) -> Identity:
        """What the account's token says."""
        return self.account.identity

    async def node(self, name: str) -> NodeView:
        """Reads a Node."""

        def read() -> NodeView:
            access.demand(self.account, "get", "", "nodes", name=name)
            return self._server.find_node(name).view()

        return await self._call("node", {"name": name}, read)

    async def patch_node(self, patch: NodePatch) -> NodeView:
        """Changes a Node."""

        def write() -> NodeView:
            access.demand(self.account, "patch", "", "nodes", name=patch.name)
            return self._server.patch_node(patch, self.account.name)

        return await self._call("patch_node", {"patch": patch}, write, is_write=True)

    async def pods_on(self, node_name: str) -> PodList:
        """Lists the pods bound to a node."""

        def read() -> PodList:
            access.demand(self.account, "list", "", "pods")
            return self._list(node_name)

        return await self._call("pods_on", {"node": node_name}, read)

    async def gated_for(self, node_name: str) -> tuple[PodView, ...]:
        """Lists the pods that are made for a node and wait with the parking policy's gate."""

        def read() -> tuple[PodView, ...]:
            access.demand(self.account, "list", "", "pods")
            pods = self._store.pods.values()
            return tuple(pod.view() for pod in pods if PARKED in pod.gates and pod.node_name is None and pod.target == node_name)

        return await self._call("gated_for", {"node": node_name}, read)

    async def daemon_set(self, namespace: str, name: str) -> DaemonSetView:
        """Reads a DaemonSet."""

        def read() -> DaemonSetView:
            access.demand(self.account, "get", "apps", "daemonsets", namespace, name)
            return self._server.find_daemon_set(namespace, name).view()

        return await self._call("daemon_set", {"namespace": namespace, "name": name}, read)

    async def permissions(self, namespace: str) -> Permissions:
        """What the account may do."""

        def read() -> Permissions:
            rules = BASIC + self.account.rules + self.account.namespace_rules.get(namespace, ())
            return Permissions(rules, self.account.is_incomplete)

        return await self._call("permissions", {"namespace": namespace}, read)

    async def may(self, verb: str, group: str, resource: str, namespace: str = "") -> bool:
        """Whether the account may do one thing."""
        args = {"verb": verb, "group": group, "resource": resource, "namespace": namespace}
        return await self._call("may", args, lambda: access.may(self.account, verb, group, resource, namespace))

    async def claims(self, wanted: Collection[tuple[str, str]]) -> Mapping[tuple[str, str], ClaimView]:
        """Reads ResourceClaims."""

        def read() -> Mapping[tuple[str, str], ClaimView]:
            if not self._store.has_claims_api:
                return {}
            for namespace, name in wanted:
                access.demand(self.account, "get", "resource.k8s.io", "resourceclaims", namespace, name)
            return {key: self._store.claims[key] for key in wanted if key in self._store.claims}

        return await self._call("claims", {"wanted": tuple(wanted)}, read) if wanted else {}

    async def runtime_handlers(self) -> Mapping[str, str]:
        """Lists the RuntimeClasses."""

        def read() -> Mapping[str, str]:
            access.demand(self.account, "list", "node.k8s.io", "runtimeclasses")
            return dict(self._store.runtime_classes)

        return await self._call("runtime_handlers", {}, read)

    async def evict(self, pod: PodView, *, dry_run: bool = False, grace_seconds: int | None = None) -> None:
        """Asks for the eviction of exactly this pod."""

        def write() -> None:
            self._server.evict(self.account, pod.namespace, pod.name, pod.uid, dry_run=dry_run, grace_seconds=grace_seconds)

        await self._call("evict", {"pod": pod.ref, "dry_run": dry_run}, write, is_write=not dry_run)

    async def close(self) -> None:
        """Lets go; nothing is held."""
        self.is_closed = True

    async def pod_changes(self, node_name: str, since: PodList) -> AsyncIterator[PodChange]:
        """Follows the pods of a node, from a list on."""
        await self._gate("pod_changes", {"node": node_name})
        access.demand(self.account, "watch", "", "pods")
        known = {pod.uid: pod for pod in since.items}
        version, breaks = int(since.resource_version), self._server.watch_breaks
        stream, position = self._store.stream(node_name), 0
        is_too_old = version < stream.since
        while True:
            changes: list[PodChange] = []
            if breaks != self._server.watch_breaks or not self._server.is_up or is_too_old:
                breaks, is_too_old = await self._watch_again(), False
                fresh = self._list(node_name)
                changes = _difference(known, fresh)
                version, position = int(fresh.resource_version), len(stream.events)
            else:
                changes = [PodChange(one.kind, one.pod) for one in stream.events[position:] if one.version > version]
                position = len(stream.events)
            for change in changes:
                await self._gate("pod_changes.next", {"kind": change.kind, "pod": change.pod.ref})
                if change.kind is ChangeKind.GONE:
                    known.pop(change.pod.uid, None)
                else:
                    known[change.pod.uid] = change.pod
                yield change
            if not changes:
                await stream.changed.wait()
                await self._life.sleep(self._store.latencies.watch)

    async def _watch_again(self) -> int:
        """Waits until there is a watch again and lists; as the real one does, it tries for ever."""
        while True:
            pause = self._server.watches_back - self._store.timers.now()
            if pause > 0:
                await self._life.sleep(pause)
            if not self._server.is_up:
                await self._server.back.wait()
            await self._life.sleep(self._store.latencies.request)
            access.demand(self.account, "list", "", "pods")
            access.demand(self.account, "watch", "", "pods")
            if self._server.is_up and self._server.watches_back <= self._store.timers.now():
                return self._server.watch_breaks

    def _list(self, node_name: str) -> PodList:
        self._store.stream(node_name)
        items = tuple(pod.view() for pod in self._store.pods_bound_to(node_name))
        return PodList(items, str(self._store.version))

    async def _gate(self, name: str, args: Mapping[str, object], *, when: When = When.BEFORE, is_write: bool = False) -> None:
        try:
            await self._life.gate("cluster", name, args, when=when, is_write=is_write)
        except Hung:
            await self._life.sleep(self._timeout)
            raise Unreachable(f"no answer within {self._timeout:.0f} s") from None

    async def _call(self, name: str, args: Mapping[str, object], effect: Callable[[], T], *, is_write: bool = False) -> T:
        """One request: a boundary, the way there, the effect, for writes another boundary, the way back."""
        await self._gate(name, args, is_write=is_write)
        await self._life.sleep(self._store.latencies.request / 2)
        self._server.reach()
        result = effect()
        if is_write:
            await self._gate(name, args, when=When.AFTER, is_write=True)
        await self._life.sleep(self._store.latencies.request / 2)
        return result


def _difference(known: Mapping[str, PodView], fresh: PodList) -> list[PodChange]:
    there = [pod.uid for pod in fresh.items]
    gone = [PodChange(ChangeKind.GONE, pod) for uid, pod in known.items() if uid not in there]
    return gone + [PodChange(ChangeKind.SEEN, pod) for pod in fresh.items]
