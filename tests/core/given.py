"""What hypothesis makes up: nodes, pods, records."""

from __future__ import annotations

from hypothesis import strategies as st

from driver_manager import names
from driver_manager.core.record import Phase, Record
from driver_manager.core.snapshot import Identity, NodeView, Owner, PodView, Taint, Toleration
from driver_manager.operands import OPERANDS

LABELS = [operand.label for operand in OPERANDS] + [names.DEPLOY_CLIENT, names.DEPLOY_DRIVER, "team", "example.com/gpu"]
VALUES = ["true", "false", "", "x", names.PAUSED, f"x_{names.PAUSED}", "paused-for-mig-change", "pre-installed"]
KEYS = [names.KEEP_OFF_TAINT, names.GPU_TAINT, "example.com/repair"]
EFFECTS = ["NoSchedule", "PreferNoSchedule", "NoExecute"]

text = st.text(max_size=12)
taints = st.builds(Taint, st.sampled_from(KEYS), st.sampled_from(["", "present", "dm-old", "dm-run"]), st.sampled_from(EFFECTS))
tolerations = st.builds(
    Toleration,
    st.sampled_from(["", *KEYS]),
    st.sampled_from(["Equal", "Exists"]),
    st.sampled_from(["", "present", "dm-run"]),
    st.sampled_from(["", *EFFECTS]),
)


@st.composite
def nodes(draw: st.DrawFn) -> NodeView:
    """A node with any labels, annotations, cordon and taints; one taint for each key and effect, as the server has it."""
    made = draw(st.lists(taints, max_size=4, unique_by=lambda one: (one.key, one.effect)))
    return NodeView(
        name="n",
        uid="uid-n",
        resource_version="1",
        labels=draw(st.dictionaries(st.sampled_from(LABELS), st.sampled_from(VALUES), max_size=8)),
        annotations=draw(st.dictionaries(st.sampled_from(["note", names.KEEP_CORDON]), st.sampled_from(["true", "x"]))),
        unschedulable=draw(st.booleans()),
        taints=tuple(made),
    )


owners = st.none() | st.builds(Owner, st.sampled_from(["DaemonSet", "ReplicaSet", "Job", "Node"]), st.sampled_from(["a", "b"]))
RESOURCES = ["nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-1g.5gb", "cpu", "nvidia.com/hostdev"]


@st.composite
def pods(draw: st.DrawFn) -> PodView:
    """A pod of any kind."""
    labels = st.fixed_dictionaries(
        {},
        optional={
            "app": st.sampled_from(["nvidia-device-plugin-daemonset", "web"]),
            names.COMPONENT_LABEL: st.sampled_from(["nvidia-driver", "nvidia-vgpu-manager", "other"]),
            names.DRAIN_SKIP: st.sampled_from(["true", "false"]),
        },
    )
    return PodView(
        namespace=draw(st.sampled_from(["default", "gpu-operator"])),
        name=draw(st.sampled_from(["p", "q", "r"])),
        uid=draw(st.uuids().map(str)),
        phase=draw(st.sampled_from(["Pending", "Running", "Succeeded", "Failed", "Unknown"])),
        labels=draw(labels),
        annotations=draw(st.fixed_dictionaries({}, optional={names.MIRROR: st.just("x")})),
        owner=draw(owners),
        is_terminating=draw(st.booleans()),
        node_selector=draw(st.dictionaries(st.sampled_from(LABELS), st.sampled_from(VALUES), max_size=2)),
        tolerations=tuple(draw(st.lists(tolerations, max_size=2))),
        resources=frozenset(draw(st.lists(st.sampled_from(RESOURCES), max_size=2))),
        has_empty_dir=draw(st.booleans()),
    )


records = st.builds(
    Record,
    run=text,
    node_uid=text,
    boot_id=text,
    started=text,
    phase=st.sampled_from(list(Phase)),
    pod=st.just(Identity()) | st.builds(Identity, text, text, st.text(min_size=1, max_size=9)),
    labels=st.dictionaries(text, text, max_size=5),
    is_cordoned=st.booleans(),
    taint=st.none() | st.builds(Taint, text, text, text),
)
