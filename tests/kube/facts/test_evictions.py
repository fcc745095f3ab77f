from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.kube.controlplane import Response
from tests.kube.facts.conftest import Note
from tests.kube.recorder import Object
from tests.kube.space import Space, deployment, eviction, is_marked, is_ready, pod_spec, until

pytestmark = [pytest.mark.kube, pytest.mark.deep]


class Evictions:
    """Three ready pods of a Deployment, and the calls to evict them and to set their budget."""

    def __init__(self, space: Space, pods: list[Object]) -> None:
        self.space, self.pods = space, pods
        self.budgets = f"/apis/policy/v1/namespaces/{space.name}/poddisruptionbudgets"

    async def evict(self, pod: Object, query: str = "", **options: Any) -> Response:
        """Tries to evict one pod; the answer, whatever it is."""
        return await self.space.ask("POST", f"{self.space.path}/pods/{pod['metadata']['name']}/eviction{query}", eviction(pod, **options))

    async def budget(self, name: str = "pdb", **spec: Any) -> None:
        """Creates a budget for the three pods."""
        body = {"metadata": {"name": name}, "spec": {"selector": {"matchLabels": {"app": "app"}}, **spec}}
        await self.space.do("POST", self.budgets, body, 201)

    async def change(self, **spec: Any) -> None:
        """Changes the budget."""
        await self.space.patch(f"{self.budgets}/pdb", {"spec": spec})

    async def status(self) -> Object:
        """The budget's status."""
        found: Object = (await self.space.get(f"{self.budgets}/pdb")).get("status", {})
        return found

    async def processed(self) -> Object:
        """The budget, once its status is of its spec."""

        async def is_processed() -> Any:
            got = await self.space.get(f"{self.budgets}/pdb")
            return got if got.get("status", {}).get("observedGeneration") == got["metadata"]["generation"] else None

        found: Object = await until(is_processed, "the budget's status", every=0.002)
        return found

    async def allows(self, number: int) -> None:
        """Waits until so many disruptions are allowed."""

        async def does() -> bool:
            status = await self.status()
            return status.get("disruptionsAllowed") == number and not status.get("disruptedPods")

        await until(does, f"disruptionsAllowed {number}", 30)


@pytest.fixture
async def evictions(space: Space) -> Evictions:
    """Three ready pods with the label app=app."""
    await space.do("POST", f"{space.apps}/deployments", deployment("app", 3, spec={"nodeSelector": {"space": space.name}}), 201)
    return Evictions(space, await space.ready("app=app", 3))


async def test_refusals_without_a_budget(evictions: Evictions) -> None:
    """A missing pod is 404; a wrong uid, a wrong version and a wrong name are conflicts of their own kinds."""
    pod = evictions.pods[0]
    nobody = {"metadata": {"name": "nobody", "namespace": evictions.space.name}}
    missing = await evictions.evict(nobody)
    assert (missing.status, missing.body["reason"], missing.body["message"]) == (404, "NotFound", 'pods "nobody" not found')
    wrong = await evictions.evict(pod, preconditions={"uid": "11111111-2222-3333-4444-555555555555"})
    assert (wrong.status, wrong.body["reason"]) == (409, "Conflict")
    assert "the UID in the precondition" in wrong.body["message"]
    stale = await evictions.evict(pod, preconditions={"resourceVersion": "1"})
    assert stale.status == 409
    path = f"{evictions.space.path}/pods/{pod['metadata']['name']}/eviction"
    other = await evictions.space.ask("POST", path, eviction(evictions.pods[1]))
    assert (other.status, other.body["message"]) == (400, "name in URL does not match name in Eviction object")


async def test_success(evictions: Evictions) -> None:
    """An eviction is answered 201, and the pod first gets a condition, then its mark."""
    pod = evictions.pods[0]
    done = await evictions.evict(pod)
    assert (done.status, done.body["kind"], done.body["status"], done.body["code"]) == (201, "Status", "Success", 201)
    uid = pod["metadata"]["uid"]
    await evictions.space.when(lambda kind, p: kind == "DELETED" and p["metadata"]["uid"] == uid)
    changes = [e.object for e in evictions.space.recorder.events if e.uid == uid]
    targets = [[c for c in p["status"].get("conditions", []) if c["type"] == "DisruptionTarget"] for p in changes]
    first = next(n for n, found in enumerate(targets) if found)
    assert targets[first][0]["reason"] == "EvictionByEvictionAPI"
    assert not is_marked(changes[first])
    assert is_marked(changes[first + 1])


async def test_dry_run(evictions: Evictions) -> None:
    """A dry run, in the query or in the options, asks the budget and changes nothing."""
    pod = evictions.pods[0]
    dry = await evictions.evict(pod, dryRun=["All"])
    assert (dry.status, dry.body["status"]) == (201, "Success")
    assert (await evictions.evict(pod, "?dryRun=All")).status == 201
    await asyncio.sleep(0.3)
    assert not [p for p in await evictions.space.pods("app=app") if is_marked(p)]
    await evictions.budget(minAvailable=3)
    await evictions.processed()
    assert (await evictions.evict(pod, "?dryRun=All")).status == 429


