"""Nothing here: the fixtures are in fixtures.py, a plugin of tests/conftest.py, so that all folders share one control plane per worker.

Never import a fixture from there: an imported session fixture is another one, with another control plane.
"""
