"""Lazy clones: the physical memory is shared until one of its holders is written to."""

from __future__ import annotations

import pytest
import torch

import torch_ltc
from torch_ltc.config import settings

is_copied_on_write = torch._C._is_cow_tensor
address = torch._C._data_address


@pytest.mark.parametrize("backend", ["interpreter", "torchscript"])
@pytest.mark.usefixtures("any_fingerprints")
def test_a_lazy_clone_shares_memory_until_a_write(backend: str) -> None:
    with settings.scope(backend=backend):
        for _ in range(3):
            tensor = torch.arange(4.0).to("ltc")
            before = address(tensor)
            clone = torch._lazy_clone(tensor)
            total = tensor + clone
            assert is_copied_on_write(tensor)
            assert is_copied_on_write(clone)
            assert address(tensor) == address(clone) == before
            tensor.view(2, 2).add_(1)
            assert not is_copied_on_write(tensor)
            assert is_copied_on_write(clone)
            assert address(clone) == before != address(tensor)
            assert clone.tolist() == [0, 1, 2, 3]
            assert tensor.tolist() == [1, 2, 3, 4]
            assert total.tolist() == [0, 2, 4, 6]


def test_other_tensors_are_not_copied_on_write() -> None:
    assert not is_copied_on_write(torch.ones(2, device="ltc"))
    assert not is_copied_on_write(torch.ones(2))
    assert is_copied_on_write(torch._lazy_clone(torch.ones(2)))


@pytest.mark.filterwarnings("ignore::torch_ltc.errors.FallbackWarning")
def test_writing_to_shared_memory_in_parallel_raises_at_the_call() -> None:
    with pytest.raises(RuntimeError, match="Materializing a storage"):
        torch._test_parallel_materialize(torch._lazy_clone(torch.ones(2, device="ltc")), 1, False)
    torch_ltc.sync(wait=True)
