"""The DRA plugin and the holders of claims: the order of specification 8, and each of its seven deadlocks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from driver_manager import names
from driver_manager.core.snapshot import Owner, Toleration
from driver_manager.errors import EvictionBlocked
from driver_manager.sim.faults import Do, Fail, When
from driver_manager.sim.objects import Pod, PodSpec
from driver_manager.sim.scenarios import NAMESPACE, NODE, Scenario
from tests.agent.stage import DRA_LABEL, DRA_NAMESPACE, PLUGIN, Stage, claim_holder, play, small_world, with_dra
from tests.agent.test_owners import without

CUSTOM = "example.com/gpu"
COMPUTE_DOMAIN = "compute-domain.nvidia.com"


def plugin_of(mark: str) -> Scenario:
    """A node with a DRA plugin that is found by one mark."""
    scenario = small_world()
    label = {"operand": DRA_LABEL, "custom": CUSTOM, "client": names.DEPLOY_CLIENT, "standalone": ""}[mark]
    if label:
        scenario.world.edit_node(NODE, labels={label: "true"})
    spec = replace(PLUGIN, node_selector={label: "true"}) if label else PLUGIN
    scenario.world.add_daemon_set("dra-plugin", spec, namespace=DRA_NAMESPACE)
    return scenario


def plugin(stage: Stage) -> Pod:
    """The plugin's pod."""
    return stage.world.pod(DRA_NAMESPACE, "dra-plugin")


def when(stage: Stage, what: str, pod: Pod) -> float:
    """When a pod was asked to go (`delete`) or was out of the API (`gone`)."""
    diary = stage.world.store.diary
    return next(one.at for one in diary if one.what == what and (one.detail == pod.uid or (what == "delete" and one.target == pod.ref)))


async def assert_order(stage: Stage, old: Pod, *holders: Pod) -> None:
    """Claim holders were gone, then the plugin was told to go and was gone, then the driver was unloaded, then a new plugin came."""
    told, gone = when(stage, "delete", old), when(stage, "gone", old)
    assert all(when(stage, "gone", each) < told for each in holders)
    assert told < gone < stage.unloads()[0][0]
    await asyncio.sleep(2.0)
    (new,) = [pod for pod in stage.world.store.pods_bound_to(NODE) if pod.name.startswith("dra-plugin")]
    assert new.uid != old.uid
    made = next(one.at for one in stage.world.store.diary if one.what == "create" and one.target == new.ref)
    assert made > stage.unloads()[-1][0]


# The order ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mark", ["operand", "custom", "client", "standalone"])
def test_n42_the_order_whatever_marks_the_plugin(mark: str) -> None:
    """Proposal D, N42, decision 46: holders, proof, plugin, unload, restore; the old plugin is gone before, a new one there after."""

    async def story(stage: Stage) -> None:
        holders = [
            claim_holder(stage.world, "user-0", stop_seconds=3.0),
            claim_holder(stage.world, "admin-0", is_admin=True),
            claim_holder(stage.world, "channel-0", driver=COMPUTE_DOMAIN),
        ]
        bystander = claim_holder(stage.world, "other-0", driver="gpu.amd.com", devices=())
        old = plugin(stage)
        run = await stage.run(custom_label=CUSTOM if mark == "custom" else "")
        assert run.code == 0, run.sentence
        stage.assert_free()
        await assert_order(stage, old, *holders)
        assert {each.ref for each in holders} < set(stage.evicted)
        assert (old.ref in stage.evicted) == (mark == "standalone")
        assert not bystander.is_gone
        assert (
            run.steps.index("FreePods") < run.steps.index("ProveNoClaims") < run.steps.index("PauseLast") < run.steps.index("UnloadModule")
        )
        await stage.assert_put_back()

    play(story, plugin_of(mark))


@pytest.mark.parametrize("toleration", [Toleration("", "Exists"), Toleration(names.GPU_TAINT, "Exists")])
def test_n42_a_standalone_plugin_that_tolerates_the_taint_is_refused(toleration: Toleration) -> None:
    """N42, N02: a standalone plugin that would come back at once is refused with its owner before anything is changed."""

    async def story(stage: Stage) -> None:
        holder = claim_holder(stage.world, "user-0")
        run = await stage.run()
        assert run.code == 65
        assert f"DaemonSet {DRA_NAMESPACE}/dra-plugin" in run.sentence
        assert (stage.evicted, stage.node_writes()) == ([], [])
        assert holder.marked_at is None
        stage.assert_host_untouched()

    scenario = small_world()
    scenario.world.add_daemon_set("dra-plugin", replace(PLUGIN, tolerations=(toleration,)), namespace=DRA_NAMESPACE)
    play(story, scenario)


