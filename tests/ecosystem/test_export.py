"""`torch.export`, ONNX and `torch_ltc.export_program` of what is on the device."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

import torch_ltc
from torch_ltc.errors import LtcError

pytestmark = pytest.mark.filterwarnings("ignore")
Function = Callable[[Tensor], Tensor]


@pytest.fixture
def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).eval().to("ltc")


def same(one: Tensor, other: Tensor, tolerance: float = 0.0) -> None:
    torch.testing.assert_close(one.detach().cpu(), other.detach().cpu(), rtol=tolerance, atol=tolerance)


def test_torch_export_of_a_module_on_the_device(module: nn.Module, tmp_path: Path) -> None:
    rows = torch.randn(4, 3).to("ltc")
    exported = torch.export.export(module, (rows,), dynamic_shapes=({0: torch.export.Dim("rows", min=2)},))
    torch.export.save(exported, tmp_path / "module.pt2")
    loaded = torch.export.load(tmp_path / "module.pt2")
    for batch in (rows, torch.randn(7, 3).to("ltc")):
        for program in (exported, loaded):
            found = program.module()(batch)
            assert found.device.type == "ltc"
            same(found, module(batch))


def test_onnx_export_of_a_module_on_the_device(module: nn.Module) -> None:
    pytest.importorskip("onnxscript")
    reference = pytest.importorskip("onnx.reference")
    rows = torch.randn(4, 3).to("ltc")
    made = torch.onnx.export(module, (rows,), dynamo=True, verbose=False).model_proto
    [found] = reference.ReferenceEvaluator(made).run(None, {made.graph.input[0].name: rows.cpu().numpy()})
    same(torch.from_numpy(found), module(rows), 1e-6)


def test_a_recorded_program_is_exported_for_the_physical_device(module: nn.Module) -> None:
    def function(rows: Tensor, factor: float) -> dict[str, object]:
        out = module(rows)
        out[0].mul_(factor)
        return {"transposed": out.t(), "count": 3, "sum": out.sum() * 1.5}

    rows = torch.randn(4, 3)
    exported = torch_ltc.export_program(function, (rows, 2.0))
    assert all(parameter.device.type == "cpu" for parameter in exported.buffers())
    for batch in (rows, torch.randn(4, 3)):
        found, expected = exported.module()(batch, 2.0), function(batch.to("ltc"), 2.0)
        assert found["count"] == 3
        for name in ("transposed", "sum"):
            assert found[name].device.type == "cpu"
            same(found[name], expected[name])


def test_state_that_a_program_writes_to_is_its_own() -> None:
    count = torch.zeros(2).to("ltc")

    def step(amount: Tensor) -> Tensor:
        count.add_(amount)
        return count * 2

    exported = torch_ltc.export_program(step, (torch.ones(2),)).module()
    assert [exported(torch.ones(2)).tolist() for _ in range(2)] == [[2.0, 2.0], [4.0, 4.0]]
    assert count.tolist() == [1.0, 1.0]


def test_a_function_that_is_no_single_program_is_refused() -> None:
    with pytest.raises(LtcError, match=r"no single program: aten::nonzero"):
        torch_ltc.export_program(torch.nonzero, (torch.ones(2),))


WITHOUT_THE_PACKAGE = """
import sys, torch
rows, expected = torch.load(sys.argv[2])
found = torch.export.load(sys.argv[1]).module()(rows)
assert "torch_ltc" not in sys.modules
assert torch.equal(found, expected), (found - expected).abs().max()
"""


def _lstm() -> Function:
    layer = nn.LSTM(8, 4, batch_first=True).to("ltc")
    return lambda rows: layer(rows)[0]


def _flex_attention() -> Function:
    bias = torch.randn(2, 4).to("ltc")

    def attend(rows: Tensor) -> Tensor:
        heads = rows.view(2, 2, 4, 3)
        return flex_attention(heads, heads, heads, score_mod=lambda score, b, h, m, n: score + bias[h, m])

    return attend


@pytest.mark.parametrize("make", [_lstm, _flex_attention])
def test_what_is_one_call_here_is_exported_as_calls_of_pytorch(make: Callable[[], Function], tmp_path: Path) -> None:
    torch.manual_seed(0)
    function, rows = make(), torch.randn(2, 3, 8)
    with torch.no_grad():
        expected = function(rows.to("ltc")).cpu()
    torch.export.save(torch_ltc.export_program(function, (rows,)), tmp_path / "program.pt2")
    torch.save((rows, expected), tmp_path / "data.pt")
    command = [sys.executable, "-c", WITHOUT_THE_PACKAGE, tmp_path / "program.pt2", tmp_path / "data.pt"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    )
    assert done.returncode == 0, done.stderr


def test_a_program_with_nested_tensors_is_refused() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 1).eval().to("ltc")
    padding = torch.tensor([[False, True]]).to("ltc")
    with pytest.raises(LtcError, match=r"enable_nested_tensor=False"):
        torch_ltc.export_program(lambda rows: encoder(rows, src_key_padding_mask=padding), (torch.ones(1, 2, 8),))


@pytest.mark.compilers
def test_a_recorded_program_is_compiled_ahead(module: nn.Module, tmp_path: Path) -> None:
    rows = torch.randn(4, 3)
    torch_ltc.export_program(module, (rows,), package=tmp_path / "module.pt2")
    load = pytest.importorskip("torch._inductor").aoti_load_package
    same(load(str(tmp_path / "module.pt2"))(rows), module(rows.to("ltc")), 1e-6)
