"""What can go wrong, as types: each says what is so, what a person can do next, and how the program ends.

Adapters translate library errors into these at their door. Only `cli` turns them into exit codes.
"""

from enum import IntEnum


class Exit(IntEnum):
    """How the program ends. The table in the README is held to this one by a test."""

    DONE = 0
    """Done: the driver may be installed and everything of ours is put back."""
    USAGE = 64
    """Wrong use: an unknown flag or command, or flags that do not go together."""
    REFUSED = 65
    """Refused by policy, nearly always before anything was changed; else everything is put back."""
    UNREACHABLE = 69
    """The API server cannot be reached."""
    BUG = 70
    """An error in this program, or an answer of the API server that it does not understand."""
    CANNOT_UNLOAD = 71
    """This kernel cannot unload the driver, or only a reboot helps."""
    HOST_DRIVER = 72
    """The driver belongs to the host."""
    AGAIN = 75
    """Timed out, busy, or ended by a signal: everything is put back, or the last line says what is left; trying again may help."""
    FORBIDDEN = 77
    """A permission is missing."""
    CONFIG = 78
    """A setting has a bad value, or the node does not exist."""


class DriverManagerError(Exception):
    """The root of all errors that this program raises on purpose."""

    exit_code: Exit = Exit.BUG
    reason: str = "bug"
    """For machines; the table in docs/on-call.md is held to these."""
    transient: bool = False
    """Whether the same call may succeed a moment later."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class ConfigError(DriverManagerError):
    """A setting has a value that it must not have."""

    reason = "bad-setting"
    exit_code = Exit.CONFIG


class OtherMachine(ConfigError):
    """This machine is not the node that the settings name."""


class Refused(DriverManagerError):
    """Going on would break a rule or a policy."""

    reason = "refused"
    exit_code = Exit.REFUSED


class InvariantBroken(DriverManagerError):
    """A rule of the design does not hold: a bug."""


class DeadlineExceeded(DriverManagerError):
    """A wait came to its end.

    Args:
        waiting_for: what it waited for, by name.
        waited: seconds.
    """

    exit_code = Exit.AGAIN
    reason = "timed-out"

    def __init__(self, waiting_for: str, waited: float, *, hint: str = "") -> None:
        super().__init__(f"waited {waited:.0f} s for {waiting_for}", hint=hint)
        self.waiting_for = waiting_for
        self.waited = waited


class Unsettled(DriverManagerError):
    """Others undo what a run needs as often as it is done: users of the driver that keep coming, a cordon that is taken off again."""

    exit_code = Exit.AGAIN
    reason = "unsettled"


class StartOver(DriverManagerError):
    """What the plan was made for is not so any more, and nothing has been changed: look and plan from the start."""

    exit_code = Exit.AGAIN
    reason = "changed-meanwhile"


class Interrupted(DriverManagerError):
    """A signal asked the program to end."""

    reason = "stopped"
    exit_code = Exit.AGAIN


class TakenOver(DriverManagerError):
    """The node is no longer ours to change: it is gone, was made anew, or another run has it."""

    reason = "taken-over"
    exit_code = Exit.AGAIN


# The cluster --------------------------------------------------------------------------------------------------------


class ClusterError(DriverManagerError):
    """The API server answered with an error."""

    reason = "api-error"


class NotFound(ClusterError):
    """There is no such object."""

    exit_code = Exit.CONFIG


class Conflict(ClusterError):
    """The object has changed since it was read, or is another one of the same name."""

    transient = True
    exit_code = Exit.AGAIN


class Forbidden(ClusterError):
    """The account may not do this."""

    reason = "forbidden"
    exit_code = Exit.FORBIDDEN


class Terminating(ClusterError):
    """Refused because the namespace is being deleted: what was asked will happen by itself."""

    exit_code = Exit.AGAIN


class Unreachable(ClusterError):
    """No answer, or one that says to come back later.

    Args:
        retry_after: seconds the server asked for, 0 where it did not.
    """

    transient = True
    exit_code = Exit.UNREACHABLE
    reason = "api-unreachable"

    def __init__(self, message: str, *, hint: str = "", retry_after: float = 0.0) -> None:
        super().__init__(message, hint=hint)
        self.retry_after = retry_after


class EvictionBlocked(ClusterError):
    """A disruption budget, or an admission webhook, does not let the pod go now.

    Args:
        budget: name of the budget, where the answer gives it.
        retry_after: seconds the server asked for, 0 where it did not.
        final: whether waiting cannot help (two budgets on one pod).
    """

    transient = True
    exit_code = Exit.AGAIN

    def __init__(self, message: str, *, hint: str = "", budget: str | None = None, retry_after: float = 0.0, final: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.budget = budget
        self.retry_after = retry_after
        self.final = final


# The host -----------------------------------------------------------------------------------------------------------


class HostError(DriverManagerError):
    """A call to the kernel failed.

    Args:
        errno_name: for example `EBUSY`.
    """

    exit_code = Exit.CANNOT_UNLOAD
    reason = "host-error"

    def __init__(self, message: str, *, hint: str = "", errno_name: str = "") -> None:
        super().__init__(message, hint=hint)
        self.errno_name = errno_name


class ModuleInUse(HostError):
    """A module is still there, and may go at the next try: as a rule it has users, so the kernel keeps it."""

    transient = True
    exit_code = Exit.AGAIN


class MountBusy(HostError):
    """Somebody works below a mount point."""

    exit_code = Exit.AGAIN


class DeviceStuck(HostError):
    """A call into the kernel did not come back within its limit; the process that made it is left behind and named."""


class DeviceInUse(HostError):
    """A process has a device open, so nothing was written to it: the write would wait for that process."""

    reason = "device-in-use"
    exit_code = Exit.AGAIN


class ServiceFailed(HostError):
    """A systemd unit was not stopped or started."""

    reason = "service-failed"
    exit_code = Exit.AGAIN


class LockHeld(HostError):
    """Another run works on this node."""

    exit_code = Exit.AGAIN
