"""The Host port on Linux, or on a directory tree laid out like one."""
