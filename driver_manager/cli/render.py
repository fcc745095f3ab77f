"""Results for people as tables, and for programs as JSON."""

import json
import sys
from dataclasses import dataclass
from typing import Any

import click

from driver_manager.agent.preflight import Check, Level
from driver_manager.agent.run import Outcome
from driver_manager.core.consumers import Action, Verdict
from driver_manager.core.labels import is_paused
from driver_manager.core.plan import Plan, describe
from driver_manager.core.record import encode, find_record
from driver_manager.core.report import plan_document, verdict_document
from driver_manager.core.rollout_record import progress_of
from driver_manager.core.rollout_states import WORKING, State
from driver_manager.core.seen import Snapshot
from driver_manager.core.snapshot import NodeView
from driver_manager.errors import DriverManagerError, OtherMachine
from driver_manager.names import DEPLOY_PREFIX, KEEP_CORDON, STATUS, UPGRADE_STATE

COLOURS = {
    Action.KEEP: "dim", Action.AWAIT: "cyan", Action.EVICT: "yellow", Action.LEAVE: "cyan", Action.PARK: "yellow",
    Action.REFUSE: "bold red",
}  # fmt: skip
WIDTH_OF_THE_REST = 80
"""Columns that a table of verdicts needs besides those of the pods' names."""
LEVELS = {Level.PASS: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}


def print_json(document: Any) -> None:
    """For programs."""
    click.echo(json.dumps(document, indent=2))


def open_console() -> Any:
    """Standard output, as wide as its terminal."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 160, highlight=False)


def _say(console: Any, lead: str, text: str, style: str = "") -> None:
    """One line; what does not fit goes on below the text, not in the first column. The lead may have colours."""
    from rich.text import Text

    first = Text.from_markup(lead)
    for line in Text(text, style).wrap(console, max(20, console.width - first.cell_len)):
        line.rstrip()
        console.print(first + line, soft_wrap=True)
        first = Text(" " * first.cell_len)


def _show_verdicts(console: Any, title: str, verdicts: tuple[Verdict, ...]) -> None:
    """A table where there is room for one; else a paragraph for each pod, as a name that is broken in two cannot be copied."""
    from rich.table import Column, Table

    names = ("Verdict", "Reason", "Why", "What would change it")
    room = max(len(each.pod.ref) for each in verdicts)
    table = Table(Column("Pod", min_width=room), *names, title=title, title_justify="left")
    is_wide = console.width >= room + WIDTH_OF_THE_REST
    if not is_wide:
        console.print(title)
    for each in sorted(verdicts, key=lambda each: (each.action is Action.KEEP, each.action, each.pod.ref)):
        action = f"[{COLOURS[each.action]}]{each.action}[/]"
        if is_wide:
            table.add_row(each.pod.ref, action, each.reason, each.sentence, each.setting)
            continue
        console.print(f"  {action} {each.pod.ref}", soft_wrap=True)
        change = f" (to change it: {each.setting})" if each.setting else ""
        _say(console, "      ", f"{each.reason}: {each.sentence}{change}")
    if is_wide:
        console.print(table)


def _show_hint(console: Any, hint: str, indent: str = "     ") -> None:
    """What a person can do, on a line of its own."""
    if hint:
        _say(console, f"{indent}[dim]hint: [/]", hint, "dim")


def plan(seen: Snapshot, plan: Plan, output: str) -> None:
    """Prints a plan."""
    if output == "json":
        print_json({"node": seen.node.name, **plan_document(plan), "holders": _holders(seen)})
        return
    console = open_console()
    _say(console, f"[bold]{seen.node.name}[/]: ", f"{plan.path}, because {plan.because}")
    for note in plan.notes:
        _say(console, "  note: ", note)
    if plan.verdicts:
        _show_verdicts(console, "Pods on the node", plan.verdicts)
    if plan.drain_verdicts:
        _show_verdicts(console, "If something still holds the driver, the node is drained (ENABLE_AUTO_DRAIN)", plan.drain_verdicts)
    done = {use.holder.pid: f": {use.sentence} ({use.setting})" for use in plan.host_uses}
    for each in _holders(seen):
        _say(console, "  ", _holder_words(each) + done.get(each["pid"], ""))
    for refusal in plan.refusals:
        _say(console, "  [bold red]refused[/]: ", refusal)
    if plan.refusals:
        _show_hint(console, plan.hint, "  ")
    for number, step in enumerate(plan.steps, 1):
        _say(console, f"  {number:2}. ", describe(step))
    for step in plan.on_failure:
        _say(console, "  on failure: ", describe(step))
    if not plan.steps and not plan.refusals:
        console.print("  nothing to do")


def _holder_words(holder: dict[str, Any]) -> str:
    owner = holder["pod"] or holder["unit"] or "unknown owner: end it by hand"
    return f"process {holder['pid']} {holder['command']} holds {', '.join(holder['devices'])} ({owner})"


def _holders(seen: Snapshot) -> list[dict[str, Any]]:
    names = {pod.uid: pod.ref for pod in seen.pods}
    return [
        {
            "pid": each.pid,
            "command": each.command,
            "devices": list(each.devices),
            "pod": names.get(each.pod_uid, f"uid {each.pod_uid}") if each.pod_uid else "",
            "unit": each.unit or "",
        }
        for each in seen.holders.holders
    ]


def status(seen: Snapshot, plan: Plan | DriverManagerError, output: str) -> None:
    """Prints the state of the node."""
    document = _status_document(seen, plan)
    if output == "json":
        print_json(document)
        return
    console = open_console()
    _say(console, f"[bold]{seen.node.name}[/]: ", document["sentence"])
    for line in document["details"]:
        _say(console, "  ", line)
    if isinstance(plan, OtherMachine):
        _say(console, "  ", "this machine is another one: `driver-manager plan` on the node shows its driver, and what a run would do")
        return
    if isinstance(plan, DriverManagerError):
        _say(console, "  ", f"what a run would do now cannot be said: {plan.message}")
        _show_hint(console, plan.hint, "  ")
        return
    _say(console, "  ", f"a run now: {plan.path}, because {plan.because}")
    users = tuple(each for each in plan.verdicts if each.uses or each.action is not Action.KEEP)
    if users:
        _show_verdicts(console, "Users of the driver", users)
    for each in document["holders"]:
        _say(console, "  ", _holder_words(each))


def _next(plan: Plan | DriverManagerError) -> dict[str, Any]:
    if isinstance(plan, DriverManagerError):
        return {"error": plan.message, "hint": plan.hint, "exitCode": int(plan.exit_code)}
    return {
        "path": str(plan.path),
        "because": plan.because,
        "exitCode": int(plan.ends_with),
        "verdicts": [verdict_document(each) for each in plan.verdicts if each.uses or each.action is not Action.KEEP],
    }


@dataclass(frozen=True, slots=True)
class Upgrade:
    """What an upgrade controller has written on a node."""

    state: str = ""
    """The label's value; empty where nothing is to be done."""
    is_cordoned: bool = False
    """Whether its record says that the cordon is the upgrade's."""

    @classmethod
    def of(cls, node: NodeView) -> "Upgrade":
        """What stands on this node."""
        progress, _ = progress_of(node)
        state = node.labels.get(UPGRADE_STATE, "")
        return cls("" if state == State.DONE else state, is_cordoned=progress is not None and progress.is_cordoned)


