"""A host that is a directory tree: the calls edit the tree as the kernel would change what these files show.

Meant for rehearsals and tests of the whole command. Nothing is remembered between calls, so changes that others make to the tree count at
once. Every call is a line of `calls.jsonl`, `{"time", "call", "arguments", "result"}`, named as the system call, with result 0 or the name
of the errno; `faults.json` makes calls fail, slow or stop (see `faults`).
"""

import errno
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from driver_manager.errors import DeviceStuck
from driver_manager.host.calls import MNT_DETACH, Finished
from driver_manager.host.faults import Faults, replace_text
from driver_manager.host.parsing import (
    DELETED,
    MountLine,
    is_at_or_below,
    is_permanent,
    lines_of,
    mount_line,
    with_newlines,
    without_module,
)
from driver_manager.host.paths import names_in, resolve_in, text_of
from driver_manager.host.threads import in_thread
from driver_manager.host.treepci import TreePci
from driver_manager.host.treeunits import TreeUnits

T = TypeVar("T")

NVIDIA_SMI = "run/nvidia-smi.json"
"""What the host's own nvidia-smi answers: {"stdout", "rc", "hang"}."""
MODPROBE = "run/modprobe.json"
"""What modprobe answers: {"rc", "stdout", "drivers"}; `drivers` has, by module, the PCI driver that comes with it."""


