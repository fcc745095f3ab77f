"""Which driver a GPU wants, who goes along, what forbids a move, and that every move can be taken back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver_manager.core.modalias import ANY, Modalias, is_vfio, parse_aliases, parse_modalias, vfio_driver, wildcards
from driver_manager.core.snapshot import Holder, HolderScan, PciDevice
from driver_manager.core.vfio import (
    BindTo,
    Bus,
    Decision,
    Function,
    Original,
    Probe,
    Result,
    SetOverride,
    Unbind,
    Write,
    decide_bind,
    decide_release,
    decide_unbind,
    full_address,
    is_as_wanted,
    on_vfio,
    originals_with,
    undo_writes,
    units_of,
    wanted_of_all,
    without_vfio,
    worst,
    writes_of,
)
from driver_manager.errors import Exit

EVERYTHING = Modalias(*[ANY] * 7)
GRACE = "pci:v000010DEd00002941sv000010DEsd00002046bc03sc02i00"
GRACE_DEVICE = Modalias("000010DE", "00002941", "000010DE", "00002046", "03", "02", "00")
GRACE_PATTERN = Modalias("000010DE", "00002941", *[ANY] * 5)
ALIASES = """alias foo:v*d*sv*sd*bc*sc*i* foo
alias pci:v000010DEd*sv*sd*bc03sc*i* nvidia
alias vfio_pci:v*d*sv*sd*bc*sc*i* vfio_pci
alias vfio_pci:v000010DEd00002941sv*sd*bc*sc*i* nvgrace_gpu_vfio_pci
"""

# Modaliases: the vectors of the specification (section 2) ----------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "pci:foo:bar", "pci", "pci:v1d2sv3sd4bc5sc6", "pci:v1d2sv3sd4bc5sc6i", "pci:v1dxsv3sd4bc5sc6i7"])
def test_what_is_no_modalias(text: str) -> None:
    """Text that is no modalias is an error, never half a value."""
    with pytest.raises(ValueError, match=r"modalias|part"):
        parse_modalias(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("pci:v*d*sv*sd*bc*sc*i*", EVERYTHING),
        ("pci:v000010DEd00002941sv*sd*bc*sc*i*", GRACE_PATTERN),
        (GRACE, GRACE_DEVICE),
        (GRACE + "\n", GRACE_DEVICE),
    ],
)
def test_modaliases(text: str, value: Modalias) -> None:
    """Seven parts, each a number or a star."""
    assert parse_modalias(text) == value


def test_aliases() -> None:
    """Of modules.alias the vfio drivers' lines alone count, in the file's order; lines that cannot be read are left out."""
    assert parse_aliases("") == ()
    assert parse_aliases("\n".join(ALIASES.splitlines()[:2])) == ()
    found = parse_aliases(ALIASES + "alias vfio_pci:nonsense x\nalias vfio_pci:v*d*sv*sd*bc*sc*i*  two_spaces\n")
    assert [(each.pattern, each.module) for each in found] == [(EVERYTHING, "vfio_pci"), (GRACE_PATTERN, "nvgrace_gpu_vfio_pci")]


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        (EVERYTHING, 7),
        (GRACE_PATTERN, 5),
        (replace(GRACE_PATTERN, device="00002900"), None),
        (GRACE_DEVICE, 0),
        (Modalias("1", "2", "3", "4", "5", "6", "7"), None),
        (replace(GRACE_PATTERN, vendor="000010de"), None),
    ],
)
def test_matches(pattern: Modalias, count: int | None) -> None:
    """Every part is equal, letters' case included, or a star."""
    assert wildcards(pattern, GRACE_DEVICE) == count


@pytest.mark.parametrize(
    ("modalias", "text", "driver"),
    [
        (GRACE, ALIASES, "nvgrace_gpu_vfio_pci"),
        (GRACE, "", "vfio-pci"),
        (GRACE.replace("2941", "2330"), ALIASES, "vfio-pci"),
        ("nonsense", ALIASES, "vfio-pci"),
        (GRACE, "alias vfio_pci:v*d*sv*sd*bc*sc*i* first\nalias vfio_pci:v*d*sv*sd*bc*sc*i* second", "first"),
    ],
)
def test_the_driver_that_is_chosen(modalias: str, text: str, driver: str) -> None:
    """The pattern with the fewest stars wins, of equals the first; nothing fits: vfio-pci."""
    assert vfio_driver(modalias, parse_aliases(text)) == driver


