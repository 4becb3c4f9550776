"""Capture overhead: steps recorded on the device and run with eager's kernels, against eager, inference and training.

    python -m benchmarks.capture [--backend torchscript] [--rounds N] [--only c,bert]

The models are those of the workloads c, e and h, and small configurations of BERT, GPT-2 and Llama from transformers.
Eager and the device take turns in one process; ratios are those of their shortest rounds, on the clock and in CPU time,
so that they mean something on a machine that does other work too. Published for the original Lazy Tensors: 38 % for
inference, 90 % for training.
"""

from __future__ import annotations

import argparse
import importlib
import math
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import torch_ltc
from benchmarks.models import Mlp, ResNet, Transformer
from torch_ltc.config import settings

Forward = Callable[[], Tensor]
# What makes a model and its batch; the forward pass gives one number.
Build = Callable[[str], tuple[nn.Module, Forward]]
SETTLING_STEPS = 12
ROUND_S = 0.05
_VOCABULARY = 1000


def _plain(make: Callable[[], nn.Module], *size: int) -> Build:
    def build(device: str) -> tuple[nn.Module, Forward]:
        model, batch = make().to(device), torch.randn(*size).to(device)
        return model, lambda: model(batch).square().mean()

    return build


def _language(config: str, model: str, **sizes: int) -> Build:
    def build(device: str) -> tuple[nn.Module, Forward]:
        transformers = importlib.import_module("transformers")
        made = getattr(transformers, model)(getattr(transformers, config)(vocab_size=_VOCABULARY, **sizes)).to(device)
        tokens = torch.randint(0, _VOCABULARY, (4, 64)).to(device)
        return made, lambda: made(input_ids=tokens).logits.square().mean()

    return build


_LLAMA = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
MODELS: dict[str, Build] = {
    "c": _plain(lambda: Mlp(1024, 3), 128, 1024),
    "e": _plain(ResNet, 32, 3, 32, 32),
    "h": _plain(lambda: Transformer(256, 4), 8, 128, 256),
    "bert": _language("BertConfig", "BertForMaskedLM", **_LLAMA),
    "gpt2": _language("GPT2Config", "GPT2LMHeadModel", n_embd=256, n_layer=4, n_head=4),
    "llama": _language("LlamaConfig", "LlamaForCausalLM", num_key_value_heads=4, **_LLAMA),
}


def step_of(name: str, device: str, training: bool) -> Callable[[], float]:
    """A step of this model; the call returns its loss."""
    torch.manual_seed(0)
    model, forward = MODELS[name](device)
    model.train(training)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def infer() -> float:
        with torch.no_grad():
            return forward().item()

    def train() -> float:
        optimizer.zero_grad()
        loss = forward()
        loss.backward()
        optimizer.step()
        return loss.item()

    return train if training else infer


def _measure(step: Callable[[], float], steps: int) -> tuple[float, float]:
    """Seconds a step: on the clock, and of CPU."""
    cpu_began, began = time.process_time(), time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - began) / steps, (time.process_time() - cpu_began) / steps


def compare(name: str, training: bool, rounds: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """The shortest rounds of eager and of the device, each in seconds a step on the clock and of CPU."""
    eager, device = step_of(name, "cpu", training), step_of(name, "ltc", training)
    for _ in range(SETTLING_STEPS):
        eager()
        device()
    torch_ltc.wait_for_compiles()
    device()
    steps = max(1, round(ROUND_S / _measure(eager, 3)[1]))
    pairs = [(_measure(eager, steps), _measure(device, steps)) for _ in range(rounds)]
    eager_s, device_s = ([min(column) for column in zip(*rows, strict=True)] for rows in zip(*pairs, strict=True))
    return (eager_s[0], eager_s[1]), (device_s[0], device_s[1])


def main() -> None:
    """Parse the command line, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="torchscript", help="torchscript or interpreter: eager's own kernels")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default=",".join(MODELS), help="these models")
    options = parser.parse_args()
    print(f"{options.backend}, {torch.get_num_threads()} threads; extension: {settings.native}")
    with settings.scope(backend=options.backend):
        for training in (False, True):
            logs: list[list[float]] = []
            what = "training" if training else "inference"
            for name in options.only.split(","):
                eager_s, device_s = compare(name, training, options.rounds)
                logs.append([math.log(ours / theirs) for ours, theirs in zip(device_s, eager_s, strict=True)])
                ratios = " ".join(f"{math.exp(value):6.3f}" for value in logs[-1])
                print(f"{what:<10} {name:<6} {eager_s[0] * 1e3:9.2f} {device_s[0] * 1e3:9.2f} ms {ratios}", flush=True)
            means = " ".join(f"{math.exp(statistics.fmean(column)):6.3f}" for column in zip(*logs, strict=True))
            print(f"{what:<10} {'geometric mean':<29} {means}", flush=True)


if __name__ == "__main__":
    main()
