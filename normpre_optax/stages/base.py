# SPDX-License-Identifier: Apache-2.0
"""What stages have in common: a function of one parameter applied to a tree, and a
chain of stages in float32.
"""

import contextvars
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.sharding import PartitionSpec

from normpre_optax.checks import check_function
from normpre_optax.linalg.batches import join
from normpre_optax.linalg.platforms import by_platform, platform
from normpre_optax.linalg.products import at_least_float32
from normpre_optax.parameters.dims import MatrixDims, blocks_of, split_axes
from normpre_optax.parameters.rules import assign
from normpre_optax.sharding.auto import in_auto_axes
from normpre_optax.sharding.placement import (
    mesh_of,
    sharded_like,
    spec_of,
    unsharded,
    without_axis,
)

INIT_DIMS = contextvars.ContextVar[Any](
    "matrix_dims"
)  # what a direction assigned, while its stages' init runs
GROUP_BYTES = (
    96 * 2**20
)  # of parameters that a TPU computes together: what its vector memory holds


class CountState(NamedTuple):
    """Number of updates so far, int32 ``()``."""

    count: jax.typing.ArrayLike  # pyright: ignore[reportIncompatibleMethodOverride]


def init_count(params: Any) -> CountState:
    """State of a stage that depends on the step."""
    return CountState(jnp.zeros((), jnp.int32))


def assigned(updates: Any, params: Any, matrix_dims: Any) -> Any:
    """Return the ``Assignment`` of matrices; raise a ValueError that names a parameter
    that is not a matrix.
    """
    found = assign(updates if params is None else params, INIT_DIMS.get(matrix_dims))
    for spec in found.values():
        if spec.dims is None:
            raise ValueError(
                f"parameter {spec.path!r} of shape {spec.shape} is not a matrix"
                f" ({spec.reason}). Complete optimizers such as normpre_g pass it to"
                " AdamW. Around a direction or a stage alone, use optax.masked or"
                " optax.partition, or pass matrix_dims with its axes:"
                " MatrixDims(inputs=..., outputs=...)"
            )
    return found


def check_transformation(name: str, value: Any) -> None:
    """Raise a TypeError for what is not an optax transformation."""
    if not isinstance(value, optax.GradientTransformation):
        fix = "optax.stateless converts a function (updates, params) -> updates"
        raise TypeError(
            f"{name} must be an optax.GradientTransformation, got {value!r}; {fix}"
        )


class Block(NamedTuple):
    """A parameter, or one of its output blocks, in at least float32."""

    name: str
    dims: MatrixDims
    sharding: Any  # PartitionSpec; None is unknown
    u: Any
    w: Any
    rest: list[Any]


def split_blocks(
    updates: Any, params: Any, matrix_dims: Any, *trees: Any
) -> tuple[list[Block], Callable[[list[jax.Array]], Any]]:
    """Split a tree of updates into blocks.

    Args:
        updates: the updates.
        params: the parameters, or None.
        matrix_dims: which axes are inputs and outputs.
        *trees: trees with a leaf for every update; these leaves are split too.

    Returns:
        The blocks, and the function that builds the tree of new updates from one array
        per block.
    """
    specs = list(assigned(updates, params, matrix_dims).values())
    leaves, treedef = jax.tree.flatten(updates)
    weights = [None] * len(leaves) if params is None else jax.tree.leaves(params)
    blocks, counts = [], []
    for spec, u, *rest in zip(
        specs, leaves, weights, *map(jax.tree.leaves, trees), strict=True
    ):
        places, sharding = blocks_of(u.shape, spec.dims), spec_of(u, spec.sharding)
        counts.append(len(places))
        if len(places) > 1 and sharding is not None:
            sharding = without_axis(sharding, split_axes(u.ndim, spec.dims)[1][0])
        split = [_split(x, spec.dims, places) for x in (u, *rest)]
        for i, ((_, dims, _), u, w, *others) in enumerate(
            zip(places, *split, strict=True)
        ):
            name = spec.path if len(places) == 1 else f"{spec.path}/{i}"
            blocks.append(Block(name, dims, sharding, u, w, others))

    def rebuilt(new: list[jax.Array]) -> Any:
        arrays, out = iter(new), []
        for spec, u, count in zip(specs, leaves, counts, strict=True):
            parts = [next(arrays) for _ in range(count)]
            axis = split_axes(u.ndim, spec.dims)[1][0]
            out.append(
                (
                    sharded_like(jnp.concatenate(parts, axis), u)
                    if count > 1
                    else parts[0]
                ).astype(u.dtype)
            )
        return treedef.unflatten(out)

    return blocks, rebuilt


