# SPDX-License-Identifier: Apache-2.0
"""Running a transformation over all matrices of a model, arranged as suits the device.

``inner`` treats every matrix by itself, so it may be run on one matrix at a time, or on many. It is handed lists of
stacks and may put together what small problems they have in common.

- A **CPU** is fastest one matrix at a time, in a loop: one compiled copy for every shape, no batch axis in the
  products, nothing copied into a stack, few temporaries.
- A **TPU** keeps a matrix's whole chain on chip if it is straight code on that matrix alone; a stack of twelve goes
  through its main memory at every stage. Parameters are taken a few at a time, no more than fit on chip, each as a
  stack of its own.
- A **GPU** pays for every kernel that is launched, and fuses the stacking into what reads the stack: all parameters of
  one kind are one stack.

What each of them costs, as its compiler sees it, stands in docs/performance.md.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from normpre_optax.parameters.dims import (
    MatrixDims,
    batch_sizes,
    from_matrices,
    stacked,
    stored_transposed,
    to_matrices,
    unstacked,
)
from normpre_optax.platforms import by_platform
from normpre_optax.transforms.oriented import MatrixLayout

# How many bytes of parameters are taken at once. A stage's temporaries are a few times as large.
TPU_BYTES = 2**26
GPU_BYTES = 2**30

Stage = Callable[..., tuple[list[jax.Array], list[Any], list[Any]]]
"""``(matrices, shared state, how they lie)`` to new update, new states, new shared state. An update may be a tuple."""


class Matrices(NamedTuple):
    """Stacks of matrices with what belongs to each.

    Of a single stack every field is an array with the same leading axes (or none); a stage is handed lists of them,
    with an entry for every stack.

    Attributes:
        update: ``(..., out, in)``, or ``(..., in, out)`` where it is stored that way.
        weight: as ``update``, or None.
        ids: uint32 ``(..., 2)``: parameter and place, for the sketch's draws.
        state: arrays ``(..., ...)`` that a stage keeps for each matrix.
    """

    update: Any
    weight: Any
    ids: Any
    state: list[Any]


def in_lists(stacks: Sequence[Matrices]) -> Matrices:
    """Several stacks as a stage is handed them."""
    return Matrices(
        [s.update for s in stacks],
        None if stacks[0].weight is None else [s.weight for s in stacks],
        [s.ids for s in stacks],
        [list(parts) for parts in zip(*(s.state for s in stacks), strict=True)],
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter's part of an update: ``update`` and ``weight`` in its own layout, the rest by its batch axes.

    ``lead`` is which of these comes first where its matrices are put in a stack.
    """

    update: jax.Array
    weight: jax.Array | None
    ids: jax.Array
    state: list[jax.Array]
    dims: MatrixDims = dataclasses.field(metadata={"static": True})
    lead: int = dataclasses.field(default=0, metadata={"static": True})

    def kind(self) -> Hashable:
        """Parameters of one kind share a compiled copy."""
        return self.dims, self.lead, tuple((x.shape, jnp.dtype(x.dtype)) for x in jax.tree.leaves(self))

    def stored_transposed(self) -> bool:
        """Whether the matrices lie as (in, out)."""
        return stored_transposed(self.update.ndim, self.dims)

    def matrices(self, transposed: bool) -> Matrices:
        """In layout (batch, out, in), or (batch, in, out) if ``transposed``."""
        lay = functools.partial(to_matrices, dims=self.dims, transposed=transposed, lead=self.lead)
        line_up = functools.partial(stacked, sizes=batch_sizes(self.update.shape, self.dims), lead=self.lead)
        weight = None if self.weight is None else lay(self.weight)
        return Matrices(lay(self.update), weight, line_up(self.ids), [line_up(x) for x in self.state])

    def from_matrices(self, stack: Any, state: list[jax.Array], transposed: bool) -> tuple[Any, list[jax.Array]]:
        """A new update, in the parameter's layout, and a new state, by its batch axes."""
        sizes = batch_sizes(self.update.shape, self.dims)
        own = functools.partial(
            from_matrices, dims=self.dims, shape=self.update.shape, transposed=transposed, lead=self.lead
        )
        return jax.tree.map(own, stack), [unstacked(x, sizes, self.lead) for x in state]


