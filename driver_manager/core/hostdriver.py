"""Whether the loaded driver belongs to the host itself, and our mark of that on the node.

Three things have to agree: the module is loaded, it came from the host's own module folder, and the host has userspace of the same version.
A driver root that is mounted speaks for a driver container instead. One command alone never decides it: it can hang or fail for a moment.
"""

import json
from typing import Final

from driver_manager.core.labels import is_label_value
from driver_manager.core.snapshot import HostView, NodeView
from driver_manager.names import DEPLOY_DRIVER, HOST_DRIVER, PRE_INSTALLED

SMI_TIMEOUT: Final = 10.0
"""Seconds after which the host's nvidia-smi is given up."""


def needs_smi(host: HostView) -> bool:
    """Whether files leave it open, so that the host's nvidia-smi has to be asked."""
    is_candidate = host.is_loaded and not host.mounts and bool(host.driver_files.module_files)
    return is_candidate and host.driver_version not in host.driver_files.library_versions


def host_driver(host: HostView, smi_version: str | None) -> str | None:
    """Version of the host's own driver, None where the loaded driver, if any, is not the host's.

    Args:
        host: what was seen.
        smi_version: what the host's nvidia-smi said, where it was asked.
    """
    if not host.is_loaded or host.mounts or not host.driver_files.module_files:
        return None
    version = host.driver_version
    if version is None:
        return smi_version
    return version if version in host.driver_files.library_versions or version == smi_version else None


def mark(previous: str | None, version: str) -> dict[str, str]:
    """The annotation that makes the mark ours, to be written with the label."""
    return {HOST_DRIVER: json.dumps({"previous": previous, "version": version}, separators=(",", ":"))}


def previous_value(annotation: str) -> str | None:
    """The label's value before our mark; None where there was none, or the annotation cannot be read."""
    try:
        body = json.loads(annotation)
    except (ValueError, RecursionError):
        return None
    previous = body.get("previous") if isinstance(body, dict) else None
    return previous if isinstance(previous, str) and is_label_value(previous) else None


def unmarked(node: NodeView, previous: str | None) -> dict[str, str | None]:
    """The labels to write when our mark goes: the former value, unless somebody changed it since."""
    return {DEPLOY_DRIVER: previous} if node.labels.get(DEPLOY_DRIVER) == PRE_INSTALLED else {}
