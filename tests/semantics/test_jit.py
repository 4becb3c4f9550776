"""`torch_ltc.jit`: a replayed call does what a recorded one would have done, or is recorded."""

from __future__ import annotations

import copy
import functools
import io
import itertools
import math
import random
import struct
import sys
import types
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import torch_ltc
from tests.support.backends import FunctionalBackend, registered
from tests.support.graphs import graphs_on_the_cpu
from torch_ltc.config import settings
from torch_ltc.debug.history import history
from torch_ltc.debug.recording import from_json
from torch_ltc.debug.report import report_html
from torch_ltc.errors import JitError
from torch_ltc.replay.function import JitFunction
from torch_ltc.replay.state import State

Make = Callable[[Any], torch.optim.Optimizer]

_OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=False),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01),
}


def counts(function: JitFunction) -> tuple[int, int]:
    """How many calls were recorded and replayed."""
    calls = function._calls.values()
    return sum(each.recordings for each in calls), sum(each.replays for each in calls)


def reason(function: JitFunction) -> str:
    """Why the last call was not replayed."""
    return next(iter(function._calls.values())).reason


def train(device: str, make: Make, use_jit: bool, steps: int = 20, schedule: bool = True) -> tuple[list[Tensor], Any]:
    """Losses, parameters, buffers and gradients of a small training."""
    torch.manual_seed(3)
    layers = [nn.Linear(8, 16), nn.Dropout(0.2), nn.ReLU(), nn.BatchNorm1d(16), nn.Linear(16, 4)]
    model = nn.Sequential(*layers)
    batches = [(torch.randn(6, 8), torch.randint(0, 4, (6,))) for _ in range(steps)]
    torch.manual_seed(5)
    torch.ltc.manual_seed(5)
    model.to(device)
    optimizer = make(model.parameters())
    rates = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    function = torch_ltc.jit(step) if use_jit else step
    losses = []
    for x, y in batches:
        losses.append(function(x.to(device), y.to(device)).detach())
        if schedule:
            rates.step()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [t.detach().cpu() for t in (*losses, *model.parameters(), *model.buffers(), *gradients)], function


@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_training_with_a_schedule_is_equal_to_eager(name: str) -> None:
    expected, _ = train("cpu", _OPTIMIZERS[name], use_jit=False)
    got, function = train("ltc", _OPTIMIZERS[name], use_jit=True)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    recorded, replayed = counts(function)
    assert recorded <= 5
    assert replayed >= 15


def test_calls_are_replayed_once_two_recordings_agree() -> None:
    function = torch_ltc.jit(lambda x: x * 2 + 1)
    results = [function(torch.full((2,), float(i)).to("ltc")) for i in range(6)]
    assert [result.tolist() for result in results] == [[2.0 * i + 1] * 2 for i in range(6)]
    assert counts(function) == (2, 4)


def test_arguments_may_be_nested_and_of_several_kinds() -> None:
    @dataclass
    class Batch:
        x: Tensor
        scale: float

    @torch_ltc.jit
    def function(batch: Batch, extra: dict[str, list[Tensor]]) -> dict[str, Any]:
        return {"sum": batch.x * 2 + extra["y"][0], "same": extra["y"][1], "text": "done"}

    for i in range(5):
        y = [torch.full((3,), 1.0 * i).to("ltc"), torch.ones(1).to("ltc")]
        result = function(Batch(torch.full((3,), 10.0 * i).to("ltc"), 1.0), {"y": y})
        assert result["sum"].tolist() == [21.0 * i] * 3
        assert result["same"] is y[1]
        assert result["text"] == "done"
    assert counts(function)[1] == 3
    other = function(Batch(torch.ones(5).to("ltc"), 1.0), {"y": [torch.ones(5).to("ltc"), torch.ones(1).to("ltc")]})
    assert other["sum"].tolist() == [3.0] * 5


