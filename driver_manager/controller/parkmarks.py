"""The mark on GPU nodes that tells the agents that they may park: it is there while the admission policies are proven to work.

An agent has no right to prove it: it may make no pods. Here it is proven by a dry run on a node that is parked. Where none is, one at rest
is parked for a moment, for a DaemonSet that does not exist. A leader that dies meanwhile leaves a park that no record knows, which the next
one takes off as it does any other (`core.parking.is_left_over`).
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Final

from driver_manager.controller.cache import Cache
from driver_manager.controller.election import Election
from driver_manager.controller.settings import ControllerSettings
from driver_manager.core.hold import parked_by_rollout, parked_on, parking
from driver_manager.core.parking import MOST_PARKED_NODES, Tried
from driver_manager.core.record import parked_by_agent
from driver_manager.core.rollout_states import IDLE, state_of
from driver_manager.core.situation import NodeChange
from driver_manager.core.snapshot import NodeView
from driver_manager.errors import ClusterError, Conflict, NotFound
from driver_manager.names import PARKED, PARKING, PARKING_ENFORCED, RECORD, UPGRADE_STATE
from driver_manager.ports import Clock, Fleet, NodePatch

logger = logging.getLogger(__name__)

PROVE_EVERY: Final = 600.0
"""Seconds until a proof is made again: policies may be changed, and still be there. Where none can be had, one counts twice as long."""
LOOK_EVERY: Final = 60.0
"""Seconds between two looks though nothing is seen to change, and until it is tried again what has failed twice in the same way."""
SOON: Final = 2.0
"""Seconds until it is tried again what has failed once, and at least between two rounds of writes."""
PROOF_SECONDS: Final = 10.0
"""For so long a probe may still be let in after the park: it takes about 25 ms, and a second for a new policy (measured)."""
FIRST_PAUSE: Final = 0.05
TAKE_OFF_TRIES: Final = 5
AT_ONCE: Final = 8


@dataclass(frozen=True, slots=True)
class Loop:
    """What is needed of the controller's loop."""

    writing: set[str]
    """Nodes that are being written: the loop decides nothing about them, and neither are they touched here."""
    mark: Callable[[Iterable[str]], None]
    """Has nodes decided about."""
    request: Callable[[Coroutine[Any, Any, None], str], None]
    """Does something about a node that the end of the leader's life waits for."""