async def test_a_budget_refuses(evictions: Evictions, note: Note) -> None:
    """A full budget is 429 with its cause and without Retry-After."""
    begun = time.monotonic()
    await evictions.budget(minAvailable=3)
    early = await evictions.evict(evictions.pods[0], "?dryRun=All")
    note("right_after_pdb_create", (early.status, early.headers.get("retry-after"), early.body.get("details")))
    seen = await evictions.processed()
    note("pdb_create_to_status_ms", round((time.monotonic() - begun) * 1000))
    note("pdb_status", seen["status"])
    refused = await evictions.evict(evictions.pods[0])
    assert (refused.status, refused.body["reason"]) == (429, "TooManyRequests")
    assert refused.body["message"] == "Cannot evict pod as it would violate the pod's disruption budget."
    (cause,) = refused.body["details"]["causes"]
    assert cause == {"reason": "DisruptionBudget", "message": "The disruption budget pdb needs 3 healthy pods and has 3 currently"}
    assert "retry-after" not in refused.headers


async def test_the_apiserver_counts_for_itself(own_evictions: Evictions) -> None:
    """While the disruption controller stands still a second eviction is refused, and a spec newer than its status says when to retry."""
    evictions = own_evictions
    await evictions.budget(minAvailable=2)
    await evictions.allows(1)
    cp, (one, two, _) = evictions.space.cp, evictions.pods
    cp.kill("kube-controller-manager", signal.SIGSTOP)
    try:
        assert (await evictions.evict(one)).status == 201
        after = await evictions.status()
        assert after["disruptionsAllowed"] == 0
        assert list(after["disruptedPods"]) == [one["metadata"]["name"]]
        second = await evictions.evict(two)
        assert second.status == 429
        assert "does not allow evicting pods currently" in second.body["details"]["causes"][0]["message"]
        await evictions.change(minAvailable=0)
        stale = await evictions.evict(two)
        assert (stale.status, stale.headers["retry-after"]) == (429, "10")
        assert stale.body["details"]["retryAfterSeconds"] == 10
        assert "is still being processed by the server" in stale.body["details"]["causes"][0]["message"]
    finally:
        cp.kill("kube-controller-manager", signal.SIGCONT)
    await evictions.allows(3)
    await evictions.space.ready("app=app", 3)


@pytest.fixture
async def own_evictions(evictions: Evictions) -> AsyncIterator[Evictions]:
    """As `evictions`, for a test that makes the controllers stand still; they have caught up when it ends."""
    yield evictions
    await evictions.space.ready("app=app", 3, 30)


async def test_two_budgets(evictions: Evictions) -> None:
    """A pod under two budgets cannot be evicted at all: 500, without a reason."""
    await evictions.budget(minAvailable=0)
    await evictions.budget("second", minAvailable=0)
    two = await evictions.evict(evictions.pods[0])
    assert (two.status, two.body.get("reason")) == (500, None)
    assert two.body["message"] == "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support."


async def test_pods_that_no_budget_is_asked_for(evictions: Evictions) -> None:
    """Pending, terminal and terminating pods are evicted in spite of a full budget; grace 0 ends one that hangs."""
    space, labels = evictions.space, {"app": "app"}
    node = space.nodes[0]
    waits = await space.create_pod("waits", pod_spec(nodeSelector={"no": "such"}), labels=labels)
    over = pod_spec(nodeName=node, restartPolicy="Never")
    over = await space.create_pod("over", over, labels=labels, annotations={"kubelet.sim/finish": "failed"})
    hangs = pod_spec(nodeName=node)
    hangs = await space.create_pod("hangs", hangs, labels=labels, annotations={"kubelet.sim/stop-after": "never"})
    await space.when(lambda kind, p: p["metadata"]["name"] == "hangs" and is_ready(p))
    await space.when(lambda kind, p: p["metadata"]["name"] == "over" and p["status"]["phase"] == "Failed")
    await evictions.budget(minAvailable=20)
    await evictions.processed()
    assert (await evictions.evict(evictions.pods[0])).status == 429
    assert (await evictions.evict(waits)).status == 201
    assert (await evictions.evict(over)).status == 201
    await space.delete_pod("hangs")
    assert (await evictions.evict(hangs)).status == 201
    assert "hangs" in [p["metadata"]["name"] for p in await space.pods()]
    assert (await evictions.evict(hangs, gracePeriodSeconds=0)).status == 201
    await space.when(lambda kind, p: kind == "DELETED" and p["metadata"]["name"] == "hangs")


async def test_pods_that_are_not_ready(evictions: Evictions) -> None:
    """An unready pod goes while the budget is met, stays when it is broken, and goes again under AlwaysAllow."""
    space = evictions.space
    spec = pod_spec(nodeName=space.nodes[0])
    sick = await space.create_pod("sick", spec, labels={"app": "app"}, annotations={"kubelet.sim/ready": "never"})
    await space.when(lambda kind, p: p["metadata"]["name"] == "sick" and p["status"]["phase"] == "Running")
    await evictions.budget(minAvailable=3)
    await evictions.processed()
    assert (await evictions.evict(sick, "?dryRun=All")).status == 201
    await evictions.change(minAvailable=4)
    await evictions.processed()
    assert (await evictions.evict(sick, "?dryRun=All")).status == 429
    await evictions.change(unhealthyPodEvictionPolicy="AlwaysAllow")
    await evictions.processed()
    assert (await evictions.evict(sick)).status == 201
