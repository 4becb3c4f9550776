"""The ledger counts syncs and reads by line and reason; `no_sync`, `async_item` and the quiet repr do without them."""

from __future__ import annotations

import re
import sys

import pytest
import torch
from torch import nn

import torch_ltc
from tests.semantics.support import observe
from tests.support.lines import marked
from torch_ltc.config import settings
from torch_ltc.debug.entry_points import ledger_text
from torch_ltc.debug.history import history
from torch_ltc.debug.recording import Memory, Recording, SyncRow
from torch_ltc.errors import ExecutionError, LtcError, SyncForbiddenError
from torch_ltc.execute.device_loss import device_loss
from torch_ltc.source import Source

# The package gives the function the module's name.
async_item_module = sys.modules["torch_ltc.execute.async_item"]


def rows() -> dict[tuple[str, str, int], SyncRow]:
    return {(row.kind, row.reason, row.source.line): row for row in history.recording(texts=False).syncs}


def train(steps: int) -> None:
    parameter = nn.Parameter(torch.ones(3, device="ltc"))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for step in range(steps):
        loss = (parameter * 2).sum()
        loss.backward()
        optimizer.step()  # step
        optimizer.zero_grad()
        if step % 2:
            loss.item()  # item


def test_each_line_is_counted_with_its_reason() -> None:
    train(6)
    x = torch.ones(3).to("ltc") + 1
    str(x)  # print
    (x + 1).cpu()  # cpu
    torch_ltc.sync()
    (x + 2).nonzero()  # nonzero
    x = x + 3
    torch_ltc.sync()  # explicit
    found = rows()
    assert found["sync", "optimizer", marked(__file__, "step")].count == 6
    assert found["sync", "optimizer", marked(__file__, "step")].steps == 6
    item = found["read", "item", marked(__file__, "item")]
    assert (item.count, item.steps, item.size_bytes) == (3, 3, 12)
    assert item.wait_s > 0
    assert found["read", "print", marked(__file__, "print")].count == 1
    assert found["sync", "read", marked(__file__, "print")].count == 1
    assert found["read", "copy", marked(__file__, "cpu")].count == 1
    assert found["sync", "fallback", marked(__file__, "nonzero")].count == 1
    assert found["sync", "explicit", marked(__file__, "explicit")].count == 1


def test_reads_of_one_step_count_as_one_step() -> None:
    x = torch.ones(3).to("ltc")
    for _ in range(4):
        y = x + 1
        torch_ltc.sync()
        for _ in range(3):
            y.sum().item()  # thrice
    row = rows()["read", "item", marked(__file__, "thrice")]
    assert (row.count, row.steps) == (12, 4)


def test_programs_of_a_line_are_listed() -> None:
    train(3)
    row = rows()["sync", "optimizer", marked(__file__, "step")]
    assert 0 < len(row.programs) <= 2


def test_the_table() -> None:
    item = SyncRow(Source("train.py", 20, "main"), "read", "item", 1200, 600, 1.5, 4800)
    step = SyncRow(Source("train.py", 18, "main"), "sync", "optimizer", 600, 600, 0.0321, 0, (1,))
    recording = Recording((), "", 1.0, 600, {}, (), (), (), (step, item), (), (), Memory(), {})
    assert ledger_text(recording) == (
        "count  steps   waited    bytes  why              line\n"
        "1,200    600   1.50 s  4.7 KiB  read: item       train.py:20 in main\n"
        "  600    600  32.1 ms        -  sync: optimizer  train.py:18 in main\n"
        "1.53 s in 600 steps"
    )


def test_an_empty_table_says_so() -> None:
    assert torch_ltc.debug.sync_ledger() == "nothing was synced or read"


# ---- no_sync --------------------------------------------------------------------------------------------------------


