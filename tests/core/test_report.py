"""What people are told: bounded, with names, never more than five and a count."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver_manager.core.plan import named
from driver_manager.core.report import MAX_BLOCKERS, MAX_STATUS_BYTES, Blocker, Waiting, holder_blockers, pod_blockers, status_text
from driver_manager.core.snapshot import Holder, HolderScan, PodView

blockers = st.builds(Blocker, st.sampled_from(["pod", "process"]), st.text(max_size=400), st.text(max_size=400), st.text(max_size=400))
waits = st.builds(Waiting, st.text(max_size=200), st.text(max_size=3000), st.lists(blockers, max_size=12).map(tuple))


@given(st.text(max_size=300), st.text(max_size=300), st.text(max_size=300), waits)
def test_the_status_is_bounded(phase: str, run: str, since: str, waiting: Waiting) -> None:
    """Decision 6: at most 2 KiB for any input, at most five blockers, and the true count of them."""
    text = status_text(phase=phase, run=run, since=since, waiting=waiting)
    assert len(text.encode()) <= MAX_STATUS_BYTES
    body = json.loads(text)
    assert len(body["blockers"]) <= MAX_BLOCKERS
    assert body["blockerCount"] == len(waiting.blockers)


@pytest.mark.parametrize("letter", ["a", "ä", "\U0001f600", '"', "\\", "\x00"])
def test_the_status_is_bounded_in_any_alphabet(letter: str) -> None:
    """Letters that JSON writes with six or twelve bytes do not break the bound, and something is left to read."""
    many = tuple(Blocker("pod", letter * 300, letter * 300, "u" * 36) for _ in range(9))
    text = status_text(phase="waiting", run="r", since="t", waiting=Waiting("reason", letter * 3000, many))
    assert len(text.encode()) <= MAX_STATUS_BYTES
    body = json.loads(text)
    assert body["reason"] == "reason"
    assert body["message"]
    assert body["blockerCount"] == 9


def test_five_ordinary_blockers_fit() -> None:
    """Five pods with long names, each with its budget, all have room."""
    many = tuple(Blocker("pod", "n" * 63 + "/" + "p" * 40, "b" * 110, "u" * 36) for _ in range(8))
    body = json.loads(status_text(phase="waiting", run="r" * 10, since="2026-01-31T09:00:00Z", waiting=Waiting("r", "s" * 80, many)))
    assert len(body["blockers"]) == 5
    assert body["blockers"][0]["uid"] == "u" * 36


def test_the_log_names_five_and_a_count() -> None:
    """The sentence of a wait names the first five and says how many more there are."""
    pods = [PodView(namespace="d", name=f"p{n}", uid=str(n)) for n in range(8)]
    text = Waiting("r", "waiting", pod_blockers(pods, "is leaving")).text
    assert text.startswith("waiting: pod d/p0 (is leaving); ")
    assert text.endswith("; and 3 more")
    assert "d/p5" not in text
    assert Waiting("r", "waiting").text == "waiting"
    assert named(tuple(pods)) == "d/p0, d/p1, d/p2, d/p3, d/p4 and 3 more"
    assert named(tuple(pods[:2])) == "d/p0, d/p1"


def test_who_holds_a_gpu() -> None:
    """N29, N31: pid, command, device and owner of each holder; a module only where no process explains its use."""
    scan = HolderScan(
        (
            Holder(pid=1, command="train", devices=("/dev/nvidia0",), pod_uid="u1"),
            Holder(pid=2, command="old", devices=("/dev/nvidia1",), pod_uid="u2"),
            Holder(pid=3, command="pers", devices=("/dev/nvidiactl",), unit="p.service"),
            Holder(pid=4, command="x", devices=("/dev/nvidiactl",)),
        ),
        (9,),
    )
    found = holder_blockers(scan, ("nvidia",), {"u1": "d/train"})
    whys = [each.why for each in found]
    assert [each.name for each in found] == ["1 train", "2 old", "3 pers", "4 x", "9"]
    assert "d/train" in whys[0]
    assert "u2" in whys[1]
    assert "p.service" in whys[2]
    assert "unknown owner" in whys[3]
    assert whys[4] == "could not be inspected"
    alone = holder_blockers(HolderScan((), (9,)), ("nvidia",), {})
    assert [(each.kind, each.name) for each in alone] == [("module", "nvidia"), ("process", "9")]
    assert holder_blockers(HolderScan((), (9,)), (), {}) == ()
