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

from normpre_optax.meshes.plan import (
    LANES,
    Team,
    Work,
    flat_index,
    lines_of,
    make_plan,
    newton_schulz_work,
    stack_of,
)
from normpre_optax.platforms import by_platform
from normpre_optax.transforms.checks import flag, transformation
from normpre_optax.transforms.oriented import UPRIGHT, OrientedTransformation, Rescalable, oriented


def divided(
    inner: optax.GradientTransformation, work: Work | None = None, rounded: bool = False
) -> OrientedTransformation:
    """On a mesh, let every device treat its own matrices with ``inner``; anywhere else, ``inner`` itself.

    ``inner`` must treat every matrix by itself, without the weights and without state for each matrix. It works inside
    ``as_matrices``, which knows where the parameters lie.

    Args:
        inner: a transformation on matrices in the last two axes.
        work: cost of a matrix of so many rows and columns, for the balance; None counts the products of five steps of
            Newton-Schulz.
        rounded: on a TPU, what travels is rounded to bfloat16, to which its products round their operands: half the
            bytes, and one rounding more in the result.

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
    flag("rounded", rounded)
    weigh = work or newton_schulz_work
    if isinstance(inner, Rescalable):
        return Rescalable(lambda rms: _divided(inner.at_rms(rms), weigh, rounded))
    return _divided(oriented(inner), weigh, rounded)


def _divided(inner: OrientedTransformation, weigh: Work, rounded: bool) -> OrientedTransformation:
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

        new = _exchange(treat, updates, extra_args["matrix_ids"], mesh, specs, weigh, rounded)
        return new, treated([], [])[1]

    return OrientedTransformation(inner.init, update)


def _exchange(treat: Callable, arrays, ids: list[jax.Array], mesh: AbstractMesh, specs, work: Work, rounded: bool):
    """``treat`` every matrix on the device that owns it; the results lie as ``arrays`` do."""
    sizes = dict(mesh.shape)
    stacks = [stack_of(x.shape, x.dtype, spec) for x, spec in zip(arrays, specs, strict=True)]
    plan = make_plan(sizes, stacks, work)
    staying = sum(team.stays for team in plan.teams)
    travelling = plan.teams[staying:]

    def on_device(half: bool, mine: list[jax.Array], ids: jax.Array) -> list[jax.Array]:
        at = {a: jax.lax.axis_index(a) for a in sizes}
        device = flat_index(at, sizes, tuple(sizes))
        own_ids, start = ids[jnp.asarray(plan.slots)[device]], 0
        new: list[Any] = [None] * len(mine)
        for team in plan.teams[:staying]:
            for i in dict.fromkeys(i for i, _ in team.owned[0]):
                end = start + len(mine[i])
                new[i], start = treat(mine[i], own_ids[start:end]), end
        if travelling:
            sent = [x.astype(jnp.bfloat16) if half and x.dtype == jnp.float32 else x for x in mine]
            arrived = [_to_owners(team, sent, at, sizes) for team in travelling]
            branches = [functools.partial(_treat_all, treat, kind[staying:], travelling) for kind in plan.kinds]
            treated = jax.lax.switch(jnp.asarray(plan.kind)[device], branches, arrived, own_ids[start:])
            for team, buffer in zip(travelling, treated, strict=True):
                for i, x in _to_holders(team, buffer, sent, sizes).items():
                    new[i] = x.astype(team.dtype)
        return new

    def mapped(half: bool) -> Callable:
        return jax.shard_map(
            functools.partial(on_device, half),
            mesh=mesh,
            in_specs=(specs, PartitionSpec()),
            out_specs=specs,
            check_vma=False,  # what is gathered along copies is the same on all of them
        )

    given = arrays, jnp.concatenate(ids)
    if not rounded:
        return mapped(False)(*given)
    return by_platform(*given, cpu=mapped(False), tpu=mapped(True), default=mapped(False))


def _to_owners(team: Team, mine: list[jax.Array], at: dict[str, Any], sizes: dict[str, int]) -> jax.Array:
    """Lines of the matrices that this device owns, ``(pieces, length, LANES)``, from everyone who holds a piece."""
    lines = {i: to_lines(mine[i]) for i in team.stacks}

    def sent(own: list[tuple[int, int]]) -> jax.Array:
        parts = [lines[i][j] for i, j in own]
        missing = team.length - sum(map(len, parts))
        return jnp.concatenate([*parts, jnp.zeros((missing, LANES), mine[team.stacks[0]].dtype)])

    pieces = math.prod(team.grid)
    outgoing = jnp.stack([sent(own) for own in team.owned]).reshape(-1, pieces, team.length, LANES)
    outgoing = outgoing[flat_index(at, sizes, team.copies)] if team.copies else outgoing[0]
    return outgoing if pieces == 1 else _swapped(outgoing, team)


def _swapped(lines: jax.Array, team: Team) -> jax.Array:
    """What everyone has for this device, instead of what it has for everyone."""
    # Without the barrier XLA's CPU backend gives parts of a transposed array different layouts, and then refuses them.
    lines = jax.lax.optimization_barrier(lines)
    return jax.lax.all_to_all(lines, team.pieces, split_axis=0, concat_axis=0, tiled=True)


def _treat_all(treat: Callable, kind, teams: list[Team], arrived: list[jax.Array], ids: jax.Array) -> list[jax.Array]:
    """What a device of one kind does: its matrices put together, treated shape by shape, and cut up again."""
    results, slot = [], 0
    for team, shapes, pieces in zip(teams, kind, arrived, strict=True):
        done, start = [], 0
        for shape in sorted(set(shapes)):
            count = shapes.count(shape)
            rows, columns = shape[0] // team.grid[0], shape[1] // team.grid[1]
            end = start + count * lines_of(rows, columns)
            lines = pieces[:, start:end].reshape(*team.grid, count, -1, LANES)
            whole = from_lines(lines, rows, columns).transpose(2, 0, 3, 1, 4).reshape(count, *shape)
            new = treat(whole.astype(team.dtype), ids[slot : slot + count]).astype(pieces.dtype)
            cut = new.reshape(count, team.grid[0], rows, team.grid[1], columns).transpose(1, 3, 0, 2, 4)
            done.append(to_lines(cut).reshape(math.prod(team.grid), -1, LANES))
            start, slot = end, slot + count
        done.append(jnp.zeros((math.prod(team.grid), team.length - start, LANES), pieces.dtype))
        results.append(jnp.concatenate(done, axis=1))
    return results


def _to_holders(team: Team, buffer: jax.Array, mine: list[jax.Array], sizes: dict[str, int]) -> dict[int, jax.Array]:
    """The results back where the pieces came from: for every stack of the team, this device's part of it."""
    if math.prod(team.grid) > 1:
        buffer = _swapped(buffer, team)
    copies = math.prod(sizes[a] for a in team.copies)
    if copies > 1:
        buffer = jax.lax.all_gather(buffer, team.copies)
    found: dict[tuple[int, int], jax.Array] = {}
    for lines, own in zip(buffer.reshape(len(team.owned), team.length, LANES), team.owned, strict=True):
        start = 0
        for i, j in own:
            end = start + lines_of(*mine[i].shape[1:])
            found[i, j], start = lines[start:end], end
    return {
        i: from_lines(jnp.stack([found[i, j] for j in range(len(mine[i]))]), *mine[i].shape[1:]) for i in team.stacks
    }


