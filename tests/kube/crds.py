"""The custom resources of gpu-operator, as far as the controller reads and writes them: the status is as strict as the stock one."""

from __future__ import annotations

from typing import Any

Object = dict[str, Any]
GROUP = "nvidia.com"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
KINDS = {"ClusterPolicy": ("v1", "clusterpolicies"), "NVIDIADriver": ("v1alpha1", "nvidiadrivers")}
"""Kind -> version and plural."""


def path(kind: str, name: str = "") -> str:
    """Of all objects of a kind, or of one."""
    version, plural = KINDS[kind]
    return f"/apis/{GROUP}/{version}/{plural}" + (f"/{name}" if name else "")


def crd(kind: str) -> Object:
    """The definition: any spec, and a status that needs a state and has conditions."""
    version, plural = KINDS[kind]
    text = {"type": "string"}
    condition = {
        "type": "object",
        "required": ["lastTransitionTime", "message", "reason", "status", "type"],
        "properties": {
            "lastTransitionTime": {"type": "string", "format": "date-time"},
            "message": {"type": "string", "maxLength": 32768},
            "observedGeneration": {"type": "integer", "format": "int64", "minimum": 0},
            "reason": {"type": "string", "minLength": 1, "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
            "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
            "type": text,
        },
    }
    state = {"type": "string", "enum": ["ignored", "ready", "notReady", "disabled"]}
    status = {
        "type": "object",
        "required": ["state"],
        "properties": {"state": state, "namespace": text, "conditions": {"type": "array", "items": condition}},
    }
    spec = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    schema = {"openAPIV3Schema": {"type": "object", "properties": {"spec": spec, "status": status}}}
    served = {"name": version, "served": True, "storage": True, "subresources": {"status": {}}, "schema": schema}
    names = {"plural": plural, "singular": kind.lower(), "kind": kind, "listKind": f"{kind}List"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {"group": GROUP, "scope": "Cluster", "names": names, "versions": [served]},
    }


def custom(kind: str, name: str, spec: Object) -> Object:
    """An object of a kind."""
    return {"apiVersion": f"{GROUP}/{KINDS[kind][0]}", "kind": kind, "metadata": {"name": name}, "spec": spec}
