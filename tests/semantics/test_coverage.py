"""Operators with a static result shape are recorded; a training step is one program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torch_ltc
from tests.semantics.support import assert_like_eager, assert_same, lazy, observe

pytestmark = pytest.mark.usefixtures("no_fallback")

Call = Callable[[Tensor], Any]


def assigned(x: Tensor, key: Any, value: Any) -> Tensor:
    """A copy of `x` with `value` at `key`."""
    copy = x.clone()
    copy[key] = value
    return copy


# `x` is 3 by 4, of floats, around zero.
CALLS: dict[str, Call] = {
    "sin": lambda x: x.sin(),
    "where": lambda x: torch.where(x > 0, x, -x),
    "copy_": lambda x: torch.zeros_like(x).copy_(x),
    "setitem": lambda x: assigned(x, (slice(None), 1), 5.0),
    "index": lambda x: x[torch.tensor([2, 0], device=x.device)],
    "index pair": lambda x: x[torch.tensor([2, 0], device=x.device), torch.tensor([1, 1], device=x.device)],
    "argmax": lambda x: x.argmax(1),
    "argmin": lambda x: x.argmin(),
    "argsort": lambda x: x.argsort(1),
    "var": lambda x: x.var(1),
    "std": lambda x: x.std(),
    "lerp": lambda x: torch.lerp(x, -x, 0.3),
    "lerp with a tensor": lambda x: torch.lerp(x, -x, x.abs()),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.view(1, 1, 3, 4)] * 3),
    "attention of three dimensions": lambda x: F.scaled_dot_product_attention(*[x.view(1, 3, 4)] * 3),
    "attention of three dimensions with a mask": lambda x: F.scaled_dot_product_attention(
        *[x.view(1, 3, 4)] * 3, attn_mask=x.view(1, 3, 4)[..., :3] > 0
    ),
    "attention of nothing": lambda x: F.scaled_dot_product_attention(*[x.view(1, 3, 4)[:0]] * 3),
    "attention to nothing": lambda x: F.scaled_dot_product_attention(x.view(1, 3, 4), *[x.view(1, 3, 4)[:, :0]] * 2),
    "causal attention": lambda x: F.scaled_dot_product_attention(*[x.view(1, 1, 3, 4)] * 3, is_causal=True),
    "mse_loss": lambda x: F.mse_loss(x, x * 2),
    "l1_loss": lambda x: F.l1_loss(x, x * 2),
    "huber_loss": lambda x: F.huber_loss(x, x * 2),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, x * 2),
    "kl_div": lambda x: F.kl_div(x.log_softmax(1), x.softmax(1), reduction="batchmean"),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.tensor([0, 3, 1], device=x.device)),
    "bce_with_logits": lambda x: F.binary_cross_entropy_with_logits(x, (x > 0).float()),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x + 1),
    "gelu": lambda x: F.gelu(x),
    "silu": lambda x: F.silu(x),
    "mish": lambda x: F.mish(x),
    "softplus": lambda x: F.softplus(x),
    "leaky_relu": lambda x: F.leaky_relu(x),
    "hardswish": lambda x: F.hardswish(x),
    "elu": lambda x: F.elu(x),
    "prelu": lambda x: F.prelu(x, torch.full((1,), 0.25, device=x.device)),
    "glu": lambda x: F.glu(x),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "group_norm": lambda x: F.group_norm(x.view(1, 4, 3), 2),
    "rms_norm": lambda x: F.rms_norm(x, (4,)),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "instance_norm": lambda x: F.instance_norm(x.view(1, 3, 4)),
    "conv1d": lambda x: F.conv1d(x.view(1, 3, 4), x.view(2, 3, 2), padding=1),
    "conv2d": lambda x: F.conv2d(x.view(1, 1, 3, 4), x.view(1, 1, 3, 4)[..., :2, :2]),
    "conv_transpose2d": lambda x: F.conv_transpose2d(x.view(1, 1, 3, 4), x.view(1, 1, 3, 4)[..., :2, :2]),
    "max_pool2d": lambda x: F.max_pool2d(x.view(1, 1, 3, 4), 2),
    "avg_pool2d": lambda x: F.avg_pool2d(x.view(1, 1, 3, 4), 2),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x.view(1, 1, 3, 4), 2),
    "interpolate": lambda x: F.interpolate(x.view(1, 1, 3, 4), scale_factor=2, mode="bilinear"),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x.view(1, 4, 3, 1), 2),
    "unfold": lambda x: F.unfold(x.view(1, 1, 3, 4), 2),
    "grid_sample": lambda x: F.grid_sample(
        x.view(1, 1, 3, 4), torch.zeros(1, 2, 2, 2, device=x.device), align_corners=False
    ),
    "embedding": lambda x: F.embedding(torch.tensor([[2, 0]], device=x.device), x),
    "embedding_bag": lambda x: F.embedding_bag(torch.tensor([[2, 0]], device=x.device), x),
    "one_hot": lambda x: F.one_hot(torch.tensor([2, 0], device=x.device), 4),
    "pad": lambda x: F.pad(x, (1, 1), mode="constant"),
    "reflection pad": lambda x: F.pad(x.view(1, 3, 4), (1, 1), mode="reflect"),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "matmul": lambda x: x @ x.mT,
    "bmm": lambda x: torch.bmm(x.view(1, 3, 4), x.view(1, 4, 3)),
    "addmm": lambda x: torch.addmm(x @ x.mT, x, x.mT),
    "outer": lambda x: torch.outer(x[0], x[1]),
    "cdist": lambda x: torch.cdist(x, x + 1),
    "cumsum": lambda x: x.cumsum(1),
    "cumprod": lambda x: x.cumprod(0),
    "logsumexp": lambda x: x.logsumexp(1),
    "topk": lambda x: x.topk(2),
    "sort": lambda x: x.sort(1, descending=True),
    "kthvalue": lambda x: x.kthvalue(2),
    "median": lambda x: x.median(1),
    "quantile": lambda x: x.quantile(0.3, 1),
    "max": lambda x: x.max(0),
    "amax": lambda x: x.amax((0, 1)),
    "norm": lambda x: x.norm(dim=1),
    "prod": lambda x: x.prod(1),
    "all": lambda x: (x > -9).all(),
    "any": lambda x: (x > 9).any(1),
    "gather": lambda x: x.gather(1, torch.zeros(3, 2, dtype=torch.int64, device=x.device)),
    "scatter": lambda x: x.scatter(1, torch.zeros(3, 1, dtype=torch.int64, device=x.device), 9.0),
    "scatter_add": lambda x: x.scatter_add(0, torch.zeros(3, 4, dtype=torch.int64, device=x.device), x),
    "index_add": lambda x: x.index_add(0, torch.tensor([1, 1], device=x.device), x[:2]),
    "index_fill": lambda x: x.index_fill(1, torch.tensor([1], device=x.device), 3.0),
    "index_put": lambda x: x.clone().index_put_((torch.tensor([1], device=x.device),), x[:1], accumulate=True),
    "masked_fill": lambda x: x.masked_fill(x > 0, 9.0),
    "mask assignment": lambda x: assigned(x, x > 0, 0.0),
    "take_along_dim": lambda x: torch.take_along_dim(x, x.argsort(1), 1),
    "roll": lambda x: x.roll(1, 1),
    "flip": lambda x: x.flip(0, 1),
    "rot90": lambda x: x.rot90(),
    "repeat": lambda x: x.repeat(2, 1),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 0),
    "tile": lambda x: x.tile(2),
    "tril": lambda x: x.tril(),
    "diag_embed": lambda x: x.diag_embed(),
    "meshgrid": lambda x: torch.meshgrid(x[0], x[1], indexing="ij"),
    "broadcast_tensors": lambda x: torch.broadcast_tensors(x, x[:1]),
    "stack": lambda x: torch.stack([x, x], 1),
    "cat": lambda x: torch.cat([x, x], 1),
    "split": lambda x: x.split(2, 1),
    "chunk": lambda x: x.chunk(3),
    "unbind": lambda x: x.unbind(1),
    "searchsorted": lambda x: torch.searchsorted(torch.arange(5.0, device=x.device), x),
    "bucketize": lambda x: torch.bucketize(x, torch.arange(3.0, device=x.device)),
    "histc": lambda x: x.histc(4, -2, 2),
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "round": lambda x: x.round(decimals=1),
    "fmod": lambda x: x.fmod(0.4),
    "pow": lambda x: x.abs() ** 1.7,
    "erf": lambda x: x.erf(),
    "isnan": lambda x: (x / 0).isnan(),
    "nan_to_num": lambda x: (x / 0).nan_to_num(),
    "fft": lambda x: torch.fft.rfft(x),
    "solve": lambda x: torch.linalg.solve(x[:, :3] + 4 * torch.eye(3, device=x.device), x),
    "cholesky": lambda x: torch.linalg.cholesky(x @ x.mT + 9 * torch.eye(3, device=x.device)),
    "linspace": lambda x: torch.linspace(0, 1, 5, device=x.device),
    "arange": lambda x: torch.arange(2, 9, 3, device=x.device),
    "eye": lambda x: torch.eye(3, device=x.device),
    "full_like": lambda x: torch.full_like(x, 3),
    "foreach": lambda x: torch._foreach_add([x, x], 2.0),
    "bitwise": lambda x: (x * 9).int() & 3,
    "type promotion": lambda x: x.half() + x.double(),
}


def test_the_list_holds_the_operators_that_a_lazy_device_is_known_to_miss() -> None:
    assert len(CALLS) >= 60
    assert {
        "sin",
        "where",
        "copy_",
        "setitem",
        "index",
        "argmax",
        "var",
        "lerp",
        "attention",
        "mse_loss",
    } <= CALLS.keys()


@pytest.mark.parametrize("name", CALLS)
def test_operator_is_recorded_and_equals_eager(name: str) -> None:
    # No fallback for an operator with a static result shape; one program for all of it.
    x = torch.linspace(-1.5, 1.5, 12).view(3, 4)
    expected = CALLS[name](x)
    moved = lazy(x)
    torch_ltc.sync(wait=True)
    with observe() as seen:
        result = CALLS[name](moved)
        torch_ltc.sync(wait=True)
    assert seen.fallbacks == []
    assert len(seen.syncs) <= 1
    assert_same(result, expected, exact=False)


def test_split_chunk_unbind_and_iteration_give_views_with_gradients() -> None:
    def compute(device: str) -> list[Tensor]:
        x = torch.arange(12.0, device=device).view(3, 4).requires_grad_()
        pieces = [*x.split([1, 2]), *x.chunk(2, 1), *x.unbind(0), *x, *x.tensor_split(2)]
        total = sum((piece.sum() * weight for weight, piece in enumerate(pieces, 1)), torch.zeros((), device=device))
        total.backward()
        return [*pieces, total, x.grad]

    assert_like_eager(compute)


def test_iterating_unpacking_and_len_work() -> None:
    x = torch.arange(6.0, device="ltc").view(2, 3)
    first, second = x
    assert second.tolist() == [3.0, 4.0, 5.0]
    assert len(x) == 2
    assert [float(value) for value in first] == [0.0, 1.0, 2.0]
    assert list(map(tuple, x.tolist())) == [(0.0, 1.0, 2.0), (3.0, 4.0, 5.0)]
    for row in x:
        row.add_(1)
    assert x.tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]


RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: nn.LSTM(3, 4, 2, batch_first=True),
    "bidirectional LSTM": lambda: nn.LSTM(3, 4, bidirectional=True, batch_first=True),
    "LSTM with projection": lambda: nn.LSTM(3, 4, proj_size=2, batch_first=True),
    "GRU": lambda: nn.GRU(3, 4, 2, batch_first=True),
    "bidirectional GRU": lambda: nn.GRU(3, 4, bidirectional=True, batch_first=True),
    "RNN": lambda: nn.RNN(3, 4, batch_first=True),
    "RNN with relu": lambda: nn.RNN(3, 4, nonlinearity="relu", batch_first=True),
}


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_recurrent_layer_trains_as_on_the_cpu(name: str) -> None:
    def train(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = RECURRENT[name]().to(device)
        x = torch.linspace(-1, 1, 30).view(2, 5, 3).to(device).requires_grad_()
        out, _state = model(x)
        out.square().mean().backward()
        return [out, x.grad, *[parameter.grad for parameter in model.parameters()]]

    assert_like_eager(train, exact=False)


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_recurrent_layer_without_gradients_equals_eager_to_the_bit(name: str, mode: Callable[[], Any]) -> None:
    def run(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = RECURRENT[name]().to(device)
        x = torch.linspace(-1, 1, 30).view(2, 5, 3).to(device)
        with mode():
            out, state = model(x)
            return [out, *(state if isinstance(state, tuple) else [state])]

    for ours, theirs in zip(run("ltc"), run("cpu"), strict=True):
        assert ours.stride() == theirs.stride()
        torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=0)


@pytest.mark.parametrize("trained", [False, True])
def test_linear_of_an_input_in_another_order_is_eagers_in_inference_mode(trained: bool) -> None:
    # Eager folds the batch into the rows where the weight requires a gradient, else it may multiply batch by batch.
    def run(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        x, weight = torch.randn(5, 7, 33), torch.randn(17, 33)
        x, weight = x.to(device).transpose(0, 1), weight.to(device).requires_grad_(trained)
        made = []
        for _ in range(3):
            with torch.inference_mode():
                made += [nn.functional.linear(x, weight), nn.functional.linear(x, weight, weight[:, 0]), x @ weight.t()]
                made += [x @ x.mT, x[0] @ weight.t(), weight @ x[0, 0]]
        return made

    for ours, theirs in zip(run("ltc"), run("cpu"), strict=True):
        assert ours.stride() == theirs.stride()
        torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["LSTMCell", "GRUCell", "RNNCell"])
def test_recurrent_cell_equals_eager(name: str) -> None:
    def run(device: str) -> Any:
        torch.manual_seed(0)
        cell = getattr(nn, name)(3, 4).to(device)
        return cell(torch.linspace(-1, 1, 6).view(2, 3).to(device))

    assert_like_eager(run, exact=False)


def test_packed_sequences_equal_eager() -> None:
    # Packing reads the lengths.
    def run(device: str) -> Any:
        torch.manual_seed(0)
        model = nn.LSTM(3, 4, batch_first=True).to(device)
        x = torch.linspace(-1, 1, 30).view(2, 5, 3).to(device)
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3]), batch_first=True)
        out, _ = nn.utils.rnn.pad_packed_sequence(model(packed)[0], batch_first=True)
        return out

    with torch_ltc.config.settings.scope(fallback="allow"):
        assert_like_eager(run, exact=False)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "Adam one by one": lambda parameters: torch.optim.Adam(parameters, lr=0.01, foreach=False),
    "Adam with amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01),
    "Adadelta": lambda parameters: torch.optim.Adadelta(parameters),
}


@pytest.mark.blocking_tiers
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_training_step_is_one_program_and_compiles_once(name: str) -> None:
    # The original runs five graphs a step for Adam.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to("ltc")
    optimizer = OPTIMIZERS[name](model.parameters())
    inputs = lazy(torch.linspace(-1, 1, 12).view(3, 4))
    torch_ltc.sync(wait=True)
    steps = []
    for _ in range(6):
        with observe() as seen:
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        steps.append(seen)
    assert [seen.reasons for seen in steps[1:]] == [["OPTIMIZER"]] * 5
    assert [seen.fallbacks for seen in steps] == [[]] * 6
    assert len({seen.syncs[0].program for seen in steps[2:]}) == 1
    assert [len(seen.compiles) for seen in steps[3:]] == [0, 0, 0]


def test_logging_a_loss_adds_no_program() -> None:
    # A read of what the step's program has computed runs nothing.
    model = nn.Linear(4, 1).to("ltc")
    optimizer = torch.optim.Adam(model.parameters())
    inputs = lazy(torch.ones(3, 4))
    for _ in range(4):
        with observe() as seen:
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            assert loss.item() >= 0
    assert len(seen.syncs) == 1
    assert [read.reason for read in seen.reads] == ["item"]
