"""The command `vfio-manage`: GPUs to vfio for virtual machines, and back. Text in, exit code out.

It takes the words of NVIDIA's program of that name. What it adds: it moves every function of a GPU, refuses what is in use, puts back what
failed half-way, and its exit code is 0 only where every device that was wanted reads back as wanted.
"""

import asyncio
import json
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource

from driver_manager import __version__
from driver_manager.cli.main import show_error
from driver_manager.errors import ConfigError, DriverManagerError, Exit, Refused

if TYPE_CHECKING:
    from driver_manager.core.vfio import Bus, Decision, Function
    from driver_manager.host.vfio import Outcome, Vfio

logger = logging.getLogger(__name__)

LOCK_SECONDS: Final = 60.0
_LONG: Final = frozenset(
    {"all", "device-id", "host-root", "host-tree", "bind-nvswitches", "unbind-nvswitches", "dry-run", "no-probe", "output", "log-format",
     "device-timeout", "help", "version"}
)  # fmt: skip

_LISTS: Final = "lspci -D -d 10de: lists NVIDIA's"
_SHORT: Final = {"a": "all", "d": "device-id"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What was asked for."""

    action: str
    all: bool
    device_id: str
    switches: bool
    probe: bool
    dry_run: bool
    host_root: str
    host_tree: str
    output: str
    timeout: float


def _flag(context: click.Context, option: click.Parameter, value: str | None) -> bool:
    """A truth value as Go reads it: alone it is true, empty in the environment it is false."""
    from driver_manager.config import parse_bool

    try:
        return parse_bool(value) if value else False
    except ValueError as error:
        raise _bad_value(context, option, value, error) from error


def _seconds(context: click.Context, option: click.Parameter, value: str) -> float:
    from driver_manager.config import parse_duration

    try:
        seconds = parse_duration(value)
    except ValueError as error:
        raise _bad_value(context, option, value, error) from error
    if seconds <= 0:
        raise ConfigError("--device-timeout must be above 0: a write to a device in use may never come back")
    return seconds


def _log_format(context: click.Context, option: click.Parameter, value: str) -> str:
    words = ("auto", "text", "json")
    if value not in words:
        raise _bad_value(context, option, value, ValueError(f"allowed are {', '.join(words)}"))
    return value


def _bad_value(context: click.Context, option: click.Parameter, value: str | None, error: ValueError) -> ConfigError:
    """The error for a value, naming what the person has written: the flag, or the variable."""
    name = option.name or ""
    is_variable = context.get_parameter_source(name) is ParameterSource.ENVIRONMENT
    source = f"environment {option.envvar}" if is_variable else f"flag --{name.replace('_', '-')}"
    return ConfigError(f"{source} has the bad value {value!r}: {error}")


def _option(*names: str, env: str | None = None, help: str, **how: Any) -> Callable[[Any], Any]:
    return click.option(*names, envvar=env, help=help + (f"  [env: {env}]" if env else ""), **how)


def _bool_option(*names: str, env: str | None = None, help: str) -> Callable[[Any], Any]:
    how = {"is_flag": False, "flag_value": "true", "default": None, "callback": _flag, "metavar": "[=true|false]"}
    return _option(*names, env=env, help=help, **how)


_common: Final = (
    _bool_option("-a", "--all", help="Every GPU of NVIDIA; SR-IOV virtual functions are left alone."),
    click.option("-d", "--device-id", default="", metavar="BDF", help="One device by its PCI address, such as 0000:3b:00.0."),
    _bool_option("--dry-run", help="Say what would be done, and do nothing."),
    _option("--host-tree", env="DRIVER_MANAGER_HOST_TREE", default="", metavar="DIR",
            help="Rehearse on a directory laid out like a host's root."),
    click.option("--device-timeout", default="20s", show_default=True, callback=_seconds, metavar="DURATION",
                 help="Limit of one write to a device; never 0."),
    click.option("--output", type=click.Choice(["table", "json"]), default="table", show_default=True, help="How to print the result."),
    _option("--log-format", env="LOG_FORMAT", default="auto", metavar="auto|text|json", callback=_log_format, show_default=True,
            help="How log lines look; auto is text on a terminal and json otherwise."),
)  # fmt: skip


def _with_common(function: Any) -> Any:
    for option in reversed(_common):
        function = option(function)
    return function


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, "-v", "--version", prog_name="vfio-manage")
def cli() -> None:
    """Move NVIDIA's GPUs to vfio, for virtual machines, and back."""


@cli.command()
@_with_common
@_bool_option("--bind-nvswitches", env="BIND_NVSWITCHES", help="NVSwitches too.")
@_option("--host-root", env="HOST_ROOT", default="", metavar="DIR", help="Root of the host, in which modprobe is run.")
@click.pass_context
def bind(context: click.Context, /, bind_nvswitches: bool, host_root: str, log_format: str, **given: Any) -> None:
    """Give GPUs to the vfio driver that each of them wants."""
    context.exit(_act("bind", log_format, switches=bind_nvswitches, probe=False, host_root=host_root, **given))


@cli.command()
@_with_common
@_bool_option("--unbind-nvswitches", env="BIND_NVSWITCHES", help="NVSwitches too.")
@_bool_option("--no-probe", help="Leave a device whose former driver is not known without one.")
@click.pass_context
def unbind(context: click.Context, /, unbind_nvswitches: bool, no_probe: bool, log_format: str, **given: Any) -> None:
    """Give GPUs that are on vfio back to the driver that they had. A native driver keeps what it has."""
    context.exit(_act("unbind", log_format, switches=unbind_nvswitches, probe=not no_probe, host_root="", **given))


def _act(action: str, log_format: str, device_timeout: float, **given: Any) -> int:
    from driver_manager import logs

    wish = Wish(action=action, timeout=device_timeout, **given)
    if wish.all == bool(wish.device_id):
        raise click.UsageError("give exactly one of --all and --device-id")
    logs.set_up(log_format, "info")
    return asyncio.run(_with_signals(wish))


async def _with_signals(wish: Wish) -> int:
    """A signal ends the work between two units: what is begun is brought to its end."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return await _moved(wish, stop)


async def _moved(wish: Wish, stop: asyncio.Event) -> int:
    from driver_manager.clock import SystemClock
    from driver_manager.core.vfio import units_of, worst
    from driver_manager.host.linux import open_vfio
    from driver_manager.host.vfio import work_through

    tree = Path(wish.host_tree) if wish.host_tree else None
    host, vfio, warning = open_vfio(tree, SystemClock(), host_root=wish.host_root, timeout=wish.timeout)
    if warning:
        logger.warning(warning)
    if tree is not None:
        logger.warning("REHEARSAL: the host is a directory tree, this machine is not touched", extra={"tree": wish.host_tree})
    if wish.dry_run:
        bus = await vfio.look()
        outcomes = [_foreseen(wish, bus, unit) for unit in units_of(bus, _wanted(wish, bus))]
    else:
        async with host.lock(LOCK_SECONDS):
            bus = await vfio.look()
            outcomes = await work_through(units_of(bus, _wanted(wish, bus)), _work(wish, vfio), stop)
    for note in (*bus.notes, *_notes(bus)):
        logger.warning(note)
    code = worst(outcome.decision.code for outcome in outcomes)
    _show(wish, outcomes, code)
    return int(code)


def _work(wish: Wish, vfio: "Vfio") -> Callable[[Any], Awaitable["Outcome"]]:
    if wish.action == "bind":
        return vfio.bind

    async def unbind(unit: Any) -> "Outcome":
        return await vfio.unbind(unit, probe=wish.probe)

    return unbind


def _foreseen(wish: Wish, bus: "Bus", unit: Any) -> "Outcome":
    from driver_manager.core.vfio import decide_bind, decide_unbind
    from driver_manager.host.vfio import Outcome

    decision = decide_bind(bus, unit) if wish.action == "bind" else decide_unbind(bus, unit, probe=wish.probe)
    return Outcome(decision, unit.functions)


def _notes(bus: "Bus") -> list[str]:
    if bus.sees_all_processes:
        return []
    return ["the processes of the host are not visible (hostPID is off): who has a device open outside this container goes unseen"]


# Whom it concerns ---------------------------------------------------------------------------------------------------


def _wanted(wish: Wish, bus: "Bus") -> tuple["Function", ...]:
    """The devices that were asked for.

    Raises:
        ConfigError: there is none of that address. Refused: it is nothing that this command moves.
    """
    from driver_manager.core.vfio import Role, full_address, wanted_of_all

    if wish.all:
        return wanted_of_all(bus, switches=wish.switches)
    address = full_address(wish.device_id)
    if address is None:
        raise ConfigError(f"{wish.device_id!r} is no PCI address", hint="such an address looks like 0000:3b:00.0; lspci -D lists them")
    function = bus.functions.get(address)
    if function is None:
        raise ConfigError(f"there is no PCI device {address} on this machine", hint=_LISTS)
    if function.vendor != "0x10de":
        raise Refused(f"{address} is no device of NVIDIA (vendor {function.vendor}); it is left alone", hint=_LISTS)
    if function.role is Role.NVSWITCH and not wish.switches:
        raise Refused(f"{address} is an NVSwitch, and those are moved only on demand", hint=f"add --{wish.action}-nvswitches")
    if function.role not in (Role.GPU, Role.NVSWITCH):
        others = [each.address for each in wanted_of_all(bus, switches=False) if each.slot == function.slot]
        hint = f"name the GPU that it belongs to, {', '.join(others)}: it goes along" if others else _LISTS
        raise Refused(f"{address} is neither a GPU nor an NVSwitch (class {function.device_class}); it is left alone", hint=hint)
    return (function,)


# Telling ------------------------------------------------------------------------------------------------------------


def _show(wish: Wish, outcomes: Sequence["Outcome"], code: Exit) -> None:
    if wish.output == "json":
        document = {"action": wish.action, "dryRun": wish.dry_run, "devices": [_document(each) for each in outcomes], "exitCode": int(code)}
        click.echo(json.dumps(document, indent=2))
    else:
        for each in outcomes:
            for line in _lines(each):
                click.echo(line)
        if not outcomes:
            click.echo("no GPU of NVIDIA is here: nothing to do")
    for each in outcomes:
        if each.decision.code is not Exit.DONE:
            show_error(_names(each.decision) + f" {each.decision.result}: {each.decision.because}", each.decision.hint)


def _names(decision: "Decision") -> str:
    return ", ".join(main.address for main in decision.unit.mains)


def _lines(outcome: "Outcome") -> list[str]:
    decision = outcome.decision
    before = {each.address: each for each in decision.unit.functions} | {move.function.address: move.function for move in decision.moves}
    lines = [f"{_names(decision)}  {decision.result}: {decision.because}"]
    if decision.result.value in ("done", "failed", "stuck"):
        for now in outcome.after:
            was = before[now.address].driver if now.address in before else None
            lines.append(f"  {now.address} {now.role}: was on {was or 'no driver'}, is on {now.driver or 'no driver'}")
    return lines


def _document(outcome: "Outcome") -> dict[str, Any]:
    decision = outcome.decision
    before = {each.address: each.driver for each in decision.unit.functions} | {
        move.function.address: move.function.driver for move in decision.moves
    }
    return {
        "addresses": [main.address for main in decision.unit.mains],
        "result": str(decision.result),
        "because": decision.because,
        "hint": decision.hint,
        "exitCode": int(decision.code),
        "functions": [
            {
                "address": now.address,
                "role": str(now.role),
                "before": before.get(now.address),
                "driver": now.driver,
                "override": now.override,
            }
            for now in outcome.after
        ],
    }


# The program --------------------------------------------------------------------------------------------------------


def _normalised(arguments: Sequence[str]) -> list[str]:
    """The arguments in click's spelling: in NVIDIA's program one dash does as well as two, and `-d=X` is `-d X`."""
    return [_spelled(word) for word in arguments]


def _spelled(word: str) -> str:
    name, sign, value = word[1:].partition("=")
    if not word.startswith("-") or word.startswith("--"):
        return word
    if sign and name in _SHORT:
        return f"--{_SHORT[name]}={value}"
    return f"-{word}" if name in _LONG else word


def run(arguments: Sequence[str]) -> int:
    """Runs one command line and gives its exit code."""
    try:
        return int(cli.main(args=_normalised(arguments), prog_name="vfio-manage", standalone_mode=False) or 0)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return int(Exit.DONE)
    except click.ClickException as error:
        error.show()
        return int(Exit.USAGE)
    except DriverManagerError as error:
        show_error(error.message, error.hint)
        return int(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return int(Exit.AGAIN)
    except Exception:
        logger.exception("a bug in vfio-manage: please report it with these lines")
        return int(Exit.BUG)


def main() -> None:
    """The console script."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # as in main
    code = run(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)
