"""One GPU node as the stock operator leaves it, on the real control plane, with a directory tree as its host, and the installed command."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.host.trees import Tree
from tests.kube import stock
from tests.kube.controlplane import ControlPlane
from tests.kube.kubelet import node_manifest
from tests.kube.proxy import ApiProxy

Object = dict[str, Any]
BOOT_ID = "11111111-2222-3333-4444-555555555555"
RECORD = "nvidia.com/gpu-driver-manager.record"
STATUS = "nvidia.com/gpu-driver-manager.status"
CORDON_TAINT = "node.kubernetes.io/unschedulable"
COMMAND = Path(sys.executable).with_name("driver-manager")


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


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str
    wall: float

    @property
    def lines(self) -> list[Object]:
        """Its log lines, where they are JSON."""
        return [json.loads(line) for line in self.err.splitlines() if line.startswith("{")]

    def document(self) -> Any:
        """What it printed, as JSON."""
        return json.loads(self.out)


@dataclass(slots=True)
class Running:
    """A command that was started."""

    process: subprocess.Popen[bytes]
    folder: Path
    began: float = field(default_factory=time.monotonic)

    def kill(self) -> None:
        """SIGKILL, and waits for the end."""
        self.process.kill()
        self.process.wait(10)

    def terminate(self) -> None:
        """SIGTERM."""
        self.process.send_signal(signal.SIGTERM)

    def wait(self, timeout: float = 60.0) -> Ended:
        """Its end.

        Raises:
            AssertionError: it did not end in time; it is killed then.
        """
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the command did not end within {timeout} s:\n{self.error_text()[-4000:]}") from None
        wall = time.monotonic() - self.began
        return Ended(code, (self.folder / "out").read_text(), self.error_text(), wall)

    def error_text(self) -> str:
        """What it has written to standard error so far."""
        return (self.folder / "err").read_text()


class StockNode:
    """A node of its own with the stock objects in a namespace of its own."""

    def __init__(self, control_plane: ControlPlane, namespace: str, folder: Path, *, gpus: int = 64) -> None:
        self.cp, self.namespace, self.folder = control_plane, namespace, folder
        self.name = f"gpu-{namespace}"
        self.path = f"/api/v1/nodes/{self.name}"
        self.tree = loaded_host(folder / "host")
        self.driver: Object = {}
        self.runs = 0
        labels = {**stock.OPERAND_LABELS, "nvidia.com/gpu.deploy.driver": "true", "space": namespace}
        control_plane.create("/api/v1/nodes", node_manifest(self.name, gpus=gpus, labels=labels))
        control_plane.wait_for(lambda: not self.node()["spec"].get("taints"), f"node {self.name} to be schedulable")

    # Objects --------------------------------------------------------------------------------------------------------

    def add_driver(self, **options: Any) -> Object:
        """The driver's DaemonSet, its pod held in its init container as while this program runs; gives the DaemonSet."""
        stock.account(self.cp, "driver", self.namespace)
        options.setdefault("annotations", {"kubelet.sim/init-after": "never"})
        self.driver = stock.driver_daemon_set(node_selector={"space": self.namespace}, **options)
        self.cp.create(f"/apis/apps/v1/namespaces/{self.namespace}/daemonsets", self.driver)
        self.cp.wait_for(lambda: self.pods("app=nvidia-driver-daemonset"), "the driver's pod")
        return self.driver

    def add_operands(self, grace_seconds: int = 1, stop_after: str = "grace") -> None:
        """The twelve operands as DaemonSets; each pod takes all of its grace to end unless told otherwise."""
        for made in stock.operand_daemon_sets(node_selector={"space": self.namespace}, grace_seconds=grace_seconds):
            made["spec"]["template"]["metadata"]["annotations"] = {"kubelet.sim/stop-after": stop_after}
            self.cp.create(f"/apis/apps/v1/namespaces/{self.namespace}/daemonsets", made)
        self.cp.wait_for(lambda: len(self.ready_pods(list(stock.OPERANDS.values()))) == len(stock.OPERANDS), "the operands")

    def add_training(self, replicas: int = 20, *, name: str = "train", stop_after: str = "grace", **options: Any) -> None:
        """A Deployment of GPU pods."""
        made = stock.training(
            replicas, name=name, node_selector={"space": self.namespace}, annotations={"kubelet.sim/stop-after": stop_after}, **options
        )
        self.cp.create(f"/apis/apps/v1/namespaces/{self.namespace}/deployments", made)
        self.cp.wait_for(lambda: len(self.ready_pods([name])) == replicas, f"{replicas} pods of {name}")

    def add_budget(self, app: str, min_available: int) -> None:
        """A budget for the pods of one app, with its status."""
        path = f"/apis/policy/v1/namespaces/{self.namespace}/poddisruptionbudgets"
        spec = {"minAvailable": min_available, "selector": {"matchLabels": {"app": app}}}
        self.cp.create(path, {"metadata": {"name": f"{app}-budget"}, "spec": spec})
        self.cp.wait_for(lambda: self.cp.get(f"{path}/{app}-budget").get("status", {}).get("observedGeneration"), "the budget's status")

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

    def evictions(self, since: int, *, dry: bool = False) -> list[Object]:
        """Accepted evictions in this namespace, from the audit log."""
        return [
            event
            for event in self.cp.audit(since)
            if event["verb"] == "create"
            and event.get("objectRef", {}).get("subresource") == "eviction"
            and event["objectRef"].get("namespace") == self.namespace
            and ("dryRun" in event["requestURI"]) == dry
            and event.get("responseStatus", {}).get("code") == 201
        ]

    def requests(self, since: int) -> Counter[tuple[str, str, int]]:
        """The driver account's requests by verb, resource and status, evictions and their dry runs aside."""
        account = f"system:serviceaccount:{self.namespace}:nvidia-driver"
        counted: Counter[tuple[str, str, int]] = Counter()
        for (_, verb, what, status), number in self.cp.audit_counts(since, account).items():
            if what != "pods/eviction":
                counted[verb, what, status] += number
        return counted

    # The command ----------------------------------------------------------------------------------------------------

    def environment(self, *, proxy: ApiProxy | None = None, token: str | None = None, **changes: str | None) -> dict[str, str]:
        """The environment of the stock init container, and where cluster and host are."""
        env = stock.init_environment(self.driver, node=self.name, namespace=self.namespace) if self.driver else {"NODE_NAME": self.name}
        if token is None:
            (pod, *_) = self.pods("app=nvidia-driver-daemonset")
            token = self.cp.service_account_token(self.namespace, "nvidia-driver", pod=pod)
        where = proxy if proxy is not None else self.cp
        kubeconfig = where.kubeconfig(f"driver-{self.namespace}-{self.runs}", token)
        env |= {"KUBECONFIG": str(kubeconfig), "DRIVER_MANAGER_HOST_TREE": str(self.tree.root), "LOG_FORMAT": "json"}
        env |= {"PATH": os.environ["PATH"], "HOME": str(self.folder)}
        for key, value in changes.items():
            if value is None:
                env.pop(key, None)
            else:
                env[key] = value
        return env

    def start(self, *words: str, env: Mapping[str, str] | None = None, **changes: Any) -> Running:
        """Starts the installed command; its environment is the stock one with changes, or `env` as it is."""
        self.runs += 1
        folder = self.folder / f"run-{self.runs}"
        folder.mkdir()
        environment = dict(env) if env is not None else self.environment(**changes)
        with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
            process = subprocess.Popen([COMMAND, *words], env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
        return Running(process, folder)

    def run(self, *words: str, timeout: float = 60.0, **changes: Any) -> Ended:
        """Runs the installed command to its end."""
        return self.start(*words, **changes).wait(timeout)

    def reload_host(self, **options: Any) -> Tree:
        """A fresh host with the driver loaded, as after the new driver came up."""
        shutil.rmtree(self.tree.root)
        self.tree = loaded_host(self.folder / "host", **options)
        return self.tree

    def remove(self) -> None:
        """Takes away what is not in the namespace."""
        self.cp.delete(self.path)
        for pod in self.pods():
            self.cp.delete(f"/api/v1/namespaces/{self.namespace}/pods/{pod['metadata']['name']}?gracePeriodSeconds=0")
        if self.driver:
            stock.remove_account(self.cp, "driver", self.namespace)
