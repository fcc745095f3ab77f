#!/opt/venv/bin/python3
"""The first process of the guest: mounts the usual filesystems, imports what tests need, then does what it is asked over a serial line.

In a guest with systemd it is a service, and the filesystems are there.

One JSON object a line, each way. {"argv": [...]} runs a program; {"call": [module, function], "with": {...}} runs a function of a module in
a fork of this process, which has everything imported already (importing takes seconds here, a fork milliseconds); {"end": true} powers off.
The answer holds the exit code and what was printed; of a function also its value.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ctypes
import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
import time
import traceback
import tty
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MOUNTS = (
    ("proc", "/proc"),
    ("sysfs", "/sys"),
    ("cgroup2", "/sys/fs/cgroup"),
    ("devtmpfs", "/dev"),
    ("devpts", "/dev/pts"),
    ("tmpfs", "/dev/shm"),
    ("tmpfs", "/run"),
    ("tmpfs", "/tmp"),
)
LINE = "/dev/ttyS1"
POWER_OFF = 0x4321FEDC
TIMED_OUT = 124
BROKEN = 125


def set_up() -> None:
    """Mounts, environment, and the modules named on the kernel's command line (vmtest.import=a,b)."""
    if os.getpid() == 1:
        mount_all()
    os.environ.update(PATH="/opt/venv/bin:/usr/sbin:/usr/bin", HOME="/root", LANG="C.UTF-8", PYTHONDONTWRITEBYTECODE="1", VMTEST_GUEST="1")
    sys.path.insert(0, "/opt/tests")
    options = dict(word.partition("=")[::2] for word in Path("/proc/cmdline").read_text().split())
    for name in filter(None, options.get("vmtest.import", "").split(",")):
        importlib.import_module(name)


def mount_all() -> None:
    """What every other program takes for granted."""
    libc = ctypes.CDLL(None, use_errno=True)
    for kind, target in MOUNTS:
        Path(target).mkdir(parents=True, exist_ok=True)
        if libc.mount(kind.encode(), target.encode(), kind.encode(), ctypes.c_ulong(0), None) != 0:
            print("mount", target, os.strerror(ctypes.get_errno()), flush=True)
    Path("/dev/fd").symlink_to("/proc/self/fd")


def call(where: tuple[str, str], given: Mapping[str, Any], timeout: float, line: int) -> dict[str, Any]:
    """Runs a function in a fork, in a session of its own that is ended with it."""
    outputs = ["/tmp/.out", "/tmp/.err"]
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.setsid()
            os.close(line)
            for path, descriptor in zip(outputs, (1, 2), strict=True):
                os.dup2(os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY), descriptor)
            value = getattr(importlib.import_module(where[0]), where[1])(**given)
            if inspect.iscoroutine(value):
                value = asyncio.run(value)
            os.write(writing, json.dumps(value).encode())
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException as error:
            # With the values of the names: there is no pytest here to show them.
            print("".join(traceback.TracebackException.from_exception(error, capture_locals=True).format()), file=sys.stderr)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    os.close(writing)
    status = wait(pid, timeout)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.set_blocking(reading, False)
    value = b""
    with contextlib.suppress(BlockingIOError):
        value = os.read(reading, 1 << 20)
    os.close(reading)
    out, err = (Path(path).read_bytes() if Path(path).exists() else b"" for path in outputs)
    return {**answer(TIMED_OUT if status is None else os.waitstatus_to_exitcode(status), out, err), "value": json.loads(value or b"null")}


def wait(pid: int, timeout: float) -> int | None:
    """The status of a child; None if it had to be killed."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    return None


def answer(code: int, out: bytes | None, err: bytes | None) -> dict[str, Any]:
    """What goes back."""
    return {"code": code, "out": base64.b64encode(out or b"").decode(), "err": base64.b64encode(err or b"").decode()}


def do(asked: dict[str, Any], line: int) -> dict[str, Any]:
    """Does one thing that was asked."""
    timeout = asked.get("timeout", 60.0)
    if "call" in asked:
        return call(tuple(asked["call"]), asked["with"], timeout, line)
    try:
        done = subprocess.run(
            asked["argv"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout,
            check=False,
            env={**os.environ, **asked.get("env", {})},
        )
    except subprocess.TimeoutExpired as error:
        return answer(TIMED_OUT, error.stdout, error.stderr)
    return answer(done.returncode, done.stdout, done.stderr)


def serve() -> None:
    """Answers one line after the other until told to end."""
    line = os.open(LINE, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    tty.setraw(line)

    def send(said: dict[str, Any]) -> None:
        data = json.dumps(said).encode() + b"\n"
        while data:
            data = data[os.write(line, data) :]

    send({"kernel": os.uname().release})
    with os.fdopen(line, "rb", closefd=False) as lines:
        for text in lines:
            asked = json.loads(text)
            if asked.get("end"):
                return
            try:
                send(do(asked, line))
            except Exception:
                send(answer(BROKEN, b"", traceback.format_exc().encode()))


if __name__ == "__main__":
    try:
        set_up()
        serve()
    except Exception:
        traceback.print_exc()  # to the console, whose log the tests show
    os.sync()
    ctypes.CDLL(None).reboot(POWER_OFF)
