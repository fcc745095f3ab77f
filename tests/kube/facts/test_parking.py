"""Ways to keep a third-party DaemonSet off one node without touching the DaemonSet.

A policy cannot look up the pod's Node, so what is parked comes to it as a parameter: the parked Nodes themselves (chosen by label, owners
in an annotation), or one ConfigMap.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import itertools
import time
from collections.abc import AsyncIterator
from typing import Any, Literal

import pytest

from tests.kube.controlplane import ControlPlane, Response
from tests.kube.facts.conftest import Note
from tests.kube.recorder import Object
from tests.kube.space import Space, eviction, is_ready, node_of, pod_spec, until

pytestmark = [pytest.mark.kube, pytest.mark.deep]
Source = Literal["node", "config-map"]
ADMISSION = "/apis/admissionregistration.k8s.io/v1"
PARKED = "nvidia.com/gpu-driver-manager.parked"
DAEMON_NODE = (  # the node a DaemonSet's pod is for, before it is bound
    "object.spec.?affinity.?nodeAffinity.?requiredDuringSchedulingIgnoredDuringExecution.?nodeSelectorTerms"
    ".orValue([]).map(t, t.?matchFields.orValue([]))"
    ".filter(f, f.size() == 1 && f[0].key == 'metadata.name').map(f, f[0].values[0])"
)
OWNER = (
    "object.metadata.?ownerReferences.orValue([])"
    ".filter(o, o.?controller.orValue(false) && o.kind == 'DaemonSet').map(o, object.metadata.namespace + '/' + o.name)"
)
CHOSEN_BY_NODE = (
    "variables.node == [params.metadata.name] && "
    f"variables.owner.exists(o, o in params.metadata.?annotations[?'{PARKED}'].orValue('').split(','))"
)
CHOSEN_BY_CONFIG_MAP = (
    "variables.node.exists(n, n in params.?data.orValue({}) && variables.owner.exists(o, o in params.data[n].split(',')))"
)
GATE = f'Object{{spec: Object.spec{{schedulingGates: [Object.spec.schedulingGates{{name: "{PARKED}"}}]}}}}'


def policy_base(source: Source) -> Object:
    """What a denying and a gating policy have in common."""
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    of_a_daemonset = "object.metadata.?ownerReferences.orValue([]).exists(o, o.kind == 'DaemonSet')"
    return {
        "failurePolicy": "Ignore",  # a broken expression must not stop all DaemonSets
        "paramKind": {"apiVersion": "v1", "kind": "Node" if source == "node" else "ConfigMap"},
        "matchConstraints": {"resourceRules": [rule]},
        "matchConditions": [{"name": "of-a-daemonset", "expression": of_a_daemonset}],
        "variables": [{"name": "node", "expression": DAEMON_NODE}, {"name": "owner", "expression": OWNER}],
    }


def denying(source: Source) -> Object:
    """The spec of a ValidatingAdmissionPolicy that refuses the pods of parked DaemonSets."""
    parked = CHOSEN_BY_NODE if source == "node" else CHOSEN_BY_CONFIG_MAP
    says = "'parked for a driver upgrade on node ' + variables.node[0]"
    return policy_base(source) | {"validations": [{"expression": f"!({parked})", "reason": "Forbidden", "messageExpression": says}]}


def gating() -> Object:
    """The spec of a MutatingAdmissionPolicy that gates the pods of parked DaemonSets."""
    change = {"expression": f"({CHOSEN_BY_NODE}) ? {GATE} : Object{{}}"}
    mutation = {"patchType": "ApplyConfiguration", "applyConfiguration": change}
    return policy_base("node") | {"reinvocationPolicy": "Never", "mutations": [mutation]}


def daemon_pod(owner: Object, node: str) -> Object:
    """A pod as the DaemonSet controller would create it, to try an admission with."""
    meta = owner["metadata"]
    reference = {"apiVersion": "apps/v1", "kind": "DaemonSet", "name": meta["name"], "uid": meta["uid"], "controller": True}
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}}
    made = {"generateName": "try-", "labels": {"try": "it"}, "ownerReferences": [reference]}
    return {"metadata": made, "spec": pod_spec(affinity=affinity)}


class Parking:
    """Parks a DaemonSet on nodes, and asks the apiserver whether that works yet."""

    def __init__(self, space: Space, source: Source, owner: Object) -> None:
        self.space, self.source, self.owner = space, source, owner
        self.name = f"parking-{space.name}"

    @contextlib.asynccontextmanager
    async def in_force(self, kind: str, spec: Object, **binding: Any) -> AsyncIterator[float]:
        """The policy and its binding for the length of a block; gives the time of their creation."""
        if self.source == "node":
            ref: Object = {"selector": {"matchExpressions": [{"key": PARKED, "operator": "Exists"}]}}
        else:
            ref = {"name": self.name, "namespace": self.space.name}
        bound = {"policyName": self.name, "paramRef": ref | {"parameterNotFoundAction": "Allow"}, **binding}
        begun, meta = time.monotonic(), {"name": self.name}
        await self.space.do("POST", f"{ADMISSION}/{kind}policies", {"metadata": meta, "spec": spec}, 201)
        await self.space.do("POST", f"{ADMISSION}/{kind}policybindings", {"metadata": meta, "spec": bound}, 201)
        try:
            yield begun
        finally:
            await self.space.do("DELETE", f"{ADMISSION}/{kind}policybindings/{self.name}")
            await self.space.do("DELETE", f"{ADMISSION}/{kind}policies/{self.name}")

    async def park(self, number: int) -> None:
        """Parks the DaemonSet on a node, beside another one. One patch."""
        await self._set(number, f"x/y,{self.space.name}/{self.owner['metadata']['name']}")

    async def unpark(self, number: int) -> None:
        """Un-parks all there. One patch."""
        await self._set(number, None)

    async def _set(self, number: int, owners: str | None) -> None:
        if self.source == "node":
            label = "true" if owners else None
            await self.space.patch_node(number, {"metadata": {"labels": {PARKED: label}, "annotations": {PARKED: owners}}})
        else:
            await self.space.patch(f"{self.space.path}/configmaps/{self.name}", {"data": {self.space.nodes[number]: owners}})

    async def tried(self, number: int) -> Response:
        """The answer to a pod of the DaemonSet for that node."""
        pod = daemon_pod(self.owner, self.space.nodes[number])
        return await self.space.ask("POST", f"{self.space.path}/pods?dryRun=All", pod)

    async def is_denied(self, number: int) -> bool:
        """Whether such a pod is refused."""
        return (await self.tried(number)).status == 403

    async def is_gated(self, number: int) -> bool:
        """Whether such a pod is let in, but not to be scheduled."""
        return bool((await self.tried(number)).body["spec"].get("schedulingGates"))

    async def evict(self, number: int) -> float:
        """Evicts the DaemonSet's pod on a node and waits until it is gone; the time before."""
        pod = await self.space.pod_on(number, "app=agent")
        begun, uid = time.monotonic(), pod["metadata"]["uid"]
        await self.space.do("POST", f"{self.space.path}/pods/{pod['metadata']['name']}/eviction", eviction(pod), 201)
        await self.space.when(lambda kind, p: kind == "DELETED" and p["metadata"]["uid"] == uid, begun)
        return begun

    async def ready_on(self, number: int, since: float, timeout: float = 20.0) -> float:
        """Seconds from `since` until a pod there is Ready."""
        node = self.space.nodes[number]
        at, _ = await self.space.when(lambda kind, p: kind != "DELETED" and is_ready(p) and node_of(p) == node, since, timeout)
        return at - since

    async def replaced(self, number: int, timeout: float = 20.0) -> float:
        """Evicts the pod on a node; the seconds until a successor is Ready."""
        pod = await self.space.pod_on(number, "app=agent")
        begun, uid, node = time.monotonic(), pod["metadata"]["uid"], self.space.nodes[number]
        await self.space.do("POST", f"{self.space.path}/pods/{pod['metadata']['name']}/eviction", eviction(pod), 201)
        at, _ = await self.space.when(lambda kind, p: is_ready(p) and node_of(p) == node and p["metadata"]["uid"] != uid, begun, timeout)
        return at - begun

    def creations(self, mark: int) -> list[Object]:
        """The DaemonSet controller's tries to create a pod here since then."""
        events = self.space.cp.audit(mark, "system:serviceaccount:kube-system:daemon-set-controller")
        return [
            e
            for e in events
            if e["verb"] == "create" and e["objectRef"]["resource"] == "pods" and e["objectRef"]["namespace"] == self.space.name
        ]


