"""Writing the node: guarded patches that survive conflicts and outages, and never touch what is not ours."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, TypeVar

from driver_manager.core.record import NodeChange, find_record
from driver_manager.core.snapshot import NodeView
from driver_manager.errors import Conflict, DeadlineExceeded, NotFound, TakenOver, Unreachable
from driver_manager.names import STATUS
from driver_manager.ports import Clock, Cluster, NodePatch

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 10.0
"""Seconds between two tries, doubling from the first to the longest."""
FRESH: Final = 2.0
"""Seconds for which a read of the node counts as now, between two changes of the host."""
CHECK_TIMEOUT: Final = 5.0
PATIENCE: Final = 10.0
"""Seconds that a change of the world gets to come to its end when we are told to stop: a call into the kernel may never come back."""


async def finished(work: Awaitable[Result]) -> Result:
    """Lets a change of the world come to its end even when we are told to stop, so that what follows knows what is so."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.cancelled():
            task.add_done_callback(_heard)
            await asyncio.wait({task}, timeout=PATIENCE)
        raise


def _heard(task: asyncio.Future[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.debug("ended while stopping", extra={"error": str(error)})


async def _within(limit: float | None, work: Awaitable[Result]) -> Result:
    """A request that is given up after `limit` seconds: the adapter's own patience may be longer than what is left of ours."""
    try:
        async with asyncio.timeout(limit):
            return await work
    except TimeoutError:
        raise Unreachable(f"no answer from the API server within {round(limit or 0.0, 1)} s") from None


class NodeWriter:
    """One node, as last seen, and the way to change it."""

    def __init__(self, cluster: Cluster, clock: Clock, node: NodeView, run: str) -> None:
        self.cluster, self.clock, self.run = cluster, clock, run
        self.node = node
        self.may_tell = True
        """Whether the status may be written on its own; not any more when the node is being put back."""
        self._one_at_a_time = asyncio.Lock()

    @property
    def node(self) -> NodeView:
        """The node, as last seen."""
        return self._node

    @node.setter
    def node(self, node: NodeView) -> None:
        self._node, self._seen_at = node, self.clock.now()

    async def still_ours(self) -> None:
        """Makes sure, before a change of the host, that the node is still there and this run's (decision 6).

        What was seen a moment ago counts; an API server that does not answer stops nothing here.

        Raises:
            TakenOver: it is not.
        """
        if self.clock.now() - self._seen_at < FRESH:
            return
        with suppress(Unreachable):
            await _within(CHECK_TIMEOUT, self.refresh())
        self.check_ours(self.node)

    @property
    def is_ours(self) -> bool:
        """Whether the node, as last seen, carries this run's record."""
        record = find_record(self.node).record
        return record is not None and record.run == self.run

    @property
    def seen_at(self) -> float:
        """When it was last seen."""
        return self._seen_at

    async def look_aside(self) -> None:
        """Makes sure, in the middle of a long step, that the node is still this run's; what is seen vouches for nothing else.

        Raises:
            TakenOver: it is not. ClusterError: that cannot be told now.
        """
        try:
            fresh = await _within(CHECK_TIMEOUT, self.cluster.node(self.node.name))
        except NotFound as error:
            raise TakenOver(f"the node {self.node.name} is gone from the cluster") from error
        if fresh.uid != self.node.uid:
            raise TakenOver(f"the node {self.node.name} was made anew while this run worked on it")
        self.check_ours(fresh)

    async def refresh(self) -> NodeView:
        """Reads the node again.

        Raises:
            TakenOver: it is gone, another node has its name, or another run has it.
        """
        try:
            fresh = await self.cluster.node(self.node.name)
        except NotFound as error:
            raise TakenOver(f"the node {self.node.name} is gone from the cluster") from error
        if fresh.uid != self.node.uid:
            raise TakenOver(f"the node {self.node.name} was made anew while this run worked on it")
        self.node = fresh
        return fresh

    def check_ours(self, node: NodeView) -> None:
        """Makes sure that no other run has taken the node over.

        Raises:
            TakenOver: with the other run's name.
        """
        record = find_record(node).record
        if record is not None and record.run != self.run:
            raise TakenOver(f"run {record.run} has taken over the node {node.name}", hint="this run stops; look at that one")

    async def write_once(self, change: NodeChange, limit: float | None = None) -> NodeView:
        """Changes the node only if it is still the one last seen, within `limit` seconds.

        Raises:
            Conflict: it is not. Unreachable: no answer in time; the change may have been made all the same.
        """
        async with self._one_at_a_time:
            self.node = await finished(_within(limit, self.cluster.patch_node(_patch(self.node, change))))
        return self.node

    async def read(self, timeout: float) -> NodeView:
        """A fresh read, through outages of at most `timeout` seconds."""
        return await self.write(lambda _: None, "reading the node back", timeout, is_stale=True)

    async def write(self, build: Callable[[NodeView], NodeChange | None], what: str, timeout: float, *, is_stale: bool = False) -> NodeView:
        """Changes the node by what `build` makes of its newest version; None is nothing to do.

        An answer that was lost may mean that the change was made, so after each failure the node is read again and `build` asked again.

        Raises:
            DeadlineExceeded: no success within `timeout` seconds (0: without limit). TakenOver, Forbidden.
        """
        began, pause, trouble = self.clock.now(), FIRST_PAUSE, ""
        while True:
            wanted, until = 0.0, began + timeout - self.clock.now() if timeout else None
            try:
                if is_stale:
                    await _within(until, self.refresh())
                if (change := build(self.node)) is None:
                    return self.node
                return await self.write_once(change, until)
            except Conflict as error:
                is_stale, trouble = True, error.message
                logger.debug("the node has changed meanwhile", extra={"what": what})
            except NotFound as error:
                raise TakenOver(f"the node {self.node.name} is gone from the cluster") from error
            except Unreachable as error:
                is_stale, trouble = True, error.message
                logger.warning("the API server does not answer", extra={"what": what, "error": error.message})
                wanted = max(error.retry_after, pause)
                pause = min(2 * pause, LONGEST_PAUSE)
            waited = self.clock.now() - began
            if timeout and waited >= timeout:
                raise DeadlineExceeded(f"the API server to take a change of the node ({what}); last: {trouble}", waited)
            if wanted:
                await self.clock.sleep(max(0.001, min(wanted, timeout - waited)) if timeout else wanted)

    async def write_status(self, text: str | None) -> None:
        """Sets the status annotation, or takes it away, without touching anything else."""
        async with self._one_at_a_time:
            if not self.may_tell:
                return
            fresh = await finished(self.cluster.patch_node(NodePatch(name=self.node.name, annotations={STATUS: text})))
            if _but_for_status(fresh) == _but_for_status(self.node):  # else its version would vouch for what nobody has looked at
                self.node = fresh


def _but_for_status(node: NodeView) -> NodeView:
    annotations = {key: value for key, value in node.annotations.items() if key != STATUS}
    return replace(node, resource_version="", annotations=annotations)


def _patch(node: NodeView, change: NodeChange) -> NodePatch:
    return NodePatch(
        name=node.name,
        resource_version=node.resource_version,
        labels=change.labels,
        annotations=change.annotations,
        unschedulable=change.unschedulable,
        taints=change.taints,
    )
