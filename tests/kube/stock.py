"""The cluster as the stock operator leaves it: roles, driver DaemonSets and operands, as people run them today.

Written from what was measured and read of the stock manifests; the names here are upstream's contract, on purpose
not imported from driver_manager: a test must notice when ours drift.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tests.kube.controlplane import ControlPlane

Object = dict[str, Any]
Kind = Literal["driver", "vgpu-manager", "vfio-manager"]
KINDS: tuple[Kind, ...] = ("driver", "vgpu-manager", "vfio-manager")
NAMESPACE = "gpu-operator"
RBAC = "/apis/rbac.authorization.k8s.io/v1"

_PODS = [
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]},
    {"apiGroups": [""], "resources": ["pods/eviction"], "verbs": ["create"]},
    {"apiGroups": ["config.openshift.io"], "resources": ["clusterversions"], "verbs": ["get", "list"]},
]
_NODES = {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list", "watch", "patch"]}
_DAEMON_SETS = {"apiGroups": ["apps"], "resources": ["daemonsets"], "verbs": ["get"]}
_CLAIMS = {"apiGroups": ["resource.k8s.io"], "resources": ["resourceclaims"], "verbs": ["get", "list"]}

RULES: Mapping[Kind, list[Object]] = {
    "driver": [{**_NODES, "verbs": ["get", "list", "watch", "patch", "update"]}, *_PODS, _CLAIMS, _DAEMON_SETS],
    "vgpu-manager": [_NODES, *_PODS, _DAEMON_SETS],
    "vfio-manager": [_NODES, *_PODS],
}
"""The ClusterRole of each of the three service accounts."""

OPERANDS: Mapping[str, str] = {
    "operator-validator": "nvidia-operator-validator",
    "container-toolkit": "nvidia-container-toolkit-daemonset",
    "device-plugin": "nvidia-device-plugin-daemonset",
    "gpu-feature-discovery": "gpu-feature-discovery",
    "dcgm-exporter": "nvidia-dcgm-exporter",
    "dcgm": "nvidia-dcgm",
    "dcgm-exporter-dra": "nvidia-dcgm-exporter-dra",
    "dcgm-dra": "nvidia-dcgm-dra",
    "mig-manager": "nvidia-mig-manager",
    "sandbox-validator": "nvidia-sandbox-validator",
    "sandbox-device-plugin": "nvidia-sandbox-device-plugin-daemonset",
    "vgpu-device-manager": "nvidia-vgpu-device-manager",
}
"""The twelve operands of the measured workload: the end of the deploy label's key -> the pod label `app`."""

OPERAND_LABELS: Mapping[str, str] = {f"nvidia.com/gpu.deploy.{operand}": "true" for operand in OPERANDS}
"""The labels of a node that all twelve run on."""


@dataclass(frozen=True, slots=True)
class _Flavour:
    """What differs between the three DaemonSets."""

    deploy_key: str
    name: str
    component: str
    host_pid: bool
    grace_seconds: int
    update: str


_FLAVOURS: Mapping[Kind, _Flavour] = {
    "driver": _Flavour("nvidia.com/gpu.deploy.driver", "nvidia-driver-daemonset", "nvidia-driver", True, 30, "OnDelete"),
    "vgpu-manager": _Flavour(
        "nvidia.com/gpu.deploy.vgpu-manager",
        "nvidia-vgpu-manager-daemonset",
        "nvidia-vgpu-manager",
        True,
        120,
        "RollingUpdate",
    ),
    "vfio-manager": _Flavour(
        "nvidia.com/gpu.deploy.vfio-manager",
        "nvidia-vfio-manager",
        "nvidia-vfio-manager",
        False,
        30,
        "RollingUpdate",
    ),
}

DRIVER_LABELS: Mapping[Kind, Mapping[str, str]] = {kind: {_FLAVOURS[kind].deploy_key: "true"} for kind in KINDS}
"""The node label that calls for each of the three DaemonSets."""


def account(control_plane: ControlPlane, kind: Kind = "driver", namespace: str = NAMESPACE) -> str:
    """Makes the service account with exactly its stock ClusterRole; gives the account's name."""
    name, role = f"nvidia-{kind}", f"nvidia-{kind}-{namespace}"
    control_plane.apply(
        f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}",
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}},
    )
    version = "rbac.authorization.k8s.io/v1"
    control_plane.apply(
        f"{RBAC}/clusterroles/{role}",
        {"apiVersion": version, "kind": "ClusterRole", "metadata": {"name": role}, "rules": RULES[kind]},
    )
    binding = {
        "apiVersion": version,
        "kind": "ClusterRoleBinding",
        "metadata": {"name": role},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": namespace}],
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
    }
    control_plane.apply(f"{RBAC}/clusterrolebindings/{role}", binding)
    _wait_until_it_works(control_plane, namespace, name)
    return name