async def parked_agent(space: Space, source: Source) -> Parking:
    """A DaemonSet that no taint keeps off, on three nodes, parked on the first; the policy is not there yet."""
    owner = await space.daemon_set("agent", spec={"tolerations": [{"operator": "Exists"}]})
    await space.ready("app=agent", 3)
    parking = Parking(space, source, owner)
    if source == "config-map":
        await space.do("POST", f"{space.path}/configmaps", {"metadata": {"name": parking.name}, "data": {}}, 201)
    await parking.park(0)
    return parking


@pytest.mark.parametrize("source", ["node", "config-map"])
async def test_denial_works_per_node(space: Space, source: Source, note: Note) -> None:
    """A ValidatingAdmissionPolicy refuses the DaemonSet on parked nodes only, milliseconds after each park and un-park."""
    parking = await parked_agent(space, source)
    async with parking.in_force("validatingadmission", denying(source), validationActions=["Deny"]) as begun:
        await until(lambda: parking.is_denied(0), "the policy to work", every=0.005)
        note("policy_create_to_enforced_ms", round((time.monotonic() - begun) * 1000))
        told = (await parking.tried(0)).body["message"]
        assert told.endswith(f"denied request: parked for a driver upgrade on node {space.nodes[0]}")
        assert (await parking.tried(1)).status == 201
        on, off = list[float](), list[float]()

        async def is_let_in() -> bool:
            return not await parking.is_denied(1)

        for _ in range(8):
            begun = time.monotonic()
            await parking.park(1)
            await until(lambda: parking.is_denied(1), "parking to work", every=0.001)
            on.append(time.monotonic() - begun)
            begun = time.monotonic()
            await parking.unpark(1)
            await until(is_let_in, "parking to end", every=0.001)
            off.append(time.monotonic() - begun)
        note("park_to_enforced", on)
        note("unpark_to_enforced", off)
        assert await parking.is_denied(0)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("source", ["node", "config-map"])
