"""Directory trees laid out like a host's root, made piece by piece."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Tree:
    """A host tree under construction, with what a test wants to read back."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def file(self, path: str, text: str = "") -> Path:
        """Writes a file with its folders."""
        where = self.root / path
        where.parent.mkdir(parents=True, exist_ok=True)
        where.write_text(text)
        return where

    def link(self, path: str, target: str) -> None:
        """Makes a link with its folders."""
        where = self.root / path
        where.parent.mkdir(parents=True, exist_ok=True)
        where.symlink_to(target)

    def module(self, name: str, *, holders: Sequence[str] = (), users: int = 0, state: str = "live", version: str = "550.54.15") -> None:
        """Adds a loaded module; `users` are those that are no modules."""
        folder = f"sys/module/{name}"
        count = len(holders) + users
        self.file(f"{folder}/refcnt", f"{count}\n")
        self.file(f"{folder}/initstate", f"{state}\n")
        self.file(f"{folder}/version", f"{version}\n")
        (self.root / folder / "holders").mkdir()
        for holder in holders:
            self.link(f"{folder}/holders/{holder}", f"../../{holder}")
        line = f"{name} 16384 {count} {','.join(holders) + ',' if holders else '-'} Live 0xffffffffc0218000 (OE)\n"
        modules = self.root / "proc/modules"
        self.file("proc/modules", (modules.read_text() if modules.exists() else "") + line)

    def mounts(self, *targets: str) -> None:
        """Writes mountinfo for process 1 and self: each mount lies in the one before it, or on the root."""
        lines = ["21 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n"]
        for index, target in enumerate(targets):
            lines.append(f"{30 + index} 21 0:{40 + index} / {target} rw,relatime shared:{9 + index} - overlay overlay rw\n")
        for who in ("1", "self"):
            self.file(f"proc/{who}/mountinfo", "".join(lines))

    def targets(self, who: str = "1") -> list[str]:
        """What is mounted now below the driver root."""
        lines = (self.root / f"proc/{who}/mountinfo").read_text().splitlines()
        return [line.split()[4] for line in lines if "/run/nvidia/driver" in line]

    def process(
        self, pid: int, *, fds: Sequence[str] = (), maps: str = "", cgroup: str = "0::/\n", comm: str = "train", state: str = "S"
    ) -> None:
        """Adds a process with open files."""
        base = f"proc/{pid}"
        self.file(f"{base}/comm", f"{comm}\n")
        self.file(f"{base}/maps", maps or "55ef-55f0 r-xp 00000000 08:01 99 /usr/bin/train\n")
        self.file(f"{base}/cgroup", cgroup)
        self.file(f"{base}/stat", f"{pid} ({comm}) {state} 1 1 1 0 -1 4194304 0 0 0 0 0 0 0 0 20 0 1 0 100 1 1\n")
        (self.root / base / "fd").mkdir()
        for number, target in enumerate(fds):
            self.link(f"{base}/fd/{number}", target)

    def end_process(self, pid: int) -> None:
        """A process ends: its folder goes all at once."""
        ended = self.root.parent / f"{self.root.name}-ended-{pid}"
        (self.root / f"proc/{pid}").rename(ended)
        shutil.rmtree(ended)

    def gpu(
        self,
        address: str = "0000:3b:00.0",
        *,
        driver: str | None = "nvidia",
        vendor: str = "0x10de",
        device_class: str = "0x030200",
        group: str | None = None,
        modalias: str = "",
    ) -> None:
        """Adds a PCI function and, if need be, its driver."""
        base = f"sys/bus/pci/devices/{address}"
        self.file(f"{base}/vendor", f"{vendor}\n")
        self.file(f"{base}/class", f"{device_class}\n")
        self.file(f"{base}/modalias", f"{modalias}\n")
        if group is not None:
            (self.root / "sys/kernel/iommu_groups" / group).mkdir(parents=True, exist_ok=True)
            self.link(f"{base}/iommu_group", f"../../../../kernel/iommu_groups/{group}")
        self.file(f"{base}/driver_override", "(null)\n")
        for name in {"vfio-pci", "nvidia", *([driver] if driver else [])}:
            for action in ("bind", "unbind"):
                self.file(f"sys/bus/pci/drivers/{name}/{action}")
        self.file("sys/bus/pci/drivers_probe")
        if driver:
            self.link(f"{base}/driver", f"../../drivers/{driver}")
            self.link(f"sys/bus/pci/drivers/{driver}/{address}", f"../../devices/{address}")

    def driver_of(self, address: str) -> str | None:
        """The driver that a PCI function is bound to now."""
        link = self.root / "sys/bus/pci/devices" / address / "driver"
        return link.readlink().name if link.is_symlink() else None

    def override_of(self, address: str) -> str:
        """Its driver override, as the file reads."""
        return (self.root / "sys/bus/pci/devices" / address / "driver_override").read_text().strip()

    def faults(self, *entries: dict[str, Any]) -> None:
        """Writes faults.json, whole or not at all."""
        self.file("faults.new", json.dumps(list(entries))).replace(self.root / "faults.json")

    def calls(self) -> list[dict[str, Any]]:
        """What was called so far."""
        log = self.root / "calls.jsonl"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    def results(self) -> list[tuple[str, Any, Any]]:
        """Call, first argument and result of each call."""
        return [(call["call"], call["arguments"][0], call["result"]) for call in self.calls()]
