"""Fresh copies of an operator's sample inputs on a device.

A copy keeps sizes, strides, storage offset, which arguments share memory, which are the same object,
conjugate and negative bits, and which of them ask for gradients. It knows nothing about operators or comparison.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from torch_ltc.pytorch.private import neg_view, pytree

# Arguments that PyTorch itself wants on the CPU whatever the device of the rest.
ARGUMENTS_ON_CPU = frozenset({"tensor_split"})


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of one call, on one device."""

    input: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def tensors(self) -> list[torch.Tensor]:
        """All tensors among the arguments, in order of position; one that is passed twice comes once."""
        return distinct(tensors_in((self.input, self.args, self.kwargs)))


def leaves(tree: Any) -> Iterator[Any]:
    """The leaves of nested containers and of slices in them, in order."""
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, slice):
            yield from (leaf.start, leaf.stop, leaf.step)
        else:
            yield leaf


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors of nested containers, in order."""
    return [leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor)]


def distinct(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Each tensor once, in order."""
    return list({id(tensor): tensor for tensor in tensors}.values())


def transform(tree: Any, change: Callable[[Any], Any]) -> Any:
    """The same nesting with `change` applied to every leaf."""

    def at_leaf(leaf: Any) -> Any:
        return slice(*map(change, (leaf.start, leaf.stop, leaf.step))) if isinstance(leaf, slice) else change(leaf)

    return pytree.tree_map(at_leaf, tree)


def place(arguments: Arguments, device: str, *, rest_on_cpu: bool = False) -> Arguments:
    """Copies of CPU arguments on `device`; with `rest_on_cpu` only the first input moves, the others are copied."""
    tree = (arguments.input, arguments.args, arguments.kwargs)
    shared = Counter(storage_key(tensor) for tensor in distinct(tensors_in(tree)) if is_strided(tensor))
    copier = _Copier(device, shared)
    placed_input = transform(arguments.input, copier.leaf)
    if rest_on_cpu:
        copier.device = "cpu"
    return Arguments(placed_input, transform(arguments.args, copier.leaf), transform(arguments.kwargs, copier.leaf))


def is_strided(tensor: torch.Tensor) -> bool:
    """True for a tensor with strides and one storage."""
    return tensor.layout is torch.strided and not tensor.is_nested


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for tensors that share memory, on any device."""
    return int(tensor.untyped_storage()._cdata)


class _Copier:
    """Copies leaves to a device, remembering tensors and storages already copied so that sharing survives."""

    def __init__(self, device: str, shared: Counter[int]) -> None:
        self.device = device
        self._shared = shared
        self._tensors: dict[int, torch.Tensor] = {}
        self._storages: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def leaf(self, leaf: Any) -> Any:
        """The leaf for the device: a tensor copied, a generator in the same state, a name of the CPU replaced."""
        if isinstance(leaf, torch.Tensor):
            if id(leaf) not in self._tensors:
                self._tensors[id(leaf)] = self._tensor(leaf)
            return self._tensors[id(leaf)]
        if isinstance(leaf, torch.Generator):
            # A generator is state: each run must start from the same one.
            return torch.Generator().set_state(leaf.get_state())
        if isinstance(leaf, torch.device) and leaf.type == "cpu":
            return torch.device(self.device)
        if isinstance(leaf, str) and leaf == "cpu":
            return self.device
        return leaf

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_nested:
            copy = tensor.detach().clone()
        elif not is_strided(tensor):
            copy = tensor.detach().to(self.device, copy=True)
        elif tensor.is_conj():
            copy = self._strided(tensor.detach().conj()).conj()
        elif tensor.is_neg():
            copy = neg_view(self._strided(neg_view(tensor.detach())))
        else:
            copy = self._strided(tensor.detach())
        return copy.detach().requires_grad_(tensor.requires_grad)

    def _strided(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        whole = tensor.numel() * tensor.element_size() == storage.nbytes() and tensor.is_contiguous()
        if whole and self._shared[storage_key(tensor)] <= 1:
            copy = self._moved(tensor)
            if copy.stride() == tensor.stride():
                return copy
        # A plain copy to a device keeps neither gaps, nor overlaps, nor shared memory: copy the whole storage as
        # one flat tensor and take the same window into it.
        key = (storage_key(tensor), tensor.dtype)
        if key not in self._storages:
            flat = torch.empty(0, dtype=tensor.dtype).set_(storage)
            self._storages[key] = self._moved(flat)
        return torch.as_strided(self._storages[key], tensor.size(), tensor.stride(), tensor.storage_offset())

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if self.device == "cpu" else tensor.to(self.device)
