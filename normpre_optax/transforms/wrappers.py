# SPDX-License-Identifier: Apache-2.0
"""Wrappers that change what an ordinary transformation sees, and undo it on the way out: ``L^-1 . f . L``.

``as_matrices`` changes the layout, ``alternate_orientation``, ``fixed_orientation`` and ``both_orientations`` the
orientation, ``at_least_float32`` and ``in_dtype`` the dtype. What stands inside needs to know nothing of it.
"""

import functools
import math
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from normpre_optax.meshes.run import init_on_mesh, run_on_mesh
from normpre_optax.meshes.specs import mesh_of
from normpre_optax.parameters.dims import MatrixDims, batch_sizes, to_matrices, unstacked
from normpre_optax.parameters.rules import Choice, Choices, resolve
from normpre_optax.platforms import by_platform
from normpre_optax.transforms import batches
from normpre_optax.transforms.batches import Matrices, Parameter, is_per_parameter
from normpre_optax.transforms.blocks import in_blocks
from normpre_optax.transforms.checks import float_dtype
from normpre_optax.transforms.oriented import (
    UPRIGHT,
    MatrixLayout,
    Normalizing,
    OrientedTransformation,
    RowScaling,
    chain,
    in_context,
    oriented,
    turned,
)


def as_matrices(dims: Any, inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Let ``inner`` see every parameter as a stack of matrices ``(batch, out, in)``.

    ``inner`` must treat every matrix by itself: it is run on one matrix ``(out, in)`` at a time, or on stacks of many,
    whichever suits the device (see ``batches``): its updates are a list of them. State that it keeps for matrices is
    held as a tree like the parameters', in stacks. It is handed the matrices' identities as the extra argument
    ``matrix_ids``, uint32 ``(..., 2)``: crc32 of the parameter's path, and the place in its stack.

    Args:
        dims: which axes are inputs and outputs: everything that ``matrix_dims`` of the finished optimizers may be. None
            is the default rule; a bare 2-D leaf is read as (in, out).
        inner: a transformation that reads the last two axes as (rows, columns).

    Returns:
        A transformation on the parameters' own layout with the state of ``inner``.

    Raises:
        ValueError: if some leaf is no matrix by ``dims``, or its shape does not fit them.
        TypeError: if an extra argument of ``update`` is called ``matrix_layout``, the library's own word.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import MatrixDims, as_matrices, normalize_rows
        >>> kernel = {"kernel": jnp.array([[3.0, 0.0], [4.0, 1.0]])}  # (in, out): output neurons are columns
        >>> tx = as_matrices(MatrixDims(inputs=0, outputs=1), normalize_rows())
        >>> print(tx.update(kernel, tx.init(kernel))[0]["kernel"])
        [[0.6 0. ]
         [0.8 1. ]]
    """
    return in_blocks(dims, functools.partial(_as_whole_matrices, inner=oriented(inner)))


def _as_whole_matrices(dims: Choices, inner: OrientedTransformation) -> optax.GradientTransformationExtraArgs:
    def readings(tree) -> tuple[list[Choice], list[MatrixDims]]:
        """What was decided for every leaf, and its axes, in order."""
        found = list(resolve(tree, dims).values())
        for choice in found:
            if choice.dims is None:
                raise ValueError(
                    f"parameter {choice.path!r} of shape {choice.shape} is no matrix ({choice.reason}). The finished "
                    "optimizers (normpre_g, normpre_l, ...) send it to AdamW; a direction alone needs optax.masked or "
                    "optax.partition around it, or dims that read the leaf: MatrixDims(inputs=..., outputs=...)"
                )
        return found, [choice.dims for choice in found if choice.dims is not None]

    def init(params):
        leaves, treedef = jax.tree.flatten(params)
        found, axes = readings(params)
        sizes = [batch_sizes(one.shape, own) for one, own in zip(found, axes, strict=True)]

        def make(leaves):
            state = inner.init(treedef.unflatten(map(to_matrices, leaves, axes)))
            form = _StateForm.of(state, treedef, [(math.prod(of),) for of in sizes])
            kept, shared = form.split(state)
            kept = [treedef.unflatten(map(unstacked, treedef.flatten_up_to(tree), sizes)) for tree in kept]
            return form.join(kept, shared)

        mesh = mesh_of(params)
        return make(leaves) if mesh is None else init_on_mesh(make, params, axes, mesh)

    def update(updates, state, params=None, **extra_args):
        for name in {"matrix_layout", "matrix_ids"} & extra_args.keys():
            raise TypeError(f"{name} is what as_matrices tells its stages: give your extra argument another name")
        treedef = jax.tree.structure(updates)
        found, axes = readings(updates if params is None else params)
        if not found:
            return updates, inner.update(updates, state, params, **extra_args)[1]
        form = _StateForm.of(
            state, treedef, [batch_sizes(one.shape, own) for one, own in zip(found, axes, strict=True)]
        )
        kept, shared = form.split(state)
        kept = [treedef.flatten_up_to(tree) for tree in kept]
        weights = [None] * len(found) if params is None else jax.tree.leaves(params)
        parameters = [
            Parameter(u, w, _matrix_ids(one.path, one.shape, own), [leaves[i] for leaves in kept], own)
            for i, (u, w, one, own) in enumerate(zip(jax.tree.leaves(updates), weights, found, axes, strict=True))
        ]

        def stage(matrices: Matrices, shared: list[Any], layout: MatrixLayout) -> tuple[Any, list[Any], list[Any]]:
            view, extra = form.join(matrices.state, shared), jax.tree.map(in_context, extra_args)
            extra |= {"matrix_ids": matrices.ids, "matrix_layout": layout}
            new, view = inner.update(matrices.update, view, matrices.weight, **extra)
            return (new, *form.split(view))

        mesh, specs = mesh_of((updates, params)), {choice.path: choice.spec for choice in found}
        run = batches.run if mesh is None else functools.partial(run_on_mesh, mesh=mesh, specs=specs)
        new, kept, shared = run(stage, parameters, shared)
        return treedef.unflatten(new), form.join([treedef.unflatten(x) for x in zip(*kept, strict=True)], shared)

    return optax.GradientTransformationExtraArgs(init, update)


class _StateForm(NamedTuple):
    """Which parts of a state are trees of arrays, one for every parameter, and which are shared, such as counters."""

    outer: Any
    per_parameter: tuple[bool, ...]

    @classmethod
    def of(cls, state, treedef, sizes: list[tuple[int, ...]]) -> "_StateForm":
        per_parameter = functools.partial(is_per_parameter, treedef=treedef, sizes=sizes)
        nodes, outer = jax.tree.flatten(state, is_leaf=per_parameter)
        return cls(outer, tuple(map(per_parameter, nodes)))

    def split(self, state) -> tuple[list[Any], list[Any]]:
        parts = list(zip(self.outer.flatten_up_to(state), self.per_parameter, strict=True))
        return [part for part, own in parts if own], [part for part, own in parts if not own]

    def join(self, kept, shared):
        kept, shared = iter(kept), iter(shared)
        return self.outer.unflatten([next(kept if own else shared) for own in self.per_parameter])


def _matrix_ids(path: str, shape: tuple[int, ...], dims: MatrixDims) -> jax.Array:
    """uint32 ``(*batch, 2)``: crc32 of the path, and the place in the stack."""
    sizes = batch_sizes(shape, dims)
    places = np.arange(math.prod(sizes), dtype=np.uint32).reshape(sizes)
    return jnp.asarray(np.stack([np.full_like(places, zlib.crc32(path.encode())), places], axis=-1))


class AlternateOrientationState(NamedTuple):
    """Steps taken so far, int32 ``()``, and the state of the wrapped transformation."""

    count: jax.typing.ArrayLike
    inner_state: optax.OptState


def alternate_orientation(inner: optax.GradientTransformation, *, first: str = "rows") -> OrientedTransformation:
    """Let ``inner`` see matrices as they are on every other step, and transposed on the steps between.

    ``O_k^-1 . f . O_k`` with ``O_0(A) = A``, ``O_1(A) = A^T`` and ``k = count mod 2``.

    Args:
        inner: a transformation that reads the last two axes as (rows, columns).
        first: ``"rows"`` or ``"columns"``: the orientation of the first step.

    Returns:
        A transformation whose state is a step counter and the state of ``inner``.

    Raises:
        ValueError: if ``first`` is unknown, or (at ``init``) if the state of ``inner`` depends on the orientation: the
            momentum of an oriented matrix would be added to its transpose. Put such a stage outside.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import alternate_orientation, normalize_rows
        >>> tx = alternate_orientation(normalize_rows())
        >>> x = jnp.array([[3.0, 4.0], [0.0, 3.0]])
        >>> rows, state = tx.update(x, tx.init(x))
        >>> columns, state = tx.update(x, state)
        >>> print(rows, columns)
        [[0.6 0.8]
         [0.  1. ]] [[1.  0.8]
         [0.  0.6]]

    References:
        Normalize-Then-Precondition, "Alternating Row/Column Orientation".
    """
    if first not in ("rows", "columns"):
        raise ValueError(f"{first=} is neither 'rows' nor 'columns'")
    inner = oriented(inner)

    def init(params):
        _refuse_oriented_state(inner, params)
        return AlternateOrientationState(jnp.zeros((), jnp.int32), inner.init(params))

    def is_by_rows(state) -> jax.Array:
        return (state.count % 2 == 0) == (first == "rows")

    if isinstance(inner, RowScaling):

        def choose(updates, state, params=None, *, matrix_layout=UPRIGHT, **extra_args):
            del extra_args
            found = _factors_of_either(inner, updates, params, matrix_layout, is_by_rows(state))
            count = optax.safe_increment(state.count)
            return inner.apply(updates, params, found), AlternateOrientationState(count, state.inner_state)

        return Normalizing(init, choose)

    def update(updates, state, params=None, *, matrix_layout=UPRIGHT, **extra_args):
        def by(layout: MatrixLayout):
            return lambda u, s, p: inner.update(u, s, p, matrix_layout=layout, **extra_args)

        ways = by(matrix_layout), by(_other_way(matrix_layout))
        new, inner_state = jax.lax.cond(is_by_rows(state), *ways, updates, state.inner_state, params)
        return new, AlternateOrientationState(optax.safe_increment(state.count), inner_state)

    return OrientedTransformation(init, update)


def _other_way(layout: MatrixLayout) -> MatrixLayout:
    """The same stacks with rows for columns."""
    return layout._replace(transposed=not layout.transposed)


def _factors_of_either(inner: RowScaling, updates, params, layout: MatrixLayout, by_rows: jax.Array):
    """The factors of rows, or those of columns, as they broadcast to a matrix.

    A TPU takes both from one pass over memory, which costs it less than a branch (docs/performance.md). A CPU would
    compute twice, a GPU read twice: they branch. A GPU's branches stack what they read by themselves, of the ``parts``
    that each stack was made of: it would be laid down for them, and reading it is all they do.
    """

    def of(turn: bool):
        return lambda updates, params: inner.factors(updates, params, turn)

    # Inlined: what a jit gives is traced once, for shapes and for its branch.
    rows, columns = (jax.jit(of(turn), inline=True) for turn in (layout.transposed, not layout.transposed))

    def both(*given):
        return rows(*given), columns(*given)

    def one(*given, stacks: Callable = lambda *given: given):
        by_row, by_column = (lambda *given, f=f: f(*stacks(*given)) for f in (rows, columns))

        def nothing(f):
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(f, *given))

        return jax.lax.cond(
            by_rows,
            lambda *given: (by_row(*given), nothing(by_column)),
            lambda *given: (nothing(by_row), by_column(*given)),
            *given,
        )

    def one_of_parts(*given):
        def apart(stacks):
            return stacks and [jnp.split(x, count) for x, count in zip(stacks, layout.parts, strict=True)]

        def stacks(*given):
            together = lambda cut: cut and [jnp.concatenate(x) for x in cut]  # noqa: E731
            return map(together, jax.lax.optimization_barrier(given))  # which keeps the branch one

        return one(*map(apart, given), stacks=stacks)

    pair = by_platform(updates, params, cpu=one, tpu=both, default=one_of_parts if layout.parts else one)
    return jax.tree.map(lambda r, c: jnp.where(by_rows, r, c), *pair)


def fixed_orientation(inner: optax.GradientTransformation, orientation: str = "rows") -> OrientedTransformation:
    """Let ``inner`` see matrices as they are (``"rows"``) or transposed (``"columns"``), on every step.

    Args:
        inner: a transformation that reads the last two axes as (rows, columns).
        orientation: ``"rows"`` or ``"columns"``.

    Returns:
        A transformation with the state of ``inner``.

    Raises:
        ValueError: if ``orientation`` is unknown.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import normalize_rows
        >>> from normpre_optax.transforms.wrappers import fixed_orientation
        >>> tx = fixed_orientation(normalize_rows(), "columns")
        >>> x = jnp.array([[3.0], [4.0]])
        >>> print(tx.update(x, tx.init(x))[0].T)
        [[0.6 0.8]]
    """
    if orientation not in ("rows", "columns"):
        raise ValueError(f"{orientation=} is neither 'rows' nor 'columns'")
    inner = oriented(inner)
    if orientation == "rows":
        return inner
    if isinstance(inner, RowScaling):
        turned_factors = lambda updates, params, transposed: inner.factors(updates, params, not transposed)  # noqa: E731
        return RowScaling(turned_factors, inner.apply)

    def update(updates, state, params=None, *, matrix_layout=UPRIGHT, **extra_args):
        return inner.update(updates, state, params, matrix_layout=_other_way(matrix_layout), **extra_args)

    return OrientedTransformation(lambda params: inner.init(turned(params)), update)


def both_orientations(inner: optax.GradientTransformation) -> OrientedTransformation:
    """Apply ``inner`` to the rows, then to the columns of the result, on every step.

    Args:
        inner: a transformation that reads the last two axes as (rows, columns).

    Returns:
        A transformation whose state is a pair of states of ``inner``.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import normalize_rows
        >>> from normpre_optax.transforms.wrappers import both_orientations
        >>> tx = both_orientations(normalize_rows())
        >>> x = jnp.array([[3.0, 0.0], [0.0, 5.0]])
        >>> print(tx.update(x, tx.init(x))[0])
        [[1. 0.]
         [0. 1.]]
    """
    return chain(inner, fixed_orientation(inner, "columns"))


def at_least_float32(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Let ``inner`` see half-precision gradients and parameters in float32, so that its accumulators are float32 too.

    Args:
        inner: any transformation.

    Returns:
        A transformation with the state of ``inner`` whose updates have the parameters' dtype (without parameters, the
        gradients').

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from normpre_optax.transforms.wrappers import at_least_float32
        >>> tx = at_least_float32(optax.trace(0.9))
        >>> tx.init(jnp.ones(3, jnp.bfloat16)).trace.dtype
        dtype('float32')
    """
    inner = optax.with_extra_args_support(inner)

    def lift(x):
        x = jnp.asarray(x)
        return x.astype(jnp.float32) if x.dtype.itemsize < 4 else x

    def init(params):
        return inner.init(jax.tree.map(lift, params))

    def update(updates, state, params=None, **extra_args):
        like = updates if params is None else params
        lifted = None if params is None else jax.tree.map(lift, params)
        new, state = inner.update(jax.tree.map(lift, updates), state, lifted, **extra_args)
        return jax.tree.map(lambda u, p: u.astype(jnp.asarray(p).dtype), new, like), state

    return optax.GradientTransformationExtraArgs(init, update)


def in_dtype(dtype: jax.typing.DTypeLike | None, inner: optax.GradientTransformation) -> OrientedTransformation:
    """Hand ``inner`` its updates in ``dtype``, and give back what it makes of them in the dtype they came in.

    Args:
        dtype: dtype of the updates inside; None changes nothing.
        inner: any transformation.

    Returns:
        A transformation with the state of ``inner``.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from normpre_optax.transforms.wrappers import in_dtype
        >>> tx = in_dtype(jnp.bfloat16, optax.identity())
        >>> x = jnp.array([1.001])
        >>> print(tx.update(x, tx.init(x))[0])
        [1.]
    """
    float_dtype("compute_dtype", dtype)
    inner = oriented(inner)
    if dtype is None:
        return inner

    def update(updates, state, params=None, **extra_args):
        new, state = inner.update(jax.tree.map(lambda u: u.astype(dtype), updates), state, params, **extra_args)
        return jax.tree.map(lambda n, u: n.astype(u.dtype), new, updates), state

    return OrientedTransformation(inner.init, update)


def _refuse_oriented_state(inner: optax.GradientTransformation, params) -> None:
    """Compare the state for stacks of 2 x 3 matrices with that for their transposes: shapes tell, for squares too."""

    def state_shapes(rows: int, columns: int):
        probe = jax.tree.map(lambda x: jax.ShapeDtypeStruct((*x.shape[:-2], rows, columns), x.dtype), params)
        flat, _ = jax.tree_util.tree_flatten_with_path(jax.eval_shape(inner.init, probe))
        return {jax.tree_util.keystr(path): leaf.shape for path, leaf in flat}

    upright, turned = state_shapes(2, 3), state_shapes(3, 2)
    for path, shape in upright.items():
        if shape != turned.get(path):
            raise ValueError(
                f"state{path} has shape {shape} for rows and {turned.get(path)} for columns: it depends on the "
                "orientation and cannot alternate. Put the stage that keeps it outside alternate_orientation"
            )
