"""Verdicts: one for every pod, each with its reason, and none depends on another pod."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver_manager import names
from driver_manager.config import Settings
from driver_manager.core.consumers import Action, PodPolicy, Reason, Verdict, drain_verdict, verdict, verdicts, virtual_machine
from driver_manager.core.selectors import parse_selector
from driver_manager.core.snapshot import Identity, Owner, PodView, Taint, Toleration
from driver_manager.core.uses import Evidence, uses
from tests.core.given import neighbours, pods, policies

TAINT = Taint(names.GPU_TAINT, "dm-run")
APP = "nvidia-device-plugin-daemonset"
LABEL = names.DEPLOY_PREFIX + "device-plugin"
REPLICA_SET, DAEMON_SET = Owner("ReplicaSet", "web"), Owner("DaemonSet", "exporter")
GPU_POD = PodView(namespace="default", name="p", uid="u", owner=REPLICA_SET, resources=frozenset({"nvidia.com/gpu"}))
POLICY = PodPolicy(
    settings=Settings(), identity=Identity("gpu-operator", "me", "uid-me", "n"), paused={LABEL: "true"},
    operand_apps=frozenset({"nvidia-device-plugin-daemonset"}), keep_off=TAINT,
)  # fmt: skip


def decided(**fields: Any) -> Verdict:
    """The verdict on the GPU pod with some fields changed."""
    return verdict(replace(GPU_POD, **fields), POLICY)


@pytest.mark.parametrize(
    ("fields", "action", "reason"),
    [
        ({}, Action.EVICT, Evidence.RESOURCE),
        ({"resources": frozenset({"nvidia.com/mig-1g.5gb"})}, Action.EVICT, Evidence.RESOURCE),
        ({"resources": frozenset({"nvidia.com/gpu.shared"})}, Action.EVICT, Evidence.RESOURCE),
        ({"resources": frozenset({"cpu", "amd.com/gpu"})}, Action.KEEP, Reason.NO_GPU),
        ({"resources": frozenset(), "has_empty_dir": True, "owner": None}, Action.KEEP, Reason.NO_GPU),
        ({"uid": "uid-me"}, Action.KEEP, Reason.OWN_POD),
        ({"labels": {names.COMPONENT_LABEL: "nvidia-driver"}}, Action.KEEP, Reason.DRIVER_POD),
        ({"labels": {names.COMPONENT_LABEL: "nvidia-vgpu-host-manager"}}, Action.KEEP, Reason.DRIVER_POD),
        ({"labels": {names.DRAIN_SKIP: "true"}}, Action.KEEP, Reason.OPTED_OUT),
        ({"labels": {names.DRAIN_SKIP: "false"}}, Action.EVICT, Evidence.RESOURCE),
        ({"phase": "Succeeded"}, Action.KEEP, Reason.OVER),
        ({"phase": "Failed"}, Action.KEEP, Reason.OVER),
        ({"phase": "Pending"}, Action.EVICT, Evidence.RESOURCE),
        ({"is_terminating": True}, Action.AWAIT, Reason.TERMINATING),
        ({"is_terminating": True, "phase": "Failed"}, Action.AWAIT, Reason.TERMINATING),
        ({"annotations": {names.MIRROR: "x"}, "owner": Owner("Node", "n")}, Action.REFUSE, Reason.MIRROR_POD),
        ({"resources": frozenset(), "annotations": {names.MIRROR: "x"}}, Action.KEEP, Reason.NO_GPU),
        ({"owner": DAEMON_SET}, Action.EVICT, Evidence.RESOURCE),
        ({"owner": DAEMON_SET, "tolerations": (Toleration("", "Exists"),)}, Action.REFUSE, Reason.DAEMON_SET),
        ({"owner": DAEMON_SET, "tolerations": (Toleration(names.GPU_TAINT, "Exists"),)}, Action.REFUSE, Reason.DAEMON_SET),
        ({"owner": DAEMON_SET, "tolerations": (Toleration(names.GPU_TAINT, "Equal", "other"),)}, Action.EVICT, Evidence.RESOURCE),
        ({"owner": DAEMON_SET, "node_selector": {LABEL: "true"}}, Action.AWAIT, Reason.OPERAND),
        ({"owner": REPLICA_SET, "node_selector": {LABEL: "true"}}, Action.EVICT, Evidence.RESOURCE),
        ({"owner": DAEMON_SET, "namespace": "gpu-operator", "labels": {"app": APP}}, Action.AWAIT, Reason.OPERAND),
        ({"owner": DAEMON_SET, "namespace": "elsewhere", "labels": {"app": APP}}, Action.EVICT, Evidence.RESOURCE),
        ({"owner": None}, Action.REFUSE, Reason.UNMANAGED),
        ({"has_empty_dir": True}, Action.REFUSE, Reason.EMPTY_DIR),
    ],
)  # fmt: skip
def test_n06_n11_each_rule(fields: dict[str, Any], action: Action, reason: Reason) -> None:
    """N06, N11: each rule by an example, with the stock settings."""
    found = decided(**fields)
    assert (found.action, found.reason) == (action, reason)
    assert found.sentence
    assert action is not Action.REFUSE or found.setting


@pytest.mark.parametrize(
    ("policy", "fields", "action"),
    [
        (replace(POLICY, settings=Settings(drain_use_force=True)), {"owner": None}, Action.EVICT),
        (replace(POLICY, settings=Settings(drain_delete_emptydir_data=True)), {"has_empty_dir": True}, Action.EVICT),
        (replace(POLICY, settings=Settings(enable_gpu_pod_eviction=False)), {}, Action.REFUSE),
        (replace(POLICY, settings=Settings(enable_gpu_pod_eviction=False)), {"resources": frozenset()}, Action.KEEP),
        (replace(POLICY, is_policy_owned=True), {}, Action.LEAVE),
        (replace(POLICY, is_policy_owned=True), {"owner": None}, Action.LEAVE),
        (replace(POLICY, keep_off=None), {"owner": DAEMON_SET}, Action.REFUSE),
        (replace(POLICY, keep_off=None), {}, Action.EVICT),
    ],
)
def test_what_settings_change(policy: PodPolicy, fields: dict[str, Any], action: Action) -> None:
    """N06, N47: the setting that a refusal names changes it; on a policy-owned node GPU pods are left to the controller."""
    assert verdict(replace(GPU_POD, **fields), policy).action is action


@given(neighbours(), policies())
def test_every_pod_gets_one_verdict(all_pods: list[PodView], policy: PodPolicy) -> None:
    """Any pods and any policy: one verdict each, in their order, with a sentence; every refusal has a way out."""
    found = verdicts(all_pods, policy)
    assert [each.pod for each in found] == all_pods
    assert all(each.sentence for each in found)
    assert all(each.setting for each in found if each.action in (Action.REFUSE, Action.PARK))


@given(neighbours(), policies(), st.randoms())
def test_the_order_of_pods_is_no_matter(all_pods: list[PodView], policy: PodPolicy, rng: Any) -> None:
    """A verdict is the same wherever the pod stands in the list."""
    shuffled = list(all_pods)
    rng.shuffle(shuffled)
    assert {each.pod.uid: each for each in verdicts(all_pods, policy)} == {each.pod.uid: each for each in verdicts(shuffled, policy)}


@given(pods(), neighbours(3), policies())
def test_a_bystander_stays_a_bystander(pod: PodView, others: list[PodView], policy: PodPolicy) -> None:
    """No other pod changes what happens to this one."""
    assert verdicts([pod, *others], policy)[0] == verdict(pod, policy)


@given(pods(), policies())
def test_who_is_never_evicted(pod: PodView, policy: PodPolicy) -> None:
    """N06, N11, R6: no pod without a GPU, no driver's, opted-out, static, ending or ended pod is ever evicted, and none where it is off."""
    if verdict(pod, policy).action is not Action.EVICT:
        return
    assert uses(pod, policy.context)
    assert pod.labels.get(names.COMPONENT_LABEL) not in names.DRIVER_COMPONENTS
    assert pod.labels.get(names.DRAIN_SKIP) != "true"
    assert names.MIRROR not in pod.annotations
    assert not pod.is_terminating
    assert not pod.is_over
    assert policy.settings.enable_gpu_pod_eviction
    assert not policy.is_policy_owned or policy.settings.policy_owned_consumers == "free"
    assert pod.owner is not None or policy.settings.drain_use_force
    assert not pod.has_empty_dir or policy.settings.drain_delete_emptydir_data or virtual_machine(pod)


