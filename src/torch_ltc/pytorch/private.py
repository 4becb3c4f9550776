"""Private interfaces of PyTorch under names of our own: the only way to them outside backends.

Plain bindings of PyTorch's own objects, with nothing between: recording calls some of them for every operation. What
each is needed for stands in the table. Modules that `import torch` does not load are in files of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
import torch._tensor_str
import torch._utils
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._decomp.decompositions import pw_cast_for_opmath
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad, profiler
from torch.testing._comparison import default_tolerances
from torch.utils import _pytree as pytree
from torch.utils._device import _device_constructors as device_constructors
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "FakeTensorMode", "OpOverload", "TorchDispatchMode", "core_aten_decompositions",
    "default_tolerances", "device_constructors", "enable_python_dispatcher", "forward_ad", "get_decompositions",
    "profiler", "pw_cast_for_opmath", "pytree",
]  # fmt: skip

# ---- the device ---------------------------------------------------------------------------------------------------

create_empty_tensor: Callable[[Any, torch.dtype], torch.Tensor] = torch._C._acc.create_empty_tensor
# Reading the data pointer of a device tensor raises instead of giving null.
refuse_data_pointer: Callable[[torch.Tensor], None] = torch._C._set_throw_on_mutable_data_ptr
DeviceHooks = torch._C._acc.PrivateUse1Hooks
DeviceGuard = torch._C._acc.DeviceGuard
register_device_hooks: Callable[[Any], bool] = torch._C._acc.register_python_privateuseone_hook
register_device_guard: Callable[[Any], bool] = torch._C._acc.register_python_privateuseone_device_guard
register_device_module: Callable[[str, Any], None] = torch._register_device_module
device_slot_name: Callable[[], str] = torch._C._get_privateuse1_backend_name
DEVICE_TYPE = torch._C._autograd.DeviceType.PrivateUse1
PhysicalGenerator = torch._C.Generator

# ---- the dispatcher -----------------------------------------------------------------------------------------------

DispatchKey = torch._C.DispatchKey
DispatchKeySet = torch._C.DispatchKeySet
META = DispatchKeySet(DispatchKey.Meta)
AUTOCAST = DispatchKeySet(DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]
AUTOCAST_CUDA = DispatchKeySet(DispatchKey.AutocastCUDA)
PLAIN = DispatchKeySet(DispatchKey.CPU)
NESTED = DispatchKeySet(DispatchKey.NestedTensorCPU)
COMPRESSED = DispatchKeySet(DispatchKey.SparseCsrCPU)
SPARSE_KEY = DispatchKey.SparseCPU
COORDINATES = DispatchKeySet(SPARSE_KEY)
VIEW_TRACKING = DispatchKeySet(DispatchKey.ADInplaceOrView)
# After `use_meta(True)` on a thread, operators on device tensors run their meta kernels there: views become aliases
# that nobody records. Call it in a `try` whose `finally` calls `include_key(META_KEY, False)`, which takes out what
# came with it, and then `use_meta(False)`, which takes out the backend: in this order the thread's keys are as before.
META_KEY = DispatchKey.Meta
use_meta: Callable[[bool], None] = torch._C._set_meta_in_tls_dispatch_include
include_key: Callable[[Any, bool], None] = torch._C._dispatch_tls_set_dispatch_key_included
# How many of the user's modes would see a call.
function_modes: Callable[[], int] = torch._C._len_torch_function_stack
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
# True inside of `torch.func` transforms.
function_transforms: Callable[[], bool] = torch._C._are_functorch_transforms_active
# A context in which none of them sees a call.
no_function_transforms: Callable[[], Any] = torch._C._DisableFuncTorch
# A context in which no function mode sees a call.
no_torch_function: Callable[[], Any] = torch._C.DisableTorchFunction
# Calls a function for C++, which hands what is warned of meanwhile to Python when it returns. Meanwhile classes of
# tensors see no calls.
forward_call: Callable[..., Any] = torch._C._disabled_torch_function_impl
# Whether classes of tensors and function modes see calls.
function_state: Callable[[], Any] = torch._C._get_torch_function_state  # type: ignore[attr-defined]
set_function_state: Callable[[Any], None] = torch._C._set_torch_function_state  # type: ignore[attr-defined]
below_autograd: Callable[[], Any] = torch._C._AutoDispatchBelowAutograd
# A context without certain keys.
without_keys: Callable[[Any], Any] = torch._C._ExcludeDispatchKeyGuard
all_schemas: Callable[[], list[Any]] = torch._C._jit_get_all_schemas
has_kernel: Callable[[str], bool] = torch._C._dispatch_has_kernel
has_kernel_for: Callable[[str, Any], bool] = torch._C._dispatch_has_kernel_for_dispatch_key
operators_with_kernel: Callable[[str], list[str]] = torch._C._dispatch_get_registrations_for_dispatch_key
SchemaArgument = torch._C.Argument

# ---- tensors ------------------------------------------------------------------------------------------------------

TensorBase = torch._C.TensorBase
as_strided: Callable[..., torch.Tensor] = TensorBase.as_strided
reduce_tensor: Callable[[torch.Tensor], Any] = torch.multiprocessing.reductions.reduce_tensor
untyped_storage: Callable[[torch.Tensor], torch.UntypedStorage] = TensorBase.untyped_storage


def data_pointer(tensor: torch.Tensor) -> int:
    """The address of a tensor; that of its memory where it has no elements, for which PyTorch says 0."""
    return tensor.data_ptr() or untyped_storage(tensor).data_ptr()


is_alias_of: Callable[[torch.Tensor, torch.Tensor], bool] = torch._C._is_alias_of  # type: ignore[attr-defined]
# How many tensors and Python objects hold a storage, by its `_cdata`.
storage_use_count: Callable[[int], int] = torch._C._storage_Use_Count
_data: Any = TensorBase.data
_gradient: Any = TensorBase.grad
get_gradient: Callable[[torch.Tensor], torch.Tensor | None] = _gradient.__get__
set_data: Callable[[torch.Tensor, torch.Tensor], None] = _data.__set__
conj_view: Callable[[torch.Tensor], torch.Tensor] = torch._conj
neg_view: Callable[[torch.Tensor], torch.Tensor] = torch._neg_view
to_functional: Callable[[Any], Any] = torch._to_functional_tensor
from_functional: Callable[[Any], Any] = torch._from_functional_tensor
sync_functional: Callable[[Any], Any] = torch._sync
enable_functionalization: Callable[..., None] = torch._enable_functionalization
disable_functionalization: Callable[[], None] = torch._disable_functionalization
add_to_each: Callable[[list[torch.Tensor], float], None] = torch._foreach_add_
attention_choice: Callable[..., int] = torch._fused_sdp_choice

# ---- autograd, modules, the profiler ------------------------------------------------------------------------------

# The pass and the node that this thread runs, and the number that its next node gets.
backward_pass: Callable[[], int] = torch._C._current_graph_task_id
backward_node: Callable[[], Any] = torch._C._current_autograd_node
next_node_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
# Whether backward passes that begin on this thread use a thread for each device.
uses_backward_threads: Callable[[], bool] = torch._C._is_multithreading_enabled
use_backward_threads: Callable[[bool], None] = torch._C._set_multithreading_enabled
# The function that every call of a module goes through.
MODULE_CALL: CodeType = torch.nn.Module._wrapped_call_impl.__code__
RecordFunction = torch._C._profiler._RecordFunctionFast
ProfilerConfig = torch._C._profiler._ExperimentalConfig
# PyTorch's own functions, which the package replaces for everyone else.
set_threads: Callable[[int], None] = torch.set_num_threads
# Without the object that `torch.set_grad_enabled` makes.
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
set_flush_denormal: Callable[[bool], bool] = torch.set_flush_denormal
mkldnn_enabled: Callable[[], bool] = torch._C._get_mkldnn_enabled
sdp_priority_order: Callable[[], list[int]] = torch._C._get_sdp_priority_order
overrideable_sdp_enabled: Callable[[], bool] = torch._C._get_overrideable_sdp_enabled

# What `torch.compile` guards with: a number that changes whenever a dict is written to, and the check that tensors
# are as they were.
dict_version: Callable[[dict[Any, Any]], int] = torch._C._dynamo.guards.dict_version
TensorGuards: Any = torch._C._dynamo.guards.TensorGuards


def has_clean_state() -> bool:
    """True when nothing on this thread changes what a kernel does: no mode, autocast, function transform, nor the
    inside of a function of a tensor class, where kernels in Python would not see those classes."""
    return not (
        torch._C._len_torch_function_stack()
        or not torch._C._is_torch_function_enabled()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._is_any_autocast_enabled()
        or torch.is_inference_mode_enabled()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def symbolic_function(name: str) -> Any:
    """The function of `math` of this name for symbolic numbers."""
    return getattr(torch, f"_sym_{name}")


# A name, not an import: it loads for seconds, and worker processes are to load it and nothing of this package.
OPERATOR_DATABASE = "torch.testing._internal.common_methods_invocations"


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """True if somebody wants to know of each step of this optimizer."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def is_view(tensor: torch.Tensor) -> bool:
    """True if autograd takes the tensor for a view of another."""
    return tensor._is_view()
