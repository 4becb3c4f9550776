"""The tutorial on backends: its pieces are the file, its blocks print what the page shows, its backend trains."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_ltc
from torch_ltc import events
from torch_ltc.lowering.interface import Backend
from torch_ltc.lowering.registry import registry

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "writing_a_backend.md"
FILE = ROOT / "examples" / "numpy_backend.py"
FENCE = re.compile(r"^```(\w*)[ ]?([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MOST_LINES = 99

# Runs the blocks one after the other as one program and writes down what each prints, warnings included.
DRIVER = """
import contextlib, io, json, sys, warnings

def show(message, category, filename, lineno, file=None, line=None):
    print(f"{filename}:{lineno}: {category.__name__}: {message}")

warnings.simplefilter("always")
warnings.filterwarnings("ignore", category=DeprecationWarning)
warnings.showwarning = show
names = {"__name__": "__main__"}
printed = []
for block in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(block, "train.py", "exec"), names)
    printed.append(out.getvalue())
print(json.dumps(printed))
"""


def blocks() -> list[tuple[str, str, str]]:
    """Language, label and text of each fenced block, in order."""
    return FENCE.findall(PAGE.read_text())


def pieces() -> list[str]:
    """The blocks that make the file."""
    return [body for language, label, body in blocks() if (language, label) == ("python", FILE.name)]


def examples() -> list[tuple[str, str | None]]:
    """The blocks that run by themselves, each with the output that the page shows after it."""
    found: list[tuple[str, str | None]] = []
    shown = blocks()
    for (language, label, body), following in zip(shown, [*shown[1:], ("", "", "")]):
        if language == "python" and not label:
            found.append((body, following[2] if following[0] == "text" else None))
    return found


def test_the_pieces_on_the_page_are_the_file() -> None:
    file = FILE.read_text()
    assert len(pieces()) >= 4
    for piece in pieces():
        assert piece.strip() in file
    lines = [line for piece in pieces() for line in piece.splitlines() if line.strip()]
    assert lines == [line for line in file.splitlines() if line.strip()]


def test_the_backend_is_under_100_lines() -> None:
    lines = FILE.read_text().splitlines()
    assert len(lines) <= MOST_LINES
    assert max(map(len, lines)) <= 120


def test_every_label_on_the_page_is_known() -> None:
    labels = {(language, label) for language, label, _ in blocks() if label}
    assert labels == {("python", FILE.name)}


def test_the_blocks_print_what_the_page_shows() -> None:
    code = [body for body, _ in examples()]
    path = os.pathsep.join([str(FILE.parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", DRIVER],
        input=json.dumps(code),
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert len(printed) == len(code)
    for (body, shown), actual in zip(examples(), printed, strict=True):
        assert actual == (shown or ""), f"the block that begins with {body.splitlines()[0]!r} prints\n{actual}"


# ---- the backend


@pytest.fixture
def module() -> Iterator[ModuleType]:
    """The file, as a module that nobody else has."""
    spec = importlib.util.spec_from_file_location("tutorial_numpy_backend", FILE)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    torch_ltc.ir_cache.reset()
    torch_ltc.register_backend(made.NumpyBackend)
    yield made
    torch_ltc.sync(wait=True)
    registry.unregister("numpy")


def counted(module: ModuleType, op: Any) -> list[tuple[int, ...]]:
    """Sizes of the first operand at each call of the operator's rule, from now on."""
    rule: Callable[..., Any] = module.RULES[op]
    calls: list[tuple[int, ...]] = []

    def run(first: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(first.shape)
        return rule(first, *args, **kwargs)

    module.RULES[op] = run
    return calls


def convnet() -> nn.Module:
    """The network of `examples/digits.py`."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, 10),
        nn.LogSoftmax(1),
    )


def test_the_convnet_trains_in_numpy_with_the_losses_of_eager(module: ModuleType) -> None:
    aten = torch.ops.aten
    convolutions = counted(module, aten.convolution.default)
    backward = counted(module, aten.convolution_backward.default)
    pools = counted(module, aten.max_pool2d_with_indices.default)
    seen: list[Any] = []
    datasets = pytest.importorskip("sklearn.datasets")
    data = datasets.load_digits()
    images = (torch.from_numpy(data.images).float() / 16).unsqueeze(1)
    labels = torch.from_numpy(data.target).long()

    def train(device: str) -> tuple[list[float], float]:
        torch.manual_seed(0)
        initial = convnet()
        torch.manual_seed(1)
        model = initial.to(device)
        optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0, foreach=True)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.7)
        losses = []
        for x, y in zip(images[:768].split(64), labels[:768].split(64)):
            optimizer.zero_grad()
            loss = F.nll_loss(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.detach())
        model.eval()
        with torch.no_grad():
            for _ in range(2):
                right = (model(images[-300:].to(device)).argmax(1) == labels[-300:].to(device)).float().mean().item()
        return torch.stack(losses).tolist(), right

    expected, accuracy = train("cpu")
    stop = events.subscribe(seen.append, events.RefusalEvent, events.ExecuteEvent)
    with torch_ltc.use_backend("numpy"):
        losses, ours = train("ltc")
    stop()
    torch.testing.assert_close(losses, expected, rtol=1e-3, atol=1e-4)
    assert abs(ours - accuracy) < 0.02
    assert losses[-1] < losses[0]
    assert not any(isinstance(event, events.RefusalEvent) for event in seen)
    assert [event.backend for event in seen].count("numpy") >= 10
    assert convolutions.count((64, 1, 8, 8)) >= 10
    assert convolutions.count((64, 32, 8, 8)) >= 10
    assert convolutions.count((300, 1, 8, 8)) >= 1
    assert len(backward) == 2 * len(pools[:-1])


CONVOLUTIONS = [
    {"kernel_size": 3},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": (2, 3), "stride": (1, 2), "padding": (1, 0)},
    {"kernel_size": 1, "bias": False},
]


def compare(module: nn.Module, x: torch.Tensor) -> None:
    """The module gives on numpy what it gives on eager, gradients too."""
    expected = module(x.requires_grad_())
    weight = torch.rand(expected.shape)
    wanted = torch.autograd.grad(expected, [x, *module.parameters()], weight)
    moved = module.to("ltc")
    with torch_ltc.use_backend("numpy"):
        for _ in range(3):
            given = x.detach().to("ltc").requires_grad_()
            made = moved(given)
            grads = torch.autograd.grad(made, [given, *moved.parameters()], weight.to("ltc"))
            torch_ltc.sync(wait=True)
        torch.testing.assert_close(made.cpu(), expected.detach(), rtol=1e-4, atol=1e-5)
        for ours, theirs in zip(grads, wanted, strict=True):
            torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", CONVOLUTIONS, ids=str)
def test_convolutions_of_all_plain_kinds(options: dict[str, Any], module: ModuleType) -> None:
    calls = counted(module, torch.ops.aten.convolution.default)
    compare(nn.Conv2d(2, 4, **options), torch.rand(3, 2, 7, 9))
    assert len(calls) == 2


@pytest.mark.parametrize(
    "pool",
    [nn.MaxPool2d(2), nn.MaxPool2d(3, stride=1, padding=1), nn.MaxPool2d((2, 3), stride=(3, 2), padding=(0, 1))],
    ids=str,
)
def test_pools_of_all_plain_kinds(pool: nn.Module, module: ModuleType) -> None:
    calls = counted(module, torch.ops.aten.max_pool2d_with_indices.default)
    compare(pool, torch.rand(2, 3, 8, 8))
    compare(pool, torch.rand(3, 8, 8))
    assert len(calls) == 4


@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (nn.Conv2d(4, 4, 3, groups=2), torch.rand(2, 4, 6, 6)),
        (nn.Conv2d(2, 4, 3, dilation=2), torch.rand(2, 2, 6, 6)),
        (nn.ConvTranspose2d(2, 4, 3), torch.rand(2, 2, 6, 6)),
        (nn.Conv1d(2, 4, 3), torch.rand(2, 2, 6)),
        (nn.MaxPool2d(2, ceil_mode=True), torch.rand(2, 2, 5, 5)),
    ],
    ids=["groups", "dilation", "transposed", "one dimension", "ceil_mode"],
)
def test_other_convolutions_and_pools_run_with_pytorchs_kernels(
    layer: nn.Module, x: torch.Tensor, module: ModuleType
) -> None:
    with pytest.warns(torch_ltc.errors.BackendWarning, match="numpy has no rule for aten::(convolution|max_pool2d)"):
        compare(layer, x)


def test_a_dtype_that_numpy_lacks_runs_in_the_interpreter(module: ModuleType) -> None:
    x = torch.rand(3).bfloat16()
    with torch_ltc.use_backend("numpy"), pytest.warns(torch_ltc.errors.BackendWarning, match="numpy cannot compile"):
        for _ in range(2):
            y = x.to("ltc") * 2
            torch_ltc.sync(wait=True)
    assert torch.equal(y.cpu(), x * 2)


def test_the_method_table_names_every_method() -> None:
    text = PAGE.read_text()
    methods = [name for name, value in vars(Backend).items() if callable(value) and not name.startswith("_")]
    assert len(methods) > 20
    assert [name for name in methods if f"`{name}(" not in text] == []
    attributes = [name for name in Backend.__annotations__ if not name.startswith("_")]
    assert [name for name in attributes if name not in text] == []
