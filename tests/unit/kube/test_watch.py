from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from driver_manager import kube
from driver_manager.core.snapshot import PodChange, PodList
from driver_manager.errors import Forbidden
from tests.unit.kube.server import (
    Api,
    QuickClock,
    Reply,
    answers,
    bookmark,
    drops,
    event,
    expired,
    hangs,
    pod,
    pods,
    refuses,
    streams,
)

pytestmark = pytest.mark.real_sockets


@pytest.fixture
async def since(api: Api, cluster: kube.KubeCluster) -> PodList:
    """The list that a watch goes on from: pods a and b at version 10."""
    api.will(answers(pods(pod("a"), pod("b"))))
    found = await cluster.pods_on("n1")
    api.asked.clear()
    return found


async def take(count: int, changes: AsyncIterator[PodChange]) -> list[tuple[str, str]]:
    """The first changes, as kind and name; then closes the watch."""
    taken = []
    async with asyncio.timeout(10), aclosing(changes):  # type: ignore[type-var]
        async for change in changes:
            taken.append((change.kind.value, change.pod.name))
            if len(taken) == count:
                return taken
    raise AssertionError("a watch has no end")


def versions(api: Api) -> list[str | None]:
    """From which version each request went on; None for a list."""
    return [each.query.get("resourceVersion") for each in api.asked]


async def test_changes_come_as_they_happen(api: Api, cluster: kube.KubeCluster, since: PodList) -> None:
    """ADDED and MODIFIED are seen, DELETED is gone; the watch begins where the list ended."""
    api.will(streams(event("ADDED", pod("c", 11)), event("MODIFIED", pod("a", 12)), event("DELETED", pod("b", 13)), stays=True))
    assert await take(3, cluster.pod_changes("n1", since)) == [("seen", "c"), ("seen", "a"), ("gone", "b")]
    query = api.asked[0].query
    assert query["resourceVersion"] == "10"
    assert (query["watch"], query["allowWatchBookmarks"], query["timeoutSeconds"]) == ("true", "true", "60")
    assert query["fieldSelector"] == "spec.nodeName=n1"


async def test_a_watch_goes_on_where_it_was(api: Api, cluster: kube.KubeCluster, since: PodList) -> None:
    """After an end or a break the next one begins at the last version heard of, of an event or a bookmark."""
    api.will(
        streams(event("MODIFIED", pod("a", 12)), breaks=True),
        streams(bookmark(30)),
        streams(event("MODIFIED", pod("a", 31)), stays=True),
    )
    assert await take(2, cluster.pod_changes("n1", since)) == [("seen", "a")] * 2
    assert versions(api) == ["10", "12", "30"]


@pytest.mark.parametrize("gap", [refuses(410, "too old resource version"), streams(expired())])
async def test_a_gap_is_closed_by_listing_again(api: Api, cluster: kube.KubeCluster, since: PodList, gap: Reply) -> None:
    """In both forms of a 410: who is not in the new list is gone, a successor of the same name too; all others are seen."""
    api.will(
        gap,
        answers(pods(pod("a", uid="another"), pod("c"), version=50)),
        streams(event("DELETED", pod("c", 51)), stays=True),
    )
    wanted = [("gone", "a"), ("gone", "b"), ("seen", "a"), ("seen", "c"), ("gone", "c")]
    assert await take(5, cluster.pod_changes("n1", since)) == wanted
    assert versions(api) == ["10", None, "50"]


async def test_a_gap_stays_open_until_the_list_comes(api: Api, cluster: kube.KubeCluster, since: PodList) -> None:
    """No watch is begun from nowhere while the list is refused."""
    api.will(refuses(410), refuses(422), refuses(422), answers(pods(version=50)), streams(stays=True))
    assert await take(2, cluster.pod_changes("n1", since)) == [("gone", "a"), ("gone", "b")]
    assert versions(api)[:4] == ["10", None, None, None]


@pytest.mark.parametrize("reply", [streams(), refuses(500), answers("nonsense\n"), streams(b'{"type":"ADDED"}\n')])
async def test_there_is_no_hot_loop(api: Api, cluster: kube.KubeCluster, clock: QuickClock, since: PodList, reply: Reply) -> None:
    """Whatever ends a watch early, the pauses grow from 0.5 to 5 s."""
    api.will(*[reply] * 6, streams(event("ADDED", pod("c", 11)), stays=True))
    assert await take(1, cluster.pod_changes("n1", since)) == [("seen", "c")]
    assert clock.slept == [0.5, 1, 2, 4, 5, 5]


