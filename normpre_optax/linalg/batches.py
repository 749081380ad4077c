# SPDX-License-Identifier: Apache-2.0
"""Arrays of one shape computed together, and matrices that are computed one by one."""

import itertools
import math
import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from normpre_optax.linalg.platforms import platform

Stacked = Callable[[Callable], Callable]  # a function of one array to one of stacks
Groups = tuple[tuple[int, ...], ...]  # indices of what is computed together


def grouped(keys: Iterable[Hashable]) -> Groups:
    """Return the indices of equal keys, one group per key.

    Example:
        >>> from normpre_optax.linalg.batches import grouped
        >>> grouped("abca")
        ((0, 3), (1,), (2,))
    """
    groups: dict[Hashable, list[int]] = {}
    for i, key in enumerate(keys):
        groups.setdefault(key, []).append(i)
    return tuple(tuple(members) for members in groups.values())


def join(items: Sequence[Any], groups: Groups) -> list[Any]:
    """Stack trees of arrays: return one stack per group.

    Args:
        items: trees; those of a group have the same structure and shapes.
        groups: their indices, see ``grouped``.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.linalg.batches import grouped, join
        >>> arrays = [jnp.ones(2), jnp.ones(3), jnp.ones(2)]
        >>> [x.shape for x in join(arrays, grouped("aba"))]
        [(2, 2), (1, 3)]
    """
    stacks = []
    for members in groups:
        trees = [items[i] for i in members]
        stacks.append(jax.tree.map(lambda *xs: jnp.stack(xs), *trees))
    return stacks


def separate(stacks: Sequence[Any], groups: Groups) -> list[Any]:
    """Invert ``join``: return the trees in their order.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.linalg.batches import grouped, join, separate
        >>> groups = grouped("aba")
        >>> numbers = [jnp.float32(0), jnp.float32(1), jnp.float32(2)]
        >>> [float(x) for x in separate(join(numbers, groups), groups)]
        [0.0, 1.0, 2.0]
    """
    items: dict[int, Any] = {}
    for members, stack in zip(groups, stacks, strict=True):
        for index, i in enumerate(members):
            items[i] = jax.tree.map(operator.itemgetter(index), stack)
    return [items[i] for i in range(len(items))]


def solve_together(
    f: Callable, problems: Sequence[tuple[jax.Array, ...]], stacked: Stacked = jax.vmap
) -> list[Any]:
    """Return ``f(*problem)`` for each problem: one batched call for all of one size.

    Args:
        f: function of matrices ``(a, b)`` that returns a tree of arrays.
        problems: tuples of arrays ``(..., a, b)`` with equal leading axes.
        stacked: converts ``f`` to a function of stacks ``(count, a, b)``.

    Returns:
        The result of each problem; its arrays have the leading axes of the problem.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.linalg.batches import solve_together
        >>> problems = [(jnp.ones((2, 3)),), (jnp.ones((4, 2, 3)),)]
        >>> [x.shape for x in solve_together(jnp.transpose, problems)]
        [(3, 2), (4, 3, 2)]
    """
    results: list[Any] = [None] * len(problems)
    for members in grouped(_matrix_shapes(problem) for problem in problems):
        own = [problems[i] for i in members]
        solved = stacked(f)(*_concatenated(own))
        leads = [problem[0].shape[:-2] for problem in own]
        # Where the matrices of each problem end in the stack.
        ends = itertools.accumulate(map(math.prod, leads), initial=0)
        ranges = itertools.pairwise(ends)
        for i, lead, (start, end) in zip(members, leads, ranges, strict=True):
            results[i] = _part(solved, start, end, lead)
    return results


def _matrix_shapes(problem: tuple[jax.Array, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the arrays without leading axes."""
    return tuple(x.shape[-2:] for x in problem)


def _concatenated(problems: list[tuple[jax.Array, ...]]) -> list[jax.Array]:
    """Return one stack ``(count, a, b)`` per position in the problems."""
    flat = [[x.reshape(-1, *x.shape[-2:]) for x in problem] for problem in problems]
    return [jnp.concatenate(xs) for xs in zip(*flat, strict=True)]


def _part(stacks: Any, start: int, end: int, lead: tuple[int, ...]) -> Any:
    """Return a range of a tree of stacks, with these leading axes."""

    def part(x: jax.Array) -> jax.Array:
        return x[start:end].reshape(*lead, *x.shape[1:])

    return jax.tree.map(part, stacks)


def batched(f: Callable, ndim: int) -> Callable:
    """Return a function of matrices as one of stacks with this number of axes."""
    for _ in range(ndim - 2):
        f = jax.vmap(f)
    return f


def one_at_a_time(f: Callable) -> Callable:
    """Return ``f`` of one matrix, which on a CPU stays one matrix under ``jax.vmap``.

    Batched LAPACK calls that run side by side can deadlock XLA's CPU thread pool
    (docs/cpu_hang.md).
    """
    if platform() == "cpu":
        return jax.custom_batching.sequential_vmap(f)
    return f
