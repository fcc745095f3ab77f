"""How Kubernetes objects become views: the only file that knows their fields, with `fleetviews` for what only the controller reads.

Functions raise msgspec.MsgspecError or ValueError for bytes that are not such an object; the caller knows what was asked.
"""

import base64
import binascii
import re
import sys
from collections.abc import Iterator
from typing import Final

import msgspec

from driver_manager import names
from driver_manager.core.snapshot import (
    ClaimView,
    DaemonSetView,
    Identity,
    NodeView,
    Permissions,
    PodView,
    Rule,
    Taint,
)
from driver_manager.kube.wire import (
    Affinity,
    Gate,
    Reader,
    SetStatus,
    Strategy,
    Wire,
    WireObject,
    WireToleration,
    controller,
    label_terms,
    meant_for,
    shared,
    tolerations,
)

NONE_OF_IT: Final = frozenset({b"0", b""})
"""A quantity of nothing, as the API server writes it."""
LAST_APPLIED: Final = "kubectl.kubernetes.io/last-applied-configuration"
BULK: Final = frozenset({LAST_APPLIED, "csi.volume.kubernetes.io/nodeid"})
"""Annotations that views leave out: long, and nobody here reads them."""
LONGEST_FOREIGN: Final = 64
"""Characters of a node's annotation that is not NVIDIA's and may still be read: the number of `ORDER_KEY`. Others keep whole documents in
theirs, and a controller has all nodes in memory."""

_WHOLE: Final = re.compile(rb"(\d+)([kMG]?)")
_SUFFIXES: Final = {b"": 1, b"k": 10**3, b"M": 10**6, b"G": 10**9}


class _Taint(Wire, frozen=True):
    key: str
    effect: str
    value: str = ""
    time_added: str | None = None


class _NodeSpec(Wire, frozen=True):
    unschedulable: bool | None = None
    taints: list[_Taint] | None = None


class _NodeInfo(Wire, frozen=True):
    boot_id: str = msgspec.field(name="bootID", default="")


class _Condition(Wire, frozen=True):
    type: str
    status: str


class _NodeStatus(Wire, frozen=True):
    node_info: _NodeInfo = _NodeInfo()
    conditions: list[_Condition] | None = None
    allocatable: dict[str, msgspec.Raw] | None = None
    capacity: dict[str, msgspec.Raw] | None = None


class _Node(WireObject, frozen=True):
    spec: _NodeSpec = _NodeSpec()
    status: _NodeStatus = _NodeStatus()


class _Resources(Wire, frozen=True):
    limits: dict[str, msgspec.Raw] | None = None
    requests: dict[str, msgspec.Raw] | None = None


class _Container(Wire, frozen=True):
    name: str = ""
    resources: _Resources | None = None


class _HostPath(Wire, frozen=True):
    path: str


class _EmptyDir(Wire, frozen=True):
    pass


class _Volume(Wire, frozen=True):
    host_path: _HostPath | None = None
    empty_dir: _EmptyDir | None = None


class _PodClaim(Wire, frozen=True):
    name: str
    resource_claim_name: str | None = None
    resource_claim_template_name: str | None = None


class _PodSpec(Wire, frozen=True):
    containers: list[_Container] | None = None
    init_containers: list[_Container] | None = None
    ephemeral_containers: list[_Container] | None = None
    resources: _Resources | None = None
    node_selector: dict[str, str] | None = None
    affinity: Affinity | None = None
    tolerations: list[WireToleration] | None = None
    runtime_class_name: str | None = None
    volumes: list[_Volume] | None = None
    resource_claims: list[_PodClaim] | None = None
    termination_grace_period_seconds: int | None = None
    priority: int | None = None


class _ExtendedClaim(Wire, frozen=True):
    resource_claim_name: str | None = None


class _PodStatus(Wire, frozen=True):
    phase: str = "Pending"
    conditions: list[_Condition] | None = None
    resource_claim_statuses: list[_PodClaim] | None = None
    extended_resource_claim_status: _ExtendedClaim | None = None


class _Pod(WireObject, frozen=True):
    spec: _PodSpec = _PodSpec()
    status: _PodStatus = _PodStatus()


class _GatedSpec(_PodSpec, frozen=True):
    scheduling_gates: list[Gate] | None = None


class _GatedPod(WireObject, frozen=True):
    spec: _GatedSpec = _GatedSpec()
    status: _PodStatus = _PodStatus()


class GatedPod(msgspec.Struct, frozen=True):
    """A pod that was made for a node, and whether the parking policy's gate keeps it off."""

    pod: PodView
    node_name: str
    """Empty: it has no such gate, or is made for no node."""


class _TemplateSpec(Wire, frozen=True):
    node_selector: dict[str, str] | None = None
    tolerations: list[WireToleration] | None = None


class _TemplateMeta(Wire, frozen=True):
    labels: dict[str, str] | None = None


class _Template(Wire, frozen=True):
    metadata: _TemplateMeta = _TemplateMeta()
    spec: _TemplateSpec = _TemplateSpec()


