"""Devices as backends name them, and handles on data."""

from __future__ import annotations

import pytest
import torch

from torch_ltc.errors import BackendError, DeviceMismatchError
from torch_ltc.lowering.backend_data import (
    BackendData,
    BackendDevice,
    BackendDeviceType,
    DataState,
    alias_physical,
    common_device,
)
from torch_ltc.program.spec import make_spec, spec_of

CPU = BackendDevice()
CUDA1 = BackendDevice(BackendDeviceType("cuda"), 1)


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("cpu", CPU),
        ("CPU0", CPU),
        ("cpu:0", CPU),
        ("cuda", BackendDevice(BackendDeviceType("cuda"), 0)),
        ("cuda:1", CUDA1),
        (" CUDA1 ", CUDA1),
        ("cuda:12", BackendDevice(BackendDeviceType("cuda"), 12)),
    ],
)
def test_device_is_parsed_from_either_way_to_write_it(text: str, device: BackendDevice) -> None:
    assert BackendDevice.parse(text) == device


@pytest.mark.parametrize("text", ["", "tpu", "cuda:", "cuda:-1", "cuda:x", "1", "cuda:1:2"])
def test_text_that_names_no_device_is_refused(text: str) -> None:
    with pytest.raises(BackendError, match="cpu"):
        BackendDevice.parse(text)


def test_device_prints_as_type_and_ordinal_and_parses_back() -> None:
    assert [str(CPU), str(CUDA1), str(CUDA1.type)] == ["CPU0", "CUDA1", "CUDA"]
    assert [BackendDevice.parse(str(device)) for device in (CPU, CUDA1)] == [CPU, CUDA1]


def test_devices_compare_and_sort_by_type_then_ordinal() -> None:
    cuda0 = BackendDevice(BackendDeviceType("cuda"), 0)
    assert sorted([CUDA1, cuda0, CPU]) == [CPU, cuda0, CUDA1]
    assert len({CPU, BackendDevice.parse("cpu"), CUDA1}) == 2
    assert cuda0 != CPU


def test_devices_translate_to_pytorch_and_back() -> None:
    assert CPU.torch == torch.device("cpu")
    assert CUDA1.torch == torch.device("cuda", 1)
    assert BackendDevice.of(torch.device("cuda:1")) == CUDA1
    assert BackendDevice.of(torch.device("cpu")) == CPU


def test_unknown_device_type_lists_the_known_ones() -> None:
    with pytest.raises(BackendError, match=r"no device type 'tpu'\n  try: one of: cpu, cuda"):
        BackendDeviceType("tpu")


def test_data_of_one_program_must_be_on_one_device() -> None:
    spec = make_spec(torch.float32, (2,), (1,))
    here, there = BackendData(CPU, spec, None), BackendData(CUDA1, spec, None)
    assert common_device([here, here]) == CPU
    with pytest.raises(DeviceMismatchError, match="CPU0, CUDA1"):
        common_device([here, there])
    with pytest.raises(DeviceMismatchError, match="none"):
        common_device([])


def test_a_handle_says_what_it_holds() -> None:
    tensor = torch.arange(6.0).view(2, 3)
    placeholder = BackendData(CPU, spec_of(tensor), None)
    scalar = BackendData.from_scalar(2.5, torch.float64, CPU)
    data = BackendData.from_tensor(tensor)
    states = [handle.state for handle in (placeholder, scalar, data)]
    assert states == [DataState.PLACEHOLDER, DataState.SCALAR, DataState.TENSOR]
    assert [handle.has_value for handle in (placeholder, scalar, data)] == [False, True, True]
    assert repr(placeholder) == "BackendData(float32[2,3], CPU0, placeholder)"


def test_a_handle_on_false_or_zero_has_a_value() -> None:
    assert BackendData.from_scalar(False, torch.bool, CPU).has_value
    assert BackendData.from_scalar(0, torch.int64, CPU).tensor().item() == 0


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(True, torch.bool), (3, torch.int32), (2.5, torch.float64), (1 + 2j, torch.complex64), (3, torch.float32)],
)
def test_a_number_becomes_a_tensor_without_dimensions(value: complex, dtype: torch.dtype) -> None:
    made = BackendData.from_scalar(value, dtype, CPU).tensor()
    assert (made.dtype, made.size(), made.item()) == (dtype, torch.Size([]), value)


