"""Work in a thread that does not keep the program from ending.

The threads of `asyncio.to_thread` are joined when the program ends, so one that hangs would hang the end too. Only for work that a dying
process gets out of: waits of Python's own, and reads of /proc, whose waits end with the process. What may be stuck in the kernel for good
is made in a child instead (`caller`).
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

from driver_manager.errors import DriverManagerError, InvariantBroken

T = TypeVar("T")


async def in_thread(work: Callable[[], T], name: str, timeout: float) -> T:
    """Does work in a thread of its own and gives its result.

    Raises:
        TimeoutError: it took longer than `timeout` seconds; it goes on, and its result is dropped. InvariantBroken: it ended in an
            error that nobody planned for. Else the OSError or error of ours that the work raised.
    """
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    results: list[T] = []
    errors: list[OSError | DriverManagerError] = []

    def run() -> None:
        try:
            results.append(work())
        except (OSError, DriverManagerError) as error:
            errors.append(error)
        finally:
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
                loop.call_soon_threadsafe(done.set)

    threading.Thread(target=run, name=name, daemon=True).start()
    async with asyncio.timeout(timeout):
        await done.wait()
    if errors:
        raise errors[0]
    if not results:
        raise InvariantBroken(f"the thread {name} ended without a result; its traceback is on standard error")
    return results[0]
