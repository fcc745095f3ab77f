"""Verdicts by kind of consumer: how each goes, who is left to others, who is refused, and what goes last."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver_manager import names
from driver_manager.config import Settings
from driver_manager.core.consumers import (
    Action,
    PodPolicy,
    Reason,
    Verdict,
    labels_of_consumers,
    labels_of_plugins,
    verdict,
    virtual_machine,
)
from driver_manager.core.labels import labels_to_pause
from driver_manager.core.seen import Snapshot, choose_keep_off_of, labels_of, pod_policy
from driver_manager.core.selectors import parse_selector
from driver_manager.core.snapshot import (
    ClaimView,
    Holder,
    HolderScan,
    HostView,
    LabelExpression,
    NodeView,
    Owner,
    PodView,
    Taint,
    Toleration,
)
from driver_manager.core.uses import Evidence, UseContext, uses
from tests.core.given import contexts, neighbours, nodes, pods, policies, tolerations

TAINT = Taint(names.KEEP_OFF_TAINT, "dm-run")
EXPORTER, WEB = Owner("DaemonSet", "exporter"), Owner("ReplicaSet", "web")
CLIENT = {names.GPU_CLIENT: "true"}
POD = PodView(namespace="default", name="p", uid="u", owner=WEB)
DAEMON = replace(POD, namespace="monitoring", owner=EXPORTER, annotations=CLIENT)
PLUGIN = replace(
    POD, namespace="dra", name="plugin", owner=Owner("DaemonSet", "plugin"), host_paths=("/var/lib/kubelet/plugins",),
    container_names=frozenset({"gpus"}),
)  # fmt: skip
CLAIMS = {
    ("default", "user"): ClaimView(namespace="default", name="user", drivers=frozenset({"gpu.nvidia.com"})),
    ("default", "admin"): ClaimView(namespace="default", name="admin", drivers=frozenset({"gpu.nvidia.com"}), is_admin=True),
    ("default", "channel"): ClaimView(namespace="default", name="channel", drivers=frozenset({"compute-domain.nvidia.com"})),
}
HELD = {"u": (Holder(pid=7, command="python3", devices=("/dev/nvidia0",), pod_uid="u"),)}
POLICY = PodPolicy(settings=Settings(node_name="n"), claims=CLAIMS, keep_off=TAINT)
MINE = names.DEPLOY_PREFIX + "my-exporter"
DRA = names.DEPLOY_PREFIX + "dra-driver"


def policy(base: PodPolicy = POLICY, *, owned: bool | None = None, held: bool = False, **settings: Any) -> PodPolicy:
    """The policy with some settings."""
    made = replace(base, settings=replace(base.settings, **settings), is_policy_owned=base.is_policy_owned if owned is None else owned)
    return replace(made, holders=HELD) if held else made


def paused(*keys: str, last: tuple[str, ...] = ()) -> PodPolicy:
    """The policy where labels with the value `true` are paused."""
    labels = dict.fromkeys((*keys, *last), "true")
    return replace(POLICY, node_labels={"zone": "a", **labels}, paused=labels, paused_last=frozenset(last))


def pod_with(**fields: Any) -> PodView:
    """The pod with some fields changed."""
    return replace(POD, **fields)


def what(found: Verdict) -> tuple[Action, str]:
    """Action and reason."""
    return found.action, str(found.reason)


def affinity(operator: str, key: str, *values: str) -> tuple[tuple[LabelExpression, ...], ...]:
    """One required node affinity."""
    return ((LabelExpression(key, operator, values),),)


# Each kind of evidence, each kind of owner --------------------------------------------------------------------------

KINDS: list[tuple[dict[str, Any], Evidence]] = [
    ({"resources": frozenset({"nvidia.com/gpu"})}, Evidence.RESOURCE),
    ({"claims": ("user",)}, Evidence.CLAIM),
    ({"claims": ("admin",)}, Evidence.CLAIM),
    ({"claims": ("channel",)}, Evidence.CLAIM),
    ({"annotations": CLIENT}, Evidence.CLIENT_MARK),
    ({"node_selector": {names.DEPLOY_CLIENT: "true"}}, Evidence.CLIENT_SELECTOR),
    ({"runtime_class": "nvidia"}, Evidence.RUNTIME_CLASS),
    ({"host_paths": ("/dev/nvidia0",)}, Evidence.HOST_DEVICE),
    ({"host_paths": ("/run/nvidia/driver",)}, Evidence.DRIVER_ROOT),
    ({"annotations": {"cdi.k8s.io/x": "nvidia.com/gpu=0"}}, Evidence.CDI),
    ({"labels": {"role": "gpu"}}, Evidence.SELECTOR),
    ({}, Evidence.PROCESS),
]
ALL_FOUND = policy(held=True, consumer_selector=parse_selector("role=gpu"))


@pytest.mark.parametrize("kind", ["ReplicaSet", "StatefulSet", "Job", "ReplicationController", "Rollout", "", "Fräulein/Kind"])
@pytest.mark.parametrize(("fields", "evidence"), KINDS)
def test_a_pod_with_an_owner_is_evicted(kind: str, fields: dict[str, Any], evidence: Evidence) -> None:
    """How each kind goes: whatever shows the use, and whoever owns it, known or strange, a pod that is made again is evicted."""
    chosen = ALL_FOUND if evidence in (Evidence.PROCESS, Evidence.SELECTOR) else POLICY
    chosen = replace(chosen, holders=HELD if evidence is Evidence.PROCESS else {})
    found = verdict(replace(POD, owner=Owner(kind, "x"), **fields), chosen)
    assert what(found) == (Action.EVICT, evidence)
    assert [use.evidence for use in found.uses] == [evidence]
    assert found.setting


@pytest.mark.parametrize(("fields", "evidence"), KINDS)
def test_a_pod_of_a_daemon_set_is_kept_off_or_refused(fields: dict[str, Any], evidence: Evidence) -> None:
    """N02: a DaemonSet's pod of each kind goes where the taint keeps it off; where none can be used it is refused with its owner."""
    chosen = replace(ALL_FOUND, holders=HELD if evidence is Evidence.PROCESS else {})
    pod = replace(POD, owner=EXPORTER, **fields)
    assert what(verdict(pod, chosen)) == (Action.EVICT, evidence)
    refused = verdict(pod, replace(chosen, keep_off=None))
    assert what(refused) == (Action.REFUSE, Reason.DAEMON_SET)
    assert "DaemonSet default/exporter" in refused.sentence
    assert names.DEPLOY_CLIENT in refused.setting
    parkable = replace(chosen, keep_off=None, parkable=frozenset({"default/exporter"}))
    assert what(verdict(pod, parkable)) == (Action.PARK, Reason.DAEMON_SET)
    why_not = verdict(pod, replace(chosen, keep_off=None, not_parkable={"default/exporter": "cannot be parked: no policy"}))
    assert what(why_not) == (Action.REFUSE, Reason.DAEMON_SET)
    assert "DaemonSet default/exporter cannot be parked: no policy" in why_not.sentence


