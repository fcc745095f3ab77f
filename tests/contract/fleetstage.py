"""What the Fleet contract needs of a world, played by the simulator and by the real control plane; and a way to follow it."""

from __future__ import annotations

import abc
import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from driver_manager.core.fleet import (
    BudgetView,
    Changed,
    FleetEvent,
    FleetPod,
    FleetSet,
    Item,
    Kind,
    Listed,
    MaintenanceView,
    NotServed,
    PolicySource,
    Revision,
    SliceView,
)
from driver_manager.core.snapshot import ChangeKind, NodeView, Rule
from driver_manager.names import GPU_DRA_DRIVER
from driver_manager.ports import Fleet
from tests.contract.stage import until

COMPONENT = "app.kubernetes.io/component"


class FleetStage(abc.ABC):
    """The operator's namespace, which is that of NodeMaintenances too, nodes and custom resources of a test's own."""

    namespace: str
    fleet: Fleet
    """As an account that may do everything; it does not wait a minute for what is not served."""

    @abc.abstractmethod
    async def add_node(self, labels: Mapping[str, str] | None = None, *, gpus: int = 8, is_selected: bool = True) -> str:
        """A Ready node without taints, with or without the label that the fleet selects; gives its name."""

    @abc.abstractmethod
    async def select_node(self, name: str, is_selected: bool) -> None:
        """Somebody gives the node that label, or takes it off."""

    @abc.abstractmethod
    async def add_set(
        self,
        name: str,
        selector: Mapping[str, str],
        labels: Mapping[str, str],
        *,
        digest: str = "",
        avoids_drivers: bool = False,
        is_parkable: bool = False,
    ) -> None:
        """A DaemonSet, OnDelete, for the nodes with these labels; its pods have these labels, among them `app`.

        A parkable one is not OnDelete, and asks by its label to be parked.

        With `avoids_drivers` its pods go to no node that has another pod with a driver's component label (required anti-affinity).
        """

    @abc.abstractmethod
    async def set_digest(self, name: str, digest: str) -> None:
        """Somebody changes the template of a DaemonSet."""

    @abc.abstractmethod
    async def delete_set(self, name: str, *, orphans: bool) -> None:
        """Somebody deletes a DaemonSet, with its pods or without them."""

    @abc.abstractmethod
    async def install_parking(self, way: str) -> None:
        """Somebody applies one of deploy/parking, `gate` or `deny`."""

    @abc.abstractmethod
    async def serve(self, kind: str, *, is_served: bool = True) -> None:
        """Somebody installs a custom resource or takes it away with its objects, and returns then.

        Args:
            kind: `ClusterPolicy`, `NVIDIADriver` or `NodeMaintenance`.
            is_served: installs it.
        """

    @abc.abstractmethod
    async def add_custom(self, kind: str, name: str, spec: Mapping[str, Any], *, condition: str = "") -> None:
        """An object of a custom resource; with a condition that somebody else has written (status True, reason `Theirs`)."""

    @abc.abstractmethod
    async def edit_custom(self, kind: str, name: str, spec: Mapping[str, Any]) -> None:
        """Somebody changes fields of its spec."""

    @abc.abstractmethod
    async def add_budget(self, name: str, labels: Mapping[str, str], min_available: int) -> None:
        """A PodDisruptionBudget for the pods of the operator's namespace with these labels."""

    @abc.abstractmethod
    async def set_budget(self, name: str, min_available: int) -> None:
        """Somebody changes it."""

    @abc.abstractmethod
    async def remove_budget(self, name: str) -> None:
        """Somebody deletes it."""

    @abc.abstractmethod
    async def publish(self, name: str, node: str, devices: int, *, driver: str = GPU_DRA_DRIVER, generation: int = 1) -> None:
        """A DRA driver makes or changes a ResourceSlice of a node's pool."""

    @abc.abstractmethod
    async def unpublish(self, name: str) -> None:
        """It deletes it."""

    @abc.abstractmethod
    async def work_on(self, name: str, *, ready: bool = False, finalizer: bool | None = None) -> None:
        """The maintenance operator says that a NodeMaintenance is Ready, and takes hold of it or lets it go."""

    @abc.abstractmethod
    async def maintenance_spec(self, name: str) -> dict[str, Any]:
        """Its spec, as it stands in the API."""

    @abc.abstractmethod
    async def events(self, name: str, namespace: str = "default") -> list[tuple[bool, str, str]]:
        """The Events about a node, or about a DaemonSet of a namespace, that this program has made: is it a warning, reason, sentence."""

    @abc.abstractmethod
    async def account(self, cluster: tuple[Rule, ...], namespace: tuple[Rule, ...] = ()) -> Fleet:
        """The fleet as another account sees it, with rules for the whole cluster and for the operator's namespace."""


