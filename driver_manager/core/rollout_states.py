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
    State.REQUIRED: frozenset({State.CORDON, State.MAINTENANCE, State.POD_RESTART, State.DONE, State.FAILED, State.UNKNOWN}),
    State.CORDON: frozenset({State.WAIT_FOR_JOBS, State.UNKNOWN}),
    State.WAIT_FOR_JOBS: frozenset({State.POD_DELETION, State.UNKNOWN}),
    State.POD_DELETION: frozenset({State.POD_RESTART, State.DRAIN, State.REQUIRED, State.FAILED, State.UNKNOWN}),
    State.DRAIN: frozenset({State.POD_RESTART, State.REQUIRED, State.FAILED, State.UNKNOWN}),
    State.MAINTENANCE: frozenset({State.POD_RESTART, State.REQUIRED, State.UNKNOWN}),
    State.AFTER_MAINTENANCE: frozenset({State.POD_RESTART}),
    State.POD_RESTART: frozenset({State.VALIDATION, State.REQUIRED, State.FAILED}),
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

    # What begins an upgrade, or does not
    UP_TO_DATE = "UpToDate"
    """Its driver is the wanted one, or an orphan that nobody has asked to replace."""
    OUTDATED = "Outdated"
    """Its driver pod is not made from the newest template."""
    ORDERED = "Ordered"
    """A person wrote the label or took it off, or asked by annotation."""
    SAFE_LOAD = "SafeLoad"
    """The driver's init container asks for a free node, or is told that it is free."""
    NEW_TARGET = "NewTarget"
    """The driver DaemonSet has a newer template than the one that the node was taken to."""
    NO_DRIVER = "NoDriver"
    """No driver pod is there, or no DaemonSet that would make one."""
    NO_REVISION = "NoRevision"
    """The newest template of the driver DaemonSet is not known yet."""
    NOT_ON_DELETE = "NotOnDelete"
    """Its driver DaemonSet has another update strategy than OnDelete: Kubernetes itself replaces the drivers, past every budget."""
    TWO_DRIVERS = "TwoDrivers"
    """More than one driver DaemonSet makes its pods on the node."""
    POLICY_OFF = "PolicyOff"
    """No policy upgrades the node."""
    BAD_POLICY = "BadPolicy"
    """Its policy cannot be used. Nodes that are not in work are left as they are."""
    UNKNOWN_STATE = "UnknownState"
    """The label's value is no state. A person sets it, or takes it off."""
    BAD_RECORD = "BadRecord"
    """The controller's annotation does not decode. A person takes it off."""
    TAKEN_OVER = "TakenOver"
    """The node was in mid-flow without a record of ours."""
    FOLLOWING = "Following"
    """gpu-operator lives and leads the node."""
    # Waiting for its turn
    SKIPPED = "Skipped"
    """The skip label holds it."""
    NO_SLOT = "NoSlot"
    """maxParallelUpgrades or maxUnavailable is used up, by the nodes that the sentence names."""
    PAUSED = "Paused"
    """The roll-out is paused, by a person or after too many failures."""
    GANG_BUSY = "GangBusy"
    """Another node of its gang is in work, or closed."""
    NODE_NOT_READY = "NodeNotReady"
    """Its kubelet does not report it Ready."""
    BLOCKED_BY_POD = "BlockedByPod"
    """A pod that uses the driver may not be evicted."""
    BACKING_OFF = "BackingOff"
    """The last try failed, and the next one is not yet."""
    PRE_CORDONED = "PreCordoned"
    """Somebody else has cordoned it, and the settings skip such nodes."""
    # In work
    STARTED = "Started"
    """It has its turn."""
    RESTART_ONLY = "RestartOnly"
    """Old and new driver are the same, so that nobody is evicted."""
    WAITING_FOR_JOBS = "WaitingForJobs"
    """Pods that the policy names still run."""
    JOBS_DONE = "JobsDone"
    """None of them runs."""
    JOBS_TIMED_OUT = "JobsTimedOut"
    """They run on, and the policy waits no longer."""
    FREEING = "Freeing"
    """Pods that use the driver are taken off."""
    BLOCKED_BY_BUDGET = "BlockedByBudget"
    """A disruption budget, or whoever else answers evictions, does not let a pod go now. Until it does nobody else is taken off."""
    HELD_OFF = "HeldOff"
    """A DaemonSet's pod came that has to be kept off first."""
    LEFT_OVER = "LeftOver"
    """It was still parked though nothing goes on, and is not any more."""
    FREED = "Freed"
    """Nobody uses the driver any more."""
    NOT_FREED = "NotFreed"
    """Somebody could not be taken off in time."""
    MAINTENANCE = "Maintenance"
    """A maintenance operator has the node, gets it, or gives it back."""
    MAINTENANCE_OFF = "MaintenanceOff"
    """The maintenance operator, or its object for the node, is gone."""
    DRIVER_STOPPING = "DriverStopping"
    """A driver pod ends."""
    DRIVER_OUTDATED = "DriverOutdated"
    """The old driver pod is deleted."""
    DRIVER_STARTING = "DriverStarting"
    """The new driver pod is not ready yet."""
    DRIVER_READY = "DriverReady"
    """It is."""
    DRIVER_FAILING = "DriverFailing"
    """It restarts again and again."""
    DRIVER_TIMED_OUT = "DriverTimedOut"
    """It was not ready in time."""
    VALIDATING = "Validating"
    """A validator pod is missing or not ready yet."""
    DEVICES_MISSING = "DevicesMissing"
    """Fewer devices are allocatable, or published in ResourceSlices, than before."""
    VALIDATED = "Validated"
    """Driver, validators and devices are well."""
    VALIDATION_TIMED_OUT = "ValidationTimedOut"
    """They were not in time."""
    OPENED = "Opened"
    """Our cordon is off."""
    STAYS_CORDONED = "StaysCordoned"
    """There was none of ours, or the keep-cordon annotation keeps it."""
    # After a failure
    ACCEPTED = "Accepted"
    """A person's annotation opens it as it is."""
    RECOVERED = "Recovered"
    """Driver, validators and devices are well after all."""
    NEEDS_A_LOOK = "NeedsALook"
    """It failed, and stays so until something changes."""
