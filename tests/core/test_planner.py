"""The planner: which way a run goes, what it refuses before any write, and what is on each way."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver_manager import names
from driver_manager.config import Settings
from driver_manager.core.modules import DRIVER_MODULES, NOUVEAU
from driver_manager.core.parking import Means
from driver_manager.core.plan import (
    AwaitForeignPause,
    AwaitPolicyOwner,
    AwaitReleased,
    AwaitRollingUpdate,
    BeginUnload,
    FreePods,
    LookAgain,
    MarkHostDriver,
    Path,
    PauseLast,
    PauseNode,
    Plan,
    ProveFree,
    RemoveFiles,
    RestoreNode,
    TryEvictions,
    UnloadModule,
    UnmarkHostDriver,
    Unmount,
    describe,
)
from driver_manager.core.planner import needed_permissions, plan_uninstall
from driver_manager.core.record import Phase, Record, encode
from driver_manager.core.report import plan_document
from driver_manager.core.rounds import plan_round
from driver_manager.core.seen import Snapshot
from driver_manager.core.snapshot import (
    DriverFiles,
    HostView,
    Identity,
    ModuleState,
    ModuleView,
    MountView,
    NodeView,
    Owner,
    PciDevice,
    PodView,
    Toleration,
    Unloading,
)
from driver_manager.errors import Exit
from tests.core.given import nodes, pods

LABEL = names.DEPLOY_PREFIX + "dcgm"
DRA = names.DEPLOY_PREFIX + "dra-driver"
NODE = NodeView(name="n", uid="uid-n", resource_version="1", labels={LABEL: "true"})
MODULES = {
    "nvidia": ModuleView(name="nvidia", refcount=1, holders=frozenset({"nvidia_uvm"}), version="550.1"),
    "nvidia_uvm": ModuleView(name="nvidia_uvm"),
}
ROOT = MountView(mount_id=1, target="/run/nvidia/driver")
HOST = HostView(boot_id="boot", modules=MODULES, mounts=(ROOT,), state_digest="d1", markers=("driver-ready",), has_pid_file=True)
GPU = PodView(namespace="default", name="p", uid="u", owner=Owner("ReplicaSet", "r"), resources=frozenset({"nvidia.com/gpu"}))
BARE = replace(GPU, name="bare", uid="b", owner=None)
SEEN = Snapshot(node=NODE, host=HOST, pods=(GPU,), run="run", started="t")
WRITES = (PauseNode, PauseLast, BeginUnload, MarkHostDriver)


EXPORTER = PodView(
    namespace="mon", name="exporter-x", uid="e", owner=Owner("DaemonSet", "exporter"), annotations={names.GPU_CLIENT: "true"},
    tolerations=(Toleration(operator="Exists"),),
)  # fmt: skip
PARKING = replace(SEEN, pods=(GPU, EXPORTER), means=Means(parkable=frozenset({"mon/exporter"})))


def test_a_parked_daemon_set_is_part_of_the_pause() -> None:
    """Decision 19: it is in the record of the pause patch, its pod is asked for and evicted with the others, and a round frees it too."""
    plan = planned(PARKING)
    pause = next(step for step in plan.steps if isinstance(step, PauseNode))
    assert pause.record.parked == ("mon/exporter",)
    assert "park mon/exporter" in describe(pause)
    assert [step.pods for step in plan.steps if isinstance(step, TryEvictions)] == [(GPU, EXPORTER)]
    assert next(step for step in plan.steps if isinstance(step, FreePods)).evict == (GPU, EXPORTER)
    assert plan_document(plan)["evictions"] == 2
    assert plan_round(PARKING, Settings(), pause.record).evict == (GPU, EXPORTER)
    assert [each.pod for each in plan_round(PARKING, Settings(), replace(pause.record, parked=())).refused] == [EXPORTER]


def test_a_rolling_update_comes_first() -> None:
    """Decision 45: it is waited for before anything is written."""
    plan = planned(replace(PARKING, means=replace(PARKING.means, rolling=frozenset({"mon/exporter", "mon/other"}))))
    assert (plan.path, plan.steps) == (Path.WAIT, (AwaitRollingUpdate(("mon/exporter",)),))
    assert "mon/exporter" in describe(plan.steps[0])


def test_a_plugin_that_is_parked_goes_last() -> None:
    """Decision 46: a DRA plugin goes after the pods that it serves, whatever keeps it off."""
    plugin = replace(EXPORTER, host_paths=("/var/lib/kubelet/plugins",), container_names=frozenset({"gpus", "compute-domains"}))
    plan = planned(replace(PARKING, pods=(GPU, plugin)))
    assert next(step for step in plan.steps if isinstance(step, FreePods)).evict == (GPU,)
    assert next(step for step in plan.steps if isinstance(step, PauseLast)).evict == (plugin,)


def planned(seen: Snapshot = SEEN, **given_settings: Any) -> Plan:
    """The plan."""
    return plan_uninstall(seen, Settings(node_name="n", **given_settings))


def on_host(**fields: Any) -> Snapshot:
    """The snapshot with another host."""
    return replace(SEEN, host=replace(HOST, **fields))


def with_record(boot: str = "boot", phase: Phase = Phase.PAUSED, seen: Snapshot = SEEN, **fields: Any) -> Snapshot:
    """The snapshot with a record of an earlier run on the node."""
    record = Record(run="old", node_uid="uid-n", boot_id=boot, started="t", phase=phase, labels={LABEL: "true"}, **fields)
    labels = {**seen.node.labels, LABEL: names.PAUSED}
    return replace(seen, node=replace(seen.node, labels=labels, annotations={names.RECORD: encode(record)}))


def kinds(plan: Plan) -> list[type]:
    """The kinds of its steps."""
    return [type(step) for step in plan.steps]


NOTHING = on_host(modules={})
VFIO = PciDevice(address="a", vendor="0x10de", device_class="0x030200", driver="vfio-pci")
HOST_DRIVER = on_host(mounts=(), driver_files=DriverFiles(module_files=("x",), library_versions=frozenset({"550.1"})))


@pytest.mark.parametrize(
    ("seen", "settings", "path", "code"),
    [
        (SEEN, {}, Path.FULL, Exit.DONE),
        (SEEN, {"driver_config_digest": "d1"}, Path.UNCHANGED, Exit.DONE),
        (SEEN, {"driver_config_digest": "d2"}, Path.FULL, Exit.DONE),
        (SEEN, {"driver_config_digest": "d1", "force_reinstall": True}, Path.FULL, Exit.DONE),
        (on_host(state_digest=None), {"driver_config_digest": "d1"}, Path.FULL, Exit.DONE),
        (NOTHING, {}, Path.NOTHING_LOADED, Exit.DONE),
        (NOTHING, {"driver_config_digest": "d1"}, Path.NOTHING_LOADED, Exit.DONE),
        (HOST_DRIVER, {}, Path.HOST_DRIVER, Exit.HOST_DRIVER),
        (with_record(), {"driver_config_digest": "d1"}, Path.UNCHANGED, Exit.DONE),
        (with_record(phase=Phase.UNLOADING), {"driver_config_digest": "d1"}, Path.FULL, Exit.DONE),
        (with_record(boot="other"), {}, Path.UNDO, Exit.DONE),
        (with_record(boot="other", seen=NOTHING), {}, Path.UNDO, Exit.DONE),
        (replace(SEEN, node=replace(NODE, annotations={names.RECORD: "{"})), {}, Path.REFUSED, Exit.REFUSED),
        (replace(SEEN, pods=(BARE,)), {}, Path.REFUSED, Exit.REFUSED),
        (SEEN, {"enable_gpu_pod_eviction": False}, Path.REFUSED, Exit.REFUSED),
        (on_host(unloading=Unloading.DISABLED), {}, Path.REFUSED, Exit.CANNOT_UNLOAD),
        (on_host(unloading=Unloading.UNSUPPORTED), {}, Path.REFUSED, Exit.CANNOT_UNLOAD),
        (on_host(unloading=Unloading.NOT_PERMITTED), {}, Path.REFUSED, Exit.CANNOT_UNLOAD),
        (on_host(unloading=Unloading.DISABLED), {"driver_config_digest": "d1"}, Path.UNCHANGED, Exit.DONE),
        (on_host(unloading=Unloading.DISABLED, modules={}), {}, Path.NOTHING_LOADED, Exit.DONE),
        (on_host(unloading=Unloading.DISABLED, modules={NOUVEAU: ModuleView(name=NOUVEAU)}), {}, Path.REFUSED, Exit.CANNOT_UNLOAD),
        (on_host(modules=MODULES | {"gdrdrv": ModuleView(name="gdrdrv", state=ModuleState.GOING)}), {}, Path.REFUSED, Exit.CANNOT_UNLOAD),
        (on_host(modules={}, pci=(VFIO,)), {}, Path.NOTHING_LOADED, Exit.DONE),
        (on_host(modules={}, pci=(replace(VFIO, vendor="0x15b3"),)), {}, Path.NOTHING_LOADED, Exit.DONE),
        (replace(SEEN, node=replace(NODE, labels={LABEL: "paused-for-mig-change"})), {}, Path.WAIT, Exit.DONE),
        (replace(SEEN, node=replace(NODE, annotations={names.UPGRADE_ENABLED: "true"})), {}, Path.WAIT, Exit.DONE),
        (replace(SEEN, pods=(), node=replace(NODE, annotations={names.UPGRADE_ENABLED: "true"})), {}, Path.FULL, Exit.DONE),
    ],
)  # fmt: skip
def test_r11_n25_n27_n28_which_way(seen: Snapshot, settings: dict[str, Any], path: Path, code: Exit) -> None:
    """R11, N25, N27, N28, N54: each way by an example, with its exit code."""
    plan = planned(seen, **settings)
    assert (plan.path, plan.ends_with) == (path, code)
    assert plan.because


@given(
    nodes(), st.lists(pods(), max_size=5), st.booleans(), st.booleans(), st.sampled_from(list(Unloading)), st.sampled_from(["", "d1", "d2"])
)
def test_r05_a_refusal_comes_before_any_write(
    node: NodeView, there: list[PodView], evict: bool, drain: bool, unloading: Unloading, digest: str
) -> None:
    """R5, R11: whatever is on the node, a refusal has no steps and says why and what to do; quiet ways never pause or evict."""
    seen = replace(SEEN, node=node, pods=tuple(there), host=replace(HOST, unloading=unloading))
    plan = planned(seen, enable_gpu_pod_eviction=evict, enable_auto_drain=drain, driver_config_digest=digest)
    if plan.path is Path.REFUSED:
        assert plan.steps == ()
        assert plan.refusals
        assert plan.hint
        assert plan.ends_with is not Exit.DONE
    if plan.path in (Path.UNCHANGED, Path.NOTHING_LOADED, Path.WAIT, Path.UNDO):
        assert not any(isinstance(step, (TryEvictions, UnloadModule, BeginUnload)) for step in plan.steps)
    if plan.path is Path.FULL:
        assert len(plan.verdicts) == len(there)
        assert plan.steps[-1] == RestoreNode()
        assert plan.on_failure == (RestoreNode(),)
        assert (plan_document(plan)["evictions"] > 0) == (TryEvictions in kinds(plan))


def test_the_order_of_the_full_way() -> None:
    """Decision 12: ask, pause, free, wait for holders, look again, note it, files, modules, mounts, prove, put back."""
    order = [TryEvictions, PauseNode, FreePods, AwaitReleased, LookAgain, BeginUnload, RemoveFiles, UnloadModule, UnloadModule, Unmount]
    plan = planned()
    assert kinds(plan)[: len(order)] == order
    assert kinds(plan)[-2:] == [ProveFree, RestoreNode]
    files = next(step for step in plan.steps if isinstance(step, RemoveFiles))
    assert files.paths[0] == "/" + names.STATE_FILE
    assert {path.rpartition("/")[2] for path in files.paths[1:]} == set(names.READY_MARKERS)


@given(st.sets(st.sampled_from(DRIVER_MODULES)).map(lambda some: some | {"nvidia"}))
def test_r01_nothing_is_unloaded_before_the_last_look(loaded: set[str]) -> None:
    """R1: on the full way every unload and unmount comes after the last look and the note on the node, `nvidia` last."""
    modules = {name: ModuleView(name=name) for name in loaded}
    modules["nvidia"] = ModuleView(name="nvidia", refcount=len(loaded) - 1, holders=frozenset(loaded - {"nvidia"}))
    plan = planned(on_host(modules=modules))
    noted = kinds(plan).index(BeginUnload)
    assert kinds(plan).index(LookAgain) < noted
    unloads = [(place, step.name) for place, step in enumerate(plan.steps) if isinstance(step, UnloadModule)]
    assert min(place for place, _ in unloads) > noted
    assert unloads[-1][1] == "nvidia"
    assert {name for _, name in unloads} == loaded


@pytest.mark.parametrize(
    ("node", "settings", "cordons"),
    [
        (NODE, {}, True),
        (replace(NODE, unschedulable=True), {}, False),
        (replace(NODE, annotations={names.UPGRADE_ENABLED: "true"}), {}, False),
        (replace(NODE, annotations={names.UPGRADE_ENABLED: "false"}), {}, True),
        (NODE, {"enable_gpu_pod_eviction": False}, False),
        (NODE, {"enable_gpu_pod_eviction": False, "enable_auto_drain": True}, True),
    ],
)
def test_whose_cordon_it_is(node: NodeView, settings: dict[str, Any], cordons: bool) -> None:
    """R3, decision 1: the cordon becomes ours only where nobody had made it and no upgrade controller owns it."""
    plan = planned(replace(SEEN, node=node, pods=()), **settings)
    pause = next(step for step in plan.steps if isinstance(step, PauseNode))
    assert pause.record.is_cordoned is cordons


def test_decision_7_an_adopted_record() -> None:
    """Decision 7: originals, cordon and taint of the earlier run stay in the record of the new one."""
    plan = planned(with_record(is_cordoned=True, seen=replace(SEEN, node=replace(NODE, unschedulable=True))))
    pause = next(step for step in plan.steps if isinstance(step, PauseNode))
    assert pause.record.run == "run"
    assert dict(pause.record.labels) == {LABEL: "true"}
    assert pause.record.is_cordoned
    assert planned(with_record(seen=NOTHING)).steps[-1] == RestoreNode()


def test_waits_change_nothing() -> None:
    """What has to end first is a plan of its own, another tool's pause before all: pods it has paused are on their way out."""
    labels = {LABEL: "true", names.DEPLOY_PREFIX + "nvsm": "paused-for-mig-change"}
    owned = {names.UPGRADE_ENABLED: "true"}
    assert kinds(planned(replace(SEEN, node=replace(NODE, labels=labels, annotations=owned)))) == [AwaitForeignPause]
    assert kinds(planned(replace(SEEN, node=replace(NODE, labels={LABEL: "true"}, annotations=owned)))) == [AwaitPolicyOwner]


