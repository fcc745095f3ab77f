"""What Prometheus reads: values taken from the replica's memory at the moment of the scrape, so that none of them is ever an old one.

The one place where prometheus-client is met. Values about the fleet are there only while this replica leads and knows the fleet: on every
other replica they are missing, rather than wrong. Counters are the replica's own and begin at 0 with each life, as counters do.

The names that begin with `gpu_operator_` are those of NVIDIA's operator, with its meaning, for dashboards and alerts that exist.
"""

import math
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from typing import Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from driver_manager.controller.parking import Parking
from driver_manager.controller.run import Replica
from driver_manager.controller.telling import BUCKETS, Telling
from driver_manager.core.budget import Sums
from driver_manager.core.healing import REPORTED, Why
from driver_manager.core.policy_groups import Groups
from driver_manager.core.role import Role
from driver_manager.core.rollout_states import IDLE, State
from driver_manager.core.upgrade_policy import UpgradePolicy

OURS: Final = "driver_manager_controller_"
NVIDIAS: Final = "gpu_operator_"
CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
NO_STATE: Final = "none"
"""Name of the state without a label."""
NOT_A_STATE: Final = "invalid"
"""Name of a label's value that is no state."""
HEALING: Final = (Why.CLAIMED, Why.HEALED, Why.SWEPT, *sorted(REPORTED))
"""What is counted of healing."""
OK: Final = 1
NO_POLICY: Final = -1
"""Values of reconciliation_status, as NVIDIA's."""


def exposition(replica: Replica) -> bytes:
    """Everything, in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ReplicaCollector(replica))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


class ReplicaCollector:
    """The metrics of one replica."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    def collect(self) -> Iterator[Metric]:
        """All metrics, as of now."""
        replica = self._replica
        is_leading = replica.election.still_leading()
        yield GaugeMetricFamily(f"{OURS}leading", "1 while this replica leads.", is_leading)
        yield from _role(replica)
        yield from _counters(replica.telling)
        yield from _parking(replica.controller.parking)
        yield _seconds_in_state(replica.telling)
        if not (is_leading and replica.telling.is_synced):
            return
        yield from self._fleet()
        yield from self._budget()
        yield from self._nvidias()

    def _fleet(self) -> Iterator[Metric]:
        controller, now = self._replica.controller, self._replica.clock.epoch()
        nodes = GaugeMetricFamily(f"{OURS}nodes", "Nodes of a policy group in a state.", labels=("group", "state"))
        for group, sums in controller.tally.groups().items():
            for state in (*State, None):
                nodes.add_metric((group, state_word(state)), sums.states.get(state, 0))
        yield nodes
        staying = GaugeMetricFamily(f"{OURS}nodes_staying", "Nodes by the reason why they are where they are.", labels=("reason",))
        for reason, number in _count(stay.because.value for stay in list(controller.stays.values())).items():
            staying.add_metric((reason,), number)
        yield staying
        oldest = GaugeMetricFamily(f"{OURS}oldest_seconds", "For how long the oldest node of a state is in it.", labels=("state",))
        since: dict[State | None, float] = {}
        for each in controller.tally.all().values():
            if each.since:
                since[each.state] = min(each.since, since.get(each.state, math.inf))
        for state, began in since.items():
            oldest.add_metric((state_word(state),), max(0.0, now - began))
        yield oldest
        yield GaugeMetricFamily(f"{OURS}parked_nodes", "Nodes that are parked for some DaemonSet.", len(controller.parking.parked_nodes()))

    def _budget(self) -> Iterator[Metric]:
        controller = self._replica.controller
        enabled = GaugeMetricFamily(f"{OURS}upgrades_enabled", "1 where a policy group may start nodes.", labels=("group",))
        parallel = GaugeMetricFamily(f"{OURS}max_parallel_upgrades", "Limit of nodes in work; 0 is none.", labels=("group",))
        limit = GaugeMetricFamily(f"{OURS}max_unavailable_nodes", "Limit of unavailable nodes, shares worked out.", labels=("group",))
        working = GaugeMetricFamily(f"{OURS}working_nodes", "Nodes that hold one of max_parallel_upgrades.", labels=("group",))
        gone = GaugeMetricFamily(f"{OURS}unavailable_nodes", "Nodes cordoned or not ready, by whose doing.", labels=("group", "by"))
        for group, policy, sums in _groups(controller.groups, controller.tally.groups().items()):
            enabled.add_metric((group,), policy is not None)
            working.add_metric((group,), len(sums.working))
            gone.add_metric((group, "upgrade"), len(sums.ours))
            gone.add_metric((group, "other"), len(sums.foreign))
            if policy is not None:
                parallel.add_metric((group,), policy.max_parallel_upgrades)
                limit.add_metric((group,), policy.most_unavailable(sums.total))
        yield from (enabled, parallel, limit, working, gone)
        yield GaugeMetricFamily(f"{OURS}paused", "1 while a person has paused all starts.", self._replica.controller.is_paused)

    def _nvidias(self) -> Iterator[Metric]:
        controller, telling, clock = self._replica.controller, self._replica.telling, self._replica.clock
        groups = list(_groups(controller.groups, controller.tally.groups().items()))
        states = [(state, number) for _, _, sums in groups for state, number in sums.states.items()]

        def in_states(wanted: AbstractSet[State]) -> int:
            return sum(number for state, number in states if state is not None and state in wanted)

        is_on = any(policy is not None for _, policy, _ in groups)
        values: dict[str, tuple[str, float]] = {
            "driver_auto_upgrade_enabled": ("1 where some nodes get new drivers by themselves.", int(is_on)),
            "nodes_upgrades_in_progress": ("Nodes in work, failed ones among them.", in_states(set(State) - IDLE)),
            "nodes_upgrades_done": ("Nodes in upgrade-done.", in_states({State.DONE})),
            "nodes_upgrades_failed": ("Nodes in upgrade-failed.", in_states({State.FAILED})),
            "nodes_upgrades_pending": ("Nodes in upgrade-required.", in_states({State.REQUIRED})),
            "nodes_upgrades_available": ("Nodes that could be begun now.", sum(free_slots(policy, sums) for _, policy, sums in groups)),
            "gpu_nodes_total": ("Nodes of the fleet.", sum(sums.total for _, _, sums in groups)),
            "reconciliation_status": ("1: there is a policy; -1: there is none.", OK if is_on else NO_POLICY),
            "reconciliation_last_success_ts_seconds": (
                "When the loop last came round, in Unix seconds.",
                clock.epoch() - (clock.now() - telling.passed_at),
            ),
        }
        for name, (text, value) in values.items():
            yield GaugeMetricFamily(NVIDIAS + name, text, value)


