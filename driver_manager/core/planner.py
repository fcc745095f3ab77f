"""From what was seen to what is done: the one place where a run's way is chosen.

Refusals come first (R5), then the ways that disturb nobody (R11), then the full one. All of it is plain functions; `plan` prints what
`uninstall_driver` runs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from driver_manager.config import Settings
from driver_manager.core.consumers import LAST_APPS, Action, Verdict, drain_verdict, verdicts
from driver_manager.core.hostdriver import host_driver, previous_value
from driver_manager.core.keepoff import KeepOff
from driver_manager.core.labels import LabelsToPause
from driver_manager.core.modules import NOUVEAU, stuck_modules, unload_order
from driver_manager.core.needs import EVICT, GET_CLAIM, PATCH_NODE, WATCH_PODS, Need
from driver_manager.core.plan import (
    AwaitForeignPause,
    AwaitNetworkDriver,
    AwaitOtherDriver,
    AwaitPolicyOwner,
    AwaitReleased,
    AwaitRollingUpdate,
    BeginUnload,
    FreePods,
    LookAgain,
    MarkHostDriver,
    Path,
    PauseLast,
    PauseNode,
    Plan,
    ProveFree,
    ProveNoClaims,
    RemoveFiles,
    RemovePidFile,
    RestoreNode,
    StartServices,
    Step,
    StopServices,
    TryEvictions,
    UnbindVfio,
    UnloadModule,
    UnmarkHostDriver,
    Unmount,
    counted,
)
from driver_manager.core.record import Phase, Record, find_record, merged
from driver_manager.core.rounds import pods_ending, pods_to, pods_to_evict
from driver_manager.core.seen import Snapshot, choose_keep_off_of, host_uses_of, keeps_vfio, labels_of, other_drivers, pod_policy
from driver_manager.core.services import HostAction, HostUse, start_order, units_to_stop
from driver_manager.core.snapshot import HostView, NodeView, PodView, Unloading
from driver_manager.core.uses import is_dra_plugin
from driver_manager.core.vfio import holder_words, on_vfio, vfio_holders
from driver_manager.errors import Exit, Refused
from driver_manager.names import (
    DEPLOY_CLIENT,
    DEPLOY_DRIVER,
    DEPLOY_PREFIX,
    HOST_DRIVER,
    MELLANOX,
    NEVER_PAUSED,
    PRE_INSTALLED,
    READY_MARKERS,
    STATE_FILE,
    UPGRADE_ENABLED,
    VALIDATIONS,
)


def plan_uninstall(seen: Snapshot, settings: Settings) -> Plan:
    """The way of a run that frees the driver."""
    found = find_record(seen.node)
    if found.is_unreadable:
        hint = "look at it, put the node back by hand, and remove the annotation"
        return Plan(path=Path.REFUSED, because=found.complaint, refusals=(found.complaint,), hint=hint, ends_with=Exit.REFUSED)
    notes = (*seen.host.notes, *((found.complaint,) if found.complaint else ()))
    record = found.record
    if record is not None and record.boot_id != seen.host.boot_id:
        because = f"run {record.run} of another boot left the node paused"
        return Plan(path=Path.UNDO, because=because, steps=(RestoreNode(),), on_failure=(RestoreNode(),), record=record, notes=notes)
    plan = _plan_by_driver(seen, settings, record)
    on_failure = (RestoreNode(),) if plan.steps or record is not None else ()
    return replace(plan, notes=(*notes, *plan.notes), record=record, on_failure=on_failure)


def _plan_by_driver(seen: Snapshot, settings: Settings, record: Record | None) -> Plan:
    if settings.host_driver == "keep" and (version := host_driver(seen.host, seen.host_smi_version)) is not None:
        return _plan_host_driver(seen, settings, version, record)
    undo: tuple[Step, ...] = (RestoreNode(),) if record is not None else ()
    unmark = _unmark(seen.node)
    if stuck := stuck_modules(seen.host.modules):
        return _refused(
            f"{', '.join(stuck)} is half-way through unloading",
            "reboot the node: the kernel never finishes this",
            Exit.CANNOT_UNLOAD,
        )
    disturbs_nobody = not seen.host.is_loaded or _unchanged(seen.host, settings, record)
    if disturbs_nobody and (others := other_drivers(seen)):
        return Plan(path=Path.WAIT, because="another driver's pod lives on this node", steps=(AwaitOtherDriver(others),))
    if not seen.host.is_loaded:
        return _plan_nothing_loaded(seen, settings, record, unmark, undo)
    if why := _unchanged(seen.host, settings, record):
        steps = (
            *unmark,
            *_unmounts(seen.host, is_detach_at_once=True),
            *_pid_file(seen.host),
            *_recycle(seen, record),
            *undo,
        )
        return Plan(path=Path.UNCHANGED, because=why, steps=_once(steps), notes=_plugin_notes(seen))
    return _plan_full(seen, settings, record, unmark)


def _once(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """The steps, with only the last of several restores."""
    last = RestoreNode()
    return (*(step for step in steps if step != last), *((last,) if last in steps else ()))


def _refused(sentence: str, hint: str, code: Exit) -> Plan:
    return Plan(path=Path.REFUSED, because=sentence, refusals=(sentence,), hint=hint, ends_with=code)


# The ways that disturb nobody ---------------------------------------------------------------------------------------


def _plan_host_driver(seen: Snapshot, settings: Settings, version: str, record: Record | None) -> Plan:
    because = f"the loaded driver {version} belongs to the host"
    hint = "nothing is changed on a node whose driver the host owns; remove the host's driver to use the containerised one"
    if settings.no_cluster:
        hint = "nothing is changed; HOST_DRIVER=unload frees a driver of the host's own"
    steps: tuple[Step, ...] = (RestoreNode(),) if record is not None else ()
    value = seen.node.labels.get(DEPLOY_DRIVER)
    if value != PRE_INSTALLED and not seen.wants_vfio and not settings.no_cluster:
        steps = (*steps, MarkHostDriver(value, version))
    return Plan(path=Path.HOST_DRIVER, because=because, steps=steps, hint=hint, ends_with=Exit.HOST_DRIVER)


def _unmark(node: NodeView) -> tuple[Step, ...]:
    """Our mark of a host driver goes when there is none any more; a mark without our annotation is somebody else's."""
    if (text := node.annotations.get(HOST_DRIVER)) is None:
        return ()
    return (UnmarkHostDriver(previous_value(text)),)


