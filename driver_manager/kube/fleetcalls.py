"""The requests that only the controller makes, and all that its account needs to be allowed.

The two tables of rules are held to the requests by tests: of everything that the adapter asks, and by an account that has no others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import quote

from driver_manager import names
from driver_manager.core.fleet import EventNote, FleetSet, LeaseView, MaintenanceOrder, MaintenanceView, PolicySource
from driver_manager.core.parking_term import put_in, taken_out
from driver_manager.core.snapshot import Rule
from driver_manager.kube.calls import API_GROUPS, Call, get_daemon_set
from driver_manager.kube.fleetviews import Conditions, TemplateAffinity

NVIDIA_GROUP: Final = "nvidia.com"
MAINTENANCE_GROUP: Final = "maintenance.nvidia.com"
MERGE: Final = "application/merge-patch+json"
EVENT_NAMESPACE: Final = "default"
"""Where Events about objects without a namespace live."""
EVENT_VERSIONS: Final = {"Node": "v1", "DaemonSet": "apps/v1"}
"""Kind of what an Event is about -> its group and version."""
LONGEST_SENTENCE: Final = 1024
"""The API server refuses a longer message of an Event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which objects of the cluster are the fleet's."""

    namespace: str
    """Of the operator: its DaemonSets and their pods."""
    nodes: str = "nvidia.com/gpu.present=true"
    """A label selector, as kubectl takes it."""
    validators: str = f"app={names.VALIDATOR_APP}"
    """A label selector of pods."""
    maintenances: str = ""
    """The namespace of NodeMaintenances; empty: they are not followed."""


@dataclass(frozen=True, slots=True)
class CustomKind:
    """A custom resource."""

    version: str
    plural: str
    group: str = NVIDIA_GROUP

    @property
    def group_version(self) -> str:
        """As the API server names it."""
        return f"{self.group}/{self.version}"

    def path(self, namespace: str = "") -> str:
        """Of all objects of the kind, or of those of a namespace."""
        within = f"/namespaces/{quote(namespace, safe='')}" if namespace else ""
        return f"/apis/{self.group_version}{within}/{self.plural}"

    @property
    def resource(self) -> str:
        """As roles spell it."""
        return f"{self.plural}.{self.group}"


CUSTOM_KINDS: Final[Mapping[str, CustomKind]] = {
    "ClusterPolicy": CustomKind("v1", "clusterpolicies"),
    "NVIDIADriver": CustomKind("v1alpha1", "nvidiadrivers"),
}
MAINTENANCE: Final = CustomKind("v1alpha1", "nodemaintenances", MAINTENANCE_GROUP)


PARKING_WAYS: Final = {
    "driver-manager-park-gate": ("mutatingadmissionpolicies", "mutatingadmissionpolicybindings"),
    "driver-manager-park-deny": ("validatingadmissionpolicies", "validatingadmissionpolicybindings"),
}
"""Name of a policy and of its binding in deploy/parking -> their kinds."""
PARKING_RESOURCES: Final = tuple(kind for kinds in PARKING_WAYS.values() for kind in kinds)
PARKING_DENIAL: Final = "ValidatingAdmissionPolicy 'driver-manager-park-deny'"
"""By this a denial of ours is told from others."""
PROBE_IMAGE: Final = "driver-manager/probe"
"""Never pulled: the pod is never made."""


def _rule(verbs: str, group: str, *resources: str) -> Rule:
    return Rule(frozenset(verbs.split()), frozenset({group}), frozenset(resources))


CLUSTER_RULES: Final = (
    _rule("get list watch patch", "", "nodes"),
    _rule("list watch", "", "pods"),
    _rule("create", "", "pods/eviction"),
    _rule("create", "", "events"),
    _rule("list watch", "apps", "daemonsets"),
    _rule("get", "admissionregistration.k8s.io", *PARKING_RESOURCES),
    _rule("list", "node.k8s.io", "runtimeclasses"),
    _rule("get", names.DRA_GROUP, "resourceclaims"),
    _rule("list watch", names.DRA_GROUP, "resourceslices"),
    _rule("get list watch", NVIDIA_GROUP, *(kind.plural for kind in CUSTOM_KINDS.values())),
    _rule("patch", NVIDIA_GROUP, *(f"{kind.plural}/status" for kind in CUSTOM_KINDS.values())),
    _rule("list watch", "policy", "poddisruptionbudgets"),
)
"""For the whole cluster. Reviews of its own rights and discovery are everybody's (`system:basic-user`, `system:discovery`)."""

