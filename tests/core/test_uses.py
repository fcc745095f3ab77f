"""What shows that a pod uses the driver: every row of the table, what is nearly one, and the settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver_manager import names
from driver_manager.config import OPTIONS, Settings, effective_settings
from driver_manager.core.selectors import parse_selector
from driver_manager.core.snapshot import ClaimView, Holder, LabelExpression, Owner, PodView
from driver_manager.core.uses import ROWS, Evidence, UseContext, gpu_resources, is_dra_plugin, uses
from driver_manager.errors import ConfigError
from tests.core.given import contexts, pods

POD = PodView(namespace="default", name="p", uid="u", owner=Owner("ReplicaSet", "web"))
PLUGINS = "/var/lib/kubelet/plugins"
PLAIN = UseContext(settings=Settings())


def found(pod: dict[str, Any], context: UseContext = PLAIN, **settings: Any) -> list[Evidence]:
    """The evidence for a pod with some fields, with some settings."""
    chosen = replace(context, settings=Settings(**settings)) if settings else context
    return [use.evidence for use in uses(replace(POD, **pod), chosen)]


def read(**environment: str) -> Settings:
    """The settings as a user gives them."""
    return effective_settings({}, environment).settings


# Resources ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("resource", "is_use"),
    [
        ("nvidia.com/gpu", True), ("nvidia.com/gpu.shared", True), ("nvidia.com/gpu-a100", True), ("nvidia.com/mig-1g.5gb", True),
        ("nvidia.com/mig-1g.10gb.shared", True), ("requests.nvidia.com/gpu", False), ("amd.com/gpu", False), ("cpu", False),
        ("nvidia.com/hostdev", False), ("nvidia.com/mig", False), ("nvidia.com/GA102GL_A10", True), ("nvidia.com/A10-12Q", False),
        ("example.com/nvidia.com/gpu", False), ("nvidia.com", False), ("", False),
    ],
)  # fmt: skip
def test_resources(resource: str, is_use: bool) -> None:
    """Row 1 with the stock prefixes: GPUs shared, renamed with a suffix, and MIG; never network devices or other vendors'."""
    assert found({"resources": frozenset({"cpu", "memory", resource})}) == ([Evidence.RESOURCE] if is_use else [])


@pytest.mark.parametrize(
    ("prefixes", "resource", "is_use"),
    [
        ("example.com/gpu", "example.com/gpu", True),
        ("example.com/gpu", "nvidia.com/gpu", False),
        ("nvidia.com/gpu,nvidia.com/A10-", "nvidia.com/A10-12Q", True),
        ("nvidia.com/gpu, nvidia.com/GA102GL_A10 ,", "nvidia.com/GA102GL_A10", True),
        ("nvidia.com/GRID_T4", "nvidia.com/GRID_T4-2Q", True),
        ("nvidia.com/GRID_T4", "nvidia.com/grid_t4-2q", False),
        ("nvidia.com/pgpu", "nvidia.com/pgpu", True),
    ],
)
def test_resources_by_the_setting(prefixes: str, resource: str, is_use: bool) -> None:
    """GPU_RESOURCE_PREFIXES: renamed, vGPU and KubeVirt names as a user gives them; what is left out counts no more."""
    pod = replace(POD, resources=frozenset({resource}))
    assert bool(gpu_resources(pod, read(GPU_RESOURCE_PREFIXES=prefixes))) is is_use


@pytest.mark.parametrize("text", ["gpu", "/gpu", ",", "nvidia.com/gpu,,*", "nvidia.com/gpu;x", "NVIDIA.com/gpu", "nvidia.com"])
def test_prefixes_that_are_none(text: str) -> None:
    """A prefix that could match everything, or nothing at all, is refused with the setting's name."""
    with pytest.raises(ConfigError, match="GPU_RESOURCE_PREFIXES"):
        read(GPU_RESOURCE_PREFIXES=text)


# Marks and selectors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["true", "True", "TRUE", "1", "yes", "", " true", "false"])
@pytest.mark.parametrize("kind", ["labels", "annotations"])
def test_the_client_mark(kind: str, value: str) -> None:
    """Proposal B: `nvidia.com/gpu.client` counts as label or annotation, and only where it says `true`."""
    assert found({kind: {names.GPU_CLIENT: value}}) == ([Evidence.CLIENT_MARK] if value == "true" else [])


def test_one_of_two_client_marks_is_enough() -> None:
    """Proposal B: a label `true` counts beside an annotation that says something else; a key that only begins so does not."""
    assert found({"labels": {names.GPU_CLIENT: "true"}, "annotations": {names.GPU_CLIENT: "false"}}) == [Evidence.CLIENT_MARK]
    assert found({"labels": {names.GPU_CLIENT + "s": "true", names.DEPLOY_CLIENT: "true"}}) == []