@given(st.text(max_size=60), st.text(max_size=200))
def test_no_text_breaks_the_choice(modalias: str, aliases: str) -> None:
    """Whatever the kernel's files hold, there is an answer."""
    assert vfio_driver(modalias, parse_aliases(f"alias vfio_pci:{aliases} x\n{aliases}"))


# Whom it concerns ---------------------------------------------------------------------------------------------------


def function(address: str = "0000:3b:00.0", device_class: str = "0x030200", **given: Any) -> Function:
    """A function of NVIDIA's, a GPU on nvidia by default."""
    return Function(**{"address": address, "vendor": "0x10de", "device_class": device_class, "driver": "nvidia", **given})


def bus(*functions: Function, **given: Any) -> Bus:
    """A bus with these functions."""
    drivers = frozenset({"nvidia", "vfio-pci", "snd_hda_intel", "nvgrace-gpu-vfio-pci"})
    return Bus(functions={each.address: each for each in functions}, **{"drivers": drivers, **given})


GPU = function(group="7")
AUDIO = function("0000:3b:00.1", "0x040300", driver="snd_hda_intel", group="7")
USB = function("0000:3b:00.2", "0x0c0330", driver="xhci_hcd", group="8")
UCSI = function("0000:3b:00.3", "0x0c8000", driver=None, group="8")
OTHER_SLOT = function("0000:5e:00.1", "0x040300", driver="snd_hda_intel", group="9")
SWITCH = function("0000:61:00.0", "0x068000", driver="nvidia-nvswitch")
CARD = Function(address="0000:3b:00.4", vendor="0x8086", device_class="0x020000", driver="ice", group="70")


def only(there: Bus, *, switches: bool = False) -> Decision:
    """What binding would do to the only unit there is."""
    (unit,) = units_of(there, wanted_of_all(there, switches=switches))
    return decide_bind(there, unit)


def test_companions_go_along() -> None:
    """Audio, USB and UCSI of the GPU's slot or group, and nothing else."""
    (unit,) = units_of(bus(GPU, AUDIO, USB, UCSI, OTHER_SLOT, CARD), [GPU])
    assert unit.companions == (AUDIO, USB, UCSI)


def test_who_is_wanted_by_all() -> None:
    """Every GPU but virtual functions; NVSwitches on demand; never another maker's."""
    there = bus(GPU, replace(GPU, address="0000:3b:00.5", is_virtual=True), SWITCH, AUDIO, replace(CARD, device_class="0x030000"))
    assert wanted_of_all(there, switches=False) == (GPU,)
    assert wanted_of_all(there, switches=True) == (GPU, SWITCH)


def test_a_group_is_one_unit() -> None:
    """GPUs of one group are moved together."""
    second = function("0000:5e:00.0", group="7")
    assert [len(unit.mains) for unit in units_of(bus(GPU, second), [GPU, second])] == [2]
    apart = replace(second, group="8")
    assert [len(unit.mains) for unit in units_of(bus(GPU, apart), [GPU, apart])] == [1, 1]


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("0000:3b:00.0", "0000:3b:00.0"),
        ("3B:00.0", "0000:3b:00.0"),
        ("00000000:3B:00.0", "0000:3b:00.0"),
        ("10000:3b:1f.7", "10000:3b:1f.7"),
        ("3b:00", None),
        ("0000:3b:00.8", None),
        ("../../x", None),
        ("", None),
    ],
)
def test_addresses(text: str, address: str | None) -> None:
    """The usual ways to write an address mean one."""
    assert full_address(text) == address


def test_what_the_agent_takes_off_vfio() -> None:
    """GPUs and companions on vfio, NVSwitches on demand, no virtual function and no other maker's card."""
    devices = [
        PciDevice(address=address, vendor=vendor, device_class=kind, driver=driver, is_virtual=is_virtual)
        for address, vendor, kind, driver, is_virtual in [
            ("a", "0x10de", "0x030200", "vfio-pci", False),
            ("b", "0x10de", "0x040300", "vfio-pci", False),
            ("c", "0x10de", "0x068000", "vfio-pci", False),
            ("d", "0x10de", "0x030200", "nvidia", False),
            ("e", "0x10de", "0x030200", "vfio-pci", True),
            ("f", "0x15b3", "0x020000", "vfio-pci", False),
        ]
    ]
    assert on_vfio(devices, switches=False) == ("a", "b")
    assert on_vfio(devices, switches=True) == ("a", "b", "c")


