"""Which taint keeps new GPU pods off the node while the driver is away.

A NoSchedule taint does not touch pods that run, but if the driver's own pod is deleted meanwhile, its DaemonSet makes no new one on a node
whose taint it does not tolerate, and nobody would be left to take the taint away. So the key is chosen for each run (design section 3).
"""

from collections.abc import Collection
from dataclasses import dataclass

from driver_manager.core.snapshot import NodeView, Taint, Toleration
from driver_manager.names import GPU_TAINT, KEEP_OFF_TAINT, TAINT_VALUE_PREFIX


@dataclass(frozen=True, slots=True)
class KeepOff:
    """The taint of this run, or that there is none."""

    taint: Taint | None
    because: str


def choose_keep_off(
    node: NodeView,
    tolerations: Collection[Toleration] | None,
    run: str,
    *,
    unowned_key: str = KEEP_OFF_TAINT,
    held: Taint | None = None,
) -> KeepOff:
    """The taint for a run.

    Args:
        node: with the taints it has.
        tolerations: of the driver's DaemonSet; None where no DaemonSet owns this run.
        run: the run's id, which becomes part of the taint's value.
        unowned_key: the key to use without an owner.
        held: the taint that an earlier run left, by its record: it is taken over if it is tolerated, and dropped otherwise.
    """
    value = TAINT_VALUE_PREFIX + run
    if held is not None and held.effect == "NoSchedule":
        ours = Taint(held.key, value)
        if tolerations is None or any(each.tolerates(ours) for each in tolerations):
            return KeepOff(ours, f"the taint {held.key} of an earlier run is taken over")
    taken = {taint.key for taint in node.taints if taint.effect == "NoSchedule"}
    keys = (unowned_key,) if tolerations is None else (KEEP_OFF_TAINT, GPU_TAINT)
    for key in keys:
        taint = Taint(key, value)
        is_tolerated = tolerations is None or any(each.tolerates(taint) for each in tolerations)
        if is_tolerated and key not in taken:
            owner = "no DaemonSet owns this run" if tolerations is None else "the driver's DaemonSet tolerates it"
            return KeepOff(taint, f"taint {key}: {owner}")
    if tolerations is None:
        return KeepOff(None, f"no taint: the node has another one with the key {unowned_key}")
    return KeepOff(None, f"no taint, only the cordon: the driver's DaemonSet tolerates no free key of {' and '.join(keys)}")