def affinity(operator: str, key: str, *values: str) -> dict[str, Any]:
    """A pod with one required node affinity."""
    return {"affinity": ((LabelExpression(key, operator, values),),)}


@pytest.mark.parametrize(
    ("pod", "custom", "is_use"),
    [
        ({"node_selector": {names.DEPLOY_CLIENT: "true"}}, "", True),
        ({"node_selector": {names.DEPLOY_CLIENT: ""}}, "", True),
        ({"node_selector": {names.DEPLOY_PREFIX + "dcgm": "true"}}, "", False),
        ({"node_selector": {"example.com/gpu": "true"}}, "", False),
        ({"node_selector": {"example.com/gpu": "true"}}, "example.com/gpu", True),
        ({"node_selector": {names.DEPLOY_CLIENT: "true"}}, "example.com/gpu", True),
        (affinity("In", names.DEPLOY_CLIENT, "true"), "", True),
        (affinity("Exists", names.DEPLOY_CLIENT), "", True),
        (affinity("DoesNotExist", names.DEPLOY_CLIENT), "", False),
        (affinity("NotIn", names.DEPLOY_CLIENT, "true"), "", False),
        (affinity("In", "example.com/gpu", "a", "b"), "example.com/gpu", True),
        (affinity("In", "example.com/gpus", "a"), "example.com/gpu", False),
        ({"affinity": ((LabelExpression("zone", "In", ("a",)),), (LabelExpression(names.DEPLOY_CLIENT, "Exists"),))}, "", True),
    ],
)
def test_client_selectors(pod: dict[str, Any], custom: str, is_use: bool) -> None:
    """Proposal code of section 5: node selector or required affinity on the client's or the user's key; avoiding the key is no use."""
    assert found(pod, custom_label=custom) == ([Evidence.CLIENT_SELECTOR] if is_use else [])


@pytest.mark.parametrize(
    ("text", "labels", "is_use"),
    [
        ("", {"role": "gpu-user"}, False),
        ("   ", {"role": "gpu-user"}, False),
        ("role=gpu-user", {"role": "gpu-user"}, True),
        ("role=gpu-user", {"role": "cpu"}, False),
        ("role in (a,b),!canary", {"role": "b"}, True),
        ("role in (a,b),!canary", {"role": "b", "canary": ""}, False),
        ("role!=gpu-user", {}, True),
    ],
)
def test_n01_the_users_selector(text: str, labels: dict[str, str], is_use: bool) -> None:
    """N01 (c): CONSUMER_POD_SELECTOR opts pods in; an empty one adds no pod."""
    context = UseContext(settings=read(CONSUMER_POD_SELECTOR=text))
    assert found({"labels": labels}, context) == ([Evidence.SELECTOR] if is_use else [])


# Runtime classes ----------------------------------------------------------------------------------------------------

CLASSES = {"nvidia": "nvidia", "fast": "nvidia-cdi", "old": "nvidia-legacy", "new": "nvidia-experimental", "kata": "kata", "fake": "runc"}


@pytest.mark.parametrize(
    ("name", "handlers", "is_use"),
    [
        (None, CLASSES, False), ("nvidia", CLASSES, True), ("fast", CLASSES, True), ("old", CLASSES, True), ("new", CLASSES, True),
        ("kata", CLASSES, False), ("fake", CLASSES, False), ("nvidia", {"nvidia": "runc"}, False), ("nvidia", {}, True),
        ("nvidia", None, True), ("nvidia-cdi", None, True), ("fast", None, False), ("nvidia-gpu", None, False), ("", None, False),
    ],
)  # fmt: skip
def test_n01_runtime_classes(name: str | None, handlers: dict[str, str] | None, is_use: bool) -> None:
    """N01 (a), proposal C: a class counts by its handler; where classes cannot be listed, or it is not there, by its name."""
    context = replace(PLAIN, runtime_handlers=handlers)
    assert found({"runtime_class": name}, context) == ([Evidence.RUNTIME_CLASS] if is_use else [])


def test_n01_runtime_handlers_are_a_setting() -> None:
    """N01: GPU_RUNTIME_HANDLERS replaces the list, for handlers and for names alike."""
    settings = read(GPU_RUNTIME_HANDLERS="gpu-rt, kata-nvidia")
    for handlers in (None, {"gpu-rt": "gpu-rt", "x": "kata-nvidia"}):
        context = UseContext(settings=settings, runtime_handlers=handlers)
        assert found({"runtime_class": "gpu-rt"}, context) == [Evidence.RUNTIME_CLASS]
        assert found({"runtime_class": "x"}, context) == ([Evidence.RUNTIME_CLASS] if handlers else [])
        assert found({"runtime_class": "nvidia"}, context) == []


