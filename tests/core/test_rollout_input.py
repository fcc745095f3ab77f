"""Bad input: policies and records that cannot be used are told by name, and nothing else happens."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver_manager import names
from driver_manager.core.following import follow
from driver_manager.core.hold import MAX_PARKED, Hold
from driver_manager.core.rollout import decide
from driver_manager.core.rollout_record import (
    MAX_BYTES,
    MAX_DEVICES,
    MAX_PAUSED,
    TOO_MANY_PAUSED,
    BadProgress,
    Failure,
    Progress,
    decode,
    encode,
)
from driver_manager.core.rollout_states import Because, State
from driver_manager.core.selectors import Selector
from driver_manager.core.situation import Freeing
from driver_manager.core.upgrade_policy import LONGEST_SELECTOR, BadPolicy, UpgradePolicy, read_policy, written_policy
from driver_manager.errors import InvariantBroken
from tests.core.rollouts import NOW, ON, ends, in_work, node, record, situation

OWN = f"{names.NAME_LABEL}={names.OWN_NAME}"
BAD: dict[str, tuple[Any, str]] = {
    "not an object": ("x", "the policy is 'x'"),
    "a list": ([], "the policy is []"),
    "wrong type of a flag": ({"autoUpgrade": "true"}, "autoUpgrade is 'true'"),
    "a number for a flag": ({"drain": {"enable": 1}}, "drain.enable is 1"),
    "a flag for a number": ({"maxParallelUpgrades": True}, "maxParallelUpgrades is True"),
    "negative": ({"maxParallelUpgrades": -1}, "maxParallelUpgrades is -1"),
    "a fraction": ({"maxParallelUpgrades": 1.5}, "maxParallelUpgrades is 1.5"),
    "beyond 32 bits": ({"podDeletion": {"timeoutSeconds": 2**31}}, "podDeletion.timeoutSeconds is 2147483648"),
    "a number as text": ({"drain": {"timeoutSeconds": "300"}}, "drain.timeoutSeconds is '300'"),
    "over 100 %": ({"maxUnavailable": "101%"}, "maxUnavailable is '101%'"),
    "far over 100 %": ({"maxUnavailable": "00001000%"}, "maxUnavailable is '00001000%'"),
    "a share of many digits": ({"maxUnavailable": "9" * 5000 + "%"}, "maxUnavailable is '999"),
    "a share in other digits": ({"maxUnavailable": "٢٥%"}, "maxUnavailable is '٢٥%'"),
    "no share": ({"maxUnavailable": "25"}, "maxUnavailable is '25'"),
    "a negative share": ({"maxUnavailable": "-5%"}, "maxUnavailable is '-5%'"),
    "a broken share": ({"maxUnavailable": "2.5%"}, "maxUnavailable is '2.5%'"),
    "only a sign": ({"maxUnavailable": "%"}, "maxUnavailable is '%'"),
    "a share with a line end": ({"maxUnavailable": "25%\n"}, "maxUnavailable is '25%\\n'"),
    "unknown field": ({"maxUnavalable": 1}, "maxUnavalable is not known"),
    "unknown field of a part": ({"drain": {"enabled": True}}, "drain.enabled is not known (known are enable, force, podSelector,"),
    "Helm's name": ({"gpuPodDeletion": {}}, "gpuPodDeletion is not known"),
    "a part that is none": ({"drain": True}, "drain is True, and has to be an object"),
    "a selector that does not parse": ({"drain": {"podSelector": "a b"}}, "drain.podSelector is 'a b'"),
    "a selector that is no text": ({"waitForCompletion": {"podSelector": {"a": "b"}}}, "waitForCompletion.podSelector is {'a': 'b'}"),
    "a selector of great length": ({"podDeletion": {"podSelector": f"a=b,{'c' * LONGEST_SELECTOR}"}}, "podDeletion.podSelector is 'a=b,cc"),
    "names that are no list": ({"podDeletion": {"park": "mon/exporter"}}, "podDeletion.park is 'mon/exporter'"),
    "names that are no text": ({"podDeletion": {"park": [1]}}, "podDeletion.park is [1]"),
    "names of great length": ({"podDeletion": {"park": ["mon/" + "x" * 60] * 20}}, "podDeletion.park is ['mon/xxx"),
    "a whole namespace": ({"podDeletion": {"park": ["mon/x", "mon/*"]}}, "podDeletion.park names 'mon/*': that is no single DaemonSet"),
    "the cluster's own": ({"podDeletion": {"park": ["kube-system/x"]}}, "podDeletion.park names 'kube-system/x': the cluster itself needs"),
    "a selector of ourselves": ({"drain": {"podSelector": OWN}}, f"drain.podSelector is '{OWN}'"),
    "all that have our label": ({"podDeletion": {"podSelector": names.NAME_LABEL}}, "podDeletion.podSelector is"),
    "all but others, so ourselves": ({"waitForCompletion": {"podSelector": f"{names.NAME_LABEL}!=x"}}, "waitForCompletion.podSelector is"),
}


@pytest.mark.parametrize(("raw", "told"), BAD.values(), ids=BAD)
def test_a_policy_that_cannot_be_used_is_told_by_field(raw: Any, told: str) -> None:
    """The sentence begins with the field and what it holds."""
    with pytest.raises(BadPolicy) as caught:
        read_policy(raw)
    assert any(problem.startswith(told) for problem in caught.value.problems), caught.value.problems
    assert all(len(problem) < 400 for problem in caught.value.problems)


def test_all_that_is_wrong_is_told_at_once() -> None:
    """A person mends a policy once, not once per fault."""
    with pytest.raises(BadPolicy) as caught:
        read_policy({"maxUnavailable": "200%", "drain": {"enable": "yes", "tmeout": 1}, "autoUpdate": True})
    assert len(caught.value.problems) == 4


GOOD: dict[str, tuple[Any, dict[str, Any]]] = {
    "nothing at all": (None, {}),
    "empty": ({}, {}),
    "null fields": ({"maxUnavailable": None, "drain": None, "podDeletion": {"force": None}}, {}),
    "no limit": ({"maxParallelUpgrades": 0}, {"max_parallel_upgrades": 0}),
    "no node": ({"maxUnavailable": "0%"}, {"max_unavailable": "0%"}),
    "everybody": ({"maxUnavailable": "100%"}, {"max_unavailable": "100%"}),
    "more than there are": ({"maxUnavailable": 10_000}, {"max_unavailable": 10_000}),
    "a selector of others": ({"drain": {"podSelector": f"{names.NAME_LABEL}=jupyter"}}, {}),
}


@pytest.mark.parametrize(("raw", "expected"), GOOD.values(), ids=GOOD)
def test_defaults_and_edges_of_a_policy(raw: Any, expected: dict[str, Any]) -> None:
    """Defaults are those of specification 3, and values at the edge are taken."""
    policy = read_policy(raw)
    defaults = {"auto_upgrade": False, "max_parallel_upgrades": 1, "max_unavailable": "25%"}
    assert {name: getattr(policy, name) for name in defaults} == {**defaults, **expected}
    assert (policy.pod_deletion.force, policy.pod_deletion.timeout_seconds, policy.pod_deletion.delete_empty_dir) == (False, 300, False)
    assert (policy.drain.enable, policy.drain.timeout_seconds, policy.wait_for_completion.timeout_seconds) == (False, 300, 0)


@pytest.mark.parametrize(
    ("limit", "total", "most"), [("25%", 0, 0), ("25%", 1, 1), ("25%", 4, 1), ("25%", 5, 2), ("1%", 5000, 50), (7, 3, 7), ("100%", 3, 3)]
)
def test_a_share_is_rounded_up(limit: int | str, total: int, most: int) -> None:
    """So that a small fleet can be upgraded at all."""
    assert UpgradePolicy(max_unavailable=limit).most_unavailable(total) == most


selectors = st.sampled_from(["", "a=b", "a in (b, c),!d", "tier != web", "  x  "])
numbers = st.integers(0, 2**31 - 1)
parks = st.lists(st.sampled_from(["mon/exporter", "mon/agent", "gpu-operator/dcgm-own"]))
raws = st.fixed_dictionaries(
    {},
    optional={
        "autoUpgrade": st.booleans(),
        "maxParallelUpgrades": numbers,
        "maxUnavailable": numbers | st.integers(0, 100).map(lambda share: f"{share}%"),
        "podDeletion": st.fixed_dictionaries(
            {}, optional={"force": st.booleans(), "timeoutSeconds": numbers, "podSelector": selectors, "park": parks}
        ),
        "waitForCompletion": st.fixed_dictionaries({}, optional={"podSelector": selectors, "timeoutSeconds": numbers}),
        "drain": st.fixed_dictionaries({}, optional={"enable": st.booleans(), "deleteEmptyDir": st.booleans(), "podSelector": selectors}),
    },
)


@given(raws)
def test_a_policy_says_the_same_when_written_and_read_again(raw: dict[str, Any]) -> None:
    """The policy in force on a node is the one that it was started under."""
    policy = read_policy(raw)
    assert read_policy(written_policy(policy)) == policy
    progress = record(State.CORDON, rules=written_policy(policy))
    assert situation(node(State.CORDON, progress)).in_force == policy


keys = st.sampled_from(["drain", "podSelector", "maxUnavailable", "x"])
json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)


@given(json)
def test_reading_any_policy_ends_with_a_policy_or_its_faults(raw: Any) -> None:
    """Whatever stands in a file or a resource."""
    with contextlib.suppress(BadPolicy):
        assert isinstance(read_policy(raw).drain.pod_selector, Selector)


GOOD_TEXT = encode(record(State.VALIDATION, failures=[Failure(NOW, "new", "NotFreed", "a pod may not go")]))


@given(st.data())
def test_a_hand_edited_record_is_read_or_refused(data: st.DataObject) -> None:
    """Cut, doubled or overwritten anywhere, it decodes or is refused, and never anything else."""
    start = data.draw(st.integers(0, len(GOOD_TEXT)))
    end = data.draw(st.integers(start, len(GOOD_TEXT)))
    put = data.draw(st.text(max_size=8) | st.sampled_from(["null", "-1", "1e999", '""', "{}", "\ud800"]))
    check_text(GOOD_TEXT[:start] + put + GOOD_TEXT[end:])


@given(st.text(max_size=300) | st.binary(max_size=300).map(lambda raw: raw.decode("utf-8", "surrogateescape")))
def test_any_text_as_a_record_is_read_or_refused(text: str) -> None:
    """Whatever somebody writes into the annotation."""
    check_text(text)


def check_text(text: str) -> None:
    """A text decodes and encodes again to the same, or is refused with a sentence and nothing is written."""
    if bad := situation(node(State.DONE, text)).bad_progress:
        for state in State:
            decision = decide(situation(node(state, text)))
            assert not decision.change
            assert decision.rest is not None
            assert decision.rest.because is Because.BAD_RECORD
            assert bad in decision.rest.sentence
    else:
        progress = decode(text)
        assert decode(encode(progress)) == progress


BAD_RECORDS = {
    "no JSON": "{",
    "not an object": "[]",
    "no node": "{}",
    "unknown field": '{"node":"u","nodes":"v"}',
    "another version": '{"node":"u","version":2}',
    "wrong type": '{"node":"u","cordoned":"yes"}',
    "negative time": '{"node":"u","since":-1}',
    "endless time": '{"node":"u","deadline":1e999}',
    "too many failures": '{"node":"u","failures":[' + ",".join(['{"at":1,"target":"t","reason":"r"}'] * 4) + "]}",
    "rules that are no policy": '{"node":"u","rules":{"maxUnavailable":"300%"}}',
    "a label's value that is none": '{"node":"u","paused":{"nvidia.com/gpu.deploy.client":"not a label!"}}',
    "deep": '{"node":"u","rules":' + '{"a":' * 3000 + "1" + "}" * 3001,
    "too long": '{"node":"' + "u" * MAX_BYTES + '"}',
}


@pytest.mark.parametrize("text", BAD_RECORDS.values(), ids=BAD_RECORDS)
def test_a_record_that_cannot_be_used_is_refused(text: str) -> None:
    """What is wrong is said, no node is touched."""
    with pytest.raises(BadProgress):
        decode(text)
    check_text(text)


def longest(**fields: Any) -> Progress:
    """A record with as much in it as any node can need back."""
    selector = ",".join(["k" * 60 + "=" + "v" * 60] * 8)[:LONGEST_SELECTOR]
    rules = {name: {"podSelector": selector} for name in ("podDeletion", "waitForCompletion", "drain")}
    full: dict[str, Any] = {
        "rules": written_policy(read_policy(rules)),
        "policy": "p" * 253,
        "devices": {f"nvidia.com/mig-{number:02}g.{'x' * 298}": 2**31 - 1 for number in range(MAX_DEVICES)},
        "parked": [f"{number:02}{'n' * 61}/{'d' * 253}" for number in range(MAX_PARKED)],
        "paused": {f"{'d' * 250}.{number:02}/{'k' * 63}": "v" * 63 for number in range(MAX_PAUSED)},
        "taint": "d" * 253 + "/" + "k" * 63,
    }
    return record(State.CORDON, **{**full, **fields})


def test_the_longest_record_fits() -> None:
    """With the longest selectors, names and sentences nothing is lost that the node needs back; the oldest failures are."""
    failures = [Failure(at, "t" * 253, "r" * 50, "\x01" * 300) for at in (NOW - 2, NOW - 1, NOW)]
    progress = longest(failures=failures)
    text = encode(progress)
    assert len(text.encode()) <= MAX_BYTES
    kept = decode(text)
    assert kept == msgspec.structs.replace(progress, failures=failures[-len(kept.failures) :] if kept.failures else [])
    assert decode(encode(longest())) == longest()


def test_a_record_that_is_too_long_is_never_written() -> None:
    """What a node needs back is never left out: rather nothing is written, and the error says why."""
    with pytest.raises(InvariantBroken, match=f"more than {MAX_BYTES}"):
        encode(longest(policy="x" * MAX_BYTES))


def test_the_length_of_a_record_is_that_of_its_bytes() -> None:
    """As the API server counts it."""
    sign = "\N{EURO SIGN}"
    with pytest.raises(BadProgress, match=f"bytes long, more than {MAX_BYTES}"):
        decode(msgspec.json.encode({"node": "u", "policy": sign * (MAX_BYTES // 2)}).decode())
    assert len(encode(longest(failures=[Failure(NOW, sign * 253, "r", sign * 300)] * 3)).encode()) <= MAX_BYTES


def test_a_node_with_too_much_to_pause_is_refused_and_not_half_recorded() -> None:
    """More labels than the record can hold: the state says so, and nothing is paused."""
    hold = Hold(paused={f"nvidia.com/gpu.deploy.x{number}": "true" for number in range(MAX_PAUSED + 1)})
    decision = decide(situation(in_work(State.POD_DELETION), freeing=Freeing(hold=hold)))
    assert (ends(decision), decision.moves[-1].because) == (State.REQUIRED, Because.NOT_FREED)
    assert decision.moves[-1].sentence.startswith(TOO_MANY_PAUSED)
    assert not any(value == names.PAUSED for value in decision.change.labels.values())
    following = follow(situation(in_work(State.POD_DELETION), freeing=Freeing(hold=hold)))
    assert not any(value == names.PAUSED for value in following.change.labels.values())


@pytest.mark.parametrize("label", ["upgrade-Done", "done", " ", "upgrade-required ", "x" * 63])
def test_a_state_that_is_none_is_left_alone(label: str) -> None:
    """Only a person takes it off; the sentence says so, with the value."""
    decision = decide(situation(node(label, record(State.CORDON), unschedulable=True)))
    assert not decision.change
    assert decision.rest is not None
    assert decision.rest.because is Because.UNKNOWN_STATE
    assert repr(label) in decision.rest.sentence


def test_a_broken_policy_lets_a_node_in_work_go() -> None:
    """Before its driver is touched all is taken back; after that it is finished under the policy that it was started with (decision 39)."""
    broken: dict[str, Any] = {"policy": None, "bad_policy": "maxUnavailable is 'x'"}
    before = decide(situation(in_work(State.POD_DELETION), **broken))
    assert before.moves[-1].after is State.UNKNOWN
    assert before.change.unschedulable is False
    assert not decide(situation(in_work(State.POD_RESTART, {"deadline": NOW + 9}), **broken)).moves
    assert situation(in_work(State.POD_RESTART), **broken).in_force == ON
