"""Registers the device with PyTorch: its name, hooks and guard; and runs operators by a dispatch key of choice.

Without the extension the device's guard is Python. Autograd's engine holds one while it calls a tensor's hooks. When a
hook raises, the guard ends with the Python error still set, and asks for the type of the device: a call with an error
set ends the process. So in a backward pass the call takes the error away first, and it is raised again where the engine
returns.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
import threading
from types import ModuleType
from typing import Any

import torch

from torch_ltc.config import settings
from torch_ltc.errors import LtcError, OtherAcceleratorError
from torch_ltc.native.library import extension
from torch_ltc.pytorch.patches import replaces
from torch_ltc.pytorch.private import (
    DEVICE_TYPE,
    META,
    DeviceGuard,
    DeviceHooks,
    DispatchKey,
    DispatchKeySet,
    device_slot_name,
    register_device_guard,
    register_device_hooks,
    register_device_module,
    use_backward_threads,
    uses_backward_threads,
)
from torch_ltc.record.buffer import physical_device
from torch_ltc.record.call_site import current_source, pass_on_another_thread
from torch_ltc.signals import signals_deferred

NAME = "ltc"
_as_strided = torch.ops.aten.as_strided.default
_taken: list[BaseException] = []
# Of all functions of Python's C interface the cheapest: ctypes raises whatever error is set when one returns.
_raise_pending: Any = ctypes.pythonapi.PyErr_Occurred
_raise_pending.restype = ctypes.c_void_p
_raise_pending.argtypes = ()


def _take_pending_error() -> None:
    """Keep the error that is set, if there is one, for the end of the backward pass."""
    try:
        _raise_pending()
    except BaseException as error:
        _taken.append(error)


def _is_other_accelerator(error: RuntimeError) -> bool:
    """True for the engine's failure on tensors of an accelerator that it does not look for: it finds no stream."""
    text = str(error)
    return "INTERNAL ASSERT FAILED" in text and "csrc/autograd" in text and "_stream" in text


@replaces("torch.autograd._engine_run_backward")
@replaces("torch.autograd.graph._engine_run_backward")
def _raising_taken_errors(run: Any) -> Any:
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        # On the calling thread, as on the CPU: handing each pass to a thread of the device and back takes as long as
        # ten calls. Not with a guard in Python: what a signal's handler raises there ends the process, since
        # destructors of the engine ask the guard, too.
        threads = uses_backward_threads()
        use_backward_threads(threads and extension is None)
        try:
            if extension is not None:
                return run(*args, **kwargs)
            with _GuardBehindHooks(), pass_on_another_thread():
                return run(*args, **kwargs)
        except SystemError:
            # The engine returned without a result and without an error.
            if not _taken:
                raise
            error = _taken.pop()
            _taken.clear()
        except RuntimeError as failure:
            if "device_ready_queues_.size()" in str(failure):
                raise LtcError(
                    "a backward pass has run in this process before `import torch_ltc`: PyTorch's autograd engine has "
                    "counted the devices then, and does not know this one",
                    source=str(current_source()),
                    hint="import torch_ltc before the first backward pass, or build the extension (`ltc build`), "
                    "which has the engine count again",
                ) from failure
            if not _is_other_accelerator(failure):
                raise
            raise OtherAcceleratorError(
                "backward() met tensors of another accelerator than ltc. PyTorch's autograd engine takes the owner of "
                "the PrivateUse1 slot for the only accelerator of the process: since `import torch_ltc` it fails on "
                "tensors of a GPU (https://github.com/pytorch/pytorch/issues/161129)",
                source=str(current_source()),
                hint="train on the GPU through ltc (LTC_TS_CUDA=1, .to('ltc')), or in a process that does not import "
                "torch_ltc",
            ) from failure
        finally:
            use_backward_threads(threads)
        raise error

    return run_backward


