"""Backward passes run on the thread that asks for them, as on the CPU."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_ltc
from torch_ltc.native.library import extension


@pytest.mark.skipif(extension is None, reason="without the extension they run on the engine's thread")
def test_hooks_run_on_the_calling_thread() -> None:
    seen: list[threading.Thread] = []
    x = torch.ones(3, device="ltc", requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: seen.append(threading.current_thread()))
    y.sum().backward()
    torch.autograd.grad((x * 3).sum(), x)
    assert seen == [threading.current_thread()]
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("enabled", [True, False])
def test_the_switch_of_the_user_stays(enabled: bool) -> None:
    with torch.autograd.set_multithreading_enabled(enabled):
        x = torch.ones(3, device="ltc", requires_grad=True)
        x.sum().backward()
        assert torch._C._is_multithreading_enabled() == enabled
        with pytest.raises(RuntimeError):
            x.backward()
        assert torch._C._is_multithreading_enabled() == enabled


def test_passes_of_several_threads_and_within_each_other() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    x = torch.randn(5, 4)

    def gradients(device: str) -> list[list[float]]:
        own = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
        own.load_state_dict(model.state_dict())
        own.to(device)
        # The pass runs the forward pass again, and another pass inside of itself.
        loss = checkpoint(own, x.to(device).requires_grad_(), use_reentrant=True).square().sum()
        loss.backward()
        return [parameter.grad.tolist() for parameter in own.parameters() if parameter.grad is not None]

    expected = gradients("cpu")
    found: list[list[list[float]]] = []
    threads = [threading.Thread(target=lambda: found.append(gradients("ltc"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 3


def test_calls_of_a_pass_have_its_line() -> None:
    model = nn.Linear(3, 2).to("ltc")
    model(torch.ones(4, 3).to("ltc")).sum().backward()
    text = torch_ltc.debug.dump_ir([model.weight.grad])
    (line,) = [line for line in text.splitlines() if "linear_backward" in line]
    assert "test_backward_thread.py" in line
    assert "backward of" in line
