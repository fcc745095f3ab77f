from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.kube.controlplane import MERGE
from tests.kube.facts.conftest import Note
from tests.kube.space import Space, eviction

pytestmark = pytest.mark.kube
REVIEWS = "/apis/authorization.k8s.io/v1"


@pytest.fixture
async def token(space: Space, stock_account: str) -> str:
    """A token of the stock driver account."""
    return await asyncio.to_thread(space.cp.service_account_token, space.name, stock_account)


async def test_what_is_allowed(space: Space, token: str) -> None:
    """The stock role reads nodes, pods, claims and single DaemonSets, patches nodes and evicts pods."""
    await space.daemon_set("drv")
    pods = await space.ready("app=drv", 3)
    pod = f"{space.path}/pods/{pods[0]['metadata']['name']}"
    for path in (space.node_path(0), "/api/v1/pods", pod, f"{space.apps}/daemonsets/drv", "/apis/resource.k8s.io/v1/resourceclaims"):
        await space.do("GET", path, token=token)
    await space.do("PATCH", space.node_path(0), {"metadata": {"annotations": {"a": "b"}}}, token=token, content_type=MERGE)
    await space.do("POST", f"{pod}/eviction", eviction(pods[0]), 201, token=token)
    for path in ("/version", "/api", "/apis", "/openapi/v3"):  # every account may call these
        await space.do("GET", path, token=token)


async def test_what_is_refused(space: Space, token: str, stock_account: str, note: Note) -> None:
    """Everything else is 403 before it is 404, and the message says who may not do what."""
    tries: tuple[tuple[str, str, Any], ...] = (
        ("DELETE", f"{space.path}/pods/x", None),
        ("PATCH", f"{space.path}/pods/x", {}),
        ("GET", f"{space.apps}/daemonsets", None),
        ("PATCH", f"{space.apps}/daemonsets/drv", {}),
        ("GET", f"{space.apps}/replicasets/x", None),
        ("POST", f"{space.path}/events", {}),
        ("PATCH", f"{space.node_path(0)}/status", {}),
        ("GET", f"{space.path}/secrets", None),
        ("GET", space.path, None),
        ("GET", "/apis/policy/v1/poddisruptionbudgets", None),
        ("GET", "/apis/resource.k8s.io/v1/resourceclaims?watch=true&timeoutSeconds=1", None),  # may be listed, not watched
        ("GET", "/apis/resource.k8s.io/v1/resourceslices", None),
        ("GET", "/apis/resource.k8s.io/v1/deviceclasses", None),
        ("GET", "/apis/coordination.k8s.io/v1/leases", None),
        ("GET", "/apis/nvidia.com/v1/clusterpolicies", None),  # a kind that does not even exist
        ("GET", "/apis/node.k8s.io/v1/runtimeclasses", None),
        ("GET", "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies", None),
    )
    messages: dict[str, str] = {}
    for method, path, body in tries:
        kind = MERGE if method == "PATCH" else "application/json"
        answer = await space.ask(method, path, body, token=token, content_type=kind)
        assert (answer.status, answer.body["reason"]) == (403, "Forbidden"), (path, answer)
        messages[f"{method} {path.removeprefix(space.path)}"] = answer.body["message"]
    user = f'User "system:serviceaccount:{space.name}:{stock_account}"'
    where = f'in the namespace "{space.name}"'
    assert messages["DELETE /pods/x"] == f'pods "x" is forbidden: {user} cannot delete resource "pods" in API group "" {where}'
    assert messages["GET /apis/policy/v1/poddisruptionbudgets"].endswith("at the cluster scope")
    assert messages[f"GET {space.apps}/daemonsets"].startswith("daemonsets.apps is forbidden")
    assert 'cannot patch resource "nodes/status"' in messages[f"PATCH {space.node_path(0)}/status"]
    note("messages", messages)


async def test_a_wrong_token_is_401(space: Space) -> None:
    """Who is not known at all gets a Status too."""
    answer = await space.ask("GET", "/api/v1/nodes", token="wrong")
    assert (answer.status, answer.body["reason"], answer.body["message"]) == (401, "Unauthorized", "Unauthorized")


async def test_asking_beforehand(space: Space, token: str) -> None:
    """One SelfSubjectRulesReview lists every rule; SelfSubjectAccessReviews answer one by one, with the role that allows."""

    async def may(**attributes: str) -> Any:
        review = {"spec": {"resourceAttributes": {"namespace": space.name, **attributes}}}
        return (await space.do("POST", f"{REVIEWS}/selfsubjectaccessreviews", review, 201, token=token))["status"]

    assert await may(verb="delete", resource="pods") == {"allowed": False}
    allowed = await may(verb="create", resource="pods", subresource="eviction")
    assert allowed["allowed"]
    assert "ClusterRole" in allowed["reason"]
    wish = {"spec": {"namespace": space.name}}
    rules = (await space.do("POST", f"{REVIEWS}/selfsubjectrulesreviews", wish, 201, token=token))["status"]
    assert rules["incomplete"] is False
    assert {"verbs": ["create"], "apiGroups": [""], "resources": ["pods/eviction"]} in rules["resourceRules"]


async def test_the_audit_log_counts(space: Space, token: str, stock_account: str) -> None:
    """A request is in the audit log before it is answered, under the account's name."""
    user, mark = f"system:serviceaccount:{space.name}:{stock_account}", space.cp.audit_mark()
    await space.do("GET", space.node_path(0), token=token)
    assert space.cp.audit_counts(mark, user) == {(user, "get", "nodes", 200): 1}
