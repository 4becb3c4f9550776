"""`torch.compile` of code on the device, and `torch.compile(backend="ltc")` of code on other devices.

Of code on the device, Dynamo's graph is recorded each time as any other code: what compiles is the device's backend,
and Inductor never sees it. Of code on the physical device, each graph that AOTAutograd makes is recorded once for each
kind of inputs, and its program then runs on the tensors themselves: tiers, choices and captured graphs are those of
programs.
"""

from __future__ import annotations

import copy
import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.fx import GraphModule

from torch_ltc import errors
from torch_ltc.errors import DeviceMismatchError
from torch_ltc.events import FallbackEvent, SyncReason, subscribe
from torch_ltc.execute.eager_region import eager_regions
from torch_ltc.execute.pending import pending_inputs, publish, run_published
from torch_ltc.execute.sync import cut
from torch_ltc.libraries.imports import when_imported
from torch_ltc.program.spec import spec_of
from torch_ltc.pytorch.patches import registers, replaces
from torch_ltc.pytorch.private import pytree
from torch_ltc.pytorch.table import TRACING
from torch_ltc.record.buffer import buffer_of, physical_device

__all__ = ["compile_graph"]

NAME = "ltc"


@replaces("torch._TorchCompileInductorWrapper.__call__")
def _inductor(original: Callable[..., Any]) -> Callable[..., Any]:
    def compile_for_inductor(self: Any, model_: GraphModule, inputs_: Sequence[Any], **kwargs: Any) -> Any:
        if NAME in _device_types(model_, inputs_):
            return model_.forward
        return original(self, model_, inputs_, **kwargs)

    return compile_for_inductor


