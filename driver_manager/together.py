"""Running several things at once, and getting one plain error when one fails."""

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any


async def together(*work: Awaitable[Any]) -> list[Any]:
    """The results, in order; when one fails the others are stopped and its own error is raised, not a group of one.

    Who is cancelled meanwhile ends by that, whatever a part answers to its own end. With `asyncio.TaskGroup` the error of such a part would
    be all that is raised, and the cancel, which nobody repeats, be lost: so before Python 3.13, see
    https://docs.python.org/3/library/asyncio-task.html#task-groups
    """

    async def run(each: Awaitable[Any]) -> Any:
        return await each

    tasks = [asyncio.create_task(run(each)) for each in work]
    if not tasks:
        return []
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        errors = [(task, error) for task in tasks if not task.cancelled() and (error := task.exception()) is not None]
    for task, error in errors:
        if task in ended:  # the others have failed because they were stopped
            raise error
    return [task.result() for task in tasks]


async def each_of(work: Iterable[Awaitable[Any]]) -> list[Any]:
    """As `together`, for any number."""
    return await together(*work)


def first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of a group, groups inside it opened."""
    error = errors.exceptions[0]
    return first_error(error) if isinstance(error, BaseExceptionGroup) else error