@pytest.mark.parametrize(
    ("toleration", "action"),
    [
        (None, Action.EVICT),
        (Toleration("", "Exists"), Action.REFUSE),
        (Toleration("", "Exists", "", "NoSchedule"), Action.REFUSE),
        (Toleration("", "Exists", "", "NoExecute"), Action.EVICT),
        (Toleration(names.KEEP_OFF_TAINT, "Exists"), Action.REFUSE),
        (Toleration(names.KEEP_OFF_TAINT, "Equal", "dm-run"), Action.REFUSE),
        (Toleration(names.KEEP_OFF_TAINT, "Equal", "dm-old"), Action.EVICT),
        (Toleration(names.GPU_TAINT, "Exists"), Action.EVICT),
        (Toleration("node.kubernetes.io/unschedulable", "Exists"), Action.EVICT),
    ],
)
def test_n02_what_the_taint_keeps_off(toleration: Toleration | None, action: Action) -> None:
    """N02 variants 1 and 3: only a pod that does not tolerate this very taint is evicted."""
    given_ = () if toleration is None else (toleration,)
    found = verdict(replace(DAEMON, tolerations=given_), POLICY)
    assert found.action is action
    assert action is Action.EVICT or "monitoring/exporter" in found.sentence


# Label flips --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "action"),
    [
        ({"node_selector": {MINE: "true"}}, Action.AWAIT),
        ({"node_selector": {MINE: "true", "zone": "a"}}, Action.AWAIT),
        ({"node_selector": {MINE: "true", "zone": "b"}}, Action.EVICT),
        ({"node_selector": {MINE: "yes"}}, Action.EVICT),
        ({"affinity": affinity("In", MINE, "true")}, Action.AWAIT),
        ({"affinity": affinity("In", MINE, "yes", "true")}, Action.AWAIT),
        ({"affinity": affinity("In", MINE, "true", names.PAUSED)}, Action.EVICT),
        ({"affinity": affinity("Exists", MINE)}, Action.EVICT),
        ({"affinity": affinity("NotIn", MINE, "false")}, Action.EVICT),
        ({"affinity": affinity("NotIn", MINE, names.PAUSED)}, Action.AWAIT),
        ({"affinity": (*affinity("In", MINE, "true"), *affinity("In", "zone", "a"))}, Action.EVICT),
        ({"affinity": ((LabelExpression(MINE, "In", ("true",)), LabelExpression("zone", "In", ("a",))),)}, Action.AWAIT),
        ({"affinity": affinity("Like", MINE, "true")}, Action.EVICT),
    ],
)
def test_n02_which_daemon_sets_a_label_takes_away(fields: dict[str, Any], action: Action) -> None:
    """N02 variant 2: the label flip is for pods that do not fit a paused node any more; affinity that still matches leaves the taint."""
    assert verdict(replace(DAEMON, **fields), paused(MINE)).action is action