def _given_twice(jit: Callable[..., Any], device: str) -> list[Any]:
    def function(a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        return a + 1 if a is b else a * b

    function, found = jit(function), []
    x = torch.ones(4, device=device)
    for number in range(12):
        a, b = torch.full((4,), float(number), device=device), torch.full((4,), 3.0, device=device)
        given = ((a, b), (x, x), (x, x.detach()), (a, b))[number // 3]
        found.append((function(*given).tolist(), a.tolist(), x.tolist()))
    return found


def _given_and_captured(jit: Callable[..., Any], device: str) -> list[Any]:
    x = torch.ones(4, device=device)

    def function(a: Tensor) -> Tensor:
        a.add_(1)
        return a * x

    function, found = jit(function), []
    for number in range(20):
        a = torch.full((4,), float(number), device=device)
        found.append((function((a, x, a, x)[number // 4 % 4]).tolist(), a.tolist(), x.tolist()))
        if number % 5 == 4:
            x.fill_(2)
    return found


@pytest.mark.parametrize("calls", [_given_twice, _given_and_captured])
@pytest.mark.parametrize("way", ["interpreter", "functional", "captured"])
def test_arguments_that_share_memory_where_they_did_not(calls: Callable[..., list[Any]], way: str) -> None:
    expected = calls(lambda function: function, "cpu")
    with ExitStack() as stack:
        if way == "functional":
            stack.enter_context(registered(FunctionalBackend()))
        if way == "captured":
            stack.enter_context(graphs_on_the_cpu())
        backend = "functional" if way == "functional" else "interpreter"
        graphs = "always" if way == "captured" else "auto"
        stack.enter_context(settings.scope(backend=backend, tiers="blocking", cuda_graphs=graphs))
        assert calls(torch_ltc.jit, "ltc") == expected


def test_results_of_earlier_calls_keep_their_values() -> None:
    function = torch_ltc.jit(lambda x: x + 1)
    kept = [function(torch.full((2,), float(i)).to("ltc")) for i in range(8)]
    assert [t.tolist() for t in kept] == [[i + 1.0] * 2 for i in range(8)]


def test_a_number_that_is_only_handed_to_operators_becomes_an_input() -> None:
    function = torch_ltc.jit(lambda x, scale: x * scale)
    x = torch.ones(3).to("ltc")
    assert [function(x, 0.5 * i).tolist()[0] for i in range(8)] == [0.5 * i for i in range(8)]
    recorded, replayed = counts(function)
    assert (recorded, replayed) == (2, 6)


def test_a_number_that_decides_is_looked_at_each_time() -> None:
    function = torch_ltc.jit(lambda x, scale: x * scale if scale < 2 else x - scale)
    x = torch.ones(3).to("ltc")
    expected = [float(s) if s < 2 else 1.0 - s for s in (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 1.5, 1.5, 1.5)]
    got = [function(x, s).tolist()[0] for s in (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 1.5, 1.5, 1.5)]
    assert got == expected


@dataclass
class Rates:
    """Numbers in an argument."""

    rate: float


# What a function may do with a number that it is given, besides handing it to operators.
NUMBER_USES: dict[str, Callable[[Tensor, float], Any]] = {
    "returned": lambda x, c: (x * 2, c),
    "returned in a dictionary": lambda x, c: {"made": x * c, "rates": [c, -c]},
    "its negative returned": lambda x, c: (x * 2, -c),
    "its negative handed over": lambda x, c: x * -c,
    "a branch on its negative": lambda x, c: x * 2 if -c > 0 else x * 3,
    "a branch on the number with a sign": lambda x, c: x * 2 if +c > 1 else x * 3,
    "converted": lambda x, c: x * (float(c) + 1),
    "a branch on what it is converted to": lambda x, c: x * 2 if float(c) > 1 else x * 3,
    "a branch on its real part": lambda x, c: x * 2 if c.real > 1 else x * 3,
    "conjugated": lambda x, c: x * c.conjugate(),
    "asked whether it is whole": lambda x, c: x * 2 if c.is_integer() else x * 3,
    "its digits": lambda x, c: x * len(c.hex()),
    "as a ratio": lambda x, c: x * c.as_integer_ratio()[0],
    "divided by": lambda x, c: x * divmod(7.0, c)[0],
    "rounded": lambda x, c: x * round(c, 1),
    "an index": lambda x, c: x * (1, 2, 3)[int(c) % 3],
    "a power": lambda x, c: x * 2.0**c,
    "looked up": lambda x, c: x * 2 if c in {1.5, 2.5} else x * 3,
    "copied": lambda x, c: (x * 2, copy.copy(c), copy.deepcopy(c)),
    "in a text": lambda x, c: x * len(f"{c:.3f}"),
    "the largest": lambda x, c: x * max(c, 1.0),
    "read in C": lambda x, c: x * math.sin(c),
    "its sign read in C": lambda x, c: x * math.copysign(1.0, c),
    "its size read in C": lambda x, c: x * 2 if math.isinf(c) else x * 3,
    "added up in C": lambda x, c: x * math.fsum([c, 1.0]),
    "packed": lambda x, c: x * struct.pack("d", c)[6],
    "an array": lambda x, c: x * float(np.array([c]).sum()),
    "an element": lambda x, c: torch.cat([x, torch.full((1,), c, device=x.device)]),
    "in a dataclass": lambda x, c: x * 2 if c > 1 else x * 3,
}


@pytest.mark.parametrize("name", NUMBER_USES)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_number_is_never_frozen_whatever_the_function_does_with_it(name: str) -> None:
    function, wrapped = NUMBER_USES[name], name == "in a dataclass"
    ours = torch_ltc.jit((lambda x, given: function(x, given.rate)) if wrapped else function)
    data = torch.linspace(1, 2, 4)
    x = data.to("ltc")
    given = Rates(0.0)
    for c in (0.5, 0.5, 0.5, 1.5, 2.5, -0.5, -3.0, 2.0, 4.0, -0.0, 0.0, 0.25, 1.5, float("inf"), 2.5, 0.5):
        given.rate = c
        made, expected = _outcome(ours, x, given if wrapped else c), _outcome(function, data, c)
        assert repr(made) == repr(expected), c
        assert _kinds_of(made) == _kinds_of(expected)


def _outcome(function: Callable[..., Any], *args: Any) -> Any:
    """What a call returns, on the CPU, or the class of its error."""
    try:
        return pytree.tree_map_only(Tensor, Tensor.tolist, function(*args))
    except Exception as error:
        return type(error)


def _kinds_of(made: Any) -> list[type]:
    return [type(leaf) for leaf in pytree.tree_leaves(made)]


RATE_USES: dict[str, Callable[[float], Any]] = {
    "compared": lambda rate: rate > 0.05,
    "compared after arithmetic": lambda rate: 2 * rate - 0.01 > 0.05,
    "converted": lambda rate: float(rate) > 0.05,
    "compared in C": lambda rate: math.copysign(1.0, rate) > 0,
    "the least": lambda rate: min(rate, 0.05) == 0.05,
    "nothing": lambda rate: True,
}


@pytest.mark.parametrize("name", RATE_USES)
@pytest.mark.parametrize("whole", [False, True])
def test_a_learning_rate_that_decides_is_looked_at_each_time(name: str, whole: bool) -> None:
    def run(device: str, wrap: bool) -> tuple[list[Any], list[Any]]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.ones(4, 3, device=device)

        def step() -> Any:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            if RATE_USES[name](optimizer.param_groups[0]["lr"]):
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            return loss.detach(), optimizer.param_groups[0]["lr"]

        call = torch_ltc.jit(step) if wrap else step
        losses, rates = [], []
        for number in range(16):
            optimizer.param_groups[0]["lr"] = number // 4 if whole else 0.1 * (1 - number // 2 / 8)
            loss, rate = call()
            losses.append(loss)
            rates += [rate, optimizer.param_groups[0]["lr"]]
        return [loss.item() for loss in losses], [(type(rate), rate) for rate in rates]

    assert run("ltc", True) == run("cpu", False)


def test_a_learning_rate_that_only_optimizers_use_is_a_number_of_the_program() -> None:
    model = nn.Linear(3, 2).to("ltc")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    x = torch.ones(4, 3, device="ltc")

    @torch_ltc.jit
    def step() -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    for number in range(30):
        optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)
        step()
    assert counts(step)[1] > 20


def test_a_constant_that_is_changed_is_seen() -> None:
    options = {"scale": 2.0}
    function = torch_ltc.jit(lambda x: x * options["scale"])
    x = torch.ones(2).to("ltc")
    for _ in range(4):
        assert function(x).tolist() == [2.0, 2.0]
    options["scale"] = 5.0
    assert function(x).tolist() == [5.0, 5.0]


def test_a_branch_on_state_is_seen() -> None:
    class Net(nn.Module):
        flipped = False

        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if not self.flipped else x + 100

    net = Net()
    net.flipped = False
    function = torch_ltc.jit(lambda x: net(x))
    x = torch.ones(2).to("ltc")
    for _ in range(4):
        assert function(x).tolist() == [2.0, 2.0]
    net.flipped = True
    assert function(x).tolist() == [101.0, 101.0]


SCALE = 3.0


class _Scaling(nn.Module):
    shift = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * SCALE + self.shift


def test_globals_of_methods_attributes_of_classes_and_of_modules_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    options = types.ModuleType("options_of_the_test")
    options.offset = 0.5  # type: ignore[attr-defined]
    monkeypatch.setitem(globals(), "options", options)
    net = _Scaling()
    function = torch_ltc.jit(lambda x: net(x) - options.offset)
    x = torch.ones(2).to("ltc")
    for _ in range(4):
        assert function(x).tolist() == [3.5, 3.5]
    monkeypatch.setitem(globals(), "SCALE", 5.0)
    assert function(x).tolist() == [5.5, 5.5]
    for _ in range(3):
        function(x)
    monkeypatch.setattr(_Scaling, "shift", 2.0)
    assert function(x).tolist() == [6.5, 6.5]
    for _ in range(3):
        function(x)
    options.offset = 1.5  # type: ignore[attr-defined]
    assert function(x).tolist() == [5.5, 5.5]
    assert counts(function)[1] >= 6


def test_dropout_in_train_and_eval_mode() -> None:
    layer = nn.Dropout(0.5)
    function = torch_ltc.jit(lambda x: layer(x))
    x = torch.ones(64).to("ltc")
    draws = [tuple(function(x).tolist()) for _ in range(6)]
    assert len(set(draws)) == 6
    layer.eval()
    assert function(x).tolist() == [1.0] * 64
    layer.train()
    assert 0.0 in function(x).tolist()


def test_a_method_of_two_instances() -> None:
    class Scaler:
        def __init__(self, scale: float) -> None:
            self.weight = torch.full((2,), scale).to("ltc")

        @torch_ltc.jit
        def step(self, x: Tensor) -> Tensor:
            return x * self.weight

    first, second = Scaler(2.0), Scaler(3.0)
    x = torch.ones(2).to("ltc")
    for _ in range(5):
        assert first.step(x).tolist() == [2.0, 2.0]
        assert second.step(x).tolist() == [3.0, 3.0]


def test_two_functions_that_alternate_on_shared_state() -> None:
    weight = {"w": torch.ones(2).to("ltc")}

    def grow(x: Tensor) -> Tensor:
        weight["w"].mul_(2)
        return weight["w"] + x

    def shrink(x: Tensor) -> Tensor:
        weight["w"].sub_(1)
        return weight["w"] + x

    one, other = torch_ltc.jit(grow), torch_ltc.jit(shrink)
    w = 1.0
    x = torch.zeros(2).to("ltc")
    for _ in range(6):
        w *= 2
        assert one(x).tolist() == [w, w]
        w -= 1
        assert other(x).tolist() == [w, w]
    assert counts(one)[1] >= 3


def test_slice_assignment_and_a_view_whose_offset_changes() -> None:
    table = torch.zeros(6).to("ltc")

    @torch_ltc.jit
    def write(row: Tensor, value: Tensor) -> Tensor:
        row.copy_(value)
        return table.sum()

    for i in range(6):
        write(table[i : i + 1], torch.full((1,), float(i)).to("ltc"))
    assert table.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_tensor_that_is_captured_and_bound_to_another_is_seen() -> None:
    state = {"x": torch.ones(2).to("ltc")}
    function = torch_ltc.jit(lambda y: state["x"] + y)
    y = torch.ones(2).to("ltc")
    for _ in range(4):
        assert function(y).tolist() == [2.0, 2.0]
    state["x"] = torch.full((2,), 9.0).to("ltc")
    for _ in range(4):
        assert function(y).tolist() == [10.0, 10.0]
    state["x"].data = torch.full((2,), 19.0).to("ltc")
    assert function(y).tolist() == [20.0, 20.0]


def test_a_tensor_that_is_bound_to_an_equal_one_is_seen() -> None:
    state = {"x": torch.ones(1).to("ltc")}
    function = torch_ltc.jit(lambda y: state["x"] + y)
    y = torch.ones(1).to("ltc")
    for _ in range(4):
        assert function(y).tolist() == [2.0]
    state["x"] = torch.ones(1).to("ltc")
    assert function(y).tolist() == [2.0]
    state["x"].add_(5)
    assert function(y).tolist() == [7.0]


def test_a_tensor_whose_shape_changes_in_place_is_seen() -> None:
    table = torch.arange(4.0).view(2, 2).to("ltc")
    function = torch_ltc.jit(lambda y: table @ y)
    y = torch.tensor([1.0, 0.0]).to("ltc")
    for _ in range(4):
        assert function(y).tolist() == [0.0, 2.0]
    table.t_()
    for _ in range(4):
        assert function(y).tolist() == [0.0, 1.0]


def test_a_parameter_that_is_frozen_or_thawed_is_seen() -> None:
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).to("ltc")
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)

    @torch_ltc.jit
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = layers(x).sum()
        loss.backward()
        optimizer.step()
        return loss

    x = torch.ones(1, 2).to("ltc")
    for _ in range(5):
        step(x)
    frozen = layers[0].weight
    layers[0].requires_grad_(False)
    frozen.grad = layers[0].bias.grad = None
    before = frozen.tolist()
    for _ in range(5):
        step(x)
    assert frozen.tolist() == before
    layers[0].requires_grad_(True)
    for _ in range(5):
        step(x)
    assert frozen.tolist() != before


@pytest.mark.parametrize(
    ("values", "expected"),
    [((1.0, -1.0), (1.0, -1.0)), ((0.0, -0.0), (0.0, -0.0)), ((True, 2, True), (1.0, 2.0, 1.0))],
)
def test_a_number_in_a_container_that_changes_is_seen(values: tuple[float, ...], expected: tuple[float, ...]) -> None:
    options = {"scale": values[0]}
    function = torch_ltc.jit(lambda x: x * options["scale"])
    x = torch.ones(1).to("ltc")
    for value, wanted in zip(values, expected, strict=True):
        options["scale"] = value
        for _ in range(4):
            assert str(function(x).tolist()[0]) == str(wanted)


def test_a_number_that_changes_its_type_is_seen() -> None:
    options: dict[str, Any] = {"scale": 1}
    function = torch_ltc.jit(lambda x: x * options["scale"])
    x = torch.ones(1, dtype=torch.int64).to("ltc")
    for _ in range(4):
        assert function(x).dtype is torch.int64
    options["scale"] = 1.0
    assert function(x).dtype is torch.float32


def test_a_set_whose_contents_change_is_seen() -> None:
    chosen = {0, 1}
    function = torch_ltc.jit(lambda x: x[sorted(chosen)[0]] * 2)
    x = torch.arange(4.0).to("ltc")
    for _ in range(4):
        assert function(x).item() == 0.0
    chosen.remove(0)
    chosen.add(3)
    assert function(x).item() == 2.0


def test_gradients_are_accumulated_as_in_eager() -> None:
    results = {}
    for device in ("cpu", "ltc"):
        torch.manual_seed(0)
        layer = nn.Linear(3, 2).to(device)
        x = torch.ones(4, 3).to(device)

        def micro(x: Tensor, layer: nn.Module = layer) -> Tensor:
            loss = layer(x).square().mean()
            loss.backward()
            return loss

        function = torch_ltc.jit(micro) if device == "ltc" else micro
        seen = []
        for i in range(12):
            function(x)
            if i % 4 == 3:
                seen.append([p.grad.cpu().clone() for p in layer.parameters() if p.grad is not None])
                layer.zero_grad()
        results[device] = [t for step in seen for t in step]
    assert all(torch.equal(a, b) for a, b in zip(results["cpu"], results["ltc"], strict=True))


def test_decoding_with_a_static_cache() -> None:
    cache = torch.zeros(8, 2).to("ltc")

    @torch_ltc.jit
    def step(token: Tensor, position: Tensor) -> Tensor:
        cache.index_copy_(0, position, token)
        return cache.sum(0)

    total = torch.zeros(2)
    for i in range(8):
        token = torch.full((1, 2), float(i))
        total += token[0]
        assert torch.equal(step(token.to("ltc"), torch.tensor([i]).to("ltc")).cpu(), total)
    assert counts(step) == (2, 6)


def test_a_number_that_changes_by_itself_is_recorded() -> None:
    clock = itertools.count()
    function = torch_ltc.jit(lambda x: x + float(next(clock)))
    x = torch.zeros(2).to("ltc")
    assert [function(x).tolist()[0] for _ in range(8)] == [float(i) for i in range(8)]
    assert counts(function)[1] == 0
    assert "changes in a way that jit does not know" in reason(function)


# ---- what cannot be replayed ----------------------------------------------------------------------------------------


def _read(x: Tensor) -> Tensor:
    return x * 2 if x.sum().item() > 0 else x


def _print(x: Tensor) -> Tensor:
    # Libraries look at more of the stream than `write`.
    assert sys.stdout.encoding
    print("hello")
    return x + 1


class _Stream(io.StringIO):
    """A stream that leads to more values than can be compared, as a test runner's does."""

    encoding = "utf-8"

    def __init__(self) -> None:
        super().__init__()
        self.owner = types.SimpleNamespace(items=[[number] for number in range(200_001)])


def test_what_rewrites_assertions_is_no_state_of_a_function() -> None:
    def asserting(x: Tensor) -> Tensor:
        assert x.shape
        return x + 1

    assert any(not name.isidentifier() for name in asserting.__code__.co_names)
    reached = State.now({"": asserting}).places.values()
    assert not [place.path for place in reached]


def test_streams_and_the_standard_library_are_no_state_of_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", _Stream())
    x = torch.ones(3).to("ltc")
    with pytest.raises(JitError, match="it prints"):
        for _ in range(4):
            torch_ltc.jit(_print, fallback="error")(x)
    torch_ltc.sync(wait=True)


def _upload(x: Tensor) -> Tensor:
    return x + torch.ones(3).to("ltc")


def _draw(x: Tensor) -> Tensor:
    return x + 1 if random.random() < 2 else x


_list: list[Tensor] = []


def _append(x: Tensor) -> Tensor:
    _list.append(x * 2)
    return x + 1


_count = {"n": 0}


def _counting(x: Tensor) -> Tensor:
    _count["n"] += 1
    return x * 3 if _count["n"] % 3 else x


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_read, "there is a sync at .*test_jit.py:.*a value was read"),
        (_print, "it prints"),
        (_upload, "a tensor is copied to the device at .*test_jit.py"),
        (_draw, "random numbers on the host"),
        (_append, "_list"),
        (_counting, r"it changes _count.n from \d+ to \d+"),
    ],
)
def test_what_a_replay_would_not_do_is_recorded_or_an_error(function: Callable[[Tensor], Tensor], message: str) -> None:
    _list.clear()
    _count["n"] = 0
    x = torch.ones(3).to("ltc")
    recorded = torch_ltc.jit(function)
    got = [recorded(x).tolist() for _ in range(6)]
    _list.clear()
    _count["n"] = 0
    assert got == [function(x).tolist() for _ in range(6)]
    assert counts(recorded)[1] == 0
    with pytest.raises(JitError, match=message):
        for _ in range(4):
            torch_ltc.jit(function, fallback="error")(x)
    torch_ltc.sync(wait=True)


