"""The small decisions: which taint, in which order modules go, whose driver it is."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver_manager import names
from driver_manager.core.hostdriver import host_driver, mark, needs_smi, previous_value, unmarked
from driver_manager.core.keepoff import choose_keep_off
from driver_manager.core.modules import DRIVER_MODULES, stuck_modules, unload_order, used_modules
from driver_manager.core.snapshot import DriverFiles, HostView, ModuleState, ModuleView, MountView, NodeView, Taint, Toleration
from tests.core.given import nodes, tolerations

OWN, GPU = names.KEEP_OFF_TAINT, names.GPU_TAINT
ALL = Toleration("", "Exists")


def tolerated(*keys: str) -> tuple[Toleration, ...]:
    """Tolerations of these keys."""
    return tuple(Toleration(key, "Exists", "", "NoSchedule") for key in keys)


@pytest.mark.parametrize(
    ("given_tolerations", "taken", "key"),
    [
        (tolerated(OWN, GPU), (), OWN), (tolerated(GPU), (), GPU), (tolerated(OWN), (), OWN), ((ALL,), (), OWN), ((), (), None),
        (tolerated(GPU), (GPU,), None), (tolerated(OWN, GPU), (OWN,), GPU), (tolerated(OWN, GPU), (OWN, GPU), None),
        (tolerated("other"), (), None), (None, (), OWN), (None, (OWN,), None),
        ((Toleration(GPU, "Equal", "present", "NoSchedule"),), (), None), ((Toleration(GPU, "Exists", "", "NoExecute"),), (), None),
    ],
)  # fmt: skip
def test_n23_which_taint(given_tolerations: tuple[Toleration, ...] | None, taken: tuple[str, ...], key: str | None) -> None:
    """N23, design section 3: our key if the owner tolerates it, else NVIDIA's if tolerated and free, else none; alone the setting's."""
    node = NodeView(name="n", uid="u", resource_version="1", taints=tuple(Taint(one, "present") for one in taken))
    chosen = choose_keep_off(node, given_tolerations, "abc")
    assert (chosen.taint.key if chosen.taint else None) == key
    assert chosen.taint is None or (chosen.taint.value, chosen.taint.effect) == ("dm-abc", "NoSchedule")
    assert ("no taint" in chosen.because) == (key is None)


def test_the_setting_without_an_owner() -> None:
    """Without an owner to ask, the setting's key is used; it is not asked for where there is one."""
    node = NodeView(name="n", uid="u", resource_version="1")
    alone = choose_keep_off(node, None, "abc", unowned_key="example.com/x").taint
    owned = choose_keep_off(node, tolerated(GPU), "abc", unowned_key="example.com/x").taint
    assert alone == Taint("example.com/x", "dm-abc")
    assert owned == Taint(GPU, "dm-abc")


@given(nodes(), st.none() | st.lists(tolerations, max_size=4))
def test_n23_the_driver_is_never_kept_off(node: NodeView, owned: list[Toleration] | None) -> None:
    """N23: whatever is chosen, the owner's pods tolerate it and no other taint is in its place."""
    taint = choose_keep_off(node, owned, "abc").taint
    if taint is None:
        return
    assert owned is None or any(one.tolerates(taint) for one in owned)
    assert all((one.key, one.effect) != (taint.key, taint.effect) for one in node.taints)


def test_a_held_taint_is_taken_over() -> None:
    """The taint of an earlier run's record is used again under this run's name."""
    node = NodeView(name="n", uid="u", resource_version="1", taints=(Taint(GPU, "dm-old"),))
    assert choose_keep_off(node, tolerated(GPU), "new", held=Taint(GPU, "dm-old")).taint == Taint(GPU, "dm-new")


# Modules ------------------------------------------------------------------------------------------------------------


@st.composite
def graphs(draw: st.DrawFn) -> dict[str, ModuleView]:
    """Loaded modules with any dependencies, without circles, among NVIDIA's and two foreign ones."""
    order = draw(st.permutations([*DRIVER_MODULES, "foreign_a", "foreign_b"]))
    loaded = draw(st.sets(st.sampled_from(order)))
    names_in_order = [name for name in order if name in loaded]
    made = {}
    for place, name in enumerate(names_in_order):
        later = names_in_order[place + 1 :]
        holders = draw(st.frozensets(st.sampled_from(later))) if later else frozenset()
        made[name] = ModuleView(name=name, refcount=len(holders), holders=holders)
    return made


@given(graphs(), st.sets(st.sampled_from(["foreign_a", "foreign_b"])))
def test_every_module_goes_after_all_that_hold_it(modules: dict[str, ModuleView], also: set[str]) -> None:
    """A module comes after each of its holders that may go; what may not go is named and never in the order; nothing is twice."""
    order = unload_order(modules, also)
    assert len(set(order.modules)) == len(order.modules)
    assert {name for name in modules if name in DRIVER_MODULES} <= set(order.modules)
    for name in order.modules:
        assert name in DRIVER_MODULES or name in also
        for holder in modules[name].holders:
            if holder in order.modules:
                assert order.modules.index(holder) < order.modules.index(name)
            else:
                assert holder in order.unknown_holders
    assert not set(order.unknown_holders) & (set(DRIVER_MODULES) | also)


