"""A guest under QEMU: booted once, saved, and then started from that state in a tenth of a second for each test.

The processor is always QEMU's own (TCG). KVM is never used: where it is offered to a machine like ours it hangs.

The saved state is quick because the guest's memory is a file that is not written again: with the migration capability `x-ignore-shared`
only the devices' state is, and each guest maps the memory file copy-on-write. It is bound to the QEMU that made it, so it is made anew in
each run and kept in memory (/dev/shm) where there is room.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import json
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

GPUS = ("-device", "edu,addr=05.0,multifunction=on", "-device", "edu,addr=05.1,multifunction=on", "-device", "edu,addr=06.0")
"""A device with two functions and one with one; nvspoof makes them NVIDIA's."""
IOMMU = ("-device", "intel-iommu,intremap=on")
COUNTED_CLOCK = ("-icount", "shift=2,align=off,sleep=on")
"""4 ns for each instruction, which is about what the emulation takes on a quiet machine; idle time passes as it does outside."""
NETWORK = ("-netdev", "user,id=net,net=10.0.0.0/24,host=10.0.0.1", "-device", "virtio-net-pci,netdev=net,addr=08.0")
"""QEMU's own network: 10.0.0.1 in the guest is 127.0.0.1 here. To pods of a test's cluster that address is the API server, so its
certificate is good for it."""

_TAIL = 6000
"""Characters of a log that a message carries."""
_libc = ctypes.CDLL(None)


class GuestError(AssertionError):
    """The guest did not do what was asked; the message holds what it printed."""


@dataclass(frozen=True, slots=True)
class Said:
    """What a program in the guest left."""

    code: int
    out: str
    err: str


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a guest is made of; a saved state fits only the same."""

    kernel: Path
    initrd: Path
    devices: tuple[str, ...] = (*IOMMU, *GPUS)
    memory_mb: int = 768
    options: str = ""
    """More for the kernel's command line."""


@dataclass(frozen=True, slots=True)
class State:
    """A saved guest, in a folder of its own. Kernel and initrd of its hardware are still needed: QEMU reads them at each start."""

    hardware: Hardware
    folder: Path

    def forget(self) -> None:
        """Removes it; guests that run from it go on."""
        shutil.rmtree(self.folder, ignore_errors=True)


