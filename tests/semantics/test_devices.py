"""One device, its dtypes, and what happens where it meets others."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import torch_ltc
from tests.semantics.support import assert_same, lazy
from torch_ltc.config import settings
from torch_ltc.errors import DataAccessError, DeviceMismatchError

pytestmark = pytest.mark.usefixtures("no_fallback")

DTYPES = [
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_without_dimensions_of_every_dtype_move_read_and_convert(dtype: torch.dtype) -> None:
    # float8 tensors without dimensions.
    value = torch.tensor(1.0).to(dtype)
    moved = value.to("ltc")
    assert moved.dtype is dtype
    assert moved.dim() == 0
    back = moved.cpu()
    assert back.dtype is dtype
    # Not every dtype can be compared: their bytes can.
    assert bytes(back.untyped_storage().tolist()) == bytes(value.untyped_storage().tolist())
    assert moved.item() == value.item() == 1
    assert torch.ones((), device="ltc").to(dtype).float().item() == 1.0
    assert moved.to(torch.complex64 if dtype.is_complex else torch.float32).cpu().real.item() == 1.0
    assert "ltc" in repr(moved)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_vectors_behave_as_on_the_cpu(dtype: torch.dtype) -> None:
    values = torch.linspace(-3, 3, 7)
    assert_same(values.to("ltc").to(dtype).float(), values.to(dtype).float())
    assert_same(values.to(dtype).to("ltc").clone().view(torch.uint8), values.to(dtype).view(torch.uint8))


@pytest.mark.parametrize(
    "ask",
    [
        lambda: torch.ones(2).to("ltc:1"),
        lambda: torch.ones(2, device="ltc").to("ltc:1"),
        lambda: torch.ones(2, device="ltc:1"),
        lambda: torch.empty(2, device=torch.device("ltc", 3)),
        lambda: torch.randn(2, device="ltc:1"),
        lambda: torch.arange(2, device="ltc:1"),
        lambda: torch.nn.Linear(2, 2).to("ltc:1"),
        lambda: torch.ltc.set_device(1),
        lambda: torch.ltc.synchronize("ltc:1"),
    ],
    ids=["to", "from ltc", "ones", "empty", "randn", "arange", "module", "set_device", "synchronize"],
)
def test_another_ordinal_is_refused_by_its_name(ask: Callable[[], object]) -> None:
    # In the original, to("lazy:1") fails with "cpu:1".
    with pytest.raises(
        DeviceMismatchError, match=r"there is no device .*(ltc:[13]|1).*: torch_ltc has one device, ltc:0"
    ):
        ask()
    assert torch.ones(2, device="ltc:0").sum().item() == 2.0


MIXES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "add": lambda ours, cpu: ours + cpu,
    "add the other way": lambda ours, cpu: cpu + ours,
    "matmul": lambda ours, cpu: ours @ cpu,
    "matmul the other way": lambda ours, cpu: cpu @ ours,
    "cat": lambda ours, cpu: torch.cat([ours, cpu]),
    "stack": lambda ours, cpu: torch.stack([cpu, ours]),
    "where": lambda ours, cpu: torch.where(ours > 0, ours, cpu),
    "in-place": lambda ours, cpu: ours.add_(cpu),
    "in-place on the cpu": lambda ours, cpu: cpu.add_(ours),
    "out": lambda ours, cpu: torch.add(ours, 1, out=cpu),
    "linear": lambda ours, cpu: torch.nn.functional.linear(ours, cpu),
    "mse_loss": lambda ours, cpu: torch.nn.functional.mse_loss(ours, cpu),
    "embedding": lambda ours, cpu: torch.nn.functional.embedding(cpu.long(), ours),
    "gather": lambda ours, cpu: ours.gather(0, cpu.long()),
    "foreach": lambda ours, cpu: torch._foreach_add([ours], [cpu]),
}


@pytest.mark.parametrize("name", MIXES)
def test_mixing_devices_raises_and_names_both(name: str) -> None:
    # Wrong devices must not mix silently.
    ours, cpu = torch.ones(2, 2, device="ltc"), torch.ones(2, 2)
    with pytest.raises(RuntimeError, match=r"(?s)(ltc.*cpu|cpu.*ltc)"):
        result = MIXES[name](ours, cpu)
        torch_ltc.sync(wait=True)
        assert result is None, "it went through"
    assert ours.tolist() == cpu.tolist() == [[1.0, 1.0], [1.0, 1.0]]


LISTS: dict[str, Callable[[list[Tensor], list[Tensor]], object]] = {
    "a number": lambda many, other: torch._foreach_add_(many, 2),
    "numbers": lambda many, other: torch._foreach_mul_(many, [2.0, 3.0, 4.0]),
    "no target": lambda many, other: torch._foreach_sqrt(many),
    "two lists": lambda many, other: torch._foreach_add_(many, other, alpha=0.5),
    "three lists": lambda many, other: torch._foreach_addcmul_(many, other, many, value=0.5),
    "norms": lambda many, other: torch._foreach_norm(many),
    "copies": lambda many, other: torch._foreach_copy_(many, other),
    "zeroed": lambda many, other: torch._foreach_zero_(many),
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_with_tensors_of_the_cpu_among_those_of_the_device_are_computed_one_by_one(name: str) -> None:
    # As on PyTorch's other devices: what an optimizer keeps may lie here and there.
    def run(device: str) -> list[Any]:
        many = [torch.full((size,), 4.0, device=where) for size, where in ((2, device), (3, "cpu"), (4, device))]
        other = [torch.arange(float(len(tensor)), device=tensor.device) for tensor in many]
        made = [LISTS[name](many, other) for _ in range(20)][-1]
        torch_ltc.sync()
        versions = [tensor._version for tensor in many]
        places = [tensor.device.type == device for tensor in many]
        return [versions, places, *[tensor.tolist() for tensor in (*many, *(made if isinstance(made, tuple) else ()))]]

    ours, (versions, _, *expected) = run("ltc"), run("cpu")
    assert ours == [versions, [True, False, True], *expected]


CPU_TARGETS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "in place": lambda target, x: target.add_(x.sum()),
    "out=": lambda target, x: torch.sum(x, 0, out=target),
    "one of a list": lambda target, x: torch._foreach_add_([x.sum(), target], [x.sum(), x.sum()]),
    "of a call that runs eagerly": lambda target, x: torch.masked_select(x, x > 0, out=target),
}


@pytest.mark.parametrize("name", CPU_TARGETS)
@pytest.mark.parametrize("before", [0, 20])
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_writing_to_a_cpu_tensor_without_dimensions_is_refused(name: str, before: int) -> None:
    # After some calls an operator has a kernel of its own.
    x, target = lazy(torch.arange(3.0)), torch.zeros([])
    with settings.scope(fallback="allow"):
        for _ in range(before):
            CPU_TARGETS[name](lazy(torch.zeros([])), x)
        with pytest.raises(DeviceMismatchError, match=r"ltc:0 and cpu"):
            CPU_TARGETS[name](target, x)
    torch_ltc.sync(wait=True)
    assert target.item() == 0


@pytest.mark.parametrize("indices", [torch.tensor([1]), torch.tensor([True, False, True])], ids=["numbers", "mask"])
def test_indexing_a_cpu_tensor_with_indices_on_the_device_is_refused(indices: Tensor) -> None:
    with (
        settings.scope(fallback="allow"),
        pytest.raises(RuntimeError, match=r"indices should be either on cpu or on the same device as the indexed"),
    ):
        torch.arange(3.0)[lazy(indices)]
    with pytest.raises(DeviceMismatchError, match=r"ltc:0 and cpu"):
        torch.arange(3.0).index_fill(0, lazy(torch.tensor([1])), 0)


def test_cpu_tensors_without_dimensions_and_cpu_indices_may_mix_as_on_other_devices() -> None:
    x = lazy(torch.arange(6.0).view(2, 3))
    scale = torch.tensor(2.0)
    doubled = x * scale
    scale.fill_(100.0)
    assert doubled.tolist() == [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]]
    assert (scale + x)[0, 1].item() == 101.0
    assert x[torch.tensor([1, 0])].tolist() == [[3.0, 4.0, 5.0], [0.0, 1.0, 2.0]]
    x[torch.tensor([0])] = 7.0
    assert x[0].tolist() == [7.0, 7.0, 7.0]
    assert x.masked_fill(x > 6, torch.tensor(-1.0))[0].tolist() == [-1.0] * 3
    assert x.index_fill(1, torch.tensor([0, 2]), 9.0)[1].tolist() == [9.0, 4.0, 9.0]
    assert torch.where(x > 6, x, torch.tensor(0.0)).sum().item() == 21.0


@pytest.mark.parametrize("make", [torch.linspace, torch.logspace])
def test_ranges_between_tensors_of_the_device_are_made_where_they_are_asked_for(make: Callable[..., Tensor]) -> None:
    first, last = torch.tensor(1.0), torch.tensor(3.0)
    for bounds in ((first, last), (first, 3), (1, last)):
        lazies = [lazy(bound) if isinstance(bound, Tensor) else bound for bound in bounds]
        assert_same(make(*lazies, steps=3, device="ltc"), make(*bounds, steps=3))
        made = make(*lazies, steps=3)
        assert made.device.type == "cpu"
        assert_same(made, make(*bounds, steps=3))
    with pytest.raises(RuntimeError, match="only supports 0-dimensional start and end tensors"):
        make(lazy(torch.ones(1)), 2, steps=3)


def test_copying_between_devices_is_allowed_both_ways() -> None:
    x, cpu = torch.zeros(3, device="ltc"), torch.arange(3.0)
    x.copy_(cpu)
    assert x.tolist() == [0.0, 1.0, 2.0]
    cpu.copy_(x * 2)
    assert cpu.tolist() == [0.0, 2.0, 4.0]
    x[1:].copy_(torch.tensor([9, 8]))
    assert x.tolist() == [0.0, 9.0, 8.0]
    cpu[:1] = x[2:]
    assert cpu.tolist() == [8.0, 2.0, 4.0]
    meta = torch.ones(2, device="meta")
    with pytest.raises((RuntimeError, NotImplementedError)):
        meta.to("ltc").cpu()


def test_dlpack_gives_other_libraries_a_copy_of_the_value() -> None:
    x = torch.arange(6.0, device="ltc").view(2, 3).t()
    assert x.__dlpack_device__() == torch.zeros(1).__dlpack_device__()
    array = np.from_dlpack(x)
    assert array.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    x.add_(1)
    assert array[0, 0] == 0.0
    assert torch.from_dlpack(np.arange(3), device="ltc").device.type == "ltc"
    with pytest.raises(DataAccessError, match="without a copy"):
        x.__dlpack__(copy=False)
    for wrong in (
        torch.ones(2, device="ltc", requires_grad=True),
        torch.ones(2, device="ltc", dtype=torch.cfloat).conj(),
    ):
        for export in (wrong.__dlpack__, lambda wrong=wrong: torch.utils.dlpack.to_dlpack(wrong)):
            with pytest.raises(BufferError, match="Can't export"):
                export()


def test_dlpack_within_pytorch_shares_memory_on_the_device() -> None:
    x = torch.arange(3.0, device="ltc")
    for take in (
        torch.from_dlpack,
        lambda t: torch.from_dlpack(t, device="ltc"),
        lambda t: torch.from_dlpack(torch.utils.dlpack.to_dlpack(t)),
        lambda t: torch.asarray(torch.to_dlpack(t)),
    ):
        taken = take(x)
        assert taken.device == x.device
        assert taken.data_ptr() == x.data_ptr()
        taken.add_(1)
    assert x.tolist() == [4.0, 5.0, 6.0]
    copied = torch.from_dlpack(x, copy=True)
    copied.add_(1)
    assert x.tolist() == [4.0, 5.0, 6.0]
    assert torch.from_dlpack(x, device="cpu").device.type == "cpu"


def test_arrays_of_other_interfaces_are_refused_clearly() -> None:
    x = torch.ones(2, device="ltc")
    assert not hasattr(x, "__cuda_array_interface__")
    with pytest.raises(TypeError, match=r"Use Tensor.cpu\(\)"):
        x.__array__()


def test_data_pointers_tell_where_tensors_share_memory() -> None:
    x = torch.arange(100.0, device="ltc")
    pointer = x.data_ptr()
    assert pointer == x.untyped_storage().data_ptr() == x.view(10, 10).data_ptr() == x.detach().data_ptr() != 0
    assert x[3:].data_ptr() == x.view(torch.int32)[3:].data_ptr() == pointer + 12
    assert torch.view_as_complex(x.view(50, 2))[1].data_ptr() == pointer + 8
    others = [x + 1 for _ in range(3)]
    starts = sorted([pointer, *(other.data_ptr() for other in others)])
    assert all(end - start >= 400 for start, end in itertools.pairwise(starts))
    x.add_(1)
    torch_ltc.sync(wait=True)
    assert x.data_ptr() == pointer
    assert starts == sorted([pointer, *(other.data_ptr() for other in others)])
    assert x[5:5].data_ptr() == torch.empty(0, device="ltc").data_ptr() == 0


def test_memory_that_grows_gets_other_data_pointers() -> None:
    x, y = torch.ones(2, device="ltc"), torch.ones(2, device="ltc")
    before = x.data_ptr(), y.data_ptr()
    x.resize_(100)
    assert abs(x.data_ptr() - y.data_ptr()) >= 400 or y.data_ptr() + 8 <= x.data_ptr()
    assert y.data_ptr() == before[1]


def test_data_pointers_of_the_cpu_are_addresses() -> None:
    values = torch.arange(3.0)
    assert list((ctypes.c_float * 3).from_address(values.data_ptr())) == [0.0, 1.0, 2.0]


def test_numpy_wants_the_cpu_first() -> None:
    x = torch.ones(2, device="ltc")
    with pytest.raises(TypeError, match=r"Use Tensor.cpu\(\)"):
        x.numpy()
    assert x.cpu().numpy().tolist() == [1.0, 1.0]
    assert x.numpy(force=True).tolist() == [1.0, 1.0]


def test_storage_methods_that_need_memory_are_refused() -> None:
    storage = torch.ones(2, device="ltc").untyped_storage()
    assert storage.nbytes() == 8
    assert storage.device == torch.device("ltc", 0)
    for ask in (lambda: storage.fill_(0), lambda: storage.resize_(3), lambda: storage.__setitem__(0, 1)):
        with pytest.raises(DataAccessError):
            ask()


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_typed_storages_have_the_classes_of_the_cpu() -> None:
    for dtype in (torch.float32, torch.bool, torch.complex64):
        x = torch.zeros(2, dtype=dtype)
        assert lazy(x).storage_type() is x.storage_type()


def test_the_kernel_of_a_convolution_is_that_of_the_physical_device() -> None:
    shapes = ((1, 3, 5, 5), (3, 3, 3, 3), (3,))
    for dilation, transposed in (([1, 1], False), ([2, 2], False), ([1, 1], True)):
        asked = []
        for device in ("cpu", "ltc"):
            tensors = [torch.randn(shape, device=device, dtype=torch.double) for shape in shapes]
            asked.append(torch._C._select_conv_backend(*tensors, [1, 1], [0, 0], dilation, transposed, [0, 0], 1))
        assert asked[0] == asked[1]


def test_storages_that_are_shared_can_be_told_from_others() -> None:
    x = torch.ones(4, device="ltc")
    assert x.untyped_storage().data_ptr() == x[2:].untyped_storage().data_ptr() != 0
    assert x.untyped_storage().data_ptr() != torch.ones(4, device="ltc").untyped_storage().data_ptr()


def test_tensors_are_made_in_sparse_layouts() -> None:
    made = torch.empty(2, 2, device="ltc", layout=torch.sparse_coo)
    assert made.layout is torch.sparse_coo
    assert made.device.type == "ltc"
    with settings.scope(fallback="allow"):
        assert made.to_dense().tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_devices_print_and_compare_as_others_do() -> None:
    device = torch.device("ltc")
    assert str(device) == "ltc"
    assert device.type == "ltc"
    assert torch.ones(1, device=device).device == torch.device("ltc:0")
    assert repr(torch.ones(2, device="ltc")) == "tensor([1., 1.], device='ltc:0')"
    assert torch.ones(2, device="ltc").get_device() == 0
