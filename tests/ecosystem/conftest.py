"""Real libraries on the device. What is not installed is skipped: `make test-ecosystem` installs all of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.ecosystem import support


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--figures", type=Path, metavar="FILE", help="write what the libraries cost to FILE")
    for name, project in (("--nanogpt", "karpathy/nanoGPT"), ("--examples", "pytorch/examples")):
        parser.addoption(name, type=Path, metavar="DIR", help=f"run the scripts of {project}, checked out in DIR")


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--figures", None)
    if path is not None:
        support.write(path)


@pytest.fixture(autouse=True)
def _libraries_may_warn(recwarn: pytest.WarningsRecorder) -> None:
    """Warnings of other packages about themselves are theirs."""


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Nothing that `torch.compile` has traced before counts, and nothing is left."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
