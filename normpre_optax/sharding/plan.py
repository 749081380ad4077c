# SPDX-License-Identifier: Apache-2.0
"""Plan which device computes which matrix, if the shardings of parameters are known.

A mesh axis shards batch axes of a parameter (each device has its own matrices), rows or
columns (each device has a piece of every matrix), or neither (each device has a copy).
Parameters that are sharded over the same axes form a team. The devices that have its
pieces, and those with copies that share the work, own some of its matrices each.

Everything here is Python and NumPy, computed while JAX traces. ``exchange.py`` carries
the plan out.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import PartitionSpec

from normpre_optax.parameters.dims import MatrixDims, split_axes
from normpre_optax.sharding.placement import axes_of

MeshAxes = tuple[str, ...]
Sizes = dict[str, int]  # number of devices along each mesh axis
# lanes of a TPU's vector unit: pieces are communicated in lines of this many elements
LANES = 128


def lines_of(rows: int, columns: int) -> int:
    """Return the number of lines of ``LANES`` elements that a piece of a matrix fills.

    Example:
        >>> from normpre_optax.sharding.plan import lines_of
        >>> lines_of(48, 256), lines_of(3, 5)
        (96, 1)
    """
    return math.ceil(rows * columns / LANES)


class Shard(NamedTuple):
    """One device's shard of a parameter: a stack of pieces of matrices.

    The stack has the shape ``(count, rows, columns)``.
    """

    count: int
    rows: int
    columns: int
    grid: tuple[int, int]  # pieces of a matrix along rows and columns
    batch: MeshAxes  # mesh axes that shard its batch axes
    pieces: MeshAxes  # mesh axes that shard its rows, then its columns

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of a complete matrix."""
        return self.rows * self.grid[0], self.columns * self.grid[1]

    @property
    def axes(self) -> MeshAxes:
        """Mesh axes that shard the parameter."""
        return self.batch + self.pieces

    @property
    def lines(self) -> int:
        """Number of lines of a piece."""
        return lines_of(self.rows, self.columns)

    @property
    def work(self) -> float:
        """Operations of five Newton-Schulz steps, in the form that needs fewer."""
        short, long = sorted(self.shape)
        direct = 20 * long + 10 * short
        gram = 8 * long + 28 * short
        return float(short**2 * min(direct, gram))


class Matrix(NamedTuple):
    """One matrix: the number of its parameter, and its index in the shard."""

    parameter: int
    index: int


class Team(NamedTuple):
    """Parameters that are sharded over the same axes, with one buffer for all of them.

    Attributes:
        members: the parameters.
        copies: mesh axes along which copies share the work.
        pieces: mesh axes that shard rows and columns.
        grid: pieces of a matrix along rows and columns.
        owned: the matrices of each device along ``copies`` and ``pieces``, matrices of
            equal shape side by side.
        length: number of lines in the longest list of ``owned``.
    """

    members: list[int]
    copies: MeshAxes
    pieces: MeshAxes
    grid: tuple[int, int]
    owned: list[list[Matrix]]
    length: int

    @property
    def axes(self) -> MeshAxes:
        """Mesh axes whose devices are the owners; the first one varies slowest."""
        return self.copies + self.pieces

    @property
    def communicates(self) -> bool:
        """Whether there are several owners, which exchange matrices."""
        return len(self.owned) > 1


class Run(NamedTuple):
    """Matrices of equal shape that are side by side in a device's buffer of a team."""

    count: int
    rows: int  # of a piece
    columns: int

    @property
    def lines(self) -> int:
        """Number of lines of all their pieces."""
        return self.count * lines_of(self.rows, self.columns)


Program = tuple[tuple[Run, ...], ...]  # what a device computes: its runs of every team


class _Extent(NamedTuple):
    """Rows, columns or batch axes of a parameter, flattened, on one device."""

    size: int
    devices: int  # over how many devices they are sharded
    names: MeshAxes


