"""What it means when the API server does not do what it was asked: the only place that turns answers into errors.

The facts are those of Kubernetes 1.37, measured. Messages are for people: what was asked of which object, and what the
server said.
"""

import re
from typing import Final

import msgspec

from driver_manager.errors import (
    ClusterError,
    Conflict,
    EvictionBlocked,
    Forbidden,
    NotFound,
    Terminating,
    Unreachable,
)
from driver_manager.kube.calls import API_GROUPS, EVICTION, Call

EXCERPT_LENGTH: Final = 200
LONGEST_RETRY_AFTER: Final = 300.0
"""Seconds; a server that asks for more is asked sooner all the same."""

_BUDGET: Final = re.compile(r"disruption budget (\S+) ")
_DENIED: Final = re.compile(r"\bdenied (the )?request\b")
"""How admission webhooks (with "the") and admission policies speak; where a permission is missing it says "cannot"."""


class Expired(ClusterError):
    """The server no longer knows the version, or the page of a list, from which to go on: list anew."""

    transient = True


class Unserved(NotFound):
    """The API does not have the kind, as far as this answer tells: it is no answer about an object."""


class _Cause(msgspec.Struct, frozen=True):
    reason: str = ""
    message: str = ""


class _Details(msgspec.Struct, frozen=True, rename="camel"):
    causes: list[_Cause] | None = None
    retry_after_seconds: int = 0


class _Status(msgspec.Struct, frozen=True):
    """The API's own answer object for failures."""

    kind: str = ""
    message: str = ""
    code: int = 0
    details: _Details | None = None

    def cause(self, reason: str) -> str | None:
        """What the cause of that reason says, None where there is none."""
        causes = self.details.causes if self.details else None
        return next((cause.message for cause in causes or () if cause.reason == reason), None)


_status = msgspec.json.Decoder(_Status)


def refusal(call: Call, status: int, body: bytes, retry_after_header: str = "") -> ClusterError:
    """Tells what an answer that is no success means."""
    said = _read(body)
    if said is None:
        said, text = _Status(), f"{call}: status {status}: {excerpt(body)}"
        is_from_api = False
    else:
        text, is_from_api = f"{call}: {said.message or f'status {status}'}", True
    after = _retry_after(said, retry_after_header)
    if call.resource == EVICTION and is_from_api and (blocked := _blocked_eviction(call, status, said, after)):
        return blocked
    # Of a group or kind that is not served, the API server itself answers 404 without a Status.
    if status == 404 and call.may_be_unserved and not is_from_api:
        return Unserved(text, hint="the cluster has no such kind: look whether its CustomResourceDefinition is there")
    is_unsure = status in (404, 409, 410) and not is_from_api and call.resource != API_GROUPS
    if status >= 500 or status in (408, 429) or is_unsure:
        return Unreachable(text, retry_after=after)
    match status:
        case 401:
            return Forbidden(text, hint="the API server does not accept the token: it is expired, revoked, or from another cluster")
        case 403:
            return _forbidden(call, said, text)
        case 404:
            return NotFound(text)
        case 409:
            return Conflict(text)
        case 410:
            return Expired(text)
    return ClusterError(text)


def event_refusal(call: Call, body: bytes) -> ClusterError:
    """Tells what an ERROR event of a watch means: its object is the Status that a request would have got."""
    said = _read(body)
    return refusal(call, said.code if said and said.code else 500, body)


def unreadable(call: Call, status: int, body: bytes) -> Unreachable:
    """Tells of an answer that is not what was asked for: something else than the API server may stand there."""
    return Unreachable(
        f"{call}: status {status}, but the answer cannot be read: {excerpt(body)}",
        hint="look whether a proxy answers in the API server's place",
    )


def excerpt(body: bytes) -> str:
    """The beginning of a body on one line, for a message."""
    text = " ".join(body[: 4 * EXCERPT_LENGTH].decode(errors="replace").split())
    text = "".join(char if char.isprintable() else "?" for char in text)
    return text[:EXCERPT_LENGTH] or "no text"


def _read(body: bytes) -> _Status | None:
    """The Status in a body; None where it is something else: priority and fairness, and proxies, answer in text."""
    try:
        status = _status.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return status if status.kind == "Status" else None


def _retry_after(said: _Status, header: str) -> float:
    """Seconds that the server asks us to stay away. A date in the header is passed over: clocks are never compared."""
    seconds = max(said.details.retry_after_seconds if said.details else 0, int(header[:9]) if header.isdecimal() else 0)
    return float(min(max(seconds, 0), int(LONGEST_RETRY_AFTER)))


def _blocked_eviction(call: Call, status: int, said: _Status, after: float) -> EvictionBlocked | None:
    """The answers by which a budget, or an admission webhook, keeps a pod for now."""
    if "more than one PodDisruptionBudget" in said.message:
        return EvictionBlocked(
            f"{call}: {said.message}",
            final=True,
            hint="the eviction API refuses such a pod for ever: leave it one budget only",
        )
    if (budget := said.cause("DisruptionBudget")) is not None:
        found = _BUDGET.search(budget)
        return EvictionBlocked(
            f"{call}: {budget or said.message}",
            budget=found[1] if found else None,
            retry_after=after,
            hint="it goes on as soon as the budget allows one more pod to be away",
        )
    if status == 429:
        return EvictionBlocked(f"{call}: {said.message}", retry_after=after)
    if _DENIED.search(said.message):
        return EvictionBlocked(f"{call}: {said.message}", retry_after=after, hint="an admission webhook or policy refuses it")
    return None


def _forbidden(call: Call, said: _Status, text: str) -> ClusterError:
    if said.cause("NamespaceTerminating") is not None:
        return Terminating(text)
    if _DENIED.search(said.message):
        return Forbidden(text, hint="an admission webhook or policy refuses it")
    where = f"in namespace {call.namespace}" if call.namespace else "in the whole cluster"
    return Forbidden(text, hint=f"the account needs verb {call.verb} on {call.resource} {where}")
