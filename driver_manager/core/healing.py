"""What becomes of a node that an agent left half-way and will not come back to: nothing, a new run id, the undo (decision 36, R3).

A live agent is never healed over. So it is waited until the record's author is gone, no driver pod is there or is due (its start takes the
record over), and that has been so for the settle time; then the run id in the record is replaced, which stops an agent that lives after all
before its next step; and only after a pause the undo is written. Both writes are guarded by the version of the node that was looked at.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from driver_manager.core.fleet import FleetSet, is_driver
from driver_manager.core.record import NodeChange, Record, Undo, encode, find_record, undo_record
from driver_manager.core.remains import is_nothing, is_of_another_boot, remains_of
from driver_manager.core.snapshot import NodeView, PodView, Taint
from driver_manager.names import RECORD, STATUS

FORGIVEN_TAINTS: Final = frozenset(
    f"node.kubernetes.io/{each}"
    for each in ("not-ready", "unreachable", "disk-pressure", "memory-pressure", "pid-pressure", "unschedulable", "network-unavailable")
)
"""Which every DaemonSet's pods tolerate: https://kubernetes.io/docs/concepts/workloads/controllers/daemonset/#taints-and-tolerations"""


class Why(StrEnum):
    """What is done about what an agent or controller left on a node, and why, for machines: reason of Events and metrics."""

    CLEAN = "Clean"
    """Nothing of ours is on it that is not in use."""
    AUTHOR_LIVES = "AuthorLives"
    """The pod of the run that wrote the record is there."""
    DRIVER_HERE = "DriverHere"
    """A driver pod is there: its start takes the record over."""
    DRIVER_DUE = "DriverDue"
    """A DaemonSet will make one."""
    NODE_NOT_READY = "NodeNotReady"
    """Nobody can tell whether its processes live."""
    RUN_BY_HAND = "RunByHand"
    """The record is of a command or a systemd unit, which cannot be seen from here as long as the boot lasts."""
    BAD_RECORD = "BadRecord"
    """The record cannot be read."""
    SERVICES_STOPPED = "ServicesStopped"
    """All is put back but units of the host, which cannot be started from here."""
    SETTLING = "Settling"
    """Nobody is there any more, but not for long."""
    CLAIMED = "Claimed"
    """The run id is replaced."""
    HEALED = "Healed"
    """The record is undone."""
    SWEPT = "Swept"
    """What was left of an upgrade on a node that no driver DaemonSet matches is taken off."""


REPORTED: Final = frozenset({Why.RUN_BY_HAND, Why.BAD_RECORD, Why.SERVICES_STOPPED})
"""Only a person can help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patient:
    """A node with all that a decision needs. Times are seconds by the controller's own clock."""

    node: NodeView
    pods: frozenset[str] = frozenset()
    """Uids of the pods on it that have not ended for good."""
    drivers: tuple[str, ...] = ()
    """Driver pods on it, or meant for it."""
    sets: tuple[FleetSet, ...] = ()
    """Driver DaemonSets whose selector matches it."""
    alone_for: float | None = None
    """How long nobody has been there; None where that has not been looked for yet."""
    claim: str = ""
    """The run id that this controller has put into the record."""
    claimed_for: float = 0.0
    is_state_ours: bool = True
    """Whether the upgrade's state label is ours to write."""


@dataclass(frozen=True, slots=True)
class Treatment:
    """What to do now."""

    why: Why
    sentence: str = ""
    change: NodeChange | None = None
    left_alone: tuple[str, ...] = ()
    again_in: float = 0.0
    """Seconds after which time alone changes the answer; 0 is never."""

    @property
    def is_for_a_person(self) -> bool:
        """Whether only a person can help."""
        return self.why in REPORTED


def driver_sets(node: NodeView, sets: Iterable[FleetSet]) -> tuple[FleetSet, ...]:
    """The driver DaemonSets whose selector matches a node."""
    return tuple(each for each in sets if not each.is_deleting and is_driver(each.pod_labels) and each.fits(node.labels))


def driver_pods(pods: Iterable[PodView]) -> tuple[str, ...]:
    """The driver pods among the pods of a node, in whatever namespace."""
    return tuple(pod.ref for pod in pods if is_driver(pod.labels) and not pod.is_over)


def living(pods: Iterable[PodView]) -> frozenset[str]:
    """Uids of the pods that may have processes."""
    return frozenset(pod.uid for pod in pods if not pod.is_over)


def holds(patient: Patient) -> Treatment | None:
    """Why a node is left alone, whatever the time; None where nobody works on it, or is going to."""
    node = patient.node
    found = find_record(node)
    if patient.drivers:
        return Treatment(Why.DRIVER_HERE, f"the driver pod {patient.drivers[0]} is there, and takes over what is left")
    if found.is_unreadable:
        return Treatment(Why.BAD_RECORD, f"{found.complaint}; put the node back by hand, then take the annotation off")
    if found.record is not None:
        return _holds_record(patient, found.record)
    if patient.sets:
        return Treatment(Why.DRIVER_DUE, f"a driver pod of {patient.sets[0].ref} is due there")
    return Treatment(Why.CLEAN) if is_nothing(remains_of(node, is_state_ours=patient.is_state_ours).change) else None