def test_an_exception_leaves_as_it_would() -> None:
    options = {"fail": False}

    @torch_ltc.jit
    def function(x: Tensor) -> Tensor:
        if options["fail"]:
            raise ValueError("asked for")
        return x + 1

    x = torch.ones(2).to("ltc")
    for _ in range(3):
        function(x)
    options["fail"] = True
    with pytest.raises(ValueError, match="asked for"):
        function(x)
    options["fail"] = False
    assert function(x).tolist() == [2.0, 2.0]


def test_a_loss_whose_graph_is_kept_is_recorded() -> None:
    layer = nn.Linear(2, 1).to("ltc")
    function = torch_ltc.jit(lambda x: layer(x).relu().sum())
    x = torch.ones(3, 2).to("ltc")
    for _ in range(4):
        layer.zero_grad()
        function(x).backward()
        assert layer.weight.grad is not None
    assert counts(function)[1] == 0
    assert "stays alive" in reason(function)


def test_verify_every_records_again() -> None:
    function = torch_ltc.jit(lambda x: x + 1, verify_every=3)
    x = torch.ones(2).to("ltc")
    for _ in range(12):
        assert function(x).tolist() == [2.0, 2.0]
    recorded, replayed = counts(function)
    assert recorded >= 4
    assert replayed >= 6


