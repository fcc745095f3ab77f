"""A node of the real control plane whose machine is a guest: real kernel and API server, and between them the installed command."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.e2e.command import ENDS, Ended
from tests.e2e.gpu_users import cgroup_of
from tests.e2e.world import Object, StockNode
from tests.kube import stock
from tests.kube.controlplane import STRATEGIC
from tests.kube.proxy import ApiProxy
from tests.vm.cluster import STATE_FILES
from tests.vm.machine import Guest

Remains = dict[str, list[str]]
HERE = "tests.vm.cluster"
API_SERVER = "10.0.0.1"
"""The service address of the test's cluster, which is this machine's loopback on the guest's network."""
WHOLE: Remains = {
    "modules": ["nvidia", "nvidia_drm", "nvidia_modeset", "nvidia_uvm"],
    "mounts": ["/run/nvidia/driver", "/run/nvidia/driver/sub\\040dir"],
    "files": sorted(STATE_FILES),
}
"""The guest as a driver container leaves it."""
FREE: Remains = {"modules": [], "mounts": [], "files": ["validations/somebody-elses"]}
"""The guest once it is freed."""
NEW: Remains = {"modules": [], "mounts": [], "files": []}
"""The guest after a boot."""


@dataclass(slots=True)
class GuestRun:
    """A run of the command in the guest."""

    guest: Guest
    pid: int
    folder: str
    began: float = field(default_factory=time.monotonic)

    def hear(self, *words: str, timeout: float = 60.0) -> None:
        """Waits until a line of its log has all these words."""
        deadline = time.monotonic() + timeout
        while True:
            code, _, err = self.guest.call(HERE, "so_far", folder=self.folder)
            if any(all(word in line for word in words) for line in err.splitlines()):
                return
            assert code is None, f"it ended with {code} and never said {words}:\n{err[-6000:]}"
            assert time.monotonic() < deadline, f"it does not say {words}:\n{err[-6000:]}"
            time.sleep(0.05)

    def wait(self, timeout: float = ENDS) -> Ended:
        """Its end."""
        deadline = time.monotonic() + timeout
        while True:
            code, out, err = self.guest.call(HERE, "so_far", folder=self.folder)
            if code is not None:
                return Ended(code, out, err, time.monotonic() - self.began)
            assert time.monotonic() < deadline, f"it has not ended after {timeout} s:\n{err[-6000:]}"
            time.sleep(0.05)

    def kill(self) -> Ended:
        """SIGKILL, and waits for the end."""
        self.guest.call(HERE, "kill", pid=self.pid)
        return self.wait(10)


class GuestNode:
    """A node with the driver's pod, two operands and three GPU pods of short lives, and the guest that is its machine.

    Args:
        node: without anything on it yet.
        boot: gives a guest that nobody else uses; who made it ends it.
    """

    def __init__(self, node: StockNode, boot: Callable[[], Guest]) -> None:
        self.node = node
        self._boot = boot
        self.guest = self._booted()
        self.guest.call(HERE, "install_driver")
        node.add_driver(digest="new")
        node.add_operands(only=("device-plugin", "dcgm"))
        node.add_training(3, grace_seconds=1)

    def _booted(self) -> Guest:
        guest = self._boot()
        about = guest.call(HERE, "be_a_node", now=time.time(), entropy=secrets.token_hex(32), ca=self.node.cp.ca.read_text())
        self.node.cp.patch(f"{self.node.path}/status", {"status": {"nodeInfo": about}}, kind=STRATEGIC)
        self.boot_id = str(about["bootID"])
        return guest

    def lose_power(self) -> None:
        """The machine ends at once, and comes up again without a driver."""
        self.guest.end()
        self.guest = self._booted()

    def remains(self) -> Remains:
        """What is there of the driver."""
        found: Remains = self.guest.call(HERE, "remains")
        return found

    def hold_a_gpu(self, pod: Object) -> int:
        """A process in the guest that is a pod's by its cgroup and has a GPU open."""
        path = cgroup_of(pod["metadata"]["uid"]).strip().removeprefix("0::")
        return int(self.guest.call(HERE, "hold_a_gpu", cgroup=path))

    def start(self, *words: str, proxy: ApiProxy | None = None, token: str | None = None, is_program: bool = False) -> GuestRun:
        """Starts the command with the environment and the service account of the driver's pod, or with another token."""
        node = self.node
        if token is None:
            token = node.cp.service_account_token(node.namespace, "nvidia-driver", pod=node.driver_pods()[0])
        url = (proxy or node.cp).url
        settings = stock.init_environment(node.driver, node=node.name, namespace=node.namespace)
        settings |= {"KUBERNETES_SERVICE_HOST": API_SERVER, "KUBERNETES_SERVICE_PORT": url.rpartition(":")[2]}
        pid, folder = self.guest.call(HERE, "begin", words=words, settings=settings, token=token, is_program=is_program)
        return GuestRun(self.guest, pid, folder)

    def run(self, *words: str, **options: Any) -> Ended:
        """Runs the command to its end."""
        return self.start(*words, **options).wait()

    def assert_freed(self, before: Object, mark: int, training: Sequence[str]) -> None:
        """Nothing of the driver is left in the guest, the node is as it was, and each GPU pod was evicted once."""
        assert self.remains() == FREE
        self.node.wait_surface(before)
        assert self.node.evicted(mark) == sorted(training)
