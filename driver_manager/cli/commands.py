"""What each command does: opens the ports, runs the agent, prints the result."""

import asyncio
import logging
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeVar

import click

from driver_manager import logs
from driver_manager.agent.progress import Progress
from driver_manager.agent.run import Agent, Outcome
from driver_manager.cli.main import ENDING, show_error
from driver_manager.clock import SystemClock
from driver_manager.config import DURATION, OPTIONS, Effective, Settings, duration_words
from driver_manager.core.selectors import Selector
from driver_manager.errors import ConfigError, Exit
from driver_manager.host import open_host
from driver_manager.host.local import LocalCluster, open_local
from driver_manager.ports import Cluster, Host

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
LOOKING_SECONDS = 5.0
"""How long the commands that only look try a read again."""


def _begin(effective: Effective) -> Settings:
    """Sets up the log and says what is in force."""
    settings = effective.settings
    logs.set_up(settings.log_format, settings.log_level)
    logger.info("settings", extra=_settings_in_words(effective))
    if settings.host_tree:
        logger.warning("REHEARSAL: the host is a directory tree, this machine is not touched", extra={"tree": settings.host_tree})
    if settings.no_cluster and settings.kubeconfig:
        logger.warning("the cluster is not asked: there is a kubeconfig, but NO_CLUSTER is true", extra={"kubeconfig": settings.kubeconfig})
    return settings


def _settings_in_words(effective: Effective) -> dict[str, str]:
    words = {}
    for option in OPTIONS:
        value = getattr(effective.settings, option.field)
        origin = effective.origins[option.field]
        if option.kind is DURATION:
            value = duration_words(value)
        elif isinstance(value, Selector):
            value = value.text
        if origin != "default" or option.kind is DURATION:
            words[option.env] = f"{value} ({origin})"
    return words


def _on_node(settings: Settings, hint: str = "set NODE_NAME, or --node-name, to the name of this node (or --no-cluster)") -> Settings:
    """The settings with the node that they are for; a machine without a cluster has a name of its own."""
    if settings.no_cluster:
        return replace(settings, node_name=_open_local(settings).name)
    if not settings.node_name:
        raise ConfigError("NODE_NAME is not set", hint=hint)
    return settings


def _open_host(settings: Settings) -> Host:
    return open_host(_tree(settings), SystemClock())


def _open_local(settings: Settings) -> LocalCluster:
    return open_local(_tree(settings), settings.node_name)


def _tree(settings: Settings) -> Path | None:
    return Path(settings.host_tree) if settings.host_tree else None


ENDING_TRIES: Final = 5
"""How often work that changes nothing is asked to end, a second apart."""


async def unless_stopped(stop: asyncio.Event, work: Awaitable[int]) -> int:
    """Does work that changes nothing; a signal ends it at once."""
    task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if task.done():
        return task.result()
    for _ in range(ENDING_TRIES):  # a library that catches the first asking must not keep a person who has pressed Ctrl-C
        task.cancel()
        if (await asyncio.wait({task}, timeout=1.0))[0]:
            break
    return int(Exit.AGAIN)


async def _connect(settings: Settings, *, is_patient: bool = False) -> Cluster:
    """Opens the connection; a person who only looks is not kept waiting for a server that does not answer."""
    if settings.no_cluster:
        return _open_local(settings)
    from driver_manager.kube import connect
    from driver_manager.kube.client import RETRY_SECONDS

    patience = RETRY_SECONDS if is_patient else LOOKING_SECONDS
    return await connect(settings.kubeconfig or None, SystemClock(), retry_seconds=patience)


def run_until_done(work: Callable[[asyncio.Event], Awaitable[Result]]) -> Result:
    """Runs asynchronous work; SIGTERM, SIGINT and SIGHUP set the event from now on."""

    async def with_signals() -> Result:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as SIGHUP is under nohup
                loop.add_signal_handler(number, stop.set)
        return await work(stop)

    try:
        return asyncio.run(with_signals())
    finally:
        for number in ENDING:  # all is done: a second signal must not hide how it ended
            signal.signal(number, signal.SIG_IGN)


