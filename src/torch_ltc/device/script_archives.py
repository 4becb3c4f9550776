"""TorchScript archives with tensors of the device.

PyTorch's C++ serializer asks a storage for its size and copies that many bytes to the CPU. A lazy storage has no
memory, and its size in C++ is nothing: archives would have no weights. Only while it serializes does it show which
storages it takes (graphs hold tensors too): so those get their sizes then, and what was written before is written
again. When an archive is loaded, PyTorch compares the sizes of tensors with those of the storages that it has moved to
the device.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_ltc.device.tensors import storage_buffer
from torch_ltc.pytorch.patches import replaces
from torch_ltc.pytorch.private import TorchDispatchMode

aten = torch.ops.aten


def _set_size(storage: Any) -> None:
    """Let the storage say in C++ how many bytes its buffer has; the meta kernel behind `set_` does it."""
    torch.empty(0, dtype=torch.uint8, device="ltc").set_(storage)


class _StorageSizes(TorchDispatchMode):
    """Gives storages of the device their size in C++ when they are serialized or loaded; `changed` when one that is
    serialized did not have it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.changed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.set_.source_Storage_storage_offset:
            target, storage, _, size = args[:4]
            buffer = storage_buffer(storage)
            if buffer is not None and size[0] != buffer.size_bytes // target.element_size():
                _set_size(storage)
                self.changed = True
        result = func(*args, **(kwargs or {}))
        if func is aten._to_copy.default and result.device.type == "ltc":
            _set_size(result.untyped_storage())
        return result


def _complete(save: Any) -> Any:
    def save_completely(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _StorageSizes() as sizes:
            saved = save(self, *args, **kwargs)
        return save(self, *args, **kwargs) if sizes.changed else saved

    return save_completely


for _path in ("torch._C.ScriptModule.save", "torch._C.ScriptModule.save_to_buffer",
              "torch._C.ScriptModule._save_for_mobile", "torch._C.ScriptModule._save_to_buffer_for_mobile",
              "torch._C.ScriptFunction.save", "torch._C.ScriptFunction.save_to_buffer",
              "torch._C._save_jit_module", "torch._C._save_jit_module_to_bytes"):  # fmt: skip
    replaces(_path)(_complete)


@replaces("torch._C.ScriptModuleSerializer.serialize")
def _into_package(serialize: Any) -> Any:
    # A package cannot be written twice: the module is serialized for the sizes alone first.
    def serialize_completely(self: Any, module: Any, script_id: int) -> Any:
        with _StorageSizes():
            module.save_to_buffer()
        return serialize(self, module, script_id)

    return serialize_completely


def _with_sizes(load: Any) -> Any:
    def load_with_sizes(*args: Any, **kwargs: Any) -> Any:
        with _StorageSizes():
            return load(*args, **kwargs)

    return load_with_sizes


for _path in ("import_ir_module", "import_ir_module_from_buffer", "_import_ir_module_from_package"):
    replaces(f"torch._C.{_path}")(_with_sizes)
