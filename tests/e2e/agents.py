"""A fleet whose nodes have hosts: a directory tree each, and the installed agent as the init container of every driver pod that comes.

What a kubelet would do with a driver pod is done here for the one part that the simulated kubelet leaves out: the init container is a real
process, begun when the pod is bound, and the pod goes on only when that has ended with 0.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from tests.e2e.command import Ended, Running, start
from tests.e2e.fleet import DRIVER_SET, SIM, GpuFleet
from tests.e2e.gpu_users import cgroup_of
from tests.e2e.world import Object, loaded_host, whereabouts
from tests.host.trees import Tree
from tests.kube import stock
from tests.kube.controlplane import STRATEGIC, ControlPlane
from tests.kube.recorder import Event, Recorder

OPERAND: Final = "device-plugin"
"""The operand that every node runs: a label that the agent pauses and puts back."""
FIRST_PID: Final = 4001
MOST_RESTARTS: Final = 20


class HostFleet(GpuFleet):
    """Nodes with the stock driver DaemonSet, one operand, and a host with a loaded driver.

    The driver pods that are there at first just run. Those of another template hang in their init container until `Agents` lets them on.

    Args:
        control_plane: of the cluster.
        namespace: of all of it.
        folder: for the hosts.
        nodes: how many.
        agent_env: what the init container's environment has besides.
        lives: fields of `Lives`.
    """

    def __init__(
        self, control_plane: ControlPlane, namespace: str, folder: Path, nodes: int, *, agent_env: Mapping[str, str], **lives: Any
    ) -> None:
        self.hosts: dict[str, Tree] = {}
        self.agent_env = agent_env
        super().__init__(control_plane, namespace, folder, nodes, **lives)

    def add_node(self, name: str) -> None:
        """As any, with a host and an operand."""
        super().add_node(name)
        boot = self.cp.get(f"/api/v1/nodes/{name}")["status"]["nodeInfo"]["bootID"]
        self.hosts[name] = loaded_host(self.folder / f"host-{name}", boot_id=boot)
        self.change(name, labels={f"nvidia.com/gpu.deploy.{OPERAND}": "true"})

    def add_sets(self) -> None:
        """Also the account that the driver's pods have, and the operand."""
        stock.account(self.cp, "driver", self.namespace)
        for made in stock.operand_daemon_sets(node_selector={"fleet": self.namespace}):
            if made["metadata"]["name"] == stock.OPERANDS[OPERAND]:
                self.cp.create(self.sets, made)
        super().add_sets()

    def driver_set(self, digest: str = "old") -> Object:
        """The stock one, with the lives of this fleet."""
        wishes = {f"{SIM}start-after": self.lives.start_after, f"{SIM}stop-after": self.lives.stop_after}
        made = stock.driver_daemon_set(digest=digest, env=self.agent_env, node_selector={"fleet": self.namespace}, annotations=wishes)
        made["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = self.lives.grace
        return made

    def set_driver(self, digest: str, image: str = "driver:2") -> None:
        """Another template, whose pods have to have their agent run."""
        env = [{"name": "DRIVER_CONFIG_DIGEST", "value": digest}]
        spec = {
            "initContainers": [{"name": "k8s-driver-manager", "env": env}],
            "containers": [{"name": "nvidia-driver-ctr", "image": image, "env": env}],
        }
        template = {"metadata": {"annotations": {f"{SIM}init-after": "never"}}, "spec": spec}
        self.cp.patch(f"{self.sets}/{DRIVER_SET}", {"spec": {"template": template}}, kind=STRATEGIC)

    def wait_whole(self) -> None:
        """And until every node has its operand."""
        super().wait_whole()
        self.wait_pods(stock.OPERANDS[OPERAND], len(self.names))

    def remove(self) -> None:
        """And what the stock account has cluster-wide."""
        super().remove()
        self.cp.delete(f"{self.sets}/{stock.OPERANDS[OPERAND]}")
        stock.remove_account(self.cp, "driver", self.namespace)


@dataclass(slots=True)
class InitContainer:
    """The agent of one driver pod."""

    pod: Object
    running: Running
    ends: list[Ended] = field(default_factory=list)
    """Of every start of it, oldest first."""

    @property
    def node(self) -> str:
        """Where it runs."""
        return str(self.pod["spec"]["nodeName"])


class Agents:
    """Runs the agents, and the processes of pods, on all hosts of a fleet while it is entered."""

    def __init__(self, fleet: HostFleet) -> None:
        self.fleet = fleet
        self.containers: dict[str, InitContainer] = {}
        """Uid of a driver pod -> its agent."""
        self.ended: dict[str, list[float]] = defaultdict(list)
        """Node -> when processes of pods on it ended, in seconds since the epoch."""
        self._processes: dict[str, tuple[str, int]] = {}
        self._pods: Recorder = fleet.cp.record(f"{fleet.space}/pods")
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="agents", daemon=True)
        self.error: Exception | None = None

    def __enter__(self) -> Self:
        self._pods.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(10)
        self._pods.stop()
        for each in self.containers.values():
            if each.running.process.poll() is None:
                each.running.kill()
        assert self.error is None, self.error
        assert not any(word in self.logs() for word in ("Traceback", "never retrieved", "never awaited")), self.logs()[-4000:]

    def give_process(self, pod: Object, *fds: str) -> int:
        """A process of a pod that has device files open; it ends when its pod is gone from the API. Gives its pid."""
        node, uid = pod["spec"]["nodeName"], pod["metadata"]["uid"]
        pid = FIRST_PID + len(self._processes)
        self.fleet.hosts[node].process(pid, fds=fds or ("/dev/nvidia0",), cgroup=cgroup_of(uid))
        self._processes[uid] = (node, pid)
        return pid

    def logs(self) -> str:
        """What all agents have written."""
        return "\n".join(each.running.error_text() for each in self.containers.values())

    def _work(self) -> None:
        taken = 0
        try:
            while not self._is_over.wait(0.02):
                events = self._pods.events[taken:]
                taken += len(events)
                for event in events:
                    self._take(event)
                for each in self.containers.values():
                    self._look_after(each)
        except Exception as error:  # for the test to see
            self.error = error

    def _take(self, event: Event) -> None:
        if event.kind == "DELETED":
            if (process := self._processes.pop(event.uid, None)) is not None:
                node, pid = process
                self.ended[node].append(time.time())
                self.fleet.hosts[node].end_process(pid)
            return
        meta, spec = event.object["metadata"], event.object["spec"]
        is_held = meta.get("annotations", {}).get(f"{SIM}init-after") == "never"
        if is_held and spec.get("nodeName") and event.uid not in self.containers and meta["labels"].get("app") == DRIVER_SET:
            self.containers[event.uid] = InitContainer(event.object, self._start(event.object, 0))

    def _start(self, pod: Object, restarts: int) -> Running:
        fleet, node, name = self.fleet, pod["spec"]["nodeName"], f"agent-{pod['metadata']['name']}-{restarts}"
        token = fleet.cp.service_account_token(fleet.namespace, "nvidia-driver", pod=pod)
        env = stock.init_environment({"spec": {"template": pod}}, node=node, namespace=fleet.namespace)
        env |= whereabouts(fleet.cp.kubeconfig(name, token), fleet.hosts[node], fleet.folder)
        return start(("uninstall_driver",), env, fleet.folder / name)

    def _look_after(self, container: InitContainer) -> None:
        """Where it has ended: the pod goes on after a 0, and it is begun again after anything else."""
        if container.running.process.poll() is None or (container.ends and container.ends[-1].code == 0):
            return
        container.ends.append(container.running.wait())
        name = container.pod["metadata"]["name"]
        if container.ends[-1].code == 0:
            body = {"metadata": {"uid": container.pod["metadata"]["uid"], "annotations": {f"{SIM}init-after": "0"}}}
            self.fleet.cp.patch(f"{self.fleet.space}/pods/{name}", body)
        else:
            assert len(container.ends) <= MOST_RESTARTS, f"the agent of {name} does not come to its end"
            container.running = self._start(container.pod, len(container.ends))
