"""Modules of PyTorch's database give images the memory format that eager gives them, forward and backward."""

import warnings
from typing import Any

import pytest
import torch

from torch_ltc.config import settings
from torch_ltc.testing.database import MODULES
from torch_ltc.testing.placement import Arguments, leaves, place, tensors_in, transform

CHUNKS = 4
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
# Their parameters are not there yet when they are moved to the device.
LEFT_OUT = ("nn.Lazy",)


def is_image(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() in FORMATS and value.layout is torch.strided


def in_format(value: Any) -> Any:
    if not is_image(value):
        return value
    return value.detach().contiguous(memory_format=FORMATS[value.dim()]).requires_grad_(value.requires_grad)


def strides(info: Any, given: Any, training: bool, device: str) -> list[tuple[int, ...] | None]:
    """The strides of the results of a module and of the gradients of its inputs and parameters."""
    torch.manual_seed(0)
    built, forward = given.constructor_input, given.forward_input
    module = info.module_cls(*built.args, **built.kwargs).train(training).to(device)
    for memory_format in FORMATS.values():
        if any(FORMATS.get(parameter.dim()) is memory_format for parameter in module.parameters()):
            module = module.to(memory_format=memory_format)
    placed = place(Arguments(None, *transform((tuple(forward.args), dict(forward.kwargs)), in_format)), device)
    results = tensors_in(module(*placed.args, **placed.kwargs))
    wanted = [each for each in (*placed.tensors(), *module.parameters()) if each.requires_grad]
    sources = [each for each in results if each.requires_grad]
    found: list[Any] = list(results)
    if wanted and sources:
        ones = [torch.ones_like(each) for each in sources]
        found += torch.autograd.grad(sources, wanted, ones, allow_unused=True)
    return [None if each is None else each.stride() for each in found]


@pytest.mark.parametrize("chunk", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, CHUNKS))])
def test_modules_keep_the_memory_format_of_images(chunk: int) -> None:
    cases, wrong = 0, []
    infos = [each for each in MODULES[chunk::CHUNKS] if not each.name.startswith(LEFT_OUT)]
    with warnings.catch_warnings(), settings.scope(backend="interpreter", fallback="allow"):
        warnings.simplefilter("ignore")
        for info in infos:
            made = info.module_inputs_func(
                info, device="cpu", dtype=torch.float32, requires_grad=True, training=chunk % 2 == 0
            )
            for number, given in enumerate(made):
                if given.forward_input is None or not any(
                    is_image(each) for each in leaves((given.forward_input.args, given.forward_input.kwargs))
                ):
                    continue
                try:
                    expected = strides(info, given, chunk % 2 == 0, "cpu")
                except RuntimeError:
                    # Some of the database's inputs are refused by eager.
                    continue
                cases += 1
                actual = strides(info, given, chunk % 2 == 0, "ltc")
                if expected != actual:
                    wrong.append(f"{info.name} {number}: {actual} instead of {expected}")
    assert not wrong, "\n".join(wrong)
    assert cases > 10
