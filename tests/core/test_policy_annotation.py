"""Policy fields in the resource's annotation: merged, checked as a whole, named where they cannot be used; dropped fields are noticed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from driver_manager.core.fleet import PolicySource
from driver_manager.core.policy_annotation import MAX_CHARACTERS, dropped_fields
from driver_manager.core.policy_groups import Groups, policy_groups
from driver_manager.names import POLICY

OWN = {"autoUpgrade": True, "maxParallelUpgrades": 3, "podDeletion": {"force": True, "timeoutSeconds": 60}}


def groups(
    text: str | None, own: dict[str, Any] | None = None, *, kind: str = "ClusterPolicy", applied: dict[str, Any] | None = None
) -> Groups:
    annotations = {} if text is None else {POLICY: text}
    source = PolicySource(
        kind=kind, name="x", uid="1", resource_version="1", annotations=annotations, upgrade_policy=own, applied_policy=applied
    )
    return policy_groups([source], []) if kind == "ClusterPolicy" else policy_groups([], [source])


@pytest.mark.parametrize("text", ["podDeletion:\n  podSelector: app=render", '{"podDeletion": {"podSelector": "app=render"}}'])
def test_a_field_is_put_over_the_resources_own(text: str) -> None:
    """YAML or JSON; what it does not say stays."""
    group = groups(text, OWN).everybody
    assert group is not None
    assert group.policy is not None
    assert group.policy.pod_deletion.pod_selector.text == "app=render"
    assert (group.policy.pod_deletion.force, group.policy.pod_deletion.timeout_seconds, group.policy.max_parallel_upgrades) == (True, 60, 3)


@pytest.mark.parametrize("text", [None, "", "  \n", "{}"])
def test_an_empty_one_changes_nothing(text: str | None) -> None:
    """As without it."""
    assert groups(text, OWN) == groups(None, OWN)


def test_an_nvidia_driver_without_a_policy_still_upgrades() -> None:
    """An annotation is no upgradePolicy: auto-upgrade stays what it means that there is none."""
    text = "podDeletion: {podSelector: app=render}"
    assert groups(text, None, kind="NVIDIADriver").by_owner["x"].policy is not None
    assert groups(text, {"autoUpgrade": False}, kind="NVIDIADriver").by_owner["x"].policy is None


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "\n".join(f"{chr(98 + n)}: &{chr(98 + n)} [{','.join([f'*{chr(97 + n)}'] * 9)}]" for n in range(9))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("podDeletion: {podSelectr: app=x}", "podDeletion.podSelectr is not known"),
        ("podDeletion: {podSelector: 'app in ('}", "podDeletion.podSelector is 'app in ('"),
        ("podDeletion: [1]", "podDeletion is [1], and has to be an object"),
        ("podDeletion: {podSelector: app.kubernetes.io/name=driver-manager}", "does not select this program's own pods"),
        ("podDeletion: {podSelector: app.kubernetes.io/component=nvidia-driver}", "does not select the driver's pods"),
        ("podDeletion: {podSelector: app=nvidia-driver-daemonset}", "does not select the driver's pods"),
        ("podDeletion: {podSelector: app.kubernetes.io/component}", "does not select the driver's pods"),
        ("autoUpgrade: maybe", "autoUpgrade is 'maybe'"),
        ("- a\n- b", "is no object of policy fields"),
        ("just words", "is no object of policy fields"),
        ("{", "is neither YAML nor JSON"),
        ("a: 1\na: 2", "'a' is there twice"),
        ("? [a]\n: 1", "is neither YAML nor JSON"),
        ("!!python/object/apply:os.system [ls]", "is neither YAML nor JSON"),
        (BOMB, "aliases (*name) are not taken"),
        ("[" * 5000, "is neither YAML nor JSON"),
        ("x" * (MAX_CHARACTERS + 1), "characters long"),
        ("a: \x00", "is neither YAML nor JSON"),
        ("autoUpgrade: !!bool maybe", "tags (!!bool) are not taken"),
        ("maxParallelUpgrades: !!int ''", "tags (!!int) are not taken"),
        ("autoUpgrade: !!timestamp x", "tags (!!timestamp) are not taken"),
        ("autoUpgrade: 2026-99-99", "is neither YAML nor JSON"),
        (f"maxUnavailable: 0x{'f' * 5000}", "maxUnavailable is a number of too many digits to be shown"),
        (f"podDeletion: {{park: [0x{'f' * 5000}]}}", "podDeletion.park is a number of too many digits to be shown"),
        (f"? 0x{'f' * 5000}\n: 1", "a number of too many digits to be shown is not known (known are podDeletion,"),
        ("\n".join(f"k{number}: 1" for number in range(1000)), "and 992 more faults"),
        (f"? {'k' * 5000}\n: 1", "kkk... is not known"),
        (f"podDeletion: {{park: [{','.join(f'/{number}' for number in range(200))}]}}", "and 192 more faults"),
    ],
)
def test_what_cannot_be_used_is_named(text: str, words: str) -> None:
    """Nothing is begun under such a policy, and the fault is named; nothing breaks."""
    found = groups(text, OWN)
    assert found.everybody is not None
    assert found.everybody.policy is None
    assert found.everybody.is_broken
    assert words in found.problems["ClusterPolicy/x"]
    assert len(found.problems["ClusterPolicy/x"]) < 2000


def test_a_dropped_field_is_said() -> None:
    """What kubectl applied and the resource has not; the annotation mends it, and what is there is not complained of."""
    applied = {**OWN, "podDeletion": {**OWN["podDeletion"], "podSelector": "app=render"}}  # type: ignore[dict-item]
    note = groups(None, OWN, applied=applied).notes["ClusterPolicy/x"]
    assert note.startswith("podDeletion.podSelector: applied, and not in the resource")
    assert POLICY in note
    assert not groups("podDeletion: {podSelector: app=other}", OWN, applied=applied).notes
    assert not groups(None, OWN, applied=OWN).notes
    assert not groups(None, {**OWN, "maxUnavailable": "25%"}, applied=OWN).notes


@pytest.mark.parametrize("applied", [None, {}, {"a": None}, {"autoUpgrade": False}])
def test_no_field_was_dropped(applied: dict[str, Any] | None) -> None:
    """Other values are edits, and null is nothing."""
    assert dropped_fields(applied, OWN) == ()


def test_deep_and_wide_applied_values_are_no_trouble() -> None:
    """Whatever an annotation holds, the answer is short."""
    deep: Any = 1
    for _ in range(200):
        deep = {"a": deep}
    wide = {f"k{number}": number for number in range(1000)}
    note = groups(None, OWN, applied=json.loads(json.dumps({"deep": deep, **wide}))).notes["ClusterPolicy/x"]
    assert "more" in note
    assert len(note) < 600
