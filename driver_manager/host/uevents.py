"""What the kernel tells about modules and devices as it happens: uevents.

They reach every network namespace of the first user namespace, so also a pod's without the host's network, and no other (measured).

pyroute2 has no types and takes 0.4 s to import, all of it in one piece: it is confined to this file and imported in a wait
that has lasted a while, in the background. Events are hints to look again, never what is so: the kernel drops them when nobody reads them
in time, and a sandbox may show none. So whoever waits for one looks from time to time anyway.
"""

import contextlib
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from driver_manager.host.paths import text_of
from driver_manager.host.threads import in_thread

SUBSYSTEMS: Final = frozenset({"module", "pci", "vfio"})
"""What a wait of ours may be for: a module that comes or goes, a function that changes its driver, a group that goes."""
_ACTIONS: Final = frozenset({"add", "remove", "bind", "unbind"})
_IMPORT_SECONDS: Final = 30.0
_KERNEL_GROUP: Final = 1
"""Not udev's, which tells the same once more."""


def is_of_interest(event: Mapping[str, object]) -> bool:
    """Whether an event may end a wait."""
    return event.get("SUBSYSTEM") in SUBSYSTEMS and event.get("ACTION") in _ACTIONS


def sequence_number(sys: Path) -> int | None:
    """The number of the kernel's last event, whatever it was about; None where the kernel does not say."""
    with contextlib.suppress(OSError, ValueError):
        return int(text_of(sys / "kernel/uevent_seqnum") or "")
    return None


async def next_event(is_late: Callable[[], bool] = lambda: False) -> None:
    """Returns when something of interest has happened, or may have: also when the kernel dropped events.

    Args:
        is_late: asked once events can no longer be missed: whether there were any before that.

    Raises:
        OSError: the kernel gives this process no events.
    """
    socket_class: Any = await in_thread(_socket_class, "uevents", _IMPORT_SECONDS)
    async with socket_class() as socket:
        await socket.bind(groups=_KERNEL_GROUP)
        if is_late():
            return
        while True:
            async for event in socket.get():
                if is_of_interest(event) or _has_lost_events(socket):
                    return


def _has_lost_events(socket: Any) -> bool:
    """Whether the kernel had more to tell than fits the buffer (ENOBUFS): pyroute2 raises that at the next use of the socket."""
    try:
        socket.fileno()
    except OSError:
        return True
    return False


def _socket_class() -> Any:
    try:
        return import_module("pyroute2.netlink.uevent").AsyncUeventSocket
    except ImportError as error:
        raise OSError(f"pyroute2 cannot be imported: {error}") from error
