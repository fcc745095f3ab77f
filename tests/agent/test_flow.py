"""The ways of a run without trouble: all of it, nothing loaded, unchanged."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from driver_manager import names
from driver_manager.core.snapshot import PciDevice, Unloading
from driver_manager.operands import OPERANDS
from driver_manager.sim.clock import run_virtual
from driver_manager.sim.faults import Do, When
from driver_manager.sim.objects import PodSpec
from driver_manager.sim.scenarios import NODE, Scenario, demo_world, stock_world
from tests.agent.stage import DRA_LABEL, Stage, gpu_pod, play, small_world, with_dra


@pytest.mark.parametrize("built", [stock_world, demo_world, lambda: with_dra(stock_world())], ids=["stock", "demo", "dra"])
def test_the_full_way(built: Callable[[], Scenario]) -> None:
    """R4: exit 0 means that the driver is gone, every GPU pod was evicted once, and the node is exactly as before."""

    async def story(stage: Stage) -> None:
        using = {pod.uid for pod in stage.world.pods(NODE) if "nvidia.com/gpu" in pod.resources}
        operands = {pod.uid for pod in stage.world.pods(NODE) if names.DEPLOY_PREFIX in "".join(pod.node_selector)}
        run = await stage.run()
        assert run.code == 0
        assert {uid for _, _, uid in stage.world.evictions} == using
        stage.assert_free()
        await stage.assert_put_back()
        assert names.STATUS not in stage.world.node(NODE).annotations
        after = {pod.uid for pod in stage.world.pods(NODE)}
        own = run.life.cluster.identity.pod_uid
        assert after & (operands | using) == {own}, "the operands are new ones, our own pod is not"
        assert sum(names.DEPLOY_PREFIX in "".join(pod.node_selector) for pod in stage.world.pods(NODE)) == len(operands)

    play(story, built())


def test_two_writes_for_the_whole_node() -> None:
    """Design section 3: pause, cordon, taint and record are one patch, the note of the unload one, and all of the undo one."""

    async def story(stage: Stage) -> None:
        await stage.run()
        pause, note, restore = stage.node_writes()
        assert all(word in pause for word in ("cordon", "taints=", "+gpu-driver-manager.record", "=paused-for-driver-upgrade"))
        assert "+gpu-driver-manager.record" in note
        assert all(word in restore for word in ("uncordon", "taints=", "-gpu-driver-manager.record", "=true"))

    play(story)


def test_n03_an_idle_gpu_pod_is_evicted_before_the_first_unload() -> None:
    """N03: with reference counts of zero and one pod that only asked for a GPU there is exactly one eviction, before the first unload."""

    async def story(stage: Stage) -> None:
        machine = stage.world.machine(NODE)
        for pid in list(machine.processes):
            machine.end_process(pid)
        assert machine.refcount("nvidia_uvm") == 0
        run = await stage.run()
        assert run.code == 0
        assert len(stage.world.evictions) == 1
        assert stage.world.evictions[0][0] < stage.unloads()[0][0]
        stage.assert_free()

    play(story, small_world(gpu_pods=1, operands=0))


def test_the_order_of_unloads() -> None:
    """Every module goes after all that hold it, `nvidia` last."""

    async def story(stage: Stage) -> None:
        stage.world.machine(NODE).load_driver(modules=("nvidia_drm", "nvidia_fs", "gdrdrv"))
        await stage.run()
        order = [name for _, name in stage.unloads()]
        assert order[-1] == "nvidia"
        assert order.index("nvidia_drm") < order.index("nvidia_modeset")
        assert set(order) == {"nvidia", "nvidia_modeset", "nvidia_uvm", "nvidia_drm", "nvidia_fs", "gdrdrv"}
        stage.assert_free()

    play(story)


# Nobody disturbed ---------------------------------------------------------------------------------------------------


def test_r11_nothing_loaded() -> None:
    """R11, N28: nothing is loaded: nobody is evicted, no label written, stale mounts and files go, exit 0 at once."""

    async def story(stage: Stage) -> None:
        stage.world.machine(NODE).modules.clear()
        run = await stage.run()
        assert run.code == 0
        assert stage.now < 0.1
        assert stage.evicted == []
        assert stage.node_writes() == []
        stage.assert_free()
        await stage.assert_put_back()

    play(story)


def test_r11_unchanged_digest() -> None:
    """R11, N28, N34: the wanted driver is loaded: nobody is evicted, no label written, nothing unloaded, the markers stay."""

    async def story(stage: Stage) -> None:
        machine = stage.world.machine(NODE)
        before = machine.view()
        pods = {pod.uid for pod in stage.world.pods(NODE)}
        run = await stage.run(driver_config_digest="digest-1")
        assert run.code == 0
        assert stage.evicted == []
        assert stage.node_writes() == []
        assert {pod.uid for pod in stage.world.pods(NODE)} == pods
        after = machine.view()
        assert (after.modules, after.markers, after.state_digest) == (before.modules, before.markers, "digest-1")
        assert not after.mounts
        await stage.assert_put_back()

    play(story)


@pytest.mark.parametrize(
    "given",
    [{"driver_config_digest": "digest-2"}, {}, {"driver_config_digest": "digest-1", "force_reinstall": True}],
    ids=["another digest", "no digest", "forced"],
)
def test_n28_every_other_case_is_the_full_way(given: dict[str, Any]) -> None:
    """N28: another digest, an unknown one, and a forced reinstall go the full way."""

    async def story(stage: Stage) -> None:
        run = await stage.run()
        assert run.code == 0
        assert len(stage.evicted) == 2
        stage.assert_free()
        await stage.assert_put_back()

    play(story, **given)


@pytest.mark.parametrize("is_loaded", [True, False])
def test_a_plugin_that_loses_its_driver_root_is_restarted_once(is_loaded: bool) -> None:
    """Decision 14: on both quiet ways a ready DRA plugin gets a new pod when its driver root was detached, and only it."""

    async def story(stage: Stage) -> None:
        if not is_loaded:
            stage.world.machine(NODE).modules.clear()
        plugin = stage.world.pod("nvidia-dra-driver", "dra-plugin").uid
        others = {pod.uid for pod in stage.world.pods(NODE)} - {plugin}
        run = await stage.run(driver_config_digest="digest-1")
        assert run.code == 0
        await stage.assert_put_back()
        after = {pod.uid for pod in stage.world.pods(NODE)}
        assert others < after
        assert plugin not in after
        assert len(after) == len(others) + 1
        assert stage.world.node(NODE).labels[DRA_LABEL] == "true"
        assert stage.evicted == []

    play(story, with_dra(small_world()))


def test_nouveau_goes() -> None:
    """Without a driver of NVIDIA's the kernel's own one is taken out of the way."""

    async def story(stage: Stage) -> None:
        machine = stage.world.machine(NODE)
        machine.modules.clear()
        machine.load_driver(modules=("nouveau",))
        assert (await stage.run()).code == 0
        assert "nouveau" not in machine.modules

    play(story)


GPU_ON_VFIO = PciDevice(address="0000:3b:00.0", vendor="0x10de", device_class="0x030200", driver="vfio-pci")


@pytest.mark.parametrize(("vendor", "driver"), [("0x10de", None), ("0x15b3", "vfio-pci")])
@pytest.mark.parametrize("is_loaded", [True, False])
def test_devices_of_virtual_machines(vendor: str, driver: str | None, is_loaded: bool) -> None:
    """A GPU on vfio comes off it, on a loaded driver after the unload; a network card there is no matter."""

    async def story(stage: Stage) -> None:
        machine = stage.world.machine(NODE)
        if not is_loaded:
            machine.modules.clear()
        machine.pci.append(replace(GPU_ON_VFIO, vendor=vendor))
        run = await stage.run()
        assert run.code == 0
        assert machine.pci[-1].driver == driver
        calls = [call.call for call in machine.calls if call.call in ("delete_module", "write")]
        assert calls == sorted(calls)
        await stage.assert_put_back()

    play(story)


@pytest.mark.parametrize("is_loaded", [True, False])
def test_n37_a_node_for_virtual_machines_keeps_its_gpus(is_loaded: bool) -> None:
    """N37 (a): where the node is given to virtual machines, GPUs stay on vfio and a running machine is not touched."""

    async def story(stage: Stage) -> None:
        machine = stage.world.machine(NODE)
        own = stage.world.pod("gpu-operator", "nvidia-driver-daemonset")
        own.spec = replace(own.spec, node_selector={names.DEPLOY_VFIO_MANAGER: "true"})
        machine.pci.append(GPU_ON_VFIO)
        if not is_loaded:
            machine.modules.clear()
        user = machine.add_process("qemu-system-x86", ("/dev/vfio/7", "/dev/vfio/vfio"))
        assert (await stage.run(holder_timeout=5.0)).code == 0
        assert user.pid in machine.processes
        assert machine.pci[-1].driver == "vfio-pci"
        assert is_loaded or stage.evicted == []

    play(story)


def test_n37_the_pod_of_a_virtual_machine_goes_first() -> None:
    """N37 (b): where the driver is wanted and a virtual machine's pod has the GPU, the pod is evicted, then the GPU comes off vfio."""

    async def story(stage: Stage) -> None:
        machine = stage.world.machine(NODE)
        machine.modules.clear()
        machine.processes.clear()
        machine.pci.append(GPU_ON_VFIO)
        pod = gpu_pod(stage.world, "vm", PodSpec(stop_seconds=1.0))
        machine.add_process("qemu-system-x86", ("/dev/vfio/7", "/dev/vfio/vfio"), pod_uid=pod.uid)
        assert (await stage.run()).code == 0
        assert "default/vm" in stage.evicted
        assert machine.pci[-1].driver is None
        await stage.assert_put_back()

    play(story)


