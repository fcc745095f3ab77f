"""Every change of a fleet's nodes and driver pods, in the order in which the API server made them, and what has to hold at each.

Both watches are of one etcd: the versions of nodes and pods are one sequence.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from tests.e2e.fleet import DRIVER_SET, STATE, GpuFleet
from tests.kube.recorder import Event, Recorder
from tests.kube.space import is_marked, is_ready, node_of

IN_WORK = {
    *("cordon-required", "wait-for-jobs-required", "pod-deletion-required", "drain-required", "node-maintenance-required"),
    *("post-maintenance-required", "pod-restart-required", "validation-required", "uncordon-required"),
}


@dataclass(slots=True)
class Story:
    """What was recorded."""

    fleet: GpuFleet
    nodes: Recorder
    drivers: Recorder

    def events(self) -> list[Event]:
        """All, in order."""
        return sorted([*self.nodes.until_now(), *self.drivers.until_now()], key=lambda event: event.version)

    def assert_budget(self, *, parallel: int, unavailable: int, except_for: Collection[str] = ()) -> Moment:
        """Holds every moment to both limits; gives the most that was seen.

        Args:
            parallel: nodes that may be in work.
            unavailable: nodes that may be cordoned or without a Ready driver.
            except_for: nodes that others keep closed.
        """
        now, most = Moment(), Moment()
        events = self.events()
        for number, event in enumerate(events):
            now.take(event)
            closed, working = now.unavailable - set(except_for), now.in_work
            wrong = {
                "are in work": working if len(working) > parallel else set(),
                "are unavailable": closed if len(closed) > unavailable else set(),
                "have no driver and are open": now.driverless - now.cordoned,
            }
            told = [f"{sorted(names)} {what}" for what, names in wrong.items() if names]
            assert not told, f"{told} after {[each.told for each in events[max(0, number - 9) : number + 1]]}"
            most.cordoned = max(most.cordoned, set(closed), key=len)
            most.working = max(most.working, set(working), key=len)
        return most

    def states_of(self, name: str) -> list[str]:
        """The state labels that a node had, in order, without repetition."""
        found: list[str] = []
        for event in self.nodes.of(name):
            label = event.object["metadata"]["labels"].get(STATE, "")
            if not found or found[-1] != label:
                found.append(label)
        return found

    def driver_uids(self) -> dict[str, list[str]]:
        """Node -> uids of the driver pods that were there, in order."""
        found: dict[str, list[str]] = {}
        for event in self.drivers.until_now():
            if event.kind == "ADDED":
                found.setdefault(node_of(event.object), []).append(event.uid)
        return found

    def assert_replaced_once(self) -> None:
        """Every node has had one other driver pod, once."""
        counts = {name: len(set(uids)) for name, uids in self.driver_uids().items()}
        assert counts == dict.fromkeys(self.fleet.names, 2)


@dataclass(slots=True)
class Moment:
    """The fleet after an event."""

    cordoned: set[str] = field(default_factory=set)
    working: set[str] = field(default_factory=set)
    ready: dict[str, str] = field(default_factory=dict)
    """Uid of a Ready driver pod -> its node."""
    known: set[str] = field(default_factory=set)

    def take(self, event: Event) -> None:
        """Goes on by one event."""
        if event.object.get("kind") == "Pod" or "containers" in event.object["spec"]:
            self.ready.pop(event.uid, None)
            if event.kind != "DELETED" and is_ready(event.object) and not is_marked(event.object):
                self.ready[event.uid] = node_of(event.object)
            return
        for names in (self.cordoned, self.working, self.known):
            names.discard(event.name)
        if event.kind == "DELETED":
            return
        self.known.add(event.name)
        if event.object["spec"].get("unschedulable"):
            self.cordoned.add(event.name)
        if event.object["metadata"]["labels"].get(STATE) in IN_WORK:
            self.working.add(event.name)

    @property
    def in_work(self) -> set[str]:
        """Nodes in a state of work."""
        return self.working

    @property
    def driverless(self) -> set[str]:
        """Nodes without a Ready driver pod."""
        return self.known - set(self.ready.values())

    @property
    def unavailable(self) -> set[str]:
        """Nodes that are cordoned, or have no driver."""
        return self.cordoned | self.driverless


@contextlib.contextmanager
def watched(fleet: GpuFleet) -> Iterator[Story]:
    """Records from now on."""
    query = f"labelSelector=fleet%3D{fleet.namespace}"
    with (
        fleet.cp.record("/api/v1/nodes", query) as nodes,
        fleet.cp.record(f"{fleet.space}/pods", f"labelSelector=app%3D{DRIVER_SET}") as drivers,
    ):
        yield Story(fleet, nodes, drivers)
