"""The fleet as anybody with the right to read can see it: `status --all`. It changes nothing, and needs no controller to be there.

The reason why a node waits is decided anew, by the controller's own function, from the same objects. What only the controller's memory has
(which pods hold up a node now) is looked up for the first few nodes.
"""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Final

from driver_manager.config import Settings
from driver_manager.controller.cache import Cache
from driver_manager.controller.election import is_paused, read_grants, read_waiting
from driver_manager.controller.sight import situation_of
from driver_manager.controller.work import Handlers, what_to_free
from driver_manager.core.agentreport import with_report
from driver_manager.core.budget import Tally, count
from driver_manager.core.fleet import FleetEvent, FleetSet, Kind, NotServed
from driver_manager.core.following import follow
from driver_manager.core.optin import asker
from driver_manager.core.parking import Means, means_for
from driver_manager.core.policy_groups import FILE_GROUP, Group, Groups, policy_groups
from driver_manager.core.record import find_record
from driver_manager.core.role import Role, leads_alone
from driver_manager.core.rollout import decide
from driver_manager.core.rollout_record import Failure, progress_of
from driver_manager.core.rollout_states import Because, State
from driver_manager.core.situation import Freeing, RolloutSettings, Situation, Turn, Work
from driver_manager.core.snapshot import NodeView
from driver_manager.core.upgrade_policy import UpgradePolicy, read_policy
from driver_manager.errors import ClusterError
from driver_manager.names import PAUSED_ROLLOUT, ROLE, UPGRADE_STATE
from driver_manager.ports import Fleet
from driver_manager.together import each_of

