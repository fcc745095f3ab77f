"""The Fleet adapter against an API server that does what real ones do once a month."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from driver_manager.core.fleet import (
    Changed,
    EventNote,
    FleetEvent,
    FleetSet,
    Kind,
    LeaseView,
    Listed,
    MaintenanceOrder,
    MaintenanceView,
    PolicySource,
    Subject,
)
from driver_manager.core.snapshot import ChangeKind, NodeView, Permissions, PodView, Rule
from driver_manager.errors import Forbidden
from driver_manager.kube import calls, fleetcalls, fleetviews, watch
from driver_manager.kube.fleet import KubeFleet, connect_fleet
from driver_manager.kube.fleetcalls import CLUSTER_RULES, CUSTOM_KINDS, MAINTENANCE_RULES, NAMESPACE_RULES, TEMPLATE_RULES, Selection
from driver_manager.ports import NodePatch
from tests.unit.kube.server import (
    Api,
    QuickClock,
    Reply,
    answers,
    bookmark,
    drops,
    event,
    expired,
    pod,
    pods,
    refuses,
    streams,
    write_kubeconfig,
)

pytestmark = pytest.mark.real_sockets
SELECTION = Selection(namespace="op")
UNKNOWN_PATH = answers("404 page not found\n", 404)
GROUPS = {"kind": "APIGroupList", "groups": [{"name": "apps", "versions": [{"groupVersion": "apps/v1"}]}]}


@pytest.fixture
async def fleet(api: Api, clock: QuickClock, tmp_path: Path) -> AsyncIterator[KubeFleet]:
    """The adapter, connected to the server."""
    fleet = await connect_fleet(write_kubeconfig(tmp_path / "config", api.url), clock, SELECTION)
    yield fleet
    await fleet.close()


def node(name: str, version: int, **labels: str) -> dict[str, Any]:
    """A Node as the API writes it."""
    return {"metadata": {"name": name, "uid": f"uid-{name}", "resourceVersion": str(version), "labels": labels}, "spec": {}, "status": {}}


def told(happened: FleetEvent) -> str:
    """An event in short: what is listed, or what came and went, with versions of nodes."""
    match happened:
        case Listed(_, items):
            return "listed " + " ".join(short(item) for item in items)
        case Changed(_, change, item):
            return f"{change} {short(item)}"
    return "not served"


def short(item: Any) -> str:
    """The name, and the version where the view has one."""
    return f"{item.name}@{item.resource_version}" if isinstance(item, NodeView | PolicySource) else str(item.name)


async def take(count: int, events: AsyncIterator[FleetEvent]) -> list[str]:
    """The first events; then closes the follower."""
    taken = []
    async with asyncio.timeout(10), aclosing(events):  # type: ignore[type-var]
        async for happened in events:
            taken.append(told(happened).strip())
            if len(taken) == count:
                return taken
    raise AssertionError("a follower has no end")


def versions(api: Api) -> list[str | None]:
    """From which version each request went on; None for a list."""
    return [each.query.get("resourceVersion") for each in api.asked]


async def test_it_begins_with_a_list_in_pages(api: Api, fleet: KubeFleet) -> None:
    """All pages are one list, made at no version, so never an old one; the watch goes on from it with the same selector."""
    api.will(answers(pods(node("a", 3), token="more")), answers(pods(node("b", 4))), streams(event("ADDED", node("c", 11)), stays=True))
    assert await take(2, fleet.follow(Kind.NODES)) == ["listed a@3 b@4", "seen c@11"]
    one, two, three = (each.query for each in api.asked)
    assert one == {"labelSelector": "nvidia.com/gpu.present=true", "limit": "500"}
    assert two == one | {"continue": "more"}
    assert three.pop("allowWatchBookmarks") == "true"
    assert three == {"labelSelector": one["labelSelector"], "watch": "true", "resourceVersion": "10", "timeoutSeconds": "60"}


async def test_a_list_that_expires_between_pages(api: Api, fleet: KubeFleet, clock: QuickClock) -> None:
    """It is begun anew; nothing of the old one is kept, and after three times there is a pause."""
    page, gone = answers(pods(node("a", 3), token="more")), refuses(410, "the provided continue parameter is too old")
    api.will(*[page, gone] * 4, answers(pods(node("b", 4), version=20)), streams(stays=True))
    assert await take(1, fleet.follow(Kind.NODES)) == ["listed b@4"]
    assert [each.query.get("continue") for each in api.asked[:9]] == [None, "more"] * 4 + [None]
    assert clock.slept == [0.5]


@pytest.mark.parametrize("gap", [refuses(410, "too old resource version"), streams(expired())])
async def test_a_gap_is_a_list_again(api: Api, fleet: KubeFleet, gap: Reply) -> None:
    """In both forms of a 410, in the middle of a watch: what is not in the new list is gone, which the list itself says."""
    api.will(
        answers(pods(node("a", 3), node("b", 4))),
        streams(event("MODIFIED", node("a", 12))),
        gap,
        answers(pods(node("c", 45), version=50)),
        streams(event("DELETED", node("c", 51)), stays=True),
    )
    assert await take(4, fleet.follow(Kind.NODES)) == ["listed a@3 b@4", "seen a@12", "listed c@45", "gone c@51"]
    assert versions(api) == [None, "10", "12", None, "50"]


async def test_a_follower_goes_on_where_it_was(api: Api, fleet: KubeFleet) -> None:
    """After an end or a break the next watch begins at the last version heard of, of an event or a bookmark, without a list."""
    api.will(
        answers(pods(node("a", 3))),
        streams(event("MODIFIED", node("a", 12)), breaks=True),
        streams(bookmark(30)),
        streams(event("MODIFIED", node("a", 31)), stays=True),
    )
    assert await take(3, fleet.follow(Kind.NODES)) == ["listed a@3", "seen a@12", "seen a@31"]
    assert versions(api) == [None, "10", "12", "30"]


@pytest.mark.parametrize("broken", [b"nonsense\n", b'{"type":"ADDED","object":{"metadata":{}}}\n', b'{"type":"MODI'])
async def test_broken_bytes(api: Api, fleet: KubeFleet, clock: QuickClock, broken: bytes) -> None:
    """What cannot be read ends that watch; the next one brings it whole, from the last version that could."""
    api.will(
        answers(pods()),
        streams(event("ADDED", node("a", 12)), broken),
        streams(event("MODIFIED", node("a", 13)), stays=True),
    )
    assert await take(3, fleet.follow(Kind.NODES)) == ["listed", "seen a@12", "seen a@13"]
    assert versions(api) == [None, "10", "12"]
    assert clock.slept == [0.5]


async def test_a_list_that_cannot_be_read(api: Api, fleet: KubeFleet, clock: QuickClock) -> None:
    """It is asked for again, with pauses that grow: nothing is made up meanwhile."""
    api.will(*[answers("<html>")] * 3, answers({"metadata": {"resourceVersion": "1"}, "items": [{}]}), answers(pods()), streams(stays=True))
    assert await take(1, fleet.follow(Kind.NODES)) == ["listed"]
    assert clock.slept == [0.5, 1, 2, 4]


async def test_an_older_version_is_told_too(api: Api, fleet: KubeFleet) -> None:
    """Whether it is news is for who holds the newest: our own patch may have brought a newer one."""
    api.will(answers(pods(node("a", 9))), streams(event("MODIFIED", node("a", 8)), event("MODIFIED", node("a", 8)), stays=True))
    assert await take(3, fleet.follow(Kind.NODES)) == ["listed a@9", "seen a@8", "seen a@8"]


async def test_a_watch_that_dies_without_a_word(api: Api, fleet: KubeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server would have ended it by now, so it is given up and begun again where it was."""
    monkeypatch.setattr(watch, "WATCH_SECONDS", 0.1)
    monkeypatch.setattr(watch, "OVERTIME_SECONDS", 0.1)
    silent = streams(event("ADDED", node("a", 12)), stays=True)
    api.will(answers(pods()), silent, streams(event("MODIFIED", node("a", 13)), stays=True))
    assert await take(3, fleet.follow(Kind.NODES)) == ["listed", "seen a@12", "seen a@13"]
    assert versions(api) == [None, "10", "12"]