@pytest.mark.parametrize(
    ("fields", "keys"),
    [
        ({"node_selector": {MINE: "true"}}, {MINE}),
        ({"affinity": affinity("In", MINE, "true")}, {MINE}),
        ({"affinity": affinity("Exists", MINE)}, set()),
        ({"affinity": affinity("NotIn", MINE, "no")}, set()),
        ({"node_selector": {"zone": "a", MINE: "true", names.DEPLOY_DRIVER: "true"}}, {MINE}),
        ({"node_selector": {names.DEPLOY_VGPU_MANAGER: "true"}}, set()),
        ({"node_selector": {names.DEPLOY_VFIO_MANAGER: "true"}}, set()),
        ({"node_selector": {names.DEPLOY_PREFIX + "operands": "true"}}, set()),
        ({"node_selector": {names.DEPLOY_CLIENT: "true"}, "annotations": {}}, {names.DEPLOY_CLIENT}),
        ({"node_selector": {MINE: "true"}, "annotations": {}}, set()),
        ({"node_selector": {MINE: "true"}, "owner": WEB}, set()),
        ({"node_selector": {MINE: "true"}, "owner": None}, set()),
        ({"node_selector": {MINE: "true"}, "labels": {names.COMPONENT_LABEL: "nvidia-driver"}}, set()),
    ],
)
def test_n02_which_labels_are_paused_for_consumers(fields: dict[str, Any], keys: set[str]) -> None:
    """Any deploy label that a consumer's DaemonSet selects is paused; a bystander's, and those of the driver's owners, never."""
    assert labels_of_consumers([replace(DAEMON, **fields), POD], UseContext(settings=Settings())) == keys


