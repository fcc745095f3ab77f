"""What the documents say of the program is what the program says of itself."""

from __future__ import annotations

import tomllib

import pytest

from driver_manager import __version__
from driver_manager.config import OPTIONS
from tests.cli.documents import PARTS, ROOT, made


@pytest.mark.parametrize("path", sorted({document for document, _ in PARTS}))
def test_made_parts_are_as_made(path: str) -> None:
    """No document is behind the program: `scripts/docs` would change nothing."""
    text = (ROOT / path).read_text()
    assert made(path, text) == text, "run scripts/docs"


def test_the_page_tells_every_setting() -> None:
    """Each variable, flag, default and allowed value is on the page of settings."""
    rows = {line.split("|")[1].strip(): line for line in (ROOT / "docs/settings.md").read_text().splitlines() if line.startswith("| `")}
    for option in OPTIONS:
        row = rows[f"`{option.env}`"]
        assert option.default in row
        assert option.kind.allowed in row
        assert not option.flag or f"`--{option.flag}`" in row


def test_the_version_is_that_of_the_package() -> None:
    """`--version` also works from a checkout that is installed nowhere, so it is a constant; the wheel has the same."""
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == __version__