class TreeCalls:
    """The calls on a directory tree."""

    def __init__(self, tree: Path) -> None:
        self._tree = tree
        self._faults = Faults(tree)
        self._pci = TreePci(tree)
        self._units = TreeUnits(tree)

    def make_ready(self) -> None:
        """Nothing is to be made ready."""

    async def delete_module(self, name: str, flags: int, timeout: float) -> None:
        """Unloads a module if a kernel would."""
        await self._make("delete_module", [name, flags], lambda: self._delete_module(name), timeout)

    async def umount2(self, path: str, flags: int, timeout: float) -> None:
        """Takes the top mount of a path out of mountinfo if a kernel would; with MNT_DETACH all that lies on it too."""
        await self._make("umount2", [path, flags], lambda: self._umount(path, bool(flags & MNT_DETACH)), timeout)

    async def unlink(self, path: str, timeout: float) -> None:
        """Removes a file."""
        await self._make("unlink", [path], lambda: self._at(path).unlink(), timeout)

    async def write(self, path: str, text: str, timeout: float) -> None:
        """Writes to a file; those of drivers and devices act."""
        await self._make("write", [path, text], lambda: self._pci.write(path, text), timeout)

    async def kill(self, pid: int, number: int) -> None:
        """Ends a process of the tree: its folder goes."""
        await self._make("kill", [pid, number], lambda: self._kill(pid, number), 10.0)

    async def run(self, argv: Sequence[str], timeout: float) -> Finished | None:
        """Answers for nvidia-smi, modprobe and systemctl from their files; no other program exists on a tree."""
        program = argv[2] if argv[0] == "chroot" else argv[0]
        if program.endswith("nvidia-smi") and text_of(self._tree / NVIDIA_SMI) is not None:
            act = self._nvidia_smi
        elif program == "modprobe" and text_of(self._tree / MODPROBE) is not None:
            act = partial(self._modprobe, argv[-1])
        elif program == "systemctl":
            act = partial(self._units.systemctl, argv[argv.index(program) + 1 :])
        else:
            return None
        return await self._execve(argv, act, timeout)

    async def _execve(self, argv: Sequence[str], act: Callable[[], Finished], timeout: float) -> Finished:
        try:
            return await self._make("execve", list(argv), act, timeout)
        except DeviceStuck:
            raise TimeoutError(f"{argv[0]} has not ended in {timeout:g} s") from None

    async def _make(self, call: str, arguments: Sequence[str | int], act: Callable[[], T], timeout: float) -> T:
        """Makes a call and waits for it at most `timeout` seconds; one that is slowed or held goes on without being waited for."""
        try:
            return await in_thread(lambda: self._logged(call, arguments, act), call, timeout)
        except TimeoutError:
            shown = ", ".join(str(argument) for argument in arguments)
            raise DeviceStuck(
                f"{call}({shown}) has not come back in {timeout:g} s",
                hint="See faults.json of the host tree: the call is slowed or held there.",
                errno_name="ETIMEDOUT",
            ) from None

    def _logged(self, call: str, arguments: Sequence[str | int], act: Callable[[], T]) -> T:
        began, result = time.time(), "0"
        try:
            self._faults.meet(call, arguments)
            return act()
        except OSError as error:
            result = errno.errorcode.get(error.errno or 0, str(error))
            raise
        finally:
            entry = {"time": began, "call": call, "arguments": list(arguments), "result": 0 if result == "0" else result}
            with (self._tree / "calls.jsonl").open("a", encoding="utf-8") as log:
                log.write(json.dumps(entry) + "\n")

    def _at(self, path: str) -> Path:
        """Where a path of the host is in the tree; only its last part may be a link."""
        folder, _, name = path.rpartition("/")
        return Path(f"{self._tree}{resolve_in(str(self._tree), folder)}") / name

    # Modules ---------------------------------------------------------------------------------------------------------

    def _delete_module(self, name: str) -> None:
        folder = self._tree / "sys/module" / name
        modules = text_of(self._tree / "proc/modules") or ""
        if (text_of(self._tree / "proc/sys/kernel/modules_disabled") or "").strip() == "1":
            raise _refusal(errno.EPERM, name)
        if not folder.is_dir():
            raise _refusal(errno.ENOENT, name)
        count = text_of(folder / "refcnt")
        if count is None:
            raise _refusal(errno.ENOSYS, name)
        if names_in(folder / "holders"):
            raise _refusal(errno.EAGAIN, name)
        if (text_of(folder / "initstate") or "live").strip() != "live" or is_permanent(modules, name):
            raise _refusal(errno.EBUSY, name)
        if count.strip() != "0":
            raise _refusal(errno.EAGAIN, name)
        shutil.rmtree(folder)
        if modules:
            replace_text(self._tree / "proc/modules", without_module(modules, name))
        self._let_go(name)
        self._pci.forget_drivers_of(name)

    def _let_go(self, name: str) -> None:
        """Takes a module that has gone out of the holders and the counts of the modules that it used."""
        for other in names_in(self._tree / "sys/module"):
            folder = self._tree / "sys/module" / other
            mark = folder / "holders" / name
            if not os.path.lexists(mark):
                continue
            if mark.is_dir() and not mark.is_symlink():
                shutil.rmtree(mark)
            else:
                mark.unlink()
            count = (text_of(folder / "refcnt") or "").strip()
            if count.isdigit():
                replace_text(folder / "refcnt", f"{max(0, int(count) - 1)}\n")

    # Mounts ----------------------------------------------------------------------------------------------------------

    def _umount(self, path: str, detach: bool) -> None:
        files = [file for who in ("1", "self") if (file := self._tree / "proc" / who / "mountinfo").is_file()]
        if len(files) == 2 and files[0].samefile(files[1]):
            del files[1]
        results = {file: _without_mount(text_of(file) or "", path) for file in files}
        is_there = [result for result in results.values() if result is not None]
        if not is_there:
            raise _refusal(errno.EINVAL if os.path.lexists(self._at(path)) else errno.ENOENT, path)
        if not detach and (any(children for _, children in is_there) or self._has_users(path)):
            raise _refusal(errno.EBUSY, path)
        for file, result in results.items():
            if result is not None:
                replace_text(file, result[0])

    def _has_users(self, folder: str) -> bool:
        """Whether a process of the tree has something of a mount open or mapped, or works in it."""
        for pid in names_in(self._tree / "proc"):
            if pid.isdigit() and any(is_at_or_below(path, folder) for path in self._paths_of(pid)):
                return True
        return False

    def _paths_of(self, pid: str) -> Iterator[str]:
        process = self._tree / "proc" / pid
        links = [process / "cwd", process / "root", process / "exe"]
        links += [process / part / name for part in ("fd", "map_files") for name in names_in(process / part)]
        for link in links:
            try:
                yield str(link.readlink()).removesuffix(DELETED).removeprefix(str(self._tree))
            except OSError:
                continue
        for line in lines_of(text_of(process / "maps") or ""):
            fields = line.split(None, 5)
            if len(fields) == 6:
                yield fields[5].removesuffix(DELETED)

    # Processes and programs ------------------------------------------------------------------------------------------

    def _kill(self, pid: int, number: int) -> None:
        process = self._tree / "proc" / str(pid)
        if not process.is_dir():
            raise _refusal(errno.ESRCH, str(pid))
        if number in (signal.SIGTERM, signal.SIGKILL):
            shutil.rmtree(process)

    def _nvidia_smi(self) -> Finished:
        try:
            answer = json.loads(text_of(self._tree / NVIDIA_SMI) or "{}")
        except ValueError:
            return Finished(1, "")
        while answer.get("hang"):
            time.sleep(0.05)
            answer = json.loads(text_of(self._tree / NVIDIA_SMI) or "{}")
        return Finished(int(answer.get("rc", 0)), str(answer.get("stdout", "")))

    def _modprobe(self, module: str) -> Finished:
        answer = json.loads(text_of(self._tree / MODPROBE) or "{}")
        code, driver = int(answer.get("rc", 0)), answer.get("drivers", {}).get(module)
        if code == 0 and driver:
            self._pci.add_driver(driver)
        return Finished(code, str(answer.get("stdout", "")))


def _without_mount(text: str, path: str) -> tuple[str, bool] | None:
    """The text of mountinfo without the top mount of a path and all on it, and whether there was something on it."""
    lines = with_newlines(text)
    parsed = [mount_line(line.rstrip("\n")) for line in lines]
    tops = [index for index, line in enumerate(parsed) if line is not None and line.view.target == path]
    if not tops:
        return None
    gone = {tops[-1]} | set(_below(parsed, tops[-1]))
    return "".join(line for index, line in enumerate(lines) if index not in gone), len(gone) > 1


def _below(parsed: Sequence[MountLine | None], top: int) -> Iterator[int]:
    """Lines that lie on a mount: what was mounted below its target after it."""
    mount = parsed[top]
    for index, line in enumerate(parsed):
        if mount is None or line is None or line.view.target == mount.view.target:
            continue
        is_below = is_at_or_below(line.view.target, mount.view.target)
        if is_below and (index > top or line.parent_id == mount.view.mount_id):
            yield index


def _refusal(number: int, subject: str) -> OSError:
    return OSError(number, os.strerror(number), subject)
