# SPDX-License-Identifier: Apache-2.0
"""Small problems that every device of a mesh has, such as Gram matrices summed over it: each solved by one of them."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec

from normpre_optax.meshes.specs import Axes, axes_of

Together = Callable[[Callable, Sequence[Any]], list[Any]]


def shared_out(together: Together, mesh: AbstractMesh, specs: Sequence[PartitionSpec]) -> Together:
    """``together`` with its work divided over the devices that have the same problems, and the results gathered.

    Stacks that are spread along their batch axis stay where they are. Devices divide along the axes that spread rows
    or columns of some matrix and the batch of none; along others, such as data parallelism, they all do the same.

    Args:
        together: ``(f, problems) -> results``: applies ``f`` to trees of arrays ``(..., l, l)``, those of one size in
            one call.
        mesh: where the problems are.
        specs: where the stack ``(batch, rows, columns)`` lies that each problem came of.

    Returns:
        What stands in for ``together``.
    """
    batches = [axes_of(batch) for batch, *_ in specs]
    spread = {a for _, *sides in specs for entry in sides for a in axes_of(entry)} - set(sum(batches, ()))
    team = tuple(a for a in mesh.shape if a in spread)
    size = math.prod(mesh.shape[a] for a in team)

    def divided(f: Callable, problems: Any) -> Any:
        first = jax.tree.leaves(problems)[0]
        count = 1 if first.ndim == 2 else len(first)
        if size == 1 or count == 1:
            return f(problems)
        share = -(-count // size)
        mine = (jax.lax.axis_index(team) * share + jnp.arange(share)) % count
        solved = f(jax.tree.map(lambda x: x[mine], problems))
        return jax.tree.map(lambda x: jax.lax.all_gather(x, team, tiled=True)[:count], solved)

    def lies(problem: Any, batch: Axes) -> PartitionSpec:
        return PartitionSpec(batch) if batch and any(x.ndim > 2 for x in jax.tree.leaves(problem)) else PartitionSpec()

    def on_mesh(f: Callable, problems: Sequence[Any]) -> list[Any]:
        own = [lies(*one) for one in zip(problems, batches, strict=True)]
        on_device = lambda given: together(functools.partial(divided, f), given)  # noqa: E731
        # What is gathered is the same on all of a team.
        return jax.shard_map(on_device, mesh=mesh, in_specs=(own,), out_specs=own, check_vma=False)(list(problems))

    return on_mesh
