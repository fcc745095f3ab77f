"""How Kubernetes objects become views: the only file that knows their fields.

Answers are decoded straight from their bytes into small Structs that hold only what is read. A slice or map that Go may
write as null is `| None` here. Functions raise msgspec.MsgspecError or ValueError for bytes that are not such an object;
the caller knows what was asked.
"""

import base64
import binascii
from collections.abc import Iterable, Iterator

import msgspec

from driver_manager.core.snapshot import (
    ClaimView,
    DaemonSetView,
    Identity,
    LabelExpression,
    NodeView,
    Owner,
    Permissions,
    PodView,
    Rule,
    Taint,
    Toleration,
)

NONE_OF_IT = frozenset({b"0", b""})
"""A quantity of nothing, as the API server writes it."""


class _Wire(msgspec.Struct, frozen=True, rename="camel", gc=False):
    """What all objects on the wire share: camelCase names, and unknown fields are passed over."""


class _OwnerReference(_Wire, frozen=True):
    kind: str
    name: str
    uid: str
    controller: bool | None = None


class _Meta(_Wire, frozen=True):
    name: str
    uid: str
    namespace: str = ""
    resource_version: str = ""
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    owner_references: list[_OwnerReference] | None = None
    deletion_timestamp: str | None = None
    deletion_grace_period_seconds: int | None = None
    finalizers: list[str] | None = None


class _Taint(_Wire, frozen=True):
    key: str
    effect: str
    value: str = ""
    time_added: str | None = None


class _NodeSpec(_Wire, frozen=True):
    unschedulable: bool | None = None
    taints: list[_Taint] | None = None


class _NodeInfo(_Wire, frozen=True):
    boot_id: str = msgspec.field(name="bootID", default="")


class _NodeStatus(_Wire, frozen=True):
    node_info: _NodeInfo = _NodeInfo()


class _Node(_Wire, frozen=True):
    metadata: _Meta
    spec: _NodeSpec = _NodeSpec()
    status: _NodeStatus = _NodeStatus()


class _Toleration(_Wire, frozen=True):
    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""


class _Resources(_Wire, frozen=True):
    limits: dict[str, msgspec.Raw] | None = None
    requests: dict[str, msgspec.Raw] | None = None


class _Container(_Wire, frozen=True):
    name: str = ""
    resources: _Resources | None = None


class _Requirement(_Wire, frozen=True):
    key: str
    operator: str = ""
    values: list[str] | None = None


class _SelectorTerm(_Wire, frozen=True):
    match_expressions: list[_Requirement] | None = None


class _NodeSelector(_Wire, frozen=True):
    node_selector_terms: list[_SelectorTerm] | None = None


class _NodeAffinity(_Wire, frozen=True):
    required_during_scheduling_ignored_during_execution: _NodeSelector | None = None


class _Affinity(_Wire, frozen=True):
    node_affinity: _NodeAffinity | None = None


class _HostPath(_Wire, frozen=True):
    path: str


class _EmptyDir(_Wire, frozen=True):
    pass


class _Volume(_Wire, frozen=True):
    host_path: _HostPath | None = None
    empty_dir: _EmptyDir | None = None


class _PodClaim(_Wire, frozen=True):
    name: str
    resource_claim_name: str | None = None
    resource_claim_template_name: str | None = None


class _PodSpec(_Wire, frozen=True):
    containers: list[_Container] | None = None
    init_containers: list[_Container] | None = None
    ephemeral_containers: list[_Container] | None = None
    resources: _Resources | None = None
    node_selector: dict[str, str] | None = None
    affinity: _Affinity | None = None
    tolerations: list[_Toleration] | None = None
    runtime_class_name: str | None = None
    volumes: list[_Volume] | None = None
    resource_claims: list[_PodClaim] | None = None
    termination_grace_period_seconds: int | None = None
    priority: int | None = None


class _ExtendedClaim(_Wire, frozen=True):
    resource_claim_name: str | None = None


class _Condition(_Wire, frozen=True):
    type: str
    status: str


class _PodStatus(_Wire, frozen=True):
    phase: str = "Pending"
    conditions: list[_Condition] | None = None
    resource_claim_statuses: list[_PodClaim] | None = None
    extended_resource_claim_status: _ExtendedClaim | None = None


class _Pod(_Wire, frozen=True):
    metadata: _Meta
    spec: _PodSpec = _PodSpec()
    status: _PodStatus = _PodStatus()


class _ListMeta(_Wire, frozen=True):
    resource_version: str
    token: str | None = msgspec.field(name="continue", default=None)


class _Pods(_Wire, frozen=True):
    metadata: _ListMeta
    items: list[_Pod] | None


class _BookmarkMeta(_Wire, frozen=True):
    resource_version: str


class _Bookmark(_Wire, frozen=True):
    metadata: _BookmarkMeta


class _Event(_Wire, frozen=True):
    type: str
    object: msgspec.Raw


class _TemplateSpec(_Wire, frozen=True):
    node_selector: dict[str, str] | None = None
    tolerations: list[_Toleration] | None = None


class _Template(_Wire, frozen=True):
    spec: _TemplateSpec = _TemplateSpec()


class _DaemonSetSpec(_Wire, frozen=True):
    template: _Template


class _DaemonSet(_Wire, frozen=True):
    metadata: _Meta
    spec: _DaemonSetSpec


class _Rule(_Wire, frozen=True):
    verbs: list[str] | None = None
    api_groups: list[str] | None = None
    resources: list[str] | None = None
    resource_names: list[str] | None = None


class _RulesStatus(_Wire, frozen=True):
    resource_rules: list[_Rule] | None = None
    incomplete: bool = False


class _RulesReview(_Wire, frozen=True):
    status: _RulesStatus