def _split(x: Any, dims: MatrixDims, places: list) -> list[Any]:
    """Split an array that has the outputs of a parameter into its blocks, in at least
    float32; repeat a number.
    """
    if x is None or jnp.ndim(x) == 0:
        return [x] * len(places)
    x = at_least_float32(x)
    if len(places) == 1:
        return [x]
    axis = split_axes(x.ndim, dims)[1][0]
    if x.shape[axis] == len(places):  # one entry per block
        return jnp.split(x, len(places), axis)
    x = unsharded(x, axis)
    return [jax.lax.slice_in_dim(x, at.start, at.stop, axis=axis) for at, *_ in places]


def map_matrices(
    f: Callable,
    updates: Any,
    params: Any,
    matrix_dims: Any,
    *trees: Any,
    stacked: bool = False,
) -> Any:
    """Apply ``f(update, weight, dims, *leaves of trees)`` to every parameter, or to
    each of its output blocks.

    ``stacked``: by shape, next to a spectral stage, which stacks them anyway.
    """
    blocks, rebuilt = split_blocks(updates, params, matrix_dims, *trees)
    return rebuilt(by_shape(f, blocks, stacked))


def by_shape(
    f: Callable[..., Any], blocks: list[Block], stacked: bool = True
) -> list[Any]:
    """Return ``f(u, w, dims, *rest)`` of every block; ``stacked``: on a GPU, which pays
    for kernels, by shape.

    On a mesh with unknown shardings, those of a stack could differ.
    """
    unknown = None in [x.sharding for x in blocks]
    if (
        not stacked
        or platform() != "gpu"
        or (unknown and mesh_of([x.u for x in blocks]) is not None)
    ):
        # Inside of jit, traced and lowered once per shape.
        once = (
            jax.jit(f, static_argnums=2)
            if blocks and isinstance(blocks[0].u, Tracer)
            else f
        )
        return [once(x.u, x.w, x.dims, *x.rest) for x in blocks]
    keys = [(x.dims, x.u.shape, x.u.dtype, x.sharding) for x in blocks]
    stacks, places = join([(x.u, x.w, *x.rest) for x in blocks], keys)

    def of(dims):
        return lambda u, w, *rest: f(u, w, dims, *rest)

    new = [
        jax.vmap(of(dims))(*stack)
        for (dims, *_), stack in zip(dict.fromkeys(keys), stacks, strict=True)
    ]
    return [jax.tree.map(lambda x, k=k: x[k], new[number]) for number, k in places]


def stage(
    step: Callable[[Any, Any, Any, Any], tuple[Any, Any]], init: Any, matrix_dims: Any
) -> optax.GradientTransformationExtraArgs:
    """Return the transformation of ``step(updates, state, params, matrix_dims) ->
    (updates, state)``.

    Inside a direction, ``update`` is passed the assigned axes as ``matrix_dims``;
    alone, it reads its own.
    """

    def update(updates, state, params=None, *, matrix_dims=matrix_dims, **_):
        def run(updates, state, params):
            return step(updates, state, params, matrix_dims)

        return by_platform(run, updates, state, params)(updates, state, params)

    return optax.GradientTransformationExtraArgs(init, update)


def per_parameter(
    f: Callable[..., jax.Array], matrix_dims: Any = None
) -> optax.GradientTransformationExtraArgs:
    """Return the stateless stage of a function ``f(update, weight, dims)``.

    Args:
        f: function of one parameter in its own layout, in float32. ``weight`` is None
            if ``update`` is called without params.
        matrix_dims: see ``normpre_g``; ``direction`` overrides it.

    Returns:
        The stage.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import per_parameter
        >>> from normpre_optax.parameters.dims import split_axes
        >>> def center(u, w, dims):
        ...     _, outputs, inputs = split_axes(u.ndim, dims)
        ...     return u - jnp.mean(u, inputs, keepdims=True)  # the mean of every row
        >>> kernel = jnp.array([[1.0, 2.0], [3.0, 2.0]])  # (in, out)
        >>> print(per_parameter(center).update(kernel, ())[0])
        [[-1.  0.]
         [ 1.  0.]]
    """
    check_function("f", f, "(update, weight, dims) -> update")

    def step(updates, state, params, dims):
        return (
            map_matrices(f, updates, params, dims),
            state,
        )

    return stage(step, lambda params: optax.EmptyState(), matrix_dims)


