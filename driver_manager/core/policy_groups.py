"""Which policy upgrades which node: the custom resources and the file, as one table. Routing is that of NVIDIA's controller.

A file, where one is given, is the policy of all nodes. Else the oldest ClusterPolicy counts; where there is none, or it leaves the driver
to NVIDIADriver objects, each node has the policy of the NVIDIADriver that its owner label names.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from driver_manager.core.fleet import PolicySource
from driver_manager.core.policy_annotation import dropped_fields, dropped_words, with_annotation
from driver_manager.core.upgrade_policy import BadPolicy, UpgradePolicy, read_policy
from driver_manager.names import DRIVER_OWNER, POLICY

FILE_GROUP: Final = "file"


@dataclass(frozen=True, slots=True)
class Group:
    """Nodes that share a policy and its limits."""

    name: str
    policy: UpgradePolicy | None
    """None: nothing is started in it."""
    why_not: str = ""
    """Why, where there is no policy."""
    is_broken: bool = False
    """Whether that is because it cannot be used, so that nothing is written to nodes that are not in work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """All groups."""

    everybody: Group | None = None
    """The group of all nodes; None where owner labels tell."""
    by_owner: Mapping[str, Group] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)
    """`Kind/name` of a resource -> what is wrong with its policy."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """`Kind/name` of a resource -> what a person should know of it though its policy is used."""

    @property
    def parked(self) -> frozenset[str]:
        """The DaemonSets that policies in use name to be parked, `namespace/name`."""
        every = [self.everybody, *self.by_owner.values()]
        return frozenset(ref for group in every if group is not None and group.policy is not None for ref in group.policy.pod_deletion.park)

    def of(self, labels: Mapping[str, str]) -> Group:
        """The group of a node with these labels."""
        if self.everybody is not None:
            return self.everybody
        owner = labels.get(DRIVER_OWNER, "")
        nobody = f"no NVIDIADriver is called {owner}" if owner else f"the node has no label {DRIVER_OWNER}"
        return self.by_owner.get(owner) or Group("", None, nobody)


def policy_groups(
    cluster_policies: Iterable[PolicySource], drivers: Iterable[PolicySource], from_file: UpgradePolicy | None = None
) -> Groups:
    """The groups that follow from what is there."""
    if from_file is not None:
        is_on = from_file.auto_upgrade
        everybody = Group(FILE_GROUP, from_file) if is_on else Group(FILE_GROUP, None, "autoUpgrade of the policy file is not true")
        return Groups(everybody=everybody)
    problems: dict[str, str] = {}
    notes: dict[str, str] = {}
    active = min(cluster_policies, key=lambda each: (each.created, each.name), default=None)
    if active is not None and not active.uses_nvidia_driver_crd:
        return Groups(everybody=_of_cluster_policy(active, problems, notes), problems=problems, notes=notes)
    found = {each.name: _group(each, problems, notes, auto_upgrade=each.upgrade_policy is None) for each in drivers}
    if active is None and not found:
        return Groups(everybody=Group("", None, "there is no ClusterPolicy, no NVIDIADriver and no policy file"))
    return Groups(by_owner=found, problems=problems, notes=notes)


def _of_cluster_policy(source: PolicySource, problems: dict[str, str], notes: dict[str, str]) -> Group:
    name = f"{source.kind}/{source.name}"
    if source.has_sandbox_workloads:
        return Group(name, None, f"{name} has sandboxWorkloads enabled")
    if not source.has_driver:
        return Group(name, None, f"{name} has the driver disabled")
    return _group(source, problems, notes, auto_upgrade=False)


def _group(source: PolicySource, problems: dict[str, str], notes: dict[str, str], *, auto_upgrade: bool) -> Group:
    """One resource's group.

    Args:
        source: the resource.
        problems: gets what is wrong with it.
        notes: gets what else a person should know.
        auto_upgrade: what it means that the policy does not say.
    """
    name = f"{source.kind}/{source.name}"
    if source.is_deleting:
        return Group(name, None, f"{name} is being deleted")
    try:
        raw = with_annotation(source.upgrade_policy, source.annotations.get(POLICY))
        policy = read_policy(raw, auto_upgrade=auto_upgrade)
    except BadPolicy as error:
        problems[name] = str(error)
        return Group(name, None, f"the upgradePolicy of {name} is not valid: {error}", is_broken=True)
    if note := dropped_words(dropped_fields(source.applied_policy, raw)):
        notes[name] = note
    if not policy.auto_upgrade:
        return Group(name, None, f"autoUpgrade of {name} is false")
    return Group(name, policy)
