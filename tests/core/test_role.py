"""Who leads: by gpu-operator's Lease and one clock, whatever the times in it say."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver_manager.core.fleet import LeaseView
from driver_manager.core.role import UNREAD_SECONDS, Choice, Rival, Role, leads_alone, standing
from driver_manager.core.rollout_states import State
from driver_manager.names import REQUESTOR_MODE
from tests.core.rollouts import node, situation


def lease(version: str = "1", holder: str = "op-1", duration: int = 15, renewed: str = "") -> LeaseView:
    return LeaseView(
        namespace="gpu-operator",
        name="53822513.nvidia.com",
        resource_version=version,
        holder=holder,
        duration_seconds=duration,
        renewed=renewed,
    )


def role(rival: Rival, now: float, choice: Choice = Choice.AUTO) -> Role | None:
    found = standing(choice, rival, now)
    return found.role if found else None


def test_nothing_is_known_before_the_first_look() -> None:
    """Neither leads nor follows."""
    assert role(Rival(began=0.0), 5.0) is None


@pytest.mark.parametrize(
    ("found", "expected", "words"),
    [
        (lease(), Role.FOLLOW, "is held by op-1"),
        (lease(version="", holder=""), Role.LEAD, "there is no Lease gpu-operator/53822513.nvidia.com"),
        (lease(holder=""), Role.LEAD, "was given up"),
        (lease(duration=0), Role.FOLLOW, "is held by op-1"),
    ],
)
def test_the_first_look(found: LeaseView, expected: Role, words: str) -> None:
    """A Lease that somebody holds is believed at first sight: it is not known yet whether it is renewed."""
    said = standing(Choice.AUTO, Rival(began=0.0).seen(found, 100.0), 100.0)
    assert said is not None
    assert said.role is expected
    assert words in said.sentence


def test_a_lease_is_over_when_it_was_not_seen_to_change_for_its_duration() -> None:
    """To the second, by our own clock; a renewal makes it live again."""
    rival = Rival(began=0.0).seen(lease(), 10.0).seen(lease(), 24.9)
    assert role(rival, 24.9) is Role.FOLLOW
    rival = rival.seen(lease(), 25.0)
    assert role(rival, 25.0) is Role.LEAD
    assert role(rival.seen(lease("2"), 26.0), 26.0) is Role.FOLLOW


@pytest.mark.parametrize("renewed", ["1999-01-01T00:00:00.000000Z", "2999-01-01T00:00:00.000000Z", "nonsense", ""])
def test_the_times_in_it_mean_nothing(renewed: str) -> None:
    """N50: clocks of machines are never compared."""
    rival = Rival(began=0.0).seen(lease(renewed=renewed), 0.0)
    assert role(rival.seen(lease(renewed=renewed), 14.0), 14.0) is Role.FOLLOW
    assert role(rival.seen(lease(renewed=renewed), 15.0), 15.0) is Role.LEAD


def test_silence_is_no_death() -> None:
    """While it cannot be read nothing changes for a while, and then it is not known who leads, so ours does not."""
    leading = Rival(began=0.0).seen(lease(holder=""), 100.0).unread("503")
    assert role(leading, 100.0 + UNREAD_SECONDS - 1) is Role.LEAD
    assert role(leading, 100.0 + UNREAD_SECONDS) is Role.FOLLOW
    following = Rival(began=0.0).seen(lease(), 100.0).unread("503")
    assert role(following, 100.0 + 3600.0) is Role.FOLLOW
    assert role(Rival(began=0.0).unread("forbidden"), UNREAD_SECONDS - 1) is None
    assert role(Rival(began=0.0).unread("forbidden"), UNREAD_SECONDS) is Role.FOLLOW


@pytest.mark.parametrize(("choice", "expected"), [(Choice.LEAD, Role.LEAD), (Choice.FOLLOW, Role.FOLLOW)])
def test_a_person_decides(choice: Choice, expected: Role) -> None:
    """Without a look, and against what it would show."""
    assert role(Rival(began=0.0), 0.0, choice) is expected
    assert role(Rival(began=0.0).seen(lease(), 1.0), 1.0, choice) is expected


@pytest.mark.parametrize("is_asked", [False, True])
@pytest.mark.parametrize("state", list(State))
def test_nodes_that_gpu_operator_never_moves_are_led(state: State, is_asked: bool) -> None:
    """Those in a maintenance, and those that it does not open because of the annotation of one; every other is its own."""
    marked = replace(node(state), annotations={REQUESTOR_MODE: "true"} if is_asked else {})
    seen = situation(marked)
    is_in_maintenance = state in (State.MAINTENANCE, State.AFTER_MAINTENANCE)
    assert leads_alone(seen) is (is_in_maintenance or (state is State.UNCORDON and is_asked))


@given(st.lists(st.tuples(st.floats(0.1, 40.0), st.booleans(), st.booleans()), max_size=30))
def test_it_leads_only_after_a_whole_duration_without_a_change(looks: list[tuple[float, bool, bool]]) -> None:
    """Whatever is seen and missed: while somebody holds the Lease, ours leads only if no change was seen for its duration by a look."""
    now, version, rival = 0.0, 1, Rival(began=0.0)
    changed = now
    rival = rival.seen(lease("1"), now)
    for pause, is_renewed, is_read in looks:
        now += pause
        version += is_renewed
        if is_read:
            if rival.lease is not None and rival.lease.resource_version != str(version):
                changed = now
            rival = rival.seen(lease(str(version)), now)
        else:
            rival = rival.unread("503")
        if role(rival, now) is Role.LEAD:
            assert rival.read_at - changed >= 15.0
