from __future__ import annotations

import asyncio
import http.client
import json
import ssl
import threading
import time

import aiohttp
import pytest

from tests.kube import stock
from tests.kube.controlplane import ControlPlane
from tests.kube.fixtures import NodeFactory
from tests.kube.proxy import ApiProxy

pytestmark = pytest.mark.kube


def ask(control_plane: ControlPlane, proxy: ApiProxy, method: str, path: str, body: bytes | None = None) -> int:
    """The status of one request through the proxy, as admin."""
    trust = ssl.create_default_context(cafile=str(control_plane.ca))
    link = http.client.HTTPSConnection("127.0.0.1", proxy.port, context=trust, timeout=20)
    try:
        headers = {"Authorization": f"Bearer {control_plane.tokens['admin']}", "Content-Type": "application/json"}
        link.request(method, path, body, headers)
        answer = link.getresponse()
        answer.read()
        return answer.status
    finally:
        link.close()


def test_the_proxy_holds_an_answer(control_plane: ControlPlane, api_proxy: ApiProxy, namespace: str) -> None:
    """While an answer is held the change is made, and only the client does not know."""
    path, statuses = f"/api/v1/namespaces/{namespace}/configmaps", list[int]()
    pause = api_proxy.on("create", "/configmaps$").hold_answer()
    body = b'{"metadata": {"name": "held"}}'
    client = threading.Thread(target=lambda: statuses.append(ask(control_plane, api_proxy, "POST", path, body)))
    client.start()
    pause.wait_hit()
    assert control_plane.exists(f"{path}/held")
    assert not statuses
    pause.release()
    client.join(20)
    assert statuses == [201]


def test_the_proxy_answers_for_the_apiserver(control_plane: ControlPlane, api_proxy: ApiProxy) -> None:
    """The n-th request that matches is answered by the proxy, and does not reach the apiserver."""
    api_proxy.on("list", "/nodes", nth=2).answer(503, headers={"Retry-After": "1"})
    assert [ask(control_plane, api_proxy, "GET", "/api/v1/nodes") for _ in range(3)] == [200, 503, 200]
    assert [seen.passed for seen in api_proxy.requests("list", "/nodes")] == [True, False, True]


def test_the_proxy_plays_an_outage(control_plane: ControlPlane, api_proxy: ApiProxy) -> None:
    """Connections are refused for a time; lost answers and refused requests break the connection."""
    with api_proxy.outage(), pytest.raises(ConnectionError):
        ask(control_plane, api_proxy, "GET", "/api/v1/nodes")
    api_proxy.on("list", "/nodes").lose_answer()
    api_proxy.on("list", "/nodes").refuse()
    for passed in (True, False):
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            ask(control_plane, api_proxy, "GET", "/api/v1/nodes")
        assert api_proxy.requests()[-1].passed == passed
    assert ask(control_plane, api_proxy, "GET", "/api/v1/nodes") == 200


def test_the_proxy_holds_and_delays_a_request(control_plane: ControlPlane, api_proxy: ApiProxy, namespace: str) -> None:
    """While a request is held nothing is made; a delayed one takes its time; both are written down with what was sent."""
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    pause = api_proxy.on("create", "/configmaps$").hold_request()
    client = threading.Thread(target=ask, args=(control_plane, api_proxy, "POST", path, b'{"metadata": {"name": "held"}}'))
    client.start()
    assert pause.wait_hit().json()["metadata"]["name"] == "held"
    assert not control_plane.exists(f"{path}/held")
    pause.release()
    client.join(20)
    assert control_plane.exists(f"{path}/held")
    api_proxy.on("get", "/configmaps/held").delay(0.3)
    begun = time.monotonic()
    assert ask(control_plane, api_proxy, "GET", f"{path}/held") == 200
    assert time.monotonic() - begun > 0.3


async def test_the_proxy_streams_and_cuts_watches(control_plane: ControlPlane, api_proxy: ApiProxy, namespace: str) -> None:
    """Events pass at once, and a cut ends the watch for the client."""
    trust = ssl.create_default_context(cafile=str(control_plane.ca))
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    headers = {"Authorization": f"Bearer {control_plane.tokens['admin']}"}
    async with (
        asyncio.timeout(30),
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trust), headers=headers) as session,
        session.get(f"{api_proxy.url}{path}?watch=true&resourceVersion=0") as answer,
    ):
        await asyncio.to_thread(control_plane.create, path, {"metadata": {"name": "seen"}})
        async for line in answer.content:
            if json.loads(line)["object"]["metadata"]["name"] == "seen":
                break
        await asyncio.to_thread(api_proxy.cut)
        with pytest.raises((aiohttp.ClientError, ConnectionError)):
            async for _ in answer.content:
                pass
    assert [seen.verb for seen in api_proxy.requests()] == ["watch"]


@pytest.mark.parametrize("kind", stock.KINDS)
def test_the_stock_driver_runs(control_plane: ControlPlane, namespace: str, gpu_node: NodeFactory, kind: stock.Kind) -> None:
    """Each of the three stock DaemonSets comes up on a node that asks for it, with its account."""
    node = gpu_node(labels=dict(stock.DRIVER_LABELS[kind]))
    account = stock.account(control_plane, kind, namespace)
    manifest = stock.driver_daemon_set(kind, env={"FORCE_REINSTALL": "true", "OPERATOR_NAMESPACE": None})
    with control_plane.record(f"/api/v1/namespaces/{namespace}/pods") as pods:
        control_plane.create(f"/apis/apps/v1/namespaces/{namespace}/daemonsets", manifest)
        pods.wait_for(lambda event: event.object["status"]["phase"] == "Running")
    stock.remove_account(control_plane, kind, namespace)
    assert account == f"nvidia-{kind}"
    environment = stock.init_environment(manifest, node=node, namespace=namespace)
    assert environment["NODE_NAME"] == node
    assert environment["FORCE_REINSTALL"] == "true"
    assert "OPERATOR_NAMESPACE" not in environment


async def test_the_operands_run(control_plane: ControlPlane, namespace: str, gpu_node: NodeFactory) -> None:
    """The twelve operands and the training pods of the measured workload come up on one node."""
    node = gpu_node(gpus=64, labels=dict(stock.OPERAND_LABELS))
    with control_plane.record(f"/api/v1/namespaces/{namespace}/pods") as pods:
        for manifest in stock.operand_daemon_sets():
            control_plane.create(f"/apis/apps/v1/namespaces/{namespace}/daemonsets", manifest)
        training = stock.training(20, node_selector={"kubernetes.io/hostname": node})
        control_plane.create(f"/apis/apps/v1/namespaces/{namespace}/deployments", training)

        def running() -> bool:
            return len({e.uid for e in pods.events if e.object["status"]["phase"] == "Running"}) == 32

        await asyncio.to_thread(control_plane.wait_for, running, "32 pods")
