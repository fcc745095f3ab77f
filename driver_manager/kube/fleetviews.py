"""How the objects that only the controller reads become views, the second half of `views`.

Fleets are large, so what thousands of objects have in common is stored once, and bulk is left out: of a ControllerRevision
the template, of a custom resource all but what says how drivers are upgraded.
"""

import sys
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

import msgspec

from driver_manager import names
from driver_manager.core.fleet import BudgetView, FleetPod, FleetSet, LeaseView, MaintenanceView, PolicySource, Revision, SliceView
from driver_manager.core.parking import Tried
from driver_manager.core.snapshot import LabelExpression, Owner
from driver_manager.kube.views import BULK, LAST_APPLIED
from driver_manager.kube.wire import (
    Affinity,
    Gate,
    Meta,
    OwnerReference,
    Reader,
    Requirement,
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

NORMAL_WAITS: Final = frozenset({"", "ContainerCreating", "PodInitializing"})
"""Why a container waits that only has not begun yet."""


class _Variable(Wire, frozen=True):
    name: str
    value: str = ""


class _Container(Wire, frozen=True):
    env: list[_Variable] | None = None


class _PodSpec(Wire, frozen=True):
    """Of a pod or of a template."""

    node_name: str = ""
    node_selector: dict[str, str] | None = None
    affinity: Affinity | None = None
    tolerations: list[WireToleration] | None = None
    init_containers: list[_Container] | None = None
    containers: list[_Container] | None = None
    scheduling_gates: list[Gate] | None = None


class _Waiting(Wire, frozen=True):
    reason: str = ""


class _State(Wire, frozen=True):
    waiting: _Waiting | None = None


class _ContainerStatus(Wire, frozen=True):
    ready: bool = False
    restart_count: int = 0
    state: _State = _State()


class _PodStatus(Wire, frozen=True):
    phase: str = "Pending"
    init_container_statuses: list[_ContainerStatus] | None = None
    container_statuses: list[_ContainerStatus] | None = None


class _Pod(WireObject, frozen=True):
    spec: _PodSpec = _PodSpec()
    status: _PodStatus = _PodStatus()


class _TemplateMeta(Wire, frozen=True):
    labels: dict[str, str] | None = None


class _Template(Wire, frozen=True):
    metadata: _TemplateMeta = _TemplateMeta()
    spec: _PodSpec = _PodSpec()


class _SetSpec(Wire, frozen=True):
    template: _Template
    update_strategy: Strategy = Strategy()


class _Set(WireObject, frozen=True):
    spec: _SetSpec
    status: SetStatus = SetStatus()


class _RevisionSpec(Wire, frozen=True):
    template: _Template = _Template()


class _RevisionData(Wire, frozen=True):
    spec: _RevisionSpec = _RevisionSpec()


class _Revision(WireObject, frozen=True):
    revision: int
    data: _RevisionData = _RevisionData()


class _Condition(Wire, frozen=True):
    type: str
    status: str = ""
    reason: str = ""


class _CustomStatus(Wire, frozen=True):
    conditions: list[_Condition] | None = None


class _Switch(Wire, frozen=True):
    enabled: bool | None = None


class _PolicyDriver(Wire, frozen=True):
    enabled: bool | None = None
    use_nvidia_driver_crd: bool | None = msgspec.field(name="useNvidiaDriverCRD", default=None)
    upgrade_policy: dict[str, Any] | None = None


class _PolicySpec(Wire, frozen=True):
    driver: _PolicyDriver = _PolicyDriver()
    sandbox_workloads: _Switch | None = None


class _ClusterPolicy(WireObject, frozen=True):
    spec: _PolicySpec = _PolicySpec()
    status: _CustomStatus = _CustomStatus()


class _DriverSpec(Wire, frozen=True):
    upgrade_policy: dict[str, Any] | None = None
    node_selector: dict[str, str] | None = None
    default: bool | None = None


class _Driver(WireObject, frozen=True):
    spec: _DriverSpec = _DriverSpec()
    status: _CustomStatus = _CustomStatus()


class _LeaseSpec(Wire, frozen=True):
    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


class _Lease(WireObject, frozen=True):
    spec: _LeaseSpec = _LeaseSpec()


class _Selector(Wire, frozen=True):
    match_labels: dict[str, str] | None = None
    match_expressions: list[Requirement] | None = None


class _BudgetSpec(Wire, frozen=True):
    selector: _Selector | None = None


class _BudgetStatus(Wire, frozen=True):
    disruptions_allowed: int = 0
    observed_generation: int = 0


class _Budget(WireObject, frozen=True):
    spec: _BudgetSpec = _BudgetSpec()
    status: _BudgetStatus = _BudgetStatus()


class _MaintenanceSpec(Wire, frozen=True):
    node_name: str = ""
    requestor: str = msgspec.field(name="requestorID", default="")
    additional_requestors: list[str] | None = None


class _Maintenance(WireObject, frozen=True):
    spec: _MaintenanceSpec = _MaintenanceSpec()
    status: _CustomStatus = _CustomStatus()


class _Pool(Wire, frozen=True):
    name: str = ""
    generation: int = 0


class _Nothing(Wire, frozen=True):
    """A device: that it is there."""


class _SliceSpec(Wire, frozen=True):
    driver: str = ""
    node_name: str = ""
    pool: _Pool = _Pool()
    devices: list[_Nothing] | None = None


class _Slice(WireObject, frozen=True):
    """The same in all versions, but for what is in a device."""

    spec: _SliceSpec = _SliceSpec()


class Conditions(msgspec.Struct, frozen=True):
    """What of a custom resource is needed to write one of its conditions, word for word."""

    uid: str
    resource_version: str
    generation: int
    state: str
    items: list[dict[str, Any]]


class TemplateAffinity(msgspec.Struct, frozen=True):
    """What of a DaemonSet is needed to change its template's affinity, word for word."""

    uid: str
    resource_version: str
    affinity: dict[str, Any] | None


class _RawPodSpec(Wire, frozen=True):
    affinity: dict[str, Any] | None = None


class _RawTemplate(Wire, frozen=True):
    spec: _RawPodSpec = _RawPodSpec()


class _RawSetSpec(Wire, frozen=True):
    template: _RawTemplate = _RawTemplate()


class _RawSet(WireObject, frozen=True):
    spec: _RawSetSpec = _RawSetSpec()


class _FullStatus(Wire, frozen=True):
    state: str = ""
    conditions: list[dict[str, Any]] | None = None


class _Conditioned(WireObject, frozen=True):
    status: _FullStatus = _FullStatus()


class _GroupVersion(Wire, frozen=True):
    group_version: str


class _Group(Wire, frozen=True):
    versions: list[_GroupVersion] | None = None


class _Groups(Wire, frozen=True):
    groups: list[_Group]


class _Resource(Wire, frozen=True):
    name: str


class _Resources(Wire, frozen=True):
    resources: list[_Resource]


_tried = msgspec.json.Decoder(_Pod)
_groups = msgspec.json.Decoder(_Groups)
_resources = msgspec.json.Decoder(_Resources)


def group_versions(body: bytes) -> frozenset[str]:
    """Reads which versions of which groups an API server has: `nvidia.com/v1`."""
    return frozenset(version.group_version for group in _groups.decode(body).groups for version in group.versions or ())


def resources(body: bytes) -> frozenset[str]:
    """Reads which kinds there are in a version of a group, by their plural names."""
    return frozenset(each.name for each in _resources.decode(body).resources)


def _pod_view(pod: _Pod) -> FleetPod:
    meta, status = pod.metadata, pod.status
    containers = status.container_statuses or []
    waiting = [each for each in (*(status.init_container_statuses or ()), *containers) if not each.ready]
    reasons = (each.state.waiting.reason for each in waiting if each.state.waiting)
    labels = shared(meta.labels)
    return FleetPod(
        namespace=sys.intern(meta.namespace),
        name=meta.name,
        uid=meta.uid,
        node_name=pod.spec.node_name or meant_for(pod.spec.affinity),
        is_bound=bool(pod.spec.node_name),
        labels=labels,
        owner=_owner(meta.owner_references),
        revision=labels.get(names.REVISION_HASH, ""),
        digest=_digest(pod.spec),
        phase=sys.intern(status.phase),
        is_ready=status.phase == "Running" and bool(containers) and all(each.ready for each in containers),
        is_terminating=meta.deletion_timestamp is not None,
        restarts=max((each.restart_count for each in waiting), default=0),
        trouble=next((reason for reason in reasons if reason not in NORMAL_WAITS), ""),
        is_gated=_is_gated(pod),
        created=meta.creation_timestamp or "",
    )


def _is_gated(pod: _Pod) -> bool:
    return any(gate.name == names.PARKED for gate in pod.spec.scheduling_gates or ())


def tried(body: bytes) -> Tried:
    """Reads the answer to a dry run: the pod as it would be."""
    return Tried.GATED if _is_gated(_tried.decode(body)) else Tried.LET_IN


def _digest(spec: _PodSpec) -> str:
    """The first that is not empty; a value from elsewhere (`valueFrom`) counts as empty."""
    containers = (*(spec.init_containers or ()), *(spec.containers or ()))
    values = (each.value for container in containers for each in container.env or () if each.name == names.DRIVER_DIGEST)
    return sys.intern(next((value for value in values if value), ""))


def _owner(references: list[OwnerReference] | None) -> Owner | None:
    owner = controller(references)
    return _shared_owner(owner) if owner else None


@lru_cache(maxsize=256)
def _shared_owner(owner: Owner) -> Owner:
    """Thousands of pods have one owner."""
    return owner


def _set_view(each: _Set) -> FleetSet:
    meta, template = each.metadata, each.spec.template
    return FleetSet(
        namespace=meta.namespace,
        name=meta.name,
        uid=meta.uid,
        labels=meta.labels or {},
        owner=controller(meta.owner_references),
        pod_labels=template.metadata.labels or {},
        node_selector=template.spec.node_selector or {},
        affinity=label_terms(template.spec.affinity),
        tolerations=tolerations(template.spec.tolerations),
        is_settled=each.status.observed_generation >= meta.generation,
        is_on_delete=each.spec.update_strategy.type == "OnDelete",
        is_deleting=meta.deletion_timestamp is not None,
    )


def _parkable_view(each: _Set) -> FleetSet:
    """With its status. A pod of the newest template counts as updated, whether it runs or is gated."""
    status, view = each.status, _set_view(each)
    return replace(
        view,
        is_rolling=not view.is_on_delete and (status.is_behind or not view.is_settled),
        missing=max(0, status.desired_number_scheduled - status.current_number_scheduled),
    )


def _revision_view(each: _Revision) -> Revision:
    meta = each.metadata
    owner = controller(meta.owner_references)
    return Revision(
        namespace=meta.namespace,
        name=meta.name,
        uid=meta.uid,
        owner_uid=owner.uid if owner else "",
        number=each.revision,
        hash=(meta.labels or {}).get(names.REVISION_HASH, ""),
        digest=_digest(each.data.spec.template.spec),
    )


def _applied(meta: Meta, *path: str) -> dict[str, Any] | None:
    """What kubectl noted of the last `apply`, at a path; None where that is not there or cannot be read."""
    try:
        found = msgspec.json.decode((meta.annotations or {}).get(LAST_APPLIED, "null"))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    for key in path:
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else None


def _common(meta: Meta, status: _CustomStatus, *path: str) -> dict[str, Any]:
    """What the two custom resources share; `path` is where their policy is."""
    return {
        "name": meta.name,
        "uid": meta.uid,
        "resource_version": meta.resource_version,
        "created": meta.creation_timestamp or "",
        "annotations": {key: value for key, value in (meta.annotations or {}).items() if key not in BULK},
        "applied_policy": _applied(meta, *path),
        "is_deleting": meta.deletion_timestamp is not None,
        "generation": meta.generation,
        "conditions": {each.type: (each.status, each.reason) for each in status.conditions or ()},
    }


def _cluster_policy_view(each: _ClusterPolicy) -> PolicySource:
    """A driver whose `enabled` is not written is there: gpu-operator takes it so."""
    driver, sandbox = each.spec.driver, each.spec.sandbox_workloads
    return PolicySource(
        kind="ClusterPolicy",
        **_common(each.metadata, each.status, "spec", "driver", "upgradePolicy"),
        upgrade_policy=driver.upgrade_policy,
        has_driver=driver.enabled is not False,
        uses_nvidia_driver_crd=bool(driver.use_nvidia_driver_crd),
        has_sandbox_workloads=bool(sandbox and sandbox.enabled),
    )


def _driver_view(each: _Driver) -> PolicySource:
    return PolicySource(
        kind="NVIDIADriver",
        **_common(each.metadata, each.status, "spec", "upgradePolicy"),
        upgrade_policy=each.spec.upgrade_policy,
        node_selector=each.spec.node_selector,
        is_default=bool(each.spec.default),
    )


def _lease_view(lease: _Lease) -> LeaseView:
    meta, spec = lease.metadata, lease.spec
    return LeaseView(
        namespace=meta.namespace,
        name=meta.name,
        resource_version=meta.resource_version,
        holder=spec.holder_identity or "",
        duration_seconds=spec.lease_duration_seconds or 0,
        acquired=spec.acquire_time or "",
        renewed=spec.renew_time or "",
        transitions=spec.lease_transitions or 0,
        annotations=meta.annotations or {},
    )


def _budget_view(each: _Budget) -> BudgetView:
    meta, selector = each.metadata, each.spec.selector
    return BudgetView(
        namespace=sys.intern(meta.namespace),
        name=meta.name,
        uid=meta.uid,
        selector=None if selector is None else _expressions(selector),
        allowed=each.status.disruptions_allowed,
        is_observed=each.status.observed_generation >= meta.generation,
    )


def _expressions(selector: _Selector) -> tuple[LabelExpression, ...]:
    plain = (LabelExpression(key, "In", (value,)) for key, value in (selector.match_labels or {}).items())
    more = (LabelExpression(one.key, one.operator, tuple(one.values or ())) for one in selector.match_expressions or ())
    return (*plain, *more)


def _maintenance_view(each: _Maintenance) -> MaintenanceView:
    """As NVIDIA's controller the condition is read by its reason."""
    meta, spec = each.metadata, each.spec
    return MaintenanceView(
        namespace=meta.namespace,
        name=meta.name,
        uid=meta.uid,
        resource_version=meta.resource_version,
        node_name=spec.node_name,
        requestor=spec.requestor,
        others=tuple(spec.additional_requestors or ()),
        is_ready=any(one.type == "Ready" and one.reason == "Ready" for one in each.status.conditions or ()),
        is_deleting=meta.deletion_timestamp is not None,
    )


def _slice_view(each: _Slice) -> SliceView:
    meta, spec = each.metadata, each.spec
    return SliceView(
        name=meta.name,
        uid=meta.uid,
        node_name=sys.intern(spec.node_name),
        driver=sys.intern(spec.driver),
        pool=sys.intern(spec.pool.name),
        generation=spec.pool.generation,
        devices=len(spec.devices or ()),
    )


def _conditions(each: _Conditioned) -> Conditions:
    meta, status = each.metadata, each.status
    return Conditions(meta.uid, meta.resource_version, meta.generation, status.state, status.conditions or [])


def _template_affinity(each: _RawSet) -> TemplateAffinity:
    return TemplateAffinity(each.metadata.uid, each.metadata.resource_version, each.spec.template.spec.affinity)


PODS: Final = Reader(_Pod, _pod_view)
SETS: Final = Reader(_Set, _set_view)
PARKABLE_SETS: Final = Reader(_Set, _parkable_view)
AFFINITIES: Final = Reader(_RawSet, _template_affinity)
REVISIONS: Final = Reader(_Revision, _revision_view)
CLUSTER_POLICIES: Final = Reader(_ClusterPolicy, _cluster_policy_view)
DRIVERS: Final = Reader(_Driver, _driver_view)
LEASES: Final = Reader(_Lease, _lease_view)
CONDITIONS: Final = Reader(_Conditioned, _conditions)
BUDGETS: Final = Reader(_Budget, _budget_view)
MAINTENANCES: Final = Reader(_Maintenance, _maintenance_view)
SLICES: Final = Reader(_Slice, _slice_view)
