"""The custom resources of gpu-operator and of the maintenance operator, as far as the controller reads and writes them.

The status of gpu-operator's is as strict as the stock one.
"""

from __future__ import annotations

from typing import Any

Object = dict[str, Any]
GROUP = "nvidia.com"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
KINDS = {"ClusterPolicy": ("v1", "clusterpolicies"), "NVIDIADriver": ("v1alpha1", "nvidiadrivers")}
"""Kind -> version and plural."""
MAINTENANCE = "nodemaintenances.maintenance.nvidia.com"

TEXT: Object = {"type": "string"}
CONDITION: Object = {
    "type": "object",
    "required": ["lastTransitionTime", "message", "reason", "status", "type"],
    "properties": {
        "lastTransitionTime": {"type": "string", "format": "date-time"},
        "message": {"type": "string", "maxLength": 32768},
        "observedGeneration": {"type": "integer", "format": "int64", "minimum": 0},
        "reason": {"type": "string", "minLength": 1, "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
        "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
        "type": TEXT,
    },
}


def name(kind: str) -> str:
    """Of its definition."""
    return MAINTENANCE if kind == "NodeMaintenance" else f"{KINDS[kind][1]}.{GROUP}"


def path(kind: str, name: str = "", *, namespace: str = "") -> str:
    """Of all objects of a kind, or of one."""
    if kind == "NodeMaintenance":
        within = f"/namespaces/{namespace}" if namespace else ""
        return f"/apis/maintenance.nvidia.com/v1alpha1{within}/nodemaintenances" + (f"/{name}" if name else "")
    version, plural = KINDS[kind]
    return f"/apis/{GROUP}/{version}/{plural}" + (f"/{name}" if name else "")


def crd(kind: str) -> Object:
    """The definition: any spec, and a status that needs a state and has conditions; of a NodeMaintenance as much as is used."""
    if kind == "NodeMaintenance":
        return _maintenance_crd()
    version, plural = KINDS[kind]
    state = {"type": "string", "enum": ["ignored", "ready", "notReady", "disabled"]}
    status = {
        "type": "object",
        "required": ["state"],
        "properties": {"state": state, "namespace": TEXT, "conditions": {"type": "array", "items": CONDITION}},
    }
    spec = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return _definition(kind, GROUP, version, plural, "Cluster", spec, status)


def _maintenance_crd() -> Object:
    drain = {
        "type": "object",
        "properties": {
            "force": {"type": "boolean"},
            "podSelector": TEXT,
            "timeoutSeconds": {"type": "integer", "format": "int32", "minimum": 0},
            "deleteEmptyDir": {"type": "boolean"},
            "podEvictionFilters": {"type": "array", "items": {"type": "object", "properties": {"byResourceNameRegex": TEXT}}},
        },
    }
    waiting = {
        "type": "object",
        "properties": {"podSelector": TEXT, "timeoutSeconds": {"type": "integer", "format": "int32", "minimum": 0}},
    }
    fixed = [{"rule": "self == oldSelf", "message": "Value is immutable"}]
    pattern = r"^([a-z0-9A-Z]([-a-z0-9A-Z]*[a-z0-9A-Z])?(\.[a-z0-9A-Z]([-a-z0-9A-Z]*[a-z0-9A-Z])?)*)$"
    spec = {
        "type": "object",
        "required": ["nodeName", "requestorID"],
        "properties": {
            "requestorID": {**TEXT, "minLength": 2, "maxLength": 63, "pattern": pattern, "x-kubernetes-validations": fixed},
            "additionalRequestors": {"type": "array", "items": TEXT, "x-kubernetes-list-type": "set"},
            "nodeName": {**TEXT, "x-kubernetes-validations": fixed},
            "cordon": {"type": "boolean", "default": True},
            "waitForPodCompletion": waiting,
            "drainSpec": drain,
        },
    }
    listed = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
    status = {"type": "object", "properties": {"conditions": {"type": "array", "items": CONDITION, **listed}}}
    group, plural = MAINTENANCE.split(".", 1)[1], MAINTENANCE.split(".", 1)[0]
    return _definition("NodeMaintenance", group, "v1alpha1", plural, "Namespaced", spec, status)


def _definition(kind: str, group: str, version: str, plural: str, scope: str, spec: Object, status: Object) -> Object:
    schema = {"openAPIV3Schema": {"type": "object", "properties": {"spec": spec, "status": status}}}
    served = {"name": version, "served": True, "storage": True, "subresources": {"status": {}}, "schema": schema}
    names = {"plural": plural, "singular": kind.lower(), "kind": kind, "listKind": f"{kind}List"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {"group": group, "scope": scope, "names": names, "versions": [served]},
    }


def custom(kind: str, name: str, spec: Object) -> Object:
    """An object of a kind."""
    return {"apiVersion": f"{GROUP}/{KINDS[kind][0]}", "kind": kind, "metadata": {"name": name}, "spec": spec}
