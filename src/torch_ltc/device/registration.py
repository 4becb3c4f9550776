"""The only module that touches PyTorch's private device interfaces.

It registers the name "ltc" on the PrivateUse1 device, makes device tensors, and holds the dispatcher handles. A
PyTorch whose interfaces are not the ones used here is refused with a clear error; one newer than those that the tests
have run on is tried, with a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from torch_ltc.device.backward_errors import take_pending_error
from torch_ltc.errors import LtcError, UnsupportedTorchError, UntestedTorchWarning

NAME = "ltc"
_OLDEST, _NEWEST = (2, 11), (2, 15)


def check_torch_version(version: str = torch.__version__) -> None:
    """Raise when this PyTorch is too old, or lacks what the device is built on; warn when it is newer than the tested
    ones."""
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    tested = f"torch>={_OLDEST[0]}.{_OLDEST[1]},<{_NEWEST[0]}.{_NEWEST[1] + 1}"
    if numbers < _OLDEST or not hasattr(torch._C, "_acc"):
        raise UnsupportedTorchError(
            f"torch_ltc needs PyTorch {_OLDEST[0]}.{_OLDEST[1]} or newer, found {version}",
            hint=f"pip install '{tested}'",
        )
    if numbers > _NEWEST:
        warnings.warn(
            f"torch_ltc was tested with PyTorch {_OLDEST[0]}.{_OLDEST[1]} to {_NEWEST[0]}.{_NEWEST[1]}, found {version}"
            f"\n  try: pip install '{tested}' if something fails",
            UntestedTorchWarning,
            stacklevel=2,
        )


check_torch_version()

create_empty_tensor: Callable[[Any, torch.dtype], torch.Tensor] = torch._C._acc.create_empty_tensor
# Reading the data pointer of a device tensor raises instead of giving null.
refuse_data_pointer: Callable[[torch.Tensor], None] = torch._C._set_throw_on_mutable_data_ptr
META = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)
# After `use_meta(True)` on a thread, operators on device tensors run their meta kernels there: views become aliases
# that nobody records. Call it in a `try` whose `finally` calls `include_key(META_KEY, False)`, which takes out what
# came with it, and then `use_meta(False)`, which takes out the backend: in this order the thread's keys are as before.
META_KEY = torch._C.DispatchKey.Meta
use_meta: Callable[[bool], None] = torch._C._set_meta_in_tls_dispatch_include
include_key: Callable[[Any, bool], None] = torch._C._dispatch_tls_set_dispatch_key_included
as_strided: Callable[..., torch.Tensor] = torch._C.TensorBase.as_strided
# How many of the user's function modes would see a call made through a Python binding.
function_modes: Callable[[], int] = torch._C._len_torch_function_stack
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_as_strided = torch.ops.aten.as_strided.default
_PRIVATE_USE_1 = torch._C._autograd.DeviceType.PrivateUse1
_data: Any = torch._C.TensorBase.data
set_data: Callable[[torch.Tensor, torch.Tensor], None] = _data.__set__


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return True

    def has_primary_context(self, index: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True


class _Guard(torch._C._acc.DeviceGuard):
    def type_(self) -> Any:
        take_pending_error()
        return _PRIVATE_USE_1


def register_name(module: ModuleType) -> None:
    """Claim the device name and publish `module` as `torch.ltc`."""
    current = torch._C._get_privateuse1_backend_name()
    if current not in (NAME, "privateuseone"):
        raise LtcError(
            f"the device slot that torch_ltc uses is taken by {current!r}",
            hint=f"use torch_ltc in a process that does not import the package behind {current!r}",
        )
    if current != NAME:
        torch.utils.rename_privateuse1_backend(NAME)
    # A proxy that autoload put there gives way to the module itself.
    if getattr(torch, NAME, module) is not module:
        delattr(torch, NAME)
    if not hasattr(torch, NAME):
        torch._register_device_module(NAME, module)
    if not hasattr(torch.Tensor, NAME):
        torch.utils.generate_methods_for_privateuse1_backend()


def register_device() -> None:
    """Give PyTorch the device's hooks and guard."""
    if not torch._C._acc.register_python_privateuseone_hook(_Hooks()):
        raise LtcError("another package has registered hooks for the PrivateUse1 device", hint="do not import both")
    torch._C._acc.register_python_privateuseone_device_guard(_Guard())


def alias(tensor: torch.Tensor, size: Any, stride: Any, offset: Any) -> torch.Tensor:
    """A device tensor of this geometry on the storage of `tensor`; bounds are not checked."""
    result: torch.Tensor = _as_strided.redispatch(META, tensor, size, stride, offset)
    return result


def alias_by(op: Any, *args: Any) -> torch.Tensor:
    """The result of a view operator's meta kernel on device tensors: an alias with the operator's own geometry."""
    result: torch.Tensor = op.redispatch(META, *args)
    return result


_WITH_DERIVATIVE = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradNestedTensor) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.PrivateUse1
)


def with_derivative(op: Any, *args: Any) -> Any:
    """Run an operator that PyTorch composes, with the derivative that its autograd has for it as a whole, which it
    uses for nested tensors; below autograd, the device's kernel runs."""
    return op._handle.redispatch_boxed(_WITH_DERIVATIVE, *args)


def composed(op: Any, *args: Any) -> Any:
    """Run an operator as PyTorch composes it of others, derivatives included."""
    return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args)


def composite(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the operator's CompositeExplicit form, as if the device had no kernel of its own."""
    return op._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
