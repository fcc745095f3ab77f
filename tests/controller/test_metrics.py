"""What a replica answers about itself: metrics, health and readiness, against a simulated fleet."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from driver_manager.controller import health
from driver_manager.controller.metrics import exposition, free_slots
from driver_manager.controller.run import Replica
from driver_manager.controller.serving import serving
from driver_manager.controller.settings import ControllerSettings
from driver_manager.controller.telling import BUCKETS, Durations
from driver_manager.core.budget import Sums
from driver_manager.core.fleet import Kind
from driver_manager.core.rollout_states import State
from driver_manager.core.upgrade_policy import UpgradePolicy
from driver_manager.errors import ConfigError, Forbidden, TakenOver, Unreachable
from driver_manager.names import PAUSED_ROLLOUT, UPGRADE_STATE
from driver_manager.sim.clock import SimClock, run_virtual
from driver_manager.sim.faults import Fail
from driver_manager.sim.fleetworld import OWN_NAMESPACE, FleetWorld

GROUP = "ClusterPolicy/cluster-policy"
POLICY = {"autoUpgrade": True, "maxParallelUpgrades": 2, "maxUnavailable": "50%"}


class Scraped:
    """One scrape, read by Prometheus' own parser."""

    def __init__(self, replica: Replica) -> None:
        self.families = {family.name: family for family in text_string_to_metric_families(exposition(replica).decode())}
        self.values = {
            (sample.name.removeprefix("driver_manager_controller_"), *sorted(sample.labels.values())): sample.value
            for family in self.families.values()
            for sample in family.samples
        }

    def __getitem__(self, key: str | tuple[str, ...]) -> float:
        return self.values[(key,) if isinstance(key, str) else (key[0], *sorted(key[1:]))]

    def names(self, prefix: str) -> set[str]:
        return {name for name in self.families if name.startswith(prefix)}


Story = Callable[[FleetWorld, Replica, asyncio.Task[Any]], Coroutine[Any, Any, None]]


def play(story: Story, *, nodes: int = 4, identity: str = "one", **world_args: Any) -> FleetWorld:
    """Runs a story beside a replica that leads a fleet."""
    world = FleetWorld(1, nodes=nodes, policy=POLICY, **world_args)

    async def whole() -> None:
        life = world.controller()
        replica = Replica(life.fleet, life.clock, ControllerSettings(identity=identity))
        task = asyncio.create_task(replica.run())
        await asyncio.sleep(5)
        await story(world, replica, task)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, TakenOver):
            await task

    run_virtual(whole())
    return world


def states(world: FleetWorld) -> dict[str, int]:
    found: dict[str, int] = {}
    for node in world.store.nodes.values():
        word = node.labels.get(UPGRADE_STATE, "none")
        found[word] = found.get(word, 0) + 1
    return found


def test_values_are_those_of_the_fleet_at_every_moment() -> None:
    """In every second of a roll-out the gauges are what the nodes' labels say, and at its end the counters are what was done."""

    async def story(world: FleetWorld, replica: Replica, _: asyncio.Task[Any]) -> None:
        world.new_driver("two")
        for _second in range(90):
            await asyncio.sleep(1)
            seen, real = Scraped(replica), states(world)
            for state in State:
                assert seen["nodes", GROUP, state.value or "none"] == real.get(state.value or "none", 0)
            assert seen["gpu_operator_nodes_upgrades_pending"] == real.get("upgrade-required", 0)
            assert seen["gpu_operator_nodes_upgrades_done"] == real.get("upgrade-done", 0)
            assert seen["unavailable_nodes", GROUP, "upgrade"] >= len(world.cordoned)
            assert seen["working_nodes", GROUP] <= 2
        assert states(world) == {"upgrade-done": 4}
        assert seen["leading"] == 1
        assert seen["evictions_total"] == len(world.deeds("evict")) == 8
        assert seen["driver_pod_restarts_total"] == 4
        assert seen["transitions_total", "upgrade-required", "cordon-required", "Started"] == 4
        assert seen["state_seconds_count", "pod-restart-required"] == 4
        assert 4 * 7 <= seen["state_seconds_sum", "pod-restart-required"] <= 4 * 12
        assert seen["nodes_staying", "UpToDate"] == 4
        assert (seen["events_dropped_total"], seen["bugs_total"], seen["gpu_operator_reconciliation_failed_total"]) == (0, 0, 0)

    play(story)


