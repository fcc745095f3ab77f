"""Beside a gpu-operator that lives: who leads, who frees what, and what is left when that changes. On the simulator."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from driver_manager import names
from driver_manager.cli import fleetstatus
from driver_manager.controller.run import Replica
from driver_manager.controller.settings import ControllerSettings
from driver_manager.core.fleet import LeaseView
from driver_manager.core.report import Blocker, Waiting, status_text
from driver_manager.core.role import Choice, Role
from driver_manager.core.rollout_states import Because
from driver_manager.core.snapshot import ChangeKind
from driver_manager.errors import DriverManagerError, Forbidden
from driver_manager.sim.access import EVERYTHING
from driver_manager.sim.clock import run_virtual
from driver_manager.sim.faults import Fail
from driver_manager.sim.fleetworld import CONTROLLER, OWN_NAMESPACE, FleetWorld
from driver_manager.sim.objects import HOSTNAME, Node, Pod, PodSpec
from driver_manager.sim.parking import GATE
from driver_manager.sim.store import Object
from driver_manager.sim.world import AgentLife
from tests.controller.besides import OPERATOR, POLICY, Stage, play
from tests.controller.rollouts import add_exporter
from tests.controller.stories import play as play_led
from tests.controller.stories import until
from tests.controller.test_metrics import Scraped
from tests.controller.test_overview import look, row


def test_it_follows_a_gpu_operator_that_lives() -> None:
    """gpu-operator leads: ours frees what it does not know before the driver goes, and writes to no node at all."""

    async def story(stage: Stage) -> None:
        stage.world.new_driver("two")
        await stage.until_done()
        assert stage.patches(CONTROLLER) == []
        assert stage.evicted() == {(OPERATOR, "gpu"): 4, (CONTROLLER, "hidden"): 4}
        gone = {deed.node_name: deed.at for deed in stage.world.deeds("delete", None) if "nvidia-driver" in deed.target}
        assert all(deed.at < gone[deed.node_name] for deed in stage.world.deeds("evict") if deed.who == CONTROLLER)
        stage.assert_nothing_twice()
        assert {note.reason for _, who, note in stage.world.store.notes if who == CONTROLLER} == {"Freed"}

    play(story)


def test_without_a_gpu_operator_it_leads_at_once_and_marks_its_nodes() -> None:
    """No Lease: it leads without a wait, and each node gets the mark in the patch that it gets anyhow; off with the policy."""

    async def story(stage: Stage) -> None:
        assert stage.role is Role.LEAD
        assert set(stage.states().values()) == {"upgrade-done"}
        assert len(stage.patches(CONTROLLER)) == 4
        assert all(node.annotations[names.UPGRADE_ENABLED] == "true" for node in stage.world.store.nodes.values())
        stage.world.set_policy("ClusterPolicy", "cluster-policy", upgrade_policy={"autoUpgrade": False})
        await asyncio.sleep(10)
        assert len(stage.patches(CONTROLLER)) == 8
        assert all(names.UPGRADE_ENABLED not in node.annotations for node in stage.world.store.nodes.values())

    play(story, operator=False)


def test_it_leads_on_when_gpu_operator_dies_in_mid_flow_and_follows_when_it_is_back() -> None:
    """R3, R4: whoever leads, each pod is evicted once and each driver pod replaced once, and no cordon stays."""

    async def story(stage: Stage) -> None:
        world = stage.world
        world.new_driver("two")
        await stage.until(lambda: "pod-restart-required" in stage.states().values(), "a node in the middle")
        await stage.kill_operator()
        assert stage.role is Role.FOLLOW
        before = stage.states()
        await asyncio.sleep(10)
        assert stage.states() == before, "the Lease is not over yet"
        await stage.until(lambda: stage.role is Role.LEAD, "ours leads", 20)
        await stage.until(lambda: list(stage.states().values()).count("upgrade-done") >= 2, "ours has led two nodes on")
        await stage.until(lambda: "pod-deletion-required" in stage.states().values(), "a node of ours in the middle")
        stage.start_operator()
        await stage.until(lambda: stage.role is Role.FOLLOW, "ours follows again", 10)
        written = len(stage.patches(CONTROLLER))
        await stage.until_done()
        await asyncio.sleep(30)
        later = stage.patches(CONTROLLER)[written:]
        assert not [patch for patch in later if patch.labels or patch.unschedulable is not None]
        stage.assert_nothing_twice()

    play(story, pod_grace=10.0)


@pytest.mark.parametrize("moment", range(0, 60, 4))
def test_the_role_changes_at_any_moment(moment: int) -> None:
    """gpu-operator comes and dies again at any moment of a roll-out: all ends well, and while it lives ours writes no state label."""

    async def story(stage: Stage) -> None:
        stage.world.new_driver("two")
        await asyncio.sleep(moment)
        stage.start_operator()
        await stage.until(lambda: stage.role is Role.FOLLOW, "ours follows", 10)
        await asyncio.sleep(2)
        written = len(stage.patches(CONTROLLER))
        await asyncio.sleep(2 * moment)
        assert not [patch for patch in stage.patches(CONTROLLER)[written:] if patch.labels or patch.unschedulable]
        await stage.kill_operator()
        await stage.until_done()
        await asyncio.sleep(30)
        stage.assert_nothing_twice()

    play(story, operator=False)


def test_a_cordon_of_ours_does_not_stay_when_gpu_operator_takes_the_labels_off() -> None:
    """With auto-upgrade off gpu-operator takes the label off in mid-flow: the cordon was ours, and goes, as the driver still runs."""

    async def story(stage: Stage) -> None:
        stage.world.new_driver("two")
        await stage.until(lambda: "pod-deletion-required" in stage.states().values(), "a node in the middle")
        stage.start_operator()
        await stage.until(lambda: stage.role is Role.FOLLOW, "ours follows", 10)
        await stage.until(lambda: set(stage.states().values()) == {""}, "the labels are off")
        await asyncio.sleep(30)
        assert not stage.world.cordoned
        assert all("cordoned" not in node.annotations.get(names.ROLLOUT, "") for node in stage.world.store.nodes.values())

    play(story, operator=False, policy={"autoUpgrade": False}, policy_file=POLICY, budget=0)


def test_an_admins_cordon_is_not_taken_for_ours_after_a_time_as_follower() -> None:
    """Our record of a node that gpu-operator has ended is shortened, so that a later cordon stays when ours leads again."""

    async def story(stage: Stage) -> None:
        world = stage.world
        world.new_driver("two")
        await stage.until(lambda: "pod-deletion-required" in stage.states().values(), "a node in the middle")
        (name, *_) = [node for node, state in stage.states().items() if state == "pod-deletion-required"]
        stage.start_operator()
        await stage.until_done()
        await asyncio.sleep(10)
        node = world.store.nodes[name]
        node.unschedulable = True
        world.store.node_written(node)
        await stage.kill_operator()
        await stage.until(lambda: stage.role is Role.LEAD, "ours leads", 30)
        await asyncio.sleep(60)
        assert world.store.nodes[name].unschedulable

    play(story, operator=False, pod_grace=10.0)


def test_jobs_that_the_policy_waits_for_keep_everybody() -> None:
    """While gpu-operator waits for jobs nobody is evicted; when they have ended ours is."""
    policy = {**POLICY, "waitForCompletion": {"podSelector": "job=training"}}

    async def story(stage: Stage) -> None:
        stage.world.new_driver("two")
        await stage.until(lambda: list(stage.states().values()).count("wait-for-jobs-required") == 2, "two nodes wait")
        await asyncio.sleep(60)
        assert not stage.world.deeds("evict")
        assert "wait for pods to finish" in stage.controller.stays["gpu-1"].sentence
        for deployment in list(stage.world.store.deployments.values()):
            if deployment.name.startswith("train"):
                deployment.replicas = 0
        for pod in list(stage.world.store.pods.values()):
            if "train" in pod.name:
                stage.world.server.delete_pod(pod)
        await stage.until_done()
        assert stage.evicted() == {(CONTROLLER, "hidden"): 4}

    play(story, policy=policy)


def test_who_cannot_go_is_said_and_tried_again() -> None:
    """A pod of its own that only ours knows holds nothing up, is named with its setting, and the others are not evicted in vain."""

    async def story(stage: Stage) -> None:
        stage.world.add_pod("by-hand", PodSpec(runtime_class="nvidia"), node="gpu-1")
        await asyncio.sleep(5)
        stage.world.new_driver("two")
        await stage.until(lambda: stage.states()["gpu-1"] == "pod-deletion-required", "it is being freed")
        await asyncio.sleep(1)
        stay = stage.controller.stays["gpu-1"]
        assert stay.because.value == "NotFreed"
        assert "pod default/by-hand runs under the runtime class nvidia" in stay.sentence
        assert "podDeletion.force: true" in stay.sentence

    play(story, pod_grace=20.0)


def test_a_right_that_is_given_later_is_used() -> None:
    """A follower that may not do something yet says so, tries it again, and goes on when it may; nothing else would wake it."""

    async def story(stage: Stage) -> None:
        world = stage.world
        whole = world.account.rules
        world.account.rules = tuple(rule for rule in whole if "pods/eviction" not in rule.resources)
        world.new_driver("two")
        await stage.until(lambda: stage.states()["gpu-1"] == "pod-deletion-required", "it is being freed")
        await asyncio.sleep(5)
        stay = stage.controller.stays["gpu-1"]
        assert (stay.because, "forbidden" in stay.sentence) == (Because.NOT_FREED, True), stay
        world.account.rules = whole
        await stage.until(lambda: stage.evicted()[CONTROLLER, "hidden"] >= 1, "it is tried again", 120)

    play(story, pod_grace=300.0)


def test_a_look_for_jobs_that_is_refused_is_told_and_made_again() -> None:
    """A leader waits for jobs without a limit: what keeps it from seeing them is in the sentence, and ends by itself."""

    async def story(stage: Stage) -> None:
        world = stage.world
        words = "pods is forbidden: no right today"
        refused = world.faults.on("pods_on", Fail(lambda: Forbidden(words)), skip=1, times=2)  # the first look is before the start
        world.new_driver("two")
        await stage.until(lambda: refused.acted == 1, "it is refused")
        await asyncio.sleep(1)
        stay = stage.controller.stays["gpu-1"]
        assert (stay.because, words in stay.sentence) == (Because.WAITING_FOR_JOBS, True), stay
        await stage.until_done()
        assert refused.acted == 2

    play(story, operator=False, nodes=1, policy={**POLICY, "maxUnavailable": 1, "waitForCompletion": {"podSelector": "job=other"}})


@pytest.mark.parametrize(("choice", "operator", "role"), [(Choice.LEAD, True, Role.LEAD), (Choice.FOLLOW, False, Role.FOLLOW)])
def test_a_person_sets_the_role(choice: Choice, operator: bool, role: Role) -> None:
    """ROLE=lead and ROLE=follow win over what the Lease says."""

    async def story(stage: Stage) -> None:
        assert stage.role is role

    play(story, choice=choice, operator=operator)


def test_a_lease_that_cannot_be_read_makes_a_follower() -> None:
    """Who may not know whether gpu-operator lives does not lead; it says so, and leads as soon as it knows."""

    async def story(stage: Stage) -> None:
        world = stage.world
        assert stage.role is Role.LEAD
        rules = world.account.namespace_rules
        world.account.namespace_rules = {
            space: tuple(rule for rule in some if "leases" not in rule.resources or space == OWN_NAMESPACE) for space, some in rules.items()
        }
        await stage.until(lambda: stage.role is Role.FOLLOW, "ours follows", 30)
        assert "forbidden" in stage.controller.role.standing.sentence
        world.account.namespace_rules = rules
        await stage.until(lambda: stage.role is Role.LEAD, "ours leads", 30)

    play(story, operator=False)


def test_the_role_is_seen_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    """`status --all`, its document, the metric and the condition all say that it follows, and whom."""

    async def story(stage: Stage) -> None:
        stage.world.new_driver("two")
        await asyncio.sleep(12)
        seen = await look(stage.world)
        assert seen.leader.is_following
        assert "is held by op-1" in seen.leader.role
        assert row(seen, "gpu-4").sentence == "gpu-operator begins it when it is its turn"
        fleetstatus.show(seen, "table")
        assert "FOLLOWS: no state label is written; gpu-operator lives and leads" in capsys.readouterr().out
        assert fleetstatus.document(seen)["leader"]["role"] == "follow"
        assert stage.replica is not None
        assert Scraped(stage.replica)["following"] == 1
        source = stage.world.store.policies["ClusterPolicy", "cluster-policy"]
        assert source.conditions["DriverManagerLeads"] == ("False", "Follows")
        assert source.conditions["DriverManagerRolledOut"] == ("False", "InProgress")
        await stage.kill_operator()
        await stage.until_done()
        await asyncio.sleep(70)
        source = stage.world.store.policies["ClusterPolicy", "cluster-policy"]
        assert source.conditions["DriverManagerLeads"] == ("True", "Leads")
        assert source.conditions["DriverManagerRolledOut"] == ("True", "Complete")
        assert Scraped(stage.replica)["following"] == 0

    play(story)


async def _one_life(life: AgentLife, settings: ControllerSettings) -> None:
    with contextlib.suppress(DriverManagerError):
        await life.run(Replica(life.fleet, life.clock, settings).run())


@pytest.mark.parametrize("seed", range(12))
def test_killed_as_follower_and_as_leader(seed: int) -> None:
    """Lives of ours are killed at their requests while gpu-operator comes and goes: each node ends well, nothing is done twice."""

    async def whole() -> None:
        stage = Stage(nodes=3)
        stage.start_operator()

        async def ours() -> None:
            for number in range(1000):
                life = stage.world.controller(kill_at=20 + 13 * seed + 7 * number if number < 4 else None)
                await _one_life(life, ControllerSettings(identity=f"one-{number}", lease_namespace=OWN_NAMESPACE))
                await asyncio.sleep(2)

        task = asyncio.create_task(ours())
        await asyncio.sleep(30)
        stage.world.new_driver("two")
        await asyncio.sleep(10 + 3 * seed)
        await stage.kill_operator()
        stage.replica = Replica(stage.world.client(), stage.world.controller().clock, ControllerSettings())
        await stage.until_done()
        await asyncio.sleep(60)
        stage.assert_nothing_twice()
        task.cancel()

    run_virtual(whole())


def test_two_roles_are_not_mixed_up_in_one_decision() -> None:
    """What a follower has found freed is not taken for the end of a leader's work: the GPU pods are still evicted."""

    async def story(stage: Stage) -> None:
        stage.world.new_driver("two")
        await stage.until(lambda: "pod-deletion-required" in stage.states().values(), "a node is being freed")
        await stage.kill_operator()
        await stage.until(lambda: stage.role is Role.LEAD, "ours leads", 30)
        await asyncio.sleep(5)
        name = next(node for node, state in stage.states().items() if state == "pod-deletion-required")
        assert "train" in stage.controller.stays[name].sentence
        assert len([pod for pod in stage.world.driver_pods(name) if pod.marked_at is None and pod.spec.image == "driver:one"]) == 1

    play(story, pod_grace=120.0, policy={**POLICY, "podDeletion": {"timeoutSeconds": 600}})