@pytest.mark.parametrize("reply", [refuses(500), drops, answers("busy", 429)])
async def test_a_server_in_trouble_is_not_pestered(api: Api, fleet: KubeFleet, clock: QuickClock, reply: Reply) -> None:
    """Whatever fails, pauses grow to five seconds; the list is still there."""
    api.will(answers(pods()), *[reply] * 12, streams(event("ADDED", node("a", 12)), stays=True))
    assert await take(2, fleet.follow(Kind.NODES)) == ["listed", "seen a@12"]
    assert clock.slept[:4] == [0.5, 1, 2, 4]
    assert max(clock.slept) == 5
    assert versions(api)[1:] == ["10"] * (len(api.asked) - 1)


@pytest.mark.parametrize("where", [0, 1])
async def test_forbidden_ends_it(api: Api, fleet: KubeFleet, where: int) -> None:
    """For the list and for the watch, also where two of them make one."""
    no, yes = refuses(403, "pods is forbidden"), answers(pods())

    async def reply(api: Api, request: web.Request) -> web.StreamResponse:  # either may be the first to watch
        return await (no if ("watch" in request.query) == bool(where) else yes)(api, request)

    api.will(reply)
    with pytest.raises(Forbidden, match="pods op: pods is forbidden") as caught:
        await take(2, fleet.follow(Kind.DRIVER_PODS))
    assert caught.value.hint == f"the account needs verb {('list', 'watch')[where]} on pods in namespace op"