# Deciding -----------------------------------------------------------------------------------------------------------


def test_a_gpu_gets_its_own_driver_and_its_audio_the_plain_one() -> None:
    """Each function by its own modalias (W29), under the name that the kernel knows the driver by."""
    decision = only(bus(replace(GPU, modalias=GRACE), AUDIO, aliases=parse_aliases(ALIASES)))
    assert [move.driver for move in decision.moves] == ["nvgrace-gpu-vfio-pci", "vfio-pci"]
    again = only(bus(replace(GPU, modalias=GRACE, driver="vfio-pci"), aliases=parse_aliases(ALIASES)))
    assert [move.driver for move in again.moves] == ["nvgrace-gpu-vfio-pci"]


def test_bound_already_is_done_and_driverless_is_a_start() -> None:
    """N39: nothing is written to what is on vfio; a function without a driver is bound."""
    assert only(bus(replace(GPU, driver="vfio-pci"))).result is Result.ALREADY
    assert only(bus(replace(GPU, driver=None))).result is Result.PLANNED


@pytest.mark.parametrize(
    ("there", "words"),
    [
        (bus(GPU, replace(CARD, group="7")), ("0000:3b:00.4", "ice", "group 7")),
        (bus(GPU, replace(SWITCH, group="7")), ("0000:61:00.0", "nvswitch")),
        (bus(replace(GPU, group=None), has_groups=False), ("no IOMMU group",)),
    ],
)
def test_groups_that_no_machine_could_have(there: Bus, words: tuple[str, ...]) -> None:
    """A native driver in the group that is not ours to move, or no group at all: refused by name, with what to do."""
    decision = only(there)
    assert (decision.result, decision.code, decision.moves) == (Result.REFUSED, Exit.REFUSED, ())
    assert all(word in decision.because for word in words)
    assert decision.hint


@pytest.mark.parametrize("given", [{"driver": None}, {"driver": "vfio-pci"}, {"driver": "pcieport", "device_class": "0x060400"}])
def test_members_that_leave_a_group_usable(given: dict[str, Any]) -> None:
    """Free functions, those on vfio, and bridges."""
    assert only(bus(GPU, replace(CARD, **{"group": "7", **given}))).result is Result.PLANNED


def held_by(*devices: str) -> HolderScan:
    """A scan with one holder."""
    return HolderScan((Holder(pid=4711, command="qemu-system-x86", devices=devices, unit="vm.scope"),))


@pytest.mark.parametrize(
    ("gpu", "device", "is_held"),
    [
        (replace(GPU, driver="vfio-pci"), "/dev/vfio/7", True),
        (replace(GPU, driver="vfio-pci"), "/dev/vfio/noiommu-7", True),
        (replace(GPU, driver="vfio-pci"), "/dev/vfio/8", False),
        (replace(GPU, driver="vfio-pci"), "/dev/vfio/vfio", False),
        (replace(GPU, driver="vfio-pci", nodes=frozenset({"vfio/devices/vfio3"})), "/dev/vfio/devices/vfio3", True),
        (replace(GPU, driver="vfio-pci"), "/dev/vfio/devices/vfio3", False),
        (replace(GPU, driver="vfio-pci", group=None), "/dev/vfio/8", True),
        (replace(GPU, driver="vfio-pci"), "/dev/nvidia0", False),
    ],
)
def test_n37_a_gpu_in_use_is_not_unbound(gpu: Function, device: str, is_held: bool) -> None:
    """N37, N39: a holder of the group's or the device's node is named, and nothing is to be written."""
    there = bus(gpu, holders=held_by(device))
    (unit,) = units_of(there, [gpu])
    for decision in (decide_unbind(there, unit, probe=True), decide_release(there, unit)):
        assert (decision.result is Result.REFUSED) == is_held
        assert (decision.code is Exit.AGAIN) == is_held
        assert not is_held or all(word in decision.because for word in ("qemu-system-x86", "4711", "vm.scope"))


