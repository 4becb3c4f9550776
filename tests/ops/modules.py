"""Every module of PyTorch's module database: forward, backward and backward of backward, on the device and on eager.

In training and in evaluation, and, where an input has four or five dimensions, in channels_last. The same parameters
and inputs go to both; everything must be equal bit by bit, strides included.
"""

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch.testing._internal.common_modules import ModuleInfo, ModuleInput, module_db
from torch.utils import _pytree as pytree

import torch_ltc
from tests.ops.equality import differences

MODULES: dict[str, ModuleInfo] = {info.name: info for info in module_db}

KNOWN_GAPS: dict[str, str] = {}
"""Modules that differ, with the reason of each."""
ROUNDED = ("nn.GRU", "nn.LSTM", "nn.LSTMCell", "nn.RMSNorm", "nn.RNN")
ROUNDED_ATOL = 2e-5
"""Modules whose second gradients are sums in another order: the first ones are those of a single kernel in eager."""


@dataclass(frozen=True)
class Form:
    """One way to run a module."""

    training: bool
    channels_last: bool

    def __str__(self) -> str:
        return ("train" if self.training else "eval") + (" channels_last" if self.channels_last else "")


FORMS = tuple(Form(training, channels_last) for channels_last in (False, True) for training in (True, False))


def module_differences(info: ModuleInfo, form: Form, samples: int | None = None) -> Iterator[str]:
    """A line for each thing that differs from eager, over the samples of a module."""
    torch.manual_seed(0)
    inputs = info.module_inputs_func(
        info, device="cpu", dtype=torch.float32, requires_grad=True, training=form.training
    )
    for number, sample in enumerate(inputs[:samples]):
        if sample.forward_input is not None:
            for line in _sample_differences(info, sample, form):
                yield f"{info.name}, sample {number}, {form}: {line}"


def _sample_differences(info: ModuleInfo, sample: ModuleInput, form: Form) -> Iterator[str]:
    constructor, forward = sample.constructor_input, sample.forward_input
    torch.manual_seed(0)
    module = info.module_cls(*constructor.args, **constructor.kwargs).to(torch.float32).train(form.training)
    arguments = (forward.args, forward.kwargs)
    if info.is_lazy:
        with torch.no_grad():
            module(*forward.args, **forward.kwargs)
    if form.channels_last:
        dimensions = {each.dim() for each in pytree.tree_leaves(arguments) if isinstance(each, torch.Tensor)}
        if not dimensions & {4, 5}:
            return
        arguments = pytree.tree_map_only(torch.Tensor, _channels_last, arguments)
        for each in (4, 5) if dimensions >= {4, 5} else dimensions & {4, 5}:
            if all(parameter.dim() in (each, 0, 1, 2, 3) for parameter in module.parameters()):
                module = module.to(memory_format=_FORMATS[each])
    expected = _outcome(copy.deepcopy(module), _copies(arguments, "cpu"), info.supports_gradgrad)
    actual = _outcome(copy.deepcopy(module).to("ltc"), _copies(arguments, "ltc"), info.supports_gradgrad)
    for what in expected | actual:
        atol = ROUNDED_ATOL if info.name in ROUNDED and what == "second gradients" else 0.0
        yield from differences(what, expected.get(what), actual.get(what), atol=atol)


_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() not in _FORMATS:
        return tensor
    return tensor.detach().contiguous(memory_format=_FORMATS[tensor.dim()]).requires_grad_(tensor.requires_grad)


def _copies(arguments: object, device: str) -> tuple[tuple[object, ...], dict[str, object]]:
    def copied(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone().to(device).requires_grad_(tensor.requires_grad)

    return pytree.tree_map_only(torch.Tensor, copied, arguments)


def _outcome(module: torch.nn.Module, arguments: object, twice: bool) -> dict[str, object]:
    """Everything that a module gives: results, gradients, gradients of gradients, its state afterwards, an error."""
    found: dict[str, object] = {}
    try:
        _run(module, arguments, twice, found)
        torch_ltc.sync(wait=True)
    except Exception as error:
        # The device may raise later, and adds where: that both raise, and why, is what counts.
        found = {"error": (str(error).splitlines() or [""])[0].rpartition(" failed when its program ran: ")[2]}
    return found


def _run(module: torch.nn.Module, arguments: object, twice: bool, found: dict[str, object]) -> None:
    args, kwargs = arguments
    torch.manual_seed(1)
    found["results"] = results = module(*args, **kwargs)
    found["state"] = dict(module.state_dict())
    leaves = [each for each in (*pytree.tree_leaves(arguments), *module.parameters()) if _wants_gradient(each)]
    outputs = [each for each in pytree.tree_leaves(results) if _wants_gradient(each)]
    if outputs and leaves:
        gradients = torch.autograd.grad(
            outputs, leaves, [_direction(each) for each in outputs], allow_unused=True, create_graph=twice
        )
        found["gradients"] = gradients
        second = [each for each in gradients if _wants_gradient(each)]
        if second:
            found["second gradients"] = torch.autograd.grad(
                second, leaves, [_direction(each) for each in second], allow_unused=True
            )


def _wants_gradient(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _direction(output: torch.Tensor) -> torch.Tensor:
    """Numbers to differentiate along: not all equal, and the same on every device."""
    return torch.linspace(-1, 2, output.numel(), dtype=output.dtype).view(output.shape).to(output.device)


def sweep(names: Iterable[str], samples: int | None = None) -> Iterator[tuple[str, list[str]]]:
    """The name of each module with its differences."""
    for name in names:
        found = []
        for form in FORMS:
            try:
                found += module_differences(MODULES[name], form, samples)
            except Exception as error:
                found.append(f"{name}, {form}: {type(error).__name__}: {error}")
        yield name, found