# Kinds that may not be there ------------------------------------------------------------------------------------------


async def test_not_served_and_served_later(api: Api, fleet: KubeFleet, clock: QuickClock) -> None:
    """It is told once, looked for each minute, and begins with a list when it comes."""
    api.will(*[UNKNOWN_PATH, answers(GROUPS)] * 3, answers(pods()), streams(stays=True))
    assert await take(2, fleet.follow(Kind.CLUSTER_POLICIES)) == ["not served", "listed"]
    assert clock.slept == [60, 60, 60]
    assert [each.path for each in api.asked[:2]] == ["/apis/nvidia.com/v1/clusterpolicies", "/apis"]


async def test_a_group_without_the_kind(api: Api, fleet: KubeFleet) -> None:
    """The group is there for another custom resource of the same version."""
    groups = {"groups": [{"versions": [{"groupVersion": "nvidia.com/v1"}, {"groupVersion": "nvidia.com/v1alpha1"}]}]}
    api.will(UNKNOWN_PATH, answers(groups), answers({"resources": [{"name": "gpuclusters"}]}))
    assert await take(1, fleet.follow(Kind.NVIDIA_DRIVERS)) == ["not served"]
    assert api.asked[-1].path == "/apis/nvidia.com/v1alpha1"


async def test_taken_away_while_it_is_followed(api: Api, fleet: KubeFleet) -> None:
    """The watch ends, the next one finds nothing; when it comes back there is a list, not a watch from an old version."""
    api.will(answers(pods()), streams(), UNKNOWN_PATH, answers(GROUPS), answers(pods(version=90)), streams(stays=True))
    assert await take(3, fleet.follow(Kind.CLUSTER_POLICIES)) == ["listed", "not served", "listed"]
    assert versions(api) == [None, "10", "10", None, None]


@pytest.mark.parametrize(
    "lies",
    [
        [UNKNOWN_PATH, UNKNOWN_PATH],
        [answers("<html>no such page</html>", 404), answers("<html>no such page</html>", 404)],
        [
            UNKNOWN_PATH,
            answers({"groups": [{"versions": [{"groupVersion": "nvidia.com/v1"}]}]}),
            answers({"resources": [{"name": "clusterpolicies"}]}),
        ],
    ],
)
async def test_a_404_alone_is_not_believed(api: Api, fleet: KubeFleet, clock: QuickClock, lies: list[Reply]) -> None:
    """A proxy says that too: a policy that seems to be gone would stop every roll-out, so the API server's own index has to say so."""
    api.will(answers(pods()), streams(), *lies, answers(pods(version=90)), streams(stays=True))
    assert await take(2, fleet.follow(Kind.CLUSTER_POLICIES)) == ["listed", "listed"]
    assert max(clock.slept) < 5


