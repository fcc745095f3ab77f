"""What `--help` says: commands first, and every setting with its variable, its default and what it may be, from the one table of settings.

All commands take all settings. They are told in full once, by `driver-manager --help`; the help of a command tells its own options and the
settings that it is hardly used without.
"""

from collections.abc import Collection, Iterator
from textwrap import wrap
from typing import Final

import click

from driver_manager.config import BOOL, OPTIONS, Option

WIDTH: Final = 100
"""Columns at most: longer lines are hard to read."""
_FIELDS: Final = frozenset(option.field for option in OPTIONS)
_ALWAYS: Final = ("node_name", "kubeconfig", "no_cluster", "host_tree", "log_format", "log_level")
_OF_COMMAND: Final = {
    "uninstall_driver": (*_ALWAYS, "drain_timeout"),
    "restore": (*_ALWAYS, "restore_timeout", "lock_timeout"),
    "demo": ("log_format", "log_level"),
}
_HOW: Final = "Each is a flag, before or after the command, and a variable. A flag wins over the variable, which wins over the default."
_MORE: Final = "All other settings may be given too: `driver-manager --help` tells every one, with its default."


class Command(click.Command):
    """A command whose help does not repeat every setting."""

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Its own options, then the settings that concern it."""
        _own_options(self, context, formatter)
        with formatter.section("Settings"):
            _settings(formatter, _OF_COMMAND.get(self.name or "", _ALWAYS))
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
            _settings(formatter, _FIELDS)


def _own_options(command: click.Command, context: click.Context, formatter: click.HelpFormatter) -> None:
    own = [record for each in command.get_params(context) if each.name not in _FIELDS and (record := each.get_help_record(context))]
    with formatter.section("Options"):
        formatter.write_dl(own)


def _settings(formatter: click.HelpFormatter, fields: Collection[str]) -> None:
    """Words are never broken: a variable or a label key that is cut in two cannot be searched for or copied."""
    indent = " " * formatter.current_indent
    for option in OPTIONS:
        if option.field in fields:
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


def settings_table() -> Iterator[str]:
    """All settings as the lines of a Markdown table."""
    yield "| variable | flag | default | allowed | what it does |"
    yield "| --- | --- | --- | --- | --- |"
    for option in OPTIONS:
        flag = f"`--{option.flag}`" if option.flag else "none"
        yield f"| `{option.env}` | {flag} | {option.default} | {option.kind.allowed} | {sentence(option)} |"
