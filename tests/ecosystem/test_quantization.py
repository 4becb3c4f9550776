"""Quantized and sparse tensors that libraries make."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ecosystem.support import compare

pytestmark = pytest.mark.filterwarnings("ignore")


def network(device: str, features: int = 32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(features, features), nn.ReLU(), nn.Linear(features, 4)).to(device)


CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "int8 weights": ("Int8WeightOnlyConfig", {}),
    "int8 weights and activations": ("Int8DynamicActivationInt8WeightConfig", {}),
    "int4 weights": ("IntxWeightOnlyConfig", {"weight_dtype": torch.int4}),
    "int8 activations, int4 weights": ("Int8DynamicActivationIntxWeightConfig", {"weight_dtype": torch.int4}),
    "float8 weights": ("Float8WeightOnlyConfig", {}),
}


@pytest.mark.parametrize("what", CONFIGS)
def test_weights_that_torchao_quantizes(what: str) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    name, options = CONFIGS[what]

    def run(device: str) -> Tensor:
        module = network(device)
        quantization.quantize_(module[:1], getattr(quantization, name)(**options))
        assert type(module[0].weight.data) is not Tensor
        return module(torch.linspace(-1, 1, 64, device=device).view(2, 32))

    compare("torchao", f"{what}, quantized there", run)


@pytest.mark.parametrize("layout", ["plain", "plain_int32", "tile_packed_to_4d"])
def test_int4_weights_that_are_packed_for_kernels_of_gpus_are_refused_as_on_the_cpu(layout: str) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    errors = {}
    for device in ("cpu", "ltc"):
        config = quantization.Int4WeightOnlyConfig(group_size=128, int4_packing_format=layout)
        with pytest.raises(Exception, match=r"mslk|not support|CUDA") as raised:
            quantization.quantize_(network(device, 128).bfloat16(), config)
        errors[device] = (raised.type, str(raised.value).replace(device, "DEVICE"))
    assert errors["ltc"] == errors["cpu"]


def test_a_module_that_torchao_has_quantized_moves_to_the_device() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    module = network("cpu")
    quantization.quantize_(module, quantization.Int8WeightOnlyConfig())
    rows = torch.linspace(-1, 1, 64).view(2, 32)
    expected = module(rows)
    assert torch.equal(module.to("ltc")(rows.to("ltc")).cpu(), expected)


def test_float8_training_of_torchao() -> None:
    float8 = pytest.importorskip("torchao.float8")

    def train(device: str) -> list[Any]:
        module = float8.convert_to_float8_training(network(device)[:1], config=float8.Float8LinearConfig(emulate=True))
        module(torch.linspace(-1, 1, 512, device=device).view(16, 32)).square().sum().backward()
        return [parameter.grad for parameter in module.parameters()]

    compare("torchao", "float8 training, emulated", train)


def test_dynamic_quantization() -> None:
    module = network("ltc", 8)
    quantized = torch.ao.quantization.quantize_dynamic(module, {nn.Linear}, dtype=torch.qint8)
    expected = torch.ao.quantization.quantize_dynamic(network("cpu", 8), {nn.Linear}, dtype=torch.qint8)
    rows = torch.linspace(-1, 1, 16).view(2, 8)
    found = quantized(rows.to("ltc"))
    torch.testing.assert_close(found.cpu(), expected(rows), rtol=0, atol=0)


def test_csr_times_dense_and_sparse_gradients_of_embeddings() -> None:
    def run(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        matrix = torch.randn(3, 3).relu().to_sparse_csr().to(device)
        table = nn.Embedding(5, 3, sparse=True).to(device)
        optimizer = torch.optim.SparseAdam(table.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            table(torch.tensor([0, 2, 2], device=device)).square().sum().backward()
            optimizer.step()
        return [matrix @ torch.ones(3, 2, device=device), table.weight]

    for one, other in zip(run("ltc"), run("cpu"), strict=True):
        torch.testing.assert_close(one.detach().cpu(), other.detach(), rtol=0, atol=0)
