"""For the fact tests: latencies are noted, not asserted, for they depend on the machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Note = Callable[[str, Any], None]


@pytest.fixture
def note(record_property: Callable[[str, object], None]) -> Note:
    """Keeps a measured fact: shown with `pytest -rP`, and in the report of --junit-xml. Lists of seconds are summed up."""

    def keep(key: str, value: Any) -> None:
        if isinstance(value, list) and value and all(isinstance(one, float) for one in value):
            ms = sorted(round(one * 1000) for one in value)
            value = f"min {ms[0]} median {ms[len(ms) // 2]} max {ms[-1]} ms (n={len(ms)})"
        print(f"FACT {key}: {value}")
        record_property(key, value)

    return keep
