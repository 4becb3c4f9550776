"""Fixtures of the semantics tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import torch_ltc
from tests.semantics.support import BACKENDS, probe
from tests.support.backends import SymbolicBackend, registered
from torch_ltc.compile import program_cache
from torch_ltc.config import settings
from torch_ltc.program.instruction import Program


@pytest.fixture(autouse=True)
def clean_device() -> Iterator[None]:
    """Every test begins with nothing pending and leaves no error behind that it did not look at."""
    torch_ltc.sync(wait=True)
    probe.reset()
    yield
    probe.reset()
    torch_ltc.sync(wait=True)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each backend in turn."""
    with settings.scope(backend=request.param):
        yield request.param
        torch_ltc.sync(wait=True)


@pytest.fixture
def same_backend_afterwards() -> Iterator[None]:
    """No program is known from before, and the test leaves the backend as it found it."""
    before = settings.backend
    torch_ltc.ir_cache.reset()
    yield
    torch_ltc.sync(wait=True)
    assert settings.backend == before


@pytest.fixture
def no_fallback() -> Iterator[None]:
    """An operation that cannot be recorded is an error."""
    with settings.scope(fallback="error"):
        yield


@pytest.fixture
def equal_fingerprints(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every program has the same fingerprint, and no program is known from before."""

    def constant(program: Program) -> bytes:
        return b"the same for all"

    torch_ltc.ir_cache.reset()
    monkeypatch.setattr(program_cache, "fingerprint", constant)
    yield
    torch_ltc.ir_cache.reset()


@pytest.fixture(params=["own fingerprints", "equal fingerprints"])
def any_fingerprints(request: pytest.FixtureRequest) -> None:
    """The test runs twice: as things are, and with every fingerprint forced to the same value."""
    if request.param == "equal fingerprints":
        request.getfixturevalue("equal_fingerprints")


@pytest.fixture
def nothing_known() -> Iterator[None]:
    """No program is known from an earlier test."""
    torch_ltc.ir_cache.reset()
    yield
    torch_ltc.ir_cache.reset()


@pytest.fixture(params=["torchscript", "symbolic"])
def sharing(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each backend that takes programs which stand for many; none may refuse a program."""
    backend = SymbolicBackend()
    with registered(backend), settings.scope(backend=request.param, backend_failure="error", tiers="blocking"):
        yield request.param
        torch_ltc.sync(wait=True)