def test_limits_and_whose_doing_it_is() -> None:
    """The limits of the policy, worked out, beside the nodes that others have made unavailable."""

    async def story(world: FleetWorld, replica: Replica, _: asyncio.Task[Any]) -> None:
        node = world.store.nodes["gpu-1"]
        node.unschedulable = True
        world.store.node_written(node)
        await asyncio.sleep(1)
        seen = Scraped(replica)
        assert seen["max_unavailable_nodes", GROUP] == 2
        assert seen["max_parallel_upgrades", GROUP] == 2
        assert seen["upgrades_enabled", GROUP] == 1
        assert (seen["unavailable_nodes", GROUP, "other"], seen["unavailable_nodes", GROUP, "upgrade"]) == (1, 0)
        assert seen["gpu_operator_nodes_upgrades_available"] == 1
        assert seen["gpu_operator_gpu_nodes_total"] == 4

    play(story)


def test_the_oldest_node_of_a_state() -> None:
    """A node that does not get on shows by its age."""

    async def story(world: FleetWorld, replica: Replica, _: asyncio.Task[Any]) -> None:
        world.behave(start_seconds=1e9)
        world.new_driver("two")
        await asyncio.sleep(300)
        seen = Scraped(replica)
        assert 250 < seen["oldest_seconds", "pod-restart-required"] < 300
        assert seen["nodes_staying", "DriverStarting"] == 2
        assert seen["nodes_staying", "NoSlot"] == 2

    play(story)


def test_paused_by_a_person() -> None:
    """The pause annotation of the Lease shows as soon as the leader has seen it."""

    async def story(world: FleetWorld, replica: Replica, _: asyncio.Task[Any]) -> None:
        assert Scraped(replica)["paused"] == 0
        client = world.client()
        lease = await client.lease(OWN_NAMESPACE, "driver-manager-controller")
        await client.write_lease(replace(lease, annotations={**lease.annotations, PAUSED_ROLLOUT: "true"}))
        await asyncio.sleep(5)
        assert Scraped(replica)["paused"] == 1
        world.new_driver("two")
        await asyncio.sleep(5)
        assert Scraped(replica)["nodes_staying", "Paused"] == 4
        passes = replica.telling.passes
        await asyncio.sleep(60)
        assert replica.telling.passes - passes <= 60 / 2 + 5, "a pause is no work"
        assert not world.cordoned
        lease = await client.lease(OWN_NAMESPACE, "driver-manager-controller")
        others = {key: value for key, value in lease.annotations.items() if key != PAUSED_ROLLOUT}
        await client.write_lease(replace(lease, annotations=others))
        await asyncio.sleep(5)
        assert world.cordoned
        assert ("nodes_staying", "Paused") not in Scraped(replica).values

    play(story)


def test_w47_a_replica_that_does_not_lead_says_nothing_about_the_fleet() -> None:
    """Weakness 47: beside a leader, and after the Lease is lost, values about the fleet are missing, not old; counters stay."""

    async def story(world: FleetWorld, replica: Replica, task: asyncio.Task[Any]) -> None:
        life = world.controller()
        standby = Replica(life.fleet, life.clock, ControllerSettings(identity="two"))
        other = asyncio.create_task(standby.run())
        await asyncio.sleep(5)
        assert Scraped(standby)["leading"] == 0
        assert not Scraped(standby).names("gpu_operator_nodes")
        assert health.readiness(standby) == health.Answer(True, "stands by; one leads")
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await asyncio.sleep(5)
        assert Scraped(replica)["leading"] == 0
        assert not Scraped(replica).names("driver_manager_controller_nodes") | Scraped(replica).names("gpu_operator_nodes")
        assert Scraped(replica)["transitions_total", "none", "upgrade-done", "UpToDate"] == 4
        assert Scraped(standby)["gpu_operator_nodes_upgrades_done"] == 4
        other.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await other

    play(story)


