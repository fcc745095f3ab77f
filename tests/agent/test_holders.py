"""What still holds the driver when the pods are gone: processes, modules, mounts, the DRA plugin."""

from typing import Any

import pytest

from driver_manager import names
from driver_manager.core.snapshot import MountCopy, PciDevice
from driver_manager.errors import HostError
from driver_manager.sim.faults import Delay, Do, Fail, When
from driver_manager.sim.machine import DRIVER_ROOT, Module
from driver_manager.sim.objects import PodSpec
from driver_manager.sim.scenarios import NAMESPACE, NODE
from tests.agent.stage import DRA_LABEL, Stage, gpu_pod, play, small_world, with_dra


def test_n32_a_process_that_outlives_its_pod() -> None:
    """N32, R1: a process that holds a device for 15 s after its pod is gone delays the unload so long: evicted, gone, released, unload."""

    async def story(stage: Stage) -> None:
        world, machine = stage.world, stage.world.machine(NODE)
        pod = gpu_pod(world, "zombie-0", PodSpec(gpus=1, stop_seconds=0.0, grace_seconds=0, lag_seconds=15.0))
        run = await stage.run()
        assert run.code == 0
        evicted = next(at for at, _, uid in world.evictions if uid == pod.uid)
        gone = next(one.at for one in world.store.diary if one.what == "gone" and one.detail == pod.uid)
        first = stage.unloads()[0][0]
        assert evicted <= gone < gone + 14.9 < first < gone + 16.5
        assert pod.uid not in [process.pod_uid for process in machine.processes.values()]
        assert run.steps.index("AwaitReleased") < run.steps.index("UnloadModule")
        await stage.assert_put_back()

    play(story)


def test_n32_a_process_that_stays() -> None:
    """N32, R8: one that never lets go ends the run at the limit, named with its former pod; nothing is unloaded."""

    async def story(stage: Stage) -> None:
        pod = gpu_pod(stage.world, "zombie-0", PodSpec(gpus=1, stop_seconds=0.0, lag_seconds=10_000.0, command="ghost"))
        run = await stage.run(holder_timeout=40.0)
        assert run.code == 75
        assert "ghost" in run.sentence
        assert pod.ref in run.sentence or pod.uid in run.sentence
        assert 39 <= stage.now <= 50
        assert stage.unloads() == []
        await stage.assert_put_back()

    play(story)


def test_n31_a_host_process_is_named_on_the_node() -> None:
    """N29, N31: a daemon of the host that holds a device stands in the status by pid, name, device and unit while it is waited for."""

    async def story(stage: Stage) -> None:
        process = stage.world.machine(NODE).add_process("train-service", ("/dev/nvidia0",), unit="train.service")
        seen: list[str] = []
        stage.later(14.0, lambda: seen.append(str(stage.status)))
        stage.later(20.0, lambda: stage.world.machine(NODE).end_process(process.pid))
        run = await stage.run()
        assert run.code == 0
        for word in (str(process.pid), "train-service", "/dev/nvidia0", "train.service"):
            assert word in seen[0]
        assert 20.0 < stage.now < 21.0, "the end of the process is noticed at once, not at the next look"
        assert names.STATUS not in stage.world.node(NODE).annotations

    play(story)


def test_n31_what_cannot_be_looked_at_does_not_count_as_free() -> None:
    """N31: a process that cannot be inspected is named when a module is in use and nobody else explains it."""

    async def story(stage: Stage) -> None:
        process = stage.world.machine(NODE).add_process("hidden", ("/dev/nvidia0",))
        process.is_readable = False
        run = await stage.run(holder_timeout=10.0)
        assert run.code == 75
        assert f"{process.pid} (could not be inspected)" in run.sentence
        assert stage.unloads() == []

    play(story)


