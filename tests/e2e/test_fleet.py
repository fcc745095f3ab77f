"""Whole roll-outs on the real control plane, by the installed command under its shipped account."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import FleetMaker
from tests.e2e.fleetwatch import watched

pytestmark = pytest.mark.kube
DONE = "upgrade-done"


def test_two_nodes(fleet: FleetMaker) -> None:
    """Both get the new driver, one after the other, and are as before."""
    two = fleet(2)
    two.add_training(2)
    two.start()
    two.wait_states(DONE)
    before, mark = two.surface(), two.cp.audit_mark()
    with watched(two) as story:
        two.set_driver("2")
        two.wait_states("upgrade-required")
        two.wait_states(DONE)
        two.wait_whole()
        two.cp.wait_for(lambda: two.surface() == before, "the nodes to be as before")
        story.assert_budget(parallel=1, unavailable=1)
        story.assert_replaced_once()
    evicted = two.evicted(mark)
    assert len(evicted) == len(set(evicted))
    print(two.counts(mark))
