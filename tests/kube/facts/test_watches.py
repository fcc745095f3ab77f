from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import aiohttp
import pytest
from kubernetes.aio import client, watch

from tests.kube.controlplane import ControlPlane
from tests.kube.facts.conftest import Note
from tests.kube.fixtures import make_namespace, official_client
from tests.kube.recorder import Object

pytestmark = [pytest.mark.kube, pytest.mark.deep]


class Maps:
    """The ConfigMaps of a namespace: seven, and the one that is always there."""

    def __init__(self, control_plane: ControlPlane, namespace: str) -> None:
        self.cp, self.path = control_plane, f"/api/v1/namespaces/{namespace}/configmaps"
        for number in range(7):
            control_plane.create(self.path, {"metadata": {"name": f"m{number}"}})
        control_plane.wait_for(lambda: control_plane.exists(f"{self.path}/kube-root-ca.crt"), "the CA's ConfigMap")

    def listed(self, query: str = "") -> Object:
        """The answer to a list."""
        found: Object = self.cp.get(f"{self.path}?{query}")
        return found

    def change(self, value: str) -> None:
        """Patches one of them."""
        self.cp.patch(f"{self.path}/m0", {"data": {"n": value}})

    def watch(self, query: str) -> list[Object]:
        """All events of a watch that ends by itself."""
        answer = self.cp.request("GET", f"{self.path}?watch=true&{query}", timeout=40)
        assert answer.status == 200, answer
        text = answer.body if isinstance(answer.body, str) else json.dumps(answer.body)
        return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def maps(control_plane: ControlPlane, namespace: str) -> Maps:
    """ConfigMaps to list and watch."""
    return Maps(control_plane, namespace)


def test_pages_are_one_snapshot(maps: Maps) -> None:
    """All pages of a list have one version, the first says how many are left, and a nonsense token is 400."""
    first = maps.listed("limit=3")
    assert len(first["items"]) == 3
    assert first["metadata"]["remainingItemCount"] == 5
    maps.change("between")
    rest = maps.listed(f"limit=3&continue={first['metadata']['continue']}")
    assert rest["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]
    assert maps.cp.request("GET", f"{maps.path}?limit=3&continue=nonsense").status == 400


async def test_bookmarks(maps: Maps, note: Note) -> None:
    """A bookmark, with nothing but a version, comes shortly before a watch's time is over."""
    version = maps.listed()["metadata"]["resourceVersion"]
    query = f"allowWatchBookmarks=true&resourceVersion={version}&timeoutSeconds=5"
    following = asyncio.create_task(asyncio.to_thread(maps.watch, query))
    for number in range(4):
        await asyncio.sleep(1)
        await asyncio.to_thread(maps.change, str(number))
    events = await following
    note("events_of_a_watch_of_5_s", [event["type"] for event in events])
    bookmarks = [event["object"]["metadata"] for event in events if event["type"] == "BOOKMARK"]
    assert bookmarks
    assert all(set(meta) == {"resourceVersion"} for meta in bookmarks)


def test_a_streaming_list(maps: Maps) -> None:
    """With sendInitialEvents a watch gives what exists first, and a bookmark that says so."""
    events = maps.watch("allowWatchBookmarks=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&timeoutSeconds=2")
    end = next(number for number, event in enumerate(events) if event["type"] == "BOOKMARK")
    assert [event["type"] for event in events[:end]] == ["ADDED"] * 8
    assert events[end]["object"]["metadata"]["annotations"] == {"k8s.io/initial-events-end": "true"}


def test_a_version_that_is_not_there_yet(maps: Maps) -> None:
    """A list at a future version waits, and is then 504 with Retry-After."""
    future = int(maps.listed()["metadata"]["resourceVersion"]) + 10_000
    begun = time.monotonic()
    answer = maps.cp.request("GET", f"{maps.path}?resourceVersion={future}")
    assert (answer.status, answer.headers["retry-after"], answer.body["reason"]) == (504, "1", "Timeout")
    assert answer.body["details"]["causes"][0]["reason"] == "ResourceVersionTooLarge"
    assert time.monotonic() - begun > 1


async def compact(control_plane: ControlPlane, revision: int) -> None:
    """Compacts etcd through its HTTP gateway, on its unix socket."""
    connector = aiohttp.UnixConnector(path=str(control_plane.dir / "etcd.sock"))
    wish = {"revision": str(revision), "physical": True}
    async with aiohttp.ClientSession(connector=connector) as session, session.post("http://etcd/v3/kv/compaction", json=wish) as answer:
        assert answer.status == 200, await answer.text()


async def test_a_version_that_is_gone(own_control_plane: ControlPlane) -> None:
    """410 comes as an event of a watch that was answered 200, and only once the apiserver's cache has forgotten the version too."""
    cp = own_control_plane
    make_namespace(cp, "maps")
    maps = Maps(cp, "maps")
    old = maps.listed()["metadata"]["resourceVersion"]
    maps.change("newer")
    token = maps.listed("limit=3")["metadata"]["continue"]
    maps.change("newest")
    await compact(cp, int(maps.listed()["metadata"]["resourceVersion"]))
    assert maps.watch(f"resourceVersion={old}&timeoutSeconds=1")[0]["type"] == "MODIFIED"
    assert maps.listed(f"limit=3&continue={token}")["items"]  # served from a snapshot in the watch cache
    cp.kill("kube-apiserver")
    cp.restart("kube-apiserver")
    expired = cp.request("GET", f"{maps.path}?limit=3&continue={token}")
    assert (expired.status, expired.body["reason"]) == (410, "Expired")
    assert expired.body["metadata"]["continue"]  # a fresh one, to go on without a new list
    event = maps.watch(f"resourceVersion={old}&timeoutSeconds=1")[0]
    assert (event["type"], event["object"]["code"], event["object"]["reason"]) == ("ERROR", 410, "Expired")
    assert event["object"]["message"].startswith("too old resource version")


async def seen_by(core: client.CoreV1Api, namespace: str, **options: Any) -> list[tuple[str, str, str]]:
    """Kind of event, type and name of the object of all that an official watch gives, until it ends by itself."""
    seen = []
    made = watch.Watch()  # type: ignore[no-untyped-call]  # the library's
    async with asyncio.timeout(20), made as stream:
        async for event in stream.stream(core.list_namespaced_config_map, namespace, **options):
            seen.append((event["type"], type(event["object"]).__name__, event["object"].metadata.name))
    return seen


async def test_the_official_watch(api: client.ApiClient, control_plane: ControlPlane, namespace: str) -> None:
    """The official asyncio watch ends after timeout_seconds, and takes objects of 1 MB."""
    core, path = client.CoreV1Api(api), f"/api/v1/namespaces/{namespace}/configmaps"
    control_plane.create(path, {"metadata": {"name": "big"}, "data": {"x": "y" * 1_000_000}})
    seen = await seen_by(core, namespace, timeout_seconds=1)
    assert ("ADDED", "V1ConfigMap", "big") in seen  # from no version: existing objects first


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it leaves its answer open then
async def test_the_official_watch_of_a_version_that_is_gone(own_control_plane: ControlPlane) -> None:
    """The official watch raises 410 for a version that is gone."""
    cp = own_control_plane
    make_namespace(cp, "maps")
    cp.kill("kube-apiserver")
    cp.restart("kube-apiserver")
    async with official_client(cp) as api:
        with pytest.raises(client.ApiException) as caught:
            await seen_by(client.CoreV1Api(api), "maps", resource_version="1")
    assert caught.value.status == 410
