# SPDX-License-Identifier: Apache-2.0
"""Which device of a mesh treats which matrices: a plan made from shapes and shardings alone, the same on every host.

Axes of a mesh play three parts for a stack ``(batch, rows, columns)``: they shard its batch axis (such devices hold
different matrices and never exchange any), its rows and columns (such devices hold pieces of the same matrices and
exchange them by one all-to-all in and one out), or nothing (such devices hold copies; each treats its share, and the
results are gathered, or all do the same).
"""

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from normpre_optax.meshes.specs import Axes, axes_of

Work = Callable[[int, int], float]

LANES = 128  # of a TPU's vector units: what travels is in lines of so many numbers


class Stack(NamedTuple):
    """A stack as a device sees it: how many matrices, their shape, and the mesh axes along batch, rows, columns."""

    batch: int
    rows: int
    columns: int
    dtype: jnp.dtype
    axes: tuple[Axes, Axes, Axes]

    @property
    def shape(self) -> tuple[int, int]:
        """Of one matrix."""
        return self.rows, self.columns


class Team(NamedTuple):
    """Stacks that are sharded alike, in one dtype: their matrices travel in one buffer.

    Attributes:
        stacks: their numbers.
        dtype: theirs.
        copies: mesh axes along which they are replicated and the work is divided.
        pieces: mesh axes that shard their rows, then their columns.
        grid: number of pieces along rows and along columns.
        owned: for every device along ``copies`` and ``pieces``, the matrices that it treats: (stack, place).
        length: lines of the longest list's pieces.
    """

    stacks: list[int]
    dtype: jnp.dtype
    copies: Axes
    pieces: Axes
    grid: tuple[int, int]
    owned: list[list[tuple[int, int]]]
    length: int

    @property
    def stays(self) -> bool:
        """Whether every device has its matrices whole, and nobody else treats them."""
        return not self.copies and math.prod(self.grid) == 1


class Plan(NamedTuple):
    """Who treats which matrices.

    Attributes:
        teams: see ``Team``; those that stay come first.
        loads: work of every device, in the shape of the mesh.
        kinds: what a device may have to do: for each team, the shapes of its matrices in order.
        kind: for every device, flat, which of them it is.
        slots: for every device, flat, the matrices it treats, numbered through all stacks of the whole model.
    """

    teams: list[Team]
    loads: np.ndarray
    kinds: list[tuple[tuple[tuple[int, int], ...], ...]]
    kind: np.ndarray
    slots: np.ndarray


def make_plan(sizes: dict[str, int], stacks: Sequence[Stack], work: Work) -> Plan:
    """Share the matrices out: the most expensive first, each to a device that has least to do.

    Among several such it goes to the one with the shortest line in the exchange, whose length is that of the longest.
    Along an axis that shards some matrices, those of which it holds copies are divided too, if that takes work from the
    busiest device. Along an axis that shards none, such as data parallelism between slices or nodes, all devices do the
    same: what they would have to gather takes longer than what they would save, unless its network is as fast as one
    node's. Only where nothing is sharded at all, all axes divide.

    Args:
        sizes: of the mesh's axes.
        stacks: what there is.
        work: cost of one matrix of so many rows and columns.

    Returns:
        The plan, the same on every host.
    """
    sharding = set().union(*(sum(stack.axes, ()) for stack in stacks)) or set(sizes)
    free = [a for a in sizes if a in sharding and sizes[a] > 1 and any(a not in sum(s.axes, ()) for s in stacks)]
    choices = [chosen for n in range(len(free) + 1) for chosen in itertools.combinations(free, n)]
    plans = [_make_plan(sizes, stacks, work, frozenset(chosen)) for chosen in choices]
    return min(plans, key=lambda found: (found.loads.max(), traffic(sizes, found)))