def test_proposal_d_consumers_of_the_plugins_label_that_hold_claims() -> None:
    """Decision 46: where plugin and a claim-holding exporter share the client label, the exporter goes by the taint first."""

    async def story(stage: Stage) -> None:
        stage.world.add_claim("watch", namespace="monitoring", is_admin=True)
        spec = PodSpec(claims=("watch",), node_selector={names.DEPLOY_CLIENT: "true"}, stop_seconds=0.5, devices=("/dev/nvidiactl",))
        stage.world.add_daemon_set("exporter", spec, namespace="monitoring")
        old, exporter = plugin(stage), stage.world.pod("monitoring", "exporter")
        run = await stage.run()
        assert run.code == 0, run.sentence
        await assert_order(stage, old, exporter)
        await stage.assert_put_back()

    play(story, plugin_of("client"))


def test_n42_nothing_loaded_recycles_only_a_ready_plugin_behind_a_label() -> None:
    """Spec 8, R11: with no driver loaded nobody is evicted and no label of a standalone plugin's is written."""

    async def story(stage: Stage) -> None:
        holder = claim_holder(stage.world, "user-0")
        stage.world.machine(NODE).modules.clear()
        stage.world.machine(NODE).mounts.clear()
        run = await stage.run()
        assert run.code == 0
        assert (stage.evicted, stage.node_writes()) == ([], [])
        assert not holder.is_gone
        assert not plugin(stage).is_gone

    play(story, plugin_of("operand"))


@pytest.mark.parametrize("mark", ["client", "standalone"])
def test_n42_a_plugin_that_keeps_the_old_driver_is_named(mark: str) -> None:
    """N42, R11: a plugin whose driver root is detached and that no label of its own takes off is left, and named with what to do."""

    async def story(stage: Stage) -> None:
        stage.world.machine(NODE).modules.clear()
        _, plan = await stage.start().agent.plan()
        (note,) = [note for note in plan.notes if "DRA plugin" in note]
        assert plugin(stage).ref in note
        run = await stage.run()
        assert run.code == 0
        assert (stage.evicted, stage.node_writes()) == ([], [])
        assert not plugin(stage).is_gone

    play(story, plugin_of(mark))


# Who may be read ----------------------------------------------------------------------------------------------------


def test_n04_each_way_to_a_claim() -> None:
    """N04: claims that NVIDIA's drivers served make a pod a consumer, those of others do not, on a node without any plugin too."""

    async def story(stage: Stage) -> None:
        mine = claim_holder(stage.world, "user-0", devices=())
        other = claim_holder(stage.world, "other-0", driver="gpu.amd.com", devices=())
        gone = stage.world.add_pod("gone-0", PodSpec(claims=("never",)), node=NODE, owner=Owner("Job", "j"))
        _, plan = await stage.start().agent.plan()
        reasons = {each.pod.ref: (str(each.action), str(each.reason)) for each in plan.verdicts}
        assert reasons[mine.ref] == ("evict", "dra")
        assert reasons[other.ref] == reasons[gone.ref] == ("keep", "no-gpu")

    play(story)


@pytest.mark.parametrize("build", [small_world, lambda: with_dra(small_world())])
def test_n04_unreadable_claims_fail_closed(build: Callable[[], Scenario]) -> None:
    """N04: where claims cannot be read the run ends with 77 before anything is changed, naming the claims."""

    async def story(stage: Stage) -> None:
        holder = claim_holder(stage.world, "user-0")
        stage.scenario.account.rules = without("get", "resourceclaims")
        run = await stage.run()
        assert run.code == 77
        assert "resourceclaims" in run.sentence
        assert "default/user-0" in run.sentence
        assert (stage.evicted, stage.node_writes()) == ([], [])
        assert holder.marked_at is None
        stage.assert_host_untouched()
        await stage.assert_put_back()

    play(story, build())


