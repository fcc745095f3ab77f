"""Whoever uses the driver on a StockNode in whichever way, and the bystanders beside them."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, ClassVar, Self

from tests.e2e.world import Object, StockNode
from tests.kube.controlplane import MERGE, STRATEGIC
from tests.kube.recorder import Event, Recorder
from tests.kube.space import daemon_set, deployment

DRA = "/apis/resource.k8s.io/v1"
RUNTIME_CLASSES = "/apis/node.k8s.io/v1/runtimeclasses"
GPU_DRIVER, DOMAIN_DRIVER = "gpu.nvidia.com", "compute-domain.nvidia.com"
MIRROR: Object = {"kubernetes.io/config.mirror": "abc", "kubernetes.io/config.hash": "abc", "kubernetes.io/config.source": "file"}
TOLERATES_ALL: list[Object] = [{"operator": "Exists"}]
PLUGIN_PATHS = ("/var/lib/kubelet/plugins_registry", "/var/lib/kubelet/plugins", "/run/nvidia/driver")


class GpuUsers:
    """Makes pods of every kind on one node, and takes away what of it is not in the namespace."""

    def __init__(self, node: StockNode) -> None:
        self.node, self.cp = node, node.cp
        self.names: list[str] = []
        """Of all workloads made here: also the label `app` of their pods."""
        self._made: list[str] = []

    # Workloads ------------------------------------------------------------------------------------------------------

    def deployment(self, name: str, *, labels: Object | None = None, annotations: Object | None = None, **spec: Any) -> None:
        """A Deployment of one pod on the node; a CPU pod unless `spec` says more."""
        self._workload("deployments", deployment(name, 1), labels or {}, annotations or {}, spec)

    def daemon_set(self, name: str, *, labels: Object | None = None, annotations: Object | None = None, **spec: Any) -> None:
        """A DaemonSet on the node; a CPU pod unless `spec` says more."""
        self._workload("daemonsets", daemon_set(name), labels or {}, annotations or {}, spec)

    def _workload(self, plural: str, body: Object, labels: Object, annotations: Object, spec: Object) -> None:
        name = body["metadata"]["name"]
        body["spec"].pop("updateStrategy", None)
        template = body["spec"]["template"]
        template["metadata"] = {"labels": {"app": name, **labels}, "annotations": annotations}
        selector = {"space": self.node.namespace, **spec.pop("nodeSelector", {})}
        template["spec"] |= {"terminationGracePeriodSeconds": 1, **spec, "nodeSelector": selector}
        self.cp.create(f"/apis/apps/v1/namespaces/{self.node.namespace}/{plural}", body)
        self.names.append(name)

    def pod(self, app: str) -> Object:
        """The only pod of an app that is ready."""
        (found,) = self.node.ready_pods([app])
        return found

    def wait(self, *apps: str, timeout: float = 30.0) -> None:
        """Waits until these apps, by default all, have a ready pod each."""
        wanted = set(apps or self.names)

        def missing() -> set[str]:
            return wanted - {pod["metadata"]["labels"]["app"] for pod in self.node.ready_pods(list(wanted))}

        self.cp.wait_for(lambda: not missing(), f"pods of {sorted(wanted)}", timeout)

    def mirror_pod(self, name: str, gpus: int = 0) -> None:
        """A static pod's mirror, as a kubelet makes it."""
        uid = self.node.node()["metadata"]["uid"]
        owner = {"apiVersion": "v1", "kind": "Node", "name": self.node.name, "uid": uid, "controller": True}
        body = {
            "metadata": {"name": name, "labels": {"app": name}, "annotations": MIRROR, "ownerReferences": [owner]},
            "spec": {
                "nodeName": self.node.name,
                "containers": [asks(amount=gpus) if gpus else {"name": "main", "image": "none"}],
                "tolerations": [{"operator": "Exists", "effect": "NoExecute"}],
            },
        }
        self.cp.create(f"{self.node.space}/pods", body)
        self.names.append(name)

    def dra_plugin(self, name: str = "nvidia-dra-driver-kubelet-plugin", **spec: Any) -> None:
        """The DRA kubelet plugin as a DaemonSet: as the operator has it with a deploy label in `nodeSelector`, else as standalone."""
        containers = [{"name": each, "image": "none"} for each in ("compute-domains", "gpus")]
        labels = {"nvidia-dra-driver-gpu-component": "kubelet-plugin"}
        self.daemon_set(name, labels=labels, containers=containers, volumes=host_paths(*PLUGIN_PATHS), **spec)

    # What is cluster-wide -------------------------------------------------------------------------------------------

    def label_node(self, **labels: str | None) -> None:
        """Labels of the node."""
        self.node.change({"metadata": {"labels": labels}})

    def capacity(self, **amounts: int) -> None:
        """More resources of the node, as a device plugin announces them."""
        size = {name: str(amount) for name, amount in amounts.items()}
        status = {"status": {"capacity": size, "allocatable": size}}
        self.cp.patch(f"{self.node.path}/status", status, kind=STRATEGIC)

    def create(self, collection: str, body: Object) -> None:
        """An object that goes with the test."""
        self.cp.create(collection, body)
        self._made.append(f"{collection}/{body['metadata']['name']}")

    def runtime_class(self, name: str, handler: str) -> None:
        """A RuntimeClass."""
        self.create(RUNTIME_CLASSES, {"metadata": {"name": name}, "handler": handler})

    def publish(self, driver: str = GPU_DRIVER, *, devices: int = 8, extended: str | None = None) -> str:
        """A device class and the node's slice of a DRA driver; gives the name of the class."""
        number = len(self._made)
        name = f"{self.node.namespace}-{number}"
        expression = f'device.driver == "{driver}" && device.attributes["{driver}"].space == "{name}"'
        spec: Object = {"selectors": [{"cel": {"expression": expression}}]} | ({"extendedResourceName": extended} if extended else {})
        self.create(f"{DRA}/deviceclasses", {"metadata": {"name": name}, "spec": spec})
        found = [{"name": f"device-{count}", "attributes": {"space": {"string": name}}} for count in range(devices)]
        pool = {"name": name, "generation": 1, "resourceSliceCount": 1}
        slice_ = {"driver": driver, "nodeName": self.node.name, "pool": pool, "devices": found}
        self.create(f"{DRA}/resourceslices", {"metadata": {"name": name}, "spec": slice_})
        return name

    def allow_admin_access(self) -> None:
        """Lets claims of the namespace ask for admin access."""
        self.cp.patch(self.node.space, {"metadata": {"labels": {"resource.kubernetes.io/admin-access": "true"}}})

    def claim(self, name: str, device_class: str, **exactly: Any) -> Object:
        """A claim with a name of its own; gives what a pod's spec needs to use it."""
        path = f"{DRA}/namespaces/{self.node.namespace}/resourceclaims"
        self.cp.create(path, {"metadata": {"name": name}, "spec": claim_spec(device_class, **exactly)})
        return claiming(resourceClaimName=name)

    def template(self, name: str, device_class: str, **exactly: Any) -> Object:
        """A template that gives each pod a claim; gives what a pod's spec needs to use it."""
        path = f"{DRA}/namespaces/{self.node.namespace}/resourceclaimtemplates"
        self.cp.create(path, {"metadata": {"name": name}, "spec": {"spec": claim_spec(device_class, **exactly)}})
        return claiming(resourceClaimTemplateName=name)

    def forbid(self, resource: str) -> None:
        """Takes the right to one resource out of the driver's role, and waits until the server knows."""
        role = f"/apis/rbac.authorization.k8s.io/v1/clusterroles/nvidia-{self.node.kind}-{self.node.namespace}"
        rules = [rule for rule in self.cp.get(role)["rules"] if resource not in rule["resources"]]
        self.cp.patch(role, {"rules": rules})
        self._wait_for_right(f"{DRA}/namespaces/default/{resource}", 403)

    def permit(self, group: str, resource: str, *verbs: str) -> None:
        """Adds a right to the driver's role, and waits until the server knows."""
        role = f"/apis/rbac.authorization.k8s.io/v1/clusterroles/nvidia-{self.node.kind}-{self.node.namespace}"
        rule = {"apiGroups": [group], "resources": [resource], "verbs": list(verbs)}
        self.cp.patch(role, {"rules": [*self.cp.get(role)["rules"], rule]})
        self._wait_for_right(f"/apis/{group}/v1/{resource}", 200)

    def _wait_for_right(self, path: str, status: int) -> None:
        token = self.cp.service_account_token(self.node.namespace, f"nvidia-{self.node.kind}")
        self.cp.wait_for(lambda: self.cp.request("GET", path, token=token).status == status, f"{path} to answer {status}")

    def remove(self) -> None:
        """Takes away what is not in the namespace, the newest first."""
        for path in reversed(self._made):
            self.cp.delete(path)


