"""Following the pods of a node, evicting some of them, and waiting until they are gone. Agent and controller share it."""

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final, Protocol

from driver_manager.config import limit_words
from driver_manager.core.consumers import virtual_machine
from driver_manager.core.plan import counted
from driver_manager.core.report import BLOCKED, EVICTING, Blocker, Waiting
from driver_manager.core.snapshot import ChangeKind, PodList, PodView
from driver_manager.errors import (
    ClusterError,
    Conflict,
    DeadlineExceeded,
    EvictionBlocked,
    Forbidden,
    NotFound,
    Refused,
    Terminating,
    Unreachable,
)
from driver_manager.names import MIRROR_HASH
from driver_manager.ports import Clock, Cluster
from driver_manager.together import each_of

EVACUATION: Final = "evacuation"
"""What KubeVirt's answer speaks of when it moves the machine away: it refuses the eviction then, and the pod goes when that is done."""
FIRST_RETRY: Final = 2.0
"""Seconds at least between two tries for one pod: a budget is not asked more often (decision 13)."""
LONGEST_RETRY: Final = 10.0
EVERY_TIME: Final = "Cannot evict pod as it would violate the pod's disruption budget. "
"""How the API server begins each refusal for a budget."""
STUCK_MARGIN: Final = 30.0
"""Seconds beyond its grace period after which a pod counts as stuck."""
SILENCE: Final = 60.0
"""Seconds for which an API server may not answer to evictions."""
AT_ONCE: Final = 16
"""Evictions that are under way at the same time: enough for a full node, and little for the server."""


class Teller(Protocol):
    """Who is told what happens."""

    def tell(self, message: str, **fields: object) -> None:
        """One line of the story."""
        ...

    def warn(self, message: str, **fields: object) -> None:
        """Something that a person should look at, though the work goes on."""
        ...


