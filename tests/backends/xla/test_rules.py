"""Rules give what PyTorch's kernels give, at the places where the two libraries differ."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.backends.xla.rules import assert_as_eager, run_rule
from torch_ltc.config import settings

INF, NAN = math.inf, math.nan


def normal(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size)), dtype=dtype)


def whole(*values: int) -> Tensor:
    return torch.tensor(values)


def case(name: str, *args: Any, **kwargs: Any) -> Any:
    return pytest.param(name, args, kwargs, id=f"{name}-{len(args)}")


POINTWISE = [
    case("sign", torch.tensor([NAN, -0.0, -3.0, INF])),
    case("sign", whole(-4, 0, 3)),
    case("pow.Tensor_Tensor", whole(2, 1, -1, -1, 0, 3), whole(-1, -2, -3, -2, 2, 3)),
    case("pow.Tensor_Scalar", normal(4), 3),
    case("pow.Tensor_Scalar", normal(4).abs(), -0.5),
    case("pow.Scalar", 2.0, normal(4)),
    case(
        "div.Tensor_mode",
        torch.tensor([5.0, -5.0, 1.0, 0.0]),
        torch.tensor([3.0, 3.0, 0.0, 0.0]),
        rounding_mode="floor",
    ),
    case("div.Tensor_mode", whole(7, -7), whole(2, 2), rounding_mode="trunc"),
    case("div.Tensor", whole(7, -7), whole(2, 2)),
    case("remainder.Tensor", torch.tensor([7.5, -7.5]), torch.tensor([2.0, 2.0])),
    case("fmod.Tensor", whole(7, -7), whole(3, 3)),
    case("clamp", torch.tensor([NAN, -2.0, 2.0]), -1, 1),
    case("clamp.Tensor", whole(1, 5, 9), torch.tensor([2.5, 2.5, 2.5]), None),
    case("where.self", torch.tensor([True, False]), torch.tensor([1.0, 2.0]), torch.tensor(5, dtype=torch.int64)),
    case("add.Tensor", whole(1, 2), torch.tensor([0.5, 0.5]), alpha=3),
    case("sub.Tensor", normal(3), torch.tensor(2.0, dtype=torch.float64), alpha=0.5),
    case("bitwise_and.Tensor", torch.tensor([True, False]), torch.tensor([True, True])),
    case("round.decimals", torch.tensor([1.2345, 1234.5]), decimals=2),
    case("round.decimals", torch.tensor([1.2345, 1234.5]), decimals=-2),
    case("round", torch.tensor([0.5, 1.5, -2.5])),
    case("elu", normal(5), 0.7, 1.1, 0.9),
    case("gelu", normal(5)),
    case("gelu", normal(5), approximate="tanh"),
    case("leaky_relu", normal(5), 0.2),
    case("hardtanh", normal(5), -0.5, 0.3),
    case("ldexp.Tensor", normal(3), whole(2, -1, 0)),
    case("polar", normal(3).abs(), normal(3)),
    case("softshrink_backward", normal(5), normal(5), 0.5),
    case("frexp.Tensor", torch.tensor([0.0, 6.5, -0.1])),
    case("_to_copy", torch.tensor([1.7, -1.7]), dtype=torch.int64),
    case("_to_copy", torch.tensor([1 + 2j, 0j]).real, dtype=torch.bool),
    case("signbit", torch.tensor([-0.0, 0.0, -INF])),
    case("copysign.Tensor", torch.tensor([1.0, 2.0]), torch.tensor([-0.0, 0.0])),
]
REDUCTIONS = [
    case("sum.dim_IntList", whole(1, 2, 3).to(torch.int32), []),
    case("sum.dim_IntList", normal(2, 3, 4), [0, -1], True),
    case("sum.dim_IntList", normal(2, 3), [1], dtype=torch.float64),
    case("mean.dim", normal(2, 3, 4), [-2], True),
    case("var_mean.correction", normal(3, 4), [1], correction=0),
    case("var.correction", normal(3, 4)),
    case("any.dim", whole(0, 0, 2), 0),
    case("amax", torch.tensor([[1.0, NAN], [3.0, 2.0]]), [1]),
    case("max.dim", torch.tensor([[1.0, 5.0, 5.0]]), 1),
    case("argmin", normal(3, 4), None),
    case("linalg_vector_norm", normal(3, 4), 3.5, [1]),
    case("linalg_vector_norm", normal(3, 4), -INF, [0], True),
    case("linalg_vector_norm", normal(3, 4), 0, None),
    case("_softmax", normal(2, 3), 1, False),
    *(case(name, torch.tensor(x), 0, False) for name in ("_softmax", "_log_softmax") for x in (2.0, NAN, INF, -INF)),
    case("_safe_softmax", torch.tensor([[-INF, -INF], [0.0, -INF]]), 1),
    case("cumsum", whole(1, 2, 3), 0),
    case("cumprod", normal(2, 3), 1),
    case("cummax", torch.tensor([1.0, 3.0, 3.0, NAN, 5.0]), 0),
    case("cummin", whole(3, 1, 1, 2), 0),
    case("logcumsumexp", normal(2, 4), 1),
    case("sort", torch.tensor([3.0, NAN, 1.0, -INF]), 0, True),
    case("sort.stable", whole(2, 1, 2, 1), stable=True, dim=0, descending=False),
    case("topk", normal(3, 6), 2, 1, False),
    case("kthvalue", normal(3, 5), 2, 0, True),
    case("median.dim", torch.tensor([[3.0, 1.0, 2.0, 4.0], [1.0, NAN, 0.0, 2.0]]), 1),
    case("nanmedian.dim", torch.tensor([[3.0, 1.0, NAN, 4.0], [NAN, NAN, 0.0, 2.0]]), 1, True),
    case("mode", whole(3, 1, 3, 1, 2), 0),
    case("prod.dim_int", whole(2, 3, 4), 0),
]
SHAPES = [
    case("view", normal(2, 6), [3, -1]),
    case("view.dtype", normal(4), torch.int32),
    case("view.dtype", normal(4), torch.int16),
    case("view.dtype", torch.arange(8, dtype=torch.uint8), torch.int32),
    case("view.dtype", normal(4, dtype=torch.complex64), torch.float32),
    case("expand", normal(3, 1), [2, -1, 4]),
    case("slice.Tensor", normal(6), 0, -5, 2**63 - 1, 2),
    case("slice_scatter", normal(6, 2), normal(2, 2), 0, 1, 5, 2),
    case("diagonal", normal(2, 3, 4), 1, -1, 0),
    case("diagonal_scatter", normal(3, 4), normal(2), -1),
    case("split_with_sizes", normal(5, 2), [2, 0, 3]),
    case("cat", [normal(2, 3), torch.empty(0), whole(1, 2, 3).view(1, 3)]),
    case("roll", normal(3, 4), [1, -2], [0, 1]),
    case("roll", normal(3, 4), [5]),
    case("constant_pad_nd", normal(3, 4), [1, -1, 2, 0], 7.0),
    case("unfold", normal(7, 2), 0, 3, 2),
    case("replication_pad2d_backward", normal(1, 4, 6), normal(1, 2, 3), [1, 2, 2, 0]),
    case("as_strided", normal(3, 4), [2, 3], [1, 4], 1),
    case("as_strided", normal(8), [3, 4], [1, 1], 2),
    case("as_strided_scatter", normal(3, 4), normal(2, 2), [2, 2], [5, 1], 1),
    case("tril", normal(2, 3, 4), -1),
    case("triu", normal(3, 4), 1),
    case("repeat", normal(2), [2, 3]),
    case("arange.start_step", 1, 10, 3),
    case("arange.start_step", 0.1, 1.0, 0.3, dtype=torch.float64),
    case("full", [2, 2], 1.5, dtype=torch.float16),
    case("triu_indices", 3, 4, 1),
    case("tril_indices", 3, 0),
]
INDEXING = [
    case("index.Tensor", normal(3, 4, 5), [whole(0, -1), None, whole(2, 2)]),
    case("index_put", normal(3, 4), [None, whole(1, 1, 3)], normal(3, 3), True),
    case("index_put", normal(3, 4), [torch.tensor([True, False, True])], normal(2, 4)),
    case("index_put", normal(3), [torch.tensor([True, False, True])], torch.tensor(7.0)),
    case("index_put", torch.tensor([True, False]), [whole(0, 0)], torch.tensor([False, True]), True),
    case("gather", normal(3, 4), 1, whole(0, 3, 1).view(1, 3)),
    case("gather", torch.tensor(2.0), 0, torch.tensor(0)),
    case("scatter.src", normal(3, 4), 0, whole(2, 0).view(1, 2), normal(2, 3)),
    case("scatter.value", normal(3), 0, whole(2, 0), 9.0),
    case("scatter_add", normal(3), 0, whole(1, 1, 1), normal(3)),
    *(
        case("scatter_reduce.two", normal(4), 0, whole(1, 1, 3), normal(3), how, include_self=own)
        for how in ("sum", "prod", "mean", "amax", "amin")
        for own in (True, False)
    ),
    case("scatter_reduce.two", whole(5, 5, 5), 0, whole(1, 1), whole(-2, 1), "amax", include_self=False),
    case("index_add", normal(3, 4), 1, whole(0, 0), normal(3, 2), alpha=2),
    case("index_copy", normal(3, 4), 1, whole(0, 2), normal(3, 2)),
    case("index_copy", torch.tensor(2.0), 0, whole(0), torch.tensor(5.0)),
    case("take", normal(2, 3), whole(0, 5, -1)),
    case("index_reduce", normal(3, 4), 0, whole(2, 2), normal(2, 4), "mean"),
    case("index_fill.int_Scalar", normal(3, 4), 1, whole(0, 2), 5.0),
    case("embedding_dense_backward", normal(4, 3), whole(1, 0, 1, 2), 5, 2, True),
    case("put", normal(2, 3), whole(0, 5, 5), normal(3), True),
    case("masked_scatter", normal(2, 2), torch.tensor([[True, False], [True, True]]), normal(4)),
    case("searchsorted.Tensor", whole(1, 3, 3, 7), whole(0, 3, 9), right=True),
    case("searchsorted.Tensor", torch.sort(normal(2, 5))[0], normal(2, 3)),
    case("nonzero_static", whole(0, 3, 0, 4), size=3),
]
IMAGES = [
    case("max_pool2d_with_indices", normal(1, 2, 7, 6), [3, 2], [2, 2], [1, 1], [2, 1], True),
    case("max_pool2d_with_indices", torch.full((1, 1, 3, 3), -INF), [2, 2], [1, 1], [1, 1]),
    case("max_pool3d_with_indices", normal(1, 4, 5, 6), [2, 2, 2]),
    case("adaptive_max_pool2d", normal(2, 5, 7), [3, 2]),
    case("avg_pool2d", normal(1, 2, 7, 6), [3, 2], [2, 2], [1, 1], True, False),
    case("avg_pool2d", normal(1, 2, 7, 6), [3, 3], [2, 2], [1, 1], True, True),
    case("avg_pool2d", normal(1, 7, 6), [3, 3], [2, 2], [1, 1], False, True, 5),
    case("avg_pool2d_backward", normal(1, 1, 3, 3), normal(1, 1, 6, 6), [2, 2], [], [0, 0], False, True, None),
    case("avg_pool3d_backward", normal(1, 1, 2, 2, 2), normal(1, 1, 4, 4, 4), [2, 2, 2], [], [0], False, False, None),
    case("_adaptive_avg_pool2d", normal(2, 5, 7), [3, 2]),
    case("_adaptive_avg_pool2d_backward", normal(2, 3, 2), normal(2, 5, 7)),
    case("upsample_bilinear2d", normal(1, 2, 4, 5), [7, 3], False),
    case("upsample_bilinear2d", normal(1, 2, 4, 5), [7, 8], True),
    case("upsample_bicubic2d", normal(1, 2, 4, 5), [7, 3], False),
    case("upsample_trilinear3d_backward", normal(1, 1, 4, 4, 4), [4, 4, 4], [1, 1, 2, 3, 2], False),
    case("upsample_nearest2d_backward", normal(1, 1, 5, 7), [5, 7], [1, 1, 3, 3]),
    case("_upsample_bilinear2d_aa", normal(1, 1, 8, 9), [3, 4], False),
    *(
        case("grid_sampler_2d", normal(2, 3, 4, 5), normal(2, 3, 3, 2), m, p, a)
        for m in (0, 1, 2)
        for p in (0, 1, 2)
        for a in (True, False)
    ),
    case(
        "grid_sampler_3d_backward",
        normal(1, 2, 2, 2, 2),
        normal(1, 2, 3, 4, 3),
        normal(1, 2, 2, 2, 3),
        0,
        1,
        False,
        [True, True],
    ),
]
_CONVOLUTIONS = [
    # input, weight, stride, padding, dilation, transposed, output padding, groups
    (normal(2, 4, 9), normal(6, 2, 3), [2], [1], [2], False, [0], 2),
    (normal(1, 3, 7, 8), normal(4, 3, 3, 2), [2, 1], [1, 0], [1, 2], False, [0, 0], 1),
    (normal(2, 4, 5, 5), normal(4, 3, 3, 3), [2, 2], [1, 1], [1, 1], True, [1, 1], 2),
    (normal(1, 2, 4, 4, 4), normal(2, 3, 2, 2, 2), [1, 2, 1], [0, 1, 0], [1, 1, 1], True, [0, 1, 0], 1),
]
PRODUCTS = [
    case("mm", normal(3, 4), normal(4, 2)),
    case("bmm", normal(2, 3, 4), normal(2, 4, 2)),
    case("addbmm", normal(3, 2), normal(2, 3, 4), normal(2, 4, 2), beta=0.5, alpha=2),
    case("mm", whole(1, 2, 3, 4).view(2, 2), whole(5, 6, 7, 8).view(2, 2)),
    *(case("convolution", x, w, None, *rest) for x, w, *rest in _CONVOLUTIONS),
    case("convolution", normal(1, 2, 5), normal(3, 2, 3), normal(3), [1], [0], [1], False, [0], 1),
    case("_trilinear", normal(2, 3), normal(4, 3, 5), normal(2, 5), [1, 3], [0], [1, 2], [2, 3]),
    case("_fft_c2c", normal(3, 4, dtype=torch.complex64), [0, 1], 2, False),
    case("_fft_r2c", normal(3, 5), [1], 1, True),
    case("_fft_r2c", normal(3, 4), [0, 1], 0, False),
    case("_fft_c2r", normal(3, 3, dtype=torch.complex64), [0, 1], 2, 5),
]


def _positive(*size: int) -> Tensor:
    x = normal(*size)
    return x @ x.mT + torch.eye(size[-1])


_LU = torch.linalg.lu_factor(normal(4, 4))
LINALG = [
    case("linalg_cholesky_ex", _positive(2, 3, 3)),
    case("linalg_cholesky_ex", _positive(3, 3), upper=True),
    case("cholesky_solve", normal(3, 2), torch.linalg.cholesky(_positive(3, 3))),
    case("cholesky_inverse", torch.linalg.cholesky(_positive(3, 3))),
    case("linalg_solve_triangular", normal(2, 3, 3).triu() + torch.eye(3), normal(3, 2), upper=True),
    case("linalg_lu_factor_ex", normal(2, 4, 3)),
    case("linalg_lu", normal(3, 4)),
    case("lu_unpack", *_LU),
    *(case("linalg_lu_solve", *_LU, normal(4, 4), left=a, adjoint=b) for a in (True, False) for b in (True, False)),
    case("_linalg_det", normal(2, 4, 4)),
    case("_linalg_det", normal(4, 4).t()),
    case("_linalg_slogdet", normal(4, 4)),
    case("_linalg_solve_ex", normal(4, 4), normal(4)),
    case("_linalg_solve_ex", normal(4, 4), normal(2, 4), left=False),
    case("linalg_inv_ex", normal(2, 3, 3)),
    case("linalg_matrix_exp", normal(2, 3, 3)),
    case("linalg_householder_product", *torch.geqrf(normal(4, 3))),
    case("ormqr", *torch.geqrf(normal(4, 3)), normal(4, 2), True, True),
    case("linalg_pinv.atol_rtol_tensor", normal(4, 3)),
    case("linalg_pinv.atol_rtol_tensor", normal(3, 3), rtol=torch.tensor(0.9), hermitian=True),
]
_PLACES = torch.cat([torch.linspace(0.05, 30, 40), torch.tensor([1e-3, 49.9, 50.1, 100.0, 5000.0, INF])])
SPECIAL = [
    *(case(f"special_bessel_{n}", _PLACES) for n in ("j0", "j1", "y0", "y1")),
    case("special_bessel_j1", -_PLACES),
    *(case(f"special_modified_bessel_{n}", _PLACES) for n in ("k0", "k1")),
    *(case(f"special_scaled_modified_bessel_{n}", _PLACES) for n in ("k0", "k1")),
    *(
        case(f"special_{n}", torch.linspace(-0.9, 0.9, 8), torch.arange(8.0))
        for n in ("chebyshev_polynomial_t", "chebyshev_polynomial_w", "hermite_polynomial_he", "legendre_polynomial_p")
    ),
    case("special_shifted_chebyshev_polynomial_v", torch.linspace(0.1, 0.9, 8), torch.arange(8.0)),
    case("special_laguerre_polynomial_l", torch.linspace(0.0, 3.0, 8), torch.arange(8.0)),
    *(case("polygamma", n, torch.tensor([0.3, 1.0, 7.5, -0.4, -8.48])) for n in (0, 1, 2, 3)),
    case("special_zeta", torch.tensor([2.0, 3.0, 2.0]), torch.tensor([0.5, -2.5, -3.0])),
    case("digamma", torch.tensor([0.0, -0.0, 1.0, -1.5])),
    case("histc", torch.tensor([1.0, 2.0, 2.0, 3.0]), 4, 0, 0),
    *(case("_cdist_forward", normal(3, 2), normal(4, 2), p, None) for p in (0.0, 1.0, 2.0, 3.0, INF)),
]
EVERYTHING = POINTWISE + REDUCTIONS + SHAPES + INDEXING + IMAGES + PRODUCTS + LINALG + SPECIAL


@pytest.mark.filterwarnings("ignore:index_reduce.. is in beta")
@pytest.mark.parametrize(("name", "args", "kwargs"), EVERYTHING)
def test_rule_gives_what_the_kernel_gives(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    assert_as_eager(name, *args, **kwargs, tolerance=1e-4)


@pytest.mark.parametrize("given", _CONVOLUTIONS, ids=["grouped", "dilated", "transposed", "three dimensions"])
def test_convolution_has_eagers_gradients(given: tuple[Any, ...]) -> None:
    x, weight, *rest = given
    out = torch.ops.aten.convolution.default(x, weight, None, *rest)
    bias = out.shape[1]
    args = (torch.ones_like(out), x, weight, [bias], *rest, [True, True, True])
    assert_as_eager("convolution_backward", *args, tolerance=1e-4)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [1, 2, 4], ids=lambda heads: f"{heads} of 4 heads")
def test_attention_and_its_gradients(causal: bool, heads: int) -> None:
    query, key, value = normal(2, 4, 5, 8), normal(2, heads, 5, 8), normal(2, heads, 5, 8) * 0.5
    mask = None if causal else normal(5, 5)
    options: dict[str, Any] = {"attn_mask": mask, "scale": 0.3}
    assert_as_eager("_scaled_dot_product_flash_attention_for_cpu", query, key, value, 0.0, causal, **options)
    out, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, **options)
    args = (normal(2, 4, 5, 8), query, key, value, out, total, 0.0, causal)
    assert_as_eager("_scaled_dot_product_flash_attention_for_cpu_backward", *args, **options)


def test_a_row_that_sees_nothing_attends_to_nothing() -> None:
    query = normal(1, 1, 2, 4)
    mask = torch.tensor([[-INF, -INF], [0.0, -INF]])
    out, _ = run_rule("_scaled_dot_product_flash_attention_for_cpu", query, query, query, attn_mask=mask)
    assert out is not None
    assert out[0, 0, 0].tolist() == [0.0] * 4
    torch.testing.assert_close(out[0, 0, 1], query[0, 0, 0])


@pytest.mark.parametrize("name", ["_linalg_svd", "_linalg_eigh", "linalg_qr"])
def test_decompositions_multiply_back(name: str) -> None:
    """Their factors are unique up to signs, so that they are not compared with eager's."""
    x = _positive(3, 3)
    parts: list[Any] = run_rule(name, x)
    made = {
        "_linalg_svd": lambda u, s, vh: u * s @ vh,
        "_linalg_eigh": lambda values, v: v * values @ v.mT,
        "linalg_qr": lambda q, r: q @ r,
    }[name](*parts)
    torch.testing.assert_close(made, x, rtol=1e-4, atol=1e-4)


