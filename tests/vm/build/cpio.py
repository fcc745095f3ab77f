"""Packs a folder as a cpio archive, the format of an initramfs; archives one after the other count as one.

usage: cpio.py FOLDER ARCHIVE. Owners become root. Times of files are kept: compiled Python counts only with the time of its source.
The format is `newc` of https://www.kernel.org/doc/html/latest/driver-api/early-userspace/buffer-format.html
"""

from __future__ import annotations

import stat
import sys
from pathlib import Path
from typing import BinaryIO


class _Archive:
    """An archive being written."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._count = 0

    def add(self, name: str, mode: int, data: bytes = b"", *, device: tuple[int, int] = (0, 0), time: int = 0) -> None:
        """Writes one entry."""
        self._count += 1
        encoded = name.encode() + b"\0"
        numbers = (self._count, mode, 0, 0, 1, time, len(data), 0, 0, *device, len(encoded), 0)
        self._padded(b"070701" + b"".join(b"%08X" % number for number in numbers) + encoded)
        self._padded(data)

    def _padded(self, data: bytes) -> None:
        self._out.write(data)
        self._out.write(b"\0" * (-len(data) % 4))


def pack(folder: Path, archive: Path) -> None:
    """Writes all that is below a folder, and the console that the first process starts with."""
    with archive.open("wb") as out:
        into = _Archive(out)
        for path in sorted(folder.rglob("*")):
            status = path.lstat()
            data = b""
            if stat.S_ISLNK(status.st_mode):
                data = str(path.readlink()).encode()
            elif stat.S_ISREG(status.st_mode):
                data = path.read_bytes()
            elif not stat.S_ISDIR(status.st_mode):
                continue
            into.add(str(path.relative_to(folder)), status.st_mode, data, time=int(status.st_mtime))
        into.add("dev", stat.S_IFDIR | 0o755)
        into.add("dev/console", stat.S_IFCHR | 0o600, device=(5, 1))
        into.add("TRAILER!!!", 0)


if __name__ == "__main__":
    pack(Path(sys.argv[1]), Path(sys.argv[2]))
