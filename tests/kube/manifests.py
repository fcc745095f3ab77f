"""The manifests of deploy/, applied as they are: what `kubectl apply -f FOLDER` does, for the control plane of the tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml  # type: ignore[import-untyped,unused-ignore]

from tests.kube.controlplane import ControlPlane

Object = dict[str, Any]
DEPLOY = Path(__file__).parents[2] / "deploy"
CONTROLLER = DEPLOY / "controller"
MAINTENANCE = DEPLOY / "controller-maintenance"
TEMPLATES = DEPLOY / "controller-templates"
PARKING = DEPLOY / "parking"
PLURALS = {
    "ClusterRole": "clusterroles",
    "ClusterRoleBinding": "clusterrolebindings",
    "Deployment": "deployments",
    "MutatingAdmissionPolicy": "mutatingadmissionpolicies",
    "MutatingAdmissionPolicyBinding": "mutatingadmissionpolicybindings",
    "Namespace": "namespaces",
    "PodDisruptionBudget": "poddisruptionbudgets",
    "Role": "roles",
    "RoleBinding": "rolebindings",
    "Service": "services",
    "ServiceAccount": "serviceaccounts",
    "ValidatingAdmissionPolicy": "validatingadmissionpolicies",
    "ValidatingAdmissionPolicyBinding": "validatingadmissionpolicybindings",
}


def documents(folder: Path) -> list[Object]:
    """All objects of a folder, in the order of its files' names."""
    return [found for file in sorted(folder.glob("*.yaml")) for found in yaml.safe_load_all(file.read_text()) if found]


def path(body: Object) -> str:
    """Where the API has an object."""
    version, meta = body["apiVersion"], body["metadata"]
    base = f"/apis/{version}" if "/" in version else f"/api/{version}"
    space = f"/namespaces/{meta['namespace']}" if "namespace" in meta else ""
    return f"{base}{space}/{PLURALS[body['kind']]}/{meta['name']}"


class Applied:
    """The objects of a folder in a cluster, while it is entered.

    Args:
        control_plane: of the cluster.
        folder: with the manifests.
        leave_out: kinds that are not applied.
    """

    def __init__(self, control_plane: ControlPlane, folder: Path, leave_out: Sequence[str] = ()) -> None:
        self.cp = control_plane
        self.objects = [body for body in documents(folder) if body["kind"] not in leave_out]

    def __enter__(self) -> Applied:
        for body in self.objects:
            self.cp.apply(path(body), body)
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for body in reversed(self.objects):
            self.cp.delete(path(body))
        for where in [path(body) for body in self.objects if body["kind"] == "Namespace"]:
            self._wait_gone(where)

    def _wait_gone(self, where: str) -> None:
        self.cp.wait_for(lambda: not self.cp.exists(where), f"{where} to be gone", timeout=60)
