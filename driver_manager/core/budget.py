"""Who may start: sums over a fleet that are kept as nodes change, and the turns that follow from them (R7).

Two limits of a group's policy, and one of the whole cluster. maxParallelUpgrades counts nodes in work; a failed node has left that count.
maxUnavailable counts nodes that are cordoned or NotReady, ours and others' alike, and is asked at every start; a share is rounded up.
A node that others have cordoned already adds nothing to it. What was granted counts from the grant on, not from the cordon.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import nsmallest
from typing import Final

from driver_manager.core.rollout_record import Progress
from driver_manager.core.rollout_states import WORKING, Because, State
from driver_manager.core.situation import Turn
from driver_manager.core.snapshot import NodeView
from driver_manager.core.upgrade_policy import UpgradePolicy
from driver_manager.names import REQUESTOR_MODE

MAX_NAMED: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """What one node adds to the sums."""

    group: str
    state: State | None
    is_working: bool = False
    """Whether it holds one of maxParallelUpgrades."""
    is_ours: bool = False
    """Whether it is unavailable because of us, or about to be."""
    is_foreign: bool = False
    """Whether it is unavailable without us."""
    is_ready: bool = True
    gang: str = ""
    """Value of the grouping label: no two nodes of one gang are in work at once."""
    rank: tuple[float, str] = (0.0, "")
    """Its place in the queue."""
    target: str = ""
    """The template that it waits for, failed with, or came to."""
    failed_at: float = 0.0
    done_at: float = 0.0
    since: float = 0.0
    """When it came to its state, in Unix seconds; 0 where nobody wrote that down."""


def count(
    node: NodeView,
    state: State | None,
    progress: Progress | None,
    group: str,
    *,
    wanted: str = "",
    is_granted: bool = False,
    gang_label: str = "",
    order_label: str = "",
) -> Count:
    """What a node adds.

    Args:
        node: as the cache has it.
        state: of its label; None for a value that is no state.
        progress: its record.
        group: its policy group.
        wanted: hash of the newest template of its driver DaemonSet: what it waits for, whatever was newest when it began to wait.
        is_granted: whether it was granted a start that does not show on it yet.
        gang_label: key of the grouping label; empty for none.
        order_label: key of a label or annotation with a number; smaller ones come first, nodes without one last.
    """
    is_working = state in WORKING or is_granted
    has_own_cordon = bool(progress and progress.is_cordoned and node.unschedulable)
    is_closed_by_others = node.unschedulable and not has_own_cordon and REQUESTOR_MODE not in node.annotations
    failure = progress.last_failure if progress and state is State.FAILED else None
    is_driverless = failure is not None and failure.is_driver_gone
    is_ours = has_own_cordon or ((is_working or is_driverless) and not is_closed_by_others)
    return Count(
        group=group,
        state=state,
        is_working=is_working,
        is_ours=is_ours,
        is_foreign=not is_ours and (node.unschedulable or not node.is_ready),
        is_ready=node.is_ready,
        gang=node.labels.get(gang_label, "") if gang_label else "",
        rank=(_order(node, order_label), node.name),
        target=wanted if wanted and state is State.REQUIRED else progress.target if progress else "",
        failed_at=failure.at if failure else 0.0,
        done_at=progress.done if progress and state is State.DONE else 0.0,
        since=progress.since if progress else 0.0,
    )


def _order(node: NodeView, key: str) -> float:
    if not key:
        return 0.0
    try:
        place = float(node.labels.get(key) or node.annotations.get(key) or "inf")
    except ValueError:
        return math.inf
    return place if math.isfinite(place) else math.inf


@dataclass(slots=True)
class Sums:
    """The nodes of one group, by what they add."""

    total: int = 0
    working: set[str] = field(default_factory=set)
    ours: set[str] = field(default_factory=set)
    foreign: set[str] = field(default_factory=set)
    failed: dict[str, Count] = field(default_factory=dict)
    states: dict[State | None, int] = field(default_factory=dict)
    pending: list[tuple[float, str]] = field(default_factory=list)
    """Ranks of those that wait for their turn, in order."""
    pending_unavailable: list[tuple[float, str]] = field(default_factory=list)
    """Of those of them that are unavailable already."""
    done: dict[str, list[tuple[float, str]]] = field(default_factory=dict)
    """Target -> when which nodes came to it, in order."""


class Tally:
    """The sums over all nodes, kept as nodes change; `Tally.of` counts anew, and a test holds the one to the other."""

    def __init__(self) -> None:
        self._counts: dict[str, Count] = {}
        self._groups: dict[str, Sums] = {}
        self._gangs: dict[str, set[str]] = {}

    @classmethod
    def of(cls, counts: Mapping[str, Count]) -> "Tally":
        """Sums over all."""
        tally = cls()
        for name, each in counts.items():
            tally.put(name, each)
        return tally

    def get(self, name: str) -> Count | None:
        """What a node adds now."""
        return self._counts.get(name)

    def all(self) -> Mapping[str, Count]:
        """Node -> what it adds."""
        return self._counts

    def groups(self) -> Mapping[str, Sums]:
        """Group -> its sums."""
        return self._groups

    def in_states(self, states: Collection[State]) -> int:
        """How many nodes of all groups are in one of these states."""
        return sum(sums.states.get(state, 0) for sums in self._groups.values() for state in states)

    def put(self, name: str, new: Count | None) -> None:
        """A node adds something else now; None: it is gone."""
        old = self._counts.get(name)
        if old == new:
            return
        if old is not None:
            self._take(name, old)
            del self._counts[name]
        if new is not None:
            self._add(name, new)
            self._counts[name] = new

    def _add(self, name: str, new: Count) -> None:
        sums = self._groups.setdefault(new.group, Sums())
        sums.total += 1
        sums.states[new.state] = sums.states.get(new.state, 0) + 1
        for names, belongs in ((sums.working, new.is_working), (sums.ours, new.is_ours), (sums.foreign, new.is_foreign)):
            if belongs:
                names.add(name)
        for ranks in _queues(sums, new):
            insort(ranks, new.rank)
        if new.state is State.FAILED:
            sums.failed[name] = new
        if new.done_at:
            insort(sums.done.setdefault(new.target, []), (new.done_at, name))
        if new.gang and (new.is_working or new.is_ours):
            self._gangs.setdefault(new.gang, set()).add(name)

    def _take(self, name: str, old: Count) -> None:
        sums = self._groups[old.group]
        sums.total -= 1
        sums.states[old.state] -= 1
        if not sums.states[old.state]:
            del sums.states[old.state]
        for names in (sums.working, sums.ours, sums.foreign):
            names.discard(name)
        for ranks in _queues(sums, old):
            del ranks[bisect_left(ranks, old.rank)]
        sums.failed.pop(name, None)
        if old.done_at:
            came = sums.done[old.target]
            del came[bisect_left(came, (old.done_at, name))]
            if not came:
                del sums.done[old.target]
        if old.gang in self._gangs:
            self._gangs[old.gang].discard(name)
            if not self._gangs[old.gang]:
                del self._gangs[old.gang]
        if not sums.total:
            del self._groups[old.group]

    def pending(self, group: str) -> Iterator[str]:
        """Names of the group's nodes that wait for their turn, in order."""
        return (name for _, name in list(self._groups[group].pending)) if group in self._groups else iter(())

    def pending_unavailable(self, group: str) -> Iterator[str]:
        """Those of them that are unavailable already, in order."""
        return (name for _, name in list(self._groups[group].pending_unavailable)) if group in self._groups else iter(())

    def failures_in_a_row(self, group: str, target: str) -> list[str]:
        """Which nodes failed for a target since one came to it."""
        sums = self._groups.get(group, Sums())
        since = sums.done[target][-1][0] if target in sums.done else 0.0
        return [name for name, each in sums.failed.items() if each.target == target and each.failed_at > since]

    def turn(self, name: str, policy: UpgradePolicy, cap: int | str | None = None, most_failures: int = 0) -> Turn:
        """Whether a node may start now.

        Args:
            name: a node that waits.
            policy: of its group.
            cap: nodes of the whole cluster that may be unavailable, a number or a share; None for no such limit.
            most_failures: so many nodes in a row may fail for one target; 0 is no limit.
        """
        mine = self._counts[name]
        sums = self._groups[mine.group]
        if not mine.is_ready:
            return Turn(because=Because.NODE_NOT_READY, sentence="the node is not Ready: it is begun when it is")
        if most_failures and len(failed := self.failures_in_a_row(mine.group, mine.target)) >= most_failures:
            sentence = f"{len(failed)} nodes in a row have failed with this driver ({_named(failed)}): no other is begun with it"
            ends = "until enough of them are mended or accepted, or another driver is wanted"
            return Turn(because=Because.PAUSED, sentence=f"{sentence} {ends}")
        if busy := self._busy(name, mine):
            return Turn(because=Because.GANG_BUSY, sentence=f"nodes of its gang {mine.gang} are in work, or closed: {_named(busy)}")
        if policy.max_parallel_upgrades and len(sums.working) >= policy.max_parallel_upgrades:
            sentence = f"maxParallelUpgrades is {policy.max_parallel_upgrades}, and in work are {_named(sums.working)}"
            return Turn(sentence=sentence)
        if mine.is_foreign or mine.is_ours:  # it is unavailable already
            return Turn(is_granted=True)
        limits = [([sums], sums.total, policy, "maxUnavailable")]
        if cap is not None:
            limits.append((list(self._groups.values()), len(self._counts), UpgradePolicy(max_unavailable=cap), "the cluster's limit"))
        for among, total, limiting, what in limits:
            limit = limiting.most_unavailable(total)
            if sum(len(each.ours) + len(each.foreign) for each in among) >= limit:
                return Turn(sentence=_full(f"{what} is {limit} of {total} nodes", among))
        return Turn(is_granted=True)

    def _busy(self, name: str, mine: Count) -> list[str]:
        """Nodes that keep this one of their gang waiting. Those that wait themselves do not, if this one is closed already."""
        others = self._gangs.get(mine.gang, set()) - {name} if mine.gang else set()
        return [other for other in others if self._counts[other].is_working or not mine.is_ours]


def _queues(sums: Sums, each: Count) -> tuple[list[tuple[float, str]], ...]:
    """The queues that a node stands in."""
    if each.state is not State.REQUIRED or each.is_working:
        return ()
    return (sums.pending, sums.pending_unavailable) if each.is_ours or each.is_foreign else (sums.pending,)


def _full(limit: str, among: Collection[Sums]) -> str:
    """Why no more node may become unavailable, by name."""
    ours = [name for each in among for name in each.ours]
    foreign = [name for each in among for name in each.foreign]
    parts = [f"{_named(names)} {why}" for names, why in ((ours, "through upgrades"), (foreign, "for other reasons")) if names]
    return f"{limit}, and unavailable are {' and '.join(parts) or 'none'}"


def _named(names: Collection[str]) -> str:
    """The first names, and how many more."""
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(nsmallest(MAX_NAMED, names)) + more