def _unchanged(host: HostView, settings: Settings, record: Record | None) -> str:
    """Why nothing has to be done to the loaded driver, or nothing."""
    digest = settings.driver_config_digest
    if settings.force_reinstall or not digest or host.state_digest != digest:
        return ""
    if record is not None and record.phase is Phase.UNLOADING:
        return ""
    return f"the loaded driver {host.driver_version or 'of unknown version'} has the wanted configuration, digest {digest}"


def _why_full(host: HostView, settings: Settings) -> str:
    if not host.is_loaded:
        return "a virtual machine uses GPUs on vfio that are wanted for the driver"
    loaded = f"driver {host.driver_version or 'of unknown version'} is loaded"
    if settings.force_reinstall:
        return f"{loaded}, and FORCE_REINSTALL is set"
    if not settings.driver_config_digest:
        return f"{loaded}, and no DRIVER_CONFIG_DIGEST says what is wanted"
    have = f"digest {host.state_digest}" if host.state_digest else "no digest on file"
    return f"{loaded} with {have}, wanted is digest {settings.driver_config_digest}"


def _plan_nothing_loaded(
    seen: Snapshot, settings: Settings, record: Record | None, unmark: tuple[Step, ...], undo: tuple[Step, ...]
) -> Plan:
    host = seen.host
    unbind = unbind_steps(seen, settings)
    if unbind and (machines := vfio_holders(seen.holders)):
        if any(each.pod_uid for each in machines):
            return _plan_full(seen, settings, record, unmark)  # N37: then somebody has to go
        sentence = f"the GPUs {', '.join(unbind[0].addresses)} are on vfio and in use by {', '.join(map(holder_words, machines))}"
        return _refused(sentence, "end the virtual machine that is named, or give the node to virtual machines", Exit.AGAIN)
    if NOUVEAU in host.modules and (plan := _cannot_unload(host)) is not None:
        return plan
    steps = (
        *unmark,
        *_files_there(host),
        *_unmounts(host, is_detach_at_once=True),
        *_pid_file(host),
        *((UnloadModule(NOUVEAU),) if NOUVEAU in host.modules else ()),
        *unbind,
        *_network_driver(host, settings),
        ProveFree(with_modules=True),
        *_recycle(seen, record),
        *undo,
    )
    because = "no NVIDIA driver is loaded, so nobody has to go"
    return Plan(path=Path.NOTHING_LOADED, because=because, steps=_once(steps), notes=_plugin_notes(seen))