@pytest.mark.parametrize(
    ("value", "original"),
    [("true", "true"), ("yes", "yes"), ("false", None), ("", None), (None, None), (names.PAUSED, "true"), ("paused-for-mig-change", None)],
)
def test_which_values_of_a_consumers_label_are_paused(value: str | None, original: str | None) -> None:
    """A consumer's own deploy label is paused whatever its value, `false` aside, and never made."""
    labels = {} if value is None else {MINE: value}
    assert labels_to_pause(labels, "", {}, more=[MINE]).first.get(MINE) == original


# The DRA plugin -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "policy_", "action"),
    [
        ({"node_selector": {DRA: "true"}}, paused(last=(DRA,)), Action.AWAIT),
        ({"node_selector": {MINE: "true"}}, paused(last=(MINE,)), Action.AWAIT),
        ({"node_selector": {names.DEPLOY_CLIENT: "true"}}, paused(last=(names.DEPLOY_CLIENT,)), Action.AWAIT),
        ({"affinity": affinity("In", "example.com/gpu", "true")}, paused(last=("example.com/gpu",)), Action.AWAIT),
        ({"namespace": "gpu-operator", "labels": {"app": "nvidia-dra-driver-kubelet-plugin"}},
         replace(POLICY, operand_apps=frozenset({"nvidia-dra-driver-kubelet-plugin"})), Action.AWAIT),
        ({"namespace": "gpu-operator", "labels": {"app": "nvidia-dra-driver-kubelet-plugin"}, "host_paths": ()},
         replace(POLICY, operand_apps=frozenset({"nvidia-dra-driver-kubelet-plugin"})), Action.AWAIT),
        ({}, POLICY, Action.EVICT),
        ({"annotations": CLIENT}, POLICY, Action.EVICT),
        ({"owner": Owner("Deployment", "x")}, POLICY, Action.EVICT),
        ({"owner": None}, policy(drain_use_force=True), Action.EVICT),
        ({"is_terminating": True}, POLICY, Action.AWAIT),
    ],
)  # fmt: skip
def test_decision_46_a_dra_plugin_goes_last(fields: dict[str, Any], policy_: PodPolicy, action: Action) -> None:
    """Decision 46: by operand label, custom label, client label or affinity, standalone, marked as a client: the plugin goes last."""
    found = verdict(replace(PLUGIN, **fields), policy_)
    assert (found.action, found.is_last) == (action, True)


def test_decision_46_the_labels_of_a_plugin_are_paused_last() -> None:
    """Decision 46: every label to pause that the plugin selects moves to the second turn, other labels and bystanders' do not."""
    plugin = replace(
        PLUGIN, node_selector={names.DEPLOY_CLIENT: "true", "example.com/gpu": "true", "zone": "a", names.DEPLOY_DRIVER: "true"}
    )
    settings = Settings(custom_label="example.com/gpu")
    last = labels_of_plugins([plugin, replace(DAEMON, node_selector={MINE: "true"})], settings)
    assert last == {names.DEPLOY_CLIENT, "example.com/gpu"}
    found = labels_to_pause(dict.fromkeys((*last, MINE, DRA), "true"), "example.com/gpu", {}, more=[MINE], last=last)
    assert (set(found.first), set(found.last)) == ({MINE}, {*last, DRA})


def test_spec_8_a_claim_holder_never_waits_for_the_plugins_label() -> None:
    """Deadlock 1: a claim holder that selects the plugin's label is not left to that label: it goes first, by the taint, or is refused."""
    both = paused(last=(names.DEPLOY_CLIENT,))
    holder = replace(POD, owner=EXPORTER, node_selector={names.DEPLOY_CLIENT: "true"}, claims=("admin",))
    found = verdict(holder, both)
    assert (found.action, found.is_last) == (Action.EVICT, False)
    assert verdict(holder, replace(both, keep_off=None)).action is Action.REFUSE
    other = verdict(replace(holder, claims=()), both)
    assert (other.action, other.is_last) == (Action.AWAIT, True)


