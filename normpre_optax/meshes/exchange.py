# SPDX-License-Identifier: Apache-2.0
"""Who computes what on a mesh: whole matrices travel once to the device that treats them, and once back.

A spectral stage multiplies a matrix by itself many times. Left to the partitioner, a sharded matrix is gathered for
every product. ``divided`` sends each matrix whole to one device instead, balanced by the work it makes; the rest of
the optimizer is cheap row by row and stays where the parameters are. ``plan`` says who gets which.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, PartitionSpec

from normpre_optax.meshes.plan import Team, Work, flat_index, make_plan, newton_schulz_work, stack_of
from normpre_optax.platforms import by_platform
from normpre_optax.transforms.checks import transformation
from normpre_optax.transforms.oriented import UPRIGHT, OrientedTransformation, Rescalable, oriented


def divided(inner: optax.GradientTransformation, work: Work | None = None) -> OrientedTransformation:
    """On a mesh, let every device treat its own matrices with ``inner``; anywhere else, ``inner`` itself.

    ``inner`` must treat every matrix by itself, without the weights and without state for each matrix. It works inside
    ``as_matrices``, which knows where the parameters lie.

    Args:
        inner: a transformation on matrices in the last two axes.
        work: cost of a matrix of so many rows and columns, for the balance; None counts the products of five steps of
            Newton-Schulz.

    Returns:
        A transformation with the state of ``inner``.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import divided, precondition_globally
        >>> tx = divided(precondition_globally(ns_steps=None))
        >>> psi = jnp.diag(jnp.array([3.0, 0.5]))
        >>> print(tx.update(psi, tx.init(psi))[0])
        [[1. 0.]
         [0. 1.]]
    """
    transformation("inner", inner)
    if work is not None and not callable(work):
        raise TypeError(f"work must be a function (rows, columns) -> cost, or None; got {work!r}")
    weigh = work or newton_schulz_work
    if isinstance(inner, Rescalable):
        return Rescalable(lambda rms: _divided(inner.at_rms(rms), weigh))
    return _divided(oriented(inner), weigh)


def _divided(inner: OrientedTransformation, weigh: Work) -> OrientedTransformation:
    def update(updates, state, params=None, *, matrix_layout=UPRIGHT, **extra_args):
        mesh, specs = matrix_layout.mesh, list(matrix_layout.specs)
        if mesh is None or any(jnp.ndim(x) > 0 for x in jax.tree.leaves(state)):
            return inner.update(updates, state, params, matrix_layout=matrix_layout, **extra_args)

        def treated(arrays: list[jax.Array], ids: list[jax.Array]) -> tuple[Any, Any]:
            known = {"matrix_ids": ids, "matrix_layout": matrix_layout._replace(mesh=None, specs=())}
            return inner.update(arrays, state, None, **extra_args | known)

        def treat(stack: jax.Array, ids: jax.Array) -> Any:
            one = lambda x, i: treated([x], [i])[0][0]  # noqa: E731
            return by_platform(stack, ids, cpu=lambda x, i: jax.lax.map(lambda pair: one(*pair), (x, i)), default=one)

        return _exchange(treat, updates, extra_args["matrix_ids"], mesh, specs, weigh), treated([], [])[1]

    return OrientedTransformation(inner.init, update)


def _exchange(treat: Callable, arrays: list[jax.Array], ids: list[jax.Array], mesh: AbstractMesh, specs, work: Work):
    """``treat`` every matrix on the device that owns it; the results lie as ``arrays`` do."""
    sizes = dict(mesh.shape)
    stacks = [stack_of(x.shape, x.dtype, spec) for x, spec in zip(arrays, specs, strict=True)]
    plan = make_plan(sizes, stacks, work)

    def on_device(mine: list[jax.Array], ids: jax.Array) -> list[jax.Array]:
        at = {a: jax.lax.axis_index(a) for a in sizes}
        device = flat_index(at, sizes, tuple(sizes))
        own_ids = ids[jnp.asarray(plan.slots)[device]]
        arrived = [_to_owners(team, mine, at, sizes) for team in plan.teams]
        branches = [functools.partial(_treat_all, treat, kind, plan.teams) for kind in plan.kinds]
        treated = jax.lax.switch(jnp.asarray(plan.kind)[device], branches, arrived, own_ids)
        new: list[Any] = [None] * len(mine)
        for team, buffer in zip(plan.teams, treated, strict=True):
            for i, x in _to_holders(team, buffer, mine, sizes).items():
                new[i] = x
        return new

    mapped = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(specs, PartitionSpec()),
        out_specs=specs,
        check_vma=False,  # what is gathered along copies is the same on all of them
    )
    return mapped(arrays, jnp.concatenate(ids))


def _to_owners(team: Team, mine: list[jax.Array], at: dict[str, Any], sizes: dict[str, int]) -> jax.Array:
    """Pieces of the matrices that this device owns, ``(pieces, length)``, from everyone who holds one."""

    def line(own: list[tuple[int, int]]) -> jax.Array:
        parts = [mine[i][j].ravel() for i, j in own]
        missing = team.length - sum(x.size for x in parts)
        return jnp.concatenate([*parts, jnp.zeros(missing, team.dtype)])

    pieces = math.prod(team.grid)
    outgoing = jnp.stack([line(own) for own in team.owned]).reshape(-1, pieces, team.length)
    outgoing = outgoing[flat_index(at, sizes, team.copies)] if team.copies else outgoing[0]
    if pieces == 1:
        return outgoing
    return jax.lax.all_to_all(outgoing, team.pieces, split_axis=0, concat_axis=0, tiled=True)


def _treat_all(treat: Callable, kind, teams: list[Team], arrived: list[jax.Array], ids: jax.Array) -> list[jax.Array]:
    """What a device of one kind does: its matrices put together, treated shape by shape, and cut up again."""
    results, slot = [], 0
    for team, shapes, pieces in zip(teams, kind, arrived, strict=True):
        done, start = [], 0
        for shape in sorted(set(shapes)):
            count = shapes.count(shape)
            rows, columns = shape[0] // team.grid[0], shape[1] // team.grid[1]
            end = start + count * rows * columns
            cut = pieces[:, start:end].reshape(*team.grid, count, rows, columns)
            whole = cut.transpose(2, 0, 3, 1, 4).reshape(count, *shape)
            new = treat(whole, ids[slot : slot + count])
            cut = new.reshape(count, team.grid[0], rows, team.grid[1], columns).transpose(1, 3, 0, 2, 4)
            done.append(cut.reshape(math.prod(team.grid), -1))
            start, slot = end, slot + count
        done.append(jnp.zeros((math.prod(team.grid), team.length - start), pieces.dtype))
        results.append(jnp.concatenate(done, axis=1))
    return results


def _to_holders(team: Team, buffer: jax.Array, mine: list[jax.Array], sizes: dict[str, int]) -> dict[int, jax.Array]:
    """The results back where the pieces came from: for every stack of the team, this device's part of it."""
    if math.prod(team.grid) > 1:
        buffer = jax.lax.all_to_all(buffer, team.pieces, split_axis=0, concat_axis=0, tiled=True)
    copies = math.prod(sizes[a] for a in team.copies)
    if copies > 1:
        buffer = jax.lax.all_gather(buffer, team.copies)
    lines = buffer.reshape(len(team.owned), team.length)
    found: dict[tuple[int, int], jax.Array] = {}
    for line, own in zip(lines, team.owned, strict=True):
        start = 0
        for i, j in own:
            size = math.prod(mine[i].shape[1:])
            found[i, j] = line[start : start + size].reshape(mine[i].shape[1:])
            start += size
    return {i: jnp.stack([found[i, j] for j in range(len(mine[i]))]) for i in team.stacks}
