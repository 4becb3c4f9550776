"""`torch.export`, ONNX and `torch_ltc.export_program` of what is on the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torch_ltc
from torch_ltc.errors import LtcError

pytestmark = pytest.mark.filterwarnings("ignore")


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


@pytest.mark.compilers
def test_a_recorded_program_is_compiled_ahead(module: nn.Module, tmp_path: Path) -> None:
    rows = torch.randn(4, 3)
    torch_ltc.export_program(module, (rows,), package=tmp_path / "module.pt2")
    load = pytest.importorskip("torch._inductor").aoti_load_package
    same(load(str(tmp_path / "module.pt2"))(rows), module(rows.to("ltc")), 1e-6)
