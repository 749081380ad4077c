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


def in_auto_axes(f: Callable, mesh: AbstractMesh, out: Any) -> Callable:
    """Return ``f`` for arrays with Explicit axes: inside it axes are Auto, and results
    are sharded by ``out``.
    """

    def on_mesh(*args: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh):
            return jax.sharding.auto_axes(f, out_sharding=out)(*args)

    return jax.jit(
        on_mesh
    )  # under jit the arguments provide the mesh, so callers need none in context


def over_devices(
    f: Callable[[jax.Array], jax.Array], xs: list[jax.Array], mesh: AbstractMesh
) -> list[jax.Array]:
    """Compute a function of stacks of matrices, each matrix on one device, for any
    sharding of the parameters.

    The stack of all matrices of one shape is sharded over its batch axis, and XLA
    communicates it by all-to-alls. Only the largest mesh axis shares the work, because
    XLA would gather every matrix with several axes. Tall matrices are transposed, so
    that fewer shapes remain.
    """
    axis = max(mesh.shape, key=mesh.shape.__getitem__)
    place = functools.partial(
        jax.lax.with_sharding_constraint,
        shardings=NamedSharding(mesh, PartitionSpec(axis)),
    )

    def placed(x: jax.Array) -> jax.Array:
        padding = jnp.zeros((-len(x) % mesh.shape[axis], *x.shape[1:]), x.dtype)
        return place(f(place(jnp.concatenate([x, padding]))))

    tall = [x.shape[-2] > x.shape[-1] for x in xs]
    # Without the barrier, XLA may shard state, such as momentum, like the stacks that
    # are computed from it.
    xs = jax.lax.optimization_barrier(xs)
    wide = [(x.mT if is_tall else x,) for x, is_tall in zip(xs, tall, strict=True)]
    new = solve_together(f, wide, stacked=lambda _: placed)
    return [t.mT if is_tall else t for t, is_tall in zip(new, tall, strict=True)]


def solve_shared(
    shared: Sequence[bool], f: Callable, problems: Sequence, *, axes: tuple[str, ...]
) -> list[Any]:
    """Solve small problems on a mesh: ``batches.solve_together``, distributed along
    these mesh axes.

    Problems that are not ``shared`` are of parameters with sharded batch axes: each
    device solves its own.
    """
    own = (
        batched(f, problem[0].ndim)(*problem)
        for problem, s in zip(problems, shared, strict=True)
        if not s
    )
    rest = [problem for problem, s in zip(problems, shared, strict=True) if s]
    together = iter(
        solve_together(f, rest, stacked=functools.partial(_shared_vmap, axes=axes))
    )
    return [next(together if s else own) for s in shared]


def _shared_vmap(f: Callable, axes: tuple[str, ...]) -> Callable:
    """Return ``jax.vmap(f)`` for replicated stacks, distributed over the devices along
    these mesh axes.
    """
    if not axes:
        return jax.vmap(f)

    def run(*stacks: jax.Array) -> Any:
        mesh, count = jax.typeof(stacks[0]).sharding.mesh, len(stacks[0])
        places = (
            jnp.arange(count + -count % math.prod(mesh.shape[a] for a in axes)) % count
        )
        spec = PartitionSpec(axes)
        mapped = jax.shard_map(jax.vmap(f), mesh=mesh, in_specs=spec, out_specs=spec)
        # Replicated before and after, or XLA shards the arrays that the stacks are
        # computed from.
        found = mapped(*(replicated(x)[places] for x in stacks))
        return jax.tree.map(lambda x: replicated(x)[:count], found)

    return run
