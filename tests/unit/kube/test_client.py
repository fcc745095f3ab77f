from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import shutil
import socket
import ssl
import subprocess
from pathlib import Path

import pytest
from aiohttp import web

from driver_manager import __version__, kube
from driver_manager.core.snapshot import Identity, PodView
from driver_manager.errors import ClusterError, Conflict, EvictionBlocked, Forbidden, NotFound, Unreachable
from driver_manager.ports import NodePatch
from tests.unit.kube.server import Api, QuickClock, Reply, answers, drops, hangs, node, pod, pods, refuses, write_kubeconfig

pytestmark = pytest.mark.real_sockets

POD = PodView(namespace="default", name="p", uid="u")


async def test_a_request_says_who_asks(api: Api, cluster: kube.KubeCluster) -> None:
    """Token, user agent and an answer in JSON."""
    api.will(answers(node()))
    assert (await cluster.node("n1")).uid == "u1"
    headers = api.asked[0].headers
    assert headers["Authorization"] == "Bearer secret"
    assert headers["User-Agent"] == f"driver-manager/{__version__}"
    assert headers["Accept"] == "application/json"


async def test_a_patch_goes_out_once_and_as_merge_patch(api: Api, cluster: kube.KubeCluster) -> None:
    """One PATCH; the answer is the node as it is then."""
    api.will(answers(node(unschedulable=True)))
    seen = await cluster.patch_node(NodePatch(name="n1", resource_version="7", unschedulable=True))
    assert seen.unschedulable
    assert [(each.method, each.path) for each in api.asked] == [("PATCH", "/api/v1/nodes/n1")]
    assert api.asked[0].headers["Content-Type"] == "application/merge-patch+json"
    assert api.asked[0].body == {"metadata": {"resourceVersion": "7"}, "spec": {"unschedulable": True}}


async def test_reads_are_tried_again(api: Api, cluster: kube.KubeCluster, clock: QuickClock) -> None:
    """Through errors of the server and dropped connections, with growing pauses."""
    api.will(refuses(503), drops, drops, answers("gateway", 502), answers(node()))  # aiohttp itself sends a GET twice
    assert (await cluster.node("n1")).name == "n1"
    assert clock.slept == [0.2, 0.4, 0.8]


async def test_hung_reads_are_tried_again(api: Api, hasty: kube.KubeCluster, clock: QuickClock) -> None:
    """An answer that does not come in time is no answer."""
    api.will(hangs, hangs, answers(node()))
    assert (await hasty.node("n1")).name == "n1"
    assert clock.slept == [0.2, 0.4]


async def test_reads_end_after_half_a_minute(api: Api, cluster: kube.KubeCluster, clock: QuickClock) -> None:
    """The last error comes out, and the sum of the pauses is bounded."""
    api.will(refuses(500, "etcd is gone"))
    with pytest.raises(Unreachable, match="etcd is gone"):
        await cluster.node("n1")
    assert 20 < sum(clock.slept) <= 30
    assert max(clock.slept) == 5


