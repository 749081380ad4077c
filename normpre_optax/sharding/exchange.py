# SPDX-License-Identifier: Apache-2.0
"""Distribute matrices over a mesh if the shardings of the parameters are known.

Each matrix has one owner, see ``plan.py``. The owner collects the pieces by one
all-to-all, computes, and returns the result by another one.

Devices do not own equally many matrices of each shape, so they run different programs.
Padding all lists to equal ones costs up to 3.4 times the work, see
``docs/results/padded_exchange.md``.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec

from normpre_optax.linalg.platforms import platform
from normpre_optax.parameters.dims import (
    MatrixDims,
    from_matrices,
    is_stored_transposed,
    to_matrices,
)
from normpre_optax.sharding.plan import (
    LANES,
    Matrix,
    Program,
    Run,
    Shard,
    Sizes,
    Team,
    flat_index,
    plan,
    programs_of,
    shard_of,
)
from normpre_optax.trees import PyTree

Stacks = list[jax.Array]
Position = dict[str, jax.Array]  # index of this device along every mesh axis


class _Storage(NamedTuple):
    """How a parameter is stored."""

    dims: MatrixDims
    transposed: bool  # whether rows of its matrices are inputs
    shard: Shard

    def to_stack(self, x: jax.Array) -> jax.Array:
        """Return a device's shard as pieces of matrices ``(count, rows, columns)``."""
        return to_matrices(x, self.dims, self.transposed)

    def from_stack(self, stack: jax.Array, like: jax.Array) -> jax.Array:
        """Invert ``to_stack``: return an array of the shape and dtype of ``like``."""
        stack = stack.astype(like.dtype)
        return from_matrices(stack, self.dims, like.shape, self.transposed)


class _Route(NamedTuple):
    """Which matrices are communicated, between which devices, and in which dtype."""

    sizes: Sizes
    shards: list[Shard]
    teams: list[Team]
    sent: jnp.dtype
    computed: jnp.dtype


def exchange(
    compute: Callable[[Stacks, PyTree], Stacks],
    operands: PyTree,
    arrays: Sequence[jax.Array],
    dims: Sequence[MatrixDims],
    specs: Sequence[PartitionSpec],
    mesh: AbstractMesh,
    rounded: bool = False,
) -> Stacks:
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
    stored = [
        _storage(x, d, spec, sizes)
        for x, d, spec in zip(arrays, dims, specs, strict=True)
    ]
    shards = [storage.shard for storage in stored]
    teams = plan(sizes, shards)
    # Matrices that are complete on a device stay there.
    local = [team for team in teams if not team.communicates]
    moving = [team for team in teams if team.communicates]
    # Parameters of several dtypes share a buffer.
    dtype = jnp.result_type(*arrays)
    route = _Route(sizes, shards, moving, _sent_dtype(dtype, rounded), dtype)

    def on_device(parts: list[jax.Array], operands: PyTree) -> list[jax.Array]:
        def own(stacks: Stacks) -> Stacks:
            return compute(stacks, operands)

        at = _position(sizes)
        stacks = []
        for storage, x in zip(stored, parts, strict=True):
            stacks.append(storage.to_stack(x))
        new = _computed_at_home(own, stacks, local)
        if moving:
            new |= _computed_by_owners(own, stacks, route, at)
        out = []
        for i, storage in enumerate(stored):
            out.append(storage.from_stack(new[i], parts[i]))
        return out

    out = list(specs)
    run = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(out, PartitionSpec()),
        out_specs=out,
        # Results are gathered along copies, so they are equal on all of them. JAX
        # cannot check that.
        check_vma=False,
    )
    return run(list(arrays), operands)


def _storage(
    x: jax.Array, dims: MatrixDims, spec: PartitionSpec, sizes: Sizes
) -> _Storage:
    """Return how a parameter with this sharding is stored on a device."""
    transposed = is_stored_transposed(x.ndim, dims)
    shard = shard_of(x.shape, dims, spec, transposed, sizes)
    return _Storage(dims, transposed, shard)


def _sent_dtype(dtype: jnp.dtype, rounded: bool) -> jnp.dtype:
    """Return the dtype in which matrices are communicated."""
    if rounded and platform() == "tpu" and dtype == jnp.float32:
        return jnp.dtype(jnp.bfloat16)
    return dtype


def _position(sizes: Sizes) -> Position:
    """Return this device's index along every mesh axis, inside ``jax.shard_map``."""
    try:
        return {a: jax.lax.axis_index(a) for a in sizes}
    except NameError as error:
        raise ValueError(
            "jax.vmap maps over a mesh axis that shards the parameters: use"
            " jax.shard_map over that axis, so that each device updates its own"
            f" models ({error})"
        ) from error


def _computed_at_home(
    compute: Callable[[Stacks], Stacks], stacks: Stacks, teams: Sequence[Team]
) -> dict[int, jax.Array]:
    """Return the results of parameters whose matrices are complete on this device."""
    members = []
    for team in teams:
        members += team.members
    new = compute([stacks[i] for i in members])
    return dict(zip(members, new, strict=True))


def _computed_by_owners(
    compute: Callable[[Stacks], Stacks], stacks: Stacks, route: _Route, at: Position
) -> dict[int, jax.Array]:
    """Return the results of parameters whose matrices are communicated."""
    lines = [to_lines(x.astype(route.sent)) for x in stacks]
    arrived = [_to_owners(team, lines, route.sizes, at) for team in route.teams]
    programs, program_of = programs_of(route.sizes, route.shards, route.teams)
    branches = [
        functools.partial(_run_program, compute, program, route) for program in programs
    ]
    # All devices run one SPMD program: each takes the branch of its own matrices.
    device = flat_index(at, route.sizes, tuple(route.sizes))
    done = jax.lax.switch(jnp.asarray(program_of)[device], branches, arrived)
    new = {}
    for team, buffer in zip(route.teams, done, strict=True):
        new |= _to_holders(team, buffer, route.shards)
    return new


