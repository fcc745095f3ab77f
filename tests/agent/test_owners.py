"""Who owns what: upgrade controllers, other tools, the host's own driver, the account's permissions, another boot."""

import asyncio
import json
from dataclasses import replace

import pytest

from driver_manager import names
from driver_manager.core.snapshot import DriverFiles, Rule
from driver_manager.operands import OPERANDS
from driver_manager.sim.access import STOCK_ROLE
from driver_manager.sim.faults import Do, When
from driver_manager.sim.objects import PodSpec
from driver_manager.sim.scenarios import NODE, Scenario
from tests.agent.stage import Stage, gpu_pod, play, small_world

PLUGIN_LABEL = OPERANDS[2].label


def policy_owned(scenario: Scenario | None = None) -> Scenario:
    """A node that an upgrade controller owns."""
    made = scenario or small_world()
    made.world.edit_node(NODE, annotations={names.UPGRADE_ENABLED: "true"})
    return made


# Upgrade controllers ------------------------------------------------------------------------------------------------


def test_n47_the_controller_is_asked_and_waited_for() -> None:
    """N47, decision 1: on a policy-owned node the agent asks once, waits before its pause, never cordons and evicts no GPU pod."""

    async def story(stage: Stage) -> None:
        world = stage.world

        def evict() -> None:
            for pod in [pod for pod in world.store.pods_bound_to(NODE) if pod.spec.gpus]:
                world.edit_node(NODE, unschedulable=True)
                world.delete_pod(pod)

        cordons: list[bool] = []
        stage.later(9.0, lambda: cordons.append(world.node(NODE).unschedulable))
        stage.later(10.0, evict)
        run = await stage.run()
        assert run.code == 0
        assert cordons == [False]
        assert stage.evicted == []
        asked = [detail for detail in stage.node_writes() if "+gpu-driver-upgrade-requested" in detail]
        assert len(asked) == 1
        pause = next(one.at for one in world.store.diary if "=paused" in one.detail)
        assert pause > 12.0
        assert world.node(NODE).unschedulable, "the controller's cordon stays"
        assert world.node(NODE).labels == stage.before.labels
        stage.assert_free()

    play(story, policy_owned())


@pytest.mark.parametrize(("state", "asks"), [("", True), ("upgrade-done", True), ("upgrade-failed", True), ("drain-required", False)])
def test_n47_a_controller_that_is_at_it_is_not_asked_again(state: str, asks: bool) -> None:
    """N47: the request is written only where the controller has not taken the node up; at the limit the run ends with who owns it."""

    async def story(stage: Stage) -> None:
        if state:
            stage.world.edit_node(NODE, labels={names.UPGRADE_STATE: state})
        seen: list[dict[str, object]] = []
        stage.later(6.0, lambda: seen.append(stage.status))
        run = await stage.run(policy_owner_timeout=30.0)
        assert run.code == 75
        assert "default/training" in run.sentence
        assert (names.UPGRADE_REQUESTED in stage.world.node(NODE).annotations) == asks
        assert seen[0]["reason"] == "policy-owned"
        assert "upgrade controller owns" in str(seen[0]["message"])
        assert not any("=paused" in detail for detail in stage.node_writes())
        assert stage.evicted == []
        stage.assert_host_untouched()

    play(story, policy_owned())


def test_n47_nobody_evicts() -> None:
    """N47, R5: with eviction switched off and no controller the run stops at once with the pods and what to do."""

    async def story(stage: Stage) -> None:
        run = await stage.run(enable_gpu_pod_eviction=False)
        assert run.code == 65
        assert run.sentence.count("default/training") >= 2
        assert "ENABLE_GPU_POD_EVICTION=true" in run.sentence
        assert stage.node_writes() == []
        assert stage.evicted == []
        await stage.assert_put_back()

    play(story)


def test_a_policy_owned_node_without_gpu_pods_is_freed_without_a_cordon() -> None:
    """Decision 1: where the controller has done its part the agent pauses the operands, unloads, and never touches the cordon."""

    async def story(stage: Stage) -> None:
        cordons: set[bool] = set()
        stage.world.faults.on("patch_node", Do(lambda: cordons.add(stage.world.node(NODE).unschedulable)), when=When.AFTER, times=None)
        assert (await stage.run()).code == 0
        assert cordons == {False}
        stage.assert_free()
        await stage.assert_put_back()

    play(story, policy_owned(small_world(gpu_pods=0)))


# Other tools --------------------------------------------------------------------------------------------------------