def test_r1_one_whole_look_is_the_end_of_the_wait_and_the_last_before_the_unload() -> None:
    """R1: when the last holder ends one look at node, pods and processes follows, then the patch and the first unload."""

    async def story(stage: Stage) -> None:
        process = stage.world.machine(NODE).add_process("train-service", ("/dev/nvidia0",))
        made: list[Any] = []

        def end() -> None:
            made.extend(stage.world.faults.calls)
            stage.world.machine(NODE).end_process(process.pid)

        stage.later(20.0, end)
        assert (await stage.run()).code == 0
        rest = [call.name for call in stage.world.faults.calls[len(made) :] if call.when is When.BEFORE]
        assert sorted(rest[: rest.index("patch_node")]) == ["holders", "look", "node", "pods_on"]
        await stage.assert_put_back()

    play(story)


@pytest.mark.parametrize("how", ["a pod", "a pod in the middle of it", "a process", "a slow answer"])
def test_r1_what_that_look_finds_counts(how: str) -> None:
    """R1: a pod or a process that is there by that look, or a pod that came since it began, is freed first; a slow look is taken again."""

    async def story(stage: Stage) -> None:
        world, machine = stage.world, stage.world.machine(NODE)
        process = machine.add_process("train-service", ("/dev/nvidia0",))
        again: list[int] = []

        def end() -> None:
            machine.end_process(process.pid)
            if how == "a pod":
                gpu_pod(world, "newcomer", PodSpec(gpus=1, stop_seconds=1.0, grace_seconds=5))
            elif how == "a pod in the middle of it":
                world.faults.on("look", Delay(1.0))
                idle = PodSpec(runtime_class="nvidia", stop_seconds=1.0, grace_seconds=5)  # it opens no device yet
                stage.later(0.5, lambda: gpu_pod(world, "newcomer", idle))
            elif how == "a process":
                again.append(machine.add_process("train-service", ("/dev/nvidia0",)).pid)
                stage.later(15.0, lambda: machine.end_process(again[0]))
            else:
                world.faults.on("pods_on", Delay(5.0))

        stage.later(20.0, end)
        assert (await stage.run()).code == 0
        first = stage.unloads()[0][0]
        calls = [call.name for call in world.faults.calls if call.when is When.BEFORE]
        if how.startswith("a pod"):
            assert "newcomer" not in {pod.name for pod in world.store.pods.values()}
        elif how == "a process":
            assert first > 35.0
        else:
            assert calls.count("pods_on") == 3  # for the plan, slowly, and again
        await stage.assert_put_back()

    play(story)


def test_r1_a_pod_that_comes_while_the_last_patch_is_on_its_way() -> None:
    """R1: the API server takes 10 s to answer that the unload may begin; a pod that comes meanwhile is freed before the first module."""

    async def story(stage: Stage) -> None:
        world = stage.world
        idle = PodSpec(runtime_class="nvidia", stop_seconds=1.0, grace_seconds=5)  # it opens no device yet

        def end() -> None:
            world.machine(NODE).end_process(process.pid)
            world.faults.on("patch_node", Delay(10.0))
            stage.later(3.0, lambda: gpu_pod(world, "newcomer", idle))

        process = world.machine(NODE).add_process("train-service", ("/dev/nvidia0",))
        stage.later(20.0, end)
        assert (await stage.run()).code == 0
        gone = next(one.at for one in world.store.diary if one.what == "gone" and "newcomer" in str(one))
        assert gone < stage.unloads()[0][0]
        await stage.assert_put_back()

    play(story)


# Modules ------------------------------------------------------------------------------------------------------------


def test_a_module_that_is_used_for_two_seconds() -> None:
    """A use without a process is waited for, and the run goes on when it ends."""

    async def story(stage: Stage) -> None:
        module = stage.world.machine(NODE).modules["nvidia"]
        module.users = 1
        stage.later(2.5, lambda: setattr(module, "users", 0))
        run = await stage.run()
        assert run.code == 0
        assert stage.now < 10
        await stage.assert_put_back()

    play(story)


