"""Settings: every value that may be given, from everywhere it may come from (N59)."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver_manager.config import OPTIONS, Given, Option, Settings, duration_words, effective_settings, parse_bool, parse_duration
from driver_manager.core.selectors import Selector
from driver_manager.core.services import HostAction
from driver_manager.errors import ConfigError, Exit

BY_FIELD = {option.field: option for option in OPTIONS}
BAD: dict[str, str] = {
    "node_name": "Not_A_Node",
    "operator_namespace": "a/b",
    "drain_pod_selector": "a in (b",
    "custom_label": "-bad-",
    "keep_off_taint_key": "a/b/c",
    "gpu_resource_prefixes": "gpu",
    "gpu_runtime_handlers": "Not A Handler",
    "consumer_selector": "a in (b",
    "hidden_consumers": "maybe",
    "policy_owned_consumers": "evict",
    "unload_also": "a b",
    "host_driver": "take",
    "host_services": "gdm",
    "host_processes": "kill",
    "busy_mounts": "maybe",
    "log_format": "xml",
    "log_level": "loud",
}
"""A value that is refused, for the settings that are neither a truth value nor a duration."""
FREE = {"kubeconfig", "host_tree", "driver_config_digest"}
"""Settings that take any text."""


def bad_value(option: Option) -> str:
    """A value that the setting must refuse."""
    return BAD.get(option.field, "abc")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0", 0), ("0s", 0), ("5", 5), ("300", 300), ("300s", 300), ("5m", 300), ("1h30m", 5400), ("1.5h", 5400), (".5s", 0.5), ("1.s", 1),
     ("100ms", 0.1), ("1h1m1s", 3661), ("2us", 2e-6), ("3µs", 3e-6), ("7ns", 7e-9), ("0.25", 0.25), ("1m1m", 120)],
)  # fmt: skip
def test_n59_durations(text: str, seconds: float) -> None:
    """N59: plain seconds and Go's durations mean what they say."""
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text",
    ["", " ", "-1", "-5m", "abc", "5 m", "5x", "m", "1e3", "inf", "nan", "5m3", "1,5s", "٣", "9" * 400, "9999999999h", "+5s", "0x10"],
)
def test_n59_bad_durations(text: str) -> None:
    """N59: whatever is no duration is refused, with what is allowed."""
    with pytest.raises(ValueError, match="allowed are 0, a number of seconds, or a duration"):
        parse_duration(text)


@given(st.text(max_size=8))
def test_durations_are_numbers_or_refused(text: str) -> None:
    """No text gives a negative or endless limit, or another error."""
    try:
        seconds = parse_duration(text)
    except ValueError:
        return
    assert 0 <= seconds < 2**63 / 1e9


@given(st.integers(0, 10**6))
def test_plain_seconds_and_units_agree(number: int) -> None:
    """A number without a unit is seconds."""
    assert parse_duration(str(number)) == parse_duration(f"{number}s") == number


@pytest.mark.parametrize(("seconds", "words"), [(0, "no limit"), (60, "1 min"), (90, "90 s"), (0.5, "0.5 s"), (300, "5 min")])
def test_n59_zero_is_said_in_words(seconds: float, words: str) -> None:
    """N59, R8: 0 is shown as no limit."""
    assert duration_words(seconds) == words


@pytest.mark.parametrize("text", ["1", "t", "T", "true", "TRUE", "True"])
def test_gos_words_for_true(text: str) -> None:
    """Decision 25: exactly Go's words are true."""
    assert parse_bool(text) is True


@pytest.mark.parametrize("text", ["0", "f", "F", "false", "FALSE", "False"])
def test_gos_words_for_false(text: str) -> None:
    """Decision 25: exactly Go's words are false."""
    assert parse_bool(text) is False


@pytest.mark.parametrize("text", ["", "yes", "no", "on", "off", "tRUE", "2", " true", "y"])
def test_other_words_are_no_truth_values(text: str) -> None:
    """Decision 25: what Go does not read is refused."""
    with pytest.raises(ValueError, match="allowed are true, false"):
        parse_bool(text)


@pytest.mark.parametrize("option", [each for each in OPTIONS if each.field not in FREE], ids=lambda each: each.field)
@pytest.mark.parametrize("by", ["flag", "environment"])
def test_n59_every_bad_value_is_explained(option: Option, by: str) -> None:
    """N59: the error of each setting names what was written, flag or variable, the value and what is allowed; exit 78."""
    value = bad_value(option)
    flags = {option.field: [Given(value, f"flag --{option.flag}")]} if by == "flag" else {}
    environment = {option.env: value} if by == "environment" else {}
    with pytest.raises(ConfigError) as caught:
        effective_settings(flags, environment)
    message = caught.value.message
    assert caught.value.exit_code is Exit.CONFIG
    for part in (repr(value), f"flag --{option.flag}" if by == "flag" else f"environment {option.env}", "allowed"):
        assert part in message
    assert (option.env if by == "flag" else f"--{option.flag}") not in message + caught.value.hint
    assert option.help in caught.value.hint


