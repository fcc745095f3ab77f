"""Consumers of every kind on the simulated node: proposals B and C, those that hide, those that are stuck, and virtual machines."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from driver_manager import names
from driver_manager.core.consumers import Action
from driver_manager.core.selectors import parse_selector
from driver_manager.core.snapshot import Owner, Toleration
from driver_manager.errors import ClusterError, EvictionBlocked
from driver_manager.sim.access import STOCK_ROLE, rule
from driver_manager.sim.faults import Do, Fail
from driver_manager.sim.objects import Pod, PodSpec
from driver_manager.sim.scenarios import NODE, Scenario
from tests.agent.stage import DRA_NAMESPACE, PLUGIN, Stage, claim_holder, gpu_pod, play, small_world, with_dra

CLIENT = {names.GPU_CLIENT: "true"}
MONITORING = "monitoring"
EXPORTER = PodSpec(annotations=CLIENT, devices=("/dev/nvidiactl",), stop_seconds=0.5, command="exporter")


def exporter(stage: Stage, spec: PodSpec = EXPORTER) -> Pod:
    """A standalone DaemonSet exporter's pod on the node."""
    stage.world.add_daemon_set("exporter", spec, namespace=MONITORING)
    return stage.world.pod(MONITORING, "exporter")


def there(stage: Stage, start: str) -> list[Pod]:
    """Pods on the node whose name begins so."""
    return [pod for pod in stage.world.store.pods_bound_to(NODE) if pod.name.startswith(start)]


def made_between(stage: Stage, start: str, since: float, until: float) -> list[str]:
    """Pods that somebody made for the node in that time."""
    diary = stage.world.store.diary
    return [one.target for one in diary if one.what == "create" and start in one.target and one.detail == NODE and since < one.at < until]


def gone_at(stage: Stage, pod: Pod) -> float:
    """When a pod left the API."""
    return next(one.at for one in stage.world.store.diary if one.what == "gone" and one.detail == pod.uid)


# What is found ------------------------------------------------------------------------------------------------------


def test_n01_runtime_class_mount_and_selector() -> None:
    """N01: the runtime class, the device mount and the label are freed with a reason each, the CPU pod and all of /dev stay."""

    async def story(stage: Stage) -> None:
        world = stage.world
        specs = {
            "a": PodSpec(runtime_class="nvidia"), "b": PodSpec(host_paths=("/dev/nvidia0",)), "c": PodSpec(labels={"role": "gpu-user"}),
            "d": PodSpec(), "e": PodSpec(host_paths=("/dev",)), "f": PodSpec(runtime_class="kata"),
        }  # fmt: skip
        for name, spec in specs.items():
            world.add_pod(name, replace(spec, stop_seconds=0.2), node=NODE, owner=Owner("ReplicaSet", name))
        given: dict[str, Any] = {"consumer_selector": parse_selector("role=gpu-user")}
        _, plan = await stage.start(**given).agent.plan()
        reasons = {each.pod.name: str(each.reason) for each in plan.verdicts if each.pod.name in specs}
        assert reasons == {"a": "runtime-class", "b": "host-device", "c": "selector", "d": "no-gpu", "e": "no-gpu", "f": "no-gpu"}
        planned = [each.pod.ref for each in plan.verdicts if each.action is Action.EVICT]
        assert (await stage.run(**given)).code == 0
        assert sorted(stage.evicted) == sorted(planned)
        assert [pod.name for pod in world.pods(NODE) if pod.name in specs] == ["d", "e", "f"]
        await stage.assert_put_back()

    play(story, small_world(gpu_pods=0))


@pytest.mark.parametrize(("may_list", "is_evicted"), [(True, True), (False, False)])
def test_proposal_c_runtime_classes_by_handler(may_list: bool, is_evicted: bool) -> None:
    """Proposal C: a Deployment under a class of another name is found by its handler where classes may be listed, else only by name."""

    async def story(stage: Stage) -> None:
        stage.world.store.runtime_classes.update({"fast": "nvidia-cdi", "nvidia": "nvidia"})
        if may_list:
            stage.scenario.account.rules = (*STOCK_ROLE, rule("list", "node.k8s.io", "runtimeclasses"))
        stage.world.add_deployment("by-handler", PodSpec(runtime_class="fast"), node=NODE)
        stage.world.add_deployment("by-name", PodSpec(runtime_class="nvidia"), node=NODE)
        assert (await stage.run()).code == 0
        assert any(ref.startswith("default/by-name") for ref in stage.evicted)
        assert any(ref.startswith("default/by-handler") for ref in stage.evicted) is is_evicted
        await stage.assert_put_back()

    play(story)


