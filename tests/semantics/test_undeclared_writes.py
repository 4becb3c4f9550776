"""Operators that write to an argument although their schema does not say so."""

import torch

import torch_ltc  # noqa: F401


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
