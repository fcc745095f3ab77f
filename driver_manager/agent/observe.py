"""Looking once: everything a decision needs, as one snapshot, with as few requests as that takes."""

from dataclasses import replace

from driver_manager.agent.together import together
from driver_manager.config import Settings
from driver_manager.core.hostdriver import SMI_TIMEOUT, needs_smi
from driver_manager.core.plan import Path, Plan
from driver_manager.core.planner import Snapshot, needed_permissions, plan_uninstall
from driver_manager.core.snapshot import DaemonSetView, HolderScan, HostView, NodeView, Permissions, PodList
from driver_manager.errors import ConfigError, Forbidden, NotFound
from driver_manager.ports import Clock, Cluster, Host


class Observer:
    """Builds snapshots for one run."""

    def __init__(self, cluster: Cluster, host: Host, clock: Clock, settings: Settings) -> None:
        self._cluster, self._host, self._settings = cluster, host, settings
        self.run, self.started = clock.run_id(), clock.wall()
        self.pods = PodList((), "")
        """The newest list of pods, from which a watch can go on."""

    async def look(self, *, with_holders: bool = True) -> Snapshot:
        """Node, pods and host, all at once: two requests.

        Raises:
            NotFound: there is no such node. ConfigError: this pod runs on another node. Forbidden, Unreachable.
        """
        name, identity = self._settings.node_name, self._cluster.identity
        if identity.node_name and identity.node_name != name:
            raise ConfigError(
                f"NODE_NAME is {name}, but this pod runs on the node {identity.node_name}",
                hint="NODE_NAME must come from the field spec.nodeName of the pod",
            )
        node, self.pods, host, holders = await together(
            self._node(name), self._cluster.pods_on(name), self._host.look(), self._holders(with_holders)
        )
        assert isinstance(node, NodeView)
        assert isinstance(host, HostView)
        smi = await self._host.host_driver_version(SMI_TIMEOUT) if needs_smi(host) else None
        return Snapshot(
            node=node,
            host=host,
            pods=self.pods.items,
            holders=holders,
            identity=identity,
            host_smi_version=smi,
            run=self.run,
            started=self.started,
        )

    async def _node(self, name: str) -> NodeView:
        try:
            return await self._cluster.node(name)
        except NotFound as error:
            raise NotFound(f"there is no node {name!r} in this cluster", hint="check NODE_NAME") from error

    async def _holders(self, is_wanted: bool) -> HolderScan:
        return await self._host.holders() if is_wanted else HolderScan()

    async def plan(self) -> tuple[Snapshot, Plan]:
        """A snapshot and the plan made from it. The owner and the permissions are asked for only where pods are at stake."""
        seen = await self.look()
        plan = plan_uninstall(seen, self._settings)
        if plan.path in (Path.FULL, Path.WAIT) or plan.verdicts:
            daemon_set, permissions = await together(self._daemon_set(seen), self._permissions())
            seen = replace(seen, daemon_set=daemon_set, permissions=permissions)
            plan = plan_uninstall(seen, self._settings)
        return seen, plan

    async def _daemon_set(self, seen: Snapshot) -> DaemonSetView | None:
        """The DaemonSet that owns this pod, None where there is none or it may not be read."""
        pod = seen.own_pod
        if pod is None or pod.owner is None or pod.owner.kind != "DaemonSet":
            return None
        try:
            return await self._cluster.daemon_set(pod.namespace, pod.owner.name)
        except (Forbidden, NotFound):
            return None

    async def _permissions(self) -> Permissions:
        return await self._cluster.permissions(self._settings.operator_namespace)

    async def check_permissions(self, seen: Snapshot, plan: Plan) -> None:
        """Makes sure, before the first write, that every step of the plan is allowed (N60).

        Raises:
            Forbidden: naming every verb and resource that is missing.
        """
        missing = []
        for verb, group, resource in needed_permissions(plan):
            if seen.permissions is None or seen.permissions.allow(verb, group, resource):
                continue
            if seen.permissions.is_incomplete and await self._cluster.may(verb, group, resource):
                continue
            missing.append(f"{verb} {resource}")
        if missing:
            raise Forbidden(
                f"the account may not {', '.join(missing)}; nothing has been changed",
                hint="give the service account of the driver the ClusterRole of the stock driver DaemonSet",
            )
