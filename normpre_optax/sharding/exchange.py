# SPDX-License-Identifier: Apache-2.0
"""Distribute matrices over a mesh if the shardings of the parameters are known.

Each matrix has one owner. The owner collects the shards by one all-to-all, computes,
and returns the result by another one. For each parameter, a mesh axis shards batch axes
(each device has its own matrices), shards rows or columns (each device has a piece of
every matrix), or neither (each device has a copy).
"""

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, PartitionSpec

from normpre_optax.linalg.platforms import platform
from normpre_optax.parameters.dims import (
    MatrixDims,
    from_matrices,
    is_stored_transposed,
    split_axes,
    to_matrices,
)
from normpre_optax.sharding.placement import axes_of

Axes = tuple[str, ...]
# lanes of a TPU's vector unit: pieces are communicated in lines of this many elements
LANES = 128


class Shard(NamedTuple):
    """One device's shard of a parameter: a stack of pieces of matrices, ``(count, rows,
    columns)``.
    """

    count: int
    rows: int
    columns: int
    grid: tuple[int, int]  # pieces of a matrix along rows and columns
    batch: Axes  # mesh axes that shard its batch axes
    pieces: Axes  # mesh axes that shard its rows, then its columns

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of a complete matrix."""
        return self.rows * self.grid[0], self.columns * self.grid[1]

    @property
    def lines(self) -> int:
        """Number of lines of ``LANES`` elements in a piece."""
        return -(-self.rows * self.columns // LANES)

    @property
    def work(self) -> float:
        """Operations of five Newton-Schulz steps, in the form that needs fewer."""
        short, long = sorted(self.shape)
        return float(short**2 * min(20 * long + 10 * short, 8 * long + 28 * short))


class Team(NamedTuple):
    """Parameters that are sharded over the same axes, with one buffer for all their
    pieces.

    ``owned`` lists the (parameter, index) of the matrices that each device along
    ``copies`` and ``pieces`` owns. ``length`` is the number of lines in the longest
    list.
    """

    members: list[int]
    copies: Axes
    pieces: Axes
    grid: tuple[int, int]
    owned: list[list[tuple[int, int]]]
    length: int


def exchange(
    compute: Callable[[list[jax.Array], Any], list[jax.Array]],
    operands: Any,
    arrays: Sequence[jax.Array],
    dims: Sequence[MatrixDims],
    specs: Sequence[PartitionSpec],
    mesh: AbstractMesh,
    rounded: bool = False,
) -> list[jax.Array]:
    """Compute every matrix on one device.

    Args:
        compute: function of stacks of matrices ``(count, m, n)`` and the operands,
            which returns stacks of the same shapes. It must compute each matrix
            separately, and commute with transposition and permutations of rows and
            columns.
        operands: a tree of replicated arrays and numbers.
        arrays: the parameters.
        dims: their axes.
        specs: their shardings.
        mesh: their mesh.
        rounded: communicate bfloat16 on a TPU, whose products round their operands to
            bfloat16 anyway.

    Returns:
        Arrays with the shapes and shardings of ``arrays``.
    """
    sizes = dict(mesh.shape)
    transposed = [
        is_stored_transposed(x.ndim, d) for x, d in zip(arrays, dims, strict=True)
    ]
    each = list(zip(arrays, dims, specs, transposed, strict=True))
    shards = [_shard(x.shape, d, spec, t, sizes) for x, d, spec, t in each]
    teams = plan(sizes, shards)
    local = [team for team in teams if len(team.owned) == 1]
    moving = [team for team in teams if len(team.owned) > 1]
    kinds, kind_of = _kinds(sizes, shards, moving)
    widest = jnp.result_type(*arrays)
    dtype = (
        jnp.bfloat16
        if rounded and platform() == "tpu" and widest == jnp.float32
        else widest
    )

    def on_device(parts: list[jax.Array], operands: Any) -> list[jax.Array]:
        def own(stacks):
            return compute(stacks, operands)

        try:
            at = {a: jax.lax.axis_index(a) for a in sizes}
        except NameError as error:
            raise ValueError(
                "jax.vmap maps over a mesh axis that shards the parameters: use"
                " jax.shard_map over that axis, so that each device updates its own"
                f" models ({error})"
            ) from error
        stacks = [
            to_matrices(x, d, t) for x, (_, d, _, t) in zip(parts, each, strict=True)
        ]
        at_home = [i for team in local for i in team.members]
        new = dict(zip(at_home, own([stacks[i] for i in at_home]), strict=True))
        if moving:
            lines = [to_lines(x.astype(dtype)) for x in stacks]
            arrived = [_to_owners(team, lines, at, sizes) for team in moving]
            branches = [
                functools.partial(_computed, own, kind, shards, moving, widest)
                for kind in kinds
            ]
            done = jax.lax.switch(
                jnp.asarray(kind_of)[_flat(at, sizes, tuple(sizes))], branches, arrived
            )
            for team, buffer in zip(moving, done, strict=True):
                new |= _to_holders(team, buffer, shards, sizes)
        return [
            from_matrices(new[i].astype(x.dtype), d, x.shape, t)
            for i, (x, (_, d, _, t)) in enumerate(zip(parts, each, strict=True))
        ]

    # Results are gathered along copies, so they are equal on all of them. JAX cannot
    # check that.
    out = list(specs)
    run = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(out, PartitionSpec()),
        out_specs=out,
        check_vma=False,
    )
    return run(list(arrays), operands)


def _shard(
    shape: tuple[int, ...],
    dims: MatrixDims,
    spec: Any,
    transposed: bool,
    sizes: dict[str, int],
) -> Shard:
    batch, rows, columns = split_axes(len(shape), dims)
    rows, columns = (columns, rows) if transposed else (rows, columns)
    entries = [axes_of(entry) for entry in (*spec, *[None] * (len(shape) - len(spec)))]
    named = [
        sum((entries[axis] for axis in side), ()) for side in (batch, rows, columns)
    ]
    counts = [math.prod(sizes[a] for a in names) for names in named]
    whole = [math.prod(shape[axis] for axis in side) for side in (batch, rows, columns)]
    count, m, n = (size // devices for size, devices in zip(whole, counts, strict=True))
    return Shard(count, m, n, (counts[1], counts[2]), named[0], named[1] + named[2])


def plan(sizes: dict[str, int], shards: Sequence[Shard]) -> list[Team]:
    """Assign matrices to owners: the most expensive first, each to the device with the
    least work.

    Copies along an axis that shards other parameters share the work if that reduces the
    largest load. Along a pure data-parallel axis the computation is replicated, and
    nothing is communicated. If no parameter is sharded, all axes share the work.
    """
    sharding = {a for s in shards for a in s.batch + s.pieces} or set(sizes)
    free = [
        a
        for a in sizes
        if a in sharding
        and sizes[a] > 1
        and any(a not in s.batch + s.pieces for s in shards)
    ]
    choices = itertools.chain(
        *(itertools.combinations(free, n) for n in range(len(free) + 1))
    )
    return min(
        (_plan(sizes, shards, frozenset(chosen)) for chosen in choices),
        key=lambda found: found[0],
    )[1]


def _plan(
    sizes: dict[str, int], shards: Sequence[Shard], sharing: frozenset[str]
) -> tuple[tuple, list[Team]]:
    """Return (cost, teams) if copies along ``sharing`` share the work; cost is (largest
    load, communicated lines).
    """
    loads = np.zeros(tuple(sizes.values()))
    teams: dict[Hashable, tuple[Team, np.ndarray]] = {}
    for i in sorted(
        range(len(shards)), key=lambda i: (-shards[i].work, shards[i].shape, i)
    ):
        shard = shards[i]
        copies = tuple(
            a for a in sizes if a in sharing and a not in shard.batch + shard.pieces
        )
        key, count = (
            (shard.batch, shard.pieces, shard.grid),
            math.prod(sizes[a] for a in copies + shard.pieces),
        )
        new = Team([], copies, shard.pieces, shard.grid, [[] for _ in range(count)], 0)
        team, length = teams.setdefault(key, (new, np.zeros(count, int)))
        team.members.append(i)
        # Loads by owner and other devices: the load of an owner is that of the busiest
        # device with its index.
        others = tuple(a for a in sizes if a not in copies + shard.pieces)
        by_place = loads.transpose(
            [list(sizes).index(a) for a in copies + shard.pieces + others]
        )
        for j in range(shard.count):
            busiest = by_place.reshape(count, -1).max(axis=1)
            owner = int(np.lexsort((length, busiest))[0])
            team.owned[owner].append((i, j))
            length[owner] += shard.lines
            by_place[
                np.unravel_index(owner, by_place.shape[: len(copies + shard.pieces)])
            ] += shard.work
    found = [team._replace(length=int(length.max())) for team, length in teams.values()]
    for team in found:
        for own in team.owned:
            own.sort(key=lambda item: (shards[item[0]].shape, item))
    sent = sum(len(team.owned) * team.length for team in found if len(team.owned) > 1)
    return (loads.max(), sent), found


def _kinds(
    sizes: dict[str, int], shards: Sequence[Shard], teams: list[Team]
) -> tuple[list[Any], np.ndarray]:
    """Return the distinct lists of owned shapes per team, and the index of each
    device's list.
    """
    kinds: dict[Any, int] = {}
    kind_of = []
    for device in np.ndindex(*sizes.values()):
        at = dict(zip(sizes, device, strict=True))
        own = [
            team.owned[_flat(at, sizes, team.copies + team.pieces)] for team in teams
        ]
        kind = tuple(
            tuple(
                (shards[i].shape, shards[i].rows, shards[i].columns) for i, _ in items
            )
            for items in own
        )
        kind_of.append(kinds.setdefault(kind, len(kinds)))
    return list(kinds), np.array(kind_of, np.int32)


def _flat(at: dict[str, Any], sizes: dict[str, int], axes: Axes) -> Any:
    """Return the index along several flattened mesh axes; the first axis varies
    slowest.
    """
    return functools.reduce(lambda index, a: index * sizes[a] + at[a], axes, 0)


def _to_owners(
    team: Team, lines: list[jax.Array], at: dict[str, Any], sizes: dict[str, int]
) -> jax.Array:
    """Collect the pieces of matrices on their owners: ``(pieces, length, LANES)`` of
    this device's matrices.
    """

    def packed(own: list[tuple[int, int]]) -> jax.Array:
        parts = [lines[i][j] for i, j in own]
        missing = team.length - sum(map(len, parts))
        return jnp.concatenate(
            [*parts, jnp.zeros((missing, LANES), lines[team.members[0]].dtype)]
        )

    pieces = math.prod(team.grid)
    outgoing = jnp.stack([packed(own) for own in team.owned]).reshape(
        -1, pieces, team.length, LANES
    )
    return _all_to_all(outgoing[_flat(at, sizes, team.copies)], team)


def _all_to_all(lines: jax.Array, team: Team) -> jax.Array:
    if math.prod(team.grid) == 1:
        return lines
    return jax.lax.all_to_all(
        lines, team.pieces, split_axis=0, concat_axis=0, tiled=True
    )


def _computed(
    compute: Callable,
    kind: Any,
    shards: Any,
    teams: list[Team],
    dtype: Any,
    arrived: list[jax.Array],
):
    """Assemble the matrices of this device, compute those of one shape together, and
    split them into pieces.
    """
    whole, places = [], []
    for k, (team, items, pieces) in enumerate(zip(teams, kind, arrived, strict=True)):
        start = 0
        for shape, rows, columns in dict.fromkeys(items):
            count = items.count((shape, rows, columns))
            end = start + count * -(-rows * columns // LANES)
            lines = pieces[:, start:end].reshape(*team.grid, count, -1, LANES)
            pieces_of = from_lines(lines, rows, columns).transpose(2, 0, 3, 1, 4)
            whole.append(pieces_of.reshape(count, *shape).astype(dtype))
            places.append((k, count, rows, columns))
            start = end
    results: list[list[jax.Array]] = [[] for _ in teams]
    for t, (k, count, rows, columns) in zip(compute(whole), places, strict=True):
        cut = t.astype(arrived[k].dtype).reshape(
            count, teams[k].grid[0], rows, teams[k].grid[1], columns
        )
        results[k].append(
            to_lines(cut.transpose(1, 3, 0, 2, 4)).reshape(
                math.prod(teams[k].grid), -1, LANES
            )
        )
    for k, team in enumerate(teams):
        missing = team.length - sum(x.shape[1] for x in results[k])
        results[k].append(
            jnp.zeros((math.prod(team.grid), missing, LANES), arrived[k].dtype)
        )
    return [jnp.concatenate(parts, axis=1) for parts in results]


def _to_holders(
    team: Team, buffer: jax.Array, shards: Sequence[Shard], sizes: dict[str, int]
) -> dict[int, jax.Array]:
    """Return results to the devices of the pieces: this device's stack of every
    parameter of the team.
    """
    buffer = _all_to_all(buffer, team)
    if team.copies:
        buffer = jax.lax.all_gather(buffer, team.copies)
    found: dict[tuple[int, int], jax.Array] = {}
    for lines, own in zip(
        buffer.reshape(len(team.owned), team.length, LANES), team.owned, strict=True
    ):
        start = 0
        for i, j in own:
            found[i, j], start = (
                lines[start : start + shards[i].lines],
                start + shards[i].lines,
            )
    each = {
        i: jnp.stack([found[i, j] for j in range(shards[i].count)])
        for i in team.members
    }
    return {
        i: from_lines(x, shards[i].rows, shards[i].columns) for i, x in each.items()
    }


def to_lines(x: jax.Array) -> jax.Array:
    """Reshape pieces ``(..., rows, columns)`` to lines ``(..., n, LANES)``, padded at
    the end.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.sharding.exchange import to_lines
        >>> [to_lines(jnp.ones(shape)).shape for shape in ((48, 256), (3, 5))]
        [(96, 128), (1, 128)]
    """
    flat = x.reshape(*x.shape[:-2], -1)
    padding = [(0, 0)] * (flat.ndim - 1) + [(0, -flat.shape[-1] % LANES)]
    return jnp.pad(flat, padding).reshape(*flat.shape[:-1], -1, LANES)


def from_lines(lines: jax.Array, rows: int, columns: int) -> jax.Array:
    """Invert ``to_lines``."""
    flat = lines.reshape(*lines.shape[:-2], -1)
    return flat[..., : rows * columns].reshape(*flat.shape[:-1], rows, columns)
