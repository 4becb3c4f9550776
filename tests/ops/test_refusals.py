"""Everything in PyTorch's databases that eager refuses is refused at the call, with the same kind of error."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_ltc
from torch_ltc.config import settings
from torch_ltc.lowering.registry import registry
from torch_ltc.testing.database import MODULES, OPERATORS, seeded, supported
from torch_ltc.testing.gaps import Gaps
from torch_ltc.testing.placement import Arguments, place
from torch_ltc.testing.probe import Probe, opened
from torch_ltc.testing.records import Result, Unit, What
from torch_ltc.testing.refusals import refusal_differences, run_refusals


@pytest.fixture
def probe() -> Iterator[Probe]:
    with warnings.catch_warnings(), opened("ltc", registry.reference) as probe:
        warnings.simplefilter("ignore")
        yield probe


@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.slow)])
def test_operators_refuse_what_eager_refuses(probe: Probe, every: int) -> None:
    gaps, shown, cases, wrong = Gaps({}), set(), 0, []
    for operator in supported()[::every]:
        unit = Unit(operator.name, operator.dtypes[0] if operator.dtypes else "", "interpreter")
        result = Result(unit)
        run_refusals(unit, seeded(operator.name), probe, result)
        cases += result.cases
        for failure in result.failures:
            gap = gaps.find(unit, failure.what)
            shown.add(gap)
            if gap is None:
                wrong.append(f"{operator.name} {failure.sample} {failure.what}: {failure.line}")
    assert not wrong, "\n".join(wrong)
    assert cases > 600 / every / 2
    if every == 1:
        assert shown == {key for key in gaps.all() if key.endswith("/late")}


# Modules that refuse data, which the device does when its program runs.
DATA = {"nn.Embedding"}


def test_modules_refuse_what_eager_refuses(probe: Probe) -> None:
    cases, wrong, late = 0, [], set()
    for info in MODULES:
        if info.module_error_inputs_func is None:
            continue
        for training in (True, False):
            made = info.module_error_inputs_func(
                info, device="cpu", dtype=torch.float32, requires_grad=False, training=training
            )
            for number, refused in enumerate(made):
                built, given = refused.module_error_input.constructor_input, refused.module_error_input.forward_input

                def call(device: str, info: Any = info, built: Any = built, given: Any = given) -> Any:
                    module = info.module_cls(*built.args, **built.kwargs).to(device)
                    if given is None:
                        return module
                    placed = place(Arguments(None, tuple(given.args), given.kwargs), device)
                    return module(*placed.args, **placed.kwargs)

                cases += 1
                for found in refusal_differences(call, probe):
                    if info.name in DATA and found.what is What.LATE:
                        late.add(info.name)
                    else:
                        wrong.append(f"{info.name} {number}: {found}")
    assert not wrong, "\n".join(wrong)
    # PyTorch 2.11 has no such inputs of it.
    assert late == {info.name for info in MODULES if info.name in DATA and info.module_error_inputs_func is not None}
    assert cases > 20


def _zeros(*size: int, dtype: torch.dtype = torch.float32) -> Any:
    return lambda device: torch.zeros(size, dtype=dtype, device=device)


_LONG, _BOOL, _COMPLEX, _SHORT = torch.int64, torch.bool, torch.complex64, torch.int16
_LARGE = (300, 100)
# More than the CPU kernel checks of every call: the first call of each pattern is checked whatever its size.
REFUSED = {
    "comparison in place that broadcasts its target": (lambda a, b: a.lt_(b), _zeros(1), _zeros(*_LARGE)),
    "fmod_ that broadcasts its target": (lambda a, b: a.fmod_(b), _zeros(1), _zeros(*_LARGE)),
    "remainder_ that broadcasts its target": (lambda a, b: a.remainder_(b), _zeros(1), _zeros(*_LARGE)),
    "floor_divide_ that broadcasts its target": (lambda a, b: a.floor_divide_(b), _zeros(1), _zeros(*_LARGE)),
    "out= of the wrong dtype": (lambda a, b: torch.exp(a, out=b), _zeros(*_LARGE), _zeros(*_LARGE, dtype=_LONG)),
    "floor of complex numbers": (lambda a: a.floor(), _zeros(*_LARGE, dtype=_COMPLEX)),
    "difference of a mask": (lambda a, b: a - b, _zeros(*_LARGE, dtype=_BOOL), _zeros(*_LARGE)),
    "indices that do not broadcast": (
        lambda a, b, c: a.index_put_((b, c), a[0, 0]),
        _zeros(*_LARGE),
        _zeros(3, dtype=_LONG),
        _zeros(4, dtype=_LONG),
    ),
    "an assigned value that does not fit": (
        lambda a, b, c: a.index_put_((b,), c),
        _zeros(*_LARGE),
        _zeros(3, dtype=_LONG),
        _zeros(7),
    ),
    "index_fill_ with a complex number": (
        lambda a, b: a.index_fill_(0, b, 1j),
        _zeros(*_LARGE),
        _zeros(3, dtype=_LONG),
    ),
    "fill_ with a complex number": (lambda a: a.fill_(1j), _zeros(*_LARGE)),
    "a kernel that has no int16": (lambda a: a.softmax(0), _zeros(*_LARGE, dtype=_SHORT)),
    "internal overlap": (lambda a: a.expand(30_000).lt_(1), _zeros(1)),
    "a loss of targets of another dtype": (
        torch.nn.functional.binary_cross_entropy,
        _zeros(*_LARGE),
        _zeros(*_LARGE, dtype=_LONG),
    ),
    "a cumulative sum of truth values": (lambda a: a.cumsum(0, dtype=_BOOL), _zeros(*_LARGE, dtype=_BOOL)),
    "65 dimensions": (lambda a: a.amax(0), _zeros(*(1,) * 65)),
    "exp of an unusual dtype": (lambda a: a.exp(), _zeros(*_LARGE, dtype=torch.float8_e4m3fn)),
    "as_strided_scatter past the end": (
        lambda a, b: torch.as_strided_scatter(a, b, (2, 2), (200, 200)),
        _zeros(4),
        _zeros(2, 2),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_shapes_and_dtypes_are_refused_at_the_call(name: str) -> None:
    call, *inputs = REFUSED[name]
    errors = []
    for device in ("cpu", "ltc", "ltc"):
        with pytest.raises(Exception) as refused:  # noqa: PT011
            call(*(make(device) for make in inputs))
        errors.append(type(refused.value))
    assert errors[1:] == errors[:1] * 2
    # And nothing of it is pending.
    torch_ltc.sync(wait=True)


def test_a_refused_call_that_is_known_is_refused_again_after_right_ones() -> None:
    with settings.scope(backend="interpreter"):
        right, wrong = torch.zeros(300, 100, device="ltc"), torch.zeros(1, device="ltc")
        right.lt_(torch.ones(300, 100, device="ltc"))
        for _ in range(2):
            with pytest.raises(RuntimeError, match="broadcast shape"):
                wrong.lt_(right)
    assert right.sum().item() == 30_000
    assert len(OPERATORS) > 600


def _backward_in_place(function: Callable[..., torch.Tensor], number: float) -> Callable[[str], object]:
    def call(device: str) -> object:
        leaf = torch.tensor([-1.0, 1.0], device=device, requires_grad=True)
        return function(leaf.clone(), number).backward(torch.ones(2, device=device))

    return call


REFUSED_NUMBERS: dict[str, Callable[[str], object]] = {
    "leaky_relu_ backward, negative slope": _backward_in_place(F.leaky_relu_, -2.0),
    "elu_ backward, negative alpha": _backward_in_place(F.elu_, -2.0),
    "celu_ backward, negative alpha": _backward_in_place(F.celu_, -2.0),
    "celu by zero": lambda device: F.celu(torch.ones(3, device=device), 0.0),
    "celu_ by zero": lambda device: F.celu_(torch.ones(3, device=device), 0.0),
    "a pad that the dtype cannot hold": lambda device: F.pad(
        torch.zeros(3, dtype=torch.int8, device=device), (1, 1), value=300
    ),
    "empty_strided, strides missing": lambda device: torch.empty_strided((2, 3), (1,), device=device),
    "empty_strided, negative stride": lambda device: torch.empty_strided((2, 3), (1, -1), device=device),
    "new_empty_strided, strides missing": lambda device: torch.ones(2, device=device).new_empty_strided((2, 3), (1,)),
    "set_, strides missing": lambda device: torch.ones(6, device=device).set_(
        torch.ones(6, device=device), 0, (2, 3), (1,)
    ),
}


def _cell(kind: type[nn.Module], width: int, batch: int, *hidden: int) -> Callable[[str], object]:
    """A call of a recurrent cell of ten inputs and twenty hidden units."""

    def call(device: str) -> object:
        states = tuple(torch.zeros(batch, size, device=device) for size in hidden)
        return kind(10, 20).to(device)(
            torch.zeros(3, width, device=device), states if kind is nn.LSTMCell else states[0]
        )

    return call


REFUSED_NUMBERS |= {
    f"{kind.__name__}, {what}": _cell(kind, *sizes)
    for kind in (nn.RNNCell, nn.GRUCell, nn.LSTMCell)
    for what, sizes in {
        "another input size": (11, 3, 20, 20),
        "another batch size": (10, 4, 20, 20),
        "another hidden size": (10, 3, 21, 20),
        "another size of the second hidden state": (10, 3, 20, 21),
    }.items()
    if kind is nn.LSTMCell or "second" not in what
}


def _mask(device: str, length: int, dtype: torch.dtype = _BOOL) -> torch.Tensor:
    return torch.ones(length, dtype=dtype, device=device)


def _put(rows: tuple[int, ...], *values: int, dtype: torch.dtype = torch.float32) -> Callable[[str], object]:
    """Values written into five rows of four through masks of these lengths."""

    def call(device: str) -> object:
        masks = [_mask(device, length) for length in rows]
        return torch.zeros(5, 4, device=device).index_put_(masks, torch.ones(values, dtype=dtype, device=device))

    return call


def _lengths(device: str, data: torch.dtype = torch.float32, lengths: torch.dtype = _LONG, **options: object) -> object:
    lengths_given = torch.tensor([2, 2], dtype=lengths, device=device)
    return torch.segment_reduce(
        torch.zeros(4, dtype=data, device=device), lengths=lengths_given, **{"reduce": "max", **options}
    )


REFUSED_NUMBERS |= {
    "writing through a mask of another length": lambda device: torch.zeros(5, device=device).__setitem__(
        _mask(device, 3), 1.0
    ),
    "writing through a mask of bytes of another length": lambda device: torch.zeros(5, device=device).__setitem__(
        _mask(device, 3, torch.uint8), 1.0
    ),
    "index_put, a mask of another length": lambda device: torch.index_put(
        torch.zeros(5, device=device), (_mask(device, 3),), torch.ones(3, device=device)
    ),
    "index_put_, a mask, values of another dtype": _put((5,), 5, 4, dtype=torch.float64),
    "index_put_, more masks than dimensions": _put((5, 4, 3), 3),
    "index_put_, a mask, values of too many dimensions": _put((5,), 2, 5, 4),
    "index_put_, a mask, values that fit no number of rows": _put((5,), 3),
    "index_put_, a mask, values of another width": _put((5,), 5, 3),
    "segment_reduce, no kernel for the data": lambda device: _lengths(device, data=_LONG),
    "segment_reduce, no kernel for the lengths": lambda device: _lengths(device, lengths=torch.float32),
    "segment_reduce, no such reduction": lambda device: _lengths(device, reduce="most"),
}


FITTING = {
    "values": (lambda x, mask, index: x.index_put((mask,), torch.arange(8.0).view(2, 4).to(x.device)), 2),
    "one value": (lambda x, mask, index: x.index_put((mask,), torch.tensor(7.0).to(x.device)), 2),
    "a row": (lambda x, mask, index: x.index_put((mask,), torch.arange(4.0).to(x.device)), 2),
    "a mask and indices": (lambda x, mask, index: x.index_put((mask, index), torch.ones(3).to(x.device)), 3),
    "a mask that is expanded": (
        lambda x, mask, index: x.index_put((mask[:1].expand(5),), torch.ones(5, 4).to(x.device)), 1
    ),
    "expanded values": (
        lambda x, mask, index: x.index_put((mask,), torch.ones(1).to(x.device).expand(2, 4)), 2
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FITTING)
def test_what_fits_the_number_of_true_elements_is_written_as_in_eager(name: str) -> None:
    call, count = FITTING[name]
    given = torch.zeros(5, 4), torch.arange(5) < count, torch.tensor([0, 2, 1])
    expected = call(*given)
    assert torch.equal(call(*(each.to("ltc") for each in given)).cpu(), expected)


@pytest.mark.parametrize("name", ["values", "a mask and indices"])
def test_what_does_not_fit_the_number_of_true_elements_is_refused_when_it_runs(name: str) -> None:
    call, count = FITTING[name]
    given = torch.zeros(5, 4), torch.arange(5) < count + 1, torch.tensor([0, 2, 1])
    with pytest.raises(Exception, match="shape mismatch") as eager:
        call(*given)
    made = call(*(each.to("ltc") for each in given))
    with pytest.raises(type(eager.value), match="shape mismatch"):
        made.cpu()


REFUSED_NUMBERS |= {
    f"{name}, a complex number in a tensor": lambda device, name=name: getattr(torch, name)(
        *([torch.ones(2, device=device)] for _ in range(3)), torch.tensor([1j])
    )
    for name in ("_foreach_addcmul", "_foreach_addcmul_", "_foreach_addcdiv", "_foreach_addcdiv_")
}


@pytest.mark.parametrize("name", REFUSED_NUMBERS)
def test_numbers_are_refused_at_the_call_as_in_eager(name: str) -> None:
    with pytest.raises((RuntimeError, IndexError)) as eager:
        REFUSED_NUMBERS[name]("cpu")
    with pytest.raises(type(eager.value)) as ours:
        REFUSED_NUMBERS[name]("ltc")
    assert str(ours.value).splitlines()[0] == str(eager.value).splitlines()[0]