class _Hooks(DeviceHooks):
    def is_available(self) -> bool:
        return True

    def has_primary_context(self, index: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True


# In C: C++ asks in destructors too, where an exception ends the process, and between two instructions of Python a
# signal's handler may raise.
_type_in_c: Any = itertools.repeat(DEVICE_TYPE).__next__


class _Guard(DeviceGuard):
    type_ = _type_in_c


def _type_behind_hooks(guard: _Guard) -> Any:
    _take_pending_error()
    return DEVICE_TYPE


class _GuardBehindHooks:
    """A block in which hooks of tensors may raise; signals wait meanwhile."""

    _lock = threading.Lock()
    blocks = 0

    def __enter__(self) -> None:
        self._deferred = signals_deferred()
        self._deferred.__enter__()
        self._count(1)

    @classmethod
    def _count(cls, more: int) -> None:
        with cls._lock:
            cls.blocks += more
            _Guard.type_ = _type_behind_hooks if cls.blocks else _type_in_c

    def __exit__(self, *error: Any) -> None:
        self._count(-1)
        self._deferred.__exit__(*error)


def register_name(module: ModuleType) -> None:
    """Claim the device name and publish `module` as `torch.ltc`."""
    current = device_slot_name()
    if current not in (NAME, "privateuseone"):
        raise LtcError(
            f"the device slot that torch_ltc uses is taken by {current!r}",
            hint=f"use torch_ltc in a process that does not import the package behind {current!r}",
        )
    autoload = sys.modules.get("torch_ltc_autoload")
    if autoload is not None:
        autoload.release()
    if current != NAME:
        torch.utils.rename_privateuse1_backend(NAME)
    # The module itself replaces the proxy that autoload put there.
    if getattr(torch, NAME, module) is not module:
        delattr(torch, NAME)
    if not hasattr(torch, NAME):
        register_device_module(NAME, module)
    if not hasattr(torch.Tensor, NAME):
        torch.utils.generate_methods_for_privateuse1_backend()


def register_device() -> None:
    """Give PyTorch the device's hooks and guard, and, from the extension, its allocator and generators."""
    if extension is not None:
        _register_native(extension)
        return
    if not register_device_hooks(_Hooks()):
        raise _OTHER_HOOKS
    register_device_guard(_Guard())


_OTHER_HOOKS = LtcError("another package has registered hooks for the PrivateUse1 device", hint="do not import both")


def _register_native(native: Any) -> None:
    def physical_changed() -> None:
        native.set_physical_device(str(physical_device()))

    try:
        native.register_hooks()
    except RuntimeError as error:
        raise _OTHER_HOOKS from error
    native.register_guard()
    native.count_devices()
    native.register_allocator()
    physical_changed()
    settings.watch("device_type", physical_changed)
    settings.watch("device_ordinal", physical_changed)


def alias(tensor: torch.Tensor, size: Any, stride: Any, offset: Any) -> torch.Tensor:
    """A device tensor of this shape on the storage of `tensor`; bounds are not checked."""
    result: torch.Tensor = _as_strided.redispatch(META, tensor, size, stride, offset)
    return result


def alias_by(op: Any, *args: Any) -> torch.Tensor:
    """The result of a view operator's meta kernel on device tensors: an alias with the operator's own strides."""
    result: torch.Tensor = op.redispatch(META, *args)
    return result


_WITH_DERIVATIVE = DispatchKeySet(DispatchKey.AutogradNestedTensor) | DispatchKeySet(DispatchKey.PrivateUse1)


def with_derivative(op: Any, *args: Any) -> Any:
    """Run a composite operator with the derivative that PyTorch's autograd has for it as a whole, which it uses for
    nested tensors; below autograd, the device's kernel runs."""
    return op._handle.redispatch_boxed(_WITH_DERIVATIVE, *args)


def composed_explicitly(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator with PyTorch's kernel for all devices, below autograd."""
    return op._op_dk(DispatchKey.CompositeExplicitAutograd, *args, **kwargs)


def composed(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a composite operator decomposed, as PyTorch does, derivatives included."""
    return op._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def composite(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the operator's CompositeExplicit form, as if the device had no kernel of its own."""
    return op._op_dk(DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
