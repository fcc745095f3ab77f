"""How nodes, driver pods and policies of a fleet are read from bytes."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver_manager.core.fleet import FleetPod
from driver_manager.kube import fleetviews, views


def raw(item: Any) -> bytes:
    return json.dumps(item).encode()


def meta(**more: Any) -> dict[str, Any]:
    return {"name": "x", "uid": "u", "namespace": "op", "resourceVersion": "1", **more}


def pod(spec: dict[str, Any] | None = None, status: dict[str, Any] | None = None, **more: Any) -> FleetPod:
    return fleetviews.PODS.one(raw({"metadata": meta(**more), "spec": spec or {}, "status": status or {}}))


def waits(reason: str, restarts: int = 0) -> dict[str, Any]:
    return {"ready": False, "restartCount": restarts, "state": {"waiting": {"reason": reason}}}


RUNS = {"ready": True, "restartCount": 9, "state": {"running": {}}}


@pytest.mark.parametrize(
    ("status", "ready"),
    [
        ({"phase": "Running", "containerStatuses": [RUNS, RUNS]}, True),
        ({"phase": "Running", "containerStatuses": [RUNS, waits("CrashLoopBackOff")]}, False),
        ({"phase": "Running", "containerStatuses": []}, False),
        ({"phase": "Running"}, False),
        ({"phase": "Succeeded", "containerStatuses": [RUNS]}, False),
        ({}, False),
    ],
)
def test_ready_is_all_containers(status: dict[str, Any], ready: bool) -> None:
    """Running, with at least one container status, and every container ready."""
    assert pod(status=status).is_ready is ready


@pytest.mark.parametrize(
    ("inits", "mains", "restarts", "trouble"),
    [
        ([], [RUNS], 0, ""),
        ([], [waits("CrashLoopBackOff", 12), waits("CrashLoopBackOff", 3)], 12, "CrashLoopBackOff"),
        ([waits("ImagePullBackOff")], [waits("PodInitializing")], 0, "ImagePullBackOff"),
        ([{"ready": False, "restartCount": 4, "state": {"running": {}}}], [waits("PodInitializing")], 4, ""),
        ([RUNS], [waits("ContainerCreating")], 0, ""),
        ([], [{"ready": False, "restartCount": 2, "state": {"terminated": {"reason": "Error"}}}], 2, ""),
    ],
)
def test_what_is_wrong_with_a_pod(inits: list[Any], mains: list[Any], restarts: int, trouble: str) -> None:
    """Restarts and reasons of containers that are not ready, init containers first; waiting for one's turn is no trouble."""
    status = {"phase": "Pending", "initContainerStatuses": inits, "containerStatuses": mains}
    seen = pod(status=status)
    assert (seen.restarts, seen.trouble) == (restarts, trouble)


def test_the_digest_is_the_first_that_is_not_empty() -> None:
    """Over init containers, then containers; a value that comes from elsewhere is none."""

    def container(*values: str | None) -> dict[str, Any]:
        return {"env": [{"name": "OTHER", "value": "x"}, *({"name": "DRIVER_CONFIG_DIGEST", "value": v} for v in values if v is not None)]}

    assert pod({"initContainers": [container(), container("")], "containers": [container("b"), container("c")]}).digest == "b"
    assert pod({"initContainers": [container("a")], "containers": [container("b")]}).digest == "a"
    assert pod({"containers": [{"env": [{"name": "DRIVER_CONFIG_DIGEST", "valueFrom": {"fieldRef": {}}}]}, {"env": None}]}).digest == ""


def test_where_a_pod_belongs() -> None:
    """Bound, else as its DaemonSet's controller wrote it; a term of labels says nothing of a name."""
    fields = [{"key": "metadata.name", "operator": "In", "values": ["n7"]}]
    terms = [{"matchExpressions": [{"key": "a", "operator": "Exists"}]}, {"matchFields": fields}]
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}
    waiting, bound = pod({"affinity": affinity}), pod({"affinity": affinity, "nodeName": "n8"})
    assert (waiting.node_name, waiting.is_bound, bound.node_name, bound.is_bound) == ("n7", False, "n8", True)
    assert pod({"affinity": {"nodeAffinity": None}}).node_name == ""


def test_an_owner_that_is_no_controller_is_none() -> None:
    """Such a pod is an orphan."""
    owner = {"kind": "DaemonSet", "name": "d", "uid": "1"}
    assert pod(ownerReferences=[owner]).is_orphan
    assert not pod(ownerReferences=[{**owner, "controller": True}]).is_orphan


