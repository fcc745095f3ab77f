"""The Cluster port on the official client.

The client library gives configuration, credentials and transport; its models and ApiClient are left out, because they
cost more time and memory at the start than all the rest of a run. Reads are tried again here while the server does not
answer; writes never are, because only the caller knows whether the decision behind a write still holds.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, wait_exponential

from driver_manager.core.snapshot import (
    ClaimView,
    DaemonSetView,
    Identity,
    NodeView,
    Permissions,
    PodChange,
    PodList,
    PodView,
)
from driver_manager.errors import NotFound, Unreachable
from driver_manager.kube import calls, views
from driver_manager.kube.calls import Call
from driver_manager.kube.refusals import Expired, unreadable
from driver_manager.kube.watch import Listing, Source, Watch, pod_changes
from driver_manager.kube.wire import Reader
from driver_manager.ports import Clock, NodePatch
from driver_manager.together import each_of

if TYPE_CHECKING:
    from driver_manager.kube.connection import Connection

logger = logging.getLogger(__name__)

View = TypeVar("View")

RETRY_SECONDS: Final = 30.0
"""A read that got no answer is begun again at most so long after the first try."""
RETRY_WAIT: Final = wait_exponential(multiplier=0.2, max=5.0)
RETRY_ON: Final = retry_if_exception(lambda error: isinstance(error, Unreachable) and error.transient)
"""A certificate that is not trusted stays so: that is said at once."""
CONNECTIONS: Final = 8
"""Each costs a TLS handshake on the API server; they are kept open and used again. A watch occupies one."""
CLAIMS_AT_ONCE: Final = 6
"""Fewer than the pool has connections, so that the wait for one does not eat a request's own time."""
TELL_SECONDS: Final = 10.0
"""Seconds at least between two lines about one outage."""
LIST_TRIES: Final = 3
"""How often a list is begun anew because the server forgot it half-way."""


async def connect(
    kubeconfig: str | None, clock: Clock, *, request_timeout: float = 10.0, retry_seconds: float = RETRY_SECONDS
) -> "KubeCluster":
    """Gets ready to talk to the API server, without a request.

    Args:
        kubeconfig: paths as in $KUBECONFIG; None for the service account of the pod we run in.
        clock: for the pauses between tries.
        request_timeout: seconds that one request may take.
        retry_seconds: how long a read that gets no answer is tried again.

    Raises:
        ConfigError: the configuration is missing or cannot be used.
    """
    connection, identity = await open_connection(kubeconfig, request_timeout, CONNECTIONS)
    return KubeCluster(connection, clock, identity, retry_seconds)


async def open_connection(kubeconfig: str | None, request_timeout: float, connections: int) -> tuple["Connection", Identity]:
    """A pool of so many connections, and who we are. Raises ConfigError."""
    from driver_manager.kube.connection import Connection  # loads the libraries: most of the start-up

    connection = await Connection.open(kubeconfig, request_timeout, connections)
    return connection, views.identity(await connection.token())


class _Outage:
    """Tells an outage once for all the reads that meet it: when it begins, now and then, and when it is over."""

    def __init__(self, clock: Clock, patience: float) -> None:
        self._clock, self._patience = clock, patience
        self._began, self._told, self._tries = 0.0, 0.0, 0

    def failed(self, state: RetryCallState) -> None:
        """Takes note of a read that got no answer and is tried again."""
        error, now = _failure(state), self._clock.now()
        self._tries += 1
        if self._tries == 1:
            self._began, self._told = now, now
            told = {"error": error.message if error else "", "gives_up_after_seconds": self._patience}
            logger.warning("no answer from the API server, trying again", extra=told)
        elif now - self._told >= TELL_SECONDS:
            self._told = now
            logger.warning("still no answer from the API server", extra={"tries": self._tries, "seconds": round(now - self._began)})

    def answered(self) -> None:
        """Takes note of an answer."""
        if self._tries:
            told = {"tries": self._tries, "seconds": round(self._clock.now() - self._began, 1)}
            logger.warning("an answer from the API server again", extra=told)
            self._tries = 0