@pytest.mark.parametrize(("claims", "action"), [(("channel",), Action.AWAIT), ((), Action.KEEP)])
def test_spec_8_daemons_of_a_compute_domain(claims: tuple[str, ...], action: Action) -> None:
    """Spec 8: the daemon of a compute domain tolerates everything and goes with the domain's last user: it is waited for, first."""
    daemon = replace(
        POD,
        owner=Owner("DaemonSet", "cd"),
        claims=claims,
        node_selector={names.COMPUTE_DOMAIN_LABEL: "id"},
        tolerations=(Toleration("", "Exists"),),
    )
    found = verdict(daemon, POLICY)
    assert (found.action, found.is_last) == (action, False)
    assert verdict(replace(daemon, owner=WEB), POLICY).action is (Action.EVICT if claims else Action.KEEP)


# Policy-owned nodes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["free", "wait", "refuse"])
@pytest.mark.parametrize(
    ("fields", "is_known"),
    [
        ({"resources": frozenset({"nvidia.com/gpu"})}, True),
        ({"resources": frozenset({"nvidia.com/mig-1g.5gb"})}, True),
        ({"claims": ("user",)}, True),
        ({"claims": ("admin",)}, False),
        ({"claims": ("channel",)}, False),
        ({"claims": ("admin", "user")}, True),
        ({"annotations": CLIENT}, False),
        ({"runtime_class": "nvidia"}, False),
        ({"host_paths": ("/dev/nvidia0",)}, False),
        ({"resources": frozenset({"nvidia.com/gpu"}), "owner": EXPORTER}, False),
        ({"claims": ("user",), "owner": EXPORTER}, False),
    ],
)
def test_decision_1_what_the_upgrade_controller_does_not_know(word: str, fields: dict[str, Any], is_known: bool) -> None:
    """Decision 1: what the controller selects is left to it; every other kind is freed, left to others or refused, as the setting says."""
    found = verdict(replace(POD, **fields), policy(owned=True, policy_owned_consumers=word))
    wanted = Action.LEAVE if is_known else {"free": Action.EVICT, "wait": Action.LEAVE, "refuse": Action.REFUSE}[word]
    assert found.action is wanted
    if wanted is Action.REFUSE:
        assert what(found) == (Action.REFUSE, Reason.POLICY_OWNED)
        assert found.setting == "POLICY_OWNED_CONSUMERS=free"
    assert verdict(POD, policy(owned=True, policy_owned_consumers=word)).action is Action.KEEP


def test_decision_1_renamed_resources_are_ours() -> None:
    """Decision 1: a resource that only our setting knows is no affair of upstream's controller."""
    chosen = policy(owned=True, gpu_resource_prefixes=("example.com/gpu",))
    assert verdict(replace(POD, resources=frozenset({"example.com/gpu"})), chosen).action is Action.EVICT


# Hidden, opted out, static, virtual ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "action", "reason"),
    [
        ("evict", Action.EVICT, Evidence.PROCESS), ("refuse", Action.REFUSE, Reason.HIDDEN), ("ignore", Action.KEEP, Reason.HIDDEN),
    ],
)  # fmt: skip
def test_hidden_consumers(word: str, action: Action, reason: str) -> None:
    """A pod that only the kernel shows goes by HIDDEN_CONSUMERS; one that also says so itself is evicted all the same."""
    chosen = policy(held=True, hidden_consumers=word)
    found = verdict(POD, chosen)
    assert what(found) == (action, reason)
    assert "python3 (7)" in found.sentence
    assert "HIDDEN_CONSUMERS" in found.setting
    assert verdict(replace(POD, annotations=CLIENT), chosen).action is Action.EVICT


@pytest.mark.parametrize(("fields", "evidence"), KINDS[:-1])
def test_opt_out_wins_over_opt_in(fields: dict[str, Any], evidence: Evidence) -> None:
    """The skip label wins over everything that a pod declares, the user's selector and the client mark too; not over a claim it holds."""
    labels = {**fields.get("labels", {}), names.DRAIN_SKIP: "true"}
    pod = replace(POD, **{**fields, "labels": labels})
    found = verdict(pod, policy(consumer_selector=parse_selector("role=gpu")))
    assert what(found) == (Action.REFUSE if evidence is Evidence.CLAIM else Action.KEEP, Reason.OPTED_OUT)
    assert evidence in [use.evidence for use in found.uses]
    assert verdict(replace(pod, labels={**labels, names.DRAIN_SKIP: "yes"}), ALL_FOUND).action is Action.EVICT


