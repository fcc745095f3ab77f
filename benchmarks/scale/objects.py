"""Objects of a fleet as bytes, as large as real ones: what changes is encoded anew, all else is the same bytes for all."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from driver_manager import names

NAMESPACE: Final = "gpu-operator"
NODE_BYTES: Final = 13_700
"""As measured on nodes with GPUs: many labels, annotations and images."""
POD_BYTES: Final = 8_000
SET_BYTES: Final = 12_000
DIGEST: Final = "DRIVER_CONFIG_DIGEST"
MADE: Final = "2026-01-01T00:00:00Z"

encode: Final = msgspec.json.encode


def padding(size: int) -> bytes:
    """A value of metadata.managedFields of about so many bytes: small fields, as real ones have."""
    labels: dict[str, Any] = {"f:app.kubernetes.io/component": {}, "f:controller-revision-hash": {}}
    entry = encode({"f:metadata": {"f:labels": labels, "f:ownerReferences": {}}})
    entries = b",".join([entry] * max(1, size // (len(entry) + 1)))
    return b'"managedFields":[' + entries + b"]"


def _features() -> dict[str, str]:
    """Labels as node feature discovery and GPU feature discovery make them."""
    cpu = {f"feature.node.kubernetes.io/cpu-cpuid.AVX512FEATURE{number}": "true" for number in range(50)}
    gpu = {f"nvidia.com/gpu.property{number}": f"value-{number}" for number in range(25)}
    return cpu | gpu | {"nvidia.com/gpu.present": "true", names.DEPLOY_DRIVER: "true", "nvidia.com/gpu.deploy.operator-validator": "true"}


LABELS: Final = _features()
ANNOTATIONS: Final = {
    "nfd.node.kubernetes.io/feature-labels": ",".join(key.rpartition("/")[2] for key in LABELS),
    "kubeadm.alpha.kubernetes.io/cri-socket": "unix:///run/containerd/containerd.sock",
    "volumes.kubernetes.io/controller-managed-attach-detach": "true",
}
_QUANTITIES: Final = {"cpu": "128", "memory": "2113444Ki", "nvidia.com/gpu": "8", "pods": "110", "ephemeral-storage": "1843Gi"}


def _node_status() -> bytes:
    kinds = ("MemoryPressure", "DiskPressure", "PIDPressure", "NetworkUnavailable", "Ready")
    about = {"lastHeartbeatTime": MADE, "lastTransitionTime": MADE, "reason": "KubeletIsWell", "message": "kubelet is posting its status"}
    names_of_images = [f"registry.example.com/team/image-{number}@sha256:{number:064x}" for number in range(26)]
    images = [{"names": [name], "sizeBytes": 123456789} for name in names_of_images]
    status = {
        "conditions": [{"type": kind, "status": "True" if kind == "Ready" else "False", **about} for kind in kinds],
        "allocatable": _QUANTITIES,
        "capacity": _QUANTITIES,
        "nodeInfo": {"bootID": "c0ffee", "kernelVersion": "6.8.0", "kubeletVersion": "v1.37.0", "osImage": "Linux"},
        "images": images,
    }
    return encode(status)


_STATUS: Final = _node_status()


@dataclass(slots=True)
class Node:
    """A Node, with what the script does with it."""

    name: str
    version: int = 1
    labels: dict[str, str] = field(default_factory=dict)
    """Beside LABELS."""
    annotations: dict[str, str] = field(default_factory=dict)
    unschedulable: bool = False
    generation: int = 1
    """Of its driver pod, and of its validator's."""
    user_gone: int = 0
    """The version at which its GPU pod was gone; 0: it runs."""

    @property
    def state(self) -> str:
        """Of its upgrade."""
        return self.labels.get(names.UPGRADE_STATE, "")

    def patch(self, body: dict[str, Any]) -> None:
        """A merge patch, of what the controller may change."""
        meta, spec = body.get("metadata", {}), body.get("spec", {})
        for old, new in ((self.labels, meta.get("labels", {})), (self.annotations, meta.get("annotations", {}))):
            for key, value in new.items():
                if value is None:
                    old.pop(key, None)
                else:
                    old[key] = value
        if "unschedulable" in spec:
            self.unschedulable = bool(spec["unschedulable"])

    def body(self) -> bytes:
        """As the API gives it."""
        own = {"kubernetes.io/hostname": self.name, "nvidia.com/gfd.timestamp": str(1_700_000_000 + hash(self.name) % 10_000)}
        meta = {
            "name": self.name,
            "uid": f"node-{self.name}",
            "resourceVersion": str(self.version),
            "creationTimestamp": MADE,
            "labels": {**LABELS, **own, **self.labels},
            "annotations": {**ANNOTATIONS, **self.annotations},
        }
        spec: dict[str, Any] = {"providerID": f"example://{self.name}"}
        if self.unschedulable:
            spec["unschedulable"] = True
        parts = (b'{"apiVersion":"v1","kind":"Node","metadata":', encode(meta)[:-1], b",", _NODE_PADDING, b'},"spec":', encode(spec))
        return b"".join((*parts, b',"status":', _STATUS, b"}"))


_NODE_PADDING: bytes = padding(200)
_NODE_PADDING = padding(NODE_BYTES - len(Node("gpu-0001").body()))


