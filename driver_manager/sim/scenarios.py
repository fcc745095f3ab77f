"""Ready-made worlds: a node as the stock operator leaves it, and the one that the demo shows."""

import math
from dataclasses import dataclass
from typing import Final

from driver_manager import names
from driver_manager.core.snapshot import Toleration
from driver_manager.operands import OPERANDS
from driver_manager.sim.access import STOCK_ROLE
from driver_manager.sim.objects import Account, PodSpec
from driver_manager.sim.store import Latencies
from driver_manager.sim.world import AgentLife, World

NODE: Final = "gpu-1"
SPARE_NODE: Final = "gpu-2"
NAMESPACE: Final = "gpu-operator"
RARE_OPERANDS: Final = frozenset({"nvsm", "kata-sandbox-device-plugin", "dra-validator", "dra-driver"})
"""Those that a node of the demo does not have: twelve are left."""
STOCK_TOLERATION: Final = Toleration(names.GPU_TAINT, "Exists", "", "NoSchedule")
FREES_UP_AFTER: Final = 8.0
"""Seconds until the demo's budget lets its pod go."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A world and the program's place in it."""

    world: World
    account: Account
    """Of the driver's pod."""
    node: str = NODE
    namespace: str = NAMESPACE

    def life(self, kill_at: int | None = None) -> AgentLife:
        """A new life of the agent in the driver's pod."""
        return self.world.life(self.node, account=self.account, kill_at=kill_at)


def stock_world(
    seed: int = 0, *, gpu_pods: int = 6, operands: int = 12, latencies: Latencies | None = None, tolerates_us: bool = False
) -> Scenario:
    """One node with a loaded driver, its operands, GPU pods and the driver's DaemonSet, whose pod is the program's; and a spare node.

    Args:
        seed: of all chance.
        gpu_pods: how many pods with one GPU, of one Deployment.
        operands: how many, at most twelve.
        latencies: how long the parts of the cluster take.
        tolerates_us: whether the driver's DaemonSet tolerates our own taint.
    """
    world = World(seed, latencies)
    chosen = [operand for operand in OPERANDS if operand.name not in RARE_OPERANDS][:operands]
    labels = {operand.label: "true" for operand in chosen}
    labels |= {"nvidia.com/gpu.present": "true", names.DEPLOY_DRIVER: "true"}
    world.add_node(NODE, gpus=8, labels=labels, with_machine=True)
    world.add_node(SPARE_NODE, gpus=8, labels={"nvidia.com/gpu.present": "true"})
    world.machine(NODE).install()
    for number, operand in enumerate(chosen):
        spec = PodSpec(
            labels={"app": operand.app} if operand.app else {},
            node_selector={operand.label: "true"},
            tolerations=(STOCK_TOLERATION,),
            stop_seconds=0.3 + 0.2 * (number % 5),
            devices=("/dev/nvidiactl",) if "dcgm" in operand.name or operand.name == "device-plugin" else (),
            command=operand.name,
        )
        world.add_daemon_set(operand.app or operand.name, spec, namespace=NAMESPACE)
    account = _driver(world, tolerates_us)
    if gpu_pods:
        world.add_deployment("training", PodSpec(gpus=1, stop_seconds=2.0, lag_seconds=0.2), replicas=gpu_pods, node=NODE)
    return Scenario(world, account)


def demo_world(seed: int = 0) -> Scenario:
    """The demo's: twelve operands and six GPU pods, one of them guarded by a budget that frees up late.

    The guarded pod has a sister on the spare node that is only ready after some seconds; until then the budget needs them both.
    """
    scenario = stock_world(seed, gpu_pods=5)
    world = scenario.world
    spec = PodSpec(gpus=1, stop_seconds=1.0, start_seconds=FREES_UP_AFTER, command="tritonserver")
    inference = world.add_deployment("inference", spec, replicas=1, node=NODE)
    inference.replicas = 2
    world.add_pod(
        f"{inference.owner.name}-{world.store.suffix()}", inference.spec, node=SPARE_NODE, owner=inference.owner, is_running=False
    )
    world.add_budget("inference", {"app": "inference"}, min_available=1)
    return scenario


def _driver(world: World, tolerates_us: bool) -> Account:
    """The driver's DaemonSet; its pod is in its init container, which is the program."""
    ours = (Toleration(names.KEEP_OFF_TAINT, "Exists", "", "NoSchedule"),) if tolerates_us else ()
    spec = PodSpec(
        labels={"app": "nvidia-driver-daemonset", names.COMPONENT_LABEL: "nvidia-driver"},
        node_selector={names.DEPLOY_DRIVER: "true"},
        tolerations=(STOCK_TOLERATION, *ours),
        host_paths=("/run/nvidia", "/", "/sys"),
        is_ready=False,
        start_seconds=math.inf,
        priority=2_000_001_000,
    )
    world.add_daemon_set("nvidia-driver-daemonset", spec, namespace=NAMESPACE)
    pod = world.pod(NAMESPACE, "nvidia-driver-daemonset")
    world.hold_in_init(pod)
    return world.add_account(f"system:serviceaccount:{NAMESPACE}:nvidia-driver", STOCK_ROLE, identity=world.identity_of(pod))