# Driver pods: two watches in one ------------------------------------------------------------------------------------


class TwoLists:
    """Answers for the pods by component and for those by app, each list and watch in its own order."""

    def __init__(self, api: Api, component: list[Reply], app: list[Reply]) -> None:
        self.replies = {"component": component, "app": app}
        self.calls: list[str] = []
        api.will(self.reply)

    async def reply(self, api: Api, request: web.Request) -> web.StreamResponse:
        which = "app" if request.query["labelSelector"].startswith("app=") else "component"
        self.calls.append(which)
        replies = self.replies[which]
        return await (replies.pop(0) if len(replies) > 1 else replies[0])(api, request)


async def test_two_lists_are_one(api: Api, fleet: KubeFleet) -> None:
    """The first list has all of both; the two have no pod in common, by their selectors."""
    TwoLists(api, [answers(pods(pod("a"))), streams(stays=True)], [answers(pods(pod("b"))), streams(stays=True)])
    assert await take(1, fleet.follow(Kind.DRIVER_PODS)) == ["listed a b"]
    selectors = {each.query["labelSelector"] for each in api.asked}
    components = "(nvidia-driver,nvidia-vgpu-host-manager,nvidia-vgpu-manager)"
    assert selectors == {
        f"app.kubernetes.io/component in {components}",
        f"app=nvidia-driver-daemonset,app.kubernetes.io/component notin {components}",
    }


async def test_a_gap_of_one_is_a_list_of_both(api: Api, fleet: KubeFleet) -> None:
    """What the other watch has told stays."""
    gap = asyncio.Event()

    async def later(api: Api, request: web.Request) -> web.StreamResponse:
        await gap.wait()
        return await streams(expired())(api, request)

    TwoLists(
        api,
        [answers(pods(pod("a"), pod("x"))), later, answers(pods(pod("a"), version=50)), streams(stays=True)],
        [answers(pods(pod("b"))), streams(event("ADDED", pod("c", 11)), event("DELETED", pod("b", 12)), stays=True)],
    )
    seen = []
    async with asyncio.timeout(10), aclosing(fleet.follow(Kind.DRIVER_PODS)) as events:
        async for happened in events:
            seen.append(told(happened))
            if len(seen) == 3:
                gap.set()
            if len(seen) == 4:
                break
    assert seen == ["listed a x b", "seen c", "gone b", "listed a c"]


@pytest.mark.parametrize("gone_first", [True, False])
async def test_a_pod_that_moves_is_not_gone(api: Api, fleet: KubeFleet, gone_first: bool) -> None:
    """A component label that comes or goes: in whatever order the two watches tell it, the pod is there in the end."""
    turn = asyncio.Event()

    async def second(line: dict[str, Any], api: Api, request: web.Request) -> web.StreamResponse:
        await turn.wait()
        return await streams(line, stays=True)(api, request)

    gone, added, last = event("DELETED", pod("a", 11)), event("ADDED", pod("a", 11)), event("ADDED", pod("z", 12))

    async def by_component(api: Api, request: web.Request) -> web.StreamResponse:
        return await (streams(gone, stays=True)(api, request) if gone_first else second(gone, api, request))

    async def by_app(api: Api, request: web.Request) -> web.StreamResponse:
        return await (second(added, api, request) if gone_first else streams(added, last, stays=True)(api, request))

    TwoLists(api, [answers(pods(pod("a"))), by_component], [answers(pods()), by_app])
    there: set[str] = set()
    count = 0
    async with asyncio.timeout(10), aclosing(fleet.follow(Kind.DRIVER_PODS)) as events:
        async for happened in events:
            count += 1
            if isinstance(happened, Changed):
                (there.discard if happened.change is ChangeKind.GONE else there.add)(happened.item.name)
            if count >= 2:
                turn.set()
            if count == 3:
                break
    assert "a" in there


