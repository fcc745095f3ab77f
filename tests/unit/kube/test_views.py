from __future__ import annotations

import base64
import json
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from driver_manager import names
from driver_manager.core.snapshot import Identity, Owner, PodView, Rule, Taint, Toleration
from driver_manager.kube import views
from tests.unit.kube import server


def raw(item: Any) -> bytes:
    return json.dumps(item).encode()


def view(**spec: Any) -> PodView:
    return views.PODS.page(raw(server.pods(server.pod("p", **spec)))).items[0]


def test_resources_of_every_kind_of_container_count() -> None:
    """Requests and limits of all containers, and of the pod itself."""

    def needs(field: str, name: str) -> dict[str, Any]:
        return {"name": name, "resources": {field: {name: 1}}}

    pod = view(
        containers=[needs("limits", "a"), needs("requests", "b"), {"name": "plain"}],
        initContainers=[needs("limits", "c")],
        ephemeralContainers=[needs("requests", "d")],
        resources={"limits": {"e": "1"}, "requests": {"f": "1"}},
    )
    assert pod.resources == frozenset("abcdef")


def test_claims_come_from_spec_and_status() -> None:
    """By name, made from a template, and made for an extended resource that the spec does not show as a claim."""
    pod = server.pod("p", resourceClaims=[{"name": "x", "resourceClaimName": "one"}, {"name": "y", "resourceClaimTemplateName": "t"}])
    page = views.PODS.page(raw(server.pods(pod))).items[0]
    assert (page.claims, page.has_pending_claims) == (("one",), True)
    pod["status"] |= {
        "resourceClaimStatuses": [{"name": "y", "resourceClaimName": "p-y-abcde"}],
        "extendedResourceClaimStatus": {"resourceClaimName": "p-extended", "requestMappings": []},
    }
    page = views.PODS.page(raw(server.pods(pod))).items[0]
    assert (page.claims, page.has_pending_claims) == (("one", "p-y-abcde", "p-extended"), False)


def test_a_template_that_needs_no_claim_is_not_pending() -> None:
    """A status entry without a name says that none is made."""
    pod = server.pod("p", resourceClaims=[{"name": "y", "resourceClaimTemplateName": "t"}])
    pod["status"]["resourceClaimStatuses"] = [{"name": "y"}]
    assert not views.PODS.page(raw(server.pods(pod))).items[0].has_pending_claims


def test_the_owner_is_the_controller() -> None:
    """Other owner references do not bring a pod back; of a mirror pod the controller is its Node."""
    pod = server.pod("p")
    other = {"kind": "X", "name": "x", "uid": "1"}
    pod["metadata"]["ownerReferences"] = [other, {"kind": "Node", "name": "n1", "uid": "2", "controller": True}]
    assert views.PODS.page(raw(server.pods(pod))).items[0].owner == Owner("Node", "n1", "2")
    pod["metadata"]["ownerReferences"] = [other]
    assert views.PODS.page(raw(server.pods(pod))).items[0].owner is None


@pytest.mark.parametrize(
    ("spec", "meta", "terminating", "grace"),
    [
        ({}, {}, False, 30),
        ({"terminationGracePeriodSeconds": 0}, {}, False, 0),
        ({"terminationGracePeriodSeconds": 60}, {"deletionTimestamp": "2026-01-31T09:00:00Z", "deletionGracePeriodSeconds": 5}, True, 5),
        ({"terminationGracePeriodSeconds": 60}, {"deletionTimestamp": "2026-01-31T09:00:00Z"}, True, 30),
    ],
)
def test_grace_is_the_one_in_force(spec: dict[str, Any], meta: dict[str, Any], terminating: bool, grace: int) -> None:
    """A deletion has its own grace period."""
    pod = server.pod("p", **spec)
    pod["metadata"] |= meta
    seen = views.PODS.page(raw(server.pods(pod))).items[0]
    assert (seen.is_terminating, seen.grace_seconds) == (terminating, grace)


