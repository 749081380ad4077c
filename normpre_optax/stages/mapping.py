# SPDX-License-Identifier: Apache-2.0
"""Apply a function to all matrices: one by one, or to one stack per shape."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import Tracer

from normpre_optax.linalg.batches import join, separate
from normpre_optax.parameters.dims import MatrixDims
from normpre_optax.stages.blocks import Block, groups_of, split_blocks
from normpre_optax.trees import DimsTree, PyTree

# f(update, weight, dims, *rest) of one matrix or block.
OfBlock = Callable[..., Any]


def map_matrices(
    f: OfBlock,
    updates: PyTree,
    params: PyTree,
    matrix_dims: DimsTree,
    *trees: PyTree,
    stacked: bool = False,
) -> Any:
    """Apply ``f`` to every parameter, or to each of its output blocks.

    Args:
        f: ``(update, weight, dims, *leaves of trees) -> update``.
        updates: tree of the updates.
        params: tree of the parameters, or None.
        matrix_dims: which axes are inputs and outputs.
        *trees: trees with a leaf for every update.
        stacked: whether a GPU computes one stack per shape: next to a spectral stage,
            which stacks them anyway.

    Returns:
        The tree of new updates.
    """
    blocks, rebuilt = split_blocks(updates, params, matrix_dims, *trees)
    new = by_shape(f, blocks) if stacked else one_by_one(f, blocks)
    return rebuilt(new)


def one_by_one(f: OfBlock, blocks: Sequence[Block]) -> list[Any]:
    """Return ``f(u, w, dims, *rest)`` of every block."""
    if blocks and isinstance(blocks[0].u, Tracer):
        # Inside of jit, traced and lowered once per shape.
        f = jax.jit(f, static_argnums=2)
    return [f(block.u, block.w, block.dims, *block.rest) for block in blocks]


def by_shape(f: OfBlock, blocks: Sequence[Block]) -> list[Any]:
    """Return the same as ``one_by_one``, from one stack for each of ``groups_of``."""
    groups = groups_of(blocks)
    if len(groups) == len(blocks):
        return one_by_one(f, blocks)
    stacks = join([(x.u, x.w, *x.rest) for x in blocks], groups)
    new = []
    for members, stack in zip(groups, stacks, strict=True):
        new.append(_of_stack(f, blocks[members[0]].dims, stack))
    return separate(new, groups)


def _of_stack(f: OfBlock, dims: MatrixDims, stack: tuple) -> Any:
    """Return ``f`` of blocks with equal axes, in one stack of each argument."""

    def of_one(u, w, *rest):
        return f(u, w, dims, *rest)

    return jax.vmap(of_one)(*stack)