def unbind_steps(seen: Snapshot, settings: Settings) -> tuple[UnbindVfio, ...]:
    """GPUs on vfio go off it, unless they are to stay."""
    if keeps_vfio(seen, settings):
        return ()
    addresses = on_vfio(seen.host.pci, switches=settings.bind_nvswitches)
    return (UnbindVfio(addresses),) if addresses else ()


def _recycle(seen: Snapshot, record: Record | None) -> tuple[Step, ...]:
    """Restarts the ready DRA plugins whose view of the driver root is taken away by this run, by their labels (decision 14)."""
    labels = _labels_of_stale_plugins(seen)
    leaving = tuple(pod for pod in _stale_plugins(seen) if pod.selecting_keys & set(labels))
    if not leaving:
        return ()
    made = merged(record, _new_record(seen, labels=labels, is_cordoned=False))
    return (PauseNode(made, labels), FreePods(leaving=leaving), RestoreNode())


def _stale_plugins(seen: Snapshot) -> tuple[PodView, ...]:
    """Ready DRA plugins that keep the driver root that this run detaches."""
    plugins = (pod for pod in seen.pods if is_dra_plugin(pod) or pod.labels.get("app") in LAST_APPS)
    return tuple(pod for pod in plugins if pod.is_ready and not pod.is_terminating) if seen.host.mounts else ()


def _labels_of_stale_plugins(seen: Snapshot) -> dict[str, str]:
    """Labels of theirs alone: what other clients of the driver select too would take those away (R11)."""
    keys = {key for pod in _stale_plugins(seen) for key in pod.selecting_keys if key.startswith(DEPLOY_PREFIX)} - NEVER_PAUSED
    return {key: "true" for key in sorted(keys - {DEPLOY_CLIENT}) if seen.node.labels.get(key) == "true"}


def _plugin_notes(seen: Snapshot) -> tuple[str, ...]:
    """Plugins that no label takes off go on serving what they saw before, until somebody restarts them (N42)."""
    labels = set(_labels_of_stale_plugins(seen))
    return tuple(
        f"no DRA plugin newer than the driver: pod {pod.ref} keeps the driver root that this run detaches, and no label takes it off; "
        "delete the pod when the driver is up"
        for pod in _stale_plugins(seen)
        if not pod.selecting_keys & labels
    )


# The full way -------------------------------------------------------------------------------------------------------


def _cannot_unload(host: HostView) -> Plan | None:
    """The refusal of a kernel that keeps its modules (N27)."""
    match host.unloading:
        case Unloading.DISABLED:
            return _refused(
                "this kernel does not unload modules any more (kernel.modules_disabled is 1)",
                "reboot the node; until then the loaded driver stays", Exit.CANNOT_UNLOAD,
            )  # fmt: skip
        case Unloading.UNSUPPORTED:
            return _refused(
                "this kernel is built without module unloading", "a new driver needs a reboot into another kernel or image",
                Exit.CANNOT_UNLOAD,
            )  # fmt: skip
        case Unloading.NOT_PERMITTED:
            return _refused(
                "this process may not unload modules (CAP_SYS_MODULE is missing)",
                "run the container privileged, as the stock driver DaemonSet does", Exit.CANNOT_UNLOAD,
            )  # fmt: skip
        case Unloading.POSSIBLE:
            return None


def _plan_full(seen: Snapshot, settings: Settings, record: Record | None, unmark: tuple[Step, ...]) -> Plan:
    if seen.host.is_loaded and (plan := _cannot_unload(seen.host)) is not None:
        return plan
    order = unload_order(seen.host.modules, settings.unload_also)
    if order.unknown_holders:
        return _refused(_foreign_module(order.unknown_holders), _foreign_module_hint(order.unknown_holders), Exit.REFUSED)
    labels = labels_of(seen, settings, record)
    if labels.foreign:
        because = f"another tool has paused {', '.join(labels.foreign)}"
        return Plan(path=Path.WAIT, because=because, steps=(AwaitForeignPause(labels.foreign),))
    keep_off = choose_keep_off_of(seen, settings, record)
    policy = pod_policy(seen, settings, labels, keep_off)
    decided = verdicts(seen.pods, policy)
    may_drain = settings.enable_auto_drain and not seen.is_policy_owned
    drained = tuple(drain_verdict(pod, policy) for pod in seen.pods) if may_drain else ()
    common = Plan(
        path=Path.FULL,
        because=_why_full(seen.host, settings),
        verdicts=decided,
        drain_verdicts=drained,
        notes=(*_full_notes(seen, labels, keep_off), *_drain_notes(drained)),
        host_uses=host_uses_of(seen, settings),
    )
    if (refusal := _refusal_of_users(common, seen)) is not None:
        return refusal
    if waits := _waits(seen, decided):
        return replace(common, path=Path.WAIT, steps=waits)
    wants_cordon = not settings.no_cluster and not seen.is_policy_owned and (settings.enable_gpu_pod_eviction or settings.enable_auto_drain)
    made = merged(
        record,
        replace(
            _new_record(seen, labels=labels.all, is_cordoned=wants_cordon and not seen.node.unschedulable),
            taint=keep_off.taint,
            parked=_parks(decided),
            services=tuple(unit for unit in units_to_stop(common.host_uses) if seen.services.get(unit, True)),
        ),
    )
    stopped = units_to_stop(common.host_uses)
    freeing = _full_steps(settings, made, labels, decided, order.modules, stopped)
    return replace(common, steps=(*freeing, *unload_steps(seen, settings, made.services), *unmark, RestoreNode()))