async def test_an_outage_is_told_now_and_then(
    api: Api, cluster: kube.KubeCluster, clock: QuickClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Reads that meet one outage together tell of it once, how long it is tried, every ten seconds, and when it is over."""
    api.will(refuses(503, "away"))
    began = clock.now()
    results = await asyncio.gather(cluster.node("n1"), cluster.permissions("default"), return_exceptions=True)
    assert all(isinstance(each, Unreachable) for each in results)
    begins, *later = caplog.records
    assert begins.getMessage() == "no answer from the API server, trying again"
    assert vars(begins)["gives_up_after_seconds"] == 30
    assert "away" in vars(begins)["error"]
    assert 1 <= len(later) <= (clock.now() - began) / 10
    assert vars(later[-1])["tries"] > 2
    api.will(answers(node()))
    await cluster.node("n1")
    assert caplog.records[-1].getMessage() == "an answer from the API server again"
    await cluster.node("n1")
    assert len(caplog.records) == len(later) + 2


async def test_retry_after_is_honoured(api: Api, cluster: kube.KubeCluster, clock: QuickClock) -> None:
    """A server that is too busy says when to come back."""
    api.will(answers("Too many requests, please try again later.", 429, {"Retry-After": "3"}), answers(node()))
    await cluster.node("n1")
    assert clock.slept == [3]


async def test_a_refused_read_is_not_tried_again(api: Api, cluster: kube.KubeCluster, clock: QuickClock) -> None:
    """Only silence is worth another try."""
    api.will(refuses(404))
    with pytest.raises(NotFound):
        await cluster.node("n1")
    api.will(refuses(403))
    with pytest.raises(Forbidden):
        await cluster.permissions("default")
    assert (len(api.asked), clock.slept) == (2, [])


@pytest.mark.parametrize("reply", [refuses(500), hangs, drops])
async def test_writes_are_never_tried_again(api: Api, hasty: kube.KubeCluster, reply: Reply, clock: QuickClock) -> None:
    """After silence nobody knows whether it was done, so the caller looks again."""
    api.will(reply)
    with pytest.raises(Unreachable):
        await hasty.patch_node(NodePatch(name="n1", unschedulable=True))
    with pytest.raises(Unreachable):
        await hasty.evict(POD)
    assert (len(api.asked), clock.slept) == (2, [])


async def test_a_hung_answer_is_named(api: Api, hasty: kube.KubeCluster) -> None:
    """The message says what was asked, of whom, and how long it waited."""
    api.will(hangs)
    with pytest.raises(Unreachable, match=r"evict pod default/p: no answer from http://127\.0\.0\.1:\d+ within 0\.5 s"):
        await hasty.evict(POD)


async def test_nobody_listens(clock: QuickClock, tmp_path: Path) -> None:
    """A refused connection is Unreachable, for reads after the tries."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        cluster = await kube.connect(write_kubeconfig(tmp_path / "config", f"http://127.0.0.1:{port}"), clock)
        with pytest.raises(Unreachable, match="Connect call failed") as refused:
            await cluster.evict(POD)
        assert "address" in refused.value.hint
        with pytest.raises(Unreachable):
            await cluster.node("n1")
        await cluster.close()
    assert len(clock.slept) > 5


async def test_a_server_without_tls(api: Api, clock: QuickClock, tmp_path: Path) -> None:
    """A failed handshake is Unreachable and says so."""
    path = write_kubeconfig(tmp_path / "config", api.url.replace("http:", "https:"))
    cluster = await kube.connect(path, clock, request_timeout=2)
    with pytest.raises(Unreachable, match=r"evict pod default/p: no .*127\.0\.0\.1"):
        await cluster.evict(POD)
    await cluster.close()


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate for `kube.example`, signed by itself, and its key."""
    if not shutil.which("openssl"):
        assert not os.environ.get("CI"), "openssl is missing"
        pytest.skip("makes a certificate with openssl")
    cert, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "1",
        "-subj",
        "/CN=x",
    ]
    names = ["-addext", "subjectAltName=DNS:kube.example", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([*command, *names], check=True, capture_output=True, timeout=30)
    return cert, key


@pytest.mark.real_processes
async def test_only_a_trusted_server_is_talked_to(api: Api, clock: QuickClock, tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    """An unknown certificate, or another name than the one in it, is said at once; the right authority and name work."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*certificate)
    api.will(answers(node()))
    await api.listen(context)
    trust = {"certificate-authority": str(certificate[0])}
    for options, problem in (({}, "self-signed"), (trust, "mismatch"), ({**trust, "tls-server-name": "kube.example"}, "")):
        cluster = await kube.connect(write_kubeconfig(tmp_path / "config", api.url, **options), clock)
        if problem:
            with pytest.raises(Unreachable, match=problem) as refused:
                await cluster.node("n1")
            assert "certificate authority" in refused.value.hint
        else:
            await cluster.node("n1")
        await cluster.close()
    assert (len(api.asked), clock.slept) == (1, [])


async def test_evictions_are_translated(api: Api, cluster: kube.KubeCluster) -> None:
    """Accepted, blocked by a budget, another pod of that name, gone."""
    cause = {"reason": "DisruptionBudget", "message": "The disruption budget pdb is still being processed by the server."}
    api.will(
        answers({"kind": "Status", "status": "Success", "code": 201}, 201),
        refuses(429, "Cannot evict pod", {"Retry-After": "10"}, causes=[cause], retryAfterSeconds=10),
        refuses(409),
        refuses(404),
    )
    await cluster.evict(POD)
    with pytest.raises(EvictionBlocked) as blocked:
        await cluster.evict(POD, dry_run=True)
    assert (blocked.value.budget, blocked.value.retry_after) == ("pdb", 10)
    with pytest.raises(Conflict):
        await cluster.evict(POD)
    with pytest.raises(NotFound):
        await cluster.evict(POD, grace_seconds=0)
    assert [each.query for each in api.asked] == [{}, {"dryRun": "All"}, {}, {}]
    assert api.asked[3].body["deleteOptions"] == {"preconditions": {"uid": "u"}, "gracePeriodSeconds": 0}


async def test_a_long_list_comes_in_pages(api: Api, cluster: kube.KubeCluster) -> None:
    """All pages are one list, selected by the server."""
    api.will(answers(pods(pod("a"), token="t/1=")), answers(pods(pod("b"))))
    found = await cluster.pods_on("n1")
    assert ([each.name for each in found.items], found.resource_version) == (["a", "b"], "10")
    assert api.asked[0].query == {"fieldSelector": "spec.nodeName=n1", "limit": "500"}
    assert api.asked[1].query["continue"] == "t/1="


async def test_an_expired_page_begins_the_list_anew(api: Api, cluster: kube.KubeCluster) -> None:
    """No pod comes twice, none is missed."""
    api.will(answers(pods(pod("a"), token="t")), refuses(410), answers(pods(pod("b"), pod("c"), version=20)))
    found = await cluster.pods_on("n1")
    assert ([each.name for each in found.items], found.resource_version) == (["b", "c"], "20")
    assert "continue" not in api.asked[2].query


async def test_a_list_that_always_expires_ends(api: Api, cluster: kube.KubeCluster) -> None:
    """It is not begun for ever."""
    api.will(refuses(410))
    with pytest.raises(Unreachable, match="3 times"):
        await cluster.pods_on("n1")


@pytest.mark.parametrize("body", ["<html>Please log in</html>", "{}", '{"metadata": {"name": 1}}', '{"metadata"'])
async def test_a_stranger_answers(api: Api, cluster: kube.KubeCluster, body: str) -> None:
    """A success that is no node is an error that quotes it."""
    api.will(answers(body))
    with pytest.raises(ClusterError, match=r"get nodes n1: status 200, but the answer cannot be read: [<{]"):
        await cluster.node("n1")


async def test_questions_about_permissions(api: Api, cluster: kube.KubeCluster) -> None:
    """Reviews are POSTs that change nothing, so silence is met with another try."""
    api.will(refuses(500), answers({"status": {"allowed": True}}, 201), answers({"status": {"resourceRules": [{"verbs": ["get"]}]}}, 201))
    assert await cluster.may("create", "", "pods/eviction", "default")
    assert (await cluster.permissions("")).rules[0].verbs == {"get"}
    assert api.asked[2].body["spec"] == {"namespace": "default"}


async def test_connections_are_used_again(api: Api, cluster: kube.KubeCluster) -> None:
    """One connection for requests one after the other."""
    ports = set()

    async def remember(_: Api, request: web.Request) -> web.StreamResponse:
        assert request.transport
        ports.add(request.transport.get_extra_info("peername"))
        return await answers(node())(api, request)

    api.will(remember)
    for _ in range(3):
        await cluster.node("n1")
    assert len(ports) == 1


async def test_a_replaced_token_is_picked_up(api: Api, clock: QuickClock, tmp_path: Path) -> None:
    """After a 401 the kubeconfig is read again; a write goes out a second time, since the first was not let in."""
    path = tmp_path / "config"
    cluster = await kube.connect(write_kubeconfig(path, api.url, "old"), clock)
    api.will(refuses(401, "Unauthorized"), answers(node()))
    write_kubeconfig(path, api.url, "new")
    await cluster.patch_node(NodePatch(name="n1", unschedulable=True))
    assert [each.headers["Authorization"] for each in api.asked] == ["Bearer old", "Bearer new"]
    await cluster.close()


async def test_a_refused_token_ends_it(api: Api, cluster: kube.KubeCluster, tmp_path: Path) -> None:
    """No other token to be had: Forbidden, with a hint, once; also when the file is gone by now."""
    api.will(refuses(401, "Unauthorized"))
    with pytest.raises(Forbidden) as refused:
        await cluster.node("n1")
    assert "token" in refused.value.hint
    (tmp_path / "config").unlink()
    with pytest.raises(Forbidden):
        await cluster.node("n1")
    assert len(api.asked) == 2


async def test_no_secret_gets_out(api: Api, cluster: kube.KubeCluster, caplog: pytest.LogCaptureFixture) -> None:
    """Neither the token nor a body is in a log record or an error, at any level."""
    caplog.set_level(logging.DEBUG)
    api.will(answers({**node(), "spec": {"podCIDR": "hidden-in-the-body"}}), refuses(500), refuses(401, "Unauthorized"))
    await cluster.node("n1")
    with pytest.raises(Unreachable):
        await cluster.evict(POD)
    with pytest.raises(Forbidden) as refused:
        await cluster.node("n1")
    logged = "".join(str(vars(record)) for record in caplog.records) + str(vars(refused.value))
    assert "get nodes n1" in logged
    assert "secret" not in logged
    assert "hidden-in-the-body" not in logged


async def test_the_token_says_who_we_are(api: Api, clock: QuickClock, tmp_path: Path) -> None:
    """The identity costs no request."""
    claims = {"kubernetes.io": {"namespace": "gpu-operator", "pod": {"name": "driver-x", "uid": "u"}, "node": {"name": "n1"}}}
    token = f"e30.{base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip('=')}.c2ln"
    cluster = await kube.connect(write_kubeconfig(tmp_path / "config", api.url, token), clock)
    assert cluster.identity == Identity("gpu-operator", "driver-x", "u", "n1")
    await cluster.close()
    assert api.asked == []
