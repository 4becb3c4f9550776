"""Eager regions: calls of a loop that reads as often as it computes run at once, with the same results."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torch_ltc
from tests.semantics.support import run_script
from torch_ltc.config import settings
from torch_ltc.debug.history import history
from torch_ltc.errors import SyncForbiddenError
from torch_ltc.events import SyncEvent, subscribe
from torch_ltc.execute import eager_region
from torch_ltc.execute.eager_region import EagerFigures, eager_regions
from torch_ltc.native.recording import native

pytestmark = pytest.mark.skipif(native is None, reason="there are none without the extension")


@pytest.fixture
def auto() -> Iterator[None]:
    """Regions begin by themselves."""
    with settings.scope(eager_regions="auto"):
        history.clear()
        yield
    eager_regions.end()


@pytest.fixture
def always() -> Iterator[None]:
    """Everything runs at once that can."""
    with settings.scope(eager_regions="always"):
        history.clear()
        yield
    eager_regions.end()


@pytest.fixture
def syncs() -> Iterator[list[SyncEvent]]:
    """What is recorded all the same."""
    seen: list[SyncEvent] = []
    stop = subscribe(seen.append, SyncEvent)
    yield seen
    stop()


def chain(device: str, reads: int, calls: int = 3) -> list[float]:
    """A loop that reads after some calls."""
    x = torch.arange(4.0).to(device)
    found = []
    for _ in range(reads):
        for _ in range(calls - 1):
            x = (x * 1.0625).sin()
        found.append((x + 1).sum().item())
    return found


def test_a_loop_that_reads_runs_at_once(auto: None, syncs: list[SyncEvent]) -> None:
    assert chain("ltc", 60) == chain("cpu", 60)
    figures = eager_regions.figures()
    assert figures.begun == 1
    # The first executions compile, and some are timed.
    assert 30 <= figures.reads <= 55
    assert figures.calls >= 6 * figures.reads
    assert len(syncs) == 60 - figures.reads
    text = str(torch_ltc.explain())
    assert "ran at once, in 1 eager region" in text
    assert "test_eager_region.py" in text.split("eager region")[1]


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_which_reads_in_every_iteration_runs_at_once(
    search: str | None, auto: None, syncs: list[SyncEvent]
) -> None:
    def minimise(device: str) -> tuple[list[float], int]:
        at = torch.linspace(-1, 1, 6).to(device).requires_grad_()
        optimizer = torch.optim.LBFGS([at], lr=0.1, max_iter=10, history_size=5, line_search_fn=search)
        closures = 0

        def closure() -> Tensor:
            nonlocal closures
            closures += 1
            optimizer.zero_grad()
            loss = ((at[1:] - at[:-1].square()).square() + (1 - at[:-1]).square() / 10).sum()
            loss.backward()
            return loss

        for _ in range(12):
            optimizer.step(closure)
        return at.tolist(), closures

    found, closures = minimise("ltc")
    figures = eager_regions.figures()
    assert figures.begun >= 1
    # Programs that are new are compiled first.
    assert len(syncs) < min(closures, figures.reads) / 2
    assert (found, closures) == minimise("cpu")


def test_reading_what_was_only_uploaded_begins_a_region() -> None:
    # A process of its own: no program has run in it.
    printed = run_script("""
        import torch, torch_ltc
        from torch_ltc.config import settings
        from torch_ltc.execute.eager_region import eager_regions
        settings.eager_regions = "auto"
        x = torch.arange(40.0).to("ltc")
        print([float(x[i]) for i in range(40)] == list(range(40)), eager_regions.figures().begun)
    """)
    assert printed.split() == ["True", "1"]


def test_layers_in_a_region_have_the_graph_that_eager_has(always: None) -> None:
    # Their derivatives as a whole are formulas in Python.
    def names(device: str) -> list[str]:
        torch.manual_seed(0)
        x = torch.randn(3, 4, 5).to(device).requires_grad_()
        y = (nn.Linear(5, 4).to(device)(x) @ x).sum()
        found, queue = [], [y.grad_fn]
        while queue:
            node = queue.pop(0)
            if node is not None:
                found.append(node.name())
                queue += [after for after, _ in node.next_functions]
        y.backward()
        assert x.grad is not None
        return [*found, str(x.grad.cpu().tolist())]

    assert names("ltc") == [name.replace("ToCopyBackward0", "") for name in names("cpu")]


def test_a_loop_that_reads_seldom_is_recorded(auto: None) -> None:
    assert chain("ltc", 30, 80) == chain("cpu", 30, 80)
    assert eager_regions.figures() == EagerFigures()


def test_a_region_ends_when_the_loop_reads_seldom(auto: None, syncs: list[SyncEvent]) -> None:
    chain("ltc", 60)
    assert native.is_eager()
    syncs.clear()
    assert chain("ltc", 80, 200) == chain("cpu", 80, 200)
    assert not native.is_eager()
    assert len(syncs) >= 20


def test_a_long_pass_after_many_reads_does_not_end_a_region(auto: None, syncs: list[SyncEvent]) -> None:
    chain("ltc", 300)
    assert native.is_eager()
    for _ in range(3):
        syncs.clear()
        assert chain("ltc", 1, 4000) == chain("cpu", 1, 4000)
        assert not syncs
        chain("ltc", 200)
    assert native.is_eager()


def test_code_that_never_repeats_runs_at_once(
    auto: None, syncs: list[SyncEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eager_region, "_NEW_CALLS", 100)
    monkeypatch.setattr(eager_region, "_FIRST_CALLS", 300)
    chain("ltc", 1, 100)
    chain("ltc", 1, 100)

    def grow(device: str) -> list[float]:
        x, found = torch.ones(1, device=device), []
        for _ in range(40):
            for _ in range(20):
                x = x * 0.5 + x.sin()
            x = torch.cat([x, x[:1] + 1])
            torch_ltc.sync()
        found.append(x.sum().item())
        return found

    assert grow("ltc") == grow("cpu")
    assert native.eager_figures()[0] >= 2
    assert 600 <= eager_regions.figures().calls <= 2000
    # Programs that are known: recorded again.
    for _ in range(6):
        chain("ltc", 1, 100)
    seen = len(syncs)
    chain("ltc", 1, 100)
    assert len(syncs) == seen + 1


def test_long_calls_end_a_region(auto: None) -> None:
    chain("ltc", 60)
    assert native.is_eager()
    x = torch.randn(1 << 22).to("ltc")
    for _ in range(200):
        x.sin().sum().item()
    assert not native.is_eager()


def test_a_region_ends_when_a_setting_is_changed(auto: None) -> None:
    chain("ltc", 60)
    with settings.scope(fallback="error"):
        chain("ltc", 1)
    assert not native.is_eager()


def test_training_is_equal_to_eager(always: None, syncs: list[SyncEvent]) -> None:
    def train(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        torch.ltc.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(144, 5)
        )
        data = torch.randn(10, 4, 1, 8, 8)
        model.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        torch.manual_seed(1)
        torch.ltc.manual_seed(1)
        # Behind what is queued, calls would be recorded.
        torch_ltc.sync(wait=True)
        losses = []
        for batch in data:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch.to(device)), torch.arange(4, device=device))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.detach())
        return [each.cpu() for each in (*losses, *model.state_dict().values())]

    for ours, expected in zip(train("ltc"), train("cpu"), strict=True):
        assert torch.equal(ours, expected)
    assert not syncs


def test_views_share_memory(always: None) -> None:
    x = torch.zeros(4, 6, device="ltc")
    rows, column = x.split(2), x.t()[1]
    rows[1].add_(1)
    column.mul_(3)
    x[0, ::2] = torch.tensor([7.0, 8.0, 9.0])
    parts = torch.linalg.svd(torch.eye(2, device="ltc"))
    assert rows[0].tolist() == [[7.0, 0.0, 8.0, 0.0, 9.0, 0.0], [0.0] * 6]
    assert x[3].tolist() == [1.0, 3.0, 1.0, 1.0, 1.0, 1.0]
    assert column.untyped_storage()._cdata == x.untyped_storage()._cdata
    assert rows[1].storage_offset() == 12
    assert parts.S.tolist() == [1.0, 1.0]


def test_what_a_region_has_made_is_an_input_of_programs(always: None) -> None:
    x = torch.ones(3, device="ltc") + 1
    view = x[1:]
    with eager_regions.suspended():
        y = (x * 2).sum()
        view.add_(5)
        z = x.sum()
    assert y.item() == 12
    assert z.item() == 16
    assert (x + 0).tolist() == [2.0, 7.0, 7.0]
    assert "no program made it" in str(torch_ltc.explain(x))


def test_calls_behind_a_recorded_one_are_recorded(always: None, syncs: list[SyncEvent]) -> None:
    z = torch.complex(torch.ones(2, device="ltc"), torch.ones(2, device="ltc"))
    flipped = z.conj() * 2
    assert flipped.tolist() == [2 - 2j, 2 - 2j]
    assert len(syncs) == 1
    assert (flipped + 1).tolist() == [3 - 2j, 3 - 2j]
    assert len(syncs) == 1


def test_an_error_is_raised_where_eager_raises_it(always: None) -> None:
    table = torch.ones(3, 2, device="ltc")
    with pytest.raises(IndexError, match="index out of range"):
        F.embedding(torch.tensor([5], device="ltc"), table)
    with pytest.raises(RuntimeError, match="must match the size"):
        table + torch.ones(5, device="ltc")
    assert table.sum().item() == 6


def test_a_sync_is_still_forbidden(always: None) -> None:
    x = torch.ones(2, device="ltc")
    with torch_ltc.no_sync():
        y = x + 1
        with pytest.raises(SyncForbiddenError):
            y.sum().item()
    assert y.tolist() == [2.0, 2.0]


def test_jit_records(always: None) -> None:
    @torch_ltc.jit
    def step(x: Tensor) -> Tensor:
        return (x * 2 + 1).relu()

    for number in range(6):
        assert step(torch.full((2,), float(number), device="ltc")).tolist() == [2.0 * number + 1] * 2
    assert "replay" in step.explain()


def test_random_numbers_come_from_the_generator_of_the_device(always: None) -> None:
    def draws(device: str) -> list[Tensor]:
        torch.manual_seed(3)
        torch.ltc.manual_seed(3)
        made = [torch.rand(3, device=device), torch.randperm(5, device=device), torch.randn(2, device=device)]
        with eager_regions.suspended():
            made.append(torch.rand(2, device=device))
        made.append(torch.multinomial(torch.ones(6, device=device), 3))
        return [each.cpu() for each in made]

    for ours, expected in zip(draws("ltc"), draws("cpu"), strict=True):
        assert torch.equal(ours, expected)


def test_versions_are_counted(always: None) -> None:
    x = torch.ones(3, device="ltc", requires_grad=True)
    y = x.exp()
    with torch.no_grad():
        torch._foreach_add_([y], 1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_memory_is_counted(always: None) -> None:
    before = torch.ltc.memory_allocated()
    x = torch.ones(1000, device="ltc") + 1
    assert torch.ltc.memory_allocated() == before + 4000
    # Python sees it.
    torch_ltc.explain(x)
    assert torch.ltc.memory_allocated() == before + 4000
    del x
    assert torch.ltc.memory_allocated() == before


def test_threads_compute_what_they_compute_alone(always: None) -> None:
    found: dict[int, list[float]] = {}

    def work(number: int) -> None:
        x = torch.full((4,), float(number), device="ltc", requires_grad=True)
        values = []
        for _ in range(100):
            loss = (x.sin() * x).sum()
            (gradient,) = torch.autograd.grad(loss, x)
            with torch.no_grad():
                x.sub_(gradient * 0.125)
            values.append(loss.item())
        found[number] = values

    def expected(number: int) -> list[float]:
        x = torch.full((4,), float(number), requires_grad=True)
        values = []
        for _ in range(100):
            loss = (x.sin() * x).sum()
            (gradient,) = torch.autograd.grad(loss, x)
            with torch.no_grad():
                x.sub_(gradient * 0.125)
            values.append(loss.item())
        return values

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(found[number] == expected(number) for number in range(4))