class _DaemonSetSpec(Wire, frozen=True):
    template: _Template
    update_strategy: Strategy = Strategy()


class _DaemonSet(WireObject, frozen=True):
    spec: _DaemonSetSpec
    status: SetStatus = SetStatus()


class _Rule(Wire, frozen=True):
    verbs: list[str] | None = None
    api_groups: list[str] | None = None
    resources: list[str] | None = None
    resource_names: list[str] | None = None


class _RulesStatus(Wire, frozen=True):
    resource_rules: list[_Rule] | None = None
    incomplete: bool = False


class _RulesReview(Wire, frozen=True):
    status: _RulesStatus


class _AccessStatus(Wire, frozen=True):
    allowed: bool


class _AccessReview(Wire, frozen=True):
    status: _AccessStatus


class _ClaimResult(Wire, frozen=True):
    driver: str
    admin_access: bool | None = None


class _ClaimDevices(Wire, frozen=True):
    results: list[_ClaimResult] | None = None


class _ClaimAllocation(Wire, frozen=True):
    devices: _ClaimDevices = _ClaimDevices()


class _ClaimStatus(Wire, frozen=True):
    allocation: _ClaimAllocation | None = None


class _Claim(WireObject, frozen=True):
    status: _ClaimStatus = _ClaimStatus()


class _GroupVersion(Wire, frozen=True):
    version: str


class _Group(Wire, frozen=True):
    versions: list[_GroupVersion] | None = None


class _RuntimeClass(WireObject, frozen=True):
    handler: str


class _RuntimeClasses(Wire, frozen=True):
    items: list[_RuntimeClass] | None = None


class _Named(Wire, frozen=True):
    name: str = ""
    uid: str = ""


class _Binding(Wire, frozen=True):
    namespace: str = ""
    pod: _Named = _Named()
    node: _Named = _Named()


class _Claims(Wire, frozen=True):
    binding: _Binding = msgspec.field(name="kubernetes.io", default=_Binding())


_daemon_set = msgspec.json.Decoder(_DaemonSet)
_rules_review = msgspec.json.Decoder(_RulesReview)
_access_review = msgspec.json.Decoder(_AccessReview)
_claims = msgspec.json.Decoder(_Claims)
_claim = msgspec.json.Decoder(_Claim)
_group = msgspec.json.Decoder(_Group)
_runtime_classes = msgspec.json.Decoder(_RuntimeClasses)


def daemon_set_view(body: bytes) -> DaemonSetView:
    """Reads a DaemonSet."""
    daemon_set = _daemon_set.decode(body)
    meta, template, status = daemon_set.metadata, daemon_set.spec.template.spec, daemon_set.status
    is_behind = status.is_behind or status.observed_generation < meta.generation
    return DaemonSetView(
        namespace=meta.namespace,
        name=meta.name,
        uid=meta.uid,
        node_selector=template.node_selector or {},
        tolerations=tolerations(template.tolerations),
        pod_labels=daemon_set.spec.template.metadata.labels or {},
        asks_to_be_parked=(meta.labels or {}).get(names.PARK) == "true",
        is_rolling=daemon_set.spec.update_strategy.type != "OnDelete" and is_behind,
    )


def permissions(body: bytes) -> Permissions:
    """Reads the answer to a SelfSubjectRulesReview."""
    status = _rules_review.decode(body).status
    rules = tuple(
        Rule(
            frozenset(rule.verbs or ()),
            frozenset(rule.api_groups or ()),
            frozenset(rule.resources or ()),
            frozenset(rule.resource_names or ()),
        )
        for rule in status.resource_rules or ()
    )
    return Permissions(rules, status.incomplete)


def is_allowed(body: bytes) -> bool:
    """Reads the answer to a SelfSubjectAccessReview."""
    return _access_review.decode(body).status.allowed


def claim_view(body: bytes) -> ClaimView:
    """Reads a ResourceClaim; its status is spelled alike in v1, v1beta2 and v1beta1."""
    claim = _claim.decode(body)
    allocation = claim.status.allocation
    results = (allocation.devices.results if allocation else None) or ()
    return ClaimView(
        namespace=claim.metadata.namespace,
        name=claim.metadata.name,
        drivers=frozenset(result.driver for result in results),
        is_admin=bool(results) and all(result.admin_access for result in results),
    )


def group_versions(body: bytes) -> tuple[str, ...]:
    """Reads the versions that an API group is served in."""
    return tuple(each.version for each in _group.decode(body).versions or ())


def runtime_handlers(body: bytes) -> dict[str, str]:
    """Reads a RuntimeClassList: name -> handler."""
    return {each.metadata.name: each.handler for each in _runtime_classes.decode(body).items or ()}


