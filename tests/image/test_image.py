from __future__ import annotations

import ast
import json
import os
import subprocess
import textwrap
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.image.container import ROOT, Image, kubeconfig

pytestmark = [pytest.mark.image, pytest.mark.timeout(300)]

MEGABYTE = 1_000_000
READ_ONLY = ("--read-only", "--read-only-tmpfs=false", "--cap-drop", "all", "--security-opt", "no-new-privileges")
WHAT_THE_RUNTIME_MAKES = ("/dev", "/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/etc/mtab", "/proc", "/run", "/sys", "/tmp")


class Refusing(BaseHTTPRequestHandler):
    """An API server that refuses all, as the real one does it."""

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Forbidden", "code": 403, "message": "not for you"}
        body = json.dumps(status).encode()
        self.send_response(403)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def refusing_server() -> Iterator[str]:
    """The address of a server on loopback that answers everything with 403."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def preflight(image: Image) -> subprocess.CompletedProcess[str]:
    """What preflight_check says without a cluster and without any other restriction."""
    return image.run("preflight_check", "--output", "json")


def checks_of(result: subprocess.CompletedProcess[str]) -> dict[str, dict[str, object]]:
    return {entry["check"]: entry for entry in json.loads(result.stdout)}


def test_preflight_check_without_a_cluster_says_what_it_lacks(preflight: subprocess.CompletedProcess[str]) -> None:
    """Outside a cluster the check of the API fails with 78 and a hint, and the checks of the host are there all the same."""
    checks = checks_of(preflight)
    assert preflight.returncode == 78, preflight.stderr
    assert checks["api"]["result"] == "fail"
    assert checks["api"]["hint"]
    assert {"unload", "module-state", "host-pid", "mounts"} <= checks.keys()


def test_without_arguments_it_is_a_preflight_check(image: Image, preflight: subprocess.CompletedProcess[str]) -> None:
    """A container with no command and no arguments disturbs nothing: it checks."""
    result = image.run()
    assert result.returncode == preflight.returncode
    assert all(f"{check}:" in result.stdout for check in checks_of(preflight))


def test_it_reads_a_kubeconfig_and_talks_to_a_server(image: Image, tmp_path: Path, refusing_server: str) -> None:
    """What was taken out of the client's packages is not needed to reach a server; one that refuses makes it 77."""
    result = image.run("preflight_check", "--output", "json", options=kubeconfig(tmp_path / "kubeconfig", refusing_server))
    assert result.returncode == 77, result.stdout + result.stderr


def test_the_stock_manifests_command_and_args_reach_the_agent(image: Image) -> None:
    """`command: ["driver-manager"]` with `args: ["uninstall_driver"]` starts the agent, which finds no cluster here."""
    result = image.run("uninstall_driver", options=("--entrypoint", '["driver-manager"]'))
    assert result.returncode == 78, result.stdout + result.stderr


def test_help_names_the_commands(image: Image) -> None:
    """`--help` works by the entry point and names the agent's command."""
    result = image.run("--help")
    assert result.returncode == 0
    assert "uninstall_driver" in result.stdout


def test_vfio_manage_is_a_command_of_its_own(image: Image) -> None:
    """`vfio-manage` starts its own program, not the agent's."""
    result = image.run(options=("--entrypoint", '["vfio-manage"]'))
    assert "vfio-manage" in result.stdout + result.stderr


def test_the_programs_that_the_manifests_call_are_on_the_path(image: Image) -> None:
    """sh, chroot and sleep are there and work, besides the two commands."""
    found = image.shell(
        "for name in driver-manager vfio-manage chroot sleep; do command -v $name; done; sleep 0; chroot / /bin/sh -c 'echo inside'"
    )
    assert [line.rpartition("/")[2] for line in found.split()] == ["driver-manager", "vfio-manage", "chroot", "sleep", "inside"]


def test_no_compiler_and_no_installer_are_shipped(image: Image) -> None:
    """Neither gcc nor pip, setuptools or ensurepip, also not as files that nobody calls."""
    found = image.shell(
        "for name in cc gcc g++ ld make pip pip3 uv; do command -v $name || true; done;"
        r"find / -xdev \( -name pip -o -name 'pip-*' -o -name setuptools -o -name ensurepip -o -name '*.whl' \) ! -path '/proc/*'"
    )
    assert found == ""


