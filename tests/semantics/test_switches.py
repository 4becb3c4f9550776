"""Global switches of PyTorch: a call means what they said when it was made, whenever it runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_ltc
from tests.semantics.support import lazy
from torch_ltc.compile import jobs
from torch_ltc.config import settings
from torch_ltc.events import SyncReason
from torch_ltc.pytorch.switches import SETTERS
from torch_ltc.record.recorder import recorder

_seen: list[Any] = []
_look: list[Callable[[], Any]] = []


@torch.library.custom_op("torch_ltc_tests::looks_at_a_switch", mutates_args=(), device_types="cpu")
def looks_at_a_switch(tensor: Tensor) -> Tensor:
    """Notes what a switch says while a kernel runs."""
    _seen.append(_look[-1]())
    return tensor + 1


@looks_at_a_switch.register_fake
def _(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor)


def _attribute(owner: Any, name: str, value: Any) -> tuple[Callable[[], Any], Callable[[Any], None], Any]:
    def assign(new: Any) -> None:
        # PyTorch's test utilities forbid plain assignment, in the process that has loaded them.
        with torch.backends.__allow_nonbracketed_mutation():  # type: ignore[attr-defined]
            setattr(owner, name, new)

    return (lambda: getattr(owner, name)), assign, value


_deterministic = (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True)
_SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Any]] = {
    "use_deterministic_algorithms": _deterministic,
    "set_deterministic_debug_mode": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, 1),
    "fill_uninitialized_memory": _attribute(torch.utils.deterministic, "fill_uninitialized_memory", False),
    "set_float32_matmul_precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"),
    "fp32_precision": _attribute(torch.backends, "fp32_precision", "tf32"),
    "mkldnn.matmul.fp32_precision": _attribute(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),  # type: ignore[attr-defined]
    "cuda.matmul.allow_tf32": _attribute(torch.backends.cuda.matmul, "allow_tf32", True),
    "cudnn.allow_tf32": _attribute(torch.backends.cudnn, "allow_tf32", False),
    "cudnn.enabled": _attribute(torch.backends.cudnn, "enabled", False),
    "cudnn.benchmark": _attribute(torch.backends.cudnn, "benchmark", True),
    "cudnn.deterministic": _attribute(torch.backends.cudnn, "deterministic", True),
    "cuda.matmul.allow_fp16_accumulation": _attribute(torch.backends.cuda.matmul, "allow_fp16_accumulation", True),
    "cuda.matmul.allow_fp16_reduced_precision_reduction": _attribute(
        torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False
    ),
    "cuda.matmul.allow_bf16_reduced_precision_reduction": _attribute(
        torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False
    ),
    "nnpack.set_flags": (torch._C._get_nnpack_enabled, torch.backends.nnpack.set_flags, False),
    "quantized.engine": _attribute(torch.backends.quantized, "engine", "onednn"),
    "mkldnn.enabled": _attribute(torch.backends.mkldnn, "enabled", False),
    "mkldnn.deterministic": _attribute(torch.backends.mkldnn, "deterministic", True),
    "set_default_dtype": (torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "set_default_tensor_type": (
        lambda: torch.DoubleTensor if torch.get_default_dtype() is torch.float64 else torch.FloatTensor,
        torch.set_default_tensor_type,
        torch.DoubleTensor,
    ),
    "set_num_threads": (torch.get_num_threads, torch.set_num_threads, 3),
    "set_flush_denormal": (
        lambda: (torch.tensor([1e-40], device="cpu") * 1).item() == 0.0,
        torch.set_flush_denormal,
        True,
    ),
}

if hasattr(torch.backends.cudnn, "depthwise_kernel"):
    _SWITCHES["cudnn.depthwise_kernel"] = _attribute(torch.backends.cudnn, "depthwise_kernel", "native")


_NOT_FOR_KERNELS = {
    # Read at the call, above the device or when attention chooses its kernel.
    *("_set_autograd_fallback_mode", "_set_dispatch_mode", "_set_torch_function_state", "_set_tracing_state"),
    *("_set_math_sdp_allow_fp16_bf16_reduction", "_set_sdp_priority_order", "_set_dtensor_allow_implicit_replication"),
    # What is said, and by whom.
    *("_set_backcompat_broadcast_warn", "_set_backcompat_keepdim_warn", "_set_warnAlways", "_set_thread_name"),
    # Of TorchScript's compiler, of single values of it, of tensors that are pickled, and of ROCm.
    *("_set_graph_exec_group", "_set_graph_executor_optimize", "_set_value_trace", "_set_tensor_metadata"),
    "_set_miopen_immediate",
}


@contextmanager
def _restored(name: str) -> Iterator[None]:
    get, put, _ = _SWITCHES[name]
    before = get()
    try:
        yield
    finally:
        put(before)


@pytest.mark.filterwarnings("ignore:torch.set_default_tensor_type")
@pytest.mark.parametrize("name", _SWITCHES)
def test_a_kernel_sees_the_switch_as_it_was_at_the_call(name: str) -> None:
    get, put, value = _SWITCHES[name]
    _seen.clear()
    _look.append(get)
    before = get()
    assert before != value
    x = torch.ones(2, device="ltc")
    with _restored(name):
        first = looks_at_a_switch(x)
        put(value)
        second = looks_at_a_switch(first)
        put(before)
        looks_at_a_switch(second)
        torch_ltc.sync(wait=True)
    assert _seen == [before, value, before]
    assert get() == before


def test_every_switch_that_pytorch_has_for_kernels_is_known() -> None:
    """A new one is looked at: does a kernel read it when it runs?"""
    flags = {
        name for name in dir(torch._C) if name.startswith("_set_") and hasattr(torch._C, name.replace("_set_", "_get_"))
    }
    kept = {setter.rpartition(".")[2] for setter in SETTERS}
    assert flags - kept == _NOT_FOR_KERNELS & flags


@pytest.mark.parametrize(
    "choose",
    [
        lambda: torch.backends.cuda.preferred_linalg_library("magma"),
        lambda: torch.backends.cuda.preferred_blas_library("cublaslt"),
    ],
)
def test_before_another_library_is_chosen_everything_recorded_has_run(choose: Callable[[], object]) -> None:
    x = torch.ones(2, device="ltc") + 1
    assert not recorder.empty
    # There are none where PyTorch has no CUDA.
    with contextlib.suppress(RuntimeError):
        choose()
    assert recorder.empty
    assert x.tolist() == [2.0, 2.0]


def test_setting_what_is_set_already_runs_nothing() -> None:
    x = torch.ones(2, device="ltc") + 1
    for name in ("mkldnn.enabled", "cudnn.benchmark"):
        get, put, _ = _SWITCHES[name]
        put(get())
    torch.use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled(), warn_only=False)
    torch.set_default_dtype(torch.get_default_dtype())
    torch._C._set_fp32_precision_setter("cuda", "matmul", torch._C._get_fp32_precision_getter("cuda", "matmul"))
    assert not recorder.empty
    assert x.tolist() == [2.0, 2.0]


def test_going_back_and_forth_finds_the_programs_again() -> None:
    def step() -> None:
        x = torch.ones(3, device="ltc") * 2
        with _restored("use_deterministic_algorithms"):
            torch.use_deterministic_algorithms(True)
            x = x + x
        (x - 1).tolist()

    for _ in range(2):
        step()
    size = recorder.tree.size
    for _ in range(5):
        step()
    assert recorder.tree.size == size


def test_the_same_calls_in_another_state_are_another_program() -> None:
    programs: list[int] = []
    stop = torch_ltc.events.subscribe(lambda event: programs.append(event.program), torch_ltc.events.SyncEvent)
    x = torch.ones(3, device="ltc")
    torch_ltc.sync(wait=True)
    programs.clear()
    try:
        for mode in (False, True, False, True):
            with _restored("use_deterministic_algorithms"):
                torch.use_deterministic_algorithms(mode)
                (x * 7).tolist()
    finally:
        stop()
    assert programs[0] == programs[2] != programs[1] == programs[3]


def test_new_memory_is_filled_in_deterministic_mode(backend: str) -> None:
    with _restored("use_deterministic_algorithms"):
        torch.use_deterministic_algorithms(True)
        made = {
            device: [
                torch.empty(4, device=device),
                torch.empty(2, 3, dtype=torch.int16, device=device),
                torch.empty(2, dtype=torch.bool, device=device),
                torch.empty_like(torch.zeros(2, 2, dtype=torch.complex64, device=device)),
                torch.empty_strided((2, 2), (1, 2), device=device),
                torch.zeros(2, device=device).new_empty(3),
            ]
            for device in ("cpu", "ltc")
        }
    for expected, got in zip(made["cpu"], made["ltc"], strict=True):
        torch.testing.assert_close(got.cpu(), expected, equal_nan=True, rtol=0, atol=0)


def test_operators_without_a_deterministic_kernel_raise_at_the_call() -> None:
    x, index, source = torch.zeros(4), torch.tensor([0, 1]), torch.ones(2)
    with _restored("use_deterministic_algorithms"):
        torch.use_deterministic_algorithms(True)
        messages = []
        for tensors in ((x, index, source), tuple(map(lazy, (x, index, source)))):
            with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation") as raised:
                tensors[0].put_(tensors[1], tensors[2])
            messages.append(str(raised.value))
        assert messages[0] == messages[1]
    assert lazy(x).put_(lazy(index), lazy(source)).tolist() == [1.0, 1.0, 0.0, 0.0]


def test_the_kernel_of_attention_is_chosen_at_the_call() -> None:
    query = torch.randn(1, 2, 8, 16)
    results = {}
    for device in ("cpu", "ltc"):
        q = query.to(device)
        with sdpa_kernel(SDPBackend.MATH):
            math = torch.nn.functional.scaled_dot_product_attention(q, q, q)
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            flash = torch.nn.functional.scaled_dot_product_attention(q, q, q)
        results[device] = (math.cpu(), flash.cpu())
    assert torch.equal(results["cpu"][0], results["ltc"][0])
    assert torch.equal(results["cpu"][1], results["ltc"][1])


def test_whether_attention_adds_in_half_precision_counts_at_the_call() -> None:
    query, results = torch.randn(1, 2, 32, 64).bfloat16(), {}
    allow = torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp
    for device in ("cpu", "ltc"):
        q, made = query.to(device), []
        for allowed in (False, True, False):
            allow(allowed)
            with sdpa_kernel(SDPBackend.MATH):
                made.append(torch.nn.functional.scaled_dot_product_attention(q, q, q))
        results[device] = [each.cpu() for each in made]
    assert not torch.equal(results["cpu"][0], results["cpu"][1])
    assert all(torch.equal(*pair) for pair in zip(results["cpu"], results["ltc"], strict=True))


def test_choosing_a_kernel_of_attention_runs_nothing() -> None:
    q = torch.randn(1, 2, 8, 16).to("ltc")
    torch_ltc.sync(wait=True)
    reasons: list[SyncReason] = []
    stop = torch_ltc.events.subscribe(lambda event: reasons.append(event.reason), torch_ltc.events.SyncEvent)
    try:
        for _ in range(3):
            with sdpa_kernel(SDPBackend.MATH):
                q = torch.nn.functional.scaled_dot_product_attention(q, q, q)
        assert reasons == []
    finally:
        stop()
    q.cpu()


def test_grad_mode_inference_mode_and_default_dtype_count_at_the_call() -> None:
    w = torch.ones(2, device="ltc", requires_grad=True)
    with torch.no_grad():
        plain = w * 2
    with torch.inference_mode():
        inferred = w * 3
    kept = w * 4
    half = torch.ones(2, dtype=torch.int32, device="ltc") / 2
    with _restored("set_default_dtype"):
        torch.set_default_dtype(torch.float64)
        assert half.dtype is torch.float32
        assert (torch.ones(2, dtype=torch.int32, device="ltc") / 2).dtype is torch.float64
    assert not plain.requires_grad
    assert inferred.is_inference()
    assert kept.requires_grad
    assert half.tolist() == [0.5, 0.5]


def test_what_only_warns_of_determinism_warns_when_the_kernel_has_run() -> None:
    x, index, source = lazy(torch.zeros(4)), lazy(torch.tensor([0, 1])), lazy(torch.ones(2))
    with _restored("use_deterministic_algorithms"):
        torch.use_deterministic_algorithms(True, warn_only=True)
        with pytest.warns(UserWarning, match="put_ does not have a deterministic implementation"):
            x.put_(index, source)
            torch_ltc.sync(wait=True)
    assert x.tolist() == [1.0, 1.0, 0.0, 0.0]


def test_the_default_device_counts_at_the_call() -> None:
    with torch.device("ltc"):
        inside = torch.ones(2)
    assert (inside.device.type, torch.ones(2).device.type) == ("ltc", "cpu")


def test_anomaly_mode_names_the_forward_call() -> None:
    x = torch.zeros(1, device="ltc", requires_grad=True)
    with (
        pytest.warns(UserWarning, match="Traceback of forward call"),
        pytest.raises(RuntimeError, match="returned nan values"),
        torch.autograd.set_detect_anomaly(True),
    ):
        (torch.sqrt(x) * 0).backward()


def test_a_switch_may_be_changed_while_another_thread_records() -> None:
    stop, errors = threading.Event(), []

    def record() -> None:
        try:
            x = torch.ones(4, device="ltc")
            while not stop.is_set():
                assert (x * 2 + 1).tolist() == [3.0] * 4
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=record)
    thread.start()
    with _restored("mkldnn.deterministic"):
        for step in range(50):
            _SWITCHES["mkldnn.deterministic"][1](bool(step % 2))
    stop.set()
    thread.join()
    assert not errors


def test_code_that_was_compiled_while_a_switch_changed_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    flag, lower = torch.backends.mkldnn.deterministic, jobs.lower

    def changing(*args: Any) -> Any:
        _SWITCHES["mkldnn.deterministic"][1](not flag)
        return lower(*args)

    monkeypatch.setattr(jobs, "lower", changing)
    events: list[torch_ltc.events.StateEvent] = []
    stop = torch_ltc.events.subscribe(events.append, torch_ltc.events.StateEvent)
    try:
        with _restored("mkldnn.deterministic"), settings.scope(backend="torchscript", tiers="background", hot_after=2):
            x = torch.ones(5, device="ltc")
            for _ in range(3):
                assert (x * 3 - x).tolist() == [2.0] * 5
            jobs.wait_for_jobs()
    finally:
        stop()
    assert "global switches of PyTorch were changed while it was compiled" in [event.reason for event in events]
    assert "compiled" not in [event.state for event in events]