def test_n04_claims_that_become_unreadable() -> None:
    """N04: where the right is lost in mid-run nothing is unloaded, the plugin stays, and everything is put back."""

    async def story(stage: Stage) -> None:
        claim_holder(stage.world, "user-0", stop_seconds=5.0)
        old = plugin(stage)
        late = Owner("StatefulSet", "late")
        stage.later(2.0, lambda: setattr(stage.scenario.account, "rules", without("get", "resourceclaims")))
        stage.later(2.0, lambda: stage.world.add_pod("late-0", PodSpec(claims=("never",)), node=NODE, owner=late))
        run = await stage.run()
        assert run.code == 77
        assert not old.is_gone
        assert stage.unloads() == []
        await stage.assert_put_back()

    play(story, plugin_of("operand"))


def test_n04_a_cluster_without_the_api() -> None:
    """N04: on a cluster without resource.k8s.io the run does its work, though the account knows no such permission."""

    async def story(stage: Stage) -> None:
        stage.world.store.has_claims_api = False
        stage.scenario.account.rules = without("get", "resourceclaims")
        run = await stage.run()
        assert run.code == 0
        stage.assert_free()
        await stage.assert_put_back()

    play(story)


# The seven deadlocks ------------------------------------------------------------------------------------------------


def test_deadlock_1_the_plugin_before_its_holders() -> None:
    """Deadlock 1: a holder that is ending already, behind a long grace, keeps the plugin; the label is not paused before it is gone."""

    async def story(stage: Stage) -> None:
        slow = claim_holder(stage.world, "slow-0", stop_seconds=40.0, grace_seconds=60)
        old = plugin(stage)
        stage.world.delete_pod(slow)
        seen: list[str] = []
        stage.later(39.0, lambda: seen.append(stage.world.node(NODE).labels[DRA_LABEL]))
        run = await stage.run()
        assert run.code == 0
        assert seen == ["true"]
        assert slow.ref not in stage.evicted
        await assert_order(stage, old, slow)
        await stage.assert_put_back()

    play(story, plugin_of("operand"))


def test_deadlock_2_a_driverless_node() -> None:
    """Deadlock 2: with no driver loaded holders that need the plugin are left; only the plugin is recycled, and the run succeeds."""

    async def story(stage: Stage) -> None:
        holders = [claim_holder(stage.world, f"user-{number}") for number in range(2)]
        stage.world.machine(NODE).modules.clear()
        old = plugin(stage)
        run = await stage.run()
        assert run.code == 0
        assert stage.evicted == []
        assert not any(holder.marked_at for holder in holders)
        assert old.is_gone
        await stage.assert_put_back()

    play(story, with_dra(small_world()))


def test_deadlock_3_a_drain_after_the_plugin() -> None:
    """Deadlock 3: the drain of the whole node, which comes after the plugin has gone, takes no pod that needs it to end."""

    async def story(stage: Stage) -> None:
        world = stage.world
        cpu = world.add_pod("cpu", PodSpec(), node=NODE, owner=Owner("ReplicaSet", "cpu"))
        user = world.machine(NODE).add_process("stray", ("/dev/nvidia0",))
        arrived: list[Pod] = []
        old = plugin(stage)
        world.store.pod_listeners.append(
            lambda pod: arrived.append(claim_holder(world, "late-0", devices=())) if pod is old and pod.is_gone and not arrived else None
        )
        stage.later(20.0, lambda: world.machine(NODE).end_process(user.pid))
        run = await stage.run(enable_auto_drain=True)
        assert run.code == 75, run.sentence
        assert "late-0" in run.sentence
        assert arrived[0].ref not in stage.evicted
        assert stage.unloads() == []
        assert cpu.ref not in stage.evicted
        await stage.assert_put_back()

    play(story, plugin_of("operand"))


@pytest.mark.parametrize("is_daemon", [True, False])
def test_deadlock_4_one_criterion_for_gate_and_eviction(is_daemon: bool) -> None:
    """Deadlock 4: admin-access holders, a DaemonSet's too, are evicted by the proof's own criterion, also on a policy-owned node."""

    async def story(stage: Stage) -> None:
        stage.world.add_claim("watch", namespace="monitoring", is_admin=True)
        spec = PodSpec(claims=("watch",), stop_seconds=0.5)
        if is_daemon:
            stage.world.add_daemon_set("watcher", spec, namespace="monitoring")
        else:
            stage.world.add_pod("watcher-0", spec, node=NODE, namespace="monitoring", owner=Owner("StatefulSet", "watcher"))
        old, watcher = plugin(stage), stage.world.pod("monitoring", "watcher")
        run = await stage.run()
        assert run.code == 0, run.sentence
        assert watcher.ref in stage.evicted
        await assert_order(stage, old, watcher)
        await stage.assert_put_back()

    scenario = small_world(gpu_pods=0)
    scenario.world.edit_node(NODE, annotations={names.UPGRADE_ENABLED: "true"})
    play(story, with_dra(scenario))


