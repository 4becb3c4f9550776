"""Marks tests that compile with Inductor or need JAX: `make test` leaves them out, `make test-backends` runs them."""

import importlib.util

import pytest

# The tests of XLA import JAX, which `make test` does not install.
collect_ignore = [] if importlib.util.find_spec("jax") is not None else ["xla"]
COMPILED = ("test_inductor", "test_disk_inductor", "test_training", "/xla/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/backends/" in item.path.as_posix() and any(name in item.path.as_posix() for name in COMPILED):
            item.add_marker(pytest.mark.compilers)