@pytest.mark.parametrize("kind", ["annotations", "labels"])
def test_proposal_b_the_client_mark(kind: str) -> None:
    """Proposal B: the marked pod is kept off by the taint, evicted, waited for, and the taint goes when the driver is unloaded."""

    async def story(stage: Stage) -> None:
        marks: dict[str, Any] = {kind: CLIENT}
        spec = PodSpec(devices=("/dev/nvidiactl",), stop_seconds=3.0, **marks)
        pod = stage.world.add_pod("client-0", spec, node=NODE, owner=Owner("StatefulSet", "client"))
        taints: list[str] = []
        stage.world.faults.on(
            "evict", Do(lambda: taints.extend(t.key for t in stage.world.node(NODE).taints)), where=lambda c: not c.args["dry_run"]
        )
        assert (await stage.run()).code == 0
        assert names.GPU_TAINT in taints
        assert stage.evicted == [pod.ref]
        assert gone_at(stage, pod) < stage.unloads()[0][0]
        stage.assert_free()
        await stage.assert_put_back()

    play(story, small_world(gpu_pods=0))


# Standalone exporters -----------------------------------------------------------------------------------------------

MINE = names.DEPLOY_PREFIX + "my-exporter"


@pytest.mark.parametrize("key", ["", names.DEPLOY_CLIENT, MINE])
def test_n02_variants_1_and_2(key: str) -> None:
    """N02 variants 1 and 2, proposal C: gone by taint or label, nobody in its place until the restore; then the exporter is back."""

    async def story(stage: Stage) -> None:
        old = exporter(stage, replace(EXPORTER, node_selector={key: "true"} if key else {}))
        logs = stage.world.add_daemon_set("logs", PodSpec(), namespace=MONITORING)
        (bystander,) = stage.world.store.pods_of(logs.uid)[:1]
        run = await stage.run()
        assert run.code == 0, run.sentence
        assert stage.evicted == ([] if key else [old.ref])
        assert gone_at(stage, old) < stage.unloads()[0][0]
        assert made_between(stage, "exporter", 0.0, stage.unloads()[-1][0]) == []
        await asyncio.sleep(1.0)
        (new,) = there(stage, "exporter")
        assert new.uid != old.uid
        assert (bystander.marked_at, bystander.is_gone) == (None, False)
        await stage.assert_put_back()

    scenario = small_world(gpu_pods=0)
    if key:
        scenario.world.edit_node(NODE, labels={key: "true"})
    play(story, scenario)


@pytest.mark.parametrize("label", [names.DEPLOY_DRIVER, names.DEPLOY_PREFIX + "operands"])
def test_n02_the_drivers_own_label_is_never_paused(label: str) -> None:
    """A consumer that selects the driver's own label, or the operator's switch, goes by the taint; that label is never written."""

    async def story(stage: Stage) -> None:
        old = exporter(stage, replace(EXPORTER, node_selector={label: "true"}))
        assert (await stage.run()).code == 0
        assert stage.evicted == [old.ref]
        assert not any(f"{label.rpartition('/')[2]}=" in detail for detail in stage.node_writes())
        await stage.assert_put_back()

    scenario = small_world(gpu_pods=0)
    scenario.world.edit_node(NODE, labels={label: "true"})
    play(story, scenario)


def test_n02_variant_3_that_the_plan_did_not_show() -> None:
    """N02 variant 3: an exporter that tolerates the taint only after its eviction comes back: non-zero, its owner named, all undone."""

    async def story(stage: Stage) -> None:
        exporter(stage)
        owner = stage.world.store.daemon_sets[f"{MONITORING}/exporter"]
        stage.world.faults.on(
            "evict",
            Do(lambda: setattr(owner, "spec", replace(owner.spec, tolerations=(Toleration("", "Exists"),)))),
            where=lambda call: not call.args["dry_run"],
        )
        run = await stage.run()
        assert run.code != 0
        assert f"DaemonSet {MONITORING}/exporter" in run.sentence
        assert len(stage.evicted) == 1
        assert stage.unloads() == []
        await stage.assert_put_back()

    play(story, small_world(gpu_pods=0))


