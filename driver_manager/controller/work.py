"""Freeing one node: a task that looks at its pods, evicts those that use the driver, and waits until they are gone."""

import asyncio
import logging
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from driver_manager.config import Settings
from driver_manager.core.agentreport import report_of
from driver_manager.core.disruption import Order, in_order, never_evicted
from driver_manager.core.fleet import BudgetView
from driver_manager.core.freeing import ToFree, Users, pods_to_drain, pods_to_free
from driver_manager.core.parking import Means
from driver_manager.core.report import BLOCKED
from driver_manager.core.rollout_record import Progress
from driver_manager.core.rollout_states import State
from driver_manager.core.situation import Freeing, Situation, Work
from driver_manager.core.snapshot import NodeView, PodView
from driver_manager.core.upgrade_policy import UpgradePolicy
from driver_manager.errors import ClusterError, DeadlineExceeded, Forbidden, Refused, Unreachable
from driver_manager.evictions import Evictor, PodTracker, wait_until_gone
from driver_manager.ports import Clock, Cluster
from driver_manager.together import together

logger = logging.getLogger(__name__)

FREED_AT_ONCE: Final = 100
"""Nodes whose pods are watched at the same time: each watch occupies a connection to the API server, and requests need some too."""
MAX_ROUNDS: Final = 3
"""How often pods that came meanwhile are freed too, before they are named and given up."""
HANDLERS_SECONDS: Final = 300.0
REPORT_SECONDS: Final = 1.0
UNAWAITED: Final = frozenset({Work.FREE_UNKNOWN, Work.FREE_REPORTED})
"""Work that no state of the node waits for."""
TRIED_AGAIN: Final = UNAWAITED | {Work.LOOK_FOR_JOBS}
"""Work that is tried again as long as the node is where it is, because nothing follows from its failure."""
FIRST_AGAIN: Final = 30.0
LONGEST_AGAIN: Final = 300.0
"""Seconds until such work is tried again; doubling."""
RETRY_SECONDS: Final = 5.0
"""After an API server that did not answer."""
LET_TELL: Final = 0.5
"""By so much the wait for the end is longer than that for the evictions, which knows what holds them."""