def test_restarting_a_plugin_keeps_an_adopted_record() -> None:
    """Decisions 7 and 14: where a DRA plugin is restarted, what an earlier run had recorded stays in the record."""
    plugin = PodView(
        namespace="d",
        name="plugin",
        uid="pl",
        owner=Owner("DaemonSet", "d"),
        labels={"app": "nvidia-dra-driver-kubelet-plugin"},
        node_selector={DRA: "true"},
        is_ready=True,
    )
    seen = replace(NOTHING, pods=(plugin,), node=replace(NODE, labels={LABEL: "true", DRA: "true"}))
    plan = planned(with_record(seen=seen))
    pause = next(step for step in plan.steps if isinstance(step, PauseNode))
    assert dict(pause.record.labels) == {LABEL: "true", DRA: "true"}
    assert dict(pause.labels) == {DRA: "true"}
    assert kinds(plan)[-3:] == [PauseNode, FreePods, RestoreNode]
    assert kinds(plan).count(RestoreNode) == 1


@pytest.mark.parametrize("label", [names.PRE_INSTALLED, "true", None])
def test_n17_the_mark_is_written_once(label: str | None) -> None:
    """N17: the mark is planned only where the label does not say it yet; without a host driver ours goes, and only ours."""
    labels = {} if label is None else {names.DEPLOY_DRIVER: label}
    plan = planned(replace(HOST_DRIVER, node=replace(NODE, labels=labels)))
    assert (MarkHostDriver in kinds(plan)) == (label != names.PRE_INSTALLED)
    assert UnmarkHostDriver not in kinds(planned(replace(SEEN, node=replace(NODE, labels=labels))))
    ours = replace(NODE, labels=labels, annotations={names.HOST_DRIVER: '{"previous":"true"}'})
    for seen in (SEEN, NOTHING):
        assert UnmarkHostDriver in kinds(planned(replace(seen, node=ours)))


