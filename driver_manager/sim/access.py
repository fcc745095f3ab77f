"""Who may do what: roles and the words in which the server refuses."""

from dataclasses import replace
from typing import Final

from driver_manager.core.snapshot import Rule
from driver_manager.errors import Forbidden
from driver_manager.names import OPERATOR_LEASE
from driver_manager.sim.objects import Account


def rule(verbs: str, group: str, resources: str) -> Rule:
    """One rule from words with spaces between them."""
    return Rule(frozenset(verbs.split()), frozenset({group}), frozenset(resources.split()))


EVERYTHING: Final = (rule("*", "*", "*"),)
"""cluster-admin."""

STOCK_ROLE: Final = (
    rule("get list watch patch update", "", "nodes"),
    rule("get list watch", "", "pods"),
    rule("create", "", "pods/eviction"),
    rule("get list", "resource.k8s.io", "resourceclaims"),
    rule("get", "apps", "daemonsets"),
    rule("get list", "config.openshift.io", "clusterversions"),
)
"""The ClusterRole of NVIDIA's driver DaemonSet: all that the agent may count on."""

CONTROLLER_ROLE: Final = (
    rule("get list watch patch", "", "nodes"),
    rule("get list watch", "", "pods"),
    rule("create", "", "pods/eviction"),
    rule("create", "", "events"),
    rule("list watch", "apps", "daemonsets"),
    rule(
        "get",
        "admissionregistration.k8s.io",
        "mutatingadmissionpolicies mutatingadmissionpolicybindings validatingadmissionpolicies validatingadmissionpolicybindings",
    ),
    rule("list", "node.k8s.io", "runtimeclasses"),
    rule("get", "resource.k8s.io", "resourceclaims"),
    rule("list watch", "resource.k8s.io", "resourceslices"),
    rule("get list watch", "nvidia.com", "clusterpolicies nvidiadrivers"),
    rule("patch", "nvidia.com", "clusterpolicies/status nvidiadrivers/status"),
    rule("list watch", "policy", "poddisruptionbudgets"),
)
"""All that the controller needs in the whole cluster."""

CONTROLLER_NAMESPACE_ROLE: Final = (
    rule("delete create", "", "pods"),
    rule("get list watch", "apps", "daemonsets"),
    rule("list watch", "apps", "controllerrevisions"),
    replace(rule("get", "coordination.k8s.io", "leases"), names=frozenset({OPERATOR_LEASE})),
    rule("get create update", "coordination.k8s.io", "leases"),
)
"""All that it needs in the operator's namespace, and in that of its Lease."""

TEMPLATE_ROLE: Final = (rule("get patch", "apps", "daemonsets"),)
"""What it needs more in the whole cluster to park by templates."""

MAINTENANCE_ROLE: Final = (rule("get list watch create patch delete", "maintenance.nvidia.com", "nodemaintenances"),)
"""What it needs more in the namespace of NodeMaintenances."""


def may(account: Account, verb: str, group: str, resource: str, namespace: str = "", name: str = "") -> bool:
    """Whether the account may do one thing; `resource` may have a `/subresource`."""
    rules = account.rules + (account.namespace_rules.get(namespace, ()) if namespace else ())
    return any(
        {verb, "*"} & one.verbs and {group, "*"} & one.groups and {resource, "*"} & one.resources and (not one.names or name in one.names)
        for one in rules
    )


def demand(account: Account, verb: str, group: str, resource: str, namespace: str = "", name: str = "") -> None:
    """Lets an allowed request pass.

    Raises:
        Forbidden: in the server's words.
    """
    if may(account, verb, group, resource, namespace, name):
        return
    kind = resource.partition("/")[0] + (f".{group}" if group else "")
    what = f'{kind} "{name}"' if name else kind
    where = f'in the namespace "{namespace}"' if namespace else "at the cluster scope"
    raise Forbidden(
        f'{what} is forbidden: User "{account.name}" cannot {verb} resource "{resource}" in API group "{group}" {where}',
        hint=f"let the account {verb} {resource}",
    )
