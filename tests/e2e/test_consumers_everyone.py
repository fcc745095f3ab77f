"""Everyone who can use the driver, on one node at once."""

from __future__ import annotations

import pytest

from tests.e2e.gpu_users import (
    DOMAIN_DRIVER,
    GpuUsers,
    Processes,
    asks,
    host_paths,
    requires,
    verdicts_by_app,
)
from tests.e2e.world import Object, StockNode

pytestmark = pytest.mark.kube
CPU: list[Object] = [{"name": "main", "image": "none"}]
CLIENT, CUSTOM, POOL = "nvidia.com/gpu.deploy.client", "example.com/gpu-client", "role"
SETTINGS: Object = {
    "NODE_LABEL_FOR_GPU_POD_EVICTION": CUSTOM,
    "CONSUMER_POD_SELECTOR": f"{POOL}=gpu-user",
    "GPU_RESOURCE_PREFIXES": "nvidia.com/gpu,nvidia.com/mig-,nvidia.com/GRID",
}
EVICTED = {
    "plain": "gpu-resource", "init": "gpu-resource", "sidecar": "gpu-resource", "shared": "gpu-resource", "mig": "gpu-resource",
    "vgpu": "gpu-resource", "by-annotation": "gpu-client", "by-label": "gpu-client", "picky": "client-selector",
    "picky-affinity": "client-selector", "picky-custom": "client-selector", "by-runtime": "runtime-class", "device": "host-device",
    "root": "driver-root", "by-cdi": "cdi", "selected": "selector", "claim": "dra", "template": "dra", "extended": "dra", "admin": "dra",
    "channel": "dra", "hidden": "process", "exporter": "host-device", "storage-held": "process", "plugin": "dra-plugin",
}  # fmt: skip
"""Workload -> why its pod is evicted."""
AWAITED = {"agent", "agent-custom"}
"""DaemonSets whose label is paused."""
KEPT = {
    "cpu": "no-gpu", "scratch": "no-gpu", "bare": "no-gpu", "daemon": "no-gpu", "storage": "no-gpu", "static": "no-gpu", "tpu": "no-gpu",
    "runc": "no-gpu", "opted-out": "opted-out",
}  # fmt: skip
"""Bystanders."""


def add_declared(users: GpuUsers) -> None:
    """Those that say it in their pods."""
    users.deployment("plain", containers=[asks()])
    users.deployment("init", containers=CPU, initContainers=[asks(name="first")])
    users.deployment("sidecar", containers=CPU, initContainers=[asks(name="beside", restart="Always")])
    users.deployment("shared", containers=[asks("nvidia.com/gpu.shared")])
    users.deployment("mig", containers=[asks("nvidia.com/mig-1g.10gb")])
    users.deployment("vgpu", containers=[asks("nvidia.com/GRID_T4-1Q")])
    users.deployment("by-annotation", annotations={"nvidia.com/gpu.client": "true"})
    users.deployment("by-label", labels={"nvidia.com/gpu.client": "true"})
    users.deployment("picky", nodeSelector={CLIENT: "true"})
    users.deployment("picky-affinity", affinity=requires(CLIENT, "Exists"))
    users.deployment("picky-custom", nodeSelector={CUSTOM: "yes"})
    users.deployment("by-runtime", runtimeClassName="nvidia")
    users.deployment("device", volumes=host_paths("/dev/nvidia0"))
    users.deployment("root", volumes=host_paths("/run/nvidia/driver"))
    users.deployment("by-cdi", annotations={"cdi.k8s.io/devices": "vendor.com/nic=1, nvidia.com/gpu=0"})
    users.deployment("selected", labels={POOL: "gpu-user"})
    users.deployment("hidden")
    users.daemon_set("exporter", volumes=host_paths("/dev/nvidia0"))
    users.daemon_set("agent", nodeSelector={CLIENT: "true"}, tolerations=[{"operator": "Exists"}])
    users.daemon_set("agent-custom", nodeSelector={CUSTOM: "yes"}, tolerations=[{"operator": "Exists"}])
    users.daemon_set("storage-held", volumes=host_paths("/dev"))


