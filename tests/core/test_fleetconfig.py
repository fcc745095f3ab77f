"""The controller's settings as words: every value, from everywhere it may come from."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from driver_manager.cli.controller import controller_settings, read_policy_file
from driver_manager.config import OPTIONS, Given, Option
from driver_manager.controller.settings import ControllerSettings, MaintenanceSettings
from driver_manager.core.situation import RolloutSettings
from driver_manager.errors import ConfigError, Exit
from driver_manager.fleetconfig import CONTROLLER_OPTIONS, SHARED, read_words
from driver_manager.sim.clock import SimClock

NOWHERE = Path("/nonexistent")
MADE = {"operator_namespace", "agent", "policy", "rollout", "maintenance"}
"""Fields that are made from other words."""
BAD = {
    "node_selector": ("a in (b",),
    "identity": ("a/b", "-a", ""),
    "lease_namespace": ("A", "a/b"),
    "lease_name": ("A_b",),
    "lease_duration": ("0", "1.5", "500ms", "-1", "25h", "abc"),
    "renew_deadline": ("0", "-1s", "x"),
    "retry_period": ("0s", ""),
    "request_timeout": ("0", "soon"),
    "cluster_max_unavailable": ("-1", "101%", "5 %", "half", "%", "1.5", "٣"),
    "most_failures": ("-1", "1.5", "many", "٣", "9999999"),
    "gang_label": ("-bad-", "a/b/c"),
    "order_key": ("a b",),
    "rollout.attempts": ("0", "x"),
    "rollout.retry_pause": ("0", "x"),
    "rollout.failing_restarts": ("x", "-1"),
    "maintenance.is_on": ("maybe",),
    "maintenance.namespace": ("A", "a/b"),
    "maintenance.requestor": ("a", "-a.b", "a..b", "a_b", "a" * 64),
    "maintenance.prefix": ("A b",),
    "listen": ("8080", "host", ":0", ":65536", ":http", "a b:1"),
}
GOOD: dict[str, tuple[str, Any]] = {
    "node_selector": ("gpu=yes,zone in (a,b)", "gpu=yes,zone in (a,b)"),
    "identity": ("me-1", "me-1"),
    "lease_namespace": ("here", "here"),
    "lease_name": ("mine", "mine"),
    "lease_duration": ("1m", 60.0),
    "renew_deadline": ("8s", 8.0),
    "retry_period": ("500ms", 0.5),
    "request_timeout": ("3", 3.0),
    "cluster_max_unavailable": ("10%", "10%"),
    "most_failures": ("0", 0),
    "gang_label": ("example.com/gang", "example.com/gang"),
    "order_key": ("order", "order"),
    "rollout.driver_timeout": ("0", 0.0),
    "rollout.validation_timeout": ("5m", 300.0),
    "rollout.attempts": ("7", 7),
    "rollout.retry_pause": ("10", 10.0),
    "rollout.failing_restarts": ("0", 0),
    "rollout.one_at_a_time": ("true", True),
    "rollout.skip_cordoned": ("1", True),
    "maintenance.is_on": ("true", True),
    "maintenance.namespace": ("ops", "ops"),
    "maintenance.requestor": ("driver.example.com", "driver.example.com"),
    "maintenance.prefix": ("shared", "shared"),
    "listen": ("[::]:9090", "[::]:9090"),
}


def settings_of(flags: dict[str, str] | None = None, environment: dict[str, str] | None = None, file: Path = NOWHERE) -> ControllerSettings:
    given = {name: [Given(text, f"flag --{name}")] for name, text in (flags or {}).items()}
    return controller_settings(read_words(given, environment or {}), SimClock(1), file)


def value_of(settings: ControllerSettings, option: Option) -> Any:
    part, _, name = option.field.rpartition(".")
    return getattr(getattr(settings, part) if part else settings, name)


def test_every_setting_has_one_row() -> None:
    """The table and the settings are the same list, and no two rows of the whole program share a flag or a variable."""
    parts = {"rollout": RolloutSettings, "maintenance": MaintenanceSettings}
    known = {each.name for each in fields(ControllerSettings)} - MADE
    known |= {f"{part}.{each.name}" for part, kind in parts.items() for each in fields(kind)}
    assert {option.field for option in CONTROLLER_OPTIONS} == known | {"policy_file"}
    for attribute in ("flag", "env"):
        words = [getattr(option, attribute) for option in (*OPTIONS, *CONTROLLER_OPTIONS) if getattr(option, attribute)]
        assert len(set(words)) == len(words)
    assert len(SHARED) == 7


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in BAD.items() for text in texts])
@pytest.mark.parametrize("by", ["flag", "environment"])
def test_n59_every_bad_value_is_explained(name: str, text: str, by: str) -> None:
    """N59: the error of each setting names it, the value, where it came from and what is allowed; exit 78."""
    option = next(each for each in CONTROLLER_OPTIONS if each.field == name)
    if text == "" and by == "environment":
        return  # an empty variable is the default
    with pytest.raises(ConfigError) as caught:
        settings_of({name: text}) if by == "flag" else settings_of(environment={option.env: text})
    assert caught.value.exit_code is Exit.CONFIG
    for part in (f"flag --{name}" if by == "flag" else f"environment {option.env}", repr(text), "allowed"):
        assert part in caught.value.message
    assert option.help in caught.value.hint


@pytest.mark.parametrize("option", [each for each in CONTROLLER_OPTIONS if each.field in GOOD], ids=lambda each: each.field)
def test_each_setting_from_a_flag_and_from_the_environment(option: Option) -> None:
    """Each has one meaning, wherever it is given; not given it has the default of the settings."""
    text, value = GOOD[option.field]
    assert value_of(settings_of({option.field: text}), option) == value
    assert value_of(settings_of(environment={option.env: text}), option) == value
    if option.field != "identity":
        assert value_of(settings_of(), option) == value_of(ControllerSettings(), option)
        empty = "" if option.field == "listen" else value_of(settings_of(), option)
        assert value_of(settings_of(environment={option.env: ""}), option) == empty


@pytest.mark.parametrize("option", CONTROLLER_OPTIONS, ids=lambda each: each.field)
def test_the_default_in_words_is_that_of_the_settings(option: Option) -> None:
    """What the help says is what is done when nothing is given."""
    said = {"policy_file": "none", "identity": "the host's name", "lease_namespace": "that of the pod's account"}
    if option.field in said:
        assert option.default.startswith(said[option.field])
        return
    value = value_of(ControllerSettings(), option)
    assert option.default.startswith("no limit" if value is None else "none" if value == "" else option.in_words(value))


def test_a_replica_without_a_name_makes_one() -> None:
    """Two replicas on one host, without POD_NAME, have different names in the Lease."""
    clock = SimClock(1)
    first, second = (controller_settings(read_words({}, {}), clock, NOWHERE).identity for _ in range(2))
    assert first != second


def test_where_the_lease_is(tmp_path: Path) -> None:
    """The flag wins over POD_NAMESPACE, which wins over the account's own file, which wins over the default."""
    file = tmp_path / "namespace"
    assert settings_of(file=file).lease_namespace == "driver-manager"
    file.write_text("account\n")
    assert settings_of(file=file).lease_namespace == "account"
    assert settings_of(environment={"POD_NAMESPACE": "pod"}, file=file).lease_namespace == "pod"
    assert settings_of({"lease_namespace": "flag"}, {"POD_NAMESPACE": "pod"}, file).lease_namespace == "flag"


