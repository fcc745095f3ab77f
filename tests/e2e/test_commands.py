"""The commands that a person types: what they say, and that those that only look change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.command import Ended, start
from tests.e2e.moments import after_unload, bury
from tests.e2e.world import PAUSED, RECORD, STATUS, Object, StockNode, empty_host
from tests.kube import stock
from tests.kube.proxy import ApiProxy

pytestmark = pytest.mark.kube


def as_person(node: StockNode, *words: str, **changes: str) -> Ended:
    """A run by a person with a kubeconfig of their own, and no pod."""
    env = node.environment() | {"KUBECONFIG": str(node.cp.kubeconfig()), **changes}
    return node.start(*words, env=env).wait()


def of_program(events: Iterator[Object]) -> set[tuple[str, str]]:
    """Verb and resource of the program's own requests, whoever it was run as."""
    ours = (event for event in events if event.get("userAgent", "").startswith("driver-manager/"))
    return {(event["verb"], (event.get("objectRef") or {}).get("resource", "")) for event in ours}


def test_plan(busy_node: StockNode) -> None:
    """R5: `plan` tells verdicts, steps, what is done on failure and notes, as a run would, and changes nothing at all."""
    busy_node.add_pod("bare")
    busy_node.tree.process(4242, fds=["/dev/nvidia0"], cgroup="0::/system.slice/dcgm.service\n", comm="nv-hostengine")
    before, mark, pods = busy_node.surface(), busy_node.cp.audit_mark(), busy_node.uids("train")
    plan = busy_node.run("plan", "--output", "json").require(0).document()
    assert (plan["node"], plan["path"], plan["evictions"], plan["exitCode"]) == (busy_node.name, "full", 3, 0)
    actions = {verdict["name"]: (verdict["action"], verdict["reason"]) for verdict in plan["verdicts"]}
    assert {name: actions[name] for name in pods} == dict.fromkeys(pods, ("evict", "gpu-resource"))
    assert actions["bare"] == ("keep", "no-gpu")
    assert actions[busy_node.driver_pods()[0]["metadata"]["name"]] == ("keep", "own-pod")
    assert [step["step"] for step in plan["steps"]][:3] == ["TryEvictions", "PauseNode", "FreePods"]
    assert plan["steps"][-1]["step"] == "RestoreNode"
    assert [step["step"] for step in plan["onFailure"]] == ["RestoreNode"]
    assert [(holder["pid"], holder["unit"]) for holder in plan["holders"]] == [(4242, "dcgm.service")]
    assert busy_node.writes(mark) == []
    assert busy_node.surface() == before
    assert [call for call in busy_node.tree.calls() if "is-active" not in call["arguments"]] == []
    assert busy_node.uids("train") == pods
    table = busy_node.run("plan").require(0).out
    assert all(name in table for name in pods)


def test_plan_and_run_agree(busy_node: StockNode) -> None:
    """R5: the run does the steps that the plan told, in that order."""
    plan = busy_node.run("plan", "--output", "json").require(0).document()
    ended = busy_node.run().require(0)
    assert ended.steps() == [step["step"] for step in plan["steps"]]


def test_plan_that_is_refused(busy_node: StockNode) -> None:
    """R5: a plan that a run would refuse has the refusal's code, its pods, and what would change it."""
    busy_node.add_pod("bare", gpus=1)
    ended = busy_node.run("plan", "--output", "json").require(65)
    plan = ended.document()
    assert plan["path"] == "refused"
    assert plan["steps"] == []
    assert any(f"{busy_node.namespace}/bare" in line for line in plan["refusals"])
    assert "DRAIN_USE_FORCE=true" in plan["hint"]


def test_plan_with_drain(busy_node: StockNode) -> None:
    """Decision 20: with ENABLE_AUTO_DRAIN the drain's verdicts are in the plan, by kubectl's rules."""
    busy_node.add_pod("bare")
    plan = busy_node.run("plan", "--output", "json", ENABLE_AUTO_DRAIN="true").require(0).document()
    actions = {verdict["name"]: verdict["action"] for verdict in plan["drainVerdicts"]}
    assert actions["bare"] == "refuse"
    assert {actions[name] for name in busy_node.uids("train")} == {"evict"}


def test_person_without_a_pod(node: StockNode) -> None:
    """Design section 3: without a DaemonSet to ask, a person's run keeps pods off with our own key, and puts all back."""
    node.add_driver(digest="new")
    node.add_training(1, grace_seconds=1)
    before = node.surface()
    node.tree.faults({"call": "umount2", "hold": True})
    env = node.environment() | {"KUBECONFIG": str(node.cp.kubeconfig())}
    run = node.start("uninstall_driver", env=env)
    node.wait_held("umount2")
    assert [taint["key"] for taint in node.surface()["taints"]] == ["nvidia.com/gpu-driver-update"]
    node.tree.faults()
    run.wait().require(0)
    node.wait_surface(before)


