# SPDX-License-Identifier: Apache-2.0
"""Parameters split into their output blocks, and put together again.

``groups_of`` returns which blocks are computed as one stack.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from normpre_optax.linalg.batches import Groups, grouped
from normpre_optax.linalg.platforms import platform
from normpre_optax.linalg.products import at_least_float32
from normpre_optax.parameters.dims import (
    MatrixDims,
    OutputBlock,
    blocks_of,
    split_axes,
)
from normpre_optax.parameters.rules import assigned
from normpre_optax.sharding.placement import (
    mesh_of,
    sharded_like,
    spec_of,
    unsharded,
    without_axis,
)
from normpre_optax.trees import DimsTree, PyTree


class Block(NamedTuple):
    """A parameter, or one of its output blocks, in at least float32."""

    name: str
    dims: MatrixDims
    sharding: PartitionSpec | None  # None is unknown
    u: jax.Array
    w: jax.Array | None
    rest: Sequence[Any]  # arrays and numbers of further trees


def split_blocks(
    updates: PyTree, params: PyTree, matrix_dims: DimsTree, *trees: PyTree
) -> tuple[list[Block], Callable[[list[jax.Array]], Any]]:
    """Split a tree of updates into blocks.

    Args:
        updates: tree of the updates.
        params: tree of the parameters, or None.
        matrix_dims: which axes are inputs and outputs.
        *trees: trees with a leaf for every update; these leaves are split too.

    Returns:
        The blocks, and the function that builds the tree of new updates from one array
        per block.
    """
    specs = list(assigned(updates, params, matrix_dims).values())
    leaves, treedef = jax.tree.flatten(updates)
    weights = [None] * len(leaves)
    if params is not None:
        weights = jax.tree.leaves(params)
    others = [jax.tree.leaves(tree) for tree in trees]
    blocks: list[Block] = []
    counts = []
    for spec, u, w, *rest in zip(specs, leaves, weights, *others, strict=True):
        sharding = spec_of(u, spec.sharding)
        new = _blocks_of_parameter(spec.path, spec.dims, sharding, u, w, rest)
        blocks += new
        counts.append(len(new))

    def rebuilt(new: list[jax.Array]) -> Any:
        arrays = iter(new)
        out = []
        for spec, u, count in zip(specs, leaves, counts, strict=True):
            parts = [next(arrays) for _ in range(count)]
            whole = parts[0]
            if count > 1:
                joined = jnp.concatenate(parts, _first_output(u, spec.dims))
                # The blocks were gathered along this axis; the parameter may be
                # sharded.
                whole = sharded_like(joined, u)
            out.append(whole.astype(u.dtype))
        return treedef.unflatten(out)

    return blocks, rebuilt


def _blocks_of_parameter(
    path: str,
    dims: MatrixDims,
    sharding: PartitionSpec | None,
    u: jax.Array,
    w: jax.Array | None,
    rest: Sequence[Any],
) -> list[Block]:
    """Return one block per output block of a parameter."""
    output_blocks = blocks_of(u.shape, dims)
    count = len(output_blocks)
    if count > 1 and sharding is not None:
        # `_split` gathers the axis that is split.
        sharding = without_axis(sharding, _first_output(u, dims))
    parts = [_split(x, dims, output_blocks) for x in (u, w, *rest)]
    blocks = []
    for i, own in enumerate(output_blocks):
        name = path
        if count > 1:
            name = f"{path}/{i}"
        own_u, own_w, *own_rest = [split[i] for split in parts]
        blocks.append(Block(name, own.dims, sharding, own_u, own_w, own_rest))
    return blocks


def _first_output(x: jax.Array, dims: MatrixDims) -> int:
    """Return the first output axis, along which blocks are split."""
    _, outputs, _ = split_axes(x.ndim, dims)
    return outputs[0]


def _split(x: Any, dims: MatrixDims, blocks: list[OutputBlock]) -> list[Any]:
    """Split an array with the outputs of a parameter into blocks; repeat a number."""
    count = len(blocks)
    if x is None or jnp.ndim(x) == 0:
        return [x] * count
    x = at_least_float32(x)
    if count == 1:
        return [x]
    axis = _first_output(x, dims)
    if x.shape[axis] == count:  # one entry per block
        return jnp.split(x, count, axis)
    x = unsharded(x, axis)
    parts = []
    for block in blocks:
        start = block.at.start
        stop = block.at.stop
        parts.append(jax.lax.slice_in_dim(x, start, stop, axis=axis))
    return parts


def groups_of(blocks: Sequence[Block]) -> Groups:
    """Return which blocks are computed as one stack: on a GPU, those of one shape.

    Every kernel of a GPU has a cost. Elsewhere, each block is computed by itself.
    """
    single = grouped(range(len(blocks)))
    if platform() != "gpu":
        return single
    is_known = None not in [block.sharding for block in blocks]
    if not is_known and mesh_of([block.u for block in blocks]) is not None:
        # The blocks of a stack could have different shardings.
        return single
    return grouped((x.dims, x.u.shape, x.u.dtype, x.sharding) for x in blocks)
