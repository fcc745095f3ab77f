"""Looking once: everything a decision needs, as one snapshot, with as few requests as that takes."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace

from driver_manager.config import Settings
from driver_manager.core.consumers import Action, Reason
from driver_manager.core.hostdriver import SMI_TIMEOUT, needs_smi
from driver_manager.core.needs import in_words
from driver_manager.core.parking import Means, agents_means
from driver_manager.core.plan import Path, Plan
from driver_manager.core.planner import needed_permissions, plan_uninstall
from driver_manager.core.seen import Snapshot, host_uses_of, keeps_vfio
from driver_manager.core.services import units_to_stop
from driver_manager.core.snapshot import ClaimView, DaemonSetView, HolderScan, HostView, NodeView, Permissions, PodList, PodView
from driver_manager.core.vfio import without_vfio
from driver_manager.errors import ConfigError, Forbidden, HostError, NotFound, OtherMachine
from driver_manager.ports import Clock, Cluster, Host
from driver_manager.together import together


class Observer:
    """Builds snapshots for one run."""

    def __init__(self, cluster: Cluster, host: Host, clock: Clock, settings: Settings) -> None:
        self._cluster, self._host, self._settings = cluster, host, settings
        self.run, self.started = clock.run_id(), clock.wall()
        self.pods = PodList((), "")
        """The newest list of pods, from which a watch can go on."""
        self._runtime_handlers: Mapping[str, str] | None = None

    async def look(self, *, with_holders: bool = True, with_claims: bool = False) -> Snapshot:
        """Node, pods and host, all at once: two requests, and one for each claim where claims are asked for.

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
        seen = Snapshot(
            node=node,
            host=host,
            pods=self.pods.items,
            holders=holders,
            identity=identity,
            host_smi_version=smi,
            run=self.run,
            started=self.started,
            runtime_handlers=self._runtime_handlers,
        )
        if keeps_vfio(seen, self._settings):
            seen = replace(seen, holders=without_vfio(holders))
        return replace(seen, claims=await self._claims(seen)) if with_claims else seen

    async def _claims(self, seen: Snapshot) -> Mapping[tuple[str, str], ClaimView]:
        """The claims of the pods; where they may not be read nobody knows who holds a device, so that is an error (N04)."""
        try:
            return await self._cluster.claims(seen.wanted_claims)
        except Forbidden as error:
            names = ", ".join(f"{namespace}/{name}" for namespace, name in sorted(seen.wanted_claims)[:3])
            hint = "let the account get resourceclaims: without it pods that hold a GPU by a claim cannot be told from others"
            raise Forbidden(f"{error.message} (pods on the node name the claims {names})", hint=hint) from error

    async def _node(self, name: str) -> NodeView:
        try:
            return await self._cluster.node(name)
        except NotFound as error:
            raise NotFound(f"there is no node {name!r} in this cluster", hint="check NODE_NAME") from error

    async def _holders(self, is_wanted: bool) -> HolderScan:
        return await self._host.holders() if is_wanted else HolderScan()

    def check_here(self, seen: Snapshot) -> None:
        """Makes sure that this machine is the node: without a token that says so, its boot tells.

        Raises:
            OtherMachine: what is done to the host would be done to the wrong one.
        """
        is_told = bool(seen.identity.node_name) or bool(self._settings.host_tree)
        if not is_told and seen.node.boot_id and seen.host.boot_id and seen.node.boot_id != seen.host.boot_id:
            raise OtherMachine(
                f"this machine is not the node {seen.node.name}: it has another boot id",
                hint="run this on the node, for example in its driver pod; `driver-manager status` works from anywhere",
            )

    async def plan(self) -> tuple[Snapshot, Plan]:
        """A snapshot and the plan made from it. The owner and the permissions are asked for only where pods are at stake."""
        seen = await self.look()
        self.check_here(seen)
        plan = plan_uninstall(seen, self._settings)
        if plan.path in (Path.FULL, Path.WAIT) or plan.verdicts:
            daemon_set, permissions, claims = await together(self._daemon_set(seen), self._permissions(), self._claims(seen))
            self._runtime_handlers = await self._handlers(seen, permissions)
            handlers = self._runtime_handlers
            seen = replace(seen, daemon_set=daemon_set, permissions=permissions, claims=claims, runtime_handlers=handlers)
            seen = await self._with_services(seen)
            plan = plan_uninstall(seen, self._settings)
            if stubborn := [each.pod for each in plan.verdicts if each.reason is Reason.DAEMON_SET and each.action is Action.REFUSE]:
                seen = replace(seen, means=await self._means(seen.node, stubborn))
                plan = plan_uninstall(seen, self._settings)
        return seen, plan

    async def _means(self, node: NodeView, pods: Iterable[PodView]) -> Means:
        """What may be parked of the DaemonSets of these pods, each read by itself: the stock role may not list them."""
        refs = sorted({(pod.namespace, pod.owner.name) for pod in pods if pod.owner is not None})
        found: dict[str, DaemonSetView | None] = {}
        for namespace, name in refs:
            with suppress(NotFound):  # its pods are about to be deleted
                found[f"{namespace}/{name}"] = await self._readable(namespace, name)
        return agents_means(node, found)

    async def _readable(self, namespace: str, name: str) -> DaemonSetView | None:
        """A DaemonSet; None where it may not be read.

        Raises:
            NotFound.
        """
        try:
            return await self._cluster.daemon_set(namespace, name)
        except Forbidden:
            return None

    async def _with_services(self, seen: Snapshot) -> Snapshot:
        """The same with the state of the units that would be stopped, so that what cannot be done is known before the first write."""
        units = units_to_stop(host_uses_of(seen, self._settings))
        if not units:
            return seen
        try:
            return replace(seen, services=await self._host.services(units))
        except HostError as error:
            return replace(seen, services_trouble=error.message)

    async def _handlers(self, seen: Snapshot, permissions: Permissions) -> Mapping[str, str] | None:
        """The handlers of runtime classes, if a pod has one and they may be listed; the stock role may not."""
        is_needed = any(pod.runtime_class for pod in seen.pods)
        if not is_needed or not permissions.allow("list", "node.k8s.io", "runtimeclasses"):
            return None
        return await self._cluster.runtime_handlers()

    async def _daemon_set(self, seen: Snapshot) -> DaemonSetView | None:
        """The DaemonSet that owns this pod, None where there is none or it may not be read."""
        pod = seen.own_pod
        if pod is None or pod.owner is None or pod.owner.kind != "DaemonSet":
            return None
        try:
            return await self._readable(pod.namespace, pod.owner.name)
        except NotFound:
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
            missing.append(in_words((verb, group, resource)))
        if missing:
            raise Forbidden(
                f"the account may not {', '.join(missing)}; nothing has been changed",
                hint="give the service account of the driver the ClusterRole of the stock driver DaemonSet",
            )
