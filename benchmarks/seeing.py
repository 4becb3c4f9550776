"""What seeing costs: recording with everything that is on by default, against recording with it switched off.

Owns the measurement of the history, the metrics and the sources alone. One process; each round measures with and
without, in an order that alternates, and a ratio is taken round by round before the median. The sync stands outside the
timing of the chain and inside that of the steps. "first recording" records programs that are new,
which is where lines, modules and forward lines are looked for; a known program costs nothing for them.

    python -m benchmarks.seeing [--json] [--rounds N]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

import torch_ltc
from torch_ltc import events, metrics
from torch_ltc.debug.history import history
from torch_ltc.record import recorder as recording
from torch_ltc.record.forward_lines import ForwardLines
from torch_ltc.source import UNKNOWN

CHAIN_LENGTH = 200
REPETITIONS = 40
LAYERS = 12


@contextmanager
def without_listeners() -> Iterator[None]:
    """Nobody listens: neither the history nor the metrics."""
    history.stop()
    kept = dict(events._subscriptions)
    events._subscriptions.clear()
    try:
        yield
    finally:
        events._subscriptions.update(kept)
        history.listen()


@contextmanager
def without_checks() -> Iterator[None]:
    """Nothing is checked, as by default."""
    with torch_ltc.config.settings.scope(check="off"):
        yield


@contextmanager
def without_sources() -> Iterator[None]:
    """No line, module or forward line is looked for."""
    found = recording.call_source, ForwardLines.number_of
    recording.call_source = lambda depth=1: UNKNOWN
    ForwardLines.number_of = lambda self, values: None
    try:
        yield
    finally:
        recording.call_source, ForwardLines.number_of = found


def timed(work: Callable[[], object], after: Callable[[], object]) -> float:
    """Seconds that `work` takes, the median over repetitions."""
    found = []
    for _ in range(REPETITIONS):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
        after()
    return statistics.median(found)


def chain() -> Callable[[], float]:
    """Recording 200 additions."""
    x = torch.ones(16).to("ltc")

    def work() -> Tensor:
        y = x
        for _ in range(CHAIN_LENGTH):
            y = y + x
        return y

    return lambda: timed(work, lambda: torch_ltc.sync(wait=True))


def network(layers: int, width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Linear layers and an optimizer."""
    net = nn.Sequential(
        *[nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU()) for _ in range(layers)]
    )
    net.to("ltc")
    return net, torch.optim.SGD(net.parameters(), lr=0.1)


def step(layers: int, width: int) -> Callable[[], float]:
    """A training step, its sync included."""
    net, optimizer = network(layers, width)
    x = torch.ones(4, width).to("ltc")

    def work() -> None:
        net(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return lambda: timed(work, lambda: torch_ltc.sync(wait=True))


def checked(check: str) -> Callable[[], float]:
    """A training step of a network with Adam on TorchScript while programs are checked, until it has run."""
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to("ltc")
    optimizer = torch.optim.Adam(net.parameters())
    x = torch.ones(64, 64).to("ltc")

    def work() -> None:
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_ltc.sync(wait=True)

    def measured() -> float:
        with torch_ltc.config.settings.scope(backend="torchscript", tiers="blocking"):
            return timed(work, lambda: None)

    torch_ltc.config.settings.check = check
    return measured


def first_recording() -> Callable[[], float]:
    """A training step of a batch size that was not there before: each of its calls is new."""
    net, optimizer = network(LAYERS, 8)
    sizes = itertools.count(2)

    def work() -> None:
        net(torch.ones(next(sizes), 8).to("ltc")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return lambda: timed(work, lambda: torch_ltc.sync(wait=True))


WORKLOADS: dict[str, tuple[Callable[[], Callable[[], float]], Callable[[], object]]] = {
    "200 additions": (chain, without_listeners),
    "step of 2 layers": (lambda: step(2, 4), without_listeners),
    "step of 12 layers": (lambda: step(LAYERS, 8), without_listeners),
    "first recording, 12 layers": (first_recording, without_sources),
    "check = nan": (lambda: checked("nan"), without_checks),
    "check = validate": (lambda: checked("validate"), without_checks),
}


def measure(rounds: int) -> dict[str, dict[str, float]]:
    """For each workload the medians with and without, and the median of the ratios."""
    results = {}
    for title, (make, without) in WORKLOADS.items():
        run = make()
        run()
        pairs = []
        for number in range(rounds):
            pair = {}
            for name in ("with", "without") if number % 2 else ("without", "with"):
                if name == "with":
                    pair[name] = run()
                else:
                    with without():  # type: ignore[attr-defined]
                        pair[name] = run()
            pairs.append(pair)
        results[title] = {
            "with_s": statistics.median(pair["with"] for pair in pairs),
            "without_s": statistics.median(pair["without"] for pair in pairs),
            "ratio": statistics.median(pair["with"] / pair["without"] for pair in pairs),
        }
    return results


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    metrics.reset()
    with torch_ltc.config.settings.scope(backend="interpreter", cache_dir="off"):
        results = measure(options.rounds)
    if options.json:
        print(json.dumps(results, indent=1))
        return
    for title, row in results.items():
        with_us, without_us = row["with_s"] * 1e6, row["without_s"] * 1e6
        print(f"{title:<24} with {with_us:9.1f} us   without {without_us:9.1f} us   ratio {row['ratio']:.3f}")


if __name__ == "__main__":
    main()