def test_a_node_without_bulk() -> None:
    """Devices are NVIDIA's and numbers; long annotations that nobody reads are left out, all others stay."""
    annotations = {"kubectl.kubernetes.io/last-applied-configuration": "{}", "csi.volume.kubernetes.io/nodeid": "{}", "mine": "x"}
    sizes = {"cpu": "64", "nvidia.com/gpu": "8", "nvidia.com/mig-1g.5gb": "1k", "nvidia.com/odd": "1500m", "memory": "1Ti"}
    status = {"allocatable": sizes, "capacity": {"nvidia.com/gpu": "16"}, "conditions": [{"type": "Ready", "status": "Unknown"}]}
    node = views.NODES.one(raw({"metadata": meta(annotations=annotations), "spec": {}, "status": status}))
    assert node.annotations == {"mine": "x"}
    assert node.allocatable == {"nvidia.com/gpu": 8, "nvidia.com/mig-1g.5gb": 1000}
    assert node.capacity == {"nvidia.com/gpu": 16}
    assert not node.is_ready


@pytest.mark.parametrize(
    ("conditions", "ready"),
    [(None, True), ([], True), ([{"type": "Ready", "status": "True"}, {"type": "DiskPressure", "status": "False"}], True)],
)
def test_a_node_without_a_ready_condition_is_ready(conditions: Any, ready: bool) -> None:
    """Only a kubelet that says otherwise, or of which nothing was heard, is not."""
    assert views.NODES.one(raw({"metadata": meta(), "status": {"conditions": conditions}})).is_ready is ready


def test_nodes_share_their_labels_texts() -> None:
    """Equal keys and values of two nodes are one object each: memory of a large fleet."""
    one, other = (views.NODES.one(raw({"metadata": meta(labels={"some.example/label": "some value"})})) for _ in range(2))
    assert next(iter(one.labels)) is next(iter(other.labels))
    assert one.labels["some.example/label"] is other.labels["some.example/label"]


def test_a_daemon_set_of_a_template_not_seen_yet() -> None:
    """Until its controller has observed the newest generation it is not settled; without a strategy it replaces pods itself."""
    spec = {"template": {"metadata": {"labels": None}, "spec": {"nodeSelector": None}}}
    one = {"metadata": meta(generation=3), "spec": spec, "status": {"observedGeneration": 2}}
    seen = fleetviews.SETS.one(raw(one))
    assert (seen.is_settled, seen.is_on_delete, seen.pod_labels, seen.node_selector) == (False, False, {}, {})
    one["status"] = {"observedGeneration": 3}
    assert fleetviews.SETS.one(raw(one)).is_settled


def test_a_bare_cluster_policy() -> None:
    """What is not written: the driver is there, its policy is not."""
    seen = fleetviews.CLUSTER_POLICIES.one(raw({"metadata": meta(), "spec": {}}))
    assert (seen.has_driver, seen.upgrade_policy, seen.uses_nvidia_driver_crd, seen.has_sandbox_workloads) == (True, None, False, False)


@pytest.mark.parametrize(
    ("noted", "applied"),
    [
        ('{"spec":{"driver":{"upgradePolicy":{"podDeletion":{"podSelector":"a=b"}}}}}', {"podDeletion": {"podSelector": "a=b"}}),
        ('{"spec":{"driver":{"upgradePolicy":[]}}}', None),
        ('{"spec":{"driver":1}}', None),
        ("[]", None),
        ("{", None),
        ("[" * 100_000, None),
        (None, None),
    ],
)
def test_what_kubectl_applied_is_kept_of_the_policy_alone(noted: str | None, applied: Any) -> None:
    """Before the API server dropped fields; a note that cannot be read is none."""
    annotations = {} if noted is None else {views.LAST_APPLIED: noted}
    seen = fleetviews.CLUSTER_POLICIES.one(raw({"metadata": meta(annotations=annotations), "spec": {}}))
    assert (seen.applied_policy, seen.annotations) == (applied, {})
    of_driver = json.dumps({"spec": {"upgradePolicy": {"autoUpgrade": False}}})
    driver = fleetviews.DRIVERS.one(raw({"metadata": meta(annotations={views.LAST_APPLIED: of_driver}), "spec": {}}))
    assert driver.applied_policy == {"autoUpgrade": False}


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda each: st.lists(each) | st.dictionaries(st.text(), each)))
def test_odd_json_is_an_error_of_one_kind(item: Any) -> None:
    """What is no such object raises what the caller expects, and nothing else."""
    readers = (fleetviews.PODS, fleetviews.SETS, fleetviews.REVISIONS, fleetviews.CLUSTER_POLICIES, fleetviews.DRIVERS, fleetviews.LEASES)
    for read in (*(reader.page for reader in readers), fleetviews.group_versions, fleetviews.resources):
        with pytest.raises((msgspec.MsgspecError, ValueError)):
            read(raw(item))