def test_w47_a_policy_that_is_switched_off() -> None:
    """Weakness 47: with upgrades off the gauges go to 0 instead of keeping what they were."""

    async def story(world: FleetWorld, replica: Replica, _: asyncio.Task[Any]) -> None:
        world.new_driver("two")
        await asyncio.sleep(4)
        assert Scraped(replica)["gpu_operator_driver_auto_upgrade_enabled"] == 1
        world.set_policy("ClusterPolicy", "cluster-policy", upgrade_policy={"autoUpgrade": False})
        await asyncio.sleep(120)
        seen = Scraped(replica)
        assert seen["gpu_operator_driver_auto_upgrade_enabled"] == 0
        assert seen["gpu_operator_nodes_upgrades_pending"] == seen["gpu_operator_nodes_upgrades_in_progress"] == 0
        assert seen["gpu_operator_reconciliation_status"] == -1

    play(story)


def test_every_gauge_is_there_from_the_first_scrape_on() -> None:
    """A state without a node is 0, not missing, so that an alert on it can be written."""

    async def story(_: FleetWorld, replica: Replica, __: asyncio.Task[Any]) -> None:
        seen = Scraped(replica)
        assert seen["nodes", GROUP, "upgrade-failed"] == seen["nodes", GROUP, "invalid"] == 0
        assert seen.names("process_")

    play(story)


def test_an_idle_fleet_is_alive() -> None:
    """The loop comes round although nothing changes for an hour."""

    async def story(_: FleetWorld, replica: Replica, __: asyncio.Task[Any]) -> None:
        await asyncio.sleep(3600)
        assert health.health(replica).is_well
        assert replica.clock.now() - replica.telling.passed_at <= 11

    play(story)


def test_a_loop_that_hangs_is_not() -> None:
    """A leader whose loop has not come round for a minute is to be started anew."""

    async def story(_: FleetWorld, replica: Replica, __: asyncio.Task[Any]) -> None:
        replica.telling.passed_at = replica.clock.now() - 70
        assert health.health(replica) == health.Answer(False, "the loop has not come round for 70 s")

    play(story)


def test_ready_only_when_the_fleet_is_known() -> None:
    """A leader that cannot list the fleet yet says what is missing; it is alive."""

    async def story(world: FleetWorld, replica: Replica, task: asyncio.Task[Any]) -> None:
        task.cancel()
        await asyncio.wait({task})
        silence = Fail(lambda: Unreachable("no answer"))
        rule = world.faults.on("follow", silence, where=lambda call: call.args["kind"] is Kind.NODES, times=None)
        life = world.controller()
        late = Replica(life.fleet, life.clock, ControllerSettings(identity="late"))
        other = asyncio.create_task(late.run())
        await asyncio.sleep(90)
        assert health.readiness(late) == health.Answer(False, "leads, and has not listed yet: nodes")
        assert health.health(late).is_well
        assert not Scraped(late).names("gpu_operator_nodes")
        rule.times = 0
        await asyncio.sleep(5)
        assert health.readiness(late) == health.Answer(True, "leads")
        other.cancel()
        await asyncio.wait({other})

    play(story)


def test_a_standby_that_cannot_ask_for_the_lease_is_not_ready() -> None:
    """It could not take over; it says why, is alive, and is ready again as soon as the API server answers."""

    async def story(world: FleetWorld, _: Replica, __: asyncio.Task[Any]) -> None:
        life = world.controller()
        silence = Fail(lambda: Unreachable("no answer"))
        rule = world.faults.on("lease", silence, where=lambda call: call.life == life.number, times=None)
        standby = Replica(life.fleet, life.clock, ControllerSettings(identity="two"))
        waiting = asyncio.create_task(standby.run())
        await asyncio.sleep(5)
        assert health.readiness(standby) == health.Answer(False, "the Lease cannot be read or written: no answer")
        assert health.health(standby).is_well
        rule.times = 0
        await asyncio.sleep(5)
        assert health.readiness(standby) == health.Answer(True, "stands by; one leads")
        waiting.cancel()
        await asyncio.wait({waiting})

    play(story)


