"""`status --all`: the whole fleet as a table, on a terminal again and again, or as JSON."""

import asyncio
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from datetime import UTC, datetime
from typing import Any, Final

from driver_manager import logs
from driver_manager.cli.commands import LOOKING_SECONDS, run_until_done, unless_stopped
from driver_manager.cli.controller import read_policy_file
from driver_manager.cli.render import open_console, print_json
from driver_manager.clock import SystemClock
from driver_manager.config import Effective, Settings
from driver_manager.controller.cache import Cache
from driver_manager.controller.overview import GroupRow, Leader, Overview, Row, keep_up, overview, read_all, read_leader
from driver_manager.controller.settings import ControllerSettings
from driver_manager.core.rollout_states import AFTER_RESTART, BEFORE_RESTART, Because, State
from driver_manager.core.upgrade_policy import UpgradePolicy, written_policy
from driver_manager.errors import Exit, Unreachable
from driver_manager.names import PAUSED_ROLLOUT
from driver_manager.ports import Fleet
from driver_manager.together import together

EVERY_SECONDS: Final = 2.0
"""Between two looks of --watch."""
LIST_SECONDS: Final = 120.0
"""All lists together."""
HEADER: Final = ("NODE", "STATE", "REASON", "SINCE", "CORDONED BY", "TRY", "TARGET", "GROUP")
STATE_COLUMN: Final = 1
COLOURS: Final[Mapping[str, str]] = {
    State.DONE.value: "green",
    State.REQUIRED.value: "yellow",
    State.FAILED.value: "bold red",
    **dict.fromkeys((each.value for each in BEFORE_RESTART | AFTER_RESTART), "cyan"),
}


def run_status_all(effective: Effective, given: Mapping[str, Any], output: str, *, is_watched: bool) -> int:
    """Prints the state of the whole fleet."""
    settings = effective.settings
    logs.set_up(settings.log_format, settings.log_level if effective.origins["log_level"] != "default" else "error")
    words = dict(given)
    policy_file = words.pop("policy_file", "")
    policy = read_policy_file(policy_file) if policy_file else None
    where = ControllerSettings(operator_namespace=settings.operator_namespace, agent=settings, **words)

    async def work() -> int:
        fleet = await _connect(settings, where.node_selector)
        try:
            if is_watched:
                return await _watch(fleet, where, policy)
            show(await look(fleet, where, policy), output)
            return int(Exit.DONE)
        finally:
            await fleet.close()

    async def until_stopped(stop: asyncio.Event) -> int:
        code = await unless_stopped(stop, work())
        return int(Exit.DONE) if is_watched and stop.is_set() else code  # to be stopped is how watching ends

    return run_until_done(until_stopped)


async def _connect(settings: Settings, node_selector: str) -> Fleet:
    from driver_manager.kube.fleet import connect_fleet
    from driver_manager.kube.fleetcalls import Selection

    selection = Selection(namespace=settings.operator_namespace, nodes=node_selector)
    return await connect_fleet(settings.kubeconfig or None, SystemClock(), selection, retry_seconds=LOOKING_SECONDS)


async def look(fleet: Fleet, settings: ControllerSettings, policy: UpgradePolicy | None) -> Overview:
    """One look at everything.

    Raises:
        Forbidden: something may not be listed. Unreachable: the API server does not answer.
    """
    await _answers(fleet, settings)
    try:
        async with asyncio.timeout(LIST_SECONDS):
            cache = await read_all(fleet)
    except TimeoutError as error:
        raise Unreachable(f"the fleet could not be listed within {LIST_SECONDS:.0f} s") from error
    leader = await read_leader(fleet, settings.lease_namespace, settings.lease_name)
    return await overview(fleet, cache, leader, SystemClock().epoch(), settings.agent, policy)


async def _watch(fleet: Fleet, settings: ControllerSettings, policy: UpgradePolicy | None) -> int:
    """Keeps up with the fleet, and draws it anew every two seconds, until a signal ends it."""
    from rich.live import Live

    cache = Cache()

    async def draw() -> None:
        with Live(console=open_console(), auto_refresh=False, screen=True) as live:
            while True:
                if cache.is_synced:
                    leader = await read_leader(fleet, settings.lease_namespace, settings.lease_name)
                    seen = await overview(fleet, cache, leader, SystemClock().epoch(), settings.agent, policy)
                    live.update(_picture(seen), refresh=True)
                await asyncio.sleep(EVERY_SECONDS if cache.is_synced else 0.1)

    await _answers(fleet, settings)
    await together(keep_up(fleet, cache), draw())
    return int(Exit.DONE)


async def _answers(fleet: Fleet, settings: ControllerSettings) -> None:
    """Says at once that nobody answers: lists and watches are tried again without end."""
    await fleet.permissions(settings.operator_namespace)


def show(seen: Overview, output: str) -> None:
    """Prints it."""
    if output == "json":
        print_json(document(seen))
    else:
        open_console().print(_picture(seen))


def document(seen: Overview) -> dict[str, Any]:
    """For programs: field names are stable."""
    leader = seen.leader
    return {
        "leader": {
            "identity": leader.holder or None,
            "renewed": leader.renewed or None,
            "transitions": leader.transitions,
            "grants": list(leader.grants),
            "paused": leader.paused or None,
            "role": leader.role.partition(": ")[0] or None,
            "roleBecause": leader.role.partition(": ")[2] or None,
            "problem": leader.problem or None,
        },
        "groups": [_group_document(each) for each in seen.groups],
        "problems": dict(seen.problems),
        "notes": dict(seen.notes),
        "nodes": [_row_document(each) for each in seen.rows],
    }


