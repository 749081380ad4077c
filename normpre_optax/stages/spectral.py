# SPDX-License-Identifier: Apache-2.0
"""Spectral stages: what is computed of a matrix.

``execution`` says where it is computed, and how matrices are combined.
Spectral functions commute with transposition, so matrices are not transposed:
``Stack.transposed`` says how they are stored.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np
import optax
from jax.typing import ArrayLike

from normpre_optax.checks import check_choice, check_numbers, static_int
from normpre_optax.deprecation import accepts_former_names
from normpre_optax.linalg import newton_schulz as ns
from normpre_optax.linalg import sketch
from normpre_optax.linalg.batches import batched
from normpre_optax.linalg.products import Operands, inverse_root, narrowed, product
from normpre_optax.stages.execution import EachMatrix, Solve, Stack, spectral
from normpre_optax.trees import DimsTree

# Least relative level for matrices of low rank, of the root mean square of all singular
# values.
_LEAST = 0.1


@dataclasses.dataclass(frozen=True)
class ClipLeading:
    """Clip the leading singular values to a threshold.

    If ``relative``, it is a multiple of the root mean square of the remaining ones.
    """

    rank: int | float
    oversample: int
    power_iterations: int
    method: str
    seed: int
    compute_dtype: Operands
    relative: bool
    whole_matrices = False
    draws = True
    rounded = False

    def __call__(
        self,
        stacks: list[Stack],
        step: Any,
        solve: Solve | None = None,
        rms: ArrayLike | None = None,
        threshold: ArrayLike = 1.0,
    ) -> list[jax.Array]:
        """Clip every matrix; the small problems of sketches are solved together."""
        xs, dtype = self._operands([stack.x for stack in stacks])
        tall = [_is_tall(x, s.transposed) for x, s in zip(xs, stacks, strict=True)]
        wide = [x.mT if is_tall else x for x, is_tall in zip(xs, tall, strict=True)]
        totals = [sketch.sum_of_squares(x) for x in xs]
        clippings = []
        sizes = []
        for x, total in zip(wide, totals, strict=True):
            clipping, size = self.clipping(x.shape[-2], total, threshold)
            clippings.append(clipping)
            sizes.append(size)
        if self.method == "exact":
            found = _clip_exactly(wide, clippings)
        else:
            omegas = []
            for stack, x, size, total in zip(stacks, wide, sizes, totals, strict=True):
                shape = size, x.shape[-1]
                omega = sketch.draws(self.seed, step, stack.ids[..., 0, :], shape)
                omegas.append(omega.astype(total.dtype))
            found = sketch.clip_by_sketch(
                wide,
                omegas,
                clippings,
                self.power_iterations,
                self.method == "products",
                dtype,
                solve,
            )
        new = []
        for x, is_tall, clipped in zip(xs, tall, found, strict=True):
            operands = x.dtype if self.method == "exact" else dtype
            t = _add(clipped, x, is_tall, operands)
            new.append(t if rms is None else _with_rms(t, clipped.squares, rms))
        return new

    def _operands(self, xs: list[jax.Array]) -> tuple[list[jax.Array], Operands]:
        """Return the matrices, and the dtype of the operands of products with them."""
        if self.method == "exact":
            return xs, None
        dtype = self.compute_dtype
        if dtype == "narrow":  # as None, for which `narrowed` decides
            dtype = None
        # The rounded Psi is also what is added to.
        return narrowed(xs, dtype)

    def clipping(
        self, dimension: int, total: jax.Array, threshold: ArrayLike
    ) -> tuple[sketch.Clipping, int]:
        """Return what is clipped of matrices, and the size of their sketch.

        ``level^2 = max(least, share (total - squares of the rank largest))``, where
        ``total`` is the sum of the squares of all singular values. If not ``relative``,
        ``least`` is ``threshold^2`` and ``share`` is zero, so that the level is the
        threshold. If it is, ``share`` makes it the threshold times the root mean square
        of the remaining ``dimension - rank`` singular values, and ``least`` keeps it
        from zero.

        Example: 4, 3, 2, 1 are the singular values, rank is 2 and the relative
        threshold 1. Then ``total = 16 + 9 + 4 + 1 = 30``, ``share = 1 / (4 - 2)``,
        ``least = 0.01 * 30 / 4 = 0.075``, and ``level^2 = max(0.075, (30 - 25) / 2) =
        2.5``: 4 and 3 become 1.58.

        Args:
            dimension: smaller dimension of the matrices.
            total: their sums of squares.
            threshold: level of the clipping, or its multiple if ``relative``.

        Returns:
            The clipping, whose rank is how many singular values may be clipped, and how
            many directions the sketch has.
        """
        most = dimension
        if self.relative:  # one remains
            most = max(1, dimension - 1)
        rank = min(self._rank(dimension), most)
        size = min(rank + self.oversample, dimension)
        if self.method == "products":  # all directions of the sketch may be clipped
            size = min(size, most)
            rank = size
        found = sketch.to_threshold(total, rank, threshold)
        if not self.relative:
            return found, size
        if dimension == rank:
            # A matrix of one row: its singular value is among the largest, and none
            # remains for a mean. The level is that singular value, which stays as it
            # is: `share` is still zero, and the square of the only one is `total`.
            return found._replace(least=total), size
        squared_multiple = found.least
        least = squared_multiple * total * (_LEAST**2 / dimension)
        share = squared_multiple / (dimension - rank)
        return found._replace(least=least, share=share), size

    def _rank(self, dimension: int) -> int:
        """Return how many singular values are clipped at most."""
        if isinstance(self.rank, int):
            return self.rank
        return max(1, round(self.rank * dimension))


def _is_tall(x: jax.Array, transposed: bool) -> bool:
    """Return whether to transpose matrices, so that rows are the smaller dimension.

    For a square matrix, rows are the outputs.
    """
    rows, columns = x.shape[-2:]
    return rows > columns or (rows == columns and transposed)


def _clip_exactly(
    wide: list[jax.Array], clippings: list[sketch.Clipping]
) -> list[sketch.Clipped]:
    found = []
    for x, clipping in zip(wide, clippings, strict=True):
        found.append(batched(sketch.clip_exactly, x.ndim)(x, clipping))
    return found


def _add(
    clipped: sketch.Clipped, x: jax.Array, is_tall: bool, dtype: Operands
) -> jax.Array:
    """Return the clipped matrices in the order in which they are stored."""
    left, right, squares = clipped
    if is_tall:
        left, right = right, left
    return x.astype(squares.dtype) + product(left.mT, right, dtype)


def _with_rms(t: jax.Array, squares: jax.Array, rms: ArrayLike) -> jax.Array:
    """Return matrices scaled to a root mean square; their squares are known."""
    rows, columns = t.shape[-2:]
    return t * (rms * (rows * columns) ** 0.5 * inverse_root(squares))


@accepts_former_names
def precondition_globally(
    ns_steps: int | None = 5,
    ns_coefficients: str | Sequence[Any] = "muon",
    compute_dtype: Operands = None,
    rms: ArrayLike | None = None,
    ns_norm: Literal["frobenius", "schatten"] = "frobenius",
    *,
    matrix_dims: DimsTree = None,
) -> optax.GradientTransformationExtraArgs:
    """Bring singular values near one: ``T = msign(Psi)`` by Newton-Schulz.

    Args:
        ns_steps: number of iterations; None computes ``msign`` by a singular value
            decomposition.
        ns_coefficients: "muon", "you", "polar_express", one triple ``(a, b, c)``, or
            one triple per step. A table shorter than ``ns_steps`` is continued with its
            last triple.
        compute_dtype: dtype of the operands of products; None means the platform's
            default for float32 (one bfloat16 pass on a TPU, TF32 on a GPU, float32 on a
            CPU), ``jnp.float32`` true float32 everywhere, and "narrow" bfloat16 on a
            TPU or GPU and float32 on a CPU.
        rms: if given, scale every result to this root mean square.
        ns_norm: the norm that matrices are divided by before the first iteration:
            "frobenius", or "schatten", the fourth root of the sum of the fourth powers
            of the singular values. It is a closer bound on the largest.
        matrix_dims: see ``normpre_g``; ``direction`` overrides it.

    Returns:
        A stage. On a mesh, every matrix is computed on one device, or on several that
        have copies.

    Raises:
        TypeError: if ``ns_steps`` is traced.
        ValueError: if ``ns_steps`` is less than 1 or ``ns_coefficients`` is not a
            table.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import precondition_globally
        >>> tx = precondition_globally(ns_steps=None)
        >>> psi = jnp.diag(jnp.array([3.0, 0.5]))
        >>> print(tx.update(psi, tx.init(psi))[0])
        [[1. 0.]
         [0. 1.]]

    References:
        Normalize-Then-Precondition, "NormPre-G"; Jordan et al., Muon, 2024.
    """
    check_numbers(rms=rms, compute_dtype=compute_dtype)
    check_choice("ns_norm", ns_norm, ("frobenius", "schatten"))
    if ns_steps is None:
        ns.coefficient_table(ns_coefficients, steps=1)  # raises if it is not a table
        return spectral(EachMatrix(ns.exact_msign), rms=rms, matrix_dims=matrix_dims)
    # The iterations are unrolled: their number is limited.
    steps = static_int("ns_steps", ns_steps, least=1, below=1000)
    table = ns.coefficient_table(ns_coefficients, steps)
    headroom = 1.0
    if isinstance(ns_coefficients, str):
        headroom = ns.HEADROOM.get(ns_coefficients, 1.0)
    options = (
        ("table", table),
        ("headroom", headroom),
        ("compute_dtype", compute_dtype),
        ("norm", ns_norm),
    )
    rounded = compute_dtype is None or compute_dtype == "narrow"
    f = EachMatrix(ns.newton_schulz, options, rounded)
    return spectral(f, rms=rms, matrix_dims=matrix_dims)


def precondition_locally(
    rank: int | float = 32,
    oversample: int = 8,
    power_iterations: int = 1,
    method: Literal["sketch", "products", "exact"] = "sketch",
    seed: int = 0,
    compute_dtype: Operands = None,
    relative_threshold: ArrayLike | None = None,
    rms: ArrayLike | None = None,
    *,
    matrix_dims: DimsTree = None,
) -> optax.GradientTransformationExtraArgs:
    """Clip leading singular values to a threshold: ``T = P Psi`` of NormPre-L.

    With the ``rank`` largest eigenvalues ``lambda_i`` of ``Psi Psi^T`` and their
    eigenvectors ``u_i``, ``P = I + sum_i (lambda_i^-1/2 - 1) u_i u_i^T`` over those
    with ``lambda_i > 1``.

    Args:
        rank: r, how many singular values may be clipped; between zero and one, the
            share of the smaller dimension.
        oversample: o; the sketch has ``min(m, n, r + o)`` directions.
        power_iterations: p, iterations that sharpen the sketch.
        method: "sketch" (Algorithm 2), "products" (the same without an eigensolver; all
            ``r + o`` singular values of the sketch may be clipped) or "exact" (an
            eigendecomposition of the smaller dimension).
        seed: of the Gaussian draws, which depend on it, the step, the parameter's path
            and the batch index only.
        compute_dtype: dtype of the operands of the products with ``Psi``. None means
            bfloat16 on a TPU or GPU, float32 on a CPU. Small matrices and
            ``method="exact"`` use float32.
        relative_threshold: c. None clips to one, as in the paper. A number clips to
            ``c`` times the root mean square of the remaining singular values: ``level^2
            = c^2 (||Psi||_F^2 - sum_{i <= r} lambda_i) / (min(m, n) - r)``, with ``r <
            min(m, n)``; for ``method="products"``, r is ``r + o``. The level is at
            least a tenth of ``c ||Psi||_F / sqrt(min(m, n))``, for matrices of low
            rank. A matrix of one row or column is not clipped.
        rms: if given, scale every result to this root mean square.
        matrix_dims: see ``normpre_g``; ``direction`` overrides it.

    Returns:
        A stage whose state is a step counter.

    Raises:
        TypeError: if an argument that determines shapes is traced.
        ValueError: if one is out of range.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import precondition_locally
        >>> tx = precondition_locally(rank=1, method="exact")
        >>> psi = jnp.diag(jnp.array([3.0, 2.0, 0.5]))
        >>> print(jnp.diag(tx.update(psi, tx.init(psi))[0]).round(3))
        [1.  2.  0.5]

    References:
        Normalize-Then-Precondition, "NormPre-L", Algorithm 2, Propositions 1 and 2.
    """
    check_numbers(
        rms=rms, relative_threshold=relative_threshold, compute_dtype=compute_dtype
    )
    check_choice("method", method, ("sketch", "products", "exact"))
    if isinstance(rank, float | np.floating) and not 0 < rank < 1:
        raise ValueError(
            f"rank must be an int of at least 1, or a share between 0 and 1, got {rank}"
        )
    if not isinstance(rank, float | np.floating):
        rank = static_int("rank", rank, least=1)
    oversample = static_int("oversample", oversample, least=0)
    # The iterations are unrolled: their number is limited.
    power_iterations = static_int(
        "power_iterations", power_iterations, least=0, below=1000
    )
    f = ClipLeading(
        rank=rank,
        oversample=oversample,
        power_iterations=power_iterations,
        method=method,
        seed=static_int("seed", seed, least=0, below=2**32),
        compute_dtype=compute_dtype,
        relative=relative_threshold is not None,
    )
    threshold = 1.0 if relative_threshold is None else relative_threshold
    return spectral(f, rms=rms, threshold=threshold, matrix_dims=matrix_dims)
