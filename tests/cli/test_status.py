"""What `status` says of a node that it looks at from afar, and of one that an upgrade controller has."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from driver_manager import names
from driver_manager.cli import render
from driver_manager.core.plan import Path, Plan
from driver_manager.core.rollout_record import Progress, encode
from driver_manager.core.seen import Snapshot
from driver_manager.core.snapshot import HostView, ModuleView, NodeView
from driver_manager.errors import DriverManagerError, OtherMachine

IDLE = Plan(path=Path.FULL, because="the driver is loaded")
ELSEWHERE = OtherMachine("this machine is not the node", hint="run this on the node")
NODE = NodeView(name="gpu-1", uid="uid-1", resource_version="1", boot_id="b")
HOST = HostView(boot_id="here", modules={"nvidia": ModuleView(name="nvidia", version="550.1")})


def said(node: NodeView, plan: Plan | DriverManagerError, capsys: pytest.CaptureFixture[str]) -> tuple[str, dict[str, object]]:
    """The words for people, and the document for programs."""
    seen = Snapshot(node=node, host=HOST, pods=(), run="run", started="t")
    render.status(seen, plan, "table")
    words = capsys.readouterr().out
    render.status(seen, plan, "json")
    return words, json.loads(capsys.readouterr().out)


def under(state: str, *, is_cordoned: bool) -> NodeView:
    """A node that an upgrade has, closed by its record or by somebody else."""
    record = encode(Progress(node=NODE.uid, state=state, is_cordoned=is_cordoned))
    return replace(NODE, labels={names.UPGRADE_STATE: state}, annotations={names.ROLLOUT: record}, unschedulable=True)


def test_the_host_of_another_machine_is_none_of_the_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    """From afar nothing is said of driver, modules and processes: those of this machine are another's."""
    words, document = said(NODE, ELSEWHERE, capsys)
    assert "550.1" not in words
    assert "on the node shows its driver" in words
    assert (document["driver"], document["modules"], document["holders"]) == (None, [], [])
    words, document = said(NODE, IDLE, capsys)
    assert "driver loaded: 550.1" in words
    assert (document["driver"], document["modules"]) == ("550.1", ["nvidia"])


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        ("pod-restart-required", "an upgrade controller has it in work"),
        ("upgrade-failed", "its upgrade failed"),
        ("upgrade-required", "as usual"),
        ("no-such-state", "as usual"),
    ],
)
@pytest.mark.parametrize("is_cordoned", [False, True])
def test_a_node_that_an_upgrade_has(state: str, sentence: str, is_cordoned: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """State and cordon are told as the upgrade's, and where more is said."""
    words, document = said(under(state, is_cordoned=is_cordoned), ELSEWHERE, capsys)
    assert str(document["sentence"]).startswith(sentence)
    assert f"state of its upgrade: {state}; `driver-manager status --all` says why" in words
    assert ("cordoned for its upgrade" if is_cordoned else "cordoned by somebody else") in words


def test_a_node_whose_upgrade_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    """It is as usual, and its upgrade is no matter any more."""
    words, _ = said(replace(NODE, labels={names.UPGRADE_STATE: "upgrade-done"}), ELSEWHERE, capsys)
    assert words.startswith("gpu-1: as usual")
    assert "upgrade-done" not in words
