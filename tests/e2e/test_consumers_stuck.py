"""Users of the driver that do not go: stuck pods, virtual machines, and processes that outlive their pods."""

from __future__ import annotations

import pytest

from tests.e2e.command import Ended, Running
from tests.e2e.gpu_users import GpuUsers, asks, cgroup_of, end_process
from tests.e2e.world import STATUS, Object, StockNode
from tests.kube.controlplane import MERGE
from tests.kube.proxy import ApiProxy

pytestmark = pytest.mark.kube
NEVER_STOPS: Object = {"kubelet.sim/stop-after": "never"}
FINALIZER = "example.com/detach"
LAUNCHER: Object = {"kubevirt.io": "virt-launcher", "vm.kubevirt.io/name": "windows"}
VFIO = "nvidia.com/GA102GL_A10"
PREFIXES = f"nvidia.com/gpu,{VFIO}"
INTERCEPTOR = 'admission webhook "virt-launcher-eviction-interceptor.kubevirt.io"'
WEBHOOK = f"{INTERCEPTOR} denied the request: VMI windows is not live-migratable"
EVACUATION = f"{INTERCEPTOR} denied the request: Eviction triggered evacuation of VMI windows"
HELD = "held-by-process"


@pytest.fixture(autouse=True)
def with_driver(node: StockNode) -> None:
    """The driver's pod on the node, with another digest than what is loaded."""
    node.add_driver(digest="new")


def delete(node: StockNode, name: str, query: str = "") -> None:
    """Deletes a pod, as a person would."""
    node.cp.delete(f"{node.space}/pods/{name}{query}")


def is_terminating(node: StockNode, name: str) -> bool:
    """Whether a pod is marked for deletion and still there."""
    answer = node.cp.request("GET", f"{node.space}/pods/{name}")
    return answer.status == 200 and "deletionTimestamp" in answer.body["metadata"]


def assert_untouched(node: StockNode, before: Object) -> None:
    """The node is as before, and nothing was unloaded."""
    node.wait_surface(before)
    assert [call for call in node.tree.calls() if call["call"] == "delete_module"] == []


def wait_line(run: Running, *words: str) -> Object:
    """The log line of a wait for processes that has these words."""
    return run.wait_for_line(lambda line: line.get("reason") == HELD and all(word in line["for"] for word in words), f"a wait for {words}")


# Pods that do not end ---------------------------------------------------------------------------------------------------


def add_stuck(node: StockNode, users: GpuUsers) -> tuple[str, str, str]:
    """Three GPU pods: one that hangs in Terminating, one that a finalizer keeps, and one whose budget is closed; gives their names."""
    users.deployment("stuck", containers=[asks()], annotations=NEVER_STOPS)
    users.deployment("held", containers=[asks()])
    users.deployment("guarded", containers=[asks()])
    users.wait()
    stuck, held, guarded = (users.pod(app)["metadata"]["name"] for app in ("stuck", "held", "guarded"))
    node.cp.patch(f"{node.space}/pods/{held}", {"metadata": {"finalizers": [FINALIZER]}})
    node.add_budget("guarded", 1)
    node.change({"spec": {"unschedulable": True}})  # as on a node that is being looked after: no successor comes
    for name in (stuck, held):
        delete(node, name)
    node.cp.wait_for(lambda: is_terminating(node, stuck) and is_terminating(node, held), "both to be marked")
    return stuck, held, guarded


def test_stuck_pods_are_left(node: StockNode, users: GpuUsers) -> None:
    """N10, R6: by default pods that do not end are named when the limit is over, and nothing is deleted by force."""
    stuck, held, guarded = add_stuck(node, users)
    before, mark = node.surface(), node.cp.audit_mark()
    ended = node.run(OPERAND_TIMEOUT="3s", DRAIN_TIMEOUT_SECONDS="3s").require(75)
    assert_untouched(node, before)
    assert ended.said(stuck, held)
    assert node.evicted(mark) == []
    assert is_terminating(node, stuck)
    assert is_terminating(node, held)
    blockers = node.annotation(STATUS)["blockers"]
    assert any(guarded in each["name"] and "guarded-budget" in each["why"] for each in blockers)


@pytest.mark.slow
def test_stuck_pods_by_force(node: StockNode, users: GpuUsers) -> None:
    """N10, N32: by force only a pod past its grace without finalizer and budget is ended; its process is waited for by its name."""
    stuck, held, guarded = add_stuck(node, users)
    uid = node.uids("stuck")[stuck]
    node.tree.process(4001, fds=["/dev/nvidia0"], cgroup=cgroup_of(uid, "cgroupfs"))
    before, mark = node.surface(), node.cp.audit_mark()
    run = node.start("uninstall_driver", FORCE_DELETE_STUCK_PODS="true")
    run.wait_for_line(lambda line: "by force" in line["message"] and line["pod"].endswith(stuck), "the forced end", 60)
    node.cp.wait_for(lambda: stuck not in node.uids("stuck"), "the stuck pod to be gone")
    assert is_terminating(node, held)
    assert guarded in node.uids("guarded")
    assert node.evicted(mark) == [stuck]
    node.cp.patch(f"{node.space}/pods/{held}", {"metadata": {"finalizers": None}}, kind=MERGE)
    node.cp.delete(f"/apis/policy/v1/namespaces/{node.namespace}/poddisruptionbudgets/guarded-budget")
    wait_line(run, "4001", stuck, "gone from the API")
    end_process(node, 4001)
    run.wait().require(0)
    node.wait_surface(before)
    assert node.evicted(mark) == sorted([stuck, guarded])