def test_n37_a_virtual_machine_of_no_pod_is_named() -> None:
    """N37 (b): a machine that no eviction ends is named, and nothing is written, neither on the host nor on the node."""

    async def story(stage: Stage) -> None:
        machine = stage.world.machine(NODE)
        machine.modules.clear()
        machine.pci.append(GPU_ON_VFIO)
        machine.add_process("qemu-system-x86", ("/dev/vfio/7", "/dev/vfio/vfio"), unit="machine-qemu.scope")
        run = await stage.run()
        assert run.code == 75
        assert "qemu-system-x86" in run.sentence
        assert "machine-qemu.scope" in run.sentence
        assert machine.pci[-1].driver == "vfio-pci"
        assert stage.evicted == []
        assert machine.calls == []

    play(story)


# Files --------------------------------------------------------------------------------------------------------------


def test_n34_markers_go_between_pause_and_unload() -> None:
    """N34: the ready markers go after the pause and before the unload, also one that a validator makes meanwhile; others stay."""

    async def story(stage: Stage) -> None:
        machine = stage.world.machine(NODE)
        unrelated, late = f"/{names.VALIDATIONS}/workload-ready", f"/{names.VALIDATIONS}/toolkit-ready"
        machine.files[unrelated] = "x"
        del machine.files[late]
        stage.later(0.2, lambda: machine.files.__setitem__(late, ""))
        run = await stage.run()
        assert run.code == 0
        assert machine.files[unrelated] == "x"
        pause = next(one.at for one in stage.world.store.diary if "=paused" in one.detail)
        removed = {call.argument: call.at for call in machine.calls if call.call == "unlink" and call.result == "0"}
        for name in names.READY_MARKERS:
            assert pause < removed[f"/{names.VALIDATIONS}/{name}"] < stage.unloads()[0][0]
        stage.assert_free()

    play(story)


