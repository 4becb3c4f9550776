"""Programs compiled by Inductor: where results lie, what is written, what wrong data does, and who else compiles."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torch_ltc
from tests.support.backends import record
from torch_ltc import events
from torch_ltc.backends.inductor import InductorBackend, backend
from torch_ltc.backends.inductor.backend import InductorFunction
from torch_ltc.config import settings
from torch_ltc.errors import BackendWarning, CompileError, ExecutionError
from torch_ltc.execute.sync import physical
from torch_ltc.lowering.backend_data import BackendData
from torch_ltc.lowering.lower import functional_form
from torch_ltc.lowering.registry import registry
from torch_ltc.program.instruction import Program
from torch_ltc.program.spec import spec_of
from torch_ltc.record.buffer import buffer_of

SCRIPT_TIMEOUT_S = 500


@pytest.fixture(autouse=True)
def nothing_pending() -> Iterator[None]:
    torch_ltc.sync(wait=True)
    yield
    torch_ltc.sync(wait=True)


@pytest.fixture
def inductor() -> Iterator[None]:
    """The device compiles with Inductor, which is not allowed to refuse a program."""
    with settings.scope(backend="inductor", backend_failure="error"):
        yield
        torch_ltc.sync(wait=True)


def compiled(
    function: Callable[..., Any], *inputs: Tensor, varying: set[int] | None = None
) -> tuple[Program, InductorFunction]:
    """The program of a function that touches its inputs in their order, and what Inductor makes of it."""
    backend = InductorBackend()
    program, numbers = record(function, *inputs)
    functional = functional_form(backend, program, numbers, varying or set()).program
    return functional, backend.compile(functional)


def run_script(source: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A script, run to its end in a process of its own; fails when the process does, also by a signal."""
    command = [sys.executable, *options, "-c", textwrap.dedent(source)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=SCRIPT_TIMEOUT_S,
        env={**os.environ, **environment},
        check=False,
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done


# ---- results and writes -------------------------------------------------------------------------------------------


def test_results_lie_in_memory_as_recorded() -> None:
    def layouts(images: Tensor, weight: Tensor) -> list[Tensor]:
        last = F.conv2d(images, weight, padding=1)
        return [last, last.relu(), images.transpose(0, 1) + 1, (images * 2).permute(3, 1, 0, 2), weight.sum((2, 3)).t()]

    images = torch.rand(2, 4, 5, 6).contiguous(memory_format=torch.channels_last)
    weight = torch.rand(8, 4, 3, 3)
    program, function = compiled(layouts, images, weight)
    specs = program.specs()
    made = dict(zip(program.results, function(images, weight), strict=True))
    assert [made[number].stride() for number in program.outputs] == [specs[number].stride for number in program.outputs]
    for number, expected in zip(program.outputs, layouts(images, weight), strict=True):
        torch.testing.assert_close(made[number].as_strided_(*_shape(expected)), expected, rtol=1e-5, atol=1e-5)


def _shape(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.size(), tensor.stride()


def test_updated_inputs_are_the_results_of_their_updates() -> None:
    def step(weight: Tensor, momentum: Tensor, gradient: Tensor) -> Tensor:
        momentum.mul_(0.9).add_(gradient)
        weight.sub_(momentum, alpha=0.1)
        return weight.sum()

    weight, momentum, gradient = torch.rand(40), torch.rand(40), torch.rand(40)
    expected = [tensor.clone() for tensor in (weight, momentum, gradient)]
    program, function = compiled(step, momentum, gradient, weight)
    assert len(program.updates) == 2
    total, *updated = function(momentum, gradient, weight)
    assert {id(tensor) for tensor in updated} == {id(weight), id(momentum)}
    torch.testing.assert_close(total, step(*expected))
    torch.testing.assert_close([weight, momentum, gradient], expected)


def test_data_of_another_backend_is_left_as_it_is() -> None:
    def step(weight: Tensor, gradient: Tensor) -> None:
        weight.sub_(gradient)

    weight, gradient = torch.rand(40), torch.rand(40)
    _, function = compiled(step, weight, gradient)
    held = BackendData.from_tensor(weight.clone())
    (updated,) = function(held, BackendData.from_tensor(gradient))
    torch.testing.assert_close(updated, weight - gradient)
    torch.testing.assert_close(held.tensor(), weight, rtol=0, atol=0)


def test_an_input_in_another_layout_is_read_by_its_elements() -> None:
    x = torch.rand(6, 8)
    _, function = compiled(lambda x: x * 2, x)
    (doubled,) = function(x.t().contiguous().t())
    torch.testing.assert_close(doubled, x * 2)


def test_inputs_and_equal_values_are_returned_as_often_as_asked() -> None:
    x = torch.rand(30)
    program, function = compiled(lambda x: (x.clone(), x.sin(), x.sin()), x)
    before, *sines = function(x)
    assert before is x
    assert len(sines) == 2
    assert len(program.calls) == 1
    torch.testing.assert_close(sines, [x.sin(), x.sin()])


def test_half_precision_is_rounded_after_every_call() -> None:
    x = torch.linspace(-3, 3, 64, dtype=torch.bfloat16)

    def chain(x: Tensor) -> tuple[Tensor, Tensor]:
        y = (x / 3).sigmoid() * x
        return y, y.float()

    _, function = compiled(chain, x)
    narrow, wide = function(x)
    torch.testing.assert_close(wide, narrow.float(), rtol=0, atol=0)
    torch.testing.assert_close(narrow, chain(x)[0])


# ---- the code that is made ----------------------------------------------------------------------------------------


def test_the_numbers_of_a_float32_program_are_read_once_and_made_float32(tmp_path: Path, monkeypatch: Any) -> None:
    def step(weight: Tensor, rate: float) -> Tensor:
        return weight.mul(rate).sub(rate)

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    weight = torch.rand(64)
    program, function = compiled(lambda w: step(w, 0.3), weight, varying={0, 1})
    assert program.numbers
    text = function.text()
    assert "const double*" in text
    assert "Vectorized<double>" not in text
    assert "VectorizedN<double" not in text
    for rate in (0.3, -1.5):
        (made,) = function(weight, *(torch.tensor(rate, dtype=torch.float64) for _ in program.numbers))
        torch.testing.assert_close(made, step(weight, rate))


def test_a_foreach_optimizer_is_few_kernels(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    count = 12

    def adam(*tensors: Tensor) -> None:
        weights, gradients, means, squares = (list(tensors[i * count : (i + 1) * count]) for i in range(4))
        torch._foreach_lerp_(means, gradients, 0.1)
        torch._foreach_mul_(squares, 0.999)
        torch._foreach_addcmul_(squares, gradients, gradients, 0.001)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_add_(roots, 1e-8)
        torch._foreach_addcdiv_(weights, means, roots, -0.01)

    tensors = [torch.rand(20 + i) for _ in range(4) for i in range(count)]
    program, numbers = record(adam, *tensors)
    functional = functional_form(InductorBackend(), program, numbers, set()).program
    assert len(functional.updates) == 3 * count
    text = InductorBackend().compile(functional).text()
    kernels = text.count("async_compile.cpp_pybinding")
    assert 1 <= kernels < count


@pytest.mark.parametrize("adam", [False, True], ids=["SGD", "Adam"])
def test_a_training_step_has_no_memory_for_parameters_and_state_besides_their_own(adam: bool) -> None:
    model = nn.Linear(13, 7).to("ltc")
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if adam:
        optimizer = torch.optim.Adam(model.parameters())

    def step(batch: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch), labels)
        loss.backward()
        with settings.scope(sync_after_optimizer=False):
            optimizer.step()
        return loss

    batch, labels = torch.rand(16, 13), torch.randint(7, (16,))
    # The first step makes the optimizer's state.
    step(batch.to("ltc"), labels.to("ltc"))
    torch_ltc.sync(wait=True)
    program, function = compiled(step, batch, labels)
    assert len(program.updates) == (6 if adam else 4)
    # The weight's gradient, which the program returns.
    assert function.text().count("empty_strided_cpu((7, 13)") == 1


def test_rows_of_a_cache_are_written_in_place() -> None:
    def decode(table: Tensor, tokens: Tensor, cache: Tensor, position: Tensor) -> Tensor:
        rows = table[tokens]
        cache.index_copy_(0, position, rows)
        return cache.sum(1)

    cache, position, table = torch.zeros(64, 37), torch.tensor([5, 3]), torch.rand(11, 37)
    tokens = torch.tensor([10, 2])
    expected = cache.clone()
    sums = decode(table, tokens, expected, position)
    _, function = compiled(decode, table, tokens, cache, position)
    assert function.text().count("empty_strided_cpu((64, 37)") == 0
    made, _ = function(table, tokens, cache, position)
    torch.testing.assert_close([cache, made], [expected, sums])
    with pytest.raises(IndexError, match="out of range"):
        function(table, torch.tensor([11, 2]), cache, position)
    torch.testing.assert_close(cache, expected, rtol=0, atol=0)


def test_compiled_programs_are_found_again_by_another_process(tmp_path: Path) -> None:
    source = """
        import torch, torch_ltc
        from torch._dynamo.utils import counters

        torch_ltc.use_backend("inductor")
        weight = torch.ones(8, 8).to("ltc")
        for rate in (0.1, 0.2, 0.3, 0.4):
            weight.add_(weight @ weight, alpha=-rate / 100)
            torch_ltc.sync()
        total = weight.sum().item()
        seen = counters["inductor"]
        print(f"{total:.6f}", seen["fxgraph_cache_miss"], seen["fxgraph_cache_hit"])
    """
    runs = [
        run_script(source, "-W", "error", "-W", "ignore::DeprecationWarning", TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
        for _ in range(2)
    ]
    (first, misses, hits), (second, later_misses, later_hits) = (run.stdout.split() for run in runs)
    assert first == second
    assert (int(misses) > 0, int(hits)) == (True, 0)
    assert (int(later_misses), int(later_hits) > 0) == (0, True)
    assert [run.stderr for run in runs] == ["", ""]


def test_work_that_is_queued_at_exit_is_still_compiled() -> None:
    source = """
        import sys
        import torch, torch_ltc
        from torch_ltc import events

        torch_ltc.use_backend("inductor")
        torch_ltc.config.settings.backend_failure = "error"
        # One write a line: two threads write.
        events.subscribe(lambda event: sys.stdout.write(f"{event.backend} {event.failed}\\n"), events.ExecuteEvent)
        x = torch.rand(30, 30).to("ltc")
        for _ in range(3):
            made = (x.sin() @ x.cos()).sum(0)
            torch_ltc.sync()
        sys.stdout.write("end\\n")
    """
    done = run_script(source)
    lines = done.stdout.splitlines()
    # The last line of the script, and the runs in their order; which comes first is a race.
    assert "end" in lines
    lines.remove("end")
    assert lines == ["interpreter False", "inductor False", "inductor False"]
    assert done.stderr == ""


def test_warnings_of_the_compiler_about_itself_reach_nobody() -> None:
    before = _filters()
    # Warnings are errors here, and Inductor warns that it has no code for complex numbers.
    x = torch.complex(torch.rand(3, 4), torch.rand(3, 4))
    _, function = compiled(lambda x: x.sin() * x.cos(), x)
    torch.testing.assert_close(function(x), [x.sin() * x.cos()])
    assert _filters() == before


def _filters() -> list[Any]:
    """The filters of warnings, without those that the device puts in front, which match on its worker alone."""
    return [each for each in warnings.filters if type(each[1]).__module__.partition(".")[0] != "torch_ltc"]


# ---- on the device ------------------------------------------------------------------------------------------------


def memory_of(tensor: Tensor) -> int:
    """The address of the data behind a tensor of the device."""
    torch_ltc.sync(wait=True)
    return physical(buffer_of(tensor), spec_of(tensor)).data_ptr()


def test_parameters_and_optimizer_state_stay_where_they_are(inductor: None) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 4).to("ltc")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch = torch.rand(16, 8).to("ltc")
    addresses = []
    for _ in range(5):
        optimizer.zero_grad()
        model(batch).square().sum().backward()
        optimizer.step()
        state = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
        addresses.append([memory_of(tensor) for tensor in (*model.parameters(), *state)])
    assert addresses[2] == addresses[3] == addresses[4]


def test_draws_have_the_bits_of_eager(inductor: None) -> None:
    def draw(x: Tensor) -> list[Tensor]:
        masks = [F.dropout(x, 0.3), F.dropout(x + 1, 0.3), F.dropout(x[:2].t(), 0.5)]
        return [*masks, torch.rand_like(x) * 2, torch.bernoulli(x / 2), x.clone().normal_() + 1]

    x = torch.ones(6, 9)
    for seed in range(4):
        torch.manual_seed(seed)
        expected = draw(x)
        torch.manual_seed(seed)
        actual = draw(x.to("ltc"))
        torch_ltc.sync()
        for ours, theirs in zip(actual, expected, strict=True):
            torch.testing.assert_close(ours.cpu() == 0, theirs == 0)
            torch.testing.assert_close(ours.cpu(), theirs)


def test_a_program_that_cannot_be_compiled_is_named_and_runs_in_the_interpreter() -> None:
    backend = registry.get("inductor")
    assert isinstance(backend, InductorBackend)
    x = torch.rand(3, 5).to("ltc")
    backend.options = {"cpp.cxx": (None, "no-such-compiler")}
    refusals: list[events.RefusalEvent] = []
    stop = events.subscribe(refusals.append, events.RefusalEvent)  # type: ignore[arg-type]
    try:
        with settings.scope(backend="inductor"), pytest.warns(BackendWarning, match="inductor cannot compile program"):
            for _ in range(3):
                made = (x * 3).sinh().cos()
                torch_ltc.sync(wait=True)
    finally:
        backend.options = {}
        stop()
    assert [refusal.stage for refusal in refusals] == ["compile"]
    assert "install a C++ compiler" in refusals[0].reason
    torch.testing.assert_close(made.cpu(), (x.cpu() * 3).sinh().cos())


def test_an_error_of_a_lowering_names_the_call_and_its_line(monkeypatch: Any) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("LoweringException: AssertionError: no\n  target: aten.sinh.default\n  args[0]: ...")

    monkeypatch.setattr("torch_ltc.backends.inductor.backend.compile_fx", fail)
    with pytest.raises(CompileError, match=r"at aten::sinh: RuntimeError: LoweringException(.|\n)*test_inductor\.py"):
        compiled(lambda x: x.cosh().sinh(), torch.rand(3))


def test_torch_compile_on_the_users_thread_works_at_the_same_time(inductor: None) -> None:
    def before(x: Tensor) -> Tensor:
        return x.sin() * 2 + x

    def meanwhile(x: Tensor) -> Tensor:
        return (x.cos() + 1).square().sum(0)

    def after(x: Tensor) -> Tensor:
        return x.exp().mean()

    x = torch.rand(7, 11)
    lazy = x.to("ltc")
    torch.testing.assert_close(torch.compile(before)(x), before(x))
    compiles: list[events.CompileEvent] = []
    stop = events.subscribe(compiles.append, events.CompileEvent)  # type: ignore[arg-type]
    for _ in range(3):
        made = lazy.tan().atan() + 3
        # Does not wait: the worker compiles while this thread goes on.
        torch_ltc.sync()
    torch.testing.assert_close(torch.compile(meanwhile)(x), meanwhile(x))
    torch.testing.assert_close(made.cpu(), x.tan().atan() + 3)
    torch.testing.assert_close(torch.compile(after)(x), after(x))
    stop()
    assert [event.backend for event in compiles] == ["inductor"]


# ---- wrong data ---------------------------------------------------------------------------------------------------


def test_wrong_data_raises_before_anything_is_written() -> None:
    def step(table: Tensor, tokens: Tensor) -> Tensor:
        rows = table[tokens]
        table.add_(rows.sum())
        return rows

    table = torch.rand(50, 4)
    before = table.clone()
    _, function = compiled(step, table, torch.zeros(900, dtype=torch.int64))
    with pytest.raises(IndexError, match="out of range"):
        function(table, torch.full((900,), 50))
    torch.testing.assert_close(table, before, rtol=0, atol=0)


WRONG_DATA = """
    import torch, torch_ltc
    from torch import nn
    from torch.nn import functional as F
    from torch_ltc.errors import ExecutionError

    torch.set_num_threads({threads})
    torch_ltc.use_backend("inductor")
    torch_ltc.config.settings.backend_failure = "error"

    def failing(run):
        try:
            run()
            torch_ltc.sync(wait=True)
        except ExecutionError as error:
            return str(error)
        return "no error"

    class Step:
        def __init__(self, device):
            torch.manual_seed(0)
            self.model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 20)).to(device)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
            self.device = device

        def __call__(self, tokens, labels):
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(tokens.to(self.device)), labels.to(self.device))
            loss.backward()
            self.optimizer.step()
            return loss

    torch.manual_seed(1)
    tokens, labels = torch.randint(50, (4000,)), torch.randint(20, (4000,))
    lazy, eager = Step("ltc"), Step("cpu")
    for _ in range(4):
        lazy(tokens, labels)
        eager(tokens, labels)
    wrong_tokens, wrong_labels = tokens.clone(), labels.clone()
    wrong_tokens[3000], wrong_labels[2000] = 50, -7
    print(failing(lambda: lazy(wrong_tokens, labels)).splitlines()[0])
    print(failing(lambda: lazy(tokens, wrong_labels)).splitlines()[0])
    for ours, theirs in zip(lazy.model.parameters(), eager.model.parameters()):
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach())
    torch.testing.assert_close(lazy(tokens, labels).detach().cpu(), eager(tokens, labels).detach())

    numbers, divisors = torch.arange(4000), torch.arange(4000) % 7 + 1
    for _ in range(3):
        made = (numbers.to("ltc") + 1) // divisors.to("ltc")
        torch_ltc.sync()
    torch.testing.assert_close(made.cpu(), (numbers + 1) // divisors)
    divisors[1234] = 0
    print(failing(lambda: (numbers.to("ltc") + 1) // divisors.to("ltc")).splitlines()[0])
    print("alive", torch.get_num_threads())
"""


@pytest.mark.parametrize("threads", [1, 2])
def test_wrong_data_ends_as_in_eager_and_not_the_process(threads: int) -> None:
    lines = run_script(WRONG_DATA.format(threads=threads)).stdout.splitlines()
    assert lines == [
        "aten::embedding failed when its program ran: index out of range in self",
        "aten::nll_loss_forward failed when its program ran: Target -7 is out of bounds.",
        "aten::floor_divide failed when its program ran: ZeroDivisionError",
        f"alive {threads}",
    ]


def test_wrong_data_names_the_line_that_used_it(inductor: None) -> None:
    table = torch.rand(9, 3).to("ltc")
    for _ in range(3):
        made = table[torch.tensor([8, 1]).to("ltc")].cos()
        torch_ltc.sync()
    torch.testing.assert_close(made.cpu(), table.cpu()[[8, 1]].cos())
    with pytest.raises(ExecutionError, match=r"aten::index.Tensor(.|\n)*test_inductor\.py"):
        table[torch.tensor([9, 1]).to("ltc")].cos().cpu()


def test_what_is_drawn_while_a_program_is_compiled_stays_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    # The user's thread goes on while the worker's compiles, and all threads share the generator of the CPU.
    drawn: list[Tensor] = []
    original = backend.compile_fx_inner

    def inner(*args: Any, **kwargs: Any) -> Any:
        with ThreadPoolExecutor(1) as other:
            drawn.append(other.submit(torch.rand, 3).result())
        return original(*args, **kwargs)

    monkeypatch.setattr(backend, "compile_fx_inner", inner)
    torch.manual_seed(0)
    compiled(lambda x: (x * 2).exp(), torch.ones(5))
    drawn.append(torch.rand(3))
    torch.manual_seed(0)
    assert torch.equal(torch.cat(drawn), torch.cat([torch.rand(3) for _ in drawn]))
    assert len(drawn) >= 2
