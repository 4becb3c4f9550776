"""The TorchScript backend: what it takes, and that it gives what the interpreter gives."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import torch_ltc
from torch_ltc import events
from torch_ltc.backends import torchscript
from torch_ltc.backends.torchscript import ScriptComputation, TorchScriptBackend, graph, segments
from torch_ltc.backends.torchscript.source_ranges import Lines
from torch_ltc.config import settings
from torch_ltc.execute import run
from torch_ltc.execute.pending import pending_program
from torch_ltc.program.instruction import Call, Program, Scalar, Value
from torch_ltc.source import UNKNOWN, Source


@pytest.fixture(autouse=True)
def nothing_pending() -> Iterator[None]:
    torch_ltc.sync(wait=True)
    yield
    torch_ltc.sync(wait=True)


CALLS: dict[str, Callable[[Tensor], Any]] = {
    "numbers of each type": lambda x: (x + 1, x * 2.5, x.to(torch.complex64) * (1 + 2j), x.bool() + True),
    "bool for a number": lambda x: torch.full((2,), True, device=x.device),
    "number in a tensor's place": lambda x: torch.where(x > 0, x, 3.0),
    "list of tensors": lambda x: torch.cat([x, x + 1, x]),
    "list of results": lambda x: [part * 2 for part in x.split(1)],
    "one result in a list": lambda x: x.split(3)[0] + 1,
    "optional tensors in a list": lambda x: x[:, torch.tensor([1, 0], device=x.device)],
    "foreach": lambda x: torch._foreach_mul([x, x + 1], [2.0, 3.0]),
    "foreach in place": lambda x: (lambda y: (torch._foreach_add_([y], 1.0), y)[1])(x.clone()),
    "several results": lambda x: torch.linalg.qr(x)[1].abs(),
    "none arguments": lambda x: F.layer_norm(x, (4,)),
    "static lists": lambda x: x.sum((0, 1)),
    "empty list": lambda x: x.view(12)[3].view(()).expand(()) + 1,
    "strings": lambda x: torch.div(x, 0.7, rounding_mode="floor"),
    "dtype": lambda x: x.to(torch.float64),
    "memory format": lambda x: x.view(1, 1, 3, 4).clone(memory_format=torch.channels_last),
    "view of another dtype": lambda x: x.view(torch.int32) + 1,
    "view of complex numbers": lambda x: torch.view_as_complex(x.view(3, 2, 2)).conj() * 2,
    "factories": lambda x: torch.arange(4, device=x.device) + torch.zeros(4, device=x.device),
    "infinite number": lambda x: x.masked_fill(x > 0, float("-inf")),
    "nan": lambda x: x + float("nan"),
    "large integer": lambda x: x.long() + 2**40,
    "in-place on a view": lambda x: (lambda y: (y[1:].t().mul_(3), y)[1])(x.clone()),
    "random": lambda x: F.dropout(x, 0.5) + torch.randn(4, device=x.device),
    "padding": lambda x: F.pad(x, (1, 2), value=1.5),
    "embedding": lambda x: F.embedding(torch.tensor([1, 0], device=x.device), x, padding_idx=0),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.view(1, 1, 3, 4)] * 3),
    "as_strided": lambda x: x.as_strided((2, 2), (1, 3), 2) + 1,
}


@pytest.mark.parametrize("name", CALLS)
def test_compiled_call_gives_the_bits_of_the_interpreter_without_complaint(name: str) -> None:
    def step() -> list[Tensor]:
        torch.manual_seed(0)
        x = torch.linspace(-1, 1, 12).view(3, 4).to("ltc")
        out = CALLS[name](x)
        return [value.cpu() for value in (out if isinstance(out, (list, tuple)) else [out])]

    runs: list[events.ExecuteEvent] = []
    with settings.scope(backend="torchscript", fallback="error"):
        expected = step()
        step()
        stop = events.subscribe(runs.append, events.ExecuteEvent)
        try:
            compiled = step()
            torch_ltc.wait_device_ops()
        finally:
            stop()
    assert {run.backend for run in runs} == {"torchscript"}
    for ours, theirs in zip(compiled, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True, check_stride=True)


def test_numbers_are_parameters_of_the_function() -> None:
    x = torch.zeros(2).to("ltc")
    y = x * 2.5 + 3
    text = TorchScriptBackend().compile(pending_program([y])).to_string()
    assert "float" in text.split("):")[0]
    assert "int" in text.split("):")[0]
    assert "2.5" not in text


def test_a_long_program_is_cut_into_functions_that_give_the_same() -> None:
    x = torch.ones(2).to("ltc")
    torch_ltc.sync(wait=True)

    def step() -> list[Tensor]:
        y, parts = x, []
        for number in range(4500):
            y = y + x
            if number % 1000 == 0:
                parts.append(y)
        y.mul_(2)
        return [*parts, y]

    with settings.scope(backend="torchscript"):
        for _ in range(3):
            assert [int(value[0].item()) for value in step()] == [2, 1002, 2002, 3002, 4002, 9002]


def test_custom_operator_inside_a_compiled_program() -> None:
    @torch.library.custom_op("torch_ltc_tests_script::twice", mutates_args=(), device_types="cpu")
    def twice(x: Tensor) -> Tensor:
        return x * 2

    @twice.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    with settings.scope(backend="torchscript"):
        for _ in range(3):
            assert (twice(torch.ones(2).to("ltc") + 1) - 1).tolist() == [3.0, 3.0]


# Calls that TorchScript has no operator for, whatever their arguments; the first of these because its compiler takes a
# dtype for a size, the others because an `out` is a tensor like any other to it.
LACKING = {"aten::view.dtype", "aten::max.unary_out", "aten::min.unary_out", "aten::set.out"}


def test_torchscript_has_an_operator_for_every_overload_but_those_known() -> None:
    lacking = set()
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::"):
            plain, _, overload = name.partition(".")
            op = getattr(getattr(torch.ops.aten, plain.removeprefix("aten::")), overload or "default")
            code: Any = torch._C.Graph()
            inputs = [code.addInput(f"a{position}") for position in range(len(op._schema.arguments))]
            for value, argument in zip(inputs, op._schema.arguments, strict=True):
                value.setType(argument.type)
            node = code.create(plain, inputs, len(op._schema.returns))
            chosen = torch._C.parse_schema(node.schema()) if node.schema() != "(no schema)" else None
            if chosen is None or chosen.overload_name != overload:
                lacking.add(name)
    assert lacking == LACKING


def test_an_overload_that_means_another_thing_by_a_number_is_not_taken() -> None:
    # The number is the only coordinate; to `trapz.dx` it would be the distance between coordinates.
    call = Call(torch.ops.aten.trapz.x, (Value(0), Scalar(0, float)), {"dim": -1}, (0,), (), 1, UNKNOWN)
    program = Program(0, (call,), (), 1, 1, False)
    with pytest.raises(graph.NotTaken, match="trapz"):
        graph.GraphLowering(segments.split(program, set())[0], torch.device("cpu")).lower()


def test_calls_that_torchscript_lacks_are_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(4).to("ltc")
    for _ in range(20):
        x = x.view(torch.int32).add(1).view(torch.float32)
    program = pending_program([x])
    tries: list[int] = []

    def split(*given: Any) -> list[segments.Segment]:
        tries.append(1)
        return segments.split(*given)

    monkeypatch.setattr(torchscript, "split", split)
    backend = TorchScriptBackend()
    computation = backend.compile(program)
    assert isinstance(computation, ScriptComputation)
    assert (len(tries), len(computation.direct_calls), len(computation.functions)) == (2, 40, 20)
    backend.compile(program)
    assert len(tries) == 3


def test_lines_are_made_once_and_at_most_so_many() -> None:
    lines = Lines(most=2)
    first, second, third = (Source("train.py", number, "main") for number in (3, 5, 8))
    known = lines.of([first, second, Source("", 0, ""), first])
    assert sorted(known) == [("train.py", 3), ("train.py", 5)]
    assert str(known["train.py", 5]).strip().endswith("# train.py:5:0")
    assert sorted(lines.of([second, third])) == [("train.py", 5)]
    assert lines.of([third]) == {}
    assert len(lines) == 2


@pytest.mark.parametrize("file", ["<stdin>", "größe.py", "not-text-\udcff.py", "with space.py"])
def test_any_file_name_and_any_text_makes_a_line(file: str) -> None:
    text = "\tgröße = 'äöü' + \"日本\"" + "\udcff" + "x" * 1000
    linecache.cache[file] = (1, None, ["\n", text], file)
    [node] = Lines().of([Source(file, 2, "main")]).values()
    del linecache.cache[file]
    assert str(node).strip().endswith(f"# {file.encode('utf-8', 'replace').decode()}:2:1")
    assert text[:17] in node.sourceRange()


def test_results_are_checked_until_a_run_needed_no_correction(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[int] = []
    check = run._check

    def noted(entry: Any, *rest: Any) -> bool:
        checked.append(entry.program.identity)
        return check(entry, *rest)

    monkeypatch.setattr(run, "_check", noted)
    x = torch.ones(4, 17).to("ltc")
    with settings.scope(backend="torchscript", tiers="blocking"):
        for _ in range(5):
            y = (x + 1).relu() * 2
            torch_ltc.sync(wait=True)
            assert torch.equal(y.cpu(), torch.full((4, 17), 4.0))
    assert len(checked) == 1
