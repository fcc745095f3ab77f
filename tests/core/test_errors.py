"""Errors and what people read about them agree."""

import re
from pathlib import Path

import pytest

from driver_manager import errors
from driver_manager.errors import DriverManagerError, Exit

ROOT = Path(__file__).resolve().parents[2]
ALL = sorted(
    (each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, DriverManagerError)),
    key=lambda each: each.__name__,
)


@pytest.mark.parametrize("error", ALL, ids=lambda each: each.__name__)
def test_every_reason_is_told_on_call(error: type[DriverManagerError]) -> None:
    """The page for the person on call has a row for the reason of every error."""
    rows = [
        line.partition("|")[2].partition("|")[0] for line in (ROOT / "docs/on-call.md").read_text().splitlines() if line.startswith("| `")
    ]
    assert f"`{error.reason}`" in " ".join(rows)


def test_the_readme_tells_every_exit_code() -> None:
    """The README's table is the one in the code: the same codes, each with its sentence."""
    table = dict(re.findall(r"^\| (\d+) \| (.+?) \|", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert set(table) == {str(int(code)) for code in Exit}
    source = (ROOT / "driver_manager/errors.py").read_text()
    for code in Exit:
        sentence = re.search(rf'^    {code.name} = {int(code)}\n    """(.+?)"""', source, re.MULTILINE | re.DOTALL)
        assert sentence is not None
        assert table[str(int(code))].rstrip(".") == " ".join(sentence[1].split()).rstrip(".")
