"""The node of a machine without a cluster: one file, guarded, and gone when nothing is in it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from driver_manager import names
from driver_manager.errors import Conflict, Forbidden, InvariantBroken, NotFound, Refused
from driver_manager.host.local import LocalCluster, open_local
from driver_manager.ports import Cluster, NodePatch


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A host tree with a name and an id."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/hostname").write_text("metal-1\n")
    (tmp_path / "etc/machine-id").write_text("0123456789abcdef\n")
    return tmp_path


@pytest.fixture
def cluster(root: Path) -> LocalCluster:
    """Its node."""
    return open_local(root, "")


def file_of(root: Path) -> Path:
    return root / names.LOCAL_NODE


async def test_an_untouched_machine(cluster: LocalCluster, root: Path) -> None:
    """Name and uid come from the host, and reading writes nothing."""
    node = await cluster.node("metal-1")
    assert (node.name, node.uid, dict(node.labels), dict(node.annotations)) == ("metal-1", "0123456789abcdef", {}, {})
    assert not file_of(root).exists()
    port: Cluster = cluster
    assert port.identity.pod_uid == ""


async def test_another_name_is_another_node(cluster: LocalCluster, root: Path) -> None:
    """A given name wins over the host's; any other node does not exist."""
    assert (await open_local(root, "given").node("given")).name == "given"
    with pytest.raises(NotFound, match="metal-1"):
        await cluster.node("other")


async def test_what_is_written_is_read_by_another(cluster: LocalCluster, root: Path) -> None:
    """Annotations last from one process to the next; the file is JSON for people too."""
    written = await cluster.patch_node(NodePatch(name="metal-1", resource_version="0", annotations={"a": "1", "b": "2"}))
    assert await open_local(root, "").node("metal-1") == written
    assert json.loads(file_of(root).read_text())["annotations"] == {"a": "1", "b": "2"}


async def test_the_version_guards(cluster: LocalCluster) -> None:
    """A change that rests on an older version is a conflict, also when the file went and came back meanwhile."""
    first = await cluster.patch_node(NodePatch(name="metal-1", resource_version="0", annotations={"a": "1"}))
    second = await cluster.patch_node(NodePatch(name="metal-1", resource_version=first.resource_version, annotations={"a": "2"}))
    assert second.resource_version != first.resource_version
    for version in ("0", first.resource_version):
        with pytest.raises(Conflict):
            await cluster.patch_node(NodePatch(name="metal-1", resource_version=version, annotations={"a": "3"}))
    await cluster.patch_node(NodePatch(name="metal-1", annotations={"a": None}))
    await cluster.patch_node(NodePatch(name="metal-1", resource_version="0", annotations={"a": "4"}))
    with pytest.raises(Conflict):
        await cluster.patch_node(NodePatch(name="metal-1", resource_version=first.resource_version, annotations={"a": "5"}))


async def test_the_file_goes_with_its_last_annotation(cluster: LocalCluster, root: Path) -> None:
    """Nothing is left behind; taking away what is not there is no write."""
    await cluster.patch_node(NodePatch(name="metal-1", annotations={"a": "1"}))
    await cluster.patch_node(NodePatch(name="metal-1", annotations={"a": None, "b": None}))
    assert not file_of(root).exists()
    assert not list(file_of(root).parent.iterdir())
    await cluster.patch_node(NodePatch(name="metal-1", annotations={"a": None}))
    assert not file_of(root).exists()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"version": 1}', '{"version": "1", "annotations": {}}', '{"version": 1, "annotations": {"a": 1}}']
)
async def test_a_file_that_is_not_ours(cluster: LocalCluster, root: Path, text: str) -> None:
    """A file that is not understood is a refusal that names it, and it is never written over."""
    file_of(root).parent.mkdir(parents=True)
    file_of(root).write_text(text)
    with pytest.raises(Refused, match="not understood"):
        await cluster.patch_node(NodePatch(name="metal-1", annotations={"a": "1"}))
    assert file_of(root).read_text() == text


async def test_what_a_machine_does_not_have(cluster: LocalCluster) -> None:
    """Labels, cordon and taints are a bug of whoever asks for them; everything is allowed; there are no pods."""
    with pytest.raises(InvariantBroken):
        await cluster.patch_node(NodePatch(name="metal-1", labels={"a": "b"}))
    assert (await cluster.permissions("ns")).allow("patch", "", "nodes")
    assert (await cluster.pods_on("metal-1")).items == ()
    with pytest.raises(NotFound):
        await cluster.daemon_set("ns", "name")


async def test_no_pod_ever_changes(cluster: LocalCluster) -> None:
    """The watch waits until it is stopped."""
    watch = cluster.pod_changes("metal-1", await cluster.pods_on("metal-1"))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await anext(watch)


async def test_a_place_that_cannot_be_written(cluster: LocalCluster, root: Path) -> None:
    """Told as a missing permission, with the path."""
    (root / "run").write_text("a file in the way")
    with pytest.raises(Forbidden, match="cannot be written"):
        await cluster.patch_node(NodePatch(name="metal-1", annotations={"a": "1"}))
