"""Work beside the controller's loop: what goes wrong in work about some nodes stays with them (R9).

Work that is about no node in particular, as a watch, ends the life with its error.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine
from typing import Any

logger = logging.getLogger(__name__)

Work = Coroutine[Any, Any, None]


class Tasks:
    """All of it.

    Args:
        on_bug: hears of the nodes about which work ended in an error of the program.
    """

    def __init__(self, on_bug: Callable[[Collection[str]], None]) -> None:
        self._on_bug = on_bug
        self._group: asyncio.TaskGroup | None = None
        self._under_way: set[asyncio.Task[None]] = set()
        """Requests that change something and have no answer yet."""

    def begin(self, group: asyncio.TaskGroup) -> None:
        """From now on there is a life for it to end with."""
        self._group = group

    def spawn(self, work: Work, *names: str) -> asyncio.Task[None]:
        """Has something done, about these nodes."""
        assert self._group is not None
        task = self._group.create_task(self._guarded(work, names) if names else work)
        task.add_done_callback(lambda _: work.close())  # cancelled before its first step it was never begun
        return task

    def request(self, work: Work, *names: str) -> None:
        """Has something done that the end of this life waits for."""
        task = self.spawn(work, *names)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def finish(self) -> None:
        """Returns when all requests have their answers; each has a limit of its own."""
        while self._under_way:
            await asyncio.wait(set(self._under_way))

    async def _guarded(self, work: Work, names: Collection[str]) -> None:
        try:
            await work
        except Exception:
            logger.exception("work about nodes broke off: a bug", extra={"nodes": ", ".join(names)})
            self._on_bug(names)
