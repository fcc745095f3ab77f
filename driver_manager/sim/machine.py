"""The simulated machine below a node: kernel modules, mounts, processes, files and PCI devices.

Its rules are the kernel's: a module with holders or users stays, a mount with somebody below it is busy, an unmounted top layer shows the
one under it.
"""

import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from driver_manager import names
from driver_manager.core.modules import DRIVER_MODULES, NOUVEAU
from driver_manager.core.snapshot import (
    DriverFiles,
    Holder,
    HolderScan,
    HostView,
    ModuleState,
    ModuleView,
    MountCopy,
    MountView,
    PciDevice,
    Unloading,
)
from driver_manager.errors import DeviceInUse, DeviceStuck, HostError, ModuleInUse, MountBusy, ServiceFailed
from driver_manager.sim.objects import Pod
from driver_manager.sim.store import Signal

DEVICE_MODULES: Final = (
    ("/dev/nvidia-uvm", "nvidia_uvm"),
    ("/dev/nvidia-modeset", "nvidia_modeset"),
    ("/dev/nvidia-fs", "nvidia_fs"),
    ("/dev/gdrdrv", "gdrdrv"),
    ("/dev/nvidia", "nvidia"),
)
"""Which module an open device counts for: the first that fits."""
DRIVER_ROOT: Final = "/" + names.DRIVER_ROOT
FIRST_PID: Final = 2000


@dataclass(slots=True, kw_only=True)
class Module:
    """A loaded module."""

    name: str
    uses: tuple[str, ...] = ()
    """Modules it depends on: it is a holder of each."""
    users: int = 0
    """References that no process explains."""
    version: str | None = None
    state: ModuleState = ModuleState.LIVE
    is_stuck: bool = False
    """An unload does not come back."""


@dataclass(slots=True, kw_only=True)
class Mount:
    """A mount."""

    mount_id: int
    target: str
    fs_type: str = "overlay"
    source: str = "overlay"
    is_shared: bool = True
    parent: int = 0
    is_busy: bool = False
    """Somebody works below it."""
    is_stuck: bool = False


@dataclass(slots=True, kw_only=True)
class Process:
    """A process of the host."""

    pid: int
    command: str
    devices: tuple[str, ...] = ()
    pod_uid: str | None = None
    unit: str | None = None
    is_readable: bool = True


@dataclass(slots=True, kw_only=True)
class Unit:
    """A systemd unit; its processes are those that name it."""

    command: str
    devices: tuple[str, ...] = ()
    is_active: bool = True
    starts: int = 0
    """How often it was started."""
    fails: str = ""
    """`stop` or `start`: what systemd refuses."""
    stop_seconds: float = 0.3
    start_seconds: float = 0.1


@dataclass(frozen=True, slots=True)
class HostCall:
    """A call that changed the machine, or tried to."""

    at: float
    call: str
    argument: str
    result: str
    """`0` or the name of the errno."""


