"""`cleanup`: takes everything of ours off a cluster, and tells what it did and what it left."""

import asyncio
from collections.abc import Mapping
from typing import Any

import click

from driver_manager import logs
from driver_manager.cli.commands import run_until_done, unless_stopped
from driver_manager.cli.render import print_json
from driver_manager.clock import SystemClock
from driver_manager.config import Effective
from driver_manager.controller.cleanup import Cleaned, Cleanup
from driver_manager.controller.settings import ControllerSettings
from driver_manager.errors import Exit


def run_cleanup(effective: Effective, given: Mapping[str, Any], output: str, *, is_dry: bool) -> int:
    """Cleans the cluster, or tells what that would do. A signal ends it between two writes: begun again it goes on."""
    settings = effective.settings
    logs.set_up(settings.log_format, settings.log_level if effective.origins["log_level"] != "default" else "warning")
    clock = SystemClock()
    identity = f"cleanup-{clock.run_id()}"
    where = ControllerSettings(operator_namespace=settings.operator_namespace, agent=settings, identity=identity, **given)

    async def work() -> int:
        from driver_manager.kube.fleet import connect_fleet
        from driver_manager.kube.fleetcalls import Selection

        selection = Selection(namespace=settings.operator_namespace, nodes="")
        fleet = await connect_fleet(settings.kubeconfig or None, clock, selection, request_timeout=where.request_timeout)
        try:
            cleanup = Cleanup(fleet, clock, where)
            cleaned = await (cleanup.plan() if is_dry else cleanup.run())
        finally:
            await fleet.close()
        show(cleaned, output, is_dry=is_dry)
        return int(Exit.DONE)

    async def until_stopped(stop: asyncio.Event) -> int:
        return await unless_stopped(stop, work())

    return run_until_done(until_stopped)


def show(cleaned: Cleaned, output: str, *, is_dry: bool) -> None:
    """Prints it."""
    if output == "json":
        print_json(document(cleaned, is_dry=is_dry))
        return
    for name, words in cleaned.done.items():
        click.echo(f"node {name}: {'would ' if is_dry else ''}{'; '.join(words)}")
    for name in cleaned.templates:
        click.echo(f"DaemonSet {name}: {'would ' if is_dry else ''}take the term for parking out of its template, which rolls it once")
    for name, left in cleaned.left.items():
        for each in left:
            click.echo(f"left{f' on node {name}' if name else ''}: {each}")
    if not (cleaned.done or cleaned.templates):
        click.echo("no node has anything of ours to take off")
    elif is_dry:
        click.echo("nothing has been changed: this was a dry run")


def document(cleaned: Cleaned, *, is_dry: bool) -> dict[str, Any]:
    """For programs: field names are stable."""
    return {
        "dryRun": is_dry,
        "nodes": [
            {"node": name, "done": cleaned.done.get(name, []), "left": list(cleaned.left.get(name, ()))}
            for name in sorted({*cleaned.done, *cleaned.left} - {""})
        ],
        "daemonSets": list(cleaned.templates),
        "left": list(cleaned.left.get("", ())),
    }