OPERATOR_RULES: Final = (
    _rule("delete", "", "pods"),
    _rule("get list watch", "apps", "daemonsets"),
    _rule("list watch", "apps", "controllerrevisions"),
    Rule(frozenset({"get"}), frozenset({"coordination.k8s.io"}), frozenset({"leases"}), frozenset({names.OPERATOR_LEASE})),
)
"""In the operator's namespace."""

OWN_RULES: Final = (
    _rule("get create update", "coordination.k8s.io", "leases"),
    _rule("create", "", "pods"),
)
"""In the controller's own namespace. A pod is created in a dry run only, to see whether parking works; the API knows no smaller right."""

NAMESPACE_RULES: Final = (*OPERATOR_RULES, *OWN_RULES)
"""Where both are one."""

TEMPLATE_RULES: Final = (_rule("get patch", "apps", "daemonsets"),)
"""For the whole cluster, where TEMPLATE_PARKING is on."""

MAINTENANCE_RULES: Final = (_rule("get list watch create patch delete", MAINTENANCE_GROUP, MAINTENANCE.plural),)
"""In the namespace of NodeMaintenances, where a maintenance operator frees the nodes."""


def list_nodes(selection: Selection) -> Call:
    """Lists the nodes of the fleet."""
    return Call(verb="list", resource="nodes", path="/api/v1/nodes", query=_selecting(selection.nodes))


def list_daemon_sets(selection: Selection) -> Call:
    """Lists the DaemonSets of the operator's namespace."""
    return _list_apps("daemonsets", selection)


def list_revisions(selection: Selection) -> Call:
    """Lists the ControllerRevisions of the operator's namespace.

    Whole, with their templates: the metadata alone, which would be smaller, does not have the revision's number.
    """
    return _list_apps("controllerrevisions", selection)


def _list_apps(plural: str, selection: Selection) -> Call:
    path = f"/apis/apps/v1/namespaces/{quote(selection.namespace, safe='')}/{plural}"
    return Call(verb="list", resource=f"{plural}.apps", namespace=selection.namespace, path=path)


def list_driver_pods(selection: Selection) -> tuple[Call, Call]:
    """Lists the driver pods of the operator's namespace: two lists without a common pod, because a selector has no "or".

    By component are all drivers of today's gpu-operator, whichever way they were asked for. The second list has those of a
    ClusterPolicy that have only the `app` label, as older ones made them; as a rule it is empty, and so is its watch: one
    small request a minute. The other ways are dearer: to watch all pods of the namespace that have one of the two labels
    means a dozen operands on each node, in every list and with every change of their status; to leave out the known operands
    by name instead needs a list of them that ages, and lets pass what it does not know (the workers of node feature
    discovery, one on each node).
    """
    components = ",".join(sorted(names.DRIVER_COMPONENTS))
    by_component = f"{names.COMPONENT_LABEL} in ({components})"
    by_app = f"app={names.DRIVER_APP},{names.COMPONENT_LABEL} notin ({components})"
    return _list_pods(selection, by_component), _list_pods(selection, by_app)


def list_validator_pods(selection: Selection) -> Call:
    """Lists the validator pods of the operator's namespace."""
    return _list_pods(selection, selection.validators)


def _list_pods(selection: Selection, labels: str) -> Call:
    path = f"/api/v1/namespaces/{quote(selection.namespace, safe='')}/pods"
    return Call(verb="list", resource="pods", namespace=selection.namespace, path=path, query=_selecting(labels))


def _selecting(labels: str) -> dict[str, str]:
    return {"labelSelector": labels} if labels else {}


def list_parkable_sets() -> Call:
    """Lists the DaemonSets of all namespaces that ask to be parked."""
    return Call(verb="list", resource="daemonsets.apps", path="/apis/apps/v1/daemonsets", query=_selecting(f"{names.PARK}=true"))


def list_named_set(ref: str) -> Call:
    """Lists one DaemonSet of any namespace, `namespace/name`: its watch tells of no other."""
    namespace, _, name = ref.partition("/")
    path = f"/apis/apps/v1/namespaces/{quote(namespace, safe='')}/daemonsets"
    return Call(verb="list", resource="daemonsets.apps", namespace=namespace, path=path, query={"fieldSelector": f"metadata.name={name}"})


def list_sets_with_term() -> Call:
    """Lists the DaemonSets of all namespaces into whose templates the term for parking was put."""
    return Call(verb="list", resource="daemonsets.apps", path="/apis/apps/v1/daemonsets", query=_selecting(f"{names.PARKING_TERM}=true"))


