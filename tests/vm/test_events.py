"""What the kernel tells while the agent waits, and that a wait ends by it instead of by the next look."""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import Callable
from pathlib import Path

from driver_manager.host.uevents import next_event
from tests.vm.guest import in_guest
from tests.vm.inside import CLONE_NEWNET, CLONE_NEWUSER, after, answer, delete, here, libc, load, loaded

LIMIT = 60.0
"""Seconds of the waits here: more than a guest on a busy machine takes to import and listen, and far from what an event takes."""
FLOOD = 30_000


async def waited(limit: float = LIMIT) -> float:
    """Seconds that a wait takes that no process ends."""
    host = here()
    await host.look()
    begun = time.monotonic()
    await host.wait_for_change((), limit)
    return time.monotonic() - begun


async def heard(work: Callable[[], object], limit: float = LIMIT) -> float:
    """Seconds from some work in a child, when this listens, to the end of `next_event`."""
    listens = asyncio.Event()

    def note() -> bool:
        listens.set()
        return False

    hearing = asyncio.create_task(next_event(note))
    async with asyncio.timeout(limit):
        await listens.wait()
        after(0.0, work)
        begun = time.monotonic()
        await hearing
    return time.monotonic() - begun


@in_guest
async def test_a_module_that_loads_ends_a_wait() -> None:
    """Uevents seen: the wait ends when the module comes, without a look in between, and so it does when the module goes."""
    for work in (lambda: load("slowmod"), lambda: delete("slowmod")):
        after(15.0, work)
        seconds = await waited()
        assert 5.0 < seconds < LIMIT - 5, seconds


@in_guest
async def test_what_came_before_it_listened_ends_a_wait() -> None:
    """A module that comes between the look and the moment when events are heard is not missed."""
    host = here()
    await host.look()
    load("slowmod")
    begun = time.monotonic()
    await host.wait_for_change((), LIMIT)
    assert time.monotonic() - begun < LIMIT / 2


@in_guest
async def test_a_pods_network_namespace_hears_events() -> None:
    """A network namespace of the first user namespace, as every pod's without hostUsers=false, gets them."""
    assert answer(libc.unshare(CLONE_NEWNET)) == 0
    assert await heard(lambda: load("nvidia")) < LIMIT / 2


@in_guest
async def test_another_user_namespace_hears_none_and_waits_on() -> None:
    """A network namespace of another user namespace gets no events: there the wait ends at its limit, and the looks go on."""
    importlib.import_module("pyroute2.netlink.uevent")  # now, so that the wait listens nearly from its begin
    after(4.0, lambda: load("slowmod"))
    assert answer(libc.unshare(CLONE_NEWUSER | CLONE_NEWNET)) == 0
    assert 7.5 < await waited(8.0) < LIMIT / 2
    assert "slowmod" in loaded()


@in_guest
async def test_lost_events_end_a_wait() -> None:
    """When the kernel could not tell everything, that counts as a change, since it may have been one."""
    ready = asyncio.Event()

    def flood() -> bool:
        null = Path("/sys/class/mem/null/uevent")
        for _ in range(FLOOD):
            null.write_text("change")
        ready.set()
        return False

    hearing = asyncio.create_task(next_event(flood))
    async with asyncio.timeout(LIMIT):
        await ready.wait()
        await hearing
