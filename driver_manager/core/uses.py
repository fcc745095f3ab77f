"""How it is known that a pod uses the driver: one table, each row a kind of evidence with its reason.

Declared use is what the API says of the pod; real use is what the kernel showed. Each row looks at its own pod and the context alone.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from driver_manager.config import Settings
from driver_manager.core.snapshot import ClaimView, Holder, PodView
from driver_manager.names import CDI_PREFIX, DEPLOY_CLIENT, DRA_DRIVERS, DRIVER_ROOT, GPU_CLIENT, MIRROR, MIRROR_HASH


class Evidence(StrEnum):
    """What shows that a pod uses the driver."""

    RESOURCE = "gpu-resource"
    CLAIM = "dra"
    CLIENT_MARK = "gpu-client"
    CLIENT_SELECTOR = "client-selector"
    RUNTIME_CLASS = "runtime-class"
    HOST_DEVICE = "host-device"
    DRIVER_ROOT = "driver-root"
    CDI = "cdi"
    SELECTOR = "selector"
    DRA_PLUGIN = "dra-plugin"
    PROCESS = "process"


@dataclass(frozen=True, slots=True)
class Use:
    """One piece of evidence."""

    evidence: Evidence
    sentence: str
    """Continues "the pod ...": for example `asks for nvidia.com/gpu`."""
    setting: str = ""
    """What a person can set or change so that this counts no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UseContext:
    """What besides the pod tells whether it uses the driver."""

    settings: Settings
    runtime_handlers: Mapping[str, str] | None = None
    """RuntimeClass name -> handler; None where they cannot be listed, then the name stands for the handler."""
    claims: Mapping[tuple[str, str], ClaimView] = field(default_factory=dict)
    """(namespace, name) -> claim, of every claim that a pod on the node names and that exists."""
    holders: Mapping[str, tuple[Holder, ...]] = field(default_factory=dict)
    """Pod uid, or hash of a static pod's manifest, as in a cgroup's path -> its processes that hold a GPU."""
    reported: Mapping[str, str] = field(default_factory=dict)
    """The same of the pods that the agent on the node names, in its words: for the controller, which sees no processes."""

    @property
    def client_keys(self) -> tuple[str, ...]:
        """Node labels that clients of the driver select."""
        custom = self.settings.custom_label
        return (DEPLOY_CLIENT, custom) if custom else (DEPLOY_CLIENT,)


_DEVICE: Final = re.compile(r"/dev/(?:nvidia[^/]*(?:/.*)?|dri(?:/.*)?|vfio(?:/.*)?)/?")
_DRIVER_ROOTS: Final = (f"/{DRIVER_ROOT}", "/run/nvidia")
_PLUGIN_FOLDER: Final = re.compile(r"/.*/plugins(?:/(?:gpu|compute-domain)\.nvidia\.com)?/?")
_CDI_DEVICE: Final = re.compile(r"(?:[a-z0-9.-]+\.)?nvidia\.com/[A-Za-z0-9][A-Za-z0-9_.-]*=\S+")
"""A device of NVIDIA's by its whole name, `vendor/class=device`; `runtime.nvidia.com` and the like are vendors of theirs too."""
_PLUGIN_CONTAINERS: Final = frozenset({"gpus", "compute-domains"})


def uses(pod: PodView, context: UseContext) -> tuple[Use, ...]:
    """Everything that shows that a pod uses the driver, the plainest first; nothing for a bystander."""
    return tuple(use for row in ROWS if (use := row(pod, context)) is not None)


def gpu_resources(pod: PodView, settings: Settings) -> list[str]:
    """The GPU resources that any of its containers, or the pod itself, asks for."""
    return sorted(name for name in pod.resources if name.startswith(settings.gpu_resource_prefixes))


def driver_claims(pod: PodView, context: UseContext) -> list[ClaimView]:
    """The pod's claims that NVIDIA's DRA drivers have served; admin access holds a device open like any other."""
    found = (context.claims.get((pod.namespace, name)) for name in pod.claims)
    return [claim for claim in found if claim is not None and claim.drivers & DRA_DRIVERS]


def is_dra_plugin(pod: PodView) -> bool:
    """Whether a pod is NVIDIA's DRA kubelet plugin, also where no operator label says so.

    It mounts the kubelet's plugins folder (decision 2), and so do other plugins: its containers or its component label tell it apart.
    """
    paths = _plain_paths(pod)
    has_folder = any(_PLUGIN_FOLDER.fullmatch(path) for path in paths)
    is_named = any(path.rpartition("/")[2] in DRA_DRIVERS for path in paths)
    is_component = any(key.endswith("-component") and value == "kubelet-plugin" for key, value in pod.labels.items())
    return has_folder and (is_named or is_component or bool(pod.container_names & _PLUGIN_CONTAINERS))


