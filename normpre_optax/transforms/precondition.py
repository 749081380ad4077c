# SPDX-License-Identifier: Apache-2.0
"""The spectral stage: all singular values to one (NormPre-G), or the leading ones clipped to one (NormPre-L).

``whiten`` is SWAN's way to the former. All of them commute with transposition, so they always work on the shorter side
and need no orientation.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from normpre_optax.linalg.eigenspace import leading_modes_exact, leading_modes_sketch
from normpre_optax.linalg.newton_schulz import coefficient_table, newton_schulz
from normpre_optax.linalg.precision import in_working_dtype, working_dtype
from normpre_optax.linalg.spectrum import clip_modes, exact_msign
from normpre_optax.linalg.whitening import whiten as whitened
from normpre_optax.transforms.checks import float_dtype, static_int
from normpre_optax.transforms.draws import for_each_matrix, identities, sketch_draws
from normpre_optax.transforms.oriented import OrientedTransformation

METHODS = ("sketch", "exact")


def precondition_globally(
    ns_steps: int | None = 5,
    ns_coefficients: str | Sequence = "muon",
    compute_dtype: jax.typing.DTypeLike | None = None,
) -> OrientedTransformation:
    """Bring every singular value near one: ``T = msign(Psi)`` by Newton-Schulz iterations.

    Args:
        ns_steps: number of iterations; None computes ``msign`` exactly by singular value decomposition.
        ns_coefficients: ``"muon"``, ``"you"``, ``"polar_express"``, one triple ``(a, b, c)``, or a triple a step. A
            table shorter than ``ns_steps`` goes on with its last triple.
        compute_dtype: dtype of the products' operands, with sums in float32; None means float32 on every device.
            ``jnp.bfloat16`` is what Muon uses on accelerators.

    Returns:
        A stateless transformation on matrices in the last two axes.

    Raises:
        TypeError: if ``ns_steps`` is traced.
        ValueError: if ``ns_steps`` is negative or ``ns_coefficients`` is no table.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import precondition_globally
        >>> tx = precondition_globally(ns_steps=None)
        >>> psi = jnp.diag(jnp.array([3.0, 0.5]))
        >>> print(tx.update(psi, tx.init(psi))[0])
        [[1. 0.]
         [0. 1.]]

    References:
        Normalize-Then-Precondition, "NormPre-G"; coefficient sources stand in ``linalg.newton_schulz``.
    """
    float_dtype("compute_dtype", compute_dtype)
    if ns_steps is None:
        orthogonalize = exact_msign
    else:
        steps = static_int("ns_steps", ns_steps, least=1)
        coefficient_table(ns_coefficients, steps)
        orthogonalize = functools.partial(
            newton_schulz, steps=steps, coefficients=ns_coefficients, compute_dtype=compute_dtype
        )

    def update(updates, state, params=None, **extra_args):
        del params, extra_args
        return jax.tree.map(in_working_dtype(_unbatched(orthogonalize)), updates), state

    return OrientedTransformation(lambda params: optax.EmptyState(), update)


def whiten(steps: int = 6, compute_dtype: jax.typing.DTypeLike | None = None) -> OrientedTransformation:
    """Multiply every matrix by the inverse root of its Gram matrix: ``T = (X X^T / ||X X^T||_F)^(-1/2) X``, nearly.

    Args:
        steps: coupled Newton-Schulz iterations for the inverse root.
        compute_dtype: dtype of the products' operands, with sums in float32; None means float32 on every device.

    Returns:
        A stateless transformation on matrices in the last two axes. It does not bring singular values to one but to
        ``||X X^T||_F^(1/2)``: ``scale_to_rms`` fixes the size.

    Raises:
        TypeError: if ``steps`` is traced.
        ValueError: if ``steps`` is not positive.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import whiten
        >>> tx = whiten(steps=12)
        >>> x = jnp.diag(jnp.array([4.0, 3.0]))
        >>> print((tx.update(x, tx.init(x))[0] / (4.0**4 + 3.0**4) ** 0.25).round(4))
        [[1. 0.]
         [0. 1.]]

    References:
        Ma, Gong, Scetbon and Meeds, SWAN, arXiv 2412.13148.
    """
    steps = static_int("whitening_steps", steps, least=1)
    float_dtype("compute_dtype", compute_dtype)
    f = functools.partial(whitened, steps=steps, compute_dtype=compute_dtype)

    def update(updates, state, params=None, **extra_args):
        del params, extra_args
        return jax.tree.map(in_working_dtype(_unbatched(f)), updates), state

    return OrientedTransformation(lambda params: optax.EmptyState(), update)


class PreconditionLocallyState(NamedTuple):
    """Steps taken so far, int32 ``()``: the sketch of step ``t`` is drawn from it."""

    count: jax.typing.ArrayLike


class WarmStartState(NamedTuple):
    """Steps taken so far, and where the next sketch starts.

    Attributes:
        count: int32 ``()``.
        subspace: a tree like the updates', ``(..., kept, longer side)`` for every matrix: its leading modes on the step
            before, along the longer side, in at least float32.
    """

    count: jax.typing.ArrayLike
    subspace: optax.Updates


def precondition_locally(
    rank: int = 32,
    oversample: int = 8,
    power_iterations: int = 1,
    method: str = "sketch",
    seed: int = 0,
    compute_dtype: jax.typing.DTypeLike | None = None,
    warm_start: bool = False,
) -> OrientedTransformation:
    """Clip the leading singular values above one to one and leave the rest: ``T = P Psi`` of NormPre-L.

    With the ``rank`` largest eigenvalues ``lambda_i`` of ``Psi Psi^T`` and their eigenvectors ``u_i``,
    ``P = I + sum_i (lambda_i^-1/2 - 1) u_i u_i^T`` over those with ``lambda_i > 1``.

    Args:
        rank: spectral budget r: how many modes may be clipped.
        oversample: o: the sketch sees ``min(m, n, r + o)`` directions.
        power_iterations: p: passes that sharpen the sketch.
        method: ``"sketch"`` (Algorithm 2: products with thin matrices only) or ``"exact"`` (an eigendecomposition of
            the shorter side).
        seed: of the sketch's Gaussian draws, which depend on it, the step, the parameter's path and the matrix's place
            in its stack, and on nothing else.
        compute_dtype: dtype of the operands of the sketch's products with ``Psi``, with sums in float32; None means
            float32. Everything small stays in float32, and so does ``method="exact"``.
        warm_start: start the sketch from the modes of the step before instead of from draws; the ``oversample``
            directions (at least one) are drawn anew on every step, so that new modes are found. From the third step or
            so on ``power_iterations=0`` is then as close to exact clipping as 1 without it. A departure from the paper;
            the state grows by ``rank`` rows as long as the longer side.

    Returns:
        A transformation on matrices in the last two axes whose state is a step counter (with ``warm_start``, a
        ``WarmStartState``).

    Raises:
        TypeError: if an argument that shapes the computation is traced.
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
    rank = static_int("rank", rank, least=1)
    oversample = static_int("oversample", oversample, least=0)
    power_iterations = static_int("power_iterations", power_iterations, least=0)
    seed = static_int("seed", seed, least=0)
    float_dtype("compute_dtype", compute_dtype)
    if method not in METHODS:
        raise ValueError(f"{method=} is not one of {METHODS}")
    if not isinstance(warm_start, bool):
        raise TypeError(f"warm_start must be True or False, got {warm_start!r}")
    if warm_start and method != "sketch":
        raise ValueError(f"warm_start belongs to method='sketch', got {method=}")
    if warm_start and oversample == 0:
        raise ValueError("warm_start needs oversample >= 1: new modes are found in the directions drawn anew")

    def clip_exactly(psi: jax.Array, columns: bool) -> jax.Array:
        return clip_modes(psi, leading_modes_exact(psi.mT if columns else psi, rank), columns=columns)

    def clip_sketched(psi: jax.Array, omega: jax.Array, columns: bool, spread: bool) -> tuple[jax.Array, jax.Array]:
        lifted = psi.astype(working_dtype(psi.dtype))
        wide = lifted.mT if columns else lifted
        modes = leading_modes_sketch(wide, omega, rank, power_iterations, compute_dtype, short_is_sharded=spread)
        return clip_modes(lifted, modes, compute_dtype, columns).astype(psi.dtype), modes.coordinates

    def width(psi: jax.Array) -> int:
        return min(*psi.shape[-2:], rank + oversample)

    def draws(psi: jax.Array, ids: jax.Array, step: jax.typing.ArrayLike, rows: int) -> jax.Array:
        draw = lambda i: sketch_draws(seed, step, i[0], i[1], (rows, max(psi.shape[-2:])))  # noqa: E731
        return for_each_matrix(draw, ids).astype(working_dtype(psi.dtype))

    def init(params):
        count = jnp.zeros((), jnp.int32)
        if not warm_start:
            return PreconditionLocallyState(count)
        # What the first step would draw beyond its fresh directions: it is the step without warm start.
        beyond = lambda w, ids: draws(w, ids, 0, width(w))[..., oversample:, :]  # noqa: E731
        return WarmStartState(count, jax.tree.map(beyond, params, identities(params)))

    def update(updates, state, params=None, *, matrix_ids=None, transposed=False, layout=None, **extra_args):
        del params, extra_args
        if isinstance(state, WarmStartState) != warm_start:
            raise ValueError(
                f"this state was made with warm_start={not warm_start}, the optimizer has warm_start={warm_start}: "
                "build the optimizer as the state's was, or call init again"
            )
        count = optax.safe_increment(state.count)
        if method == "exact":
            exactly = in_working_dtype(_unbatched(_on_shorter_side(clip_exactly, transposed)))
            return jax.tree.map(exactly, updates), PreconditionLocallyState(count)

        def clip(psi: jax.Array, omega: jax.Array, spread: bool) -> tuple[jax.Array, jax.Array]:
            f = functools.partial(clip_sketched, spread=spread)
            return _unbatched(_on_shorter_side(f, transposed))(psi, omega)

        spread = jax.tree.map(lambda _: False, updates)
        if layout is not None:
            spread = [
                _is_short_side_sharded(x, spec, transposed) for x, spec in zip(updates, layout.specs, strict=True)
            ]
        ids = matrix_ids if matrix_ids is not None else identities(updates)
        if not warm_start:
            cold = lambda psi, i, spread: clip(psi, draws(psi, i, state.count, width(psi)), spread)[0]  # noqa: E731
            return jax.tree.map(cold, updates, ids, spread), PreconditionLocallyState(count)

        def warm(psi: jax.Array, i: jax.Array, spread: bool, kept: jax.Array) -> tuple[jax.Array, jax.Array]:
            fresh = draws(psi, i, state.count, width(psi) - kept.shape[-2])
            new, seen = clip(psi, jnp.concatenate([fresh, kept.astype(fresh.dtype)], axis=-2), spread)
            return new, seen[..., : kept.shape[-2], :].astype(kept.dtype)

        pairs = jax.tree.map(warm, updates, ids, spread, state.subspace)
        new, subspace = (jax.tree.map(lambda _, pair, k=k: pair[k], updates, pairs) for k in (0, 1))
        return new, WarmStartState(count, subspace)

    return OrientedTransformation(init, update)


