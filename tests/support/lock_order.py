"""Pytest in a process that verifies in every test that locks are taken in the order that is written down.

    python -m tests.support.lock_order tests/semantics/test_threads.py

Pytest imports the package before any plugin: its locks are watched from before that.
"""

from __future__ import annotations

import sys
from collections.abc import Generator

import pytest

from tests.support import checked_locks


class LockOrder:
    """Fails the test in which a lock was taken out of order."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Generator[None]:
        """Look at what was taken in this test."""
        yield
        wrong = checked_locks.out_of_order()
        if wrong:
            pytest.fail("\n".join(wrong))


if __name__ == "__main__":
    checked_locks.install()
    sys.exit(pytest.main(sys.argv[1:], plugins=[LockOrder()]))
