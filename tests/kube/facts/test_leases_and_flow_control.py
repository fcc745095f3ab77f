from __future__ import annotations

import asyncio
import datetime
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from kubernetes.aio import client

from tests.kube.controlplane import MERGE
from tests.kube.facts.conftest import Note
from tests.kube.space import Space, until

pytestmark = [pytest.mark.kube, pytest.mark.deep]
FLOW = "/apis/flowcontrol.apiserver.k8s.io/v1"
LEASES = "/apis/coordination.k8s.io/v1/namespaces"


async def test_leases(space: Space, api: client.ApiClient) -> None:
    """A lease is an object like others: of two writers with one version one wins; times have microseconds; no zero duration."""
    leases = client.CoordinationV1Api(api)
    now = datetime.datetime.now(datetime.UTC)
    spec = client.V1LeaseSpec(holder_identity="a", lease_duration_seconds=15, acquire_time=now, renew_time=now, lease_transitions=0)
    await leases.create_namespaced_lease(space.name, client.V1Lease(metadata=client.V1ObjectMeta(name="l"), spec=spec))
    one: Any = await leases.read_namespaced_lease("l", space.name)
    two: Any = await leases.read_namespaced_lease("l", space.name)
    one.spec.holder_identity, two.spec.holder_identity = "b", "c"
    await leases.replace_namespaced_lease("l", space.name, one)
    with pytest.raises(client.ApiException) as caught:
        await leases.replace_namespaced_lease("l", space.name, two)
    assert caught.value.status == 409
    path = f"{LEASES}/{space.name}/leases/l"
    assert re.fullmatch(r"[\d-]+T[\d:]+\.\d{6}Z", (await space.get(path))["spec"]["renewTime"])
    assert (await space.ask("PATCH", path, {"spec": {"leaseDurationSeconds": 0}}, content_type=MERGE)).status == 422


async def test_each_node_has_a_lease(space: Space) -> None:
    """The simulated kubelet renews one lease per node, which belongs to the node."""
    path = f"{LEASES}/kube-node-lease/leases/{space.nodes[0]}"
    await until(lambda: space.has_status(path, 200), "the node's lease")
    (owner,) = (await space.get(path))["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("Node", (await space.node())["metadata"]["uid"])


@pytest.fixture
async def token(space: Space, stock_account: str) -> str:
    """A token of the stock driver account."""
    return await asyncio.to_thread(space.cp.service_account_token, space.name, stock_account)


async def test_answers_name_their_flow(space: Space, token: str) -> None:
    """Every answer names its flow schema and level; service accounts are in workload-low, and no admin is."""
    names = {
        item["metadata"]["uid"]: item["metadata"]["name"]
        for kind in ("flowschemas", "prioritylevelconfigurations")
        for item in (await space.get(f"{FLOW}/{kind}"))["items"]
    }

    async def flow(**who: str) -> list[str]:
        answer = await space.ask("GET", "/api/v1/nodes", **who)
        assert answer.headers["audit-id"]
        return [names[answer.headers[f"x-kubernetes-pf-{kind}-uid"]] for kind in ("flowschema", "prioritylevel")]

    assert await flow(token=token) == ["service-accounts", "workload-low"]
    assert await flow() == ["exempt", "exempt"]


@pytest.fixture
async def no_seats(space: Space, stock_account: str) -> AsyncIterator[None]:
    """A priority level without seats, for the stock account of this test."""
    name = f"none-{space.name}"
    limited = {"nominalConcurrencyShares": 0, "lendablePercent": 0, "borrowingLimitPercent": 0, "limitResponse": {"type": "Reject"}}
    level = {"metadata": {"name": name}, "spec": {"type": "Limited", "limited": limited}}
    subject = {"kind": "ServiceAccount", "serviceAccount": {"namespace": space.name, "name": stock_account}}
    all_of_it = {"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"], "clusterScope": True, "namespaces": ["*"]}
    rule = {"subjects": [subject], "resourceRules": [all_of_it]}
    spec = {"priorityLevelConfiguration": {"name": name}, "matchingPrecedence": 100, "rules": [rule]}
    await space.do("POST", f"{FLOW}/prioritylevelconfigurations", level, 201)
    await space.do("POST", f"{FLOW}/flowschemas", {"metadata": {"name": name}, "spec": spec}, 201)
    yield
    for kind in ("flowschemas", "prioritylevelconfigurations"):
        await space.do("DELETE", f"{FLOW}/{kind}/{name}")


@pytest.mark.usefixtures("no_seats")
async def test_shed_load(space: Space, token: str, note: Note) -> None:
    """A level without seats answers 429 in plain text, with Retry-After: not every 429 is a Status."""
    begun = time.monotonic()

    async def shed() -> Any:  # a level without shares still serves one request at a time, so it takes several at once
        answers = await asyncio.gather(*(space.ask("GET", "/api/v1/nodes", token=token) for _ in range(12)))
        return next((got for got in answers if got.status == 429), None)

    got = await until(shed, "the level to work", 30)
    note("level_create_to_enforced_ms", round((time.monotonic() - begun) * 1000))
    assert got.headers["retry-after"] == "1"
    assert got.headers["content-type"].startswith("text/plain")
    assert got.body.strip() == "Too many requests, please try again later."
