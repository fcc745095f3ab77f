"""What a decision about a node needs, gathered from the cache: for the controller, and for whoever wants to see what it sees."""

from driver_manager.controller.cache import Cache
from driver_manager.core.policy_groups import Groups
from driver_manager.core.rollout_record import progress_of
from driver_manager.core.rollout_states import state_of
from driver_manager.core.situation import RolloutSettings, Situation, Turn
from driver_manager.core.snapshot import NodeView
from driver_manager.names import UPGRADE_STATE


def situation_of(node: NodeView, cache: Cache, groups: Groups, settings: RolloutSettings, now: float, turn: Turn) -> Situation:
    """One node as the cache shows it; what is only in a worker's memory is left open."""
    progress, bad = progress_of(node)
    daemon_set = cache.driver_set_for(node)
    group = groups.of(node.labels)
    wanted = cache.wanted(daemon_set, node.name)
    return Situation(
        node=node,
        state=state_of(node.labels.get(UPGRADE_STATE)),
        now=now,
        group=group.name,
        policy=group.policy,
        bad_policy=group.why_not if group.is_broken else "",
        progress=progress,
        bad_progress=bad,
        daemon_set=daemon_set,
        rivals=cache.rival_sets(node),
        wanted=wanted.hash if wanted else "",
        wanted_digest=wanted.digest if wanted else "",
        drivers=cache.drivers_on(node.name),
        validators=cache.validators_on(node.name),
        needs_validator=cache.needs_validator(node),
        published=cache.published_on(node.name),
        turn=turn,
        settings=settings,
    )
