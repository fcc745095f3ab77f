"""The upgrade policy: how a group of nodes gets new drivers. Read from a custom resource or a file, checked as a whole.

Field names, defaults and meaning are those of `DriverUpgradePolicySpec` (specification 3). What the API server's schema does not check is
checked here: selectors that do not parse, shares over 100 %, wrong types, unknown fields, selectors that select this program itself.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import msgspec

from driver_manager.core.optin import name_problem
from driver_manager.core.selectors import Selector, parse_selector
from driver_manager.names import COMPONENT_LABEL, DRIVER_APP, DRIVER_COMPONENTS, NAME_LABEL, OWN_NAME

OWN_LABELS: Final = {NAME_LABEL: OWN_NAME}
"""Labels that every pod of this program has."""
DRIVER_LABELS: Final = ({"app": DRIVER_APP}, *({COMPONENT_LABEL: component} for component in sorted(DRIVER_COMPONENTS)))
"""Labels of a driver's pods, one of which they have."""
LONGEST_SELECTOR: Final = 1000
"""In characters, of a list of names too: the policy in force has room in each node's record."""
MAX_TOLD: Final = 8
"""Faults of a policy that are named: a condition's message has an end (32 KiB), and a person begins with the first."""
_SHARE: Final = re.compile(r"(100|[0-9]{1,2})%")


@dataclass(frozen=True, slots=True)
class PodDeletion:
    """How GPU pods are taken off a node."""

    force: bool = False
    """Pods that no controller would make again may go."""
    timeout_seconds: int = 300
    """0 is no limit."""
    delete_empty_dir: bool = False
    pod_selector: Selector = field(default_factory=Selector)
    """More pods that use the driver; none by default."""
    park: tuple[str, ...] = ()
    """DaemonSets that may be kept off a node by an admission policy, `namespace/name`, in order; none by default. In no CRD of NVIDIA's."""


@dataclass(frozen=True, slots=True)
class WaitForCompletion:
    """Which pods are waited for before others are taken off."""

    pod_selector: Selector = field(default_factory=Selector)
    """Empty: nobody is waited for."""
    timeout_seconds: int = 0
    """0 is no limit."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Whether, and how, a node is drained when taking the GPU pods off did not do."""

    enable: bool = False
    force: bool = False
    pod_selector: Selector = field(default_factory=Selector)
    timeout_seconds: int = 300
    delete_empty_dir: bool = False


@dataclass(frozen=True, slots=True)
class UpgradePolicy:
    """A whole policy."""

    auto_upgrade: bool = False
    max_parallel_upgrades: int = 1
    """Nodes of the group in work at once; 0 is no limit."""
    max_unavailable: int | str = "25%"
    """Nodes of the group that may be unavailable: a number, or a share of all of them, rounded up."""
    pod_deletion: PodDeletion = PodDeletion()
    wait_for_completion: WaitForCompletion = WaitForCompletion()
    drain: Drain = Drain()

    def most_unavailable(self, total: int) -> int:
        """The limit for a group of so many nodes."""
        if isinstance(self.max_unavailable, int):
            return self.max_unavailable
        return math.ceil(total * int(self.max_unavailable.removesuffix("%")) / 100)


class BadPolicy(ValueError):
    """A policy that cannot be used.

    Args:
        problems: a sentence for each fault, beginning with the field's path.
    """

    def __init__(self, problems: tuple[str, ...]) -> None:
        more = f"; and {len(problems) - MAX_TOLD} more faults" if len(problems) > MAX_TOLD else ""
        super().__init__("; ".join(problems[:MAX_TOLD]) + more)
        self.problems = problems


def read_policy(raw: Mapping[str, Any] | None, *, auto_upgrade: bool = False) -> UpgradePolicy:
    """Reads a policy as it stands in a custom resource or a file.

    Args:
        raw: field -> value, as JSON has it; None where there is no policy at all.
        auto_upgrade: what it means when the policy does not say: true for an NVIDIADriver, false for a ClusterPolicy.

    Raises:
        BadPolicy: with all that is wrong, by field.
    """
    reader = _Reader({} if raw is None else raw, "")
    deletion, waiting, drain = (reader.part(name) for name in ("podDeletion", "waitForCompletion", "drain"))
    policy = UpgradePolicy(
        auto_upgrade=reader.flag("autoUpgrade", auto_upgrade),
        max_parallel_upgrades=reader.number("maxParallelUpgrades", 1),
        max_unavailable=reader.share("maxUnavailable", "25%"),
        pod_deletion=PodDeletion(
            deletion.flag("force", False),
            deletion.number("timeoutSeconds", 300),
            deletion.flag("deleteEmptyDir", False),
            deletion.selector("podSelector"),
            deletion.daemon_sets("park"),
        ),
        wait_for_completion=WaitForCompletion(waiting.selector("podSelector"), waiting.number("timeoutSeconds", 0)),
        drain=Drain(
            drain.flag("enable", False),
            drain.flag("force", False),
            drain.selector("podSelector"),
            drain.number("timeoutSeconds", 300),
            drain.flag("deleteEmptyDir", False),
        ),
    )
    problems = [problem for each in (reader, deletion, waiting, drain) for problem in (*each.problems, *each.unknown())]
    if problems:
        raise BadPolicy(tuple(problems))
    return policy


