"""Makes calls of the ports fail, slow, hang or never come back, and kills the program that makes them.

Every port call passes through a `Life`: one incarnation of the program under test, from its start to its end or its death. A death is
like SIGKILL: from then on each call of that life raises `Killed` too, so that no `finally` of a dead program can write anything, while the
world goes on.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, TypeVar

from driver_manager.errors import Conflict, DriverManagerError, EvictionBlocked, InvariantBroken, Unreachable

T = TypeVar("T")
MOST_CANCELS: Final = 1000
"""How often a killed program is cancelled before that is called a bug of the program."""


class Killed(BaseException):
    """The program is dead. No Exception, so that nothing under test handles it by accident."""


class When(StrEnum):
    """On which side of a call's effect."""

    BEFORE = "before"
    AFTER = "after"
    """The world has changed, the caller does not know it yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A port call at one of its boundaries."""

    boundary: int
    """Number in its life, from 0."""
    life: int
    port: str
    name: str
    args: Mapping[str, object] = field(default_factory=dict)
    when: When = When.BEFORE
    is_write: bool = False
    at: float = 0.0

    def __str__(self) -> str:
        shown = ", ".join(f"{key}={value}" for key, value in self.args.items())
        return f"{self.at:9.3f} life {self.life} #{self.boundary} {self.when} {self.port}.{self.name}({shown})"


@dataclass(frozen=True, slots=True)
class Fail:
    """Raises an error; after the effect that is a lost answer."""

    error: Callable[[], DriverManagerError]


@dataclass(frozen=True, slots=True)
class Delay:
    """Takes longer."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Hang:
    """Does not come back, or only when the port's own limit for the call is over."""


@dataclass(frozen=True, slots=True)
class Kill:
    """Ends the life here."""


@dataclass(frozen=True, slots=True)
class Do:
    """Does something to the world, for example sends the program a signal, and goes on."""

    what: Callable[[], None]


Action = Fail | Delay | Hang | Kill | Do


@dataclass(slots=True, kw_only=True)
class Rule:
    """Which calls get which action."""

    action: Action
    name: str | None = None
    """Of the method, None for all."""
    when: When = When.BEFORE
    where: Callable[[Call], bool] = lambda call: True
    skip: int = 0
    """How many calls that fit pass first."""
    times: int | None = 1
    """How often it acts, None without end."""
    acted: int = 0

    def takes(self, call: Call) -> bool:
        """Whether this call gets the action; counts it."""
        if self.name not in (None, call.name) or self.when is not call.when or not self.where(call):
            return False
        if self.times is not None and self.acted >= self.times:
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        self.acted += 1
        return True


@dataclass(slots=True, kw_only=True)
class WatchTrouble:
    """How watches and lists of whole kinds misbehave; nothing by default. Can be changed at any time."""

    longest_lag: float = 0.0
    """Seconds that an event may come late."""
    expire_rate: float = 0.0
    """Share of events after which the watch ends with 410."""
    stale_rate: float = 0.0
    """Share of lists that answer with an older state."""
    longest_stale: float = 0.0
    """How many seconds old; states are only remembered while this is not 0."""

    def lag(self, rng: random.Random) -> float:
        """How late an event comes."""
        return rng.random() * self.longest_lag if self.longest_lag else 0.0

    def has_expired(self, rng: random.Random) -> bool:
        """Whether the watch ends here."""
        return bool(self.expire_rate) and rng.random() < self.expire_rate

    def has_stale_list(self, rng: random.Random) -> bool:
        """Whether this list is stale."""
        return bool(self.stale_rate and self.longest_stale) and rng.random() < self.stale_rate

    def staleness(self, rng: random.Random) -> float:
        """How old a stale list is."""
        return rng.random() * self.longest_stale

    def stop(self) -> None:
        """Ends it."""
        self.longest_lag = self.expire_rate = self.stale_rate = self.longest_stale = 0.0


UNTOUCHED: Final = frozenset({"pod_changes.next", "follow.next"})
"""Calls that random trouble leaves alone: events have trouble of their own."""
GUARDED: Final = frozenset({"set_requestors", "patch_node", "write_lease", "set_condition"})
"""Calls that can meet a conflict."""


