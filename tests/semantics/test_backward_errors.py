"""An exception in a hook ends the backward pass, not the process; failures of PyTorch's engine are explained."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.semantics.support import run_script
from torch_ltc.errors import OtherAcceleratorError
from torch_ltc.native.library import extension

SCRIPT = """
import torch, torch_ltc

def fail(_):
    raise ZeroDivisionError("in the hook")

REGISTER = {
    "tensor": lambda x, y: y.register_hook(fail),
    "leaf": lambda x, y: x.register_hook(fail),
    "accumulated": lambda x, y: x.register_post_accumulate_grad_hook(fail),
}
for name, register in REGISTER.items():
    x = torch.ones(3).to("ltc").requires_grad_()
    y = x * 2
    register(x, y)
    try:
        (y * y).sum().backward()
    except ZeroDivisionError as error:
        print(name, "raised", error, flush=True)
    z = torch.ones(2).to("ltc").requires_grad_()
    (z * 3).sum().backward()
    print(z.grad.tolist(), flush=True)
"""


def test_an_exception_in_a_hook_is_raised_by_backward() -> None:
    # In one process, whose output says how far it came if it dies.
    assert run_script(SCRIPT).splitlines() == [
        *["tensor raised in the hook", "[3.0, 3.0]"],
        *["leaf raised in the hook", "[3.0, 3.0]"],
        *["accumulated raised in the hook", "[3.0, 3.0]"],
    ]


class _Failing(torch.autograd.Function):
    """The identity, with a backward that fails with a given text."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, text: str) -> torch.Tensor:
        ctx.text = text
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise RuntimeError(ctx.text)


@pytest.mark.parametrize(
    "condition", ["opt_consumer_stream && opt_producer_stream", "opt_ready_stream && opt_parent_stream"]
)
@pytest.mark.parametrize("way", ["backward", "grad"])
def test_a_failure_on_tensors_of_a_gpu_is_explained(condition: str, way: str) -> None:
    # What the engine says of CUDA tensors in a process where this device is the accelerator.
    text = f'{condition} INTERNAL ASSERT FAILED at "/pytorch/torch/csrc/autograd/input_buffer.cpp":283, please report'
    x = torch.ones(2, requires_grad=True)
    loss = _Failing.apply(x, text).sum()  # type: ignore[no-untyped-call]
    with pytest.raises(OtherAcceleratorError, match=r"(?s)only accelerator.*test_backward_errors\.py.*LTC_TS_CUDA=1"):
        loss.backward() if way == "backward" else torch.autograd.grad(loss, x)


def test_other_errors_of_a_backward_pass_stay_as_they_are() -> None:
    for text in ("something INTERNAL ASSERT FAILED at csrc/autograd/engine.cpp", "no luck with the _stream"):
        loss = _Failing.apply(torch.ones(2, requires_grad=True), text).sum()  # type: ignore[no-untyped-call]
        with pytest.raises(RuntimeError, match=r"INTERNAL|luck") as raised:
            loss.backward()
        assert type(raised.value) is RuntimeError


LATE = """
    import torch
    x = torch.ones(2, requires_grad=True)
    (x * 2).sum().backward()
    import torch_ltc
    y = torch.ones(2).to("ltc").requires_grad_()
    try:
        (y * 3).sum().backward()
        print(y.grad.tolist())
    except torch_ltc.errors.LtcError as error:
        print(error)
"""


def test_backward_passes_before_the_import_are_no_obstacle_or_are_named() -> None:
    printed = run_script(LATE)
    if extension is not None:
        assert printed.strip() == "[3.0, 3.0]"
    else:
        assert "before `import torch_ltc`" in printed
        assert "ltc build" in printed
