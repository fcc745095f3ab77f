"""`driver-manager controller` and `status --all` as installed, on the real control plane, with the manifests as they are shipped."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import socket
import struct
import subprocess
import termios
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from driver_manager.names import COMPONENT_LABEL, DEPLOY_DRIVER, UPGRADE_STATE
from tests.e2e.command import COMMAND, Ended, Running, start
from tests.kube import crds, space
from tests.kube.controlplane import STRATEGIC, ControlPlane
from tests.kube.fixtures import NodeFactory, make_namespace
from tests.kube.manifests import CONTROLLER, Applied

pytestmark = pytest.mark.kube
Object = dict[str, Any]
OPERATOR = "/apis/apps/v1/namespaces/gpu-operator/daemonsets"
SPACE = "/api/v1/namespaces/gpu-operator"
DRIVER = "nvidia-driver-daemonset"
NAME = "driver-manager-controller"
LEASE = f"/apis/coordination.k8s.io/v1/namespaces/driver-manager/leases/{NAME}"
USER = f"system:serviceaccount:driver-manager:{NAME}"
POLICY = {"autoUpgrade": True, "maxParallelUpgrades": 1, "maxUnavailable": "100%"}


class Installed:
    """A small fleet with its driver, and the controller's manifests."""

    def __init__(self, control_plane: ControlPlane, nodes: list[str], folder: Path) -> None:
        self.cp, self.nodes, self.folder = control_plane, nodes, folder
        self.running: list[Running] = []
        self.token = control_plane.service_account_token("driver-manager", NAME)

    def run(self, *words: str, token: str | None = None, **env: str) -> Running:
        """Starts a command, as admin or with a token."""
        config = self.cp.kubeconfig(f"run-{len(self.running)}", token) if token else self.cp.kubeconfig()
        environment = {"PATH": os.environ["PATH"], "KUBECONFIG": str(config), "LOG_FORMAT": "json", **env}
        made = start(words, environment, self.folder / f"run-{len(self.running)}")
        self.running.append(made)
        return made

    def lead(self, name: str, *words: str) -> tuple[Running, str]:
        """Starts a replica with the shipped account; gives it and its address."""
        address = f"127.0.0.1:{free_port()}"
        env = {"POD_NAME": name, "POD_NAMESPACE": "driver-manager", "LISTEN": address}
        made = self.run("controller", *words, token=self.token, **env)
        self.cp.wait_for(lambda: ask(address, "/healthz")[0] == 200, f"replica {name} to answer")
        return made, address

    def status(self, *words: str) -> Ended:
        return self.run("status", "--all", *words).wait()

    def states(self) -> list[str]:
        return [self.cp.get(f"/api/v1/nodes/{name}")["metadata"]["labels"].get(UPGRADE_STATE, "") for name in self.nodes]

    def hashes(self) -> set[str]:
        pods = self.cp.get(f"/api/v1/namespaces/gpu-operator/pods?labelSelector=app%3D{DRIVER}")["items"]
        return {pod["metadata"]["labels"]["controller-revision-hash"] for pod in pods}

    def new_driver(self, digest: str) -> None:
        body = {"spec": {"template": {"spec": {"containers": [container(digest)]}}}}
        self.cp.patch(f"{OPERATOR}/{DRIVER}", body, kind=STRATEGIC)

    def wait_done(self) -> None:
        self.cp.wait_for(lambda: self.states() == ["upgrade-done"] * len(self.nodes), "all nodes to be done", timeout=60, every=0.1)