def add_claims(users: GpuUsers) -> None:
    """Those that have a device by a claim, of which one is no GPU."""
    gpu, domain, tpu = users.publish(), users.publish(DOMAIN_DRIVER), users.publish("tpu.example.com")
    extended = f"example.com/{users.node.namespace}"
    users.publish(extended=extended)
    users.allow_admin_access()
    users.deployment("claim", **users.claim("by-name", gpu))
    users.deployment("template", **users.template("for-each", gpu))
    users.deployment("extended", containers=[asks(extended)])
    users.deployment("admin", **users.template("monitoring", gpu, allocationMode="All", adminAccess=True))
    users.deployment("channel", **users.template("channels", domain))
    users.deployment("tpu", **users.template("tpus", tpu))
    users.dra_plugin("plugin")


def add_bystanders(users: GpuUsers) -> None:
    """Those that have nothing to do with a GPU, or want to be left."""
    users.deployment("cpu")
    users.deployment("scratch", volumes=[{"name": "data", "emptyDir": {}}])
    users.daemon_set("daemon")
    users.daemon_set("storage", volumes=host_paths("/dev", "/var/lib/storage"), tolerations=[{"operator": "Exists"}])
    users.deployment("runc", runtimeClassName="runc")
    users.deployment("opted-out", labels={"nvidia.com/gpu-driver-upgrade-drain.skip": "true"}, containers=[asks()])
    users.node.add_pod("bare")
    users.mirror_pod("static")


@pytest.fixture
def everyone(node: StockNode, users: GpuUsers) -> GpuUsers:
    """A node with all of them."""
    node.add_driver(digest="new")
    node.add_operands(only=("device-plugin", "dcgm"))
    users.label_node(**{CLIENT: "true", CUSTOM: "yes"})
    users.capacity(**{"nvidia.com/gpu.shared": 4, "nvidia.com/mig-1g.10gb": 4, "nvidia.com/GRID_T4-1Q": 4})
    for name, handler in (("nvidia", "nvidia"), ("runc", "runc")):
        users.runtime_class(name, handler)
    add_declared(users)
    add_claims(users)
    add_bystanders(users)
    users.wait()
    return users


def assert_plan(node: StockNode, plan: Object) -> None:
    """Each pod has the verdict it should have, and none is left out."""
    found = verdicts_by_app(node, plan)
    assert {app: each["reason"] for app, each in found.items() if each["action"] == "evict"} == EVICTED
    assert {app for app, each in found.items() if each["action"] == "await"} == AWAITED | set(OPERANDS)
    kept = {app: each["reason"] for app, each in found.items() if each["action"] == "keep"}
    assert kept == KEPT | {"nvidia-driver-daemonset": "own-pod"}
    assert "/dev" in found["storage"]["sentence"]
    assert all(each["setting"] for each in found.values() if each["action"] == "evict")
    assert plan["evictions"] == len(EVICTED)
    assert plan["exitCode"] == 0
    assert {each["pid"]: each["pod"].partition("/")[2].rsplit("-", 2)[0] for each in plan["holders"]}.keys() == {4001, 4002}


OPERANDS = ("nvidia-device-plugin-daemonset", "nvidia-dcgm")


def test_everyone_at_once(everyone: GpuUsers) -> None:
    """Issue 4, N01, N04: every kind is planned with its reason, the accepted evictions are the planned ones, bystanders stay."""
    node = everyone.node
    before, mark = node.surface(), node.cp.audit_mark()
    bystanders = {app: node.uids(app) for app in KEPT}
    with Processes(node) as processes:
        processes.hold(4001, everyone.pod("hidden"))
        processes.hold(4002, everyone.pod("storage-held"), fds=["/dev/nvidiactl"])
        plan = node.run("plan", "--output", "json", **SETTINGS).require(0).document()
        assert_plan(node, plan)
        assert node.writes(mark) == []
        ended = node.run(**SETTINGS).require(0)
    node.wait_surface(before)
    assert len(node.evictions(mark)) == plan["evictions"]
    evict = sorted(each["name"] for each in plan["verdicts"] if each["action"] == "evict")
    assert node.evicted(mark) == evict
    assert {app: node.uids(app) for app in KEPT} == bystanders
    assert ended.steps().index("PauseLast") < ended.steps().index("BeginUnload")
    assert not (node.tree.root / "sys/module/nvidia").exists()
    everyone.wait()
