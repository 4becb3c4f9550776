"""Backends by name."""

from __future__ import annotations

import pytest

from torch_ltc.errors import BackendError, UnknownBackendError
from torch_ltc.lowering.interface import Backend, Computation
from torch_ltc.lowering.registry import Registry, registry
from torch_ltc.program.instruction import Program


class Nothing(Backend):
    name = "nothing"

    def compile(self, program: Program) -> Computation:
        raise NotImplementedError


def test_backends_in_the_box_are_registered() -> None:
    assert {"interpreter", "torchscript"} <= set(registry.names())
    assert registry.reference is registry.get("interpreter")


def test_registered_backend_is_found_by_its_name() -> None:
    own = Registry()
    backend = Nothing()
    own.register(backend, reference=True)
    assert own.get("nothing") is backend
    assert own.reference is backend
    assert own.names() == ["nothing"]


def test_a_second_backend_of_a_name_is_refused() -> None:
    own = Registry()
    own.register(Nothing())
    with pytest.raises(BackendError, match="a backend named 'nothing' is registered already"):
        own.register(Nothing())


def test_unknown_backend_is_refused_with_the_known_names() -> None:
    with pytest.raises(
        UnknownBackendError, match=r"no backend named 'x'\n  try: one of: inductor, interpreter, null, torchscript, xla"
    ):
        registry.get("x")


def test_a_registry_without_a_reference_says_so() -> None:
    with pytest.raises(BackendError, match="no reference backend"):
        _ = Registry().reference
