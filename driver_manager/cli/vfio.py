"""The command `vfio-manage`: binding GPUs to vfio and back. Not built yet; it says so instead of doing half of it."""

import sys

from driver_manager.errors import Exit


def main() -> None:
    """The console script."""
    sys.stderr.write("error: vfio-manage is not built yet in this version\nhint: bind or unbind the GPUs through sysfs by hand\n")
    sys.exit(int(Exit.BUG))