def _group_document(row: GroupRow) -> dict[str, Any]:
    return {
        "name": row.name,
        "nodes": row.nodes,
        "policy": written_policy(row.policy) if row.policy else None,
        "whyNot": row.why_not or None,
        "working": list(row.working),
        "unavailable": {"limit": row.limit, "upgrade": list(row.unavailable_ours), "other": list(row.unavailable_others)},
        "waiting": row.waiting or None,
    }


def _row_document(row: Row) -> dict[str, Any]:
    failure = row.last_failure
    return {
        "node": row.node,
        "state": row.state or None,
        "reason": row.reason or None,
        "since": _wall(row.since),
        "group": row.group or None,
        "target": row.target or None,
        "cordonedBy": row.cordoned_by or None,
        "attempt": row.attempt,
        "lastFailure": {
            "at": _wall(failure.at),
            "target": failure.target,
            "reason": failure.reason,
            "sentence": failure.sentence,
            "driverGone": failure.is_driver_gone,
        }
        if failure
        else None,
        "sentence": row.sentence,
    }


def _wall(epoch: float) -> str | None:
    """As people read it; None where it is not known, or where a person wrote what is no time."""
    try:
        return datetime.fromtimestamp(epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if epoch else None
    except (ValueError, OverflowError, OSError):
        return None


def _picture(seen: Overview) -> Any:
    """A line for each node, and below it what it waits for: a name that is broken in two by a narrow column cannot be copied."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    parts: list[Any] = [Text(line) for line in (*_leader_lines(seen), *_group_lines(seen))]
    lines = [HEADER, *(_cells(row, seen) for row in seen.rows)]
    widths = [max((len(line[number]) for line in lines[1:]), default=0) for number in range(len(HEADER))]
    widths = [max(width, len(name)) if width else 0 for width, name in zip(widths, HEADER, strict=True)]
    said = {each.waiting for each in seen.groups}
    for cells, row in zip(lines, (None, *seen.rows), strict=True):
        style = "bold" if row is None else ""
        line = Text("  ", style=style).join(
            Text(cell.ljust(width), COLOURS.get(cell, "") if number == STATE_COLUMN else "")
            for number, (cell, width) in enumerate(zip(cells, widths, strict=True))
            if width
        )
        line.rstrip()
        parts.append(line)
        if row is not None:
            parts += [Padding(Text(text), (0, 0, 0, 4), expand=False) for text in _below(row, said)]
    return Group(*parts) if seen.rows else Group(*parts[:-1], "no node has a driver DaemonSet or a state label")


def _cells(row: Row, seen: Overview) -> tuple[str, ...]:
    group = row.group if len(seen.groups) > 1 else ""
    since = _age(seen.now - row.since) if row.since else ""
    return (row.node, row.state or "-", row.reason, since, row.cordoned_by, str(row.attempt or ""), row.target, group)


def _below(row: Row, said: AbstractSet[str]) -> list[str]:
    """What a person should know of a node beside its line; what its group says already, and that it is as it should be, is left out."""
    lines = [] if row.sentence in ("", *said) or row.reason == Because.UP_TO_DATE else [row.sentence]
    if row.last_failure is not None and row.reason != Because.UP_TO_DATE:
        lines.append(f"failed at {_wall(row.last_failure.at)}: {row.last_failure.reason}: {row.last_failure.sentence}")
    return lines


def _leader_lines(seen: Overview) -> list[str]:
    leader = seen.leader
    if leader.problem:
        return [leader.problem]
    lines = [_who_leads(leader, seen.now)]
    if leader.is_following:
        lines.append(f"FOLLOWS: no state label is written; {leader.role.partition(': ')[2]}")
    if leader.grants:
        lines.append(f"granted, and about to be cordoned: {', '.join(leader.grants)}")
    if leader.paused:
        lines.append(f"PAUSED: no node is begun until the annotation {PAUSED_ROLLOUT} ({leader.paused}) is taken off the Lease")
    if leader.no_pause is not None:
        words = f"the annotation {PAUSED_ROLLOUT} of the Lease is {leader.no_pause!r}, which pauses nothing"
        lines.append(f"{words}: set it to true, or take it off")
    return lines


def _who_leads(leader: Leader, now: float) -> str:
    if not leader.holder:
        return "nobody leads: the last leader gave the Lease up"
    if silent := leader.silent_seconds(now):
        return f"nobody leads: {leader.holder} has not renewed the Lease for {_age(silent)}"
    return f"{leader.holder} leads"


def _group_lines(seen: Overview) -> list[str]:
    lines = [f"{source}: its policy is not valid: {problem}" for source, problem in seen.problems.items()]
    lines += [f"{source}: {note}" for source, note in seen.notes.items()]
    for each in seen.groups:
        name = each.name or "nodes of no policy"
        if each.policy is None:
            lines.append(f"{name}: {each.nodes} nodes, none is begun: {each.why_not}")
            continue
        parallel = each.policy.max_parallel_upgrades or "no limit"
        unavailable = len(each.unavailable_ours) + len(each.unavailable_others)
        lines.append(
            f"{name}: {each.nodes} nodes, {len(each.working)} in work (limit {parallel}), {unavailable} unavailable (limit {each.limit})"
        )
        if each.waiting:
            lines.append(f"  no more are begun: {each.waiting}")
    return lines


def _age(seconds: float) -> str:
    seconds = max(0, round(seconds))
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"