def test_an_unknown_holder_is_named() -> None:
    """A foreign module that depends on the driver is named; allowed by the setting it goes first."""
    modules = {
        "nvidia": ModuleView(name="nvidia", refcount=2, holders=frozenset({"nvidia_uvm", "lustre"})),
        "nvidia_uvm": ModuleView(name="nvidia_uvm"),
        "lustre": ModuleView(name="lustre"),
    }
    assert unload_order(modules).unknown_holders == ("lustre",)
    allowed = unload_order(modules, ("lustre",))
    assert allowed.unknown_holders == ()
    assert allowed.modules.index("lustre") < allowed.modules.index("nvidia")


def test_modules_in_trouble() -> None:
    """N25: a module in the state `going` is stuck; one with more users than holders is used; without a count it is not called used."""
    modules = {
        "nvidia": ModuleView(name="nvidia", refcount=1, holders=frozenset({"nvidia_uvm"})),
        "nvidia_uvm": ModuleView(name="nvidia_uvm", refcount=2, state=ModuleState.GOING),
        "gdrdrv": ModuleView(name="gdrdrv", refcount=None, state=ModuleState.COMING),
    }
    assert stuck_modules(modules) == ("nvidia_uvm",)
    assert used_modules(modules, modules) == ("nvidia_uvm",)
    assert used_modules(modules, ("absent",)) == ()


# The host's own driver ----------------------------------------------------------------------------------------------

LOADED = {"nvidia": ModuleView(name="nvidia", version="550.1")}
FILES = ("/lib/modules/6.8/nvidia.ko",)
ROOT = (MountView(mount_id=1, target="/run/nvidia/driver"),)


@pytest.mark.parametrize(
    ("modules", "files", "libraries", "mounts", "smi", "version"),
    [
        ({}, (), (), (), None, None),  # (a) nothing at all
        ({}, (), (), (), "550.1", None),  # (b) only a command
        ({}, FILES, ("550.1",), (), "550.1", None),  # installed, not loaded
        (LOADED, FILES, ("550.1",), (), None, "550.1"),  # (c) all three agree
        (LOADED, FILES, ("535.9",), (), None, None),  # another userspace
        (LOADED, FILES, (), (), "550.1", "550.1"),  # the command speaks where no library was found
        (LOADED, FILES, (), (), "535.9", None),
        (LOADED, FILES, (), (), None, None),  # it hung
        (LOADED, (), ("550.1",), (), "550.1", None),  # the module came from elsewhere
        (LOADED, FILES, ("550.1",), ROOT, "550.1", None),  # (d) a driver container
        ({"nvidia": ModuleView(name="nvidia")}, FILES, (), (), "550.1", "550.1"),  # no version in sysfs
    ],
)
def test_n17_whose_driver(
    modules: dict[str, ModuleView], files: tuple[str, ...], libraries: tuple[str, ...], mounts: tuple[MountView, ...], smi: str | None,
    version: str | None,
) -> None:  # fmt: skip
    """N17: only a loaded module of the host's own with userspace of the same version is a host driver; a mounted root never is."""
    files_there = DriverFiles(module_files=files, library_versions=frozenset(libraries))
    host = HostView(boot_id="b", modules=modules, driver_files=files_there, mounts=mounts)
    assert host_driver(host, smi) == version


def test_the_command_is_asked_only_where_it_matters() -> None:
    """N17: nvidia-smi, which can hang, is only asked where the files leave the question open."""
    files = DriverFiles(module_files=FILES, library_versions=frozenset({"550.1"}))
    assert not needs_smi(HostView(boot_id="b", modules=LOADED, driver_files=files))
    assert needs_smi(HostView(boot_id="b", modules=LOADED, driver_files=DriverFiles(module_files=FILES)))
    assert not needs_smi(HostView(boot_id="b", modules=LOADED))
    assert not needs_smi(HostView(boot_id="b", modules=LOADED, driver_files=DriverFiles(module_files=FILES), mounts=ROOT))


@pytest.mark.parametrize("previous", ["true", "false", None])
def test_n17_mark_and_unmark(previous: str | None) -> None:
    """N17: the annotation gives the former value back, and only where the label still is our mark."""
    annotation = mark(previous, "550.1")[names.HOST_DRIVER]
    assert previous_value(annotation) == previous
    node = NodeView(name="n", uid="u", resource_version="1", labels={names.DEPLOY_DRIVER: names.PRE_INSTALLED})
    assert unmarked(node, previous) == {names.DEPLOY_DRIVER: previous}
    assert unmarked(NodeView(name="n", uid="u", resource_version="1", labels={names.DEPLOY_DRIVER: "false"}), previous) == {}


@pytest.mark.parametrize("text", ["", "{", "[]", "7", json.dumps({"previous": 7}), "{}", "[" * 100_000])
def test_a_mark_that_cannot_be_read(text: str) -> None:
    """Text of anybody in our annotation is no value, and no crash."""
    assert previous_value(text) is None