def test_shared_settings_reach_both_halves() -> None:
    """The agent's settings that the controller shares tell it who uses the driver, and where the operator is."""
    settings = settings_of(environment={"OPERATOR_NAMESPACE": "ops", "GPU_RESOURCE_PREFIXES": "example.com/gpu", "DRAIN_USE_FORCE": "x"})
    assert (settings.operator_namespace, settings.agent.operator_namespace) == ("ops", "ops")
    assert settings.agent.gpu_resource_prefixes == ("example.com/gpu",)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"request_timeout": "5"}, ("--request-timeout is 5 s", "--lease-duration - --renew-deadline", "15 s - 10 s = 5 s")),
        ({"renew_deadline": "15"}, ("15 s - 15 s = 0 s",)),
        ({"lease_duration": "5"}, ("5 s - 10 s = -5 s",)),
        ({"retry_period": "10"}, ("--retry-period is 10 s", "--renew-deadline (10 s)")),
    ],
)
def test_times_that_do_not_keep_two_leaders_apart(flags: dict[str, str], words: tuple[str, ...]) -> None:
    """Decision 34: such times are refused before any request, naming both settings."""
    with pytest.raises(ConfigError) as caught:
        settings_of(flags)
    assert all(word in caught.value.message for word in words), caught.value.message


@pytest.mark.parametrize("text", ["autoUpgrade: true\nmaxUnavailable: 10%\n", '{"autoUpgrade": true, "maxUnavailable": "10%"}'])
def test_a_policy_file(text: str, tmp_path: Path) -> None:
    """YAML and JSON are read alike."""
    file = tmp_path / "policy"
    file.write_text(text)
    policy = settings_of({"policy_file": str(file)}).policy
    assert policy is not None
    assert (policy.auto_upgrade, policy.max_unavailable, policy.max_parallel_upgrades) == (True, "10%", 1)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ("is empty",)),
        (b"a: [", ("neither YAML nor JSON", "line 1")),
        (b"\xff\xfe", ("neither YAML nor JSON",)),
        (b"[1]", ("the policy is [1]",)),
        (b"just words", ("'just words'",)),
        (
            b"maxUnavailable: 101%\nmaxParalel: 3\ndrain:\n  enable: maybe",
            ("maxUnavailable is '101%'", "maxParalel is not known", "drain.enable is 'maybe'"),
        ),
        (b"podDeletion: {podSelector: 'app.kubernetes.io/name=driver-manager'}", ("podDeletion.podSelector", "own pods")),
        (b"!!python/object/apply:os.system [true]", ("neither YAML nor JSON",)),
        (b"autoUpgrade: !!bool maybe", ("neither YAML nor JSON", "tags (!!bool) are not taken")),
        (b"maxUnavailable: 2026-99-99", ("neither YAML nor JSON", "month")),
        (b"maxUnavailable: " + b"9" * 5000, ("neither YAML nor JSON", "digits")),
        (b"autoUpgrade: true\nautoUpgrade: false", ("neither YAML nor JSON", "'autoUpgrade' is there twice")),
    ],
)
def test_bad_policy_files(content: bytes, words: tuple[str, ...], tmp_path: Path) -> None:
    """Each fault is named by its field, all at once; exit 78."""
    file = tmp_path / "policy"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_policy_file(str(file))
    assert caught.value.exit_code is Exit.CONFIG
    assert str(file) in caught.value.message
    assert all(word in caught.value.message for word in words), caught.value.message


def test_a_policy_file_that_is_not_there(tmp_path: Path) -> None:
    """It says so, with the file's name."""
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_policy_file(str(tmp_path / "none"))
