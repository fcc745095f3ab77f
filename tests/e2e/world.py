"""One GPU node as the stock operator leaves it, on the real control plane, with a directory tree as its host, and the installed command."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shutil
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.e2e.command import ENDS, Ended, Running, start
from tests.host.trees import Tree
from tests.kube import stock
from tests.kube.controlplane import MERGE, ControlPlane, Response
from tests.kube.kubelet import node_manifest
from tests.kube.proxy import ApiProxy

Object = dict[str, Any]
BOOT_ID = "11111111-2222-3333-4444-555555555555"
RECORD = "nvidia.com/gpu-driver-manager.record"
STATUS = "nvidia.com/gpu-driver-manager.status"
CORDON_TAINT = "node.kubernetes.io/unschedulable"
PAUSED = "paused-for-driver-upgrade"
UPGRADE_ENABLED = "nvidia.com/gpu-driver-upgrade-enabled"
UPGRADE_REQUESTED = "nvidia.com/gpu-driver-upgrade-requested"
REVIEWS = {"selfsubjectrulesreviews", "selfsubjectaccessreviews"}
READS = {"get", "list", "watch"}


def loaded_host(root: Path, *, boot_id: str = BOOT_ID, digest: str | None = "old") -> Tree:
    """A host with the driver loaded by a driver container: modules, driver root, state file, markers, pid file."""
    tree = Tree(root)
    tree.module("nvidia_uvm")
    tree.module("nvidia_modeset")
    tree.module("nvidia", holders=["nvidia_uvm", "nvidia_modeset"])
    tree.mounts("/run/nvidia/driver")
    tree.file("proc/sys/kernel/random/boot_id", f"{boot_id}\n")
    tree.file("proc/sys/kernel/osrelease", "6.1.0-test\n")
    tree.file("run/nvidia/nvidia-driver.pid", "4711\n")
    if digest is not None:
        tree.file("run/nvidia/nvidia-driver.state", f"{digest}\n")
    for marker in ("driver-ready", "toolkit-ready", ".driver-ctr-ready", "somebody-elses"):
        tree.file(f"run/nvidia/validations/{marker}", "")
    return tree


def empty_host(root: Path, *, boot_id: str = BOOT_ID) -> Tree:
    """A host without any driver, as after a reboot."""
    tree = Tree(root)
    tree.mounts()
    tree.file("proc/modules", "")
    tree.file("proc/sys/kernel/random/boot_id", f"{boot_id}\n")
    tree.file("proc/sys/kernel/osrelease", "6.1.0-test\n")
    (root / "sys/module").mkdir(parents=True)
    return tree


class StockNode:
    """A node of its own with the stock objects in a namespace of its own."""

    def __init__(self, control_plane: ControlPlane, namespace: str, folder: Path, *, gpus: int = 64, pods: int = 250) -> None:
        self.cp, self.namespace, self.folder = control_plane, namespace, folder
        self.name = f"gpu-{namespace}"
        self.path = f"/api/v1/nodes/{self.name}"
        self.tree = loaded_host(folder / "host")
        self.driver: Object = {}
        self.kind: stock.Kind = "driver"
        self.running: list[Running] = []
        self.neighbours: list[str] = []
        self.space = f"/api/v1/namespaces/{namespace}"
        labels = {**stock.OPERAND_LABELS, "nvidia.com/gpu.deploy.driver": "true", "space": namespace, "pool": namespace}
        control_plane.create("/api/v1/nodes", node_manifest(self.name, gpus=gpus, pods=pods, labels=labels))
        control_plane.wait_for(lambda: not self.node()["spec"].get("taints"), f"node {self.name} to be schedulable")

    # Objects --------------------------------------------------------------------------------------------------------

    def add_driver(self, kind: stock.Kind = "driver", *, grace_seconds: int | None = None, **options: Any) -> Object:
        """The driver's DaemonSet, its pod held in its init container as while this program runs; gives the DaemonSet."""
        self.kind = kind
        stock.account(self.cp, kind, self.namespace)
        if kind != "driver":
            self.change({"metadata": {"labels": {**dict.fromkeys(stock.DRIVER_LABELS["driver"]), **stock.DRIVER_LABELS[kind]}}})
        options.setdefault("annotations", {"kubelet.sim/init-after": "never"})
        self.driver = stock.driver_daemon_set(kind, node_selector={"space": self.namespace}, **options)
        if grace_seconds is not None:
            self.driver["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = grace_seconds
        self.cp.create(f"/apis/apps/v1/namespaces/{self.namespace}/daemonsets", self.driver)
        self.cp.wait_for(self.driver_pods, "the driver's pod")
        return self.driver

    def add_operands(self, grace_seconds: int = 1, stop_after: str = "grace", only: Collection[str] = tuple(stock.OPERANDS)) -> None:
        """The operands as DaemonSets; each pod takes all of its grace to end unless told otherwise."""
        apps = [stock.OPERANDS[operand] for operand in only]
        for made in stock.operand_daemon_sets(node_selector={"space": self.namespace}, grace_seconds=grace_seconds):
            if made["metadata"]["name"] in apps:
                made["spec"]["template"]["metadata"]["annotations"] = {"kubelet.sim/stop-after": stop_after}
                self.cp.create(f"/apis/apps/v1/namespaces/{self.namespace}/daemonsets", made)
        self.cp.wait_for(lambda: len(self.ready_pods(apps)) == len(apps), "the operands")

    def add_training(
        self, replicas: int = 20, *, name: str = "train", stop_after: str = "grace", timeout: float = 20.0, **options: Any
    ) -> None:
        """A Deployment of GPU pods; waits until all are Ready."""
        made = stock.training(
            replicas, name=name, node_selector={"space": self.namespace}, annotations={"kubelet.sim/stop-after": stop_after}, **options
        )
        self.cp.create(f"/apis/apps/v1/namespaces/{self.namespace}/deployments", made)
        self.cp.wait_for(lambda: len(self.ready_pods([name])) == replicas, f"{replicas} pods of {name}", timeout)

    def add_budget(self, app: str, min_available: int, *, name: str = "", **spec: Any) -> str:
        """A budget for the pods of one app, with its status; gives its path."""
        path = f"/apis/policy/v1/namespaces/{self.namespace}/poddisruptionbudgets"
        name = name or f"{app}-budget"
        wanted = {"minAvailable": min_available, "selector": {"matchLabels": {"app": app}}, **spec}
        self.cp.create(path, {"metadata": {"name": name}, "spec": wanted})
        self.cp.wait_for(lambda: self.cp.get(f"{path}/{name}").get("status", {}).get("observedGeneration"), "the budget's status")
        return f"{path}/{name}"

    def add_pod(self, name: str, *, gpus: int = 0, is_ready: bool = True, annotations: Object | None = None, **spec: Any) -> Object:
        """A bare pod on the node; gives it."""
        container: Object = {"name": "main", "image": "none"} | ({"resources": {"limits": {"nvidia.com/gpu": str(gpus)}}} if gpus else {})
        body = {
            "metadata": {"name": name, "labels": {"app": name}, "annotations": annotations or {}},
            "spec": {
                "terminationGracePeriodSeconds": 1,
                "nodeSelector": {"kubernetes.io/hostname": self.name},
                "containers": [container],
                **spec,
            },
        }
        made: Object = self.cp.create(f"{self.space}/pods", body)
        if is_ready:
            self.cp.wait_for(lambda: self.ready_pods([name]), f"the pod {name}")
        return made

    def add_neighbour(self) -> str:
        """Another node of the same pool, where no operand and no driver runs; gives its name."""
        name = f"{self.name}-{len(self.neighbours) + 2}"
        self.neighbours.append(name)
        self.cp.create("/api/v1/nodes", node_manifest(name, gpus=64, labels={"pool": self.namespace}))
        self.cp.wait_for(lambda: not self.cp.get(f"/api/v1/nodes/{name}")["spec"].get("taints"), f"node {name} to be schedulable")
        return name

    def change(self, body: Object) -> Object:
        """Patches the node, as a person would."""
        got: Object = self.cp.patch(self.path, body)
        return got

    def annotate(self, **annotations: str | None) -> None:
        """Sets annotations of the node; their names are values of this module's constants."""
        self.change({"metadata": {"annotations": annotations}})

    def evict(self, name: str) -> Response:
        """Evicts a pod, as another controller would."""
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": self.namespace}}
        return self.cp.request("POST", f"{self.space}/pods/{name}/eviction", body)

    # Looking --------------------------------------------------------------------------------------------------------

    def node(self) -> Object:
        """The Node."""
        found: Object = self.cp.get(self.path)
        return found

    def surface(self) -> Object:
        """What of the node must be exactly as before (decision 11)."""
        node = self.node()
        return {
            "labels": node["metadata"]["labels"],
            "annotations": {key: value for key, value in node["metadata"].get("annotations", {}).items() if key != STATUS},
            "unschedulable": node["spec"].get("unschedulable", False),
            "taints": [taint for taint in node["spec"].get("taints", []) if taint["key"] != CORDON_TAINT],
        }

    def annotation(self, key: str) -> Any:
        """An annotation's JSON, None without it."""
        text = self.node()["metadata"].get("annotations", {}).get(key)
        return json.loads(text) if text else None

    def pods(self, selector: str = "") -> list[Object]:
        """The namespace's pods on this node."""
        query = f"fieldSelector=spec.nodeName%3D{self.name}" + (f"&labelSelector={selector}" if selector else "")
        found: list[Object] = self.cp.get(f"/api/v1/namespaces/{self.namespace}/pods?{query}")["items"]
        return found

    def ready_pods(self, apps: Sequence[str]) -> list[Object]:
        """Those of these apps that are Ready and not on their way out."""
        return [
            pod
            for pod in self.pods()
            if pod["metadata"]["labels"].get("app") in apps
            and "deletionTimestamp" not in pod["metadata"]
            and any(each["type"] == "Ready" and each["status"] == "True" for each in pod["status"].get("conditions", []))
        ]

    def driver_pods(self) -> list[Object]:
        """The pods of the driver's DaemonSet here."""
        return self.pods(f"app={self.driver['metadata']['name']}")

    def uids(self, app: str) -> dict[str, str]:
        """Name -> uid of an app's pods in the namespace, on any node or none."""
        found = self.cp.get(f"{self.space}/pods?labelSelector=app%3D{app}")["items"]
        return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in found}

    def wait_surface(self, before: Object) -> None:
        """Waits the moment that the cluster's own controllers take, then compares the node with how it was.

        Raises:
            AssertionError: something of it differs.
        """
        with contextlib.suppress(AssertionError):
            self.cp.wait_for(lambda: self.surface() == before and not self.is_marked_cordoned(), "the node to be as before", 3.0)
        assert self.surface() == before
        assert not self.is_marked_cordoned() or before["unschedulable"]

    def is_marked_cordoned(self) -> bool:
        """Whether the node carries the lifecycle controller's own sign of a cordon."""
        return any(taint["key"] == CORDON_TAINT for taint in self.node()["spec"].get("taints", []))

    @property
    def account(self) -> str:
        """The driver's service account, as the audit log names it."""
        return f"system:serviceaccount:{self.namespace}:nvidia-{self.kind}"

    def audit(self, since: int) -> list[Object]:
        """The driver account's requests."""
        return list(self.cp.audit(since, self.account))

    def writes(self, since: int) -> list[str]:
        """What the driver account changed, or tried to: verb and resource; dry runs and questions about permissions are none."""
        return [
            f"{event['verb']} {resource_of(event)}"
            for event in self.audit(since)
            if event["verb"] not in READS and event["objectRef"]["resource"] not in REVIEWS and "dryRun" not in event["requestURI"]
        ]

    def eviction_tries(self, since: int, *, dry: bool = False) -> list[Object]:
        """Every eviction that the driver account asked for, whatever the answer, oldest first."""
        return [
            event
            for event in self.audit(since)
            if resource_of(event) == "pods/eviction" and event["verb"] == "create" and ("dryRun" in event["requestURI"]) == dry
        ]

    def evictions(self, since: int, *, dry: bool = False) -> list[Object]:
        """Those that were accepted."""
        return [event for event in self.eviction_tries(since, dry=dry) if event.get("responseStatus", {}).get("code") == 201]

    def evicted(self, since: int) -> list[str]:
        """The names of the pods whose eviction was accepted, sorted, twice where it was accepted twice."""
        return sorted(event["objectRef"]["name"] for event in self.evictions(since))

    def last_deleted(self, since: int, names: Collection[str]) -> float:
        """When the API server was told of the last of these pods that it is gone: seconds since the epoch, by the machine's one clock."""
        deletions = [
            event["requestReceivedTimestamp"]
            for event in self.cp.audit(since)
            if event["verb"] == "delete" and event["objectRef"]["resource"] == "pods" and event["objectRef"].get("name") in names
        ]
        return datetime.datetime.fromisoformat(max(deletions)).timestamp()

    def requests(self, since: int) -> Counter[tuple[str, str, int]]:
        """The driver account's requests by verb, resource and status, evictions and their dry runs aside."""
        counted: Counter[tuple[str, str, int]] = Counter()
        for (_, verb, what, status), number in self.cp.audit_counts(since, self.account).items():
            if what != "pods/eviction":
                counted[verb, what, status] += number
        return counted

    # The command ----------------------------------------------------------------------------------------------------

    def environment(self, *, proxy: ApiProxy | None = None, token: str | None = None, **changes: str | None) -> dict[str, str]:
        """The environment of the stock init container, and where cluster and host are."""
        env = stock.init_environment(self.driver, node=self.name, namespace=self.namespace) if self.driver else {"NODE_NAME": self.name}
        if token is None:
            (pod, *_) = self.driver_pods()
            token = self.cp.service_account_token(self.namespace, f"nvidia-{self.kind}", pod=pod)
        where = proxy if proxy is not None else self.cp
        env |= whereabouts(where.kubeconfig(f"driver-{self.namespace}-{len(self.running)}", token), self.tree, self.folder)
        for key, value in changes.items():
            if value is None:
                env.pop(key, None)
            else:
                env[key] = value
        return env

    def start(self, *words: str, env: Mapping[str, str] | None = None, **changes: Any) -> Running:
        """Starts the installed command; its environment is the stock one with changes, or `env` as it is."""
        environment = env if env is not None else self.environment(**changes)
        made = start(words, environment, self.folder / f"run-{len(self.running) + 1}")
        self.running.append(made)
        return made

    def run(self, *words: str, timeout: float = ENDS, **changes: Any) -> Ended:
        """Runs the installed command to its end; without words, the one of the init container."""
        return self.start(*(words or ("uninstall_driver",)), **changes).wait(timeout)

    def wait_held(self, call: str, timeout: float = 30.0) -> Object:
        """Waits until a call on the host tree stops at a `hold` of its faults; gives that call."""
        mark = self.tree.root / "held.json"

        def held() -> Object | None:
            with contextlib.suppress(OSError, ValueError):
                found: Object = json.loads(mark.read_text())
                return found if found["call"] == call else None
            return None

        got: Object = self.cp.wait_for(held, f"{call} to be held", timeout)
        return got

    def reload_host(self, **options: Any) -> Tree:
        """A fresh host with the driver loaded, as after the new driver came up."""
        shutil.rmtree(self.tree.root)
        self.tree = loaded_host(self.folder / "host", **options)
        return self.tree

    def remove(self) -> None:
        """Ends what still runs, and takes away what is not in the namespace."""
        for each in self.running:
            if each.process.poll() is None:
                each.kill()
        for name in (self.name, *self.neighbours):
            self.cp.delete(f"/api/v1/nodes/{name}")
        for pod in self.cp.get(f"{self.space}/pods")["items"]:
            path = f"{self.space}/pods/{pod['metadata']['name']}"
            if pod["metadata"].get("finalizers"):
                self.cp.request("PATCH", path, {"metadata": {"finalizers": None}}, content_type=MERGE)
            self.cp.delete(f"{path}?gracePeriodSeconds=0")
        if self.driver:
            stock.remove_account(self.cp, self.kind, self.namespace)


def whereabouts(kubeconfig: Path, tree: Tree, home: Path) -> dict[str, str]:
    """The environment that tells the installed command where cluster and host are."""
    here = {"KUBECONFIG": str(kubeconfig), "DRIVER_MANAGER_HOST_TREE": str(tree.root)}
    return here | {"LOG_FORMAT": "json", "PATH": os.environ["PATH"], "HOME": str(home)}


def resource_of(event: Object) -> str:
    """The resource of an audit event, with its subresource."""
    ref = event.get("objectRef") or {}
    return "/".join(filter(None, (ref.get("resource"), ref.get("subresource"))))


def stamp(text: str) -> float:
    """Seconds since the epoch of a time as the API and its audit log write it."""
    return datetime.datetime.fromisoformat(text).timestamp()