def test_deadlock_5_a_holder_that_stays() -> None:
    """Deadlock 5: while one holder cannot go the plugin is never told to go; the run ends at its limit with the holder, all put back."""

    async def story(stage: Stage) -> None:
        holder = claim_holder(stage.world, "web-0", labels={"app": "web"})
        stage.world.add_budget("web", {"app": "web"}, min_available=1)
        old = plugin(stage)
        run = await stage.run(drain_timeout=20.0)
        assert run.code == 75
        assert holder.ref in run.sentence
        assert (holder.marked_at, old.marked_at) == (None, None)
        await stage.assert_put_back()

    play(story, plugin_of("operand"))


@pytest.mark.parametrize("has_claim", [True, False])
def test_deadlock_6_no_claim_holder_is_ended_by_force(has_claim: bool) -> None:
    """Deadlock 6: FORCE_DELETE_STUCK_PODS spares a holder of a claim, whose kubelet still has it prepared; it is named and left."""

    async def story(stage: Stage) -> None:
        kind: dict[str, Any] = {} if has_claim else {"claims": (), "resources": frozenset({"nvidia.com/gpu"})}
        stuck = claim_holder(stage.world, "stuck-0", stop_seconds=None, devices=(), **kind)
        old = plugin(stage)
        run = await stage.run(force_delete_stuck_pods=True, drain_timeout=150.0)
        assert run.code == (75 if has_claim else 0), run.sentence
        assert stuck.is_gone is not has_claim
        if has_claim:
            assert stuck.ref in run.sentence
            assert stuck.deletion_grace == 30
            assert old.marked_at is None
            assert stage.unloads() == []
        assert names.RECORD not in stage.world.node(NODE).annotations

    play(story, plugin_of("operand"))


@pytest.mark.parametrize("then", ["restore", "run"])
def test_deadlock_7_a_left_over_pause_of_the_plugin(then: str) -> None:
    """Deadlock 7: killed after the plugin's pause, the next run or `restore` puts the label back, and the plugin is there again."""

    async def story(stage: Stage) -> None:
        claim_holder(stage.world, "user-0")
        old = plugin(stage)
        first = stage.start()
        rule = stage.world.faults.on("unload_module", Do(first.life.kill))
        first.outcome = await first.life.run(first.agent.uninstall(asyncio.Event()))
        assert first.life.was_killed
        assert rule.acted
        assert stage.world.node(NODE).labels[DRA_LABEL] == names.PAUSED
        assert old.is_gone
        second = await (stage.restore() if then == "restore" else stage.run())
        assert second.code == 0, second.sentence
        await asyncio.sleep(2.0)
        assert plugin(stage).is_ready
        await stage.assert_put_back()

    play(story, plugin_of("operand"))


def test_deadlock_7_a_plugin_that_waits_in_its_init_container() -> None:
    """Deadlock 7: a plugin that is not ready, blocked in its init container, is paused and waited for like any other."""

    async def story(stage: Stage) -> None:
        old = plugin(stage)
        stage.world.hold_in_init(old)
        run = await stage.run()
        assert run.code == 0
        await assert_order(stage, old)
        await stage.assert_put_back()

    play(story, plugin_of("operand"))


# Who comes meanwhile ------------------------------------------------------------------------------------------------


def newcomer(stage: Stage, name: str = "late-0", **spec: Any) -> Callable[[], None]:
    """Makes a claim holder appear, bound past the scheduler."""

    def come() -> None:
        stage.world.add_claim(name)
        made = PodSpec(**{"claims": (name,), "stop_seconds": 1.0, **spec})
        stage.world.add_pod(name, made, node=NODE, owner=Owner("StatefulSet", "late"), is_running=False)

    return come


def test_a_holder_that_comes_before_the_plugin_goes_is_freed() -> None:
    """Spec 8, R1: a claim holder that arrives while the others end is found by the proof and freed while the plugin is there."""

    async def story(stage: Stage) -> None:
        first = claim_holder(stage.world, "user-0", stop_seconds=5.0)
        old = plugin(stage)
        stage.later(2.0, newcomer(stage))
        run = await stage.run()
        assert run.code == 0, run.sentence
        assert "default/late-0" in stage.evicted
        uid = next(uid for _, ref, uid in stage.world.evictions if ref == "default/late-0")
        gone = {one.detail: one.at for one in stage.world.store.diary if one.what == "gone"}
        assert gone[uid] < when(stage, "delete", old)
        await assert_order(stage, old, first)
        await stage.assert_put_back()

    play(story, plugin_of("operand"))


