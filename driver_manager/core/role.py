"""Whether this controller leads the upgrades, or follows a gpu-operator that lives: a plain function of what was seen of its Lease.

gpu-operator's own upgrade controller has no switch: with auto-upgrade on it drives the state label, with it off it takes the label off.
So beside one that lives ours never writes that label. Whether it lives is told by its Lease alone, and by one clock, ours: a Lease that has
not been seen to change for its duration is over. Fields' managers prove nothing, as a person's edit takes a field over.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from driver_manager.core.fleet import LeaseView
from driver_manager.core.rollout_states import State
from driver_manager.core.situation import Situation
from driver_manager.names import REQUESTOR_MODE

UNREAD_SECONDS: Final = 15.0
"""So long what was read last is believed. After that it is not known who leads, and ours does not."""


class Role(StrEnum):
    """What this controller does about state labels."""

    LEAD = "lead"
    """It writes them."""
    FOLLOW = "follow"
    """Others do; it frees what they do not know, and reports."""


class Choice(StrEnum):
    """What a person has set."""

    AUTO = "auto"
    """gpu-operator's Lease tells."""
    LEAD = "lead"
    FOLLOW = "follow"


@dataclass(frozen=True, slots=True)
class Standing:
    """The role, and why."""

    role: Role
    sentence: str

    @property
    def text(self) -> str:
        """For the annotation."""
        return f"{self.role}: {self.sentence}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """gpu-operator's Lease as this process has seen it. Times are of one clock that only goes up."""

    began: float
    """When it was first looked for."""
    lease: LeaseView | None = None
    since: float = 0.0
    """When this version of it was seen first."""
    read_at: float = 0.0
    """When it was read last."""
    problem: str = ""
    """Why it could not be read since."""

    def seen(self, lease: LeaseView, now: float) -> "Rival":
        """It was read; one that does not exist has no version."""
        is_same = self.lease is not None and self.lease.resource_version == lease.resource_version
        return Rival(began=self.began, lease=lease, since=self.since if is_same else now, read_at=now)

    def unread(self, problem: str) -> "Rival":
        """It could not be read."""
        return replace(self, problem=problem)

    @property
    def is_live(self) -> bool:
        """Whether somebody holds it, and it changed within its duration before the last look."""
        if self.lease is None or not self.lease.holder:
            return False
        return self.read_at - self.since < self.lease.lasts


def standing(choice: Choice, rival: Rival, now: float) -> Standing | None:
    """The role; None while it is not known yet."""
    if choice is not Choice.AUTO:
        words = "whether or not a gpu-operator lives" if choice is Choice.LEAD else "whoever leads"
        return Standing(Role(choice.value), f"ROLE={choice}, {words}")
    believed_from = rival.began if rival.lease is None else rival.read_at
    if rival.problem and now - believed_from >= UNREAD_SECONDS:
        return Standing(Role.FOLLOW, f"it is not known whether a gpu-operator lives: {rival.problem}")
    if rival.lease is None:
        return None
    what = f"the Lease {rival.lease.namespace}/{rival.lease.name}"
    if rival.is_live:
        return Standing(Role.FOLLOW, f"gpu-operator lives and leads: {what} is held by {rival.lease.holder}")
    if not rival.lease.resource_version:
        return Standing(Role.LEAD, f"no gpu-operator lives: there is no {what.removeprefix('the ')}")
    if not rival.lease.holder:
        return Standing(Role.LEAD, f"no gpu-operator lives: {what} was given up")
    return Standing(Role.LEAD, f"no gpu-operator lives: {what} of {rival.lease.holder} is not renewed")


def leads_alone(situation: Situation) -> bool:
    """Whether ours leads this one node though it follows, because gpu-operator never moves it.

    gpu-operator does not have the requestor mode of NVIDIA's upgrade library switched on: it passes over nodes in the states of a
    maintenance, and opens none that has the annotation of one (specification, weakness 41). A maintenance that ours has asked for is
    brought to its end, so that no NodeMaintenance stays and nobody is evicted twice; between those states gpu-operator restarts and
    validates the driver.

    To be filled by the hand-over: the orphan of a driver that goes back from an NVIDIADriver to a ClusterPolicy has no `app` label that
    gpu-operator selects. Nothing makes such orphans yet.
    """
    if situation.state in (State.MAINTENANCE, State.AFTER_MAINTENANCE):
        return True
    return situation.state is State.UNCORDON and REQUESTOR_MODE in situation.node.annotations
