"""Pausing labels and putting them back, by specification table 1.3 where another program paused them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver_manager import names
from driver_manager.core.labels import is_paused, is_paused_by_another, labels_to_pause, original_of_paused
from driver_manager.operands import OPERANDS, Turn
from tests.core.given import LABELS, VALUES

PAUSED = names.PAUSED
DCGM = names.DEPLOY_PREFIX + "dcgm"
DRA = names.DEPLOY_PREFIX + "dra-driver"
CUSTOM = "example.com/gpu"


@pytest.mark.parametrize(
    ("value", "original"),
    [(PAUSED, "true"), (f"x_{PAUSED}", "x"), (f"{PAUSED}_x", "x"), (f"x{PAUSED}", "x"), (f"_x__{PAUSED}", "x"),
     (f"pre-installed_{PAUSED}", "pre-installed"),
     (f"False_{PAUSED}", "False"), (f"{PAUSED}_{PAUSED}", "")],
)  # fmt: skip
def test_what_upstream_would_put_back(value: str, original: str) -> None:
    """Table 1.3: the token and one underscore after it are an addition, underscores at both ends go, the plain token was `true`."""
    assert original_of_paused(value) == original


@pytest.mark.parametrize(
    ("value", "by_us", "by_another"),
    [
        (PAUSED, True, False),
        (f"x_{PAUSED}", True, False),
        ("paused-for-mig-change", False, True),
        ("true", False, False),
        ("", False, False),
    ],
)
def test_who_paused(value: str, by_us: bool, by_another: bool) -> None:
    """NVIDIA's driver token and another tool's token are told apart."""
    assert (is_paused(value), is_paused_by_another(value)) == (by_us, by_another)


@pytest.mark.parametrize(
    ("value", "operand", "client"),
    [("true", "true", "true"), ("false", None, None), ("", None, None), ("x", None, "x"), ("pre-installed", None, "pre-installed"),
     (PAUSED, "true", "true"), (f"x_{PAUSED}", "x", "x"), ("paused-for-mig-change", None, None)],
)  # fmt: skip
def test_what_is_paused(value: str, operand: str | None, client: str | None) -> None:
    """Decision 10: operands that run, and the client's and the user's own label whatever they say but `false`."""
    found = labels_to_pause({DCGM: value, names.DEPLOY_CLIENT: value, CUSTOM: value}, CUSTOM, {}).all
    assert found.get(DCGM) == operand
    assert found.get(names.DEPLOY_CLIENT) == client
    assert found.get(CUSTOM) == client


def test_absent_labels_are_never_made() -> None:
    """Nothing is paused on a node without labels."""
    assert labels_to_pause({}, CUSTOM, {}).all == {}


def test_the_record_wins_over_a_guess() -> None:
    """Decision 7: what an earlier run recorded is the original; without a record the guess is said to be one."""
    labels = {DCGM: PAUSED}
    assert labels_to_pause(labels, "", {DCGM: "yes"}).all == {DCGM: "yes"}
    assert labels_to_pause(labels, "", {DCGM: "yes"}).guessed == ()
    assert labels_to_pause(labels, "", {}).guessed == (DCGM,)


def test_the_dra_plugin_goes_last() -> None:
    """The two turns are those of the operand table."""
    found = labels_to_pause({operand.label: "true" for operand in OPERANDS}, "", {})
    assert set(found.last) == {operand.label for operand in OPERANDS if operand.turn is Turn.LAST} == {DRA}
    assert set(found.first) | set(found.last) == {operand.label for operand in OPERANDS}


@given(st.dictionaries(st.sampled_from(LABELS), st.sampled_from(VALUES)))
def test_a_paused_value_is_never_an_original(labels: dict[str, str]) -> None:
    """No original holds a pause token, ours or another's; every label is one of paused, foreign or left."""
    found = labels_to_pause(labels, CUSTOM, {})
    assert not any("paused-for" in value for value in found.all.values())
    assert set(found.all) <= set(labels)
    assert not set(found.all) & set(found.foreign)
    assert names.DEPLOY_DRIVER not in found.all
