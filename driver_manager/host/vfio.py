"""Moving PCI functions between drivers: every write in a child with a limit, every result read back, every failure put back.

What to do is decided in `core.vfio`, anew for each unit right before its first write. A write that has not come back ends the work on its
function: the kernel holds the device's lock, so any further write would hang as well.
"""

import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, assert_never

from driver_manager.core.modalias import is_same_driver
from driver_manager.core.snapshot import HolderScan
from driver_manager.core.vfio import (
    BindTo,
    Bus,
    Decision,
    Function,
    Move,
    Original,
    Probe,
    Result,
    SetOverride,
    Unbind,
    Unit,
    Write,
    decide_bind,
    decide_release,
    decide_unbind,
    is_as_wanted,
    originals_with,
    refresh,
    undo_writes,
    writes_of,
)
from driver_manager.errors import DeviceInUse, DeviceStuck, Exit, HostError
from driver_manager.host.calls import Calls
from driver_manager.host.errnos import error_of
from driver_manager.host.paths import Roots
from driver_manager.host.pci import BUS, read_bus, read_function, write_originals
from driver_manager.host.threads import in_thread

logger = logging.getLogger(__name__)

READ_SECONDS: Final = 60.0
MODPROBE_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a unit."""

    decision: Decision
    after: tuple[Function, ...]
    """Its functions as they were read back."""


class Vfio:
    """Moves functions.

    Args:
        roots: where sysfs is.
        calls: what writes to it.
        scan: finds who has devices open.
        module_root: the root in which modprobe is run; empty for this process's own.
        timeout: seconds for one write.
    """

    def __init__(
        self, roots: Roots, calls: Calls, scan: Callable[[], Awaitable[HolderScan]], *, module_root: str = "", timeout: float = 30.0
    ) -> None:
        self._roots, self._calls, self._scan = roots, calls, scan
        self._module_root, self._timeout = module_root, timeout

    async def look(self) -> Bus:
        """The bus as it is now, with who has devices open."""
        scan = await self._scan()
        return await self._read(lambda: read_bus(self._roots, scan))

    async def _read(self, work: Callable[[], Bus]) -> Bus:
        try:
            return await in_thread(work, "look", READ_SECONDS)
        except TimeoutError as error:
            raise DeviceStuck("the look at the PCI bus has not ended", hint="See dmesg; a device of the bus may hang.") from error
        except OSError as error:
            raise HostError(f"the PCI bus cannot be read: {error}", hint="Run as root, with the host's /sys.") from error

    # The three ways -------------------------------------------------------------------------------------------------

    async def bind(self, unit: Unit) -> Outcome:
        """Moves a unit to vfio; nobody is raised at: what went wrong is in the outcome."""

        async def decide(bus: Bus, unit: Unit) -> Decision:
            decision = decide_bind(bus, unit)
            if not decision.moves:
                return decision
            for module in dict.fromkeys(move.driver for move in decision.moves if move.driver):
                await self._load(bus, module)
            bus = await self.look()  # the loaded driver's own name, and who came meanwhile
            return decide_bind(bus, refresh(bus, unit))

        return await self._carry_out(unit, decide, keep=True)

    async def unbind(self, unit: Unit, *, probe: bool) -> Outcome:
        """Brings a unit back to what it was."""

        async def decide(bus: Bus, unit: Unit) -> Decision:
            return decide_unbind(bus, unit, probe=probe)

        return await self._carry_out(unit, decide, keep=False)

    async def release(self, address: str) -> None:
        """Takes one function off vfio and leaves it free; gone, or not on vfio, is fine.

        Raises:
            DeviceInUse: naming the holder; nothing was written. DeviceStuck, HostError.
        """
        bus = await self.look()
        if address not in bus.functions:
            return

        async def decide(bus: Bus, unit: Unit) -> Decision:
            return decide_release(bus, unit)

        decision = (await self._carry_out(Unit((bus.functions[address],)), decide, keep=False)).decision
        match decision.result:
            case Result.REFUSED:
                raise DeviceInUse(decision.because, hint=decision.hint, errno_name="EBUSY")
            case Result.STUCK:
                raise DeviceStuck(decision.because, hint=decision.hint, errno_name="ETIMEDOUT")
            case Result.FAILED:
                raise HostError(decision.because, hint=decision.hint)
            case _:
                return

    async def _carry_out(self, unit: Unit, decide: Callable[[Bus, Unit], Awaitable[Decision]], *, keep: bool) -> Outcome:
        """Looks, decides, acts, reads back; `keep` notes what was there, else what was noted goes."""
        decision = Decision(unit, Result.FAILED, "nothing is known of it")
        try:
            bus = await self.look()
            unit = refresh(bus, unit)
            decision = await decide(bus, unit)
            if decision.moves:
                if keep:
                    await self._note(originals_with(bus, decision.moves))
                decision = await self._all(decision)
                if decision.result is Result.DONE and not keep:
                    await self._note({key: each for key, each in bus.originals.items() if key not in _addresses(unit)})
                elif decision.result is Result.FAILED and keep:
                    await self._note(dict(bus.originals))
        except HostError as error:
            decision = replace(decision, result=Result.FAILED, because=error.message, hint=error.hint, code=error.exit_code)
        return Outcome(decision, tuple(self._again(each) for each in unit.functions))

    def _again(self, function: Function) -> Function:
        try:
            return read_function(self._roots, function.address)
        except (OSError, ValueError):
            return replace(function, driver=None)

    async def _note(self, originals: dict[str, Original]) -> None:
        try:
            write_originals(self._roots, originals)
        except OSError as error:
            raise HostError(
                f"what was there before cannot be noted: {error.filename or ''}: {error.strerror}",
                hint="Mount the host's /run/nvidia writable; nothing was moved.",
            ) from error

    # Moves ----------------------------------------------------------------------------------------------------------

    async def _all(self, decision: Decision) -> Decision:
        """All moves of a unit, or none: what was moved goes back when one fails."""
        begun: list[Move] = []
        for move in decision.moves:
            begun.append(move)
            try:
                await self._move(move)
            except DeviceStuck as error:
                rest = await self._put_back(begun[:-1])
                because = f"{move.function.address}: {error.message}; it is left as this write left it{rest}"
                return replace(decision, result=Result.STUCK, because=because, hint=error.hint, code=error.exit_code)
            except HostError as error:
                rest = await self._put_back(begun)
                because = f"{move.function.address} could not be moved: {error.message}{rest or '; put back as it was'}"
                return replace(decision, result=Result.FAILED, because=because, hint=error.hint, code=error.exit_code)
        return replace(decision, result=Result.DONE)

    async def _move(self, move: Move) -> None:
        for write in writes_of(move):
            await self._write(write)
        now = self._again(move.function)
        if not is_as_wanted(move, now):
            wanted = move.driver or "no vfio driver"
            raise HostError(
                f"the kernel took every write, and {now.words} is not on {wanted}", hint="Look at dmesg for what the driver said."
            )
        logger.info("moved", extra={"device": now.address, "was": move.function.driver or "", "driver": now.driver or ""})

    async def _put_back(self, moves: Sequence[Move]) -> str:
        """Takes moves back, the last first; gives what could not be, in words to go on with."""
        lost = []
        for move in reversed(moves):
            before = move.function
            try:
                for write in undo_writes(before, self._again(before)):
                    await self._write(write)
                if self._again(before).driver != before.driver:
                    raise HostError(f"it has {self._again(before).driver or 'no driver'}")
                logger.info("put back", extra={"device": before.address, "driver": before.driver or ""})
            except HostError as error:
                lost.append(f"; {before.address} could not be put back to {before.driver or 'no driver'}: {error.message}")
        return "".join(lost)

    async def _write(self, write: Write) -> None:
        """One write, believed only when it reads back."""
        path, text = path_and_text(write)
        try:
            await self._calls.write(path, text, self._timeout)
        except OSError as error:
            if isinstance(write, Unbind) and error.errno in (errno.ENOENT, errno.ENODEV) and not self._driver(write.address):
                return  # it has no driver any more
            raise error_of("write", error.errno or 0, path) from error
        match write:
            case Unbind(address) if self._driver(address) is not None:
                raise HostError(f"{path} took the write, and {address} still has {self._driver(address)}", hint="Look at dmesg.")
            case BindTo(address, driver) if not is_same_driver(self._driver(address), driver):
                raise HostError(f"{path} took the write, and {address} has {self._driver(address) or 'no driver'}", hint="Look at dmesg.")
            case Unbind() | BindTo() | SetOverride() | Probe():
                return
            case _:
                assert_never(write)

    def _driver(self, address: str) -> str | None:
        return self._again(Function(address=address, vendor="", device_class="")).driver

    # Drivers --------------------------------------------------------------------------------------------------------

    async def _load(self, bus: Bus, module: str) -> None:
        """Loads a driver's module where its driver is not there yet.

        Raises:
            HostError: it cannot be loaded.
        """
        if any(is_same_driver(name, module) for name in bus.drivers):
            return
        argv = ("chroot", self._module_root, "modprobe", module) if self._module_root else ("modprobe", module)
        hint = f"Load it by hand to see why: {' '.join(argv)}"
        try:
            finished = await self._calls.run(argv, MODPROBE_SECONDS)
        except TimeoutError as error:
            raise HostError(f"modprobe {module} has not ended in {MODPROBE_SECONDS:g} s", hint=hint) from error
        except OSError as error:
            raise HostError(f"modprobe {module} failed: {error.strerror}", hint=hint) from error
        if finished is None:
            raise HostError(f"the driver {module} is not there, and there is no modprobe to load it", hint=hint)
        if finished.code != 0:
            raise HostError(f"modprobe {module} ended with {finished.code} {finished.output.strip()}".rstrip(), hint=hint)
        there = (await self._read(lambda: read_bus(self._roots))).drivers
        if not any(is_same_driver(name, module) for name in there):
            raise HostError(f"modprobe loaded {module}, and the kernel shows no PCI driver of that name", hint=hint)


def path_and_text(write: Write) -> tuple[str, str]:
    """The file of sysfs, and what is written to it: Documentation/ABI/testing/sysfs-bus-pci."""
    match write:
        case SetOverride(address, driver):
            return f"{BUS}/devices/{address}/driver_override", driver or "\n"
        case Unbind(address):
            return f"{BUS}/devices/{address}/driver/unbind", address
        case BindTo(address, driver):
            return f"{BUS}/drivers/{driver}/bind", address
        case Probe(address):
            return f"{BUS}/drivers_probe", address
        case _:
            assert_never(write)


def _addresses(unit: Unit) -> set[str]:
    return {each.address for each in unit.functions}


def module_root(roots: Roots, wanted: str) -> tuple[str, str]:
    """Where modprobe runs, and what to warn of: the root that was asked for if it is one, else the host's (W30)."""
    own = "" if roots.is_tree or roots.host == Path("/") else str(roots.host)
    if not wanted:
        return own, ""
    if wanted == "/":
        return "", ""
    where = Path(wanted)
    is_root = (roots.host / wanted.lstrip("/") if roots.is_tree else where).is_dir()
    return (wanted, "") if is_root else (own, f"HOST_ROOT={wanted} is no folder here; modules are loaded in {own or '/'}")


async def work_through(units: Sequence[Unit], work: Callable[[Unit], Awaitable[Outcome]], stop: asyncio.Event) -> list[Outcome]:
    """Every unit, one after the other; a signal ends it between two of them, with the rest reported as not begun."""
    outcomes = []
    for unit in units:
        if stop.is_set():
            because = "not begun: stopped by a signal"
            outcomes.append(Outcome(Decision(unit, Result.REFUSED, because, "run it again", Exit.AGAIN), unit.functions))
        else:
            outcomes.append(await work(unit))
    return outcomes