def test_a_read_is_refused_at_its_line() -> None:
    x = torch.ones(3).to("ltc") + 1
    with observe() as seen, torch_ltc.no_sync(), pytest.raises(SyncForbiddenError) as caught:
        x.sum().item()  # refused
    assert seen.syncs == []
    assert f"recorded at {__file__}:{marked(__file__, 'refused')} in test_a_read" in str(caught.value)
    assert "a value is read" in str(caught.value)
    assert x.sum().item() == 6


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("sync", "asked for it"),
        ("nonzero", "cannot be recorded"),
        ("seed", "random number generator"),
        ("step", "an optimizer finished its step"),
        ("print", "a value is read"),
        ("bool", "a value is read"),
        ("bound", "pending_bound"),
    ],
)
def test_whatever_would_sync_is_refused(name: str, reason: str) -> None:
    parameter = nn.Parameter(torch.ones(3, device="ltc"))
    parameter.grad = torch.ones(3).to("ltc")
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    torch_ltc.sync()

    def grow() -> None:
        x = torch.ones(3).to("ltc")
        for _ in range(30):
            x = x + 1

    acts = {
        "sync": torch_ltc.sync,
        "nonzero": lambda: parameter.nonzero(),
        "seed": lambda: (torch.rand(2, device="ltc"), torch.ltc.get_rng_state()),
        "step": optimizer.step,
        "print": lambda: str(parameter),
        "bool": lambda: bool(parameter.sum() > 0),
        "bound": grow,
    }
    with settings.scope(pending_bound=20):
        _pending = parameter + 1
        with torch_ltc.no_sync(), pytest.raises(SyncForbiddenError, match=reason):
            acts[name]()
        torch_ltc.sync(wait=True)


def test_a_read_in_a_hook_of_the_backward_pass_is_refused() -> None:
    x = torch.ones(3, device="ltc", requires_grad=True)
    x.register_hook(lambda grad: grad.sum().item())
    with torch_ltc.no_sync(), pytest.raises(SyncForbiddenError):
        (x * 2).sum().backward()


def test_recording_is_not_refused_and_blocks_nest() -> None:
    x = torch.ones(3).to("ltc")
    with torch_ltc.no_sync():
        y = x + 1
        with torch_ltc.no_sync():
            z = y * 2
        with torch_ltc.allow_sync():
            assert z.sum().item() == 12
        with pytest.raises(SyncForbiddenError):
            z.cpu()
    assert z.cpu().tolist() == [4, 4, 4]


def test_other_threads_are_free() -> None:
    import threading  # noqa: PLC0415

    x, found = torch.ones(3).to("ltc"), []
    with torch_ltc.no_sync():
        thread = threading.Thread(target=lambda: found.append(x.sum().item()))
        thread.start()
        thread.join()
    assert found == [3]


# ---- async_item -----------------------------------------------------------------------------------------------------


def test_an_async_item_costs_no_sync_and_no_program() -> None:
    parameter = nn.Parameter(torch.ones(3, device="ltc"))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    items, expected = [], []
    with observe() as seen:
        for step in range(8):
            loss = (parameter * 2).sum()
            if step >= 4:
                items.append(torch_ltc.async_item(loss))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert seen.reasons == ["OPTIMIZER"] * 8
    assert seen.reads == []
    assert len({sync.program for sync in seen.syncs[1:]}) == 1
    value = torch.ones(3)
    for step in range(8):
        expected += [float((value * 2).sum())] if step >= 4 else []
        value -= 0.1 * 2
    assert [float(item) for item in items] == expected


def test_an_async_item_is_the_value_of_its_moment() -> None:
    x = torch.ones(1).to("ltc")
    first = torch_ltc.async_item(x)
    x.add_(1)
    torch_ltc.sync()
    second = torch_ltc.async_item(x)
    x.add_(1)
    torch_ltc.sync()
    assert (first.result(), second.result(), x.item()) == (1, 2, 3)


def test_a_write_in_the_same_program_is_an_error_and_not_a_wrong_number() -> None:
    x = torch.ones(1).to("ltc") * 5
    item = torch_ltc.async_item(x)
    x.view(1).add_(1)
    with pytest.raises(LtcError, match="written to in the same program"):
        item.result()
    assert x.item() == 6