def _status_document(seen: Snapshot, plan: Plan | DriverManagerError) -> dict[str, Any]:
    node, host = seen.node, None if isinstance(plan, OtherMachine) else seen.host
    found = find_record(node)
    upgrade = Upgrade.of(node)
    paused = sorted(key for key, value in node.labels.items() if key.startswith(DEPLOY_PREFIX) and is_paused(value))
    said = _parsed(node.annotations.get(STATUS))
    details = []
    if found.record is not None:
        details.append(f"run {found.record.run} began {found.record.started}, phase {found.record.phase}")
    if found.complaint:
        details.append(found.complaint)
    if node.unschedulable:
        by_run = found.record is not None and found.record.is_cordoned
        details.append(f"cordoned {'by that run' if by_run else 'for its upgrade' if upgrade.is_cordoned else 'by somebody else'}")
    if upgrade.state:
        details.append(f"state of its upgrade: {upgrade.state}; `driver-manager status --all` says why")
    if node.annotations.get(KEEP_CORDON) == "true":
        details.append(f"the annotation {KEEP_CORDON} keeps the cordon when the run ends")
    details += [f"paused: {key}" for key in paused]
    if host is not None:
        details.append(f"driver loaded: {host.driver_version or 'version unknown'}" if host.is_loaded else "no driver loaded")
        details += [f"mounted: {mount.target}" for mount in host.mounts]
    if said:
        details.append(f"last word, {said.get('since', '')}: {said.get('reason', '')}: {said.get('message', '')}")
        details += [f"  blocked by {each.get('kind')} {each.get('name')}: {each.get('why')}" for each in said.get("blockers", [])]
    return {
        "node": node.name,
        "sentence": _state_sentence(found.record is not None, upgrade, bool(paused), said),
        "record": json.loads(encode(found.record)) if found.record is not None else None,
        "status": said,
        "paused": paused,
        "unschedulable": node.unschedulable,
        "policyOwned": seen.is_policy_owned,
        "driver": host.driver_version if host else None,
        "modules": sorted(host.modules) if host else [],
        "holders": _holders(seen) if host else [],
        "next": _next(plan),
        "details": details,
    }


def _state_sentence(has_record: bool, upgrade: Upgrade, is_paused_now: bool, said: dict[str, Any]) -> str:
    if has_record:
        return "a run is changing this node, or was killed while it did; `driver-manager restore` puts it back"
    if upgrade.state == State.FAILED:
        return "its upgrade failed"
    if upgrade.state in WORKING:
        return "an upgrade controller has it in work"
    if is_paused_now:
        return "operands are paused by a program that left no record"
    if said.get("phase") == "failed":
        return "the last run failed and put the node back"
    return "as usual: nothing of ours is on it"


def _parsed(text: str | None) -> dict[str, Any]:
    try:
        body = json.loads(text or "{}")
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def outcome(how: Outcome) -> None:
    """Prints how a run ended, for programs; people read it in the log."""
    print_json({"result": how.sentence, "hint": how.hint, "isPutBack": how.is_put_back, "exitCode": int(how.code)})


def checks(results: list[Check], output: str) -> None:
    """Prints the results of the preflight checks."""
    if output == "json":
        print_json(
            [
                {"check": each.name, "result": str(each.level), "sentence": each.sentence, "hint": each.hint, "exitCode": int(each.code)}
                for each in results
            ]
        )
        return
    console = open_console()
    for each in results:
        _say(console, f"[{LEVELS[each.level]}]{each.level:4}[/] ", f"{each.name}: {each.sentence}")
        _show_hint(console, each.hint)