def _holds_record(patient: Patient, record: Record) -> Treatment | None:
    node, is_same_boot = patient.node, not is_of_another_boot(record, patient.node)
    if record.pod.pod_uid and record.pod.pod_uid in patient.pods:
        where = f"{record.pod.namespace}/{record.pod.pod_name}"
        return Treatment(Why.AUTHOR_LIVES, f"the pod {where} of run {record.run} is there")
    due = next((each.ref for each in patient.sets if not _kept_off(each, node.taints)), "")
    if due:
        return Treatment(Why.DRIVER_DUE, f"a driver pod of {due} is due there, and takes over what run {record.run} left")
    if is_same_boot and not record.pod.pod_uid:
        sentence = f"run {record.run} was no pod's, and whether it lives can only be seen on the node: run `driver-manager restore` there"
        return Treatment(Why.RUN_BY_HAND, f"{sentence}; after a reboot the node is healed from here")
    if is_same_boot and not node.is_ready:
        return Treatment(Why.NODE_NOT_READY, f"the node is not Ready, so nobody can tell whether run {record.run} lives")
    if is_same_boot and record.services and is_nothing(_api_half(record, node).change):
        units = ", ".join(record.services)
        return Treatment(Why.SERVICES_STOPPED, f"run {record.run} stopped {units}: run `driver-manager restore` on the node, or reboot it")
    return None


def _kept_off(daemon_set: FleetSet, taints: Iterable[Taint]) -> bool:
    """Whether a taint keeps the pods of a DaemonSet off: ours may do that, and then nobody but us takes it away."""
    hard = [taint for taint in taints if taint.effect in ("NoSchedule", "NoExecute") and taint.key not in FORGIVEN_TAINTS]
    return any(not any(each.tolerates(taint) for each in daemon_set.tolerations) for taint in hard)


def treat(patient: Patient, settle_time: float, pause: float, new_run: str) -> Treatment:
    """What to do about a node now.

    Args:
        patient: the node and who is there.
        settle_time: seconds for which nobody has to have been there.
        pause: seconds between the new run id and the undo.
        new_run: a run id for the record, if it comes to that.
    """
    if (held := holds(patient)) is not None:
        return held
    alone_for = patient.alone_for or 0.0
    record = find_record(patient.node).record
    if alone_for < settle_time:
        what = f"what run {record.run} left is undone" if record else "what is left of an upgrade is taken off"
        sentence = f"nobody works on it any more: {what} if that stays so for {settle_time:.0f} s"
        return Treatment(Why.SETTLING, sentence, again_in=settle_time - alone_for)
    if record is None:
        undo = remains_of(patient.node, is_state_ours=patient.is_state_ours)
        return Treatment(Why.SWEPT, "no driver is wanted there: what was left of ours is taken off", undo.change, undo.left_alone)
    author = f"the pod {record.pod.namespace}/{record.pod.pod_name} of run {record.run}" if record.pod.pod_uid else f"run {record.run}"
    if record.run != patient.claim:
        change = NodeChange(annotations={RECORD: encode(replace(record, run=new_run))})
        return Treatment(Why.CLAIMED, f"{author} is gone for good: its record is taken over, and undone in {pause:.0f} s", change)
    if patient.claimed_for < pause:
        return Treatment(Why.SETTLING, f"{author} is gone for good: what it left is undone", again_in=pause - patient.claimed_for)
    undo = put_back(record, patient.node)
    return Treatment(Why.HEALED, f"{author} left the node half-way: it is as it was before", undo.change, undo.left_alone)


def put_back(record: Record, node: NodeView) -> Undo:
    """The undo of a record from afar. Units of the host that the run stopped stay on the record as long as the boot lasts.

    Who was kept off is let in by whoever leads: it evicts every gated pod whose node is not parked for it (decision 44).
    """
    undo = _api_half(record, node)
    if not record.services or is_of_another_boot(record, node):
        return Undo(replace(undo.change, annotations={**undo.change.annotations, RECORD: None, **_no_status(node)}), undo.left_alone)
    rest = replace(record, labels={}, is_cordoned=False, taint=None, parked=(), let_in=())
    units = f"the units {', '.join(record.services)} are stopped: run `driver-manager restore` on the node, or reboot it"
    annotations = {**undo.change.annotations, RECORD: encode(rest), **_no_status(node)}
    return Undo(replace(undo.change, annotations=annotations), (*undo.left_alone, units))


def _api_half(record: Record, node: NodeView) -> Undo:
    undo = undo_record(record, node)
    annotations = {key: value for key, value in undo.change.annotations.items() if key != RECORD}
    return Undo(replace(undo.change, annotations=annotations), undo.left_alone)


def _no_status(node: NodeView) -> dict[str, None]:
    """What the dead run told people is not so any more."""
    return {STATUS: None} if STATUS in node.annotations else {}
