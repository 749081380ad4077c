# SPDX-License-Identifier: Apache-2.0
"""``monitor``: an optimizer that also writes down what it does, every so many steps, and does nothing else.

The record is part of the optimizer's state, so it needs no callback: it is there after the step, under ``jit`` and
``scan`` and on every device. ``monitored`` takes it out.
"""

import fnmatch
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from normpre_optax import diagnostics
from normpre_optax.meshes.specs import gathered
from normpre_optax.parameters.dims import MatrixDims
from normpre_optax.parameters.leaves import named_leaves
from normpre_optax.parameters.rules import Choices, pieces, resolve
from normpre_optax.transforms.blocks import blocks_of
from normpre_optax.transforms.checks import choice, static_int, transformation

SIGNALS = ("momentum", "gradient")


class MonitorState(NamedTuple):
    """State of ``monitor``.

    Attributes:
        count: steps taken so far, int32 ``()``.
        step: the step at which the record was made, counted from 0, int32 ``()``; -1 before the first.
        record: ``{parameter: {diagnostic: arrays}}``, the arrays with an axis for the parameter's matrices.
        inner_state: the optimizer's own.
    """

    count: jax.typing.ArrayLike
    step: jax.typing.ArrayLike
    record: dict[str, dict[str, Any]]
    inner_state: optax.OptState


class Monitored(NamedTuple):
    """What ``monitored`` finds: the step of the record (-1 if none was made yet), and the record."""

    step: jax.typing.ArrayLike
    record: dict[str, dict[str, Any]]


def monitor(
    tx: optax.GradientTransformation,
    *,
    every: int = 100,
    record: str | Iterable[str] = ("mode_energies", "alignment", "update_rms", "radial_factor"),
    parameters: str | Iterable[str] = "*",
    signal: str = "momentum",
    rank: int = 32,
    orientation: str = "rows",
    tangent: str = "relaxed",
    tangent_radius: float = 1.0,
    matrix_dims: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """``tx`` with a record of chosen diagnostics in its state, made on steps 0, ``every``, 2 ``every``, ...

    The updates are those of ``tx``, and on the steps between nothing is computed. ``alignment`` and ``update_rms`` are
    those of what ``tx`` returns, learning rate and weight decay included; of a direction alone, which points uphill,
    the alignment has the other sign. On a mesh the chosen parameters are gathered for the record, one after the other.

    Args:
        tx: any optimizer of matrices, finished or not; it is wrapped as a whole.
        every: steps from record to record. The default finds NormPre's row orientation on all of them.
        record: which diagnostics, of ``diagnostics.NAMES``.
        parameters: which, by name, ``"blocks/0/attn/query/kernel"``, or by patterns such as ``"blocks/*/kernel"``;
            only matrices can be chosen.
        signal: ``"momentum"``, as ``optax.trace`` inside ``tx`` keeps it, or ``"gradient"``: what the spectra, the
            energies and the counts belong to.
        rank: spectral budget r of ``mode_energies``.
        orientation: ``"rows"`` or ``"columns"``, for all records.
        tangent: of the optimizer: ``"relaxed"``, ``"bounded"``, ``"strict"`` or ``"none"``.
        tangent_radius: of the optimizer.
        matrix_dims: as the optimizer's; see ``normpre``.

    Returns:
        The optimizer. ``monitored`` reads the record out of its state.

    Raises:
        ValueError: if an option or a diagnostic is unknown; at ``init``, if a pattern matches no matrix, or ``tx``
            keeps no momentum for a chosen parameter; at ``update``, if the parameters are missing.
        TypeError: if ``every`` or ``rank`` is traced.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from normpre_optax import monitor, monitored, normpre_l
        >>> tx = monitor(normpre_l(1e-3), every=10, record=["update_rms"])
        >>> params = {"up": {"kernel": jnp.eye(4, 8), "bias": jnp.zeros(8)}}
        >>> updates, state = tx.update(params, tx.init(params), params)
        >>> step, found = monitored(state)
        >>> print(step, {name: list(values) for name, values in found.items()})
        0 {'up/kernel': ['update_rms']}
    """
    transformation("tx", tx)
    every, rank = static_int("every", every, least=1), static_int("rank", rank, least=1)
    names = diagnostics.check_names(record)
    patterns = (parameters,) if isinstance(parameters, str) else tuple(parameters)
    for name, value, allowed in (
        ("signal", signal, SIGNALS),
        ("orientation", orientation, diagnostics.ORIENTATIONS),
        ("tangent", tangent, diagnostics.TANGENT_MODES),
    ):
        choice(name, value, allowed)
    inner = optax.with_extra_args_support(tx)

    def measure(dims: MatrixDims, arrays: list[jax.Array]) -> dict[str, Any]:
        signal_, weight, gradient, update = map(gathered, arrays)
        return diagnostics.measure(
            signal_,
            weight,
            dims,
            names=names,
            gradient=gradient,
            update=update,
            rank=rank,
            orientation=orientation,
            tangent=tangent,
            tangent_radius=tangent_radius,
        )

    def measured(gradients, updates, state, params) -> dict[str, dict[str, Any]]:
        chosen = _chosen(params, matrix_dims, patterns)
        signals = _momenta(state, params, chosen) if signal == "momentum" else _by_name(gradients, chosen)
        trees = (signals, *(_by_name(tree, chosen) for tree in (params, gradients, updates)))
        arrays, dims = {}, {}
        for path, one in chosen.items():
            for piece, *own in zip(pieces(one), *(blocks_of(tree[path], one.dims) for tree in trees), strict=True):
                arrays[piece.path], dims[piece.path] = own, piece.dims
        return _for_each(arrays, dims, measure)

    # Called outside jit, the condition would be compiled anew on every step; this keeps it.
    @jax.jit
    def recorded(count, last, gradients, updates, state, params):
        def now(_):
            return count, measured(gradients, updates, state, params)

        return jax.lax.cond(count % every == 0, now, lambda last: last, last)

    # Compiled with all its arguments: they bring the mesh on which the record lies.
    @functools.partial(jax.jit, keep_unused=True)
    def empty(params, state):
        found = jax.eval_shape(measured, params, params, state, params)
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), found)

    def init(params):
        state = inner.init(params)
        return MonitorState(jnp.zeros((), jnp.int32), jnp.full((), -1, jnp.int32), empty(params, state), state)

    def update(updates, state, params=None, **extra_args):
        if params is None:
            raise ValueError("monitor needs the parameters: call update(grads, state, params)")
        new, inner_state = inner.update(updates, state.inner_state, params, **extra_args)
        last = state.step, state.record
        step, found = recorded(state.count, last, updates, new, inner_state, params)
        return new, MonitorState(optax.safe_increment(state.count), step, found, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def monitored(state: optax.OptState) -> Monitored:
    """The record of ``monitor``, from the state of whatever optimizer it is a part of.

    Args:
        state: an optimizer's state, however deep the monitor's lies in it.

    Returns:
        The step at which the record was made, -1 if that is still to come, and
        ``{parameter: {diagnostic: arrays}}``, blocks of given sizes by themselves (``"qkv/kernel/0"``). Flax's boxes
        around arrays are opened.

    Raises:
        ValueError: if there is no monitor's state, or more than one.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from normpre_optax import monitor, monitored, normpre_g
        >>> tx = optax.chain(optax.clip_by_global_norm(1.0), monitor(normpre_g(1e-3)))
        >>> print(monitored(tx.init({"kernel": jnp.eye(4, 8)})).step)
        -1
    """
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, MonitorState))
    found = [node for node in nodes if isinstance(node, MonitorState)]
    if len(found) != 1:
        raise ValueError(f"the state holds {len(found)} monitors' states, not one; wrap the optimizer in monitor(...)")
    return Monitored(*_opened((found[0].step, found[0].record)))


