"""What goes last, what is waited for last, and the small things of the host."""

from __future__ import annotations

import fcntl

import pytest

from tests.e2e.world import PAUSED, StockNode, empty_host
from tests.kube.space import daemon_set

pytestmark = pytest.mark.kube
DRA_LABEL = "nvidia.com/gpu.deploy.dra-driver"
DRA_APP = "nvidia-dra-driver-kubelet-plugin"


def add_dra_plugin(node: StockNode) -> str:
    """The DRA plugin as an operand of the node; gives its pod's uid."""
    node.change({"metadata": {"labels": {DRA_LABEL: "true"}}})
    spec = {"nodeSelector": {"space": node.namespace, DRA_LABEL: "true"}, "terminationGracePeriodSeconds": 1}
    node.cp.create(f"/apis/apps/v1/namespaces/{node.namespace}/daemonsets", daemon_set(DRA_APP, spec=spec))
    node.cp.wait_for(lambda: node.ready_pods([DRA_APP]), "the DRA plugin")
    (uid,) = node.uids(DRA_APP).values()
    return uid


@pytest.mark.deep
def test_dra_plugin_goes_last(busy_node: StockNode) -> None:
    """Decision 46: the DRA plugin is paused only after every pod that it serves is gone, and comes back with the others."""
    uid = add_dra_plugin(busy_node)
    before, training = busy_node.surface(), busy_node.uids("train")
    with busy_node.cp.record(f"{busy_node.space}/pods") as pods:
        busy_node.run().require(0)
        busy_node.wait_surface(before)
    marked = pods.first(lambda event: event.uid == uid and "deletionTimestamp" in event.object["metadata"])
    assert marked is not None
    assert all(event.at <= marked.at for event in pods.until_now() if event.kind == "DELETED" and event.uid in training.values())
    busy_node.cp.wait_for(lambda: busy_node.ready_pods([DRA_APP]), "the DRA plugin to be back")
    assert uid not in busy_node.uids(DRA_APP).values()


def test_unchanged_driver_recycles_the_dra_plugin(busy_node: StockNode) -> None:
    """Decision 14: where the driver root was detached on a path that disturbs nobody, the DRA plugin alone is restarted, once."""
    uid = add_dra_plugin(busy_node)
    busy_node.reload_host(digest="new")
    before, others, mark = busy_node.surface(), busy_node.uids("train") | busy_node.uids("nvidia-dcgm"), busy_node.cp.audit_mark()
    with busy_node.cp.record("/api/v1/nodes", f"fieldSelector=metadata.name%3D{busy_node.name}") as nodes:
        busy_node.run().require(0)
        busy_node.wait_surface(before)
    labels = [event.object["metadata"]["labels"] for event in nodes.until_now()]
    assert {key for each in labels for key, value in each.items() if value == PAUSED} == {DRA_LABEL}
    assert not any(event.object["spec"].get("unschedulable") for event in nodes.until_now())
    assert busy_node.evictions(mark) == []
    assert busy_node.uids("train") | busy_node.uids("nvidia-dcgm") == others
    busy_node.cp.wait_for(lambda: busy_node.ready_pods([DRA_APP]), "the DRA plugin to be back")
    assert uid not in busy_node.uids(DRA_APP).values()
    mark = busy_node.cp.audit_mark()
    busy_node.run().require(0)
    assert busy_node.writes(mark) == [], "nothing is mounted any more, so nothing is recycled"


def test_custom_label(busy_node: StockNode) -> None:
    """Spec 1.1: the user's own label is paused whatever its value, its DaemonSet leaves, and the value is put back."""
    key = "example.com/gpu-client"
    busy_node.change({"metadata": {"labels": {key: "blue"}}})
    spec = {"nodeSelector": {"space": busy_node.namespace, key: "blue"}, "terminationGracePeriodSeconds": 1}
    busy_node.cp.create(f"/apis/apps/v1/namespaces/{busy_node.namespace}/daemonsets", daemon_set("agent", spec=spec))
    busy_node.cp.wait_for(lambda: busy_node.ready_pods(["agent"]), "the user's agent")
    before, uids = busy_node.surface(), busy_node.uids("agent")
    busy_node.run(NODE_LABEL_FOR_GPU_POD_EVICTION=key).require(0)
    busy_node.wait_surface(before)
    busy_node.cp.wait_for(lambda: busy_node.ready_pods(["agent"]), "the user's agent to be back")
    assert set(uids.values()).isdisjoint(busy_node.uids("agent").values())