@pytest.mark.parametrize(
    ("nodes", "device", "is_held"),
    [
        ({"nvidia0"}, "/dev/nvidia0", True),
        ({"nvidia0"}, "/dev/nvidia1", True),
        ({"dri/card1"}, "/dev/dri/card1", True),
        ({"dri/card1"}, "/dev/dri/card0", False),
        ({"nvidia0"}, "/dev/nvidiactl", False),
    ],
)
def test_a_gpu_in_use_is_not_bound(nodes: set[str], device: str, is_held: bool) -> None:
    """R1: a process on the native driver forbids the bind; a GPU's node that no function is known for may be any GPU's."""
    assert (only(bus(replace(GPU, nodes=frozenset(nodes)), holders=held_by(device))).result is Result.REFUSED) == is_held


def test_another_gpus_user_does_not_matter() -> None:
    """R9: a node that is known to be another GPU's forbids nothing here."""
    other = function("0000:5e:00.0", group="8", nodes=frozenset({"nvidia1"}))
    there = bus(GPU, other, holders=held_by("/dev/nvidia1"))
    assert [decide_bind(there, unit).result for unit in units_of(there, [GPU, other])] == [Result.PLANNED, Result.REFUSED]


def test_a_user_that_cannot_be_seen() -> None:
    """Without the host's processes, a function on vfio that is switched on counts as in use."""
    gpu = replace(GPU, driver="vfio-pci", is_enabled=True)
    for sees, result in ((False, Result.REFUSED), (True, Result.PLANNED)):
        there = bus(gpu, sees_all_processes=sees)
        (unit,) = units_of(there, [gpu])
        assert decide_unbind(there, unit, probe=True).result is result


def test_a_user_that_shows_the_device_alone() -> None:
    """N37: a process with a vfio device and no group is named where a function is switched on; where none is, it is somebody else's."""
    alone = HolderScan(by_device_alone=held_by("anon_inode:[vfio-device]").holders)
    for is_enabled, result in ((True, Result.REFUSED), (False, Result.PLANNED)):
        gpu = replace(GPU, driver="vfio-pci", is_enabled=is_enabled)
        there = bus(gpu, holders=alone)
        (unit,) = units_of(there, [gpu])
        decision = decide_unbind(there, unit, probe=True)
        assert decision.result is result
        assert not is_enabled or "4711" in decision.because


@pytest.mark.parametrize(
    ("scan", "result", "code"),
    [
        (held_by("/dev/vfio/7"), Result.REFUSED, Exit.AGAIN),
        (HolderScan(by_device_alone=held_by("anon_inode:[vfio-device]").holders), Result.REFUSED, Exit.AGAIN),
        (held_by("/dev/vfio/8"), Result.STUCK, Exit.CANNOT_UNLOAD),
        (HolderScan(), Result.STUCK, Exit.CANNOT_UNLOAD),
    ],
)
def test_n39_nothing_is_written_to_a_locked_device(scan: HolderScan, result: Result, code: Exit) -> None:
    """N39: while an earlier write has not come back no way makes another; who it waits for is named where that shows."""
    gpu = replace(GPU, driver=None, is_enabled=True, is_locked=True)
    there = bus(gpu, holders=scan, originals={GPU.address: Original("nvidia", "")})
    (unit,) = units_of(there, [gpu])
    for decision in (decide_bind(there, unit), decide_unbind(there, unit, probe=True), decide_release(there, unit)):
        assert (decision.result, decision.code, decision.moves) == (result, code, ())
        assert result is Result.STUCK or "4711" in decision.because


def test_n39_a_group_in_use_gets_no_native_driver() -> None:
    """N39: a function without a driver goes to no native one while a machine has its group; to vfio it may."""
    gpu = replace(GPU, driver=None)
    there = bus(gpu, holders=held_by("/dev/vfio/7"), originals={GPU.address: Original("nvidia", "")})
    (unit,) = units_of(there, [gpu])
    assert decide_unbind(there, unit, probe=True).result is Result.REFUSED
    assert decide_bind(there, unit).result is Result.PLANNED


def test_users_through_vfio_are_left_out() -> None:
    """N37: of a process that has both kinds open the native one is left; the control node of vfio counts for nothing."""
    machine, both, native = (
        Holder(pid=pid, command="x", devices=devices)
        for pid, devices in ((1, ("/dev/vfio/7", "/dev/vfio/vfio")), (2, ("/dev/nvidia0", "/dev/vfio/7")), (3, ("/dev/nvidia1",)))
    )
    left = HolderScan((replace(both, devices=("/dev/nvidia0",)), native), (9,))
    assert without_vfio(HolderScan((machine, both, native), (9,))) == left


# The way back -------------------------------------------------------------------------------------------------------


