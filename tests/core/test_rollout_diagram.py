"""The page about the states is drawn from the tables."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from driver_manager.core.rollout_diagram import diagram, drawn, exits, sentences
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
from driver_manager.core.situation import RolloutSettings

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
    assert IDLE | WORKING | {State.FAILED} == {*State} == {*exits(RolloutSettings())} == {*TRANSITIONS}
    assert all(TRANSITIONS[state] for state in State)


def test_the_times_and_tries_are_those_of_the_settings() -> None:
    """What the page says is so by default is what the program does by default, and follows it when that changes."""
    told = exits(RolloutSettings(driver_timeout=90.0, validation_timeout=0.0, attempts=5))
    assert told[State.POD_RESTART][1] == "90 s from the deletion, anew with each template"
    assert told[State.VALIDATION][1] == "no limit"
    assert told[State.POD_DELETION][0].endswith("else back to wait, 5 times")
    assert exits(RolloutSettings(attempts=0))[State.DRAIN][0].endswith("else back to wait, any number of times")
    defaults = exits(RolloutSettings())
    assert (defaults[State.POD_RESTART][1].split(" from")[0], defaults[State.VALIDATION][1]) == ("30 min", "10 min")


@pytest.mark.parametrize(("label", "state"), [(None, State.UNKNOWN), ("", State.UNKNOWN), ("upgrade-done", State.DONE), ("done", None)])
def test_a_label_is_a_state_or_none(label: str | None, state: State | None) -> None:
    """No label is a state of its own, a value that is none is no state."""
    assert state_of(label) is state
