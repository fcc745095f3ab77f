"""The jobs that are being done about nodes, one on each at most; what they have found, and their ends."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from driver_manager.controller.work import FREED_AT_ONCE, Job, Told, Worker, job_of
from driver_manager.core.situation import Situation, Work


class Workers:
    """All of them.

    Args:
        make: a worker for a job.
        spawn: has something about a node run beside the loop.
    """

    def __init__(self, make: Callable[[Job], Worker], spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]) -> None:
        self._make, self._spawn = make, spawn
        self._running: dict[str, tuple[Worker, asyncio.Task[None]]] = {}
        self._slots = asyncio.Semaphore(FREED_AT_ONCE)

    def have_done(self, situation: Situation, work: Work, *, is_following: bool) -> None:
        """Begins a job about a node, unless it is the one that is being done."""
        assert is_following or situation.progress is not None
        name, job = situation.node.name, job_of(situation, work, is_following=is_following)
        running = self._running.get(name)
        if running is not None and running[0].job.key == job.key:
            return
        self.stop(name)
        worker = self._make(job)
        self._running[name] = (worker, self._spawn(self._run(worker), name))

    async def _run(self, worker: Worker) -> None:
        async with self._slots:
            await worker.run()

    def told(self, seen: Situation, *, is_following: bool) -> Told | None:
        """What has been found in this stay of the node in its state, under this role."""
        running = self._running.get(seen.node.name)
        if running is None or running[0].job.is_following != is_following:
            return None
        worker = running[0]
        is_current = is_following or (seen.progress is not None and worker.job.since == seen.progress.since)
        return worker.told if is_current else None

    def evicted(self, name: str) -> list[str]:
        """`namespace/name` of pods that a node's job has evicted."""
        return self._running[name][0].told.evicted if name in self._running else []

    def stop(self, name: str) -> None:
        """Ends a node's job, if there is one."""
        if (running := self._running.pop(name, None)) is not None:
            running[1].cancel()

    def stop_all(self) -> None:
        """Ends all jobs."""
        for name in list(self._running):
            self.stop(name)