class Processes:
    """Processes of pods in the host's tree; each ends when its pod is gone from the API, as a kubelet sees to it."""

    def __init__(self, node: StockNode) -> None:
        self._node = node
        self._pods: Recorder = node.cp.record(f"{node.space}/pods")
        self._is_over = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        self._pods.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(5)
        self._pods.stop()

    def hold(self, pid: int, pod: Object, *, fds: Sequence[str] = ("/dev/nvidia0",), comm: str = "train") -> None:
        """A process of a pod that holds devices."""
        uid = pod["metadata"]["uid"]
        self._node.tree.process(pid, fds=fds, cgroup=cgroup_of(uid), comm=comm)
        thread = threading.Thread(target=self._follow, args=(pid, uid), name=f"process {pid}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _follow(self, pid: int, uid: str) -> None:
        def is_gone(event: Event) -> bool:
            return self._is_over.is_set() or (event.kind == "DELETED" and event.uid == uid)

        try:
            self._pods.wait_for(is_gone, f"the pod of process {pid} to go", timeout=90)
        except AssertionError:
            return
        if not self._is_over.is_set():
            end_process(self._node, pid)


class Unpreparing:
    """Lets pods with claims end only while the DRA plugin is there to take their devices back, as a kubelet does.

    The pods are told to hang in Terminating (`HANGS`); one that is marked is let go when a plugin's pod is there that is not marked itself.
    """

    HANGS: ClassVar[Object] = {"kubelet.sim/stop-after": "never"}

    def __init__(self, node: StockNode, plugin: str) -> None:
        self._node, self._plugin = node, plugin
        self.pods: Recorder = node.cp.record(f"{node.space}/pods", f"fieldSelector=spec.nodeName%3D{node.name}")
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="unpreparing", daemon=True)

    def __enter__(self) -> Self:
        self.pods.__enter__()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._is_over.set()
        self._thread.join(5)
        self.pods.stop()

    def _work(self) -> None:
        let_go: set[str] = set()

        def is_due(event: Event) -> bool:
            annotations = event.object["metadata"].get("annotations", {})
            is_held = annotations.get("kubelet.sim/stop-after") == "never" and "deletionTimestamp" in event.object["metadata"]
            return self._is_over.is_set() or (event.kind != "DELETED" and is_held and event.uid not in let_go)

        while not self._is_over.is_set():
            try:
                event = self.pods.wait_for(is_due, timeout=1.0)
            except AssertionError:
                continue
            if self._is_over.is_set():
                return
            let_go.add(event.uid)
            if self._node.ready_pods([self._plugin]):
                body = {"metadata": {"uid": event.uid, "annotations": {"kubelet.sim/stop-after": None}}}
                self._node.cp.request("PATCH", f"{self._node.space}/pods/{event.name}", body, content_type=MERGE)