def test_r02_other_drivers_come_first() -> None:
    """R2: another driver's pod that lives on the node is waited for before anything; one that has ended is not, nor is our own."""
    own = PodView(namespace="o", name="me", uid="me", labels={names.COMPONENT_LABEL: "nvidia-driver"})
    other = replace(own, name="other", uid="other")
    seen = replace(SEEN, identity=Identity("o", "me", "me", "n"), pods=(own, other))
    assert planned(seen).path is Path.WAIT
    assert planned(replace(seen, pods=(own, replace(other, phase="Failed")))).path is Path.FULL
    assert plan_round(seen, Settings(), Record(run="r", node_uid="u", boot_id="b", started="t")).other_drivers == (other,)


def test_notes_say_what_cannot_be_seen() -> None:
    """R12: holders that cannot be seen, guesses, and the choice of the taint stand in the plan."""
    seen = replace(on_host(sees_all_processes=False, notes=("no mountinfo",)), node=replace(NODE, labels={LABEL: names.PAUSED}))
    text = " ".join(planned(seen).notes)
    for word in ("hostPID", "no mountinfo", "guess", "taint"):
        assert word in text


def test_needed_permissions() -> None:
    """N60: what a plan needs is known before it begins; a way that writes nothing needs nothing."""
    assert set(needed_permissions(planned())) == {("patch", "", "nodes"), ("watch", "", "pods"), ("create", "", "pods/eviction")}
    assert ("create", "", "pods/eviction") not in needed_permissions(planned(replace(SEEN, pods=())))


@given(nodes(), st.lists(pods(), max_size=4))
def test_every_step_is_described(node: NodeView, there: list[PodView]) -> None:
    """Every step of every plan has one line for people, and the document of the plan holds them all."""
    plan = planned(replace(SEEN, node=node, pods=tuple(there)))
    lines = [describe(step) for step in plan.steps]
    assert all(line and "\n" not in line for line in lines)
    document = plan_document(plan)
    assert [step["description"] for step in document["steps"]] == lines
    assert document["exitCode"] == int(plan.ends_with)
    assert len(document["verdicts"]) in (0, len(there))
