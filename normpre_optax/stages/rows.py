# SPDX-License-Identifier: Apache-2.0
"""Row stages: the tangent projection and the normalization of rows or columns."""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax

from normpre_optax.checks import PASS_PARAMS, check_choice, check_function
from normpre_optax.linalg import rows
from normpre_optax.linalg.batches import grouped
from normpre_optax.linalg.platforms import platform
from normpre_optax.parameters.dims import MatrixDims, split_axes
from normpre_optax.sharding.placement import mesh_of
from normpre_optax.stages.blocks import split_blocks
from normpre_optax.stages.directions import per_parameter
from normpre_optax.stages.stage import CountState, init_count, stage

Tangent = Literal["relaxed", "strict", "none"]
Orientation = Literal["alternating", "rows", "columns", "both"]
Side = Literal["rows", "columns"]
NO_PARAMS = (
    f"the tangent projection needs the parameters: {PASS_PARAMS}, or tangent='none'"
)


def normalize_tangent(
    tangent: Tangent = "relaxed",
    orientation: Orientation = "alternating",
    *,
    first: Side = "rows",
    norm: Callable[[int], float] = lambda entries: 1.0,
    matrix_dims: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Project to the tangent and normalize, by rows and columns in turn.

    ``project_to_tangent`` and ``normalize_rows`` in one stage: one pass over momentum
    and weights for the sums, and one for the result ``Psi = a M - b W``, with two
    numbers ``a`` and ``b`` per row.

    Args:
        tangent: see ``project_to_tangent``.
        orientation: "alternating", "rows", "columns", or "both": rows, then columns of
            the result, at every step.
        first: orientation of the first step if alternating.
        norm: norm of a row afterwards, as a function of its number of entries.
        matrix_dims: see ``normpre_g``; ``direction`` overrides it.

    Returns:
        The stage. Its state is a step counter. It needs params unless ``tangent`` is
        "none".

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import normalize_tangent
        >>> tx = normalize_tangent()
        >>> w, m = (
        ...     jnp.array([[0.0, 0.0], [0.5, 0.0]]),
        ...     jnp.array([[1.0, 0.0], [1.0, 2.0]]),
        ... )  # (in, out)
        >>> print(tx.update(m, tx.init(w), w)[0].T)
        [[0.8 0.6]
         [0.  1. ]]

    References:
        Normalize-Then-Precondition, "Relaxed Tangent Momentum" and "Diagonal-Gram
        Normalization".
    """
    check_choice("tangent", tangent, rows.TANGENTS)
    check_choice("orientation", orientation, get_args(Orientation))
    check_choice("first", first, get_args(Side))
    check_function("norm", norm, "(entries) -> number")

    def step(updates, state, params, matrix_dims):
        if params is None and tangent != "none":
            raise ValueError(NO_PARAMS)
        sides: tuple = ("rows", "columns") if orientation == "both" else (orientation,)
        by_rows = (state.count % 2 == 0) == (first == "rows")
        for side in sides:
            blocks, rebuilt = split_blocks(
                updates, None if tangent == "none" else params, matrix_dims
            )
            axes = tuple(
                split_axes(block.u.ndim, block.dims)[:0:-1] for block in blocks
            )  # (inputs, outputs)
            specs = tuple(block.sharding for block in blocks)
            us, ws = [block.u for block in blocks], [block.w for block in blocks]
            updates = rebuilt(
                _unit_tangents(axes, specs, norm, side, tangent, us, ws, by_rows)
            )
        return updates, CountState(optax.safe_increment(state.count))

    return stage(step, init_count, matrix_dims)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4), inline=True)
def _unit_tangents(
    axes, specs, norm, side, tangent, ms, ws, by_rows
) -> list[jax.Array]:
    """Normalized tangents, by rows, by columns, or by whichever ``by_rows`` selects.

    A TPU computes the sums of rows and of columns in one pass and selects. A CPU and a
    GPU branch around the sums; a GPU computes those of one shape in one kernel.
    """
    # On a mesh with unknown shardings, those of a stack could differ.
    stacked = platform() == "gpu" and (None not in specs or mesh_of(ms) is None)
    groups = grouped(
        (m.shape, axes[i], specs[i]) if stacked else i for i, m in enumerate(ms)
    )

    def factors(
        ms: list[jax.Array], ws: list, k: int
    ) -> list[tuple[jax.Array, jax.Array]]:
        found = []
        for group in groups:
            m = jnp.stack([ms[i] for i in group])
            w = None if ws[group[0]] is None else jnp.stack([ws[i] for i in group])
            along = tuple(axis + 1 for axis in axes[group[0]][k])
            a, b = rows.unit_tangent_factors(m, w, along, tangent)
            size = norm(math.prod(m.shape[axis] for axis in along))
            found.append((size * a, size * b))
        return found

    if side != "alternating":
        found = factors(ms, ws, 0 if side == "rows" else 1)
    elif platform() == "tpu":
        found = jax.tree.map(
            lambda r, c: jnp.where(by_rows, r, c),
            factors(ms, ws, 0),
            factors(ms, ws, 1),
        )
    else:
        # Zeros with the type that sums have on a mesh; XLA drops the sums.
        zeros = [
            jax.tree.map(lambda x: jnp.where(False, x, 0), factors(ms, ws, k))
            for k in (0, 1)
        ]

        # Without the barrier, XLA moves the sums out of the branches and computes both.
        def own(k, ms, ws):
            return factors(*map(jax.lax.optimization_barrier, (ms, ws)), k=k)

        by_row, by_column = (
            lambda ms, ws: (own(0, ms, ws), zeros[1]),
            lambda ms, ws: (zeros[0], own(1, ms, ws)),
        )
        both = jax.lax.cond(by_rows, by_row, by_column, ms, ws)
        found = jax.tree.map(lambda r, c: jnp.where(by_rows, r, c), *both)
    new = dict[int, jax.Array]()
    for group, (a, b) in zip(groups, found, strict=True):
        for k, i in enumerate(group):
            new[i] = a[k] * ms[i] if ws[i] is None else a[k] * ms[i] - b[k] * ws[i]
    return [new[i] for i in range(len(ms))]


def project_to_tangent(
    mode: Tangent = "relaxed", *, matrix_dims: Any = None
) -> optax.GradientTransformationExtraArgs:
    """Reduce the part of every row of the update along the same row of the weights.

    - ``relaxed``: ``x = m - <m, w> w``, which keeps the radial part times ``1 -
      ||w||^2``. For a row with norm above one the factor is negative: the step shrinks
      the row where the loss asks for growth, and the reverse;
    - ``strict``: ``x = m - <m, w> w / ||w||^2``, which removes the radial part;
    - ``none``: ``x = m``.

    Args:
        mode: one of the above.
        matrix_dims: see ``normpre_g``; ``direction`` overrides it.

    Returns:
        A stateless stage. It needs params.

    Raises:
        ValueError: if ``mode`` is unknown, or ``update`` is called without params.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import project_to_tangent
        >>> w, m = (
        ...     jnp.array([[0.0, 0.0], [0.5, 0.0]]),
        ...     jnp.array([[1.0, 0.0], [1.0, 2.0]]),
        ... )  # (in, out)
        >>> print(project_to_tangent().update(m, (), w)[0].T)
        [[1.   0.75]
         [0.   2.  ]]

    References:
        Normalize-Then-Precondition, "Relaxed Tangent Momentum".
    """
    check_choice("tangent", mode, rows.TANGENTS)

    def project(m: jax.Array, w: Any, dims: MatrixDims) -> jax.Array:
        if w is None and mode != "none":
            raise ValueError(NO_PARAMS)
        return (
            m
            if w is None
            else rows.tangent_rows(m, w, split_axes(m.ndim, dims)[2], mode)
        )

    return per_parameter(project, matrix_dims)


def normalize_rows(
    side: Literal["rows", "columns", "both"] = "rows", *, matrix_dims: Any = None
) -> optax.GradientTransformationExtraArgs:
    """Divide every row by its norm: ``Psi = Diag(diag(X X^T))^(-1/2) X``.

    Args:
        side: "rows" (output neurons), "columns", or "both": every entry by the norms of
            its row and its column, both of the same matrix, times the largest row norm.
        matrix_dims: see ``normpre_g``; ``direction`` overrides it.

    Returns:
        A stateless stage. Zero rows stay zero.

    Raises:
        ValueError: if ``side`` is unknown.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import normalize_rows
        >>> kernel = jnp.array(
        ...     [[3.0, 0.0], [4.0, 0.0]]
        ... )  # (in, out): two rows, one of them zero
        >>> print(normalize_rows().update(kernel, ())[0])
        [[0.6 0. ]
         [0.8 0. ]]

    References:
        Normalize-Then-Precondition, "Diagonal-Gram Normalization"; "both": MuonEq
        (github.com/MaeChd/muon-eq).
    """
    check_choice("side", side, ("rows", "columns", "both"))

    def normalize(x, w, dims):
        _, outputs, inputs = split_axes(x.ndim, dims)
        if side == "both":
            return rows.unit_rows_and_columns(x, inputs, outputs)
        return rows.unit_rows(x, inputs if side == "rows" else outputs)

    return per_parameter(normalize, matrix_dims)