def _full_steps(
    settings: Settings,
    record: Record,
    labels: LabelsToPause,
    decided: Sequence[Verdict],
    modules: tuple[str, ...],
    units: tuple[str, ...],
) -> tuple[Step, ...]:
    """From the first question to the moment when nobody uses the driver."""
    last = [each for each in decided if each.is_last]
    first = [each for each in decided if not each.is_last]
    evict = pods_to_evict(decided)
    free = FreePods((*pods_to_evict(first), *pods_ending(first)), pods_to(Action.AWAIT, first))
    pause_last = PauseLast(labels.last, pods_to(Action.AWAIT, last), (*pods_to_evict(last), *pods_ending(last)))
    return (
        *((TryEvictions(evict),) if evict else ()),
        PauseNode(record, labels.first),
        *(() if settings.no_cluster else (free,)),
        *((ProveNoClaims(), pause_last) if labels.last or last else ()),
        *((StopServices(units),) if units else ()),
        AwaitReleased(modules),
        LookAgain(),
        BeginUnload(),
    )


def unload_steps(seen: Snapshot, settings: Settings, services: tuple[str, ...] = ()) -> tuple[Step, ...]:
    """What is done to the host once nobody uses the driver; made anew from the last look right before the first of them.

    Raises:
        Refused: a module of somebody else's holds the driver by now.
    """
    host = seen.host
    order = unload_order(host.modules, settings.unload_also)
    if order.unknown_holders:
        raise Refused(_foreign_module(order.unknown_holders), hint=_foreign_module_hint(order.unknown_holders))
    return (
        RemoveFiles((f"/{STATE_FILE}", *(f"/{VALIDATIONS}/{name}" for name in READY_MARKERS))),  # operands may still have made some
        *(UnloadModule(name) for name in order.modules),
        *_unmounts(host, is_detach_at_once=False),
        *_pid_file(host),
        *((UnloadModule(NOUVEAU),) if NOUVEAU in host.modules else ()),
        *unbind_steps(seen, settings),
        *_network_driver(host, settings),
        *((StartServices(start_order(services)),) if services else ()),
        ProveFree(with_modules=True, is_closed=True),
    )


def _foreign_module(names: tuple[str, ...]) -> str:
    return f"the module {', '.join(names)} uses the driver and is none of NVIDIA's"


def _foreign_module_hint(names: tuple[str, ...]) -> str:
    return f"unload it by hand, or set UNLOAD_ALSO={','.join(names)}"


def _drain_notes(drained: Sequence[Verdict]) -> tuple[str, ...]:
    refused = [each for each in drained if each.action is Action.REFUSE]
    return tuple(f"a drain of the node would leave pod {each.pod.ref}, which {each.sentence} ({each.setting})" for each in refused)


def _refusal_of_users(plan: Plan, seen: Snapshot) -> Plan | None:
    """The refusal that names every user of the driver who may not be moved; None where there is none."""
    pods = [each for each in plan.verdicts if each.action is Action.REFUSE]
    left = [
        each for each in plan.host_uses if each.action is HostAction.REPORT or (each.action is HostAction.STOP and seen.services_trouble)
    ]
    if not pods and not left:
        return None
    lines = [f"pod {each.pod.ref} {each.sentence} ({each.reason}; {each.setting})" for each in pods]
    lines += [f"{each.words}; {_why_left(each, seen)} ({each.setting})" for each in left]
    hint = "; ".join(dict.fromkeys([each.setting for each in pods] + [each.setting for each in left]))
    who = [counted(pods)] if pods else []
    who += [f"{len(left)} process{'' if len(left) == 1 else 'es'} of the host"] if left else []
    because = f"{' and '.join(who)} using the driver may not be moved"
    return replace(plan, path=Path.REFUSED, because=because, refusals=tuple(lines), hint=hint, ends_with=Exit.REFUSED)