def compile_graph(graph: GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """The backend "ltc" of `torch.compile`. Options, as `mode`, are those of Inductor, and change nothing here."""
    del options
    devices = _device_types(graph, inputs)
    if NAME in devices:
        return graph.forward
    physical = physical_device()
    others = devices - {physical.type, "meta"}
    # A tensor without dimensions is a number to every device.
    if others - {"cpu"} or (others and physical.type not in devices):
        raise DeviceMismatchError(
            f"torch.compile(backend='ltc') got tensors on {', '.join(sorted(others))}; programs run on {physical}",
            hint="set LTC_TS_CUDA=1 for tensors on cuda, or move the module to 'ltc'",
        )
    dynamo: Any = importlib.import_module("torch_ltc.pytorch.dynamo")
    compiled: Callable[..., Any] = dynamo.aot_autograd(fw_compiler=_record_later, bw_compiler=_record_later)(
        graph, inputs
    )
    return compiled


def _record_later(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    del inputs
    # Not at the top: it loads Dynamo, for a second.
    compiler: Any = importlib.import_module("functorch.compile")
    boxed: Callable[..., Any] = compiler.make_boxed_func(RecordedGraph(graph).__call__)
    return boxed


def _adapt_tracing(dynamo: Any) -> None:
    """Dynamo rewrites no code of this package, which runs between and inside of compiled code: recording and syncs
    would be traced half-way. It still looks into functions that stand for PyTorch's. What `torch.get_autocast_dtype`
    returns stays a constant."""
    rules, functions = dynamo.trace_rules, importlib.import_module("torch._dynamo.variables.torch")
    check_file, package = rules.check_file, os.path.join(os.path.dirname(errors.__file__), "")

    def check(filename: str | None, is_inlined_call: bool = False) -> Any:
        if not is_inlined_call and filename is not None and filename.startswith(package):
            return rules.SkipResult(True, "it is a file of torch_ltc")
        return check_file(filename, is_inlined_call)

    rules.check_file = check
    functions.constant_fold_functions[torch.get_autocast_dtype] = None
    rules.torch_name_rule_map.append({"torch.get_autocast_dtype": functions.TorchInGraphFunctionVariable})
    rules.get_torch_obj_rule_map.cache_clear()


@registers(TRACING)
def _adapt() -> Callable[[], None]:
    when_imported("torch._dynamo", _adapt_tracing)
    return lambda: None


# By its name, also where the package was not installed, and its entry point is not known.
when_imported("torch._dynamo.backends.registry", lambda registry: registry.register_backend(compile_graph, name=NAME))


def _device_types(graph: GraphModule, inputs: Sequence[Any]) -> set[str]:
    """Types of all devices that tensors of the graph are on."""
    found = {leaf.device.type for leaf in inputs if isinstance(leaf, torch.Tensor)}
    found.update(tensor.device.type for tensor in (*graph.parameters(), *graph.buffers()))
    for node in graph.graph.nodes:
        made = node.meta.get("example_value", node.meta.get("val"))
        found.update(leaf.device.type for leaf in pytree.tree_leaves(made) if isinstance(leaf, torch.Tensor))
    return found


class RecordedGraph:
    """A functional graph for tensors on the physical device: recorded for each kind of inputs, run as a program."""

    def __init__(self, graph: GraphModule) -> None:
        self._graph = graph
        self._on_device: GraphModule | None = None
        self._recorded: dict[Any, _Recording | None] = {}

    def __call__(self, *args: Any) -> Any:
        """Run the program of the graph for inputs as these; a graph that cannot be one program runs as it is."""
        kind = tuple([spec_of(arg) if isinstance(arg, torch.Tensor) else arg for arg in args])
        if kind not in self._recorded:
            self._recorded[kind] = self._record(args)
        recording = self._recorded[kind]
        return self._graph(*args) if recording is None else recording.run(args)

    def _record(self, args: tuple[Any, ...]) -> _Recording | None:
        """Record the graph; None when one of its calls must run at once."""
        if self._on_device is None:
            self._on_device = _moved(self._graph)
        lazy = [arg.detach().to(NAME) if isinstance(arg, torch.Tensor) else arg for arg in args]
        cut(SyncReason.JIT)
        fallbacks: list[Any] = []
        stop = subscribe(fallbacks.append, FallbackEvent)
        try:
            with torch.no_grad(), eager_regions.suspended():
                returned = self._on_device(*lazy)
        finally:
            stop()
        if fallbacks:
            cut(SyncReason.JIT)
            return None
        return _Recording.of(returned, lazy)


# Where a value comes from: a result of the program, an argument, both by number, or it is itself.
_Source = tuple[Literal["result", "argument", "constant"], Any]


@dataclass(frozen=True, slots=True)
class _Recording:
    """A program, where its inputs come from, and what to return."""

    digest: bytes
    inputs: list[_Source]
    returned: list[_Source]
    structure: Any

    @classmethod
    def of(cls, returned: Any, lazy: list[Any]) -> _Recording:
        """The pending program, with what the graph returned as its outputs."""
        leaves, structure = pytree.tree_flatten(returned)
        given = {id(arg): i for i, arg in enumerate(lazy) if isinstance(arg, torch.Tensor)}
        results: dict[int, torch.Tensor] = {}
        sources: list[_Source] = []
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                sources.append(("constant", leaf))
            elif id(leaf) in given:
                sources.append(("argument", given[id(leaf)]))
            else:
                results.setdefault(id(leaf), leaf)
                sources.append(("result", list(results).index(id(leaf))))
        digest = publish(list(results.values()))
        identities, values = pending_inputs()
        position = {buffer_of(arg).identity: i for i, arg in enumerate(lazy) if isinstance(arg, torch.Tensor)}
        cut(SyncReason.JIT)
        inputs: list[_Source] = [
            ("argument", position[identity]) if identity in position else ("constant", value)
            for identity, value in zip(identities, values, strict=True)
        ]
        return cls(digest, inputs, sources, structure)

    def run(self, args: tuple[Any, ...]) -> Any:
        """What the graph returns for these arguments."""
        given = [args[item] if kind == "argument" else item for kind, item in self.inputs]
        results = run_published(self.digest, given, _default_generator())
        filled = [
            results[item] if kind == "result" else args[item] if kind == "argument" else item
            for kind, item in self.returned
        ]
        return pytree.tree_unflatten(filled, self.structure)


def _default_generator() -> torch.Generator:
    """The generator that eager draws from on the physical device."""
    device = physical_device()
    if device.type == "cuda":
        generator: torch.Generator = torch.cuda.default_generators[device.index]
        return generator
    return torch.default_generator


def _moved(graph: GraphModule) -> GraphModule:
    """A copy of the graph with its constants on the device, and with calls that name it instead of the physical one."""
    moved = copy.deepcopy(graph)
    physical = physical_device().type

    def name(value: Any) -> Any:
        return torch.device(NAME) if isinstance(value, torch.device) and value.type == physical else value

    for module in moved.modules():
        for attribute, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor):
                setattr(module, attribute, value.to(NAME))
        if isinstance(module, GraphModule):
            for node in module.graph.nodes:
                node.args, node.kwargs = pytree.tree_map(name, (node.args, node.kwargs))
            module.recompile()
    return moved.to(NAME)