def test_status(busy_node: StockNode, api_proxy: ApiProxy) -> None:
    """Design section 1: `status` tells an idle node, one in the middle of a run, one that a killed run left, and a failed run."""
    mark = busy_node.cp.audit_mark()
    idle = busy_node.run("status", "--output", "json").require(0).document()
    assert (idle["record"], idle["paused"], idle["unschedulable"]) == (None, [], False)
    assert idle["driver"] == "550.54.15"
    assert idle["next"]["path"] == "full"
    assert idle["sentence"].startswith("as usual")
    assert busy_node.writes(mark) == []
    after_unload(busy_node, api_proxy).kill()
    bury(busy_node, api_proxy)
    mark = busy_node.cp.audit_mark()
    left = busy_node.run("status", "--output", "json").require(0).document()
    assert left["record"]["run"] == busy_node.annotation(RECORD)["run"]
    assert set(left["paused"]) == set(stock.OPERAND_LABELS)
    assert left["unschedulable"] is True
    assert "restore" in left["sentence"]
    assert busy_node.node()["metadata"]["labels"]["nvidia.com/gpu.deploy.dcgm"] == PAUSED
    assert "cordoned by that run" in busy_node.run("status").require(0).out
    assert busy_node.writes(mark) == []
    as_person(busy_node, "restore").require(0)
    assert busy_node.run("status", "--output", "json").document()["record"] is None


def test_status_after_a_failure(busy_node: StockNode) -> None:
    """N07: after a failed run `status` names its reason and the blocking pod; a success takes the status away."""
    busy_node.add_budget("train", 3)
    busy_node.run(DRAIN_TIMEOUT_SECONDS="3s").require(75)
    told = busy_node.run("status", "--output", "json").require(0).document()
    assert told["sentence"] == "the last run failed and put the node back"
    assert {blocker["kind"] for blocker in told["status"]["blockers"]} == {"pod"}
    assert "train-budget" in told["status"]["message"]
    assert len(busy_node.node()["metadata"]["annotations"][STATUS]) <= 2048
    busy_node.run(DRIVER_CONFIG_DIGEST="old").require(0)
    assert busy_node.annotation(STATUS) is None


def test_restore_with_nothing_to_do(busy_node: StockNode) -> None:
    """R3: `restore` on a node without a record writes nothing, whatever an admin has cordoned."""
    busy_node.change({"spec": {"unschedulable": True}})
    before, mark = busy_node.surface(), busy_node.cp.audit_mark()
    ended = busy_node.run("restore").require(0)
    assert ended.said("nothing to put back")
    assert busy_node.writes(mark) == []
    assert busy_node.surface() == before


def test_preflight(busy_node: StockNode) -> None:
    """Issue 3: every check says pass, warn or fail in a sentence; on a good node none fails, and nothing is written."""
    mark = busy_node.cp.audit_mark()
    checks = busy_node.run("preflight_check", "--output", "json").require(0).document()
    found = {check["check"]: check["result"] for check in checks}
    wanted = {"api", "permissions", "node", "unload", "module-state", "mounts", "host-pid", "keep-off", "record"}
    assert wanted <= set(found)
    assert all(check["sentence"] and check["result"] in ("pass", "warn") for check in checks)
    assert all(check["hint"] for check in checks if check["result"] == "fail")
    assert busy_node.writes(mark) == []
    assert of_program(busy_node.cp.audit(mark)) <= {
        ("create", "selfsubjectrulesreviews"), ("get", "nodes"), ("list", "pods"), ("get", "daemonsets"),
    }  # fmt: skip
    assert "permissions" in busy_node.run("preflight_check").require(0).out


def test_preflight_of_a_record_and_a_taint(busy_node: StockNode, api_proxy: ApiProxy) -> None:
    """N23: it warns of a record that a killed run left, and says which keep-off the driver's DaemonSet tolerates."""
    after_unload(busy_node, api_proxy).kill()
    bury(busy_node, api_proxy)
    checks = {check["check"]: check for check in busy_node.run("preflight_check", "--output", "json").require(0).document()}
    assert checks["record"]["result"] == "warn"
    assert "nvidia.com/gpu" in checks["keep-off"]["sentence"]


def test_rehearsal_is_said_loudly(node: StockNode) -> None:
    """Issue 3: that the host is a directory tree is said by every command."""
    node.add_driver()
    node.tree = empty_host(node.folder / "empty")
    for command in ("uninstall_driver", "restore", "plan", "status", "preflight_check"):
        assert node.run(command).require(0).said(str(node.tree.root)), command


def test_story_of_a_run(busy_node: StockNode) -> None:
    """Issue 3: each step is a line when it begins and one when it ends, and a final line has the verdict, all JSON on request."""
    ended = busy_node.run().require(0)
    assert all(line.startswith("{") for line in ended.err.splitlines())
    begun = [line["step"] for line in ended.lines if line["message"] == "step begins"]
    assert begun == [line["step"] for line in ended.lines if line["message"] == "step ended"]
    assert {line["node"] for line in ended.lines if "step" in line} == {busy_node.name}
    assert (ended.lines[-1]["message"], ended.lines[-1]["exit"]) == ("end", 0)


def test_demo(tmp_path: Path) -> None:
    """Issue 3: the demo needs neither cluster nor GPU: a whole run, the node before and after, and exit 0."""
    ended = start(("demo", "--speed", "20"), {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}, tmp_path / "run").wait().require(0)
    lines = ended.out.splitlines()
    assert any(line.strip().startswith("before:") for line in lines)
    assert any(line.strip().startswith("after:") and "modules loaded: none" in line for line in lines)
    assert "exactly as before" in ended.out
    assert ended.said("budget")
