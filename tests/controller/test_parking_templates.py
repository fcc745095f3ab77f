"""Parking by the templates of DaemonSets, where no admission policy is there and a setting allows it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from driver_manager import names
from driver_manager.controller.cleanup import Cleanup
from driver_manager.core.parking_notices import Matter
from driver_manager.core.parking_term import EXPRESSION
from driver_manager.core.rollout_states import State
from driver_manager.core.snapshot import LabelExpression
from driver_manager.sim.access import EVERYTHING, TEMPLATE_ROLE
from driver_manager.sim.feeds import Scope
from driver_manager.sim.fleetworld import FleetWorld
from driver_manager.sim.objects import DaemonSet
from driver_manager.sim.parking import GATE
from tests.controller.rollouts import EXPORTER, add_exporter
from tests.controller.test_cleanup import SETTINGS
from tests.controller.test_parking import _never_with, led, named, play

ON: dict[str, Any] = {"template_parking": True}
ZONE = LabelExpression("zone", "DoesNotExist")


def fleet_of(nodes: int = 3, *, ways: str = "", may: bool = True, **spec: Any) -> tuple[FleetWorld, DaemonSet]:
    """A fleet with an exporter, without policies as a rule, and an account that may change templates."""
    world = FleetWorld(3, nodes=nodes, driver_start=10.0)
    if may:
        world.account = replace(world.account, rules=(*world.account.rules, *TEMPLATE_ROLE))
    return world, add_exporter(world, ways, **spec)


def changes(world: FleetWorld) -> list[bool]:
    """What was done to templates: put in, taken out."""
    return [bool(deed.detail) for deed in world.deeds("term")]


@pytest.mark.parametrize("is_named", [False, True])
def test_a_roll_out_by_templates(is_named: bool) -> None:
    """The term goes in once, which restarts each pod once; then the label of a parked node alone takes the pod away and back."""

    async def story() -> None:
        world, exporter = fleet_of(is_opted_in=not is_named, affinity=((ZONE,),))
        if is_named:
            named(world, exporter.ref)
        first = {pod.uid for pod in world.store.pods.values() if pod.labels.get("app") == EXPORTER}
        async with led(world, **ON) as fleet:
            before = fleet.surfaces()
            await fleet.until(lambda: not first & {pod.uid for pod in fleet.exporters()})
            await fleet.everywhere()
            second = {pod.uid for pod in fleet.exporters()}
            world.on_change(lambda one, change: _never_with(world, EXPORTER))
            for digest in ("two", "three"):
                world.new_driver(digest)
                await fleet.all_done(digest)
                await fleet.everywhere()
                await fleet.until(lambda: fleet.surfaces() == before, 10)
                assert not second & {pod.uid for pod in fleet.exporters()}
                second = {pod.uid for pod in fleet.exporters()}
        assert exporter.spec.affinity == ((ZONE, EXPRESSION),)
        assert changes(world) == [True]
        assert not [deed for deed in world.deeds("FailedCreate") if EXPORTER in deed.target]

    play(story())


@pytest.mark.parametrize(
    ("settings", "may", "said"),
    [({}, True, "TEMPLATE_PARKING=true"), (ON, False, "kubectl apply -f deploy/controller-templates")],
)
def test_who_may_not(settings: dict[str, Any], may: bool, said: str) -> None:
    """Off, or without the right: no template is touched, no node begun, and the sentence says what would change that."""

    async def story() -> None:
        world, exporter = fleet_of(may=may)
        before = exporter.spec
        async with led(world, **settings) as fleet:
            world.new_driver("two")
            await fleet.until(lambda: said in fleet.sentences())
            await asyncio.sleep(60)
            assert not world.cordoned
        assert (exporter.spec, changes(world)) == (before, [])

    play(story())


def test_policies_come_first() -> None:
    """Where an admission policy is there, no template is changed though it may be."""

    async def story() -> None:
        world, _ = fleet_of(ways=GATE)
        async with led(world, **ON) as fleet:
            world.new_driver("two")
            await fleet.all_done()
            await fleet.everywhere()
        assert not changes(world)

    play(story())


def test_policies_that_do_nothing() -> None:
    """They are there and keep nobody off: that is told and to be mended; no template is changed for it."""

    async def story() -> None:
        world, _ = fleet_of(ways=GATE)
        async with led(world, **ON) as fleet:
            world.server.parking.is_broken = True
            world.new_driver("two")
            await fleet.until(lambda: "let a pod of" in fleet.sentences())
            await asyncio.sleep(120)
            assert not changes(world)
            world.server.parking.is_broken = False
            await fleet.all_done()
            await fleet.everywhere()
        assert not changes(world)

    play(story())


def test_a_chart_that_has_the_term() -> None:
    """Without policies, setting or right: it is parked by its label, and nothing of it is ever changed."""

    async def story() -> None:
        world, exporter = fleet_of(may=False, affinity=((EXPRESSION,),))
        generation = exporter.generation
        async with led(world) as fleet:
            world.on_change(lambda one, change: _never_with(world, EXPORTER))
            world.new_driver("two")
            await fleet.all_done()
            await fleet.everywhere()
        assert exporter.generation == generation

    play(story())


def test_somebody_takes_it_out_again() -> None:
    """It is put in once, by this leader and by the next: nobody is fought with, and the node is not begun, with the reason."""

    async def story() -> None:
        world, exporter = fleet_of(nodes=2)
        for state in (State.DONE, State.REQUIRED):
            async with led(world, state=state, **ON) as fleet:
                await fleet.until(lambda: names.PARKING_TERM in exporter.labels)
                world.controllers.daemon_sets.set_template(exporter, replace(exporter.spec, affinity=()))
                world.new_driver("two")
                await fleet.until(lambda: "somebody has taken it out" in fleet.sentences())
                await asyncio.sleep(60)
                assert not world.cordoned
        assert changes(world) == [True]

    play(story())


def test_those_that_are_refused_keep_their_template() -> None:
    """An opt-out, and the cluster's own: no template of theirs is changed."""

    async def story() -> None:
        world, exporter = fleet_of(is_opted_in=False)
        exporter.labels = {names.PARK: "false"}
        named(world, exporter.ref)
        async with led(world, **ON) as fleet:
            await fleet.until(lambda: fleet.told(Matter.REFUSED))
            await asyncio.sleep(30)
        assert not changes(world)

    play(story())


@pytest.mark.parametrize("is_parked", [False, True])
def test_cleanup_takes_it_out(is_parked: bool) -> None:
    """The template is as before, also where the controller died with a node parked, and the exporter runs everywhere."""

    async def story() -> None:
        world, exporter = fleet_of(nodes=2, affinity=((ZONE,),))
        async with led(world, **ON) as fleet:
            await fleet.until(lambda: names.PARKING_TERM in exporter.labels and not exporter.is_rolling)
            await fleet.everywhere()
            if is_parked:
                world.new_driver("two")
                await fleet.until(lambda: any(names.PARKED in node.labels for node in world.store.nodes.values()))
        await asyncio.sleep(20)
        life = world.controller(account=world.add_account("admin", EVERYTHING))
        life.fleet.scope = Scope(node_selector={})
        dry = await life.run(Cleanup(life.fleet, life.clock, SETTINGS).plan())
        assert dry is not None
        assert dry.templates == (exporter.ref,)
        assert changes(world) == [True]
        got = await life.run(Cleanup(life.fleet, life.clock, SETTINGS).run())
        assert got is not None
        assert got.templates == (exporter.ref,)
        assert (exporter.spec.affinity, names.PARKING_TERM in exporter.labels) == (((ZONE,),), False)
        await fleet.everywhere()

    play(story())
