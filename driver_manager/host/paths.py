"""Where the host's files are for this process: on the machine itself, in the agent's container, or in a directory tree.

In the container the host's root is mounted read-only at /host, while /sys and /run are the container's own mounts of the host's folders;
/run/nvidia is the one whose mounts go through to the host. A directory tree has everything below one folder.
"""

import errno
import os
import stat
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from driver_manager.errors import ConfigError
from driver_manager.host.parsing import lines_of, mount_line

_MOST_LINKS = 40
_CONTAINER_HOST_ROOT = "/host"
_SHORT_OF: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""What this process or machine is short of: such a refusal says nothing about the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roots:
    """Where to read what."""

    host: Path
    """Root of the host's filesystem: proc, dev, lib/modules and the host's libraries are below it."""
    own: Path
    """Root of this process's own /sys, /run and /proc/self."""
    is_tree: bool

    @property
    def proc(self) -> Path:
        """The host's /proc."""
        return self.host / "proc"

    @property
    def sys(self) -> Path:
        """Sysfs that can be written."""
        return self.own / "sys"


def tree_roots(tree: Path) -> Roots:
    """A directory tree as host.

    Raises:
        ConfigError: there is no such folder.
    """
    if not tree.is_dir():
        what = "is not a folder" if tree.exists() else "does not exist"
        raise ConfigError(f"the host tree {tree} {what}", hint="Name a folder laid out like a host's root: docs/host-tree.md makes one.")
    tree = tree.resolve()
    return Roots(host=tree, own=tree, is_tree=True)


def machine_roots() -> Roots:
    """The machine this runs on: its root is /host if something is mounted there, else /."""
    lines = (mount_line(line) for line in lines_of(text_of(Path("/proc/self/mountinfo")) or ""))
    has_host = any(line is not None and line.view.target == _CONTAINER_HOST_ROOT for line in lines)
    return Roots(host=Path(_CONTAINER_HOST_ROOT if has_host else "/"), own=Path("/"), is_tree=False)


def raise_if_short(error: OSError) -> None:
    """Raises an error that says nothing about what was asked for, so that nobody takes it for "not there" (R1).

    Raises:
        OSError: out of descriptors or memory.
    """
    if error.errno in _SHORT_OF:
        raise error


def text_of(path: Path) -> str | None:
    """A file's text; None where there is none, or where it went away in the middle of it.

    Raises:
        PermissionError: it may not be read. OSError: out of descriptors or memory.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO in its place must not hold us
        # No translation of newlines: a name in a text of the kernel may hold a carriage return.
        with open(descriptor, encoding="utf-8", errors="surrogateescape", newline="\n") as file:  # noqa: PTH123 - a descriptor, no path
            return file.read() if stat.S_ISREG(os.fstat(descriptor).st_mode) else None
    except PermissionError:
        raise
    except OSError as error:
        raise_if_short(error)
        return None


def text_if_allowed(path: Path) -> str:
    """The same for what is only told: nothing where there is no such file, or it may not be read."""
    try:
        return text_of(path) or ""
    except PermissionError:
        return ""


def names_in(path: Path) -> list[str]:
    """Names in a folder, sorted; none where it is not there or may not be listed.

    Raises:
        OSError: out of descriptors or memory.
    """
    try:
        return sorted(os.listdir(path))  # noqa: PTH208 - half the time of iterdir, and only names are wanted
    except OSError as error:
        raise_if_short(error)
        return []


def resolve_in(root: str, path: str) -> str:
    """Follows the links of a host's path as the host would: an absolute link starts at `root` again, `..` ends there.

    Parts that do not exist stay as they are; the result is the host's own path.
    """
    todo = deque(path.split("/"))
    done: list[str] = []
    links = 0
    while todo:
        part = todo.popleft()
        if part in ("", "."):
            continue
        if part == "..":
            del done[-1:]
            continue
        try:
            target = os.readlink("/".join((root.rstrip("/"), *done, part)))  # noqa: PTH115 - text, not a path of ours
        except (OSError, ValueError):
            done.append(part)
            continue
        links += 1
        if links > _MOST_LINKS:
            done.append(part)
            continue
        if target.startswith("/"):
            done.clear()
        todo.extendleft(reversed(target.split("/")))
    return "/" + "/".join(done)
