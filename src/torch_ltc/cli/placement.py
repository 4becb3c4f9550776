"""Placement: what of a script that names no lazy device is on it under `ltc run`.

Parameters and buffers of modules go there when the module is first called or its parameters are given to an optimizer;
everything else is made where the script makes it. A call with tensors of both devices runs on the lazy one. No value
may depend on where a tensor is: memory that a tensor shares with another one or with an array stays shared, or the
tensor stays on the CPU (docs/decisions/0025-placement.md).
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from torch_ltc.cli.block_masks import follow_block_masks
from torch_ltc.cli.numpy_memory import NumpyMemory, storage_of
from torch_ltc.cli.output import note
from torch_ltc.formatting import count_text
from torch_ltc.pytorch.patches import Patches
from torch_ltc.pytorch.private import (
    device_constructors,
    function_modes,
    pytree,
    storage_use_count,
    untyped_storage,
)
from torch_ltc.record.ordinal import ordinal

NAME = "ltc"
_Tensor = torch.Tensor
# Uses of a storage that one tensor has: by itself, and by the object which is asked.
_ONE_TENSOR = 2
# They draw from the CPU's generator, as without the device. What they make is copied there.
_RANDOM = frozenset({torch.rand, torch.randn, torch.randint, torch.randperm})
# Arguments without tensors.
_PLAIN = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size})
_SHARING = frozenset({torch.as_tensor, torch.asarray})
# Calls that PyTorch itself defines for tensors of two devices, or that follow the graph of the tensors they are given.
_OF_BOTH = frozenset({_Tensor.copy_, _Tensor.set_, _Tensor.backward, torch.autograd.grad})
# Calls that want lengths on the CPU.
_WITH_LENGTHS = frozenset({"_pad_packed_sequence", "_pack_padded_sequence"})


class _Script:
    """The script that runs: whether placement is on, arrays that share memory with the device, modules placed."""

    active = False

    def __init__(self) -> None:
        self.arrays = NumpyMemory()
        self._modules: dict[int, weakref.ref[torch.nn.Module]] = {}
        self._said = False

    def is_placed(self, module: torch.nn.Module) -> bool:
        """Place the module, if that was not done yet. False for one that has no parameters on the device."""
        known = self._modules.get(id(module))
        if known is not None and known() is module:
            return True
        tensors = [*module.parameters(), *module.buffers()]
        # A lazy module gets its parameters in its first call: they are placed in its second.
        if any(is_lazy(tensor) for tensor in tensors):
            return False
        parameters = list(module.parameters())
        if not parameters:
            return False
        for part in module.modules():
            if isinstance(part, torch.nn.RNNBase) and all(_is_alone(one) for one in part.parameters(recurse=False)):
                # It has weak references to its parameters, and moves them itself.
                part._apply(lambda tensor: tensor.to(NAME))
        self._say_what_stays(sum(not _place(tensor) for tensor in tensors))
        if all(parameter.is_cpu for parameter in parameters):
            return False
        self._modules.update({id(part): weakref.ref(part) for part in module.modules()})
        return True

    def _say_what_stays(self, count: int) -> None:
        if count and not self._said:
            self._said = True
            note(
                f"{count_text(count, 'tensor')} of a module on the CPU: other tensors or arrays share its memory, or "
                "it has a gradient or a hook already"
            )


class _Thread(threading.local):
    """Calls of placed modules that this thread is inside of, and whether a library moves a module."""

    depth = 0
    to_device = False


_thread = _Thread()
_script = _Script()


@contextmanager
def placement() -> Iterator[None]:
    """Inside, modules and what they compute are on the device."""
    global _script
    _script = _Script()
    _script.active = True
    try:
        with Patches() as patches, _Placement():
            _follow_modules(patches)
            follow_block_masks(patches)
            _share_arrays(patches)
            _follow_threads(patches)
            _save_as_cpu(patches)
            _follow_autocast(patches)
            yield
    finally:
        _script.active = False


def _in_child() -> None:
    """In a process that was forked, as the workers of a loader are: the device cannot be used there."""
    _script.active = False


os.register_at_fork(after_in_child=_in_child)


# ---- parameters and buffers -----------------------------------------------------------------------------------------


def _place(tensor: torch.Tensor) -> bool:
    """Give a CPU tensor its contents on the device; whoever holds the tensor sees it there. False when it must stay."""
    if not tensor.is_cpu:
        return True
    if not _is_alone(tensor):
        return False
    with torch.no_grad():
        moved = tensor.detach().to(NAME)
    if isinstance(tensor, torch.nn.Parameter):
        moved = torch.nn.Parameter(moved, tensor.requires_grad)
    elif tensor.requires_grad:
        moved.requires_grad_()
    try:
        torch.utils.swap_tensors(tensor, moved)
    except RuntimeError:
        # Autograd, or a weak reference, holds on to it.
        return False
    return True


def _is_alone(tensor: torch.Tensor) -> bool:
    """True for a tensor whose memory nobody else can see, and that nothing is attached to."""
    if type(tensor) not in (_Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return False
    if tensor.grad_fn is not None or tensor.grad is not None or tensor._backward_hooks:
        return False
    if tensor._post_accumulate_grad_hooks:
        return False
    try:
        storage = untyped_storage(tensor)
    except NotImplementedError:
        # One that a transform of torch.func put in the parameter's place.
        return False
    # One that an array has shared cannot be resized.
    return storage.resizable() and not storage.is_shared() and storage_use_count(storage._cdata) <= _ONE_TENSOR


def _follow_modules(patches: Patches) -> None:
    def calling(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not _script.active or not _script.is_placed(self):
                return original(self, *args, **kwargs)
            if function_modes() == 0:
                # In a backward pass, which computes a checkpoint again: a mode that handles `backward` sees no calls.
                with _Placement():
                    return call(self, *args, **kwargs)
            _thread.depth += 1
            try:
                return original(self, *args, **kwargs)
            finally:
                _thread.depth -= 1

        return call

    def adding(original: Callable[..., None]) -> Callable[..., None]:
        def add(self: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
            original(self, param_group)
            if _script.active:
                for parameter in self.param_groups[-1]["params"]:
                    _place(parameter)

        return add

    def moving(original: Callable[..., Any]) -> Callable[..., Any]:
        def to(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            # PyTorch makes another object of the device before it moves tensors.
            before, _thread.to_device = _thread.to_device, any(v is ordinal.device for v in (*args, *kwargs.values()))
            try:
                return original(self, *args, **kwargs)
            finally:
                _thread.to_device = before

        return to

    patches.wrap(torch.nn.Module, "to", moving)
    patches.wrap(torch.nn.Module, "__call__", calling)
    patches.wrap(torch.optim.Optimizer, "add_param_group", adding)


# ---- calls ----------------------------------------------------------------------------------------------------------


class _Placement(TorchFunctionMode):
    """Sees every call of PyTorch that the script makes on one thread."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _script.active:
            return func(*args, **kwargs)
        special = _SPECIAL.get(func)
        return _call(func, args, kwargs) if special is None else special(func, args, kwargs)


