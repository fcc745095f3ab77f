"""Budgets and evictions: a pod that may not go now costs nobody else on its node the place in vain (R5), and is named at once."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver_manager.controller.run import Replica
from driver_manager.core.disruption import covering_budgets, in_order, never_evicted
from driver_manager.core.fleet import BudgetView
from driver_manager.core.rollout_states import Because, State
from driver_manager.core.snapshot import LabelExpression, PodView
from driver_manager.sim.fleetworld import FleetWorld
from driver_manager.sim.objects import HOSTNAME, Budget, PodSpec
from tests.controller.stories import is_open, play, state, until, until_done

KEPT = {"tier": "kept"}
"""Labels of the pods that have a budget."""


def mixed(kept: int = 1, budget: int | None = 0) -> tuple[FleetWorld, Budget | None]:
    """A node with two GPU pods without a budget, and some with one that lets so many go."""
    world = FleetWorld(1, nodes=1, policy={"autoUpgrade": True, "maxUnavailable": "100%", "podDeletion": {"timeoutSeconds": 600}})
    spec = PodSpec(labels=KEPT, gpus=1, node_selector={HOSTNAME: "gpu-1"})
    world.add_deployment("kept", spec, replicas=kept, node="gpu-1")
    made = world.add_budget("keep", KEPT, max_unavailable=budget) if budget is not None else None
    return world, made


def gone(world: FleetWorld) -> list[str]:
    """Which Deployments' pods were evicted, in order."""
    return [deed.target.split("/")[1].split("-")[0] for deed in world.deeds("evict")]


def tries(world: FleetWorld, *, dry: bool) -> list[str]:
    """Pods whose eviction was asked for."""
    calls = [call for call in world.faults.calls if call.name == "evict" and call.when.value == "before"]
    return [str(call.args["pod"]) for call in calls if bool(call.args["dry_run"]) is dry]


def test_nobody_goes_in_vain() -> None:
    """R5, N07: while the budget is full nobody of the node is evicted; reason, sentence and one Event name it within two seconds."""
    world, budget = mixed()
    assert budget is not None

    async def story(world: FleetWorld, replica: Replica) -> None:
        world.new_driver("two")
        await until(lambda: state(world) == State.POD_DELETION, "the freeing")
        await asyncio.sleep(2)
        stay = replica.controller.stays["gpu-1"]
        assert stay.because is Because.BLOCKED_BY_BUDGET
        assert "keep" in stay.sentence
        await asyncio.sleep(200)
        assert gone(world) == []
        notes = [note for _, _, note in world.store.notes if note.reason == Because.BLOCKED_BY_BUDGET]
        assert len(notes) == 1
        assert notes[0].is_warning
        assert "The disruption budget keep" in notes[0].sentence
        world.set_budget(budget, max_unavailable=1)
        await until_done(world)

    play(world, story)
    assert gone(world) == ["kept", "train", "train"]


def test_room_for_some_is_not_room_for_all() -> None:
    """A budget with room for one of two: those without a budget keep their place until the other one may go too."""
    world, budget = mixed(kept=2, budget=1)
    assert budget is not None

    async def story(world: FleetWorld, replica: Replica) -> None:
        world.new_driver("two")
        await until(lambda: gone(world) == ["kept"], "the first")
        await asyncio.sleep(60)
        assert gone(world) == ["kept"]
        assert "keep" in replica.controller.stays["gpu-1"].sentence
        world.set_budget(budget, max_unavailable=2)
        await until_done(world)

    play(world, story)
    assert gone(world) == ["kept", "kept", "train", "train"]


def test_it_is_given_back_when_the_time_is_over() -> None:
    """Nobody has gone, so the node is opened as it was; the failure names the budget."""
    world, _ = mixed()

    async def story(world: FleetWorld, replica: Replica) -> None:
        world.new_driver("two")
        await until(lambda: state(world) == State.POD_DELETION, "the freeing")
        await until(lambda: state(world) == State.REQUIRED, "the end of its time", 700)
        assert is_open(world)
        assert gone(world) == []
        failure = replica.controller.situation(replica.controller.cache.nodes["gpu-1"]).progress
        assert failure is not None
        assert "keep" in failure.failures[-1].sentence

    play(world, story)


