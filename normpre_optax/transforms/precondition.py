# SPDX-License-Identifier: Apache-2.0
"""The spectral stage: all singular values to one (NormPre-G), or the leading ones clipped to one (NormPre-L).

``whiten`` is SWAN's way to the former. All of them commute with transposition, so they always work on the shorter side
and need no orientation.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from normpre_optax.linalg.eigenspace import (
    Clip,
    Modes,
    clip_sketches,
    leading_modes_exact,
    leading_modes_sketches,
    together,
)
from normpre_optax.linalg.newton_schulz import coefficient_table, inverse_root, newton_schulz, unit_frobenius
from normpre_optax.linalg.precision import in_working_dtype, working_dtype
from normpre_optax.linalg.spectrum import clip_modes, clipped_squares, exact_msign
from normpre_optax.linalg.whitening import whiten as whitened
from normpre_optax.meshes.small import shared_out
from normpre_optax.platforms import by_platform
from normpre_optax.transforms.checks import check_rms, choice, count_or_share, float_dtype, number, static_int
from normpre_optax.transforms.draws import draws_of_stacks, identities
from normpre_optax.transforms.oriented import UPRIGHT, MatrixLayout, OrientedTransformation, Rescalable, in_context

METHODS = ("sketch", "products", "exact")


def precondition_globally(
    ns_steps: int | None = 5,
    ns_coefficients: str | Sequence[Any] = "muon",
    compute_dtype: jax.typing.DTypeLike | None = None,
) -> Rescalable:
    """Bring every singular value near one: ``T = msign(Psi)`` by Newton-Schulz iterations.

    Args:
        ns_steps: number of iterations; None computes ``msign`` exactly by singular value decomposition.
        ns_coefficients: ``"muon"``, ``"you"``, ``"polar_express"``, one triple ``(a, b, c)``, or a triple a step. A
            table shorter than ``ns_steps`` goes on with its last triple.
        compute_dtype: dtype of the products' operands, with sums in float32. None is the device's usual product (one
            pass in bfloat16 on a TPU, TF32 on a GPU, float32 on a CPU); ``jnp.float32`` is true float32 everywhere.

    Returns:
        A stateless transformation on matrices in the last two axes.

    Raises:
        TypeError: if ``ns_steps`` is traced.
        ValueError: if ``ns_steps`` is less than 1 or ``ns_coefficients`` is no table.

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
    if ns_steps is not None:
        ns_steps = static_int("ns_steps", ns_steps, least=1)
        coefficient_table(ns_coefficients, ns_steps)

    def orthogonalized(x: jax.Array, bounded: bool, unit: bool) -> jax.Array:
        if ns_steps is None:
            t = exact_msign(x)
            return unit_frobenius(t) if unit else t
        return newton_schulz(x, ns_steps, ns_coefficients, compute_dtype, bounded=bounded, unit=unit)

    def at_rms(rms: jax.typing.ArrayLike | None) -> optax.GradientTransformation:
        check_rms(rms)

        def update(updates, state, params=None, *, matrix_layout=UPRIGHT, **extra_args):
            del params, extra_args

            def one(x: jax.Array) -> jax.Array:
                t = orthogonalized(x, matrix_layout.bounded, unit=rms is not None)
                return t if rms is None else t * _full(x, rms)

            with jax.named_scope("spectral"):
                return jax.tree.map(in_working_dtype(_unbatched(one)), updates), state

        return OrientedTransformation(lambda params: optax.EmptyState(), update)

    return Rescalable(at_rms)


