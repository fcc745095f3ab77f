"""What `--help` says, and how short it is."""

from __future__ import annotations

import pytest

from driver_manager.cli.main import cli, run
from driver_manager.cli.vfio import cli as vfio
from driver_manager.cli.vfio import run as run_vfio
from driver_manager.config import OPTIONS
from driver_manager.fleetconfig import CONTROLLER_OPTIONS


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What the command prints, on one line: where a line is broken is of no matter."""
    assert run(words) == 0
    return " ".join(capsys.readouterr().out.split())


def test_help_tells_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    """Each setting has its variable, its default and what it may be; one without a flag is told too."""
    text = told(capsys, "--help")
    for option in (*OPTIONS, *CONTROLLER_OPTIONS):
        assert f"[env: {option.env}; default: {option.default}" in text
        assert option.flag or f"{option.env} (environment only)" in text
        words = option.kind.sign.split("|") if "|" in option.kind.sign else [option.kind.allowed]
        assert all(word in text for word in words)


def test_help_says_in_words_that_a_default_is_without_limit(capsys: pytest.CaptureFixture[str]) -> None:
    """R8: that evictions wait without end unless told otherwise is said where one looks first."""
    for words in (("--help",), ("uninstall_driver", "--help")):
        assert "[env: DRAIN_TIMEOUT_SECONDS; default: no limit (0)" in told(capsys, *words)


def test_help_begins_with_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """Commands come before options and settings, each with its whole sentence."""
    text = told(capsys, "--help")
    assert text.index("Commands:") < text.index("Options:") < text.index("Settings:")
    for command in cli.commands.values():
        assert " ".join((command.help or "").split()) in text


@pytest.mark.parametrize("command", sorted({*cli.commands} - {"install-systemd"}))
def test_the_help_of_a_command_is_short(capsys: pytest.CaptureFixture[str], command: str) -> None:
    """A command's help has its own options and what it is hardly used without, and says where all the rest is."""
    assert run((command, "--help")) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) < 60
    assert "`driver-manager --help`" in text
    assert "--gpu-resource-prefixes" not in text


def test_a_command_without_settings_shows_none(capsys: pytest.CaptureFixture[str]) -> None:
    """`install-systemd` takes no setting, so its help has its own options alone."""
    text = told(capsys, "install-systemd", "--help")
    assert "--root" in text
    assert "Settings:" not in text


@pytest.mark.parametrize("command", sorted(vfio.commands))
def test_vfio_help_names_the_variables(capsys: pytest.CaptureFixture[str], command: str) -> None:
    """Every flag of `vfio-manage` that a variable can set says which."""
    assert run_vfio((command, "--help")) == 0
    text = " ".join(capsys.readouterr().out.split())
    for option in vfio.commands[command].params:
        assert not option.envvar or f"[env: {option.envvar}]" in text


@pytest.mark.parametrize(("variable", "text"), [("BIND_NVSWITCHES", "maybe"), ("LOG_FORMAT", "xml")])
def test_vfio_names_the_variable_that_is_bad(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, variable: str, text: str
) -> None:
    """N59: a bad value from the environment is refused by the variable's name, with 78."""
    monkeypatch.setenv(variable, text)
    assert run_vfio(("bind", "--all", "--dry-run")) == 78
    assert f"error: environment {variable} has the bad value '{text}'" in capsys.readouterr().err
