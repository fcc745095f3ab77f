"""The Cluster contract, part 3: what an eviction is answered with, and what it does."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from driver_manager.errors import Conflict, EvictionBlocked, NotFound, Terminating
from tests.contract.stage import Stage, until

APP = {"app": "guarded"}


async def test_an_eviction_is_accepted_before_the_pod_is_gone(stage: Stage) -> None:
    """It marks the pod; the pod goes in its own time."""
    node = await stage.add_node()
    pod = await stage.add_pod("p", node=node, stop_seconds=0.5)
    await stage.cluster.evict(pod)
    (found,) = await stage.pods(node)
    assert (found.uid, found.is_terminating, found.is_over) == (pod.uid, True, False)
    await stage.gone(node, pod.uid)
    with pytest.raises(NotFound):
        await stage.cluster.evict(pod)


async def test_a_dry_run_changes_nothing(stage: Stage) -> None:
    """Not the pod, and not what the budget allows."""
    node = await stage.add_node()
    pod = await stage.add_pod("p", node=node, labels=APP)
    await stage.add_budget("budget", "guarded", min_available=0)
    for _ in range(3):
        await stage.cluster.evict(pod, dry_run=True)
    (found,) = await stage.pods(node)
    assert not found.is_terminating
    await stage.cluster.evict(pod)


async def test_another_pod_of_that_name(stage: Stage) -> None:
    """The uid decides: the new pod stays."""
    node = await stage.add_node()
    pod = await stage.add_pod("p", node=node)
    old = dataclasses.replace(pod, uid="00000000-0000-0000-0000-000000000000")
    with pytest.raises(Conflict, match="UID in the precondition"):
        await stage.cluster.evict(old)
    (found,) = await stage.pods(node)
    assert not found.is_terminating


@pytest.mark.parametrize("dry_run", [True, False])
async def test_a_budget_says_no(stage: Stage, dry_run: bool) -> None:
    """The refusal names the budget and its numbers, may be tried again, and changes nothing; a dry run asks the budget too."""
    node = await stage.add_node()
    pod = await stage.add_pod("p", node=node, labels=APP)
    await stage.add_budget("tight", "guarded", min_available=1)
    with pytest.raises(EvictionBlocked, match="needs 1 healthy pods and has 1 currently") as caught:
        await stage.cluster.evict(pod, dry_run=dry_run)
    error = caught.value
    assert (error.budget, error.final, error.retry_after, error.transient) == ("tight", False, 0.0, True)
    (found,) = await stage.pods(node)
    assert not found.is_terminating


async def test_the_server_counts_for_itself(stage: Stage) -> None:
    """Of three pods a budget lets one go: of three evictions at once one is accepted.

    The pods have no owner on purpose. On a real server evictions that meet in one budget's status wait half a second in it before they are
    tried again, long enough for a quick replacement to be Ready, and then all three are accepted (seen).
    """
    node = await stage.add_node()
    pods = [await stage.add_pod(f"p{number}", node=node, labels=APP, stop_seconds=3) for number in range(3)]
    await stage.add_budget("two", "guarded", min_available=2)
    answers = await asyncio.gather(*(stage.cluster.evict(pod) for pod in pods), return_exceptions=True)
    refusals = [answer for answer in answers if answer is not None]
    assert len(refusals) == 2
    assert all(isinstance(answer, EvictionBlocked) and answer.budget == "two" for answer in refusals)


async def test_a_budget_frees_up(stage: Stage) -> None:
    """When the replacement of the first pod is Ready the next one may go."""
    node = await stage.add_node({"here": stage.namespace})
    await stage.add_deployment("guarded", 2, selector={"here": stage.namespace})
    await stage.add_budget("one", "guarded", max_unavailable=1)
    first, second = await stage.pods(node, "guarded")
    await stage.cluster.evict(first)

    async def may_go() -> bool:
        try:
            await stage.cluster.evict(second)
        except EvictionBlocked:
            return False
        return True

    await until(may_go, "the budget to free up")
    await stage.gone(node, second.uid)


async def test_two_budgets(stage: Stage) -> None:
    """The eviction API never evicts such a pod: a final refusal."""
    node = await stage.add_node()
    pod = await stage.add_pod("p", node=node, labels=APP)
    await stage.add_budget("one", "guarded", min_available=0)
    await stage.add_budget("two", "guarded", min_available=0)
    with pytest.raises(EvictionBlocked, match="more than one PodDisruptionBudget") as caught:
        await stage.cluster.evict(pod, dry_run=True)
    assert caught.value.final


async def test_a_pod_that_goes_already(stage: Stage) -> None:
    """No budget is asked for it, and another eviction is accepted."""
    node = await stage.add_node()
    pod = await stage.add_pod("p", node=node, labels=APP, stop_seconds=2)
    await stage.add_budget("tight", "guarded", min_available=1)
    await stage.delete_pod(pod)
    await stage.cluster.evict(pod)
    (found,) = await stage.pods(node)
    assert found.is_terminating


async def test_a_pod_that_never_ran(stage: Stage) -> None:
    """A Pending pod goes without its budget, and being nowhere it goes at once."""
    node = await stage.add_node()
    pod = await stage.add_pod("pending", node=None, labels=APP)
    await stage.add_budget("tight", "guarded", min_available=1)
    await stage.cluster.evict(pod)
    with pytest.raises(NotFound):
        await stage.cluster.evict(pod)
    assert await stage.pods(node) == []


@pytest.mark.parametrize("always_unready", [True, False])
async def test_an_unready_pod(stage: Stage, always_unready: bool) -> None:
    """With too few healthy pods an unready one goes only if the budget says so."""
    node = await stage.add_node()
    await stage.add_pod("healthy", node=node, labels=APP)
    pod = await stage.add_pod("sick", node=node, labels=APP, is_ready=False)
    await stage.add_budget("tight", "guarded", min_available=2, always_unready=always_unready)
    if always_unready:
        await stage.cluster.evict(pod)
        return
    with pytest.raises(EvictionBlocked, match="needs 2 healthy pods and has 1 currently"):
        await stage.cluster.evict(pod)


async def test_an_unready_pod_of_a_met_budget(stage: Stage) -> None:
    """It may go while the healthy pods are enough, although none of them may."""
    node = await stage.add_node()
    healthy = await stage.add_pod("healthy", node=node, labels=APP)
    sick = await stage.add_pod("sick", node=node, labels=APP, is_ready=False)
    await stage.add_budget("tight", "guarded", min_available=1)
    with pytest.raises(EvictionBlocked):
        await stage.cluster.evict(healthy)
    await stage.cluster.evict(sick)


async def test_no_grace(stage: Stage) -> None:
    """Grace 0 takes the pod out of the API at once."""
    node = await stage.add_node()
    pod = await stage.add_pod("p", node=node, stop_seconds=4)
    await stage.cluster.evict(pod, grace_seconds=0)
    assert await stage.pods(node) == []


async def test_a_namespace_that_is_being_deleted(stage: Stage) -> None:
    """An eviction there is refused as new content, which means: the pod goes by itself."""
    node = await stage.add_node()
    namespace = await stage.add_namespace()
    pod = await stage.add_pod("p", node=node, namespace=namespace, stop_seconds=3, grace_seconds=5)
    await stage.delete_namespace(namespace)
    for dry_run in (True, False):
        with pytest.raises(Terminating, match="is being terminated"):
            await stage.cluster.evict(pod, dry_run=dry_run)


async def test_a_stale_uid_under_a_closed_budget(stage: Stage) -> None:
    """The budget is asked first, so this is no Conflict: whoever is refused must look whether the pod is still that pod."""
    node = await stage.add_node()
    pod = await stage.add_pod("p", node=node, labels=APP)
    await stage.add_budget("tight", "guarded", min_available=1)
    old = dataclasses.replace(pod, uid="00000000-0000-0000-0000-000000000000")
    with pytest.raises(EvictionBlocked):
        await stage.cluster.evict(old)


async def test_a_stale_uid_costs_the_budget(stage: Stage) -> None:
    """The server counts before it looks at the uid, and forgets that only after two minutes: a Conflict must not be sent again."""
    node = await stage.add_node()
    pod = await stage.add_pod("p", node=node, labels=APP)
    await stage.add_pod("q", node=node, labels=APP)
    await stage.add_budget("loose", "guarded", min_available=1)
    old = dataclasses.replace(pod, uid="00000000-0000-0000-0000-000000000000")
    with pytest.raises(Conflict):
        await stage.cluster.evict(old)
    for pause in (0.0, 0.5):
        await asyncio.sleep(pause)
        with pytest.raises(EvictionBlocked):
            await stage.cluster.evict(pod)