def to_lines(x: jax.Array) -> jax.Array:
    """Pieces ``(..., rows, columns)`` as lines of ``LANES``: by blocks of as many columns, or rows, or else padded.

    Blocks are what a TPU keeps together: to string them needs no other order within them.

    Example:
        >>> [to_lines(jnp.ones(shape)).shape for shape in ((48, 256), (256, 48), (3, 5))]
        [(96, 128), (96, 128), (1, 128)]
    """
    *lead, rows, columns = x.shape
    if columns % LANES and rows % LANES:
        flat = x.reshape(*lead, rows * columns)
        missing = lines_of(rows, columns) * LANES - rows * columns
        return jnp.pad(flat, [(0, 0)] * len(lead) + [(0, missing)]).reshape(*lead, -1, LANES)
    upright = x.mT if columns % LANES else x
    blocks = upright.reshape(*lead, upright.shape[-2], -1, LANES)
    return jnp.swapaxes(blocks, -3, -2).reshape(*lead, -1, LANES)


def from_lines(lines: jax.Array, rows: int, columns: int) -> jax.Array:
    """The pieces that ``to_lines`` has made lines of.

    Example:
        >>> x = jnp.arange(48 * 256).reshape(48, 256)
        >>> bool((from_lines(to_lines(x), 48, 256) == x).all())
        True
    """
    lead = lines.shape[:-2]
    if columns % LANES and rows % LANES:
        return lines.reshape(*lead, -1)[..., : rows * columns].reshape(*lead, rows, columns)
    turned = bool(columns % LANES)
    long, short = (rows, columns) if turned else (columns, rows)
    blocks = lines.reshape(*lead, long // LANES, short, LANES)
    upright = jnp.swapaxes(blocks, -3, -2).reshape(*lead, short, long)
    return upright.mT if turned else upright