def test_explain_says_what_became_of_the_calls() -> None:
    function = torch_ltc.jit(lambda x: x + 1)
    x = torch.ones(2).to("ltc")
    for _ in range(5):
        function(x)
    text = function.explain()
    assert "2 recorded, 3 replayed" in text
    assert "1 inputs are arguments" in text


class _Made(dict[str, type]):
    def __getitem__(self, key: str) -> object:
        return super().__getitem__(key)()


_made = _Made(relu=nn.ReLU)


def test_a_mapping_that_makes_its_values_is_no_state() -> None:
    function = torch_ltc.jit(lambda x: _made["relu"](x) + 1)  # type: ignore[operator]
    x = torch.ones(2).to("ltc")
    for _ in range(4):
        assert function(x).tolist() == [2.0, 2.0]
    assert counts(function) == (2, 2)


def test_gradients_stay_in_place_unless_someone_holds_them() -> None:
    layer = nn.Linear(3, 2).to("ltc")

    @torch_ltc.jit
    def step(x: Tensor) -> Tensor:
        layer.zero_grad()
        loss = layer(x).sum()
        loss.backward()
        return loss

    for scale in range(1, 5):
        step(torch.full((1, 3), float(scale)).to("ltc"))
    kept = layer.weight.grad
    step(torch.full((1, 3), 5.0).to("ltc"))
    assert layer.weight.grad is not kept
    assert kept is not None
    view = layer.weight.grad.view(-1)
    assert kept.tolist() == [[4.0] * 3] * 2
    del kept
    step(torch.full((1, 3), 6.0).to("ltc"))
    assert view.tolist() == [5.0] * 6
    del view
    identity = id(layer.weight.grad)
    step(torch.full((1, 3), 7.0).to("ltc"))
    assert id(layer.weight.grad) == identity
    assert layer.weight.grad.tolist() == [[7.0] * 3] * 2
    # The same tensor in other memory, and someone has what it lay in.
    before = layer.weight.grad.detach()
    layer.weight.grad.data = torch.zeros(2, 3).to("ltc")
    step(torch.full((1, 3), 8.0).to("ltc"))
    assert layer.weight.grad.tolist() == [[8.0] * 3] * 2
    assert before.tolist() == [[7.0] * 3] * 2
    assert counts(step)[1] >= 5


