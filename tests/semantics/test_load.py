"""Load: ends of a process in the middle of work, processes that share what they compiled, and very many tensors."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch_ltc
from torch_ltc.config import settings
from torch_ltc.execute.memory import memory

ROOT = Path(__file__).resolve().parents[2]

# One program runs when the process ends, one is queued behind it, and one is pending.
_IN_THE_MIDDLE = """
import os, signal, sys, threading, time
import torch, torch_ltc

@torch.library.custom_op("load::slow", mutates_args=())
def slow(x: torch.Tensor) -> torch.Tensor:
    time.sleep(0.5)
    print("slow work ran", flush=True)
    return x + 1

@slow.register_fake
def _(x):
    return torch.empty_like(x)

started = threading.Event()
torch_ltc.events.subscribe(lambda event: started.set(), torch_ltc.events.SyncEvent)
x = torch.ones(3, device="ltc")
running = slow(x)
torch_ltc.sync()
queued = running * 2
torch_ltc.sync()
pending = queued - x

def exit_in_closure():
    sys.exit(9)

def interrupted():
    try:
        signal.raise_signal(signal.SIGINT)
        time.sleep(30)
    except KeyboardInterrupt:
        assert pending.tolist() == [3.0] * 3
        sys.exit(6)

"""
# How the process ends, and its status. A thread in a call of PyTorch while the interpreter ends aborts the process,
# with plain CPU tensors as well: there is no such case.
ENDS = {
    "end_of_the_script": ("", 0),
    "sys_exit": ("sys.exit(4)", 4),
    "exception": ("raise ValueError('of the script')", 1),
    "os_exit": ("os._exit(5)", 5),
    "sys_exit_in_a_closure": ("torch_ltc.add_step_closure(exit_in_closure); torch_ltc.mark_step(wait=True)", 9),
    "interrupt": ("interrupted()", 6),
    "termination": ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)", -signal.SIGTERM),
}
# What is queued is not waited for.
_AT_ONCE = ("os_exit", "termination")


@pytest.mark.parametrize("name", ENDS)
def test_a_process_may_end_in_the_middle_of_work(name: str) -> None:
    end, status = ENDS[name]
    # SIGINT is ignored by what a shell starts in the background, and by its children.
    done = subprocess.run(
        [sys.executable, "-c", _IN_THE_MIDDLE + end],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert done.returncode == status, done.stderr
    assert "slow work ran" in done.stdout or name in _AT_ONCE
    assert ("Traceback" in done.stderr) is (name == "exception"), done.stderr


_SHARING = """
import sys, torch, torch_ltc
from torch_ltc.config import settings
settings.cache_dir = sys.argv[1]
settings.tiers = "blocking"
settings.backend = "torchscript"
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
x = torch.randn(5, 8)
model.to("ltc"); x = x.to("ltc")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(6):
    optimizer.zero_grad()
    loss = model(x[: 2 + step % 3]).square().mean()
    loss.backward()
    optimizer.step()
print(loss.item().hex(), torch_ltc.metrics.counter_value("Compile") or 0)
"""


def _run_at_once(count: int, folder: Path) -> list[list[str]]:
    # Eager regions and invariants as a user has them.
    env = {key: value for key, value in os.environ.items() if not key.startswith("LTC_") or key == "LTC_NATIVE"}
    command = [sys.executable, "-c", _SHARING, str(folder)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) for _ in range(count)]
    texts = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started] == [0] * count
    return [text.split() for text in texts]


def test_four_processes_share_one_disk_cache(tmp_path: Path) -> None:
    at_once = _run_at_once(4, tmp_path / "cache")
    assert len({loss for loss, _ in at_once}) == 1
    (later,) = _run_at_once(1, tmp_path / "cache")
    assert later == [at_once[0][0], "0"]
    assert {path.suffix for path in (tmp_path / "cache").iterdir()} == {".ltc"}


def test_a_hundred_thousand_live_tensors() -> None:
    # What other tests have left in cycles would be freed in the middle.
    gc.collect()
    torch_ltc.sync(wait=True)
    before = memory.figures()["allocation.all.current"]
    x = torch.arange(3.0).to("ltc")
    with settings.scope(backend="interpreter"):
        kept = [x + number for number in range(100_000)]
        torch_ltc.sync(wait=True)
        assert memory.figures()["allocation.all.current"] - before == 100_001
        total = torch.stack(kept[::1000]).sum(0)
        assert total.tolist() == [49500.0 * 100 + 100 * place for place in range(3)]
        assert kept[77_777].tolist() == [77777.0, 77778.0, 77779.0]
    del kept, total, x
    torch_ltc.sync(wait=True)
    assert memory.figures()["allocation.all.current"] == before


@pytest.mark.slow
def test_tensors_of_more_than_two_to_the_31_elements() -> None:
    count = 2**31 + 5
    x = torch.zeros(count, dtype=torch.int8, device="ltc")
    x[-3:] = 7
    tail = x[count - 4 :].view(2, 2)
    assert tail.tolist() == [[0, 7], [7, 7]]
    assert x.sum().item() == 21
    assert x.view(-1)[2**31 :].shape == (5,)
