"""What the Host contract needs of a machine: one small builder, played by the simulator and by a directory tree."""

from __future__ import annotations

import abc
import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from driver_manager import names
from driver_manager.core.snapshot import PciDevice, Unloading
from driver_manager.host import open_host
from driver_manager.ports import Host
from driver_manager.sim.clock import SimClock
from driver_manager.sim.machine import Machine, Unit
from driver_manager.sim.world import World
from tests.host.trees import Tree

POD_UID = "6a3e1b0c-1d2e-4f50-8a9b-0c1d2e3f4a5b"
NODE = "gpu-1"
ROOT = f"/{names.DRIVER_ROOT}"


class HostStage(abc.ABC):
    """A machine of a test's own."""

    host: Host
    other: Host
    """The same machine for another run."""

    @abc.abstractmethod
    def load(self, *, users_of_nvidia: int = 0) -> None:
        """Loads nvidia, and nvidia_uvm and nvidia_modeset on top of it."""

    @abc.abstractmethod
    def mount(self, *targets: str) -> None:
        """Mounts these, in this order."""

    @abc.abstractmethod
    def file(self, path: str, text: str = "") -> None:
        """Makes a file."""

    @abc.abstractmethod
    def hold(self, device: str, *, pod_uid: str | None = None, unit: str | None = None) -> int:
        """Starts a process that holds a device; gives its pid. It counts in no module."""

    @abc.abstractmethod
    def work_in(self, target: str) -> int:
        """Starts a process that works below a mount."""

    @abc.abstractmethod
    def end(self, pid: int) -> None:
        """Ends a process."""

    @abc.abstractmethod
    def pid_lock(self) -> contextlib.AbstractContextManager[None]:
        """Somebody holds the lock of the driver's pid file."""

    @abc.abstractmethod
    def disable_unloading(self) -> None:
        """Sets kernel.modules_disabled."""

    @abc.abstractmethod
    def stick(self, module: str) -> None:
        """An unload of this module does not come back."""

    @abc.abstractmethod
    def smi(self, version: str | None, *, hangs: bool = False) -> None:
        """What the host's own nvidia-smi answers."""

    @abc.abstractmethod
    def gpu_on_vfio(self, address: str) -> None:
        """A GPU of the IOMMU group 7 that is bound to vfio-pci."""

    @abc.abstractmethod
    def unit(self, name: str, *, state: str = "active", fails: str = "", hangs: str = "") -> None:
        """A systemd unit of state active, inactive or failed; `stop` or `start` may fail or hang."""

    @abc.abstractmethod
    def no_systemd(self) -> None:
        """Systemd cannot be asked."""

    @abc.abstractmethod
    def calls(self) -> list[tuple[str, str, str]]:
        """The changing calls so far: name, argument, result."""


class SimHostStage(HostStage):
    """A simulated machine."""

    def __init__(self) -> None:
        world = World()
        world.add_node(NODE, with_machine=True)
        self.machine: Machine = world.machine(NODE)
        self.host, self.other = world.host(NODE), world.host(NODE)

    def load(self, *, users_of_nvidia: int = 0) -> None:
        self.machine.load_driver()
        self.machine.modules["nvidia"].users = users_of_nvidia

    def mount(self, *targets: str) -> None:
        for target in targets:
            self.machine.mount(target)

    def file(self, path: str, text: str = "") -> None:
        self.machine.files[path] = text

    def hold(self, device: str, *, pod_uid: str | None = None, unit: str | None = None) -> int:
        return self.machine.add_process("train", (device,), pod_uid=pod_uid, unit=unit).pid

    def work_in(self, target: str) -> int:
        found = self.machine.top_mount(target)
        assert found is not None
        found.is_busy = True
        return 0

    def end(self, pid: int) -> None:
        self.machine.end_process(pid)
        for mount in self.machine.mounts:
            mount.is_busy = False

    @contextlib.contextmanager
    def pid_lock(self) -> Iterator[None]:
        self.machine.has_pid_lock = True
        yield
        self.machine.has_pid_lock = False

    def disable_unloading(self) -> None:
        self.machine.unloading = Unloading.DISABLED

    def stick(self, module: str) -> None:
        self.machine.modules[module].is_stuck = True

    def smi(self, version: str | None, *, hangs: bool = False) -> None:
        self.machine.smi_version = version
        self.machine.smi_seconds = 1e6 if hangs else 0.01

    def gpu_on_vfio(self, address: str) -> None:
        self.machine.pci.append(PciDevice(address=address, vendor="0x10de", device_class="0x030200", driver="vfio-pci"))

    def unit(self, name: str, *, state: str = "active", fails: str = "", hangs: str = "") -> None:
        unit = self.machine.units[name] = Unit(command="daemon", is_active=state == "active", fails=fails)
        if hangs:
            setattr(unit, f"{hangs}_seconds", 1e6)

    def no_systemd(self) -> None:
        self.machine.has_systemd = False

    def calls(self) -> list[tuple[str, str, str]]:
        return [(call.call, call.argument, call.result) for call in self.machine.calls]


