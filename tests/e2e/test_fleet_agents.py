"""What controller and agent promise together: real agents on the hosts of a fleet that a real controller leads, on policy-owned nodes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.e2e.agents import Agents, HostFleet
from tests.e2e.fleet import GRANTS
from tests.e2e.fleetwatch import Story, watched
from tests.e2e.world import RECORD, STATUS, UPGRADE_ENABLED, resource_of
from tests.kube.controlplane import ControlPlane

pytestmark = pytest.mark.kube
DONE = "upgrade-done"
MODULES = ["nvidia", "nvidia_modeset", "nvidia_uvm"]


class HostFleetMaker(Protocol):
    """Makes so many nodes with a loaded driver and two GPU pods each; it goes with the test."""

    def __call__(self, nodes: int, **agent_env: str) -> HostFleet: ...


@pytest.fixture
def host_fleet(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> Iterator[HostFleetMaker]:
    """Makes the test's fleet."""
    made: list[HostFleet] = []

    def make(nodes: int, **agent_env: str) -> HostFleet:
        lives = {"gpus": 2, "start_after": "200ms", "stop_after": "200ms"}
        made.append(HostFleet(control_plane, namespace, tmp_path, nodes, agent_env=agent_env, **lives))
        for number, name in enumerate(made[-1].names):
            made[-1].add_training(2, name=f"train-{number}", node=name)
        return made[-1]

    yield make
    for each in made:
        each.remove()
        assert "Traceback" not in each.logs(), each.logs()[-4000:]


def reports(story: Story, uid: str) -> set[str]:
    """The reasons of the agents' reports in which a pod is named."""
    texts = [event.object["metadata"].get("annotations", {}).get(STATUS) for event in story.nodes.until_now()]
    found: list[Any] = [json.loads(text) for text in texts if text]
    return {report["reason"] for report in found if uid in [each.get("uid") for each in report["blockers"]]}


def evicted_by(fleet: HostFleet, account: str, since: int) -> list[str]:
    """Names of pods whose eviction by an account of the fleet was accepted."""
    events = fleet.cp.audit(since, f"system:serviceaccount:{fleet.namespace}:{account}")
    evictions = [each for each in events if resource_of(each) == "pods/eviction" and "dryRun" not in each["requestURI"]]
    return sorted(each["objectRef"]["name"] for each in evictions if each["responseStatus"]["code"] == 201)


def assert_unloaded(fleet: HostFleet, agents: Agents) -> None:
    """On every host one agent has unloaded the driver, at the first try and after the last process of a pod had ended."""
    for name, host in fleet.hosts.items():
        (agent,) = [each for each in agents.containers.values() if each.node == name]
        assert {end.code for end in agent.ends[:-1]} <= {65}, "refused, and begun again by the kubelet"
        assert agent.ends[-1].code == 0
        unloads = [call for call in host.calls() if call["call"] == "delete_module"]
        assert sorted((call["arguments"][0], call["result"]) for call in unloads) == [(module, 0) for module in MODULES]
        assert len(agents.ended[name]) >= 2
        assert min(call["time"] for call in unloads) > max(agents.ended[name])
        assert host.targets() == [], "the driver root is unmounted"
        assert not (host.root / "run/nvidia/nvidia-driver.state").exists()


def roll_out(fleet: HostFleet, agents: Agents, *hidden: str) -> tuple[list[str], list[set[str]], int]:
    """From outdated drivers to opened nodes, with all that has to hold.

    Args:
        fleet: of the nodes.
        agents: on them.
        hidden: apps of a pod each that uses a GPU and declares nothing.

    Returns:
        The names of the hidden pods, the reasons of the reports in which they are named, and the mark of the audit log before it began.
    """
    unseen = [pod for app in hidden for pod in fleet.pods(app)]
    for pod in [*unseen, *(pod for number in range(len(fleet.names)) for pod in fleet.pods(f"train-{number}"))]:
        agents.give_process(pod)
    fleet.start()
    fleet.wait_states(DONE)
    before, mark = fleet.surface(), fleet.cp.audit_mark()
    assert all(UPGRADE_ENABLED in each["annotations"] for each in before.values())
    with watched(fleet) as story:
        fleet.set_driver("new")
        fleet.wait(lambda: fleet.digests() == {"new"} and set(fleet.states().values()) == {DONE}, "all nodes to be opened")
        fleet.wait_whole()
        fleet.wait(lambda: fleet.surface() == before, "the nodes to be as before")
        story.assert_budget(parallel=2, unavailable=2)
        story.assert_replaced_once()
        reported = [reports(story, pod["metadata"]["uid"]) for pod in unseen]
    assert_unloaded(fleet, agents)
    assert len(fleet.deleted(mark)) == len(fleet.names)
    assert GRANTS not in fleet.lease()["metadata"].get("annotations", {})
    assert not {RECORD, STATUS} & {key for each in fleet.surface().values() for key in each["annotations"]}
    return [pod["metadata"]["name"] for pod in unseen], reported, mark


def test_from_outdated_driver_to_opened_node(host_fleet: HostFleetMaker) -> None:
    """Decision 35, R1 to R4, R7: the controller frees, the agents unload; whom only an agent sees is reported, then evicted."""
    three = host_fleet(3, POLICY_OWNED_CONSUMERS="wait")
    three.policy |= {"maxParallelUpgrades": 2, "maxUnavailable": 2}
    three.add_deployment("hidden", node=three.names[0])
    training = three.training()
    with Agents(three) as agents:
        hidden, reported, mark = roll_out(three, agents, "hidden")
    assert reported == [{"policy-owned"}]
    assert three.evicted(mark) == sorted([*training, *hidden])
    assert evicted_by(three, "nvidia-driver", mark) == [], "here eviction is the controller's"
    for number in range(3):
        three.wait_pods(f"train-{number}", 2)


def test_agent_evicts_whom_no_upgrade_controller_knows(host_fleet: HostFleetMaker) -> None:
    """Decisions 1, 35: by default the agent evicts whom only it sees; whom it may not move and the policy allows, the controller."""
    one = host_fleet(1)
    one.policy |= {"podDeletion": {"deleteEmptyDir": True}}
    one.add_deployment("hidden", node=one.names[0])
    one.add_deployment("scratch", node=one.names[0], spec={"volumes": [{"name": "scratch", "emptyDir": {}}]})
    training = one.training()
    with Agents(one) as agents:
        (hidden, scratch), reported, mark = roll_out(one, agents, "hidden", "scratch")
    assert "evicting" in reported[0]
    assert reported[1] == {"refused"}
    assert one.evicted(mark) == sorted([*training, scratch])
    assert evicted_by(one, "nvidia-driver", mark) == [hidden]