def test_the_state_file_goes_right_before_the_first_unload() -> None:
    """Decision 12: a digest on file never speaks of a driver that is half gone."""

    async def story(stage: Stage) -> None:
        seen: list[bool] = []
        machine = stage.world.machine(NODE)
        stage.world.faults.on("unload_module", Do(lambda: seen.append("/" + names.STATE_FILE in machine.files)), times=None)
        held: list[str] = []
        stage.world.faults.on(
            "remove_file", Do(lambda: held.append(stage.world.node(NODE).annotations[names.RECORD])), when=When.BEFORE, times=None
        )
        await stage.run()
        assert seen
        assert not any(seen)
        assert all('"phase":"unloading"' in text for text in held)

    play(story)


def test_a_pid_file_whose_lock_is_held_stays() -> None:
    """The driver container's pid file is only removed when no process holds its lock; that fails nothing."""

    async def story(stage: Stage) -> None:
        stage.world.machine(NODE).has_pid_lock = True
        assert (await stage.run()).code == 0
        assert "/" + names.PID_FILE in stage.world.machine(NODE).files

    play(story)


# Refused before anything is changed ---------------------------------------------------------------------------------


@pytest.mark.parametrize("why", [Unloading.DISABLED, Unloading.UNSUPPORTED, Unloading.NOT_PERMITTED])
def test_n27_a_kernel_that_keeps_its_modules(why: Unloading) -> None:
    """N27, R5: a kernel that cannot unload is found before anything is changed: exit 71, only the status is written."""

    async def story(stage: Stage) -> None:
        stage.world.machine(NODE).unloading = why
        run = await stage.run()
        assert run.code == 71
        assert stage.node_writes() == []
        assert stage.status["phase"] == "failed"
        stage.assert_host_untouched()
        assert stage.evicted == []
        await stage.assert_put_back()

    play(story)


