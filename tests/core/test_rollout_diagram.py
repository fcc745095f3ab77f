"""The page about the states is drawn from the tables."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from driver_manager.core.rollout_diagram import EXITS, diagram, drawn, sentences
from driver_manager.core.rollout_states import (
    AFTER_RESTART,
    BEFORE_RESTART,
    IDLE,
    TRANSITIONS,
    WORKING,
    Because,
    State,
    state_of,
)

PAGE = Path(__file__).resolve().parents[2] / "docs/upgrade-states.md"


def test_the_page_is_what_the_tables_say() -> None:
    """Nobody has changed a table without drawing the page again: run scripts/draw-states."""
    part = PAGE.read_text().split("<!-- drawn: begin -->\n")[1].split("<!-- drawn: end -->")[0]
    assert part == drawn()


def test_the_diagram_has_every_transition_and_no_other() -> None:
    """Read back, it is the table."""
    edges = re.findall(r"^    (\w+) --> (\w+)$", diagram(), re.MULTILINE)
    wanted = {(before, each) for before in State for each in TRANSITIONS[before]}
    assert {(State[before], State[after]) for before, after in edges} == wanted


@pytest.mark.parametrize("kind", [State, Because])
def test_every_value_has_a_sentence(kind: type[State | Because]) -> None:
    """Each state and each reason says what it means."""
    found = sentences(kind)
    assert list(found) == [each.value for each in kind]
    assert all(sentence.endswith(".") for sentence in found.values()), found


def test_the_kinds_of_states_are_all_of_them() -> None:
    """Each state is idle, before the restart, after it, or failed; each has an exit."""
    assert len(IDLE) + len(BEFORE_RESTART) + len(AFTER_RESTART) + 1 == len(State)
    assert IDLE | WORKING | {State.FAILED} == {*State} == {*EXITS} == {*TRANSITIONS}
    assert all(TRANSITIONS[state] for state in State)


@pytest.mark.parametrize(("label", "state"), [(None, State.UNKNOWN), ("", State.UNKNOWN), ("upgrade-done", State.DONE), ("done", None)])
def test_a_label_is_a_state_or_none(label: str | None, state: State | None) -> None:
    """No label is a state of its own, a value that is none is no state."""
    assert state_of(label) is state