def back(there: Bus, *, probe: bool = True) -> Decision:
    """What unbinding would do."""
    (unit,) = units_of(there, wanted_of_all(there, switches=False))
    return decide_unbind(there, unit, probe=probe)


VFIO = replace(GPU, driver="vfio-pci", override="vfio-pci")


def test_what_was_there_comes_back() -> None:
    """With a note the former driver and override; where that driver is not loaded the function stays free."""
    noted = {GPU.address: Original("nvidia", "")}
    assert writes_of(back(bus(VFIO, originals=noted)).moves[0]) == (
        SetOverride(GPU.address, ""), Unbind(GPU.address), BindTo(GPU.address, "nvidia"),
    )  # fmt: skip
    unloaded = back(bus(VFIO, originals=noted, drivers=frozenset({"vfio-pci"})))
    assert writes_of(unloaded.moves[0]) == (SetOverride(GPU.address, ""), Unbind(GPU.address))
    assert "nvidia is not loaded" in unloaded.because


def test_n39_a_gpu_that_was_on_vfio_before_goes_back_there() -> None:
    """N39: what the boot's configuration had put on vfio is not handed to nvidia; the sentence says how to take it off."""
    variant = replace(GPU, driver="nvgrace-gpu-vfio-pci", override="nvgrace-gpu-vfio-pci")
    decision = back(bus(variant, originals={GPU.address: Original("vfio-pci", "vfio-pci")}))
    assert decision.moves[0].driver == "vfio-pci"
    assert "once more" in decision.because


@pytest.mark.parametrize("probe", [True, False])
def test_without_a_note_the_kernel_is_asked(probe: bool) -> None:
    """Off vfio, and the kernel finds a driver unless it must not look for one."""
    asked = (Probe(GPU.address),) if probe else ()
    assert writes_of(back(bus(VFIO), probe=probe).moves[0]) == (SetOverride(GPU.address, ""), Unbind(GPU.address), *asked)


def test_a_native_driver_keeps_what_it_has() -> None:
    """Never unbound from a native driver, whatever is noted; an override that speaks of vfio goes."""
    for noted in ({}, {GPU.address: Original(None, "")}):
        assert back(bus(GPU, originals=noted)).result is Result.ALREADY
        decision = back(bus(replace(GPU, override="vfio-pci"), originals=noted))
        assert [writes_of(move) for move in decision.moves] == [(SetOverride(GPU.address, ""),)]


def test_n39_what_a_failed_bind_left_is_mended() -> None:
    """N39: without a driver and with the override still set, the function is given back."""
    left = replace(GPU, driver=None, override="vfio-pci")
    assert writes_of(back(bus(left)).moves[0]) == (SetOverride(GPU.address, ""), Probe(GPU.address))
    noted = bus(left, originals={GPU.address: Original("nvidia", "")})
    assert writes_of(back(noted).moves[0]) == (SetOverride(GPU.address, ""), BindTo(GPU.address, "nvidia"))


def test_what_is_noted() -> None:
    """A native driver as it is now, else what was noted first, else the state now."""
    for now, before, noted in [
        (GPU, None, Original("nvidia", "")),
        (GPU, Original("nouveau"), Original("nvidia", "")),
        (replace(GPU, driver=None), Original("nvidia"), Original("nvidia")),
        (replace(GPU, driver=None), None, Original(None, "")),
    ]:
        there = bus(now, originals={} if before is None else {GPU.address: before})
        assert originals_with(there, only(there).moves)[GPU.address] == noted


def test_the_worst_exit_code() -> None:
    """A device that only a reboot helps outweighs a refusal, and that one in use; nothing wrong is 0."""
    assert worst([]) is Exit.DONE
    assert worst([Exit.DONE, Exit.AGAIN, Exit.REFUSED]) is Exit.REFUSED
    assert worst([Exit.REFUSED, Exit.CANNOT_UNLOAD]) is Exit.CANNOT_UNLOAD


# Laws ---------------------------------------------------------------------------------------------------------------


def apply(write: Write, there: Bus) -> Bus:
    """What a kernel makes of a write: the pure twin of the shell. A native driver takes what has no override."""
    now = there.functions[write.address]
    match write:
        case SetOverride(_, driver):
            now = replace(now, override=driver)
        case Unbind():
            assert now.driver is not None
            now = replace(now, driver=None)
        case BindTo(_, driver):
            assert now.driver is None
            assert now.override in ("", driver)
            assert not is_vfio(driver) or now.override == driver
            now = replace(now, driver=driver)
        case Probe():
            now = replace(now, driver=now.driver or now.override or "nvidia")
    return replace(there, functions={**there.functions, now.address: now})


