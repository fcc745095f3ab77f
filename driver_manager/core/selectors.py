"""Label selectors as `kubectl --selector` takes them.

The grammar: https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/#label-selectors
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_NAME: Final = r"[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_KEY: Final = rf"(?:[a-z0-9](?:[-a-z0-9.]{{0,251}}[a-z0-9])?/)?{_NAME}"
_SET: Final = re.compile(rf"\s*({_KEY})\s+(in|notin)\s*\(([^()]*)\)\s*")
_EQUALITY: Final = re.compile(rf"\s*({_KEY})\s*(==|=|!=)\s*({_NAME})?\s*")
_EXISTENCE: Final = re.compile(rf"\s*(!?)\s*({_KEY})\s*")
_VALUE: Final = re.compile(rf"({_NAME})?")


@dataclass(frozen=True, slots=True)
class Requirement:
    """One condition on one label."""

    key: str
    operator: str
    """`in`, `notin`, `exists` or `absent`."""
    values: frozenset[str] = frozenset()

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether the labels meet it."""
        match self.operator:
            case "in":
                return labels.get(self.key) in self.values
            case "notin":
                return labels.get(self.key) not in self.values
            case "exists":
                return self.key in labels
            case _:
                return self.key not in labels


@dataclass(frozen=True, slots=True)
class Selector:
    """A conjunction of requirements; without any it matches everything."""

    requirements: tuple[Requirement, ...] = ()
    text: str = ""

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether labels meet all requirements."""
        return all(requirement.matches(labels) for requirement in self.requirements)


def parse_selector(text: str) -> Selector:
    """Reads a selector.

    Raises:
        ValueError: with the part that does not parse.
    """
    if not text.strip():
        return Selector()
    return Selector(tuple(_requirement(part) for part in _split(text)), text.strip())


def _split(text: str) -> list[str]:
    """The parts between commas, those inside parentheses left together."""
    return re.split(r",(?![^()]*\))", text)


def _requirement(part: str) -> Requirement:
    if found := _SET.fullmatch(part):
        key, operator, listed = found.groups()
        values = [value.strip() for value in listed.split(",")]
        if not all(_VALUE.fullmatch(value) for value in values):
            raise ValueError(f"{part.strip()!r} has a value that no label can have")
        return Requirement(key, operator, frozenset(values))
    if found := _EQUALITY.fullmatch(part):
        key, sign, value = found.groups()
        return Requirement(key, "notin" if sign == "!=" else "in", frozenset({value or ""}))
    if found := _EXISTENCE.fullmatch(part):
        negated, key = found.groups()
        return Requirement(key, "absent" if negated else "exists")
    raise ValueError(f"{part.strip()!r} is not a label selector")
