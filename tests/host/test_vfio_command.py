"""The installed `vfio-manage` as a process of its own, on directory trees."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.host.trees import Tree

pytestmark = pytest.mark.real_processes

COMMAND = Path(sys.executable).with_name("vfio-manage")
GPUS = ("0000:3b:00.0", "0000:5e:00.0", "0000:86:00.0", "0000:af:00.0")
AUDIO = "0000:3b:00.1"
BIND = "/sys/bus/pci/drivers/vfio-pci/bind"
GRACE = "pci:v000010DEd00002941sv000010DEsd00002046bc03sc02i00"
ORIGINALS = "run/nvidia/driver-manager.vfio"


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    def require(self, code: int) -> Ended:
        """Itself, if it ended with this code."""
        assert self.code == code, f"exit {self.code}, not {code}:\n{self.out}\n{self.err}"
        assert "Traceback" not in self.err
        return self

    def results(self) -> dict[str, str]:
        """What became of each device, from the JSON."""
        return {address: each["result"] for each in json.loads(self.out)["devices"] for address in each["addresses"]}


def vfio_manage(tree: Tree, *words: str, env: dict[str, str] | None = None) -> Ended:
    """Runs the command on a tree to its end."""
    environment = {"PATH": os.environ["PATH"], "DRIVER_MANAGER_HOST_TREE": str(tree.root), **(env or {})}
    done = subprocess.run([COMMAND, *words], env=environment, capture_output=True, text=True, timeout=60, check=False)
    return Ended(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def four(tree: Tree) -> Tree:
    """Four GPUs on nvidia, each in a group of its own, the first with audio; a network card; an empty table of vfio drivers."""
    for number, address in enumerate(GPUS):
        tree.gpu(address, group=str(number + 1), device_class="0x030000" if number == 0 else "0x030200")
    tree.gpu(AUDIO, driver="snd_hda_intel", device_class="0x040300", group="1")
    tree.gpu("0000:01:00.0", driver="mlx5_core", vendor="0x15b3", device_class="0x020000", group="9")
    tree.file("proc/sys/kernel/osrelease", "6.8.0\n")
    tree.file("lib/modules/6.8.0/modules.alias", "")
    return tree


def drivers(tree: Tree, addresses: Sequence[str] = GPUS) -> list[str | None]:
    """The drivers of the GPUs now."""
    return [tree.driver_of(address) for address in addresses]


def unbinds(tree: Tree) -> list[str]:
    """The devices that something was unbound from, in order."""
    return [str(call["arguments"][1]) for call in tree.calls() if str(call["arguments"][0]).endswith("/unbind")]


# There and back -----------------------------------------------------------------------------------------------------


def test_n36_all_there_and_back(four: Tree) -> None:
    """N36: exit 0 means that every function of every GPU reads back on vfio, and afterwards where it was before."""
    ended = vfio_manage(four, "bind", "--all", "--output", "json").require(0)
    assert drivers(four) == ["vfio-pci"] * 4
    assert four.driver_of(AUDIO) == "vfio-pci"
    assert four.driver_of("0000:01:00.0") == "mlx5_core"
    assert ended.results() == dict.fromkeys(GPUS, "done")
    assert vfio_manage(four, "bind", "-a", "--output=json").require(0).results() == dict.fromkeys(GPUS, "already")
    assert (four.root / ORIGINALS).exists()
    vfio_manage(four, "unbind", "-all").require(0)
    assert drivers(four) == ["nvidia"] * 4
    assert four.driver_of(AUDIO) == "snd_hda_intel"
    assert {four.override_of(address) for address in (*GPUS, AUDIO)} == {"(null)"}
    assert not (four.root / ORIGINALS).exists()


def test_one_device_in_any_spelling(four: Tree) -> None:
    """One device with its companions, and no other."""
    vfio_manage(four, "bind", "-device-id=3B:00.0").require(0)
    assert drivers(four) == ["vfio-pci", "nvidia", "nvidia", "nvidia"]
    assert four.driver_of(AUDIO) == "vfio-pci"
    vfio_manage(four, "unbind", "-d=00000000:3b:00.0").require(0)
    assert drivers(four) == ["nvidia"] * 4


@pytest.mark.parametrize("action", ["bind", "unbind"])
def test_no_gpu_is_one_line(tree: Tree, action: str) -> None:
    """Where nothing is to be moved, nobody is warned of which driver it would get."""
    tree.gpu("0000:01:00.0", driver="mlx5_core", vendor="0x15b3", device_class="0x020000", group="9")
    ended = vfio_manage(tree, action, "--all", "--dry-run")
    assert ended.out == "no GPU of NVIDIA is here: nothing to do\n"
    assert "modules.alias" not in ended.err


def test_dry_run_changes_nothing(four: Tree) -> None:
    """It says what would be done; a refusal has its exit code there too."""
    ended = vfio_manage(four, "bind", "--all", "--dry-run").require(0)
    assert GPUS[0] in ended.out
    assert four.calls() == []
    assert not (four.root / ORIGINALS).exists()
    four.process(9, fds=["/dev/nvidia0"])
    assert "train" in vfio_manage(four, "bind", "--all", "--dry-run").require(75).err
    assert four.calls() == []


def test_without_a_note(tree: Tree) -> None:
    """A GPU that others had put on vfio comes off it; the kernel is asked for a driver unless it must not be."""
    tree.gpu(driver="vfio-pci")
    vfio_manage(tree, "unbind", "--all", "--no-probe").require(0)
    assert tree.driver_of("0000:3b:00.0") is None
    assert [call["arguments"][0].rpartition("/")[2] for call in tree.calls()] == ["unbind"]
    vfio_manage(tree, "unbind", "--all").require(0)


def test_a_native_driver_is_never_unbound(four: Tree) -> None:
    """Unbinding what is not on vfio writes nothing (W24)."""
    vfio_manage(four, "unbind", "--all").require(0)
    assert four.calls() == []


def test_no_gpu_is_no_failure(tree: Tree) -> None:
    """A machine without GPUs is done."""
    assert "nothing to do" in vfio_manage(tree, "bind", "--all").require(0).out


def test_virtual_functions_are_left_alone(four: Tree) -> None:
    """--all skips them; by their address they are moved."""
    (four.root / "sys/bus/pci/devices" / GPUS[3] / "physfn").symlink_to(f"../{GPUS[2]}")
    vfio_manage(four, "bind", "--all").require(0)
    assert drivers(four) == ["vfio-pci"] * 3 + ["nvidia"]
    vfio_manage(four, "bind", "-d", GPUS[3]).require(0)
    assert drivers(four) == ["vfio-pci"] * 4


@pytest.mark.parametrize(
    ("words", "env", "driver"),
    [
        ((), {}, "nvidia-nvswitch"),
        (("--bind-nvswitches",), {}, "vfio-pci"),
        ((), {"BIND_NVSWITCHES": "true"}, "vfio-pci"),
        (("--bind-nvswitches=false",), {"BIND_NVSWITCHES": "true"}, "nvidia-nvswitch"),
        ((), {"BIND_NVSWITCHES": ""}, "nvidia-nvswitch"),
    ],
)
def test_w29_nvswitches_on_demand(four: Tree, words: tuple[str, ...], env: dict[str, str], driver: str) -> None:
    """W29: a flag or the environment brings NVSwitches in, with --all and by their address."""
    four.gpu("0000:61:00.0", driver="nvidia-nvswitch", device_class="0x068000", group="20")
    vfio_manage(four, "bind", "--all", *words, env=env).require(0)
    assert four.driver_of("0000:61:00.0") == driver
    code = 0 if driver == "vfio-pci" else 65
    assert code == 0 or "bind-nvswitches" in vfio_manage(four, "bind", "-d", "0000:61:00.0", *words, env=env).require(code).err


# Drivers ------------------------------------------------------------------------------------------------------------


def test_w29_the_variant_driver_of_the_hosts_kernel(four: Tree) -> None:
    """W29: the host's modules.alias names the driver, modprobe loads it, each function gets its own."""
    four.file("lib/modules/6.8.0/modules.alias", "alias vfio_pci:v000010DEd00002941sv*sd*bc*sc*i* nvgrace_gpu_vfio_pci\n")
    four.file("run/modprobe.json", json.dumps({"drivers": {"nvgrace_gpu_vfio_pci": "nvgrace-gpu-vfio-pci"}}))
    four.file(f"sys/bus/pci/devices/{GPUS[0]}/modalias", GRACE + "\n")
    vfio_manage(four, "bind", "--all").require(0)
    assert drivers(four, (*GPUS[:2], AUDIO)) == ["nvgrace-gpu-vfio-pci", "vfio-pci", "vfio-pci"]