# Virtual machines -------------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(node: StockNode, users: GpuUsers) -> str:
    """The launcher of a virtual machine with a GPU of its own, as KubeVirt makes it; gives its name."""
    users.capacity(**{VFIO: 1})
    owner = {"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "name": "windows", "uid": "1", "controller": True}
    made = node.add_pod("virt-launcher-windows", is_ready=False, containers=[asks(VFIO)], volumes=[{"name": "data", "emptyDir": {}}])
    name = str(made["metadata"]["name"])
    node.cp.patch(f"{node.space}/pods/{name}", {"metadata": {"labels": LAUNCHER, "ownerReferences": [owner]}})
    node.cp.wait_for(lambda: node.ready_pods([name]), "the launcher")
    return name


def assert_names_the_machine(ended: Ended, name: str) -> None:
    """People learn which machine it is and that it cannot be moved."""
    assert ended.said(name, "virtual machine windows", "cannot be moved")


@pytest.mark.parametrize("by", ["budget", "webhook"])
def test_machine_that_cannot_move(node: StockNode, users: GpuUsers, machine: str, api_proxy: ApiProxy, by: str) -> None:
    """N12, R5: a launcher that its budget or a webhook keeps is refused with its machine's name before anything is touched."""
    if by == "budget":
        node.add_budget(machine, 1, name="kubevirt-disruption-budget")
    else:
        api_proxy.on("create", r"/eviction", times=None).answer(429, status_of(429, WEBHOOK))
    users.deployment("train", containers=[asks()])
    users.wait()
    before, mark, kept = node.surface(), node.cp.audit_mark(), node.uids("train") | node.uids(machine)
    ended = node.run(proxy=api_proxy, GPU_RESOURCE_PREFIXES=PREFIXES).require(65)
    assert_names_the_machine(ended, machine)
    assert_untouched(node, before)
    assert node.eviction_tries(mark) == []
    assert node.uids("train") | node.uids(machine) == kept


def test_webhook_that_knows_no_dry_run(node: StockNode, machine: str, api_proxy: ApiProxy) -> None:
    """N12: where only the eviction itself tells, the machine is named then, and the node goes back to service as it was."""
    api_proxy.on("create", r"/eviction\?dryRun", times=None).answer(400, status_of(400, f"{INTERCEPTOR} does not support dry run"))
    api_proxy.on("create", r"/eviction$", times=None).answer(429, status_of(429, WEBHOOK))
    before = node.surface()
    ended = node.run(proxy=api_proxy, GPU_RESOURCE_PREFIXES=PREFIXES).require(65)
    assert_names_the_machine(ended, machine)
    assert_untouched(node, before)
    assert node.uids(machine)


def test_machine_that_is_moved_away(node: StockNode, machine: str, api_proxy: ApiProxy) -> None:
    """N12: the webhook refuses the eviction of a machine that it moves away; that is waited for, not taken for a no."""
    api_proxy.on("create", r"/eviction", times=2).answer(429, status_of(429, EVACUATION))
    before = node.surface()
    ended = node.run(proxy=api_proxy, GPU_RESOURCE_PREFIXES=PREFIXES).require(0)
    assert ended.said(machine, "evacuation")
    node.wait_surface(before)
    assert not node.uids(machine)


def test_machine_that_moves(node: StockNode, machine: str) -> None:
    """N12: a launcher that may go is evicted like any pod, whatever it keeps in an emptyDir."""
    before, mark = node.surface(), node.cp.audit_mark()
    node.run(GPU_RESOURCE_PREFIXES=PREFIXES).require(0)
    node.wait_surface(before)
    assert node.evicted(mark) == [machine]


def test_webhook_keeps_a_pod(node: StockNode, users: GpuUsers, api_proxy: ApiProxy) -> None:
    """N12: a webhook's 429 on any other pod is a block like a budget's: few tries, the limit, and the webhook's words."""
    users.deployment("train", containers=[asks()])
    users.wait()
    words = 'admission webhook "guard.example.com" denied the request: not during the day'
    api_proxy.on("create", r"/eviction", times=None).answer(429, status_of(429, words))
    before = node.surface()
    ended = node.run(proxy=api_proxy, DRAIN_TIMEOUT_SECONDS="3s").require(75)
    assert_untouched(node, before)
    assert ended.said("not during the day", *node.uids("train"))
    assert len(api_proxy.requests("create", r"/eviction$")) <= 2


def status_of(code: int, message: str) -> Object:
    """The answer of an apiserver whose webhook refuses."""
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message, "code": code}