def _to_owners(
    team: Team, lines: list[jax.Array], sizes: Sizes, at: Position
) -> jax.Array:
    """Return the pieces of this device's matrices: ``(pieces, length, LANES)``.

    Example, on a mesh ``{"data": 2, "fsdp": 2}``, with copies along "data" and pieces
    along "fsdp": owner ``2 c + p`` is the device at data ``c`` and fsdp ``p``.
    ``outgoing`` has this device's pieces for the owners 0, 1, 2, 3, and ``by_copy`` has
    those for ``[[0, 1], [2, 3]]``. The device at data 1 and fsdp 0 sends ``by_copy[1]``
    along "fsdp": to itself, which is owner 2, and to its neighbour, owner 3. Its copy
    at data 0 has the same pieces, and sends those for the owners 0 and 1.
    """
    outgoing = jnp.stack([_packed(team, own, lines) for own in team.owned])
    by_copy = outgoing.reshape(-1, math.prod(team.grid), team.length, LANES)
    # All copies have all pieces, so each sends only to owners with its own index.
    return _all_to_all(by_copy[flat_index(at, sizes, team.copies)], team)


def _packed(team: Team, own: list[Matrix], lines: list[jax.Array]) -> jax.Array:
    """Return this device's pieces of an owner's matrices: ``(length, LANES)``."""
    parts = [lines[i][j] for i, j in own]
    # An all-to-all sends equal amounts to all devices.
    missing = team.length - sum(len(part) for part in parts)
    dtype = lines[team.members[0]].dtype
    return jnp.concatenate([*parts, jnp.zeros((missing, LANES), dtype)])


def _all_to_all(buffer: jax.Array, team: Team) -> jax.Array:
    """Send the k-th entry of a buffer to the k-th device along ``team.pieces``."""
    if math.prod(team.grid) == 1:
        return buffer
    return jax.lax.all_to_all(
        buffer, team.pieces, split_axis=0, concat_axis=0, tiled=True
    )


def _run_program(
    compute: Callable[[Stacks], Stacks],
    program: Program,
    route: _Route,
    arrived: list[jax.Array],
) -> list[jax.Array]:
    """Compute the matrices in a device's buffers, those of one shape together."""
    stacks = []
    for team, runs, buffer in zip(route.teams, program, arrived, strict=True):
        stacks += _assembled(team, runs, buffer)
    new = compute([x.astype(route.computed) for x in stacks])
    done, start = [], 0
    for team, runs in zip(route.teams, program, strict=True):
        end = start + len(runs)
        done.append(_cut(team, runs, new[start:end], route.sent))
        start = end
    return done


def _assembled(team: Team, runs: Sequence[Run], buffer: jax.Array) -> Stacks:
    """Return the complete matrices in a buffer, a stack for each run."""
    stacks, start = [], 0
    for run in runs:
        end = start + run.lines
        lines = buffer[:, start:end].reshape(*team.grid, run.count, -1, LANES)
        start = end
        pieces = from_lines(lines, run.rows, run.columns)
        # From (down, across, count, rows, columns) to (count, down, rows, across,
        # columns), where down and across are those of the grid.
        in_place = pieces.transpose(2, 0, 3, 1, 4)
        down, across = team.grid
        shape = (run.count, down * run.rows, across * run.columns)
        stacks.append(in_place.reshape(shape))
    return stacks


def _cut(
    team: Team, runs: Sequence[Run], stacks: Stacks, dtype: jnp.dtype
) -> jax.Array:
    """Invert ``_assembled``: return a padded buffer of the pieces of these matrices."""
    down, across = team.grid
    parts = []
    for run, x in zip(runs, stacks, strict=True):
        shape = (run.count, down, run.rows, across, run.columns)
        in_place = x.astype(dtype).reshape(shape)
        lines = to_lines(in_place.transpose(1, 3, 0, 2, 4))
        parts.append(lines.reshape(down * across, -1, LANES))
    missing = team.length - sum(run.lines for run in runs)
    parts.append(jnp.zeros((down * across, missing, LANES), dtype))
    return jnp.concatenate(parts, axis=1)


def _to_holders(
    team: Team, buffer: jax.Array, shards: Sequence[Shard]
) -> dict[int, jax.Array]:
    """Return results to the devices of the pieces, as this device's stacks."""
    buffer = _all_to_all(buffer, team)
    if team.copies:
        # Each copy has the results of its own owners only.
        buffer = jax.lax.all_gather(buffer, team.copies)
    by_owner = buffer.reshape(len(team.owned), team.length, LANES)
    found: dict[Matrix, jax.Array] = {}
    for lines, own in zip(by_owner, team.owned, strict=True):
        start = 0
        for matrix in own:
            end = start + shards[matrix.parameter].lines
            found[matrix] = lines[start:end]
            start = end
    new = {}
    for i in team.members:
        shard = shards[i]
        lines = jnp.stack([found[Matrix(i, j)] for j in range(shard.count)])
        new[i] = from_lines(lines, shard.rows, shard.columns)
    return new


def to_lines(x: jax.Array) -> jax.Array:
    """Reshape pieces ``(..., rows, columns)`` to lines ``(..., n, LANES)``.

    The last line is padded with zeros.

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
