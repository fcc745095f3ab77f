"""What a person should know of parking and is told only in passing, or nowhere, by the nodes: as values, so that each is told once."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum

from driver_manager.core.fleet import FleetSet, Subject
from driver_manager.core.hold import parked_on
from driver_manager.core.optin import PARK_FIELD, asker, opt_in_problem
from driver_manager.core.parking import strangers_on
from driver_manager.core.rollout_record import Progress
from driver_manager.core.snapshot import NodeView
from driver_manager.names import PARKED


class Matter(StrEnum):
    """The reason of the Event."""

    REFUSED = "ParkingRefused"
    """A DaemonSet asks to be parked, or is named, and never is."""
    NOT_THERE = "ParkingNotThere"
    """A policy names a DaemonSet that does not exist."""
    UPDATE_WAITS = "UpdateWaits"
    """A parked DaemonSet has got a new template meanwhile."""
    FOREIGN_ENTRY = "ForeignParking"
    """Somebody else has written into the annotation."""


@dataclass(frozen=True, slots=True)
class Notice:
    """Something to be told once."""

    about: str
    """`namespace/name` of a DaemonSet, or a node's name."""
    matter: Matter
    sentence: str
    subject: Subject | None = None
    """None: what it is about does not exist."""


def set_notices(
    sets: Iterable[FleetSet], *, named: Collection[str], missing: Iterable[str], parked: Collection[str], own_namespace: str
) -> frozenset[Notice]:
    """Of DaemonSets.

    Args:
        sets: those that ask to be parked, or that policies name.
        named: names in policies.
        missing: names in policies that no DaemonSet has.
        parked: DaemonSets that some node is parked for now.
        own_namespace: the controller's.
    """
    found = {Notice(ref, Matter.NOT_THERE, f"{PARK_FIELD} of a policy names it, and it is not there") for ref in missing}
    for each in sets:
        subject = Subject.daemon_set(each)
        if problem := opt_in_problem(each, own_namespace):
            found.add(Notice(each.ref, Matter.REFUSED, f"it is not parked though {asker(each, named)}: {problem}", subject))
        elif each.is_rolling and each.ref in parked:
            sentence = "it is parked, and a rolling update that was begun meanwhile waits for that to end"
            found.add(Notice(each.ref, Matter.UPDATE_WAITS, sentence, subject))
    return frozenset(found)


def node_notice(node: NodeView, progress: Progress | None, probe: str) -> Notice | None:
    """Of a node, whose park for `probe` is a proof that goes on; None where there is nothing to tell."""
    strangers = strangers_on(node, progress) if PARKED in node.annotations else ()
    if not strangers or strangers == (probe,):
        return None
    sentence = f"the annotation {PARKED} names {', '.join(strangers)[:200]}, which is none of ours"
    return Notice(node.name, Matter.FOREIGN_ENTRY, sentence, Subject.node(node))


def still_told(told: Iterable[Notice], sets: Iterable[FleetSet]) -> frozenset[Notice]:
    """Of what was told, what is not over though it is not so at this moment: one update waits for each node in turn."""
    rolling = {each.uid for each in sets if each.is_rolling}
    return frozenset(each for each in told if each.matter is Matter.UPDATE_WAITS and each.subject and each.subject.uid in rolling)


def parked_owners(nodes: Iterable[NodeView]) -> frozenset[str]:
    """The DaemonSets that some node is parked for."""
    return frozenset(owner for node in nodes if PARKED in node.labels for owner in parked_on(node))
