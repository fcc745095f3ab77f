"""Every key, value and path that others see or that we share with NVIDIA's tools: the public contract, in one file.

Nothing here decides anything. Keys that come from NVIDIA's gpu-operator and k8s-driver-manager keep their exact spelling and meaning.
"""

from typing import Final

# Ours ---------------------------------------------------------------------------------------------------------------

RECORD: Final = "nvidia.com/gpu-driver-manager.record"
"""Node annotation: what this program changed on the node, with the original values (core/record.py)."""

STATUS: Final = "nvidia.com/gpu-driver-manager.status"
"""Node annotation: JSON for people and controllers: phase, reason, sentence, since, blockers."""

HOST_DRIVER: Final = "nvidia.com/gpu-driver-manager.host-driver"
"""Node annotation: that the `pre-installed` mark is ours, with the value it replaced and the driver's version."""

KEEP_CORDON: Final = "nvidia.com/gpu-driver-manager.keep-cordon"
"""Node annotation, `true`: a person wants the node to stay cordoned when our own cordon ends."""

NAME_LABEL: Final = "app.kubernetes.io/name"
OWN_NAME: Final = "driver-manager"
"""Value of NAME_LABEL on this program's own pods."""

PARK: Final = "nvidia.com/gpu-driver-manager.park"
"""Label of a DaemonSet, `true`: it may be kept off a node by an admission policy while the node's driver is away. Any other value
is an opt-out, whatever a policy names."""
PARKED: Final = "nvidia.com/gpu-driver-manager.parked"
"""Node label and annotation: DaemonSets that an admission policy keeps off this node. Also gate and label of pods kept off."""
PARKING_TERM: Final = "nvidia.com/gpu-driver-manager.parking-term"
"""Label of a DaemonSet, `true`: the controller has put the term into its template by which its pods leave parked nodes."""
PARKING: Final = "nvidia.com/gpu-driver-manager.parking"
"""Node annotation, PARKING_ENFORCED: the controller has proven that the admission policies keep parked DaemonSets off. Then the agent may
park too."""
PARKING_ENFORCED: Final = "enforced"
PROBE: Final = "nvidia.com/gpu-driver-manager.probe"
"""Pod annotation, `namespace/name` of a DaemonSet: asks (in a dry run) whether a pod of that DaemonSet would be kept off."""

ROLLOUT: Final = "nvidia.com/gpu-driver-manager.rollout"
"""Node annotation: how far the controller is with this node, and what it has to put back (core/rollout_record.py)."""
ACCEPT: Final = "nvidia.com/gpu-driver-manager.accept"
"""Node annotation, `true`: a person accepts the node as it is, so it is opened though its validation failed. Taken off with that."""
PAUSED_ROLLOUT: Final = "nvidia.com/gpu-driver-manager.paused"
"""Annotation of the controller's Lease: while it is there, no node is begun. Only people write it."""
WAITING: Final = "nvidia.com/gpu-driver-manager.waiting"
"""Annotation of the controller's Lease: policy group -> why no more of its nodes are begun now (JSON)."""
GRANTS: Final = "nvidia.com/gpu-driver-manager.grants"
"""Annotation of the controller's Lease: names of nodes that may be cordoned though they do not show it yet (JSON list)."""

ROLE: Final = "nvidia.com/gpu-driver-manager.role"
"""Annotation of the controller's Lease: whether it leads or follows gpu-operator, and why."""
POLICY: Final = "nvidia.com/gpu-driver-manager.policy"
"""Annotation of a ClusterPolicy or NVIDIADriver: fields of its upgradePolicy, YAML or JSON, for those that the API server would drop."""

KEEP_OFF_TAINT: Final = "nvidia.com/gpu-driver-update"
"""Key of our NoSchedule taint where the driver's DaemonSet tolerates it."""

GPU_TAINT: Final = "nvidia.com/gpu"
"""Key of the taint that stock driver DaemonSets tolerate; used as keep-off where our own key is not tolerated."""

TAINT_VALUE_PREFIX: Final = "dm-"
"""A taint is ours only if its value is this and a run id."""

GPU_CLIENT: Final = "nvidia.com/gpu.client"
"""Pod annotation or label, `true`: the pod uses the driver and may be evicted."""

# NVIDIA's -----------------------------------------------------------------------------------------------------------

