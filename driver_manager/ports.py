"""What the agent needs of the world, as Protocols: Cluster, Host and Clock.

`kube` and `host` are the real ones, `sim` is the one in memory, and `tests/contract` holds both to the same behaviour. Every method is
asynchronous where the real one can take time, so that virtual time can pass in it. Methods raise the errors of `errors` and no other.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from driver_manager.core.fleet import EventNote, FleetEvent, FleetSet, Kind, LeaseView, MaintenanceOrder, MaintenanceView, PolicySource
from driver_manager.core.parking import Tried
from driver_manager.core.record import NodeChange as RecordChange
from driver_manager.core.situation import NodeChange as RolloutChange
from driver_manager.core.snapshot import (
    ClaimView,
    DaemonSetView,
    HolderScan,
    HostView,
    Identity,
    MountCopy,
    MountView,
    NodeView,
    Permissions,
    PodChange,
    PodList,
    PodView,
    Taint,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePatch:
    """A change of one Node: only what is named changes, and all of it or nothing.

    Taints are an atomic list for the API server, so a change of them needs `resource_version`.
    """

    name: str
    resource_version: str | None = None
    """The version that the decision was made on; a newer one makes the server refuse (Conflict). None: no guard."""
    labels: Mapping[str, str | None] = field(default_factory=dict)
    """New values; None removes."""
    annotations: Mapping[str, str | None] = field(default_factory=dict)
    unschedulable: bool | None = None
    """True cordons, False takes the field away, None leaves it."""
    taints: tuple[Taint, ...] | None = None
    """The whole new list, None leaves it."""

    @classmethod
    def guarded(cls, node: NodeView, change: RecordChange | RolloutChange) -> "NodePatch":
        """A change of exactly the version of a node that it was decided on."""
        return cls(
            name=node.name,
            resource_version=node.resource_version,
            labels=change.labels,
            annotations=change.annotations,
            unschedulable=change.unschedulable,
            taints=change.taints,
        )


class Cluster(Protocol):
    """The API server, as one account sees it."""

    @property
    def identity(self) -> Identity:
        """Who the account's token says we are. No request."""
        ...

    async def node(self, name: str) -> NodeView:
        """Reads a Node.

        Raises:
            NotFound, Forbidden, Unreachable.
        """
        ...

    async def patch_node(self, patch: NodePatch) -> NodeView:
        """Changes a Node and gives it as it is then.

        Raises:
            Conflict: `patch.resource_version` is not the newest. NotFound, Forbidden, Unreachable.
        """
        ...

    async def pods_on(self, node_name: str) -> PodList:
        """Lists the pods bound to a node, in all namespaces."""
        ...

    async def gated_for(self, node_name: str) -> tuple[PodView, ...]:
        """Lists the pods, of all namespaces, that DaemonSets have made for a node and that wait with the parking policy's gate."""
        ...

    def pod_changes(self, node_name: str, since: PodList) -> AsyncIterator[PodChange]:
        """Follows the pods of a node without end, from a list on; gaps of the watch are closed by listing again.

        Raises (while iterating):
            Forbidden: it may not watch, or not any more. Everything else is tried again.
        """
        ...

    async def daemon_set(self, namespace: str, name: str) -> DaemonSetView:
        """Reads a DaemonSet."""
        ...

    async def permissions(self, namespace: str) -> Permissions:
        """What the account may do (SelfSubjectRulesReview)."""
        ...

    async def may(self, verb: str, group: str, resource: str, namespace: str = "") -> bool:
        """Whether the account may do one thing (SelfSubjectAccessReview); `resource` may have a `/subresource`."""
        ...

    async def claims(self, wanted: Collection[tuple[str, str]]) -> Mapping[tuple[str, str], ClaimView]:
        """Reads ResourceClaims by (namespace, name); those that do not exist are left out, and all on a server without that API.

        Raises:
            Forbidden: they may not be read: then who holds a device is not known.
        """
        ...

    async def runtime_handlers(self) -> Mapping[str, str]:
        """Lists the RuntimeClasses: name -> handler.

        Raises:
            Forbidden: as with the stock role.
        """
        ...

    async def evict(self, pod: PodView, *, dry_run: bool = False, grace_seconds: int | None = None) -> None:
        """Asks for the eviction of exactly this pod (by uid); returns when it is accepted, not when the pod is gone.

        Raises:
            NotFound: it is gone. Conflict: another pod has its name now. EvictionBlocked: a budget or webhook says no.
            Terminating: its namespace is being deleted. Forbidden, Unreachable.
        """
        ...

    async def close(self) -> None:
        """Lets go of all connections."""
        ...