class ParkMarks:
    """The leader's.

    Args:
        fleet: the API.
        clock: this replica's.
        settings: with the namespace of the dry runs.
        election: nothing is written without the Lease.
        cache: what is known.
        why_not: why no admission policy can be relied on, as far as can be told without a proof; empty where one can.
        loop: the controller's.
    """

    def __init__(
        self,
        fleet: Fleet,
        clock: Clock,
        settings: ControllerSettings,
        election: Election,
        cache: Cache,
        why_not: Callable[[], Coroutine[Any, Any, str]],
        loop: Loop,
    ) -> None:
        self._fleet, self._clock, self._settings, self._election = fleet, clock, settings, election
        self._cache, self._why_not, self._loop = cache, why_not, loop
        self._wake = asyncio.Event()
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._proven: bool | None = None
        """None: not known, so that the marks of an earlier leader stay; no longer than a proof counts."""
        self._try_at, self._counts_until = 0.0, 0.0
        self._failed_on = ""
        """The node that the last try failed on: another one is next."""
        self._is_full = False
        self._warned = ""
        """The error that a warning told last."""
        self.probe = f"{settings.lease_namespace}/parking-proof"
        """The DaemonSet that does not exist."""

    def wake(self) -> None:
        """Something has changed that may concern the marks."""
        if self._cache.parkable or self._proven is not False:
            self._wake.set()

    async def run(self) -> None:
        """Works without end."""
        while not self._cache.is_synced:
            await self._clock.sleep(SOON)
        self._counts_until = self._clock.now() + 2 * PROVE_EVERY
        while True:
            self._wake.clear()
            await self._look()
            left = await self._write_marks()
            await self._rest(self._pause(left))

    def _pause(self, is_something_left: bool) -> float:
        """Seconds until the next look, unless something changes before that."""
        if is_something_left:
            return SOON
        if not self._cache.parkable:
            return PROVE_EVERY
        until_try = self._try_at - self._clock.now()
        if until_try <= 0 and self._proven is not None:
            return LOOK_EVERY  # there was nothing to try it on
        return min(max(until_try, SOON), LOOK_EVERY)

    async def _rest(self, seconds: float) -> None:
        """Until something changes, but not all the time."""
        woken = asyncio.ensure_future(self._wake.wait())
        try:
            await self._clock.sleep(SOON)
            rest = asyncio.ensure_future(self._clock.sleep(seconds - SOON))
            try:
                await asyncio.wait({woken, rest}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                rest.cancel()
        finally:
            woken.cancel()

    # Proving --------------------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        """Finds out whether the policies work. Nobody is asked where no DaemonSet wants to be parked."""
        if not self._cache.parkable:
            self._say(False, "no DaemonSet asks to be parked")
            return
        try:
            if why := await self._why_not():
                self._say(False, why)
                self._try_at = 0.0  # at once when there is a policy
                return
            if self._clock.now() >= self._try_at:
                await self._prove()
        except ClusterError as error:
            self._put_off("whether the admission policies park cannot be told, trying again", error)
        if self._proven is not False and self._clock.now() >= self._counts_until:
            self._say(False, f"there was no proof for {2 * PROVE_EVERY:.0f} s")

    def _put_off(self, message: str, error: ClusterError, **about: str) -> None:
        """Tries again soon, and what fails as it did before each minute; a warning says so once."""
        is_told = error.message == self._warned
        logger.log(logging.DEBUG if is_told else logging.WARNING, message, extra={**about, "error": error.message})
        self._warned = error.message
        self._try_at = self._clock.now() + (LOOK_EVERY if is_told else SOON)

    def _say(self, is_proven: bool, why: str) -> None:
        if is_proven is not self._proven:
            logger.info("agents may park" if is_proven else "agents may not park", extra={"why": why})
        self._warned, self._proven = "", is_proven
        self._try_at = self._clock.now() + (PROVE_EVERY if is_proven else LOOK_EVERY)
        if is_proven:
            self._counts_until = self._clock.now() + 2 * PROVE_EVERY

    async def _prove(self) -> None:
        """By a node that is parked anyhow, else by one that is parked for that; comes to nothing where there is neither."""
        parks = ((node.name, owner) for node in self._cache.nodes.values() for owner in sorted(parked_on(node) - {self.probe}))
        if (park := next(parks, None)) is not None and (is_kept_off := await self._is_kept_off(park[1], park[0])) is not None:
            self._say(is_kept_off, f"a pod of {park[1]} is {'kept off' if is_kept_off else 'let onto'} {park[0]}, which is parked for it")
            return
        at_rest = (node.name for node in self._cache.nodes.values() if self._is_at_rest(node))
        name = next((each for each in at_rest if each != self._failed_on), "") or self._failed_on
        if name not in self._cache.nodes or not self._is_at_rest(self._cache.nodes[name]) or not self._election.still_leading():
            return
        ended = asyncio.Event()
        self._loop.writing.add(name)
        self._loop.request(self._prove_on(name, ended), name)
        await ended.wait()

    async def _is_kept_off(self, owner: str, node_name: str) -> bool | None:
        """Whether pods of a DaemonSet are kept off a node that is parked for it; None where it is not parked any more."""
        deadline, pause = self._clock.now() + PROOF_SECONDS, FIRST_PAUSE
        while await self._fleet.try_pod(self._settings.lease_namespace, owner, node_name) is Tried.LET_IN:
            if self._clock.now() >= deadline:
                return False if owner in parked_on(await self._fleet.node(node_name)) else None
            await self._clock.sleep(pause)
            pause = min(2 * pause, 1.0)
        return True

    def _is_at_rest(self, node: NodeView) -> bool:
        """Whether nobody works on a node, so that whoever leads takes a left-over park off, and no pod leaves it for a short one."""
        is_idle = state_of(node.labels.get(UPGRADE_STATE)) in IDLE and node.name not in self._loop.writing
        return is_idle and self._is_free(node) and not self._would_leave(node)

    def _would_leave(self, node: NodeView) -> bool:
        """Whether a DaemonSet's own template keeps it off parked nodes: its controller would delete its pod there."""
        sets, parked = (*self._cache.parkable.values(), *self._cache.sets.values()), {**node.labels, PARKED: "true"}
        return any(each.fits(node.labels) and not each.fits(parked) for each in sets)

    async def _prove_on(self, name: str, ended: asyncio.Event) -> None:
        try:
            await self._parked_for_a_moment(name)
        except (Conflict, NotFound):
            self._failed_on = name  # somebody else wrote it: another node, or another time
        except ClusterError as error:
            self._failed_on = name
            self._put_off("the admission policies could not be tried", error, node=name)
        finally:
            self._loop.writing.discard(name)
            self._loop.mark((name,))
            ended.set()

    async def _parked_for_a_moment(self, name: str) -> None:
        node = await self._fleet.node(name)
        if not self._is_free(node):
            return
        await self._write(node, {self.probe})
        try:
            is_kept_off = await self._is_kept_off(self.probe, name)
        finally:
            await self._take_off(name)
        if is_kept_off is not None:
            self._say(is_kept_off, f"a probe was {'kept off' if is_kept_off else 'let onto'} {name}, which was parked for it")

    def _is_free(self, node: NodeView) -> bool:
        return RECORD not in node.annotations and PARKED not in node.labels and PARKED not in node.annotations

    async def _take_off(self, name: str) -> None:
        """Only the probe goes: whoever has parked somebody there meanwhile goes on."""
        for _ in range(TAKE_OFF_TRIES):
            node = await self._fleet.node(name)
            if self.probe not in node.annotations.get(PARKED, "").split(","):
                self._loop.mark(self._cache.put_node(node))
                return
            try:
                await self._write(node, parked_on(node) & (parked_by_agent(node) | parked_by_rollout(node)))
            except Conflict:
                continue
            return

    async def _write(self, node: NodeView, owners: Collection[str]) -> None:
        if not self._election.still_leading():
            return  # the next leader takes it off
        labels, annotations = parking(node, owners)
        patch = NodePatch.guarded(node, NodeChange(labels, annotations))
        self._loop.mark(self._cache.put_node(await self._fleet.patch_node(patch)))

    # Marking --------------------------------------------------------------------------------------------------------

    async def _write_marks(self) -> bool:
        """Marks every node that has to be, and takes the mark off all others; gives whether some are left."""
        if self._proven is None:
            return False
        parked = sum(PARKED in node.labels for node in self._cache.nodes.values())
        self._is_full = parked >= (MOST_PARKED_NODES // 2 if self._is_full else MOST_PARKED_NODES)  # else it would come and go
        wrong = [node for node in self._cache.nodes.values() if node.annotations.get(PARKING) != self._wanted(node)]
        done = await asyncio.gather(*(self._set(node) for node in wrong))
        return not all(done)

    def _wanted(self, node: NodeView) -> str | None:
        may = self._proven and (not self._is_full or PARKED in node.labels)
        return PARKING_ENFORCED if may else None

    async def _set(self, node: NodeView) -> bool:
        """One write of this annotation alone; nothing is decided from the rest of the node, so it needs no guard."""
        async with self._slots:
            if node.name in self._loop.writing or not self._election.still_leading():
                return False
            try:
                written = await self._fleet.patch_node(NodePatch(name=node.name, annotations={PARKING: self._wanted(node)}))
            except NotFound:
                return True
            except ClusterError as error:
                logger.warning("a node could not be marked, trying again", extra={"node": node.name, "error": error.message})
                return False
            self._loop.mark(self._cache.put_node(written))
            return True