@pytest.mark.parametrize("moment", [None, 3, 9, 15, 30])
def test_a_follower_keeps_daemon_sets_off_too(moment: int | None) -> None:
    """An exporter that tolerates everything is parked while gpu-operator has the node; it is everywhere after, whoever led to the end."""

    async def story(stage: Stage) -> None:
        world = stage.world
        before = {name: (dict(node.labels), node.taints) for name, node in world.store.nodes.items()}
        exporter = add_exporter(world, GATE)
        await asyncio.sleep(10)
        parked: set[str] = set()
        beside: list[str] = []

        def see(one: Object, change: ChangeKind) -> None:
            if isinstance(one, Node) and names.PARKED in one.labels:
                parked.add(one.name)
            if isinstance(one, Pod) and world.gpu_nodes.is_driver(one) and one.marked_at is not None:
                running = [pod for pod in world.store.pods_bound_to(one.node_name or "") if pod.owner and pod.owner.name == exporter.name]
                beside.extend(pod.name for pod in running if pod.marked_at is None and not pod.is_over)

        world.on_change(see)
        world.new_driver("two")
        if moment is not None:
            await asyncio.sleep(moment)
            await stage.kill_operator()
        await stage.until_done()
        await asyncio.sleep(60)
        assert parked == set(world.store.nodes)
        assert not beside, "none is there when the driver goes"
        there = [pod for pod in world.store.pods.values() if pod.owner is not None and pod.owner.name == exporter.name]
        assert sorted(pod.node_name or "" for pod in there if pod.is_ready) == sorted(world.store.nodes)
        after = {name: ({**node.labels, names.UPGRADE_STATE: "upgrade-done"}, node.taints) for name, node in world.store.nodes.items()}
        assert after == {name: ({**labels, names.UPGRADE_STATE: "upgrade-done"}, taints) for name, (labels, taints) in before.items()}
        if moment is None:
            written = stage.patches(CONTROLLER)
            assert not [patch for patch in written if names.UPGRADE_STATE in patch.labels or patch.unschedulable is not None]
        stage.assert_nothing_twice()

    play(story, pod_grace=8.0)


