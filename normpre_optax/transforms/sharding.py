# SPDX-License-Identifier: Apache-2.0
"""Who computes what on a mesh: whole matrices travel once to the device that treats them, and once back.

A spectral stage multiplies a matrix by itself many times. Left to the partitioner, a sharded matrix is gathered for
every product. ``divided`` sends each matrix whole to one device instead, balanced by the work it makes; the rest of
the optimizer is cheap row by row and stays where the parameters are.

Axes of a mesh play three parts for a stack ``(batch, rows, columns)``: they shard its batch axis (such devices hold
different matrices and never exchange any), its rows and columns (such devices hold pieces of the same matrices and
exchange them by one all-to-all in and one out), or nothing (such devices hold copies; each treats its share, and the
results are gathered).
"""

import functools
import math
import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from normpre_optax.transforms.oriented import OrientedTransformation, oriented

Axes = tuple[str, ...]
Work = Callable[[int, int], float]


class Layout(NamedTuple):
    """Where stacks ``(batch, rows, columns)`` lie: the mesh, and the axes that shard each, as they are stored."""

    mesh: AbstractMesh
    specs: list[PartitionSpec]


def mesh_of(tree) -> AbstractMesh | None:
    """The mesh that the arrays of a tree live on; None for a single device, and inside ``jax.shard_map``.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.transforms.sharding import mesh_of
        >>> mesh_of({"w": jnp.ones((2, 3))}) is None
        True
    """
    for x in jax.tree.leaves(tree):
        mesh = jax.typeof(x).sharding.mesh
        if mesh.empty or (mesh.size == 1 and AxisType.Explicit not in mesh.axis_types):
            continue
        return None if AxisType.Manual in mesh.axis_types else mesh
    return None


def axes_of(entry) -> Axes:
    """One entry of a PartitionSpec as a tuple of names.

    Example:
        >>> from normpre_optax.transforms.sharding import axes_of
        >>> axes_of("data"), axes_of(None), axes_of(("data", "fsdp"))
        (('data',), (), ('data', 'fsdp'))
    """
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


class _Stack(NamedTuple):
    """A stack as a device sees it: how many matrices, their shape, and the mesh axes along batch, rows, columns."""

    batch: int
    rows: int
    columns: int
    dtype: jnp.dtype
    axes: tuple[Axes, Axes, Axes]

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.columns


class _Team(NamedTuple):
    """Stacks that are sharded alike, in one dtype: their matrices travel in one buffer.

    Attributes:
        stacks: their numbers.
        copies: mesh axes along which they are replicated.
        pieces: mesh axes that shard their rows, then their columns.
        grid: number of pieces along rows and along columns.
        owned: for every device along ``copies`` and ``pieces``, the matrices that it treats: (stack, place).
        length: elements of the longest list's pieces.
    """

    stacks: list[int]
    copies: Axes
    pieces: Axes
    grid: tuple[int, int]
    owned: list[list[tuple[int, int]]]
    length: int


class Plan(NamedTuple):
    """Who treats which matrices.

    Attributes:
        teams: see ``_Team``.
        loads: work of every device, in the shape of the mesh.
        kinds: what a device may have to do: for each team, the shapes of its matrices in order.
        kind: for every device, flat, which of them it is.
        slots: for every device, flat, the matrices it treats, numbered through all stacks of the whole model.
    """

    teams: list[_Team]
    loads: np.ndarray
    kinds: list[tuple[tuple[tuple[int, int], ...], ...]]
    kind: np.ndarray
    slots: np.ndarray


