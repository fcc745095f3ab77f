"""What the kernel does with mounts that are to go, and what the host makes of it."""

from __future__ import annotations

import os
from pathlib import Path

from driver_manager.core.snapshot import MountView
from driver_manager.errors import HostError, MountBusy
from tests.vm.guest import in_guest
from tests.vm.inside import (
    CLONE_NEWNS,
    DRIVER_ROOT,
    MNT_DETACH,
    MS_PRIVATE,
    MS_SHARED,
    MS_SLAVE,
    UMOUNT_NOFOLLOW,
    answer,
    here,
    holding,
    libc,
    mounts_of,
    propagate,
    targets,
    tmpfs,
    umount,
)


async def refusal(mount: MountView, *, detach: bool = False) -> HostError:
    """The error that an unmount ends in."""
    try:
        await here().unmount(mount, detach=detach, timeout=10)
    except HostError as error:
        return error
    raise AssertionError(f"{mount.target} was unmounted")


def in_copy(flags: int) -> None:
    """Moves this process into a copy of the mounts, as a container's is."""
    assert answer(libc.unshare(CLONE_NEWNS)) == 0
    assert propagate("/", flags) == 0


def raw(answers: list[int | str]) -> list[int | str]:
    """Only so that a failure shows them."""
    return answers


@in_guest
async def test_stacked_and_nested_mounts_all_go() -> None:
    """One after the other, deepest and topmost first, spaces in names included; nothing outside is touched."""
    tmpfs("/run/nvidia/other")
    tmpfs(DRIVER_ROOT)
    tmpfs(DRIVER_ROOT)
    tmpfs(f"{DRIVER_ROOT}/sub dir")
    tmpfs(f"{DRIVER_ROOT}/sub dir/deep")
    tmpfs(f"{DRIVER_ROOT}/sub dir/deep")
    tmpfs(f"{DRIVER_ROOT}/\\040x")
    host = here()
    view = await host.look()
    assert len(view.mounts) == 6
    assert not view.notes
    for mount in mounts_of(view):
        await host.unmount(mount, detach=False, timeout=10)
    assert targets() == []
    assert os.path.ismount("/run/nvidia/other")


@in_guest
async def test_what_the_kernel_answers() -> None:
    """The answers that decisions rest on: children, one unmount too many, no mount, no such path, links."""
    tmpfs(DRIVER_ROOT)
    tmpfs(f"{DRIVER_ROOT}/a")
    assert raw([umount(DRIVER_ROOT), umount(f"{DRIVER_ROOT}/a"), umount(DRIVER_ROOT), umount(DRIVER_ROOT)]) == ["EBUSY", 0, 0, "EINVAL"]
    assert raw([umount("/run/nvidia"), umount("/nowhere")]) == ["EINVAL", "ENOENT"]
    tmpfs(DRIVER_ROOT)
    Path("/tmp/link").symlink_to(DRIVER_ROOT)
    assert raw([umount("/tmp/link", UMOUNT_NOFOLLOW), umount("/tmp/link")]) == ["EINVAL", 0]


@in_guest
async def test_mounts_below_are_named() -> None:
    """A mount with others below it stays, and they are named."""
    tmpfs(DRIVER_ROOT)
    tmpfs(f"{DRIVER_ROOT}/a")
    outer = (await here().look()).mounts[0]
    error = await refusal(outer)
    assert isinstance(error, MountBusy)
    assert f"{DRIVER_ROOT}/a" in error.message
    assert len(targets()) == 2


async def named_as_user(mount: MountView, pid: int) -> None:
    """The mount is busy, and its user is named."""
    error = await refusal(mount)
    assert isinstance(error, MountBusy)
    assert f"({pid})" in error.message, error.message


@in_guest
async def test_each_kind_of_user_is_named() -> None:
    """An open file, a mapping without a descriptor, a working folder, a root: each keeps the mount and is named."""
    tmpfs(DRIVER_ROOT)
    (mount,) = (await here().look()).mounts
    file = Path(DRIVER_ROOT) / "file"
    file.write_bytes(b"x" * 4096)

    def mapping() -> None:
        import ctypes

        descriptor = os.open(file, os.O_RDONLY)
        assert libc.mmap(None, ctypes.c_size_t(4096), 1, 2, descriptor, ctypes.c_long(0)) > 0
        os.close(descriptor)

    for work in (lambda: os.open(file, os.O_RDONLY), mapping, lambda: os.chdir(DRIVER_ROOT), lambda: os.chroot(DRIVER_ROOT)):
        with holding(work) as pid:
            await named_as_user(mount, pid)
    await here().unmount(mount, detach=False, timeout=10)
    assert targets() == []


