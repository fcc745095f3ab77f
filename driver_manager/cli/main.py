"""The command `driver-manager`: words in, exit code out.

Nothing heavy is imported before a command needs it: the agent's start is part of a node's downtime, and signals are handled from the first
moment on, as the program can be the first process of its container.
"""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import click

from driver_manager import __version__
from driver_manager.cli.arguments import (
    cleaning_options,
    controller_options,
    looking_options,
    normalised,
    read_cleaning,
    read_controller_words,
    read_looking,
    read_settings,
    setting_options,
)
from driver_manager.cli.help import WIDTH, Group
from driver_manager.errors import DriverManagerError, Exit

ENDING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that end a run with everything put back; SIGHUP is the terminal or the ssh session that went away."""
_SETTINGS_KEY: Final = "driver-manager.settings"


def _die_early(number: int, _: object) -> None:
    """A signal before anything has begun: nothing is changed, so there is nothing to put back."""
    raise SystemExit(int(Exit.AGAIN))


@click.group(cls=Group, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": WIDTH})
@click.version_option(__version__, "-v", "--version", prog_name="driver-manager")
@setting_options
@click.pass_context
def cli(context: click.Context, /, **flags: tuple[str, ...]) -> None:
    """Free this node of everything that uses the NVIDIA driver, and put it all back."""
    context.ensure_object(dict)[_SETTINGS_KEY] = flags
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def _command(name: str, *extra: Callable[[Any], Any]) -> Callable[[Callable[..., int]], click.Command]:
    """A command with all settings; it gives its exit code."""

    def decorate(function: Callable[..., int]) -> click.Command:
        @click.pass_context
        def run(context: click.Context, /, **given: Any) -> None:
            own = {key: given.pop(key) for key in list(given) if key in extra_names}
            effective = read_settings(context.obj[_SETTINGS_KEY], given, os.environ)
            context.exit(function(effective, **own))

        decorated: Any = run
        extra_names: set[str] = set()
        for each in extra:
            decorated = each(decorated)
        extra_names.update(option.name for option in getattr(decorated, "__click_params__", []))
        decorated = setting_options(decorated)
        decorated.__doc__ = function.__doc__
        return cli.command(name)(decorated)

    return decorate


_output = click.option(
    "--output", type=click.Choice(["table", "json"]), default="table", show_default=True, help="How to print the result."
)


@_command("uninstall_driver")
def uninstall_driver(effective: Any) -> int:
    """Free the node: pause operands, evict GPU pods, unload the driver, unmount its root, put everything back."""
    from driver_manager.cli.commands import run_uninstall

    return run_uninstall(effective)


@_command(
    "restore",
    _output,
    click.option("--keep-status", is_flag=True, help="Where nothing is to be put back, leave the last run's word on the node as it is."),
)
def restore(effective: Any, output: str, keep_status: bool) -> int:
    """Put back what an earlier run left on the node, by its record, and only that."""
    from driver_manager.cli.commands import run_restore

    return run_restore(effective, output, keep_status=keep_status)


@_command("plan", _output)
def plan(effective: Any, output: str) -> int:
    """Show what uninstall_driver would do now, to which pods and why. Changes nothing."""
    from driver_manager.cli.commands import run_plan

    return run_plan(effective, output)


@_command(
    "status",
    _output,
    click.option("--all", "is_all", is_flag=True, help="Show all nodes of the fleet instead of this one."),
    click.option("--watch", "is_watched", is_flag=True, help="With --all, on a terminal: show it again and again."),
    looking_options,
)
def status(effective: Any, output: str, is_all: bool, is_watched: bool, **where: Any) -> int:
    """Show what state the node is in, or with --all the whole fleet, and why."""
    if is_watched and not (is_all and output == "table" and sys.stdout.isatty()):
        raise click.UsageError("--watch goes with --all, on a terminal, and with no other output than the table.")
    if is_all:
        from driver_manager.cli.fleetstatus import run_status_all

        return run_status_all(effective, read_looking(where, os.environ), output, is_watched=is_watched)
    if given := [name for name, texts in where.items() if texts]:
        raise click.UsageError(f"--{given[0].replace('_', '-')} goes with --all.")
    from driver_manager.cli.commands import run_status

    return run_status(effective, output)


@_command("preflight_check", _output)
def preflight_check(effective: Any, output: str) -> int:
    """Check what a run needs, before anything is disturbed."""
    from driver_manager.cli.commands import run_preflight

    return run_preflight(effective, output)


@cli.command("install-systemd", cls=click.Command)  # no setting changes what it does
@click.option("--remove", "is_remove", is_flag=True, help="Take the unit away, and its settings if nobody has changed them.")
@click.option("--root", default="/", show_default=True, metavar="DIR", help="Root folder of the machine, or of an image that is built.")
@click.option("--command", default="", metavar="PATH", help="The installed program as that machine knows it; by default this one.")
@click.pass_context
def install_systemd(context: click.Context, /, is_remove: bool, root: str, command: str) -> None:
    """Put the systemd unit for a machine without a cluster in place, with a file for its settings."""
    from driver_manager.cli.systemd import run_install

    context.exit(run_install(is_remove=is_remove, root=root, command=command))


@_command(
    "demo",
    click.option("--speed", type=click.FloatRange(min=0.1), default=2.0, show_default=True, help="How much faster than life."),
    click.option("--seed", type=int, default=0, show_default=True, help="Of all chance in the simulated world."),
    click.option("--plain", is_flag=True, help="Plain lines at once, the same each time, instead of a view that takes its time."),
)
def demo(effective: Any, speed: float, seed: int, plain: bool) -> int:
    """Watch a whole run on a simulated cluster and host, in simulated time: no GPU and no cluster needed."""
    from driver_manager.cli.demo import run_demo, run_plain

    return run_plain(effective, seed) if plain else run_demo(effective, speed, seed)


@cli.command("controller")
@controller_options
@click.pass_context
def controller(context: click.Context, /, **given: Any) -> None:
    """Lead a fleet through driver changes, a few nodes at a time; runs until it is stopped."""
    from driver_manager.cli.controller import run_controller

    context.exit(run_controller(read_controller_words(context.obj[_SETTINGS_KEY], given, os.environ)))


@_command(
    "cleanup",
    _output,
    click.option("--dry-run", is_flag=True, help="Only tell what would be done. Changes nothing."),
    cleaning_options,
)
def cleanup(effective: Any, output: str, dry_run: bool, **where: Any) -> int:
    """Take everything of ours off all nodes of the cluster, before this program is uninstalled; tell what is left, and why."""
    from driver_manager.cli.cleanup import run_cleanup

    return run_cleanup(effective, read_cleaning(where, os.environ), output, is_dry=dry_run)


def run(arguments: Sequence[str]) -> int:
    """Runs one command line and gives its exit code."""
    try:
        code = cli.main(args=normalised(arguments), prog_name="driver-manager", standalone_mode=False)
        return int(code or 0)
    except click.ClickException as error:
        error.show()
        return int(Exit.USAGE)
    except DriverManagerError as error:
        show_error(error.message, error.hint)
        return int(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return int(Exit.AGAIN)
    except BrokenPipeError:
        return int(Exit.DONE)
    except Exception:
        import logging

        logging.getLogger(__name__).exception("a bug in driver-manager: please report it with these lines")
        return int(Exit.BUG)


def show_error(message: str, hint: str = "") -> None:
    """An error for people, on standard error."""
    click.echo(f"error: {message}", err=True)
    if hint:
        click.echo(f"hint: {hint}", err=True)


def main() -> None:
    """The console script."""
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _die_early)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # who starts us may ignore it, and then nobody can learn how a child has ended
    _open_streams()
    code = run(sys.argv[1:])
    _flush_streams()
    sys.exit(code)


def _open_streams() -> None:
    """Gives a program that was started without standard output or error somewhere to write to."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: PTH123, SIM115 - for the life of the process


def _flush_streams() -> None:
    """Writes out what is left; nobody who listens, or a full disk, must not change how the program ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