# Host paths ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "/dev/nvidia0", "/dev/nvidia0/", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset",
        "/dev/nvidia-caps", "/dev/nvidia-caps/nvidia-cap1", "/dev/nvidia-caps-imex-channels/channel0", "/dev/nvidia-fs", "/dev/dri",
        "/dev/dri/renderD128", "/dev/dri/card0", "/dev/vfio", "/dev/vfio/5", "/dev/vfio/vfio", "//dev//nvidia0", "/dev/./nvidia0",
    ],
)  # fmt: skip
def test_n01_device_mounts(path: str) -> None:
    """N01 (b): each device file or folder of GPUs, however its path is written."""
    assert found({"host_paths": ("/etc", path)}) == [Evidence.HOST_DEVICE]


@pytest.mark.parametrize(
    "path",
    ["/run/nvidia", "/run/nvidia/", "/run/nvidia/driver", "/run/nvidia/driver/", "/run/nvidia/driver/usr/lib", "/var/run/nvidia/driver"],
)
def test_driver_root_mounts(path: str) -> None:
    """N03: who mounts the driver root, or what holds or is below it, keeps bind mounts of the old driver."""
    assert found({"host_paths": (path,)}) == [Evidence.DRIVER_ROOT]


@pytest.mark.parametrize(
    "path",
    [
        "/", "/dev", "/dev/", "//dev/.", "/dev/nvme0", "/dev/nvm", "/dev/shm", "/dev/driver", "/dev/drip", "/dev/vfio0", "/dev/fuse",
        "/opt/dev/nvidia0", "/devices/nvidia0", "/run", "/run/nvidia-fabricmanager", "/run/nvidia/validations", "/run/nvidia/drivers",
        "/var/lib/nvidia", "/usr/local/nvidia", "/sys", "/proc", "", "/var/run", "/var/running/nvidia", "nvidia",
    ],
)  # fmt: skip
def test_decision_18_mounts_that_are_no_sign(path: str) -> None:
    """Decision 18: all of /dev, the whole host, and paths that only look like a GPU's are no evidence."""
    assert found({"host_paths": (path,)}) == []


# CDI ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "is_use"),
    [
        ("cdi.k8s.io/gpu", "nvidia.com/gpu=0", True),
        ("cdi.k8s.io/gpu", "nvidia.com/gpu=all", True),
        ("cdi.k8s.io/x_1", "vendor.com/net=a, nvidia.com/gpu=GPU-1234", True),
        ("cdi.k8s.io/x", "nvidia.com/mig=0:1", True),
        ("cdi.k8s.io/x", "runtime.nvidia.com/gpu=all", True),
        ("cdi.k8s.io/x", "management.nvidia.com/gpu=all", True),
        ("cdi.k8s.io/x", "vendor.com/gpu=0", False),
        ("cdi.k8s.io/x", "xnvidia.com/gpu=0", False),
        ("cdi.k8s.io/x", "nvidia.com.evil.org/gpu=0", False),
        ("cdi.k8s.io/x", "vendor.com/net=nvidia.com/gpu", False),
        ("cdi.k8s.io", "nvidia.com/gpu=0", False),
        ("note", "nvidia.com/gpu=0", False),
        ("cdi.k8s.io/x", "", False),
        ("cdi.k8s.io/x", ",,=,", False),
        ("cdi.k8s.io/x", "nvidia.com/", False),
        ("cdi.k8s.io/x", "nvidia.com/gpu", False),
        ("cdi.k8s.io/x", "nvidia.com/gpu=", False),
        ("cdi.k8s.io/x", "nvidia.com/=0", False),
        ("cdi.k8s.io/x", "{\"nvidia.com/gpu\": 0}", False),
    ],
)  # fmt: skip
def test_cdi_annotations(key: str, value: str, is_use: bool) -> None:
    """A CDI annotation counts by a whole device name of NVIDIA's; what no runtime could read is no evidence, and no crash."""
    assert found({"annotations": {key: value}}) == ([Evidence.CDI] if is_use else [])


# Claims -------------------------------------------------------------------------------------------------------------


def claim(*drivers: str, is_admin: bool = False, namespace: str = "default") -> UseContext:
    """A context with the claim `c`."""
    made = ClaimView(namespace=namespace, name="c", drivers=frozenset(drivers), is_admin=is_admin)
    return replace(PLAIN, claims={(namespace, "c"): made})