@pytest.mark.parametrize(("answer", "words"), [({"rc": 1}, "ended with 1"), ({}, "no PCI driver of that name"), (None, "no modprobe")])
def test_a_driver_that_cannot_be_loaded(tree: Tree, answer: dict[str, Any] | None, words: str) -> None:
    """It is said, and the GPU keeps its driver."""
    tree.gpu()
    for name in ("bind", "unbind"):
        (tree.root / "sys/bus/pci/drivers/vfio-pci" / name).unlink()
    (tree.root / "sys/bus/pci/drivers/vfio-pci").rmdir()
    if answer is not None:
        tree.file("run/modprobe.json", json.dumps(answer))
    assert words in vfio_manage(tree, "bind", "--all").require(71).err
    assert tree.driver_of("0000:3b:00.0") == "nvidia"


@pytest.mark.parametrize(("host_root", "argv"), [("/missing", ["modprobe"]), ("/host", ["chroot", "/host", "modprobe"])])
def test_w30_a_host_root_that_is_not_mounted(tree: Tree, host_root: str, argv: list[str]) -> None:
    """W30: modprobe runs in HOST_ROOT where there is one, else in the host's root, with a warning that names it."""
    tree.gpu()
    (tree.root / "host").mkdir()
    tree.file("run/modprobe.json", json.dumps({"drivers": {"vfio-pci": "vfio-pci"}}))
    for name in ("bind", "unbind"):
        (tree.root / "sys/bus/pci/drivers/vfio-pci" / name).unlink()
    (tree.root / "sys/bus/pci/drivers/vfio-pci").rmdir()
    ended = vfio_manage(tree, "bind", "--all", env={"HOST_ROOT": host_root}).require(0)
    assert [call["arguments"] for call in tree.calls() if call["call"] == "execve"] == [[*argv, "vfio-pci"]]
    assert ("HOST_ROOT=/missing" in ended.err) == (host_root == "/missing")