@given(pods(), st.booleans(), st.booleans())
def test_more_allowed_refuses_less(pod: PodView, force: bool, empty_dir: bool) -> None:
    """Switching a permission on never makes a refusal out of something else."""
    some = replace(POLICY, settings=Settings(drain_use_force=force, drain_delete_emptydir_data=empty_dir))
    every = replace(POLICY, settings=Settings(drain_use_force=True, drain_delete_emptydir_data=True))
    if verdict(pod, some).action is not Action.REFUSE:
        assert verdict(pod, every) == verdict(pod, some)


@pytest.mark.parametrize(
    ("fields", "settings", "action"),
    [
        ({}, {}, Action.EVICT),
        ({"resources": frozenset()}, {}, Action.EVICT),
        ({"owner": DAEMON_SET}, {}, Action.KEEP),
        ({"annotations": {names.MIRROR: "x"}}, {}, Action.KEEP),
        ({"owner": None}, {}, Action.REFUSE),
        ({"owner": None}, {"drain_use_force": True}, Action.EVICT),
        ({"has_empty_dir": True}, {}, Action.REFUSE),
        ({"has_empty_dir": True}, {"drain_delete_emptydir_data": True}, Action.EVICT),
        ({"is_terminating": True}, {}, Action.AWAIT),
        ({"phase": "Succeeded"}, {}, Action.KEEP),
        ({"uid": "uid-me"}, {}, Action.KEEP),
        ({"labels": {"app": "web"}}, {"drain_pod_selector": parse_selector("app=web")}, Action.EVICT),
        ({"labels": {"app": "db"}}, {"drain_pod_selector": parse_selector("app=web")}, Action.KEEP),
        ({"owner": None}, {"drain_pod_selector": parse_selector("app=web")}, Action.KEEP),
    ],
)
def test_the_drains_own_rules(fields: dict[str, Any], settings: dict[str, Any], action: Action) -> None:
    """Decision 20: a drain of the whole node follows kubectl drain's rules."""
    assert drain_verdict(replace(GPU_POD, **fields), replace(POLICY, settings=Settings(**settings))).action is action
