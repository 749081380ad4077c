# SPDX-License-Identifier: Apache-2.0
"""How long weights may get: rules for what an optimizer has decided on, learning rate and weight decay included.

A step U takes a matrix from W to ``W + U``. Each rule rescales what it has come to, every matrix or every row of it by
itself; what is no matrix passes through. ``row_gains`` goes further and trains lengths and directions of rows apart.
All of them work in the parameters' own layout.
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from normpre_optax.meshes.specs import gathered
from normpre_optax.parameters.dims import (
    MatrixDims,
    block_axis,
    equal_blocks,
    from_matrices,
    matrix_shape,
    split_axes,
    to_matrices,
)
from normpre_optax.parameters.leaves import is_box
from normpre_optax.parameters.rules import Choice, resolve
from normpre_optax.transforms.blocks import blocks_of
from normpre_optax.transforms.checks import choice, number, same_trees, transformation
from normpre_optax.transforms.oriented import in_context
from normpre_optax.transforms.wrappers import at_least_float32

Per = Literal["matrix", "rows"]
Factor = jax.typing.ArrayLike | Callable[[jax.Array], jax.Array]


def brake_radially(
    outward: Factor = 0.5, inward: Factor = 1.0, *, per: Per = "rows", matrix_dims: Any = None
) -> optax.GradientTransformationExtraArgs:
    """Let weights grow by a part only of what a step would have them grow.

    From the length before, ``r = ||W||``, to that after the step, ``r' = ||W + U||``: W + U is brought to the length
    ``r + outward (r' - r)`` where it is longer, and to ``r + inward (r' - r)`` where it is shorter. A step across the
    weights lengthens them too, in the second order, and is braked likewise.

    Args:
        outward: share of the growth that is kept, 0 to 1; or a function of the length before, such as
            ``lambda r: 1 - r**2``, the factor of NormPre's relaxed tangent (which ``optax.inject_hyperparams`` takes
            for a schedule unless it is among ``static_args``).
        inward: share of the shrinking that is kept, likewise.
        per: what has a length: ``"rows"`` (output neurons) or the whole ``"matrix"``.
        matrix_dims: which parameters are matrices; see ``hybrid``.

    Returns:
        A stateless transformation of finished steps, for the end of ``optax.chain``. It needs ``params``.

    Raises:
        ValueError: if a number is out of range, ``per`` is unknown, or the parameters are missing.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import brake_radially
        >>> tx = brake_radially()
        >>> w = {"kernel": jnp.array([[3.0, 3.0], [4.0, 4.0]])}  # (in, out): two rows of length 5
        >>> step = {"kernel": jnp.array([[3.0, -1.5], [4.0, -2.0]])}
        >>> print(tx.update(step, tx.init(w), w)[0]["kernel"])
        [[ 1.5 -1.5]
         [ 2.  -2. ]]

    References:
        "Radial brake": github.com/KellerJordan/modded-nanogpt, track 3; NVIDIA Emerging-Optimizers, where it is of the
        whole matrix.
    """
    choice("per", per, ("matrix", "rows"))
    for name, factor in dict[str, Any](outward=outward, inward=inward).items():
        if not callable(factor):
            number(name, factor, least=0)
            if not isinstance(factor, jax.Array) and factor > 1:
                raise ValueError(f"{name} must lie in [0, 1], got {factor}")

    def brake(u: jax.Array, w: jax.Array, dims: MatrixDims) -> jax.Array:
        before, growth, after = _lengths(u, w, dims, per)
        kept = [factor(before) if callable(factor) else in_context(factor) for factor in (outward, inward)]
        return _lengthened(u, w, growth * (jnp.where(growth > 0, *kept) - 1), after)

    return _stateless(brake, matrix_dims)


class HeldNormState(NamedTuple):
    """Lengths of every matrix or row; ``optax.MaskedNode`` for what is no matrix."""

    norm: optax.Params


def hold_norm(
    norm: Callable[[int, int], float] | None = None, *, per: Per = "matrix", matrix_dims: Any = None
) -> optax.GradientTransformationExtraArgs:
    """Bring every matrix (or row) back to one length after each step: the one it began with, or a given one.

    On a sphere weight decay has nothing to do: leave it at zero. ``hyperball`` also makes steps as long as the weights.

    Args:
        norm: ``(rows, columns) -> length``, more than zero, of the matrix (or of each row), such as
            ``lambda rows, columns: rows**0.5``; the first step brings the weights there. None holds the lengths that
            ``init`` sees. Weights that begin with zero have no length to hold and go free.
        per: what has a length: the whole ``"matrix"``, or ``"rows"`` (output neurons).
        matrix_dims: which parameters are matrices; see ``hybrid``.

    Returns:
        A transformation of finished steps, for the end of ``optax.chain``. Its state is the lengths. It needs
        ``params``.

    Raises:
        ValueError: if ``per`` is unknown, a length is no positive number, or the parameters are missing.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import hold_norm
        >>> tx, w = hold_norm(), {"kernel": jnp.array([[3.0, 0.0], [0.0, 4.0]])}
        >>> step = {"kernel": jnp.array([[0.0, 0.0], [0.0, 8.0]])}
        >>> print(jnp.linalg.norm(w["kernel"] + tx.update(step, tx.init(w), w)[0]["kernel"]).round(4))
        5.0

    References:
        Wen et al., Hyperball, arXiv 2606.16899.
    """
    choice("per", per, ("matrix", "rows"))
    if norm is not None and not callable(norm):
        raise TypeError(f"norm must be a function (rows, columns) -> length, or None; got {norm!r}")

    def first(w: jax.Array, dims: MatrixDims) -> jax.Array:
        if norm is None:
            return _length(w, dims, per)
        given = norm  # known to be a function inside of others, too

        def wanted(x: jax.Array, d: MatrixDims) -> jax.Array:
            length = given(*matrix_shape(x.shape, d)[1:])
            number("norm(rows, columns)", length, least=float(jnp.finfo(jnp.float32).tiny))
            return jnp.full_like(_length(x, d, per), length)

        return _by_block(wanted, w, dims)

    def hold(u: jax.Array, w: jax.Array, held: jax.Array, dims: MatrixDims) -> jax.Array:
        before, growth, after = _lengths(u, w, dims, per)
        _same_lengths(held, before)
        return _lengthened(u, w, jnp.where(held > 0, held - before - growth, 0), after)

    def init(params):
        return HeldNormState(_seen(_of_matrices(first, matrix_dims, params)))

    def update(updates, state, params=None, **extra_args):
        del extra_args
        return _on_matrices(hold, matrix_dims, params, updates, params, _like(params, state.norm)), state

    return at_least_float32(optax.GradientTransformationExtraArgs(init, update))


class HyperballState(NamedTuple):
    """Steps taken, int32 ``()``, and lengths as in ``HeldNormState``."""

    count: jax.typing.ArrayLike
    norm: optax.Params


def hyperball(
    learning_rate: optax.ScalarOrSchedule, *, per: Per = "matrix", matrix_dims: Any = None
) -> optax.GradientTransformationExtraArgs:
    """Steps as long as the weights times the learning rate, on the sphere where the weights began.

    ``W <- R N(W - lr R N(U))``, where N divides a matrix (or each row) by its length and R is the length of W at
    ``init``. The scale of U does not matter (as long as the squares of its entries are numbers), the size of a step is
    the same at every width, and nothing decays.

    How long weights begin is how long they stay. Rows of 0.5 to 0.8 are what a standard deviation of 0.02 gives at a
    width of 768 and above; those that Flax makes by default begin at one.

    Args:
        learning_rate: size of a step relative to the weights, number or schedule.
        per: what has a length: the whole ``"matrix"``, or ``"rows"`` (output neurons).
        matrix_dims: which parameters are matrices; see ``hybrid``.

    Returns:
        A transformation to stand where ``optax.scale_by_learning_rate`` stands, which is what it does to parameters
        that are no matrices, and to weights that begin with zero: they have no length to hold. It needs ``params``.

    Raises:
        ValueError: if ``per`` is unknown, or the parameters are missing.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from normpre_optax import hyperball, scale_by_muon
        >>> tx = optax.chain(scale_by_muon(), hyperball(0.01))  # of matrices alone
        >>> w = {"kernel": 0.5 * jnp.eye(3)}
        >>> updates, state = tx.update({"kernel": jnp.ones((3, 3))}, tx.init(w), w)
        >>> print(jnp.linalg.norm(w["kernel"] + updates["kernel"]).round(4), jnp.linalg.norm(w["kernel"]).round(4))
        0.866 0.866

    References:
        Wen et al., Hyperball, arXiv 2606.16899.
    """
    choice("per", per, ("matrix", "rows"))
    if not callable(learning_rate):
        number("learning_rate", learning_rate, least=0)

    def init(params):
        norm = _of_matrices(lambda w, dims: _length(w, dims, per), matrix_dims, params)
        return HyperballState(jnp.zeros((), jnp.int32), _seen(norm))

    def update(updates, state, params=None, **extra_args):
        del extra_args
        rate = jnp.asarray(in_context(learning_rate(state.count) if callable(learning_rate) else learning_rate))

        def step(u: jax.Array, w: jax.Array, held: jax.Array, times: Any, dims: MatrixDims) -> jax.Array:
            ww, wu, uu = (_sum(product, dims, per) for product in (w * w, w * u, u * u))
            _same_lengths(held, ww)
            size = times * rate * jnp.where(held > 0, held / jnp.sqrt(jnp.where(uu == 0, 1, uu)), 1)
            after = jnp.sqrt(jnp.maximum(ww - 2 * size * wu + size**2 * uu, 0))
            back = jnp.where((held > 0) & (after > 0), held / jnp.where(after > 0, after, 1), 1)
            return (back - 1) * w - back * size * u

        trees = updates, params, _like(params, state.norm), rates(params, matrix_dims)
        new = _on_matrices(step, matrix_dims, params, *trees, rest=lambda u: -rate * u)
        return new, HyperballState(optax.safe_increment(state.count), state.norm)

    return at_least_float32(optax.GradientTransformationExtraArgs(init, update))


class RowGainsState(NamedTuple):
    """States of the two optimizers, and lengths of the directions, on which depends how far a step turns a row."""

    directions: optax.OptState
    gains: optax.OptState
    length: optax.Params


def row_gains(
    directions: optax.GradientTransformation, gains: optax.GradientTransformation, *, matrix_dims: Any = None
) -> optax.GradientTransformationExtraArgs:
    """Train lengths and directions of rows apart: ``W = g V / ||V||``, row by row, inside the optimizer alone.

    ``g`` is the length of a row of W, and its gradient ``<G, e>`` with ``e = W / g``; that of V is
    ``g / ||V|| (G - <G, e> e)``, which lies across it. V begins as W. Steps across it lengthen it, and the longer it is
    the less a step turns it: the angles decay by themselves. The model sees W only.

    Args:
        directions: an optimizer, learning rate included, such as ``muon(1e-3, weight_decay=0.0)``. It is handed V and
            its gradient for matrices, and what is no matrix as it is.
        gains: an optimizer of the lengths g, such as ``optax.adamw(1e-3)``.
        matrix_dims: which parameters are matrices; see ``hybrid``.

    Returns:
        The optimizer of both. It needs ``params``. A row of zeros has no direction and takes the step as it is.

    Raises:
        TypeError: if one of the two is no optax transformation.
        ValueError: if the parameters are missing.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from normpre_optax import muon, row_gains
        >>> tx = row_gains(muon(1e-3, weight_decay=0.0), optax.adamw(1e-3, weight_decay=0.0))
        >>> params = {"kernel": jnp.eye(3), "bias": jnp.zeros(3)}
        >>> updates, state = tx.update(params, tx.init(params), params)
        >>> print(jnp.linalg.norm(params["kernel"] + updates["kernel"], axis=0))
        [0.999 0.999 0.999]

    References:
        Lion et al., Muown, arXiv 2605.10797 (github.com/kcc-lion/muown).
    """
    for name, tx in {"directions": directions, "gains": gains}.items():
        transformation(name, tx)
    of_directions, of_gains = map(optax.with_extra_args_support, (directions, gains))

    def init(params):
        length = _seen(_of_matrices(lambda w, dims: _length(w, dims, "rows"), matrix_dims, params))
        return RowGainsState(of_directions.init(params), of_gains.init(length), length)

    def update(updates, state, params=None, **extra_args):
        axes, boxed, bare = _axes(params, matrix_dims), jax.tree.structure(params), opened(params)
        same_trees(updates, params)
        flat, flat_of_rows = boxed.flatten_up_to, bare.flatten_up_to
        rows = [
            None if dims is None else _polar(grad, w, length, dims)
            for grad, w, length, dims in zip(flat(updates), flat(params), flat_of_rows(state.length), axes, strict=True)
        ]

        def tree(treedef, name: str, rest: list):
            return treedef.unflatten(
                [x if row is None else getattr(row, name) for row, x in zip(rows, rest, strict=True)]
            )

        vectors, gradients = tree(boxed, "vector", flat(params)), tree(boxed, "gradient", flat(updates))
        steps, turned = of_directions.update(gradients, state.directions, vectors, **extra_args)
        nothing = [optax.MaskedNode()] * len(rows)
        gain, radial = tree(bare, "gain", nothing), tree(bare, "radial", nothing)
        growth, grown = of_gains.update(radial, state.gains, gain, **extra_args)
        news = zip(rows, flat(steps), flat_of_rows(growth), flat(params), axes, strict=True)
        new = [
            (step, optax.MaskedNode()) if row is None or dims is None else _moved(row, step, longer, w, dims)
            for row, step, longer, w, dims in news
        ]
        moves, lengths = zip(*new, strict=True) if new else ((), ())
        return boxed.unflatten(moves), RowGainsState(turned, grown, bare.unflatten(lengths))

    return at_least_float32(optax.GradientTransformationExtraArgs(init, update))


class _Polar(NamedTuple):
    """Rows of a matrix by length and direction: g and its gradient, V and its own."""

    gain: jax.Array
    radial: jax.Array
    vector: jax.Array
    gradient: jax.Array


def _polar(grad: jax.Array, w: jax.Array, length: jax.Array, dims: MatrixDims) -> _Polar:
    gain = _length(w, dims, "rows")
    unit = w / jnp.where(gain == 0, 1, gain)
    radial = _sum(grad * unit, dims, "rows")
    turn = jnp.where(gain == 0, 1, gain) / jnp.where(length == 0, 1, length)
    return _Polar(gain, radial, length * unit, turn * (grad - radial * unit))


def _moved(row: _Polar, step: jax.Array, growth: jax.Array, w: jax.Array, dims: MatrixDims):
    """The step of W, and the new length of V."""
    vector = row.vector + step
    length = _length(vector, dims, "rows")
    gain = jnp.where(row.gain == 0, length, row.gain + growth)
    return vector * (gain / jnp.where(length == 0, 1, length)) - w, length


def _lengths(u: jax.Array, w: jax.Array, dims: MatrixDims, per: Per) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Length of w, growth to that of w + u (not as a difference of large numbers), and that length: one pass."""
    ww, wu, uu = (_sum(product, dims, per) for product in (w * w, w * u, u * u))
    before, after = jnp.sqrt(ww), jnp.sqrt(jnp.maximum(ww + 2 * wu + uu, 0))
    both = before + after
    return before, (2 * wu + uu) / jnp.where(both == 0, 1, both), after