def test_a_module_that_gets_busy_at_the_last_moment() -> None:
    """R1: a user that comes between the look and the unload is not harmed: the kernel keeps the module, the unload is tried again."""

    async def story(stage: Stage) -> None:
        module = stage.world.machine(NODE).modules["nvidia_uvm"]

        def use() -> None:
            module.users = 1
            stage.later(2.0, lambda: setattr(module, "users", 0))

        stage.world.faults.on("remove_file", Do(use))
        run = await stage.run()
        assert run.code == 0
        assert next(call.result for call in stage.world.machine(NODE).calls if call.argument == "nvidia_uvm") == "EAGAIN"
        await stage.assert_put_back()

    play(story)


def test_a_module_that_stays_busy() -> None:
    """R8: at the limit for unloads the run ends naming the module, with exit 75 and the node put back."""

    async def story(stage: Stage) -> None:
        module = stage.world.machine(NODE).modules["nvidia_uvm"]
        stage.world.faults.on("remove_file", Do(lambda: setattr(module, "users", 1)))
        run = await stage.run(unload_timeout=8.0)
        assert run.code == 75
        assert "nvidia_uvm" in run.sentence
        assert 8 <= stage.now <= 14
        await stage.assert_put_back()

    play(story)


def test_a_module_that_is_loaded_on_top_meanwhile() -> None:
    """The kernel loads some modules on demand: one that came after the plan was made goes too, before what it holds."""

    async def story(stage: Stage) -> None:
        machine = stage.world.machine(NODE)
        stage.later(1.0, lambda: machine.load_driver(modules=("nvidia_drm", "nvidia_peermem")))
        run = await stage.run()
        assert run.code == 0
        assert stage.now < 6
        assert {"nvidia_drm", "nvidia_peermem"} <= {name for _, name in stage.unloads()}
        stage.assert_free()

    play(story)


def test_n25_an_unload_that_hangs() -> None:
    """N25: a call that does not come back ends with exit 71 and the module's name; it is not tried again; the node is put back."""

    async def story(stage: Stage) -> None:
        stage.world.machine(NODE).modules["nvidia_uvm"].is_stuck = True
        run = await stage.run()
        assert run.code == 71
        assert "nvidia_uvm" in run.sentence
        assert [call.result for call in stage.world.machine(NODE).calls if call.argument == "nvidia_uvm"] == ["stuck"]
        await stage.assert_put_back()

    play(story)


def test_a_copy_of_the_drivers_mounts_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """It is no failure: the host is free. But it is named at the end, as nothing else shows what keeps the old driver's files alive."""

    async def story(stage: Stage) -> None:
        stage.world.machine(NODE).mount_copies.append(MountCopy(pid=77, command="exporter", target=DRIVER_ROOT, pod_uid="uid-7"))
        assert (await stage.run()).code == 0
        stage.assert_free()
        await stage.assert_put_back()

    play(story)
    (line,) = [str(record.__dict__["what"]) for record in caplog.records if "copy of the old driver" in record.message]
    for word in (DRIVER_ROOT, "exporter", "77", "uid-7"):
        assert word in line


def test_a_foreign_module_is_a_refusal() -> None:
    """R5: a module of somebody else that depends on the driver is found before anything is changed; a setting allows it to go."""

    async def story(stage: Stage) -> None:
        stage.world.machine(NODE).modules["lustre_gds"] = Module(name="lustre_gds", uses=("nvidia",))
        run = await stage.run()
        assert run.code == 65
        assert "lustre_gds" in run.sentence
        assert "UNLOAD_ALSO" in run.sentence
        assert stage.node_writes() == []
        assert (await stage.run(unload_also=("lustre_gds",))).code == 0
        stage.assert_free()
        await stage.assert_put_back()

    play(story)


def test_n26_a_module_that_comes_back() -> None:
    """N26: a module that is there again at the last look is unloaded once more before the node is opened."""

    async def story(stage: Stage) -> None:
        machine = stage.world.machine(NODE)
        stage.world.faults.on("remove_pid_file", Do(lambda: machine.load_driver(modules=("nvidia", "nvidia_peermem"))))
        assert (await stage.run()).code == 0
        stage.assert_free()

    play(story)


