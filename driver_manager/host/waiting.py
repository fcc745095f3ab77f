"""Waiting for a child or a descriptor without a thread."""

import asyncio
import os
from typing import Final

KILL_PATIENCE: Final = 0.2
"""Seconds that a killed child gets to end before it counts as stuck and is left behind."""


async def ended(pid: int, timeout: float) -> int | None:
    """The wait status of a child; None if it lives on after `timeout` seconds."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:  # kernels before 5.3, and sandboxes
        descriptor = -1
    try:
        while True:
            done, status = os.waitpid(pid, os.WNOHANG)
            left = deadline - loop.time()
            if done:
                return status
            if left <= 0:
                return None
            if descriptor < 0:
                await asyncio.sleep(min(0.005, left))
            else:
                await readable(descriptor, left)
    finally:
        if descriptor >= 0:
            os.close(descriptor)


async def readable(descriptor: int, timeout: float) -> bool:
    """Waits until a descriptor can be read; False if that takes longer than `timeout` seconds."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        async with asyncio.timeout(timeout):
            await ready.wait()
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(descriptor)
    return True