class Faults:
    """All planned and random trouble of one world, and the list of calls that were made."""

    def __init__(self) -> None:
        self.rules: list[Rule] = []
        self.calls: list[Call] = []
        self.watches = WatchTrouble()
        self._chance: Callable[[Call], Action | None] = lambda call: None

    def on(
        self,
        name: str | None,
        action: Action,
        *,
        when: When = When.BEFORE,
        where: Callable[[Call], bool] = lambda call: True,
        skip: int = 0,
        times: int | None = 1,
    ) -> Rule:
        """Plans an action for calls of one method (None: of any) and gives the rule, whose `acted` tells whether it came to it."""
        rule = Rule(action=action, name=name, when=when, where=where, skip=skip, times=times)
        self.rules.append(rule)
        return rule

    def randomly(self, rng: random.Random, rate: float, *, longest_delay: float = 2.0) -> None:
        """Lets that share of the cluster calls go wrong, in ways that a real server has."""

        def chance(call: Call) -> Action | None:
            if call.port != "cluster" or call.name in UNTOUCHED or rng.random() >= rate:
                return None
            choices: list[Action] = [Delay(rng.random() * longest_delay), Fail(lambda: Unreachable("connection reset by peer"))]
            if call.is_write and call.when is When.BEFORE:
                choices.append(Fail(lambda: Unreachable("Too many requests, please try again later.", retry_after=1.0)))
                choices.append(Fail(lambda: Unreachable("status 500: etcdserver: request timed out")))
            if call.name in GUARDED and call.when is When.BEFORE:
                choices.append(
                    Fail(lambda: Conflict("the object has been modified; please apply your changes to the latest version and try again"))
                )
            if call.name == "evict" and call.when is When.BEFORE:
                choices.append(
                    Fail(lambda: EvictionBlocked("the budget is still being processed by the server", budget="chance", retry_after=1.0))
                )
            return rng.choice(choices)

        self._chance = chance

    def stop(self) -> None:
        """Ends all trouble."""
        self.rules.clear()
        self.watches.stop()
        self._chance = lambda call: None

    def action_for(self, call: Call) -> Action | None:
        """What happens to this call; also notes it."""
        self.calls.append(call)
        for rule in self.rules:
            if rule.takes(call):
                return rule.action
        return self._chance(call)


class Hung(Exception):
    """A call was told to hang; the port ends it as its own limit says."""


class Life:
    """One incarnation of the program under test.

    Args:
        faults: of the world.
        number: from 1.
        kill_at: the boundary at which it dies, None for a natural end.
    """

    def __init__(self, faults: Faults, number: int, kill_at: int | None = None) -> None:
        self._faults = faults
        self.number = number
        self.kill_at = kill_at
        self.boundaries = 0
        """How many it has passed."""
        self.was_killed = False
        self.killed_at: Call | None = None
        self._death: list[Callable[[], None]] = []
        self._dead = asyncio.Event()

    def on_death(self, what: Callable[[], None]) -> None:
        """Has something done when it is killed, as the kernel frees what a process held."""
        self._death.append(what)

    def check(self) -> None:
        """Raises Killed if this life is over."""
        if self.was_killed:
            raise Killed

    def kill(self) -> None:
        """Ends it now, wherever it is. Can be called from outside, at any time."""
        if self.was_killed:
            return
        self.was_killed = True
        for what in self._death:
            what()
        self._dead.set()

    async def gate(
        self,
        port: str,
        name: str,
        args: Mapping[str, object] | None = None,
        *,
        when: When = When.BEFORE,
        is_write: bool = False,
    ) -> None:
        """One numbered boundary of a call.

        Raises:
            Killed: the life ends here, or was over. Hung: the call must not come back by itself. Any of our errors, as planned.
        """
        self.check()
        call = Call(
            boundary=self.boundaries,
            life=self.number,
            port=port,
            name=name,
            args=args or {},
            when=when,
            is_write=is_write,
            at=asyncio.get_running_loop().time(),
        )
        self.boundaries += 1
        action = self._faults.action_for(call)
        if call.boundary == self.kill_at:
            action = Kill()
        match action:
            case None:
                pass
            case Kill():
                self.killed_at = call
                self.kill()
                raise Killed
            case Fail(error):
                raise error()
            case Delay(seconds):
                await self.sleep(seconds)
            case Do(what):
                what()
                self.check()
            case Hang():
                raise Hung

    async def sleep(self, seconds: float) -> None:
        """Lets time pass and looks whether it is still alive."""
        self.check()
        await asyncio.sleep(max(0.0, seconds))
        self.check()

    async def run(self, program: Coroutine[Any, Any, T]) -> T | None:
        """Runs the program in this life; None if it was killed, whatever it made of that."""
        task = asyncio.create_task(program, name=f"life {self.number}")
        dead = asyncio.create_task(self._dead.wait(), name=f"death of life {self.number}")
        try:
            await asyncio.wait((task, dead), return_when=asyncio.FIRST_COMPLETED)
            if not self.was_killed:
                return await task
            for _ in range(MOST_CANCELS):
                if task.done():
                    break
                task.cancel()
                await asyncio.sleep(0)
            else:
                raise InvariantBroken(f"life {self.number} was killed and goes on all the same")
            if not task.cancelled():
                task.exception()  # seen, and of no interest: dead programs tell no tales
            return None
        finally:
            dead.cancel()
            task.cancel()