def _why_left(use: HostUse, seen: Snapshot) -> str:
    return use.sentence if use.action is HostAction.REPORT else f"its unit cannot be stopped: {seen.services_trouble}"


def _waits(seen: Snapshot, decided: Sequence[Verdict]) -> tuple[Step, ...]:
    """Who has to go before anything is changed."""
    left = pods_to(Action.LEAVE, decided)
    others = other_drivers(seen)
    rolling = sorted(seen.means.rolling.intersection(_parks(decided)))
    return (
        *((AwaitPolicyOwner(left),) if left else ()),
        *((AwaitOtherDriver(others),) if others else ()),
        *((AwaitRollingUpdate(tuple(rolling)),) if rolling else ()),
    )


def _parks(decided: Sequence[Verdict]) -> tuple[str, ...]:
    """`namespace/name` of the DaemonSets that are parked."""
    return tuple(sorted({each.pod.owner_ref for each in decided if each.action is Action.PARK}))


def _full_notes(seen: Snapshot, labels: LabelsToPause, keep_off: KeepOff) -> tuple[str, ...]:
    notes = [keep_off.because]
    if seen.is_policy_owned:
        notes.append(f"the annotation {UPGRADE_ENABLED}=true makes an upgrade controller the owner of cordon and GPU pod eviction here")
    notes += [
        f"label {key} was paused by a program that left no record: {labels.all[key]!r} is a guess of its value before"
        for key in labels.guessed
    ]
    if not seen.host.sees_all_processes:
        notes.append("the processes of the host are not visible (hostPID is off): holders outside this pod go unseen")
    return tuple(notes)


def _new_record(seen: Snapshot, *, labels: Mapping[str, str], is_cordoned: bool) -> Record:
    return Record(
        run=seen.run,
        node_uid=seen.node.uid,
        boot_id=seen.host.boot_id,
        started=seen.started,
        pod=seen.identity,
        labels=labels,
        is_cordoned=is_cordoned,
    )


# Parts that several ways share --------------------------------------------------------------------------------------


def _files_there(host: HostView) -> tuple[Step, ...]:
    """The state file and the ready markers that are there, on a way that nobody can make them on meanwhile."""
    paths = [f"/{STATE_FILE}"] if host.state_digest is not None else []
    paths += [f"/{VALIDATIONS}/{name}" for name in host.markers]
    return (RemoveFiles(tuple(paths)),) if paths else ()


def _unmounts(host: HostView, *, is_detach_at_once: bool) -> tuple[Step, ...]:
    """One step for each mount, the last mounted first: so deeper ones and the tops of stacks come before what they cover."""
    return tuple(Unmount(mount, is_detach_at_once) for mount in reversed(host.mounts))


def _pid_file(host: HostView) -> tuple[Step, ...]:
    return (RemovePidFile(),) if host.has_pid_file else ()


def _network_driver(host: HostView, settings: Settings) -> tuple[Step, ...]:
    """GPU pods that use RDMA need the network driver up before the new GPU driver loads; after the unload (N26)."""
    if settings.gpu_direct_rdma_enabled and any(each.vendor == MELLANOX for each in host.pci):
        return (AwaitNetworkDriver(settings.use_host_mofed),)
    return ()


def needed_permissions(plan: Plan) -> tuple[Need, ...]:
    """Verb, group and resource of everything that the plan's steps need."""
    needs: list[Need] = []
    for step in (*plan.steps, *plan.on_failure):
        match step:
            case PauseNode() | PauseLast() | BeginUnload() | RestoreNode() | MarkHostDriver() | UnmarkHostDriver():
                needs.append(PATCH_NODE)
            case AwaitPolicyOwner():
                needs += [PATCH_NODE, WATCH_PODS]
            case TryEvictions():
                needs.append(EVICT)
            case AwaitReleased() if plan.drain_verdicts:
                needs += [EVICT, WATCH_PODS]
            case ProveNoClaims():
                needs += [GET_CLAIM, WATCH_PODS]
            case FreePods() | AwaitOtherDriver():
                needs.append(WATCH_PODS)
            case _:
                pass
    return tuple(dict.fromkeys(needs))
