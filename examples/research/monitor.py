# SPDX-License-Identifier: Apache-2.0
"""An optimizer that writes diagnostics of its matrices into its state every so many
steps.

The record is part of the state, so it needs no callback: it is there after the step,
under ``jit`` and ``scan``.
"""

import fnmatch
import functools
from collections.abc import Iterable
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
    """Wrap an optimizer: the same updates, and a record of diagnostics on steps 0,
    ``every``, 2 ``every``, ...

    Nothing is computed on the steps in between. "alignment" and "update_rms" are those
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
    names = diagnostics.check_names(record)
    patterns = (parameters,) if isinstance(parameters, str) else tuple(parameters)
    inner = optax.with_extra_args_support(tx)
    measure = functools.partial(
        diagnostics.measure,
        names=names,
        rank=rank,
        orientation=orientation,
        tangent=tangent,
    )

    def measured(gradients, updates, state, params) -> dict[str, dict[str, Any]]:
        chosen = _chosen(params, matrix_dims, patterns)
        weights, gradients, updates = (
            _by_path(tree) for tree in (params, gradients, updates)
        )
        signals = (
            _momenta(state, weights, chosen) if signal == "momentum" else gradients
        )
        found = {}
        for path, dims in chosen.items():
            own = [
                _gathered(tree[path]) for tree in (signals, weights, gradients, updates)
            ]
            axis = split_axes(own[0].ndim, dims)[1][0]
            for i, (at, one, _) in enumerate(blocks_of(own[0].shape, dims)):
                name = path if dims.output_blocks == 1 else f"{path}/{i}"
                m, w, g, u = (
                    jax.lax.slice_in_dim(x, at.start, at.stop, axis=axis) for x in own
                )
                found[name] = measure(m, w, one, gradient=g, update=u)
        return found

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
        found = jax.eval_shape(measured, params, params, state, params)
        return jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), found
        )

    def init(params):
        state = inner.init(params)
        return MonitorState(
            jnp.zeros((), jnp.int32),
            jnp.full((), -1, jnp.int32),
            empty(params, state),
            state,
        )

    def update(updates, state, params=None, **extra_args):
        if params is None:
            raise ValueError(
                "monitor needs the parameters: call update(grads, state, params)"
            )
        new, inner_state = inner.update(
            updates, state.inner_state, params, **extra_args
        )
        step, found = recorded(
            state.count, (state.step, state.record), updates, new, inner_state, params
        )
        return new, MonitorState(
            jnp.asarray(optax.safe_increment(state.count)), step, found, inner_state
        )

    return optax.GradientTransformationExtraArgs(init, update)


def monitored(state: optax.OptState) -> Monitored:
    """Return the record in the state of an optimizer that contains a monitor, without
    boxes of Flax.

    Raises:
        ValueError: if there is no state of a monitor, or more than one.
    """
    found = _nodes(state, MonitorState)
    if len(found) != 1:
        raise ValueError(
            f"the state has {len(found)} monitors, expected one: wrap the optimizer in"
            " monitor(...)"
        )
    record = found[0].step, found[0].record
    return Monitored(
        *jax.tree.unflatten(jax.tree.structure(record), jax.tree.leaves(record))
    )


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
    return {
        path: dims
        for path, dims in matrices.items()
        if any(fnmatch.fnmatchcase(path, p) for p in patterns)
    }


def _by_path(tree: Any) -> dict[str, jax.Array]:
    return {path: leaf for path, leaf, *_ in named_leaves(tree)}


def _nodes(state: Any, kind: type) -> list[Any]:
    def is_kind(x):
        return isinstance(x, kind)

    return list(filter(is_kind, jax.tree.leaves(state, is_leaf=is_kind)))


def _momenta(
    state: Any, weights: dict[str, jax.Array], chosen: dict
) -> dict[str, jax.Array]:
    """Momenta of the chosen parameters, from every ``optax.trace`` in the state."""
    kept = [
        item
        for node in _nodes(state, optax.TraceState)
        for item in _by_path(node.trace).items()
    ]
    found = {
        path: x for path, x in kept if path in chosen and x.shape == weights[path].shape
    }
    for path in chosen:
        if path not in found:
            raise ValueError(
                f"the optimizer has no momentum (optax.trace) for {path!r}: choose"
                " other parameters, or monitor(..., signal='gradient')"
            )
    return found


def _gathered(x: jax.Array) -> jax.Array:
    return functools.reduce(unsharded, range(x.ndim), x)
