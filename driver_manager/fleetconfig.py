"""The controller's settings as words: one table of where each comes from, and how those that belong together are checked.

Their meaning, units and defaults are `controller/settings.py`'s. The command line is made from this table, so it loads nothing of the
controller: the agent's start is part of a node's downtime.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from driver_manager.config import BOOL, DURATION, KEY, NAME, OPTIONS, SELECTOR, Given, Kind, Option, parse_duration, read_options
from driver_manager.errors import ConfigError

_ADDRESS: Final = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9.-]*):([0-9]{1,5})")
_REQUESTOR: Final = re.compile(r"(?=.{2,63}\Z)[a-zA-Z0-9]([-a-zA-Z0-9]*[a-zA-Z0-9])?(\.[a-zA-Z0-9]([-a-zA-Z0-9]*[a-zA-Z0-9])?)*")
_IDENTITY: Final = re.compile(r"[A-Za-z0-9][-A-Za-z0-9_.]{0,251}")


def _whole_seconds(text: str) -> float:
    seconds = parse_duration(text)
    if seconds < 1 or seconds != int(seconds) or seconds > 86400:
        raise ValueError(f"allowed are {LEASE_TIME.allowed}")
    return seconds


def _some_time(text: str) -> float:
    seconds = parse_duration(text)
    if not 0 < seconds <= 86400:
        raise ValueError(f"allowed are {SOME_TIME.allowed}")
    return seconds


def _count(least: int = 0) -> Kind:
    allowed = f"whole numbers from {least} to 999999"

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdecimal()) or len(text) > 6 or int(text) < least:
            raise ValueError(f"allowed are {allowed}")
        return int(text)

    return Kind("NUMBER", allowed, parse)


def _share(text: str) -> int | str:
    number = text.removesuffix("%")
    if not (number.isascii() and number.isdecimal()) or len(number) > 6 or (number != text and int(number) > 100):
        raise ValueError(f"allowed are {SHARE.allowed}")
    return text if number != text else int(number)


def _node_selector(text: str) -> str:
    SELECTOR.parse(text)
    return text


def _address(text: str) -> str:
    found = _ADDRESS.fullmatch(text)
    if text and (found is None or not 0 < int(found[2]) < 65536):
        raise ValueError(f"allowed is {ADDRESS.allowed}")
    return text


def _identity(text: str) -> str:
    if not _IDENTITY.fullmatch(text):
        raise ValueError(f"allowed are {IDENTITY.allowed}")
    return text


def _requestor(text: str) -> str:
    if not _REQUESTOR.fullmatch(text):
        raise ValueError(f"allowed are {REQUESTOR.allowed}")
    return text


def _some_name(text: str) -> str:
    if not text:
        raise ValueError(f"allowed is {NAME.allowed}")
    return str(NAME.parse(text))


def _role(text: str) -> str:
    if text not in ("auto", "lead", "follow"):
        raise ValueError(f"allowed are {ROLE.allowed}")
    return text


ROLE: Final = Kind("auto|lead|follow", "auto, lead, follow", _role)
LEASE_TIME: Final = Kind("DURATION", "whole seconds from 1 to a day, such as 15 or 15s", _whole_seconds)
SOME_TIME: Final = Kind("DURATION", "seconds above 0, at most a day, such as 10, 10s or 500ms", _some_time)
SHARE: Final = Kind("LIMIT", "a whole number, 0 or more, or a share from 0% to 100%", _share)
ADDRESS: Final = Kind("ADDRESS", "HOST:PORT or :PORT, such as 0.0.0.0:8080 or [::]:8080, or nothing", _address)
IDENTITY: Final = Kind("NAME", "letters, digits, '-', '_' and '.', as in the name of a pod", _identity)
REQUESTOR: Final = Kind("NAME", "2 to 63 letters, digits, '-' and '.', the first and last a letter or digit", _requestor)
SOME_NAME: Final = Kind("NAME", NAME.allowed, _some_name)


@dataclass(frozen=True, slots=True)
class FleetOption(Option):
    """A setting of the controller. `field` is its path in ControllerSettings."""

    said: str = ""
    """The default in words: the settings themselves are not loaded for a help text."""

    @property
    def default(self) -> str:
        """The default in words."""
        return self.said


CONTROLLER_OPTIONS: Final = (
    FleetOption("policy_file", "policy-file", "POLICY_FILE", Kind("FILE", "a path", str),
                "upgrade policy of all nodes: YAML or JSON, the fields of DriverUpgradePolicySpec", said="none: the custom resources tell"),
    FleetOption("node_selector", "node-selector", "NODE_SELECTOR", Kind("SELECTOR", SELECTOR.allowed, _node_selector),
                "label selector of the nodes of the fleet", said="nvidia.com/gpu.present=true"),
    FleetOption("role", "role", "ROLE", ROLE,
                "lead the upgrades, or follow a gpu-operator, which leads then; auto: follow while its Lease is renewed", said="auto"),
    FleetOption("identity", "identity", "POD_NAME", IDENTITY,
                "who this replica is, in the Lease", said="the host's name and some random letters"),
    FleetOption("lease_namespace", "lease-namespace", "POD_NAMESPACE", SOME_NAME, "namespace of the Lease",
                said="that of the pod's account, else driver-manager"),
    FleetOption("lease_name", "lease-name", "LEASE_NAME", SOME_NAME, "name of the Lease", said="driver-manager-controller"),
    FleetOption("lease_duration", "lease-duration", "LEASE_DURATION", LEASE_TIME,
                "another replica takes over when the Lease was not renewed for so long", said="15 s"),
    FleetOption("renew_deadline", "renew-deadline", "RENEW_DEADLINE", SOME_TIME,
                "a leader that could not renew the Lease for so long stops writing", said="10 s"),
    FleetOption("retry_period", "retry-period", "RETRY_PERIOD", SOME_TIME, "pause between two tries to get or renew the Lease", said="2 s"),
    FleetOption("request_timeout", "request-timeout", "REQUEST_TIMEOUT", SOME_TIME,
                "limit of one request; less than lease-duration - renew-deadline: a lost leader's last write ends before the next leads",
                said="4 s"),
    FleetOption("cluster_max_unavailable", "cluster-max-unavailable", "CLUSTER_MAX_UNAVAILABLE", SHARE,
                "nodes of the whole cluster that may be unavailable, beside each policy's limit", said="no limit"),
    FleetOption("most_failures", "most-failures", "MOST_FAILURES", _count(),
                "so many nodes in a row may fail with one driver before no other is begun with it; 0 is no limit", said="5"),
    FleetOption("gang_label", "gang-label", "GANG_LABEL", KEY,
                "node label: no two nodes with the same value of it are in work at once", said="none"),
    FleetOption("order_key", "order-key", "ORDER_KEY", KEY,
                "node label or annotation with a number: nodes with smaller ones come first", said="none: by name"),
    FleetOption("rollout.driver_timeout", "driver-timeout", "DRIVER_TIMEOUT", DURATION,
                "limit from the deletion of the old driver pod until the new one is ready", said="30 min"),
    FleetOption("rollout.validation_timeout", "validation-timeout", "VALIDATION_TIMEOUT", DURATION,
                "limit for validators and devices once the driver is ready", said="10 min"),
    FleetOption("rollout.attempts", "attempts", "ATTEMPTS", _count(1),
                "tries for one driver that may fail before the old driver pod is deleted", said="3"),
    FleetOption("rollout.retry_pause", "retry-pause", "RETRY_PAUSE", SOME_TIME, "pause after the first of these; doubles", said="1 min"),
    FleetOption("rollout.failing_restarts", "failing-restarts", "FAILING_RESTARTS", _count(),
                "a container of the driver pod that restarted more often fails its node", said="10"),
    FleetOption("rollout.one_at_a_time", "one-state-at-a-time", "ONE_STATE_AT_A_TIME", BOOL,
                "write each state of a node by itself, as NVIDIA's controller does", empty=False, said="false"),
    FleetOption("rollout.skip_cordoned", "skip-cordoned", "SKIP_CORDONED", BOOL,
                "do not begin nodes that others have cordoned", empty=False, said="false"),
    FleetOption("template_parking", "template-parking", "TEMPLATE_PARKING", BOOL,
                "where there is no admission policy, change the templates of DaemonSets that ask for it, which restarts their pods once",
                empty=False, said="false"),
    FleetOption("maintenance.is_on", "maintenance-operator", "MAINTENANCE_OPERATOR_ENABLED", BOOL,
                "a maintenance operator cordons and frees the nodes, asked by NodeMaintenance objects", empty=False, said="false"),
    FleetOption("maintenance.namespace", "maintenance-namespace", "MAINTENANCE_OPERATOR_REQUESTOR_NAMESPACE", SOME_NAME,
                "namespace of these objects", said="default"),
    FleetOption("maintenance.requestor", "maintenance-requestor", "MAINTENANCE_OPERATOR_REQUESTOR_ID", REQUESTOR,
                "who this controller is in them; no other program may have the same", said="nvidia.operator.com"),
    FleetOption("maintenance.prefix", "maintenance-prefix", "MAINTENANCE_OPERATOR_NODE_MAINTENANCE_PREFIX", SOME_NAME,
                "their names are this and the node's; programs with the same prefix share them", said="nvidia-operator"),
    FleetOption("settle_time", "settle-time", "SETTLE_TIME", SOME_TIME,
                "what a dead agent or an ended upgrade left on a node is undone when nobody has been there for so long", said="5 min"),
    FleetOption("heal_pause", "heal-pause", "HEAL_PAUSE", SOME_TIME,
                "pause between taking such a record over, which stops an agent that lives after all, and undoing it", said="30 s"),
    FleetOption("listen", "listen", "LISTEN", ADDRESS, "address of /healthz, /readyz and /metrics; empty for none", empty="",
                said="0.0.0.0:8080"),
)  # fmt: skip
"""`policy_file` is read by the command itself."""

SHARED: Final = tuple(
    option
    for option in OPTIONS
    if option.field
    in (
        *("operator_namespace", "kubeconfig", "custom_label", "gpu_resource_prefixes", "gpu_runtime_handlers"),
        *("log_format", "log_level"),
    )
)
"""The agent's settings that the controller has too, with the same meaning."""


