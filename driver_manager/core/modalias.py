"""Which vfio driver a PCI function wants: modaliases, and the kernel's table of them, as plain text turned into values.

Some GPUs need a vfio driver of their own (a variant); the kernel's packages say which in `modules.alias`, on lines that begin with
`alias vfio_pci:`. The format is that of Documentation/ABI/testing/sysfs-bus-pci and scripts/mod/file2alias.c (do_pci_entry).
"""

import re
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Final

ANY: Final = "*"
PLAIN_VFIO: Final = "vfio-pci"
"""The driver for every function that no variant is made for."""
_FIELD: Final = re.compile(r"\*|[0-9A-F]+")
_MARKS: Final = ("d", "sv", "sd", "bc", "sc", "i")
"""What stands before each field but the first; hexadecimal digits are written in capitals."""


@dataclass(frozen=True, slots=True)
class Modalias:
    """What a function is, or what a driver is made for; each field is a number in hexadecimal digits or `*`."""

    vendor: str
    device: str
    subvendor: str
    subdevice: str
    base_class: str
    sub_class: str
    interface: str


@dataclass(frozen=True, slots=True)
class Alias:
    """One line of modules.alias: the module, and the functions it is made for."""

    pattern: Modalias
    module: str


def parse_modalias(text: str) -> Modalias:
    """Reads `pci:v<8>d<8>sv<8>sd<8>bc<2>sc<2>i<2>`; what stands before the colon is any bus.

    Raises:
        ValueError: it is none.
    """
    _, colon, rest = text.strip().partition(":")
    if not colon or not rest.startswith("v"):
        raise ValueError(f"{text!r} is no modalias of a PCI function")
    fields: list[str] = []
    rest = rest[1:]
    for mark in _MARKS:
        value, found, rest = rest.partition(mark)
        if not found:
            raise ValueError(f"{text!r} lacks the part {mark!r}")
        fields.append(value)
    fields.append(rest)
    if bad := [value for value in fields if not _FIELD.fullmatch(value)]:
        raise ValueError(f"{text!r} has the part {bad[0]!r}, which is no number")
    return Modalias(*fields)


def parse_aliases(text: str) -> tuple[Alias, ...]:
    """The vfio drivers' lines of a modules.alias text, in its order; lines that cannot be understood are left out."""
    found = []
    for line in text.split("\n"):
        parts = line.split(" ")
        if len(parts) != 3 or parts[0] != "alias" or not parts[1].startswith("vfio_pci:"):
            continue
        try:
            found.append(Alias(parse_modalias(parts[1]), parts[2]))
        except ValueError:
            continue
    return tuple(found)


def wildcards(pattern: Modalias, device: Modalias) -> int | None:
    """How many parts of the pattern match anything; None if it does not match the device."""
    pairs: list[tuple[str, str]] = list(zip(astuple(pattern), astuple(device), strict=True))
    if any(wanted not in (ANY, value) for wanted, value in pairs):
        return None
    return [wanted for wanted, _ in pairs].count(ANY)


def vfio_driver(modalias: str, aliases: Iterable[Alias]) -> str:
    """The module of the vfio driver for a function: the most particular variant, of equals the first, else plain vfio-pci.

    A modalias that cannot be read matches no variant.
    """
    try:
        device = parse_modalias(modalias)
    except ValueError:
        return PLAIN_VFIO
    fits = [(count, alias.module) for alias in aliases if (count := wildcards(alias.pattern, device)) is not None]
    module = min(fits, key=lambda fit: fit[0])[1] if fits else PLAIN_VFIO
    return PLAIN_VFIO if is_same_driver(module, PLAIN_VFIO) else module


def is_same_driver(one: str | None, other: str | None) -> bool:
    """Whether two names mean one driver: modules have `_` where drivers may have `-`."""
    return one is not None and other is not None and one.replace("-", "_") == other.replace("-", "_")


def is_vfio(driver: str | None) -> bool:
    """Whether a driver is one that hands functions to virtual machines: vfio-pci or a variant of it."""
    return driver is not None and "vfio" in driver