def remove_account(control_plane: ControlPlane, kind: Kind = "driver", namespace: str = NAMESPACE) -> None:
    """Removes the cluster-wide half of an account; the other goes with its namespace."""
    for plural in ("clusterrolebindings", "clusterroles"):
        control_plane.delete(f"{RBAC}/{plural}/nvidia-{kind}-{namespace}")


def _wait_until_it_works(control_plane: ControlPlane, namespace: str, name: str) -> None:
    """A new binding is seen by the authorizer some milliseconds later."""
    token = control_plane.service_account_token(namespace, name)
    control_plane.wait_for(
        lambda: control_plane.request("GET", "/api/v1/nodes?limit=1", token=token).status == 200,
        f"the role of {namespace}/{name} to work",
    )


def driver_daemon_set(
    kind: Kind = "driver",
    *,
    name: str | None = None,
    digest: str = "1234567890",
    env: Mapping[str, str | None] | None = None,
    tolerations: list[Object] | None = None,
    node_selector: Mapping[str, str] | None = None,
    rdma: bool = False,
    image: str = "driver:1",
    annotations: Mapping[str, str] | None = None,
) -> Object:
    """The DaemonSet that installs the driver, with this project's program as its init container.

    Args:
        kind: which of the three.
        name: of the DaemonSet and value of its pods' `app` label; the stock one if not given.
        digest: what the operator gives as DRIVER_CONFIG_DIGEST; the driver DaemonSet alone carries it.
        env: added to the init container's environment by name; None takes a name away.
        tolerations: replace the stock one, as ClusterPolicy's do.
        node_selector: added to the deploy label.
        rdma: with the two variables of GPUDirect RDMA.
        image: of the driver container; another one is a template change.
        annotations: of the pods, for the simulated kubelet.
    """
    flavour = _FLAVOURS[kind]
    app = name or flavour.name
    labels = {"app": app, "app.kubernetes.io/component": flavour.component}
    spec: Object = {
        "serviceAccountName": f"nvidia-{kind}",
        "priorityClassName": "system-node-critical",
        "terminationGracePeriodSeconds": flavour.grace_seconds,
        "nodeSelector": {flavour.deploy_key: "true", **(node_selector or {})},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}] if tolerations is None else tolerations,
        "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [_one_per_node(flavour)]}},
        "initContainers": [_init_container(kind, _environment(kind, digest, rdma, env or {}))],
        "containers": [_driver_container(kind, image, digest)],
        "volumes": _volumes(kind),
    }
    if flavour.host_pid:
        spec["hostPID"] = True
    if kind == "vgpu-manager":
        spec["hostIPC"] = True
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": app, "labels": labels},
        "spec": {
            "selector": {"matchLabels": {"app": app}},
            "updateStrategy": {"type": flavour.update},
            "template": {"metadata": {"labels": labels, "annotations": dict(annotations or {})}, "spec": spec},
        },
    }


def init_environment(daemon_set: Mapping[str, Any], *, node: str, namespace: str = NAMESPACE) -> dict[str, str]:
    """The environment of a DaemonSet's init container on one node, as the kubelet would resolve it."""
    fields = {"spec.nodeName": node, "metadata.namespace": namespace}
    found: dict[str, str] = {}
    for entry in daemon_set["spec"]["template"]["spec"]["initContainers"][0]["env"]:
        source = entry.get("valueFrom")
        found[entry["name"]] = fields[source["fieldRef"]["fieldPath"]] if source else entry.get("value", "")
    return found


def operand_daemon_sets(*, node_selector: Mapping[str, str] | None = None, grace_seconds: int = 1) -> list[Object]:
    """The twelve operand DaemonSets of the measured workload, each drawn by its deploy label."""
    made = []
    for operand, app in OPERANDS.items():
        selector = {f"nvidia.com/gpu.deploy.{operand}": "true", **(node_selector or {})}
        spec = {
            "terminationGracePeriodSeconds": grace_seconds,
            "nodeSelector": selector,
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
            "priorityClassName": "system-node-critical",
            "containers": [{"name": app, "image": "operand:1"}],
        }
        made.append(
            {
                "apiVersion": "apps/v1",
                "kind": "DaemonSet",
                "metadata": {"name": app, "labels": {"app": app}},
                "spec": {
                    "selector": {"matchLabels": {"app": app}},
                    "template": {"metadata": {"labels": {"app": app}}, "spec": spec},
                },
            }
        )
    return made


