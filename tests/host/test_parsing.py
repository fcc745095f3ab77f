from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver_manager.host import parsing

UID = "3f1c2f6e-8a3b-4a55-9a3c-0d6d3c1a9f10"
LOW = UID.replace("-", "_")
CID = "b" * 64


@pytest.mark.parametrize(
    "cgroup",
    [
        f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{LOW}.slice/cri-containerd-{CID}.scope",
        f"0::/kubepods.slice/kubepods-pod{LOW}.slice/crio-{CID}.scope/container",
        f"0::/kubepods/besteffort/pod{UID}/{CID}",
        f"0::/../../../kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{LOW}.slice/cri-containerd-{CID}.scope",
        f"0::/../../pod{UID}/{CID}",
        f"0::/../kubepods-burstable-pod{LOW}.slice/docker-{CID}.scope",
        f"0::/system.slice/containerd.service/kubepods-besteffort-pod{LOW}.slice:cri-containerd:{CID}",
        f"12:devices:/kubepods/burstable/pod{UID}/{CID}\n1:name=systemd:/kubepods/burstable/pod{UID}/{CID}\n0::/",
        f"11:memory:/kubelet/kubepods/pod{UID}",
    ],
)
def test_the_pod_of_a_process_is_found(cgroup: str) -> None:
    """In each layout of cgroup version, driver and runtime, from inside a pod too."""
    assert parsing.pod_uid(cgroup + "\n") == UID


def test_a_static_pod_has_a_hash_for_a_uid() -> None:
    """32 digits without dashes are a static pod's uid."""
    assert parsing.pod_uid(f"0::/kubepods/pod{'ab' * 16}/{CID}\n") == "ab" * 16


@pytest.mark.parametrize(
    ("cgroup", "unit"),
    [
        ("0::/system.slice/nvidia-persistenced.service\n", "nvidia-persistenced.service"),
        ("0::/../../system.slice/dcgm.service/worker\n", "dcgm.service"),
        ("9:name=systemd:/system.slice/dcgm.service\n4:memory:/other.service\n0::/\n", "dcgm.service"),
        ("0::/user.slice/user-1000.slice/session-3.scope\n", "session-3.scope"),
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/x.service\n", "user@1000.service"),
        (f"0::/system.slice/docker-{CID}.scope\n", f"docker-{CID}.scope"),
        ("0::/\n", None),
        ("", None),
        ("0::/init.scope\n", "init.scope"),
    ],
)
def test_the_unit_of_a_process_is_found(cgroup: str, unit: str | None) -> None:
    """The unit that systemd can stop: the outermost service or scope."""
    assert parsing.systemd_unit(cgroup) == unit
    assert parsing.pod_uid(cgroup) is None


@given(st.text())
def test_no_text_breaks_the_parsers(text: str) -> None:
    """Any text gives a value or none, never an exception."""
    parsing.pod_uid(text)
    parsing.systemd_unit(text)
    parsing.mounts_at(text, "/run/nvidia/driver")
    parsing.char_majors(text)
    parsing.process_state(text)
    parsing.effective_capabilities(text)
    parsing.without_module(text, "nvidia")
    parsing.is_permanent(text, "nvidia")
    parsing.decode_octal(text)


NAMES = st.text(string.ascii_letters + string.digits + " \t\\#é()", min_size=1, max_size=12)


def escaped(text: str) -> str:
    return "".join(f"\\{ord(sign):03o}" if sign in " \t\\#\n" else sign for sign in text)


@given(
    names=st.lists(NAMES, min_size=1, max_size=4),
    tags=st.lists(st.sampled_from(["shared:3", "master:4", "propagate_from:2", "unbindable"]), max_size=3),
    number=st.integers(1, 2**31),
    source=NAMES,
)
def test_any_mount_is_read_as_it_was_written(names: list[str], tags: list[str], number: int, source: str) -> None:
    """Whatever the names hold and however many tags there are, the line gives them back."""
    target = "/" + "/".join(names)
    line = " ".join([str(number), "1", "0:40", "/", escaped(target), "rw", *tags, "-", "overlay", escaped(source), "rw"])
    mount = parsing.mount_line(line)
    assert mount is not None
    assert (mount.view.mount_id, mount.view.target, mount.view.source) == (number, target, source)
    assert mount.view.is_shared is ("shared:3" in tags)


@given(st.text("0123456789abcdef-_", min_size=1, max_size=40))
def test_what_is_no_uid_is_no_pod(text: str) -> None:
    """A uid is found only where all of it is there."""
    found = parsing.pod_uid(f"0::/kubepods/pod{text}/x\n")
    assert found is None or found == text.replace("_", "-")
    if found:
        assert len(found) in (32, 36)


@given(
    modules=st.dictionaries(
        st.from_regex(r"[a-z_]{1,6}", fullmatch=True), st.sets(st.from_regex(r"[a-z_]{1,6}", fullmatch=True), max_size=3), max_size=6
    ),
    name=st.from_regex(r"[a-z_]{1,6}", fullmatch=True),
)
def test_a_module_that_goes_leaves_no_trace(modules: dict[str, set[str]], name: str) -> None:
    """Its line and its name elsewhere go, counts drop by one, all else stays."""
    text = "".join(
        f"{module} 1 {len(users)} {''.join(user + ',' for user in sorted(users)) or '-'} Live 0x0\n" for module, users in modules.items()
    )
    after = parsing.without_module(text, name)
    rest = {fields[0]: (int(fields[2]), fields[3]) for fields in (line.split() for line in after.splitlines())}
    assert set(rest) == set(modules) - {name}
    for module, (count, users) in rest.items():
        left = modules[module] - {name}
        assert count == len(left)
        assert {user for user in users.split(",") if user and user != "-"} == left


def test_the_command_may_hold_anything() -> None:
    """The state is behind the last parenthesis."""
    state = parsing.process_state("7 (a) Z (b) S 1 1 1 0 -1 2129984 0 0 0 0 0 0 0 0 20 0 3 0 1\n")
    assert state is not None
    assert (state.letter, state.threads, state.is_kernel_thread) == ("S", 3, True)


def test_majors_are_those_of_character_devices() -> None:
    """Block devices of the same number are something else."""
    text = "Character devices:\n  1 mem\n195 nvidia-frontend\n510 nvidia-uvm\n\nBlock devices:\n  8 sd\n510 mdp\n"
    assert parsing.char_majors(text) == {1: "mem", 195: "nvidia-frontend", 510: "nvidia-uvm"}