LOOKING: Final = tuple(
    option for option in CONTROLLER_OPTIONS if option.field in ("policy_file", "node_selector", "lease_namespace", "lease_name")
)
"""Those that `status --all` has too: where to look."""


CLEANING: Final = tuple(option for option in CONTROLLER_OPTIONS if option.field in ("lease_namespace", "lease_name", "heal_pause"))
"""Those that `cleanup` has too."""


@dataclass(frozen=True, slots=True)
class FleetWords:
    """What is given, read but not yet made into settings."""

    own: Mapping[str, Any]
    """Field of CONTROLLER_OPTIONS -> value; without those that are not given."""
    shared: Mapping[str, Any]
    """The same for SHARED."""
    origins: Mapping[str, str]
    """Field -> `flag --x` or `environment X`."""


def read_words(flags: Mapping[str, list[Given]], environment: Mapping[str, str]) -> FleetWords:
    """Reads all that the controller is told.

    Raises:
        ConfigError: naming the setting, the value, where it came from and what is allowed.
    """
    own, origins = read_options(CONTROLLER_OPTIONS, flags, environment)
    shared, more = read_options(SHARED, flags, environment)
    return FleetWords(own, shared, origins | more)


def check_times(lease_duration: float, renew_deadline: float, retry_period: float, request_timeout: float) -> None:
    """The times of the election only keep two leaders apart in this order.

    Raises:
        ConfigError: naming both settings with their values.
    """
    if request_timeout >= lease_duration - renew_deadline:
        raise ConfigError(
            f"--request-timeout is {request_timeout:g} s, and has to be less than --lease-duration - --renew-deadline "
            f"({lease_duration:g} s - {renew_deadline:g} s = {lease_duration - renew_deadline:g} s)",
            hint="else a write of a lost leader may still arrive when the next one leads: a longer lease, or shorter other two",
        )
    if retry_period >= renew_deadline:
        raise ConfigError(
            f"--retry-period is {retry_period:g} s, and has to be less than --renew-deadline ({renew_deadline:g} s)",
            hint="else the Lease is lost before it is renewed once",
        )