class PodTracker:
    """The pods that are in the API on this node, kept current by a watch."""

    def __init__(self, cluster: Cluster, node_name: str, since: PodList) -> None:
        self._cluster, self._node_name, self._since = cluster, node_name, since
        self.present = {pod.uid: pod for pod in since.items}
        self.names: dict[str, str] = {}
        """Uid, as processes show it -> `namespace/name` of every pod that was ever seen, those that are gone included."""
        self._remember(since.items)
        self._gone: set[str] = set()
        """Uids that were seen to leave: they never come back, whatever an older list says."""
        self._waiting: set[asyncio.Future[None]] = set()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "PodTracker":
        self._task = asyncio.create_task(self._follow())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait({self._task})  # to wait for it by `await` could not be told from being cancelled meanwhile
        error = None if self._task.cancelled() else self._task.exception()
        if error is not None and not isinstance(error, ClusterError):  # whoever waited for a change has heard of those
            raise error

    async def _follow(self) -> None:
        async for change in self._cluster.pod_changes(self._node_name, self._since):
            if change.kind is ChangeKind.GONE:
                self.present.pop(change.pod.uid, None)
                self._gone.add(change.pod.uid)
            else:
                self.present[change.pod.uid] = change.pod
                self._remember((change.pod,))
            self._tell()

    def update(self, pods: PodList) -> None:
        """Takes in a list, which may be older than what the watch has told since: it adds, and tells of ends that have begun.

        Who is not in it any more goes when the watch tells so.
        """
        for pod in pods.items:
            if pod.uid not in self._gone and (pod.uid not in self.present or pod.is_terminating):
                self.present[pod.uid] = pod
        self._remember(pods.items)
        self._tell()

    def _remember(self, pods: Iterable[PodView]) -> None:
        self.names |= {pod.annotations.get(MIRROR_HASH, pod.uid): pod.ref for pod in pods}

    async def refresh(self) -> None:
        """Lists the pods once more."""
        self.update(await self._cluster.pods_on(self._node_name))

    def _tell(self) -> None:
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)

    async def next_change(self, clock: Clock, at_most: float) -> None:
        """Returns at the next change of any pod, else after `at_most` seconds.

        Raises:
            Forbidden: the watch is over for good.
        """
        assert self._task is not None
        changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(changed)  # at once, so that no change falls between the look before and the wait
        sleep = asyncio.create_task(clock.sleep(at_most))
        try:
            await asyncio.wait({changed, sleep, self._task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._waiting.discard(changed)
            sleep.cancel()
        if self._task.done():
            self._task.result()

    def among(self, pods: Iterable[PodView]) -> tuple[PodView, ...]:
        """Those that still run, as they are now; same name with another uid is somebody else, and one that has ended uses nothing."""
        there = [self.present[pod.uid] for pod in pods if pod.uid in self.present]
        return tuple(pod for pod in there if pod.is_terminating or not pod.is_over)


class Evicts(Protocol):
    """Where pods are evicted: a `ports.Cluster`, or what stands before one."""

    async def evict(self, pod: PodView, *, dry_run: bool = False, grace_seconds: int | None = None) -> None:
        """As `ports.Cluster.evict`."""
        ...


class Evictor:
    """Evicts pods within one deadline that counts from the first eviction."""

    def __init__(self, cluster: Evicts, clock: Clock, tracker: PodTracker, progress: Teller, limit: float) -> None:
        self._cluster, self._clock, self._tracker, self._progress = cluster, clock, tracker, progress
        self._limit = limit
        self._began: float | None = None
        self._wanted: tuple[PodView, ...] = ()
        self.asked: tuple[PodView, ...] = ()
        """The pods that were asked for without changing anything."""
        self.blocked: dict[str, EvictionBlocked] = {}
        """Pod uid -> why it may not go now."""
        self._slots = asyncio.Semaphore(AT_ONCE)
        self.accepted: set[str] = set()
        """Uids of pods whose eviction the server has taken."""

    async def try_all(self, pods: Sequence[PodView]) -> None:
        """Asks for every pod without changing anything, and remembers who is refused.

        Raises:
            Refused: a pod can never be evicted as things are.
        """

        async def ask(pod: PodView) -> None:
            try:
                async with self._slots:
                    await self._cluster.evict(pod, dry_run=True)
            except EvictionBlocked as error:
                self._note(pod, error)
            except Forbidden:
                raise
            except ClusterError as error:  # gone, on its way, or a webhook that knows no dry runs: the eviction itself will tell
                self._progress.tell("it cannot be said beforehand whether a pod may go", pod=pod.ref, why=error.message)

        self.asked = tuple(pods)
        await each_of(ask(pod) for pod in pods)

    def _note(self, pod: PodView, error: EvictionBlocked) -> None:
        machine = virtual_machine(pod)
        if machine is not None and EVACUATION not in error.message.lower():
            raise Refused(
                f"pod {pod.ref} runs the virtual machine {machine}, which cannot be moved now: {error.message}",
                hint=f"stop the virtual machine {machine}, or make it able to migrate, then run again",
            )
        if error.final:
            raise Refused(f"pod {pod.ref} can never be evicted: {error.message}", hint=error.hint or "leave it one budget")
        self.blocked[pod.uid] = error

    async def evict_all(self, pods: Sequence[PodView]) -> None:
        """Evicts all pods: first those that were refused, so that nobody goes in vain; returns when all are accepted."""
        self._wanted = tuple(pods)
        if pods and self._began is None:
            self._began = self._clock.now()
        refused = [pod for pod in pods if pod.uid in self.blocked]
        others = [pod for pod in pods if pod.uid not in self.blocked]
        await each_of(self._evict(pod, FIRST_RETRY) for pod in refused)
        await each_of(self._evict(pod, 0.0) for pod in others)

    async def _evict(self, pod: PodView, pause: float) -> None:
        """Tries until the eviction is accepted or needless."""
        longer, silent_since = FIRST_RETRY, None
        if self._began is None:
            self._began = self._clock.now()
        while True:
            if pause:
                await self._rest(pod, pause)
            now = self._tracker.present.get(pod.uid)
            if now is None or now.is_terminating or now.is_over:
                self.blocked.pop(pod.uid, None)
                return
            try:
                async with self._slots:
                    await self._cluster.evict(pod)
            except Terminating:
                self.blocked.pop(pod.uid, None)
                return
            except (NotFound, Conflict):  # believed when a list says so too
                await self._listed(pod, self._clock.now())
                pause = 1.0
            except EvictionBlocked as error:
                self._note(pod, error)
                silent_since = None
                pause = max(longer, error.retry_after)
                longer = min(1.5 * longer, LONGEST_RETRY)
            except Unreachable as error:
                silent_since = silent_since or self._clock.now()
                if self._clock.now() - silent_since > SILENCE:
                    raise
                await self._rest(pod, max(1.0, error.retry_after))
                await self._listed(pod, silent_since)
                pause = 0.0
            else:
                self.blocked.pop(pod.uid, None)
                self.accepted.add(pod.uid)
                return

    async def _listed(self, pod: PodView, silent_since: float) -> None:
        """Lists the pods, as an answer alone may have been lost: nobody is asked for again before it is known that it was not taken."""
        while True:
            try:
                await self._tracker.refresh()
                return
            except Unreachable:
                if self._clock.now() - silent_since > SILENCE:
                    raise
                await self._rest(pod, 1.0)

    async def _rest(self, pod: PodView, pause: float) -> None:
        """Waits between two tries, or until the pod is on its way anyhow."""
        until = self._clock.now() + pause
        while (left := until - self._clock.now()) > 0.001:
            self.check_limit()
            now = self._tracker.present.get(pod.uid)
            if now is None or now.is_terminating:
                return
            await self._tracker.next_change(self._clock, min(left, self.time_left()))

    def time_left(self) -> float:
        """Seconds until the deadline; infinite without one."""
        if not self._limit or self._began is None:
            return float("inf")
        return max(0.0, self._began + self._limit - self._clock.now())

    def check_limit(self) -> None:
        """Ends the run when the deadline is over.

        Raises:
            DeadlineExceeded: naming the pods that are still there, and the budgets.
        """
        if self.time_left() > 0:
            return
        assert self._began is not None
        left = sorted(self._tracker.among(self._wanted), key=lambda pod: pod.uid not in self.blocked)  # there may be room for one alone
        hint = "look why the pod does not end (kubectl describe pod)"
        if any(pod.uid in self.blocked for pod in left):
            hint = "free the budget (more replicas, or a smaller minAvailable)"
        raise DeadlineExceeded(
            "; ".join(self.why(pod) for pod in left) or "the pods to be evicted",
            self._clock.now() - self._began,
            hint=f"{hint}, delete the pod, or raise DRAIN_TIMEOUT_SECONDS",
        )

    def why(self, pod: PodView) -> str:
        """The pod with what holds it, for people."""
        error = self.blocked.get(pod.uid)
        if error is None:
            return f"pod {pod.ref} to {'end' if pod.is_terminating or pod.uid in self.accepted else 'be evicted after that'}"
        return f"pod {pod.ref}, which {f'the budget {error.budget}' if error.budget else 'the API server'} does not let go: {error.message}"

    def waiting(self, pods: Sequence[PodView]) -> Waiting:
        """What the run waits for among these pods."""
        limit = limit_words(self._limit)
        stuck = [pod for pod in pods if pod.uid in self.blocked]
        if stuck:
            blockers = tuple(Blocker("pod", pod.ref, _blocked_words(self.blocked[pod.uid]), pod.uid) for pod in stuck)
            return Waiting(BLOCKED, f"waiting until {counted(stuck)} may be evicted ({limit})", blockers)
        blockers = tuple(Blocker("pod", pod.ref, "is ending" if pod.is_terminating else "is to be evicted", pod.uid) for pod in pods)
        return Waiting(EVICTING, f"waiting for {counted(pods)} to be gone ({limit})", blockers)


def _blocked_words(error: EvictionBlocked) -> str:
    """What the server says, without the part that it says every time: there is little room, and the numbers come last."""
    words = error.message.removeprefix(EVERY_TIME)
    return f"budget {error.budget}: {words}" if error.budget and error.budget not in words else words


class Reaper:
    """Ends pods whose own end does not come: an eviction without grace, for which the server asks no budget, as the first one has been let.

    Only pods past their grace and a margin, and none with a finalizer, whose owner still has to do something (N10), or with a claim, which
    the kubelet would still have prepared (specification 8).
    """

    def __init__(self, cluster: Cluster, clock: Clock, progress: Teller) -> None:
        self._cluster, self._clock, self._progress = cluster, clock, progress
        self._since: dict[str, float] = {}
        """Pod uid -> when it was first seen to be ending."""
        self._done: set[str] = set()

    async def reap(self, pods: Sequence[PodView]) -> None:
        """Looks at pods that are waited for, and ends those that are stuck, each once."""
        now = self._clock.now()
        for pod in pods:
            if not pod.is_terminating or pod.uid in self._done:
                continue
            since = self._since.setdefault(pod.uid, now)
            if pod.finalizers or pod.claims or now - since < pod.grace_seconds + STUCK_MARGIN:
                continue
            self._progress.warn("a pod does not end and is deleted by force", pod=pod.ref, setting="FORCE_DELETE_STUCK_PODS")
            try:
                await self._cluster.evict(pod, grace_seconds=0)
            except (EvictionBlocked, Unreachable) as error:
                self._progress.tell("it could not be deleted by force; that is tried again", pod=pod.ref, why=error.message)
                continue
            except (NotFound, Conflict):
                pass
            self._done.add(pod.uid)


async def wait_until_gone(
    tracker: PodTracker,
    clock: Clock,
    pods: Collection[PodView],
    limit: float,
    tell: Callable[[tuple[PodView, ...]], None],
    repeat: float = 5.0,
) -> None:
    """Returns when none of the pods is in the API any more.

    Args:
        tracker: what is there.
        clock: time.
        pods: by uid.
        limit: seconds; 0 is without limit.
        tell: called with those that are left, after each change and every `repeat` seconds.
        repeat: seconds.

    Raises:
        DeadlineExceeded: naming who is left.
    """
    began = clock.now()
    while left := tracker.among(pods):
        waited = clock.now() - began
        if limit and waited >= limit:
            names = ", ".join(f"pod {pod.ref}" for pod in left)
            raise DeadlineExceeded(f"{names} to be gone", waited, hint="look why the pod does not end: kubectl describe pod")
        tell(left)
        await tracker.next_change(clock, max(0.001, min(repeat, limit - waited)) if limit else repeat)