def _lengthened(u: jax.Array, w: jax.Array, by: jax.Array, after: jax.Array) -> jax.Array:
    """The step to (w + u) (after + by) / after, ``after`` being the length of w + u."""
    return u + (w + u) * (by / jnp.where(after == 0, 1, after))


def _length(x: jax.Array, dims: MatrixDims, per: Per) -> jax.Array:
    return jnp.sqrt(_sum(x * x, dims, per))


def _sum(x: jax.Array, dims: MatrixDims, per: Per) -> jax.Array:
    """Over every row, or every matrix, with size one in place of the inputs."""
    return _by_block(_sum_of_matrix, x, dims) if per == "matrix" else _sum_of_rows(x, dims)


def _sum_of_rows(x: jax.Array, dims: MatrixDims) -> jax.Array:
    _, _, inputs = split_axes(x.ndim, dims)
    return jnp.sum(x, axis=inputs, keepdims=True)


def _sum_of_matrix(x: jax.Array, dims: MatrixDims) -> jax.Array:
    rows = _sum_of_rows(x, dims)
    if equal_blocks(dims) == 1:
        return jnp.sum(rows, axis=split_axes(x.ndim, dims)[1], keepdims=True)
    blocks = to_matrices(gathered(rows), dims)
    return from_matrices(jnp.broadcast_to(blocks.sum(-2, keepdims=True), blocks.shape), dims, rows.shape)


