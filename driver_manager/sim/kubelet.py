"""The kubelets: they take bound pods through their lives, and the processes on the machine with them."""

import math
from collections.abc import Callable
from typing import Final

from driver_manager.core.uses import is_dra_plugin
from driver_manager.names import DRA_DRIVERS, MIRROR
from driver_manager.sim.machine import Machine
from driver_manager.sim.objects import Node, Phase, Pod
from driver_manager.sim.store import Store

MIRROR_BACK: Final = 1.0
"""Seconds until a static pod's mirror is made again."""
CLAIMS_AGAIN: Final = 1.0
"""Seconds until the DRA plugin is asked again for devices, or to take them back."""


class Kubelets:
    """Those of all nodes of one cluster."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.machines: dict[str, Machine] = {}
        """Of the nodes that have one."""
        self._begun: dict[str, bool] = {}
        self._ending: dict[str, float] = {}
        self._held: dict[str, list[Callable[[], None]]] = {}
        self._prepared: dict[str, bool] = {}
        """Uids of pods whose claims the DRA plugin has served and not taken back."""
        store.pod_listeners.append(self.pod_changed)

    def pod_changed(self, pod: Pod) -> None:
        """A pod was written or removed."""
        if pod.node_name is None:
            return
        if pod.is_gone:
            if pod.spec.stop_seconds is not None:
                self._stop_process(pod)
            return
        if pod.marked_at is not None:
            self._plan_end(pod)
        elif pod.uid not in self._begun and pod.phase is Phase.PENDING:
            self._begun[pod.uid] = True
            if pod.spec.start_seconds == math.inf:
                return
            self.do(pod, self.store.latencies.start + pod.spec.start_seconds, lambda: self._prepare(pod))

    def set_down(self, node: Node, is_down: bool) -> None:
        """Stops or wakes the kubelet of a node; what came due meanwhile is done then."""
        node.is_down = is_down
        if not is_down:
            for what in self._held.pop(node.name, []):
                what()
            for listen in self.store.node_listeners:
                listen(node)  # as its next report does

    def _prepare(self, pod: Pod) -> None:
        """Starts the containers once the plugin has served the pod's claims."""
        if pod.is_gone or pod.marked_at is not None:
            return
        if self._needs_plugin(pod) and not self._has_plugin(pod):
            self.do(pod, CLAIMS_AGAIN, lambda: self._prepare(pod))
        else:
            self.start(pod)

    def _needs_plugin(self, pod: Pod) -> bool:
        found = [self.store.claims.get((pod.namespace, name)) for name in pod.spec.claims]
        return any(claim is not None and claim.drivers & DRA_DRIVERS for claim in found)

    def _has_plugin(self, pod: Pod) -> bool:
        there = self.store.pods_bound_to(pod.node_name or "")
        return any(one.phase is Phase.RUNNING and is_dra_plugin(one.view()) for one in there)

    def start(self, pod: Pod) -> None:
        """The containers run."""
        if pod.is_gone or pod.marked_at is not None:
            return
        self._begun[pod.uid] = True
        if self._needs_plugin(pod):
            self._prepared[pod.uid] = True
        pod.phase, pod.is_ready = Phase.RUNNING, pod.spec.is_ready
        machine = self.machines.get(pod.node_name or "")
        if machine is not None:
            machine.start_pod(pod)
        self.store.pod_written(pod)

    def finish(self, pod: Pod, phase: Phase = Phase.SUCCEEDED) -> None:
        """The containers end by themselves."""
        pod.phase, pod.is_ready = phase, False
        self._stop_process(pod)
        self.store.pod_written(pod)

    def _plan_end(self, pod: Pod) -> None:
        now = self.store.timers.now()
        if pod.is_over or pod.phase is Phase.PENDING:
            end = now
        else:
            marked = now if pod.marked_at is None else pod.marked_at
            stop = math.inf if pod.spec.stop_seconds is None else marked + pod.spec.stop_seconds
            end = stop if pod.spec.stop_seconds is None else min(stop, pod.ends_at)
        if end >= self._ending.get(pod.uid, math.inf):
            return
        self._ending[pod.uid] = end
        self.do(pod, max(0.0, end - now), lambda: self._end(pod, end))

    def _end(self, pod: Pod, planned: float) -> None:
        if pod.is_gone or self._ending[pod.uid] != planned:
            return
        if not pod.is_over:
            was_killed = pod.spec.stop_seconds is not None and pod.spec.stop_seconds > pod.spec.grace_seconds
            pod.phase, pod.is_ready = Phase.FAILED if was_killed else Phase.SUCCEEDED, False
            self._stop_process(pod)
            self.store.pod_written(pod)
        self.do(pod, self.store.latencies.remove, lambda: self._remove(pod))

    def _remove(self, pod: Pod) -> None:
        if pod.is_gone:
            return
        if pod.uid in self._prepared:  # a pod is only gone when its devices are given back, and the plugin alone takes them
            if not self._has_plugin(pod):
                self.do(pod, CLAIMS_AGAIN, lambda: self._remove(pod))
                return
            del self._prepared[pod.uid]
        if pod.finalizers:
            pod.deletion_grace = 0
            self.store.pod_written(pod)
            return
        self.store.pod_removed(pod)
        if MIRROR in pod.annotations:
            self.store.timers.later(MIRROR_BACK, lambda: self._mirror_again(pod))

    def _mirror_again(self, pod: Pod) -> None:
        again = Pod(
            namespace=pod.namespace,
            name=pod.name,
            uid=self.store.uid(),
            spec=pod.spec,
            owner=pod.owner,
            tolerations=pod.tolerations,
            labels=dict(pod.labels),
            annotations=dict(pod.annotations),
            node_name=pod.node_name,
        )
        self.store.pod_written(again)

    def _stop_process(self, pod: Pod) -> None:
        machine = self.machines.get(pod.node_name or "")
        if machine is not None:
            self.store.timers.later(pod.spec.lag_seconds, lambda: machine.stop_pod(pod))

    def do(self, pod: Pod, seconds: float, what: Callable[[], None]) -> None:
        """Later, or when the kubelet is back."""

        def act() -> None:
            node = self.store.nodes.get(pod.node_name or "")
            if node is not None and node.is_down:
                self._held.setdefault(node.name, []).append(what)
            else:
                what()

        self.store.timers.later(seconds, act)
