"""The command line as NVIDIA's program takes it, made into what click takes.

That program's flags are Go's: `--enable-auto-drain` alone is true, `--enable-auto-drain=false` is one word, one dash does as well as two,
and every flag may stand before or after the command.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import click

from driver_manager.config import BOOL, OPTIONS, Effective, Given, Option, effective_settings, read_options
from driver_manager.fleetconfig import CLEANING, CONTROLLER_OPTIONS, LOOKING, SHARED, FleetWords, read_words

_FLAGS: Final = {option.flag: option for option in (*OPTIONS, *CONTROLLER_OPTIONS) if option.flag}


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


def setting_options(function: Any, options: Sequence[Option] = OPTIONS) -> Any:
    """Adds every setting's flag to a command. What the help says of them is `cli.help`'s affair."""
    for option in reversed(options):
        if option.flag:
            function = click.option(f"--{option.flag}", option.parameter, multiple=True)(function)
    return function


def controller_options(function: Any) -> Any:
    """Adds the flags of the controller's settings to its command."""
    return setting_options(function, (*CONTROLLER_OPTIONS, *SHARED))


def looking_options(function: Any) -> Any:
    """Adds the flags that tell where the controller and its fleet are."""
    return setting_options(function, LOOKING)


def cleaning_options(function: Any) -> Any:
    """Adds the flags that tell where the controller's Lease is, and how long an undo waits."""
    return setting_options(function, CLEANING)


def read_cleaning(given: Mapping[str, Sequence[str]], environment: Mapping[str, str]) -> Mapping[str, Any]:
    """What is given for them: field -> value.

    Raises:
        ConfigError: for a bad value.
    """
    return read_options(CLEANING, _given(CLEANING, {}, given), environment)[0]


def read_settings(group: Mapping[str, Sequence[str]], command: Mapping[str, Sequence[str]], environment: Mapping[str, str]) -> Effective:
    """The settings from the flags before and after the command, and the environment.

    Raises:
        ConfigError: for a bad value.
    """
    return effective_settings(_given(OPTIONS, group, command), environment)


def read_controller_words(
    group: Mapping[str, Sequence[str]], command: Mapping[str, Sequence[str]], environment: Mapping[str, str]
) -> FleetWords:
    """The same for the controller.

    Raises:
        ConfigError: for a bad value. click.UsageError: for a flag before the command that is not the controller's.
    """
    options = (*CONTROLLER_OPTIONS, *SHARED)
    ours = {option.field for option in options}
    foreign = [option.flag for option in OPTIONS if option.field not in ours and group.get(option.field)]
    if foreign:
        raise click.UsageError(f"--{foreign[0]} is a setting of the agent, and means nothing to the controller.")
    return read_words(_given(options, group, command), environment)


def read_looking(given: Mapping[str, Sequence[str]], environment: Mapping[str, str]) -> Mapping[str, Any]:
    """What is given for them: field -> value.

    Raises:
        ConfigError: for a bad value.
    """
    return read_options(LOOKING, _given(LOOKING, {}, given), environment)[0]


def _given(options: Sequence[Option], group: Mapping[str, Sequence[str]], command: Mapping[str, Sequence[str]]) -> dict[str, list[Given]]:
    """Field -> every text given for it."""
    flags = {}
    for option in options:
        texts = [*group.get(option.parameter, ()), *command.get(option.parameter, ())]
        if texts:
            flags[option.field] = [Given(text, f"flag --{option.flag}") for text in texts]
    return flags
