"""`explain` names the cause and the user's line of a new program, and says what to do."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torch_ltc
from tests.support.backends import FunctionalBackend, SymbolicBackend, record, registered
from tests.support.lines import marked
from torch_ltc.config import settings
from torch_ltc.debug import history as history_module
from torch_ltc.debug.causes import Compared
from torch_ltc.debug.explain import explain_recording
from torch_ltc.debug.first_difference import first_difference
from torch_ltc.debug.history import history
from torch_ltc.debug.messages import MESSAGES
from torch_ltc.debug.recording import CompileRow, Explanation, Memory, ProgramRow, Recording, Span
from torch_ltc.errors import LtcError, RecompileError, RecompileWarning
from torch_ltc.source import UNKNOWN, Source

pytestmark = pytest.mark.blocking_tiers

HERE = Path(__file__).name


def newest() -> Explanation:
    """Why the program that was synced last was new."""
    torch_ltc.sync(wait=True)
    found = history.recording(texts=False).programs[-1].explanation
    assert found is not None
    return found


# ---- the nearest of several -----------------------------------------------------------------------------------------

VARIATIONS = {"dtype": "dtype", "size": "size", "branch": "operation", "number": "number", "live": "live"}


def varied(chosen: frozenset[str]) -> None:
    kind = torch.float64 if "dtype" in chosen else torch.float32
    weight = torch.ones(4, 4, dtype=kind).to("ltc")
    x = torch.ones(6 if "size" in chosen else 3, 4, dtype=kind).to("ltc")
    y = (x @ weight).relu()
    if "branch" in chosen:
        y = y.tanh()
    kept = y * (2 if "number" in chosen else 2.0)
    held = kept.exp()
    total = held.sum()
    if "live" not in chosen:
        del held, kept
    torch_ltc.sync()
    total.item()


@pytest.mark.parametrize("names", itertools.permutations(VARIATIONS, 3), ids="-".join)
def test_the_nearest_program_is_compared_with_in_whatever_order(names: tuple[str, ...]) -> None:
    """Each alone, then each pair, then all three: the cause is one that leads there from a nearest known program."""
    known: list[frozenset[str]] = []
    sequence = [(), *((name,) for name in names), *itertools.combinations(names, 2), names]
    for chosen in map(frozenset, sequence):
        varied(chosen)
        found = newest()
        if known:
            fewest = min(len(chosen ^ other) for other in known)
            near = {VARIATIONS[name] for other in known if len(chosen ^ other) == fewest for name in chosen ^ other}
            assert found.cause in near, (sorted(chosen), found)
        known.append(chosen)


def test_a_new_branch_is_not_blamed_on_a_dtype_that_was_there_before() -> None:
    for chosen in ((), ("dtype",), ("branch",)):
        varied(frozenset(chosen))
    found = newest()
    assert (found.cause, found.nearest) == ("operation", found.program - 2)


def test_a_program_that_was_forgotten_is_not_said_to_end_elsewhere() -> None:
    varied(frozenset())
    known = newest()
    torch_ltc.ir_cache.reset()
    varied(frozenset())
    found = newest()
    assert found.program != known.program
    assert (found.cause, found.code, found.nearest) == ("again", "LTC116", known.program)
    assert "forgotten" in found.difference


# ---- a table of causes ----------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)  # linear
        x = self.drop(x)  # dropout
        return x.relu()


def batch_size() -> None:
    net = nn.Linear(4, 4).to("ltc")
    for size in (3, 3, 5):
        y = net(torch.ones(size, 4).to("ltc"))  # batch size
        y.sum().item()


def dtype() -> None:
    for kind in (torch.float32, torch.float32, torch.float64):
        x = torch.ones(3, dtype=kind).to("ltc")
        (x * x).sum().item()  # dtype


def scalar() -> None:
    x = torch.ones(3).to("ltc")
    for number in (2, 3, 2.5):
        (x * number).sum().item()  # scalar


def slice_offset() -> None:
    x = torch.ones(9).to("ltc")
    for start in (0, 0, 4):
        (x + 1)[start : start + 2].sum().item()  # slice


def new_branch() -> None:
    x = torch.ones(3).to("ltc")
    for odd in (False, False, True):
        y = x * 2
        if odd:
            y = y.exp()  # branch
        y.sum().item()


def live_set() -> None:
    x = torch.ones(3).to("ltc")
    kept = []
    for keep in (False, False, True):
        y = x * 2  # kept
        z = y + 1
        if keep:
            kept.append(y)
        del y
        torch_ltc.sync()
        z.sum().item()
        torch_ltc.sync()


def train_and_eval() -> None:
    net, x = Net().to("ltc"), torch.ones(3, 4).to("ltc")
    for train in (True, True, False):
        net.train(train)
        net(x).sum().item()


def flag_of_a_module() -> None:
    norm, x = nn.BatchNorm1d(4).to("ltc"), torch.ones(3, 4).to("ltc")
    for train in (True, True, False):
        # Counting batches is an operation of its own, which evaluation does not have.
        norm.num_batches_tracked = None
        norm.train(train)
        norm(x).sum().item()  # norm


def new_parameter() -> None:
    parameters = [nn.Parameter(torch.ones(3, device="ltc")) for _ in range(3)]
    for count in (2, 2, 3):
        used = parameters[:count]
        optimizer = torch.optim.SGD(used, lr=0.1)
        for parameter in used:
            parameter.grad = torch.ones(3).to("ltc")
        optimizer.step()  # parameters


def learning_rate() -> None:
    parameter = nn.Parameter(torch.ones(3, device="ltc"))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    torch_ltc.sync()
    for lr in (0.1, 0.1, 0.5, 0.25):
        optimizer.param_groups[0]["lr"] = lr
        parameter.grad = torch.ones(3).to("ltc")
        optimizer.step()  # lr


def other_module() -> None:
    x = torch.ones(3, 4).to("ltc")
    plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).to("ltc")
    other = nn.Sequential(plain[0], nn.Tanh(), plain[2])
    for net in (plain, plain, other):
        net(x).sum().item()  # module


def bound() -> None:
    x = torch.ones(3).to("ltc")
    with settings.scope(pending_bound=8):
        for _ in range(12):
            x = x + 1  # bound
        torch_ltc.sync(wait=True)


def earlier_read() -> None:
    x = torch.ones(3).to("ltc")
    for log in (False, False, True):
        y = (x * 2).sum()
        if log:
            y.item()  # read
        (y + 1).item()


def layout() -> None:
    for transposed in (False, False, True):
        x = torch.ones(3, 3).to("ltc")
        x = x.t() if transposed else x
        torch_ltc.sync()
        (x + 1).sum().item()  # layout


@dataclass(frozen=True)
class Case:
    """A script, the program to look at among the new ones, and what is to be said of it."""

    run: Callable[[], None]
    cause: str
    mark: str
    difference: str


CASES = [
    Case(batch_size, "size", "batch size", r"size 0 of input \d .* was 3, is now 5"),
    Case(dtype, "dtype", "dtype", r"the dtype of input 0 .* was float32, is now float64"),
    Case(scalar, "number", "scalar", r"the number 'other' was of type int, is now float"),
    Case(slice_offset, "argument", "slice", r"the argument 'start' was 0, is now 4"),
    Case(new_branch, "operation", "branch", r"aten::exp was not there before"),
    Case(live_set, "live", "kept", r"the result of aten::mul\S* is held when the program ends"),
    Case(train_and_eval, "mode", "dropout", r"is no longer there"),
    Case(flag_of_a_module, "mode", "norm", r"the argument 'training' was True, is now False: of aten::\w+"),
    Case(new_parameter, "inputs", "parameters", r"takes 3 tensors as 'self', took 2"),
    Case(other_module, "operation", "module", r"aten::tanh is where aten::relu was"),
    Case(layout, "layout", "layout", r"the strides of input 0 .* were \[3, 1\], are now \[1, 3\]"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.run.__name__)
def test_a_new_program_is_explained_by_its_cause_and_line(case: Case) -> None:
    case.run()
    torch_ltc.sync(wait=True)
    programs = history.recording(texts=False).programs
    found = [row.explanation for row in programs if row.explanation is not None and row.explanation.cause != "first"]
    assert case.cause in [one.cause for one in found]
    explanation = next(one for one in found if one.cause == case.cause)
    assert re.search(case.difference, explanation.difference)
    assert (Path(explanation.source.file).name, explanation.source.line) == (HERE, marked(__file__, case.mark))
    assert explanation.nearest
    assert MESSAGES[explanation.code].name == case.cause


def test_making_the_parameters_is_not_taken_for_training() -> None:
    with torch.device("ltc"):
        net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))  # parameters made
    for _ in range(2):
        net(torch.ones(2, 4).to("ltc")).sum().item()
    explanation = newest()
    assert explanation.cause == "operation"
    assert (explanation.difference, explanation.source.line) == (
        "aten::empty_strided is no longer there",
        marked(__file__, "parameters made"),
    )


def test_the_same_operation_of_another_line_is_another_operation() -> None:
    x = torch.ones(2, 3).to("ltc")
    makers = [lambda: x.sin().reshape(6)]
    makers.append(lambda: x.sin().reshape(3, 2))  # other line
    for maker in (makers[0], makers[0], makers[1]):
        (maker() * 3).exp().sum().item()
    explanation = newest()
    assert explanation.cause == "operation"
    assert explanation.source.line == marked(__file__, "other line")


def test_a_program_that_reaches_the_bound_says_so() -> None:
    bound()
    first = history.recording(texts=False).programs[0]
    assert first.explanation is not None
    assert (first.explanation.code, first.explanation.cause) == ("LTC112", "bound")
    assert first.explanation.source.line == marked(__file__, "bound")


def test_a_program_that_is_cut_by_a_read_now_and_then_names_the_read() -> None:
    earlier_read()
    explanations = [row.explanation for row in history.recording(texts=False).programs]
    ended = [one for one in explanations if one is not None and one.cause == "ending"]
    assert [one.source.line for one in ended] == [marked(__file__, "read")]
    assert re.fullmatch(r"it ends after 2 calls, the other after 3: a value was read", ended[0].difference)


def test_the_physical_device_is_named_when_it_changes() -> None:
    program, _ = record(lambda x: x + 1, torch.ones(2))
    other = replace(program, device=torch.device("cuda", 0))
    found = first_difference(program, other)
    assert found is not None
    assert (found.cause, found.text) == ("device", "the physical device was cpu and is now cuda:0")


def compile_reasons() -> list[Explanation]:
    torch_ltc.sync(wait=True)
    return [row.explanation for row in history.recording(texts=False).compiles]


def test_a_learning_rate_needs_no_compilation_on_torchscript() -> None:
    learning_rate()
    assert [one.cause for one in compile_reasons()] == ["first"]


def test_a_learning_rate_is_a_constant_once_where_the_backend_makes_one_of_it() -> None:
    with registered(FunctionalBackend()), settings.scope(backend="functional"):
        learning_rate()
        first, second = compile_reasons()
    assert first.cause == "first"
    assert (second.cause, second.source.line) == ("number", marked(__file__, "lr"))
    assert re.search(r"the number '\w+' of aten::\S+ at .* was -?0\.1 and is now -?0\.5", second.difference)
    assert "the number" in second.promoted


def test_a_size_that_changes_is_promoted() -> None:
    with registered(SymbolicBackend()), settings.scope(backend="symbolic"):
        batch_size_twice()
        first, second = compile_reasons()
    assert first.cause == "first"
    assert second.cause == "size"
    assert second.source.line == marked(__file__, "sized")
    assert re.search(r"size 0 of input 0 .* was 3 and is now 5", second.difference)
    assert second.promoted.startswith("size 0 of input 0")


def batch_size_twice() -> None:
    for size in (3, 3, 3, 5, 5, 7, 9):
        x = torch.ones(size, 4).to("ltc")
        (x * 2).exp().sum().item()  # sized


def test_another_backend_is_a_cause() -> None:
    x = torch.ones(3).to("ltc")
    for _ in range(3):
        (x * 2).sum().item()
    with registered(FunctionalBackend()), settings.scope(backend="functional"):
        for _ in range(3):
            (x * 2).sum().item()
        causes = [one.cause for one in compile_reasons()]
    assert causes == ["first", "backend"]


# ---- warnings and errors --------------------------------------------------------------------------------------------


class Sized(FunctionalBackend):
    """Compiles a program for its sizes alone."""

    name = "sized"


def many_sizes(sizes: tuple[int, ...] = (2, 3, 4, 5)) -> None:
    for size in sizes:
        x = torch.ones(size).to("ltc")
        for _ in range(2):
            (x * 2).exp().sum().item()  # many


def test_the_third_compilation_for_a_site_warns_with_reason_and_id() -> None:
    with registered(Sized()), settings.scope(backend="sized", recompiles="warn"):
        with pytest.warns(RecompileWarning) as caught:
            many_sizes((2, 3, 4, 5, 6, 7, 8))
            torch_ltc.sync(wait=True)
        torch_ltc.sync(wait=True)
    texts = [str(one.message) for one in caught]
    assert [re.search(r"the (\w+) time", text)[1] for text in texts] == ["3rd", "6th"]
    line = f"{__file__}:{marked(__file__, 'many')} in many_sizes"
    assert texts[0] == (
        f"LTC102 size: compiled for the 3rd time for the sync at {line}, because size 0 of input 0 (float32[4], "
        f"used by aten::mul.Tensor) was 3, is now 4 at {line} (torch_ltc.explain() says more; docs/messages.md#ltc102)"
    )
    assert "\n" not in texts[0]


def test_two_compilations_do_not_warn() -> None:
    with registered(Sized()), settings.scope(backend="sized", recompiles="warn"):
        many_sizes((2, 3))
        torch_ltc.sync(wait=True)


def test_the_third_compilation_is_an_error_on_demand_and_loses_nothing() -> None:
    with registered(Sized()), settings.scope(backend="sized", recompiles="error"):
        with pytest.raises(RecompileError, match="LTC102 size: compiled for the 3rd time"):
            many_sizes((2, 3, 4))
            torch_ltc.sync(wait=True)
        assert (torch.ones(2).to("ltc") * 2).tolist() == [2, 2]


# ---- text -----------------------------------------------------------------------------------------------------------


def a_recording() -> Recording:
    train = Source("train.py", 12, "Net.forward", module="Net.fc")
    step = Source("train.py", 40, "main")
    size = MESSAGES["LTC102"]
    changed = Explanation(
        2, size.code, size.name, 1, "size 0 of input 0 was 32, is now 17", train, "size 0 of input 0", size.advice
    )
    first = Explanation(1, "LTC101", "first", 0, "no program like it was known", train, "", MESSAGES["LTC101"].advice)
    figures = {"failed": 0, "loads": 0, "record_s": 0.1, "run_s": 0.2, "refused": "", "lines": ()}
    programs = (
        ProgramRow(
            1, 20, 4, 2, step, "optimizer", train, 9, 9, 1, backend="b", compiles=1, compile_s=0.5, explanation=first,
            states=("interpreted", "queued", "compiling", "compiled"), state_reason="b: compiled by b", **figures,
        ),
        ProgramRow(
            2, 20, 4, 2, step, "optimizer", train, 1, 1, 1, backend="interpreter", compiles=0, compile_s=0.0,
            explanation=changed, states=("interpreted", "queued", "compiling"), state_reason="b: hot", **figures,
        ),
    )  # fmt: skip
    compiles = (
        CompileRow(1, "b", 0.1, 0.5, 1, 1, False, False, first),
        CompileRow(2, "b", 0.9, 0.25, 9, 2, False, True, changed),
    )
    spans = (Span("sync", "user", 0.0, 0.1, 1, 1), Span("sync", "user", 0.8, 0.1, 9, 2))
    return Recording((), "", 1.0, 10, {}, (), programs, spans, (), (), compiles, Memory(), {})


OVERVIEW = """\
2 compilations, 750 ms in all, in 10 syncs of 2 programs

