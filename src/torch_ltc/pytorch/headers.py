"""Headers of PyTorch that the extension in C++ includes, with the names that it uses of each.

PyTorch promises no more for these than for its private Python interfaces: each has an entry in the table, too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from torch_ltc.pytorch.entries import Entry, Risk, table

__all__ = ["INCLUDE", "Header"]

INCLUDE = Path(torch.__file__).parent / "include"


@dataclass(frozen=True, slots=True)
class Header(Entry):
    """A header that the extension includes; `path` is what it is included by, `names` what it uses of it."""

    names: tuple[str, ...] = ()

    def probe(self, load: bool = True) -> str | None:
        """The names that the header does not have, with what breaks, or None."""
        if not self.is_expected() or not INCLUDE.is_dir():
            return None
        file = INCLUDE / self.path
        text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
        missing = [name for name in self.names if not re.search(rf"\b{name}\b", text)]
        return f"{self.path} lacks {', '.join(missing)}; without it: {self.without}" if missing or not text else None


_EXPERIMENTAL, _BINDING, _STABLE = Risk.EXPERIMENTAL, Risk.BINDING, Risk.STABLE
# fmt: off
table.add(
    Header("c10/core/Device.h", "the device, in C++", "the extension", _STABLE, names=("Device", "DeviceIndex")),
    Header("c10/core/DeviceCapability.h", "what the device can do", "the guard", names=("DeviceCapability",)),
    Header("c10/core/impl/DeviceGuardImplInterface.h", "the device guard", "the guard", _STABLE,
           names=("DeviceGuardImplInterface", "DeviceGuardImplRegistrar")),
    Header("torch/csrc/autograd/engine.h", "threads of the engine", "backward passes before the import",
           names=("get_default_engine", "thread_pool_shared_", "device_ready_queues_", "start_device_threads")),
    Header("ATen/detail/PrivateUse1HooksInterface.h", "the device's hooks", "generators, pinned memory", _EXPERIMENTAL,
           names=("PrivateUse1HooksInterface", "RegisterPrivateUse1HooksInterface")),
    Header("ATen/Context.h", "hooks of the physical device", "generators on CUDA",
           names=("globalContext", "getAcceleratorHooksInterface", "userEnabledFlashSDP", "sDPPriorityOrder",
                  "deterministicFillUninitializedMemory")),
    Header("c10/core/GeneratorImpl.h", "base of the device's generators", "generators", _STABLE,
           names=("GeneratorImpl", "clone_impl", "get_state", "set_state", "set_current_seed")),
    Header("ATen/core/Generator.h", "generators", "generators", _STABLE, names=("Generator", "make_generator")),
    Header("ATen/CPUGeneratorImpl.h", "makes generators of the CPU", "generators", names=("createCPUGenerator",)),
    Header("torch/csrc/Generator.h", "generators in Python", "generators", _BINDING,
           names=("THPGenerator_Wrap", "THPGenerator_Unwrap")),
    Header("c10/core/Allocator.h", "the device's allocator", "storages", _STABLE,
           names=("Allocator", "DataPtr", "SetAllocator", "raw_deleter", "copy_data")),
    Header("c10/core/CPUAllocator.h", "memory of the host that counts as pinned", "unused parameters in DDP", _STABLE,
           names=("GetCPUAllocator",)),
    Header("c10/core/Storage.h", "storages", "storages", _STABLE, names=("Storage", "use_byte_size_t")),
    Header("torch/csrc/Storage.h", "storages in Python", "storages", _BINDING, names=("THPStorage_Unpack",)),
    Header("ATen/core/Tensor.h", "tensors", "results of calls", _STABLE),
    Header("torch/csrc/Dtype.h", "dtypes in Python", "results of calls", _BINDING,
           names=("THPDtype", "THPDtype_Check", "scalar_type")),
    Header("torch/csrc/autograd/python_variable.h", "tensors in Python", "results of calls", _BINDING,
           names=("THPVariable_Wrap", "THPVariable_Unpack")),
    Header("c10/core/StorageImpl.h", "storages that hold buffers", "the hit path", names=(
           "StorageImpl", "_mutable_data_ptr_no_checks")),
    Header("c10/core/TensorImpl.h", "results and views", "the hit path", names=(
           "TensorImpl", "VIEW", "set_sizes_contiguous", "set_sizes_and_strides", "is_wrapped_number", "bump_version",
           "unsafe_storage")),
    Header("ATen/EmptyTensor.h", "the bytes that a geometry needs", "eager regions", names=("computeStorageNbytes",)),
    Header("c10/core/impl/TorchDispatchModeTLS.h", "modes of the user's", "the hit path", names=("any_modes_set",)),
    Header("c10/util/SmallVector.h", "vectors without allocation", "the hit path", _STABLE, names=("SmallVector",)),
    Header("c10/util/intrusive_ptr.h", "counted references", "the hit path", _STABLE,
           names=("intrusive_ptr_target", "reclaim", "reclaim_copy", "make_intrusive")),
    Header("ATen/core/ivalue.h", "the dispatcher's values", "the hit path", _STABLE, names=("IValue",)),
    Header("ATen/core/jit_type.h", "types of a schema", "the hit path", names=("PyObjectType",)),
    Header("ATen/core/stack.h", "the arguments of a boxed call", "the hit path", names=("Stack", "drop")),
    Header("ATen/core/dispatch/Dispatcher.h", "operators by name", "the hit path",
           names=("findSchemaOrThrow", "redispatchBoxed", "callBoxed")),
    Header("ATen/core/grad_mode.h", "whether gradients are wanted", "the hit path", _STABLE),
    Header("ATen/ops/mm.h", "products of matrices", "the hit path", _STABLE),
    Header("ATen/ops/linear_native.h", "linear as PyTorch composes it", "eager regions", _STABLE),
    Header("ATen/ops/matmul_native.h", "matmul as PyTorch composes it", "eager regions", _STABLE),
    Header("ATen/ops/empty_like.h", "noise of dropout", "the hit path", _STABLE),
    Header("ATen/ops/zeros_like.h", "masks of attention", "the hit path", _STABLE),
    Header("c10/core/MemoryFormat.h", "strides of images", "the hit path", _STABLE,
           names=("get_channels_last_strides_2d",)),
    Header("torch/library.h", "kernels", "the hit path", _STABLE, names=("makeFromBoxedFunctor", "IMPL")),
    Header("ATen/core/boxing/impl/boxing.h", "arguments for the kernel in Python", "the hit path", names=("boxArgs",)),
    Header("ATen/core/op_registration/infer_schema.h", "which signature an overload has", "the hit path",
           names=("findSchemaDifferences",)),
    Header("c10/util/UniqueVoidPtr.h", "the end of a storage", "the hit path", names=("DeleterFnPtr", "deleteNothing")),
    Header("torch/csrc/jit/python/pybind_utils.h", "Python values as the dispatcher's", "the hit path", _BINDING,
           names=("toIValue", "toPyObject", "ToIValueAllowNumbersAsTensors")),
    Header("torch/csrc/Exceptions.h", "errors of kernels in Python", "calls in C++", _BINDING,
           names=("translate_exception_to_python", "processErrorMsg")),
    Header("c10/util/Exception.h", "warnings of kernels", "calls in C++",
           names=("Warning", "WarningHandler", "WarningHandlerGuard")),
    Header("torch/csrc/utils/pybind.h", "tensors as arguments", "the hit path", _BINDING),
    Header("c10/core/GradMode.h", "whether gradients are wanted", "replays", _STABLE,
           names=("GradMode", "AutoGradMode")),
    Header("c10/core/InferenceMode.h", "whether it is inference", "replays", _STABLE, names=("InferenceMode",)),
    Header("ATen/autocast_mode.h", "the state of autocast", "replays",
           names=("is_autocast_enabled", "get_autocast_dtype", "_AUTOCAST_SUPPORTED_DEVICES")),
    Header("ATen/PythonTorchFunctionTLS.h", "function modes of the user's", "replays",
           names=("PythonTorchFunctionTLS", "stack_len", "get_disabled_state")),
    Header("c10/core/impl/LocalDispatchKeySet.h", "function transforms", "replays",
           names=("tls_is_dispatch_key_included",)),
    Header("ATen/core/LegacyTypeDispatch.h", "kernels below autograd", "replays", names=("AutoDispatchBelowAutograd",)),
)
# fmt: on
