"""Who leads: one replica at a time, by a Lease, and the grants that stand in it.

As with Kubernetes' own leader election no clock of another machine is read: a Lease is over when it has not been seen to change for its
duration. A leader that could not renew for `renew_deadline` stops writing before anybody else can begin, as every request of its ends
within `request_timeout`, which is shorter than the difference.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

import msgspec

from driver_manager.controller.settings import ControllerSettings
from driver_manager.core.fleet import LeaseView
from driver_manager.errors import ClusterError, Conflict, Forbidden
from driver_manager.names import GRANTS, PAUSED_ROLLOUT, ROLE, WAITING
from driver_manager.ports import Clock, Fleet

logger = logging.getLogger(__name__)

OURS: Final = (GRANTS, ROLE, WAITING)
"""Annotations of the Lease that only its holder writes; all others are people's."""
MOST_TRANSITIONS: Final = 2**31 - 1
"""The API server takes no larger number of them: the field is an int32."""
MOST_WAITING: Final = 2000
"""Characters of WAITING in which groups are named; of more only as many as fit."""


class LostLease(Exception):
    """Another replica leads, or may lead soon."""


class Election:
    """One replica's part in it."""

    def __init__(self, fleet: Fleet, clock: Clock, settings: ControllerSettings) -> None:
        self._fleet, self._clock, self._settings = fleet, clock, settings
        self._seen: LeaseView | None = None
        self._seen_at = 0.0
        self._renewed_at = float("-inf")
        self._is_leading = False
        self.problem = ""
        """Why the Lease could not be asked for, the last time."""
        self._writing = asyncio.Lock()
        self.annotations: dict[str, str] = {}
        """What the next write of the Lease says beside who leads; keys of OURS."""
        self.on_edit: Callable[[], None] = lambda: None
        """Called when somebody else has written the Lease that we hold: a person pauses, or goes on."""

    def still_leading(self) -> bool:
        """Whether a write may be begun now."""
        return self._is_leading and self._clock.now() - self._renewed_at < self._settings.renew_deadline

    @property
    def is_leading(self) -> bool:
        """Whether it won and has not given up; whether it may write now is `still_leading`."""
        return self._is_leading

    @property
    def lease(self) -> LeaseView | None:
        """As it was last seen."""
        return self._seen

    @property
    def holder(self) -> str:
        """Who leads, as last seen."""
        return self._seen.holder if self._seen is not None else ""

    async def win(self) -> None:
        """Returns when this replica leads; `lease` is what its predecessor left.

        Raises:
            Forbidden: it may not have the Lease.
        """
        while True:
            try:
                is_won = await self._try_to_win()
                self.problem = ""
                if is_won:
                    return
            except Forbidden:
                raise
            except ClusterError as error:
                self.problem = error.message
                logger.warning("the Lease cannot be read or written", extra={"error": error.message})
            await self._clock.sleep(self._settings.retry_period)

    async def _try_to_win(self) -> bool:
        asked_at = self._clock.now()
        lease = await self._fleet.lease(self._settings.lease_namespace, self._settings.lease_name)
        if self._seen is None or lease.resource_version != self._seen.resource_version:
            self._seen_at = self._clock.now()
        self._seen = lease
        is_free = not lease.holder or lease.holder == self._settings.identity
        lasts = max(lease.lasts, self._settings.lease_duration)  # a person may have written less than its holder renews it by
        if not is_free and self._clock.now() - self._seen_at < lasts:
            return False
        self.annotations = {key: value for key, value in lease.annotations.items() if key in OURS}
        try:
            transitions = min(lease.transitions + 1, MOST_TRANSITIONS)
            await self._write(replace(lease, transitions=transitions, acquired=self._now()), asked_at)
        except Conflict:
            return False
        self._is_leading = True
        logger.info("this replica leads", extra={"identity": self._settings.identity, "before": lease.holder or "nobody"})
        return True

    async def keep(self) -> None:
        """Renews without end.

        Raises:
            LostLease: it could not be renewed in time, or somebody else has it.
        """
        while True:
            await self._clock.sleep(self._settings.retry_period)
            try:
                await self.write()
            except Conflict as error:
                self._is_leading = False
                raise LostLease(error.message) from error
            except ClusterError as error:
                logger.warning("the Lease cannot be renewed", extra={"error": error.message})
            if not self.still_leading():
                self._is_leading = False
                raise LostLease("it could not be renewed in time")

    def say(self, key: str, value: str | None) -> None:
        """Has the next write say something else; None says nothing."""
        if value is None:
            self.annotations.pop(key, None)
        else:
            self.annotations[key] = value

    async def write(self) -> None:
        """Renews the Lease, with its annotations.

        Raises:
            Conflict: another replica has it now. ClusterError: it is not known whether it was written.
        """
        async with self._writing:
            assert self._seen is not None
            asked_at = self._clock.now()
            try:
                await self._write(self._seen, asked_at)
            except Conflict:
                if not await self._is_still_ours():
                    raise
                await self._write(self._seen, asked_at)

    async def _is_still_ours(self) -> bool:
        """Whether the newest Lease has our name: a write whose answer was lost, or a person's annotation, is no rival's."""
        lease = await self._fleet.lease(self._settings.lease_namespace, self._settings.lease_name)
        self._seen = lease
        self.on_edit()
        return lease.holder == self._settings.identity

    async def _write(self, lease: LeaseView, asked_at: float) -> None:
        settings = self._settings
        kept = {key: value for key, value in lease.annotations.items() if key not in OURS}
        wanted = replace(
            lease,
            namespace=settings.lease_namespace,
            name=settings.lease_name,
            holder=settings.identity,
            duration_seconds=round(settings.lease_duration),
            acquired=lease.acquired or self._now(),
            renewed=self._now(),
            annotations={**kept, **self.annotations},
        )
        self._seen = await self._fleet.write_lease(wanted)
        self._seen_at = self._clock.now()
        self._renewed_at = asked_at

    async def resign(self) -> None:
        """Lets another replica take over at once. Nothing may be under way."""
        if not self._is_leading or self._seen is None:
            return
        self._is_leading = False
        async with self._writing:
            await self._fleet.write_lease(replace(self._seen, holder="", duration_seconds=1, renewed=self._now()))

    def _now(self) -> str:
        return self._clock.wall().removesuffix("Z") + ".000000Z"