def test_n26_a_module_that_always_comes_back() -> None:
    """N26: after one more round the run fails with the module's name, and the node is put back."""

    async def story(stage: Stage) -> None:
        machine = stage.world.machine(NODE)
        stage.world.faults.on("remove_pid_file", Do(lambda: machine.load_driver(modules=("nvidia", "nvidia_peermem"))))
        rounds: list[int] = []

        def again() -> None:
            if "nvidia_peermem" not in machine.modules and "nvidia" in machine.modules:
                rounds.append(1)
                machine.modules["nvidia_peermem"] = Module(name="nvidia_peermem", uses=("nvidia",), users=1)

        stage.world.faults.on("unload_module", Do(again), when=When.AFTER, times=None)
        run = await stage.run(unload_timeout=2.0)
        assert rounds
        assert (run.code, "nvidia_peermem" in run.sentence) == (75, True), run.sentence
        await stage.assert_put_back()

    play(story)


def test_n26_peer_memory_goes_before_the_network_driver_is_waited_for() -> None:
    """N26: it is what the network driver waits for: at the limit of that wait it has gone, and the sentence is about the network driver."""

    async def story(stage: Stage) -> None:
        machine = stage.world.machine(NODE)
        machine.modules["ib_uverbs"] = Module(name="ib_uverbs")
        machine.modules["nvidia_peermem"] = Module(name="nvidia_peermem", uses=("nvidia", "ib_uverbs"))
        machine.pci.append(PciDevice(address="0000:5e:00.0", vendor="0x15b3", device_class="0x020000", driver=None))
        run = await stage.run(gpu_direct_rdma_enabled=True, use_host_mofed=False, network_driver_timeout=5.0)
        assert run.code == 75
        assert "network driver" in run.sentence
        assert set(machine.modules) == {"ib_uverbs"}
        await stage.assert_put_back()

    play(story)


@pytest.mark.parametrize("is_host", [True, False])
def test_n26_the_network_driver_is_waited_for_after_the_unload(is_host: bool) -> None:
    """N26, R8: with RDMA the run waits for the network driver once the modules are gone; at the limit it says so."""

    async def story(stage: Stage) -> None:
        machine = stage.world.machine(NODE)
        machine.pci.append(PciDevice(address="0000:5e:00.0", vendor="0x15b3", device_class="0x020000", driver=None))
        given: dict[str, Any] = {"gpu_direct_rdma_enabled": True, "use_host_mofed": is_host}
        first = await stage.run(**given, network_driver_timeout=20.0)
        assert first.code == 75
        assert "network driver" in first.sentence or "mlx5_core" in first.sentence
        assert len(stage.unloads()) == 3
        await stage.assert_put_back()

        def up() -> None:
            if is_host:
                machine.modules["mlx5_core"] = Module(name="mlx5_core")
            else:
                machine.files["/" + names.MOFED_READY] = ""

        stage.later(7.0, up)
        began = stage.now
        assert (await stage.run(**given)).code == 0
        assert 7.0 <= stage.now - began < 10.0

    play(story)


# Mounts -------------------------------------------------------------------------------------------------------------


def test_stacked_and_busy_mounts() -> None:
    """Decision 15: every layer goes, deeper ones first; a busy one is detached."""

    async def story(stage: Stage) -> None:
        machine = stage.world.machine(NODE)
        machine.mount(DRIVER_ROOT + "/proc", "proc")
        machine.mount(DRIVER_ROOT, is_busy=True)
        machine.mount(DRIVER_ROOT + "/sys", "sysfs")
        run = await stage.run()
        assert run.code == 0
        stage.assert_free()
        calls = [(call.argument, call.result) for call in machine.calls if call.call == "umount2"]
        assert calls[0] == (DRIVER_ROOT + "/sys", "0")
        assert (DRIVER_ROOT, "EBUSY") in calls
        assert calls[-1] == (DRIVER_ROOT, "0")

    play(story)