class KubeCluster:
    """A Cluster (`ports.Cluster`) behind a real API server."""

    def __init__(self, connection: "Connection", clock: Clock, identity: Identity, retry_seconds: float = RETRY_SECONDS) -> None:
        self._connection = connection
        self._retry_seconds = retry_seconds
        self._clock = clock
        self._identity = identity
        self._outage = _Outage(clock, retry_seconds)

    @property
    def identity(self) -> Identity:
        """Who the account's token says we are."""
        return self._identity

    async def node(self, name: str) -> NodeView:
        """Reads a Node."""
        return await self._read(calls.get_node(name), views.NODES.one)

    async def patch_node(self, patch: NodePatch) -> NodeView:
        """Changes a Node and gives it as it is then."""
        return await self._write(calls.patch_node(patch), views.NODES.one)

    async def pods_on(self, node_name: str) -> PodList:
        """Lists the pods bound to a node, in all namespaces."""
        found = await self._list(calls.list_pods(node_name), views.PODS)
        return PodList(found.items, found.resource_version)

    async def gated_for(self, node_name: str) -> tuple[PodView, ...]:
        """Lists the pods that are made for a node and wait with the parking policy's gate."""
        found = await self._list(calls.list_unbound_gated_pods(), views.GATED)
        return tuple(each.pod for each in found.items if each.node_name == node_name)

    def pod_changes(self, node_name: str, since: PodList) -> AsyncGenerator[PodChange, None]:
        """Follows the pods of a node without end, from a list on."""
        return pod_changes(self._watch(calls.list_pods(node_name), views.PODS, since=since.resource_version), since)

    async def daemon_set(self, namespace: str, name: str) -> DaemonSetView:
        """Reads a DaemonSet."""
        return await self._read(calls.get_daemon_set(namespace, name), views.daemon_set_view)

    async def permissions(self, namespace: str) -> Permissions:
        """What the account may do. The request creates nothing, so it is a read."""
        return await self._read(calls.review_rules(namespace), views.permissions)

    async def may(self, verb: str, group: str, resource: str, namespace: str = "") -> bool:
        """Whether the account may do one thing. The request creates nothing, so it is a read."""
        return await self._read(calls.review_access(verb, group, resource, namespace), views.is_allowed)

    async def claims(self, wanted: Collection[tuple[str, str]]) -> Mapping[tuple[str, str], ClaimView]:
        """Reads ResourceClaims, in the newest version that the server has; those that do not exist are left out."""
        if not wanted:
            return {}
        version = await self._dra_version()
        if version is None:
            return {}
        limit = asyncio.Semaphore(CLAIMS_AT_ONCE)

        async def read(namespace: str, name: str) -> ClaimView | None:
            async with limit:
                try:
                    return await self._read(calls.get_claim(version, namespace, name), views.claim_view)
                except NotFound:
                    return None

        keys = sorted(wanted)
        found = await each_of(read(*key) for key in keys)
        return {key: claim for key, claim in zip(keys, found, strict=True) if claim is not None}

    async def _dra_version(self) -> str | None:
        """The version of the DRA API to use; None where the server has none."""
        try:
            served = await self._read(calls.get_dra_group(), views.group_versions)
        except NotFound:
            return None
        return next((version for version in calls.DRA_VERSIONS if version in served), None)

    async def runtime_handlers(self) -> Mapping[str, str]:
        """Lists the RuntimeClasses: name -> handler."""
        return await self._read(calls.list_runtime_classes(), views.runtime_handlers)

    async def evict(self, pod: PodView, *, dry_run: bool = False, grace_seconds: int | None = None) -> None:
        """Asks for the eviction of exactly this pod."""
        await self._connection.answer(calls.evict_pod(pod, dry_run=dry_run, grace_seconds=grace_seconds))

    async def close(self) -> None:
        """Lets go of all connections."""
        await self._connection.close()

    def _watch(
        self, call: Call, reader: Reader[View], *, since: str = "", is_served: Callable[[], Awaitable[bool]] | None = None
    ) -> Watch[View]:
        """A watch on what a list gives, from a version on, or beginning with the list."""
        source = Source(
            about={"collection": call.path, **call.query},
            list=lambda: self._list(call, reader),
            watch=lambda version, seconds: calls.watch(call, version, seconds),
            event=reader.event,
            is_served=is_served,
        )
        return Watch(self._connection, self._clock, source, since)

    async def _list(self, call: Call, reader: Reader[View]) -> Listing[View]:
        """Lists page by page, anew if the server forgets the list half-way."""
        tries = 1
        while True:
            try:
                return await self._pages(call, reader)
            except Expired as error:
                if tries == LIST_TRIES:
                    raise Unreachable(f"{error.message} ({tries} times)") from error
                tries += 1
                logger.info("a list expired half-way, listing again", extra={"collection": call.path, **call.query})

    async def _pages(self, call: Call, reader: Reader[View]) -> Listing[View]:
        items: list[View] = []
        token = ""
        while True:
            page = await self._read(calls.page(call, token), reader.page)
            items.extend(page.items)
            token = page.token
            if not token:
                return Listing(tuple(items), page.resource_version)

    async def _write(self, call: Call, view: Callable[[bytes], View]) -> View:
        """Makes a request that changes something, once."""
        return _decode(call, await self._connection.answer(call), view)

    async def _read(self, call: Call, view: Callable[[bytes], View]) -> View:
        """Makes a request that changes nothing, again while there is no answer."""
        started = self._clock.now()

        def is_late(state: RetryCallState) -> bool:
            return self._clock.now() - started + state.upcoming_sleep > self._retry_seconds

        retrying = AsyncRetrying(
            sleep=self._clock.sleep,
            retry=RETRY_ON,
            wait=_pause,
            stop=is_late,
            before_sleep=self._outage.failed,
            reraise=True,
        )
        answer: bytes = await retrying(self._connection.answer, call)
        self._outage.answered()
        return _decode(call, answer, view)


def _decode(call: Call, body: bytes, view: Callable[[bytes], View]) -> View:
    try:
        return view(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise unreadable(call, 200, body) from error


def _failure(state: RetryCallState) -> Unreachable | None:
    error = state.outcome.exception() if state.outcome else None
    return error if isinstance(error, Unreachable) else None


def _pause(state: RetryCallState) -> float:
    """Seconds to the next try: growing, and never less than the server asked for."""
    error = _failure(state)
    return max(RETRY_WAIT(state), error.retry_after if error else 0.0)
