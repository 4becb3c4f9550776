"""Private interfaces of PyTorch that this backend uses or replaces, and why."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch._dynamo.convert_frame import compile_lock
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor import lowering as inductor_lowering
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CppPythonBindingsCodeCache, PyCodeCache
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.kernel.flex.flex_cpu import check_cpu_supported
from torch._inductor.loop_body import InterpreterShim
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.utils import align_inputs_from_check_idxs
from torch.utils._ordered_set import OrderedSet

from torch_ltc.pytorch.entries import Interface, Patch, takes
from torch_ltc.pytorch.table import table

__all__ = [
    "AsyncCompile", "CompiledFxGraph", "CppPythonBindingsCodeCache", "InterpreterShim", "OrderedSet", "PyCodeCache",
    "align_inputs_from_check_idxs", "cache_dir", "compile_fx", "compile_fx_inner", "compile_lock", "functorch_config",
    "inductor_config", "inductor_lowering", "select_decomp_table",
]  # fmt: skip

# Whether there is a kernel for `flex_attention` on this processor.
has_cpu_template: Callable[[], bool] = check_cpu_supported
# The address of the function by which a kernel gets at the data of a tensor.
data_pointer_function: int = torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]

_ALL, _DISK = "the inductor backend", "the disk cache of Inductor's programs"
_STATE = "while this backend compiles it leaves the CPU's generator alone, which the user's thread draws from"
# fmt: off
table.add(
    Interface("torch._dynamo.convert_frame.compile_lock", "keeps apart from a `torch.compile` on another thread",
              "compiling beside `torch.compile`", check=lambda lock: lock.acquire and lock.release),
    Interface("torch._functorch.config", "turns off a cache that hides the code", _DISK,
              check=lambda config: config.patch and hasattr(config, "enable_autograd_cache")),
    Interface("torch._inductor.config", "options of a compilation", _ALL,
              check=lambda config: all(hasattr(config, n) for n in (
        "keep_output_stride", "emulate_precision_casts", "size_asserts", "fallback_random", "save_config_portable"))),
    Interface("torch._inductor.lowering", "asks which operators Inductor leaves to kernels",
              "checks of data in kernels",
              check=lambda lowering: lowering.lowerings and lowering.fallbacks is not None),
    Interface("torch._inductor.async_compile.AsyncCompile", "loads kernels of other devices", _DISK,
              check=inspect.isclass),
    Interface("torch._inductor.codecache.CppPythonBindingsCodeCache", "finds the C++ kernels of a graph", _DISK,
              check=lambda cache: cache.entry_function),
    Interface("torch._inductor.codecache.PyCodeCache", "finds the module of a graph", _DISK,
              check=lambda cache: isinstance(cache.modules, list)),
    Interface("torch._inductor.compile_fx.compile_fx", "compiles a graph", _ALL,
              check=takes("model_", "example_inputs_")),
    Interface("torch._inductor.compile_fx.compile_fx_inner", "compiles a graph; its result holds the code", _ALL),
    Interface("torch._inductor.decomposition.select_decomp_table", "asks what Inductor decomposes",
              "checks of data in kernels"),
    Interface("torch._inductor.kernel.flex.flex_cpu.check_cpu_supported", "asks for a kernel", "`flex_attention`"),
    Interface("torch._inductor.loop_body.InterpreterShim._dummy_gm", "makes it while nothing else is traced",
              "modules called on other threads"),
    Interface("torch._inductor.output_code.CompiledFxGraph", "the compiled code", _DISK, check=lambda kind: {
        "source_code", "cache_key", "constants", "mutated_input_idxs", "inputs_to_check", "current_callable"}
        <= set(kind.__annotations__)),
    Interface("torch._inductor.runtime.cache_dir_utils.cache_dir", "a folder that libraries load from", _DISK),
    Interface("torch._inductor.utils.align_inputs_from_check_idxs", "aligns inputs of loaded code", _DISK,
              check=takes("model", "inputs_to_check", "mutated_input_idxs")),
    Interface("torch.utils._ordered_set.OrderedSet", "an argument of the same", _DISK, check=inspect.isclass),
    Interface("torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr", "kernels ask for it when loaded",
              _DISK,
              check=lambda address: isinstance(address, int)),
    Patch("torch._dynamo.utils.preserve_rng_state", _STATE, "random numbers that repeat"),
    Patch("torch._functorch.aot_autograd.preserve_rng_state", _STATE, "random numbers that repeat"),
)
# fmt: on
