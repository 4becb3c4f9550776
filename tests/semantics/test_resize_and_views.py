"""A resized tensor and older views of its memory keep their own shapes."""

import torch

import torch_ltc


def test_a_view_made_before_a_resize_keeps_its_size() -> None:
    results = {}
    for device in ("cpu", "ltc"):
        sums = []
        for _ in range(3):
            given = torch.arange(6.0).view(2, 3).to(device).clone()
            view = given.detach()
            given.resize_(4, 3)
            sums.append(view.sum(0).cpu())
            torch_ltc.sync()
        results[device] = sums
    for mine, eager in zip(results["ltc"], results["cpu"], strict=True):
        assert torch.equal(mine, eager)


def test_a_power_of_a_mask_has_eagers_dtype() -> None:
    mask = torch.tensor([True, False])
    assert (mask.to("ltc") ** True).cpu().dtype is (mask**True).dtype


def test_factors_of_list_calls_may_stay_on_the_cpu() -> None:
    factors = torch.tensor([0.5, 2.0])
    tensors = [torch.ones(3), torch.full((2,), 3.0)]
    eager = torch._foreach_addcdiv(tensors, tensors, tensors, factors)
    moved = [tensor.to("ltc") for tensor in tensors]
    mine = torch._foreach_addcdiv(moved, moved, moved, factors)
    for left, right in zip(mine, eager, strict=True):
        assert torch.equal(left.cpu(), right)
