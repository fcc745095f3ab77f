"""Texts of the kernel, whole and damaged: no parser falls over one, and none gives an answer that the text does not hold.

Each parser is held to a second, slow and obvious reading of the same text, or to the values that the text was made from.
"""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver_manager.core.snapshot import ModuleState
from driver_manager.host import parsing
from driver_manager.host.look import module_view
from driver_manager.host.paths import tree_roots
from driver_manager.host.scan import scan

from .trees import Tree

HEX = "0123456789abcdef"
WORDS = st.text(string.ascii_letters + string.digits + "_-.:/\\ ()\t[]#é\udc80", max_size=20)
MODULE_NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True)


def damaged(text: str, at: int, kind: int, junk: str) -> str:
    """A text with something cut out, put in, or changed."""
    at %= max(1, len(text))
    return (text[:at] + junk + text[at:], text[:at] + text[at + len(junk) :], text[:at])[kind]


DAMAGE = st.tuples(st.integers(0, 10_000), st.integers(0, 2), WORDS)
TARGETS = ("/", "/run", "/run/nvidia/driver", "/run/nvidia/driver", "/run/nvidia/driver/a\\040b", "/run/nvidia/driverX")
MOUNTINFO = "".join(
    f"{number} 21 0:4{number} / {target} rw,relatime shared:{number} - overlay overlay rw\n"
    for number, target in enumerate(
        ("/", "/run", "/run/nvidia/driver", "/run/nvidia/driver", "/run/nvidia/driver/a\\040b", "/run/nvidia/driverX"), 30
    )
)


@given(st.lists(DAMAGE, min_size=1, max_size=3))
def test_damaged_mountinfo_never_names_a_mount_outside(damages: list[tuple[int, int, str]]) -> None:
    """Whatever happened to the text: only places at and below the root come out, and each line is either read or told."""
    text = MOUNTINFO
    for damage in damages:
        text = damaged(text, *damage)
    found, bad = parsing.mounts_at(text, "/run/nvidia/driver")
    for mount in found:
        assert mount.target == "/run/nvidia/driver" or mount.target.startswith("/run/nvidia/driver/")
    lines = [line for line in text.split("\n") if line.strip()]
    readable = [line for line in lines if parsing.mount_line(line) is not None]
    assert len(readable) + len(bad) == len(lines)


@given(st.text("01234567\\ abc", max_size=30))
def test_octal_escapes_are_undone_once(text: str) -> None:
    """As the kernel's own mangling says: each backslash with three digits is one sign, and what comes out is not looked at again."""
    slow, at = "", 0
    while at < len(text):
        digits = text[at + 1 : at + 4]
        if text[at] == "\\" and len(digits) == 3 and all(digit in "01234567" for digit in digits):
            slow += chr(int(digits, 8))
            at += 4
        else:
            slow += text[at]
            at += 1
    assert parsing.decode_octal(text) == slow


@given(st.integers(1, 2**22), WORDS, st.sampled_from("RSDZXTtIxP"), st.integers(0, 2**32 - 1), st.integers(0, 2**20), DAMAGE)
def test_any_command_name_leaves_the_state_readable(
    pid: int, name: str, letter: str, flags: int, threads: int, damage: tuple[int, int, str]
) -> None:
    """The state is what was written, whatever the process calls itself; damaged text gives a state or none."""
    text = f"{pid} ({name}) {letter} 1 1 1 0 -1 {flags} 0 0 0 0 0 0 0 0 20 0 {threads} 0 100 1 1\n"
    state = parsing.process_state(text)
    assert state is not None
    assert (state.letter, state.flags, state.threads) == (letter, flags, threads)
    parsing.process_state(damaged(text, *damage))


@given(st.integers(0, 2**41), st.lists(WORDS, max_size=3))
def test_capabilities_are_those_of_their_line(value: int, others: list[str]) -> None:
    """Other lines, of a process that may name itself like one, change nothing."""
    lines = [f"Name:\t{other}" for other in others]
    text = "\n".join([*lines, "CapPrm:\t000001ffffffffff", f"CapEff:\t{value:016x}", "CapBnd:\t0"])
    assert parsing.effective_capabilities(text) == value


@given(
    uid=st.uuids().map(str),
    kind=st.sampled_from(["kubepods/{d}", "kubepods.slice/kubepods-{u}.slice", "../../{d}", "kubepods-besteffort-{u}.slice:cri:x"]),
    tail=st.text(HEX, max_size=64),
    hierarchy=st.sampled_from(["0::", "1:name=systemd:", "9:memory:", "4:cpu,cpuacct:"]),
)
def test_a_pods_uid_is_found_in_any_layout(uid: str, kind: str, tail: str, hierarchy: str) -> None:
    """The uid comes back exactly, with dashes."""
    path = kind.format(d=f"pod{uid}", u=f"pod{uid.replace('-', '_')}")
    assert parsing.pod_uid(f"{hierarchy}/{path}/{tail}\n") == uid


