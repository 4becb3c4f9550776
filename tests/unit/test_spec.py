"""Shapes: one object each, with the facts that recording asks for."""

from __future__ import annotations

import pytest
import torch

from torch_ltc.program import spec as specs
from torch_ltc.program.spec import contiguous_strides, interned_count, keep_bounded, make_spec, row_major, spec_of

SHAPES = [
    torch.zeros(2, 3),
    torch.zeros(2, 3).t(),
    torch.zeros(5)[2:],
    torch.zeros(()),
    torch.zeros(0, 3),
    torch.zeros(3, 0),
    torch.zeros(1).expand(4),
    torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    torch.zeros(2, dtype=torch.complex64).conj(),
    torch.zeros(2, dtype=torch.complex64).conj().imag,
    torch.zeros(6)[::2],
]


@pytest.mark.parametrize("tensor", SHAPES, ids=lambda tensor: repr(spec_of(tensor)))
def test_equal_shapes_are_one_object(tensor: torch.Tensor) -> None:
    spec = spec_of(tensor)
    twin = make_spec(
        tensor.dtype, tuple(tensor.size()), tensor.stride(), tensor.storage_offset(), tensor.is_conj(), tensor.is_neg()
    )
    before = interned_count()
    assert twin is spec
    assert spec_of(tensor.detach()) is spec
    assert interned_count() == before
    assert spec.key == twin.key


def test_shapes_that_differ_in_one_thing_are_different_objects() -> None:
    base = make_spec(torch.float32, (2, 3), (3, 1))
    others = [
        make_spec(torch.float64, (2, 3), (3, 1)),
        make_spec(torch.float32, (3, 2), (3, 1)),
        make_spec(torch.float32, (2, 3), (1, 2)),
        make_spec(torch.float32, (2, 3), (3, 1), 1),
        make_spec(torch.float32, (2, 3), (3, 1), 0, True),
        make_spec(torch.float32, (2, 3), (3, 1), 0, False, True),
    ]
    assert len({id(spec) for spec in [base, *others]}) == 7


def test_shapes_that_nobody_holds_are_forgotten_above_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    sweeps: list[int] = []
    sweep = specs.held_elsewhere

    def counted(items: list[specs.Item]) -> list[specs.Item]:
        sweeps.append(len(items))
        return sweep(items)

    def step(size: int) -> specs.Spec:
        spec = make_spec(torch.float32, (987_654, size), (size, 1))
        keep_bounded(bound)
        return spec

    monkeypatch.setattr(specs, "held_elsewhere", counted)
    # What other tests have left would be looked at, too.
    monkeypatch.setattr(specs, "_interned", {})
    monkeypatch.setattr(specs, "_swept_to", 0)
    bound = 100
    held = [step(size) for size in range(1, 1001)]
    # All are held: looking at them again and again would cost each sync as much as there are.
    assert len(sweeps) < 6
    assert interned_count() >= 1000
    held.clear()
    for size in range(1001, 3001):
        step(size)
    assert interned_count() < 2200
    assert len(sweeps) < 20


@pytest.mark.parametrize("tensor", SHAPES, ids=lambda tensor: repr(spec_of(tensor)))
def test_extent_is_the_least_storage_that_holds_the_tensor(tensor: torch.Tensor) -> None:
    spec = spec_of(tensor)
    assert spec.numel == tensor.numel()
    storage = torch.zeros(spec.extent(), dtype=spec.dtype)
    assert storage.as_strided(spec.size, spec.stride, spec.offset).size() == tensor.size()
    if spec.extent() > 0 and spec.numel > 0:
        with pytest.raises(RuntimeError, match="out of bounds"):
            storage[:-1].clone().as_strided(spec.size, spec.stride, spec.offset)


def test_contiguous_is_said_of_plain_row_major_tensors_only() -> None:
    assert spec_of(torch.zeros(2, 3)).contiguous
    assert spec_of(torch.zeros(())).contiguous
    assert not spec_of(torch.zeros(2, 3).t()).contiguous
    assert not spec_of(torch.zeros(5)[2:]).contiguous
    assert not spec_of(torch.zeros(2, dtype=torch.complex64).conj()).contiguous


def test_covering_and_overlapping() -> None:
    assert spec_of(torch.zeros(2, 3).t()).covers_storage()
    assert not spec_of(torch.zeros(6)[::2]).covers_storage()
    assert not spec_of(torch.zeros(6)[1:]).covers_storage()
    assert not spec_of(torch.zeros(1).expand(4)).covers_storage()
    assert spec_of(torch.zeros(1).expand(4)).overlaps_itself()
    assert not spec_of(torch.zeros(1, 1).expand(1, 1)).overlaps_itself()
    assert not spec_of(torch.zeros(1).expand(0)).overlaps_itself()


def test_strides_of_fresh_tensors() -> None:
    for size in [(), (4,), (2, 3), (2, 0, 3), (0,), (3, 1, 2)]:
        assert contiguous_strides(size) == torch.empty(size).stride()
    assert row_major((2, 3, 4)) == (12, 4, 1)


def test_text_names_what_is_not_plain() -> None:
    assert repr(spec_of(torch.zeros(2, 3))) == "float32[2,3]"
    assert repr(spec_of(torch.zeros((), dtype=torch.int64))) == "int64[]"
    assert repr(spec_of(torch.zeros(2, 3)[:, 1:].t())) == "float32[2,2] stride=(1,3) offset=1"
    assert repr(spec_of(torch.zeros(2, dtype=torch.complex64).conj())) == "complex64[2] stride=(1) conj"