def test_autograd_is_told_of_what_a_replay_writes_to() -> None:
    def run(device: str, wrap: bool) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, cache = torch.ones(4, 3, device=device), torch.zeros(4, 3, device=device)

        def step(given: Tensor) -> Tensor:
            optimizer.zero_grad()
            model(given).sum().backward()
            optimizer.step()
            return cache.add_(given)

        def fill(given: Tensor) -> Tensor:
            given[0] = 1.5
            return given * 2

        calls = [torch_ltc.jit(each) if wrap else each for each in (step, fill)]
        messages = []
        for _ in range(6):
            weight = model.weight
            for call, changed in ((calls[0], weight), (calls[0], cache), (calls[1], x)):
                kept = (weight * changed.sum()).sin() if changed is not weight else (weight * weight).sin()
                graph = (changed.clone().requires_grad_() * changed).sum() + kept.sum()
                before = changed._version
                call(x)
                with pytest.raises(RuntimeError, match="modified by an inplace operation") as error:
                    graph.backward()
                messages.append((changed._version - before, str(error.value).partition("[")[0]))
        return messages

    assert run("ltc", True) == run("cpu", False)


def test_a_hook_that_is_added_is_seen() -> None:
    layer = nn.Linear(2, 1).to("ltc")
    function = torch_ltc.jit(lambda x: layer(x) * 1)
    x = torch.ones(1, 2).to("ltc")
    with torch.no_grad():
        for _ in range(4):
            expected = function(x).item()
        layer.register_forward_hook(lambda module, args, result: result + 10)
        assert function(x).item() == pytest.approx(expected + 10)
        layer._forward_hooks = type(layer._forward_hooks)()
        assert function(x).item() == expected