class Fleet(Cluster, Protocol):
    """The API server, as the controller needs it beyond one node."""

    def follow(self, kind: Kind) -> AsyncIterator[FleetEvent]:
        """Follows all objects of a kind without end: first `Listed` (or `NotServed`), then changes; `Listed` again after a gap.

        A kind that is not served is looked for again about once a minute.

        Raises (while iterating):
            Forbidden: it may not list or watch. Everything else is tried again.
        """
        ...

    def follow_set(self, ref: str) -> AsyncGenerator[FleetSet | None, None]:
        """Follows one DaemonSet (`namespace/name`) of any namespace without end: as it is now, with its status; None while there is none.

        Raises (while iterating):
            Forbidden: it may not list or watch. Everything else is tried again.
        """
        ...

    async def delete_pod(self, namespace: str, name: str, uid: str) -> None:
        """Deletes exactly this pod with its own grace; returns when that is accepted.

        Raises:
            NotFound: it is gone. Conflict: another pod has its name now. Forbidden, Unreachable.
        """
        ...

    async def has_parking_policy(self) -> bool:
        """Whether one of the two admission policies of deploy/parking is there with its binding. That it works, only a dry run shows.

        Raises:
            Forbidden, Unreachable.
        """
        ...

    async def set_parking_term(self, daemon_set: FleetSet, *, is_in: bool) -> None:
        """Puts into a DaemonSet's template, or takes out, the term by which its pods leave parked nodes, and marks it with a label.

        Guarded by the version that is read for it. A new template rolls a DaemonSet with the strategy RollingUpdate.

        Raises:
            NotFound: it is gone. Conflict: somebody else wrote meanwhile, or it was made anew. Forbidden, Unreachable.
        """
        ...

    async def sets_with_parking_term(self) -> tuple[FleetSet, ...]:
        """The DaemonSets of all namespaces with that mark.

        Raises:
            Forbidden, Unreachable.
        """
        ...

    async def try_pod(self, namespace: str, owner: str, node_name: str) -> Tried:
        """What would become of a pod that a DaemonSet made for a node now: a dry run, which makes nothing.

        Args:
            namespace: where the dry run is made: that of the account.
            owner: the DaemonSet, `namespace/name`.
            node_name: the node.

        Raises:
            Forbidden: the account may not, or somebody else refuses. Unreachable.
        """
        ...

    async def lease(self, namespace: str, name: str) -> LeaseView:
        """Reads a Lease; one that does not exist has no resource version."""
        ...

    async def write_lease(self, lease: LeaseView) -> LeaseView:
        """Makes or replaces a Lease: holder, times and annotations, guarded by its resource version; gives it as it is then.

        Raises:
            Conflict: somebody else wrote meanwhile. Forbidden, Unreachable.
        """
        ...

    async def note_event(self, note: EventNote) -> None:
        """Makes an Event. Nothing is tried again: an Event that is lost is lost.

        Raises:
            ClusterError.
        """
        ...

    async def set_condition(self, source: PolicySource, condition: str, *, is_true: bool, reason: str, sentence: str) -> None:
        """Writes one condition into the status of a custom resource and leaves those of others; one that says the same is left alone.

        Raises:
            NotFound, Conflict, Forbidden, Unreachable.
        """
        ...

    async def maintenance(self, namespace: str, name: str) -> MaintenanceView:
        """Reads a NodeMaintenance.

        Raises:
            NotFound, Forbidden, Unreachable.
        """
        ...

    async def make_maintenance(self, order: MaintenanceOrder) -> MaintenanceView:
        """Makes a NodeMaintenance and gives it as it is then.

        Raises:
            Conflict: one of that name is there. Forbidden, Unreachable, ClusterError.
        """
        ...

    async def set_requestors(self, maintenance: MaintenanceView, others: Sequence[str]) -> MaintenanceView:
        """Replaces the additional requestors of a NodeMaintenance, guarded by its resource version; gives it as it is then.

        Raises:
            Conflict: somebody else wrote meanwhile. NotFound: it is gone. Forbidden, Unreachable.
        """
        ...

    async def delete_maintenance(self, maintenance: MaintenanceView) -> None:
        """Deletes exactly this NodeMaintenance; returns when that is accepted.

        Raises:
            NotFound: it is gone. Conflict: another one has its name now. Forbidden, Unreachable.
        """
        ...


