"""Checks before any disruption: what would make a run fail half-way, found while nothing is changed."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from driver_manager.agent.observe import Observer
from driver_manager.config import Settings
from driver_manager.core.hostdriver import host_driver
from driver_manager.core.modules import stuck_modules, unload_order
from driver_manager.core.needs import ALWAYS, SOMETIMES, Need, in_words
from driver_manager.core.record import find_record
from driver_manager.core.seen import Snapshot, choose_keep_off_of
from driver_manager.core.snapshot import HostView, Permissions, Unloading
from driver_manager.errors import DriverManagerError, Exit
from driver_manager.ports import Clock, Cluster, Host


class Level(StrEnum):
    """How a check came out."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """One check and its result."""

    name: str
    level: Level
    sentence: str
    hint: str = ""
    code: Exit = Exit.DONE
    """The exit code it stands for when it failed."""


SEVERITY: Final = (Exit.BUG, Exit.CANNOT_UNLOAD, Exit.FORBIDDEN, Exit.CONFIG, Exit.UNREACHABLE, Exit.REFUSED, Exit.AGAIN)
"""From the worst on: the exit code of several failed checks is the first that occurs."""


def worst(checks: list[Check]) -> Exit:
    """The exit code of all checks together; warnings are none."""
    failed = {check.code for check in checks if check.level is Level.FAIL}
    return next((code for code in SEVERITY if code in failed), Exit.DONE)


async def preflight(connect: Callable[[], Awaitable[Cluster]], host: Host, clock: Clock, settings: Settings) -> list[Check]:
    """Runs all checks; one that fails stops no other that does not need it.

    Args:
        connect: opens the connection to the cluster.
        host: the machine.
        clock: time.
        settings: of the run to come.
    """
    try:
        checks = host_checks(await host.look(), settings)
    except DriverManagerError as error:
        checks = [Check("host", Level.FAIL, error.message, error.hint, error.exit_code)]
    if not settings.node_name:
        hint = "set NODE_NAME, or --node-name, to the name of this node (or --no-cluster)"
        checks.append(Check("node", Level.FAIL, "NODE_NAME is not set", hint, Exit.CONFIG))
    try:
        cluster = await connect()
    except DriverManagerError as error:
        return [*checks, Check("api", Level.FAIL, error.message, error.hint, error.exit_code)]
    try:
        return [*checks, *await _cluster_checks(cluster, host, clock, settings)]
    finally:
        await cluster.close()


async def _cluster_checks(cluster: Cluster, host: Host, clock: Clock, settings: Settings) -> list[Check]:
    observer = Observer(cluster, host, clock, settings)
    try:
        permissions = await cluster.permissions(settings.operator_namespace)
    except DriverManagerError as error:
        return [Check("api", Level.FAIL, error.message, error.hint, error.exit_code)]
    checks = [Check("api", Level.PASS, "the API server answers"), *await permission_checks(cluster, permissions)]
    if settings.no_cluster:
        checks = [Check("api", Level.PASS, "no cluster is asked: this machine alone is freed")]
    if not settings.node_name:
        return checks
    try:
        seen, _ = await observer.plan()
    except DriverManagerError as error:
        return [*checks, Check("node", Level.FAIL, error.message, error.hint, error.exit_code)]
    return [*checks, Check("node", Level.PASS, f"the node {seen.node.name} is there"), *node_checks(seen, settings)]


async def permission_checks(cluster: Cluster, permissions: Permissions) -> list[Check]:
    """What the account may do; where the server's list is not complete, each missing need is asked for by itself (decision 2)."""

    async def is_missing(need: Need) -> bool:
        if permissions.allow(*need):
            return False
        return not (permissions.is_incomplete and await cluster.may(*need))

    hint = "give the service account the ClusterRole of the stock driver DaemonSet"
    if missing := [in_words(need) for need in ALWAYS if await is_missing(need)]:
        return [Check("permissions", Level.FAIL, f"the account may not {', '.join(missing)}", hint, Exit.FORBIDDEN)]
    checks = [
        Check("permissions", Level.WARN, f"the account may not {in_words(need)}: {what}", hint)
        for need, what in SOMETIMES.items()
        if await is_missing(need)
    ]
    return checks or [Check("permissions", Level.PASS, "the account may do all that a run needs")]