def _role(replica: Replica) -> Iterator[Metric]:
    """Only of the replica that has the Lease: others do not look."""
    standing = replica.controller.role.standing
    if replica.election.still_leading() and standing is not None:
        is_following = standing.role is Role.FOLLOW
        yield GaugeMetricFamily(f"{OURS}following", "1 while a gpu-operator leads the upgrades and this one follows.", is_following)


def _counters(telling: Telling) -> Iterator[Metric]:
    moves = CounterMetricFamily(f"{OURS}transitions", "Changes of state.", labels=("from", "to", "reason"))
    for (before, after, because), number in sorted(telling.moves.items()):
        moves.add_metric((state_word(before), state_word(after), because.value), number)
    yield moves
    steps = CounterMetricFamily(f"{OURS}healing", "What was done about what dead agents and ended upgrades left.", labels=("reason",))
    for why in HEALING:
        steps.add_metric((why.value,), telling.healing_steps[why])
    yield steps
    values = {
        f"{OURS}evictions": ("Pods whose eviction was accepted.", telling.evictions),
        f"{OURS}driver_pod_restarts": ("Driver pods that were deleted.", telling.driver_restarts),
        f"{OURS}events_dropped": ("Events that were never sent, because too many waited.", telling.dropped_events),
        f"{OURS}bugs": ("Decisions and work about nodes that ended in an error of this program.", telling.bugs),
        f"{NVIDIAS}reconciliation": ("Rounds of the loop.", telling.passes),
        f"{NVIDIAS}reconciliation_failed": ("Decisions and work about nodes that ended in an error of this program.", telling.bugs),
    }
    for name, (text, value) in values.items():
        yield CounterMetricFamily(name, text, value)


def _parking(parking: Parking) -> Iterator[Metric]:
    yield CounterMetricFamily(f"{OURS}gated_pods_let_go", "Pods evicted so that a successor comes without a gate.", parking.ungated)
    text = "Times that a DaemonSet's controller was woken because pods on nodes that are not parked were held up."
    yield CounterMetricFamily(f"{OURS}held_up_daemonsets_woken", text, parking.woken)


def _seconds_in_state(telling: Telling) -> HistogramMetricFamily:
    family = HistogramMetricFamily(f"{OURS}state_seconds", "How long nodes stayed in a state before they left it.", labels=("state",))
    for state, each in sorted(telling.state_seconds.items()):
        so_far, buckets = 0, []
        for bound, number in zip((*map(str, BUCKETS), "+Inf"), each.counts, strict=True):
            so_far += number
            buckets.append((bound, so_far))
        family.add_metric((state_word(state),), buckets, each.total)
    return family


def state_word(state: State | None) -> str:
    """A state as a label's value: never empty, which to Prometheus is no label."""
    return NOT_A_STATE if state is None else state.value or NO_STATE


def free_slots(policy: UpgradePolicy | None, sums: Sums) -> int:
    """How many more nodes the limits of a group let begin now."""
    if policy is None:
        return 0
    free = len(sums.pending) if not policy.max_parallel_upgrades else policy.max_parallel_upgrades - len(sums.working)
    return max(0, min(free, policy.most_unavailable(sums.total) - len(sums.ours) - len(sums.foreign)))


def _groups(groups: Groups, known: Iterable[tuple[str, Sums]]) -> Iterator[tuple[str, UpgradePolicy | None, Sums]]:
    """Every policy group with its sums, those without nodes and those without a policy too."""
    sums = dict(known)
    every = [groups.everybody] if groups.everybody is not None else list(groups.by_owner.values())
    policies = {group.name: group.policy for group in every}
    for name in sorted({*policies, *sums}):
        yield name, policies.get(name), sums.get(name, Sums())


def _count(words: Iterable[str]) -> dict[str, int]:
    numbers: dict[str, int] = {}
    for word in words:
        numbers[word] = numbers.get(word, 0) + 1
    return dict(sorted(numbers.items()))