@pytest.mark.parametrize("option", OPTIONS, ids=lambda each: each.field)
def test_an_empty_variable(option: Option) -> None:
    """Specification 1.1: an empty truth value is false even where the default is true; any other empty variable is the default."""
    effective = effective_settings({}, {option.env: ""})
    expected = False if isinstance(getattr(Settings(), option.field), bool) else getattr(Settings(), option.field)
    assert getattr(effective.settings, option.field) == expected


def good_values(option: Option) -> tuple[str, str, Any, Any]:
    """Two texts and their values."""
    default = getattr(Settings(), option.field)
    if isinstance(default, bool):
        return "true", "false", True, False
    if isinstance(default, float):
        return "7s", "8", 7.0, 8.0
    special: dict[str, tuple[str, str, Any, Any]] = {
        "gpu_resource_prefixes": ("a.b/c, d.e/f", "g.h/i", ("a.b/c", "d.e/f"), ("g.h/i",)),
        "gpu_runtime_handlers": ("a, b", "c", frozenset({"a", "b"}), frozenset({"c"})),
        "hidden_consumers": ("refuse", "ignore", "refuse", "ignore"),
        "policy_owned_consumers": ("wait", "refuse", "wait", "refuse"),
        "unload_also": ("a-b, c", "d", ("a_b", "c"), ("d",)),
        "host_services": (
            "gdm=stop, a.service=wait",
            "b=report",
            (("gdm", HostAction.STOP), ("a.service", HostAction.WAIT)),
            (("b", HostAction.REPORT),),
        ),
        "host_processes": ("refuse", "terminate", "refuse", "terminate"),
        "host_driver": ("unload", "keep", "unload", "keep"),
        "busy_mounts": ("refuse", "detach", "refuse", "detach"),
        "log_format": ("json", "text", "json", "text"),
        "log_level": ("debug", "error", "debug", "error"),
    }
    return special.get(option.field, ("one", "two", "one", "two"))


@pytest.mark.parametrize(
    "option",
    [each for each in OPTIONS if each.flag and each.field not in ("drain_pod_selector", "consumer_selector")],
    ids=lambda each: each.field,
)
def test_n59_a_flag_wins_over_the_environment_wins_over_the_default(option: Option) -> None:
    """N59: one precedence for all, and the origin of each value is kept."""
    first, second, value, other = good_values(option)
    flag = {option.field: [Given(first, f"flag --{option.flag}")]}
    both = effective_settings(flag, {option.env: second})
    assert getattr(both.settings, option.field) == value
    assert both.origins[option.field] == f"flag --{option.flag}"
    only = effective_settings({}, {option.env: second})
    assert getattr(only.settings, option.field) == other
    assert only.origins[option.field] == f"environment {option.env}"
    neither = effective_settings({}, {})
    assert neither.settings == Settings()
    assert set(neither.origins.values()) == {"default"}


def test_a_bad_variable_under_a_flag_is_of_no_matter() -> None:
    """The value that is not used is not judged."""
    made = effective_settings({"drain_timeout": [Given("5m", "flag --drain-timeout-seconds")]}, {"DRAIN_TIMEOUT_SECONDS": "abc"})
    assert made.settings.drain_timeout == 300


@pytest.mark.parametrize(("first", "second", "is_fine"), [("5m", "300", True), ("5m", "6m", False)])
def test_one_flag_twice(first: str, second: str, is_fine: bool) -> None:
    """Decision 25: twice with one meaning is fine, with two it is refused, both texts named."""
    flags = {"drain_timeout": [Given(text, "flag --drain-timeout-seconds") for text in (first, second)]}
    if is_fine:
        assert effective_settings(flags, {}).settings.drain_timeout == 300
        return
    with pytest.raises(ConfigError, match=r"--drain-timeout-seconds is given more than once, as '5m' and '6m'"):
        effective_settings(flags, {})


def test_every_setting_has_one_row() -> None:
    """The table and the settings are the same list; no two rows share a flag or a variable."""
    assert {option.field for option in OPTIONS} == set(Settings.__dataclass_fields__)
    assert len({option.env for option in OPTIONS}) == len(OPTIONS)
    flags = [option.flag for option in OPTIONS if option.flag]
    assert len(set(flags)) == len(flags)


def test_the_defaults_of_upstream() -> None:
    """Specification 1.1, decision 20: upstream's defaults, but for the drain that never worked."""
    made = Settings()
    assert (made.operator_namespace, made.enable_gpu_pod_eviction, made.enable_auto_drain) == ("gpu-operator", True, False)
    assert (made.drain_use_force, made.drain_delete_emptydir_data, made.drain_timeout) == (False, False, 0.0)
    assert made.drain_pod_selector == Selector()
    assert made.drain_pod_selector.matches({"any": "thing"})
