"""Measures an unload inside the guest, for benchmarks/host_unload.py."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from driver_manager.cli.main import main
from driver_manager.host import LinuxHost
from driver_manager.host.calls import KernelCalls
from tests.vm.inside import DRIVER, delete, load, loaded, opened

ORDER = ("nvidia_drm", "nvidia_modeset", "nvidia_uvm", "nvidia")


class Times:
    """When the agent called what, by CLOCK_MONOTONIC, which all processes share."""

    def __init__(self) -> None:
        self.deletes: list[tuple[float, float]] = []
        self.scans: list[float] = []

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Notes the calls of this process."""
        delete_module, holders = KernelCalls.delete_module, LinuxHost.holders

        async def noted_delete(calls: KernelCalls, *arguments: Any) -> None:
            begun = time.monotonic()
            try:
                await delete_module(calls, *arguments)
            finally:
                self.deletes.append((begun, time.monotonic()))

        async def noted_holders(host: LinuxHost) -> Any:
            self.scans.append(time.monotonic())
            return await holders(host)

        changed: Any = KernelCalls, LinuxHost
        changed[0].delete_module, changed[1].holders = noted_delete, noted_holders
        try:
            yield
        finally:
            changed[0].delete_module, changed[1].holders = delete_module, holders


def unload_once(hold_seconds: float) -> dict[str, float]:
    """One run of the command while a process holds the device for some time."""
    load(*DRIVER)
    reading, writing = os.pipe()
    held, holds = os.pipe()
    holder = os.fork()
    if not holder:
        opened()()
        os.write(holds, b".")
        time.sleep(hold_seconds)
        os.write(writing, repr(time.monotonic()).encode())
        os._exit(0)
    os.read(held, 1)
    times = Times()
    said = io.StringIO()
    os.environ.update(NO_CLUSTER="true", LOG_FORMAT="json")
    sys.argv = ["driver-manager", "uninstall_driver"]
    with times.listening(), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code: object = None
        try:
            main()
        except SystemExit as error:
            code = error.code
    assert not code, said.getvalue()
    ended = float(os.read(reading, 64))
    for descriptor in (reading, writing, held, holds):
        os.close(descriptor)
    os.waitpid(holder, 0)
    assert not loaded(), said.getvalue()
    return {
        "reaction_ms": 1000 * (times.deletes[0][0] - ended),
        "unload_ms": 1000 * (times.deletes[-1][1] - times.deletes[0][0]),
        "polls": sum(scan < ended for scan in times.scans[1:]),  # the first was for the plan
    }


def bare_calls() -> float:
    """Milliseconds of the four calls alone."""
    load(*DRIVER)
    begun = time.monotonic()
    for name in ORDER:
        assert delete(name) == 0
    return 1000 * (time.monotonic() - begun)


def measure(rounds: int, hold_seconds: float, long_hold_seconds: float) -> dict[str, Any]:
    """All figures of some rounds; one round before them warms both ways up."""
    bare_calls()
    unload_once(hold_seconds)
    runs = [{**unload_once(hold_seconds), "bare_ms": bare_calls()} for _ in range(rounds)]
    return {"runs": runs, "polls": unload_once(long_hold_seconds)["polls"]}
