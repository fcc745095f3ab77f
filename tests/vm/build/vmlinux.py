"""Takes the kernel proper out of a bzImage, so that QEMU boots it without the emulated processor unpacking it first.

usage: vmlinux.py BZIMAGE VMLINUX. The layout: https://www.kernel.org/doc/html/latest/arch/x86/boot.html
"""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

_SECTOR = 512
_FORMATS = (
    (b"\x02\x21\x4c\x18", ("lz4", "-dc"), 4),  # the kernel's build appends the unpacked size
    (b"\xfd7zXZ\0", ("xz", "-dc", "--single-stream"), 0),
    (b"\x28\xb5\x2f\xfd", ("zstd", "-dcq"), 4),
    (b"\x1f\x8b", ("gzip", "-dc"), 4),
)
"""First bytes, the program that unpacks it, and how many bytes at the end it must not see."""


def unpacked(image: bytes) -> bytes:
    """The ELF file inside a bzImage."""
    setup_sectors = image[0x1F1] or 4
    offset, size = struct.unpack_from("<II", image, 0x248)
    start = (setup_sectors + 1) * _SECTOR + offset
    payload = image[start : start + size]
    for magic, command, tail in _FORMATS:
        if payload.startswith(magic):
            # Some of them complain about what follows and still give all of it.
            kernel = subprocess.run(command, input=payload[: len(payload) - tail], capture_output=True, check=False).stdout
            if kernel.startswith(b"\x7fELF"):
                return kernel
            sys.exit(f"{command[0]} did not give an ELF file")
    sys.exit(f"unknown compression: {payload[:6].hex()}")


if __name__ == "__main__":
    Path(sys.argv[2]).write_bytes(unpacked(Path(sys.argv[1]).read_bytes()))