def test_asking_for_the_result_syncs_if_need_be() -> None:
    item = torch_ltc.async_item(torch.ones(3).to("ltc").sum())
    assert not item.done()
    assert repr(item) == "AsyncItem(pending)"
    with observe() as seen:
        assert item.result() == 3
    assert seen.reasons == ["READ"]
    assert item.done()
    assert (int(item), repr(item)) == (3, "AsyncItem(3.0)")
    with torch_ltc.no_sync():
        assert float(item) == 3
        pending = torch_ltc.async_item(torch.ones(1).to("ltc") * 2)
        with pytest.raises(SyncForbiddenError):
            pending.result()


def test_an_async_item_raises_what_its_program_raised() -> None:
    table, index = torch.ones(2, 2).to("ltc"), torch.tensor([7]).to("ltc")
    item = torch_ltc.async_item(nn.functional.embedding(index, table).sum())
    with pytest.raises(ExecutionError, match="embedding"):
        item.result()
    torch_ltc.sync(wait=True)


class LateEvent:
    """An event of a device beside the host, which comes when somebody waits for it."""

    def __init__(self) -> None:
        self.came = False

    def record(self) -> None:
        """Nothing is launched."""

    def query(self) -> bool:
        return self.came

    def synchronize(self) -> None:
        self.came = True


def test_the_worker_of_a_device_beside_the_host_does_not_wait_for_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_item_module, "_BESIDE_THE_HOST", frozenset({"cpu"}))
    monkeypatch.setattr(torch.cuda, "Event", LateEvent)
    x = torch.full((1,), 2.0).to("ltc")
    item = torch_ltc.async_item(x)
    x.add_(1)
    # What is queued behind it runs.
    torch_ltc.sync(wait=True)
    assert x.item() == 3
    assert not item.done()
    assert repr(item) == "AsyncItem(pending)"
    assert item.result() == 2
    assert item.done()
    assert repr(item) == "AsyncItem(2.0)"


def test_a_device_that_is_lost_before_the_number_has_landed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(event: LateEvent) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(async_item_module, "_BESIDE_THE_HOST", frozenset({"cpu"}))
    monkeypatch.setattr(torch.cuda, "Event", LateEvent)
    monkeypatch.setattr(LateEvent, "synchronize", fail)
    monkeypatch.setattr(device_loss, "told", lambda error: LtcError(f"told: {error}"))
    item = torch_ltc.async_item(torch.ones(1).to("ltc"))
    torch_ltc.sync(wait=True)
    with pytest.raises(LtcError, match="told: an illegal memory access"):
        item.result()


def test_bad_tensors_are_refused() -> None:
    with pytest.raises(LtcError, match="async_item takes a tensor on ltc, got one on cpu"):
        torch_ltc.async_item(torch.ones(1))
    with pytest.raises(RuntimeError, match="a Tensor with 2 elements cannot be converted to Scalar"):
        torch_ltc.async_item(torch.ones(2).to("ltc"))


# ---- repr -----------------------------------------------------------------------------------------------------------


def test_the_quiet_repr_says_what_is_pending_and_syncs_nothing() -> None:
    x = torch.ones(2, 3).to("ltc")
    y = x * 2  # maker
    with settings.scope(tensor_repr="pending"), observe() as seen:
        text = repr(y)
    assert seen.syncs == []
    assert seen.reads == []
    where = f"{re.escape(__file__)}:{marked(__file__, 'maker')} in test_the_quiet_repr\\w+"
    assert re.match(rf"tensor\(<pending: float32\[2,3\], aten::mul.Tensor at {where}>,", text)
    torch_ltc.sync(wait=True)
    with settings.scope(tensor_repr="pending"):
        assert repr(y) == "tensor([[2., 2., 2.],\n        [2., 2., 2.]], device='ltc:0')"


def test_the_quiet_repr_names_the_last_write() -> None:
    x = torch.ones(3).to("ltc")
    y = x * 2
    y.view(3).sub_(1)
    with settings.scope(tensor_repr="pending"):
        assert "aten::sub_.Tensor" in repr(y)
