"""What commands print, as processes of their own on a machine without a cluster."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cli.documents import ROOT
from tests.e2e.command import Ended, start
from tests.host.trees import Tree

pytestmark = pytest.mark.real_processes


def on_tree(folder: Path, *words: str) -> Ended:
    """Runs the command on an empty host tree, without a cluster."""
    tree = folder / "tree"
    (tree / "etc").mkdir(parents=True, exist_ok=True)
    (tree / "etc/hostname").write_text("metal-1\n")
    env = {"PATH": os.environ["PATH"], "DRIVER_MANAGER_HOST_TREE": str(tree), "NO_CLUSTER": "true"}
    return start(words, env, folder / f"run-{words[0]}").wait()


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


def test_a_tree_with_half_of_a_module_says_so(tmp_path: Path) -> None:
    """A driver that only `proc/modules` names is not loaded on a host tree, and who laid it out learns why."""
    (tmp_path / "tree").mkdir()
    Tree(tmp_path / "tree").file("proc/modules", "nvidia 16384 0 - Live 0x0 (OE)\next4 1 0 - Live 0x0\n")
    out = " ".join(on_tree(tmp_path, "plan").require(0).out.split())
    assert "nothing-loaded" in out
    assert "proc/modules names nvidia, but on a host tree a loaded module is a folder sys/module/NAME" in out


def test_what_a_machine_of_its_own_needs_no_pod_spec_for(tmp_path: Path) -> None:
    """Without a cluster nobody is told to change the mounts of a pod."""
    (tmp_path / "tree").mkdir()
    Tree(tmp_path / "tree").file("proc/self/mountinfo", "21 1 8:1 / / rw - ext4 /dev/sda1 rw\n")
    out = on_tree(tmp_path, "preflight_check").require(0).out
    assert "warn mounts: /run/nvidia is not a shared mount" in out
    assert "mountPropagation" not in out


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_the_tree_of_the_page_is_freed(tmp_path: Path, shell: str) -> None:
    """What docs/host-tree.md makes is a node with a driver that a process holds; when the process has gone, a run frees it."""
    tree = tmp_path / "tree"
    script = (ROOT / "docs/host-tree.md").read_text().partition("```sh\n")[2].partition("```")[0]
    script = script.replace("tree=/tmp/gpu-host", f"tree={tree}")
    subprocess.run([shell, "-eu"], input=script, text=True, check=True)
    assert "process 4711 python3 holds /dev/nvidia0" in on_tree(tmp_path, "plan").require(0).out
    shutil.rmtree(tree / "proc/4711")
    on_tree(tmp_path, "uninstall_driver").require(0)
    calls = [json.loads(line) for line in (tree / "calls.jsonl").read_text().splitlines()]
    assert [call["arguments"][0] for call in calls] == ["nvidia_uvm", "nvidia", "/run/nvidia/driver"]
