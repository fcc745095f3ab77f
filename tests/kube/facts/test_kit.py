from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kube.controlplane import ControlPlane
from tests.kube.facts.conftest import Note
from tests.kube.fixtures import make_namespace
from tests.kube.kubelet import node_manifest
from tests.kube.recorder import Object
from tests.kube.space import Space, daemon_set, is_marked, is_ready, pod_spec, until

pytestmark = pytest.mark.kube
ROOT = Path(__file__).parents[3]
STARTER = """\
import json, time
from tests.kube.controlplane import ControlPlane
cp = ControlPlane()
cp.start()
print(json.dumps([cp.url, str(cp.dir), list(cp.pids().values())]), flush=True)
time.sleep(600)
"""


def is_alive(pid: int) -> bool:
    """Whether a process still runs; reaping a dead one is init's affair."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_two_instances_side_by_side_and_no_orphans(control_plane: ControlPlane, note: Note) -> None:
    """A second control plane runs beside the first; SIGKILL of the process that started it leaves nothing behind."""
    with subprocess.Popen([sys.executable, "-c", STARTER], stdout=subprocess.PIPE, cwd=ROOT) as other:
        assert other.stdout
        url, folder, pids = json.loads(other.stdout.readline())
        assert url != control_plane.url
        assert Path(folder).exists()
        assert len(pids) == 5
        assert control_plane.request("GET", "/readyz").status == 200
        other.kill()
    begun = time.monotonic()
    control_plane.wait_for(lambda: not any(map(is_alive, pids)) and not Path(folder).exists(), "orphans to go")
    note("sigkill_to_all_gone_ms", round((time.monotonic() - begun) * 1000))


@pytest.mark.deep
@pytest.mark.timeout(240)
def test_apiserver_outage(own_control_plane: ControlPlane, note: Note) -> None:
    """Killed and started again the apiserver comes back with the same data, and the simulated kubelet carries on."""
    cp = own_control_plane
    make_namespace(cp, "before")
    cp.create("/api/v1/nodes", node_manifest("survivor"))
    cp.kill("kube-apiserver", signal.SIGKILL)
    with pytest.raises(OSError):  # noqa: PT011  # refused or reset, as the moment has it
        cp.request("GET", "/readyz")
    begun = time.monotonic()
    cp.restart("kube-apiserver")
    note("apiserver_restart_s", round(time.monotonic() - begun, 2))
    begun = time.monotonic()
    cp.create("/apis/apps/v1/namespaces/before/daemonsets", daemon_set("after"))

    def ready() -> bool:
        pods = cp.get("/api/v1/namespaces/before/pods")["items"]
        return [is_ready(pod) for pod in pods] == [True]

    cp.wait_for(ready, "the pod of a DaemonSet", 180)  # its controller asks again after pauses that double
    note("daemonset_ready_after_apiserver_restart_s", round(time.monotonic() - begun, 2))


def wishes(**told: str) -> Object:
    """The annotations that tell the simulated kubelet."""
    return {f"kubelet.sim/{key.replace('_', '-')}": value for key, value in told.items()}


async def start(space: Space, name: str, number: int = 0, spec: Object | None = None, **told: str) -> float:
    """Creates a pod bound to one of the nodes; the time of that."""
    await space.create_pod(name, pod_spec(nodeName=space.nodes[number], **(spec or {})), annotations=wishes(**told))
    return time.monotonic()


def of(name: str, test: Callable[[Object], bool]) -> Callable[[str, Object], bool]:
    """For `when`: something is so of the pod with this name."""
    return lambda kind, pod: pod["metadata"]["name"] == name and kind != "DELETED" and test(pod)


def waits_for(pod: Object) -> str:
    """Why the first container waits."""
    states = pod["status"].get("containerStatuses") or [{"state": {}}]
    return str(states[0]["state"].get("waiting", {}).get("reason", ""))


async def test_simulated_pods_start_as_told(space: Space) -> None:
    """Slow starts, never ready, restarts and finishing are steered by annotations of the pod."""
    once = {"restartPolicy": "Never"}
    await start(space, "plain")
    slow = await start(space, "slow", start_after="700ms")
    await start(space, "unready", ready="never")
    await start(space, "flaky", restarts="3")
    await start(space, "done", spec=once, finish="succeeded")
    await start(space, "broken", spec=once, finish="failed")
    await start(space, "no-image", image="missing")
    _, ready = await space.when(of("plain", is_ready))
    assert ready["status"]["phase"] == "Running"
    assert ready["status"]["containerStatuses"][0]["started"]
    assert ready["status"]["podIP"]
    assert ready["status"]["qosClass"] == "BestEffort"
    assert not any(c["type"] == "PodScheduled" for c in ready["status"]["conditions"])  # bound from birth
    at, _ = await space.when(of("slow", is_ready))
    assert at - slow > 0.65
    await space.when(of("flaky", lambda p: is_ready(p) and p["status"]["containerStatuses"][0]["restartCount"] == 3))
    await space.when(of("done", lambda p: p["status"]["phase"] == "Succeeded"))
    await space.when(of("broken", lambda p: p["status"]["phase"] == "Failed"))
    await space.when(of("no-image", lambda p: waits_for(p) == "ImagePullBackOff"))
    _, seen = await space.when(of("unready", lambda p: p["status"]["phase"] == "Running"))
    assert not is_ready(seen)
    await space.patch(f"{space.path}/pods/unready", {"metadata": {"annotations": {"kubelet.sim/ready": None}}})
    await space.when(of("unready", is_ready))


async def test_simulated_init_containers(space: Space) -> None:
    """Each init container takes its time, or hangs, and the pod says so."""
    inits: Object = {"initContainers": [{"name": "k8s-driver-manager", "image": "none"}]}
    begun = await start(space, "init", spec=inits, init_after="500ms")
    await start(space, "init-stuck", spec=inits, init_after="never")
    at, _ = await space.when(of("init", is_ready))
    assert at - begun > 0.45

    def runs(pod: Object) -> bool:
        states = pod["status"].get("initContainerStatuses")
        return bool(states) and "running" in states[0]["state"]

    _, seen = await space.when(of("init-stuck", runs))
    assert seen["status"]["phase"] == "Pending"
    assert waits_for(seen) == "PodInitializing"


@pytest.mark.slow
async def test_simulated_pods_end_as_told(space: Space) -> None:
    """A pod stops at once, in its time, at the end of its grace, or never; a finalizer holds it with all containers down."""
    await start(space, "plain")
    await start(space, "lingers", stop_after="1500ms")
    await start(space, "all-grace", spec={"terminationGracePeriodSeconds": 2}, stop_after="grace")
    await start(space, "cut-off", spec={"terminationGracePeriodSeconds": 1}, stop_after="60s")
    await start(space, "hangs", stop_after="never")
    spec = pod_spec(nodeName=space.nodes[0])
    await space.create_pod("held", spec, finalizers=["example.com/hold"])
    for name in ("plain", "lingers", "all-grace", "cut-off", "hangs", "held"):
        await space.when(of(name, is_ready))

    async def delete(name: str) -> float:
        begun = time.monotonic()
        await space.delete_pod(name)
        gone, _ = await space.when(lambda kind, p: kind == "DELETED" and p["metadata"]["name"] == name)
        return gone - begun

    assert await delete("plain") < 0.5
    assert 1.45 < await delete("lingers") < 2.2
    assert 1.95 < await delete("all-grace") < 2.7
    assert 0.95 < await delete("cut-off") < 1.7
    for name in ("hangs", "held"):
        await space.delete_pod(name)
    await space.when(of("held", lambda p: is_marked(p) and p["status"]["phase"] == "Failed"))
    await asyncio.sleep(1)
    left = {p["metadata"]["name"]: p for p in await space.pods()}
    assert is_marked(left["hangs"])
    assert left["hangs"]["status"]["phase"] == "Running"
    assert left["held"]["metadata"]["deletionGracePeriodSeconds"] == 0  # the kubelet's DELETE went through
    await space.patch(f"{space.path}/pods/held", {"metadata": {"finalizers": None}})
    await space.when(lambda kind, p: kind == "DELETED" and p["metadata"]["name"] == "held")
    await space.delete_pod("hangs", "?gracePeriodSeconds=0")
    await space.when(lambda kind, p: kind == "DELETED" and p["metadata"]["name"] == "hangs")


async def test_a_simulated_node_can_be_bad(space: Space) -> None:
    """An annotation of the node holds for all its pods, until it goes."""
    await space.patch_node(1, {"metadata": {"annotations": wishes(stop_after="never")}})
    await start(space, "there", 1)
    await space.when(of("there", is_ready))
    await space.delete_pod("there")
    await asyncio.sleep(0.5)
    assert [p["metadata"]["name"] for p in await space.pods()] == ["there"]
    await space.patch_node(1, {"metadata": {"annotations": None}})
    await space.when(lambda kind, p: kind == "DELETED" and p["metadata"]["name"] == "there")
    for number in range(3):
        node = await space.node(number)
        assert node["status"]["allocatable"]["nvidia.com/gpu"] == "8"
        assert not node["spec"].get("taints")


async def test_what_follows_a_simulated_driver(space: Space) -> None:
    """A pod that needs a driver is Ready only with it and goes with it; the node's devices come and go with it."""
    labels = {"app.kubernetes.io/component": "nvidia-driver"}

    async def has(devices: str) -> bool:
        return bool((await space.node())["status"]["allocatable"]["nvidia.com/gpu"] == devices)

    await space.patch_node(0, {"metadata": {"annotations": wishes(devices="4", devices_after="300ms")}})
    await until(lambda: has("0"), "no devices without a driver")
    await start(space, "validator", needs="nvidia-driver")
    _, waiting = await space.when(of("validator", lambda p: p["status"].get("phase") == "Running"))
    assert not is_ready(waiting)
    await space.create_pod("driver", pod_spec(nodeName=space.nodes[0]), labels=labels)
    at, _ = await space.when(of("driver", is_ready))
    await space.when(of("validator", is_ready), since=at)
    await until(lambda: has("4"), "the devices")
    await space.delete_pod("driver")
    await space.when(lambda kind, p: kind == "DELETED" and p["metadata"]["name"] == "validator")
    await until(lambda: has("0"), "no devices without a driver")


async def test_a_simulated_pod_that_never_comes_up(space: Space) -> None:
    """One that is never Ready may crash instead, and comes up when it is let."""
    await start(space, "crashes", ready="never", restarts="2")
    _, crashed = await space.when(of("crashes", lambda p: (p["status"].get("containerStatuses") or [{}])[0].get("restartCount") == 2))
    assert waits_for(crashed) == "CrashLoopBackOff"
    assert not any(is_ready(event.object) for event in space.recorder.of("crashes"))
    await space.patch(f"{space.path}/pods/crashes", {"metadata": {"annotations": {"kubelet.sim/ready": None}}})
    await space.when(of("crashes", is_ready))
