"""What a look in mid-run found: who uses the driver on a node that is paused already."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from driver_manager.config import Settings
from driver_manager.core.consumers import Action, Reason, Verdict, verdicts
from driver_manager.core.keepoff import KeepOff
from driver_manager.core.labels import LabelsToPause
from driver_manager.core.parking import Means
from driver_manager.core.record import Record
from driver_manager.core.seen import Snapshot, other_drivers, pod_policy
from driver_manager.core.snapshot import PodView
from driver_manager.core.uses import Evidence


@dataclass(frozen=True, slots=True)
class Round:
    """Who has to be freed, or waited for, before the run goes on."""

    evict: tuple[PodView, ...] = ()
    ending: tuple[PodView, ...] = ()
    """Told to end by somebody; waited for as if this run had evicted them."""
    leaving: tuple[PodView, ...] = ()
    left_to_owner: tuple[PodView, ...] = ()
    other_drivers: tuple[PodView, ...] = ()
    refused: tuple[Verdict, ...] = ()

    @property
    def is_clear(self) -> bool:
        """Whether nobody uses the driver."""
        return not (self.needs_action or self.ending or self.leaving)

    @property
    def needs_action(self) -> bool:
        """Whether somebody uses it who does not go by himself."""
        return bool(self.evict or self.left_to_owner or self.other_drivers or self.refused)

    @property
    def pods(self) -> tuple[PodView, ...]:
        """All of them."""
        refused = tuple(each.pod for each in self.refused)
        return (*self.evict, *self.ending, *self.leaving, *self.left_to_owner, *self.other_drivers, *refused)


def pods_to(action: Action, decided: Iterable[Verdict]) -> tuple[PodView, ...]:
    """The pods with one kind of verdict; of AWAIT those that leave because of their label."""
    return tuple(each.pod for each in decided if each.action is action and each.reason is not Reason.TERMINATING)


def pods_to_evict(decided: Iterable[Verdict]) -> tuple[PodView, ...]:
    """The pods that are evicted, those whose DaemonSet is parked among them."""
    return tuple(each.pod for each in decided if each.action in (Action.EVICT, Action.PARK))


def pods_ending(decided: Iterable[Verdict]) -> tuple[PodView, ...]:
    """The pods that somebody has told to end."""
    return tuple(each.pod for each in decided if each.reason is Reason.TERMINATING)


def plan_round(seen: Snapshot, settings: Settings, record: Record, labels: LabelsToPause | None = None) -> Round:
    """Who uses the driver now.

    Args:
        seen: a fresh look.
        settings: of the run.
        record: what is on the node.
        labels: those of the record by their turn; all together by default.
    """
    return _round(decided_again(seen, settings, record, labels), other_drivers(seen))


def decided_again(seen: Snapshot, settings: Settings, record: Record, labels: LabelsToPause | None = None) -> tuple[Verdict, ...]:
    """The verdicts of a fresh look."""
    seen = replace(seen, means=Means(parkable=frozenset(record.parked)))
    policy = pod_policy(seen, settings, labels or LabelsToPause(first=record.labels), KeepOff(record.taint, ""))
    return verdicts(seen.pods, policy)


def plan_claim_round(seen: Snapshot, settings: Settings, record: Record, labels: LabelsToPause) -> Round:
    """Who still holds a device through the DRA plugin, which therefore has to stay (specification 8)."""
    decided = decided_again(seen, settings, record, labels)
    holders = [each for each in decided if not each.is_last and any(use.evidence is Evidence.CLAIM for use in each.uses)]
    return _round(holders, ())


def _round(decided: Iterable[Verdict], others: tuple[PodView, ...]) -> Round:
    decided = tuple(decided)
    return Round(
        evict=pods_to_evict(decided),
        ending=pods_ending(decided),
        leaving=pods_to(Action.AWAIT, decided),
        left_to_owner=pods_to(Action.LEAVE, decided),
        other_drivers=others,
        refused=tuple(each for each in decided if each.action is Action.REFUSE),
    )
