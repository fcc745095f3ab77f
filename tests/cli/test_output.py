"""What commands print, as processes of their own on a machine without a cluster."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.e2e.command import Ended, start
from tests.host.trees import Tree

pytestmark = pytest.mark.real_processes


def on_tree(folder: Path, *words: str) -> Ended:
    """Runs the command on an empty host tree, without a cluster."""
    tree = folder / "tree"
    (tree / "etc").mkdir(parents=True, exist_ok=True)
    (tree / "etc/hostname").write_text("metal-1\n")
    env = {"PATH": os.environ["PATH"], "DRIVER_MANAGER_HOST_TREE": str(tree), "NO_CLUSTER": "true"}
    return start(words, env, folder / "run").wait()


def test_restore_prints_its_result_as_json(tmp_path: Path) -> None:
    """`restore --output json` prints one object: what it came to, and whether the node is put back."""
    document = on_tree(tmp_path, "restore", "--output", "json").require(0).document()
    assert document["result"] == "nothing to put back: node metal-1 carries no record"
    assert (document["isPutBack"], document["exitCode"]) == (True, 0)


def test_a_hint_stands_on_a_line_of_its_own(tmp_path: Path) -> None:
    """A sentence and what can be done about it are two lines."""
    lines = on_tree(tmp_path, "preflight_check").require(0).out.splitlines()
    number = next(number for number, line in enumerate(lines) if line.startswith("warn mounts: "))
    assert lines[number + 1].strip().startswith("hint: ") or "cannot be seen" in lines[number]
    assert not [line for line in lines if "  " in line.strip()]


def test_a_line_goes_on_below_its_text(tmp_path: Path) -> None:
    """What does not fit into a line does not go on in the first column, where it would look like a line of its own."""
    (tmp_path / "tree").mkdir()
    Tree(tmp_path / "tree").module("nvidia")
    lines = on_tree(tmp_path, "plan").require(0).out.splitlines()
    number = next(number for number, line in enumerate(lines) if "remove /run/nvidia" in line)
    assert lines[number + 1].startswith("      /run/nvidia/")
    assert lines[number + 2].startswith("   6. unload nvidia")
    assert not [line for line in lines if line != line.rstrip()]


def test_a_failed_run_says_so_once(tmp_path: Path) -> None:
    """In the log a failure stands at its step and at the end; a log of warnings and errors alone has it once, with the hint."""
    (tmp_path / "tree").mkdir()
    Tree(tmp_path / "tree").module("nvidia", users=1)
    ended = on_tree(tmp_path, "uninstall_driver", "--holder-timeout=1s", "--host-driver=unload").require(75)
    told = [line for line in ended.lines if "waited 1 s for module nvidia" in str(line)]
    assert [line["message"] for line in told if line["level"] in ("warning", "error")] == ["end"]
    assert told[-1]["hint"]
    assert {line["message"] for line in told} == {"step ended", "putting the node back", "end"}