def test_without_the_right_to_the_lease_it_ends() -> None:
    """A missing right is an error with its own code, not a wait without end."""
    world = FleetWorld(1, nodes=1, policy=POLICY)
    life = world.controller(account=world.add_account("nobody", ()))

    async def whole() -> None:
        await Replica(life.fleet, life.clock, ControllerSettings()).run()

    with pytest.raises(Forbidden):
        run_virtual(whole())


@pytest.mark.parametrize(
    ("policy", "working", "gone", "free"),
    [
        (UpgradePolicy(max_parallel_upgrades=3, max_unavailable="50%"), 1, 2, 2),
        (UpgradePolicy(max_parallel_upgrades=1, max_unavailable="50%"), 1, 2, 0),
        (UpgradePolicy(max_parallel_upgrades=0, max_unavailable="100%"), 1, 2, 6),
        (UpgradePolicy(max_parallel_upgrades=5, max_unavailable=1), 1, 2, 0),
        (None, 0, 0, 0),
    ],
)
def test_how_many_more_may_begin(policy: UpgradePolicy | None, working: int, gone: int, free: int) -> None:
    """nodes_upgrades_available is the smaller of what the two limits leave, and never below 0."""
    names = [f"n{number}" for number in range(10)]
    sums = Sums(total=10, working=set(names[:working]), foreign=set(names[:gone]), pending=[(0.0, name) for name in names[4:]])
    assert free_slots(policy, sums) == free


def test_durations_keep_their_size() -> None:
    """However many are added, the buckets are the same number, and a clock that was turned back adds nothing."""
    durations = Durations()
    for seconds in (-5.0, 0.5, 1.0, 1.5, 1e9):
        durations.add(seconds)
    assert len(durations.counts) == len(BUCKETS) + 1
    assert (durations.counts[0], durations.counts[1], durations.counts[-1]) == (3, 1, 1)
    assert durations.total == 1e9 + 3.0


# Over HTTP ----------------------------------------------------------------------------------------------------------


async def ask(address: str, text: str) -> tuple[int, str]:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(text.encode())
    answer = (await reader.read()).decode()
    writer.close()
    head, _, body = answer.partition("\r\n\r\n")
    return int(head.split()[1]), body


def get(path: str) -> str:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


@pytest.mark.real_sockets
async def test_answers_over_http() -> None:
    """The three paths answer, nothing else does, and what is no HTTP is refused."""
    life = FleetWorld(1, nodes=1).controller()
    replica = Replica(life.fleet, SimClock(), ControllerSettings())
    async with serving(replica, "127.0.0.1:0") as address:
        assert await ask(address, get("/healthz")) == (200, "alive\n")
        assert await ask(address, get("/readyz")) == (200, "stands by\n")
        code, body = await ask(address, get("/metrics"))
        assert code == 200
        assert "driver_manager_controller_leading 0.0" in body
        assert (await ask(address, get("/")))[0] == 404
        assert (await ask(address, get("/healthz").replace("GET", "POST")))[0] == 405
        assert (await ask(address, f"GET /{'a' * 10_000} HTTP/1.1\r\n\r\n"))[0] == 400
        assert (await ask(address, "hello\r\n\r\n"))[0] == 400


@pytest.mark.real_sockets
async def test_an_address_in_use() -> None:
    """It says which, and which setting to change; exit 78."""
    life = FleetWorld(1, nodes=1).controller()
    replica = Replica(life.fleet, SimClock(), ControllerSettings())
    async with serving(replica, "127.0.0.1:0") as address:
        with pytest.raises(ConfigError, match=f"cannot listen on {address}"):
            async with serving(replica, address):
                pass


async def test_no_address_is_no_server() -> None:
    """An empty address opens no socket."""
    life = FleetWorld(1, nodes=1).controller()
    async with serving(Replica(life.fleet, SimClock(), ControllerSettings()), "") as address:
        assert address == ""