def test_a_busy_mount_may_be_refused() -> None:
    """Decision 15: with BUSY_MOUNTS=refuse a busy driver root fails the run, by name, and the node is put back."""

    async def story(stage: Stage) -> None:
        stage.world.machine(NODE).mounts[0].is_busy = True
        run = await stage.run(busy_mounts="refuse")
        assert run.code == 75
        assert DRIVER_ROOT in run.sentence
        assert stage.world.machine(NODE).mounts
        await stage.assert_put_back()

    play(story)


def test_an_unmount_that_hangs() -> None:
    """R8: an unmount that does not come back ends with exit 71, and the node is put back."""

    async def story(stage: Stage) -> None:
        stage.world.machine(NODE).mounts[0].is_stuck = True
        run = await stage.run()
        assert run.code == 71
        assert stage.now < 60
        await stage.assert_put_back()

    play(story)


@pytest.mark.parametrize("call", ["remove_file", "unload_module", "unmount", "remove_pid_file"])
def test_a_call_into_the_host_that_fails(call: str) -> None:
    """Whatever fails on the host, the node is put back, the exit code is not 0, and the next run succeeds."""

    async def story(stage: Stage) -> None:
        stage.world.faults.on(call, Fail(lambda: HostError("Input/output error", errno_name="EIO")))
        run = await stage.run()
        assert run.code == 71
        await stage.assert_put_back()
        evicted = len(stage.evicted)
        second = await stage.run()
        assert second.code == 0
        stage.assert_free()
        assert len(stage.evicted) >= evicted
        await stage.assert_put_back()

    play(story)


# The DRA plugin -----------------------------------------------------------------------------------------------------


def test_the_dra_plugin_goes_last() -> None:
    """The plugin that has to clean up after its pods is paused when they are gone, and comes back with everything else."""

    async def story(stage: Stage) -> None:
        plugin = stage.world.pod("nvidia-dra-driver", "dra-plugin").uid
        run = await stage.run()
        assert run.code == 0
        gone = {one.detail: one.at for one in stage.world.store.diary if one.what == "gone"}
        deleted = next(one.at for one in stage.world.store.diary if one.what == "delete" and one.target.startswith("nvidia-dra-driver/"))
        assert all(gone[uid] < deleted for _, _, uid in stage.world.evictions)
        assert gone[plugin] < stage.unloads()[0][0]
        pause, last, *_, restore = stage.node_writes()
        assert "dra-driver=" not in pause.replace("gpu-dra-driver=", "")
        assert "gpu.deploy.dra-driver=paused-for-driver-upgrade" in last
        assert "gpu.deploy.dra-driver=true" in restore
        await stage.assert_put_back()
        assert stage.world.node(NODE).labels[DRA_LABEL] == "true"

    play(story, with_dra(small_world()))


def test_r02_another_driver_is_waited_for() -> None:
    """R2: a driver pod of another owner that still lives on the node is waited for by uid before anything is changed, then 75."""

    async def story(stage: Stage) -> None:
        spec = PodSpec(labels={names.COMPONENT_LABEL: "nvidia-driver"}, stop_seconds=3.0)
        other = stage.world.add_pod("old-driver", spec, node=NODE, namespace=NAMESPACE)
        first = await stage.run(holder_timeout=10.0)
        assert first.code == 75
        assert f"{NAMESPACE}/old-driver" in first.sentence
        assert stage.node_writes() == []
        stage.later(4.0, lambda: stage.world.delete_pod(other))
        second = await stage.run()
        assert second.code == 0
        gone = next(one.at for one in stage.world.store.diary if one.what == "gone" and one.detail == other.uid)
        pause = next(one.at for one in stage.world.store.diary if "=paused" in one.detail)
        assert gone < pause < stage.unloads()[0][0]
        await stage.assert_put_back()

    play(story)
