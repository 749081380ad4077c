# SPDX-License-Identifier: Apache-2.0
"""Distribute matrices over a mesh by sharding constraints; XLA communicates them."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from normpre_optax.linalg.batches import batched, solve_together
from normpre_optax.sharding.placement import replicated
from normpre_optax.trees import PyTree


def in_auto_axes(f: Callable, mesh: AbstractMesh, out: PyTree) -> Callable:
    """Return ``f`` for arrays with Explicit axes, which are Auto inside of it.

    Args:
        f: function of trees of arrays.
        mesh: the mesh of its arguments.
        out: tree of the ``PartitionSpec`` of its results.
    """

    def on_mesh(*args: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh):
            return jax.sharding.auto_axes(f, out_sharding=out)(*args)

    # Under jit the arguments provide the mesh, so callers need none in context.
    return jax.jit(on_mesh)


def over_devices(
    f: Callable[[jax.Array], jax.Array], xs: list[jax.Array], mesh: AbstractMesh
) -> list[jax.Array]:
    """Compute a function of stacks of matrices, each matrix on one device.

    It serves any sharding of the parameters. The stack of all matrices of one shape is
    sharded over its batch axis, and XLA communicates it by all-to-alls. Only the
    largest mesh axis shares the work, because XLA would gather every matrix with
    several axes. Tall matrices are transposed, so that fewer shapes remain.

    Args:
        f: function of a stack of matrices ``(count, m, n)``, which returns one of the
            same shape. It must commute with transposition.
        xs: stacks ``(..., m, n)``.
        mesh: a mesh with Auto axes.

    Returns:
        Arrays with the shapes of ``xs``.
    """
    axis = max(mesh.shape, key=mesh.shape.__getitem__)
    one_each = NamedSharding(mesh, PartitionSpec(axis))

    def distributed(compute: Callable[[jax.Array], jax.Array]) -> Callable:
        def run(x: jax.Array) -> jax.Array:
            missing = -len(x) % mesh.shape[axis]
            padding = jnp.zeros((missing, *x.shape[1:]), x.dtype)
            padded = jnp.concatenate([x, padding])
            sharded = jax.lax.with_sharding_constraint(padded, one_each)
            return jax.lax.with_sharding_constraint(compute(sharded), one_each)

        return run

    # Without the barrier, XLA may shard state, such as momentum, like the stacks that
    # are computed from it.
    xs = jax.lax.optimization_barrier(xs)
    tall = [x.shape[-2] > x.shape[-1] for x in xs]
    problems = []
    for x, is_tall in zip(xs, tall, strict=True):
        wide = x.mT if is_tall else x
        problems.append((wide,))
    new = solve_together(f, problems, stacked=distributed)
    return [y.mT if is_tall else y for y, is_tall in zip(new, tall, strict=True)]


def solve_shared(
    shared: Sequence[bool],
    f: Callable,
    problems: Sequence[tuple[jax.Array, ...]],
    *,
    axes: tuple[str, ...],
) -> list[Any]:
    """Solve small problems on a mesh: ``batches.solve_together``, distributed.

    Args:
        shared: for each problem, whether all devices have the same. Otherwise it is of
            a parameter with sharded batch axes, and each device solves its own.
        f: function of the arrays of a problem.
        problems: tuples of arrays ``(..., a, b)``.
        axes: mesh axes whose devices share the work.

    Returns:
        The result of each problem.
    """
    same = [problem for problem, s in zip(problems, shared, strict=True) if s]
    stacked = functools.partial(_shared_vmap, axes=axes)
    solved = iter(solve_together(f, same, stacked=stacked))
    results = []
    for problem, is_shared in zip(problems, shared, strict=True):
        if is_shared:
            results.append(next(solved))
        else:
            results.append(batched(f, problem[0].ndim)(*problem))
    return results


def _shared_vmap(f: Callable, axes: tuple[str, ...]) -> Callable:
    """Return ``jax.vmap(f)`` for replicated stacks, distributed along these axes."""
    if not axes:
        return jax.vmap(f)

    def run(*stacks: jax.Array) -> Any:
        mesh = jax.typeof(stacks[0]).sharding.mesh
        count = len(stacks[0])
        devices = math.prod(mesh.shape[a] for a in axes)
        # The first problems fill up the last devices.
        padded = count + -count % devices
        places = jnp.arange(padded) % count
        spec = PartitionSpec(axes)
        mapped = jax.shard_map(jax.vmap(f), mesh=mesh, in_specs=spec, out_specs=spec)
        # Replicated before and after, or XLA shards the arrays that the stacks are
        # computed from.
        found = mapped(*(replicated(x)[places] for x in stacks))
        return jax.tree.map(lambda x: replicated(x)[:count], found)

    return run