def test_n02_pods_that_come_past_every_taint() -> None:
    """N02: a controller of its own kind that binds pods past the scheduler is stopped for after a few rounds, by its name."""

    async def story(stage: Stage) -> None:
        def come(pod: Pod) -> None:
            if pod.is_gone and pod.name.startswith("agent-"):
                stage.world.add_pod(f"agent-{len(stage.evicted)}", pod.spec, node=NODE, owner=pod.owner)

        stage.world.store.pod_listeners.append(come)
        stage.world.add_pod("agent-x", EXPORTER, node=NODE, owner=Owner("AgentSet", "agents"))
        run = await stage.run()
        assert run.code == 75
        assert "of AgentSet agents" in run.sentence
        assert 3 <= len(stage.evicted) <= 5
        assert stage.unloads() == []
        await stage.assert_put_back()

    play(story, small_world(gpu_pods=0))


# Those that hide ----------------------------------------------------------------------------------------------------


def hidden(stage: Stage, name: str = "hidden", **spec: Any) -> Pod:
    """A pod that holds a GPU without saying so."""
    made = PodSpec(**{"devices": ("/dev/nvidia0",), "stop_seconds": 0.5, **spec})
    return stage.world.add_pod(name, made, node=NODE, owner=Owner("ReplicaSet", name))


@pytest.mark.parametrize(("word", "code"), [("evict", 0), ("refuse", 65), ("ignore", 75)])
def test_hidden_consumers(word: str, code: int) -> None:
    """A pod that only the kernel shows is evicted, refused before any write, or waited for, as HIDDEN_CONSUMERS says."""

    async def story(stage: Stage) -> None:
        pod = hidden(stage)
        run = await stage.run(hidden_consumers=word, holder_timeout=10.0)
        assert run.code == code
        assert (pod.ref in stage.evicted) is (word == "evict")
        assert word == "evict" or pod.ref in run.sentence
        assert word != "refuse" or stage.node_writes() == []
        assert word != "refuse" or [each["uid"] for each in stage.status["blockers"]] == [pod.uid], "the controller may be allowed to"
        await stage.assert_put_back()

    play(story)


@pytest.mark.parametrize("word", ["evict", "refuse"])
def test_a_pod_that_takes_a_gpu_in_mid_run(word: str) -> None:
    """R1: a pod that takes a GPU while others end, without saying so, is another round or a refusal, not a wait until the limit."""

    async def story(stage: Stage) -> None:
        pod = stage.world.add_pod("late", PodSpec(stop_seconds=0.5), node=NODE, owner=Owner("ReplicaSet", "late"))
        stage.later(1.0, lambda: stage.world.machine(NODE).add_process("python3", ("/dev/nvidia0",), pod_uid=pod.uid))
        run = await stage.run(hidden_consumers=word)
        assert run.code == (0 if word == "evict" else 65), run.sentence
        assert stage.now < 20
        assert (pod.ref in stage.evicted) is (word == "evict")
        assert word == "evict" or pod.ref in run.sentence
        await stage.assert_put_back()

    play(story)


def test_an_opted_out_pod_that_holds_a_gpu() -> None:
    """The skip label cannot hold where the pod's process has a GPU open: refused before any write, with the label to take off."""

    async def story(stage: Stage) -> None:
        pod = hidden(stage, labels={names.DRAIN_SKIP: "true"})
        run = await stage.run()
        assert run.code == 65
        assert pod.ref in run.sentence
        assert names.DRAIN_SKIP in run.sentence
        assert (stage.evicted, stage.node_writes()) == ([], [])

    play(story)


def test_n11_a_static_pod_that_holds_a_gpu() -> None:
    """N11: a static pod whose process, under its manifest's hash, holds a GPU is refused with the manifest's name."""

    async def story(stage: Stage) -> None:
        stage.world.add_mirror_pod("burn-in", PodSpec(annotations={names.MIRROR_HASH: "f00d"}), node=NODE)
        stage.world.machine(NODE).add_process("burn", ("/dev/nvidia0",), pod_uid="f00d")
        run = await stage.run()
        assert run.code == 65
        assert "remove the manifest of burn-in from the node" in run.sentence
        assert (stage.evicted, stage.node_writes()) == ([], [])

    play(story)


# Processes ----------------------------------------------------------------------------------------------------------