async def test_closing_it_closes_both(api: Api, fleet: KubeFleet) -> None:
    """A task that waits in both ends at once."""
    TwoLists(api, [answers(pods()), streams(stays=True)], [answers(pods()), streams(stays=True)])
    task = asyncio.create_task(take(2, fleet.follow(Kind.DRIVER_PODS)))
    while len(api.asked) < 4:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    others = asyncio.all_tasks() - {asyncio.current_task()}
    assert not [each for each in others if "anext" in repr(each) or "events" in repr(each)]


# ResourceSlices -------------------------------------------------------------------------------------------------------


def dra(*versions: str) -> Reply:
    """In which versions the API server has dynamic resource allocation."""
    return answers({"kind": "APIGroup", "versions": [{"groupVersion": f"resource.k8s.io/{each}", "version": each} for each in versions]})


def slice_of(node_name: str, devices: int) -> dict[str, Any]:
    """A ResourceSlice as the API writes it."""
    spec = {"driver": "gpu.nvidia.com", "nodeName": node_name, "pool": {"name": node_name}, "devices": [{"name": "d"}] * devices}
    return {"metadata": {"name": f"slice-{node_name}", "uid": f"uid-{node_name}", "resourceVersion": "3"}, "spec": spec}


@pytest.mark.parametrize(("served", "used"), [(("v1beta1",), "v1beta1"), (("v1beta1", "v1beta2"), "v1beta2"), (("v1", "v1beta2"), "v1")])
async def test_slices_are_followed_in_the_newest_version(api: Api, fleet: KubeFleet, served: tuple[str, ...], used: str) -> None:
    """Whichever the server has, and only those of NVIDIA's driver."""
    api.will(dra(*served), answers(pods(slice_of("n1", 8))), streams(stays=True))
    assert await take(1, fleet.follow(Kind.SLICES)) == ["listed slice-n1"]
    assert [each.path for each in api.asked[:2]] == ["/apis/resource.k8s.io", f"/apis/resource.k8s.io/{used}/resourceslices"]
    assert api.asked[1].query["fieldSelector"] == "spec.driver=gpu.nvidia.com"


async def test_slices_are_not_served_until_they_are(api: Api, fleet: KubeFleet, clock: QuickClock) -> None:
    """A server without the group says so, is asked again a minute later, and an upgrade to another version is followed."""
    api.will(UNKNOWN_PATH, UNKNOWN_PATH, UNKNOWN_PATH, dra("v1beta1"), answers(pods()), UNKNOWN_PATH, dra("v1"), dra("v1"), answers(pods()))
    assert await take(3, fleet.follow(Kind.SLICES)) == ["not served", "listed", "listed"]
    assert clock.slept[0] == watch.LOOK_AGAIN_SECONDS
    assert api.asked[-1].path.startswith("/apis/resource.k8s.io/v1/resourceslices")


# What it may need -----------------------------------------------------------------------------------------------------


