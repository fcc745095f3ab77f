from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from driver_manager import kube
from driver_manager.errors import ConfigError
from tests.unit.kube.server import Api, QuickClock, answers, node, write_kubeconfig

SECRET = "do-not-print-me"


async def complaint(kubeconfig: str | None, clock: QuickClock) -> str:
    with pytest.raises(ConfigError) as error:
        await kube.connect(kubeconfig, clock)
    return str(vars(error.value))


async def test_a_missing_file_is_named(clock: QuickClock, tmp_path: Path) -> None:
    """Nothing is guessed instead, and it is said how a file is named and tried."""
    said = await complaint(str(tmp_path / "none"), clock)
    assert str(tmp_path / "none") in said
    assert "--kubeconfig FILE" in said


@pytest.mark.parametrize(
    "text",
    [
        "",
        "just words",
        "[1, 2]",
        "{]",
        "\x00",
        "apiVersion: v1",
        "clusters: 5",
        f'{{"current-context": "x", "contexts": [{{"token": "{SECRET}"}}], "clusters": [], "users": []}}',
        f'{{"current-context": "x", "contexts": [{{"name": "x", "context": {{"cluster": "{SECRET}"}}}}], "clusters": []}}',
        f"users: [{{name: me, user: {{token: {SECRET}}}",
    ],
)
async def test_a_broken_file_is_named_and_not_quoted(clock: QuickClock, tmp_path: Path, text: str) -> None:
    """Any file gives an error with the file's name."""
    (tmp_path / "config").write_text(text)
    assert str(tmp_path / "config") in await complaint(str(tmp_path / "config"), clock)


async def test_secrets_of_a_broken_entry_stay_inside(clock: QuickClock, tmp_path: Path) -> None:
    """The library's own message for an entry without a key holds the whole entry."""
    path = Path(write_kubeconfig(tmp_path / "config", "http://x"))
    config = json.loads(path.read_text())
    config["contexts"][0] = {"name": "test", "token": SECRET}
    path.write_text(json.dumps(config))
    said = await complaint(str(path), clock)
    assert "Expected key context" in said
    assert SECRET not in said


@pytest.mark.parametrize("server", ["", "ftp://x", "localhost:6443", "https://", "https://x:port"])
async def test_a_server_must_be_a_server(clock: QuickClock, tmp_path: Path, server: str) -> None:
    """A URL that no request can go to is found before the first one."""
    assert "no usable server" in await complaint(write_kubeconfig(tmp_path / "config", server), clock)


async def test_an_authority_must_be_there_and_be_one(clock: QuickClock, tmp_path: Path) -> None:
    """A certificate that is missing, or none."""
    path = write_kubeconfig(tmp_path / "config", "https://x", **{"certificate-authority": "ca.crt"})
    assert "ca.crt" in await complaint(path, clock)
    (tmp_path / "ca.crt").write_text("no certificate")
    assert "a certificate or key cannot be used" in await complaint(path, clock)


async def test_outside_of_a_cluster(clock: QuickClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a kubeconfig it must be a pod, and the hint says what else to do."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    said = await complaint(None, clock)
    assert "no pod of a cluster" in said
    assert "KUBECONFIG" in said
    assert "~/.kube/config" in said


@pytest.mark.real_sockets
async def test_a_path_list_in_yaml(api: Api, clock: QuickClock, tmp_path: Path) -> None:
    """As in $KUBECONFIG: several files, of which some may be missing; a server below a path."""
    config = f"""
        current-context: a
        clusters: [{{name: c, cluster: {{server: "{api.url}/k8s/clusters/x/"}}}}]
        users: [{{name: u, user: {{username: me, password: word}}}}]
        contexts: [{{name: a, context: {{cluster: c, user: u}}}}]
    """
    (tmp_path / "b").write_text(config)
    api.will(answers(node()))
    cluster = await kube.connect(f"{tmp_path / 'a'}:{tmp_path / 'b'}", clock)
    await cluster.node("n1")
    await cluster.close()
    assert api.asked[0].path == "/k8s/clusters/x/api/v1/nodes/n1"
    assert api.asked[0].headers["Authorization"].startswith("Basic ")


@pytest.mark.real_sockets
@pytest.mark.real_processes
async def test_a_credential_plugin_is_asked(api: Api, clock: QuickClock, tmp_path: Path) -> None:
    """The library runs the plugin; its token goes into the request."""
    answer = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": {"token": "from-plugin"}}
    path = Path(write_kubeconfig(tmp_path / "config", api.url))
    config = json.loads(path.read_text())
    plugin = {"apiVersion": answer["apiVersion"], "command": sys.executable, "args": ["-c", f"print({json.dumps(answer)!r})"]}
    config["users"][0]["user"] = {"exec": plugin}
    path.write_text(json.dumps(config))
    api.will(answers(node()))
    cluster = await kube.connect(str(path), clock)
    await cluster.node("n1")
    await cluster.close()
    assert api.asked[0].headers["Authorization"] == "Bearer from-plugin"


@pytest.mark.real_processes
def test_importing_it_is_cheap() -> None:
    """The client library is loaded when a connection is made, and its models never."""
    script = "import driver_manager.kube, sys; assert not {'kubernetes', 'aiohttp', 'yaml'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=30)
    script = (
        "import driver_manager.kube.connection, sys; assert not [n for n in sys.modules if n.startswith('kubernetes.aio.client.models.')]"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=30)