class Machine:
    """One machine. Its fields may be changed by a test at any time.

    Args:
        name: of its node, for messages.
        rng: chance.
        now: the time, for the list of calls.
    """

    def __init__(self, name: str, rng: random.Random, now: Callable[[], float]) -> None:
        self.name = name
        self._rng = rng
        self._now = now
        self.on_boot: list[Callable[[], None]] = []
        self.boot_id = self._new_boot_id()
        self.kernel_release = "6.8.0-sim"
        self.modules: dict[str, Module] = {}
        self.mounts: list[Mount] = []
        self.mount_copies: list[MountCopy] = []
        """What other mount namespaces keep of mounts that go."""
        self.processes: dict[int, Process] = {}
        self.units: dict[str, Unit] = {}
        """By name, with `.service`."""
        self.has_systemd = True
        self.files: dict[str, str] = {}
        """Content by absolute path."""
        self.has_pid_lock = False
        """Whether a process holds the lock of the driver's pid file."""
        self.unloading = Unloading.POSSIBLE
        self.pci: list[PciDevice] = []
        self.driver_files = DriverFiles()
        self.smi_version: str | None = None
        """What the host's own nvidia-smi says."""
        self.smi_seconds = 0.05
        self.sees_all_processes = True
        self.notes: list[str] = []
        self.gpus = 0
        self.unload_seconds = 0.02
        self.lock_holder: str | None = None
        self.changed = Signal()
        """A process came or ended, or the lock was freed."""
        self.calls: list[HostCall] = []
        self._next_pid = FIRST_PID
        self._next_mount = 100

    # For builders -------------------------------------------------------------------------------------------------

    def load_driver(self, version: str = "550.54.15", modules: tuple[str, ...] = ("nvidia", "nvidia_uvm", "nvidia_modeset")) -> None:
        """Loads the driver's modules; all but `nvidia` depend on it, and `nvidia_drm` on `nvidia_modeset` too."""
        for name in modules:
            uses: tuple[str, ...] = () if name == "nvidia" else ("nvidia",)
            if name == "nvidia_drm":
                uses = ("nvidia_modeset", "nvidia")
            self.modules[name] = Module(name=name, uses=uses, version=version if name.startswith("nvidia") else None)

    def install(self, version: str = "550.54.15", digest: str = "digest-1", *, mount: bool = True) -> None:
        """What a driver container leaves: modules, its root mounted, the state file, the pid file, the ready markers."""
        self.load_driver(version)
        if mount:
            self.mount(DRIVER_ROOT)
        self.files["/" + names.STATE_FILE] = digest + "\n"
        self.files["/" + names.PID_FILE] = "4711\n"
        for marker in names.READY_MARKERS:
            self.files[f"/{names.VALIDATIONS}/{marker}"] = ""

    def mount(self, target: str, fs_type: str = "overlay", *, is_shared: bool = True, is_busy: bool = False) -> Mount:
        """Mounts something, on top of what is there."""
        above = [one for one in self.mounts if target == one.target or target.startswith(one.target + "/")]
        parent = max(above, key=lambda one: (len(one.target), one.mount_id)).mount_id if above else 0
        made = Mount(
            mount_id=self._next_mount, target=target, fs_type=fs_type, source=fs_type, is_shared=is_shared, parent=parent, is_busy=is_busy
        )
        self._next_mount += 1
        self.mounts.append(made)
        return made

    def add_process(self, command: str, devices: tuple[str, ...] = (), *, pod_uid: str | None = None, unit: str | None = None) -> Process:
        """Starts a process."""
        process = Process(pid=self._next_pid, command=command, devices=tuple(sorted(devices)), pod_uid=pod_uid, unit=unit)
        self._next_pid += 1
        self.processes[process.pid] = process
        self.changed.set()
        return process

    def add_unit(self, name: str, command: str, devices: tuple[str, ...] = ()) -> Unit:
        """A service of the host, which runs and, if it has devices, holds the driver."""
        made = self.units[name] = Unit(command=command, devices=devices)
        self.add_process(command, devices, unit=name)
        return made

    def end_process(self, pid: int) -> None:
        """Ends one."""
        if self.processes.pop(pid, None) is not None:
            self.changed.set()

    def start_pod(self, pod: Pod) -> None:
        """A pod's containers start: it opens its devices, if the driver is there."""
        if "nvidia" not in self.modules or not (pod.spec.gpus or pod.spec.devices):
            return
        devices = list(pod.spec.devices)
        if pod.spec.gpus:
            taken = [device for process in self.processes.values() for device in process.devices]
            free = [f"/dev/nvidia{number}" for number in range(self.gpus) if f"/dev/nvidia{number}" not in taken]
            devices += [*free[: pod.spec.gpus], "/dev/nvidiactl", "/dev/nvidia-uvm"]
        self.add_process(pod.spec.command, tuple(devices), pod_uid=pod.uid)

    def stop_pod(self, pod: Pod) -> None:
        """A pod's processes end."""
        for process in [one for one in self.processes.values() if one.pod_uid == pod.uid]:
            self.end_process(process.pid)

    def reboot(self) -> None:
        """Starts anew: no modules, no mounts, no processes, an empty /run, another boot id."""
        self.boot_id = self._new_boot_id()
        self.modules.clear()
        self.mounts.clear()
        self.mount_copies.clear()
        self.processes.clear()
        for name, unit in self.units.items():
            unit.is_active = True
            self.add_process(unit.command, unit=name)
        self.files = {path: text for path, text in self.files.items() if not path.startswith("/run/")}
        self.has_pid_lock = False
        self.lock_holder = None
        self.changed.set()
        for what in self.on_boot:
            what()

    def _new_boot_id(self) -> str:
        return str(uuid.UUID(int=self._rng.getrandbits(128), version=4))

    # What a reader sees -------------------------------------------------------------------------------------------

    def module_holders(self, name: str) -> list[str]:
        """Modules that depend on it."""
        return [other.name for other in self.modules.values() if name in other.uses]

    def refcount(self, name: str) -> int:
        """Holders, open devices and other users."""
        opened = sum(module_of(device) == name for process in self.processes.values() for device in process.devices)
        return len(self.module_holders(name)) + opened + self.modules[name].users

    def view(self) -> HostView:
        """The host as it is."""
        root = [one for one in self.mounts if one.target == DRIVER_ROOT or one.target.startswith(DRIVER_ROOT + "/")]
        state = self.files.get("/" + names.STATE_FILE)
        return HostView(
            boot_id=self.boot_id,
            kernel_release=self.kernel_release,
            modules={name: self._module_view(name) for name in self._of_interest()},
            mounts=tuple(
                MountView(mount_id=one.mount_id, target=one.target, fs_type=one.fs_type, source=one.source, is_shared=one.is_shared)
                for one in root
            ),
            unloading=self.unloading,
            state_digest=None if state is None else state.strip(),
            markers=tuple(one for one in names.READY_MARKERS if f"/{names.VALIDATIONS}/{one}" in self.files),
            has_pid_file="/" + names.PID_FILE in self.files,
            driver_files=self.driver_files,
            pci=tuple(self.pci),
            is_mofed_ready="/" + names.MOFED_READY in self.files,
            has_mlx5_core="mlx5_core" in self.modules,
            sees_all_processes=self.sees_all_processes,
            notes=tuple(self.notes),
        )

    def scan(self) -> HolderScan:
        """Who has a GPU device open."""
        holding = [one for one in self.processes.values() if any(module_of(device) or is_vm_device(device) for device in one.devices)]
        return HolderScan(
            holders=tuple(
                Holder(pid=one.pid, command=one.command, devices=one.devices, pod_uid=one.pod_uid, unit=one.unit)
                for one in holding
                if one.is_readable
            ),
            unreadable=tuple(one.pid for one in self.processes.values() if not one.is_readable),
        )

    def _module_view(self, name: str) -> ModuleView:
        module = self.modules[name]
        return ModuleView(
            name=name,
            refcount=None if self.unloading is Unloading.UNSUPPORTED else self.refcount(name),
            holders=frozenset(self.module_holders(name)),
            state=module.state,
            version=module.version,
        )

    def _of_interest(self) -> list[str]:
        found = [name for name in self.modules if name in (*DRIVER_MODULES, NOUVEAU)]
        grew = True
        while grew:
            more = [one.name for one in self.modules.values() if one.name not in found and any(used in found for used in one.uses)]
            grew = bool(more)
            found += more
        return found

    # What changes it ----------------------------------------------------------------------------------------------

    def unload(self, name: str) -> None:
        """delete_module(2), without waiting.

        Raises:
            ModuleInUse, HostError.
        """
        module = self.modules.get(name)
        if module is None:
            self.note("delete_module", name, "ENOENT")
            return
        if self.unloading is not Unloading.POSSIBLE:
            number = "ENOSYS" if self.unloading is Unloading.UNSUPPORTED else "EPERM"
            self.note("delete_module", name, number)
            raise HostError(f"the kernel does not unload modules here ({self.unloading})", errno_name=number)
        holders, count = self.module_holders(name), self.refcount(name)
        if not holders and module.state is not ModuleState.LIVE:
            self.note("delete_module", name, "EBUSY")
            error = ModuleInUse if module.state is ModuleState.COMING else HostError
            raise error(f"module {name} is {module.state}", errno_name="EBUSY")
        if count:
            self.note("delete_module", name, "EAGAIN")
            by = f", of that modules: {', '.join(sorted(holders))}" if holders else ""
            raise ModuleInUse(f"module {name} is in use (use count {count}{by})", errno_name="EAGAIN")
        del self.modules[name]
        self.note("delete_module", name, "0")

    def is_unit_active(self, name: str) -> bool:
        """Whether systemd calls a unit active: one that nobody added is so as long as it has processes."""
        unit = self.units.get(name)
        return unit.is_active if unit is not None else any(one.unit == name for one in self.processes.values())

    def _unit(self, name: str) -> Unit | None:
        """A unit that was added, or that its processes show; None where there is none of that name."""
        if name not in self.units and self.is_unit_active(name):
            self.units[name] = Unit(command=name.removesuffix(".service"))
        return self.units.get(name)

    def stop_unit(self, name: str) -> None:
        """Stops a unit as systemctl does.

        Raises:
            ServiceFailed.
        """
        unit = self._unit(name)
        if unit is None:
            self.note("systemctl stop", name, "5")
            return
        if unit.fails == "stop":
            self.note("systemctl stop", name, "1")
            raise ServiceFailed(f"the unit {name} was not stopped: systemctl ended with 1")
        unit.is_active = False
        for process in [one for one in self.processes.values() if one.unit == name]:
            self.end_process(process.pid)
        self.note("systemctl stop", name, "0")

    def start_unit(self, name: str) -> None:
        """Starts a unit as systemctl does; its process opens its devices where the driver is there.

        Raises:
            ServiceFailed.
        """
        unit = self._unit(name)
        if unit is None:
            self.note("systemctl start", name, "5")
            raise ServiceFailed(f"the unit {name} was not started: systemctl ended with 5")
        if unit.fails == "start":
            self.note("systemctl start", name, "1")
            raise ServiceFailed(f"the unit {name} was not started: systemctl ended with 1")
        if not unit.is_active:
            unit.is_active = True
            unit.starts += 1
            self.add_process(unit.command, unit.devices if "nvidia" in self.modules else (), unit=name)
        self.note("systemctl start", name, "0")

    def terminate(self, pid: int) -> None:
        """kill(2) with SIGTERM."""
        self.note("kill", str(pid), "0" if pid in self.processes else "ESRCH")
        self.end_process(pid)

    def top_mount(self, target: str) -> Mount | None:
        """What is mounted there now."""
        return next((one for one in reversed(self.mounts) if one.target == target), None)

    def unmount(self, target: str, mount_id: int, *, detach: bool) -> None:
        """umount2(2) of the top layer; detached, everything below it goes along.

        Raises:
            MountBusy.
        """
        found = self.top_mount(target)
        if found is None or all(one.mount_id != mount_id for one in self.mounts):
            return
        below = self._below(found)
        if not detach and (found.is_busy or below):
            self.note("umount2", target, "EBUSY")
            raise MountBusy(f"{target} is busy", errno_name="EBUSY")
        gone = [found.mount_id, *below]
        self.mounts = [one for one in self.mounts if one.mount_id not in gone]
        self.note("umount2", target, "0")

    def _below(self, mount: Mount) -> list[int]:
        found: list[int] = []
        for one in self.mounts:
            if one.parent == mount.mount_id or one.parent in found:
                found.append(one.mount_id)
        return found

    def remove_file(self, path: str) -> bool:
        """unlink(2)."""
        there = self.files.pop(path, None) is not None
        self.note("unlink", path, "0" if there else "ENOENT")
        return there

    def unbind_vfio(self, address: str) -> None:
        """Takes a function off vfio and leaves it free. A virtual machine that has any GPU open counts for all: there are no groups here.

        Raises:
            DeviceInUse.
        """
        place = next((place for place, one in enumerate(self.pci) if one.address == address), None)
        if place is None or "vfio" not in (self.pci[place].driver or ""):
            return
        users = [f"{one.command} (process {one.pid})" for one in self.processes.values() if any(map(is_vm_device, one.devices))]
        if users:
            raise DeviceInUse(f"{address} is in use by {', '.join(users)}", hint="end the virtual machine", errno_name="EBUSY")
        self.pci[place] = replace(self.pci[place], driver=None)
        self.note("write", f"/sys/bus/pci/devices/{address}/driver/unbind", "0")

    def stuck(self, call: str, argument: str, timeout: float) -> DeviceStuck:
        """The error of a call that did not come back."""
        self.note(call, argument, "stuck")
        return DeviceStuck(f"{call} {argument} did not come back within {timeout:.0f} s; process {self._next_pid} is left behind in it")

    def note(self, call: str, argument: str, result: str) -> None:
        """Writes a call down."""
        self.calls.append(HostCall(self._now(), call, argument, result))


def is_vm_device(device: str) -> bool:
    """Whether a device node hands a GPU to a virtual machine."""
    return device.startswith("/dev/vfio/") and device != "/dev/vfio/vfio"


def module_of(device: str) -> str | None:
    """The driver's module that a device belongs to."""
    return next((module for prefix, module in DEVICE_MODULES if device.startswith(prefix)), None)
