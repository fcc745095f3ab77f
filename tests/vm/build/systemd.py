"""Makes the layer that turns the guest into a machine with systemd: its programs, their libraries, the units of a plain boot.

usage: systemd.py UNPACKED FOLDER

UNPACKED holds Debian's packages of systemd and of what it depends on, unpacked. Everything goes below /usr, as the guest's root has it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = (
    "lib/systemd/systemd",
    "lib/systemd/systemd-executor",
    "lib/systemd/systemd-journald",
    "bin/systemctl",
    "bin/journalctl",
    "bin/systemd-analyze",
)
"""Some versions have no systemd-executor."""
UNITS = (
    "basic.target",
    "local-fs-pre.target",
    "local-fs.target",
    "multi-user.target",
    "network-online.target",
    "network.target",
    "paths.target",
    "shutdown.target",
    "slices.target",
    "sockets.target",
    "swap.target",
    "sysinit.target",
    "systemd-journald-dev-log.socket",
    "systemd-journald.service",
    "systemd-journald.socket",
    "timers.target",
    "umount.target",
)
LIBRARIES = "lib/x86_64-linux-gnu"
HARNESS = """\
[Unit]
Description=Does what the tests ask for
[Service]
ExecStart=/init
StandardOutput=file:/dev/ttyS0
StandardError=inherit
"""
ETC = {
    "machine-id": "0123456789abcdef0123456789abcdef\n",  # without one, systemd would think that this is a first boot
    "hostname": "metal-1\n",
    "os-release": "ID=guest\nNAME=guest\n",
    "systemd/journald.conf": "[Journal]\nStorage=volatile\nRateLimitIntervalSec=0\n",
    "systemd/system/vmtest.service": HARNESS,
}


def found(unpacked: Path, path: str) -> Path | None:
    """A file of the packages, wherever below / or /usr it lies."""
    return next((each for each in (unpacked / "usr" / path, unpacked / path) if each.exists()), None)


def libraries_of(program: Path, unpacked: Path) -> Iterator[Path]:
    """The shared libraries that a program needs, those of the packages first."""
    folders = [unpacked / top / LIBRARIES / more for top in ("usr", "") for more in ("systemd", "")]
    said = subprocess.run(
        ["ldd", program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "LD_LIBRARY_PATH": ":".join(map(str, folders))},
    ).stdout
    for path in re.findall(r"=> (/\S+) \(0x", said):
        yield Path(path)


def make(unpacked: Path, root: Path) -> None:
    """Makes the whole layer."""
    usr = root / "usr"
    for path in PROGRAMS:
        if (program := found(unpacked, path)) is None:
            continue
        (usr / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(program, usr / path)
        for library in libraries_of(program, unpacked):
            if library.is_relative_to(unpacked):  # the others are in the guest's root: Python needs them too
                target = usr / (f"{LIBRARIES}/systemd" if library.parent.name == "systemd" else LIBRARIES) / library.name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(library.resolve(), target)
    units = usr / "lib/systemd/system"
    units.mkdir(parents=True)
    for name in UNITS:
        if unit := found(unpacked, f"lib/systemd/system/{name}"):
            shutil.copy2(unit, units / name)
    (units / "sockets.target.wants").mkdir()
    (units / "sockets.target.wants/systemd-journald.socket").symlink_to("../systemd-journald.socket")
    (units / "sysinit.target.wants").mkdir()
    (units / "sysinit.target.wants/systemd-journald.service").symlink_to("../systemd-journald.service")
    for name, text in ETC.items():
        (root / "etc" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "etc" / name).write_text(text)
    (root / "etc/systemd/system/default.target").symlink_to("/usr/lib/systemd/system/multi-user.target")
    (root / "etc/systemd/system/multi-user.target.wants").mkdir()
    (root / "etc/systemd/system/multi-user.target.wants/vmtest.service").symlink_to("../vmtest.service")


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]))
