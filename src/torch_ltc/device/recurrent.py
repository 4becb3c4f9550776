"""Recurrent networks, composed as PyTorch composes them for the CPU.

For other devices PyTorch calls fused cells that exist on GPUs only. On the CPU it projects the inputs of all steps at
once and then walks the steps, and hands float LSTMs to oneDNN layer by layer; the same is recorded here, so that
results are equal to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_ltc.device.kernels import Kernel, make_kernel, on_cpu
from torch_ltc.lowering.own_operators import define
from torch_ltc.pytorch.private import mkldnn_enabled

aten = torch.ops.aten
_LSTM_MODE = 2
# A state is (hidden,) or (hidden, cell).
State = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class _Weights:
    """Parameters of one direction of one layer."""

    w_ih: torch.Tensor
    w_hh: torch.Tensor
    b_ih: torch.Tensor | None = None
    b_hh: torch.Tensor | None = None
    w_hr: torch.Tensor | None = None

    def project_input(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.w_ih, self.b_ih)

    def project_hidden(self, h: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(h, self.w_hh, self.b_hh)


# A cell takes a projected input, the state and the weights.
Cell = Callable[[torch.Tensor, State, _Weights], State]


def _lstm_step(projected: torch.Tensor, state: State, weights: _Weights) -> State:
    gates = weights.project_hidden(state[0]).add_(projected).unsafe_chunk(4, 1)
    take, forget, offer, give = gates[0].sigmoid_(), gates[1].sigmoid_(), gates[2].tanh_(), gates[3].sigmoid_()
    cell = (forget * state[1]).add_(take * offer)
    hidden = give * cell.tanh()
    if weights.w_hr is not None:
        hidden = hidden.matmul(weights.w_hr.t())
    return hidden, cell


def _gru_step(projected: torch.Tensor, state: State, weights: _Weights) -> State:
    hidden = state[0]
    inputs = projected.unsafe_chunk(3, 1)
    hiddens = weights.project_hidden(hidden).unsafe_chunk(3, 1)
    reset = hiddens[0].add_(inputs[0]).sigmoid_()
    update = hiddens[1].add_(inputs[1]).sigmoid_()
    new = inputs[2].add(hiddens[2].mul_(reset)).tanh_()
    return ((hidden - new).mul_(update).add_(new),)


def _tanh_step(projected: torch.Tensor, state: State, weights: _Weights) -> State:
    return (weights.project_hidden(state[0]).add_(projected).tanh(),)


def _relu_step(projected: torch.Tensor, state: State, weights: _Weights) -> State:
    return (weights.project_hidden(state[0]).add_(projected).relu(),)


def _group(params: Sequence[torch.Tensor], has_biases: bool, projected: bool) -> list[_Weights]:
    size = 2 + 2 * has_biases + projected
    groups = []
    for start in range(0, len(params), size):
        part: list[torch.Tensor | None] = list(params[start : start + size])
        w_hr = part.pop() if projected else None
        b_ih, b_hh = part[2:] if has_biases else (None, None)
        assert part[0] is not None
        assert part[1] is not None
        groups.append(_Weights(part[0], part[1], b_ih, b_hh, w_hr))
    return groups


def _walk(cell: Cell, x: torch.Tensor, state: State, weights: _Weights, reverse: bool) -> tuple[torch.Tensor, State]:
    """One direction over a padded sequence, time first."""
    steps = list(weights.project_input(x).unbind(0))
    outputs = []
    for step in reversed(steps) if reverse else steps:
        state = cell(step, state, weights)
        outputs.append(state[0])
    if reverse:
        outputs.reverse()
    return torch.stack(outputs, 0), state


def _walk_packed(
    cell: Cell, x: torch.Tensor, sizes: list[int], state: State, weights: _Weights
) -> tuple[torch.Tensor, State]:
    """Forward over a packed sequence, whose batch shrinks as sequences end."""
    projected = weights.project_input(x)
    outputs, ended, offset, last = [], [], 0, sizes[0]
    for size in sizes:
        if size < last:
            ended.append(tuple(s.narrow(0, size, last - size) for s in state))
            state = tuple(s.narrow(0, 0, size) for s in state)
        last = size
        state = cell(projected.narrow(0, offset, size), state, weights)
        offset += size
        outputs.append(state[0])
    ended.append(state)
    ended.reverse()
    return torch.cat(outputs, 0), tuple(torch.cat(parts, 0) for parts in zip(*ended, strict=True))


def _walk_packed_reverse(
    cell: Cell, x: torch.Tensor, sizes: list[int], initial: State, weights: _Weights
) -> tuple[torch.Tensor, State]:
    """Backward over a packed sequence, whose batch grows as sequences begin."""
    projected = weights.project_input(x)
    offset, last = x.size(0), sizes[-1]
    state = tuple(s.narrow(0, 0, last) for s in initial)
    outputs = []
    for size in reversed(sizes):
        if size > last:
            joining = tuple(s.narrow(0, last, size - last) for s in initial)
            state = tuple(torch.cat([a, b], 0) for a, b in zip(state, joining, strict=True))
        last = size
        offset -= size
        state = cell(projected.narrow(0, offset, size), state, weights)
        outputs.append(state[0])
    outputs.reverse()
    return torch.cat(outputs, 0), state


def _layers(
    cell: Cell,
    x: torch.Tensor,
    sizes: list[int] | None,
    states: Sequence[State],
    weights: list[_Weights],
    bidirectional: bool,
    dropout: float,
    train: bool,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    directions = 2 if bidirectional else 1
    finals: list[State] = []
    for start in range(0, len(weights), directions):
        outputs = []
        for index in range(start, start + directions):
            reverse = index > start
            if sizes is None:
                out, final = _walk(cell, x, states[index], weights[index], reverse)
            elif reverse:
                out, final = _walk_packed_reverse(cell, x, sizes, states[index], weights[index])
            else:
                out, final = _walk_packed(cell, x, sizes, states[index], weights[index])
            outputs.append(out)
            finals.append(final)
        x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if dropout != 0 and train and start + directions < len(weights):
            x = torch.dropout(x, dropout, True)
    return x, [torch.stack(parts, 0) for parts in zip(*finals, strict=True)]


def _use_onednn(x: torch.Tensor, projected: bool) -> bool:
    mkldnn = torch.backends.mkldnn
    if projected or x.numel() == 0 or not mkldnn.is_available() or not mkldnn_enabled():
        return False
    if x.dtype is torch.float32:
        return True
    if x.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return x.dtype is torch.float16 and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def _define_layer() -> None:
    """The operator `torch_ltc::lstm_layer`: `aten::mkldnn_rnn_layer` as it is where no gradients are wanted.

    Its kernel asks the thread whether they are, and computes with other last bits; programs run with gradients wanted.
    """
    arguments = str(aten.mkldnn_rnn_layer.default._schema).partition("(")[2].partition(" -> ")[0]
    schema = f"lstm_layer({arguments} -> (Tensor, Tensor, Tensor)"
    define(schema, _run_layer, lambda *args: aten.mkldnn_rnn_layer.default(*args)[:3])


def _run_layer(*args: Any) -> Any:
    with torch.no_grad():
        return aten.mkldnn_rnn_layer.default(*args)[:3]


_define_layer()
_layer = make_kernel(aten.mkldnn_rnn_layer.default)


def onednn_layer(*args: Any) -> Any:
    """Kernel of `aten::mkldnn_rnn_layer`. Without gradients there is no workspace for them."""
    return _layer(*args) if torch.is_grad_enabled() else (*torch.ops.torch_ltc.lstm_layer(*args), None)


def _onednn_lstm(
    x: torch.Tensor,
    hx: Sequence[torch.Tensor],
    weights: list[_Weights],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = (x.transpose(0, 1) if batch_first else x).contiguous()
    h0, c0 = hx[0].contiguous(), hx[1].contiguous()
    directions = 2 if bidirectional else 1
    hidden, cells = [], []
    for start in range(0, len(weights), directions):
        outputs = []
        for index in range(start, start + directions):
            w = weights[index]
            b_ih = torch.zeros_like(w.w_ih) if w.b_ih is None else w.b_ih
            b_hh = torch.zeros_like(w.w_hh) if w.b_hh is None else w.b_hh
            shape = (h0.size(2), num_layers, has_biases, bidirectional, batch_first, train)
            out, h, c, _ = torch.mkldnn_rnn_layer(
                x, w.w_ih, w.w_hh, b_ih, b_hh, h0[index], c0[index], index > start, [], _LSTM_MODE, *shape
            )
            outputs.append(out)
            hidden.append(h)
            cells.append(c)
        x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if dropout != 0 and train and start + directions < len(weights):
            x = torch.dropout(x, dropout, True)
    return x.transpose(0, 1) if batch_first else x, torch.stack(hidden, 0), torch.stack(cells, 0)


def _lstm_input(
    x: Any,
    hx: Any,
    params: Any,
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    both: bool,
    batch_first: bool,
) -> Any:
    projected = hx[0].size(2) != hx[1].size(2)
    weights = _group(params, has_biases, projected)
    if _use_onednn(x, projected):
        return _onednn_lstm(x, hx, weights, has_biases, layers, dropout, train, both, batch_first)
    states = list(zip(hx[0].unbind(0), hx[1].unbind(0), strict=True))
    out, finals = _layers(
        _lstm_step, x.transpose(0, 1) if batch_first else x, None, states, weights, both, dropout, train
    )
    return (out.transpose(0, 1) if batch_first else out, *finals)


def _lstm_data(
    x: Any, sizes: Any, hx: Any, params: Any, has_biases: bool, layers: int, dropout: float, train: bool, both: bool
) -> Any:
    weights = _group(params, has_biases, hx[0].size(2) != hx[1].size(2))
    states = list(zip(hx[0].unbind(0), hx[1].unbind(0), strict=True))
    out, finals = _layers(_lstm_step, x, sizes.tolist(), states, weights, both, dropout, train)
    return (out, *finals)


def _plain(cell: Cell) -> tuple[Kernel, Kernel]:
    """Kernels for padded and packed sequences of a network whose state is one tensor."""

    def padded(
        x: Any,
        hx: Any,
        params: Any,
        has_biases: bool,
        layers: int,
        dropout: float,
        train: bool,
        both: bool,
        batch_first: bool,
    ) -> Any:
        states = [(h,) for h in hx.unbind(0)]
        weights = _group(params, has_biases, False)
        out, finals = _layers(
            cell, x.transpose(0, 1) if batch_first else x, None, states, weights, both, dropout, train
        )
        return (out.transpose(0, 1) if batch_first else out, *finals)

    def packed(
        x: Any, sizes: Any, hx: Any, params: Any, has_biases: bool, layers: int, dropout: float, train: bool, both: bool
    ) -> Any:
        states = [(h,) for h in hx.unbind(0)]
        out, finals = _layers(cell, x, sizes.tolist(), states, _group(params, has_biases, False), both, dropout, train)
        return (out, *finals)

    return padded, packed


def _check_cell(x: Any, hidden: Sequence[Any], w_ih: Any, w_hh: Any) -> None:
    """Raise what eager raises for sizes that do not fit the weights of a cell."""
    if x.size(1) != w_ih.size(1):
        raise RuntimeError(f"input has inconsistent input_size: got {x.size(1)} expected {w_ih.size(1)}")
    for number, h in enumerate(hidden):
        if x.size(0) != h.size(0):
            raise RuntimeError(f"Input batch size {x.size(0)} doesn't match hidden{number} batch size {h.size(0)}")
        if h.size(1) != w_hh.size(1):
            raise RuntimeError(f"hidden{number} has inconsistent hidden_size: got {h.size(1)}, expected {w_hh.size(1)}")


def _lstm_cell(x: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    if len(hx) != 2:
        raise RuntimeError("lstm_cell expects two hidden states")
    _check_cell(x, hx, w_ih, w_hh)
    weights = _Weights(w_ih, w_hh, b_ih, b_hh)
    return _lstm_step(weights.project_input(x), tuple(hx), weights)


def _gru_cell(x: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    _check_cell(x, (hx,), w_ih, w_hh)
    weights = _Weights(w_ih, w_hh, b_ih, b_hh)
    return _gru_step(weights.project_input(x), (hx,), weights)[0]


def _table() -> dict[str, Kernel]:
    gru, tanh, relu = _plain(_gru_step), _plain(_tanh_step), _plain(_relu_step)
    ours: dict[Any, Kernel] = {
        aten.lstm.input: _lstm_input,
        aten.lstm.data: _lstm_data,
        aten.gru.input: gru[0],
        aten.gru.data: gru[1],
        aten.rnn_tanh.input: tanh[0],
        aten.rnn_tanh.data: tanh[1],
        aten.rnn_relu.input: relu[0],
        aten.rnn_relu.data: relu[1],
        aten.lstm_cell.default: _lstm_cell,
        aten.gru_cell.default: _gru_cell,
    }
    return {op.name(): on_cpu(op, kernel) for op, kernel in ours.items()}


COMPOSITES = _table()
KERNELS: dict[str, Kernel] = {"aten::mkldnn_rnn_layer": onednn_layer}
