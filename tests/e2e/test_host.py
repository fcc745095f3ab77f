"""Hosts that cannot, will not or need not let go of the driver."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.world import RECORD, STATUS, Object, StockNode, empty_host
from tests.host.trees import Tree
from tests.kube.proxy import ApiProxy

pytestmark = pytest.mark.kube
DEPLOY_DRIVER = "nvidia.com/gpu.deploy.driver"
HOST_DRIVER = "nvidia.com/gpu-driver-manager.host-driver"
PRE_INSTALLED = "pre-installed"


def assert_undisturbed(node: StockNode, before: Object, mark: int, pods: dict[str, str]) -> None:
    """No pod was touched, and nothing written but the status."""
    assert node.evictions(mark) == []
    assert node.eviction_tries(mark, dry=True) == []
    assert node.uids("train") == pods
    assert node.surface() == before
    assert set(node.writes(mark)) <= {"patch nodes"}
    assert len(node.writes(mark)) <= 1


# Kernels that keep the driver ---------------------------------------------------------------------------------------


def make_going(tree: Tree) -> None:
    """nvidia_uvm is half-way out of the kernel."""
    tree.file("sys/module/nvidia_uvm/initstate", "going\n")


def make_disabled(tree: Tree) -> None:
    """The sysctl that forbids all loading and unloading is set."""
    tree.file("proc/sys/kernel/modules_disabled", "1\n")


def make_unsupported(tree: Tree) -> None:
    """The kernel is built without module unloading, so it keeps no counts."""
    for path in (tree.root / "sys/module").glob("*/refcnt"):
        path.unlink()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        pytest.param(make_going, ("nvidia_uvm", "reboot"), marks=pytest.mark.deep),
        (make_disabled, ("modules_disabled", "reboot")),
        pytest.param(make_unsupported, ("without module unloading", "reboot"), marks=pytest.mark.deep),
    ],
    ids=["going", "disabled", "unsupported"],
)
def test_kernel_that_keeps_the_driver(busy_node: StockNode, spoil: object, words: tuple[str, ...]) -> None:
    """N25, N27: a kernel that cannot unload is found before anything is disturbed: 71, its reason in log and status, no call made."""
    assert callable(spoil)
    spoil(busy_node.tree)
    before, mark, pods = busy_node.surface(), busy_node.cp.audit_mark(), busy_node.uids("train")
    ended = busy_node.run().require(71)
    assert ended.said(*words)
    assert_undisturbed(busy_node, before, mark, pods)
    assert busy_node.tree.calls() == []
    assert words[0] in busy_node.annotation(STATUS)["message"]
    checks = busy_node.run("preflight_check", "--output", "json").require(71).document()
    assert any(check["result"] == "fail" and check["exitCode"] == 71 and words[0] in check["sentence"] for check in checks)


@pytest.mark.parametrize("errno", [pytest.param("ENOSYS", marks=pytest.mark.deep), "EPERM"])
def test_unload_that_the_kernel_refuses(busy_node: StockNode, errno: str) -> None:
    """N27, R4: a refusal that only the call itself shows ends with 71, not tried again, everything put back."""
    busy_node.tree.faults({"call": "delete_module", "errno": errno})
    before = busy_node.surface()
    busy_node.run().require(71)
    busy_node.wait_surface(before)
    assert [call for call, *_ in busy_node.tree.results()].count("delete_module") == 1


@pytest.mark.slow
def test_unload_that_never_comes_back(busy_node: StockNode) -> None:
    """N25, R8: a hanging delete_module is cut off and named, not piled up; the run ends with 71 and the node is put back."""
    busy_node.tree.faults({"call": "delete_module", "hold": True})
    before = busy_node.surface()
    ended = busy_node.run().require(71)
    assert ended.said("delete_module", "nvidia_modeset")
    assert ended.wall < 60
    busy_node.wait_surface(before)
    assert "nvidia_modeset" in busy_node.annotation(STATUS)["message"]


@pytest.mark.deep
def test_module_that_stays_busy(busy_node: StockNode) -> None:
    """N25, R8: a module that stays busy is tried for its limit and named; 75, everything put back, the driver's rest untouched."""
    busy_node.tree.faults({"call": "delete_module", "argument": "nvidia_uvm", "errno": "EAGAIN"})
    before = busy_node.surface()
    ended = busy_node.run(UNLOAD_TIMEOUT="2s").require(75)
    assert ended.said("nvidia_uvm")
    busy_node.wait_surface(before)
    assert (busy_node.tree.root / "sys/module/nvidia").is_dir()