def _works_on_columns(x: jax.Array, transposed: bool) -> bool:
    """Whether a spectral stage works on the last axis of a matrix: the shorter one, or the rows of a square matrix."""
    above, across = x.shape[-2:]
    return across < above or (across == above and transposed)


def _on_shorter_side(f: Callable[..., Any], transposed: bool) -> Callable[..., Any]:
    """``f`` told which side of a matrix to work on."""
    return lambda x, *rest: f(x, *rest, columns=_works_on_columns(x, transposed))


def _is_short_side_sharded(x: jax.Array, spec: jax.sharding.PartitionSpec, transposed: bool) -> bool:
    """Whether the shorter side of a stack's matrices is spread over devices and the longer one is not."""
    long, short = spec[-2:] if _works_on_columns(x, transposed) else spec[:-3:-1]
    return bool(short) and not long


def _unbatched(f: Callable[..., Any]) -> Callable[..., Any]:
    """``f`` without leading axes of size one: XLA's CPU backend multiplies a plain matrix twice as fast."""

    def squeezed(x: jax.Array, *rest: jax.Array) -> Any:
        if x.ndim < 2:
            raise ValueError(f"a spectral stage needs matrices in the last two axes, got a leaf of shape {x.shape}")
        lead = x.shape[:-2]
        if not lead or any(size != 1 for size in lead):
            return f(x, *rest)
        found = f(*(y.reshape(y.shape[-2:]) for y in (x, *rest)))
        return jax.tree.map(lambda y: y.reshape(*lead, *y.shape), found)

    return squeezed
