"""The manifests of deploy/: what the controller may do is what it asks for, and where it runs is as hardened as it says."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from driver_manager import names
from driver_manager.cli.arguments import normalised
from driver_manager.core.snapshot import Rule
from driver_manager.core.upgrade_policy import OWN_LABELS
from driver_manager.fleetconfig import CONTROLLER_OPTIONS, SHARED
from driver_manager.kube.fleetcalls import CLUSTER_RULES, MAINTENANCE_RULES, OPERATOR_RULES, OWN_RULES, PARKING_WAYS, TEMPLATE_RULES
from tests.kube.manifests import CONTROLLER, MAINTENANCE, PARKING, TEMPLATES, documents, path

Object = dict[str, Any]
OBJECTS = documents(CONTROLLER)
NAME = "driver-manager-controller"


def of_kind(kind: str, namespace: str | None = None) -> Object:
    (found,) = (body for body in OBJECTS if body["kind"] == kind and namespace in (None, body["metadata"].get("namespace")))
    return found


def granted(role: Object) -> set[tuple[str, ...]]:
    assert all(set(rule) - {"resourceNames"} == {"apiGroups", "resources", "verbs"} for rule in role["rules"])
    rules = [
        (verb, group, resource, *sorted(rule.get("resourceNames", ())))
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    ]
    assert not [rule for rule, times in Counter(rules).items() if times > 1]
    return set(rules)


def needed(rules: tuple[Rule, ...]) -> set[tuple[str, ...]]:
    return {
        (verb, group, resource, *sorted(rule.names))
        for rule in rules
        for verb in rule.verbs
        for group in rule.groups
        for resource in rule.resources
    }


@pytest.mark.parametrize(
    ("kind", "namespace", "rules"),
    [
        ("ClusterRole", None, CLUSTER_RULES),
        ("Role", "gpu-operator", OPERATOR_RULES),
        ("Role", "driver-manager", OWN_RULES),
    ],
)
def test_the_roles_are_the_table_of_calls(kind: str, namespace: str | None, rules: tuple[Rule, ...]) -> None:
    """Neither has anything that the other has not; there is no `*`."""
    role = granted(of_kind(kind, namespace))
    assert role == needed(rules)
    assert not [one for one in role if "*" in one]


@pytest.mark.parametrize(
    ("kind", "namespace"), [("ClusterRoleBinding", None), ("RoleBinding", "gpu-operator"), ("RoleBinding", "driver-manager")]
)
def test_each_role_is_bound_to_the_account_and_to_nobody_else(kind: str, namespace: str | None) -> None:
    """One subject, that of the Deployment."""
    binding = of_kind(kind, namespace)
    assert binding["roleRef"] == {"apiGroup": "rbac.authorization.k8s.io", "kind": kind.removesuffix("Binding"), "name": NAME}
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": NAME, "namespace": "driver-manager"}]
    assert pod()["serviceAccountName"] == of_kind("ServiceAccount")["metadata"]["name"] == NAME


def pod() -> Object:
    spec: Object = of_kind("Deployment")["spec"]["template"]["spec"]
    return spec


def test_two_replicas_that_do_not_go_together() -> None:
    """Two replicas on two nodes where there are two, off GPU nodes where there are others, and a budget for one of them."""
    assert of_kind("Deployment")["spec"]["replicas"] == 2
    assert of_kind("PodDisruptionBudget")["spec"]["maxUnavailable"] == 1
    (term,) = pod()["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert term["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname"


def test_its_pods_have_the_labels_by_which_it_knows_itself() -> None:
    """A policy whose selector matches the controller is refused by these labels; everything that selects its pods finds them."""
    labels = of_kind("Deployment")["spec"]["template"]["metadata"]["labels"]
    assert labels.items() >= OWN_LABELS.items()
    selectors = [
        of_kind("Deployment")["spec"]["selector"]["matchLabels"],
        of_kind("PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        of_kind("Service")["spec"]["selector"],
    ]
    assert all(labels.items() >= selector.items() for selector in selectors)


def test_nothing_of_the_host() -> None:
    """No root, no capability, nothing to write to, nothing of the host."""
    (container,) = pod()["containers"]
    assert pod()["securityContext"]["runAsNonRoot"] is True
    assert pod()["securityContext"]["runAsUser"] > 0
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not {"hostNetwork", "hostPID", "hostIPC", "volumes"} & set(pod())
    assert container["resources"]["limits"]["memory"]


def test_words_and_probes_are_ones_that_the_command_knows() -> None:
    """The command, each variable and each path exist."""
    (container,) = pod()["containers"]
    assert normalised(container["args"]) == ["controller"]
    assert {each["name"] for each in container["env"]} <= {option.env for option in (*CONTROLLER_OPTIONS, *SHARED)}
    assert {container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")} == {"/healthz", "/readyz"}
    assert container["ports"] == [{"name": "http", "containerPort": 8080}]


def test_every_object_has_its_place_after_its_namespace() -> None:
    """Applied in the order of the files' names, each namespace is there before what is in it; each object is there once."""
    paths = [path(body) for body in OBJECTS]
    assert len(set(paths)) == len(paths)
    assert OBJECTS[0]["kind"] == "Namespace"
    spaces = {body["metadata"]["namespace"] for body in OBJECTS if "namespace" in body["metadata"]}
    assert spaces == {OBJECTS[0]["metadata"]["name"], "gpu-operator"}


