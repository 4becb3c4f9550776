"""Turn a module into a callable that runs its recorded program without recording it again.

Under the name of `torch._lazy.extract_compiled_graph`. The module must not depend on the values of its inputs, nor
draw random numbers that should differ from call to call in ways that Python decides: it is recorded once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_ltc import computation
from torch_ltc.events import FallbackEvent, SyncReason, subscribe
from torch_ltc.execute.eager_region import eager_regions
from torch_ltc.execute.sync import cut
from torch_ltc.pytorch.private import pytree
from torch_ltc.record.buffer import buffer_of


def force_lazy_device(model: torch.fx.GraphModule) -> None:
    """Make factory calls in the graph that name another device name the lazy one."""
    for node in model.graph.nodes:
        if isinstance(node.kwargs.get("device"), (str, torch.device)):
            node.kwargs = {**node.kwargs, "device": torch.device("ltc")}
    model.recompile()


def extract_compiled_graph(model: torch.nn.Module, example_inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """A callable that takes CPU tensors like `example_inputs` and returns what `model` returns, as CPU tensors.

    Raises RuntimeError when an operation of the model must run eagerly: there is no single program then.
    """
    lazy_model = copy.deepcopy(model).to("ltc")
    if isinstance(lazy_model, torch.fx.GraphModule):
        force_lazy_device(lazy_model)
    lazy_inputs = [value.detach().clone().to("ltc") for value in example_inputs]
    cut(SyncReason.EXPLICIT)
    fallbacks: list[str] = []
    stop = subscribe(lambda event: fallbacks.append(event.op), FallbackEvent)  # type: ignore[union-attr]
    try:
        with torch.no_grad(), eager_regions.suspended():
            result = lazy_model(*lazy_inputs)
    finally:
        stop()
    if fallbacks:
        raise RuntimeError(
            f"Fail to extract the compiled graph because of fallback: {', '.join(sorted(set(fallbacks)))}"
        )
    return _replayer(result, lazy_inputs)


def _replayer(result: Any, lazy_inputs: list[torch.Tensor]) -> Callable[..., Any]:
    leaves, structure = pytree.tree_flatten(result)
    outputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    digest = computation.get_graph_hash(outputs)
    identities, values = computation.get_tensors_ts_device_data_node(outputs)
    position = {buffer_of(value).identity: i for i, value in enumerate(lazy_inputs)}
    cut(SyncReason.EXPLICIT)

    def run(*args: torch.Tensor) -> Any:
        given = [
            args[position[identity]] if identity in position else value
            for identity, value in zip(identities, values, strict=True)
        ]
        computed = iter(computation.run_cached_graph(digest, given))
        filled = [next(computed) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return pytree.tree_unflatten(filled, structure)

    return run
