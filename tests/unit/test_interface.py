"""What a backend inherits: every method of the interface, on a backend that has a name and a `compile` and no more."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import torch_ltc
from tests.support.backends import CPU, FunctionalBackend, RecordedBackend, record, run_recorded
from torch_ltc.config import settings
from torch_ltc.errors import BackendError, CompileError, DeviceMismatchError, ExecutionError
from torch_ltc.lowering.backend_data import BackendData, BackendDevice, BackendDeviceType, DataState
from torch_ltc.lowering.interface import (
    Arguments,
    Backend,
    Computation,
    Form,
    FunctionComputation,
    LoweringContext,
    Outcome,
)
from torch_ltc.lowering.lower import lower
from torch_ltc.lowering.registry import registry
from torch_ltc.program.instruction import Program
from torch_ltc.program.spec import make_spec

HERE = BackendDevice()
NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without a CUDA device")


class Least(Backend):
    """Name and compile."""

    name = "least"

    def compile(self, program: Program) -> Callable[..., Sequence[Any]]:
        return lambda *given: run_recorded(program, given)


@pytest.fixture(autouse=True)
def nothing_pending() -> Iterator[None]:
    torch_ltc.sync(wait=True)
    yield
    torch_ltc.sync(wait=True)


def handle(values: Any, dtype: torch.dtype = torch.float32) -> BackendData:
    return BackendData.from_tensor(torch.tensor(values, dtype=dtype))


def computation(function: Callable[..., Any], *inputs: torch.Tensor, backend: Backend | None = None) -> Computation:
    program, numbers = record(function, *inputs)
    return lower(backend or Least(), program, numbers, set(), strict=True).computation


# ---- compiling and running


def test_a_backend_needs_a_compile() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Backend()  # type: ignore[abstract]


def test_defaults_say_recorded_form_supported_calls_core_aten() -> None:
    least = Least()
    program, _ = record(lambda x: x + x, torch.zeros(2))
    assert least.get_ir_builder() is least.form is Form.RECORDED
    assert least.supports(program.calls[0])
    assert least.decompositions() is None
    assert least.computes
    assert least.eager_random


def test_a_function_is_made_a_computation_that_knows_its_parameters_and_results() -> None:
    made = computation(lambda x, y: (x @ y * 2.5, x.sum()), torch.zeros(2, 3), torch.zeros(3, 4))
    assert isinstance(made, FunctionComputation)
    assert made.parameters_size == 3
    assert list(map(repr, made.parameter_shapes)) == ["float32[2,3]", "float32[3,4]"]
    assert made.parameter_names == ["%0", "%1", "$0"]
    assert list(map(repr, made.result_shape)) == ["float32[2,4]", "float32[]"]


@pytest.mark.parametrize("backend", [RecordedBackend, FunctionalBackend])
def test_execute_computation_runs_on_handles(backend: type[Backend]) -> None:
    made = computation(lambda x, y: (x * 3.0 + y, y.sum()), torch.zeros(2), torch.zeros(2), backend=backend())
    arguments = [handle([1.0, 2.0]), handle([10.0, 20.0]), BackendData.from_scalar(3.0, torch.float64, HERE)]
    results = backend().execute_computation(made, arguments, HERE)
    assert [result.tensor().tolist() for result in results] == [[13.0, 26.0], 30.0]
    assert all(result.state is DataState.TENSOR for result in results)


@pytest.mark.parametrize("backend", [RecordedBackend, FunctionalBackend])
def test_execute_computation_writes_to_what_the_program_writes_to(backend: type[Backend]) -> None:
    made = computation(lambda x: x.add_(1.0) * 2.0, torch.zeros(2), backend=backend())
    argument = handle([1.0, 2.0])
    numbers = [BackendData.from_scalar(value, torch.float64, HERE) for value in (1.0, 2.0)]
    (result,) = backend().execute_computation(made, [argument, *numbers], HERE)
    assert argument.tensor().tolist() == [2.0, 3.0]
    assert result.tensor().tolist() == [4.0, 6.0]


def test_execute_computation_draws_from_the_generator_of_the_device() -> None:
    made = computation(lambda: torch.empty(3, device="ltc").normal_())
    torch.default_generator.manual_seed(3)
    expected = torch.randn(3, generator=torch.Generator().manual_seed(3))
    (result,) = Least().execute_computation(made, [], HERE)
    assert torch.equal(result.tensor(), expected)


def test_execute_computation_refuses_another_number_of_arguments() -> None:
    made = computation(lambda x: x + x, torch.zeros(2))
    with pytest.raises(BackendError, match="takes 1 arguments, got 2"):
        Least().execute_computation(made, [handle([1.0]), handle([1.0])], HERE)


def test_execute_computation_refuses_data_of_another_device() -> None:
    made = computation(lambda x, y: x + y, torch.zeros(2), torch.zeros(2))
    there = BackendData(BackendDevice(BackendDeviceType("cuda"), 0), make_spec(torch.float32, (2,), (1,)), None)
    with pytest.raises(DeviceMismatchError, match="CPU0, CUDA0"):
        Least().execute_computation(made, [handle([1.0, 2.0]), there], HERE)
    with pytest.raises(BackendError, match="not on CPU0"):
        Least().execute_computation(made, [there, there], HERE)


def test_execute_computation_raises_the_first_failure() -> None:
    made = computation(
        lambda i, t: torch.nn.functional.embedding(i, t),
        torch.tensor([0]),
        torch.zeros(3, 2),
        backend=registry.get("interpreter"),
    )
    with pytest.raises(ExecutionError, match="index out of range"):
        Least().execute_computation(made, [handle([[1.0, 2.0]] * 3), handle([7], torch.int64)], HERE)


def test_each_compiled_instance_has_its_own_result_or_error() -> None:
    class Picky(Least):
        name = "picky"

        def compile(self, program: Program) -> Callable[..., Sequence[Any]]:
            for call in program.calls:
                if call.name == "aten::sin":
                    raise ValueError("no sine here")
            return super().compile(program)

    picky = Picky()
    functions = (lambda x: x.cos(), lambda x: x.sin(), lambda x: x.exp())
    programs = [record(function, torch.zeros(2))[0] for function in functions]
    contexts = [picky.create_lowering_context("p", HERE, program) for program in programs]
    first, second, third = picky.compile_instances(contexts)
    assert callable(first)
    assert callable(third)
    assert isinstance(second, CompileError)
    assert "picky cannot compile" in str(second)
    assert "aten::sin: ValueError: no sine here" in str(second)
    assert f"recorded at {__file__}" in str(second)
    assert isinstance(second.__cause__, ValueError)


def test_a_lowering_context_knows_name_device_parameters_and_results() -> None:
    program, _ = record(lambda x, y: (x + y, x * y), torch.zeros(2), torch.zeros(2))
    context = Least().create_lowering_context("program1", HERE, program)
    assert isinstance(context, LoweringContext)
    assert (context.name, context.device) == ("program1", HERE)
    assert context.parameters == program.inputs
    assert context.result_count == 2
    built = context.build()
    assert callable(built)
    assert [result.tolist() for result in built(torch.ones(2), torch.ones(2))] == [[2.0, 2.0], [1.0, 1.0]]


def test_a_context_of_its_own_lowers_for_the_backend() -> None:
    class Noted(LoweringContext):
        def build(self) -> Any:
            seen.append((self.name.startswith("program"), self.device))
            return super().build()

    class Own(Least):
        name = "own"

        def create_lowering_context(self, name: str, device: BackendDevice, program: Program) -> LoweringContext:
            return Noted(self, name, device, program)

    seen: list[tuple[bool, BackendDevice]] = []
    computation(lambda x: x + x, torch.zeros(2), backend=Own())
    assert seen == [(True, HERE)]


def test_backend_text_is_that_of_the_computation_or_of_the_program() -> None:
    class Texted(Least):
        def compile(self, program: Program) -> Callable[..., Sequence[Any]]:
            function: Any = super().compile(program)
            function.text = lambda: f"{len(program.calls)} calls"
            return function

    plain = computation(lambda x: x + x, torch.zeros(2))
    assert "aten::add.Tensor(%0, %0, alpha=1)" in Least().get_computation_backend_text(plain)
    texted = computation(lambda x: x + x, torch.zeros(2), backend=Texted())
    assert Texted().get_computation_backend_text(texted) == "1 calls"


# ---- data


def test_data_from_a_tensor_is_a_copy() -> None:
    tensor = torch.arange(6.0).view(2, 3).t()
    data = Least().make_computation_data_from_tensor(tensor, None, HERE)
    tensor.zero_()
    assert data.tensor().tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert data.tensor().stride() == (1, 3)
    assert data.device == HERE


def test_data_from_a_tensor_takes_the_layout_and_dtype_that_are_asked_for() -> None:
    spec = make_spec(torch.float64, (3, 2), (2, 1))
    parameter = torch.nn.Parameter(torch.arange(6.0).view(2, 3).t())
    data = Least().make_computation_data_from_tensor(parameter, spec, HERE)
    assert data.spec is spec
    assert data.tensor().tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert not data.tensor().requires_grad


def test_data_from_a_number() -> None:
    data = Least().make_computation_data_from_scalar(3, torch.int32, HERE)
    assert data.state is DataState.SCALAR
    assert data.tensor().dtype is torch.int32


def test_tensor_from_data_has_the_dtype_that_is_asked_for() -> None:
    data = handle([1.5, 2.5])
    assert Least().make_tensor_from_computation_data(data) is data.tensor()
    assert Least().make_tensor_from_computation_data(data, torch.float32) is data.tensor()
    cast = Least().make_tensor_from_computation_data(data, torch.int64)
    assert cast.dtype is torch.int64
    assert cast.tolist() == [1, 2]


def test_a_data_placeholder_holds_nothing() -> None:
    placeholder = Least().create_data_placeholder(HERE, make_spec(torch.float32, (2,), (1,)))
    assert not placeholder.has_value
    assert placeholder.size_bytes == 8


def test_data_behind_an_instruction_is_found_for_inputs_alone() -> None:
    made = computation(lambda x, y: x + y, torch.zeros(2), torch.zeros(2))
    first, second = torch.ones(2), torch.zeros(2)
    arguments = Arguments([first, second], [], torch.Generator(), CPU)
    least = Least()
    assert least.get_computation_data_from_node(made.program.inputs[1], made, arguments) is second
    assert least.get_computation_data_from_node(made.program.calls[0], made, arguments) is None


def test_arguments_make_tensors_of_handles_once() -> None:
    arguments = Arguments([handle([1.0]), torch.zeros(1)], [], torch.Generator(), CPU)
    tensors = arguments.inputs
    assert [tensor.tolist() for tensor in tensors if isinstance(tensor, torch.Tensor)] == [[1.0], [0.0]]
    assert arguments.inputs is tensors


def test_an_outcome_has_lists_of_its_own() -> None:
    assert Outcome([]).failures is not Outcome([]).failures
    assert Outcome([]).replaced == {}


# ---- devices


@NO_CUDA
def test_devices_are_those_that_are_there() -> None:
    least = Least()
    assert least.get_backend_devices() == [HERE]
    assert least.get_backend_device(torch.device("cpu")) == HERE
    assert least.get_backend_device(torch.device("cpu", 0)) == HERE


@NO_CUDA
@pytest.mark.parametrize("name", ["cuda", "cuda:1", "cpu:3"])
def test_a_device_that_is_not_there_is_refused_with_those_that_are(name: str) -> None:
    with pytest.raises(BackendError, match=r"least has no device \w+\n  try: there are: CPU0"):
        Least().get_backend_device(torch.device(name))


def test_default_device_is_that_of_the_settings() -> None:
    least = Least()
    assert least.get_default_device_type() == BackendDeviceType(settings.device_type)
    assert least.get_default_device_ordinal() == settings.device_ordinal
    assert least.eager_fallback_device_type() == settings.device_type


def test_default_device_is_set_where_it_exists() -> None:
    with settings.scope(device_type="cpu", device_ordinal=0):
        Least().set_default_device_type(BackendDeviceType("cpu"))
        Least().set_default_device_ordinal(0)
        assert (settings.device_type, settings.device_ordinal) == ("cpu", 0)


@NO_CUDA
def test_default_device_that_is_not_there_changes_nothing() -> None:
    with settings.scope(device_type="cpu", device_ordinal=0):
        with pytest.raises(BackendError, match="no device CUDA0"):
            Least().set_default_device_type(BackendDeviceType("cuda"))
        with pytest.raises(BackendError, match="no device CPU7"):
            Least().set_default_device_ordinal(7)
        assert (settings.device_type, settings.device_ordinal) == ("cpu", 0)


def test_compilation_devices_are_the_list_or_the_one_device() -> None:
    other = BackendDevice(BackendDeviceType("cuda"), 1)
    assert Least().get_compilation_devices(HERE, []) == [HERE]
    assert Least().get_compilation_devices(HERE, [HERE, other]) == [HERE, other]


# ---- random numbers, figures, start and end


def test_seed_decides_the_random_numbers_of_the_device() -> None:
    Least().set_rng_seed(5)
    first = torch.rand(4, device="ltc").tolist()
    Least().set_rng_seed(5)
    assert torch.rand(4, device="ltc").tolist() == first
    Least().set_rng_seed(6)
    assert torch.rand(4, device="ltc").tolist() != first


def test_seed_gives_the_numbers_of_eager() -> None:
    Least().set_rng_seed(7)
    torch.manual_seed(0)
    Least().set_rng_seed(7)
    drawn = torch.rand(4, device="ltc").cpu()
    assert torch.equal(drawn, torch.rand(4, generator=torch.Generator().manual_seed(7)))


def test_metrics_are_the_real_ones() -> None:
    least = Least()
    (torch.ones(2).to("ltc") + 1).cpu()
    before = least.get_metrics()["lazy::add.Tensor"]
    (torch.ones(2).to("ltc") + 1).cpu()
    assert least.get_metrics()["lazy::add.Tensor"] == before + 1
    assert "lazy::add.Tensor" in least.create_metric_report()


def test_memory_info_is_free_and_total() -> None:
    free, total = Least().get_memory_info(HERE)
    assert 0 < free <= total


def test_bindings_are_initialised_once_and_exit_is_announced_after_queued_work() -> None:
    script = """
import torch, torch_ltc
said = []
class Noisy(torch_ltc.Backend):
    name = "noisy"
    def initialize_aten_bindings(self): said.append("initialize " + self.name)
    def prepare_to_exit(self): print(*said, "exit " + self.name, sep=", ")
    def compile(self, program):
        said.append("compile")
        raise ValueError("none")
class Unused(Noisy):
    name = "unused"
torch_ltc.register_backend(Unused)
torch_ltc.use_backend(Noisy)
torch_ltc.use_backend("noisy")
for _ in range(3):
    torch.ones(2, device="ltc").add_(1)
    torch_ltc.sync()
"""
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout == "initialize noisy, compile, exit noisy\n"
