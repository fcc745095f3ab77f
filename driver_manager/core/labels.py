"""Pausing an operand and putting it back, as far as label values are concerned.

A paused label has NVIDIA's plain token as its value, so that every tool of theirs understands it; the original value is in the record.
Values that upstream's program left behind follow its own rules, table 1.3 of the specification.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from driver_manager.names import DEPLOY_CLIENT, FOREIGN_PAUSE_PREFIX, PAUSED
from driver_manager.operands import OPERANDS, Turn

_VALUE: Final = re.compile(r"(?:[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")


@dataclass(frozen=True, slots=True)
class LabelsToPause:
    """What to pause on a node."""

    first: Mapping[str, str] = field(default_factory=dict)
    """Label -> original value, of all that goes together."""
    last: Mapping[str, str] = field(default_factory=dict)
    """Label -> original value, of what goes after the pods it serves."""
    guessed: tuple[str, ...] = ()
    """Labels that were paused already, by a program that left no record: their original is a guess."""
    foreign: tuple[str, ...] = ()
    """Labels that another tool has paused: to wait for."""

    @property
    def all(self) -> Mapping[str, str]:
        """Both turns together."""
        return {**self.first, **self.last}


def is_label_value(text: str) -> bool:
    """Whether a label can have this value: https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/#syntax-and-character-set."""
    return _VALUE.fullmatch(text) is not None


def original_of_paused(value: str) -> str:
    """The value that a label paused by upstream's program had before, as that program would put it back.

    `paused-for-driver-upgrade` was `true`; in any other value the token, with one underscore after it, is an addition, and underscores at
    both ends go.
    """
    if value == PAUSED:
        return "true"
    return value.replace(PAUSED + "_", "").replace(PAUSED, "").strip("_")


def is_paused(value: str) -> bool:
    """Whether a label's value says that the operand is paused for a driver change."""
    return PAUSED in value


def is_paused_by_another(value: str) -> bool:
    """Whether another tool has paused the operand for a purpose of its own."""
    return value.startswith(FOREIGN_PAUSE_PREFIX) and not is_paused(value)


def labels_to_pause(
    labels: Mapping[str, str],
    custom: str,
    recorded: Mapping[str, str],
    *,
    more: Collection[str] = (),
    last: Collection[str] = (),
    others: Collection[str] = (),
) -> LabelsToPause:
    """What has to be paused on a node, with the values to put back.

    Only operands that run (`true`) are paused; the client's and the user's own label whatever their value, `false` aside.

    Args:
        labels: of the node.
        custom: the user's own label key, or empty.
        recorded: originals from a record of an earlier run, which win over guesses.
        more: further deploy labels that users of the driver select.
        last: labels that a DRA plugin selects: it goes last, whatever its mark (decision 46).
        others: labels that the controller has paused and puts back itself.
    """
    clients = {DEPLOY_CLIENT, custom, *more} - {""}
    turns = {operand.label: operand.turn for operand in OPERANDS} | dict.fromkeys(sorted(clients), Turn.FIRST)
    turns |= {operand.label: operand.turn for operand in OPERANDS} | dict.fromkeys(last, Turn.LAST)
    originals: dict[Turn, dict[str, str]] = {Turn.FIRST: {}, Turn.LAST: {}}
    guessed, foreign = [], []
    for key, turn in turns.items():
        value = labels.get(key, "")
        if key in others and is_paused(value):
            continue
        if is_paused_by_another(value):
            foreign.append(key)
        elif is_paused(value):
            if key not in recorded:
                guessed.append(key)
            originals[turn][key] = recorded.get(key) or original_of_paused(value)
        elif value == "true" or (key in clients and value not in ("", "false")):
            originals[turn][key] = value
    return LabelsToPause(originals[Turn.FIRST], originals[Turn.LAST], tuple(guessed), tuple(foreign))
