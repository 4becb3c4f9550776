"""The functions of `torch_ltc` under the names of the original: steps, closures, debugging, hashes, the cache."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_ltc
from tests.semantics.support import LONG_S, assert_same, gated, lazy, observe, probe, repeat
from torch_ltc import closures, computation, config, debug, ir_cache, metrics
from torch_ltc.compile.program_cache import executables
from torch_ltc.config import settings
from torch_ltc.errors import LtcError, UnknownBackendError
from torch_ltc.record.recorder import recorder

pytestmark = pytest.mark.usefixtures("no_fallback")


def train_steps(count: int) -> nn.Module:
    """Some steps of a small model."""
    model = nn.Linear(2, 1).to("ltc")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.ones(1, 2, device="ltc")).sum().backward()
        optimizer.step()
    return model


def test_an_optimizer_step_ends_with_a_sync_unless_the_setting_says_no() -> None:
    torch_ltc.sync(wait=True)
    with observe() as seen:
        train_steps(3)
    assert seen.reasons == ["OPTIMIZER"] * 3
    with settings.scope(sync_after_optimizer=False):
        with observe() as seen:
            model = train_steps(3)
        assert seen.reasons == []
        with observe() as seen:
            model.weight.detach().cpu()
        assert seen.reasons == ["READ"]


def test_an_optimizer_of_cpu_parameters_syncs_nothing() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with observe() as seen:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert seen.syncs == []


def test_step_closures_run_at_mark_step_with_synced_values() -> None:
    seen: list[float] = []
    loss = torch.ones(1, device="ltc") * 3
    torch_ltc.add_step_closure(lambda value: seen.append(value.item()), (loss,))
    torch_ltc.add_step_closure(seen.append, (7.0,))
    assert seen == []
    with observe() as observed:
        torch_ltc.mark_step()
    assert seen == [3.0, 7.0]
    assert observed.reasons == ["EXPLICIT"]
    torch_ltc.mark_step()
    assert seen == [3.0, 7.0]


def test_step_closures_run_after_an_optimizer_step() -> None:
    seen: list[int] = []
    torch_ltc.add_step_closure(seen.append, (1,))
    train_steps(1)
    assert seen == [1]
    torch_ltc.add_step_closure(seen.append, (2,))
    torch_ltc.run_step_closures()
    assert seen == [1, 2]


def test_asynchronous_closures_read_values_beside_the_training_thread() -> None:
    seen: list[tuple[float, bool]] = []
    with probe.closed():
        value = gated(torch.ones(1, device="ltc"))
        main = threading.current_thread()
        torch_ltc.add_step_closure(
            lambda v: seen.append((v.item(), threading.current_thread() is main)), (value,), run_async=True
        )
        torch_ltc.mark_step()
        assert probe.entered.wait(LONG_S)
        assert seen == []
    closures.wait_step_closures(LONG_S)
    assert seen == [(2.0, False)]


def test_dump_ir_shows_the_pending_program_as_text() -> None:
    x = lazy(torch.ones(2, 3))
    torch_ltc.sync(wait=True)
    y = (x.t() @ x * 2.5).add_(1)
    lines = [line.split("  #")[0] for line in debug.dump_ir([y]).splitlines()]
    assert lines == [
        "IR {",
        "  %0: float32[2,3] = input(buffer=0)",
        "  %1: float32[3,2] stride=(1,3) view = aten::t(%0)",
        "  %2: float32[3,3] = aten::mm(%1, %0)",
        "  %3: float32[3,3] ROOT=0 = aten::mul.Tensor(%2, $0:float)",
        "  aten::add_.Tensor(%3, $1:int, alpha=1) writes %3",
        "}",
    ]
    assert "# test_api.py:" in debug.dump_ir([y])
    assert y.tolist() == [[6.0] * 3] * 3, "looking changes nothing"


def test_dump_ir_shows_the_backends_own_form() -> None:
    y = lazy(torch.ones(2)) * 3
    with settings.scope(backend="torchscript"):
        text = debug.dump_ir([y], "backend")
        assert "aten::mul" in text
        assert "graph(" in text
    with settings.scope(backend="interpreter"):
        assert debug.dump_ir([y], "backend") == debug.dump_ir([y], "text")
    with pytest.raises(ValueError, match="'text', 'dot' or 'backend'"):
        debug.dump_ir([y], "xml")
    with pytest.raises(LtcError, match="on ltc"):
        debug.dump_ir([torch.ones(2)])


def test_render_ir_graph_is_a_dot_graph() -> None:
    x = lazy(torch.ones(2))
    torch_ltc.sync(wait=True)
    lines = [line.strip() for line in debug.render_ir_graph([x + x]).splitlines()]
    assert lines[0] == "digraph G {"
    assert lines[2] == 'node0 [label="input 0\\n%0: float32[2]", fillcolor="#cfe2f3"]'
    assert lines[3].startswith('node1 [label="aten::add.Tensor\\n%1: float32[2]\\nROOT=0\\ntest_api.py:')
    assert lines[4:] == ['node0 -> node1 [label="i=0"]', 'node0 -> node1 [label="i=1"]', "}"]


@pytest.mark.parametrize(("form", "word"), [("text", "IR {"), ("dot", "digraph G"), ("backend", "graph(")])
def test_synced_programs_are_appended_to_the_file_that_the_setting_names(tmp_path: Path, form: str, word: str) -> None:
    path = tmp_path / "programs.txt"
    with settings.scope(save_tensors_file=str(path), save_tensors_format=form, backend="torchscript"):
        for _ in range(2):
            x = torch.ones(2, device="ltc") + 1
            torch_ltc.sync()
        assert x.tolist() == [2.0, 2.0]
    (torch.ones(2, device="ltc") + 5).cpu()
    text = path.read_text()
    assert text.count("[ScheduleSyncTensorsGraph]") == 2
    assert text.count("## BEGIN_GRAPH") == text.count("## END_GRAPH") == 2
    assert word in text
    assert "Hashes: (" in text
    assert "test_synced_programs_are_appended" in text.split("Hashes")[0], "the user's stack is there"
    assert "torch_ltc/execute" not in text


def test_the_stack_in_the_file_keeps_user_files_whose_path_names_the_package(tmp_path: Path) -> None:
    path = tmp_path / "programs.txt"
    code = compile("def step(f):\n    f()\n", "/home/me/torch_ltc_experiments/train.py", "exec")
    names: dict[str, object] = {}
    exec(code, names)
    step = names["step"]
    assert callable(step)
    x = torch.ones(2, device="ltc") + 1
    with settings.scope(save_tensors_file=str(path)):
        step(torch_ltc.sync)
    assert x.tolist() == [2.0, 2.0]
    assert "torch_ltc_experiments/train.py:2" in path.read_text()


def test_the_file_for_synced_programs_can_be_named_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "programs.dot"
    monkeypatch.setenv("LTC_SAVE_TENSORS_FILE", str(path))
    monkeypatch.setenv("LTC_SAVE_TENSORS_FMT", "dot")
    settings.reload_environment()
    try:
        x = torch.ones(2, device="ltc") + 1
        torch_ltc.sync(wait=True)
    finally:
        monkeypatch.undo()
        settings.reload_environment()
    assert "digraph G" in path.read_text()
    assert x.tolist() == [2.0, 2.0]


def test_ir_cache_dump_writes_the_tree_and_reset_forgets_it(tmp_path: Path) -> None:
    ir_cache.reset()
    x = lazy(torch.ones(2))
    (x + 1).cpu()
    (x * 2).cpu()
    path = tmp_path / "tree.dot"
    ir_cache.dump(str(path))
    text = path.read_text()
    assert text.startswith("digraph G {")
    assert "aten::add.Tensor, 1 programs" in text
    assert "aten::mul.Tensor, 1 programs" in text
    assert text.count("->") == recorder.tree.size - 1 == 3
    pending = x + 5
    ir_cache.reset()
    assert recorder.tree.size == 1
    assert len(executables) == 0
    assert pending.tolist() == [6.0, 6.0]
    assert (x + 1).tolist() == [2.0, 2.0]


def test_reset_makes_a_known_program_unknown() -> None:
    def step() -> bool:
        x = lazy(torch.ones(2))
        torch_ltc.sync(wait=True)
        with observe() as seen:
            (x * 5).cpu()
        return seen.syncs[0].known

    ir_cache.reset()
    assert repeat(step) == [False, True, True]
    ir_cache.reset()
    assert step() is False


def test_counters_of_syncs_and_operations() -> None:
    torch_ltc.sync(wait=True)
    ir_cache.reset()
    metrics.reset()
    assert metrics.counter_names() == []
    assert metrics.counter_value("MarkStep") is None
    for _ in range(3):
        x = torch.ones(2, device="ltc") + 1
        torch_ltc.mark_step()
    x.cpu()
    torch_ltc.wait_device_ops()
    assert metrics.counter_value("MarkStep") == 3
    assert metrics.counter_value("UncachedCompile") == 1
    assert metrics.counter_value("CachedCompile") == 2
    assert metrics.counter_value("SyncedTensorsWithIR") == 3
    assert metrics.counter_value("lazy::add.Tensor") == 3 or metrics.counter_value("lazy::aten::add.Tensor") == 3
    report = metrics.metrics_report()
    for name in ("TensorsGraphSize", "ExecuteTime", "RecordTime"):
        assert f"Metric: {name}" in report
    assert metrics.snapshot()


def test_forks_of_the_tree_are_counted() -> None:
    ir_cache.reset()
    metrics.reset()
    x = lazy(torch.ones(2))
    (x + 1).cpu()
    (x * 2).cpu()
    (x - 2).cpu()
    assert metrics.counter_value("TrieForked") == 2


def test_reuse_ir_is_accepted_without_effect() -> None:
    assert config.set_reuse_ir(True) is None
    assert config.set_reuse_ir(False) is None
    assert (torch.ones(2, device="ltc") + 1).tolist() == [2.0, 2.0]


def test_cached_graph_runs_on_other_inputs_and_numbers() -> None:
    x = lazy(torch.ones(3))
    torch_ltc.sync(wait=True)
    y = x * 2.5 + x
    digest = computation.get_graph_hash([y])
    identities, values = computation.get_tensors_ts_device_data_node([y])
    assert isinstance(digest, bytes)
    assert len(digest) == 16
    assert identities == [torch_ltc.get_tensor_id(x), -1]
    assert values[1] == 2.5
    for _ in range(3):
        (result,) = computation.run_cached_graph(digest, [torch.arange(3.0), 10.0])
        assert result.tolist() == [0.0, 11.0, 22.0]
    with pytest.raises(LtcError, match="takes 2 inputs, got 1"):
        computation.run_cached_graph(digest, [torch.arange(3.0)])
    with pytest.raises(LtcError, match=r"takes float32\[3\] here"):
        computation.run_cached_graph(digest, [torch.arange(4.0), 1.0])
    with pytest.raises(LtcError, match=r"takes float32\[3\] here"):
        computation.run_cached_graph(digest, [torch.arange(3), 1.0])
    assert y.tolist() == [3.5, 3.5, 3.5]


def test_cached_graph_takes_inputs_of_another_layout() -> None:
    x = lazy(torch.arange(6.0).view(2, 3))
    torch_ltc.sync(wait=True)
    y = x + 1
    digest = computation.get_graph_hash([y])
    (result,) = computation.run_cached_graph(digest, [torch.arange(6.0).view(3, 2).t(), 1])
    assert_same(result, torch.arange(6.0).view(3, 2).t().contiguous() + 1)


def random_chain(seed: int, device: str) -> torch.Tensor:
    """A chain of eight calls that few seeds have in common."""
    choose = random.Random(seed)
    x = torch.full((2,), float(seed)).to(device)
    for _ in range(8):
        x = choose.choice([torch.sin, torch.cos, torch.neg, torch.relu])(x)
    return x


def test_the_tree_is_pruned_at_its_bound_and_everything_still_runs() -> None:
    ir_cache.reset()
    metrics.reset()
    with settings.scope(tree_bound=60), observe() as seen:
        for seed in [*range(30), *range(30)]:
            assert_same(random_chain(seed, "ltc"), random_chain(seed, "cpu"))
            assert recorder.tree.size <= 60 + 9
            assert recorder.tree.size == 1 + len(list(recorder.tree.nodes()))
    assert len(seen.prunes) >= 2
    assert all(event.nodes_after <= 31 and event.nodes_before > 60 for event in seen.prunes)
    assert metrics.counter_value("TreePruned") == len(seen.prunes)
    ir_cache.reset()


def test_pruning_drops_the_least_recently_used_programs_first() -> None:
    ir_cache.reset()
    with settings.scope(tree_bound=40):

        def often() -> bool:
            x = lazy(torch.ones(2))
            torch_ltc.sync(wait=True)
            with observe() as seen:
                (x + 1).cpu()
            return seen.syncs[0].known

        assert often() is False
        for length in range(1, 15):
            random_chain(length, "ltc").cpu()
            assert often() is True
    ir_cache.reset()


@pytest.mark.blocking_tiers
def test_compiled_programs_are_bounded_and_compiled_again_when_needed() -> None:
    ir_cache.reset()

    def step(number: int) -> list[float]:
        x = lazy(torch.ones(number + 1))
        torch_ltc.sync(wait=True)
        return list((x * 2 + 1).tolist())

    with settings.scope(executables_bound=3, backend="torchscript", promotion=False), observe() as seen:
        for _ in range(4):
            for number in range(6):
                assert step(number) == [3.0] * (number + 1)
                assert len(executables) <= 3
    # Six programs in turn, three places: each is compiled anew at each of its turns after the first.
    assert len(seen.compiles) == 18
    with settings.scope(executables_bound=8, backend="torchscript", promotion=False), observe() as seen:
        for _ in range(4):
            for number in range(6):
                step(number)
    assert len(seen.compiles) <= 6
    ir_cache.reset()


@pytest.mark.blocking_tiers
def test_a_program_becomes_hot_at_the_execution_that_the_setting_names() -> None:
    ir_cache.reset()

    def step() -> None:
        (lazy(torch.ones(2)) * 3).cpu()

    with settings.scope(hot_after=4, backend="torchscript"), observe() as seen:
        for _ in range(6):
            step()
    assert [run.backend for run in seen.runs] == ["interpreter"] * 3 + ["torchscript"] * 3
    assert len(seen.compiles) == 1


def test_an_unknown_backend_is_refused_where_it_is_chosen() -> None:
    message = r"there is no backend named 'no such thing'\n  try: one of: inductor, interpreter, null, torchscript, xla"
    with pytest.raises(UnknownBackendError, match=message):
        settings.backend = "no such thing"
    with pytest.raises(UnknownBackendError, match=message), settings.scope(backend="no such thing"):
        pytest.fail("the scope was entered")
    assert settings.backend in ("interpreter", "torchscript")
    assert (torch.ones(2, device="ltc") + 1).tolist() == [2.0, 2.0]


def test_exported_names_are_all_there() -> None:
    for name in torch_ltc.__all__:
        assert hasattr(torch_ltc, name), name
    assert torch_ltc.__version__