def training(
    replicas: int = 20,
    *,
    name: str = "train",
    gpus: int = 1,
    grace_seconds: int = 2,
    node_selector: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
) -> Object:
    """The Deployment of GPU pods of the measured workload."""
    container = {"name": "main", "image": "train:1", "resources": {"limits": {"nvidia.com/gpu": str(gpus)}}}
    template = {
        "metadata": {"labels": {"app": name}, "annotations": dict(annotations or {})},
        "spec": {
            "terminationGracePeriodSeconds": grace_seconds,
            "nodeSelector": dict(node_selector or {}),
            "containers": [container],
        },
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {"replicas": replicas, "selector": {"matchLabels": {"app": name}}, "template": template},
    }


def _one_per_node(flavour: _Flavour) -> Object:
    term = {"key": "app.kubernetes.io/component", "operator": "In", "values": [flavour.component]}
    return {"labelSelector": {"matchExpressions": [term]}, "topologyKey": "kubernetes.io/hostname"}


def _environment(kind: Kind, digest: str, rdma: bool, changes: Mapping[str, str | None]) -> list[Object]:
    values: dict[str, str | None] = {"NVIDIA_VISIBLE_DEVICES": "void"}
    if kind == "driver":
        values |= {
            "ENABLE_GPU_POD_EVICTION": "true",
            "ENABLE_AUTO_DRAIN": "false",
            "DRAIN_USE_FORCE": "false",
            "DRAIN_POD_SELECTOR_LABEL": "",
            "DRAIN_TIMEOUT_SECONDS": "0s",
            "DRAIN_DELETE_EMPTYDIR_DATA": "false",
            "DRIVER_CONFIG_DIGEST": digest,
        }
        if rdma:
            values |= {"GPU_DIRECT_RDMA_ENABLED": "true", "USE_HOST_MOFED": "true"}
    else:
        values |= {"ENABLE_GPU_POD_EVICTION": "false", "ENABLE_AUTO_DRAIN": "false"}
    values |= changes
    made = [
        {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {"name": "OPERATOR_NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}},
    ]
    made = [entry for entry in made if entry["name"] not in changes]
    return made + [{"name": name, "value": value} for name, value in values.items() if value is not None]


def _init_container(kind: Kind, env: list[Object]) -> Object:
    mounts: list[Object] = [
        {"name": "run-nvidia", "mountPath": "/run/nvidia", "mountPropagation": "Bidirectional"},
        {"name": "host-root", "mountPath": "/host", "readOnly": True, "mountPropagation": "HostToContainer"},
        {"name": "host-sys", "mountPath": "/sys"},
    ]
    if kind == "driver":
        mellanox = {"name": "run-mellanox-drivers", "mountPath": "/run/mellanox/drivers"}
        mounts.append({**mellanox, "mountPropagation": "HostToContainer"})
    return {
        "name": "k8s-driver-manager",
        "image": "driver-manager:test",
        "command": ["driver-manager"],
        "args": ["uninstall_driver"],
        "env": env,
        "securityContext": {"privileged": True},
        "volumeMounts": mounts,
    }


def _driver_container(kind: Kind, image: str, digest: str) -> Object:
    name = {
        "driver": "nvidia-driver-ctr",
        "vgpu-manager": "nvidia-vgpu-manager-ctr",
        "vfio-manager": "nvidia-vfio-manager",
    }
    env = [{"name": "DRIVER_CONFIG_DIGEST", "value": digest}] if kind == "driver" else []
    mount = {"name": "run-nvidia", "mountPath": "/run/nvidia", "mountPropagation": "Bidirectional"}
    return {
        "name": name[kind],
        "image": image,
        "env": env,
        "securityContext": {"privileged": True},
        "volumeMounts": [mount],
    }


def _volumes(kind: Kind) -> list[Object]:
    made = [
        {"name": "run-nvidia", "hostPath": {"path": "/run/nvidia", "type": "DirectoryOrCreate"}},
        {"name": "host-root", "hostPath": {"path": "/"}},
        {"name": "host-sys", "hostPath": {"path": "/sys", "type": "Directory"}},
    ]
    if kind == "driver":
        mellanox = {"path": "/run/mellanox/drivers", "type": "DirectoryOrCreate"}
        made.append({"name": "run-mellanox-drivers", "hostPath": mellanox})
    return made
