"""The command in the guest against the real control plane: real modules, mounts and processes, real pods and permissions, at once."""

from __future__ import annotations

import signal

import pytest

from tests.e2e.world import RECORD, STATUS
from tests.kube.proxy import ApiProxy
from tests.vm.world import NEW, WHOLE, GuestNode, GuestRun

pytestmark = [pytest.mark.vm, pytest.mark.kube, pytest.mark.timeout(300)]


def test_a_node_of_a_cluster_is_freed(guest_node: GuestNode) -> None:
    """R1, R3, R4: a plan joins pod and process by uid; a process that outlives its pod is waited for; then node and guest are free."""
    node, guest = guest_node.node, guest_node.guest
    before, training, mark = node.surface(), node.uids("train"), node.cp.audit_mark()
    held = node.ready_pods(["train"])[0]
    name, uid = held["metadata"]["name"], held["metadata"]["uid"]
    pid = guest_node.hold_a_gpu(held)
    plan = guest_node.run("plan", "--output", "json").require(0).document()
    assert (plan["node"], plan["path"], plan["evictions"]) == (node.name, "full", 3)
    assert {each["name"]: each["action"] for each in plan["verdicts"] if each["name"] in training} == dict.fromkeys(training, "evict")
    (holder,) = plan["holders"]
    assert (holder["pid"], holder["devices"], holder["pod"]) == (pid, ["/dev/nvidia0"], f"{node.namespace}/{name}")
    assert node.writes(mark) == []
    assert guest_node.remains() == WHOLE
    with node.cp.record(f"{node.space}/pods") as pods:
        run = guest_node.start("uninstall_driver", is_program=True)
        pods.wait_for(lambda event: event.kind == "DELETED" and event.uid == uid, "the kubelet to let the pod go", timeout=120)
        run.hear(f"process {pid} ", f"holds /dev/nvidia0, of pod {node.namespace}/{name}, which is gone from the API")
        assert guest_node.remains() == WHOLE
        guest.call("tests.vm.cluster", "kill", pid=pid)
        ended = run.wait().require(0)
    guest_node.assert_freed(before, mark, list(training))
    assert (node.annotation(RECORD), node.annotation(STATUS)) == (None, None)
    assert ended.steps() == [step["step"] for step in plan["steps"]]


def paused(node: GuestNode, proxy: ApiProxy) -> GuestRun:
    """A run that has paused the node and does not know it yet."""
    rule = proxy.on("patch", rf"/nodes/{node.node.name}$").hold_answer()
    run = node.start("uninstall_driver", proxy=proxy)
    rule.wait_hit()
    return run


def test_a_run_killed_in_the_guest_is_finished_by_the_next(guest_node: GuestNode, api_proxy: ApiProxy) -> None:
    """R3, N15: SIGKILL once the node is paused: the record is of this very machine, and the next run ends with all as at the start."""
    node = guest_node.node
    before, training, mark = node.surface(), node.uids("train"), node.cp.audit_mark()
    assert paused(guest_node, api_proxy).kill().code == -signal.SIGKILL
    api_proxy.cut()
    api_proxy.clear()
    record = node.annotation(RECORD)
    assert (record["bootID"], record["nodeUID"]) == (guest_node.boot_id, node.node()["metadata"]["uid"])
    assert record["pod"]["uid"] == node.driver_pods()[0]["metadata"]["uid"]
    assert node.surface() != before
    assert guest_node.remains() == WHOLE
    guest_node.run("uninstall_driver").require(0)
    guest_node.assert_freed(before, mark, list(training))
    assert node.annotation(RECORD) is None


def test_a_machine_that_lost_its_power_is_put_back(guest_node: GuestNode, api_proxy: ApiProxy) -> None:
    """N54: the machine goes down in the middle of a run and comes up with another boot id: the node is put back, and nobody is evicted."""
    node = guest_node.node
    before, mark, boot_id = node.surface(), node.cp.audit_mark(), guest_node.boot_id
    paused(guest_node, api_proxy)
    guest_node.lose_power()
    api_proxy.cut()
    api_proxy.clear()
    assert node.annotation(RECORD)["bootID"] == boot_id != guest_node.boot_id
    ended = guest_node.run("uninstall_driver").require(0)
    assert ended.said("another boot")
    node.wait_surface(before)
    assert node.annotation(RECORD) is None
    assert node.evicted(mark) == []
    assert guest_node.remains() == NEW


def test_a_person_on_another_machine_is_refused(guest_node: GuestNode) -> None:
    """Without a pod whose token names the node, the boot id that the kubelet told says whether this machine is it."""
    node = guest_node.node
    admin, before = node.cp.tokens["admin"], node.surface()
    assert guest_node.run("plan", "--output", "json", token=admin).require(0).document()["path"] == "full"
    node.cp.patch(f"{node.path}/status", {"status": {"nodeInfo": {"bootID": "of-another-machine"}}})
    assert guest_node.run("uninstall_driver", token=admin).require(78).said("another boot id")
    assert node.surface() == before
    assert guest_node.remains() == WHOLE