def patch_affinity(daemon_set: FleetSet, found: TemplateAffinity, *, is_in: bool) -> Call:
    """Puts the term for parking into the template of the version that was read, or takes it out.

    The list of terms is one value for a merge patch, hence the guard.
    """
    meta = {
        "resourceVersion": found.resource_version,
        "uid": daemon_set.uid,
        "labels": {names.PARKING_TERM: "true" if is_in else None},
    }
    affinity = put_in(found.affinity) if is_in else taken_out(found.affinity)
    return replace(
        get_daemon_set(daemon_set.namespace, daemon_set.name),
        verb="patch",
        body={"metadata": meta, "spec": {"template": {"spec": {"affinity": affinity}}}},
        content_type=MERGE,
    )


def list_gated_pods() -> Call:
    """Lists the pods of all namespaces that the admission policy has kept off a node: it labels what it gates."""
    return Call(verb="list", resource="pods", path="/api/v1/pods", query=_selecting(names.PARKED))


def get_parking(name: str) -> tuple[Call, ...]:
    """Reads an admission policy of deploy/parking and its binding."""
    base, group = "/apis/admissionregistration.k8s.io/v1", "admissionregistration.k8s.io"
    return tuple(
        Call(verb="get", resource=f"{kind}.{group}", name=name, path=f"{base}/{kind}/{name}", may_be_unserved=True)
        for kind in PARKING_WAYS[name]
    )


def try_pod(namespace: str, owner: str, node_name: str) -> Call:
    """Tries to make a pod that stands for one of a DaemonSet, on a node; a dry run. As tame as the strictest pod security asks for."""
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node_name]}]}
    container = {
        "name": "probe",
        "image": PROBE_IMAGE,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    spec = {
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}},
        "automountServiceAccountToken": False,
        "containers": [container],
        "securityContext": {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
    }
    return Call(
        verb="create",
        resource="pods",
        namespace=namespace,
        path=f"/api/v1/namespaces/{quote(namespace, safe='')}/pods",
        query={"dryRun": "All"},
        body={
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"generateName": "parking-probe-", "annotations": {names.PROBE: owner}},
            "spec": spec,
        },
    )


def list_custom(kind: CustomKind, namespace: str = "") -> Call:
    """Lists the objects of a custom resource."""
    return Call(verb="list", resource=kind.resource, namespace=namespace, path=kind.path(namespace), may_be_unserved=True)


def list_budgets() -> Call:
    """Lists the PodDisruptionBudgets of all namespaces."""
    return Call(verb="list", resource="poddisruptionbudgets.policy", path="/apis/policy/v1/poddisruptionbudgets")


def list_slices(version: str) -> Call:
    """Lists the ResourceSlices of NVIDIA's DRA driver for GPUs."""
    return Call(
        verb="list",
        resource=f"resourceslices.{names.DRA_GROUP}",
        path=f"/apis/{names.DRA_GROUP}/{version}/resourceslices",
        query={"fieldSelector": f"spec.driver={names.GPU_DRA_DRIVER}"},
        may_be_unserved=True,
    )


def get_api_groups() -> Call:
    """Asks which groups and versions the API server has. Every account may."""
    return Call(verb="get", resource=API_GROUPS, path="/apis")


def get_api_version(kind: CustomKind) -> Call:
    """Asks which kinds there are in a version of a group. Every account may."""
    name = kind.group_version
    return Call(verb="get", resource=API_GROUPS, name=name, path=f"/apis/{name}")


def delete_pod(namespace: str, name: str, uid: str) -> Call:
    """Deletes exactly this pod."""
    path = f"/api/v1/namespaces/{quote(namespace, safe='')}/pods/{quote(name, safe='')}"
    body = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
    return Call(verb="delete", resource="pods", namespace=namespace, name=name, path=path, body=body)


def _leases(namespace: str) -> str:
    return f"/apis/coordination.k8s.io/v1/namespaces/{quote(namespace, safe='')}/leases"


def get_lease(namespace: str, name: str) -> Call:
    """Reads a Lease."""
    path = f"{_leases(namespace)}/{quote(name, safe='')}"
    return Call(verb="get", resource="leases.coordination.k8s.io", namespace=namespace, name=name, path=path)


def write_lease(lease: LeaseView) -> Call:
    """Makes a Lease, or replaces the version that was read."""
    meta: dict[str, Any] = {"name": lease.name, "namespace": lease.namespace, "annotations": dict(lease.annotations)}
    spec = {
        "holderIdentity": lease.holder,
        "leaseDurationSeconds": lease.duration_seconds,
        "acquireTime": lease.acquired,
        "renewTime": lease.renewed,
        "leaseTransitions": lease.transitions,
    }
    made = Call(
        verb="create",
        resource="leases.coordination.k8s.io",
        namespace=lease.namespace,
        name=lease.name,
        path=_leases(lease.namespace),
        body={
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": meta,
            "spec": {key: value for key, value in spec.items() if value != ""},
        },
    )
    if not lease.resource_version:
        return made
    meta["resourceVersion"] = lease.resource_version
    return replace(made, verb="update", path=f"{made.path}/{quote(lease.name, safe='')}")