def test_n25_a_module_that_is_half_way_out() -> None:
    """N25, R5: a module in the state `going` is found before any eviction: exit 71, `reboot`, nothing is tried."""

    async def story(stage: Stage) -> None:
        module = stage.world.machine(NODE).modules["nvidia_uvm"]
        module.state = type(module.state).GOING
        run = await stage.run()
        assert run.code == 71
        assert "nvidia_uvm" in run.sentence
        assert "reboot" in run.sentence
        assert stage.node_writes() == []
        assert stage.evicted == []
        stage.assert_host_untouched()

    play(story)


def test_the_status_stays_until_the_next_success() -> None:
    """Decision 11: what made a run fail stands on the node until a run succeeds, and goes then."""

    async def story(stage: Stage) -> None:
        machine = stage.world.machine(NODE)
        machine.unloading = Unloading.DISABLED
        await stage.run()
        assert stage.status["reason"] == "refused"
        assert "modules_disabled" in stage.status["message"]
        await stage.run()
        assert stage.status["reason"] == "refused"
        machine.unloading = Unloading.POSSIBLE
        assert (await stage.run()).code == 0
        assert names.STATUS not in stage.world.node(NODE).annotations

    play(story)


def test_the_status_goes_on_quiet_ways_too() -> None:
    """Decision 11: exit 0 without a change of the node removes an old status as well, and nothing else."""

    async def story(stage: Stage) -> None:
        stage.world.edit_node(NODE, annotations={names.STATUS: '{"phase":"failed"}'})
        assert (await stage.run(driver_config_digest="digest-1")).code == 0
        assert names.STATUS not in stage.world.node(NODE).annotations
        await stage.assert_put_back()

    play(story)


def test_plan_changes_nothing() -> None:
    """`plan` sees what a run would do and writes nothing at all."""

    async def story(stage: Stage) -> None:
        run = stage.start()
        _, plan = await run.agent.plan()
        assert str(plan.path) == "full"
        assert [call.name for call in stage.world.faults.calls if call.is_write] == []
        await stage.assert_put_back()

    play(story)


def test_every_operand_is_known_by_its_label() -> None:
    """Each row of the operand table, alone on a node, is paused, waited for and put back."""

    async def tell(label: str, app: str | None) -> None:
        scenario = small_world(operands=0, gpu_pods=0)
        world = scenario.world
        world.edit_node(NODE, labels={label: "true"})
        spec = PodSpec(labels={"app": app} if app else {}, node_selector={label: "true"}, stop_seconds=0.5)
        world.add_daemon_set("operand", spec)
        uid = world.pod("gpu-operator", "operand").uid
        stage = Stage(scenario, world.surface(NODE))
        run = await stage.run()
        assert run.code == 0
        gone = next(one.at for one in world.store.diary if one.what == "gone" and one.detail == uid)
        assert gone < stage.unloads()[0][0]
        await stage.assert_put_back()
        assert len([pod for pod in world.pods(NODE) if pod.name.startswith("operand")]) == 1

    for operand in OPERANDS:
        run_virtual(tell(operand.label, operand.app))
