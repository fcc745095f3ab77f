"""Services of the host that hold the driver: stopped by an allow-list, and always started again (N29, decision 8)."""

from __future__ import annotations

import asyncio

from driver_manager import names
from driver_manager.core.record import find_record
from driver_manager.core.services import HostAction
from driver_manager.sim.machine import Machine
from driver_manager.sim.scenarios import NODE, Scenario
from tests.agent.stage import Run, Stage, play, small_world
from tests.agent.test_killed import at_every_boundary
from tests.agent.test_stopped import stopped_at_every_boundary

FABRIC = "nvidia-fabricmanager.service"
PERSISTENCED = "nvidia-persistenced.service"


def with_services() -> Scenario:
    """A fabric manager and a persistence daemon on the host."""
    scenario = small_world(gpu_pods=1, operands=1)
    machine = scenario.world.machine(NODE)
    machine.add_unit(FABRIC, "nv-fabricmanager"[:15], ("/dev/nvidia0",))
    machine.add_unit(PERSISTENCED, "nvidia-persistenced"[:15], ("/dev/nvidiactl",))
    return scenario


def host_of(stage: Stage) -> Machine:
    return stage.world.machine(NODE)


def assert_running(stage: Stage) -> None:
    """Every unit is active."""
    assert [name for name, unit in host_of(stage).units.items() if not unit.is_active] == []


def systemctl(stage: Stage) -> list[tuple[str, str]]:
    """What was done to units, in order."""
    return [(call.call.removeprefix("systemctl "), call.argument) for call in host_of(stage).calls if call.call.startswith("systemctl")]


def test_n29_known_daemons_are_stopped_and_started_again() -> None:
    """N29: they are stopped before the unload, the persistence daemon last, and started at the end the other way round."""

    async def story(stage: Stage) -> None:
        run = await stage.run()
        assert run.code == 0, run.sentence
        stage.assert_free()
        assert systemctl(stage) == [("stop", FABRIC), ("stop", PERSISTENCED), ("start", PERSISTENCED), ("start", FABRIC)]
        calls = [call.call for call in host_of(stage).calls]
        assert calls.index("systemctl stop") < calls.index("delete_module") < calls.index("systemctl start")
        assert_running(stage)
        await stage.assert_put_back()

    play(story, with_services())


def test_n29_a_display_server_is_never_stopped_by_default() -> None:
    """N29, R5: the run is refused before anything is changed, with unit, pid, device and setting; with that setting it goes on."""

    async def story(stage: Stage) -> None:
        machine = host_of(stage)
        machine.add_unit("gdm.service", "gdm-x-session", ())
        server = machine.add_process("Xorg", ("/dev/nvidia0",), unit="gdm.service")
        run = await stage.run()
        assert run.code == 65
        for word in ("gdm.service", str(server.pid), "Xorg", "/dev/nvidia0", "HOST_SERVICES=gdm=stop"):
            assert word in run.sentence
        assert stage.node_writes() == []
        assert machine.calls == []
        assert (await stage.run(host_services=(("gdm", HostAction.STOP),))).code == 0
        assert_running(stage)
        await stage.assert_put_back()

    play(story)


def test_n29_processes_of_no_known_unit() -> None:
    """N29: by default they are waited for and named; refused or ended only where a setting says so."""

    async def story(stage: Stage) -> None:
        machine = host_of(stage)
        process = machine.add_process("python3", ("/dev/nvidia0",))
        waited = await stage.run(holder_timeout=10.0)
        assert waited.code == 75
        assert f"{process.pid} python3" in waited.sentence
        assert process.pid in machine.processes
        assert stage.unloads() == []
        refused = await stage.run(host_processes="refuse")
        assert refused.code == 65
        assert "HOST_PROCESSES" in refused.sentence
        assert (await stage.run(host_processes="terminate")).code == 0
        assert [call.argument for call in machine.calls if call.call == "kill"] == [str(process.pid)]
        await stage.assert_put_back()

    play(story)