@pytest.mark.parametrize(("word", "action"), [("evict", Action.REFUSE), ("refuse", Action.REFUSE), ("ignore", Action.KEEP)])
def test_an_opt_out_that_holds_a_gpu_is_refused(word: str, action: Action) -> None:
    """An opted-out pod whose processes hold a GPU can neither go nor stay: refused with its label, unless the kernel is ignored."""
    found = verdict(replace(POD, labels={names.DRAIN_SKIP: "true"}, annotations=CLIENT), policy(held=True, hidden_consumers=word))
    assert what(found) == (action, Reason.OPTED_OUT)
    assert names.DRAIN_SKIP in found.setting
    assert action is Action.KEEP or "python3 (7)" in found.sentence


@pytest.mark.parametrize("fields", [fields for fields, _ in KINDS if "annotations" not in fields])
def test_n11_mirror_pods_are_refused_with_their_manifest(fields: dict[str, Any]) -> None:
    """N11: a static pod that uses the driver is refused with the name of its manifest, whatever shows the use and whatever is set."""
    annotations = {names.MIRROR: "x", names.MIRROR_HASH: "hash"}
    chosen = replace(ALL_FOUND, holders={"hash": HELD["u"]}) if not fields else replace(ALL_FOUND, holders={})
    pod = replace(POD, name="burn-in-n", owner=Owner("Node", "n"), annotations=annotations, **fields)
    for each in (chosen, policy(chosen, hidden_consumers="refuse", drain_use_force=True)):
        found = verdict(pod, each)
        assert what(found) == (Action.REFUSE, Reason.MIRROR_POD)
        assert found.setting == "remove the manifest of burn-in from the node"
    assert verdict(pod, policy(chosen, owned=True, policy_owned_consumers="wait")).action is Action.REFUSE


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"owner": Owner("VirtualMachineInstance", "win11")}, "win11"),
        ({"labels": {names.VM_LABEL: "virt-launcher", names.VM_NAME_LABEL: "win11"}}, "win11"),
        ({"labels": {names.VM_LABEL: "virt-launcher"}}, "p"),
        ({"labels": {names.VM_LABEL: "virt-handler"}}, None),
        ({"labels": {names.VM_NAME_LABEL: "win11"}}, None),
        ({}, None),
    ],
)
def test_n12_launchers_of_virtual_machines(fields: dict[str, Any], name: str | None) -> None:
    """N12: a launcher is known by owner or label; its emptyDir is no reason to refuse it, others' is."""
    pod = replace(POD, **fields)
    assert virtual_machine(pod) == name
    found = verdict(replace(pod, host_paths=("/dev/vfio/5",), has_empty_dir=True), POLICY)
    assert found.action is (Action.EVICT if name else Action.REFUSE)


@pytest.mark.parametrize(("fields", "evidence"), KINDS[:-1])
@pytest.mark.parametrize(
    ("shape", "setting", "reason"),
    [({"owner": None}, "drain_use_force", Reason.UNMANAGED), ({"has_empty_dir": True}, "drain_delete_emptydir_data", Reason.EMPTY_DIR)],
)
def test_n06_unmanaged_and_empty_dir(
    shape: dict[str, Any], setting: str, reason: Reason, fields: dict[str, Any], evidence: Evidence
) -> None:
    """N06: for each kind, pods without an owner and with an emptyDir are refused unless the drain's setting allows it."""
    chosen = policy(consumer_selector=parse_selector("role=gpu"))
    found = verdict(replace(POD, **fields, **shape), chosen)
    assert what(found) == (Action.REFUSE, reason)
    assert setting.upper() in found.setting
    assert what(verdict(replace(POD, **fields, **shape), policy(chosen, **{setting: True}))) == (Action.EVICT, evidence)


