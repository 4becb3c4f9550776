"""What is run on a GPU: training of transformers and of a convolutional network in bfloat16, and decoding of Llama.

Sizes are those of real models. The workloads with `small` before their name have the same code at toy sizes, to try the
benchmark where there is no GPU.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from benchmarks.systems import System
from benchmarks.workloads import Step, Workload, trainer

VOCABULARY = 8192
PROMPT_TOKENS = 64
CACHE_TOKENS = 1024


class Block(nn.Module):
    """A transformer layer with PyTorch's own attention, norms first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_feed = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as `x`."""
        batch, length, width = x.shape
        packed = self.query_key_value(self.norm_attention(x))
        query, key, value = packed.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed(self.norm_feed(x))


class Decoder(nn.Module):
    """A language model: embeddings, blocks, logits."""

    def __init__(self, width: int, layers: int, heads: int, length: int, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits for every position."""
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions)))


class Bottleneck(nn.Module):
    """A block of ResNet-50: 1x1, 3x3, 1x1 and a shortcut."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        wide = 4 * channels
        self.body = nn.Sequential(
            *_convolution(channels_in, channels, 1, 1),
            nn.ReLU(),
            *_convolution(channels, channels, 3, stride),
            nn.ReLU(),
            *_convolution(channels, wide, 1, 1),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != wide:
            self.shortcut = nn.Sequential(*_convolution(channels_in, wide, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        """The residual of `x`, narrower by the stride."""
        return (self.body(x) + self.shortcut(x)).relu()


def _convolution(channels_in: int, channels: int, size: int, stride: int) -> tuple[nn.Module, nn.Module]:
    convolution = nn.Conv2d(channels_in, channels, size, stride, padding=size // 2, bias=False)
    return convolution, nn.BatchNorm2d(channels)


def resnet(blocks: tuple[int, ...], width: int, classes: int = 1000) -> nn.Module:
    """A network of the shape of ResNet-50, which is `blocks` (3, 4, 6, 3) and `width` 64."""
    layers: list[nn.Module] = [*_convolution(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels = width
    for stage, count in enumerate(blocks):
        for block in range(count):
            layers.append(Bottleneck(channels, width * 2**stage, 2 if stage and not block else 1))
            channels = 4 * width * 2**stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a transformer and of its data."""

    layers: int
    width: int
    heads: int
    batch: int
    length: int


def _decoder(sizes: Sizes, optimizer: Callable[[Any], Optimizer]) -> Callable[[System], Step]:
    def build(system: System) -> Step:
        model = Decoder(sizes.width, sizes.layers, sizes.heads, sizes.length).to(torch.bfloat16)
        tokens = torch.randint(0, VOCABULARY, (sizes.batch, sizes.length + 1))
        batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        return trainer(system, model, [batch], optimizer, token_loss)

    return build


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of the next tokens."""
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _class_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.float(), targets)


def _sgd(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.01, momentum=0.9)


def _adamw(parameters: Any) -> Optimizer:
    return AdamW(parameters, lr=1e-4)


def _convnet(blocks: tuple[int, ...], width: int, batch: int, size: int) -> Callable[[System], Step]:
    def build(system: System) -> Step:
        model = resnet(blocks, width).to(torch.bfloat16).to(memory_format=torch.channels_last)
        images = torch.randn(batch, 3, size, size, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
        return trainer(system, model, [(images, torch.randint(0, 1000, (batch,)))], _sgd, _class_loss)

    return build


class _Decoding:
    """A Llama with a cache of fixed size, and the position of the next token, which lies on the device: in the cache,
    or with older versions of Transformers outside of it."""

    def __init__(self, system: System, **sizes: int) -> None:
        transformers = importlib.import_module("transformers")
        config = transformers.LlamaConfig(**sizes, max_position_embeddings=CACHE_TOKENS, tie_word_embeddings=True)
        self.model = transformers.LlamaForCausalLM(config).eval().to(torch.bfloat16).to(system.device)
        self.cache = transformers.StaticCache(config=config, max_cache_len=CACHE_TOKENS)
        prompt = torch.randint(0, config.vocab_size, (1, PROMPT_TOKENS))
        self.token = prompt[:, -1:].contiguous().to(system.device)
        self.position = torch.arange(PROMPT_TOKENS).to(system.device)
        self.keeps_position = "cache_position" not in inspect.signature(self.model.forward).parameters
        self.forward(prompt.to(system.device))
        self.position = torch.tensor([PROMPT_TOKENS]).to(system.device)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits after the last token."""
        given = {} if self.keeps_position else {"cache_position": self.position}
        logits: Tensor = self.model(tokens, past_key_values=self.cache, **given).logits
        return logits[:, -1]

    def restart(self) -> None:
        """Continue behind the prompt: the cache is full."""
        for layer in self.cache.layers if self.keeps_position else ():
            layer.cumulative_length.fill_(PROMPT_TOKENS)
        self.position.fill_(PROMPT_TOKENS)


def _llama(**sizes: int) -> Callable[[System], Step]:
    """Decoding token by token with a cache of fixed size, as compilers want it.

    The next token is computed and not fed back: with random weights the largest logits lie close together, systems that
    round differently would soon decode different texts, and nothing could be compared.
    """

    def build(system: System) -> Step:
        with torch.no_grad():
            decoding = _Decoding(system, **sizes)
            system.sync()

        def decode(token: Tensor) -> tuple[Tensor, Tensor]:
            logits = decoding.forward(token)
            decoding.position.add_(1)
            return logits.argmax(-1), logits.float().amax()

        compiled = system.compile_step(system.compile_loss(decode))
        steps = 0

        def step() -> tuple[Tensor, object]:
            nonlocal steps
            steps += 1
            with torch.no_grad():
                if steps % (CACHE_TOKENS - PROMPT_TOKENS) == 0:
                    decoding.restart()
                decoded, largest = compiled(decoding.token)
            return largest, decoded

        return step

    return build


_LARGE = Sizes(layers=12, width=768, heads=12, batch=8, length=512)
_MIDDLE = Sizes(layers=4, width=256, heads=4, batch=8, length=128)
_SMALL = Sizes(layers=2, width=32, heads=2, batch=2, length=16)
# The sizes of Llama 3.2 1B.
_LLAMA_1B = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
_LLAMA_SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}

GPU_WORKLOADS: dict[str, Workload] = {
    workload.key: workload
    for workload in (
        Workload("large-sgd", "transformer 12x768, 8x512 tokens, SGD", _decoder(_LARGE, _sgd)),
        Workload("large-adamw", "transformer 12x768, 8x512 tokens, AdamW", _decoder(_LARGE, _adamw)),
        Workload("middle-sgd", "transformer 4x256, 8x128 tokens, SGD", _decoder(_MIDDLE, _sgd)),
        Workload("middle-adamw", "transformer 4x256, 8x128 tokens, AdamW", _decoder(_MIDDLE, _adamw)),
        Workload("resnet", "ResNet-50, batch 64, 224x224, SGD", _convnet((3, 4, 6, 3), 64, 64, 224)),
        Workload("llama", "Llama 1B, decoding one token", _llama(**_LLAMA_1B), has_optimizer=False),
    )
}
SMALL_WORKLOADS: dict[str, Workload] = {
    workload.key: workload
    for workload in (
        Workload("small-sgd", "transformer 2x32, 2x16 tokens, SGD", _decoder(_SMALL, _sgd)),
        Workload("small-adamw", "transformer 2x32, 2x16 tokens, AdamW", _decoder(_SMALL, _adamw)),
        Workload("small-resnet", "residual network, batch 2, 32x32, SGD", _convnet((1, 1), 8, 2, 32)),
        Workload("small-llama", "small Llama, decoding one token", _llama(**_LLAMA_SMALL), has_optimizer=False),
    )
}
