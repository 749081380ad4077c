# SPDX-License-Identifier: Apache-2.0
"""Transformations that take a matrix as it is stored, (rows, columns) or (columns, rows), without transposing it.

Transposing a large matrix costs a CPU as much as ten passes over it, and most stages need not: they can walk along the
other axis, or do the same to a matrix and to its transpose. Such a stage is an ``OrientedTransformation`` and is told
by ``transposed`` how the matrix lies. Everything else is wrapped by ``oriented`` and sees (rows, columns).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, PartitionSpec


class OrientedTransformation(optax.GradientTransformationExtraArgs):
    """A transformation whose ``update`` also takes ``transposed``, a bool.

    With ``transposed=True`` the last two axes of updates and parameters are (columns, rows), and so are those of the
    result, which is the transpose of what (rows, columns) would give. ``init`` always sees (rows, columns).
    Where updates are stacks, ``parts`` may say of how many arrays each was put together.
    """


def oriented(tx: optax.GradientTransformation) -> OrientedTransformation:
    """``tx`` itself if it takes ``transposed``; otherwise ``tx`` on the transposes, and back, where that is True.

    Args:
        tx: a transformation that reads the last two axes as (rows, columns).

    Returns:
        A transformation with the state of ``tx``.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from normpre_optax.transforms.oriented import oriented
        >>> first_row = optax.stateless(lambda updates, params: updates * jnp.array([[1.0], [0.0]]))
        >>> x = jnp.ones((2, 2))
        >>> print(oriented(first_row).update(x, optax.EmptyState(), transposed=True)[0])
        [[1. 0.]
         [1. 0.]]
    """
    if isinstance(tx, OrientedTransformation):
        return tx
    inner = optax.with_extra_args_support(tx)

    def update(updates, state, params=None, *, transposed: bool = False, parts=(), **extra_args):
        del parts
        if not transposed:
            return inner.update(updates, state, params, **extra_args)
        new, state = inner.update(turned(updates), state, None if params is None else turned(params), **extra_args)
        return turned(new), state

    return OrientedTransformation(inner.init, update)


class Normalizing(OrientedTransformation):
    """A stage after which every row (or every column) has a length of its choice, or is zero.

    ``chain`` tells the next stage so, ``bounded=True``: its squares neither overflow nor vanish.
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

        def update(updates, state, params=None, *, transposed: bool = False, **extra_args):
            del extra_args
            return apply(updates, params, factors(updates, params, transposed)), state

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
        >>> from normpre_optax.transforms.oriented import chain
        >>> tx = chain(normalize_rows(), scale_to_rms(None))
        >>> x = jnp.array([[3.0, 0.0], [4.0, 1.0]])
        >>> print(tx.update(x, tx.init(x), transposed=True)[0])
        [[0.6 0. ]
         [0.8 1. ]]
    """
    parts = [oriented(stage) for stage in stages]

    def update(updates, state, params=None, **extra_args):
        new_state, known = [], {}
        for stage, own in zip(parts, state, strict=True):
            updates, own = stage.update(updates, own, params, **known, **extra_args)
            known = {"bounded": True} if isinstance(stage, Normalizing) else {}
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
