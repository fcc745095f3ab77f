"""A small process between a test and the programs that it starts, so that nothing outlives the test.

It starts programs on request (one JSON object a line on standard input), and kills them all and removes the folder
as soon as its input closes or its parent changes: a SIGKILLed test run leaves nothing behind. The kernel kills the
programs (PR_SET_PDEATHSIG) if the guard itself is killed. They are not direct children of the test on purpose:
PDEATHSIG fires when the *thread* that forked dies, which would kill them when a worker thread (asyncio.to_thread) ends.

Run as a script, isolated from the test's environment; it imports the standard library only.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1


class Guard:
    """The programs of one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self._prctl = ctypes.CDLL(None, use_errno=True).prctl

    def obey(self, message: dict[str, Any]) -> dict[str, Any]:
        """Starts or signals one program."""
        if name := message.get("start"):
            with (self.folder / f"{name}.log").open("ab") as log:
                self.children[name] = subprocess.Popen(
                    message["argv"],
                    cwd=self.folder,
                    env={**os.environ, **message.get("env", {})},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    preexec_fn=self._die_with_guard,
                )
            return {"pid": self.children[name].pid}
        child = self.children[message["signal"]]
        child.send_signal(message["number"])
        return {"code": child.wait() if message["wait"] else None}

    def _die_with_guard(self) -> None:
        self._prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def end(self) -> None:
        """Kills every program and waits for that."""
        for child in self.children.values():
            child.kill()
        for child in self.children.values():
            child.wait()


def main(folder: Path, keep: bool) -> None:
    """Works until the asking side is gone."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parent, guard = os.getppid(), Guard(folder)
    try:
        waiting = b""
        while os.getppid() == parent:  # a forked sibling may hold our pipe open, so its end alone is not enough
            if not select.select([0], [], [], 1.0)[0]:
                continue
            if not (chunk := os.read(0, 65536)):
                break
            *lines, waiting = (waiting + chunk).split(b"\n")
            for line in lines:
                try:
                    answer = guard.obey(json.loads(line))
                except Exception as error:  # reported to the asking side
                    answer = {"error": f"{type(error).__name__}: {error}"}
                os.write(1, json.dumps(answer).encode() + b"\n")
    finally:
        guard.end()
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), "--keep" in sys.argv)
