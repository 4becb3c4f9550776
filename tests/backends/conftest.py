"""Marks tests that compile with Inductor or need JAX: `make test` leaves them out, `make test-backends` runs them."""

import pytest

COMPILED = ("test_inductor", "test_training", "/xla/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/backends/" in item.path.as_posix() and any(name in item.path.as_posix() for name in COMPILED):
            item.add_marker(pytest.mark.compilers)