# Refusals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("bind",), 64, "exactly one"),
        (("bind", "--all", "-d", GPUS[0]), 64, "exactly one"),
        (("bind", "--nonsense"), 64, "nonsense"),
        (("frobnicate",), 64, "frobnicate"),
        (("bind", "-d", "0000:ff:00.0"), 78, "no PCI device 0000:ff:00.0"),
        (("bind", "-d", "rm -rf"), 78, "no PCI address"),
        (("bind", "-d", "0000:01:00.0"), 65, "no device of NVIDIA"),
        (("unbind", "-d", AUDIO), 65, GPUS[0]),
        (("bind", "--all=maybe"), 78, "maybe"),
        (("bind", "--all", "--device-timeout", "0"), 78, "above 0"),
    ],
)
def test_words_that_mean_nothing_here(four: Tree, words: tuple[str, ...], code: int, said: str) -> None:
    """Each has its exit code and says what is wrong; nothing is written."""
    assert said in vfio_manage(four, *words).require(code).err
    assert four.calls() == []


def test_help_is_no_failure(four: Tree) -> None:
    """Without a word it shows its help."""
    ended = vfio_manage(four)
    assert ended.code == 0
    assert "unbind" in ended.out


def test_a_group_with_a_strangers_device(four: Tree) -> None:
    """A GPU whose group holds another maker's device on its driver is refused by that device's name; the other GPUs go on."""
    four.gpu("0000:3b:00.4", driver="ice", vendor="0x8086", device_class="0x020000", group="1")
    ended = vfio_manage(four, "bind", "--all").require(65)
    assert "0000:3b:00.4 (ice)" in ended.err
    assert drivers(four) == ["nvidia", "vfio-pci", "vfio-pci", "vfio-pci"]
    assert four.driver_of(AUDIO) == "snd_hda_intel"


def test_without_an_iommu(tree: Tree) -> None:
    """Where the kernel makes no groups nothing is unbound first."""
    tree.gpu()
    (tree.root / "sys/kernel/iommu_groups").mkdir(parents=True)
    assert "IOMMU" in vfio_manage(tree, "bind", "--all").require(65).err
    assert tree.calls() == []


@pytest.mark.parametrize("action", ["bind", "unbind"])
def test_n37_a_gpu_that_a_machine_uses(four: Tree, action: str) -> None:
    """N37: a group that a virtual machine has open is not touched, its holder is named; the others come off; binding again is fine."""
    vfio_manage(four, "bind", "--all").require(0)
    four.process(4711, fds=["/dev/vfio/2", "/dev/vfio/vfio"], comm="qemu-system-x86", cgroup="0::/machine.slice/vm1.scope\n")
    before = len(unbinds(four))
    ended = vfio_manage(four, action, "--all").require(0 if action == "bind" else 75)
    if action == "bind":
        assert len(unbinds(four)) == before
        return
    assert drivers(four) == ["nvidia", "vfio-pci", "nvidia", "nvidia"]
    assert all(word in ended.err for word in (GPUS[1], "qemu-system-x86", "4711", "vm1.scope"))
    assert GPUS[1] not in unbinds(four)[before:]
    (four.root / "proc/4711").rename(four.root / "ended")
    vfio_manage(four, "unbind", "--all").require(0)
    assert drivers(four) == ["nvidia"] * 4


