"""Upgrade-policy fields in an annotation of the custom resource, for a CRD in use that does not have them and drops them without a word.

The value is YAML or JSON of the same shape as the resource's own `upgradePolicy`, and is merged over it, field by field. What was dropped
shows only in what kubectl notes of the last `apply`; that is compared too, so that a person hears of it.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from driver_manager.core.policy_text import plain_values
from driver_manager.core.upgrade_policy import BadPolicy
from driver_manager.names import POLICY

MAX_CHARACTERS: Final = 16 * 1024


def with_annotation(own: Mapping[str, Any] | None, text: str | None) -> Mapping[str, Any] | None:
    """A resource's policy with its annotation's fields over its own; None where neither says anything.

    Raises:
        BadPolicy: the annotation cannot be read. Whether its fields are valid is found when the whole is.
    """
    if text is None or not text.strip():
        return own
    return _merged(own or {}, _read(text))


def _read(text: str) -> Mapping[str, Any]:
    what = f"the annotation {POLICY}"
    if len(text) > MAX_CHARACTERS:
        raise BadPolicy((f"{what} is {len(text)} characters long, more than {MAX_CHARACTERS}",))
    try:
        raw = plain_values(text)
    except ValueError as error:
        raise BadPolicy((f"{what} is neither YAML nor JSON: {error}",)) from error
    if not isinstance(raw, dict):
        raise BadPolicy((f"{what} is no object of policy fields",))
    return raw


def _merged(own: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(own)
    for key, value in over.items():
        there = merged.get(key)
        merged[key] = _merged(there, value) if isinstance(there, Mapping) and isinstance(value, Mapping) else value
    return merged


def dropped_fields(applied: Mapping[str, Any] | None, there: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Paths that were applied and that are not in the policy with its annotation: the CRD does not have them, or somebody took them off."""
    known = {path for path, _ in _leaves(there or {})}
    return tuple(sorted(path for path, value in _leaves(applied or {}) if value is not None and path not in known))


def _leaves(raw: Mapping[str, Any], path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    for key, value in raw.items():
        if isinstance(value, Mapping) and depth < 4:
            yield from _leaves(value, f"{path}{key}.", depth + 1)
        else:
            yield f"{path}{key}", value


def dropped_words(fields: tuple[str, ...]) -> str:
    """The sentence for people; empty where nothing was."""
    if not fields:
        return ""
    named = ", ".join(fields[:5]) + (f" and {len(fields) - 5} more" if len(fields) > 5 else "")
    return (
        f"{named}: applied, and not in the resource: the installed CRD drops a field that it does not have (else somebody took it off); "
        f"the annotation {POLICY} keeps it"
    )
