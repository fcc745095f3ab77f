from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.kube.facts.conftest import Note
from tests.kube.space import Space, is_ready, pod_spec, until

pytestmark = [pytest.mark.kube, pytest.mark.deep]
CLASSES = "/apis/node.k8s.io/v1/runtimeclasses"


@pytest.fixture
async def no_class(space: Space) -> AsyncIterator[None]:
    """Takes the class away after the test, whatever became of it."""
    yield
    await space.ask("DELETE", f"{CLASSES}/nvidia")


@pytest.mark.usefixtures("no_class")
async def test_runtime_class(space: Space, note: Note) -> None:
    """A pod that names a RuntimeClass is let in only when it exists; deleting the class hurts nobody who runs."""
    wanted = {"metadata": {"name": "gpu"}, "spec": pod_spec(runtimeClassName="nvidia", nodeSelector={"space": space.name})}
    refused = await space.ask("POST", f"{space.path}/pods", wanted)
    assert refused.status == 403
    assert refused.body["message"] == 'pods "gpu" is forbidden: pod rejected: RuntimeClass "nvidia" not found'
    runtime = {"metadata": {"name": "nvidia"}, "handler": "nvidia", "scheduling": {"nodeSelector": {"deploy": "true"}}}
    await space.do("POST", CLASSES, runtime, 201)
    begun = time.monotonic()

    async def admitted() -> Any:
        answer = await space.ask("POST", f"{space.path}/pods", wanted)
        return answer.body if answer.status == 201 else None

    made = await until(admitted, "the class to be known", every=0.002)
    note("class_create_to_pod_admitted_ms", round((time.monotonic() - begun) * 1000))
    assert made["spec"]["runtimeClassName"] == "nvidia"
    assert made["spec"]["nodeSelector"] == {"deploy": "true", "space": space.name}
    await space.when(lambda kind, p: is_ready(p))
    await space.do("DELETE", f"{CLASSES}/nvidia")
    assert is_ready((await space.pods())[0])
