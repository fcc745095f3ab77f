"""Copies of the driver's mounts in the mount namespaces of others.

A container that was started while the driver root was mounted may have a copy of it. The host's unmount succeeds all the same, and the copy
keeps the filesystem, and all files of the old driver in it, alive until that container ends. Nothing else shows that: so it is told.
"""

import os
from collections.abc import Iterator, Sequence

from driver_manager.core.snapshot import MountCopy, MountView
from driver_manager.host.parsing import is_at_or_below, mount_line, pod_uid, systemd_unit
from driver_manager.host.paths import Roots, text_of
from driver_manager.host.scan import command_of, others


def copies_of(roots: Roots, mounts: Sequence[MountView], most: int) -> tuple[MountCopy, ...]:
    """Who still has what was mounted there, one process for each mount namespace; at most `most` of them.

    What the host itself has mounted elsewhere too is left out: it was never the driver's alone.
    """
    on_host = [view for view in _views(roots, 1) if any(_is_of(view, mount) for mount in mounts)]
    gone = [mount for mount in mounts if mount.filesystem and not any(_is_of(view, mount) for view in on_host)]
    if not gone:
        return ()
    found: list[MountCopy] = []
    seen = {_namespace(roots, 1), _namespace(roots, "self")}
    for pid in others(roots):
        namespace = _namespace(roots, pid)
        if namespace is None or namespace in seen:
            continue
        seen.add(namespace)
        copy = next((view for view in _views(roots, pid) if any(_is_of(view, mount) for mount in gone)), None)
        if copy is not None:
            found.append(_copy(roots, pid, copy))
            if len(found) >= most:
                break
    return tuple(found)


def _is_of(view: MountView, mount: MountView) -> bool:
    """Whether a mount shows the same filesystem, from the same folder on or a folder in it."""
    return view.filesystem == mount.filesystem and is_at_or_below(view.root, mount.root)


def _namespace(roots: Roots, pid: int | str) -> str | None:
    """The mount namespace of a process; None if it has ended or may not be looked at."""
    try:
        return os.readlink(roots.proc / str(pid) / "ns/mnt")  # noqa: PTH115 - text, no path
    except OSError:
        return None


def _views(roots: Roots, pid: int) -> Iterator[MountView]:
    lines = map(mount_line, _text(roots, pid, "mountinfo").splitlines())
    return (line.view for line in lines if line is not None)


def _text(roots: Roots, pid: int, name: str) -> str:
    try:
        return text_of(roots.proc / str(pid) / name) or ""
    except PermissionError:
        return ""


def _copy(roots: Roots, pid: int, view: MountView) -> MountCopy:
    cgroup = _text(roots, pid, "cgroup")
    uid = pod_uid(cgroup)
    return MountCopy(
        pid=pid,
        command=command_of(roots.proc / str(pid)),
        target=view.target,
        pod_uid=uid,
        unit=None if uid else systemd_unit(cgroup),
    )