def test_another_tools_pause_is_waited_for() -> None:
    """Decision 9: an operand that the MIG manager paused is waited for before anything is changed; its value is no original."""

    async def story(stage: Stage) -> None:
        stage.world.edit_node(NODE, labels={PLUGIN_LABEL: "paused-for-mig-change"})
        stage.later(20.0, lambda: stage.world.edit_node(NODE, labels={PLUGIN_LABEL: "true"}))
        run = await stage.run()
        assert run.code == 0
        assert next(one.at for one in stage.world.store.diary if "paused-for-driver-upgrade" in one.detail) >= 20.0
        await stage.assert_put_back()

    play(story)


def test_another_tools_pause_that_does_not_end() -> None:
    """Decision 9, R8: at the limit the run ends with the label and its value; nothing is changed."""

    async def story(stage: Stage) -> None:
        stage.world.edit_node(NODE, labels={PLUGIN_LABEL: "paused-for-mig-change"})
        run = await stage.run(operand_timeout=30.0)
        assert run.code == 75
        assert f"{PLUGIN_LABEL}=paused-for-mig-change" in run.sentence
        assert 29 <= stage.now <= 33
        assert stage.node_writes() == []
        stage.assert_host_untouched()

    play(story)


def test_what_upstreams_program_left_is_put_back() -> None:
    """Decision 9: a label that upstream's program left paused without a record is `true` again after the run."""

    async def story(stage: Stage) -> None:
        stage.world.edit_node(NODE, labels={PLUGIN_LABEL: names.PAUSED})
        assert (await stage.run()).code == 0
        await stage.assert_put_back()

    play(story)


# The host's own driver ----------------------------------------------------------------------------------------------


def owned_by_the_host(stage: Stage) -> None:
    """The loaded driver is the host's."""
    machine = stage.world.machine(NODE)
    machine.mounts.clear()
    machine.driver_files = DriverFiles(
        module_files=("/lib/modules/6.8.0-sim/updates/nvidia.ko",), library_versions=frozenset({"550.54.15"})
    )


def test_n17_marked_once_and_unmarked_when_it_is_gone() -> None:
    """N17: the mark is written once with whose it is, exit 72, nobody evicted; a run after the purge takes it off."""

    async def story(stage: Stage) -> None:
        owned_by_the_host(stage)
        run = await stage.run()
        assert run.code == 72
        assert stage.world.node(NODE).labels[names.DEPLOY_DRIVER] == names.PRE_INSTALLED
        assert json.loads(stage.world.node(NODE).annotations[names.HOST_DRIVER]) == {"previous": "true", "version": "550.54.15"}
        assert (await stage.run()).code == 72
        assert len(stage.node_writes()) == 1
        assert stage.evicted == []
        assert stage.unloads() == []
        machine = stage.world.machine(NODE)
        machine.driver_files = DriverFiles()
        machine.modules.clear()
        assert (await stage.run()).code == 0
        await stage.assert_put_back()

    play(story)


def test_n17_a_mark_of_somebody_else_stays() -> None:
    """N17, R3: a `pre-installed` without our annotation is not ours and is never taken off."""

    async def story(stage: Stage) -> None:
        stage.world.edit_node(NODE, labels={names.DEPLOY_DRIVER: names.PRE_INSTALLED})
        stage.world.machine(NODE).modules.clear()
        assert (await stage.run()).code == 0
        assert stage.world.node(NODE).labels[names.DEPLOY_DRIVER] == names.PRE_INSTALLED

    play(story)


def test_n17_a_signal_after_the_mark_keeps_it() -> None:
    """Decision 16: the mark makes the DaemonSet controller end our own pod at once; the mark stays, exit 72."""

    async def story(stage: Stage) -> None:
        owned_by_the_host(stage)
        stop = asyncio.Event()
        stage.world.faults.on("patch_node", Do(stop.set), when=When.AFTER)
        assert (await stage.run(stop=stop)).code == 72
        assert stage.world.node(NODE).labels[names.DEPLOY_DRIVER] == names.PRE_INSTALLED

    play(story)


def test_n17_a_hanging_nvidia_smi_is_given_up() -> None:
    """N17: the host's nvidia-smi is asked only where the files leave it open, and is cut off when it hangs; then nothing is marked."""

    async def story(stage: Stage) -> None:
        owned_by_the_host(stage)
        machine = stage.world.machine(NODE)
        machine.driver_files = DriverFiles(module_files=machine.driver_files.module_files)
        machine.smi_version, machine.smi_seconds = "550.54.15", 10_000.0
        run = await stage.run()
        assert run.code == 0
        assert stage.now < 90
        assert stage.world.node(NODE).labels[names.DEPLOY_DRIVER] == "true"

    play(story)


