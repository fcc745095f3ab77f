"""A node in an upgrade, and a small model of the world around it in virtual time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from driver_manager import names
from driver_manager.core.fleet import FleetPod, FleetSet
from driver_manager.core.rollout import decide
from driver_manager.core.rollout_record import BadProgress, Progress, decode, encode
from driver_manager.core.rollout_states import State, state_of
from driver_manager.core.situation import Decision, Freeing, Move, NodeChange, RolloutSettings, Situation, Stay, Turn, Work
from driver_manager.core.snapshot import NodeView, Owner
from driver_manager.core.upgrade_policy import UpgradePolicy, read_policy, written_policy

NOW = 1_000_000.0
OLD, NEW = "old", "new"
"""Template hashes."""
DEVICES = {"nvidia.com/gpu": 8}
DAEMON_SET = FleetSet(namespace="gpu-operator", name="driver", uid="uid-set")
ON = UpgradePolicy(auto_upgrade=True)
GRANTED = Turn(is_granted=True)


def policy(**fields: Any) -> UpgradePolicy:
    """A policy with upgrades on, from fields as a custom resource has them."""
    return read_policy({"autoUpgrade": True, **fields})


def driver(revision: str = NEW, **fields: Any) -> FleetPod:
    """A driver pod, ready unless told otherwise."""
    made = {"name": f"driver-{revision}", "uid": f"uid-{revision}", "is_ready": True, "digest": f"digest-{revision}", **fields}
    owner = made.pop("owner", Owner("DaemonSet", "driver", "uid-set"))
    return FleetPod(namespace="gpu-operator", node_name="n", revision=revision, owner=owner, **made)


def orphan(**fields: Any) -> FleetPod:
    """A driver pod without an owner."""
    return driver(OLD, name="orphan", uid="uid-orphan", owner=None, **fields)


def validator(**fields: Any) -> FleetPod:
    """A validator pod, ready unless told otherwise."""
    return FleetPod(namespace="gpu-operator", name="validator", uid="uid-validator", node_name="n", **{"is_ready": True, **fields})


def node(state: State | str = State.UNKNOWN, record: Progress | str | None = None, **fields: Any) -> NodeView:
    """A node with a state and a record."""
    labels = {**fields.pop("labels", {}), **({names.UPGRADE_STATE: str(state)} if state else {})}
    annotations = dict(fields.pop("annotations", {}))
    if record is not None:
        annotations[names.ROLLOUT] = record if isinstance(record, str) else encode(record)
    defaults: dict[str, Any] = {"name": "n", "uid": "uid-n", "resource_version": "1", "allocatable": DEVICES, "capacity": DEVICES}
    return NodeView(**{**defaults, **fields}, labels=labels, annotations=annotations)


def record(state: State | str, **fields: Any) -> Progress:
    """The record of a node that this controller has in work."""
    defaults: dict[str, Any] = {
        "node": "uid-n",
        "state": str(state),
        "target": NEW,
        "policy": "file",
        "rules": written_policy(ON),
        "is_cordoned": True,
        "devices": DEVICES,
        "attempt": 1,
        "since": NOW - 10,
    }
    return Progress(**{**defaults, **fields})


def in_work(state: State, known: dict[str, Any] | None = None, **fields: Any) -> NodeView:
    """A node that this controller has in work: cordoned, with its record."""
    return node(state, record(state, **(known or {})), **{"unschedulable": True, **fields})


def situation(about: NodeView, **fields: Any) -> Situation:
    """What is seen of a node, its state and record read as the controller reads them."""
    progress, bad = None, ""
    if (text := about.annotations.get(names.ROLLOUT)) is not None:
        try:
            progress = decode(text)
        except BadProgress as error:
            bad = str(error)
    if progress is not None and progress.node != about.uid:
        progress = None
    defaults: dict[str, Any] = {
        "now": NOW,
        "group": "file",
        "policy": ON,
        "daemon_set": DAEMON_SET,
        "wanted": NEW,
        "wanted_digest": "digest-new",
        "drivers": (driver(OLD),),
    }
    seen = {**defaults, **fields}
    return Situation(node=about, state=state_of(about.labels.get(names.UPGRADE_STATE)), progress=progress, bad_progress=bad, **seen)


def ends(decision: Decision) -> State | None:
    """The state that a decision leads to; None where it moves nothing."""
    return decision.moves[-1].after if decision.moves else None


@dataclass
class World:
    """One node and what is around it. `is_held`: pods and objects stay as they are, whatever is asked for."""

    node: NodeView
    is_held: bool = True
    now: float = NOW
    policy: UpgradePolicy | None = ON
    bad_policy: str = ""
    daemon_set: FleetSet | None = DAEMON_SET
    wanted: str = NEW
    drivers: tuple[FleetPod, ...] = (driver(OLD),)
    validators: tuple[FleetPod, ...] = ()
    needs_validator: bool = False
    has_maintenance: bool = False
    maintenance: str = ""
    freeing: Freeing | None = None
    jobs: tuple[str, ...] | None = None
    turn: Turn = GRANTED
    settings: RolloutSettings = field(default_factory=RolloutSettings)
    moves: list[Move] = field(default_factory=list)
    writes: int = 0

    def situation(self) -> Situation:
        """What the controller sees."""
        seen = ("now", "policy", "bad_policy", "daemon_set", "wanted", "drivers", "validators", "needs_validator", "has_maintenance")
        more = ("maintenance", "freeing", "jobs", "turn", "settings")
        return situation(self.node, **{name: getattr(self, name) for name in (*seen, *more)})

    @property
    def state(self) -> State | None:
        """Of the label."""
        return state_of(self.node.labels.get(names.UPGRADE_STATE))

    def change(self, change: NodeChange) -> None:
        """Somebody writes the node."""
        self.node = change.on(self.node)

    def act(self) -> Stay | None:
        """Decides once and writes; the wait where nothing was written."""
        decision = decide(self.situation())
        if not decision.moves:
            return decision.rest
        assert decision.change, "a move without a write"
        self.moves.extend(decision.moves)
        self.writes += 1
        is_new_state = any(move.before is not move.after for move in decision.moves)
        self.change(decision.change)
        if is_new_state and not self.is_held:
            self.freeing, self.jobs = None, None
        return None

    def run(self, until: float = 6 * 3600.0) -> Stay:
        """Acts and lets time pass until nothing more will happen by itself."""
        end, in_a_row = self.now + until, 0
        while True:
            stay = self.act()
            if stay is None:
                in_a_row += 1
                assert in_a_row < 30, f"it writes without end: {self.moves[-6:]}"
                continue
            in_a_row = 0
            if not self.is_held and self._work(stay):
                continue
            if stay.again_at <= self.now:
                assert stay.again_at == 0, f"it waits for a time that is over: {stay}"
                return stay
            self.now = stay.again_at
            assert self.now <= end, f"still {stay} after {until} s"

    def _work(self, stay: Stay) -> bool:
        """What is asked for is done at once. Whether that changed anything."""
        match stay.work:
            case Work.FREE | Work.DRAIN:
                self.freeing = Freeing(is_done=True)
            case Work.LOOK_FOR_JOBS:
                self.jobs = ()
            case Work.RESTART_DRIVER:
                assert stay.pod in self.drivers
                others = tuple(pod for pod in self.drivers if pod is not stay.pod and pod.is_bound)
                self.drivers = (*others, driver(self.wanted))
            case Work.ASK_MAINTENANCE:
                self.maintenance = "ready"
            case Work.RELEASE_MAINTENANCE:
                self.maintenance = "missing"
            case Work.NOTHING:
                return False
        return True

    def heal(self, **changes: Any) -> None:
        """From now on all is well, and what is asked for is done."""
        self.is_held = False
        well: dict[str, Any] = {
            "policy": ON,
            "bad_policy": "",
            "daemon_set": DAEMON_SET,
            "drivers": (driver(self.wanted),),
            "validators": (validator(),) if self.needs_validator else (),
            "maintenance": "missing",
            "freeing": None,
            "jobs": None,
            "turn": GRANTED,
            **changes,
        }
        for name, value in well.items():
            setattr(self, name, value)
        self.node = replace(self.node, is_ready=True, allocatable=DEVICES)
