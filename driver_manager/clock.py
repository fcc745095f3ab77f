"""Time and chance, for real."""

import asyncio
import secrets
import time
from datetime import UTC, datetime
from typing import Final

_ALPHABET: Final = "abcdefghijklmnopqrstuvwxyz0123456789"


class SystemClock:
    """The Clock port on this machine."""

    def now(self) -> float:
        """Seconds that only go up."""
        return time.monotonic()

    def wall(self) -> str:
        """The time of day as the API writes it."""
        return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def epoch(self) -> float:
        """Unix time."""
        return time.time()

    async def sleep(self, seconds: float) -> None:
        """Lets time pass."""
        await asyncio.sleep(seconds)

    def run_id(self) -> str:
        """A new name for a run."""
        return "".join(secrets.choice(_ALPHABET) for _ in range(10))
