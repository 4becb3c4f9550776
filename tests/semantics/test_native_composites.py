"""Attention, dropout and empty tensors, which the extension composes or makes where they are known: equal to eager, and
equal to what Python's kernels do."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_ltc
from torch_ltc.device import copies, cpu_composites, random_ops
from torch_ltc.native.recording import native

composed_natively = pytest.mark.skipif(native is None, reason="the extension is not built, or LTC_NATIVE=0")

Values = list[torch.Tensor]


def _attention(query: torch.Tensor, mask: torch.Tensor | None, **options: Any) -> Values:
    query = query.detach().requires_grad_(options.pop("grad", True))
    result = torch.nn.functional.scaled_dot_product_attention(query, query * 2, query + 1, mask, **options)
    if query.requires_grad:
        result.sum().backward()
    return [result.detach().cpu(), *([] if query.grad is None else [query.grad.cpu()])]


def _inputs(device: str, dtype: torch.dtype, mask_dtype: torch.dtype | None) -> tuple[torch.Tensor, Any]:
    torch.manual_seed(0)
    query = torch.randn(2, 3, 5, 8).to(dtype).to(device)
    if mask_dtype is None:
        return query, None
    ones = torch.ones(5, 5).tril()
    return query, (ones.bool() if mask_dtype is torch.bool else (ones - 1).to(mask_dtype)).to(device)


CALLS: dict[str, tuple[dict[str, Any], torch.dtype, torch.dtype | None]] = {
    "plain": ({}, torch.float32, None),
    "causal": ({"is_causal": True}, torch.float32, None),
    "scaled": ({"scale": 0.3}, torch.float32, None),
    "bool_mask": ({}, torch.float32, torch.bool),
    "added_mask": ({}, torch.float32, torch.float32),
    "float64": ({}, torch.float64, None),
    "bfloat16": ({"is_causal": True}, torch.bfloat16, None),
    "without_gradient": ({"grad": False}, torch.float32, None),
    "bool_mask_without_gradient": ({"grad": False}, torch.float32, torch.bool),
}


@pytest.mark.parametrize("name", CALLS)
def test_known_attention_is_that_of_eager(name: str) -> None:
    options, dtype, mask_dtype = CALLS[name]
    wanted = _attention(*_inputs("cpu", dtype, mask_dtype), **options)
    for _ in range(4):
        found = _attention(*_inputs("ltc", dtype, mask_dtype), **options)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_attention_with_dropout_draws_what_eager_draws() -> None:
    for seed in range(4):
        results = []
        for device in ("cpu", "ltc"):
            query, _ = _inputs(device, torch.float32, None)
            torch.manual_seed(seed)
            torch.ltc.manual_seed(seed)
            results.append(_attention(query, None, dropout_p=0.4))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@composed_natively
def test_known_attention_asks_nothing_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = _attention(*_inputs("ltc", torch.float32, None), is_causal=True)

    def refuse(*_: object) -> int:
        raise AssertionError("a known call went to Python")

    monkeypatch.setattr(cpu_composites, "_attention_choice", refuse)
    found = _attention(*_inputs("ltc", torch.float32, None), is_causal=True)
    assert torch.equal(found[0], wanted[0])
    with pytest.raises(AssertionError, match="went to Python"):
        _attention(_inputs("ltc", torch.float32, None)[0][:, :, :3], None, is_causal=True)


def test_a_chosen_kernel_holds_for_its_block_alone() -> None:
    query, _ = _inputs("ltc", torch.float32, None)

    def recorded() -> bool:
        made = torch.nn.functional.scaled_dot_product_attention(query, query, query)
        found = "flash_attention_for_cpu" in torch_ltc.debug.dump_ir([made])
        torch_ltc.sync(wait=True)
        return found

    for _ in range(3):
        assert recorded()
        with sdpa_kernel(SDPBackend.MATH):
            assert not recorded()


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("train", [True, False])
def test_dropout_is_that_of_eager(p: float, train: bool) -> None:
    def run(device: str, seed: int) -> Values:
        torch.manual_seed(seed)
        torch.ltc.manual_seed(seed)
        x = torch.linspace(-1, 1, 24).view(4, 6).t().to(device).requires_grad_()
        y = torch.nn.functional.dropout(x, p, train)
        y.sum().backward()
        assert x.grad is not None
        return [y.detach().cpu(), x.grad.cpu()]

    for seed in range(4):
        for found, wanted in zip(run("ltc", seed), run("cpu", seed), strict=True):
            assert torch.equal(found, wanted)
            assert found.stride() == wanted.stride()


@composed_natively
def test_dropout_asks_nothing_of_python() -> None:
    x = torch.ones(3, 4).to("ltc")

    def reaches_python(p: float) -> bool:
        called: set[object] = set()
        sys.setprofile(lambda frame, *_: called.add(frame.f_code))
        try:
            torch.nn.functional.dropout(x, p)
        finally:
            sys.setprofile(None)
        return random_ops.dropout.__code__ in called

    assert reaches_python(1.0)
    assert not reaches_python(0.5)


def _strided(**options: Any) -> torch.Tensor:
    return torch.empty_strided((3, 4), (1, 3), **options)


def _image(**options: Any) -> torch.Tensor:
    return torch.empty(2, 3, 4, 5, memory_format=torch.channels_last, **options)


EMPTIES: dict[str, Callable[..., torch.Tensor]] = {
    "plain": lambda **options: torch.empty(3, 4, **options),
    "no_dimensions": lambda **options: torch.empty((), **options),
    "no_elements": lambda **options: torch.empty(0, 3, **options),
    "strided": _strided,
    "channels_last": _image,
    "dtype": lambda **options: torch.empty(2, dtype=torch.int16, **options),
    "wants_gradient": lambda **options: torch.empty(2, 2, requires_grad=True, **options).detach(),
}


@pytest.mark.parametrize("name", EMPTIES)
def test_empty_tensors_are_as_in_eager_and_are_recorded(name: str) -> None:
    make = EMPTIES[name]
    wanted = make(device="cpu")
    for value in range(4):
        made = make(device="ltc")
        assert (made.shape, made.stride(), made.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)
        made.fill_(value)
        assert torch.equal((made * 2).cpu(), torch.full_like(wanted, 2 * value))


@composed_natively
def test_known_empty_tensors_ask_nothing_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    def made() -> torch.Tensor:
        return torch.empty(3, 11, device="ltc").fill_(2).mul_(3)

    for _ in range(3):
        kept = made()
        torch_ltc.sync(wait=True)

    def refuse(*_: object) -> torch.Tensor:
        raise AssertionError("a known shape went to Python")

    monkeypatch.setattr(copies, "_new", refuse)
    kept = made()
    monkeypatch.undo()
    assert kept.tolist() == [[6.0] * 11] * 3


def test_empty_tensors_follow_the_default_dtype_and_determinism() -> None:
    for _ in range(3):
        assert torch.empty(3, device="ltc").dtype is torch.float32
        torch.set_default_dtype(torch.float64)
        try:
            assert torch.empty(3, device="ltc").dtype is torch.float64
        finally:
            torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(True)
    try:
        filled = torch.empty(3, device="ltc")
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(math.isnan(each) for each in filled.tolist())


def test_empty_tensors_that_are_written_through_views() -> None:
    for value in range(4):
        made = torch.empty(2, 3, device="ltc")
        made[0] = value
        made[1] = made[0] + 1
        assert made.tolist() == [[float(value)] * 3, [value + 1.0] * 3]


def test_an_empty_tensor_of_another_device_number_is_refused_each_time() -> None:
    torch.empty(3, 11, device="ltc")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="ltc:7"):
            torch.empty(3, 11, device="ltc:7")