def test_n31_each_interval_names_pid_and_pod(caplog: pytest.LogCaptureFixture) -> None:
    """N31: the wait is bounded, and each line of it, at least every 30 s, names the pid and the pod that hold on."""

    async def story(stage: Stage) -> None:
        pod = hidden(stage)
        (process,) = [one for one in stage.world.machine(NODE).processes.values() if one.pod_uid == pod.uid]
        run = await stage.run(hidden_consumers="ignore", holder_timeout=120.0)
        assert run.code == 75
        lines = [str(record.__dict__["for"]) for record in caplog.records if getattr(record, "reason", "") == "held-by-process"]
        assert len(lines) >= 4
        assert all(f"{process.pid} " in line and pod.ref in line for line in lines[1:])

    with caplog.at_level("INFO"):
        play(story)


@pytest.mark.parametrize("is_dra", [True, False])
def test_n32_a_process_of_a_pod_that_is_gone_is_named_by_it(is_dra: bool) -> None:
    """N32: a process whose pod is gone from the API is named with the former pod, also where the plugin's turn came in between."""

    async def story(stage: Stage) -> None:
        pod = gpu_pod(stage.world, "zombie-0", PodSpec(gpus=1, stop_seconds=0.0, lag_seconds=10_000.0, command="ghost"))
        run = await stage.run(holder_timeout=20.0)
        assert run.code == 75
        assert f"of pod {pod.ref}, which is gone from the API" in run.sentence
        assert stage.unloads() == []
        await stage.assert_put_back()

    play(story, with_dra(small_world()) if is_dra else None)


# Stuck pods ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("force", [True, False])
def test_n10_only_stuck_pods_are_ended_by_force(force: bool) -> None:
    """N10: by force only the pod past its grace goes; one with a finalizer and one behind a budget are named and left."""

    async def story(stage: Stage) -> None:
        world = stage.world
        never = PodSpec(resources=frozenset({"nvidia.com/gpu"}), stop_seconds=None, grace_seconds=20)
        stuck = gpu_pod(world, "stuck-0", never)
        held = gpu_pod(world, "held-0", replace(never, finalizers=("example.com/wait",)))
        kept = world.add_pod(
            "kept-0", replace(never, labels={"app": "kept"}, stop_seconds=1.0), node=NODE, owner=Owner("StatefulSet", "kept")
        )
        budget = world.add_budget("kept", {"app": "kept"}, min_available=1)
        world.delete_pod(stuck)
        world.delete_pod(held)
        run = await stage.run(force_delete_stuck_pods=force, drain_timeout=120.0, operand_timeout=120.0)
        assert run.code == 75
        assert stuck.is_gone is force
        assert not held.is_gone
        assert kept.marked_at is None
        assert budget.name in run.sentence or held.ref in run.sentence
        assert stuck.ref not in run.sentence or not force
        assert stage.unloads() == []
        assert held.deletion_grace == 20
        await asyncio.sleep(2.0)
        assert names.RECORD not in world.node(NODE).annotations

    play(story, small_world(gpu_pods=0))


def test_n10_a_forced_end_still_has_to_pass_the_scan() -> None:
    """N10, N32: when the object of a stuck pod is gone by force its process still delays the unload, named with the former pod."""

    async def story(stage: Stage) -> None:
        pod = gpu_pod(stage.world, "stuck-0", PodSpec(gpus=1, stop_seconds=None, grace_seconds=5))
        stage.later(100.0, lambda: stage.world.machine(NODE).stop_pod(pod))
        seen: list[str] = []
        stage.later(80.0, lambda: seen.append(f"{pod.is_gone} {stage.status}"))
        run = await stage.run(force_delete_stuck_pods=True)
        assert run.code == 0, run.sentence
        assert seen[0].startswith("True")
        assert f"{pod.ref}, which is gone from the API" in seen[0]
        assert 35.0 < gone_at(stage, pod) < 40.0
        assert stage.unloads()[0][0] >= 100.0

    play(story, small_world(gpu_pods=0))