async def test_denial_makes_the_controller_back_off(space: Space, control_plane: ControlPlane, source: Source, note: Note) -> None:
    """The evicted pod is refused with doubling pauses, neighbours may be held up, and a change of the node wakes the controller."""
    parking = await parked_agent(space, source)
    async with parking.in_force("validatingadmission", denying(source), validationActions=["Deny"]):
        await until(lambda: parking.is_denied(0), "the policy to work", every=0.005)
        mark = control_plane.audit_mark()
        await parking.evict(0)
        await asyncio.sleep(12)
        tries = parking.creations(mark)
        assert tries
        assert all(e["responseStatus"]["code"] == 403 for e in tries)
        stamps = [datetime.datetime.fromisoformat(e["requestReceivedTimestamp"]).timestamp() for e in tries]
        note("denied_create_gaps_s", [f"{b - a:.3f}" for a, b in itertools.pairwise(stamps)])
        await assert_reported(space, note)
        await note_neighbours(parking, note)
        begun = time.monotonic()
        await parking.unpark(0)
        if source != "node":  # nothing wakes the controller: the pod waits for the end of a back-off that doubles up to 1,000 s
            await asyncio.sleep(5)
            note("pods_5_s_after_unpark", len([p for p in await space.pods("app=agent") if is_ready(p)]))
            await space.patch_node(0, {"metadata": {"labels": {"wake": "up"}}})
        took = await parking.ready_on(0, begun)
        note("unpark_to_pod_ready_ms", round(took * 1000))
        await space.ready("app=agent", 3, 5)
        assert took < (5 if source == "node" else 10)  # any change of a node's labels or taints makes the controller look at once