@dataclass(slots=True)
class Pod:
    """A driver's or a validator's pod."""

    kind: str
    """`driver` or `validator`."""
    node_name: str
    number: int
    """The how manieth it is on its node."""
    revision: int
    version: int = 1
    phase: str = "Running"
    is_ready: bool = True
    is_terminating: bool = False

    @property
    def name(self) -> str:
        """Of the pod."""
        return f"{self.kind}-{self.node_name}-{self.number}"

    def body(self) -> bytes:
        """As the API gives it."""
        component, app = ("nvidia-driver", names.DRIVER_APP) if self.kind == "driver" else ("validator", names.VALIDATOR_APP)
        meta = {
            "name": self.name,
            "namespace": NAMESPACE,
            "uid": f"uid-{self.name}",
            "resourceVersion": str(self.version),
            "creationTimestamp": MADE,
            "labels": {names.COMPONENT_LABEL: component, "app": app, names.REVISION_HASH: f"template-{self.revision}"},
            "ownerReferences": [{"kind": "DaemonSet", "name": app, "uid": f"set-{self.kind}", "controller": True}],
        }
        if self.is_terminating:
            meta["deletionTimestamp"] = MADE
        spec = {"nodeName": self.node_name, "containers": [{"name": "main", "env": [{"name": DIGEST, "value": f"digest-{self.revision}"}]}]}
        containers = [{"name": "main", "ready": self.is_ready, "restartCount": 0, "state": {"running": {"startedAt": MADE}}}]
        rest = encode({"spec": spec, "status": {"phase": self.phase, "containerStatuses": containers}})
        return b"".join((b'{"metadata":', encode(meta)[:-1], b",", _POD_PADDING, b"},", rest[1:]))


_POD_PADDING: Final = padding(POD_BYTES - 900)


def daemon_set(kind: str, generation: int, version: int, ready: int) -> bytes:
    """A DaemonSet with its status."""
    app = names.DRIVER_APP if kind == "driver" else names.VALIDATOR_APP
    meta = {
        "name": app,
        "namespace": NAMESPACE,
        "uid": f"set-{kind}",
        "resourceVersion": str(version),
        "generation": generation,
        "labels": {"app": app},
    }
    labels = {"app": app, names.COMPONENT_LABEL: "nvidia-driver" if kind == "driver" else "validator"}
    selector = {names.DEPLOY_DRIVER: "true"} if kind == "driver" else {"nvidia.com/gpu.deploy.operator-validator": "true"}
    spec = {"updateStrategy": {"type": "OnDelete"}, "template": {"metadata": {"labels": labels}, "spec": {"nodeSelector": selector}}}
    rest = encode({"spec": spec, "status": {"observedGeneration": generation, "numberReady": ready}})
    return b"".join((b'{"metadata":', encode(meta)[:-1], b",", _SET_PADDING, b"},", rest[1:]))


_SET_PADDING: Final = padding(SET_BYTES - 900)


def revision(kind: str, number: int, version: int) -> bytes:
    """A ControllerRevision."""
    owner = {"kind": "DaemonSet", "name": kind, "uid": f"set-{kind}", "controller": True}
    labels = {names.REVISION_HASH: f"template-{number}"}
    meta = {"name": f"{kind}-{number}", "namespace": NAMESPACE, "uid": f"revision-{kind}-{number}", "resourceVersion": str(version)}
    container = {"name": "main", "env": [{"name": DIGEST, "value": f"digest-{number}"}]}
    data = {"spec": {"template": {"spec": {"containers": [container]}}}}
    return encode({"metadata": {**meta, "labels": labels, "ownerReferences": [owner]}, "revision": number, "data": data})


def cluster_policy(policy: dict[str, Any], version: int) -> bytes:
    """A ClusterPolicy."""
    meta = {"name": "cluster-policy", "uid": "cluster-policy", "resourceVersion": str(version), "generation": version}
    spec = {"driver": {"enabled": True, "upgradePolicy": policy}}
    return encode({"metadata": {**meta, "creationTimestamp": MADE}, "spec": spec, "status": {"state": "ready"}})


def others_on(node_name: str) -> list[bytes]:
    """Pods of a node that no upgrade takes off: operands, agents, the network."""
    pods = []
    for number in range(18):
        owner = {"kind": "DaemonSet", "name": f"agent-{number}", "uid": f"agent-{number}", "controller": True}
        name = f"agent-{number}-{node_name}"
        meta = {"name": name, "namespace": "kube-system", "uid": name, "resourceVersion": "1"}
        body = encode({"metadata": {**meta, "labels": {"app": f"agent-{number}"}, "ownerReferences": [owner]}})
        rest = encode({"spec": {"nodeName": node_name, "containers": [{"name": "main"}]}, "status": {"phase": "Running"}})
        pods.append(b"".join((body[:-2], b",", _OTHER_PADDING, b"},", rest[1:])))
    return pods


_OTHER_PADDING: Final = padding(5_000)


def user_of(node_name: str, version: int) -> bytes:
    """A pod that uses the GPUs of a node."""
    owner = {"kind": "ReplicaSet", "name": "training", "uid": "training", "controller": True}
    meta = {"name": f"training-{node_name}", "namespace": "default", "uid": f"training-{node_name}", "resourceVersion": str(version)}
    container = {"name": "main", "resources": {"limits": {"nvidia.com/gpu": "8"}, "requests": {"nvidia.com/gpu": "8"}}}
    spec = {"nodeName": node_name, "containers": [container], "terminationGracePeriodSeconds": 30}
    return encode({"metadata": {**meta, "ownerReferences": [owner]}, "spec": spec, "status": {"phase": "Running"}})
