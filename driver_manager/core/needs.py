"""The permissions that a run needs: verb, group and resource, as a role spells them. The one list of them."""

from typing import Final

from driver_manager.names import DRA_GROUP

Need = tuple[str, str, str]

GET_NODE: Final[Need] = ("get", "", "nodes")
PATCH_NODE: Final[Need] = ("patch", "", "nodes")
LIST_PODS: Final[Need] = ("list", "", "pods")
WATCH_PODS: Final[Need] = ("watch", "", "pods")
EVICT: Final[Need] = ("create", "", "pods/eviction")
GET_CLAIM: Final[Need] = ("get", DRA_GROUP, "resourceclaims")
GET_DAEMON_SET: Final[Need] = ("get", "apps", "daemonsets")

ALWAYS: Final = (GET_NODE, PATCH_NODE, LIST_PODS, WATCH_PODS, EVICT)
"""Without these a run that has to free the driver fails."""

SOMETIMES: Final = {
    GET_CLAIM: "a run on a node with claims fails before it changes anything",
    GET_DAEMON_SET: "a run takes the driver pod's own tolerations for its DaemonSet's, and parks no DaemonSet",
}
"""What comes of it where one is missing."""


def in_words(need: Need) -> str:
    """A need as people say it."""
    return f"{need[0]} {need[2]}"