@pytest.mark.parametrize(
    ("context", "is_use"),
    [
        (claim("gpu.nvidia.com"), True),
        (claim("compute-domain.nvidia.com"), True),
        (claim("cpu.example.com", "gpu.nvidia.com"), True),
        (claim("gpu.nvidia.com", is_admin=True), True),
        (claim("gpu.amd.com"), False),
        (claim("dra.cpu"), False),
        (claim(), False),
        (claim("gpu.nvidia.com", namespace="other"), False),
        (PLAIN, False),
    ],
)
def test_n04_claims(context: UseContext, is_use: bool) -> None:
    """N04: a claim counts by the driver that served it, for administration too; another's, one not allocated or not there does not."""
    assert found({"claims": ("c", "gone")}, context) == ([Evidence.CLAIM] if is_use else [])


def test_n04_admin_access_is_said() -> None:
    """Spec 8: a claim for administration is a holder, and the sentence says which kind it is."""
    (use,) = uses(replace(POD, claims=("c",)), claim("gpu.nvidia.com", is_admin=True))
    assert "c (admin access, gpu.nvidia.com)" in use.sentence


# The DRA plugin -----------------------------------------------------------------------------------------------------

COMPONENT = {"dra-driver-nvidia-gpu-component": "kubelet-plugin"}


@pytest.mark.parametrize(
    ("pod", "is_plugin"),
    [
        ({"host_paths": (PLUGINS,), "container_names": frozenset({"gpus", "compute-domains"})}, True),
        ({"host_paths": (PLUGINS,), "container_names": frozenset({"compute-domains"})}, True),
        ({"host_paths": (PLUGINS + "/",), "labels": COMPONENT}, True),
        ({"host_paths": (PLUGINS + "/gpu.nvidia.com",)}, True),
        ({"host_paths": (PLUGINS + "/compute-domain.nvidia.com/",)}, True),
        ({"host_paths": ("/data/kubelet/plugins",), "labels": COMPONENT}, True),
        ({"host_paths": (PLUGINS,)}, False),
        ({"host_paths": (PLUGINS,), "container_names": frozenset({"csi-driver"})}, False),
        ({"host_paths": (PLUGINS,), "labels": {"app.kubernetes.io/component": "kubelet-plugin"}}, False),
        ({"host_paths": (PLUGINS,), "labels": {"x-component": "controller"}}, False),
        ({"host_paths": (PLUGINS + "/ebs.csi.aws.com",), "container_names": frozenset({"gpus"})}, False),
        ({"host_paths": (PLUGINS + "/gpu.nvidia.com.old",)}, False),
        ({"host_paths": (PLUGINS + "_registry",), "labels": COMPONENT}, False),
        ({"host_paths": ("/plugins",), "labels": COMPONENT}, False),
        ({"labels": COMPONENT}, False),
        ({"container_names": frozenset({"gpus"})}, False),
        ({"host_paths": ("/var/lib/gpu.nvidia.com", PLUGINS)}, True),
    ],
)
def test_n42_the_dra_plugin(pod: dict[str, Any], is_plugin: bool) -> None:
    """N42, decision 2: NVIDIA's plugin is found by the plugins folder and what else is its own; CSI drivers and other plugins are not."""
    assert is_dra_plugin(replace(POD, **pod)) is is_plugin
    assert (Evidence.DRA_PLUGIN in found(pod)) is is_plugin


# Processes ----------------------------------------------------------------------------------------------------------


def held(by: str) -> UseContext:
    """A context where a process holds a GPU."""
    return replace(PLAIN, holders={by: (Holder(pid=7, command="python3", devices=("/dev/nvidia0", "/dev/nvidiactl"), pod_uid=by),)})


@pytest.mark.parametrize(
    ("annotations", "holder", "is_use"),
    [
        ({}, "u", True),
        ({}, "v", False),
        ({}, "", False),
        ({names.MIRROR: "x", names.MIRROR_HASH: "hash"}, "hash", True),
        ({names.MIRROR: "x", names.MIRROR_HASH: "hash"}, "u", True),
        ({names.MIRROR: "x", names.MIRROR_HASH: ""}, "", False),
        ({names.MIRROR_HASH: "hash"}, "hash", False),
        ({}, "hash", False),
        ({}, "../../u", False),
        ({}, "U", False),
    ],
)
def test_processes(annotations: dict[str, str], holder: str, is_use: bool) -> None:
    """A process counts for the pod with its uid, a static pod's by the hash of its manifest; any other text is nobody's."""
    assert found({"annotations": annotations}, held(holder)) == ([Evidence.PROCESS] if is_use else [])