def written_policy(policy: UpgradePolicy) -> dict[str, Any]:
    """The policy as it would stand in a custom resource: `read_policy` gives it back."""
    deletion, waiting, drain = policy.pod_deletion, policy.wait_for_completion, policy.drain
    return {
        "autoUpgrade": policy.auto_upgrade,
        "maxParallelUpgrades": policy.max_parallel_upgrades,
        "maxUnavailable": policy.max_unavailable,
        "podDeletion": {
            "force": deletion.force,
            "timeoutSeconds": deletion.timeout_seconds,
            "deleteEmptyDir": deletion.delete_empty_dir,
            "podSelector": deletion.pod_selector.text,
            "park": list(deletion.park),
        },
        "waitForCompletion": {"podSelector": waiting.pod_selector.text, "timeoutSeconds": waiting.timeout_seconds},
        "drain": {
            "enable": drain.enable,
            "force": drain.force,
            "podSelector": drain.pod_selector.text,
            "timeoutSeconds": drain.timeout_seconds,
            "deleteEmptyDir": drain.delete_empty_dir,
        },
    }


def recorded_policy(rules: Mapping[str, Any]) -> UpgradePolicy:
    """A policy that stands in a node's record. A fleet has few, and every decision asks for one.

    Raises:
        BadPolicy: as `read_policy`.
    """
    return _recorded(_encode(rules))


_encode: Final = msgspec.json.Encoder(order="sorted").encode


@lru_cache(maxsize=256)
def _recorded(rules: bytes) -> UpgradePolicy:
    return read_policy(msgspec.json.decode(rules))


class _Reader:
    """Reads the fields of one object and remembers what is wrong with them."""

    def __init__(self, raw: object, path: str) -> None:
        self._path = path
        self._known: dict[str, None] = {}
        """In the order in which they are asked for."""
        self.problems: list[str] = []
        self._raw: Mapping[str, Any] = raw if isinstance(raw, Mapping) else {}
        if not isinstance(raw, Mapping):
            self.problems.append(f"{path.rstrip('.') or 'the policy'} is {_shown(raw)}, and has to be an object with fields of its own")

    def _value(self, name: str, default: Any) -> Any:
        self._known[name] = None
        value = self._raw.get(name)
        return default if value is None else value

    def _wrong(self, name: str, value: object, allowed: str) -> None:
        self.problems.append(f"{self._path}{name} is {_shown(value)} (allowed {allowed})")

    def part(self, name: str) -> "_Reader":
        return _Reader(self._value(name, {}), f"{self._path}{name}.")

    def flag(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if isinstance(value, bool):
            return value
        self._wrong(name, value, "are true and false")
        return default

    def number(self, name: str, default: int) -> int:
        value = self._value(name, default)
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31:
            return value
        self._wrong(name, value, "is a whole number, 0 or more")
        return default

    def share(self, name: str, default: str) -> int | str:
        value = self._value(name, default)
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31:
            return value
        if isinstance(value, str) and _SHARE.fullmatch(value):
            return value
        self._wrong(name, value, "is a whole number, 0 or more, or a share from 0% to 100%")
        return default

    def selector(self, name: str) -> Selector:
        value = self._value(name, "")
        if not isinstance(value, str):
            self._wrong(name, value, "is a label selector such as app=training,tier!=web")
            return Selector()
        if len(value) > LONGEST_SELECTOR:
            self._wrong(name, value, f"is a label selector of at most {LONGEST_SELECTOR} characters")
            return Selector()
        try:
            selector = parse_selector(value)
        except ValueError as error:
            self._wrong(name, value, f"is what kubectl --selector takes, such as app=training,tier!=web: {error}")
            return Selector()
        if whose := _never_selected(selector):
            self._wrong(name, value, f"is a label selector that does not select {whose} pods")
        return selector

    def daemon_sets(self, name: str) -> tuple[str, ...]:
        value = self._value(name, [])
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            self._wrong(name, value, "is a list of DaemonSets, each as namespace/name")
            return ()
        if sum(map(len, value)) > LONGEST_SELECTOR:
            self._wrong(name, value, f"is a list of names with at most {LONGEST_SELECTOR} characters together")
            return ()
        wrong = {each: problem for each in value if (problem := name_problem(each))}
        self.problems += [f"{self._path}{name} names {_shown(each)}: {problem}" for each, problem in wrong.items()]
        return tuple(sorted({*value} - {*wrong}))

    def unknown(self) -> list[str]:
        """Fields that nobody reads: a misspelt limit must not mean the default."""
        names = sorted(name if isinstance(name, str) else _shown(name) for name in self._raw if name not in self._known)
        found = [f"{self._path}{_cut(name)} is not known" for name in names]
        return [f"{found[0]} (known are {', '.join(self._known)})", *found[1:]] if found else []


def _never_selected(selector: Selector) -> str:
    """Whose pods a selector asks for that no upgrade takes off a node; the driver's are asked for only by what they have, not by a `!=`."""
    if selector.matches(OWN_LABELS) and any(each.key in OWN_LABELS for each in selector.requirements):
        return "this program's own"
    asked = {each.key for each in selector.requirements if each.operator in ("in", "exists")}
    return "the driver's" if any(selector.matches(labels) and asked & set(labels) for labels in DRIVER_LABELS) else ""


def _shown(value: object) -> str:
    """A value in a sentence, however long it is."""
    try:
        return _cut(repr(value))
    except ValueError:  # https://docs.python.org/3/library/stdtypes.html#integer-string-conversion-length-limitation
        return "a number of too many digits to be shown"


def _cut(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
