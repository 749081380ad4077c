# SPDX-License-Identifier: Apache-2.0
"""Running a transformation over all matrices of a model: one compiled copy for every distinct shape.

``inner`` treats every matrix by itself, so it may be run on one matrix at a time, or on many as one stack. A CPU is
fastest one matrix at a time, in a loop: no batch axis in the products, nothing copied into a stack, few temporaries.
Accelerators want the stack.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from normpre_optax.parameters.dims import MatrixDims, from_matrices, stored_transposed, to_matrices

# An accelerator takes no more than this of one shape at once: the temporaries of a stage are a few times as large.
CHUNK_BYTES = 2**31

Stage = Callable[..., tuple[jax.Array, list[Any], list[Any]]]
"""``(matrices, shared state, transposed=stored as (in, out)?)`` to new update, new states, new shared state."""


class Matrices(NamedTuple):
    """Matrices of one shape with what belongs to each, all with the same leading axes (or none).

    On a mesh every field is a list instead, with an entry for every shape.

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


class Parameter(NamedTuple):
    """One parameter's part of an update: ``update`` and ``weight`` in its own layout, the rest by its matrices."""

    update: jax.Array
    weight: jax.Array | None
    ids: jax.Array
    state: list[jax.Array]
    dims: MatrixDims

    def kind(self) -> Hashable:
        """Parameters of one kind share a compiled copy."""
        return self.dims, tuple((x.shape, jnp.dtype(x.dtype)) for x in jax.tree.leaves(self[:4]))

    def stored_transposed(self) -> bool:
        """Whether the matrices lie as (in, out)."""
        return stored_transposed(self.update.ndim, self.dims)

    def matrices(self, transposed: bool) -> Matrices:
        """In layout (batch, out, in), or (batch, in, out) if ``transposed``."""
        lay = functools.partial(to_matrices, dims=self.dims, transposed=transposed)
        return Matrices(lay(self.update), None if self.weight is None else lay(self.weight), self.ids, self.state)

    def from_matrices(self, stack: jax.Array, transposed: bool) -> jax.Array:
        """A new update, in the parameter's layout."""
        return from_matrices(stack, self.dims, self.update.shape, transposed)


def is_per_parameter(node: Any, treedef: Any) -> bool:
    """Whether part of a state is a tree like the parameters', of arrays that belong to them, and no counter."""
    return jax.tree.structure(node) == treedef and all(jnp.ndim(x) > 0 for x in jax.tree.leaves(node))


def run(
    stage: Stage, parameters: Sequence[Parameter], shared: list[Any]
) -> tuple[list[jax.Array], list[list[jax.Array]], list[Any]]:
    """Run ``stage`` on the matrices of every parameter.

    Args:
        stage: treats every matrix by itself; gives the same new shared state for all of them.
        parameters: the parameters.
        shared: state that belongs to no matrix, such as step counters.

    Returns:
        The parameters' new updates in their own layouts, their new states, and the new shared state.
    """
    kinds: dict[Hashable, list[int]] = {}
    for i, parameter in enumerate(parameters):
        kinds.setdefault(parameter.kind(), []).append(i)
    results: list[Any] = [None] * len(parameters)
    new_shared = shared
    for members in kinds.values():
        group = [parameters[i] for i in members]
        dims = group[0].dims
        new, new_shared = jax.lax.platform_dependent(
            [p._replace(dims=None) for p in group],
            cpu=functools.partial(_in_turn, stage, dims, shared),
            default=functools.partial(_at_once, stage, dims, shared),
        )
        for i, result in zip(members, new, strict=True):
            results[i] = result
    return [update for update, _ in results], [state for _, state in results], new_shared


def _in_turn(stage: Stage, dims: MatrixDims, shared: list[Any], group: list[Parameter]):
    """One parameter after the other in a loop, and one matrix after the other within each."""

    def one(parameter: Parameter):
        parameter = parameter._replace(dims=dims)
        transposed = parameter.stored_transposed()
        matrices = parameter.matrices(transposed)
        new, state, now = _each_slice(functools.partial(stage, transposed=transposed), matrices, shared)
        return (parameter.from_matrices(new, transposed), state), now

    if len(group) == 1:
        result, now = one(group[0])
        return [result], now

    def body(i: jax.Array, carry):
        chosen = jax.lax.switch(i, [lambda p=p: p for p in group])
        result, now = one(chosen)
        written = jax.tree.map(lambda all_, x: jax.lax.dynamic_update_index_in_dim(all_, x, i, 0), carry[0], result)
        return written, now

    shapes = jax.eval_shape(lambda p: one(p)[0], group[0])
    empty = jax.tree.map(lambda x: jnp.zeros((len(group), *x.shape), x.dtype), shapes)  # written whole by the loop
    stacked, now = jax.lax.fori_loop(0, len(group), body, (empty, shared))
    return [jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(len(group))], now


def _each_slice(stage: Callable, matrices: Matrices, shared: list[Any]):
    """``stage`` on each matrix ``(m, n)`` of a stack ``(batch, m, n)``."""
    batch = matrices.update.shape[0]
    if batch == 1:
        new, state, now = stage(jax.tree.map(lambda x: x[0], matrices), shared)
        return new[None], [x[None] for x in state], now

    def body(_: None, matrix: Matrices):
        new, state, now = stage(matrix, shared)
        return None, (new, state, now)

    _, (new, state, now) = jax.lax.scan(body, None, matrices)
    return new, state, [x[-1] for x in now]


def _at_once(stage: Stage, dims: MatrixDims, shared: list[Any], group: list[Parameter]):
    """All matrices as one stack, or as a few large ones."""
    per_chunk = max(1, CHUNK_BYTES // max(1, group[0].update.nbytes))
    results, now = [], shared
    for start in range(0, len(group), per_chunk):
        chunk = [p._replace(dims=dims) for p in group[start : start + per_chunk]]
        transposed = chunk[0].stored_transposed()
        stacks = [p.matrices(transposed) for p in chunk]
        joined = jax.tree.map(lambda *xs: jnp.concatenate(xs), *stacks) if len(stacks) > 1 else stacks[0]
        new, state, now = stage(joined, shared, transposed=transposed)
        batch = stacks[0].update.shape[0]
        for i, parameter in enumerate(chunk):
            part = slice(i * batch, (i + 1) * batch)
            results.append((parameter.from_matrices(new[part], transposed), [x[part] for x in state]))
    return results, now