def direction(
    *stages: optax.GradientTransformation, matrix_dims: Any = None
) -> optax.GradientTransformationExtraArgs:
    """Chain stages to the direction of matrices, before decay and learning rate.

    Half-precision gradients and weights are converted to float32 once, so that
    accumulators are float32; the update has the dtype of the parameter. The axes of
    every parameter are assigned once and passed to the stages as ``matrix_dims``, also
    to those of a direction inside this one, and the gradients as ``gradients``.

    Args:
        stages: optax transformations and stages of this library.
        matrix_dims: which axes are inputs and outputs; see ``normpre_g``.

    Returns:
        The transformation. Its updates point uphill, like those of
        ``optax.scale_by_*``.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from normpre_optax import direction, normalize_rows
        >>> tx = direction(optax.trace(0.9), normalize_rows())
        >>> kernel = jnp.array([[3.0, 0.0], [4.0, 2.0]])  # (in, out)
        >>> print(tx.update(kernel, tx.init(kernel))[0].T)
        [[0.6 0.8]
         [0.  1. ]]
    """
    for one in stages or (None,):
        check_transformation("stages", one)
    chain = optax.with_extra_args_support(optax.chain(*stages))

    def init(params):
        inside = contextvars.copy_context()
        inside.run(INIT_DIMS.set, assigned(params, None, matrix_dims))
        return inside.run(chain.init, jax.tree.map(at_least_float32, params))

    def update(updates, state, params=None, *, matrix_dims=matrix_dims, **extra_args):
        extra_args["matrix_dims"] = assigned(updates, params, matrix_dims)
        run, mesh = functools.partial(in_groups, chain, extra_args), mesh_of(updates)
        if (
            mesh is not None
            and mesh.size == 1
            and isinstance(jax.tree.leaves(updates)[0], Tracer)
        ):
            # Explicit axes of one device: Auto ones are no mesh. Outside of jit, this
            # would compile at every call.
            specs = jax.tree.map(
                lambda x: spec_of(x) or PartitionSpec(), (updates, state)
            )
            run = in_auto_axes(run, mesh, specs)
        new, state = by_platform(run, updates, state, params)(updates, state, params)
        like = updates if params is None else params
        return jax.tree.map(lambda u, p: u.astype(p.dtype), new, like), state

    return optax.GradientTransformationExtraArgs(init, update)


def in_groups(
    chain: optax.GradientTransformationExtraArgs,
    extra_args: dict,
    updates,
    state,
    params,
) -> tuple:
    """Update in float32; on one TPU, compute the same for one group of parameters after
    the other.

    In one graph of many matrices, XLA for TPU reads them from main memory inside the
    products, and the sketch keeps every ``Psi`` alive. Groups of what fits on the chip,
    one after the other, avoid both.
    """
    updates, params = jax.tree.map(at_least_float32, (updates, params))
    leaves, treedef = jax.tree.flatten(updates)
    starts = list(
        itertools.accumulate((x.size * x.dtype.itemsize for x in leaves), initial=0)
    )[:-1]
    groups = [*dict.fromkeys(start // GROUP_BYTES for start in starts)]
    if (
        len(groups) < 2
        or platform() != "tpu"
        or mesh_of(updates) is not None
        or params is None
    ):
        # Inside another direction, they are its gradients; it has made the groups.
        return chain.update(
            updates, state, params, **({"gradients": updates} | extra_args)
        )
    new_state, structure = jax.tree.flatten_with_path(state)
    new_updates, new_state, u = {}, dict(new_state), None
    for group in groups:
        inside = [start // GROUP_BYTES == group for start in starts]

        def only(tree: Any, *_: Any, inside: list[bool] = inside) -> Any:
            """Keep the parameters of the group."""
            leaves, treedef = jax.tree.flatten(tree)
            return treedef.unflatten(
                [
                    x if k else optax.MaskedNode()
                    for k, x in zip(inside, leaves, strict=True)
                ]
            )

        part = optax.tree.map_params(chain, only, state, is_leaf=lambda _: True)
        mine = only(updates), only(params)
        if u is not None:
            mine, _ = jax.lax.optimization_barrier((mine, u))  # after the group before
        u, s = chain.update(
            mine[0], part, mine[1], **(extra_args | {"gradients": mine[0]})
        )
        new_updates |= dict(jax.tree.leaves_with_path(u))
        new_state |= dict(jax.tree.leaves_with_path(s))
    new = [new_updates[path] for path, _ in jax.tree.leaves_with_path(updates)]
    return treedef.unflatten(new), structure.unflatten(new_state.values())
