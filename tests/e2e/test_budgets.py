"""Budgets that say no: for ever, for a while, or two of them at once."""

from __future__ import annotations

import itertools

import pytest

from tests.e2e.command import Ended, Running
from tests.e2e.world import STATUS, Object, StockNode, stamp
from tests.kube.proxy import ApiProxy

pytestmark = pytest.mark.kube


def with_budget(node: StockNode, others: int, *, grace_seconds: int = 1) -> str:
    """The stock node with one pod behind a budget that never allows, and other GPU pods; gives the budget's path."""
    node.add_driver(digest="new")
    node.add_operands(only=("device-plugin",))
    node.add_training(others, grace_seconds=grace_seconds)
    node.add_training(1, name="held", grace_seconds=1)
    return node.add_budget("held", 1)


def wait_status(node: StockNode, words: str, timeout: float) -> Object:
    """The node's status annotation, once it holds these words."""

    def told() -> Object | None:
        found: Object | None = node.annotation(STATUS)
        return found if found is not None and words in str(found) else None

    got: Object = node.cp.wait_for(told, f"{words} in the status", timeout)
    return got


def assert_it_gave_up(node: StockNode, run: Running, limit: float, before: Object, pods: Object, mark: int) -> Ended:
    """It told the budget soon, asked at most once in two seconds, evicted nobody, put all back and kept to its limit."""
    line = run.wait_for_line(lambda line: "held-budget" in line.get("for", ""), "the budget in the log", 20)
    first = min(stamp(event["stageTimestamp"]) for event in node.eviction_tries(mark, dry=True))
    assert stamp(line["time"]) - first < 3
    wait_status(node, "held-budget", 3)
    ended = run.wait(limit + 20).require(75)
    tries = sorted(held_tries(node, mark))
    assert len(tries) > 2
    assert all(later - earlier > 1.95 for earlier, later in itertools.pairwise(tries)), tries
    assert node.evictions(mark) == []
    assert {**node.uids("train"), **node.uids("held")} == pods
    node.wait_surface(before)
    assert ended.said("held-budget", "DRAIN_TIMEOUT_SECONDS")
    assert node.annotation(STATUS)["phase"] == "failed"
    assert "held-budget" in str(node.annotation(STATUS))
    evicting = next(line for line in ended.lines if line["message"] == "step ended" and line["step"] == "FreePods")
    assert limit <= evicting["took"] <= 1.5 * limit
    return ended


def held_tries(node: StockNode, mark: int) -> list[float]:
    """When the blocked pod was asked for, dry runs included."""
    return [
        stamp(event["stageTimestamp"])
        for event in (*node.eviction_tries(mark, dry=True), *node.eviction_tries(mark))
        if event["objectRef"]["name"].startswith("held-")
    ]


@pytest.mark.parametrize(
    ("limit", "others"), [(12, 3), pytest.param(60, 19, marks=pytest.mark.slow)], ids=["twelve-seconds", "one-minute-and-nineteen-others"]
)
def test_budget_that_never_allows(node: StockNode, limit: int, others: int) -> None:
    """N07, N59, R6: it says whose budget, asks at most once in 2 s, evicts nobody in vain, ends within 10 percent of its limit."""
    with_budget(node, others)
    before, pods, mark = node.surface(), {**node.uids("train"), **node.uids("held")}, node.cp.audit_mark()
    run = node.start("uninstall_driver", DRAIN_TIMEOUT_SECONDS=f"{limit}s")
    assert_it_gave_up(node, run, limit, before, pods, mark)


def test_budget_that_frees_up_late(node: StockNode) -> None:
    """N07: as soon as the budget allows it the run goes on, and each pod is evicted once."""
    budget = with_budget(node, 2)
    before, pods, mark = node.surface(), {**node.uids("train"), **node.uids("held")}, node.cp.audit_mark()
    run = node.start("uninstall_driver", DRAIN_TIMEOUT_SECONDS="60s")
    run.wait_for_line(lambda line: "held-budget" in line.get("for", ""), "the budget in the log", 20)
    node.cp.patch(budget, {"spec": {"minAvailable": 0}})
    run.wait().require(0)
    node.wait_surface(before)
    assert node.evicted(mark) == sorted(pods)