class TreeHostStage(HostStage):
    """A directory tree."""

    def __init__(self, root: Path) -> None:
        root.mkdir()
        self.tree = Tree(root)
        self.tree.file("proc/sys/kernel/random/boot_id", "4b4c4a0e-6b0f-4c38-9f0e-0c1f0e5f9a11\n")
        self.host, self.other = open_host(root, SimClock()), open_host(root, SimClock())
        self._next_pid = 500
        self._units: dict[str, dict[str, Any]] = {}

    def load(self, *, users_of_nvidia: int = 0) -> None:
        self.tree.module("nvidia", holders=["nvidia_uvm", "nvidia_modeset"], users=users_of_nvidia)
        self.tree.module("nvidia_uvm")
        self.tree.module("nvidia_modeset")

    def mount(self, *targets: str) -> None:
        self.tree.mounts(*targets)

    def file(self, path: str, text: str = "") -> None:
        self.tree.file(path.lstrip("/"), text)

    def hold(self, device: str, *, pod_uid: str | None = None, unit: str | None = None) -> int:
        cgroup = "0::/\n"
        if pod_uid:
            cgroup = f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{pod_uid.replace('-', '_')}.slice/cri-1.scope\n"
        elif unit:
            cgroup = f"0::/system.slice/{unit}\n"
        return self._process(device, cgroup)

    def work_in(self, target: str) -> int:
        return self._process(f"{target}/usr/bin/tool", "0::/\n")

    def _process(self, opened: str, cgroup: str) -> int:
        self._next_pid += 1
        self.tree.process(self._next_pid, fds=[opened], cgroup=cgroup)
        return self._next_pid

    def end(self, pid: int) -> None:
        process = self.tree.root / "proc" / str(pid)
        process.rename(self.tree.root / f"ended-{pid}")

    @contextlib.contextmanager
    def pid_lock(self) -> Iterator[None]:
        descriptor = os.open(self.tree.root / names.PID_FILE, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def disable_unloading(self) -> None:
        self.tree.file("proc/sys/kernel/modules_disabled", "1\n")

    def stick(self, module: str) -> None:
        self.tree.faults({"call": "delete_module", "argument": module, "hold": True})

    def smi(self, version: str | None, *, hangs: bool = False) -> None:
        answer = "{}" if version is None else f'{{"stdout": "{version}\\n", "rc": 0, "hang": {str(hangs).lower()}}}'
        if version is None:
            answer = '{"stdout": "", "rc": 9}'
        self.tree.file("run/nvidia-smi.json", answer)

    def gpu_on_vfio(self, address: str) -> None:
        self.tree.gpu(address, driver="vfio-pci", group="7")

    def unit(self, name: str, *, state: str = "active", fails: str = "", hangs: str = "") -> None:
        self._units[name] = {"active": state == "active", "failed": state == "failed", "fails": fails, "hang": hangs}
        self.tree.file("run/systemd-units.json", json.dumps(self._units))

    def no_systemd(self) -> None:
        self.tree.faults({"call": "execve", "argument": "systemctl", "errno": "ENOENT"})

    def calls(self) -> list[tuple[str, str, str]]:
        return [(call, str(argument), str(result)) for call, argument, result in self.tree.results()]
