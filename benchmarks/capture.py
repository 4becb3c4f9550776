"""Capture overhead: steps recorded on the device and run with eager's kernels, against eager, inference and training.

    python -m benchmarks.capture [--backend torchscript] [--rounds N] [--only c,bert]

The models are those of the workloads c, e and h, and small configurations of BERT, GPT-2 and Llama from transformers.
Eager and the device take turns in one process; a ratio is that of their shortest rounds, so that it means something on
a machine that does other work too. Published for the original Lazy Tensors: 38 % for inference, 90 % for training.
"""

from __future__ import annotations

import argparse
import importlib
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import torch_ltc
from benchmarks.models import Mlp, ResNet, Transformer
from torch_ltc.config import settings

Forward = Callable[[], Tensor]
# What makes a model and its batch; the forward pass gives one number.
Build = Callable[[str], tuple[nn.Module, Forward]]
SETTLING_STEPS = 12
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


def _measure(step: Callable[[], float], steps: int) -> float:
    began = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - began) / steps


def compare(name: str, training: bool, rounds: int) -> tuple[float, float]:
    """The shortest round of eager and of the device, in seconds a step."""
    eager, device = step_of(name, "cpu", training), step_of(name, "ltc", training)
    for _ in range(SETTLING_STEPS):
        eager()
        device()
    torch_ltc.wait_for_compiles()
    device()
    steps = max(1, round(0.05 / _measure(eager, 3)))
    pairs = [(_measure(eager, steps), _measure(device, steps)) for _ in range(rounds)]
    shortest: Any = tuple(map(min, zip(*pairs, strict=True)))
    return shortest


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
            logs = []
            for name in options.only.split(","):
                eager_s, device_s = compare(name, training, options.rounds)
                logs.append(math.log(device_s / eager_s))
                what = "training" if training else "inference"
                print(f"{what:<10} {name:<6} {eager_s * 1e3:9.2f} {device_s * 1e3:9.2f} ms {device_s / eager_s:6.3f}")
            print(f"{what:<10} geometric mean {math.exp(statistics.fmean(logs)):32.3f}", flush=True)


if __name__ == "__main__":
    main()