# What the agent reports ---------------------------------------------------------------------------------------------


def status_of(world: FleetWorld, name: str, *uids: str) -> None:
    """The agent on a node writes that these pods hold a GPU."""
    blockers = tuple(Blocker("process", "77 python3", "holds /dev/nvidia0", uid) for uid in uids)
    waiting = Waiting("held-by-process", "waits for processes", (*blockers, Blocker("process", "5 sshd", "holds /dev/nvidia1")))
    node = world.store.nodes[name]
    node.annotations[names.STATUS] = status_text(phase="freeing", run="r", since="s", waiting=waiting)
    world.store.node_written(node)


@pytest.mark.parametrize("operator", [False, True])
def test_a_hidden_holder_that_the_agent_names_is_evicted(operator: bool) -> None:
    """Decision 35: of the pods that it names those on the node that the table allows go, once; the rest is shown. Led by whomever."""

    async def story(stage: Stage) -> None:
        world = stage.world
        world.behave("gpu-1", start_seconds=120.0)
        hidden = world.add_deployment("notebook", PodSpec(node_selector={HOSTNAME: "gpu-1"}), node="gpu-1")
        other = world.add_deployment("elsewhere", PodSpec(node_selector={HOSTNAME: "gpu-2"}), node="gpu-2")
        world.add_pod("by-hand", node="gpu-1")
        await asyncio.sleep(5)
        world.new_driver("two")

        def is_waiting() -> bool:
            return stage.states()["gpu-1"] == "pod-restart-required" and world.driver_pods("gpu-1")[0].spec.image == "driver:two"

        await stage.until(is_waiting, "its agent waits")
        uids = {pod.name.split("-")[0]: pod.uid for pod in world.store.pods.values()}
        status_of(world, "gpu-1", uids["notebook"], uids["elsewhere"], "uid-of-nobody")
        await asyncio.sleep(5)
        evicted = [deed.target for deed in world.deeds("evict", "gpu-1") if deed.who == CONTROLLER]
        named = [target for target in evicted if "render" not in target and "train" not in target]
        assert len(named) == 1
        assert hidden.name in named[0]
        assert [pod for pod in world.store.pods.values() if other.name in pod.name]
        sentence = stage.controller.stays["gpu-1"].sentence
        assert "5 sshd (holds /dev/nvidia1)" in sentence
        status_of(world, "gpu-1", uids["by"])
        await asyncio.sleep(5)
        assert "by-hand" in stage.controller.stays["gpu-1"].sentence
        assert "podDeletion.force: true" in stage.controller.stays["gpu-1"].sentence
        await stage.until_done()
        stage.assert_nothing_twice()

    play(story, operator=operator)


def test_other_words_for_the_same_role_end_no_work() -> None:
    """It leads because there is no Lease of gpu-operator, then because that was given up: what it is at on a node goes on."""
    world = FleetWorld(1, nodes=1, policy={"autoUpgrade": True, "maxUnavailable": "100%"}, budget=0)

    def looks() -> int:
        return sum(call.name == "pods_on" for call in world.faults.calls)

    async def story(world: FleetWorld, replica: Replica) -> None:
        world.new_driver("two")
        await until(lambda: replica.controller.stays["gpu-1"].because is Because.BLOCKED_BY_BUDGET, "the freeing")
        before, said = looks(), replica.controller.role.standing
        lease = LeaseView(namespace="gpu-operator", name=names.OPERATOR_LEASE, duration_seconds=15)
        await world.client(world.add_account(OPERATOR, EVERYTHING)).write_lease(lease)
        await until(lambda: replica.controller.role.standing != said, "other words")
        assert replica.controller.role.is_leading
        await asyncio.sleep(5)
        assert looks() == before

    play_led(world, story)