def all_calls() -> list[calls.Call]:
    """One of each request that the adapter can make."""
    source = PolicySource(kind="NVIDIADriver", name="a", uid="u", resource_version="1")
    found = fleetviews.Conditions("u", "1", 1, "ready", [])
    lease = LeaseView(namespace="op", name="l")
    maintenance = MaintenanceView(namespace="op", name="m", uid="u", resource_version="1", node_name="n", requestor="us")
    one = PodView(namespace="ns", name="p", uid="u")
    lists = [
        fleetcalls.list_nodes(SELECTION),
        fleetcalls.list_daemon_sets(SELECTION),
        fleetcalls.list_revisions(SELECTION),
        *fleetcalls.list_driver_pods(SELECTION),
        fleetcalls.list_validator_pods(SELECTION),
        *(fleetcalls.list_custom(kind) for kind in CUSTOM_KINDS.values()),
        fleetcalls.list_custom(fleetcalls.MAINTENANCE, "op"),
        fleetcalls.list_budgets(),
        fleetcalls.list_slices("v1"),
        fleetcalls.list_parkable_sets(),
        fleetcalls.list_named_set("mon/exporter"),
        fleetcalls.list_gated_pods(),
        calls.list_pods("n1"),
    ]
    return [
        *lists,
        *(calls.watch(each, "1", 60) for each in lists),
        fleetcalls.delete_pod("op", "p", "u"),
        fleetcalls.get_lease("op", "l"),
        *(call for way in fleetcalls.PARKING_WAYS for call in fleetcalls.get_parking(way)),
        fleetcalls.try_pod("op", "mon/exporter", "n"),
        fleetcalls.list_sets_with_term(),
        fleetcalls.patch_affinity(FleetSet(namespace="mon", name="x", uid="u"), fleetviews.TemplateAffinity("u", "1", None), is_in=True),
        calls.get_daemon_set("mon", "x"),
        fleetcalls.write_lease(lease),
        fleetcalls.write_lease(LeaseView(namespace="op", name="l", resource_version="1")),
        fleetcalls.create_event(EventNote(subject=Subject("Node", "n", "u"), reason="R", sentence="s"), "now", ""),
        fleetcalls.get_custom(source),
        fleetcalls.patch_conditions(source, found, []),
        fleetcalls.get_maintenance("op", "m"),
        fleetcalls.create_maintenance(MaintenanceOrder(namespace="op", name="m", node_name="n", requestor="us", drain={})),
        fleetcalls.patch_requestors(maintenance, ("them",)),
        fleetcalls.delete_maintenance(maintenance),
        calls.get_node("n"),
        calls.patch_node(NodePatch(name="n")),
        calls.get_daemon_set("op", "d"),
        calls.get_claim("v1", "ns", "c"),
        calls.list_runtime_classes(),
        calls.evict_pod(one, dry_run=False, grace_seconds=None),
    ]


def is_allowed(rules: tuple[Rule, ...], call: calls.Call) -> bool:
    """Whether rules allow a call."""
    resource, _, group = call.resource.partition(".")
    return Permissions(rules).allow(call.verb, group, resource)


def test_the_rules_cover_every_call() -> None:
    """Each request is allowed, in the operator's namespace or in the whole cluster."""
    for call in all_calls():
        is_local = call.namespace == SELECTION.namespace
        is_allowed_here = is_local and is_allowed((*NAMESPACE_RULES, *MAINTENANCE_RULES), call)
        assert is_allowed_here or is_allowed((*CLUSTER_RULES, *TEMPLATE_RULES), call), call


def test_no_rule_is_idle() -> None:
    """Each verb of each rule is needed by some request."""
    asked = {(call.verb, call.resource) for call in all_calls()}
    for rule in (*CLUSTER_RULES, *TEMPLATE_RULES, *NAMESPACE_RULES, *MAINTENANCE_RULES):
        (group,) = rule.groups
        for resource in rule.resources:
            spelled = f"{resource}.{group}" if group else resource
            for verb in rule.verbs:
                others = {(verb, f"{kind}.{group}") for kind in rule.resources}  # the two custom resources share their calls
                assert (verb, spelled) in asked or asked & others, (verb, spelled)


@pytest.mark.real_processes
def test_the_agent_does_not_load_it() -> None:
    """Neither the command nor the adapter imports what only the controller needs."""
    script = "import driver_manager.kube, driver_manager.cli.main, sys; print([n for n in sys.modules if 'kube.fleet' in n])"
    ran = subprocess.run([sys.executable, "-c", script], check=True, timeout=30, capture_output=True, text=True)
    assert ran.stdout.strip() == "[]"


async def test_a_lease_is_written_whole(api: Api, fleet: KubeFleet) -> None:
    """Made by POST, replaced by PUT with the version that was read; what is empty is not written."""
    made = {"metadata": {"name": "l", "uid": "u", "namespace": "op", "resourceVersion": "5"}, "spec": {"holderIdentity": "me"}}
    api.will(answers(made))
    lease = await fleet.write_lease(LeaseView(namespace="op", name="l", holder="me"))
    await fleet.write_lease(lease)
    post, put = api.asked
    assert (post.method, put.method) == ("POST", "PUT")
    assert "resourceVersion" not in post.body["metadata"]
    assert put.path.endswith("/leases/l")
    assert put.body["metadata"]["resourceVersion"] == "5"
    assert "renewTime" not in json.dumps(post.body)
