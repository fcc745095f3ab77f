"""What is said on a ClusterPolicy or NVIDIADriver about its roll-out: conditions of our own types, as values."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from driver_manager.core.budget import Sums
from driver_manager.core.fleet import PolicySource
from driver_manager.core.policy_groups import Group, Groups
from driver_manager.core.role import Role, Standing
from driver_manager.core.rollout_states import IDLE, Because, State
from driver_manager.core.situation import Stay

ACCEPTED: Final = "DriverManagerPolicyAccepted"
"""Whether its upgrade policy can be used."""
ROLLED_OUT: Final = "DriverManagerRolledOut"
"""Whether all of its nodes have the wanted driver; else how many wait, and why."""
LEADS: Final = "DriverManagerLeads"
"""Whether this controller leads the upgrades, or follows gpu-operator."""
PACED: Final = "DriverManagerPaced"
"""Whether drivers are replaced only when this controller says so. Said from the first time on that they are not."""
NOT_IN_USE: Final = "NotInUse"
MAX_REASONS: Final = 8
NO_NEWS: Final = frozenset({Because.UP_TO_DATE, Because.NO_REVISION})
"""Reasons that are not counted: that all is well, and that this is known in a moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One condition."""

    type: str
    is_true: bool
    reason: str
    sentence: str


def wanted_conditions(
    source: PolicySource, groups: Groups, sums: Mapping[str, Sums], stays: Mapping[str, Counter[Because]], standing: Standing
) -> list[Condition]:
    """What a resource is to say.

    Args:
        source: the resource.
        groups: whose policies are whose.
        sums: policy group -> its nodes.
        stays: policy group -> why those of its nodes that have not the wanted driver are where they are.
        standing: of this controller.
    """
    name = f"{source.kind}/{source.name}"
    every = [groups.everybody] if groups.everybody is not None else list(groups.by_owner.values())
    group = next((each for each in every if each.name == name), None)
    leads = Condition(
        type=LEADS,
        is_true=standing.role is Role.LEAD,
        reason="Leads" if standing.role is Role.LEAD else "Follows",
        sentence=standing.sentence,
    )
    if group is None:  # nothing is begun there, and taken back where it was in use before
        unused = "the upgrade policy of nodes is another resource's, or a file's"
        there = [each for each in (ACCEPTED, ROLLED_OUT, PACED) if each in source.conditions]
        return [Condition(type=each, is_true=False, reason=NOT_IN_USE, sentence=unused) for each in there] + [leads]
    mine, reasons = sums.get(name, Sums()), stays.get(name, Counter())
    paced = [_paced(mine, reasons[Because.NOT_ON_DELETE], standing)] if reasons[Because.NOT_ON_DELETE] or PACED in source.conditions else []
    return [_accepted(name, groups), _rolled_out(group, mine, reasons), *paced, leads]


def _accepted(name: str, groups: Groups) -> Condition:
    if problem := groups.problems.get(name):
        return Condition(type=ACCEPTED, is_true=False, reason="Invalid", sentence=problem)
    if note := groups.notes.get(name):
        return Condition(type=ACCEPTED, is_true=True, reason="FieldsDropped", sentence=note)
    return Condition(type=ACCEPTED, is_true=True, reason="Accepted", sentence="the upgrade policy is used as it is")


def _paced(sums: Sums, nodes: int, standing: Standing) -> Condition:
    if standing.role is not Role.LEAD:
        return Condition(type=PACED, is_true=False, reason=NOT_IN_USE, sentence="gpu-operator says when a driver is replaced")
    if not nodes:
        return Condition(type=PACED, is_true=True, reason="OnDelete", sentence="all driver DaemonSets have the update strategy OnDelete")
    sentence = f"the driver DaemonSets of {nodes} of {sums.total} nodes have another update strategy than OnDelete: Kubernetes itself"
    sentence += " replaces their drivers, past every budget, and no node is begun; set updateStrategy.type to OnDelete"
    return Condition(type=PACED, is_true=False, reason=Because.NOT_ON_DELETE.value, sentence=sentence)


def _rolled_out(group: Group, sums: Sums, stays: Counter[Because]) -> Condition:
    done, failed = sums.states.get(State.DONE, 0), sums.states.get(State.FAILED, 0)
    working = sum(number for state, number in sums.states.items() if state is not None and state not in IDLE | {State.FAILED})
    waiting = sums.total - done - failed - working
    parts = [f"{done} of {sums.total} nodes are done"]
    parts += [f"{number} {what}" for number, what in ((working, "in work"), (waiting, "waiting"), (failed, "failed")) if number]
    shown = sorted(stays.items(), key=lambda each: (-each[1], each[0]))[:MAX_REASONS]
    why = f" ({', '.join(f'{reason} {number}' for reason, number in shown)})" if shown else ""
    off = f"; no node is begun: {group.why_not}" if group.policy is None else ""
    if done == sums.total:
        reason = "Complete"
    elif group.policy is None:
        reason = "PolicyOff"
    elif failed:
        reason = "NodesFailed"
    elif working or not waiting or stays[Because.NO_SLOT]:
        reason = "InProgress"
    else:
        reason = "NodesWait"
    return Condition(type=ROLLED_OUT, is_true=done == sums.total, reason=reason, sentence=", ".join(parts) + why + off)


def reasons_by_group(stays: Mapping[str, Stay], groups: Mapping[str, str]) -> dict[str, Counter[Because]]:
    """Policy group -> why its nodes that are not up to date are where they are.

    Args:
        stays: node -> why it stays.
        groups: node -> its policy group.
    """
    found: dict[str, Counter[Because]] = {}
    for node, stay in stays.items():
        if stay.because not in NO_NEWS:
            found.setdefault(groups.get(node, ""), Counter())[stay.because] += 1
    return found