def test_two_budgets_are_found_before_the_start() -> None:
    """N07: a pod of two budgets can never be evicted: the node is not begun, and both are named; without one of them it is."""
    world, _ = mixed(budget=1)
    second = world.add_budget("second", KEPT, max_unavailable=1)

    async def story(world: FleetWorld, replica: Replica) -> None:
        world.new_driver("two")
        await until(lambda: replica.controller.stays["gpu-1"].because is Because.BLOCKED_BY_POD, "the refusal")
        sentence = replica.controller.stays["gpu-1"].sentence
        assert "keep and second" in sentence
        await asyncio.sleep(60)
        assert (state(world), is_open(world), gone(world)) == (State.REQUIRED, True, [])
        world.remove_budget(second)
        await until_done(world)

    play(world, story)


def test_decision_42_without_budgets_no_request_more() -> None:
    """One eviction for each pod and no dry run; with a single pod of a budget that has room neither, with two a dry run for each."""
    for kept, budget, dry in ((0, None, 0), (1, 5, 0), (2, 5, 2)):
        world, _ = mixed(kept=kept, budget=budget)

        async def story(world: FleetWorld, replica: Replica) -> None:
            world.new_driver("two")
            await until_done(world)

        play(world, story)
        assert len(tries(world, dry=True)) == dry
        assert len(tries(world, dry=False)) == 2 + kept


# The order ------------------------------------------------------------------------------------------------------------


def pod(uid: str, labels: dict[str, str] | None = None, **fields: object) -> PodView:
    return PodView(namespace="ns", name=uid, uid=uid, labels=labels or {}, phase="Running", **fields)  # type: ignore[arg-type]


def budget_of(name: str, value: str, allowed: int, *, is_observed: bool = True) -> BudgetView:
    selector = (LabelExpression("app", "In", (value,)),)
    return BudgetView(namespace="ns", name=name, uid=name, selector=selector, allowed=allowed, is_observed=is_observed)


BUDGETS = st.lists(
    st.builds(budget_of, st.text("abc", min_size=1, max_size=3), st.sampled_from("xyz"), st.integers(0, 3), is_observed=st.booleans()),
    max_size=3,
    unique_by=lambda each: each.uid,
)
PODS = st.lists(st.sampled_from("xyzw"), max_size=8).map(lambda apps: [pod(f"p{n}", {"app": app}) for n, app in enumerate(apps)])


@given(pods=PODS, budgets=BUDGETS)
def test_everybody_has_one_place_in_the_order(pods: list[PodView], budgets: list[BudgetView]) -> None:
    """Pods without a budget are last, those of a budget without room for all of its pods here first, and nobody is lost."""
    order = in_order(pods, budgets)
    assert sorted(each.uid for part in (order.scarce, order.covered, order.free) for each in part) == [each.uid for each in pods]
    assert all(not covering_budgets(each, budgets) for each in order.free)
    for each in order.covered:
        for budget in covering_budgets(each, budgets):
            assert budget.is_observed
            assert budget.allowed >= sum(budget in covering_budgets(other, budgets) for other in pods)
    assert set(never_evicted(pods, budgets)) == set(never_evicted((*order.scarce, *order.covered), budgets))


@pytest.mark.parametrize(
    ("selector", "labels", "covers"),
    [
        (None, {"a": "b"}, False),
        ((), {"a": "b"}, True),
        ((LabelExpression("a", "In", ("b", "c")),), {"a": "b"}, True),
        ((LabelExpression("a", "NotIn", ("b",)),), {}, True),
        ((LabelExpression("a", "Exists"),), {}, False),
        ((LabelExpression("a", "DoesNotExist"), LabelExpression("x", "Exists")), {"x": ""}, True),
    ],
)
def test_whom_a_budget_covers(selector: tuple[LabelExpression, ...] | None, labels: dict[str, str], covers: bool) -> None:
    """None covers nobody, an empty selector everybody of its namespace: policy/v1."""
    budget = BudgetView(namespace="ns", name="b", uid="b", selector=selector)
    assert budget.covers("ns", labels) is covers
    assert not budget.covers("other", labels)


def test_whom_the_server_asks_no_budget_for() -> None:
    """Pods that have not begun, have ended, or are on their way."""
    budgets = [budget_of("b", "x", 0), budget_of("c", "x", 0)]
    labels = {"app": "x"}
    easy = [PodView(namespace="ns", name=phase, uid=phase, labels=labels, phase=phase) for phase in ("Pending", "Succeeded", "Failed")] + [
        pod("going", labels, is_terminating=True)
    ]
    assert not any(covering_budgets(each, budgets) for each in easy)
    assert never_evicted(easy, budgets) == ()
    (sentence,) = never_evicted([*easy, pod("there", labels)], budgets)
    assert sentence.startswith("pod ns/there has the budgets b and c")
