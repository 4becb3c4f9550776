"""Plain eager code before and after the device was used, and the device beside it, with PyTorch's number of threads.

    python -m benchmarks.threads [--threads N] [--rounds N]

The CPU's threads are one resource: a pool of OpenMP threads that stays behind makes every small kernel of the process
slower. Each figure is the shortest of many rounds, so that it means something on a machine that does other work too.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable

import torch
from torch import nn

import torch_ltc
from torch_ltc.config import settings


def _step(device: str) -> Callable[[], float]:
    """A training step of a small transformer; the call returns its loss."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(8, 32, 128).to(device)

    def run() -> float:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    return run


def _measure(run: Callable[[], float], rounds: int) -> tuple[float, float]:
    """Shortest and median time of a round, in ms."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        run()
        times.append((time.perf_counter() - began) * 1e3)
    return min(times), statistics.median(times)


def _show(what: str, figures: tuple[float, float], base: tuple[float, float]) -> None:
    ratios = [value / reference for value, reference in zip(figures, base, strict=True)]
    print(f"{what:<46} {figures[0]:8.2f} {figures[1]:8.2f} ms {ratios[0]:6.2f} {ratios[1]:6.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=0, help="threads of a kernel; PyTorch's own choice by default")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--backend", default="torchscript")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    print(f"{torch.get_num_threads()} threads; shortest and median round, and their ratios to the first line")
    eager = _step("cpu")
    _measure(eager, 20)
    base = _measure(eager, options.rounds)
    _show("eager, before the device was used", base, base)
    with settings.scope(backend=options.backend):
        device = _step("ltc")
        _measure(device, 20)
        torch_ltc.wait_for_compiles()
        _measure(device, 5)
        _show("the device, alone", _measure(device, options.rounds), base)
        _show("eager, after it", _measure(eager, options.rounds), base)
        in_turn = [(_measure(eager, 1)[0], _measure(device, 1)[0]) for _ in range(options.rounds)]
        for what, times in zip(("eager", "the device"), zip(*in_turn, strict=True), strict=True):
            _show(f"{what}, in turn", (min(times), statistics.median(times)), base)
    _show("eager, at the end", _measure(eager, options.rounds), base)
    other = threading.Thread(target=lambda: (eager(), done.set(), ended.wait()))
    done, ended = threading.Event(), threading.Event()
    other.start()
    done.wait()
    _show("eager, beside an idle thread that ran eager", _measure(eager, options.rounds), base)
    ended.set()
    other.join()


if __name__ == "__main__":
    main()
