"""The settings of the node agent: one frozen value, one table of where each comes from, and the words a value may be.

Names, defaults and meaning of the first half are those of NVIDIA's k8s-driver-manager (specification 1.1), which this program replaces in
place; ENABLE_AUTO_DRAIN is false here because its `true` never worked there. Reading the environment is `cli`'s affair.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

from driver_manager.core.selectors import Selector, parse_selector
from driver_manager.core.services import HostAction, HostServices
from driver_manager.errors import ConfigError
from driver_manager.names import GPU_RESOURCE_PREFIXES, GPU_RUNTIME_HANDLERS, KEEP_OFF_TAINT, NEVER_PAUSED


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the user wants. Durations are seconds; 0 is without limit."""

    node_name: str = ""
    operator_namespace: str = "gpu-operator"
    kubeconfig: str = ""
    host_tree: str = ""
    no_cluster: bool = False
    enable_gpu_pod_eviction: bool = True
    enable_auto_drain: bool = False
    drain_use_force: bool = False
    drain_pod_selector: Selector = field(default_factory=Selector)
    drain_timeout: float = 0.0
    drain_delete_emptydir_data: bool = False
    custom_label: str = ""
    gpu_direct_rdma_enabled: bool = False
    use_host_mofed: bool = False
    force_reinstall: bool = False
    host_driver: str = "keep"
    driver_config_digest: str = ""
    keep_off_taint_key: str = KEEP_OFF_TAINT
    gpu_resource_prefixes: tuple[str, ...] = GPU_RESOURCE_PREFIXES
    gpu_runtime_handlers: frozenset[str] = GPU_RUNTIME_HANDLERS
    consumer_selector: Selector = field(default_factory=Selector)
    hidden_consumers: str = "evict"
    policy_owned_consumers: str = "free"
    force_delete_stuck_pods: bool = False
    unload_also: tuple[str, ...] = ()
    bind_nvswitches: bool = False
    busy_mounts: str = "detach"
    host_services: HostServices = ()
    host_processes: str = "wait"
    operand_timeout: float = 300.0
    holder_timeout: float = 300.0
    unload_timeout: float = 30.0
    network_driver_timeout: float = 1800.0
    restore_timeout: float = 300.0
    policy_owner_timeout: float = 1800.0
    lock_timeout: float = 60.0
    log_format: str = "auto"
    log_level: str = "info"


# Reading words ------------------------------------------------------------------------------------------------------