class Host(Protocol):
    """The machine, as far as the driver is concerned. Paths are the host's own, absolute."""

    async def look(self) -> HostView:
        """Reads modules, mounts, files and PCI devices. Takes milliseconds and changes nothing."""
        ...

    async def holders(self) -> HolderScan:
        """Finds the processes that have a GPU device open or mapped."""
        ...

    async def host_driver_version(self, timeout: float) -> str | None:
        """What the host's own nvidia-smi says; None where there is none, it fails, or it does not answer in `timeout` seconds."""
        ...

    def lock(self, timeout: float) -> AbstractAsyncContextManager[None]:
        """Holds the node's lock, so that one run at a time changes the node; freed by any end of the process.

        Raises:
            LockHeld: for `timeout` seconds (0: without limit) another process has it; the message names it.
        """
        ...

    async def unload_module(self, name: str, timeout: float) -> None:
        """Unloads one module; already gone is fine.

        Raises:
            ModuleInUse: it has users now. DeviceStuck: no answer within `timeout` seconds. HostError: it cannot be unloaded at all.
        """
        ...

    async def unmount(self, mount: MountView, *, detach: bool, timeout: float) -> None:
        """Takes one mount away (the top one of its target); already gone is fine.

        Raises:
            MountBusy: only without `detach`. DeviceStuck, HostError.
        """
        ...

    async def mount_copies(self, mounts: Sequence[MountView]) -> tuple[MountCopy, ...]:
        """Who has copies of mounts that were unmounted, in mount namespaces of their own; the first of them."""
        ...

    async def unbind_vfio(self, address: str, timeout: float) -> None:
        """Takes one PCI function off vfio and leaves it without a driver; not there, or not on vfio, is fine.

        Raises:
            DeviceInUse: naming who has it open; nothing was changed. DeviceStuck: no answer within `timeout` seconds. HostError.
        """
        ...

    async def remove_file(self, path: str) -> bool:
        """Removes a file below /run; False where there is none."""
        ...

    async def remove_pid_file(self) -> bool:
        """Removes the driver container's pid file unless a process holds its lock; False where it stays or is not there."""
        ...

    async def services(self, units: Sequence[str]) -> Mapping[str, bool]:
        """Which systemd units are active, or on their way to it.

        Raises:
            HostError: the host's systemd cannot be asked.
        """
        ...

    async def stop_service(self, unit: str, timeout: float) -> None:
        """Stops a unit and returns when it has ended; one that is not active is fine.

        Raises:
            ServiceFailed: it did not, or not within `timeout` seconds. HostError: systemd cannot be asked.
        """
        ...

    async def start_service(self, unit: str, timeout: float) -> None:
        """Starts a unit and returns when systemd calls it started; one that is active is fine.

        Raises:
            ServiceFailed: it was not. HostError: systemd cannot be asked.
        """
        ...

    async def terminate(self, pid: int) -> None:
        """Asks a process to end (SIGTERM); one that has ended is fine.

        Raises:
            HostError: it may not be signalled.
        """
        ...

    async def wait_for_change(self, pids: Sequence[int], timeout: float) -> bool:
        """Returns when one of the processes has ended, else after `timeout` seconds; gives whether none of them is left.

        With no pids it waits for the kernel to tell of a module or device that came or went, where it does that.
        """
        ...


class Clock(Protocol):
    """Time and chance."""

    def now(self) -> float:
        """Seconds that only go up; from an unknown start."""
        ...

    def wall(self) -> str:
        """The time of day as the API writes it, in UTC: `2026-01-31T09:00:00Z`."""
        ...

    def epoch(self) -> float:
        """The time of day in seconds since 1970 (Unix time), which others may read or have written: it can jump."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Lets time pass."""
        ...

    def run_id(self) -> str:
        """A new name for a run: 10 characters of a-z and 0-9."""
        ...