def host_checks(host: HostView, settings: Settings) -> list[Check]:
    """What the kernel and the container's own set-up allow."""
    checks = [_unload_check(host)]
    if stuck := stuck_modules(host.modules):
        sentence = f"{', '.join(stuck)} is half-way through unloading and never gets out"
        checks.append(Check("module-state", Level.FAIL, sentence, "reboot the node", Exit.CANNOT_UNLOAD))
    else:
        checks.append(Check("module-state", Level.PASS, "no module is stuck"))
    if unknown := unload_order(host.modules, settings.unload_also).unknown_holders:
        sentence = f"{', '.join(unknown)} uses the driver and is none of NVIDIA's modules"
        hint = f"unload it by hand, or set UNLOAD_ALSO={','.join(unknown)}"
        checks.append(Check("module-holders", Level.FAIL, sentence, hint, Exit.REFUSED))
    if host.sees_all_processes:
        checks.append(Check("host-pid", Level.PASS, "the processes of the whole host are visible"))
    else:
        checks.append(Check("host-pid", Level.WARN, "only this pod's processes are visible: holders go unseen", "set hostPID: true"))
    checks.append(_propagation_check(host, settings))
    return checks + [Check("host", Level.WARN, note) for note in host.notes]


def _unload_check(host: HostView) -> Check:
    sentences = {
        Unloading.POSSIBLE: "this kernel unloads modules for this process",
        Unloading.DISABLED: "kernel.modules_disabled is 1: no module is unloaded until the next boot",
        Unloading.UNSUPPORTED: "this kernel is built without module unloading",
        Unloading.NOT_PERMITTED: "this process lacks CAP_SYS_MODULE",
    }
    if host.unloading is Unloading.POSSIBLE:
        return Check("unload", Level.PASS, sentences[host.unloading])
    hint = "run the container privileged" if host.unloading is Unloading.NOT_PERMITTED else "a new driver needs a reboot"
    level = Level.FAIL if host.is_loaded else Level.WARN
    return Check("unload", level, sentences[host.unloading], hint, Exit.CANNOT_UNLOAD)


def _propagation_check(host: HostView, settings: Settings) -> Check:
    if host.is_run_shared is False:
        sentence = "/run/nvidia is not a shared mount: unmounting here does not unmount on the host"
        hint = "mount /run/nvidia with mountPropagation: Bidirectional"
        if settings.no_cluster:
            hint = "on the machine itself nothing is wrong; a container needs it as a shared mount (rshared)"
        return Check("mounts", Level.WARN, sentence, hint)
    if host.is_run_shared is None:
        return Check("mounts", Level.WARN, "it cannot be seen how /run/nvidia is mounted")
    return Check("mounts", Level.PASS, "/run/nvidia is shared with the host")


def node_checks(seen: Snapshot, settings: Settings) -> list[Check]:
    """What the node itself says."""
    found = find_record(seen.node)
    checks = []
    if found.is_unreadable:
        checks.append(Check("record", Level.FAIL, found.complaint, "put the node back by hand, then remove it", Exit.REFUSED))
    elif found.complaint:
        checks.append(Check("record", Level.WARN, found.complaint))
    elif found.record is not None:
        sentence = f"run {found.record.run} of {found.record.started} left its record: the next run takes it over"
        checks.append(Check("record", Level.WARN, sentence, "run `driver-manager restore` to put the node back now"))
    else:
        checks.append(Check("record", Level.PASS, "no earlier run left anything"))
    keep_off = choose_keep_off_of(seen, settings, found.record)
    level = Level.PASS if keep_off.taint is not None or settings.no_cluster else Level.WARN
    checks.append(Check("keep-off", level, keep_off.because))
    if (version := host_driver(seen.host, seen.host_smi_version)) is not None:
        checks.append(Check("host-driver", Level.WARN, f"the loaded driver {version} belongs to the host: a run ends with exit code 72"))
    if seen.is_policy_owned:
        checks.append(Check("owner", Level.PASS, "an upgrade controller owns cordon and GPU pod eviction on this node"))
    return checks