@pytest.mark.deep
def test_foreign_module_on_top(busy_node: StockNode) -> None:
    """R5: a module of nobody we know that uses the driver is refused by name; with UNLOAD_ALSO it goes first."""
    busy_node.tree.module("gdr_helper")
    busy_node.tree.link("sys/module/nvidia/holders/gdr_helper", "../../gdr_helper")
    busy_node.tree.file("sys/module/nvidia/refcnt", "3\n")
    before, mark, pods = busy_node.surface(), busy_node.cp.audit_mark(), busy_node.uids("train")
    ended = busy_node.run().require(65)
    assert ended.said("gdr_helper", "UNLOAD_ALSO=gdr_helper")
    assert_undisturbed(busy_node, before, mark, pods)
    busy_node.run(UNLOAD_ALSO="gdr_helper").require(0)
    names = [argument for call, argument, _ in busy_node.tree.results() if call == "delete_module"]
    assert sorted(names[:-1]) == ["gdr_helper", "nvidia_modeset", "nvidia_uvm"]
    assert names[-1] == "nvidia"


# Drivers that are wanted already ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("on_file", "changes", "is_unchanged"),
    [
        ("D", {"DRIVER_CONFIG_DIGEST": "D"}, True),
        pytest.param("D\n\n", {"DRIVER_CONFIG_DIGEST": " D "}, True, marks=pytest.mark.deep),
        ("D", {"DRIVER_CONFIG_DIGEST": "D2"}, False),
        pytest.param("D", {"DRIVER_CONFIG_DIGEST": "D", "FORCE_REINSTALL": "true"}, False, marks=pytest.mark.deep),
        pytest.param("D", {"DRIVER_CONFIG_DIGEST": None}, False, marks=pytest.mark.deep),
        pytest.param("D", {"DRIVER_CONFIG_DIGEST": ""}, False, marks=pytest.mark.deep),
        pytest.param(None, {"DRIVER_CONFIG_DIGEST": "D"}, False, marks=pytest.mark.deep),
        pytest.param("", {"DRIVER_CONFIG_DIGEST": ""}, False, marks=pytest.mark.deep),
    ],
)
def test_wanted_driver(busy_node: StockNode, on_file: str | None, changes: dict[str, Any], is_unchanged: bool) -> None:
    """N28, R11: only a known digest that is the wanted one disturbs nobody; the decision and both values are in the log."""
    busy_node.reload_host(digest=on_file)
    before, mark, pods = busy_node.surface(), busy_node.cp.audit_mark(), busy_node.uids("train")
    ended = busy_node.run(**changes).require(0)
    busy_node.wait_surface(before)
    (plan,) = [line for line in ended.lines if line["message"] == "plan"]
    assert plan["path"] == ("unchanged" if is_unchanged else "full")
    assert busy_node.evicted(mark) == ([] if is_unchanged else sorted(pods))
    for value in (on_file, changes["DRIVER_CONFIG_DIGEST"]):
        assert (value or "").strip() in plan["because"] or "FORCE_REINSTALL" in plan["because"] or not changes["DRIVER_CONFIG_DIGEST"]


def test_unchanged_driver_disturbs_nobody(busy_node: StockNode) -> None:
    """R11, N28, N34: on the unchanged path stale mounts are detached and the ready markers stay; no write, no pod, few requests."""
    busy_node.reload_host(digest="new")
    before, mark, pods = busy_node.surface(), busy_node.cp.audit_mark(), busy_node.uids("train")
    busy_node.run().require(0)
    assert_undisturbed(busy_node, before, mark, pods)
    assert busy_node.writes(mark) == []
    assert markers(busy_node) == {"driver-ready", "toolkit-ready", ".driver-ctr-ready", "somebody-elses"}
    assert (busy_node.tree.root / "sys/module/nvidia").is_dir()
    assert busy_node.tree.targets() == []
    assert len(busy_node.audit(mark)) <= 6


