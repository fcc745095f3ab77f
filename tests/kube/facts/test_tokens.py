from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from tests.kube.controlplane import MERGE, Response
from tests.kube.facts.conftest import Note
from tests.kube.recorder import Object
from tests.kube.space import Space, until

pytestmark = [pytest.mark.kube, pytest.mark.deep]
KEY = "authentication.kubernetes.io/node-name"
ADMISSION = "/apis/admissionregistration.k8s.io/v1"


@pytest.fixture
async def pod(space: Space, stock_account: str) -> Object:
    """A pod of the driver's account on the first node."""
    await space.daemon_set("drv", spec={"serviceAccountName": stock_account})
    await space.ready("app=drv", 3)
    return await space.pod_on(0, "app=drv")


@pytest.fixture
async def own_node_only(space: Space, stock_account: str) -> AsyncIterator[None]:
    """A policy that lets the account change the node of its token only."""
    name, account = f"own-node-{space.name}", f"system:serviceaccount:{space.name}:{stock_account}"
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["UPDATE"], "resources": ["nodes"]}
    policy = {
        "metadata": {"name": name},
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {"resourceRules": [rule]},
            "matchConditions": [{"name": "the-driver", "expression": f"request.userInfo.username == '{account}'"}],
            "variables": [{"name": "node", "expression": f"request.userInfo.extra[?'{KEY}'].orValue([])"}],
            "validations": [
                {
                    "expression": "variables.node == [object.metadata.name]",
                    "reason": "Forbidden",
                    "message": "a driver pod may change its own node only",
                }
            ],
        },
    }
    binding = {"metadata": {"name": name}, "spec": {"policyName": name, "validationActions": ["Deny"]}}
    await space.do("POST", f"{ADMISSION}/validatingadmissionpolicies", policy, 201)
    await space.do("POST", f"{ADMISSION}/validatingadmissionpolicybindings", binding, 201)
    yield
    await space.do("DELETE", f"{ADMISSION}/validatingadmissionpolicybindings/{name}")
    await space.do("DELETE", f"{ADMISSION}/validatingadmissionpolicies/{name}")


async def patched(space: Space, number: int, token: str) -> Response:
    """The answer to a change of one node with a token."""
    change = {"metadata": {"labels": {"touched": "yes"}}}
    return await space.ask("PATCH", f"{space.node_path(number)}?dryRun=All", change, token=token, content_type=MERGE)


async def test_a_bound_token_names_its_pod_and_node(space: Space, pod: Object, stock_account: str) -> None:
    """The server tells the holder of a pod's token which pod and node it is of; an unbound one tells neither."""
    prefix = "authentication.kubernetes.io/"
    extras = []
    for bound_to in (pod, None):
        token = await asyncio.to_thread(space.cp.service_account_token, space.name, stock_account, pod=bound_to)
        who = await space.do("POST", "/apis/authentication.k8s.io/v1/selfsubjectreviews", {}, 201, token=token)
        extras.append(who["status"]["userInfo"]["extra"])
    bound, free = extras
    assert bound[f"{prefix}node-name"] == [space.nodes[0]]
    assert bound[f"{prefix}pod-name"] == [pod["metadata"]["name"]]
    assert bound[f"{prefix}pod-uid"] == [pod["metadata"]["uid"]]
    assert bound[f"{prefix}node-uid"] == [(await space.node())["metadata"]["uid"]]
    assert set(free) == {f"{prefix}credential-id"}


@pytest.mark.slow
@pytest.mark.usefixtures("own_node_only")
async def test_a_token_may_patch_its_own_node_only(space: Space, pod: Object, stock_account: str, note: Note) -> None:
    """A policy reads the node's name from the token; the token dies with its pod, within the ten seconds of a cache."""
    bound = await asyncio.to_thread(space.cp.service_account_token, space.name, stock_account, pod=pod)
    free = await asyncio.to_thread(space.cp.service_account_token, space.name, stock_account)

    async def is_enforced() -> bool:
        return (await patched(space, 1, bound)).status == 403

    await until(is_enforced, "the policy to work")
    denied = await patched(space, 1, bound)
    name = f"own-node-{space.name}"
    assert denied.body["message"] == (
        f"nodes \"{space.nodes[1]}\" is forbidden: ValidatingAdmissionPolicy '{name}' with binding '{name}' denied request: "
        "a driver pod may change its own node only"
    )
    assert (await patched(space, 0, bound)).status == 200
    assert (await patched(space, 0, free)).status == 403  # no node in the token
    await space.delete_pod(pod["metadata"]["name"], "?gracePeriodSeconds=0")

    async def is_void() -> bool:
        return (await patched(space, 0, bound)).status == 401

    begun = time.monotonic()
    await until(is_void, "the token to die with its pod", 30)
    note("pod_gone_to_token_401_ms", round((time.monotonic() - begun) * 1000))
