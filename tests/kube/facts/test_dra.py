from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from tests.kube.components import Options
from tests.kube.controlplane import ControlPlane
from tests.kube.facts.conftest import Note
from tests.kube.recorder import Object
from tests.kube.space import Space, is_marked, is_ready, node_of, pod_spec, until

pytestmark = [pytest.mark.kube, pytest.mark.deep]
DRA = "/apis/resource.k8s.io/v1"
DRIVER = "gpu.nvidia.com"
PublishGpus = Callable[..., Awaitable[None]]


class Claims:
    """The claims of a space, and pods that use them."""

    def __init__(self, space: Space) -> None:
        self.space, self.path = space, f"{DRA}/namespaces/{space.name}/resourceclaims"

    async def all(self) -> list[Object]:
        """All claims of the namespace."""
        items: list[Object] = (await self.space.get(self.path))["items"]
        return items

    async def none_left(self) -> bool:
        """Whether there is no claim any more."""
        return not await self.all()

    async def create(self, name: str, **exactly: Any) -> Object:
        """Creates a claim for devices of the class."""
        made: Object = await self.space.do("POST", self.path, {"metadata": {"name": name}, "spec": request(**exactly)}, 201)
        return made

    async def status(self, name: str) -> Object:
        """The status of a claim."""
        found: Object = (await self.space.get(f"{self.path}/{name}")).get("status", {})
        return found

    async def use(self, pod: str, *, number: int | None = None, **source: str) -> Object:
        """Creates a pod that uses one claim."""
        container = {"name": "main", "image": "none", "resources": {"claims": [{"name": "gpu"}]}}
        where = {"space": self.space.name} if number is None else {"kubernetes.io/hostname": self.space.nodes[number]}
        spec = pod_spec(containers=[container], resourceClaims=[{"name": "gpu", **source}], nodeSelector=where)
        return await self.space.create_pod(pod, spec)

    async def ready(self, pod: str) -> Object:
        """Waits for that pod."""
        _, found = await self.space.when(lambda kind, p: is_ready(p) and p["metadata"]["name"] == pod)
        return found


