"""What follows from a driver pod on a node: the validator's pod, the GPUs that pods can have, and all the ways in which that goes wrong.

The kubelets start the pods; this plays what is in them, one `Conduct` per node.
"""

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final

from driver_manager import names
from driver_manager.sim.feeds import Scope
from driver_manager.sim.kubelet import Kubelets
from driver_manager.sim.objects import NEVER, Node, Phase, Pod, Slice, matches
from driver_manager.sim.server import Server
from driver_manager.sim.store import Store

FORGOTTEN_AFTER: Final = 300.0
"""Seconds after which the kubelet no longer counts the GPUs of a device plugin that is gone."""
FIRST_CRASH_PAUSE: Final = 10.0
LONGEST_CRASH_PAUSE: Final = 300.0
"""The kubelet's pauses between two starts of a container that fails."""


class Fate(StrEnum):
    """What becomes of a new driver pod."""

    READY = "ready"
    NEVER_READY = "never-ready"
    CRASHES = "crashes"
    """It fails each time, `start_seconds` after it began; restarts count up."""
    NO_IMAGE = "no-image"
    """ImagePullBackOff."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conduct:
    """How the driver, and what depends on it, behaves on a node. Read when a pod is made: those that run are left alone."""

    driver: Fate = Fate.READY
    start_seconds: float = 5.0
    """Bound -> Ready, or failed."""
    stop_seconds: float = 2.0
    """Deleted -> gone; `math.inf` hangs."""
    recovers_after: float = math.inf
    """Seconds after which a driver pod that does badly becomes Ready all the same."""
    validator_seconds: float = 1.0
    """Driver Ready -> validator Ready; `math.inf` never."""
    devices_seconds: float = 1.0
    """Driver (and validator, where there is one) Ready -> GPUs back; `math.inf` never."""
    lost_gpus: int = 0
    """GPUs that do not come back."""


class GpuNodes:
    """All GPU nodes of one world.

    Args:
        store: of the world.
        server: deletes validators.
        kubelets: start them.
        scope: which pods are drivers and validators.
        conduct: of nodes that have none of their own.
        validator_goes: whether the validator's pod is replaced together with the driver's.
    """

    def __init__(
        self, store: Store, server: Server, kubelets: Kubelets, scope: Scope, conduct: Conduct, *, validator_goes: bool = True
    ) -> None:
        self.conduct = conduct
        self.conducts: dict[str, Conduct] = {}
        """Of single nodes."""
        self.validator_goes = validator_goes
        self._store = store
        self._server = server
        self._kubelets = kubelets
        self._scope = scope
        self._begun: dict[str, bool] = {}
        """Uids of pods that were seen while they had yet to start."""
        self._going: dict[str, bool] = {}
        """Uids of driver pods whose deletion has begun: no validator starts for them."""
        self._ready: dict[str, str] = {}
        """Node -> uid of its Ready driver pod."""
        self._gone_at: dict[str, float] = {}
        """Uid of a node -> when its GPUs went last."""
        store.pod_listeners.append(self.pod_changed)

    def of(self, node_name: str | None) -> Conduct:
        """How things go on a node."""
        return self.conducts.get(node_name or "", self.conduct)

    def change(self, node_name: str, **changes: Any) -> None:
        """From now on things go otherwise on a node."""
        self.conducts[node_name] = replace(self.of(node_name), **changes)

    def is_driver(self, pod: Pod) -> bool:
        """Whether it is a driver's pod."""
        return pod.namespace == self._scope.namespace and pod.labels.get(names.COMPONENT_LABEL) in names.DRIVER_COMPONENTS

    def is_validator(self, pod: Pod) -> bool:
        """Whether it is a validator's pod."""
        return pod.namespace == self._scope.namespace and matches(self._scope.validator_selector, pod.labels)

    def shape(self, pod: Pod) -> None:
        """Says how a new pod will behave."""
        if self.is_driver(pod):
            conduct = self.of(pod.target)
            start = conduct.start_seconds if conduct.driver in (Fate.READY, Fate.NEVER_READY) else math.inf
            stop = NEVER if conduct.stop_seconds == math.inf else conduct.stop_seconds
            pod.spec = replace(pod.spec, start_seconds=start, stop_seconds=stop, is_ready=conduct.driver is Fate.READY)
        elif self.is_validator(pod):
            pod.spec = replace(pod.spec, start_seconds=math.inf)

    # Pods ---------------------------------------------------------------------------------------------------------

    def pod_changed(self, pod: Pod) -> None:
        """A pod was written or removed."""
        if self.is_driver(pod):
            self._driver_changed(pod)
        elif self.is_validator(pod):
            self._validator_changed(pod)

    def _driver_changed(self, pod: Pod) -> None:
        node_name = pod.node_name
        if node_name is None:
            return
        if pod.marked_at is None and pod.phase is Phase.PENDING and pod.uid not in self._begun:
            self._begun[pod.uid] = True
            self._begin(pod)
        if pod.marked_at is not None and pod.uid not in self._going:
            self._going[pod.uid] = True
            for validator in self._validators(node_name) if self.validator_goes else ():
                self._server.delete_pod(validator, who="operator")
        ready = [one.uid for one in self._store.pods_bound_to(node_name) if one.is_ready and self.is_driver(one)]
        before, now = self._ready.get(node_name, ""), ready[0] if ready else ""
        if now == before:
            return
        if now:
            self._ready[node_name] = now
            for validator in self._validators(node_name):
                self._validate(validator)
        else:
            del self._ready[node_name]
        self._look_at_devices(node_name)

    def _begin(self, pod: Pod) -> None:
        conduct = self.of(pod.node_name)
        if conduct.driver is Fate.CRASHES:
            self._kubelets.do(pod, conduct.start_seconds, lambda: self._crash(pod, 0))
        elif conduct.driver is Fate.NO_IMAGE:
            self._kubelets.do(pod, conduct.start_seconds, lambda: self._say(pod, "ImagePullBackOff"))
        if conduct.driver is not Fate.READY and conduct.recovers_after != math.inf:
            self._kubelets.do(pod, conduct.recovers_after, lambda: self._recover(pod))

    def _say(self, pod: Pod, trouble: str) -> None:
        if self._is_waiting(pod):
            pod.trouble = trouble
            self._store.pod_written(pod)

    def _is_waiting(self, pod: Pod) -> bool:
        return not (pod.is_gone or pod.is_ready or pod.is_over or pod.marked_at is not None)

    def _crash(self, pod: Pod, times: int) -> None:
        if not self._is_waiting(pod):
            return
        pod.phase, pod.restarts, pod.trouble = Phase.RUNNING, times, "CrashLoopBackOff"
        self._store.pod_written(pod)
        pause = min(FIRST_CRASH_PAUSE * 2**times, LONGEST_CRASH_PAUSE)
        self._kubelets.do(pod, pause, lambda: self._crash(pod, times + 1))

    def _recover(self, pod: Pod) -> None:
        if self._is_waiting(pod):
            pod.trouble = ""
            pod.spec = replace(pod.spec, is_ready=True)
            self._kubelets.start(pod)

    def _validators(self, node_name: str) -> list[Pod]:
        return [pod for pod in self._store.pods_bound_to(node_name) if pod.marked_at is None and self.is_validator(pod)]

    def _validator_changed(self, pod: Pod) -> None:
        if pod.node_name is None:
            return
        if pod.uid not in self._begun and pod.marked_at is None:
            self._begun[pod.uid] = True
            self._validate(pod)
        self._look_at_devices(pod.node_name)

    def _validate(self, pod: Pod) -> None:
        """Starts a validator's pod once its node's driver has been Ready for long enough."""
        driver, seconds = self._ready.get(pod.node_name or "", ""), self.of(pod.node_name).validator_seconds
        if not driver or driver in self._going or seconds == math.inf or pod.phase is not Phase.PENDING:
            return

        def start() -> None:
            if self._ready.get(pod.node_name or "") == driver and driver not in self._going and pod.phase is Phase.PENDING:
                self._kubelets.start(pod)

        self._kubelets.do(pod, seconds, start)

    # Devices ------------------------------------------------------------------------------------------------------

    def _look_at_devices(self, node_name: str) -> None:
        node = self._store.nodes.get(node_name)
        if node is None:
            return
        if node_name not in self._ready:
            if node.name in self._store.slices:  # the kubelet deletes what its plugin no longer stands for
                self._store.slice_removed(self._store.slices[node.name])
            elif node.allocatable:
                node.offered = 0
                self._gone_at[node.uid] = self._store.timers.now()
                self._store.node_written(node)
                self._store.timers.later(FORGOTTEN_AFTER, lambda: self._forget(node))
            return
        conduct = self.of(node_name)
        if not self._has_devices(node) and self._is_served(node_name) and conduct.devices_seconds != math.inf:
            self._store.timers.wake("devices", node.uid, conduct.devices_seconds, lambda: self._offer(node))

    def _is_served(self, node_name: str) -> bool:
        """Whether the device plugin can work there."""
        validators = self._validators(node_name) if node_name in self._ready else []
        return node_name in self._ready and all(pod.is_ready for pod in validators)

    def _has_devices(self, node: Node) -> bool:
        return node.name in self._store.slices if node.has_dra else node.allocatable > 0

    def _offer(self, node: Node) -> None:
        if self._store.nodes.get(node.name) is not node or not self._is_served(node.name) or self._has_devices(node):
            return
        gpus = max(0, node.gpus - self.of(node.name).lost_gpus)
        if node.has_dra:
            self.publish(node, gpus)
        else:
            node.offered = node.counted = gpus
            self._store.node_written(node)

    def publish(self, node: Node, gpus: int) -> None:
        """The node's DRA plugin publishes its devices."""
        self._store.slice_written(Slice(name=node.name, uid=self._store.uid(), node_name=node.name, devices=gpus))

    def _forget(self, node: Node) -> None:
        is_long = self._store.timers.now() - self._gone_at.get(node.uid, math.inf) >= FORGOTTEN_AFTER - 1e-9
        if self._store.nodes.get(node.name) is node and node.offered == 0 and node.counted != 0 and is_long:
            node.counted = 0
            self._store.node_written(node)