def _by_block(f: Callable[[jax.Array, MatrixDims], jax.Array], x: jax.Array, dims: MatrixDims) -> jax.Array:
    """``f`` of the parameter; where its blocks are of given sizes, of each of them, spread over its rows."""
    blocks = blocks_of(x, dims)
    if not blocks[1:]:
        return f(x, dims)
    one = replace(dims, output_blocks=1)
    spread = [jnp.broadcast_to(f(block, one), _sum_of_rows(block, one).shape) for block in blocks]
    return jnp.concatenate(spread, block_axis(x.ndim, dims))


def _axes(params, matrix_dims) -> list[MatrixDims | None]:
    return [one.dims for one in _choices(params, matrix_dims)]


def _need(params) -> None:
    if params is None:
        raise ValueError("norm control needs the parameters: call update(grads, state, params)")


def _choices(params, matrix_dims) -> list[Choice]:
    _need(params)
    return list(resolve(params, matrix_dims).values())


def rates(params, matrix_dims):
    """How many times the learning rate every parameter has, as a tree."""
    return jax.tree.structure(params).unflatten([in_context(one.rate) for one in _choices(params, matrix_dims)])


def _of_matrices(f: Callable, matrix_dims, params):
    """``f`` of every matrix and its axes, in a tree with ``optax.MaskedNode`` for what is none."""
    leaves, axes = jax.tree.leaves(params), _axes(params, matrix_dims)
    return opened(params).unflatten(
        [optax.MaskedNode() if d is None else f(w, d) for w, d in zip(leaves, axes, strict=True)]
    )


