from __future__ import annotations

import asyncio
import json
import time

import pytest

from driver_manager.errors import ConfigError, DeviceStuck, ModuleInUse
from driver_manager.host import LinuxHost

from .trees import Tree


async def until_held(tree: Tree) -> dict[str, object]:
    async with asyncio.timeout(5):
        while not (tree.root / "held.json").exists():
            await asyncio.sleep(0.005)
    held: dict[str, object] = json.loads((tree.root / "held.json").read_text())
    return held


async def test_an_errno_fails_the_named_call_only(loaded: Tree, host: LinuxHost) -> None:
    """A fault with an argument meets that argument alone, and changes nothing else."""
    loaded.faults({"call": "delete_module", "argument": "nvidia_uvm", "errno": "EAGAIN"})
    with pytest.raises(ModuleInUse):
        await host.unload_module("nvidia_uvm", 5)
    await host.unload_module("nvidia_drm", 5)
    loaded.faults()
    await host.unload_module("nvidia_uvm", 5)
    assert [result for _, _, result in loaded.results()] == ["EAGAIN", 0, 0]


async def test_a_delay_slows_a_call(loaded: Tree, host: LinuxHost) -> None:
    """A delayed call does its work afterwards."""
    loaded.faults({"call": "delete_module", "delay": 0.2})
    began = time.monotonic()
    await host.unload_module("nvidia_drm", 5)
    assert time.monotonic() - began >= 0.2
    assert not (loaded.root / "sys/module/nvidia_drm").exists()


async def test_a_call_that_does_not_come_back_is_stuck(loaded: Tree, host: LinuxHost) -> None:
    """A call slower than its limit is given up at the limit, not at its end."""
    loaded.faults({"call": "delete_module", "delay": 30})
    began = time.monotonic()
    with pytest.raises(DeviceStuck, match=r"has not come back in 0\.2 s"):
        await host.unload_module("nvidia_drm", 0.2)
    assert time.monotonic() - began < 2


async def test_a_held_call_waits_until_its_entry_goes(loaded: Tree, host: LinuxHost) -> None:
    """A held call has done nothing yet, says which it is, and goes on when the entry is gone."""
    loaded.faults({"call": "delete_module", "argument": "nvidia_drm", "hold": True})
    task = asyncio.create_task(host.unload_module("nvidia_drm", 10))
    held = await until_held(loaded)
    assert held["call"] == "delete_module"
    assert (loaded.root / "sys/module/nvidia_drm").exists()
    assert loaded.calls() == []
    loaded.faults({"call": "umount2", "hold": True})
    await task
    assert not (loaded.root / "sys/module/nvidia_drm").exists()
    assert not (loaded.root / "held.json").exists()


async def test_the_look_goes_on_while_a_call_is_held(loaded: Tree, host: LinuxHost) -> None:
    """A held call blocks nothing else in the program."""
    loaded.faults({"call": "delete_module", "hold": True})
    task = asyncio.create_task(host.unload_module("nvidia_drm", 10))
    await until_held(loaded)
    assert "nvidia_drm" in (await host.look()).modules
    loaded.faults()
    await task
    assert "nvidia_drm" not in (await host.look()).modules


@pytest.mark.parametrize("text", ["{", "{}", "[1]", '[{"call": "delete_module", "errno": "ENOPE"}]'])
async def test_a_fault_file_that_makes_no_sense_is_said(loaded: Tree, host: LinuxHost, text: str) -> None:
    """A broken file is an error, never no fault."""
    loaded.file("faults.json", text)
    with pytest.raises(ConfigError, match=r"faults\.json"):
        await host.unload_module("nvidia_drm", 5)
    assert (loaded.root / "sys/module/nvidia_drm").exists()


async def test_every_call_is_on_the_record(loaded: Tree, host: LinuxHost) -> None:
    """A line has the time, the call, its arguments with the host's own paths, and the result."""
    loaded.file("run/nvidia/nvidia-driver.state", "1")
    began = time.time()
    await host.unload_module("nvidia_drm", 5)
    await host.remove_file("run/nvidia/nvidia-driver.state")
    first, second = loaded.calls()
    assert list(first) == ["time", "call", "arguments", "result"]
    assert first["arguments"][0] == "nvidia_drm"
    assert second == {
        "time": second["time"],
        "call": "unlink",
        "arguments": ["/run/nvidia/nvidia-driver.state"],
        "result": 0,
    }
    assert began <= first["time"] <= second["time"] <= time.time()


async def test_nothing_is_remembered_between_looks(loaded: Tree, host: LinuxHost) -> None:
    """Changes that others make to the tree between two looks count at once."""
    assert (await host.look()).is_loaded
    for name in ("nvidia_drm", "nvidia_modeset", "nvidia_uvm", "nvidia"):
        await host.unload_module(name, 5)
    assert not (await host.look()).is_loaded
    loaded.module("nvidia", version="570.1")
    assert (await host.look()).driver_version == "570.1"
