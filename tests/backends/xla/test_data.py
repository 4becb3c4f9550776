"""Tensors and JAX arrays share memory where the layout allows it."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
import torch

from tests.fuzz.check import check
from tests.fuzz.modes import MODES, entered
from tests.fuzz.program import Program
from torch_ltc.backends.xla.data import JaxData, array_of, held_spec, jax_device, order_of
from torch_ltc.backends.xla.promotion import DTYPES, all_bits
from torch_ltc.errors import BackendError
from torch_ltc.lowering.backend_data import BackendData, BackendDevice, DataState
from torch_ltc.program.spec import make_spec, spec_of


def handle(tensor: torch.Tensor) -> JaxData:
    with all_bits():
        return JaxData(BackendDevice(), spec_of(tensor), array_of(tensor, spec_of(tensor)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [(), (3,), (2, 3), (2, 0)], ids=str)
def test_every_dtype_and_size_comes_back(dtype: torch.dtype, size: tuple[int, ...]) -> None:
    tensor = torch.ones(size, dtype=dtype)
    back = handle(tensor).tensor()
    assert back.dtype is dtype
    assert torch.equal(back.to(torch.complex128), tensor.to(torch.complex128))


def test_a_tensor_and_its_array_share_memory() -> None:
    tensor = torch.zeros(4, 4)
    assert array_of(tensor, spec_of(tensor)).unsafe_buffer_pointer() == tensor.data_ptr()


@pytest.mark.parametrize("order", [(1, 0, 2), (2, 0, 1), (0, 1, 2)])
def test_a_permuted_tensor_shares_its_memory_as_a_permuted_array(order: tuple[int, ...]) -> None:
    tensor = torch.arange(24.0).view(2, 3, 4).permute(order)
    held = handle(tensor)
    assert held.array.unsafe_buffer_pointer() == tensor.data_ptr()
    back = held.tensor()
    assert back.data_ptr() == tensor.data_ptr()
    assert back.stride() == tensor.stride()
    assert torch.equal(back, tensor)


def test_a_tensor_with_holes_is_copied_without_them() -> None:
    tensor = torch.arange(10.0)[::2]
    assert held_spec(spec_of(tensor)) is make_spec(torch.float32, (5,), (1,))
    assert array_of(tensor, spec_of(tensor)).tolist() == tensor.tolist()


def test_an_expanded_tensor_is_copied_whole() -> None:
    tensor = torch.arange(3.0).expand(2, 3)
    assert array_of(tensor, spec_of(tensor)).tolist() == tensor.tolist()


def test_a_conjugated_tensor_is_resolved() -> None:
    tensor = torch.tensor([1 + 2j]).conj()
    assert array_of(tensor, spec_of(tensor)).tolist() == [1 - 2j]


def test_order_of_channels_last_is_that_of_memory() -> None:
    spec = spec_of(torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last))
    assert order_of(spec) == (0, 2, 3, 1)


def test_the_view_of_a_handle_is_made_once_and_counts_as_shared() -> None:
    held = handle(torch.ones(2))
    assert not held.shared
    assert held.tensor() is held.tensor()
    assert held.shared


def test_a_write_through_the_view_reaches_the_array() -> None:
    held = handle(torch.ones(2).clone())
    held.tensor().mul_(3)
    assert held.array.tolist() == [3.0, 3.0]


def test_memory_of_an_empty_array_can_grow() -> None:
    held = handle(torch.empty(0))
    held.tensor().untyped_storage().resize_(16)
    assert held.tensor().untyped_storage().nbytes() == 16


def test_a_handle_that_shares_a_tensor_gives_that_tensor_back() -> None:
    tensor = torch.arange(6.0).view(2, 3).t()
    held = JaxData.sharing(tensor)
    assert held.tensor() is tensor
    assert held.shared
    tensor.mul_(2)
    assert held.array.tolist() == [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]]


def test_a_handle_that_shares_a_tensor_with_holes_has_its_values() -> None:
    tensor = torch.arange(6.0)[::2]
    held = JaxData.sharing(tensor)
    assert held.tensor().tolist() == [0.0, 2.0, 4.0]
    assert held.spec is spec_of(held.tensor())


def test_a_handle_holds_data() -> None:
    held = handle(torch.ones(3))
    assert held.state is DataState.TENSOR
    assert held.has_value
    assert held.size_bytes == 12


def test_assigning_takes_the_data_of_another_handle() -> None:
    held = handle(torch.ones(2))
    held.tensor()
    held.assign(BackendData.from_tensor(torch.tensor([4.0, 5.0])))
    assert held.tensor().tolist() == [4.0, 5.0]
    with pytest.raises(BackendError, match="cannot hold"):
        held.assign(BackendData.from_tensor(torch.ones(3)))


def test_a_handle_of_another_shape_is_read_as_a_tensor() -> None:
    held = handle(torch.arange(4.0).view(2, 2))
    turned = make_spec(torch.float32, (2, 2), (1, 2))
    assert array_of(held, turned).tolist() == jnp.asarray([[0.0, 2.0], [1.0, 3.0]]).tolist()


def test_a_device_that_jax_does_not_see_is_an_error() -> None:
    with pytest.raises(BackendError, match="JAX sees no device cuda:7") as raised:
        jax_device(torch.device("cuda", 7))
    assert "jax[cuda" in str(raised.value)


def test_memory_that_a_program_sees_through_a_view_keeps_its_shape() -> None:
    statements = (
        "t0 = torch.ones((2, 1), device=D, dtype=torch.float64)",
        "t3 = t0[None]",
        "t3.copy_(t3.clone().cpu())",
    )
    with entered(MODES["xla"]):
        assert check(Program("view", 0, statements, ({}, {})), MODES["xla"]) is None


@pytest.mark.parametrize(
    "write",
    [
        "torch.nonzero(t0, out=t1)",
        "torch.nonzero(t0, out=t1.view(3, 1))",
        "torch.masked_select(t0, t0 > 3, out=t1)",
        "torch.nonzero(t0, out=t1[:2])",
    ],
)
def test_memory_of_xla_is_left_by_a_target_whose_size_is_data(write: str) -> None:
    statements = (
        "t0 = torch.arange(1, 11, device=D)",
        "t1 = torch.ones(3, device=D, dtype=torch.int64)",
        "t1.mul_(2)",
        "sync()",
        write,
        "t2 = t1 + 1",
    )
    with entered(MODES["xla"]):
        assert check(Program("target", 0, statements, ({}, {}, {})), MODES["xla"]) is None


def test_elements_that_share_memory_are_added_to_one_after_the_other() -> None:
    statements = (
        "t0 = torch.ones(3, device=D)",
        "t1 = t0.as_strided((2, 2), (1, 1))",
        "t1.index_put_((torch.tensor([0, 0], device=D),), t1.new_tensor(1), accumulate=True)",
    )
    with entered(MODES["xla"]):
        assert check(Program("shared", 0, statements, ({}, {})), MODES["xla"]) is None
