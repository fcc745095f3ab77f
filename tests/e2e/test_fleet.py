"""A whole roll-out on the real control plane, by the installed command under its shipped account."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import FleetMaker
from tests.e2e.fleetwatch import watched
from tests.kube.space import is_ready

pytestmark = [pytest.mark.kube, pytest.mark.timeout(300)]
DONE = "upgrade-done"


def test_fifty_nodes_five_at_a_time(fleet: FleetMaker) -> None:
    """R7: within the budget at every event, each driver pod is replaced once, no GPU pod evicted twice, all as before."""
    fifty = fleet(50)
    fifty.policy |= {"maxParallelUpgrades": 5, "maxUnavailable": "50%"}
    fifty.add_training(50)
    fifty.start()
    fifty.wait_states(DONE)
    before, mark, training = fifty.surface(), fifty.cp.audit_mark(), fifty.training()
    with watched(fifty) as story:
        fifty.set_driver("2")
        story.nodes.wait_for(lambda event: fifty.is_in(event, "upgrade-required"), "the roll-out to begin", timeout=60)
        fifty.wait_states(DONE, 150)
        fifty.wait_whole()
        fifty.wait(lambda: fifty.surface() == before, "the nodes to be as before")
        most = story.assert_budget(parallel=5, unavailable=5)
        story.assert_replaced_once()
    assert len(most.working) == 5, "and the budget was used"
    assert all(is_ready(pod) for pod in fifty.pods("train"))
    evicted = fifty.evicted(mark)
    assert len(evicted) == len(set(evicted)), "no pod is evicted twice"
    assert set(evicted) >= training
    assert sorted(fifty.deleted(mark)) == sorted(set(fifty.deleted(mark)))
    refused = {key for key in fifty.counts(mark) if key[2] >= 400}
    unserved = {("list", kind, 404) for kind in ("clusterpolicies", "nvidiadrivers")} | {("get", "leases", 404)}  # no gpu-operator either
    assert refused <= {("patch", "nodes", 409)} | unserved, "all was allowed; a guarded write may find that the node has changed"
