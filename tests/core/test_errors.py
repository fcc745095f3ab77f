"""Errors and what people read about them agree."""

import re
from pathlib import Path

import pytest

from driver_manager import errors
from driver_manager.core.consumers import Reason
from driver_manager.core.uses import Evidence
from driver_manager.errors import DriverManagerError, Exit

ROOT = Path(__file__).resolve().parents[2]
ALL = sorted(
    (each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, DriverManagerError)),
    key=lambda each: each.__name__,
)


def told_on_call() -> str:
    """The first column of the tables of the page for the person on call."""
    lines = (ROOT / "docs/on-call.md").read_text().splitlines()
    return " ".join(line.partition("|")[2].partition("|")[0] for line in lines if line.startswith("| `"))


@pytest.mark.parametrize("error", ALL, ids=lambda each: each.__name__)
def test_every_reason_is_told_on_call(error: type[DriverManagerError]) -> None:
    """The page for the person on call has a row for the reason of every error."""
    assert f"`{error.reason}`" in told_on_call()


@pytest.mark.parametrize("reason", [*Reason, *Evidence])
def test_every_verdict_is_told_on_call(reason: Reason | Evidence) -> None:
    """And one for every reason that a pod's verdict can have."""
    assert f"`{reason}`" in told_on_call()


def test_the_readme_tells_every_exit_code() -> None:
    """The README's table is the one in the code: the same codes, each with its sentence."""
    table = dict(re.findall(r"^\| (\d+) \| (.+?) \|", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert set(table) == {str(int(code)) for code in Exit}
    source = (ROOT / "driver_manager/errors.py").read_text()
    for code in Exit:
        sentence = re.search(rf'^    {code.name} = {int(code)}\n    """(.+?)"""', source, re.MULTILINE | re.DOTALL)
        assert sentence is not None
        assert table[str(int(code))].rstrip(".") == " ".join(sentence[1].split()).rstrip(".")


def test_the_page_on_call_has_a_place_for_every_exit_code() -> None:
    """Whoever has only an exit code finds where to look, and every place that is named there exists."""
    text = (ROOT / "docs/on-call.md").read_text()
    rows = dict(re.findall(r"^\| (\d+) \| (.+) \|$", text, re.MULTILINE))
    assert set(rows) == {str(int(code)) for code in Exit}
    titles = [line.lstrip("# ").lower() for line in text.splitlines() if line.startswith("#")]
    headings = {re.sub(r"[^a-z0-9 -]", "", title).replace(" ", "-") for title in titles}
    assert {anchor for row in rows.values() for anchor in re.findall(r"\(#(.+?)\)", row)} <= headings
