from __future__ import annotations

import json
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from driver_manager.core.snapshot import PodView
from driver_manager.errors import ClusterError, Conflict, EvictionBlocked, Forbidden, NotFound, Terminating, Unreachable
from driver_manager.kube import calls
from driver_manager.kube.refusals import Expired, event_refusal, refusal, unreadable

GET = calls.get_node("gpu-1")
LIST = calls.list_pods("gpu-1")
EVICT = calls.evict_pod(PodView(namespace="default", name="p", uid="u"), dry_run=False, grace_seconds=None)
BUDGET = "Cannot evict pod as it would violate the pod's disruption budget."
TWO_BUDGETS = "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support."


def said(message: str, **details: Any) -> bytes:
    return json.dumps({"kind": "Status", "status": "Failure", "message": message, "details": details}).encode()


def because(reason: str, message: str, **details: Any) -> bytes:
    return said(BUDGET, causes=[{"reason": reason, "message": message}], **details)


@pytest.mark.parametrize(
    ("call", "status", "body", "kind"),
    [
        (GET, 400, said("bad"), ClusterError),
        (GET, 401, said("Unauthorized"), Forbidden),
        (GET, 403, said('nodes "gpu-1" is forbidden: User "x" cannot get resource "nodes"'), Forbidden),
        (GET, 403, b"<html>the firewall says no</html>", Forbidden),
        (GET, 404, said('nodes "gpu-1" not found'), NotFound),
        (GET, 408, b"", Unreachable),
        (GET, 409, said("the object has been modified"), Conflict),
        (LIST, 410, said("The provided continue parameter is too old"), Expired),
        (GET, 422, said("Invalid value"), ClusterError),
        (GET, 429, b"Too many requests, please try again later.\n", Unreachable),
        (GET, 429, said("slow down"), Unreachable),
        (EVICT, 429, b"Too many requests, please try again later.\n", Unreachable),
        (EVICT, 429, because("DisruptionBudget", "The disruption budget pdb needs 3 healthy pods and has 3 currently"), EvictionBlocked),
        (EVICT, 429, said('admission webhook "guard" denied the request: not now'), EvictionBlocked),
        (EVICT, 403, said('admission webhook "guard" denied the request: not now'), EvictionBlocked),
        (EVICT, 403, said("pods \"p\" is forbidden: ValidatingAdmissionPolicy 'P' with binding 'B' denied request: no"), EvictionBlocked),
        (EVICT, 403, because("NamespaceTerminating", "namespace default is being terminated"), Terminating),
        (EVICT, 403, said('User "x" cannot create resource "pods/eviction"'), Forbidden),
        (EVICT, 404, said('pods "p" not found'), NotFound),
        (EVICT, 409, said("the UID in the precondition (a) does not match the UID in record (b)"), Conflict),
        (EVICT, 500, said(TWO_BUDGETS), EvictionBlocked),
        (EVICT, 500, said("Internal error occurred: failed calling webhook"), Unreachable),
        (GET, 500, b"", Unreachable),
        (GET, 502, b"<html>bad gateway</html>", Unreachable),
        (GET, 503, said("apiserver not ready"), Unreachable),
        (LIST, 504, because("ResourceVersionTooLarge", "Too large resource version"), Unreachable),
        (GET, 418, b"[1, 2", ClusterError),
    ],
)
def test_each_refusal_has_one_meaning(call: calls.Call, status: int, body: bytes, kind: type[ClusterError]) -> None:
    """Status, reason and text decide which of our errors an answer is."""
    error = refusal(call, status, body)
    assert type(error) is kind
    assert str(call) in error.message


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("The disruption budget pdb needs 3 healthy pods and has 3 currently", "pdb"),
        ("The disruption budget a-b.c is still being processed by the server.", "a-b.c"),
        ("The disruption budget x does not allow evicting pods currently", "x"),
        ("something new", None),
    ],
)
def test_a_budget_is_named(text: str, budget: str | None) -> None:
    """The budget's name comes from the cause, and what it says is kept for people, numbers included."""
    error = refusal(EVICT, 429, because("DisruptionBudget", text))
    assert isinstance(error, EvictionBlocked)
    assert (error.budget, error.final) == (budget, False)
    assert text in error.message


def test_two_budgets_are_final() -> None:
    """No wait helps a pod with two budgets."""
    error = refusal(EVICT, 500, said(TWO_BUDGETS))
    assert isinstance(error, EvictionBlocked)
    assert error.final


@pytest.mark.parametrize(
    ("seconds", "header", "expected"), [(10, "", 10), (0, "7", 7), (3, "7", 7), (0, "Wed, 21 Oct 2026 07:28:00 GMT", 0), (0, "99999", 300)]
)
def test_retry_after_is_kept_within_bounds(seconds: int, header: str, expected: float) -> None:
    """The larger of body and header counts, a date does not, and nobody sends us away for hours."""
    error = refusal(EVICT, 429, because("DisruptionBudget", "is still being processed", retryAfterSeconds=seconds), header)
    assert isinstance(error, EvictionBlocked)
    assert error.retry_after == expected


def test_a_missing_permission_is_named() -> None:
    """Verb and resource are in the hint, as a role would spell them."""
    error = refusal(EVICT, 403, said('User "x" cannot create resource "pods/eviction"'))
    assert error.hint == "the account needs verb create on pods/eviction in namespace default"
    assert "in the whole cluster" in refusal(GET, 403, said("User cannot get")).hint


def test_a_policy_is_no_missing_permission() -> None:
    """What an admission policy refuses is not cured by a role."""
    assert "admission" in refusal(GET, 403, said("admission webhook denied the request: no")).hint


def test_an_unreadable_answer_is_quoted_in_short() -> None:
    """Two hundred characters on one line are enough to see that a proxy answered."""
    message = unreadable(GET, 200, b"<html>\n\x00" + b"x" * 100_000).message
    assert "status 200" in message
    assert len(message) < 400
    assert message.isprintable()


@pytest.mark.parametrize(("code", "kind"), [(410, Expired), (403, Forbidden), (500, Unreachable), (0, Unreachable)])
def test_an_error_event_means_what_the_answer_would(code: int, kind: type[ClusterError]) -> None:
    """The object of an ERROR line is a Status."""
    body = json.dumps({"kind": "Status", "code": code, "message": "too old resource version"}).encode()
    assert type(event_refusal(LIST, body)) is kind


@given(status=st.integers(300, 599), body=st.binary(max_size=300), header=st.text(max_size=10))
def test_no_answer_is_too_odd(status: int, body: bytes, header: str) -> None:
    """Whatever comes back becomes one of our errors."""
    for call in (GET, LIST, EVICT):
        assert isinstance(refusal(call, status, body, header), ClusterError)
    assert isinstance(event_refusal(LIST, body), ClusterError)