program 1: compiled by b in 500 ms after step 1
  LTC101 first: No program like this one was known: its code ran for the first time.
  difference: no program like it was known
  at train.py:12 in Net.forward [Net.fc]
  try: Nothing to change: each part of the code is compiled once, and kept on disk for later processes.
  synced at train.py:40 in main: an optimizer finished its step

program 2: compiled by b in another process in 250 ms after step 9, number 2 for this site
  LTC102 size: A size differs: of an input, or one that an operation was given.
  nearest known: program 1
  difference: size 0 of input 0 was 32, is now 17
  at train.py:12 in Net.forward [Net.fc]
  run-time inputs from now on: size 0 of input 0
  try: Nothing if it happens once: a size that changes becomes a run-time input. If it goes on, keep the size \
constant: pad, bucket, or DataLoader(drop_last=True) for a smaller last batch.
  synced at train.py:40 in main: an optimizer finished its step

programs by compile state: 1 compiled, 1 compiling"""

_LAST = OVERVIEW.split("\n\n")[-2]
_WHY = OVERVIEW.partition("number 2 for this site\n")[2].rpartition("\n\n")[0].rpartition("\n")[0]
LAST_SYNC = f"""\
program 2: 20 calls, 4 inputs, 2 outputs; 1 sync, 1 run
  it ran in the interpreter: a program is compiled when it is seen again
  compile states: interpreted > queued > compiling (b: hot)
  it was new because:
{textwrap.indent(_WHY, "  ")}
  synced at train.py:40 in main: an optimizer finished its step"""


def test_the_overview() -> None:
    assert explain_recording(a_recording()) == OVERVIEW


def test_the_last_compilation_is_the_last_paragraph() -> None:
    assert explain_recording(a_recording(), last="compile") == _LAST


def test_the_last_sync_and_one_program() -> None:
    compiled = _LAST.splitlines()[0]
    assert explain_recording(a_recording(), last="sync") == LAST_SYNC + "\n\n" + compiled
    assert explain_recording(a_recording(), program=1).splitlines()[1] == (
        "  it runs on b, which compiled it in 500 ms"
    )


def test_what_is_not_there_is_an_error_that_says_what_is() -> None:
    with pytest.raises(LtcError, match=r"there is no program 7 in the recording\n  try: one of 1, 2"):
        explain_recording(a_recording(), program=7)
    with pytest.raises(LtcError, match="explain knows no last='read'"):
        torch_ltc.explain(last="read")


def test_without_compilations_that_is_said() -> None:
    empty = replace(a_recording(), compiles=(), programs=(), spans=())
    assert explain_recording(empty) == "nothing was compiled in 0 syncs of 0 programs"
    assert explain_recording(empty, last="compile") == "nothing was compiled in 0 syncs of 0 programs"
    assert explain_recording(empty, last="sync") == "nothing was synced"


def test_a_tensor_is_explained_while_it_is_pending_and_when_it_is_computed() -> None:
    x = torch.ones(3).to("ltc")
    y = x * 2  # explained
    line = f"{__file__}:{marked(__file__, 'explained')}"
    text = torch_ltc.explain(y)
    assert text.startswith(f"the tensor is pending: float32[3], aten::mul.Tensor at {line} in test_a_tensor")
    torch_ltc.sync(wait=True)
    text = torch_ltc.explain(y)
    assert re.match(rf"the tensor is computed; program \d+ made it by aten::mul.Tensor at {line}", text)
    assert repr(text) == str(text)
    assert torch_ltc.explain(x) == "the tensor is computed, and no program made it: it was copied to the device"
    with pytest.raises(LtcError, match="explain takes a tensor on ltc, got one on cpu"):
        torch_ltc.explain(torch.ones(2))


def test_unknown_lines_are_left_out() -> None:
    row = a_recording().compiles[0]
    blank = replace(row, explanation=replace(row.explanation, source=UNKNOWN))
    text = explain_recording(replace(a_recording(), compiles=(blank,)), last="compile")
    assert "unknown" not in text


def test_programs_are_compared_only_where_the_comparison_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    explain_new = history_module.explain_new

    def counting(own: Compared, known: Sequence[Compared]) -> Explanation:
        compared.append(own.identity)
        return explain_new(own, known)

    monkeypatch.setattr(history_module, "explain_new", counting)
    x = torch.ones(2, device="ltc")
    for count in range(1, 9):
        y = x
        for _ in range(count):
            y = y + 1
        torch_ltc.sync(wait=True)
    identity = history.recording(texts=False, causes=False).programs[-1].identity
    torch_ltc.explain()
    assert compared == []
    for text in (torch_ltc.explain(y), torch_ltc.explain(identity), torch_ltc.explain(last="sync")):
        assert "it was new because:" in text
    assert compared == [identity]