def test_the_role_for_maintenance_is_the_table_of_calls() -> None:
    """Where a maintenance operator frees the nodes the same account has the rights for that, in one namespace, and no others."""
    role, binding = documents(MAINTENANCE)
    assert granted(role) == needed(MAINTENANCE_RULES)
    assert (role["kind"], role["metadata"]["namespace"]) == ("Role", "default")
    assert binding["roleRef"] == {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": role["metadata"]["name"]}
    assert binding["metadata"]["namespace"] == role["metadata"]["namespace"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": NAME, "namespace": "driver-manager"}]


def test_the_role_for_templates_is_the_table_of_calls() -> None:
    """Only where templates are changed for parking has the account the right to patch DaemonSets, of the whole cluster."""
    role, binding = documents(TEMPLATES)
    assert granted(role) == needed(TEMPLATE_RULES)
    assert (role["kind"], binding["kind"]) == ("ClusterRole", "ClusterRoleBinding")
    assert binding["roleRef"] == {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role["metadata"]["name"]}
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": NAME, "namespace": "driver-manager"}]
    others = [rule for body in OBJECTS for rule in body.get("rules", ()) if "daemonsets" in rule["resources"]]
    assert others
    assert not [rule for rule in others if "patch" in rule["verbs"]]


def test_the_two_parking_policies_choose_the_same_pods() -> None:
    """Both are bound to parked nodes, and say with the same words which pods are kept off: those of the owners that a node lists."""
    found = {(body["kind"], body["metadata"]["name"]): body["spec"] for body in documents(PARKING)}
    assert [name for _, name in found] == [name for name in PARKING_WAYS for _ in "ab"]
    gate, gate_binding, deny, deny_binding = found.values()
    for same in ("paramKind", "matchConstraints", "variables", "failurePolicy"):
        assert gate[same] == deny[same], same
    assert gate["matchConditions"][0] == deny["matchConditions"][0]
    for binding in (gate_binding, deny_binding):
        assert binding["paramRef"] == {
            "selector": {"matchExpressions": [{"key": names.PARKED, "operator": "Exists"}]},
            "parameterNotFoundAction": "Allow",
        }
    assert names.PROBE in str(gate["variables"])
    chosen = deny["validations"][0]["expression"].removeprefix("!")
    assert " ".join(chosen.split()) in " ".join(gate["mutations"][0]["applyConfiguration"]["expression"].split())
