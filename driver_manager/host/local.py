"""The Cluster port of a machine without a cluster: a node of its own, whose annotations are one file below the host's /run.

So a bare machine has the same engine, the same record and the same exit codes. There are no pods, no labels and no permissions to ask for.
The file goes when nothing is left in it, and with the boot, as what it speaks of does. Writers hold the node's lock, so the number in it
guards against a mistake, not against a race.
"""

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from driver_manager import names
from driver_manager.core.snapshot import (
    ClaimView,
    DaemonSetView,
    Identity,
    NodeView,
    Permissions,
    PodChange,
    PodList,
    PodView,
    Rule,
)
from driver_manager.errors import Conflict, Forbidden, InvariantBroken, NotFound, Refused
from driver_manager.host.faults import replace_text
from driver_manager.host.paths import Roots, machine_roots, text_of, tree_roots
from driver_manager.ports import NodePatch

NO_FILE: Final = "0"
"""Version of a node of which nothing is written."""
_ALL: Final = frozenset({"*"})


def open_local(tree: Path | None, node_name: str) -> "LocalCluster":
    """The node that this machine is, or a directory tree in its place.

    Args:
        tree: the directory tree.
        node_name: what to call it; empty for the host's own name.

    Raises:
        ConfigError: the tree is no folder.
    """
    return LocalCluster(machine_roots() if tree is None else tree_roots(tree), node_name)


class LocalCluster:
    """One node and nothing else, in a file.

    Args:
        roots: where the host's files are.
        node_name: what to call the node; empty for the host's own name.
    """

    def __init__(self, roots: Roots, node_name: str = "") -> None:
        self.name = node_name or host_name(roots)
        self.path = roots.own / names.LOCAL_NODE
        self._uid = _first_line(roots.host / "etc/machine-id") or f"host-{self.name}"

    @property
    def identity(self) -> Identity:
        """Nobody: this program runs in no pod."""
        return Identity()

    async def node(self, name: str) -> NodeView:
        """Reads the node.

        Raises:
            NotFound: this machine has another name. Refused: the file is no file of ours. Forbidden: it may not be read.
        """
        if name != self.name:
            raise NotFound(f"this machine is the node {self.name!r}, not {name!r}", hint="Without a cluster there is one node.")
        version, annotations = self._read()
        return NodeView(name=self.name, uid=self._uid, resource_version=version, annotations=annotations)

    async def patch_node(self, patch: NodePatch) -> NodeView:
        """Changes the annotations.

        Raises:
            Conflict: the file is newer than what the change rests on. InvariantBroken: for anything but annotations.
        """
        node = await self.node(patch.name)
        if patch.labels or patch.unschedulable is not None or patch.taints is not None:
            raise InvariantBroken("a machine without a cluster has no labels, cordon or taints to change")
        if patch.resource_version not in (None, node.resource_version):
            raise Conflict(f"{self.path} has changed since it was read")
        merged = {**node.annotations, **patch.annotations}
        annotations = {key: value for key, value in merged.items() if value is not None}
        if annotations == node.annotations:
            return node
        version = self._write(node.resource_version, annotations)
        return replace(node, resource_version=version, annotations=annotations)

    async def pods_on(self, node_name: str) -> PodList:
        """None."""
        return PodList((), NO_FILE)

    async def pod_changes(self, node_name: str, since: PodList) -> AsyncIterator[PodChange]:
        """Waits for ever."""
        change: PodChange = await asyncio.get_running_loop().create_future()
        yield change

    async def gated_for(self, node_name: str) -> tuple[PodView, ...]:
        """There are no pods."""
        return ()

    async def daemon_set(self, namespace: str, name: str) -> DaemonSetView:
        """There is none.

        Raises:
            NotFound: always.
        """
        raise NotFound(f"there is no DaemonSet {namespace}/{name}: this machine runs without a cluster")

    async def permissions(self, namespace: str) -> Permissions:
        """Everything is allowed that the kernel allows."""
        return Permissions((Rule(_ALL, _ALL, _ALL),))

    async def may(self, verb: str, group: str, resource: str, namespace: str = "") -> bool:
        """As `permissions`."""
        return True

    async def claims(self, wanted: Collection[tuple[str, str]]) -> Mapping[tuple[str, str], ClaimView]:
        """None."""
        return {}

    async def runtime_handlers(self) -> Mapping[str, str]:
        """None."""
        return {}

    async def evict(self, pod: PodView, *, dry_run: bool = False, grace_seconds: int | None = None) -> None:
        """There is no pod.

        Raises:
            NotFound: always.
        """
        raise NotFound(f"there is no pod {pod.ref}: this machine runs without a cluster")

    async def close(self) -> None:
        """Nothing is open."""

    # The file --------------------------------------------------------------------------------------------------------

    def _read(self) -> tuple[str, dict[str, str]]:
        try:
            text = text_of(self.path)
        except OSError as error:
            raise Forbidden(f"{self.path} cannot be read: {error.strerror}", hint="Run as root.") from error
        if text is None:
            return NO_FILE, {}
        body: Any = None
        with contextlib.suppress(ValueError, RecursionError):
            body = json.loads(text)
        annotations = body.get("annotations") if isinstance(body, dict) else None
        version = body.get("version") if isinstance(body, dict) else None
        is_text = isinstance(annotations, dict) and all(isinstance(value, str) for value in annotations.values())
        if not is_text or isinstance(version, bool) or not isinstance(version, int):
            hint = "Look at it, put the host back by hand (services it names), and remove the file."
            raise Refused(f"{self.path} is not understood", hint=hint)
        return str(version), dict(annotations or {})

    def _write(self, version: str, annotations: Mapping[str, str]) -> str:
        """Writes the file whole, or takes it away when it would be empty; gives its version then."""
        try:
            if not annotations:
                self.path.unlink(missing_ok=True)
                return NO_FILE
            # A new file begins above all that were there before, so that no version of it was ever seen.
            number = int(version) + 1 if version != NO_FILE else time.time_ns() // 1000
            self.path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(self.path, json.dumps({"version": number, "node": self.name, "annotations": dict(annotations)}, indent=1) + "\n")
            return str(number)
        except OSError as error:
            hint = "Run as root, with a /run that can be written."
            raise Forbidden(f"{self.path} cannot be written: {error.strerror}", hint=hint) from error


def host_name(roots: Roots) -> str:
    """What the host calls itself; in a container the host's file knows better than the kernel."""
    return _first_line(roots.host / "etc/hostname") or os.uname().nodename


def _first_line(path: Path) -> str:
    with contextlib.suppress(OSError):
        return (text_of(path) or "").strip().partition("\n")[0].strip()
    return ""