def test_nothing_loaded_disturbs_nobody(busy_node: StockNode) -> None:
    """R11, N28: where nothing is loaded no pod is touched and nothing written, in few requests."""
    busy_node.tree = empty_host(busy_node.folder / "empty")
    before, mark, pods = busy_node.surface(), busy_node.cp.audit_mark(), busy_node.uids("train")
    busy_node.run().require(0)
    assert_undisturbed(busy_node, before, mark, pods)
    assert busy_node.writes(mark) == []
    assert busy_node.tree.calls() == []
    assert len(busy_node.audit(mark)) <= 5


def markers(node: StockNode) -> set[str]:
    """The files among the ready markers."""
    return {path.name for path in (node.tree.root / "run/nvidia/validations").iterdir()}


@pytest.mark.deep
def test_ready_markers(busy_node: StockNode) -> None:
    """N34: the driver's and toolkit's markers go after the pause and before the unload and do not come back; others stay."""
    busy_node.tree.faults({"call": "unlink", "hold": True})
    run = busy_node.start("uninstall_driver")
    busy_node.wait_held("unlink")
    assert busy_node.annotation(RECORD)["phase"] == "unloading"
    assert markers(busy_node) == {"driver-ready", "toolkit-ready", ".driver-ctr-ready", "somebody-elses"}
    busy_node.tree.faults({"call": "delete_module", "hold": True})
    busy_node.wait_held("delete_module")
    assert markers(busy_node) == {"somebody-elses"}
    busy_node.tree.faults()
    run.wait().require(0)
    assert markers(busy_node) == {"somebody-elses"}


@pytest.mark.deep
def test_busy_mount(busy_node: StockNode) -> None:
    """Decision 15: a driver root that somebody works in is named and detached, or with BUSY_MOUNTS=refuse left, with 75."""
    busy_node.tree.process(4242, fds=["/run/nvidia/driver/usr/bin/x"])
    before = busy_node.surface()
    ended = busy_node.run(BUSY_MOUNTS="refuse").require(75)
    assert ended.said("/run/nvidia/driver", "4242")
    busy_node.wait_surface(before)
    busy_node.reload_host()
    busy_node.tree.process(4242, fds=["/run/nvidia/driver/usr/bin/x"])
    ended = busy_node.run().require(0)
    assert ended.said("busy mount is detached", "4242")
    assert busy_node.tree.targets() == []
    busy_node.wait_surface(before)


# Drivers of the host itself -----------------------------------------------------------------------------------------


def host_files(tree: Tree, version: str = "550.54.15") -> None:
    """Module and library of a driver that the host's own packages installed."""
    tree.file("lib/modules/6.1.0-test/updates/dkms/nvidia.ko", "x")
    tree.file(f"usr/lib/x86_64-linux-gnu/libnvidia-ml.so.{version}", "x")
    tree.file("usr/bin/nvidia-smi", "x")


def own_driver(folder: Path) -> Tree:
    """A host whose driver is its own: loaded, from its own folder, with its own userspace."""
    tree = empty_host(folder)
    tree.module("nvidia_uvm")
    tree.module("nvidia", holders=["nvidia_uvm"])
    host_files(tree)
    return tree


def smi(tree: Tree, **answer: object) -> None:
    tree.file("run/nvidia-smi.json", json.dumps({"stdout": "550.54.15\n", "rc": 0, **answer}))


def test_host_driver_is_marked_and_unmarked(busy_node: StockNode) -> None:
    """N17: the host's own driver is marked once, with 72 and nobody disturbed; the mark goes on the run after the purge."""
    busy_node.tree = own_driver(busy_node.folder / "own")
    before, mark, pods = busy_node.surface(), busy_node.cp.audit_mark(), busy_node.uids("train")
    env = busy_node.environment()
    busy_node.start("uninstall_driver", env=env).wait().require(72)
    assert busy_node.node()["metadata"]["labels"][DEPLOY_DRIVER] == PRE_INSTALLED
    assert busy_node.annotation(HOST_DRIVER) == {"previous": "true", "version": "550.54.15"}
    assert busy_node.evictions(mark) == []
    assert busy_node.uids("train") == pods
    admin = {**env, "KUBECONFIG": str(busy_node.cp.kubeconfig())}
    mark = busy_node.cp.audit_mark()
    busy_node.start("uninstall_driver", env=admin).wait().require(72)
    assert busy_node.surface()["labels"][DEPLOY_DRIVER] == PRE_INSTALLED
    assert [event["requestURI"] for event in busy_node.cp.audit(mark, "admin") if is_our_patch(event)] == []
    busy_node.tree = empty_host(busy_node.folder / "purged")
    admin["DRIVER_MANAGER_HOST_TREE"] = str(busy_node.tree.root)
    busy_node.start("uninstall_driver", env=admin).wait().require(0)
    assert busy_node.surface() == before