def identity(token: str) -> Identity:
    """Reads which pod a service account token was made for, without checking its signature: the server does that.

    Empty where the token is no JWT or is bound to no pod. Nothing of the token gets into an error.
    """
    parts = token.split(".")
    if len(parts) != 3:
        return Identity()
    try:
        payload = base64.b64decode(parts[1] + "=" * (-len(parts[1]) % 4), altchars=b"-_", validate=True)
        binding = _claims.decode(payload).binding
    except (binascii.Error, msgspec.MsgspecError, ValueError, RecursionError):
        return Identity()
    return Identity(binding.namespace, binding.pod.name, binding.pod.uid, binding.node.name)


def _gated_pod(pod: _GatedPod) -> GatedPod:
    is_gated = any(gate.name == names.PARKED for gate in pod.spec.scheduling_gates or ())
    return GatedPod(_pod_view(pod), meant_for(pod.spec.affinity) if is_gated else "")


def _pod_view(pod: _Pod | _GatedPod) -> PodView:
    meta, spec, status = pod.metadata, pod.spec, pod.status
    is_terminating = meta.deletion_timestamp is not None
    grace = meta.deletion_grace_period_seconds if is_terminating else spec.termination_grace_period_seconds
    named = {claim.name for claim in status.resource_claim_statuses or ()}
    volumes = spec.volumes or ()
    return PodView(
        namespace=meta.namespace,
        name=meta.name,
        uid=meta.uid,
        phase=status.phase,
        labels=meta.labels or {},
        annotations=meta.annotations or {},
        owner=controller(meta.owner_references),
        is_terminating=is_terminating,
        grace_seconds=30 if grace is None else grace,
        node_selector=spec.node_selector or {},
        affinity=label_terms(spec.affinity),
        tolerations=tolerations(spec.tolerations),
        resources=frozenset(_resource_names(spec)),
        runtime_class=spec.runtime_class_name,
        host_paths=tuple(volume.host_path.path for volume in volumes if volume.host_path),
        claims=tuple(dict.fromkeys(_claim_names(spec, status))),
        has_pending_claims=any(claim.resource_claim_template_name and claim.name not in named for claim in spec.resource_claims or ()),
        has_empty_dir=any(volume.empty_dir is not None for volume in volumes),
        finalizers=tuple(meta.finalizers or ()),
        priority=spec.priority or 0,
        is_ready=any(condition.type == "Ready" and condition.status == "True" for condition in status.conditions or ()),
        container_names=frozenset(container.name for container in spec.containers or ()),
    )


def _resource_names(spec: _PodSpec) -> Iterator[str]:
    """Every name in requests and limits, of all containers and of the pod itself; none of something is no use of it."""
    kinds = (spec.containers, spec.init_containers, spec.ephemeral_containers)
    for resources in (spec.resources, *(container.resources for kind in kinds for container in kind or ())):
        for quantities in (resources.requests, resources.limits) if resources else ():
            yield from (name for name, quantity in (quantities or {}).items() if bytes(quantity).strip(b'"') not in NONE_OF_IT)


def _claim_names(spec: _PodSpec, status: _PodStatus) -> Iterator[str]:
    """Claims named in the spec, made from its templates, or made for its extended resources (in the status only)."""
    for claim in (*(spec.resource_claims or ()), *(status.resource_claim_statuses or ())):
        if claim.resource_claim_name:
            yield claim.resource_claim_name
    extended = status.extended_resource_claim_status
    if extended and extended.resource_claim_name:
        yield extended.resource_claim_name


def _node_view(node: _Node) -> NodeView:
    meta, status = node.metadata, node.status
    return NodeView(
        name=meta.name,
        uid=meta.uid,
        resource_version=meta.resource_version,
        labels=shared(meta.labels),
        annotations={sys.intern(key): value for key, value in (meta.annotations or {}).items() if _is_read(key, value)},
        unschedulable=bool(node.spec.unschedulable),
        taints=tuple(Taint(taint.key, taint.value, taint.effect, taint.time_added) for taint in node.spec.taints or ()),
        boot_id=status.node_info.boot_id,
        is_ready=all(each.status == "True" for each in status.conditions or () if each.type == "Ready"),
        allocatable=dict(_devices(status.allocatable)),
        capacity=dict(_devices(status.capacity)),
    )


def _is_read(key: str, value: str) -> bool:
    """Whether a node's annotation may concern anybody here."""
    return key not in BULK and (key.startswith(names.RESOURCE_PREFIX) or len(value) <= LONGEST_FOREIGN)


def _devices(quantities: dict[str, msgspec.Raw] | None) -> Iterator[tuple[str, int]]:
    """The `nvidia.com/` resources among all; they are counted in whole numbers, which the API server writes as text (`8`, `1k`)."""
    for name, quantity in (quantities or {}).items():
        if name.startswith(names.RESOURCE_PREFIX) and (found := _WHOLE.fullmatch(bytes(quantity).strip(b'"'))):
            yield sys.intern(name), int(found[1]) * _SUFFIXES[found[2]]


NODES: Final = Reader(_Node, _node_view)
PODS: Final = Reader(_Pod, _pod_view)
GATED: Final = Reader(_GatedPod, _gated_pod)