# Virtual machines ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("knows_dry_runs", [True, False])
def test_n12_a_webhook_that_keeps_a_launcher(knows_dry_runs: bool) -> None:
    """N12: a launcher that a webhook does not let go ends the run with the machine's name, before any write where dry runs tell."""

    async def story(stage: Stage) -> None:
        spec = PodSpec(host_paths=("/dev/vfio/5",), has_empty_dir=True, labels={names.VM_LABEL: "virt-launcher"})
        pod = stage.world.add_pod("virt-launcher-win11-abc", spec, node=NODE, owner=Owner("VirtualMachineInstance", "win11"))
        other = gpu_pod(stage.world, "db-0")
        webhook = Fail(lambda: EvictionBlocked('admission webhook "virt-launcher-eviction" denied the request: cannot be live-migrated'))
        if not knows_dry_runs:
            no = Fail(lambda: ClusterError("admission webhook does not support dry run"))
            stage.world.faults.on("evict", no, where=lambda call: call.args == {"pod": pod.ref, "dry_run": True}, times=None)
        stage.world.faults.on("evict", webhook, where=lambda call: call.args["pod"] == pod.ref, times=None)
        run = await stage.run()
        assert run.code == 65
        assert "virtual machine win11" in run.sentence
        assert pod.marked_at is None
        if knows_dry_runs:
            assert (stage.evicted, stage.node_writes(), other.marked_at) == ([], [], None)
        assert stage.unloads() == []
        await stage.assert_put_back()

    play(story, small_world(gpu_pods=0))


def test_n12_a_budget_on_a_launcher() -> None:
    """N12, R5: a launcher behind a budget is refused before anything is changed, with the machine's name and what to do."""

    async def story(stage: Stage) -> None:
        spec = PodSpec(gpus=1, labels={names.VM_LABEL: "virt-launcher", names.VM_NAME_LABEL: "win11", "app": "vm"})
        stage.world.add_pod("virt-launcher-win11-abc", spec, node=NODE, owner=Owner("VirtualMachineInstance", "win11"))
        stage.world.add_budget("kubevirt-disruption-budget", {"app": "vm"}, min_available=1)
        run = await stage.run()
        assert run.code == 65
        assert "stop the virtual machine win11" in run.sentence
        assert (stage.evicted, stage.node_writes()) == ([], [])
        stage.assert_host_untouched()

    play(story)


# Policy-owned nodes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("word", "code"), [("free", 0), ("wait", 75), ("refuse", 65)])
def test_decision_1_consumers_that_no_controller_knows(word: str, code: int) -> None:
    """Decision 1: on a policy-owned node marked clients are freed without a cordon, left to others until the limit, or refused."""

    async def story(stage: Stage) -> None:
        pod = stage.world.add_pod("client-0", EXPORTER, node=NODE, owner=Owner("StatefulSet", "client"))
        run = await stage.run(policy_owned_consumers=word, policy_owner_timeout=20.0)
        assert run.code == code, run.sentence
        assert stage.evicted == ([pod.ref] if word == "free" else [])
        assert word == "free" or pod.ref in run.sentence
        assert not any("cordon" in detail for detail in stage.node_writes())
        assert word == "free" or not any("=paused" in detail for detail in stage.node_writes())

    scenario = small_world(gpu_pods=0)
    scenario.world.edit_node(NODE, annotations={names.UPGRADE_ENABLED: "true"})
    play(story, scenario)


def everybody(scenario: Scenario) -> Scenario:
    """The same with consumers of many kinds and a standalone plugin."""
    world = scenario.world
    world.edit_node(NODE, labels={MINE: "true"})
    world.add_daemon_set("plugin", PLUGIN, namespace=DRA_NAMESPACE)
    world.add_daemon_set("exporter", EXPORTER, namespace=MONITORING)
    world.add_daemon_set("labelled", replace(EXPORTER, node_selector={MINE: "true"}), namespace=MONITORING)
    claim_holder(world, "user-0")
    claim_holder(world, "admin-0", is_admin=True)
    world.add_deployment("class", PodSpec(runtime_class="nvidia"), node=NODE)
    world.add_deployment("cpu", PodSpec(host_paths=("/dev",)), node=NODE)
    world.add_daemon_set("logs", PodSpec(host_paths=("/", "/dev")), namespace=MONITORING)
    return scenario


def test_all_kinds_at_once() -> None:
    """Issue 4: with every kind on one node the evictions are the plan's, bystanders stay, and all is put back."""

    async def story(stage: Stage) -> None:
        _, plan = await stage.start().agent.plan()
        planned = sorted(each.pod.ref for each in plan.verdicts if each.action is Action.EVICT)
        assert (await stage.run()).code == 0
        assert sorted(stage.evicted) == planned
        assert len(planned) == 7
        assert not any(part in ref for ref in stage.evicted for part in ("cpu", "logs", "labelled"))
        stage.assert_free()
        await stage.assert_put_back()

    play(story, everybody(small_world()))
