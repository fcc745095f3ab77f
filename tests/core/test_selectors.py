"""Selectors, against what kubectl makes of the same text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver_manager.core.selectors import parse_selector

WEB = {"app": "web", "tier": "front", "example.com/x": "1", "empty": ""}


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ("", True), ("  ", True),
        ("app=web", True), ("app==web", True), ("app = web", True), ("app=db", False), ("nope=web", False),
        ("app!=db", True), ("app!=web", False), ("nope!=web", True),
        ("app", True), ("nope", False), ("!nope", True), ("!app", False), ("! nope", True),
        ("app in (web,db)", True), ("app in ( web , db )", True), ("app in(web)", True), ("app in (db)", False), ("nope in (web)", False),
        ("app notin (db)", True), ("app notin (web)", False), ("nope notin (web)", True),
        ("empty=", True), ("empty", True), ("app=", False), ("app==", False), ("nope=", False), ("empty in ()", True),
        ("empty in (,a)", True),
        ("app=web,tier=front", True), ("app=web,tier=back", False), ("app in (web,db),tier", True), (" app=web , !nope ", True),
        ("example.com/x=1", True), ("example.com/x!=1", False), ("app=web,app=db", False), ("app in (web),app notin (db)", True),
    ],
)  # fmt: skip
def test_what_kubectl_accepts(text: str, matches: bool) -> None:
    """Each accepted text selects as kubectl's does; a missing label meets `!=`, `notin` and `!`."""
    assert parse_selector(text).matches(WEB) is matches


@pytest.mark.parametrize(
    "text",
    ["=", "=web", "app=web,", ",app=web", "app=web,,tier", "app in", "app in web", "app in (web", "app in web)", "app notin", "!",
     "!!app", "a b", "app=we b", "app=-web", "app=web-", "a/b/c=d", "app=!web", "app in (a b)", "-app", "app in ((a))", "app=" + "x" * 64,
     "app=a=b", "UPPER.com/", "/app", "app like web", "app=web;tier"],
)  # fmt: skip
def test_what_kubectl_refuses(text: str) -> None:
    """Whatever is no selector is refused; nothing is taken for `everything`."""
    with pytest.raises(ValueError, match="label"):
        parse_selector(text)


@given(st.text(alphabet="ab=!,() in.-/", max_size=12))
def test_no_text_crashes(text: str) -> None:
    """Any text is a selector or a ValueError, and a selector says the same each time."""
    try:
        made = parse_selector(text)
    except ValueError:
        return
    assert made == parse_selector(text)
    assert made.matches(WEB) in (True, False)


@given(st.dictionaries(st.sampled_from("abc"), st.sampled_from(["", "x", "y"])), st.sampled_from("abc"), st.sampled_from(["x", "y"]))
def test_opposites(labels: dict[str, str], key: str, value: str) -> None:
    """`=` and `!=`, `in` and `notin`, existence and absence are opposites for any labels."""
    for one, other in ((f"{key}={value}", f"{key}!={value}"), (f"{key} in ({value})", f"{key} notin ({value})"), (key, f"!{key}")):
        assert parse_selector(one).matches(labels) is not parse_selector(other).matches(labels)
