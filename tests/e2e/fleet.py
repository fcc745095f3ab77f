"""A fleet of GPU nodes on the real control plane, with drivers that come and go as gpu-operator's do, and replicas of the controller."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.command import Ended, Running, start
from tests.e2e.world import CORDON_TAINT, Object, resource_of
from tests.kube import crds
from tests.kube.controlplane import STRATEGIC, ControlPlane
from tests.kube.kubelet import COMPONENT, DRIVER, GPU, node_manifest
from tests.kube.manifests import CONTROLLER, documents, path
from tests.kube.proxy import ApiProxy
from tests.kube.recorder import Event
from tests.kube.space import is_marked, is_ready

STATE = "nvidia.com/gpu-driver-upgrade-state"
ROLLOUT = "nvidia.com/gpu-driver-manager.rollout"
ACCEPT = "nvidia.com/gpu-driver-manager.accept"
GRANTS = "nvidia.com/gpu-driver-manager.grants"
DRIVER_SET, VALIDATOR_SET = "nvidia-driver-daemonset", "nvidia-operator-validator"
LEASE = "driver-manager-controller"
SIM = "kubelet.sim/"
POLICY: Object = {"autoUpgrade": True, "maxParallelUpgrades": 1, "maxUnavailable": "100%"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lives:
    """How long things take; durations as the simulated kubelet reads them."""

    gpus: int = 1
    """Of each node."""
    grace: int = 1
    """Seconds that a driver pod may take to stop."""
    start_after: str = "500ms"
    """Driver pods: bound -> Ready."""
    stop_after: str = "grace"
    """Driver pods and GPU pods: told to stop -> gone."""
    devices_after: str = "0"
    """Driver Ready -> devices there."""
    have_devices_gaps: bool = True
    """Whether the devices are away while no driver is Ready."""


class GpuFleet:
    """Nodes with a driver and a validator each; what belongs to one test is told apart by its namespace."""

    def __init__(self, control_plane: ControlPlane, namespace: str, folder: Path, nodes: int, **lives: Any) -> None:
        self.cp, self.namespace, self.folder = control_plane, namespace, folder
        self.space, self.sets = f"/api/v1/namespaces/{namespace}", f"/apis/apps/v1/namespaces/{namespace}/daemonsets"
        self.names = [f"{namespace}-n{number:03}" for number in range(nodes)]
        self.lives = Lives(**lives)
        self.gpus = self.lives.gpus
        self.policy = dict(POLICY)
        self.running: list[Running] = []
        self.custom: list[str] = []
        self.user = f"system:serviceaccount:{namespace}:{LEASE}"
        self.cluster_wide = shipped_account(control_plane, namespace)
        self.token = control_plane.service_account_token(namespace, LEASE)
        for name in self.names:
            self.add_node(name)
        self.wait(lambda: not any(node["spec"].get("taints") for node in self.nodes().values()), "the nodes to be schedulable")
        self.add_sets()

    # Objects --------------------------------------------------------------------------------------------------------

    def add_node(self, name: str) -> None:
        """A node without a driver; it goes with the test."""
        labels = {
            "nvidia.com/gpu.present": "true",
            "nvidia.com/gpu.deploy.driver": "true",
            "nvidia.com/gpu.deploy.operator-validator": "true",
            "fleet": self.namespace,
        }
        wishes = {f"{SIM}devices": str(self.gpus), f"{SIM}devices-after": self.lives.devices_after} if self.lives.have_devices_gaps else {}
        made = node_manifest(name, gpus=self.gpus, labels=labels, annotations=wishes)
        if self.lives.have_devices_gaps:
            made["status"]["allocatable"] = {**made["status"]["allocatable"], GPU: "0"}
        self.cp.create("/api/v1/nodes", made)

    def add_sets(self) -> None:
        """The driver's DaemonSet and the validator's, and waits until all of their pods are Ready and the devices are there."""
        self.cp.create(self.sets, self.driver_set())
        validator = _daemon_set(VALIDATOR_SET, self.namespace, "nvidia.com/gpu.deploy.operator-validator", {"app": VALIDATOR_SET}, 1)
        validator["spec"]["template"]["metadata"]["annotations"] = {f"{SIM}needs": DRIVER}
        self.cp.create(self.sets, validator)
        self.wait_whole()

    def driver_set(self, digest: str = "1") -> Object:
        """The driver's DaemonSet as it is made."""
        labels = {"app": DRIVER_SET, COMPONENT: DRIVER}
        made = _daemon_set(DRIVER_SET, self.namespace, "nvidia.com/gpu.deploy.driver", labels, self.lives.grace)
        template = made["spec"]["template"]
        template["metadata"]["annotations"] = {f"{SIM}start-after": self.lives.start_after, f"{SIM}stop-after": self.lives.stop_after}
        template["spec"]["containers"][0]["env"] = [{"name": "DRIVER_CONFIG_DIGEST", "value": digest}]
        return made

    def set_driver(self, digest: str, image: str = "driver:2") -> None:
        """Another template: every driver pod is outdated then."""
        container = {"name": "main", "image": image, "env": [{"name": "DRIVER_CONFIG_DIGEST", "value": digest}]}
        self.cp.patch(f"{self.sets}/{DRIVER_SET}", {"spec": {"template": {"spec": {"containers": [container]}}}}, kind=STRATEGIC)

    def add_training(
        self, replicas: int, *, name: str = "train", node: str = "", grace: int = 1, gpus: int = 1, labels: Mapping[str, str] | None = None
    ) -> None:
        """A Deployment of GPU pods, on one node or on any; waits until all are Ready."""
        container = {"name": "main", "image": "train:1", "resources": {"limits": {GPU: str(gpus)}}}
        spec = {"terminationGracePeriodSeconds": grace, "containers": [container]}
        self.add_deployment(name, replicas, node=node, labels={"job": "train", **(labels or {})}, spec=spec)

    def add_deployment(
        self, name: str, replicas: int = 1, *, node: str = "", labels: Mapping[str, str] | None = None, spec: Object | None = None
    ) -> None:
        """A Deployment of pods, on one node or on any, that ask for no GPU unless `spec` does; waits until all are Ready."""
        where = {"kubernetes.io/hostname": node} if node else {"fleet": self.namespace}
        container = {"name": "main", "image": "none"}
        wanted = {"terminationGracePeriodSeconds": 1, "nodeSelector": where, "containers": [container], **(spec or {})}
        meta = {"labels": {"app": name, **(labels or {})}, "annotations": {f"{SIM}stop-after": self.lives.stop_after}}
        body = {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": name},
            "spec": {"replicas": replicas, "selector": {"matchLabels": {"app": name}}, "template": {"metadata": meta, "spec": wanted}},
        }
        self.cp.create(f"/apis/apps/v1/namespaces/{self.namespace}/deployments", body)
        self.wait_pods(name, replicas)

    def wait(self, probe: Callable[[], Any], what: str, timeout: float = 60.0) -> Any:
        """Asks until the answer is true, not so often that it loads the machine, and gives that answer."""
        return self.cp.wait_for(probe, what, timeout, 0.1)

    def wait_pods(self, app: str, count: int) -> None:
        """Waits until so many pods of an app are Ready and none is on its way out."""

        def are_there() -> bool:
            return [is_ready(pod) and not is_marked(pod) for pod in self.pods(app)] == [True] * count

        self.wait(are_there, f"{count} pods of {app}")

    def add_custom(self, policy: Object, kind: str = "ClusterPolicy", name: str = "") -> str:
        """A custom resource with an upgrade policy; gives its path. It goes with the test."""
        name = name or f"policy-{self.namespace}"
        spec = {"driver": {"upgradePolicy": policy}} if kind == "ClusterPolicy" else {"upgradePolicy": policy}
        self.cp.create(crds.path(kind), crds.custom(kind, name, spec))
        self.custom.append(crds.path(kind, name))
        return self.custom[-1]

    def change(self, name: str, *, labels: Object | None = None, annotations: Object | None = None, cordon: bool | None = None) -> Object:
        """Patches a node, as a person would."""
        spec = {} if cordon is None else {"spec": {"unschedulable": cordon or None}}
        body = {"metadata": {"labels": labels or {}, "annotations": annotations or {}}, **spec}
        got: Object = self.cp.patch(f"/api/v1/nodes/{name}", body)
        return got

    # Looking --------------------------------------------------------------------------------------------------------

    def nodes(self) -> dict[str, Object]:
        """Name -> Node."""
        items = self.cp.get(f"/api/v1/nodes?labelSelector=fleet%3D{self.namespace}")["items"]
        return {item["metadata"]["name"]: item for item in items}

    def devices(self) -> dict[str, str]:
        """Node -> how many GPUs are allocatable."""
        return {name: node["status"]["allocatable"].get(GPU, "") for name, node in self.nodes().items()}

    def states(self) -> dict[str, str]:
        """Node -> its state label."""
        return {name: node["metadata"]["labels"].get(STATE, "") for name, node in self.nodes().items()}

    @staticmethod
    def is_in(event: Event, state: str) -> bool:
        """Whether a recorded node is in a state."""
        return bool(event.object["metadata"]["labels"].get(STATE) == state)

    def rollout(self, name: str) -> Object:
        """The controller's record on a node; empty without one."""
        text = self.nodes()[name]["metadata"].get("annotations", {}).get(ROLLOUT)
        return dict(json.loads(text)) if text else {}

    def pods(self, app: str) -> list[Object]:
        """Pods of the namespace by their label `app`."""
        found: list[Object] = self.cp.get(f"{self.space}/pods?labelSelector=app%3D{app}")["items"]
        return found

    def training(self) -> set[str]:
        """Names of all GPU pods that Deployments made."""
        return {pod["metadata"]["name"] for pod in self.cp.get(f"{self.space}/pods?labelSelector=job%3Dtrain")["items"]}

    def drivers(self) -> dict[str, list[str]]:
        """Node -> uids of its driver pods."""
        found: dict[str, list[str]] = {}
        for pod in self.pods(DRIVER_SET):
            found.setdefault(pod["spec"].get("nodeName", ""), []).append(pod["metadata"]["uid"])
        return found

    def digests(self) -> set[str]:
        """What the driver pods are configured with."""
        return {pod["spec"]["containers"][0]["env"][0]["value"] for pod in self.pods(DRIVER_SET)}

    def surface(self) -> dict[str, Object]:
        """Node -> what of it must be as before, once an upgrade is over."""
        return {
            name: {
                "labels": node["metadata"]["labels"],
                "annotations": {key for key in node["metadata"].get("annotations", {}) if key != ROLLOUT},
                "unschedulable": node["spec"].get("unschedulable", False),
                "taints": [taint for taint in node["spec"].get("taints", []) if taint["key"] != CORDON_TAINT],
                "devices": node["status"]["allocatable"].get(GPU),
            }
            for name, node in self.nodes().items()
        }

    def wait_whole(self) -> None:
        """Waits until every node has its driver, its validator and its devices."""
        for app in (DRIVER_SET, VALIDATOR_SET):
            self.wait_pods(app, len(self.names))
        self.wait(lambda: set(self.devices().values()) == {str(self.gpus)}, "the devices")

    def wait_states(self, wanted: str | Mapping[str, str], timeout: float = 60.0) -> None:
        """Waits until all nodes, or those named, are in a state.

        Raises:
            AssertionError: with the states and the records, when the time is over.
        """
        goal = dict.fromkeys(self.names, wanted) if isinstance(wanted, str) else dict(wanted)
        try:
            self.wait(lambda: goal.items() <= self.states().items(), f"states {goal}", timeout)
        except AssertionError as error:
            records = {name: self.rollout(name) for name in goal if self.states().get(name) != goal[name]}
            raise AssertionError(f"{error}\nstates: {self.states()}\nrecords: {records}\n{self.logs()[-3000:]}") from None

    def events(self, name: str) -> list[tuple[str, str, str]]:
        """Type, reason and message of our Events about a node."""
        path = f"/api/v1/namespaces/default/events?fieldSelector=involvedObject.name%3D{name},source%3Ddriver-manager"
        return [(item["type"], item["reason"], item["message"]) for item in self.cp.get(path)["items"]]

    def audit(self, since: int) -> list[Object]:
        """The controller's requests."""
        return list(self.cp.audit(since, self.user))

    def evicted(self, since: int) -> list[str]:
        """Names of pods whose eviction was accepted, twice where that was so twice. A Deployment never gives a name again."""
        return sorted(
            event["objectRef"]["name"]
            for event in self.audit(since)
            if resource_of(event) == "pods/eviction" and event["responseStatus"]["code"] == 201 and "dryRun" not in event["requestURI"]
        )

    def deleted(self, since: int) -> list[str]:
        """Names of pods whose deletion was accepted."""
        return sorted(
            event["objectRef"]["name"]
            for event in self.audit(since)
            if resource_of(event) == "pods" and event["verb"] == "delete" and event["responseStatus"]["code"] == 200
        )

    def counts(self, since: int) -> Counter[tuple[str, str, int]]:
        """The controller's requests by verb, resource and status."""
        counted: Counter[tuple[str, str, int]] = Counter()
        for (_, verb, what, status), number in self.cp.audit_counts(since, self.user).items():
            counted[verb, what, status] += number
        return counted

    def lease(self) -> Object:
        """The Lease."""
        got: Object = self.cp.get(f"/apis/coordination.k8s.io/v1/namespaces/{self.namespace}/leases/{LEASE}")
        return got

    def wait_leader(self, name: str) -> None:
        """Waits until a replica leads."""
        self.wait(lambda: self.leader() == name, f"{name} to lead")

    def leader(self) -> str:
        """The name of the replica that leads; empty where none does."""
        return str(self.lease()["spec"].get("holderIdentity", "")).removeprefix(f"{LEASE}-")

    # The controller -------------------------------------------------------------------------------------------------

    def start(
        self, *, proxy: ApiProxy | None = None, name: str = "one", by_file: bool = True, settings: Mapping[str, str] | None = None
    ) -> Running:
        """Starts a replica under the shipped account; `settings` are more environment variables."""
        number = len(self.running) + 1
        where = proxy if proxy is not None else self.cp
        env = {
            "KUBECONFIG": str(where.kubeconfig(f"controller-{self.namespace}", self.token)),
            "OPERATOR_NAMESPACE": self.namespace,
            "POD_NAMESPACE": self.namespace,
            "POD_NAME": f"{LEASE}-{name}",
            "NODE_SELECTOR": f"nvidia.com/gpu.present=true,fleet={self.namespace}",
            "LISTEN": "",
            "LOG_FORMAT": "json",
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder),
        }
        if by_file:
            env["POLICY_FILE"] = str(self.folder / "policy.yaml")
            Path(env["POLICY_FILE"]).write_text(json.dumps(self.policy))
        made = start(("controller",), env | dict(settings or {}), self.folder / f"replica-{number}")
        self.running.append(made)
        return made

    def stop(self, replica: Running) -> Ended:
        """Ends a replica as a kubelet would; it gives the Lease up."""
        replica.terminate()
        return replica.wait(30)

    def logs(self) -> str:
        """What all replicas have written."""
        return "\n".join(each.error_text() for each in self.running)

    def remove(self) -> None:
        """Ends the replicas and takes away what is not in the namespace."""
        for each in self.running:
            if each.process.poll() is None:
                each.kill()
        for where in (*self.custom, *self.cluster_wide):
            self.cp.delete(where)
        for name in (VALIDATOR_SET, DRIVER_SET):
            self.cp.delete(f"{self.sets}/{name}")
        self.cp.delete(f"/apis/apps/v1/namespaces/{self.namespace}/deployments")
        self.cp.delete(f"/api/v1/nodes?labelSelector=fleet%3D{self.namespace}")
        self.cp.delete(f"{self.space}/pods?gracePeriodSeconds=0")