# Failures -----------------------------------------------------------------------------------------------------------


def test_n39_a_bind_that_fails_for_one_of_four(four: Tree) -> None:
    """N39: that GPU goes back to its former driver and override, the others are bound, and the exit code and the message name it."""
    four.faults({"call": "write", "argument": f"{BIND} {GPUS[1]}", "errno": "EIO"})
    ended = vfio_manage(four, "bind", "--all", "--output", "json").require(71)
    assert drivers(four) == ["vfio-pci", "nvidia", "vfio-pci", "vfio-pci"]
    assert four.override_of(GPUS[1]) == "(null)"
    assert ended.results() == dict.fromkeys(GPUS, "done") | {GPUS[1]: "failed"}
    assert GPUS[1] in ended.err
    four.faults()
    vfio_manage(four, "unbind", "--all").require(0)
    assert drivers(four) == ["nvidia"] * 4


def test_n39_a_companion_that_fails_takes_its_gpu_back(four: Tree) -> None:
    """N39: a GPU and its audio are moved together or not at all."""
    four.faults({"call": "write", "argument": f"{BIND} {AUDIO}", "errno": "EBUSY"})
    vfio_manage(four, "bind", "-d", GPUS[0]).require(71)
    assert drivers(four, (GPUS[0], AUDIO)) == ["nvidia", "snd_hda_intel"]
    assert not (four.root / ORIGINALS).exists()


def test_n39_a_gpu_without_a_driver_is_a_start(tree: Tree) -> None:
    """N39: a driverless GPU, as an agent that was killed leaves it, is bound."""
    tree.gpu(driver=None)
    vfio_manage(tree, "bind", "--all").require(0)
    assert tree.driver_of("0000:3b:00.0") == "vfio-pci"


def test_n39_a_write_that_does_not_come_back(four: Tree) -> None:
    """N39: a FIFO as the driver's unbind file: each device is given up in its time and named, and nothing else is written to it."""
    four.gpu("0000:d8:00.0", driver=None, group="30")
    (four.root / "sys/bus/pci/drivers/nvidia/unbind").unlink()
    os.mkfifo(four.root / "sys/bus/pci/drivers/nvidia/unbind")
    began = time.monotonic()
    ended = vfio_manage(four, "bind", "--all", "--device-timeout", "500ms", "--output", "json").require(71)
    assert time.monotonic() - began < 20
    assert ended.results() == {**dict.fromkeys(GPUS, "stuck"), "0000:d8:00.0": "done"}
    assert all(address in ended.err for address in GPUS)
    assert four.driver_of("0000:d8:00.0") == "vfio-pci"


def test_n39_killed_between_unbind_and_bind(four: Tree) -> None:
    """N39: after SIGKILL in the middle the note is there: a bind goes on, an unbind gives the former driver back."""
    four.faults({"call": "write", "argument": f"{BIND} {GPUS[1]}", "hold": True})
    environment = {"PATH": os.environ["PATH"], "DRIVER_MANAGER_HOST_TREE": str(four.root)}
    with subprocess.Popen([COMMAND, "bind", "-d", GPUS[1]], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        deadline = time.monotonic() + 20
        while not (four.root / "held.json").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.kill()
        process.communicate(timeout=10)
    four.faults()
    assert four.driver_of(GPUS[1]) is None
    vfio_manage(four, "unbind", "--all").require(0)
    assert drivers(four) == ["nvidia"] * 4
    assert four.override_of(GPUS[1]) == "(null)"


def test_a_signal_ends_it_between_two_devices(four: Tree) -> None:
    """SIGTERM: what is begun is brought to its end, the rest is reported as not begun, exit 75."""
    four.faults({"call": "write", "argument": f"{BIND} {GPUS[1]}", "hold": True})
    environment = {"PATH": os.environ["PATH"], "DRIVER_MANAGER_HOST_TREE": str(four.root)}
    with subprocess.Popen([COMMAND, "bind", "--all"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + 20
        while not (four.root / "held.json").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        four.faults()
        process.communicate(timeout=20)
    assert process.returncode == 75
    assert drivers(four) == ["vfio-pci", "vfio-pci", "nvidia", "nvidia"]


def test_one_odd_device_hides_no_other(four: Tree) -> None:
    """W29: a function that cannot be read is left out and named."""
    (four.root / "sys/bus/pci/devices/0000:99:00.0").mkdir()
    assert "0000:99:00.0" in vfio_manage(four, "bind", "--all").require(0).err
    assert drivers(four) == ["vfio-pci"] * 4
