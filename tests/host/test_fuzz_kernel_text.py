"""Texts of the kernel, whole and damaged: no parser falls over one, and none gives an answer that the text does not hold.

Each parser is held to a second, slow and obvious reading of the same text, or to the values that the text was made from.
"""

from __future__ import annotations

import inspect
import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver_manager.core.modalias import Alias, Modalias, parse_aliases, parse_modalias
from driver_manager.core.snapshot import ModuleState, MountView
from driver_manager.host import parsing
from driver_manager.host.look import module_view
from driver_manager.host.paths import text_of, tree_roots
from driver_manager.host.scan import scan
from tests.fuzz import kernel_text

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


SEEDS = [seed[:300] for seeds in kernel_text.SEEDS.values() for seed in seeds]
PIECES = [*SEEDS, *(piece for seed in SEEDS for separator in " \n" for piece in seed.split(separator))]
SIGNS = [" ", "\n", ":", "/", "\r", "\x0b", "\x1c", "\x85", "\u2028", "²", "_"]
TEXTS = st.lists(st.one_of(st.sampled_from([*PIECES, *SIGNS]), WORDS), max_size=12).map("".join)


@pytest.mark.parametrize("name", kernel_text.PROPERTIES)
@given(text=TEXTS)
def test_no_text_is_read_wrongly(name: str, text: str) -> None:
    """Pieces of kernel texts in any order, with the signs that Python takes for ends of lines: each parser's property holds."""
    kernel_text.PROPERTIES[name](text)


@pytest.mark.parametrize("name", kernel_text.PROPERTIES)
def test_what_was_read_wrongly_once_is_not_again(name: str) -> None:
    """The properties hold for the seeds of the fuzzing, each parser's own and all others'."""
    for seed in (seed for seeds in kernel_text.SEEDS.values() for seed in seeds):
        kernel_text.PROPERTIES[name](seed)


def test_every_parser_has_a_property() -> None:
    """A parser that is added without a property is told here, and a property without seeds."""
    public = {name for name, value in vars(parsing).items() if inspect.isfunction(value) and value.__module__ == parsing.__name__}
    text = Path(kernel_text.__file__).read_text()
    helpers = {"lines_of", "with_newlines", "number", "is_at_or_below"}
    assert [name for name in sorted(public - helpers) if not name.startswith("_") and f"parsing.{name}(" not in text] == []
    assert set(kernel_text.SEEDS) == set(kernel_text.PROPERTIES)


NAMES = st.text(st.characters(exclude_characters="\n\0", exclude_categories=["Cs"]), min_size=1, max_size=12)
"""What a name may hold: anything but a newline, which the kernel escapes or forbids."""
NUMBERS = st.integers(0, 2**31 - 1)


PATHS = st.lists(NAMES, min_size=1, max_size=3).map(lambda names: "/" + "/".join(names))


@given(NUMBERS, NUMBERS, st.tuples(PATHS, PATHS), NAMES, NAMES, st.booleans())
def test_a_mount_comes_back_as_the_kernel_writes_it(
    number: int, parent: int, paths: tuple[str, str], kind: str, source: str, is_shared: bool
) -> None:
    """Numbers, names of any signs, propagation."""
    target, root = paths
    filesystem = f"{number % 4096}:40"
    view = MountView(mount_id=number, target=target, fs_type=kind, source=source, is_shared=is_shared, filesystem=filesystem)
    line = parsing.MountLine(view, parent)
    text = kernel_text.mountinfo_line(line, root)
    assert parsing.mount_line(text.removesuffix("\n")) == line
    assert parsing.mounts_at(text * 2, "/") == ((view, view), ())


@given(st.dictionaries(st.integers(0, 4095), NAMES, max_size=6))
def test_majors_come_back(majors: dict[int, str]) -> None:
    """Numbers and names of any signs."""
    assert parsing.char_majors(kernel_text.devices(majors)) == majors


HEXES = st.one_of(st.just("*"), st.text("0123456789ABCDEF", min_size=1, max_size=8))


@given(st.lists(st.tuples(st.lists(HEXES, min_size=7, max_size=7), MODULE_NAMES), max_size=4))
def test_a_table_of_aliases_comes_back(entries: list[tuple[list[str], str]]) -> None:
    """Every pattern with its module, in order, among lines of other buses."""
    table = tuple(Alias(Modalias(*fields), module) for fields, module in entries)
    assert parse_aliases(f"alias pci:v*d*sv*sd*bc*sc*i* other\n{kernel_text.aliases(table)}# end") == table
    assert all(parse_modalias(kernel_text.modalias(alias.pattern)) == alias.pattern for alias in table)


@given(NAMES, NUMBERS)
def test_what_a_device_is_called_comes_back(name: str, minor: int) -> None:
    """The node of a uevent file, and a GPU's minor number."""
    assert parsing.device_name(f"MAJOR=1\nDEVNAME={name}\nDEVMODE=0666\n") == f"/dev/{name.removeprefix('/dev/')}"
    assert parsing.gpu_minor(f"Model: \t\t {name}\nDevice Minor: \t {minor}\n") == minor


def test_a_file_is_read_as_it_is(tmp_path: Path) -> None:
    """A carriage return in a name stays one, and ends no line."""
    (tmp_path / "mountinfo").write_bytes(b"30 1 0:4 / /run/nvidia/driver/a\rb rw - tmpfs tmpfs rw\n")
    found, bad = parsing.mounts_at(text_of(tmp_path / "mountinfo") or "", "/run/nvidia/driver")
    assert ([view.target for view in found], bad) == (["/run/nvidia/driver/a\rb"], ())


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
