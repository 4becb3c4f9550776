"""The fast path of `nn.TransformerEncoder` with a padding mask, which computes in nested tensors.

Calls on nested tensors are not recorded. What the encoder takes for a nested tensor here is the padded one, which
remembers which positions are valid; a layer on it is one recorded call, that packs, runs PyTorch's layer on the nested
tensor, and pads again: the values are eager's. What another operator makes of such a tensor does not remember, and
cannot be padded back.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_ltc.device.kernels import Kernel, make_kernel
from torch_ltc.device.other_layouts import run_on_physical_device
from torch_ltc.errors import UnsupportedLayoutError
from torch_ltc.lowering.own_operators import define
from torch_ltc.record.call_site import current_source

aten = torch.ops.aten
# The attribute of a tensor that stands for a nested one: the mask of its valid positions.
_VALID = "_ltc_valid"


def _define_layer() -> None:
    """The operator `torch_ltc::encoder_layer`: `aten::_transformer_encoder_layer_fwd` on the valid positions."""
    schema = str(aten._transformer_encoder_layer_fwd.default._schema)
    rest = schema.split(", ", maxsplit=1)[1]
    define(f"encoder_layer(Tensor src, Tensor valid, {rest}", _run_layer, _infer_layer, ("CPU", "CUDA"), nested=True)


def _infer_layer(src: torch.Tensor, *rest: Any) -> torch.Tensor:
    return torch.empty_like(src, memory_format=torch.contiguous_format)


def _run_layer(src: torch.Tensor, valid: torch.Tensor, *rest: Any) -> torch.Tensor:
    nested = aten._nested_tensor_from_mask.default(src, valid, mask_check=False)
    out = aten._transformer_encoder_layer_fwd.default(nested, *rest)
    padded: torch.Tensor = aten.to_padded_tensor.default(out, 0.0, src.size())
    return padded


_define_layer()
_layer = make_kernel(aten._transformer_encoder_layer_fwd.default)


def is_left_aligned(t: torch.Tensor, mask: torch.Tensor) -> bool:
    """Kernel of `aten::_nested_tensor_from_mask_left_aligned`: reads the mask, as PyTorch does on every device."""
    sizes = torch.empty((), device="cpu").expand(t.size())
    return bool(aten._nested_tensor_from_mask_left_aligned.default(sizes, mask.cpu()))


def from_mask(t: torch.Tensor, mask: torch.Tensor, mask_check: bool = True) -> torch.Tensor:
    """Kernel of `aten::_nested_tensor_from_mask`. Only `nn.TransformerEncoder` has checked the mask before."""
    nested: torch.Tensor
    if mask_check:
        nested = run_on_physical_device(aten._nested_tensor_from_mask.default, t, mask, mask_check)
        return nested
    nested = aten.alias.default(t)
    # Of a mask that is not aligned to the left, which nobody may have checked, PyTorch takes the lengths.
    setattr(nested, _VALID, torch.arange(t.size(1), device=t.device) < mask.sum(1, keepdim=True))
    return nested


def encoder_layer(src: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Kernel of `aten::_transformer_encoder_layer_fwd`."""
    valid = getattr(src, _VALID, None)
    if valid is None:
        recorded: torch.Tensor = _layer(src, *args, **kwargs)
        return recorded
    out: torch.Tensor = torch.ops.torch_ltc.encoder_layer(src, valid, *args, **kwargs)
    setattr(out, _VALID, valid)
    return out


def to_padded_tensor(self: torch.Tensor, padding: float, output_size: Any = None) -> torch.Tensor:
    """Kernel of `aten::to_padded_tensor`."""
    valid: torch.Tensor | None = getattr(self, _VALID, None)
    if valid is None or (output_size is not None and tuple(output_size) != tuple(self.size())):
        raise UnsupportedLayoutError(
            "to_padded_tensor takes nested tensors, and those of nn.TransformerEncoder after its fast path alone",
            source=str(current_source()),
            hint="nn.TransformerEncoder(..., enable_nested_tensor=False)",
        )
    return self.masked_fill(valid.logical_not().unsqueeze(-1), padding)


KERNELS: dict[str, Kernel] = {
    "aten::_nested_tensor_from_mask_left_aligned": is_left_aligned,
    "aten::_nested_tensor_from_mask": from_mask,
    "aten::_transformer_encoder_layer_fwd": encoder_layer,
    "aten::to_padded_tensor": to_padded_tensor,
}
