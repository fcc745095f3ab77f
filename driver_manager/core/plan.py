"""Steps and plans: what the agent does, as values.

A plan is short and ends with a look: after evictions the agent observes again and asks the planner anew rather than trust a long list.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from driver_manager.core.consumers import Verdict
from driver_manager.core.record import Record
from driver_manager.core.services import HostUse
from driver_manager.core.snapshot import MountView, PodView
from driver_manager.errors import Exit


class Path(StrEnum):
    """Which way a run goes."""

    HOST_DRIVER = "host-driver"
    REFUSED = "refused"
    WAIT = "wait"
    """For somebody else, before anything is changed; then look again from the start."""
    UNDO = "undo"
    """Take back what a run of another boot left; then look again from the start."""
    NOTHING_LOADED = "nothing-loaded"
    UNCHANGED = "unchanged"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class MarkHostDriver:
    """Say on the node that its driver belongs to the host."""

    previous: str | None
    version: str


@dataclass(frozen=True, slots=True)
class UnmarkHostDriver:
    """Take our mark of a host driver back: there is none any more."""

    previous: str | None


@dataclass(frozen=True, slots=True)
class AwaitForeignPause:
    """Wait until another tool's pause of an operand ends."""

    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AwaitPolicyOwner:
    """Ask the upgrade controller for this node, once, and wait until it has freed it of GPU pods."""

    pods: tuple[PodView, ...]


@dataclass(frozen=True, slots=True)
class AwaitOtherDriver:
    """Wait until another driver's pod on this node is gone (R2)."""

    pods: tuple[PodView, ...]


@dataclass(frozen=True, slots=True)
class AwaitRollingUpdate:
    """Wait until DaemonSets that have to be parked have finished their rolling updates, which could not go on meanwhile (decision 45)."""

    owners: tuple[str, ...]
    """`namespace/name`."""


@dataclass(frozen=True, slots=True)
class TryEvictions:
    """Ask the server whether each pod could go, changing nothing."""

    pods: tuple[PodView, ...]


@dataclass(frozen=True, slots=True)
class PauseNode:
    """One guarded patch: pause labels, cordon, taint, parks, record."""

    record: Record
    labels: Mapping[str, str]
    """The labels that are paused now; others in the record come later."""


@dataclass(frozen=True, slots=True)
class FreePods:
    """Evict pods, and wait until they and others that go by themselves are out of the API."""

    evict: tuple[PodView, ...] = ()
    leaving: tuple[PodView, ...] = ()


@dataclass(frozen=True, slots=True)
class ProveNoClaims:
    """Look, by a fresh list, that no pod holds a device through the DRA plugin any more; who does is freed first."""


@dataclass(frozen=True, slots=True)
class PauseLast:
    """Pause or evict what had to wait for the pods it serves, and wait until it is gone."""

    labels: Mapping[str, str]
    pods: tuple[PodView, ...] = ()
    evict: tuple[PodView, ...] = ()


@dataclass(frozen=True, slots=True)
class StopServices:
    """Stop units of the host that hold a GPU; the record on the node holds them already."""

    units: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StartServices:
    """Start what was stopped, before the last look: one that loads the driver again must not go unseen."""

    units: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AwaitReleased:
    """Wait until no process has a GPU device open and no module has users of its own."""

    modules: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LookAgain:
    """Observe pods, processes and node anew; whoever came meanwhile is another round (R1)."""


@dataclass(frozen=True, slots=True)
class BeginUnload:
    """One guarded patch: the record says that the driver is being taken apart; what was taken off the node is put on once more."""


@dataclass(frozen=True, slots=True)
class RemoveFiles:
    """Remove files that speak of the driver that goes."""

    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UnloadModule:
    """Take one module out of the kernel."""

    name: str


@dataclass(frozen=True, slots=True)
class Unmount:
    """Take one mount away."""

    mount: MountView
    is_detach_at_once: bool
    """Detach without trying a plain unmount first."""


@dataclass(frozen=True, slots=True)
class UnbindVfio:
    """Take GPUs, with their companions, off vfio and leave them free for the driver that comes."""

    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RemovePidFile:
    """Remove the driver container's pid file, if nobody holds its lock."""


@dataclass(frozen=True, slots=True)
class AwaitNetworkDriver:
    """Wait until the network driver is up."""

    is_host: bool


@dataclass(frozen=True, slots=True)
class ProveFree:
    """Look whether the host is free for a driver, as the last thing before the node is opened (R4)."""

    with_modules: bool
    """Whether the driver's modules have to be gone as well."""
    is_closed: bool = False
    """Whether the node is closed to users of the driver, so that modules that came back may be unloaded once more."""


