"""An exporter that tolerates every taint and asks to be parked, and the shipped admission policies that park it."""

from __future__ import annotations

from dataclasses import dataclass

from tests.e2e.fleet import GpuFleet
from tests.kube.manifests import PARKING, Applied
from tests.kube.recorder import Object
from tests.kube.space import daemon_set, is_marked, is_ready, node_of

DONE = "upgrade-done"
PARK, PARKED = "nvidia.com/gpu-driver-manager.park", "nvidia.com/gpu-driver-manager.parked"
MARK = "nvidia.com/gpu-driver-manager.parking"
GATE, DENY = "MutatingAdmissionPolicy", "ValidatingAdmissionPolicy"
WAYS = {"gate": DENY, "deny": GATE, "both": ""}
"""What is shipped and left out."""


@dataclass(slots=True)
class Exporter:
    """A DaemonSet of another namespace that uses the driver on every node of a fleet, and tolerates every taint."""

    fleet: GpuFleet
    namespace: str
    name: str = "exporter"

    @property
    def owner(self) -> str:
        """As nodes name it that it is parked on."""
        return f"{self.namespace}/{self.name}"

    @property
    def pods_path(self) -> str:
        """Of all pods of the namespace."""
        return f"/api/v1/namespaces/{self.namespace}/pods"

    @property
    def path(self) -> str:
        """Of itself."""
        return f"/apis/apps/v1/namespaces/{self.namespace}/daemonsets/{self.name}"

    def make(self, *, is_opted_in: bool = True, is_rolling: bool = False) -> None:
        """Makes it, and waits until it runs everywhere."""
        where = {"nodeSelector": {"fleet": self.fleet.namespace}, "tolerations": [{"operator": "Exists"}]}
        spec = {**where, "terminationGracePeriodSeconds": 1}
        body = daemon_set(self.name, spec=spec)
        body["spec"]["template"]["metadata"]["annotations"] = {"nvidia.com/gpu.client": "true", "kubelet.sim/stop-after": "200ms"}
        body["metadata"]["labels"] = {PARK: "true"} if is_opted_in else {}
        if is_rolling:
            body["spec"]["updateStrategy"] = {"type": "RollingUpdate"}
        self.fleet.cp.create(self.path.rpartition("/")[0], body)
        self.wait_everywhere()

    def pods(self) -> list[Object]:
        """Its pods, also those that it has left behind."""
        found: list[Object] = self.fleet.cp.get(f"{self.pods_path}?labelSelector=app%3D{self.name}")["items"]
        return found

    def gated(self) -> list[Object]:
        """Those that wait on a scheduling gate."""
        return [pod for pod in self.pods() if pod["spec"].get("schedulingGates")]

    def wait_everywhere(self, timeout: float = 30.0) -> None:
        """Waits until it runs on every node, and no pod of it is gated or on its way out."""

        def is_so() -> bool:
            pods = self.pods()
            fine = [pod for pod in pods if is_ready(pod) and not is_marked(pod) and not pod["spec"].get("schedulingGates")]
            return len(pods) == len(fine) and sorted(map(node_of, fine)) == self.fleet.names

        self.fleet.cp.wait_for(is_so, f"{self.name} on every node", timeout, 0.05)

    def wait_rolled_out(self, digest: str, timeout: float = 60.0) -> None:
        """Waits until every node is done with the new driver, and it is back on all of them."""
        fleet = self.fleet
        fleet.wait(lambda: fleet.digests() == {digest} and set(fleet.states().values()) == {DONE}, "the roll-out", timeout)
        self.wait_everywhere()
        fleet.wait_whole()

    def remove(self) -> None:
        """Takes all DaemonSets and pods of its namespace away, and that."""
        cp = self.fleet.cp
        cp.delete(self.path.rpartition("/")[0])
        cp.delete(f"{self.pods_path}?gracePeriodSeconds=0")
        cp.delete(f"/api/v1/namespaces/{self.namespace}")


def shipped(fleet: GpuFleet, way: str) -> Applied:
    """The admission policies of deploy/parking, as many as the way has."""
    left_out = [WAYS[way], f"{WAYS[way]}Binding"] if WAYS[way] else []
    return Applied(fleet.cp, PARKING, left_out)


def marked(fleet: GpuFleet) -> list[str]:
    """The nodes on which the agent may park by itself, and on which nobody is parked."""
    metas = {name: node["metadata"] for name, node in fleet.nodes().items()}
    fine = {name for name, meta in metas.items() if meta["annotations"].get(MARK) == "enforced" and PARKED not in meta["labels"]}
    return sorted(fine)