class Followed:
    """What a follower has been told, and what is there by that."""

    def __init__(self) -> None:
        self.events: list[FleetEvent] = []
        self.items: dict[str, Item] = {}
        self.failed: Exception | None = None

    def take(self, event: FleetEvent) -> None:
        """As a cache takes it, except for versions."""
        self.events.append(event)
        match event:
            case Listed(_, items):
                self.items = {item.uid: item for item in items}
            case Changed(_, ChangeKind.GONE, item):
                self.items.pop(item.uid, None)
            case Changed(_, _, item):
                self.items[item.uid] = item
            case NotServed():
                self.items = {}

    async def when(self, holds: Callable[[Followed], Any], what: str, timeout: float = 20.0) -> Any:
        """Returns what is asked for, as soon as it is true; raises at once what has ended the follower."""

        async def look() -> Any:
            if self.failed:
                raise self.failed
            return holds(self)

        return await until(look, what, timeout)

    async def listed(self) -> None:
        """Returns after the first list."""
        await self.when(lambda seen: any(isinstance(event, Listed) for event in seen.events), "the first list")

    @property
    def nodes(self) -> dict[str, NodeView]:
        """By name."""
        return {item.name: item for item in self.items.values() if isinstance(item, NodeView)}

    @property
    def sets(self) -> dict[str, FleetSet]:
        """By name."""
        return {item.name: item for item in self.items.values() if isinstance(item, FleetSet)}

    @property
    def sets_by_ref(self) -> dict[str, FleetSet]:
        """By `namespace/name`."""
        return {item.ref: item for item in self.items.values() if isinstance(item, FleetSet)}

    @property
    def revisions(self) -> list[Revision]:
        """By number."""
        return sorted((item for item in self.items.values() if isinstance(item, Revision)), key=lambda item: item.number)

    @property
    def pods(self) -> list[FleetPod]:
        """In no order."""
        return [item for item in self.items.values() if isinstance(item, FleetPod)]

    @property
    def policies(self) -> dict[str, PolicySource]:
        """By name."""
        return {item.name: item for item in self.items.values() if isinstance(item, PolicySource)}

    @property
    def budgets(self) -> dict[str, BudgetView]:
        """By name."""
        return {item.name: item for item in self.items.values() if isinstance(item, BudgetView)}

    @property
    def slices(self) -> dict[str, SliceView]:
        """By name."""
        return {item.name: item for item in self.items.values() if isinstance(item, SliceView)}

    @property
    def maintenances(self) -> dict[str, MaintenanceView]:
        """By name."""
        return {item.name: item for item in self.items.values() if isinstance(item, MaintenanceView)}

    def running(self, app: str, count: int = 1) -> list[FleetPod]:
        """The pods of an app, if they are so many and all work."""
        found = [pod for pod in self.pods if pod.labels.get("app") == app]
        return found if len(found) == count and all(pod.is_ready and not pod.is_terminating for pod in found) else []


@asynccontextmanager
async def following(fleet: Fleet, kind: Kind) -> AsyncIterator[Followed]:
    """Follows a kind; an error of the follower is an error of the test."""
    seen = Followed()

    async def follow() -> None:
        try:
            async for event in fleet.follow(kind):
                seen.take(event)
        except Exception as error:
            seen.failed = error
            raise

    task = asyncio.create_task(follow())
    try:
        yield seen
    finally:
        task.cancel()
        done, _ = await asyncio.wait([task])
        for each in done:
            if not each.cancelled() and (error := each.exception()):
                raise error
