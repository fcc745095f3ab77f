"""A whole roll-out on the real control plane, by the installed command under its shipped account."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import FleetMaker
from tests.e2e.fleetwatch import watched
from tests.kube.space import is_ready

pytestmark = [pytest.mark.kube, pytest.mark.timeout(300)]
DONE = "upgrade-done"


@pytest.mark.parametrize("nodes", [20, pytest.param(50, marks=pytest.mark.deep)])
def test_five_nodes_at_a_time(fleet: FleetMaker, nodes: int) -> None:
    """R7: within the budget at every event, each driver pod is replaced once, no GPU pod evicted twice, all as before."""
    many = fleet(nodes)
    many.policy |= {"maxParallelUpgrades": 5, "maxUnavailable": "50%"}
    many.add_training(nodes)
    many.start()
    many.wait_states(DONE)
    before, mark, training = many.surface(), many.cp.audit_mark(), many.training()
    with watched(many) as story:
        many.set_driver("2")
        story.nodes.wait_for(lambda event: many.is_in(event, "upgrade-required"), "the roll-out to begin", timeout=60)
        many.wait_states(DONE, 150)
        many.wait_whole()
        many.wait(lambda: many.surface() == before, "the nodes to be as before")
        most = story.assert_budget(parallel=5, unavailable=5)
        story.assert_replaced_once()
    assert len(most.working) == 5, "and the budget was used"
    assert all(is_ready(pod) for pod in many.pods("train"))
    evicted = many.evicted(mark)
    assert len(evicted) == len(set(evicted)), "no pod is evicted twice"
    assert set(evicted) >= training
    assert sorted(many.deleted(mark)) == sorted(set(many.deleted(mark)))
    refused = {key for key in many.counts(mark) if key[2] >= 400}
    unserved = {("list", kind, 404) for kind in ("clusterpolicies", "nvidiadrivers")} | {("get", "leases", 404)}  # no gpu-operator either
    assert refused <= {("patch", "nodes", 409)} | unserved, "all was allowed; a guarded write may find that the node has changed"