@pytest.mark.parametrize("mark", ["operand", "standalone"])
def test_a_holder_that_comes_after_the_plugin_has_gone(mark: str) -> None:
    """Spec 8: a claim holder that arrives when the plugin is gone could never end: nobody touches it, 75, everything is put back."""

    async def story(stage: Stage) -> None:
        old = plugin(stage)
        came: list[bool] = []
        come = newcomer(stage)

        def watch(pod: Pod) -> None:
            if pod is old and pod.is_gone and not came:
                came.append(True)
                come()

        stage.world.store.pod_listeners.append(watch)
        run = await stage.run()
        assert run.code == 75
        assert "default/late-0" in run.sentence
        assert "default/late-0" not in stage.evicted
        assert stage.unloads() == []
        await asyncio.sleep(3.0)
        assert plugin(stage).is_ready
        assert stage.world.pod("default", "late-0").phase == "Running", "it gets its device when the plugin is back"
        await stage.assert_put_back()

    play(story, plugin_of(mark))


def test_holders_that_keep_coming() -> None:
    """R8: claim holders that come again and again end the proof after a few rounds, with their owner; the plugin stays."""

    async def story(stage: Stage) -> None:
        old = plugin(stage)
        numbers = iter(range(100))
        stage.world.faults.on("claims", Do(lambda: newcomer(stage, f"late-{next(numbers)}")()), when=When.BEFORE, times=None)
        claim_holder(stage.world, "user-0")
        stage.world.faults.on("pods_on", Do(lambda: newcomer(stage, f"late-{next(numbers)}")()), skip=1, times=None)
        run = await stage.run()
        assert run.code == 75
        assert "of StatefulSet late" in run.sentence
        assert old.marked_at is None
        assert stage.unloads() == []

    play(story, plugin_of("operand"))


def test_n12_a_claim_holder_that_a_webhook_keeps() -> None:
    """N12 with DRA: a launcher with a claim whose eviction is refused stops the run before any write; plugin and holders stay."""

    async def story(stage: Stage) -> None:
        holder = claim_holder(stage.world, "virt-launcher-vm-x", owner=Owner("VirtualMachineInstance", "vm"))
        stage.world.faults.on(
            "evict",
            Fail(lambda: EvictionBlocked("admission webhook denied the request")),
            where=lambda call: call.args["pod"] == holder.ref,
            times=None,
        )
        old = plugin(stage)
        run = await stage.run()
        assert run.code == 65
        assert "the virtual machine vm" in run.sentence
        assert stage.node_writes() == []
        assert (holder.marked_at, old.marked_at) == (None, None)

    play(story, plugin_of("operand"))


def test_the_daemon_of_a_compute_domain_leaves_with_the_last_user() -> None:
    """Spec 8: a compute domain's daemon, which tolerates everything, goes when the plugin takes its label off, before the plugin."""

    async def story(stage: Stage) -> None:
        world = stage.world
        world.add_claim("cd", namespace=NAMESPACE, drivers=frozenset({COMPUTE_DOMAIN}))
        spec = PodSpec(
            claims=("cd",), node_selector={names.COMPUTE_DOMAIN_LABEL: "id"}, tolerations=(Toleration("", "Exists"),), stop_seconds=0.5
        )
        world.edit_node(NODE, labels={names.COMPUTE_DOMAIN_LABEL: "id"})
        world.add_daemon_set("computedomain-daemon", spec, namespace=NAMESPACE)
        user, daemon, old = (
            claim_holder(world, "channel-0", driver=COMPUTE_DOMAIN),
            world.pod(NAMESPACE, "computedomain-daemon"),
            plugin(stage),
        )

        def leave(pod: Pod) -> None:
            if pod is user and pod.is_gone:
                world.edit_node(NODE, labels={names.COMPUTE_DOMAIN_LABEL: None})

        world.store.pod_listeners.append(leave)
        run = await stage.run()
        assert run.code == 0, run.sentence
        assert daemon.ref not in stage.evicted
        await assert_order(stage, old, user, daemon)

    play(story, plugin_of("operand"))