def _make_plan(sizes: dict[str, int], stacks: Sequence[Stack], work: Work, dividing: frozenset[str]) -> Plan:
    """With the work divided along those axes of copies only."""
    loads = np.zeros(tuple(sizes.values()))
    lines: dict[Hashable, np.ndarray] = {}
    order = sorted(range(len(stacks)), key=lambda i: (-work(*stacks[i].shape), stacks[i].shape, i))
    owners: dict[tuple[int, int], int] = {}
    for i in order:
        batch, rows, columns = stacks[i].axes
        pieces = rows + columns
        copies = tuple(a for a in sizes if a in dividing and a not in batch + pieces)
        others = tuple(a for a in sizes if a not in copies + pieces)
        # View the loads as (devices of a team, teams): a place's load is that of the busiest who has it in any team.
        turned = loads.transpose([list(sizes).index(a) for a in copies + pieces + others])
        members = math.prod(sizes[a] for a in copies + pieces)
        line = lines.setdefault((stacks[i].axes, stacks[i].dtype), np.zeros(members))
        for j in range(stacks[i].batch // math.prod(sizes[a] for a in batch)):
            busiest = turned.reshape(members, -1).max(axis=1)
            owner = int(np.lexsort((line, busiest))[0])
            owners[i, j] = owner
            line[owner] += math.prod(stacks[i].shape)
            turned[np.unravel_index(owner, turned.shape[: len(copies + pieces)])] += work(*stacks[i].shape)
    teams = _teams(sizes, stacks, owners, dividing)
    return Plan(teams, loads, *_kinds(sizes, stacks, teams))


def _teams(
    sizes: dict[str, int], stacks: Sequence[Stack], owners: dict[tuple[int, int], int], dividing: frozenset[str]
) -> list[Team]:
    members: dict[Hashable, list[int]] = {}
    for i, stack in enumerate(stacks):
        members.setdefault((stack.axes, stack.dtype), []).append(i)
    teams = []
    for found in members.values():
        batch, rows, columns = stacks[found[0]].axes
        grid = math.prod(sizes[a] for a in rows), math.prod(sizes[a] for a in columns)
        copies = tuple(a for a in sizes if a in dividing and a not in batch + rows + columns)
        owned: list[list[tuple[int, int]]] = [[] for _ in range(math.prod(sizes[a] for a in copies) * math.prod(grid))]
        for i, j in sorted(owners, key=lambda at: (stacks[at[0]].shape, at)):
            if i in found:
                owned[owners[i, j]].append((i, j))
        piece = {i: lines_of(stacks[i].rows // grid[0], stacks[i].columns // grid[1]) for i in found}
        length = max(sum(piece[i] for i, _ in own) for own in owned)
        teams.append(Team(found, stacks[found[0]].dtype, copies, rows + columns, grid, owned, length))
    return sorted(teams, key=lambda team: not team.stays)


def _kinds(sizes: dict[str, int], stacks: Sequence[Stack], teams: list[Team]):
    """The last three fields of a ``Plan``."""
    first = np.cumsum([0, *(stack.batch for stack in stacks)])
    kinds: dict[tuple[tuple[tuple[int, int], ...], ...], int] = {}
    kind, slots = [], []
    for device in np.ndindex(*sizes.values()):
        at = dict(zip(sizes, device, strict=True))
        mine = [team.owned[flat_index(at, sizes, team.copies + team.pieces)] for team in teams]
        work = tuple(tuple(stacks[i].shape for i, _ in own) for own in mine)
        kind.append(kinds.setdefault(work, len(kinds)))
        places = []
        for i, j in (item for own in mine for item in own):
            batch = stacks[i].axes[0]
            local = stacks[i].batch // math.prod(sizes[a] for a in batch)
            places.append(first[i] + flat_index(at, sizes, batch) * local + j)
        slots.append(places)
    longest = max(map(len, slots))
    padded = np.array([places + [0] * (longest - len(places)) for places in slots], np.int32).reshape(-1, longest)
    return list(kinds), np.array(kind, np.int32), padded


def flat_index(at: dict[str, Any], sizes: dict[str, int], axes: Axes) -> Any:
    """Index along several axes of a mesh taken as one, the first the slowest.

    Example:
        >>> flat_index({"data": 1, "fsdp": 2}, {"data": 2, "fsdp": 4}, ("data", "fsdp"))
        6
    """
    return functools.reduce(lambda flat, a: flat * sizes[a] + at[a], axes, 0)


def lines_of(rows: int, columns: int) -> int:
    """How many lines of ``LANES`` a piece of a matrix fills.

    Example:
        >>> lines_of(48, 256), lines_of(3, 5)
        (96, 1)
    """
    return -(-rows * columns // LANES)


def newton_schulz_work(rows: int, columns: int) -> float:
    """Operations of five steps of Newton-Schulz on a matrix, on its Gram matrix where that takes fewer.

    Example:
        >>> from normpre_optax.meshes.plan import newton_schulz_work
        >>> newton_schulz_work(1, 1), newton_schulz_work(4, 1)
        (30.0, 60.0)
    """
    short, long = sorted((rows, columns))
    return float(short**2 * min(20 * long + 10 * short, 8 * long + 28 * short))


def stack_of(shape: tuple[int, ...], dtype: Any, spec: PartitionSpec) -> Stack:
    """What ``make_plan`` needs to know of a stack ``(batch, rows, columns)`` that lies so.

    Example:
        >>> from jax.sharding import PartitionSpec
        >>> stack_of((12, 768, 3072), "float32", PartitionSpec(None, "fsdp")).axes
        ((), ('fsdp',), ())
    """
    batch, rows, columns = shape
    axes = [axes_of(entry) for entry in tuple(spec) + (None,) * (3 - len(spec))]
    return Stack(batch, rows, columns, jnp.dtype(dtype), (axes[0], axes[1], axes[2]))


def traffic(sizes: dict[str, int], plan: Plan) -> float:
    """Output bytes of the collectives of an exchange, for each device.

    Example:
        Eight matrices, one for every device: what a device holds of all of them, in and out.

        >>> stack = stack_of((8, 16, 128), "float32", PartitionSpec(None, "fsdp"))
        >>> traffic({"fsdp": 8}, make_plan({"fsdp": 8}, [stack], newton_schulz_work)) / (2 * 4 * 16 * 128)
        1.0
    """
    total = 0.0
    for team in plan.teams:
        pieces, copies = math.prod(team.grid), math.prod(sizes[a] for a in team.copies)
        held = pieces * team.length * LANES * team.dtype.itemsize
        total += (2 * held if pieces > 1 else 0) + (copies * held if copies > 1 else 0)
    return total


def in_words(sizes: dict[str, int], stacks: Sequence[Stack]) -> list[str]:
    """The plan as ``explain`` tells it: who treats how many matrices, and what travels.

    Args:
        sizes: of the mesh's axes.
        stacks: the hidden matrices.

    Returns:
        Lines of text.
    """
    devices = math.prod(sizes.values())
    axes = ", ".join(f"{name}={size}" for name, size in sizes.items())
    if not stacks:
        return [f"mesh {axes}: {devices} devices, no matrices to divide"]
    found = make_plan(sizes, stacks, newton_schulz_work)
    counts = [sum(map(len, found.kinds[kind])) for kind in found.kind]
    even = sum(newton_schulz_work(*stack.shape) * stack.batch for stack in stacks) / devices
    most = found.loads.max() / even if even else 1.0
    matrices = sum(stack.batch for stack in stacks)
    used = {*sum((team.copies + team.pieces for team in found.teams), ()), *sum((s.axes[0] for s in stacks), ())}
    alike = ", ".join(name for name, size in sizes.items() if size > 1 and name not in used)
    same = f" (along {alike} all do the same)" if alike else ""
    return [
        f"mesh {axes}: {devices} devices. Optimizers that divide (normpre_g, muon) send every matrix to one device:",
        f"  {min(counts)} to {max(counts)} of {matrices} matrices each, "
        f"at most {most:.2f} of an even share of work{same},",
        f"  {traffic(sizes, found) / 1e6:,.3g} MB to each device and step",
    ]
