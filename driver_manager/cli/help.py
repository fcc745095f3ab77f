"""What `--help` says: commands first, and every setting with its variable, its default and what it may be, from the one table of settings.

All commands take all settings. They are told in full once, by `driver-manager --help`; the help of a command tells its own options and the
settings that it is hardly used without.
"""

from collections.abc import Iterable, Iterator
from textwrap import wrap
from typing import Final

import click

from driver_manager.config import BOOL, OPTIONS, Option
from driver_manager.fleetconfig import CONTROLLER_OPTIONS

WIDTH: Final = 100
"""Columns at most: longer lines are hard to read."""
_ALL: Final = (*OPTIONS, *CONTROLLER_OPTIONS)
_PARAMETERS: Final = frozenset(option.parameter for option in _ALL)
_ALWAYS: Final = ("node_name", "kubeconfig", "no_cluster", "host_tree", "log_format", "log_level")
_OF_COMMAND: Final = {
    "uninstall_driver": (*_ALWAYS, "drain_timeout"),
    "restore": (*_ALWAYS, "restore_timeout", "lock_timeout"),
    "demo": ("log_format", "log_level"),
    "status": (*_ALWAYS, "operator_namespace", "node_selector", "policy_file", "lease_namespace", "lease_name"),
    "cleanup": ("kubeconfig", "operator_namespace", "lease_namespace", "lease_name", "heal_pause", "log_format", "log_level"),
    "controller": (
        *("kubeconfig", "operator_namespace", "policy_file", "node_selector", "cluster_max_unavailable", "lease_namespace", "listen"),
        *("log_format", "log_level"),
    ),
}
_HOW: Final = "Each is a flag, before or after the command, and a variable. A flag wins over the variable, which wins over the default."
_CONTROLLERS: Final = (
    "These are for `driver-manager controller`, after that word, besides operator-namespace, kubeconfig, "
    "node-label-for-gpu-pod-eviction, gpu-resource-prefixes, gpu-runtime-handlers, log-format and log-level."
)
_MORE: Final = "All other settings may be given too: `driver-manager --help` tells every one, with its default."


class Command(click.Command):
    """A command whose help does not repeat every setting."""

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Its own options, then the settings that concern it."""
        _own_options(self, context, formatter)
        with formatter.section("Settings"):
            fields = _OF_COMMAND.get(self.name or "", _ALWAYS)
            _settings(formatter, [option for option in _ALL if option.field in fields])
            formatter.write_paragraph()
            formatter.write_text(_MORE)


class Group(click.Group):
    """The program: its commands, then its options and all settings."""

    command_class = Command

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Commands, options, settings."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.help or "") for name, command in self.commands.items()])
        _own_options(self, context, formatter)
        with formatter.section("Settings"):
            formatter.write_text(_HOW)
            formatter.write_paragraph()
            _settings(formatter, OPTIONS)
        with formatter.section("Settings of the controller"):
            formatter.write_text(_CONTROLLERS)
            formatter.write_paragraph()
            _settings(formatter, CONTROLLER_OPTIONS)


def _own_options(command: click.Command, context: click.Context, formatter: click.HelpFormatter) -> None:
    own = [record for each in command.get_params(context) if each.name not in _PARAMETERS and (record := each.get_help_record(context))]
    with formatter.section("Options"):
        formatter.write_dl(own)


def _settings(formatter: click.HelpFormatter, options: Iterable[Option]) -> None:
    """Words are never broken: a variable or a label key that is cut in two cannot be searched for or copied."""
    indent = " " * formatter.current_indent
    for option in options:
        formatter.write(f"{indent}{usage(option)}\n")
        for text in (sentence(option), facts(option)):
            for line in wrap(text, formatter.width - len(indent) - 4, break_long_words=False, break_on_hyphens=False):
                formatter.write(f"{indent}    {line}\n")


def usage(option: Option) -> str:
    """How it is written: `--node-name NAME`; the variable where there is no flag."""
    if not option.flag:
        return f"{option.env} (environment only)"
    return f"--{option.flag}[={option.kind.sign}]" if option.kind is BOOL else f"--{option.flag} {option.kind.sign}"


def sentence(option: Option) -> str:
    """What it does."""
    return option.help[0].upper() + option.help[1:] + "."


def facts(option: Option) -> str:
    """Variable, default and, where the usage does not say it, what is allowed; in brackets."""
    allowed = "" if "|" in option.kind.sign else f"; {option.kind.sign}: {option.kind.allowed}"
    return f"[env: {option.env}; default: {option.default}{allowed}]"


def settings_table(options: Iterable[Option] = OPTIONS) -> Iterator[str]:
    """Settings as the lines of a Markdown table."""
    yield "| variable | flag | default | allowed | what it does |"
    yield "| --- | --- | --- | --- | --- |"
    for option in options:
        flag = f"`--{option.flag}`" if option.flag else "none"
        yield f"| `{option.env}` | {flag} | {option.default} | {option.kind.allowed} | {sentence(option)} |"
