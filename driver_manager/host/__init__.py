"""The Host port on Linux, or on a directory tree laid out like one."""

from driver_manager.host.linux import LinuxHost, open_host

__all__ = ["LinuxHost", "open_host"]