def test_a_handle_gives_the_memory_it_was_made_on() -> None:
    tensor = torch.zeros(3)
    data = BackendData.from_tensor(tensor)
    tensor.add_(1)
    assert data.tensor() is tensor
    assert data.tensor().tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("tensor", "size_bytes"),
    [(torch.zeros(2, 3), 24), (torch.zeros(4, dtype=torch.int8), 4), (torch.zeros(0, 5), 0), (torch.zeros(()), 4)],
)
def test_size_in_bytes_is_known_before_there_is_data(tensor: torch.Tensor, size_bytes: int) -> None:
    assert BackendData.from_tensor(tensor).size_bytes == size_bytes
    assert BackendData(CPU, spec_of(tensor), None).size_bytes == size_bytes


def test_reading_a_placeholder_says_what_to_do() -> None:
    with pytest.raises(BackendError, match=r"float32\[2\] holds nothing yet\n  try: run the program"):
        BackendData(CPU, make_spec(torch.float32, (2,), (1,)), None).tensor()


def test_a_placeholder_is_assigned_once_its_program_has_run() -> None:
    tensor = torch.arange(2.0)
    placeholder = BackendData(CPU, spec_of(tensor), None)
    placeholder.assign(BackendData.from_tensor(tensor))
    assert placeholder.state is DataState.TENSOR
    assert placeholder.tensor() is tensor


def test_a_number_is_assigned_as_a_tensor() -> None:
    placeholder = BackendData(CPU, make_spec(torch.float32, (), ()), None)
    placeholder.assign(BackendData.from_scalar(2.5, torch.float32, CPU))
    assert placeholder.tensor().item() == 2.5


@pytest.mark.parametrize(
    "other", [torch.zeros(3), torch.zeros(2, 1), torch.zeros(2, dtype=torch.float64)], ids=["length", "rank", "dtype"]
)
def test_data_of_another_shape_is_not_assigned(other: torch.Tensor) -> None:
    handle = BackendData.from_tensor(torch.ones(2))
    with pytest.raises(BackendError, match=r"float32\[2\] cannot hold"):
        handle.assign(BackendData.from_tensor(other))
    assert handle.tensor().tolist() == [1.0, 1.0]


def test_data_of_another_device_is_not_assigned() -> None:
    spec = make_spec(torch.float32, (2,), (1,))
    with pytest.raises(DeviceMismatchError, match="CPU0 cannot hold data of CUDA1"):
        BackendData(CPU, spec, None).assign(BackendData(CUDA1, spec, torch.zeros(2)))


def test_assigning_an_empty_handle_is_refused() -> None:
    spec = make_spec(torch.float32, (2,), (1,))
    with pytest.raises(BackendError, match="holds nothing yet"):
        BackendData(CPU, spec, None).assign(BackendData(CPU, spec, None))


def test_assigned_data_has_the_layout_that_the_handle_says() -> None:
    handle = BackendData(CPU, make_spec(torch.float32, (2, 3), (3, 1)), None)
    handle.assign(BackendData.from_tensor(torch.arange(6.0).view(3, 2).t()))
    assert handle.tensor().tolist() == [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]]
    assert handle.tensor().stride() == handle.spec.stride


def test_memory_is_seen_with_another_shape() -> None:
    base = torch.arange(6.0)
    seen = alias_physical(base, make_spec(torch.float32, (2, 2), (1, 2), 1))
    assert seen.tolist() == [[1.0, 3.0], [2.0, 4.0]]
    seen.zero_()
    assert base.tolist() == [0.0, 0.0, 0.0, 0.0, 0.0, 5.0]
    conjugated = alias_physical(torch.tensor([1 + 2j]), make_spec(torch.complex64, (1,), (1,), conj=True))
    assert conjugated.tolist() == [1 - 2j]
