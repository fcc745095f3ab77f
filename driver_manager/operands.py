"""The operands of a GPU node: one row each, and no other list of them anywhere.

An operand is a DaemonSet that runs where its deploy label is `true`. Changing the label's value on one node takes its pod off that node.
"""

from dataclasses import dataclass
from enum import StrEnum

from driver_manager.names import DEPLOY_PREFIX


class Turn(StrEnum):
    """When an operand goes."""

    FIRST = "first"
    """Together with the others, before anything is unloaded."""

    LAST = "last"
    """After every pod that holds a device through it is gone: it has to be there for their clean-up."""


@dataclass(frozen=True, slots=True)
class Operand:
    """One operand."""

    name: str
    """The part of the deploy label after the prefix."""

    app: str | None
    """Value of the `app` label of its pods, where the operator gives one."""

    turn: Turn = Turn.FIRST

    @property
    def label(self) -> str:
        """The node label that its DaemonSet selects."""
        return DEPLOY_PREFIX + self.name


OPERANDS: tuple[Operand, ...] = (
    Operand("operator-validator", "nvidia-operator-validator"),
    Operand("container-toolkit", "nvidia-container-toolkit-daemonset"),
    Operand("device-plugin", "nvidia-device-plugin-daemonset"),
    Operand("gpu-feature-discovery", "gpu-feature-discovery"),
    Operand("dcgm-exporter", "nvidia-dcgm-exporter"),
    Operand("dcgm", "nvidia-dcgm"),
    Operand("mig-manager", "nvidia-mig-manager"),
    Operand("nvsm", None),
    Operand("sandbox-validator", "nvidia-sandbox-validator"),
    Operand("sandbox-device-plugin", "nvidia-sandbox-device-plugin-daemonset"),
    Operand("kata-sandbox-device-plugin", None),
    Operand("vgpu-device-manager", "nvidia-vgpu-device-manager"),
    Operand("dra-validator", "nvidia-operator-validator"),
    Operand("dcgm-dra", "nvidia-dcgm-dra"),
    Operand("dcgm-exporter-dra", "nvidia-dcgm-exporter-dra"),
    Operand("dra-driver", "nvidia-dra-driver-kubelet-plugin", Turn.LAST),
)
"""All operands that use the driver. `driver`, `vgpu-manager` and `vfio-manager` own it and are not among them; `node-status-exporter`,
`kata-manager` and `cc-manager` open no device. DEPLOY_CLIENT is not an operand: any DaemonSet may select it."""
