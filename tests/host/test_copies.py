"""Copies of the driver's mounts in the mount namespaces of others, on a tree; tests/vm/test_mounts.py has the kernel's own."""

from __future__ import annotations

from driver_manager.core.snapshot import MountCopy, MountView
from driver_manager.host import LinuxHost

from .trees import Tree

ROOT = "/run/nvidia/driver"
UID = "3f1c2f6e-8a3b-4a55-9a3c-0d6d3c1a9f10"
POD = f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UID.replace('-', '_')}.slice/cri-containerd-1.scope\n"


def contained(tree: Tree, pid: int, namespace: int, mounts: str, *, cgroup: str = POD, comm: str = "train") -> None:
    """A process in a mount namespace with these mounts."""
    tree.process(pid, cgroup=cgroup, comm=comm)
    tree.link(f"proc/{pid}/ns/mnt", f"mnt:[{namespace}]")
    tree.file(f"proc/{pid}/mountinfo", f"21 1 8:1 / / rw - ext4 /dev/sda1 rw\n{mounts}")


async def unmounted(tree: Tree, host: LinuxHost) -> tuple[MountView, ...]:
    """The driver root, after it was unmounted on the host."""
    tree.mounts(ROOT)
    tree.link("proc/1/ns/mnt", "mnt:[1]")
    mounts = (await host.look()).mounts
    await host.unmount(mounts[0], detach=False, timeout=5)
    return mounts


async def test_a_copy_is_named_with_its_pod_or_unit(tree: Tree, host: LinuxHost) -> None:
    """The whole root or a folder of it, wherever it is mounted there; one process of each namespace is named; others are not."""
    mounts = await unmounted(tree, host)
    contained(tree, 500, 7, f"40 21 0:40 / {ROOT} rw - overlay overlay rw\n")
    contained(tree, 501, 7, f"40 21 0:40 / {ROOT} rw - overlay overlay rw\n", comm="its-child")
    contained(tree, 600, 8, "41 21 0:40 /usr/lib /opt/lib rw - overlay overlay rw\n", cgroup="0::/system.slice/dcgm.service\n", comm="dcgm")
    contained(tree, 700, 9, f"40 21 0:41 / {ROOT} rw - overlay overlay rw\n", comm="of-a-newer-driver")
    contained(tree, 800, 1, "", comm="on-the-host")
    assert await host.mount_copies(mounts) == (
        MountCopy(pid=500, command="train", target=ROOT, pod_uid=UID),
        MountCopy(pid=600, command="dcgm", target="/opt/lib", unit="dcgm.service"),
    )


async def test_what_the_host_has_elsewhere_is_no_copy(tree: Tree, host: LinuxHost) -> None:
    """A driver root that was a folder of the host's own filesystem shows everywhere; that says nothing about the old driver."""
    mounts = await unmounted(tree, host)
    tree.file("proc/1/mountinfo", "21 1 8:1 / / rw - ext4 /dev/sda1 rw\n22 21 0:40 / /var/lib rw - overlay overlay rw\n")
    contained(tree, 500, 7, f"40 21 0:40 / {ROOT} rw - overlay overlay rw\n")
    assert await host.mount_copies(mounts) == ()


async def test_folders_of_the_hosts_own_filesystems_are_no_copies(tree: Tree, host: LinuxHost) -> None:
    """A driver container that binds its whole root shows /run and /var/log of the host too; pods with the same folders keep nothing old."""
    tree.link("proc/1/ns/mnt", "mnt:[1]")
    on_host = "21 1 8:1 / / rw - ext4 /dev/sda1 rw\n22 21 0:24 / /run rw - tmpfs tmpfs rw\n"
    below = f"41 40 0:24 /nvidia {ROOT}/run/nvidia rw - tmpfs tmpfs rw\n42 40 8:1 /var/log {ROOT}/var/log rw - ext4 /dev/sda1 rw\n"
    tree.file("proc/1/mountinfo", f"{on_host}40 22 0:40 / {ROOT} rw - overlay overlay rw\n{below}")
    mounts = (await host.look()).mounts
    tree.file("proc/1/mountinfo", on_host)
    contained(tree, 500, 7, "22 21 0:24 /nvidia/validations /run/nvidia/validations rw - tmpfs tmpfs rw\n", comm="dcgm-exporter")
    contained(tree, 600, 8, "22 21 8:1 /var/log /var/log rw - ext4 /dev/sda1 rw\n", comm="fluent-bit")
    assert len(mounts) == 3
    assert await host.mount_copies(mounts) == ()


async def test_a_name_with_a_form_feed_hides_no_copy(tree: Tree, host: LinuxHost) -> None:
    """A newline alone ends a line of mountinfo."""
    mounts = await unmounted(tree, host)
    contained(tree, 500, 7, "40 21 0:40 / /opt/a\x0cb rw - overlay overlay rw\n")
    assert [copy.target for copy in await host.mount_copies(mounts)] == ["/opt/a\x0cb"]
