"""The demo: one whole run on a simulated node, with the live view, and the node before and after."""

import asyncio
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Final

import click

from driver_manager import logs
from driver_manager.agent.progress import Progress
from driver_manager.agent.run import Agent, Outcome
from driver_manager.cli.commands import report
from driver_manager.cli.live import LiveView, PlainView
from driver_manager.config import Effective
from driver_manager.core.snapshot import NodeView
from driver_manager.names import DEPLOY_PREFIX, STATUS
from driver_manager.sim.clock import run_paced, run_virtual
from driver_manager.sim.scenarios import Scenario, demo_world

SIMULATED: Final = "simulated: the node, the cluster and the time"


def run_demo(effective: Effective, speed: float, seed: int) -> int:
    """Shows the main job without GPU or cluster: twelve operands, six GPU pods, one of them behind a budget that frees up late."""
    settings = effective.settings
    logs.set_up("text" if settings.log_format == "auto" else settings.log_format, settings.log_level)
    click.echo(f"{SIMULATED}, which goes {speed:g} times as fast as yours")
    live = LiveView(is_on=sys.stderr.isatty())
    outcome, lines = run_paced(_story(effective, seed, live, click.echo), speed=speed)
    return _end(outcome, lines)


def run_plain(effective: Effective, seed: int) -> int:
    """Shows the same at once, as plain lines that are the same each time."""
    logs.set_up(effective.settings.log_format, "error")
    return _end(*plain_story(effective, seed))


def plain_story(effective: Effective, seed: int) -> tuple[Outcome, list[str]]:
    """How the plain demo ends, and all its lines."""
    view = PlainView()
    view.lines.append(SIMULATED)
    outcome, lines = run_virtual(_story(effective, seed, nullcontext(view.draw), view.lines.append))
    return outcome, [*view.lines, *lines]


async def _story(
    effective: Effective, seed: int, view: AbstractContextManager[Callable[[Progress], None]], tell: Callable[[str], None]
) -> tuple[Outcome, list[str]]:
    """How the run ended, and what is to be told of the node then."""
    scenario = demo_world(seed)
    settings = replace(effective.settings, node_name=scenario.node)
    before = scenario.world.node(scenario.node)
    pods_before = len(scenario.world.pods(scenario.node))
    tell(_picture("before", scenario, before))
    life = scenario.life()
    with view as on_change:
        agent = Agent(life.cluster, life.host, life.clock, settings, Progress(life.clock, on_change))
        outcome = await agent.uninstall(asyncio.Event())
    await life.clock.sleep(1.0)
    after = scenario.world.node(scenario.node)
    return outcome, [_picture("after", scenario, after), *_verdict(scenario, before, after, outcome, pods_before)]


def _end(outcome: Outcome, lines: list[str]) -> int:
    code = report(outcome)
    for line in lines:
        click.echo(line)
    return code


def _picture(when: str, scenario: Scenario, node: NodeView) -> str:
    machine = scenario.world.machine(scenario.node)
    modules = " ".join(sorted(machine.modules)) or "none"
    running = sum(value == "true" for key, value in node.labels.items() if key.startswith(DEPLOY_PREFIX))
    gpu_pods = sum(any(name.startswith("nvidia.com/") for name in pod.resources) for pod in scenario.world.pods(node.name))
    return (
        f"{when:>6}: node {node.name}, {'cordoned' if node.unschedulable else 'schedulable'}, {running} deploy labels true, "
        f"{gpu_pods} GPU pods, modules loaded: {modules}"
    )


def _verdict(scenario: Scenario, before: NodeView, after: NodeView, outcome: Outcome, pods_before: int) -> list[str]:
    keys = {*before.annotations, *after.annotations} - {STATUS}
    annotations = [key for key in sorted(keys) if before.annotations.get(key) != after.annotations.get(key)]
    is_same = not annotations and (before.labels, before.unschedulable) == (after.labels, after.unschedulable)
    status = "; the status annotation says how the run ended" if STATUS in after.annotations else ""
    return [
        f"        {len(scenario.world.evictions)} evictions, each pod once; {pods_before} pods were on the node",
        f"        labels, annotations and cordon are {'exactly as before' if is_same else 'NOT as before'}{status}",
        f"        exit code {int(outcome.code)}: {outcome.sentence}",
    ]
