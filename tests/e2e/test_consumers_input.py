"""Bad input about consumers: what does not parse is refused before any request, what is malformed in the cluster harms nobody."""

from __future__ import annotations

import pytest

from tests.e2e.gpu_users import GpuUsers, asks, end_process, verdicts_by_app
from tests.e2e.world import Object, StockNode

pytestmark = pytest.mark.kube
BAD = (
    ("CONSUMER_POD_SELECTOR", "role in (gpu"),
    ("CONSUMER_POD_SELECTOR", "role=gpu=user"),
    ("DRAIN_POD_SELECTOR_LABEL", "=x"),
    ("HIDDEN_CONSUMERS", "perhaps"),
    ("POLICY_OWNED_CONSUMERS", "Free"),
    ("GPU_RESOURCE_PREFIXES", "gpu"),
    ("GPU_RUNTIME_HANDLERS", "nvidia;nvidia-cdi"),
    ("NODE_LABEL_FOR_GPU_POD_EVICTION", "not a key"),
    ("FORCE_DELETE_STUCK_PODS", "yes"),
)
ODD: dict[str, Object] = {
    "no-value": {"annotations": {"nvidia.com/gpu.client": ""}},
    "upper-case": {"annotations": {"nvidia.com/gpu.client": "TRUE"}},
    "json": {"annotations": {"nvidia.com/gpu.client": '{"true": true}'}},
    "commas": {"annotations": {"cdi.k8s.io/devices": ",,=,vendor.com/nvidia.com=1,\u00e9,"}},
    "label": {"labels": {"nvidia.com/gpu.client": "True"}},
}
"""Pods whose marks mean nothing."""
CGROUPS = (
    "",
    "\n\n",
    "0::",
    "garbage",
    "0::/kubepods/pod../x\n",
    "a:b:c:d\n",
    f"0::/{'x' * 5000}/kubepods/pod\n",
    "0::/kubepods/pod\x00\udcff",
)


def test_settings_that_do_not_parse(node: StockNode) -> None:
    """Issue 4 (5): a selector, policy word or name that does not parse ends every command with 78, named, before any request."""
    node.add_driver(digest="new")
    mark = node.cp.audit_mark()
    runs = [(key, value, node.start("uninstall_driver", env=node.environment() | {key: value})) for key, value in BAD]
    for key, value, run in runs:
        ended = run.wait().require(78)
        assert ended.said(key, value), ended.err
    assert node.start("plan", HIDDEN_CONSUMERS="perhaps").wait().code == 78
    assert node.audit(mark) == []
    assert node.tree.calls() == []


def test_marks_that_mean_nothing(node: StockNode, users: GpuUsers) -> None:
    """Issue 4 (5): malformed marks, annotations and cgroup lines cost nobody anything, and the run goes its way."""
    node.add_driver(digest="new")
    for name, meta in ODD.items():
        users.deployment(name, **meta)
    users.deployment("train", containers=[asks()])
    users.wait()
    for number, text in enumerate(CGROUPS):
        node.tree.process(4000 + number, cgroup="0::/\n")
        (node.tree.root / f"proc/{4000 + number}/cgroup").write_bytes(text.encode(errors="surrogateescape"))
        (node.tree.root / f"proc/{4000 + number}/fd/9").symlink_to("/dev/nvidia0")
    plan = node.run("plan", "--output", "json").require(0).document()
    found = verdicts_by_app(node, plan)
    assert {app: found[app]["action"] for app in (*ODD, "train")} == {**dict.fromkeys(ODD, "keep"), "train": "evict"}
    assert {(each["pid"], each["pod"]) for each in plan["holders"]} == {(4000 + number, "") for number in range(len(CGROUPS))}
    before, mark, kept, train = node.surface(), node.cp.audit_mark(), {app: node.uids(app) for app in ODD}, node.uids("train")
    run = node.start("uninstall_driver")
    run.wait_for_line(lambda line: line.get("reason") == "held-by-process" and "unknown owner" in line["for"], "the processes to be named")
    for number in range(len(CGROUPS)):
        end_process(node, 4000 + number)
    run.wait().require(0)
    node.wait_surface(before)
    assert node.evicted(mark) == sorted(train)
    assert {app: node.uids(app) for app in ODD} == kept
