# SPDX-License-Identifier: Apache-2.0
"""An optimizer that writes diagnostics of its matrices into its state.

The record is part of the state, so it needs no callback: it is there after the step,
under ``jit`` and ``scan``.
"""

import fnmatch
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from examples.research import diagnostics
from normpre_optax import MatrixDims
from normpre_optax.parameters.dims import blocks_of, split_axes
from normpre_optax.parameters.rules import assign
from normpre_optax.parameters.tree import named_leaves
from normpre_optax.sharding.placement import unsharded


class MonitorState(NamedTuple):
    """State of ``monitor``.

    Attributes:
        count: number of updates so far, int32 ``()``.
        step: the step of the record, counted from 0, int32 ``()``; -1 before the first.
        record: ``{parameter: {diagnostic: arrays}}``; the arrays have an axis for the
            matrices of the parameter.
        inner_state: the optimizer's own.
    """

    count: jax.Array
    step: jax.Array
    record: dict[str, dict[str, Any]]
    inner_state: optax.OptState


class Monitored(NamedTuple):
    """The step of a record (-1 if there is none yet), and the record."""

    step: jax.Array
    record: dict[str, dict[str, Any]]


def monitor(
    tx: optax.GradientTransformation,
    *,
    every: int = 100,
    record: str | Iterable[str] = (
        "mode_energies",
        "alignment",
        "update_rms",
        "radial_factor",
    ),
    parameters: str | Iterable[str] = "*",
    signal: Literal["momentum", "gradient"] = "momentum",
    rank: int = 32,
    orientation: Literal["rows", "columns"] = "rows",
    tangent: str = "relaxed",
    matrix_dims: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimizer: the same updates, and a record of diagnostics.

    It is computed on steps 0, ``every``, 2 ``every``, ..., and nothing on the steps in
    between. "alignment" and "update_rms" are those
    of the final update, learning rate and weight decay included.

    Args:
        tx: an optimizer, wrapped as a whole.
        every: number of steps from record to record.
        record: names of ``diagnostics.NAMES``.
        parameters: names of matrices, or patterns such as "blocks/*/kernel".
        signal: "momentum" (that of an ``optax.trace`` inside ``tx``) or "gradient":
            what ``X`` and ``Psi`` are from.
        rank: r of ``mode_energies``.
        orientation: "rows" or "columns".
        tangent: that of the optimizer.
        matrix_dims: those of the optimizer.

    Returns:
        The optimizer. ``monitored`` returns the record in its state.

    Raises:
        ValueError: if a diagnostic is unknown; at ``init``, if a pattern matches no
            matrix, or ``tx`` has no momentum for one; at ``update``, if params are
            missing.

    Example:
        >>> from normpre_optax import normpre_l
        >>> tx = monitor(normpre_l(1e-3), every=10, record=["update_rms"])
        >>> params = {"up": {"kernel": jnp.eye(4, 8), "bias": jnp.zeros(8)}}
        >>> updates, state = tx.update(params, tx.init(params), params)
        >>> step, found = monitored(state)
        >>> print(step, {name: list(values) for name, values in found.items()})
        0 {'up/kernel': ['update_rms']}
    """
    patterns = tuple(parameters)
    if isinstance(parameters, str):
        patterns = (parameters,)
    measure = functools.partial(
        diagnostics.measure,
        names=diagnostics.check_names(record),
        rank=rank,
        orientation=orientation,
        tangent=tangent,
    )

    def measured(gradients, updates, state, params) -> dict[str, dict[str, Any]]:
        chosen = _chosen(params, matrix_dims, patterns)
        weights = _by_path(params)
        signals = _by_path(gradients)
        trees = (weights, _by_path(gradients), _by_path(updates))
        if signal == "momentum":
            signals = _momenta(state, weights, chosen)
        found = {}
        for path, dims in chosen.items():
            own = [_gathered(tree[path]) for tree in (signals, *trees)]
            for name, one, blocks in _blocks(path, dims, own):
                m, w, g, u = blocks
                found[name] = measure(m, w, one, gradient=g, update=u)
        return found

    return _recording(optax.with_extra_args_support(tx), measured, every)


def _recording(
    inner: optax.GradientTransformationExtraArgs,
    measured: Callable[..., dict[str, dict[str, Any]]],
    every: int,
) -> optax.GradientTransformationExtraArgs:
    """An optimizer that calls ``measured`` every so many steps.

    ``measured`` is a function of gradients, updates, state and parameters.
    """

    @jax.jit  # compiled once also if update is called outside of jit
    def recorded(count, last, *trees):
        return jax.lax.cond(
            count % every == 0,
            lambda _: (count, measured(*trees)),
            lambda last: last,
            last,
        )

    # The unused arguments bring the mesh on which the record is placed.
    @functools.partial(jax.jit, keep_unused=True)
    def empty(params, state):
        def zeros(x):
            return jnp.zeros(x.shape, x.dtype, device=x.sharding)

        found = jax.eval_shape(measured, params, params, state, params)
        return jax.tree.map(zeros, found)

    def init(params):
        state = inner.init(params)
        return MonitorState(
            count=jnp.zeros((), jnp.int32),
            step=jnp.full((), -1, jnp.int32),
            record=empty(params, state),
            inner_state=state,
        )

    def update(updates, state, params=None, **extra_args):
        if params is None:
            raise ValueError(
                "monitor needs the parameters: call update(grads, state, params)"
            )
        new, inner_state = inner.update(
            updates, state.inner_state, params, **extra_args
        )
        last = (state.step, state.record)
        step, found = recorded(state.count, last, updates, new, inner_state, params)
        count = jnp.asarray(optax.safe_increment(state.count))
        return new, MonitorState(count, step, found, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _blocks(
    path: str, dims: MatrixDims, arrays: list[jax.Array]
) -> Iterator[tuple[str, MatrixDims, list[jax.Array]]]:
    """Name, axes and arrays of every block of a parameter's outputs.

    A parameter with one block keeps its name.
    """
    shape = arrays[0].shape
    axis = split_axes(len(shape), dims)[1][0]
    for i, (at, one, _) in enumerate(blocks_of(shape, dims)):
        name = path
        if dims.output_blocks != 1:
            name = f"{path}/{i}"
        blocks = [jax.lax.slice_in_dim(x, at.start, at.stop, axis=axis) for x in arrays]
        yield name, one, blocks


def monitored(state: optax.OptState) -> Monitored:
    """The record in the state of an optimizer that contains a monitor.

    It is without boxes of Flax.

    Raises:
        ValueError: if there is no state of a monitor, or more than one.
    """
    found = _nodes(state, MonitorState)
    if len(found) != 1:
        raise ValueError(
            f"the state has {len(found)} monitors, expected one: wrap the optimizer in"
            " monitor(...)"
        )
    record = (found[0].step, found[0].record)
    step, values = jax.tree.unflatten(
        jax.tree.structure(record), jax.tree.leaves(record)
    )
    return Monitored(step, values)


def _chosen(
    params: Any, matrix_dims: Any, patterns: tuple[str, ...]
) -> dict[str, MatrixDims]:
    """Axes of the matrices that match a pattern, by path."""
    matrices = {
        path: spec.dims
        for path, spec in assign(params, matrix_dims).items()
        if spec.dims is not None
    }
    for pattern in patterns:
        if not fnmatch.filter(matrices, pattern):
            raise ValueError(
                f"{pattern!r} matches no matrix; choose from"
                f" {', '.join(matrices) or 'none at all'}"
            )
    chosen = {}
    for path, dims in matrices.items():
        if any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns):
            chosen[path] = dims
    return chosen


def _by_path(tree: Any) -> dict[str, jax.Array]:
    """Arrays of a tree by their paths."""
    return {path: leaf for path, leaf, *_ in named_leaves(tree)}


def _nodes(state: Any, kind: type) -> list[Any]:
    """States of one kind within a state."""

    def is_kind(x):
        return isinstance(x, kind)

    return [node for node in jax.tree.leaves(state, is_leaf=is_kind) if is_kind(node)]


def _momenta(
    state: Any, weights: dict[str, jax.Array], chosen: dict
) -> dict[str, jax.Array]:
    """Momenta of the chosen parameters, from every ``optax.trace`` in the state."""
    found = {}
    for node in _nodes(state, optax.TraceState):
        for path, x in _by_path(node.trace).items():
            # Of another shape it is no momentum of the parameter.
            if path in chosen and x.shape == weights[path].shape:
                found[path] = x
    for path in chosen:
        if path not in found:
            raise ValueError(
                f"the optimizer has no momentum (optax.trace) for {path!r}: choose"
                " other parameters, or monitor(..., signal='gradient')"
            )
    return found


def _gathered(x: jax.Array) -> jax.Array:
    """The array, not sharded along any axis."""
    return functools.reduce(unsharded, range(x.ndim), x)