def _call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    on_cpu = on_device = False
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, _Tensor):
            if value.is_cpu:
                on_cpu = True
            else:
                on_device = True
        elif value.__class__ is list or value.__class__ is tuple:
            for item in value:
                if isinstance(item, _Tensor):
                    if item.is_cpu:
                        on_cpu = True
                    else:
                        on_device = True
    if not on_device:
        return func(*args, **kwargs)
    if not _script.arrays:
        return _mixed(func, args, kwargs) if on_cpu else func(*args, **kwargs)
    seen = _script.arrays.before(_tensors((args, kwargs)))
    try:
        return _mixed(func, args, kwargs) if on_cpu else func(*args, **kwargs)
    finally:
        _script.arrays.after(seen, _may_write_unseen(func))


def _tensors(values: Any) -> list[torch.Tensor]:
    if isinstance(values, _Tensor):
        return [values]
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, _Tensor)]


# ---- calls with tensors of both devices -----------------------------------------------------------------------------


def _mixed(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The call on the device, with copies of its CPU tensors; one that writes to a CPU tensor alone, on the CPU."""
    if func.__name__ == "__set__":
        # Of `.grad` or `.data`: the tensor that is assigned moves, and stays the one that others hold.
        _place(args[1])
        return func(*args, **kwargs)
    if func in _OF_BOTH or func.__name__ in _WITH_LENGTHS:
        return func(*args, **kwargs)
    if _writes_first(func) and all(tensor.is_cpu for tensor in _tensors(args[:1])):
        args, kwargs = pytree.tree_map_only(_Tensor, _Tensor.cpu, (args, kwargs))
        return func(*args, **kwargs)
    copies = _Copies()
    moved = [_with_tensors(copies.of, value) for value in args]
    result = func(*moved, **{name: _with_tensors(copies.of, value) for name, value in kwargs.items()})
    if not copies.write_back(_may_write_unseen(func)) and copies.are_viewed_by(_tensors(result)):
        # As of `view_as`: a view of the copy would not see what is written to the tensor.
        return func(*args, **kwargs)
    return _with_tensors(copies.original_of, result)


def _with_tensors(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """The value with its tensors changed."""
    if isinstance(value, _Tensor):
        return change(value)
    return value if value.__class__ in _PLAIN else pytree.tree_map_only(_Tensor, change, value)


def _writes_first(func: Callable[..., Any]) -> bool:
    """True for calls that write to their first argument and to nothing else, by PyTorch's names for them."""
    name = func.__name__
    if name.startswith("__"):
        return name == "__setitem__" or name in _IN_PLACE
    return name.endswith("_") and not name.startswith("_fused_")


def _may_write_unseen(func: Callable[..., Any]) -> bool:
    """True for calls that may write to a tensor without counting that in its version: to lists, and to running
    statistics."""
    name = func.__name__
    return name.startswith(("_foreach_", "_fused_")) or name.endswith(("batch_norm", "instance_norm"))


class _Copies:
    """Copies on the device of the CPU tensors of one call."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The copy of a CPU tensor; any other tensor itself."""
        if not tensor.is_cpu:
            return tensor
        if id(tensor) not in self._made:
            if torch.is_inference_mode_enabled():
                # Tensors that are made in inference mode do not say that they were written to.
                with torch.inference_mode(False), torch.set_grad_enabled(False):
                    copy = tensor.to(NAME)
            else:
                copy = tensor.to(NAME)
            self._made[id(tensor)] = (tensor, copy, copy._version)
        return self._made[id(tensor)][1]

    def write_back(self, unseen: bool) -> bool:
        """Copy what the call wrote to copies to their tensors, or all if it may have done so unseen. True if any."""
        written = [
            (tensor, copy)
            for tensor, copy, version in self._made.values()
            if unseen or copy._version != version or copy.shape != tensor.shape
        ]
        for tensor, copy in written:
            if copy.shape != tensor.shape:
                tensor.resize_(copy.shape)
            with torch.set_grad_enabled(torch.is_grad_enabled() and not unseen):
                tensor.copy_(copy)
        return bool(written)

    def are_viewed_by(self, results: Iterable[torch.Tensor]) -> bool:
        """True when a result looks at the memory of a copy, and is not the copy."""
        storages = {storage_of(copy) for _, copy, _ in self._made.values()} - {None}
        return any(self.original_of(r) is r and storage_of(r) in storages for r in results)

    def original_of(self, result: torch.Tensor) -> torch.Tensor:
        """The tensor that `result` is the copy of; else `result`."""
        return next((tensor for tensor, copy, _ in self._made.values() if copy is result), result)


# ---- calls that name a device, or make a tensor ---------------------------------------------------------------------


def _make(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Functions that make tensors: on the device inside of a placed module, and for tensors that want a gradient."""
    grad = bool(kwargs.get("requires_grad"))
    if not (grad or _thread.depth) or not _may_place(kwargs):
        return _call(func, args, kwargs)
    if func in _RANDOM or grad:
        made = _call(func, args, kwargs | {"requires_grad": False})
        return made.to(NAME).requires_grad_(grad)
    return _call(func, args, kwargs | {"device": NAME})


def _may_place(options: Mapping[str, Any]) -> bool:
    if any(options.get(name) is not None for name in ("out", "layout")) or options.get("pin_memory"):
        return False
    return options.get("device") is None or _names_cpu(options["device"])


def _names_cpu(value: Any) -> bool:
    if isinstance(value, str):
        return value == "cpu" or value.startswith("cpu:")
    return isinstance(value, torch.device) and value.type == "cpu"


def _to(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`Tensor.to`. The script knows one device: a tensor that it moves to the CPU, or to where another tensor is, is
    there already, and `to` returns the tensor itself."""
    tensor, *rest = args

    def stays(value: Any) -> Any:
        if isinstance(value, _Tensor):
            return value.dtype
        # The device that a library was given to choose is the one exception: what it moves there is to be there.
        chosen = value is ordinal.device or _thread.to_device
        known = _names_cpu(value) or (isinstance(value, torch.device) and value.type == NAME and not chosen)
        return tensor.device if known else value

    options = {("dtype" if name == "other" else name): stays(value) for name, value in kwargs.items()}
    return _call(func, (tensor, *map(stays, rest)), options)


def _cpu(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _call(_Tensor.to, args, kwargs) if kwargs else args[0]


def _type(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`Tensor.type`, as of a CPU tensor: "torch.FloatTensor"."""
    tensor, *rest = args
    wanted = rest[0] if rest else kwargs.get("dtype")
    if tensor.is_cpu or isinstance(wanted, torch.dtype):
        return _call(func, args, kwargs)
    if wanted is None:
        return func(tensor).replace(f"torch.{NAME}.", "torch.")
    kind: Any = getattr(torch, wanted.removeprefix("torch.")) if isinstance(wanted, str) else wanted
    return _call(_Tensor.to, (tensor, kind.dtype), {})


_IN_PLACE = frozenset(name for name in vars(_Tensor) if name.startswith("__i") and hasattr(_Tensor, f"__{name[3:]}"))
_SPECIAL: Mapping[Any, Callable[..., Any]] = {
    **{function: _make for function in device_constructors() if function not in _SHARING},
    _Tensor.to: _to,
    _Tensor.cpu: _cpu,
    _Tensor.type: _type,
}


# ---- arrays, threads, files -----------------------------------------------------------------------------------------


def _share_arrays(patches: Patches) -> None:
    def sharing(original: Callable[..., Any]) -> Callable[..., Any]:
        def numpy(self: torch.Tensor, *, force: bool = False) -> Any:
            if self.device.type != NAME or not _script.active:
                return original(self, force=force)
            if force:
                self = self.detach().resolve_conj().resolve_neg()
            else:
                _refuse_as_on_cpu(self, original)
            return _script.arrays.array(self, original)

        return numpy

    def seeing(original: Callable[..., None]) -> Callable[..., None]:
        def backward(*args: Any, **kwargs: Any) -> None:
            _script.arrays.upload_all()
            try:
                original(*args, **kwargs)
            finally:
                _script.arrays.download_all()

        return backward

    patches.wrap(torch.Tensor, "numpy", sharing)
    patches.wrap(torch.autograd, "backward", seeing)


def _refuse_as_on_cpu(tensor: torch.Tensor, numpy: Callable[..., Any]) -> None:
    """Raise what PyTorch raises for a tensor that has no array."""
    like = torch.empty(0, dtype=tensor.dtype, device="cpu")
    like = like.conj() if tensor.is_conj() else like
    numpy(like.requires_grad_(tensor.requires_grad))


def _follow_threads(patches: Patches) -> None:
    """Modes are of one thread: the script's other threads get theirs."""

    def starting(original: Callable[[Any], None]) -> Callable[[Any], None]:
        def start(self: Any) -> None:
            if _script.active and not self.name.startswith("torch_ltc"):
                self.run = _seen(self.run)
            original(self)

        return start

    # No thread is started here.
    patches.wrap(threading.Thread, "start", starting)  # noqa: TID251


def _seen(run: Callable[[], None]) -> Callable[[], None]:
    def run_in_mode() -> None:
        with _Placement():
            run()

    return run_in_mode


def _follow_autocast(patches: Patches) -> None:
    """Regions of the CPU's autocast hold for what is on the device, too."""

    def entering(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def enter(self: Any) -> Any:
            made = original(self)
            if _script.active and self.device == "cpu":
                region = torch.autocast(NAME, self.fast_dtype, self._enabled, self._cache_enabled)
                region.__enter__()
                self.on_device = region
            return made

        return enter

    def leaving(original: Callable[..., Any]) -> Callable[..., Any]:
        def leave(self: Any, *raised: Any) -> Any:
            region = vars(self).pop("on_device", None)
            if region is not None:
                region.__exit__(*raised)
            return original(self, *raised)

        return leave

    patches.wrap(torch.autocast, "__enter__", entering)
    patches.wrap(torch.autocast, "__exit__", leaving)


def _save_as_cpu(patches: Patches) -> None:
    """Files that the script writes are those that it writes without the device."""

    def tagging(original: Callable[[Any], str]) -> Callable[[Any], str]:
        def tag(storage: Any) -> str:
            return "cpu" if storage.device.type == NAME else original(storage)

        return tag

    patches.wrap(torch.serialization, "location_tag", tagging)