_TRUE: Final = frozenset({"1", "t", "T", "true", "TRUE", "True"})
_FALSE: Final = frozenset({"0", "f", "F", "false", "FALSE", "False"})
_UNITS: Final = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION_PART: Final = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ns|us|µs|ms|s|m|h)")
_PLAIN_SECONDS: Final = re.compile(r"[0-9]+(?:\.[0-9]+)?")
_LONGEST: Final = 2**63 / 1e9
"""Seconds that a Go duration can hold, about 292 years."""
_LABEL_KEY: Final = re.compile(r"(?:[a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_PREFIX: Final = re.compile(r"[a-z0-9](?:[-a-z0-9.]*[a-z0-9])?/[-A-Za-z0-9_.]*")
_HANDLER: Final = re.compile(r"[a-z0-9](?:[-a-z0-9.]{0,62}[a-z0-9])?")
_MODULE: Final = re.compile(r"[A-Za-z0-9_]+")
_UNIT: Final = re.compile(r"[A-Za-z0-9:_.@\\*?][-A-Za-z0-9:_.@\\*?]{0,250}")
_SERVICE_WORDS: Final = (HostAction.STOP, HostAction.WAIT, HostAction.REPORT)
_NAME: Final = re.compile(r"[a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?")


def parse_bool(text: str) -> bool:
    """A truth value as Go's strconv.ParseBool reads it.

    Raises:
        ValueError: with what is allowed.
    """
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError("allowed are true, false, 1, 0, t, f")


def parse_duration(text: str) -> float:
    """Seconds from a Go duration (`1h30m`, `300s`, `5m`) or a plain number of seconds (`300`).

    Raises:
        ValueError: with what is allowed.
    """
    allowed = "allowed are 0, a number of seconds, or a duration such as 300s, 5m or 1h30m, never below 0"
    if _PLAIN_SECONDS.fullmatch(text):
        seconds = float(text)
    else:
        parts = _DURATION_PART.findall(text)
        if not parts or "".join(number + unit for number, unit in parts) != text:
            raise ValueError(allowed)
        seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
    if seconds >= _LONGEST:
        raise ValueError(f"{allowed}; this one is longer than 292 years")
    return seconds


def duration_words(seconds: float) -> str:
    """A limit as people read it; 0 is said in words."""
    if seconds == 0:
        return "no limit"
    minutes, rest = divmod(seconds, 60)
    if minutes and not rest:
        return f"{minutes:.0f} min"
    return f"{seconds:g} s"


def limit_words(seconds: float) -> str:
    """A limit in a sentence: `limit 5 min`, or `no limit`."""
    return duration_words(seconds) if seconds == 0 else f"limit {duration_words(seconds)}"


def _text(text: str) -> str:
    return text


def _matching(pattern: re.Pattern[str], what: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text and not pattern.fullmatch(text):
            raise ValueError(f"allowed is {what}")
        return text

    return parse


def _one_of(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in words:
            raise ValueError(f"allowed are {', '.join(words)}")
        return text

    return parse


def _selector(text: str) -> Selector:
    try:
        return parse_selector(text)
    except ValueError as error:
        raise ValueError(f"{error}; allowed is what kubectl --selector takes, such as app=web,tier in (a,b),!canary") from error


def _modules(text: str) -> tuple[str, ...]:
    names = tuple(name.strip().replace("-", "_") for name in text.split(",") if name.strip())
    if bad := [name for name in names if not _MODULE.fullmatch(name)]:
        raise ValueError(f"{bad[0]!r} is no module's name; allowed are names separated by commas")
    return names


def _host_services(text: str) -> HostServices:
    found = []
    for part in (part.strip() for part in text.split(",") if part.strip()):
        unit, sign, word = (side.strip() for side in part.partition("="))
        if not sign or not _UNIT.fullmatch(unit) or word not in _SERVICE_WORDS:
            raise ValueError(f"{part!r} is none of UNIT=stop, UNIT=wait, UNIT=report; allowed are those, separated by commas")
        if "." in unit and not unit.endswith((".service", "*")):
            raise ValueError(f"{unit!r} is no service; allowed are services, with or without .service")
        found.append((unit, HostAction(word)))
    return tuple(found)


def _prefixes(text: str) -> tuple[str, ...]:
    prefixes = tuple(part.strip() for part in text.split(",") if part.strip())
    if not prefixes or not all(_PREFIX.fullmatch(prefix) for prefix in prefixes):
        raise ValueError("allowed are beginnings of resource names with a domain, such as nvidia.com/gpu, separated by commas")
    return prefixes


def _handlers(text: str) -> frozenset[str]:
    handlers = frozenset(part.strip() for part in text.split(",") if part.strip())
    if not all(_HANDLER.fullmatch(handler) for handler in handlers):
        raise ValueError("allowed are names of runtime handlers separated by commas")
    return handlers


# The table ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kind:
    """What the text of a setting may be."""

    sign: str
    """Stands for the value in a usage line."""
    allowed: str
    """For people; error messages say it too."""
    parse: Callable[[str], Any]


def _choice(*words: str) -> Kind:
    return Kind("|".join(words), ", ".join(words), _one_of(*words))


def _pattern(sign: str, allowed: str, pattern: re.Pattern[str]) -> Kind:
    return Kind(sign, allowed, _matching(pattern, allowed))


def _client_key(text: str) -> str:
    if text in NEVER_PAUSED:
        raise ValueError("this label brings the driver itself to the node and is never paused; allowed is another label key")
    return str(KEY.parse(text))


BOOL: Final = Kind("true|false", "true, false", parse_bool)
DURATION: Final = Kind("DURATION", "seconds such as 300, or 300s, 5m, 1h30m; 0 is no limit", parse_duration)
NAME: Final = _pattern("NAME", "a name of lower-case letters, digits, '-' and '.'", _NAME)
KEY: Final = _pattern("KEY", "a label key such as example.com/gpu-client", _LABEL_KEY)
SELECTOR: Final = Kind("SELECTOR", "what kubectl --selector takes", _selector)


@dataclass(frozen=True, slots=True)
class Option:
    """Where one setting comes from and how its text is read."""

    field: str
    flag: str
    """Without dashes; empty where there is only an environment variable."""
    env: str
    kind: Kind
    help: str
    """What it does, with unit and reason."""
    empty: Any = None
    """What an empty environment variable means; None: the default."""
    unset: str = "none"
    """What it means when the default is empty."""

    @property
    def parameter(self) -> str:
        """What click calls it."""
        return self.field.replace(".", "_")

    @property
    def default(self) -> str:
        """The default in words."""
        return self.in_words(getattr(Settings(), self.field))

    def in_words(self, value: Any) -> str:
        """A value as people read it."""
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, float):
            return duration_words(value) + (" (0)" if value == 0 else "")
        if isinstance(value, Selector):
            return value.text or self.unset
        if isinstance(value, tuple | frozenset):
            return ", ".join(value if isinstance(value, tuple) else sorted(value)) or self.unset
        return str(value) or self.unset


OPTIONS: Final = (
    Option("node_name", "node-name", "NODE_NAME", NAME, "name of this node", unset="none: it has to be given, unless NO_CLUSTER is true"),
    Option("drain_use_force", "drain-use-force", "DRAIN_USE_FORCE", BOOL,
           "also evict pods that no controller would make again", empty=False),
    Option("drain_pod_selector", "drain-pod-selector-label", "DRAIN_POD_SELECTOR_LABEL", SELECTOR,
           "label selector of the pods that a drain of the whole node takes", empty=Selector(), unset="all pods"),
    Option("drain_timeout", "drain-timeout-seconds", "DRAIN_TIMEOUT_SECONDS", DURATION,
           "limit of all evictions together, from the first one on; without one a run waits as long as a disruption budget says no"),
    Option("drain_delete_emptydir_data", "drain-delete-emptydir-data", "DRAIN_DELETE_EMPTYDIR_DATA", BOOL,
           "also evict pods that lose data in an emptyDir volume", empty=False),
    Option("enable_auto_drain", "enable-auto-drain", "ENABLE_AUTO_DRAIN", BOOL,
           "drain the whole node when something still holds the driver after the GPU pods are gone", empty=False),
    Option("enable_gpu_pod_eviction", "enable-gpu-pod-eviction", "ENABLE_GPU_POD_EVICTION", BOOL,
           "evict pods that use a GPU", empty=False),
    Option("operator_namespace", "operator-namespace", "OPERATOR_NAMESPACE", NAME,
           "namespace of the GPU operator and its operands"),
    Option("custom_label", "node-label-for-gpu-pod-eviction", "NODE_LABEL_FOR_GPU_POD_EVICTION",
           Kind("KEY", KEY.allowed, _client_key), "one more node label to pause: DaemonSets that select it leave the node"),
    Option("gpu_direct_rdma_enabled", "gpu-direct-rdma-enabled", "GPU_DIRECT_RDMA_ENABLED", BOOL,
           "wait for the network driver where there is a Mellanox device", empty=False),
    Option("use_host_mofed", "use-host-mofed", "USE_HOST_MOFED", BOOL,
           "the network driver is the host's own", empty=False),
    Option("kubeconfig", "kubeconfig", "KUBECONFIG", Kind("FILE", "a path, or several with ':' between them", _text), "kubeconfig file",
           unset="the account of the pod it runs in"),
    Option("no_cluster", "no-cluster", "NO_CLUSTER", BOOL,
           "there is no cluster: free this machine alone, its record is a file below /run", empty=False),
    Option("host_driver", "host-driver", "HOST_DRIVER", _choice("keep", "unload"),
           "what to do with a driver that was installed on the host itself: keep it (exit code 72) or unload it"),
    Option("force_reinstall", "force-reinstall", "FORCE_REINSTALL", BOOL,
           "free the driver even if the wanted one is loaded already", empty=False),
    Option("driver_config_digest", "", "DRIVER_CONFIG_DIGEST", Kind("TEXT", "any text; the operator sets it", str.strip),
           "what the driver container is going to load; equal to the state file means no change",
           unset="none: every start with a loaded driver frees the whole node"),
    Option("host_tree", "host-tree", "DRIVER_MANAGER_HOST_TREE", Kind("DIR", "a path", _text),
           "rehearsal: a directory tree laid out like a host, instead of this machine", unset="none: this machine"),
    Option("keep_off_taint_key", "keep-off-taint-key", "KEEP_OFF_TAINT_KEY", KEY,
           "key of the taint that keeps GPU pods off meanwhile, where there is no driver DaemonSet to ask"),
    Option("gpu_resource_prefixes", "gpu-resource-prefixes", "GPU_RESOURCE_PREFIXES",
           Kind("LIST", "beginnings of resource names with a domain, separated by commas", _prefixes),
           "beginnings of the names of resources whose users use a GPU"),
    Option("gpu_runtime_handlers", "gpu-runtime-handlers", "GPU_RUNTIME_HANDLERS",
           Kind("LIST", "names of runtime handlers, separated by commas", _handlers),
           "handlers of runtime classes whose pods use a GPU; names of classes where they cannot be listed"),
    Option("consumer_selector", "consumer-pod-selector", "CONSUMER_POD_SELECTOR", SELECTOR,
           "label selector of more pods that use the driver", empty=Selector(), unset="none"),
    Option("hidden_consumers", "hidden-consumers", "HIDDEN_CONSUMERS", _choice("evict", "refuse", "ignore"),
           "what to do with pods that only the kernel shows to hold a GPU"),
    Option("policy_owned_consumers", "policy-owned-consumers", "POLICY_OWNED_CONSUMERS", _choice("free", "wait", "refuse"),
           "what to do, where an upgrade controller evicts GPU pods, with users of the driver that it does not know"),
    Option("force_delete_stuck_pods", "force-delete-stuck-pods", "FORCE_DELETE_STUCK_PODS", BOOL,
           "end pods without grace that are terminating for longer than their own grace and hold no finalizer", empty=False),
    Option("unload_also", "unload-also", "UNLOAD_ALSO", Kind("LIST", "names of modules, separated by commas", _modules),
           "modules of others that may be removed when they hold the driver"),
    Option("bind_nvswitches", "bind-nvswitches", "BIND_NVSWITCHES", BOOL, "unbind NVSwitches from vfio too", empty=False),
    Option("busy_mounts", "busy-mounts", "BUSY_MOUNTS", _choice("detach", "refuse"),
           "what to do with a driver root that is still in use"),
    Option("host_services", "host-services", "HOST_SERVICES",
           Kind("LIST", "UNIT=stop, UNIT=wait or UNIT=report, separated by commas", _host_services),
           "what to do with systemd units of the host that hold a GPU", unset="none: known daemons are stopped, display servers refused"),
    Option("host_processes", "host-processes", "HOST_PROCESSES", _choice("wait", "refuse", "terminate"),
           "what to do with other processes of the host that hold a GPU; terminate sends SIGTERM"),
    Option("operand_timeout", "operand-timeout", "OPERAND_TIMEOUT", DURATION, "limit for operands to leave"),
    Option("holder_timeout", "holder-timeout", "HOLDER_TIMEOUT", DURATION, "limit for processes to let go of the GPUs"),
    Option("unload_timeout", "unload-timeout", "UNLOAD_TIMEOUT", DURATION, "how long to retry a busy module"),
    Option("network_driver_timeout", "network-driver-timeout", "NETWORK_DRIVER_TIMEOUT", DURATION,
           "limit for the network driver to come up"),
    Option("restore_timeout", "restore-timeout", "RESTORE_TIMEOUT", DURATION,
           "how long to try putting the node back while the API does not answer"),
    Option("policy_owner_timeout", "policy-owner-timeout", "POLICY_OWNER_TIMEOUT", DURATION,
           "limit for an upgrade controller to free the node of GPU pods"),
    Option("lock_timeout", "lock-timeout", "LOCK_TIMEOUT", DURATION, "limit for another run on this node to end"),
    Option("log_format", "log-format", "LOG_FORMAT", _choice("auto", "text", "json"),
           "how log lines look; auto is text on a terminal and json otherwise"),
    Option("log_level", "log-level", "LOG_LEVEL", _choice("debug", "info", "warning", "error"), "the least important lines to print"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Given:
    """One text given for a setting, and where."""

    text: str
    origin: str
    """For people: `flag --node-name`, `environment NODE_NAME`."""


@dataclass(frozen=True, slots=True)
class Effective:
    """The settings in force, and where each comes from."""

    settings: Settings
    origins: Mapping[str, str]
    """Field -> `default`, `flag --x` or `environment X`."""


def effective_settings(flags: Mapping[str, list[Given]], environment: Mapping[str, str]) -> Effective:
    """Reads all settings: a flag wins over the environment, which wins over the default.

    Args:
        flags: field -> every text given for it on the command line.
        environment: variables by name.

    Raises:
        ConfigError: naming the setting, the value, where it came from and what is allowed.
    """
    values, origins = read_options(OPTIONS, flags, environment)
    return Effective(Settings(**values), {each.name: "default" for each in fields(Settings)} | origins)


def read_options(
    options: Iterable[Option], flags: Mapping[str, list[Given]], environment: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """What is given for the settings of a table: field -> value, and field -> where it comes from. What is not given is in neither.

    Raises:
        ConfigError: as `effective_settings`.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for option in options:
        given = _chosen(option, flags.get(option.field, []), environment)
        if given is None:
            continue
        if given.text == "" and given.origin.startswith("environment"):
            if option.empty is None:
                continue
            values[option.field] = option.empty
        else:
            values[option.field] = _read(option, given)
        origins[option.field] = given.origin
    return values, origins


def _chosen(option: Option, given: list[Given], environment: Mapping[str, str]) -> Given | None:
    if given:
        readings = {repr(_read(option, each)) for each in given}
        if len(readings) > 1:
            texts = " and ".join(repr(each.text) for each in given)
            raise ConfigError(
                f"--{option.flag} is given more than once, as {texts}",
                hint=f"give --{option.flag} once ({option.help})",
            )
        return given[-1]
    if option.env in environment:
        return Given(environment[option.env], f"environment {option.env}")
    return None


def _read(option: Option, given: Given) -> Any:
    """The value of a text; the error names what the person has written: the flag, or the variable."""
    try:
        return option.kind.parse(given.text)
    except ValueError as error:
        name = given.origin.partition(" ")[2]
        raise ConfigError(f"{given.origin} has the bad value {given.text!r}: {error}", hint=f"{name}: {option.help}") from error