def happened(pods: Recorder) -> list[tuple[int, str, str]]:
    """What happened to pods, in the server's order: its version, `marked` or `gone`, and the label `app`."""
    found: list[tuple[int, str, str]] = []
    marked: set[str] = set()
    for event in pods.until_now():
        meta = event.object["metadata"]
        at = (int(meta["resourceVersion"]), meta["labels"].get("app", ""))
        if "deletionTimestamp" in meta and event.uid not in marked:
            marked.add(event.uid)
            found.append((at[0], "marked", at[1]))
        if event.kind == "DELETED":
            found.append((at[0], "gone", at[1]))
    return sorted(found)


def end_process(node: StockNode, pid: int) -> None:
    """A process of the host ends: its folder goes all at once."""
    node.tree.end_process(pid)


def cgroup_of(uid: str, layout: str = "systemd") -> str:
    """The text of a process's cgroup file in a pod."""
    if layout == "cgroupfs":
        return f"0::/kubepods/burstable/pod{uid}/0123456789abcdef\n"
    slice_ = f"kubepods-burstable-pod{uid.replace('-', '_')}.slice"
    return f"0::/kubepods.slice/kubepods-burstable.slice/{slice_}/cri-containerd-0123456789abcdef.scope\n"


def asks(resource: str = "nvidia.com/gpu", amount: int = 1, *, name: str = "main", restart: str = "") -> Object:
    """A container with a limit; with `restart` an init container that goes on running."""
    limits = {resource: str(amount)}
    return {"name": name, "image": "none", "resources": {"limits": limits}} | ({"restartPolicy": restart} if restart else {})


def host_paths(*paths: str) -> list[Object]:
    """Volumes of the host."""
    return [{"name": f"host-{number}", "hostPath": {"path": path}} for number, path in enumerate(paths)]


def requires(key: str, operator: str = "In", *values: str) -> Object:
    """A required node affinity for one label."""
    term = {"matchExpressions": [{"key": key, "operator": operator} | ({"values": list(values)} if values else {})]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}}


def claim_spec(device_class: str, **exactly: Any) -> Object:
    """The spec of a claim for one device."""
    return {"devices": {"requests": [{"name": "device", "exactly": {"deviceClassName": device_class, **exactly}}]}}


def claiming(**source: str) -> Object:
    """What the spec of a pod needs to use a claim."""
    container = {"name": "main", "image": "none", "resources": {"claims": [{"name": "device"}]}}
    return {"containers": [container], "resourceClaims": [{"name": "device", **source}]}


def verdicts_by_app(node: StockNode, plan: Mapping[str, Any]) -> dict[str, Object]:
    """App label -> the verdict that a plan gives for its only pod."""
    apps = {pod["metadata"]["uid"]: pod["metadata"]["labels"].get("app", pod["metadata"]["name"]) for pod in node.pods()}
    return {apps[each["uid"]]: each for each in plan["verdicts"] if each["uid"] in apps}
