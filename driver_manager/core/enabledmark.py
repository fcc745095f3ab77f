"""The mark on a node that says whose its GPU pods are: `nvidia.com/gpu-driver-upgrade-enabled`, where no gpu-operator lives to write it.

It tells the agent that an upgrade controller cordons this node and evicts its GPU pods. It goes into patches that are made anyhow; a node
at rest gets one of its own only where the mark is wrong.
"""

from dataclasses import replace
from typing import Final

from driver_manager.core.rollout_states import WORKING, State
from driver_manager.core.situation import Decision, NodeChange, Situation
from driver_manager.names import UPGRADE_ENABLED

AT_REST: Final = frozenset({State.UNKNOWN, State.DONE, State.FAILED})
"""States in which nothing depends on which write comes next; a node that waits for its turn gets the mark with its start."""


def with_mark(situation: Situation, decision: Decision) -> Decision:
    """A leader's decision, with the mark in it where it is wrong."""
    state = decision.moves[-1].after if decision.moves else situation.state
    if state is None or situation.bad_progress or (situation.policy is None and (situation.bad_policy or state in WORKING)):
        return decision
    if not decision.change and (state not in AT_REST or (state is State.UNKNOWN and situation.policy is not None)):
        return decision
    wanted = "true" if situation.policy is not None else None
    mark = NodeChange(annotations={UPGRADE_ENABLED: wanted}).needed_on(situation.node)
    if not mark:
        return decision
    return replace(decision, change=decision.change.and_then(mark), rest=decision.rest if decision.change else None)