def test_two_budgets_on_one_pod(node: StockNode) -> None:
    """N07, R5: two budgets never let go of a pod, so the run is refused with 65 before the first write."""
    with_budget(node, 2)
    node.add_budget("held", 0, name="held-too")
    before, mark = node.surface(), node.cp.audit_mark()
    ended = node.run().require(65)
    (held,) = node.uids("held")
    assert ended.said(held, "more than one PodDisruptionBudget")
    assert node.evictions(mark) == []
    assert node.surface() == before
    assert node.tree.calls() == []
    assert [line for line in node.writes(mark) if line != "patch nodes"] == []
    assert len(node.writes(mark)) <= 1, "the status alone"


@pytest.mark.parametrize("policy", ["AlwaysAllow", None])
def test_crash_looping_pod_behind_a_budget(node: StockNode, policy: str | None) -> None:
    """N07: an unready pod goes where the budget's policy lets it; where it does not, the budget is named."""
    node.add_driver(digest="new")
    node.add_training(1, name="held", grace_seconds=1)
    node.add_budget("held", 1, **({"unhealthyPodEvictionPolicy": policy} if policy else {}))
    (name,) = node.uids("held")
    condition = {"type": "Ready", "status": "False", "reason": "CrashLoop"}
    node.cp.patch(f"{node.space}/pods/{name}/status", {"status": {"conditions": [condition]}})
    before = node.surface()
    ended = node.run(DRAIN_TIMEOUT_SECONDS="3s").require(0 if policy else 75)
    assert policy or ended.said("held-budget", "needs 1 healthy")
    node.wait_surface(before)


def test_server_that_sheds_load(busy_node: StockNode, api_proxy: ApiProxy) -> None:
    """N07: a 429 of priority and fairness, in plain text, is a server that is busy: its Retry-After is kept and the run succeeds."""
    before, mark, pods = busy_node.surface(), busy_node.cp.audit_mark(), busy_node.uids("train")
    busy = "Too many requests, please try again later.\n"
    shed = [
        api_proxy.on("create", r"/eviction$").answer(429, busy, headers={"Retry-After": "2"}),
        api_proxy.on("list", r"/pods\?").answer(429, busy, headers={"Retry-After": "1"}),
        api_proxy.on("patch", r"/nodes/").answer(429, busy, headers={"Retry-After": "1"}),
    ]
    busy_node.run(proxy=api_proxy).require(0)
    busy_node.wait_surface(before)
    assert busy_node.evicted(mark) == sorted(pods)
    for rule, wanted in zip(shed, (2, 1, 1), strict=True):
        (first,) = rule.obeyed
        again = [seen for seen in api_proxy.requests(first.verb) if seen.path == first.path and seen.at > first.at]
        assert again[0].at - first.at >= wanted - 0.05


def test_budget_whose_status_is_behind(busy_node: StockNode, api_proxy: ApiProxy) -> None:
    """N07: where the answer is 'still being processed' with a Retry-After, no try comes earlier."""
    body = {
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "reason": "TooManyRequests", "code": 429,
        "message": "Cannot evict pod as it would violate the pod's disruption budget.",
        "details": {
            "causes": [{"reason": "DisruptionBudget", "message": "The disruption budget b is still being processed by the server."}],
            "retryAfterSeconds": 3,
        },
    }  # fmt: skip
    rule = api_proxy.on("create", r"/eviction$").answer(429, body, headers={"Retry-After": "3"})
    busy_node.run(proxy=api_proxy).require(0)
    (first,) = rule.obeyed
    again = [seen for seen in api_proxy.requests("create", r"/eviction$") if seen.path == first.path and seen.at > first.at]
    assert again[0].at - first.at >= 2.95