@dataclass(frozen=True, slots=True)
class RestoreNode:
    """One guarded patch that takes back all that the record holds, then a fresh read that proves it."""


Step = (
    MarkHostDriver
    | UnmarkHostDriver
    | AwaitForeignPause
    | AwaitPolicyOwner
    | AwaitOtherDriver
    | AwaitRollingUpdate
    | TryEvictions
    | PauseNode
    | FreePods
    | ProveNoClaims
    | PauseLast
    | StopServices
    | StartServices
    | AwaitReleased
    | LookAgain
    | BeginUnload
    | RemoveFiles
    | UnloadModule
    | Unmount
    | UnbindVfio
    | RemovePidFile
    | AwaitNetworkDriver
    | ProveFree
    | RestoreNode
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run does, and why."""

    path: Path
    because: str
    steps: tuple[Step, ...] = ()
    on_failure: tuple[Step, ...] = ()
    """The executor runs these in one place when a step fails, and on SIGTERM."""
    verdicts: tuple[Verdict, ...] = ()
    drain_verdicts: tuple[Verdict, ...] = ()
    """What a drain of the whole node would do, where it is switched on."""
    host_uses: tuple[HostUse, ...] = ()
    """What is done about the host's own processes that hold a GPU."""
    notes: tuple[str, ...] = ()
    """What a person should know besides."""
    refusals: tuple[str, ...] = ()
    hint: str = ""
    ends_with: Exit = Exit.DONE
    """The exit code when all steps have succeeded."""
    record: Record | None = field(default=None)
    """The record that the node carries now, if any."""


def describe(step: Step) -> str:
    """One line for people."""
    match step:
        case MarkHostDriver(version=version):
            return f"mark the node: the driver {version} belongs to the host"
        case UnmarkHostDriver():
            return "take the host driver mark off the node"
        case AwaitForeignPause(labels):
            return f"wait until another tool ends its pause of {', '.join(labels)}"
        case AwaitPolicyOwner(pods):
            return f"ask the upgrade controller to free the node, and wait for {named(pods)}"
        case AwaitOtherDriver(pods):
            return f"wait for the other driver on this node: {named(pods)}"
        case AwaitRollingUpdate(owners):
            return f"wait until the rolling update of {', '.join(owners)} is finished"
        case TryEvictions(pods):
            return f"ask whether {counted(pods)} may be evicted"
        case PauseNode(record=record, labels=labels) if not (labels or record.is_cordoned or record.taint or record.parked):
            return "write down what is going to be changed"
        case PauseNode(record=record, labels=labels):
            more = (", cordon", record.is_cordoned), (", taint", record.taint), (f", park {', '.join(record.parked)}", record.parked)
            return f"pause {counted(labels, 'operand')}{''.join(words for words, is_so in more if is_so)}"
        case FreePods(evict=evict, leaving=leaving):
            return f"evict {counted(evict)} and wait until they and {counted(leaving, 'other')} are gone"
        case ProveNoClaims():
            return "make sure that no pod holds a claim"
        case PauseLast(labels=labels, evict=evict):
            what = [*(f"pause {key}" for key in labels), *(f"evict {pod.ref}" for pod in evict)]
            return f"{' and '.join(what)}, and wait until it is gone"
        case StopServices(units):
            return f"stop {', '.join(units)}"
        case StartServices(units):
            return f"start {', '.join(units)} again"
        case AwaitReleased():
            return "wait until no process holds a GPU"
        case LookAgain():
            return "look again"
        case BeginUnload():
            return "write down that the driver is being unloaded"
        case RemoveFiles(paths):
            return f"remove {', '.join(paths)}"
        case UnloadModule(name):
            return f"unload {name}"
        case Unmount(mount=mount):
            return f"unmount {mount.target}"
        case UnbindVfio(addresses):
            return f"unbind {', '.join(addresses)} from vfio"
        case RemovePidFile():
            return "remove the driver's pid file"
        case AwaitNetworkDriver(is_host=is_host):
            return f"wait for the {'host' if is_host else 'containerised'} network driver"
        case ProveFree():
            return "look whether the host is free"
        case RestoreNode():
            return "put the node back"


def named(pods: tuple[PodView, ...], limit: int = 5) -> str:
    """Pods by name, the first few and a count."""
    shown = ", ".join(pod.ref for pod in pods[:limit])
    return shown + (f" and {len(pods) - limit} more" if len(pods) > limit else "")


def counted(things: Collection[object], noun: str = "pod") -> str:
    """How many there are: `1 pod`, `2 pods`."""
    return f"{len(things)} {noun}" + ("" if len(things) == 1 else "s")