def whiten(steps: int = 6, compute_dtype: jax.typing.DTypeLike | None = None) -> OrientedTransformation:
    """Multiply every matrix by the inverse root of its Gram matrix: ``T = (X X^T / ||X X^T||_F)^(-1/2) X``, nearly.

    Args:
        steps: coupled Newton-Schulz iterations for the inverse root.
        compute_dtype: dtype of the products' operands, with sums in float32; None is the device's usual product.

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
    rank: int | float = 32,
    oversample: int = 8,
    power_iterations: int = 1,
    method: str = "sketch",
    seed: int = 0,
    compute_dtype: jax.typing.DTypeLike | None = None,
    warm_start: bool = False,
    threshold: jax.typing.ArrayLike | Literal["mean"] = 1.0,
) -> Rescalable:
    """Clip the leading singular values above one to one and leave the rest: ``T = P Psi`` of NormPre-L.

    With the ``rank`` largest eigenvalues ``lambda_i`` of ``Psi Psi^T`` and their eigenvectors ``u_i``,
    ``P = I + sum_i (lambda_i^-1/2 - 1) u_i u_i^T`` over those with ``lambda_i > 1``.

    Args:
        rank: spectral budget r: how many modes may be clipped; a number between zero and one is a share of the shorter
            side, rounded, and at least one mode.
        oversample: o: the sketch sees ``min(m, n, r + o)`` directions.
        power_iterations: p: passes that sharpen the sketch.
        method: ``"sketch"`` (Algorithm 2: products with thin matrices, and small eigenproblems), ``"products"`` (the
            same without an eigensolver, for accelerators: all ``r + o`` modes that the sketch sees may be clipped) or
            ``"exact"`` (an eigendecomposition of the shorter side).
        seed: of the sketch's Gaussian draws, which depend on it, the step, the parameter's path and the matrix's place
            in its stack, and on nothing else.
        compute_dtype: dtype of the operands of the sketch's products with ``Psi``, with sums in float32. None is
            bfloat16 on a TPU and a GPU and float32 on a CPU; ``jnp.float32`` is true float32 everywhere. Everything
            small stays in float32, and so does ``method="exact"``.
        warm_start: start the sketch from the modes of the step before instead of from draws; the ``oversample``
            directions (at least one) are drawn anew on every step, so that new modes are found. From the third step or
            so on ``power_iterations=0`` is then as close to exact clipping as 1 without it. A departure from the paper;
            the state grows by ``rank`` rows as long as the longer side.
        threshold: c, to which singular values above it are clipped: 1 in the paper; or ``"mean"``, the root mean square
            of the matrix's own, ``||Psi||_F / sqrt(min(m, n))``. With rows of length one that is one in a wide matrix,
            and ``sqrt(m / n)`` in a tall one, whose average singular value of the others is no smaller: there a
            threshold of one puts clipped modes below those that are left alone.

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
    budget = count_or_share("rank", rank)
    oversample = static_int("oversample", oversample, least=0)
    power_iterations = static_int("power_iterations", power_iterations, least=0)
    seed = static_int("seed", seed, least=0, below=2**32)
    float_dtype("compute_dtype", compute_dtype)
    choice("method", method, METHODS)
    if not isinstance(warm_start, bool):
        raise TypeError(f"warm_start must be True or False, got {warm_start!r}")
    if warm_start and method != "sketch":  # Which modes to keep is known of eigenvectors alone.
        raise ValueError(f"warm_start belongs to method='sketch', got {method=}")
    if warm_start and oversample == 0:
        raise ValueError("warm_start needs oversample >= 1: new modes are found in the directions drawn anew")
    if isinstance(threshold, str):
        choice("threshold", threshold, ("mean",))
    else:
        number("threshold", threshold, least=1e-15, below=1e15)  # their squares are numbers

    def level(psi: jax.Array, squares: jax.Array) -> jax.Array:
        """The threshold squared, of matrices with these sums of squares."""
        if isinstance(threshold, str):
            return jnp.where(squares > 0, squares, 1) / min(psi.shape[-2:])
        return jnp.broadcast_to(jnp.square(in_context(threshold)), squares.shape)

    def modes_of(psi: jax.Array) -> int:
        return budget(min(psi.shape[-2:]))

    def width(psi: jax.Array) -> int:
        return min(*psi.shape[-2:], modes_of(psi) + oversample)

    def draws(
        psis: list[jax.Array], ids: list[jax.Array], step: jax.typing.ArrayLike, rows: list[int], on_mesh: bool = False
    ) -> list[jax.Array]:
        shapes = [(r, max(psi.shape[-2:])) for psi, r in zip(psis, rows, strict=True)]
        if on_mesh:  # drawn together, they would be shared out as one stack wants them and gathered for the other
            drawn = [draws_of_stacks(seed, step, [i], [shape])[0] for i, shape in zip(ids, shapes, strict=True)]
        else:
            drawn = draws_of_stacks(seed, step, ids, shapes)
        return [x.astype(working_dtype(psi.dtype)) for psi, x in zip(psis, drawn, strict=True)]

    def init(params):
        count = jnp.zeros((), jnp.int32)
        if not warm_start:
            return PreconditionLocallyState(count)
        leaves, treedef = jax.tree.flatten(params)
        # What the first step would draw beyond its fresh directions: it is the step without warm start.
        drawn = draws(leaves, jax.tree.leaves(identities(params)), 0, [width(w) for w in leaves])
        return WarmStartState(count, treedef.unflatten([x[..., oversample:, :] for x in drawn]))

    def at_rms(rms: jax.typing.ArrayLike | None) -> optax.GradientTransformation:
        check_rms(rms)

        def clipped(
            psi: jax.Array, squares: jax.Array, modes: Modes | Clip, dtype, columns: bool, on_mesh: bool = False
        ) -> jax.Array:
            c2 = level(psi, squares)
            t = clip_modes(psi, modes, dtype, columns, c2)
            if rms is None:
                return t
            # On a mesh the result is measured: a branch would gather what it may need.
            left = _squares(t) if on_mesh else clipped_squares(psi, squares, modes, dtype, columns, c2)
            return t * (inverse_root(left) * _full(psi, rms))

        def sketched(psis: list[jax.Array], omegas: list[jax.Array], layout: MatrixLayout, dtype):
            """Clipped matrices, and the coordinates of the modes or of the subspace."""
            columns = [_works_on_columns(psi, layout.transposed) for psi in psis]
            wide = [psi.mT if along else psi for psi, along in zip(psis, columns, strict=True)]
            squares = [_squares(psi) for psi in psis]
            spread, solve = None, None
            if layout.mesh is not None:
                solve = shared_out(together, layout.mesh, layout.specs)
                spread = [_is_short_side_sharded(s, along) for s, along in zip(layout.specs, columns, strict=True)]
            found: Sequence[Modes | Clip]
            if method == "products":
                levels = [level(psi, s) for psi, s in zip(psis, squares, strict=True)]
                found = clip_sketches(wide, omegas, squares, levels, power_iterations, dtype, spread, solve)
            else:
                ranks = [modes_of(psi) for psi in psis]
                found = leading_modes_sketches(wide, omegas, squares, ranks, power_iterations, dtype, spread, solve)
            each = zip(psis, squares, found, columns, strict=True)
            new = [clipped(psi, s, modes, dtype, along, layout.mesh is not None) for psi, s, modes, along in each]
            return new, [modes.coordinates for modes in found]

        def sketched_in_half(psis: list[jax.Array], omegas: list[jax.Array], layout: MatrixLayout):
            # The barrier keeps XLA from undoing the rounding, and so from storing Psi twice.
            rounded = jax.lax.optimization_barrier([psi.astype(jnp.bfloat16) for psi in psis])
            return sketched(rounded, omegas, layout, jnp.bfloat16)

        def clip_by_sketch(psis: list[jax.Array], omegas: list[jax.Array], layout: MatrixLayout):
            usual = functools.partial(sketched, layout=layout, dtype=compute_dtype)
            if compute_dtype is not None or any(psi.dtype != jnp.float32 for psi in psis):
                return usual(psis, omegas)
            # What these products cost a GPU is reading Psi: it reads half of it. A TPU rounds operands by itself.
            half = functools.partial(sketched_in_half, layout=layout)
            return by_platform(psis, omegas, cpu=usual, tpu=usual, default=half)

        def clip_exactly(psi: jax.Array, transposed: bool) -> jax.Array:
            columns = _works_on_columns(psi, transposed)
            modes = leading_modes_exact(psi.mT if columns else psi, modes_of(psi))
            return clipped(psi, _squares(psi), modes, psi.dtype, columns)

        def update(updates, state, params=None, *, matrix_ids=None, matrix_layout=UPRIGHT, **extra_args):
            del params, extra_args
            if isinstance(state, WarmStartState) != warm_start:
                raise ValueError(
                    f"this state was made with warm_start={not warm_start}, the optimizer has warm_start={warm_start}: "
                    "build the optimizer as the state's was, or call init again"
                )
            count = optax.safe_increment(state.count)
            leaves, treedef = jax.tree.flatten(updates)
            psis = [x.astype(working_dtype(x.dtype)).reshape(_bare(x.shape)) for x in leaves]
            ids = treedef.flatten_up_to(identities(updates) if matrix_ids is None else matrix_ids)
            ids = [i.reshape(*psi.shape[:-2], 2) for i, psi in zip(ids, psis, strict=True)]
            new_state: Any = PreconditionLocallyState(count)
            on_mesh = matrix_layout.mesh is not None
            with jax.named_scope("spectral"):
                if method == "exact":
                    new = [clip_exactly(psi, matrix_layout.transposed) for psi in psis]
                elif not warm_start:
                    omegas = draws(psis, ids, state.count, [width(psi) for psi in psis], on_mesh)
                    new, _ = clip_by_sketch(psis, omegas, matrix_layout)
                else:
                    old = treedef.flatten_up_to(state.subspace)
                    kept = [k.reshape(_bare(k.shape)) for k in old]
                    rows = [width(psi) - k.shape[-2] for psi, k in zip(psis, kept, strict=True)]
                    fresh = draws(psis, ids, state.count, rows, on_mesh)
                    omegas = [
                        jnp.concatenate([f, k.astype(f.dtype)], axis=-2) for f, k in zip(fresh, kept, strict=True)
                    ]
                    new, seen = clip_by_sketch(psis, omegas, matrix_layout)
                    seen = [
                        x[..., : o.shape[-2], :].astype(o.dtype).reshape(o.shape)
                        for x, o in zip(seen, old, strict=True)
                    ]
                    new_state = WarmStartState(count, treedef.unflatten(seen))
            return treedef.unflatten(
                [t.reshape(x.shape).astype(x.dtype) for t, x in zip(new, leaves, strict=True)]
            ), new_state

        return OrientedTransformation(init, update)

    return Rescalable(at_rms)