def _opened(tree):
    """The tree without Flax's boxes."""
    return jax.tree.unflatten(jax.tree.structure(tree), jax.tree.leaves(tree))


def _chosen(params, matrix_dims, patterns: tuple[str, ...]) -> Choices:
    """The matrices that the patterns name, by name."""
    matrices = {path: one for path, one in resolve(params, matrix_dims).items() if one.dims is not None}
    for pattern in patterns:
        if not fnmatch.filter(matrices, pattern):
            raise ValueError(f"{pattern!r} names no matrix; choose from {', '.join(matrices) or 'none at all'}")
    return Choices({path: one for path, one in matrices.items() if any(fnmatch.fnmatchcase(path, p) for p in patterns)})


def _by_name(tree, chosen: Choices) -> dict[str, jax.Array]:
    """The chosen leaves of a tree like the parameters, in the order of ``chosen``."""
    found = {"/".join(names): leaf for names, leaf, _, _ in named_leaves(tree)}
    return {path: found[path] for path in chosen}


def _momenta(state, params, chosen: Choices) -> dict[str, jax.Array]:
    """Of each chosen parameter, what an ``optax.trace`` somewhere in the state keeps."""
    shapes = _by_name(params, chosen)
    found = {}
    for trace in _traces(state):
        for names, leaf, _, _ in named_leaves(trace):
            path = "/".join(names)
            if path in shapes and leaf.shape == shapes[path].shape:
                found.setdefault(path, leaf)
    for path in chosen:
        if path not in found:
            raise ValueError(
                f"the optimizer keeps no momentum (optax.trace) for {path!r}: choose other parameters, or "
                "monitor(..., signal='gradient')"
            )
    return found


def _traces(state) -> Iterator[Any]:
    for node in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, optax.TraceState)):
        if isinstance(node, optax.TraceState):
            yield node.trace


def _for_each(
    arrays: dict[str, list[jax.Array]], dims: dict[str, MatrixDims], f: Callable[[MatrixDims, list[jax.Array]], Any]
) -> dict[str, Any]:
    """``f`` of every parameter's arrays, one after the other: compiled once for all that are alike."""
    alike: dict[Hashable, list[str]] = {}
    for path, own in arrays.items():
        alike.setdefault((dims[path], *map(jax.typeof, own)), []).append(path)
    found = {}
    for paths in alike.values():

        def one(i: jax.Array, paths: list[str] = paths) -> Any:
            return f(dims[paths[0]], jax.lax.switch(i, [lambda p=p: arrays[p] for p in paths]))

        results = jax.lax.map(one, jnp.arange(len(paths)))
        found |= {path: jax.tree.map(lambda x, k=k: x[k], results) for k, path in enumerate(paths)}
    return {path: found[path] for path in arrays}
