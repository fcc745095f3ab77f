"""Builds the image once for all tests."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.image.container import ROOT, Image


@pytest.fixture(scope="session")
def image() -> Image:
    """The image of this tree, built now. Without a builder: skipped, or an error when CI=true."""
    prepared = subprocess.run([ROOT / "images/prepare"], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if prepared.returncode:
        reason = f"no image can be built here: {prepared.stderr.strip()}"
        if os.environ.get("CI") == "true":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    built = subprocess.run([ROOT / "images/build"], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if built.returncode:
        pytest.fail(f"the image does not build:\n{built.stderr[-4000:]}", pytrace=False)
    return Image(built.stdout.strip())
