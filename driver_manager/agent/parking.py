"""Parked DaemonSets, as far as it takes more than the node's own patches: waiting before the park, and letting in after it.

The un-park alone lets nobody in: a pod that was made meanwhile keeps the admission policy's gate for ever (decision 44, measured). So those
are evicted, and their successors come without it. No right to change pods is needed for that, and no budget is asked for a pod that never
ran. A successor is gated again as long as the API server does not know of the un-park: for some 20 ms after that patch (measured).
"""

from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import Final

from driver_manager.agent.node import NodeWriter
from driver_manager.agent.progress import Progress
from driver_manager.config import limit_words
from driver_manager.core.hold import parked_on
from driver_manager.core.plan import counted, named
from driver_manager.core.report import Waiting, pod_blockers
from driver_manager.core.snapshot import PodView
from driver_manager.errors import Conflict, DeadlineExceeded, EvictionBlocked, NotFound, Refused, Terminating, Unreachable, Unsettled
from driver_manager.ports import Clock, Cluster

PAUSES: Final = (0.1, 0.3, 1.0, 3.0)
"""Seconds before each look for pods that wait: the API server has to know of the un-park, and the successors have to be made."""
LOOK_EVERY: Final = 2.0
"""Seconds between two looks at a rolling update."""
HINT: Final = "look whether a controller leads (driver-manager status --all): it lets them go too; or delete those pods"


async def await_rolling_update(cluster: Cluster, clock: Clock, progress: Progress, owner: str, limit: float) -> None:
    """Returns when a DaemonSet is not in a rolling update: parked, it could not finish it (decision 45).

    Args:
        cluster: the API.
        clock: time.
        progress: is told what is waited for.
        owner: `namespace/name`.
        limit: seconds; 0 is without limit.

    Raises:
        DeadlineExceeded: it does not finish. Forbidden, Unreachable.
    """
    began, (namespace, _, name) = clock.now(), owner.partition("/")
    sentence = f"DaemonSet {owner}, which has to be parked, is in a rolling update ({limit_words(limit)})"
    with suppress(NotFound):  # then its pods are going too
        while (await cluster.daemon_set(namespace, name)).is_rolling:
            waited = clock.now() - began
            if limit and waited >= limit:
                hint = f"look why it does not finish: kubectl rollout status -n {namespace} ds/{name}"
                raise DeadlineExceeded(f"the rolling update of DaemonSet {owner} to finish, which has to be parked", waited, hint=hint)
            progress.wait(Waiting("rolling-update", sentence))
            await clock.sleep(LOOK_EVERY)


def check_kept_off(pods: Iterable[PodView], parked: Collection[str], came: set[str]) -> None:
    """Makes sure that parked DaemonSets are kept off: one pod of each may have been made just before the park, a second one may not.

    Args:
        pods: those that a look in mid-run found on the node.
        parked: `namespace/name`.
        came: the DaemonSets of which a pod was found before; those found now are added.

    Raises:
        Refused: naming the DaemonSets and what to look at.
    """
    again = {pod.owner_ref for pod in pods}.intersection(parked)
    if both := again & came:
        hint = "look at the policies of deploy/parking and their bindings; the controller takes its mark off the node when it sees that"
        who = ", ".join(sorted(both))
        raise Refused(f"pods of DaemonSet {who} come to the node though it is parked: no admission policy works", hint=hint)
    came |= again


async def let_in(cluster: Cluster, clock: Clock, writer: NodeWriter, progress: Progress, owners: Collection[str], limit: float) -> None:
    """Returns when no pod of these DaemonSets waits with the gate for a node that is not parked for it.

    Args:
        cluster: the API.
        clock: time.
        writer: with the node, which has been un-parked.
        progress: is told what is waited for.
        owners: `namespace/name`.
        limit: seconds for which the API server may not answer; 0 is without limit.

    Raises:
        Unsettled: after three rounds of evictions some still wait. DeadlineExceeded: no answer. Forbidden, TakenOver.
    """
    began, rounds = clock.now(), 0
    while True:
        await clock.sleep(PAUSES[rounds])
        try:
            if rounds:
                await writer.refresh()
            waiting = await _waiting(cluster, writer, owners)
            if not waiting:
                return
            if rounds == len(PAUSES) - 1:
                raise Unsettled(f"{named(waiting)} still waits with the gate of a parked DaemonSet after {rounds} evictions", hint=HINT)
            sentence = f"letting in {counted(waiting)} of parked DaemonSets"
            progress.wait(Waiting("letting-in", sentence, pod_blockers(waiting, "waits with the gate of the admission policy")))
            for pod in waiting:
                await _evict(cluster, pod)
            rounds += 1
        except Unreachable as error:
            waited = clock.now() - began
            if limit and waited >= limit:
                what = f"the API server, to let in pods of {', '.join(sorted(owners))}; last: {error.message}"
                raise DeadlineExceeded(what, waited) from error
            await clock.sleep(error.retry_after)


async def _waiting(cluster: Cluster, writer: NodeWriter, owners: Collection[str]) -> tuple[PodView, ...]:
    """Pods that nobody keeps off any more: where the controller parks the same DaemonSet they wait rightly."""
    free = set(owners) - parked_on(writer.node)
    return tuple(pod for pod in await cluster.gated_for(writer.node.name) if pod.owner_ref in free and not pod.is_terminating)


async def _evict(cluster: Cluster, pod: PodView) -> None:
    """Asks once; whoever is still there is asked again in the next round."""
    with suppress(NotFound, Conflict, Terminating, EvictionBlocked):
        await cluster.evict(pod)
