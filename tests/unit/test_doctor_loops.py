"""The doctor on real training loops: each habit is found at its line, and a clean loop has none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import torch_ltc
from torch_ltc.config import settings
from torch_ltc.debug.doctor import examine
from torch_ltc.debug.history import history
from torch_ltc.debug.recording import Finding, from_json
from torch_ltc.errors import LtcError

STEPS = 30
Step = Callable[[int, torch.Tensor, torch.Tensor], None]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Nothing that happened before is in the recording, and no program is known."""
    torch_ltc.wait_device_ops()
    torch_ltc.ir_cache.reset()
    history.clear()
    yield
    torch_ltc.wait_device_ops()
    history.clear()


def train(after: Step, rows: Callable[[int], int] = lambda step: 16) -> list[Finding]:
    """What the doctor says of a training that calls `after` in each step with the loss and the model's output."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)).to("ltc")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        x, y = torch.randn(rows(step), 8).to("ltc"), torch.randn(rows(step), 4).to("ltc")
        out = model(x)
        loss = functional.mse_loss(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        after(step, loss, out)
    return diagnosis()


def diagnosis() -> list[Finding]:
    """What the doctor says of the process so far; of a saved recording it says the same."""
    torch_ltc.wait_device_ops()
    recording = history.recording()
    findings = examine(recording)
    assert examine(from_json(recording.to_json())) == findings
    return findings


def nothing(step: int, loss: torch.Tensor, out: torch.Tensor) -> None:
    """A clean step."""


def marked(mark: str) -> tuple[str, int]:
    """File and number of the line of this file that ends with a comment "# here: mark"."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (number,) = [number for number, text in enumerate(lines, 1) if text.endswith(f"# here: {mark}")]
    return __file__, number


def place(finding: Finding) -> tuple[str, int]:
    return finding.source.file, finding.source.line


def only(code: str, findings: list[Finding]) -> Finding:
    (finding,) = [finding for finding in findings if finding.code == code]
    return finding


def serious(findings: list[Finding]) -> list[str]:
    return [f"{finding.code} {finding.evidence}" for finding in findings if finding.severity != "hint"]


def test_a_clean_loop_has_no_error_and_no_warning() -> None:
    assert serious(train(nothing)) == []


def test_a_clean_loop_that_logs_every_tenth_step_has_neither() -> None:
    def log(step: int, loss: torch.Tensor, out: torch.Tensor) -> None:
        if step % 10 == 0:
            loss.item()

    findings = train(log)
    assert serious(findings) == []
    assert [finding.code for finding in findings if finding.code == "LTC201"] == []


@pytest.mark.parametrize(
    ("code", "mark"), [("LTC201", "item"), ("LTC202", "print"), ("LTC203", "copy")], ids=["item", "print", "copy"]
)
def test_a_read_in_the_loop(code: str, mark: str) -> None:
    def log(step: int, loss: torch.Tensor, out: torch.Tensor) -> None:
        if mark == "item":
            loss.item()  # here: item
        elif mark == "print":
            repr(loss)  # here: print
        else:
            out.detach().cpu()  # here: copy

    finding = only(code, train(log))
    assert place(finding) == marked(mark)
    assert finding.evidence.startswith(f"{STEPS} reads in {STEPS} of {STEPS} steps; ")


@pytest.mark.parametrize("how", ["async_item", "add_step_closure"])
def test_a_loss_that_is_logged_without_a_sync_is_no_read_in_the_loop(how: str) -> None:
    logged: list[Any] = []

    def log(step: int, loss: torch.Tensor, out: torch.Tensor) -> None:
        if how == "async_item":
            logged.append(torch_ltc.async_item(loss))
        else:
            torch_ltc.add_step_closure(logged.append, (loss.detach().mean(),), run_async=True)

    findings = train(log)
    torch_ltc.sync()
    assert [finding.code for finding in findings if finding.code in ("LTC201", "LTC202", "LTC203", "LTC207")] == []


