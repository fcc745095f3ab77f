"""The states a node passes on its way to a new driver, as tables: what each means, and from where it can go where.

Label values and meanings are those of NVIDIA's upgrade controller, so that either can take over a cluster from the other in mid-flow.
The diagram in docs/ is drawn from `TRANSITIONS`, and a test holds every decision to it.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final


class State(StrEnum):
    """Value of the node label `nvidia.com/gpu-driver-upgrade-state`."""

    UNKNOWN = ""
    """No label: nobody has looked at the node yet, or upgrades are off."""
    DONE = "upgrade-done"
    """Its driver is the wanted one."""
    REQUIRED = "upgrade-required"
    """It has to be upgraded and waits for its turn."""
    CORDON = "cordon-required"
    """It has its turn and is cordoned."""
    WAIT_FOR_JOBS = "wait-for-jobs-required"
    """Pods that the policy names may still finish."""
    POD_DELETION = "pod-deletion-required"
    """Pods that use the driver are taken off."""
    DRAIN = "drain-required"
    """That did not do, and the whole node is drained."""
    MAINTENANCE = "node-maintenance-required"
    """A maintenance operator frees the node."""
    AFTER_MAINTENANCE = "post-maintenance-required"
    """Reserved; nobody writes it."""
    POD_RESTART = "pod-restart-required"
    """The old driver pod goes, the new one starts."""
    VALIDATION = "validation-required"
    """The new driver is up; validators and devices have to say so too."""
    UNCORDON = "uncordon-required"
    """It is opened again."""
    FAILED = "upgrade-failed"
    """It needs a look, a new driver, or a driver that becomes healthy after all."""


IDLE: Final = frozenset({State.UNKNOWN, State.DONE, State.REQUIRED})
"""States in which nothing of ours is done to the node."""
BEFORE_RESTART: Final = frozenset({State.CORDON, State.WAIT_FOR_JOBS, State.POD_DELETION, State.DRAIN, State.MAINTENANCE})
"""States in which the old driver still runs, so that everything can be taken back."""
AFTER_RESTART: Final = frozenset({State.AFTER_MAINTENANCE, State.POD_RESTART, State.VALIDATION, State.UNCORDON})
"""States that are finished whatever happens to the policy."""
WORKING: Final = BEFORE_RESTART | AFTER_RESTART
"""States that hold a slot of maxParallelUpgrades."""

# A node may also be written again in its state: taken over from another controller, cordoned again, let load its driver.
TRANSITIONS: Final[Mapping[State, frozenset[State]]] = {
    State.UNKNOWN: frozenset({State.DONE, State.REQUIRED}),
    State.DONE: frozenset({State.REQUIRED, State.UNKNOWN}),
    State.REQUIRED: frozenset({State.CORDON, State.MAINTENANCE, State.POD_RESTART, State.DONE, State.UNKNOWN}),
    State.CORDON: frozenset({State.WAIT_FOR_JOBS, State.UNKNOWN}),
    State.WAIT_FOR_JOBS: frozenset({State.POD_DELETION, State.UNKNOWN}),
    State.POD_DELETION: frozenset({State.POD_RESTART, State.DRAIN, State.REQUIRED, State.FAILED, State.UNKNOWN}),
    State.DRAIN: frozenset({State.POD_RESTART, State.REQUIRED, State.FAILED, State.UNKNOWN}),
    State.MAINTENANCE: frozenset({State.POD_RESTART, State.REQUIRED, State.UNKNOWN}),
    State.AFTER_MAINTENANCE: frozenset({State.POD_RESTART}),
    State.POD_RESTART: frozenset({State.VALIDATION, State.FAILED}),
    State.VALIDATION: frozenset({State.UNCORDON, State.POD_RESTART, State.FAILED}),
    State.UNCORDON: frozenset({State.DONE}),
    State.FAILED: frozenset({State.UNCORDON, State.REQUIRED}),
}


def state_of(label: str | None) -> State | None:
    """The state that a label names; None for a value that is no state."""
    try:
        return State(label or "")
    except ValueError:
        return None


class Because(StrEnum):
    """Why a node moves or stays, for machines: reason of Events and metrics, and in `status --all`."""

    UP_TO_DATE = "UpToDate"
    OUTDATED = "Outdated"
    ORDERED = "Ordered"
    """A person wrote the label, or asked by annotation."""
    SAFE_LOAD = "SafeLoad"
    NEW_TARGET = "NewTarget"
    NO_DRIVER = "NoDriver"
    NO_REVISION = "NoRevision"
    POLICY_OFF = "PolicyOff"
    UNKNOWN_STATE = "UnknownState"
    BAD_RECORD = "BadRecord"
    TAKEN_OVER = "TakenOver"
    """The node was in mid-flow without a record of ours."""
    # Waiting for its turn
    SKIPPED = "Skipped"
    NO_SLOT = "NoSlot"
    PAUSED = "Paused"
    GANG_BUSY = "GangBusy"
    NODE_NOT_READY = "NodeNotReady"
    BLOCKED_BY_POD = "BlockedByPod"
    BACKING_OFF = "BackingOff"
    PRE_CORDONED = "PreCordoned"
    # In work
    STARTED = "Started"
    RESTART_ONLY = "RestartOnly"
    WAITING_FOR_JOBS = "WaitingForJobs"
    JOBS_DONE = "JobsDone"
    JOBS_TIMED_OUT = "JobsTimedOut"
    FREEING = "Freeing"
    FREED = "Freed"
    NOT_FREED = "NotFreed"
    MAINTENANCE = "Maintenance"
    MAINTENANCE_OFF = "MaintenanceOff"
    DRIVER_STOPPING = "DriverStopping"
    DRIVER_OUTDATED = "DriverOutdated"
    DRIVER_STARTING = "DriverStarting"
    DRIVER_READY = "DriverReady"
    DRIVER_FAILING = "DriverFailing"
    DRIVER_TIMED_OUT = "DriverTimedOut"
    VALIDATING = "Validating"
    DEVICES_MISSING = "DevicesMissing"
    VALIDATED = "Validated"
    VALIDATION_TIMED_OUT = "ValidationTimedOut"
    OPENED = "Opened"
    STAYS_CORDONED = "StaysCordoned"
    # After a failure
    ACCEPTED = "Accepted"
    RECOVERED = "Recovered"
    NEEDS_A_LOOK = "NeedsALook"