def test_processes_are_named() -> None:
    """N31: the sentence names process, pid and device."""
    (use,) = uses(POD, held("u"))
    assert use.sentence == "has processes that hold a GPU: python3 (7) on /dev/nvidia0, /dev/nvidiactl"
    assert use.setting == "HIDDEN_CONSUMERS"


# The table ----------------------------------------------------------------------------------------------------------


@given(pods(), contexts)
def test_the_table_is_total(pod: PodView, context: UseContext) -> None:
    """Any pod and any context: each row says nothing or one thing, in the table's order, with a sentence and a way to change it."""
    one_by_one = [use for row in ROWS if (use := row(pod, context)) is not None]
    assert list(uses(pod, context)) == one_by_one
    assert len({use.evidence for use in one_by_one}) == len(one_by_one)
    assert all(use.sentence and use.setting for use in one_by_one)
    assert "\n" not in "".join(use.sentence for use in one_by_one)


@given(pods(), contexts)
def test_less_evidence_never_adds_a_use(pod: PodView, context: UseContext) -> None:
    """Without claims and processes in the context nothing is found that was not found with them."""
    bare = replace(context, claims={}, holders={})
    assert {use.evidence for use in uses(pod, bare)} <= {use.evidence for use in uses(pod, context)}


def test_a_plain_pod_is_no_user() -> None:
    """A pod with nothing of all this has no use, whatever the settings' selectors are set to nothing."""
    assert uses(POD, PLAIN) == ()
    assert uses(POD, replace(PLAIN, settings=Settings(consumer_selector=parse_selector("")))) == ()


@given(st.text(max_size=20), st.text(max_size=20), st.sampled_from(["cdi.k8s.io/", names.GPU_CLIENT, names.MIRROR_HASH]))
def test_malformed_annotations(key: str, value: str, prefix: str) -> None:
    """Whatever an annotation says, there is no crash, and only `true` or a device's whole name is evidence."""
    kinds = found({"annotations": {prefix: value, prefix + key: value}})
    assert set(kinds) <= {Evidence.CDI, Evidence.CLIENT_MARK}
    assert (Evidence.CLIENT_MARK in kinds) == (prefix == names.GPU_CLIENT and value == "true")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CONSUMER_POD_SELECTOR", "a b"), ("CONSUMER_POD_SELECTOR", "app in (x"), ("CONSUMER_POD_SELECTOR", "="),
        ("DRAIN_POD_SELECTOR_LABEL", "a==b==c"), ("HIDDEN_CONSUMERS", "kill"), ("HIDDEN_CONSUMERS", "Evict"),
        ("POLICY_OWNED_CONSUMERS", "evict"), ("POLICY_OWNED_CONSUMERS", "FREE"), ("GPU_RUNTIME_HANDLERS", "nvidia;runc"),
        ("GPU_RUNTIME_HANDLERS", "Nvidia"), ("NODE_LABEL_FOR_GPU_POD_EVICTION", "a/b/c"), ("FORCE_DELETE_STUCK_PODS", "yes"),
        ("NODE_LABEL_FOR_GPU_POD_EVICTION", names.DEPLOY_DRIVER), ("NODE_LABEL_FOR_GPU_POD_EVICTION", names.DEPLOY_PREFIX + "operands"),
    ],
)  # fmt: skip
def test_settings_that_are_refused(name: str, value: str) -> None:
    """Bad input: a selector that does not parse, an unknown word, a key that would take the driver itself away: refused by name."""
    with pytest.raises(ConfigError) as caught:
        read(**{name: value})
    assert name in f"{caught.value.message} {caught.value.hint}"
    assert value in caught.value.message
    assert name in [option.env for option in OPTIONS]


@pytest.mark.parametrize(
    ("name", "is_gpu"),
    [("nvidia.com/GA102GL_A10", True), ("nvidia.com/TU104GL_Tesla_T4", True), ("nvidia.com/NVIDIA_A10-12Q", True),
     ("nvidia.com/GRID_T4-1Q", True),
     ("nvidia.com/pgpu", True), ("nvidia.com/hostdev", False), ("nvidia.com/sriov_rdma", False), ("nvidia.com/mlnxnics", False)],
)  # fmt: skip
def test_device_names_of_virtual_machines(name: str, is_gpu: bool) -> None:
    """Issue 4: the names that plugins give to passed-through and virtual GPUs count by default, the network operator's do not."""
    pod = PodView(namespace="n", name="vm", uid="u", resources=frozenset({name}))
    assert bool(uses(pod, UseContext(settings=Settings()))) is is_gpu