def test_memory_beyond_what_is_known_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="reaches memory"):
        run_rule("as_strided", normal(3), [2, 2], [2, 1], 0)


@pytest.mark.parametrize("values", [[0.0, -0.0, 2.0, -2.0, NAN, -INF], [0, 1, -1], [True, False], [1j, 0j, -1 + 0j]])
def test_angles_of_numbers_on_the_axis(values: list[Any]) -> None:
    (found,) = run_rule("angle", torch.tensor(values))
    torch.testing.assert_close(found, torch.tensor(values).angle(), equal_nan=True)


def test_angles_of_zeros_that_are_known_when_they_are_compiled() -> None:
    # Constants of one shape are folded, others not: those of this one are.
    with settings.scope(backend="xla", tiers="blocking"):
        for _ in range(3):
            places = torch.zeros(4, 3, 2, 3, dtype=torch.bool, device="ltc").max(0)[1]
            assert places.unfold(0, 2, 1).angle().cpu().count_nonzero().item() == 0


def test_half_precision_is_added_up_in_float32() -> None:
    x = torch.full((4096,), 0.01, dtype=torch.bfloat16)
    (total,) = run_rule("sum.dim_IntList", x, None)
    assert total is not None
    torch.testing.assert_close(total.to(torch.bfloat16), x.sum())
