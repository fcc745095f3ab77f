"""A node, the agent on it, and what a test asks of them."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

from driver_manager import names
from driver_manager.agent.run import Agent, Outcome
from driver_manager.config import Settings
from driver_manager.core.modules import DRIVER_MODULES
from driver_manager.core.snapshot import HolderScan, Owner
from driver_manager.sim.clock import run_virtual
from driver_manager.sim.faults import Do, When
from driver_manager.sim.objects import Pod, PodSpec
from driver_manager.sim.scenarios import NAMESPACE, NODE, Scenario, stock_world
from driver_manager.sim.world import AgentLife, NodeSurface, World

DRA_APP = "nvidia-dra-driver-kubelet-plugin"
DRA_LABEL = names.DEPLOY_PREFIX + "dra-driver"
DRA_NAMESPACE = "nvidia-dra-driver"
LONGEST = 20_000.0
"""Seconds of virtual time that a story may take."""
PLUGIN = PodSpec(
    host_paths=("/var/lib/kubelet/plugins_registry", "/var/lib/kubelet/plugins"), container_names=frozenset({"compute-domains", "gpus"}),
    stop_seconds=0.4, devices=("/dev/nvidiactl",), command="gpu-kubelet-plugin",
)  # fmt: skip
"""A DRA plugin as the standalone chart has it: nothing of the operator's marks it."""


def small_world(seed: int = 0, *, gpu_pods: int = 2, operands: int = 3, tolerates_us: bool = False) -> Scenario:
    """The stock node with less on it, for tests that run it hundreds of times."""
    return stock_world(seed, gpu_pods=gpu_pods, operands=operands, tolerates_us=tolerates_us)


def with_dra(scenario: Scenario) -> Scenario:
    """The same with a DRA plugin."""
    world = scenario.world
    world.edit_node(NODE, labels={DRA_LABEL: "true"})
    spec = replace(PLUGIN, labels={"app": DRA_APP}, node_selector={DRA_LABEL: "true"})
    world.add_daemon_set("dra-plugin", spec, namespace=DRA_NAMESPACE)
    return scenario


def claim_holder(
    world: World, name: str, *, is_admin: bool = False, driver: str = names.GPU_DRA_DRIVER, owner: Owner | None = None, **spec: Any
) -> Pod:
    """A pod with a claim of its own name, of a StatefulSet by default."""
    world.add_claim(name, drivers=frozenset({driver}), is_admin=is_admin)
    made = PodSpec(**{"claims": (name,), "stop_seconds": 1.0, "devices": ("/dev/nvidia7",), **spec})
    return world.add_pod(name, made, node=NODE, owner=owner or Owner("StatefulSet", "db", "uid-db"))


def gpu_pod(world: World, name: str, spec: PodSpec | None = None, *, namespace: str = "default", owner: Owner | None = None) -> Pod:
    """One more GPU pod on the node, of a StatefulSet by default."""
    made = spec or PodSpec(gpus=1, stop_seconds=1.0)
    return world.add_pod(name, made, node=NODE, namespace=namespace, owner=owner or Owner("StatefulSet", "db", "uid-db"))


def settings(**given: Any) -> Settings:
    """The agent's settings with some of them given."""
    return Settings(**{"node_name": NODE, "operator_namespace": NAMESPACE, **given})


@dataclass(slots=True)
class Run:
    """One life of the agent and how it ended."""

    life: AgentLife
    agent: Agent
    outcome: Outcome | None = None
    """None where it was killed."""

    @property
    def code(self) -> int:
        """The exit code of one that was not killed."""
        assert self.outcome is not None
        return int(self.outcome.code)

    @property
    def sentence(self) -> str:
        """What it says at its end, the hint with it."""
        assert self.outcome is not None
        return f"{self.outcome.sentence} | {self.outcome.hint}"

    @property
    def steps(self) -> list[str]:
        """Names of the steps it began, in order."""
        return [type(state.step).__name__ for state in self.agent.progress.steps]


