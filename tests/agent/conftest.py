"""Which worlds and how many seeds a test gets."""

import pytest

from tests.agent.worlds import DEEP, QUICK


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Gives tests that ask for `make` each world, and tests that ask for `seed` a number of seeds; more of both with --deep."""
    is_deep = metafunc.config.getoption("deep")
    if "make" in metafunc.fixturenames:
        metafunc.parametrize("make", DEEP if is_deep else QUICK, ids=lambda world: world.__name__)
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(2000 if is_deep else 60))