async def test_dropped_watches_are_paced_too(api: Api, cluster: kube.KubeCluster, clock: QuickClock, since: PodList) -> None:
    """A connection that is closed without an answer (aiohttp itself sends such a GET twice)."""
    api.will(*[drops] * 6, streams(event("ADDED", pod("c", 11)), stays=True))
    assert await take(1, cluster.pod_changes("n1", since)) == [("seen", "c")]
    assert clock.slept == [0.5, 1, 2]


async def test_hung_watches_are_paced_too(api: Api, hasty: kube.KubeCluster, clock: QuickClock, since: PodList) -> None:
    """A watch that is not even begun in time."""
    api.will(hangs, hangs, streams(event("ADDED", pod("c", 11)), stays=True))
    assert await take(1, hasty.pod_changes("n1", since)) == [("seen", "c")]
    assert clock.slept == [0.5, 1]


async def test_pods_seen_on_the_way_are_known(api: Api, cluster: kube.KubeCluster, since: PodList) -> None:
    """A pod that came and went around a gap is reported gone."""
    api.will(streams(event("ADDED", pod("c", 12)), event("DELETED", pod("b", 13)), expired()), answers(pods(pod("a"))), streams(stays=True))
    changes = [("seen", "c"), ("gone", "b"), ("gone", "c"), ("seen", "a")]
    assert await take(4, cluster.pod_changes("n1", since)) == changes


async def test_retry_after_lengthens_a_pause(api: Api, cluster: kube.KubeCluster, clock: QuickClock, since: PodList) -> None:
    """A busy server decides, up to half a minute."""
    busy = [answers("Too many requests", 429, {"Retry-After": after}) for after in ("7", "200")]
    api.will(*busy, streams(event("ADDED", pod("c", 11)), stays=True))
    await take(1, cluster.pod_changes("n1", since))
    assert clock.slept == [7, 30]


@pytest.mark.parametrize("version", [None, "", "abc", "1.5"])
async def test_a_version_that_is_no_number(api: Api, cluster: kube.KubeCluster, since: PodList, version: str | None) -> None:
    """What cannot be put in order is no answer of the API server's: the watch begins anew, as after any nonsense."""
    odd = pod("c", 11)
    odd["metadata"]["resourceVersion"] = version
    api.will(streams(event("ADDED", {**odd, "metadata": {k: v for k, v in odd["metadata"].items() if v is not None}})))
    api.replies.append(streams(event("ADDED", pod("d", 12)), stays=True))
    assert await take(1, cluster.pod_changes("n1", since)) == [("seen", "d")]


async def test_forbidden_ends_it(api: Api, cluster: kube.KubeCluster, since: PodList) -> None:
    """Nothing is tried again where the account may not watch."""
    api.will(refuses(403, "pods is forbidden: User cannot watch"))
    with pytest.raises(Forbidden, match="watch pods"):
        await take(1, cluster.pod_changes("n1", since))
    assert len(api.asked) == 1


async def test_a_line_may_be_long(api: Api, cluster: kube.KubeCluster, since: PodList) -> None:
    """Three megabytes of annotations, and a line cut into pieces anywhere."""
    long = pod("c", 11)
    long["metadata"]["annotations"] = {"x": "y" * 3_000_000}
    halves = b'{"type": "DELETED", "obj', b'ect": {"metadata": {"name": "b", "uid": "uid-b", "resourceVersion": "12"}}}\n'
    api.will(streams(event("ADDED", long), *halves, stays=True))
    assert await take(2, cluster.pod_changes("n1", since)) == [("seen", "c"), ("gone", "b")]


async def test_an_unfinished_line_is_no_event(api: Api, cluster: kube.KubeCluster, since: PodList) -> None:
    """What was cut off comes whole with the next watch."""
    api.will(
        streams(b'{"type": "DELETED", "object": {"metadata": {"name": "a", "uid": "uid-a"}}}'),
        streams(event("DELETED", pod("b", 12)), stays=True),
    )
    assert await take(1, cluster.pod_changes("n1", since)) == [("gone", "b")]


async def test_a_watch_ends_at_once(api: Api, cluster: kube.KubeCluster, since: PodList) -> None:
    """Cancelling a task that waits in a silent watch takes no time and leaves no connection."""
    api.will(streams(stays=True))
    task = asyncio.create_task(take(1, cluster.pod_changes("n1", since)))
    while not api.asked:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    task.cancel()
    ended, _ = await asyncio.wait({task}, timeout=5)
    assert ended
    assert task.cancelled()
    async with asyncio.timeout(5):
        await cluster.close()
