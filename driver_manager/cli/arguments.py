"""The command line as NVIDIA's program takes it, made into what click takes.

That program's flags are Go's: `--enable-auto-drain` alone is true, `--enable-auto-drain=false` is one word, one dash does as well as two,
and every flag may stand before or after the command.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import click

from driver_manager.config import BOOL, OPTIONS, Effective, Given, effective_settings

_FLAGS: Final = {option.flag: option for option in OPTIONS if option.flag}


def normalised(argv: Sequence[str]) -> list[str]:
    """The arguments with our flags in the one spelling that click knows."""
    result: list[str] = []
    words = iter(argv)
    for word in words:
        if word == "--":
            return [*result, word, *words]
        name, sign, value = word.lstrip("-").partition("=")
        option = _FLAGS.get(name) if word.startswith("-") else None
        if option is None:
            result.append(word)
        elif option.kind is BOOL:
            result.append(f"--{name}={value if sign else 'true'}")
        else:
            result.append(f"--{name}{sign}{value}")
    return result


def setting_options(function: Any) -> Any:
    """Adds every setting's flag to a command. What the help says of them is `cli.help`'s affair."""
    for option in reversed(OPTIONS):
        if option.flag:
            function = click.option(f"--{option.flag}", option.field, multiple=True)(function)
    return function


def read_settings(group: Mapping[str, Sequence[str]], command: Mapping[str, Sequence[str]], environment: Mapping[str, str]) -> Effective:
    """The settings from the flags before and after the command, and the environment.

    Raises:
        ConfigError: for a bad value.
    """
    flags = {}
    for option in OPTIONS:
        texts = [*group.get(option.field, ()), *command.get(option.field, ())]
        if texts:
            flags[option.field] = [Given(text, f"flag --{option.flag}") for text in texts]
    return effective_settings(flags, environment)
