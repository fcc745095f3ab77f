"""The checks before a run: one that fails stops no other."""

from __future__ import annotations

import pytest

from driver_manager.agent.preflight import Check, Level, preflight, worst
from driver_manager.errors import ConfigError, Exit
from driver_manager.ports import Cluster
from tests.agent.stage import Stage, play, settings

HOST = {"unload", "module-state", "host-pid", "mounts"}


def failed(checks: list[Check]) -> dict[str, str]:
    """The checks that failed, with what they say."""
    return {check.name: check.sentence for check in checks if check.level is Level.FAIL}


@pytest.mark.parametrize("has_cluster", [True, False])
def test_n59_no_node_name_is_one_failed_check(has_cluster: bool) -> None:
    """N59: without NODE_NAME every check that needs none is made all the same, also where no cluster can be reached; 78."""

    async def story(stage: Stage) -> None:
        life = stage.scenario.life()

        async def connect() -> Cluster:
            if has_cluster:
                return life.cluster
            raise ConfigError("no kubeconfig is given")

        checks = await preflight(connect, life.host, life.clock, settings(node_name=""))
        told = failed(checks)
        assert told["node"] == "NODE_NAME is not set"
        assert ("api" in told) is not has_cluster
        assert {"api", "node"} | HOST <= {check.name for check in checks}
        assert all("--node-name" in check.hint for check in checks if check.name == "node")
        assert worst(checks) is Exit.CONFIG
        assert stage.world.surface(stage.scenario.node) == stage.before

    play(story)