def shard_of(
    shape: tuple[int, ...],
    dims: MatrixDims,
    spec: PartitionSpec,
    transposed: bool,
    sizes: Sizes,
) -> Shard:
    """Return the shard of a parameter; ``transposed`` makes its inputs the rows."""
    batch_axes, row_axes, column_axes = split_axes(len(shape), dims)
    if transposed:
        row_axes, column_axes = column_axes, row_axes
    batch = _extent(batch_axes, shape, spec, sizes)
    rows = _extent(row_axes, shape, spec, sizes)
    columns = _extent(column_axes, shape, spec, sizes)
    return Shard(
        count=batch.size,
        rows=rows.size,
        columns=columns.size,
        grid=(rows.devices, columns.devices),
        batch=batch.names,
        pieces=rows.names + columns.names,
    )


def _extent(
    axes: tuple[int, ...], shape: tuple[int, ...], spec: PartitionSpec, sizes: Sizes
) -> _Extent:
    names: MeshAxes = ()
    for axis in axes:
        # A spec may have fewer entries than the parameter has axes.
        if axis < len(spec):
            names += axes_of(spec[axis])
    devices = math.prod(sizes[name] for name in names)
    size = math.prod(shape[axis] for axis in axes)
    return _Extent(size // devices, devices, names)


def flat_index(at: Mapping[str, Any], sizes: Sizes, axes: MeshAxes) -> Any:
    """Return the index along several flattened mesh axes; the first varies slowest.

    Args:
        at: index along every mesh axis: numbers, or a device's traced ones.
        sizes: sizes of the mesh axes.
        axes: the axes to flatten.

    Example:
        The devices of a 2 x 2 mesh are 0, 1 at ``data`` 0, and 2, 3 at ``data`` 1.

        >>> from normpre_optax.sharding.plan import flat_index
        >>> sizes, at = {"data": 2, "fsdp": 2}, {"data": 1, "fsdp": 0}
        >>> flat_index(at, sizes, ("data", "fsdp"))
        2
        >>> flat_index(at, sizes, ("fsdp", "data"))  # along the columns
        1
        >>> flat_index(at, sizes, ("fsdp",)), flat_index(at, sizes, ())
        (0, 0)
    """
    index = 0
    for a in axes:
        index = index * sizes[a] + at[a]
    return index


class _Candidate(NamedTuple):
    """A plan, and what it costs."""

    teams: list[Team]
    load: float  # operations of the busiest device
    lines: int  # that a device communicates each way


@dataclasses.dataclass
class _Draft:
    """A team while matrices are assigned to its owners."""

    members: list[int]
    copies: MeshAxes
    owned: list[list[Matrix]]
    lines: np.ndarray  # in the list of each owner
    # Flat indices (owner, device): an owner is several devices if other axes replicate
    # the computation, or shard batch axes.
    devices: np.ndarray


def plan(sizes: Sizes, shards: Sequence[Shard]) -> list[Team]:
    """Assign every matrix to an owner.

    The most expensive matrices are first, each for the device with the least work.
    Copies along an axis that shards other parameters share the work if that reduces the
    largest load. Along a pure data-parallel axis the computation is replicated, and
    nothing is communicated. If no parameter is sharded, all axes share the work.
    """
    candidates = [_candidate(sizes, shards, axes) for axes in _choices(sizes, shards)]
    return min(candidates, key=lambda found: (found.load, found.lines)).teams


def _choices(sizes: Sizes, shards: Sequence[Shard]) -> Iterator[MeshAxes]:
    """Yield the sets of axes along which copies may share the work, smallest first."""
    used = set().union(*(shard.axes for shard in shards))
    candidates = used or set(sizes)
    free = []
    for a in sizes:
        has_copies = any(a not in shard.axes for shard in shards)
        if a in candidates and sizes[a] > 1 and has_copies:
            free.append(a)
    for count in range(len(free) + 1):
        yield from itertools.combinations(free, count)


def _candidate(sizes: Sizes, shards: Sequence[Shard], sharing: MeshAxes) -> _Candidate:
    """Return the plan in which copies along these axes share the work."""
    loads = np.zeros(math.prod(sizes.values()))
    drafts: dict[tuple, _Draft] = {}
    for i in _most_expensive_first(shards):
        shard = shards[i]
        key = (shard.batch, shard.pieces, shard.grid)
        if key not in drafts:
            drafts[key] = _draft(sizes, shard, sharing)
        draft = drafts[key]
        draft.members.append(i)
        for j in range(shard.count):
            # An owner is as busy as the busiest of its devices. Ties go to the shortest
            # list, because all buffers have the length of the longest.
            busiest = loads[draft.devices].max(axis=1)
            owner = int(np.lexsort((draft.lines, busiest))[0])
            draft.owned[owner].append(Matrix(i, j))
            draft.lines[owner] += shard.lines
            loads[draft.devices[owner]] += shard.work
    teams = [_team(draft, shards) for draft in drafts.values()]
    sent = sum(len(team.owned) * team.length for team in teams if team.communicates)
    return _Candidate(teams, float(loads.max()), sent)


def _most_expensive_first(shards: Sequence[Shard]) -> list[int]:
    def order(i: int) -> tuple:
        return -shards[i].work, shards[i].shape, i

    return sorted(range(len(shards)), key=order)


def _draft(sizes: Sizes, shard: Shard, sharing: MeshAxes) -> _Draft:
    """Return a team without matrices, for parameters that are sharded like this one.

    Example: the devices of the mesh ``{"data": 2, "fsdp": 2}`` are 0, 1 at data 0, and
    2, 3 at data 1. A parameter that is sharded along "fsdp" has two owners, ``devices =
    [[0, 2], [1, 3]]``, because "data" replicates the computation. If copies along
    "data" share the work, it has four: ``[[0], [1], [2], [3]]``.
    """
    copies = tuple(a for a in sizes if a in sharing and a not in shard.axes)
    owners = copies + shard.pieces
    others = tuple(a for a in sizes if a not in owners)
    count = math.prod(sizes[a] for a in owners)
    names = list(sizes)
    order = [names.index(a) for a in owners + others]
    devices = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    return _Draft(
        members=[],
        copies=copies,
        owned=[[] for _ in range(count)],
        lines=np.zeros(count, int),
        devices=devices.transpose(order).reshape(count, -1),
    )


def _team(draft: _Draft, shards: Sequence[Shard]) -> Team:
    def order(matrix: Matrix) -> tuple:
        return shards[matrix.parameter].shape, matrix

    shard = shards[draft.members[0]]
    return Team(
        members=draft.members,
        copies=draft.copies,
        pieces=shard.pieces,
        grid=shard.grid,
        owned=[sorted(own, key=order) for own in draft.owned],
        length=int(draft.lines.max()),
    )


def programs_of(
    sizes: Sizes, shards: Sequence[Shard], teams: Sequence[Team]
) -> tuple[list[Program], np.ndarray]:
    """Return the distinct programs, and the index of each device's program.

    Devices whose matrices have the same shapes run the same program.
    """
    indices: dict[Program, int] = {}
    program_of = []
    for device in np.ndindex(*sizes.values()):
        at = dict(zip(sizes, device, strict=True))
        runs = []
        for team in teams:
            own = team.owned[flat_index(at, sizes, team.axes)]
            runs.append(_runs([shards[matrix.parameter] for matrix in own]))
        program = tuple(runs)
        index = indices.setdefault(program, len(indices))
        program_of.append(index)
    return list(indices), np.array(program_of, np.int32)


def _runs(shards: Sequence[Shard]) -> tuple[Run, ...]:
    """Return the runs of equal pieces in a device's list of matrices."""

    def piece(shard: Shard) -> tuple[int, int]:
        return shard.rows, shard.columns

    runs = []
    for (rows, columns), same in itertools.groupby(shards, key=piece):
        runs.append(Run(len(list(same)), rows, columns))
    return tuple(runs)
