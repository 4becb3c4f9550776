"""Locks are taken in the order that is written down, and nobody waits for a worker with a lock held."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.checked_locks import MADE, documented

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "torch_ltc"


def test_every_lock_of_the_package_has_a_level() -> None:
    made = {
        f"{path.relative_to(PACKAGE)} {match[1]}"
        for path in PACKAGE.rglob("*.py")
        if "testing" not in path.parts
        for match in MADE.finditer(path.read_text())
    }
    assert made == set(documented())


def test_locks_are_taken_in_order_and_nobody_waits_with_one_held(tmp_path: Path) -> None:
    # The second process loads what the first one compiled, on the worker.
    first, second = (_observed(tiers, tmp_path / "cache") for tiers in ("background", "off"))
    levels = documented()
    for before, after in first | second:
        assert levels[before] < levels[after], f"{after} is taken while {before} is held"


def _observed(tiers: str, cache: Path) -> set[tuple[str, str]]:
    script = _WORK.format(tiers=tiers, cache=str(cache))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    pairs = [line.split(" -> ") for line in done.stdout.splitlines()]
    assert pairs
    return {(before, after) for before, after in pairs}


_WORK = """
import faulthandler, threading
faulthandler.dump_traceback_later(100, exit=True)
from tests.support import checked_locks
checked_locks.install()
import torch, torch_ltc
from torch_ltc import closures, events, ir_cache, metrics
from torch_ltc.config import settings

settings.queue_bound = 1
settings.hot_after = 2
settings.tiers = "{tiers}"
settings.cache_dir = "{cache}"
kept = torch.full((2,), 3.0).to("ltc")
recorded = []

def listen(event):
    # On a worker, a compile thread or the user's, in the middle of anything.
    checked_locks.note_callback()
    if len(recorded) < 200:
        recorded.append(kept + len(recorded))
    if isinstance(event, events.SyncEvent) and len(recorded) % 5 == 0:
        recorded[-1].tolist()

stop = events.subscribe(listen)

def train(number):
    layer = torch.nn.Linear(4, 4, device="ltc")
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    for step in range(3):
        loss = layer(torch.rand(2 + number, 4, device="ltc")).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.nonzero(layer.weight)
        torch_ltc.add_step_closure(float, (loss,), run_async=True)
        torch_ltc.async_item(loss)
        torch.manual_seed(step)
        torch.ltc.get_rng_state()
        torch_ltc.sync()

threads = [threading.Thread(target=train, args=(number,)) for number in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
closures.wait_step_closures()
settings.pending_bound = 8
for _ in range(20):
    kept = kept + 1
ir_cache.reset()
torch.set_default_dtype(torch.float64)
torch_ltc.wait_for_compiles()
stop()
for number, value in enumerate(recorded):
    assert value.numel() == 2 and not value.isnan().any().item(), number
torch_ltc.doctor()
metrics.metrics_report()
torch.ltc.memory_summary()
assert not checked_locks.faults, checked_locks.faults[:5]
print("record/recorder.py lock -> execute/executor.py _room")
for before, after in sorted(checked_locks.edges):
    print(before, "->", after)
"""