@pytest.mark.parametrize("method", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_of_a_parameter_that_is_added_or_removed_or_changes_is_seen(method: str) -> None:
    factor = 10.0

    def gradients(device: str) -> list[list[float]]:
        nonlocal factor
        factor = 10.0
        weight = torch.ones(2, device=device, requires_grad=True)

        def hook(given: torch.Tensor) -> torch.Tensor | None:
            if method == "register_hook":
                return given * factor
            given.grad.mul_(factor)  # type: ignore[union-attr]
            return None

        def step(x: torch.Tensor) -> None:
            weight.grad = None
            (weight * x).sum().backward()

        run = torch_ltc.jit(step) if device == "ltc" else step
        x = torch.ones(2).to(device)
        found = []

        def run_some() -> None:
            for _ in range(4):
                run(x)
                assert weight.grad is not None
                found.append(weight.grad.tolist())

        run_some()
        handle = getattr(weight, method)(hook)
        run_some()
        factor = 3.0
        run_some()
        other = getattr(weight, method)(hook)
        run_some()
        handle.remove()
        run_some()
        other.remove()
        run_some()
        return found

    assert gradients("ltc") == gradients("cpu")


class _Warming(torch.optim.Optimizer):
    """An optimizer that does something else from its sixth step on."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["step"] = state.get("step", 0) + 1
            with torch.no_grad():
                parameter.add_(parameter.grad, alpha=-0.5 if state["step"] < 6 else 0.25)
                if state["step"] > 7:
                    parameter.mul_(2)


DECIDING: dict[str, Callable[[list[torch.Tensor]], torch.optim.Optimizer]] = {
    "RAdam": lambda parameters: torch.optim.RAdam(parameters, 0.1, foreach=False),
    "RAdam, foreach": lambda parameters: torch.optim.RAdam(parameters, 0.1, foreach=True),
    "of the user's": _Warming,
}


@pytest.mark.parametrize("name", DECIDING)
def test_an_optimizer_that_decides_by_its_step_count_is_not_replayed_past_it(name: str) -> None:
    def trained(device: str) -> list[list[float]]:
        weight = torch.ones(3, device=device, requires_grad=True)
        optimizer = DECIDING[name]([weight])
        x = torch.arange(3.0).to(device)

        def step() -> None:
            optimizer.zero_grad()
            (weight * x).square().sum().backward()
            optimizer.step()

        run = torch_ltc.jit(step) if device == "ltc" else step
        found = []
        for _ in range(12):
            run()
            found.append(weight.detach().tolist())
        return found

    assert trained("ltc") == trained("cpu")


def _replace_steps(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["step"] = state["step"] + 2


def _forget_one(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.pop(optimizer.param_groups[0]["params"][0])


CHANGES: dict[str, Callable[[torch.optim.Optimizer], object]] = {
    "state is forgotten": lambda optimizer: optimizer.state.clear(),
    "state of one parameter is forgotten": _forget_one,
    "steps are replaced": _replace_steps,
    "state is loaded": lambda optimizer: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
    "another rate": lambda optimizer: optimizer.param_groups[0].update(lr=0.5),
    "an integer for a rate": lambda optimizer: optimizer.param_groups[0].update(lr=1),
    "a tensor for a rate": lambda optimizer: optimizer.param_groups[0].update(lr=torch.tensor(0.25)),
    "parameters in another order": lambda optimizer: optimizer.param_groups[0]["params"].reverse(),
    "a parameter less": lambda optimizer: optimizer.param_groups[0]["params"].pop(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_changed_of_an_optimizer_between_calls_is_seen(name: str) -> None:
    def trained(device: str) -> list[Any]:
        weights = [torch.ones(size, device=device, requires_grad=True) for size in ((2, 3), (3,))]
        optimizer = torch.optim.Adam(weights, 0.125, foreach=False)

        def step() -> None:
            optimizer.zero_grad()
            (weights[0] * weights[1]).square().sum().backward()
            optimizer.step()

        run = torch_ltc.jit(step) if device == "ltc" else step
        found: list[Any] = []
        for run_number in range(2):
            for _ in range(4):
                run()
                found += [weight.tolist() for weight in weights]
            # In the order in which it was made.
            for state in optimizer.state.values():
                found += [(key, value.tolist()) for key, value in state.items()]
            if run_number == 0:
                CHANGES[name](optimizer)
        return found

    assert trained("ltc") == trained("cpu")


def test_an_optimizer_that_takes_the_place_of_another_is_seen() -> None:
    def trained(device: str) -> list[Any]:
        weight = torch.ones(3, device=device, requires_grad=True)
        optimizer: torch.optim.Optimizer = torch.optim.Adam([weight], 0.125, foreach=False)

        def step() -> None:
            optimizer.zero_grad()
            weight.square().sum().backward()
            optimizer.step()

        run = torch_ltc.jit(step) if device == "ltc" else step
        found = []
        for make in (None, lambda: torch.optim.SGD([weight], 0.5, momentum=0.5, foreach=False), _adagrad(weight)):
            optimizer = optimizer if make is None else make()
            for _ in range(4):
                run()
                found.append(weight.tolist())
        return found

    assert trained("ltc") == trained("cpu")


def _adagrad(weight: Tensor) -> Callable[[], torch.optim.Optimizer]:
    return lambda: torch.optim.Adagrad([weight], 0.25, foreach=False)


def test_zeros_of_both_signs_are_other_numbers() -> None:
    function = torch_ltc.jit(lambda x, number: x * number)
    x = torch.ones(2, device="ltc")
    signs = [1.0, 1.0, 1.0, -1.0, -1.0, 1.0]
    found = [function(x, sign * 0.0) for sign in signs]
    assert [torch.ones(2).copysign(each.cpu()).tolist() for each in found] == [[sign] * 2 for sign in signs]
    assert counts(function)[1] > 0


# ---- attributes of objects ------------------------------------------------------------------------------------------


class _Options:
    """An object with attributes, one of which a function may use."""

    default = 1.0

    def __init__(self) -> None:
        self.scale = 2.0
        self.calls = 0
        self.log: list[float] = []

    @property
    def doubled(self) -> float:
        return self.scale * 2

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.scale

    def report(self) -> int:
        return self.calls


class _Helper:
    def __init__(self, options: _Options) -> None:
        self.options = options

    def apply(self, x: Tensor) -> Tensor:
        return x * self.options.scale


def _scale_by(options: _Options, x: Tensor) -> Tensor:
    return x * options.scale


def test_attributes_that_the_code_does_not_name_may_change() -> None:
    options = _Options()
    function = torch_ltc.jit(lambda x: x * options.scale)
    x = torch.ones(2).to("ltc")
    for _ in range(6):
        assert function(x).tolist() == [2.0, 2.0]
        options.calls += 1
        options.log.append(1.0)
    assert counts(function) == (2, 4)
    options.scale = 5.0
    assert function(x).tolist() == [5.0, 5.0]


@pytest.mark.parametrize("way", ["method", "property", "class", "partial", "getattr", "bound"])
def test_attributes_are_seen_by_whatever_way_they_are_read(way: str) -> None:
    options = _Options()
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "method": lambda x: options.scaled(x),
        "property": lambda x: x * options.doubled / 2,
        "class": lambda x: _Helper(options).apply(x),
        "partial": functools.partial(_scale_by, options),
        "getattr": lambda x: x * getattr(options, "sca" + "le"),
        "bound": options.scaled,
    }
    function = torch_ltc.jit(ways[way])
    x = torch.ones(2).to("ltc")
    for _ in range(4):
        assert function(x).tolist() == [2.0, 2.0]
    assert counts(function)[1] >= 2
    options.scale = 5.0
    assert function(x).tolist() == [5.0, 5.0]


def test_an_attribute_that_hides_one_of_the_class_is_seen() -> None:
    options = _Options()
    function = torch_ltc.jit(lambda x: x * options.default)
    x = torch.ones(2).to("ltc")
    for _ in range(4):
        assert function(x).tolist() == [1.0, 1.0]
    options.default = 3.0
    assert function(x).tolist() == [3.0, 3.0]


def test_a_shape_that_the_function_changes_in_place_is_recorded() -> None:
    table = torch.arange(4.0).view(2, 2).to("ltc")
    expected = torch.arange(4.0).view(2, 2)

    def turn(x: Tensor) -> Tensor:
        table.t_()
        return table @ x

    function = torch_ltc.jit(turn)
    x = torch.tensor([1.0, 0.0])
    for _ in range(5):
        expected.t_()
        assert torch.equal(function(x.to("ltc")).cpu(), expected @ x)
    assert "changes the shape of table in place" in reason(function)


class _Scale:
    factor = 2.0

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.factor


def test_an_attribute_of_a_class_and_a_cell_are_guarded() -> None:
    scale, shift = _Scale(), 1.0

    def inner(x: Tensor) -> Tensor:
        return scale(x) + shift

    function = torch_ltc.jit(lambda x: inner(x))
    x = torch.ones(2).to("ltc")
    try:
        for _ in range(4):
            assert function(x).tolist() == [3.0, 3.0]
        assert counts(function)[1] == 2
        _Scale.other = 1  # type: ignore[attr-defined]
        assert function(x).tolist() == [3.0, 3.0]
        _Scale.factor = 5.0
        assert function(x).tolist() == [6.0, 6.0]
        shift = 2.0
        assert function(x).tolist() == [7.0, 7.0]
    finally:
        _Scale.factor = 2.0


@pytest.mark.filterwarnings("ignore::torch_ltc.errors.LtcWarning")
def test_sparse_tensors_are_recorded() -> None:
    table = torch.eye(3).to_sparse().to("ltc")
    function = torch_ltc.jit(lambda scale, x: torch.sparse.mm(table, x) + torch.sparse.mm(scale, x))
    for i in range(4):
        x = torch.full((3, 2), 2.0).to("ltc")
        assert function(torch.eye(3).mul(i).to_sparse().to("ltc"), x).tolist() == [[2.0 + 2.0 * i] * 2] * 3
    assert counts(function)[1] == 0


def test_a_recording_and_its_report_have_what_functions_did() -> None:
    weight = torch.ones(3).to("ltc")

    @torch_ltc.jit
    def scaled_for_the_report(x: Tensor) -> Tensor:
        return x * weight

    for _ in range(4):
        scaled_for_the_report(torch.ones(3).to("ltc"))
    explained = scaled_for_the_report.explain()
    recording = history.recording(texts=False, causes=False)
    assert explained in recording.functions
    assert from_json(recording.to_json()).functions == recording.functions
    page = report_html(recording, [])
    assert "scaled_for_the_report" in page
    assert "2 recorded, 2 replayed" in page