def shipped_account(control_plane: ControlPlane, namespace: str, folder: Path = CONTROLLER) -> list[str]:
    """Account and roles of the shipped manifests, with one namespace in place of theirs; gives the paths of what is cluster-wide."""
    paths: list[str] = []
    for shipped in documents(folder):
        if shipped["kind"] not in ("ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"):
            continue
        where = shipped["metadata"].get("namespace", "")
        body: Object = json.loads(json.dumps(shipped).replace('"namespace": "driver-manager"', f'"namespace": "{namespace}"'))
        ending = {"": f"-{namespace}", "gpu-operator": "-operator"}.get(where, "")
        for named in (body["metadata"], body["roleRef"]) if "roleRef" in body else (body["metadata"],):
            named["name"] += ending
        body["metadata"] |= {"namespace": namespace} if where else {}
        control_plane.apply(path(body), body)
        if not where:
            paths.append(path(body))
    token = control_plane.service_account_token(namespace, LEASE)
    probes = ("/api/v1/nodes?limit=1", f"/apis/apps/v1/namespaces/{namespace}/daemonsets?limit=1")
    control_plane.wait_for(
        lambda: all(control_plane.request("GET", probe, token=token).status == 200 for probe in probes), "the shipped roles to work"
    )
    return paths


def _daemon_set(name: str, namespace: str, key: str, labels: Object, grace: int) -> Object:
    spec = {
        "terminationGracePeriodSeconds": grace,
        "nodeSelector": {key: "true", "fleet": namespace},
        "tolerations": [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}],
        "containers": [{"name": "main", "image": f"{name}:1"}],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "selector": {"matchLabels": {"app": name}},
            "updateStrategy": {"type": "OnDelete"},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }
