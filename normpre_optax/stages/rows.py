# SPDX-License-Identifier: Apache-2.0
"""Row stages: the tangent projection and the normalization of rows or columns."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

from normpre_optax.checks import PASS_PARAMS, check_choice, check_function
from normpre_optax.linalg import rows
from normpre_optax.linalg.batches import Groups, join, separate
from normpre_optax.linalg.platforms import platform
from normpre_optax.parameters.dims import MatrixDims, split_axes
from normpre_optax.stages.blocks import groups_of, split_blocks
from normpre_optax.stages.stage import CountState, init_count, per_parameter, stage
from normpre_optax.trees import DimsTree

Tangent = Literal["relaxed", "strict", "none"]
Orientation = Literal["alternating", "rows", "columns", "both"]
Side = Literal["rows", "columns"]
NEEDS_PARAMS = f"the tangent projection needs the parameters: {PASS_PARAMS}"


def normalize_tangent(
    tangent: Tangent = "relaxed",
    orientation: Orientation = "alternating",
    *,
    first: Side = "rows",
    norm: Callable[[int], float] = lambda entries: 1.0,
    matrix_dims: DimsTree = None,
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
        >>> w = jnp.array([[0.0, 0.0], [0.5, 0.0]])  # (in, out)
        >>> m = jnp.array([[1.0, 0.0], [1.0, 2.0]])
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

    passes: tuple = ("rows", "columns") if orientation == "both" else (orientation,)

    def step(updates, state, params, matrix_dims):
        # Weights that are not used are not read: they need not even be passed.
        if tangent == "none":
            params = None
        elif params is None:
            raise ValueError(f"{NEEDS_PARAMS}, or tangent='none'")
        by_rows = (state.count % 2 == 0) == (first == "rows")
        for side in passes:
            blocks, rebuilt = split_blocks(updates, params, matrix_dims)
            rule = _Rule(
                groups=groups_of(blocks),
                dims=tuple(block.dims for block in blocks),
                norm=norm,
                tangent=tangent,
            )
            ms = [block.u for block in blocks]
            ws = [block.w for block in blocks]
            updates = rebuilt(_unit_tangents(rule, side, ms, ws, by_rows))
        return updates, CountState(optax.safe_increment(state.count))

    return stage(step, init_count, matrix_dims)


class _Rule(NamedTuple):
    """What is static of a normalization of matrices; jit recognizes equal ones."""

    groups: Groups  # of matrices that are computed as one stack
    dims: tuple[MatrixDims, ...]  # of each matrix
    norm: Callable[[int], float]
    tangent: Tangent


# Factors (a, b) of the rows or columns in one stack of matrices.
_Factors = tuple[jax.Array, jax.Array]
_Weights = Sequence[jax.Array | None]


# Jitted for updates outside of jit, which thus compile it once. Inside of jit it is
# inlined, so that the program is the same as without.
@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _unit_tangents(
    rule: _Rule,
    side: Orientation,
    ms: Sequence[jax.Array],
    ws: _Weights,
    by_rows: jax.Array,
) -> list[jax.Array]:
    """Return tangents that are normalized by rows or by columns.

    If ``side`` is "alternating", ``by_rows`` selects one of them.
    """
    if side == "rows" or side == "columns":
        factors = _factors(rule, side, ms, ws)
    else:
        if platform() == "tpu":
            # Both sums are one pass, and a branch would be slower.
            of_rows = _factors(rule, "rows", ms, ws)
            of_columns = _factors(rule, "columns", ms, ws)
        else:
            of_rows, of_columns = _only_one(rule, ms, ws, by_rows)
        factors = jax.tree.map(
            lambda r, c: jnp.where(by_rows, r, c), of_rows, of_columns
        )
    new = []
    each = separate(factors, rule.groups)
    for m, w, (a, b) in zip(ms, ws, each, strict=True):
        new.append(a * m if w is None else a * m - b * w)
    return new


def _factors(
    rule: _Rule, side: Side, ms: Sequence[jax.Array], ws: _Weights
) -> list[_Factors]:
    """Return ``a`` and ``b`` of ``a M - b W``, for one stack per group."""
    stacks = join(list(zip(ms, ws, strict=True)), rule.groups)
    found = []
    for members, (m, w) in zip(rule.groups, stacks, strict=True):
        # Those of a group have the same axes. Axis 0 is that of the stack.
        _, outputs, inputs = split_axes(m.ndim - 1, rule.dims[members[0]])
        own = inputs if side == "rows" else outputs
        along = tuple(axis + 1 for axis in own)
        a, b = rows.unit_tangent_factors(m, w, along, rule.tangent)
        size = rule.norm(math.prod(m.shape[axis] for axis in along))
        found.append((size * a, size * b))
    return found


def _only_one(
    rule: _Rule, ms: Sequence[jax.Array], ws: _Weights, by_rows: jax.Array
) -> tuple[list[_Factors], list[_Factors]]:
    """Return the factors of rows and of columns, of which only one is computed.

    The others are zeros.
    """
    # Zeros with the type that sums have on a mesh; XLA drops the sums.
    both = _factors(rule, "rows", ms, ws), _factors(rule, "columns", ms, ws)
    no_rows, no_columns = jax.tree.map(lambda x: jnp.where(False, x, 0), both)

    # Without the barriers, XLA moves the sums out of the branches and computes both.
    def row_branch(ms, ws):
        ms = jax.lax.optimization_barrier(ms)
        ws = jax.lax.optimization_barrier(ws)
        return _factors(rule, "rows", ms, ws), no_columns

    def column_branch(ms, ws):
        ms = jax.lax.optimization_barrier(ms)
        ws = jax.lax.optimization_barrier(ws)
        return no_rows, _factors(rule, "columns", ms, ws)

    return jax.lax.cond(by_rows, row_branch, column_branch, ms, ws)


def project_to_tangent(
    mode: Tangent = "relaxed", *, matrix_dims: DimsTree = None
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
        >>> w = jnp.array([[0.0, 0.0], [0.5, 0.0]])  # (in, out)
        >>> m = jnp.array([[1.0, 0.0], [1.0, 2.0]])
        >>> print(project_to_tangent().update(m, (), w)[0].T)
        [[1.   0.75]
         [0.   2.  ]]

    References:
        Normalize-Then-Precondition, "Relaxed Tangent Momentum".
    """
    check_choice("mode", mode, rows.TANGENTS)

    def project(m: jax.Array, w: jax.Array | None, dims: MatrixDims) -> jax.Array:
        if w is None and mode != "none":
            raise ValueError(f"{NEEDS_PARAMS}, or mode='none'")
        if w is None:
            return m
        _, _, inputs = split_axes(m.ndim, dims)
        return rows.tangent_rows(m, w, inputs, mode)

    return per_parameter(project, matrix_dims)


def normalize_rows(
    side: Literal["rows", "columns", "both"] = "rows", *, matrix_dims: DimsTree = None
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
        >>> kernel = jnp.array([[3.0, 0.0], [4.0, 0.0]])  # (in, out)
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
        along = inputs if side == "rows" else outputs
        return rows.unit_rows(x, along)

    return per_parameter(normalize, matrix_dims)