@st.composite
def buses(draw: st.DrawFn) -> Bus:
    """Machines with any functions in any groups and states that a kernel can be in."""
    functions = []
    for slot in range(draw(st.integers(1, 4))):
        for number in range(draw(st.integers(1, 3))):
            driver = draw(st.sampled_from([None, "nvidia", "snd_hda_intel", "vfio-pci"]))
            override = "vfio-pci" if driver == "vfio-pci" else draw(st.sampled_from(["", "vfio-pci"])) if driver is None else ""
            functions.append(
                Function(
                    address=f"0000:{slot:02x}:00.{number}",
                    vendor=draw(st.sampled_from(["0x10de", "0x10de", "0x8086"])),
                    device_class=draw(st.sampled_from(["0x030000", "0x030200", "0x040300", "0x0c0330", "0x068000", "0x020000"])),
                    driver=driver,
                    override=override,
                    group=draw(st.sampled_from([None, "1", "2", str(slot + 10)])),
                    is_virtual=draw(st.booleans()),
                )
            )
    return bus(*functions, has_groups=draw(st.sampled_from([True, None])))


def decisions(there: Bus, *, is_bind: bool, switches: bool) -> list[Decision]:
    """What is decided for each unit."""
    units = units_of(there, wanted_of_all(there, switches=switches))
    return [decide_bind(there, unit) if is_bind else decide_unbind(there, unit, probe=True) for unit in units]


@given(buses(), st.booleans(), st.booleans())
def test_only_nvidias_functions_are_ever_touched(there: Bus, is_bind: bool, switches: bool) -> None:
    """Whatever is on the bus, no write names another maker's function, nor a virtual one, and no function is moved twice."""
    moved = [move.function for decision in decisions(there, is_bind=is_bind, switches=switches) for move in decision.moves]
    assert all(each.vendor == "0x10de" and not each.is_virtual for each in moved)
    assert len({each.address for each in moved}) == len(moved)


@given(buses(), st.booleans(), st.integers(0, 12))
def test_n39_every_move_can_be_taken_back_from_anywhere(there: Bus, is_bind: bool, stop_after: int) -> None:
    """N39: stopped after any write, undoing brings every function to exactly what it was."""
    for decision in decisions(there, is_bind=is_bind, switches=True):
        after = there
        for write in [write for move in decision.moves for write in writes_of(move)][:stop_after]:
            after = apply(write, after)
        for move in reversed(decision.moves):
            for write in undo_writes(move.function, after.functions[move.function.address]):
                after = apply(write, after)
        assert after.functions == there.functions


@given(buses(), st.booleans(), st.integers(0, 12))
def test_a_move_converges_even_when_interrupted(there: Bus, is_bind: bool, stop_after: int) -> None:
    """Stopped after any write and decided anew, it ends with everything as wanted and nothing left to do."""
    after = there
    for decision in decisions(there, is_bind=is_bind, switches=False):
        for write in [write for move in decision.moves for write in writes_of(move)][:stop_after]:
            after = apply(write, after)
    for decision in decisions(after, is_bind=is_bind, switches=False):
        for move in decision.moves:
            for write in writes_of(move):
                after = apply(write, after)
            if is_bind:
                assert is_as_wanted(move, after.functions[move.function.address])
    if is_bind:
        assert all(not each.moves for each in decisions(after, is_bind=True, switches=False))


@given(buses())
def test_bind_and_unbind_are_a_way_there_and_back(there: Bus) -> None:
    """With what was noted, unbinding after a bind gives each moved function its driver and override back."""
    for decision in decisions(there, is_bind=True, switches=False):
        if not decision.moves or any(move.function.override for move in decision.moves):
            continue
        after = replace(there, originals=originals_with(there, decision.moves))
        for write in [write for move in decision.moves for write in writes_of(move)]:
            after = apply(write, after)
        units = units_of(after, [after.functions[each.address] for each in decision.unit.mains])
        for way_back in (decide_unbind(after, unit, probe=False) for unit in units):
            for write in [write for move in way_back.moves for write in writes_of(move)]:
                after = apply(write, after)
        moved = [move.function for move in decision.moves]
        assert [after.functions[each.address] for each in moved] == moved