@pytest.mark.parametrize("is_host", [False, True], ids=["container", "host"])
def test_network_driver_is_waited_for(node: StockNode, is_host: bool) -> None:
    """N26: with GPUDirect RDMA and a Mellanox device the run waits, after the unload, until the network driver is up."""
    node.add_driver(digest="new", rdma=True)
    node.tree.gpu("0000:3c:00.0", driver=None, vendor="0x15b3")
    before = node.surface()
    run = node.start("uninstall_driver", USE_HOST_MOFED="true" if is_host else "false")
    run.wait_for_line(lambda line: line.get("reason") == "network-driver", "the wait for the network driver")
    assert not (node.tree.root / "sys/module/nvidia").exists()
    node.tree.file("sys/module/mlx5_core/initstate" if is_host else "run/mellanox/drivers/.driver-ready", "live\n")
    run.wait().require(0)
    node.wait_surface(before)


@pytest.mark.deep
def test_network_driver_never_comes(node: StockNode) -> None:
    """N26, R8: that wait ends at its limit with 75, naming what it waited for, and the node is put back."""
    node.add_driver(digest="new", rdma=True)
    node.tree.gpu("0000:3c:00.0", driver=None, vendor="0x15b3")
    before = node.surface()
    ended = node.run(USE_HOST_MOFED="false", NETWORK_DRIVER_TIMEOUT="1s").require(75)
    assert ended.said("network driver")
    node.wait_surface(before)


@pytest.mark.deep
def test_nouveau(node: StockNode) -> None:
    """Decision 14: where only nouveau is loaded it goes, without a word to the API."""
    node.add_driver(digest="new")
    node.tree = empty_host(node.folder / "nouveau")
    node.tree.module("nouveau")
    mark = node.cp.audit_mark()
    node.run().require(0)
    assert node.tree.results() == [("delete_module", "nouveau", 0)]
    assert node.writes(mark) == []


@pytest.mark.deep
def test_gpus_of_virtual_machines(node: StockNode) -> None:
    """W24, N37: GPUs on vfio come off it where the driver is wanted; one that a process without a pod has open is refused by its name."""
    node.add_driver(digest="new")
    node.tree = empty_host(node.folder / "vfio")
    node.tree.gpu(driver="vfio-pci")
    node.tree.process(700, fds=["/dev/vfio/7", "/dev/vfio/vfio"], comm="qemu-system-x86")
    ended = node.run().require(75)
    assert ended.said("0000:3b:00.0", "vfio", "qemu-system-x86", "700")
    assert node.tree.results() == []
    (node.tree.root / "proc/700").rename(node.folder / "ended")
    node.run().require(0)
    assert node.tree.results() == [("write", "/sys/bus/pci/devices/0000:3b:00.0/driver/unbind", 0)]


@pytest.mark.deep
def test_pid_file_that_is_held(node: StockNode) -> None:
    """Decision 12: a pid file whose lock a living driver container holds stays, with a warning."""
    node.add_driver(digest="new")
    with (node.tree.root / "run/nvidia/nvidia-driver.pid").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        ended = node.run().require(0)
    assert (node.tree.root / "run/nvidia/nvidia-driver.pid").exists()
    assert ended.said("pid file stays")


@pytest.mark.deep
def test_stacked_mounts(node: StockNode) -> None:
    """Decision 15: every layer at and below the driver root goes, the last mounted first."""
    node.add_driver(digest="new")
    stack = ("/run/nvidia/driver", "/run/nvidia/driver/dev", "/run/nvidia/driver/dev/shm", "/run/nvidia/driver")
    node.tree.mounts(*stack)
    before = node.surface()
    node.run().require(0)
    node.wait_surface(before)
    assert node.tree.targets() == []
    assert [argument for call, argument, _ in node.tree.results() if call == "umount2"] == list(reversed(stack))