def plan(sizes: dict[str, int], stacks: Sequence[_Stack], work: Work) -> Plan:
    """Share the matrices out: the most expensive first, each to a device that has least to do.

    Among several such it goes to the one with the shortest line in the exchange, whose length is that of the longest.

    Args:
        sizes: of the mesh's axes.
        stacks: what there is.
        work: cost of one matrix of so many rows and columns.

    Returns:
        The plan, the same on every host.
    """
    loads = np.zeros(tuple(sizes.values()))
    lines: dict[Hashable, np.ndarray] = {}
    order = sorted(range(len(stacks)), key=lambda i: (-work(*stacks[i].shape), stacks[i].shape, i))
    owners: dict[tuple[int, int], int] = {}
    for i in order:
        batch, rows, columns = stacks[i].axes
        pieces = rows + columns
        copies = tuple(a for a in sizes if a not in batch + pieces)
        # View the loads as (devices of a team, teams along the batch axes): a team's load is that of its busiest.
        turned = loads.transpose([list(sizes).index(a) for a in copies + pieces + batch])
        members = math.prod(sizes[a] for a in copies + pieces)
        line = lines.setdefault((stacks[i].axes, stacks[i].dtype), np.zeros(members))
        for j in range(stacks[i].batch // math.prod(sizes[a] for a in batch)):
            busiest = turned.reshape(members, -1).max(axis=1)
            owner = int(np.lexsort((line, busiest))[0])
            owners[i, j] = owner
            line[owner] += math.prod(stacks[i].shape)
            turned[np.unravel_index(owner, turned.shape[: len(copies + pieces)])] += work(*stacks[i].shape)
    teams = _teams(sizes, stacks, owners)
    return Plan(teams, loads, *_kinds(sizes, stacks, teams))


def _teams(sizes: dict[str, int], stacks: Sequence[_Stack], owners: dict[tuple[int, int], int]) -> list[_Team]:
    members: dict[Hashable, list[int]] = {}
    for i, stack in enumerate(stacks):
        members.setdefault((stack.axes, stack.dtype), []).append(i)
    teams = []
    for found in members.values():
        batch, rows, columns = stacks[found[0]].axes
        grid = math.prod(sizes[a] for a in rows), math.prod(sizes[a] for a in columns)
        copies = tuple(a for a in sizes if a not in batch + rows + columns)
        owned: list[list[tuple[int, int]]] = [[] for _ in range(math.prod(sizes[a] for a in copies) * math.prod(grid))]
        for i, j in sorted(owners, key=lambda at: (stacks[at[0]].shape, at)):
            if i in found:
                owned[owners[i, j]].append((i, j))
        length = max(sum(math.prod(stacks[i].shape) for i, _ in own) for own in owned) // math.prod(grid)
        teams.append(_Team(found, copies, rows + columns, grid, owned, length))
    return teams


def _kinds(sizes: dict[str, int], stacks: Sequence[_Stack], teams: list[_Team]):
    """The last three fields of a ``Plan``."""
    first = np.cumsum([0, *(stack.batch for stack in stacks)])
    kinds: dict[Hashable, int] = {}
    kind, slots = [], []
    for device in np.ndindex(*sizes.values()):
        at = dict(zip(sizes, device, strict=True))
        mine = [team.owned[_flat(at, sizes, team.copies + team.pieces)] for team in teams]
        work = tuple(tuple(stacks[i].shape for i, _ in own) for own in mine)
        kind.append(kinds.setdefault(work, len(kinds)))
        places = []
        for i, j in (item for own in mine for item in own):
            batch = stacks[i].axes[0]
            local = stacks[i].batch // math.prod(sizes[a] for a in batch)
            places.append(first[i] + _flat(at, sizes, batch) * local + j)
        slots.append(places)
    longest = max(map(len, slots))
    padded = np.array([places + [0] * (longest - len(places)) for places in slots], np.int32).reshape(-1, longest)
    return list(kinds), np.array(kind, np.int32), padded


def _flat(at: dict[str, Any], sizes: dict[str, int], axes: Axes) -> Any:
    """Index along several axes taken as one, the first the slowest."""
    return functools.reduce(lambda flat, a: flat * sizes[a] + at[a], axes, 0)


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
    inner = oriented(inner)
    weigh = work or newton_schulz_work

    def update(updates, state, params=None, *, layout: Layout | None = None, matrix_ids=None, **extra_args):
        stateful = any(jnp.ndim(x) > 0 for x in jax.tree.leaves(state))
        if layout is None or stateful:
            known = {} if layout is None else {"layout": layout}
            return inner.update(updates, state, params, matrix_ids=matrix_ids, **known, **extra_args)

        def treat(stack: jax.Array, ids: jax.Array | None) -> jax.Array:
            one = lambda x, i: inner.update(x, state, None, matrix_ids=i, **extra_args)[0]  # noqa: E731
            return jax.lax.platform_dependent(
                stack, ids, cpu=lambda x, i: jax.lax.map(lambda pair: one(*pair), (x, i)), default=one
            )

        new = _exchange(treat, updates, matrix_ids, layout, weigh)
        return new, inner.update([], state, None, matrix_ids=[], **extra_args)[1]

    return OrientedTransformation(inner.init, update)


def maybe_divided(inner: optax.GradientTransformation, divide: bool) -> optax.GradientTransformation:
    """``divided(inner)`` or ``inner``, as the option ``divide`` of the finished optimizers says.

    Example:
        >>> from normpre_optax.transforms.sharding import maybe_divided
        >>> maybe_divided(optax.identity(), "yes")
        Traceback (most recent call last):
        ...
        TypeError: divide must be True or False, got 'yes'
    """
    if not isinstance(divide, bool):
        raise TypeError(f"divide must be True or False, got {divide!r}")
    return divided(inner) if divide else inner


def newton_schulz_work(rows: int, columns: int) -> float:
    """Operations of five steps of Newton-Schulz on a matrix, on its Gram matrix where that takes fewer.

    Example:
        >>> from normpre_optax.transforms.sharding import newton_schulz_work
        >>> newton_schulz_work(1, 1), newton_schulz_work(4, 1)
        (30.0, 60.0)
    """
    short, long = sorted((rows, columns))
    return float(short**2 * min(20 * long + 10 * short, 8 * long + 28 * short))


def stacks_of(arrays: Sequence[Any], layout: Layout) -> list[_Stack]:
    """What ``plan`` needs to know of stacks ``(batch, rows, columns)`` that lie so."""
    axes = [tuple(axes_of(entry) for entry in tuple(spec) + (None,) * (3 - len(spec))) for spec in layout.specs]
    return [_Stack(*x.shape, jnp.dtype(x.dtype), a) for x, a in zip(arrays, axes, strict=True)]  # pyright: ignore[reportArgumentType]


def _exchange(treat: Callable, arrays: list[jax.Array], ids: list[jax.Array], layout: Layout, work: Work):
    """``treat`` every matrix on the device that owns it; the results lie as ``arrays`` do."""
    sizes = dict(layout.mesh.shape)
    stacks = stacks_of(arrays, layout)
    shares = plan(sizes, stacks, work)

    def on_device(mine: list[jax.Array], ids: jax.Array) -> list[jax.Array]:
        at = {a: jax.lax.axis_index(a) for a in sizes}
        device = _flat(at, sizes, tuple(sizes))
        own_ids = ids[jnp.asarray(shares.slots)[device]]
        arrived = [_to_owners(team, mine, stacks, at, sizes) for team in shares.teams]
        branches = [functools.partial(_treat_all, treat, kind, shares.teams) for kind in shares.kinds]
        treated = jax.lax.switch(jnp.asarray(shares.kind)[device], branches, arrived, own_ids)
        new: list[Any] = [None] * len(mine)
        for team, buffer in zip(shares.teams, treated, strict=True):
            for i, x in _to_holders(team, buffer, mine, sizes).items():
                new[i] = x
        return new

    specs = list(layout.specs)
    mapped = jax.shard_map(
        on_device,
        mesh=layout.mesh,
        in_specs=(specs, PartitionSpec()),
        out_specs=specs,
        check_vma=False,  # what is gathered along copies is the same on all of them
    )
    return mapped(arrays, jnp.concatenate(ids))


def _to_owners(
    team: _Team, mine: list[jax.Array], stacks: Sequence[_Stack], at: dict[str, Any], sizes: dict[str, int]
) -> jax.Array:
    """Pieces of the matrices that this device owns, ``(pieces, length)``, from everyone who holds one."""
    dtype = stacks[team.stacks[0]].dtype

    def line(own: list[tuple[int, int]]) -> jax.Array:
        parts = [mine[i][j].ravel() for i, j in own]
        missing = team.length - sum(x.size for x in parts)
        return jnp.concatenate([*parts, jnp.zeros(missing, dtype)])

    pieces = math.prod(team.grid)
    outgoing = jnp.stack([line(own) for own in team.owned]).reshape(-1, pieces, team.length)
    outgoing = outgoing[_flat(at, sizes, team.copies)] if team.copies else outgoing[0]
    if pieces == 1:
        return outgoing
    return jax.lax.all_to_all(outgoing, team.pieces, split_axis=0, concat_axis=0, tiled=True)


def _treat_all(treat: Callable, kind, teams: list[_Team], arrived: list[jax.Array], ids: jax.Array) -> list[jax.Array]:
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


def _to_holders(team: _Team, buffer: jax.Array, mine: list[jax.Array], sizes: dict[str, int]) -> dict[int, jax.Array]:
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


_NUMBERS = re.compile(r"\d+")


def without_numbers(path: str) -> str:
    """The name that parameters of a model's layers share.

    Example:
        >>> from normpre_optax.transforms.sharding import without_numbers
        >>> without_numbers("blocks/11/mlp/up_2/kernel")
        'blocks/#/mlp/up_#/kernel'
    """
    return _NUMBERS.sub("#", path)