def test_placement_volumes_and_tolerations() -> None:
    """What keeps a pod on the node, and what it mounts."""
    terms = [{"matchExpressions": [{"key": "a", "operator": "Exists"}]}, {"matchFields": [{"key": "metadata.name", "operator": "In"}]}]
    pod = view(
        nodeSelector={"s": "t"},
        affinity={"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}},
        tolerations=[{"operator": "Exists"}, {"key": "k", "value": "v", "effect": "NoSchedule"}],
        volumes=[{"name": "1", "hostPath": {"path": "/dev"}}, {"name": "2", "emptyDir": {}}, {"name": "3", "configMap": {}}],
        runtimeClassName="nvidia",
        priority=5,
    )
    assert pod.node_selector == {"s": "t"}
    assert pod.affinity_keys == {"a"}
    assert pod.tolerations == (Toleration(operator="Exists"), Toleration("k", "Equal", "v", "NoSchedule"))
    assert (pod.host_paths, pod.has_empty_dir, pod.runtime_class, pod.priority) == (("/dev",), True, "nvidia", 5)


def test_ready_is_a_condition() -> None:
    """Only a Ready condition that is True counts."""
    pod = server.pod("p")
    for status, expected in (("True", True), ("False", False), ("Unknown", False)):
        pod["status"]["conditions"] = [{"type": "Initialized", "status": "True"}, {"type": "Ready", "status": status}]
        assert views.PODS.page(raw(server.pods(pod))).items[0].is_ready is expected


def test_null_is_empty() -> None:
    """Go writes null for empty lists and maps."""
    pod = server.pod("p", containers=None, volumes=None, tolerations=None, nodeSelector=None)
    pod["metadata"] |= {"labels": None, "annotations": None, "ownerReferences": None, "finalizers": None}
    page = views.PODS.page(raw(server.pods(pod)))
    assert page.items[0].labels == {}
    assert views.PODS.page(raw({"metadata": {"resourceVersion": "1"}, "items": None})).items == ()


def test_a_node_keeps_when_a_taint_was_added() -> None:
    """The time goes back with the list, so that nothing is lost by our patch."""
    taint = {"key": "k", "effect": "NoExecute", "timeAdded": "2026-01-31T09:00:00Z"}
    node = views.NODES.one(raw(server.node(unschedulable=True, taints=[taint])))
    assert (node.name, node.uid, node.resource_version, node.unschedulable) == ("n1", "u1", "7", True)
    assert node.taints == (Taint("k", "", "NoExecute", "2026-01-31T09:00:00Z"),)
    assert not views.NODES.one(raw(server.node())).unschedulable


def test_permissions_are_read_as_they_are() -> None:
    """One rule each, names of objects included, and whether it is all."""
    rule = {"verbs": ["get"], "apiGroups": [""], "resources": ["pods/eviction"], "resourceNames": ["x"]}
    seen = views.permissions(raw({"status": {"resourceRules": [rule, {"verbs": ["*"]}], "nonResourceRules": None, "incomplete": True}}))
    assert seen.rules[0] == Rule(frozenset({"get"}), frozenset({""}), frozenset({"pods/eviction"}), frozenset({"x"}))
    assert seen.is_incomplete


def test_a_daemon_set_is_its_template() -> None:
    """Where its pods may run is in the pod template."""
    template = {"spec": {"nodeSelector": {"a": "b"}, "tolerations": [{"operator": "Exists"}]}}
    item = {"metadata": {"namespace": "ns", "name": "d", "uid": "u"}, "spec": {"template": template}}
    seen = views.daemon_set_view(raw(item))
    assert (seen.namespace, seen.name, seen.node_selector, seen.tolerations) == ("ns", "d", {"a": "b"}, (Toleration(operator="Exists"),))


@pytest.mark.parametrize(
    ("strategy", "status", "is_rolling"),
    [
        ("RollingUpdate", {"observedGeneration": 2, "currentNumberScheduled": 3, "updatedNumberScheduled": 3}, False),
        ("RollingUpdate", {"observedGeneration": 2, "currentNumberScheduled": 3, "updatedNumberScheduled": 2}, True),
        ("RollingUpdate", {"observedGeneration": 1, "currentNumberScheduled": 3, "updatedNumberScheduled": 3}, True),
        ("RollingUpdate", {"observedGeneration": 2}, False),
        ("OnDelete", {"observedGeneration": 1, "currentNumberScheduled": 3}, False),
    ],
)
def test_a_daemon_set_that_asks_to_be_parked(strategy: str, status: dict[str, int], is_rolling: bool) -> None:
    """Its label, the labels of its pods, and whether an update of it is under way: numbers that are 0 are left out."""
    meta = {"namespace": "ns", "name": "d", "uid": "u", "generation": 2, "labels": {names.PARK: "true"}}
    spec = {"template": {"metadata": {"labels": {"app": "x"}}, "spec": {}}, "updateStrategy": {"type": strategy}}
    seen = views.daemon_set_view(raw({"metadata": meta, "spec": spec, "status": status}))
    assert (seen.ref, seen.asks_to_be_parked, seen.pod_labels, seen.is_rolling) == ("ns/d", True, {"app": "x"}, is_rolling)


@pytest.mark.parametrize(
    ("gates", "key", "node_name"),
    [([names.PARKED], "metadata.name", "n1"), (["other"], "metadata.name", ""), ([], "metadata.name", ""), ([names.PARKED], "x", "")],
)
def test_a_gated_pod_and_its_node(gates: list[str], key: str, node_name: str) -> None:
    """The node that a pod is made for stands in its affinity, and only our own gate counts."""
    term = {"matchFields": [{"key": key, "operator": "In", "values": ["n1"]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}}
    owner = {"kind": "DaemonSet", "name": "d", "uid": "v", "controller": True}
    meta = {"namespace": "ns", "name": "d-x", "uid": "u", "resourceVersion": "1", "ownerReferences": [owner]}
    seen = views.GATED.one(raw({"metadata": meta, "spec": {"affinity": affinity, "schedulingGates": [{"name": gate} for gate in gates]}}))
    assert (seen.node_name, seen.pod.ref, seen.pod.owner_ref) == (node_name, "ns/d-x", "ns/d")


def token(claims: Any) -> str:
    return f"e30.{base64.urlsafe_b64encode(raw(claims)).decode().rstrip('=')}.c2ln"


def test_a_bound_token_says_who_we_are() -> None:
    """Namespace, pod and node are in the claims of a service account's token."""
    bound = {"namespace": "ns", "pod": {"name": "p", "uid": "u"}, "node": {"name": "n1", "uid": "v"}, "serviceaccount": {"name": "s"}}
    assert views.identity(token({"kubernetes.io": bound, "exp": 1})) == Identity("ns", "p", "u", "n1")


@pytest.mark.parametrize(
    "text", ["", "opaque", "a.b", "a.b.c", token([]), token({"sub": "x"}), token({"kubernetes.io": {"pod": 1}}), "é.é.é"]
)
def test_other_tokens_say_nothing(text: str) -> None:
    """Not a JWT, not JSON, or nobody's pod: an empty identity and no error."""
    assert views.identity(text) == Identity()


@given(st.text())
def test_no_token_is_too_odd(text: str) -> None:
    """Reading a token never fails."""
    views.identity(f"x.{text}.y")
    views.identity(text)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda each: st.lists(each) | st.dictionaries(st.text(), each)))
