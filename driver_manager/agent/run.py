"""One run of the agent from its first look to its exit code: the way, the failures, and what is put back."""

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from driver_manager.agent.execute import Executor
from driver_manager.agent.node import NodeWriter
from driver_manager.agent.observe import Observer
from driver_manager.agent.progress import Progress
from driver_manager.config import Settings
from driver_manager.core.plan import BeginUnload, Path, Plan, RestoreNode, Step, UnmarkHostDriver
from driver_manager.core.planner import unload_steps
from driver_manager.core.record import find_record
from driver_manager.core.report import Blocker, Waiting, refused_blockers, status_text
from driver_manager.core.seen import Snapshot
from driver_manager.errors import (
    ClusterError,
    DeadlineExceeded,
    DriverManagerError,
    Exit,
    Forbidden,
    Interrupted,
    InvariantBroken,
    Refused,
    StartOver,
    TakenOver,
    Unsettled,
)
from driver_manager.logs import bound
from driver_manager.names import DEPLOY_DRIVER, HOST_DRIVER, PRE_INSTALLED, STATUS
from driver_manager.ports import Clock, Cluster, Host

logger = logging.getLogger(__name__)

MAX_TURNS: Final = 5
"""How often a run starts over after a wait or an undo, before anything is changed."""
STATUS_AFTER: Final = 2.0
"""A wait shorter than this is not written on the node."""
STATUS_EVERY: Final = 10.0
"""Seconds at least between two writes of the status."""
LOOK_ASIDE_EVERY: Final = 10.0
"""Seconds in a long step after which a run makes sure that the node is still its own: the controller may take it for dead."""
MARK_SECONDS: Final = 5.0
"""How long a run that a signal ends looks whether its mark of a host driver was written."""
DEFAULT_GRACE: Final = 30.0
GRACE_MARGIN: Final = 5.0
"""Seconds of our pod's grace period that are left for the end of the process (decision 23)."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    code: Exit
    sentence: str
    hint: str = ""
    is_put_back: bool = True
    """Whether the node is as it was before; if not, the record on it says what is left."""


class Agent:
    """One run on one node."""

    def __init__(self, cluster: Cluster, host: Host, clock: Clock, settings: Settings, progress: Progress | None = None) -> None:
        self.cluster, self.host, self.clock, self.settings = cluster, host, clock, settings
        self.progress = progress or Progress(clock)
        self.observer = Observer(cluster, host, clock, settings)
        self.executor: Executor | None = None
        self._grace = DEFAULT_GRACE
        self._on_failure: tuple[Step, ...] = (RestoreNode(),)
        self._refused: tuple[Blocker, ...] = ()
        """Pods that this run may not move."""
        self._stopped_at: float | None = None
        """When a signal came."""
        self._lost: DriverManagerError | None = None
        """Who has the node now, where that was seen in the middle of a step."""
        self._is_ending = False
        """Whether the node is being put back after a failure: a signal lets that go on as long as there is time."""

    # Ways in --------------------------------------------------------------------------------------------------------

    async def uninstall(self, stop: asyncio.Event) -> Outcome:
        """Frees the node of the driver, or puts everything back.

        Args:
            stop: set when a signal asks the program to end.
        """
        bound.set({"node": self.settings.node_name, "run": self.observer.run})
        return await self._guarded(self._uninstall(), stop)

    async def restore(self, stop: asyncio.Event, *, keep_status: bool = False) -> Outcome:
        """Puts back what the record on the node holds, and only that.

        Args:
            stop: set when a signal asks the program to end.
            keep_status: where there is no record, leave the last run's status for people: this follows that run by itself.
        """
        bound.set({"node": self.settings.node_name, "run": self.observer.run})
        return await self._guarded(self._restore(keep_status), stop)

    async def plan(self) -> tuple[Snapshot, Plan]:
        """What `uninstall` would do now; changes nothing."""
        return await self.observer.plan()

    async def state(self) -> tuple[Snapshot, Plan | DriverManagerError]:
        """The node as it is, and what `uninstall` would do now, or why that cannot be said."""
        try:
            return await self.observer.plan()
        except DriverManagerError as error:
            return await self.observer.look(), error

    # The run --------------------------------------------------------------------------------------------------------

    async def _guarded(self, work: Coroutine[Any, Any, Outcome], stop: asyncio.Event) -> Outcome:
        """Does the work under the node's lock, and turns each way it can end into an outcome."""
        task = asyncio.ensure_future(self._locked(work))
        stopped = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
            self._stopped_at = self.clock.now()
            if not task.done() and self._is_ending:
                await asyncio.wait({task}, timeout=self._time_to_stop())
        finally:
            stopped.cancel()
            if not task.done():
                task.cancel()
        with suppress(asyncio.CancelledError):
            return await task
        if self._is_ending:
            hint = "run `driver-manager restore` on the node"
            return Outcome(Exit.AGAIN, "stopped by a signal while the node was being put back", hint, is_put_back=False)
        return Outcome(Exit.AGAIN, "stopped by a signal before anything was changed")

    async def _locked(self, work: Coroutine[Any, Any, Outcome]) -> Outcome:
        try:
            async with self.host.lock(self.settings.lock_timeout):
                return await self._settled(work)
        except DriverManagerError as error:
            return Outcome(error.exit_code, error.message, error.hint)
        finally:
            work.close()

    async def _settled(self, work: Coroutine[Any, Any, Outcome]) -> Outcome:
        """Ends a run that failed or was stopped: everything back, one outcome."""
        try:
            return await work
        except DriverManagerError as error:
            failure = error
        except asyncio.CancelledError:
            failure = self._lost or Interrupted("stopped by a signal", hint="the next run starts from the beginning")
        except Exception as error:  # the loop's edge: a bug must not leave the node paused either
            logger.exception("a bug in driver-manager: please report it with these lines")
            failure = InvariantBroken(f"a bug in driver-manager: {type(error).__name__}: {error}", hint="report it with the log")
        self._is_ending = True
        task = asyncio.current_task()
        while task is not None and task.cancelling():  # also where an error came at the same moment and hid the signal
            task.uncancel()
        if isinstance(failure, Interrupted) and await self._is_marked():
            return Outcome(Exit.HOST_DRIVER, "the driver belongs to the host; the node is marked so")
        return await self._put_back(failure, self.settings.restore_timeout if self._stopped_at is None else self._time_to_stop())

    async def _is_marked(self) -> bool:
        """Whether the host driver's mark of this run is on the node: its DaemonSet deletes our pod as soon as it is (decision 16)."""
        if self.executor is None or not self.executor.is_marking:
            return False
        try:
            node = await self.executor.writer.read(MARK_SECONDS)
        except DriverManagerError:
            return False
        return HOST_DRIVER in node.annotations and node.labels.get(DEPLOY_DRIVER) == PRE_INSTALLED

    def _time_to_stop(self) -> float:
        """Seconds until our pod's grace period is nearly over (decision 23): the deletion's own, where the watch has told it."""
        grace = self._grace
        if self.executor is not None:
            own = self.executor.tracker.present.get(self.cluster.identity.pod_uid)
            grace = float(own.grace_seconds) if own is not None and own.is_terminating else grace
        began = self.clock.now() if self._stopped_at is None else self._stopped_at
        return max(1.0, began + grace - GRACE_MARGIN - self.clock.now())

    async def _uninstall(self) -> Outcome:
        for _ in range(MAX_TURNS):
            seen, plan = await self.observer.plan()
            if seen.own_pod is not None:
                self._grace = float(seen.own_pod.grace_seconds)
            self._tell(plan)
            self.executor = self._executor(seen)
            self._on_failure = plan.on_failure
            if plan.path is Path.REFUSED:
                self._refused = refused_blockers(plan)
                raise _refusal(plan)
            await self.observer.check_permissions(seen, plan)
            try:
                await self._run_steps(plan)
            except StartOver as error:
                self.progress.warn("starting over", why=error.message)
                continue
            if plan.path not in (Path.WAIT, Path.UNDO):
                return await self._done(plan)
        raise Unsettled("the node does not come to rest", hint="look at the log: each turn says what it waited for")

    def _tell(self, plan: Plan) -> None:
        self.progress.tell("plan", path=str(plan.path), because=plan.because, steps=len(plan.steps))
        for note in plan.notes:
            self.progress.tell("note", what=note)
        for each in plan.verdicts:
            logger.debug("verdict", extra={"pod": each.pod.ref, "action": str(each.action), "reason": str(each.reason)})

    def _executor(self, seen: Snapshot) -> Executor:
        writer = NodeWriter(self.cluster, self.clock, seen.node, self.observer.run)
        return Executor(self.cluster, self.host, self.clock, self.settings, self.observer, writer, self.progress, seen)

    async def _run_steps(self, plan: Plan) -> None:
        executor = self.executor
        assert executor is not None
        needs_watch = any(type(step).__name__ in _WATCHING for step in plan.steps)
        heartbeat = asyncio.ensure_future(self._heartbeat(executor))
        task = asyncio.current_task()
        assert task is not None
        lookout = asyncio.ensure_future(self._look_out(executor, task))
        try:
            if needs_watch:
                async with executor.tracker:
                    await self._each_step(plan, executor)
            else:
                await self._each_step(plan, executor)
        finally:
            heartbeat.cancel()
            lookout.cancel()

    async def _each_step(self, plan: Plan, executor: Executor) -> None:
        steps = deque(plan.steps)
        while steps:
            step = steps.popleft()
            with self.progress.step(step):
                await executor.do(step)
            if isinstance(step, BeginUnload):  # the host may have changed since the plan was made
                after = [each for each in steps if isinstance(each, UnmarkHostDriver | RestoreNode)]
                services = executor.record.services if executor.record is not None else ()
                steps = deque((*unload_steps(executor.seen, self.settings, services), *after))

    async def _done(self, plan: Plan) -> Outcome:
        """Nothing is left to do; a status of an earlier failure goes now (decision 11)."""
        assert self.executor is not None
        if STATUS in self.executor.writer.node.annotations and plan.ends_with is Exit.DONE:
            await self.executor.restore(self.settings.restore_timeout)
        if plan.ends_with is Exit.DONE:
            return Outcome(Exit.DONE, _DONE.get(plan.path, plan.because))
        return Outcome(plan.ends_with, plan.because, plan.hint)

    async def _restore(self, keep_status: bool) -> Outcome:
        seen = await self.observer.look(with_holders=False)
        self.observer.check_here(seen)
        self.executor = self._executor(seen)
        found = find_record(seen.node)
        if found.is_unreadable:
            raise Refused(found.complaint, hint="put the node back by hand, then remove the annotation")
        if found.complaint:
            self.progress.warn("ignored", what=found.complaint)
        if found.record is None:
            nothing = f"nothing to put back: node {seen.node.name} carries no record"
            return Outcome(Exit.DONE, nothing) if keep_status else await self._done(Plan(path=Path.UNDO, because=nothing))
        self.progress.tell("record found", of_run=found.record.run, started=found.record.started)
        with self.progress.step(RestoreNode()):
            await self.executor.restore(self.settings.restore_timeout)
        return Outcome(Exit.DONE, f"node {seen.node.name} is as it was before run {found.record.run}")

    # Failing --------------------------------------------------------------------------------------------------------

    async def _put_back(self, error: DriverManagerError, limit: float) -> Outcome:
        """Runs what the plan holds for a failure: the node back, with the reason on it for people."""
        executor = self.executor
        if executor is None or isinstance(error, TakenOver):
            return Outcome(error.exit_code, error.message, error.hint, is_put_back=executor is None or executor.record is None)
        is_changed = executor.record is not None or find_record(executor.writer.node).record is not None
        if isinstance(error, Interrupted) and not is_changed:
            return Outcome(error.exit_code, error.message, error.hint)
        reason = self.progress.last_reason if isinstance(error, DeadlineExceeded) and self.progress.last_reason else error.reason
        waiting = Waiting(reason, error.message + (f"; hint: {error.hint}" if error.hint else ""), self._blockers())
        status = status_text(phase="failed", run=self.observer.run, since=self.clock.wall(), waiting=waiting)
        if not is_changed:
            with suppress(ClusterError):
                await executor.writer.write_status(status)
            return Outcome(error.exit_code, error.message, error.hint)
        if isinstance(error, DeadlineExceeded) and self.progress.steps and isinstance(self.progress.steps[-1].step, RestoreNode):
            hint = "its record stays: run `driver-manager restore` on the node"  # that was the time it had
            return Outcome(error.exit_code, error.message, hint, is_put_back=False)
        executor.status_on_restore = status
        self.progress.tell("putting the node back", because=error.message)
        try:
            for step in self._on_failure or (RestoreNode(),):
                with self.progress.step(step):
                    await (self._restored(executor, limit) if isinstance(step, RestoreNode) else executor.do(step))
        except DriverManagerError as second:
            hint = f"the node could not be put back, its record stays: run `driver-manager restore` there ({second.message})"
            return Outcome(error.exit_code, error.message, hint, is_put_back=False)
        return Outcome(error.exit_code, error.message, error.hint)

    async def _restored(self, executor: Executor, limit: float) -> None:
        """Puts the node back with the reason on it; without it where the server does not take that, for example for lack of room."""
        try:
            await executor.restore(limit)
        except ClusterError as error:
            if error.transient or isinstance(error, Forbidden):
                raise
            logger.warning("the node is put back without a status", extra={"error": error.message})
            executor.status_on_restore = None
            await executor.restore(limit)

    def _blockers(self) -> tuple[Blocker, ...]:
        executor = self.executor
        if executor is None or self._refused:
            return self._refused
        pods = [executor.tracker.present[uid] for uid in executor.evictor.blocked if uid in executor.tracker.present]
        return executor.evictor.waiting(pods).blockers if pods else ()

    async def _look_out(self, executor: Executor, steps: asyncio.Task[Any]) -> None:
        """Ends the steps when another run has the node: a step may wait for long, and nothing in it would ask."""
        looked_at = self.clock.now()
        while True:
            await self.clock.sleep(1.0)
            now = self.clock.now()
            if not executor.writer.is_ours or now - max(looked_at, executor.writer.seen_at) < LOOK_ASIDE_EVERY:
                continue
            looked_at = now
            try:
                await executor.writer.look_aside()
            except TakenOver as error:
                self._lost = error
                steps.cancel()
                return
            except ClusterError as error:
                logger.debug("whether the node is still this run's cannot be told", extra={"error": error.message})

    # Telling while waiting ------------------------------------------------------------------------------------------

    async def _heartbeat(self, executor: Executor) -> None:
        """Repeats what a long wait is for, in the log and on the node, while it changes or lasts."""
        written, written_at = "", float("-inf")
        while True:
            await self.clock.sleep(1.0)
            self.progress.repeat()
            state, now = self.progress.worst_wait, self.clock.now()
            if state is None or now - state.began < STATUS_AFTER or now - max(written_at, executor.told_at) < STATUS_EVERY:
                continue
            text = status_text(phase="waiting", run=self.observer.run, since=state.began_wall, waiting=state.waiting)
            if text == written:
                continue
            written, written_at = text, now
            with suppress(ClusterError):
                await executor.writer.write_status(text)


_DONE: Final = {
    Path.FULL: "the old driver is gone and everything else is put back: a driver may be installed",
    Path.NOTHING_LOADED: "no driver was loaded: one may be installed",
    Path.UNCHANGED: "the wanted driver is loaded already: nobody was disturbed",
}
_WATCHING: Final = frozenset({"AwaitPolicyOwner", "AwaitOtherDriver", "FreePods", "PauseLast"})
"""Steps that follow pods."""


def _refusal(plan: Plan) -> Refused:
    """The error of a plan that must not be run."""
    message = plan.because
    if plan.refusals and plan.refusals != (plan.because,):
        message = f"{plan.because}: {'; '.join(plan.refusals)}"
    error = Refused(message, hint=plan.hint)
    error.exit_code = plan.ends_with
    return error
