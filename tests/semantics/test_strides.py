"""Sizes, strides, offsets and aliasing are eager's own."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import torch_ltc
from tests.semantics.support import assert_like_eager, assert_same, lazy, observe
from torch_ltc.config import settings

pytestmark = pytest.mark.usefixtures("no_fallback")


def test_contiguous_of_a_transpose_is_a_copy() -> None:
    # x.t().contiguous() must not alias x.
    x = lazy(torch.arange(6.0).view(2, 3))
    copy = x.t().contiguous()
    assert copy.stride() == (2, 1)
    copy.add_(100)
    x.mul_(2)
    assert x.tolist() == [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]]
    assert copy.tolist() == [[100.0, 103.0], [101.0, 104.0], [102.0, 105.0]]


def test_contiguous_of_a_contiguous_tensor_is_the_tensor() -> None:
    x = lazy(torch.zeros(2, 3))
    assert x.contiguous() is x


def test_channels_last_is_kept() -> None:
    def forward(device: str) -> list[Tensor]:
        x = torch.randn(2, 4, 5, 6).to(device, memory_format=torch.channels_last)
        weight = torch.randn(8, 4, 3, 3).to(device).to(memory_format=torch.channels_last)
        y = F.relu(F.conv2d(x, weight, padding=1))
        z = F.max_pool2d(y, 2)
        return [x, x + 1, x * 2.0, x.clone(), torch.empty_like(x).fill_(1), y, z, x.mean((2, 3), keepdim=True)]

    assert_like_eager(forward, exact=False)
    x = torch.ones(2, 4, 5, 6, device="ltc").contiguous(memory_format=torch.channels_last)
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert (x + x).stride() == (120, 1, 24, 4)
    assert x.contiguous().stride() == (120, 30, 6, 1)


def test_channels_last_survives_the_way_to_the_device_and_back() -> None:
    x = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    moved = x.to("ltc")
    assert moved.stride() == x.stride()
    assert moved.cpu().stride() == x.stride()


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t().view(6),
        lambda x: x.view(5),
        lambda x: x[:, :2].view(4),
        lambda x: x.expand(4, 2, 3).view(24),
        lambda x: x.view(-1, 4),
        lambda x: x.as_strided((9,), (1,), 0),
        lambda x: x.select(0, 2),
        lambda x: x.expand(4, 3),
        lambda x: x.squeeze(7),
        lambda x: x.unflatten(0, (3, 3)),
    ],
    ids=lambda view: None,
)
def test_an_invalid_view_raises_as_in_eager(view: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises((RuntimeError, IndexError)) as eager:
        view(torch.zeros(2, 3))
    x = lazy(torch.zeros(2, 3))
    with pytest.raises(eager.type) as ours:
        view(x).cpu()
    assert str(ours.value).split()[:3] == str(eager.value).split()[:3]
    assert (x + 1).sum().item() == 6.0


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.expand(3).add_(1),
        lambda x: x.expand(3).mul_(2),
        lambda x: x.expand(3).copy_(torch.ones(3, device=x.device)),
        lambda x: torch.add(x, 1, out=x.expand(3)),
        lambda x: torch.zeros(5, device=x.device).unfold(0, 3, 1).add_(1),
    ],
    ids=["add_", "mul_", "copy_", "out", "unfold"],
)
def test_writing_to_memory_that_overlaps_itself_raises_as_in_eager(write: Callable[[Tensor], Tensor]) -> None:
    # x.expand(3).add_(1)
    message = None
    try:
        write(torch.zeros(1))
    except RuntimeError as error:
        message = str(error).split(".")[0]
    x = torch.zeros(1, device="ltc")
    if message is None:
        assert_same(write(x), write(torch.zeros(1)))
        return
    with pytest.raises(RuntimeError) as caught:
        write(x)
    assert str(caught.value).split(".")[0] == message
    assert x.item() == 0.0


@pytest.mark.parametrize(
    "overlap", [lambda x: (x[1:], x[:-1]), lambda x: (x[:4], x[2:6])], ids=["shifted", "two apart"]
)
def test_an_in_place_call_on_partially_overlapping_operands_raises_as_in_eager(
    overlap: Callable[[Tensor], tuple[Tensor, Tensor]],
) -> None:
    for device in ("cpu", "ltc"):
        x = torch.arange(6.0, device=device)
        target, source = overlap(x)
        with pytest.raises(RuntimeError, match="unsupported operation"):
            target.add_(source)
        assert x.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "as_strided": lambda x: x.as_strided((3, 2), (1, 4), 1),
    "as_strided overlapping": lambda x: x.as_strided((4, 3), (1, 1)),
    "transpose": lambda x: x.transpose(0, 1),
    "permute": lambda x: x.view(2, 2, 3, 2).permute(3, 1, 0, 2),
    "slice with step": lambda x: x[::2, 1:6:3],
    "select": lambda x: x[1],
    "diagonal": lambda x: x.diagonal(1),
    "expand": lambda x: x[:, :1].expand(4, 5),
    "flip": lambda x: x.flip(0),
    "unfold": lambda x: x.unfold(1, 3, 2),
    "narrow": lambda x: x.narrow(1, 2, 3),
    "squeeze": lambda x: x.unsqueeze(1).squeeze(),
    "view dtype": lambda x: x.view(torch.int32),
    "view dtype smaller": lambda x: x.view(torch.int16),
    "real of complex": lambda x: torch.view_as_complex(x.view(4, 3, 2)).real,
    "conj": lambda x: torch.view_as_complex(x.view(4, 3, 2)).conj().mT,
    "imag of conj": lambda x: torch.view_as_complex(x.view(4, 3, 2)).conj().imag,
    "movedim": lambda x: x.view(2, 2, 6).movedim(0, 2),
    "split": lambda x: x.split([1, 3], 0),
    "chunk": lambda x: x.chunk(4, 1),
    "unbind": lambda x: x.unbind(1),
    "tensor_split": lambda x: x.tensor_split(4, 1),
    "hsplit": lambda x: x.hsplit(3),
    "t of slice plus one": lambda x: x[1:, ::2].t() + 1,
    "reshape that copies": lambda x: x.t().reshape(-1),
    "reshape that views": lambda x: x.reshape(2, 12),
    "swapaxes": lambda x: x.swapaxes(0, 1),
    "broadcast_to": lambda x: x[0].broadcast_to(3, 6),
    "ravel": lambda x: x.ravel(),
    "detach": lambda x: x.detach()[2:],
    "view_as": lambda x: x.view_as(torch.empty(6, 4, device=x.device)),
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.usefixtures("backend")
def test_view_has_the_shape_and_the_memory_of_eagers(name: str) -> None:
    # Sizes, strides, offset; what is written to the base is seen in the view, or not, as in eager.
    def look(device: str) -> Any:
        base = torch.arange(24.0).view(4, 6).to(device)
        found = VIEWS[name](base)
        views = list(found) if isinstance(found, (tuple, list)) else [found]
        shapes = [(tuple(v.size()), v.stride(), v.storage_offset(), v.is_conj(), v.is_neg()) for v in views]
        before = [v.clone() for v in views]
        base.mul_(-3)
        return shapes, before, views, base

    for _ in range(3):
        assert_like_eager(look)


@pytest.mark.parametrize("name", [name for name in VIEWS if "overlapping" not in name])
@pytest.mark.usefixtures("backend")
def test_writing_through_a_view_changes_its_base_as_in_eager(name: str) -> None:
    def write(device: str) -> Any:
        base = torch.arange(24.0).view(4, 6).to(device)
        found = VIEWS[name](base)
        for view in found if isinstance(found, (tuple, list)) else [found]:
            if 0 not in view.stride() and name != "unfold":
                view.add_(1)
        return base, found

    for _ in range(3):
        assert_like_eager(write)


def test_views_made_before_a_sync_still_alias_after_it() -> None:
    base = torch.zeros(4, 3, device="ltc")
    row, column = base[1], base[:, 2]
    torch_ltc.sync(wait=True)
    row.fill_(5)
    torch_ltc.sync(wait=True)
    column.add_(1)
    assert base.tolist() == [[0, 0, 1], [5, 5, 6], [0, 0, 1], [0, 0, 1]]
    assert row.tolist() == [5, 5, 6]


def test_a_view_keeps_the_memory_alive_and_the_base_may_die() -> None:
    view = (torch.arange(6.0, device="ltc") * 2)[2:4]
    assert view.storage_offset() == 2
    torch_ltc.sync(wait=True)
    assert view.tolist() == [4.0, 6.0]
    assert (view + 1).tolist() == [5.0, 7.0]


def test_slice_assignment() -> None:
    def assign(device: str) -> Tensor:
        x = torch.zeros(4, 5, device=device)
        x[1] = 7
        x[:, 2] = torch.arange(4.0, device=device)
        x[2:, ::2] += 1
        x[torch.tensor([0, 3], device=device), torch.tensor([4, 4], device=device)] = -1
        x[..., -1] *= 2
        x[0, 0] = torch.tensor(9.0)
        return x

    assert_like_eager(assign)


def test_in_place_views_change_the_tensor_itself() -> None:
    def change(device: str) -> list[Tensor]:
        x = torch.arange(12.0, device=device).view(3, 4)
        alias = x[0]
        x.t_()
        x.unsqueeze_(0)
        x.add_(1)
        y = torch.arange(6.0, device=device)
        y.resize_(2, 3)
        y.transpose_(0, 1)
        z = torch.ones(1, 3, 1, device=device).squeeze_()
        return [x, alias, y, y + 1, z]

    assert_like_eager(change)


def test_resize_grows_the_storage_and_keeps_what_was_there() -> None:
    for synced in (False, True):
        x = torch.arange(4.0, device="ltc") + 1
        alias = x[1:3]
        if synced:
            torch_ltc.sync(wait=True)
        x.resize_(2, 4)
        assert x.size() == (2, 4)
        x[1].fill_(9)
        assert x.tolist() == [[1.0, 2.0, 3.0, 4.0], [9.0] * 4]
        assert alias.tolist() == [2.0, 3.0]
        x.resize_(3)
        assert x.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_out_target_of_another_size_is_resized() -> None:
    def compute(device: str) -> list[Tensor]:
        a, b = torch.arange(6.0, device=device).view(2, 3), torch.ones(3, device=device)
        empty = torch.empty(0, device=device)
        wrong = torch.zeros(7, device=device)
        right = torch.zeros(3, 2, device=device).t()
        torch.add(a, b, out=empty)
        torch.mul(a, 2, out=wrong)
        torch.sub(a, b, out=right)
        values, places = torch.empty(0, device=device), torch.empty(0, dtype=torch.int64, device=device)
        torch.max(a, 1, out=(values, places))
        return [empty, wrong, right, values, places]

    assert_like_eager(compute)


def test_resizing_an_out_target_with_elements_warns_at_every_call() -> None:
    a = torch.ones(3, device="ltc")
    for _ in range(3):
        with pytest.warns(
            UserWarning, match=r"resized since it had shape \[2\].* required output shape \[3\]"
        ) as caught:
            torch.add(a, a, out=torch.ones(2, device="ltc"))
        assert caught[-1].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.add(a, a, out=torch.empty(0, device="ltc"))
        torch.eye(3, out=torch.ones(2, device="ltc"))


@pytest.mark.filterwarnings("ignore:torch.range is deprecated")
@pytest.mark.parametrize(
    "factory",
    [
        torch.arange,
        lambda n, out: torch.range(1, n, out=out),
        lambda n, out: torch.linspace(0, 1, n, out=out),
        torch.fft.fftfreq,
        torch.fft.rfftfreq,
    ],
    ids=["arange", "range", "linspace", "fftfreq", "rfftfreq"],
)
def test_a_factory_warns_of_a_target_that_it_resizes_as_eager_does(factory: Callable[..., Tensor]) -> None:
    texts = []
    for device in ("cpu", "ltc"):
        with warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter("always")
            factory(3, out=torch.ones(2, 4, device=device))
            factory(3, out=torch.ones(0, device=device))
        texts += [[str(one.message).split(" (Triggered")[0] for one in shown if one.filename == __file__]]
    assert sorted(texts[0]) == sorted(texts[1])


def test_out_target_aliasing_a_view_is_written_through() -> None:
    base = torch.zeros(2, 4, device="ltc")
    torch.add(torch.ones(4, device="ltc"), 2, out=base[1])
    assert base.tolist() == [[0.0] * 4, [3.0] * 4]


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("bound", [1, 2, 3, 4])
def test_a_resize_where_the_program_is_cut_leaves_other_tensors_as_they_are(bound: int) -> None:
    def compute(device: str) -> list[Tensor]:
        a = torch.arange(4.0, device=device)
        b = a * 2
        torch.zeros(2, 3, out=b.t())
        c = b.detach()
        c.resize_(3, 3)[0].fill_(5)
        d = a.view(2, 2).view(-1)
        torch.full((2,), 7, out=d.t())
        return [a, b, c[:1], d.view_as(d)]

    with settings.scope(pending_bound=bound):
        for _ in range(3):
            assert_like_eager(compute)


def test_set_makes_a_tensor_look_at_another_ones_memory() -> None:
    source = torch.arange(6.0, device="ltc")
    x = torch.zeros(2, device="ltc")
    x.set_(source)
    assert x.size() == (6,)
    x.add_(1)
    assert source.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    y = torch.empty(0, device="ltc").set_(source.untyped_storage(), 2, (2, 2), (2, 1))
    y.mul_(10)
    assert source.tolist() == [1.0, 2.0, 30.0, 40.0, 50.0, 60.0]
    assert y.tolist() == [[30.0, 40.0], [50.0, 60.0]]
    y.set_()
    assert y.numel() == 0


def test_data_assignment_changes_what_a_tensor_looks_at() -> None:
    parameter = torch.nn.Parameter(torch.ones(3, device="ltc"))
    used = parameter.detach() * 2
    fresh = torch.full((4,), 5.0, device="ltc")
    parameter.data = fresh
    assert parameter.size() == (4,)
    (parameter * parameter).sum().backward()
    assert parameter.grad.tolist() == [10.0] * 4
    parameter.data.add_(1)
    assert fresh.tolist() == [6.0] * 4
    assert used.tolist() == [2.0] * 3
    parameter.data = parameter.data[1:3]
    assert (parameter + 0).tolist() == [6.0, 6.0]


def test_a_chain_of_views_costs_the_same_for_each_view() -> None:
    # View chains are linear, in instructions and in time.
    def chain(length: int) -> int:
        x = torch.arange(6.0, device="ltc")
        torch_ltc.sync(wait=True)
        with observe() as seen:
            y = x
            for _ in range(length):
                y = y.view(2, 3).t().reshape(3, 2).t().view(6)
            y.add_(1)
            assert y.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
        assert x.tolist() == y.tolist()
        return seen.syncs[0].instructions

    short, long = chain(200), chain(2000)
    assert long <= 10 * short + 10


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular", "constant"])
@pytest.mark.parametrize("length", [4, 200])
def test_padding_keeps_the_memory_format_of_images(mode: str, length: int) -> None:
    def pad(device: str) -> tuple[Tensor, Tensor]:
        image = torch.ones(2, 3, length, 4).to(memory_format=torch.channels_last).to(device).requires_grad_()
        padded = F.pad(image, (1, 1, 1, 1), mode=mode)
        (gradient,) = torch.autograd.grad(padded.square().sum(), image)
        return padded, gradient

    for expected, actual in zip(pad("cpu"), pad("ltc"), strict=True):
        assert actual.stride() == expected.stride()
        assert torch.equal(actual.cpu(), expected)


@pytest.mark.parametrize("size", [(2, 64, 1, 1), (300, 64, 1, 1), (2, 64, 2, 2)])
@pytest.mark.parametrize("images", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("training", [True, False])
def test_images_whose_memory_format_is_ambiguous_have_the_bits_of_eager(size, images, training: bool) -> None:
    # A length of 1 suggests one memory format or another, by its stride; the next convolution chooses its kernel by it.
    def train(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        layers = (torch.nn.Conv2d(64, 64, 3, padding=1), torch.nn.BatchNorm2d(64), torch.nn.ReLU())
        model = torch.nn.Sequential(*layers, torch.nn.Conv2d(64, 64, 3, padding=1), torch.nn.BatchNorm2d(64))
        model = model.train(training).to(device).to(memory_format=torch.channels_last)
        image = torch.randn(size).to(memory_format=images).to(device).requires_grad_()
        result = torch.relu(model(image) + image)
        (result * torch.linspace(-1, 1, result.numel()).view(size).to(device)).sum().backward()
        return [result.detach(), image.grad, *(each.grad for each in model.parameters())]

    for expected, actual in zip(train("cpu"), train("ltc"), strict=True):
        assert actual.stride() == expected.stride()
        assert torch.equal(actual.cpu(), expected)


def test_strides_of_tensors_without_elements_are_those_of_the_cpu() -> None:
    def strides(device: str) -> list[tuple[int, ...]]:
        odd = torch.zeros(24, device=device).as_strided((0, 3, 3, 0), (1, 3, 2, 1))
        short = torch.zeros(0, device=device).as_strided((1, 0), (0, 1))
        return [made.stride() for made in (odd + 0.5, odd * 2, short.clone(), short.double(), short.relu())]

    # What is known is made in another way.
    for _ in range(3):
        assert strides("ltc") == strides("cpu")
        torch_ltc.sync()


def test_an_operand_is_no_target_of_another_size() -> None:
    for device in ("cpu", "ltc"):
        small, large = torch.ones(3, 4, device=device), torch.ones(2, 3, 4, device=device)
        with pytest.raises(RuntimeError, match=r"output with shape \[3, 4\] doesn't match the broadcast shape"):
            torch.mul(small, large, out=small)
        for empty in (large, large[:0]):
            with pytest.raises(RuntimeError, match=r"output with shape \[3, 4\] doesn't match the broadcast shape"):
                torch.where(empty > 0, empty, small, out=small)
        assert small.shape == (3, 4)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, out: torch.where(x > 0, x, out, out=out),
        lambda x, out: torch.floor_divide(x, out, out=out),
        lambda x, out: torch.ops.aten.mse_loss.out(x, out, 0, out=out),
        lambda x, out: torch.ops.aten.threshold_backward.grad_input(x, out, 1.5, grad_input=out),
    ],
    ids=["where", "floor_divide", "mse_loss", "threshold_backward"],
)
def test_elementwise_calls_that_are_not_tagged_so_refuse_to_resize_an_operand(call: Callable[..., object]) -> None:
    for device in ("cpu", "ltc"):
        with pytest.raises(RuntimeError, match=r"output with shape \[1\] doesn't match the broadcast shape"):
            call(torch.ones(4, 3, device=device), torch.ones(1, device=device))