MAX_LOOKS: Final = 10
"""Nodes whose pods are listed, to name those that hold it up."""
SEEN: Final = tuple(kind for kind in Kind if kind not in (Kind.BUDGETS, Kind.MAINTENANCES))
"""What anybody can be expected to have the right to list, and what there is without settings."""
NO_SLOT: Final = "waits for its turn"
NO_POLICY: Final = "there is no ClusterPolicy and no NVIDIADriver; a policy file of the controller's is seen with --policy-file FILE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One node."""

    node: str
    state: str
    """The label's value, whatever it is."""
    reason: str
    since: float
    """Unix seconds; 0 where it is not known."""
    group: str
    target: str
    cordoned_by: str
    """Empty where it is not cordoned."""
    attempt: int
    last_failure: Failure | None
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    """One policy group."""

    name: str
    policy: UpgradePolicy | None
    why_not: str
    nodes: int
    limit: int
    """Of unavailable nodes."""
    working: tuple[str, ...]
    unavailable_ours: tuple[str, ...]
    unavailable_others: tuple[str, ...]
    waiting: str
    """Why no more of its nodes are begun now, as the controller says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leader:
    """What the Lease says."""

    holder: str = ""
    renewed: str = ""
    duration: int = 0
    transitions: int = 0
    grants: tuple[str, ...] = ()
    paused: str = ""
    """What the annotation says, where that pauses."""
    no_pause: str | None = None
    """What it says, where that does not; None where it is not there."""
    role: str = ""
    """`lead: ...` or `follow: ...`, as the controller says; empty where it does not."""
    problem: str = ""
    """Why it is not known."""

    def silent_seconds(self, now: float) -> float:
        """For how long the holder has not renewed the Lease, if that is too long for one that lives; else 0.

        Two clocks are compared here, the leader's and the reader's, so twice the time of the Lease is let pass.
        """
        try:
            age = now - datetime.fromisoformat(self.renewed).timestamp()
        except ValueError:
            return 0.0
        return age if age > 2 * self.duration else 0.0

    def leads(self, now: float) -> bool:
        """Whether somebody leads, as far as the Lease tells."""
        return bool(self.holder) and not self.silent_seconds(now)

    @property
    def is_following(self) -> bool:
        """Whether gpu-operator leads the upgrades."""
        return self.role.startswith(f"{Role.FOLLOW}:")

    waiting: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Overview:
    """All of it."""

    leader: Leader
    groups: tuple[GroupRow, ...]
    rows: tuple[Row, ...]
    problems: Mapping[str, str]
    """Resource -> what is wrong with its policy."""
    notes: Mapping[str, str]
    """Resource -> what else a person should know of its policy."""
    now: float
    """When that was, in Unix seconds."""


async def read_all(fleet: Fleet) -> Cache:
    """Lists everything once.

    Raises:
        Forbidden: something may not be listed.
    """
    cache = Cache()
    for kind in SEEN:
        events = fleet.follow(kind)
        cache.apply(await _first(events) if isinstance(events, AsyncGenerator) else await anext(aiter(events)))
    return cache


async def keep_up(fleet: Fleet, cache: Cache) -> None:
    """The same, and keeps it up to date without end; what is not followed counts as not served.

    Raises:
        Forbidden: something may not be followed.
    """
    for kind in Kind:
        if kind not in SEEN:
            cache.apply(NotServed(kind))
    await each_of(_follow(fleet, cache, kind) for kind in SEEN)


async def _follow(fleet: Fleet, cache: Cache, kind: Kind) -> None:
    async for event in fleet.follow(kind):
        cache.apply(event)


async def _first(events: AsyncGenerator[FleetEvent, None]) -> FleetEvent:
    try:
        return await anext(events)
    finally:
        await events.aclose()  # before the watch begins


async def read_leader(fleet: Fleet, namespace: str, name: str) -> Leader:
    """Reads the Lease."""
    try:
        lease = await fleet.lease(namespace, name)
    except ClusterError as error:
        return Leader(problem=f"the Lease {namespace}/{name} cannot be read: {error.message}")
    if not lease.resource_version:
        return Leader(
            problem=f"there is no Lease {namespace}/{name}: no controller has ever led from there (--lease-namespace, --lease-name)"
        )
    written = lease.annotations.get(PAUSED_ROLLOUT)
    return Leader(
        holder=lease.holder,
        renewed=lease.renewed,
        duration=lease.duration_seconds,
        transitions=lease.transitions,
        grants=tuple(sorted(read_grants(lease))),
        paused=written or "" if is_paused(lease) else "",
        no_pause=None if is_paused(lease) else written,
        role=lease.annotations.get(ROLE, ""),
        waiting=read_waiting(lease),
    )


async def overview(fleet: Fleet, cache: Cache, leader: Leader, now: float, settings: Settings, policy: UpgradePolicy | None) -> Overview:
    """Says what there is; lists the pods of the first few nodes that pods hold up."""
    groups = _groups(cache, policy)
    tally, rows = Tally(), []
    looks, named_sets = 0, await _named_sets(fleet, groups)
    because = Because.PAUSED if leader.paused else Because.NO_SLOT
    for node in sorted(cache.nodes.values(), key=lambda each: each.name):
        turn = Turn(because=because, sentence=leader.waiting.get(groups.of(node.labels).name, NO_SLOT))
        seen = situation_of(node, cache, groups, RolloutSettings(), now, turn)
        if seen.daemon_set is None and seen.state is State.UNKNOWN:
            continue  # no driver of the operator's concerns it
        if looks < MAX_LOOKS and _is_worth_a_look(seen):
            looks += 1
            seen = await _with_pods(fleet, settings, seen, _means(cache, seen, named_sets), leader)
        if seen.state is State.MAINTENANCE:  # that it goes on is the operator's to say
            seen = replace(seen, has_maintenance=True, maintenance="pending")
        if seen.counts:
            tally.put(
                node.name, count(node, seen.state, seen.progress, seen.group, wanted=seen.wanted, is_granted=node.name in leader.grants)
            )
        rows.append(_row(seen, leader))
    return Overview(leader, tuple(_group_rows(groups, tally, leader)), tuple(rows), groups.problems, groups.notes, now)


def _groups(cache: Cache, policy: UpgradePolicy | None) -> Groups:
    """The policy groups; a controller's policy file is known from what it wrote on a node under it."""
    sources = cache.policies.values()
    records = [found for node in cache.nodes.values() if (found := progress_of(node)[0]) is not None and found.policy == FILE_GROUP]
    if policy is None and records:
        policy = read_policy(max(records, key=lambda each: each.since).rules)
    if policy is None and not sources:
        return Groups(everybody=Group("", None, NO_POLICY))
    return policy_groups(
        [each for each in sources if each.kind == "ClusterPolicy"], [each for each in sources if each.kind == "NVIDIADriver"], policy
    )


def _is_worth_a_look(seen: Situation) -> bool:
    """Whether its pods say more: also while a person has paused it all, who wants to see what is going to stand in the way."""
    if seen.state is State.REQUIRED:
        is_near = seen.turn.sentence == NO_SLOT or seen.turn.because is Because.PAUSED
        return seen.policy is not None and is_near
    return seen.state in (State.WAIT_FOR_JOBS, State.POD_DELETION, State.DRAIN)