# Processes --------------------------------------------------------------------------------------------------------------


def test_process_outlives_its_pod(node: StockNode, users: GpuUsers) -> None:
    """N32, R1: a pod that is deleted by force leaves its process: the unload waits for that, by the former pod's name, and then goes on."""
    users.deployment("train", containers=[asks()], annotations=NEVER_STOPS)
    users.wait()
    ((name, uid),) = node.uids("train").items()
    node.tree.process(4001, fds=["/dev/nvidia0"], cgroup=cgroup_of(uid))
    before = node.surface()
    run = node.start("uninstall_driver")
    node.cp.wait_for(lambda: is_terminating(node, name), "the eviction")
    delete(node, name, "?gracePeriodSeconds=0")
    wait_line(run, "4001", f"{node.namespace}/{name}", "gone from the API")
    node.cp.wait_for(lambda: (node.annotation(STATUS) or {}).get("reason") == HELD, "the wait in the status")
    (blocker,) = node.annotation(STATUS)["blockers"]
    assert (blocker["kind"], blocker["uid"]) == ("process", uid)
    assert name in blocker["why"]
    assert node.tree.calls() == []
    end_process(node, 4001)
    ended = run.wait().require(0)
    node.wait_surface(before)
    steps = ended.steps()
    assert steps.index("FreePods") < steps.index("AwaitReleased") < steps.index("BeginUnload") < steps.index("UnloadModule")


def test_process_of_a_pod_long_gone(node: StockNode) -> None:
    """N32: a process whose pod was gone before the run began is named with that pod's uid when the limit is over; nothing is unloaded."""
    node.add_pod("train", gpus=1)
    uid = node.uids("train")["train"]
    node.tree.process(4001, fds=["/dev/nvidia0"], cgroup=cgroup_of(uid))
    delete(node, "train", "?gracePeriodSeconds=0")
    node.cp.wait_for(lambda: not node.uids("train"), "the pod to be gone")
    before = node.surface()
    ended = node.run(HOLDER_TIMEOUT="2s").require(75)
    assert_untouched(node, before)
    assert ended.said("4001", uid)
    assert uid in node.annotation(STATUS)["message"]


def test_processes_by_any_path(node: StockNode, users: GpuUsers) -> None:
    """N31, R8: devices by the driver root's path and deleted ones count; holders are named with pod or unit; the wait is bounded."""
    users.deployment("exporter")
    users.wait()
    pod = users.pod("exporter")
    unit = "0::/system.slice/gpu-burn.service\n"
    node.tree.process(4001, fds=["/dev/nvidiactl"], cgroup=cgroup_of(pod["metadata"]["uid"], "cgroupfs"), comm="exporter")
    node.tree.process(4002, fds=["/run/nvidia/driver/dev/nvidia0"], cgroup=unit, comm="gpu_burn")
    node.tree.process(4003, fds=["/dev/nvidia0 (deleted)"], comm="orphan")
    node.tree.process(4004, fds=["/dev/null", "/etc/nvidia0"], comm="bystander")
    node.tree.file("proc/4005/comm", "vanishing\n")
    before = node.surface()
    run = node.start("uninstall_driver", HIDDEN_CONSUMERS="ignore", HOLDER_TIMEOUT="3s")
    line = wait_line(run, "4001 exporter", pod["metadata"]["name"], "gpu-burn.service", "4003 orphan", "unknown owner")
    assert "bystander" not in line["for"]
    ended = run.wait().require(75)
    assert_untouched(node, before)
    assert ended.said("4001", "4002", "4003")
    assert "4004" not in node.annotation(STATUS)["message"]


@pytest.mark.parametrize("setting", ["refuse", "evict"])
def test_hidden_consumer(node: StockNode, users: GpuUsers, setting: str) -> None:
    """Issue 4: a pod that only the kernel shows to hold a GPU is evicted, or refused before any write, as the setting says."""
    users.deployment("hidden")
    users.wait()
    ((name, uid),) = node.uids("hidden").items()
    node.tree.process(4001, fds=["/dev/nvidia0"], cgroup=cgroup_of(uid))
    before, mark = node.surface(), node.cp.audit_mark()
    if setting == "refuse":
        ended = node.run(HIDDEN_CONSUMERS=setting).require(65)
        assert ended.said(name, "4001", "HIDDEN_CONSUMERS=evict")
        assert_untouched(node, before)
        assert node.evicted(mark) == []
        return
    run = node.start("uninstall_driver")
    node.cp.wait_for(lambda: name not in node.uids("hidden"), "the pod to be gone")
    end_process(node, 4001)
    run.wait().require(0)
    node.wait_surface(before)
    assert node.evicted(mark) == [name]
