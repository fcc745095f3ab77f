"""Which DaemonSets ask to be parked: by a label of their own, or by a policy that names them; and who never is, whoever asks.

A policy names single DaemonSets. What the name alone shows (a whole namespace, one of the cluster's own) is refused when the policy is
read; what only the DaemonSet shows (the driver's, a validator, ours, its own opt-out) when it is seen.
"""

from collections.abc import Collection, Mapping
from typing import Final

from driver_manager.core.fleet import FleetSet, is_driver, is_validator
from driver_manager.core.hold import is_ref
from driver_manager.names import NAME_LABEL, OWN_NAME, PARK

SYSTEM_NAMESPACES: Final = ("kube-", "openshift-")
"""How the names of namespaces begin whose DaemonSets the cluster itself needs."""
PARK_FIELD: Final = "podDeletion.park"
"""Of the upgrade policy: names of DaemonSets."""


def asks_by_label(daemon_set: FleetSet) -> bool:
    """Whether a DaemonSet asks to be parked."""
    return daemon_set.labels.get(PARK) == "true"


def asker(daemon_set: FleetSet, named: Collection[str]) -> str:
    """Who asks for a DaemonSet to be parked, as a part of a sentence; empty where nobody does."""
    if asks_by_label(daemon_set):
        return f"its label {PARK} asks for it"
    return f"{PARK_FIELD} of the policy names it" if daemon_set.ref in named else ""


def opt_in_problem(daemon_set: FleetSet, own_namespace: str) -> str:
    """Why a DaemonSet is not parked though somebody asks for it; empty where nothing speaks against it."""
    if problem := never_parked(daemon_set.pod_labels, daemon_set.namespace, own_namespace):
        return problem
    if not asks_by_label(daemon_set) and PARK in daemon_set.labels:
        return f"its own label {PARK}={daemon_set.labels[PARK]} is against it"
    return ""


def never_parked(pod_labels: Mapping[str, str], namespace: str, own_namespace: str) -> str:
    """Why no DaemonSet like that is parked, whoever asks; empty where nothing speaks against it.

    Args:
        pod_labels: of its template.
        namespace: its own.
        own_namespace: the controller's; empty for the agent, which shares its namespace with the operands.
    """
    if is_driver(pod_labels):
        return "it is the driver's own"
    if is_validator(pod_labels):
        return "it validates the driver"
    if pod_labels.get(NAME_LABEL) == OWN_NAME or namespace == own_namespace:
        return "it belongs to this program"
    return system_problem(namespace)


def system_problem(namespace: str) -> str:
    """Why no DaemonSet of a namespace is parked; empty where nothing speaks against it."""
    is_system = namespace.startswith(SYSTEM_NAMESPACES)
    return f"the cluster itself needs what is in the namespace {namespace}" if is_system else ""


def name_problem(name: str) -> str:
    """Why a policy may not name a DaemonSet so, `namespace/name`; empty where it may."""
    namespace, _, rest = name.partition("/")
    if rest in ("", "*") or "*" in namespace:
        return "that is no single DaemonSet: each is named for itself, as namespace/name"
    if not is_ref(name):
        return "that is no namespace/name"
    return system_problem(namespace)