def test_odd_json_is_an_error_of_one_kind(item: Any) -> None:
    """What is no such object raises what the caller expects, and nothing else."""
    for read in (views.NODES.one, views.PODS.page, views.PODS.event, views.daemon_set_view, views.permissions, views.is_allowed):
        with pytest.raises((msgspec.MsgspecError, ValueError)):
            read(raw(item))


@pytest.mark.parametrize("quantity", ["0", 0])
def test_none_of_a_resource_is_no_use(quantity: object) -> None:
    """A limit of nothing, as charts write it for CPU-only pods, names the resource and uses none of it."""
    pod = view(containers=[{"name": "main", "resources": {"limits": {"nvidia.com/gpu": quantity, "cpu": "1"}}}])
    assert pod.resources == {"cpu"}


def test_foreign_documents_on_nodes_are_not_kept() -> None:
    """5,000 nodes with 100 kB of others' annotations each would be half a gigabyte; a short one may be the node's place in the order."""
    ours = {"nvidia.com/gpu-driver-manager.rollout": "x" * 5000, "order": "17"}
    foreign = {"k8s.ovn.org/node-subnets": "x" * 100_000, views.LAST_APPLIED: "{}"}
    meta = {"name": "gpu-1", "uid": "1", "resourceVersion": "1", "annotations": {**ours, **foreign}}
    assert views.NODES.one(raw({"metadata": meta, "spec": {}, "status": {}})).annotations == ours