def _plain_paths(pod: PodView) -> list[str]:
    """Its host paths as the kernel takes them: one slash, no dots, `/var/run` as the link to `/run` that it is; the API allows no `..`."""
    plain = ["/" + "/".join(part for part in path.split("/") if part not in ("", ".")) for path in pod.host_paths]
    return sorted(path.removeprefix("/var") if path.startswith("/var/run/") else path for path in plain)


# The rows -----------------------------------------------------------------------------------------------------------


def _resource(pod: PodView, context: UseContext) -> Use | None:
    if names := gpu_resources(pod, context.settings):
        return Use(Evidence.RESOURCE, f"asks for {', '.join(names)}", "GPU_RESOURCE_PREFIXES")
    return None


def _claim(pod: PodView, context: UseContext) -> Use | None:
    if claims := driver_claims(pod, context):
        words = ", ".join(
            f"{claim.name} ({'admin access, ' if claim.is_admin else ''}{'/'.join(sorted(claim.drivers))})" for claim in claims
        )
        return Use(Evidence.CLAIM, f"holds the claim {words}", "delete the pod or its claim")
    return None


def _client_mark(pod: PodView, context: UseContext) -> Use | None:
    for kind, values in (("annotation", pod.annotations), ("label", pod.labels)):
        if values.get(GPU_CLIENT) == "true":
            return Use(Evidence.CLIENT_MARK, f"has the {kind} {GPU_CLIENT}=true", f"remove its {kind} {GPU_CLIENT}")
    return None


def _client_selector(pod: PodView, context: UseContext) -> Use | None:
    for key in context.client_keys:
        if key in pod.node_selector or key in pod.affinity_keys:
            return Use(Evidence.CLIENT_SELECTOR, f"runs where the node has the label {key}", f"remove {key} from its node selector")
    return None


def _runtime_class(pod: PodView, context: UseContext) -> Use | None:
    name = pod.runtime_class
    if name is None:
        return None
    handlers = context.runtime_handlers
    handler = name if handlers is None else handlers.get(name, name)
    if handler in context.settings.gpu_runtime_handlers:
        return Use(Evidence.RUNTIME_CLASS, f"runs under the runtime class {name}", "GPU_RUNTIME_HANDLERS")
    return None


def _host_device(pod: PodView, context: UseContext) -> Use | None:
    """All of /dev is no evidence: storage daemons mount it everywhere (decision 18)."""
    if paths := [path for path in _plain_paths(pod) if _DEVICE.fullmatch(path)]:
        return Use(Evidence.HOST_DEVICE, f"mounts {', '.join(paths)} of the host", "remove the mount from the pod")
    return None


def _driver_root(pod: PodView, context: UseContext) -> Use | None:
    if paths := [path for path in _plain_paths(pod) if path in _DRIVER_ROOTS or path.startswith(f"/{DRIVER_ROOT}/")]:
        return Use(Evidence.DRIVER_ROOT, f"mounts the driver root ({', '.join(paths)})", "remove the mount from the pod")
    return None


def _cdi(pod: PodView, context: UseContext) -> Use | None:
    for key, value in sorted(pod.annotations.items()):
        if key.startswith(CDI_PREFIX) and any(_CDI_DEVICE.fullmatch(each.strip()) for each in value.split(",")):
            return Use(Evidence.CDI, f"gets {value} by the annotation {key}", f"remove its annotation {key}")
    return None


def _selector(pod: PodView, context: UseContext) -> Use | None:
    selector = context.settings.consumer_selector
    if selector.requirements and selector.matches(pod.labels):
        return Use(Evidence.SELECTOR, f"is selected by {selector.text}", "CONSUMER_POD_SELECTOR")
    return None


def _dra_plugin(pod: PodView, context: UseContext) -> Use | None:
    if is_dra_plugin(pod):
        return Use(Evidence.DRA_PLUGIN, "is the DRA kubelet plugin", "none: it has to restart with every driver")
    return None


def _process(pod: PodView, context: UseContext) -> Use | None:
    known_as = (pod.uid, pod.annotations.get(MIRROR_HASH, "") if MIRROR in pod.annotations else "")
    found = next((context.holders[uid] for uid in known_as if uid and uid in context.holders), ())
    if not found:
        said = next((context.reported[uid] for uid in known_as if uid and uid in context.reported), "")
        return Use(Evidence.PROCESS, f"stands in the way, as the agent on the node says: {said}", "HIDDEN_CONSUMERS") if said else None
    words = ", ".join(f"{each.command} ({each.pid}) on {', '.join(each.devices[:2])}" for each in found[:3])
    return Use(Evidence.PROCESS, f"has processes that hold a GPU: {words}", "HIDDEN_CONSUMERS")


ROWS: Final[tuple[Callable[[PodView, UseContext], Use | None], ...]] = (
    _dra_plugin, _resource, _claim, _client_mark, _client_selector, _runtime_class, _host_device, _driver_root, _cdi, _selector, _process,
)  # fmt: skip
"""All kinds of evidence, the plainest first; the plugin says more of its pod than the driver root that it mounts."""