def _squares(psi: jax.Array) -> jax.Array:
    """Sum of squares of every matrix, ``(..., 1, 1)``, in at least float32."""
    return jnp.sum(psi.astype(working_dtype(psi.dtype)) ** 2, axis=(-2, -1), keepdims=True)


def _full(x: jax.Array, rms: jax.typing.ArrayLike) -> jax.typing.ArrayLike:
    """Frobenius norm of a matrix in the shape of ``x`` with that root mean square."""
    return in_context(rms) * math.sqrt(x.shape[-2] * x.shape[-1])


def _works_on_columns(x: jax.Array, transposed: bool) -> bool:
    """Whether a spectral stage works on the last axis of a matrix: the shorter one, or the rows of a square matrix."""
    above, across = x.shape[-2:]
    return across < above or (across == above and transposed)


def _is_short_side_sharded(spec: jax.sharding.PartitionSpec, columns: bool) -> bool:
    """Whether the side that is worked on is spread over devices and the other one is not."""
    other, side = spec[-2:] if columns else spec[:-3:-1]
    return bool(side) and not other


def _bare(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Without leading axes of size one: XLA's CPU backend multiplies a plain matrix twice as fast."""
    if len(shape) < 2:
        raise ValueError(f"a spectral stage needs matrices in the last two axes, got a leaf of shape {shape}")
    return shape[-2:] if all(size == 1 for size in shape[:-2]) else shape


def _unbatched(f: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """``f`` of arrays in their ``_bare`` shapes."""
    return lambda x, *rest: f(*(y.reshape(_bare(y.shape)) for y in (x, *rest))).reshape(x.shape)