def roomy_folder(memory_mb: int) -> Path:
    """Where a guest's memory goes: /dev/shm if it has the room (a container's 64 MB have not)."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and shutil.disk_usage(shm).free > 2 * memory_mb << 20 else Path(tempfile.gettempdir())


def _end_with_parent() -> None:
    _libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no guest outlives its tests


class Guest:
    """A running guest.

    Args:
        hardware: what it is made of.
        state: where it goes on from; None boots it.
        timeout: seconds for the boot, and for an answer beyond the asked thing's own limit.
    """

    def __init__(self, hardware: Hardware, state: State | None = None, timeout: float = 90) -> None:
        self._hardware = hardware
        self._timeout = timeout
        self._folder = Path(tempfile.mkdtemp(prefix="dm-vm-", dir=roomy_folder(hardware.memory_mb)))
        self._process: subprocess.Popen[bytes] | None = None
        self._open: list[socket.socket] = []
        try:
            self._start(state)
        except BaseException:
            self.end()
            raise

    @classmethod
    def of(cls, state: State) -> Self:
        """A fresh guest that goes on where another one was saved."""
        return cls(state.hardware, state)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end()

    def _start(self, state: State | None) -> None:
        listening = [self._listen(name) for name in ("line", "control")]  # QEMU connects to us, so nobody comes too early
        with (self._folder / "qemu.log").open("wb") as log:
            self._process = subprocess.Popen(
                self._command(state), stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=_end_with_parent
            )
        line, control = (self._accept(each) for each in listening)
        self._line, self._control = line, control
        self._line_file, self._control_file = line.makefile("rb"), control.makefile("rb")
        self._control_file.readline()  # its greeting
        self._order("qmp_capabilities")
        self._order("migrate-set-capabilities", capabilities=[{"capability": "x-ignore-shared", "state": True}])
        if state is None:
            self.kernel_release = str(self._answer()["kernel"])
        else:
            self._order("migrate-incoming", uri=f"exec:cat {state.folder}/devices")
            self._await_status("query-status", "running")  # only now does it read its serial line

    def _command(self, state: State | None) -> list[str]:
        hardware = self._hardware
        memory = f"mem-path={state.folder}/memory,share=off" if state else f"mem-path={self._folder}/memory,share=on"
        return [
            *("qemu-system-x86_64", "-accel", "tcg", "-cpu", "max", "-m", f"{hardware.memory_mb}M"),
            *("-object", f"memory-backend-file,id=memory,size={hardware.memory_mb}M,{memory}", "-M", "q35,memory-backend=memory"),
            *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
            *("-chardev", f"file,id=console,path={self._folder}/console.log", "-device", "isa-serial,chardev=console"),
            *("-chardev", f"socket,id=line,path={self._folder}/line", "-device", "isa-serial,chardev=line"),
            *("-qmp", f"unix:{self._folder}/control"),
            *("-kernel", str(hardware.kernel), "-initrd", str(hardware.initrd)),
            # no_timer_check: on a busy machine the emulated timer may look dead to the kernel's test of it, and it would panic.
            *("-append", f"console=ttyS0 quiet panic=-1 reboot=t no_timer_check {hardware.options}"),
            *hardware.devices,
            *(("-incoming", "defer") if state else ()),
        ]

    def _listen(self, name: str) -> socket.socket:
        listening = socket.socket(socket.AF_UNIX)
        self._open.append(listening)
        listening.bind(str(self._folder / name))
        listening.listen(1)
        listening.settimeout(1)
        return listening

    def _accept(self, listening: socket.socket) -> socket.socket:
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                connected, _ = listening.accept()
                break
            except TimeoutError:
                if not self._is_running() or time.monotonic() > deadline:
                    raise GuestError(f"QEMU did not start: {self.log()}") from None
        self._open.append(connected)
        connected.settimeout(self._timeout)
        return connected

    def _is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def log(self) -> str:
        """The end of what kernel and QEMU said."""
        logs = (self._folder / name for name in ("console.log", "qemu.log"))
        return "\n".join(log.read_text(errors="replace")[-_TAIL:] for log in logs if log.exists())

    # QEMU's control socket -------------------------------------------------------------------------------------------

    def _order(self, command: str, **arguments: Any) -> Any:
        with contextlib.suppress(OSError):
            self._control.sendall(json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n")
            while text := self._control_file.readline():
                said = json.loads(text)
                if "error" in said:
                    raise GuestError(f"{command}: {said['error']['desc']}")
                if "return" in said:
                    return said["return"]
        raise GuestError(f"QEMU has ended: {self.log()}")

    def _await_status(self, query: str, wanted: str) -> None:
        deadline = time.monotonic() + self._timeout
        while (status := self._order(query).get("status")) != wanted:
            if status == "failed" or time.monotonic() > deadline:
                raise GuestError(f"{query} says {status}, not {wanted}: {self.log()}")
            time.sleep(0.005)

    def save(self) -> State:
        """Ends the guest and keeps its state. The memory file is moved, not copied."""
        folder = Path(tempfile.mkdtemp(prefix="dm-vm-state-", dir=self._folder.parent))
        self._order("migrate", uri=f"exec:cat > {folder}/devices")
        self._await_status("query-migrate", "completed")
        (self._folder / "memory").rename(folder / "memory")
        self.end()
        return State(self._hardware, folder)

    # The guest's first process ---------------------------------------------------------------------------------------

    def run(self, *argv: str, timeout: float = 60, env: Mapping[str, str] | None = None) -> Said:
        """Runs a program in the guest, `timeout` seconds at most (exit code 124)."""
        return _said(self._ask({"argv": argv, "timeout": timeout, "env": dict(env or {})}, timeout))

    def call(self, module: str, function: str, timeout: float = 60, **given: Any) -> Any:
        """Runs a function of a module in the guest and gives its value, which must be something that JSON can hold.

        Raises:
            GuestError: it raised, with its traceback and the kernel's last words.
        """
        answer = self._ask({"call": [module, function], "with": given, "timeout": timeout}, timeout)
        said = _said(answer)
        if said.code:
            raise GuestError(f"{function} in the guest: {said.code}\n{said.out}{said.err}\n--- console\n{self.log()}")
        return answer["value"]

    def _ask(self, asked: dict[str, Any], timeout: float) -> dict[str, Any]:
        self._line.settimeout(timeout + self._timeout)
        self._line.sendall(json.dumps(asked).encode() + b"\n")
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        try:
            text = self._line_file.readline()
        except TimeoutError:
            raise GuestError(f"no answer from the guest: {self.log()}") from None
        if not text:
            raise GuestError(f"the guest has died: {self.log()}")
        answer: dict[str, Any] = json.loads(text)
        return answer

    def end(self) -> None:
        """Ends the guest at once and removes what it left here."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        for name in ("_line_file", "_control_file"):
            if hasattr(self, name):
                getattr(self, name).close()
        for each in self._open:
            each.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _said(answer: Mapping[str, Any]) -> Said:
    out, err = (base64.b64decode(answer[name]).decode(errors="replace") for name in ("out", "err"))
    return Said(int(answer["code"]), out, err)


def joined(parts: Sequence[Path], target: Path) -> None:
    """Writes archives one after the other: to the kernel they are one initrd, and the later file wins."""
    with target.open("wb") as out:
        for part in parts:
            with part.open("rb") as source:
                shutil.copyfileobj(source, out)