def test_a_size_that_is_compiled_again_and_again() -> None:
    with settings.scope(promotion=False, recompiles="allow", tiers="blocking"):
        findings = train(nothing, rows=lambda step: 8 + step // 4)
    finding = only("LTC204", findings)
    assert finding.source.file == __file__
    assert "compiled again" in finding.evidence
    assert "float32[9,8]" in finding.evidence


def test_a_size_that_becomes_a_run_time_input_is_no_finding() -> None:
    with settings.scope(recompiles="allow"):
        assert serious(train(nothing, rows=lambda step: 8 + step // 4)) == []


@pytest.mark.filterwarnings("ignore::torch_ltc.errors.FallbackWarning")
def test_an_operation_that_runs_eagerly_in_the_loop() -> None:
    def count(step: int, loss: torch.Tensor, out: torch.Tensor) -> None:
        torch.nonzero(out > 0)  # here: fallback

    finding = only("LTC206", train(count))
    assert place(finding) == marked("fallback")
    assert (finding.title, finding.severity) == ("aten::nonzero runs eagerly in the loop", "warning")
    assert finding.evidence.startswith(f"{STEPS} times, ")


def test_a_loop_that_is_cut_into_tiny_programs() -> None:
    def cut(step: int, loss: torch.Tensor, out: torch.Tensor) -> None:
        for number in range(2):
            float(loss.detach() * number)  # here: tiny

    finding = only("LTC207", train(cut))
    assert place(finding) == marked("tiny")
    assert finding.evidence.startswith(f"{2 * STEPS} of {3 * STEPS} syncs had programs of ")


def test_a_loop_that_is_cut_by_the_bound() -> None:
    x = torch.ones(3).to("ltc")
    with settings.scope(pending_bound=20):
        for _ in range(100):
            x = x + 1  # here: bound
        finding = only("LTC208", diagnosis())
    assert place(finding) == marked("bound")
    assert finding.severity == "warning"
    assert "cuts at 20 pending instructions" in finding.evidence


def test_losses_that_a_list_holds() -> None:
    kept: list[torch.Tensor] = []

    def keep(step: int, loss: torch.Tensor, out: torch.Tensor) -> None:
        kept.append(out)
        # Else the uploads of steps that are queued grow and shrink, too.
        torch_ltc.wait_device_ops()

    finding = only("LTC210", train(keep))
    assert finding.source.file == __file__
    assert finding.source.function == "train"
    assert finding.evidence.startswith(f"{STEPS} buffers made here by aten::linear are alive after {STEPS} steps, ")


def test_steps_that_record_something_else_each_time() -> None:
    x = torch.ones(3).to("ltc")
    for step in range(STEPS):
        y = x
        for _ in range(step):
            y = y * 2  # here: longer
        total = y.sum()
        torch_ltc.sync()
        del total
    finding = only("LTC212", diagnosis())
    assert finding.evidence.startswith(f"{STEPS} of {STEPS} syncs at this line had a program that came once; ")
    assert place(finding) == marked("longer")


def test_sizes_that_change_in_every_step_with_the_settings_as_they_are() -> None:
    weight = torch.ones(4, 4).to("ltc")
    for step in range(STEPS):
        x = torch.ones(3 + step, 4).to("ltc")
        total = (x @ weight).relu().sum()  # here: sizes
        torch_ltc.sync()
        del total
        torch_ltc.wait_for_compiles()
    finding = only("LTC220", diagnosis())
    assert f" of {STEPS} syncs at this line had a program that came once; " in finding.evidence
    assert place(finding) == marked("sizes")


def test_small_uploads_in_the_loop() -> None:
    def upload(step: int, loss: torch.Tensor, out: torch.Tensor) -> None:
        for number in range(9):
            torch.tensor(float(number)).to("ltc")

    finding = only("LTC213", train(upload))
    assert finding.evidence.startswith("11 in a step in the middle of the run, ")


def test_a_program_that_fails() -> None:
    table = torch.ones(3, 2).to("ltc")
    row = functional.embedding(torch.tensor([7]).to("ltc"), table)
    with pytest.raises(LtcError):
        row.cpu()  # here: failure
    finding = only("LTC215", diagnosis())
    assert place(finding) == marked("failure")
    assert finding.evidence.startswith("program ")