@in_guest
async def test_a_detached_tree_is_gone_at_once() -> None:
    """Its users live on with what they had; a new driver can be mounted there."""
    tmpfs(DRIVER_ROOT)
    tmpfs(f"{DRIVER_ROOT}/a")
    with holding(lambda: os.chdir(f"{DRIVER_ROOT}/a")):
        for mount in mounts_of(await here().look()):
            await here().unmount(mount, detach=True, timeout=10)
        assert targets() == []
        tmpfs(DRIVER_ROOT)
        assert targets() == [DRIVER_ROOT]


@in_guest
async def test_a_stale_view_is_fine() -> None:
    """A mount that somebody else took away meanwhile counts as gone, and one that came later is not touched."""
    tmpfs(DRIVER_ROOT)
    (mount,) = (await here().look()).mounts
    assert umount(DRIVER_ROOT) == 0
    await here().unmount(mount, detach=False, timeout=10)
    tmpfs(DRIVER_ROOT)
    (newer,) = (await here().look()).mounts
    assert newer.mount_id != mount.mount_id or newer == mount  # the kernel may give a number again


@in_guest
async def test_a_private_copy_stays_in_its_container() -> None:
    """The host's unmount works and the copy in another namespace lives on: success says nothing about copies."""
    tmpfs(DRIVER_ROOT)
    with holding(lambda: in_copy(MS_PRIVATE)) as pid:
        (mount,) = (await here().look()).mounts
        await here().unmount(mount, detach=False, timeout=10)
        assert (targets(), targets(pid)) == ([], [DRIVER_ROOT])


@in_guest
async def test_a_slave_copy_in_use_makes_the_host_busy_or_goes() -> None:
    """A copy that follows the host goes with it, unless somebody works in it: then the mount is busy."""
    tmpfs("/run")
    propagate("/run", MS_SHARED)
    tmpfs(DRIVER_ROOT)
    with holding(lambda: in_copy(MS_SLAVE)) as pid:
        (mount,) = (await here().look()).mounts
        await here().unmount(mount, detach=False, timeout=10)
        assert (targets(), targets(pid)) == ([], [])


@in_guest
async def test_an_unmount_that_does_not_reach_the_host_is_told() -> None:
    """Inside a container whose mounts do not go through, umount2 gives 0 and the host keeps the mount: it is read back and said."""
    tmpfs(DRIVER_ROOT)
    (mount,) = (await here().look()).mounts
    in_copy(MS_PRIVATE)  # from here on this process is the container; /proc/1 is the host
    error = await refusal(mount)
    assert "still has it" in error.message
    assert (targets(), targets(1)) == ([], [DRIVER_ROOT])


@in_guest
def test_detaching_takes_all_below() -> None:
    """MNT_DETACH of the outer mount removes the whole tree from mountinfo in one call."""
    tmpfs(DRIVER_ROOT)
    tmpfs(f"{DRIVER_ROOT}/a")
    assert umount(DRIVER_ROOT, MNT_DETACH) == 0
    assert targets() == []


@in_guest
async def test_a_copy_in_another_mount_namespace_is_named() -> None:
    """The host's unmount succeeds, the copy stays and keeps its files; it is named until it is gone."""
    tmpfs(DRIVER_ROOT)
    file = Path(DRIVER_ROOT) / "libcuda.so"
    file.write_text("old driver")
    host = here()
    mounts = mounts_of(await host.look())
    with holding(lambda: in_copy(MS_PRIVATE)) as pid:
        for mount in mounts:
            await host.unmount(mount, detach=False, timeout=10)
        assert targets() == []
        assert Path(f"/proc/{pid}/root{file}").read_text() == "old driver"
        assert [(copy.pid, copy.target) for copy in await host.mount_copies(mounts)] == [(pid, DRIVER_ROOT)]
    assert await host.mount_copies(mounts) == ()
