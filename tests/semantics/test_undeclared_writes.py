"""Operators that write to an argument although their schema does not say so."""

import warnings

import torch

import torch_ltc
from tests.support.backends import FunctionalBackend, registered
from torch_ltc.errors import BackendWarning


def test_running_statistics_are_read_after_the_program_that_writes_them() -> None:
    # Long enough that the program is still running when the statistics are read.
    slow = torch.randn(400, 400)
    results = {}
    for device in ("cpu", "ltc"):
        torch.manual_seed(0)
        layer = torch.nn.BatchNorm1d(8).to(device)
        given = torch.randn(64, 8).to(device)
        chain = slow.to(device)
        for _ in range(30):
            chain = chain @ chain
            chain = chain / chain.norm()
        layer(given + chain.sum() * 0)
        results[device] = (layer.running_mean.cpu(), layer.running_var.cpu())
    for mine, eager in zip(results["ltc"], results["cpu"], strict=True):
        assert torch.equal(mine, eager)


def test_batch_norm_into_targets_of_its_own_writes_targets_and_statistics() -> None:
    given = torch.randn(8, 3)
    results = {}
    for device in ("cpu", "ltc"):
        targets = [torch.empty(0).to(device) for _ in range(3)]
        mean, variance = torch.zeros(3).to(device), torch.ones(3).to(device)
        torch.ops.aten.native_batch_norm.out(
            given.to(device),
            None,
            None,
            mean,
            variance,
            True,
            0.1,
            1e-5,
            out=targets[0],
            save_mean=targets[1],
            save_invstd=targets[2],
        )
        results[device] = [tensor.cpu() for tensor in (*targets, mean, variance)]
    for mine, eager in zip(results["ltc"], results["cpu"], strict=True):
        assert torch.equal(mine, eager)


def test_batch_norm_into_targets_of_its_own_keeps_its_writes_on_a_functional_backend() -> None:
    given = torch.randn(8, 3)
    with registered(FunctionalBackend), torch_ltc.use_backend(FunctionalBackend.name):
        mean = torch.zeros(3).to("ltc")
        for _ in range(3):
            targets = [torch.empty(size).to("ltc") for size in ((8, 3), (3,), (3,))]
            variance = torch.ones(3).to("ltc")
            arguments = (given.to("ltc"), None, None, mean, variance, True, 0.1, 1e-5)
            names = ("out", "save_mean", "save_invstd")
            torch.ops.aten.native_batch_norm.out(*arguments, **dict(zip(names, targets, strict=True)))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", BackendWarning)
                torch_ltc.sync(wait=True)
                result = mean.cpu()
    expected = given.mean(0) * (0.1 + 0.09 + 0.081)
    assert torch.allclose(result, expected, atol=1e-6)
