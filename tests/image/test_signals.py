"""SIGTERM to the first process of a container: the kernel drops it as long as there is no handler, so it must have one at once."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.image.container import Image, kubeconfig

pytestmark = [pytest.mark.image, pytest.mark.timeout(300)]

QUICKLY_SECONDS = 5.0
"""Most of it is podman's own; without a handler the wait below would last a minute."""


class Brake:
    """A module of the image put behind a stand-in that says when its import begins and waits for leave to go on."""

    def __init__(self, image: Image, folder: Path, module: str) -> None:
        source = Path(image.python(f"import importlib.util; print(importlib.util.find_spec({module!r}).origin)").strip())
        self._folder = folder
        (folder / "flags").mkdir()
        stand_in = folder / "stand_in.py"
        stand_in.write_text(
            "import os, posix, time\n"
            "posix.close(posix.open('/brake/begun', posix.O_CREAT | posix.O_WRONLY))\n"
            "deadline = time.monotonic() + 60\n"
            "while not os.path.exists('/brake/go') and time.monotonic() < deadline:\n"
            "    time.sleep(0.01)\n"
            "exec(compile(open('/original.py').read(), __file__, 'exec'))\n"
        )
        original = folder / "original.py"
        original.write_text(image.shell(f"cat {source}"))
        empty = folder / "empty"
        empty.mkdir()
        self.options = tuple(
            word
            for mount in (
                f"{folder / 'flags'}:/brake",
                f"{stand_in}:{source}:ro",
                f"{original}:/original.py:ro",
                f"{empty}:{source.parent / '__pycache__'}:ro",  # bytecode would be taken in place of the stand-in
            )
            for word in ("-v", mount)
        )

    def wait_begun(self, deadline_seconds: float = 30) -> None:
        deadline = time.monotonic() + deadline_seconds
        while not (self._folder / "flags/begun").exists():
            assert time.monotonic() < deadline, "the import never began"
            time.sleep(0.01)

    def release(self) -> None:
        (self._folder / "flags/go").touch()


def test_sigterm_before_there_is_a_handler_is_kept_for_it(image: Image, tmp_path: Path) -> None:
    """Python has not even imported `signal`: the signal waits, and is heard as soon as there is a handler, with exit code 75."""
    brake = Brake(image, tmp_path, "signal")
    with image.started("uninstall_driver", options=brake.options) as container:
        brake.wait_begun()
        container.terminate()
        assert container.is_running()
        brake.release()
        assert container.ends(within_seconds=QUICKLY_SECONDS) == 75


@pytest.mark.parametrize("module", ["click", "driver_manager.cli.commands"])
def test_sigterm_during_the_imports_ends_at_once(image: Image, tmp_path: Path, module: str) -> None:
    """While a slow import goes on, early or late, SIGTERM ends the process with exit code 75."""
    brake = Brake(image, tmp_path, module)
    with image.started("uninstall_driver", options=brake.options) as container:
        brake.wait_begun()
        container.terminate()
        assert container.ends(within_seconds=QUICKLY_SECONDS) == 75


@pytest.fixture
def silent_server() -> Iterator[socket.socket]:
    """A server on loopback that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(30)
        yield server


@pytest.mark.parametrize("command", ["uninstall_driver", "preflight_check"])
def test_sigterm_while_the_api_does_not_answer_ends_at_once(
    image: Image, tmp_path: Path, silent_server: socket.socket, command: str
) -> None:
    """The handlers are in place behind the start as well: waiting for a first answer is given up, with exit code 75."""
    options = kubeconfig(tmp_path / "kubeconfig", f"http://127.0.0.1:{silent_server.getsockname()[1]}")
    with image.started(command, options=options) as container:
        connection, _ = silent_server.accept()
        with connection:
            container.terminate()
            assert container.ends(within_seconds=QUICKLY_SECONDS) == 75
