"""What the agent on a node says it waits for, as the controller reads it: the node's status annotation.

Anybody who may write to the node can write it, so it is bounded, never believed, and never an order: a pod that it names counts as a user
of the driver, and what becomes of such a pod the table of verdicts says (`core.consumers`), from the pod itself. Everything else in it is
shown to people.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from driver_manager.core.report import BLOCKED, EVICTING, MAX_BLOCKERS, MAX_STATUS_BYTES
from driver_manager.core.rollout_states import State
from driver_manager.core.situation import Situation, Stay, Work
from driver_manager.names import STATUS

OF_PODS: Final = frozenset({"pod", "process"})
"""Kinds of blockers whose uid is a pod's."""
ITS_OWN: Final = frozenset({EVICTING, BLOCKED})
"""Reasons of waits for pods that the agent evicts itself: by two, a pod would be evicted twice, and its budget asked twice as often."""
LONGEST_UID: Final = 64
LONGEST_WORDS: Final = 200


@dataclass(frozen=True, slots=True)
class AgentReport:
    """One report."""

    message: str = ""
    pods: Mapping[str, str] = field(default_factory=dict)
    """Pod uid -> why it stands in the way, in the agent's words; without those that the agent evicts itself."""
    others: tuple[str, ...] = ()
    """What else does, for people: processes of no pod, modules, labels, pods that go."""
    problem: str = ""
    """What is wrong with it, where it cannot be read."""


def read_report(text: str | None) -> AgentReport:
    """Reads the annotation's value."""
    if not text:
        return AgentReport()
    if len(text.encode()) > MAX_STATUS_BYTES:
        return AgentReport(problem=f"it is longer than {MAX_STATUS_BYTES} bytes")
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError):
        return AgentReport(problem="it is not JSON")
    if not isinstance(raw, dict):
        return AgentReport(problem="it is not an object")
    listed = raw.get("blockers")
    entries = [each for each in listed if isinstance(each, dict)][:MAX_BLOCKERS] if isinstance(listed, list) else []
    pods: dict[str, str] = {}
    others: list[str] = []
    are_its_own = _words(raw.get("reason")) in ITS_OWN
    for entry in entries:
        kind, name, why, uid = (_words(entry.get(key)) for key in ("kind", "name", "why", "uid"))
        if kind in OF_PODS and 0 < len(uid) <= LONGEST_UID and not are_its_own:
            pods[uid] = f"{kind} {name} ({why})"
        else:
            others.append(f"{kind} {name} ({why})")
    return AgentReport(_words(raw.get("message")), pods, tuple(others))


def _words(value: Any) -> str:
    """Text on one line that can be written anywhere: a lone surrogate, which JSON can name, is no character."""
    text = value[:LONGEST_WORDS] if isinstance(value, str) else ""
    return " ".join(text.encode(errors="replace").decode().split())


def report_of(situation: Situation) -> AgentReport | None:
    """What the agent in the node's new driver pod says; None where none can be waiting.

    A status stays on the node after a failed run, so it counts only while a driver pod is there that is not ready.
    """
    text, driver = situation.node.annotations.get(STATUS), situation.driver
    if text is None or situation.state is not State.POD_RESTART or driver is None or not driver.is_bound or driver.is_ready:
        return None
    return read_report(text)


def with_report(situation: Situation, stay: Stay | None) -> Stay | None:
    """A wait for the new driver, with what its agent waits for, and with the pods that it names to be seen to."""
    report = report_of(situation) if stay is not None and stay.work is Work.NOTHING else None
    if stay is None or report is None:
        return stay
    if report.problem:
        return replace(stay, sentence=f"{stay.sentence}; its agent's status cannot be read: {report.problem}")
    said = [*report.pods.values(), *report.others]
    if not said and not report.message:
        return stay
    freeing = situation.freeing
    refused = [f"not to be freed from here: {freeing.failure}"] if freeing is not None and freeing.failure else []
    sentence = "; ".join([f"{stay.sentence}; its agent says: {report.message}", *said, *refused])
    return replace(stay, sentence=sentence, work=Work.FREE_REPORTED if report.pods else stay.work)
