"""What hypothesis makes up: nodes, pods, records."""

from __future__ import annotations

from hypothesis import strategies as st

from driver_manager import names
from driver_manager.config import Settings
from driver_manager.core.consumers import PodPolicy
from driver_manager.core.record import Phase, Record
from driver_manager.core.selectors import parse_selector
from driver_manager.core.snapshot import (
    ClaimView,
    Holder,
    Identity,
    LabelExpression,
    NodeView,
    Owner,
    PodView,
    Taint,
    Toleration,
)
from driver_manager.core.uses import UseContext
from driver_manager.operands import OPERANDS

LABELS = [operand.label for operand in OPERANDS] + [names.DEPLOY_CLIENT, names.DEPLOY_DRIVER, "team", "example.com/gpu"]
VALUES = ["true", "false", "", "x", names.PAUSED, f"x_{names.PAUSED}", "paused-for-mig-change", "pre-installed"]
KEYS = [names.KEEP_OFF_TAINT, names.GPU_TAINT, "example.com/repair"]
EFFECTS = ["NoSchedule", "PreferNoSchedule", "NoExecute"]

text = st.text(max_size=12)
label_values = st.just("") | st.from_regex(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,8}[A-Za-z0-9])?", fullmatch=True)
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


KINDS = ["DaemonSet", "ReplicaSet", "StatefulSet", "Job", "Node", "VirtualMachineInstance", "", "Däemon Set"]
owners = st.none() | st.builds(Owner, st.sampled_from(KINDS), st.sampled_from(["a", "b"]))
RESOURCES = ["nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-1g.5gb", "cpu", "nvidia.com/hostdev"]
PATHS = ["/", "/dev", "/dev/nvidia0", "/dev/dri/renderD128", "/run/nvidia/driver", "/var/lib/kubelet/plugins", "/etc", "//dev/./vfio/5", ""]
CLAIMS = ["user", "admin", "channel", "foreign", "idle", "gone"]
UIDS = [f"uid-{number}" for number in range(6)]
expressions = st.builds(
    LabelExpression,
    st.sampled_from([*LABELS, names.COMPUTE_DOMAIN_LABEL]),
    st.sampled_from(["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt", "Like"]),
    st.lists(st.sampled_from([*VALUES, "7"]), max_size=2).map(tuple),
)
pod_annotations = st.fixed_dictionaries(
    {},
    optional={
        names.MIRROR: st.just("x"),
        names.MIRROR_HASH: st.sampled_from(["hash", "", "x"]),
        names.GPU_CLIENT: st.sampled_from(["true", "True", "", "false"]),
        "cdi.k8s.io/x": st.sampled_from(["nvidia.com/gpu=0", "nvidia.com/", ",=", "vendor.com/net=1"]),
    },
)
pod_labels = st.fixed_dictionaries(
    {},
    optional={
        "app": st.sampled_from(["nvidia-device-plugin-daemonset", "nvidia-dra-driver-kubelet-plugin", "web"]),
        names.COMPONENT_LABEL: st.sampled_from(["nvidia-driver", "nvidia-vgpu-manager", "other"]),
        names.DRAIN_SKIP: st.sampled_from(["true", "false"]),
        names.GPU_CLIENT: st.sampled_from(["true", "1"]),
        names.VM_LABEL: st.sampled_from(["virt-launcher", "virt-api"]),
        "x-component": st.just("kubelet-plugin"),
    },
)


@st.composite
def pods(draw: st.DrawFn) -> PodView:
    """A pod of any kind."""
    return PodView(
        namespace=draw(st.sampled_from(["default", "gpu-operator"])),
        name=draw(st.sampled_from(["p", "q", "r"])),
        uid=draw(st.sampled_from(UIDS)),
        phase=draw(st.sampled_from(["Pending", "Running", "Succeeded", "Failed", "Unknown"])),
        labels=draw(pod_labels),
        annotations=draw(pod_annotations),
        owner=draw(owners),
        is_terminating=draw(st.booleans()),
        node_selector=draw(st.dictionaries(st.sampled_from([*LABELS, names.COMPUTE_DOMAIN_LABEL]), st.sampled_from(VALUES), max_size=2)),
        affinity=tuple(draw(st.lists(st.lists(expressions, max_size=2).map(tuple), max_size=2))),
        tolerations=tuple(draw(st.lists(tolerations, max_size=2))),
        resources=frozenset(draw(st.lists(st.sampled_from(RESOURCES), max_size=2))),
        has_empty_dir=draw(st.booleans()),
        runtime_class=draw(st.sampled_from([None, "nvidia", "fast", "kata"])),
        host_paths=tuple(draw(st.lists(st.sampled_from(PATHS), max_size=2))),
        claims=tuple(draw(st.lists(st.sampled_from(CLAIMS), max_size=2, unique=True))),
        has_pending_claims=draw(st.booleans()),
        finalizers=tuple(draw(st.lists(st.just("x/y"), max_size=1))),
        container_names=frozenset(draw(st.lists(st.sampled_from(["gpus", "main"]), max_size=2))),
    )


