"""Sparse and nested tensors, which are on the device, and quantized ones, which are on the physical device."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from tests.semantics.support import assert_same, lazy
from torch_ltc.config import settings
from torch_ltc.errors import DataAccessError, UnsupportedLayoutError
from torch_ltc.native.library import extension

pytestmark = [
    pytest.mark.usefixtures("allowed_fallback"),
    pytest.mark.filterwarnings("ignore:Sparse [A-Z]* tensor support is in beta state:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*quantize_per_tensor:UserWarning"),
]


@pytest.fixture
def allowed_fallback() -> Iterator[None]:
    """Calls that mix layouts run eagerly."""
    with settings.scope(fallback="allow"):
        yield


PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": lambda sparse, dense: sparse @ dense,
    "mm": torch.mm,
    "sparse.mm": torch.sparse.mm,
    "addmm": lambda sparse, dense: torch.addmm(dense, sparse, dense),
    "mv": lambda sparse, dense: sparse @ dense[0],
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize("moved", [False, True], ids=["on the CPU", "moved"])
def test_sparse_times_dense(name: str, layout: torch.layout, moved: bool) -> None:
    dense = torch.randn(4, 4)
    sparse = torch.eye(4).mul(3).to_sparse(layout=layout)
    ours = PRODUCTS[name](sparse.to("ltc") if moved else sparse, lazy(dense))
    assert ours.device.type == "ltc"
    assert_same(ours, PRODUCTS[name](sparse, dense))


def test_a_compressed_sparse_tensor_made_of_device_tensors() -> None:
    parts = [torch.tensor([0, 1, 2]), torch.tensor([1, 0]), torch.tensor([2.0, 3.0])]
    sparse = torch.sparse_csr_tensor(*(lazy(part) for part in parts), size=(2, 2))
    assert_same(sparse @ lazy(torch.eye(2)), torch.sparse_csr_tensor(*parts, size=(2, 2)).to_dense())
    assert "2., 3." in repr(sparse)


def test_quantized_tensors_live_on_the_physical_device() -> None:
    x = torch.linspace(-1, 1, 5)
    for quantize in (
        lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
        lambda t: torch.quantize_per_tensor(t, torch.tensor(0.1), torch.tensor(0), torch.quint8),
    ):
        ours = quantize(lazy(x))
        assert ours.device.type == "cpu"
        assert_same(ours.dequantize(), quantize(x).dequantize())


def assert_same_sparse(ours: Tensor, expected: Tensor) -> None:
    assert ours.device.type == "ltc"
    assert ours.layout is expected.layout is torch.sparse_coo
    assert ours.is_coalesced() == expected.is_coalesced()
    assert (ours.sparse_dim(), ours.dense_dim()) == (expected.sparse_dim(), expected.dense_dim())
    assert_same(ours._indices(), expected._indices())
    assert_same(ours._values(), expected._values())


@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
def test_gradients_of_embeddings_may_be_sparse(layer: type[nn.Module]) -> None:
    table = layer(5, 3, sparse=True)
    ours = copy.deepcopy(table).to("ltc")
    index = torch.tensor([[1, 2], [1, 4]])
    for _ in range(2):
        table(index).sum().backward()
        ours(lazy(index)).sum().backward()
        assert_same_sparse(ours.weight.grad, table.weight.grad)
    for module in (table, ours):
        torch.optim.SparseAdam(module.parameters(), lr=0.1).step()
    assert_same(ours.weight, table.weight)


def sparse_pair() -> tuple[Tensor, Tensor]:
    indices, values = torch.tensor([[0, 2, 2], [1, 0, 0]]), torch.tensor([2.0, 3.0, 4.0])
    ours = torch.sparse_coo_tensor(lazy(indices), lazy(values), (3, 3))
    return ours, torch.sparse_coo_tensor(indices, values, (3, 3))


SPARSE: dict[str, Callable[[Tensor], Tensor]] = {
    "clone": torch.clone,
    "coalesce": lambda t: t.coalesce(),
    "in place": lambda t: t.mul_(2),
    "added in place": lambda t: t.add_(t.clone()),
    "values written": lambda t: (t._values().mul_(5), t)[1],
    "dtype": lambda t: t.to(torch.float64),
    "transpose": lambda t: t.transpose(0, 1),
    "resized": lambda t: t.sparse_resize_((4, 4), 2, 0),
    "zeroed": lambda t: t.zero_(),
    "divided": lambda t: t / 4,
    "copied": lambda t: torch.zeros_like(t).copy_(t),
}


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_tensors_of_the_device(name: str) -> None:
    for ours, expected in (sparse_pair(), (sparse_pair()[1].to("ltc"), sparse_pair()[1])):
        assert_same_sparse(SPARSE[name](ours), SPARSE[name](expected))
        assert_same(ours.to_dense(), expected.to_dense())
        assert_same(ours.cpu().to_dense(), expected.to_dense())


@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc])
def test_compressed_sparse_tensors_of_the_device(layout: torch.layout) -> None:
    x = torch.eye(4).mul(3)
    blocks = (2, 2) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
    ours, expected = (t.to_sparse(layout=layout, blocksize=blocks) for t in (lazy(x), x))
    for sparse in (ours, expected.to("ltc"), ours.clone(), ours.to(torch.float64).to(torch.float32)):
        assert sparse.device.type == "ltc"
        assert sparse.layout is layout
        assert_same(sparse.values(), expected.values())
        assert_same(sparse.to_dense(), x)
        assert_same(sparse.cpu().to_dense(), x)


@pytest.mark.parametrize("reduce", ["sum", "mean", "amax", "amin"])
def test_gradients_of_reducing_sparse_products(reduce: str) -> None:
    dense, eye = torch.randn(3, 2), torch.eye(3).to_sparse_csr()
    grads = []
    for sparse, x in ((eye.to("ltc"), lazy(dense)), (eye, dense)):
        made = torch.sparse.mm(sparse.requires_grad_(), x.detach().requires_grad_(), reduce)
        grads.append(torch.autograd.grad(made.square().sum(), sparse)[0].values())
    assert_same(*grads)


def test_views_of_sparse_tensors_are_those_of_the_cpu() -> None:
    ours, expected = sparse_pair()
    assert_same_sparse(ours.unsqueeze(0), expected.unsqueeze(0))
    assert_same_sparse(torch.cat([ours, ours]), torch.cat([expected, expected]))


def test_a_sparse_tensor_of_the_device_goes_through_autograd() -> None:
    x = torch.eye(3)
    results = []
    for leaf in (lazy(x).requires_grad_(), x.clone().requires_grad_()):
        (leaf.to_sparse() * 2).to_dense().square().sum().backward()
        results.append(leaf.grad)
    assert_same(*results)
    ours, expected = sparse_pair()
    assert_same(torch.ones(3, 3, device="ltc").add_(ours), torch.ones(3, 3).add_(expected))


# ---- nested tensors -------------------------------------------------------------------------------------------------


def nested(device: str, *rows: int, **options: Any) -> Tensor:
    """A nested tensor of rows of three numbers."""
    parts = [torch.arange(3.0 * count).view(count, 3) for count in rows]
    return torch.nested.nested_tensor(parts, device=device, **options)


def written(device: str) -> list[Tensor]:
    x = nested(device, 2, 4)
    first, alias = x[0], x.transpose(1, 2)
    first.fill_(7)
    x.mul_(2)
    x.unbind()[1].add_(1)
    return [x, first, alias]


def gradients(device: str) -> list[Tensor | None]:
    x, weight = nested(device, 2, 1, requires_grad=True), torch.ones(4, 3, device=device, requires_grad=True)
    out = torch.nn.functional.linear(x * x, weight).softmax(-1)
    padded = torch.nested.to_padded_tensor(out, 0.5)
    (padded * padded.cumsum(1)).sum().backward()
    return [x.grad, weight.grad]


def attention(device: str) -> Tensor:
    x = torch.nested.nested_tensor([torch.ones(2, 2, 3), torch.ones(4, 2, 3)], device=device)
    x = x.transpose(1, 2).contiguous()
    return torch.nn.functional.scaled_dot_product_attention(x, x, x)


def stored(device: str) -> list[Tensor]:
    x, file = nested(device, 2, 4), io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return [torch.load(file, weights_only=False), x.clone(), x.double(), x.to("cpu").to(device), x.to("cpu")]


def from_mask(device: str) -> list[Tensor]:
    mask = torch.tensor([[True, True], [True, False]], device=device)
    x = torch._nested_tensor_from_mask(torch.arange(12.0, device=device).view(2, 2, 3), mask)
    return [x, torch.nested.to_padded_tensor(x, 0.0, (2, 4, 3))]


NESTED: dict[str, Callable[[str], Any]] = {
    "made of parts": lambda device: torch.nested.as_nested_tensor(
        [torch.ones(2, 3, device=device), written(device)[1]]
    ),
    "made of none": lambda device: [torch.nested.nested_tensor([], device=device), nested(device, 0, 2)],
    "pointwise": lambda device: [
        f(nested(device, 2, 4)) for f in (torch.abs, torch.sin, lambda x: x + x, lambda x: x * 2)
    ],
    "reduced": lambda device: nested(device, 2, 4).sum(-1, keepdim=True),
    "multiplied": lambda device: nested(device, 2, 4) @ nested(device, 2, 4).transpose(1, 2),
    "views": lambda device: [*nested(device, 2, 4, 1).chunk(3, -1), nested(device, 2, 4).view(2, -1, 3, 1)],
    "written": written,
    "gradients": gradients,
    "attention": attention,
    "stored": stored,
    "from a mask": from_mask,
    "dropout": lambda device: torch.nn.functional.dropout(nested(device, 30, 20)),
    "printed": lambda device: repr(nested(device, 2, 1)).replace(", device='ltc:0'", ""),
}


def parts_of(results: Any) -> list[Any]:
    """The results, nested tensors as lists of their parts."""
    leaves = pytree.tree_leaves(results)
    return [list(leaf.unbind()) if isinstance(leaf, Tensor) and leaf.is_nested else leaf for leaf in leaves]


needs_extension = pytest.mark.skipif(extension is None, reason="nested tensors need the extension")


@needs_extension
@pytest.mark.parametrize("name", NESTED)
def test_nested_tensors_of_the_device(name: str) -> None:
    torch.manual_seed(0)
    expected = NESTED[name]("cpu")
    for _ in range(2):
        torch.manual_seed(0)
        got = NESTED[name]("ltc")
        assert_same(parts_of(got), parts_of(expected))
        for ours, theirs in zip(pytree.tree_leaves(got), pytree.tree_leaves(expected), strict=True):
            if isinstance(theirs, Tensor):
                assert ours.is_nested == theirs.is_nested
    if name != "stored":
        assert all(leaf.device.type == "ltc" for leaf in pytree.tree_leaves(got) if isinstance(leaf, Tensor))


@needs_extension
def test_views_of_nested_tensors_are_recorded() -> None:
    with settings.scope(fallback="error"):
        x = torch.nested.as_nested_tensor([torch.ones(2, 3, device="ltc"), torch.ones(1, 3, device="ltc")])
        first, second = x.unbind()
        x[1].add_(first[0])
        assert second.tolist() == [[2.0, 2.0, 2.0]]


@needs_extension
def test_nested_tensors_of_two_devices_are_refused() -> None:
    with pytest.raises(RuntimeError, match="on the same device"):
        nested("cpu", 2, 4) + nested("ltc", 2, 4)


@pytest.mark.skipif(extension is not None, reason="with the extension they work")
def test_without_the_extension_nested_tensors_are_refused_with_the_way_round() -> None:
    x = torch.ones(2, 3, device="ltc")
    for make in (
        lambda: torch.nested.as_nested_tensor([x[0], x[1]]),
        lambda: torch._nested_tensor_from_mask(x[None], torch.ones(1, 2, dtype=torch.bool, device="ltc")),
    ):
        with pytest.raises(UnsupportedLayoutError, match=r"layout=torch\.jagged"):
            make()


def test_jagged_tensors_are_on_the_device() -> None:
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], device="ltc", layout=torch.jagged)
    assert jagged.values().sum().item() == 5


@pytest.mark.parametrize("backend", ["torchscript", "interpreter"])
def test_attention_of_jagged_tensors_read_inside_of_their_class(backend: str) -> None:
    def attend(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        parts = [torch.randn(3, 2, 4).to(device), torch.randn(5, 2, 4).to(device)]
        jagged = torch.nested.as_nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
        # Unbinding reads the lengths, which runs the program while the class of jagged tensors sees no calls.
        return list(F.scaled_dot_product_attention(jagged, jagged, jagged).transpose(1, 2).unbind())

    with settings.scope(backend=backend, hot_after=2):
        for _ in range(3):
            assert_same(attend("ltc"), attend("cpu"))


@pytest.mark.parametrize("total", [4, None])
def test_padded_sequences_become_jagged(total: int | None) -> None:
    def pack(device: str, last: int = 4) -> Tensor:
        offsets = torch.tensor([0, 1, last]).to(device)
        padded = torch.arange(12.0).view(2, 3, 2).to(device)
        return torch.ops.aten._padded_dense_to_jagged_forward(padded, [offsets], total)

    assert_same(pack("ltc"), pack("cpu"))
    if total is not None:
        with pytest.raises(RuntimeError, match="final offset should match total_L"):
            pack("ltc", 3).cpu()


def test_sharing_with_other_processes_is_refused_with_the_way_round() -> None:
    x = torch.ones(2, device="ltc")
    for share in (x.share_memory_, nn.Linear(2, 2).to("ltc").share_memory):
        with pytest.raises(DataAccessError, match=r"tensor\.cpu\(\) between processes"):
            share()
    assert pickle.loads(pickle.dumps(x)).tolist() == [1.0, 1.0]
    # On its way to another process it is a copy.
    assert pickle.loads(ForkingPickler.dumps(x)).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
def test_a_transformer_encoder_with_a_padding_mask(grad: Callable[[], torch.no_grad], norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=norm_first)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    ours = copy.deepcopy(encoder).to("ltc")
    x, padding = torch.randn(2, 5, 8), torch.tensor([[False, False, False, True, True], [False] * 5])
    with grad(), settings.scope(fallback="error"):
        expected = encoder(x, src_key_padding_mask=padding)
        got = ours(lazy(x), src_key_padding_mask=lazy(padding))
    assert_same(got, expected)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("mask_check", [False, True])
def test_padded_positions_of_an_evaluated_transformer_encoder_are_zero(activation: str, mask_check: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, activation=activation)
    encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(8), mask_check=mask_check).eval()
    ours = copy.deepcopy(encoder).to("ltc")
    x, left = torch.randn(2, 5, 8), torch.tensor([[False, False, False, True, True], [False] * 4 + [True]])
    with torch.inference_mode():
        for padding in (left, left.flip(1), torch.zeros(2, 5).masked_fill(left, -torch.inf), left[:1].expand(2, 5)):
            expected = encoder(x, src_key_padding_mask=padding)
            assert_same(ours(lazy(x), src_key_padding_mask=lazy(padding)), expected)


def test_a_padded_encoder_with_hooks_is_refused() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).to("ltc").eval()
    encoder.layers[1].norm1.register_forward_hook(lambda *_: None)
    x, padding = torch.randn(2, 5, 8, device="ltc"), torch.zeros(2, 5, dtype=torch.bool, device="ltc")
    with torch.no_grad(), pytest.raises(UnsupportedLayoutError, match="enable_nested_tensor=False"):
        encoder(x, src_key_padding_mask=padding)


@pytest.mark.parametrize("need_weights", [False, True])
def test_attention_on_its_fast_path_with_masks(need_weights: bool) -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    ours = copy.deepcopy(attention).to("ltc")
    x, padding = torch.randn(2, 5, 8), torch.tensor([[False, False, False, True, True], [False] * 5])
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    device_x = lazy(x)
    with torch.no_grad():
        for mask in (None, causal):
            expected = attention(x, x, x, padding, need_weights, mask)
            got = ours(device_x, device_x, device_x, lazy(padding), need_weights, None if mask is None else lazy(mask))
            assert_same(got[0], expected[0])
            if need_weights:
                assert_same(got[1], expected[1])


@pytest.mark.parametrize("need_weights", [False, True])
def test_the_operator_of_attention_returns_weights_where_they_are_asked_for(need_weights: bool) -> None:
    tensors = [torch.randn(2, 3, 8), torch.randn(24, 8), torch.randn(24), torch.randn(8, 8), torch.randn(8)]

    def attend(x: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor | None]:
        return torch.ops.aten._native_multi_head_attention(x, x, x, 8, 2, *weights, need_weights=need_weights)

    ours, expected = attend(*map(lazy, tensors)), attend(*tensors)
    assert_same(ours[0], expected[0])
    assert (ours[1] is None) == (expected[1] is None) != need_weights


_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda x: x,
    "coo": lambda x: x.to_sparse(),
    "csr": lambda x: x.to_sparse_csr(),
    "csc": lambda x: x.to_sparse_csc(),
    "bsr": lambda x: x.to_sparse_bsr((2, 3)),
    "bsr of elements": lambda x: x.to_sparse_bsr((1, 1)),
}


@pytest.mark.parametrize("target", _LAYOUTS)
@pytest.mark.parametrize("source", _LAYOUTS)
@pytest.mark.parametrize("devices", [("ltc", "ltc"), ("cpu", "ltc"), ("ltc", "cpu")])
def test_a_copy_from_layout_to_layout_is_that_of_the_cpu(target: str, source: str, devices: tuple[str, str]) -> None:
    def outcome(devices: tuple[str, str], given: Tensor) -> Any:
        into = _LAYOUTS[target](torch.diag(torch.tensor([1.0, 0.0, 2.0, 0.0, 0.0, 3.0]))).to(devices[0])
        values = None if target in ("dense", "coo") else into.values()
        try:
            assert into.copy_(_LAYOUTS[source](given).to(devices[1])) is into
        except RuntimeError as error:
            return str(error).replace("torch.ltc.", "torch.")
        return into.cpu().to_dense().tolist(), None if values is None else values.cpu().tolist()

    base = torch.diag(torch.tensor([4.0, 0.0, 5.0, 0.0, 0.0, 6.0]))
    for given in (base, base.double(), base + torch.eye(6), base[:4], base.flip(0)):
        assert outcome(devices, given) == outcome(("cpu", "cpu"), given)


_WRITES: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "add(out=)": lambda a, b, out: torch.add(a, b, out=out),
    "mul(out=)": lambda a, b, out: torch.mul(a, b, out=out),
    "add_": lambda a, b, out: a.add_(b),
    "mul_ by a number": lambda a, b, out: a.mul_(2),
    "sin_": lambda a, b, out: a.sin_(),
    "resize_ to fewer rows": lambda a, b, out: b.resize_(2, 6),
    "resize_ to more rows": lambda a, b, out: a.resize_(8, 6),
    "zero_": lambda a, b, out: a.zero_(),
}


@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr"])
@pytest.mark.parametrize("write", _WRITES)
def test_sparse_targets_are_written_as_on_the_cpu(layout: str, write: str) -> None:
    def outcome(device: str, elements: Tensor) -> Any:
        a, b = torch.eye(6), torch.arange(36.0).view(6, 6)
        tensors = [_LAYOUTS[layout](dense).to(device) for dense in (a, b, elements)]
        try:
            result = _WRITES[write](tensors[0], tensors[1], tensors[2])
            which = [result is each for each in tensors]
            return which, [(tuple(each.shape), each._nnz(), each.to_dense().tolist()) for each in tensors]
        except (RuntimeError, IndexError) as error:
            return type(error)

    for elements in (torch.zeros(6, 6), torch.eye(6), torch.ones(6, 6)):
        assert outcome("ltc", elements) == outcome("cpu", elements)


@pytest.mark.parametrize(
    "indices", [[[0, 1, 1], [2, 0, 2]], [[0, 1, 0], [2, 0, 2]], [[0, 0, 1], [1, 1, 0]], [[0, 1, 7], [2, 0, 2]]]
)
def test_indices_that_are_said_to_be_coalesced_are_checked_as_on_the_cpu(indices: list[list[int]]) -> None:
    def outcome(device: str, make: Callable[..., Any]) -> Any:
        places = torch.tensor(indices, device=device)
        values = torch.tensor([3.0, 4.0, 5.0], device=device, requires_grad=True)
        try:
            made = make(places, values, (2, 3), is_coalesced=True)
        except RuntimeError as error:
            return str(error)
        if made is None:
            return None
        (made.to_dense() ** 2).sum().backward()
        return made.is_coalesced(), made.detach().to_dense().tolist(), values.grad.tolist()  # type: ignore[union-attr]

    checked = partial(torch.sparse_coo_tensor, check_invariants=True)
    for make in (checked, torch._validate_sparse_coo_tensor_args):  # type: ignore[attr-defined]
        assert outcome("ltc", make) == outcome("cpu", make)
    assert not torch.sparse.check_sparse_tensor_invariants.is_enabled()


@pytest.mark.filterwarnings("ignore:Sparse [A-Z]* tensor support is in beta state")
def test_the_indices_of_a_compressed_tensor_are_checked_at_the_call() -> None:
    with settings.scope(fallback="allow"), torch.sparse.check_sparse_tensor_invariants():
        rows, columns, values = lazy(torch.tensor([0, 2, 3]), torch.tensor([0, 2, 1]), torch.tensor([1.0, 2.0, 3.0]))
        made = torch.sparse_csr_tensor(rows, columns, values, (2, 3))
        assert made.to_dense().tolist() == [[1.0, 0.0, 2.0], [0.0, 3.0, 0.0]]
        with pytest.raises(RuntimeError, match=r"== nnz` is not satisfied"):
            torch.sparse_csr_tensor(lazy(torch.tensor([0, 2, 5])), columns, values, (2, 3))
