"""Who goes before whom on a node whose GPUs are given out by dynamic resource allocation (specification 8)."""

from __future__ import annotations

import pytest

from tests.e2e.gpu_users import DOMAIN_DRIVER, GpuUsers, Processes, Unpreparing, happened, verdicts_by_app
from tests.e2e.world import PAUSED, UPGRADE_ENABLED, Object, StockNode
from tests.kube.proxy import ApiProxy
from tests.kube.recorder import Recorder

pytestmark = pytest.mark.kube
PLUGIN = "nvidia-dra-driver-kubelet-plugin"
PREFIX = "nvidia.com/gpu.deploy."
PLUGIN_LABEL = f"{PREFIX}dra-driver"
OPERANDS = {"nvidia-operator-validator": "dra-validator", "nvidia-dcgm-dra": "dcgm-dra", "nvidia-dcgm-exporter-dra": "dcgm-exporter-dra"}
HANGS = Unpreparing.HANGS
ELSEWHERE: Object = {"tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]}
COMPUTE_DOMAIN = "resource.nvidia.com/computeDomain"


def add_plugin(users: GpuUsers) -> None:
    """The plugin as an operand, and its label."""
    users.label_node(**{PLUGIN_LABEL: "true"})
    users.dra_plugin(PLUGIN, nodeSelector={PLUGIN_LABEL: "true"}, **ELSEWHERE)


def add_operands(users: GpuUsers, device_class: str) -> None:
    """The monitoring of a DRA node: each watches all GPUs by admin access, and has a label of its own."""
    users.allow_admin_access()
    users.label_node(**{PREFIX + operand: "true" for operand in OPERANDS.values()})
    for app, operand in OPERANDS.items():
        wish = users.template(app, device_class, allocationMode="All", adminAccess=True)
        users.daemon_set(app, annotations=HANGS, nodeSelector={PREFIX + operand: "true"}, **ELSEWHERE, **wish)


@pytest.fixture
def dra_node(node: StockNode, users: GpuUsers) -> GpuUsers:
    """A node as the operator leaves it on the DRA plane, with two users of GPUs whose pods end only with the plugin's help."""
    node.add_driver(digest="new")
    device_class = users.publish()
    add_plugin(users)
    add_operands(users, device_class)
    users.deployment("train", annotations=HANGS, **users.template("one-gpu", device_class))
    users.deployment("notebook", annotations=HANGS, **users.claim("mine", device_class))
    users.wait()
    return users


def assert_plugin_last(node: StockNode, mark: int, pods: Recorder, plugin: str, holders: set[str]) -> None:
    """Every holder was gone before the plugin's pod was marked, and that was gone before the first module went."""
    story = happened(pods)
    (marked,) = [at for at, what, app in story if (what, app) == ("marked", plugin)]
    assert {app for at, what, app in story if what == "gone" and at < marked} == holders
    gone = next(event for event in pods.until_now() if event.kind == "DELETED" and event.object["metadata"]["labels"].get("app") == plugin)
    first = next(call["time"] for call in node.tree.calls() if call["call"] == "delete_module")
    assert node.last_deleted(mark, {gone.name}) <= first


def test_plugin_goes_last(dra_node: GpuUsers) -> None:
    """Proposal D, deadlocks 1 and 6: holders and monitoring go while the plugin serves them, then the plugin, then the driver."""
    node, apps = dra_node.node, {"train", "notebook", *OPERANDS}
    before, mark, first = node.surface(), node.cp.audit_mark(), {app: node.uids(app) for app in (*apps, PLUGIN)}
    plan = verdicts_by_app(node, node.run("plan", "--output", "json").require(0).document())
    assert {app: each["action"] for app, each in plan.items() if app in apps | {PLUGIN}} == {
        **dict.fromkeys(OPERANDS, "await"), "train": "evict", "notebook": "evict", PLUGIN: "await",
    }  # fmt: skip
    assert "goes last" in plan[PLUGIN]["sentence"]
    with Unpreparing(node, PLUGIN) as kubelet:
        node.run().require(0)
        assert_plugin_last(node, mark, kubelet.pods, PLUGIN, apps)
        node.wait_surface(before)
        dra_node.wait()
    assert node.evicted(mark) == sorted([*first["train"], *first["notebook"]])
    assert set(first[PLUGIN].values()).isdisjoint(node.uids(PLUGIN).values()), "N42: a plugin of the old driver serves old devices"


@pytest.mark.deep
def test_no_grace_is_shortened(dra_node: GpuUsers, api_proxy: ApiProxy) -> None:
    """Deadlock 6, R6: no eviction of a claim's holder carries a grace period of its own."""
    with Unpreparing(dra_node.node, PLUGIN):
        dra_node.node.run(proxy=api_proxy).require(0)
    sent = [seen.json()["deleteOptions"] for seen in api_proxy.requests("create", "/eviction")]
    assert len(sent) == 4
    assert all("gracePeriodSeconds" not in options for options in sent)


@pytest.mark.parametrize("custom", [False, True], ids=["found-by-its-path", "with-a-label-of-ours"])
def test_standalone_plugin(node: StockNode, users: GpuUsers, custom: bool) -> None:
    """N42, deadlock 1: a plugin installed by itself is found and goes last, by the taint or by the user's label, which else goes first."""
    node.add_driver(digest="new")
    device_class = users.publish()
    label = {"example.com/gpu-client": "yes"} if custom else {}
    settings: Object = {"NODE_LABEL_FOR_GPU_POD_EVICTION": "example.com/gpu-client"} if custom else {}
    users.label_node(**label)
    users.dra_plugin("own-plugin", nodeSelector=label)
    users.deployment("train", annotations=HANGS, **users.template("one-gpu", device_class))
    users.wait()
    before, mark, first = node.surface(), node.cp.audit_mark(), node.uids("own-plugin")
    with Unpreparing(node, "own-plugin") as kubelet:
        node.run(**settings).require(0)
        assert_plugin_last(node, mark, kubelet.pods, "own-plugin", {"train"})
        node.wait_surface(before)
        users.wait()
    assert len(node.evicted(mark)) == (1 if custom else 2)
    assert set(first.values()).isdisjoint(node.uids("own-plugin").values())


@pytest.mark.deep
def test_standalone_plugin_that_stays(node: StockNode, users: GpuUsers) -> None:
    """N02, decision 46: a plugin that nothing keeps off is refused by its owner's name, and its claims' holders are left alone."""
    node.add_driver(digest="new")
    device_class = users.publish()
    users.dra_plugin("own-plugin", tolerations=[{"operator": "Exists"}])
    users.deployment("train", **users.template("one-gpu", device_class))
    users.wait()
    before, mark = node.surface(), node.cp.audit_mark()
    assert node.run().require(65).said(f"DaemonSet {node.namespace}/own-plugin", "nvidia.com/gpu.deploy.client")
    assert node.eviction_tries(mark, dry=True) == node.eviction_tries(mark) == []
    assert node.surface() == before


@pytest.mark.deep
def test_nothing_loaded(dra_node: GpuUsers) -> None:
    """Deadlock 2, R11: without a driver the holders need the plugin and the plugin the driver: nobody is evicted, no label written."""
    node = dra_node.node
    for name in ("nvidia_uvm", "nvidia_modeset", "nvidia"):
        (node.tree.root / f"sys/module/{name}").rename(node.tree.root / f"gone-{name}")
    node.tree.file("proc/modules", "")
    node.tree.mounts()
    before, mark, first = node.surface(), node.cp.audit_mark(), node.uids("train") | node.uids(PLUGIN)
    node.run().require(0)
    assert node.writes(mark) == []
    assert node.surface() == before
    assert node.uids("train") | node.uids(PLUGIN) == first


@pytest.mark.deep
def test_unchanged_driver(dra_node: GpuUsers) -> None:
    """Decision 14, R11: with the wanted driver loaded the plugin alone is recycled, as its view of the driver root goes; holders stay."""
    node = dra_node.node
    node.tree.file("run/nvidia/nvidia-driver.state", "new\n")
    before, mark, first = node.surface(), node.cp.audit_mark(), node.uids(PLUGIN)
    kept = {app: node.uids(app) for app in ("train", "notebook", *OPERANDS)}
    node.run().require(0)
    node.wait_surface(before)
    assert node.eviction_tries(mark) == []
    assert {app: node.uids(app) for app in kept} == kept
    dra_node.wait(PLUGIN)
    assert set(first.values()).isdisjoint(node.uids(PLUGIN).values())


@pytest.mark.deep
def test_drain_after_the_plugin(dra_node: GpuUsers) -> None:
    """Deadlock 3: a drain of the whole node that comes after the plugin has gone finds nobody who needs it to end."""
    node = dra_node.node
    dra_node.deployment("hidden")
    dra_node.wait("hidden")
    (hidden,) = node.uids("hidden")
    with Processes(node) as processes, Unpreparing(node, PLUGIN) as kubelet:
        processes.hold(4001, dra_node.pod("hidden"))
        node.run(HIDDEN_CONSUMERS="ignore", ENABLE_AUTO_DRAIN="true").require(0)
        marked = {app: at for at, what, app in happened(kubelet.pods) if what == "marked"}
    assert marked["train"] < marked[PLUGIN] < marked["hidden"], hidden


def test_admin_access_on_a_policy_owned_node(dra_node: GpuUsers) -> None:
    """Deadlock 4, decision 1: whoever the upgrade controller does not know by its claims is freed by the agent, so the gate opens."""
    node = dra_node.node
    device_class = dra_node.publish()
    for name in ("train", "notebook"):
        node.cp.delete(f"/apis/apps/v1/namespaces/{node.namespace}/deployments/{name}?propagationPolicy=Background")
    with Unpreparing(node, PLUGIN) as kubelet:
        node.cp.wait_for(lambda: not node.uids("train") | node.uids("notebook"), "the controller's own pods to be gone")
        dra_node.deployment("monitor", annotations=HANGS, **dra_node.template("monitor", device_class, adminAccess=True))
        dra_node.daemon_set("agent", annotations=HANGS, **dra_node.template("agent", device_class))
        dra_node.wait("monitor", "agent")
        node.annotate(**{UPGRADE_ENABLED: "true"})
        before, mark, pods = node.surface(), node.cp.audit_mark(), node.uids("monitor") | node.uids("agent")
        node.run().require(0)
        node.wait_surface(before)
        story = happened(kubelet.pods)
    assert node.evicted(mark) == sorted(pods)
    (plugin,) = [at for at, what, app in story if (what, app) == ("marked", PLUGIN)]
    assert max(at for at, what, app in story if what == "gone" and app in ("monitor", "agent")) < plugin


@pytest.mark.parametrize("way", ["restore", "uninstall_driver"])
def test_killed_after_the_plugin(dra_node: GpuUsers, way: str) -> None:
    """Deadlock 7: a run that is killed while the plugin is away does not leave the node without it: the next one brings it back."""
    node = dra_node.node
    before = node.surface()
    with Unpreparing(node, PLUGIN):
        node.tree.faults({"call": "delete_module", "hold": True})
        run = node.start("uninstall_driver")
        node.wait_held("delete_module")
        run.kill()
        assert node.surface()["labels"][PLUGIN_LABEL] == PAUSED
        assert not node.uids(PLUGIN)
        node.tree.faults()
        node.run(way).require(0)
        node.wait_surface(before)
        dra_node.wait(PLUGIN)


@pytest.mark.deep
def test_plugin_paused_by_upstream(dra_node: GpuUsers) -> None:
    """Deadlock 7, decision 9: a plugin's label that upstream's program left paused is put back too, and said to be a guess."""
    node = dra_node.node
    before = node.surface()
    with Unpreparing(node, PLUGIN):
        for app in ("train", "notebook"):
            node.cp.delete(f"/apis/apps/v1/namespaces/{node.namespace}/deployments/{app}?propagationPolicy=Background")
        node.cp.wait_for(lambda: not node.uids("train") | node.uids("notebook"), "the holders to be gone")
        dra_node.label_node(**{PREFIX + operand: PAUSED for operand in OPERANDS.values()})
        node.cp.wait_for(lambda: not any(node.uids(app) for app in OPERANDS), "the monitoring to be gone")
        dra_node.label_node(**{PLUGIN_LABEL: PAUSED})
        node.cp.wait_for(lambda: not node.uids(PLUGIN), "the plugin to be gone")
        ended = node.run().require(0)
        node.wait_surface(before)
        dra_node.wait(PLUGIN, *OPERANDS)
    assert ended.said(PLUGIN_LABEL, "guess")


@pytest.mark.deep
def test_compute_domain(node: StockNode, users: GpuUsers) -> None:
    """Specification 8: a compute domain's daemon, which tolerates everything, is waited for: it goes with the domain's last user."""
    node.add_driver(digest="new")
    gpu, domain = users.publish(), users.publish(DOMAIN_DRIVER)
    add_plugin(users)
    users.label_node(**{COMPUTE_DOMAIN: "abc"})
    users.daemon_set(
        "domain", nodeSelector={COMPUTE_DOMAIN: "abc"}, tolerations=[{"operator": "Exists"}], **users.template("daemon", domain)
    )
    users.deployment("channel", **users.template("channels", domain))
    users.deployment("train", **users.template("one-gpu", gpu))
    users.wait()
    mark, pods = node.cp.audit_mark(), node.uids("channel") | node.uids("train")
    with node.cp.record(f"{node.space}/pods") as seen:
        run = node.start("uninstall_driver")
        seen.wait_for(lambda event: event.kind == "DELETED" and event.name.startswith("channel-"), "the domain's user to be gone")
        users.label_node(**{COMPUTE_DOMAIN: None})
        run.wait().require(0)
        assert_plugin_last(node, mark, seen, PLUGIN, {"domain", "channel", "train"})
    assert node.evicted(mark) == sorted(pods)


@pytest.mark.deep
def test_claims_that_cannot_be_read(dra_node: GpuUsers) -> None:
    """N04: where claims may not be read the run ends with 77 naming the right, and nothing is written or unloaded."""
    node = dra_node.node
    dra_node.forbid("resourceclaims")
    before, mark = node.surface(), node.cp.audit_mark()
    ended = node.run().require(77)
    assert ended.said("resourceclaims", node.namespace)
    assert node.writes(mark) == []
    assert node.surface() == before
    assert node.tree.calls() == []


@pytest.mark.deep
def test_claims_that_nobody_has(node: StockNode, users: GpuUsers) -> None:
    """N04: the right to read claims is not needed where no pod has one."""
    node.add_driver(digest="new")
    users.forbid("resourceclaims")
    node.run().require(0)
