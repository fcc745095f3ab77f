"""The DaemonSet controller: a pod on each node that fits, templates and their revisions, adoption, and what a deletion leaves behind.

It looks only at the nodes that something happened on, so that a fleet of thousands costs no more per change than one of ten.
"""

import zlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from driver_manager.core.parking import Tried
from driver_manager.core.parking_term import EXPRESSION
from driver_manager.core.snapshot import ChangeKind
from driver_manager.names import PARKED, PARKING_TERM, REVISION_HASH
from driver_manager.sim.objects import (
    DAEMON_TOLERATIONS,
    Cascade,
    DaemonSet,
    Node,
    Pod,
    PodSpec,
    Template,
    tolerates,
)
from driver_manager.sim.server import Server
from driver_manager.sim.store import Store

FIRST_BACKOFF: Final = 0.005
LONGEST_BACKOFF: Final = 1000.0
FOREGROUND_LOOK: Final = 0.1
"""Seconds between two looks whether the pods of a DaemonSet that is deleted in the foreground are gone."""
WHO: Final = "daemonset-controller"


class DaemonSets:
    """The DaemonSet controller of one cluster.

    Args:
        store: of the cluster.
        server: deletes pods.
        make_pod: a new pod of an owner, not yet written.
    """

    def __init__(self, store: Store, server: Server, make_pod: Callable[[DaemonSet, str], Pod]) -> None:
        self.store = store
        self.server = server
        self.refused_creates: dict[str, str] = {}
        """Owners whose pods admission refuses, `namespace/name`, with the reason."""
        self.shapers: list[Callable[[Pod], None]] = []
        """Those who change a new pod before it is written: how it will behave."""
        self._make_pod = make_pod
        server.set_parking_term = self._set_parking_term
        self._templates: list[tuple[PodSpec, str]] = []
        """All that there ever were, with their hashes: the same template has the same hash in any DaemonSet."""

    # What wakes it ------------------------------------------------------------------------------------------------

    def wake(self, daemon_set: DaemonSet, node_names: Iterable[str] | None = None) -> None:
        """Has it look at some nodes for one DaemonSet, or at all."""
        for name in self.store.nodes if node_names is None else node_names:
            daemon_set.dirty[name] = True
        self.store.timers.wake("daemonset", daemon_set.uid, self.store.latencies.daemon_set, lambda: self._sync_again(daemon_set))

    def node_changed(self, node: Node) -> None:
        """A node was written."""
        for daemon_set in self.store.daemon_sets.values():
            self.wake(daemon_set, [node.name])

    def pod_changed(self, pod: Pod) -> None:
        """A pod was written or removed."""
        owner = self.store.owner_of(pod)
        if isinstance(owner, DaemonSet):
            if not pod.is_gone and (owner.spec.labels or owner.selector) and not owner.selects(pod.labels):
                owner.claims[pod.uid] = pod
            node_name = pod.node_name or pod.target
            self.wake(owner, [node_name] if node_name else [])
        elif pod.owner is None and pod.marked_at is None and not pod.is_gone:
            for daemon_set in self.store.daemon_sets.values():
                if daemon_set.namespace == pod.namespace and daemon_set.selects(pod.labels):
                    daemon_set.claims[pod.uid] = pod
                    self.wake(daemon_set, [])

    # One round ----------------------------------------------------------------------------------------------------

    def sync(self, daemon_set: DaemonSet) -> list[Pod]:
        """Does what is to do on the nodes that were named, and gives the pods it made."""
        made: list[Pod] = []
        if self.store.daemon_sets.get(daemon_set.ref) is not daemon_set or daemon_set.is_deleting:
            return made
        self._claim(daemon_set)
        self._observe(daemon_set)
        waiting, daemon_set.dirty = list(daemon_set.dirty), {}
        if daemon_set.refusals:  # the real one's order is that of a map
            self.store.rng.shuffle(waiting)
        for number, name in enumerate(waiting):
            node = self.store.nodes.get(name)
            if node is not None and not self._sync_node(daemon_set, node, made):
                later, daemon_set.dirty = daemon_set.dirty, dict.fromkeys(waiting[number:], True)
                daemon_set.dirty.update(later)
                self._report(daemon_set)
                return made  # the rest of the batch is skipped after a refusal
        daemon_set.refusals = 0  # only a round without a refusal ends its pauses
        if daemon_set.is_rolling:
            self._roll(daemon_set)
        self._report(daemon_set)
        return made

    def _report(self, daemon_set: DaemonSet) -> None:
        """Keeps the status; only of those that somebody reads it of."""
        if not daemon_set.is_parkable and daemon_set.ref not in self.store.reported_sets:
            return
        tolerations = daemon_set.spec.tolerations + DAEMON_TOLERATIONS
        wanted = [
            node.name
            for node in self.store.nodes.values()
            if daemon_set.spec.fits(node.labels) and tolerates(tolerations, node.taints, "NoSchedule", "NoExecute")
        ]
        missing = sum(not self.store.pods_of_on(daemon_set.uid, name) for name in wanted)
        if missing != daemon_set.missing:
            daemon_set.missing = missing
            self.written(daemon_set)

    def _sync_node(self, daemon_set: DaemonSet, node: Node, made: list[Pod]) -> bool:
        there = self.store.pods_of_on(daemon_set.uid, node.name)
        tolerations = daemon_set.spec.tolerations + DAEMON_TOLERATIONS
        if not daemon_set.spec.fits(node.labels) or not tolerates(tolerations, node.taints, "NoExecute"):
            for pod in there:
                if pod.marked_at is None:
                    self.server.delete_pod(pod, who=WHO)
            return True
        alive = [pod for pod in there if not (pod.marked_at is not None and pod.is_over)]
        for pod in [one for one in alive if one.is_over]:
            self.server.delete_pod(pod, who=WHO)
        for pod in [one for one in alive if one.is_active][1:]:
            self.server.delete_pod(pod, who=WHO)
        if alive or not tolerates(tolerations, node.taints, "NoSchedule"):
            return True
        return self._create(daemon_set, node, made)

    def _create(self, daemon_set: DaemonSet, node: Node, made: list[Pod]) -> bool:
        reason, tried = self.refused_creates.get(daemon_set.ref), self.server.parking.tried(daemon_set.ref, node.name)
        if tried is Tried.DENIED:
            reason = f"parked for a driver upgrade on node {node.name}"
        if reason is not None or daemon_set.namespace in self.store.terminating:
            pause = min(FIRST_BACKOFF * 2**daemon_set.refusals, LONGEST_BACKOFF)
            daemon_set.refusals += 1
            self.store.write(WHO, "FailedCreate", daemon_set.ref, reason or "namespace is being terminated")
            self.store.timers.later(pause, lambda: self._sync_again(daemon_set))
            return False
        pod = self._make_pod(daemon_set, node.name)
        for shape in self.shapers:
            shape(pod)
        if tried is Tried.GATED:
            pod.gates, pod.labels = (PARKED,), {**pod.labels, PARKED: "true"}
        self.store.write(WHO, "create", pod.ref, node.name)
        self.store.pod_written(pod)
        made.append(pod)
        return True

    def _sync_again(self, daemon_set: DaemonSet) -> None:
        self.sync(daemon_set)

    def _roll(self, daemon_set: DaemonSet) -> None:
        """A step of a rolling update: old pods that are not Ready at once, others as many as may be away."""
        assert daemon_set.template is not None
        pods = self.store.pods_of(daemon_set.uid)
        active = [pod for pod in pods if pod.is_active]
        old = [pod for pod in active if pod.labels.get(REVISION_HASH) != daemon_set.template.hash]
        if not old:
            daemon_set.is_rolling = False
            self.written(daemon_set)
            return
        for pod in [one for one in old if not one.is_ready]:
            self.server.delete_pod(pod, who=WHO)
        away = len(pods) - sum(pod.is_ready for pod in active)
        for pod in [one for one in old if one.is_ready][: max(0, daemon_set.max_unavailable - away)]:
            self.server.delete_pod(pod, who=WHO)

    # Templates ----------------------------------------------------------------------------------------------------

    def set_template(self, daemon_set: DaemonSet, spec: PodSpec) -> None:
        """Somebody changes the template; one that says the same changes nothing."""
        if spec == daemon_set.spec:
            return
        daemon_set.spec = spec
        daemon_set.generation += 1
        daemon_set.observes_at = self.store.timers.now() + self.store.latencies.observe
        self.written(daemon_set)
        self.store.timers.later(self.store.latencies.observe, lambda: self.wake(daemon_set))

    def _set_parking_term(self, daemon_set: DaemonSet, is_in: bool) -> None:
        """Somebody puts the term for parking into the template, or takes it out, and marks that."""
        without = [tuple(each for each in term if each != EXPRESSION) for term in daemon_set.spec.affinity]
        terms = [(*term, EXPRESSION) for term in without or [()]] if is_in else [term for term in without if term]
        others = {key: value for key, value in daemon_set.labels.items() if key != PARKING_TERM}
        daemon_set.labels = {**others, PARKING_TERM: "true"} if is_in else others
        self.set_template(daemon_set, replace(daemon_set.spec, affinity=tuple(terms)))

    def written(self, daemon_set: DaemonSet) -> None:
        """A DaemonSet is new or has changed."""
        self.store.version += 1
        self.store.tell(daemon_set)

    def hash_of(self, spec: PodSpec) -> str:
        """The hash of a template."""
        for known, found in self._templates:
            if known == spec:
                return found
        made = f"{zlib.crc32(f'template {len(self._templates)}'.encode()):x}"
        self._templates.append((spec, made))
        return made

    def _observe(self, daemon_set: DaemonSet) -> None:
        """Sees the newest template: makes its revision, or gives an old one of the same content the highest number."""
        if daemon_set.observed == daemon_set.generation or daemon_set.observes_at > self.store.timers.now() + 1e-9:
            return
        found = self.hash_of(daemon_set.spec)
        highest = max((one.number for one in self.store.revisions.values() if one.owner_uid == daemon_set.uid), default=0)
        template = self.store.revisions.get(f"{daemon_set.namespace}/{daemon_set.name}-{found}")
        same = [one for one in self.store.revisions.values() if one.owner_uid == daemon_set.uid and one.hash == found]
        if same:
            template = same[0]
        if template is None:
            template = Template(
                namespace=daemon_set.namespace,
                name=f"{daemon_set.name}-{found}",
                uid=self.store.uid(),
                labels={**daemon_set.spec.labels, REVISION_HASH: found},
                owner_uid=daemon_set.uid,
                number=highest + 1,
                hash=found,
                spec=daemon_set.spec,
            )
            self._revision_written(template)
        elif template.number != highest or template.owner_uid != daemon_set.uid:
            template.number, template.owner_uid = highest + 1, daemon_set.uid
            self._revision_written(template)
        daemon_set.is_rolling = not daemon_set.is_on_delete and daemon_set.template is not None
        daemon_set.template, daemon_set.observed = template, daemon_set.generation
        self.written(daemon_set)

    def _revision_written(self, template: Template) -> None:
        self.store.version += 1
        self.store.revisions[f"{template.namespace}/{template.name}"] = template
        self.store.tell(template)

    # Owners -------------------------------------------------------------------------------------------------------

    def take_over(self, daemon_set: DaemonSet) -> None:
        """A new DaemonSet takes the pods and revisions that nobody owns and that it selects."""
        for pod in self.store.pods_of(""):
            if pod.namespace == daemon_set.namespace and pod.owner is None and daemon_set.selects(pod.labels):
                daemon_set.claims[pod.uid] = pod
        for template in list(self.store.revisions.values()):
            if not template.owner_uid and template.namespace == daemon_set.namespace and daemon_set.selects(template.labels):
                template.owner_uid = daemon_set.uid
                self._revision_written(template)

    def _claim(self, daemon_set: DaemonSet) -> None:
        claims, daemon_set.claims = daemon_set.claims, {}
        for pod in claims.values():
            if pod.is_gone or pod.marked_at is not None:
                continue
            if pod.owner is None and daemon_set.selects(pod.labels):
                pod.owner = daemon_set.owner
            elif pod.owner is not None and pod.owner.uid == daemon_set.uid and not daemon_set.selects(pod.labels):
                pod.owner = None
            else:
                continue
            if pod.node_name is not None:
                daemon_set.dirty[pod.node_name] = True
            self.store.pod_written(pod)

    def delete(self, daemon_set: DaemonSet, cascade: Cascade) -> None:
        """Somebody deletes a DaemonSet."""
        collect = self.store.latencies.collect
        self.store.write("somebody", "delete", f"daemonset {daemon_set.ref}", cascade.value)
        if cascade is Cascade.BACKGROUND:
            self._remove(daemon_set)
            self.store.timers.later(collect, lambda: self._sweep(daemon_set))
            return
        daemon_set.is_deleting = True
        self.written(daemon_set)
        act = self._let_go if cascade is Cascade.ORPHAN else self._sweep_first
        self.store.timers.later(collect, lambda: act(daemon_set))

    def _remove(self, daemon_set: DaemonSet) -> None:
        self.store.version += 1
        if self.store.daemon_sets.get(daemon_set.ref) is daemon_set:
            del self.store.daemon_sets[daemon_set.ref]
        self.store.tell(daemon_set, ChangeKind.GONE)

    def _let_go(self, daemon_set: DaemonSet) -> None:
        for pod in self.store.pods_of(daemon_set.uid):
            pod.owner = None
            self.store.pod_written(pod)
        for template in [one for one in self.store.revisions.values() if one.owner_uid == daemon_set.uid]:
            template.owner_uid = ""
            self._revision_written(template)
        self._remove(daemon_set)

    def _sweep(self, daemon_set: DaemonSet) -> None:
        for pod in self.store.pods_of(daemon_set.uid):
            self.server.delete_pod(pod, who="garbage-collector")
        for ref, template in list(self.store.revisions.items()):
            if template.owner_uid == daemon_set.uid:
                del self.store.revisions[ref]
                self.store.version += 1
                self.store.tell(template, ChangeKind.GONE)

    def _sweep_first(self, daemon_set: DaemonSet) -> None:
        self._sweep(daemon_set)
        if self.store.pods_of(daemon_set.uid):
            self.store.timers.later(FOREGROUND_LOOK, lambda: self._sweep_first(daemon_set))
        else:
            self._remove(daemon_set)