def test_n36_a_vfio_node_is_never_called_done_by_a_host_driver() -> None:
    """N36: where our DaemonSet gives GPUs to virtual machines a host driver ends the run non-zero, without the mark."""

    async def story(stage: Stage) -> None:
        owned_by_the_host(stage)
        own = stage.world.pod("gpu-operator", "nvidia-driver-daemonset")
        own.spec = replace(own.spec, node_selector={names.DEPLOY_VFIO_MANAGER: "true"})
        run = await stage.run()
        assert run.code == 72
        assert stage.world.node(NODE).labels[names.DEPLOY_DRIVER] == "true"
        assert stage.node_writes() == []

    play(story)


# Permissions --------------------------------------------------------------------------------------------------------


def without(verb: str, resource: str) -> tuple[Rule, ...]:
    """The stock role less one permission."""
    rules: list[Rule] = []
    for rule in STOCK_ROLE:
        if resource in rule.resources and verb in rule.verbs:
            rules.append(replace(rule, verbs=rule.verbs - {verb}))
        else:
            rules.append(rule)
    return tuple(rules)


@pytest.mark.parametrize(
    ("verb", "resource"), [("get", "nodes"), ("patch", "nodes"), ("list", "pods"), ("watch", "pods"), ("create", "pods/eviction")]
)
def test_n60_a_missing_permission(verb: str, resource: str) -> None:
    """N60, R5: each permission that a run cannot do without is found missing before anything is changed: exit 77, verb and resource."""

    async def story(stage: Stage) -> None:
        stage.scenario.account.rules = without(verb, resource)
        run = await stage.run()
        assert run.code == 77
        assert verb in run.sentence
        assert resource in run.sentence
        assert stage.node_writes() == []
        assert stage.evicted == []
        stage.assert_host_untouched()
        await stage.assert_put_back()

    play(story)


@pytest.mark.parametrize(("verb", "resource"), [("get", "daemonsets"), ("list", "resourceclaims")])
def test_r12_what_a_run_can_do_without(verb: str, resource: str) -> None:
    """R12, N60: without the right to read the owner our own pod says what is tolerated; the run succeeds."""

    async def story(stage: Stage) -> None:
        stage.scenario.account.rules = without(verb, resource)
        assert (await stage.run()).code == 0
        stage.assert_free()
        await stage.assert_put_back()

    play(story)


@pytest.mark.parametrize("is_allowed", [True, False])
def test_n60_a_server_that_does_not_list_all_rules(is_allowed: bool) -> None:
    """Decision 2: where the rules are incomplete the server is asked for the single permission, and its answer counts."""

    async def story(stage: Stage) -> None:
        account = stage.scenario.account
        account.rules, account.is_incomplete = without("create", "pods/eviction"), True
        if is_allowed:  # as if by a binding that the review of the rules does not show
            stage.world.faults.on("may", Do(lambda: setattr(account, "rules", STOCK_ROLE)))
        run = await stage.run()
        assert run.code == (0 if is_allowed else 77)
        if not is_allowed:
            assert "create pods/eviction" in run.sentence
            assert stage.node_writes() == []

    play(story)


# Another boot -------------------------------------------------------------------------------------------------------


def test_n54_a_reboot_in_the_middle_of_the_unload() -> None:
    """N54: a record of another boot is undone from its own values first; then the node is looked at anew, and nobody is evicted."""

    async def story(stage: Stage) -> None:
        stage.world.faults.on("unload_module", Do(stage.world.machine(NODE).reboot), skip=1)
        life = stage.start()
        stage.world.faults.on("unload_module", Do(life.life.kill), skip=1)
        life.outcome = await life.life.run(life.agent.uninstall(asyncio.Event()))
        assert life.life.was_killed
        machine = stage.world.machine(NODE)
        machine.kernel_release = "6.9.0-sim"
        machine.reboot()
        evicted, calls = stage.evicted, len(machine.calls)
        second = await stage.run()
        assert second.code == 0
        assert second.steps[0] == "RestoreNode"
        assert stage.evicted == evicted
        assert [call for call in machine.calls[calls:] if call.call in ("delete_module", "umount2")] == []
        await stage.assert_put_back()

    play(story)


def test_n54_the_same_boot_is_taken_over_without_an_uncordon_in_between() -> None:
    """Decision 7: a new run on the same boot adopts the originals; the node is never open between the two."""

    async def story(stage: Stage) -> None:
        gpu_pod(stage.world, "slow-0", PodSpec(gpus=1, stop_seconds=5.0))
        first = stage.start()
        stage.later(1.0, first.life.kill)
        await first.life.run(first.agent.uninstall(asyncio.Event()))
        cordons: list[bool] = []
        stage.world.faults.on(
            None, Do(lambda: cordons.append(stage.world.node(NODE).unschedulable)), where=lambda call: call.port == "host", times=None
        )
        assert (await stage.run()).code == 0
        assert len(cordons) > 5
        assert all(cordons)
        await stage.assert_put_back()

    play(story)