async def _named_sets(fleet: Fleet, groups: Groups) -> Mapping[str, FleetSet]:
    """The DaemonSets that policies name to be parked, by uid; those that cannot be read are left out."""
    found: dict[str, FleetSet] = {}
    for ref in sorted(groups.parked):
        with suppress(ClusterError):
            async with aclosing(fleet.follow_set(ref)) as told:
                if (each := await anext(told)) is not None:
                    found[each.uid] = each
    return found


def _means(cache: Cache, seen: Situation, named_sets: Mapping[str, FleetSet]) -> Means:
    """What the controller has to keep DaemonSets off, if its admission policies work."""
    named = seen.in_force.pod_deletion.park
    asking = {**named_sets, **cache.parkable}.values()
    return means_for(
        seen.node,
        opted_in=[each for each in asking if asker(each, named)],
        named=named,
        operator_sets=cache.sets.values(),
        own_namespace="",
        why_not="",
        is_full=False,
    )


async def _with_pods(fleet: Fleet, settings: Settings, seen: Situation, means: Means, leader: Leader) -> Situation:
    """The same with what the node's pods say."""
    work = Work.FREE_UNKNOWN if leader.is_following else Work.DRAIN if seen.state is State.DRAIN else Work.FREE
    try:
        pods = (await fleet.pods_on(seen.node.name)).items
        handlers = Handlers(fleet, lambda: 0.0)
        todo = await what_to_free(fleet, handlers, settings, seen.node, pods, seen.in_force, work, means)
    except ClusterError:
        return seen
    match seen.state:
        case State.REQUIRED:
            if not todo.refusals or seen.in_force.drain.enable:
                return seen
            return replace(seen, turn=Turn(because=Because.BLOCKED_BY_POD, sentence="; ".join(todo.refusals)))
        case State.WAIT_FOR_JOBS:
            selector = seen.in_force.wait_for_completion.pod_selector
            return replace(seen, jobs=tuple(sorted(pod.ref for pod in pods if selector.matches(pod.labels) and not pod.is_over)))
        case _:
            return replace(seen, freeing=Freeing(blockers=(*todo.refusals, *sorted(f"pod {pod.ref}" for pod in todo.gone))))


def _row(seen: Situation, leader: Leader) -> Row:
    progress, rest = seen.progress, None
    decision = follow(seen) if leader.is_following and not leads_alone(seen) else decide(seen)
    sentence = ""
    if not decision.change:
        rest = with_report(seen, decision.rest)
        sentence = rest.sentence if rest is not None else ""
    elif decision.moves and seen.policy is not None:
        move = decision.moves[-1]
        who = "goes on" if leader.leads(seen.now) else "would go on, but nobody leads,"
        sentence = f"{who} to {move.after or 'no state'}: {move.sentence}"
    return Row(
        node=seen.node.name,
        state=seen.node.labels.get(UPGRADE_STATE, ""),
        reason=rest.because.value if rest is not None else (progress.reason if progress else ""),
        since=progress.since if progress else 0.0,
        group=seen.group,
        target=(progress.target if progress and seen.state is not State.DONE else "") or seen.wanted,
        cordoned_by=_cordoned_by(seen.node, is_ours=bool(progress and progress.is_cordoned)),
        attempt=progress.attempt if progress else 0,
        last_failure=progress.failures[-1] if progress and progress.failures else None,
        sentence=sentence,
    )


def _cordoned_by(node: NodeView, *, is_ours: bool) -> str:
    if not node.unschedulable:
        return ""
    record = find_record(node).record
    if is_ours:
        return "upgrade"
    return "agent" if record is not None and record.is_cordoned else "others"


def _group_rows(groups: Groups, tally: Tally, leader: Leader) -> list[GroupRow]:
    every = [groups.everybody] if groups.everybody is not None else list(groups.by_owner.values())
    known = {group.name: group for group in every}
    rows = []
    for name in sorted({*known, *tally.groups()}):
        group, sums = known.get(name), tally.groups().get(name)
        policy = group.policy if group else None
        rows.append(
            GroupRow(
                name=name,
                policy=policy,
                why_not=group.why_not if group else "no policy is theirs",
                nodes=sums.total if sums else 0,
                limit=policy.most_unavailable(sums.total) if policy and sums else 0,
                working=tuple(sorted(sums.working)) if sums else (),
                unavailable_ours=tuple(sorted(sums.ours)) if sums else (),
                unavailable_others=tuple(sorted(sums.foreign)) if sums else (),
                waiting=leader.waiting.get(name, ""),
            )
        )
    return rows