DEPLOY_PREFIX: Final = "nvidia.com/gpu.deploy."
"""Node labels `nvidia.com/gpu.deploy.<operand>` that the operands' DaemonSets select."""

DEPLOY_DRIVER: Final = DEPLOY_PREFIX + "driver"
DEPLOY_VGPU_MANAGER: Final = DEPLOY_PREFIX + "vgpu-manager"
DEPLOY_VFIO_MANAGER: Final = DEPLOY_PREFIX + "vfio-manager"
DEPLOY_CLIENT: Final = DEPLOY_PREFIX + "client"

PAUSED: Final = "paused-for-driver-upgrade"
"""Value of a paused deploy label, or the part of it that says so."""

FOREIGN_PAUSE_PREFIX: Final = "paused-for-"
"""How pause values of NVIDIA's other tools begin (the MIG manager's, for example). Never an original value."""

PRE_INSTALLED: Final = "pre-installed"
"""Value of DEPLOY_DRIVER on nodes whose driver belongs to the host."""

UPGRADE_ENABLED: Final = "nvidia.com/gpu-driver-upgrade-enabled"
"""Node annotation, `true`: an upgrade controller cordons this node and evicts its GPU pods."""

UPGRADE_REQUESTED: Final = "nvidia.com/gpu-driver-upgrade-requested"
"""Node annotation, `true`: asks the upgrade controller to take the node through an upgrade."""

UPGRADE_STATE: Final = "nvidia.com/gpu-driver-upgrade-state"
"""Node label: where the upgrade controller is with this node."""

OPERATOR_LEASE: Final = "53822513.nvidia.com"
"""Lease of gpu-operator, in its own namespace: while that is renewed, its upgrade controller is at work."""

UPGRADE_SKIP: Final = "nvidia.com/gpu-driver-upgrade.skip"
"""Node label, `true`: the node is not begun."""
SAFE_LOAD: Final = "nvidia.com/gpu-driver-upgrade.driver-wait-for-safe-load"
"""Node annotation, not empty: the driver's init container waits until the node is free, and the annotation is taken off."""
INITIAL_UNSCHEDULABLE: Final = "nvidia.com/gpu-driver-upgrade.node-initial-state.unschedulable"
"""Node annotation, there or not: the node was cordoned before its upgrade began, and stays so."""
WAIT_STARTED: Final = "nvidia.com/gpu-driver-upgrade-wait-for-pod-completion-start-time"
VALIDATION_STARTED: Final = "nvidia.com/gpu-driver-upgrade-validation-start-time"
"""Node annotations of NVIDIA's controller: Unix seconds. Taken off when an upgrade ends."""
REQUESTOR_MODE: Final = "nvidia.com/gpu-driver-upgrade-requestor-mode"
"""Node annotation, there or not: a maintenance operator has the node."""
DRIVER_OWNER: Final = "nvidia.com/gpu-operator.driver.owner"
"""Node label: name of the NVIDIADriver that the node's driver belongs to."""

DRAIN_SKIP: Final = "nvidia.com/gpu-driver-upgrade-drain.skip"
"""Pod label, `true`: the pod is never evicted by a driver upgrade."""

COMPONENT_LABEL: Final = "app.kubernetes.io/component"
DRIVER_COMPONENTS: Final = frozenset({"nvidia-driver", "nvidia-vgpu-manager", "nvidia-vgpu-host-manager"})
"""Values of COMPONENT_LABEL on pods that install or own a driver."""

VALIDATOR_APP: Final = "nvidia-operator-validator"
"""`app` of the pods that validate driver and devices."""
DRIVER_APP: Final = "nvidia-driver-daemonset"
"""Value of the label `app` on the driver pods of a ClusterPolicy."""

DRIVER_DIGEST: Final = "DRIVER_CONFIG_DIGEST"
"""Environment variable of the driver's containers: what the driver was configured with, as one value."""

DRIVER_CONTAINER: Final = "k8s-driver-manager"
"""Name of the init container that runs this program in the stock DaemonSets."""

UPGRADE_CONTROLLER_PREFIXES: Final = ("nvidia.com/gpu", "nvidia.com/mig-")
"""What NVIDIA's upgrade controller takes for a GPU resource."""

RESOURCE_PREFIX: Final = "nvidia.com/"
"""How the names of all of NVIDIA's resources begin."""