@given(uid=st.uuids().map(str), cut=st.integers(1, 35))
def test_part_of_a_uid_is_no_uid(uid: str, cut: int) -> None:
    """A uid that is cut short names no pod."""
    assert parsing.pod_uid(f"0::/kubepods/pod{uid[:-cut]}/x\n") is None


@given(
    st.lists(st.tuples(st.integers(0, 600), MODULE_NAMES), max_size=6), st.lists(st.tuples(st.integers(0, 600), MODULE_NAMES), max_size=6)
)
def test_majors_are_read_from_their_own_section(characters: list[tuple[int, str]], blocks: list[tuple[int, str]]) -> None:
    """Characters' numbers come back, blocks' never."""
    text = "Character devices:\n" + "".join(f"{number:3d} {name}\n" for number, name in characters)
    text += "\nBlock devices:\n" + "".join(f"{number:3d} {name}\n" for number, name in blocks)
    assert parsing.char_majors(text) == dict(characters)


@given(permanent=st.lists(MODULE_NAMES, max_size=4), others=st.lists(MODULE_NAMES, max_size=4), name=MODULE_NAMES)
def test_permanent_is_only_what_the_kernel_calls_so(permanent: list[str], others: list[str], name: str) -> None:
    """A module's own mark counts, not that of a line beside it."""
    text = "".join(f"{each} 16384 0 [permanent], Live 0x0\n" for each in permanent)
    text += "".join(f"{each} 16384 0 - Live 0x0\n" for each in others if each not in permanent)
    assert parsing.is_permanent(text, name) is (name in permanent)


@given(count=st.one_of(st.integers(-1, 99).map(str), WORDS), state=st.one_of(st.sampled_from(["live", "coming", "going"]), WORDS))
def test_what_sysfs_says_of_a_module_is_never_less_use(tmp_path_factory: pytest.TempPathFactory, count: str, state: str) -> None:
    """A use count that is no number is noted and not taken for freedom; an unknown state is no crash."""
    tree = Tree(tmp_path_factory.mktemp("host"))
    tree.module("nvidia", holders=["nvidia_uvm"])
    (tree.root / "sys/module/nvidia/refcnt").write_text(count, errors="surrogateescape")
    (tree.root / "sys/module/nvidia/initstate").write_text(state, errors="surrogateescape")
    notes: list[str] = []
    module = module_view(tree_roots(tree.root), "nvidia", notes)
    assert module is not None
    assert module.state in list(ModuleState)
    try:
        assert module.refcount == int(count)
    except ValueError:
        assert notes


MAPPED_NAMES = st.sampled_from(
    ["/dev/nvidia0", "/dev/nvidia0 (deleted)", "/dev/null", "/usr/lib/libc.so.6", "/dev/shm/x", "[heap]", "", "/a b"]
)


@given(st.lists(st.tuples(st.integers(0, 2**40), st.sampled_from(["r--s", "rw-s", "r-xp", "rw-p"]), MAPPED_NAMES), max_size=12), DAMAGE)
def test_every_mapping_of_a_device_is_found_among_any_others(
    tmp_path_factory: pytest.TempPathFactory, lines: list[tuple[int, str, str]], damage: tuple[int, int, str]
) -> None:
    """A process with a shared line of the device is a holder, one without is none; a damaged text breaks nothing."""
    tree = Tree(tmp_path_factory.mktemp("host"))
    tree.file("proc/devices", "Character devices:\n195 nvidia\n")
    tree.file("sys/dev/char/195:0/uevent", "MAJOR=195\nMINOR=0\nDEVNAME=nvidia0\n")
    tree.file("dev/nvidia0")
    text = "".join(
        f"{page << 12:08x}-{(page + 1) << 12:08x} {flags} 0 00:05 {number} {name}\n" for number, (page, flags, name) in enumerate(lines)
    )
    tree.process(7, maps=text + "7fff0000-7fff1000 r-xp 00000000 08:01 99 /usr/bin/train\n")
    found = scan(tree_roots(tree.root))
    holds = any(name.startswith("/dev/nvidia0") for _, _, name in lines)
    assert [holder.pid for holder in found.holders] == ([7] if holds else [])
    (tree.root / "proc/7/maps").write_text(damaged(text, *damage), errors="surrogateescape")
    scan(tree_roots(tree.root))
