# SPDX-License-Identifier: Apache-2.0
"""Spectral stages: what is computed of a matrix. ``execution`` says where, and how
matrices are combined.

Spectral functions commute with transposition, so matrices are not transposed:
``Stack.transposed`` says how they are stored.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np
import optax

from normpre_optax.checks import check_choice, check_numbers, static_int
from normpre_optax.linalg import newton_schulz as ns
from normpre_optax.linalg import sketch
from normpre_optax.linalg.batches import batched
from normpre_optax.linalg.products import inverse_root, narrowed, product
from normpre_optax.stages.execution import EachMatrix, Stack, spectral

# of the root mean square of all singular values: least relative level, for matrices of
# low rank
_LEAST = 0.1


@dataclasses.dataclass(frozen=True)
class ClipLeading:
    """The leading singular values clipped to a threshold, or to a multiple of the RMS
    of the remaining ones.
    """

    rank: int | float
    oversample: int
    power_iterations: int
    method: str
    seed: int
    compute_dtype: Any
    relative: bool
    whole_matrices = False
    draws = True

    def __call__(
        self,
        stacks: list[Stack],
        step: Any,
        solve: Any = None,
        rms: Any = None,
        threshold: Any = 1.0,
    ) -> list[jax.Array]:
        """Clip every matrix; the small problems of sketches are solved together."""
        xs, dtype = (
            [s.x for s in stacks],
            None if self.compute_dtype == "narrow" else self.compute_dtype,
        )
        if self.method != "exact":
            xs, dtype = narrowed(
                xs, dtype
            )  # where None is narrow; the rounded Psi is also what is added below
        # The smaller dimension is worked on; for a square matrix, the outputs.
        tall = [
            (x.shape[-2], s.transposed) > (x.shape[-1], False)
            for x, s in zip(xs, stacks, strict=True)
        ]
        wide = [x.mT if is_tall else x for x, is_tall in zip(xs, tall, strict=True)]
        totals = [sketch.sum_of_squares(x) for x in xs]
        each = (
            self.clipping(x.shape[-2], total, threshold)
            for x, total in zip(wide, totals, strict=True)
        )
        clippings, sizes = zip(*each, strict=True)
        if self.method == "exact":
            found = [
                batched(sketch.clip_exactly, x.ndim)(x, c)
                for x, c in zip(wide, clippings, strict=True)
            ]
        else:
            omegas = [
                sketch.draws(
                    self.seed, step, s.ids[..., 0, :], (size, x.shape[-1])
                ).astype(total.dtype)
                for s, x, size, total in zip(stacks, wide, sizes, totals, strict=True)
            ]
            products = self.method == "products"
            found = sketch.clip_by_sketch(
                wide, omegas, clippings, self.power_iterations, products, dtype, solve
            )
        new = []
        for x, is_tall, total, (left, right, kept) in zip(
            xs, tall, totals, found, strict=True
        ):
            a, b = (right, left) if is_tall else (left, right)
            t = x.astype(total.dtype) + product(
                a.mT, b, total.dtype if self.method == "exact" else dtype
            )
            if rms is not None:  # ||T||^2 is known from small matrices
                t = t * (rms * (x.shape[-2] * x.shape[-1]) ** 0.5 * inverse_root(kept))
            new.append(t)
        return new

    def clipping(
        self, side: int, total: jax.Array, threshold: Any
    ) -> tuple[sketch.Clipping, int]:
        """Return what is clipped of matrices with this smaller side and sum of squares,
        and their sketch's size.

        The rank is how many singular values may be clipped, the size how many
        directions the sketch has.
        """
        rank = (
            min(self.rank, side)
            if isinstance(self.rank, int)
            else max(1, round(self.rank * side))
        )
        most = max(1, side - 1) if self.relative else side  # one remains
        rank, products = min(rank, most), self.method == "products"
        size = min(rank + self.oversample, most if products else side)
        rank = size if products else rank
        found = sketch.to_threshold(total, rank, threshold)
        if (
            self.relative and side == rank
        ):  # one singular value, none remains: its level is itself
            found = found._replace(least=total)
        elif self.relative:  # ``least`` is the square of the multiple here
            found = found._replace(
                least=found.least * total * (_LEAST**2 / side),
                share=found.least / (side - rank),
            )
        return found, size


def precondition_globally(
    ns_steps: int | None = 5,
    ns_coefficients: str | Sequence[Any] = "muon",
    compute_dtype: Any = None,
    rms: jax.typing.ArrayLike | None = None,
    ns_scale: Literal["frobenius", "schatten"] = "frobenius",
    *,
    matrix_dims: Any = None,
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
        ns_scale: the norm that matrices are divided by before the first iteration:
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
    check_choice("ns_scale", ns_scale, ("frobenius", "schatten"))
    steps = (
        1 if ns_steps is None else static_int("ns_steps", ns_steps, least=1, below=1000)
    )  # unrolled
    table = ns.coefficient_table(ns_coefficients, steps)
    if ns_steps is None:
        return spectral(EachMatrix(ns.exact_msign), rms=rms, matrix_dims=matrix_dims)
    headroom = (
        ns.HEADROOM.get(ns_coefficients, 1.0)
        if isinstance(ns_coefficients, str)
        else 1.0
    )
    options = (
        ("table", table),
        ("headroom", headroom),
        ("compute_dtype", compute_dtype),
        ("scale", ns_scale),
    )
    f = EachMatrix(
        ns.newton_schulz,
        options,
        rounded=compute_dtype is None or compute_dtype == "narrow",
    )
    return spectral(f, rms=rms, matrix_dims=matrix_dims)


def precondition_locally(
    rank: int | float = 32,
    oversample: int = 8,
    power_iterations: int = 1,
    method: Literal["sketch", "products", "exact"] = "sketch",
    seed: int = 0,
    compute_dtype: Any = None,
    relative_threshold: jax.typing.ArrayLike | None = None,
    rms: jax.typing.ArrayLike | None = None,
    *,
    matrix_dims: Any = None,
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
    f = ClipLeading(
        rank,
        static_int("oversample", oversample, least=0),
        static_int(
            "power_iterations", power_iterations, least=0, below=1000
        ),  # unrolled
        method,
        static_int("seed", seed, least=0, below=2**32),
        compute_dtype,
        relative_threshold is not None,
    )
    threshold = 1.0 if relative_threshold is None else relative_threshold
    return spectral(f, rms=rms, threshold=threshold, matrix_dims=matrix_dims)
