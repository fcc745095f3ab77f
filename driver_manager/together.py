"""Running several things at once, and getting one plain error when one fails."""

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any


async def together(*work: Awaitable[Any]) -> list[Any]:
    """The results, in order; when one fails the others are stopped and its own error is raised, not a group of one."""

    async def run(each: Awaitable[Any]) -> Any:
        return await each

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run(each)) for each in work]
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None
    return [task.result() for task in tasks]


async def each_of(work: Iterable[Awaitable[Any]]) -> list[Any]:
    """As `together`, for any number."""
    return await together(*work)


def first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of a group, groups inside it opened."""
    error = errors.exceptions[0]
    return first_error(error) if isinstance(error, BaseExceptionGroup) else error
