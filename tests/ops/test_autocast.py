"""Under autocast every operator of PyTorch's database gives what the CPU gives: dtypes, values, gradients."""

import contextlib
import warnings
from typing import Any

import pytest
import torch

from torch_ltc.config import settings
from torch_ltc.device.autocast import operators, policy
from torch_ltc.testing.database import OPERATORS
from torch_ltc.testing.placement import Arguments, place, tensors_in

CHUNKS = 6
SAMPLES = 3
NAMES = {name.partition(".")[0] for name in operators() if policy(name, "cpu") is not None}


def is_changed(info: Any) -> bool:
    """True for operators that autocast changes, by any of the names that PyTorch has for them."""
    names = {info.name, info.aten_name, info.name.rpartition(".")[2], info.name.replace(".", "_")}
    return bool(names & NAMES)


INFOS = [info for info in OPERATORS.values() if is_changed(info) and torch.float32 in info.dtypes]


def outcome(info: Any, sample: Any, device: str, dtype: torch.dtype) -> list[Any]:
    """Results and gradients of a sample under autocast."""
    placed = place(Arguments(sample.input, sample.args, sample.kwargs), device)
    torch.manual_seed(0)
    with torch.autocast(device, dtype=dtype):
        result = info.op(placed.input, *placed.args, **placed.kwargs)
    results = [each for each in tensors_in(result) if isinstance(each, torch.Tensor)]
    wanted = [each for each in placed.tensors() if each.requires_grad]
    sources = [each for each in results if each.requires_grad]
    found: list[Any] = list(results)
    if wanted and sources:
        found += torch.autograd.grad(sources, wanted, [torch.ones_like(each) for each in sources], allow_unused=True)
    return [None if each is None else each.detach().cpu() for each in found]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("chunk", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, CHUNKS))])
def test_operators_cast_as_on_the_cpu(chunk: int, dtype: torch.dtype) -> None:
    cases, wrong = 0, []
    with warnings.catch_warnings(), settings.scope(backend="interpreter", fallback="allow"):
        warnings.simplefilter("ignore")
        for info in INFOS[chunk::CHUNKS]:
            for given in (torch.float32, dtype):
                if given not in info.dtypes:
                    continue
                made = info.sample_inputs("cpu", given, requires_grad=info.supports_autograd)
                for _, sample in zip(range(SAMPLES), made, strict=False):
                    expected = None
                    # Some samples are refused by eager.
                    with contextlib.suppress(Exception):
                        expected = outcome(info, sample, "cpu", dtype)
                    if expected is None:
                        continue
                    cases += 1
                    actual = outcome(info, sample, "ltc", dtype)
                    try:
                        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
                    except AssertionError as error:
                        wrong.append(f"{info.name} in {given}: {str(error).splitlines()[0]}")
    assert not wrong, "\n".join(wrong)
    assert cases > 30