def is_paused(lease: LeaseView | None) -> bool:
    """Whether a person wants no node to be begun: as with all annotations of ours, by `true` and nothing else."""
    return lease is not None and lease.annotations.get(PAUSED_ROLLOUT) == "true"


def written_grants(names: Iterable[str]) -> str | None:
    """The annotation's value; None where there are none."""
    every = sorted(names)
    return json.dumps(every, separators=(",", ":")) if every else None


def read_grants(lease: LeaseView | None) -> frozenset[str]:
    """Names of nodes that a predecessor may be about to cordon."""
    names = _json_of(lease, GRANTS)
    return frozenset(name for name in names if isinstance(name, str)) if isinstance(names, list) else frozenset()


def written_waiting(waiting: Mapping[str, str]) -> str | None:
    """The annotation's value, which is JSON however many groups wait; None where none does."""
    said: dict[str, str] = {}
    for group, why in sorted(waiting.items()):
        if len(json.dumps({**said, group: why})) <= MOST_WAITING:
            said[group] = why
    return json.dumps(said) if said else None


def read_waiting(lease: LeaseView | None) -> Mapping[str, str]:
    """Policy group -> why no more of its nodes are begun now, as the leader says."""
    said = _json_of(lease, WAITING)
    return {group: why for group, why in said.items() if isinstance(why, str)} if isinstance(said, dict) else {}


def _json_of(lease: LeaseView | None, key: str) -> Any:
    """What an annotation of ours says; None where a person has made something else of it."""
    try:
        return msgspec.json.decode(lease.annotations.get(key) or "null") if lease is not None else None
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
