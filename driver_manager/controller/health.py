"""Whether a replica is alive, and whether it does its part: what `/healthz` and `/readyz` answer. No request is made for it."""

from dataclasses import dataclass
from typing import Final

from driver_manager.controller.run import Replica

LATE_SECONDS: Final = 60.0
"""The loop comes round every ten seconds at least; later than this it hangs."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer, with a sentence for people."""

    is_well: bool
    sentence: str


def health(replica: Replica) -> Answer:
    """Whether it should go on. An API server that does not answer is no reason to start anew: that would help nobody.

    A replica that waits for the Lease, or lists the fleet, is alive as long as it answers at all.
    """
    telling = replica.telling
    late = replica.clock.now() - telling.passed_at
    if replica.election.still_leading() and telling.is_synced and late > LATE_SECONDS:
        return Answer(False, f"the loop has not come round for {late:.0f} s")
    return Answer(True, "alive")


def readiness(replica: Replica) -> Answer:
    """Whether it does its part: it leads and knows the fleet, or it stands by while another leads."""
    if not replica.election.is_leading:
        if replica.election.problem:
            return Answer(False, f"the Lease cannot be read or written: {replica.election.problem}")
        holder = replica.election.holder
        return Answer(True, f"stands by; {holder} leads" if holder else "stands by")
    if not replica.election.still_leading():
        return Answer(False, "the Lease could not be renewed in time")
    if not replica.telling.is_synced:
        missing = ", ".join(replica.controller.cache.missing)
        return Answer(False, f"leads, and has not listed yet: {missing}")
    return Answer(True, "leads")