async def assert_reported(space: Space, note: Note) -> None:
    """The refusals are events of the DaemonSet, and its status counts the pod as wanted."""
    events = (await space.get(f"{space.path}/events?fieldSelector=reason%3DFailedCreate"))["items"]
    assert (events[0]["type"], events[0]["involvedObject"]["kind"]) == ("Warning", "DaemonSet")
    status = (await space.get(f"{space.apps}/daemonsets/agent"))["status"]
    note("daemonset_status_while_parked", status)
    assert (status["desiredNumberScheduled"], status["currentNumberScheduled"]) == (3, 2)


async def note_neighbours(parking: Parking, note: Note) -> None:
    """After a refusal the rest of a batch is dropped, so that a neighbour's pod may wait for the back-off too."""
    held_up: list[float] = []
    while len(held_up) < 6 and max(held_up, default=0) < 1:
        try:
            held_up.append(await parking.replaced(1, 15))
        except AssertionError:
            held_up.append(float("inf"))
    note("neighbours_pod_evicted_to_ready_s_at_most_15", [f"{s:.2f}" for s in held_up])


async def test_a_scheduling_gate_hurts_nobody(space: Space, control_plane: ControlPlane, note: Note) -> None:
    """A MutatingAdmissionPolicy gates the parked DaemonSet's pod: one creation, no back-off, neighbours come back at once."""
    parking = await parked_agent(space, "node")
    async with parking.in_force("mutatingadmission", gating()) as begun:
        await until(lambda: parking.is_gated(0), "the gate", every=0.005)
        note("policy_create_to_enforced_ms", round((time.monotonic() - begun) * 1000))
        mark, node = control_plane.audit_mark(), space.nodes[0]
        begun = await parking.evict(0)
        await space.when(lambda kind, p: kind == "ADDED" and node_of(p) == node and bool(p["spec"].get("schedulingGates")), begun)
        await asyncio.sleep(2)
        waiting = await space.pod_on(0, "app=agent")
        assert waiting["status"]["phase"] == "Pending"
        assert "nodeName" not in waiting["spec"]
        (condition,) = waiting["status"]["conditions"]
        assert (condition["type"], condition["status"], condition["reason"]) == ("PodScheduled", "False", "SchedulingGated")
        assert len(parking.creations(mark)) == 1  # no loop
        neighbours = [await parking.replaced(1) for _ in range(6)]
        note("neighbours_pod_evicted_to_ready", neighbours)
        note("daemonset_status_while_parked", (await space.get(f"{space.apps}/daemonsets/agent"))["status"])
        await parking.unpark(0)
        begun = time.monotonic()
        await space.patch(f"{space.path}/pods/{waiting['metadata']['name']}", {"spec": {"schedulingGates": []}})
        note("gate_removed_to_ready_ms", round(await parking.ready_on(0, begun) * 1000))


async def test_a_gated_pod_can_be_evicted(space: Space, note: Note) -> None:
    """With the right to evict alone: once un-parked, the gated pod is evicted and its successor comes without a gate."""
    parking = await parked_agent(space, "node")
    async with parking.in_force("mutatingadmission", gating()):
        await until(lambda: parking.is_gated(0), "the gate", every=0.005)
        begun, node = await parking.evict(0), space.nodes[0]
        await space.when(lambda kind, p: kind == "ADDED" and node_of(p) == node, begun)
        await parking.unpark(0)

        async def is_open() -> bool:
            return not await parking.is_gated(0)

        await until(is_open, "no gate", every=0.005)
        begun = await parking.evict(0)
        note("gated_pod_evicted_to_successor_ready_ms", round(await parking.ready_on(0, begun) * 1000))