@pytest.mark.parametrize(
    ("spec", "labels", "covers"),
    [
        ({}, {"a": "b"}, False),
        ({"selector": {}}, {"a": "b"}, True),
        ({"selector": {"matchLabels": {"a": "b"}, "matchExpressions": None}}, {"a": "b"}, True),
        ({"selector": {"matchLabels": {"a": "b"}, "matchExpressions": [{"key": "c", "operator": "Exists"}]}}, {"a": "b"}, False),
        ({"selector": {"matchExpressions": [{"key": "a", "operator": "NotIn", "values": ["b"]}]}}, {"a": "c"}, True),
        ({"selector": {"matchExpressions": [{"key": "a", "operator": "DoesNotExist", "values": None}]}}, {"a": "c"}, False),
    ],
)
def test_whose_pods_a_budget_means(spec: dict[str, Any], labels: dict[str, str], covers: bool) -> None:
    """Labels and expressions together; without a selector nobody's, with an empty one everybody's."""
    budget = fleetviews.BUDGETS.one(raw({"metadata": meta(), "spec": spec, "status": {"disruptionsAllowed": 2}}))
    assert budget.covers("op", labels) is covers
    assert not budget.covers("other", labels)
    assert budget.allowed == 2


@pytest.mark.parametrize(("generation", "observed", "is_observed"), [(2, 1, False), (2, 2, True), (2, None, False)])
def test_a_budget_that_was_not_counted_yet(generation: int, observed: int | None, is_observed: bool) -> None:
    """What it allows was counted for an older spec, or for none."""
    status = {} if observed is None else {"observedGeneration": observed, "disruptionsAllowed": 1}
    assert fleetviews.BUDGETS.one(raw({"metadata": meta(generation=generation), "spec": {}, "status": status})).is_observed is is_observed


@pytest.mark.parametrize(
    ("conditions", "ready"),
    [
        (None, False),
        ([], False),
        ([{"type": "Ready", "status": "False", "reason": "Draining"}], False),
        ([{"type": "Ready", "status": "True", "reason": "Ready"}], True),
        ([{"type": "RequestorFailed", "status": "True", "reason": "Ready"}], False),
    ],
)
def test_when_a_maintenance_is_ready(conditions: list[dict[str, Any]] | None, ready: bool) -> None:
    """Its condition Ready has the reason Ready, which is what NVIDIA's controller reads."""
    spec = {"nodeName": "n", "requestorID": "a", "additionalRequestors": None}
    view = fleetviews.MAINTENANCES.one(raw({"metadata": meta(), "spec": spec, "status": {"conditions": conditions}}))
    assert (view.is_ready, view.node_name, view.requestor, view.others) == (ready, "n", "a", ())


@pytest.mark.parametrize(
    ("who", "deleting", "used"), [("a", False, True), ("a", True, False), ("b", False, True), ("b", True, True), ("c", False, False)]
)
def test_who_uses_a_maintenance(who: str, deleting: bool, used: bool) -> None:
    """Its maker until it has deleted it, the others until they leave."""
    about = meta(deletionTimestamp="2026-01-31T09:00:00Z") if deleting else meta()
    spec = {"nodeName": "n", "requestorID": "a", "additionalRequestors": ["b"]}
    view = fleetviews.MAINTENANCES.one(raw({"metadata": about, "spec": spec}))
    assert view.is_used_by(who) is used


@pytest.mark.parametrize("device", [{"attributes": {"type": {"string": "gpu"}}}, {"basic": {"attributes": {}}}])
def test_a_resource_slice_is_its_place_and_a_number(device: dict[str, Any]) -> None:
    """Of its devices, in the words of any version, only how many they are; one that is not of a single node has no node."""
    pool = {"name": "n1", "generation": 3, "resourceSliceCount": 2}
    of_node = {"driver": "gpu.nvidia.com", "nodeName": "n1", "pool": pool, "devices": [{"name": "gpu-0", **device}] * 8}
    view = fleetviews.SLICES.one(raw({"metadata": meta(), "spec": of_node}))
    assert (view.node_name, view.driver, view.pool, view.generation, view.devices) == ("n1", "gpu.nvidia.com", "n1", 3, 8)
    of_all = {"driver": "gpu.nvidia.com", "allNodes": True, "pool": pool, "sharedCounters": [{"name": "c"}]}
    view = fleetviews.SLICES.one(raw({"metadata": meta(), "spec": of_all}))
    assert (view.node_name, view.devices) == ("", 0)