@pytest.mark.parametrize("value", ["True", "1", "", "yes" * 40])
@pytest.mark.parametrize("kind", ["labels", "annotations"])
def test_a_client_mark_that_does_not_count_is_reported(kind: str, value: str) -> None:
    """Bad input: a mark with another value than `true` evicts nobody, and the verdict says so; `false` is a plain no."""
    marked, unmarked = ({kind: {names.GPU_CLIENT: text}} for text in (value, "false"))
    found = verdict(pod_with(**marked), POLICY)
    assert what(found) == (Action.KEEP, Reason.NO_GPU)
    assert names.GPU_CLIENT in found.sentence
    assert "only 'true' would count" in found.sentence
    assert len(found.sentence) < 250
    assert names.GPU_CLIENT not in verdict(pod_with(**unmarked), POLICY).sentence


# Laws ---------------------------------------------------------------------------------------------------------------


@given(pods(), policies(), st.lists(tolerations, max_size=2))
def test_a_tolerated_taint_never_lets_a_daemon_set_be_evicted(pod: PodView, policy_: PodPolicy, more: list[Toleration]) -> None:
    """N02: no pod of a DaemonSet is ever evicted that would be made again at once."""
    daemon = replace(pod, owner=EXPORTER, tolerations=(*pod.tolerations, *more))
    if verdict(daemon, policy_).action is Action.EVICT:
        assert policy_.keep_off is not None
        assert not any(each.tolerates(policy_.keep_off) for each in daemon.tolerations)


@given(pods(), policies())
def test_only_a_plugin_goes_after_the_others_by_eviction(pod: PodView, policy_: PodPolicy) -> None:
    """Spec 8: whoever holds a claim goes before the plugin, and of those that are evicted only the plugin goes last."""
    found = verdict(pod, policy_)
    kinds = {use.evidence for use in found.uses}
    if found.is_last:
        assert Evidence.DRA_PLUGIN in kinds or (found.action is Action.AWAIT and found.reason is Reason.OPERAND)
    if Evidence.DRA_PLUGIN in kinds and found.action in (Action.EVICT, Action.AWAIT):
        assert found.is_last


@given(pods(), policies())
def test_what_only_the_kernel_shows_is_never_evicted_against_the_setting(pod: PodView, policy_: PodPolicy) -> None:
    """HIDDEN_CONSUMERS: refuse and ignore never evict a pod for its processes alone."""
    found = verdict(pod, policy_)
    if {use.evidence for use in found.uses} == {Evidence.PROCESS} and found.action is Action.EVICT:
        assert policy_.settings.hidden_consumers == "evict"


@given(nodes(), pods(), neighbours(4), contexts)
def test_a_bystander_is_never_evicted_for_another_pod(node: NodeView, pod: PodView, others: list[PodView], context: UseContext) -> None:
    """A look as a whole: pods that are added change labels and turns, yet one that uses nothing at most follows its own label."""
    scan = HolderScan(tuple(replace(each, pod_uid=uid) for uid, found in context.holders.items() for each in found))
    seen = Snapshot(node=node, host=HostView(boot_id="b"), claims=context.claims, runtime_handlers=context.runtime_handlers, holders=scan)
    if uses(pod, context):
        return
    there = (pod, *(each for each in others if each.uid != pod.uid))
    for order in (there, there[::-1]):
        look = replace(seen, pods=order)
        labels = labels_of(look, context.settings, None)
        whole = pod_policy(look, context.settings, labels, choose_keep_off_of(look, context.settings, None))
        found = verdict(pod, whole)
        assert found.action in (Action.KEEP, Action.AWAIT)
        if found.action is Action.AWAIT:
            assert found.reason is Reason.OPERAND
            assert set(labels.all) & pod.selecting_keys or pod.labels.get("app") in whole.operand_apps
