"""Operators of one's own inside of a recorded step: a C++ library, and on a GPU a Triton kernel.

The GPU: `LTC_TS_CUDA=1 python -m pytest tests/ecosystem/test_custom_kernels.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_ltc
from tests.semantics.support import observe
from torch_ltc.config import settings

pytestmark = pytest.mark.filterwarnings("ignore")

CPP = """
#include <torch/library.h>
#include <ATen/ATen.h>
at::Tensor scaled_add(const at::Tensor& one, const at::Tensor& other, double scale) { return one + other * scale; }
TORCH_LIBRARY(torch_ltc_eco, m) { m.def("scaled_add(Tensor one, Tensor other, float scale) -> Tensor"); }
TORCH_LIBRARY_IMPL(torch_ltc_eco, CPU, m) { m.impl("scaled_add", &scaled_add); }
TORCH_LIBRARY_IMPL(torch_ltc_eco, CUDA, m) { m.impl("scaled_add", &scaled_add); }
"""


def steps(operator: Any, device: str, count: int) -> list[Tensor]:
    """A training with the operator in it."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 64).to(device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    rows = torch.linspace(-1, 1, 512).view(8, 64).to(device)
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        with torch.no_grad():
            added = operator(rows, rows, 0.5)
        loss = layer(added).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def check(operator: Any, name: str, eager: str, tolerance: float) -> None:
    """Recorded as one instruction, without a fallback, with eager's values, run after run."""
    with observe() as seen:
        found = [loss.cpu() for loss in steps(operator, "ltc", 30)]
    assert seen.fallbacks == []
    expected = [loss.cpu() for loss in steps(operator, eager, 30)]
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=tolerance, atol=tolerance)
    rows = torch.ones(2, 2).to("ltc")
    assert torch_ltc.debug.dump_ir([operator(rows, rows, 2.0)]).count(name) == 1


@pytest.mark.compilers
def test_an_operator_of_a_cpp_library_is_recorded(tmp_path: Path) -> None:
    extension = pytest.importorskip("torch.utils.cpp_extension")
    if not hasattr(torch.ops.torch_ltc_eco, "scaled_add"):
        # A folder of its own: a run that was stopped leaves a lock in the common one.
        extension.load_inline("torch_ltc_eco", CPP, is_python_module=False, build_directory=str(tmp_path))
        torch.library.register_fake("torch_ltc_eco::scaled_add", lambda one, other, scale: torch.empty_like(one))
    # PyTorch's autograd has no engine for a second accelerator in the process: eager is on the CPU.
    check(torch.ops.torch_ltc_eco.scaled_add, "torch_ltc_eco::scaled_add", "cpu", 1e-5)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_triton_kernel_is_recorded_and_captured() -> None:
    triton = pytest.importorskip("triton")
    language = triton.language
    assert settings.device_type == "cuda", "set LTC_TS_CUDA=1"

    @triton.jit
    def kernel(one, other, out, scale, count, BLOCK: language.constexpr):
        at = language.program_id(0) * BLOCK + language.arange(0, BLOCK)
        inside = at < count
        added = language.load(one + at, mask=inside) + language.load(other + at, mask=inside) * scale
        language.store(out + at, added, mask=inside)

    @torch.library.custom_op("torch_ltc_eco::triton_add", mutates_args=(), device_types="cuda")
    def triton_add(one: Tensor, other: Tensor, scale: float) -> Tensor:
        out = torch.empty_like(one)
        kernel[(triton.cdiv(one.numel(), 256),)](one, other, out, scale, one.numel(), BLOCK=256)
        return out

    @triton_add.register_kernel("cpu")
    def _(one: Tensor, other: Tensor, scale: float) -> Tensor:
        return one + other * scale

    @triton_add.register_fake
    def _(one: Tensor, other: Tensor, scale: float) -> Tensor:
        return torch.empty_like(one)

    check(triton_add, "torch_ltc_eco::triton_add", "cpu", 1e-3)
    assert torch.ltc.memory_stats()["graphs.count"] > 0, "no program was captured"
