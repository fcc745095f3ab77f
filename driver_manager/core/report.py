"""What people and other programs are told: what a run waits for, and the status annotation. All of it bounded in size."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from driver_manager.core.consumers import Action, Verdict
from driver_manager.core.plan import Plan, describe
from driver_manager.core.services import HostUse
from driver_manager.core.snapshot import Holder, HolderScan, PodView

MAX_STATUS_BYTES: Final = 2 * 1024
MAX_BLOCKERS: Final = 5
EVICTING: Final = "evicting"
"""Why a run waits while pods that it evicts are on their way."""
BLOCKED: Final = "blocked-by-budget"
"""Why a run waits while somebody does not let a pod go."""
_MAX_SENTENCE: Final = 500
_MAX_PART: Final = 120


@dataclass(frozen=True, slots=True)
class Blocker:
    """One thing that stands in the way."""

    kind: str
    """`pod`, `process`, `module`, `label`, `network-driver` or `node`."""
    name: str
    why: str
    uid: str = ""
    """Of the pod, where it is one."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """What a run waits for."""

    reason: str
    """For machines."""
    sentence: str
    """For people: what is so, and how long it may take."""
    blockers: tuple[Blocker, ...] = ()

    @property
    def text(self) -> str:
        """The sentence with the blockers by name."""
        return self.with_blockers(MAX_BLOCKERS)

    def with_blockers(self, limit: int) -> str:
        """The sentence with so many blockers by name, and how many more there are."""
        if not self.blockers:
            return self.sentence
        shown = "; ".join(f"{each.kind} {each.name} ({each.why})" for each in self.blockers[:limit])
        more = len(self.blockers) - limit
        return f"{self.sentence}: {shown}" + (f"; and {more} more" if more > 0 else "")


def pod_blockers(pods: Iterable[PodView], why: str) -> tuple[Blocker, ...]:
    """Pods as blockers, all for one reason."""
    return tuple(Blocker("pod", pod.ref, why, pod.uid) for pod in pods)


def refused_blockers(plan: Plan) -> tuple[Blocker, ...]:
    """The pods that a plan refuses to move, each with why: somebody else may be allowed to (decision 35)."""
    return tuple(Blocker("pod", each.pod.ref, each.sentence, each.pod.uid) for each in plan.verdicts if each.action is Action.REFUSE)


def holder_blockers(scan: HolderScan, used: Sequence[str], names: dict[str, str]) -> tuple[Blocker, ...]:
    """Who keeps the GPUs busy.

    Args:
        scan: the processes found.
        used: modules with users of their own.
        names: pod uid -> `namespace/name`, as far as known.
    """
    blockers = [Blocker("process", f"{each.pid} {each.command}", _holder_words(each, names), each.pod_uid or "") for each in scan.holders]
    if used and not blockers:
        blockers = [Blocker("module", name, "in use, and no process that holds it can be seen") for name in used]
    blockers += [Blocker("process", str(pid), "could not be inspected") for pid in scan.unreadable if used]
    return tuple(blockers)


def _holder_words(holder: Holder, names: dict[str, str]) -> str:
    devices = ", ".join(holder.devices[:3])
    if holder.pod_uid:
        pod = names.get(holder.pod_uid, "")
        return f"holds {devices}, of pod {pod or 'with uid ' + holder.pod_uid}"
    return f"holds {devices}, of {f'the unit {holder.unit}' if holder.unit else 'an unknown owner'}"


def status_text(*, phase: str, run: str, since: str, waiting: Waiting) -> str:
    """The status annotation: JSON of at most MAX_STATUS_BYTES, with the first blockers and how many there are."""
    shown = [{"kind": each.kind, "name": _cut(each.name), "why": _cut(each.why)} for each in waiting.blockers[:MAX_BLOCKERS]]
    for entry, each in zip(shown, waiting.blockers, strict=False):
        if each.uid:
            entry["uid"] = each.uid
    body: dict[str, Any] = {
        "phase": _cut(phase),
        "reason": _cut(waiting.reason),
        "message": waiting.sentence[:_MAX_SENTENCE],
        "since": _cut(since),
        "run": _cut(run),
        "blockers": shown,
        "blockerCount": len(waiting.blockers),
    }
    while len(text := json.dumps(body, separators=(",", ":"))) > MAX_STATUS_BYTES:
        if shown:
            shown.pop()
        else:  # letters outside ASCII take up to twelve bytes each
            body["message"] = body["message"][: len(body["message"]) // 2]
    return text


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_PART else text[: _MAX_PART - 1] + "…"


def plan_document(plan: Plan) -> dict[str, Any]:
    """A plan as plain data, for `--output json`."""
    return {
        "path": str(plan.path),
        "because": plan.because,
        "steps": [{"step": type(step).__name__, "description": describe(step)} for step in plan.steps],
        "onFailure": [{"step": type(step).__name__, "description": describe(step)} for step in plan.on_failure],
        "verdicts": [verdict_document(each) for each in plan.verdicts],
        "drainVerdicts": [verdict_document(each) for each in plan.drain_verdicts],
        "hostUses": [_host_use_document(each) for each in plan.host_uses],
        "evictions": sum(each.action in ("evict", "park") for each in plan.verdicts),
        "refusals": list(plan.refusals),
        "notes": list(plan.notes),
        "hint": plan.hint,
        "exitCode": int(plan.ends_with),
    }


def _host_use_document(use: HostUse) -> dict[str, Any]:
    return {
        "pid": use.holder.pid,
        "command": use.holder.command,
        "devices": list(use.holder.devices),
        "unit": use.unit or use.holder.unit or "",
        "action": str(use.action),
        "sentence": use.sentence,
        "setting": use.setting,
    }


def verdict_document(verdict: Verdict) -> dict[str, Any]:
    """A verdict as plain data."""
    return {
        "namespace": verdict.pod.namespace,
        "name": verdict.pod.name,
        "uid": verdict.pod.uid,
        "action": str(verdict.action),
        "reason": str(verdict.reason),
        "sentence": verdict.sentence,
        "setting": verdict.setting,
        "evidence": [str(use.evidence) for use in verdict.uses],
    }