def is_our_patch(event: Object) -> bool:
    """Whether the program wrote, whoever it was run as."""
    return bool(event["verb"] == "patch" and event.get("userAgent", "").startswith("driver-manager/"))


@pytest.mark.deep
def test_told_to_end_by_its_own_mark(busy_node: StockNode, api_proxy: ApiProxy) -> None:
    """Decision 16: the mark makes the DaemonSet controller delete our own pod; the SIGTERM after it keeps the mark, with 72."""
    busy_node.tree = own_driver(busy_node.folder / "own")
    patch = api_proxy.on("patch", r"/nodes/").hold_answer()
    run = busy_node.start("uninstall_driver", proxy=api_proxy)
    patch.wait_hit()
    busy_node.cp.wait_for(
        lambda: all("deletionTimestamp" in pod["metadata"] for pod in busy_node.driver_pods()), "the driver pod to be on its way"
    )
    run.terminate()
    api_proxy.clear()
    run.wait(20).require(72)
    assert busy_node.node()["metadata"]["labels"][DEPLOY_DRIVER] == PRE_INSTALLED
    assert busy_node.annotation(HOST_DRIVER)["previous"] == "true"


@pytest.mark.deep
def test_mark_of_somebody_else(busy_node: StockNode) -> None:
    """N17, R3: a pre-installed label without our annotation is somebody else's and stays."""
    admin = {**busy_node.environment(), "KUBECONFIG": str(busy_node.cp.kubeconfig())}
    busy_node.change({"metadata": {"labels": {DEPLOY_DRIVER: PRE_INSTALLED}}})
    busy_node.tree = empty_host(busy_node.folder / "empty")
    admin["DRIVER_MANAGER_HOST_TREE"] = str(busy_node.tree.root)
    busy_node.start("uninstall_driver", env=admin).wait().require(0)
    assert busy_node.node()["metadata"]["labels"][DEPLOY_DRIVER] == PRE_INSTALLED


EMPTY = [pytest.param(case, marks=pytest.mark.deep) for case in ("a-empty", "b-only-nvidia-smi")]


@pytest.mark.parametrize("case", [*EMPTY, "d-driver-container"])
def test_no_host_driver(node: StockNode, case: str) -> None:
    """N17: an empty host, one with nothing but an nvidia-smi, and a driver container's module are no host driver."""
    node.add_driver(digest="new")
    if case != "d-driver-container":
        node.tree = empty_host(node.folder / case)
    if case == "b-only-nvidia-smi":
        node.tree.file("usr/bin/nvidia-smi", "x")
        smi(node.tree)
    if case == "d-driver-container":
        host_files(node.tree)
        smi(node.tree)
    before = node.surface()
    node.run().require(0)
    node.wait_surface(before)
    assert DEPLOY_DRIVER in before["labels"]


def test_hanging_nvidia_smi(node: StockNode) -> None:
    """N17, R8: an nvidia-smi that never answers is cut off, and alone it proves nothing."""
    node.add_driver(digest="new")
    node.tree = own_driver(node.folder / "own")
    next(node.tree.root.glob("usr/lib/x86_64-linux-gnu/libnvidia-ml.so.*")).unlink()
    smi(node.tree, hang=True)
    before = node.surface()
    ended = node.run("plan", "--output", "json").require(0)
    assert ended.document()["path"] == "full"
    assert ended.wall < 30
    assert node.surface() == before
    assert os.path.lexists(node.tree.root / "sys/module/nvidia")
