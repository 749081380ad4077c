# SPDX-License-Identifier: Apache-2.0
"""Transformations that take a matrix as it is stored, (rows, columns) or (columns, rows), without transposing it.

Transposing a large matrix costs a CPU as much as ten passes over it, and most stages need not: they can walk along the
other axis, or do the same to a matrix and to its transpose. Such a stage is an ``OrientedTransformation`` and is told
by a ``MatrixLayout`` how the matrix lies. Everything else is wrapped by ``oriented`` and sees (rows, columns).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec


class MatrixLayout(NamedTuple):
    """What a stage is told of the matrices it is handed, all of it static.

    It comes as the extra argument ``matrix_layout`` of ``update``, a name that is the library's own.

    Attributes:
        transposed: the last two axes of updates and parameters are (columns, rows).
        bounded: every row (or every column) has a length of the previous stage's choice, or is zero: its squares
            neither overflow nor vanish.
        parts: of how many arrays each stack was put together; empty where it does not matter.
        mesh: where the stacks live; None on a single device, and where nobody says how they lie.
        specs: which of its axes shard ``(batch, rows, columns)`` of each stack, as it is stored.
    """

    transposed: bool = False
    bounded: bool = False
    parts: Sequence[int] = ()
    mesh: AbstractMesh | None = None
    specs: Sequence[PartitionSpec] = ()


UPRIGHT = MatrixLayout()
"""(rows, columns), and nothing more is known."""


class OrientedTransformation(optax.GradientTransformationExtraArgs):
    """A transformation whose ``update`` also takes ``matrix_layout``, a ``MatrixLayout``.

    Where that is ``transposed``, the result is the transpose of what (rows, columns) would give. ``init`` always sees
    (rows, columns).
    """


def oriented(tx: optax.GradientTransformation) -> OrientedTransformation:
    """``tx`` itself if it takes ``matrix_layout``; otherwise ``tx`` on the transposes, and back, where they lie so.

    Args:
        tx: a transformation that reads the last two axes as (rows, columns).

    Returns:
        A transformation with the state of ``tx``.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from normpre_optax.transforms.oriented import MatrixLayout, oriented
        >>> first_row = optax.stateless(lambda updates, params: updates * jnp.array([[1.0], [0.0]]))
        >>> x = jnp.ones((2, 2))
        >>> print(oriented(first_row).update(x, optax.EmptyState(), matrix_layout=MatrixLayout(transposed=True))[0])
        [[1. 0.]
         [1. 0.]]
    """
    if isinstance(tx, OrientedTransformation):
        return tx
    inner = optax.with_extra_args_support(tx)

    def update(updates, state, params=None, *, matrix_layout=UPRIGHT, **extra_args):
        turn, specs = lambda tree: tree, matrix_layout.specs
        if matrix_layout.transposed:
            turn, specs = turned, [PartitionSpec(batch, *sides[::-1]) for batch, *sides in specs]
        if matrix_layout.mesh is not None:  # A stage inside may ask; nothing else of it holds there.
            extra_args["matrix_layout"] = MatrixLayout(mesh=matrix_layout.mesh, specs=specs)
        new, state = inner.update(turn(updates), state, turn(params), **extra_args)
        return turn(new), state

    return OrientedTransformation(inner.init, update)


class Normalizing(OrientedTransformation):
    """A stage after which every row (or every column) has a length of its choice, or is zero.

    ``chain`` tells the next stage so: ``MatrixLayout.bounded``.
    """


class RowScaling(Normalizing):
    """A stage without state that makes every row by a few numbers, which it finds first.

    Whoever has the numbers can choose between rows and columns without making either result, as
    ``alternate_orientation`` does.

    Attributes:
        factors: ``(updates, params, transposed)`` to those numbers, in a tree of arrays that broadcast to a matrix.
        apply: ``(updates, params, factors)`` to the result.
    """

    factors: Callable
    apply: Callable

    def __new__(cls, factors: Callable, apply: Callable) -> "RowScaling":
        """A stage of those two functions."""

        def update(updates, state, params=None, *, matrix_layout=UPRIGHT, **extra_args):
            del extra_args
            return apply(updates, params, factors(updates, params, matrix_layout.transposed)), state

        self = super().__new__(cls, lambda params: optax.EmptyState(), update)
        self.factors, self.apply = factors, apply
        return self


class Rescalable(OrientedTransformation):
    """A stage whose results can be had at a given root mean square, without a pass over them: ``at_rms(rms)``."""

    at_rms: Callable

    def __new__(cls, build: Callable) -> "Rescalable":
        """A stage that ``build(rms)`` makes, for rms None or a number."""
        self = super().__new__(cls, *build(None))
        self.at_rms = build
        return self


def chain(*stages: optax.GradientTransformation) -> OrientedTransformation:
    """``optax.chain`` of stages that are all told how the matrices lie.

    A stage that comes after a ``Normalizing`` one is told so, too.

    Args:
        stages: transformations that read the last two axes as (rows, columns).

    Returns:
        A transformation with the state of ``optax.chain(*stages)``.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import normalize_rows, scale_to_rms
        >>> from normpre_optax.transforms.oriented import MatrixLayout, chain
        >>> tx = chain(normalize_rows(), scale_to_rms(None))
        >>> x = jnp.array([[3.0, 0.0], [4.0, 1.0]])
        >>> print(tx.update(x, tx.init(x), matrix_layout=MatrixLayout(transposed=True))[0])
        [[0.6 0. ]
         [0.8 1. ]]
    """
    parts = [oriented(stage) for stage in stages]

    def update(updates, state, params=None, *, matrix_layout=UPRIGHT, **extra_args):
        new_state = []
        for stage, own in zip(parts, state, strict=True):
            updates, own = stage.update(updates, own, params, matrix_layout=matrix_layout, **extra_args)
            matrix_layout = matrix_layout._replace(bounded=isinstance(stage, Normalizing))
            new_state.append(own)
        return updates, tuple(new_state)

    return OrientedTransformation(optax.chain(*parts).init, update)


def in_context(x):
    """A hyperparameter that a stage closes over, as the mesh in context wants it; anything else as it is.

    ``optax.inject_hyperparams`` makes arrays of numbers, and on a mesh with Explicit axes they lie on it, while stages
    work with Auto axes.
    """
    if not isinstance(x, jax.Array):
        return x
    theirs, here = jax.typeof(x).sharding.mesh, jax.sharding.get_abstract_mesh()
    if AxisType.Explicit not in theirs.axis_types or here.empty or here.axis_types == theirs.axis_types:
        return x
    seen = []
    with jax.sharding.use_abstract_mesh(theirs):
        jax.sharding.auto_axes(lambda y: seen.append(y) or y, out_sharding=PartitionSpec())(x)
    return seen[0]


def turned(tree):
    """Every leaf with its last two axes exchanged."""
    return jax.tree.map(lambda x: jnp.swapaxes(x, -1, -2), tree)
