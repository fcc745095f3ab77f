from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.kube.controlplane import ControlPlane
from tests.kube.facts.conftest import Note
from tests.kube.recorder import Object
from tests.kube.space import Space, until

pytestmark = [pytest.mark.kube, pytest.mark.deep]
GROUP = "facts.nvidia.com"
DRIVERS = f"/apis/{GROUP}/v1/nvidiadrivers"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


def crd() -> Object:
    """A CRD with a default, an enumeration, a status subresource and two rules."""
    rules = [
        {"rule": "!has(self.driverType) || self.driverType != 'vgpu' || has(self.image)", "message": "vgpu needs an image"},
        {"rule": "!has(oldSelf.driverType) || self.driverType == oldSelf.driverType", "message": "driverType is immutable"},
    ]
    fields = {"driverType": {"type": "string", "enum": ["gpu", "vgpu"], "default": "gpu"}, "image": {"type": "string"}}
    spec = {"type": "object", "x-kubernetes-validations": rules, "properties": fields}
    status = {"type": "object", "properties": {"state": {"type": "string"}}}
    schema = {"openAPIV3Schema": {"type": "object", "properties": {"spec": spec, "status": status}}}
    version = {"name": "v1", "served": True, "storage": True, "subresources": {"status": {}}, "schema": schema}
    names = {"plural": "nvidiadrivers", "singular": "nvidiadriver", "kind": "NVIDIADriver", "listKind": "NVIDIADriverList"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"nvidiadrivers.{GROUP}"},
        "spec": {"group": GROUP, "scope": "Cluster", "names": names, "versions": [version]},
    }


def driver(name: str, **spec: Any) -> Object:
    """A custom resource."""
    return {"apiVersion": f"{GROUP}/v1", "kind": "NVIDIADriver", "metadata": {"name": name}, "spec": spec}


@pytest.fixture
async def drivers(space: Space, note: Note) -> AsyncIterator[str]:
    """The path of the custom resources, while their CRD is there."""
    begun = time.monotonic()
    await space.do("POST", CRDS, crd(), 201)
    await until(lambda: space.has_status(DRIVERS, 200), "the CRD to be served", every=0.002)
    note("crd_create_to_served_ms", round((time.monotonic() - begun) * 1000))
    yield DRIVERS
    begun = time.monotonic()
    await space.do("DELETE", f"{CRDS}/nvidiadrivers.{GROUP}")
    await until(lambda: space.has_status(DRIVERS, 404), "the CRD to go", every=0.002)
    note("crd_delete_to_404_ms", round((time.monotonic() - begun) * 1000))


async def test_status_is_a_subresource(space: Space, drivers: str) -> None:
    """A create and a patch drop the status; a patch of the status drops the spec and keeps the generation."""
    made = await space.do("POST", drivers, driver("a") | {"status": {"state": "ready"}}, 201)
    assert "status" not in made
    assert made["spec"] == {"driverType": "gpu"}
    assert made["metadata"]["generation"] == 1
    got = await space.patch(f"{drivers}/a/status", {"status": {"state": "ready"}, "spec": {"image": "x"}})
    assert got["status"] == {"state": "ready"}
    assert "image" not in got["spec"]
    assert got["metadata"]["generation"] == 1
    got = await space.patch(f"{drivers}/a", {"status": {"state": "other"}, "spec": {"image": "x"}})
    assert got["status"] == {"state": "ready"}
    assert got["metadata"]["generation"] == 2


async def test_validation(space: Space, drivers: str) -> None:
    """A rule is 422 with a cause; an unknown field is pruned with a warning, and 400 where the client asks for strictness."""
    bad = await space.ask("POST", drivers, driver("b", driverType="vgpu"))
    assert bad.status == 422
    assert bad.body["details"]["causes"][0]["reason"] == "FieldValueInvalid"
    assert "vgpu needs an image" in bad.body["message"]
    await space.do("POST", drivers, driver("a", image="x"), 201)
    frozen = await space.ask("PATCH", f"{drivers}/a", {"spec": {"driverType": "vgpu"}}, content_type="application/merge-patch+json")
    assert frozen.status == 422
    assert "immutable" in frozen.body["message"]
    unknown = await space.ask("POST", f"{drivers}?fieldValidation=Strict", driver("c", nope=1))
    assert unknown.status == 400
    pruned = await space.ask("POST", drivers, driver("c", nope=1))
    assert (pruned.status, pruned.body["spec"]) == (201, {"driverType": "gpu"})
    assert pruned.headers["warning"] == '299 - "unknown field \\"spec.nope\\""'


def child(space: Space, owner: Object) -> Object:
    """A DaemonSet that belongs to a custom resource, and takes a second to stop."""
    made = space.daemon_set_manifest("owned", annotations={"kubelet.sim/stop-after": "1s"})
    made["metadata"]["ownerReferences"] = [reference(owner)]
    return made


def reference(owner: Object) -> Object:
    """The controller reference to a custom resource."""
    meta = owner["metadata"]
    link = {"apiVersion": f"{GROUP}/v1", "kind": "NVIDIADriver", "name": meta["name"], "uid": meta["uid"]}
    return link | {"controller": True, "blockOwnerDeletion": True}


@pytest.mark.timeout(180)
async def test_garbage_collection_of_a_young_kind(space: Space, drivers: str, note: Note) -> None:
    """Orphan takes the owner off; Foreground deletes children first, the owner last. Both wait until the collector knows the kind."""
    owner = await space.do("POST", drivers, driver("a"), 201)
    await space.do("POST", f"{space.apps}/daemonsets", child(space, owner), 201)
    await space.ready("app=owned", 3)
    begun = time.monotonic()
    await space.do("DELETE", f"{drivers}/a?propagationPolicy=Orphan")
    await until(lambda: space.has_status(f"{drivers}/a", 404), "the owner to go", 90, every=0.02)
    note("orphan_delete_of_a_young_kind_ms", round((time.monotonic() - begun) * 1000))
    owned = f"{space.apps}/daemonsets/owned"
    assert "ownerReferences" not in (await space.get(owned))["metadata"]
    again = await space.do("POST", drivers, driver("a"), 201)
    await space.patch(owned, {"metadata": {"ownerReferences": [reference(again)]}})
    await asyncio.sleep(0.2)
    answer = await space.do("DELETE", f"{drivers}/a?propagationPolicy=Foreground")
    assert answer["metadata"]["finalizers"] == ["foregroundDeletion"]
    await until(lambda: space.has_status(f"{drivers}/a", 404), "the owner to go", 60)
    assert await space.has_status(owned, 404)  # the owner goes last
    note("pods_left_when_foreground_owner_is_gone", [p["status"]["phase"] for p in await space.pods("app=owned")])


@pytest.mark.usefixtures("control_plane")  # says where the programs are missing
def test_garbage_collection_of_a_kind_from_the_start(note: Note) -> None:
    """CRDs that are there before the controllers start are garbage collected at once."""
    with ControlPlane(crds=[crd()]) as other:
        other.create(DRIVERS, driver("a"))
        begun = time.monotonic()
        other.delete(f"{DRIVERS}/a?propagationPolicy=Orphan")
        other.wait_for(lambda: not other.exists(f"{DRIVERS}/a"), "the object to go", 60, every=0.005)
        note("orphan_delete_with_crd_from_the_start_ms", round((time.monotonic() - begun) * 1000))
        assert time.monotonic() < begun + 5
