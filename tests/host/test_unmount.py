from __future__ import annotations

import pytest

from driver_manager.core.snapshot import MountView
from driver_manager.errors import HostError, InvariantBroken, MountBusy
from driver_manager.host import LinuxHost
from driver_manager.host.paths import tree_roots
from driver_manager.host.tree import TreeCalls
from driver_manager.ports import Clock

from .trees import Tree

ROOT = "/run/nvidia/driver"


async def mounts_of(host: LinuxHost) -> tuple[MountView, ...]:
    return (await host.look()).mounts


async def test_only_mounts_of_the_driver_root_are_seen(tree: Tree, host: LinuxHost) -> None:
    """A folder whose name begins the same is another one, and escapes are undone."""
    tree.mounts(ROOT, ROOT + "/sub\\040dir", "/run/nvidia/driver-old", "/run/nvidia")
    assert [mount.target for mount in await mounts_of(host)] == [ROOT, ROOT + "/sub dir"]


async def test_stacked_mounts_go_one_by_one(tree: Tree, host: LinuxHost) -> None:
    """Each call takes the top layer, of process 1's and of our own mountinfo."""
    tree.mounts(ROOT, ROOT)
    for mount in reversed(await mounts_of(host)):
        await host.unmount(mount, detach=False, timeout=5)
    assert tree.targets("1") == tree.targets("self") == []
    assert tree.results() == [("umount2", ROOT, 0)] * 2


async def test_a_mount_with_others_below_is_busy(tree: Tree, host: LinuxHost) -> None:
    """The error names what lies below."""
    tree.mounts(ROOT, ROOT + "/sys")
    with pytest.raises(MountBusy, match="/run/nvidia/driver/sys"):
        await host.unmount((await mounts_of(host))[0], detach=False, timeout=5)
    assert len(tree.targets()) == 2


async def test_a_detached_mount_takes_all_below_with_it(tree: Tree, host: LinuxHost) -> None:
    """MNT_DETACH on the top takes the whole tree of mounts, and no layer below the top."""
    tree.mounts(ROOT, ROOT, ROOT + "/sys", "/other")
    view = await mounts_of(host)
    await host.unmount(view[1], detach=True, timeout=5)
    assert tree.targets() == [ROOT]
    assert tree.calls()[0]["arguments"][1] & 2


@pytest.mark.parametrize("where", ["fd", "cwd", "root", "maps"])
async def test_a_process_below_keeps_a_mount_busy(tree: Tree, host: LinuxHost, where: str) -> None:
    """An open file, a mapping, a working folder or a root below is EBUSY, and the process is named."""
    tree.mounts(ROOT)
    path = ROOT + "/usr/bin/nvidia-persistenced"
    tree.process(4711, comm="persistenced", maps=f"7f00-7f01 r-xp 0 00:2b 7 {path}\n" if where == "maps" else "")
    if where != "maps":
        tree.link(f"proc/4711/{where}{'/3' if where == 'fd' else ''}", path)
    mount = (await mounts_of(host))[0]
    with pytest.raises(MountBusy, match=r"persistenced \(4711\)"):
        await host.unmount(mount, detach=False, timeout=5)
    await host.unmount(mount, detach=True, timeout=5)
    assert tree.targets() == []


async def test_a_mount_that_is_gone_is_fine(tree: Tree, host: LinuxHost) -> None:
    """Nothing is called for a mount that is not there any more, not even if another lies in its place."""
    tree.mounts(ROOT)
    old = (await mounts_of(host))[0]
    text = (tree.root / "proc/1/mountinfo").read_text().replace("30 21", "77 21")
    tree.file("proc/1/mountinfo", text)
    await host.unmount(old, detach=True, timeout=5)
    assert tree.targets() == [ROOT]
    assert tree.calls() == []


async def test_an_unmount_that_only_worked_here_is_an_error(tree: Tree, clock: Clock) -> None:
    """Success in our own namespace proves nothing: the host's view is read again."""

    class OnlyHere(TreeCalls):
        async def umount2(self, path: str, flags: int, timeout: float) -> None:
            """Says yes and leaves the host's mount, as an unmount in a private namespace does."""

    tree.mounts(ROOT)
    host = LinuxHost(tree_roots(tree.root), OnlyHere(tree.root), clock)
    with pytest.raises(HostError, match="the host still has it"):
        await host.unmount((await mounts_of(host))[0], detach=True, timeout=5)


async def test_a_mount_elsewhere_is_never_touched(tree: Tree, host: LinuxHost) -> None:
    """Only the driver root and what lies below may be unmounted."""
    with pytest.raises(InvariantBroken):
        await host.unmount(MountView(mount_id=1, target="/var/lib/kubelet"), detach=True, timeout=5)
    assert tree.calls() == []


async def test_a_mount_that_only_the_host_has_is_explained(tree: Tree, host: LinuxHost) -> None:
    """EINVAL for what the host still shows means that /run/nvidia does not go through to it."""
    tree.mounts(ROOT)
    tree.faults({"call": "umount2", "argument": ROOT, "errno": "EINVAL"})
    with pytest.raises(HostError, match="none for this process") as caught:
        await host.unmount((await mounts_of(host))[0], detach=False, timeout=5)
    assert "Bidirectional" in caught.value.hint
