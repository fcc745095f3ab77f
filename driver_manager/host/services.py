"""systemd units of the host, through systemctl run in the host's root.

systemctl's word is not enough: in a chroot it may ignore a command and call that success, so each change is read back.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from driver_manager.errors import HostError, ServiceFailed
from driver_manager.host.calls import Calls, Finished

ASK_SECONDS: Final = 15.0
"""Limit of a question to systemd."""
_ACTIVE: Final = frozenset({"active", "reloading", "refreshing", "activating", "deactivating"})
_STATES: Final = _ACTIVE | {"inactive", "failed", "maintenance", "unknown"}
_STOPPED: Final = frozenset({"inactive", "failed", "unknown"})
_NO_SYSTEMD: Final = "the host's systemd cannot be asked"
_HINT: Final = "Run privileged, with the host's root at /host; or stop the units by hand. HOST_SERVICES=UNIT=wait only waits for them."


class Services:
    """The units of one host.

    Args:
        calls: what runs commands.
        prefix: the words that enter the host's root, none where this is it.
    """

    def __init__(self, calls: Calls, prefix: Sequence[str]) -> None:
        self._calls, self._prefix = calls, tuple(prefix)

    async def active(self, units: Sequence[str]) -> Mapping[str, bool]:
        """Which units are active, or on their way to it or from it."""
        return {unit: state in _ACTIVE for unit, state in (await self._states(units)).items()}

    async def stop(self, unit: str, timeout: float) -> None:
        """Stops a unit, and looks whether it has ended."""
        finished = await self._change("stop", unit, timeout)
        if (state := (await self._states([unit]))[unit]) not in _STOPPED:
            raise _failed("stopped", unit, f"systemctl ended with {finished.code}, the unit is {state}")

    async def start(self, unit: str, timeout: float) -> None:
        """Starts a unit."""
        finished = await self._change("start", unit, timeout)
        if (state := (await self._states([unit]))[unit]) not in _ACTIVE or finished.code:
            raise _failed("started", unit, f"systemctl ended with {finished.code}, the unit is {state}")

    async def _states(self, units: Sequence[str]) -> Mapping[str, str]:
        if not units:
            return {}
        try:
            finished = await self._run(("is-active", "--", *units), ASK_SECONDS)
        except TimeoutError as error:
            raise HostError(f"{_NO_SYSTEMD}: no answer in {ASK_SECONDS:g} s", hint=_HINT) from error
        states = finished.output.split()
        if len(states) != len(units) or not set(states) <= _STATES:
            raise HostError(f"{_NO_SYSTEMD}: systemctl gave no states (exit code {finished.code})", hint=_HINT)
        return dict(zip(units, states, strict=True))

    async def _change(self, verb: str, unit: str, timeout: float) -> Finished:
        try:
            return await self._run((verb, "--", unit), timeout)
        except TimeoutError as error:
            done = "stopped" if verb == "stop" else "started"
            raise _failed(done, unit, f"not within {timeout:g} s; systemd goes on with it") from error

    async def _run(self, words: Sequence[str], timeout: float) -> Finished:
        argv = (*self._prefix, "systemctl", *words)
        try:
            finished = await self._calls.run(argv, timeout)
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise
            raise HostError(f"{_NO_SYSTEMD}: {error.strerror}", hint=_HINT, errno_name="") from error
        if finished is None:
            raise HostError(f"{_NO_SYSTEMD}: there is no {argv[0]}", hint=_HINT)
        return finished


def _failed(done: str, unit: str, why: str) -> ServiceFailed:
    return ServiceFailed(f"the unit {unit} was not {done}: {why}", hint=f"systemctl status {unit}; journalctl -u {unit}")