FindBudgets = Callable[[Iterable[str]], tuple[BudgetView, ...]]
"""The budgets of some namespaces, as they are now."""


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be done about one node, in one stay in its state."""

    work: Work
    since: float
    """When the node came to the state: the next try is another job."""
    node: NodeView
    policy: UpgradePolicy
    deadline: float
    """Unix seconds; 0 is without limit."""
    is_following: bool = False
    """Whether gpu-operator leads the node."""
    waits_for_jobs: bool = False
    """Whether the pods that the policy waits for are waited for first; they have a state of their own where ours leads."""
    reported: Mapping[str, str] = field(default_factory=dict)
    """Pod uid -> why, of those that the agent on the node names."""
    held: Hashable = None
    """What keeps DaemonSets off the node, where gpu-operator leads it: with more of that the job goes on as another one."""

    @property
    def key(self) -> Hashable:
        """The same as long as it is the same job."""
        return self.work, self.since, self.is_following, self.waits_for_jobs, frozenset(self.reported), self.held


def job_of(situation: Situation, work: Work, *, is_following: bool) -> Job:
    """The job that a node's wait asks for. A follower's has no time of its own on the node, and its policy is the one of now."""
    progress = situation.progress
    report = report_of(situation) if work is Work.FREE_REPORTED else None
    policy = (situation.policy or UpgradePolicy()) if is_following else situation.in_force
    return Job(
        work,
        0.0 if is_following or progress is None else progress.since,
        situation.node,
        policy,
        0.0 if is_following or progress is None else progress.deadline,
        is_following,
        is_following and situation.state is State.WAIT_FOR_JOBS and bool(policy.wait_for_completion.pod_selector.requirements),
        report.pods if report is not None else {},
        held_by(progress) if is_following else None,
    )


def held_by(progress: Progress | None) -> Hashable:
    """What a record says that keeps DaemonSets off."""
    return (tuple(progress.parked), tuple(progress.paused), progress.taint) if progress is not None else None


@dataclass(slots=True)
class Told:
    """What a job has found so far."""

    freeing: Freeing | None = None
    jobs: tuple[str, ...] | None = None
    evicted: list[str] = field(default_factory=list)
    """`namespace/name` of pods whose eviction was accepted."""


class Keeper(Protocol):
    """Who knows how DaemonSets are kept off a node."""

    async def means(self, node: NodeView, policy: UpgradePolicy) -> Means:
        """What there is for that under a policy."""
        ...

    async def prove(self, node_name: str, owners: Collection[str]) -> None:
        """Returns when parked DaemonSets are kept off.

        Raises:
            Refused: they are not.
        """
        ...


class WhileLeading:
    """Evicts nobody when the Lease could not be renewed (R10): another replica may lead by then."""

    def __init__(self, cluster: Cluster, may_write: Callable[[], bool]) -> None:
        self._cluster, self._may_write = cluster, may_write

    async def evict(self, pod: PodView, *, dry_run: bool = False, grace_seconds: int | None = None) -> None:
        """As `ports.Cluster.evict`.

        Raises:
            Unreachable: nobody is evicted now.
        """
        if not self._may_write():
            raise Unreachable("the Lease could not be renewed, so nobody is evicted")
        await self._cluster.evict(pod, dry_run=dry_run, grace_seconds=grace_seconds)


class Worker:
    """Does one job; tells after each change."""

    def __init__(
        self,
        cluster: Cluster,
        clock: Clock,
        settings: Settings,
        handlers: "Handlers",
        budgets: FindBudgets,
        job: Job,
        on_change: Callable[[], None],
        on_freed: Callable[[NodeView, Sequence[str]], None],
        keeper: Keeper,
        may_write: Callable[[], bool],
    ) -> None:
        self._evicts = WhileLeading(cluster, may_write)
        self._cluster, self._clock, self._settings, self._handlers, self._keeper = cluster, clock, settings, handlers, keeper
        self.job = job
        self._budgets = budgets
        self._on_change, self._on_freed = on_change, on_freed
        self._deadline = job.deadline
        self.told = Told()

    async def run(self) -> None:
        """Works until the job is done, has failed for good, or is cancelled. An API server that does not answer is waited for."""
        pause = FIRST_AGAIN
        while True:
            try:
                await self._do()
                return
            except (DeadlineExceeded, Refused, Forbidden) as error:
                self._tell(Freeing(failure=error.message, blockers=self._blockers()))
                if self.job.work not in TRIED_AGAIN:
                    return
                await self._clock.sleep(pause)
                pause = min(2 * pause, LONGEST_AGAIN)
            except ClusterError as error:
                logger.warning("freeing a node broke off", extra={"node": self.job.node.name, "error": error.message})
                await self._clock.sleep(RETRY_SECONDS)

    async def _do(self) -> None:
        if self.job.waits_for_jobs or self.job.work is Work.LOOK_FOR_JOBS:
            await self._watch_jobs()
        if self.job.work in UNAWAITED:  # each try has the whole time
            limit = self.job.policy.pod_deletion.timeout_seconds
            self._deadline = self._clock.epoch() + limit if limit else 0.0
        if self.job.work is not Work.LOOK_FOR_JOBS:
            await self._free()

    def _blockers(self) -> tuple[str, ...]:
        return self.told.freeing.blockers if self.told.freeing else ()

    def _tell(self, freeing: Freeing) -> None:
        if freeing != self.told.freeing:
            self.told.freeing = freeing
            self._on_change()

    def _time_left(self) -> float:
        """Seconds; 0 is without limit."""
        return max(0.001, self._deadline - self._clock.epoch()) if self._deadline else 0.0

    async def _watch_jobs(self) -> None:
        name, selector = self.job.node.name, self.job.policy.wait_for_completion.pod_selector
        async with PodTracker(self._cluster, name, await self._cluster.pods_on(name)) as tracker:
            while True:
                active = [pod for pod in tracker.present.values() if selector.matches(pod.labels) and not pod.is_over]
                jobs = tuple(sorted(pod.ref for pod in active))
                if jobs != self.told.jobs:
                    self.told.jobs = jobs
                    self._on_change()
                if not jobs:
                    return
                await tracker.next_change(self._clock, 3600.0)

    async def _free(self) -> None:
        name = self.job.node.name
        async with PodTracker(self._cluster, name, await self._cluster.pods_on(name)) as tracker:
            for _ in range(MAX_ROUNDS):
                todo = await self._look(tracker)
                if refusals := (*todo.refusals, *never_evicted(todo.evict, self._budgets_of(todo.evict))):
                    raise Refused("; ".join(refusals))
                if not todo.gone:
                    self._tell(Freeing(is_done=True))
                    return
                if missing := todo.hold.missing_on(self.job.node):
                    self._tell(Freeing(hold=missing))  # the node is written first, and another job goes on from there
                    return
                await self._keeper.prove(name, todo.hold.parked)
                await self._take_off(tracker, todo)
            left = ", ".join(pod.with_owner for pod in (await self._look(tracker)).gone)
            if left:
                raise Refused(f"users of the driver keep coming to the node: {left}")
            self._tell(Freeing(is_done=True))

    async def _look(self, tracker: PodTracker) -> ToFree:
        pods = tuple(tracker.present.values())
        job, means = self.job, await self._keeper.means(self.job.node, self.job.policy)
        return await what_to_free(self._cluster, self._handlers, self._settings, job.node, pods, job.policy, job.work, means, job.reported)

    def _budgets_of(self, pods: Sequence[PodView]) -> tuple[BudgetView, ...]:
        return self._budgets(pod.namespace for pod in pods)

    async def _take_off(self, tracker: PodTracker, todo: ToFree) -> None:
        """Evicts and waits, telling meanwhile what is waited for."""
        evictor = Evictor(self._evicts, self._clock, tracker, _Log(self.job.node.name), self._time_left())
        order = in_order(todo.evict, self._budgets_of(todo.evict))
        if order.to_try:
            await evictor.try_all(order.to_try)
        reporter = asyncio.create_task(self._report(evictor, tracker, todo.gone))
        limit = self._time_left()
        limit += LET_TELL if limit else 0.0
        try:
            await together(self._evict(evictor, order), wait_until_gone(tracker, self._clock, todo.gone, limit, lambda _: None))
        finally:
            evicted = [pod.ref for pod in todo.evict if pod.uid in evictor.accepted]
            if self.job.work in UNAWAITED:  # no write of the node will tell of it
                self._on_freed(self.job.node, evicted)
            else:
                self.told.evicted += evicted
            reporter.cancel()

    async def _evict(self, evictor: Evictor, order: Order) -> None:
        """Part after part (R5): while a budget does not let a pod go, those that would go in vain keep their place."""
        for part in (order.scarce, order.covered, order.free):
            await evictor.evict_all(part)

    async def _report(self, evictor: Evictor, tracker: PodTracker, pods: Sequence[PodView]) -> None:
        while True:
            waiting = evictor.waiting(tracker.among(pods))
            blockers = tuple(f"{each.kind} {each.name} ({each.why})" for each in waiting.blockers)
            self._tell(Freeing(blockers=blockers, is_blocked=waiting.reason == BLOCKED))
            await self._clock.sleep(REPORT_SECONDS)


class Handlers:
    """RuntimeClass name -> handler, listed again now and then: a cluster has few, and they hardly change."""

    def __init__(self, cluster: Cluster, now: Callable[[], float]) -> None:
        self._cluster, self._now = cluster, now
        self._listed_at = float("-inf")
        self._handlers: Mapping[str, str] | None = None

    async def get(self) -> Mapping[str, str] | None:
        """As they are now, or were not long ago; None where they may not be listed."""
        if self._now() - self._listed_at >= HANDLERS_SECONDS:
            try:
                self._handlers = await self._cluster.runtime_handlers()
            except Forbidden:
                self._handlers = None
            self._listed_at = self._now()
        return self._handlers


async def what_to_free(
    cluster: Cluster,
    handlers: Handlers,
    settings: Settings,
    node: NodeView,
    pods: Sequence[PodView],
    policy: UpgradePolicy,
    work: Work,
    means: Means,
    reported: Mapping[str, str] | None = None,
) -> ToFree:
    """What has to happen to the pods of a node, with their claims and runtime classes read."""
    wanted = {(pod.namespace, name) for pod in pods for name in pod.claims}
    users = Users(
        settings=settings,
        claims=await cluster.claims(wanted) if wanted else {},
        runtime_handlers=await handlers.get() if any(pod.runtime_class for pod in pods) else None,
        means=means,
        is_led_by_others=work is Work.FREE_UNKNOWN,
        reported=reported or {},
    )
    return (pods_to_drain if work is Work.DRAIN else pods_to_free)(node, pods, policy, users)


class _Log:
    """Tells the story of one node's evictions to the log."""

    def __init__(self, node_name: str) -> None:
        self._node_name = node_name

    def tell(self, message: str, **fields: object) -> None:
        logger.info(message, extra={"node": self._node_name, **fields})

    def warn(self, message: str, **fields: object) -> None:
        logger.warning(message, extra={"node": self._node_name, **fields})
