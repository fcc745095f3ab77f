"""Runs commands in the built image: no network unless asked for, and nothing outlives its test."""

from __future__ import annotations

import json
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
PODMAN: Final = ROOT / "images/podman"

LIFE_SECONDS: Final = 90
"""After this podman ends a container by itself, also where the test was killed."""

_LIMITS: Final = ("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024")
"""podman's own defaults are above what a sandbox may set."""


class Image:
    """One built image."""

    def __init__(self, identity: str) -> None:
        self.identity = identity

    def run(self, *arguments: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        """One command by the image's entry point, in a container of its own."""
        return subprocess.run(
            self._command(options, arguments), capture_output=True, text=True, check=False, timeout=LIFE_SECONDS, stdin=subprocess.DEVNULL
        )

    def shell(self, script: str) -> str:
        """What a script for /bin/sh printed; it must succeed."""
        return self._checked("sh", "-c", script)

    def python(self, script: str) -> str:
        """What a script for the agent's own Python printed; it must succeed."""
        return self._checked("/opt/driver-manager/bin/python3", "-IB", "-c", script)

    def inspect(self) -> dict[str, Any]:
        """What the image says of itself."""
        result = _podman("image", "inspect", self.identity)
        (description,) = json.loads(result)
        return dict(description)

    def changed_files(self, *arguments: str) -> set[str]:
        """The paths that one command added or changed in a container with a writable root."""
        name = _new_name()
        try:
            self.run(*arguments, options=("--name", name, "--rm=false"))
            return {line[2:] for line in _podman("diff", name).splitlines()}
        finally:
            _podman("rm", "--force", "--time", "0", name)

    @contextmanager
    def started(self, *arguments: str, options: tuple[str, ...] = ()) -> Iterator[Started]:
        """A command that runs as the first process of its container, to be signalled."""
        name = _new_name()
        command = self._command(("--name", name, *options), arguments)
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, stdin=subprocess.DEVNULL)
        try:
            yield Started(name, process)
        finally:
            if process.poll() is None:
                subprocess.run([PODMAN, "kill", "--signal", "KILL", name], capture_output=True, check=False, timeout=30)
            process.communicate(timeout=30)

    def _command(self, options: tuple[str, ...], arguments: tuple[str, ...]) -> list[str]:
        network = () if "--network" in options else ("--network", "none")
        return [str(PODMAN), "run", "--rm", "--timeout", str(LIFE_SECONDS), *_LIMITS, *network, *options, self.identity, *arguments]

    def _checked(self, program: str, *arguments: str) -> str:
        result = self.run(*arguments, options=("--entrypoint", program))
        assert result.returncode == 0, result.stderr
        return result.stdout


class Started:
    """A running container."""

    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        self.name = name
        self._process = process

    def terminate(self) -> None:
        """SIGTERM to the first process, as the kubelet sends it."""
        _podman("kill", "--signal", "TERM", self.name)

    def is_running(self) -> bool:
        return self._process.poll() is None

    def ends(self, *, within_seconds: float) -> int:
        """The exit code; a TimeoutExpired where it goes on."""
        self._process.wait(timeout=within_seconds)
        return self._process.returncode


def kubeconfig(path: Path, server: str) -> tuple[str, ...]:
    """Writes a kubeconfig, and gives the options that make a container on the host's network use it."""
    named = {"cluster": {"server": server}, "user": {"token": "t"}, "context": {"cluster": "it", "user": "it"}}
    lists = {f"{kind}s": [{"name": "it", kind: value}] for kind, value in named.items()}
    path.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", "current-context": "it", **lists}))
    return ("--network", "host", "-v", f"{path}:/kubeconfig:ro", "-e", "KUBECONFIG=/kubeconfig", "-e", "NODE_NAME=n")


def _podman(*arguments: str) -> str:
    return subprocess.run([PODMAN, *arguments], capture_output=True, text=True, check=True, timeout=60).stdout


def _new_name() -> str:
    return f"driver-manager-test-{uuid.uuid4().hex[:12]}"
