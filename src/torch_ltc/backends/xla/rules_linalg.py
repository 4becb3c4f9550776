"""Rules of matrix decompositions, solvers and Fourier transforms.

A matrix that cannot be decomposed is an error in eager. XLA computes nan instead; the operators that return `info`
give a non-zero one then, which PyTorch's own check after them turns into the error.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax

from torch_ltc.backends.xla.promotion import is_complex, widen
from torch_ltc.backends.xla.rules_matmul import matmul
from torch_ltc.backends.xla.table import Wants, add_rules, rule
from torch_ltc.program.spec import Spec, row_major


def adjoint(x: Array) -> Array:
    """The conjugated transposed matrix."""
    return jnp.conj(jnp.swapaxes(x, -2, -1))


def _info(x: Array) -> Array:
    """Zero for each matrix that could be decomposed."""
    failed = jnp.any(~jnp.isfinite(x), axis=(-2, -1)) if x.size else jnp.zeros(x.shape[:-2], jnp.bool_)
    return failed.astype(jnp.int32)


@rule("linalg_cholesky_ex")
def cholesky_ex(x: Array, *, upper: bool = False, check_errors: bool = False) -> tuple[Array, Array]:
    """Cholesky factor, and info."""
    if x.size == 0:
        return x, _info(x)
    lower = lax.linalg.cholesky(adjoint(x) if upper else x, symmetrize_input=False)
    return adjoint(lower) if upper else lower, _info(lower)


@rule("cholesky_solve")
def cholesky_solve(y: Array, factor: Array, upper: bool = False) -> Array:
    """The solution of `A x = y`, given the Cholesky factor of `A`."""
    lower, y = _same_batch(adjoint(factor) if upper else factor, y)
    return _triangular(lower, _triangular(lower, y, lower=True), lower=True, adjoint=True)


@rule("cholesky_inverse")
def cholesky_inverse(factor: Array, upper: bool = False) -> Array:
    """The inverse of `A`, given its Cholesky factor."""
    eye = jnp.broadcast_to(jnp.eye(factor.shape[-1], dtype=factor.dtype), factor.shape)
    triangle = jnp.triu(factor) if upper else jnp.tril(factor)
    return cholesky_solve(eye, triangle, upper)


def _same_batch(x: Array, y: Array) -> tuple[Array, Array]:
    batch = jnp.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    return jnp.broadcast_to(x, (*batch, *x.shape[-2:])), jnp.broadcast_to(y, (*batch, *y.shape[-2:]))


def _triangular(
    a: Array, b: Array, *, lower: bool, left: bool = True, adjoint: bool = False, unit: bool = False
) -> Array:
    if b.size == 0 or a.size == 0:
        return jnp.zeros_like(b)
    return lax.linalg.triangular_solve(
        a, b, left_side=left, lower=lower, transpose_a=adjoint, conjugate_a=adjoint, unit_diagonal=unit
    )


@rule("linalg_solve_triangular")
def solve_triangular(a: Array, b: Array, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Array:
    """The solution of `A x = b`, or of `x A = b`, for a triangular `A`."""
    a, b = _same_batch(a, b)
    return _triangular(a, b, lower=not upper, left=left, unit=unitriangular)


@rule("triangular_solve")
def triangular_solve(
    b: Array, a: Array, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[Array, Array]:
    """The solution of `A x = b` for a triangular `A`, and `A`."""
    a, b = _same_batch(a, b)
    # Conjugated twice: transposed.
    factor = jnp.conj(a) if transpose else a
    return _triangular(factor, b, lower=not upper, adjoint=transpose, unit=unitriangular), a


@rule("_linalg_eigh")
def eigh(x: Array, uplo: str = "L", compute_v: bool = True) -> tuple[Array, Array]:
    """Eigenvalues and eigenvectors of a Hermitian matrix."""
    if x.size == 0:
        return jnp.zeros(x.shape[:-1], x.real.dtype), x if compute_v else jnp.zeros((0,), x.dtype)
    vectors, values = lax.linalg.eigh(x, lower=uplo.upper() == "L", symmetrize_input=False)
    return values, vectors if compute_v else jnp.zeros((0,), x.dtype)


@rule("linalg_eig")
def eig(x: Array) -> tuple[Array, Array]:
    """Eigenvalues and eigenvectors. On the CPU only: XLA has no kernel for other devices."""
    values, vectors = jnp.linalg.eig(x)
    return values, vectors


add_rules(jnp.linalg.eigvals, ["_linalg_eigvals"])


@rule("_linalg_svd")
def svd(
    x: Array, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None
) -> tuple[Array, Array, Array]:
    """Singular value decomposition."""
    if not compute_uv:
        empty = jnp.zeros((0,), x.dtype)
        return empty, jnp.linalg.svd(x, compute_uv=False), empty
    u, s, vh = jnp.linalg.svd(x, full_matrices=full_matrices)
    return u, s, vh


@rule("linalg_qr")
def qr(x: Array, mode: str = "reduced") -> tuple[Array, Array]:
    """QR decomposition."""
    if mode == "r":
        return jnp.zeros((0,), x.dtype), jnp.linalg.qr(x, mode="r")
    q, r = jnp.linalg.qr(x, mode=mode)
    return q, r


@rule("geqrf")
def geqrf(x: Array) -> tuple[Array, Array]:
    """QR decomposition as Householder reflections: vectors below the diagonal, and their factors."""
    reflected, factors = jnp.linalg.qr(x, mode="raw")
    return jnp.swapaxes(reflected, -2, -1), factors


@rule("linalg_householder_product")
def householder_product(x: Array, factors: Array) -> Array:
    """The product of Householder reflections."""
    if x.size == 0 or factors.shape[-1] == 0:
        return jnp.broadcast_to(jnp.eye(x.shape[-2], x.shape[-1], dtype=x.dtype), x.shape)
    return lax.linalg.householder_product(x, factors)


@rule("ormqr")
def ormqr(x: Array, factors: Array, other: Array, left: bool = True, transpose: bool = False) -> Array:
    """A product with the orthogonal matrix that Householder reflections make."""
    rows = x.shape[-2]
    widened = jnp.concatenate([x, jnp.zeros((*x.shape[:-1], rows - x.shape[-1]), x.dtype)], axis=-1)
    q = householder_product(widened, factors)
    q = adjoint(q) if transpose else q
    return matmul(q, other) if left else matmul(other, q)


def lu_factor(x: Array) -> tuple[Array, Array, Array]:
    """LU decomposition in one matrix, the row exchanges counted from zero, and the permutation that they make."""
    if x.size == 0:
        count = min(x.shape[-2:])
        empty = jnp.zeros((*x.shape[:-2], count), jnp.int32)
        order = jnp.broadcast_to(jnp.arange(x.shape[-2], dtype=jnp.int32), (*x.shape[:-2], x.shape[-2]))
        return x, empty, order
    lu, pivots, permutation = lax.linalg.lu(x)
    return lu, pivots, permutation


@rule("linalg_lu_factor_ex")
def lu_factor_ex(x: Array, *, pivot: bool = True, check_errors: bool = False) -> tuple[Array, Array, Array]:
    """LU decomposition, row exchanges counted from one, and info."""
    lu, pivots, _ = lu_factor(x)
    return lu, pivots + 1, _singular(lu)


def _diagonal(x: Array) -> Array:
    return jnp.diagonal(x, axis1=-2, axis2=-1)


def _singular(lu: Array) -> Array:
    return jnp.any(_diagonal(lu) == 0, axis=-1).astype(jnp.int32)


@rule("linalg_lu")
def lu(x: Array, *, pivot: bool = True) -> tuple[Array, Array, Array]:
    """LU decomposition as three matrices."""
    packed, _, permutation = lu_factor(x)
    return _permutation_matrix(permutation, x.dtype), *_triangles(packed)


def _triangles(packed: Array) -> tuple[Array, Array]:
    rows, columns = packed.shape[-2:]
    count = min(rows, columns)
    lower = jnp.tril(packed[..., :, :count], -1) + jnp.eye(rows, count, dtype=packed.dtype)
    return lower, jnp.triu(packed[..., :count, :])


def _permutation_matrix(permutation: Array, dtype: object) -> Array:
    rows = permutation.shape[-1]
    chosen = permutation[..., None, :] == jnp.arange(rows)[:, None]
    return chosen.astype(dtype)


@rule("lu_unpack")
def lu_unpack(
    packed: Array, pivots: Array, unpack_data: bool = True, unpack_pivots: bool = True
) -> tuple[Array, Array, Array]:
    """The three matrices of an LU decomposition."""
    empty = jnp.zeros((0,), packed.dtype)
    lower, upper = _triangles(packed) if unpack_data else (empty, empty)
    if not unpack_pivots:
        return empty, lower, upper
    return _permutation_matrix(_permutation(pivots, packed.shape[-2]), packed.dtype), lower, upper


def _permutation(pivots: Array, rows: int) -> Array:
    if pivots.size == 0:
        return jnp.broadcast_to(jnp.arange(rows), (*pivots.shape[:-1], rows))
    return lax.linalg.lu_pivots_to_permutation((pivots - 1).astype(jnp.int32), rows)


@rule("linalg_lu_solve")
def lu_solve(packed: Array, pivots: Array, b: Array, *, left: bool = True, adjoint: bool = False) -> Array:
    """The solution of `A x = b` or `x A = b`, given the LU decomposition of `A`."""
    return _lu_solve(packed, _permutation(pivots, packed.shape[-2]), b, left, adjoint)


def _lu_solve(packed: Array, permutation: Array, b: Array, left: bool, adjointly: bool) -> Array:
    if not left:
        # x A = b is A' x' = b'.
        return adjoint(_lu_solve(packed, permutation, adjoint(b), True, not adjointly))
    packed, b = _same_batch(packed, b)
    order = jnp.broadcast_to(permutation, (*packed.shape[:-2], permutation.shape[-1]))
    if not adjointly:
        moved = jnp.take_along_axis(b, order[..., None], axis=-2)
        half = _triangular(packed, moved, lower=True, unit=True)
        return _triangular(packed, half, lower=False)
    half = _triangular(packed, b, lower=False, adjoint=True)
    solved = _triangular(packed, half, lower=True, adjoint=True, unit=True)
    back = jnp.argsort(order, axis=-1)
    return jnp.take_along_axis(solved, back[..., None], axis=-2)


@rule("_linalg_solve_ex")
def solve_ex(a: Array, b: Array, *, left: bool = True, check_errors: bool = False) -> tuple[Array, Array, Array, Array]:
    """The solution of `A x = b` or `x A = b`, the LU decomposition of `A`, and info."""
    lu, pivots, permutation = lu_factor(a)
    # A right side with one dimension less is a batch of vectors.
    vectors = b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1])
    right = b[..., None] if vectors else b
    solved = _lu_solve(lu, permutation, right, left or vectors, adjointly=False)
    return solved[..., 0] if vectors else solved, lu, pivots + 1, _singular(lu)


@rule("linalg_inv_ex")
def inv_ex(x: Array, *, check_errors: bool = False) -> tuple[Array, Array]:
    """The inverse, and info."""
    inverse = x if x.size == 0 else jnp.linalg.inv(x)
    return inverse, _info(inverse)


def _determined(x: Array, spec: Spec) -> tuple[Array, Array, Array, Array]:
    """The diagonal of the LU decomposition, the sign of its row exchanges, and the decomposition itself.

    PyTorch decomposes the transposed matrix where that saves a copy; the derivative knows.
    """
    wanted = row_major(spec.size)
    in_rows = all(n <= 1 or s == w for n, s, w in zip(spec.size, spec.stride, wanted, strict=True)) or 0 in spec.size
    lu, pivots, _ = lu_factor(jnp.swapaxes(x, -2, -1) if in_rows and not is_complex(x) else x)
    moved = jnp.sum(pivots != jnp.arange(pivots.shape[-1]), axis=-1)
    return _diagonal(lu), jnp.where(moved % 2 == 0, 1, -1).astype(x.dtype), lu, pivots + 1


@rule("_linalg_det", wants=Wants.SPEC)
def det(x: Array, *, spec: Spec) -> tuple[Array, Array, Array]:
    """The determinant, and the LU decomposition."""
    diagonal, sign, lu, pivots = _determined(x, spec)
    return sign * jnp.prod(diagonal, axis=-1), lu, pivots


@rule("_linalg_slogdet", wants=Wants.SPEC)
def slogdet(x: Array, *, spec: Spec) -> tuple[Array, Array, Array, Array]:
    """Sign and logarithm of the determinant, and the LU decomposition."""
    diagonal, sign, lu, pivots = _determined(x, spec)
    size = jnp.abs(diagonal)
    phase = diagonal / size if is_complex(x) else jnp.sign(diagonal)
    return sign * jnp.prod(phase, axis=-1), jnp.sum(jnp.log(size), axis=-1), lu, pivots


@rule("linalg_matrix_exp")
def matrix_exp(x: Array) -> Array:
    """The matrix exponential."""
    return x if x.size == 0 else jax.scipy.linalg.expm(widen(x))


# PyTorch's numbers of normalizations: none, by the square root of the count, by the count. JAX names them by direction.
_FORWARD, _INVERSE = ("backward", "ortho", "forward"), ("forward", "ortho", "backward")


@rule("_fft_c2c")
def c2c(x: Array, dims: Sequence[int], normalization: int, forward: bool) -> Array:
    """Fourier transform, complex to complex."""
    transform, norms = (jnp.fft.fftn, _FORWARD) if forward else (jnp.fft.ifftn, _INVERSE)
    return transform(x, axes=tuple(dims), norm=norms[normalization]) if dims else x


@rule("_fft_r2c")
def r2c(x: Array, dims: Sequence[int], normalization: int, onesided: bool) -> Array:
    """Fourier transform, real to complex; `onesided` leaves out the half that follows from the other."""
    transform = jnp.fft.rfftn if onesided else jnp.fft.fftn
    return transform(x, axes=tuple(dims), norm=_FORWARD[normalization])


@rule("_fft_c2r")
def c2r(x: Array, dims: Sequence[int], normalization: int, last_dim_size: int) -> Array:
    """Fourier transform, complex to real."""
    *others, last = dims
    x = c2c(x, others, normalization, forward=False)
    return jnp.fft.irfft(x, n=last_dim_size, axis=last, norm=_INVERSE[normalization])
