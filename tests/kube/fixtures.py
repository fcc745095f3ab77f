"""The control plane that the tests of one worker share, and what each test gets of its own in it.

A plugin of tests/conftest.py, so that all folders share one control plane. Imported by every worker, also those that only run quick tests:
the clients are imported where they are used.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

import pytest

from tests.kube import stock
from tests.kube.binaries import ProgramsMissingError, find_programs
from tests.kube.controlplane import MERGE, ControlPlane
from tests.kube.recorder import Object
from tests.kube.space import Space

if TYPE_CHECKING:
    from kubernetes.aio import client

    from tests.kube.proxy import ApiProxy

NUMBERS = itertools.count(1)


def require_programs() -> None:
    """Skips where the control plane was not built, and fails there when CI=true."""
    try:
        find_programs()
    except ProgramsMissingError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI must run these tests: {error}", pytrace=False)
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def control_plane() -> Iterator[ControlPlane]:
    """A control plane with a simulated kubelet and no node; one per worker. Leave nothing cluster-wide behind in it."""
    require_programs()
    with ControlPlane() as up:
        up.spawn_kubelet()
        yield up


@pytest.fixture
def own_control_plane() -> Iterator[ControlPlane]:
    """A control plane for a test that kills, stops or restarts parts of it."""
    require_programs()
    with ControlPlane() as up:
        up.spawn_kubelet()
        yield up


def short_name(request: pytest.FixtureRequest) -> str:
    """A name that no other test of this worker has, and that tells the test."""
    return f"{re.sub('[^a-z0-9]+', '-', request.node.name.removeprefix('test_').lower())[:36].strip('-')}-{next(NUMBERS)}"


@pytest.fixture
def namespace(control_plane: ControlPlane, request: pytest.FixtureRequest) -> Iterator[str]:
    """A fresh namespace in which pods can be created."""
    name = short_name(request)
    make_namespace(control_plane, name)
    yield name
    control_plane.delete(f"/api/v1/namespaces/{name}")


def make_namespace(control_plane: ControlPlane, name: str) -> None:
    """Makes a namespace and waits for its default account: without it every pod create answers 403."""
    control_plane.create("/api/v1/namespaces", {"metadata": {"name": name}})
    path = f"/api/v1/namespaces/{name}/serviceaccounts/default"
    control_plane.wait_for(lambda: control_plane.exists(path), f"the default service account of {name}")


class NodeFactory(Protocol):
    """Makes one fresh simulated node and gives its name."""

    def __call__(
        self,
        *,
        gpus: int = 8,
        labels: Mapping[str, str] | None = None,
        annotations: Mapping[str, str] | None = None,
    ) -> str: ...


@pytest.fixture
def gpu_node(control_plane: ControlPlane, request: pytest.FixtureRequest) -> Iterator[NodeFactory]:
    """Makes nodes that are Ready and without taints when it returns; they go with the test."""
    from tests.kube.kubelet import node_manifest

    made: list[str] = []

    def make(*, gpus: int = 8, labels: Mapping[str, str] | None = None, annotations: Mapping[str, str] | None = None) -> str:
        name = f"gpu-{short_name(request)}"
        made.append(name)
        control_plane.create(
            "/api/v1/nodes",
            node_manifest(name, gpus=gpus, labels=dict(labels or {}), annotations=dict(annotations or {})),
        )
        path = f"/api/v1/nodes/{name}"
        control_plane.wait_for(lambda: not control_plane.get(path)["spec"].get("taints"), f"node {name} to be schedulable")
        return name

    yield make
    for name in made:
        remove_node(control_plane, name)


def remove_node(control_plane: ControlPlane, name: str) -> None:
    """Takes a node away with all that runs on it."""
    control_plane.delete(f"/api/v1/nodes/{name}")
    pods: list[Object] = control_plane.get(f"/api/v1/pods?fieldSelector=spec.nodeName%3D{name}")["items"]
    for pod in pods:
        meta = pod["metadata"]
        path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"
        if meta.get("finalizers"):
            control_plane.request("PATCH", path, {"metadata": {"finalizers": None}}, content_type=MERGE)
        control_plane.delete(f"{path}?gracePeriodSeconds=0")


@pytest.fixture
def stock_account(control_plane: ControlPlane, namespace: str) -> Iterator[str]:
    """The driver's service account in the test's namespace, with exactly the stock role; gives its name."""
    yield stock.account(control_plane, "driver", namespace)
    stock.remove_account(control_plane, "driver", namespace)


@pytest.fixture
def api_proxy(control_plane: ControlPlane) -> Iterator[ApiProxy]:
    """A proxy in front of the apiserver that fails, holds and slows as told."""
    from tests.kube.proxy import ApiProxy

    with ApiProxy(control_plane) as proxy:
        yield proxy


@contextlib.asynccontextmanager
async def official_client(control_plane: ControlPlane) -> AsyncIterator[client.ApiClient]:
    """The official client's asyncio half, as admin."""
    from kubernetes.aio import client, config

    loaded = type.__call__(client.Configuration)
    path = str(control_plane.kubeconfig())
    await config.load_kube_config(path, client_configuration=loaded)  # type: ignore[no-untyped-call]  # the library's
    async with client.ApiClient(loaded) as made:
        yield made


@pytest.fixture
async def api(control_plane: ControlPlane) -> AsyncIterator[client.ApiClient]:
    """The official client's asyncio half, as admin."""
    async with official_client(control_plane) as made:
        yield made


@pytest.fixture
async def space(control_plane: ControlPlane, namespace: str, gpu_node: NodeFactory) -> AsyncIterator[Space]:
    """A namespace, three nodes of its own, the calls a test needs there, and a record of what happens to its pods."""
    nodes = [gpu_node(labels={"deploy": "true", "space": namespace}) for _ in range(3)]
    with control_plane.record(f"/api/v1/namespaces/{namespace}/pods") as pods:
        yield Space(control_plane, namespace, nodes, pods)