def _changing(effective: Effective, what: Callable[[Agent, asyncio.Event], Awaitable[Outcome]]) -> Outcome:
    """What a command that changes the node came to."""
    settings = _on_node(_begin(effective))

    async def work(stop: asyncio.Event) -> Outcome:
        host = _open_host(settings)
        cluster = await _connect(settings, is_patient=True)
        try:
            with _live(settings) as on_change:
                clock = SystemClock()
                agent = Agent(cluster, host, clock, settings, Progress(clock, on_change))
                return await what(agent, stop)
        finally:
            await cluster.close()

    outcome = run_until_done(work)
    report(outcome)
    return outcome


def _live(settings: Settings) -> AbstractContextManager[Callable[[Progress], None]]:
    from driver_manager.cli.live import LiveView

    return LiveView(is_on=settings.log_format == "auto" and sys.stderr.isatty())


def report(outcome: Outcome) -> int:
    """Says how a run ended, once: in plain words on a terminal where it failed, else as the log's last line. Gives its exit code."""
    is_done = outcome.code is Exit.DONE
    if not is_done and sys.stderr.isatty():
        show_error(outcome.sentence, outcome.hint)
    else:
        told = {"exit": int(outcome.code), "result": outcome.sentence, "put_back": outcome.is_put_back}
        logger.log(logging.INFO if is_done else logging.ERROR, "end", extra=told | ({"hint": outcome.hint} if outcome.hint else {}))
    return int(outcome.code)


def run_uninstall(effective: Effective) -> int:
    """Frees the node."""
    return int(_changing(effective, lambda agent, stop: agent.uninstall(stop)).code)


def run_restore(effective: Effective, output: str, *, keep_status: bool) -> int:
    """Puts the node back."""
    outcome = _changing(effective, lambda agent, stop: agent.restore(stop, keep_status=keep_status))
    if output == "json":
        from driver_manager.cli import render

        render.outcome(outcome)
    return int(outcome.code)


def run_plan(effective: Effective, output: str) -> int:
    """Prints the plan; the exit code is the one a run would have begun with: 0, or that of the refusal."""
    settings = _on_node(_begin_quietly(effective))

    async def work() -> int:
        host = _open_host(settings)
        cluster = await _connect(settings)
        try:
            seen, plan = await Agent(cluster, host, SystemClock(), settings).plan()
        finally:
            await cluster.close()
        from driver_manager.cli import render

        render.plan(seen, plan, output)
        return int(plan.ends_with)

    return run_until_done(lambda stop: unless_stopped(stop, work()))


def run_status(effective: Effective, output: str) -> int:
    """Prints the state of the node."""
    settings = _on_node(_begin_quietly(effective), "set NODE_NAME, or --node-name, to the node's name; --all shows all nodes")

    async def work() -> int:
        host = _open_host(settings)
        cluster = await _connect(settings)
        try:
            seen, plan = await Agent(cluster, host, SystemClock(), settings).state()
        finally:
            await cluster.close()
        from driver_manager.cli import render

        render.status(seen, plan, output)
        return int(Exit.DONE)

    return run_until_done(lambda stop: unless_stopped(stop, work()))


def run_preflight(effective: Effective, output: str) -> int:
    """Prints the checks; the exit code is that of the worst failed one."""
    settings = _begin_quietly(effective)
    if settings.no_cluster:
        settings = _on_node(settings)

    async def work() -> int:
        from driver_manager.agent.preflight import preflight, worst
        from driver_manager.cli import render

        checks = await preflight(lambda: _connect(settings), _open_host(settings), SystemClock(), settings)
        render.checks(checks, output)
        return int(worst(checks))

    return run_until_done(lambda stop: unless_stopped(stop, work()))


def _begin_quietly(effective: Effective) -> Settings:
    """For commands whose result is what they print: only warnings besides."""
    settings = effective.settings
    level = settings.log_level if effective.origins["log_level"] != "default" else "warning"
    logs.set_up(settings.log_format, level)
    if settings.host_tree:
        click.echo(f"rehearsal: the host is the tree {settings.host_tree}, not this machine", err=True)
    return settings