def create_event(note: EventNote, now: str, author: str) -> Call:
    """Makes an Event of the core API, the one that `kubectl describe` shows; the API server makes its name unique."""
    subject, namespace = note.subject, note.subject.namespace or EVENT_NAMESPACE
    about = {"apiVersion": EVENT_VERSIONS[subject.kind], "kind": subject.kind, "name": subject.name, "uid": subject.uid}
    return Call(
        verb="create",
        resource="events",
        namespace=namespace,
        name=subject.name,
        path=f"/api/v1/namespaces/{quote(namespace, safe='')}/events",
        body={
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{subject.name}.", "namespace": namespace},
            "involvedObject": {**about, **({"namespace": subject.namespace} if subject.namespace else {})},
            "type": "Warning" if note.is_warning else "Normal",
            "reason": note.reason,
            "message": _cut(note.sentence),
            "action": note.action,
            "count": 1,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "source": {"component": names.OWN_NAME},
            "reportingComponent": names.OWN_NAME,
            "reportingInstance": author or names.OWN_NAME,
        },
    )


def _cut(sentence: str) -> str:
    """As much of a sentence as an Event takes, which is counted in bytes."""
    whole = sentence.encode()
    return sentence if len(whole) <= LONGEST_SENTENCE else whole[: LONGEST_SENTENCE - 3].decode(errors="ignore") + "..."


def get_custom(source: PolicySource) -> Call:
    """Reads a custom resource."""
    kind = CUSTOM_KINDS[source.kind]
    path = f"{kind.path()}/{quote(source.name, safe='')}"
    return Call(verb="get", resource=kind.resource, name=source.name, path=path, may_be_unserved=True)


def patch_conditions(source: PolicySource, found: Conditions, wanted: list[dict[str, Any]]) -> Call:
    """Replaces the conditions of the version that was read.

    Their list is one value for a merge patch, hence the guard. `state` is gpu-operator's, but a status without it is refused by
    the schema: where nobody has written one yet, it says what is so, that nobody calls it ready.
    """
    read = get_custom(source)
    status: dict[str, Any] = {"conditions": wanted} | ({} if found.state else {"state": "notReady"})
    return replace(
        read,
        verb="patch",
        resource=f"{CUSTOM_KINDS[source.kind].plural}/status.{NVIDIA_GROUP}",
        path=f"{read.path}/status",
        body={"metadata": {"resourceVersion": found.resource_version}, "status": status},
        content_type=MERGE,
    )


def get_maintenance(namespace: str, name: str) -> Call:
    """Reads a NodeMaintenance."""
    path = f"{MAINTENANCE.path(namespace)}/{quote(name, safe='')}"
    return Call(verb="get", resource=MAINTENANCE.resource, namespace=namespace, name=name, path=path)


def create_maintenance(order: MaintenanceOrder) -> Call:
    """Makes a NodeMaintenance."""
    spec: dict[str, Any] = {"requestorID": order.requestor, "nodeName": order.node_name, "drainSpec": dict(order.drain)}
    if order.wait is not None:
        spec["waitForPodCompletion"] = dict(order.wait)
    return Call(
        verb="create",
        resource=MAINTENANCE.resource,
        namespace=order.namespace,
        name=order.name,
        path=MAINTENANCE.path(order.namespace),
        body={
            "apiVersion": MAINTENANCE.group_version,
            "kind": "NodeMaintenance",
            "metadata": {"name": order.name, "namespace": order.namespace},
            "spec": spec,
        },
    )


def patch_requestors(maintenance: MaintenanceView, others: Sequence[str]) -> Call:
    """Replaces the additional requestors of the version that was read: the list is one value for a merge patch, hence the guard."""
    meta = {"resourceVersion": maintenance.resource_version, "uid": maintenance.uid}
    return replace(
        get_maintenance(maintenance.namespace, maintenance.name),
        verb="patch",
        body={"metadata": meta, "spec": {"additionalRequestors": list(others) or None}},
        content_type=MERGE,
    )


def delete_maintenance(maintenance: MaintenanceView) -> Call:
    """Deletes exactly this NodeMaintenance."""
    body = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": maintenance.uid}}
    return replace(get_maintenance(maintenance.namespace, maintenance.name), verb="delete", body=body)
