"""The decorators of tests that run in the guest. Importable on both sides: the guest has no pytest."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

IN_GUEST = "VMTEST_GUEST" in os.environ
LIMIT_SECONDS = 60
"""For one test in the guest; they take one or two."""

Test = Callable[..., Any]


def vm(test: Test) -> Test:
    """Marks a test that uses a guest from outside."""
    if IN_GUEST:
        return test
    import pytest

    marked: Test = pytest.mark.vm(pytest.mark.timeout(300)(test))  # it may be the first, which boots
    return marked


def runs_in(fixture: str, limit: float = LIMIT_SECONDS) -> Callable[[Test], Test]:
    """Makes a function without parameters a test that runs in a fresh guest, `limit` seconds at most.

    Here it becomes a test that asks the guest of a fixture to run it; in the guest it is what it was. It may be a coroutine. What it
    asserts comes back with the values of its names.
    """

    def decorate(test: Test) -> Test:
        if IN_GUEST:
            return test

        def run(**fixtures: Any) -> None:
            fixtures[fixture].call(test.__module__, test.__name__, timeout=limit)

        functools.update_wrapper(run, test)
        run.__dict__.pop("__wrapped__")  # its signature counts for pytest, and that it is no coroutine
        parameter = inspect.Parameter(fixture, inspect.Parameter.KEYWORD_ONLY)
        run.__dict__["__signature__"] = inspect.Signature([parameter])
        return vm(run)

    return decorate


in_guest = runs_in("guest")
"""A test in a plain guest: nothing loaded, two emulated cards."""
