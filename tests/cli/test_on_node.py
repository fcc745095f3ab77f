"""The manifest that people copy to run one command on one node."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped,unused-ignore]

from tests.cli.documents import ROOT
from tests.kube import stock
from tests.kube.controlplane import ControlPlane


def manifest() -> dict[str, Any]:
    """The Job, as the command in its comment makes it."""
    text = (ROOT / "docs/on-node.yaml").read_text()
    for _, placeholder, value in re.findall(r"-e s([/,])(\S+?)\1(\S+?)\1", text):
        text = text.replace(placeholder, value)
    made: dict[str, Any] = yaml.safe_load(text)
    return made


def test_it_has_what_the_init_container_has() -> None:
    """Mounts, volumes, privilege, account and the host's processes are those of the stock driver DaemonSet's init container."""
    ours, theirs = manifest()["spec"]["template"]["spec"], stock.driver_daemon_set()["spec"]["template"]["spec"]
    mine, init = ours["containers"][0], theirs["initContainers"][0]
    mellanox = "run-mellanox-drivers"  # of no matter to anybody but the network driver
    assert mine["volumeMounts"] == [each for each in init["volumeMounts"] if each["name"] != mellanox]
    assert ours["volumes"] == [each for each in theirs["volumes"] if each["name"] != mellanox]
    assert mine["securityContext"] == init["securityContext"]
    assert (ours["serviceAccountName"], ours["hostPID"]) == (theirs["serviceAccountName"], theirs["hostPID"])
    assert (ours["nodeName"], mine["image"]) == ("gpu-1", "registry.example/driver-manager:0.1.0")
    assert {"NODE_NAME", "OPERATOR_NAMESPACE"} == {each["name"] for each in mine["env"]}


@pytest.mark.kube
def test_the_api_server_takes_it(control_plane: ControlPlane, namespace: str) -> None:
    """A real API server knows every field of it."""
    body = manifest()
    body["metadata"]["namespace"] = namespace
    path = f"/apis/batch/v1/namespaces/{namespace}/jobs?dryRun=All&fieldValidation=Strict"
    assert control_plane.create(path, body)["spec"]["template"]["spec"]["nodeName"] == "gpu-1"
