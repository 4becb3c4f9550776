"""Training steps of transformers on a GPU: eager, `torch.compile`, recorded, captured and jit, as ratios to eager.

    python -m benchmarks.graphs [--rounds 2] [--json FILE]
    python -m benchmarks.graphs --host [--optimizer sgd]     what a replay costs on the host; on any machine
    python -m benchmarks.graphs --replays 10000              thousands of replays against recorded steps

Each system runs in a process of its own, one after the other, in turn for each round: bfloat16, SGD with momentum, the
loss read every ten steps. A figure is the median over rounds of milliseconds a step; `host` is the part of it that the
user's thread is busy.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_workloads import VOCABULARY, Decoder

# Layers, width, heads, batch, length.
SIZES = {"12 layers": (12, 768, 12, 8, 512), "4 layers": (4, 256, 4, 8, 128)}
SYSTEMS = ("eager", "reduce-overhead", "recorded", "captured", "jit", "jit inductor")
STEPS, WARM, READ_EVERY = 100, 40, 10
TIMEOUT_S = 300.0

Step = Callable[[Tensor], Tensor]


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    """The loss of predicting the next token."""
    logits = model(tokens[:, :-1]).flatten(0, 1).float()
    return torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())


def measure(step: Step, batches: list[Tensor]) -> dict[str, Any]:
    """Milliseconds a step, those on the host, and the losses."""
    losses: list[Tensor] = []
    times, host = [], []
    last = time.perf_counter()
    for number in range(STEPS):
        began = time.perf_counter()
        losses.append(step(batches[number % len(batches)]).detach().clone())
        host.append(time.perf_counter() - began)
        if number % READ_EVERY == READ_EVERY - 1:
            losses[-1].item()
            now = time.perf_counter()
            if number >= WARM:
                times.append((now - last) / READ_EVERY)
            last = now
    figures = {"ms": statistics.median(times) * 1e3, "host_ms": statistics.median(host[WARM:]) * 1e3}
    return {**figures, "losses": [loss.item() for loss in losses]}


def build(system: str, sizes: tuple[int, ...]) -> tuple[Step, list[Tensor]]:
    """The training step of one system on one size, and its batches."""
    layers, width, heads, batch, length = sizes
    device = "cuda" if system in ("eager", "reduce-overhead") else "ltc"
    torch.manual_seed(0)
    model = Decoder(width, layers, heads, length).to(torch.bfloat16)
    batches = [torch.randint(0, VOCABULARY, (batch, length + 1)) for _ in range(4)]
    model.to(device)
    batches = [tokens.to(device) for tokens in batches]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    forward: Callable[[Tensor], Tensor] = lambda tokens: loss_of(model, tokens)  # noqa: E731
    if system == "reduce-overhead":
        forward = torch.compile(forward, mode="reduce-overhead")

    def step(tokens: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = forward(tokens)
        loss.backward()
        optimizer.step()
        return loss

    if system.startswith("jit"):
        import torch_ltc  # noqa: PLC0415  eager CUDA runs in processes without it

        return torch_ltc.jit(step), batches
    return step, batches


def prepare(system: str) -> None:
    """Set this process up for one system."""
    if system not in ("eager", "reduce-overhead"):
        os.environ["LTC_TS_CUDA"] = "1"
        os.environ["LTC_TIERS"] = "blocking"
        os.environ["LTC_BACKEND"] = "inductor" if system == "jit inductor" else "interpreter"
        os.environ["LTC_CUDA_GRAPHS"] = "off" if system == "recorded" else "auto"
        import torch_ltc  # noqa: F401, PLC0415


def child(system: str) -> None:
    """Measure one system, and print its figures as JSON."""
    prepare(system)
    print(json.dumps({name: measure(*build(system, sizes)) for name, sizes in SIZES.items()}))


def run(system: str) -> dict[str, Any]:
    """The figures of one system, from a process of its own."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.graphs", "--system", system]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise SystemExit(f"{system} failed:\n{done.stderr[-2000:]}")
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> None:
    """Run all systems in turn, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json")
    parser.add_argument("--system", help=argparse.SUPPRESS)
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--optimizer", choices=("sgd", "adam"), default="sgd")
    parser.add_argument("--replays", type=int)
    options = parser.parse_args()
    if options.host or options.replays:
        if torch.cuda.is_available() and not options.host:
            os.environ["LTC_TS_CUDA"] = "1"
        from benchmarks import replays  # noqa: PLC0415  imports torch_ltc, without which eager CUDA runs

        print(replays.host(options.optimizer) if options.host else replays.many(options.replays))
        return
    if options.system:
        child(options.system)
        return
    rounds = [{system: run(system) for system in SYSTEMS} for _ in range(options.rounds)]
    print("| size | system | ms a step | host | / eager | losses |\n|---|---|---|---|---|---|")
    results = []
    for size in SIZES:
        for system in SYSTEMS:
            found = [each[system][size] for each in rounds]
            eager = [each["eager"][size] for each in rounds]
            ratio = statistics.median(a["ms"] / b["ms"] for a, b in zip(found, eager, strict=True))
            apart = max(abs(a - b) for a, b in zip(found[0]["losses"], eager[0]["losses"], strict=True))
            row = [statistics.median(each[key] for each in found) for key in ("ms", "host_ms")]
            same = "equal" if apart == 0 else f"differ by {apart:.1e} at most"
            print(f"| {size} | {system} | {row[0]:.2f} | {row[1]:.2f} | {ratio:.2f} | {same} |")
            results.append(
                {"size": size, "system": system, "ms": row[0], "host_ms": row[1], "ratio": ratio, "apart": apart}
            )
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
