"""What the kernel's refusals mean, in one table: for each call and errno a sentence, what to do next, and which error it becomes.

The sentences rest on what kernels 6.1 and 6.12 were seen to answer and on delete_module(2), umount2(2) and
Documentation/driver-api/driver-model. Some refusals mean different things in different states; the state is then part of the key.
"""

import errno
from dataclasses import dataclass
from typing import Final

from driver_manager.errors import HostError, ModuleInUse, MountBusy


@dataclass(frozen=True, slots=True)
class Meaning:
    """What one refusal means. `{0}` in the texts stands for the module or path."""

    sentence: str
    hint: str
    error: type[HostError] = HostError


_REBOOT = "Reboot the node: nothing else takes this back."

MEANINGS: Final[dict[tuple[str, int, str], Meaning]] = {
    ("delete_module", errno.EAGAIN, ""): Meaning(
        "module {0} is in use",
        "Something has its device open or mapped, or a module depends on it. `plan` shows who; a descriptor on its way "
        "between two processes shows nowhere and goes when they end.",
        ModuleInUse,
    ),
    ("delete_module", errno.EBUSY, "coming"): Meaning(
        "module {0} is still being loaded", "Wait until whoever loads it is done, then try again.", ModuleInUse
    ),
    ("delete_module", errno.EBUSY, "going"): Meaning(
        "module {0} is already being removed by somebody else", f"If it stays so, its exit function hangs. {_REBOOT}"
    ),
    ("delete_module", errno.EBUSY, ""): Meaning("module {0} cannot be removed: it has no exit function, or is not live", _REBOOT),
    ("delete_module", errno.EINTR, ""): Meaning(
        "the removal of module {0} was broken off", "Find out what kills processes here: dmesg shows it where memory is short.", ModuleInUse
    ),
    ("delete_module", errno.EPERM, "disabled"): Meaning(
        "this kernel removes no module any more: the sysctl kernel.modules_disabled is 1", _REBOOT
    ),
    ("delete_module", errno.EPERM, ""): Meaning(
        "this process may not remove module {0}: it lacks CAP_SYS_MODULE",
        "Run privileged; under systemd without ProtectKernelModules.",
    ),
    ("delete_module", errno.ENOSYS, ""): Meaning(
        "this kernel cannot remove module {0}: it is built without module unloading",
        "Install the other driver so that it is used from the next boot on, and reboot the node.",
    ),
    ("umount2", errno.EBUSY, ""): Meaning(
        "{0} is busy: something works below it, or a copy of it lives in a container",
        "End those processes, or allow the mount to be detached.",
        MountBusy,
    ),
    ("umount2", errno.EBUSY, "children"): Meaning(
        "{0} is busy: other mounts lie below it", "They have to go first, deepest first.", MountBusy
    ),
    ("umount2", errno.EPERM, ""): Meaning(
        "this process may not unmount {0}: it lacks CAP_SYS_ADMIN, or the mount came locked from another namespace",
        "Run privileged.",
    ),
    ("umount2", errno.EINVAL, ""): Meaning(
        "{0} is a mount on the host and none for this process",
        "Mount /run/nvidia with mountPropagation Bidirectional, from a shared mount of the host.",
    ),
    ("umount2", errno.ENOENT, ""): Meaning(
        "{0} is a mount on the host and does not exist for this process", "Mount the host's /run/nvidia at /run/nvidia."
    ),
    ("unlink", errno.EROFS, ""): Meaning("{0} cannot be removed: its filesystem is read-only", "Mount the host's /run/nvidia writable."),
    ("unlink", errno.EISDIR, ""): Meaning("{0} is a folder where a file belongs", "Look at what made it; remove it."),
    ("write", errno.ENODEV, ""): Meaning(
        "{0} takes no such device: the driver does not know it, or it is not bound there", "Look at the device again."
    ),
    ("write", errno.EBUSY, ""): Meaning("{0}: the device already has a driver", "Unbind it first."),
    ("write", errno.EINVAL, ""): Meaning(
        "{0}: the kernel refuses the value", "For vfio-pci: switch the IOMMU on; without one there is no IOMMU group."
    ),
    ("kill", errno.EPERM, ""): Meaning("process {0} may not be signalled", "Run privileged."),
}


def error_of(call: str, number: int, subject: str, *, state: str = "", more: str = "") -> HostError:
    """Makes the error for a refused call.

    Args:
        call: name of the system call.
        number: its errno.
        subject: module name or path.
        state: what tells two meanings of one errno apart, where something does.
        more: facts to add to the sentence.
    """
    name = errno.errorcode.get(number, str(number))
    meaning = MEANINGS.get((call, number, state)) or MEANINGS.get((call, number, ""))
    if meaning is None:
        meaning = Meaning(f"{call} of {{0}} failed", "Look at the kernel's log (dmesg) for the reason.")
    sentence = meaning.sentence.format(subject) + (f" ({more})" if more else "")
    return meaning.error(f"{sentence} [{call}: {name}]", hint=meaning.hint, errno_name=name)