def test_without_systemd_it_is_refused_beforehand() -> None:
    """R5: where systemd cannot be asked, a unit that would be stopped is a refusal, not a wait in vain."""

    async def story(stage: Stage) -> None:
        host_of(stage).has_systemd = False
        run = await stage.run()
        assert run.code == 65
        assert FABRIC in run.sentence
        assert stage.node_writes() == []
        assert stage.evicted == []

    play(story, with_services())


def test_a_unit_that_does_not_stop() -> None:
    """It ends the run with 75 and its name; what was stopped before it is started again."""

    async def story(stage: Stage) -> None:
        host_of(stage).units[PERSISTENCED].fails = "stop"
        run = await stage.run()
        assert run.code == 75
        assert PERSISTENCED in run.sentence
        assert stage.unloads() == []
        assert_running(stage)
        await stage.assert_put_back()

    play(story, with_services())


def test_a_unit_that_does_not_start_again() -> None:
    """It is told, and keeps nobody from a new driver: the driver it needs may be the one that is gone."""

    async def story(stage: Stage) -> None:
        host_of(stage).units[FABRIC].fails = "start"
        assert (await stage.run()).code == 0
        assert host_of(stage).units[PERSISTENCED].is_active
        await stage.assert_put_back()

    play(story, with_services())


def test_a_unit_that_comes_in_mid_run() -> None:
    """A known unit that begins to hold a GPU meanwhile is written down, stopped and started again."""

    async def story(stage: Stage) -> None:
        stage.later(1.0, lambda: host_of(stage).add_unit(FABRIC, "nv-fabricmanag", ("/dev/nvidia0",)))
        run = await stage.run()
        assert run.code == 0, run.sentence
        assert systemctl(stage) == [("stop", FABRIC), ("start", FABRIC)]
        await stage.assert_put_back()

    play(story)


def test_killed_anywhere_then_restored() -> None:
    """SIGKILL at every boundary, then `restore`: every service runs."""

    async def then(stage: Stage, _: Run) -> None:
        second = await stage.restore()
        assert second.code == 0, second.sentence
        assert_running(stage)
        await stage.assert_put_back()

    assert at_every_boundary(with_services, then) > 20


def test_killed_anywhere_then_run_again() -> None:
    """SIGKILL at every boundary, then another run: it adopts what was stopped; free, and every service runs."""

    async def then(stage: Stage, _: Run) -> None:
        second = await stage.run()
        assert second.code == 0, second.sentence
        stage.assert_free()
        assert_running(stage)
        await stage.assert_put_back()

    assert at_every_boundary(with_services, then) > 20


def test_stopped_anywhere() -> None:
    """SIGTERM at every boundary: every service runs when the program has ended."""

    def made() -> Scenario:
        scenario = with_services()
        scenarios.append(scenario)
        return scenario

    scenarios: list[Scenario] = []
    assert stopped_at_every_boundary(made, 20) <= {0, 75}
    assert all(unit.is_active for scenario in scenarios for unit in scenario.world.machine(NODE).units.values())


def test_another_boot_drops_the_host_half() -> None:
    """N54: after a reboot the record's services are nobody's business: the boot has started what is to run."""

    async def story(stage: Stage) -> None:
        run = await stage.run(kill_at=10_000, holder_timeout=1.0, host_services=((FABRIC, HostAction.WAIT),))
        assert run.code == 75
        killed = stage.start()
        task = asyncio.ensure_future(killed.life.run(killed.agent.uninstall(asyncio.Event())))
        while not any(call == ("stop", PERSISTENCED) for call in systemctl(stage)[2:]):
            await asyncio.sleep(0.05)
        killed.life.kill()
        await asyncio.gather(task, return_exceptions=True)
        record = find_record(stage.world.node(NODE)).record
        assert record is not None
        assert set(record.services) == {FABRIC, PERSISTENCED}
        host_of(stage).reboot()
        done = len(systemctl(stage))
        assert (await stage.restore()).code == 0
        assert len(systemctl(stage)) == done
        assert names.RECORD not in stage.world.node(NODE).annotations

    play(story, with_services())