def container(digest: str) -> Object:
    return {"name": "main", "image": "driver", "env": [{"name": "DRIVER_CONFIG_DIGEST", "value": digest}]}


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def ask(address: str, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except urllib.error.URLError as error:
        return 0, str(error.reason)


@pytest.fixture
def installed(control_plane: ControlPlane, gpu_node: NodeFactory, tmp_path: Path) -> Iterator[Installed]:
    """Two nodes with a driver, a ClusterPolicy, and the manifests of the controller, its Deployment among them."""
    labels = {"nvidia.com/gpu.present": "true", DEPLOY_DRIVER: "true"}
    nodes = [gpu_node(labels=labels) for _ in range(2)]
    is_new = not control_plane.exists(SPACE)
    if is_new:
        make_namespace(control_plane, "gpu-operator")
    control_plane.create(crds.CRDS, crds.crd("ClusterPolicy"))
    control_plane.wait_for(lambda: control_plane.request("GET", crds.path("ClusterPolicy")).status == 200, "the custom resource")
    control_plane.create(crds.path("ClusterPolicy"), crds.custom("ClusterPolicy", "cluster-policy", {"driver": {"upgradePolicy": POLICY}}))
    spec = {"nodeSelector": {DEPLOY_DRIVER: "true"}, "containers": [container("one")]}
    pods = {"app": DRIVER, COMPONENT_LABEL: "nvidia-driver"}
    control_plane.create(OPERATOR, space.daemon_set(DRIVER, selector={"app": DRIVER}, labels=pods, spec=spec))
    with Applied(control_plane, CONTROLLER):
        made = Installed(control_plane, nodes, tmp_path)
        yield made
        for run in made.running:
            if run.process.poll() is None:
                run.kill()
    control_plane.delete(f"{OPERATOR}/{DRIVER}")
    control_plane.delete(f"{crds.CRDS}/{crds.KINDS['ClusterPolicy'][1]}.{crds.GROUP}")
    if is_new:
        control_plane.delete(SPACE)
        control_plane.wait_for(lambda: not control_plane.exists(SPACE), "the namespace to be gone", timeout=60)


def test_a_roll_out_with_the_shipped_rights(installed: Installed) -> None:
    """Issue 6: with the account of the manifests and nothing more, a new driver comes to every node; SIGTERM gives the Lease up, 0."""
    mark = installed.cp.audit_mark()
    leader, address = installed.lead("one")
    installed.wait_done()
    (old,) = installed.hashes()
    assert ask(address, "/readyz") == (200, "leads\n")
    installed.new_driver("two")
    installed.cp.wait_for(lambda: installed.hashes() and old not in installed.hashes(), "new driver pods", timeout=60, every=0.1)
    installed.wait_done()
    code, metrics = ask(address, "/metrics")
    assert code == 200
    assert "driver_manager_controller_driver_pod_restarts_total 2.0" in metrics
    assert "gpu_operator_nodes_upgrades_done 2.0" in metrics
    seen = installed.status("--output", "json").require(0).document()
    assert [(each["node"], each["state"]) for each in seen["nodes"]] == [(name, "upgrade-done") for name in sorted(installed.nodes)]
    assert seen["leader"]["identity"] == "one"
    leader.terminate()
    assert leader.wait(20).require(0).said("stopped by a signal")
    assert installed.cp.get(LEASE)["spec"].get("holderIdentity", "") == ""
    refused = [event["requestURI"] for event in installed.cp.audit(mark, USER) if event["responseStatus"]["code"] in (401, 403)]
    assert refused == []


def test_the_deployment_is_admitted_as_it_is(installed: Installed) -> None:
    """Its namespace enforces the restricted profile, and both replicas are made all the same."""
    path = "/api/v1/namespaces/driver-manager/pods"
    installed.cp.wait_for(lambda: len(installed.cp.get(path)["items"]) == 2, "two pods of the Deployment")


def test_status_on_a_terminal(installed: Installed) -> None:
    """`--watch` draws the fleet anew as it changes, and ends with 0 on Ctrl-C, with the terminal as it was."""
    installed.lead("one")
    installed.wait_done()
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 100, 0, 0))
    env = {"PATH": os.environ["PATH"], "KUBECONFIG": str(installed.cp.kubeconfig()), "TERM": "xterm"}
    process = subprocess.Popen([COMMAND, "status", "--all", "--watch"], env=env, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    try:
        drawn = read_until(ours, "upgrade-done")
        node = installed.nodes[1]
        installed.cp.patch(f"/api/v1/nodes/{node}", {"spec": {"unschedulable": True}})
        drawn += read_until(ours, "others")
        process.send_signal(signal.SIGINT)
        drawn += read_until(ours, None)
        assert process.wait(20) == 0, drawn
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert "one leads" in drawn
    assert all(name in drawn for name in installed.nodes)
    assert "\x1b[?1049l" in drawn, "the terminal was not given back"
    installed.cp.patch(f"/api/v1/nodes/{node}", {"spec": {"unschedulable": None}})


def read_until(terminal: int, word: str | None) -> str:
    """What is drawn until a word appears, or to the end."""
    drawn, deadline = "", time.monotonic() + 30
    while word is None or word not in drawn:
        assert time.monotonic() < deadline, f"{word} was not drawn: {drawn[-3000:]}"
        if select.select([terminal], [], [], 1.0)[0]:
            try:
                part = os.read(terminal, 65536)
            except OSError:  # the other end is closed
                part = b""
            if not part:
                break
            drawn += part.decode(errors="replace")
    return drawn


def test_two_replicas(installed: Installed) -> None:
    """One leads, the other stands by and is ready; killed, the leader is followed when its Lease is over."""
    times = ("--lease-duration", "3s", "--renew-deadline", "1500ms", "--retry-period", "500ms", "--request-timeout", "1s")
    first, leads = installed.lead("one", *times)
    installed.cp.wait_for(lambda: ask(leads, "/readyz")[1] == "leads\n", "a leader")
    second, address = installed.lead("two", *times)
    installed.wait_done()
    installed.cp.wait_for(lambda: ask(address, "/readyz") == (200, "stands by; one leads\n"), "the other to stand by")
    assert "driver_manager_controller_leading 0.0" in ask(address, "/metrics")[1]
    first.kill()
    installed.cp.wait_for(lambda: ask(address, "/readyz")[1] == "leads\n", "the other to lead", timeout=20, every=0.1)
    installed.new_driver("three")
    installed.cp.wait_for(lambda: "upgrade-required" in installed.states(), "a node to be begun", timeout=20, every=0.05)
    assert "two leads" in installed.status().require(0).out
    second.terminate()
    second.wait(20).require(0)


def test_bad_words_make_no_request(installed: Installed) -> None:
    """N59: 78 before anything is asked of the API server."""
    mark = installed.cp.audit_mark()
    ended = installed.run("controller", "--renew-deadline", "20s", token=installed.token).wait().require(78)
    assert ended.said("--lease-duration", "--renew-deadline")
    assert list(installed.cp.audit(mark, USER)) == []
