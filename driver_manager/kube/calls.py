"""The requests that this program makes, one function each: plain values, so that a test can read them.

Nothing here knows how a request travels or what its answer means.
"""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import quote, urlencode

from driver_manager.core.snapshot import PodView, Taint
from driver_manager.names import DRA_GROUP, PARKED
from driver_manager.ports import NodePatch

PAGE_SIZE: Final = 500
EVICTION: Final = "pods/eviction"
API_GROUPS: Final = "apigroups"

_METHODS: Final = {"get": "GET", "list": "GET", "watch": "GET", "create": "POST", "update": "PUT", "patch": "PATCH", "delete": "DELETE"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request. Verb and resource are spelled as in a role's rules, because messages about permissions need them."""

    verb: str
    resource: str
    path: str
    namespace: str = ""
    name: str = ""
    query: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] | None = None
    content_type: str = "application/json"
    may_be_unserved: bool = False
    """Whether the API server may not have the kind at all."""

    @property
    def method(self) -> str:
        """The HTTP method."""
        return _METHODS[self.verb]

    @property
    def target(self) -> str:
        """Path and query, quoted."""
        return f"{self.path}?{urlencode(self.query)}" if self.query else self.path

    @property
    def subject(self) -> str:
        """`namespace/name` or what there is of it."""
        return "/".join(part for part in (self.namespace, self.name) if part)

    def __str__(self) -> str:
        what = "evict pod" if self.resource == EVICTION else f"{self.verb} {self.resource}"
        return f"{what} {self.subject}".rstrip()


def get_node(name: str) -> Call:
    """Reads a Node."""
    return Call(verb="get", resource="nodes", name=name, path=f"/api/v1/nodes/{quote(name, safe='')}")


def patch_node(patch: NodePatch) -> Call:
    """Changes a Node by a JSON merge patch: null removes, and a list is replaced as a whole.

    https://www.rfc-editor.org/rfc/rfc7386
    """
    metadata: dict[str, Any] = {}
    if patch.resource_version is not None:
        metadata["resourceVersion"] = patch.resource_version
    if patch.labels:
        metadata["labels"] = dict(patch.labels)
    if patch.annotations:
        metadata["annotations"] = dict(patch.annotations)
    spec: dict[str, Any] = {}
    if patch.unschedulable is not None:
        spec["unschedulable"] = patch.unschedulable or None
    if patch.taints is not None:
        spec["taints"] = [_taint(taint) for taint in patch.taints] or None
    return Call(
        verb="patch",
        resource="nodes",
        name=patch.name,
        path=f"/api/v1/nodes/{quote(patch.name, safe='')}",
        body={key: value for key, value in (("metadata", metadata), ("spec", spec)) if value},
        content_type="application/merge-patch+json",
    )


def _taint(taint: Taint) -> dict[str, str]:
    """A taint as the API writes it: empty fields are left out."""
    fields = {"key": taint.key, "value": taint.value, "effect": taint.effect, "timeAdded": taint.time_added or ""}
    return {key: value for key, value in fields.items() if value}


def page(call: Call, token: str = "") -> Call:
    """One page of a list; `token` is where the page before it ended."""
    query = {**call.query, "limit": str(PAGE_SIZE)}
    return dataclasses.replace(call, query={**query, "continue": token} if token else query)


def watch(call: Call, resource_version: str, seconds: int) -> Call:
    """Follows for some seconds, from a version on, what a list gives."""
    more = {"watch": "true", "resourceVersion": resource_version, "allowWatchBookmarks": "true", "timeoutSeconds": str(seconds)}
    return dataclasses.replace(call, verb="watch", query={**call.query, **more})


def list_pods(node_name: str) -> Call:
    """Lists the pods bound to a node."""
    return Call(verb="list", resource="pods", path="/api/v1/pods", query={"fieldSelector": _bound_to(node_name)})


def _bound_to(node_name: str) -> str:
    """A field selector; the three signs that have a meaning in one are escaped."""
    return "spec.nodeName=" + re.sub(r"([\\,=])", r"\\\1", node_name)


def list_unbound_gated_pods() -> Call:
    """Lists the pods of all namespaces that the parking policy has kept off a node and that are not bound: it labels what it gates."""
    return Call(verb="list", resource="pods", path="/api/v1/pods", query={"labelSelector": PARKED, "fieldSelector": "spec.nodeName="})


def get_daemon_set(namespace: str, name: str) -> Call:
    """Reads a DaemonSet."""
    path = f"/apis/apps/v1/namespaces/{quote(namespace, safe='')}/daemonsets/{quote(name, safe='')}"
    return Call(verb="get", resource="daemonsets.apps", namespace=namespace, name=name, path=path)


def evict_pod(pod: PodView, *, dry_run: bool, grace_seconds: int | None) -> Call:
    """Asks for the eviction of exactly this pod. A dry run asks the budget and changes nothing."""
    options: dict[str, Any] = {"preconditions": {"uid": pod.uid}}
    if dry_run:
        options["dryRun"] = ["All"]
    if grace_seconds is not None:
        options["gracePeriodSeconds"] = grace_seconds
    return Call(
        verb="create",
        resource=EVICTION,
        namespace=pod.namespace,
        name=pod.name,
        path=f"/api/v1/namespaces/{quote(pod.namespace, safe='')}/pods/{quote(pod.name, safe='')}/eviction",
        query={"dryRun": "All"} if dry_run else {},
        body={
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"namespace": pod.namespace, "name": pod.name},
            "deleteOptions": options,
        },
    )


def review_rules(namespace: str) -> Call:
    """Asks for all that the account may do in a namespace and cluster-wide; changes nothing."""
    return _review("SelfSubjectRulesReview", {"namespace": namespace or "default"})


def review_access(verb: str, group: str, resource: str, namespace: str) -> Call:
    """Asks whether the account may do one thing; changes nothing."""
    kind, _, subresource = resource.partition("/")
    attributes = {"verb": verb, "group": group, "resource": kind, "subresource": subresource, "namespace": namespace}
    return _review("SelfSubjectAccessReview", {"resourceAttributes": {key: value for key, value in attributes.items() if value}})


def _review(kind: str, spec: Mapping[str, Any]) -> Call:
    resource = f"{kind.lower()}s"
    return Call(
        verb="create",
        resource=f"{resource}.authorization.k8s.io",
        path=f"/apis/authorization.k8s.io/v1/{resource}",
        body={"apiVersion": "authorization.k8s.io/v1", "kind": kind, "spec": spec},
    )


DRA_VERSIONS: Final = ("v1", "v1beta2", "v1beta1")
"""From the newest on: the first that is served is used."""


def get_dra_group() -> Call:
    """Asks in which versions the API group of dynamic resource allocation is served. Every account may."""
    return Call(verb="get", resource=API_GROUPS, name=DRA_GROUP, path=f"/apis/{DRA_GROUP}")


def get_claim(version: str, namespace: str, name: str) -> Call:
    """Reads a ResourceClaim."""
    path = f"/apis/{DRA_GROUP}/{version}/namespaces/{quote(namespace, safe='')}/resourceclaims/{quote(name, safe='')}"
    return Call(verb="get", resource=f"resourceclaims.{DRA_GROUP}", namespace=namespace, name=name, path=path)


def list_runtime_classes() -> Call:
    """Lists the RuntimeClasses."""
    return Call(verb="list", resource="runtimeclasses.node.k8s.io", path="/apis/node.k8s.io/v1/runtimeclasses")