@st.composite
def neighbours(draw: st.DrawFn, most: int = 5) -> list[PodView]:
    """Pods that can be on one node together: no two have one uid."""
    return draw(st.lists(pods(), max_size=most, unique_by=lambda pod: pod.uid))


def _claims(namespace: str) -> dict[tuple[str, str], ClaimView]:
    drivers = {"user": "gpu.nvidia.com", "admin": "gpu.nvidia.com", "channel": "compute-domain.nvidia.com", "foreign": "gpu.amd.com"}
    made = {(namespace, name): ClaimView(namespace=namespace, name=name, drivers=frozenset({by})) for name, by in drivers.items()}
    admin = ClaimView(namespace=namespace, name="admin", drivers=frozenset({names.GPU_DRA_DRIVER}), is_admin=True)
    return made | {(namespace, "admin"): admin, (namespace, "idle"): ClaimView(namespace=namespace, name="idle")}


NO_CLAIMS: dict[tuple[str, str], ClaimView] = {}
claims = st.sampled_from([NO_CLAIMS, _claims("default"), _claims("default") | _claims("gpu-operator")])
holders = st.dictionaries(
    st.sampled_from([*UIDS, "hash", "../..", "x"]),
    st.builds(lambda pid: (Holder(pid=pid, command="c", devices=("/dev/nvidia0",)),), st.integers(1, 9)),
    max_size=3,
)
handlers = st.sampled_from([None, {}, {"fast": "nvidia-cdi", "kata": "kata", "nvidia": "runc"}])
settings = st.builds(
    Settings,
    node_name=st.just("n"),
    operator_namespace=st.just("gpu-operator"),
    enable_gpu_pod_eviction=st.booleans(),
    drain_use_force=st.booleans(),
    drain_delete_emptydir_data=st.booleans(),
    custom_label=st.sampled_from(["", "example.com/gpu"]),
    consumer_selector=st.sampled_from(["", "app=web"]).map(parse_selector),
    hidden_consumers=st.sampled_from(["evict", "refuse", "ignore"]),
    policy_owned_consumers=st.sampled_from(["free", "wait", "refuse"]),
)
contexts = st.builds(UseContext, settings=settings, runtime_handlers=handlers, claims=claims, holders=holders)


@st.composite
def policies(draw: st.DrawFn) -> PodPolicy:
    """What verdicts depend on, of any kind."""
    paused = draw(
        st.dictionaries(st.sampled_from([name for name in LABELS if name not in names.NEVER_PAUSED]), st.just("true"), max_size=3)
    )
    apps = st.frozensets(st.sampled_from([operand.app for operand in OPERANDS if operand.app]), max_size=2)
    return PodPolicy(
        settings=draw(settings),
        identity=draw(st.sampled_from([Identity(), Identity("gpu-operator", "me", UIDS[0], "n")])),
        runtime_handlers=draw(handlers),
        claims=draw(claims),
        holders=draw(holders),
        node_labels=draw(st.dictionaries(st.sampled_from(LABELS), st.sampled_from(VALUES), max_size=4)),
        paused=paused,
        paused_last=frozenset(draw(st.lists(st.sampled_from(sorted(paused)), max_size=2))) if paused else frozenset(),
        operand_apps=draw(apps),
        keep_off=draw(st.none() | st.just(Taint(names.GPU_TAINT, "dm-run"))),
        parkable=draw(st.none() | st.frozensets(st.sampled_from(["default/a", "kube-system/a"]))),
        not_parkable=draw(st.dictionaries(st.just("default/b"), st.just("cannot be parked"), max_size=1)),
        is_policy_owned=draw(st.booleans()),
    )


records = st.builds(
    Record,
    run=text,
    node_uid=text,
    boot_id=text,
    started=text,
    phase=st.sampled_from(list(Phase)),
    pod=st.just(Identity()) | st.builds(Identity, text, text, st.text(min_size=1, max_size=9)),
    labels=st.dictionaries(text, label_values, max_size=5),
    is_cordoned=st.booleans(),
    taint=st.none() | st.builds(Taint, text, text, text),
    parked=st.sampled_from([(), ("mon/exporter",), ("mon/exporter", "a/b.c")]),
    let_in=st.sampled_from([(), ("mon/exporter",)]),
)