def is_per_parameter(node: Any, treedef: Any, sizes: Sequence[tuple[int, ...]]) -> bool:
    """Whether part of a state is a tree like the parameters', with an entry for each matrix, and no counter."""
    if jax.tree.structure(node) != treedef:
        return False
    return all(jnp.shape(x)[: len(of)] == of for x, of in zip(jax.tree.leaves(node), sizes, strict=True))


def run(
    stage: Stage, parameters: list[Parameter], shared: list[Any]
) -> tuple[list[jax.Array], list[list[jax.Array]], list[Any]]:
    """Run ``stage`` on the matrices of every parameter.

    Args:
        stage: treats every matrix by itself; gives the same new shared state for all of them.
        parameters: the parameters.
        shared: state that belongs to no matrix, such as step counters.

    Returns:
        The parameters' new updates in their own layouts, their new states, and the new shared state.
    """
    return by_platform(
        parameters,
        shared,
        cpu=functools.partial(_in_turn, stage),
        tpu=functools.partial(_in_pools, stage, limit=TPU_BYTES, stacked=False),
        default=functools.partial(_in_pools, stage, limit=GPU_BYTES, stacked=True),
    )


def _by_kind(parameters: list[Parameter]) -> list[list[int]]:
    kinds: dict[Hashable, list[int]] = {}
    for i, parameter in enumerate(parameters):
        kinds.setdefault(parameter.kind(), []).append(i)
    return list(kinds.values())


def _in_turn(stage: Stage, parameters: list[Parameter], shared: list[Any]):
    """One matrix after the other, in a loop for every kind."""
    results: list[Any] = [None] * len(parameters)
    now = shared
    for members in _by_kind(parameters):
        new, now = _kind_in_turn(stage, shared, [parameters[i] for i in members])
        for i, result in zip(members, new, strict=True):
            results[i] = result
    return [new for new, _ in results], [state for _, state in results], now


def _in_pools(stage: Stage, parameters: list[Parameter], shared: list[Any], limit: int, stacked: bool):
    """Several parameters at once, up to ``limit`` bytes of them, those of one kind as one stack if ``stacked``."""
    new: list[Any] = [None] * len(parameters)
    states: list[Any] = [None] * len(parameters)
    now, traced = shared, {}
    if stacked:  # A momentum that several kernels read is made once, and not again by each of them.
        parameters = [dataclasses.replace(p, update=jax.lax.optimization_barrier(p.update)) for p in parameters]
    for pool in _pools(parameters, limit, stacked):
        flat = [i for members in pool for i in members]
        kinds = tuple(tuple(parameters[i].kind() for i in members) for members in pool)
        if kinds not in traced:  # Pools of one kind are traced once.
            traced[kinds] = jax.jit(functools.partial(_pool, stage, pool))
        updates, kept, now = traced[kinds]([parameters[i] for i in flat], shared)
        for i, update, state in zip(flat, updates, kept, strict=True):
            new[i], states[i] = update, state
    return new, states, now


