"""Speaks to a maintenance operator: asks it to free a node, tells it when the node is not needed any more, and reads how far it is.

Each step may be done again: what is so already is left as it is. Nothing is kept here: the objects say all.
"""

import logging
from typing import Any, Final

from driver_manager.controller.cache import Cache
from driver_manager.controller.settings import MaintenanceSettings
from driver_manager.core.fleet import MaintenanceOrder, MaintenanceView
from driver_manager.core.upgrade_policy import UpgradePolicy
from driver_manager.errors import ClusterError, Conflict, NotFound
from driver_manager.names import UPGRADE_CONTROLLER_PREFIXES
from driver_manager.ports import Fleet

logger = logging.getLogger(__name__)

TRIES: Final = 3
"""How often an object is read again that somebody else wrote meanwhile."""
GPU_REGEX: Final = f"^({'|'.join(prefix.replace('.', '[.]') for prefix in UPGRADE_CONTROLLER_PREFIXES)})"


class Maintenance:
    """The NodeMaintenances of the fleet's nodes."""

    def __init__(self, fleet: Fleet, cache: Cache, settings: MaintenanceSettings) -> None:
        self._fleet, self._cache, self._settings = fleet, cache, settings

    @property
    def is_served(self) -> bool:
        """Whether nodes can be freed so now."""
        return self._settings.is_on and self._cache.is_maintenance_served

    def of(self, node_name: str) -> str:
        """How far it is with a node: `missing`, `pending` or `ready`."""
        there = self._cache.maintenances.get(self._settings.name(node_name))
        if there is None or there.node_name != node_name or not there.is_used_by(self._settings.requestor):
            return "missing"
        return "ready" if there.is_ready else "pending"

    async def ask(self, node_name: str, policy: UpgradePolicy) -> None:
        """Makes the node's object, or joins the one that another program has made.

        Raises:
            Conflict: that one is on its way out, or is another node's. ClusterError.
        """
        settings = self._settings
        order = MaintenanceOrder(
            namespace=settings.namespace,
            name=settings.name(node_name),
            node_name=node_name,
            requestor=settings.requestor,
            drain=drain_spec(policy),
            wait=wait_spec(policy),
        )
        there = self._cache.maintenances.get(order.name)
        for _ in range(TRIES):
            try:
                made = await (self._fleet.make_maintenance(order) if there is None else self._join(there, node_name))
                self._cache.put_maintenance(made)
                return
            except (Conflict, NotFound) as error:
                again = await self._read(node_name)
                if there is not None and again is not None and again.resource_version == there.resource_version:
                    raise Conflict(error.message, hint=error.hint) from error
                there = again
        raise Conflict(f"NodeMaintenance {order.namespace}/{order.name}: others write to it all the time")

    async def _join(self, there: MaintenanceView, node_name: str) -> MaintenanceView:
        requestor = self._settings.requestor
        if there.node_name != node_name:
            raise Conflict(
                f"NodeMaintenance {there.ref} is for the node {there.node_name}, not for {node_name}",
                hint="delete it, or set another MAINTENANCE_OPERATOR_NODE_MAINTENANCE_PREFIX",
            )
        if there.is_used_by(requestor):
            return there
        if there.is_deleting:
            raise Conflict(f"NodeMaintenance {there.ref} is being deleted", hint="it is made anew when it is gone")
        return await self._fleet.set_requestors(there, (*there.others, requestor))

    async def give_back(self, node_name: str) -> None:
        """Deletes the node's object if we have made it, else leaves it to the others in it. Gone, or not ours, is fine.

        Raises:
            Conflict: others write to it all the time. ClusterError.
        """
        there = self._cache.maintenances.get(self._settings.name(node_name))
        for _ in range(TRIES):
            if there is None or not there.is_used_by(self._settings.requestor):
                return
            try:
                await self._leave(there)
                return
            except (Conflict, NotFound):
                there = await self._read(node_name)
        raise Conflict(f"NodeMaintenance {self._settings.namespace}/{self._settings.name(node_name)}: others write to it all the time")

    async def _leave(self, there: MaintenanceView) -> None:
        requestor = self._settings.requestor
        if requestor in there.others:
            others = tuple(other for other in there.others if other != requestor)
            there = await self._fleet.set_requestors(there, others)
            self._cache.put_maintenance(there)
        if requestor == there.requestor and not there.is_deleting:
            await self._fleet.delete_maintenance(there)
            self._cache.deleted_maintenance(there)

    async def _read(self, node_name: str) -> MaintenanceView | None:
        """The newest one, also into the cache; None where there is none."""
        name = self._settings.name(node_name)
        try:
            found = await self._fleet.maintenance(self._settings.namespace, name)
        except NotFound:
            if (old := self._cache.maintenances.get(name)) is not None:
                self._cache.drop_maintenance(name, old.uid)
            return None
        self._cache.put_maintenance(found)
        return found

    async def look_again(self, node_name: str) -> None:
        """Reads the node's object after a write that got no answer: it may have been taken."""
        try:
            await self._read(node_name)
        except ClusterError as error:
            logger.debug("a NodeMaintenance could not be read", extra={"node": node_name, "error": error.message})


def drain_spec(policy: UpgradePolicy) -> dict[str, Any]:
    """How the operator frees a node: where the policy drains, of everybody, else of the pods that have GPUs."""
    drain, deletion = policy.drain, policy.pod_deletion
    if drain.enable:
        return {
            "force": drain.force,
            "podSelector": drain.pod_selector.text,
            "timeoutSeconds": drain.timeout_seconds,
            "deleteEmptyDir": drain.delete_empty_dir,
        }
    return {
        "force": deletion.force,
        "timeoutSeconds": deletion.timeout_seconds,
        "deleteEmptyDir": deletion.delete_empty_dir,
        "podEvictionFilters": [{"byResourceNameRegex": GPU_REGEX}],
    }


def wait_spec(policy: UpgradePolicy) -> dict[str, Any] | None:
    """Whom the operator waits for first."""
    waiting = policy.wait_for_completion
    if not waiting.pod_selector.requirements:
        return None
    return {"podSelector": waiting.pod_selector.text, "timeoutSeconds": waiting.timeout_seconds}