def request(**exactly: Any) -> Object:
    """The spec of a claim."""
    return {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": DRIVER, **exactly}}]}}


@pytest.fixture
async def publish(space: Space) -> AsyncIterator[PublishGpus]:
    """Publishes what a DRA driver does: its class, and one slice per node with two GPUs. They go with the test."""
    made: list[str] = []

    async def create(collection: str, body: Object) -> None:
        made.append(f"{collection}/{body['metadata']['name']}")
        await space.do("POST", collection, body, 201)

    async def gpus(driver: str = DRIVER, extended: str | None = None) -> None:
        spec: Object = {"selectors": [{"cel": {"expression": f'device.driver == "{driver}"'}}]}
        if extended:
            spec["extendedResourceName"] = extended
        await create(f"{DRA}/deviceclasses", {"metadata": {"name": driver}, "spec": spec})
        for node in space.nodes:
            devices = [
                {
                    "name": f"gpu-{n}",
                    "attributes": {"type": {"string": "gpu"}, "uuid": {"string": f"GPU-{node}-{n}"}},
                    "capacity": {"memory": {"value": "80Gi"}},
                }
                for n in range(2)
            ]
            pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
            of_node = {"driver": driver, "nodeName": node, "pool": pool, "devices": devices}
            await create(f"{DRA}/resourceslices", {"metadata": {"name": f"{node}-{driver}"}, "spec": of_node})

    yield gpus
    for path in made:
        await space.ask("DELETE", path)


@pytest.fixture
async def claims(space: Space, publish: PublishGpus) -> Claims:
    """A space with two GPUs on each of its nodes."""
    await publish()
    return Claims(space)


async def test_a_generated_claim(claims: Claims, note: Note) -> None:
    """A claim from a template is allocated and reserved for its pod, protected meanwhile, and goes with the pod."""
    space = claims.space
    template = {"metadata": {"name": "one-gpu"}, "spec": {"spec": request()}}
    await space.do("POST", f"{DRA}/namespaces/{space.name}/resourceclaimtemplates", template, 201)
    begun = time.monotonic()
    pod = await claims.use("train", resourceClaimTemplateName="one-gpu")
    ready = await claims.ready("train")
    note("pod_create_to_ready_with_claim_ms", round((time.monotonic() - begun) * 1000))
    (claim,) = await claims.all()
    meta = claim["metadata"]
    assert meta["name"] == ready["status"]["resourceClaimStatuses"][0]["resourceClaimName"]
    assert meta["name"].startswith("train-gpu-")
    assert meta["annotations"] == {"resource.kubernetes.io/pod-claim-name": "gpu"}
    assert meta["ownerReferences"][0]["uid"] == pod["metadata"]["uid"]
    assert meta["finalizers"] == ["resource.kubernetes.io/delete-protection"]
    assert claim["status"]["reservedFor"] == [{"resource": "pods", "name": "train", "uid": pod["metadata"]["uid"]}]
    (result,) = claim["status"]["allocation"]["devices"]["results"]
    assert (result["request"], result["driver"], result["pool"]) == ("gpu", DRIVER, ready["spec"]["nodeName"])
    marked = await space.do("DELETE", f"{claims.path}/{meta['name']}")
    assert marked["metadata"]["finalizers"] == ["resource.kubernetes.io/delete-protection"]  # stays while allocated
    await space.delete_pod("train")
    await space.when(lambda kind, p: kind == "DELETED")
    gone = time.monotonic()
    await until(claims.none_left, "the generated claim to go", 40, every=0.005)
    note("pod_gone_to_generated_claim_gone_ms", round((time.monotonic() - gone) * 1000))


async def test_a_shared_claim(claims: Claims, note: Note) -> None:
    """A claim with a name of its own stays: first its reservations go, with the last of them the allocation."""
    await claims.create("shared")
    for name in ("one", "two"):
        await claims.use(name, resourceClaimName="shared")
        await claims.ready(name)
    assert len((await claims.status("shared"))["reservedFor"]) == 2
    assert len({node_of(pod) for pod in await claims.space.pods()}) == 1
    begun = time.monotonic()
    await claims.space.delete_pod("one", "?gracePeriodSeconds=0")

    async def one_left() -> bool:
        return [r["name"] for r in (await claims.status("shared")).get("reservedFor", [])] == ["two"]

    await until(one_left, "the reservation to shrink", 40, every=0.005)
    note("pod_gone_to_reservation_gone_ms", round((time.monotonic() - begun) * 1000))
    begun = time.monotonic()
    await claims.space.delete_pod("two", "?gracePeriodSeconds=0")

    async def is_free() -> bool:
        return "allocation" not in await claims.status("shared")

    await until(is_free, "the allocation to go", 40, every=0.005)
    note("last_pod_gone_to_deallocated_ms", round((time.monotonic() - begun) * 1000))
    assert await claims.status("shared") == {}


async def test_a_claim_that_cannot_be_met(claims: Claims) -> None:
    """The pod waits, and its condition says so."""
    await claims.create("big", count=3)
    await claims.use("waits", resourceClaimName="big")
    _, waiting = await claims.space.when(lambda kind, p: bool(p["status"].get("conditions")))
    condition = waiting["status"]["conditions"][0]
    assert (condition["type"], condition["status"]) == ("PodScheduled", "False")
    assert "cannot allocate all claims" in condition["message"]
    assert "allocation" not in await claims.status("big")


async def test_a_device_taint_drains(claims: Claims, note: Note) -> None:
    """A DeviceTaintRule with NoExecute deletes the pods that use the devices of one pool."""
    space = claims.space
    await claims.create("tainted")
    await claims.use("tainted", number=0, resourceClaimName="tainted")
    await claims.ready("tainted")
    taint = {"key": "nvidia.com/gpu-driver-update", "value": "run-1", "effect": "NoExecute"}
    name = f"drain-{space.nodes[0]}"
    rule = {"metadata": {"name": name}, "spec": {"deviceSelector": {"driver": DRIVER, "pool": space.nodes[0]}, "taint": taint}}
    begun = time.monotonic()
    await space.do("POST", f"{DRA}/devicetaintrules", rule, 201)
    try:
        at, _ = await space.when(lambda kind, p: is_marked(p), begun, 30)
        note("device_taint_no_execute_to_pod_marked_ms", round((at - begun) * 1000))
        note("device_taint_rule_status", (await space.get(f"{DRA}/devicetaintrules/{name}")).get("status"))
    finally:
        await space.do("DELETE", f"{DRA}/devicetaintrules/{name}")


async def test_admin_access(claims: Claims) -> None:
    """Admin access needs a label on the namespace, and takes no device away from anybody."""
    space = claims.space
    wish = request(allocationMode="All", adminAccess=True)
    refused = await space.ask("POST", claims.path, {"metadata": {"name": "monitor"}, "spec": wish})
    assert refused.status == 422
    assert "resource.kubernetes.io/admin-access" in refused.body["message"]
    await space.patch(space.path, {"metadata": {"labels": {"resource.kubernetes.io/admin-access": "true"}}})
    await claims.create("monitor", allocationMode="All", adminAccess=True)
    await claims.use("monitor", number=0, resourceClaimName="monitor")
    await claims.ready("monitor")
    results = (await claims.status("monitor"))["allocation"]["devices"]["results"]
    assert [result["adminAccess"] for result in results] == [True, True]
    await claims.create("both", count=2)
    await claims.use("user", number=0, resourceClaimName="both")
    await claims.ready("user")  # all GPUs of the node, beside the monitor


async def test_an_extended_resource(space: Space, publish: PublishGpus, note: Note) -> None:
    """A plain request is served from DRA where a class carries its name: no device plugin, and no claim in the pod's spec."""
    await publish("dra.nvidia.com", extended="example.com/gpu")
    claims = Claims(space)
    amount = {"example.com/gpu": "2"}
    container = {"name": "main", "image": "none", "resources": {"requests": amount, "limits": amount}}
    await space.create_pod("plain", pod_spec(containers=[container], nodeSelector={"space": space.name}))
    pod = await claims.ready("plain")
    assert "resourceClaims" not in pod["spec"]
    (claim,) = await claims.all()
    assert pod["status"]["extendedResourceClaimStatus"]["resourceClaimName"] == claim["metadata"]["name"]
    assert pod["status"]["extendedResourceClaimStatus"]["requestMappings"]
    assert claim["metadata"]["name"].startswith("plain-extended-resources-")
    assert claim["metadata"]["annotations"] == {"resource.kubernetes.io/extended-resource-claim": "true"}
    assert claim["status"]["reservedFor"][0]["name"] == "plain"
    begun = time.monotonic()
    await space.delete_pod("plain")
    await until(claims.none_left, "the hidden claim to go", 40)
    note("extended_claim_gone_ms", round((time.monotonic() - begun) * 1000))


@pytest.mark.usefixtures("control_plane")  # says where the programs are missing
@pytest.mark.parametrize("version", ["v1beta1", "v1beta2", "v1alpha3"])
def test_older_versions_of_the_api(version: str, note: Note) -> None:
    """The betas and an alpha of resource.k8s.io are still served when asked for."""
    options = Options(runtime_config=(f"resource.k8s.io/{version}=true",))
    with ControlPlane(options=options, components=("etcd", "kube-apiserver"), start_timeout=30) as other:
        found = {resource["name"] for resource in other.get(f"/apis/resource.k8s.io/{version}")["resources"]}
    note("resources", sorted(found))
    assert "devicetaintrules" in found or "resourceclaims" in found
    assert version != "v1beta2" or {"resourceclaims", "resourceslices", "deviceclasses", "devicetaintrules"} <= found