def _pools(parameters: list[Parameter], limit: int, stacked: bool) -> Iterator[list[list[int]]]:
    """Lists of stacks, each a list of parameters. Matrices that lie the other way are a pool of their own."""
    for transposed in (False, True):
        pool, size = [], 0
        chosen = [i for i, p in enumerate(parameters) if p.stored_transposed() == transposed]
        groups = _by_kind([parameters[i] for i in chosen]) if stacked else [[k] for k in range(len(chosen))]
        for members in groups:
            each = parameters[chosen[members[0]]].update.nbytes
            per_stack = max(1, limit // max(1, each))
            for start in range(0, len(members), per_stack):
                stack = [chosen[k] for k in members[start : start + per_stack]]
                if pool and size + each * len(stack) > limit:
                    yield pool
                    pool, size = [], 0
                pool.append(stack)
                size += each * len(stack)
        if pool:
            yield pool


def _pool(stage: Stage, pool: list[list[int]], parameters: list[Parameter], shared: list[Any]):
    places = iter(range(len(parameters)))
    groups = [[next(places) for _ in members] for members in pool]
    layout = MatrixLayout(parameters[0].stored_transposed(), parts=[len(members) for members in pool])
    return on_stacks(stage, parameters, shared, groups, layout)


def on_stacks(
    stage: Stage,
    parameters: list[Parameter],
    shared: list[Any],
    groups: Sequence[Sequence[int]],
    layout: MatrixLayout,
    place: Callable[[jax.Array, int], jax.Array] = lambda x, group: x,
) -> tuple[list[jax.Array], list[list[jax.Array]], list[Any]]:
    """Run ``stage`` once, on the stacks of some groups of parameters.

    Args:
        stage: treats every matrix by itself.
        parameters: the parameters.
        shared: state that belongs to no matrix.
        groups: which parameters are put together in one stack.
        layout: how the stacks are to lie, for the stage to know.
        place: puts a group's stack where it is to lie on a mesh.

    Returns:
        As ``run``.
    """
    stacks = []
    for k, members in enumerate(groups):
        laid = [parameters[i].matrices(layout.transposed) for i in members]
        stack = jax.tree.map(lambda x, *more: jnp.concatenate([x, *more]) if more else x, *laid)
        weight = None if stack.weight is None else place(stack.weight, k)
        stacks.append(stack._replace(update=place(stack.update, k), weight=weight))
    new, state, shared = stage(in_lists(stacks), shared, layout)
    updates: list[Any] = [None] * len(parameters)
    states: list[Any] = [None] * len(parameters)
    for k, members in enumerate(groups):
        batch = len(stacks[k].ids) // len(members)
        whole = jax.tree.map(lambda x, k=k: place(x, k), new[k])
        for at, i in enumerate(members):
            part = slice(at * batch, (at + 1) * batch)
            update, own = jax.tree.map(lambda x, part=part: x[part], (whole, [kept[k] for kept in state]))
            updates[i], states[i] = parameters[i].from_matrices(update, own, layout.transposed)
    return updates, states, shared


def _kind_in_turn(stage: Stage, shared: list[Any], group: list[Parameter]):
    """One parameter after the other in a loop, and one matrix after the other within each."""

    def one(parameter: Parameter, shared: list[Any]):
        layout = MatrixLayout(parameter.stored_transposed())
        matrices = parameter.matrices(layout.transposed)
        new, state, now = _each_slice(functools.partial(stage, layout=layout), matrices, shared)
        return parameter.from_matrices(new, state, layout.transposed), now

    if len(group) == 1:
        result, now = one(group[0], shared)
        return [result], now

    once = jax.jit(one, inline=True)  # traced once, for its shapes and in the loop

    def body(i: jax.Array, carry):
        chosen = jax.lax.switch(i, [lambda p=p: p for p in group])
        result, now = once(chosen, shared)
        written = jax.tree.map(lambda all_, x: jax.lax.dynamic_update_index_in_dim(all_, x, i, 0), carry[0], result)
        return written, now

    shapes, _ = jax.eval_shape(once, group[0], shared)
    empty = jax.tree.map(lambda x: jnp.zeros((len(group), *x.shape), x.dtype), shapes)  # written whole by the loop
    stacked, now = jax.lax.fori_loop(0, len(group), body, (empty, shared))
    return [jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(len(group))], now


def _each_slice(stage: Callable, matrices: Matrices, shared: list[Any]):
    """``stage`` on each matrix ``(m, n)`` of a stack ``(batch, m, n)``."""

    def one(matrix: Matrices):
        new, state, now = stage(in_lists([matrix]), shared)
        return new[0], [kept[0] for kept in state], now

    batch = matrices.update.shape[0]
    if batch == 1:
        new, state, now = one(jax.tree.map(lambda x: x[0], matrices))
        return *jax.tree.map(lambda x: x[None], (new, state)), now
    _, (new, state, now) = jax.lax.scan(lambda _, matrix: (None, one(matrix)), None, matrices)
    return new, state, [x[-1] for x in now]
