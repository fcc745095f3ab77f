"""Bad input is refused before a single request, with the name of the setting, its value and where it came from."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from tests.e2e.command import Ended, start
from tests.e2e.world import StockNode
from tests.kube.controlplane import ControlPlane

pytestmark = pytest.mark.kube

BOOLS = (
    "drain-use-force",
    "drain-delete-emptydir-data",
    "enable-auto-drain",
    "enable-gpu-pod-eviction",
    "gpu-direct-rdma-enabled",
    "use-host-mofed",
    "force-reinstall",
    "no-cluster",
)
DURATIONS = (
    "drain-timeout-seconds",
    "operand-timeout",
    "holder-timeout",
    "unload-timeout",
    "network-driver-timeout",
    "restore-timeout",
    "policy-owner-timeout",
    "lock-timeout",
)
BAD = [
    *((name, "maybe") for name in BOOLS),
    ("enable-auto-drain", "yes"),
    ("enable-auto-drain", "tRUE"),
    *((name, "abc") for name in DURATIONS),
    *(("drain-timeout-seconds", text) for text in ("-1", "-1s", "5 m", "1d", "5m3", "inf", "nan", "1e3", "0x10")),
    ("node-name", "Not/AName"),
    ("operator-namespace", "gpu operator"),
    ("drain-pod-selector-label", "a in (b"),
    ("drain-pod-selector-label", "a==b=c"),
    ("node-label-for-gpu-pod-eviction", "a/b/c"),
    ("keep-off-taint-key", "-x"),
    ("unload-also", "../../etc"),
    ("busy-mounts", "perhaps"),
    ("log-format", "xml"),
    ("log-level", "loud"),
]
"""A flag and a text that it must not take."""


Env = Mapping[str, str | None]
"""Changes of an environment; None takes a variable away."""


class Prompt:
    """Runs the command with an environment of our making, and counts what reaches the API server."""

    def __init__(self, control_plane: ControlPlane, folder: Path) -> None:
        self.cp, self.folder, self.numbers = control_plane, folder, itertools.count(1)
        self.tree = folder / "tree"
        self.tree.mkdir()

    def environment(self, changes: Env) -> dict[str, str]:
        """A good environment with changes; None takes a variable away."""
        env: dict[str, str | None] = {
            "PATH": os.environ["PATH"],
            "KUBECONFIG": str(self.cp.kubeconfig()),
            "DRIVER_MANAGER_HOST_TREE": str(self.tree),
            "NODE_NAME": "gpu-1",
            **changes,
        }
        return {name: value for name, value in env.items() if value is not None}

    def run(self, *words: str, env: Env = MappingProxyType({})) -> Ended:
        """One run to its end."""
        return start(words, self.environment(env), self.folder / f"run-{next(self.numbers)}").wait()

    def refused(self, *words: str, code: int = 78, env: Env = MappingProxyType({})) -> Ended:
        """One run that must end with a code and without a request."""
        mark = self.cp.audit_mark()
        ended = self.run(*words, env=env).require(code)
        assert [event["requestURI"] for event in self.cp.audit(mark) if event.get("userAgent", "").startswith("driver-manager")] == []
        assert any(line.lower().startswith("error: ") for line in ended.err.splitlines()), ended.err
        assert "Traceback" not in ended.err
        return ended


@pytest.fixture
def prompt(control_plane: ControlPlane, tmp_path: Path) -> Prompt:
    """The command, ready to be given anything."""
    return Prompt(control_plane, tmp_path)


def test_every_bad_flag_and_variable(prompt: Prompt) -> None:
    """N59: each unparsable flag and variable is refused by name, value and origin, before any request."""
    for flag, text in BAD:
        variable = {"drain-timeout-seconds": "DRAIN_TIMEOUT_SECONDS"}.get(flag, flag.upper().replace("-", "_"))
        by_flag = prompt.refused("uninstall_driver", f"--{flag}={text}")
        assert by_flag.said(f"--{flag}", repr(text), "flag"), by_flag.err
        by_variable = prompt.refused("uninstall_driver", env={variable: text})
        assert by_variable.said(repr(text), f"environment {variable}"), by_variable.err


@pytest.mark.parametrize("command", ["plan", "status", "restore", "preflight_check"])
def test_bad_values_of_the_other_commands(prompt: Prompt, command: str) -> None:
    """N59: every command reads the same settings and refuses the same words."""
    assert prompt.refused(command, env={"DRAIN_TIMEOUT_SECONDS": "soon"}).said("'soon'", "environment DRAIN_TIMEOUT_SECONDS")


def test_bad_flag_beside_a_good_variable(prompt: Prompt) -> None:
    """N59: a flag wins over the environment, so a bad flag is refused even where the variable is good."""
    assert prompt.refused("uninstall_driver", "--drain-timeout-seconds", "x", env={"DRAIN_TIMEOUT_SECONDS": "5m"}).said("flag")


@pytest.mark.parametrize(
    "words",
    [
        ("uninstall_driver", "--drain-timeout-seconds=5", "--drain-timeout-seconds=6"),
        ("--drain-timeout-seconds=5", "uninstall_driver", "--drain-timeout-seconds=6"),
        ("--enable-auto-drain", "uninstall_driver", "--enable-auto-drain=false"),
        ("uninstall_driver", "--node-name=a", "-node-name", "b"),
    ],
    ids=lambda words: " ".join(words),
)
def test_one_flag_twice_with_two_values(prompt: Prompt, words: tuple[str, ...]) -> None:
    """N59, decision 25: two different values for one flag are no guess of ours."""
    assert prompt.refused(*words).said("more than once")


@pytest.mark.parametrize(
    "words", [("uninstall_driver", "--bogus"), ("uninstal_driver",), ("--bogus",), ("plan", "--output", "xml"), ("plan", "x")]
)
def test_unknown_words(prompt: Prompt, words: tuple[str, ...]) -> None:
    """Decision 24: an unknown flag or command is 64."""
    prompt.refused(*words, code=64)


def test_no_node_name(prompt: Prompt) -> None:
    """Decision 24: without NODE_NAME no command that needs a node goes on."""
    for command in ("uninstall_driver", "restore", "plan", "status"):
        assert prompt.refused(command, env={"NODE_NAME": None}).said("NODE_NAME")
    prompt.refused("uninstall_driver", env={"NODE_NAME": ""})


def test_no_kubeconfig(prompt: Prompt) -> None:
    """Decision 24: a kubeconfig that is missing, broken, empty or incomplete is named, with 78."""
    broken, empty, partial = (prompt.folder / name for name in ("broken", "empty", "partial"))
    broken.write_text("{not yaml: [")
    empty.write_text("")
    partial.write_text('{"apiVersion": "v1", "kind": "Config", "current-context": "nowhere", "clusters": [], "contexts": [], "users": []}')
    for path in (prompt.folder / "missing", broken, empty, partial, prompt.folder):
        assert prompt.refused("uninstall_driver", env={"KUBECONFIG": str(path)}).said(str(path)), path
    prompt.refused("uninstall_driver", env={"KUBECONFIG": None})


def test_bare_help(prompt: Prompt) -> None:
    """Decision 24: without words, with --help and with --version it says what it is and ends with 0."""
    for words in ((), ("--help",), ("-h",), ("uninstall_driver", "--help"), ("--version",), ("-v",)):
        assert prompt.run(*words).require(0).out


def test_no_such_node(prompt: Prompt) -> None:
    """Decision 24: a node that is not there is a bad setting, 78, and is named."""
    for command in ("uninstall_driver", "restore", "plan", "status", "preflight_check"):
        ended = prompt.run(command, env={"NODE_NAME": "no-such-node"}).require(78)
        assert "no-such-node" in ended.err + ended.out


def test_no_token_that_counts(prompt: Prompt) -> None:
    """Decision 24: a token that the server does not accept is 77, said at once."""
    path = prompt.cp.kubeconfig("stranger", "no-such-token")
    ended = prompt.run("uninstall_driver", env={"KUBECONFIG": str(path)}).require(77)
    assert ended.said("token")


@pytest.mark.slow
def test_no_api_server(prompt: Prompt) -> None:
    """Decision 24: where nobody listens a run tries for half a minute, then ends with 69 and names the server."""
    path = prompt.cp.kubeconfig("admin", server="https://127.0.0.1:9")
    ended = prompt.run("uninstall_driver", env={"KUBECONFIG": str(path)}).require(69)
    assert ended.said("127.0.0.1:9")
    assert ended.wall < 40


def settings_line(ended: Ended) -> dict[str, Any]:
    """What a run said of the settings in force."""
    return next(line for line in ended.lines if line["message"] == "settings")


GOOD: list[tuple[tuple[str, ...], dict[str, str | None], str]] = [
    ((), {"DRAIN_TIMEOUT_SECONDS": "0s"}, "DRAIN_TIMEOUT_SECONDS=no limit (environment DRAIN_TIMEOUT_SECONDS)"),
    (("uninstall_driver", "--drain-timeout-seconds", "90"), {}, "DRAIN_TIMEOUT_SECONDS=90 s (flag --drain-timeout-seconds)"),
    (("-drain-timeout-seconds=1h30m", "uninstall_driver"), {}, "DRAIN_TIMEOUT_SECONDS=90 min (flag --drain-timeout-seconds)"),
    (("uninstall_driver", "-operand-timeout=500ms"), {"OPERAND_TIMEOUT": "9"}, "OPERAND_TIMEOUT=0.5 s (flag --operand-timeout)"),
    (("--enable-auto-drain", "uninstall_driver"), {}, "ENABLE_AUTO_DRAIN=True (flag --enable-auto-drain)"),
    (
        ("--enable-auto-drain=false", "uninstall_driver"),
        {"ENABLE_AUTO_DRAIN": "true"},
        "ENABLE_AUTO_DRAIN=False (flag --enable-auto-drain)",
    ),
    (("uninstall_driver", "--enable-auto-drain=T"), {}, "ENABLE_AUTO_DRAIN=True (flag --enable-auto-drain)"),
    ((), {"ENABLE_GPU_POD_EVICTION": ""}, "ENABLE_GPU_POD_EVICTION=False (environment ENABLE_GPU_POD_EVICTION)"),
    (("--unload-timeout=7", "uninstall_driver", "--unload-timeout=7s"), {}, "UNLOAD_TIMEOUT=7 s (flag --unload-timeout)"),
]
"""Words, environment, and what is in force then; without words the command alone."""


def test_good_words(prompt: Prompt) -> None:
    """N59, decision 25: Go's spellings are taken before and after the command; what is in force, and from where, is said at the start."""
    for words, changes, wanted in GOOD:
        ended = prompt.refused(*(words or ("uninstall_driver",)), env={"NODE_NAME": None, **changes})
        variable, _, value = wanted.partition("=")
        assert settings_line(ended)[variable] == value, words


def test_flags_on_both_sides_of_the_command(node: StockNode) -> None:
    """Decision 25: flags before and after the command reach a real run, without any variable for them."""
    node.add_driver(digest="same")
    node.reload_host(digest="same")
    ended = node.run("--node-name", node.name, "uninstall_driver", "-drain-use-force=false", NODE_NAME=None).require(0)
    assert settings_line(ended)["NODE_NAME"] == f"{node.name} (flag --node-name)"
