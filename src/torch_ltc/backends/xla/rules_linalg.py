"""Rules of matrix decompositions and solvers.

A matrix that cannot be decomposed is an error in eager. XLA computes nan instead; the operators that return `info`
give a non-zero one then, which PyTorch's own check after them turns into the error.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from torch_ltc.backends.xla.promotion import is_complex, widen
from torch_ltc.backends.xla.rules_matmul import matmul
from torch_ltc.backends.xla.table import Wants, rule
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
    factor = cholesky(x, upper)
    return factor, _info(factor)


def cholesky(x: Array, upper: bool) -> Array:
    """Cholesky factor. No rule of its own: the operator of this name raises, which XLA does not."""
    if x.size == 0:
        return x
    lower = lax.linalg.cholesky(adjoint(x) if upper else x, symmetrize_input=False)
    return adjoint(lower) if upper else lower


@rule("cholesky_solve")
def cholesky_solve(y: Array, factor: Array, upper: bool = False) -> Array:
    """The solution of `A x = y`, given the Cholesky factor of `A`."""
    lower = adjoint(factor) if upper else factor
    lower, y = _same_batch(lower, y)
    first = _triangular(lower, y, lower=True)
    return _triangular(lower, first, lower=True, adjoint=True)


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
    if b.size == 0:
        return b, a
    solved = lax.linalg.triangular_solve(
        a, b, left_side=True, lower=not upper, transpose_a=transpose, unit_diagonal=unitriangular
    )
    return solved, a


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


@rule("_linalg_eigvals")
def eigvals(x: Array) -> Array:
    """Eigenvalues."""
    return jnp.linalg.eigvals(x)


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
    singular = jnp.any(jnp.diagonal(lu, axis1=-2, axis2=-1) == 0, axis=-1)
    return lu, pivots + 1, singular.astype(jnp.int32)


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
    permutation = _permutation(pivots, packed.shape[-2])
    return _lu_solve(packed, permutation, b, left, adjoint)


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
    info = jnp.any(jnp.diagonal(lu, axis1=-2, axis2=-1) == 0, axis=-1).astype(jnp.int32)
    return solved[..., 0] if vectors else solved, lu, pivots + 1, info


@rule("linalg_inv_ex")
def inv_ex(x: Array, *, check_errors: bool = False) -> tuple[Array, Array]:
    """The inverse, and info."""
    inverse = x if x.size == 0 else jnp.linalg.inv(x)
    return inverse, _info(inverse)


def _sign_of(pivots: Array, dtype: object) -> Array:
    moved = jnp.sum(pivots != jnp.arange(pivots.shape[-1]), axis=-1)
    return jnp.where(moved % 2 == 0, 1, -1).astype(dtype)


def _is_transposed(spec: Spec) -> bool:
    """True when PyTorch decomposes the transposed matrix for a determinant: it saves a copy; the derivative knows."""
    return not spec.dtype.is_complex and _is_row_major(spec)


def _is_row_major(spec: Spec) -> bool:
    wanted = row_major(spec.size)
    return all(n <= 1 or s == w for n, s, w in zip(spec.size, spec.stride, wanted, strict=True)) or 0 in spec.size


@rule("_linalg_det", wants=Wants.SPEC)
def det(x: Array, *, spec: Spec) -> tuple[Array, Array, Array]:
    """The determinant, and the LU decomposition."""
    lu, pivots, _ = lu_factor(jnp.swapaxes(x, -2, -1) if _is_transposed(spec) else x)
    diagonal = jnp.diagonal(lu, axis1=-2, axis2=-1)
    return _sign_of(pivots, x.dtype) * jnp.prod(diagonal, axis=-1), lu, pivots + 1


@rule("_linalg_slogdet", wants=Wants.SPEC)
def slogdet(x: Array, *, spec: Spec) -> tuple[Array, Array, Array, Array]:
    """Sign and logarithm of the determinant, and the LU decomposition."""
    lu, pivots, _ = lu_factor(jnp.swapaxes(x, -2, -1) if _is_transposed(spec) else x)
    diagonal = jnp.diagonal(lu, axis1=-2, axis2=-1)
    size = jnp.abs(diagonal)
    phase = diagonal / size if is_complex(x) else jnp.sign(diagonal)
    sign = _sign_of(pivots, x.dtype) * jnp.prod(phase, axis=-1)
    return sign, jnp.sum(jnp.log(size), axis=-1), lu, pivots + 1


@rule("linalg_matrix_exp")
def matrix_exp(x: Array) -> Array:
    """The matrix exponential."""
    return x if x.size == 0 else jax.scipy.linalg.expm(widen(x))


@rule("linalg_pinv.atol_rtol_tensor")
def pinv(x: Array, *, atol: Array | None = None, rtol: Array | None = None, hermitian: bool = False) -> Array:
    """The pseudo-inverse; singular values below the tolerances count as zero."""
    if x.size == 0:
        return adjoint(x)
    if hermitian:
        # Only the lower triangle counts.
        lower = jnp.tril(x, -1)
        x = lower + adjoint(lower) + jnp.where(jnp.eye(x.shape[-1], dtype=jnp.bool_), jnp.real(x).astype(x.dtype), 0)
    u, s, vh = jnp.linalg.svd(x, full_matrices=False)
    largest = jnp.max(s, axis=-1)
    absolute = jnp.zeros((), s.dtype) if atol is None else atol.astype(s.dtype)
    relative = max(x.shape[-2:]) * jnp.finfo(s.dtype).eps
    if rtol is not None:
        relative = rtol.astype(s.dtype)
    elif atol is not None:
        relative = jnp.where(absolute > 0, 0, relative)
    kept = s > jnp.maximum(absolute, relative * largest)[..., None]
    inverse = jnp.where(kept, 1 / jnp.where(kept, s, 1), 0)
    return matmul(adjoint(vh) * inverse[..., None, :].astype(x.dtype), adjoint(u))