def test_it_says_what_it_is(image: Image) -> None:
    """User, entry point and labels are as documented, and the licence is inside."""
    description = image.inspect()
    config = description["Config"]
    labels = {key.rpartition(".")[2]: value for key, value in config["Labels"].items() if key.startswith("org.opencontainers.image.")}
    assert (config["User"], config["Entrypoint"], config["Cmd"]) == ("0:0", ["driver-manager"], ["preflight_check"])
    assert labels.keys() >= {"title", "description", "licenses", "version", "revision"}
    assert labels["licenses"] == "Apache-2.0"
    assert labels["revision"] != "unknown"
    assert f'version = "{labels["version"]}"' in (ROOT / "pyproject.toml").read_text()
    assert image.shell("id -u; id -g").split() == ["0", "0"]
    assert image.shell("cat /licenses/LICENSE") == (ROOT / "LICENSE").read_text()


def test_a_read_only_root_without_capabilities_is_enough_to_check(image: Image, preflight: subprocess.CompletedProcess[str]) -> None:
    """With a root that nobody can write, not even /run and /tmp, preflight_check ends the same way."""
    result = image.run("preflight_check", "--output", "json", options=READ_ONLY)
    assert result.returncode == preflight.returncode, result.stderr
    assert checks_of(result)["api"] == checks_of(preflight)["api"]


def test_a_run_leaves_nothing_in_the_root(image: Image) -> None:
    """On a writable root a run adds no file besides /run and /tmp: no bytecode, no cache."""
    changed = image.changed_files("uninstall_driver")
    assert {path for path in changed if not path.startswith(WHAT_THE_RUNTIME_MAKES) and path != "/etc"} == set()


def test_all_python_is_compiled_and_never_compared_with_its_source(image: Image) -> None:
    """Each source that can be compiled has bytecode beside it that belongs to it, of the kind that needs no look at file times."""
    stale = image.python(
        textwrap.dedent("""
            import importlib.util as util, pathlib, sysconfig
            for folder in {sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")}:
                for source in pathlib.Path(folder).rglob("*.py"):
                    cached = pathlib.Path(util.cache_from_source(source))
                    head = cached.read_bytes()[:16] if cached.exists() else b""
                    text = source.read_bytes()
                    if head != util.MAGIC_NUMBER + (1).to_bytes(4, "little") + util.source_hash(text):
                        print(source)
        """)
    )
    assert stale == ""


def test_every_import_of_the_project_works_on_the_trimmed_packages(image: Image) -> None:
    """Also the imports inside functions find what they name."""
    imports = set()
    for path in (ROOT / "driver_manager").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                imports.add(ast.unparse(node))
    assert image.python("\n".join(sorted(imports, key=lambda line: ("__future__" not in line, line)))) == ""


def test_the_image_stays_small(image: Image, capsys: pytest.CaptureFixture[str]) -> None:
    """Everything together stays under 170 MB on the base made here, and what the project adds to its base under 65 MB."""
    size = image.inspect()["Size"]
    added = 1024 * int(image.shell("du -sk /opt/driver-manager").split()[0])
    with capsys.disabled():
        print(f"\nimage: {size / MEGABYTE:.0f} MB, of which /opt/driver-manager {added / MEGABYTE:.0f} MB")
    assert size < 170 * MEGABYTE or "IMAGE_BASE" in os.environ
    assert added < 65 * MEGABYTE


def test_start_times_are_printed(image: Image, capsys: pytest.CaptureFixture[str]) -> None:
    """Starting works in the image as often as asked; how long it takes is for people to read, not a verdict."""
    printed = image.python(
        textwrap.dedent("""
            import subprocess, time
            for arguments, wanted in ((["--help"], 0), (["preflight_check"], 78)):
                took = []
                for _ in range(5):
                    begun = time.perf_counter()
                    code = subprocess.run(["driver-manager", *arguments], capture_output=True).returncode
                    took.append(time.perf_counter() - begun)
                    assert code == wanted, code
                print(f"{arguments[0]}: {min(took):.2f} s at best, {max(took):.2f} s at worst")
        """)
    )
    with capsys.disabled():
        print(f"\n{printed}", end="")
    assert len(printed.splitlines()) == 2