@dataclass(slots=True)
class Stage:
    """A world during one story."""

    scenario: Scenario
    before: NodeSurface
    given: dict[str, Any] = field(default_factory=dict)

    @property
    def world(self) -> World:
        """The simulated world."""
        return self.scenario.world

    def start(self, *, kill_at: int | None = None, **given: Any) -> Run:
        """A new life of the agent, not yet begun."""
        life = self.scenario.life(kill_at)
        return Run(life, Agent(life.cluster, life.host, life.clock, settings(**{**self.given, **given})))

    async def run(self, *, kill_at: int | None = None, stop: asyncio.Event | None = None, **given: Any) -> Run:
        """`uninstall_driver`."""
        run = self.start(kill_at=kill_at, **given)
        run.outcome = await run.life.run(run.agent.uninstall(stop or asyncio.Event()))
        return run

    async def restore(self, *, kill_at: int | None = None, stop: asyncio.Event | None = None, keep_status: bool = False) -> Run:
        """`restore`."""
        run = self.start(kill_at=kill_at)
        run.outcome = await run.life.run(run.agent.restore(stop or asyncio.Event(), keep_status=keep_status))
        return run

    def later(self, seconds: float, what: Callable[[], object]) -> None:
        """Has something done in the world."""
        asyncio.get_running_loop().call_later(seconds, what)

    # Looking --------------------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """Seconds since the start."""
        return asyncio.get_running_loop().time()

    @property
    def status(self) -> dict[str, Any]:
        """The status annotation."""
        text = self.world.node(NODE).annotations.get(names.STATUS, "{}")
        found: dict[str, Any] = json.loads(text)
        return found

    @property
    def evicted(self) -> list[str]:
        """Names of the pods evicted so far, but for those that waited with a gate: they never ran."""
        return [ref for _, ref, uid in self.world.evictions if uid not in self.world.server.let_in]

    def node_writes(self) -> list[str]:
        """The agent's own writes of the node, as the diary has them, those of the status alone left out."""
        entries = [one for one in self.world.store.diary if one.what == "patch" and one.who == self.scenario.account.name]
        status = names.STATUS.rpartition("/")[2]
        return [one.detail for one in entries if one.detail not in (f"+{status}", f"-{status}")]

    def unloads(self) -> list[tuple[float, str]]:
        """Modules taken out, with the time."""
        return [(call.at, call.argument) for call in self.world.machine(NODE).calls if call.call == "delete_module" and call.result == "0"]

    # Judging --------------------------------------------------------------------------------------------------------

    async def assert_put_back(self) -> None:
        """The node is exactly as before, no record is left, nobody waits with a gate, and nobody was evicted twice."""
        await asyncio.sleep(2.0)
        assert self.world.surface(NODE) == self.before
        assert names.RECORD not in self.world.node(NODE).annotations
        assert not [pod.ref for pod in self.world.store.pods.values() if pod.gates]
        self.assert_evicted_once()

    def assert_evicted_once(self) -> None:
        """No pod was evicted twice."""
        twice = [uid for uid, count in Counter(uid for _, _, uid in self.world.evictions).items() if count > 1]
        assert not twice

    def assert_free(self) -> None:
        """A driver can be installed: no module, no mount, nothing that speaks of the old one."""
        machine = self.world.machine(NODE)
        view = machine.view()
        assert not [name for name in view.modules if name in DRIVER_MODULES]
        assert not view.mounts
        assert view.state_digest is None
        assert not view.markers
        assert not view.has_pid_file

    def assert_host_untouched(self) -> None:
        """Not one call changed the machine."""
        assert self.world.machine(NODE).calls == []
        assert self.world.machine(NODE).scan() != HolderScan()


def play(story: Callable[[Stage], Coroutine[Any, Any, None]], scenario: Scenario | None = None, **given: Any) -> Stage:
    """Tells a story in virtual time."""

    async def told() -> Stage:
        chosen = scenario or small_world()
        stage = Stage(chosen, chosen.world.surface(NODE), given)
        async with asyncio.timeout(LONGEST):  # a deadlock is an error, not a test that never ends
            await story(stage)
        return stage

    return run_virtual(told())


def at_boundary(stage: Stage, number: int, what: Callable[[], None]) -> Callable[[], bool]:
    """Has something done at one boundary of the next life; the result tells whether it came to that."""
    rule = stage.world.faults.on(None, Do(what), where=lambda call: call.boundary == number)
    after = stage.world.faults.on(None, Do(what), when=When.AFTER, where=lambda call: call.boundary == number)
    return lambda: bool(rule.acted or after.acted)