def _seen(norms):
    """Lengths that ``init`` found; a warning where there are none. Inside ``jit`` nothing is known of them."""
    named = jax.tree_util.tree_leaves_with_path(norms)
    here = [(path, x) for path, x in named if not isinstance(x, Tracer) and x.is_fully_addressable]
    lengths = jax.device_get([x for _, x in here])
    none = [path for (path, _), length in zip(here, lengths, strict=True) if not length.all()]
    if none:
        first = jax.tree_util.keystr(none[0], simple=True, separator="/")
        more = f" and {len(none) - 1} more" if none[1:] else ""
        warnings.warn(
            f"norm control: parameter {first!r}{more}, or some rows of it, begin at zero: there is no length to hold, "
            "so what is zero grows freely and undecayed. Begin with a small standard deviation, or leave the parameter "
            "to AdamW (None in matrix_dims)",
            stacklevel=2,
        )
    return norms


def opened(params):
    """The tree without its boxes: axes named for a parameter, and shardings made of them, do not fit its lengths."""

    def content(node):
        first, *others = jax.tree.leaves(node) or [optax.MaskedNode()]
        return [first, *others] if others else first

    return jax.tree.structure(jax.tree.map(lambda x: content(x) if is_box(x) else x, params, is_leaf=is_box))


def _same_lengths(held: jax.Array, here: jax.Array) -> None:
    if held.shape != here.shape:
        raise ValueError(
            f"the state holds lengths of shape {held.shape}, these are {here.shape}: it is of another per="
        )


def _like(params, lengths):
    """What ``_of_matrices`` made, in the parameters' boxes."""
    _need(params)
    return jax.tree.structure(params).unflatten(opened(params).flatten_up_to(lengths))


def _on_matrices(f: Callable, matrix_dims, params, updates, *trees, rest: Callable = lambda u: u):
    """``f`` of every matrix's update, its leaves in ``trees`` and its axes; ``rest`` of the other updates."""
    axes, treedef = _axes(params, matrix_dims), jax.tree.structure(params)
    same_trees(updates, params)
    leaves = zip(axes, *map(treedef.flatten_up_to, (updates, *trees)), strict=True)
    return treedef.unflatten([rest(u) if dims is None else f(u, *given, dims) for dims, u, *given in leaves])


def _stateless(f: Callable, matrix_dims) -> optax.GradientTransformationExtraArgs:
    def update(updates, state, params=None, **extra_args):
        del extra_args
        return _on_matrices(f, matrix_dims, params, updates, params), state

    return at_least_float32(optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update))
