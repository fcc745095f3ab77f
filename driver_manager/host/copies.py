"""Copies of the driver's mounts in the mount namespaces of others.

A container that was started while the driver root was mounted may have a copy of it. The host's unmount succeeds all the same, and the copy
keeps the filesystem, and all files of the old driver in it, alive until that container ends. Nothing else shows that: so it is told.
"""

import os
from collections.abc import Iterator, Sequence

from driver_manager.core.snapshot import MountCopy, MountView
from driver_manager.host.parsing import lines_of, mount_line, pod_uid, systemd_unit
from driver_manager.host.paths import Roots, text_if_allowed
from driver_manager.host.scan import command_of, others


def copies_of(roots: Roots, mounts: Sequence[MountView], most: int) -> tuple[MountCopy, ...]:
    """Who still has what was mounted there, one process for each mount namespace; at most `most` of them.

    A filesystem that the host itself has mounted anywhere, in whole or in part, is left out: it was never the driver's alone. A driver root
    that is all of a container's has many of those in it, such as /run and /var/log, and half the pods of a node have them too.
    """
    on_host = {view.filesystem for view in _views(text_if_allowed(roots.proc / "1/mountinfo"))}
    gone = {mount.filesystem for mount in mounts if mount.filesystem} - on_host
    if not gone:
        return ()
    found: list[MountCopy] = []
    seen = {_namespace(roots, 1), _namespace(roots, "self")}
    for pid in others(roots):
        namespace = _namespace(roots, pid)
        if namespace is None or namespace in seen:
            continue
        seen.add(namespace)
        text = text_if_allowed(roots.proc / str(pid) / "mountinfo")
        if not any(f" {filesystem} " in text for filesystem in gone):
            continue  # most by far; to read each of their lines would take seconds where there are hundreds of pods
        copy = next((view for view in _views(text) if view.filesystem in gone), None)
        if copy is not None:
            found.append(_copy(roots, pid, copy))
            if len(found) >= most:
                break
    return tuple(found)


def _namespace(roots: Roots, pid: int | str) -> str | None:
    """The mount namespace of a process; None if it has ended or may not be looked at."""
    try:
        return os.readlink(roots.proc / str(pid) / "ns/mnt")  # noqa: PTH115 - text, no path
    except OSError:
        return None


def _views(mountinfo: str) -> Iterator[MountView]:
    return (line.view for line in map(mount_line, lines_of(mountinfo)) if line is not None)


def _copy(roots: Roots, pid: int, view: MountView) -> MountCopy:
    process = roots.proc / str(pid)
    cgroup = text_if_allowed(process / "cgroup")
    uid = pod_uid(cgroup)
    return MountCopy(
        pid=pid,
        command=command_of(process),
        target=view.target,
        pod_uid=uid,
        unit=None if uid else systemd_unit(cgroup),
    )