GPU_RESOURCE_PREFIXES: Final = (
    *UPGRADE_CONTROLLER_PREFIXES,
    *("nvidia.com/pgpu", "nvidia.com/vgpu", "nvidia.com/GRID_", "nvidia.com/NVIDIA_"),
    *(f"nvidia.com/{chip}" for chip in ("AD1", "GA1", "GB1", "GB2", "GH1", "GK1", "GK2", "GM1", "GM2", "GP1", "GR1", "GV1", "TU1")),
)
"""A container whose requests or limits name a resource that begins so uses a GPU: those of the device plugin, of passed-through and virtual
GPUs, and the device names (chip or vGPU type) that plugins for virtual machines make up. Network cards are nvidia.com/ resources too."""

DRA_GROUP: Final = "resource.k8s.io"
GPU_DRA_DRIVER: Final = "gpu.nvidia.com"
DRA_DRIVERS: Final = frozenset({GPU_DRA_DRIVER, "compute-domain.nvidia.com"})
"""NVIDIA's DRA drivers. One plugin pod serves both, so a claim of either needs it on the node."""
COMPUTE_DOMAIN_LABEL: Final = "resource.nvidia.com/computeDomain"
"""Node label that the daemons of a compute domain select."""
NEVER_PAUSED: Final = frozenset({DEPLOY_DRIVER, DEPLOY_VGPU_MANAGER, DEPLOY_VFIO_MANAGER, DEPLOY_PREFIX + "operands"})
"""Deploy labels of what owns the driver, and the operator's own switch."""

# KubeVirt's ---------------------------------------------------------------------------------------------------------

VM_LABEL: Final = "kubevirt.io"
"""Pod label, `virt-launcher` on the pod of a virtual machine."""
VM_NAME_LABEL: Final = "vm.kubevirt.io/name"

GPU_RUNTIME_HANDLERS: Final = frozenset({"nvidia", "nvidia-cdi", "nvidia-legacy", "nvidia-experimental"})
"""Handlers of the runtime classes that give a container the driver."""

# Kubernetes' --------------------------------------------------------------------------------------------------------

MIRROR: Final = "kubernetes.io/config.mirror"
MIRROR_HASH: Final = "kubernetes.io/config.hash"
"""Annotation of a mirror pod: the uid that its static pod has on the node, in cgroup paths too."""
CDI_PREFIX: Final = "cdi.k8s.io/"
"""Annotations that name CDI devices begin so: https://github.com/cncf-tags/container-device-interface"""
REVISION_HASH: Final = "controller-revision-hash"
"""Label of a DaemonSet's pods and of its ControllerRevisions: which template they are of."""
UNSCHEDULABLE_TAINT: Final = "node.kubernetes.io/unschedulable"
"""The node lifecycle controller's own mark of a cordon: follows `spec.unschedulable` a moment later."""

# PCI ----------------------------------------------------------------------------------------------------------------

NVIDIA: Final = "0x10de"
MELLANOX: Final = "0x15b3"
"""Vendors, as sysfs writes them."""

# Files on the node, below the root of the host's /run ----------------------------------------------------------------

RUN_NVIDIA: Final = "run/nvidia"
DRIVER_ROOT: Final = "run/nvidia/driver"
STATE_FILE: Final = "run/nvidia/nvidia-driver.state"
PID_FILE: Final = "run/nvidia/nvidia-driver.pid"
LOCK_FILE: Final = "run/nvidia/driver-manager.lock"
LOCAL_NODE: Final = "run/nvidia/driver-manager.node.json"
"""The node's annotations, on a machine without a cluster."""
VFIO_ORIGINALS: Final = "run/nvidia/driver-manager.vfio"
"""Which drivers PCI functions had before `vfio-manage bind` moved them."""
VALIDATIONS: Final = "run/nvidia/validations"
READY_MARKERS: Final = ("driver-ready", "toolkit-ready", ".driver-ctr-ready")
"""Files in VALIDATIONS that let operands start; wrong as soon as the driver they speak of is unloaded."""
MOFED_READY: Final = "run/mellanox/drivers/.driver-ready"

# Files of a machine whose runs systemd starts ------------------------------------------------------------------------

SYSTEMD_UNIT: Final = "etc/systemd/system/driver-manager.service"
SYSTEMD_SETTINGS: Final = "etc/driver-manager/driver-manager.env"