class _AccessStatus(_Wire, frozen=True):
    allowed: bool


class _AccessReview(_Wire, frozen=True):
    status: _AccessStatus


class _ClaimResult(_Wire, frozen=True):
    driver: str
    admin_access: bool | None = None


class _ClaimDevices(_Wire, frozen=True):
    results: list[_ClaimResult] | None = None


class _ClaimAllocation(_Wire, frozen=True):
    devices: _ClaimDevices = _ClaimDevices()


class _ClaimStatus(_Wire, frozen=True):
    allocation: _ClaimAllocation | None = None


class _Claim(_Wire, frozen=True):
    metadata: _Meta
    status: _ClaimStatus = _ClaimStatus()


class _GroupVersion(_Wire, frozen=True):
    version: str


class _Group(_Wire, frozen=True):
    versions: list[_GroupVersion] | None = None


class _RuntimeClass(_Wire, frozen=True):
    metadata: _Meta
    handler: str


class _RuntimeClasses(_Wire, frozen=True):
    items: list[_RuntimeClass] | None = None


class _Named(_Wire, frozen=True):
    name: str = ""
    uid: str = ""


class _Binding(_Wire, frozen=True):
    namespace: str = ""
    pod: _Named = _Named()
    node: _Named = _Named()


class _Claims(_Wire, frozen=True):
    binding: _Binding = msgspec.field(name="kubernetes.io", default=_Binding())


_node = msgspec.json.Decoder(_Node)
_pod = msgspec.json.Decoder(_Pod)
_pods = msgspec.json.Decoder(_Pods)
_event = msgspec.json.Decoder(_Event)
_bookmark = msgspec.json.Decoder(_Bookmark)
_daemon_set = msgspec.json.Decoder(_DaemonSet)
_rules_review = msgspec.json.Decoder(_RulesReview)
_access_review = msgspec.json.Decoder(_AccessReview)
_claims = msgspec.json.Decoder(_Claims)
_claim = msgspec.json.Decoder(_Claim)
_group = msgspec.json.Decoder(_Group)
_runtime_classes = msgspec.json.Decoder(_RuntimeClasses)


class PodPage(msgspec.Struct, frozen=True):
    """One page of a list of pods."""

    pods: tuple[PodView, ...]
    resource_version: str
    token: str
    """Where the next page begins; empty at the end."""


class WatchEvent(msgspec.Struct, frozen=True):
    """One line of a watch on pods: `pod` for ADDED, MODIFIED and DELETED, `error` (a Status) for ERROR."""

    type: str
    resource_version: str = ""
    pod: PodView | None = None
    error: bytes = b""


def node_view(body: bytes) -> NodeView:
    """Reads a Node."""
    node = _node.decode(body)
    meta = node.metadata
    return NodeView(
        name=meta.name,
        uid=meta.uid,
        resource_version=meta.resource_version,
        labels=meta.labels or {},
        annotations=meta.annotations or {},
        unschedulable=bool(node.spec.unschedulable),
        taints=tuple(Taint(taint.key, taint.value, taint.effect, taint.time_added) for taint in node.spec.taints or ()),
        boot_id=node.status.node_info.boot_id,
    )


def pod_page(body: bytes) -> PodPage:
    """Reads a PodList."""
    page = _pods.decode(body)
    pods = tuple(_pod_view(pod) for pod in page.items or ())
    return PodPage(pods, page.metadata.resource_version, page.metadata.token or "")


def watch_event(line: bytes) -> WatchEvent:
    """Reads one line of a watch on pods."""
    event = _event.decode(line)
    if event.type == "ERROR":
        return WatchEvent(event.type, error=bytes(event.object))
    if event.type == "BOOKMARK":
        return WatchEvent(event.type, _bookmark.decode(event.object).metadata.resource_version)
    pod = _pod.decode(event.object)
    return WatchEvent(event.type, pod.metadata.resource_version, _pod_view(pod))


def daemon_set_view(body: bytes) -> DaemonSetView:
    """Reads a DaemonSet."""
    daemon_set = _daemon_set.decode(body)
    meta, template = daemon_set.metadata, daemon_set.spec.template.spec
    return DaemonSetView(
        namespace=meta.namespace,
        name=meta.name,
        uid=meta.uid,
        node_selector=template.node_selector or {},
        tolerations=_tolerations(template.tolerations),
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


def _pod_view(pod: _Pod) -> PodView:
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
        owner=_controller(meta.owner_references or ()),
        is_terminating=is_terminating,
        grace_seconds=30 if grace is None else grace,
        node_selector=spec.node_selector or {},
        affinity=_affinity(spec.affinity),
        tolerations=_tolerations(spec.tolerations),
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


def _controller(references: Iterable[_OwnerReference]) -> Owner | None:
    """The owner that manages the object; of a mirror pod that is its Node."""
    return next((Owner(each.kind, each.name, each.uid) for each in references if each.controller), None)


def _tolerations(tolerations: list[_Toleration] | None) -> tuple[Toleration, ...]:
    return tuple(Toleration(each.key, each.operator, each.value, each.effect) for each in tolerations or ())


def _affinity(affinity: _Affinity | None) -> tuple[tuple[LabelExpression, ...], ...]:
    """The terms of a required node affinity, as far as they speak of labels: a DaemonSet's pod also has one on its node's name."""
    node_affinity = affinity.node_affinity if affinity else None
    required = node_affinity.required_during_scheduling_ignored_during_execution if node_affinity else None
    terms = (required.node_selector_terms if required else None) or ()
    return tuple(
        tuple(LabelExpression(each.key, each.operator, tuple(each.values or ())) for each in term.match_expressions or ()) for term in terms
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
