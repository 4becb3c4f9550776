"""What a call returns, known without its data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._ops import OpOverload

from torch_ltc.program.instruction import Return, ReturnKind, flatten_returns
from torch_ltc.program.spec import Spec, make_spec, spec_of
from torch_ltc.shapes import inference
from torch_ltc.shapes import stand_ins as stand_ins_module
from torch_ltc.shapes.inference import CannotInfer, Inferred, OperandIndex, infer, stand_ins

aten = torch.ops.aten


def ask(op: OpOverload, *args: Any, groups: list[int] | None = None, **kwargs: Any) -> Inferred:
    """Infer a call on CPU tensors, of which only the shape is looked at."""
    specs: list[Spec] = []

    def place(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            specs.append(spec_of(value))
            return OperandIndex(len(specs) - 1)
        return [place(item) for item in value] if isinstance(value, list) else value

    placed = [place(value) for value in args]
    named = {name: place(value) for name, value in kwargs.items()}
    return infer(op, placed, named, specs, groups or list(range(len(specs))), object())


def returns(op: OpOverload, *args: Any, **kwargs: Any) -> list[Return]:
    return flatten_returns(ask(op, *args, **kwargs).returns)


def test_fresh_result() -> None:
    (result,) = returns(aten.add.Tensor, torch.zeros(2, 1), torch.zeros(3, dtype=torch.float64))
    assert result.kind is ReturnKind.FRESH
    assert result.spec is make_spec(torch.float64, (2, 3), (3, 1))
    assert result.group == 0


def test_view_in_place_and_no_results() -> None:
    x = torch.zeros(2, 3)
    (view,) = returns(aten.t.default, x)
    assert (view.kind, view.operand, view.spec) == (ReturnKind.VIEW, 0, spec_of(x.t()))
    (same,) = returns(aten.add_.Tensor, x, 1)
    assert (same.kind, same.operand) == (ReturnKind.SAME, 0)
    assert returns(aten._foreach_add_.Scalar, [x, x], 1.0) == []


def test_several_results_and_lists() -> None:
    values, places = returns(aten.max.dim, torch.zeros(2, 3), 1)
    assert values.spec is make_spec(torch.float32, (2,), (1,))
    assert places.spec is make_spec(torch.int64, (2,), (1,))
    parts = returns(aten.split.Tensor, torch.zeros(5), 2)
    assert [part.spec.size for part in parts if part.spec] == [(2,), (2,), (1,)]
    assert {part.kind for part in parts} == {ReturnKind.VIEW}


def test_views_that_the_schema_does_not_tell_are_known() -> None:
    (view,) = returns(aten._unsafe_view.default, torch.zeros(2, 3), [6])
    assert view.kind is ReturnKind.VIEW


def test_optional_results_that_are_not_there_are_nothing() -> None:
    x = torch.zeros(1, 2, 4)
    weight = torch.zeros(3, 2, 2)
    results = returns(
        aten.convolution_backward.default,
        torch.zeros(1, 3, 3),
        x,
        weight,
        [3],
        [1],
        [0],
        [1],
        False,
        [0],
        1,
        [True, False, True],
    )
    assert [item.kind for item in results] == [ReturnKind.FRESH, ReturnKind.NOTHING, ReturnKind.FRESH]


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.add.Tensor, (torch.zeros(2), torch.zeros(3))),
        (aten.mm.default, (torch.zeros(2, 3), torch.zeros(2, 3))),
        (aten.view.default, (torch.zeros(2, 3).t(), [6])),
        (aten.sum.dim_IntList, (torch.zeros(2), [5])),
    ],
)
def test_wrong_arguments_raise_what_eager_raises(op: OpOverload, args: tuple[Any, ...]) -> None:
    with pytest.raises((RuntimeError, IndexError)) as eager:
        op(*args)
    with pytest.raises(eager.type) as ours:
        ask(op, *args)
    assert str(ours.value).split()[:4] == str(eager.value).split()[:4]


def test_writing_to_memory_that_overlaps_is_refused() -> None:
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        ask(aten.add_.Tensor, torch.zeros(1).expand(3), 1)
    base = torch.zeros(4)
    with pytest.raises(RuntimeError, match="unsupported operation"):
        ask(aten.add_.Tensor, base[1:], base[:-1], groups=[0, 0])
    ask(aten.add_.Tensor, base[1:], base[:-1], groups=[0, 1])


def test_out_targets_of_another_size_are_told() -> None:
    inferred = ask(aten.add.out, torch.zeros(2, 3), torch.zeros(3), alpha=1, out=torch.zeros(0))
    assert inferred.resized == ((2, make_spec(torch.float32, (2, 3), (3, 1))),)


def test_results_that_are_not_strided_cannot_be_inferred() -> None:
    with pytest.raises(CannotInfer, match="not a plain strided tensor"):
        ask(aten._to_sparse.default, torch.zeros(2, 2))


def test_what_was_inferred_is_remembered_by_its_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    spec = make_spec(torch.float32, (7, 3), (3, 1))
    signature = ("a signature of this test", spec)

    def counted() -> Inferred:
        return infer(aten.sin.default, [OperandIndex(0)], {}, [spec], [0], signature)

    first = counted()
    monkeypatch.setattr("torch_ltc.shapes.inference._infer", lambda *args: calls.append(args))
    assert counted() is first
    assert calls == []


def test_an_error_is_not_remembered() -> None:
    spec, other = make_spec(torch.float32, (2,), (1,)), make_spec(torch.float32, (3,), (1,))
    for _ in range(2):
        with pytest.raises(RuntimeError):
            infer(aten.add.Tensor, [OperandIndex(0), OperandIndex(1)], {}, [spec, other], [0, 1], "wrong in this test")


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_stand_ins_have_the_shape_and_share_as_told(device: str) -> None:
    base = torch.zeros(4, 3)
    tensors = [base.t(), base[1], torch.zeros(2, dtype=torch.complex64).conj()]
    made = stand_ins([spec_of(t) for t in tensors], [0, 0, 2], device)
    assert [spec_of(t).key for t in made] == [spec_of(t).key for t in tensors]
    assert made[0].untyped_storage()._cdata == made[1].untyped_storage()._cdata != made[2].untyped_storage()._cdata


def test_stand_ins_of_an_operator_that_refuses_zeros() -> None:
    factors, pivots = torch.linalg.lu_factor(torch.eye(2))
    (result,) = returns(aten.linalg_lu_solve.default, factors, pivots, torch.ones(2, 1))
    assert result.spec is spec_of(torch.linalg.lu_solve(factors, pivots, torch.ones(2, 1)))


def test_on_a_gpu_the_library_decides_about_the_memory_format_of_convolutions() -> None:
    asked: list[str] = []

    def run_on(device: str, call: stand_ins_module.ShapeCall, *rest: Any) -> Inferred:
        asked.append(device)
        return stand_ins_module.run_on("meta", call, *rest)

    rest = (None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    image, weight = torch.zeros(2, 3, 7, 11), torch.zeros(5, 3, 3, 3)
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(inference.settings, "device_type", "cuda")
        patches.setattr(inference, "run_on", run_on)
        ask(aten.convolution.default, image, weight, *rest)
        assert asked == ["meta"]
        ask(aten.convolution.default, image.contiguous(memory_format=torch.channels_last), weight, *rest)
        assert asked[1:] == ["cuda"]
    inference.clear_inference_cache()


def test_a_list_of_other_numbers_is_another_pattern() -> None:
    large = torch.ones(100, 200)
    op = torch.ops.aten._foreach_maximum.ScalarList
    assert len(returns(op, [large, large], [1.0, 2.0])) == 2
    with pytest.raises(NotImplementedError, match="complex"):
        ask(op, [large, large], [1.0, 2j])


def test_more_categories_than_multinomial_takes_are_refused() -> None:
    with pytest.raises(RuntimeError, match="number of categories"):
        ask(aten.multinomial.default, torch.empty(2**24 + 1), 3)
